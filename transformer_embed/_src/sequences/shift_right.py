"""Makes the inputs of a decoder from its labels: the labels, one token to the right."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import split_like
from transformer_embed._src.sequences.runs import previous_token_values
from transformer_embed._src.sequences.token_positions import as_comparable


def shift_right(
    ids: ArrayLike, first_id: int, *, segment_ids: ArrayLike | None = None
) -> Int32[Array, "... t"]:
    """Shifts ids one token to the right, so that `first_id` comes first.

    Use it to make the input of a decoder from the labels, as in T5, BART and Whisper. The input at
    each token is then the label before the token, and the input at the first token of a sequence is
    `first_id`.

    Args:
        ids: The labels, of any integer dtype. Shape [..., length].
        first_id: The id that each sequence begins with. T5 uses the id of padding.
        segment_ids: The number of the sequence that each token belongs to, and 0 at padding.
            Integers of shape [length] or [..., length]. Set it for packed or padded batch rows.
            Then each sequence begins with `first_id`, and padding keeps the id of padding. (A
            sequence is a run of neighbouring tokens with the same number.) If None, each batch row
            is one sequence.

    Returns:
        The labels of each sequence, moved one token to the right after `first_id`, so the last
        label of a sequence is not in the result. int32, of the shape of `ids`.

    Raises:
        TypeError: `ids` or `segment_ids` does not hold integers, or `first_id` is not a Python int.
        ValueError: `ids` has no axis, or `segment_ids` does not broadcast to the shape of `ids`.
            `first_id` is outside int32.

    Example:
        >>> import transformer_embed as te
        >>> te.shift_right([[5, 6, 7]], 1).tolist()
        [[1, 5, 6]]
        >>> te.shift_right([[5, 6, 7, 8, 0]], 1, segment_ids=[[1, 1, 2, 2, 0]]).tolist()
        [[1, 5, 1, 7, 0]]

    Source:
        The shift is from Raffel et al., "T5" (2020), https://arxiv.org/abs/1910.10683. Mesh
        TensorFlow, the code of T5, also begins each packed sequence with `first_id`.
    """
    ids = arguments.as_int32("ids", ids)
    arguments.check_shape("ids", ids.shape, ids.ndim > 0, "[..., length]")
    first_id = arguments.int32("first_id", first_id)
    if segment_ids is None:
        return _shifted(ids, first_id)
    segments = as_comparable("segment_ids", segment_ids)
    arguments.check_broadcasts("segment_ids", segments.shape, ids.shape, with_length=True)
    return _shifted_in_segments(ids, segments, first_id)


# The functions below are compiled even if the caller is not.


@compiled(1)
def _shifted(ids: Int32[Array, "... t"], first_id: int) -> Int32[Array, "... t"]:
    """Shifts the ids of each batch row to the right, and puts `first_id` at the row's start."""
    is_first = jnp.arange(ids.shape[-1], dtype=jnp.int32) == 0
    is_first = jnp.broadcast_to(is_first, ids.shape)
    return jnp.where(is_first, first_id, previous_token_values(ids))


@compiled(2)
def _shifted_in_segments(
    ids: Int32[Array, "... t"], segment_ids: Integer[Array, "..."], first_id: int
) -> Int32[Array, "... t"]:
    """Shifts ids inside each segment, and puts `first_id` at the start of each segment."""
    previous_ids = previous_token_values(ids)

    def for_each_id(condition: Bool[Array, "..."]) -> Bool[Array, "... t"]:
        """Broadcasts a condition to the ids, and splits it over devices as the shifted ids are.

        Explicit mesh axes must split all arrays of a `jnp.where` in the same way.
        """
        return split_like(jnp.broadcast_to(condition, ids.shape), previous_ids)

    # The token before the first token of a batch row counts as padding, with the segment 0.
    is_first = segment_ids != previous_token_values(segment_ids)
    is_padding = segment_ids == 0
    is_first = for_each_id(is_first)
    is_padding = for_each_id(is_padding)
    shifted = jnp.where(is_first, first_id, previous_ids)
    # Padding keeps its own id. The ids, too, must be split over devices as the shifted ids are.
    own_ids = split_like(ids, previous_ids)
    return jnp.where(is_padding, own_ids, shifted)
