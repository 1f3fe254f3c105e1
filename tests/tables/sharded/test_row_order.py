"""The order of rows in the array of a striped table."""

import jax
import numpy as np
import pytest
from compare import equal
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_tables import BOTH, SPEC, mesh_of, stripe

from transformer_embed._src.tables.sharded.row_order import RowOrder


@settings(max_examples=25)
@given(vocab_size=st.integers(1, 3000), bits=st.integers(1, 9))
def test_dealing_gives_every_id_a_position_of_its_own(vocab_size, bits):
    order = RowOrder(vocab_size, 2**bits)
    ids = np.arange(vocab_size, dtype=np.int32)
    slots = order.slots(ids)
    assert slots.dtype == np.int32
    assert len(np.unique(slots)) == vocab_size
    assert slots.min() >= 0
    assert slots.max() < order.size < vocab_size + 2**bits
    equal(order.ids(slots), ids)
    every = order.ids(np.arange(order.size, dtype=np.int32))
    equal(np.sort(every), np.arange(order.size))


def test_a_device_deals_as_the_host_does():
    order, ids = RowOrder(10**6, 4096), np.arange(10**6, dtype=np.int32)
    equal(jax.jit(order.slots)(ids), order.slots(ids))


@pytest.mark.parametrize("devices", [2, 8, 64, 4096])
def test_neighbouring_ids_reach_different_devices_on_every_mesh(devices):
    order = RowOrder(10**6, 4096)
    owners = order.slots(np.arange(10**6, dtype=np.int32)) // (order.size // devices)
    for start in (0, 4096, 4096 * 17):
        assert len(np.unique(owners[start : start + devices])) == devices
    assert np.bincount(owners, minlength=devices).max() <= 10**6 // devices + 1
    # So do ids that are a round of dealing apart: as evenly as hashed ones.
    apart = np.bincount(owners[:: 4096 // 8], minlength=devices)
    assert apart.max() <= max(4 * apart.mean(), 8)


def test_an_striped_array_is_the_same_on_every_mesh():
    first, *others = (
        np.asarray(stripe(mesh_of(shape), SPEC(rows)).array)
        for shape, rows in (((1, 1), BOTH), ((2, 4), BOTH), ((2, 4), "model"))
    )
    for other in others:
        equal(other, first)
