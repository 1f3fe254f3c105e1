"""The most probable ids of an output layer."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import all_gather
from transformer_embed._src.tokens.chunks import Layers, Loss, OfTokens, Splits
from transformer_embed._src.tokens.lookup import Table
from transformer_embed._src.tokens.losses import compute
from transformer_embed._src.tokens.output_layer import OutputLayer, as_output_layer
from transformer_embed._src.tokens.row_logits import chunk_logits


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
    x, output = jax.lax.stop_gradient(as_output_layer(x, output))
    vocab_size, pad_id = output.table.shape[0], output.pad_id
    padding = pad_id is not None and 0 <= pad_id < vocab_size
    k = arguments.integer("k", k, at_least=1, at_most=vocab_size - padding)
    return compute(TopK(chunk_size=chunk_size, k=k), ((x, output),))


@dataclasses.dataclass(frozen=True)
class TopK(Loss):
    """The log-probabilities and ids of the k most probable ids of a token."""

    k: int = 1

    def of_tokens(
        self, splits: Splits, of_tokens: OfTokens, layers: Layers
    ) -> tuple[Float[Array, "t k"], Int32[Array, "t k"]]:
        """Those of a chunk."""
        (split,), found = splits, chunk_logits(splits[0], layers[0], None)
        total = jnp.exp(found.shifted).sum(-1, keepdims=True)
        total = jax.lax.psum(total, split.vocabulary)
        # A ban of -inf is above padding.
        lowest = jnp.finfo(total.dtype).min
        ranked = jnp.where(found.is_inside, jnp.maximum(found.shifted, lowest), -jnp.inf)
        values, columns = jax.lax.top_k(ranked, min(self.k, ranked.shape[1]))
        ids = columns.astype(jnp.int32) + found.ids[0, 0]
        if split.vocabulary:
            # In the order of ids, as the shards are: of equal ones, the first is found.
            axes = [(), split.vocabulary]
            values, best = jax.lax.top_k(all_gather(values, axes), self.k)
            ids = jnp.take_along_axis(all_gather(ids, axes), best, axis=1)
            # Equal on all devices, which their types do not know.
            values, ids = jax.lax.pmax((values, ids), split.vocabulary)
        return jnp.where(values == lowest, -jnp.inf, values) - jnp.log(total), ids
