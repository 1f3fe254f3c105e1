"""Computes the logits of tokens for the table rows of one device.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidate labels

Two kinds of table rows are never predicted. A row is outside if it holds the `pad_id`, or only pads
the vocabulary. The logit of an outside row is a very low finite number. A row is banned if its bias
is -inf. The logit of a banned row is -inf.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from transformer_embed._src import conversions
from transformer_embed._src.compiled import change_column
from transformer_embed._src.partitioning import devices_along, first_index, varying_axes
from transformer_embed._src.tokens.output_split import LayerArrays, OutputSplit

# The name of the arrays that the checkpoint of a chunk keeps for the backward pass.
KEPT_NAME = "token_data"


class RowLogits(NamedTuple):
    """Holds the logits [..., rows] of tokens for the rows of a device, without a factor.

    Args:
        unscaled: The logits without the factor, in float32 or wider. Outside rows have the product
            with x here, like all others.
        factor: The softcap, or the scale if there is no softcap. The logits are
            `factor * unscaled`.
        ids: The id of each row, [..., rows] with leading axes of size 1.
        is_inside: False at outside rows, in the shape of `ids`. If no row is outside, this is the
            Python value True, which costs no pass over the logits.
    """

    unscaled: Array
    factor: float
    ids: Array
    is_inside: Array | bool


def row_logits(layer: LayerArrays) -> RowLogits:
    """Computes the logits of x for the whole rows of a device, from products, bias and softcap."""
    split = layer.split
    x = layer.x
    table = layer.table
    bias = layer.bias
    dtype = conversions.compute_dtype(x.dtype, table.dtype)
    # If x and the table have the same narrow dtype, both are multiplied as they are, so that no
    # wide copy of the table exists.
    if x.dtype != table.dtype:
        x = x.astype(dtype)
        table = table.astype(dtype)
    products = jnp.einsum(
        f"...d,{split.table_letters}->...v", x, table, preferred_element_type=dtype
    )
    # Arrays of rows are expanded to the rank of x, because users may disable jax's rank promotion.
    token_axes = range(x.ndim - 1)
    if bias is not None:
        bias = jnp.expand_dims(bias.astype(dtype), token_axes)
    unscaled, factor = _biased_and_capped(split, products, bias)
    row_count = table.shape[split.vocab_axis]
    # Each device has `row_count` rows, and the ids of the rows count on from device to device.
    first_id = first_index(split.vocabulary_mesh_axes, row_count)
    ids = first_id + jnp.arange(row_count, dtype=jnp.int32)
    ids = jnp.expand_dims(ids, token_axes)
    device_count = devices_along(split.mesh, split.vocabulary_mesh_axes)
    has_padding_rows = device_count * row_count > split.vocab_size
    is_inside = ids < split.vocab_size if has_padding_rows else True
    if split.pad_id is not None:
        is_inside &= ids != split.pad_id
    return RowLogits(unscaled=unscaled, factor=factor, ids=ids, is_inside=is_inside)


def _biased_and_capped(
    split: OutputSplit, products: Float[Array, "... n"], bias: Array | None
) -> tuple[Float[Array, "... n"], float]:
    """Adds the bias to the products [..., n], and applies the softcap.

    Returns:
        The `unscaled` logits and the `factor` of `RowLogits`.
    """
    if bias is not None:
        products += bias
    if split.softcap is None:
        return products, split.scale
    capped = jnp.tanh(split.scale * products / split.softcap)
    if bias is not None:
        # The cap would make the logit of a banned row finite, so the id could be predicted.
        capped = jnp.where(bias == -jnp.inf, bias, capped)
    return capped, split.softcap


class ChunkLogits(NamedTuple):
    """Holds the logits [t, v] of a chunk of tokens, which are `factor * logits`.

    Args:
        factor: The factor of the logits, a number or [t, 1].
        logits: The logits without the factor, [t, v], with a very low number at outside rows.
        top: The largest of each token's `logits` on all devices, [t, 1].
        shifted: `factor * (logits - top)`, [t, v], which is -inf at banned rows.
        total: The sum of the exponentials of `shifted` on this device, [t, 1].
        slope, slope_factor: The derivative of `factor * logits` with respect to the products of x
            and the rows is `slope * slope_factor`. The slope is a number or [t, v], and
            `slope_factor` is a number or [t, 1].
        ids: The id of each row, [1, v].
        is_inside: False at outside rows, as in `RowLogits`.
        is_banned: True at banned rows, [1, v]. None if the layer has no bias.
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
    is_banned: Array | None

    @property
    def first_id(self) -> Int32[Array, ""]:
        """The id of the first row on this device, and so of the first column of the logits."""
        return self.ids[0, 0]


def chunk_logits(layer: LayerArrays, temperature: Any) -> ChunkLogits:
    """Computes the logits of a chunk, and each token's largest logit and sum of exponentials.

    `temperature` divides the logits, [t, 1]. If None, it is 1.
    """
    split = layer.split
    rows = row_logits(layer)
    factor = rows.factor
    slope_factor = split.scale
    if temperature is not None:
        factor = factor / temperature
        slope_factor = slope_factor / temperature
    outside_logit = _outside_logit(rows.unscaled.dtype, factor)
    logits = _replace_outside_logits(layer.split, rows, outside_logit)
    top, total = _top_and_total(split, factor, logits)
    is_banned = None
    if layer.bias is not None:
        is_banned = layer.bias[None] == -jnp.inf
        top, total = _finite_if_all_banned(split, top, total)
    # The checkpoint of a chunk keeps these two arrays. So the backward pass, which computes the
    # logits again, reads the logits only once.
    top, total = checkpoint_name((top, total), KEPT_NAME)
    slope = _slope_of_cap(split, rows)
    # The difference is taken before the product. If `top` were `(factor * logits).max()`, and the
    # shifted logits were `factor * logits - top`, XLA might round this expression only once. But
    # `top` is rounded after the product, so the shifted logit of the largest logit would not be 0.
    shifted = times(factor, logits - top)
    return ChunkLogits(
        factor=factor,
        logits=logits,
        top=top,
        shifted=shifted,
        total=total,
        slope=slope,
        slope_factor=slope_factor,
        ids=rows.ids,
        is_inside=rows.is_inside,
        is_banned=is_banned,
    )


def _outside_logit(dtype: Any, factor: float | Array) -> float | Array:
    """Returns the logit of outside rows, without the factor.

    The logit is so low that the probability is 0, and is finite, also times the factor. So the loss
    of a token whose label is padding is finite, and vanishes because the weight of the token is 0.
    """
    if isinstance(factor, jax.Array):
        # The derivative with respect to the temperature divides the logit by the temperature once
        # more. The power of two leaves room for this, so the derivative is finite too.
        factor_with_room = 2.0**32 * jax.lax.stop_gradient(factor)
        largest_factor = jnp.clip(factor_with_room, 1, 2.0**92)
    else:
        largest_factor = max(factor, 1)
    lowest_number = float(jnp.finfo(dtype).min)
    return lowest_number / (2 * largest_factor)


def _slope_of_cap(split: OutputSplit, rows: RowLogits) -> float | Array:
    """Computes `slope` of `ChunkLogits`, which is 1, or the derivative of the softcap's tanh.

    The derivative is `1 - tanh**2`. At a banned row, `unscaled` is -inf and the derivative is 0.
    """
    if split.softcap is None:
        return 1.0
    finite_tanh = jnp.maximum(rows.unscaled, -1)
    return 1 - jnp.square(finite_tanh)


def _replace_outside_logits(
    split: OutputSplit, rows: RowLogits, outside_logit: Any
) -> Float[Array, "t v"]:
    """Returns `rows.unscaled` with `outside_logit` at outside rows.

    `split` is how the layer is split over devices. If a device has the whole vocabulary, the column
    of an id in the logits is the id.
    """
    has_whole_vocabulary = split.mesh.empty and rows.unscaled.shape[-1] == split.vocab_size
    if split.pad_id is None or not has_whole_vocabulary:
        return jnp.where(rows.is_inside, rows.unscaled, outside_logit)
    # Only the column of the `pad_id` can be outside, so only this column is written.
    pad_column = jnp.array([[split.pad_id]], jnp.int32)
    outside_like = functools.partial(jnp.full_like, fill_value=outside_logit)
    return change_column(rows.unscaled, pad_column, outside_like, is_last_change=True)


def _top_and_total(
    split: OutputSplit, factor: float | Array, logits: Float[Array, "t v"]
) -> tuple[Float[Array, "t 1"], Float[Array, "t 1"]]:
    """Computes `top` and `total` of `ChunkLogits`, the largest logit and the sum of exponentials.

    On a GPU, this takes one pass over the logits if it can, and otherwise two.
    """

    def in_two_passes(logits):
        # The loss does not depend on the number that is subtracted from the logits, so the gradient
        # of this number is left out.
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        # Inside a user's shard_map, jax refuses a maximum over no axes.
        if split.vocabulary_mesh_axes:
            top = jax.lax.pmax(top, split.vocabulary_mesh_axes)
        shifted = times(factor, logits - top)
        total = jnp.exp(shifted).sum(-1, keepdims=True)
        return top, total

    # Second derivatives differentiate this function, and inside a shard_map, jax cannot
    # differentiate the reduction of `in_one_pass`. And `in_one_pass` needs a factor that is a
    # number.
    is_in_shard_map = split.vocabulary_mesh_axes or varying_axes(logits)
    if is_in_shard_map or isinstance(factor, jax.Array):
        return in_two_passes(logits)
    one_pass = functools.partial(in_one_pass, factor)
    return jax.lax.platform_dependent(logits, cuda=one_pass, default=in_two_passes)


def _finite_if_all_banned(
    split: OutputSplit, top: Float[Array, "t 1"], total: Float[Array, "t 1"]
) -> tuple[Float[Array, "t 1"], Float[Array, "t 1"]]:
    """Changes `top` and `total` of tokens whose logits are all -inf, because all rows are banned.

    For these, a CPU would subtract infinity from infinity. With a finite top and a total of 1, each
    loss is infinite on all platforms, and the gradients are finite.
    """
    lowest = jnp.finfo(top.dtype).min
    is_all_banned = top <= lowest
    finite_top = jnp.maximum(top, lowest)
    # The totals of the devices will be added, so each device gets a share of 1.
    device_count = devices_along(split.mesh, split.vocabulary_mesh_axes)
    total_of_device = 1 / device_count
    return finite_top, jnp.where(is_all_banned, total_of_device, total)


def in_one_pass(
    factor: float, logits: Float[Array, "t v"]
) -> tuple[Float[Array, "t 1"], Float[Array, "t 1"]]:
    """Computes the largest logit of each token, and the sum of `exp(factor * (logits - largest))`.

    On a GPU, the time is the time to read the logits. This function reads the logits once, but a
    function that finds the largest logit first would read them twice.
    """
    lowest = jnp.finfo(logits.dtype).min

    # A part is some of a token's logits. It is held as (top, total): the largest of these logits,
    # and the sum of `exp(factor * (logit - top))` over them.
    def join(left, right):
        """Joins two parts. The total of the part with the lower top is scaled to the higher top."""
        left_top, left_total = left
        right_top, right_total = right
        is_left_higher = left_top > right_top
        total_of_higher = jnp.where(is_left_higher, left_total, right_total)
        total_of_lower = jnp.where(is_left_higher, right_total, left_total)
        # The tops are selected by the same condition as the totals. If a maximum selected the tops,
        # and the tops were equal, jax would take half of the derivative from each part.
        higher_top = jnp.where(is_left_higher, left_top, right_top)
        lower_top = jnp.where(is_left_higher, right_top, left_top)
        ratio = jnp.exp(factor * (lower_top - higher_top))
        return higher_top, total_of_higher + ratio * total_of_lower

    # The logits of banned rows become finite, because the difference of two infinities is NaN.
    logits = jnp.clip(logits, lowest, -lowest)
    # A part of one logit has the total 1. The ones are computed from the logits, because jax
    # differentiates a reduction only if every operand has a derivative.
    totals = 1 + 0 * logits
    # An empty part, which the reduction begins with.
    initial_top, initial_total = np.array([lowest, 0], logits.dtype)
    top, total = jax.lax.reduce((logits, totals), (initial_top, initial_total), join, (1,))
    return top[:, None], total[:, None]


def times(factor: float | Array, logits: Float[Array, "t n"]) -> Float[Array, "t n"]:
    """Multiplies logits by a factor above 0.

    At a banned row, whose logit is -inf, the derivative with respect to the factor is 0.
    """
    if not isinstance(factor, jax.Array):
        return factor * logits
    is_banned = jnp.isneginf(logits)
    finite_logits = jnp.where(is_banned, 0, logits)
    return jnp.where(is_banned, -jnp.inf, factor * finite_logits)


def values_in_columns(
    columns: Int32[Array, "t c"], values: Float[Array, "t v"], shift: float | Array = 0.0
) -> Float[Array, "t c"]:
    """Returns `values[i, columns[i, j]] - shift[i]` for token i, and 0 for a column out of range.

    A column is out of range if another device holds it, so a sum over the devices is the value.
    For example, the values 5 6 7 of a token, with the columns 2 -1, give 7 0.
    """
    last = values.shape[1] - 1
    index = jnp.clip(columns, 0, last)
    # If each token reads a single column, the gradient adds to each place once. If jax is told so,
    # a GPU does without atomic additions.
    is_unique = columns.shape[1] == 1

    def read(row, row_index):
        return row.at[row_index].get(mode="promise_in_bounds", unique_indices=is_unique)

    # The tokens are an axis of `vmap` and not an index, because a mesh may split them.
    read_values = jax.vmap(read)(values, index)
    is_on_this_device = (columns >= 0) & (columns <= last)
    return jnp.where(is_on_this_device, read_values - shift, 0)


def columns_of_labels(chunk: ChunkLogits, labels: Int32[Array, "t c"]) -> Int32[Array, "t c"]:
    """Returns the column of each label among the logits of this device.

    A device holds the logits of consecutive ids. If another device holds the logit of a label, the
    column is out of range here.
    """
    return labels - chunk.first_id


class TokenSums(NamedTuple):
    """Holds the sums of each token over the whole vocabulary, which are equal on all devices.

    Args:
        total: [t, 1], the sum of the exponentials of the shifted logits.
        label_logit: [t, c], the shifted logit of each label. (It is a sum because the device that
            holds the label has its logit, and the other devices have 0.)
        mean_logit: [t, 1], the mean of the shifted logits over the rows that may be predicted. It
            is None if labels are not smoothed.
    """

    total: Array
    label_logit: Array
    mean_logit: Any


def token_sums(
    split: OutputSplit,
    chunk: ChunkLogits,
    columns: Int32[Array, "t c"],
    row_shares: Array | None,
) -> TokenSums:
    """Computes the sums of each token over all devices.

    Args:
        split: How the layer is split.
        chunk: The logits of the tokens.
        columns: The column of each label, as `columns_of_labels` returns it.
        row_shares: The weight of each row in the mean logit, [1, v], which is 0 if the row is never
            predicted. None if labels are not smoothed, because only smoothing needs the mean.
    """
    # Both functions compute the shifted logit of each label, from different arrays.
    label_from_shifted = functools.partial(values_in_columns, columns, chunk.shifted)

    def label_from_logits():
        return times(chunk.factor, values_in_columns(columns, chunk.logits, chunk.top))

    mean_logit = None
    if row_shares is not None:
        finite = chunk.shifted
        if chunk.is_banned is not None:
            finite = jnp.where(chunk.is_banned, 0, finite)
        mean_logit = (finite * row_shares).sum(-1, keepdims=True)
        # The mean needs the shifted logits anyway, so the label's logit is read from them. If it
        # were read from `logits`, both arrays would have to be kept.
        label_logit = label_from_shifted()
    elif isinstance(chunk.factor, jax.Array):
        label_logit = label_from_logits()
    else:
        # A CPU would write all shifted logits only to read a few. A TPU takes less time to write
        # the shifted logits than to compute the exponentials again.
        label_logit = jax.lax.platform_dependent(cpu=label_from_logits, default=label_from_shifted)
    on_this_device = TokenSums(total=chunk.total, label_logit=label_logit, mean_logit=mean_logit)
    # A single all-reduce adds the three arrays over devices.
    return jax.lax.psum(on_this_device, split.vocabulary_mesh_axes)
