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

    It is static, and jax compares two of them by value.

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
    """Returns the row of each id in a spread table: a different row for each id below `num_rows`.

    The ids are dealt to the parts of the table like cards. In each turn, every part gets one id,
    which goes to the row of this turn in the part.
    """
    part_count = math.gcd(num_rows, MOST_PARTS)
    rows_per_part = num_rows // part_count
    turn = ids // part_count
    # The step is odd, and the number of parts is a power of two. So the multiples of the step reach
    # every part once in a turn, and the product may overflow uint32 without an effect on the
    # remainder.
    step = PARTS_PER_STEP * part_count // MOST_PARTS | 1
    part = (ids + turn).astype("uint32") * np.uint32(step) % np.uint32(part_count)
    return part.astype("int32") * rows_per_part + turn
