"""Computes the sum of a loss over all tokens, with its gradients, one chunk of tokens at a time.

A `scan` over the chunks carries the sums of the gradients of each table [v, d] and bias [v]. The
step of a chunk computes the logits [t, v], then the losses and the gradients of the logits. From
these the step computes the gradient of the chunk's x, and adds to the gradients of the tables. Then
the logits are freed. So all gradients are known after the forward pass.

On a mesh, the gradient of x is summed over the devices that have the same tokens, after the last
chunk. The gradient of the rows is summed over the devices that have the same rows, and is split
like the table again.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidate labels
    d  channels of x
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from transformer_embed._src.partitioning import on_each_device
from transformer_embed._src.tokens.chunks import layer_specs, scan_chunks
from transformer_embed._src.tokens.loss_arithmetic import (
    Loss,
    add_products,
    gradient_dtype,
    values_and_logits,
)
from transformer_embed._src.tokens.output_split import LayerArrays, Layers
from transformer_embed._src.tokens.token_data import (
    TokenData,
    TokenSettings,
    finite_if_unused,
    nan_at_wrong_labels,
    weighted,
)


class TableGradients(NamedTuple):
    """Holds the gradients of the rows [v, d] and of the bias [v] of a layer."""

    rows: Array
    bias: Array | None


class ChunkResults(NamedTuple):
    """Holds what a step of `sum_of_losses` computes for one chunk alone.

    Args:
        sums: The sum over the chunk of the weighted losses, and of each further value.
        settings: The gradients with respect to the settings, [t, c].
        weights: The gradients with respect to the weights, [t, c].
        xs: The gradient with respect to the x of each layer, [t, d].
    """

    sums: list[Array]
    settings: TokenSettings
    weights: Array
    xs: tuple[Array, ...]


class SumsAndGradients(NamedTuple):
    """Holds the sum of all losses, the gradients of this sum, and the sums of further values.

    Args:
        sums: The sum of the weighted losses, then the sum of each further value.
        settings: The gradients with respect to the settings.
        weights: The gradients with respect to the weights.
        layers: For each layer, a `LayerArrays` that has a gradient in place of each array.
    """

    sums: Any
    settings: Any
    weights: Any
    layers: Any


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def sum_of_losses(loss: Loss, token_data: TokenData, layers: Layers) -> tuple[Array, ...]:
    """Sums the losses of all tokens times weights, and each further value of the loss.

    Only the sum of the losses, which is the first, has gradients.
    """
    return _sums_and_gradients(loss, token_data, layers).sums


@functools.partial(sum_of_losses.defjvp, symbolic_zeros=True)
def _sum_jvp(loss: Loss, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Computes the sums, the tangent of the first sum, and tangents of 0 for the other sums.

    The tangent is the sum of the products of gradients and tangents of all arrays. It is linear in
    the tangents, so the backward pass only scales the gradients that are known already. If a
    gradient is not used, lowering drops the computation.
    """
    token_data, layers = primals
    token_tangents, layer_tangents = tangents
    result = _sums_and_gradients(loss, token_data, layers)
    total, *other_sums = result.sums
    # Two trees with the same arrays. (Labels are integers, which have no gradients.)
    gradients = (result.settings, result.weights, result.layers)
    array_tangents = (token_tangents.settings, token_tangents.weights, layer_tangents)
    zero = jnp.zeros_like(total)
    tangent = add_products(zero, gradients, array_tangents, reduce=jnp.sum)
    other_tangents = [jnp.zeros_like(other_sum) for other_sum in other_sums]
    return tuple(result.sums), (tangent, *other_tangents)


def _sums_and_gradients(loss: Loss, token_data: TokenData, layers: Layers) -> SumsAndGradients:
    """Computes the sums of all tokens, and the gradients of the first sum.

    On a mesh, each device runs the chunks of its own tokens, with whole rows of the tables. Then
    the results of the devices are added.
    """
    splits = [layer.split for layer in layers]
    first_split = splits[0]

    def zero_gradients(layers):
        return tuple(_zero_gradients(layer) for layer in layers)

    def on_device(token_data, layers):
        """Runs the chunks of a device, then adds the results over devices."""
        step = functools.partial(_add_chunk, loss)
        table_gradients, chunk_results = scan_chunks(loss, step, zero_gradients, token_data, layers)
        # Each of these arrays has a number for each chunk.
        sums = tuple(jnp.sum(sums_of_chunks) for sums_of_chunks in chunk_results.sums)
        # Sums and gradients of tables are added over the devices with other tokens. Gradients of x
        # are added over the devices with other rows.
        sums, table_gradients = jax.lax.psum((sums, table_gradients), first_split.batch_mesh_axes)
        x_gradients = jax.lax.psum(chunk_results.xs, first_split.vocabulary_mesh_axes)
        layer_gradients = []
        for split, x_gradient, gradients in zip(splits, x_gradients, table_gradients, strict=True):
            # The chunks had whole rows. But the gradient is split over devices like the user's
            # table, in which a device may have only some columns.
            table_gradient = split.to_own_columns(gradients.rows)
            layer_gradient = LayerArrays(
                x=x_gradient,
                table=table_gradient,
                bias=gradients.bias,
                wide_rows=None,
                split=split,
            )
            layer_gradients.append(layer_gradient)
        return SumsAndGradients(
            sums=sums,
            settings=chunk_results.settings,
            weights=chunk_results.weights,
            layers=tuple(layer_gradients),
        )

    specs = layer_specs(layers)
    token_spec = specs[0].x
    out_specs = SumsAndGradients(
        sums=PartitionSpec(), settings=token_spec, weights=token_spec, layers=specs
    )
    run = on_each_device(first_split.mesh, on_device, (token_spec, specs), out_specs)
    return run(token_data, layers)


def _zero_gradients(layer: LayerArrays) -> TableGradients:
    """Returns the gradients of a layer's table and bias before the first chunk: zeros."""
    rows = jnp.zeros_like(layer.wide_rows)
    bias = None if layer.bias is None else jnp.zeros_like(layer.bias)
    return TableGradients(rows=rows, bias=bias)


def _add_chunk(
    loss: Loss,
    table_gradients: tuple[TableGradients, ...],
    token_data: TokenData,
    layers: Layers,
    _is_only_chunk: bool,
) -> tuple[tuple[TableGradients, ...], ChunkResults]:
    """Adds a chunk's part to the gradients of all tables, and computes the chunk's results.

    This is a step of `scan_chunks`. So `token_data` and the x of the layers belong to the tokens of
    the chunk, the layers have whole rows, and `table_gradients` are the sums over earlier chunks.
    """
    values, logits = values_and_logits(loss, token_data.labels, token_data.settings, layers)
    losses, *further_values = values
    vocab_size = layers[0].split.vocab_size
    loss_weights = nan_at_wrong_labels(token_data.weights, token_data.labels, vocab_size)
    sums = [jnp.sum(weighted(losses.values, loss_weights))]
    for further_value in further_values:
        sums.append(jnp.sum(weighted(further_value.values, token_data.weights)))
    setting_gradients = jax.tree.map(
        lambda gradient: weighted(gradient, loss_weights), losses.setting_gradients
    )
    x_gradients = []
    table_parts = []
    for layer, chunk, scaled_gradients in zip(layers, logits, losses.scaled_gradients, strict=True):
        # By the chain rule, the gradient of a loss with respect to the products of x and the rows
        # is `product_gradients * token_factors`.
        product_gradients = scaled_gradients * chunk.slope
        token_factors = jnp.asarray(chunk.slope_factor / losses.gradient_scale, loss_weights.dtype)
        token_factors = weighted(token_factors, loss_weights)
        x_gradient, table_part = _chunk_gradients(layer, product_gradients, token_factors)
        x_gradients.append(x_gradient)
        table_parts.append(table_part)
    # The loss is the derivative of the weighted loss with respect to the weight.
    weight_gradients = finite_if_unused(losses.values, loss_weights)
    results = ChunkResults(
        sums=sums, settings=setting_gradients, weights=weight_gradients, xs=tuple(x_gradients)
    )
    next_gradients = jax.tree.map(operator.add, table_gradients, tuple(table_parts))
    return next_gradients, results


def _chunk_gradients(
    layer: LayerArrays, product_gradients: Float[Array, "t v"], token_factors: Any
) -> tuple[Float[Array, "t d"], TableGradients]:
    """Computes the gradient of a chunk's x, and the chunk's part of the table's gradients.

    Args:
        layer: The layer, with the x of the chunk.
        product_gradients: The gradients with respect to the products of x and the rows, before the
            gradients of each token are multiplied by the factor of the token.
        token_factors: The factor of each token, [t, 1].
    """
    table_letters = layer.split.table_letters
    multiply = functools.partial(jnp.einsum, preferred_element_type=token_factors.dtype)
    dtype = gradient_dtype(layer)
    if dtype != token_factors.dtype:
        # The gradients are rounded once, as autodiff rounds the gradient of a narrow product.
        product_gradients = (product_gradients * token_factors).astype(dtype)
        token_factors = 1.0
    # The factors multiply x [t, d], because a product with the gradients [t, v] would be one more
    # pass over an array of the size of the logits.
    scaled_x = token_factors * layer.x.astype(dtype)
    # The operands are in the order of the result's axes, so that the result is not transposed.
    if layer.split.vocab_axis == 0:
        rows_gradient = multiply("tv,td->vd", product_gradients, scaled_x)
    else:
        rows_gradient = multiply("td,tv->dv", scaled_x, product_gradients)
    bias_gradient = None
    if layer.bias is not None:
        # The sum over tokens is computed as a product with eight equal columns, of which one is
        # read, because a TPU takes as long for a plain sum as for a product with all of x.
        columns = jnp.broadcast_to(jnp.asarray(token_factors, dtype), (len(product_gradients), 8))
        equal_sums = multiply("tv,tc->vc", product_gradients, columns)
        bias_gradient = equal_sums[:, 0]
    x_gradient = token_factors * multiply(f"tv,{table_letters}->td", product_gradients, layer.table)
    return x_gradient, TableGradients(rows=rows_gradient, bias=bias_gradient)
