"""Records of what belongs to tokens, and the weights of their losses."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src.compiled import nan_where
from transformer_embed._src.tokens.output_split import OutputSplit


class Settings(NamedTuple):
    """Holds settings of a loss that have gradients: a number [..., 1] for each token.

    A setting of None has its default value.
    """

    temperature: Any = None
    label_smoothing: Any = None
    z_loss: Any = None


DEFAULTS = Settings(temperature=1.0, label_smoothing=0.0, z_loss=0.0)


class TokenData(NamedTuple):
    """Holds arrays that belong to tokens.

    Args:
        labels: int32 [..., c]. None for a loss without labels.
        settings: The settings of each token.
        weights: [..., c], 0 where a label is not counted. For a mean, each weight is divided by the
            sum of all weights.
    """

    labels: Any
    settings: Settings
    weights: Any


# The data of a place without a token. The settings are the defaults, because a temperature of 0
# would be a factor of infinity. Even with a weight of 0, that would be NaN in the gradient of the
# whole table.
NO_TOKEN = TokenData(labels=-1, settings=DEFAULTS, weights=0.0)


def weighted(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiplies losses by weights.

    The product is 0 where a weight is 0, also if the loss is infinite or NaN.
    """
    return finite_if_unused(losses, weights) * weights


def finite_if_unused(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Array:
    """Sets to 0 the losses that are infinite or NaN and have no weight."""
    is_unused = weights == 0
    return jnp.where(is_unused & ~jnp.isfinite(losses), 0, losses)


def weights_or_nan(split: OutputSplit, token_data: TokenData) -> Float[Array, "..."]:
    """Returns the weights, with NaN where a counted label is outside the vocabulary.

    NaN as a weight makes the loss and all gradients NaN.
    """
    labels = token_data.labels
    weights = token_data.weights
    if labels is None:
        return weights
    # As uint32, a negative label is above the vocabulary.
    is_outside = jnp.asarray(labels).astype(jnp.uint32) >= split.vocab_size
    return nan_where(is_outside & (weights != 0), weights)
