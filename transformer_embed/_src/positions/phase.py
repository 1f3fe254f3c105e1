"""Computes sines of `position * frequency` that are exact at any position.

An angle `position * frequency` matters only modulo one turn, so it is kept as a *phase*: a fraction
of a turn in 64-bit fixed point, held in two uint32 words (high, low). A frequency is held in turns
per unit of position, as three words (whole turns, high, low), which are computed with arbitrary
precision while tracing. The integer product of position and frequency wraps modulo one turn by
itself. The phase of a 32-bit position has an error of at most the position times 2**-65 turns. A
float32 product would lose one bit of the angle each time the position doubles.

The sine of a phase is computed in two steps. The nearest quarter turn says which polynomial and
which sign to use, and the rest, at most an eighth of a turn, goes into the polynomial.
"""

import decimal
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

    high: Any
    low: Word


def as_positions(name: str, value: ArrayLike) -> Array | np.ndarray:
    """Converts positions to int32 or float32, so that most dtypes share one compiled program.

    An array on the host stays there, because a compiled function takes it faster than a result of
    `jnp.asarray`. These arrays keep their dtype:

    - a uint32 array on the host with a number of 2**31 or more, which int32 does not hold;
    - jax arrays of uint32, int64, uint64 or float64. Nobody can check a traced number, and int32 or
      float32 may not hold it.

    Raises:
        TypeError: The positions are neither integers nor float32 or float64.
        ValueError: On the host, an integer is outside int32 (and the dtype is not uint32), or
            rounding float64 to float32 would change an integer.
    """
    if arguments.is_int32(value):
        return value
    array = arguments.as_array(name, value)
    is_on_host = isinstance(array, np.ndarray)
    if jnp.issubdtype(array.dtype, jnp.integer):
        if is_on_host and array.dtype == np.uint32 and array.max(initial=0) >= 2**31:
            return array
        # `as_integers` keeps the dtype of a jax array if int32 does not hold all of the dtype.
        return arguments.as_integers(name, array)
    if array.dtype not in (np.float32, np.float64):
        want = "an integer dtype, or float32 (16-bit floats skip integers)"
        raise arguments.type_error(name, want, array.dtype)
    if is_on_host and array.dtype == np.float64:
        return _rounded_to_float32(name, array)
    return array


def _rounded_to_float32(name: str, array: np.ndarray) -> np.ndarray:
    """Rounds float64 to float32, or raises a ValueError if that would change an integer."""
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    # Below 2**24, float32 holds every integer, and rounds only fractions.
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

    Returns:
        An array of `decimal.Decimal`, [count], of dtype object. numpy computes with the numbers one
        by one.
    """
    # Each frequency is a constant of the compiled program, so a huge number of them is a mistake.
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


def in_turn_units(frequencies: np.ndarray) -> tuple[int, ...]:
    """Converts frequencies from radians per unit of position to units of 2**-64 turns.

    Raises:
        ValueError: A frequency is 2**32 turns or more.
    """
    with decimal.localcontext(PRECISION):
        turns = [frequency / (2 * PI) for frequency in frequencies]
        # An infinite frequency cannot be rounded to an integer. So frequencies of 2**32 turns or
        # more are limited to 2**32 turns, and refused below.
        integers = [round(min(number, 2**32) * 2**64) for number in turns]
    if max(integers, default=0) >= 2**96:
        raise arguments.value_error(
            "base and frequency_scale",
            "frequencies below 2**32 turns per position",
            f"{max(frequencies):.3g} radians",
        )
    return tuple(integers)


def in_words(units: Sequence[int] | np.ndarray) -> Words:
    """Splits frequencies in units of 2**-64 turns into words of 32 bits: whole turns, high, low.

    For example, the frequency 3 * 2**64 + 5 * 2**32 + 7 gives the words 3, 5 and 7.
    """
    integers = np.array(units, object)

    def word_from_bit(bit: int) -> np.ndarray:
        """Returns 32 bits, of which this one is the lowest."""
        shifted = integers >> bit
        return (shifted & 0xFFFFFFFF).astype(np.uint32)

    whole_turns = word_from_bit(64)
    high = word_from_bit(32)
    low = word_from_bit(0)
    return whole_turns, high, low


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
          uint32 position. The same holds at float32 positions below 2**24 in magnitude if no
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
        # At an integer position, the whole turns of a frequency add whole turns to the angle.
        _, high, low = frequencies
        sine = _sine_of_phase(_multiply(narrow, high, low), quarters)
    if dtype.itemsize < 8:
        return sine
    return nan_where(~_is_held(positions, narrow), sine)


def _is_held(positions: Shaped[Array, "... #d"], narrow: Shaped[Array, "... #d"]) -> Array:
    """Returns which 64-bit positions have kept their value in 32 bits. A fraction may be rounded.

    Args:
        positions: Positions of an integer dtype of 64 bits, or of float64.
        narrow: The same positions, converted to 32 bits.
    """
    dtype = positions.dtype
    if dtype == jnp.uint64:
        # A comparison with `narrow` would miss 2**64 - 1, which wraps to -1 and back.
        return positions < 2**31
    is_held = narrow.astype(dtype) == positions
    if jnp.issubdtype(dtype, jnp.floating):
        # Below 2**24, float32 holds every integer, and rounds only fractions.
        is_held |= jnp.abs(positions) < 2**24
    return is_held


def multiply_high(a: Whole, b: Array | np.ndarray | np.uint32) -> Word:
    """Computes the upper 32 bits of the product of an int32 or uint32 `a` and a uint32 `b`.

    Both numbers are split into halves of 16 bits: a = a_high * 2**16 + a_low. So the product is

        a_high * b_high * 2**32 + (a_high * b_low + a_low * b_high) * 2**16 + a_low * b_low

    and each product of two halves fits 32 bits.
    """
    a_low = (a & 0xFFFF).astype(jnp.uint32)
    a_high = (a >> 16).astype(jnp.uint32)
    b_low = b & 0xFFFF
    b_high = b >> 16
    # The first mixed product, plus the upper half of the lowest product, in units of 2**16.
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    # If `a` is negative, `middle` is negative too. A signed shift keeps the sign.
    middle_high = (middle.astype(a.dtype) >> 16).astype(jnp.uint32)
    upper = a_high * b_high + middle_high
    # The second mixed product, plus what `middle_high` leaves out of the first one.
    middle_low = a_low * b_high + (middle & 0xFFFF)
    return upper + (middle_low >> 16)


def _multiply(integer: Whole, high: Any, low: Any) -> _Phase:
    """Multiplies an int32 or uint32 by a fraction of a turn in two words, modulo one turn."""
    word = integer.astype(jnp.uint32)
    # `word * high` may wrap, which takes away whole turns.
    high_of_product = word * high + multiply_high(integer, low)
    return _Phase(high=high_of_product, low=word * low)


@jax.custom_jvp
def _sine_at_float(positions: Real, frequencies: Words, quarters: Quarters) -> Real:
    """Computes `sinusoid` at float32 positions."""
    magnitude = jnp.abs(positions)
    # The sine of -angle + quarters is the sine of angle + half a turn - quarters, and two quarters
    # are half a turn.
    quarters = jnp.where(positions < 0, np.uint32(2) - quarters, quarters)
    sine = _sine_of_phase(_float_phase(magnitude, frequencies), quarters)
    return nan_where(~(magnitude < 2.0**31), sine)


@_sine_at_float.defjvp
def _sine_at_float_jvp(primals: Any, tangents: Any) -> tuple[Real, Real]:
    """Computes the sine, and the tangent of the sine for the tangent of the positions."""
    positions, frequencies, quarters = primals
    position_tangent, *_ = tangents
    turns, high, low = jax.tree.map(lambda word: word.astype(jnp.float32), frequencies)
    turns_per_unit = turns + (high * 2**-32 + low * 2**-64)
    radians_per_unit = 2 * np.pi * turns_per_unit
    # The derivative of the sine is the cosine, which is the sine a quarter turn on.
    cosine = _sine_at_float(positions, frequencies, quarters + np.uint32(1))
    derivative = radians_per_unit * cosine
    sine = _sine_at_float(positions, frequencies, quarters)
    return sine, derivative * position_tangent


def _float_phase(magnitude: Real, frequencies: Words) -> _Phase:
    """Computes the phase of |position|, from the words of its whole part and of its fraction.

    The magnitude is `integer + first * 2**-32 + second * 2**-64`, where first and second are words
    of the fraction, and the frequency is `turns + high * 2**-32 + low * 2**-64`. The phase is the
    sum of the products of two words, but whole turns and what is below 2**-64 turns are left out.
    """
    integer = jnp.floor(magnitude)
    # These steps are exact, because a float32 has 24 bits and scaling by a power of two rounds
    # nothing.
    scaled_fraction = (magnitude - integer) * 2.0**32
    first = jnp.floor(scaled_fraction)
    second = (scaled_fraction - first) * 2.0**32
    first = first.astype(jnp.uint32)
    second = second.astype(jnp.uint32)
    turns, high, low = frequencies
    # The products of the integer with turns are whole turns.
    integer_phase = _multiply(integer.astype(jnp.uint32), high, low)
    first_phase = _multiply(first, turns, high)
    # Of the product of first and low, only the upper word is above 2**-64 turns. The same holds for
    # the product of second and high.
    first_low_phase = _Phase(high=0, low=multiply_high(first, low))
    second_high = multiply_high(second, turns)
    second_low = second * turns + multiply_high(second, high)
    second_phase = _Phase(high=second_high, low=second_low)
    phase = _add(integer_phase, first_phase)
    phase = _add(phase, first_low_phase)
    return _add(phase, second_phase)


def _add(phase: _Phase, other: _Phase) -> _Phase:
    """Adds two phases, modulo one turn."""
    low_sum = phase.low + other.low
    # A sum that wraps is smaller than each of its terms.
    carry = (low_sum < phase.low).astype(jnp.uint32)
    return _Phase(high=phase.high + other.high + carry, low=low_sum)


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


# An eighth of a turn is added to the high word of a phase. The two top bits of the sum then say
# which quarter turn is nearest: whether the sine is negative there, and whether the quarter turn is
# odd. The other bits are the distance from that quarter turn, plus an eighth of a turn.
_SIGN_BIT = np.uint32(1 << 31)
_ODD_BIT = np.uint32(1 << 30)
_DISTANCE_BITS = np.uint32((1 << 30) - 1)
_EIGHTH_TURN = np.uint32(1 << 29)


def _sine_of_phase(phase: _Phase, quarters: Quarters) -> Real:
    """Computes the sine of a phase plus some quarter turns.

    If the nearest quarter turn is even, the sine is computed by the polynomial of the sine, from
    the distance to that quarter turn. If it is odd, the polynomial of the cosine is used.
    """
    # A quarter turn is 2**30 units of the high word.
    shifted = phase.high + ((quarters << 30) + _EIGHTH_TURN)
    is_even = (shifted & _ODD_BIT) == 0
    distance_plus_eighth = (shifted & _DISTANCE_BITS).astype(jnp.int32)
    distance = distance_plus_eighth - (1 << 29)
    angle, angle_error = _radians(distance, phase.low)
    square = angle * angle
    # The first two terms of the cosine, 1 - angle**2 / 2, and the rounding error of their sum.
    half = 0.5 * square
    cosine_start = 1.0 - half
    start_error = (1.0 - cosine_start) - half

    def choose(of_sine: Any, of_cosine: Any) -> Any:
        """Returns the term of the sine or of the cosine, whichever is computed."""
        return jnp.where(is_even, of_sine, of_cosine)

    leading = choose(angle, cosine_start)
    leading_error = choose(angle_error, start_error - angle * angle_error)
    # The remaining terms: angle**3 * S(angle**2), or angle**4 * C(angle**2).
    factor = choose(angle, square) * square
    c_0, c_1, c_2 = map(choose, _SINE, _COSINE)
    remaining = factor * ((c_2 * square + c_1) * square + c_0)
    value = leading + (remaining + leading_error)
    # The sign bit of the float is flipped where the sine is negative.
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    signed_bits = bits ^ (shifted & _SIGN_BIT)
    return jax.lax.bitcast_convert_type(signed_bits, jnp.float32)


def _radians(distance: Whole, low: Word) -> tuple[Real, Real]:
    """Returns an angle in radians, and its rounding error.

    The angle is `distance * 2**-32 + low * 2**-64` turns, and `distance` is from -2**29 to 2**29.
    The distance is split into the nearest multiple of 2**18, `coarse`, and the rest, `fine`. The
    product of `coarse` and `_RADIANS_FIRST` is exact, because `coarse` has 12 bits above its zeros.
    For example, the distance 2**18 + 5 has the coarse part 2**18 and the fine part 5.
    """
    # Adding half a step and then clearing the 18 low bits rounds to the nearest multiple.
    coarse = (distance + (1 << 17)) & -(1 << 18)
    # A CPU converts a signed 24-bit integer to float32 exactly, in one instruction.
    below = (low >> 8).astype(jnp.int32).astype(jnp.float32)
    fine = (distance - coarse).astype(jnp.float32) + below * np.float32(2**-24)
    coarse = coarse.astype(jnp.float32)
    exact = coarse * _RADIANS_FIRST
    small = coarse * _RADIANS_SECOND + fine * _RADIANS
    angle = exact + small
    rounding_error = (exact - angle) + small
    return angle, rounding_error
