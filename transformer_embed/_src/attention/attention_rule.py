"""States who may attend to whom, once for single pairs and for tiles of pairs.

The rule is the condition in the docstring of `AttentionMask`. It compares fields: a field is an
array with one number for each query or for each key, such as the segment ids of the keys.

A tile is a rectangle of queries and keys. A block is some tokens that see each other. A place is
the number by which a causal mask and a window compare tokens. It is the position, unless the tokens
have an array `places` (tokens of a tree, or tokens that `take` has put in another order).

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
# The fields of the queries or of the keys, by name. See `rule_fields` and `with_conditions`.
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
    if "first_seen_from" in keys:
        limits.append(keys["first_seen_from"] <= queries["places"])
    if "last_seen_from" in keys:
        limits.append(queries["places"] <= keys["last_seen_from"])
    if "chunk" in queries:
        limits.append(queries["chunk"] == keys["chunk"])
    conditions = list(limits)
    # Tokens of one block see each other beyond the limits above. If there is no limit, all tokens
    # of a segment see each other anyway, so blocks are left out.
    if "block_ids" in queries and limits:
        # Two tokens in no block may have equal ids, too (such as -1), so both must be in a block.
        # For a tile, its interval of ids could not say this, because the interval covers only the
        # tokens that are in a block.
        are_in_blocks = queries["is_in_block"] & keys["is_in_block"]
        in_same_block = are_in_blocks & (queries["block_ids"] == keys["block_ids"])
        is_within_limits = functools.reduce(operator.and_, limits)
        conditions = [is_within_limits | in_same_block]
    if "segment_ids" in queries:
        conditions.append(queries["segment_ids"] == keys["segment_ids"])
    conditions.append(queries["is_token"])
    conditions.append(keys["is_token"])
    return functools.reduce(operator.and_, conditions)


def rule_fields(mask: Any) -> tuple[Fields, Fields]:
    """Returns the fields of the queries, and the fields of the keys, of an `AttentionMask`.

    All fields are integers [1 or b, length] of one dtype:

    - `positions`, which say where the sinks are;
    - `places`, which a causal mask and a window compare;
    - `token_flags`, which are 0 at padding and another number at tokens;
    - `segment_ids` and `block_ids`, if the tokens have them;
    - `ends`, if the tokens are a tree: one past the last place that sees the token;
    - `chunk`, if the mask has chunks: the number of the token's chunk, from 0.
    """
    queries, keys = mask.sides
    # The arrays of the tokens, such as positions, by name, each [1 or b, length].
    query_arrays = batch_arrays(queries)
    key_arrays = batch_arrays(keys)
    # All fields get the widest dtype, because under strict dtype promotion jax compares no int32
    # with int64.
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
    # Tokens without an array of places are compared by their positions.
    places = fields.get("places", positions)
    # Segment ids are 0 at padding alone. Without segment ids there is no padding.
    ones = jnp.ones((1, positions.shape[1]), dtype)
    token_flags = fields.get("segment_ids", ones)
    if chunk is not None:
        fields["chunk"] = positions // chunk
    return {"places": places, "token_flags": token_flags, **fields}


def rule_fields_of_whole_rows(mask: Any) -> tuple[Fields, Fields]:
    """Returns the arrays of `rule_fields`, each with the whole length on every device.

    Only explicit mesh axes can split the length. Without them, this returns the same arrays as
    `rule_fields`.
    """
    return jax.tree.map(with_whole_rows, rule_fields(mask))


def with_conditions(fields: Fields, mask: Any) -> Fields:
    """Adds to the fields of tokens which tokens count, and from which places each of them is seen.

    The result has the given fields and these:

    - `is_token`: bools, False at padding;
    - `is_in_block`: bools, if the tokens have block ids;
    - `first_seen_from` and `last_seen_from`: As a key, the token is seen only by queries whose
      place is from the first to the last of these numbers. With the window (3, 0), for example, a
      key at place 5 is seen from the places 5 to 8. Where there is no limit, the field is left out.

    Call this after axes were expanded, because a kernel for TPUs cannot expand the axes of bools.

    Args:
        fields: The fields of the queries or of the keys, from `rule_fields`.
        mask: The mask, of which the options are read.
    """
    # How many places before and after its own a query sees. None means no limit.
    left, right = mask.reach
    places = fields["places"]
    conditions = {"is_token": fields["token_flags"] != 0}
    if "block_ids" in fields:
        conditions["is_in_block"] = fields["block_ids"] >= 0
    if right is not None:
        conditions["first_seen_from"] = _limited_sum(places, -right)
    if left is not None:
        last_place = _limited_sum(places, left)
        if mask.sinks is not None:
            # A sink is seen from all later places.
            is_sink = fields["positions"] < mask.sinks
            highest_place = jnp.iinfo(places.dtype).max
            last_place = jnp.where(is_sink, highest_place, last_place)
        conditions["last_seen_from"] = last_place
    if "ends" in fields:
        # A token of a tree is seen from its subtree alone. (If the keys are a tree, the mask has no
        # window, so there is no other last place.)
        conditions["last_seen_from"] = fields["ends"] - 1
    return fields | conditions


def _limited_sum(places: Array, distance: int) -> Array:
    """Computes `places + distance`, but at most the highest and at least the lowest of the dtype.

    `places` are the numbers by which masks compare tokens, such as positions. For example, in int8
    (-128 to 127) the places 100 and 120 plus 10 give 110 and 127.
    """
    lowest = jnp.iinfo(places.dtype).min
    highest = jnp.iinfo(places.dtype).max
    # No two places are further apart than the range of the dtype.
    size = min(abs(distance), highest - lowest)
    # A size beyond the dtype wraps, and a sum with it wraps back. In int8, a size of 200 becomes
    # the step 200 - 256 = -56. The place -100 plus this step is -156, which wraps to -156 + 256 =
    # 100. This is the true sum, -100 + 200.
    step = np.array(size).astype(places.dtype)
    # The places are limited first, so that the true sum is in the range of the dtype. In int8, a
    # place above 127 - 10 = 117 becomes 117 before 10 is added.
    if distance < 0:
        lowest_place = lowest + size
        return jnp.maximum(places, lowest_place) - step
    highest_place = highest - size
    return jnp.minimum(places, highest_place) + step
