"""Logits of relative distances, moved to their keys: against a loop, and against the whole model."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal, near
from meshes import EXPLICIT, mesh_of, put
from refused import each_raises

import transformer_embed as te


def by_loop(logits, num_keys):
    """Row t of the keys begins in column T - 1 - t; -inf where there is no column."""
    *batch, queries, columns = logits.shape
    moved = np.full((*batch, queries, num_keys), -np.inf, np.float32)
    for query in range(queries):
        for key in range(num_keys):
            column = key + queries - 1 - query
            if column < columns:
                moved[..., query, key] = logits[..., query, column]
    return moved


SIZES = [(1, 1, 1), (3, 5, 5), (4, 6, 8), (4, 6, 9), (3, 1, 3), (6, 2, 2)]


@pytest.mark.parametrize(("queries", "num_keys", "columns"), SIZES)
def test_logits_are_moved_as_by_a_loop(queries, num_keys, columns):
    logits = np.random.default_rng(0).normal(size=(2, 3, queries, columns)).astype(np.float32)
    expected = by_loop(logits, num_keys)
    shift = functools.partial(te.relative_shift, num_keys=num_keys)
    narrow = [logits.astype(dtype) for dtype in (jnp.bfloat16, jnp.float16)]

    @jax.jit
    def shifted(logits, narrow):
        of_default = te.relative_shift(logits) if columns == num_keys else shift(logits)
        of_rows = jax.vmap(shift)(logits), shift(logits[0, 0])
        return of_default, shift(logits), *of_rows, *map(shift, narrow)

    *of_float32, of_row, brain, half = map(np.asarray, shifted(logits, narrow))
    for found in of_float32:
        equal(found, expected)
    equal(of_row, expected[0, 0])
    for found, given in zip((brain, half), narrow, strict=True):
        assert found.dtype == given.dtype
        equal(found.astype(np.float32), by_loop(given.astype(np.float32), num_keys))


def test_a_column_gets_the_gradient_of_the_keys_at_its_distance():
    weights = np.arange(15.0, dtype=np.float32).reshape(3, 5)

    def loss(logits):
        moved = te.relative_shift(logits)
        return jnp.sum(jnp.where(jnp.isfinite(moved), moved, 0) * weights)

    gradient = jax.jit(jax.grad(loss))(np.ones((3, 5), np.float32))
    expected = np.zeros((3, 5))
    for query in range(3):
        for key in range(5 - (2 - query)):
            expected[query, key + 2 - query] = weights[query, key]
    equal(gradient, expected)


def test_attention_of_transformer_xl_equals_an_embedding_for_each_pair():
    """With a memory, and the layer of the docstring's example."""
    random = np.random.default_rng(1)
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)
    queries, keys, u, v = normal(2, 3, 2, 4), normal(2, 5, 2, 4), normal(2, 4), normal(2, 4)
    of_distance = np.asarray(te.sinusoidal_encoding(np.arange(5), 8)).reshape(5, 2, 4)
    content = np.einsum("bthd,bshd->bhts", queries + u, keys)
    distance = np.einsum("bthd,rhd->bhtr", queries + v, of_distance[::-1])
    logits = content + np.asarray(te.relative_shift(distance))
    mask = te.AttentionMask(te.TokenPositions([2, 3, 4]), te.TokenPositions(range(5)), causal=True)
    mask = np.broadcast_to(mask.dense(), logits.shape)
    equal(np.isfinite(logits), mask)
    for b, h, t, s in np.argwhere(mask):
        pair = (queries[b, t, h] + u[h]) @ keys[b, s, h]
        pair += (queries[b, t, h] + v[h]) @ of_distance[t + 2 - s, h]
        near(logits[b, h, t, s], pair, rtol=1e-5, atol=1e-5)
    both = np.asarray(te.mask_to_bias(mask)) + logits
    assert np.isfinite(jax.jit(jax.nn.softmax)(both)).all()


def test_axes_that_are_split_and_sizes_that_are_symbols():
    logits = np.arange(2 * 4 * 6, dtype=np.float32).reshape(2, 4, 6)
    mesh = mesh_of((2,), ("data",), EXPLICIT)
    for axes in (("data",), (None, "data"), (None, None, "data")):
        with jax.set_mesh(mesh):
            equal(jax.jit(te.relative_shift)(put(mesh, logits, *axes)), by_loop(logits, 6))
    shape = jax.export.symbolic_shape("b, t, r")
    exported = jax.export.export(jax.jit(te.relative_shift))(jax.ShapeDtypeStruct(shape, "float32"))
    equal(exported.call(logits), by_loop(logits, 6))


FLOATS = np.zeros((2, 3, 4), np.float32)
REFUSED = {
    "te.relative_shift(FLOATS.astype(int))": "TypeError: logits: ... got int64",
    "te.relative_shift(FLOATS[0, 0])": "ValueError: logits: ... got shape [4]",
    "te.relative_shift(FLOATS[..., :0])": "ValueError: logits: ... got shape [2, 3, 0]",
    "te.relative_shift(FLOATS, 5)": "ValueError: logits: wanted 5 to 7 columns for 5 keys, got shape [2, 3, 4]",
    "te.relative_shift(FLOATS, 1)": "ValueError: logits: wanted 1 to 3 columns for 1 keys, got shape [2, 3, 4]",
    "te.relative_shift(FLOATS, 0)": "ValueError: num_keys: ... got 0",
    "te.relative_shift(FLOATS, 4.0)": "TypeError: num_keys: ... got float 4.0",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
