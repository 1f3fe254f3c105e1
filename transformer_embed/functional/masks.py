"""Attention masks: bool arrays, True = may attend, and the bias that stands for one."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from transformer_embed import _checks


def padding_mask(ids: ArrayLike, *, pad_id: int = 0) -> Bool[Array, "..."]:
    """Which ids are tokens rather than padding.

    Args:
        ids: [..., length], any integer dtype.
        pad_id: the id of padding; any int, -1 for example.

    Returns:
        bool [..., length]: `ids != pad_id`.

    Raises:
        TypeError: ids are not integers, or pad_id is no Python int.

    Example:
        >>> import transformer_embed as te
        >>> te.padding_mask([[101, 7, 102, 0]]).tolist()
        [[True, True, True, False]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762, masks illegal connections;
        the padding mask is its case for batches of unequal sequences.
    """
    return _checks.as_int32("ids", ids) != _checks.int32("pad_id", pad_id)


def causal_mask(length: int) -> Bool[Array, "t t"]:
    """The look-ahead mask of one whole sequence: each position attends to itself and what came before it.

    Args:
        length: T, at least 0. For queries at an offset in a cache, use `attention_mask`.

    Returns:
        bool [T, T]; entry [t, s] is `s <= t`.

    Raises:
        TypeError: length is no Python int.
        ValueError: length is negative.

    Example:
        >>> import transformer_embed as te
        >>> te.causal_mask(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762
    """
    positions = jnp.arange(_checks.length("length", length), dtype=jnp.int32)
    return positions <= positions[:, None]


def attention_mask(
    *,
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    causal: bool,
    padding: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    query_block_ids: ArrayLike | None = None,
    key_block_ids: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_segment_ids: ArrayLike | None = None,
) -> Bool[Array, "b 1 t s"]:
    """The mask that an attention layer takes, from the positions of queries and keys, in the smallest shape that broadcasts.

    Query t may attend to key s where

        (causal and window and chunk, or the same block) and the same segment and padding[s]

    and a term that you do not ask for is left out. With a cache, the keys have positions 0..S-1 and the queries have theirs, offset
    included; one row of positions may serve the whole batch. `TokenPositions.queries()` and `.keys()` return these arguments.

    Args:
        query_positions: [T] or [B, T] integers.
        key_positions: [S] or [B, S] integers.
        causal: True: keys after the query are hidden (a decoder, GPT). False: a query sees keys on both sides (an encoder, BERT).
            There is no default.
        padding: bool [S] or [B, S], True = a token, as `padding_mask` returns; None: no padding. It hides keys; outputs of queries at
            padding are yours to ignore.
        window: (left, right), as in `window_mask`: a causal window of w tokens with oneself is (w - 1, 0).
        chunk: as in `chunk_mask`.
        query_block_ids: [T] or [B, T] integers, as in `block_mask`: tokens of one block see each other, whatever the
            causal mask, the window and the chunk say. A prefix is block 0, with -1 after it.
        key_block_ids: [S] or [B, S] integers, with the former.
        query_segment_ids: [T] or [B, T] integers, as in `segment_mask`.
        key_segment_ids: [S] or [B, S] integers, with the former.

    Returns:
        bool [B or 1, 1, T or 1, S], for logits [B, heads, T, S]: the batch axis is 1 where nothing differs between rows,
        the query axis is 1 where nothing differs between queries. A row may be wholly False: see `mask_to_bias`. No mask hides a
        value that is NaN or infinite: a weight of 0 times it is NaN.

    Raises:
        TypeError: positions are not signed integers (uint8 and uint16 pass), ids are not integers, padding is not bool, causal is not a
            Python bool, a window or chunk is no Python int.
        ValueError: host positions outside int32, a rank other than 1 or 2, shapes that do not fit each other, block or segment ids
            of only one side.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> ids = jnp.array([[5, 6, 7, 0], [8, 9, 0, 0]])
        >>> mask = te.attention_mask(query_positions=[2], key_positions=jnp.arange(4), causal=True,
        ...     padding=te.padding_mask(ids))
        >>> mask.shape, mask[:, 0, 0].tolist()
        ((2, 1, 1, 4), [[True, True, True, False], [True, True, False, False]])

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762; for the other
        terms see the functions named.
    """
    _check_fit(
        {"query_positions": query_positions, "query_block_ids": query_block_ids, "query_segment_ids": query_segment_ids},
        {"key_positions": key_positions, "padding": padding, "key_block_ids": key_block_ids, "key_segment_ids": key_segment_ids},
    )
    allowed = []
    if _checks.flag("causal", causal):
        allowed.append(window_mask(query_positions, key_positions, right=0))
    if window is not None:
        left, right = _pair("window", window)
        allowed.append(window_mask(query_positions, key_positions, left=left, right=right))
    if chunk is not None:
        allowed.append(chunk_mask(query_positions, key_positions, chunk=chunk))
    if query_block_ids is not None and key_block_ids is not None and allowed:
        allowed = [functools.reduce(jnp.logical_and, allowed) | block_mask(query_block_ids, key_block_ids)]
    if query_segment_ids is not None and key_segment_ids is not None:
        allowed.append(segment_mask(query_segment_ids, key_segment_ids))
    if padding is not None:
        allowed.append(_checks.rows("padding", _checks.as_mask("padding", padding, "a token"))[:, None, None, :])
    if not allowed:
        allowed.append(jnp.ones((1, 1, 1, _keys("key_positions", key_positions).shape[3]), bool))
    return functools.reduce(jnp.logical_and, allowed)


def window_mask(
    query_positions: ArrayLike, key_positions: ArrayLike, *, left: int | None = None, right: int | None = None
) -> Bool[Array, "b 1 t s"]:
    """Which keys lie within a window around each query: `query - left <= key <= query + right`.

    Args:
        query_positions: [T] or [B, T] integers.
        key_positions: [S] or [B, S] integers.
        left: how many positions before its own a query sees, at least 0; None: all. (w tokens with oneself, as transformers counts: w - 1;
            oneself and w before, as tensor2tensor and axlearn: w.)
        right: how many after its own, at least 0; None: all. A causal window has 0, a symmetric one the same as left.

    Returns:
        bool [B or 1, 1, T, S]; masks of this module combine with `&`, `|` and `~`.

    Raises:
        TypeError: positions are not signed integers; left or right is no Python int.
        ValueError: another rank; a negative left or right; host positions outside int32.

    Example:
        >>> import transformer_embed as te
        >>> te.window_mask(range(4), range(4), left=1, right=0)[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]

    Source:
        Beltagy et al., "Longformer" (2020), section 3.1, https://arxiv.org/abs/2004.05150
    """
    queries, keys = _queries("query_positions", query_positions), _keys("key_positions", key_positions)
    terms = [] if right is None else [_at_most(keys, queries, _checks.integer("right", right, at_least=0))]
    terms += [] if left is None else [_at_most(queries, keys, _checks.integer("left", left, at_least=0))]
    everywhere = jnp.ones(_checks.broadcastable("query_positions and key_positions", queries.shape, keys.shape), bool)
    return functools.reduce(jnp.logical_and, terms) if terms else everywhere


def chunk_mask(query_positions: ArrayLike, key_positions: ArrayLike, *, chunk: int) -> Bool[Array, "b 1 t s"]:
    """Which keys lie in the query's chunk, positions being cut into chunks of one length: 0..chunk-1, chunk..2*chunk-1, ...

    Args:
        query_positions: [T] or [B, T] integers.
        key_positions: [S] or [B, S] integers.
        chunk: length of a chunk, at least 1.

    Returns:
        bool [B or 1, 1, T, S].

    Raises:
        TypeError: positions are not signed integers; chunk is no Python int.
        ValueError: another rank; a chunk below 1 or past int32; host positions outside int32.

    Example:
        >>> import transformer_embed as te
        >>> te.chunk_mask([1, 2], range(4), chunk=2)[0, 0].astype(int).tolist()
        [[1, 1, 0, 0], [0, 0, 1, 1]]

    Source:
        Child et al., "Generating Long Sequences with Sparse Transformers" (2019), section 4.3, https://arxiv.org/abs/1904.10509,
        the block of its fixed pattern; the chunked attention of Llama 4.
    """
    chunk = _checks.integer("chunk", chunk, at_least=1, at_most=2**31 - 1)
    return _queries("query_positions", query_positions) // chunk == _keys("key_positions", key_positions) // chunk


def block_mask(query_block_ids: ArrayLike, key_block_ids: ArrayLike) -> Bool[Array, "b 1 t s"]:
    """Which keys are of the query's block; -1 is no block. To let blocks see all of themselves, join it to a causal mask by `|`.

    Args:
        query_block_ids: [T] or [B, T] integers; any negative one: in no block. A bool prefix flag p is `jnp.where(p, 0, -1)`.
        key_block_ids: [S] or [B, S] integers.

    Returns:
        bool [B or 1, 1, T, S].

    Raises:
        TypeError: ids are not integers.
        ValueError: another rank.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> prefix = jnp.array([0, 0, -1])
        >>> (te.causal_mask(3) | te.block_mask(prefix, prefix))[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]

    Source:
        Raffel et al., "T5" (2020), section 3.2.1, on the prefix language model; https://arxiv.org/abs/1910.10683. Numbered blocks, images
        in text for example, are those of transformers' Gemma 3.
    """
    queries, keys = _queries("query_block_ids", query_block_ids), _keys("key_block_ids", key_block_ids)
    return (queries == keys) & (queries >= 0)


def segment_mask(query_segment_ids: ArrayLike, key_segment_ids: ArrayLike) -> Bool[Array, "b 1 t s"]:
    """Which keys are of the query's segment, for sequences packed into one row.

    Args:
        query_segment_ids: [T] or [B, T] integers. 0 equals 0: mask padding apart.
        key_segment_ids: [S] or [B, S] integers.

    Returns:
        bool [B or 1, 1, T, S].

    Raises:
        TypeError: ids are not integers.
        ValueError: another rank.

    Example:
        >>> import transformer_embed as te
        >>> te.segment_mask([1, 1, 2], [1, 1, 2])[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]

    Source:
        Raffel et al., "T5" (2020), section 3.5.2, https://arxiv.org/abs/1910.10683
    """
    return _queries("query_segment_ids", query_segment_ids) == _keys("key_segment_ids", key_segment_ids)


def combine_masks(*masks: ArrayLike) -> Bool[Array, "b h t s"]:
    """Where every one of the masks is True.

    Only masks of rank 4 are taken: a [B, S] beside a [T, S] would broadcast without a word wherever B happens to equal T.

    Args:
        *masks: at least one; bool [B or 1, H or 1, T or 1, S or 1].

    Returns:
        bool, of the broadcast shape of all.

    Raises:
        TypeError: a mask that is not bool.
        ValueError: no mask, a rank other than 4, or shapes that do not broadcast.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> tokens = te.padding_mask([[5, 6, 0]])
        >>> te.combine_masks(te.causal_mask(3)[None, None], tokens[:, None, None, :]).astype(int).tolist()
        [[[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762
    """
    if not masks:
        raise ValueError(_checks.wanted("masks", "at least one mask", "none"))
    arrays = [_checks.as_mask(f"masks[{n}]", mask) for n, mask in enumerate(masks)]
    for n, array in enumerate(arrays):
        if array.ndim != 4:
            raise ValueError(_checks.wanted(f"masks[{n}]", "rank 4, [batch, heads, queries, keys]", f"shape {list(array.shape)}"))
    _checks.broadcastable("masks", *(array.shape for array in arrays))
    return functools.reduce(jnp.logical_and, arrays)


def mask_to_bias(mask: ArrayLike, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
    """A bias to add to attention logits: 0 where attention is allowed, half of the dtype's lowest value where not.

    Half leaves room to add another bias, ALiBi's for example, without an overflow to -inf. It is finite, so a row that is
    wholly masked gives an even softmax rather than NaN, in the forward pass and in the gradient.

    Args:
        mask: bool [...], True = may attend.
        dtype: of the logits, a floating dtype.

    Returns:
        [...] of `dtype`: 0 or `jnp.finfo(dtype).min / 2`.

    Raises:
        TypeError: mask is not bool (numbers would be read the wrong way round where they are a bias), or dtype is no floating dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.mask_to_bias([True, False], jnp.float16).tolist()
        [0.0, -32752.0]

    Source:
        The additive form of the mask of Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3, https://arxiv.org/abs/1706.03762,
        with a finite value for its minus infinity.
    """
    dtype = _checks.floating_dtype("dtype", dtype)
    low = jnp.array(jnp.finfo(dtype).min / 2, dtype)
    return jnp.where(_checks.as_mask("mask", mask), jnp.zeros((), dtype), low)


def _queries(name: str, value: ArrayLike) -> Integer[Array, "b 1 t 1"]:
    return _checks.rows(name, _checks.as_ordered(name, value))[:, None, :, None]


def _keys(name: str, value: ArrayLike) -> Integer[Array, "b 1 1 s"]:
    return _checks.rows(name, _checks.as_ordered(name, value))[:, None, None, :]


def _at_most(first: Integer[Array, "..."], second: Integer[Array, "..."], distance: int) -> Bool[Array, "..."]:
    """`first - second <= distance`, where the difference may not fit: as an unsigned number, it does where it is not negative."""
    if distance == 0:
        return first <= second
    dtype = jnp.promote_types(first.dtype, second.dtype)
    unsigned = jnp.uint64 if dtype == jnp.int64 else jnp.uint32
    difference = first.astype(dtype).astype(unsigned) - second.astype(dtype).astype(unsigned)
    return (first <= second) | (difference <= jnp.array(min(distance, jnp.iinfo(unsigned).max), unsigned))


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(_checks.wanted(name, "a tuple (left, right), None for no limit", repr(value)))
    for n, distance in enumerate(value):
        if distance is not None:
            _checks.integer(f"{name}[{n}]", distance, at_least=0)
    return value


def _check_fit(queries: dict[str, ArrayLike | None], keys: dict[str, ArrayLike | None]) -> None:
    """Block and segment ids of both sides or none; each side of one length; all of one number of rows, or of 1."""
    rows = {}
    for side, other in ((queries, keys), (keys, queries)):
        first, length = next(iter(side)), None
        for name, value in side.items():
            twin = name.replace("query", "key") if side is queries else name.replace("key", "query")
            if value is None and other.get(twin) is not None:
                raise ValueError(_checks.wanted(name, f"an array, since {twin} is given", "None"))
            if value is not None:
                rows[name], found = _checks.rows(name, _checks.as_array(name, value)).shape
                length = found if length is None else length
                _checks.same(name, f"the length of {first}", found, length)
    if len(set(rows.values()) - {1}) > 1:
        raise ValueError(_checks.wanted(", ".join(rows), "one number of rows, or 1", f"{', '.join(map(str, rows.values()))}"))
