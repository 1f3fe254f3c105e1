"""Computes losses of output layers one chunk of tokens at a time.

So the logits [tokens, vocabulary] of a large batch never exist at once. A `Loss` has the arithmetic
of a chunk: from the logits, it computes values of the tokens and the gradients of these values. Two
engines run a loss over the chunks.

`sum_of_losses` returns one sum over all tokens. A `scan` over the chunks carries the gradients of
each table [rows, d] and bias [rows]. The step of a chunk computes the logits [chunk, rows], then
the losses and the gradients of the logits. From these the step computes the gradient of the chunk's
x, and adds to the gradients of the tables. Then the logits are freed. So all gradients are known
after the forward pass.

`map_chunks` returns the values of each token. The caller may give each loss another cotangent, so
gradients cannot be computed before the cotangents are known, and the backward pass computes the
logits of a chunk again. A chunk is a step of a `scan` and a `jax.checkpoint`. The checkpoint keeps
the x and the labels of the chunk, and two numbers of each token: the largest logit, and the sum of
exponentials. Inside the checkpoint, `_values_from_arrays` has a derivative rule of its own, which
keeps one array [chunk, vocabulary]. Autodiff of the arithmetic would keep several. If one chunk has
all tokens, the chunk is not a checkpoint, and that array is kept.

On a mesh, each device first receives whole rows and the tokens that meet these rows (see
`OutputSplit`), so a device holds some rows of the vocabulary. Within a chunk, devices with the same
tokens exchange a few numbers of each token, such as the largest logit and the sum of exponentials.
At the end, the gradient of x is summed over the devices that have the same tokens. The gradient of
the rows is summed over the parts of the batch, and returns to the columns of the table.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidates
    d  channels of x
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.compiled import nan_where
from transformer_embed._src.partitioning import on_each_device, varying, varying_axes
from transformer_embed._src.tokens.output_split import Layer, OutputSplit
from transformer_embed._src.tokens.row_logits import (
    KEPT_NAME,
    ChunkLogits,
    chunk_logits,
    values_in_columns,
)

# The bytes of logits that may exist at once. If the logits of all tokens fit, they are one chunk.
LOGITS_BUDGET = 2**28
# Otherwise the logits of a chunk take the budget divided by this number. A step may have three
# arrays of that size, which then fit into the 128 MiB of a TPU's fast memory.
BUDGET_PARTS = 6
# If a part of the budget has fewer than d tokens, a step would spend more time on the gradient
# [v, d] of the table, which is read and written, than on the logits. Then a chunk has 2 d tokens if
# the logits of so many fit the budget, or else d tokens. No device gets faster beyond this number.
LARGEST_CHUNK = 2048
# If the logits of a token have more bytes than this for each channel of x, a copy of x takes little
# time beside them.
CHEAP_COPY_BYTES = 64
REDUCTIONS = ("mean", "sum", "none")
Layers = tuple[Layer, ...]


class Settings(NamedTuple):
    """Settings of a loss that have gradients: a number [..., 1] for each token.

    A setting of None has its default value.
    """

    temperature: Any = None
    label_smoothing: Any = None
    z_loss: Any = None


DEFAULTS = Settings(temperature=1.0, label_smoothing=0.0, z_loss=0.0)


class TokenData(NamedTuple):
    """Arrays that belong to tokens.

    Args:
        labels: int32 [..., c]. None for a loss without labels.
        settings: The settings of each token.
        weights: [..., c], 0 where a label is not counted. For a mean, each weight is divided by the
            sum of all weights.
    """

    labels: Any
    settings: Settings
    weights: Any


# The data of a place without a token. The settings are the defaults, because a temperature of 0
# would be a factor of infinity. Even with a weight of 0, that would be NaN in the gradient of the
# whole table.
NO_TOKEN = TokenData(labels=-1, settings=DEFAULTS, weights=0.0)


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

    def values_of_chunk(
        self, token_data: TokenData, layers: Layers, is_only_chunk: bool
    ) -> tuple[Array, ...]:
        """Computes the values of a chunk, times the weights of the tokens."""
        from_arrays = _values_from_arrays
        if not is_only_chunk:
            from_arrays = _again_in_backward(_values_from_arrays)
        # The weights are multiplied outside of the checkpoint. If they were multiplied inside, the
        # backward pass would compute the losses again for the gradient of the product.
        losses, *others = from_arrays(self, token_data.labels, token_data.settings, layers)
        losses = weighted(losses, weights_or_nan(layers[0].split, token_data))
        # Other values belong to a token and not to one label.
        others = [weighted(values, token_data.weights.max(-1, keepdims=True)) for values in others]
        return losses, *others

    def returned(self, values: tuple[Array, ...], weights: Array) -> Any:
        """Makes the result of the public function from the reduced values and the weights."""
        first, *others = values
        return values if others else first


# Wraps a function of a static loss and arrays. The backward pass computes the function again,
# except for what has the name that the policy keeps. In a loop, XLA cannot merge the second
# computation with the first, so barriers against merging would only cost time.
_again_in_backward: Any = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    static_argnums=0,
    policy=jax.checkpoint_policies.save_only_these_names(KEPT_NAME),
)


def weighted(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiplies losses by weights.

    The product is 0 where a weight is 0, also if the loss is infinite or NaN.
    """
    return finite_if_unused(losses, weights) * weights


def finite_if_unused(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Array:
    """Sets to 0 the losses that are infinite or NaN and have no weight."""
    is_unused = weights == 0
    return jnp.where(is_unused & ~jnp.isfinite(losses), 0, losses)


def weights_or_nan(split: OutputSplit, token_data: TokenData) -> Float[Array, "..."]:
    """Returns the weights, with NaN where a counted label is outside the vocabulary.

    NaN as a weight makes the loss and all gradients NaN.
    """
    labels = token_data.labels
    weights = token_data.weights
    if labels is None:
        return weights
    # As uint32, a negative label is above the vocabulary.
    is_outside = jnp.asarray(labels).astype(jnp.uint32) >= split.vocab_size
    return nan_where(is_outside & (weights != 0), weights)


# --- chunks


def number_of_chunks(loss: Loss, layers: Layers) -> int:
    """Chooses how many chunks the tokens of a device are cut into."""
    *token_shape, width = layers[0].x.shape
    token_count = math.prod(token_shape)
    bytes_of_token = sum(
        layer.wide.shape[layer.split.vocab_axis] * layer.wide.dtype.itemsize for layer in layers
    )
    if loss.chunk_size is not None:
        return _quotient_rounded_up(token_count, loss.chunk_size)
    # A vocabulary of a symbolic size gets as many chunks as a large one.
    is_symbolic = export.is_symbolic_dim(bytes_of_token)
    fitting_tokens = 0 if is_symbolic else LOGITS_BUDGET // max(bytes_of_token, 1)
    chunk_size = _chosen_chunk_size(token_count, fitting_tokens, width)
    count = _quotient_rounded_up(token_count, max(chunk_size, 1))
    # The last chunk may need places without a token, and x is copied to add them. The copy takes
    # long if the vocabulary is small. Then a number of chunks below twice the count is chosen that
    # divides the number of tokens, if one exists.
    if is_symbolic or bytes_of_token > CHEAP_COPY_BYTES * width:
        return count
    divisors = (each for each in range(count, 2 * count) if token_count % each == 0)
    return next(divisors, count)


def _chosen_chunk_size(token_count: int, fitting_tokens: int, width: int) -> int:
    """Chooses how many tokens a chunk has, for logits of `fitting_tokens` in the budget."""
    size = fitting_tokens
    if token_count > fitting_tokens:
        size = fitting_tokens // BUDGET_PARTS
    least = min(width, LARGEST_CHUNK)
    if size >= least:
        return size
    enough = min(2 * width, LARGEST_CHUNK)
    return enough if enough <= fitting_tokens else least


def _quotient_rounded_up(dividend: int, divisor: int) -> int:
    """Divides two numbers and rounds the quotient up."""
    return -(-dividend // divisor)


class Chunks(NamedTuple):
    """Arrays of all tokens, cut into chunks: [chunks, t, c], or [chunks, t, d] for x.

    Args:
        xs: The x of each layer.
        token_data: What belongs to the tokens.
    """

    xs: list[Array]
    token_data: TokenData


def cut_into_chunks(count: int, xs: list[Array], token_data: TokenData) -> Chunks:
    """Cuts the values [..., c] of all tokens into chunks.

    Each chunk takes every count-th token. So if the batch is split, each device has a part of each
    chunk. Places without a token fill the last chunks.
    """
    token_count = math.prod(xs[0].shape[:-1])
    chunk_size = max(_quotient_rounded_up(token_count, count), 1)
    added_tokens = count * chunk_size - token_count

    def cut(array: Any, fill: Any = 0) -> Any:
        if array is None:
            return None
        width = array.shape[-1]
        tokens = array.reshape(token_count, width)
        tokens = jnp.pad(tokens, ((0, added_tokens), (0, 0)), constant_values=fill)
        return tokens.reshape(chunk_size, count, width).swapaxes(0, 1)

    cut_data = jax.tree.map(cut, token_data, NO_TOKEN, is_leaf=lambda leaf: leaf is None)
    return Chunks(xs=[cut(x) for x in xs], token_data=cut_data)


def _join_chunks(array: Array, token_shape: tuple[int, ...]) -> Array:
    """Joins values [chunks, t, c] to [*token_shape, c], and drops the places without a token."""
    count, chunk_size, width = array.shape
    tokens = array.swapaxes(0, 1).reshape(chunk_size * count, width)
    return tokens[: math.prod(token_shape)].reshape(*token_shape, width)


def _scan_chunks(
    loss: Loss, step: Callable, start: Callable, token_data: TokenData, layers: Layers
) -> tuple[Any, Any]:
    """Runs a step for each chunk of a device's tokens.

    Args:
        loss: The loss, which says how many chunks there are.
        step: `step(carry, token_data, layers, is_only_chunk)`, for one chunk. It returns the next
            carry and the chunk's results.
        start: `start(layers)`, the first carry.
        token_data: What belongs to the tokens of the device.
        layers: The layers on the device.

    Returns:
        The last carry, and the results of all chunks: a scalar of each chunk becomes [chunks], and
        values of tokens become [..., c].
    """
    layers = tuple(map(_with_whole_rows, layers))
    # All arrays vary along the same mesh axes, so that gradients are summed over devices after the
    # loop and not inside it.
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((token_data, layers))))
    layers = jax.tree.map(lambda array: varying(array, axes), layers)
    xs = [layer.x for layer in layers]
    # Without tokens, one chunk has one place without a token, because jax does not batch the
    # derivatives of a loop of no steps.
    count = max(number_of_chunks(loss, layers), 1)
    is_only_chunk = count == 1
    token_shape = xs[0].shape[:-1]

    def step_of_chunk(carry, chunk: Chunks):
        chunk_layers = tuple(
            dataclasses.replace(layer, x=x) for layer, x in zip(layers, chunk.xs, strict=True)
        )
        return step(carry, chunk.token_data, chunk_layers, is_only_chunk)

    def join(array):
        is_scalar_of_chunk = array.ndim == 1
        return array if is_scalar_of_chunk else _join_chunks(array, token_shape)

    chunks = cut_into_chunks(count, xs, token_data)
    carry, results = jax.lax.scan(step_of_chunk, start(layers), chunks)
    return carry, jax.tree.map(join, results)


def _with_whole_rows(layer: Layer) -> Layer:
    """Gives a layer on a device whole rows, and converts rows and bias to the dtype of sums."""
    table = layer.split.to_rows(layer.table)
    dtype = arguments.compute_dtype(layer.x.dtype, table.dtype)
    wide, bias = jax.tree.map(lambda array: array.astype(dtype), (table, layer.bias))
    return Layer(x=layer.x, table=table, bias=bias, wide=wide, split=layer.split)


def _values_and_logits(
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
    # the derivative along the logits, divided by -temperature. A ban counts as 0 there, because 0
    # times infinity would be NaN.
    finite_logits = [jnp.where(jnp.isneginf(chunk.shifted), 0, chunk.shifted) for chunk in logits]

    def with_temperature(value: Value) -> Value:
        """Adds the gradient with respect to the temperature."""
        slope = _slope_along(split, value, finite_logits) / -temperature
        return value._replace(setting_slopes=value.setting_slopes._replace(temperature=slope))

    return tuple(map(with_temperature, values)), logits


def _slope_along(
    split: OutputSplit, value: Value, directions: Sequence[Array]
) -> Float[Array, "t c"]:
    """Computes the derivative of a chunk's values along a direction of each layer's logits."""
    total = jnp.zeros_like(value.values)
    for slopes, direction in zip(value.slopes, directions, strict=False):
        total += split.total(slopes * direction) / value.mass
    if value.columns is not None:
        subtracted = values_in_columns(value.columns, directions[0])
        total -= jax.lax.psum(subtracted, split.vocabulary)
    return total


def _slope_dtype(layer: Layer) -> Any:
    """Returns the dtype in which gradients of logits are multiplied.

    It is bfloat16 if x and the table are both in bfloat16. Float16 would lose small gradients.
    """
    dtypes = layer.x.dtype, layer.table.dtype
    is_bfloat16 = all(dtype == jnp.bfloat16 for dtype in dtypes)
    return jnp.dtype(jnp.bfloat16) if is_bfloat16 else arguments.compute_dtype(*dtypes)


def _layer_specs(layers: Layers) -> Layers:
    """Returns how the arrays of each layer are split over the mesh."""
    return tuple(layer.split.specs() for layer in layers)


# --- the values of each token


def map_chunks(loss: Loss, token_data: TokenData, layers: Layers) -> tuple[Array, ...]:
    """Computes the values of `loss.values_of_chunk` for each token, [..., c]."""

    def no_carry(layers):
        return None

    def step(carry, token_data, layers, is_only_chunk):
        return carry, loss.values_of_chunk(token_data, layers, is_only_chunk)

    def on_device(token_data, layers):
        _, values = _scan_chunks(loss, step, no_carry, token_data, layers)
        return values

    mesh = layers[0].split.mesh
    layer_specs = _layer_specs(layers)
    token_spec = layer_specs[0].x
    run = on_each_device(mesh, on_device, (token_spec, layer_specs), token_spec)
    return run(token_data, layers)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values_from_arrays(
    loss: Loss, labels: Any, settings: Settings, layers: Layers
) -> tuple[Array, ...]:
    """Computes the values of a chunk, without weights."""
    values, _ = _values_and_logits(loss, labels, settings, layers)
    return tuple(value.values for value in values)


@functools.partial(_values_from_arrays.defjvp, symbolic_zeros=True)
def _values_from_arrays_jvp(
    loss: Loss, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """Computes the values of a chunk, and the tangents of these values from their slopes."""
    labels, settings, layers = primals
    _, setting_tangents, layer_tangents = tangents
    values, logits = _values_and_logits(loss, labels, settings, layers)
    logit_tangents = [
        _logit_tangents(chunk, layer, layer_tangent)
        for chunk, layer, layer_tangent in zip(logits, layers, layer_tangents, strict=True)
    ]
    split = layers[0].split

    def tangent_of(value: Value) -> Array:
        along_logits = _slope_along(split, value, logit_tangents)
        return _add_products(along_logits, value.setting_slopes, setting_tangents)

    return tuple(value.values for value in values), tuple(map(tangent_of, values))


def _logit_tangents(logits: ChunkLogits, layer: Layer, tangents: Layer) -> Float[Array, "t v"]:
    """Computes the tangents of the logits from the tangents of a layer's arrays."""
    dtype = _slope_dtype(layer)
    equation = f"td,{layer.split.table_letters}->tv"
    multiply = functools.partial(jnp.einsum, equation, preferred_element_type=dtype)
    total = jnp.zeros_like(logits.shifted)
    if not isinstance(tangents.x, SymbolicZero):
        total += multiply(tangents.x, layer.table).astype(total.dtype)
    if not isinstance(tangents.wide, SymbolicZero):
        total += multiply(layer.x, tangents.wide.astype(dtype)).astype(total.dtype)
    if not isinstance(tangents.bias, SymbolicZero | None):
        total += tangents.bias[None]
    return total * (logits.slope * logits.slope_factor)


# --- the sum over all tokens


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
    tangent = _add_products(jnp.zeros_like(total), gradients, array_tangents, reduce=jnp.sum)
    return (total, *others), (tangent, *map(jnp.zeros_like, others))


def _add_products(
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


def _sums_and_gradients(loss: Loss, token_data: TokenData, layers: Layers) -> SumsAndGradients:
    """Computes the sums of all tokens, and the gradients of the first sum."""
    splits = [layer.split for layer in layers]
    first_split = splits[0]

    def zero_gradients(layers):
        tables = tuple(TableGradients(rows=layer.wide, bias=layer.bias) for layer in layers)
        return jax.tree.map(jnp.zeros_like, tables)

    def on_device(token_data, layers):
        step = functools.partial(_add_chunk, loss)
        tables, chunks = _scan_chunks(loss, step, zero_gradients, token_data, layers)
        sums = tuple(map(jnp.sum, chunks.sums))
        # Sums and gradients of tables are added over the parts of the batch. Gradients of x are
        # added over the parts of the vocabulary.
        batch_axes = sum(first_split.tokens, ())
        sums, tables = jax.lax.psum((sums, tables), batch_axes)
        xs = jax.lax.psum(chunks.xs, first_split.vocabulary)
        layer_gradients = tuple(
            Layer(x=x, table=split.to_columns(table.rows), bias=table.bias, wide=None, split=split)
            for split, x, table in zip(splits, xs, tables, strict=True)
        )
        return SumsAndGradients(
            sums=sums, settings=chunks.settings, weights=chunks.weights, layers=layer_gradients
        )

    layer_specs = _layer_specs(layers)
    token_spec = layer_specs[0].x
    out_specs = SumsAndGradients(
        sums=PartitionSpec(), settings=token_spec, weights=token_spec, layers=layer_specs
    )
    run = on_each_device(first_split.mesh, on_device, (token_spec, layer_specs), out_specs)
    return run(token_data, layers)


def _add_chunk(
    loss: Loss,
    tables: tuple[TableGradients, ...],
    token_data: TokenData,
    layers: Layers,
    _is_only_chunk: bool,
) -> tuple[tuple[TableGradients, ...], ChunkResults]:
    """Adds a chunk's part to the gradients of all tables, and computes the chunk's results."""
    weights = token_data.weights
    values, logits = _values_and_logits(loss, token_data.labels, token_data.settings, layers)
    losses, *others = values
    loss_weights = weights_or_nan(layers[0].split, token_data)
    sums = [jnp.sum(weighted(losses.values, loss_weights))]
    sums += [jnp.sum(weighted(value.values, weights)) for value in others]
    setting_gradients = jax.tree.map(
        lambda slopes: weighted(slopes, loss_weights), losses.setting_slopes
    )
    x_gradients = []
    chunk_tables = []
    for layer, chunk, slopes in zip(layers, logits, losses.slopes, strict=True):
        product_slopes = slopes * chunk.slope
        slope_factors = jnp.asarray(chunk.slope_factor / losses.mass, loss_weights.dtype)
        factors = weighted(slope_factors, loss_weights)
        x_gradient, table_gradients = _layer_gradients(layer, product_slopes, factors)
        x_gradients.append(x_gradient)
        chunk_tables.append(table_gradients)
    weight_gradients = finite_if_unused(losses.values, loss_weights)
    results = ChunkResults(
        sums=sums, settings=setting_gradients, weights=weight_gradients, xs=tuple(x_gradients)
    )
    return jax.tree.map(operator.add, tables, tuple(chunk_tables)), results


def _layer_gradients(
    layer: Layer, slopes: Float[Array, "t v"], factors: Any
) -> tuple[Float[Array, "t d"], TableGradients]:
    """Computes the gradient of a chunk's x, and the chunk's part of the table's gradients.

    Args:
        layer: The layer, with the x of the chunk.
        slopes: Times the factors, the gradients with respect to the products of x and the rows.
        factors: [t, 1].
    """
    table_letters = layer.split.table_letters
    multiply = functools.partial(jnp.einsum, preferred_element_type=factors.dtype)
    dtype = _slope_dtype(layer)
    if dtype != factors.dtype:
        # The slopes are rounded once, as autodiff rounds the gradient of a narrow product.
        slopes = (slopes * factors).astype(dtype)
        factors = 1.0
    scaled_x = factors * layer.x.astype(dtype)
    # The operands are in the order of the result's axes, so that the result is not transposed.
    if layer.split.vocab_axis == 0:
        rows_gradient = multiply("tv,td->vd", slopes, scaled_x)
    else:
        rows_gradient = multiply("td,tv->dv", scaled_x, slopes)
    bias_gradient = None
    if layer.bias is not None:
        # The sum over tokens is a product with eight equal columns, because a TPU takes as long for
        # a plain sum as for a product with all of x.
        columns = jnp.broadcast_to(jnp.asarray(factors, dtype), (len(slopes), 8))
        bias_gradient = multiply("tv,tc->vc", slopes, columns)[:, 0]
    x_gradient = factors * multiply(f"tv,{table_letters}->td", slopes, layer.table)
    return x_gradient, TableGradients(rows=rows_gradient, bias=bias_gradient)
