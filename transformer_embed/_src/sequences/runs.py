"""Works with runs of tokens in a batch row, and with the neighbours of a token.

A run is a number of tokens next to each other that have the same segment id, which is not 0: 0 is
padding. In shapes, b counts batch rows and t counts the tokens of a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer, Shaped

from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import with_whole_rows


def segment_reappears(segment_ids: np.ndarray) -> np.ndarray:
    """Finds, on the host, each token that begins the second or a later run of a segment id.

    Returns:
        bool [b, t], True = the token begins such a run. For the row [7, 7, 0, 8, 7], it is True at
        the last token alone.
    """
    reappears = np.zeros(segment_ids.shape, bool)
    for number, row in enumerate(segment_ids):
        begins_run = (row != 0) & (np.diff(row, prepend=0) != 0)
        # The index of the first token of each run: 0, 3 and 4 in the row above.
        run_starts = np.flatnonzero(begins_run)
        # The segment ids of the runs are 7 8 7. With `return_index`, `np.unique` also returns the
        # index at which each id is first: 0 for 7 and 1 for 8.
        _, first_runs = np.unique(row[run_starts], return_index=True)
        later_starts = np.delete(run_starts, first_runs)
        reappears[number, later_starts] = True
    return reappears


def with_row_indices(tokens: dict[str, Array], chunk: int | None = None) -> dict[str, Array]:
    """Replaces places, segment ids and chunks by row indices, where no mask changes by it.

    A place is the number by which a causal mask and a window compare tokens, usually the position.
    A batch row is changed if each segment is one run of tokens, and positions rise by one in each
    run, from the same first position. In such a row, two tokens of a segment are as many positions
    apart as they are row indices apart. All other batch rows stay as they are.

    The place of a token becomes its index in the row. The number of a segment or of a chunk becomes
    the index of its first token (for a segment, plus 1, because 0 is padding). For example, two
    segments of two tokens get

        positions 0 1 0 1  ->  places      0 1 2 3
        segments  7 7 5 5  ->  segment_ids 1 1 3 3

    So all of these numbers rise along the row, and intervals of them say exactly which tiles of a
    mask have a pair.

    Args:
        tokens: The arrays of the tokens by name, [1 or b, t]: `positions` and `places`, and
            `segment_ids`, `ends` and `chunk` if there are any (see `attention_rule.rule_fields`).
        chunk: The length of a chunk. If None, there are no chunks.
    """
    is_tree = "ends" in tokens
    if "segment_ids" not in tokens or is_tree:
        return tokens
    positions = tokens["positions"]
    segments = tokens["segment_ids"]
    begins_run = _begins_run(segments)
    previous_positions = previous_token_values(positions)
    highest = jnp.iinfo(positions.dtype).max
    # The lowest first position of the runs of each batch row, [b, 1].
    lowest_start = positions.min(1, keepdims=True, where=begins_run, initial=highest)
    # The second comparison is for a position at the lowest number of the dtype: `positions - 1`
    # then wraps to the highest number, which the previous position may have.
    rises_by_one = (positions - 1 == previous_positions) & (positions > previous_positions)
    has_expected_position = jnp.where(begins_run, positions == lowest_start, rises_by_one)
    # Padding may have any position.
    has_expected_position |= segments == 0
    positions_count_tokens = has_expected_position.all(1)
    can_replace = positions_count_tokens & _each_segment_is_one_run(segments, begins_run)

    # The numbers below are right only in the batch rows in which `can_replace` is True. In the
    # other rows, the last `jnp.where` keeps the old numbers.
    index = jnp.arange(positions.shape[1], dtype=positions.dtype)[None]
    # For each token, the number of tokens of its run before it.
    index_in_run = positions - lowest_start
    # The index of the first token of the run, plus 1. Padding keeps 0.
    segment_numbers = jnp.where(segments != 0, index - index_in_run + 1, 0)
    row_fields = {"places": index, "segment_ids": segment_numbers}
    if chunk is not None:
        # `tokens["chunk"]` is the number of each token's chunk, so this is the distance from the
        # first position of the chunk.
        index_in_chunk = positions - chunk * tokens["chunk"]
        # If the first position of the chunk is before the run, the chunk's first token in the row
        # is the first token of the run.
        row_fields["chunk"] = index - jnp.minimum(index_in_run, index_in_chunk)
    replaced = dict(tokens)
    for name, row_field in row_fields.items():
        field = tokens[name]
        narrowed = row_field.astype(field.dtype)
        replaced[name] = jnp.where(can_replace[:, None], narrowed, field)
    return replaced


def _begins_run(segments: Integer[Array, "b t"]) -> Bool[Array, "b t"]:
    """Returns which tokens begin a run."""
    return (segments != 0) & (segments != previous_token_values(segments))


def _segment_ids_rise(
    segments: Integer[Array, "b t"], begins_run: Bool[Array, "b t"]
) -> Bool[Array, "b"]:
    """Returns for each batch row whether segment ids rise from run to run, with no padding between.

    A run is a number of neighbouring tokens with the same segment id. Most batches have only such
    rows. Padding may be before the first run and after the last one. For example, ids rise in the
    row 0 1 1 2 0, but not in 1 0 2 and not in 2 1.
    """
    previous = previous_token_values(segments)
    # A run begins out of order if padding or a higher id is before the run. The first run of a row
    # is always counted, because `previous` has a 0 before the row. If another run is counted too,
    # the ids do not rise.
    is_after_padding = previous == 0
    begins_out_of_order = begins_run & (is_after_padding | (segments < previous))
    return begins_out_of_order.sum(1) <= 1


def _each_segment_is_one_run(
    segments: Integer[Array, "b t"], begins_run: Bool[Array, "b t"]
) -> Bool[Array, "b"]:
    """Returns, for each batch row, whether all tokens of each segment are next to each other.

    For example, this is True for the row 2 2 1 and False for the row 2 1 2.
    """
    ids_rise = _segment_ids_rise(segments, begins_run)

    def all_true() -> Array:
        """Returns the answer if ids rise in all batch rows: True for each of them."""
        return ids_rise

    def compare_counts() -> Array:
        """Compares the number of runs with the number of different segments."""
        run_count = begins_run.sum(1)
        # After sorting, each segment is one run.
        sorted_segments = jnp.sort(segments, axis=1)
        segment_count = _begins_run(sorted_segments).sum(1)
        return run_count == segment_count

    # If ids rise from run to run, no id comes a second time, and nothing needs sorting.
    return jax.lax.cond(ids_rise.all(), all_true, compare_counts)


# The functions below are compiled even if the caller is not.


@compiled(1)
def differs_from(integers: Shaped[Array, "..."], number: int) -> Bool[Array, "..."]:
    """Returns which of the integers are not this number, such as ids that are not padding."""
    return integers != number


@compiled(1)
def has_next_token(segment_ids: Integer[Array, "... t"], steps: int = 1) -> Bool[Array, "... t"]:
    """Returns whether the token `steps` later belongs to the same sequence. Padding gets False."""
    return (segment_ids != 0) & (next_token_values(segment_ids, steps) == segment_ids)


# The two functions below cut one end of each row, and then join zeros to the other end. Before jax
# 0.10, XLA gave wrong values for a pad at one end and a cut at the other, if the array was split
# over devices.


def next_token_values(values: Shaped[Array, "... t"], steps: int = 1) -> Shaped[Array, "... t"]:
    """Gives each token the value of the token `steps` later in the row, or 0 at the row's end.

    For example, [1, 2, 3] becomes [2, 3, 0].
    """
    values = with_whole_rows(values)
    return jnp.concatenate([values[..., steps:], jnp.zeros_like(values[..., :steps])], axis=-1)


def previous_token_values(values: Shaped[Array, "... t"], steps: int = 1) -> Shaped[Array, "... t"]:
    """Gives each token the value of the token `steps` earlier in the row, or 0 at the row's start.

    For example, [1, 2, 3] becomes [0, 1, 2].
    """
    values = with_whole_rows(values)
    return jnp.concatenate([jnp.zeros_like(values[..., :steps]), values[..., :-steps]], axis=-1)


def restarted_count(count: Int32[Array, "n t"], begins: Bool[Array, "b t"]) -> Int32[Array, "b t"]:
    """Restarts a rising count from 0 at each token for which `begins` is true.

    For example, the count [3, 4, 5, 6] that begins again at index 2 becomes [3, 4, 0, 1].
    """
    count_at_last_begin = jax.lax.cummax(jnp.where(begins, count, 0), axis=1)
    return count - count_at_last_begin


def index_in_run(ids: Integer[Array, "b t"]) -> Int32[Array, "b t"]:
    """Returns, for each token, the number of tokens of its run before it.

    Here, zeros make a run like all other ids. For example, 7 7 0 0 0 gives 0 1 0 1 2.
    """
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return restarted_count(index, ids != previous_token_values(ids))


def index_in_segment(segments: Integer[Array, "b t"]) -> Int32[Array, "b t"]:
    """Returns, for each token, the number of tokens of its segment before it in the batch row."""

    def row_index_by_sorting(row: Integer[Array, "t"]) -> Int32[Array, "t"]:
        """Computes the indices of one batch row, in any order of the segments."""
        # If tokens are sorted by segment, each segment is one run, and keeps its order.
        order = jnp.argsort(row, stable=True)
        sorted_row = row[order]
        # `index_in_run` takes a batch, here of one row.
        sorted_index = index_in_run(sorted_row[None])[0]
        # Each index goes back to where its token was before sorting.
        return jnp.zeros_like(sorted_index).at[order].set(sorted_index)

    def index_by_sorting() -> Int32[Array, "b t"]:
        """Computes the indices of all batch rows, in any order of the segments."""
        return jax.vmap(row_index_by_sorting)(segments)

    def index_without_sorting() -> Int32[Array, "b t"]:
        """Computes the indices of all batch rows, if each segment is one run."""
        return index_in_run(segments)

    # If segment ids rise, each segment is one run, and nothing needs sorting.
    ids_rise = _segment_ids_rise(segments, _begins_run(segments)).all()
    return jax.lax.cond(ids_rise, index_without_sorting, index_by_sorting)


@compiled(1, 2)
def positions_of_tokens(
    is_token: Bool[Array, "... t"], start: int, at_padding: int
) -> Int32[Array, "... t"]:
    """Counts the tokens before each token, from `start` on. Padding gets `at_padding`."""
    ones = with_whole_rows(is_token).astype(jnp.int32)
    # The tokens up to each token, which is counted too.
    token_count = jnp.cumsum(ones, axis=-1, dtype=jnp.int32)
    return jnp.where(is_token, token_count + (start - 1), at_padding)
