"""Interleaved tables in training: densely, in 16 bits, with donated buffers, and with optimizers that it
refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import transformer_embed as te

SPEC = PartitionSpec
VOCAB, WIDTH, PAD, RATE = 300, 8, 3, 0.1
# Repeats, padding, and ids out of range at both ends.
IDS = np.random.default_rng(0).integers(-3, VOCAB + 5, (3, 16, 6)).astype(np.int32)
IDS[:, :, 0], IDS[:, 0, 1:3] = 7, PAD
WEIGHTS = np.random.default_rng(1).normal(size=(3, 16, 6, WIDTH)).astype(np.float32)
TABLE = np.random.default_rng(2).normal(size=(VOCAB, WIDTH)).astype(np.float32)


def mesh_of(*shape):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def placed(tree, mesh, interleave="*table"):
    return te.sharding.shard_params(
        tree,
        mesh,
        {"*table": SPEC(mesh.axis_names)},
        tables="*table",
        batch_axes=mesh.axis_names,
        interleave=interleave,
    )


def on(mesh, array):
    return jax.device_put(array, NamedSharding(mesh, SPEC(mesh.axis_names)))


def loss(params, ids, weights):
    return jnp.sum(
        te.lookup(params["table"], ids, pad_id=PAD, out_of_range="zero").astype(jnp.float32)
        * weights
    )


def gradient(ids, weights):
    """In float64."""
    counted = (ids >= 0) & (ids < VOCAB) & (ids != PAD)
    dense = np.zeros((VOCAB, WIDTH))
    np.add.at(dense, ids[counted], weights[counted])
    return dense


# --- densely


def dense_step(optimizer):
    def step(params, state, ids, weights):
        updates, state = optimizer.update(jax.grad(loss)(params, ids, weights), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


@pytest.mark.slow
def test_an_interleaved_table_trains_densely_as_dense_adam_in_float64():
    mesh, adam = mesh_of(2, 4), optax.adam(RATE)
    params = placed({"table": TABLE}, mesh)
    state, step = jax.jit(adam.init)(params), dense_step(adam)
    table, first, second = (
        TABLE.astype(np.float64),
        np.zeros((VOCAB, WIDTH)),
        np.zeros((VOCAB, WIDTH)),
    )
    for number, (ids, weights) in enumerate(zip(IDS, WEIGHTS, strict=True), 1):
        params, state = step(params, state, on(mesh, ids), on(mesh, weights))
        dense = gradient(ids, weights)
        first, second = 0.9 * first + 0.1 * dense, 0.999 * second + 0.001 * dense**2
        table -= RATE * (first / (1 - 0.9**number)) / (np.sqrt(second / (1 - 0.999**number)) + 1e-8)
    np.testing.assert_allclose(state[0].mu["table"].in_vocabulary_order(), first, rtol=0, atol=1e-5)
    # Adam turns a relative error of 2**-16 in a gradient into one of that size in a step.
    np.testing.assert_allclose(
        params["table"].in_vocabulary_order(), table, rtol=0, atol=len(IDS) * RATE * 2.0**-13
    )


def shapes(mesh, interleave, optimizer, vocab_size, ids):
    params = {"table": jax.ShapeDtypeStruct((vocab_size, WIDTH), jnp.float32)}
    trees = placed((params, jax.eval_shape(optimizer.init, params)), mesh, interleave)
    batch = NamedSharding(mesh, SPEC(mesh.axis_names))
    tokens = jax.ShapeDtypeStruct((ids * mesh.size, 1), jnp.int32, sharding=batch)
    return (
        *trees,
        tokens,
        jax.ShapeDtypeStruct((ids * mesh.size, 1, WIDTH), jnp.float32, sharding=batch),
    )


def evaluation(params, state, ids, weights):
    return te.lookup(params["table"], ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [evaluation, dense_step(optax.sgd(RATE))], ids=["eval", "train"]
)
def test_evaluation_and_dense_steps_of_an_interleaved_table_exchange_and_send_less(program):
    mesh = mesh_of(1, 8)
    interleaved, contiguous = (
        collectives(
            jax.jit(program).lower(*shapes(mesh, interleave, optax.sgd(RATE), 65536, 256)).compile()
        )
        for interleave in ("*table", None)
    )
    assert {each.kind for each in interleaved} == {"all-to-all"}
    assert sum(each.sent for each in interleaved) < sum(each.sent for each in contiguous) / 2


# --- by rows


def row_step(optimizer):
    def step(params, state, ids, weights):
        grads = te.rows.value_and_grad(loss, ids={"table": ids})(params, ids, weights)[1]
        return te.rows.update(optimizer, grads, state, params)

    return jax.jit(step, donate_argnums=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_tables_of_16_bits_by_exchange_are_the_oracle_but_for_their_rounding(dtype):
    mesh, sgd = mesh_of(2, 4), optax.sgd(RATE)
    params = placed({"table": TABLE.astype(dtype)}, mesh)
    expected, step, state = (
        np.asarray(params["table"].in_vocabulary_order(), np.float64),
        row_step(sgd),
        sgd.init(params),
    )
    for ids, weights in zip(IDS, WEIGHTS, strict=True):
        params, state = step(params, state, on(mesh, ids), on(mesh, weights))
        expected -= RATE * gradient(ids, weights)
    found = params["table"].in_vocabulary_order()
    assert found.dtype == dtype
    # In each step the gradient, the update and the row round once, by half of a unit of numbers
    # below 64, 8 and 16.
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        found.astype(np.float64), expected, rtol=0, atol=len(IDS) * (RATE * 64 + 8 + 16) / 2 * eps
    )
    untouched = np.setdiff1d(np.arange(VOCAB), np.setdiff1d(IDS, [PAD]))
    np.testing.assert_array_equal(found[untouched], TABLE.astype(dtype)[untouched])


@pytest.mark.slow
def test_a_step_reuses_the_buffers_of_an_interleaved_table_and_its_state():
    mesh, adam, vocab_size = mesh_of(1, 8), optax.adam(RATE), 2**18
    arguments = shapes(mesh, "*table", adam, vocab_size, 16)
    memory = row_step(adam).lower(*arguments).compile().memory_analysis()
    shard = 4 * WIDTH * arguments[0]["table"].array.shape[0] // mesh.size
    # The table and Adam's two moments.
    assert memory.alias_size_in_bytes >= 3 * shard
    assert memory.temp_size_in_bytes < shard / 4


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE)), "clip_by_global_norm"),
        (optax.adafactor(RATE), "clip_by_block_rms"),
    ],
    ids=["a global norm", "adafactor"],
)
def test_an_optimizer_that_does_not_update_row_by_row_is_refused(optimizer, name):
    mesh = mesh_of(1, 8)
    arguments = shapes(mesh, "*table", optax.sgd(RATE), 256, 1)
    state = jax.eval_shape(
        optimizer.init, {"table": jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)}
    )
    with pytest.raises(
        ValueError,
        match=rf"^optimizer: wanted each row updated from that row alone, got {name}: .*Train the table densely",
    ):
        row_step(optimizer).trace(arguments[0], state, *arguments[2:])


@pytest.mark.slow
def test_max_rows_counts_the_rows_of_each_device():
    mesh, sgd = mesh_of(1, 8), optax.sgd(RATE)
    params, _, tokens, weights = shapes(mesh, "*table", sgd, 4096, 16)

    def rows_taken(params, ids, weights):
        return te.rows.value_and_grad(
            lambda params: loss(params, ids, weights), ids={"table": ids}, max_rows=8
        )(params)[1]["table"].values

    taken = jax.eval_shape(jax.jit(rows_taken), params, tokens, weights)
    whole = jax.eval_shape(
        jax.jit(
            lambda *a: te.rows.value_and_grad(loss, ids={"table": a[1]})(*a)[1]["table"].values
        ),
        params,
        tokens,
        weights,
    )
    assert math.prod(taken.shape) < math.prod(whole.shape)
    # Each device reads 8 distinct rows: no NaN, although the batch has 64.
    table = placed({"table": TABLE}, mesh)
    ids = np.repeat(np.arange(64).reshape(8, 8), 2, axis=1).reshape(8, 16).astype(np.int32)
    value = jax.jit(
        lambda params, ids: te.rows.value_and_grad(
            lambda p: te.lookup(p["table"], ids).sum(), ids={"table": ids}, max_rows=8
        )(params)[0]
    )
    assert np.isfinite(value(table, on(mesh, ids)))
