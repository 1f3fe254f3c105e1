"""The most probable ids of an output layer."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import all_gather, split_like
from transformer_embed._src.tokens.chunks import Layer, map_chunks, split_layers
from transformer_embed._src.tokens.lookup import Table
from transformer_embed._src.tokens.losses import (
    as_chunk_size,
    as_layer,
    check_known,
    every_token,
    shifted_logits,
)
from transformer_embed._src.tokens.output_layer import (
    OutputLayer,
    OutputOptions,
    row_logits,
)


def linear_top_k(
    x: ArrayLike,
    output: OutputLayer | ArrayLike | Table,
    k: int,
    *,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "... k"], Int32[Array, "... k"]]:
    """The k most probable ids of each token, and their log-probabilities.

    For the teacher's side of a distillation, predicted ids, beam search, and sampling from large
    vocabularies: `ids[..., 0]` is the argmax. Logits of the whole batch never exist. If the
    vocabulary is split over devices, each of them sends k numbers and ids of each token.

    Args:
        x: [..., d], a floating dtype.
        output: as in `linear_cross_entropy`. Its `pad_id`, and rows that only fill a shard, never
            appear.
        k: a Python int of at least 1 and at most the number of ids that may be predicted.
        chunk_size: as in `linear_cross_entropy`.

    Returns:
        A pair: log-probabilities [..., k], highest first, in float32 (float64 if x or the table
        is), and ids [..., k], int32. Of ids with equal ones, the lower id is first. Banned ids come
        last, with -inf.

        The result has no gradient. Where one is needed, pass the ids to `linear_log_probs`.

    Raises:
        TypeError: as for `linear_logits`; k is not a Python int.
        ValueError: as for `linear_logits`; k is out of its range; x of a symbolic size.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> output = te.OutputLayer(jnp.array([[9.0], [2.0], [3.0], [3.0]]), pad_id=0)
        >>> log_probs, ids = te.linear_top_k(jnp.ones([1]), output, 2)
        >>> print(ids, log_probs)
        [2 3] [-0.8619948 -0.8619948]

    Source:
        Truncated distributions for sampling: Fan et al., "Hierarchical Neural Story Generation"
        (2018), section 5.4, https://arxiv.org/abs/1805.04833
    """
    options, layer = as_layer(x, output)
    check_known("x", layer.x.shape)
    padding = options.pad_id is not None and 0 <= options.pad_id < options.vocab_size
    return _top_k(
        options,
        arguments.integer("k", k, at_least=1, at_most=options.vocab_size - padding),
        as_chunk_size(chunk_size),
        jax.lax.stop_gradient(layer),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _top_k(
    options: OutputOptions, k: int, chunk_size: int | None, layer: Layer
) -> tuple[Array, Array]:
    (split,), _, layers = split_layers((), [layer])

    def of_chunk(_: tuple, layers: tuple[Layer, ...]) -> tuple[Array, Array]:
        of_rows = row_logits(options, split, *layers[0][:3])
        found = shifted_logits(options, split, of_rows, None)
        total = jax.lax.psum(jnp.exp(found.shifted).sum(-1, keepdims=True), split.vocabulary)
        # A ban of -inf is above padding.
        lowest = jnp.finfo(total.dtype).min
        ranked = jnp.where(of_rows.is_inside, jnp.maximum(found.shifted, lowest), -jnp.inf)
        values, columns = jax.lax.top_k(ranked, min(k, ranked.shape[1]))
        ids = columns.astype(jnp.int32) + of_rows.ids[0, 0]
        if split.vocabulary:
            # In the order of ids, as the shards are: of equal ones, the first is found.
            gather = functools.partial(all_gather, axes=[(), split.vocabulary])
            values, best = jax.lax.top_k(gather(values), k)
            ids = jnp.take_along_axis(gather(ids), best, axis=1)
            # Equal on all devices, which their types do not know.
            values, ids = jax.lax.pmax((values, ids), split.vocabulary)
        return jnp.where(values == lowest, -jnp.inf, values) - jnp.log(total), ids

    values = map_chunks(of_chunk, chunk_size, (split,), (), layers)
    return jax.tree.map(lambda array: split_like(array, every_token(layer.x)), values)
