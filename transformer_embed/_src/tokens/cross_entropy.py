"""Computes the cross-entropy of an output layer with the labels of tokens.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device

A vocabulary id is banned if the bias of the table row is -inf. Such an id is never predicted.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import change_column
from transformer_embed._src.tokens.loss_arithmetic import Loss, TokenValues
from transformer_embed._src.tokens.losses import compute
from transformer_embed._src.tokens.output_layer import OutputLayer, as_output_layer
from transformer_embed._src.tokens.output_split import OutputSplit
from transformer_embed._src.tokens.row_logits import (
    ChunkLogits,
    TokenSums,
    columns_of_labels,
    token_sums,
)
from transformer_embed._src.tokens.token_data import TokenSettings


class LossMetrics(NamedTuple):
    """Holds the numbers to log beside a loss, which are reduced like the loss, without gradients.

    To get the means over several micro-batches, call the loss with `reduction="sum"`. Add the
    metrics of all batches, field by field. Then divide by the field `weight`, which is the sum of
    the weights.

    Args:
        accuracy: The share of labels that equal the most probable id. If several ids are equally
            probable, the lowest id counts as the prediction.
        z_loss: The part `z_loss * log_z**2` of the loss.
        log_z: The logarithm of the sum of the exponentials of the logits.
        weight: The sum of the weights of the counted labels. With `reduction="none"`, the weight of
            each label. A sum of 0 means that no label was counted, so the loss is 0, too.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[1.0], [2.0]])
        >>> options = {"reduction": "sum", "with_metrics": True}
        >>> loss, metrics = te.linear_cross_entropy(jnp.ones([3, 1]), table, [1, 1, 0], **options)
        >>> print(metrics.accuracy, metrics.weight, metrics.accuracy / metrics.weight)
        2.0 3.0 0.6666667
    """

    accuracy: Float[Array, "..."]
    z_loss: Float[Array, "..."]
    log_z: Float[Array, "..."]
    weight: Float[Array, "..."]


export.register_namedtuple_serialization(
    LossMetrics, serialized_name="transformer_embed.LossMetrics"
)


def linear_cross_entropy(
    x: ArrayLike,
    output: OutputLayer | ArrayLike,
    labels: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    shift: int = 0,
    segment_ids: ArrayLike | None = None,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    reduction: str = "mean",
    with_metrics: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "..."] | tuple[Float[Array, "..."], LossMetrics]:
    """Computes the cross-entropy of an output layer without holding the logits of all tokens.

    Use it to train a language model, in place of a loss on `linear_logits`. The logits of a large
    batch are the largest array of the training step, so the loss computes the logits of one chunk
    of tokens at a time. The section "What the loss costs" of the reference page has the time and
    the memory.

    Let z be the logits of a token, y the label, and V the number of ids that may be predicted.
    (Padding and ids with a bias of -inf may not be predicted.) All sums run over these V ids. With
    `log_z = log(sum(exp(z)))` and `s = label_smoothing`, the loss of the token is this:

        log_z - (1 - s) * z[y] - s * sum(z) / V + z_loss * log_z**2

    Args:
        x: The hidden vectors of the last layer, of a floating dtype. Shape [..., d].
        output: The output layer. Pass an `OutputLayer`, for example from `Embedder.output`, or the
            table [vocab_size, d] of a layer that has only a table. Labels equal to the layer's
            `pad_id` are not counted. With `shift=1`, the first label after padding is not counted
            either, because a padding token would predict this label. So you may pad on the left.
        labels: The ids to predict, of any integer dtype. Shape [...], like the tokens of x. If you
            set `shift`, pass the ids of the text. Otherwise `labels[..., t]` is the id that token t
            should predict.
        mask: Which labels are counted. Bools that broadcast to the shape of the labels, True =
            counted. Set it to train on a part of the text, such as the answers. For example, pass
            `labels != -100` if all labels outside the answers are -100. For one bool per batch row,
            pass `mask[:, None]`. If None, all labels are counted.
        weights: A factor for the loss of each label. Floats that broadcast to the shape of the
            labels. Set it if some labels matter more than others. If None, all factors are 1.
        shift: How many tokens ahead each token predicts, a Python int. Pass 1 (or True) for a
            language model. Then token t predicts `labels[..., t + 1]`, and the last token predicts
            nothing. Entry t + 1 of the mask and the weights belongs to this prediction. For a head
            that predicts k tokens ahead, pass k. Pass 0 if you shifted the labels yourself.
        segment_ids: The number of the document that each token belongs to. Integers of shape
            [length], or of a shape that broadcasts to the tokens. If a batch row holds several
            documents and you set `shift`, pass `segment_ids` of your `TokenPositions`. Then the
            last token of a document does not predict the first token of the next document. 0 is
            padding. Every other number, positive or negative, is a document. If None, each batch
            row is one document.
        label_smoothing: The share of each label that is spread evenly over the V ids, in [0, 1).
            Pass a number, or a floating array that broadcasts to the tokens. An array gets a
            gradient. It may be traced, so you can change the share during training.
        z_loss: The factor of `log_z**2` in the loss, with log_z = `log(sum(exp(logits)))`. At least
            0. Pass a number, or a floating array that broadcasts to the tokens. Set a small number,
            such as 1e-4 (PaLM), to keep log_z near 0.
        reduction: How the losses are joined. `"mean"` divides the sum of the losses by the sum of
            the weights. Both sums run over the labels that are counted (see `mask`). `"sum"`
            returns the sum, which you can add up over batches. `"none"` returns the loss of each
            label, times the weight of the label.
        with_metrics: Whether `LossMetrics` are returned too. Set True to log them.
        chunk_size: The largest number of tokens in a chunk, the part of the batch whose logits are
            held at once. Set a smaller number to save memory. If None, logits of at most 256 MiB
            are computed in one chunk. For larger logits, a number is chosen, as the section "What
            the loss costs" of the reference page says.

    Returns:
        The loss, a scalar in float32, or in float64 if x or the table is float64. With
        `reduction="none"`, an array in the shape of `labels`. Entry t is the loss of
        `labels[..., t]`, even with `shift`. With `with_metrics=True`, a pair of the loss and
        `LossMetrics`, so you can call `jax.value_and_grad(..., has_aux=True)`.

    Raises:
        TypeError: An argument has a wrong type or dtype. You call the function inside the loss of
            `te.rows.value_and_grad`, with an output layer whose table is trained by rows. (Inside
            that loss, only some rows of the table are known, but the logits need all rows.)
        ValueError: An argument is out of its range, or the shapes of the arguments do not fit.
            `segment_ids` is passed without `shift`. A size of the labels is symbolic (see
            `jax.export`). The columns of the table are split over n devices, and n does not divide
            the number of rows. (To compute logits, each of these devices takes 1/n of the rows,
            with all columns. A config with `row_multiple=n` makes the number of rows a multiple of
            n.)

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]])
        >>> x = jnp.array([[0.0, 0.0], [0.0, 0.0], [5.0, 5.0]])
        >>> output = te.OutputLayer(table, pad_id=-1)
        >>> print(te.linear_cross_entropy(x, output, [1, 2, -1]))  # log(3)
        1.0986123
        >>> jax.grad(te.linear_cross_entropy)(x, output, [1, 2, -1])[2].tolist()
        [0.0, 0.0]

    Edge cases:
        - If no label is counted, the loss and the gradients are 0, as if every prediction were
          right. A wrong mask can be the cause, so log `LossMetrics.weight`, which is 0 in this
          case.
        - If a counted label is outside the vocabulary, the loss is NaN. The gradient of the table,
          and the gradient of x at the token that predicts this label, are NaN, too.
        - The `pad_id` is never predicted. To leave out labels whose id may be predicted elsewhere,
          use `mask`.
        - A `pad_id` outside the vocabulary, such as -100, marks labels that are not counted. With
          `shift=1`, a label is counted even if the label before it is -100. For example, the labels
          of a prompt of two tokens and an answer of two tokens are [-100, -100, 7, 8]. Then the
          losses of the labels 7 and 8 are counted. The last token of the prompt predicts the 7.
        - The x of a token has an effect only if the token predicts a counted label. Otherwise this
          x may even be NaN. But the logits of such a token are computed, too. If few labels are
          counted, as in a masked language model, pass only the x and the labels of the tokens that
          predict a counted label.
        - Gradients are summed over the chunks in float32 or wider, then cast once. One case is less
          accurate: `reduction="none"`, with an x of 16 bits and a vocabulary that is split over
          devices. Then each device rounds its part of the gradient of x to 16 bits before the parts
          are added.
        - If the bias bans every id, the loss is infinite and the gradients are finite.
        - A weight of 0 removes the loss of a label completely, even a loss that is infinite or NaN.
        - If the weights of all counted labels are 0, the mean is 0. In this case, the derivative of
          the mean with respect to a weight is the loss of the label.
        - If some weights are negative, use `reduction="sum"`, because `"mean"` divides by the sum
          of the weights, which may be 0 or negative.
        - `label_smoothing` and `z_loss` may be arrays, such as [0.1, 2.0] for two labels. An entry
          out of range, here the label smoothing 2.0, makes the loss of its label NaN. But if you
          also pass `weights`, and the weight of this label is 0, the loss of the label is 0.
        - If x and the table are in bfloat16, the gradients of the logits are rounded to bfloat16
          before they are multiplied by x and by the table. A loss on `linear_logits` rounds them in
          the same way.

    Source:
        Label smoothing is from Szegedy et al., "Rethinking the Inception Architecture" (2016),
        section 7, https://arxiv.org/abs/1512.00567. The z-loss is from Chowdhery et al., "PaLM"
        (2022), section 5, https://arxiv.org/abs/2204.02311. The name of the function and `shift`
        are from Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024),
        https://arxiv.org/abs/2411.09009
    """
    loss = CrossEntropy(
        shift=shift,
        chunk_size=chunk_size,
        reduction=reduction,
        with_metrics=arguments.flag("with_metrics", with_metrics),
    )
    return compute(
        loss,
        (as_output_layer(x, output),),
        labels=labels,
        mask=mask,
        weights=weights,
        segment_ids=segment_ids,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


@dataclasses.dataclass(frozen=True)
class CrossEntropy(Loss):
    """Computes the cross-entropy of each token's prediction with the label."""

    with_metrics: bool = False

    def returned(self, values: tuple[Array, ...], weights: Array) -> Any:
        """Returns the losses, and with `with_metrics` also `LossMetrics`."""
        if not self.with_metrics:
            (losses,) = values
            return losses
        losses, accuracy, z_loss, log_z = values
        metrics = LossMetrics(accuracy=accuracy, z_loss=z_loss, log_z=log_z, weight=weights)
        return losses, jax.lax.stop_gradient(metrics)

    def values_from_logits(
        self,
        split: OutputSplit,
        logits: tuple[ChunkLogits, ...],
        labels: Int32[Array, "t 1"],
        settings: TokenSettings,
    ) -> tuple[TokenValues, ...]:
        """Computes the losses, and with `with_metrics` also accuracy, z-loss and log_z.

        With logits z, their maximum m, targets p that sum to 1, `total = sum(exp(z - m))` and
        `log_z = log(total) + m`, the loss of a token is

            log(total) - sum(p * (z - m)) + z_loss * log_z**2

        and its gradient with respect to z is

            (exp(z - m) - scale * p) / scale,  with  scale = total / (1 + 2 * z_loss * log_z)

        The target p of each row is `smoothing * row_share`, and `1 - smoothing` more at the label.
        """
        (chunk,) = logits
        smoothing = settings.label_smoothing
        # The relative logits are the logits z minus the largest logit m of each token.
        exponentials = jnp.exp(chunk.relative_logits)
        # The column of each label, [t, 1], which is out of range if another device has the label.
        columns = columns_of_labels(chunk, labels)
        # The weight of each row in the mean of the logits, which only smoothing needs.
        row_shares = None if smoothing is None else _row_shares(split, chunk)
        # For each token, the sum of exponentials, the label's relative logit, and the mean.
        sums = token_sums(split, chunk, columns, row_shares)
        log_total = jnp.log(sums.total)
        log_z = log_total + chunk.largest_logit
        # The losses without the z-loss. `sums` has the relative logit `z - m` of the label, and the
        # mean of the relative logits over the rows that may be predicted.
        if smoothing is None:
            losses = log_total - sums.label_logit
            smoothing_gradient = None
        else:
            label_target = 1.0 - smoothing
            losses = log_total - label_target * sums.label_logit - smoothing * sums.mean_logit
            smoothing_gradient = _smoothing_gradient(sums)
        z_losses = jnp.zeros_like(log_z)
        z_loss_gradient = None
        # The `scale` of the formula above, in which the divisor is 1 if there is no z-loss.
        scale = sums.total
        if settings.z_loss is not None:
            scale = sums.total / _log_z_derivative(settings.z_loss, log_z)
            z_losses = settings.z_loss * log_z**2
            losses += z_losses
            z_loss_gradient = log_z**2
        gradients = _undivided_gradients(exponentials, columns, scale, smoothing, row_shares)
        setting_gradients = TokenSettings(
            label_smoothing=smoothing_gradient, z_loss=z_loss_gradient
        )
        loss_values = TokenValues(
            values=losses,
            undivided_gradients=(gradients,),
            gradient_divisor=scale,
            setting_gradients=setting_gradients,
        )
        if not self.with_metrics:
            return (loss_values,)
        is_right = _most_probable_id(split, chunk) == labels
        accuracy = is_right.astype(log_z.dtype)
        return loss_values, TokenValues(accuracy), TokenValues(z_losses), TokenValues(log_z)


def _undivided_gradients(
    exponentials: Float[Array, "t v"],
    columns: Int32[Array, "t 1"],
    scale: Float[Array, "t 1"],
    smoothing: Float[Array, "t 1"] | None,
    row_shares: Float[Array, "1 v"] | None,
) -> Float[Array, "t v"]:
    """Computes `exp(z - m) - scale * p`, which is `scale` times the gradient of each loss.

    The gradients are with respect to the logits. `exponentials` are `exp(z - m)` for logits z and
    the largest logit m of each token. The target p is `smoothing * row_shares`, and `1 - smoothing`
    more in the column of the label. If labels are not smoothed, `smoothing` and `row_shares` are
    None, and p is 1 in the column of the label.
    """
    if smoothing is None or row_shares is None:
        return change_column(exponentials, columns, lambda old: old - scale, is_last_change=True)
    label_target = 1.0 - smoothing
    # `change_column` must know whether this is the last change of the array. It is not: the
    # subtraction below changes all columns again.
    gradients = change_column(
        exponentials, columns, lambda old: old - label_target * scale, is_last_change=False
    )
    return gradients - smoothing * scale * row_shares


def _smoothing_gradient(sums: TokenSums) -> Float[Array, "t 1"]:
    """Computes the gradient of a loss with respect to the label smoothing.

    More smoothing moves the target from the label to all rows alike. So the gradient is the logit
    of the label minus the mean logit. If the label is banned, the gradient counts as 0, because it
    would be infinite.
    """
    is_banned = jnp.isneginf(sums.label_logit)
    return jnp.where(is_banned, 0, sums.label_logit - sums.mean_logit)


def _log_z_derivative(
    z_loss: Float[Array, "t 1"], log_z: Float[Array, "t 1"]
) -> Float[Array, "t 1"]:
    """Computes the derivative of `log_z + z_loss * log_z**2` with respect to log_z.

    A derivative of 0 is replaced by a tiny number, because the caller divides by it.
    """
    derivative = 1 + 2 * z_loss * log_z
    return jnp.where(derivative == 0, jnp.finfo(derivative.dtype).eps, derivative)


def _most_probable_id(split: OutputSplit, chunk: ChunkLogits) -> Int32[Array, "t 1"]:
    """Returns the lowest of the ids that have the largest logit on all devices."""
    above_all_ids = jnp.iinfo(jnp.int32).max
    is_largest = chunk.unscaled == chunk.largest
    candidates = jnp.where(is_largest, chunk.ids, above_all_ids)
    lowest_id = candidates.min(-1, keepdims=True)
    mesh_axes = split.vocabulary_mesh_axes
    return jax.lax.pmin(lowest_id, mesh_axes) if mesh_axes else lowest_id


def _row_shares(split: OutputSplit, chunk: ChunkLogits) -> Float[Array, "1 v"]:
    """Returns the share of each row in a mean over the rows that may be predicted.

    The share is 1 / V for each of these V rows, counted on all devices, and 0 for other rows.
    """
    is_possible = jnp.broadcast_to(chunk.is_inside, chunk.ids.shape)
    if chunk.is_banned is not None:
        is_possible &= ~chunk.is_banned
    count_of_device = is_possible.sum()
    count = jax.lax.psum(count_of_device, split.vocabulary_mesh_axes)
    count = count.astype(chunk.unscaled.dtype)
    share = 1 / jnp.maximum(count, 1)
    return jnp.where(is_possible, share, 0)
