"""Which row of a table holds which id.

Rows may be in another order than ids, so that each device of a mesh has as many frequent ids, and
there may be more of them, so that the devices divide their number.
"""

import math
from typing import Any, NamedTuple

import numpy as np

# The most parts that ids are dealt to, and how many of that many parts lie between those of an id
# and of the next one: the golden ratio of them, so that neighbours, and multiples of any number,
# reach different devices on a mesh of any size.
PARTS, STEP = 4096, 2531


class RowOrder(NamedTuple):
    """The rows of a table that holds more rows than ids, or holds them in another order; static.

    Args:
        vocab_size: the number of ids. Rows that hold none of them are padding.
        is_spread: whether neighbouring ids have rows far apart. The order does not depend on a
            mesh, so a checkpoint fits all of them.
    """

    vocab_size: int
    is_spread: bool


def nearest_rows(ids: Any, size: int, order: RowOrder | None) -> Any:
    """The row of each id, or of the nearest id inside the vocabulary; numpy or jax int32.

    Args:
        ids: any shape.
        size: the number of rows.
        order: None: row i holds id i, and there are no others.
    """
    if order is None:
        return ids.clip(0, size - 1)
    inside = ids.clip(0, order.vocab_size - 1)
    return _spread(inside, size) if order.is_spread else inside


def _spread(ids: Any, size: int) -> Any:
    """A bijection of the numbers below `size`: they are dealt to equal parts, like cards."""
    parts = math.gcd(size, PARTS)
    turn, step = ids // parts, STEP * parts // PARTS | 1
    # The product may wrap as uint32, since the number of parts is a power of two.
    part = (ids + turn).astype("uint32") * np.uint32(step) % np.uint32(parts)
    return part.astype("int32") * (size // parts) + turn
