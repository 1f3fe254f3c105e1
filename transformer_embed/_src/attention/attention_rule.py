"""States who may attend to whom, once for single pairs and for tiles of pairs.

A tile is a rectangle of queries and keys. A block is some tokens that see each other. A place is
the number by which a causal mask and a window compare tokens: the position, unless the tokens have
places of their own.

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
from transformer_embed._src.sequences.token_positions import batch_arrays

# A pair (left, right): how many places before and after its own a query sees. None means no limit.
Window = tuple[int | None, int | None]
# The arrays that the rule compares, by name. See `rule_fields` and `with_conditions`.
Fields = dict[str, Array]


def may_attend(queries: dict[str, Any], keys: dict[str, Any]) -> Any:
    """Computes whether queries may attend to keys, from fields that broadcast against each other.

    This is the only place that states the rule. For single pairs, the fields and the result are
    arrays. For tiles, all of them are `Interval`s (see `tile_kinds`). So the rule uses only
    operators that arrays and intervals have.

    Args:
        queries: The fields of the queries, from `with_conditions`.
        keys: The fields of the keys, from `with_conditions`.
    """
    limits = []
    if "first_query_place" in keys:
        limits.append(keys["first_query_place"] <= queries["places"])
    if "last_query_place" in keys:
        limits.append(queries["places"] <= keys["last_query_place"])
    if "chunk" in queries:
        limits.append(queries["chunk"] == keys["chunk"])
    # Tokens of one block are exempt from the limits above. If there is no limit, blocks have no
    # effect.
    if "block_ids" in queries and limits:
        # Both tokens must be in a block. For tiles, equal intervals of block ids do not say this,
        # because an interval leaves out the tokens that are in no block.
        is_in_block = queries["is_in_block"] & keys["is_in_block"]
        in_same_block = is_in_block & (queries["block_ids"] == keys["block_ids"])
        limits = [functools.reduce(operator.and_, limits) | in_same_block]
    if "segment_ids" in queries:
        limits.append(queries["segment_ids"] == keys["segment_ids"])
    limits.append(queries["is_token"])
    limits.append(keys["is_token"])
    return functools.reduce(operator.and_, limits)


def rule_fields(mask: Any) -> tuple[Fields, Fields]:
    """Returns the arrays that the rule compares, by name, for the queries and for the keys.

    All of them are integers [1 or b, length] of one dtype:

    - `positions` and `places`;
    - `zero_at_padding`, which is 0 at padding and another number at tokens;
    - `segment_ids`, `block_ids`, `ends` and `chunk`, if the mask has them.
    """
    queries, keys = mask.sides
    query_arrays = batch_arrays(queries)
    key_arrays = batch_arrays(keys)
    # Under strict dtype promotion, jax compares no int32 with int64.
    all_arrays = [*query_arrays.values(), *key_arrays.values()]
    dtype = np.result_type(*(array.dtype for array in all_arrays))
    query_fields = _side_fields(query_arrays, mask.chunk, dtype)
    key_fields = _side_fields(key_arrays, mask.chunk, dtype)
    return query_fields, key_fields


def _side_fields(arrays: Fields, chunk: int | None, dtype: Any) -> Fields:
    """Returns the fields of the queries or of the keys, as in `rule_fields`.

    Args:
        arrays: The `batch_arrays` of the queries or of the keys.
        chunk: The length of a chunk, or None.
        dtype: The dtype of all fields.
    """
    fields = {name: array.astype(dtype) for name, array in arrays.items()}
    positions = fields["positions"]
    # Segment ids are 0 at padding. Without segment ids, every token counts.
    every_token = jnp.ones((1, positions.shape[1]), dtype)
    zero_at_padding = fields.get("segment_ids", every_token)
    if chunk is not None:
        fields["chunk"] = positions // chunk
    # If the tokens have places of their own, these are among the fields, and replace the positions.
    return {"places": positions, "zero_at_padding": zero_at_padding, **fields}


def whole_rule_fields(mask: Any) -> tuple[Fields, Fields]:
    """Returns the arrays of `rule_fields`, each with the whole length on every device.

    Only explicit mesh axes can split the length, so without them this is `rule_fields`.
    """
    return jax.tree.map(with_whole_rows, rule_fields(mask))


def with_conditions(fields: Fields, mask: Any) -> Fields:
    """Adds which tokens count, and which queries see each token if the token is a key.

    The result has the fields, and

    - bools `is_token` and `is_in_block`;
    - the bounds `first_query_place` and `last_query_place`: the queries whose places are from the
      first bound to the last bound see the key. Where there is no limit, the bound is left out.

    Call this after axes were expanded, because a kernel for TPUs cannot expand the axes of bools.

    Args:
        fields: The fields of the queries or of the keys, from `rule_fields`.
        mask: The mask, of which the options are read.
    """
    left, right = mask.reach
    places = fields["places"]
    conditions = {"is_token": fields["zero_at_padding"] != 0}
    if "block_ids" in fields:
        conditions["is_in_block"] = fields["block_ids"] >= 0
    if right is not None:
        conditions["first_query_place"] = _saturating_sum(places, -right)
    if left is not None:
        last = _saturating_sum(places, left)
        if mask.sinks is not None:
            is_sink = fields["positions"] < mask.sinks
            last = jnp.where(is_sink, jnp.iinfo(last.dtype).max, last)
        conditions["last_query_place"] = last
    if "ends" in fields:
        conditions["last_query_place"] = fields["ends"] - 1
    return fields | conditions


def _saturating_sum(places: Array, distance: int) -> Array:
    """Computes `places + distance`, or the end of the dtype if the sum is beyond it.

    For example, in int8 the places 100 and 120 plus 10 give 110 and 127.
    """
    lowest = jnp.iinfo(places.dtype).min
    highest = jnp.iinfo(places.dtype).max
    # No two places are further apart than the range of the dtype.
    size = min(abs(distance), highest - lowest)
    # A size above `highest` wraps to a negative step here. Adding this step wraps once more, so
    # the sum is right.
    step = np.array(size).astype(places.dtype)
    if distance < 0:
        places_without_overflow = jnp.maximum(places, lowest + size)
        return places_without_overflow - step
    places_without_overflow = jnp.minimum(places, highest - size)
    return places_without_overflow + step
