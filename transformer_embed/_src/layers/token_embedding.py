"""Embeds token ids as rows of a table, as a module that has an output layer too."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import haiku as hk
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.layers.config import EmbedderConfig, OutputConfig
from transformer_embed._src.layers.embed import output_layer, token_rows
from transformer_embed._src.layers.module_parameters import (
    Initializer,
    ModuleParameters,
    Parameters,
    as_initializer,
    parameters_of,
)
from transformer_embed._src.tables.row_order import rows_of_nearest_ids
from transformer_embed._src.tokens.lookup import as_table
from transformer_embed._src.tokens.output_layer import OutputLayer


class TokenEmbedding(hk.Module):
    """Embeds token ids as rows of a table times sqrt(d_model), and has an output layer.

    Use it in a model that adds positions itself, or in the place of `hk.Embed`. The table is the
    parameter `embeddings`, [vocab_size, d_model], as in `hk.Embed`, so you can load checkpoints of
    `hk.Embed`. (`row_multiple` may add rows.) The method `output` returns an output layer, which
    uses the same table if `output.tied` is True, and otherwise a table of its own.

    To replace `hk.Embed` in a program, give the same name and the same initializer, and do not
    scale:

        hk.Embed(vocab_size, embed_dim)
        te.TokenEmbedding(vocab_size, embed_dim=embed_dim, scale=1.0, name="embed",
                          w_init=hk.initializers.TruncatedNormal())

    Haiku names a module `hk.Embed` by its class: "embed", and "embed_1" for a second one. With
    `name="embed"`, a `TokenEmbedding` gets the same names, so old checkpoints fit. For the same
    seed, the initial values are the same, too. `TokenEmbedding` has the attributes of `hk.Embed`
    that programs read: `vocab_size`, `embed_dim`, `embeddings` and `lookup_style`. You can also
    keep `hk.Embed`, and read its table by
    `te.lookup(hk.Embed(vocab_size, embed_dim).embeddings, ids)`. Then the names of parameters stay
    the same, an id outside the vocabulary returns NaN, and you can train the table with `te.rows`.

    Args:
        vocab_size: The number of ids, at least 1. You may leave it out if you pass an
            `embedding_matrix`.
        d_model: The width of a table row, at least 1. You may leave it out if you pass an
            `embed_dim` or an `embedding_matrix`.
        embed_dim: Another name for `d_model`, as in `hk.Embed`.
        embedding_matrix: The initial values of the table. Shape [vocab_size, d_model]. If None, the
            initial values are random numbers.
        scale: A number above 0 that table rows are multiplied by, or "sqrt_d_model" for the square
            root of `d_model`. 1.0 leaves the rows as they are. The product is computed in float32,
            so the factor is never rounded to 16 bits.
        pad_id: The id of padding. The vector of padding is zeros, and the table row of padding gets
            no gradient, whatever values the initializer or weight decay give to the row. Padding is
            never predicted. `pad_id` may lie outside the vocabulary, such as -1. If None, no id is
            padding.
        out_of_range: What you get for an id outside the vocabulary: `"nan"`, `"clip"` or `"zero"`.
            See `lookup`.
        lookup_style: How table rows are read: `"gather"` or `"one_hot"`; see `lookup`. A member of
            `hk.EmbedLookupStyle`, or the name of a member, works too.
        output: The description of the output layer. If None, there is no output layer, and the
            method `output` raises an error.
        init_stddev: The standard deviation of the initial values of the tables. If None,
            `EmbedderConfig` says which values are used.
        w_init: The initializer of the token table. If None, the initial values are normal numbers
            with the standard deviation `init_stddev`.
        param_dtype: The dtype of the parameters.
        row_multiple, spread: How many rows the table has, and in which order, so that the rows can
            be split evenly over devices. See `EmbedderConfig`.
        dtype: The dtype of the result. If None, it is the dtype of the table, after a Haiku
            mixed-precision policy has cast it.
        name: The name of the module.

    Raises:
        TypeError: A size is missing, a size is not an int, or `embedding_matrix` is not floating.
        ValueError: A size is below 1, or two arguments give different sizes, such as `d_model` and
            `embed_dim`. `out_of_range` or `lookup_style` is not one of the listed values. Both
            `embedding_matrix` and `w_init` are passed.

    Example:
        >>> import haiku as hk, jax
        >>> import transformer_embed as te
        >>> embed = hk.without_apply_rng(hk.transform(lambda ids: te.TokenEmbedding(100, 64)(ids)))
        >>> params = embed.init(jax.random.key(0), [[1, 2, 3]])
        >>> embed.apply(params, [[1, 2, 3]]).shape
        (1, 3, 64)

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.4,
        https://arxiv.org/abs/1706.03762
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        d_model: int | None = None,
        *,
        embed_dim: int | None = None,
        embedding_matrix: ArrayLike | None = None,
        scale: float | Literal["sqrt_d_model"] = "sqrt_d_model",
        pad_id: int | None = None,
        out_of_range: str = "nan",
        lookup_style: str | hk.EmbedLookupStyle = "gather",
        output: OutputConfig | None = OutputConfig(),
        init_stddev: float | None = None,
        w_init: Initializer | None = None,
        param_dtype: DTypeLike = jnp.float32,
        row_multiple: int = 1,
        spread: bool = False,
        dtype: DTypeLike | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        matrix = _as_matrix(embedding_matrix, w_init)
        width = _width(d_model, embed_dim)
        # Most arguments are also fields of `EmbedderConfig`, which checks and converts them.
        self.config = EmbedderConfig(
            vocab_size=_size_or_matrix_size("vocab_size", vocab_size, matrix, axis=0),
            d_model=_size_or_matrix_size("d_model", width, matrix, axis=1),
            scheme=None,
            scale=scale,
            pad_id=pad_id,
            out_of_range=out_of_range,
            lookup_style=_from_haiku_style(lookup_style),
            param_dtype=param_dtype,
            row_multiple=row_multiple,
            spread=spread,
            dtype=dtype,
            output=output,
            init_stddev=init_stddev,
        )
        # Programs read these attributes of hk.Embed.
        self.vocab_size = self.config.vocab_size
        self.embed_dim = self.config.d_model
        self.lookup_style = lookup_style
        # This makes and reads the token table, and the parameters of the output layer.
        parameters = _parameters(self.config, w_init, matrix)
        self._module_parameters = ModuleParameters(parameters)

    @property
    def embeddings(self) -> Float[Array, "v d"]:
        """The table before it is multiplied by `scale`, [vocab_size, d_model] or more rows."""
        return self._module_parameters["embeddings"]

    def __call__(self, ids: ArrayLike) -> Float[Array, "... d"]:
        """Embeds ids, integers of shape [...], as vectors [..., d_model] of `dtype`."""
        ids = arguments.as_int32("ids", ids)
        rows = token_rows(self.config, self._module_parameters, ids)
        dtype = rows.table_dtype if self.config.dtype is None else self.config.dtype
        return rows.scaled.astype(dtype)

    def output(self) -> OutputLayer:
        """Returns the output layer of the module, for `linear_logits` and the losses."""
        return output_layer(self.config, self._module_parameters)


def _parameters(
    config: EmbedderConfig, w_init: Initializer | None, matrix: Array | None
) -> Parameters:
    """Describes the parameters of the module, with the user's initial values of the table.

    These are `w_init` or the rows of `matrix`. If both are None, the config decides.
    """
    parameters = parameters_of(config)["token_embedding"]
    table = parameters["embeddings"]
    if matrix is None:
        # The user's initializer, or the default if it is None.
        init = as_initializer(w_init, table.init)
    else:
        init = functools.partial(_table_of_rows, matrix, config)
    parameters["embeddings"] = table._replace(init=init)
    return parameters


def _as_matrix(embedding_matrix: ArrayLike | None, w_init: Initializer | None) -> Array | None:
    """Converts the matrix of initial values. Raises a ValueError if there is a `w_init` too."""
    if embedding_matrix is None:
        return None
    arguments.check_left_out("w_init", w_init, "embedding_matrix has the initial values")
    return as_table("embedding_matrix", embedding_matrix)


def _width(d_model: int | None, embed_dim: int | None) -> int | None:
    """Returns the width that the user passes by one of two names, or None.

    Raises a ValueError if the user passes two different widths.
    """
    if d_model is not None and embed_dim is not None:
        arguments.check_same("embed_dim", "another name for d_model", embed_dim, d_model)
    return embed_dim if d_model is None else d_model


def _size_or_matrix_size(name: str, size: int | None, matrix: Array | None, *, axis: int) -> Any:
    """Returns a size of the table, which the user may leave out if there is a matrix.

    Raises a ValueError if the size contradicts the matrix.
    """
    if matrix is None:
        return size
    if size is not None:
        arguments.check_same(name, "the size of embedding_matrix", size, matrix.shape[axis])
    return matrix.shape[axis]


def _from_haiku_style(lookup_style: Any) -> Any:
    """Returns the package's word for a lookup style of Haiku, and any other value as it is."""
    words = {"ARRAY_INDEX": "gather", "ONE_HOT": "one_hot"}
    if isinstance(lookup_style, hk.EmbedLookupStyle):
        return words[lookup_style.name]
    if isinstance(lookup_style, str):
        return words.get(lookup_style, lookup_style)
    return lookup_style


def _table_of_rows(
    rows: Float[Array, "n d"], config: EmbedderConfig, shape: Sequence[int], dtype: Any
) -> Float[Array, "v d"]:
    """Makes a table in which the row of id i is `rows[i]`, as the initializer of a parameter.

    `config.row_order` says which row an id has. Table rows without an id are zeros.
    """
    rows = rows.astype(dtype)
    if config.row_order is None:
        return rows
    ids = np.arange(config.vocab_size, dtype=np.int32)
    # The index of the table row of each id. (For ids outside the vocabulary, which do not occur
    # here, `rows_of_nearest_ids` returns the row of the nearest id.)
    row_indices = rows_of_nearest_ids(ids, config.rows, config.row_order)
    table = jnp.zeros(shape, dtype)
    return table.at[row_indices].set(rows)
