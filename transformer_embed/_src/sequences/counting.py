"""Counts tokens: positions and segment ids from ids, lengths, segments and the like.

The functions are compiled even if the caller is not. In shapes, b counts batch rows and t counts
the tokens of a row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Integer

from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import with_whole_rows
from transformer_embed._src.sequences.runs import (
    index_in_segment,
    positions_of_tokens,
    previous_token_values,
    restarted_count,
)


class Counted(NamedTuple):
    """Holds the positions and the segment ids of tokens; 0 is the segment of padding."""

    positions: Integer[Array, "*b t"]
    segment_ids: Integer[Array, "*b t"]


@compiled(1, 2)
def counted_from_mask(
    is_token: Bool[Array, "*b t"], start: int = 0, at_padding: int = 0
) -> Counted:
    """Counts the tokens of each batch row, which is one sequence."""
    positions = positions_of_tokens(is_token, start, at_padding)
    return Counted(positions=positions, segment_ids=is_token.astype(jnp.int32))


@compiled(1, 2, 3, 4)
def counted_from_ids(
    ids: Int32[Array, "b t"], pad_id: int, end_id: int | None, start: int, at_padding: int
) -> Counted:
    """Counts the tokens of each text. A text ends with `end_id`, or with its batch row if None."""
    is_token = ids != pad_id
    if end_id is None:
        return counted_from_mask(is_token, start, at_padding)
    # A text begins after the end of another one: the array is shifted by one token to the right.
    begins_text = previous_token_values(ids == end_id)
    # Explicit mesh axes may split a row over devices, but the sum needs the whole row. Each token
    # is 1 and padding is 0, as integers: under strict dtype promotion, jax subtracts no bool.
    ones = with_whole_rows(is_token).astype(jnp.int32)
    tokens_up_to_here = jnp.cumsum(ones, axis=1, dtype=jnp.int32)
    tokens_before = tokens_up_to_here - ones
    # `restarted_count` subtracts the count at the first token of the text from the count, which
    # gives 0 at the first token of each text.
    index_in_text = restarted_count(tokens_before, begins_text)
    positions = jnp.where(is_token, index_in_text + start, at_padding)
    text_number = 1 + jnp.cumsum(begins_text, axis=1, dtype=jnp.int32)
    segment_ids = jnp.where(is_token, text_number, 0)
    return Counted(positions=positions, segment_ids=segment_ids)


@compiled()
def counted_from_positions(positions: Integer[Array, "b t"]) -> Counted:
    """Numbers the segments of packed positions, which restart at each segment."""
    positions = with_whole_rows(positions)
    previous = previous_token_values(positions)
    # The second comparison is for positions at the end of their dtype, where `previous + 1` wraps.
    begins_segment = (positions != previous + 1) | (positions <= previous)
    begins_segment = begins_segment.at[:, :1].set(True)
    segment_ids = jnp.cumsum(begins_segment, axis=1, dtype=jnp.int32)
    return Counted(positions=positions, segment_ids=segment_ids)


@compiled(1, 2)
def counted_from_lengths(lengths: Int32[Array, "*b"], length: int, padding_side: str) -> Counted:
    """Counts the tokens of batch rows of these lengths, padded on one side."""
    # The distance of each index of the row from the side on which the tokens are.
    distance = jnp.arange(length, dtype=jnp.int32)
    if padding_side == "left":
        distance = distance[::-1]
    # Users may forbid jax to compare arrays of different rank, such as [length] with [batch, 1].
    # So the distances get as many axes as the lengths and one more.
    batch_axes = [1] * lengths.ndim
    distance = distance.reshape(*batch_axes, -1)
    is_token = distance < lengths[..., None]
    return counted_from_mask(is_token)


@compiled()
def counted_from_segments(segment_ids: Integer[Array, "b t"]) -> Counted:
    """Counts, for each token, the tokens of its segment that are before it."""
    # Segment ids on a device were not checked. A negative one becomes padding.
    segment_ids = jnp.maximum(with_whole_rows(segment_ids), 0)
    positions = jnp.where(segment_ids != 0, index_in_segment(segment_ids), 0)
    return Counted(positions=positions, segment_ids=segment_ids)


@compiled(1)
def counted_from_offset(offset: Integer[Array, "*b"], length: int) -> Counted:
    """Counts `length` tokens from an offset. Tokens past the end of the dtype become padding."""
    batch_axes = [1] * offset.ndim
    index = jnp.arange(length, dtype=offset.dtype).reshape(*batch_axes, -1)
    first = offset[..., None]
    # Past the end of the dtype, the sum wraps to a number below `first`.
    fits = first + index >= first
    positions = jnp.where(fits, first + index, 0)
    return Counted(positions=positions, segment_ids=fits.astype(positions.dtype))
