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
    nan_at_wrong_labels,
    weighted,
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
    """Computes the values of each token, [..., c]: the losses, then further values if any.

    A further value is, for example, the entropy of the token's prediction. The values are
    multiplied by the weights in `token_data`. But a loss without gradients, such as `TopK`, has no
    weights, so its values are returned as they are.
    """

    # The scan has no carry, because chunks leave nothing to the next chunk.
    def no_carry(layers):
        return None

    def step(carry, token_data, layers, is_only_chunk):
        """Computes the values of one chunk."""
        if loss.has_gradients:
            values = _values_of_chunk(loss, token_data, layers, is_only_chunk)
        else:
            values = loss.values_of_chunk(token_data, layers)
        return carry, values

    def on_device(token_data, layers):
        """Computes the values of this device's tokens."""
        # `step` runs for each chunk of the tokens, and the values of all chunks are joined.
        _, values = scan_chunks(
            step=step,
            start=no_carry,
            token_data=token_data,
            layers=layers,
            chunk_size=loss.chunk_size,
        )
        return values

    mesh = layers[0].split.mesh
    # How the arrays of each layer are split over the mesh, as a `LayerArrays` of specs.
    specs = layer_specs(layers)
    # The arrays of tokens, and the values, are split like the tokens of x.
    token_spec = specs[0].x
    run_on_each_device = on_each_device(
        mesh, on_device, in_specs=(token_spec, specs), out_specs=token_spec
    )
    return run_on_each_device(token_data, layers)


def _values_of_chunk(
    loss: Loss, token_data: TokenData, layers: Layers, is_only_chunk: bool
) -> tuple[Array, ...]:
    """Computes the losses and further values of a chunk, times the weights in `token_data`.

    If the chunk is not the only one, the backward pass computes the logits again.
    """
    compute_values = _values_from_arrays
    if not is_only_chunk:
        compute_values = _checkpoint(_values_from_arrays)
    # The losses are multiplied by the weights outside of the checkpoint. The gradient of this
    # product needs the losses, and here they are kept. If the product were inside the checkpoint,
    # the backward pass would compute the losses again for it.
    losses, *further_values = compute_values(loss, token_data.labels, token_data.settings, layers)
    vocab_size = layers[0].split.vocab_size
    loss_weights = nan_at_wrong_labels(token_data.weights, token_data.labels, vocab_size)
    weighted_losses = weighted(losses, loss_weights)
    # A further value, such as an entropy, belongs to a token and not to one of its labels, so it
    # needs one weight for each token. This is the largest weight of the token's labels. With one
    # label, it is the weight of this label. With several candidate labels, the weights are 0 or 1,
    # so the largest is 1 if at least one candidate is counted.
    token_weights = token_data.weights.max(-1, keepdims=True)
    weighted_values = [weighted(values, token_weights) for values in further_values]
    return weighted_losses, *weighted_values


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

    This is the derivative rule of `_values_from_arrays`. A loss computes the gradients of its
    values itself. The tangent of a value is the sum of `gradient * tangent` over the logits and the
    settings, which are the temperature, the label smoothing and the z-loss.
    """
    labels, settings, layers = primals
    _, setting_tangents, layer_tangents = tangents
    # The values with their gradients with respect to logits and settings, and the logits.
    values, logits = values_and_logits(loss, labels, settings, layers)
    logit_tangents = [
        _logit_tangents(chunk, layer, layer_tangent)
        for chunk, layer, layer_tangent in zip(logits, layers, layer_tangents, strict=True)
    ]
    split = layers[0].split
    primals_out = tuple(token_values.values for token_values in values)
    tangents_out = []
    for token_values in values:
        # How fast the values change with the logits.
        from_logits = directional_derivative(split, token_values, logit_tangents)
        # For each setting, the product of gradient and tangent is added.
        tangent = add_products(from_logits, token_values.setting_gradients, setting_tangents)
        tangents_out.append(tangent)
    return primals_out, tuple(tangents_out)


def _logit_tangents(
    logits: ChunkLogits, layer: LayerArrays, tangents: LayerArrays
) -> Float[Array, "t v"]:
    """Computes the tangents of the logits from the tangents of x, of the rows and of the bias.

    The logits are `factor * unscaled`, a function of the products `x @ rows.T + bias`.

    Args:
        logits: The logits, and the slope of the softcap.
        layer: The layer, which has the rows of the table twice: `table` in the table's dtype, and
            `wide_rows` in float32 or wider. Gradients and tangents belong to `wide_rows`.
        tangents: The tangent of each array of the layer, or a `SymbolicZero`.
    """
    dtype = gradient_dtype(layer)
    equation = f"td,{layer.split.table_letters}->tv"
    multiply = functools.partial(jnp.einsum, equation, preferred_element_type=dtype)
    # The total is the tangent of `x @ rows.T + bias`.
    total = jnp.zeros_like(logits.relative_logits)
    if not isinstance(tangents.x, SymbolicZero):
        total += multiply(tangents.x, layer.table).astype(total.dtype)
    if not isinstance(tangents.wide_rows, SymbolicZero):
        total += multiply(layer.x, tangents.wide_rows.astype(dtype)).astype(total.dtype)
    # None if the layer has no bias.
    has_bias_tangent = not isinstance(tangents.bias, SymbolicZero | None)
    if has_bias_tangent:
        total += tangents.bias[None]
    # By the chain rule, with the derivative of the logits with respect to the products.
    return total * (logits.cap_slope * logits.product_factor)
