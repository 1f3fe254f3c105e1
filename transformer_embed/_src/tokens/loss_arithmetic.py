"""The arithmetic of a loss for one chunk of tokens.

A `Loss` computes, from the logits of a chunk, values of the tokens and the gradients of these
values. Two engines run it over all chunks: `loss_sums.py` for one sum over all tokens, and
`loss_values.py` for the values of each token.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidates
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

from transformer_embed._src import arguments
from transformer_embed._src.tokens.output_split import LayerArrays, Layers, OutputSplit
from transformer_embed._src.tokens.row_logits import ChunkLogits, chunk_logits, values_in_columns
from transformer_embed._src.tokens.token_data import Settings, TokenData

REDUCTIONS = ("mean", "sum", "none")


class Value(NamedTuple):
    """Values [t, c] of the tokens of a chunk, such as losses, and the gradients of these values.

    Gradients are finite where a value is infinite, so a weight of 0 leaves nothing of them.

    Args:
        values: [t, c].
        slopes: For each layer, the gradient with respect to the logits, times the mass, [t, v]. All
            c values of a token share it. Empty, if the values have no gradients.
        mass: What the slopes are to be divided by, [t, 1].
        columns: The column of a logit that is subtracted from each value, [t, c]. None, if the
            slopes contain the gradient of that logit.
        setting_slopes: The gradients with respect to the settings, [t, c]. The gradient with
            respect to the temperature may be left out, because it follows from the slopes.
    """

    values: Array
    slopes: tuple[Array, ...] = ()
    mass: float | Array = 1.0
    columns: Array | None = None
    setting_slopes: Settings = Settings()


def as_steps(name: str, shift: Any) -> int:
    """Converts a shift to a number of tokens. True is 1."""
    steps = int(shift) if isinstance(shift, bool | np.bool_) else shift
    return arguments.integer(name, steps, at_least=0)


@dataclasses.dataclass(frozen=True)
class Loss:
    """Static settings of a loss, and the arithmetic for a chunk of tokens.

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
    ) -> tuple[Value, ...]:
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
) -> tuple[tuple[Value, ...], tuple[ChunkLogits, ...]]:
    """Computes the values of a chunk, and the logits of each layer."""
    split = layers[0].split
    temperature = settings.temperature
    logits = tuple(chunk_logits(layer, temperature) for layer in layers)
    values = loss.values_from_logits(split, logits, labels, settings)
    if temperature is None:
        return values, logits
    # The logits are divided by the temperature, so a derivative with respect to the temperature is
    # the derivative along the logits, divided by -temperature. The shifted logits take the place of
    # the logits here: this is right because a common shift of a token's logits changes no value. A
    # ban counts as 0, because 0 times infinity would be NaN.
    finite_shifted_logits = [
        jnp.where(jnp.isneginf(chunk.shifted), 0, chunk.shifted) for chunk in logits
    ]

    def with_temperature(value: Value) -> Value:
        """Adds the gradient with respect to the temperature."""
        slope = slope_along(split, value, finite_shifted_logits) / -temperature
        return value._replace(setting_slopes=value.setting_slopes._replace(temperature=slope))

    return tuple(map(with_temperature, values)), logits


def slope_along(
    split: OutputSplit, value: Value, directions: Sequence[Array]
) -> Float[Array, "t c"]:
    """Computes the derivative of a chunk's values along a direction of each layer's logits."""
    total = jnp.zeros_like(value.values)
    for slopes, direction in zip(value.slopes, directions, strict=False):
        total += split.sum_over_vocabulary(slopes * direction) / value.mass
    if value.columns is not None:
        subtracted = values_in_columns(value.columns, directions[0])
        total -= jax.lax.psum(subtracted, split.vocabulary)
    return total


def slope_dtype(layer: LayerArrays) -> Any:
    """Returns the dtype in which gradients of logits are multiplied.

    It is bfloat16 if x and the table are both in bfloat16. Float16 would lose small gradients.
    """
    dtypes = layer.x.dtype, layer.table.dtype
    is_bfloat16 = all(dtype == jnp.bfloat16 for dtype in dtypes)
    return jnp.dtype(jnp.bfloat16) if is_bfloat16 else arguments.compute_dtype(*dtypes)


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
