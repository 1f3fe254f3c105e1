"""What the losses of output layers share: tokens, what each of them predicts, and reductions."""

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
from transformer_embed._src.tokens.chunks import (
    DEFAULTS,
    Layers,
    Loss,
    Settings,
    TokenData,
    map_chunks,
    sum_of_losses,
)
from transformer_embed._src.tokens.output_layer import OutputLayer
from transformer_embed._src.tokens.output_split import split_output

# x and the output layer that it meets.
Pair = tuple[Array, OutputLayer]


class Batch(NamedTuple):
    """Arrays of tokens, [..., 1], that broadcast to those of the labels, [..., c]."""

    labels: Any = None
    mask: Any = None
    weights: Any = None
    segment_ids: Any = None
    settings: Settings = Settings()


def _as_setting(check: Callable, name: str, value: Any) -> Array | None:
    """A number of each token as an array that may be traced; None if it is the default."""
    if not isinstance(value, numbers.Real | np.floating):
        return arguments.as_floats(name, value)
    number = check(name, value)
    # By name, for users may forbid jax to move numbers to a device by itself.
    return None if number == getattr(DEFAULTS, name) else jax.device_put(number)


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

# An array may be known only when the program runs: what is out of range becomes NaN.
IN_RANGE: dict[str, Callable] = {
    "temperature": lambda value: (value > 0) & (value <= HIGHEST_TEMPERATURE),
    "label_smoothing": lambda value: (value >= 0) & (value < 1),
    "z_loss": lambda value: value >= 0,
}
OPTIONAL = "mask", "weights", "segment_ids"
# Of a token; the others are of a label.
OF_TOKEN = "weights", "segment_ids", *Settings._fields


def compute(loss: Loss, layers: tuple[Pair, ...], **token_arguments: ArrayLike | None) -> Any:
    """What `loss.returned` makes of the values of tokens, whose arguments are checked here."""
    arrays = {
        name: CONVERTERS[name](name, value)
        for name, value in token_arguments.items()
        if value is not None or name not in OPTIONAL
    }
    tokens, labels = layers[0][0].shape[:-1], arrays.get("labels")
    shape, name, whose = tokens, "x", "the tokens"
    if labels is not None:
        name, whose = "labels", "the labels"
        if loss.of_candidates:
            shape += labels.shape[len(tokens) :][:1]
        if labels.shape != shape:
            want = f"x's shape without its last axis, {shape}"
            if labels.ndim == len(tokens) + 1:
                want += " (labels.argmax(-1) makes ids of one-hot labels)"
            raise arguments.value_error(name, want, labels.shape)
    is_known = not any(map(export.is_symbolic_dim, tokens))
    arguments.check_shape(name, tokens, is_known, "of known sizes, as chunks need")
    if not loss.shift:
        arguments.check_left_out("segment_ids", arrays.get("segment_ids"), "shift is 0")
    else:
        arguments.check_shape(name, tokens, bool(tokens), "[..., length], to shift")
        if loss.shift >= tokens[-1]:
            # No token would predict a label, and a loss of 0 would look like perfect training.
            want = f"a number of tokens below the length of {name}, {tokens[-1]}"
            raise arguments.value_error("shift", want, loss.shift)

    def as_wide(name: str) -> Array | None:
        """[..., 1] or [..., c]: a number of a token broadcasts to those of its candidates."""
        if (array := arrays.get(name)) is None:
            return None
        target, other = (tokens, "the tokens") if name in OF_TOKEN else (shape, whose)
        with_length = name == "segment_ids"
        arguments.check_broadcasts(name, array.shape, target, other, with_length=with_length)
        last = range(len(target), len(tokens) + 1)
        return jnp.expand_dims(array, (*range(len(target) - array.ndim), *last))

    settings = Settings(*map(as_wide, Settings._fields))
    wide = {name: as_wide(name) for name in Batch._fields[:-1]}
    return _compute(loss, layers, Batch(**wide, settings=settings))


@functools.partial(jax.jit, static_argnums=0)
def _compute(loss: Loss, layers: tuple[Pair, ...], batch: Batch) -> Any:
    # Under explicit axes, split as x.
    every_token = ~jnp.zeros_like(layers[0][0], bool).any(-1)
    token_data, counted = _token_data(loss, layers, batch, every_token)
    weights = token_data.weights
    if loss.reduction != "none":
        weights = jnp.sum(weights)
    if loss.reduction == "mean":
        # If no label is counted, 0 / 1 in place of NaN.
        mean_weights = token_data.weights / jnp.where(weights == 0, 1, weights)
        token_data = token_data._replace(weights=mean_weights)
    token_data, of_layers = _placed(layers, token_data, counted)
    if loss.reduction != "none":
        return loss.returned(sum_of_losses(loss, token_data, of_layers), weights)
    # Split as x again: over axes of the table too, along which its tokens were gathered.
    values = map_chunks(loss, token_data, of_layers)
    values = tuple(split_like(each, every_token) for each in values)
    if loss.shift:
        back = _along_length(of_previous_token, loss.shift)
        values, weights = jax.tree.map(back, (values, weights))
    if not loss.of_candidates:
        values, weights = jax.tree.map(lambda each: each[..., 0], (values, weights))
    return loss.returned(values, weights)


def _token_data(
    loss: Loss, layers: tuple[Pair, ...], batch: Batch, every_token: Bool[Array, "..."]
) -> tuple[TokenData, Bool[Array, "... c"]]:
    """What each token predicts, and which labels are counted."""
    dtype = arguments.compute_dtype(
        *(array.dtype for x, output in layers for array in (x, output.table))
    )
    batch = jax.tree.map(lambda array: split_like(array, every_token), batch)
    counted = every_token[..., None]
    # Widened before they are broadcast, so that their gradients are summed in the wide dtype.
    zeros = jnp.zeros_like(counted, dtype)
    floats = batch.weights, batch.settings
    weights, settings = jax.tree.map(lambda array: array.astype(dtype) + zeros, floats)
    labels, pad_id = batch.labels, layers[0][1].pad_id
    # With the whole length, which is shifted below.
    mask = None if batch.mask is None else batch.mask & counted
    if loss.shift:
        segment_ids = batch.segment_ids
        if segment_ids is None:
            segment_ids = jnp.ones_like(counted, jnp.int32)
        counted &= _along_length(has_next_token, loss.shift)(segment_ids)
        if labels is not None and not loss.of_candidates:
            counted &= ~_is_padding(labels, layers[0][1])
        shifted = _along_length(of_next_token, loss.shift)
        labels, mask, weights, settings = jax.tree.map(shifted, (labels, mask, weights, settings))
    if labels is not None and pad_id is not None:
        counted &= labels != pad_id
    if mask is not None:
        counted &= mask
    weights = jnp.where(counted, jnp.ones((), dtype) if weights is None else weights, 0)
    # No row has an id of -1: the loss is finite, and no gradient is that of an infinite logit.
    labels = None if labels is None else jnp.where(counted, labels, -1)
    checked = {
        name: _valid(name, setting, counted, weights)
        for name, setting in settings._asdict().items()
    }
    return TokenData(labels=labels, settings=Settings(**checked), weights=weights), counted


def _is_padding(labels: Array, output: OutputLayer) -> Array:
    """Which tokens are padding, as their own labels say; an id outside only marks labels."""
    return (labels == output.pad_id) & (labels.astype(jnp.uint32) < output.size)


def _valid(name: str, setting: Array | None, counted: Array, weights: Array) -> Array | None:
    """Numbers of tokens, NaN where one that is out of range has a weight.

    The default where nothing is counted, or an invalid one has no weight.
    """
    if setting is None:
        return None
    is_used = (weights != 0).any(-1, keepdims=True)
    is_valid = counted.any(-1, keepdims=True) & IN_RANGE[name](setting)
    return nan_where(~is_valid & is_used, jnp.where(is_valid, setting, getattr(DEFAULTS, name)))


def _along_length(function: Callable, steps: int) -> Callable:
    """The function of values [..., length] and steps, of values [..., length, c]."""
    return lambda array: function(array.swapaxes(-1, -2), steps).swapaxes(-1, -2)


def _placed(
    layers: tuple[Pair, ...], token_data: TokenData, counted: Bool[Array, "... c"]
) -> tuple[TokenData, Layers]:
    """The arrays of tokens and of layers as functions on devices take them."""

    def without_unused(x):
        """Finite logits for tokens without any weight, which leaves nothing of them."""
        is_finite = jnp.isfinite(x).all(-1, keepdims=True)
        is_used = (token_data.weights != 0) | (counted & is_finite)
        return jnp.where(is_used.any(-1, keepdims=True), x, 0)

    placed = tuple(split_output(without_unused(x), output) for x, output in layers)
    first, *others = (layer.split for layer in placed)
    for split in others:
        want = "a table with rows split over the mesh axes of output's"
        arguments.check_same("teacher_output", want, split.vocabulary, first.vocabulary)
        arguments.check_same("teacher_x", "tokens split as x's", split.tokens, first.tokens)
    sharding = NamedSharding(first.mesh, first.specs().x)
    return jax.tree.map(lambda array: reshard(array, sharding), token_data), placed
