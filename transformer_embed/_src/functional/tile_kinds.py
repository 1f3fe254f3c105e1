"""Which tiles of an attention mask have no pair, some pairs or all pairs, in O(length)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int8, Integer

from transformer_embed._src.functional.attention_rule import Fields, Window, fields, may_attend
from transformer_embed._src.functional.compiled import compiled
from transformer_embed._src.functional.token_positions import TokenPositions


class Interval(NamedTuple):  # noqa: PLW1641 (no set or dict holds one)
    """The lowest and the highest value of a field in some tokens.

    A comparison of two blocks of tokens is one, too: whether it is true of every pair (low), and
    of some pair as far as the intervals tell (high). In a block without tokens, low is above high.
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
@compiled(2, 3, 4)
def tile_kinds(
    queries: TokenPositions,
    keys: TokenPositions | None,
    shape: tuple[int, int],
    window: Window,
    chunk: int | None,
) -> Int8[Array, "b m n"]:
    """The kinds of tiles of `AttentionMask.tile_kinds`; keys are None in self-attention."""
    tokens, others = fields(queries, keys, None)
    if keys is None:
        # Over the tokens once, in blocks of which those of queries and of keys consist.
        size = math.gcd(*shape)
        blocks = _blocks(tokens, size, chunk)
        if "segment_ids" in tokens:
            blocks = _in_row(tokens, blocks, size, chunk)
        of_queries, of_keys = (_merged(blocks, length // size) for length in shape)
    else:
        of_queries, of_keys = _blocks(tokens, shape[0], chunk), _blocks(others, shape[1], chunk)

    number = of_queries["positions"].low.shape[1]
    at_a_time = math.gcd(number, 64)

    def split(bound: Array) -> Array:
        return bound.T.reshape(number // at_a_time, at_a_time, bound.shape[0])

    def kinds(of_step: Intervals) -> Int8[Array, "m b n"]:
        of_step = jax.tree.map(lambda bound: bound[:, :, None], of_step)
        may = may_attend(of_step, of_keys, window)
        return may.low.astype(jnp.int8) + may.high

    # Some queries at a time, because XLA does not fuse into a loop. Else it would compute the
    # intervals again for each tile.
    steps = jax.lax.map(kinds, jax.tree.map(split, of_queries))
    return steps.reshape(number, *steps.shape[2:]).swapaxes(0, 1)


def _blocks(tokens: Fields, size: int, chunk: int | None) -> Intervals:
    """The intervals of blocks of this many tokens; padding is left out."""
    intervals = {}
    for name, array in tokens.items():
        low = high = array
        if array.dtype != bool:
            info = jnp.iinfo(array.dtype)
            counts = tokens["is_token"]
            if name == "block_ids":
                counts &= tokens["is_in_block"]
            low, high = jnp.where(counts, array, info.max), jnp.where(counts, array, info.min)
        intervals[name] = Interval(low, high)
    blocks = _merged(intervals, size)
    if chunk is not None:
        # Of blocks, because a division for each token takes longer.
        blocks["chunk"] = jax.tree.map(lambda bound: bound // chunk, blocks["positions"])
    return blocks


def _merged(intervals: Intervals, number: int) -> Intervals:
    """The intervals of this many neighbours together."""
    return {
        name: Interval(_split(interval.low, number).min(2), _split(interval.high, number).max(2))
        for name, interval in intervals.items()
    }


def _split(array: Array, size: int) -> Array:
    return array.reshape(array.shape[0], array.shape[1] // size, size)


def _in_row(tokens: Fields, blocks: Intervals, size: int, chunk: int | None) -> Intervals:
    """The intervals with row indices for positions, and run numbers for segments and chunks.

    A run is a stretch of tokens of one segment. In rows where each segment is one run whose
    positions rise by one, tokens of a segment are as far apart in position as in the row. Then all
    of these numbers rise along the row, so the closest pair of two blocks decides whether some pair
    may attend. The other rows stay as they are.
    """
    positions, segments, is_token = (
        tokens[name] for name in ("positions", "segment_ids", "is_token")
    )
    begins, before = _begins(segments), _before(positions)
    # The second comparison finds positions that wrap.
    rises = (positions - 1 == before) & (positions > before)
    is_in_row = (begins | rises | ~is_token).all(1) & _is_once(segments, begins)

    def numbers(begins: Bool[Array, "b t"]) -> Interval:
        counts = _split(begins, size).sum(2, dtype=jnp.int32)
        last = jnp.cumsum(counts, axis=1)
        # A block begins a run, unless its first token goes on with the one before the block.
        goes_on = _split(is_token & ~begins, size)[:, :, 0]
        return Interval(last - counts + jnp.where(goes_on, 0, 1), last)

    index = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
    in_row = _blocks({"positions": index, "is_token": is_token}, size, None)
    in_row["segment_ids"] = numbers(begins)
    if chunk is not None:
        in_row["chunk"] = numbers(begins | is_token & (positions % chunk == 0))

    def choose(ours: Array, general: Array) -> Array:
        return jnp.where(is_in_row[:, None], ours.astype(general.dtype), general)

    chosen = {name: jax.tree.map(choose, in_row[name], blocks[name]) for name in in_row}
    return blocks | chosen


def _begins(segments: Integer[Array, "b t"]) -> Bool[Array, "b t"]:
    """Which tokens begin a run of one segment."""
    return (segments != 0) & (segments != _before(segments))


def _before(array: Array) -> Array:
    """At each token, the value of the token before it; 0 at the first one."""
    return jnp.pad(array, ((0, 0), (1, 0)))[:, :-1]


def _is_once(segments: Integer[Array, "b t"], begins: Bool[Array, "b t"]) -> Bool[Array, "b"]:
    """In which rows each segment is one run."""
    # Numbers that rise along one stretch of tokens, as most do, need no sorting.
    before = _before(segments)
    rises = (begins & ((before == 0) | (segments < before))).sum(1) <= 1

    def is_once() -> Array:
        return begins.sum(1) == _begins(jnp.sort(segments, axis=1)).sum(1)

    return jax.lax.cond(rises.all(), lambda: rises, is_once)
