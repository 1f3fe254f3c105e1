"""Which tiles of an attention mask have no pair, some pairs or all pairs, in O(length)."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int8, Integer

from transformer_embed._src.functional.attention_rule import (
    Range,
    Ranges,
    Tokens,
    Window,
    fields,
    may_attend,
)
from transformer_embed._src.functional.compiled import compiled


class _Runs(NamedTuple):
    """What blocks of tokens say about runs, neighbours of one segment. All are [rows, blocks].

    Args:
        indices: the row indices of the first and the last token, not counting padding.
        chunks: the row indices where the chunks of these two start, or would start in their
            runs; None if there are no chunks.
        start: the row index where the last run that starts in the block starts, -1 if none does.
        begins: whether the first token starts a run.
        stretches: how many tokens follow padding or begin the row.
        is_broken: whether positions do not rise by one in some run.
        falls: whether a segment is followed by one of a lower number.
    """

    indices: Range
    chunks: Range | None
    start: Array
    begins: Array
    stretches: Array
    is_broken: Array
    falls: Array


# Compiled even if the caller is not.
@compiled(2, 3, 4, 5)
def tile_kinds(
    queries: Tokens,
    keys: Tokens | None,
    shape: tuple[int, int],
    causal: bool,
    window: Window | None,
    chunk: int | None,
) -> Int8[Array, "b m n"]:
    """The kinds of tiles of `AttentionMask.tile_kinds`; keys are None in self-attention."""
    tokens, others = fields(queries, queries if keys is None else keys, None)
    lengths = tokens["positions"].shape[1], others["positions"].shape[1]
    if 0 in lengths:
        arrays = (*tokens.values(), *others.values())
        (rows,) = jnp.broadcast_shapes(*(array.shape[:1] for array in arrays))
        return jnp.zeros((rows, lengths[0] // shape[0], lengths[1] // shape[1]), jnp.int8)
    if keys is not None:
        query_blocks, _ = _blocks(tokens, shape[0], chunk, has_runs=False)
        key_blocks, _ = _blocks(others, shape[1], chunk, has_runs=False)
        return _of_tiles([query_blocks], [key_blocks], None, causal, window)
    # Self-attention goes over the tokens once, in blocks of which queries' and keys' consist.
    size = math.gcd(*shape)
    blocks, runs = _blocks(tokens, size, chunk, has_runs="segment_ids" in tokens)
    views, are_apart = [blocks], None
    if runs is not None:
        views.append(_in_row(blocks, runs))
        are_apart = _are_apart(runs, tokens["segment_ids"])[:, None, None]
    of_queries, of_keys = ([_merged(view, length // size) for view in views] for length in shape)
    return _of_tiles(of_queries, of_keys, are_apart, causal, window)


def _of_tiles(
    queries: list[Ranges],
    keys: list[Ranges],
    are_apart: Bool[Array, "b 1 1"] | None,
    causal: bool,
    window: Window | None,
) -> Int8[Array, "b m n"]:
    """The kinds of tiles; the ranges that come second hold in the rows that are apart.

    It takes some queries at a time. If XLA could fuse the comparisons with what leads to the
    ranges, it would compute that again for each tile; it does not fuse into a loop.
    """
    number, others = (side[0]["positions"].low.shape[1] for side in (queries, keys))
    at_a_time = math.gcd(number, 64)
    keys = jax.tree.map(lambda array: array[:, None, :], keys)

    def kinds(part: list[Ranges]) -> Int8[Array, "b m n"]:
        part = jax.tree.map(lambda array: array[:, :, None], part)
        every = may_attend(part[0], keys[0], causal, window)
        some = may_attend(part[0], keys[0], causal, window, every=False)
        if are_apart is not None:
            some &= ~are_apart | may_attend(part[1], keys[1], causal, window, every=False)
        return jnp.broadcast_to(some.astype(jnp.int8) + every, (some.shape[0], at_a_time, others))

    def split(array: Array) -> Array:
        steps = array.reshape(array.shape[0], number // at_a_time, at_a_time)
        return jnp.moveaxis(steps, 1, 0)

    return _joined(jax.lax.map(kinds, jax.tree.map(split, queries)))


def _joined(steps: Array) -> Array:
    """[steps, rows, blocks, ...] as [rows, all blocks, ...]."""
    array = jnp.moveaxis(steps, 0, 1)
    return array.reshape(array.shape[0], array.shape[1] * array.shape[2], *array.shape[3:])


def _blocks(
    tokens: Tokens, size: int, chunk: int | None, has_runs: bool
) -> tuple[Ranges, _Runs | None]:
    """The ranges of the tokens of each block, without padding, and its runs.

    It takes some blocks at a time, so that what XLA keeps for each token stays small.
    """
    number = tokens["positions"].shape[1] // size
    at_a_time = math.gcd(number, 64)
    length = at_a_time * size

    def split(array: Array) -> Array:
        return array.reshape(array.shape[0], at_a_time, size)

    def summary(start: Array) -> tuple[Ranges, _Runs | None]:
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, axis=1)
        part = {name: cut(array, start, length) for name, array in tokens.items()}
        is_token = part.get("is_token", jnp.ones((1, length), bool))
        ranges = {}
        for name, array in part.items():
            members = is_token & part["in_block"] if name == "block_ids" else is_token
            ranges[name] = _range(split(array), split(members))
        if chunk is not None:
            ranges["chunk"] = Range(*(bound // chunk for bound in ranges["positions"]))
        if not has_runs:
            return ranges, None
        index = start + jnp.arange(length, dtype=jnp.int32)[None]
        # The token before each one; the first one of the row has none.
        before = {name: cut(array, jnp.maximum(start - 1, 0), 1) for name, array in tokens.items()}
        for name, array in part.items():
            before[name] = jnp.concatenate([before[name], array[:, :-1]], axis=1)
        return ranges, _runs_of(part, before, index, split, chunk)

    starts = length * jnp.arange(number // at_a_time, dtype=jnp.int32)
    return jax.tree.map(_joined, jax.lax.map(summary, starts))


def _range(array: Array, members: Bool[Array, "b n size"]) -> Range:
    """The lowest and highest value of the members along the last axis; of bools, of all."""
    if array.dtype == bool:
        return Range(array.all(2), array.any(2))
    info = jnp.iinfo(array.dtype)
    low = jnp.where(members, array, info.max).min(2)
    return Range(low, jnp.where(members, array, info.min).max(2))


def _runs_of(
    tokens: Tokens,
    before: Tokens,
    index: Integer[Array, "1 t"],
    split: Callable[[Array], Array],
    chunk: int | None,
) -> _Runs:
    """The runs of tokens, each with the one before it, in blocks."""
    positions, segments, is_token = (
        tokens[name] for name in ("positions", "segment_ids", "is_token")
    )
    follows = is_token & before["is_token"] & (index > 0)
    is_same = follows & (segments == before["segment_ids"])
    # The second comparison finds positions that wrap.
    rises = (positions - 1 == before["positions"]) & (positions > before["positions"])
    indices = _range(split(index), split(is_token))
    is_first = split(index) == indices.low[..., None]
    chunks = None
    if chunk is not None:
        # Here, because XLA would divide again for each tile.
        is_last = split(index) == indices.high[..., None]
        first, last = (_range(split(positions), is_end).low for is_end in (is_first, is_last))
        chunks = Range(indices.low - first % chunk, indices.high - last % chunk)
    starts = is_token & ~is_same
    return _Runs(
        indices=indices,
        chunks=chunks,
        start=split(jnp.where(starts, index, -1)).max(2),
        begins=(split(starts) & is_first).any(2),
        stretches=split(is_token & ~follows).sum(2, dtype=jnp.int32),
        is_broken=split(is_same & ~rises).any(2),
        falls=split(follows & (segments < before["segment_ids"])).any(2),
    )


def _are_apart(runs: _Runs, segments: Integer[Array, "b t"]) -> Bool[Array, "b"]:
    """In which rows each segment is one run whose positions rise by one.

    There, two tokens of a segment are as far apart in position as in the row.
    """

    def is_once() -> Array:
        ordered = jnp.sort(segments, axis=1)
        runs, numbers = (
            ((array[:, 1:] != array[:, :-1]) & (array[:, 1:] != 0)).sum(1) + (array[:, 0] != 0)
            for array in (segments, ordered)
        )
        return runs == numbers

    # Numbers that rise along one stretch of tokens, as most do, need no sorting.
    rises = ~runs.falls.any(1) & (runs.stretches.sum(1) <= 1)
    return jax.lax.cond(rises.all(), lambda: rises, is_once) & ~runs.is_broken.any(1)


def _in_row(ranges: Ranges, runs: _Runs) -> Ranges:
    """Ranges with row indices for positions, and where they start for segments and chunks.

    All of these rise along the row, so the closest pair of two blocks decides whether some pair may
    attend.
    """
    is_empty = runs.indices.low > runs.indices.high
    last = jax.lax.cummax(runs.start, axis=1)
    # The block's first token begins a run, or is of the run that began last before the block.
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)))
    starts = Range(jnp.where(runs.begins, runs.indices.low, before), last)
    in_row = ranges | {"positions": runs.indices, "segment_ids": _without(starts, is_empty)}
    if runs.chunks is not None:
        chunks = Range(*map(jnp.maximum, starts, runs.chunks))
        in_row["chunk"] = _without(chunks, is_empty)
    return in_row


def _without(bounds: Range, is_empty: Bool[Array, "b n"]) -> Range:
    """The range, or where a block is empty one that meets no other."""
    info = jnp.iinfo(bounds.low.dtype)
    return Range(
        jnp.where(is_empty, info.max, bounds.low), jnp.where(is_empty, info.min, bounds.high)
    )


def _merged(ranges: Ranges, number: int) -> Ranges:
    """The ranges of this many neighbouring blocks together."""
    merged = {}
    for name, bounds in ranges.items():
        low, high = (
            bound.reshape(bound.shape[0], bound.shape[1] // number, number) for bound in bounds
        )
        merged[name] = Range(low.min(2), high.max(2))
    return merged
