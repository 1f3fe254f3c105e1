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

        The query in row r of the tile and the key in column c are `first_difference + r - c` row
        indices apart. The window (left, right) allows differences from `-right` to `left`. So in
        this tile, it allows `r - c` from `-right - first_difference` to `left - first_difference`.
        For example, with the window (3, 0), the tile of the queries 4 to 7 and the keys 2 to 5 has
        the first difference 2, and the allowed r - c are -2 to 1.
        """
        query_slice, key_slice = tile
        query_count, key_count = self.shape
        first_query, queries_end, _ = query_slice.indices(query_count)
        first_key, keys_end, _ = key_slice.indices(key_count)
        rows = queries_end - first_query
        columns = keys_end - first_key
        # `offset` is the index, among the keys, of query 0.
        first_difference = self.offset + first_query - first_key
        # No two tokens are so far apart.
        beyond_all_tokens = query_count + key_count
        left, right = self.window_size
        if left is None:
            left = beyond_all_tokens
        if right is None:
            right = beyond_all_tokens

        def clamped(bound: int) -> int:
            """Clamps a bound of r - c to the numbers from -columns to rows.

            In a tile, r - c is above -columns and below rows, so the clamped bound allows the same
            pairs. The gain is that all tiles inside the window get the same bounds, and so share
            one array in the cache of `_allowed_differences`.
            """
            return min(max(bound, -columns), rows)

        lowest = clamped(-right - first_difference)
        highest = clamped(left - first_difference)
        return _allowed_differences(rows, columns, lowest, highest)


@functools.lru_cache(maxsize=16)
def _allowed_differences(
    rows: int, columns: int, lowest: int, highest: int
) -> Bool[np.ndarray, "t s"]:
    """Makes a tile of bools, True where row minus column is from `lowest` to `highest`."""
    difference = np.arange(rows)[:, None] - np.arange(columns)
    return (lowest <= difference) & (difference <= highest)
