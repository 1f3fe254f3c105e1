"""Exact phases: frequency constants, position -> phase, sine of a phase.

An angle `position * frequency` matters only modulo one turn, so it is kept as a *phase*: a fraction
of a turn in 64-bit fixed point, held in two uint32 words (high, low). A frequency is held in turns
per unit of position, as three words (whole turns, high, low) computed with arbitrary precision
while tracing. Their integer product wraps modulo one turn by itself. The phase of a 32-bit position
has an error of at most the position times 2**-65 turns, whereas a float32 product loses one bit of
the angle each time the position doubles.
"""

import decimal
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer, UInt32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike

PI = decimal.Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534"
)
# A frequency beyond the largest decimal becomes infinite, and `channels` raises an error for it.
PRECISION = decimal.Context(prec=80, traps=[decimal.InvalidOperation, decimal.DivisionByZero])

ZERO = decimal.Decimal(0)

# An array of words; a phase has a high and a low one.
Word = UInt32[Array, "..."]


class Channels(NamedTuple):
    """Constants of channels: channel c at p is `sin(p * frequency[c] + quarters[c] * pi / 2)`.

    `turns`, `high` and `low` are the words of the frequency in turns per unit of position.
    """

    turns: np.ndarray
    high: np.ndarray
    low: np.ndarray
    quarters: np.ndarray


class _Phase(NamedTuple):
    high: Word
    low: Word


@functools.lru_cache(maxsize=256, typed=True)
def geometric_frequencies(
    count: int,
    base: float | decimal.Decimal,
    denominator: float | decimal.Decimal,
    frequency_scale: float = 1.0,
) -> tuple[decimal.Decimal, ...]:
    """`frequency_scale * base ** (-i / denominator)` for i in 0..count-1, to about 75 digits."""
    with decimal.localcontext(PRECISION):
        frequencies = [decimal.Decimal(frequency_scale)] * min(count, 1)
        if count > 1:
            ratio = (-decimal.Decimal(base).ln() / decimal.Decimal(denominator)).exp()
            frequencies += itertools.repeat(ratio, count - 1)
        return tuple(itertools.accumulate(frequencies, operator.mul))


def channels(frequencies: Sequence[decimal.Decimal], quarters: Sequence[int]) -> Channels:
    """The words of one frequency a channel, from radians per unit of position to 2**-64 turns."""
    highest = max(frequencies, default=ZERO)
    if highest >= 2**33 * PI:
        raise arguments.value_error(
            "base and frequency_scale",
            "frequencies below 2**32 turns per position",
            f"{highest:.3g} radians",
        )
    # A frequency just below 2**32 turns may round up to 2**96, which three words do not hold.
    with decimal.localcontext(PRECISION):
        words = [
            min(int((f / (2 * PI) * 2**64).to_integral_value()), 2**96 - 1) for f in frequencies
        ]
    turns, high, low = (
        np.array([word >> shift & 0xFFFFFFFF for word in words], np.uint32) for shift in (64, 32, 0)
    )
    return Channels(turns, high, low, np.array(quarters, np.uint32))


def sinusoid(positions: ArrayLike, constants: Channels) -> Float32[Array, "... d"]:
    """The sine of each channel's phase at each position.

    Args:
        positions: [...]; any integer dtype, or float32 (float64 too where x64 is on: it is rounded
            to float32).
        constants: the channels' words, [d] each.

    Returns:
        float32 [..., d], in [-1, 1]. Against the exact sine of the exact angle the error is at most
        6.0e-8 for every int32 and uint32 position; for float32 positions below 2**24 in magnitude
        at most 6.0e-8 as well, as long as no frequency exceeds 1000 radians. NaN for a 64-bit
        position outside int32, and for a floating position that is not finite or has a magnitude of
        2**31 or more.

    Raises:
        TypeError: positions are neither integers nor float32 (float16 and bfloat16 cannot hold 2049
            and 257).
    """
    positions = arguments.as_positions("positions", positions)
    constants = _expanded_to_rank(constants, positions.ndim + 1)
    dtype = positions.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        narrow = jnp.asarray(positions, jnp.float32)
        if dtype == jnp.float64:
            is_exact = narrow.astype(jnp.float64) == positions
            narrow = jnp.where((jnp.abs(positions) < 2**24) | is_exact, narrow, jnp.nan)
        return _sine_at_float(narrow, constants)
    narrow = positions if dtype == jnp.uint32 else positions.astype(jnp.int32)
    phase = _integer_phase(jnp.asarray(narrow)[..., None], constants)
    sine = _sine_of_phase(phase, constants.quarters)
    if dtype.itemsize < 8:
        return sine
    # 2**64 - 1 would wrap to -1 and back.
    fits = positions < 2**31 if dtype == jnp.uint64 else narrow.astype(dtype) == positions
    return jnp.where(jnp.asarray(fits)[..., None], sine, jnp.nan)


def _expanded_to_rank(constants: Channels, rank: int) -> Channels:
    """The constants reshaped to a rank, because users may disable jax's rank promotion."""
    return Channels(
        *(word.reshape((1,) * (rank - 1) * word.ndim + word.shape) for word in constants)
    )


def multiply_high(a: Integer[Array, "..."], b: Array | np.ndarray | np.uint32) -> Word:
    """The upper 32 bits of the product of an int32 or uint32 `a` and a uint32 `b`.

    They come from four 16-bit products.
    """
    a_low, a_high = (a & 0xFFFF).astype(jnp.uint32), (a >> 16).astype(jnp.uint32)
    b_low, b_high = b & 0xFFFF, b >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    # If `a` is negative, so is `middle`: a signed shift keeps its sign.
    middle_high = (middle.astype(a.dtype) >> 16).astype(jnp.uint32)
    return a_high * b_high + middle_high + (a_low * b_high + (middle & 0xFFFF) >> 16)


def _integer_phase(positions: Integer[Array, "..."], constants: Channels) -> _Phase:
    word = positions.astype(jnp.uint32)
    return _Phase(
        word * constants.high + multiply_high(positions, constants.low), word * constants.low
    )


@jax.custom_jvp
def _sine_at_float(
    positions: Float32[Array, "..."], constants: Channels
) -> Float32[Array, "... d"]:
    magnitude = jnp.abs(positions)[..., None]
    high, low = _float_phase(magnitude, constants)
    # The phase of -p is the two's complement of that of p.
    opposite = ~high + (low == 0).astype(jnp.uint32), -low
    is_negative = positions[..., None] < 0
    phase = _Phase(*map(functools.partial(jnp.where, is_negative), opposite, (high, low)))
    return jnp.where(magnitude < 2.0**31, _sine_of_phase(phase, constants.quarters), jnp.nan)


@_sine_at_float.defjvp
def _sine_at_float_jvp(primals, tangents):
    positions, constants = primals
    quarter_on = constants._replace(quarters=constants.quarters + np.uint32(1))
    slope = _frequency(constants) * _sine_at_float(positions, quarter_on)
    return _sine_at_float(positions, constants), slope * tangents[0][..., None]


def _frequency(constants: Channels) -> Float32[Array, "... d"]:
    """Radians per unit of position."""
    turns, high, low = (jnp.asarray(word).astype(jnp.float32) for word in constants[:3])
    return np.float32(2 * np.pi) * (turns + (high * np.float32(2**-32) + low * np.float32(2**-64)))


def _float_phase(magnitude: Float32[Array, "..."], constants: Channels) -> _Phase:
    """The phase of |position|: that of its whole part plus that of its fraction."""
    whole = jnp.floor(magnitude)
    first, second = _fraction_words(magnitude - whole)
    phase = _integer_phase(whole.astype(jnp.uint32), constants)
    # The fraction is (first * 2**32 + second) / 2**64. The words of its product with (turns, high,
    # low) that lie above a turn or below 2**-64 turns are left out.
    phase = _add_to_phase(
        phase,
        first * constants.turns + multiply_high(first, constants.high),
        first * constants.high,
    )
    phase = _add_to_phase(phase, np.uint32(0), multiply_high(first, constants.low))
    return _add_to_phase(
        phase,
        multiply_high(second, constants.turns),
        second * constants.turns + multiply_high(second, constants.high),
    )


def _fraction_words(
    fraction: Float32[Array, "..."],
) -> tuple[Word, Word]:
    scaled = fraction * np.float32(2**32)
    upper = jnp.floor(scaled)
    return upper.astype(jnp.uint32), ((scaled - upper) * np.float32(2**32)).astype(jnp.uint32)


def _add_to_phase(phase: _Phase, high: Word | np.uint32, low: Word) -> _Phase:
    total = phase.low + low
    return _Phase(phase.high + high + (total < phase.low).astype(jnp.uint32), total)


# 2 * pi / 2**32 in two parts. The first has 12 bits, so that its product with a 12-bit integer is
# exact in float32.
_RADIANS_PER_UNIT = 2 * np.pi / 2**32
_RADIANS_FIRST = np.float32(np.ldexp(np.round(np.ldexp(_RADIANS_PER_UNIT, 41)), -41))
_RADIANS_SECOND = np.float32(_RADIANS_PER_UNIT - float(_RADIANS_FIRST))
_RADIANS = np.float32(_RADIANS_PER_UNIT)

# Minimax on |angle| <= pi/4 (Remez): sin(a) = a + a**3 * S(a**2) to 1.8e-9, cos(a) = 1 - a**2 / 2 +
# a**4 * C(a**2) to 1e-10.
_SINE = (-0.166666506826, 0.00833197923594, -0.000194956950035)
_COSINE = (0.0416666468913, -0.00138873685337, 2.44385524356e-5)


# An eighth of a turn is added to a phase. Its top two bits then say which quarter turn is nearest
# (the sign of the sine there, and whether the quarter is odd); the other bits are the distance from
# that quarter turn, plus an eighth.
_SIGN, _IS_ODD, _REST = np.uint32(1 << 31), np.uint32(1 << 30), np.uint32((1 << 30) - 1)
_EIGHTH = np.uint32(1 << 29)


def _sine_of_phase(phase: _Phase, quarters: Array | np.ndarray) -> Float32[Array, "..."]:
    """The sine, from one polynomial: the sine's near an even quarter turn, else the cosine's."""
    shifted = phase.high + ((quarters << 30) + _EIGHTH)
    is_sine = shifted & _IS_ODD == 0
    angle, residue = _radians((shifted & _REST).astype(jnp.int32) - (1 << 29), phase.low)
    square = angle * angle
    # The first two terms of the cosine, and the rounding error of their sum.
    half = 0.5 * square
    leading = 1.0 - half
    lost = (1.0 - leading) - half
    first = jnp.where(is_sine, angle, leading)
    last = jnp.where(is_sine, residue, lost - angle * residue)
    factor = jnp.where(is_sine, angle, square) * square
    coefficients = [
        jnp.where(is_sine, np.float32(s), np.float32(c))
        for s, c in zip(_SINE, _COSINE, strict=True)
    ]
    value = first + (factor * _polynomial(coefficients, square) + last)
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) ^ (shifted & _SIGN)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _radians(
    rest: Integer[Array, "..."], low: Word
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`rest` of 2**-32 turns and `low` of 2**-64 in radians: the angle and its rounding error."""
    # |rest| is at most 2**29; the nearest multiple of 2**18 has 12 bits above its zeros.
    coarse = rest + (1 << 17) & -(1 << 18)
    # A CPU converts a signed 24-bit integer to float32 exactly, in one instruction.
    below = (low >> 8).astype(jnp.int32).astype(jnp.float32)
    fine = (rest - coarse).astype(jnp.float32) + below * np.float32(2**-24)
    coarse = coarse.astype(jnp.float32)
    exact = coarse * _RADIANS_FIRST
    small = coarse * _RADIANS_SECOND + fine * _RADIANS
    angle = exact + small
    return angle, (exact - angle) + small


def _polynomial(
    coefficients: Sequence[Float32[Array, "..."]], x: Float[Array, "..."]
) -> Float[Array, "..."]:
    value = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
