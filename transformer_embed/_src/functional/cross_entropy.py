"""The cross-entropy of an output layer, one chunk of tokens at a time.

So [tokens, vocabulary] logits never exist at once.

The tokens (x, labels, weights) are cut into chunks, and a `scan` over them carries three sums: the
loss, the table's gradient [rows, d] and the bias's [rows]. The step for a chunk computes its logits
[chunk, rows], then its losses and the gradients of the logits, and from these the gradient of the
chunk's x and its parts of the sums. Then the logits are freed.

On a mesh, each device first receives whole rows and the tokens that they meet (see
`OutputLayout`), so it holds some rows of the vocabulary. Within a chunk, devices with the same
tokens exchange three numbers per token: the largest logit, the sum of exponentials and the label's
logit. At the end the gradient of x is summed over the devices with the same tokens and scattered to
where x came from; the gradient of the rows is summed over the parts of the batch and returns to its
columns.

In reading order: `linear_cross_entropy` checks its arguments; `_weighted_loss` gives each token its
label and weight; `_loss` and its rule define the gradient; `_loss_and_gradients` splits the work
over the mesh; `_loss_on_device` receives, scans `_add_chunk` and sends;
`_losses_and_logit_gradients` is the arithmetic.
"""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.functional.output_layer import (
    OutputOptions,
    as_output_layer,
    row_logits,
)
from transformer_embed._src.functional.partitioning import (
    ON_ONE_DEVICE,
    OutputLayout,
    all_gather,
    spec_axes,
)
from transformer_embed._src.functional.token_positions import has_next_token, of_next_token

REDUCTIONS = ("mean", "sum")
# Below 256 tokens a chunk's sum into the table's gradient costs more than the chunk's logits;
# beyond 512 nothing gets faster.
SMALLEST_CHUNK, LARGEST_CHUNK, CHUNKS = 256, 512, 12


def linear_cross_entropy(
    x: ArrayLike,
    table: ArrayLike | Table,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    pad_id: int | None = None,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    shift: bool = False,
    segment_ids: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Float[Array, ""]:
    """The cross-entropy of `linear_logits` with the labels, computed one chunk of tokens at a time.

    For a token with logits z and label y, over a vocabulary of V ids without padding, with `log_z =
    log(sum(exp(z)))` and smoothing s,
    `loss = log_z - (1 - s) * z[y] - s * sum(z) / V + z_loss * log_z**2`.

    One pass over the chunks computes value and gradient, with three products with the table, as
    many as without chunks. Forward mode and second derivatives work too: a product with the Hessian
    (`jax.jvp` of `jax.grad`) also needs the memory of only one chunk.

    Args:
        x: [..., d], a floating dtype.
        table: [vocab_size, d], a floating dtype: the embedding table of a tied output layer, or a
            table of its own.
        labels: [...], any integer dtype: the id that each token should predict; with shift, the ids
            themselves.
        bias: as in `linear_logits`.
        softcap: as in `linear_logits`.
        scale: as in `linear_logits`.
        pad_id: the id of padding, which is never predicted: labels that are this id are not
            counted, and its row of the table and its bias have no part in the loss and get no
            gradient. It may be outside the vocabulary (such as -100). To leave out labels and keep
            their row, use mask. None: no padding.
        mask: bool, [length], or more axes that broadcast to the labels'. True = the label is
            counted. None: all. Where ignored labels are -100, it is `labels != -100`.
        weights: floating, [length], or more axes that broadcast to the labels': each label's loss
            is multiplied by its weight. None: 1.
        shift: True: token t predicts `labels[..., t + 1]`, which brings its mask and weight with
            it; the last token predicts nothing.
        segment_ids: integers, [length], or more axes that broadcast to the labels', for packed
            sequences, with shift: 0 = padding, and another number for each sequence
            (`TokenPositions.segment_ids`). The last token of a sequence predicts nothing. None: one
            sequence a row.
        label_smoothing: in [0, 1), a Python float: the part of each label's weight that is spread
            evenly over the vocabulary.
        z_loss: a Python number of at least 0, which keeps log_z near 0 (PaLM: 1e-4).
        reduction: `"mean"` divides the sum over the counted labels by the sum of their weights;
            `"sum"` does not.
        chunk_size: the largest number of tokens in a chunk (on a mesh with explicit axes, on each
            device). None: a twelfth of the tokens, but at least 256 and at most 512.

    Returns:
        A scalar, computed in float32 (float64 if x or the table is). The loss and its gradients are
        0 if no label is counted, and NaN if a counted label is outside the vocabulary. At tokens
        that are not counted, x has no effect, even if it is NaN, and its gradient is 0. x, table,
        bias and weights have gradients, summed in float32 or wider over all chunks, then cast once
        to their dtypes.

        With a sharded table, or any array on a mesh with explicit axes, no device gathers a table
        or logits. x is all-gathered over the mesh axes that also split the table. Devices with the
        same tokens exchange three numbers per token and, once, the gradients of x. Devices with the
        same rows exchange the gradient of the rows once. For plain arrays on automatic axes the
        value is the same, and the compiler chooses what is sent.

    Raises:
        TypeError: x, the table, the bias or weights do not have a floating dtype; labels or
            segment_ids are not integers; mask is not bool; shift is not a Python bool; softcap,
            scale, label_smoothing, z_loss or chunk_size is not a Python number; the table has only
            some of its rows, as inside `te.rows.value_and_grad`.
        ValueError: the table is not of rank 2, or its width is not x's; the shape of labels is not
            x's without its last axis; the bias does not have one number for each row; a mask,
            weights or segment_ids that do not end in the labels' last axis, or do not broadcast to
            them; segment_ids without shift; labels of rank 0 with shift, or of an unknown size; an
            argument out of its range; columns split over a number of devices that does not divide
            the number of rows.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]])
        >>> x = jnp.array([[0.0, 0.0], [0.0, 0.0], [5.0, 5.0]])
        >>> print(te.linear_cross_entropy(x, table, [1, 2, -1], pad_id=-1))  # log(3)
        1.0986123
        >>> jax.grad(te.linear_cross_entropy)(x, table, [1, 2, -1], pad_id=-1)[2].tolist()
        [0.0, 0.0]

    Source:
        Label smoothing: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7,
        https://arxiv.org/abs/1512.00567. z_loss: Chowdhery et al., "PaLM" (2022), section 5,
        https://arxiv.org/abs/2204.02311. The gradient in the forward pass: Hsu et al., "Liger
        Kernel" (2024), section 3.2, https://arxiv.org/abs/2410.10989. The name and shift: Wijmans
        et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024),
        https://arxiv.org/abs/2411.09009. The loss over a split vocabulary: Shoeybi et al.,
        "Megatron-LM" (2019), section 3, https://arxiv.org/abs/1909.08053
    """
    x, table, bias, output = as_output_layer(x, table, bias, softcap, scale, pad_id)
    labels = arguments.as_int32("labels", labels)
    arguments.check_same("labels", "x's shape without its last axis", labels.shape, x.shape[:-1])
    if any(map(export.is_symbolic_dim, labels.shape)):
        want = "a shape of known sizes, for the loss is computed in chunks"
        raise arguments.value_error("labels", want, f"shape {list(labels.shape)}")
    shift = arguments.flag("shift", shift)
    if shift and not labels.ndim:
        raise arguments.value_error("labels", "shape [..., length], to shift", "shape []")
    if not shift:
        arguments.check_left_out("segment_ids", segment_ids, "shift is False")
    as_mask = functools.partial(arguments.as_mask, is_true="counted")
    options = _LossOptions(
        output,
        shift,
        arguments.rate("label_smoothing", label_smoothing),
        arguments.not_negative("z_loss", z_loss),
        arguments.choice("reduction", reduction, REDUCTIONS),
        None if chunk_size is None else arguments.size("chunk_size", chunk_size),
    )
    return _weighted_loss(
        options,
        x,
        table,
        bias,
        labels,
        _aligned("mask", mask, as_mask, labels),
        _aligned("weights", weights, arguments.as_floats, labels),
        _aligned("segment_ids", segment_ids, arguments.as_fitting_int32, labels),
    )


class _LossOptions(NamedTuple):
    """The arguments of `linear_cross_entropy` that are static."""

    output: OutputOptions
    shift: bool
    label_smoothing: float
    z_loss: float
    reduction: str
    chunk_size: int | None


def _aligned(name, values, convert, labels):
    """The converted values with as many axes as the labels, once they are known to fit them."""
    if values is None:
        return None
    values = convert(name, values)
    arguments.check_ends_in_length(name, values.shape, labels.shape, "the labels")
    return jnp.expand_dims(values, range(labels.ndim - values.ndim))


@functools.partial(jax.jit, static_argnums=0)
def _weighted_loss(options, x, table, bias, labels, mask, weights, segment_ids):
    """The loss, once each token has the label that it predicts, and its weight."""
    pad_id, dtype = options.output.pad_id, arguments.compute_dtype(x.dtype, table.dtype)
    # Made from x, so that under explicit axes it has x's sharding.
    counted = ~jnp.zeros_like(x, bool).any(-1)
    if options.shift:
        counted &= has_next_token(jnp.ones_like(labels) if segment_ids is None else segment_ids)
        labels, mask, weights = jax.tree.map(of_next_token, (labels, mask, weights))
    if pad_id is not None:
        counted &= labels != pad_id
    if mask is not None:
        counted &= mask
    # Zeros give finite logits, so that their weight of 0 leaves nothing of them.
    x = jnp.where(counted[..., None], x, 0)
    # Any label may stand where it is not counted, also one on a shard's padding.
    labels = jnp.where(counted, labels, 0)
    # Widened before it is broadcast, so that its gradient is summed in the wide dtype.
    weights = jnp.ones((), dtype) if weights is None else weights.astype(dtype)
    weights = jnp.where(counted, weights, 0)
    if options.reduction == "mean":
        total = jnp.sum(weights)
        weights /= jnp.where(total == 0, 1, total)
    outside = labels.astype(jnp.uint32) >= options.output.vocab_size
    weights = jnp.where(outside, jnp.nan, weights)
    array, layout = _array_and_layout(x, table)
    bias = layout.split_bias(bias, array.shape[0])
    return _loss(options, layout, labels, x, array, bias, weights)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _loss(options, layout, labels, x, table, bias, weights):
    """The sum of each token's loss times its weight."""
    return _loss_and_gradients(options, layout, labels, x, table, bias, weights)[0]


@functools.partial(_loss.defjvp, symbolic_zeros=True)
def _loss_jvp(options, layout, primals, tangents):
    """The tangent is linear in the tangents, with the gradients as coefficients.

    So its transpose only scales the gradients. Lowering drops what computes the others.
    """
    loss, *gradients = _loss_and_gradients(options, layout, *primals)
    sum_of_tangents = jnp.zeros_like(loss)
    for gradient, tangent in zip(gradients, tangents[1:], strict=True):
        if not isinstance(tangent, SymbolicZero | None):
            sum_of_tangents += jnp.sum(gradient * tangent.astype(gradient.dtype))
    return loss, sum_of_tangents


def _loss_and_gradients(options, layout, labels, x, table, bias, weights):
    """The loss, and the gradients of x, the table, the bias and the weights."""
    of_tokens = PartitionSpec(*layout.x[:-1])
    specs = (*layout.specs(), of_tokens)
    run = functools.partial(_loss_on_device, options, layout)
    run_all = layout.map(run, (of_tokens, *specs), (PartitionSpec(), *specs))
    return run_all(labels, x, table, bias, weights)


def _loss_on_device(options, layout, labels, x, shard, bias, weights):
    """`_loss_and_gradients` on one of the devices: what it receives, its chunks, what it sends."""
    x, labels, weights = (all_gather(values, layout.gathered) for values in (x, labels, weights))
    rows = layout.exchange(shard, 0, 1)
    # Made from the data, so that they vary over the same mesh axes inside a user's shard_map.
    zeros = [jnp.sum(leaf.ravel()[:1] > 0) & 0 for leaf in (x, labels, weights, rows)]
    zero = jnp.array(sum(zeros), weights.dtype)
    start = (zero, jnp.full(rows.shape, zero), jnp.full(rows.shape[:1], zero))
    step = functools.partial(_add_chunk, options, layout, rows, bias)
    chunks = _cut_into_chunks(options.chunk_size, x, labels[..., None], weights[..., None])
    sums, (of_x, of_weights) = jax.lax.scan(step, start, chunks)

    def join(chunks, shape):
        tokens = chunks.swapaxes(0, 1).reshape(-1, chunks.shape[-1])
        return tokens[: labels.size].reshape(shape)

    batch = sum(layout.tokens, ())
    loss, of_rows, of_bias = (jax.lax.psum(values, batch) for values in sums)
    of_table = layout.exchange(of_rows, 1, 0)
    of_x = layout.own_part(join(of_x, x.shape), summed=layout.vocabulary)
    return loss, of_x, of_table, of_bias, layout.own_part(join(of_weights, labels.shape))


def _add_chunk(options, layout, rows, bias, sums, chunk):
    """The sums after adding those of a chunk, and the gradients of the chunk's x and weights."""
    x, _, weights = chunk
    losses, logit_gradients, factors = _losses_and_logit_gradients(
        options, layout, rows, bias, chunk
    )
    multiply = functools.partial(jnp.einsum, preferred_element_type=factors.dtype)
    # Eight equal columns: a TPU takes as long for a plain sum as for a product with all of x.
    columns = jnp.broadcast_to(factors, (len(factors), 8))
    scaled_x = factors * x.astype(factors.dtype)
    chunk_sums = (
        jnp.sum(losses * weights),
        multiply("tv,td->vd", logit_gradients, scaled_x),
        multiply("tv,tc->vc", logit_gradients, columns)[:, 0],
    )
    x_gradient = factors * multiply("tv,vd->td", logit_gradients, rows)
    return tuple(map(operator.add, sums, chunk_sums)), (x_gradient, losses)


def _losses_and_logit_gradients(options, layout, rows, bias, chunk):
    """Each token's loss [t, 1], the logit gradients [t, v], and a factor for each token [t, 1].

    The gradient of a token's weighted loss in `x @ rows.T + bias` is the product of the last two.
    With logits z, their maximum m, targets p that sum to 1, `total = sum(exp(z - m))` and
    `log_z = log(total) + m`, the loss is `log(total) - sum(p * (z - m)) + z_loss * log_z**2`. Its
    gradient in z is `(exp(z - m) - mass * p) / mass`, with
    `mass = total / (1 + 2 * z_loss * log_z)`. Dividing or multiplying the logit gradients
    themselves would cost another operation for each of them.
    """
    x, labels, weights = chunk
    output, smoothing = options.output, options.label_smoothing
    raw_logits, factor, ids, is_inside = row_logits(output, layout, x, rows, bias)
    logits = _excluding(output, layout, raw_logits, factor, ids, is_inside)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    top = jax.lax.pmax(top, layout.vocabulary) if layout.vocabulary else top
    # Differences of logits: their rounding does not grow with the logits. The factor comes last:
    # XLA may round `factor * logits - top` only once, which is not 0 where top is rounded.
    shifted = factor * (logits - top)
    exponentials = jnp.exp(shifted)
    of_label = functools.partial(_of_label, labels - ids[0, 0])
    share = 0.0
    if smoothing:
        share = jnp.where(is_inside, smoothing / output.predicted(weights.dtype), 0)
        # Shifted logits exist anyway: reading the label's from elsewhere would keep both.
        of_others = (share * shifted).sum(-1, keepdims=True)
        expected = (1 - smoothing) * of_label(shifted, 0) + of_others
    else:
        # A CPU would write whole shifted logits only for this. A TPU writes them faster than it
        # repeats their exponentials.
        expected = jax.lax.platform_dependent(
            cpu=lambda: factor * of_label(logits, top), default=lambda: of_label(shifted, 0)
        )
    total = exponentials.sum(-1, keepdims=True)
    total, expected = jax.lax.psum((total, expected), layout.vocabulary)
    losses, gradients, mass = jnp.log(total) - expected, exponentials, total
    if options.z_loss:
        log_z = jnp.log(total) + factor * top
        losses += options.z_loss * log_z**2
        rise = 1 + 2 * options.z_loss * log_z
        mass = total / jnp.where(rise == 0, jnp.finfo(rise.dtype).eps, rise)
    if smoothing:
        gradients -= share * mass
    at_label = gradients - (1 - smoothing) * mass
    gradients = jnp.where(ids == labels, at_label, gradients)
    if output.softcap is not None:
        gradients *= 1 - jnp.square(raw_logits)
    return losses, gradients, output.scale * weights / mass


def _of_label(columns, values, shift):
    """The value of each row in its column, minus its shift; 0 where another device has it."""
    last = values.shape[1] - 1
    index = jnp.clip(columns, 0, last)
    at_label = jnp.take_along_axis(values, index, axis=1, mode="promise_in_bounds")
    return jnp.where((columns >= 0) & (columns <= last), at_label - shift, 0)


def _excluding(output, layout, logits, factor, ids, is_inside):
    """Logits [t, v] with a low number where they are not inside: in place on a CPU, if it can."""
    # Finite, also times the factor: a token that is not counted, whose label may be padding, has
    # the weight 0.
    lowest = jnp.finfo(logits.dtype).min / (2 * max(factor, 1))

    def in_one_pass():
        return jnp.where(is_inside, logits, lowest)

    def in_place():
        # As uint32, a negative id is past the end.
        return logits.at[:, np.uint32(output.pad_id % 2**32)].set(lowest, mode="drop")

    if output.pad_id is not None and layout.mesh is None:
        return jax.lax.platform_dependent(cpu=in_place, default=in_one_pass)
    return in_one_pass()


def _cut_into_chunks(chunk_size, *values):
    """[count, size, d] of each of the values [..., d] of all tokens.

    Each chunk takes every count-th token, so each device has a part of each chunk if the batch is
    split. The last chunks are padded with zeros.
    """
    total = math.prod(values[0].shape[:-1])
    size = chunk_size or min(max(SMALLEST_CHUNK, -(-total // CHUNKS)), LARGEST_CHUNK)
    count = -(-total // size)
    size = -(-total // max(count, 1))

    def cut(array):
        width = array.shape[-1]
        tokens = jnp.pad(array.reshape(total, width), ((0, count * size - total), (0, 0)))
        return tokens.reshape(size, count, width).swapaxes(0, 1)

    return tuple(map(cut, values))


def _array_and_layout(x, table):
    """The table's array, and how it and x are split: plain arrays, only by explicit axes."""
    if isinstance(table, Table):
        return table._output_layout(x)
    split = spec_axes(jax.typeof(x).sharding.spec, x.ndim)
    rows, columns = spec_axes(jax.typeof(table).sharding.spec, table.ndim)
    if not any((rows, columns, *split)):
        return table, ON_ONE_DEVICE
    return table, OutputLayout(jax.typeof(x).sharding.mesh, rows, columns, tuple(split))
