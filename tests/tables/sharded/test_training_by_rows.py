"""Training sharded tables by rows: lazy Adam in float64, and what a step sends."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from compare import equal, near
from sharded_tables import (
    ADAM,
    AUTO,
    BATCHES,
    BOTH,
    EXPLICIT,
    PAD,
    SPEC,
    TABLE,
    TRAINED_ERROR,
    VOCAB,
    WEIGHTS,
    WIDTH,
    lazy_adam,
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
from transformer_embed._src.tables.sharded import hops, table_split
from transformer_embed._src.tables.sharded.contiguous import rows_of_this_shard

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
}


def train(mesh, table, batch):
    """The table, its state, the losses and norms of a training, and what a step sends."""
    params, values = {"t": table}, []
    state, compiled = placed_state(ADAM, params), None
    with jax.set_mesh(mesh):
        for data in zip(BATCHES, WEIGHTS, strict=True):
            arguments = (params, state, *(put(mesh, array, batch) for array in data))
            compiled = compiled or row_step.lower(*arguments).compile()
            params, state, *both = compiled(*arguments)
            values.append([float(value) for value in both])
    return params["t"], state, *map(list, zip(*values, strict=True)), collectives(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_by_rows_is_lazy_adam_in_float64_and_sends_only_ids_and_rows(name):
    kind, shape, place, rows, batch = CASES[name]
    mesh = mesh_of(shape, kind)
    placed = place(mesh, SPEC(rows))
    table, state, losses, norms, sent = train(mesh, placed, batch)
    expected, first, second, expected_losses, expected_norms = lazy_adam()
    near(losses, expected_losses, atol=1e-3)
    near(norms, expected_norms, rtol=1e-5)
    found = on_host(table)
    near(found, expected, atol=TRAINED_ERROR)
    near(on_host(state[0].mu["t"]), first, atol=1e-5)
    near(on_host(state[0].nu["t"]), second, atol=1e-5)
    still = np.setdiff1d(np.arange(VOCAB), np.setdiff1d(BATCHES, [PAD]))
    equal(found[still], TABLE[still])
    assert table.array.sharding.is_equivalent_to(placed.sharding, 2)

    if place is shard:
        for each in sent:
            assert each.largest <= WEIGHTS[0].size < VOCAB * WIDTH / 8, each.line
            assert (each.kind == "all-gather") == (each.operands[0][0] == "s32"), each.line
    elif rows == batch:
        # One all-to-all of ids and two of rows for each hop; else sums of a number.
        sizes = [hop.parts * hop.room for hop in placed.split.hops(8, BATCHES[0][0].size)]
        rows = [size * WIDTH for size in sizes]
        exchanged = [each for each in sent if each.kind == "all-to-all"]
        found = [sum(math.prod(size) for _, size in each.operands) for each in exchanged]
        assert sorted(found) == sorted([*sizes, *rows, *rows])
        assert all(each.largest == 1 for each in sent if each.kind != "all-to-all")


def axis_by_axis(asked, axes, sizes, shard, devices, capacity):
    """The route that plans choose for more devices only."""
    legs = [((axis,), size) for axis, size in zip(axes, sizes, strict=True)]
    return hops._hops(asked, legs, shard, devices, capacity)


@pytest.mark.slow
def test_one_mesh_axis_after_the_other_trains_like_a_single_hop(monkeypatch):
    monkeypatch.setattr(table_split, "plan_hops", axis_by_axis)
    # No other test has this capacity, and so the programs of this one.
    mesh = mesh_of((2, 4))
    table = stripe(mesh, capacity=1.0625)
    assert not any(te.sharding.exchange_load(table, ids).dropped for ids in BATCHES)
    trained, _, losses, *_ = train(mesh, table, BOTH)
    expected, _, _, expected_losses, _ = lazy_adam()
    near(losses, expected_losses, atol=1e-3)
    near(on_host(trained), expected, atol=TRAINED_ERROR)


@pytest.mark.slow
def test_a_step_reuses_the_buffers_of_an_striped_table_and_its_moments():
    """Also where no gradient waits for the rows: that of a sum."""
    mesh, vocab_size = mesh_of((1, 8)), 2**18
    table = stripe(mesh, table=jax.ShapeDtypeStruct((vocab_size, WIDTH), jnp.float32))
    adam, *rest = jax.eval_shape(ADAM.init, {"t": table})
    state = adam._replace(mu={"t": table}, nu={"t": table}), *rest
    ids = jax.ShapeDtypeStruct(
        (128,), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, SPEC(BOTH))
    )

    def step(params, state, ids):
        total = lambda params: jnp.sum(te.lookup(params["t"], ids))
        value, grads = te.rows.value_and_grad(total, ids={"t": ids})(params)
        return *te.rows.update(ADAM, grads, state, params), value

    step = jax.jit(step, donate_argnums=(0, 1))
    memory = step.lower({"t": table}, state, ids).compile().memory_analysis()
    size = 4 * WIDTH * vocab_size // 8
    assert memory.alias_size_in_bytes >= 3 * size
    assert memory.temp_size_in_bytes < size / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "dtype"), [(shard, jnp.float16), (stripe, jnp.bfloat16)], ids=["cut", "dealt"]
)
def test_gradients_of_16_bits_are_summed_over_all_devices_before_they_round(place, dtype):
    mesh, sgd, count = mesh_of((2, 4)), optax.sgd(2.0**-10), 4096
    table = place(mesh, SPEC(BOTH), TABLE.astype(dtype))
    # 16 bits stop counting by ones at 256 or 2048.
    ids = put(mesh, np.full((count, 1), 5, np.int32), BOTH)

    @jax.jit
    def step(params, ids):
        value = lambda params: jnp.sum(te.lookup(params["t"], ids).astype(jnp.float32))
        grads = te.rows.value_and_grad(value, ids={"t": ids}, max_rows=1)(params)[1]
        return te.rows.update(sgd, grads, sgd.init(params), params)[0], grads["t"].values

    params, values = step({"t": table}, ids)
    assert params["t"].dtype == values.dtype == dtype
    assert np.asarray(values).max() == count
    expected = TABLE.astype(dtype)
    expected[5] -= dtype(4)
    equal(on_host(params["t"]), expected)


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
    rng = np.random.default_rng(1)
    batches = list(rng.integers(0, 30, (2, 2, 8, 4), np.int32))
    found = on_host(step(params, [[put(mesh, each, BOTH) for each in both] for both in batches]))
    gradient = jax.jit(jax.grad(value))
    one, other = (gradient(plain, *both) for both in batches)
    for name, table in plain.items():
        expected = table - 0.5 * (one[name] + other[name])
        near(found[name], expected, atol=1e-4)


def by_columns():
    """Gradient descent at a rate of its own for each column, which the state holds."""

    def update(gradients, rates, params=None):
        is_table = lambda g: g.shape[-1] == WIDTH
        return jax.tree.map(lambda g: -g * (rates if is_table(g) else 0.1), gradients), rates

    return optax.GradientTransformation(lambda params: jnp.linspace(0.1, 0.2, WIDTH), update)


OPTIMIZER = optax.chain(optax.trace(0.9), by_columns())


@jax.jit
def step_by_rows(params, state, ids, cotangent):
    """Of one table by rows, of another densely, and of a kernel."""

    def loss(params):
        x = te.lookup(params["tokens"], ids, out_of_range="zero")
        x += te.lookup(params["types"], ids, out_of_range="clip")
        return jnp.sum(x @ params["kernel"] * cotangent)

    _, grads = te.rows.value_and_grad(loss, ids={"tokens": ids})(params)
    return te.rows.update(OPTIMIZER, grads, state, params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_table_trains_by_rows_beside_a_sharded_table_and_a_sharded_kernel(kind):
    plain = {"kernel": normal(8, WIDTH, 512), "tokens": TABLE, "types": normal(9, VOCAB, WIDTH)}
    mesh, ids, cotangent = mesh_of((2, 4), kind), BATCHES[0], normal(10, 8, 4, 512)
    expected = step_by_rows(plain, OPTIMIZER.init(plain), ids, cotangent)
    specs = {"kernel": SPEC(None, "model"), "t*": SPEC("model")}
    with jax.set_mesh(mesh):
        params = te.sharding.shard_params(plain, mesh, specs, tables="t*")
        arguments = (
            params,
            placed_state(OPTIMIZER, params),
            put(mesh, ids, "data"),
            put(mesh, cotangent, "data", None, "model"),
        )
        compiled = step_by_rows.lower(*arguments).compile()
        found = on_host(compiled(*arguments))
    near(found, expected, rtol=1e-5, atol=1e-4)
    sent = collectives(compiled)
    assert not any(each.kind == "all-gather" and each.operands[0][0] == "f32" for each in sent)


def test_an_optimizer_that_is_not_row_wise_is_refused_for_a_sharded_table():
    mesh, clip = mesh_of((2, 4)), optax.clip_by_global_norm(1.0)

    def step(params, ids):
        grads = te.rows.value_and_grad(lambda p: te.lookup(p["t"], ids).sum(), ids={"t": ids})
        return te.rows.update(clip, grads(params)[1], clip.init(params), params)

    message = r"^optimizer: wanted each row .*, got clip_by_global_norm: .*Train the table densely"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, {"t": shard(mesh, SPEC("model"))}, BATCHES[0])


def test_a_table_whose_columns_are_split_is_not_taken_by_rows():
    table = shard(mesh_of((1, 2)), SPEC(None, "model"))
    message = r"^table: wanted rows over mesh axes, and whole columns, got .*None, 'model'\)$"
    with pytest.raises(ValueError, match=message):
        te.rows.value_and_grad(lambda params: 0.0, ids={"t": [1]})({"t": table})


@pytest.mark.slow
def test_each_shard_updates_its_own_rows_in_ascending_order():
    """The update tells XLA so; a CPU gives the same rows in any order."""
    split, ids = (
        shard(mesh_of((1, 2)), SPEC("model")).split,
        np.array([5, 192, 250, 299, 300, 301]),
    )
    held_rows = jax.shard_map(
        functools.partial(rows_of_this_shard, split),
        mesh=split.mesh,
        in_specs=SPEC(),
        out_specs=SPEC("model"),
    )
    rows, values = jax.jit(held_rows)(ids.astype(np.int32), np.float32(ids)[:, None])
    for found, own, first in zip(np.split(rows, 2), np.split(values, 2), (0, 192), strict=True):
        assert (np.diff(found) > 0).all()
        held = found < 192
        equal(found[held] + first, own[held, 0])
        assert held.sum() == {0: 1, 192: 3}[first]
