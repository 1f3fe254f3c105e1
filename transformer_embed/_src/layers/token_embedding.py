"""Token ids as rows of a table, and the output layer over it."""

from typing import Literal

import haiku as hk
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.layers.config import EmbedderConfig, OutputConfig
from transformer_embed._src.layers.embed import output_layer, token_rows
from transformer_embed._src.layers.module_parameters import (
    Initializer,
    Leaves,
    as_initializer,
    parameters_of,
)
from transformer_embed._src.tokens.output_layer import OutputLayer


class TokenEmbedding(hk.Module):
    """Embeds token ids as rows of a table times sqrt(d_model), with an output layer.

    The table is the parameter `embeddings`, [vocab_size, d_model], as in hk.Embed, so checkpoints
    of hk.Embed can be loaded. (`row_multiple` may add rows.) The output layer reads it too, or the
    parameters that it adds.

    Args:
        vocab_size: number of rows, at least 1.
        d_model: width of a row, at least 1.
        scale: a number above 0 that rows are multiplied by, or "sqrt_d_model" for the square root
            of d_model; 1.0 leaves them as they are. The
            product is in float32, so the factor is never rounded to 16 bits.
        pad_id: the id of padding. Its row reads as zeros and gets no gradient, whatever the
            initialiser or weight decay do, and it is never predicted. It may be outside the
            vocabulary. None: no padding.
        out_of_range: `"nan"`, `"clip"` or `"zero"`; see `lookup`.
        lookup_style: `"gather"` or `"one_hot"`; see `lookup`.
        output: the output layer; see `EmbedderConfig`.
        init_stddev: standard deviation of the tables when they are drawn; see `EmbedderConfig`.
        w_init: initialiser of the token table. None: normal, as init_stddev says.
        param_dtype: of the parameters.
        row_multiple, spread: see `EmbedderConfig`.
        dtype: of the result. None: the dtype of the table, after a Haiku mixed-precision policy has
            cast it.
        name: of the module.

    Raises:
        ValueError: a size below 1, an unknown out_of_range or lookup_style.

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
        vocab_size: int,
        d_model: int,
        *,
        scale: float | Literal["sqrt_d_model"] = "sqrt_d_model",
        pad_id: int | None = None,
        out_of_range: str = "nan",
        lookup_style: str = "gather",
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
        # A config checks and converts the arguments, most of which it has too.
        self.config = EmbedderConfig(
            vocab_size,
            d_model,
            scheme=None,
            scale=scale,
            pad_id=pad_id,
            out_of_range=out_of_range,
            lookup_style=lookup_style,
            param_dtype=param_dtype,
            row_multiple=row_multiple,
            spread=spread,
            dtype=dtype,
            output=output,
            init_stddev=init_stddev,
        )
        parameters = parameters_of(self.config)["token_embedding"]
        table = parameters["embeddings"]
        parameters["embeddings"] = table._replace(init=as_initializer(w_init, table.init))
        self._leaves = Leaves(parameters)

    def __call__(self, ids: ArrayLike) -> Float[Array, "... d"]:
        """Embeds ids [...], integers, as [..., d_model] of `dtype`."""
        ids = arguments.as_int32("ids", ids)
        rows, table_dtype = token_rows(self.config, self._leaves, ids)
        return rows.astype(table_dtype if self.config.dtype is None else self.config.dtype)

    def output(self) -> OutputLayer:
        """The output layer of the config, for `linear_logits` and the losses."""
        return output_layer(self.config, self._leaves)
