"""Finds which label each token predicts, and which labels are counted.

Shapes are written with one letter: c is 1, or the number of candidate labels of a token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from transformer_embed._src import conversions
from transformer_embed._src.compiled import nan_where
from transformer_embed._src.partitioning import split_like
from transformer_embed._src.sequences.runs import has_next_token, next_token_values
from transformer_embed._src.tokens.loss_arithmetic import Loss
from transformer_embed._src.tokens.output_layer import OutputLayer, Pair
from transformer_embed._src.tokens.token_data import DEFAULT_SETTINGS, TokenData, TokenSettings

# The logit of padding is about the lowest float32 number. Divided by a larger temperature, it would
# be so near to 0 that padding had a probability above 0.
HIGHEST_TEMPERATURE = 1e36
# For each setting, a function that says which numbers of an array are in range.
IS_IN_RANGE: dict[str, Callable] = {
    "temperature": lambda numbers: (numbers > 0) & (numbers <= HIGHEST_TEMPERATURE),
    "label_smoothing": lambda numbers: (numbers >= 0) & (numbers < 1),
    "z_loss": lambda numbers: numbers >= 0,
}


class Batch(NamedTuple):
    """Holds the user's arrays of a batch, [..., 1] or [..., c], that broadcast to [..., c]."""

    labels: Any = None
    mask: Any = None
    weights: Any = None
    segment_ids: Any = None
    settings: TokenSettings = TokenSettings()


def predicted_labels(
    loss: Loss, layers: tuple[Pair, ...], batch: Batch, is_token: Bool[Array, "..."]
) -> tuple[TokenData, Bool[Array, "... c"]]:
    """Finds what each token predicts, and which labels are counted.

    With a shift, the label of token t is `labels[..., t + shift]`, and the mask, weight and
    settings belong to this label too.

    Args:
        loss: The loss, which has the shift.
        layers: An x and an output layer, once, or for a student and a teacher.
        batch: The user's arrays, before the shift.
        is_token: True for each token, split over the mesh like the tokens of x.

    Returns:
        The arrays that belong to the predicting tokens, and which of their labels are counted.
    """
    output = layers[0].output
    dtype = _dtype_of_sums(layers)
    # The arrays of the batch are split over explicit mesh axes as `is_token` is.
    batch = jax.tree.map(lambda array: split_like(array, is_token), batch)
    is_counted = is_token[..., None]
    # The mask, the weights and the settings get the shape of the tokens, so that they can be
    # shifted.
    batch = _broadcast_to_tokens(batch, is_counted, dtype)
    if loss.shift:
        # False at tokens that predict no label of their document.
        is_counted = _without_last_tokens(loss, batch, output, is_counted)
        # The segment ids are not needed any more.
        batch = batch._replace(segment_ids=None)
        # Token t predicts the label at `t + shift`. So entry t of each array becomes the old entry
        # `t + shift`.
        take_next = along_length(next_token_values, loss.shift)
        batch = jax.tree.map(take_next, batch)
    if batch.labels is not None and output.pad_id is not None:
        is_counted &= batch.labels != output.pad_id
    if batch.mask is not None:
        is_counted &= batch.mask
    return _token_data(batch, is_counted, dtype), is_counted


def _dtype_of_sums(layers: tuple[Pair, ...]) -> Any:
    """Returns the dtype of weights and sums: float64 if an x or a table has it, else float32."""
    dtypes = []
    for pair in layers:
        dtypes += [pair.x.dtype, pair.output.table.dtype]
    return conversions.compute_dtype(*dtypes)


def _token_data(batch: Batch, is_counted: Bool[Array, "... c"], dtype: Any) -> TokenData:
    """Makes the arrays of the predicting tokens from a batch that is shifted already.

    A label that is not counted becomes -1 and gets a weight of 0. The settings are the temperature,
    the label smoothing and the z-loss of each token. If no label of a token is counted, they become
    the defaults. `dtype` is the dtype of the weights.
    """
    weights = batch.weights
    if weights is None:
        weights = jnp.ones((), dtype)
    weights = jnp.where(is_counted, weights, 0)
    labels = batch.labels
    if labels is not None:
        # No table row has the id -1, so the loss of the label -1 is finite, without a logit of the
        # label. Such a logit could be infinite, and its gradient NaN.
        labels = jnp.where(is_counted, labels, -1)
    valid_settings = {}
    for name, setting in batch.settings._asdict().items():
        valid_settings[name] = _valid_setting(name, setting, is_counted, weights)
    return TokenData(labels=labels, settings=TokenSettings(**valid_settings), weights=weights)


def _broadcast_to_tokens(batch: Batch, is_token: Bool[Array, "... 1"], dtype: Any) -> Batch:
    """Broadcasts the mask, the weights and the settings to all tokens, so that they can be shifted.

    Weights and settings are converted to `dtype`, the dtype of sums, before they are broadcast. So
    the gradient of a setting, which is a sum over tokens, is computed in that dtype.
    """
    zeros = jnp.zeros_like(is_token, dtype)

    def broadcast_floats(array: Array) -> Array:
        return array.astype(dtype) + zeros

    weights, settings = jax.tree.map(broadcast_floats, (batch.weights, batch.settings))
    mask = batch.mask
    if mask is not None:
        mask &= is_token
    return batch._replace(mask=mask, weights=weights, settings=settings)


def _without_last_tokens(
    loss: Loss, batch: Batch, output: OutputLayer, is_counted: Bool[Array, "... 1"]
) -> Bool[Array, "... c"]:
    """Returns `is_counted`, but False at padding and at the last tokens of each document.

    With a shift of k, the last k tokens of a document predict no label of the document. The labels
    of `batch` are not shifted yet, so the label of a token is the token's own id, and shows whether
    the token is padding. But if each token has several candidate labels, these are not ids of the
    text, so they do not show which tokens are padding.
    """
    segment_ids = batch.segment_ids
    if segment_ids is None:
        segment_ids = jnp.ones_like(is_counted, jnp.int32)
    # True if the token that is `shift` tokens ahead has the same segment id. `has_next_token` takes
    # arrays [..., length], and `along_length` makes it take arrays [..., length, 1].
    has_label_in_document = along_length(has_next_token, loss.shift)
    is_counted &= has_label_in_document(segment_ids)
    if batch.labels is not None and not loss.of_candidates:
        is_counted &= ~_is_padding(batch.labels, output)
    return is_counted


def _is_padding(labels: Array, output: OutputLayer) -> Array:
    """Returns which tokens are padding, for labels that are the tokens' own ids.

    A `pad_id` outside the vocabulary only marks labels, so no token is padding then.
    """
    return (labels == output.pad_id) & (labels.astype(jnp.uint32) < output.size)


def _valid_setting(
    name: str, setting: Array | None, is_counted: Array, weights: Array
) -> Array | None:
    """Replaces the numbers of a setting that are out of range, or that no label needs.

    A setting, such as the temperature, has one number for each token. A label that is not counted
    has a weight of 0.

    - If no label of the token is counted, the number becomes the default.
    - If the number is out of range and a label has a weight other than 0, the number becomes NaN.
      (An array may be known only when the program runs, so no error can be raised.)
    - If the number is out of range and all weights are 0, the number becomes the default.
    """
    if setting is None:
        return None
    is_used = (weights != 0).any(-1, keepdims=True)
    has_counted_label = is_counted.any(-1, keepdims=True)
    is_in_range = IS_IN_RANGE[name]
    is_valid = has_counted_label & is_in_range(setting)
    # A label with a weight other than 0 is counted, so `is_used` implies `has_counted_label`. So if
    # the number is used and not valid, it is out of range.
    becomes_nan = ~is_valid & is_used
    default = getattr(DEFAULT_SETTINGS, name)
    return nan_where(becomes_nan, jnp.where(is_valid, setting, default))


def along_length(function: Callable, steps: int) -> Callable:
    """Makes a function of arrays [..., length, c] from a function of arrays [..., length].

    Args:
        function: Looks some tokens ahead or back along the last axis, such as `next_token_values`.
        steps: How many tokens ahead, or back.
    """

    def call_with_length_last(array: Array) -> Array:
        length_last = array.swapaxes(-1, -2)
        result = function(length_last, steps)
        return result.swapaxes(-1, -2)

    return call_with_length_last
