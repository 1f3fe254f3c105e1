"""What the loss of a batch and the losses of its tokens share.

These are the label and weight of each token, and the arithmetic of a chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import ON_ONE_DEVICE, OutputSplit, spec_axes, split_like
from transformer_embed._src.sequences.runs import has_next_token, of_next_token
from transformer_embed._src.sequences.token_positions import as_comparable
from transformer_embed._src.tokens.lookup import Table
from transformer_embed._src.tokens.output_layer import OutputOptions, RowLogits, row_logits

# Below 256 tokens a chunk's sum into the table's gradient costs more than the chunk's logits;
# beyond 512 nothing gets faster.
SMALLEST_CHUNK, LARGEST_CHUNK, CHUNKS = 256, 512, 12


class LossOptions(NamedTuple):
    """The static arguments of `linear_cross_entropy` and `linear_log_probs`."""

    output: OutputOptions
    shift: int
    chunk_size: int | None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "none"
    with_entropy: bool = False


class Batch(NamedTuple):
    """Tokens [...], as arrays that fit each other, with what each of them predicts."""

    x: jax.Array
    labels: jax.Array
    mask: jax.Array | None
    weights: jax.Array | None
    segment_ids: jax.Array | None


def as_batch(
    x: jax.Array,
    labels: ArrayLike,
    mask: ArrayLike | None,
    weights: ArrayLike | None,
    shift: int,
    segment_ids: ArrayLike | None,
) -> Batch:
    """The checked arrays of a loss, each with as many axes as the labels."""
    ids = arguments.as_int32("labels", labels)
    arguments.check_same("labels", "x's shape without its last axis", ids.shape, x.shape[:-1])
    if any(map(export.is_symbolic_dim, ids.shape)):
        want = "a shape of known sizes, for the loss is computed in chunks"
        raise arguments.value_error("labels", want, f"shape {list(ids.shape)}")
    if shift:
        if not ids.ndim:
            raise arguments.value_error("labels", "shape [..., length], to shift", "shape []")
    else:
        arguments.check_left_out("segment_ids", segment_ids, "shift is 0")
    as_mask = functools.partial(arguments.as_mask, is_true="counted")
    return Batch(
        x,
        ids,
        _aligned("mask", mask, as_mask, ids),
        _aligned("weights", weights, arguments.as_floats, ids),
        _aligned("segment_ids", segment_ids, as_comparable, ids),
    )


def as_steps(shift: Any) -> int:
    """How many tokens after its own each token predicts: `shift`, True is 1."""
    steps = int(shift) if isinstance(shift, bool | np.bool_) else shift
    return arguments.integer("shift", steps, at_least=0)


def _aligned(
    name: str, values: ArrayLike | None, convert: Callable, labels: jax.Array
) -> jax.Array | None:
    """The converted values with as many axes as the labels, once they are known to fit them."""
    if values is None:
        return None
    array = convert(name, values)
    arguments.check_ends_in_length(name, array.shape, labels.shape, "the labels")
    return jnp.expand_dims(array, range(labels.ndim - array.ndim))


class Targets(NamedTuple):
    """What each token predicts."""

    x: jax.Array
    labels: jax.Array
    counted: jax.Array
    weights: jax.Array  # 0 where a token is not counted.


def targets(options: LossOptions, batch: Batch, dtype: jnp.dtype) -> Targets:
    """For each token the label that it predicts, and its weight of this dtype."""
    x, *of_tokens = batch
    labels, mask, weights, segment_ids = jax.tree.map(lambda a: split_like(a, x), of_tokens)
    pad_id = options.output.pad_id
    # Made from x, so that under explicit axes it has x's sharding.
    counted = ~jnp.zeros_like(x, bool).any(-1)
    if options.shift:
        segment_ids = jnp.ones_like(labels) if segment_ids is None else segment_ids
        counted &= has_next_token(segment_ids, options.shift)
        follow = functools.partial(of_next_token, steps=options.shift)
        labels, mask, weights = jax.tree.map(follow, (labels, mask, weights))
    if pad_id is not None:
        counted &= labels != pad_id
    if mask is not None:
        counted &= mask
    # Widened before it is broadcast, so that its gradient is summed in the wide dtype.
    weights = jnp.ones((), dtype) if weights is None else weights.astype(dtype)
    weights = jnp.where(counted, weights, 0)
    # Zeros give finite logits, so that their weight of 0 leaves nothing of them.
    is_used = counted & ((weights != 0) | jnp.isfinite(x).all(-1))
    x = jnp.where(is_used[..., None], x, 0)
    # Any label may stand where it is not counted, also one on a shard's padding.
    labels = jnp.where(counted, labels, 0)
    return Targets(x, labels, counted, weights)


def nan_outside(
    options: LossOptions, labels: Int32[Array, "..."], weights: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The weights, NaN where one that is not 0 is that of a label outside the vocabulary."""
    outside = labels.astype(jnp.uint32) >= options.output.vocab_size
    return jnp.where(outside & (weights != 0), jnp.nan, weights)


def weighted(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """The losses times their weights: 0 where a weight is, also of an infinite loss or NaN."""
    return jnp.where((weights == 0) & ~jnp.isfinite(losses), 0, losses) * weights


# The x, the labels and the weights of t tokens, each [t, d] or [t, 1].
Chunk = tuple[jax.Array, jax.Array, jax.Array]


class ChunkLosses(NamedTuple):
    """Of a chunk of t tokens and v rows of the vocabulary; entropies are None unless asked for."""

    losses: jax.Array  # [t, 1]
    gradients: jax.Array  # [t, v]: times the factors, those of the weighted losses in the logits.
    factors: jax.Array  # [t, 1]
    entropies: jax.Array | None  # [t, 1]
    entropy_gradients: jax.Array | None  # [t, v]


def losses_and_logit_gradients(
    options: LossOptions,
    split: OutputSplit,
    rows: Float[Array, "r d"],
    bias: jax.Array | None,
    chunk: Chunk,
) -> ChunkLosses:
    """The losses of a chunk's tokens, and their gradients in the logits `x @ rows.T + bias`.

    With logits z, their maximum m, targets p that sum to 1, `total = sum(exp(z - m))` and
    `log_z = log(total) + m`, the loss is `log(total) - sum(p * (z - m)) + z_loss * log_z**2`. Its
    gradient in z is `(exp(z - m) - mass * p) / mass`, with
    `mass = total / (1 + 2 * z_loss * log_z)`. Dividing or multiplying the logit gradients
    themselves would cost another operation for each of them.
    """
    x, labels, weights = chunk
    output, smoothing = options.output, options.label_smoothing
    of_rows = row_logits(output, split, x, rows, bias)
    logits, top, shifted = _shifted(output, split, of_rows)
    exponentials = jnp.exp(shifted)
    total = exponentials.sum(-1, keepdims=True)
    columns = labels - of_rows.ids[0, 0]
    # What smoothing gives to each row.
    share = 0.0
    if smoothing:
        share = jnp.where(of_rows.is_inside, smoothing / output.predicted(weights.dtype), 0)
    expected = _expected(options, columns, share, of_rows.factor, logits, top, shifted)
    # One all-reduce for both numbers.
    total, expected = jax.lax.psum((total, expected), split.vocabulary)
    losses, mass = jnp.log(total) - expected, total
    if options.z_loss:
        log_z = jnp.log(total) + of_rows.factor * top
        losses += options.z_loss * log_z**2
        mass = total / _rise(options.z_loss, log_z)
    gradients = exponentials - share * mass if smoothing else exponentials
    gradients = _minus_at_label(options, columns, gradients, (1 - smoothing) * mass)
    slope = output.scale
    if output.softcap is not None:
        # The derivative of tanh, 0 at a ban.
        slope_of_cap = 1 - jnp.square(jnp.maximum(of_rows.unscaled, -1))
        gradients *= slope_of_cap
        slope *= slope_of_cap
    entropies = (None, None)
    if options.with_entropy:
        entropies = _entropies_and_gradients(split, shifted, exponentials, total, slope)
    factors = jnp.where(weights == 0, 0, output.scale * weights / mass)
    return ChunkLosses(losses, gradients, factors, *entropies)


def _rise(z_loss: float, log_z: Float[Array, "t 1"]) -> Float[Array, "t 1"]:
    """The derivative of `log_z + z_loss * log_z**2`, but never 0: gradients are divided by it."""
    rise = 1 + 2 * z_loss * log_z
    return jnp.where(rise == 0, jnp.finfo(rise.dtype).eps, rise)


def _shifted(
    output: OutputOptions, split: OutputSplit, of_rows: RowLogits
) -> tuple[Float[Array, "t r"], Float[Array, "t 1"], Float[Array, "t r"]]:
    """Without their factor, the logits and each token's largest; and their scaled difference."""
    logits = _excluding(output, split, of_rows)
    # The loss does not depend on what is subtracted, so it needs no gradient.
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    # Inside a user's shard_map, jax refuses a maximum over no axes.
    top = jax.lax.pmax(top, split.vocabulary) if split.vocabulary else top
    # Differences of logits: their rounding does not grow with the logits. The factor comes last:
    # XLA may round `factor * logits - top` only once, which is not 0 where top is rounded.
    return logits, top, of_rows.factor * (logits - top)


def _expected(
    options: LossOptions,
    columns: Int32[Array, "t 1"],
    share: float | jax.Array,
    factor: float,
    logits: Float[Array, "t r"],
    top: Float[Array, "t 1"],
    shifted: Float[Array, "t r"],
) -> Float[Array, "t 1"]:
    """The mean of the shifted logits under the targets, of the rows of this device."""
    if options.label_smoothing:
        # Shifted logits exist anyway: reading the label's from elsewhere would keep both.
        of_label = (1 - options.label_smoothing) * _of_label(columns, shifted, 0)
        return of_label + (share * shifted).sum(-1, keepdims=True)
    # A CPU would write whole shifted logits only for this. A TPU writes them faster than it
    # repeats their exponentials.
    return jax.lax.platform_dependent(
        cpu=lambda: factor * _of_label(columns, logits, top),
        default=lambda: _of_label(columns, shifted, 0),
    )


def _entropies_and_gradients(
    split: OutputSplit,
    shifted: Float[Array, "t r"],
    exponentials: Float[Array, "t r"],
    total: Float[Array, "t 1"],
    slope: float | jax.Array,
) -> tuple[Float[Array, "t 1"], Float[Array, "t r"]]:
    """The entropies of a chunk's predictions, and their gradients in the logits.

    With `mean = sum(exp(z - m) * (z - m)) / total`, the entropy is `log(total) - mean`, and its
    gradient in z is `exp(z - m) * (mean - (z - m)) / total`.
    """
    # A ban is -inf, and counts as 0.
    products = exponentials * jnp.maximum(shifted, jnp.finfo(shifted.dtype).min)
    mean = jax.lax.psum(products.sum(-1, keepdims=True), split.vocabulary) / total
    # Not `exponentials * (mean - shifted)`: that factor is huge at padding, and would overflow in
    # the derivative by the slope.
    return jnp.log(total) - mean, slope * (exponentials * mean - products) / total


def _of_label(
    columns: Int32[Array, "t 1"], values: Float[Array, "t r"], shift: float | jax.Array
) -> Float[Array, "t 1"]:
    """The value of each row in its column, minus its shift; 0 where another device has it."""
    last = values.shape[1] - 1
    # On a shard of the vocabulary, the label may belong to another device.
    index = jnp.clip(columns, 0, last)
    at_label = jnp.take_along_axis(values, index, axis=1, mode="promise_in_bounds")
    return jnp.where((columns >= 0) & (columns <= last), at_label - shift, 0)


def _minus_at_label(
    options: LossOptions,
    columns: Int32[Array, "t 1"],
    values: Float[Array, "t r"],
    amounts: Float[Array, "t 1"],
) -> Float[Array, "t r"]:
    """The values, in each row minus its amount in its column: in place on a CPU, if it can."""

    def in_one_pass() -> jax.Array:
        is_label = jnp.arange(values.shape[1])[None] == columns
        return jnp.where(is_label, values - amounts, values)

    if options.reduction == "none":
        # Fused with the product with the cotangents, which writes all of them anyway.
        return in_one_pass()

    def in_place() -> jax.Array:
        # As uint32, a negative column is past the end. By vmap, a mesh may split the rows.
        subtract = jax.vmap(lambda row, column, n: row.at[column].add(-n, mode="drop"))
        return subtract(values, columns.astype(jnp.uint32), amounts)

    return jax.lax.platform_dependent(cpu=in_place, default=in_one_pass)


def _excluding(
    output: OutputOptions, split: OutputSplit, of_rows: RowLogits
) -> Float[Array, "t r"]:
    """The unscaled logits, low where they are not inside: in place on a CPU, if it can."""
    logits = of_rows.unscaled
    # Finite, also times the factor: a token that is not counted, whose label may be padding, has
    # the weight 0.
    lowest = jnp.finfo(logits.dtype).min / (2 * max(of_rows.factor, 1))

    def in_one_pass() -> jax.Array:
        return jnp.where(of_rows.is_inside, logits, lowest)

    if output.pad_id is None or split.mesh is not None:
        return in_one_pass()
    # As uint32, a negative id is past the end.
    padding = np.uint32(output.pad_id % 2**32)

    def in_place() -> jax.Array:
        return logits.at[:, padding].set(lowest, mode="drop")

    return jax.lax.platform_dependent(cpu=in_place, default=in_one_pass)


def cut_into_chunks(chunk_size: int | None, *values: jax.Array) -> Any:
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


def join_chunks(
    chunks: Float[Array, "n s c"], total: int, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """The inverse of `cut_into_chunks`: the values of all tokens, without the padding."""
    tokens = chunks.swapaxes(0, 1).reshape(-1, chunks.shape[-1])
    return tokens[:total].reshape(shape)


def array_and_split(x: jax.Array, table: Any) -> tuple[jax.Array, OutputSplit]:
    """The table's array, and how it and x are split: plain arrays, only by explicit axes."""
    if isinstance(table, Table):
        return table._output_split(x)
    of_x = spec_axes(jax.typeof(x).sharding.spec, x.ndim)
    rows, columns = spec_axes(jax.typeof(table).sharding.spec, table.ndim)
    if not any((rows, columns, *of_x)):
        return table, ON_ONE_DEVICE
    return table, OutputSplit(jax.typeof(x).sharding.mesh, rows, columns, tuple(of_x))
