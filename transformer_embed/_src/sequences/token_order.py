"""Checks, on the host, the layout of tokens that you declare to fused kernels."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

from transformer_embed._src import arguments
from transformer_embed._src.sequences.runs import second_runs
from transformer_embed._src.sequences.token_positions import TokenPositions, arrays_of

# Rows in one of these orders are also in the orders below it.
ORDERS = {
    "full": "one sequence a row, without padding",
    "right": "one sequence a row, then padding",
    "packed": "each sequence in one run of tokens",
}


class HostTokens(NamedTuple):
    """Holds the positions and the segment ids of tokens, on the host."""

    positions: Integer[np.ndarray, "b t"]
    segment_ids: Integer[np.ndarray, "b t"]


def tokens_on_host(tokens: TokenPositions) -> HostTokens:
    """Reads the positions and the segment ids of tokens, which must not be traced."""
    arrays = {"segment_ids": np.ones((1, 1), int)} | arrays_of(tokens)
    positions = arguments.on_host("tokens", arrays["positions"])
    segment_ids = arguments.on_host("tokens", arrays["segment_ids"])
    return HostTokens(*np.broadcast_arrays(positions, segment_ids))


def check_order(tokens: TokenPositions, order: str) -> None:
    """Raises unless the tokens of each batch row, which are not traced, lie in this order.

    In every order, positions rise by one from token to token of a sequence.
    """
    want = ORDERS[arguments.choice("order", order, tuple(ORDERS))]
    positions, segments = tokens_on_host(tokens)
    is_token = segments != 0
    begins = is_token & (np.diff(segments, prepend=0) != 0)
    is_wrong = second_runs(segments)
    if order != "packed":
        # The sequence of a row begins at the first token of the row.
        is_wrong[:, 1:] |= begins[:, 1:]
    if order == "full":
        is_wrong |= ~is_token
    _check_nowhere(is_wrong, want, "another order")
    # In 64 bits, a difference of positions does not wrap.
    steps = np.diff(positions.astype(np.int64), prepend=0)
    jumps = is_token & ~begins & (steps != 1)
    want = "positions that rise by one from token to token of a sequence"
    _check_nowhere(jumps, want, "another one")


def _check_nowhere(is_wrong: Bool[np.ndarray, "b t"], want: str, got: str) -> None:
    """Raises a ValueError that names the first wrong place, if there is one."""
    if is_wrong.any():
        first = np.argwhere(is_wrong)[0].tolist()
        raise arguments.value_error("tokens", want, f"{got} at {first}")
