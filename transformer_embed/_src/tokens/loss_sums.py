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
        setting_gradients: The gradients with respect to the temperature, the label smoothing and
            the z-loss of each token, [t, c].
        weight_gradients: The gradients with respect to the weights, [t, c].
        x_gradients: The gradient with respect to the x of each layer, [t, d].
    """

    sums: list[Array]
    setting_gradients: TokenSettings
    weight_gradients: Array
    x_gradients: tuple[Array, ...]


class SumsAndGradients(NamedTuple):
    """Holds the sum of all losses, the gradients of this sum, and the sums of further values.

    Args:
        sums: The sum of the weighted losses, then the sum of each further value.
        setting_gradients: The gradients with respect to the temperature, the label smoothing and
            the z-loss of each token.
        weight_gradients: The gradients with respect to the weights.
        layer_gradients: For each layer, a `LayerArrays` that has a gradient in place of each array.
    """

    sums: Any
    setting_gradients: Any
    weight_gradients: Any
    layer_gradients: Any


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
    the tangents, so the backward pass only scales the gradients that are known already. If an array
    has no tangent, its gradient is not used, so the compiled program does not compute it.
    """
    token_data, layers = primals
    token_tangents, layer_tangents = tangents
    result = _sums_and_gradients(loss, token_data, layers)
    total, *other_sums = result.sums
    # Two trees with the same arrays. (Labels are integers, which have no gradients.)
    gradients = (result.setting_gradients, result.weight_gradients, result.layer_gradients)
    array_tangents = (token_tangents.settings, token_tangents.weights, layer_tangents)
    zero = jnp.zeros_like(total)
    tangent = add_products(zero, gradients, array_tangents, reduce=jnp.sum)
    other_tangents = [jnp.zeros_like(other_sum) for other_sum in other_sums]
    return tuple(result.sums), (tangent, *other_tangents)


def _sums_and_gradients(loss: Loss, token_data: TokenData, layers: Layers) -> SumsAndGradients:
    """Computes the sums of all tokens, and the gradients of the first sum.

    On a mesh, each device computes the logits of its own tokens for its own rows of the tables, one
    chunk of tokens after the other. Then the results of the devices are added.
    """
    splits = [layer.split for layer in layers]
    # All layers are split over the same mesh axes.
    first_split = splits[0]

    def zero_gradients(layers):
        return tuple(_zero_gradients(layer) for layer in layers)

    def on_device(token_data, layers):
        """Runs the chunks of a device, then adds the results over devices."""
        # `_add_chunk` runs for each chunk of this device's tokens. It adds to the gradients of the
        # tables, and returns the results of the chunk. `scan_chunks` joins the results of chunks.
        table_gradients, chunk_results = scan_chunks(
            step=functools.partial(_add_chunk, loss),
            start=zero_gradients,
            token_data=token_data,
            layers=layers,
            chunk_size=loss.chunk_size,
        )
        # Each of these arrays has a number for each chunk.
        sums = tuple(jnp.sum(sums_of_chunks) for sums_of_chunks in chunk_results.sums)
        # A device has the sums of its own tokens, and their part of the gradients of its table
        # rows. So both are added over the devices that have other tokens.
        sums, table_gradients = jax.lax.psum((sums, table_gradients), first_split.batch_mesh_axes)
        # A device has the part of the gradient of x that comes from its own table rows. So the
        # parts are added over the devices that have other table rows.
        x_gradients = jax.lax.psum(chunk_results.x_gradients, first_split.vocabulary_mesh_axes)
        layer_gradients = []
        for split, x_gradient, gradients in zip(splits, x_gradients, table_gradients, strict=True):
            # A device has the gradients of whole rows. But the user's table may be split over its
            # columns, and its gradient is split in the same way.
            table_gradient = split.to_own_columns(gradients.rows)
            layer_gradient = LayerArrays(
                x=x_gradient,
                table=table_gradient,
                bias=gradients.bias,
                # These rows exist only while chunks run.
                wide_rows=None,
                split=split,
            )
            layer_gradients.append(layer_gradient)
        return SumsAndGradients(
            sums=sums,
            setting_gradients=chunk_results.setting_gradients,
            weight_gradients=chunk_results.weight_gradients,
            layer_gradients=tuple(layer_gradients),
        )

    # How the arrays of each layer are split over the mesh, as a `LayerArrays` of specs.
    specs = layer_specs(layers)
    # The arrays of tokens are split like the tokens of x. The sums are the same on all devices.
    token_spec = specs[0].x
    out_specs = SumsAndGradients(
        sums=PartitionSpec(),
        setting_gradients=token_spec,
        weight_gradients=token_spec,
        layer_gradients=specs,
    )
    run_on_each_device = on_each_device(
        first_split.mesh, on_device, in_specs=(token_spec, specs), out_specs=out_specs
    )
    return run_on_each_device(token_data, layers)


def _zero_gradients(layer: LayerArrays) -> TableGradients:
    """Returns the gradients of a layer's table and bias before the first chunk: zeros."""
    # `wide_rows` are the device's rows of the table, in the dtype of sums.
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
    # The losses, then further values such as the accuracy, with their gradients.
    values, logits = values_and_logits(loss, token_data.labels, token_data.settings, layers)
    losses, *further_values = values
    vocab_size = layers[0].split.vocab_size
    # The weight of a label outside the vocabulary becomes NaN, so that the loss becomes NaN.
    loss_weights = nan_at_wrong_labels(token_data.weights, token_data.labels, vocab_size)
    sums = [jnp.sum(weighted(losses.values, loss_weights))]
    for further_value in further_values:
        sums.append(jnp.sum(weighted(further_value.values, token_data.weights)))
    setting_gradients = jax.tree.map(
        lambda gradient: weighted(gradient, loss_weights), losses.setting_gradients
    )
    x_gradients = []
    table_parts = []
    gradients_of_layers = losses.undivided_gradients
    for layer, chunk, undivided in zip(layers, logits, gradients_of_layers, strict=True):
        # The gradient of a loss with respect to the logits is `undivided / divisor`. The derivative
        # of the logits with respect to the products of x and the rows is
        # `cap_slope * product_factor`. So the gradient with respect to the products is
        # `undivided * cap_slope`, an array [t, v], times `product_factor / divisor * weight`, one
        # number for each token.
        product_gradients = undivided * chunk.cap_slope
        token_factors = chunk.product_factor / losses.gradient_divisor
        token_factors = weighted(jnp.asarray(token_factors, loss_weights.dtype), loss_weights)
        x_gradient, table_part = _chunk_gradients(layer, product_gradients, token_factors)
        x_gradients.append(x_gradient)
        table_parts.append(table_part)
    # The derivative of `weight * loss` with respect to the weight is the loss. If the weight is 0,
    # a loss that is infinite or NaN counts as 0.
    weight_gradients = finite_if_unused(losses.values, loss_weights)
    results = ChunkResults(
        sums=sums,
        setting_gradients=setting_gradients,
        weight_gradients=weight_gradients,
        x_gradients=tuple(x_gradients),
    )
    next_gradients = jax.tree.map(operator.add, table_gradients, tuple(table_parts))
    return next_gradients, results


def _chunk_gradients(
    layer: LayerArrays, product_gradients: Float[Array, "t v"], token_factors: Any
) -> tuple[Float[Array, "t d"], TableGradients]:
    """Computes the gradient of a chunk's x, and the chunk's part of the table's gradients.

    The gradient with respect to the products of x and the rows is
    `product_gradients * token_factors`.

    Args:
        layer: The layer, with the x of the chunk.
        product_gradients: The gradients without the factors of the tokens, [t, v].
        token_factors: The factor of each token, [t, 1], in the dtype of sums.
    """
    # The letters of the table's axes, "vd" for a table [v, d], or "dv".
    table_letters = layer.split.table_letters
    multiply = functools.partial(jnp.einsum, preferred_element_type=token_factors.dtype)
    dtype = gradient_dtype(layer)
    if dtype != token_factors.dtype:
        # The gradients of this layer are computed in a narrower dtype, such as bfloat16. They are
        # rounded once, with their factors, as autodiff rounds the gradient of a narrow product. So
        # no factor is left.
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
        # The gradient of the bias is the sum over tokens of `product_gradients * token_factors`. A
        # TPU takes as long for a plain sum as for a product with all of x. So the sum is computed
        # as a product with eight equal columns of factors, [t, 8], of which one result is read.
        columns = jnp.broadcast_to(jnp.asarray(token_factors, dtype), (len(product_gradients), 8))
        equal_sums = multiply("tv,tc->vc", product_gradients, columns)
        bias_gradient = equal_sums[:, 0]
    x_gradient = token_factors * multiply(f"tv,{table_letters}->td", product_gradients, layer.table)
    return x_gradient, TableGradients(rows=rows_gradient, bias=bias_gradient)
