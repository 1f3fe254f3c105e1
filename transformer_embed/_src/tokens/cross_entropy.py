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
    columns_of_ids,
    token_sums,
)
from transformer_embed._src.tokens.token_data import TokenSettings


class LossMetrics(NamedTuple):
    """Holds the numbers to log beside a loss, which are reduced like the loss, without gradients.

    To join micro-batches, compute sums with `reduction="sum"`, add the fields of the batches, then
    divide by `weight`.

    Args:
        accuracy: The share of labels that equal the most probable id. If several ids are equally
            probable, the lowest of them is compared.
        z_loss: The part `z_loss * log_z**2` of the loss.
        log_z: The logarithm of the sum of the exponentials of the logits.
        weight: The sum of the weights of the counted labels. With `reduction="none"`, the weight of
            each label. If 0, no label was counted, and then the loss is 0 too.

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
    batch are its largest array, so the loss computes them for one chunk of tokens at a time. "What
    the loss costs", a section of the reference page, has time and memory.

    Let z be the logits of a token and y its label. The label is compared with the V ids that may be
    predicted, which are all ids but padding and ids with a bias of -inf. All sums run over these
    ids. With `log_z = log(sum(exp(z)))` and s for `label_smoothing`, the loss of the token is

        log_z - (1 - s) * z[y] - s * sum(z) / V + z_loss * log_z**2

    Args:
        x: The hidden vectors of the last layer, [..., d], of a floating dtype.
        output: The output layer: an `OutputLayer`, as `Embedder.output` returns it, or a table
            [vocab_size, d] if there is no bias, softcap, scale or `pad_id`. Labels equal to the
            layer's `pad_id` are not counted. With `shift`, a token that is padding itself predicts
            nothing, so you may pad on the left.
        labels: The ids to predict, [...], of any integer dtype. With `shift`, pass the ids of the
            text. Without `shift`, `labels[..., t]` is the id that token t should predict.
        mask: Which labels are counted (True), a bool array that broadcasts to the labels' shape.
            Set it to train on a part of the text, such as the answers (`labels != -100`, if the
            other labels are -100). For one bool per batch row, pass `mask[:, None]`. If None, all
            labels are counted.
        weights: A factor for the loss of each label, a floating array that broadcasts like `mask`.
            Set it if some labels matter more than others. If None, all factors are 1.
        shift: How many tokens ahead the label of each token stands, a Python int. Pass 1 (or True)
            for a language model. Then token t predicts `labels[..., t + 1]`, with the mask and the
            weight of that label, and the last token predicts nothing. If a model has heads that
            predict further ahead, pass k for the head that predicts `labels[..., t + k]`. Pass 0
            if you shifted the labels yourself.
        segment_ids: The document of each token, integers [length], or with more axes that broadcast
            to the tokens. Pass the ids of your `TokenPositions` if batch rows are packed and
            `shift` is set. Then no token predicts a label of another document. Id 0 is padding; a
            negative id is a document. If None, each batch row is one document.
        label_smoothing: The share of each label that is spread evenly over the V ids, in [0, 1). It
            is a number, or a floating array that broadcasts to the tokens. An array may be traced,
            for a schedule, and gets a gradient.
        z_loss: The factor of `log_z**2` in the loss, at least 0, as a number or an array like
            `label_smoothing`. Set it (PaLM: 1e-4) to keep log_z near 0.
        reduction: How the losses are joined. `"mean"` divides their sum by the sum of the weights
            of the counted labels. `"sum"` returns the sum, which you can add up over batches.
            `"none"` returns the loss of each label, times its weight.
        with_metrics: Whether to return `LossMetrics` too, for a log.
        chunk_size: The largest number of tokens in a chunk. Set a smaller one to save memory. If
            None, all tokens are one chunk if their logits take at most 256 MiB. Otherwise the
            logits of a chunk take about a sixth of 256 MiB, or more if a chunk would then have
            fewer than d tokens.

    Returns:
        The loss, a scalar in float32 (in float64 if x or the table is). With `reduction="none"`, an
        array [...] that has the loss of `labels[..., t]` at t, also with `shift`. With
        `with_metrics=True`, the pair of the loss and `LossMetrics`, as
        `jax.value_and_grad(..., has_aux=True)` expects it.

    Raises:
        TypeError: an argument has another dtype or type; or the table holds only some of its rows,
            as a tied table does inside `te.rows.value_and_grad`.
        ValueError: an argument is out of its range; shapes do not fit together; `segment_ids` is
            given without `shift`; the labels have a symbolic size; or the columns of the table are
            split over a number of devices that does not divide the number of table rows.

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
        - If no label is counted, the loss and its gradients are 0, as if every prediction were
          right. Log `LossMetrics.weight`, which is 0 then, to notice an inverted mask.
        - If a counted label is outside the vocabulary, the loss is NaN. So are the gradients of the
          table and of x at the token that predicts this label.
        - `pad_id` also removes its id from the predictions. To leave out labels whose id must still
          be predicted, use `mask`.
        - If `pad_id` is outside the vocabulary, such as -100, it only marks labels. With `shift`, a
          token with this mark then still predicts the next label: the last token of a prompt
          predicts the first token of the answer.
        - Where a token predicts no counted label, x has no effect, even if it is NaN.
        - Gradients are summed in float32 or wider over the chunks, then cast once. With
          `reduction="none"`, if the vocabulary is split over devices and x has 16 bits, each device
          rounds its part of the gradient of x, and then the parts are added.
        - If the bias bans every id, the loss is infinite and its gradients are finite.
        - A weight of 0 removes the loss of a label completely, even a loss that is infinite or NaN.
        - With negative weights, use `"sum"`: `"mean"` divides by a sum that may be 0 or negative.
        - Where an array `label_smoothing` or `z_loss` is out of range, the loss of a label with a
          weight other than 0 is NaN.
        - If x and the table are in bfloat16, the gradients of the logits are rounded to bfloat16
          before they are multiplied, as in a loss on `linear_logits`.

    Source:
        Label smoothing: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7,
        https://arxiv.org/abs/1512.00567. z_loss: Chowdhery et al., "PaLM" (2022), section 5,
        https://arxiv.org/abs/2204.02311. The name and shift: Wijmans et al., "Cut Your Losses in
        Large-Vocabulary Language Models" (2024), https://arxiv.org/abs/2411.09009
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
        exponentials = jnp.exp(chunk.shifted)
        columns = columns_of_ids(chunk, labels)
        row_shares = None if smoothing is None else _row_shares(split, chunk)
        sums = token_sums(split, chunk, columns, row_shares)
        log_total = jnp.log(sums.total)
        log_z = log_total + chunk.factor * chunk.top
        losses = _losses_without_z_loss(log_total, sums, smoothing)
        smoothing_gradient = None if smoothing is None else _smoothing_gradient(sums)
        z_losses = jnp.zeros_like(log_z)
        z_loss_gradient = None
        scale = sums.total
        if settings.z_loss is not None:
            scale = sums.total / _log_z_derivative(settings.z_loss, log_z)
            z_losses = settings.z_loss * log_z**2
            losses += z_losses
            z_loss_gradient = log_z**2
        gradients = _scaled_gradients(exponentials, columns, scale, smoothing, row_shares)
        setting_gradients = TokenSettings(
            label_smoothing=smoothing_gradient, z_loss=z_loss_gradient
        )
        loss_values = TokenValues(
            values=losses,
            scaled_gradients=(gradients,),
            gradient_scale=scale,
            setting_gradients=setting_gradients,
        )
        if not self.with_metrics:
            return (loss_values,)
        is_right = _most_probable_id(split, chunk) == labels
        accuracy = is_right.astype(log_z.dtype)
        return loss_values, TokenValues(accuracy), TokenValues(z_losses), TokenValues(log_z)


def _losses_without_z_loss(
    log_total: Float[Array, "t 1"], sums: TokenSums, smoothing: Float[Array, "t 1"] | None
) -> Float[Array, "t 1"]:
    """Computes the cross-entropy of each token, `log(total) - sum(p * (z - m))`.

    z are the logits, and m is the largest logit. If labels are not smoothed, the target p is 1 at
    the label and 0 elsewhere. Otherwise it is `1 - smoothing` at the label, plus `smoothing` spread
    evenly over all rows that may be predicted.
    """
    if smoothing is None:
        return log_total - sums.label_logit
    return log_total - (1.0 - smoothing) * sums.label_logit - smoothing * sums.mean_logit


def _scaled_gradients(
    exponentials: Float[Array, "t v"],
    columns: Int32[Array, "t 1"],
    scale: Float[Array, "t 1"],
    smoothing: Float[Array, "t 1"] | None,
    row_shares: Float[Array, "1 v"] | None,
) -> Float[Array, "t v"]:
    """Computes `exp(z - m) - scale * p`, the gradients with respect to the logits times `scale`.

    `exponentials` are `exp(z - m)` for logits z and the largest logit m of each token. The target p
    is `smoothing * row_shares`, and `1 - smoothing` more in the column of the label.
    """
    if smoothing is None or row_shares is None:
        return change_column(exponentials, columns, lambda old: old - scale, is_last_change=True)
    label_target = 1.0 - smoothing
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
    """Returns the lowest id whose logit is the largest, on all devices."""
    above_all_ids = jnp.iinfo(jnp.int32).max
    candidates = jnp.where(chunk.logits == chunk.top, chunk.ids, above_all_ids)
    ids = candidates.min(-1, keepdims=True)
    mesh_axes = split.vocabulary_mesh_axes
    return jax.lax.pmin(ids, mesh_axes) if mesh_axes else ids


def _row_shares(split: OutputSplit, chunk: ChunkLogits) -> Float[Array, "1 v"]:
    """Returns 1 / V for each row that may be predicted, if there are V on all devices, else 0."""
    is_possible = jnp.broadcast_to(chunk.is_inside, chunk.ids.shape)
    if chunk.is_banned is not None:
        is_possible &= ~chunk.is_banned
    count = jax.lax.psum(is_possible.sum(), split.vocabulary_mesh_axes).astype(chunk.logits.dtype)
    return jnp.where(is_possible, 1 / jnp.maximum(count, 1), 0)
