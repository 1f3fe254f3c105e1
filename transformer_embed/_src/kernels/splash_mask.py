"""Makes static masks of splash attention that need few blocks. Importing this imports Pallas."""

import functools

import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Bool

Block = tuple[slice, slice]


class IndexMask(splash.LocalMask):
    """Allows differences of row indices inside a window, as its parent does, with few arrays.

    The parent makes the bools of every block, which are 1.7e10 at 131072 tokens. But a block
    depends only on the difference of its first query and its first key. All blocks inside the
    window are alike, and so are all blocks beyond the window.
    """

    def __getitem__(self, block: Block) -> Bool[np.ndarray, "t s"]:
        (query, queries_end, _), (key, keys_end, _) = map(slice.indices, block, self.shape)
        rows = queries_end - query
        columns = keys_end - key
        first = self.offset + query - key
        # A side without a limit gets a distance that no two tokens have.
        left, right = (sum(self.shape) if side is None else side for side in self.window_size)
        # The bounds are clamped to the block's corners, so that all blocks inside the window share
        # one array.
        low = min(max(-right - first, -columns), rows)
        high = min(max(left - first, -columns), rows)
        return _between(rows, columns, low, high)


@functools.lru_cache(maxsize=16)
def _between(rows: int, columns: int, low: int, high: int) -> Bool[np.ndarray, "t s"]:
    """Returns where the row index minus the column index is from low to high."""
    difference = np.arange(rows)[:, None] - np.arange(columns)
    return (low <= difference) & (difference <= high)
