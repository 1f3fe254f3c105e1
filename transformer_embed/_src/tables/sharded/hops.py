"""The hops of an exchange of rows: the mesh axes that requests go over, and their buffers.

Over a hop, a device can send `room` slots to each other device. There are two routes: one hop from
every device to every other, or one mesh axis after the other. In the second, a hop ends at a device
that merges what its peers ask for. The loads of such a hop are larger and so more equal, but each
row is sent once for each hop. `plan_hops` chooses the route with the smaller buffers, on the host,
while a step is traced.

Buffers overflow in less than one step in 1e9, if each device draws its ids independently and their
owners are evenly spread, as striped rows are: of n slots, each goes to a part with probability
p, so their number is binomial, and more than r go there with the probability
`sum(C(n, k) p**k (1 - p)**(n - k) for k > r)`. All parts of all devices of all hops together must
stay below 1e-9.
"""

import functools
import math
from typing import NamedTuple

from transformer_embed._src.partitioning import Axes

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
    # In a hop, each device fills a buffer for each part and one with what it receives.
    checks = sum(devices * (parts + 1) for _, parts in legs)
    hops, senders, receivers, most = [], 1, owners, min(asked, shard * owners)
    for axes, parts in legs:
        receivers //= parts
        share, stride = receivers / owners, shard * receivers
        # No device asks for more than `most` slots, and no part owns more than `stride` of them.
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
    # Slow to load, and only an exchange needs it.
    from scipy.special import bdtrc  # noqa: PLC0415

    mean = trials * share
    room = math.ceil(max(mean, 1, min(capacity * mean, trials)))
    while room < trials and bdtrc(room, trials, share) > OVERFLOW_PROBABILITY / checks:
        room += 1
    return room
