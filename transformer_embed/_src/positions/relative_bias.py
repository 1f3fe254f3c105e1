"""Computes position biases, which are added to attention logits: ALiBi's bias and T5's buckets.

In shapes, b counts batch rows, h heads, t queries and s keys.
"""

import bisect
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer, UInt

from transformer_embed._src import arguments, conversions
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.sequences.token_arrays import comparable_arrays


def alibi_slopes(num_heads: int, *, max_bias: float = 8.0) -> Float32[Array, "h"]:
    """Computes ALiBi's slope of each head.

    If num_heads = n is a power of two, for i in 0..n - 1:

        slopes[i] = 2 ** (-max_bias * (i + 1) / n)

    If num_heads is not a power of two, let n be the largest power of two below num_heads. The first
    n heads get the slopes of a model with n heads. The other heads get every second slope of a
    model with 2n heads: the first, the third, the fifth, and so on. For example, with three heads,
    n is 2. The first two heads get the slopes of a model with two heads, 1/16 and 1/256. A model
    with four heads has the slopes 1/4, 1/16, 1/64 and 1/256, and the third head gets the first of
    these slopes, 1/4.

    Args:
        num_heads: The number of heads, at least 1.
        max_bias: A number above 0 and at most 126. The smallest slope is 2 ** -max_bias. MPT and
            Keras call this argument `alibi_bias_max`.

    Returns:
        The slopes, float32 [num_heads], in (0, 1). Each slope is rounded only once.

    Raises:
        TypeError: `num_heads` is not a Python int, or `max_bias` is not a Python number.
        ValueError: `num_heads` is below 1, or `max_bias` is outside (0, 126].

    Example:
        >>> import transformer_embed as te
        >>> te.alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]

    Source:
        The slopes are from Press et al., "Train Short, Test Long" (2022), section 3,
        https://arxiv.org/abs/2108.12409. For head counts that are not a power of two, the rule is
        from the authors' code. The code of the model MPT computes the slopes in another way, and
        gets the same slopes in the same order.
    """
    return jax.device_put(np.array(_slopes(num_heads, max_bias), np.float32))


def alibi_bias(
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    num_heads: int,
    *,
    causal: bool,
    max_bias: float = 8.0,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*b h t s"]:
    """Computes ALiBi's bias: each head's slope times the distance of the key from the query.

    For a causal mask, the bias of query t and key s in head h is

        bias[..., h, t, s] = slopes[h] * (key_positions[..., s] - query_positions[..., t])

    With `causal=False`, the bias is
    `-slopes[h] * abs(key_positions[..., s] - query_positions[..., t])`. The bias is made from
    positions, so it is right for queries at an offset in a cache, for packed sequences and for
    padding on either side.

    With `causal=True`, keys after the query get a bias above 0, so mask these keys. To save memory,
    you can then compute the bias for a single query and use it for all queries. For example, with
    the slope 0.5, the keys at positions 0, 1 and 2 have the biases -1, -0.5 and 0 for the query at
    position 2, and -1.5, -1 and -0.5 for the query at position 3. All three differ by the same
    number, 0.5, and a softmax ignores a number that is added to all keys. With
    `query_positions=[0]` you get `slopes * key`, the bias of Bloom and Falcon (Falcon computes it
    in bfloat16). With `query_positions=[length - 1]` you get the bias of Keras and of the model
    MPT. If `causal` is False, compute the bias for every query.

    Args:
        query_positions: The positions of the queries. Integers of shape [T] or [B, T].
        key_positions: The positions of the keys. Integers of shape [S] or [B, S].
        num_heads: The number of heads, at least 1.
        causal: Whether your attention mask hides the keys after the query. Set True for a decoder.
            Set False for an encoder, so that keys after the query get a negative bias, like keys
            before the query. (The model MPT needs False if it runs without a causal mask.) There is
            no default.
        max_bias: A number above 0 and at most 126, from which `alibi_slopes` computes the slopes.
        dtype: The dtype of the result.

    Returns:
        The bias, of `dtype`. Shape [B or 1, num_heads, T, S], or [num_heads, T, S] if the positions
        of queries and keys have no batch axis. Distances are exact integers for any two positions.
        A bias is computed in float32 (relative error below 1.8e-7) and rounded once. In float16,
        biases below -16376 become -16376, and biases above 16376 become 16376. This limit is a
        quarter of the largest number of float16, so that you can add the bias of `mask_to_bias`,
        which is -32752 at masked keys. The sum of the two biases is finite, and at most -16376 at
        masked keys, so these keys stay masked. (Other dtypes have such a limit too, but no distance
        is large enough to reach it.)

    Raises:
        TypeError: Positions are not integers, or are a jax array of uint32 or uint64. `causal` is
            not a Python bool, `num_heads` is not a Python int, or `max_bias` is not a Python
            number. `dtype` is not a floating dtype.
        ValueError: A position in a list or a numpy array is outside int32, or positions have a rank
            other than 1 or 2. The queries and the keys have different numbers of batch rows, such
            as 2 and 3. (A single batch row fits any number.) `num_heads` is below 1, or `max_bias`
            is outside (0, 126].

    Example:
        >>> import transformer_embed as te
        >>> te.alibi_bias([2], [0, 1, 2], num_heads=2, causal=True).tolist()
        [[[-0.125, -0.0625, 0.0]], [[-0.0078125, -0.00390625, 0.0]]]

    Source:
        The bias is from Press et al., "Train Short, Test Long" (2022), section 3,
        https://arxiv.org/abs/2108.12409
    """
    # Both arrays as int32 or wider, with the same number of axes.
    positions = comparable_arrays(query_positions=query_positions, key_positions=key_positions)
    # The slope of each head, a tuple of Python floats.
    slopes = _slopes(num_heads, max_bias)
    causal = arguments.flag("causal", causal)
    dtype = arguments.result_dtype(dtype)
    queries = positions["query_positions"]
    keys = positions["key_positions"]
    return _alibi(queries, keys, slopes, causal, dtype)


def relative_position_buckets(
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    causal: bool,
) -> Int32[Array, "*b t s"]:
    """Computes T5's bucket of the distance between each query and key.

    A bucket is the index of a row in a table of biases, which `te.RelativePositionBias` learns. Let
    m be the number of buckets for the keys on one side of the query: `num_buckets` if `causal` is
    True, and `num_buckets // 2` if not. Let e = m // 2. The first e buckets hold a single distance
    each. Each later bucket holds a range of distances. The bucket of distance n is

        n                                                                     if n < e
        min(m - 1, e + floor(log(n / e) / log(max_distance / e) * (m - e)))   otherwise

    The bucket is computed in exact integers, because logarithms in float32 would give a bucket that
    is too low by one at some distances.

    Args:
        query_positions: The positions of the queries. Integers of shape [T] or [B, T].
        key_positions: The positions of the keys. Integers of shape [S] or [B, S].
        num_buckets: The number of rows of the table of biases. At least 2 if `causal` is True, and
            at least 4 if not. If `causal` is False, pass an even number, because an odd number
            leaves the last row unused.
        max_distance: The limit of the buckets: all distances of at least `max_distance` are in the
            last bucket. `max_distance` must be above the number of buckets that hold a single
            distance each, which is `num_buckets // 2` if `causal` is True, and `num_buckets // 4`
            if not.
        causal: Whether your attention mask hides the keys after the query. Set True for T5's
            decoder, and False for T5's encoder. You must pass it. If True, all buckets are for keys
            at or before the query, and keys after the query get bucket 0. If False, the first half
            of the buckets is for keys at or before the query, and the second half for keys after
            the query.

    Returns:
        The buckets, int32, in [0, num_buckets). A bucket is the index of a row in a table of
        biases. Shape [B or 1, T, S], or [T, S] if the positions of queries and keys have no batch
        axis. The formula is computed without rounding errors for any two int32 positions.

    Raises:
        TypeError: Positions are not integers, or are a jax array of uint32 or uint64. `num_buckets`
            or `max_distance` is not a Python int, or `causal` is not a Python bool.
        ValueError: A position in a list or a numpy array is outside int32, or positions have a rank
            other than 1 or 2. The queries and the keys have different numbers of batch rows, such
            as 2 and 3. (A single batch row fits any number.) `num_buckets` is below 2, or below 4
            if `causal` is False. `max_distance` is outside int32, or is too low: it must be above
            `num_buckets // 2` if `causal` is True, and above `num_buckets // 4` if not.

    Example:
        >>> import transformer_embed as te
        >>> te.relative_position_buckets([20], [0, 19, 20, 21, 2000], causal=False).tolist()
        [[10, 1, 0, 17, 31]]

    Source:
        A bucket is a range of distances that share a bias. Buckets are from Raffel et al., "T5"
        (2020), section 2.1, https://arxiv.org/abs/1910.10683. The formula is from the code of the
        paper, Mesh TensorFlow.
    """
    causal = arguments.flag("causal", causal)
    num_buckets = arguments.integer("num_buckets", num_buckets, at_least=2 if causal else 4)
    # A causal mask leaves one direction, and all buckets are for it. This is m in the formula.
    direction_buckets = num_buckets if causal else num_buckets // 2
    # This is e in the formula, the number of buckets with one distance.
    exact_buckets = direction_buckets // 2
    max_distance = arguments.int32("max_distance", max_distance, at_least=exact_buckets + 1)
    positions = comparable_arrays(query_positions=query_positions, key_positions=key_positions)
    queries = positions["query_positions"]
    keys = positions["key_positions"]
    bucket_starts = _bucket_starts(direction_buckets, max_distance)
    return _buckets(queries, keys, direction_buckets, bucket_starts, causal)


@functools.lru_cache(maxsize=64)
def _bucket_starts(direction_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Returns the distance at which each bucket begins, for the buckets e + 1 to m - 1.

    The letters are the letters of the formula in `relative_position_buckets`. By the formula,
    bucket e + j begins at the least distance n with

        log(n / e) / log(max_distance / e) * (m - e) >= j
        (n / e) ** (m - e) >= (max_distance / e) ** j
        n ** (m - e) >= max_distance ** j * e ** (m - e - j)

    where the last line has only integers.

    Args:
        direction_buckets: The number m of buckets for each direction.
        max_distance: The limit from which on all distances are in the last bucket.
    """
    exact_buckets = direction_buckets // 2
    range_buckets = direction_buckets - exact_buckets
    starts = []
    for j in range(1, range_buckets):
        least_power = max_distance**j * exact_buckets ** (range_buckets - j)
        # The power rises with the distance, so bisection finds the least distance.
        start = bisect.bisect_left(
            range(max_distance), least_power, key=lambda distance: distance**range_buckets
        )
        starts.append(start)
    return tuple(starts)


def _slopes(num_heads: int, max_bias: float) -> tuple[float, ...]:
    """Checks the arguments of `alibi_slopes`, and computes the slopes as Python floats."""
    # The smallest slope is 2 ** -max_bias, and 2 ** -126 is the smallest normal float32.
    want = "a number above 0, at most 126"
    max_bias = arguments.real(
        "max_bias", max_bias, lowest=math.nextafter(0, 1), highest=126, want=want
    )
    num_heads = arguments.size("num_heads", num_heads)
    # The largest power of two up to the number of heads.
    power = 2 ** (num_heads.bit_length() - 1)
    # Slope number n is 2 ** (-max_bias * n / power), for the numbers 1, 2, ..., power. With twice
    # as many heads, the slopes would be twice as dense: the numbers 0.5, 1, 1.5, 2, ... Further
    # heads take the new ones of these, 0.5, 1.5, ... For example, six heads have the slopes number
    # 1, 2, 3, 4, 0.5 and 1.5.
    numbers = [i + 1.0 for i in range(power)]
    numbers += [i + 0.5 for i in range(num_heads - power)]
    return tuple(2.0 ** (-max_bias * number / power) for number in numbers)


# The functions below are compiled even if the caller is not.


@compiled(2, 3, 4)
def _alibi(
    queries: Integer[Array, "*q t"],
    keys: Integer[Array, "*k s"],
    slopes: tuple[float, ...],
    causal: bool,
    dtype: jnp.dtype,
) -> Float[Array, "*b h t s"]:
    """Computes `alibi_bias` from checked arguments and the slope of each head."""
    wide = conversions.compute_dtype(dtype)
    # [h, 1, 1], with an axis of 1 in front if there is a batch axis.
    batch_axes = [1] * (queries.ndim - 1)
    head_slopes = np.array(slopes, wide).reshape(*batch_axes, -1, 1, 1)
    is_after, distance = _is_after_and_distance(queries, keys)
    distance = distance.astype(wide)
    # The distance 0 must give 0: `0 - distance` does, but `-distance` would give -0.
    relative_position = 0 - distance
    if causal:
        # The position of the key minus the position of the query, which is above 0 for a key after
        # the query. Callers mask these keys.
        relative_position = jnp.where(is_after, distance, relative_position)
    # A quarter of the largest number, so that logits and bias together stay finite.
    limit = float(jnp.finfo(dtype).max) / 4
    bias = head_slopes * jnp.expand_dims(relative_position, -3)
    return jnp.clip(bias, -limit, limit).astype(dtype)


@compiled(2, 3, 4)
def _buckets(
    queries: Integer[Array, "*q t"],
    keys: Integer[Array, "*k s"],
    direction_buckets: int,
    bucket_starts: tuple[int, ...],
    causal: bool,
) -> Int32[Array, "*b t s"]:
    """Computes the bucket of each pair of a query and a key, as in `relative_position_buckets`.

    The buckets below e = `direction_buckets // 2` hold one distance each, and bucket e begins at
    distance e. For example, with 8 buckets for a direction and the starts 5, 7 and 9, the distances
    3 to 9 are in the buckets 3 4 5 5 6 6 7.

    Args:
        queries: The positions of the queries.
        keys: The positions of the keys.
        direction_buckets: The number of buckets for keys on one side of the query.
        bucket_starts: The first distance of the buckets e + 1, e + 2, ...
        causal: Whether all buckets are for keys at or before the query.
    """
    is_after, distance = _is_after_and_distance(queries, keys)
    if causal:
        distance = jnp.where(is_after, 0, distance)
    exact_buckets = direction_buckets // 2
    # This is the minimum of the distance and `exact_buckets`. The condition is not
    # `distance < exact_buckets`, because the compiler would turn such a selection into a minimum of
    # unsigned integers, which kernels for TPUs do not have. The numbers are the same.
    has_own_bucket = distance < exact_buckets + 1
    buckets = jnp.where(has_own_bucket, distance, exact_buckets).astype(jnp.int32)
    # Each start that the distance has reached adds a bucket. The sum is unrolled: for a reduction,
    # XLA would make an array [b, t, s, starts].
    for start in bucket_starts:
        buckets = buckets + (distance >= start).astype(jnp.int32)
    return buckets if causal else buckets + jnp.where(is_after, direction_buckets, 0)


def _is_after_and_distance(
    queries: Integer[Array, "*q t"], keys: Integer[Array, "*k s"]
) -> tuple[Bool[Array, "*b t s"], UInt[Array, "*b t s"]]:
    """Returns whether each key is after each query, and the distance between key and query."""
    # The queries become [..., t, 1], and the keys [..., 1, s].
    dtype = np.promote_types(queries.dtype, keys.dtype)
    queries = queries.astype(dtype)[..., :, None]
    keys = keys.astype(dtype)[..., None, :]
    is_after = keys > queries
    # A difference of signed integers may wrap, but the distance fits the unsigned dtype. An
    # unsigned difference wraps if the key is before the query, and its negative wraps back: for
    # the key 2 and the query 5 in 8 bits, the difference is 253, and -253 is the distance 3.
    unsigned = np.dtype(f"u{dtype}")
    difference = keys.astype(unsigned) - queries.astype(unsigned)
    distance = jnp.where(is_after, difference, -difference)
    return is_after, distance
