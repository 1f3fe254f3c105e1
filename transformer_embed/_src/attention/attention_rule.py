"""The one statement of who may attend to whom."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_embed._src.partitioning import with_whole_rows
from transformer_embed._src.sequences.token_positions import arrays_of

# How many places before and after its own a query sees; None: no limit.
Window = tuple[int | None, int | None]
# What the rule compares, by name.
Fields = dict[str, Array]


def may_attend(queries: dict[str, Any], keys: dict[str, Any]) -> Any:
    """Whether queries may attend to keys, for `fields` that broadcast against each other.

    This is the only place that states the rule. The fields are arrays; or, for blocks, all of them
    are `Interval`s, and so is the result. Their operators are all that it needs.
    """
    limits = []
    if "first" in keys:
        limits.append(keys["first"] <= queries["places"])
    if "last" in keys:
        limits.append(queries["places"] <= keys["last"])
    if "chunk" in queries:
        limits.append(queries["chunk"] == keys["chunk"])
    # Blocks only lift limits, and change nothing where there are none.
    if "block_ids" in queries and limits:
        # Asked of both sides, because an interval of block ids leaves out tokens in no block.
        is_in_block = queries["is_in_block"] & keys["is_in_block"]
        in_one_block = is_in_block & (queries["block_ids"] == keys["block_ids"])
        limits = [functools.reduce(operator.and_, limits) | in_one_block]
    if "segment_ids" in queries:
        limits.append(queries["segment_ids"] == keys["segment_ids"])
    limits += [side["is_token"] for side in (queries, keys) if "is_token" in side]
    return functools.reduce(operator.and_, limits)


def fields(mask: Any) -> tuple[Fields, Fields]:
    """What the rule compares of queries and of keys: integers [B or 1, length] of one dtype.

    `token` is not 0 at tokens.
    """
    arrays = [arrays_of(side) for side in mask.sides]
    # Under strict dtype promotion, jax compares no int32 with int64.
    dtype = np.result_type(*(array.dtype for side in arrays for array in side.values()))
    sides = []
    for side in arrays:
        tokens = {name: array.astype(dtype) for name, array in side.items()}
        positions = tokens["positions"]
        token = tokens.get("segment_ids", jnp.ones((1, positions.shape[1]), dtype))
        if mask.chunk is not None:
            tokens["chunk"] = positions // mask.chunk
        sides.append({"places": positions, "token": token} | tokens)
    return sides[0], sides[1]


def whole_fields(mask: Any) -> tuple[Fields, Fields]:
    """The fields, whole on each device if explicit mesh axes split the length."""
    return jax.tree.map(with_whole_rows, fields(mask))


def with_conditions(tokens: Fields, mask: Any) -> Fields:
    """The fields, and what is true of each token.

    A key has an interval of places: the first and the last one of a query that sees it. Call this
    last: a kernel for TPUs cannot expand the axes of bools.
    """
    left, right = mask.reach
    conditions = {"is_token": tokens["token"] != 0}
    if "block_ids" in tokens:
        conditions["is_in_block"] = tokens["block_ids"] >= 0
    if right is not None:
        conditions["first"] = _moved(tokens["places"], -right)
    if left is not None:
        last = conditions["last"] = _moved(tokens["places"], left)
        if mask.sinks is not None:
            is_sink = tokens["positions"] < mask.sinks
            conditions["last"] = jnp.where(is_sink, jnp.iinfo(last.dtype).max, last)
    if "ends" in tokens:
        conditions["last"] = tokens["ends"] - 1
    return tokens | conditions


def _moved(places: Array, distance: int) -> Array:
    """`places + distance`; the end of the dtype where that is beyond it."""
    info = jnp.iinfo(places.dtype)
    # No two places are further apart. A distance that does not fit the dtype wraps, and so does the
    # sum, which is right again.
    size = min(abs(distance), info.max - info.min)
    step = np.array(size).astype(places.dtype)
    if distance < 0:
        return jnp.maximum(places, info.min + size) - step
    return jnp.minimum(places, info.max - size) + step
