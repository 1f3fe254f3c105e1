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
    count_since,
    index_in_segment,
    of_previous_token,
    positions_of_tokens,
)


class Counted(NamedTuple):
    """Positions and segment ids of tokens; 0 is the segment of padding."""

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
    begins = of_previous_token(ids == end_id)
    # Under strict dtype promotion, jax subtracts no bool.
    ones = with_whole_rows(is_token).astype(jnp.int32)
    tokens_before = jnp.cumsum(ones, axis=1, dtype=jnp.int32) - ones
    positions = count_since(tokens_before, begins) + start
    positions = jnp.where(is_token, positions, at_padding)
    segment_ids = 1 + jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    return Counted(positions=positions, segment_ids=jnp.where(is_token, segment_ids, 0))


@compiled()
def counted_from_positions(positions: Integer[Array, "b t"]) -> Counted:
    """Numbers the segments of packed positions, which restart at each segment."""
    positions = with_whole_rows(positions)
    before = of_previous_token(positions)
    # The second comparison finds positions that wrap at the end of their dtype.
    begins = (positions != before + 1) | (positions <= before)
    begins = begins.at[:, :1].set(True)
    segment_ids = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    return Counted(positions=positions, segment_ids=segment_ids)


@compiled(1, 2)
def counted_from_lengths(lengths: Int32[Array, "*b"], length: int, padding_side: str) -> Counted:
    """Counts the tokens of batch rows of these lengths, padded on one side."""
    index = jnp.arange(length, dtype=jnp.int32)
    index = index if padding_side == "right" else index[::-1]
    # Under strict rank promotion, jax compares no [length] with [batch, 1].
    index = index.reshape(*[1] * lengths.ndim, -1)
    return counted_from_mask(index < lengths[..., None])


@compiled()
def counted_from_segments(segment_ids: Integer[Array, "b t"]) -> Counted:
    """Counts, for each token, the tokens of its segment that are before it."""
    # On a device, nobody has looked for negative numbers.
    segment_ids = jnp.maximum(with_whole_rows(segment_ids), 0)
    positions = jnp.where(segment_ids != 0, index_in_segment(segment_ids), 0)
    return Counted(positions=positions, segment_ids=segment_ids)


@compiled(1)
def counted_from_offset(offset: Integer[Array, "*b"], length: int) -> Counted:
    """Counts tokens from an offset. Tokens past the end of the dtype become padding."""
    index = jnp.arange(length, dtype=offset.dtype).reshape(*[1] * offset.ndim, -1)
    first = offset[..., None]
    # Past the end of the dtype, the sum wraps.
    fits = first + index >= first
    positions = jnp.where(fits, first + index, 0)
    return Counted(positions=positions, segment_ids=fits.astype(positions.dtype))
