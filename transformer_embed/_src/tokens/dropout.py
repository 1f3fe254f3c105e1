"""Applies dropout with the result of hk.dropout, at the speed of memory."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled


def dropout(
    rng: Array, rate: float, x: ArrayLike, *, broadcast_dims: Sequence[int] = ()
) -> Float[Array, "..."]:
    """Zeroes elements of x at random with probability `rate` and divides the others by `1 - rate`.

    Use it in place of `hk.dropout`. The result equals the result of a compiled `hk.dropout` bit for
    bit on finite x, for every key, because both use the same random bits. On a CPU, `hk.dropout`
    spends most of its time on generating these bits, because each step of JAX's generator reads and
    writes arrays in memory. This function computes the bits of each element in registers, so you
    train faster. (If JAX uses 64-bit floats or another generator than its default, this function
    calls `jax.random` as `hk.dropout` does.)

    Args:
        rng: A random key, from `jax.random.key` or `jax.random.PRNGKey`.
        rate: The probability that an element becomes 0, a Python float in [0, 1). If 0, x is
            returned as it is.
        x: The array, of a floating dtype and any shape.
        broadcast_dims: The dimensions of x along which all elements are kept or zeroed together, a
            sequence of Python ints. For x [batch, length, d], pass `[1]` to zero a channel at all
            tokens of a sequence.

    Returns:
        The array after dropout, of the shape and dtype of x.

    Raises:
        TypeError: `rate` is traced, or is not a number. `x` does not have a floating dtype of 16
            bits or more. `rng` is not a random key, or `broadcast_dims` is not a sequence of Python
            ints.
        ValueError: `rate` is outside [0, 1), or `broadcast_dims` names a dimension that x does not
            have.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.dropout(jax.random.key(0), 0.5, jnp.ones(6)).tolist()
        [0.0, 0.0, 2.0, 2.0, 0.0, 2.0]
        >>> te.dropout(jax.random.key(0), 0.5, jnp.ones([2, 3]), broadcast_dims=[0]).tolist()
        [[0.0, 0.0, 2.0], [0.0, 0.0, 2.0]]

    Edge cases:
        - A numpy scalar as `rate` counts as a Python float. (`hk.dropout` takes the dtype of the
          random floats from the scalar, so the result of `hk.dropout` may have a wider dtype than
          x.)
        - The backward pass must know which elements the forward pass zeroed. For this, compiled
          code generates the random bits a second time, or keeps a byte for each element from the
          forward pass. XLA chooses one of these ways, and both are equally fast.

    Source:
        Dropout is from Srivastava et al., "Dropout" (2014),
        https://jmlr.org/papers/v15/srivastava14a.html. The random bits are from the generator
        threefry-2x32 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011). The
        bits are the same as in `jax.random`.
    """
    rate = arguments.rate("rate", rate)
    x = arguments.as_floats("x", x)
    dimension = functools.partial(arguments.integer, at_least=-x.ndim, at_most=x.ndim - 1)
    shared_dimensions = arguments.entries("broadcast_dims", broadcast_dims, dimension)
    if rate == 0:
        return x
    mask_shape = list(x.shape)
    for shared_dimension in shared_dimensions:
        mask_shape[shared_dimension] = 1
    return _drop_elements(arguments.as_key(rng), x, 1 - rate, tuple(mask_shape))


@compiled(2, 3)
def _drop_elements(
    key: Array, x: Float[Array, "..."], keep_rate: float, mask_shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Applies dropout to x.

    The function is compiled for eager callers too, so that jax counts the key as used.
    `jax_debug_key_reuse` checks that.
    """
    # The steps are in the order of hk.dropout, so that the results are equal bit for bit. If the
    # product came after the quotient, it would be rounded in another way. If the mask were
    # converted before it is broadcast, zeros could have another sign.
    keep_mask = _keep_mask(key, keep_rate, mask_shape)
    mask = jnp.broadcast_to(keep_mask, x.shape)
    return mask.astype(x.dtype) * x / keep_rate


def _keep_mask(key: Array, keep_rate: float, shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """Computes `jax.random.bernoulli(key, keep_rate, shape)`, which is True for kept elements.

    If jax would use the default generator, a CPU computes the same random bits here. It computes
    the bits of each element by themselves, in registers, without writing other arrays to memory.
    """
    from_jax = functools.partial(jax.random.bernoulli, p=keep_rate, shape=shape)
    config: Any = jax.config
    is_threefry = str(jax.random.key_impl(key)) == "threefry2x32"
    # If this holds, jax makes the bits of an element from the key and the element's index alone.
    counts_elements = config.jax_threefry_partitionable and is_threefry
    # The uniform numbers that jax compares with the rate have 32 bits, unless x64 is on.
    uses_32_bits = jnp.result_type(float) == jnp.float32
    # jax counts elements in 64 bits, but here the upper 32 bits of the index are taken as 0.
    has_known_size = all(isinstance(size, int) for size in shape)
    is_small = has_known_size and math.prod(shape) < 2**32
    can_compute_same_bits = counts_elements and uses_32_bits and is_small
    if not can_compute_same_bits:
        return from_jax(key)

    def in_registers(key):
        """Computes the mask by arithmetic of each element alone, which XLA fuses into one loop."""
        key_words = jax.random.key_data(key)
        # The index of each element in the flattened array.
        counters = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        first_word, second_word = _threefry(key_words[0], key_words[1], counters)
        random_bits = first_word ^ second_word
        # Let n be the integer in the upper 23 bits. jax keeps an element if n / 2**23 is below
        # keep_rate, as float32 numbers. Here integers are compared: n is below `keep_rate * 2**23`
        # exactly if n is below this number rounded up.
        upper_23_bits = random_bits >> 9
        rounded_rate = float(np.float32(keep_rate))
        threshold = math.ceil(rounded_rate * 2**23)
        return upper_23_bits < np.uint32(threshold)

    return jax.lax.platform_dependent(key, cpu=in_registers, default=from_jax)


# The bits by which the rounds of threefry-2x32 rotate a word, for even and for odd groups of
# rounds, and the constant of the third word of a key. Both are in the paper.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_CONSTANT = np.uint32(0x1BD11BDA)


def _threefry(
    key_0: Array, key_1: Array, counters: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Computes the two random words of each counter by threefry-2x32.

    A counter has two words. The upper word is 0, and `counters` are the lower words.
    """
    keys = (key_0, key_1, key_0 ^ key_1 ^ _KEY_CONSTANT)
    # The words of the counter plus the words of the key. The upper word of the counter is 0.
    word_0 = key_0
    word_1 = counters + key_1
    # There are five groups of four rounds. After each group, the next two of the three words of the
    # key are added, and the number of the group.
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            word_0 = word_0 + word_1
            rotated = (word_1 << rotation) | (word_1 >> (32 - rotation))
            word_1 = rotated ^ word_0
        word_0 = word_0 + keys[(group + 1) % 3]
        word_1 = word_1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return word_0, word_1
