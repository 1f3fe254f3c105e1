"""Chooses the size of the buffers in which devices send each other rows of a table.

This runs on the host while a step is traced. The owner of a row is the device that has the row (see
`exchange`). Buffers overflow in less than one step in 1e9, if the ids of each device are sampled
independently and all owners are equally likely (see `row_order`). Each of n ids goes to an owner
with probability p, so the number of ids that go there is binomial. The probability that more than r
ids go there is `sum(C(n, k) p**k (1 - p)**(n - k) for k > r)`. The sum of the probabilities of all
buffers of all devices must stay below 1e-9.
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
        capacity: A factor for the sizes. With 2.0, a buffer has room for at least twice the ids
            that it gets on average, if all ids of a batch are different.
    """
    # The probability that an id goes to one given owner.
    share = 1 / owners
    # Each device has one buffer for each owner, and one buffer for what it receives.
    buffer_count = devices * (owners + 1)
    send_size = _buffer_size(most_asked, share, buffer_count, capacity)
    # An owner cannot be asked for more rows than its shard has.
    most_sent = min(send_size, most_asked, shard_rows)
    # Rounded up to whole tiles of a TPU, which have TILE rows.
    most_sent = -(-most_sent // TILE) * TILE
    # An owner receives requests from as many devices as there are owners. Each of these devices has
    # up to `most_asked` ids, and each id goes to this owner with the same probability.
    receive_size = _buffer_size(most_asked * owners, share, buffer_count, capacity)
    # An owner cannot receive more than is sent to it, or more distinct ids than its shard has rows.
    most_received = min(receive_size, owners * most_sent, shard_rows)
    return BufferSizes(most_sent=most_sent, most_received=most_received)


def _buffer_size(id_count: int, share: float, buffer_count: int, capacity: float) -> int:
    """Chooses how many ids a buffer holds, if each of `id_count` ids may go into the buffer.

    Args:
        id_count: The number of ids, of which the buffer gets a random number.
        share: The probability with which an id goes into this buffer.
        buffer_count: The number of buffers. The probability that any of them overflows is at most
            OVERFLOW_PROBABILITY.
        capacity: A factor for the size. The buffer holds at least as many ids as this factor times
            the mean number of ids that go into it (but never more than `id_count`).
    """
    # scipy is slow to load, and only an exchange needs it.
    from scipy.special import bdtrc  # noqa: PLC0415

    mean = id_count * share
    size_by_capacity = min(capacity * mean, id_count)
    size = math.ceil(max(mean, 1, size_by_capacity))
    # If each buffer overflows with at most this probability, then any of them overflows with at
    # most OVERFLOW_PROBABILITY.
    most_overflow = OVERFLOW_PROBABILITY / buffer_count
    # bdtrc is the probability that more than `size` ids go into the buffer.
    while size < id_count and bdtrc(size, id_count, share) > most_overflow:
        size += 1
    return size
