"""Does what all losses of output layers share: checks, what each token predicts, reductions."""

import functools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.compiled import nan_where
from transformer_embed._src.partitioning import reshard, split_like
from transformer_embed._src.sequences.runs import (
    has_next_token,
    of_next_token,
    of_previous_token,
)
from transformer_embed._src.sequences.token_positions import as_comparable
from transformer_embed._src.tokens.loss_arithmetic import Loss
from transformer_embed._src.tokens.loss_sums import sum_of_losses
from transformer_embed._src.tokens.loss_values import map_chunks
from transformer_embed._src.tokens.output_layer import OutputLayer, Pair
from transformer_embed._src.tokens.output_split import Layers, split_output
from transformer_embed._src.tokens.token_data import DEFAULTS, Settings, TokenData


class Batch(NamedTuple):
    """Arrays of a batch, [..., 1] or [..., c], that broadcast to the labels [..., c].

    Shapes are written with one letter: c is 1, or the number of candidates of a token.
    """

    labels: Any = None
    mask: Any = None
    weights: Any = None
    segment_ids: Any = None
    settings: Settings = Settings()


def _as_setting(check: Callable, name: str, value: Any) -> Array | None:
    """Converts a setting to an array that may be traced, or to None if it has its default value."""
    if not isinstance(value, numbers.Real | np.floating):
        return arguments.as_floats(name, value)
    number = check(name, value)
    if number == getattr(DEFAULTS, name):
        return None
    # The number is moved by name, because users may forbid jax to move numbers to a device.
    return jax.device_put(number)


def as_labels(name: str, labels: ArrayLike) -> Array:
    """Converts labels to int32. An error for floats says how one-hot labels become ids."""
    if arguments.is_int32(labels):
        return labels
    array = arguments.as_array(name, labels)
    if jnp.issubdtype(array.dtype, jnp.floating) and array.size > 0:
        want = f"ids of an integer dtype ({name}.argmax(-1) makes them of one-hot {name})"
        raise arguments.type_error(name, want, array.dtype)
    return arguments.as_int32(name, labels)


# At a larger temperature, the lowest float32 number, which is the logit of padding, would keep a
# probability above 0.
HIGHEST_TEMPERATURE = 1e36
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_as_temperature = functools.partial(
    arguments.real,
    lowest=_SMALLEST_NORMAL,
    highest=HIGHEST_TEMPERATURE,
    want=f"a number above 0, {_SMALLEST_NORMAL:.3g} to {HIGHEST_TEMPERATURE:.3g}",
)

CONVERTERS: dict[str, Callable] = {
    "labels": as_labels,
    "mask": functools.partial(
        arguments.as_mask, is_true="counted (pass mask != 0, or factors as weights=)"
    ),
    "weights": arguments.as_floats,
    "segment_ids": as_comparable,
    "temperature": functools.partial(_as_setting, _as_temperature),
    "label_smoothing": functools.partial(_as_setting, arguments.rate),
    "z_loss": functools.partial(_as_setting, arguments.not_negative),
}

# Whether each number of a setting is in range. An array may be known only when the program runs, so
# numbers that are out of range become NaN.
IS_IN_RANGE: dict[str, Callable] = {
    "temperature": lambda value: (value > 0) & (value <= HIGHEST_TEMPERATURE),
    "label_smoothing": lambda value: (value >= 0) & (value < 1),
    "z_loss": lambda value: value >= 0,
}
OPTIONAL = ("mask", "weights", "segment_ids")
# Arguments with a number for each token. The others have one for each label.
TOKEN_ARGUMENTS = ("weights", "segment_ids", *Settings._fields)


def compute(loss: Loss, layers: tuple[Pair, ...], **token_arguments: ArrayLike | None) -> Any:
    """Checks the arguments of tokens, and computes what `loss.returned` makes of their values."""
    arrays = {
        name: CONVERTERS[name](name, value)
        for name, value in token_arguments.items()
        if value is not None or name not in OPTIONAL
    }
    token_shape = layers[0].x.shape[:-1]
    labels = arrays.get("labels")
    label_shape = token_shape
    if labels is not None:
        if loss.of_candidates:
            label_shape += labels.shape[len(token_shape) :][:1]
        _check_label_shape(labels.shape, label_shape, len(token_shape))
    _check_token_shape("x" if labels is None else "labels", token_shape, loss.shift)
    if not loss.shift:
        arguments.check_left_out("segment_ids", arrays.get("segment_ids"), "shift is 0")
    label_owner = "the tokens" if labels is None else "the labels"

    def with_label_axis(name: str) -> Array | None:
        """Adds axes for [..., 1] or [..., c]: a number of a token broadcasts to its candidates."""
        array = arrays.get(name)
        if array is None:
            return None
        target, owner = label_shape, label_owner
        if name in TOKEN_ARGUMENTS:
            target, owner = token_shape, "the tokens"
        with_length = name == "segment_ids"
        arguments.check_broadcasts(name, array.shape, target, owner, with_length=with_length)
        leading_axes = range(len(target) - array.ndim)
        label_axis = range(len(target), len(token_shape) + 1)
        return jnp.expand_dims(array, (*leading_axes, *label_axis))

    settings = Settings(*map(with_label_axis, Settings._fields))
    batch = Batch(
        labels=with_label_axis("labels"),
        mask=with_label_axis("mask"),
        weights=with_label_axis("weights"),
        segment_ids=with_label_axis("segment_ids"),
        settings=settings,
    )
    return _compute(loss, layers, batch)


def _check_label_shape(shape: tuple[int, ...], wanted: tuple[int, ...], token_ndim: int) -> None:
    """Raises an error unless labels have the wanted shape."""
    if shape != wanted:
        want = f"x's shape without its last axis, {wanted}"
        if len(shape) == token_ndim + 1:
            want += " (labels.argmax(-1) makes ids of one-hot labels)"
        raise arguments.value_error("labels", want, shape)


def _check_token_shape(name: str, shape: tuple[Any, ...], shift: int) -> None:
    """Raises an error if a size is not known while tracing, or if no token predicts a label."""
    is_known = not any(map(export.is_symbolic_dim, shape))
    arguments.check_shape(name, shape, is_known, "of known sizes, as chunks need")
    if not shift:
        return
    arguments.check_shape(name, shape, bool(shape), "[..., length], to shift")
    length = shape[-1]
    if shift >= length:
        # No token would predict a label, and a loss of 0 would look like perfect training.
        want = f"a number of tokens below the length of {name}, {length}"
        raise arguments.value_error("shift", want, shift)


@functools.partial(jax.jit, static_argnums=0)
def _compute(loss: Loss, layers: tuple[Pair, ...], batch: Batch) -> Any:
    """Computes what `loss.returned` makes of the values of tokens."""
    # True for every token, and split like x under explicit axes.
    all_true = ~jnp.zeros_like(layers[0].x, bool).any(-1)
    token_data, is_counted = _token_data(loss, layers, batch, all_true)
    weights = token_data.weights
    if loss.reduction != "none":
        weights = jnp.sum(weights)
    if loss.reduction == "mean":
        # If no label is counted, the weights are divided by 1, because 0 / 0 is NaN.
        mean_weights = token_data.weights / jnp.where(weights == 0, 1, weights)
        token_data = token_data._replace(weights=mean_weights)
    token_data, device_layers = _on_devices(layers, token_data, is_counted)
    if loss.reduction != "none":
        return loss.returned(sum_of_losses(loss, token_data, device_layers), weights)
    values = map_chunks(loss, token_data, device_layers)
    # The values are split like x again, also over axes of the table, along which the tokens were
    # gathered.
    values = tuple(split_like(value, all_true) for value in values)
    if loss.shift:
        shift_back = _along_length(of_previous_token, loss.shift)
        values, weights = jax.tree.map(shift_back, (values, weights))
    if not loss.of_candidates:
        values, weights = jax.tree.map(lambda array: array[..., 0], (values, weights))
    return loss.returned(values, weights)


def _token_data(
    loss: Loss, layers: tuple[Pair, ...], batch: Batch, all_true: Bool[Array, "..."]
) -> tuple[TokenData, Bool[Array, "... c"]]:
    """Finds what each token predicts, and which labels are counted."""
    dtypes = [array.dtype for pair in layers for array in (pair.x, pair.output.table)]
    dtype = arguments.compute_dtype(*dtypes)
    output = layers[0].output
    batch = jax.tree.map(lambda array: split_like(array, all_true), batch)
    is_counted = all_true[..., None]
    # Numbers are widened before they are broadcast, so their gradients are summed in the wide
    # dtype.
    zeros = jnp.zeros_like(is_counted, dtype)
    weights, settings = jax.tree.map(
        lambda array: array.astype(dtype) + zeros, (batch.weights, batch.settings)
    )
    labels = batch.labels
    # The mask gets the whole length here, because it is shifted below.
    mask = None if batch.mask is None else batch.mask & is_counted
    if loss.shift:
        segment_ids = batch.segment_ids
        if segment_ids is None:
            segment_ids = jnp.ones_like(is_counted, jnp.int32)
        is_counted &= _along_length(has_next_token, loss.shift)(segment_ids)
        if labels is not None and not loss.of_candidates:
            is_counted &= ~_is_padding(labels, output)
        shift = _along_length(of_next_token, loss.shift)
        labels, mask, weights, settings = jax.tree.map(shift, (labels, mask, weights, settings))
    if labels is not None and output.pad_id is not None:
        is_counted &= labels != output.pad_id
    if mask is not None:
        is_counted &= mask
    weights = jnp.where(is_counted, jnp.ones((), dtype) if weights is None else weights, 0)
    # No row has an id of -1. So a label that is not counted has a finite loss, and the gradient of
    # an infinite logit is not taken.
    labels = None if labels is None else jnp.where(is_counted, labels, -1)
    valid_settings = {
        name: _valid_setting(name, setting, is_counted, weights)
        for name, setting in settings._asdict().items()
    }
    token_data = TokenData(labels=labels, settings=Settings(**valid_settings), weights=weights)
    return token_data, is_counted


def _is_padding(labels: Array, output: OutputLayer) -> Array:
    """Returns which tokens are padding, as their own labels say.

    A `pad_id` outside the vocabulary only marks labels, so no token is padding then.
    """
    return (labels == output.pad_id) & (labels.astype(jnp.uint32) < output.size)


def _valid_setting(
    name: str, setting: Array | None, is_counted: Array, weights: Array
) -> Array | None:
    """Replaces the numbers of a setting that are out of range.

    A number becomes NaN if a loss of its token has a weight. It becomes the default if no label of
    its token is counted, or if no label has a weight.
    """
    if setting is None:
        return None
    is_used = (weights != 0).any(-1, keepdims=True)
    is_valid = is_counted.any(-1, keepdims=True) & IS_IN_RANGE[name](setting)
    return nan_where(~is_valid & is_used, jnp.where(is_valid, setting, getattr(DEFAULTS, name)))


def _along_length(function: Callable, steps: int) -> Callable:
    """Makes a function of values [..., length, c] from a function of [..., length] and steps."""
    return lambda array: function(array.swapaxes(-1, -2), steps).swapaxes(-1, -2)


def _on_devices(
    layers: tuple[Pair, ...], token_data: TokenData, is_counted: Bool[Array, "... c"]
) -> tuple[TokenData, Layers]:
    """Splits the arrays of tokens and of layers as functions on devices take them."""

    def without_unused(x):
        """Replaces the x of tokens without any weight, so that their logits are finite."""
        is_finite = jnp.isfinite(x).all(-1, keepdims=True)
        is_used = (token_data.weights != 0) | (is_counted & is_finite)
        return jnp.where(is_used.any(-1, keepdims=True), x, 0)

    device_layers = tuple(split_output(without_unused(pair.x), pair.output) for pair in layers)
    first, *others = (layer.split for layer in device_layers)
    for split in others:
        want = "a table with rows split over the mesh axes of output's"
        arguments.check_same("teacher_output", want, split.vocabulary, first.vocabulary)
        arguments.check_same("teacher_x", "tokens split as x's", split.tokens, first.tokens)
    sharding = NamedSharding(first.mesh, first.specs().x)
    return jax.tree.map(lambda array: reshard(array, sharding), token_data), device_layers
