"""Runs: stretches of tokens of one sequence in a row, and the neighbours of a token."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer, Shaped

from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import with_whole_rows


def second_runs(segment_ids: np.ndarray) -> np.ndarray:
    """Where, in rows on the host, a run of tokens begins whose number an earlier run has."""
    begins_again = np.zeros(segment_ids.shape, bool)
    for row, again in zip(segment_ids, begins_again, strict=True):
        starts = np.flatnonzero((row != 0) & (np.diff(row, prepend=0) != 0))
        first = np.unique(row[starts], return_index=True)[1]
        again[np.delete(starts, first)] = True
    return begins_again


def in_row(tokens: dict[str, Array], chunk: int | None = None) -> dict[str, Array]:
    """The tokens with row indices for places, segments and chunks, where these mean the same.

    A run is a stretch of tokens of one segment. In rows where each segment is one run, and
    positions rise by one from the same first position in each, tokens of a segment are as far apart
    in position as in the row. A segment or a chunk is named by the index of its first token. Then
    all of these numbers rise along the row, so the closest pair of two blocks decides whether some
    pair may attend. The other rows stay as they are.
    """
    if "segment_ids" not in tokens or "ends" in tokens:
        return tokens
    positions, segments = tokens["positions"], tokens["segment_ids"]
    begins, before = _begins(segments), of_previous_token(positions)
    highest = jnp.iinfo(positions.dtype).max
    first = positions.min(1, keepdims=True, where=begins, initial=highest)
    # The second comparison finds positions that wrap.
    rises = (positions - 1 == before) & (positions > before)
    goes_on = jnp.where(begins, positions == first, rises)
    is_in_row = (goes_on | (segments == 0)).all(1) & _is_once(segments, begins)

    index = jnp.arange(positions.shape[1], dtype=positions.dtype)[None]
    # How many tokens of the run, and of the chunk, are before each.
    in_run = positions - first
    # 0 is padding.
    in_row = {"places": index, "segment_ids": jnp.where(segments != 0, index - in_run + 1, 0)}
    if chunk is not None:
        in_chunk = positions - chunk * tokens["chunk"]
        in_row["chunk"] = index - jnp.minimum(in_run, in_chunk)
    chosen = {
        name: jnp.where(is_in_row[:, None], array.astype(tokens[name].dtype), tokens[name])
        for name, array in in_row.items()
    }
    return tokens | chosen


def _begins(segments: Integer[Array, "b t"]) -> Bool[Array, "b t"]:
    """Which tokens begin a run of one segment."""
    return (segments != 0) & (segments != of_previous_token(segments))


def _rises(segments: Integer[Array, "b t"], begins: Bool[Array, "b t"]) -> Bool[Array, "b"]:
    """In which rows the numbers of segments rise along one run of tokens, as most do."""
    before = of_previous_token(segments)
    return (begins & ((before == 0) | (segments < before))).sum(1) <= 1


def _is_once(segments: Integer[Array, "b t"], begins: Bool[Array, "b t"]) -> Bool[Array, "b"]:
    """In which rows each segment is one run."""
    # Numbers that rise need no sorting.
    rises = _rises(segments, begins)

    def is_once() -> Array:
        return begins.sum(1) == _begins(jnp.sort(segments, axis=1)).sum(1)

    return jax.lax.cond(rises.all(), lambda: rises, is_once)


# The functions below are compiled even if the caller is not.


differs = compiled(1)(operator.ne)


@compiled(1)
def has_next_token(segment_ids: Integer[Array, "... t"], steps: int = 1) -> Bool[Array, "... t"]:
    """Whether another token of its sequence is this many steps after a token; 0 is padding."""
    return (segment_ids != 0) & (of_next_token(segment_ids, steps) == segment_ids)


# The two functions below do not pad one side and cut the other: XLA gave wrong values, before jax
# 0.10, where it split such an array over devices.


def of_next_token(values: Shaped[Array, "... t"], steps: int = 1) -> Shaped[Array, "... t"]:
    """At each token, the value of the one so many steps to its right; 0 at the end."""
    values = with_whole_rows(values)
    return jnp.concatenate([values[..., steps:], jnp.zeros_like(values[..., :steps])], axis=-1)


def of_previous_token(values: Shaped[Array, "... t"], steps: int = 1) -> Shaped[Array, "... t"]:
    """At each token, the value of the one so many steps to its left; 0 at the start."""
    values = with_whole_rows(values)
    return jnp.concatenate([jnp.zeros_like(values[..., :steps]), values[..., :-steps]], axis=-1)


def restarted(count: Int32[Array, "n t"], begins: Bool[Array, "b t"]) -> Int32[Array, "b t"]:
    """Numbers that rise along a row, counted from the last token that begins a sequence."""
    return count - jax.lax.cummax(jnp.where(begins, count, 0), axis=1)


def index_in_run(ids: Integer[Array, "b t"]) -> Int32[Array, "b t"]:
    """For each token, how many tokens of its run of one id are before it."""
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return restarted(index, ids != of_previous_token(ids))


def index_in_segment(segments: Integer[Array, "b t"]) -> Int32[Array, "b t"]:
    """For each token, how many tokens of its segment are before it in the row."""

    def of_row(segments: Integer[Array, "t"]) -> Int32[Array, "t"]:
        # Sorted, the tokens of a segment are one run, and keep their order.
        order = jnp.argsort(segments, stable=True)
        in_run = index_in_run(segments[order][None])[0]
        return jnp.zeros_like(in_run).at[order].set(in_run)

    # Numbers that rise need no sorting: a segment is one run.
    rises = _rises(segments, _begins(segments)).all()
    return jax.lax.cond(rises, lambda: index_in_run(segments), lambda: jax.vmap(of_row)(segments))


@compiled(1, 2)
def positions_of_tokens(
    tokens: Bool[Array, "... t"], start: int, at_padding: int
) -> Int32[Array, "... t"]:
    """For each token, how many tokens are before it, plus start."""
    number = jnp.cumsum(with_whole_rows(tokens).astype(jnp.int32), axis=-1, dtype=jnp.int32)
    # The sum counts the token itself.
    return jnp.where(tokens, number + (start - 1), at_padding)
