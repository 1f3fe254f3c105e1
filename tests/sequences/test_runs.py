"""Runs and neighbours of tokens, and the rows in which a row index stands for a position."""

import functools

import jax
import numpy as np
import pytest
from compare import equal

from transformer_embed._src.sequences import runs

END = 2**31 - 1


indices = jax.jit(runs.with_row_indices, static_argnums=1)


def with_row_indices(positions, segments, chunk=None):
    positions, segments = np.array([positions], np.int32), np.array([segments], np.int32)
    tokens = {"positions": positions, "places": positions, "segment_ids": segments}
    if chunk is not None:
        tokens["chunk"] = positions // chunk
    return jax.tree.map(lambda array: np.asarray(array)[0].tolist(), indices(tokens, chunk))


def test_rows_of_runs_get_indices_for_places():
    got = with_row_indices([4, 5, 6, 0, 4, 5], [7, 7, 7, 0, 2, 2], chunk=2)
    assert got["places"] == [0, 1, 2, 3, 4, 5]
    assert got["segment_ids"] == [1, 1, 1, 0, 5, 5]
    # Chunks of two begin at even positions.
    assert [got["chunk"][n] for n in (0, 1, 2, 4, 5)] == [0, 0, 2, 4, 4]
    assert got["positions"] == [4, 5, 6, 0, 4, 5]


OTHER_ROWS = {
    "a jump": ([0, 1, 3, 4], [1, 1, 1, 1]),
    "a step back": ([0, 1, 1, 2], [1, 1, 1, 1]),
    "two first positions": ([0, 1, 1, 2], [1, 1, 2, 2]),
    "a segment of two runs": ([0, 1, 0, 1], [1, 1, 2, 1]),
    "a gap": ([0, 1, 0, 2], [1, 1, 0, 1]),
    "positions that wrap": ([END - 1, END, -END - 1, -END], [1, 1, 1, 1]),
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_other_rows_keep_their_numbers(name):
    positions, segments = OTHER_ROWS[name]
    got = with_row_indices(positions, segments)
    assert (got["places"], got["segment_ids"]) == (positions, segments)


@pytest.mark.slow
def test_the_index_in_a_segment_counts_its_earlier_tokens():
    random, index_in_segment = np.random.default_rng(0), jax.jit(runs.index_in_segment)
    for length in (0, 1, 9):
        for highest in (2, 4, 50):
            rows = random.integers(0, highest, (5, length))
            expected = [
                [row[:n].count(each) for n, each in enumerate(row)] for row in rows.tolist()
            ]
            got = index_in_segment(np.array(rows, np.int32))
            equal(got, np.reshape(expected, rows.shape))


@functools.partial(jax.jit, static_argnums=2)
def neighbours(values, segments, steps):
    values = runs.next_token_values(values, steps), runs.previous_token_values(values, steps)
    return *values, runs.has_next_token(segments, steps)


@pytest.mark.parametrize("steps", [1, 2, 5, 7])
def test_neighbours(steps):
    """At the ends of the row, and where more steps are asked for than there are tokens."""
    values = np.arange(1, 11).reshape(2, 5)
    later, earlier = np.zeros((2, 5), int), np.zeros((2, 5), int)
    later[:, : max(5 - steps, 0)] = values[:, steps:]
    earlier[:, steps:] = values[:, : max(5 - steps, 0)]
    segments = np.array([[1, 1, 1, 0, 0], [3, 3, 2, 2, 2]])
    expected = [
        [n + steps < 5 and s != 0 and row[n + steps] == s for n, s in enumerate(row)]
        for row in segments.tolist()
    ]
    equal(neighbours(values, segments, steps), (later, earlier, np.array(expected)))


def test_runs_that_come_back_are_found():
    rows = np.array([[1, 0, 2, 0, 3], [1, 1, 0, 1, 1], [0, 2, 3, 2, 3], [0, 0, 0, 0, 0]])
    found = runs.segment_reappears(rows).astype(int)
    equal(found, [[0] * 5, [0, 0, 0, 1, 0], [0, 0, 0, 1, 1], [0] * 5])
