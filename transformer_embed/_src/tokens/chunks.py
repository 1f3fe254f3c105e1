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
from transformer_embed._src.tokens.output_split import LayerArrays, Layers
from transformer_embed._src.tokens.token_data import NO_TOKEN, TokenData

# The bytes of logits that may exist at once. If the logits of all tokens fit, they are one chunk.
LOGITS_BUDGET = 2**28
# Otherwise the logits of a chunk take the budget divided by this number. A step may have three
# arrays of that size, which then fit into the 128 MiB of a TPU's fast memory.
BUDGET_PARTS = 6
# No device gets faster with chunks of more tokens than this.
LARGEST_CHUNK = 2048
# If the logits of a token have more bytes than this for each channel of x, the time for a copy of x
# can be neglected.
CHEAP_COPY_BYTES = 64


def number_of_chunks(chunk_size: int | None, layers: Layers) -> int:
    """Returns how many chunks the tokens of a device are cut into.

    `chunk_size` is the user's largest number of tokens in a chunk. If None, a number is chosen.
    """
    *token_shape, width = layers[0].x.shape
    token_count = math.prod(token_shape)
    if chunk_size is not None:
        return _quotient_rounded_up(token_count, chunk_size)
    bytes_of_token = sum(_bytes_of_token_logits(layer) for layer in layers)
    # Inside jax.export, the size of the vocabulary may be symbolic, which cannot be compared. Then
    # the vocabulary counts as large: no token's logits fit the budget, and a copy of x is cheap.
    is_symbolic = export.is_symbolic_dim(bytes_of_token)
    fitting_tokens = 0 if is_symbolic else LOGITS_BUDGET // max(bytes_of_token, 1)
    chosen_size = _chosen_chunk_size(token_count, fitting_tokens, width)
    count = _quotient_rounded_up(token_count, max(chosen_size, 1))
    # If the count does not divide the number of tokens, x is padded, which copies it. If a token
    # has many more logits than channels, the copy takes little time next to the logits.
    is_copy_cheap = is_symbolic or bytes_of_token > CHEAP_COPY_BYTES * width
    return count if is_copy_cheap else _count_without_copy(token_count, count)


def _bytes_of_token_logits(layer: LayerArrays) -> Any:
    """Returns how many bytes the logits of a token take on a device."""
    # `wide_rows` are the device's rows of the table, in the dtype of the logits.
    row_count = layer.wide_rows.shape[layer.split.vocab_axis]
    return row_count * layer.wide_rows.dtype.itemsize


def _chosen_chunk_size(token_count: int, fitting_tokens: int, width: int) -> int:
    """Chooses how many tokens a chunk has, if the logits of `fitting_tokens` fit the budget.

    The sizes `smallest_size` and `larger_size` are the width d of x and twice d, but both at most
    `LARGEST_CHUNK`. The result is

    - all tokens, if the logits of all fit the budget,
    - otherwise a sixth of the tokens that fit (`BUDGET_PARTS`), if this is `smallest_size` or more,
    - otherwise `larger_size`, if the logits of so many tokens fit,
    - otherwise `smallest_size`.
    """
    if token_count <= fitting_tokens:
        return token_count
    part_of_fitting = fitting_tokens // BUDGET_PARTS
    # Each step also reads and writes the gradient [v, d] of the table. In a chunk of fewer than d
    # tokens, this would take longer than the logits [t, v].
    smallest_size = min(width, LARGEST_CHUNK)
    if part_of_fitting >= smallest_size:
        return part_of_fitting
    larger_size = min(2 * width, LARGEST_CHUNK)
    return larger_size if larger_size <= fitting_tokens else smallest_size


def _count_without_copy(token_count: int, count: int) -> int:
    """Returns the lowest number from `count` to below `2 * count` that divides `token_count`.

    If no such number divides `token_count`, the count is returned.
    """
    for larger_count in range(count, 2 * count):
        if token_count % larger_count == 0:
            return larger_count
    return count


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
    """Cuts the arrays [..., c] of all tokens into chunks.

    Token i is in chunk `i % count`. For example, 5 tokens in 2 chunks are cut into the tokens 0, 2,
    4 and the tokens 1, 3. If a mesh splits the batch over devices, each device has a part of each
    chunk, so no token is sent to another device. (If the first chunk had the tokens 0, 1, 2, it
    would be on the first devices alone.)

    All chunks have the same length. If the count does not divide the number of tokens, the last
    chunks end with a place without a token, as the second chunk of the example. Such a place has an
    x of zeros, and the label, settings and weight of `NO_TOKEN`. If there are no tokens, each chunk
    has one such place.
    """
    token_count = math.prod(xs[0].shape[:-1])
    chunk_size = max(_quotient_rounded_up(token_count, count), 1)
    added_places = count * chunk_size - token_count

    def cut(array: Any, fill: Any = 0) -> Any:
        """Cuts [..., c] into [chunks, t, c]. `fill` is the value of places without a token."""
        if array is None:
            return None
        width = array.shape[-1]
        tokens = array.reshape(token_count, width)
        places = jnp.pad(tokens, ((0, added_places), (0, 0)), constant_values=fill)
        # The axes are [place in a chunk, chunk, c].
        places_by_chunk = places.reshape(chunk_size, count, width)
        return places_by_chunk.swapaxes(0, 1)

    def is_left_out(leaf: Any) -> bool:
        return leaf is None

    # `NO_TOKEN` is a tree like `token_data` that has the fill of each array. An array may be None.
    cut_data = jax.tree.map(cut, token_data, NO_TOKEN, is_leaf=is_left_out)
    return Chunks(xs=[cut(x) for x in xs], token_data=cut_data)


def _join_chunks(array: Array, token_shape: tuple[int, ...]) -> Array:
    """Undoes `cut_into_chunks` for one array: joins [chunks, t, c] to [*token_shape, c]."""
    count, chunk_size, width = array.shape
    places = array.swapaxes(0, 1).reshape(chunk_size * count, width)
    # The places without a token are the last ones.
    tokens = places[: math.prod(token_shape)]
    return tokens.reshape(*token_shape, width)


def scan_chunks(
    *,
    step: Callable,
    start: Callable,
    token_data: TokenData,
    layers: Layers,
    chunk_size: int | None,
) -> tuple[Any, Any]:
    """Runs a step for each chunk of a device's tokens, by `jax.lax.scan`.

    Args:
        step: A function of one chunk, called as `step(carry, token_data, layers, is_only_chunk)`.
            The layers have the x of the chunk, and whole rows. The function returns the next carry
            and the results of the chunk.
        start: A function that returns the first carry, called as `start(layers)`.
        token_data: What belongs to the tokens of the device.
        layers: The layers on the device.
        chunk_size: The largest number of tokens in a chunk. If None, a number is chosen.

    Returns:
        The last carry, and the results of all chunks: a scalar of each chunk becomes [chunks], and
        values of tokens [t, c] become [..., c].
    """
    # If a device has only some columns of the table, it first gets all columns of fewer rows.
    layers = tuple(_with_whole_rows(layer) for layer in layers)
    # Inside shard_map, the type of an array says along which mesh axes the devices have different
    # values. jax sums the gradient of an array over the other axes, at the place where the array
    # meets arrays that differ. Here, before the loop, the types of the layers get the axes of all
    # arrays. So jax sums their gradients once after the loop, and not in each step.
    all_axes = frozenset()
    for array in jax.tree.leaves((token_data, layers)):
        all_axes |= varying_axes(array)
    layers = jax.tree.map(lambda array: varying(array, all_axes), layers)
    xs = [layer.x for layer in layers]
    # If there are no tokens, there is still one chunk, with a place without a token, because jax
    # does not batch the derivatives of a loop of no steps.
    count = max(number_of_chunks(chunk_size, layers), 1)
    is_only_chunk = count == 1
    token_shape = xs[0].shape[:-1]

    def step_of_chunk(carry, chunk: Chunks):
        """Calls the step with layers that have the x of this chunk."""
        chunk_layers = tuple(
            dataclasses.replace(layer, x=chunk_x)
            for layer, chunk_x in zip(layers, chunk.xs, strict=True)
        )
        return step(carry, chunk.token_data, chunk_layers, is_only_chunk)

    def join(array):
        """Joins the results of all chunks, which the scan has put on the first axis."""
        # A scalar of each chunk has become [chunks], and stays so.
        has_scalars = array.ndim == 1
        return array if has_scalars else _join_chunks(array, token_shape)

    chunks = cut_into_chunks(count, xs, token_data)
    carry, results = jax.lax.scan(step_of_chunk, start(layers), chunks)
    return carry, jax.tree.map(join, results)


def _with_whole_rows(layer: LayerArrays) -> LayerArrays:
    """Returns the layer that the steps of `scan_chunks` take, with the whole rows of the device.

    If the columns of the table are split, the devices exchange parts of rows for whole rows first.
    `table` has the rows in the dtype of the user's table. `wide_rows`, the same rows, and the bias
    are in the dtype of sums.
    """
    whole_rows = layer.split.to_whole_rows(layer.table)
    dtype_of_sums = conversions.compute_dtype(layer.x.dtype, whole_rows.dtype)
    wide_rows = whole_rows.astype(dtype_of_sums)
    bias = layer.bias
    if bias is not None:
        bias = bias.astype(dtype_of_sums)
    return dataclasses.replace(layer, table=whole_rows, wide_rows=wide_rows, bias=bias)


def layer_specs(layers: Layers) -> Layers:
    """Returns a `LayerArrays` for each layer that has a `PartitionSpec` in place of each array."""
    return tuple(layer.split.specs() for layer in layers)
