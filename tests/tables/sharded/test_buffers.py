"""The size of the buffers of an exchange."""

import math

import jax
import mpmath
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from sharded_tables import AUTO, BOTH, stripe

import transformer_embed as te
from transformer_embed._src.tables.sharded import buffers


@pytest.mark.parametrize(
    ("trials", "share"), [(16384, 1 / 256), (16384, 1 / 4096), (10, 1 / 2)], ids=str
)
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


@pytest.mark.slow
@pytest.mark.parametrize("hot_rows", [1024, 8192])
def test_ids_that_devices_share_need_no_more_room_than_others(hot_rows):
    mesh, rng = AbstractMesh((8, 8), BOTH, axis_types=(AUTO,) * 2), np.random.default_rng(0)
    table = stripe(mesh, table=jax.ShapeDtypeStruct((64 * 10**6, 2), np.float32), shards=4096)
    hot = rng.integers(0, 64 * 10**6, hot_rows)
    ids = np.stack([rng.permutation(hot)[:1024] for _ in range(64)])
    assert te.sharding.exchange_load(table, ids).dropped == 0
