"""Attention masks, which are bool arrays with True = may attend, and their conversion to a bias."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, DTypeLike
from transformer_embed._src.functional.compiled import compiled

MOST_QUERIES = 2**30


def padding_mask(ids: ArrayLike, *, pad_id: int) -> Bool[Array, "..."]:
    """Which ids are tokens and not padding.

    Args:
        ids: [..., length], any integer dtype.
        pad_id: the id of padding; any int, -1 for example. There is no default.

    Returns:
        bool [..., length]: `ids != pad_id`.

    Raises:
        TypeError: ids are not integers, or pad_id is not a Python int.
        ValueError: pad_id is outside int32.

    Example:
        >>> import transformer_embed as te
        >>> te.padding_mask([[101, 7, 102, 0]], pad_id=0).tolist()
        [[True, True, True, False]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3,
        https://arxiv.org/abs/1706.03762, masks illegal connections; the padding mask does so for
        batches of unequal sequences.
    """
    return _differs(arguments.as_int32("ids", ids), arguments.int32("pad_id", pad_id))


def causal_mask(length: int) -> Bool[Array, "t t"]:
    """The look-ahead mask of one whole sequence: each position attends to itself and to those
    before it.

    Args:
        length: T, at least 0 and at most 2**30. For queries at an offset in a cache, use
            `attention_mask`.

    Returns:
        bool [T, T]; entry [t, s] is `s <= t`.

    Raises:
        TypeError: length is not a Python int.
        ValueError: length is out of its range.

    Example:
        >>> import transformer_embed as te
        >>> te.causal_mask(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3,
        https://arxiv.org/abs/1706.03762
    """
    # XLA aborts the process if the number of elements overflows.
    return _lower_triangle(arguments.length("length", length, at_most=MOST_QUERIES))


def attention_mask(
    *,
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    causal: bool,
    padding_mask: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    query_block_ids: ArrayLike | None = None,
    key_block_ids: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_segment_ids: ArrayLike | None = None,
) -> Bool[Array, "b 1 t s"]:
    """The mask of an attention layer, made from the positions of queries and keys, in the smallest
    shape that broadcasts.

    Query t may attend to key s where

        (causal and window and chunk, or the same block) and the same segment and padding_mask[s]

    and terms whose arguments are not given are left out. With a cache, the keys have positions
    0..S-1 and the positions of the queries include the offset; one row of positions may serve the
    whole batch. `TokenPositions.queries()` and `.keys()` return these arguments.

    Args:
        query_positions: [T] or [B, T] integers.
        key_positions: [S] or [B, S] integers.
        causal: True: keys after the query are hidden (a decoder, GPT). False: a query sees keys on
            both sides (an encoder, BERT). There is no default.
        padding_mask: bool [S] or [B, S], True = a token, as `te.padding_mask` returns; None: no
            padding. It hides keys; ignore the outputs of queries at padding.
        window: (left, right), how many positions before and after its own a query sees, at least 0;
            None: no limit, so `query - left <= key <= query + right`. A causal window of w tokens
            that includes the query's own, as in transformers, is (w - 1, 0); tensor2tensor and
            axlearn do not count it: (w, 0).
        chunk: length of a chunk, at least 1: a query sees only the keys of its own chunk, positions
            0..chunk-1, chunk..2*chunk-1, ... (Llama 4). Positions from `TokenPositions.from_ids`
            count chunks from the first token that is not padding, as transformers does.
        query_block_ids: [T] or [B, T] integers, negative: in no block. Tokens of one block see each
            other even where the causal mask, the window or the chunk forbids it. A prefix is block
            0, with -1 after it: `jnp.where(is_prefix, 0, -1)`.
        key_block_ids: [S] or [B, S] integers, given with query_block_ids.
        query_segment_ids: [T] or [B, T] integers, for sequences packed into one row: a query sees
            only the keys of its own segment. Padding, segment 0, attends to padding.
        key_segment_ids: [S] or [B, S] integers, given with query_segment_ids.

    Returns:
        bool [B or 1, 1, T or 1, S], for logits [B, heads, T, S]: the batch axis is 1 if all rows
        have the same mask, the query axis is 1 if all queries have the same mask. A row may be all
        False: see `mask_to_bias`. A mask does not protect against keys or values that are NaN or
        infinite, because 0 times them is NaN.

    Raises:
        TypeError: positions are not signed integers (uint8 and uint16 pass), ids are not integers,
            padding_mask is not bool, causal is not a Python bool, or a window or chunk is not a
            Python int.
        ValueError: host positions outside int32, a rank other than 1 or 2, shapes that do not fit
            each other, or block or segment ids of only one side.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> ids = jnp.array([[5, 6, 7, 0], [8, 9, 0, 0]])
        >>> mask = te.attention_mask(query_positions=[2], key_positions=jnp.arange(4), causal=True,
        ...     padding_mask=te.padding_mask(ids, pad_id=0))
        >>> mask.shape, mask[:, 0, 0].tolist()
        ((2, 1, 1, 4), [[True, True, True, False], [True, True, False, False]])

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3,
        https://arxiv.org/abs/1706.03762. Windows: Beltagy et al., "Longformer" (2020), section 3.1,
        https://arxiv.org/abs/2004.05150. Segments: Raffel et al., "T5" (2020), section 3.5.2,
        https://arxiv.org/abs/1910.10683. Chunks: the block of the fixed pattern of Child et al.,
        "Generating Long Sequences with Sparse Transformers" (2019), section 4.3,
        https://arxiv.org/abs/1904.10509. Blocks: the prefix language model of T5, section 3.2.1;
        numbered blocks (images in text,
        for example) as in transformers' Gemma 3.
    """
    values = dict[str, Any](
        query_positions=query_positions,
        query_block_ids=query_block_ids,
        query_segment_ids=query_segment_ids,
        key_positions=key_positions,
        padding_mask=padding_mask,
        key_block_ids=key_block_ids,
        key_segment_ids=key_segment_ids,
    )
    arrays = {}
    for name in values:
        if values[name] is None and not name.endswith("positions"):
            continue
        is_mask = name == "padding_mask"
        convert = functools.partial(arguments.as_mask, is_true="a token")
        array = (convert if is_mask else arguments.as_ordered)(name, values[name])
        arrays[name] = arguments.rows(name, array)
    for kind in ("block_ids", "segment_ids"):
        for side, other in (("query", "key"), ("key", "query")):
            if f"{other}_{kind}" in arrays and f"{side}_{kind}" not in arrays:
                want = f"an array, since {other}_{kind} is given"
                raise arguments.value_error(f"{side}_{kind}", want, "None")
    for name, array in arrays.items():
        first = "query_positions" if name.startswith("query") else "key_positions"
        length = arrays[first].shape[1]
        arguments.check_same(name, f"the length of {first}", array.shape[1], length)
    arguments.check_numbers_of_rows(arrays)
    if window is not None:
        if not isinstance(window, tuple) or len(window) != 2:
            want = "a tuple (left, right), None for no limit"
            raise arguments.type_error("window", want, repr(window))
        left, right = (
            None if side is None else arguments.integer(f"window[{n}]", side, at_least=0)
            for n, side in enumerate(window)
        )
        window = left, right
    if chunk is not None:
        chunk = arguments.size("chunk", chunk)
    return _attention_mask(arrays, arguments.flag("causal", causal), window or (None, None), chunk)


def combine_masks(*masks: ArrayLike) -> Bool[Array, "b h t s"]:
    """The logical and of masks: True where all masks are True.

    The masks must have rank 4: a [B, S] next to a [T, S] would broadcast silently whenever B equals
    T.

    Args:
        *masks: at least one; bool [B or 1, H or 1, T or 1, S or 1].

    Returns:
        bool, of the shape to which all of them broadcast.

    Raises:
        TypeError: a mask is not bool.
        ValueError: there is no mask, a rank is not 4, or the shapes do not broadcast.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> tokens = te.padding_mask([[5, 6, 0]], pad_id=0)
        >>> causal = te.causal_mask(3)
        >>> te.combine_masks(causal[None, None], tokens[:, None, None, :]).astype(int).tolist()
        [[[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]]

    Source:
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3,
        https://arxiv.org/abs/1706.03762
    """
    if not masks:
        raise arguments.value_error("masks", "at least one mask", "none")
    arrays = [arguments.as_mask(f"masks[{n}]", mask) for n, mask in enumerate(masks)]
    for n, array in enumerate(arrays):
        if array.ndim != 4:
            want = "rank 4, [batch, heads, queries, keys]"
            raise arguments.value_error(f"masks[{n}]", want, f"shape {list(array.shape)}")
    arguments.broadcast_shape("masks", *(array.shape for array in arrays))
    return _all(arrays)


def mask_to_bias(
    mask: ArrayLike, dtype: DTypeLike = jnp.float32, *, value: float | None = None
) -> Float[Array, "..."]:
    """A bias to add to attention logits: 0 where attention is allowed, a large negative number
    elsewhere.

    The number is half of the dtype's lowest: it leaves room to add another bias, ALiBi's for
    example, without an overflow to -inf. The bias is finite, so a fully masked row gives an even
    softmax rather than NaN, in the forward pass and in the gradient.

    Args:
        mask: bool [...], True = may attend.
        dtype: of the logits, a floating dtype.
        value: the bias where the mask is False, below 0 and finite in the dtype. None:
            `jnp.finfo(dtype).min / 2`. transformers uses `float(jnp.finfo(dtype).min)`, T5X and
            tensor2tensor -1e9.

    Returns:
        [...] of `dtype`: 0 or the value. If jax_enable_x64 is off, float64 becomes float32, with
        JAX's warning.

    Raises:
        TypeError: mask is not bool (a bias or 0/1 floats would be read the wrong way round), dtype
            is not a floating dtype, or value is not a Python number.
        ValueError: value is not below 0, or is not finite in the dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.mask_to_bias([True, False], jnp.float16).tolist()
        [0.0, -32752.0]
        >>> te.mask_to_bias([True, False], value=-1e9).tolist()
        [0.0, -1000000000.0]

    Source:
        The additive form of the mask of Vaswani et al., "Attention Is All You Need" (2017), section
        3.2.3, https://arxiv.org/abs/1706.03762, with a finite number for its minus infinity.
    """
    dtype = arguments.result_dtype("dtype", dtype)
    if value is not None:
        lowest, value = float(jnp.finfo(dtype).min), arguments.real("value", value)
        # Not only `value < 0`: a bias that is rounded to 0 would mask nothing.
        if not lowest <= value or not float(np.asarray(value).astype(dtype)) < 0:
            want = f"a number below 0 that {dtype} holds, at least {lowest:g}"
            raise arguments.value_error("value", want, f"{value:g}")
    return _bias(arguments.as_mask("mask", mask), dtype, value)


# The functions below are compiled even if the caller is not.
@compiled(1)
def _differs(ids: Integer[Array, "..."], pad_id: int) -> Bool[Array, "..."]:
    return ids != pad_id


@compiled(0)
def _lower_triangle(length: int) -> Bool[Array, "t t"]:
    positions = jnp.arange(length, dtype=jnp.int32)
    return positions[None, :] <= positions[:, None]


@compiled(1, 2, 3)
def _attention_mask(
    arrays: dict[str, Array],
    causal: bool,
    window: tuple[int | None, int | None],
    chunk: int | None,
) -> Bool[Array, "b 1 t s"]:
    queries, keys = _pair(arrays, "positions")
    left, right = window
    allowed = [keys <= queries] if causal else []
    if right is not None:
        allowed.append(_is_within(keys, queries, right))
    if left is not None:
        allowed.append(_is_within(queries, keys, left))
    if chunk is not None:
        allowed.append(queries // chunk == keys // chunk)
    if "query_block_ids" in arrays and allowed:
        query_blocks, key_blocks = _pair(arrays, "block_ids")
        in_block = (query_blocks == key_blocks) & (query_blocks >= 0)
        allowed = [_all(allowed) | in_block]
    if "query_segment_ids" in arrays:
        query_segments, key_segments = _pair(arrays, "segment_ids")
        allowed.append(query_segments == key_segments)
    if "padding_mask" in arrays:
        allowed.append(arrays["padding_mask"][:, None, None, :])
    return _all(allowed) if allowed else jnp.ones((1, 1, 1, keys.shape[3]), bool)


@compiled()
def _all(masks: list[Bool[Array, "b h t s"]]) -> Bool[Array, "b h t s"]:
    return functools.reduce(jnp.logical_and, masks)


@compiled(1, 2)
def _bias(mask: Bool[Array, "..."], dtype: jnp.dtype, value: float | None) -> Float[Array, "..."]:
    low = jnp.finfo(dtype).min / 2 if value is None else value
    return jnp.where(mask, jnp.zeros((), dtype), jnp.array(low, dtype))


def _pair(
    arrays: dict[str, Array], kind: str
) -> tuple[Integer[Array, "q 1 t 1"], Integer[Array, "k 1 1 s"]]:
    """Queries' and keys' arrays in one dtype, in shapes that broadcast to [batch, 1, queries,
    keys]."""
    queries, keys = arrays[f"query_{kind}"], arrays[f"key_{kind}"]
    dtype = max(queries.dtype, keys.dtype, key=lambda dtype: dtype.itemsize)
    return queries.astype(dtype)[:, None, :, None], keys.astype(dtype)[:, None, None, :]


def _is_within(
    first: Integer[Array, "..."], second: Integer[Array, "..."], distance: int
) -> Bool[Array, "..."]:
    """`first - second <= distance`. The difference may not fit the dtype, but it fits the unsigned
    one if it is not negative."""
    if distance == 0:
        return first <= second
    unsigned = jnp.uint64 if first.dtype == jnp.int64 else jnp.uint32
    difference = first.astype(unsigned) - second.astype(unsigned)
    return (first <= second) | (
        difference <= jnp.array(min(distance, jnp.iinfo(unsigned).max), unsigned)
    )
