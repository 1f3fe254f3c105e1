"""Which blocks of an attention mask have no pair, some pairs or all pairs, in O(length)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int8

from transformer_embed._src.attention.attention_rule import (
    Fields,
    may_attend,
    whole_fields,
    with_conditions,
)
from transformer_embed._src.compiled import compiled
from transformer_embed._src.sequences.runs import in_row


class Interval(NamedTuple):  # noqa: PLW1641 (no set or dict holds one)
    """The lowest and the highest value of a field in some tokens.

    A comparison of two stretches of tokens is one, too: whether it is true of every pair (low), and
    of some pair as far as the intervals tell (high). Without tokens, low is above high.
    """

    low: Array
    high: Array

    # Comparisons of tuples would be bools.
    def __le__(self, other: "Interval") -> "Interval":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Interval(self.high <= other.low, self.low <= other.high)

    def __eq__(self, other: "Interval") -> "Interval":  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self <= other) & (other <= self)

    def __and__(self, other: "Interval") -> "Interval":
        return Interval(self.low & other.low, self.high & other.high)

    def __or__(self, other: "Interval") -> "Interval":
        return Interval(self.low | other.low, self.high | other.high)


Intervals = dict[str, Interval]


# Compiled even if the caller is not.
@compiled(1)
def block_mask(mask: Any, shape: tuple[int, int]) -> Int8[Array, "b m n"]:
    """See `AttentionMask.block_mask`."""
    tokens, others = whole_fields(mask)
    if mask.keys is None:
        tokens = others = in_row(tokens, mask.chunk)
    # Of which blocks of queries and of keys consist: in self-attention, XLA makes them once.
    size = math.gcd(*shape)
    of_queries = _merged(_intervals(tokens, mask, size), shape[0] // size)
    of_keys = _merged(_intervals(others, mask, size), shape[1] // size)

    def kinds(of_step):
        # low is True where all pairs may attend, high where some may: 2, 1 or 0.
        may = may_attend(of_step, of_keys)
        return may.low.astype(jnp.int8) + may.high.astype(jnp.int8)

    # Some queries at a time, because XLA does not fuse into a loop. Else it would compute the
    # intervals again for each block.
    steps = jax.tree.map(lambda bound: bound.T[:, :, None], of_queries)
    # A divisor, because lax.map traces its function again for a remainder.
    at_a_time = math.gcd(len(steps["places"].low), 64)
    # Nor can it join steps of a batch without rows.
    is_empty = not all(bound.size for bound in jax.tree.leaves((steps, of_keys)))
    return jax.lax.map(kinds, steps, batch_size=None if is_empty else at_a_time).swapaxes(0, 1)


def _intervals(tokens: Fields, mask: Any, size: int) -> Intervals:
    """Those of each so many tokens; padding is left out."""
    intervals, tokens = {}, with_conditions(tokens, mask)
    for name, array in tokens.items():
        low = high = array
        if array.dtype != bool:
            info = jnp.iinfo(array.dtype)
            counts = tokens["is_token"]
            if name == "block_ids":
                counts &= tokens["is_in_block"]
            # What is left out widens no interval: its low end is the highest number.
            low, high = jnp.where(counts, array, info.max), jnp.where(counts, array, info.min)
        intervals[name] = Interval(low, high)
    return _merged(intervals, size)


def _merged(intervals: Intervals, number: int) -> Intervals:
    """The intervals of this many neighbours together."""

    def grouped(bound):
        return bound.reshape(bound.shape[0], bound.shape[1] // number, number)

    return {
        name: Interval(grouped(interval.low).min(2), grouped(interval.high).max(2))
        for name, interval in intervals.items()
    }
