"""A scale of queries that grows with their position, for texts beyond the trained length."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import compiled


def query_scale(
    positions: ArrayLike, *, beta: float, length: int, offset: int = 0
) -> Float[Array, "..."]:
    """What queries are multiplied by, so that attention stays sharp in texts beyond `length`.

        scale[...] = 1 + beta * log(1 + (positions[...] + offset) // length)

    It is 1 up to the trained length, and is the same for all heads of a token: a query
    [batch, length, heads, head_dim] is multiplied by `scale[..., None, None]`, after its rotation.

    Args:
        positions: integers; those below 0, of padding, count as 0.
        beta: how fast it grows, at least 0.
        length: tokens of each step, at least 1: the length that the model was trained on.
        offset: 0 (Ministral 3) or 1 (Llama 4).

    Returns:
        float32 of the shape of positions, to 2 units in the last place.

    Raises:
        TypeError: positions are not integers.
        ValueError: beta, length or offset is out of range; positions on the host outside int32.

    Example:
        >>> import transformer_embed as te
        >>> te.query_scale([0, 16_383, 16_384], beta=0.1, length=16_384).tolist()
        [1.0, 1.0, 1.06931471824646]

    Source:
        Nakanishi, "Scalable-Softmax Is Superior for Attention" (2025),
        https://arxiv.org/abs/2501.19399, as Llama 4 and Ministral 3 have it in the transformers
        library.
    """
    beta = arguments.not_negative("beta", beta)
    length = arguments.size("length", length)
    offset = arguments.integer("offset", offset, at_least=0, at_most=1)
    positions = arguments.on_device(arguments.as_integers("positions", positions))
    return _scale(positions, beta, length, offset)


# Compiled even if the caller is not.
@compiled(1, 2, 3)
def _scale(
    positions: Integer[Array, "..."], beta: float, length: int, offset: int
) -> Float[Array, "..."]:
    # Unsigned, because the last position of int32 and the offset are more than int32 holds.
    dtype = jnp.uint64 if positions.dtype.itemsize == 8 else jnp.uint32
    steps = (jnp.maximum(positions, 0).astype(dtype) + offset) // length
    return 1 + jnp.float32(beta) * jax.lax.log1p(steps.astype(jnp.float32))
