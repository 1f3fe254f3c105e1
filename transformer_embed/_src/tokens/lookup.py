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
    reshard,
    typed_axes,
    varying,
    varying_axes,
)
from transformer_embed._src.tables.row_order import RowOrder, nearest_rows
from transformer_embed._src.tables.stand_in import StandIn
from transformer_embed._src.tokens.lookup_gradient import read_or_zero

OUT_OF_RANGE = ("nan", "clip", "zero")
LOOKUP_STYLES = ("gather", "one_hot")


class Reading(NamedTuple):
    """How rows are read, which is static.

    Args:
        pad_id, out_of_range, lookup_style: As in `lookup`.
        order: Which row holds which id. If None, row i holds id i.
    """

    pad_id: int | None
    out_of_range: str
    lookup_style: str
    order: RowOrder | None = None

    def vocab_size(self, table: Any) -> Any:
        """Returns the number of ids that have a row."""
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
    counts negative ids from the end. With NaN you see the mistake in the loss, under `jax.jit` too.

    Args:
        table: The embeddings, [vocab_size, d], of a floating dtype.
        ids: The ids to look up, [...], of any integer dtype. Negative ids are outside the
            vocabulary.
        pad_id: The id of padding. It returns zeros, whatever the table holds, and its table row
            gets no gradient. The id may lie outside the vocabulary. If None, no id is padding.
        out_of_range: What an id outside the vocabulary returns. `"nan"` returns NaN and gives no
            gradient. `"zero"` returns zeros and gives no gradient. `"clip"` returns the nearest
            table row, which gets the gradient. Set `"zero"` or `"clip"` if your data has such ids
            on purpose.
        lookup_style: How table rows are read. `"gather"` copies them. `"one_hot"` multiplies a
            matrix of zeros and ones, [..., vocab_size], with the table at full precision. The
            values are the same. The product costs more for a larger vocabulary, so set
            `"one_hot"` only for a small vocabulary on a TPU.

    Returns:
        The vectors, [..., d], of the table's dtype. Under explicit mesh axes, the leading axes are
        split like the ids. The last axis is split like the columns of the table, over those mesh
        axes that do not split the ids.

    Raises:
        TypeError: ids are not integers; or the table does not have a floating dtype of 16 bits or
            more.
        ValueError: the table does not have rank 2, or has no row; `out_of_range` or `lookup_style`
            is unknown; or `pad_id` is outside int32.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> te.lookup(table, [1, 0, 2**32 + 1], pad_id=0).tolist()
        [[3.0, 4.0], [0.0, 0.0], [nan, nan]]

    Edge cases:
        - With `lookup_style="one_hot"`, the table must be finite. If one table row has an infinite
          number or NaN in a channel, all results are NaN in this channel, because 0 times infinity
          is NaN.
        - An id equal to `pad_id` gives zeros even if it lies outside the vocabulary.
    """
    arguments.choice("out_of_range", out_of_range, OUT_OF_RANGE)
    arguments.choice("lookup_style", lookup_style, LOOKUP_STYLES)
    pad_id = None if pad_id is None else arguments.int32("pad_id", pad_id)
    ids = arguments.as_int32("ids", ids)
    reading = Reading(pad_id=pad_id, out_of_range=out_of_range, lookup_style=lookup_style)
    return read_table(as_table("table", table), ids, reading)


def as_table(name: str, table: ArrayLike | StandIn) -> Any:
    """Converts a table to a floating array [vocab_size, d]. A `StandIn` is returned as it is."""
    if not isinstance(table, StandIn):
        # A wrapper such as nnx.Param may hold a `StandIn`.
        table = conversions.unwrapped(table)
    if isinstance(table, StandIn):
        return table
    array = arguments.as_floats(name, table)
    is_right = array.ndim == 2 and array.shape[0] != 0
    arguments.check_shape(name, array.shape, is_right, "[vocab_size, d] with at least one row")
    return array


@compiled(2)
def read_table(table: Any, ids: Ids, reading: Reading) -> Vectors:
    """Computes `lookup` of checked arguments. It is compiled for eager callers too."""
    sharding = jax.typeof(ids).sharding
    # The last leaf of a `StandIn` has the table's columns.
    columns = typed_axes(jax.tree.leaves(table)[-1])[1]
    if not isinstance(table, StandIn):
        check_on_mesh("ids", ids, typed_axes(table)[0])
    id_axes = typed_axes(ids)
    batch_axes = set(sum(id_axes, ()))
    if batch_axes.isdisjoint(columns):
        return _read_local_columns(table, ids, reading)
    # No mesh axis may split two dimensions of the result. So along the axes of the columns, each
    # device gets the ids of all devices, and reads its own columns of their rows.
    gathered_axes = [tuple(axis for axis in axes if axis not in columns) for axes in id_axes]
    ids = reshard(ids, NamedSharding(sharding.mesh, PartitionSpec(*gathered_axes)))
    rows = _read_local_columns(table, ids, reading)
    column_axes = tuple(axis for axis in columns if axis not in batch_axes)
    return reshard(rows, NamedSharding(sharding.mesh, PartitionSpec(*id_axes, column_axes)))


def _read_local_columns(table: Any, ids: Ids, reading: Reading) -> Vectors:
    """Computes `read_table` for ids that the mesh axes of the table's columns do not split."""
    if isinstance(table, StandIn):
        rows = table.gather_rows(ids, reading.order)
    elif reading.lookup_style == "gather":
        return _gather(table, ids, reading)
    else:
        # The product is computed at full precision, so that it returns the row itself.
        wide = conversions.widened(table)
        index = nearest_rows(ids, table.shape[0], reading.order)
        one_hot = jax.nn.one_hot(index, table.shape[0], dtype=wide.dtype)
        rows = jnp.matmul(one_hot, wide, precision=jax.lax.Precision.HIGHEST).astype(table.dtype)
    return _replace_special_rows(rows, table, ids, reading)


def _replace_special_rows(rows: Vectors, table: Any, ids: Ids, reading: Reading) -> Vectors:
    """Replaces rows by NaN or zeros at ids out of range, and by zeros at padding."""
    if reading.out_of_range != "clip":
        # As uint32, a negative id is above any vocabulary, so one comparison finds ids beyond both
        # ends.
        outside = ids.astype(jnp.uint32) >= reading.vocab_size(table)
        if reading.out_of_range == "nan":
            rows = nan_where(outside, rows)
        else:
            rows = jnp.where(outside[..., None], 0, rows)
    if reading.pad_id is not None:
        rows = jnp.where((ids == reading.pad_id)[..., None], 0, rows)
    return rows


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _gather(table: TableArray, ids: Ids, reading: Reading) -> Vectors:
    """Computes `lookup` in an array, by a gather."""
    order = reading.order
    if is_explicit(jax.typeof(ids).sharding.mesh):
        rows = read_or_zero(table, nearest_rows(ids, table.shape[0], order).astype(jnp.uint32))
    else:
        # XLA's gather clips the index itself, so the ids are not clipped before.
        index = ids if order is None else nearest_rows(ids, table.shape[0], order)
        rows = jnp.take(table, index, axis=0, mode="clip")
    rows = _replace_special_rows(rows, table, ids, reading)
    # If there are no ids, jax forgets along which axes of an enclosing shard_map the rows vary.
    return varying(rows, varying_axes(table) | varying_axes(ids))


@_gather.defjvp
def _gather_jvp(
    reading: Reading, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Vectors, Any]:
    """Computes the rows, and the tangents of the rows by a read that is linear in the table."""
    table, ids = primals
    table_tangent, _ = tangents
    index = _gradient_index(table, ids, reading)
    return _gather(table, ids, reading), read_or_zero(table_tangent, index)


def _gradient_index(table: TableArray, ids: Ids, reading: Reading) -> Array:
    """Returns the row that gets the gradient of each id, or an index past the end.

    An index past the end reads zeros as a tangent, and its gradient is dropped.
    """
    order = reading.order
    is_clipped = reading.out_of_range == "clip"
    past_the_end = np.uint32(2**32 - 1)
    if order is None and not is_clipped:
        # As uint32, a negative id is past the end too.
        index = ids.astype(jnp.uint32)
    else:
        index = nearest_rows(ids, table.shape[0], order).astype(jnp.uint32)
        if not is_clipped:
            is_inside = ids.astype(jnp.uint32) < reading.vocab_size(table)
            index = jnp.where(is_inside, index, past_the_end)
    if reading.pad_id is not None:
        index = jnp.where(ids == reading.pad_id, past_the_end, index)
    return index
