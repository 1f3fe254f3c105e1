"""The logits of tokens for the rows of one device."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.compiled import change_column
from transformer_embed._src.partitioning import devices_along, index_along, varying_axes
from transformer_embed._src.tokens.output_split import Layer, OutputSplit

# The name of what a checkpoint keeps of a chunk.
OF_TOKENS = "of_tokens"


def row_logits(layer: Layer) -> tuple[Array, float, Array, Array | bool]:
    """The logits of gathered x for whole rows, without a factor, and what belongs to them.

    Returns:
        unscaled: [..., rows] in float32 or wider; those of rows that are not inside too.
        factor: the softcap, or else the scale: the logits are `factor * unscaled`.
        ids: [..., rows], with axes of size 1: the id of each row.
        is_inside: like ids, False at padding and at rows that pad the vocabulary. True: all are
            inside, which costs no pass over the logits.
    """
    x, rows, bias, split = layer.x, layer.table, layer.bias, layer.split
    dtype = arguments.compute_dtype(x.dtype, rows.dtype)
    # Of one narrow dtype, they are multiplied as they are: no wide copy of the table exists.
    if x.dtype != rows.dtype:
        x, rows = x.astype(dtype), rows.astype(dtype)
    # Expanded to x's rank, because users may disable jax's rank promotion.
    leading = range(x.ndim - 1)
    unscaled = jnp.einsum("...d,vd->...v", x, rows, preferred_element_type=dtype)
    if bias is not None:
        bias = jnp.expand_dims(bias.astype(dtype), leading)
    unscaled, factor = biased_and_capped(split, unscaled, bias)
    size = rows.shape[0]
    ids = index_along(split.vocabulary) * size + jnp.arange(size, dtype=jnp.int32)
    is_padded = devices_along(split.mesh, split.vocabulary) * size > split.vocab_size
    ids = jnp.expand_dims(ids, leading)
    is_inside = ids < split.vocab_size if is_padded else True
    if split.pad_id is not None:
        is_inside &= ids != split.pad_id
    return unscaled, factor, ids, is_inside


def biased_and_capped(
    split: OutputSplit, products: Float[Array, "... n"], bias: Array | None
) -> tuple[Float[Array, "... n"], float]:
    """The logits of products and biases [..., n], without a factor."""
    if bias is not None:
        products += bias
    if split.softcap is None:
        return products, split.scale
    capped = jnp.tanh(split.scale * products / split.softcap)
    if bias is not None:
        # No cap lifts a ban.
        capped = jnp.where(bias == -jnp.inf, bias, capped)
    return capped, split.softcap


class ChunkLogits(NamedTuple):
    """Logits [t, r] of a chunk of tokens.

    Args:
        factor: what the logits are to be multiplied by: a number, or [t, 1].
        logits: without the factor, and low at rows that are not predicted.
        top: [t, 1], the largest of each token, on all devices.
        shifted: factor * (logits - top), -inf at bans.
        total: [t, 1], the sum of their exponentials on this device.
        slope: the derivative of the logits in the products of x and the rows, [t, r] or a number.
        slope_factor: to be multiplied by it: a number, or [t, 1].
        ids, is_inside: as `row_logits` returns them.
        is_banned: like is_inside, where the bias is -inf.
    """

    factor: float | Array
    logits: Array
    top: Array
    shifted: Array
    total: Array
    slope: float | Array
    slope_factor: float | Array
    ids: Array
    is_inside: Array | bool
    is_banned: Array | bool


def chunk_logits(layer: Layer, temperature: Any) -> ChunkLogits:
    """The logits of a chunk, as differences from their largest."""
    split, (unscaled, factor, ids, is_inside) = layer.split, row_logits(layer)
    largest, slope_factor = max(factor, 1), split.scale
    if temperature is not None:
        factor, slope_factor = factor / temperature, slope_factor / temperature
        # So that derivatives in the temperature are finite too.
        largest = jnp.clip(2.0**32 * jax.lax.stop_gradient(factor), 1, 2.0**92)
    # Finite, also times the factor: a token that is not counted, whose label may be padding, has
    # the weight 0.
    lowest = float(jnp.finfo(unscaled.dtype).min) / (2 * largest)
    is_whole = split.mesh.empty and layer.table.shape[0] == split.vocab_size
    if split.pad_id is not None and is_whole:
        padding = jnp.array([[split.pad_id]], jnp.int32)
        low = functools.partial(jnp.full_like, fill_value=lowest)
        logits = change_column(unscaled, padding, low, is_last=True)
    else:
        logits = jnp.where(is_inside, unscaled, lowest)
    # Kept for the backward pass, which computes the logits again, but then reads them once.
    top, total = checkpoint_name(_largest_and_total(split, factor, logits), OF_TOKENS)
    is_banned = False if layer.bias is None else layer.bias[None] == -jnp.inf
    slope = 1.0
    if split.softcap is not None:
        # The derivative of tanh, 0 at a ban.
        slope = 1 - jnp.square(jnp.maximum(unscaled, -1))
    # Differences of logits: their rounding does not grow with the logits. The factor comes last:
    # XLA may round `factor * logits - top` only once, which is not 0 where top is rounded.
    shifted = times(factor, logits - top)
    options = slope, slope_factor, ids, is_inside, is_banned
    return ChunkLogits(factor, logits, top, shifted, total, *options)


def _largest_and_total(
    split: OutputSplit, factor: float | Array, logits: Float[Array, "t r"]
) -> tuple[Float[Array, "t 1"], Float[Array, "t 1"]]:
    """The largest logit of each token on all devices, and this device's `ChunkLogits.total`."""

    def in_two_passes(logits):
        # The loss does not depend on what is subtracted, so it needs no gradient.
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        # Inside a user's shard_map, jax refuses a maximum over no axes.
        top = jax.lax.pmax(top, split.vocabulary) if split.vocabulary else top
        return top, jnp.exp(times(factor, logits - top)).sum(-1, keepdims=True)

    # Inside a shard_map, jax cannot differentiate the one pass, as second derivatives do.
    if split.vocabulary or varying_axes(logits) or isinstance(factor, jax.Array):
        return in_two_passes(logits)
    one_pass = functools.partial(in_one_pass, factor)
    return jax.lax.platform_dependent(logits, cuda=one_pass, default=in_two_passes)


def in_one_pass(
    factor: float, logits: Float[Array, "t r"]
) -> tuple[Float[Array, "t 1"], Float[Array, "t 1"]]:
    """The largest logit of each token, and the sum of `exp(factor * (logits - largest))`.

    A GPU takes as long as it reads the logits: once here, twice if the largest is found first.
    """
    lowest = jnp.finfo(logits.dtype).min

    def join(one, other):
        (top, total), (other_top, other_total) = one, other
        is_higher = top > other_top
        of_higher = jnp.where(is_higher, total, other_total)
        of_lower = jnp.where(is_higher, other_total, total)
        # Selected, as the sums are: of equal ones, each derivative is that of the same operand.
        highest = jnp.where(is_higher, top, other_top)
        lower = jnp.where(is_higher, other_top, top)
        ratio = jnp.exp(factor * (lower - highest))
        return highest, of_higher + ratio * of_lower

    # Finite, because two bans would have no difference.
    logits = jnp.clip(logits, lowest, -lowest)
    # Not ones: jax differentiates a reduction only if all its operands have a derivative.
    pairs = logits, 1 + 0 * logits
    start = np.array([lowest, 0], logits.dtype)
    top, total = jax.lax.reduce(pairs, tuple(start), join, (1,))
    return top[:, None], total[:, None]


def times(factor: float | Array, logits: Float[Array, "t n"]) -> Float[Array, "t n"]:
    """Logits times a factor above 0, whose derivative in it is 0 at a ban, not infinite."""
    if not isinstance(factor, jax.Array):
        return factor * logits
    is_banned = jnp.isneginf(logits)
    return jnp.where(is_banned, -jnp.inf, factor * jnp.where(is_banned, 0, logits))


def of_column(
    columns: Int32[Array, "t c"], values: Float[Array, "t r"], shift: float | Array = 0.0
) -> Float[Array, "t c"]:
    """The values of each row in its columns, minus its shift; 0 where another device has them."""
    last = values.shape[1] - 1
    index = jnp.clip(columns, 0, last)
    # One sum of gradients for a column is not atomic on a GPU. By vmap, a mesh may split the rows.
    options = {"mode": "promise_in_bounds", "unique_indices": columns.shape[1] == 1}
    at_columns = jax.vmap(lambda row, index: row.at[index].get(**options))(values, index)
    return jnp.where((columns >= 0) & (columns <= last), at_columns - shift, 0)


def columns_of(chunk: ChunkLogits, ids: Any) -> Int32[Array, "t c"]:
    """Where the logits of ids are among those of this device, if they are."""
    return jnp.asarray(ids) - chunk.ids[0, 0]


def sums_of_rows(
    split: OutputSplit,
    chunk: ChunkLogits,
    columns: Int32[Array, "t c"],
    share: Array | None,
) -> tuple[Array, Array, Any]:
    """The sum of the exponentials, the labels' shifted logits, and, to smooth, the mean of all."""
    of_all, of_shifted = None, functools.partial(of_column, columns, chunk.shifted)

    def of_logits():
        return times(chunk.factor, of_column(columns, chunk.logits, chunk.top))

    if share is not None:
        finite = chunk.shifted
        if chunk.is_banned is not False:
            finite = jnp.where(chunk.is_banned, 0, finite)
        of_all = (finite * share).sum(-1, keepdims=True)
        # Shifted logits exist anyway: reading the label's from elsewhere would keep both.
        of_label = of_shifted()
    elif isinstance(chunk.factor, jax.Array):
        of_label = of_logits()
    else:
        # A CPU would write whole shifted logits only for this. A TPU writes them faster than it
        # repeats their exponentials.
        of_label = jax.lax.platform_dependent(cpu=of_logits, default=of_shifted)
    # One all-reduce for all of them.
    return jax.lax.psum((chunk.total, of_label, of_all), split.vocabulary)
