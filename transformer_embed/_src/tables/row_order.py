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
# In a table of MOST_PARTS parts, the part of id i + 1 is this many parts after the part of id i,
# modulo the number of parts. This is MOST_PARTS divided by the golden ratio, so that neighbouring
# ids, and the multiples of any number, are on different devices of a mesh of any size.
STEP_OF_MOST_PARTS = 2531


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


def rows_of_nearest_ids(ids: Any, num_rows: int, order: RowOrder | None) -> Any:
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

    For example, a table of 12 rows has 4 parts of 3 rows, and the next id is always 3 parts
    further, modulo 4. In turn 0, the ids 0 to 3 are in the parts 0, 3, 2 and 1. They get the first
    rows of these parts: 0, 9, 6 and 3. Turn 1 starts one step later. Its ids 4 to 7 are in the
    parts 3, 2, 1 and 0. They get the second rows of these parts: 10, 7, 4 and 1.
    """
    part_count = math.gcd(num_rows, MOST_PARTS)
    rows_per_part = num_rows // part_count
    turn = ids // part_count
    # The part of id i + 1 is `step` parts after the part of id i, modulo the number of parts. The
    # number of parts is a power of two, and the step is made odd, so every part gets one id in each
    # turn.
    scaled_step = (STEP_OF_MOST_PARTS * part_count) // MOST_PARTS
    step = scaled_step | 1
    # How many steps the part of each id is after part 0. Each turn is one step longer than it has
    # ids, because otherwise the first id of every turn would be in part 0.
    steps_from_part_0 = (ids + turn).astype("uint32")
    # If the product is too large for uint32, a multiple of 2**32 is lost. The number of parts
    # divides 2**32, so the remainder is right.
    part = (steps_from_part_0 * np.uint32(step)) % np.uint32(part_count)
    return part.astype("int32") * rows_per_part + turn
