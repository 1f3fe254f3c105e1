"""Rows by exchange: the room for ids, ids that find none, and what a step sends and holds."""

import functools
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import optax
import pytest
import scipy.special
from collectives import collectives
from compare import equal
from jax import NamedSharding, P
from meshes import EXPLICIT, mesh_of, put

import transformer_embed as te
from transformer_embed._src.rows import buffers, exchange

ROWS, WIDTH = 304, 8
BOTH = ("data", "model")
MESH = mesh_of((2, 4), BOTH, EXPLICIT)
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
SGD, MOMENTUM = optax.sgd(1.0), optax.sgd(1.0, momentum=0.9)


def loss(params, ids):
    return jnp.sum(te.lookup(params["t"], ids))


# --- the size of buffers


@pytest.mark.parametrize(("trials", "share"), [(16384, 1 / 256), (16384, 1 / 4096), (10, 1 / 2)])
def test_buffers_are_the_smallest_with_the_stated_probability(trials, share):
    checks = 100_000
    room = buffers._buffer_size(trials, share, checks, 1.0)

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


# With two owners, a third of all buffers is for what devices receive.
@pytest.mark.parametrize(("asked", "owners", "devices"), [(4096, 16, 64), (2**16, 2, 2)])
def test_all_buffers_together_overflow_with_the_stated_probability(
    monkeypatch, asked, owners, devices
):
    """Of each device, a buffer for each owner, and one for what it receives."""
    monkeypatch.setattr(buffers, "TILE", 1)
    room, received = buffers.plan_buffers(asked, owners, 10**6, devices, 1.0)

    def overflow(room, received):
        of_owners = devices * owners * scipy.special.bdtrc(room, asked, 1 / owners)
        return of_owners + devices * scipy.special.bdtrc(received, asked * owners, 1 / owners)

    assert overflow(room, received) <= 1e-9
    assert overflow(room - 2, received - 20) > 1e-9


def test_capacity_raises_and_never_lowers():
    capacities = (0.1, 1.0, 2.0, 8.0, math.inf)
    rooms = [buffers.plan_buffers(1024, 8, 10**6, 8, each)[0] for each in capacities]
    assert rooms[0] == rooms[1] < rooms[2] == 256 < rooms[3] == rooms[4] == 1024


def test_buffers_have_no_more_room_than_an_owner_has_rows():
    assert buffers.plan_buffers(1024, 8, 16, 8, math.inf) == (16, 16)


def test_spread_rows_are_asked_for_evenly():
    """Contiguous ones of a vocabulary that is sorted by frequency are not."""
    over = NamedSharding(jax.sharding.AbstractMesh((8, 8), BOTH), P(BOTH))
    ids = np.random.default_rng(0).zipf(1.2, (64, 1024)) % 10**6
    config = te.EmbedderConfig(10**6, 2, row_multiple=2**12, spread=True)
    table = jax.ShapeDtypeStruct((config.rows, 2), np.float32, sharding=over)
    even, uneven = (te.rows.exchange_load(table, ids, config=each) for each in (config, None))
    assert even["dropped"] == 0 < uneven["dropped"]
    assert even["rows"].max() < 1.5 * even["rows"].mean()
    assert uneven["rows"].max() > 3 * uneven["rows"].mean()


@pytest.mark.parametrize("owners", [("model",), BOTH])
def test_the_load_is_all_that_devices_ask_for(owners):
    """Also what does not fit. The devices along `data` ask their own owners, unless these axes
    split the rows too."""
    sharding = NamedSharding(jax.sharding.AbstractMesh((2, 4), BOTH), P(owners))
    table = jax.ShapeDtypeStruct((4096, 2), np.float32, sharding=sharding)
    ids = np.random.default_rng(0).integers(0, 1200, (8, 512))
    shard = 4096 // (8 if len(owners) == 2 else 4)
    expected = np.zeros(8, int)
    for owner in range(8):
        askers = range(8) if len(owners) == 2 else range(owner // 4 * 4, owner // 4 * 4 + 4)
        rows = {row for device in askers for row in ids[device]}
        first = (owner if len(owners) == 2 else owner % 4) * shard
        expected[owner] = len(rows & {*range(first, first + shard)})
    load = te.rows.exchange_load(table, ids)
    assert load["dropped"] > 0
    equal(load["rows"].reshape(-1), expected)


# --- ids that find no room


def test_load_adds_the_rows_that_each_owner_drops(monkeypatch):
    plan_buffers = buffers.plan_buffers
    plan = lambda *arguments: plan_buffers(*arguments)._replace(most_received=8)
    monkeypatch.setattr(exchange, "plan_buffers", plan)
    sharding = NamedSharding(jax.sharding.AbstractMesh((2, 4), BOTH), P(BOTH))
    table = jax.ShapeDtypeStruct((512, 2), np.float32, sharding=sharding)
    # 18 rows of the third owner and 12 of the fifth.
    asked = [*range(128, 146), *range(256, 268)]
    load = te.rows.exchange_load(table, np.tile(np.int32(asked), (8, 1)), capacity=16.0)
    assert load["dropped"] == 10 + 4


@pytest.mark.slow
@pytest.mark.parametrize("narrow", ["most_sent", "most_received"])
def test_rows_that_do_not_fit_are_nan_and_counted(narrow, monkeypatch):
    def plan(*arguments):
        return plan_buffers(*arguments)._replace(**{narrow: 8})

    plan_buffers = buffers.plan_buffers
    monkeypatch.setattr(exchange, "plan_buffers", plan)
    # Of the 12 ids that each device asks of the third owner, 8 find room in its buffer, or in the
    # owner's.
    ids = np.tile(np.arange(12, dtype=np.int32) + 2 * ROWS // 8, (8, 1))

    @jax.jit
    def rows_and_gradient(table, batch):
        read = lambda params: te.lookup(params["t"], batch)
        read = te.rows.with_exchange(read, ids={"t": batch}, capacity=16.0)
        rows, back = jax.vjp(lambda table: read({"t": table}), table)
        return rows, *back(jnp.ones_like(rows))

    with jax.set_mesh(MESH):
        table, batch = put(MESH, (TABLE, ids), BOTH)
        rows, gradient = rows_and_gradient(table, batch)
    assert gradient.sharding.is_equivalent_to(table.sharding, 2)
    is_lost = np.isnan(np.asarray(rows)).any(-1)
    assert (is_lost.sum(axis=1) == 4).all()
    # The owner counts each row once.
    load = te.rows.exchange_load(table, ids, capacity=16.0)
    assert load["dropped"] == {"most_sent": 8 * 4, "most_received": 4}[narrow]
    equal(load["rows"].reshape(-1), np.where(np.arange(8) == 2, 12, 0))
    expected = np.zeros_like(TABLE)
    np.add.at(expected, ids[~is_lost], 1)
    equal(np.asarray(rows)[~is_lost], TABLE[ids[~is_lost]])
    equal(gradient, expected)


def test_room_that_no_request_uses_holds_no_nan():
    """Nothing reads it, but jax_debug_nans would stop at it."""
    with jax.set_mesh(MESH), jax.debug_nans(True):
        table, ids = put(MESH, (TABLE, np.arange(8, dtype=np.int32)), BOTH)
        read = lambda params: te.lookup(params["t"], ids)
        rows = te.rows.with_exchange(read, ids={"t": ids})({"t": table})
    equal(rows, TABLE[:8])


# --- what a step sends and holds


# Three equal ids on each device. 16 bits round their sum down by 1, and that of all devices up by 1.
WEIGHT, IDS = 683, np.repeat(np.int32([5, 6]), [7 * 3, 3])
MANY_ROWS = 2**18


@functools.cache
def weighted_step(capacity):
    """A compiled step in 16 bits, and its arguments."""

    def weighted_loss(params, ids):
        return WEIGHT * loss(params, ids)

    def step(params, state, ids):
        by_rows = te.rows.value_and_grad(weighted_loss, ids={"t": ids}, capacity=capacity)
        value, grads = by_rows(params, ids)
        return *te.rows.apply_gradients(MOMENTUM, grads, state, params), value

    table = np.zeros((MANY_ROWS, WIDTH), np.float16)
    with jax.set_mesh(MESH):
        params, ids = put(MESH, {"t": table}, "model"), put(MESH, IDS, BOTH)
        arguments = params, MOMENTUM.init(params), ids
        return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile(), arguments


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_step_writes_in_place_and_sends_and_holds_only_rows_of_the_batch(capacity):
    """Also where no gradient waits for the rows: that of a sum."""
    compiled, _ = weighted_step(capacity)
    memory, size = compiled.memory_analysis(), 2 * WIDTH * MANY_ROWS // 4
    assert memory.alias_size_in_bytes >= 2 * size
    assert memory.temp_size_in_bytes < size / 4
    sent = [each for each in collectives(compiled) if each.largest > 1]
    assert max(each.largest for each in sent) <= 8 * len(IDS) * WIDTH
    if capacity:
        # Owners get ids, send rows and get gradients. Each two that have one shard add what they got.
        assert sorted(each.kind for each in sent) == ["all-reduce"] * 2 + ["all-to-all"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_gradients_of_16_bits_are_summed_over_all_devices_before_they_round(capacity):
    compiled, arguments = weighted_step(capacity)
    after, _, _ = compiled(*arguments)
    expected = np.zeros((MANY_ROWS, WIDTH), np.float16)
    expected[5], expected[6] = -14344, -2048
    equal(np.asarray(after["t"]), expected)


@pytest.mark.slow
def test_a_step_outside_of_jit_compiles_one_program_for_the_rows(caplog):
    """Of each process, otherwise some 140 in every step."""
    grads = {"t": te.rows.RowGradient(np.arange(8), np.ones((8, WIDTH), np.float32), ROWS)}
    with jax.set_mesh(MESH):
        params = put(MESH, {"t": TABLE}, BOTH)
        with jax.log_compiles():
            te.rows.apply_gradients(SGD, grads, SGD.init(params), params)
            first = len(caplog.records)
            te.rows.apply_gradients(SGD, grads, SGD.init(params), params)
    compiled = [each.message for each in caplog.records[first:] if "XLA comp" in each.message]
    assert len(compiled) == 1, compiled
