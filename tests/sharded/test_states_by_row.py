"""Optimizer state with one number for each row of a table, as in row-wise Adagrad, beside the same
on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contexts import set_mesh
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import transformer_embed as te

VOCAB, WIDTH, RATE = 300, 8, 0.1
TABLE = np.random.default_rng(0).normal(size=(VOCAB, WIDTH)).astype(np.float32)
IDS = np.random.default_rng(1).integers(-3, VOCAB + 5, (3, 8, 4)).astype(np.int32)


def row_wise_adagrad():
    """Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems" (2019), https://arxiv.org/abs/1906.00091: one sum of squares for each row."""

    def init(params):
        return jax.tree.map(lambda table: jnp.full(table.shape[:1], 0.1), params)

    def update(gradients, sums, params=None):
        del params
        sums = jax.tree.map(lambda g, s: s + jnp.mean(g**2, axis=1), gradients, sums)
        step = lambda g, s: -RATE * g / jnp.sqrt(s)[:, None]
        return jax.tree.map(step, gradients, sums), sums

    return optax.GradientTransformation(init, update)


OPTIMIZER = row_wise_adagrad()


@jax.jit
def row_step(params, state, ids):
    def loss(params):
        return jnp.sum(te.lookup(params["t"], ids, out_of_range="zero") ** 2)

    grads = te.rows.value_and_grad(loss, ids={"t": ids})(params)[1]
    return te.rows.update(OPTIMIZER, grads, state, params)


def train(params, state, put=jnp.asarray):
    for ids in IDS:
        params, state = row_step(params, state, put(ids))
    return params["t"], state["t"]


@functools.cache
def on_one_device():
    return train({"t": jnp.asarray(TABLE)}, OPTIMIZER.init({"t": TABLE}))


def init(rng):
    del rng
    return {"t": jnp.asarray(TABLE)}, OPTIMIZER.init({"t": jnp.asarray(TABLE)})


@pytest.mark.parametrize("options", [{}, {"interleave": "*t", "virtual_shards": 16}], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("start", ["tree", "function", "optimizer"])
def test_row_wise_adagrad_trains_as_on_one_device(start, kind, options):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    # A trailing None means the same in a spec, but a state by row has one dimension.
    rules = {"*t": PartitionSpec(("data", "model"), None)}
    place = functools.partial(
        te.sharding.shard_params, mesh=mesh, rules=rules, tables="*t", **options
    )
    with set_mesh(mesh):
        if start == "function":
            params, state = place(init, rng=jax.random.key(0))
        elif start == "tree":
            params, state = place(jax.tree.map(np.asarray, init(None)))
        else:
            params = place({"t": TABLE})
            state = OPTIMIZER.init(params)
        everyone = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        table, sums = train(params, state, functools.partial(jax.device_put, device=everyone))
    assert (table.shape, sums.shape) == ((VOCAB, WIDTH), (VOCAB,))
    assert sums.array.sharding.is_equivalent_to(everyone, 1)
    assert {shard.data.shape for shard in sums.array.addressable_shards} == {
        (sums.array.shape[0] // 8,)
    }
    for found, expected in zip((table, sums), on_one_device(), strict=True):
        # Gradients of rows are summed in another order, and three steps round.
        np.testing.assert_allclose(found.in_vocabulary_order(), expected, rtol=1e-5, atol=1e-6)


def test_a_state_by_row_is_mapped_to_shapes_and_moves_to_another_mesh():
    def place(tree, shape, **options):
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        rules = {"*t": PartitionSpec("model")}
        return te.sharding.shard_params(tree, mesh, rules, tables="*t", **options)[1]["t"]

    shapes, values = jax.eval_shape(init, None), init(None)
    for options in ({}, {"interleave": "*t", "virtual_shards": 16}):
        state = place(values, (1, 8), **options)
        target = place(shapes, (1, 8), **options)
        assert (target.array.shape, target.shape) == (state.array.shape, (VOCAB,))
        moved = place([{}, {"t": state}], (4, 2))
        np.testing.assert_array_equal(moved.in_vocabulary_order(), values[1]["t"])
