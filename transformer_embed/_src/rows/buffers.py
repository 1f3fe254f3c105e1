"""The size of the buffers of an exchange of rows, chosen on the host while a step is traced.

Buffers overflow in less than one step in 1e9, if each device draws its ids independently and their
owners are evenly spread (see `row_order`): of n ids, each goes to an owner with probability
p, so their number is binomial, and more than r go there with the probability
`sum(C(n, k) p**k (1 - p)**(n - k) for k > r)`. All buffers of all devices together must stay below
1e-9.
"""

import functools
import math

OVERFLOW_PROBABILITY = 1e-9
# Rows of a buffer come in whole tiles of a TPU.
TILE = 8


@functools.lru_cache
def plan_buffers(
    asked: int, owners: int, shard: int, devices: int, capacity: float
) -> tuple[int, int]:
    """The ids that a device can send to each owner, and the distinct ones that it can receive.

    Args:
        asked: the most distinct rows that a device asks for.
        owners: the devices that hold different rows.
        shard: the rows of each owner.
        devices: the devices that ask.
        capacity: that of `value_and_grad`.
    """
    share = 1 / owners
    # Each device fills a buffer for each owner and one with what it receives.
    checks = devices * (owners + 1)
    # No device asks for more rows than there are, and no owner has more than its shard.
    most = min(asked, shard)
    room = -(-min(_room(asked, share, checks, capacity), most) // TILE) * TILE
    most = min(owners * room, shard)
    return room, min(_room(asked * owners, share, checks, capacity), most)


def _room(trials: int, share: float, checks: int, capacity: float) -> int:
    """The room that `trials` ids exceed seldom enough; at least `capacity` times their mean.

    Each id goes this way with probability `share`, and seldom is a probability of at most
    OVERFLOW_PROBABILITY / checks.
    """
    # Slow to load, and only an exchange needs it.
    from scipy.special import bdtrc  # noqa: PLC0415

    mean = trials * share
    room = math.ceil(max(mean, 1, min(capacity * mean, trials)))
    while room < trials and bdtrc(room, trials, share) > OVERFLOW_PROBABILITY / checks:
        room += 1
    return room
