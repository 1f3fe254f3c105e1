"""The cross-entropy of an output layer, one chunk of tokens at a time.

So [tokens, vocabulary] logits never exist at once.

The tokens (x, labels, weights) are cut into chunks, and a `scan` over them carries three sums: the
loss, the table's gradient [rows, d] and the bias's [rows]. The step for a chunk computes its logits
[chunk, rows], then its losses and the gradients of the logits, and from these the gradient of the
chunk's x and its parts of the sums. Then the logits are freed.

On a mesh, each device first receives whole rows and the tokens that they meet (see
`OutputSplit`), so it holds some rows of the vocabulary. Within a chunk, devices with the same
tokens exchange three numbers per token: the largest logit, the sum of exponentials and the label's
logit. At the end the gradient of x is summed over the devices with the same tokens and scattered to
where x came from; the gradient of the rows is summed over the parts of the batch and returns to its
columns.

In reading order: `linear_cross_entropy` checks its arguments; `targets` gives each token its label
and weight; `_loss` and its rule define the gradient; `_loss_and_gradients` splits the work over the
mesh; `_loss_on_device` receives, scans `_add_chunk` and sends; `losses_and_logit_gradients` is the
arithmetic, also of the losses of single tokens (token_losses.py).
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import OutputSplit, all_gather, varying, varying_axes
from transformer_embed._src.tokens.lookup import Table
from transformer_embed._src.tokens.losses import (
    Batch,
    Chunk,
    LossOptions,
    array_and_split,
    as_batch,
    as_steps,
    cut_into_chunks,
    join_chunks,
    losses_and_logit_gradients,
    nan_outside,
    targets,
    weighted,
)
from transformer_embed._src.tokens.output_layer import OutputLayer, as_output_layer
from transformer_embed._src.tokens.token_losses import token_losses

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: ArrayLike,
    output: OutputLayer | ArrayLike | Table,
    labels: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    shift: int = False,
    segment_ids: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Float[Array, "..."]:
    """The cross-entropy of `linear_logits` with the labels, computed one chunk of tokens at a time.

    For a token with logits z and label y, over a vocabulary of V ids without padding, with `log_z =
    log(sum(exp(z)))` and smoothing s,
    `loss = log_z - (1 - s) * z[y] - s * sum(z) / V + z_loss * log_z**2`.

    For its time and memory, see "What the loss costs", a section of the reference page.

    Args:
        x: [..., d], a floating dtype.
        output: an `OutputLayer`, or the table of one without other settings, [vocab_size, d].
            Labels that are its `pad_id` are not counted; to leave out labels and keep their row of
            the table, use mask.
        labels: [...], any integer dtype: the id that each token should predict; with shift, the ids
            themselves.
        mask: bool, [length], or more axes that broadcast to the labels'. True = the label is
            counted; `labels != -100` for example. None: all.
        weights: floating, with axes as in mask: each label's loss is multiplied by its weight.
            None: 1. With negative ones, do not take the mean: the sum of weights that divides it
            may be 0 or less.
        shift: a Python int k of at least 0: token t predicts `labels[..., t + k]`, which brings its
            mask and weight; the last k tokens predict nothing. True is 1. A head that predicts
            several tokens ahead has its own k.
        segment_ids: integers, with axes as in mask, for packed sequences, with shift: those of
            `TokenPositions` (0 = padding). A token predicts nothing if `labels[..., t + k]` has
            another segment id, such as the last k tokens of a sequence. None: one sequence a row.
        label_smoothing: in [0, 1), a Python float: the part of each label that is spread evenly
            over the vocabulary.
        z_loss: a Python number of at least 0, which keeps log_z near 0 (PaLM: 1e-4).
        reduction: `"mean"` divides the sum over the counted labels by the sum of their weights;
            `"sum"` does not; `"none"` returns each label's loss times its weight.
        chunk_size: the largest number of tokens in a chunk. None: between 256 and 512.

    Returns:
        A scalar in float32 (float64 if x or the table is); with `reduction="none"`, an array [...].
        The loss and its gradients are 0 if no label is counted, and NaN if a counted label is
        outside the vocabulary. At tokens that are not counted, x has no effect, even if it is NaN.
        A weight of 0 leaves exactly 0 of a loss, even of an infinite one or NaN.

        With shift and `reduction="none"`, the loss of `labels[..., t]` is at t.

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
    x, output = as_output_layer(x, output)
    steps = as_steps(shift)
    batch = as_batch(x, labels, mask, weights, steps, segment_ids)
    options = LossOptions(
        output._options,
        steps,
        None if chunk_size is None else arguments.size("chunk_size", chunk_size),
        arguments.rate("label_smoothing", label_smoothing),
        arguments.not_negative("z_loss", z_loss),
        arguments.choice("reduction", reduction, REDUCTIONS),
    )
    return _reduced_loss(options, output.table, output.bias, batch)


@functools.partial(jax.jit, static_argnums=0)
def _reduced_loss(
    options: LossOptions, table: Any, bias: Array | None, batch: Batch
) -> Float[Array, "..."]:
    """The sum or mean of the tokens' weighted losses, or each of them."""
    if options.reduction == "none":
        losses, _ = token_losses(options, table, bias, batch)
        return losses
    dtype = arguments.compute_dtype(batch.x.dtype, table.dtype)
    x, labels, _, weights = targets(options, batch, dtype)
    if options.reduction == "mean":
        total = jnp.sum(weights)
        # If no label is counted, 0 / 1 in place of NaN.
        weights /= jnp.where(total == 0, 1, total)
    # Weights of NaN make the loss NaN, and also all its gradients.
    weights = nan_outside(options, labels, weights)
    array, split = array_and_split(x, table)
    bias = split.bias(bias, array.shape[0])
    x, labels, weights = split.receive(x, labels, weights)
    return _loss(options, split, labels, x, array, bias, weights)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _loss(options: LossOptions, split: OutputSplit, *arrays: Any) -> Float[Array, ""]:
    """The sum of each token's loss times its weight; see `_loss_on_device` for the arrays."""
    return _loss_and_gradients(options, split, *arrays)[0]


@functools.partial(_loss.defjvp, symbolic_zeros=True)
def _loss_jvp(
    options: LossOptions, split: OutputSplit, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Array, Array]:
    """The tangent is linear in the tangents, with the gradients as coefficients.

    So its transpose only scales the gradients. Lowering drops what computes the others.
    """
    loss, *gradients = _loss_and_gradients(options, split, *primals)
    sum_of_tangents = jnp.zeros_like(loss)
    for gradient, tangent in zip(gradients, tangents[1:], strict=True):
        if not isinstance(tangent, SymbolicZero | None):
            sum_of_tangents += jnp.sum(gradient * tangent.astype(gradient.dtype))
    return loss, sum_of_tangents


def _loss_and_gradients(
    options: LossOptions, split: OutputSplit, *arrays: Any
) -> tuple[Array, ...]:
    """The loss, and the gradients of x, the table, the bias and the weights."""
    of_tokens = PartitionSpec(*split.tokens)
    specs = (*split.specs(), of_tokens)
    run = functools.partial(_loss_on_device, options, split)
    run_all = split.map(run, (of_tokens, *specs), (PartitionSpec(), *specs))
    return run_all(*arrays)


def _loss_on_device(
    options: LossOptions,
    split: OutputSplit,
    labels: Int32[Array, "..."],
    x: Float[Array, "... c"],
    shard: Float[Array, "r k"],
    bias: Array | None,
    weights: Float[Array, "..."],
) -> tuple[Array, ...]:
    """`_loss_and_gradients` on one of the devices: what it receives, its chunks, what it sends."""
    x, rows = all_gather(x, split.gathered), split.exchange(shard, 0, 1)
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((labels, x, rows, bias, weights))))
    # The sum over the vocabulary, of which the loss is made, is alike along its axes.
    zero = varying(jnp.zeros((), weights.dtype), axes - {*split.vocabulary})
    start = (zero, *(varying(jnp.full(n, zero), axes) for n in (rows.shape, rows.shape[:1])))
    step = functools.partial(_add_chunk, options, split, rows, bias)
    chunks = cut_into_chunks(options.chunk_size, x, labels[..., None], weights[..., None])
    sums, (of_x, of_weights) = jax.lax.scan(step, start, chunks)

    batch = sum(split.tokens, ())
    loss, of_rows, of_bias = (jax.lax.psum(values, batch) for values in sums)
    of_table = split.exchange(of_rows, 1, 0)
    of_x = split.scatter(join_chunks(of_x, labels.size, x.shape))
    return loss, of_x, of_table, of_bias, join_chunks(of_weights, labels.size, labels.shape)


def _add_chunk(
    options: LossOptions,
    split: OutputSplit,
    rows: Float[Array, "r d"],
    bias: Array | None,
    sums: tuple[Array, ...],
    chunk: Chunk,
) -> tuple[tuple[Array, ...], tuple[Array, Array]]:
    """The sums after adding those of a chunk, and the gradients of the chunk's x and weights."""
    x, _, weights = chunk
    losses, logit_gradients, factors, *_ = losses_and_logit_gradients(
        options, split, rows, bias, chunk
    )
    multiply = functools.partial(jnp.einsum, preferred_element_type=factors.dtype)
    # Eight equal columns: a TPU takes as long for a plain sum as for a product with all of x.
    columns = jnp.broadcast_to(factors, (len(factors), 8))
    scaled_x = factors * x.astype(factors.dtype)
    chunk_sums = (
        jnp.sum(weighted(losses, weights)),
        multiply("tv,td->vd", logit_gradients, scaled_x),
        multiply("tv,tc->vc", logit_gradients, columns)[:, 0],
    )
    x_gradient = factors * multiply("tv,vd->td", logit_gradients, rows)
    return tuple(map(operator.add, sums, chunk_sums)), (x_gradient, losses)
