"""Says which table row holds which id.

A table may have more rows than ids, so that the devices of a mesh divide the rows evenly. And the
rows may be in another order than the ids, so that each device of a mesh has as many frequent ids.
"""

import math
from typing import Any, NamedTuple

import numpy as np

# Ids are dealt to at most this many parts.
PARTS = 4096
# With that many parts, so many of them lie between the parts of an id and of the next id. This is
# the golden ratio of the number of parts, so that neighbours, and multiples of any number, reach
# different devices on a mesh of any size.
STEP = 2531


class RowOrder(NamedTuple):
    """The order of the rows in a table that has padding rows, or rows in another order than ids.

    It is static, so jax can compare two of them.

    Args:
        vocab_size: The number of ids. Rows that hold none of them are padding.
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
    return _spread(known_ids, num_rows) if order.is_spread else known_ids


def _spread(ids: Any, num_rows: int) -> Any:
    """Deals the numbers below `num_rows` to equal parts, like cards, each to a row of its own."""
    parts = math.gcd(num_rows, PARTS)
    part_size = num_rows // parts
    turn = ids // parts
    # The step is odd and the number of parts a power of two, so each turn reaches all parts.
    step = STEP * parts // PARTS | 1
    # For the same reason, the product may wrap as uint32.
    part = (ids + turn).astype("uint32") * np.uint32(step) % np.uint32(parts)
    return part.astype("int32") * part_size + turn
