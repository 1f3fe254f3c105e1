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
        sent: How many ids the device can send to each owner.
        received: How many distinct ids the device can receive, as an owner.
    """

    sent: int
    received: int


@functools.lru_cache
def plan_buffers(asked: int, owners: int, shard: int, devices: int, capacity: float) -> BufferSizes:
    """Chooses the sizes of the buffers of each device.

    Args:
        asked: The most distinct rows that a device asks for.
        owners: The number of devices that hold different rows.
        shard: The number of rows of each owner.
        devices: The number of devices that ask.
        capacity: How many times the mean of a batch without repeats a buffer has room for, at
            least.
    """
    share = 1 / owners
    # Each device fills a buffer for each owner and one with what it receives.
    checks = devices * (owners + 1)
    # No device asks for more rows than there are, and no owner has more rows than its shard.
    most_sent = min(asked, shard)
    sent = min(_room(asked, share, checks, capacity), most_sent)
    sent = -(-sent // TILE) * TILE
    most_received = min(owners * sent, shard)
    received = min(_room(asked * owners, share, checks, capacity), most_received)
    return BufferSizes(sent=sent, received=received)


def _room(trials: int, share: float, checks: int, capacity: float) -> int:
    """Returns the room that `trials` ids exceed seldom enough; at least `capacity` times the mean.

    Each id goes this way with probability `share`. Seldom enough is a probability of at most
    OVERFLOW_PROBABILITY / checks.
    """
    # scipy is slow to load, and only an exchange needs it.
    from scipy.special import bdtrc  # noqa: PLC0415

    mean = trials * share
    room = math.ceil(max(mean, 1, min(capacity * mean, trials)))
    while room < trials and bdtrc(room, trials, share) > OVERFLOW_PROBABILITY / checks:
        room += 1
    return room
