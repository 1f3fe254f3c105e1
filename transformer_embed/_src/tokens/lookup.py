"""Looks up rows of an embedding table, with rules for ids out of range and for padding."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from transformer_embed._src import arguments, conversions
from transformer_embed._src.array_types import ArrayLike, Ids, TableArray, Vectors
from transformer_embed._src.compiled import compiled, nan_where
from transformer_embed._src.partitioning import (
    check_on_mesh,
    is_explicit,
    joined_axes,
    reshard,
    typed_axes,
    varying,
    varying_axes,
)
from transformer_embed._src.tables.row_order import RowOrder, rows_of_nearest_ids
from transformer_embed._src.tables.stand_in import StandIn
from transformer_embed._src.tokens.lookup_gradient import read_or_zero

OUT_OF_RANGE = ("nan", "clip", "zero")
LOOKUP_STYLES = ("gather", "one_hot")


class LookupOptions(NamedTuple):
    """Holds the options of a lookup, which are static.

    Args:
        pad_id, out_of_range, lookup_style: As in `lookup`.
        order: Which table row holds which id. If None, row i holds id i.
    """

    pad_id: int | None
    out_of_range: str
    lookup_style: str
    order: RowOrder | None = None

    def vocab_size(self, table: Any) -> Any:
        """Returns the number of ids that have a table row; the table may have more rows."""
        return table.shape[0] if self.order is None else self.order.vocab_size


def lookup(
    table: ArrayLike,
    ids: ArrayLike,
    *,
    pad_id: int | None = None,
    out_of_range: str = "nan",
    lookup_style: str = "gather",
) -> Float[Array, "... d"]:
    """Returns the table row of each id, and NaN for ids outside the vocabulary.

    Use it in place of `table[ids]`, which returns the last table row for an id past the end and
    counts negative ids from the end. For such ids `lookup` returns NaN, so you see the mistake in
    the loss, under `jax.jit` too.

    Args:
        table: The embeddings, of a floating dtype. Shape [vocab_size, d].
        ids: The ids to look up, of any integer dtype and any shape. Negative ids are outside the
            vocabulary.
        pad_id: The id of padding. For this id, zeros are returned in place of the table row, and
            the table row gets no gradient. The id may be outside the vocabulary. If None, no id is
            padding.
        out_of_range: What is returned for an id outside the vocabulary. `"nan"` returns NaN and
            `"zero"` returns zeros, and no table row gets a gradient. `"clip"` returns the first
            table row for a negative id and the last one for an id past the end, and this row gets
            the gradient. Set `"zero"` or `"clip"` if your data has ids outside the vocabulary on
            purpose.
        lookup_style: How table rows are read. `"gather"` copies the rows. `"one_hot"` multiplies a
            matrix of zeros and ones, [..., vocab_size], with the table at full precision. Both
            styles return the same values. The cost of the product grows with the vocabulary, so set
            `"one_hot"` only for a small vocabulary on a TPU.

    Returns:
        The vectors, of the table's dtype. Shape [..., d]. If explicit mesh axes split the arrays,
        the leading axes of the result are split like the ids. The last axis is split like the
        columns of the table. (If the same mesh axis splits both the ids and the columns, it splits
        the result like the ids.)

    Raises:
        TypeError: `ids` does not hold integers, or `table` does not have a floating dtype of 16
            bits or more.
        ValueError: `table` does not have rank 2, or has no row. `out_of_range` or `lookup_style` is
            not one of the strings above. `pad_id` is outside int32.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> te.lookup(table, [1, 0, 2**32 + 1], pad_id=0).tolist()
        [[3.0, 4.0], [0.0, 0.0], [nan, nan]]

    Edge cases:
        - With `lookup_style="one_hot"`, all numbers in the table must be finite. If one table row
          has an infinite number or NaN in a channel, all results are NaN in this channel, because 0
          times infinity is NaN.
        - If `pad_id` is outside the vocabulary, this id still gives zeros.
    """
    arguments.choice("out_of_range", out_of_range, OUT_OF_RANGE)
    arguments.choice("lookup_style", lookup_style, LOOKUP_STYLES)
    pad_id = None if pad_id is None else arguments.int32("pad_id", pad_id)
    ids = arguments.as_int32("ids", ids)
    options = LookupOptions(pad_id=pad_id, out_of_range=out_of_range, lookup_style=lookup_style)
    return read_table(as_table("table", table), ids, options)


def as_table(name: str, table: ArrayLike | StandIn) -> Any:
    """Converts a table to a floating array [vocab_size, d].

    A `StandIn` is returned as it is. Inside the loss of `te.rows.value_and_grad`, it replaces the
    table, and holds some rows of the table.
    """
    if not isinstance(table, StandIn):
        # A wrapper such as nnx.Param may hold a `StandIn`.
        table = conversions.unwrapped(table)
    if isinstance(table, StandIn):
        return table
    array = arguments.as_floats(name, table)
    is_table = array.ndim == 2 and array.shape[0] != 0
    arguments.check_shape(name, array.shape, is_table, "[vocab_size, d] with at least one row")
    return array


@compiled(2)
def read_table(table: Any, ids: Ids, options: LookupOptions) -> Vectors:
    """Computes `lookup` of checked arguments, as one program for eager callers too.

    On a mesh, the dimensions of the result are split like the ids and the columns of the table.
    `table` is an array, or a `StandIn` that holds some rows of a table.
    """
    mesh = jax.typeof(ids).sharding.mesh
    if isinstance(table, StandIn):
        # A `StandIn` holds some rows of a table in its last array. The columns of this array are
        # split over the same explicit mesh axes as the columns of the table.
        *_, rows_of_stand_in = jax.tree.leaves(table)
        _, column_axes = typed_axes(rows_of_stand_in)
    else:
        # The explicit mesh axes that split the rows and the columns of the table, () for none.
        row_axes, column_axes = typed_axes(table)
        check_on_mesh("ids", ids, row_axes)
    # A tuple of mesh axes for each dimension of the ids.
    id_axes = typed_axes(ids)
    all_id_axes = joined_axes(id_axes)
    if set(all_id_axes).isdisjoint(column_axes):
        return _read_local_columns(table, ids, options)
    # Some mesh axes split both the ids and the columns. But in the result [batch, d], an axis may
    # split only one of these dimensions. For example, "x" splits the ids [batch] and the columns of
    # a table [rows, d]:
    #
    # 1. The ids are all-gathered over "x", so each device has all ids.
    # 2. Each device reads its own columns for all ids, so "x" splits the columns of the result.
    # 3. The result is resharded, so each device has all columns for its own part of the batch.
    gathered_id_axes = []
    for axes in id_axes:
        gathered_id_axes.append(tuple(axis for axis in axes if axis not in column_axes))
    ids = reshard(ids, NamedSharding(mesh, PartitionSpec(*gathered_id_axes)))
    rows = _read_local_columns(table, ids, options)
    result_column_axes = tuple(axis for axis in column_axes if axis not in all_id_axes)
    return reshard(rows, NamedSharding(mesh, PartitionSpec(*id_axes, result_column_axes)))


def _read_local_columns(table: Any, ids: Ids, options: LookupOptions) -> Vectors:
    """Computes `read_table` if no mesh axis splits both the ids and the columns of the table."""
    # A `StandIn` holds only some rows of the table, and finds the rows of the ids among them.
    if isinstance(table, StandIn):
        rows = table.gather_rows(ids, options.order)
    elif options.lookup_style == "gather":
        return _gather(table, ids, options)
    else:
        rows = _multiply_one_hot(table, ids, options)
    # Padding gets zeros, and an id out of range gets what `options.out_of_range` says.
    return _replace_special_rows(rows, table, ids, options)


def _multiply_one_hot(table: TableArray, ids: Ids, options: LookupOptions) -> Vectors:
    """Reads rows by a product of a one-hot matrix with the table.

    The product is computed at full precision, so that it returns each row as it is in the table.
    """
    num_rows = table.shape[0]
    wide_table = conversions.widened(table)
    # The row of each id. An id outside the vocabulary gets the row of the nearest id.
    index = rows_of_nearest_ids(ids, num_rows, options.order)
    one_hot = jax.nn.one_hot(index, num_rows, dtype=wide_table.dtype)
    rows = jnp.matmul(one_hot, wide_table, precision=jax.lax.Precision.HIGHEST)
    return rows.astype(table.dtype)


def _replace_special_rows(rows: Vectors, table: Any, ids: Ids, options: LookupOptions) -> Vectors:
    """Replaces rows by NaN or zeros at ids out of range, and by zeros at padding."""
    if options.out_of_range != "clip":
        # As uint32, a negative id is above any vocabulary, so one comparison finds ids beyond both
        # ends.
        vocab_size = options.vocab_size(table)
        is_outside = ids.astype(jnp.uint32) >= vocab_size
        if options.out_of_range == "nan":
            rows = nan_where(is_outside, rows)
        else:
            rows = jnp.where(is_outside[..., None], 0, rows)
    if options.pad_id is not None:
        is_padding = ids == options.pad_id
        rows = jnp.where(is_padding[..., None], 0, rows)
    return rows


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _gather(table: TableArray, ids: Ids, options: LookupOptions) -> Vectors:
    """Computes `lookup` in an array, by a gather. `_gather_jvp` has the derivative.

    An id outside the vocabulary first reads the row of the nearest id, which is then replaced.
    """
    num_rows = table.shape[0]
    # Which row holds which id. None if row i holds id i.
    order = options.order
    if is_explicit(jax.typeof(ids).sharding.mesh):
        # The devices of the mesh may have different rows. `read_or_zero` reads from all of them.
        index = rows_of_nearest_ids(ids, num_rows, order)
        rows = read_or_zero(table, index.astype(jnp.uint32))
    elif order is None:
        # The row is the id. In this mode, XLA clips an id out of range to the nearest row.
        rows = jnp.take(table, ids, axis=0, mode="clip")
    else:
        index = rows_of_nearest_ids(ids, num_rows, order)
        rows = jnp.take(table, index, axis=0, mode="clip")
    # Padding gets zeros, and an id out of range gets what `options.out_of_range` says.
    rows = _replace_special_rows(rows, table, ids, options)
    # Inside a user's shard_map, the type of the rows must say along which mesh axes they differ
    # between devices. If there are no ids, jax loses this, so the type is set here.
    return varying(rows, varying_axes(table) | varying_axes(ids))


@_gather.defjvp
def _gather_jvp(
    options: LookupOptions, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Vectors, Any]:
    """Computes the rows, and the tangents of the rows by reading the tangents of the table.

    This read is linear, so jax transposes it to get the gradient of the table (see `read_or_zero`).
    """
    table, ids = primals
    table_tangent, _ = tangents
    index = _gradient_index(table, ids, options)
    rows = _gather(table, ids, options)
    row_tangents = read_or_zero(table_tangent, index)
    return rows, row_tangents


def _gradient_index(table: TableArray, ids: Ids, options: LookupOptions) -> Array:
    """Returns the table row that gets the gradient of each id.

    If no row gets the gradient, which is so for padding and for ids that return NaN or zeros, the
    index is past the end of the table. Then `read_or_zero` reads zeros, and drops the gradient.
    """
    # Which row holds which id. None if row i holds id i.
    order = options.order
    is_clipped = options.out_of_range == "clip"
    past_the_end = np.uint32(2**32 - 1)
    if order is None and not is_clipped:
        # The row is the id. As uint32, a negative id is past the end too.
        index = ids.astype(jnp.uint32)
    else:
        # This is the row of each id. An id outside the vocabulary has the row of the nearest id,
        # which gets the gradient only if `out_of_range` is "clip".
        index = rows_of_nearest_ids(ids, table.shape[0], order).astype(jnp.uint32)
        if not is_clipped:
            is_inside = ids.astype(jnp.uint32) < options.vocab_size(table)
            index = jnp.where(is_inside, index, past_the_end)
    if options.pad_id is not None:
        index = jnp.where(ids == options.pad_id, past_the_end, index)
    return index
