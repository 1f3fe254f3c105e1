"""Translates a mask into the arguments of fused attention kernels, or says why that cannot be."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool

from transformer_embed._src import arguments
from transformer_embed._src.attention.attention_mask import AttentionMask
from transformer_embed._src.kernels.row_indices import (
    CAUSAL_REACH,
    UNLIMITED_REACH,
    RowRule,
    refusal,
)


def dot_product_attention_kwargs(
    mask: AttentionMask, *, order: str | None = None, batch_size: int | None = None
) -> dict[str, Any]:
    """Makes arguments of `jax.nn.dot_product_attention` that apply a mask without a bool array.

    Use the function to call cuDNN's kernel on GPUs (`implementation="cudnn"`). Pass the returned
    arguments to `jax.nn.dot_product_attention` in place of a bool mask [T, S]. cuDNN itself refuses
    a window that reaches to the right. The mask may be one of these:

    - self-attention;
    - attention to the keys of another sequence, without a causal mask and a window;
    - decoding, where each batch row has one query, and the cache is filled from the left.

    Args:
        mask: The mask, without a `chunk` and without block ids. (Block ids number groups of tokens
            that always see each other.)
        order: The layout of the tokens. `"full"` means that each batch row is one sequence without
            padding. `"right"` means that each batch row has one sequence, then padding. Required if
            the mask has segment ids, is causal or has a window.
        batch_size: The number of batch rows, B. Pass it if the mask has a single row, which is then
            used for every batch row. If None, B is the number of rows of the mask.

    Returns:
        A dictionary of keyword arguments for `jax.nn.dot_product_attention`. `is_causal` is always
        in the dictionary. Three more arguments are in the dictionary if the mask needs them:
        `local_window_size`, `query_seq_lengths` (int32 [B]) and `key_value_seq_lengths` (int32
        [B]). If the two lengths are in the dictionary, the outputs of queries at padding are 0.

    Raises:
        TypeError: `mask` is not an AttentionMask, or `batch_size` is not a Python int.
        ValueError: The kernel's arguments cannot express a part of the mask. The tokens are not in
            the layout that you pass as `order` (this is not checked inside `jax.jit`).

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> tokens = te.TokenPositions.from_lengths([3, 2], 4)
        >>> mask = te.AttentionMask(tokens, causal=True, window=(1, 0))
        >>> options = te.kernels.dot_product_attention_kwargs(mask, order="right")
        >>> options["is_causal"], options["local_window_size"]
        (True, (1, 0))
        >>> options["key_value_seq_lengths"].tolist()
        [3, 2]
        >>> heads = jax.random.normal(jax.random.key(0), [2, 4, 1, 8])
        >>> jax.nn.dot_product_attention(heads, heads, heads, **options).shape
        (2, 4, 1, 8)
    """
    rule = RowRule(
        mask=mask, kernel="jax.nn.dot_product_attention", order=order, batch_size=batch_size
    )
    # The rule has given the mask a batch axis.
    mask = rule.mask
    rule.check_absent(chunk=mask.chunk)
    # The reach is how far a query sees. It is limited by a causal mask or a window.
    is_limited = mask.reach != UNLIMITED_REACH
    if rule.has_segments or is_limited:
        parts = "segment ids, a causal mask or a window"
        rule.check_order_is_given(parts, ("full", "right"))
    query_count, _ = mask.lengths
    is_decoding = mask.keys is not None and query_count == 1
    if is_decoding:
        return _decoding_kwargs(rule)
    return _kwargs_of_whole_rows(rule)


def _kwargs_of_whole_rows(rule: RowRule) -> dict[str, Any]:
    """Makes the arguments for self-attention, or for several queries that see another sequence."""
    mask = rule.mask
    # How many row indices before and after its own a query sees: (left, right).
    reach = rule.index_reach()
    _, right = reach
    options: dict[str, Any] = {"is_causal": right == 0}
    # A causal mask without a window has the reach (None, 0), and no limit at all is (None, None).
    has_window = reach not in (CAUSAL_REACH, UNLIMITED_REACH)
    if has_window:
        # In a causal window, the right side is 0, as cuDNN wants it.
        options["local_window_size"] = rule.bounded_reach()
    if rule.has_segments:
        # In the order "right", the tokens of a row come before the padding. So the number of tokens
        # says which entries are tokens.
        queries, keys = mask.sides
        # `number_in_rows` counts the True entries of each batch row.
        options["query_seq_lengths"] = rule.number_in_rows(queries.padding_mask)
        # Keys of another sequence are refused with a causal mask or a window. So all queries of a
        # batch row see the same keys as the first one.
        is_key = keys.padding_mask if mask.keys is None else _keys_of_first_query(mask)
        options["key_value_seq_lengths"] = rule.number_in_rows(is_key)
    return options


def _decoding_kwargs(rule: RowRule) -> dict[str, Any]:
    """Makes the arguments for a mask with a single query in each batch row, and a cache as keys.

    They tell the kernel how many keys the query sees. `is_causal` cannot be used, because the
    kernel would take the query for the token of the first key.
    """
    mask = rule.mask
    # How many places before its own a query sees, None for no limit.
    left_limit, _ = mask.reach
    # The kernel takes only a number of keys, counted from the first key. So it cannot hide the
    # first keys, as a window would.
    if left_limit is not None:
        want = f"no limit on the left for a single query in {rule.kernel}"
        raise refusal("window", want, mask.window)
    options: dict[str, Any] = {"is_causal": False}
    if rule.has_segments or mask.reach != UNLIMITED_REACH:
        options["key_value_seq_lengths"] = rule.number_in_rows(_keys_of_first_query(mask))
    return options


def _keys_of_first_query(mask: AttentionMask) -> Bool[Array, "b s"]:
    """Returns which keys the first query of each batch row sees."""
    _, key_count = mask.lengths
    # [b, 1, s].
    first_query = mask.tile(0, 0, (1, key_count))
    return first_query[:, 0]


def flash_attention_kwargs(
    mask: AttentionMask, *, order: str | None = None, batch_size: int | None = None
) -> dict[str, Any]:
    """Makes the arguments of Pallas' `flash_attention` on TPUs that apply a mask.

    Args:
        mask: The mask, without a window and without block ids. (Block ids number groups of tokens
            that always see each other.) A causal mask must be a mask of self-attention, in which
            the keys are the queries themselves.
        order: The layout of the tokens, `"full"`, `"right"` or `"packed"`. `te.kernels` explains
            the three words. Required if the mask is causal.
        batch_size: The number of batch rows, B. Pass it if the mask has a single row, which is then
            used for every batch row. If None, B is the number of rows of the mask.

    Returns:
        A dictionary of the keyword arguments `causal` and `segment_ids`. `segment_ids` is Pallas'
        `SegmentIds` of int32 arrays [B, T] and [B, S], or None if there is only one segment.

    Raises:
        TypeError: `mask` is not an AttentionMask, or `batch_size` is not a Python int.
        ValueError: The kernel cannot express a part of the mask. The tokens are not in the layout
            that you pass as `order` (this is not checked inside `jax.jit`).

    Example:
        >>> import transformer_embed as te
        >>> tokens = te.TokenPositions.from_segment_ids([[1] * 100 + [2] * 28])
        >>> mask = te.AttentionMask(tokens, causal=True)
        >>> options = te.kernels.flash_attention_kwargs(mask, order="packed")
        >>> options["causal"], options["segment_ids"].q.shape
        (True, (1, 128))
    """
    # Pallas is imported when it is used, because it takes longer to import than this package.
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds  # noqa: PLC0415

    rule = RowRule(mask=mask, kernel="flash_attention", order=order, batch_size=batch_size)
    return _without_windows(rule, SegmentIds)


def mha_kwargs(
    mask: AttentionMask, *, order: str | None = None, batch_size: int | None = None
) -> dict[str, Any]:
    """Makes the arguments of Pallas' `mha` on GPUs that apply a mask.

    Args:
        mask: The mask of self-attention, without a window and without block ids. (Block ids number
            groups of tokens that always see each other.)
        order: The layout of the tokens, `"full"`, `"right"` or `"packed"`. `te.kernels` explains
            the three words. Required if the mask is causal.
        batch_size: The number of batch rows, B. `mha` takes segment ids of shape [B, T], so B must
            be known. If the mask has a single row, pass B, even if B is 1. The row is then used for
            every batch row. If the mask has 2 or more rows, you may pass None: B is then the number
            of rows of the mask.

    Returns:
        A dictionary of the keyword arguments `causal` and `segment_ids`. `segment_ids` is an int32
        array [B, T], or None if there is only one segment.

    Raises:
        TypeError: `mask` is not an AttentionMask, or `batch_size` is not a Python int.
        ValueError: The kernel cannot express a part of the mask. The tokens are not in the layout
            that you pass as `order` (this is not checked inside `jax.jit`). The mask has a single
            batch row, and `batch_size` is None.

    Example:
        >>> import transformer_embed as te
        >>> tokens = te.TokenPositions.from_lengths([3, 2], 4)
        >>> mask = te.AttentionMask(tokens, causal=True)
        >>> te.kernels.mha_kwargs(mask, order="right")["segment_ids"].tolist()
        [[1, 1, 1, 0], [1, 1, 0, 0]]
    """

    def ids_of_queries(query_ids: Array, _: Array) -> Array:
        """Makes the segment ids of the kernel: one array, for queries and keys alike."""
        return query_ids

    rule = RowRule(mask=mask, kernel="Pallas' mha", order=order, batch_size=batch_size)
    options = _without_windows(rule, ids_of_queries)
    rule.check_self_attention("segment ids")
    if batch_size is None and rule.row_count == 1:
        want = f"the number of rows of the queries, for {rule.kernel}"
        raise arguments.value_error("batch_size", want, None)
    return options


def _without_windows(rule: RowRule, make: Callable[[Array, Array], Any]) -> dict[str, Any]:
    """Makes the arguments of a kernel that has no argument for a window.

    Args:
        rule: The mask, checked for this kernel, and what it says about row indices.
        make: Makes the kernel's segment ids from the ids of queries and of keys.
    """
    # How many row indices before and after its own a query sees: (left, right).
    reach = rule.index_reach()
    # A causal mask without a window has the reach (None, 0), and no limit at all is (None, None).
    has_window = reach not in (CAUSAL_REACH, UNLIMITED_REACH)
    if has_window:
        # The kernel has no window, so this raises an error.
        rule.check_absent(window=rule.mask.window)
    return {"causal": reach == CAUSAL_REACH, "segment_ids": rule.kernel_segment_ids(make)}
