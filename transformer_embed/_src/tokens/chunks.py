"""Losses of output layers, one chunk of tokens at a time.

So [tokens, vocabulary] logits never exist at once. A `Loss` has the arithmetic of a chunk: the
values of its tokens and their gradients in the logits. There are two engines around it.

`sum_of_losses`: a `scan` over the chunks carries the gradients of each table [rows, d] and bias
[rows]. The step for a chunk computes its logits [chunk, rows], then its losses and the gradients of
the logits, and from these the gradient of the chunk's x and its parts of the sums. Then the logits
are freed. So the gradients are known after the forward pass.

`map_chunks`: each loss may get another cotangent, so gradients cannot be computed before the
cotangents are known, and the backward pass computes the logits of a chunk again. A chunk is a step
of a `scan` and a `jax.checkpoint`, which keeps its x, its labels, and the largest logit and the sum
of exponentials of each token. Inside it, `_of_chunk` has a rule of its own, which keeps one [chunk,
vocabulary] array where autodiff of its arithmetic would keep several. If one chunk has all tokens,
it is not a checkpoint: that array is kept.

On a mesh, each device first receives whole rows and the tokens that they meet (see `OutputSplit`),
so it holds some rows of the vocabulary. Within a chunk, devices with the same tokens exchange some
numbers per token, such as the largest logit and the sum of exponentials. At the end the gradient of
x is summed over the devices with the same tokens; the gradient of the rows is summed over the parts
of the batch and returns to its columns.
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
from transformer_embed._src.tokens.row_logits import OF_TOKENS, ChunkLogits, chunk_logits, of_column

# Bytes of logits that may exist at once: all tokens are one chunk if theirs fit.
BUDGET = 2**28
# Otherwise a chunk has a part of them, so that the three arrays of its size that a step may have
# fit into the 128 MiB of a TPU's fast memory.
PARTS = 6
# If that is less than d tokens, a step spends more time on the gradient [v, d] of the table, which
# it reads and writes, than on its logits. Then a chunk has 2 d tokens if their logits fit, or d. No
# device gets faster beyond this number of tokens.
LARGEST_CHUNK = 2048
# Of the logits of a token, for each channel of x: with more of them, a copy of x costs little.
COPIED = 64
REDUCTIONS = ("mean", "sum", "none")
Layers = tuple[Layer, ...]


class Settings(NamedTuple):
    """Numbers of each token, [..., 1], that have gradients; None: their defaults."""

    temperature: Any = None
    label_smoothing: Any = None
    z_loss: Any = None


DEFAULTS = Settings(temperature=1.0, label_smoothing=0.0, z_loss=0.0)


class OfTokens(NamedTuple):
    """What belongs to tokens [...]; the numbers of labels are [..., c]."""

    labels: Int32[Array, "*t c"] | None
    settings: Settings
    # 0 where a label is not counted, and divided by their sum for a mean.
    weights: Float[Array, "*t c"]


# Of a place without a token. No weight makes up for a temperature of 0: it is a factor of infinity,
# and 0 times infinity is NaN in the gradient of the whole table.
NO_TOKEN = OfTokens._make((-1, DEFAULTS, 0.0))


class Value(NamedTuple):
    """Values [t, c] of a chunk of t tokens, and their gradients.

    Gradients are finite where a value is infinite, so that a weight of 0 leaves nothing of them.

    Args:
        values: [t, c].
        slopes: for each layer [t, v], the gradient in its logits times the mass, the same for each
            of c. Empty: no gradients.
        mass: [t, 1], what the slopes are to be divided by.
        columns: [t, c], the column of a logit that is subtracted from each value. None: the slopes
            have it.
        of_settings: the gradients in the settings [t, c]; that in the temperature follows from the
            slopes.
    """

    values: Array
    slopes: tuple[Array, ...] = ()
    mass: float | Array = 1.0
    columns: Array | None = None
    of_settings: Settings = Settings()


def as_steps(name: str, shift: Any) -> int:
    """How many tokens after its own each token predicts; True is 1."""
    steps = int(shift) if isinstance(shift, bool | np.bool_) else shift
    return arguments.integer(name, steps, at_least=0)


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is static of a loss.

    Args:
        shift: how many tokens after its own each token predicts.
        chunk_size: the largest number of tokens in a chunk. None: chosen.
        reduction: how the losses of tokens are reduced.
        of_candidates: whether a token has several labels or values, on an axis of their own.
    """

    shift: int = 0
    chunk_size: int | None = None
    reduction: str = "none"
    of_candidates: bool = False

    def __post_init__(self):
        reduction = functools.partial(arguments.choice, choices=REDUCTIONS)
        arguments.convert_fields(
            self, shift=as_steps, chunk_size=arguments.size, reduction=reduction
        )

    def of_chunk(
        self,
        split: OutputSplit,
        logits: tuple[ChunkLogits, ...],
        labels: Int32[Array, "t c"] | None,
        settings: Settings,
    ) -> tuple[Value, ...]:
        """The losses of a chunk of t tokens on a device, and other values."""
        raise NotImplementedError

    def bytes_of_token(self, of_tokens: OfTokens, layers: Layers) -> Any:
        """Of its logits on a device."""
        return sum(layer.wide.shape[0] * layer.wide.dtype.itemsize for layer in layers)

    def of_tokens(self, of_tokens: OfTokens, layers: Layers, is_only: bool) -> tuple[Array, ...]:
        """The values of a chunk, which may be the only one, times their weights."""
        labels, settings, weights = of_tokens
        # Without the weights: for their product, the backward pass would compute the losses again.
        of_chunk = _of_chunk if is_only else again_in_backward(_of_chunk)
        losses, *others = of_chunk(self, labels, settings, layers)
        others = (weighted(each, weights.max(-1, keepdims=True)) for each in others)
        return weighted(losses, nan_outside(layers[0].split, of_tokens)), *others

    def returned(self, values: tuple[Array, ...], weights: Array) -> Any:
        """What the public function returns, of the reduced values and the weights."""
        first, *others = values
        return values if others else first


# For functions of a static loss and arrays: the backward pass computes them again, but not what is
# named. In a loop nothing can be shared with it: barriers against that would only cost.
again_in_backward: Any = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    static_argnums=0,
    policy=jax.checkpoint_policies.save_only_these_names(OF_TOKENS),
)


def weighted(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """The losses times their weights: 0 where a weight is, also of an infinite loss or NaN."""
    return without_unused(losses, weights) * weights


def without_unused(losses: Float[Array, "..."], weights: Float[Array, "..."]) -> Array:
    """The losses, 0 where one without a weight is infinite or NaN."""
    return jnp.where((weights == 0) & ~jnp.isfinite(losses), 0, losses)


def nan_outside(split: OutputSplit, of_tokens: OfTokens) -> Float[Array, "..."]:
    """The weights, NaN where a label is counted and outside the vocabulary.

    NaN makes a loss NaN, and also all its gradients.
    """
    labels, _, weights = of_tokens
    if labels is None:
        return weights
    outside = jnp.asarray(labels).astype(jnp.uint32) >= split.vocab_size
    return nan_where(outside & (weights != 0), weights)


# --- chunks


def number_of_chunks(loss: Loss, of_tokens: OfTokens, layers: Layers) -> int:
    """Of the tokens of a device."""
    *tokens, width = layers[0].x.shape
    total, bytes_of_token = math.prod(tokens), loss.bytes_of_token(of_tokens, layers)
    if loss.chunk_size is not None:
        return -(-total // loss.chunk_size)
    # Of a vocabulary of a symbolic size, as many as of a large one.
    is_symbolic = export.is_symbolic_dim(bytes_of_token)
    fitting = 0 if is_symbolic else BUDGET // max(bytes_of_token, 1)
    size = fitting if total <= fitting else fitting // PARTS
    least, enough = min(width, LARGEST_CHUNK), min(2 * width, LARGEST_CHUNK)
    if size < least:
        size = enough if enough <= fitting else least
    count = -(-total // max(size, 1))
    # To fill up the last chunk, x is copied. That takes long beside the logits of few words: then
    # the number of chunks divides the tokens, if it can.
    if is_symbolic or bytes_of_token > COPIED * width:
        return count
    return next((each for each in range(count, 2 * count) if total % each == 0), count)


def cut_into_chunks(count: int, xs: list[Array], of_tokens: Any) -> Any:
    """[count, size, c] of each of the values [..., c] of all tokens.

    Each chunk takes every count-th token, so each device has a part of each chunk if the batch is
    split. Places without a token fill the last chunks.
    """
    total = math.prod(xs[0].shape[:-1])
    size = max(-(-total // count), 1)

    def cut(array, fill=0):
        if array is None:
            return None
        width, added = array.shape[-1], ((0, count * size - total), (0, 0))
        tokens = jnp.pad(array.reshape(total, width), added, constant_values=fill)
        return tokens.reshape(size, count, width).swapaxes(0, 1)

    of_tokens = jax.tree.map(cut, of_tokens, NO_TOKEN, is_leaf=lambda leaf: leaf is None)
    return [cut(x) for x in xs], of_tokens


def _scan_chunks(
    loss: Loss, step: Callable, start: Callable, of_tokens: OfTokens, layers: Layers
) -> tuple[Any, Any]:
    """On a device, the scan of `step(carry, of_tokens, layers, is_only)` from `start(layers)`.

    Returns the last carry, and of the chunks a number each [chunks], or values [..., c] of tokens.
    """
    layers = tuple(map(_gathered, layers))
    # All vary along the same axes, so that their gradients are summed over devices after the loop.
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((of_tokens, layers))))
    layers = jax.tree.map(lambda array: varying(array, axes), layers)
    # Without tokens too, one place without a token: jax does not batch derivatives of no steps.
    xs, count = [layer.x for layer in layers], max(number_of_chunks(loss, of_tokens, layers), 1)
    shape = xs[0].shape[:-1]

    def of_chunk(carry, chunk):
        xs, of_chunk = chunk
        each = zip(layers, xs, strict=True)
        in_chunk = tuple(dataclasses.replace(layer, x=x) for layer, x in each)
        return step(carry, of_chunk, in_chunk, count <= 1)

    def join(array):
        if array.ndim == 1:
            return array
        count, size, width = array.shape
        tokens = array.swapaxes(0, 1).reshape(size * count, width)
        return tokens[: math.prod(shape)].reshape(*shape, width)

    chunks = cut_into_chunks(count, xs, of_tokens)
    carry, values = jax.lax.scan(of_chunk, start(layers), chunks)
    return carry, jax.tree.map(join, values)


def _gathered(layer: Layer) -> Layer:
    """On a device, a layer with whole rows."""
    rows = layer.split.exchange(layer.table, 0)
    dtype = arguments.compute_dtype(layer.x.dtype, rows.dtype)
    wide, bias = jax.tree.map(lambda array: array.astype(dtype), (rows, layer.bias))
    return Layer(layer.x, rows, bias, wide, layer.split)


def _values(
    loss: Loss, labels: Any, settings: Settings, layers: Layers
) -> tuple[tuple[Value, ...], tuple[ChunkLogits, ...]]:
    split = layers[0].split
    logits = tuple(chunk_logits(layer, settings.temperature) for layer in layers)
    values = loss.of_chunk(split, logits, labels, settings)
    if settings.temperature is not None:
        # The derivative in the temperature is 0 at a ban, not 0 times infinity.
        shifted = [jnp.where(jnp.isneginf(z), 0, z) for z in (each.shifted for each in logits)]

        def with_gradient(value):
            along = _along(split, value, shifted) / -settings.temperature
            return value._replace(of_settings=value.of_settings._replace(temperature=along))

        values = tuple(map(with_gradient, values))
    return values, logits


def _along(split: OutputSplit, value: Value, of_logits: Sequence[Array]) -> Float[Array, "t c"]:
    """The tangents of a chunk's values by those of the logits of its layers."""
    total = jnp.zeros_like(value.values)
    for slopes, of_layer in zip(value.slopes, of_logits, strict=False):
        total += split.total(slopes * of_layer) / value.mass
    if value.columns is not None:
        total -= jax.lax.psum(of_column(value.columns, of_logits[0]), split.vocabulary)
    return total


def _slope_dtype(layer: Layer) -> Any:
    """The dtype in which gradients of logits are multiplied.

    It is that of x and the table if both are in bfloat16. Float16 would lose small ones.
    """
    dtypes = layer.x.dtype, layer.table.dtype
    is_narrow = all(dtype == jnp.bfloat16 for dtype in dtypes)
    return jnp.dtype(jnp.bfloat16) if is_narrow else arguments.compute_dtype(*dtypes)


# --- each of the values


def map_chunks(loss: Loss, of_tokens: OfTokens, layers: Layers) -> tuple[Array, ...]:
    """The values of `loss.of_tokens` for each token, [..., c]."""

    def step(_, *chunk):
        return None, loss.of_tokens(*chunk)

    def on_device(of_tokens, layers):
        return _scan_chunks(loss, step, lambda _: None, of_tokens, layers)[1]

    spec, _ = specs = _specs(layers)
    return on_each_device(layers[0].split.mesh, on_device, specs, spec)(of_tokens, layers)


def _specs(layers: Layers) -> tuple[PartitionSpec, Layers]:
    """How the arrays of tokens and of layers are split."""
    of_layers = tuple(layer.split.specs() for layer in layers)
    return of_layers[0].x, of_layers


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_chunk(loss: Loss, *arrays: Any) -> tuple[Array, ...]:
    return tuple(value.values for value in _values(loss, *arrays)[0])


@functools.partial(_of_chunk.defjvp, symbolic_zeros=True)
def _of_chunk_jvp(loss: Loss, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (values, logits), layers = _values(loss, *primals), primals[2]
    _, of_settings, of_layers = tangents
    of_logits = [_logit_tangents(*each) for each in zip(logits, layers, of_layers, strict=True)]

    def tangent(value):
        along = _along(layers[0].split, value, of_logits)
        return _dot(value.of_settings, of_settings, lambda product: product, along)

    return tuple(value.values for value in values), tuple(map(tangent, values))


def _logit_tangents(logits: ChunkLogits, layer: Layer, tangents: Layer) -> Float[Array, "t v"]:
    """The tangents of the logits, by all of the layer that have some."""
    dtype = _slope_dtype(layer)
    multiply = functools.partial(jnp.einsum, "td,vd->tv", preferred_element_type=dtype)
    total = jnp.zeros_like(logits.shifted)
    if not isinstance(tangents.x, SymbolicZero):
        total += multiply(tangents.x, layer.table).astype(total.dtype)
    if not isinstance(tangents.wide, SymbolicZero):
        total += multiply(layer.x, tangents.wide.astype(dtype)).astype(total.dtype)
    if not isinstance(tangents.bias, SymbolicZero | None):
        total += tangents.bias[None]
    return total * (logits.slope * logits.slope_factor)


# --- their sum


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def sum_of_losses(loss: Loss, *arrays: Any) -> tuple[Array, ...]:
    """The sums of the values of `loss.of_chunk` times weights; only the first has gradients."""
    return _sums_and_gradients(loss, *arrays)[0]


@functools.partial(sum_of_losses.defjvp, symbolic_zeros=True)
def _sum_jvp(loss: Loss, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The tangent is linear in the tangents, with the gradients as coefficients.

    So its transpose only scales the gradients. Lowering drops what computes the others.
    """
    (total, *others), *gradients = _sums_and_gradients(loss, *primals)
    (_, *of_tokens), of_layers = tangents
    tangent = _dot(gradients, [*of_tokens, of_layers], jnp.sum, jnp.zeros_like(total))
    return (total, *others), (tangent, *map(jnp.zeros_like, others))


def _dot(gradients: Any, tangents: Any, reduced: Callable, total: Array) -> Array:
    """The total plus the products of gradients and tangents, which are in one tree."""
    trees = (
        jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None) for tree in (gradients, tangents)
    )
    for gradient, tangent in zip(*trees, strict=True):
        if gradient is not None and not isinstance(tangent, SymbolicZero | None):
            total += reduced(gradient * tangent.astype(gradient.dtype))
    return total


def _sums_and_gradients(loss: Loss, of_tokens: OfTokens, layers: Layers) -> tuple[Any, ...]:
    """The sums, and the gradients of the first one in the settings, the weights and the layers."""
    first, *_ = splits = [layer.split for layer in layers]

    def start(layers):
        return jax.tree.map(jnp.zeros_like, tuple((layer.wide, layer.bias) for layer in layers))

    def on_device(of_tokens, layers):
        add = functools.partial(_add_chunk, loss)
        of_tables, (sums, *of_tokens, of_xs) = _scan_chunks(loss, add, start, of_tokens, layers)
        batch = sum(first.tokens, ())
        sums, of_tables = jax.lax.psum((tuple(map(jnp.sum, sums)), of_tables), batch)
        of_xs = jax.lax.psum(of_xs, first.vocabulary)
        of_layers = tuple(
            Layer(of_x, split.exchange(of_rows, 1), of_bias, None, split)
            for split, of_x, (of_rows, of_bias) in zip(splits, of_xs, of_tables, strict=True)
        )
        return sums, *of_tokens, of_layers

    spec, of_layers = specs = _specs(layers)
    out_specs = PartitionSpec(), spec, spec, of_layers
    return on_each_device(first.mesh, on_device, specs, out_specs)(of_tokens, layers)


def _add_chunk(
    loss: Loss, of_tables: tuple[Any, ...], of_tokens: OfTokens, layers: Layers, _
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The gradients of tables and biases after adding those of a chunk, and what is the chunk's."""
    labels, settings, weights = of_tokens
    (losses, *others), logits = _values(loss, labels, settings, layers)
    of_losses = nan_outside(layers[0].split, of_tokens)
    sums = [
        jnp.sum(weighted(losses.values, of_losses)),
        *(jnp.sum(weighted(value.values, weights)) for value in others),
    ]
    of_settings = jax.tree.map(lambda slopes: weighted(slopes, of_losses), losses.of_settings)
    gradients = [
        _of_layer(
            layer,
            slopes * each.slope,
            weighted(jnp.asarray(each.slope_factor / losses.mass, of_losses.dtype), of_losses),
        )
        for layer, slopes, each in zip(layers, losses.slopes, logits, strict=True)
    ]
    of_xs, more = zip(*gradients, strict=True)
    of_weights = without_unused(losses.values, of_losses)
    return jax.tree.map(operator.add, of_tables, more), (sums, of_settings, of_weights, of_xs)


def _of_layer(
    layer: Layer, slopes: Float[Array, "t v"], factors: Any
) -> tuple[Array, tuple[Array, Array | None]]:
    """The gradients of a chunk's x, and its parts of those of the rows and the bias."""
    multiply = functools.partial(jnp.einsum, preferred_element_type=factors.dtype)
    dtype = _slope_dtype(layer)
    if dtype != factors.dtype:
        # Rounded once, as autodiff rounds the gradient of a narrow product.
        slopes, factors = (slopes * factors).astype(dtype), 1.0
    of_rows = multiply("tv,td->vd", slopes, factors * layer.x.astype(dtype))
    of_bias = None
    if layer.bias is not None:
        # Eight equal columns: a TPU takes as long for a plain sum as for a product with all of x.
        columns = jnp.broadcast_to(jnp.asarray(factors, dtype), (len(slopes), 8))
        of_bias = multiply("tv,tc->vc", slopes, columns)[:, 0]
    return factors * multiply("tv,vd->td", slopes, layer.table), (of_rows, of_bias)
