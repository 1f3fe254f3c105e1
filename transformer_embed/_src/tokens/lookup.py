"""Lookup in an embedding table: rows, ids out of range, and the padding row."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from transformer_embed._src import arguments
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
    """How rows are read; static. `order` says which row holds which id. None: row i holds id i."""

    pad_id: int | None
    out_of_range: str
    lookup_style: str
    order: RowOrder | None = None

    def vocab_size(self, table: Any) -> Any:
        """The number of ids that have a row."""
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
    return look_up(as_table("table", table), ids, Reading(pad_id, out_of_range, lookup_style))


def as_table(name: str, table: ArrayLike | StandIn) -> Any:
    """A floating array of rank 2 with at least one row, or what stands in for it."""
    if not isinstance(table, StandIn):
        # A wrapper such as nnx.Param may hold one.
        table = arguments.unwrapped(table)
    if isinstance(table, StandIn):
        return table
    array = arguments.as_floats(name, table)
    is_right = array.ndim == 2 and array.shape[0] != 0
    arguments.check_shape(name, array.shape, is_right, "[vocab_size, d] with at least one row")
    return array


@compiled(2)
def look_up(table: Any, ids: Ids, reading: Reading) -> Vectors:
    """`lookup` of checked arguments, compiled for eager callers too."""
    sharding = jax.typeof(ids).sharding
    # The last leaf of a `StandIn` has the table's columns.
    columns = typed_axes(jax.tree.leaves(table)[-1])[1]
    if not isinstance(table, StandIn):
        check_on_mesh("ids", ids, typed_axes(table)[0])
    of_ids = typed_axes(ids)
    batch_axes = set(sum(of_ids, ()))
    if batch_axes.isdisjoint(columns):
        return _look_up(table, ids, reading)
    # No axis may split two dimensions: each device reads its columns for the ids of all of them.
    others = [tuple(axis for axis in axes if axis not in columns) for axes in of_ids]
    ids = reshard(ids, NamedSharding(sharding.mesh, PartitionSpec(*others)))
    rows = _look_up(table, ids, reading)
    kept = tuple(axis for axis in columns if axis not in batch_axes)
    return reshard(rows, NamedSharding(sharding.mesh, PartitionSpec(*of_ids, kept)))


def _look_up(table: Any, ids: Ids, reading: Reading) -> Vectors:
    """`look_up` of ids that are not split over the mesh axes of the table's columns."""
    if isinstance(table, StandIn):
        rows = table.gather_rows(ids, reading.order)
    elif reading.lookup_style == "gather":
        return _gather(table, ids, reading)
    else:
        # A product at full precision with a row of one 1 for each id: the table must be finite.
        wide = arguments.widened(table)
        index = nearest_rows(ids, table.shape[0], reading.order)
        one_hot = jax.nn.one_hot(index, table.shape[0], dtype=wide.dtype)
        rows = jnp.matmul(one_hot, wide, precision=jax.lax.Precision.HIGHEST).astype(table.dtype)
    return _replace_special_rows(rows, table, ids, reading)


def _replace_special_rows(rows: Vectors, table: Any, ids: Ids, reading: Reading) -> Vectors:
    """The rows, with NaN or zeros at ids out of range and zeros at padding."""
    if reading.out_of_range != "clip":
        # As uint32, a negative id lies above any vocabulary: one comparison tells both ends.
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
    """`lookup` in an array."""
    order = reading.order
    if is_explicit(jax.typeof(ids).sharding.mesh):
        rows = read_or_zero(table, nearest_rows(ids, table.shape[0], order).astype(jnp.uint32))
    else:
        # XLA's gather clips by itself.
        index = ids if order is None else nearest_rows(ids, table.shape[0], order)
        rows = jnp.take(table, index, axis=0, mode="clip")
    rows = _replace_special_rows(rows, table, ids, reading)
    # Of no ids, jax forgets along which axes of an enclosing shard_map the rows vary.
    return varying(rows, varying_axes(table) | varying_axes(ids))


@_gather.defjvp
def _gather_jvp(
    reading: Reading, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Vectors, Any]:
    (table, ids), order, is_clipped = primals, reading.order, reading.out_of_range == "clip"
    # An index past the end reads zeros, and its gradient is dropped. Negative ids become such ones.
    past = np.uint32(2**32 - 1)
    if order is None and not is_clipped:
        index = ids.astype(jnp.uint32)
    else:
        index = nearest_rows(ids, table.shape[0], order).astype(jnp.uint32)
        if not is_clipped:
            index = jnp.where(ids.astype(jnp.uint32) < reading.vocab_size(table), index, past)
    if reading.pad_id is not None:
        index = jnp.where(ids == reading.pad_id, past, index)
    return _gather(table, ids, reading), read_or_zero(tangents[0], index)
