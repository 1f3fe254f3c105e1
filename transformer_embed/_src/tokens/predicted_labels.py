"""Finds which label each token predicts, and which labels are counted.

Shapes are written with one letter: c is 1, or the number of candidates of a token.
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
from transformer_embed._src.tokens.token_data import DEFAULTS, Settings, TokenData

# At a larger temperature, the lowest float32 number, which is the logit of padding, would keep a
# probability above 0.
HIGHEST_TEMPERATURE = 1e36
# Whether each number of a setting is in range. An array may be known only when the program runs, so
# numbers that are out of range become NaN.
IS_IN_RANGE: dict[str, Callable] = {
    "temperature": lambda value: (value > 0) & (value <= HIGHEST_TEMPERATURE),
    "label_smoothing": lambda value: (value >= 0) & (value < 1),
    "z_loss": lambda value: value >= 0,
}


class Batch(NamedTuple):
    """Holds arrays of a batch, [..., 1] or [..., c], that broadcast to the labels [..., c]."""

    labels: Any = None
    mask: Any = None
    weights: Any = None
    segment_ids: Any = None
    settings: Settings = Settings()


def predicted_labels(
    loss: Loss, layers: tuple[Pair, ...], batch: Batch, is_token: Bool[Array, "..."]
) -> tuple[TokenData, Bool[Array, "... c"]]:
    """Finds what each token predicts, and which labels are counted."""
    output = layers[0].output
    dtypes = [array.dtype for pair in layers for array in (pair.x, pair.output.table)]
    dtype = conversions.compute_dtype(*dtypes)
    batch = jax.tree.map(lambda array: split_like(array, is_token), batch)
    is_counted = is_token[..., None]
    batch = _broadcast_to_tokens(batch, is_counted, dtype)
    if loss.shift:
        is_counted = _without_last_tokens(loss, batch, output, is_counted)
        # A value moves from the label to the token that predicts the label.
        shift = along_length(next_token_values, loss.shift)
        batch = jax.tree.map(shift, batch._replace(segment_ids=None))
    labels = batch.labels
    if labels is not None and output.pad_id is not None:
        is_counted &= labels != output.pad_id
    if batch.mask is not None:
        is_counted &= batch.mask
    weights = jnp.ones((), dtype) if batch.weights is None else batch.weights
    weights = jnp.where(is_counted, weights, 0)
    # No row has an id of -1. So a label that is not counted has a finite loss, and the gradient of
    # an infinite logit is not taken.
    labels = None if labels is None else jnp.where(is_counted, labels, -1)
    valid_settings = {
        name: _valid_setting(name, setting, is_counted, weights)
        for name, setting in batch.settings._asdict().items()
    }
    token_data = TokenData(labels=labels, settings=Settings(**valid_settings), weights=weights)
    return token_data, is_counted


def _broadcast_to_tokens(batch: Batch, is_token: Bool[Array, "... 1"], dtype: Any) -> Batch:
    """Gives the mask, the weights and the settings a value for each token, as a shift needs.

    Numbers are converted to the dtype of sums before they are broadcast. So their gradients, which
    are sums over tokens, are computed in that dtype.
    """
    zeros = jnp.zeros_like(is_token, dtype)
    weights, settings = jax.tree.map(
        lambda array: array.astype(dtype) + zeros, (batch.weights, batch.settings)
    )
    mask = None if batch.mask is None else batch.mask & is_token
    return batch._replace(mask=mask, weights=weights, settings=settings)


def _without_last_tokens(
    loss: Loss, batch: Batch, output: OutputLayer, is_counted: Bool[Array, "... 1"]
) -> Bool[Array, "... c"]:
    """Leaves out the tokens that predict no label of their own document, and padding.

    Candidates are not the text itself, so they do not say which tokens are padding.
    """
    segment_ids = batch.segment_ids
    if segment_ids is None:
        segment_ids = jnp.ones_like(is_counted, jnp.int32)
    is_counted &= along_length(has_next_token, loss.shift)(segment_ids)
    if batch.labels is not None and not loss.of_candidates:
        is_counted &= ~_is_padding(batch.labels, output)
    return is_counted


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


def along_length(function: Callable, steps: int) -> Callable:
    """Makes a function that shifts values [..., length, c] by some steps along the length.

    Args:
        function: A function of [..., length] and the steps, such as `next_token_values`.
        steps: How many tokens ahead, or back.
    """
    return lambda array: function(array.swapaxes(-1, -2), steps).swapaxes(-1, -2)
