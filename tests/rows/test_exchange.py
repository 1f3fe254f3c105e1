"""Rows by exchange: the room for ids, ids that find none, what a step sends and holds, and errors."""

import functools
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import optax
import pytest
from collectives import collectives
from compare import equal, near
from jax import NamedSharding, P
from meshes import AUTO, EXPLICIT, mesh_of, put

import transformer_embed as te
from transformer_embed._src.rows import buffers, exchange

ROWS, WIDTH = 304, 8
BOTH = ("data", "model")
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
SGD, ADAM = optax.sgd(1.0), optax.adam(0.1)


def mesh(kind=EXPLICIT):
    return mesh_of((2, 4), BOTH, kind)


def loss(params, ids):
    return jnp.sum(te.lookup(params["t"], ids))


def row_step(optimizer, capacity=1.0):
    def step(params, state, ids):
        by_rows = te.rows.value_and_grad(loss, ids={"t": ids}, capacity=capacity)
        value, grads = by_rows(params, ids)
        return *te.rows.apply_gradients(optimizer, grads, state, params), value

    return jax.jit(step, donate_argnums=(0, 1))


# --- the size of buffers


@pytest.mark.parametrize(("trials", "share"), [(16384, 1 / 256), (16384, 1 / 4096), (10, 1 / 2)])
def test_buffers_are_the_smallest_with_the_stated_probability(trials, share):
    checks = 100_000
    room = buffers._room(trials, share, checks, 1.0)

    def beyond(count):
        with mpmath.workprec(200):
            p = mpmath.mpf(share)
            return sum(
                mpmath.binomial(trials, k) * p**k * (1 - p) ** (trials - k)
                for k in range(count + 1, min(trials, count + 300) + 1)
            )

    assert beyond(room) <= 1e-9 / checks
    # The bound of the tail is close: one or two places fewer would not do.
    assert room == trials or beyond(room - 3) > 1e-9 / checks


def test_capacity_raises_and_never_lowers():
    rooms = [
        buffers.plan_buffers(1024, 8, 10**6, 8, capacity)[0]
        for capacity in (0.1, 1.0, 2.0, 8.0, math.inf)
    ]
    assert rooms[0] == rooms[1] < rooms[2] == 256 < rooms[3] == rooms[4] == 1024


def test_spread_rows_are_asked_for_evenly():
    """Contiguous ones of a vocabulary that is sorted by frequency are not."""
    on = jax.sharding.AbstractMesh((8, 8), BOTH)
    over = NamedSharding(on, P(BOTH))
    table = jax.ShapeDtypeStruct((2**20, 2), np.float32, sharding=over)
    ids = np.random.default_rng(0).zipf(1.2, (64, 1024)) % 10**6
    config = te.EmbedderConfig(10**6, 2, row_multiple=2**12, spread=True)
    table = table.update(shape=(config.rows, 2))
    even, uneven = (te.rows.exchange_load(table, ids, config=each) for each in (config, None))
    assert even["dropped"] == 0 < uneven["dropped"]
    assert even["rows"].max() < 1.5 * even["rows"].mean()
    assert uneven["rows"].max() > 3 * uneven["rows"].mean()


# --- ids that find no room


@pytest.mark.slow
@pytest.mark.parametrize("narrow", ["room", "distinct"])
def test_rows_that_do_not_fit_are_nan_and_counted(narrow, monkeypatch):
    def plan(*arguments):
        room, distinct = buffers.plan_buffers(*arguments)
        return (8, distinct) if narrow == "room" else (room, 8)

    monkeypatch.setattr(exchange, "plan_buffers", plan)
    # Of the 18 ids that each device asks of the third owner, 8 find room in its buffer, or in the
    # owner's. No other test has this capacity, and so the program of this one.
    on, capacity = mesh(), 16.0 + len(narrow)
    ids = np.tile(np.arange(18, dtype=np.int32) + 2 * ROWS // 8, (8, 1))
    weights = np.random.default_rng(1).normal(size=(*ids.shape, WIDTH)).astype(np.float32)
    with jax.set_mesh(on):
        table, *batch = put(on, (TABLE, ids, weights), BOTH)
        read = lambda table, ids: te.lookup(table, ids, out_of_range="zero")
        read = te.rows.with_exchange(read, ids=batch[0], capacity=capacity)
        rows, back = jax.vjp(lambda table: read(table, batch[0]), table)
        (gradient,) = back(batch[1])
    assert gradient.sharding.is_equivalent_to(table.sharding, 2)
    lost = np.isnan(np.asarray(rows)).any(-1)
    assert (lost.sum(axis=1) == 10).all()
    # The owner counts each row once.
    load = te.rows.exchange_load(table, ids, capacity=capacity)
    assert load["dropped"] == {"room": 8 * 10, "distinct": 10}[narrow]
    equal(load["rows"].reshape(-1), np.where(np.arange(8) == 2, 8, 0))
    expected = np.zeros_like(TABLE)
    np.add.at(expected, ids, np.where(lost[..., None], 0, weights))
    equal(np.asarray(rows)[~lost], TABLE[ids[~lost]])
    near(gradient, expected, atol=1e-4)


# --- what a step sends and holds


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_a_step_writes_in_place_and_sends_and_holds_what_the_batch_reads(capacity):
    """Also where no gradient waits for the rows: that of a sum."""
    on, rows, count = mesh(), 2**18, 128
    with jax.set_mesh(on):
        shape = lambda shape, *axes: jax.ShapeDtypeStruct(
            shape, np.float32 if shape else np.int32, sharding=NamedSharding(on, P(*axes))
        )
        params = {"t": shape((rows, WIDTH), BOTH)}
        place = lambda leaf: shape(leaf.shape, *[BOTH] * (leaf.ndim == 2))
        state = jax.tree.map(place, jax.eval_shape(ADAM.init, params))
        ids = shape((count,), BOTH).update(dtype=np.int32)
        compiled = row_step(ADAM, capacity).lower(params, state, ids).compile()
    memory, size = compiled.memory_analysis(), 4 * WIDTH * rows // 8
    assert memory.alias_size_in_bytes >= 3 * size
    assert memory.temp_size_in_bytes < size / 4
    sent = [each for each in collectives(compiled) if each.largest > 1]
    assert max(each.largest for each in sent) <= 8 * count * WIDTH
    if capacity:
        assert {each.kind for each in sent} == {"all-to-all"}
        # Once the ids, twice the rows.
        assert len(sent) == 3


@pytest.mark.slow
def test_a_step_outside_of_jit_compiles_one_program_for_the_rows(caplog):
    """Of each process, otherwise some 140 in every step."""
    on = mesh()
    with jax.set_mesh(on):
        params, ids = put(on, ({"t": TABLE}, np.arange(8, dtype=np.int32)), BOTH)
        grads = te.rows.value_and_grad(loss, ids={"t": ids}, capacity=1.0)(params, ids)[1]
        with jax.log_compiles():
            te.rows.apply_gradients(SGD, grads, SGD.init(params), params)
            first = len(caplog.records)
            te.rows.apply_gradients(SGD, grads, SGD.init(params), params)
    compiled = [each.message for each in caplog.records[first:] if "XLA comp" in each.message]
    assert len(compiled) == 1, compiled


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_gradients_of_16_bits_are_summed_over_all_devices_before_they_round(capacity):
    # On each device, as many equal ids as 16 bits round down; all are 2040.
    ids = np.full(8 * 257, 5, np.int32)
    ids[-16:] = 6
    on, table = mesh(), np.zeros((ROWS, WIDTH), jnp.bfloat16)
    with jax.set_mesh(on):
        params, ids = put(on, {"t": table}, "model"), put(on, ids, BOTH)
        after, _, _ = row_step(SGD, capacity)(params, SGD.init(params), ids)
    expected = table.copy()
    expected[5], expected[6] = -2040, -16
    equal(np.asarray(after["t"]), expected)


# --- errors


def by_rows(table, ids, capacity=1.0, optimizer=SGD, state=None):
    params = {"t": table}
    grads = te.rows.value_and_grad(loss, ids={"t": ids}, capacity=capacity)(params, ids)[1]
    state = optimizer.init(params) if state is None else state
    return te.rows.apply_gradients(optimizer, grads, state, params)


def inside(table, ids):
    step = jax.shard_map(by_rows, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"})
    return step(table, ids)


def mean(table, ids):
    def of_one(_):
        step = te.rows.value_and_grad(loss, ids={"t": ids}, capacity=1.0)
        return te.rows.pmean(step({"t": table}, ids)[1], "i")["t"].values

    return jax.vmap(of_one, axis_name="i")(jnp.zeros(2))


def load(table, ids, **options):
    return te.rows.exchange_load(table, np.arange(8 if ids is None else len(ids)), **options)


IDS = np.arange(8, dtype=np.int32)
ERRORS = {
    f"to exchange rows, got an array split as {P(None, 'model')}": (by_rows, P(None, "model"), P(BOTH)),
    "ids: wanted split over the mesh axes of the table's rows, ('data', 'model'), to exchange": (
        by_rows,
        P(BOTH),
        P("data"),
    ),
    "ids: wanted split over ('model', 'data'), as the ids of the step whose rows are exchanged": (
        lambda table, ids: te.rows.with_exchange(lambda p: loss(p, IDS), ids={"t": ids})({"t": table}),
        P("model"),
        P(BOTH),
    ),
    "capacity: wanted None inside of a shard_map over some of the mesh axes, got 1.0": (
        inside,
        P("model"),
        P(BOTH),
    ),
    "capacity: wanted a number above 0 that float32 holds": (
        functools.partial(by_rows, capacity=0),
        P("model"),
        P(BOTH),
    ),
    f"state: wanted [304, 8] split as its table, {P('model', ())} (jax.device_put), got ": (
        lambda table, ids: by_rows(table, ids, None, ADAM, jax.tree.map(
            lambda leaf: put(mesh(), np.asarray(leaf)), ADAM.init({"t": TABLE})
        )),
        P("model"),
        P(BOTH),
    ),
    "optimizer: wanted each row updated from that row alone, got clip_by_global_norm": (
        functools.partial(by_rows, optimizer=optax.clip_by_global_norm(1.0)),
        P("model"),
        P(BOTH),
    ),
    "grads: wanted rows that every device has, got those that devices exchanged": (
        mean,
        P("model"),
        P(BOTH),
    ),
    "batch_axes: wanted a tuple of axes of the mesh": (
        functools.partial(load, batch_axes=["x"]),
        P("model"),
        P(),
    ),
    "ids: wanted a first dimension that 8 devices divide, got shape [5]": (
        lambda table, ids: load(table, IDS[:5]),
        P("model"),
        P(),
    ),
    "config: wanted the rows of the table, ": (
        lambda table, ids: load(table, ids, config=te.EmbedderConfig(33, WIDTH)),
        P("model"),
        P(),
    ),
    "max_rows: wanted a Python int, got float 4.0": (
        lambda table, ids: te.rows.value_and_grad(len, ids=ids, max_rows=4.0)(table),
        P(),
        P(),
    ),
    "table: wanted an array, or its shape, on a mesh, got": (
        lambda table, ids: load(np.asarray(TABLE), ids),
        P("model"),
        P(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_what_cannot_be_exchanged_or_updated_is_named(message):
    call, of_table, of_ids = ERRORS[message]
    on = mesh()
    with jax.set_mesh(on), pytest.raises((TypeError, ValueError)) as error:
        call(put(on, TABLE, *of_table), put(on, IDS, *of_ids))
    assert message in str(error.value)


READERS = [
    lambda table: te.lookup(table, [1, 2]),
    lambda table: te.linear_cross_entropy(np.ones((2, WIDTH), "f4"), table, [1, 2]),
    lambda table: te.rows.value_and_grad(len, ids=np.array([1, 2]))(table),
]


@pytest.mark.parametrize("read", READERS, ids=["lookup", "loss", "rows"])
def test_a_split_table_outside_of_its_mesh_is_named(read):
    """It was an unbound axis, or an ambiguous sharding."""
    table = put(mesh(), TABLE, "model")
    with pytest.raises(ValueError, match=r"^(ids|x): wanted .* inside jax.set_mesh\(mesh\)"):
        read(table)


def test_automatic_axes_and_two_orders_of_one_table_are_named():
    with jax.set_mesh(mesh(AUTO)), pytest.raises(ValueError, match="explicit_axes"):
        jax.eval_shape(by_rows, TABLE, IDS)
    config = te.EmbedderConfig(ROWS, WIDTH, spread=True, output=None)
    params, name = (
        te.Embedder(config).init(jax.random.key(0)),
        "transformer_embedding/~/token_embedding",
    )

    def both(params):
        x = te.Embedder(config).apply(params, None, IDS, is_training=False)
        return jnp.sum(x + te.lookup(params[name]["embeddings"], IDS))

    with pytest.raises(ValueError, match="wanted one order of rows in all lookups"):
        te.rows.value_and_grad(both, ids={name: {"embeddings": IDS}})(params)
