"""The description of an input layer and its output layer, checked once."""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from transformer_embed._src import arguments
from transformer_embed._src.array_types import DTypeLike
from transformer_embed._src.positions.schemes import PositionScheme, Sinusoidal
from transformer_embed._src.tables.row_order import RowOrder
from transformer_embed._src.tokens.lookup import LOOKUP_STYLES, OUT_OF_RANGE

# The `scale` that is the square root of the width.
SQRT_D_MODEL = "sqrt_d_model"


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """Describes an output layer, for `EmbedderConfig` and `TokenEmbedding`.

    `Embedder.output` and the modules' `output` make the `OutputLayer` that it describes, with the
    config's `pad_id`.

    Args:
        tied: True: its table is the token table. False: it has a table of its own, the parameter
            `output_embeddings`, of the token table's shape.
        bias: whether a number is added for each id, the parameter `output_bias`, [vocab_size], or
            more if `row_multiple` adds rows.
        softcap, scale: as in `OutputLayer`.

    Raises:
        ValueError: softcap or scale is not above 0.

    Example:
        >>> import transformer_embed as te
        >>> gemma2 = te.OutputConfig(softcap=30.0)
        >>> te.EmbedderConfig(vocab_size=256, d_model=64, output=gemma2).output.tied
        True

    Source:
        Press and Wolf, "Using the Output Embedding to Improve Language Models" (2017),
        https://arxiv.org/abs/1608.05859
    """

    tied: bool = True
    bias: bool = False
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self):
        arguments.convert_fields(
            self,
            tied=arguments.flag,
            bias=arguments.flag,
            softcap=arguments.positive,
            scale=arguments.positive,
        )


def as_scale(name: str, value: Any) -> float | str:
    """A number above 0, or the word for the square root of the width."""
    if value is None or isinstance(value, str):
        if value != SQRT_D_MODEL:
            want = f"a number above 0 (1.0 leaves rows as they are) or {SQRT_D_MODEL!r}"
            raise arguments.value_error(name, want, repr(value))
        return SQRT_D_MODEL
    return arguments.positive(name, value)


class Stddevs(NamedTuple):
    """The standard deviations with which tables are drawn."""

    tokens: float
    added: float  # learned positions and token types
    output: float  # an output layer's own table


@dataclasses.dataclass(frozen=True)
class EmbedderConfig:
    """Describes an input layer, for `Embedder` and `TransformerEmbedding`.

    It is frozen and hashable, and its fields are checked. Equal configs share their compiled
    functions. `dataclasses.replace` makes a changed copy.

    Args:
        vocab_size: number of token ids, at least 1.
        d_model: width of the result, at least 1.
        scheme: `Sinusoidal(...)`, `SinusoidalGrid(...)`, `Learned(max_len=...)`, or another
            `PositionScheme`. None: no positions are added.
        dropout_rate: in [0, 1); 0.1 in Vaswani et al. (2017).
        pad_id: the id of padding, whose row of the token table reads as zeros; see
            `TokenEmbedding`. Padding is never predicted, and positions count from the first token
            of each row. (Padding has a position too, see the scheme's `at_padding`; the mask hides
            it.) None: no padding.

            It must not occur in a text. If texts are padded with the id that ends them, leave
            pad_id out, and make positions and masks with `TokenPositions.from_lengths`.

            Each row has positions of its own: on a CPU, evaluation with sinusoids takes 1.2 to 1.8
            times as long. If padding is on the right, `positions=np.arange(length)` avoids this and
            gives tokens the same positions.
        scale: a number above 0 that token rows are multiplied by; 1.0 leaves them as they are.
            "sqrt_d_model": the square root of their width, which is d_model unless
            `embedding_width` is set.
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
        output: the output layer. None: there is none, and asking for it raises an error.
        init_stddev: standard deviation of all tables when they are drawn, a number above 0 (0.02 in
            BERT, GPT-2 and Llama: initializer_range). None: token vectors enter with standard
            deviation 1/2, so their rows are drawn with s = 1 / (2 * m) for the factor m of `scale`.
            If the output layer is tied, s is at most 1 / (o * sqrt(w)) and 2 / sqrt(o * w * m), or
            8 / (o * w) with a layer norm, for the factor o of `output.scale` and w = table_width:
            so a token does not predict itself, and the first loss is about log(vocab_size).
            Learned positions and token types have m * s / 2, and an output layer's own table has
            1 / (2 * o * sqrt(w)). The page Performance has measurements.
        row_multiple: the token tables have a number of rows that is a multiple of it, so that the
            devices of a mesh divide them: 128 fits most meshes. The rows past the vocabulary are
            never read nor predicted, and get no gradient.
        spread: whether the rows of neighbouring ids lie far apart in the token table. Low ids are
            usually the frequent ones, and a mesh that splits the rows then has as many of them on
            each device. The order does not depend on the mesh. It mixes best if row_multiple is a
            power of two of at least the number of devices, up to 4096. A tied output layer needs
            False.

    Raises:
        ValueError: a field is out of range.

    Example:
        >>> import transformer_embed as te
        >>> te.EmbedderConfig(vocab_size=256, d_model=64, pad_id=0).scheme.layout
        'interleaved'
    """

    vocab_size: int
    d_model: int
    scheme: PositionScheme | None = Sinusoidal()
    dropout_rate: float = 0.0
    pad_id: int | None = None
    scale: float | Literal["sqrt_d_model"] = "sqrt_d_model"
    num_token_types: int | None = None
    layer_norm_eps: float | None = None
    embedding_width: int | None = None
    out_of_range: str = "nan"
    lookup_style: str = "gather"
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike | None = None
    output: OutputConfig | None = OutputConfig()
    init_stddev: float | None = None
    row_multiple: int = 1
    spread: bool = False

    def __post_init__(self):
        arguments.convert_fields(
            self,
            vocab_size=arguments.size,
            d_model=arguments.size,
            dropout_rate=arguments.rate,
            pad_id=arguments.int32,
            scale=as_scale,
            num_token_types=arguments.size,
            layer_norm_eps=arguments.positive,
            embedding_width=arguments.size,
            out_of_range=functools.partial(arguments.choice, choices=OUT_OF_RANGE),
            lookup_style=functools.partial(arguments.choice, choices=LOOKUP_STYLES),
            param_dtype=arguments.floating_dtype,
            dtype=arguments.floating_dtype,
            init_stddev=arguments.positive,
            row_multiple=arguments.size,
            spread=arguments.flag,
        )
        want = "te.OutputConfig(...), or None"
        arguments.instance("output", self.output, OutputConfig | None, want)
        # After the conversions above, because a scheme is checked against the width.
        if self.scheme is not None:
            want = "a PositionScheme, such as te.Learned(max_len=512), or None"
            arguments.instance("scheme", self.scheme, PositionScheme, want)
            self.scheme.check(self.table_width)
            has_pad_id = self.scheme.pad_id is not None or self.pad_id is not None
            if self.scheme.at_padding is not None and not has_pad_id:
                want = "the id of padding, since the scheme's at_padding is set"
                raise arguments.value_error("pad_id", want, "None")

    @property
    def table_width(self) -> int:
        """The width of the tables, and of the input of the output layer."""
        return self.d_model if self.embedding_width is None else self.embedding_width

    @property
    def rows(self) -> int:
        """The number of rows of the token tables."""
        return -(-self.vocab_size // self.row_multiple) * self.row_multiple

    @property
    def row_order(self) -> RowOrder | None:
        """Which row of the token table holds which id; None: row i holds id i, without others."""
        is_plain = self.rows == self.vocab_size and not self.spread
        return None if is_plain else RowOrder(self.vocab_size, self.spread)

    @property
    def factor(self) -> float:
        """The number that token rows are multiplied by."""
        return math.sqrt(self.table_width) if isinstance(self.scale, str) else self.scale

    @property
    def stddevs(self) -> Stddevs:
        """The standard deviations with which tables are drawn; see `init_stddev`."""
        if self.init_stddev is not None:
            return Stddevs(self.init_stddev, self.init_stddev, self.init_stddev)
        output = self.output or OutputConfig(tied=False)
        # From an x of unit variance, a table of this size makes logits of unit variance.
        unit_logits = 1 / (output.scale * math.sqrt(self.table_width))
        tokens = 0.5 / self.factor
        if output.tied:
            # A token first predicts itself. Beside noise of size 1, its own logit is at most
            # output.scale * factor * width * tokens**2, which the last bound keeps below 4; behind
            # a norm it is output.scale * width * tokens / sqrt(2), kept below 6.
            own = output.scale * self.table_width
            has_norm = self.layer_norm_eps is not None
            most = 8 / own if has_norm else 2 / math.sqrt(own * self.factor)
            tokens = min(tokens, unit_logits, most)
        return Stddevs(tokens, self.factor * tokens / 2, unit_logits / 2)
