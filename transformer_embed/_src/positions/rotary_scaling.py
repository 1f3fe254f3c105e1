"""Scales rotary frequencies by the published formulas, in arbitrary precision.

The scaled frequencies let a model read texts that are longer than in training. Some scalings also
have an *attention factor*, a number that multiplies all cosines and sines of the rotation.
"""

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
# The fields that must be above 0, in every scaling that has such a field.
_POSITIVE = (
    "factor",
    "alpha",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
)
# Converts and checks the fields of all scalings, by their names.
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
    """Is the parent of all scalings.

    A scaling also has a method `_scaled(frequencies, base)`, which returns the scaled frequencies.
    These and the frequencies are arrays of `decimal.Decimal`, one for each pair of channels. The
    base is the number that the frequencies were computed from.
    """

    # The number that multiplies cosines and sines. Some scalings have a field of this name, which
    # replaces this None. If it is None, `_formula_attention_factor` computes the number.
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        """Converts and checks the fields."""
        arguments.convert_fields(self, **_CONVERTERS)

    def _formula_attention_factor(self) -> float:
        """Computes the attention factor if the field `attention_factor` is None.

        This 1 is for scalings that leave cosines and sines as they are.
        """
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearScaling(_Scaling):
    """Divides every frequency by `factor` (position interpolation).

    Use it for models that were trained with position interpolation: each token is rotated as if its
    position were divided by `factor`. The config.json of these models has the rope type "linear". A
    text that is `factor` times longer than in training then needs only rotations that the model has
    seen.

    Args:
        factor: How many times longer the context is than in training, above 0.

    Raises:
        TypeError: `factor` is neither a Python number nor a numpy scalar.
        ValueError: `factor` is not above 0.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> half_speed = te.LinearScaling(2.0)
        >>> rotated = te.apply_rotary([[[1.0, 0.0]]], [2], scaling=half_speed)
        >>> print(np.asarray(rotated).round(3))
        [[[0.54  0.841]]]

    Source:
        Position interpolation is from Chen et al., "Extending Context Window of Large Language
        Models via Positional Interpolation" (2023), section 2.3, https://arxiv.org/abs/2306.15595
    """

    factor: float

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Divides the frequency of each pair of channels by the factor."""
        return frequencies / Decimal(self.factor)


@dataclasses.dataclass(frozen=True)
class NTKScaling(_Scaling):
    """Multiplies the base by `alpha ** (d / (d - 2))`, for d rotated channels (NTK-aware scaling).

    Use it to run a model on texts that are longer than in training. The highest frequency stays as
    it is, so the model can tell neighbouring tokens apart as before. The lowest frequency is
    divided by `alpha`.

    In transformers, the rope type "dynamic" computes such an `alpha` from the current length of the
    text: `alpha = max(factor * length / original_length - (factor - 1), 1)`. Do not combine dynamic
    scaling with a KV cache, because the cached keys were rotated with the alpha of a shorter text.

    Args:
        alpha: How many times longer the context is than in training, above 0.

    Raises:
        TypeError: `alpha` is neither a Python number nor a numpy scalar.
        ValueError: `alpha` is not above 0.

    Example:
        >>> import transformer_embed as te
        >>> te.NTKScaling(8.0)
        NTKScaling(alpha=8.0)

    Source:
        The scaling was proposed by bloc97 on Reddit (2023). The formula is given by Peng et
        al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), sections
        3.1 and 3.3, https://arxiv.org/abs/2309.00071
    """

    alpha: float

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Changes the frequency of each pair of channels as a larger base would."""
        # Frequency i of the larger base is the old frequency i times a power of alpha:
        # (base * alpha ** (d / (d - 2))) ** (-2i / d)
        #     = base ** (-2i / d) * alpha ** (-i / (d / 2 - 1))
        pairs = len(frequencies)
        return frequencies * phase.geometric_frequencies(pairs, self.alpha, pairs - 1)


@dataclasses.dataclass(frozen=True)
class YarnScaling(_Scaling):
    """Divides low frequencies by `factor`, keeps high ones, and blends those between (YaRN).

    Use it for models that were published with YaRN, such as gpt-oss and DeepSeek. The config.json
    of these models has the rope type "yarn". YaRN also multiplies cosines and sines by an attention
    factor, so the attention scores are multiplied by the square of this factor.

    The d rotated channels form d / 2 pairs, and pair i has the frequency base ** (-2i / d). So the
    first pairs have the highest frequencies: they make the most full turns over the trained length.
    The pairs up to the index `first` keep their frequencies, and the pairs from the index `last` on
    have their frequencies divided by `factor`. Between these two, the frequencies are blends:

        frequency[i] = base ** (-2i / d) * (1 - ramp[i] + ramp[i] / factor)

    The number `ramp[i]` is 0 up to the index `first` and 1 from the index `last` on, and rises
    evenly between these two. The two indices follow from the arguments `beta_fast` and `beta_slow`:

        first = max(index(beta_fast), 0)
        last = min(index(beta_slow), d - 1)

    Here `index(n) = d * ln(original_length / (2 * pi * n)) / (2 * ln(base))` is the index of the
    pair that makes n full turns over the trained length, for d rotated channels. If `first` and
    `last` are equal, 0.001 is added to `last`, as in transformers, so `ramp` jumps from 0 to 1.

    The attention factor multiplies cosines and sines. By default it is computed from `factor`,
    `mscale` and `mscale_all_dim`, as m(mscale) / m(mscale_all_dim), where m(s) = 0.1 * s *
    ln(factor) + 1. If `factor` is at most 1, the attention factor is 1.

    Args:
        factor: How many times longer the context is than in training, above 0.
        original_length: The trained length, at least 2.
        beta_fast: A number of full turns. A pair of channels keeps its frequency if it makes at
            least `beta_fast` turns over the trained length. If a pair makes fewer turns, but more
            than `beta_slow`, its new frequency is between the old frequency and the old frequency
            divided by `factor`. `beta_fast` is at least `beta_slow`. If both are equal, as in Kimi
            K2, hardly any pair is between them.
        beta_slow: A number of full turns, above 0. If a pair of channels makes at most `beta_slow`
            turns over the trained length, its frequency is divided by `factor`.
        truncate: Whether the two ends of the ramp are rounded to integers, `first` down and `last`
            up. Pass False for gpt-oss.
        mscale: A number in the formula m(mscale) / m(mscale_all_dim) of the attention factor, at
            least 0. (The attention factor multiplies cosines and sines.) Pass the entry `mscale` of
            the model's config.json, if the file has this entry. (The files of DeepSeek have it.)
        mscale_all_dim: A number in the formula m(mscale) / m(mscale_all_dim) of the attention
            factor, at least 0. Pass the entry `mscale_all_dim` of the model's config.json, if the
            file has this entry.
        attention_factor: The number that multiplies cosines and sines, above 0. Pass it if the
            config.json of your model has it. If None, the number is computed by the formula above.

    Raises:
        TypeError: `truncate` is not a Python bool, or one of the numbers is neither a Python number
            nor a numpy scalar.
        ValueError: An argument is out of its range. `apply_rotary` also raises a ValueError if the
            `base` is at most 1.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> gpt_oss = te.YarnScaling(32.0, original_length=4096, truncate=False)
        >>> rotated = te.apply_rotary([[[1.0, 0.0]]], [0], base=150_000.0, scaling=gpt_oss)
        >>> print(np.asarray(rotated).round(3))
        [[[1.347 0.   ]]]

    Edge cases:
        - If `mscale` or `mscale_all_dim` is missing in a config.json, or is 0, transformers uses
          mscale=1 and mscale_all_dim=0. If you read the config.json yourself, pass these two
          numbers in this case.

    Source:
        The scaling is from Peng et al., "YaRN: Efficient Context Window Extension of Large Language
        Models" (2023), sections 3.2 and 3.4, https://arxiv.org/abs/2309.00071. The arguments
        `mscale` and `mscale_all_dim` are from the published code of DeepSeek-AI, "DeepSeek-V2"
        (2024), https://arxiv.org/abs/2405.04434
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        """Converts and checks the fields."""
        super().__post_init__()
        if self.beta_fast < self.beta_slow:
            want = f"a number of at least beta_slow, {self.beta_slow:g}"
            raise arguments.value_error("beta_fast", want, self.beta_fast)

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Divides low frequencies by the factor, keeps high ones, and blends those between."""
        base = arguments.real("base", base, lowest=math.nextafter(1, 2), want="a number above 1")
        dim = 2 * len(frequencies)
        log_base = Decimal(base).ln()

        def index_with_turns(turns: float) -> Decimal:
            """Computes the index of the pair that makes `turns` turns over the trained length.

            Pair i has the frequency base ** (-2i / dim), so the index i solves the equation
            original_length * base ** (-2i / dim) = 2 * pi * turns. It need not be an integer.
            """
            angle = 2 * phase.PI * Decimal(turns)
            log_ratio = (self.original_length / angle).ln()
            return dim * log_ratio / (2 * log_base)

        # A new frequency is (1 - ramp) * frequency + ramp * frequency / factor. The ramp rises from
        # 0 at the first index, whose pair makes `beta_fast` turns in the trained length, to 1 at
        # the last index, whose pair makes `beta_slow` turns.
        first = index_with_turns(self.beta_fast)
        last = index_with_turns(self.beta_slow)
        if self.truncate:
            first = first.to_integral_value(decimal.ROUND_FLOOR)
            last = last.to_integral_value(decimal.ROUND_CEILING)
        first = max(first, Decimal(0))
        # YaRN's code and transformers limit the last index to dim - 1, although there are only
        # dim / 2 frequencies.
        last = min(last, Decimal(dim - 1))
        # A ramp without a width would divide by zero, so YaRN's code and transformers widen it.
        if first == last:
            last += Decimal("0.001")
        indices = np.arange(dim // 2, dtype=object)
        ramp = (indices - first) / (last - first)
        return _partly_divided(frequencies, self.factor, divided_share=ramp)

    def _formula_attention_factor(self) -> float:
        """Computes m(mscale) / m(mscale_all_dim), as in the docstring of the class."""
        # A factor below 1 counts as 1.
        log_factor = max(Decimal(self.factor).ln(), Decimal(0))
        numerator = Decimal(self.mscale) * (log_factor / 10) + 1
        denominator = Decimal(self.mscale_all_dim) * (log_factor / 10) + 1
        return float(numerator / denominator)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(_Scaling):
    """Divides low frequencies by `factor`, keeps high ones, and blends those between (Llama 3.1).

    Use it for Llama 3.1 and later models whose config.json has the rope type "llama3".

    A pair of channels with the frequency f makes `n = original_length * f / (2 * pi)` full turns
    over the trained length. Its scaled frequency is

        f * ((1 - s) / factor + s)
        s = (n - low_freq_factor) / (high_freq_factor - low_freq_factor), clipped to [0, 1]

    Args:
        factor: The number that divides low frequencies, above 0. Pass 8 for Llama 3.1 and 32 for
            Llama 3.2.
        low_freq_factor: A number of full turns, above 0. If a pair of channels makes at most
            `low_freq_factor` turns over the trained length, its frequency is divided by `factor`.
        high_freq_factor: A number of full turns. A pair of channels keeps its frequency if it makes
            at least `high_freq_factor` turns over the trained length. If a pair makes fewer turns,
            but more than `low_freq_factor`, its new frequency is between the old frequency and the
            old frequency divided by `factor`. `high_freq_factor` is at least `low_freq_factor`. If
            both are equal, as in Llama 4 Scout, no pair is between them.
        original_length: The trained length, at least 2.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument is out of its range.

    Example:
        >>> import transformer_embed as te
        >>> te.Llama3Scaling(8.0)
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)

    Source:
        The model is from Grattafiori et al., "The Llama 3 Herd of Models" (2024),
        https://arxiv.org/abs/2407.21783. The formula is from `apply_scaling` in the published code.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        """Converts and checks the fields."""
        super().__post_init__()
        lowest = self.low_freq_factor
        want = f"a number of at least low_freq_factor, {lowest:g}"
        arguments.real("high_freq_factor", self.high_freq_factor, lowest=lowest, want=want)

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Divides low frequencies by the factor, keeps high ones, and blends those between.

        If a pair of channels makes at most `low_freq_factor` turns over the trained length, its
        frequency is divided fully. If it makes at least `high_freq_factor` turns, its frequency is
        kept.
        """
        low = Decimal(self.low_freq_factor)
        high = Decimal(self.high_freq_factor)
        turns = self.original_length * frequencies / (2 * phase.PI)
        width = high - low
        if width == 0:
            # The two bounds are equal, and would divide by 0. With a tiny width, the share below is
            # far outside [0, 1] for any number of turns other than the bound, and is clipped to 0
            # or 1.
            width = Decimal("1e-20")
        # A new frequency is (1 - share) * frequency + share * frequency / factor. The share falls
        # from 1 at `low` turns to 0 at `high` turns.
        divided_share = (high - turns) / width
        return _partly_divided(frequencies, self.factor, divided_share=divided_share)


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(_Scaling):
    """Divides each frequency by a factor of its own, and scales cosines and sines (LongRoPE).

    Use it for Phi-3 and other models whose config.json has the rope type "longrope". If length >
    original_length, frequency i is divided by `long_factor[i]`, and otherwise by `short_factor[i]`.
    Cosines and sines are multiplied by a number, the attention factor. By default this number is
    sqrt(1 + ln(factor) / ln(original_length)), or 1 if `factor` is at most 1.

    Choose one `length` for a text, before you fill a KV cache. Otherwise keys in the cache may be
    rotated with `short_factor` and later queries with `long_factor`, and the attention scores are
    wrong.

    Args:
        short_factor: The number that divides each frequency in short texts. For d rotated channels,
            pass d / 2 numbers above 0.
        long_factor: The number that divides each frequency in long texts. For d rotated channels,
            pass d / 2 numbers above 0.
        factor: How many times longer the context may be than in training, above 0. For Phi-3, pass
            max_position_embeddings / original_max_position_embeddings.
        original_length: The trained length, at least 2.
        length: The length of your texts, a Python int of at least 0 that is not traced.
        attention_factor: The number that multiplies cosines and sines, above 0. Pass it if the
            config.json of your model has it. If None, the number is computed by the formula above.

    Raises:
        TypeError: `length` is traced or is not a Python int. Another argument is not a number or a
            sequence of numbers.
        ValueError: An argument is out of its range. `apply_rotary` also raises a ValueError if the
            number of factors is not d / 2.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> scaling = te.LongRopeScaling([1.0], [4.0], 32.0, original_length=4096, length=8192)
        >>> print(np.asarray(te.apply_rotary([[[1.0, 0.0]]], [0], scaling=scaling)).round(2))
        [[[1.19 0.  ]]]

    Edge cases:
        - All lengths up to `original_length` share one compiled program of `apply_rotary`, and all
          longer ones share another. But if you pass the scaling to your own `jax.jit` as a static
          argument, your function is compiled again for each length.

    Source:
        The scaling is from Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million
        Tokens" (2024), section 3, https://arxiv.org/abs/2402.13753. Two parts are from Phi-3's
        published code: the attention factor, which multiplies cosines and sines, and the choice
        between short and long factors by the length of the text.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    factor: float
    original_length: int
    length: int
    attention_factor: float | None = None

    def _scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Divides the frequency of each pair of channels by the factor of the pair."""
        name = "long_factor" if self.length > self.original_length else "short_factor"
        factors = getattr(self, name)
        what = "half as many numbers as rotated channels"
        arguments.check_same(name, what, len(factors), len(frequencies))
        return frequencies / [Decimal(factor) for factor in factors]

    def _formula_attention_factor(self) -> float:
        """Computes sqrt(1 + ln(factor) / ln(original_length))."""
        # A factor below 1 counts as 1.
        log_factor = max(Decimal(self.factor).ln(), Decimal(0))
        log_length = Decimal(self.original_length).ln()
        return float((1 + log_factor / log_length).sqrt())


Scaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | LongRopeScaling


def scaled_frequencies(scaling: Scaling | None, dim: int, base: float) -> tuple[np.ndarray, float]:
    """Computes the frequency of each pair of channels, and the attention factor.

    The attention factor multiplies all cosines and sines of the rotation.

    Args:
        scaling: How the frequencies are changed. If None, they stay as they are.
        dim: The number of channels, an even number.
        base: The base of the frequencies.

    Returns:
        The frequencies in radians per unit of position, an array of `dim // 2` numbers of the type
        `decimal.Decimal`, and the attention factor.
    """
    # Frequency i is base ** (-i / (dim / 2)).
    frequencies = phase.geometric_frequencies(dim // 2, base, denominator=dim / 2)
    if scaling is None:
        return frequencies, 1.0
    with decimal.localcontext(phase.PRECISION):
        attention_factor = scaling.attention_factor
        # If the user sets no factor, each scaling has a formula for it.
        if attention_factor is None:
            formula_factor = scaling._formula_attention_factor()
            attention_factor = arguments.positive("attention factor", formula_factor)
        scaled = scaling._scaled(frequencies, base)
        return scaled, attention_factor


def _partly_divided(
    frequencies: np.ndarray, factor: float, *, divided_share: np.ndarray
) -> np.ndarray:
    """Divides each frequency by `factor` fully (share 1), not at all (share 0), or in part.

    Args:
        frequencies: The frequencies.
        factor: The divisor.
        divided_share: The share of the divided frequency in the result. The rest is the frequency
            itself. Shares outside [0, 1] are clipped.
    """
    divided_share = np.clip(divided_share, 0, 1)
    multipliers = divided_share / Decimal(factor) + 1 - divided_share
    return frequencies * multipliers
