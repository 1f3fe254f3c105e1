"""Chooses the size of the buffers of an exchange of rows, on the host while a step is traced.

Buffers overflow in less than one step in 1e9, if each device draws its ids independently and the
owners of the ids are evenly spread (see `row_order`). Of n ids, each goes to an owner with
probability p, so the number that go there is binomial, and more than r go there with the
probability `sum(C(n, k) p**k (1 - p)**(n - k) for k > r)`. The probabilities of all buffers of all
devices together must stay below 1e-9.
"""

import functools
import math
from typing import NamedTuple

OVERFLOW_PROBABILITY = 1e-9
# The rows of a buffer come in whole tiles of a TPU.
TILE = 8


class BufferSizes(NamedTuple):
    """Holds the sizes of the buffers of one device.

    Args:
        most_sent: How many ids the device can send to each owner.
        most_received: How many distinct ids the device can receive, as an owner.
    """

    most_sent: int
    most_received: int


@functools.lru_cache
def plan_buffers(
    most_asked: int, owners: int, shard_rows: int, devices: int, capacity: float
) -> BufferSizes:
    """Chooses the sizes of the buffers of each device.

    Args:
        most_asked: The most distinct rows that a device asks for.
        owners: The number of devices that hold different rows.
        shard_rows: The number of rows of each owner.
        devices: The number of devices that ask.
        capacity: How many times the mean of a batch without repeats a buffer has room for, at
            least.
    """
    share = 1 / owners
    # Each device fills a buffer for each owner, and one with what it receives.
    buffers = devices * (owners + 1)
    # An owner cannot be asked for more rows than its shard has.
    send_room = _room(most_asked, share, buffers, capacity)
    most_sent = min(send_room, most_asked, shard_rows)
    # Rounded up to whole tiles.
    most_sent = -(-most_sent // TILE) * TILE
    receive_room = _room(most_asked * owners, share, buffers, capacity)
    most_received = min(receive_room, owners * most_sent, shard_rows)
    return BufferSizes(most_sent=most_sent, most_received=most_received)


def _room(trials: int, share: float, buffers: int, capacity: float) -> int:
    """Chooses the room of a buffer, in which each of `trials` ids needs room by chance.

    Args:
        trials: The number of ids.
        share: The probability with which an id goes into this buffer.
        buffers: The number of buffers that together may overflow with OVERFLOW_PROBABILITY.
        capacity: The room is at least this number times the mean number of ids that go there.
    """
    # scipy is slow to load, and only an exchange needs it.
    from scipy.special import bdtrc  # noqa: PLC0415

    mean = trials * share
    room = math.ceil(max(mean, 1, min(capacity * mean, trials)))
    # bdtrc is the probability that more ids go there than there is room.
    while room < trials and bdtrc(room, trials, share) > OVERFLOW_PROBABILITY / buffers:
        room += 1
    return room
