"""The hops of an exchange of rows: the mesh axes that requests go over, and their buffers.

Over a hop, a device can send `room` slots to each other device. There are two routes: one hop from
every device to every other, or one mesh axis after the other. In the second, a hop ends at a device
that merges what its peers ask for. The loads of such a hop are larger and so more equal, but each
row is sent once for each hop. `plan_hops` chooses the route with the smaller buffers, on the host,
while a step is traced.

Buffers overflow in less than one step in 1e9, if each device draws its ids independently and their
owners are evenly spread, as interleaved rows are: of n slots, each goes to a part with probability
p, so their number is binomial, and more than r - 1 go there with a probability of at most
`C(n, r) p**r (1 - p)**(n - r) * r (1 - p) / (r - n p)`, for r > n p (Feller, "An Introduction to
Probability Theory and Its Applications", volume 1 (1968), section VI.3, equation 3.4). All parts of
all devices of all hops together must stay below 1e-9.
"""

import functools
import math
from typing import NamedTuple

from transformer_embed._src.functional.partitioning import Axes

OVERFLOW_PROBABILITY = 1e-9
# Rows of a buffer come in whole tiles of a TPU.
TILE = 8


class Hop(NamedTuple):
    """One all-to-all of an exchange; static.

    Args:
        axes: the mesh axes that it goes over.
        parts: number of devices along them.
        stride: consecutive slots that belong to one part.
        room: slots that a device can send to each part.
        distinct: different slots that a device can receive.
    """

    axes: Axes
    parts: int
    stride: int
    room: int
    distinct: int


@functools.lru_cache
def plan_hops(
    asked: int, axes: Axes, sizes: tuple[int, ...], shard: int, devices: int, capacity: float
) -> tuple[Hop, ...]:
    """The hops with the smallest buffers for `asked` distinct slots per device.

    They go over mesh axes of these sizes, whose devices have `shard` slots each.
    """
    one_hop = [(axes, math.prod(sizes))]
    axis_by_axis = [((axis,), size) for axis, size in zip(axes, sizes, strict=True)]
    routes = [_hops(asked, legs, shard, devices, capacity) for legs in (one_hop, axis_by_axis)]
    return min(routes, key=lambda hops: sum(hop.parts * hop.room for hop in hops))


def _hops(
    asked: int, legs: list[tuple[Axes, int]], shard: int, devices: int, capacity: float
) -> tuple[Hop, ...]:
    """The hops over these axes, each with its number of devices."""
    owners = math.prod(parts for _, parts in legs)
    checks = sum(devices * (parts + 1) for _, parts in legs)
    hops, senders, receivers, most = [], 1, owners, min(asked, shard * owners)
    for axes, parts in legs:
        receivers //= parts
        share, stride = receivers / owners, shard * receivers
        room = min(_room(asked * senders, share, checks, capacity), most, stride)
        room = -(-room // TILE) * TILE
        senders *= parts
        most = min(_room(asked * senders, share, checks, capacity), parts * room, stride)
        hops.append(Hop(axes, parts, stride, room, most))
    return tuple(hops)


def _room(trials: int, share: float, checks: int, capacity: float) -> int:
    """The room that `trials` slots exceed seldom enough; at least `capacity` times their mean.

    Each slot goes this way with probability `share`, and seldom is a probability of at most
    OVERFLOW_PROBABILITY / checks.
    """
    if share == 1:
        return trials
    mean, limit = trials * share, math.log(OVERFLOW_PROBABILITY / checks)
    room = max(math.ceil(mean), 1)
    while room < trials and _log_overflow(trials, share, room + 1) > limit:
        room += 1
    return min(trials, max(room, math.ceil(min(capacity * mean, trials))))


def _log_overflow(n: int, p: float, r: int) -> float:
    """The logarithm of the bound above."""
    ways = math.lgamma(n + 1) - math.lgamma(r + 1) - math.lgamma(n - r + 1)
    tail = math.log(r * (1 - p) / (r - n * p))
    return ways + r * math.log(p) + (n - r) * math.log1p(-p) + tail
