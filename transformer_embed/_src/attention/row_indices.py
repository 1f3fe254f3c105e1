"""The rule of a mask in row indices and segment ids, which is all that fused kernels compare."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.attention.attention_mask import AttentionMask, reach, sides
from transformer_embed._src.attention.attention_rule import Window
from transformer_embed._src.compiled import compiled
from transformer_embed._src.sequences.token_order import ORDERS, check_order, is_on_host
from transformer_embed._src.sequences.token_positions import arrays_of, segments_of

WAY_OUT = "; mask.dense() and mask.tile() can express it"
# What a query reaches without a window, with and without a causal mask.
CAUSAL, EVERYTHING = (None, 0), (None, None)


def refusal(name: str, want: str, got: Any) -> ValueError:
    """The error for a part of a rule that a kernel cannot express."""
    return arguments.value_error(name, want, f"{got}{WAY_OUT}")


def check_absent(kernel: str, **parts: Any) -> None:
    """Raises a ValueError for a part that a kernel has no argument for."""
    for name, part in parts.items():
        if part is not None:
            got = part if isinstance(part, int | tuple) else "an array"
            raise refusal(name, f"None for {kernel}, which has no argument for it", got)


def check_promise(mask: AttentionMask, order: str | None, query_start: int | None = None) -> None:
    """Raises unless the tokens lie as the caller of a kernel promises, where the host has them."""
    arguments.instance("mask", mask, AttentionMask, "a te.AttentionMask, not joined by & or |")
    queries, keys = sides(mask)
    if order is not None:
        arguments.choice("order", order, tuple(ORDERS))
    kernel = "a fused kernel"
    check_absent(kernel, sinks=mask.sinks)
    if order is not None or reach(mask) != EVERYTHING:
        # Tokens that were taken in another order than that of their row.
        check_absent(kernel, **{"queries.places": queries.places, "keys.places": keys.places})
    # Traced tokens cannot be checked: the promise is believed.
    if not (is_on_host(queries) and is_on_host(keys)):
        return
    if order is not None:
        # Both sides of self-attention are one object, checked once.
        for tokens in {id(queries): queries, id(keys): keys}.values():
            check_order(tokens, order)
    if query_start is not None:
        _check_part(mask, query_start)


def _check_part(mask: AttentionMask, query_start: int) -> None:
    """Raises unless the queries are the keys from an index on."""
    held = [jax.device_get(arrays_of(side)) for side in sides(mask)]
    length = mask.lengths[0]
    for name, array in held[0].items():
        of_keys = held[1][name][:, query_start : query_start + length]
        # Positions of padding mean nothing.
        counts = held[0].get("segment_ids", 1) if name == "positions" else 1
        if ((array != of_keys) & (counts != 0)).any():
            want = f"the keys from index {query_start} on (query_start)"
            raise arguments.value_error(f"queries.{name}", want, "others")


def reach_in_rows(
    mask: AttentionMask, kernel: str, order: str | None, query_start: int | None = None
) -> Window:
    """How many tokens before and after its own a query sees, as far as its segment reaches.

    In an order, positions rise by one along the tokens of a segment, so a causal mask and a window
    may compare row indices instead.
    """
    limits = reach(mask)
    if limits != EVERYTHING:
        parts = f"a causal mask or a window in {kernel}, which compares row indices"
        if mask.keys is not None and query_start is None:
            raise refusal("keys", f"None (self-attention) for {parts}", "another sequence")
        check_order_is_given(order, parts)
        # Queries without segments see every sequence by position, each of which counts its own.
        queries, keys = sides(mask)
        if order == "packed" and queries.segment_ids is None and keys.segment_ids is not None:
            raise refusal("queries.segment_ids", f"those of the keys, for {parts}", None)
    return limits


def check_order_is_given(
    order: str | None, parts: str, choices: tuple[str, ...] = tuple(ORDERS)
) -> None:
    """Raises a ValueError if the promise is missing that parts of a rule need."""
    if order not in choices:
        want = " or ".join(map(repr, choices))
        raise arguments.value_error("order", f"{want}, for {parts}", repr(order))


def segment_ids(mask: AttentionMask, order: str | None) -> list[Integer[Array, "b t"]] | None:
    """Ids of queries and of keys that are equal for one segment and chunk; 0 at padding.

    None if all of them are equal.
    """
    queries, keys = sides(mask)
    has_segments = keys.segment_ids is not None and order != "full"
    if not has_segments and mask.chunk is None:
        return None
    ids = [segments_of(queries), segments_of(keys)]
    if queries.segment_ids is None:
        # Without segments of their own, queries see the tokens of every segment.
        ids = [side.padding_mask.astype(jnp.int32) for side in (queries, keys)]
    if mask.chunk is not None:
        return _names(ids, [side.positions // mask.chunk for side in (queries, keys)])
    # Kernels compare int32: ids of another dtype could wrap, and are numbered.
    if any(side.dtype != jnp.int32 for side in ids):
        return _names(ids, [jnp.zeros_like(side) for side in ids])
    return ids


@compiled()
def _names(segments: list[Array], chunks: list[Array]) -> list[Int32[Array, "b t"]]:
    """Numbers of the pairs of a segment and a chunk: equal for equal pairs, whatever the tokens."""
    # Queries and keys are numbered together: apart, one pair could get two numbers.
    batch = max(len(array) for array in (*segments, *chunks))
    pairs = []
    for of_sides in (segments, chunks):
        dtype = np.promote_types(*(array.dtype for array in of_sides))
        rows = [jnp.broadcast_to(array, (batch, array.shape[1])) for array in of_sides]
        pairs.append(jnp.concatenate([array.astype(dtype) for array in rows], axis=1))
    # Sorted, equal pairs are neighbours: counting where a new one begins numbers them. A sort by
    # index puts the numbers where the pairs were.
    index = jax.lax.broadcasted_iota(jnp.int32, pairs[0].shape, 1)
    *ordered, index = jax.lax.sort((*pairs, index), dimension=1, num_keys=2)
    changes = [array[:, 1:] != array[:, :-1] for array in ordered]
    is_new = jnp.pad(changes[0] | changes[1], ((0, 0), (1, 0)))
    numbers = jnp.cumsum(is_new, axis=1, dtype=jnp.int32) + 1
    names = jax.lax.sort((index, numbers), dimension=1, num_keys=1)[1]
    names = jnp.where(pairs[0] == 0, 0, names)
    length = segments[0].shape[1]
    return [names[:, :length], names[:, length:]]


def number_of_rows(mask: AttentionMask, batch_size: int | None) -> int:
    """The number of rows of the queries: batch_size, or the mask's."""
    rows = max(array.shape[0] for tokens in sides(mask) for array in arrays_of(tokens).values())
    if batch_size is None:
        return rows
    batch_size = arguments.size("batch_size", batch_size)
    if rows not in (1, batch_size):
        raise arguments.value_error("batch_size", f"the mask's {rows} rows", batch_size)
    return batch_size


def for_rows(number: int, array: Array) -> Array:
    """An array of [1 or B, ...] for this number of rows."""
    return jnp.broadcast_to(array, (number, *array.shape[1:]))
