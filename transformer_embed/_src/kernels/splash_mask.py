"""Static masks of splash attention that make few blocks. (Importing this imports Pallas.)"""

import functools

import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Bool

Block = tuple[slice, slice]


class IndexMask(splash.LocalMask):
    """Allows a difference of row indices, as its parent, which makes the bools of every block.

    At 131072 tokens these are 1.7e10. But a block depends only on the difference of its first query
    and its first key, and all blocks inside the window are alike, as are those beyond it.
    """

    def __getitem__(self, block: Block) -> Bool[np.ndarray, "t s"]:
        (query, queries_end, _), (key, keys_end, _) = map(slice.indices, block, self.shape)
        rows, columns, first = queries_end - query, keys_end - key, self.offset + query - key
        # No limit is a distance that no two tokens have.
        left, right = (sum(self.shape) if side is None else side for side in self.window_size)
        # Clamped to the block's corners, so that all blocks inside the window share one array.
        low, high = (min(max(bound - first, -columns), rows) for bound in (-right, left))
        return _between(rows, columns, low, high)


@functools.lru_cache(maxsize=16)
def _between(rows: int, columns: int, low: int, high: int) -> Bool[np.ndarray, "t s"]:
    """Whether the row index minus the column index is from low to high."""
    difference = np.arange(rows)[:, None] - np.arange(columns)
    return (low <= difference) & (difference <= high)
