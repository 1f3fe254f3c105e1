"""Losses of output layers, one chunk of tokens at a time.

So [tokens, vocabulary] logits never exist at once. A `Loss` has the arithmetic of a chunk: the
values of its tokens and their gradients in the logits. There are two engines around it.

`sum_of_losses`: a `scan` over the chunks carries sums: of the losses, and of the gradients of each
table [rows, d] and bias [rows]. The step for a chunk computes its logits [chunk, rows], then its
losses and the gradients of the logits, and from these the gradient of the chunk's x and its parts
of the sums. Then the logits are freed. So the gradients are known after the forward pass.

`losses_of_tokens`: each loss may get another cotangent, so gradients cannot be computed before the
cotangents are known, and the backward pass computes the logits of a chunk again. A chunk is a step
of a `scan` and a `jax.checkpoint`, which keeps its x and labels only; inside it, `_of_chunk` has a
rule of its own, which keeps one [chunk, vocabulary] array where autodiff of its arithmetic would
keep several.

On a mesh, each device first receives whole rows and the tokens that they meet (see `OutputSplit`),
so it holds some rows of the vocabulary. Within a chunk, devices with the same tokens exchange some
numbers per token, such as the largest logit and the sum of exponentials. At the end the gradient of
x is summed over the devices with the same tokens and scattered to where x came from; the gradient
of the rows is summed over the parts of the batch and returns to its columns.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import (
    ON_ONE_DEVICE,
    OutputSplit,
    all_gather,
    spec_axes,
    varying,
    varying_axes,
)
from transformer_embed._src.tokens.lookup import Table
from transformer_embed._src.tokens.output_layer import OutputOptions, RowLogits, row_logits

# Below 256 tokens a chunk's sum into the table's gradient costs more than the chunk's logits;
# beyond 512 nothing gets faster.
SMALLEST_CHUNK, LARGEST_CHUNK, CHUNKS = 256, 512, 12


class Layer(NamedTuple):
    """Tokens and the output layer that they meet; on a device, with whole rows of its table.

    `wide` are the rows in the dtype of the sums, which get the gradient in place of the table, so
    that it is summed over the chunks in that dtype.
    """

    x: Array
    table: Any
    bias: Array | None
    wide: Any = None


class Settings(NamedTuple):
    """Numbers of each token, [..., 1], that have gradients; None: their defaults."""

    temperature: Array | None = None
    label_smoothing: Array | None = None
    z_loss: Array | None = None


class Value(NamedTuple):
    """Values [t, c] of a chunk of t tokens, and their gradients.

    Args:
        values: [t, c].
        slopes: for each layer [t, v]: times its factor, the gradient in the products of x and the
            table, the same for each of c. Empty: no gradients.
        factors: for each layer [t, 1].
        of_settings: the gradients in the settings [t, c].
        of_columns: for each value [t, c] a column, and what is added to the gradient there.
    """

    values: Array
    slopes: tuple[Any, ...] = ()
    factors: tuple[Any, ...] = ()
    of_settings: Settings = Settings()
    of_columns: tuple[Any, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is static of a loss.

    Args:
        outputs: of each layer.
        shift: how many tokens after its own each token predicts.
        chunk_size: the largest number of tokens in a chunk. None: chosen.
        reduction: how the losses of tokens are reduced.
    """

    outputs: tuple[OutputOptions, ...]
    shift: int
    chunk_size: int | None
    reduction: str = "none"

    def of_chunk(
        self,
        split: OutputSplit,
        logits: tuple[RowLogits, ...],
        labels: Int32[Array, "t c"] | None,
        settings: Settings,
    ) -> tuple[Value, ...]:
        """The losses, and other values of the tokens."""
        raise NotImplementedError


def weighted(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """The losses times their weights: 0 where a weight is, also of an infinite loss or NaN."""
    return jnp.where((weights == 0) & ~jnp.isfinite(losses), 0, losses) * weights


# --- the parts of a chunk


def cut_into_chunks(chunk_size: int | None, values: Any) -> Any:
    """[count, size, c] of each of the values [..., c] of all tokens.

    Each chunk takes every count-th token, so each device has a part of each chunk if the batch is
    split. The last chunks are padded with zeros.
    """
    total = _tokens(values)
    size = chunk_size or min(max(SMALLEST_CHUNK, -(-total // CHUNKS)), LARGEST_CHUNK)
    count = -(-total // size)
    size = -(-total // max(count, 1))

    def cut(array):
        width = array.shape[-1]
        tokens = jnp.pad(array.reshape(total, width), ((0, count * size - total), (0, 0)))
        return tokens.reshape(size, count, width).swapaxes(0, 1)

    return jax.tree.map(cut, values)


def _tokens(values: Any) -> int:
    return math.prod(jax.tree.leaves(values)[0].shape[:-1])


def join_chunks(chunks: Any, shape: tuple[int, ...]) -> Any:
    """The inverse of `cut_into_chunks`: the values of all tokens of this shape."""

    def join(array):
        tokens = array.swapaxes(0, 1).reshape(-1, array.shape[-1])
        return tokens[: math.prod(shape)].reshape(*shape, array.shape[-1])

    return jax.tree.map(join, chunks)


def split_layers(
    of_tokens: Any, layers: Sequence[Layer]
) -> tuple[tuple[OutputSplit, ...], Any, tuple[Layer, ...]]:
    """How layers are split over devices, and the arrays as functions on devices take them."""
    tables, splits = zip(*(_array_and_split(*layer[:2]) for layer in layers), strict=True)
    arrays = tuple(
        Layer(split.receive(layer.x)[0], table, split.bias(layer.bias, table.shape[0]))
        for split, layer, table in zip(splits, layers, tables, strict=True)
    )
    for split in splits[1:]:
        kept = (split.vocabulary, split.tokens)
        if (splits[0].vocabulary, splits[0].tokens) != kept:
            want = f"rows split over the mesh axes {splits[0].vocabulary} of output's, tokens as x"
            raise arguments.value_error("teacher_output", want, kept)
    values, tree = jax.tree.flatten(of_tokens)
    _, *values = splits[0].receive(layers[0].x, *values)
    return splits, jax.tree.unflatten(tree, values), arrays


def _array_and_split(x: Array, table: Any) -> tuple[Array, OutputSplit]:
    """The table's array, and how it and x are split: plain arrays, only by explicit axes."""
    if isinstance(table, Table):
        return table._output_split(x)
    of_x = spec_axes(jax.typeof(x).sharding.spec, x.ndim)
    rows, columns = spec_axes(jax.typeof(table).sharding.spec, table.ndim)
    if not any((rows, columns, *of_x)):
        return table, ON_ONE_DEVICE
    return table, OutputSplit(jax.typeof(x).sharding.mesh, rows, columns, tuple(of_x))


def _specs(splits: Sequence[OutputSplit]) -> tuple[Layer, ...]:
    return tuple(Layer._make((*split.specs(), PartitionSpec())) for split in splits)


def _gather(
    splits: Sequence[OutputSplit], of_tokens: Any, layers: Sequence[Layer]
) -> tuple[Layer, ...]:
    """On a device, layers with whole rows and the tokens that they meet.

    All vary along the same axes, so that their gradients are summed over devices after the loop.
    """

    def gather(split, layer):
        x, rows = all_gather(layer.x, split.gathered), split.exchange(layer.table, 0, 1)
        dtype = arguments.compute_dtype(x.dtype, rows.dtype)
        wide, bias = jax.tree.map(lambda array: array.astype(dtype), (rows, layer.bias))
        return Layer(x, rows, bias, wide)

    gathered = tuple(map(gather, splits, layers))
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((of_tokens, gathered))))
    return jax.tree.map(lambda array: varying(array, axes), gathered)


def with_tokens(layers: Sequence[Layer], xs: Sequence[Array]) -> tuple[Layer, ...]:
    return tuple(layer._replace(x=x) for layer, x in zip(layers, xs, strict=True))


def _logits(
    loss: Loss, splits: Sequence[OutputSplit], layers: Sequence[Layer]
) -> tuple[RowLogits, ...]:
    of_layers = zip(loss.outputs, splits, layers, strict=True)
    return tuple(row_logits(output, split, *layer[:3]) for output, split, layer in of_layers)


# --- each of the values


def map_chunks(
    function: Callable,
    chunk_size: int | None,
    splits: tuple[OutputSplit, ...],
    of_tokens: Any,
    layers: tuple[Layer, ...],
) -> Any:
    """Values [..., c] of tokens: `function(numbers of tokens [t, c], layers)` of each chunk."""

    def on_device(of_tokens, layers):
        layers = _gather(splits, of_tokens, layers)
        xs = [layer.x for layer in layers]

        # In a loop nothing can be shared with the backward pass: barriers against that would only
        # cost.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def step(_, chunk):
            xs, of_chunk = chunk
            return None, function(of_chunk, with_tokens(layers, xs))

        _, values = jax.lax.scan(step, None, cut_into_chunks(chunk_size, (xs, of_tokens)))
        return join_chunks(values, xs[0].shape[:-1])

    spec = PartitionSpec(*splits[0].tokens)
    run_all = splits[0].map(on_device, (spec, _specs(splits)), spec)
    return run_all(of_tokens, layers)


def losses_of_tokens(
    loss: Loss,
    splits: tuple[OutputSplit, ...],
    labels: Array | None,
    settings: Settings,
    layers: tuple[Layer, ...],
) -> tuple[Array, ...]:
    """The values of `loss.of_chunk` for each token, [..., c]."""

    def of_chunk(of_tokens, layers):
        return _of_chunk(loss, splits, *of_tokens, layers)

    return map_chunks(of_chunk, loss.chunk_size, splits, (labels, settings), layers)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _of_chunk(loss: Loss, splits: tuple[OutputSplit, ...], *arrays: Any) -> tuple[Array, ...]:
    return tuple(value.values for value in _values(loss, splits, *arrays))


def _values(loss, splits, labels, settings, layers) -> tuple[Value, ...]:
    return loss.of_chunk(splits[0], _logits(loss, splits, layers), labels, settings)


@functools.partial(_of_chunk.defjvp, symbolic_zeros=True)
def _of_chunk_jvp(
    loss: Loss, splits: tuple[OutputSplit, ...], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    found = _values(loss, splits, *primals)
    _, of_settings, of_layers = tangents
    of_logits = tuple(map(_logit_tangents, primals[2], of_layers))

    def tangent(value):
        total = jnp.zeros_like(value.values)
        for slopes, factor, of_layer in zip(value.slopes, value.factors, of_logits, strict=False):
            along = (slopes * of_layer).sum(-1, keepdims=True)
            total += factor * jax.lax.psum(along, splits[0].vocabulary)
        if value.of_columns is not None:
            columns, amounts = value.of_columns
            at_columns = amounts * of_column(columns, of_logits[0])
            total += jax.lax.psum(at_columns, splits[0].vocabulary)
        return _dot(value.of_settings, of_settings, lambda product: product, total)

    return tuple(value.values for value in found), tuple(map(tangent, found))


def _logit_tangents(layer: Layer, tangents: Layer) -> Float[Array, "t v"]:
    """The tangents of the products of x and the rows, with the bias, of all that have some."""
    dtype = arguments.compute_dtype(layer.x.dtype, layer.table.dtype)
    multiply = functools.partial(jnp.einsum, "td,vd->tv", preferred_element_type=dtype)
    # Zeros that vary over devices as the products do.
    total = jnp.zeros_like(multiply(layer.x, layer.table))
    if not isinstance(tangents.x, SymbolicZero):
        total += multiply(tangents.x, layer.table)
    if not isinstance(tangents.wide, SymbolicZero):
        total += multiply(layer.x, tangents.wide)
    if not isinstance(tangents.bias, SymbolicZero | None):
        total += tangents.bias[None]
    return total


def of_column(
    columns: Int32[Array, "t c"], values: Float[Array, "t r"], shift: float | Array = 0.0
) -> Float[Array, "t c"]:
    """The values of each row in its columns, minus its shift; 0 where another device has them."""
    last = values.shape[1] - 1
    index = jnp.clip(columns, 0, last)
    at_columns = jnp.take_along_axis(values, index, axis=1, mode="promise_in_bounds")
    return jnp.where((columns >= 0) & (columns <= last), at_columns - shift, 0)


# --- their sum


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def sum_of_losses(loss: Loss, splits: tuple[OutputSplit, ...], *arrays: Any) -> tuple[Array, ...]:
    """The sums of the values of `loss.of_chunk` times weights; only the first has gradients."""
    return _sums_and_gradients(loss, splits, *arrays)[0]


@functools.partial(sum_of_losses.defjvp, symbolic_zeros=True)
def _sum_jvp(
    loss: Loss, splits: tuple[OutputSplit, ...], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """The tangent is linear in the tangents, with the gradients as coefficients.

    So its transpose only scales the gradients. Lowering drops what computes the others.
    """
    (total, *others), *gradients = _sums_and_gradients(loss, splits, *primals)
    tangent = _dot(gradients, list(tangents[1:]), jnp.sum, jnp.zeros_like(total))
    return (total, *others), (tangent, *map(jnp.zeros_like, others))


def _dot(gradients: Any, tangents: Any, reduced: Callable, total: Array) -> Array:
    """The total plus the products of gradients and tangents, which are in one tree."""
    trees = (jax.tree.leaves(tree, is_leaf=_is_none) for tree in (gradients, tangents))
    for gradient, tangent in zip(*trees, strict=True):
        if gradient is not None and not isinstance(tangent, SymbolicZero | None):
            total += reduced(gradient * tangent.astype(gradient.dtype))
    return total


def _is_none(value: Any) -> bool:
    return value is None


def _sums_and_gradients(
    loss: Loss,
    splits: tuple[OutputSplit, ...],
    labels: Array | None,
    settings: Settings,
    weights: Array,
    layers: tuple[Layer, ...],
) -> tuple[Any, ...]:
    """The sums, and the gradients of the first one in the settings, the weights and the layers."""
    spec, of_layers = PartitionSpec(*splits[0].tokens), _specs(splits)
    run = functools.partial(_sums_on_device, loss, splits)
    out_specs = PartitionSpec(), spec, spec, of_layers
    run_all = splits[0].map(run, (spec, spec, spec, of_layers), out_specs)
    return run_all(labels, settings, weights, layers)


def _sums_on_device(loss: Loss, splits: tuple[OutputSplit, ...], *arrays: Any) -> tuple[Any, ...]:
    """`_sums_and_gradients` on a device: what it receives, its chunks, what it sends."""
    *of_tokens, layers = arrays
    layers = _gather(splits, of_tokens, layers)
    xs = [layer.x for layer in layers]
    start = jax.tree.map(jnp.zeros_like, tuple((layer.wide, layer.bias) for layer in layers))
    chunks = cut_into_chunks(loss.chunk_size, (xs, *of_tokens))
    add = functools.partial(_add_chunk, loss, splits, layers)
    of_tables, (sums, *of_tokens) = jax.lax.scan(add, start, chunks)

    batch = sum(splits[0].tokens, ())
    sums, of_tables = jax.lax.psum((tuple(map(jnp.sum, sums)), of_tables), batch)
    of_settings, of_weights, of_xs = join_chunks(of_tokens, xs[0].shape[:-1])
    of_layers = tuple(
        Layer(split.scatter(of_x), split.exchange(of_rows, 1, 0), of_bias)
        for split, of_x, (of_rows, of_bias) in zip(splits, of_xs, of_tables, strict=True)
    )
    return sums, of_settings, of_weights, of_layers


def _add_chunk(
    loss: Loss,
    splits: tuple[OutputSplit, ...],
    layers: tuple[Layer, ...],
    of_tables: tuple[Any, ...],
    chunk: tuple[Any, ...],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The gradients of tables and biases after adding those of a chunk, and what is the chunk's."""
    xs, labels, settings, weights = chunk
    in_chunk = with_tokens(layers, xs)
    found, *others = _values(loss, splits, labels, settings, in_chunk)
    sums = [jnp.sum(weighted(value.values, weights)) for value in (found, *others)]
    of_settings = jax.tree.map(lambda slopes: weighted(slopes, weights), found.of_settings)
    factors = [jnp.where(weights == 0, 0, weights * factor) for factor in found.factors]
    gradients = map(_of_layer, in_chunk, found.slopes, factors)
    of_xs, more = zip(*gradients, strict=True)
    return jax.tree.map(operator.add, of_tables, more), (sums, of_settings, found.values, of_xs)


def _of_layer(
    layer: Layer, slopes: Float[Array, "t v"], factors: Float[Array, "t 1"]
) -> tuple[Array, tuple[Array, Array | None]]:
    """The gradients of a chunk's x, and its parts of those of the rows and the bias."""
    multiply = functools.partial(jnp.einsum, preferred_element_type=factors.dtype)
    of_rows = multiply("tv,td->vd", slopes, factors * layer.x.astype(factors.dtype))
    of_bias = None
    if layer.bias is not None:
        # Eight equal columns: a TPU takes as long for a plain sum as for a product with all of x.
        columns = jnp.broadcast_to(factors, (len(factors), 8))
        of_bias = multiply("tv,tc->vc", slopes, columns)[:, 0]
    return factors * multiply("tv,vd->td", slopes, layer.table), (of_rows, of_bias)
