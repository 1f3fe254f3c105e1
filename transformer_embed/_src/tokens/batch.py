"""The check of a batch on the host, before a step that cannot raise."""

import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.sequences.token_arrays import as_segment_ids
from transformer_embed._src.sequences.token_order import check_order, on_host
from transformer_embed._src.sequences.token_positions import (
    TokenPositions,
    check_token_positions,
    number_of_rows,
)


def check_batch(
    ids: ArrayLike,
    tokens: TokenPositions | None = None,
    *,
    vocab_size: int,
    pad_id: int | None = None,
    order: str | None = None,
) -> None:
    """Checks a batch, and raises an error that names the first wrong place.

    Call it in your data pipeline, outside `jax.jit`, because compiled code cannot raise errors
    about values. Inside `jax.jit`, `lookup` returns NaN for an id outside the vocabulary, and
    nothing checks that tokens lie in the order that you declared to an attention kernel.

    Args:
        ids: The ids of the batch, [...], of any integer dtype. With `tokens`, they are [length] or
            [batch, length]. They must not be traced.
        tokens: The positions and segments of these ids. Pass `tokens` if the shape of `ids`,
            the place of padding or the order should be checked too. They must not be traced.
        vocab_size: The number of ids in the vocabulary, at least 1.
        pad_id: The id of padding. Pass the `pad_id` of your config, to check that this id stands at
            padding and nowhere else. Elsewhere a loss would leave out a label that
            `TokenPositions.next_token_mask` counts, and a token that counts as padding would not be
            trained on. If None, any id may stand at padding.
        order: The layout of the tokens, as in `te.kernels`. Pass the order that you declare there.
            `"full"` means one sequence and no padding in each batch row. `"right"` means one
            sequence in each batch row, then padding. `"packed"` means any number of sequences, each
            in one run of tokens, with padding anywhere between them (also on the left). In all
            three, positions rise by one from token to token of a sequence. If None, any order is
            accepted.

    Raises:
        TypeError: ids are not integers; tokens is not a `TokenPositions`; or one of them is traced.
        ValueError: an id is outside the vocabulary; a segment id is negative; `pad_id` stands
            inside a sequence, or another id at padding; the tokens lie in another order; ids and
            tokens differ in shape; or `pad_id` or `order` is given without `tokens`.

    Example:
        >>> import transformer_embed as te
        >>> te.check_batch([[1, 2], [3, 50257]], vocab_size=50257)
        Traceback (most recent call last):
        ValueError: ids: wanted integers inside the vocabulary, 0..50256, got 50257 at index [1, 1]
        >>> ids, tokens = [[5, 6, 0, 7]], te.TokenPositions.from_segment_ids([[1, 1, 1, 1]])
        >>> te.check_batch(ids, tokens, vocab_size=8, pad_id=0)
        Traceback (most recent call last):
        ValueError: ids: wanted pad_id, 0, at padding and nowhere else, got 0 at [0, 2], a token

    Edge cases:
        - If `tokens` has a single row, it describes every batch row of `ids`.
        - Positions may start anywhere. Only the steps between them are checked.
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
    batch_size = number_of_rows(tokens)
    length = positions.shape[1]
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
