"""Scalings of rotary frequencies: the published formulas, in arbitrary precision."""

import dataclasses
import decimal
import functools
import math
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.positions import phase

_factors = functools.partial(arguments.entries, convert=arguments.positive)
# A field of this name has the same meaning in every scaling.
_POSITIVE = (
    "factor",
    "alpha",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
)
_CONVERTERS = dict.fromkeys(_POSITIVE, arguments.positive) | {
    "short_factor": _factors,
    "long_factor": _factors,
    # A length of 1 has no logarithm to divide by.
    "original_length": functools.partial(arguments.integer, at_least=2),
    "length": functools.partial(arguments.integer, at_least=0),
    "truncate": arguments.flag,
    "mscale": arguments.not_negative,
    "mscale_all_dim": arguments.not_negative,
}


class _Scaling:
    """What `scaled_frequencies` asks of a scaling."""

    attention_factor: float | None = None

    def __post_init__(self):
        arguments.convert_fields(self, **_CONVERTERS)

    def _usual_attention_factor(self) -> float:
        """The factor of cosines and sines if `attention_factor` is not set."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearScaling(_Scaling):
    """Position interpolation: divides every frequency by `factor`.

    Args:
        factor: how many times longer the context is than in training; above 0.

    Raises:
        TypeError: factor is not a Python number.
        ValueError: factor is not above 0.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> half_speed = te.LinearScaling(2.0)
        >>> rotated = te.apply_rotary([[[1.0, 0.0]]], [2], scaling=half_speed)
        >>> print(np.asarray(rotated).round(3))
        [[[0.54  0.841]]]

    Source:
        Chen et al., "Extending Context Window of Large Language Models via Positional
        Interpolation" (2023), section 2.3, https://arxiv.org/abs/2306.15595
    """

    factor: float

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """The frequencies, scaled; decimals, as they are in `phase.geometric_frequencies`."""
        return frequencies / Decimal(self.factor)


@dataclasses.dataclass(frozen=True)
class NTKScaling(_Scaling):
    """NTK-aware scaling: multiplies the base by `alpha ** (d / (d - 2))`, for d rotated channels.

    The highest frequency does not change; the lowest is divided by alpha. Dynamic scaling is that
    of the current length: `alpha = factor * length / original_length - (factor - 1)`, or 1 up to
    original_length, in the transformers library. Keys rotated for one length do not fit queries
    rotated for another.

    Args:
        alpha: how many times longer the context is than in training; above 0.

    Raises:
        TypeError: alpha is not a Python number.
        ValueError: alpha is not above 0.

    Example:
        >>> import transformer_embed as te
        >>> te.NTKScaling(8.0)
        NTKScaling(alpha=8.0)

    Source:
        bloc97 (2023), as given by Peng et al., "YaRN: Efficient Context Window Extension of Large
        Language Models" (2023), sections 3.1 and 3.3, https://arxiv.org/abs/2309.00071
    """

    alpha: float

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """The frequencies, scaled; decimals, as they are in `phase.geometric_frequencies`."""
        # (base * alpha ** (d / (d - 2))) ** (-2i / d)
        #     = base ** (-2i / d) * alpha ** (-i / (d / 2 - 1))
        pairs = len(frequencies)
        return frequencies * phase.geometric_frequencies(pairs, self.alpha, pairs - 1)


@dataclasses.dataclass(frozen=True)
class YarnScaling(_Scaling):
    """YaRN: keeps high frequencies, divides low ones by `factor`, with a linear ramp between.

    It also scales cosines and sines. With
    `index(n) = d * ln(original_length / (2 * pi * n)) / (2 * ln(base))`, the index of
    the frequency that makes n turns over the trained length, the ramp rises from 0 at
    max(index(beta_fast), 0) to 1 at min(index(beta_slow), d - 1), and

        frequency[i] = base ** (-2i / d) * (ramp[i] / factor + 1 - ramp[i])

    The attention factor is m(mscale) / m(mscale_all_dim), where m(s) = 0.1 * s * ln(factor) + 1,
    and 1 for a factor up to 1.

    Args:
        factor: how many times longer the context is than in training; above 0.
        original_length: the trained length, at least 2.
        beta_fast: frequencies that make at least this many turns over the trained length are kept;
            above beta_slow.
        beta_slow: frequencies that make at most this many turns are divided by factor; above 0.
        truncate: round the ends of the ramp outwards to integers (gpt-oss: False).
        mscale: in the formula above; the name is DeepSeek's.
        mscale_all_dim: in the formula above. (If either is 0 or missing, the transformers library
            uses the defaults, 1 and 0, for both.)
        attention_factor: replaces the formula; above 0. None: the formula.

    Raises:
        ValueError: an argument out of its range; when applied, a base that is not above 1.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> gpt_oss = te.YarnScaling(32.0, original_length=4096, truncate=False)
        >>> rotated = te.apply_rotary([[[1.0, 0.0]]], [0], base=150_000.0, scaling=gpt_oss)
        >>> print(np.asarray(rotated).round(3))
        [[[1.347 0.   ]]]

    Source:
        Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023),
        sections 3.2 and 3.4, https://arxiv.org/abs/2309.00071; mscale: DeepSeek-AI, "DeepSeek-V2"
        (2024), its published code, https://arxiv.org/abs/2405.04434
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if not self.beta_fast > self.beta_slow:
            want = f"a number above beta_slow, {self.beta_slow:g}"
            raise arguments.value_error("beta_fast", want, self.beta_fast)

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """The frequencies, scaled; decimals, as they are in `phase.geometric_frequencies`."""
        base = arguments.real("base", base, lowest=math.nextafter(1, 2), want="a number above 1")
        dim, log_base = 2 * len(frequencies), Decimal(base).ln()

        def index(turns: float) -> Decimal:
            return (
                dim * (self.original_length / (2 * phase.PI * Decimal(turns))).ln() / (2 * log_base)
            )

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low = low.to_integral_value(decimal.ROUND_FLOOR)
            high = high.to_integral_value(decimal.ROUND_CEILING)
        low, high = max(low, Decimal(0)), min(high, Decimal(dim - 1))
        # As in YaRN's code: a ramp without a width would divide by zero.
        if low == high:
            high += Decimal("0.001")
        ramp = (np.arange(dim // 2, dtype=object) - low) / (high - low)
        return _blended(frequencies, ramp, self.factor)

    def _usual_attention_factor(self) -> float:
        """See `_Scaling`."""
        log = max(Decimal(self.factor).ln(), Decimal(0)) / 10
        return float((Decimal(self.mscale) * log + 1) / (Decimal(self.mscale_all_dim) * log + 1))


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(_Scaling):
    """Llama 3.1's scaling: keeps high frequencies, divides low ones by `factor`, blends between.

    A frequency f makes `n = original_length * f / (2 * pi)` turns over the trained length, and
    becomes

        f * ((1 - s) / factor + s)
        s = (n - low_freq_factor) / (high_freq_factor - low_freq_factor), clipped to [0, 1]

    Args:
        factor: 8 in Llama 3.1, 32 in Llama 3.2; above 0.
        low_freq_factor: frequencies that make at most this many turns are divided by factor; above
            0.
        high_freq_factor: frequencies that make at least this many turns are kept; at least
            low_freq_factor, which leaves nothing to blend (Llama 4 Scout).
        original_length: the trained length, at least 2.

    Raises:
        ValueError: an argument out of its range.

    Example:
        >>> import transformer_embed as te
        >>> te.Llama3Scaling(8.0)
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)

    Source:
        Grattafiori et al., "The Llama 3 Herd of Models" (2024), https://arxiv.org/abs/2407.21783,
        and `apply_scaling` of its published code.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        super().__post_init__()
        lowest = self.low_freq_factor
        want = f"a number of at least low_freq_factor, {lowest:g}"
        arguments.real("high_freq_factor", self.high_freq_factor, lowest=lowest, want=want)

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """The frequencies, scaled; decimals, as they are in `phase.geometric_frequencies`."""
        low, high = Decimal(self.low_freq_factor), Decimal(self.high_freq_factor)
        turns = self.original_length * frequencies / (2 * phase.PI)
        # Equal bounds are a step.
        width = high - low or Decimal("1e-20")
        return _blended(frequencies, (high - turns) / width, self.factor)


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(_Scaling):
    """LongRoPE: divides each frequency by its own factor, and scales cosines and sines.

    The long factors are used if length > original_length, otherwise the short ones. Cosines and
    sines are multiplied by an attention factor, sqrt(1 + ln(factor) / ln(original_length)), or 1
    for a factor up to 1. The length is a Python int: only lengths on the other side of
    original_length recompile.

    Args:
        short_factor: d / 2 numbers above 0, for d rotated channels.
        long_factor: d / 2 numbers above 0.
        factor: how many times longer the context may be than in training; above 0. Phi-3:
            max_position_embeddings / original_max_position_embeddings.
        original_length: the trained length, at least 2.
        length: the current length, at least 0.
        attention_factor: replaces the formula; above 0. None: the formula.

    Raises:
        TypeError: an argument of another type; a length is traced or not a Python int.
        ValueError: an argument out of its range; when applied, a number of factors other than d /
            2.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> scaling = te.LongRopeScaling([1.0], [4.0], 32.0, original_length=4096, length=8192)
        >>> print(np.asarray(te.apply_rotary([[[1.0, 0.0]]], [0], scaling=scaling)).round(2))
        [[[1.19 0.  ]]]

    Source:
        Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024),
        section 3, https://arxiv.org/abs/2402.13753; the attention factor and the choice by length:
        Phi-3's published code.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    factor: float
    original_length: int
    length: int
    attention_factor: float | None = None

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """The frequencies, scaled; decimals, as they are in `phase.geometric_frequencies`."""
        name = "long_factor" if self.length > self.original_length else "short_factor"
        factors = getattr(self, name)
        what = "half as many numbers as rotated channels"
        arguments.check_same(name, what, len(factors), len(frequencies))
        return frequencies / [Decimal(factor) for factor in factors]

    def _usual_attention_factor(self) -> float:
        """See `_Scaling`."""
        log = max(Decimal(self.factor).ln(), Decimal(0))
        return float((1 + log / Decimal(self.original_length).ln()).sqrt())


Scaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | LongRopeScaling


def scaled_frequencies(scaling: Scaling | None, dim: int, base: float) -> tuple[np.ndarray, float]:
    """The frequencies of an even number of channels, and the factor of cosines and sines."""
    frequencies = phase.geometric_frequencies(dim // 2, base, dim / 2)
    if scaling is None:
        return frequencies, 1.0
    with decimal.localcontext(phase.PRECISION):
        factor = scaling.attention_factor or arguments.positive(
            "attention factor", scaling._usual_attention_factor()
        )
        return scaling._scaled(frequencies, base), factor


def _blended(frequencies: np.ndarray, shares: np.ndarray, factor: float) -> np.ndarray:
    """Each frequency blended with itself divided by `factor`, of which it has its share.

    Shares are clipped to [0, 1].
    """
    shares = np.clip(shares, 0, 1)
    return frequencies * (shares / Decimal(factor) + 1 - shares)
