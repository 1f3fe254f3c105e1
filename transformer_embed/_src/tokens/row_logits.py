"""Computes the logits of tokens for the table rows of one device.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
    c  labels of a token: 1, or the number of candidate labels

Two kinds of table rows are never predicted. A row is outside if it holds the `pad_id`, or only pads
the vocabulary. The logit of an outside row is a very low finite number. A row is banned if its bias
is -inf. The logit of a banned row is -inf.

Logits are held without their last factor, as `unscaled`. The factor is the scale or the softcap,
divided by the temperature. The relative logits of a token are its logits minus its largest logit.
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
    """Holds the logits [..., rows] of tokens for the rows of a device, as `factor * unscaled`.

    Args:
        unscaled: The logits without the factor, in float32 or wider. The rows of the `pad_id` and
            beyond the vocabulary are computed like all others here.
        factor: The softcap, or the scale if there is no softcap. The logits are
            `factor * unscaled`.
        ids: The id of each row, [..., rows] with leading axes of size 1.
        is_inside: False at the rows of the `pad_id` and beyond the vocabulary, in the shape of
            `ids`. If the device has no such row, this is the Python value True, which costs no pass
            over the logits.
    """

    unscaled: Array
    factor: float
    ids: Array
    is_inside: Array | bool


def row_logits(layer: LayerArrays) -> RowLogits:
    """Computes the logits of x for the table rows of a device.

    The table must have all columns of these rows. The logits are `factor * unscaled` of the result.
    """
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
    # The product of both is `scale * (products + bias)`, or the softcap of this.
    unscaled, factor = _biased_and_capped(split, products, bias)
    row_count = table.shape[split.vocab_axis]
    # Each device has `row_count` rows, and the ids of the rows count on from device to device.
    first_id = first_index(split.vocabulary_mesh_axes, row_count)
    ids = first_id + jnp.arange(row_count, dtype=jnp.int32)
    ids = jnp.expand_dims(ids, token_axes)
    device_count = devices_along(split.mesh, split.vocabulary_mesh_axes)
    has_padding_rows = device_count * row_count > split.vocab_size
    is_inside: Any = True
    if has_padding_rows:
        is_inside = ids < split.vocab_size
    if split.pad_id is not None:
        is_inside &= ids != split.pad_id
    return RowLogits(unscaled=unscaled, factor=factor, ids=ids, is_inside=is_inside)


def _biased_and_capped(
    split: OutputSplit, products: Float[Array, "... n"], bias: Array | None
) -> tuple[Float[Array, "... n"], float]:
    """Adds the bias to the products [..., n], and applies the softcap.

    Returns:
        The logits without a factor, and the factor. The logits are the product of both. For
        example, with a softcap of 30, the first is between -1 and 1, and the second is 30.
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
    """Holds the logits [t, v] of a chunk of tokens, which are `factor * unscaled`.

    Args:
        factor: The factor of the logits, a number, or [t, 1] if there is a temperature.
        unscaled: The logits without the factor, [t, v]. A very low number at outside rows, and -inf
            at banned rows.
        largest: The largest of each token's `unscaled` on all devices, [t, 1].
        relative_logits: The logits minus the largest logit of the token,
            `factor * (unscaled - largest)`, [t, v].
        total: The sum of the exponentials of `relative_logits` on this device, [t, 1].
        cap_slope: The derivative of the softcap, 1.0 or [t, v].
        product_factor: The scale divided by the temperature, a number or [t, 1]. The derivative of
            the logits with respect to the products of x and the rows is
            `cap_slope * product_factor`.
        ids: The id of each row, [1, v].
        is_inside: False at outside rows, as in `RowLogits`.
        is_banned: True at banned rows, [1, v]. None if the layer has no bias.
    """

    factor: float | Array
    unscaled: Array
    largest: Array
    relative_logits: Array
    total: Array
    cap_slope: float | Array
    product_factor: float | Array
    ids: Array
    is_inside: Array | bool
    is_banned: Array | None

    @property
    def largest_logit(self) -> Float[Array, "t 1"]:
        """The largest logit of each token on all devices."""
        return self.factor * self.largest

    @property
    def first_id(self) -> Int32[Array, ""]:
        """The id of the first row on this device, and so of the first column of the logits."""
        return self.ids[0, 0]


def chunk_logits(layer: LayerArrays, temperature: Any) -> ChunkLogits:
    """Computes the logits of a chunk, and each token's largest logit and sum of exponentials.

    `temperature` divides the logits, [t, 1]. If None, it is 1.
    """
    split = layer.split
    # The logits as `factor * unscaled`, and which rows hold which ids.
    rows = row_logits(layer)
    factor = rows.factor
    # The factor of the products of x and the rows. If there is no softcap, it equals `factor`.
    product_factor = split.scale
    if temperature is not None:
        factor = factor / temperature
        product_factor = product_factor / temperature
    # The rows of the `pad_id` and beyond the vocabulary get a very low logit.
    outside_logit = _outside_logit(rows.unscaled.dtype, factor)
    unscaled = _replace_outside_logits(layer.split, rows, outside_logit)
    # The largest number of `unscaled`, and the sum of exponentials, of each token.
    largest, total = _largest_and_total(split, factor, unscaled)
    is_banned = None
    if layer.bias is not None:
        # A bias of -inf bans the id of a row, so that the id is never predicted.
        is_banned = layer.bias[None] == -jnp.inf
        largest, total = _finite_if_all_banned(split, largest, total)
    # The checkpoint of a chunk keeps these two arrays. So the backward pass, which computes the
    # logits again, reads the logits only once.
    largest, total = checkpoint_name((largest, total), KEPT_NAME)
    cap_slope = _cap_slope(split, rows)
    # The difference is computed before the product, so that the largest logit minus itself is 0.
    # The other order, `factor * unscaled - factor * largest`, may give another number than 0,
    # because XLA may compute `factor * unscaled` without rounding it, but has rounded
    # `factor * largest`.
    relative_logits = times(factor, unscaled - largest)
    return ChunkLogits(
        factor=factor,
        unscaled=unscaled,
        largest=largest,
        relative_logits=relative_logits,
        total=total,
        cap_slope=cap_slope,
        product_factor=product_factor,
        ids=rows.ids,
        is_inside=rows.is_inside,
        is_banned=is_banned,
    )


def _outside_logit(dtype: Any, factor: float | Array) -> float | Array:
    """Returns the logit, without the factor, of the rows of the `pad_id` and beyond the vocabulary.

    The logit is so low that the probability is 0. It is finite, and so is its product with the
    factor. So the loss of a token whose label is padding is finite, and vanishes because the weight
    of the token is 0.

    Args:
        dtype: The dtype of the logits.
        factor: The factor by which the result will be multiplied, a number, or [t, 1] if there is a
            temperature.
    """
    if isinstance(factor, jax.Array):
        # The derivative with respect to the temperature divides the logit by the temperature once
        # more, and the temperature may be tiny. So the logit is 2**32 times nearer to 0 than the
        # factor alone needs, and the derivative stays finite. Because of the bound 2**92, the logit
        # is still -2**35 or lower in float32.
        factor_with_room = 2.0**32 * jax.lax.stop_gradient(factor)
        largest_factor = jnp.clip(factor_with_room, 1, 2.0**92)
    else:
        largest_factor = max(factor, 1)
    lowest_number = float(jnp.finfo(dtype).min)
    return lowest_number / (2 * largest_factor)


def _cap_slope(split: OutputSplit, rows: RowLogits) -> float | Array:
    """Computes the derivative of the softcap's tanh, or 1.0 if there is no softcap.

    The derivative is `1 - tanh**2`. At a banned row, `unscaled` is -inf and the derivative is 0.
    """
    if split.softcap is None:
        return 1.0
    finite_tanh = jnp.maximum(rows.unscaled, -1)
    return 1 - jnp.square(finite_tanh)


def _replace_outside_logits(
    split: OutputSplit, rows: RowLogits, outside_logit: Any
) -> Float[Array, "t v"]:
    """Returns `rows.unscaled` with `outside_logit` at the rows of the `pad_id` and of no id.

    `split` is how the layer is split over devices.
    """
    has_exactly_all_ids = split.mesh.empty and rows.unscaled.shape[-1] == split.vocab_size
    if split.pad_id is None or not has_exactly_all_ids:
        return jnp.where(rows.is_inside, rows.unscaled, outside_logit)
    # This device has a row for each id and no further rows, so column i of the logits belongs to id
    # i. Only the column of the `pad_id` changes, which a CPU can write in place.
    pad_column = jnp.array([[split.pad_id]], jnp.int32)
    outside_like = functools.partial(jnp.full_like, fill_value=outside_logit)
    return change_column(rows.unscaled, pad_column, outside_like, is_last_change=True)


def _largest_and_total(
    split: OutputSplit, factor: float | Array, unscaled: Float[Array, "t v"]
) -> tuple[Float[Array, "t 1"], Float[Array, "t 1"]]:
    """Computes the largest logit of each token, without the factor, and the sum of exponentials.

    The results are `largest` and `total` of `ChunkLogits`, for the logits `factor * unscaled`. On a
    GPU, this takes one pass over the logits if it can, and otherwise two.
    """

    def in_two_passes(unscaled):
        """Finds the largest number of each token, then reads all numbers again to sum."""
        # The largest logit is subtracted only to keep the exponentials small. A loss would be the
        # same with any other number, so its derivative with respect to `largest` is 0, and
        # `stop_gradient` leaves it out.
        largest = jax.lax.stop_gradient(unscaled.max(-1, keepdims=True))
        # Inside a user's shard_map, jax refuses a maximum over no axes.
        if split.vocabulary_mesh_axes:
            largest = jax.lax.pmax(largest, split.vocabulary_mesh_axes)
        relative_logits = times(factor, unscaled - largest)
        total = jnp.exp(relative_logits).sum(-1, keepdims=True)
        return largest, total

    # `in_one_pass` cannot be used in two cases. Inside a shard_map, jax cannot differentiate the
    # reduction of `in_one_pass`, as second derivatives must. And with a temperature, the factor is
    # an array, but `in_one_pass` takes a number. (Arrays vary along mesh axes only in a shard_map.)
    is_in_shard_map = split.vocabulary_mesh_axes or varying_axes(unscaled)
    if is_in_shard_map or isinstance(factor, jax.Array):
        return in_two_passes(unscaled)
    one_pass = functools.partial(in_one_pass, factor)
    return jax.lax.platform_dependent(unscaled, cuda=one_pass, default=in_two_passes)


def _finite_if_all_banned(
    split: OutputSplit, largest: Float[Array, "t 1"], total: Float[Array, "t 1"]
) -> tuple[Float[Array, "t 1"], Float[Array, "t 1"]]:
    """Returns a finite `largest`, and a `total` of 1, for tokens whose rows are all banned.

    All logits of such a token are -inf, and so is the largest, so a CPU would subtract infinity
    from infinity. With a finite largest logit and a total of 1 over all devices, the loss is
    infinite on all platforms, and the gradients are finite. Other tokens keep their numbers.
    """
    lowest = jnp.finfo(largest.dtype).min
    is_all_banned = largest <= lowest
    finite_largest = jnp.maximum(largest, lowest)
    # The totals of the devices will be added, so each device gets a share of 1.
    device_count = devices_along(split.mesh, split.vocabulary_mesh_axes)
    total_of_device = 1 / device_count
    return finite_largest, jnp.where(is_all_banned, total_of_device, total)


def in_one_pass(
    factor: float, unscaled: Float[Array, "t v"]
) -> tuple[Float[Array, "t 1"], Float[Array, "t 1"]]:
    """Finds the largest number of each token, and sums `exp(factor * (unscaled - largest))`.

    On a GPU, the time is the time to read the logits. This function reads the logits once, but a
    function that finds the largest logit first would read them twice.

    For example, the numbers 1 2 4 with the factor 1 give 4 and exp(-3) + exp(-2) + 1.
    """
    lowest = jnp.finfo(unscaled.dtype).min

    # A part is some of a token's numbers. It is held as (largest, total): the largest of these
    # numbers, and the sum of `exp(factor * (number - largest))` over them.
    def join(left, right):
        """Joins two parts to one, which has the larger of both largest numbers."""
        left_largest, left_total = left
        right_largest, right_total = right
        is_left_higher = left_largest > right_largest
        total_of_higher = jnp.where(is_left_higher, left_total, right_total)
        total_of_lower = jnp.where(is_left_higher, right_total, left_total)
        # `jnp.maximum` would find the same number. But if both numbers are equal, the derivative of
        # `jnp.maximum` is one half for each part. `where` takes it from one part, from which the
        # totals are taken, too.
        higher = jnp.where(is_left_higher, left_largest, right_largest)
        lower = jnp.where(is_left_higher, right_largest, left_largest)
        # The exponentials of the other part were relative to `lower`, and become relative to
        # `higher`.
        ratio = jnp.exp(factor * (lower - higher))
        return higher, total_of_higher + ratio * total_of_lower

    # The numbers of banned rows become finite, because the difference of two infinities is NaN.
    unscaled = jnp.clip(unscaled, lowest, -lowest)
    # Each number is a part of its own, whose total is exp(0) = 1. The ones are computed from the
    # numbers, because jax differentiates a reduction only if every operand has a derivative.
    totals = 1 + 0 * unscaled
    # An empty part, which the reduction begins with.
    empty_part = np.array([lowest, 0], unscaled.dtype)
    largest, total = jax.lax.reduce((unscaled, totals), tuple(empty_part), join, (1,))
    return largest[:, None], total[:, None]


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
    columns: Int32[Array, "t c"], values: Float[Array, "t v"], subtracted: float | Array = 0.0
) -> Float[Array, "t c"]:
    """Returns `values[i, columns[i, j]] - subtracted[i]` for token i, and 0 for no such column.

    If the vocabulary is split, a column that another device holds is out of range here, and gives
    0. So the sum over the devices is the value. For example, the values 5 6 7 of a token, with the
    columns 2 -1, give 7 0.
    """
    last = values.shape[1] - 1
    index = jnp.clip(columns, 0, last)
    # If each token reads a single column, the gradient adds to each place once. If jax is told so,
    # a GPU does without atomic additions.
    is_unique = columns.shape[1] == 1

    def read(row, row_index):
        """Reads the values of one token in some columns."""
        return row.at[row_index].get(mode="promise_in_bounds", unique_indices=is_unique)

    # `vmap` runs over the tokens, so that no index counts them. If a mesh splits the tokens, such
    # an index would reach over the parts of all devices.
    read_values = jax.vmap(read)(values, index)
    is_on_this_device = (columns >= 0) & (columns <= last)
    return jnp.where(is_on_this_device, read_values - subtracted, 0)


def columns_of_labels(chunk: ChunkLogits, labels: Int32[Array, "t c"]) -> Int32[Array, "t c"]:
    """Returns the column of each label among the logits of this device.

    A device holds the logits of consecutive ids. If another device holds the logit of a label, the
    column is out of range here.
    """
    return labels - chunk.first_id


class TokenSums(NamedTuple):
    """Holds the sums of each token over the whole vocabulary, which are equal on all devices.

    Args:
        total: [t, 1], the sum of the exponentials of the relative logits.
        label_logit: [t, c], the relative logit of each label. (It is a sum because the device that
            holds the label has its logit, and the other devices have 0.)
        mean_logit: [t, 1], the mean of the relative logits over the rows that may be predicted. It
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
    # Two functions compute the relative logit of each label, [t, c]. One reads it from the relative
    # logits, and the other computes it from the unscaled logit of the label.
    read_label_logit = functools.partial(values_in_columns, columns, chunk.relative_logits)

    def compute_label_logit():
        """Computes `factor * (unscaled - largest)` for the labels alone."""
        differences = values_in_columns(columns, chunk.unscaled, subtracted=chunk.largest)
        return times(chunk.factor, differences)

    mean_logit = None
    if row_shares is not None:
        finite = chunk.relative_logits
        if chunk.is_banned is not None:
            finite = jnp.where(chunk.is_banned, 0, finite)
        mean_logit = (finite * row_shares).sum(-1, keepdims=True)
        # The mean needs the relative logits anyway, so the label's logit is read from them. If it
        # were computed from `unscaled`, the backward pass would need both arrays, [t, v] each.
        label_logit = read_label_logit()
    elif isinstance(chunk.factor, jax.Array):
        # There is a temperature, so each token has its own factor, [t, 1]. In this case, the logit
        # is computed on all platforms.
        label_logit = compute_label_logit()
    else:
        # If the label's logit is read, all relative logits are written to memory. A CPU would write
        # them only for the few that are read, so it computes the label's logit. The total and the
        # gradients need the exponentials of the relative logits, and a TPU writes the relative
        # logits in less time than it would take to compute the exponentials a second time.
        label_logit = jax.lax.platform_dependent(cpu=compute_label_logit, default=read_label_logit)
    on_this_device = TokenSums(total=chunk.total, label_logit=label_logit, mean_logit=mean_logit)
    # A single all-reduce adds the three arrays over devices.
    return jax.lax.psum(on_this_device, split.vocabulary_mesh_axes)
