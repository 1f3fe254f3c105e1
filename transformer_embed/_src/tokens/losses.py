"""What the losses of output layers share: tokens, what each of them predicts, and reductions."""

import functools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import OutputSplit, split_like
from transformer_embed._src.sequences.runs import (
    has_next_token,
    of_next_token,
    of_previous_token,
)
from transformer_embed._src.sequences.token_positions import as_comparable
from transformer_embed._src.tokens.chunks import (
    Layer,
    Loss,
    Settings,
    losses_of_tokens,
    split_layers,
    sum_of_losses,
    weighted,
)
from transformer_embed._src.tokens.lookup import Table
from transformer_embed._src.tokens.output_layer import (
    OutputLayer,
    OutputOptions,
    RowLogits,
    as_output_layer,
)

REDUCTIONS = ("mean", "sum", "none")
# The default of each setting, and its range as a number that is known while tracing.
SETTINGS = {
    "temperature": (1, arguments.positive),
    "label_smoothing": (0, arguments.rate),
    "z_loss": (0, arguments.not_negative),
}
# Where shifted logits are below, their exponentials are 0, in float64 too.
FLOOR = -1e4


def as_layer(x: ArrayLike, output: OutputLayer | ArrayLike | Table) -> tuple[OutputOptions, Layer]:
    """The arguments of `linear_logits`: what is static of them, and the arrays."""
    x, output = as_output_layer(x, output)
    return output._options, Layer(x, output.table, output.bias)


def as_chunk_size(chunk_size: Any) -> int | None:
    """The largest number of tokens in a chunk; None: it is chosen."""
    return None if chunk_size is None else arguments.size("chunk_size", chunk_size)


class Batch(NamedTuple):
    """What belongs to tokens [...]: arrays [..., 1] that broadcast to the labels [..., c]."""

    labels: Array | None
    mask: Array | None
    weights: Array | None
    segment_ids: Array | None
    settings: Settings


def as_batch(
    tokens: tuple[int, ...],
    labels: ArrayLike | None,
    mask: ArrayLike | None,
    weights: ArrayLike | None,
    shift: int,
    segment_ids: ArrayLike | None,
    with_candidates: bool = False,
    **settings: ArrayLike,
) -> Batch:
    """The checked arrays of a loss of tokens of this shape.

    With candidates, the labels and their mask have one more axis.
    """
    name, whose = ("x", "the tokens") if labels is None else ("labels", "the labels")
    ids, candidates = _as_labels(tokens, labels, with_candidates=with_candidates)
    check_known(name, tokens)
    if shift:
        if not tokens:
            raise arguments.value_error(name, "shape [..., length], to shift", "shape []")
    else:
        arguments.check_left_out("segment_ids", segment_ids, "shift is 0")

    def aligned(name, values, convert=None):
        if values is None:
            return None
        array, check = values, arguments.check_broadcasts
        if convert is not None:
            array, check = convert(name, values), arguments.check_ends_in_length
        check(name, array.shape, tokens, whose)
        return jnp.expand_dims(array, (*range(len(tokens) - array.ndim), -1))

    as_mask = functools.partial(arguments.as_mask, is_true="counted")
    if mask is not None and candidates:
        of_labels, shape = as_mask("mask", mask), (*tokens, *candidates)
        arguments.check_broadcasts("mask", of_labels.shape, shape, "the labels")
        of_labels = jnp.expand_dims(of_labels, range(len(shape) - of_labels.ndim))
    else:
        of_labels = aligned("mask", mask, as_mask)
    return Batch(
        ids,
        of_labels,
        aligned("weights", weights, arguments.as_floats),
        aligned("segment_ids", segment_ids, as_comparable),
        Settings(
            **{name: aligned(name, _setting(name, value)) for name, value in settings.items()}
        ),
    )


def _as_labels(
    tokens: tuple[int, ...], labels: ArrayLike | None, *, with_candidates: bool
) -> tuple[Array | None, tuple[int, ...]]:
    """Labels [..., c], and the axis of candidates if there is one."""
    if labels is None:
        return None, ()
    ids = arguments.as_int32("labels", labels)
    candidates = ids.shape[len(tokens) :] if with_candidates else ()
    want = "x's shape without its last axis"
    arguments.check_same("labels", want, ids.shape, (*tokens, *candidates[:1]))
    return ids if candidates else jnp.expand_dims(ids, -1), candidates


def check_known(name: str, shape: tuple[int, ...]) -> None:
    """A ValueError for a shape with symbolic sizes."""
    if any(map(export.is_symbolic_dim, shape)):
        want = "a shape of known sizes, for the loss is computed in chunks"
        raise arguments.value_error(name, want, f"shape {list(shape)}")


def every_token(x: Array) -> Bool[Array, "..."]:
    """True for each token; under explicit axes, split as x."""
    return ~jnp.zeros_like(x, bool).any(-1)


def _setting(name: str, value: Any) -> Array | None:
    """A number of each token as an array that may be traced; None if it is the default."""
    if not isinstance(value, numbers.Real | np.floating):
        return arguments.as_floats(name, value)
    default, check = SETTINGS[name]
    number = check(name, value)
    # By name, for users may forbid jax to move numbers to a device by itself.
    return None if number == default else jax.device_put(number)


def as_steps(shift: Any) -> int:
    """How many tokens after its own each token predicts: `shift`, True is 1."""
    steps = int(shift) if isinstance(shift, bool | np.bool_) else shift
    return arguments.integer("shift", steps, at_least=0)


class Targets(NamedTuple):
    """What each token predicts, [..., c]; what is one number a token, [..., 1]."""

    labels: Array | None
    counted: Array
    weights: Array  # 0 where a token is not counted.
    settings: Settings


def targets(loss: Loss, x: Array, batch: Batch, dtype: jnp.dtype) -> Targets:
    """For each token its labels, their weights and the settings, in this dtype."""
    counted = every_token(x)
    batch = jax.tree.map(lambda array: split_like(array, counted), batch)
    counted = counted[..., None]
    # Widened before they are broadcast, so that their gradients are summed in the wide dtype.
    zeros = jnp.zeros_like(counted, dtype)
    settings = jax.tree.map(lambda array: array.astype(dtype) + zeros, batch.settings)
    labels, mask, weights = batch.labels, batch.mask, batch.weights
    if loss.shift:
        is_one = batch.segment_ids is None
        segment_ids = jnp.ones_like(counted, jnp.int32) if is_one else batch.segment_ids
        counted &= along_length(has_next_token, loss.shift)(segment_ids)
        follow = along_length(of_next_token, loss.shift)
        labels, mask, weights, settings = jax.tree.map(follow, (labels, mask, weights, settings))
    if labels is not None and loss.outputs[0].pad_id is not None:
        counted &= labels != loss.outputs[0].pad_id
    if mask is not None:
        counted &= mask
    weights = jnp.ones((), dtype) if weights is None else weights.astype(dtype)
    # No row has an id of -1: the loss is finite, and no gradient is that of an infinite logit.
    labels = None if labels is None else jnp.where(counted, labels, -1)
    return Targets(labels, counted, jnp.where(counted, weights, 0), settings)


def without_unused(layer: Layer, found: Targets) -> Layer:
    """With zeros for x that is not used: finite logits, of which a weight of 0 leaves nothing."""
    is_finite = jnp.isfinite(layer.x).all(-1, keepdims=True)
    is_used = (found.counted & ((found.weights != 0) | is_finite)).any(-1, keepdims=True)
    return layer._replace(x=jnp.where(is_used, layer.x, 0))


def nan_outside(loss: Loss, labels: Any, values: Float[Array, "..."]) -> Float[Array, "..."]:
    """The values, NaN where one that is not 0 is that of a label outside the vocabulary.

    NaN makes a loss NaN, and also all its gradients.
    """
    outside = labels.astype(jnp.uint32) >= loss.outputs[0].vocab_size
    return jnp.where(outside & (values != 0), jnp.nan, values)


def along_length(function: Callable, steps: int) -> Callable:
    """The function of values [..., length] and steps, of values [..., length, c]."""
    return lambda array: function(array.swapaxes(-1, -2), steps).swapaxes(-1, -2)


def reduced(loss: Loss, layers: tuple[Layer, ...], batch: Batch) -> tuple[tuple[Array, ...], Array]:
    """The values of `loss.of_chunk` times weights, or their sums or means; and the weights."""
    dtype = arguments.compute_dtype(*(array.dtype for layer in layers for array in layer[:2]))
    found = targets(loss, layers[0].x, batch, dtype)
    labels, counted, weights, settings = found
    total = weights if loss.reduction == "none" else jnp.sum(weights)
    of_losses = weights
    if loss.reduction == "mean":
        # If no label is counted, 0 / 1 in place of NaN.
        of_losses /= jnp.where(total == 0, 1, total)
    if labels is not None:
        of_losses = nan_outside(loss, labels, of_losses)
    splits, (labels, settings, sent), layers = split_layers(
        (labels, settings, of_losses),
        [without_unused(layer, found) for layer in layers],
    )
    if loss.reduction != "none":
        return sum_of_losses(loss, splits, labels, settings, sent, layers), total
    # Split as x again: over axes of the table too, along which its tokens were gathered.
    losses, *others = (
        split_like(values, counted[..., 0])
        for values in losses_of_tokens(loss, splits, labels, settings, layers)
    )
    of_tokens = weights.max(-1, keepdims=True)
    values = weighted(losses, of_losses), *(weighted(each, of_tokens) for each in others)
    if loss.shift:
        back = along_length(of_previous_token, loss.shift)
        values, total = jax.tree.map(back, (values, total))
    return values, total


class ShiftedLogits(NamedTuple):
    """Logits of a chunk over the rows of this device.

    Args:
        factor: what the logits [t, r] are to be multiplied by: a number, or [t, 1].
        logits: without the factor, and low at rows that are not predicted.
        top: [t, 1], the largest of each token, on all devices.
        shifted: factor * (logits - top); with a temperature, finite at bans.
    """

    factor: float | Array
    logits: Array
    top: Array
    shifted: Array


def shifted_logits(
    output: OutputOptions, split: OutputSplit, of_rows: RowLogits, temperature: Array | None
) -> ShiftedLogits:
    """The logits of a chunk, as differences from their largest."""
    factor, largest = of_rows.factor, max(of_rows.factor, 1)
    if temperature is not None:
        factor = factor / temperature
        # So that derivatives in the temperature are finite too.
        largest = 2.0**32 * jax.lax.stop_gradient(jnp.maximum(factor, 1))
    # Finite, also times the factor: a token that is not counted, whose label may be padding, has
    # the weight 0.
    lowest = float(jnp.finfo(of_rows.unscaled.dtype).min) / (2 * largest)
    logits = _excluding(output, split, of_rows, lowest)
    # The loss does not depend on what is subtracted, so it needs no gradient.
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    # Inside a user's shard_map, jax refuses a maximum over no axes.
    top = jax.lax.pmax(top, split.vocabulary) if split.vocabulary else top
    # Differences of logits: their rounding does not grow with the logits. The factor comes last:
    # XLA may round `factor * logits - top` only once, which is not 0 where top is rounded.
    difference = logits - top
    if temperature is not None:
        # The derivative in the temperature is 0 at a ban, not 0 times infinity.
        difference = jnp.maximum(difference, jax.lax.stop_gradient(FLOOR / factor))
    return ShiftedLogits(factor, logits, top, factor * difference)


def _excluding(
    output: OutputOptions, split: OutputSplit, of_rows: RowLogits, lowest: Any
) -> Float[Array, "t r"]:
    """The unscaled logits, low where they are not inside: in place on a CPU, if it can."""
    logits = of_rows.unscaled

    def in_one_pass() -> jax.Array:
        return jnp.where(of_rows.is_inside, logits, lowest)

    if output.pad_id is None or split.mesh is not None:
        return in_one_pass()
    # As uint32, a negative id is past the end.
    padding = np.array([output.pad_id % 2**32], np.uint32)

    def in_place() -> jax.Array:
        return logits.at[:, padding].set(lowest, mode="drop")

    return jax.lax.platform_dependent(cpu=in_place, default=in_one_pass)


def slope_of_logits(
    output: OutputOptions, of_rows: RowLogits, temperature: Array | None
) -> tuple[float | Array, float | Array]:
    """A factor, [t, 1] or a number, and a part [t, r] of the derivative of logits in products."""
    factor = output.scale if temperature is None else output.scale / temperature
    if output.softcap is None:
        return factor, 1.0
    # The derivative of tanh, 0 at a ban.
    return factor, 1 - jnp.square(jnp.maximum(of_rows.unscaled, -1))
