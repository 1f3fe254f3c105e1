"""Position biases, added to attention logits: ALiBi's slopes and T5's buckets, from the positions of queries and keys."""

import bisect
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt

from transformer_embed import _checks


def alibi_slopes(num_heads: int, *, max_bias: float = 8.0) -> Float32[Array, "h"]:
    """ALiBi's slope of each head.

    Where num_heads = n is a power of two, for i in 0..n - 1:

        slopes[i] = 2 ** (-max_bias * (i + 1) / n)

    Otherwise n is the power of two below num_heads: its slopes come first, then the first, third, fifth, ... of 2n heads.

    Args:
        num_heads: at least 1.
        max_bias: the last slope is 2 ** -max_bias; above 0, at most 126, where it is float32's lowest normal number. MPT and Keras
            call it `alibi_bias_max`.

    Returns:
        float32 [num_heads], in (0, 1); each is rounded once.

    Raises:
        TypeError: num_heads is no Python int, or max_bias no Python number.
        ValueError: num_heads is below 1, or max_bias outside (0, 126].

    Example:
        >>> import transformer_embed as te
        >>> te.alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]

    Source:
        Press et al., "Train Short, Test Long" (2022), section 3, https://arxiv.org/abs/2108.12409; other head counts as in the
        authors' code. MPT writes down another rule, with the same slopes in the same order.
    """
    return jnp.asarray(_slopes(num_heads, max_bias), jnp.float32)


def alibi_bias(
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    num_heads: int,
    symmetric: bool = False,
    max_bias: float = 8.0,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "b h t s"]:
    """ALiBi's bias: each head's slope times the distance of the key from the query.

        bias[b, h, t, s] = slopes[h] * (key_positions[b, s] - query_positions[b, t])

    or, symmetric, `-slopes[h] * abs(key_positions[b, s] - query_positions[b, t])`. It comes from positions, so it holds for
    queries at an offset in a cache, for packed sequences and for padding on either side.

    Without `symmetric`, keys after the query are favoured: mask them. A softmax ignores what is constant along its keys, so one
    row for all queries gives the same weights: `query_positions=[0]` is `slopes * key`, Bloom's and Falcon's (which counts in
    bfloat16), and `query_positions=[length - 1]` is MPT's and Keras's. No such row stands for the symmetric bias.

    Args:
        query_positions: [T] or [B, T] integers.
        key_positions: [S] or [B, S] integers.
        num_heads: as in `alibi_slopes`.
        symmetric: whether keys after the query are as far as those before it (encoders; MPT without a causal mask).
        max_bias: as in `alibi_slopes`.
        dtype: of the result.

    Returns:
        [B or 1, num_heads, T, S] of `dtype`. Distances are exact integers at any two positions; from there on it is computed in float32
        (relative error below 1.8e-7) and rounded once. Finite: a value past a quarter of the dtype's largest becomes that quarter,
        which only float16 meets, at 16376, so that with `mask_to_bias` added nothing overflows and what is masked stays masked.

    Raises:
        TypeError: positions are not signed integers (uint8 and uint16 pass); symmetric is no Python bool; dtype is no floating dtype;
            and as `alibi_slopes`.
        ValueError: host positions outside int32, a rank other than 1 or 2, unequal numbers of rows; and as `alibi_slopes`.

    Example:
        >>> import transformer_embed as te
        >>> te.alibi_bias([2], [0, 1, 2], num_heads=2).tolist()
        [[[[-0.125, -0.0625, 0.0]], [[-0.0078125, -0.00390625, 0.0]]]]

    Source:
        Press et al., "Train Short, Test Long" (2022), section 3, https://arxiv.org/abs/2108.12409
    """
    dtype = _checks.floating_dtype("dtype", dtype)
    symmetric = _checks.flag("symmetric", symmetric)
    wide = jnp.promote_types(jnp.float32, dtype)
    slopes = _slopes(num_heads, max_bias).astype(wide)[:, None, None]
    after, distance = _offsets(query_positions, key_positions)
    far = distance.astype(wide)
    # 0 - 0 is 0, where -(0) would be -0.
    relative = 0 - far if symmetric else jnp.where(after, far, 0 - far)
    quarter = float(jnp.finfo(dtype).max) / 4
    return jnp.clip(slopes * relative[:, None], -quarter, quarter).astype(dtype)


def relative_position_buckets(
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Int32[Array, "b t s"]:
    """T5's bucket of the distance between each query and key: the row of a learned table of biases.

    With m buckets for a direction, of which e = m // 2 hold one distance each, distance n has the bucket

        n                                                                     where n < e
        min(m - 1, e + floor(log(n / e) / log(max_distance / e) * (m - e)))   otherwise

    computed in exact integers, where float32 logarithms fall one bucket short at some distances.

    Args:
        query_positions: [T] or [B, T] integers.
        key_positions: [S] or [B, S] integers.
        num_buckets: rows of the table, at least 4 (2 where not bidirectional). An odd one leaves the last unused where bidirectional.
        max_distance: from here on all distances share a bucket; above the distances that have a bucket of their own.
        bidirectional: True (T5's encoder): buckets 0..m-1, m = num_buckets // 2, are for keys at or before the query, m..2m-1 for keys
            after it. False (its decoder): all m = num_buckets are for keys at or before the query; those after it get 0, for a mask
            hides them.

    Returns:
        int32 [B or 1, T, S], in [0, num_buckets); exact for any two int32 positions.

    Raises:
        TypeError: positions are not signed integers (uint8 and uint16 pass); num_buckets or max_distance is no Python int;
            bidirectional is no Python bool.
        ValueError: host positions outside int32, a rank other than 1 or 2, unequal numbers of rows; num_buckets or max_distance is
            too low, or max_distance 2**31 - 1 or more.

    Example:
        >>> import transformer_embed as te
        >>> te.relative_position_buckets([20], [0, 19, 20, 21, 2000]).tolist()
        [[[10, 1, 0, 17, 31]]]

    Source:
        Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020), section 2.1,
        https://arxiv.org/abs/1910.10683; the formula is that of its code, Mesh TensorFlow.
    """
    bidirectional = _checks.flag("bidirectional", bidirectional)
    num_buckets = _checks.integer("num_buckets", num_buckets, at_least=4 if bidirectional else 2)
    each_way = num_buckets // 2 if bidirectional else num_buckets
    exact = each_way // 2
    _checks.integer("max_distance", max_distance, at_least=exact + 1)
    starts = _bucket_starts(each_way, _checks.int32("max_distance", max_distance))
    after, distance = _offsets(query_positions, key_positions)
    if not bidirectional:
        distance = jnp.where(after, 0, distance)
    buckets = jnp.minimum(distance, exact).astype(jnp.int32) + _count_at_most(starts, distance)
    return buckets + jnp.where(after, each_way, 0) if bidirectional else buckets


def _slopes(num_heads: int, max_bias: float) -> np.ndarray:
    num_heads, max_bias = _checks.integer("num_heads", num_heads, at_least=1), _checks.real("max_bias", max_bias, above=0)
    if max_bias > 126:
        raise ValueError(_checks.wanted("max_bias", "a number above 0, at most 126", max_bias))
    power = 2 ** (num_heads.bit_length() - 1)
    fractions = [(i + 1) / power for i in range(power)] + [(i + 0.5) / power for i in range(num_heads - power)]
    return np.array([2.0 ** (-max_bias * fraction) for fraction in fractions])


def _offsets(query_positions: ArrayLike, key_positions: ArrayLike) -> tuple[Bool[Array, "b t s"], UInt[Array, "b t s"]]:
    """Whether each key is after the query, and their distance: the difference of two integers fits the unsigned ones of their width."""
    queries = _checks.rows("query_positions", _checks.as_ordered("query_positions", query_positions))[:, :, None]
    keys = _checks.rows("key_positions", _checks.as_ordered("key_positions", key_positions))[:, None, :]
    _checks.broadcastable("query_positions and key_positions", queries.shape, keys.shape)
    dtype = jnp.promote_types(queries.dtype, keys.dtype)
    unsigned = jnp.uint64 if dtype == jnp.int64 else jnp.uint32
    query_words, key_words = (positions.astype(dtype).astype(unsigned) for positions in (queries, keys))
    after = keys > queries
    return after, jnp.where(after, key_words - query_words, query_words - key_words)


@functools.lru_cache(maxsize=64)
def _bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The first distance of each bucket past e = buckets // 2: the least n with (n / e) ** (buckets - e) >= (max_distance / e) ** j."""
    exact = buckets // 2
    steps = buckets - exact
    powers = (max_distance**j * exact ** (steps - j) for j in range(1, steps))
    return tuple(bisect.bisect_left(range(max_distance), power, key=lambda n: n**steps) for power in powers)


@functools.partial(jax.jit, static_argnums=0)
def _count_at_most(starts: tuple[int, ...], distance: UInt[Array, "b t s"]) -> Int32[Array, "b t s"]:
    """How many of the starts are at most the distance. Unrolled, for XLA makes an array of [b, t, s, starts] for a long reduction."""
    return sum(((distance >= start).astype(jnp.int32) for start in starts), start=jnp.zeros_like(distance, jnp.int32))
