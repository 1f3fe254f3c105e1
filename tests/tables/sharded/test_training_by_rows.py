"""Training sharded tables by rows: lazy Adam in float64, and what a step sends."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from compare import equal, near
from oracle import lazy_adam
from sharded_tables import (
    ADAM,
    AUTO,
    BATCHES,
    BOTH,
    EXPLICIT,
    GRADIENTS,
    PAD,
    RATE,
    SPEC,
    STEPS,
    TABLE,
    TRAINED_ERROR,
    VOCAB,
    WEIGHTS,
    WIDTH,
    loss,
    mesh_of,
    normal,
    on_host,
    placed_state,
    put,
    row_step,
    shard,
    stripe,
)

import transformer_embed as te

# The axes, the mesh, how the table is placed on it, the mesh axes of its rows and of the batch.
CASES = {
    "contiguous": (EXPLICIT, (2, 4), shard, "model", "data"),
    "striped": (AUTO, (2, 4), stripe, BOTH, BOTH),
    # Devices along the axis that the rows are not split over sum their gradients.
    "striped over some axes": (
        EXPLICIT,
        (2, 2, 2),
        stripe,
        ("extra", "data"),
        ("data", "model", "extra"),
    ),
    # The type of ids says half of how they are split.
    "striped over explicit and automatic axes": ((EXPLICIT, AUTO), (2, 4), stripe, BOTH, BOTH),
}


def check_training(mesh, table, batch):
    """Trains the table, beside lazy Adam in float64; returns what a step sends."""
    params, losses, norms, compiled = {"t": table}, [], [], None
    state = placed_state(ADAM, params)
    with jax.set_mesh(mesh):
        for data in zip(BATCHES, WEIGHTS, strict=True):
            arguments = (params, state, *(put(mesh, array, batch) for array in data))
            compiled = compiled or row_step.lower(*arguments).compile()
            params, state, loss, norm = compiled(*arguments)
            losses.append(float(loss))
            norms.append(float(norm))
    tables, *moments = lazy_adam(TABLE, GRADIENTS, RATE)
    # The loss is linear in the table.
    near(losses, [np.sum(each) for each in tables[:STEPS] * GRADIENTS], atol=1e-3)
    near(norms, [np.linalg.norm(each) for each in GRADIENTS], rtol=1e-5)
    found = on_host(params["t"])
    near(found, tables[-1], atol=TRAINED_ERROR)
    near(on_host([state[0].mu["t"], state[0].nu["t"]]), moments, atol=1e-5)
    still = np.setdiff1d(np.arange(VOCAB), np.setdiff1d(BATCHES, [PAD]))
    equal(found[still], TABLE[still])
    assert params["t"].array.sharding.is_equivalent_to(table.sharding, 2)
    return collectives(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_by_rows_is_lazy_adam_in_float64_and_sends_only_ids_and_rows(name):
    kind, shape, place, rows, batch = CASES[name]
    mesh = mesh_of(shape, kind)
    placed = place(mesh, SPEC(rows))
    sent = check_training(mesh, placed, batch)
    if place is shard:
        for each in sent:
            assert each.largest <= WEIGHTS[0].size < VOCAB * WIDTH / 8, each.line
            assert (each.kind == "all-gather") == (each.operands[0][0] == "s32"), each.line
    elif name == "striped":
        # One all-to-all of ids and two of rows; else sums of a number.
        size = 8 * placed.split.buffers(BOTH, BATCHES[0].size, VOCAB)[1]
        exchanged = [each for each in sent if each.kind == "all-to-all"]
        found = [sum(math.prod(size) for _, size in each.operands) for each in exchanged]
        assert sorted(found) == [size, size * WIDTH, size * WIDTH]
        assert all(each.largest == 1 for each in sent if each.kind != "all-to-all")


def test_each_shard_of_a_contiguous_table_updates_its_own_rows():
    ids, sgd = np.array([1, 130, 299]), optax.sgd(RATE)
    params = {"t": shard(mesh_of((2,)), SPEC("data"))}
    grads = {"t": te.rows.RowGradient(ids, np.ones((3, WIDTH), np.float32), VOCAB)}
    after, _ = te.rows.update(sgd, grads, sgd.init(params), params)
    expected = TABLE.copy()
    expected[ids] -= RATE
    near(on_host(after["t"]), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("place", [shard, stripe])
def test_a_step_outside_of_jit_compiles_one_program_for_the_rows(place, caplog):
    """Of each process, otherwise some 140 in every step."""
    mesh, sgd = mesh_of((2, 4)), optax.sgd(RATE)
    params = {"t": place(mesh, SPEC(BOTH))}
    _, grads = te.rows.value_and_grad(loss, ids={"t": BATCHES[0]})(params, BATCHES[0], WEIGHTS[0])
    with jax.log_compiles():
        te.rows.update(sgd, grads, sgd.init(params), params)
        first = len(caplog.records)
        te.rows.update(sgd, grads, sgd.init(params), params)
    compiled = [each.message for each in caplog.records[first:] if "XLA comp" in each.message]
    assert len(compiled) == 1, compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "devices"),
    [(stripe, 8), (shard, 8), (lambda mesh, spec, table: table, 1)],
    ids=["striped", "contiguous", "plain"],
)
def test_a_step_writes_in_place_and_its_memory_does_not_grow_with_the_table(place, devices):
    """Also where no gradient waits for the rows: that of a sum."""
    mesh, vocab_size = mesh_of((1, devices)), 2**18
    table = place(mesh, SPEC(BOTH), jax.ShapeDtypeStruct((vocab_size, WIDTH), jnp.float32))
    state = jax.eval_shape(ADAM.init, {"t": TABLE})
    state = jax.tree.map(lambda leaf: table if leaf.ndim else leaf, state)

    def step(params, state, ids):
        total = lambda params: jnp.sum(te.lookup(params["t"], ids))
        value, grads = te.rows.value_and_grad(total, ids={"t": ids})(params)
        return *te.rows.update(ADAM, grads, state, params), value

    step = jax.jit(step, donate_argnums=(0, 1))
    ids = put(mesh, np.zeros(128, np.int32), BOTH)
    memory = step.lower({"t": table}, state, ids).compile().memory_analysis()
    size = 4 * WIDTH * vocab_size // devices
    assert memory.alias_size_in_bytes >= 3 * size
    assert memory.temp_size_in_bytes < size / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [shard, stripe, lambda mesh, spec, table: jnp.asarray(table)],
    ids=["contiguous", "striped", "plain"],
)
def test_gradients_of_16_bits_are_summed_over_all_devices_before_they_round(place):
    mesh, sgd, dtype = mesh_of((2, 4)), optax.sgd(2.0**-10), jnp.bfloat16
    # On each device or data-parallel half, as many equal ids as 16 bits round down; all are 2040.
    ids = np.full((8 * 257, 1), 5, np.int32)
    ids[-16:] = 6

    @jax.jit
    def step(params, ids):
        value = lambda params: jnp.sum(te.lookup(params["t"], ids).astype(jnp.float32))
        grads = te.rows.value_and_grad(value, ids={"t": ids}, max_rows=2)(params)[1]
        return te.rows.update(sgd, grads, sgd.init(params), params)[0], jax.grad(value)(params)

    params, dense = step(
        {"t": place(mesh, SPEC("model"), TABLE.astype(dtype))}, put(mesh, ids, BOTH)
    )
    gradient = np.zeros_like(TABLE, dtype)
    gradient[5], gradient[6] = 2040, 16
    equal(on_host(dense["t"]), gradient)
    equal(on_host(params["t"]), TABLE.astype(dtype) - gradient * dtype(2.0**-10))


@pytest.mark.slow
def test_gradients_accumulate_over_several_striped_tables_and_lookups():
    mesh, sgd = mesh_of((2, 4)), optax.sgd(0.5)
    plain = {"t": TABLE, "u": normal(30, VOCAB, WIDTH)}
    params = te.sharding.shard_params(
        plain, mesh, {"*": SPEC(BOTH)}, tables="?", stripe="?", virtual_shards=16
    )

    def value(params, ids, more):
        first, second = te.lookup(params["t"], ids[:, :2]), te.lookup(params["t"], ids[:, 2:])
        return jnp.sum(first * second) + jnp.sum(te.lookup(params["u"], more) ** 2)

    @jax.jit
    def step(params, batches):
        grads = [
            te.rows.value_and_grad(value, ids={"t": ids, "u": more})(params, ids, more)[1]
            for ids, more in batches
        ]
        return te.rows.update(sgd, te.rows.add(*grads), sgd.init(params), params)[0]

    # Few enough ids that some repeat: in one lookup, in both of a batch, and in both batches.
    batches = [*np.random.default_rng(1).integers(0, 30, (2, 2, 8, 4), np.int32)]
    found = on_host(step(params, [[*put(mesh, each, None, BOTH)] for each in batches]))
    one, other = (jax.grad(value)(plain, *each) for each in batches)
    expected = jax.tree.map(lambda table, *both: table - 0.5 * sum(both), plain, one, other)
    near(found, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_table_trains_by_rows_beside_a_sharded_table_and_a_sharded_kernel(kind):
    @jax.jit
    def step(params, state, ids, cotangent):
        def loss(params):
            x = te.lookup(params["tokens"], ids, out_of_range="zero")
            x += te.lookup(params["types"], ids, out_of_range="clip")
            return jnp.sum(x @ params["kernel"] * cotangent)

        _, grads = te.rows.value_and_grad(loss, ids={"tokens": ids})(params)
        return te.rows.update(ADAM, grads, state, params)

    plain = {"kernel": normal(8, WIDTH, 512), "tokens": TABLE, "types": normal(9, VOCAB, WIDTH)}
    mesh, ids, cotangent = mesh_of((2, 4), kind), BATCHES[0], normal(10, 8, 4, 512)
    expected = step(plain, ADAM.init(plain), ids, cotangent)
    specs = {"kernel": SPEC(None, "model"), "t*": SPEC("model")}
    with jax.set_mesh(mesh):
        params = te.sharding.shard_params(plain, mesh, specs, tables="t*")
        batch = put(mesh, ids, "data"), put(mesh, cotangent, "data", None, "model")
        arguments = params, placed_state(ADAM, params), *batch
        compiled = step.lower(*arguments).compile()
        found = on_host(compiled(*arguments))
    near(found, expected, rtol=1e-5, atol=1e-4)
    sent = collectives(compiled)
    assert not any(each.kind == "all-gather" and each.operands[0][0] == "f32" for each in sent)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SPEC("model"), "^optimizer: .*, got clip_by_global_norm: .*Train the table densely"),
        (
            SPEC(None, "model"),
            r"^table: wanted rows over mesh axes, and whole columns, got .*None, 'model'\)$",
        ),
    ],
)
def test_an_optimizer_that_is_not_row_wise_and_columns_that_are_split_are_refused(spec, message):
    clip = optax.clip_by_global_norm(1.0)

    def step(params, ids):
        grads = te.rows.value_and_grad(lambda p: te.lookup(p["t"], ids).sum(), ids={"t": ids})
        return te.rows.update(clip, grads(params)[1], clip.init(params), params)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, {"t": shard(mesh_of((2, 4)), spec)}, BATCHES[0])


def test_arrays_in_a_tree_of_extra_arguments_may_lie_on_explicit_axes():
    """They were closed over by a shard_map, which jax refuses. One that is split is whole inside."""

    def update(updates, state, params=None, *, rates):
        return jax.tree.map(lambda g: -rates["all"].mean() * g, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    mesh = mesh_of((2, 4), EXPLICIT)

    def step(params, ids, rates):
        grads = te.rows.value_and_grad(lambda p: te.lookup(p["t"], ids).sum(), ids={"t": ids})
        return te.rows.update(optimizer, grads(params)[1], (), params, rates=rates)[0]

    with jax.set_mesh(mesh):
        rates = {"all": put(mesh, np.full(4, 2, np.float32), "model")}
        after = jax.eval_shape(step, {"t": shard(mesh, SPEC("model"))}, BATCHES[0], rates)
    assert after["t"].shape == TABLE.shape
