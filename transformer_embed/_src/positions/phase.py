"""Computes sines of `position * frequency` that are exact at any position.

An angle `position * frequency` matters only modulo one turn, so it is kept as a *phase*: a fraction
of a turn in 64-bit fixed point, held in two uint32 words (high, low). The phase is
`high * 2**-32 + low * 2**-64` turns. A frequency is held in turns per unit of position, as three
words (turns, high, low), where `turns` counts whole turns. These words are computed with arbitrary
precision while tracing. The integer product of position and frequency wraps modulo one turn by
itself. The phase of a 32-bit position has an error of at most the position times 2**-65 turns. A
float32 product would lose one bit of the angle each time the position doubles.

The sine of a phase is computed in two steps. The nearest quarter turn says which polynomial and
which sign to use, and the rest, at most an eighth of a turn, goes into the polynomial.

A function argument `quarters` says how many quarter turns are added to an angle: 0 gives the sine
of the angle, and 1 gives the cosine, which is the sine a quarter turn on.
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

# An array of words of 32 bits, one for each position or channel.
Word = UInt32[Array, "..."]
# The frequency of each channel, turns + high * 2**-32 + low * 2**-64 turns per unit of position.
# The tuple holds the arrays of words (turns, high, low).
Words = tuple[Array | np.ndarray, ...]
# The number of quarter turns that are added to an angle: 0 for a sine, 1 for a cosine.
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
    - jax arrays of uint32, int64, uint64 or float64. Their numbers may be traced, so nobody can
      check whether int32 or float32 holds them. `sinusoid` returns NaN for the others.

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
        # `as_integers` keeps the dtype of a jax array if some numbers of this dtype do not fit
        # int32.
        return arguments.as_integers(name, array)
    if array.dtype not in (np.float32, np.float64):
        want = "an integer dtype, or float32 (16-bit floats skip integers)"
        raise arguments.type_error(name, want, array.dtype)
    if is_on_host and array.dtype == np.float64:
        return _rounded_to_float32(name, array)
    # This is float32, or a float64 jax array.
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
        # This is a slice, because there may be no frequency.
        factors[:1] = Decimal(frequency_scale)
        return np.multiply.accumulate(factors)


def as_fixed_point(frequencies: np.ndarray, set_by: str) -> tuple[int, ...]:
    """Converts frequencies from radians per unit of position to integers, in units of 2**-64 turns.

    For example, the frequency pi is half a turn, and gives 2**63.

    Args:
        frequencies: The frequencies, of the type `decimal.Decimal`.
        set_by: The arguments that set the frequencies, for the error.

    Raises:
        ValueError: A frequency is 2**32 turns or more.
    """
    with decimal.localcontext(PRECISION):
        turns = [frequency / (2 * PI) for frequency in frequencies]
        # An infinite frequency cannot be rounded to an integer. So frequencies of 2**32 turns or
        # more are limited to 2**32 turns, and refused below.
        limited_turns = [min(number, Decimal(2**32)) for number in turns]
        integers = [round(number * 2**64) for number in limited_turns]
    # 2**32 turns are 2**96 units of 2**-64 turns.
    if max(integers, default=0) >= 2**96:
        want = "frequencies below 2**32 turns per position"
        raise arguments.value_error(set_by, want, f"{max(frequencies):.3g} radians")
    return tuple(integers)


def words_of_fixed_point(integers: Sequence[int] | np.ndarray) -> Words:
    """Splits frequencies of `as_fixed_point` into words of 32 bits: whole turns, high, low.

    For example, the frequency 3 * 2**64 + 5 * 2**32 + 7 gives the words 3, 5 and 7.
    """
    integers = np.array(integers, object)

    def word_from_bit(bit: int) -> np.ndarray:
        """Returns 32 bits, of which this one is the lowest."""
        shifted = integers >> bit
        return (shifted & 0xFFFFFFFF).astype(np.uint32)

    turns = word_from_bit(64)
    high = word_from_bit(32)
    low = word_from_bit(0)
    return turns, high, low


def sinusoid(
    positions: Shaped[Array, "... #d"], frequencies: Words, quarters: Array | np.ndarray
) -> Float32[Array, "... d"]:
    """Computes `sin(position * frequency + quarter * pi / 2)` for each channel.

    Args:
        positions: Positions of any integer dtype, float32 or float64, [..., 1], or [..., d] with a
            position for each channel.
        frequencies: The frequency of each channel, from `words_of_fixed_point`: three arrays [d].
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
        # The product of an integer position and whole turns is a number of whole turns, which
        # changes no sine. So the whole turns of the frequencies are left out.
        _, high, low = frequencies
        phase_of_position = _multiply(narrow, high, low)
        sine = _sine_of_phase(phase_of_position, quarters)
    if dtype.itemsize < 8:
        return sine
    is_wrong = ~_fits_32_bits(positions, narrow)
    return nan_where(is_wrong, sine)


def _fits_32_bits(positions: Shaped[Array, "... #d"], narrow: Shaped[Array, "... #d"]) -> Array:
    """Returns which 64-bit positions were converted to 32 bits without an error.

    Rounding a fraction below 2**24 is no error.

    Args:
        positions: Positions of an integer dtype of 64 bits, or of float64.
        narrow: The same positions, converted to int32 or float32.
    """
    dtype = positions.dtype
    if dtype == jnp.uint64:
        # A comparison with `narrow` would miss 2**64 - 1: it becomes -1 in int32, and 2**64 - 1
        # again in uint64.
        return positions < 2**31
    fits = narrow.astype(dtype) == positions
    if jnp.issubdtype(dtype, jnp.floating):
        # Below 2**24, float32 holds every integer, and rounds only fractions.
        fits |= jnp.abs(positions) < 2**24
    return fits


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
    # If `a` is a negative int32, `middle` may be one, too. In the dtype of `a`, the shift keeps the
    # sign.
    signed_middle = middle.astype(a.dtype)
    middle_high = (signed_middle >> 16).astype(jnp.uint32)
    upper = a_high * b_high + middle_high
    # The second mixed product, plus the lower half of `middle`, in units of 2**16.
    second_middle = a_low * b_high + (middle & 0xFFFF)
    return upper + (second_middle >> 16)


def _multiply(integer: Whole, high: Any, low: Any) -> _Phase:
    """Multiplies an int32 or uint32 by `high * 2**-32 + low * 2**-64` turns, modulo one turn.

    The result is a phase, a fraction of a turn in two words of 32 bits.
    """
    word = integer.astype(jnp.uint32)
    # `word * high` may wrap, which takes away whole turns.
    high_of_product = word * high + multiply_high(integer, low)
    return _Phase(high=high_of_product, low=word * low)


@jax.custom_jvp
def _sine_at_float(positions: Real, frequencies: Words, quarters: Quarters) -> Real:
    """Computes `sinusoid` at float32 positions.

    `frequencies` are the words (turns, high, low) of each frequency, and `quarters` are the quarter
    turns that are added to each angle: 0 gives the sine and 1 the cosine.
    """
    magnitude = jnp.abs(positions)
    # The phase is computed for the magnitude. A negative position has the angle -angle, and needs
    # the sine of x = quarters - angle. As sin(x) = sin(half a turn - x), this is the sine of
    # angle + half a turn - quarters, and half a turn is 2 quarters.
    is_negative = positions < 0
    quarters_at_negative = np.uint32(2) - quarters
    quarters = jnp.where(is_negative, quarters_at_negative, quarters)
    phase = _float_phase(magnitude, frequencies)
    sine = _sine_of_phase(phase, quarters)
    # `sinusoid` returns NaN at a magnitude of 2**31 or more, which int32 does not hold either. The
    # comparison is also false for NaN.
    is_valid = magnitude < 2.0**31
    return nan_where(~is_valid, sine)


@_sine_at_float.defjvp
def _sine_at_float_jvp(primals: Any, tangents: Any) -> tuple[Real, Real]:
    """Computes the sine, and the tangent of the sine for the tangent of the positions."""
    positions, frequencies, quarters = primals
    position_tangent, *_ = tangents
    # A frequency is turns + high * 2**-32 + low * 2**-64 turns per unit of position.
    turns, high, low = jax.tree.map(lambda word: word.astype(jnp.float32), frequencies)
    turns_per_unit = turns + (high * 2**-32 + low * 2**-64)
    radians_per_unit = 2 * np.pi * turns_per_unit
    # The derivative of the sine is the cosine, which is the sine a quarter turn on.
    cosine = _sine_at_float(positions, frequencies, quarters + np.uint32(1))
    derivative = radians_per_unit * cosine
    sine = _sine_at_float(positions, frequencies, quarters)
    return sine, derivative * position_tangent


def _float_phase(magnitude: Real, frequencies: Words) -> _Phase:
    """Computes the phase of |position| * frequency, from the products of their words.

    The magnitude is `integer + first * 2**-32 + second * 2**-64`, where first and second are words
    of the fraction, and the frequency is `turns + high * 2**-32 + low * 2**-64` turns. The nine
    products of two words have these units, in turns:

                     turns     high      low
        integer      1         2**-32    2**-64
        first        2**-32    2**-64    2**-96
        second       2**-64    2**-96    2**-128

    The product in whole turns is left out, because it changes no sine. Of the products in units of
    2**-96 turns, only the upper words are kept, which count 2**-64 turns. The last one is left out.
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
    integer_phase = _multiply(integer.astype(jnp.uint32), high, low)
    # The products of first with turns and high are the same, 2**32 times smaller.
    first_phase = _multiply(first, turns, high)
    first_low_phase = _Phase(high=0, low=multiply_high(first, low))
    # The product of second and turns has an upper and a lower word. The sum of lower words may
    # wrap, which loses 2**-32 turns, far less than the rounding of float32.
    second_high = multiply_high(second, turns)
    second_low = second * turns + multiply_high(second, high)
    second_phase = _Phase(high=second_high, low=second_low)
    phase = _add(integer_phase, first_phase)
    phase = _add(phase, first_low_phase)
    return _add(phase, second_phase)


def _add(phase: _Phase, other: _Phase) -> _Phase:
    """Adds two phases, fractions of a turn in two words each, modulo one turn."""
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


# The high word of a phase counts units of 2**-32 turns, so its two top bits say how many quarter
# turns are below the phase. If an eighth of a turn is added first, the two top bits of the sum say
# which quarter turn is nearest. The top bit is 1 for the quarter turns 2 and 3, near which the sign
# of the polynomial is flipped. The second bit is 1 for the odd quarter turns 1 and 3. The other 30
# bits are the distance from the nearest quarter turn, plus an eighth of a turn.
_SIGN_BIT = np.uint32(1 << 31)
_ODD_BIT = np.uint32(1 << 30)
_DISTANCE_BITS = np.uint32((1 << 30) - 1)
_EIGHTH_TURN = np.uint32(1 << 29)


def _sine_of_phase(phase: _Phase, quarters: Quarters) -> Real:
    """Computes the sine of a phase plus some quarter turns.

    A phase is a fraction of a turn, `high * 2**-32 + low * 2**-64`, in two words of 32 bits.

    If the quarter turn that is nearest to the sum is even, the sine is the polynomial of the sine,
    at the distance from that quarter turn. If it is odd, the polynomial of the cosine is used.
    """
    # The phase and the quarter turns, plus an eighth of a turn. A quarter turn is 2**30 units of
    # the high word, and an eighth is 2**29. The two top bits of the sum are the number of the
    # nearest quarter turn, 0 to 3. The other 30 bits are the distance from this quarter turn, from
    # -2**29 to 2**29, plus an eighth of a turn.
    phase_plus_eighth = phase.high + ((quarters << 30) + _EIGHTH_TURN)
    is_even = (phase_plus_eighth & _ODD_BIT) == 0
    distance_plus_eighth = (phase_plus_eighth & _DISTANCE_BITS).astype(jnp.int32)
    distance = distance_plus_eighth - (1 << 29)
    # The distance in radians, and the rounding error of this angle.
    angle, angle_error = _radians(distance, phase.low)
    square = angle * angle
    # The first two terms of the cosine are 1 - angle**2 / 2. `start_error` is what must be added to
    # their rounded sum, `cosine_start`. It is 1 - half - cosine_start, in an order of the terms in
    # which nothing is rounded.
    half = 0.5 * square
    cosine_start = 1.0 - half
    start_error = (1.0 - cosine_start) - half

    def choose(of_sine: Any, of_cosine: Any) -> Any:
        """Returns the term of the sine or of the cosine, whichever is computed."""
        return jnp.where(is_even, of_sine, of_cosine)

    leading = choose(angle, cosine_start)
    # The true angle is angle + angle_error. The derivative of the cosine is -sin(angle), which is
    # about -angle, so the error of the angle changes the cosine by about -angle * angle_error.
    cosine_error = start_error - angle * angle_error
    leading_error = choose(angle_error, cosine_error)
    # The remaining terms are angle**3 * S(angle**2), or angle**4 * C(angle**2). S and C are the
    # polynomials with the coefficients `_SINE` and `_COSINE`, lowest first.
    factor = choose(angle, square) * square
    c_0 = choose(_SINE[0], _COSINE[0])
    c_1 = choose(_SINE[1], _COSINE[1])
    c_2 = choose(_SINE[2], _COSINE[2])
    remaining = factor * ((c_2 * square + c_1) * square + c_0)
    value = leading + (remaining + leading_error)
    # The sign bit of the float is flipped near the quarter turns 2 and 3, whose top bit is 1.
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    signed_bits = bits ^ (phase_plus_eighth & _SIGN_BIT)
    return jax.lax.bitcast_convert_type(signed_bits, jnp.float32)


def _radians(distance: Whole, low: Word) -> tuple[Real, Real]:
    """Returns an angle in radians, and the true angle minus the returned one.

    The true angle is `distance * 2**-32 + low * 2**-64` turns, and `distance` is from -2**29 to
    2**29. The distance is split into the nearest multiple of 2**18, `coarse`, and the rest, `fine`.
    The product of `coarse` and `_RADIANS_FIRST` is exact, because both have 12 bits above their
    zeros. For example, the distance 2**18 + 5 has the coarse part 2**18 and the fine part 5.
    """
    # Adding half a step and then clearing the 18 low bits rounds to the nearest multiple.
    coarse = (distance + (1 << 17)) & -(1 << 18)
    # In units of 2**-32 turns, `low` is the fraction low * 2**-32. The upper 24 bits of `low` are
    # enough, and a CPU converts a signed 24-bit integer to float32 exactly, in one instruction.
    upper_bits = (low >> 8).astype(jnp.int32).astype(jnp.float32)
    fine = (distance - coarse).astype(jnp.float32) + upper_bits * np.float32(2**-24)
    coarse = coarse.astype(jnp.float32)
    exact_product = coarse * _RADIANS_FIRST
    small_products = coarse * _RADIANS_SECOND + fine * _RADIANS
    angle = exact_product + small_products
    rounding_error = (exact_product - angle) + small_products
    return angle, rounding_error
