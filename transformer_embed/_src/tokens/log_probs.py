"""Computes log-probabilities under an output layer, for labels and for the most probable ids.

Shapes are written with these letters:

    t  tokens of a chunk
    k  ids of a token: the candidates, or the most probable ids
    v  table rows on this device
    d  channels of x

A vocabulary id is banned if the bias of the table row is -inf. Such an id has a probability of 0.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import change_column
from transformer_embed._src.partitioning import Axes, all_gather
from transformer_embed._src.tokens.loss_arithmetic import Loss, TokenValues
from transformer_embed._src.tokens.losses import as_labels, compute
from transformer_embed._src.tokens.output_layer import OutputLayer, as_output_layer
from transformer_embed._src.tokens.output_split import Layers, OutputSplit
from transformer_embed._src.tokens.row_logits import (
    ChunkLogits,
    chunk_logits,
    columns_of_labels,
    token_sums,
)
from transformer_embed._src.tokens.token_data import TokenData, TokenSettings

# The exponential of this number is 0, in float64 too.
RELATIVE_LOGIT_FLOOR = -1e4


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
    chunk_size: int | None = None,
) -> Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Computes the log-probability of each label without holding the logits of all tokens.

    Use it for losses that you compute from log-probabilities: ratios of two policies (GRPO, PPO),
    preferences (DPO), KL terms or multiple choice. You can take gradients through the result. Like
    `linear_cross_entropy`, the function computes logits for one chunk of tokens at a time, also in
    the backward pass. The section "What the loss costs" of the reference page has the time, the
    memory, and what devices exchange.

    Args:
        x: The hidden vectors of the last layer, of a floating dtype. Shape [..., d].
        output: The output layer. Pass an `OutputLayer`, for example from `Embedder.output`, or the
            table [vocab_size, d] of a layer that has only a table. Labels equal to the layer's
            `pad_id` are not counted.
        labels: The ids whose log-probabilities you want, of any integer dtype. Shape [...], like
            the tokens of x. The log-probability of `labels[..., t]` is computed from
            `x[..., t, :]`. If you set `shift`, pass the ids of the text as they are: then the
            log-probability is computed from `x[..., t - shift, :]`. To compare k candidate ids at
            each token, pass shape [..., k]. The candidates may be the choices of a question, or the
            ids from a teacher's `linear_top_k`. The logits of a token are computed once for all
            candidates of the token.
        temperature: The number that divides the logits, above 0 and at most 1e36. Pass the
            temperature at which the text was sampled, as a number or as a floating array that
            broadcasts to the tokens, such as [batch, 1]. An array may be traced and gets a
            gradient. Entry t of an array divides the logits that predict `labels[..., t]`, even
            with `shift`.
        mask: Which labels are counted. Bools that broadcast to the shape of the labels, True =
            counted. Set it to leave out the prompt. For one bool per batch row, pass
            `mask[:, None]`. If labels are [..., k] and you have one bool per token, pass
            `mask[..., None]`. If None, all labels are counted.
        shift: How many tokens ahead each token predicts, a Python int. Pass 1 (or True) for a
            language model, so that token t predicts `labels[..., t + 1]`. Pass 0 if you shifted the
            labels yourself.
        segment_ids: The number of the document that each token belongs to. Integers of shape
            [length], or of a shape that broadcasts to the tokens. If a batch row holds several
            documents and you set `shift`, pass `segment_ids` of your `TokenPositions`. Then the
            last token of a document does not predict the first token of the next document. 0 is
            padding. If None, each batch row is one document.
        with_entropy: Whether the entropy of each prediction is returned, too.
        chunk_size: The largest number of tokens in a chunk, the part of the batch whose logits are
            held at once. Set a smaller number to save memory. If None, a number is chosen, as the
            section "What the loss costs" of the reference page says.

    Returns:
        The log-probabilities, in the shape of the labels, in float32, or in float64 if x or the
        table is float64. Entry t is the log-probability of `labels[..., t]`, even with `shift`.
        With `with_entropy=True`, a pair of the log-probabilities and the entropies in nats. The
        entropies have the shape of the tokens. Entry t is the entropy of the distribution that
        predicts `labels[..., t]`.

    Raises:
        TypeError: An argument has a wrong type or dtype. You call the function inside the loss of
            `te.rows.value_and_grad`, with an output layer whose table is trained by rows. (Inside
            that loss, only some rows of the table are known, but the logits need all rows.)
        ValueError: `temperature` is a number outside the range above, or an argument is out of its
            range. The shapes of the arguments do not fit, or `segment_ids` is passed without
            `shift`. A size of the labels is symbolic (see `jax.export`). The columns of the table
            are split over n devices, and n does not divide the number of rows. (To compute logits,
            each of these devices takes 1/n of the rows, with all columns. A config with
            `row_multiple=n` makes the number of rows a multiple of n.)

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

    Edge cases:
        - If a label is not counted, the log-probability and the entropy are 0, and the hidden
          vector that predicts the label has no effect on any result or gradient. With `shift=1`,
          the first label of each document is not counted, because no token predicts it.
        - If you pass several candidate ids for each token, as labels of shape [..., k], a candidate
          that is not counted gets -inf as its log-probability. So the candidate adds nothing to a
          sum of probabilities by `jax.nn.logsumexp`. (Without candidates, a label that is not
          counted gets 0.)
        - If a counted label is outside the vocabulary, the log-probability is NaN.
        - `temperature` may be an array, such as [0.7, -1.0] for two labels. An entry out of range,
          here -1.0, makes the results for its label NaN, if the label is counted.
        - If the vocabulary is split over devices and x has 16 bits, the gradient of x is less
          accurate: each device rounds its part of the gradient to 16 bits before the parts are
          added.
        - If the bias bans every id, all log-probabilities are -inf, and the entropy is 0.
        - The same compiled program gives equal bits for equal arguments. Two programs may differ by
          a few units in the last place, because XLA fuses operations differently. For example, a
          call with gradients and a call without gradients are two programs. Calls inside different
          compiled functions are two programs, too, and so are calls with other shapes, another
          mesh, another `chunk_size` or another `with_entropy`. So if you compute the
          log-probabilities of one policy by two programs, the ratio of the probabilities may differ
          from 1 by about 1e-6.
    """
    pair = as_output_layer(x, output)
    ids = as_labels("labels", labels)
    with_entropy = arguments.flag("with_entropy", with_entropy)
    loss = LogProbs(
        shift=shift,
        chunk_size=chunk_size,
        of_candidates=ids.ndim >= pair.x.ndim,
        with_entropy=with_entropy,
    )
    return compute(
        loss,
        (pair,),
        temperature=temperature,
        labels=ids,
        mask=mask,
        segment_ids=segment_ids,
    )


@dataclasses.dataclass(frozen=True)
class LogProbs(Loss):
    """Computes the negative log-probability of each label, which is the loss of the label."""

    with_entropy: bool = False

    def returned(self, values: tuple[Array, ...], weights: Array) -> Any:
        """Returns the log-probabilities, and with `with_entropy` also the entropies."""
        losses = values[0]
        # A difference is taken, because the negative of 0 would be -0.
        log_probs = 0 - losses
        if self.of_candidates:
            # A candidate that is not counted has a weight of 0. Its probability counts as 0.
            log_probs = jnp.where(weights == 0, -jnp.inf, log_probs)
        if not self.with_entropy:
            return log_probs
        entropies = values[1]
        if self.of_candidates:
            # All candidates of a token share one entropy, which is on an axis of size 1.
            entropies = entropies[..., 0]
        return log_probs, entropies

    def values_from_logits(
        self,
        split: OutputSplit,
        logits: tuple[ChunkLogits, ...],
        labels: Int32[Array, "t k"],
        settings: TokenSettings,
    ) -> tuple[TokenValues, ...]:
        """Computes the losses, and with `with_entropy` also the entropies.

        With logits z, the maximum m of z, and `total = sum(exp(z - m))`, the loss of a label is

            log(total) - (z - m)[label]

        and its gradient with respect to z is `exp(z - m) / total`, minus 1 in the label's column.
        Here the gradients are stored times the total. The division comes later (see `TokenValues`).
        """
        (chunk,) = logits
        # The relative logits are z - m.
        exponentials = jnp.exp(chunk.relative_logits)
        # The column of each label, [t, k], which is out of range if another device has the label.
        columns = columns_of_labels(chunk, labels)
        # For each token, the sum of exponentials and the relative logit of each label.
        sums = token_sums(split, chunk, columns, row_shares=None)
        total = sums.total
        if self.of_candidates:
            # Each candidate has a gradient with a 1 less in another column. All of these share the
            # array of exponentials, and `subtracted_columns` says where the 1 will be subtracted.
            undivided_gradients = exponentials
            subtracted_columns = columns
        else:
            # The 1 of the only label is subtracted here. The gradients are stored times the total,
            # so the 1 becomes the total. `subtracted_columns` would be slower: a GPU would write an
            # array that is 0 except for the label's column, and add it in another pass.
            undivided_gradients = change_column(
                exponentials, columns, lambda old: old - total, is_last_change=False
            )
            subtracted_columns = None
        losses = TokenValues(
            values=jnp.log(total) - sums.label_logit,
            undivided_gradients=(undivided_gradients,),
            gradient_divisor=total,
            subtracted_columns=subtracted_columns,
        )
        if not self.with_entropy:
            return (losses,)
        return losses, self._entropy(split, chunk, exponentials, total)

    def _entropy(
        self, split: OutputSplit, chunk: ChunkLogits, exponentials: Array, total: Array
    ) -> TokenValues:
        """Computes the entropy of each token's prediction, `log(total) - mean`.

        `mean` is the mean of the relative logits, weighted by the probabilities. The gradient with
        respect to the logits is `exponentials * (mean - relative_logits) / total`.
        """
        # At a banned id, the exponential is 0 and the relative logit is -inf. Their product would
        # be NaN. With a relative logit of at least RELATIVE_LOGIT_FLOOR, the product is 0.
        products = exponentials * jnp.maximum(chunk.relative_logits, RELATIVE_LOGIT_FLOOR)
        mean = split.sum_over_vocabulary(products) / total
        # The formula `exponentials * (mean - relative_logits)` is multiplied out. The difference is
        # huge at padding, and would overflow in a second derivative. The division by the total
        # comes later (see `TokenValues`).
        gradients = exponentials * mean - products
        return TokenValues(
            values=jnp.log(total) - mean, undivided_gradients=(gradients,), gradient_divisor=total
        )


def linear_top_k(
    x: ArrayLike,
    output: OutputLayer | ArrayLike,
    k: int,
    *,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "... k"], Int32[Array, "... k"]]:
    """Finds the k most probable ids of each token, and computes their log-probabilities.

    Use it for the teacher of a distillation, for predicted ids (`ids[..., 0]` is the argmax), for
    beam search, and to sample from large vocabularies. Logits are computed for one chunk of tokens
    at a time. If the vocabulary is split over devices, each device sends only k numbers and k ids
    for each token.

    Args:
        x: The hidden vectors of the last layer, of a floating dtype. Shape [..., d].
        output: The output layer. Pass an `OutputLayer`, for example from `Embedder.output`, or the
            table [vocab_size, d] of a layer that has only a table. The returned ids are below the
            `vocab_size` of the layer and differ from the `pad_id` of the layer.
        k: How many ids to return, a Python int from 1 to the number of ids that may be predicted.
        chunk_size: The largest number of tokens in a chunk, the part of the batch whose logits are
            held at once. Set a smaller number to save memory. If None, a number is chosen as in
            `linear_cross_entropy`.

    Returns:
        A pair of arrays [..., k]. The first has the log-probabilities, highest first, in float32,
        or in float64 if x or the table is float64. The second has the ids, in int32. Of two ids
        with equal log-probabilities, the lower id comes first. Ids for which the layer's bias is
        -inf come last, with a log-probability of -inf.

        The result has no gradient. If you need a gradient, pass the ids to `linear_log_probs`.

    Raises:
        TypeError: `x` does not have a floating dtype of 16 bits or more, or `k` is not a Python
            int.
        ValueError: `k` is out of its range. A size of `x` is symbolic (see `jax.export`), or the
            width of the table differs from the width of x. The columns of the table are split over
            n devices, and n does not divide the number of rows. (To compute logits, each of these
            devices takes 1/n of the rows, with all columns. A config with `row_multiple=n` makes
            the number of rows a multiple of n.)

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> output = te.OutputLayer(jnp.array([[9.0], [2.0], [3.0], [3.0]]), pad_id=0)
        >>> log_probs, ids = te.linear_top_k(jnp.ones([1]), output, 2)
        >>> print(ids, log_probs)
        [2 3] [-0.8619948 -0.8619948]

    Source:
        Sampling from the k most probable ids is from Fan et al., "Hierarchical Neural Story
        Generation" (2018), section 5.4, https://arxiv.org/abs/1805.04833
    """
    pair = jax.lax.stop_gradient(as_output_layer(x, output))
    vocab_size = pair.output.size
    pad_id = pair.output.pad_id
    has_pad_row = pad_id is not None and 0 <= pad_id < vocab_size
    k = arguments.integer("k", k, at_least=1, at_most=vocab_size - has_pad_row)
    # With `of_candidates`, a token has several results, on an additional last axis. Here this axis
    # has the k ids.
    loss = TopK(chunk_size=chunk_size, of_candidates=True, k=k)
    return compute(loss, (pair,))


@dataclasses.dataclass(frozen=True)
class TopK(Loss):
    """Finds the k most probable ids of each token, with their log-probabilities."""

    has_gradients: ClassVar[bool] = False

    k: int = 1

    def values_of_chunk(
        self, token_data: TokenData, layers: Layers
    ) -> tuple[Float[Array, "t k"], Int32[Array, "t k"]]:
        """Computes the log-probabilities and ids of a chunk.

        Each device finds the ids with the highest relative logits among its rows. Then the devices
        exchange these ids and logits, and find the best of all. A log-probability is the relative
        logit minus the logarithm of the total.
        """
        (layer,) = layers
        mesh_axes = layer.split.vocabulary_mesh_axes
        chunk = chunk_logits(layer, temperature=None)
        total = jax.lax.psum(chunk.total, mesh_axes)
        # The relative logit of a banned id, whose bias is -inf, is -inf. If k is large, banned ids
        # may be returned, but padding must not. So for the ranking, banned ids get the lowest
        # finite number, and padding gets -inf, which is below.
        lowest = jnp.finfo(total.dtype).min
        finite_logits = jnp.maximum(chunk.relative_logits, lowest)
        ranked_logits = jnp.where(chunk.is_inside, finite_logits, -jnp.inf)
        count_of_device = min(self.k, ranked_logits.shape[1])
        best_logits, columns = jax.lax.top_k(ranked_logits, count_of_device)
        # The device's rows hold the ids from `first_id` on.
        ids = columns.astype(jnp.int32) + chunk.first_id
        if mesh_axes:
            # The k best of the best ids of all devices.
            best_logits, ids = _best_of_all_devices(self.k, mesh_axes, best_logits, ids)
        is_banned = best_logits == lowest
        log_probs = jnp.where(is_banned, -jnp.inf, best_logits) - jnp.log(total)
        return log_probs, ids


def _best_of_all_devices(
    k: int, mesh_axes: Axes, values: Float[Array, "t n"], ids: Int32[Array, "t n"]
) -> tuple[Float[Array, "t k"], Int32[Array, "t k"]]:
    """Finds the k highest values of each token among the n values of each device.

    Of equal values, the value with the lowest id comes first, because `top_k` returns the first of
    equal values. The gathered values of a device come before the values of the next device, which
    has higher ids.

    Args:
        k: How many values to return.
        mesh_axes: The mesh axes along which devices have different ids.
        values: The values of this device.
        ids: The id of each value.
    """
    # The arrays are [t, n]. Their first axis is not gathered. The second one is, over `mesh_axes`.
    gathered_axes = [(), mesh_axes]
    all_values = all_gather(values, gathered_axes)
    all_ids = all_gather(ids, gathered_axes)
    best_values, best_columns = jax.lax.top_k(all_values, k)
    best_ids = jnp.take_along_axis(all_ids, best_columns, axis=1)
    # The arrays are equal on all devices, but the types do not say so. A maximum over the devices
    # changes the types and no value.
    return jax.lax.pmax((best_values, best_ids), mesh_axes)
