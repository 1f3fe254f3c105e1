"""Checks a batch on the host, before a compiled step that cannot raise errors."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.sequences.token_arrays import as_segment_ids
from transformer_embed._src.sequences.token_order import check_order, tokens_on_host
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
    max_len: int | None = None,
) -> None:
    """Checks a batch, and raises an error that says where the first mistake is.

    Call it in your data pipeline, outside `jax.jit`, because compiled code cannot raise errors
    about values. Inside `jax.jit`, `lookup` returns NaN for an id outside the vocabulary. If you
    declare a layout of the tokens to a function of `te.kernels`, by `order`, nothing checks the
    layout inside `jax.jit`, and tokens in another layout give wrong outputs.

    Args:
        ids: The ids of the batch, of any integer dtype. The shape is [length] or [batch, length] if
            you pass `tokens`, and otherwise any shape. The ids must not be traced.
        tokens: The positions and segments of the ids, a `TokenPositions` that is not traced. If you
            pass it, the function checks that `ids` has the same shape. With `pad_id`, it also
            checks where the padding is. With `order`, it also checks the layout of the tokens.
        vocab_size: The number of ids in the vocabulary, at least 1.
        pad_id: The id of padding, which may be outside the vocabulary, such as -100. Pass the
            `pad_id` of your config. If you also pass `tokens`, the ids are compared with the
            padding of `tokens`: all padding must have the `pad_id`, and no other token may have it.
            (If another token had the `pad_id`, a loss would take this token for padding and leave
            it out.) If None, padding may have any id of the vocabulary.
        order: The layout of the tokens that you declare to a function of `te.kernels`. `"full"`
            means that each batch row is one sequence without padding. `"right"` means that each
            batch row has one sequence, then padding. `"packed"` means that each batch row has any
            number of sequences, one after the other, with padding on the left, between them or on
            the right. In all three layouts, positions rise by one from token to token of a
            sequence. If None, any layout is accepted.
        max_len: The number of learned positions, as in `te.Learned`. Pass it if your model has
            learned positions: a position past the end of their table gives NaN, as an id outside
            the vocabulary does. All positions of `tokens` must be from 0 to max_len - 1. If None,
            any position is accepted.

    Raises:
        TypeError: `ids` does not hold integers, or `tokens` is not a `TokenPositions`. `ids` or an
            array of `tokens` is traced.
        ValueError: An id is neither in the vocabulary nor the `pad_id`, or a segment id is
            negative. A token that is not padding has the `pad_id`, or padding has another id. The
            tokens are not in the layout `order`, or `ids` and `tokens` differ in shape. A position
            is outside the learned positions. `order` or `max_len` is passed without `tokens`.

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
        - If `tokens` has a single batch row, this row describes every batch row of `ids`.
        - The first position of a sequence may be any number. Only the steps from one position to
          the next are checked.
    """
    vocab_size = arguments.size("vocab_size", vocab_size)
    if pad_id is not None:
        pad_id = arguments.int32("pad_id", pad_id)
    # The ids on the host, after a check that each is inside the vocabulary or is the `pad_id`.
    host_ids = _checked_ids(ids, vocab_size, pad_id)
    if max_len is not None:
        max_len = arguments.size("max_len", max_len)
    if tokens is None:
        if order is not None or max_len is not None:
            want = "the tokens of ids, to check their order or their positions"
            raise arguments.value_error("tokens", want, None)
        return
    check_token_positions("tokens", tokens)
    positions, segment_ids = tokens_on_host(tokens)
    # The number of batch rows of the tokens, which may be 1.
    row_count = number_of_rows(tokens)
    length = positions.shape[1]
    id_rows = np.atleast_2d(host_ids)
    # If there is one batch row of tokens, it describes every batch row of ids.
    expected_row_count = len(id_rows) if row_count == 1 else row_count
    expected_shape = [expected_row_count, length]
    arguments.check_same("ids", "the shape of tokens", [*id_rows.shape], expected_shape)
    # `as_segment_ids` raises an error if a segment id is negative or beyond int32. With x64, a
    # segment id may be beyond int32, so such ids are clipped before the check.
    as_segment_ids("segment_ids", segment_ids.clip(max=2**31 - 1))
    if pad_id is not None:
        _check_padding(id_rows, segment_ids, pad_id)
    if order is not None:
        check_order(tokens, order)
    if max_len is not None:
        arguments.as_integers("positions", positions, 0, max_len - 1, "the learned positions")


def _check_padding(id_rows: np.ndarray, segment_ids: np.ndarray, pad_id: int) -> None:
    """Raises an error unless an id equals `pad_id` exactly where the segment id is 0 (padding)."""
    has_pad_id = id_rows == pad_id
    is_padding = segment_ids == 0
    wrong_places = np.argwhere(has_pad_id != is_padding)
    if len(wrong_places):
        row, column = wrong_places[0].tolist()
        place = "a token" if has_pad_id[row, column] else "padding"
        want = f"pad_id, {pad_id}, at padding and nowhere else"
        got = f"{id_rows[row, column]} at [{row}, {column}], {place}"
        raise arguments.value_error("ids", want, got)


def _checked_ids(ids: ArrayLike, vocab_size: int, pad_id: int | None) -> np.ndarray:
    """Returns the ids on the host, as int32, after a check that they are in range.

    Each id must be inside the vocabulary, or be the `pad_id`.
    """
    last_id = vocab_size - 1
    array = arguments.as_array("ids", ids)
    if isinstance(array, jax.Array):
        array = arguments.on_host("ids", array)
    if array.size == 0:
        # `ids` is converted and not `array`. For an empty list, `array` is float64 and would be
        # refused.
        return np.asarray(arguments.as_integers("ids", ids))
    if pad_id is None or 0 <= pad_id <= last_id:
        checked_ids = arguments.as_integers("ids", array, 0, last_id, "the vocabulary")
        return np.asarray(checked_ids)
    # The `pad_id` is outside the vocabulary, where the check would refuse it. So the check gets id
    # 0 in the place of the `pad_id`. (`array == pad_id` fails for ids of a narrow dtype.)
    is_padding = _is_equal(array, pad_id)
    without_padding = np.where(is_padding, np.zeros_like(array), array)
    range_name = f"the vocabulary, or pad_id, {pad_id}"
    checked_ids = arguments.as_integers("ids", without_padding, 0, last_id, range_name)
    return np.where(is_padding, np.int32(pad_id), checked_ids)


def _is_equal(array: np.ndarray, number: int) -> np.ndarray:
    """Returns where an array equals an integer that the array's dtype may not hold.

    numpy cannot compare integers of 2 and 4 bits with such an integer.
    """
    if jnp.issubdtype(array.dtype, jnp.integer):
        limits = jnp.iinfo(array.dtype)
        if limits.min <= number <= limits.max:
            return array == number
    return np.zeros(array.shape, bool)
