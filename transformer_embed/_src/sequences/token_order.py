"""Checks, on the host, the layout of tokens that you declare to fused kernels.

In shapes, b counts batch rows and t counts the tokens of a row.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

from transformer_embed._src import arguments
from transformer_embed._src.sequences.runs import segment_reappears
from transformer_embed._src.sequences.token_positions import TokenPositions, batch_arrays

# What tokens in each order look like, in words. A row in one of these orders is in all orders below
# that order, too.
WANTED_LAYOUTS = {
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
    arrays = batch_arrays(tokens)
    positions = arguments.on_host("tokens", arrays["positions"])
    # Without segment ids, each token is in segment 1.
    one_segment = np.ones((1, 1), int)
    segment_ids = arguments.on_host("tokens", arrays.get("segment_ids", one_segment))
    positions, segment_ids = np.broadcast_arrays(positions, segment_ids)
    return HostTokens(positions=positions, segment_ids=segment_ids)


def check_order(tokens: TokenPositions, order: str) -> None:
    """Raises unless the tokens of each batch row, which are not traced, lie in this order.

    In every order, positions rise by one from token to token of a sequence.

    Args:
        tokens: The tokens.
        order: "full" (one sequence a row, without padding), "right" (one sequence a row, then
            padding) or "packed" (each sequence in one run of tokens).
    """
    order = arguments.choice("order", order, tuple(WANTED_LAYOUTS))
    wanted_order = WANTED_LAYOUTS[order]
    positions, segments = tokens_on_host(tokens)
    is_token = segments != 0
    # A token begins a run if the token before it has another segment id.
    has_other_segment = np.diff(segments, prepend=0) != 0
    begins_run = is_token & has_other_segment
    is_wrong = segment_reappears(segments)
    if order != "packed":
        # The only sequence of a row begins at index 0, so no other token may begin a run.
        is_wrong[:, 1:] |= begins_run[:, 1:]
    if order == "full":
        is_wrong |= ~is_token
    _refuse_first(is_wrong, wanted_order, "another order")
    # In 64 bits, a difference of positions does not wrap.
    steps = np.diff(positions.astype(np.int64), prepend=0)
    is_jump = is_token & ~begins_run & (steps != 1)
    wanted_steps = "positions that rise by one from token to token of a sequence"
    # The error says "got another one at [row, index]".
    _refuse_first(is_jump, wanted_steps, "another one")


def _refuse_first(is_wrong: Bool[np.ndarray, "b t"], want: str, got: str) -> None:
    """Raises a ValueError if a token is wrong. The error names the index of the first wrong one."""
    if is_wrong.any():
        first = np.argwhere(is_wrong)[0].tolist()
        raise arguments.value_error("tokens", want, f"{got} at {first}")
