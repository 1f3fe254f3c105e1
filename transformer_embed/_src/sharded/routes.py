"""Routes of an exchange of rows: the mesh axes over which positions go to the owners of their rows,
and the size of the buffers.

Buffers have a fixed size: over a hop, a device can send `room` positions to each other one. Of the
routes that overflow in less than one step in 1e9, `plan_route` chooses the one with the smallest
buffers. That bound is for hashed ids that each device draws independently. If devices ask for the
same rows, `simulate` has found more room left, not less. The routes:

    one hop                  from every device to every other. Good for few devices, whose loads are
    large and thus nearly equal. one axis, then another   a first hop to the device in the owner's
    row of the mesh, which merges what its peers ask for; a second one to
                             the owner. The loads of a hop are larger and so more equal, but each
                             row is sent twice.
    direct, then the rest    one hop for as many positions as a pair of devices has on average. The
    rest, some 7 % if the average is 32,
                             goes over one axis after the other.

All of this happens on the host, while a step is traced. `exchange` is what the devices do.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_embed._src.functional.partitioning import Axes

OVERFLOW_PROBABILITY = 1e-9
# Rows of a buffer come in whole tiles of a TPU.
TILE = 8


class Hop(NamedTuple):
    """One all-to-all of an exchange; static.

    Args:
        axes: the mesh axes that it goes over.
        parts: number of devices along them.
        stride: consecutive positions that belong to one part.
        room: positions that a device can send to each part.
        distinct: different positions that a device can receive.
    """

    axes: Axes
    parts: int
    stride: int
    room: int
    distinct: int


class Route(NamedTuple):
    """How positions reach their owners; static.

    Args:
        direct: a hop to the owner, for the first `room` positions of each pair of devices; None:
            all go over `hops`.
        hops: for the rest, one after the other; the last one ends at the owner.
        rest: positions that a device can send over `hops`.
        distinct: different positions that an owner can be asked for.
    """

    direct: Hop | None
    hops: tuple[Hop, ...]
    rest: int
    distinct: int

    @property
    def every_hop(self) -> tuple[Hop, ...]:
        """All hops, including the direct one."""
        return self.hops if self.direct is None else (self.direct, *self.hops)

    @property
    def slots(self) -> int:
        """Positions that a device's send buffers hold."""
        return sum(hop.parts * hop.room for hop in self.every_hop)


@functools.lru_cache
def plan_route(
    asked: int, axes: Axes, sizes: tuple[int, ...], shard: int, devices: int, capacity: float
) -> Route:
    """The route with the smallest buffers for `asked` distinct positions per device, over axes of
    these sizes with `shard` rows each."""
    groupings, direct = (
        _axis_groupings([*zip(axes, sizes, strict=True)]),
        _direct_hop(asked, axes, math.prod(sizes), shard, capacity),
    )
    routes = [_over_hops(asked, grouping, shard, devices, capacity) for grouping in groupings]
    if direct.room and direct.parts > 1:
        routes += [
            _direct_then_hops(asked, direct, grouping, devices, capacity)
            for grouping in groupings
            if len(grouping) > 1
        ]
    return min(routes, key=lambda route: route.slots)


def _axis_groupings(axes: Sequence[tuple[str, int]]) -> list[list[tuple[Axes, int]]]:
    """Every way to go over the axes in order, some of them together in one hop."""
    if not axes:
        return [[]]
    groupings = []
    for head in range(1, len(axes) + 1):
        names, sizes = zip(*axes[:head], strict=True)
        groupings += [[(names, math.prod(sizes)), *rest] for rest in _axis_groupings(axes[head:])]
    return groupings


def _direct_hop(asked: int, axes: Axes, parts: int, shard: int, capacity: float) -> Hop:
    """A hop with room for as many positions as a pair of devices has on average, in whole tiles."""
    room = int(min(asked / parts * max(capacity, 1), asked, shard)) // TILE * TILE
    return Hop(axes, parts, shard, room, parts * room)


def _over_hops(
    asked: int, grouping: list[tuple[Axes, int]], shard: int, devices: int, capacity: float
) -> Route:
    """The route over these axes one after the other."""
    owners = math.prod(parts for _, parts in grouping)
    checks = sum(devices * (parts + 1) for _, parts in grouping)

    def room(senders: int, receivers: int) -> int:
        return _room(asked * senders, receivers / owners, checks, capacity)

    hops = _hops(grouping, shard, min(asked, shard * owners), room)
    return Route(None, hops, asked, hops[-1].distinct)


def _direct_then_hops(
    asked: int, direct: Hop, grouping: list[tuple[Axes, int]], devices: int, capacity: float
) -> Route:
    """The route direct to the owner, and for the rest over these axes one after the other."""
    owners, shard = direct.parts, direct.stride
    checks = devices * (2 + sum(parts + 1 for _, parts in grouping))

    def room(senders: int, receivers: int) -> int:
        return _room_for_rest(asked, 1 / owners, direct.room, senders * receivers, checks, capacity)

    rest = min(room(1, owners), asked)
    hops = _hops(grouping, shard, rest, room)
    distinct = min(
        _room(asked * owners, 1 / owners, checks, capacity),
        direct.distinct + hops[-1].distinct,
        shard,
    )
    return Route(direct, hops, rest, distinct)


def _hops(
    grouping: list[tuple[Axes, int]], shard: int, most: int, room_for: Callable[[int, int], int]
) -> tuple[Hop, ...]:
    """The hops for at most `most` positions per device; `room_for(senders, receivers)` bounds what
    `senders` send to `receivers` owners."""
    owners = math.prod(parts for _, parts in grouping)
    hops, senders, receivers = [], 1, owners
    for axes, parts in grouping:
        receivers //= parts
        stride = shard * receivers
        room = min(room_for(senders, receivers), most, stride)
        room = -(-room // TILE) * TILE
        senders *= parts
        most = min(room_for(senders, receivers), parts * room, stride)
        hops.append(Hop(axes, parts, stride, room, most))
    return tuple(hops)


def _room(trials: int, share: float, checks: int, capacity: float) -> int:
    """Room for `trials` positions, each of which goes this way with probability `share`.

    The smallest number that a binomial variable exceeds with a probability of at most
    OVERFLOW_PROBABILITY / checks, where a geometric series bounds its upper tail; at least
    `capacity` times its mean.
    """
    if share == 1:
        return trials
    limit = math.log(OVERFLOW_PROBABILITY / checks)
    room = max(math.ceil(trials * share), 1)
    while room < trials:
        first = room + 1
        ratio = (trials - first) / (first + 1) * share / (1 - share)
        if ratio < 1 and _log_binomial(trials, share, first) - math.log1p(-ratio) <= limit:
            break
        room += 1
    return min(trials, max(room, math.ceil(min(capacity * trials * share, trials))))


def _log_binomial(trials: int, share: float, count: int) -> float:
    ways = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
    return ways + count * math.log(share) + (trials - count) * math.log1p(-share)


def _room_for_rest(
    trials: int, share: float, direct: int, pairs: int, checks: int, capacity: float
) -> int:
    """Room for the sum of what `pairs` binomial variables have beyond `direct`; at least `capacity`
    times the mean of the sum.

    The sum exceeds it with a probability of at most OVERFLOW_PROBABILITY / checks, by Chernoff's
    bound: the variables of one device are negatively associated, and those of devices that ask for
    different positions are independent, so the moment of the sum is at most the product of their
    moments. If devices ask for the same positions, their loads are correlated, but the positions
    are merged and need less.
    """
    mean = trials * share
    # Above `top`, a tilted variable has a probability below 1e-20 for every tilt.
    top = min(trials, math.ceil(mean + 40 * math.sqrt(mean) + 200))
    counts = np.arange(1, top + 1)
    logs = np.cumsum(
        np.log((trials - counts + 1) / counts * share / (1 - share))
    ) + trials * math.log1p(-share)
    beyond, chances = counts[direct:] - direct, np.exp(logs[direct:])
    limit, bounds = math.log(OVERFLOW_PROBABILITY / checks), []
    for tilt in np.geomspace(1e-3, 0.5, 64) * math.log(top / mean):
        with np.errstate(over="ignore"):
            moment = np.log1p(np.sum(np.exp(logs[direct:] + tilt * beyond) - chances))
        bounds.append((pairs * moment - limit) / tilt)
    return min(
        trials * pairs,
        math.ceil(max(min(bounds), min(capacity, trials) * pairs * np.sum(chances * beyond))),
    )


# --- what a route does with a batch, on the host


def simulate(
    route: Route, asked: np.ndarray, sizes: Mapping[str, int], batch: Axes
) -> tuple[np.ndarray, int]:
    """What an exchange does with the positions [devices, asked] of a batch, on the host; -1 marks
    no position.

    Returns:
        The number of positions that each device is asked for over the direct and the last hop,
        [size of each axis of the batch, ...], and how many did not fit.
    """
    shape = tuple(sizes[axis] for axis in batch)
    remaining = {
        device: _distinct_on_host(row) for device, row in zip(np.ndindex(shape), asked, strict=True)
    }
    received, load, dropped = {}, np.zeros(shape, np.int64), 0
    if route.direct is not None:
        received, left = _sent_on_host(route.direct, remaining, sizes, batch)
        load += _counts(received, shape)
        remaining = {device: positions[: route.rest] for device, positions in left.items()}
        dropped += int(np.sum(_counts(left, shape) - _counts(remaining, shape)))
    for hop in route.hops:
        received, left = _sent_on_host(hop, remaining, sizes, batch)
        distinct = {device: np.unique(positions) for device, positions in received.items()}
        remaining = {device: positions[: hop.distinct] for device, positions in distinct.items()}
        dropped += int(
            np.sum(_counts(left, shape) + _counts(distinct, shape) - _counts(remaining, shape))
        )
    return load + _counts(received, shape), dropped


def _sent_on_host(
    hop: Hop, remaining: Mapping[Any, np.ndarray], sizes: Mapping[str, int], batch: Axes
) -> tuple[dict, dict]:
    """The positions that each device receives over a hop, and those that did not fit."""
    dimensions, shape = [batch.index(axis) for axis in hop.axes], [sizes[axis] for axis in hop.axes]
    received, left = {device: [] for device in remaining}, {}
    for device, positions in remaining.items():
        parts = positions // hop.stride % hop.parts
        fits = np.arange(len(parts)) - np.searchsorted(parts, parts) < hop.room
        left[device] = positions[~fits]
        for part in np.unique(parts):
            to = list(device)
            for dimension, index in zip(dimensions, np.unravel_index(part, shape), strict=True):
                to[dimension] = int(index)
            received[tuple(to)].append(positions[fits & (parts == part)])
    return {
        device: np.concatenate([*some, np.zeros(0, np.int64)]) for device, some in received.items()
    }, left


def _counts(positions: Mapping[Any, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.array([len(some) for some in positions.values()], np.int64).reshape(shape)


def _distinct_on_host(positions: np.ndarray) -> np.ndarray:
    return np.unique(positions[positions >= 0]).astype(np.int64)
