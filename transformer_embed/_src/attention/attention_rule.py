"""States who may attend to whom, once for single pairs and for tiles of pairs.

A tile is a rectangle of queries and keys. A block is some tokens that see each other.

In shapes, b counts batch rows, t counts queries and s counts keys.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_embed._src.partitioning import with_whole_rows
from transformer_embed._src.sequences.token_positions import arrays_of

# The reach of a query: how many places before and after its own a query sees; None: no limit.
Window = tuple[int | None, int | None]
# What the rule compares, by name.
Fields = dict[str, Array]


def may_attend(queries: dict[str, Any], keys: dict[str, Any]) -> Any:
    """Computes whether queries may attend to keys, from fields that broadcast against each other.

    This is the only place that states the rule. The fields are arrays, or, for tiles, all of them
    are `Interval`s, and so is the result. The rule needs only the operators that both have.

    Args:
        queries: The fields of the queries, from `with_conditions`.
        keys: The fields of the keys, from `with_conditions`.
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
        # Both sides are asked, because an interval of block ids leaves out tokens in no block.
        is_in_block = queries["is_in_block"] & keys["is_in_block"]
        in_one_block = is_in_block & (queries["block_ids"] == keys["block_ids"])
        limits = [functools.reduce(operator.and_, limits) | in_one_block]
    if "segment_ids" in queries:
        limits.append(queries["segment_ids"] == keys["segment_ids"])
    limits += [side["is_token"] for side in (queries, keys) if "is_token" in side]
    return functools.reduce(operator.and_, limits)


def fields(mask: Any) -> tuple[Fields, Fields]:
    """Returns what the rule compares of the queries and of the keys of a mask.

    The fields are integers [1 or b, length] of one dtype: `positions`, `places`, `token` (not 0 at
    tokens), and `segment_ids`, `block_ids`, `ends` and `chunk` if the mask has them.
    """
    query_arrays, key_arrays = (arrays_of(side) for side in mask.sides)
    # Under strict dtype promotion, jax compares no int32 with int64.
    arrays = [*query_arrays.values(), *key_arrays.values()]
    dtype = np.result_type(*(array.dtype for array in arrays))
    queries = _side_fields(query_arrays, mask.chunk, dtype)
    keys = _side_fields(key_arrays, mask.chunk, dtype)
    return queries, keys


def _side_fields(arrays: Fields, chunk: int | None, dtype: Any) -> Fields:
    """Returns the fields of one side."""
    tokens = {name: array.astype(dtype) for name, array in arrays.items()}
    positions = tokens["positions"]
    token = tokens.get("segment_ids", jnp.ones((1, positions.shape[1]), dtype))
    if chunk is not None:
        tokens["chunk"] = positions // chunk
    # Places of their own replace the positions.
    return {"places": positions, "token": token} | tokens


def whole_fields(mask: Any) -> tuple[Fields, Fields]:
    """Returns the fields, whole on each device if explicit mesh axes split the length."""
    return jax.tree.map(with_whole_rows, fields(mask))


def with_conditions(tokens: Fields, mask: Any) -> Fields:
    """Adds to the fields what is true of each token.

    A key is seen by the queries in an interval of places, from `first` to `last`. Call this after
    axes were expanded, because a kernel for TPUs cannot expand the axes of bools.
    """
    left, right = mask.reach
    conditions = {"is_token": tokens["token"] != 0}
    if "block_ids" in tokens:
        conditions["is_in_block"] = tokens["block_ids"] >= 0
    if right is not None:
        conditions["first"] = _moved(tokens["places"], -right)
    if left is not None:
        last = _moved(tokens["places"], left)
        if mask.sinks is not None:
            is_sink = tokens["positions"] < mask.sinks
            last = jnp.where(is_sink, jnp.iinfo(last.dtype).max, last)
        conditions["last"] = last
    if "ends" in tokens:
        conditions["last"] = tokens["ends"] - 1
    return tokens | conditions


def _moved(places: Array, distance: int) -> Array:
    """Computes `places + distance`, or the end of the dtype if the sum is beyond it."""
    info = jnp.iinfo(places.dtype)
    # No two places are further apart than this. A step that does not fit the dtype wraps, and the
    # sum with it wraps back, so the sum is right.
    size = min(abs(distance), info.max - info.min)
    step = np.array(size).astype(places.dtype)
    if distance < 0:
        return jnp.maximum(places, info.min + size) - step
    return jnp.minimum(places, info.max - size) + step
