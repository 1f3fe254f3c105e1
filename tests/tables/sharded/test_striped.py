"""Rows by exchange: lookups in striped tables, ids that find no room, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from compare import equal, near
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from oracle import loop_lookup
from sharded_tables import (
    ADAM,
    AUTO,
    BATCHES,
    BOTH,
    EXPLICIT,
    PAD,
    RATE,
    SPEC,
    TABLE,
    VOCAB,
    WEIGHTS,
    WIDTH,
    mesh_of,
    normal,
    on_host,
    owned_by_one,
    placed_state,
    put,
    row_step,
    shard,
    stripe,
)
from test_training_by_rows import axis_by_axis

import transformer_embed as te
from transformer_embed._src.tables.sharded import table_split


@jax.jit
def lookup_and_gradient(table, ids, weights):
    rows, back = jax.vjp(lambda table: te.lookup(table, ids, pad_id=PAD), table)
    return rows, back(weights)[0]


@pytest.mark.parametrize(
    ("kind", "shape", "rows"),
    [
        pytest.param(AUTO, (2, 4), BOTH, marks=pytest.mark.slow),
        # Devices along the axis that the rows are not split over sum their gradients.
        (EXPLICIT, (2, 2, 2), ("extra", "data")),
    ],
    ids=str,
)
def test_lookup_by_exchange_gives_the_rows_bit_for_bit_and_their_gradient(kind, shape, rows):
    mesh = mesh_of(shape, kind)
    table, batch = stripe(mesh, SPEC(rows)), mesh.axis_names
    with jax.set_mesh(mesh):
        arguments = table, put(mesh, BATCHES[0], batch), put(mesh, WEIGHTS[0], batch)
        compiled = lookup_and_gradient.lower(*arguments).compile()
        found = compiled(*arguments)
    if rows == batch:
        assert {each.kind for each in collectives(compiled)} == {"all-to-all"}
    expected, expected_gradient = lookup_and_gradient(TABLE, BATCHES[0], WEIGHTS[0])
    equal(found[0], expected)
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, SPEC(batch)), 3)
    assert found[1].array.sharding.is_equivalent_to(table.sharding, 2)
    near(on_host(found[1]), expected_gradient, atol=1e-4)


@pytest.mark.slow
def test_ids_that_the_devices_do_not_divide_are_looked_up_in_every_shard():
    table = stripe(mesh_of((2, 4)))
    batches = [np.full(shape, 5, np.int32) for shape in ((), (0,), (5, 2))]
    found = jax.jit(lambda table: tuple(te.lookup(table, ids) for ids in batches))(table)
    equal(found, tuple(TABLE[ids] for ids in batches))


@functools.cache
def roomy_table():
    return stripe(mesh_of((1, 2)), capacity=8.0)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    ids=st.lists(
        st.integers(-(2**31), 2**31 - 1) | st.integers(-2, VOCAB + 2), min_size=16, max_size=16
    ),
    policy=st.sampled_from(("nan", "clip", "zero")),
)
def test_lookup_by_exchange_of_any_ids(ids, policy):
    ids = np.array(ids, np.int32)
    expected = loop_lookup(TABLE, ids, out_of_range=policy)
    equal(te.lookup(roomy_table(), ids, out_of_range=policy), expected)


# --- ids that find no room


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [0, 1], ids=["first hop", "last hop"])
def test_rows_that_do_not_fit_on_either_hop_are_nan_and_counted(narrow, monkeypatch):
    def plan(*arguments):
        planned = list(axis_by_axis(*arguments))
        planned[narrow] = planned[narrow]._replace(room=8)
        return tuple(planned)

    monkeypatch.setattr(table_split, "plan_hops", plan)
    # No other test has this capacity, and so the program of this one: 8 of the 18 ids that each
    # device asks of one owner fit on the narrow hop.
    mesh = mesh_of((2, 4))
    table = stripe(mesh, capacity=16 + narrow)
    ids = np.tile(owned_by_one(18), (8, 1))
    weights = normal(20, *ids.shape, WIDTH)
    rows, gradient = lookup_and_gradient(table, put(mesh, ids, BOTH), put(mesh, weights, BOTH))
    lost = np.isnan(np.asarray(rows)).any(-1)
    assert (lost.sum(axis=1) == 10).all()
    # The devices of a column ask for the same rows: their requests merge before the last hop.
    dropped = te.sharding.exchange_load(table, ids).dropped
    assert dropped in ({8 * 10}, {4 * 10, 2 * 10})[narrow]
    expected = np.zeros_like(TABLE)
    np.add.at(expected, ids, np.where(lost[..., None], 0, weights))
    equal(np.asarray(rows)[~lost], TABLE[ids[~lost]])
    near(on_host(gradient), expected, atol=1e-4)


@pytest.mark.slow
def test_ids_that_find_no_room_read_as_nan_and_get_no_update():
    mesh, same = mesh_of((1, 8)), owned_by_one(18)
    ids = np.tile(same, (8, 1))
    crowded, roomy = stripe(mesh), stripe(mesh, capacity=8.0)
    room = crowded.split.hops(8, 18)[0].room
    load = te.sharding.exchange_load(crowded, ids)
    assert load.dropped == 8 * (len(same) - room) > 0
    assert load.rows.tolist() == [[0, 0, 8 * room, 0, 0, 0, 0, 0]]
    assert te.sharding.exchange_load(roomy, ids).dropped == 0
    held = same[np.argsort(crowded.split.order.slots(same))[:room]]

    params = {"t": crowded}
    state = placed_state(ADAM, params)
    ones = put(mesh, np.ones((*ids.shape, WIDTH), np.float32), BOTH)
    params, state, value, _ = row_step(params, state, put(mesh, ids, BOTH), ones)
    assert np.isnan(value)
    gradient, expected = np.zeros_like(TABLE), TABLE.copy()
    gradient[held], expected[held] = 8, TABLE[held] - RATE
    near(on_host(state[0].mu["t"]), 0.1 * gradient, rtol=1e-6)
    near(on_host(params["t"]), expected, atol=1e-5)


# --- errors


def by_rows(table, ids, loss=lambda params: 0.0):
    return jax.eval_shape(te.rows.value_and_grad(loss, ids={"t": ids}), {"t": table})


def load(table, ids):
    return te.sharding.exchange_load(table, ids)


def updated(table):
    """By a gradient that does not know the owners."""
    sgd = optax.sgd(1.0)
    grads = {"t": te.rows.RowGradient(jnp.array([1, 3]), jnp.ones([2, WIDTH]), VOCAB)}
    return te.rows.update(sgd, grads, sgd.init({"t": table}), {"t": table})


def mean(table):
    def of_one(ids):
        step = te.rows.value_and_grad(lambda p: te.lookup(p["t"], ids).sum(), ids={"t": ids})
        return te.rows.pmean(step({"t": table})[1], "i")["t"].values

    return jax.eval_shape(jax.vmap(of_one, axis_name="i"), np.zeros((1, 8, 1), np.int32))


MESH = mesh_of((2, 4))
TIED = "table: wanted rows in vocabulary order for a tied output layer: leave it out of `stripe`"
LARGE = jax.ShapeDtypeStruct((2**31 - 20, 1), np.float32)
ERRORS = {
    r"stripe: wanted rows over mesh axes, and whole columns, for t, got .*None, 'model'\)$": (
        lambda _: stripe(MESH, SPEC(None, "model"))
    ),
    r"batch_axes: wanted the mesh axes of the rows of t, \('model',\), among others.*'data',\)$": (
        lambda _: stripe(MESH, SPEC("model"), batch_axes=("data",))
    ),
    r"mesh: wanted a number of devices along \('data',\) that divides 16 virtual shards, to "
    r"stripe t, got 3$": lambda _: stripe(mesh_of((3,))),
    r"virtual_shards: wanted a power of two, got 12$": lambda _: stripe(MESH, shards=12),
    r"capacity: wanted a finite number above 0, got 0$": lambda _: stripe(MESH, capacity=0),
    r"table: wanted at most 2147483627 rows, to take 20 of them, got 2147483632$": (
        lambda _: by_rows(stripe(MESH, table=LARGE), np.arange(160))
    ),
    f"{TIED}, got": lambda table: te.linear_logits(TABLE, table),
    f"{TIED}, .*": lambda table: te.linear_cross_entropy(TABLE, table, np.arange(VOCAB)),
    r"ids: wanted split over the mesh axes of the table's rows, \('data', 'model'\), to exchange": (
        lambda table: by_rows(table, np.arange(5))
    ),
    r"table: wanted a striped table \(see `stripe` of shard_params\), got a contiguous": (
        lambda _: load(shard(MESH, SPEC("model")), BATCHES[0])
    ),
    r"ids: wanted a first dimension that 8 devices divide, got shape \[5\]$": (
        lambda table: load(table, np.arange(5))
    ),
    r"ids: wanted values on the host, outside of jit, got a traced int32\[8\]": (
        lambda table: jax.jit(lambda ids: load(table, ids).dropped)(jnp.zeros(8, jnp.int32))
    ),
    r"max_rows: wanted ": lambda table: te.sharding.exchange_load(table, BATCHES[0], max_rows=0),
    r"grads: wanted the gradient of a striped table as `value_and_grad` returns it: .*plain": (
        updated
    ),
    r"grads: wanted rows of a table that is whole on each device, got those of a stri": mean,
}


@pytest.mark.parametrize("message", ERRORS)
def test_invalid_stripes_and_exchanges_raise_errors(message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        ERRORS[message](stripe(MESH))


@pytest.mark.slow
def test_looking_up_other_ids_than_given_raises_an_error_or_reads_nan():
    table, ids = stripe(MESH), put(MESH, np.zeros((8, 2), np.int32), BOTH)
    look = lambda ids: lambda params: te.lookup(params["t"], ids).sum()
    with pytest.raises(ValueError, match="out_specs"):
        by_rows(table, ids, look(np.arange(5)))
    shifted = jax.jit(
        lambda table, ids: te.rows.value_and_grad(look(ids + 1), ids={"t": ids})(table)[0]
    )
    assert np.isnan(shifted({"t": table}, ids))
