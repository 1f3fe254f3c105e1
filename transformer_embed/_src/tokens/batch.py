"""The check of a batch on the host, before a step that cannot raise."""

import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.sequences.token_order import check_order, on_host
from transformer_embed._src.sequences.token_positions import (
    TokenPositions,
    as_segment_ids,
    check_token_positions,
)


def check_batch(
    ids: ArrayLike,
    tokens: TokenPositions | None = None,
    *,
    vocab_size: int,
    pad_id: int | None = None,
    order: str | None = None,
) -> None:
    """Raises if an id is outside the vocabulary, or ids and tokens do not fit each other.

    Use it on the host, in a data pipeline: a compiled step cannot raise. There `lookup` reads NaN
    for such an id, and attention kernels do not check the order of tokens.

    Args:
        ids: [...], or [length] or [batch, length] with tokens; any integer dtype; not traced.
        tokens: the positions and segments of these ids; not traced.
        vocab_size: number of rows, at least 1.
        pad_id: the id at padding, and nowhere else: a loss would leave out a label that
            `next_token_mask` counts, and tokens that count as padding are not trained on. None: any
            id may stand at padding.
        order: the layout of the tokens, as in `te.kernels`. `"full"`: one
            sequence and no padding in each row. `"right"`: one sequence in each row, then padding.
            `"packed"`: any number of sequences, each in one run of tokens, with padding anywhere
            between them (so also padding on the left). Positions rise by one from token to token of
            a sequence. None: any order.

    Raises:
        TypeError: ids are not integers, tokens is not a TokenPositions, or one of them is traced.
        ValueError: an id is outside [0, vocab_size), a segment id is negative, pad_id is inside a
            sequence, another id is at padding, or the tokens lie in another order; the message
            gives the first such place.
            Ids and tokens differ in shape, or pad_id or order is given without tokens.

    Example:
        >>> import transformer_embed as te
        >>> te.check_batch([[1, 2], [3, 50257]], vocab_size=50257)
        Traceback (most recent call last):
        ValueError: ids: wanted integers inside the vocabulary, 0..50256, got 50257 at index [1, 1]
        >>> ids, tokens = [[5, 6, 0, 7]], te.TokenPositions.from_segment_ids([[1, 1, 1, 1]])
        >>> te.check_batch(ids, tokens, vocab_size=8, pad_id=0)
        Traceback (most recent call last):
        ValueError: ids: wanted pad_id, 0, at padding and nowhere else, got 0 at [0, 2], a token
    """
    inside = 0, arguments.size("vocab_size", vocab_size) - 1, "the vocabulary"
    array = arguments.as_integers("ids", ids, *inside)
    if isinstance(array, jax.Array):
        # It was not checked on its device.
        array = arguments.as_integers("ids", arguments.on_host("ids", array), *inside)
    if tokens is None:
        if pad_id is not None or order is not None:
            raise arguments.value_error("tokens", "those of ids, for pad_id and order", None)
        return
    check_token_positions("tokens", tokens)
    positions, segments = on_host(tokens)
    batch_size, length = len(tokens), positions.shape[1]
    rows = np.atleast_2d(array)
    # Tokens of one row are those of every row.
    expected = [len(rows) if batch_size == 1 else batch_size, length]
    arguments.check_same("ids", "the shape of tokens", [*rows.shape], expected)
    as_segment_ids("segment_ids", segments)
    if pad_id is not None:
        is_pad = rows == arguments.int32("pad_id", pad_id)
        wrong = np.argwhere(is_pad != (segments == 0))
        if len(wrong):
            row, n = wrong[0].tolist()
            what = "a token" if is_pad[row, n] else "padding"
            want = f"pad_id, {pad_id}, at padding and nowhere else"
            raise arguments.value_error("ids", want, f"{rows[row, n]} at [{row}, {n}], {what}")
    if order is not None:
        check_order(tokens, order)
