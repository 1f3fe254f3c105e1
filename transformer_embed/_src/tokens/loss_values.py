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
    c  labels of a token: 1, or the number of candidates
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
from transformer_embed._src.tokens.token_data import Settings, TokenData, weighted, weights_or_nan

# Wraps a function of a static loss and arrays. The backward pass computes the function again,
# except for what has the name that the policy keeps. In a loop, XLA cannot merge the second
# computation with the first, so barriers against merging would only cost time.
_again_in_backward: Any = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    static_argnums=0,
    policy=jax.checkpoint_policies.save_only_these_names(KEPT_NAME),
)


def map_chunks(loss: Loss, token_data: TokenData, layers: Layers) -> tuple[Array, ...]:
    """Computes the values of each token, [..., c], times the weight of the token."""

    def no_carry(layers):
        return None

    def step(carry, token_data, layers, is_only_chunk):
        if loss.has_gradients:
            return carry, _values_of_chunk(loss, token_data, layers, is_only_chunk)
        return carry, loss.values_of_chunk(token_data, layers)

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
    """Computes the values of a chunk, times the weights of the tokens."""
    from_arrays = _values_from_arrays
    if not is_only_chunk:
        from_arrays = _again_in_backward(_values_from_arrays)
    # The weights are multiplied outside of the checkpoint. If they were multiplied inside, the
    # backward pass would compute the losses again for the gradient of the product.
    losses, *others = from_arrays(loss, token_data.labels, token_data.settings, layers)
    losses = weighted(losses, weights_or_nan(layers[0].split, token_data))
    # Other values belong to a token and not to one label.
    token_weights = token_data.weights.max(-1, keepdims=True)
    others = [weighted(values, token_weights) for values in others]
    return losses, *others


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values_from_arrays(
    loss: Loss, labels: Any, settings: Settings, layers: Layers
) -> tuple[Array, ...]:
    """Computes the values of a chunk, without weights."""
    values, _ = values_and_logits(loss, labels, settings, layers)
    return tuple(value.values for value in values)


@functools.partial(_values_from_arrays.defjvp, symbolic_zeros=True)
def _values_from_arrays_jvp(
    loss: Loss, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """Computes the values of a chunk, and the tangents of these values from their gradients."""
    labels, settings, layers = primals
    _, setting_tangents, layer_tangents = tangents
    values, logits = values_and_logits(loss, labels, settings, layers)
    logit_tangents = [
        _logit_tangents(chunk, layer, layer_tangent)
        for chunk, layer, layer_tangent in zip(logits, layers, layer_tangents, strict=True)
    ]
    split = layers[0].split

    def tangent_of(value: TokenValues) -> Array:
        along_logits = directional_derivative(split, value, logit_tangents)
        return add_products(along_logits, value.setting_gradients, setting_tangents)

    return tuple(value.values for value in values), tuple(map(tangent_of, values))


def _logit_tangents(
    logits: ChunkLogits, layer: LayerArrays, tangents: LayerArrays
) -> Float[Array, "t v"]:
    """Computes the tangents of the logits from the tangents of a layer's arrays."""
    dtype = gradient_dtype(layer)
    equation = f"td,{layer.split.table_letters}->tv"
    multiply = functools.partial(jnp.einsum, equation, preferred_element_type=dtype)
    total = jnp.zeros_like(logits.shifted)
    if not isinstance(tangents.x, SymbolicZero):
        total += multiply(tangents.x, layer.table).astype(total.dtype)
    if not isinstance(tangents.sum_rows, SymbolicZero):
        total += multiply(layer.x, tangents.sum_rows.astype(dtype)).astype(total.dtype)
    if not isinstance(tangents.bias, SymbolicZero | None):
        total += tangents.bias[None]
    return total * (logits.slope * logits.slope_factor)
