"""Defines the configs that describe an input layer and an output layer."""

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

# The value of `scale` that means the square root of the table's width.
SQRT_D_MODEL = "sqrt_d_model"


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """Describes an output layer, for `EmbedderConfig` and `TokenEmbedding`.

    Pass an `OutputConfig` as the argument `output` of `EmbedderConfig` or `TokenEmbedding`. Then
    call the method `output` of your layer. The method returns an `OutputLayer`, which you pass to a
    loss or to `linear_logits`. The `OutputLayer` has the `pad_id` of the input layer, so padding is
    never predicted.

    Args:
        tied: Whether the output layer uses the token table. If False, the output layer has a table
            of its own, the parameter `output_embeddings`, in the shape of the token table.
        bias: Whether a learned number is added to the logit of each id. The numbers are the
            parameter `output_bias`. Shape [vocab_size], or the number of table rows if
            `row_multiple` adds rows.
        softcap, scale: How logits are bounded and scaled. If `softcap` is None, logits are not
            bounded. `OutputLayer` has the formula.

    Raises:
        ValueError: `softcap` or `scale` is not above 0.

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


def as_token_scale(name: str, value: Any) -> float | str:
    """Checks the `scale` of token rows, and returns a float above 0 or `SQRT_D_MODEL`."""
    if value is not None and not isinstance(value, str):
        return arguments.positive(name, value)
    if value != SQRT_D_MODEL:
        want = f"a number above 0 (1.0 leaves rows as they are) or {SQRT_D_MODEL!r}"
        raise arguments.value_error(name, want, repr(value))
    return SQRT_D_MODEL


class Stddevs(NamedTuple):
    """Holds the standard deviations of the initial values of tables.

    Args:
        tokens: The deviation of the token table.
        added: The deviation of learned positions and token types, which are added to tokens.
        output: The deviation of the table of an untied output layer.
    """

    tokens: float
    added: float
    output: float


@dataclasses.dataclass(frozen=True)
class EmbedderConfig:
    """Describes an input layer, for `Embedder` and `TransformerEmbedding`.

    You make a config once, and pass it to all functions and modules of the layer. A config is
    frozen and hashable, so equal configs share compiled functions. To change a field, make a copy
    by `dataclasses.replace`.

    Args:
        vocab_size: The number of token ids, at least 1.
        d_model: The width of the result, at least 1.
        scheme: How positions are encoded. Pass `Sinusoidal(...)`, `SinusoidalGrid(...)`,
            `Learned(max_len=...)`, or a `PositionScheme` of your own. If None, no positions are
            added, as in models with rotary embeddings.
        dropout_rate: The rate of dropout on the sum of tokens, positions and token types, in [0,
            1). Vaswani et al. (2017) use 0.1.
        pad_id: The id of padding. Padding is never predicted, and positions count from the first
            token of each batch row. The token vector of padding is zeros, but the layer adds a
            position encoding to the zeros, so your attention mask must hide padding. (The argument
            `at_padding` of `Sinusoidal` and `Learned` sets the position of padding.) Pass only an
            id that never occurs inside a text. If your texts are padded with the id that ends a
            text, leave `pad_id` out, and make positions and masks with
            `TokenPositions.from_lengths`. If None, no id is padding.
        scale: The factor of the token vectors: a number above 0, or "sqrt_d_model" for the square
            root of the width of the table. (The width is `embedding_width` if you set this field,
            and otherwise `d_model`.) 1.0 leaves the table rows as they are.
        num_token_types: The number of token types. BERT has 2, the segments A and B. If None, the
            model has none.
        layer_norm_eps: The epsilon of a layer norm on the sum of tokens, positions and token types.
            BERT has 1e-12. If None, there is no norm.
        embedding_width: The width of the tables, if they are narrower or wider than the model, as
            in ALBERT. The sum of tokens, positions and token types then has this width, and a
            linear layer changes the width to `d_model`. If None, the tables have the width
            `d_model`.
        out_of_range: What you get for an id, a token type or a learned position outside the table:
            `"nan"`, `"clip"` or `"zero"`. See `lookup`.
        lookup_style: How rows of ids and token types are read: `"gather"` or `"one_hot"`. See
            `lookup`.
        param_dtype: The dtype of the tables and of the linear layer that `embedding_width` adds.
            The parameters of the layer norm are float32.
        dtype: The dtype of the result. If None, it is the dtype of the token table, after a Haiku
            mixed-precision policy has cast it.
        output: The description of the output layer. If None, there is no output layer, and the
            method `output` raises an error.
        init_stddev: The standard deviation of the initial values of all tables, a number above 0.
            BERT, GPT-2 and Llama have 0.02 (`initializer_range`). If None, the formulas in "Edge
            cases" give the standard deviation of each table. Training starts well with these
            values.
        row_multiple: A number that divides the number of rows of the token tables. If `vocab_size`
            is not a multiple, rows are added. For example, 129 ids with `row_multiple=128` get a
            table of 256 rows. Set it so that the devices of a mesh divide the rows evenly; 128 fits
            most meshes. The added rows are never read or predicted, and have gradients of 0. But
            they count in statistics of a whole table, so do not use an optimizer that computes the
            mean or the size of a whole table. For example, if 129 rows are padded to 256,
            `optax.clip_by_block_rms` takes a mean over 256 rows, and lets through updates 1.41
            times as large as without padding. A step of `optax.adafactor` is 0.71 times as large if
            the added rows are zeros, as in loaded and resized tables.
        spread: Whether the rows of neighbouring ids are far apart in the token table. Set True if
            the rows are split over many devices. The frequent ids are usually the lowest ones, so
            without spreading, the first device holds the rows of most tokens. With True, each
            device has about the same number of frequent ids. You keep using the same ids. The order
            of the rows does not depend on the mesh, so a checkpoint fits all meshes. For a good
            spread, also set the field `row_multiple`, which adds rows to the table. Use a power of
            two that is at least the number of devices and at most 4096, such as 128. If the output
            layer is tied, pass False.

    Raises:
        ValueError: A field is out of range, the position scheme does not fit the width of the
            tables, or the position scheme sets `at_padding` and there is no `pad_id`.

    Example:
        >>> import transformer_embed as te
        >>> te.EmbedderConfig(vocab_size=256, d_model=64, pad_id=0).scheme.layout
        'interleaved'

    Edge cases:
        - If `init_stddev` is None, token vectors start with the standard deviation 1/2, or less if
          the output layer is tied. Let m be the factor of `scale`, o the factor `output.scale`, and
          w the width of the tables. Then the token table has the standard deviation s = 1 / (2 *
          m). If the output layer is tied, s is at most 1 / (o * sqrt(w)). Without a layer norm, s
          is also at most 2 / sqrt(o * w * m), and with a layer norm, at most 8 / (o * w). With
          these bounds, a token does not predict itself, and the first loss is about
          log(vocab_size). Learned positions and token types have m * s / 2. The table of an untied
          output layer has 1 / (2 * o * sqrt(w)). The page Performance has measurements.
        - With a `pad_id`, positions differ between batch rows, so on a CPU, evaluation with
          sinusoids takes 1.2 to 1.8 times as long as without a `pad_id`. If padding is on the
          right, pass `positions=np.arange(length)`. This is faster, and each token gets the same
          position as without this argument.
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
            scale=as_token_scale,
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
        # A scheme is checked against the width, so this comes after the width is converted.
        if self.scheme is not None:
            self._check_scheme(self.scheme)

    def _check_scheme(self, scheme: PositionScheme) -> None:
        """Raises an error unless the scheme fits the width and the `pad_id` of this config."""
        want = "a PositionScheme, such as te.Learned(max_len=512), or None"
        arguments.instance("scheme", scheme, PositionScheme, want)
        scheme.check(self.table_width)
        has_pad_id = scheme.pad_id is not None or self.pad_id is not None
        if scheme.at_padding is not None and not has_pad_id:
            want = "the id of padding, since the scheme's at_padding is set"
            raise arguments.value_error("pad_id", want, "None")

    @property
    def table_width(self) -> int:
        """The width of the tables, and of the input of the output layer."""
        return self.d_model if self.embedding_width is None else self.embedding_width

    @property
    def rows(self) -> int:
        """The number of rows of the token tables: `vocab_size`, rounded up to `row_multiple`."""
        multiples = -(-self.vocab_size // self.row_multiple)
        return multiples * self.row_multiple

    @property
    def row_order(self) -> RowOrder | None:
        """Which row of the token table holds which id, or None if row i holds id i.

        If the table has more rows than ids, the order is not None.
        """
        has_row_for_each_id = self.rows == self.vocab_size
        if has_row_for_each_id and not self.spread:
            return None
        return RowOrder(vocab_size=self.vocab_size, is_spread=self.spread)

    @property
    def factor(self) -> float:
        """The number that token rows are multiplied by."""
        return math.sqrt(self.table_width) if isinstance(self.scale, str) else self.scale

    @property
    def stddevs(self) -> Stddevs:
        """The standard deviations of the initial values of tables.

        If `init_stddev` is None, they are computed as the edge cases of the class describe. The
        factors 1/2 in this method were compared with other factors in training. (See "Initial
        values" on the page Performance.)
        """
        if self.init_stddev is not None:
            return Stddevs(tokens=self.init_stddev, added=self.init_stddev, output=self.init_stddev)
        output = self.output or OutputConfig(tied=False)
        # If x has unit variance, a table of this deviation makes logits of unit variance.
        unit_logit_stddev = 1 / (output.scale * math.sqrt(self.table_width))
        # A token vector is a table row times the factor, and shall start with the deviation 1/2. So
        # the table row starts with 1/2 divided by the factor.
        token_stddev = 0.5 / self.factor
        if output.tied:
            # The table makes logits too, which start with at most unit variance.
            largest_stddev = self._largest_tied_stddev(output)
            token_stddev = min(token_stddev, unit_logit_stddev, largest_stddev)
        # Learned positions and token types start half as large as the token vectors that they are
        # added to.
        token_vector_stddev = self.factor * token_stddev
        added_stddev = token_vector_stddev / 2
        # The logits of an untied output layer start with the deviation 1/2.
        output_stddev = unit_logit_stddev / 2
        return Stddevs(tokens=token_stddev, added=added_stddev, output=output_stddev)

    def _largest_tied_stddev(self, output: OutputConfig) -> float:
        """Returns the deviation up to which a token does not predict itself in a tied model.

        The own logit of a token is the product of the token's vector with the token's table row. In
        a tied model, the vector is a multiple of the row, so the own logit grows with the width,
        but other logits grow only with the root of the width.
        """
        scaled_width = output.scale * self.table_width
        if self.layer_norm_eps is not None:
            # After a norm, the own logit is `scaled_width * stddev / sqrt(2)`. The bound keeps it
            # below 6.
            return 8 / scaled_width
        # Without a norm, the own logit is at most `scaled_width * factor * stddev**2` beside noise
        # of size 1. The bound keeps it at 4 at most.
        return 2 / math.sqrt(scaled_width * self.factor)
