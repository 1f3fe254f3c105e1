"""The cross-entropy of an output layer and the entropy of its predictions."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import change_column
from transformer_embed._src.tokens.chunks import Loss, Settings, Value
from transformer_embed._src.tokens.losses import compute
from transformer_embed._src.tokens.output_layer import OutputLayer, as_output_layer
from transformer_embed._src.tokens.output_split import OutputSplit
from transformer_embed._src.tokens.row_logits import ChunkLogits, columns_of_ids, token_sums


class LossMetrics(NamedTuple):
    """What is logged beside a loss: reduced as the loss is, and without gradients.

    To join micro-batches, take sums, by `reduction="sum"`: add the fields, then divide by `weight`.

    Args:
        accuracy: of labels that are the most probable id (of equal ones, the lowest id).
        z_loss: the part `z_loss * log_z**2` of the loss.
        log_z: the logarithm of the sum of the exponentials of the logits.
        weight: the sum of the weights of counted labels; with `reduction="none"`, each of them. 0
            says that no label was counted, where the loss is 0 too.

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
    """The cross-entropy of `linear_logits` with the labels, computed one chunk of tokens at a time.

    For a token with logits z and label y, over the V ids that may be predicted (not padding, not
    banned by a bias of -inf), with `log_z = log(sum(exp(z)))` and smoothing s,
    `loss = log_z - (1 - s) * z[y] - s * sum(z) / V + z_loss * log_z**2`.

    For its time and memory, see "What the loss costs", a section of the reference page.

    Args:
        x: [..., d], a floating dtype.
        output: an `OutputLayer`, or the table of one without other settings, [vocab_size, d].
            Labels that are its `pad_id` are not counted; to leave out labels and keep their row of
            the table, use mask. With shift, a token whose own label is `pad_id` predicts nothing
            (padding on the left), unless `pad_id` is outside the vocabulary and only marks labels,
            such as -100.
        labels: [...], any integer dtype: the id that each token should predict; with shift, the ids
            themselves.
        mask: bool, any shape that broadcasts to the labels'. True = the label is counted;
            `labels != -100` for example. One for each row is `mask[:, None]`. None: all.
        weights: floating, shaped as mask: each label's loss is multiplied by its weight. None: 1.
            With negative ones, do not take the mean: the sum of weights that divides it may be 0 or
            less.
        shift: a Python int k: token t predicts `labels[..., t + k]`, which brings its mask and
            weight; the last k tokens predict nothing. 0: each label stands where it is predicted.
            1, or True: each token predicts the next one. A head that predicts several tokens ahead
            has its own k.
        segment_ids: integers, [length], or more axes that broadcast to the tokens', for packed
            sequences, with shift: those of `TokenPositions` (0 = padding; a negative number is
            not). A token predicts nothing if `labels[..., t + k]` has another segment id, such as
            the last k tokens of a sequence. None: one sequence a row.
        label_smoothing: in [0, 1): the part of each label that is spread evenly over the ids that
            may be predicted. A number, or a floating array that broadcasts to the tokens; it may be
            traced, as that of a schedule, and has a gradient. NaN where an array is out of range,
            at a label with a weight.
        z_loss: at least 0, which keeps log_z near 0 (PaLM: 1e-4). Like label_smoothing.
        reduction: `"mean"` divides the sum over the counted labels by the sum of their weights;
            `"sum"` does not; `"none"` returns each label's loss times its weight.
        with_metrics: True returns `LossMetrics` too, for a log.
        chunk_size: the largest number of tokens in a chunk. None: all tokens if their logits take
            at most 256 MiB, or else about as many as have a sixth of that, and at least d or, if
            their logits fit into 256 MiB, 2 d, up to 2048 tokens.

    Returns:
        A scalar in float32 (float64 if x or the table is); with `reduction="none"`, an array [...].
        The loss and its gradients are 0 if no label is counted, as if all were right: a mask of the
        wrong polarity is seen in `LossMetrics.weight` alone. They are NaN if a counted label is
        outside the vocabulary. At tokens that are not counted, x has no effect, even if it is NaN.
        A weight of 0 leaves exactly 0 of a loss, even of an infinite one or NaN. If x and the table
        are in bfloat16, gradients of logits are rounded to it before they are multiplied.

        With shift and `reduction="none"`, the loss of `labels[..., t]` is at t. With
        `with_metrics=True` it is a pair, as `jax.value_and_grad(..., has_aux=True)` takes it.

    Raises:
        TypeError: an argument of another dtype or type; a table that has only some of its rows, as
            inside `te.rows.value_and_grad`.
        ValueError: an argument out of its range, or shapes that do not fit together; labels of a
            symbolic size; segment_ids without shift; columns split over a number of devices that
            does not divide the number of rows.

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
    """The cross-entropy of a token with its label."""

    with_metrics: bool = False

    def returned(self, values: tuple[Array, ...], weights: Array) -> Any:
        """The losses, and `LossMetrics` if they are asked for."""
        losses, *metrics = values
        if not self.with_metrics:
            return losses
        return losses, LossMetrics(*jax.lax.stop_gradient([*metrics, weights]))

    def values_from_logits(self, split, logits, labels, settings) -> tuple[Value, ...]:
        """Computes the losses, and the other values that are asked for.

        With logits z, their maximum m, targets p that sum to 1, `total = sum(exp(z - m))` and
        `log_z = log(total) + m`, the loss is `log(total) - sum(p * (z - m)) + z_loss * log_z**2`.
        Its gradient in z is `(exp(z - m) - mass * p) / mass`, with
        `mass = total / (1 + 2 * z_loss * log_z)`. Its slopes are that without the division, which
        would cost another operation for each of them.
        """
        (chunk,) = logits
        smoothing = settings.label_smoothing
        z_loss = settings.z_loss
        exponentials = jnp.exp(chunk.shifted)
        columns = columns_of_ids(chunk, labels)
        share = None if smoothing is None else _share(split, chunk)
        sums = token_sums(split, chunk, columns, share)
        label_logit = sums.label_logit
        log_total = jnp.log(sums.total)
        log_z = log_total + chunk.factor * chunk.top
        losses = log_total - label_logit
        mass = sums.total
        z_losses = jnp.zeros_like(log_z)
        setting_slopes = Settings()
        label_share = 1.0
        if smoothing is not None:
            label_share -= smoothing
            losses = log_total - label_share * label_logit - smoothing * sums.mean_logit
            is_banned = jnp.isneginf(label_logit)
            setting_slopes = setting_slopes._replace(
                label_smoothing=jnp.where(is_banned, 0, label_logit - sums.mean_logit)
            )
        if z_loss is not None:
            # The derivative of `log_z + z_loss * log_z**2`, never 0: gradients are divided by it.
            rise = 1 + 2 * z_loss * log_z
            rise = jnp.where(rise == 0, jnp.finfo(rise.dtype).eps, rise)
            mass = sums.total / rise
            z_losses = z_loss * log_z**2
            losses += z_losses
            setting_slopes = setting_slopes._replace(z_loss=log_z**2)
        slopes = change_column(
            exponentials,
            columns,
            lambda old: old - label_share * mass,
            is_last=smoothing is None,
        )
        if smoothing is not None:
            slopes -= smoothing * mass * share
        values = [Value(values=losses, slopes=(slopes,), mass=mass, setting_slopes=setting_slopes)]
        if self.with_metrics:
            is_right = _predicted(split, chunk) == labels
            values += map(Value, (is_right.astype(log_z.dtype), z_losses, log_z))
        return tuple(values)


def _predicted(split: OutputSplit, chunk: ChunkLogits) -> Int32[Array, "t 1"]:
    """The lowest id whose logit is the largest."""
    outside = jnp.iinfo(jnp.int32).max
    ids = jnp.where(chunk.logits == chunk.top, chunk.ids, outside).min(-1, keepdims=True)
    return jax.lax.pmin(ids, split.vocabulary) if split.vocabulary else ids


def _share(split: OutputSplit, chunk: ChunkLogits) -> Float[Array, "1 r"]:
    """Of each row, in the mean of all that may be predicted."""
    is_possible = chunk.is_inside & jnp.logical_not(chunk.is_banned)
    is_possible = jnp.broadcast_to(is_possible, chunk.ids.shape)
    count = jax.lax.psum(is_possible.sum(), split.vocabulary).astype(chunk.logits.dtype)
    return jnp.where(is_possible, 1 / jnp.maximum(count, 1), 0)
