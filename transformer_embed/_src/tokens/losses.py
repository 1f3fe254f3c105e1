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
from transformer_embed._src.tokens.token_data import DEFAULT_SETTINGS, TokenData, TokenSettings


def _as_setting(check: Callable, name: str, value: Any) -> Array | None:
    """Converts a setting to an array, or to None if it is a number with the default value.

    `check(name, number)` checks a number. The numbers of an array are checked by `IS_IN_RANGE`.
    """
    if not isinstance(value, numbers.Real | np.floating):
        return arguments.as_floats(name, value)
    number = check(name, value)
    if number == getattr(DEFAULT_SETTINGS, name):
        return None
    # `device_put` is called because users may forbid jax to move numbers to a device by itself.
    return jax.device_put(number)


def as_labels(name: str, labels: ArrayLike) -> Array:
    """Converts labels to int32. The error for floats tells how to make ids of one-hot labels."""
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

# For each argument of a loss, a function of the argument's name and value that checks the value and
# converts it to an array.
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

# Arguments that may be None. For all others, the converter raises an error.
OPTIONAL = ("mask", "weights", "segment_ids")
# Arguments that broadcast to the tokens. All others broadcast to the labels, which have one axis
# more if they are candidates.
TOKEN_ARGUMENTS = ("weights", "segment_ids", *TokenSettings._fields)


def compute(loss: Loss, layers: tuple[Pair, ...], **token_arguments: ArrayLike | None) -> Any:
    """Computes a loss from a user's arguments: checks and converts them, then runs `_compute`.

    Labels have shape [*tokens], or [*tokens, k] for k candidate labels of each token. Here, every
    array of a token gets the label axis: a last axis of size 1, or of size k for labels.

    Args:
        loss: The loss and its static options, such as the shift.
        layers: An x and an output layer, once, or for a student and a teacher.
        token_arguments: The arguments of the public function that have a value for each token or
            each label, by their names.
    """
    arrays = {}
    for name, argument in token_arguments.items():
        is_left_out = argument is None and name in OPTIONAL
        if not is_left_out:
            # The argument as an array, checked.
            arrays[name] = CONVERTERS[name](name, argument)
    token_shape = layers[0].x.shape[:-1]
    label_shape = _checked_label_shape(loss, token_shape, arrays.get("labels"))
    if not loss.shift:
        why = "shift is 0 (TokenPositions takes them for positions and masks)"
        arguments.check_left_out("segment_ids", arrays.get("segment_ids"), why)
    # A function from the name of an argument to the argument's array, with an axis of labels at the
    # end: [..., c] for c labels of a token, or [..., 1]. None if the argument is left out.
    with_label_axis = functools.partial(_with_label_axis, arrays, token_shape, label_shape)
    # The temperature, the label smoothing and the z-loss, None for those that are left out.
    settings = {name: with_label_axis(name) for name in TokenSettings._fields}
    batch = Batch(
        labels=with_label_axis("labels"),
        mask=with_label_axis("mask"),
        weights=with_label_axis("weights"),
        segment_ids=with_label_axis("segment_ids"),
        settings=TokenSettings(**settings),
    )
    return _compute(loss, layers, batch)


def _with_label_axis(
    arrays: dict[str, Array], token_shape: tuple[Any, ...], label_shape: tuple[Any, ...], name: str
) -> Array | None:
    """Returns an argument with axes as in [*tokens, labels of a token], or None if it is left out.

    Raises an error unless the argument broadcasts to the tokens or to the labels. For tokens
    [batch, length]:

        labels              argument                 result
        [batch, length]     labels                   [batch, length, 1]
        [batch, length]     weights [length]         [1, length, 1]
        [batch, length, k]  labels                   [batch, length, k]
        [batch, length, k]  temperature [batch, 1]   [batch, 1, 1]
        [batch, length, k]  mask [k]                 [1, 1, k]

    Args:
        arrays: The converted arguments, by their names.
        token_shape: The shape of the tokens.
        label_shape: The shape of the labels. If the loss has no labels, the shape of the tokens.
        name: The argument.
    """
    array = arrays.get(name)
    if array is None:
        return None
    if name in TOKEN_ARGUMENTS or "labels" not in arrays:
        shape = token_shape
        owner = "the tokens"
    else:
        shape = label_shape
        owner = "the labels"
    with_length = name == "segment_ids"
    arguments.check_broadcasts(name, array.shape, shape, owner, with_length=with_length)
    # Axes of size 1 are added in front until the array has the rank of `shape`. If `shape` is the
    # shape of the tokens, one more axis is added at the end, for the labels of a token.
    axes_in_front = range(len(shape) - array.ndim)
    rank_of_result = len(token_shape) + 1
    axes_at_end = range(len(shape), rank_of_result)
    return jnp.expand_dims(array, (*axes_in_front, *axes_at_end))


def _checked_label_shape(
    loss: Loss, token_shape: tuple[Any, ...], labels: Array | None
) -> tuple[Any, ...]:
    """Returns the shape that labels must have, after a check of the labels and of the tokens.

    This is the shape of the tokens, such as [batch, length]. If each token has k candidate labels,
    it is [batch, length, k]. If there are no labels, only the shape of x is checked.
    """
    if labels is None:
        _check_token_shape("x", token_shape, loss.shift)
        return token_shape
    expected_shape = token_shape
    if loss.of_candidates:
        # The axis after the tokens has the candidates. The labels themselves say how many.
        candidate_count = labels.shape[len(token_shape)]
        expected_shape = (*token_shape, candidate_count)
    if labels.shape != expected_shape:
        want = f"x's shape without its last axis, {expected_shape}"
        looks_one_hot = labels.ndim == len(token_shape) + 1
        if looks_one_hot:
            want += " (labels.argmax(-1) makes ids of one-hot labels)"
        raise arguments.value_error("labels", want, labels.shape)
    _check_token_shape("labels", token_shape, loss.shift)
    return expected_shape


def _check_token_shape(name: str, shape: tuple[Any, ...], shift: int) -> None:
    """Raises an error if a size is not known while tracing, or if no token predicts a label.

    The sizes must be known because they say how many chunks the tokens are cut into.
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
    """Computes the result of a loss from converted arguments.

    With a shift, labels and weights are first moved to the tokens that predict the labels. Then the
    arrays are split over the mesh. If the losses are reduced, `sum_of_losses` runs the loss over
    the chunks of tokens, and otherwise `map_chunks` does, for the loss of each token.
    """
    # True for each token, in an array that is split over the mesh like the tokens.
    is_token = _true_like_tokens(layers[0].x)
    # `token_data` has the labels, the weights and the settings of the tokens that predict.
    # `is_counted` is False at labels that count nothing, such as padding.
    token_data, is_counted = predicted_labels(loss, layers, batch, is_token)
    if loss.reduction == "none":
        return _result_of_each_token(loss, layers, token_data, is_counted, is_token)
    total_weight = jnp.sum(token_data.weights)
    if loss.reduction == "mean":
        # If no label is counted, the weights are divided by 1, because 0 / 0 is NaN.
        divisor = jnp.where(total_weight == 0, 1, total_weight)
        token_data = token_data._replace(weights=token_data.weights / divisor)
    token_data, layer_arrays = _split_over_mesh(layers, token_data, is_counted)
    sums = sum_of_losses(loss, token_data, layer_arrays)
    return loss.returned(sums, total_weight)


def _result_of_each_token(
    loss: Loss,
    layers: tuple[Pair, ...],
    token_data: TokenData,
    is_counted: Bool[Array, "... c"],
    is_token: Bool[Array, "..."],
) -> Any:
    """Computes the result of a loss that is not reduced over the tokens.

    `token_data` and `is_counted` have the labels at the tokens that predict these labels. The
    result has the value of each label at the place of the label. `is_token` is split over the mesh
    like the tokens of x.
    """
    weights = token_data.weights
    token_data, layer_arrays = _split_over_mesh(layers, token_data, is_counted)
    # The losses, then further values such as the entropy, [..., c] each, times the weights.
    values = map_chunks(loss, token_data, layer_arrays)
    # While logits are computed, tokens are not split over the mesh axes of the table. Now the
    # values are split like the tokens of x again.
    values = tuple(split_like(array, is_token) for array in values)
    if loss.shift:
        # The value of token t belongs to the label at `t + shift`. So entry i of the result is the
        # value of token `i - shift`, a previous token.
        move_to_label = along_length(previous_token_values, loss.shift)
        values, weights = jax.tree.map(move_to_label, (values, weights))
    if not loss.of_candidates:
        # Each token has one label, so the last axis, of size 1, is dropped.
        values, weights = jax.tree.map(lambda array: array[..., 0], (values, weights))
    return loss.returned(values, weights)


def _true_like_tokens(x: Float[Array, "... d"]) -> Bool[Array, "..."]:
    """Returns True for each token, in an array that explicit mesh axes split like the tokens of x.

    The array is computed from another one like x, because jax then derives the sharding. The values
    of x are not read.
    """
    return ~jnp.zeros_like(x, bool).any(-1)


def _split_over_mesh(
    layers: tuple[Pair, ...], token_data: TokenData, is_counted: Bool[Array, "... c"]
) -> tuple[TokenData, Layers]:
    """Splits the arrays of tokens and of layers over the mesh, as `OutputSplit` describes.

    Raises an error if the student and the teacher would be split in different ways.
    """
    all_layer_arrays = []
    for pair in layers:
        # A token that predicts nothing gets an x of 0, so that a NaN in its x has no effect.
        used_x = _without_unused(token_data.weights, is_counted, pair.x)
        all_layer_arrays.append(split_output(used_x, pair.output))
    first_split = all_layer_arrays[0].split
    for teacher_arrays in all_layer_arrays[1:]:
        teacher_split = teacher_arrays.split
        table_axes = first_split.vocabulary_mesh_axes
        want = "a table split over the same mesh axes as the table of output"
        teacher_table_axes = teacher_split.vocabulary_mesh_axes
        arguments.check_same("teacher_output", want, teacher_table_axes, table_axes)
        want = "tokens split as x's"
        arguments.check_same("teacher_x", want, teacher_split.token_axes, first_split.token_axes)
    # The arrays of tokens are split like x [..., d]. No mesh axis splits the channels d, so the
    # spec of x has mesh axes only for the dimensions of the tokens, and fits arrays [..., c], too.
    token_sharding = NamedSharding(first_split.mesh, first_split.specs().x)
    token_data = jax.tree.map(lambda array: reshard(array, token_sharding), token_data)
    return token_data, tuple(all_layer_arrays)


def _without_unused(
    weights: Float[Array, "... c"], is_counted: Bool[Array, "... c"], x: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """Replaces x by 0 at tokens where x must not have an effect.

    - If no label of a token is counted, x is replaced.
    - If all counted labels of a token have a weight of 0, x is replaced if it is infinite or NaN.
    """
    is_finite = jnp.isfinite(x).all(-1, keepdims=True)
    is_label_used = (weights != 0) | (is_counted & is_finite)
    is_token_used = is_label_used.any(-1, keepdims=True)
    return jnp.where(is_token_used, x, 0)
