"""The one statement of who may attend to whom, for single tokens and for ranges of tokens."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

Window = tuple[int | None, int | None]
# The arrays of a TokenPositions by their names, those that are not None; also what follows of them.
Tokens = dict[str, Array]


class Range(NamedTuple):
    """The lowest and highest value of a field in some tokens; of one token, twice the same."""

    low: Array
    high: Array


Ranges = dict[str, Range]


def may_attend(
    queries: Ranges, keys: Ranges, causal: bool, window: Window | None, every: bool = True
) -> Bool[Array, "..."]:
    """Whether every query of a range may attend to every key of a range, in the smallest shape.

    This is the only place that states the rule; it is jnp on its arguments alone. For
    `every=False`, whether some query may attend to some key as far as the ranges tell.
    """
    # The hardest pairs decide for every pair, the easiest ones for some pair.
    swap = slice(None, None, 1 if every else -1)
    (first_query, last_query), (first_key, last_key) = (
        side["positions"][swap] for side in (queries, keys)
    )
    left, right = window or (None, None)
    allowed = [last_key <= first_query] if causal else []
    if right is not None:
        allowed.append(_is_within(last_key, first_query, right))
    if left is not None:
        allowed.append(_is_within(last_query, first_key, left))

    def is_same(name: str) -> Array:
        query, key = queries[name], keys[name]
        if query.low is query.high and key.low is key.high:
            return query.low == key.low
        meet = (query.low <= key.high) & (key.low <= query.high)
        alike = (query.low == query.high) & (key.low == key.high)
        return meet & alike if every else meet

    def is_true(name: str, side: Ranges) -> Array:
        return side[name].low if every else side[name].high

    if "chunk" in queries:
        allowed.append(is_same("chunk"))
    if "block_ids" in queries and allowed:
        in_block = is_same("block_ids") & is_true("in_block", queries) & is_true("in_block", keys)
        allowed = [functools.reduce(jnp.logical_and, allowed) | in_block]
    if "segment_ids" in queries:
        allowed.append(is_same("segment_ids"))
    allowed += [is_true("is_token", side) for side in (queries, keys) if "is_token" in side]
    if not allowed:
        return jnp.ones((1,) * (first_key.ndim - 1) + first_key.shape[-1:], bool)
    return functools.reduce(jnp.logical_and, allowed)


def fields(queries: Tokens, keys: Tokens, chunk: int | None) -> tuple[Tokens, Tokens]:
    """What the rule compares, in the wider dtype of both sides."""
    sides = []
    for side, other in ((queries, keys), (keys, queries)):
        values = {}
        for name, array in side.items():
            dtypes = (array.dtype, other.get(name, array).dtype)
            values[name] = array.astype(max(dtypes, key=lambda dtype: dtype.itemsize))
        if chunk is not None:
            values["chunk"] = values["positions"] // chunk
        if "block_ids" in values:
            values["in_block"] = values["block_ids"] >= 0
        if "segment_ids" in values:
            values["is_token"] = values["segment_ids"] != 0
        sides.append(values)
    return sides[0], sides[1]


def ranges_of_each(tokens: Tokens, axes: tuple[int, ...]) -> Ranges:
    """Each token as a range of its own, with new axes."""
    arrays = {name: jnp.expand_dims(array, axes) for name, array in tokens.items()}
    return {name: Range(array, array) for name, array in arrays.items()}


def _is_within(
    first: Integer[Array, "..."], second: Integer[Array, "..."], distance: int
) -> Bool[Array, "..."]:
    """`first - second <= distance`.

    The difference may not fit the dtype, but it fits the unsigned one if it is not negative.
    """
    if distance == 0:
        return first <= second
    unsigned = jnp.uint64 if first.dtype == jnp.int64 else jnp.uint32
    difference = first.astype(unsigned) - second.astype(unsigned)
    return (first <= second) | (
        difference <= jnp.array(min(distance, jnp.iinfo(unsigned).max), unsigned)
    )
