"""The hops of an exchange, and the size of their buffers."""

import math

import mpmath
import numpy as np
import pytest

from transformer_embed._src.tables.sharded import hops
from transformer_embed._src.tables.sharded.load import simulate


@pytest.mark.parametrize(
    ("trials", "share"), [(16384, 1 / 256), (16384, 1 / 4096), (10, 1 / 2)], ids=str
)
def test_buffers_are_the_smallest_with_the_stated_probability(trials, share):
    checks = 100_000
    room = hops._room(trials, share, checks, 1.0)

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
        hops.plan_hops(1024, ("a",), (8,), 10**6, 8, capacity)[0].room
        for capacity in (0.1, 1.0, 2.0, 8.0, math.inf)
    ]
    assert rooms[0] == rooms[1] < rooms[2] == 256 < rooms[3] == rooms[4] == 1024


@pytest.mark.parametrize(
    ("shape", "route"),
    [((16, 16), [("data", "model")]), ((16, 32), [("data",), ("model",)])],
    ids=str,
)
def test_large_meshes_route_over_one_axis_after_another(shape, route):
    devices = math.prod(shape)
    planned = hops.plan_hops(16384, ("data", "model"), shape, 10**9 // devices, devices, 1.0)
    assert [hop.axes for hop in planned] == route
    assert sum(hop.parts * hop.room for hop in planned) < 16384 * 3.2


@pytest.mark.slow
@pytest.mark.parametrize("hot_rows", [1024, 8192])
def test_slots_that_devices_share_need_no_more_room_than_others(hot_rows):
    asked, shape, axes = 1024, (8, 8), ("data", "model")
    rng = np.random.default_rng(0)
    planned = hops.plan_hops(asked, axes, shape, 10**6, 64, 1.0)
    hot = np.unique(rng.integers(0, 64 * 10**6, hot_rows))
    drawn = [np.unique(rng.permutation(hot)[:asked]) for _ in range(64)]
    assert simulate(planned, drawn, dict(zip(axes, shape, strict=True)), axes)[1] == 0


def test_slots_beyond_those_that_a_device_can_receive_are_counted_as_dropped():
    hop = hops.Hop(("data",), parts=1, stride=10, room=8, distinct=2)
    assert simulate([hop], [np.arange(3)], {"data": 1}, ("data",))[1] == 1
