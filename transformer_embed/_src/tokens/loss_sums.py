"""Computes the sum of a loss over all tokens, with its gradients, one chunk of tokens at a time.

A `scan` over the chunks carries the gradients of each table [rows, d] and bias [rows]. The step of
a chunk computes the logits [chunk, rows], then the losses and the gradients of the logits. From
these the step computes the gradient of the chunk's x, and adds to the gradients of the tables. Then
the logits are freed. So all gradients are known after the forward pass.

On a mesh, at the end, the gradient of x is summed over the devices that have the same tokens. The
gradient of the rows is summed over the parts of the batch, and returns to the columns of the table.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidates
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
    Settings,
    TokenData,
    finite_if_unused,
    weighted,
    weights_or_nan,
)


class TableGradients(NamedTuple):
    """Gradients of the rows [v, d] and of the bias [v] of a layer, summed over chunks."""

    rows: Array
    bias: Array | None


class ChunkResults(NamedTuple):
    """Results of a step of `sum_of_losses` that belong to one chunk.

    Args:
        sums: The sum of each kind of value, times the weights.
        settings: Gradients with respect to the settings, [t, c].
        weights: Gradients with respect to the weights, [t, c].
        xs: The gradient with respect to the x of each layer, [t, d].
    """

    sums: list[Array]
    settings: Settings
    weights: Array
    xs: tuple[Array, ...]


class SumsAndGradients(NamedTuple):
    """Sums over all tokens, and the gradients of the first sum.

    Args:
        sums: The sum of each kind of value, times the weights.
        settings: The gradients with respect to the settings.
        weights: The gradients with respect to the weights.
        layers: The gradients with respect to the arrays of each layer. The gradient of the rows is
            the `table` of a layer.
    """

    sums: Any
    settings: Any
    weights: Any
    layers: Any


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def sum_of_losses(loss: Loss, token_data: TokenData, layers: Layers) -> tuple[Array, ...]:
    """Sums the values of `loss.values_from_logits` times weights over all tokens.

    Only the first sum has gradients.
    """
    return _sums_and_gradients(loss, token_data, layers).sums


@functools.partial(sum_of_losses.defjvp, symbolic_zeros=True)
def _sum_jvp(loss: Loss, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Computes the sums, and the tangents of the sums.

    A tangent is linear in the tangents of the arrays, with the gradients as coefficients. So the
    transpose only scales the gradients. Lowering drops the computation of unused gradients.
    """
    token_data, layers = primals
    token_tangents, layer_tangents = tangents
    result = _sums_and_gradients(loss, token_data, layers)
    total, *others = result.sums
    gradients = (result.settings, result.weights, result.layers)
    array_tangents = (token_tangents.settings, token_tangents.weights, layer_tangents)
    tangent = add_products(jnp.zeros_like(total), gradients, array_tangents, reduce=jnp.sum)
    return (total, *others), (tangent, *map(jnp.zeros_like, others))


def _sums_and_gradients(loss: Loss, token_data: TokenData, layers: Layers) -> SumsAndGradients:
    """Computes the sums of all tokens, and the gradients of the first sum."""
    splits = [layer.split for layer in layers]
    first_split = splits[0]

    def zero_gradients(layers):
        return tuple(map(_zero_gradients, layers))

    def on_device(token_data, layers):
        """Runs the chunks of a device, then adds the results over devices."""
        step = functools.partial(_add_chunk, loss)
        tables, chunks = scan_chunks(loss, step, zero_gradients, token_data, layers)
        sums = tuple(map(jnp.sum, chunks.sums))
        # Sums and gradients of tables are added over the parts of the batch. Gradients of x are
        # added over the parts of the vocabulary.
        sums, tables = jax.lax.psum((sums, tables), first_split.batch_axes)
        xs = jax.lax.psum(chunks.xs, first_split.vocabulary)
        layer_gradients = tuple(
            LayerArrays(
                x=x,
                table=split.to_columns(table.rows),
                bias=table.bias,
                sum_rows=None,
                split=split,
            )
            for split, x, table in zip(splits, xs, tables, strict=True)
        )
        return SumsAndGradients(
            sums=sums, settings=chunks.settings, weights=chunks.weights, layers=layer_gradients
        )

    specs = layer_specs(layers)
    token_spec = specs[0].x
    out_specs = SumsAndGradients(
        sums=PartitionSpec(), settings=token_spec, weights=token_spec, layers=specs
    )
    run = on_each_device(first_split.mesh, on_device, (token_spec, specs), out_specs)
    return run(token_data, layers)


def _zero_gradients(layer: LayerArrays) -> TableGradients:
    """Returns the gradients of a layer before the first chunk."""
    rows = jnp.zeros_like(layer.sum_rows)
    bias = None if layer.bias is None else jnp.zeros_like(layer.bias)
    return TableGradients(rows=rows, bias=bias)


def _add_chunk(
    loss: Loss,
    tables: tuple[TableGradients, ...],
    token_data: TokenData,
    layers: Layers,
    _is_only_chunk: bool,
) -> tuple[tuple[TableGradients, ...], ChunkResults]:
    """Adds a chunk's part to the gradients of all tables, and computes the chunk's results."""
    weights = token_data.weights
    values, logits = values_and_logits(loss, token_data.labels, token_data.settings, layers)
    losses, *others = values
    loss_weights = weights_or_nan(layers[0].split, token_data)
    sums = [jnp.sum(weighted(losses.values, loss_weights))]
    sums += [jnp.sum(weighted(value.values, weights)) for value in others]
    setting_gradients = jax.tree.map(
        lambda gradient: weighted(gradient, loss_weights), losses.setting_gradients
    )
    x_gradients = []
    chunk_tables = []
    for layer, chunk, gradients in zip(layers, logits, losses.scaled_gradients, strict=True):
        product_gradients = gradients * chunk.slope
        token_factors = jnp.asarray(chunk.slope_factor / losses.gradient_scale, loss_weights.dtype)
        factors = weighted(token_factors, loss_weights)
        x_gradient, table_gradients = _layer_gradients(layer, product_gradients, factors)
        x_gradients.append(x_gradient)
        chunk_tables.append(table_gradients)
    weight_gradients = finite_if_unused(losses.values, loss_weights)
    results = ChunkResults(
        sums=sums, settings=setting_gradients, weights=weight_gradients, xs=tuple(x_gradients)
    )
    return jax.tree.map(operator.add, tables, tuple(chunk_tables)), results


def _layer_gradients(
    layer: LayerArrays, product_gradients: Float[Array, "t v"], factors: Any
) -> tuple[Float[Array, "t d"], TableGradients]:
    """Computes the gradient of a chunk's x, and the chunk's part of the table's gradients.

    Args:
        layer: The layer, with the x of the chunk.
        product_gradients: The gradients with respect to the products of x and the rows, without
            the factors.
        factors: What the gradients of each token are to be multiplied by, [t, 1].
    """
    table_letters = layer.split.table_letters
    multiply = functools.partial(jnp.einsum, preferred_element_type=factors.dtype)
    dtype = gradient_dtype(layer)
    if dtype != factors.dtype:
        # The gradients are rounded once, as autodiff rounds the gradient of a narrow product.
        product_gradients = (product_gradients * factors).astype(dtype)
        factors = 1.0
    scaled_x = factors * layer.x.astype(dtype)
    # The operands are in the order of the result's axes, so that the result is not transposed.
    if layer.split.vocab_axis == 0:
        rows_gradient = multiply("tv,td->vd", product_gradients, scaled_x)
    else:
        rows_gradient = multiply("td,tv->dv", scaled_x, product_gradients)
    bias_gradient = None
    if layer.bias is not None:
        # The sum over tokens is a product with eight equal columns, because a TPU takes as long for
        # a plain sum as for a product with all of x.
        columns = jnp.broadcast_to(jnp.asarray(factors, dtype), (len(product_gradients), 8))
        bias_gradient = multiply("tv,tc->vc", product_gradients, columns)[:, 0]
    x_gradient = factors * multiply(f"tv,{table_letters}->td", product_gradients, layer.table)
    return x_gradient, TableGradients(rows=rows_gradient, bias=bias_gradient)
