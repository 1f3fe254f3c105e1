"""Optimizer state with one number for each row of a table, as in row-wise Adagrad, beside the same
on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near
from jax.sharding import NamedSharding
from sharded_tables import AUTO, BATCHES, BOTH, EXPLICIT, SPEC, TABLE, VOCAB, mesh_of, put

import transformer_embed as te

RATE = 0.1
STRIPED = {"stripe": "*t", "virtual_shards": 16}


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


def adagrad_in_float64():
    table, sums = TABLE.astype(np.float64), np.full(VOCAB, 0.1)
    for ids in BATCHES:
        counts = np.bincount(ids[(ids >= 0) & (ids < VOCAB)], minlength=VOCAB)[:, None]
        gradient = 2 * counts * table
        sums += np.mean(gradient**2, axis=1)
        table -= RATE * gradient / np.sqrt(sums)[:, None]
    return table, sums


def init(rng):
    del rng
    return {"t": jnp.asarray(TABLE)}, OPTIMIZER.init({"t": TABLE})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"), [(AUTO, {}), (EXPLICIT, STRIPED)], ids=["contiguous", "striped"]
)
def test_row_wise_adagrad_trains(kind, options):
    mesh = mesh_of((2, 4), kind)
    # A trailing None means the same in a spec, but a state by row has one dimension.
    rules = {"*t": SPEC(BOTH, None)}
    place = functools.partial(
        te.sharding.shard_params, mesh=mesh, rules=rules, tables="*t", **options
    )
    with jax.set_mesh(mesh):
        rng = jax.random.key(0)
        drawn = te.sharding.init_params(init, rng, place(jax.eval_shape(init, rng)))
        params, state = drawn
        equal(drawn, place(init(None)))
        if kind == AUTO:
            state = OPTIMIZER.init(params)
        for ids in BATCHES:
            params, state = row_step(params, state, put(mesh, ids, BOTH))
    sums = state["t"]
    assert sums.shape == (VOCAB,)
    assert sums.array.sharding.is_equivalent_to(NamedSharding(mesh, SPEC(BOTH)), 1)
    for found, expected in zip((params["t"], sums), adagrad_in_float64(), strict=True):
        # Squares of sums of some hundred numbers below 4, three times.
        near(found.in_vocabulary_order(), expected, rtol=1e-4, atol=1e-5)
