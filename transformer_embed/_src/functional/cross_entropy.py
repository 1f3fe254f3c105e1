"""The cross-entropy of an output layer, one chunk of tokens at a time, so that [tokens, vocabulary]
logits never exist at once.

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
label and weight; `_loss` and its rule define the gradient; `_loss_on_mesh` splits the work over the
mesh; `_loss_on_device` sends and receives; `_loss_in_chunks` scans `_add_chunk`;
`_losses_and_logit_gradients` is the arithmetic.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.functional.output_layer import (
    OutputOptions,
    as_output_layer,
    row_logits,
)
from transformer_embed._src.functional.partitioning import (
    OutputLayout,
    all_gather,
    devices_along,
    index_along,
    partition_spec,
    reshard,
    spec_axes,
)

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

    For a token with logits z and label y, over a vocabulary of V ids, with `log_z =
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
        pad_id: the id of padding. Labels that are this id are not counted, and its row of the table
            counts as zeros, as in `linear_logits`: its logit is 0 and it gets no gradient, but it
            must be finite. It may be outside the vocabulary (such as -100). To leave out labels and
            keep their row, use mask. None: no padding.
        mask: bool, [length], or more axes that broadcast to the labels'. True = the label is
            counted. None: all.
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
            them; segment_ids without shift; an argument out of its range; columns split over a
            number of devices that does not divide the number of rows.

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
    if any(export.is_symbolic_dim(size) for size in x.shape):
        want = "a shape known while tracing, to be cut into chunks"
        raise arguments.type_error("x", want, f"shape {list(x.shape)}")
    if labels.shape != x.shape[:-1]:
        want = f"x's shape without its last axis, {list(x.shape[:-1])}"
        raise arguments.value_error("labels", want, f"shape {list(labels.shape)}")
    if mask is not None:
        mask = _aligned("mask", arguments.as_mask("mask", mask, "counted"), labels)
    if weights is not None:
        weights = _aligned("weights", arguments.as_floats("weights", weights), labels)
    if not arguments.flag("shift", shift):
        arguments.check_left_out("segment_ids", segment_ids, "shift is False")
    elif labels.ndim == 0:
        raise arguments.value_error("labels", "shape [..., length], to shift them", "shape []")
    if segment_ids is not None:
        segment_ids = arguments.as_fitting_int32("segment_ids", segment_ids)
        segment_ids = _aligned("segment_ids", segment_ids, labels)
    options = _LossOptions(
        output,
        bool(shift),
        arguments.rate("label_smoothing", label_smoothing),
        arguments.real("z_loss", z_loss),
        arguments.choice("reduction", reduction, REDUCTIONS),
        None if chunk_size is None else arguments.integer("chunk_size", chunk_size, at_least=1),
    )
    if options.z_loss < 0:
        raise arguments.value_error("z_loss", "a number of at least 0", z_loss)
    return _weighted_loss(options, x, table, bias, labels, mask, weights, segment_ids)


class _LossOptions(NamedTuple):
    """The arguments of `linear_cross_entropy` that are static."""

    output: OutputOptions
    shift: bool
    label_smoothing: float
    z_loss: float
    reduction: str
    chunk_size: int | None

    @property
    def label_share(self) -> float:
        """What smoothing leaves for the label."""
        return 1 - self.label_smoothing

    @property
    def other_share(self) -> Any:
        """What smoothing adds to each id."""
        return self.label_smoothing / self.output.vocab_size


class _Chunk(NamedTuple):
    x: Float[Array, "t d"]
    labels: Int32[Array, "t"]
    weights: Float[Array, "t"]


def _aligned(name: str, values: Array, labels: Int32[Array, "..."]) -> Array:
    """The values with as many axes as the labels, once they are known to fit them."""
    if labels.ndim:
        arguments.check_ends_in_length(name, values.shape, labels.shape, "the labels")
    else:
        arguments.check_broadcasts_to(name, values.shape, "labels", labels.shape)
    return jnp.expand_dims(values, range(labels.ndim - values.ndim))


@functools.partial(jax.jit, static_argnums=0)
def _weighted_loss(
    options: _LossOptions,
    x: Float[Array, "... d"],
    table: Float[Array, "v d"] | Table,
    bias: Float[Array, "v"] | None,
    labels: Int32[Array, "..."],
    mask: Bool[Array, "..."] | None,
    weights: Float[Array, "..."] | None,
    segment_ids: Int32[Array, "..."] | None,
) -> Float[Array, ""]:
    dtype, pad_id = arguments.compute_dtype(x.dtype, table.dtype), options.output.pad_id
    counted = jnp.ones_like(labels, bool) if pad_id is None else labels != pad_id
    if mask is not None:
        counted &= mask
    if options.shift:
        counted = _of_next_token(counted) & _has_next_token(labels, segment_ids)
        labels = _of_next_token(labels)
        weights = None if weights is None else _of_next_token(weights)
    # Broadcast against x, so that under explicit axes counted has x's sharding.
    counted = counted | jnp.zeros_like(x, bool).any(-1)
    # Zeros give finite logits, so that their weight of 0 leaves nothing of them.
    x = jnp.where(counted[..., None], x, jnp.zeros((), x.dtype))
    # Any label may stand where it is not counted, also one on a shard's padding. (Adding zeros, for
    # jax 0.6 selects only between values of one sharding.)
    labels = jnp.where(counted, labels + jnp.zeros_like(counted, jnp.int32), 0)
    ones = jnp.ones_like(counted, dtype)
    weights = jnp.where(counted, ones if weights is None else ones * weights.astype(dtype), 0)
    if options.reduction == "mean":
        total = jnp.sum(weights)
        weights /= jnp.where(total == 0, 1, total)
    outside = labels.astype(jnp.uint32) >= options.output.vocab_size
    weights = jnp.where(outside, jnp.array(jnp.nan, dtype), weights)
    array, layout = _array_and_layout(x, table)
    if layout is not None:
        bias = layout.split_bias(bias, array.shape[0])
    return _loss(options, layout, labels, x, array, bias, weights)


def _has_next_token(
    labels: Int32[Array, "... t"], segment_ids: Int32[Array, "... t"] | None
) -> Bool[Array, "... t"]:
    """Whether a token is followed by another one of its sequence."""
    length = labels.shape[-1]
    has_next = jnp.arange(length, dtype=jnp.int32) < length - 1
    has_next = jnp.expand_dims(has_next, range(labels.ndim - 1))
    if segment_ids is None:
        return has_next
    return has_next & (segment_ids != 0) & (segment_ids == _of_next_token(segment_ids))


def _of_next_token(values: Array) -> Array:
    """At each token, the value of the token to its right; the last one has the first one's."""
    *leading, length = spec_axes(jax.typeof(values).sharding.spec, values.ndim)
    if length:
        # Explicit axes that split the length cannot be cut at its ends.
        mesh = jax.typeof(values).sharding.mesh
        values = reshard(values, NamedSharding(mesh, partition_spec(*leading)))
    return jnp.roll(values, -1, axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _loss(options, layout, labels, x, table, bias, weights):
    """The sum of each token's loss times its weight."""
    return _loss_on_mesh(options, layout, (False,) * 4, labels, x, table, bias, weights)[0]


def _loss_jvp(options, layout, primals, tangents):
    """The tangent is linear in the tangents, with the gradients as coefficients, so its transpose
    only scales them."""
    tangents = tangents[1:]
    needs_gradient = tuple(not isinstance(tangent, SymbolicZero | None) for tangent in tangents)
    loss, *gradients = _loss_on_mesh(options, layout, needs_gradient, *primals)
    terms = [
        jnp.sum(g * t.astype(g.dtype))
        for g, t in zip(gradients, tangents, strict=True)
        if g is not None
    ]
    return loss, functools.reduce(operator.add, terms, jnp.zeros_like(loss))


_loss.defjvp(_loss_jvp, symbolic_zeros=True)


def _loss_on_mesh(options, layout, needs_gradient, labels, x, table, bias, weights):
    """The loss, and the gradients of x, the table, the bias and the weights (None where not
    needed)."""
    if layout is None:
        tokens = _Chunk(x, labels, weights)
        return _loss_in_chunks(options, (), needs_gradient, table, bias, tokens)
    of_tokens = partition_spec(*layout.x[:-1])
    specs = (*layout.specs(), partition_spec(layout.vocabulary), of_tokens)
    of_gradients = [
        spec if need else None for spec, need in zip(specs, needs_gradient, strict=True)
    ]
    # Unchecked: shard_map cannot infer that the psum of a gathered value is replicated.
    run = jax.shard_map(
        functools.partial(_loss_on_device, options, layout, needs_gradient),
        mesh=layout.mesh,
        in_specs=(of_tokens, *specs),
        out_specs=(partition_spec(), *of_gradients),
        check_vma=False,
    )
    return run(labels, x, table, bias, weights)


def _loss_on_device(options, layout, needs_gradient, labels, x, shard, bias, weights):
    """`_loss_on_mesh`, on one of the devices."""
    gathered = layout.gathered
    tokens = _Chunk(
        all_gather(x, gathered),
        all_gather(labels, gathered[:-1]),
        all_gather(weights, gathered[:-1]),
    )
    loss, of_x, of_rows, of_bias, of_weights = _loss_in_chunks(
        options, layout.vocabulary, needs_gradient, layout.whole_rows(shard), bias, tokens
    )
    batch = tuple(axis for axes in layout.tokens for axis in axes)
    if of_x is not None:
        of_x = layout.sum_of_x(of_x)
    if of_rows is not None:
        of_rows = layout.split_columns(jax.lax.psum(of_rows, batch))
    if of_bias is not None:
        of_bias = jax.lax.psum(of_bias, batch)
    if of_weights is not None:
        of_weights = layout.own_tokens(of_weights)
    return jax.lax.psum(loss, batch), of_x, of_rows, of_bias, of_weights


def _loss_in_chunks(options, over, needs_gradient, rows, bias, tokens):
    """Like `_loss_on_mesh`, for all tokens of one device and its own rows; the other rows are on
    other devices along the axes `over`."""
    dtype = tokens.weights.dtype
    _, of_rows, of_bias, _ = needs_gradient
    zeros = functools.partial(_zeros_varying_like, dtype=dtype, like=(tokens, rows))
    start = (
        zeros(()),
        zeros(rows.shape) if of_rows else None,
        zeros(rows.shape[:1]) if of_bias else None,
    )
    step = functools.partial(_add_chunk, options, over, needs_gradient, rows, bias)
    sums, by_token = jax.lax.scan(step, start, _cut_into_chunks(options.chunk_size, tokens))
    x_gradient, weight_gradient = jax.tree.map(functools.partial(_joined, tokens.labels), by_token)
    loss, row_gradient, bias_gradient = sums
    return loss, x_gradient, row_gradient, bias_gradient, weight_gradient


def _add_chunk(options, over, needs_gradient, rows, bias, sums, chunk):
    """The sums after adding those of a chunk, and the gradients of the chunk's x and weights."""
    losses, logit_gradients, factors = _losses_and_logit_gradients(options, over, rows, bias, chunk)
    of_x, of_rows, of_bias, of_weights = needs_gradient
    loss, row_gradient, bias_gradient = sums
    x_gradient = None
    if of_x:
        x_gradient = factors[:, None] * jnp.einsum(
            "tv,vd->td", logit_gradients, rows, preferred_element_type=logit_gradients.dtype
        )
    if of_rows:
        scaled = factors[:, None] * chunk.x.astype(factors.dtype)
        row_gradient += jnp.einsum(
            "tv,td->vd", logit_gradients, scaled, preferred_element_type=logit_gradients.dtype
        )
    if of_bias:
        # Eight equal columns: a TPU takes as long for a plain sum as for a product with all of x.
        columns = jnp.broadcast_to(factors[:, None], (len(factors), 8))
        bias_gradient += jnp.einsum(
            "tv,tc->vc", logit_gradients, columns, preferred_element_type=logit_gradients.dtype
        )[:, 0]
    sums = (loss + jnp.sum(losses * chunk.weights), row_gradient, bias_gradient)
    return sums, (x_gradient, losses if of_weights else None)


def _losses_and_logit_gradients(options, over, rows, bias, chunk):
    """Each token's loss [t]; logit_gradients [t, v] and factors [t], whose product is the gradient
    of its weighted loss in each `x @ rows.T + bias`.

    With logits z, their maximum m, targets p that sum to 1, `total = sum(exp(z - m))` and
    `log_z = log(total) + m`, the loss is `log(total) - sum(p * (z - m)) + z_loss * log_z**2`. Its
    gradient in z is `(exp(z - m) - mass * p) / mass`, with
    `mass = total / (1 + 2 * z_loss * log_z)`. Dividing the gradients themselves would cost another
    pass over them.
    """
    output, vocabulary = options.output, _vocabulary_part(options, over, rows)
    labels = chunk.labels - vocabulary.first
    logits, factor = row_logits(output, chunk.x, rows, bias)
    slopes = 1.0 if output.softcap is None else 1 - jnp.square(logits)
    if output.pad_id is not None:
        logits = _zero_column(logits, output.pad_id - vocabulary.first)
    logits = vocabulary.where_inside(logits, -jnp.inf)
    top = _reduce_over(jax.lax.pmax, over, jax.lax.stop_gradient(logits.max(-1)))
    # Differences of logits: their rounding does not grow with the logits. The factor comes last:
    # XLA may round `factor * logits - top` only once, which is not 0 where top is rounded.
    shifted = factor * (logits - top[:, None])
    exponentials = jnp.exp(shifted)
    if options.label_smoothing:
        # Shifted logits exist anyway: reading the label's from elsewhere would keep both.
        summed = vocabulary.where_inside(shifted, 0).sum(-1)
        expected = options.label_share * _logit_of_label(shifted, labels)
        expected += options.other_share * summed
    else:
        expected = _shifted_logit_of_label(logits, top, factor, shifted, labels)
    total, expected = _reduce_over(jax.lax.psum, over, (exponentials.sum(-1), expected))
    losses, mass = jnp.log(total) - expected, total
    if options.z_loss:
        log_z = jnp.log(total) + factor * top
        losses += options.z_loss * log_z**2
        rise = 1 + 2 * options.z_loss * log_z
        mass = total / jnp.where(rise == 0, jnp.finfo(rise.dtype).eps, rise)
    gradients = exponentials
    if options.label_smoothing:
        gradients -= vocabulary.where_inside(options.other_share, 0) * mass[:, None]
    gradients = _subtract_at_label(gradients, labels, options.label_share * mass)
    gradients *= slopes
    if output.pad_id is not None:
        gradients = _zero_column(gradients, output.pad_id - vocabulary.first)
    return losses, gradients, output.scale * chunk.weights / mass


class _VocabularyPart(NamedTuple):
    """The ids of the rows of one device.

    Args:
        first: the id of the first row.
        is_inside: [1, rows], whether an id is inside the vocabulary. None: all are, on all devices.
    """

    first: Any
    is_inside: Bool[Array, "1 v"] | None

    def where_inside(self, values, other):
        """The values [..., rows] of ids inside the vocabulary, `other` for padding. A CPU compares
        ids only if there is padding: that costs a pass over the logits."""
        return values if self.is_inside is None else jnp.where(self.is_inside, values, other)


def _vocabulary_part(options, over, table):
    first = index_along(over) * table.shape[0]
    if not over or jax.lax.psum(1, over) * table.shape[0] == options.output.vocab_size:
        return _VocabularyPart(first, None)
    ids = first + jnp.arange(table.shape[0], dtype=jnp.int32)
    return _VocabularyPart(first, (ids < options.output.vocab_size)[None])


def _subtract_at_label(logit_gradients, rows, amounts):
    """Subtracts `amounts[t]` from `logit_gradients[t, rows[t]]` where that exists: in place on a
    CPU, in one pass elsewhere."""
    columns = jnp.arange(logit_gradients.shape[1], dtype=jnp.int32)

    def in_place(logit_gradients, rows, amounts):
        tokens = jnp.arange(len(rows), dtype=jnp.int32)
        at_label = logit_gradients.at[tokens, jnp.where(rows >= 0, rows, logit_gradients.shape[1])]
        return at_label.add(-amounts, mode="drop", indices_are_sorted=True, unique_indices=True)

    def fused(logit_gradients, rows, amounts):
        return jnp.where(
            columns[None] == rows[:, None], logit_gradients - amounts[:, None], logit_gradients
        )

    return jax.lax.platform_dependent(logit_gradients, rows, amounts, cpu=in_place, default=fused)


def _shifted_logit_of_label(logits, top, factor, shifted, rows):
    """`shifted`, which is `factor * (logits - top)`, of each label, from the cheaper array.

    A CPU would write whole shifted logits only for this. A TPU writes them faster than it repeats
    their exponentials.
    """

    def from_logits(logits, top, shifted, rows):
        return factor * _logit_of_label(logits, rows, top)

    def from_shifted(logits, top, shifted, rows):
        return _logit_of_label(shifted, rows)

    return jax.lax.platform_dependent(
        logits, top, shifted, rows, cpu=from_logits, default=from_shifted
    )


def _logit_of_label(logits, rows, shift=0):
    """`logits[t, rows[t]] - shift[t]`, or 0 where `rows[t]` is not a column of the logits."""
    found = (rows >= 0) & (rows < logits.shape[1])
    values = jnp.take_along_axis(
        logits, jnp.clip(rows, 0, logits.shape[1] - 1)[:, None], axis=1, mode="promise_in_bounds"
    )[:, 0]
    return jnp.where(found, values - shift, 0)


def _zero_column(logits, column):
    """Sets a column to 0 if it exists."""
    return logits.at[:, jnp.where(jnp.array(column) >= 0, column, logits.shape[1])].set(
        0, mode="drop"
    )


def _reduce_over(reduce, axes, values):
    return reduce(values, axes) if axes else values


def _chunk_count(chunk_size: int | None, tokens: int) -> int:
    size = chunk_size or min(max(SMALLEST_CHUNK, -(-tokens // CHUNKS)), LARGEST_CHUNK)
    return -(-tokens // size)


def _cut_into_chunks(chunk_size: int | None, tokens: _Chunk) -> _Chunk:
    """[count, size, ...]: each chunk takes every count-th token, so that each device has a part of
    each chunk if the batch is split.

    The last chunks are padded with tokens of weight 0.
    """
    total, ndim = tokens.labels.size, tokens.labels.ndim
    count = _chunk_count(chunk_size, total)
    size = -(-total // max(count, 1))

    def cut(array):
        shape = array.shape[ndim:]
        padding = [(0, count * size - total), *[(0, 0)] * len(shape)]
        flat = jnp.pad(array.reshape(total, *shape), padding)
        return flat.reshape(size, count, *shape).swapaxes(0, 1)

    return _Chunk(*map(cut, tokens))


def _joined(labels: Int32[Array, "..."], chunks: Float[Array, "c t ..."]) -> Float[Array, "..."]:
    """The inverse of `_cut_into_chunks`, for values of each token."""
    shape = chunks.shape[2:]
    by_token = chunks.swapaxes(0, 1).reshape(-1, *shape)
    return by_token[: labels.size].reshape(*labels.shape, *shape)


def _zeros_varying_like(
    shape: tuple[int, ...], *, dtype: jnp.dtype, like: Any
) -> Float[Array, "..."]:
    """Zeros made from the data, so that they vary over the same mesh axes inside a shard_map."""
    return jnp.full(
        shape, sum(jnp.sum(leaf.ravel()[:1] > 0) & 0 for leaf in jax.tree.leaves(like)), dtype
    )


def _array_and_layout(
    x: Float[Array, "... d"], table: Float[Array, "v d"] | Table
) -> tuple[Float[Array, "v d"], OutputLayout | None]:
    """The table's array, and how it and x are split (None for plain arrays that no explicit axis
    splits)."""
    if isinstance(table, Table):
        return table.output_layout(x)
    split, (rows, columns) = (
        tuple(spec_axes(jax.typeof(array).sharding.spec, array.ndim)) for array in (x, table)
    )
    if not any((rows, columns, *split)):
        return table, None
    layout = OutputLayout(jax.typeof(x).sharding.mesh, rows, columns, split)
    parts = devices_along(layout.mesh, columns)
    held = table.shape[0] // devices_along(layout.mesh, rows)
    if held % parts:
        want = f"a number of rows that the {parts} parts of its columns divide"
        raise arguments.value_error("table", want, held)
    return table, layout
