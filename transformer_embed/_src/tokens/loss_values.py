"""Computes the values of each token, such as log-probabilities, one chunk of tokens at a time.

The caller may give each value another cotangent, so gradients cannot be computed before the
cotangents are known, and the backward pass computes the logits of a chunk again. A chunk is a step
of a `scan` and a `jax.checkpoint`. The checkpoint keeps the x and the labels of the chunk, and two
numbers of each token: the largest logit, and the sum of exponentials. Inside the checkpoint,
`_values_from_arrays` has a derivative rule of its own, which keeps one array [chunk, vocabulary].
Autodiff of the arithmetic would keep several. If one chunk has all tokens, the chunk is not a
checkpoint, and that array is kept.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidate labels
    d  channels of x
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from transformer_embed._src.partitioning import on_each_device
from transformer_embed._src.tokens.chunks import layer_specs, scan_chunks
from transformer_embed._src.tokens.loss_arithmetic import (
    Loss,
    TokenValues,
    add_products,
    directional_derivative,
    gradient_dtype,
    values_and_logits,
)
from transformer_embed._src.tokens.output_split import LayerArrays, Layers
from transformer_embed._src.tokens.row_logits import KEPT_NAME, ChunkLogits
from transformer_embed._src.tokens.token_data import (
    TokenData,
    TokenSettings,
    weighted,
    weights_or_nan,
)

# A checkpoint of a function whose first argument, the loss, is static. The backward pass computes
# the function again, but reads the arrays with the name `KEPT_NAME`. `prevent_cse` would add
# barriers that keep XLA from merging the second computation with the first. In a loop, XLA cannot
# merge them anyway, so the barriers would only cost time.
_checkpoint: Any = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    static_argnums=0,
    policy=jax.checkpoint_policies.save_only_these_names(KEPT_NAME),
)


def map_chunks(loss: Loss, token_data: TokenData, layers: Layers) -> tuple[Array, ...]:
    """Computes the losses and further values of all tokens, [..., c] each, times the weights.

    The first array has the losses. If the loss has no gradients, weights are not multiplied.
    """

    def no_carry(layers):
        return None

    def step(carry, token_data, layers, is_only_chunk):
        if loss.has_gradients:
            values = _values_of_chunk(loss, token_data, layers, is_only_chunk)
        else:
            values = loss.values_of_chunk(token_data, layers)
        return carry, values

    def on_device(token_data, layers):
        _, values = scan_chunks(loss, step, no_carry, token_data, layers)
        return values

    mesh = layers[0].split.mesh
    specs = layer_specs(layers)
    token_spec = specs[0].x
    run = on_each_device(mesh, on_device, (token_spec, specs), token_spec)
    return run(token_data, layers)


def _values_of_chunk(
    loss: Loss, token_data: TokenData, layers: Layers, is_only_chunk: bool
) -> tuple[Array, ...]:
    """Computes the losses and further values of a chunk, times the weights of the tokens."""
    compute_values = _values_from_arrays
    if not is_only_chunk:
        compute_values = _checkpoint(_values_from_arrays)
    # The weights are multiplied outside of the checkpoint. If they were multiplied inside, the
    # backward pass would compute the losses again for the gradient of the product.
    losses, *further_values = compute_values(loss, token_data.labels, token_data.settings, layers)
    losses = weighted(losses, weights_or_nan(layers[0].split, token_data))
    # A further value, such as an entropy, belongs to a token and not to one of its labels.
    token_weights = token_data.weights.max(-1, keepdims=True)
    further_values = [weighted(values, token_weights) for values in further_values]
    return losses, *further_values


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values_from_arrays(
    loss: Loss, labels: Any, settings: TokenSettings, layers: Layers
) -> tuple[Array, ...]:
    """Computes the losses and further values of a chunk, without weights."""
    values, _ = values_and_logits(loss, labels, settings, layers)
    return tuple(token_values.values for token_values in values)


@functools.partial(_values_from_arrays.defjvp, symbolic_zeros=True)
def _values_from_arrays_jvp(
    loss: Loss, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """Computes the values of a chunk, and the tangents of these values.

    This is the derivative rule of `_values_from_arrays`. A tangent is the product of the gradients,
    which the loss computes itself, with the tangents of logits and settings.
    """
    labels, settings, layers = primals
    _, setting_tangents, layer_tangents = tangents
    values, logits = values_and_logits(loss, labels, settings, layers)
    logit_tangents = [
        _logit_tangents(chunk, layer, layer_tangent)
        for chunk, layer, layer_tangent in zip(logits, layers, layer_tangents, strict=True)
    ]
    split = layers[0].split

    def tangent_of(token_values: TokenValues) -> Array:
        along_logits = directional_derivative(split, token_values, logit_tangents)
        return add_products(along_logits, token_values.setting_gradients, setting_tangents)

    primals_out = tuple(token_values.values for token_values in values)
    tangents_out = tuple(tangent_of(token_values) for token_values in values)
    return primals_out, tangents_out


def _logit_tangents(
    logits: ChunkLogits, layer: LayerArrays, tangents: LayerArrays
) -> Float[Array, "t v"]:
    """Computes the tangents of the logits from the tangents of a layer's arrays.

    The tangents of the rows are in `wide_rows`, which get the gradient in place of `table`.
    """
    dtype = gradient_dtype(layer)
    equation = f"td,{layer.split.table_letters}->tv"
    multiply = functools.partial(jnp.einsum, equation, preferred_element_type=dtype)
    # The tangents of the products of x and the rows, plus the bias.
    total = jnp.zeros_like(logits.shifted)
    if not isinstance(tangents.x, SymbolicZero):
        total += multiply(tangents.x, layer.table).astype(total.dtype)
    if not isinstance(tangents.wide_rows, SymbolicZero):
        total += multiply(layer.x, tangents.wide_rows.astype(dtype)).astype(total.dtype)
    if not isinstance(tangents.bias, SymbolicZero | None):
        total += tangents.bias[None]
    return total * (logits.slope * logits.slope_factor)
