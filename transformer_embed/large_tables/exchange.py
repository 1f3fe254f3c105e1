"""Rows by exchange: each device asks the owners of the rows that its part of the batch reads, and sends them the gradients of those rows.

Everything here runs inside `jax.shard_map`, on one device among many. Rows are named by their position in the sharded array, so a
device's shard is a range of positions and an ascending list of positions is grouped by owner.

    this device                          the owners of the rows
    distinct positions  ---- all-to-all ---->  positions asked for, repeats merged
    rows                <--- all-to-all -----  rows of the shard                       (`ask`, then `answer`)
    gradients of rows   ---- all-to-all ---->  one gradient a row, repeats summed      (`return_gradients`)

Buffers have a fixed size: a device can send `room` positions to each other one. `plan_hops` sizes them so that hashed ids overflow in less
than one step in 1e9, and goes over one mesh axis after the other where that takes smaller buffers: a first hop to the device of the owner's
row of the mesh, which merges what its peers ask for, then a second one to the owner. A position that finds no room is
answered with NaN and its gradient is dropped.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from transformer_embed.functional.mesh import Axes

OVERFLOW_PROBABILITY = 1e-9
# Rows of a buffer come in whole tiles of a TPU.
TILE = 8


class Hop(NamedTuple):
    """One all-to-all of an exchange: static.

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


class Sent(NamedTuple):
    """Where the positions that went over a hop are in its buffers, on one device.

    Args:
        starts: [parts + 1], the index of the first position sent to each part.
        slots: [asked], the place in the send buffer of each position asked for; past its end where there was no room.
        found: [parts * room], which of the distinct positions received each place of the receive buffer asks for; past the end: none.
    """

    starts: Int32[Array, "p"]
    slots: Int32[Array, "k"]
    found: Int32[Array, "s"]


# --- sizes, on the host


def plan_hops(asked: int, axes: Axes, sizes: Sequence[int], shard: int, devices: int, capacity: float) -> tuple[Hop, ...]:
    """The hops with the smallest buffers for `asked` distinct positions a device, over axes of these sizes with `shard` rows a device."""
    plans = [_plan(asked, grouping, shard, devices, capacity) for grouping in _groupings([*zip(axes, sizes, strict=True)])]
    return min(plans, key=lambda hops: sum(hop.parts * hop.room for hop in hops))


def _groupings(axes: Sequence[tuple[str, int]]) -> list[list[tuple[Axes, int]]]:
    """Every way to go over the axes in order, some of them together in one hop."""
    if not axes:
        return [[]]
    groupings = []
    for head in range(1, len(axes) + 1):
        names, sizes = zip(*axes[:head], strict=True)
        groupings += [[(names, math.prod(sizes)), *rest] for rest in _groupings(axes[head:])]
    return groupings


def _plan(asked: int, grouping: list[tuple[Axes, int]], shard: int, devices: int, capacity: float) -> tuple[Hop, ...]:
    checks = sum(devices * (parts + 1) for _, parts in grouping)
    hops, before, reachable = [], 1, shard * math.prod(parts for _, parts in grouping)
    most = min(asked, reachable)
    for axes, parts in grouping:
        stride, reached = reachable // parts, before * parts
        room = min(_room(asked * before, 1 / reached, checks, capacity), most, stride)
        room = -(-room // TILE) * TILE
        distinct = min(_room(asked * reached, 1 / reached, checks, capacity), parts * room, stride)
        hops.append(Hop(axes, parts, stride, room, distinct))
        before, reachable, most = reached, stride, distinct
    return tuple(hops)


def _room(trials: int, share: float, checks: int, capacity: float) -> int:
    """Places for those of `trials` positions that go one way with probability `share`.

    The smallest number that a binomial variable exceeds with a probability of at most OVERFLOW_PROBABILITY / checks, by the bound of its
    upper tail by a geometric series; at least `capacity` times its mean.
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


def simulate(hops: Sequence[Hop], asked: np.ndarray, sizes: Mapping[str, int], batch: Axes) -> tuple[np.ndarray, int]:
    """What an exchange does with the positions [devices, asked] of a batch, on the host; -1 marks no position.

    Returns:
        The number of positions that each device is asked for over the last hop, [size of each axis of the batch, ...], and how many
        found no room.
    """
    shape = tuple(sizes[axis] for axis in batch)
    wanted = {device: _distinct_on_host(row) for device, row in zip(np.ndindex(shape), asked, strict=True)}
    load, dropped = np.zeros(shape, np.int64), 0
    for hop in hops:
        places = [batch.index(axis) for axis in hop.axes]
        received = {device: [] for device in wanted}
        for device, positions in wanted.items():
            parts = positions // hop.stride % hop.parts
            for part in np.unique(parts):
                some = positions[parts == part]
                to = list(device)
                for place, index in zip(places, np.unravel_index(part, [shape[place] for place in places]), strict=True):
                    to[place] = int(index)
                received[tuple(to)].append(some[: hop.room])
                dropped += max(len(some) - hop.room, 0)
        for device, some in received.items():
            load[device] = sum(map(len, some))
            distinct = _distinct_on_host(np.concatenate([*some, np.zeros(0, np.int64)]))
            wanted[device] = distinct[: hop.distinct]
            dropped += len(distinct) - len(wanted[device])
    return load, dropped


def _distinct_on_host(positions: np.ndarray) -> np.ndarray:
    return np.unique(positions[positions >= 0]).astype(np.int64)


# --- on one device


def ask(hops: Sequence[Hop], positions: Int32[Array, "k"], size: int) -> tuple[list[Sent], Int32[Array, "m"]]:
    """Sends ascending, distinct positions to their owners; those from `size` on fill up and are not sent.

    Returns:
        What was sent over each hop, and the positions that this device is asked for, in the form of the argument.
    """
    sent = []
    for hop in hops:
        parts = jnp.where(positions < size, positions // hop.stride % hop.parts, hop.parts)
        starts = count_below(parts, jnp.arange(hop.parts + 1, dtype=jnp.int32))
        rank = jnp.arange(len(positions), dtype=jnp.int32) - starts[parts]
        fits = (parts < hop.parts) & (rank < hop.room)
        slots = jnp.where(fits, parts * hop.room + rank, hop.parts * hop.room)
        received = _to_parts(hop, _bucket(hop, starts, positions, size))
        positions = distinct_ascending(received, size, hop.distinct)
        found = count_below(positions, received)
        known = (received < size) & (positions[jnp.minimum(found, hop.distinct - 1)] == received)
        sent.append(Sent(starts, slots, jnp.where(known, found, hop.distinct)))
    return sent, positions


def answer(hops: Sequence[Hop], sent: Sequence[Sent], rows: Float[Array, "m d"]) -> Float[Array, "k d"]:
    """Sends the rows that this device was asked for back to those who asked; NaN for a position that found no room."""
    for hop, (_, slots, found) in reversed([*zip(hops, sent, strict=True)]):
        answers = rows.at[found].get(mode="fill", fill_value=jnp.nan)
        rows = _to_parts(hop, answers).at[slots].get(mode="fill", fill_value=jnp.nan)
    return rows


def return_gradients(hops: Sequence[Hop], sent: Sequence[Sent], gradients: Float[Array, "k d"]) -> Float[Array, "m d"]:
    """The gradient of each row that this device was asked for, summed over those who asked: the transpose of `answer`."""
    for hop, (starts, _, found) in zip(hops, sent, strict=True):
        received = _to_parts(hop, _bucket(hop, starts, gradients, 0))
        gradients = jnp.zeros((hop.distinct, gradients.shape[1]), gradients.dtype).at[found].add(received, mode="drop")
    return gradients


def sum_repeats(positions: Int32[Array, "n"], gradients: Float[Array, "n d"], size: int) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """The distinct positions below `size`, ascending and filled up, and the sum of the gradients of each."""
    distinct = distinct_ascending(positions, size, min(len(positions), size))
    found = jnp.where(positions < size, count_below(distinct, positions), len(distinct))
    return distinct, jnp.zeros((len(distinct), gradients.shape[1]), gradients.dtype).at[found].add(gradients, mode="drop")


def _bucket(hop: Hop, starts: Int32[Array, "p"], values: Array, fill: int) -> Array:
    """[parts * room, ...]: the values that go to each part, which lie together, and fill."""
    place = starts[:-1, None] + jnp.arange(hop.room, dtype=jnp.int32)
    place = jnp.where(place < starts[1:, None], place, len(values)).reshape(-1)
    return values.at[place].get(mode="fill", fill_value=fill)


def _to_parts(hop: Hop, buffer: Array) -> Array:
    """The blocks that each part has for this device."""
    return jax.lax.all_to_all(buffer, hop.axes, split_axis=0, concat_axis=0, tiled=True)


def distinct_ascending(values: Int32[Array, "..."], size: int, room: int) -> Int32[Array, "k"]:
    """The `room` smallest distinct values below `size`, ascending, filled up with distinct ones from `size` on."""
    ordered = jnp.sort(values.reshape(-1))
    first = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    slots = jnp.where(ordered < size, jnp.cumsum(first, dtype=jnp.int32) - 1, room)
    return jnp.arange(size, size + room, dtype=jnp.int32).at[slots].set(ordered, mode="drop", indices_are_sorted=True)


def count_below(ascending: Int32[Array, "k"], values: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """How many of the ascending numbers are below each value: `jnp.searchsorted`, which older jax does not trace inside `shard_map`."""
    size = len(ascending)
    count = jnp.zeros_like(values)
    for step in (2**bit for bit in reversed(range(size.bit_length()))):
        further = count + step
        is_below = ascending[jnp.minimum(further, size) - 1] < values
        count = jnp.where((further <= size) & is_below, further, count)
    return count
