"""The cross-entropy of the tied output layer, one chunk of tokens at a time, so that [tokens,
vocabulary] logits never exist at once.

The tokens (x, labels, weights) are cut into chunks, and a `scan` over them carries two sums: the
loss, and the table's gradient [rows, d]. The step for a chunk computes its logits [chunk, rows],
then its losses and the gradients of the logits, and from these the gradient of the chunk's x and
its part of the table's gradient. Then the logits are freed.

On a mesh, each device first receives whole rows and the tokens that they meet (see
`OutputLayout`), so it holds some rows of the vocabulary. Within a chunk, devices with the same
tokens exchange three numbers per token: the largest logit, the sum of exponentials and the label's
logit. At the end the gradient of x is summed over the devices with the same tokens and scattered to
where x came from; the gradient of the rows is summed over the parts of the batch and returns to its
columns.

In reading order: `tied_cross_entropy` checks its arguments; `_weighted_loss` gives each token its
weight; `_loss` and its rule define the gradient; `_loss_on_mesh` splits the work over the mesh;
`_loss_on_device` sends and receives; `_loss_in_chunks` scans `_add_chunk`;
`_losses_and_logit_gradients` is the arithmetic.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.functional.output_layer import as_wide_as_table, row_logits
from transformer_embed._src.functional.partitioning import (
    OutputLayout,
    all_gather,
    devices_along,
    index_along,
    partition_spec,
    spec_axes,
)

REDUCTIONS = ("mean", "sum")
# Below 256 tokens a chunk's sum into the table's gradient costs more than the chunk's logits;
# beyond 512 nothing gets faster.
SMALLEST_CHUNK, LARGEST_CHUNK, CHUNKS = 256, 512, 12


def tied_cross_entropy(
    x: ArrayLike,
    table: ArrayLike | Table,
    labels: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    pad_id: int | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Float[Array, ""]:
    """The cross-entropy of `tied_logits(x, table, pad_id=pad_id)` with the labels, computed one
    chunk of tokens at a time.

    For a token with logits z and label y, over a vocabulary of V ids and with smoothing s,
    `loss = log(sum(exp(z))) - (1 - s) * z[y] - s * sum(z) / V`.

    One pass over the chunks computes value and gradient, with three products with the table, as
    many as without chunks. Forward mode and second derivatives work too: a product with the Hessian
    (`jax.jvp` of `jax.grad`) also needs the memory of only one chunk.

    Args:
        x: [..., d], a floating dtype.
        table: [vocab_size, d], a floating dtype.
        labels: [...], any integer dtype: the id that each token should predict.
        mask: bool, [length], or more axes that broadcast to the labels'. True = counted. None: all.
        pad_id: the id of padding. Tokens with this label are not counted, and its row of the table
            counts as zeros, as in `tied_logits`: its logit is 0 and it gets no gradient, but it
            must be finite. It may be outside the vocabulary (such as -100). To leave out labels and
            keep their row, use mask. None: no padding.
        label_smoothing: in [0, 1), a Python float: the part of each label's weight that is spread
            evenly over the vocabulary.
        reduction: `"mean"` over the counted tokens, or `"sum"`.
        chunk_size: the largest number of tokens in a chunk (on a mesh with explicit axes, on each
            device). None: a twelfth of the tokens, but at least 256 and at most 512.

    Returns:
        A scalar, computed in float32 (float64 if an input is). The loss and its gradients are 0 if
        no token is counted, and NaN if a counted label is outside the vocabulary. At tokens that
        are not counted, x has no effect, even if it is NaN, and its gradient is 0. Gradients are
        summed in float32 or wider over all chunks, then cast once to the dtypes of x and table.

        With a sharded table, or any array on a mesh with explicit axes, no device gathers a table
        or logits. x is all-gathered over the mesh axes that also split the table. Devices with the
        same tokens exchange three numbers per token and, once, the gradients of x. Devices with the
        same rows exchange the gradient of the rows once. For plain arrays on automatic axes the
        value is the same, and the compiler chooses what is sent.

    Raises:
        TypeError: x or the table does not have a floating dtype; labels are not integers; mask is
            not bool; label_smoothing or chunk_size is not a Python number; the table has only some
            of its rows, as inside `te.rows.value_and_grad`.
        ValueError: the table is not of rank 2, or its width is not x's; the shape of labels is not
            x's without its last axis; a mask that does not end in the labels' last axis, or does
            not broadcast to them; an argument out of its range; columns split over a number of
            devices that does not divide the number of rows.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]])
        >>> x = jnp.array([[0.0, 0.0], [0.0, 0.0], [5.0, 5.0]])
        >>> print(te.tied_cross_entropy(x, table, [1, 2, -1], pad_id=-1))  # log(3)
        1.0986123
        >>> jax.grad(te.tied_cross_entropy)(x, table, [1, 2, -1], pad_id=-1)[2].tolist()
        [0.0, 0.0]

    Source:
        Label smoothing: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7,
        https://arxiv.org/abs/1512.00567. The gradient in the forward pass: Hsu et al., "Liger
        Kernel" (2024), section 3.2, https://arxiv.org/abs/2410.10989. The loss over a split
        vocabulary: Shoeybi et al., "Megatron-LM" (2019), section 3,
        https://arxiv.org/abs/1909.08053
    """
    x, table = as_wide_as_table(x, table)
    labels = arguments.as_int32("labels", labels)
    if any(export.is_symbolic_dim(size) for size in x.shape):
        want = "a shape known while tracing, to be cut into chunks"
        raise arguments.type_error("x", want, f"shape {list(x.shape)}")
    if labels.shape != x.shape[:-1]:
        want = f"x's shape without its last axis, {list(x.shape[:-1])}"
        raise arguments.value_error("labels", want, f"shape {list(labels.shape)}")
    pad_id = None if pad_id is None else arguments.int32("pad_id", pad_id)
    options = _LossOptions(
        table.shape[0],
        pad_id,
        arguments.rate("label_smoothing", label_smoothing),
        None if chunk_size is None else arguments.integer("chunk_size", chunk_size, at_least=1),
    )
    by_count = arguments.choice("reduction", reduction, REDUCTIONS) == "mean"
    if mask is not None:
        mask = _checked_mask(mask, labels)
    return _weighted_loss(options, by_count, x, table, labels, mask)


class _LossOptions(NamedTuple):
    """The arguments of `tied_cross_entropy` that are static."""

    vocab_size: int
    pad_id: int | None
    label_smoothing: float
    chunk_size: int | None

    @property
    def label_share(self) -> float:
        """What smoothing leaves for the label."""
        return 1 - self.label_smoothing

    @property
    def other_share(self) -> Any:
        """What smoothing adds to each id."""
        return self.label_smoothing / self.vocab_size


class _Chunk(NamedTuple):
    x: Float[Array, "t d"]
    labels: Int32[Array, "t"]
    weights: Float[Array, "t"]


def _checked_mask(mask: ArrayLike, labels: Int32[Array, "..."]) -> Bool[Array, "..."]:
    mask = arguments.as_mask("mask", mask, "counted")
    if labels.ndim:
        arguments.check_ends_in_length("mask", mask.shape, labels.shape, "the labels")
    else:
        arguments.check_broadcasts_to("mask", mask.shape, "labels", labels.shape)
    return mask


@functools.partial(jax.jit, static_argnums=(0, 1))
def _weighted_loss(
    options: _LossOptions,
    by_count: bool,
    x: Float[Array, "... d"],
    table: Float[Array, "v d"] | Table,
    labels: Int32[Array, "..."],
    mask: Bool[Array, "..."] | None,
) -> Float[Array, ""]:
    dtype = arguments.compute_dtype(x.dtype, table.dtype)
    counted = jnp.ones_like(labels, bool) if options.pad_id is None else labels != options.pad_id
    if mask is not None:
        counted &= jnp.expand_dims(mask, range(labels.ndim - mask.ndim))
    # Broadcast against x, so that under explicit axes counted has x's sharding.
    counted = counted | jnp.zeros_like(x, bool).any(-1)
    # Zeros give finite logits, so that their weight of 0 leaves nothing of them.
    x = jnp.where(counted[..., None], x, jnp.zeros((), x.dtype))
    # Any label may stand where it is not counted, also one on a shard's padding.
    labels = jnp.where(counted, labels, 0)
    outside = labels.astype(jnp.uint32) >= options.vocab_size
    weights = jnp.where(counted, jnp.where(outside, jnp.array(jnp.nan, dtype), 1), 0)
    if by_count:
        weights = weights / jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(dtype)
    array, layout = _array_and_layout(x, table)
    return _loss(options, layout, x, array, labels, weights)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _loss(options, layout, x, table, labels, weights):
    """The sum of each token's loss times its weight."""
    return _loss_on_mesh(options, layout, (False, False), x, table, labels, weights)[0]


def _loss_jvp(options, layout, primals, tangents):
    """The tangent is linear in the tangents of x and the table, with the gradients as coefficients,
    so its transpose only scales them."""
    needs_gradient = tuple(not isinstance(tangent, SymbolicZero) for tangent in tangents[:2])
    loss, *gradients = _loss_on_mesh(options, layout, needs_gradient, *primals)
    terms = [
        jnp.sum(g * t.astype(g.dtype))
        for g, t in zip(gradients, tangents, strict=False)
        if g is not None
    ]
    return loss, functools.reduce(operator.add, terms, jnp.zeros_like(loss))


_loss.defjvp(_loss_jvp, symbolic_zeros=True)


def _loss_on_mesh(options, layout, needs_gradient, x, table, labels, weights):
    """The loss, and the gradients of x and the table (None where not needed)."""
    if layout is None:
        return _loss_in_chunks(options, (), needs_gradient, table, _Chunk(x, labels, weights))
    of_x, of_table = layout.specs()
    of_tokens = partition_spec(*layout.x[:-1])
    of_gradients = [of_x if needs_gradient[0] else None, of_table if needs_gradient[1] else None]
    # Unchecked: shard_map cannot infer that the psum of a gathered value is replicated.
    run = jax.shard_map(
        functools.partial(_loss_on_device, options, layout, needs_gradient),
        mesh=layout.mesh,
        in_specs=(of_x, of_table, of_tokens, of_tokens),
        out_specs=(partition_spec(), *of_gradients),
        check_vma=False,
    )
    return run(x, table, labels, weights)


def _loss_on_device(options, layout, needs_gradient, x, shard, labels, weights):
    """`_loss_on_mesh`, on one of the devices."""
    gathered = layout.gathered
    tokens = _Chunk(
        all_gather(x, gathered),
        all_gather(labels, gathered[:-1]),
        all_gather(weights, gathered[:-1]),
    )
    loss, x_gradient, row_gradient = _loss_in_chunks(
        options, layout.vocabulary, needs_gradient, layout.whole_rows(shard), tokens
    )
    batch = tuple(axis for axes in layout.tokens for axis in axes)
    if x_gradient is not None:
        x_gradient = layout.sum_of_x(x_gradient)
    if row_gradient is not None:
        row_gradient = layout.split_columns(jax.lax.psum(row_gradient, batch))
    return jax.lax.psum(loss, batch), x_gradient, row_gradient


def _loss_in_chunks(options, over, needs_gradient, table, tokens):
    """Like `_loss_on_mesh`, for all tokens of one device and its own rows; the other rows are on
    other devices along the axes `over`."""
    step = functools.partial(_add_chunk, options, over, needs_gradient, table)
    dtype = tokens.weights.dtype
    start = (
        _zeros_varying_like((), dtype, tokens, table),
        _zeros_varying_like(table.shape, dtype, tokens, table) if needs_gradient[1] else None,
    )
    chunks = _cut_into_chunks(options, tokens)
    (loss, table_gradient), x_gradient = jax.lax.scan(step, start, chunks)
    if x_gradient is not None:
        by_token = x_gradient.swapaxes(0, 1).reshape(-1, tokens.x.shape[-1])
        x_gradient = by_token[: tokens.labels.size].reshape(tokens.x.shape)
    return loss, x_gradient, table_gradient


def _add_chunk(options, over, needs_gradient, table, sums, chunk):
    """The sums after adding those of a chunk, and the gradient of the chunk's x."""
    losses, logit_gradients, scale = _losses_and_logit_gradients(options, over, table, chunk)
    loss, table_gradient = sums
    x_gradient = None
    if needs_gradient[0]:
        x_gradient = scale[:, None] * jnp.einsum(
            "tv,vd->td", logit_gradients, table, preferred_element_type=logit_gradients.dtype
        )
    if needs_gradient[1]:
        scaled = scale[:, None] * chunk.x.astype(scale.dtype)
        table_gradient += jnp.einsum(
            "tv,td->vd", logit_gradients, scaled, preferred_element_type=logit_gradients.dtype
        )
    return (loss + jnp.sum(losses * chunk.weights), table_gradient), x_gradient


def _losses_and_logit_gradients(options, over, table, chunk):
    """Each token's loss [t]; logit_gradients [t, v] and a scale [t], whose product is the gradient
    of its weighted loss in each logit.

    With logits z, their maximum m, targets p that sum to 1, and total = sum(exp(z - m)),
    `loss = log(total) - sum(p * (z - m))`, and its gradient is `exp(z - m) / total - p`. Dividing
    the gradients themselves would cost another pass over them.
    """
    vocabulary = _vocabulary_part(options, over, table)
    labels = chunk.labels - vocabulary.first
    logits = row_logits(chunk.x, table)
    if options.pad_id is not None:
        logits = _zero_column(logits, options.pad_id - vocabulary.first)
    logits = vocabulary.where_inside(logits, -jnp.inf)
    top = _reduce_over(jax.lax.pmax, over, jax.lax.stop_gradient(logits.max(-1)))
    # Differences of logits: their rounding does not grow with the logits.
    shifted = logits - top[:, None]
    exponentials = jnp.exp(shifted)
    if options.label_smoothing:
        # Shifted logits exist anyway: reading the label's from elsewhere would keep both.
        summed = vocabulary.where_inside(shifted, 0).sum(-1)
        expected = options.label_share * _logit_of_label(shifted, labels)
        expected += options.other_share * summed
    else:
        expected = _shifted_logit_of_label(logits, top, shifted, labels)
    total, expected = _reduce_over(jax.lax.psum, over, (exponentials.sum(-1), expected))
    gradients = exponentials
    if options.label_smoothing:
        gradients -= vocabulary.where_inside(options.other_share, 0) * total[:, None]
    gradients = _subtract_at_label(gradients, labels, options.label_share * total)
    if options.pad_id is not None:
        gradients = _zero_column(gradients, options.pad_id - vocabulary.first)
    return jnp.log(total) - expected, gradients, chunk.weights / total


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
    if not over or jax.lax.psum(1, over) * table.shape[0] == options.vocab_size:
        return _VocabularyPart(first, None)
    ids = first + jnp.arange(table.shape[0], dtype=jnp.int32)
    return _VocabularyPart(first, (ids < options.vocab_size)[None])


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


def _shifted_logit_of_label(logits, top, shifted, rows):
    """The logit of each label minus `top`, from the array that is cheaper to read.

    A CPU would write whole shifted logits only for this. A TPU writes them faster than it repeats
    their exponentials.
    """

    def from_logits(logits, top, shifted, rows):
        return _logit_of_label(logits, rows, top)

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


def _chunk_count(options: _LossOptions, tokens: int) -> int:
    size = options.chunk_size or min(max(SMALLEST_CHUNK, -(-tokens // CHUNKS)), LARGEST_CHUNK)
    return -(-tokens // size)


def _cut_into_chunks(options: _LossOptions, tokens: _Chunk) -> _Chunk:
    """[count, size, ...]: each chunk takes every count-th token, so that each device has a part of
    each chunk if the batch is split.

    The last chunks are padded with tokens of weight 0.
    """
    total, ndim = tokens.labels.size, tokens.labels.ndim
    count = _chunk_count(options, total)
    size = -(-total // max(count, 1))

    def cut(array):
        shape = array.shape[ndim:]
        padding = [(0, count * size - total), *[(0, 0)] * len(shape)]
        flat = jnp.pad(array.reshape(total, *shape), padding)
        return flat.reshape(size, count, *shape).swapaxes(0, 1)

    return _Chunk(*map(cut, tokens))


def _zeros_varying_like(
    shape: tuple[int, ...], dtype: jnp.dtype, *like: Any
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
