"""Rotary position embeddings: queries and keys turned by their positions, exactly at any position, as any published model turns them."""

import dataclasses
import decimal
import functools
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Shaped

from transformer_embed import _checks, phase

LAYOUTS = ("half", "interleaved")
PARTIAL = ("first", "proportional")


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor`.

    Args:
        factor: above 0; how many times longer than in training the context is.

    Raises:
        TypeError: factor is no Python number.
        ValueError: factor is not above 0.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> print(np.asarray(te.apply_rotary([[[1.0, 0.0]]], [2], scaling=te.LinearScaling(2.0))).round(3))
        [[[0.54  0.841]]]

    Source:
        Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation" (2023), section 2.3,
        https://arxiv.org/abs/2306.15595
    """

    factor: float

    def __post_init__(self):
        _checks.real("factor", self.factor, above=0)

    def _scaled(self, dim: int, base: float) -> "_Scaled":
        return _Scaled(_blended(_unscaled(dim, base), [Decimal(1)] * (dim // 2), self.factor))


@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """NTK-aware scaling: the base times `alpha ** (d / (d - 2))`, for d rotated channels.

    The highest frequency stays as it is, the lowest is divided by alpha.

    Args:
        alpha: above 0; how many times longer than in training the context is.

    Raises:
        TypeError: alpha is no Python number.
        ValueError: alpha is not above 0.

    Example:
        >>> import transformer_embed as te
        >>> te.NTKScaling(8.0)
        NTKScaling(alpha=8.0)

    Source:
        bloc97 (2023), as given by Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023),
        section 3.1, https://arxiv.org/abs/2309.00071
    """

    alpha: float

    def __post_init__(self):
        _checks.real("alpha", self.alpha, above=0)

    def _scaled(self, dim: int, base: float) -> "_Scaled":
        return _Scaled(_ntk(dim, base, _decimal(self.alpha)))


@dataclasses.dataclass(frozen=True)
class DynamicNTKScaling:
    """NTK-aware scaling by the current length: `alpha = factor * length / original_length - (factor - 1)`, 1 up to the trained length.

    The length is known while tracing, since the frequencies are: each length is a program of its own, and keys rotated for one
    length do not fit queries rotated for another.

    Args:
        factor: above 0.
        original_length: the length of the training, at least 1.
        length: the current length, at least 0.

    Raises:
        TypeError: factor is no Python number; a length is traced, or no Python int.
        ValueError: factor is not above 0, or a length is below its lowest.

    Example:
        >>> import dataclasses
        >>> import transformer_embed as te
        >>> scaling = te.DynamicNTKScaling(2.0, original_length=4096, length=8192)
        >>> dataclasses.replace(scaling, length=16_384).length
        16384

    Source:
        emozilla (2023), as given by Peng et al., "YaRN" (2023), section 3.3, https://arxiv.org/abs/2309.00071; the formula of
        alpha is that of the transformers library.
    """

    factor: float
    original_length: int
    length: int

    def __post_init__(self):
        _checks.real("factor", self.factor, above=0)
        _checks.integer("original_length", self.original_length, at_least=1)
        _checks.integer("length", self.length, at_least=0)

    def _scaled(self, dim: int, base: float) -> "_Scaled":
        longer = Decimal(max(self.length, self.original_length)) / Decimal(self.original_length)
        factor = _decimal(self.factor)
        return _Scaled(_ntk(dim, base, factor * longer - (factor - 1)))


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: high frequencies kept, low ones divided by `factor`, a linear ramp between; cosines and sines times an attention factor.

    With `index(n) = d * ln(original_length / (2 * pi * n)) / (2 * ln(base))`, the index of the frequency that turns n times
    over the trained length, the ramp rises from 0 at max(index(beta_fast), 0) to 1 at min(index(beta_slow), d - 1), and

        frequency[i] = base ** (-2i / d) * (ramp[i] / factor + 1 - ramp[i])

    The attention factor is m(mscale) / m(mscale_all_dim), where m(s) = 0.1 * s * ln(factor) + 1, and 1 for a factor up to 1.

    Args:
        factor: above 0; how many times longer than in training the context is.
        original_length: the length of the training, at least 1.
        beta_fast: turns over the trained length from which on a frequency is kept; above beta_slow.
        beta_slow: turns up to which a frequency is divided; above 0.
        truncate: whether the ramp's ends are rounded outwards to integers (gpt-oss: False).
        mscale: as above (DeepSeek's name).
        mscale_all_dim: as above. (The transformers library ignores both where either is 0 or missing; 1 and 0 are the same as that.)
        attention_factor: in place of the formula, above 0; None: the formula.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument out of its range; when applied, a base that is not above 1.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> gpt_oss = te.YarnScaling(32.0, original_length=4096, truncate=False)
        >>> print(np.asarray(te.apply_rotary([[[1.0, 0.0]]], [0], base=150_000.0, scaling=gpt_oss)).round(3))
        [[[1.347 0.   ]]]

    Source:
        Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), sections 3.2 and 3.4,
        https://arxiv.org/abs/2309.00071; mscale: DeepSeek-AI, "DeepSeek-V2" (2024), its published code,
        https://arxiv.org/abs/2405.04434
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
        _checks.real("factor", self.factor, above=0)
        _checks.integer("original_length", self.original_length, at_least=1)
        _checks.real("beta_fast", self.beta_fast, above=_checks.real("beta_slow", self.beta_slow, above=0))
        _checks.flag("truncate", self.truncate)
        _check_not_negative("mscale", self.mscale)
        _check_not_negative("mscale_all_dim", self.mscale_all_dim)
        _check_attention_factor(self.attention_factor)

    def _scaled(self, dim: int, base: float) -> "_Scaled":
        log_base = _decimal(_checks.real("base", base, above=1)).ln()

        def index(turns: float) -> Decimal:
            return dim * (self.original_length / (2 * phase.PI * _decimal(turns))).ln() / (2 * log_base)

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = low.to_integral_value(decimal.ROUND_FLOOR), high.to_integral_value(decimal.ROUND_CEILING)
        low, high = max(low, Decimal(0)), min(high, Decimal(dim - 1))
        if low == high:
            high += Decimal("0.001")
        ramp = [_clipped((i - low) / (high - low)) for i in range(dim // 2)]
        return _Scaled(_blended(_unscaled(dim, base), ramp, self.factor), self._attention())

    def _attention(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        log = max(_decimal(self.factor).ln(), Decimal(0)) / 10
        return float((_decimal(self.mscale) * log + 1) / (_decimal(self.mscale_all_dim) * log + 1))


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: high frequencies kept, low ones divided by `factor`, between them blended by their wavelength.

    A frequency f turns `n = original_length * f / (2 * pi)` times over the trained length, and becomes

        f * ((1 - s) / factor + s), where s = (n - low_freq_factor) / (high_freq_factor - low_freq_factor) clipped to [0, 1]

    Args:
        factor: above 0; 8 in Llama 3.1, 32 in Llama 3.2.
        low_freq_factor: turns up to which a frequency is divided, above 0.
        high_freq_factor: turns from which on a frequency is kept, above low_freq_factor.
        original_length: the length of the training, at least 1.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument out of its range.

    Example:
        >>> import transformer_embed as te
        >>> te.Llama3Scaling(8.0)
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)

    Source:
        Grattafiori et al., "The Llama 3 Herd of Models" (2024), https://arxiv.org/abs/2407.21783, and `apply_scaling` of its
        published code.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        _checks.real("factor", self.factor, above=0)
        _checks.real("high_freq_factor", self.high_freq_factor, above=_checks.real("low_freq_factor", self.low_freq_factor, above=0))
        _checks.integer("original_length", self.original_length, at_least=1)

    def _scaled(self, dim: int, base: float) -> "_Scaled":
        frequencies = _unscaled(dim, base)
        low, high = _decimal(self.low_freq_factor), _decimal(self.high_freq_factor)
        turns = [self.original_length * f / (2 * phase.PI) for f in frequencies]
        return _Scaled(_blended(frequencies, [_clipped((high - n) / (high - low)) for n in turns], self.factor))


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: each frequency divided by a factor of its own; cosines and sines times an attention factor.

    The factors are the long ones where length > original_length, the short ones elsewhere. The attention factor is
    sqrt(1 + ln(factor) / ln(original_length)), and 1 for a factor up to 1. The length is known while tracing, as in
    `DynamicNTKScaling`.

    Args:
        short_factor: d / 2 numbers above 0, for d rotated channels.
        long_factor: d / 2 numbers above 0.
        factor: above 0; how many times longer than in training the context may grow (Phi-3: max_position_embeddings /
            original_max_position_embeddings).
        original_length: the length of the training, at least 2.
        length: the current length, at least 0.
        attention_factor: in place of the formula, above 0; None: the formula.

    Raises:
        TypeError: an argument of another type; a length is traced, or no Python int.
        ValueError: an argument out of its range; when applied, factors that are not d / 2.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> scaling = te.LongRopeScaling([1.0], [4.0], 32.0, original_length=4096, length=8192)
        >>> print(np.asarray(te.apply_rotary([[[1.0, 0.0]]], [0], scaling=scaling)).round(2))
        [[[1.19 0.  ]]]

    Source:
        Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024), section 3,
        https://arxiv.org/abs/2402.13753; the attention factor and the choice by length: Phi-3's published code.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    factor: float
    original_length: int
    length: int
    attention_factor: float | None = None

    def __post_init__(self):
        for name in ("short_factor", "long_factor"):
            factors = tuple(_checks.real(f"{name}[{n}]", value, above=0) for n, value in enumerate(getattr(self, name)))
            object.__setattr__(self, name, factors)
        _checks.real("factor", self.factor, above=0)
        _checks.integer("original_length", self.original_length, at_least=2)
        _checks.integer("length", self.length, at_least=0)
        _check_attention_factor(self.attention_factor)

    def _scaled(self, dim: int, base: float) -> "_Scaled":
        name = "long_factor" if self.length > self.original_length else "short_factor"
        factors = getattr(self, name)
        _checks.same(name, "half as many numbers as rotated channels", len(factors), dim // 2)
        frequencies = tuple(f / _decimal(factor) for f, factor in zip(_unscaled(dim, base), factors, strict=True))
        return _Scaled(frequencies, self._attention())

    def _attention(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        log = max(_decimal(self.factor).ln(), Decimal(0))
        return float((1 + log / Decimal(self.original_length).ln()).sqrt())


Scaling = LinearScaling | NTKScaling | DynamicNTKScaling | YarnScaling | Llama3Scaling | LongRopeScaling


def apply_rotary(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10_000.0,
    layout: str = "half",
    rotary_dim: int | None = None,
    partial: str = "first",
    scaling: Scaling | None = None,
    sections: Sequence[int] | None = None,
) -> Float[Array, "... t h d"]:
    """Turns each pair of channels of queries or keys by an angle proportional to the position, exact at any position.

    With the defaults, for i in 0..head_dim//2 - 1 and angle = position * base ** (-2i / head_dim), the channels a = i and
    b = i + head_dim//2 become

        x[..., a] * cos(angle) - x[..., b] * sin(angle)
        x[..., b] * cos(angle) + x[..., a] * sin(angle)

    The dot product of a query and a key, both rotated, depends on the difference of their positions only. Rotations add up: what is
    rotated already, such as keys in a cache, must not be rotated again. There is no table and no longest position.

    Args:
        x: [..., length, heads, head_dim], a floating dtype. (Some libraries have heads before length: swap those axes.)
        positions: [length], or more axes that broadcast to x's before the heads; any integer dtype, or float32. With sections, one more
            axis, the last: [..., length, axes].
        base: the wavelengths grow from 2 pi towards 2 pi times this; above 0 ("theta").
        layout: which channels are a pair.
            `"half"`: i and i + d/2 (Llama, GPT-NeoX, Gemma).
            `"interleaved"`: 2i and 2i + 1 (RoFormer, GPT-J).
        rotary_dim: how many channels are rotated, even; None: all of them.
        partial: what a rotary_dim below head_dim means.
            `"first"`: the first rotary_dim channels are rotated as a head of that size (GPT-J, GPT-NeoX).
            `"proportional"`: the whole head is paired, with head_dim in the exponents, and the first rotary_dim / 2 pairs turn (Gemma).
        scaling: of the frequencies, for contexts longer than in training: `LinearScaling`, `NTKScaling`, `DynamicNTKScaling`,
            `YarnScaling`, `Llama3Scaling` or `LongRopeScaling`; None: none.
        sections: how many successive pairs turn by each axis of the positions, (16, 24, 24) for time, height and width in Qwen2-VL:
            one row of frequencies, cut into sections. None: one axis.

    Returns:
        [..., length, heads, head_dim] of x's dtype, computed in float32 and rounded once. The error of a cosine or sine is at most
        6.0e-8 for every int32 and uint32 position, and for float32 ones below 2**24 in magnitude; where the scaling has an attention
        factor, that times the factor, beside float32's rounding of the product. NaN for a 64-bit jax integer outside int32, and for a
        float that is not finite or is 2**31 or more in magnitude. Differentiable in x and in float positions.

    Raises:
        TypeError: x has no floating dtype; positions are neither integers nor float32; another argument is of another type.
        ValueError: a shape that does not fit, an odd number of channels to pair, a host position outside int32, an unknown layout or
            partial, sections that do not add up to the pairs.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> query, key = jnp.ones([3, 2, 64]), jnp.ones([3, 2, 64])
        >>> near = te.apply_rotary(query, [7, 8, 9]) * te.apply_rotary(key, [5, 6, 7])
        >>> far = te.apply_rotary(query, [2_000_000_007, 8, 9]) * te.apply_rotary(key, [2_000_000_005, 6, 7])
        >>> bool(jnp.allclose(near.sum(-1), far.sum(-1)))
        True

    Source:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), section 3.4.2, equation 34,
        https://arxiv.org/abs/2104.09864. Sections: Wang et al., "Qwen2-VL" (2024), section 2.1, https://arxiv.org/abs/2409.12191
    """
    x = _checks.as_floats("x", x)
    if x.ndim < 3:
        raise ValueError(_checks.wanted("x", "shape [..., length, heads, head_dim]", f"shape {list(x.shape)}"))
    _checks.choice("layout", layout, LAYOUTS)
    rotated = _rotary_dim(rotary_dim, x.shape[-1])
    dim = x.shape[-1] if _checks.choice("partial", partial, PARTIAL) == "proportional" else rotated
    _check_even("head_dim", dim)
    if scaling is not None and not isinstance(scaling, Scaling):
        raise TypeError(_checks.wanted("scaling", "LinearScaling(...), another scaling of this package, or None", repr(scaling)))
    sections = _sections(sections, dim // 2)
    positions = _positions(positions, x.shape[:-2], sections)
    spec = _Spec(dim, rotated // 2, _checks.real("base", base, above=0), scaling, sections or (dim // 2,))
    return _rotated(x, positions if sections else positions[..., None], layout, spec)


def permute_rotary_weights(
    weights: ArrayLike, num_heads: int, *, source: str, target: str, rotary_dim: int | None = None
) -> Shaped[Array, "... hd"]:
    """A projection's weights or biases with each head's channels in the order of another rotary layout.

    Queries and keys projected by permuted weights and rotated in the target's layout have the dot products that they had before.
    Permute the query's and the key's projection (and a norm's scale between projection and rotation); the value's stays.

    Args:
        weights: [..., num_heads * head_dim]: the output channels are the last axis, as in hk.Linear (torch has them first: transpose).
        num_heads: at least 1; of the key's projection, its own number.
        source: the layout that the weights are in: `"half"` or `"interleaved"`; see `apply_rotary`.
        target: the layout wanted.
        rotary_dim: how many channels, the first ones of each head, are paired; None: all of them, as in
            `apply_rotary(..., partial="proportional")` too.

    Returns:
        The weights' shape and dtype.

    Raises:
        TypeError: num_heads or rotary_dim is no Python int.
        ValueError: the last axis is no multiple of num_heads, an odd number of channels to pair, or an unknown layout.

    Example:
        >>> import transformer_embed as te
        >>> te.permute_rotary_weights([0, 1, 2, 3, 4, 5], 1, source="half", target="interleaved").tolist()
        [0, 3, 1, 4, 2, 5]

    Source:
        The conversion of Llama's published checkpoints, interleaved, to the transformers library, in halves.
    """
    array = jnp.asarray(_checks.as_array("weights", weights))
    num_heads = _checks.integer("num_heads", num_heads, at_least=1)
    if array.ndim == 0 or array.shape[-1] % num_heads or array.shape[-1] == 0:
        raise ValueError(_checks.wanted("weights", f"a last axis of {num_heads} heads times head_dim", f"shape {list(array.shape)}"))
    head_dim = array.shape[-1] // num_heads
    dim = _rotary_dim(rotary_dim, head_dim)
    of_target, of_source = (_order(_checks.choice(name, layout, LAYOUTS), dim) for name, layout in (("target", target), ("source", source)))
    order = np.arange(head_dim)
    order[of_target] = of_source
    heads = np.arange(num_heads)[:, None] * head_dim
    return array[..., (heads + order).reshape(-1)]


class _Scaled(NamedTuple):
    """Frequencies in radians per unit of position, and what multiplies cosines and sines."""

    frequencies: tuple[Decimal, ...]
    attention_factor: float = 1.0


class _Spec(NamedTuple):
    """What decides the constants: `dim` channels are paired, the first `turning` pairs turn, and the sections add up to dim // 2."""

    dim: int
    turning: int
    base: float
    scaling: Scaling | None
    sections: tuple[int, ...]


@functools.partial(jax.jit, static_argnames=("layout", "spec"))
def _rotated(x: Float[Array, "... t h d"], positions: Shaped[Array, "... t axes"], layout: str, spec: _Spec) -> Float[Array, "... t h d"]:
    """Compiled even where the caller is not: the loop in `_cos_and_sin` would be compiled again at each call."""
    cos, sin = (each[..., None, :] for each in _cos_and_sin(positions, spec))
    wide = x[..., : spec.dim].astype(jnp.promote_types(jnp.float32, x.dtype))
    first, second = _pairs(wide, layout)
    turned = _joined(first * cos - second * sin, second * cos + first * sin, layout).astype(x.dtype)
    return turned if spec.dim == x.shape[-1] else jnp.concatenate([turned, x[..., spec.dim :]], -1)


def _pairs(x: Float[Array, "... d"], layout: str) -> tuple[Float[Array, "... p"], Float[Array, "... p"]]:
    if layout == "half":
        first, second = jnp.split(x, 2, -1)
        return first, second
    # A strided index would be a gather, which explicit mesh axes refuse in older releases of jax.
    first, second = (jax.lax.slice_in_dim(x, start, None, stride=2, axis=-1) for start in (0, 1))
    return first, second


def _joined(first: Float[Array, "... p"], second: Float[Array, "... p"], layout: str) -> Float[Array, "... d"]:
    if layout == "half":
        return jnp.concatenate([first, second], -1)
    return jnp.stack([first, second], -1).reshape(*first.shape[:-1], -1)


def _cos_and_sin(positions: Shaped[Array, "... t axes"], spec: _Spec) -> Float[Array, "2 ... t p"]:
    constants, attention_factor = _constants(spec)

    def waves(quarter: Array | int) -> Float[Array, "... t p"]:
        parts = [phase.sinusoid(positions[..., axis], part._replace(quarters=quarter)) for axis, part in enumerate(constants)]
        wave = parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)
        return wave if attention_factor == 1 else wave * np.float32(attention_factor)

    # On a CPU, XLA fuses the phases into the products and computes them again for each head; it cannot fuse through a loop.
    quarters = np.array([1, 0], np.uint32)
    return jax.lax.platform_dependent(
        quarters, cpu=lambda quarters: jax.lax.map(waves, quarters), default=lambda quarters: jnp.stack([waves(q) for q in quarters])
    )


@functools.lru_cache(maxsize=64)
def _constants(spec: _Spec) -> tuple[tuple[phase.Channels, ...], float]:
    """The constants of each section's sines, and the attention factor."""
    with decimal.localcontext(phase.PRECISION):
        frequencies, attention_factor = (
            _Scaled(_unscaled(spec.dim, spec.base)) if spec.scaling is None else spec.scaling._scaled(spec.dim, spec.base)
        )
    frequencies = frequencies[: spec.turning] + (phase.ZERO,) * (spec.dim // 2 - spec.turning)
    ends = np.cumsum(spec.sections)
    sections = [frequencies[end - size : end] for end, size in zip(ends, spec.sections, strict=True)]
    return tuple(phase.channels(section, [0] * len(section)) for section in sections), float(attention_factor)


def _unscaled(dim: int, base: float) -> tuple[Decimal, ...]:
    return phase.geometric_frequencies(dim // 2, base, dim / 2)


def _ntk(dim: int, base: float, alpha: Decimal) -> tuple[Decimal, ...]:
    """(base * alpha ** (d / (d - 2))) ** (-2i / d) is base ** (-2i / d) * alpha ** (-i / (d / 2 - 1))."""
    pairs = dim // 2
    slower = phase.geometric_frequencies(pairs, alpha, pairs - 1)
    return tuple(f * s for f, s in zip(_unscaled(dim, base), slower, strict=True))


def _blended(frequencies: Sequence[Decimal], shares: Sequence[Decimal], factor: float) -> tuple[Decimal, ...]:
    """Each frequency divided by `factor` for its share, and as it is for the rest."""
    return tuple(f * (share / _decimal(factor) + 1 - share) for f, share in zip(frequencies, shares, strict=True))


def _clipped(share: Decimal) -> Decimal:
    return min(max(share, Decimal(0)), Decimal(1))


def _decimal(value: float) -> Decimal:
    return Decimal(float(value))


def _order(layout: str, dim: int) -> np.ndarray:
    """The channels of a layout: the pairs' first ones, then their second ones."""
    channels = np.arange(dim)
    return channels if layout == "half" else channels.reshape(-1, 2).T.reshape(-1)


def _rotary_dim(rotary_dim: int | None, head_dim: int) -> int:
    if rotary_dim is None:
        return _check_even("head_dim", head_dim)
    rotary_dim = _check_even("rotary_dim", _checks.integer("rotary_dim", rotary_dim, at_least=2))
    if rotary_dim > head_dim:
        raise ValueError(_checks.wanted("rotary_dim", f"an int up to head_dim = {head_dim}", rotary_dim))
    return rotary_dim


def _check_even(name: str, value: int) -> int:
    if value % 2 or value == 0:
        raise ValueError(_checks.wanted(name, "an even number of channels, to make pairs", value))
    return value


def _check_not_negative(name: str, value: float) -> None:
    if _checks.real(name, value) < 0:
        raise ValueError(_checks.wanted(name, "a finite number of at least 0", value))


def _check_attention_factor(value: float | None) -> None:
    if value is not None:
        _checks.real("attention_factor", value, above=0)


def _sections(sections: Sequence[int] | None, pairs: int) -> tuple[int, ...]:
    if sections is None:
        return ()
    sections = tuple(_checks.integer(f"sections[{n}]", size, at_least=0) for n, size in enumerate(sections))
    _checks.same("sections", "numbers that add up to the pairs", sum(sections), pairs)
    return sections


def _positions(positions: ArrayLike, target: tuple[int, ...], sections: tuple[int, ...]) -> jax.Array | np.ndarray:
    """Positions that fit x's axes before the heads, and that jit will not narrow unseen."""
    positions = _checks.as_positions("positions", positions)
    shape = positions.shape
    if sections and (len(shape) < 2 or shape[-1] != len(sections)):
        raise ValueError(_checks.wanted("positions", f"shape [..., length, {len(sections)}], one axis a section", f"shape {list(shape)}"))
    leading = shape[:-1] if sections else shape
    if not leading or leading[-1] != target[-1]:
        hint = _checks.SCALAR_HINT if not leading else ""
        raise ValueError(_checks.wanted("positions", f"x's length, {target[-1]}, last", f"shape {list(shape)}{hint}"))
    _checks.broadcasts_to("positions", leading, "x before its heads", target)
    if isinstance(positions, np.ndarray) and np.issubdtype(positions.dtype, np.integer) and positions.dtype.itemsize == 8:
        return _checks.fits_int32("positions", positions)
    return positions
