"""EmbedderConfig: the description of an input layer, checked once."""

import dataclasses
import functools
import numbers

import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import DTypeLike
from transformer_embed._src.functional.lookup import LOOKUP_STYLES, OUT_OF_RANGE
from transformer_embed._src.layers.schemes import Scheme, Sinusoidal


@dataclasses.dataclass(frozen=True)
class EmbedderConfig:
    """Describes an input layer, for `make_embedder` and `TransformerEmbedding`.

    It is frozen and hashable, and its fields are checked. Equal configs share their compiled
    functions. `dataclasses.replace` makes a changed copy.

    By default, padding is counted like tokens, so left padding shifts the positions of tokens. To
    count from the first token, give padding a position of its own:
    `scheme=te.Sinusoidal(at_padding=0)`.

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
        arguments.convert_fields(
            self,
            vocab_size=arguments.size,
            d_model=arguments.size,
            dropout_rate=arguments.rate,
            pad_id=arguments.int32,
            scale=_as_scale,
            num_token_types=arguments.size,
            layer_norm_eps=functools.partial(arguments.real, above=0),
            embedding_width=arguments.size,
            out_of_range=functools.partial(arguments.choice, choices=OUT_OF_RANGE),
            lookup_style=functools.partial(arguments.choice, choices=LOOKUP_STYLES),
            param_dtype=arguments.floating_dtype,
            dtype=arguments.floating_dtype,
            tied=arguments.flag,
        )
        if self.scheme is not None:
            if not isinstance(self.scheme, Scheme):
                want = "Sinusoidal(...), SinusoidalGrid(...), Learned(max_len=...) or None"
                raise arguments.type_error("scheme", want, repr(self.scheme))
            self.scheme._check(self.table_width)
            if self.scheme._lacks_pad_id and self.pad_id is None:
                want = "the id of padding, since the scheme's at_padding is set"
                raise arguments.value_error("pad_id", want, "None")

    @property
    def table_width(self) -> int:
        """The width of the tables, and of the input of the tied output layer."""
        return self.d_model if self.embedding_width is None else self.embedding_width


def _as_scale(name: str, scale: bool | float) -> bool | float:
    """A bool, or a number above 0.

    1.0 becomes False, because 1.0 == True and it would share True's compiled functions. The ints 0
    and 1 are ambiguous and raise an error.
    """
    is_bool = isinstance(scale, bool | np.bool_)
    is_ambiguous = isinstance(scale, numbers.Integral) and scale in (0, 1)
    if is_bool or is_ambiguous or not isinstance(scale, numbers.Real | np.floating):
        return arguments.flag(name, scale)
    return False if scale == 1 else arguments.real(name, scale, above=0)
