"""Says which table row holds which id.

A table may have more rows than ids, so that the devices of a mesh divide the rows evenly. And the
rows may be in another order than the ids, so that all devices of a mesh have about the same number
of frequent ids.
"""

import math
from typing import Any, NamedTuple

import numpy as np

# A spread table is divided into equal parts, at most this many, and neighbouring ids are in
# different parts.
MOST_PARTS = 4096
# In a table of that many parts, the part of id i + 1 is this many parts after the part of id i,
# modulo the number of parts. This is the number of parts divided by the golden ratio, so that
# neighbouring ids, and the multiples of any number, are on different devices of a mesh of any size.
PARTS_PER_STEP = 2531


class RowOrder(NamedTuple):
    """Says which row holds which id, in a table with padding rows or with rows in another order.

    A `RowOrder` is static in compiled functions, and jax compares two of them by value.

    Args:
        vocab_size: The number of ids. The table may have more rows, which are padding.
        is_spread: Whether neighbouring ids have rows that are far apart. The order does not depend
            on a mesh, so a checkpoint fits all meshes.
    """

    vocab_size: int
    is_spread: bool


def nearest_rows(ids: Any, num_rows: int, order: RowOrder | None) -> Any:
    """Returns the row of each id, or of the nearest id inside the vocabulary.

    Args:
        ids: The ids, of any shape, as numpy or jax int32.
        num_rows: The number of rows of the table.
        order: The order of the rows. If None, row i holds id i, and there are no other rows.
    """
    if order is None:
        return ids.clip(0, num_rows - 1)
    known_ids = ids.clip(0, order.vocab_size - 1)
    return _spread_rows(known_ids, num_rows) if order.is_spread else known_ids


def _spread_rows(ids: Any, num_rows: int) -> Any:
    """Returns the row of each id in a table where neighbouring ids have rows that are far apart.

    Different ids below `num_rows` get different rows. The table is divided into parts of equal
    size. The ids are dealt to the parts like cards to players: in each turn, every part gets one
    id, for the row of this turn in the part.

    For example, a table of 12 rows has 4 parts of 3 rows. In turn 0, the ids 0 to 3 get the rows 0,
    9, 6 and 3, the first rows of the parts 0, 3, 2 and 1. In turn 1, the ids 4 to 7 get the rows
    10, 7, 4 and 1, the second rows of the parts 3, 2, 1 and 0.
    """
    part_count = math.gcd(num_rows, MOST_PARTS)
    rows_per_part = num_rows // part_count
    turn = ids // part_count
    # The part of id i + 1 is `step` parts after the part of id i, modulo the number of parts. This
    # number is a power of two and the step is odd, so every part gets one id in each turn.
    step_if_even = (PARTS_PER_STEP * part_count) // MOST_PARTS
    step = step_if_even | 1
    # If the turn were not added, the first ids of all turns would be in part 0.
    step_count = (ids + turn).astype("uint32")
    # The product may wrap uint32. The number of parts divides 2**32, so the remainder is right.
    part = (step_count * np.uint32(step)) % np.uint32(part_count)
    return part.astype("int32") * rows_per_part + turn
