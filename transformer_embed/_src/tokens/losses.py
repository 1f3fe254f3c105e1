"""Does what all losses of output layers share: checks of arguments, and reductions."""

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import reshard, split_like
from transformer_embed._src.sequences.runs import previous_token_values
from transformer_embed._src.sequences.token_positions import as_comparable
from transformer_embed._src.tokens.loss_arithmetic import Loss
from transformer_embed._src.tokens.loss_sums import sum_of_losses
from transformer_embed._src.tokens.loss_values import map_chunks
from transformer_embed._src.tokens.output_layer import Pair
from transformer_embed._src.tokens.output_split import Layers, split_output
from transformer_embed._src.tokens.predicted_labels import (
    HIGHEST_TEMPERATURE,
    Batch,
    along_length,
    predicted_labels,
)
from transformer_embed._src.tokens.token_data import DEFAULTS, Settings, TokenData


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


# A device may round smaller numbers, which are subnormal, to 0.
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

# Arguments that may be None.
OPTIONAL = ("mask", "weights", "segment_ids")
# Arguments with a number for each token. The others have one for each label.
TOKEN_ARGUMENTS = ("weights", "segment_ids", *Settings._fields)


def compute(loss: Loss, layers: tuple[Pair, ...], **token_arguments: ArrayLike | None) -> Any:
    """Computes a loss from a user's arguments: checks and converts them, then runs `_compute`.

    Args:
        loss: The loss and its static settings.
        layers: The x and the output layer: one pair, or the student's and the teacher's.
        token_arguments: The arguments of the public function with a value for each token or label.
    """
    arrays = {
        name: CONVERTERS[name](name, value)
        for name, value in token_arguments.items()
        if value is not None or name not in OPTIONAL
    }
    labels = arrays.get("labels")
    token_shape = layers[0].x.shape[:-1]
    label_shape = _checked_label_shape(loss, token_shape, labels)
    if not loss.shift:
        arguments.check_left_out("segment_ids", arrays.get("segment_ids"), "shift is 0")

    def with_label_axis(name: str) -> Array | None:
        """Makes an argument [..., 1] or [..., c], which broadcasts to the labels [..., c]."""
        array = arrays.get(name)
        if array is None:
            return None
        if name in TOKEN_ARGUMENTS or labels is None:
            shape = token_shape
            owner = "the tokens"
        else:
            shape = label_shape
            owner = "the labels"
        with_length = name == "segment_ids"
        arguments.check_broadcasts(name, array.shape, shape, owner, with_length=with_length)
        leading_axes = range(len(shape) - array.ndim)
        label_axis = range(len(shape), len(token_shape) + 1)
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


def _checked_label_shape(
    loss: Loss, token_shape: tuple[Any, ...], labels: Array | None
) -> tuple[Any, ...]:
    """Returns the shape of labels: the tokens' shape, and one axis more for candidates.

    Raises an error unless the labels have this shape, and the loss can take tokens of their shape.
    """
    if labels is None:
        _check_token_shape("x", token_shape, loss.shift)
        return token_shape
    label_shape = token_shape
    if loss.of_candidates:
        candidates = labels.shape[len(token_shape) :]
        label_shape += candidates[:1]
    _check_label_shape(labels.shape, label_shape, len(token_shape))
    _check_token_shape("labels", token_shape, loss.shift)
    return label_shape


def _check_label_shape(shape: tuple[int, ...], wanted: tuple[int, ...], token_ndim: int) -> None:
    """Raises an error unless labels have the wanted shape."""
    if shape != wanted:
        want = f"x's shape without its last axis, {wanted}"
        if len(shape) == token_ndim + 1:
            want += " (labels.argmax(-1) makes ids of one-hot labels)"
        raise arguments.value_error("labels", want, shape)


def _check_token_shape(name: str, shape: tuple[Any, ...], shift: int) -> None:
    """Raises an error if a size is not known while tracing, or if no token predicts a label.

    The tokens are cut into chunks, and the number of chunks must be known while tracing.
    """
    has_known_sizes = not any(map(export.is_symbolic_dim, shape))
    arguments.check_shape(name, shape, has_known_sizes, "of known sizes, as chunks need")
    if not shift:
        return
    has_length = len(shape) > 0
    arguments.check_shape(name, shape, has_length, "[..., length], to shift")
    length = shape[-1]
    if shift >= length:
        # No token would predict a label, and a loss of 0 would look like perfect training.
        want = f"a number of tokens below the length of {name}, {length}"
        raise arguments.value_error("shift", want, shift)


@functools.partial(jax.jit, static_argnums=0)
def _compute(loss: Loss, layers: tuple[Pair, ...], batch: Batch) -> Any:
    """Computes the result of a loss from converted arguments."""
    is_token = _true_like_tokens(layers[0].x)
    token_data, is_counted = predicted_labels(loss, layers, batch, is_token)
    if loss.reduction == "none":
        return _value_of_each_token(loss, layers, token_data, is_counted, is_token)
    total_weight = jnp.sum(token_data.weights)
    if loss.reduction == "mean":
        # If no label is counted, the weights are divided by 1, because 0 / 0 is NaN.
        divisor = jnp.where(total_weight == 0, 1, total_weight)
        token_data = token_data._replace(weights=token_data.weights / divisor)
    token_data, device_layers = _on_devices(layers, token_data, is_counted)
    sums = sum_of_losses(loss, token_data, device_layers)
    return loss.returned(sums, total_weight)


def _value_of_each_token(
    loss: Loss,
    layers: tuple[Pair, ...],
    token_data: TokenData,
    is_counted: Bool[Array, "... c"],
    is_token: Bool[Array, "..."],
) -> Any:
    """Computes the result of a loss that is not reduced over the tokens."""
    weights = token_data.weights
    token_data, device_layers = _on_devices(layers, token_data, is_counted)
    values = map_chunks(loss, token_data, device_layers)
    # The values are split like x again, also over axes of the table, along which the tokens were
    # gathered.
    values = tuple(split_like(value, is_token) for value in values)
    if loss.shift:
        # A value moves from the token that predicts a label to the label.
        shift_back = along_length(previous_token_values, loss.shift)
        values, weights = jax.tree.map(shift_back, (values, weights))
    if not loss.of_candidates:
        values, weights = jax.tree.map(lambda array: array[..., 0], (values, weights))
    return loss.returned(values, weights)


def _true_like_tokens(x: Float[Array, "... d"]) -> Bool[Array, "..."]:
    """Returns True for each token.

    The result is computed from x, so that explicit mesh axes split it as they split the tokens of
    x. Only the shape and the sharding of x are read, not its values.
    """
    return ~jnp.zeros_like(x, bool).any(-1)


def _on_devices(
    layers: tuple[Pair, ...], token_data: TokenData, is_counted: Bool[Array, "... c"]
) -> tuple[TokenData, Layers]:
    """Splits the arrays of tokens and of layers over the mesh, as the losses take them."""

    def without_unused(x):
        """Replaces by 0 the x of tokens that have no weight, if it could make logits infinite."""
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
