"""A few numbers beside a gradient's rows that say which rows these are, and that scale with them.

They are powers of two whose exponents are digits of a hash of the ids. Scaling by any number keeps
their ratios exactly. A mean or a sum over devices keeps them only if all devices have the same ids:
of thousands of devices, one with other ids changes a ratio by more than rounding does.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from transformer_embed._src.compiled import nan_where

# Exponents of 0..7 above the lowest.
DIGITS, BITS = 10, 3
# The squares of all are zero in float32, so a norm over all leaves stays as it is. And a gradient
# may be scaled by 1e-12.
LOWEST = -83
# Of ratios. One device of 32768 with other ids changes a ratio by more.
TOLERANCE = 2.0**-16


@jax.jit
def fingerprint(ids: Int32[Array, "k"]) -> Float[Array, "1 m"]:
    """Powers of two in float32. Rank 2, for functions that reduce the last axis of a table."""
    index = jnp.arange(ids.size, dtype=jnp.uint32)
    words = ids.astype(jnp.uint32) + index * np.uint32(0x9E3779B9)
    # The last steps of MurmurHash3: each bit of a word changes every bit of the result.
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    sums = jnp.sum(words ^ (words >> np.uint32(16)), dtype=jnp.uint32)
    digits = (sums >> np.arange(0, BITS * DIGITS, BITS, dtype=np.uint32)) % 2**BITS
    # The first one is the unit of the others. exp2 is not exact on every device.
    exponents = jnp.pad(digits, (1, 0)) + np.uint32(127 + LOWEST)
    return jax.lax.bitcast_convert_type(exponents << np.uint32(23), jnp.float32)[None]


@jax.jit
def fits(ids: Int32[Array, "k"], scaled: Float[Array, "1 m"]) -> Bool[Array, ""]:
    """Whether a fingerprint is that of the ids, times a number other than zero."""
    factors = scaled.astype(jnp.float32) / fingerprint(ids)
    factor = factors[0, 0]
    return jnp.all(jnp.abs(factors - factor) <= TOLERANCE * jnp.abs(factor)) & (factor != 0)


def or_nan(is_right: Bool[Array, ""], values: Float[Array, "k d"]) -> Float[Array, "k d"]:
    """The values if they are right; else NaN, save for zeros, as of a step that is skipped."""
    return nan_where(~is_right & (values != 0), values)
