"""Log-probabilities under an output layer: of labels, and of the most probable ids."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Bool, Float, Int32, UInt32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import change_column
from transformer_embed._src.partitioning import all_gather, index_along
from transformer_embed._src.tokens.chunks import (
    Layers,
    Loss,
    OfTokens,
    Value,
    again_in_backward,
    nan_outside,
)
from transformer_embed._src.tokens.lookup_gradient import read_or_zero
from transformer_embed._src.tokens.losses import compute
from transformer_embed._src.tokens.output_layer import OutputLayer, as_output_layer
from transformer_embed._src.tokens.row_logits import (
    biased_and_capped,
    chunk_logits,
    columns_of,
    sums_of_rows,
    times,
)

# Where shifted logits are below, their exponentials are 0, in float64 too.
FLOOR = -1e4
# Reading a row takes a CPU as long as some twenty products with one.
PRODUCTS_OF_READ = 20


def linear_log_probs(
    x: ArrayLike,
    output: OutputLayer | ArrayLike,
    labels: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    mask: ArrayLike | None = None,
    shift: int = 0,
    segment_ids: ArrayLike | None = None,
    with_entropy: bool = False,
    truncated: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The log-probability of each label under `linear_logits`, one chunk of tokens at a time.

    Reinforcement learning on language models takes gradients through functions of them: ratios of
    two policies, clips, KL terms. Logits of a large batch never exist, neither in the forward nor
    in the backward pass. "What the loss costs", a section of the reference page, has time and
    memory, and what devices exchange.

    Args:
        x: [..., d], a floating dtype.
        output: as in `linear_cross_entropy`.
        labels: [...], any integer dtype: the id whose log-probability each token asks for; with
            shift, the ids themselves. With one more axis [..., k], k candidates of each token, as
            for multiple choice, or a teacher's `linear_top_k`: one pass over the vocabulary serves
            all of them.
        shift, segment_ids, chunk_size: as in `linear_cross_entropy`.
        temperature: above 0, that of sampling: the logits are divided by it. A number, or a
            floating array that broadcasts to the tokens, such as [batch, 1]; it may be traced, and
            has a gradient. NaN where an array is not above 0, at labels that are counted. With
            shift, that of `labels[..., t]` is at t.
        mask: as in `linear_cross_entropy`. Labels that a prompt gives are usually not counted. Of
            candidates, any shape that broadcasts to theirs: a mask of tokens is `mask[..., None]`.
        with_entropy: True returns entropies too.
        truncated: True: the labels [..., k] are the ids that top-k or top-p sampling kept, and each
            log-probability is that among them. Those of other ids cancel, so only the rows of the
            labels are read: with few of them it takes a fraction of the time. Labels of a token are
            all different: one that stands twice counts twice. Fill short sets with the `pad_id` of
            the output layer, or with ids that mask leaves out. There are no entropies.

    Returns:
        [...], in float32 (float64 if x or the table is): at each label, its log-probability given
        the token that predicts it. With shift, that of `labels[..., t]` is at t, and the first
        labels of a sequence have none. With `with_entropy=True` it is a pair, whose second array
        has at each label the entropy, in nats, of the distribution that predicts it.

        Both are 0 at labels that are not counted, where x has no effect. The log-probability of a
        counted label outside the vocabulary is NaN.

        Of candidates [..., k]: those that are not counted have -inf, so that they add nothing to a
        sum of probabilities, as `jax.nn.logsumexp` computes it. Entropies are [...].

        The same compiled function gives equal bits for equal arguments. With and without gradients,
        or inside another function, the results may differ by a few units in the last place, because
        XLA fuses them with other operations: the ratio of a policy to itself is 1 to about 1e-6.
        The same holds for another `chunk_size`, batch shape, mesh or `with_entropy`.

    Raises:
        TypeError: as for `linear_cross_entropy`; with_entropy or truncated is not a Python bool.
        ValueError: as for `linear_cross_entropy`; a temperature is a number that is not above 0;
            truncated with entropies, or without an axis of candidates.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[0.0, 0.0], [3.0, 4.0]])
        >>> x = jnp.zeros([1, 3, 2])
        >>> ids = jnp.array([[0, 1, 1]])
        >>> log_probs, entropy = te.linear_log_probs(x, table, ids, shift=True, with_entropy=True)
        >>> print(log_probs, entropy)  # log(1 / 2), and log(2)
        [[ 0.        -0.6931472 -0.6931472]] [[0.        0.6931472 0.6931472]]

        >>> def ppo_loss(x, old_log_probs, advantages):
        ...     log_probs = te.linear_log_probs(x, table, ids, shift=True)
        ...     ratio = jnp.exp(log_probs - old_log_probs)
        ...     clipped = jnp.clip(ratio, 0.8, 1.2)
        ...     return -jnp.minimum(ratio * advantages, clipped * advantages).mean()
        >>> jax.grad(ppo_loss)(x, log_probs, jnp.ones([1, 3])).shape
        (1, 3, 2)

        >>> kept = jnp.array([[[1, 0], [0, 1], [0, 0]]])
        >>> output = te.OutputLayer(table, pad_id=1)  # fills short sets
        >>> print(jnp.exp(te.linear_log_probs(x, output, kept, truncated=True)))
        [[[0.  1. ]
          [1.  0. ]
          [0.5 0.5]]]

    Source:
        Top-p: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), section 3.1,
        https://arxiv.org/abs/1904.09751
    """
    x, output = as_output_layer(x, output)
    ids = arguments.as_int32("labels", labels)
    options: Any = {"of_candidates": ids.ndim >= x.ndim}
    options["with_entropy"] = arguments.flag("with_entropy", with_entropy)
    kind = LogProbs
    if arguments.flag("truncated", truncated):
        kind = TruncatedLogProbs
        arguments.check_same("labels", "as many axes as x, for truncated", ids.ndim, x.ndim)
        arguments.check_same("with_entropy", "the only choice if truncated", with_entropy, False)
    loss = kind(shift, chunk_size, **options)
    tokens = {"labels": ids, "mask": mask, "segment_ids": segment_ids}
    return compute(loss, ((x, output),), temperature=temperature, **tokens)


@dataclasses.dataclass(frozen=True)
class LogProbs(Loss):
    """The negative log-probability of each of a token's labels."""

    with_entropy: bool = False

    def returned(self, values: tuple[Array, ...], weights: Array) -> Any:
        """The log-probabilities, and the entropies if they are asked for."""
        losses, *entropies = values
        # A difference, because the negative of 0 is -0.
        log_probs = 0 - losses
        if self.of_candidates:
            log_probs = jnp.where(weights == 0, -jnp.inf, log_probs)
            # A token has one.
            entropies = [each[..., 0] for each in entropies]
        return (log_probs, *entropies) if entropies else log_probs

    def of_chunk(self, split, logits, labels, settings) -> tuple[Value, ...]:
        """The losses, and the entropies if they are asked for.

        With logits z, their maximum m, `total = sum(exp(z - m))` and
        `mean = sum(exp(z - m) * (z - m)) / total`, the entropy is `log(total) - mean`, and its
        gradient in z is `exp(z - m) * (mean - (z - m)) / total`.
        """
        (chunk,) = logits
        exponentials, columns = jnp.exp(chunk.shifted), columns_of(chunk, labels)
        total, of_label, _ = sums_of_rows(split, chunk, columns, None)
        slopes, subtracted = exponentials, columns
        if not self.of_candidates:
            # A GPU would write zeros but for one column, and add them in another pass.
            slopes, subtracted = (
                change_column(slopes, columns, lambda old: old - total, is_last=False),
                None,
            )
        losses = Value(jnp.log(total) - of_label, (slopes,), total, subtracted)
        if not self.with_entropy:
            return (losses,)
        # A ban counts as 0.
        products = exponentials * jnp.maximum(chunk.shifted, FLOOR)
        mean = split.total(products) / total
        # Not `exponentials * (mean - shifted)`: that factor is huge at padding, and would overflow
        # in the derivative by the slope.
        slopes = exponentials * mean - products
        return losses, Value(jnp.log(total) - mean, (slopes,), total)


class TruncatedLogProbs(LogProbs):
    """The negative log-probability of each label among those of its token, without other rows."""

    def bytes_of_token(self, of_tokens: OfTokens, layers: Layers) -> Any:
        """Of the rows that it reads, or of all logits."""
        rows, count = layers[0].wide, jnp.asarray(of_tokens.labels).shape[-1]
        if _needs_all(rows, count):
            return super().bytes_of_token(of_tokens, layers)
        return count * rows.shape[1] * rows.dtype.itemsize

    def of_tokens(self, of_tokens: OfTokens, layers: Layers, is_only: bool) -> tuple[Array, ...]:
        """The losses of a chunk."""
        of_chunk = _truncated if is_only else again_in_backward(_truncated)
        return of_chunk(self, of_tokens, layers)


def _truncated(_: Loss, of_tokens: OfTokens, layers: Layers) -> tuple[Array]:
    """The losses of a chunk."""
    (layer,) = layers
    split, rows, bias = layer.split, layer.wide, layer.bias
    columns = jnp.asarray(of_tokens.labels) - index_along(split.vocabulary) * rows.shape[0]
    # As uint32, a negative column is past the end, like that of another device's row.
    columns = columns.astype(jnp.uint32)
    x, is_kept = layer.x.astype(rows.dtype), of_tokens.weights != 0
    if _needs_all(rows, columns.shape[1]):
        products = _at(columns, jnp.einsum("td,vd->tv", x, rows), is_kept)
    else:
        products = jnp.einsum("td,tkd->tk", x, read_or_zero(rows, columns))
    bias = None if bias is None else read_or_zero(bias[:, None], columns)[..., 0]
    logits, factor = biased_and_capped(split, products, bias)
    if of_tokens.settings.temperature is not None:
        factor /= of_tokens.settings.temperature
    # Each row is on one of the devices.
    logits = jnp.where(columns < rows.shape[0], times(factor, logits), 0)
    logits = jax.lax.psum(logits, split.vocabulary) + 0 * nan_outside(split, of_tokens)
    # Where none is counted, the sum is that of all: its gradient is finite.
    is_kept |= ~is_kept.any(-1, keepdims=True)
    log_z = jax.nn.logsumexp(jnp.where(is_kept, logits, -jnp.inf), axis=-1, keepdims=True)
    return (log_z - logits,)


def _needs_all(rows: Array, count: int) -> bool:
    """Whether the products with all rows take less time than to read so many for each token."""
    # A vocabulary of a symbolic size counts as a large one.
    size = rows.shape[0]
    return not export.is_symbolic_dim(size) and size <= PRODUCTS_OF_READ * count


def _at(
    columns: UInt32[Array, "t k"], products: Float[Array, "t v"], is_kept: Bool[Array, "t #k"]
) -> Float[Array, "t k"]:
    """The products of each token in the columns that are kept; 0 in others.

    On a GPU, gradients of a column that is read twice would be added in any order. So each is read
    once, and copied to where it stands again.
    """
    # Of columns' rank, because users may disable jax's rank promotion.
    size, place = products.shape[1], jnp.arange(columns.shape[1], dtype=jnp.uint32)[None]
    # Which has no column is past the end, each in a place of its own.
    columns = jnp.where(is_kept & (columns < size), columns, size + place)
    is_same = columns[:, :, None] == columns[:, None]
    is_first = ~(is_same & (place[:, :, None] < place[:, None])).any(1)
    options = {"mode": "fill", "fill_value": 0, "unique_indices": True}
    once = jnp.where(is_first, columns, size + place)
    # By vmap, a mesh may split the rows.
    at_once = jax.vmap(lambda row, index: row.at[index].get(**options))(products, once)

    def copied():
        return jnp.where(is_same & is_first[:, :, None], at_once[:, :, None], 0).sum(1)

    return jax.lax.cond(is_first.all(), lambda: at_once, copied)


def linear_top_k(
    x: ArrayLike,
    output: OutputLayer | ArrayLike,
    k: int,
    *,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "... k"], Int32[Array, "... k"]]:
    """The k most probable ids of each token, and their log-probabilities.

    For the teacher's side of a distillation, predicted ids, beam search, and sampling from large
    vocabularies: `ids[..., 0]` is the argmax. Logits of a large batch never exist. If the
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
    vocab_size, pad_id = output.size, output.pad_id
    padding = pad_id is not None and 0 <= pad_id < vocab_size
    k = arguments.integer("k", k, at_least=1, at_most=vocab_size - padding)
    return compute(TopK(chunk_size=chunk_size, of_candidates=True, k=k), ((x, output),))


@dataclasses.dataclass(frozen=True)
class TopK(Loss):
    """The log-probabilities and ids of the k most probable ids of a token."""

    k: int = 1

    def of_tokens(
        self, of_tokens: OfTokens, layers: Layers, is_only: bool
    ) -> tuple[Float[Array, "t k"], Int32[Array, "t k"]]:
        """Those of a chunk."""
        split, chunk = layers[0].split, chunk_logits(layers[0], None)
        total = jax.lax.psum(chunk.total, split.vocabulary)
        # A ban of -inf is above padding.
        lowest = jnp.finfo(total.dtype).min
        ranked = jnp.where(chunk.is_inside, jnp.maximum(chunk.shifted, lowest), -jnp.inf)
        values, columns = jax.lax.top_k(ranked, min(self.k, ranked.shape[1]))
        ids = columns.astype(jnp.int32) + chunk.ids[0, 0]
        if split.vocabulary:
            # In the order of ids, as the shards are: of equal ones, the first is found.
            axes = [(), split.vocabulary]
            values, best = jax.lax.top_k(all_gather(values, axes), self.k)
            ids = jnp.take_along_axis(all_gather(ids, axes), best, axis=1)
            # Equal on all devices, which their types do not know.
            values, ids = jax.lax.pmax((values, ids), split.vocabulary)
        return jnp.where(values == lowest, -jnp.inf, values) - jnp.log(total), ids
