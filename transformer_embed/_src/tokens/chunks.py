"""Runs a function over chunks of tokens, so that the logits of a large batch never exist at once.

On a mesh, each device first receives whole rows and the tokens that meet these rows (see
`OutputSplit`), so a device holds some rows of the vocabulary. Within a chunk, devices with the same
tokens exchange a few numbers of each token, such as the largest logit and the sum of exponentials.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidates
    d  channels of x
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array

from transformer_embed._src import conversions
from transformer_embed._src.partitioning import varying, varying_axes
from transformer_embed._src.tokens.loss_arithmetic import Loss
from transformer_embed._src.tokens.output_split import LayerArrays, Layers
from transformer_embed._src.tokens.token_data import NO_TOKEN, TokenData

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


def number_of_chunks(loss: Loss, layers: Layers) -> int:
    """Chooses how many chunks the tokens of a device are cut into."""
    *token_shape, width = layers[0].x.shape
    token_count = math.prod(token_shape)
    bytes_of_token = sum(map(_bytes_of_token_logits, layers))
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


def _bytes_of_token_logits(layer: LayerArrays) -> Any:
    """Returns how many bytes the logits of a token take on a device."""
    row_count = layer.sum_rows.shape[layer.split.vocab_axis]
    return row_count * layer.sum_rows.dtype.itemsize


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
    """Holds arrays of all tokens, cut into chunks: [chunks, t, c], or [chunks, t, d] for x.

    Args:
        xs: The x of each layer.
        token_data: What belongs to the tokens.
    """

    xs: list[Array]
    token_data: TokenData


def cut_into_chunks(count: int, xs: list[Array], token_data: TokenData) -> Chunks:
    """Cuts the values [..., c] of all tokens into chunks.

    Each chunk takes every count-th token. So if the batch is split over devices, each device has a
    part of each chunk, and no token is sent to another device, as runs of tokens would be. If the
    count does not divide the number of tokens, places with the data of `NO_TOKEN` fill the end of
    the last chunks. Without tokens, each chunk has one such place.
    """
    token_count = math.prod(xs[0].shape[:-1])
    chunk_size = max(_quotient_rounded_up(token_count, count), 1)
    added_tokens = count * chunk_size - token_count

    def cut(array: Any, fill: Any = 0) -> Any:
        """Cuts [..., c] into [chunks, t, c]; `fill` is put where there is no token."""
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


def scan_chunks(
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


def _with_whole_rows(layer: LayerArrays) -> LayerArrays:
    """Gives a layer on a device whole rows, and converts rows and bias to the dtype of sums."""
    table = layer.split.to_rows(layer.table)
    dtype = conversions.compute_dtype(layer.x.dtype, table.dtype)
    sum_rows, bias = jax.tree.map(lambda array: array.astype(dtype), (table, layer.bias))
    return LayerArrays(x=layer.x, table=table, bias=bias, sum_rows=sum_rows, split=layer.split)


def layer_specs(layers: Layers) -> Layers:
    """Returns how the arrays of each layer are split over the mesh."""
    return tuple(layer.split.specs() for layer in layers)
