"""Rows by exchange: lookups in striped tables, ids that find no room, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near
from jax.sharding import NamedSharding
from sharded_tables import (
    BATCHES,
    BOTH,
    EXPLICIT,
    PAD,
    SPEC,
    TABLE,
    VOCAB,
    WEIGHTS,
    WIDTH,
    mesh_of,
    normal,
    on_host,
    owned_by_one,
    put,
    shard,
    stripe,
)

import transformer_embed as te
from transformer_embed._src.tables.sharded import table_split
from transformer_embed._src.tables.sharded.buffers import plan_buffers


@jax.jit
def lookup_and_gradient(table, ids, weights):
    rows, back = jax.vjp(lambda table: te.lookup(table, ids, pad_id=PAD), table)
    return rows, back(weights)[0]


def test_lookup_by_exchange_gives_the_rows_bit_for_bit_and_their_gradient():
    """Devices along the axis that the rows are not split over sum their gradients."""
    mesh = mesh_of((2, 2, 2), EXPLICIT)
    table, batch = stripe(mesh, SPEC(("extra", "data"))), mesh.axis_names
    with jax.set_mesh(mesh):
        rows, gradient = lookup_and_gradient(table, *put(mesh, (BATCHES[0], WEIGHTS[0]), batch))
    expected, expected_gradient = lookup_and_gradient(TABLE, BATCHES[0], WEIGHTS[0])
    equal(rows, expected)
    assert rows.sharding.is_equivalent_to(NamedSharding(mesh, SPEC(batch)), 3)
    assert gradient.array.sharding.is_equivalent_to(table.sharding, 2)
    near(on_host(gradient), expected_gradient, atol=1e-4)


# --- ids that find no room


@pytest.mark.slow
@pytest.mark.parametrize("narrow", ["room", "distinct"])
def test_rows_that_do_not_fit_are_nan_and_counted(narrow, monkeypatch):
    def plan(*arguments):
        room, distinct = plan_buffers(*arguments)
        return (8, distinct) if narrow == "room" else (room, 8)

    monkeypatch.setattr(table_split, "plan_buffers", plan)
    # No other test has this capacity, and so the program of this one: of the 18 ids that each
    # device asks of one owner, 8 find room in its buffer, or in the owner's.
    mesh = mesh_of((2, 4))
    table = stripe(mesh, capacity=16 + len(narrow))
    ids = np.tile(owned_by_one(18), (8, 1))
    weights = normal(20, *ids.shape, WIDTH)
    rows, gradient = lookup_and_gradient(table, *put(mesh, (ids, weights), BOTH))
    lost = np.isnan(np.asarray(rows)).any(-1)
    assert (lost.sum(axis=1) == 10).all()
    # The owner counts each slot once.
    load = te.sharding.exchange_load(table, ids)
    assert load.dropped == {"room": 8 * 10, "distinct": 10}[narrow]
    equal(load.rows.reshape(-1), np.where(np.arange(8) == 2, 8, 0))
    expected = np.zeros_like(TABLE)
    np.add.at(expected, ids, np.where(lost[..., None], 0, weights))
    equal(np.asarray(rows)[~lost], TABLE[ids[~lost]])
    near(on_host(gradient), expected, atol=1e-4)


# --- errors


def by_rows(table, ids, loss=lambda params: 0.0):
    return jax.eval_shape(te.rows.value_and_grad(loss, ids={"t": ids}), {"t": table})


load = te.sharding.exchange_load


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
        lambda table: jax.eval_shape(functools.partial(load, table), jnp.zeros(8, jnp.int32))
    ),
    r"max_rows: wanted ": lambda table: load(table, BATCHES[0], max_rows=0),
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
