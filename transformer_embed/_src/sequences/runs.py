"""Runs of tokens in a batch row, and the neighbours of a token.

A run is a number of tokens next to each other that have the same segment id. In shapes, b counts
batch rows and t counts the tokens of a row.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer, Shaped

from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import with_whole_rows


def second_runs(segment_ids: np.ndarray) -> np.ndarray:
    """Finds, on the host, where a run begins whose segment id an earlier run of the row has.

    Returns:
        bool [b, t], True = such a run begins.
    """
    begins_again = np.zeros(segment_ids.shape, bool)
    for row, row_begins_again in zip(segment_ids, begins_again, strict=True):
        begins = (row != 0) & (np.diff(row, prepend=0) != 0)
        starts = np.flatnonzero(begins)
        _, first_runs = np.unique(row[starts], return_index=True)
        row_begins_again[np.delete(starts, first_runs)] = True
    return begins_again


def in_row(tokens: dict[str, Array], chunk: int | None = None) -> dict[str, Array]:
    """Replaces places, segments and chunks by row indices, where both mean the same.

    That is so in the batch rows in which each segment is one run, and positions rise by one, from
    the same first position in each run. There, tokens of a segment are as far apart in position as
    in the row. The name of a segment or of a chunk becomes the index of its first token. So all of
    these numbers rise along the row, and the closest pair of two blocks decides whether some pair
    may attend. The other batch rows stay as they are.

    Args:
        tokens: The fields of the tokens by name, as in `attention_rule.fields`.
        chunk: The length of a chunk. If None, there are no chunks.
    """
    if "segment_ids" not in tokens or "ends" in tokens:
        return tokens
    positions = tokens["positions"]
    segments = tokens["segment_ids"]
    begins = _begins(segments)
    before = of_previous_token(positions)
    highest = jnp.iinfo(positions.dtype).max
    first = positions.min(1, keepdims=True, where=begins, initial=highest)
    # The second comparison finds positions that wrap.
    rises = (positions - 1 == before) & (positions > before)
    goes_on = jnp.where(begins, positions == first, rises)
    is_in_row = (goes_on | (segments == 0)).all(1) & _is_once(segments, begins)

    index = jnp.arange(positions.shape[1], dtype=positions.dtype)[None]
    # For each token, the number of tokens of its run before it. 0 is the name of padding, so the
    # names of segments begin at 1.
    index_in_run = positions - first
    segment_names = jnp.where(segments != 0, index - index_in_run + 1, 0)
    row_fields = {"places": index, "segment_ids": segment_names}
    if chunk is not None:
        # A chunk may begin before the run of its tokens.
        index_in_chunk = positions - chunk * tokens["chunk"]
        row_fields["chunk"] = index - jnp.minimum(index_in_run, index_in_chunk)
    chosen = {
        name: jnp.where(is_in_row[:, None], array.astype(tokens[name].dtype), tokens[name])
        for name, array in row_fields.items()
    }
    return tokens | chosen


def _begins(segments: Integer[Array, "b t"]) -> Bool[Array, "b t"]:
    """Returns which tokens begin a run."""
    return (segments != 0) & (segments != of_previous_token(segments))


def _rises(segments: Integer[Array, "b t"], begins: Bool[Array, "b t"]) -> Bool[Array, "b"]:
    """Returns in which batch rows segment ids rise along one run of tokens, as they mostly do."""
    before = of_previous_token(segments)
    return (begins & ((before == 0) | (segments < before))).sum(1) <= 1


def _is_once(segments: Integer[Array, "b t"], begins: Bool[Array, "b t"]) -> Bool[Array, "b"]:
    """Returns in which batch rows each segment is one run."""
    rises = _rises(segments, begins)

    def by_sorting() -> Array:
        return begins.sum(1) == _begins(jnp.sort(segments, axis=1)).sum(1)

    # Segment ids that rise need no sorting.
    return jax.lax.cond(rises.all(), lambda: rises, by_sorting)


# The functions below are compiled even if the caller is not.


differs = compiled(1)(operator.ne)


@compiled(1)
def has_next_token(segment_ids: Integer[Array, "... t"], steps: int = 1) -> Bool[Array, "... t"]:
    """Returns whether the token so many steps later belongs to the same sequence; 0 is padding."""
    return (segment_ids != 0) & (of_next_token(segment_ids, steps) == segment_ids)


# The two functions below do not pad one side and cut the other. XLA gave wrong values for that,
# before jax 0.10, if the array was split over devices.


def of_next_token(values: Shaped[Array, "... t"], steps: int = 1) -> Shaped[Array, "... t"]:
    """Moves values to the left: each token gets the value so many steps later, or 0 at the end."""
    values = with_whole_rows(values)
    return jnp.concatenate([values[..., steps:], jnp.zeros_like(values[..., :steps])], axis=-1)


def of_previous_token(values: Shaped[Array, "... t"], steps: int = 1) -> Shaped[Array, "... t"]:
    """Moves values to the right: each token gets the value so many steps before, or 0 at first."""
    values = with_whole_rows(values)
    return jnp.concatenate([jnp.zeros_like(values[..., :steps]), values[..., :-steps]], axis=-1)


def count_since(count: Int32[Array, "n t"], begins: Bool[Array, "b t"]) -> Int32[Array, "b t"]:
    """Restarts a count that rises along a row at each token that begins something."""
    return count - jax.lax.cummax(jnp.where(begins, count, 0), axis=1)


def index_in_run(ids: Integer[Array, "b t"]) -> Int32[Array, "b t"]:
    """Returns, for each token, the number of tokens of its run before it."""
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return count_since(index, ids != of_previous_token(ids))


def index_in_segment(segments: Integer[Array, "b t"]) -> Int32[Array, "b t"]:
    """Returns, for each token, the number of tokens of its segment before it in the batch row."""

    def index_in_row(segments: Integer[Array, "t"]) -> Int32[Array, "t"]:
        # If tokens are sorted by segment, each segment is one run, and keeps its order.
        order = jnp.argsort(segments, stable=True)
        sorted_index = index_in_run(segments[order][None])[0]
        return jnp.zeros_like(sorted_index).at[order].set(sorted_index)

    # Segment ids that rise need no sorting, because each segment is one run.
    rises = _rises(segments, _begins(segments)).all()
    return jax.lax.cond(
        rises, lambda: index_in_run(segments), lambda: jax.vmap(index_in_row)(segments)
    )


@compiled(1, 2)
def positions_of_tokens(
    is_token: Bool[Array, "... t"], start: int, at_padding: int
) -> Int32[Array, "... t"]:
    """Counts the tokens before each token, from `start` on. Padding gets `at_padding`."""
    is_token_in_row = with_whole_rows(is_token).astype(jnp.int32)
    number = jnp.cumsum(is_token_in_row, axis=-1, dtype=jnp.int32)
    # The sum counts the token itself.
    return jnp.where(is_token, number + (start - 1), at_padding)
