"""Defines the arithmetic of a loss for a chunk of tokens, a part of the batch.

A `Loss` computes, from the logits of a chunk, values of the tokens and the gradients of these
values. Two engines run it over all chunks: `loss_sums.py` for one sum over all tokens, and
`loss_values.py` for the values of each token.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidate labels

A vocabulary id is banned if the bias of the table row is -inf. Such an id is never predicted.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from transformer_embed._src import arguments, conversions
from transformer_embed._src.tokens.output_split import LayerArrays, Layers, OutputSplit
from transformer_embed._src.tokens.row_logits import ChunkLogits, chunk_logits, values_in_columns
from transformer_embed._src.tokens.token_data import TokenData, TokenSettings

REDUCTIONS = ("mean", "sum", "none")


class TokenValues(NamedTuple):
    """Holds values [t, c] of the tokens of a chunk, such as losses, with the gradients.

    For a layer with logits z [t, v], the gradient of the values of token i is

        d values[i, j] / d z[i] = undivided_gradients[i] / gradient_divisor[i]

    If `subtracted_columns` are given, the gradient is 1 less in the column
    `subtracted_columns[i, j]`. The gradients are not divided here, because a division would be one
    more pass over the logits. The users of `TokenValues` divide a number of each token instead.
    Gradients are finite even where a value is infinite, so a weight of 0 makes them 0.

    Args:
        values: The values, [t, c].
        undivided_gradients: One array [t, v] for each layer. The c values of a token share a row of
            the array. The tuple is empty if the values have no gradients.
        gradient_divisor: A number, or [t, 1].
        subtracted_columns: The column of each label, [t, c], which is out of range if another
            device holds it. Only values of a single layer may have columns. If None, nothing is
            subtracted.
        setting_gradients: The gradients with respect to the settings, which are the temperature,
            the label smoothing and the z-loss, [t, c]. `values_and_logits` adds the gradient with
            respect to the temperature.
    """

    values: Array
    undivided_gradients: tuple[Array, ...] = ()
    gradient_divisor: float | Array = 1.0
    subtracted_columns: Array | None = None
    setting_gradients: TokenSettings = TokenSettings()


def as_steps(name: str, shift: Any) -> int:
    """Converts a shift to a number of tokens. True becomes 1."""
    steps = int(shift) if isinstance(shift, bool | np.bool_) else shift
    return arguments.integer(name, steps, at_least=0)


@dataclasses.dataclass(frozen=True)
class Loss:
    """Holds the static settings of a loss, and its arithmetic for a chunk of tokens.

    A loss with gradients defines `values_from_logits`, and a loss without gradients defines
    `values_of_chunk`.

    Args:
        shift: How far ahead each token predicts, in tokens.
        chunk_size: The largest number of tokens in a chunk. If None, `number_of_chunks` chooses.
        reduction: How the losses of tokens are reduced.
        of_candidates: Whether a token has several labels or values, on an additional axis.
    """

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
        labels: Any,
        settings: TokenSettings,
    ) -> tuple[TokenValues, ...]:
        """Computes values of the tokens of a chunk. The first of them are the losses.

        Args:
            split: How the first layer is split over devices.
            logits: The logits of each layer.
            labels: The labels of the tokens, int32 [t, c]. None for a loss without labels.
            settings: The settings of the chunk's tokens.
        """
        raise NotImplementedError

    def values_of_chunk(self, token_data: TokenData, layers: Layers) -> tuple[Array, ...]:
        """Computes the values of a chunk, for a loss without gradients."""
        raise NotImplementedError

    def returned(self, values: tuple[Array, ...], weights: Array) -> Any:
        """Returns the result of the public function.

        `values` and `weights` are sums over the tokens, or arrays if nothing is reduced.
        """
        has_one_value = len(values) == 1
        return values[0] if has_one_value else values


def values_and_logits(
    loss: Loss, labels: Any, settings: TokenSettings, layers: Layers
) -> tuple[tuple[TokenValues, ...], tuple[ChunkLogits, ...]]:
    """Computes the values of a chunk, with all gradients, and the logits of each layer.

    `loss.values_from_logits` returns all gradients but one. The gradient with respect to the
    temperature is added here, because it is the same formula for all losses.
    """
    split = layers[0].split
    temperature = settings.temperature
    logits = tuple(chunk_logits(layer, temperature) for layer in layers)
    values = loss.values_from_logits(split, logits, labels, settings)
    if temperature is None:
        return values, logits
    # The logits are z = y / T, for a temperature T and logits y that do not depend on T. So the
    # derivative of a logit z with respect to T is -z / T. By the chain rule, the derivative of a
    # value is the sum of `gradient * z` over the vocabulary, divided by -T.

    # The sum is computed with relative logits, z - m, in place of z. Here m is the largest logit of
    # the token. In each loss that has a temperature, the gradients of a token sum to 0. So the sum
    # of `gradient * m` is 0, and both sums are the same. At a banned id, the relative logit is -inf
    # and the gradient is 0. Their product would be NaN, so 0 replaces -inf.
    finite_logits = []
    for chunk in logits:
        is_banned = jnp.isneginf(chunk.relative_logits)
        finite_logits.append(jnp.where(is_banned, 0, chunk.relative_logits))
    complete_values = []
    for token_values in values:
        # The sum of `gradient * z` over the vocabulary.
        sum_of_products = directional_derivative(split, token_values, directions=finite_logits)
        temperature_gradient = sum_of_products / -temperature
        setting_gradients = token_values.setting_gradients._replace(
            temperature=temperature_gradient
        )
        complete_values.append(token_values._replace(setting_gradients=setting_gradients))
    return tuple(complete_values), logits


def directional_derivative(
    split: OutputSplit, token_values: TokenValues, directions: Sequence[Array]
) -> Float[Array, "t c"]:
    """Sums `gradient * direction` of each token over the vocabulary and over the layers.

    The gradients are the derivatives of a value with respect to the logits, as `TokenValues`
    describes them. So the result says how fast the value changes if the logits change in this
    direction.

    Args:
        split: How the first layer is split over devices.
        token_values: The values, and their gradients.
        directions: The direction of the logits of each layer, [t, v].
    """
    total = jnp.zeros_like(token_values.values)
    if not token_values.undivided_gradients:
        return total
    for gradients, direction in zip(token_values.undivided_gradients, directions, strict=True):
        products = gradients * direction
        # The stored gradients are divided by `gradient_divisor` only now, after the sum.
        total += split.sum_over_vocabulary(products) / token_values.gradient_divisor
    if token_values.subtracted_columns is not None:
        # Some losses, such as `LogProbs` with candidates, leave out a -1 in the column of each
        # label when they store the gradients. The -1 times the direction is added here, so the
        # direction in these columns is subtracted. These losses have one layer.
        (direction,) = directions
        subtracted = values_in_columns(token_values.subtracted_columns, direction)
        total -= jax.lax.psum(subtracted, split.vocabulary_mesh_axes)
    return total


def gradient_dtype(layer: LayerArrays) -> Any:
    """Returns the dtype in which gradients of logits are multiplied with x and the table.

    The dtype is bfloat16 if x and the table are both in bfloat16, and otherwise float32 or float64.
    In float16, small gradients would become 0.
    """
    x_dtype = layer.x.dtype
    table_dtype = layer.table.dtype
    if x_dtype == jnp.bfloat16 and table_dtype == jnp.bfloat16:
        return jnp.dtype(jnp.bfloat16)
    return conversions.compute_dtype(x_dtype, table_dtype)


def add_products(
    total: Array, gradients: Any, tangents: Any, reduce: Callable | None = None
) -> Array:
    """Adds the product of each gradient with its tangent to a total.

    Args:
        total: The array that the products are added to.
        gradients: A tree of arrays, with None where an array has no gradient.
        tangents: A tree with as many leaves, with None or `SymbolicZero` where there is no tangent.
        reduce: A function of a product, such as `jnp.sum`, whose result is added in place of the
            product. If None, the product itself is added.
    """

    def leaves(tree):
        return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)

    for gradient, tangent in zip(leaves(gradients), leaves(tangents), strict=True):
        has_tangent = not isinstance(tangent, SymbolicZero | None)
        if gradient is not None and has_tangent:
            product = gradient * tangent.astype(gradient.dtype)
            total += product if reduce is None else reduce(product)
    return total
