"""Scales queries by their position, for texts beyond the trained length."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from transformer_embed._src import arguments, conversions
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled


def query_scale(
    positions: ArrayLike, *, beta: float, length: int, offset: int = 0
) -> Float[Array, "..."]:
    """Computes a factor for each query, which keeps attention sharp in long texts.

        scale[...] = 1 + beta * log(1 + (positions[...] + offset) // length)

    The scale is 1 up to the trained length, and is the same for all heads of a token. After you
    rotate the queries [batch, length, heads, head_dim], multiply them by `scale[..., None, None]`.

    Args:
        positions: The positions of the queries. Integers of any shape. A negative position, which
            padding may have, counts as 0.
        beta: How fast the scale grows, at least 0.
        length: The length that the model was trained on, at least 1. The scale grows in steps:
            after every `length` positions, it becomes larger.
        offset: A number that is added to each position, 0 or 1. Pass 0 for Ministral 3 and 1 for
            Llama 4.

    Returns:
        The scales, in float32, of the shape of `positions`. The error is at most 2 units in the
        last place.

    Raises:
        TypeError: `positions` are not integers.
        ValueError: `beta`, `length` or `offset` is out of range, or positions in a list or a numpy
            array are outside int32.

    Example:
        >>> import transformer_embed as te
        >>> te.query_scale([0, 16_383, 16_384], beta=0.1, length=16_384).tolist()
        [1.0, 1.0, 1.06931471824646]

    Source:
        Scaling queries by the logarithm of the length is from Nakanishi, "Scalable-Softmax Is
        Superior for Attention" (2025), https://arxiv.org/abs/2501.19399. The formula is the one
        that Llama 4 and Ministral 3 have in transformers.
    """
    beta = arguments.not_negative("beta", beta)
    length = arguments.size("length", length)
    offset = arguments.integer("offset", offset, at_least=0, at_most=1)
    positions = conversions.on_device(arguments.as_integers("positions", positions))
    return _scale(positions, beta, length, offset)


# The function is compiled even if the caller is not.
@compiled(1, 2, 3)
def _scale(
    positions: Integer[Array, "..."], beta: float, length: int, offset: int
) -> Float[Array, "..."]:
    """Computes `query_scale` on a device."""
    # An unsigned dtype also holds the sum of the last position of int32 and the offset.
    dtype = jnp.uint64 if positions.dtype.itemsize == 8 else jnp.uint32
    counted_positions = jnp.maximum(positions, 0).astype(dtype)
    steps = (counted_positions + offset) // length
    return 1 + jnp.float32(beta) * jax.lax.log1p(steps.astype(jnp.float32))
