"""Makes a few numbers beside the gradient of some rows, which show if something mixed the rows.

You may scale a gradient as a whole, cast it, or average it over devices that have the same rows.
All other functions of a gradient would give other updates than for the dense gradient, because they
see only some rows. The fingerprint is a row of two kinds of numbers, which are scaled with the
gradient:

- Powers of two, whose exponents are digits of a hash of the row indices. Scaling keeps the ratios
  of the powers exactly. A mean or a sum over devices keeps the ratios only if all devices have the
  same rows: of thousands of devices, one with other rows changes a ratio by more than rounding
  does.
- Sums of some values with random signs. The sums are linear in the values, so the mean of the sums
  over devices belongs to the mean of the values. But if something scaled the values by another
  number than the fingerprint, the sums no longer belong to the values. For example, a clip of each
  leaf by its own size does that.

Letters of shapes: k rows of a gradient, r rows whose values are summed, d columns, m numbers of a
fingerprint, s sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from transformer_embed._src import conversions
from transformer_embed._src.compiled import nan_where

# There are 10 powers of two besides the first one. An exponent is LOWEST plus a digit of 3 bits.
DIGITS = 10
BITS = 3
# The squares of all powers are zero in float32, so a norm over all leaves stays as it is. Also, the
# powers are still normal numbers if a gradient is scaled by 1e-12.
LOWEST = -83
# How far a ratio of two powers may change. One device of 32768 with other rows changes it by more.
RATIO_TOLERANCE = 2.0**-16

# How many sums there are, and from how many rows. The first rows of a gradient have the lowest ids
# of a batch. These are often the most frequent ids, whose gradients are seldom all zero.
SUMS = 4
SUMMED_ROWS = 64
# The squares of the sums are too small to change the norm of the values, and a gradient may still
# be scaled by 1e-12.
SUM_FACTOR = 2.0**-40
# How far a sum may be from the sum of the values, in norms of the values. bfloat16 rounds each
# value by up to 2**-9 of itself.
SUM_TOLERANCE = 2.0**-5

# The row and the column of a value are multiplied by these odd numbers, then added and hashed. Such
# large factors make the sums of neighbouring rows and columns different.
ROW_FACTOR = np.uint32(0x9E3779B9)
COLUMN_FACTOR = np.uint32(0x85EBCA77)


@jax.jit
def fingerprint(row_indices: Int32[Array, "k"], values: Float[Array, "k d"]) -> Float[Array, "1 m"]:
    """Makes the fingerprint of a gradient, in float32: powers of two, then signed sums of values.

    The fingerprint has rank 2, so that functions that reduce the last axis of a table can take it.
    """
    sums = _signed_sums(_sample(values)) * SUM_FACTOR
    powers = _powers(row_indices)
    return jnp.concatenate([powers, sums[None].astype(jnp.float32)], axis=1)


@jax.jit
def fits(
    row_indices: Int32[Array, "k"], values: Float[Array, "k d"], scaled: Float[Array, "1 m"]
) -> Bool[Array, ""]:
    """Returns whether a fingerprint belongs to a gradient, if both may have been scaled since.

    A function that only scales a gradient multiplies the values and the fingerprint by the same
    number. So the fingerprint fits if two conditions hold:

    - The first numbers of the fingerprint are the powers of two that `_powers` makes from the row
      indices, all multiplied by one number.
    - The last numbers are the signed sums of the first rows of `values`, times SUM_FACTOR.

    Args:
        row_indices: The row indices of the gradient.
        values: The values of the gradient, as they are now.
        scaled: The fingerprint, as it is now.
    """
    scaled = scaled.astype(jnp.float32)
    powers = _powers(row_indices)
    power_count = powers.shape[1]
    # The number by which each power was multiplied. All of these must be equal.
    factors = scaled[:, :power_count] / powers
    factor = factors[0, 0]
    difference_of_factors = jnp.abs(factors - factor)
    are_ratios_kept = jnp.all(difference_of_factors <= RATIO_TOLERANCE * jnp.abs(factor))

    # The sums in the fingerprint are compared with new sums of the values. Both are scaled by the
    # same number, so the comparison does not need that number. Both are divided by the largest
    # value first, because squares of small values are 0.
    sample = _sample(values)
    largest = jnp.max(jnp.abs(sample), initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    relative_values = sample / unit
    relative_sums = scaled[0, power_count:] / SUM_FACTOR / unit
    difference = jnp.abs(relative_sums - _signed_sums(relative_values))
    # `lost` is how far a sum may be off because numbers were rounded to 0. A value becomes 0 if it
    # is below the smallest number of its dtype, such as float16. A sum becomes 0 if it is too small
    # for float32 after the product with SUM_FACTOR. (The sum of values below some 1e-26 is.) The
    # errors of n values with random signs add up to about sqrt(n) of them.
    smallest_value = float(jnp.finfo(values.dtype).smallest_subnormal)
    smallest_sum = float(np.finfo(np.float32).tiny) / SUM_FACTOR
    lost = max(smallest_value, smallest_sum) * sample.size**0.5
    norm = jnp.sqrt(jnp.sum(relative_values**2))
    tolerance = SUM_TOLERANCE * norm + lost / unit
    is_near = difference <= tolerance
    return are_ratios_kept & (factor != 0) & jnp.all(is_near)


def or_nan(is_right: Bool[Array, ""], values: Float[Array, "k d"]) -> Float[Array, "k d"]:
    """Returns the values if they are right, and otherwise NaN in the place of each nonzero value.

    Zeros stay, because a step that is skipped multiplies a gradient and the fingerprint by 0. A
    fingerprint of zeros fits no gradient, but the gradient of zeros is right.
    """
    return nan_where(~is_right & (values != 0), values)


def _powers(row_indices: Int32[Array, "k"]) -> Float[Array, "1 m"]:
    """Makes powers of two in float32 from a hash of the row indices.

    Gradients of different rows get different powers (nearly always), so a mean of their
    fingerprints has other ratios between the powers. The first power is always 2**LOWEST.
    """
    # The hash of an index also depends on where the index is in the array.
    numbers = jnp.arange(row_indices.size, dtype=jnp.uint32)
    words = row_indices.astype(jnp.uint32) + numbers * ROW_FACTOR
    index_hash = jnp.sum(_hashed(words), dtype=jnp.uint32)
    # The hash is cut into DIGITS digits of BITS bits, the lowest bits first.
    first_bits = np.arange(0, BITS * DIGITS, BITS, dtype=np.uint32)
    digits = (index_hash >> first_bits) % 2**BITS
    # A digit of 0 is put first. Its power is known, so a scaled power shows the factor at once.
    all_digits = jnp.pad(digits, (1, 0))
    # The power of a digit is 2**(LOWEST + digit). It is made from the bits of float32, because exp2
    # is not exact on every device. These bits are the exponent plus 127, then 23 bits of the
    # fraction, which are 0.
    exponent_bits = all_digits + np.uint32(127 + LOWEST)
    float_bits = exponent_bits << np.uint32(23)
    powers = jax.lax.bitcast_convert_type(float_bits, jnp.float32)
    return powers[None]


def _sample(values: Float[Array, "k d"]) -> Float[Array, "r d"]:
    """Returns the values that are summed, in float32 or wider, with 0 for NaN and infinity."""
    sample: Any = conversions.widened(values[:SUMMED_ROWS])
    return jnp.where(jnp.isfinite(sample), sample, 0)


def _signed_sums(sample: Float[Array, "r d"]) -> Float[Array, "s"]:
    """Adds all values of a sample SUMS times, each time with other signs."""
    # Each value gets a word of 32 bits, a hash of the row and the column of the value. In sum i,
    # bit i of the word says whether the value is negated.
    rows = jax.lax.broadcasted_iota(jnp.uint32, sample.shape, 0)
    columns = jax.lax.broadcasted_iota(jnp.uint32, sample.shape, 1)
    row_words = rows * ROW_FACTOR
    column_words = columns * COLUMN_FACTOR
    # The 1 is added because the hash of 0 is 0.
    words = _hashed(row_words + column_words + np.uint32(1))
    # Arrays with the axes [s, r, d].
    bit_of_sum = np.arange(SUMS, dtype=np.uint32)[:, None, None]
    bits = (words[None] >> bit_of_sum) % 2
    is_negative = bits == 1
    signed_values = jnp.where(is_negative, -sample[None], sample[None])
    return jnp.sum(signed_values, axis=(1, 2))


def _hashed(words: Any) -> Any:
    """Hashes each uint32, so that each bit of a word can change all bits of the result.

    These are the last steps of MurmurHash3, with the same constants.
    """
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
