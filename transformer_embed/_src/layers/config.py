"""EmbedderConfig: the description of an input layer, checked once."""

import dataclasses
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import DTypeLike
from transformer_embed._src.functional.lookup import LOOKUP_STYLES, OUT_OF_RANGE
from transformer_embed._src.layers.schemes import Scheme, Sinusoidal


@dataclasses.dataclass(frozen=True)
class EmbedderConfig:
    """Describes an input layer, for `make_embedder` and `TransformerEmbedding`; frozen, hashable
    and checked.

    Equal configs share their compiled functions. `dataclasses.replace` makes a changed copy.

    By default, padding is counted like tokens, so left padding shifts the positions of tokens. To
    count from the first token, set the padding id in the scheme too:
    `scheme=te.Sinusoidal(at_padding=0, pad_id=0)`.

    Args:
        vocab_size: number of token ids, at least 1.
        d_model: width of the result, at least 1.
        scheme: `Sinusoidal(...)`, `SinusoidalGrid(...)`, `Learned(max_len=...)`, or None: no
            positions are added.
        dropout_rate: in [0, 1).
        pad_id: the id of padding, whose row of the token table reads as zeros; see
            `TokenEmbedding`. Positions are added at padding too (the mask hides it). None: no
            padding.
        scale: True multiplies token rows by the square root of their width, False by 1, and a
            number above 0 by that number.
        num_token_types: number of token types (BERT's segments A and B: 2); None: the model has
            none.
        layer_norm_eps: epsilon of a layer norm over the sum (BERT: 1e-12); None: no norm.
        embedding_width: width of the tables if it is not d_model (ALBERT); None: d_model.
        out_of_range: `"nan"`, `"clip"` or `"zero"`, for ids, token types and learned positions; see
            `lookup`.
        lookup_style: `"gather"` or `"one_hot"`, for ids and token types; see `lookup`.
        param_dtype: of the tables and of the linear layer that `embedding_width` adds; the layer
            norm's parameters are float32.
        dtype: of the result. None: the dtype of the token table, after a Haiku mixed-precision
            policy has cast it.
        tied: whether the output layer's weights are the token table. If False, `logits` and
            `cross_entropy` raise an error. (`load_embedder` sets it to False for a model that has
            other weights there.)

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range.

    Example:
        >>> import transformer_embed as te
        >>> te.EmbedderConfig(vocab_size=256, d_model=64, pad_id=0).scheme.layout
        'interleaved'

    Source:
        See `TransformerEmbedding`.
    """

    vocab_size: int
    d_model: int
    scheme: Scheme | None = Sinusoidal()
    dropout_rate: float = 0.1
    pad_id: int | None = None
    scale: bool | float = True
    num_token_types: int | None = None
    layer_norm_eps: float | None = None
    embedding_width: int | None = None
    out_of_range: str = "nan"
    lookup_style: str = "gather"
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike | None = None
    tied: bool = True

    def __post_init__(self):
        given = [
            name
            for name in ("embedding_width", "num_token_types")
            if getattr(self, name) is not None
        ]
        for name in ("vocab_size", "d_model", *given):
            self._set_field(name, arguments.integer(name, getattr(self, name), at_least=1))
        if self.scheme is not None:
            if not isinstance(self.scheme, Scheme):
                want = "Sinusoidal(...), SinusoidalGrid(...), Learned(max_len=...) or None"
                raise TypeError(arguments.wanted("scheme", want, repr(self.scheme)))
            self.scheme.check(self.table_width)
        arguments.rate("dropout_rate", self.dropout_rate)
        if self.pad_id is not None:
            self._set_field("pad_id", arguments.int32("pad_id", self.pad_id))
        self._set_field("scale", checked_scale(self.scale))
        if self.layer_norm_eps is not None:
            self._set_field(
                "layer_norm_eps", arguments.real("layer_norm_eps", self.layer_norm_eps, above=0)
            )
        arguments.choice("out_of_range", self.out_of_range, OUT_OF_RANGE)
        arguments.choice("lookup_style", self.lookup_style, LOOKUP_STYLES)
        self._set_field("param_dtype", arguments.floating_dtype("param_dtype", self.param_dtype))
        if self.dtype is not None:
            self._set_field("dtype", arguments.floating_dtype("dtype", self.dtype))
        self._set_field("tied", arguments.flag("tied", self.tied))

    def _set_field(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def table_width(self) -> int:
        """The width of the tables, and of the input of the tied output layer."""
        return self.d_model if self.embedding_width is None else self.embedding_width


def checked_scale(scale: bool | float) -> bool | float:
    """A bool, or a number above 0.

    1.0 becomes False, because 1.0 == True and it would share True's compiled functions. The ints 0
    and 1 are ambiguous and raise an error.
    """
    is_number = isinstance(scale, numbers.Real | np.floating) and not isinstance(
        scale, bool | np.bool_
    )
    if not is_number or (isinstance(scale, numbers.Integral) and scale in (0, 1)):
        return arguments.flag("scale", scale)
    return False if scale == 1 else arguments.real("scale", scale, above=0)
