"""A few numbers beside the gradient of some rows that show if something mixed or changed the rows.

You may scale a gradient as a whole, cast it, or average it over devices that have the same rows.
All other functions of a gradient would give other updates than for the dense gradient, because they
see only some rows. The fingerprint is a row of two kinds of numbers, which are scaled with the
gradient:

- powers of two, whose exponents are digits of a hash of the row indices. Scaling keeps their ratios
  exactly. A mean or a sum over devices keeps them only if all devices have the same rows: of
  thousands of devices, one with other rows changes a ratio by more than rounding does.
- sums of some values with random signs. They are linear in the values, so a mean over devices keeps
  them. If something scaled the values by another number than the fingerprint, they differ from the
  sums of the scaled values. For example, a clip of each leaf by its own size does that.

Letters of shapes: k rows of a gradient, d columns, m numbers of a fingerprint, s sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.compiled import nan_where

# The exponents are digits of 3 bits, 0 to 7 above the lowest one.
DIGITS = 10
BITS = 3
# The squares of all powers are zero in float32, so a norm over all leaves stays as it is. And a
# gradient may be scaled by 1e-12.
LOWEST = -83
# How far a ratio of two powers may change. One device of 32768 with other rows changes it by more.
RATIO_TOLERANCE = 2.0**-16

# How many sums there are, and from how many rows. The first rows of a gradient have the lowest ids
# of a batch, which are often the most frequent ones: their gradients are seldom all zero.
SUMS = 4
SUMMED_ROWS = 64
# The squares of the sums are too small to change the norm of the values, and a gradient may still
# be scaled by 1e-12.
SUM_FACTOR = 2.0**-40
# How far a sum may be from that of the values, in norms of the values. bfloat16 rounds each value
# by up to 2**-9 of itself.
SUM_TOLERANCE = 2.0**-5


@jax.jit
def fingerprint(row_indices: Int32[Array, "k"], values: Float[Array, "k d"]) -> Float[Array, "1 m"]:
    """Makes the fingerprint of a gradient, in float32.

    It has rank 2, so that functions that reduce the last axis of a table can take it.
    """
    sums = _signed_sums(_sample(values)) * SUM_FACTOR
    return jnp.concatenate([_powers(row_indices), sums[None].astype(jnp.float32)], axis=1)


@jax.jit
def fits(
    row_indices: Int32[Array, "k"], values: Float[Array, "k d"], scaled: Float[Array, "1 m"]
) -> Bool[Array, ""]:
    """Returns whether a scaled fingerprint belongs to these rows, with values scaled as it is."""
    scaled = scaled.astype(jnp.float32)
    powers = _powers(row_indices)
    factors = scaled[:, : powers.shape[1]] / powers
    factor = factors[0, 0]
    are_ratios_kept = jnp.all(jnp.abs(factors - factor) <= RATIO_TOLERANCE * jnp.abs(factor))

    # The sums are compared divided by the largest value, because squares of small values are 0.
    sample = _sample(values)
    largest = jnp.max(jnp.abs(sample), initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    relative = sample / unit
    sums = scaled[0, powers.shape[1] :] / SUM_FACTOR / unit
    difference = jnp.abs(sums - _signed_sums(relative))
    # Values of 16 bits are multiples of a smallest number, and small sums become 0 in float32. So
    # nothing is known of values below some 1e-26.
    smallest = float(jnp.finfo(values.dtype).smallest_subnormal)
    lost = max(smallest, float(np.finfo(np.float32).tiny) / SUM_FACTOR) * sample.size**0.5
    norm = jnp.sqrt(jnp.sum(relative**2))
    is_near = difference <= SUM_TOLERANCE * norm + lost / unit
    return are_ratios_kept & (factor != 0) & jnp.all(is_near)


def or_nan(is_right: Bool[Array, ""], values: Float[Array, "k d"]) -> Float[Array, "k d"]:
    """Returns the values if they are right, or NaN in place of every value but zeros.

    Zeros stay, because a step that is skipped multiplies gradients by 0.
    """
    return nan_where(~is_right & (values != 0), values)


def _powers(row_indices: Int32[Array, "k"]) -> Float[Array, "1 m"]:
    """Makes powers of two in float32 from a hash of the row indices."""
    places = jnp.arange(row_indices.size, dtype=jnp.uint32)
    words = _mixed(row_indices.astype(jnp.uint32) + places * np.uint32(0x9E3779B9))
    total = jnp.sum(words, dtype=jnp.uint32)
    digits = (total >> np.arange(0, BITS * DIGITS, BITS, dtype=np.uint32)) % 2**BITS
    # The first power is the unit of the others. The bits of the floats are written, because exp2 is
    # not exact on every device.
    exponents = jnp.pad(digits, (1, 0)) + np.uint32(127 + LOWEST)
    return jax.lax.bitcast_convert_type(exponents << np.uint32(23), jnp.float32)[None]


def _sample(values: Float[Array, "k d"]) -> Float[Array, "r d"]:
    """Takes the values that are summed, in float32 or wider, with zeros for those not finite."""
    sample: Any = arguments.widened(values[:SUMMED_ROWS])
    return jnp.where(jnp.isfinite(sample), sample, 0)


def _signed_sums(sample: Float[Array, "r d"]) -> Float[Array, "s"]:
    """Adds all values of a sample several times, each time with other signs."""
    rows, columns = (jax.lax.broadcasted_iota(jnp.uint32, sample.shape, axis) for axis in (0, 1))
    words = _mixed(rows * np.uint32(0x9E3779B9) + columns * np.uint32(0x85EBCA77) + np.uint32(1))
    is_negative = (words[None] >> np.arange(SUMS, dtype=np.uint32)[:, None, None]) % 2 == 1
    return jnp.sum(jnp.where(is_negative, -sample[None], sample[None]), axis=(1, 2))


def _mixed(words: Any) -> Any:
    """Mixes the bits of each word by the last steps of MurmurHash3: all bits change all others."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
