"""Ids that are shifted to the right, against a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal
from meshes import EXPLICIT, mesh_of, put
from refused import each_raises

import transformer_embed as te


def by_loop(ids, first_id, segment_ids=None):
    """Each run of tokens of one number begins with the first id, and padding stays."""
    segments = np.broadcast_to(1 if segment_ids is None else segment_ids, ids.shape)
    shifted = ids.copy()
    for place in np.ndindex(ids.shape):
        before = (*place[:-1], place[-1] - 1)
        if segments[place] != 0:
            goes_on = place[-1] > 0 and segments[before] == segments[place]
            shifted[place] = ids[before] if goes_on else first_id
    return shifted


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 0), (2, 1)])
def test_ids_are_shifted_as_by_a_loop(shape):
    random = np.random.default_rng(len(shape))
    ids = random.integers(-5, 90, shape).astype(np.int32)
    of_all = np.sort(random.integers(0, 3, shape), axis=-1)[..., ::-1]
    of_row = of_all[(0,) * (len(shape) - 1)]

    @jax.jit
    def shifted(ids, of_all, of_row):
        calls = [te.shift_right, functools.partial(te.shift_right, segment_ids=of_row)]
        found = [call(ids, 8) for call in calls]
        if ids.ndim > 2:
            found = [jax.vmap(lambda ids, call=call: call(ids, 8))(ids) for call in calls] + found
        return [te.shift_right(ids, 8, segment_ids=of_all), *found]

    with jax.numpy_rank_promotion("raise"):
        found = shifted(ids, of_all, of_row)
    expected = [by_loop(ids, 8, segment_ids) for segment_ids in (of_all, None, of_row)]
    expected += expected[1:] * (len(shape) > 2)
    equal(found, expected)


def test_shifted_ids_equal_the_inputs_of_a_causal_model():
    """The id that is read at a token is the label before it, so shifting left gives it back."""
    ids, segment_ids = np.array([[5, 6, 7, 8, 9, 3]]), np.array([[1, 1, 1, 2, 2, 0]])
    read = np.asarray(te.shift_right(ids, 1, segment_ids=segment_ids))
    tokens = te.TokenPositions.from_segment_ids(segment_ids)
    has_next = np.asarray(tokens.next_token_mask)
    equal(np.roll(read, -1)[has_next], ids[has_next])
    equal(read[np.asarray(tokens.padding_mask) & (np.asarray(tokens.positions) == 0)], [1, 1])


def test_rows_and_lengths_that_explicit_axes_split():
    ids = np.arange(16).reshape(2, 8)
    segment_ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [4] * 8])
    mesh = mesh_of((2,), ("data",), EXPLICIT)
    for axes in (("data",), (None, "data")):
        with jax.set_mesh(mesh):
            arrays = put(mesh, ids, *axes), put(mesh, segment_ids, *axes)
            shift = jax.jit(lambda ids, segments: te.shift_right(ids, 3, segment_ids=segments))
            equal(shift(*arrays), by_loop(ids, 3, segment_ids))
            equal(te.shift_right(arrays[0], 3), by_loop(ids, 3))


REFUSED = {
    "te.shift_right(3, 1)": "ValueError: ids: ... got shape []",
    "te.shift_right([0.5], 1)": "TypeError: ids: ... got float64",
    "te.shift_right([3], jnp.array(1))": "TypeError: first_id: ... got an array int32[]",
    "te.shift_right([3], 2**31)": "ValueError: first_id: ... got 2147483648",
    "te.shift_right([3, 4], 1, segment_ids=[1])": "ValueError: segment_ids: ... got shape [1]",
    "te.shift_right([3, 4], 1, segment_ids=[1, -1])": "ValueError: segment_ids: ... got -1 at index [1]",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
    assert jnp.asarray(te.shift_right([3], 1)).dtype == jnp.int32
