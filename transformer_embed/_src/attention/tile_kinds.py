"""Says which tiles of an attention mask have no pair, some pairs or all pairs, in O(length).

A tile is a rectangle of queries and keys. The pairs of a tile are never compared one by one.
Instead, each field of the tile's queries and of the tile's keys is summarised by an `Interval`,
such as "positions 4 to 7", and `may_attend` compares intervals. A field is an array with one number
for each token, such as the positions or the segment ids (see `attention_rule`).

In shapes, b counts batch rows, m counts tiles along the queries and n tiles along the keys.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int8

from transformer_embed._src.attention.attention_rule import (
    Fields,
    may_attend,
    rule_fields_of_whole_rows,
    with_conditions,
)
from transformer_embed._src.compiled import compiled
from transformer_embed._src.sequences.runs import with_row_indices

# How many steps the loop over the tiles takes at once, at most. A step computes all tiles of the
# same queries, in each batch row.
STEPS_AT_ONCE = 64


class Interval(NamedTuple):  # noqa: PLW1641 (no set or dict holds an interval)
    """Holds the lowest and the highest value of a field in a run of tokens.

    A comparison of two intervals gives an interval of bools: `low` says whether the comparison is
    true of every pair of tokens, and `high` says whether it may be true of some pair. For example,
    of 2 to 4 <= 3 to 9, `low` is False (4 <= 3), and `high` is True (2 <= 9).

    If no token of the run is counted, `low` is above `high`.
    """

    low: Array
    high: Array

    # A tuple's own comparison would return one bool.
    def __le__(self, other: "Interval") -> "Interval":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compares each value of this run with each value of the other."""
        return Interval(low=self.high <= other.low, high=self.low <= other.high)

    def __eq__(self, other: "Interval") -> "Interval":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compares each value of this run with each value of the other."""
        return (self <= other) & (other <= self)

    def __and__(self, other: "Interval") -> "Interval":
        """Joins two comparisons, of which both must be true."""
        return Interval(low=self.low & other.low, high=self.high & other.high)

    def __or__(self, other: "Interval") -> "Interval":
        """Joins two comparisons, of which one must be true."""
        return Interval(low=self.low | other.low, high=self.high | other.high)


# The interval of each field, by the field's name. Bounds are [batch, runs of tokens].
Intervals = dict[str, Interval]


# The function is compiled even if the caller is not.
@compiled(1)
def compute_tile_kinds(mask: Any, shape: tuple[int, int]) -> Int8[Array, "b m n"]:
    """Computes the kind of each tile: 0, 1 or 2 if no, some or all pairs of the tile may attend.

    Args:
        mask: An `AttentionMask`.
        shape: The numbers of queries and of keys of a tile.
    """
    # The numbers that the mask compares (positions, segment ids and so on), token by token.
    query_fields, key_fields = rule_fields_of_whole_rows(mask)
    if mask.keys is None:
        # In batch rows where the mask stays the same, row indices replace positions and segment
        # ids. Row indices rise along the row, so the lowest and the highest index of a tile say
        # more than its lowest and highest position, and fewer tiles get a 1.
        query_fields = with_row_indices(query_fields, mask.chunk)
        key_fields = query_fields
    tile_queries, tile_keys = shape
    # The intervals are computed for short runs of tokens, and then merged. A tile of 6 queries and
    # 4 keys, for example, has 3 runs of 2 queries and 2 runs of 2 keys. In self-attention, the runs
    # of the queries are also the runs of the keys, so XLA computes the intervals of runs once.
    run_length = math.gcd(tile_queries, tile_keys)
    query_runs = _run_intervals(query_fields, mask, run_length)
    query_intervals = _merged(query_runs, tile_queries // run_length)
    key_runs = _run_intervals(key_fields, mask, run_length)
    key_intervals = _merged(key_runs, tile_keys // run_length)
    return _kinds_from_intervals(query_intervals, key_intervals)


def _kinds_from_intervals(
    query_intervals: Intervals, key_intervals: Intervals
) -> Int8[Array, "b m n"]:
    """Compares each tile's interval of queries with each tile's interval of keys.

    The comparison is a loop, of which a step takes the queries of one tile and all keys. Without a
    loop, XLA would fuse the intervals into the comparison, and would compute the intervals again
    for each tile. XLA does not fuse into a loop.

    Args:
        query_intervals: The fields of the queries. The bounds are [b, m].
        key_intervals: The fields of the keys. The bounds are [b, n].
    """

    def kinds_of_step(step_queries: Intervals) -> Int8[Array, "b n"]:
        """Compares the queries of one tile, with bounds [b, 1], with all keys."""
        # An interval of bools: whether all pairs of a tile may attend, and whether some may.
        attend = may_attend(step_queries, key_intervals)
        all_attend = attend.low.astype(jnp.int8)
        some_attend = attend.high.astype(jnp.int8)
        # 0 if no pair may attend, 1 if only some pairs may, 2 if all pairs may.
        return all_attend + some_attend

    # The loop is over the first axis, so [b, m] becomes [m, b, 1].
    steps = jax.tree.map(lambda bound: bound.T[:, :, None], query_intervals)
    # All bounds have the same first axis, so any of them says the number of steps.
    step_count = len(steps["places"].low)
    # lax.map runs `batch_size` steps at once. The batch size divides the number of steps, because
    # lax.map would trace the function a second time for the steps that remain.
    batch_size = math.gcd(step_count, STEPS_AT_ONCE)
    # lax.map cannot batch steps if an array is empty, so it then takes the steps one by one.
    bounds = jax.tree.leaves((steps, key_intervals))
    if any(bound.size == 0 for bound in bounds):
        batch_size = None
    kinds = jax.lax.map(kinds_of_step, steps, batch_size=batch_size)
    # [m, b, n] becomes [b, m, n].
    return kinds.swapaxes(0, 1)


def _run_intervals(fields: Fields, mask: Any, run_length: int) -> Intervals:
    """Computes the interval of each field in each run of `run_length` tokens.

    Padding is left out. Tokens that are in no block are left out of the intervals of block ids.
    """
    # This adds the bools `is_token` and, if there are block ids, `is_in_block`, and the places from
    # which each key is seen.
    fields = with_conditions(fields, mask)
    # At first, each token is a run.
    token_intervals = {}
    for name, field in fields.items():
        low = field
        high = field
        if field.dtype != bool:
            is_counted = fields["is_token"]
            if name == "block_ids":
                is_counted &= fields["is_in_block"]
            # A token that does not count must not widen an interval. So its low end is the highest
            # number of the dtype, and its high end is the lowest number.
            limits = jnp.iinfo(field.dtype)
            low = jnp.where(is_counted, field, limits.max)
            high = jnp.where(is_counted, field, limits.min)
        token_intervals[name] = Interval(low=low, high=high)
    return _merged(token_intervals, run_length)


def _merged(intervals: Intervals, size: int) -> Intervals:
    """Merges the intervals of every `size` neighbouring runs of tokens into one interval."""

    def grouped(bound: Array) -> Array:
        """Puts the runs that are merged on an axis of their own: [b, merged runs, size]."""
        batch, runs = bound.shape
        return bound.reshape(batch, runs // size, size)

    return {
        name: Interval(low=grouped(interval.low).min(2), high=grouped(interval.high).max(2))
        for name, interval in intervals.items()
    }
