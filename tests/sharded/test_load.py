"""The load of an exchange, counted on the host."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interleaved_tables import (
    AUTO,
    SPEC,
    WIDTH,
    interleave,
    mesh_of,
    owned_by_one,
    put,
)
from jax.sharding import AbstractMesh, NamedSharding

import transformer_embed as te
from transformer_embed._src.sharded.layout import Layout
from transformer_embed._src.sharded.row_order import RowOrder


@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)], ids=str)
def test_the_load_on_the_host_counts_what_the_devices_do(shape):
    mesh = mesh_of(shape)
    table = interleave(mesh)
    rng = np.random.default_rng(5)
    ids = np.stack(
        [rng.permutation(owned_by_one(36))[:18].reshape(2, 9) for _ in range(8)]
    ).reshape(16, 9)
    rows = jax.jit(te.lookup)(table, put(mesh, ids))
    lost = {
        (device, id_)
        for device, id_, row in zip(
            np.repeat(np.arange(8), 18),
            ids.ravel(),
            np.asarray(rows).reshape(-1, WIDTH),
            strict=True,
        )
        if np.isnan(row).any()
    }
    load = te.sharding.exchange_load(table, ids)
    assert load.rows.shape == shape
    assert (load.dropped > 0) == bool(lost)
    if len(table.layout.hops(8, 18)) == 1:
        assert load.dropped == len(lost)


@pytest.mark.parametrize("shape", [(1, 8), (8, 8)], ids=str)
def test_zipf_ids_load_no_device_more_than_1_5_times_the_mean(shape):
    vocab_size, ids, devices = 100_000, 1024, math.prod(shape)
    weights = np.cumsum(np.arange(1, vocab_size + 1) ** -1.05)
    batch = np.searchsorted(weights / weights[-1], np.random.default_rng(0).random((devices, ids)))
    mesh = AbstractMesh(shape, ("data", "model"), axis_types=(AUTO,) * 2)
    order = RowOrder(vocab_size, 4096)
    array = jax.ShapeDtypeStruct((order.size, WIDTH), jnp.float32)
    sharding = NamedSharding(mesh, SPEC(("data", "model")))
    table = te.sharding.Sharded(array, Layout(order, sharding, ("data", "model"), 1.0))
    load = te.sharding.exchange_load(table, batch)
    assert load.dropped == 0
    assert load.rows.max() <= 1.5 * load.rows.mean()


@pytest.mark.parametrize("max_rows", [1, 5, 12, 40])
def test_the_load_of_a_step_with_max_rows_counts_ids_that_read_as_nan(max_rows):
    mesh = mesh_of((2, 4))
    table = interleave(mesh)
    # 18 ids of one owner on each device, twice: more than an exchange of few has room for.
    ids = np.tile(owned_by_one(18), (8, 2))

    @jax.jit
    def rows(params, ids):
        def loss(params):
            found = te.lookup(params["t"], ids)
            return jnp.sum(found), found

        return te.rows.value_and_grad(loss, ids={"t": ids}, has_aux=True, max_rows=max_rows)(
            params
        )[0][1]

    lost = np.isnan(np.asarray(rows({"t": table}, put(mesh, ids)))).any(-1)[:, :18]
    load = te.sharding.exchange_load(table, ids, max_rows=max_rows)
    assert load.dropped == lost.sum() >= 8 * max(18 - max_rows, 0)
    if len(table.layout.hops(8, min(18, max_rows))) == 1:
        assert load.rows.sum() == 8 * 18 - lost.sum()


def test_max_rows_is_checked():
    table, ids = interleave(mesh_of((2, 4))), np.zeros(8, np.int32)
    with pytest.raises(ValueError, match=r"^max_rows: wanted "):
        te.sharding.exchange_load(table, ids, max_rows=0)
