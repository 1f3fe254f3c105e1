"""The layout of tokens that fused kernels rely on: declared by the caller, checked on the host."""

import numpy as np
from jaxtyping import Bool, Integer

from transformer_embed._src import arguments
from transformer_embed._src.sequences.runs import second_runs
from transformer_embed._src.sequences.token_positions import TokenPositions, arrays_of

# Each order is one of those below it, too.
ORDERS = {
    "full": "one sequence a row, without padding",
    "right": "one sequence a row, then padding",
    "packed": "each sequence in one run of tokens",
}


def on_host(tokens: TokenPositions) -> tuple[Integer[np.ndarray, "b t"], ...]:
    """The positions and the segment ids of tokens, which are not traced."""
    made = {"segment_ids": np.ones((1, 1), int)} | arrays_of(tokens)
    arrays = made["positions"], made["segment_ids"]
    return np.broadcast_arrays(*(arguments.on_host("tokens", array) for array in arrays))


def check_order(tokens: TokenPositions, order: str) -> None:
    """Raises unless the tokens of each row, which are not traced, lie in this order.

    Positions rise by one from token to token of a sequence.
    """
    want = ORDERS[arguments.choice("order", order, tuple(ORDERS))]
    positions, segments = on_host(tokens)
    is_token = segments != 0
    begins = is_token & (np.diff(segments, prepend=0) != 0)
    is_wrong = second_runs(segments)
    if order != "packed":
        # The sequence of a row begins at its first token.
        is_wrong[:, 1:] |= begins[:, 1:]
    if order == "full":
        is_wrong |= ~is_token
    _check_nowhere(is_wrong, want, "another order")
    # In 64 bits, where a difference of positions does not wrap.
    steps = np.diff(positions.astype(np.int64), prepend=0)
    want = "positions that rise by one from token to token of a sequence"
    _check_nowhere(is_token & ~begins & (steps != 1), want, "another one")


def _check_nowhere(is_wrong: Bool[np.ndarray, "b t"], want: str, got: str) -> None:
    if is_wrong.any():
        first = np.argwhere(is_wrong)[0].tolist()
        raise arguments.value_error("tokens", want, f"{got} at {first}")
