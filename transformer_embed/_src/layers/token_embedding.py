"""Token ids as rows of a table, and the output layer over it."""

from collections.abc import Callable
from typing import Any, Literal

import haiku as hk
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike, Ids
from transformer_embed._src.layers.config import EmbedderConfig, OutputConfig
from transformer_embed._src.layers.parameters import Initializer, as_initializer
from transformer_embed._src.tokens.lookup import as_table, look_up
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
        normal = hk.initializers.RandomNormal(self.config.stddevs.tokens)
        self.w_init = as_initializer(w_init, normal)

    def __call__(self, ids: ArrayLike) -> Float[Array, "... d"]:
        """Embeds ids [...], integers, as [..., d_model] of `dtype`."""
        rows, table_dtype = self._scaled_rows(arguments.as_int32("ids", ids))
        return rows.astype(table_dtype if self.config.dtype is None else self.config.dtype)

    def output(self) -> OutputLayer:
        """The output layer of the config, for `linear_logits` and the losses."""
        return output_layer(self.config, self._parameter)

    def _scaled_rows(self, ids: Ids) -> tuple[Float[Array, "... d"], jnp.dtype]:
        """The scaled rows in float32 or wider, and the dtype of the table."""
        config = self.config
        table = as_table(f"{self.name}/embeddings", self._parameter("embeddings"))
        special = config.pad_id, config.out_of_range
        rows = look_up(table, ids, *special, config.lookup_style, config.row_order)
        return arguments.widened(rows) * config.factor, table.dtype

    def _parameter(self, name: str) -> Any:
        config = self.config
        w_init = {
            "embeddings": self.w_init,
            "output_embeddings": hk.initializers.RandomNormal(config.stddevs.output),
            "output_bias": jnp.zeros,
        }
        width = () if name == "output_bias" else (config.d_model,)
        shape = (config.rows, *width)
        return hk.get_parameter(name, shape, config.param_dtype, w_init[name])


def output_layer(config: EmbedderConfig, parameter: Callable[[str], Any]) -> OutputLayer:
    """The output layer of a config; `parameter` returns the parameter of a name."""
    output = config.output
    if output is None:
        want = (
            "config.output, an OutputConfig (a loaded model's `no_output` says why it has none; "
            "te.OutputLayer takes other weights)"
        )
        raise arguments.value_error("output", want, "None")
    # An untied model, too, has a table of tokens.
    name, table = "embeddings", parameter("embeddings")
    if output.tied and config.spread:
        want = "False for a tied output layer (or output=None, or te.OutputConfig(tied=False))"
        raise arguments.value_error("spread", want, True)
    if not output.tied:
        name, table = "output_embeddings", parameter("output_embeddings")
    return OutputLayer(
        as_table(name, table),
        arguments.as_floats("output_bias", parameter("output_bias")) if output.bias else None,
        softcap=output.softcap,
        scale=output.scale,
        pad_id=config.pad_id,
        vocab_size=None if config.rows == config.vocab_size else config.vocab_size,
    )
