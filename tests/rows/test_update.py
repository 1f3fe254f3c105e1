"""Steps on some rows of a table: the forms that they may have, and their arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near

import transformer_embed as te

VOCAB_SIZE, WIDTH = 23, 3
# float32 against float64: some 4 roundings of 2**-24 each a step, of parameters below 8, and a
# rounded quotient of moments (relative error some 1e-6) times the rate.
TOLERANCE = 4e-5
RATE = 0.1
ADAMW = optax.adamw(RATE, weight_decay=0.1)


def make_params(seed=0):
    table = np.random.default_rng(seed).normal(size=(VOCAB_SIZE, WIDTH)).astype(np.float32)
    return {"embed": {"embeddings": table}, "scale": np.float32(1)}


def table_of(params):
    return np.asarray(params["embed"]["embeddings"])


def assert_close(found, expected, **options):
    options = {"rtol": TOLERANCE, "atol": TOLERANCE} | options
    near(found, expected, **options)


PARAMS = {"t": np.ones([1000, 2], np.float32), "w": np.ones([3, 2], np.float32)}
IDS = np.array([0, 3, 3, 701])
SGD = optax.sgd(0.25)


def tanh_loss(params, ids=IDS):
    return jnp.sum(jnp.tanh(te.lookup(params["t"], ids))) + jnp.sum(params["w"])


def gradient(params, ids=IDS, loss=tanh_loss):
    return te.rows.value_and_grad(loss, ids={"t": ids})(params, ids)[1]


def rows(ids, values, size=1000):
    return {"t": te.rows.RowGradient(np.array(ids), values, size)}


def test_more_rows_than_a_block_are_updated_in_blocks():
    """Some gradients are zeros, and the last block is not full."""
    ids, rng = np.arange(1500, 3000), np.random.default_rng(0)
    table, values = rng.normal(size=(2, 3000, 2)).astype(np.float32)
    values[::7] = 0
    optimizer = optax.sgd(0.5, momentum=0.9)

    @jax.jit
    def step(params, state, values):
        return te.rows.apply_gradients(optimizer, rows(ids, values, 3000), state, params)

    params, state = {"t": table}, optimizer.init({"t": table})
    for _ in range(2):
        params, state = step(params, state, values[ids])
    # Not in place: jax may still read the first table.
    expected = table.copy()
    expected[ids] -= 0.5 * (1 + 1.9) * values[ids]
    assert_close(params["t"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 1024, 1025])
def test_a_batch_may_have_as_many_ids_as_the_table_has_rows(size):
    """The proof tells rows from other sizes: the number that is updated at a time is never the
    table's."""
    total = lambda params, ids: te.lookup(params["t"], ids).sum()

    @jax.jit
    def step(params):
        grads = gradient(params, np.arange(size), total)
        return te.rows.apply_gradients(SGD, grads, SGD.init(params), params)[0]

    equal(step({"t": jnp.ones([size, 2])})["t"], 0.75)


# --- arguments that change


@pytest.mark.slow
def test_an_optimizer_that_closes_over_a_value_uses_that_of_each_trace():
    rate = [1.0]
    optimizer = optax.stateless(lambda grads, _: jax.tree.map(lambda g: -rate[0] * g, grads))

    def step(params):
        return te.rows.apply_gradients(
            optimizer, rows([0], jnp.ones([1, 2])), optimizer.init({}), params
        )[0]

    for rate[0] in (0.5, 0.25):
        for run in (step, jax.jit(lambda params: step(params))):
            assert run({"t": PARAMS["t"]})["t"][0, 0] == 1 - rate[0]


def test_extra_arguments_may_be_anything_that_the_optimizer_takes():
    def update(updates, state, params=None, *, flag, mode, value):
        assert (flag, mode) == (True, "double")
        return jax.tree.map(lambda g: -2 * value * g, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    extra = {"flag": True, "mode": "double", "value": jnp.array(0.25)}
    grads = rows([1, 2], jnp.ones([2, 2]))
    after, _ = te.rows.apply_gradients(optimizer, grads, (), {"t": PARAMS["t"]}, **extra)
    equal(after["t"][:4, 0], [1, 0.5, 0.5, 1])


# --- steps in other forms


@pytest.mark.slow
def test_steps_in_a_scan_are_those_of_a_loop():
    batches = np.array([[0, 3], [3, 5], [0, 0]])

    @jax.jit
    def one(carry, ids):
        params, state = carry
        return te.rows.apply_gradients(ADAMW, gradient(params, ids), state, params), None

    first = jax.tree.map(jnp.asarray, (PARAMS, ADAMW.init(PARAMS)))
    scanned, _ = jax.jit(lambda carry: jax.lax.scan(one, carry, batches))(first)
    looped = functools.reduce(lambda carry, ids: one(carry, ids)[0], batches, first)
    assert_close(scanned, looped, rtol=1e-6)


@pytest.mark.slow
def test_a_step_works_under_vmap_over_seeds():
    ids = np.array([[0, 3, 3], [5, 0, 8]])
    tables = np.stack([table_of(make_params(seed)) for seed in range(2)])

    def one(table, ids):
        params = {"t": table, "w": jnp.ones(3)}
        return te.rows.apply_gradients(ADAMW, gradient(params, ids), ADAMW.init(params), params)[0][
            "t"
        ]

    expected = np.stack([*map(jax.jit(one), tables, ids)])
    assert (expected != tables).any(axis=2).sum(axis=1).tolist() == [2, 3]
    assert_close(jax.jit(jax.vmap(one))(tables, ids), expected)


# --- arguments


ADAM, SMALL = optax.adam(RATE), {"t": jnp.ones([5, 2])}
GRADS, STATE = rows([1], jnp.ones([1, 2]), 5), ADAM.init(SMALL)
ERRORS = {
    "params: wanted no others, got t [5, 2]": (ADAM, {}, STATE),
    "params: wanted t [6, 2], got t [5, 2]": (
        ADAM,
        rows([1], jnp.ones([1, 2]), 6),
        STATE,
    ),
    "state: wanted 0/count [], 0/mu/t [5, 2], 0/nu/t [5, 2], got none of them": (
        ADAM,
        GRADS,
        SGD.init(SMALL),
    ),
    "state: wanted an array, got object": (ADAM, GRADS, object()),
    "optimizer: wanted an optax.GradientTransformation, got function": (optax.adam, GRADS, STATE),
    # It has an init, and no update.
    "optimizer: wanted an optax.GradientTransformation, got Embedder": (
        te.Embedder(te.EmbedderConfig(5, 2)),
        GRADS,
        STATE,
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments_raise_errors(message):
    with pytest.raises((TypeError, ValueError)) as error:
        te.rows.apply_gradients(*ERRORS[message], SMALL)
    assert message in str(error.value)


def test_a_gradient_needs_a_row_for_each_id():
    message = (
        r"^grads: wanted values \[2, 2\] of a table \[5, 2\], got values \[1, 2\] of one \[5, 2\]"
    )
    with pytest.raises(ValueError, match=message):
        rows([1, 2], jnp.ones([1, 2]), 5)
