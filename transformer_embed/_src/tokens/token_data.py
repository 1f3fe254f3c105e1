"""Holds the arrays of tokens that a loss needs: labels, settings and weights.

Shapes are written with one letter: c is 1, or the number of candidate labels of a token.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from transformer_embed._src.compiled import nan_where


class TokenSettings(NamedTuple):
    """Holds the settings of a loss that have gradients: for each, one number per token, [..., 1].

    None stands for the default value, so that a loss can leave out the arithmetic.
    """

    temperature: Any = None
    label_smoothing: Any = None
    z_loss: Any = None


DEFAULT_SETTINGS = TokenSettings(temperature=1.0, label_smoothing=0.0, z_loss=0.0)


class TokenData(NamedTuple):
    """Holds the labels, the settings and the weights of tokens.

    Args:
        labels: The ids that each token predicts, int32 [..., c]. None for a loss without labels.
        settings: The settings of each token.
        weights: The factor of the loss of each label, [..., c], 0 where a label is not counted. For
            a mean over tokens, each weight is already divided by the sum of all weights.
    """

    labels: Any
    settings: TokenSettings
    weights: Any


# What fills a place without a token. The weight is 0, so the place adds nothing to a loss. The
# settings are the defaults, because a temperature of 0 would make infinite logits, which would be
# NaN in the gradient of the whole table in spite of the weight 0.
NO_TOKEN = TokenData(labels=-1, settings=DEFAULT_SETTINGS, weights=0.0)


def weighted(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiplies losses by weights. A weight of 0 gives 0, even if the loss is infinite or NaN."""
    return finite_if_unused(losses, weights) * weights


def finite_if_unused(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Array:
    """Returns the losses, with 0 where a loss is infinite or NaN and the weight is 0."""
    is_unused = weights == 0
    return jnp.where(is_unused & ~jnp.isfinite(losses), 0, losses)


def nan_at_wrong_labels(
    weights: Float[Array, "..."], labels: Int32[Array, "..."] | None, vocab_size: Any
) -> Float[Array, "..."]:
    """Returns the weights of labels, with NaN where a label is outside the vocabulary.

    NaN as a weight makes the loss and all gradients NaN, so the user notices the wrong label. A
    weight of 0 stays, because the label is not counted. If `labels` is None, all weights stay.
    """
    if labels is None:
        return weights
    # As uint32, a negative label is a large number, so one comparison finds it too.
    is_outside = jnp.asarray(labels).astype(jnp.uint32) >= vocab_size
    return nan_where(is_outside & (weights != 0), weights)
