"""Computes sines of `position * frequency` that are exact at any position.

An angle `position * frequency` matters only modulo one turn, so it is kept as a *phase*: a fraction
of a turn in 64-bit fixed point, held in two uint32 words (high, low). A frequency is held in turns
per unit of position, as three words (whole turns, high, low), which are computed with arbitrary
precision while tracing. The integer product of position and frequency wraps modulo one turn by
itself. The phase of a 32-bit position
has an error of at most the position times 2**-65 turns, whereas a float32 product loses one bit of
the angle each time the position doubles.

The sine of a phase is computed in two steps. The nearest quarter turn says which polynomial and
which sign to use, and the rest, at most an eighth of a turn, goes into the polynomial.
"""

import decimal
import functools
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Integer, Shaped, UInt32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import nan_where

PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534"
)
# A frequency beyond the largest decimal becomes infinite.
PRECISION = decimal.Context(prec=80, traps=[decimal.InvalidOperation, decimal.DivisionByZero])

# An array of words; a phase has a high and a low one.
Word = UInt32[Array, "..."]
# The frequency of each channel in turns per unit of position: whole turns, high, low.
Words = tuple[Array | np.ndarray, ...]
# 0 for a sine and 1 for a cosine, which is the sine a quarter turn on.
Quarters = Array | np.ndarray
Whole = Integer[Array, "..."]
Real = Float32[Array, "..."]


class _Phase(NamedTuple):
    """Holds a fraction of a turn, `high * 2**-32 + low * 2**-64`."""

    high: Word
    low: Word


def as_positions(name: str, value: ArrayLike) -> Array | np.ndarray:
    """Converts positions to int32 or float32, so that positions of all dtypes share a trace.

    Arrays on the host stay there, because a compiled function takes them faster than a result of
    `jnp.asarray`. Integers of uint32 on the host that int32 does not hold keep their dtype, as do
    jax arrays of 64 bits.

    Raises:
        TypeError: The positions are neither integers nor float32 or float64.
        ValueError: Positions on the host do not fit.
    """
    if arguments.is_int32(value):
        return value
    array = arguments.as_array(name, value)
    if jnp.issubdtype(array.dtype, jnp.integer):
        is_host_uint32 = isinstance(array, np.ndarray) and array.dtype == np.uint32
        is_large = is_host_uint32 and array.max(initial=0) >= 2**31
        return array if is_large else arguments.as_integers(name, array)
    if array.dtype not in (np.float32, np.float64):
        want = "an integer dtype, or float32 (16-bit floats skip integers)"
        raise arguments.type_error(name, want, array.dtype)
    if isinstance(array, jax.Array) or array.dtype == np.float32:
        return array
    return _as_float32(name, array)


def _as_float32(name: str, array: np.ndarray) -> np.ndarray:
    """Rounds float64 to float32, or raises a ValueError if that would change an integer."""
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    # Only from 2**24 on does float32 skip integers.
    is_changed = (np.abs(array) >= 2**24) & (narrow != array)
    if is_changed.any():
        want = "floats that float32 holds (pass large positions as integers)"
        raise arguments.value_error(name, want, array[is_changed][0])
    return narrow


def geometric_frequencies(
    count: int,
    base: float | Decimal,
    denominator: float | Decimal,
    frequency_scale: float = 1.0,
) -> np.ndarray:
    """Computes `frequency_scale * base ** (-i / denominator)` for i in 0..count-1, to 75 digits.

    The numbers are decimals in an array of objects, so numpy multiplies them one by one.
    """
    # The constants of a frequency are part of the program.
    arguments.integer("number of frequencies", count, at_most=2**23)
    with decimal.localcontext(PRECISION):
        ratio = Decimal(1)
        # A single frequency needs no ratio, and its denominator may be 0.
        if count > 1:
            ratio = (-Decimal(base).ln() / Decimal(denominator)).exp()
        # The running product of scale, ratio, ratio, ... has the frequencies.
        factors = np.full(count, ratio)
        factors[:1] = Decimal(frequency_scale)
        return np.multiply.accumulate(factors)


def units(frequencies: np.ndarray) -> tuple[int, ...]:
    """Converts frequencies from radians per unit of position to multiples of 2**-64 turns.

    Raises:
        ValueError: A frequency is 2**32 turns or more.
    """
    with decimal.localcontext(PRECISION):
        turns = [frequency / (2 * PI) for frequency in frequencies]
        # An infinite frequency has no integer, so it becomes one that is refused below.
        integers = [round(min(number, 2**32) * 2**64) for number in turns]
    if max(integers, default=0) >= 2**96:
        raise arguments.value_error(
            "base and frequency_scale",
            "frequencies below 2**32 turns per position",
            f"{max(frequencies):.3g} radians",
        )
    return tuple(integers)


def words(units: Sequence[int] | np.ndarray) -> Words:
    """Splits frequencies in units of 2**-64 turns into words: whole turns, high, low."""
    integers = np.array(units, object)
    shifts = (64, 32, 0)
    return tuple((integers >> shift & 0xFFFFFFFF).astype(np.uint32) for shift in shifts)


def sinusoid(
    positions: Shaped[Array, "... #d"], frequencies: Words, quarters: Array | np.ndarray
) -> Float32[Array, "... d"]:
    """Computes `sin(position * frequency + quarter * pi / 2)` for each channel.

    Args:
        positions: Positions of any integer dtype, float32 or float64, [..., 1], or [..., d] with a
            position for each channel.
        frequencies: The words of the frequency of each channel, [d] each.
        quarters: 0 for a sine and 1 for a cosine, uint32 [d], or one for all channels.

    Returns:
        float32 [..., d], in [-1, 1].

    Edge cases:
        - The error against the exact sine of the exact angle is at most 6.0e-8 at every int32 and
          uint32 position. It is so too at float32 positions below 2**24 in magnitude, as long as no
          frequency exceeds 1000 radians.
        - The result is NaN at a 64-bit integer outside int32, at an integer in float64 that float32
          does not hold, and at a floating position that is not finite or has a magnitude of 2**31
          or more.
    """
    # Users may disable jax's rank promotion, so words get the rank of the positions.
    shape = (1,) * (positions.ndim - 1) + (-1,)
    frequencies = tuple(word.reshape(shape) for word in frequencies)
    quarters = quarters.reshape(shape)
    dtype = positions.dtype
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if is_float:
        narrow = positions.astype(jnp.float32)
        sine = _sine_at_float(narrow, frequencies, quarters)
    else:
        narrow = positions if dtype == jnp.uint32 else positions.astype(jnp.int32)
        # Whole turns of a frequency change no phase at an integer.
        _, high, low = frequencies
        sine = _sine_of_phase(_multiply(narrow, high, low), quarters)
    if dtype.itemsize < 8:
        return sine
    # 2**64 - 1 would wrap to -1 and back.
    fits = positions < 2**31 if dtype == jnp.uint64 else narrow.astype(dtype) == positions
    if is_float:
        fits |= jnp.abs(positions) < 2**24
    return nan_where(~fits, sine)


def multiply_high(a: Whole, b: Array | np.ndarray | np.uint32) -> Word:
    """Computes the upper 32 bits of the product of an int32 or uint32 `a` and a uint32 `b`.

    Both are split into halves of 16 bits, and the upper bits are summed from the four products of
    two halves, with the carries: `a_low * b_low` counts 1, the two mixed products count 2**16, and
    `a_high * b_high` counts 2**32.
    """
    a_low = (a & 0xFFFF).astype(jnp.uint32)
    a_high = (a >> 16).astype(jnp.uint32)
    b_low = b & 0xFFFF
    b_high = b >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    # If `a` is negative, so is `middle`: a signed shift keeps its sign.
    middle_high = (middle.astype(a.dtype) >> 16).astype(jnp.uint32)
    return a_high * b_high + middle_high + (a_low * b_high + (middle & 0xFFFF) >> 16)


def _multiply(number: Whole, high, low) -> _Phase:
    """Multiplies an int32 or uint32 by a fraction of a turn in two words, modulo one turn."""
    # Products wrap, which drops whole turns.
    word = number.astype(jnp.uint32)
    return _Phase(high=word * high + multiply_high(number, low), low=word * low)


@jax.custom_jvp
def _sine_at_float(positions: Real, frequencies: Words, quarters: Quarters) -> Real:
    """Computes `sinusoid` at float32 positions."""
    magnitude = jnp.abs(positions)
    # sin(-angle + quarter) is sin(angle + half a turn - quarter).
    quarters = jnp.where(positions < 0, np.uint32(2) - quarters, quarters)
    sine = _sine_of_phase(_float_phase(magnitude, frequencies), quarters)
    return nan_where(~(magnitude < 2.0**31), sine)


@_sine_at_float.defjvp
def _sine_at_float_jvp(primals: Any, tangents: Any) -> tuple[Real, Real]:
    """Computes the derivative with respect to the positions."""
    positions, frequencies, quarters = primals
    turns, high, low = jax.tree.map(lambda word: word.astype(jnp.float32), frequencies)
    radians = 2 * np.pi * (turns + (high * 2**-32 + low * 2**-64))
    # The derivative of the sine is the cosine, which is the sine a quarter turn on.
    slope = radians * _sine_at_float(positions, frequencies, quarters + np.uint32(1))
    position_tangent, *_ = tangents
    return _sine_at_float(*primals), slope * position_tangent


def _float_phase(magnitude: Real, frequencies: Words) -> _Phase:
    """Computes the phase of |position|, from the words of its whole part and of its fraction.

    The magnitude is `integer + first * 2**-32 + second * 2**-64`, of which each word is multiplied
    by each word of the frequency.
    """
    integer = jnp.floor(magnitude)
    # These steps are exact, because a float32 has 24 bits and scaling by a power of two rounds
    # nothing.
    rest = (magnitude - integer) * 2.0**32
    first = jnp.floor(rest)
    second = (rest - first) * 2.0**32
    first = first.astype(jnp.uint32)
    second = second.astype(jnp.uint32)
    turns, high, low = frequencies
    phase = _multiply(integer.astype(jnp.uint32), high, low)
    # What lies above a turn or below 2**-64 turns is left out.
    for product_high, product_low in (
        _multiply(first, turns, high),
        (0, multiply_high(first, low)),
        (multiply_high(second, turns), second * turns + multiply_high(second, high)),
    ):
        low_sum = phase.low + product_low
        # A sum that wraps is smaller than each of its terms.
        carry = (low_sum < phase.low).astype(jnp.uint32)
        phase = _Phase(high=phase.high + product_high + carry, low=low_sum)
    return phase


# 2 * pi / 2**32 in two parts. The first has 12 bits, so that its product with a 12-bit integer is
# exact in float32.
_RADIANS_PER_UNIT = 2 * np.pi / 2**32
_RADIANS_FIRST = np.float32(np.ldexp(np.round(np.ldexp(_RADIANS_PER_UNIT, 41)), -41))
_RADIANS_SECOND = np.float32(_RADIANS_PER_UNIT - float(_RADIANS_FIRST))
_RADIANS = np.float32(_RADIANS_PER_UNIT)

# Minimax on |angle| <= pi/4 (Remez): sin(a) = a + a**3 * S(a**2) to 1.8e-9, cos(a) = 1 - a**2 / 2 +
# a**4 * C(a**2) to 1e-10.
_SINE = np.array([-0.166666506826, 0.00833197923594, -0.000194956950035], np.float32)
_COSINE = np.array([0.0416666468913, -0.00138873685337, 2.44385524356e-5], np.float32)


# An eighth of a turn is added to a phase. Its top two bits then say which quarter turn is nearest
# (the sign of the sine there, and whether the quarter is odd); the other bits are the distance from
# that quarter turn, plus an eighth.
_SIGN, _IS_ODD, _REST = np.uint32(1 << 31), np.uint32(1 << 30), np.uint32((1 << 30) - 1)
_EIGHTH = np.uint32(1 << 29)


def _sine_of_phase(phase: _Phase, quarters: Quarters) -> Real:
    """Computes the sine of a phase plus some quarter turns, by one polynomial.

    Near an even quarter turn it is the polynomial of the sine, and else of the cosine.
    """
    shifted = phase.high + ((quarters << 30) + _EIGHTH)
    is_sine = shifted & _IS_ODD == 0
    angle, residue = _radians((shifted & _REST).astype(jnp.int32) - (1 << 29), phase.low)
    square = angle * angle
    # The first two terms of the cosine, and the rounding error of their sum.
    half = 0.5 * square
    leading = 1.0 - half
    lost = (1.0 - leading) - half
    choose = functools.partial(jnp.where, is_sine)
    # The sum of `first` and `last` is the angle, or 1 - angle**2 / 2, with its rounding error.
    first = choose(angle, leading)
    last = choose(residue, lost - angle * residue)
    factor = choose(angle, square) * square
    c_0, c_1, c_2 = map(choose, _SINE, _COSINE)
    value = first + (factor * ((c_2 * square + c_1) * square + c_0) + last)
    # The top bit says whether the sine is negative here, so it flips the sign bit.
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) ^ (shifted & _SIGN)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _radians(rest: Whole, low: Word) -> tuple[Real, Real]:
    """Returns `rest * 2**-32 + low * 2**-64` turns in radians, and the rounding error of that."""
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
