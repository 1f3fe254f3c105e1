"""Makes static masks of splash attention that need few tiles. Importing this imports Pallas.

A tile is a rectangle of queries and keys, which a kernel computes at one time.
"""

import functools

import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Bool


class IndexMask(splash.LocalMask):
    """Allows the pairs whose row indices differ by no more than a window allows.

    `splash.LocalMask` allows the same pairs, but makes the bools of every tile, which are 1.7e10 at
    131072 tokens. Here, equal tiles are one array: a tile depends only on the difference of its
    first query and its first key. All tiles inside the window are alike, and so are all tiles
    beyond the window.
    """

    def __getitem__(self, tile: tuple[slice, slice]) -> Bool[np.ndarray, "t s"]:
        """Returns which pairs of a tile may attend.

        The query of row r in the tile and the key of column c have the difference
        `first_difference + r - c`. The window allows it from -right to left, so it allows a tile's
        r - c from -right - first_difference to left - first_difference.
        """
        query_slice, key_slice = tile
        query_count, key_count = self.shape
        first_query, queries_end, _ = query_slice.indices(query_count)
        first_key, keys_end, _ = key_slice.indices(key_count)
        rows = queries_end - first_query
        columns = keys_end - first_key
        first_difference = self.offset + first_query - first_key
        # A side without a limit gets a distance that no two tokens have.
        no_limit = query_count + key_count
        left, right = self.window_size
        left = no_limit if left is None else left
        right = no_limit if right is None else right

        def clamped(bound: int) -> int:
            """Clamps a bound of r - c to the numbers from -columns to rows.

            In a tile, r - c is above -columns and below rows, so the clamped bound allows the same
            pairs. All tiles inside the window get the same bounds.
            """
            return min(max(bound, -columns), rows)

        low = clamped(-right - first_difference)
        high = clamped(left - first_difference)
        return _allowed_differences(rows, columns, low, high)


@functools.lru_cache(maxsize=16)
def _allowed_differences(rows: int, columns: int, low: int, high: int) -> Bool[np.ndarray, "t s"]:
    """Makes a tile of bools, True where row index minus column index is from low to high."""
    difference = np.arange(rows)[:, None] - np.arange(columns)
    return (low <= difference) & (difference <= high)
