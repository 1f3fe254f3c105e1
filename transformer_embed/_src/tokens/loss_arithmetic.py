"""The arithmetic of a loss for one chunk of tokens.

A `Loss` computes, from the logits of a chunk, values of the tokens and the gradients of these
values. Two engines run it over all chunks: `loss_sums.py` for one sum over all tokens, and
`loss_values.py` for the values of each token.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidates

A vocabulary id is banned if the bias of the table row is -inf: the id is never predicted.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments, conversions
from transformer_embed._src.tokens.output_split import LayerArrays, Layers, OutputSplit
from transformer_embed._src.tokens.row_logits import ChunkLogits, chunk_logits, values_in_columns
from transformer_embed._src.tokens.token_data import Settings, TokenData

REDUCTIONS = ("mean", "sum", "none")


class TokenValues(NamedTuple):
    """Holds values [t, c] of the tokens of a chunk, such as losses, and their gradients.

    For a layer with logits z [t, v], the gradient of the values of token i is

        d values[i, j] / d z[i] = scaled_gradients[i] / gradient_scale[i]

    and 1 less in the column `subtracted_columns[i, j]`, if columns are given. The division is not
    done for each logit, because it would be one more pass over the logits. Gradients are finite
    where a value is infinite, so they vanish if the token has the weight 0.

    Args:
        values: [t, c].
        scaled_gradients: An array [t, v] for each layer. All c values of a token share one row.
            Empty, if the values have no gradients.
        gradient_scale: A number, or [t, 1].
        subtracted_columns: The column of each label, [t, c], which is out of range if another
            device holds it. Only values of a single layer have columns. If None, the
            `scaled_gradients` are whole.
        setting_gradients: The gradients with respect to the settings, [t, c]. The gradient with
            respect to the temperature may be left out, because it follows from the others.
    """

    values: Array
    scaled_gradients: tuple[Array, ...] = ()
    gradient_scale: float | Array = 1.0
    subtracted_columns: Array | None = None
    setting_gradients: Settings = Settings()


def as_steps(name: str, shift: Any) -> int:
    """Converts a shift to a number of tokens. True is 1."""
    steps = int(shift) if isinstance(shift, bool | np.bool_) else shift
    return arguments.integer(name, steps, at_least=0)


@dataclasses.dataclass(frozen=True)
class Loss:
    """Holds the static settings of a loss, and its arithmetic for a chunk of tokens.

    Args:
        shift: How far ahead each token predicts, in tokens.
        chunk_size: The largest number of tokens in a chunk. If None, it is chosen.
        reduction: How the losses of tokens are reduced.
        of_candidates: Whether a token has several labels or values, on an additional axis.
    """

    # If True, `loss_values.py` computes the values by `values_from_logits`, and their gradients. If
    # False, it computes them by `values_of_chunk`.
    has_gradients: ClassVar[bool] = True

    shift: int = 0
    chunk_size: int | None = None
    reduction: str = "none"
    of_candidates: bool = False

    def __post_init__(self):
        arguments.convert_fields(
            self,
            shift=as_steps,
            chunk_size=arguments.size,
            reduction=functools.partial(arguments.choice, choices=REDUCTIONS),
        )

    def values_from_logits(
        self,
        split: OutputSplit,
        logits: tuple[ChunkLogits, ...],
        labels: Int32[Array, "t c"] | None,
        settings: Settings,
    ) -> tuple[TokenValues, ...]:
        """Computes the losses of a chunk on a device, and further values.

        Args:
            split: How the first layer is split.
            logits: The logits of each layer.
            labels: The labels of the chunk's tokens.
            settings: The settings of the chunk's tokens.
        """
        raise NotImplementedError

    def values_of_chunk(self, token_data: TokenData, layers: Layers) -> tuple[Array, ...]:
        """Computes the values of a chunk, for a loss without gradients."""
        raise NotImplementedError

    def returned(self, values: tuple[Array, ...], weights: Array) -> Any:
        """Makes the result of the public function from the reduced values and the weights."""
        first, *others = values
        return values if others else first


def values_and_logits(
    loss: Loss, labels: Any, settings: Settings, layers: Layers
) -> tuple[tuple[TokenValues, ...], tuple[ChunkLogits, ...]]:
    """Computes the values of a chunk, and the logits of each layer."""
    split = layers[0].split
    temperature = settings.temperature
    logits = tuple(chunk_logits(layer, temperature) for layer in layers)
    values = loss.values_from_logits(split, logits, labels, settings)
    if temperature is None:
        return values, logits
    # The logits are divided by the temperature, so a derivative with respect to the temperature is
    # the derivative in the direction of the logits, divided by -temperature. The shifted logits
    # take the place of the logits here: this is right because a common shift of a token's logits
    # changes no value. The logit of a banned id counts as 0, because 0 times infinity would be NaN.
    finite_shifted_logits = [
        jnp.where(jnp.isneginf(chunk.shifted), 0, chunk.shifted) for chunk in logits
    ]

    def with_temperature(value: TokenValues) -> TokenValues:
        """Adds the gradient with respect to the temperature."""
        along_logits = directional_derivative(split, value, finite_shifted_logits)
        gradients = value.setting_gradients._replace(temperature=along_logits / -temperature)
        return value._replace(setting_gradients=gradients)

    return tuple(map(with_temperature, values)), logits


def directional_derivative(
    split: OutputSplit, value: TokenValues, directions: Sequence[Array]
) -> Float[Array, "t c"]:
    """Computes how fast the values of a chunk change if the logits move in a direction.

    This is the sum over layers and columns of `gradient * direction`, with the gradients that
    `TokenValues` describes. `directions` has an array [t, v] for each layer.
    """
    total = jnp.zeros_like(value.values)
    # Values without gradients have no scaled_gradients, so their derivative stays 0.
    for gradients, direction in zip(value.scaled_gradients, directions, strict=False):
        total += split.sum_over_vocabulary(gradients * direction) / value.gradient_scale
    if value.subtracted_columns is not None:
        # The gradient is 1 less in these columns. Such values have one layer, so one direction.
        subtracted = values_in_columns(value.subtracted_columns, directions[0])
        total -= jax.lax.psum(subtracted, split.vocabulary)
    return total


def gradient_dtype(layer: LayerArrays) -> Any:
    """Returns the dtype in which gradients of logits are multiplied.

    It is bfloat16 if x and the table are both in bfloat16. Float16 would lose small gradients.
    """
    dtypes = layer.x.dtype, layer.table.dtype
    is_bfloat16 = all(dtype == jnp.bfloat16 for dtype in dtypes)
    return jnp.dtype(jnp.bfloat16) if is_bfloat16 else conversions.compute_dtype(*dtypes)


def add_products(
    total: Array, gradients: Any, tangents: Any, reduce: Callable | None = None
) -> Array:
    """Adds the products of gradients and tangents, leaf by leaf.

    Args:
        total: The array that the products are added to.
        gradients: A tree of arrays, or None where an array has no gradient.
        tangents: A tree with as many leaves, or None or `SymbolicZero` where there is no tangent.
        reduce: A function of each product, whose result is added. If None, the product is added.
    """

    def leaves(tree):
        return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)

    for gradient, tangent in zip(leaves(gradients), leaves(tangents), strict=True):
        has_tangent = not isinstance(tangent, SymbolicZero | None)
        if gradient is not None and has_tangent:
            product = gradient * tangent.astype(gradient.dtype)
            total += product if reduce is None else reduce(product)
    return total
