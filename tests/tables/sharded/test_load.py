"""The load of an exchange, counted on the host."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from sharded_tables import (
    AUTO,
    BOTH,
    SPEC,
    WIDTH,
    mesh_of,
    owned_by_one,
    put,
    stripe,
)

import transformer_embed as te
from transformer_embed._src.tables.sharded.row_order import RowOrder
from transformer_embed._src.tables.sharded.table_split import TableSplit


@pytest.mark.parametrize("shape", [(1, 8), (8, 8)], ids=str)
def test_zipf_ids_load_no_device_more_than_1_5_times_the_mean(shape):
    vocab_size, ids, devices = 100_000, 1024, math.prod(shape)
    weights = np.cumsum(np.arange(1, vocab_size + 1) ** -1.05)
    batch = np.searchsorted(weights / weights[-1], np.random.default_rng(0).random((devices, ids)))
    mesh = AbstractMesh(shape, BOTH, axis_types=(AUTO,) * 2)
    order = RowOrder(vocab_size, 4096)
    array = jax.ShapeDtypeStruct((order.size, WIDTH), jnp.float32)
    table = te.sharding.Sharded(
        array, TableSplit(order, NamedSharding(mesh, SPEC(BOTH)), BOTH, 1.0)
    )
    load = te.sharding.exchange_load(table, batch)
    assert load.dropped == 0
    assert load.rows.max() <= 1.5 * load.rows.mean()


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [1, 40])
def test_the_load_of_a_step_with_max_rows_counts_ids_that_read_as_nan(max_rows):
    """It bounds the rows of each device's part of the batch."""
    mesh = mesh_of((2, 4))
    # 18 ids of one owner on each device, twice: more than an exchange of few has room for.
    table, ids = stripe(mesh), np.tile(owned_by_one(18), (8, 2))

    def loss(params):
        found = te.lookup(params["t"], ids)
        return jnp.sum(found), found

    step = te.rows.value_and_grad(
        loss, ids={"t": put(mesh, ids, BOTH)}, has_aux=True, max_rows=max_rows
    )
    (_, rows), _ = jax.jit(step)({"t": table})
    lost = np.isnan(np.asarray(rows)).any(-1)[:, :18]
    load = te.sharding.exchange_load(table, ids, max_rows=max_rows)
    assert load.rows.shape == (2, 4)
    assert load.dropped == lost.sum() >= 8 * max(18 - max_rows, 0)
    if len(table.split.hops(8, min(18, max_rows))) == 1:
        assert load.rows.sum() == 8 * 18 - lost.sum()
