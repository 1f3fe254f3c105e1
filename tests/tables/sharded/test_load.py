"""The load of an exchange, counted on the host."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import near
from jax.sharding import AbstractMesh
from sharded_tables import (
    AUTO,
    BOTH,
    TABLE,
    WIDTH,
    mesh_of,
    on_host,
    owned_by_one,
    put,
    stripe,
)

import transformer_embed as te
from transformer_embed._src.tables.sharded import table_split


@pytest.mark.parametrize("shape", [(1, 8), (8, 8)], ids=str)
def test_zipf_ids_load_no_device_more_than_1_5_times_the_mean(shape):
    vocab_size, ids, devices = 100_000, 1024, math.prod(shape)
    weights = np.cumsum(np.arange(1, vocab_size + 1) ** -1.05)
    batch = np.searchsorted(weights / weights[-1], np.random.default_rng(0).random((devices, ids)))
    mesh = AbstractMesh(shape, BOTH, axis_types=(AUTO,) * 2)
    rows = jax.ShapeDtypeStruct((vocab_size, WIDTH), jnp.float32)
    table = stripe(mesh, table=rows, shards=4096)
    load = te.sharding.exchange_load(table, batch)
    assert load.dropped == 0
    assert load.rows.max() <= 1.5 * load.rows.mean()


def test_requests_that_find_no_room_at_the_sender_or_the_owner_are_both_counted(monkeypatch):
    """Each device can send 4 slots to an owner, which can receive 6 distinct ones."""
    monkeypatch.setattr(table_split, "plan_buffers", lambda *_: (4, 6))
    table, ids = stripe(mesh_of((8,))), np.sort(owned_by_one(18))
    # Ascending slots: of each device, the first 4 are sent.
    ids = ids[np.argsort(table.split.slots(ids))]
    asked = [ids[0:6], ids[1:4], ids[8:14], *[ids[:6]] * 5]
    sent = np.unique(np.concatenate([each[:4] for each in asked]))
    batch = np.stack([np.resize(each, 6) for each in asked])
    load = te.sharding.exchange_load(table, batch)
    assert load.dropped == sum(len(each[4:]) for each in asked) + len(sent) - 6
    assert load.rows.tolist() == [0, 0, 6, 0, 0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [1, 40])
def test_ids_without_room_read_as_nan_are_counted_and_get_no_update(max_rows):
    """`max_rows` bounds the rows of each device's part of the batch."""
    mesh, sgd = mesh_of((2, 4)), optax.sgd(1.0)
    # 18 ids of one owner on each device, twice: more than an exchange of few has room for.
    table, ids = stripe(mesh), np.tile(owned_by_one(18), (8, 2))

    @jax.jit
    def step(params, ids):
        def loss(params):
            found = te.lookup(params["t"], ids)
            return jnp.sum(found), found

        step = te.rows.value_and_grad(loss, ids={"t": ids}, has_aux=True, max_rows=max_rows)
        (_, rows), grads = step(params)
        return te.rows.update(sgd, grads, sgd.init(params), params)[0], rows

    after, rows = step({"t": table}, put(mesh, ids, BOTH))
    lost = np.isnan(np.asarray(rows)).any(-1)
    expected = TABLE.copy()
    np.add.at(expected, ids[~lost], -1)
    near(on_host(after["t"]), expected, atol=1e-5)
    load = te.sharding.exchange_load(table, ids, max_rows=max_rows)
    assert load.rows.shape == (2, 4)
    assert 2 * load.dropped == lost.sum() >= 16 * max(18 - max_rows, 0)
    assert load.rows.sum() == (~lost[0, :18]).sum()
