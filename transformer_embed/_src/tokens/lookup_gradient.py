"""Reads rows of a table, and sums the gradients of a row that is read several times.

A place is an element of the index: it reads one row. The gradient of the table is the transpose of
the read, because the read is linear in the table.

Shapes are written with these letters:

    v  rows of the table
    d  columns of the table
    n  places, in the order of their row numbers
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, UInt32

from transformer_embed._src import conversions
from transformer_embed._src.array_types import TableArray, Vectors
from transformer_embed._src.partitioning import (
    Axes,
    all_gather,
    first_index,
    on_each_device,
    reduce_scatter,
    typed_axes,
)

# The number of the row that each place reads. A number past the end of the table reads zeros.
Index = UInt32[jax.Array, "..."]


@jax.jit
def read_or_zero(table: TableArray, index: Index) -> Vectors:
    """Returns `table[index]`, and zeros for an index past the end.

    The function is linear in the table, and the transpose is the gradient of the table.

    The transpose drops rows whose index is past the end, so the gradient needs no mask of the size
    of all rows that are read. It sums the repeats of a row in float32 or wider, because a sum in 16
    bits stops growing after some 256 of them. XLA fuses the conversion into the read, so no float32
    copy of the table exists.
    """
    mesh = jax.typeof(index).sharding.mesh
    index_axes = typed_axes(index)
    row_axes, column_axes = typed_axes(table)
    if any((row_axes, column_axes, *index_axes)):
        return read_from_shards(mesh, row_axes, column_axes, index_axes, table, index)
    # The transpose sums the gradients of a row in this dtype.
    wide_table = conversions.widened(table)
    if not _can_sort_index(table, index):
        return _read_each_repeat(wide_table, index).astype(table.dtype)
    # Without a checkpoint, the forward pass would sort the index and keep arrays of the rows' size.
    read_once = jax.checkpoint(_read_each_row_once)
    values = jax.lax.platform_dependent(
        wide_table, index, cuda=read_once, rocm=read_once, default=_read_each_repeat
    )
    return values.astype(table.dtype)


def read_from_shards(
    mesh: Any,
    row_axes: Axes,
    column_axes: Axes,
    index_axes: Sequence[Axes],
    table: TableArray,
    index: Index,
) -> Vectors:
    """Computes `read_or_zero` in a table that is split over a mesh.

    Each device looks up the whole index in its own shard. A row of another device reads as zeros,
    so the sum over the devices is the row.

    Args:
        mesh: The devices.
        row_axes, column_axes: The mesh axes that split the rows and the columns of the table.
        index_axes: The mesh axes that split each dimension of the index.
        table: The table.
        index: The rows to read.
    """
    # If a mesh axis splits both the rows and the index, each device reads for the places of all
    # devices along it. So the index is all-gathered, and a reduce-scatter gives each device the
    # sums for its own places.
    shared_axes = [tuple(axis for axis in axes if axis in row_axes) for axes in index_axes]
    # If a mesh axis splits the rows alone, all devices along it have the same places, and each of
    # them gets the sums.
    summed_axes = tuple(axis for axis in row_axes if axis not in sum(index_axes, ()))

    def read(shard, index):
        # The difference is unsigned, so an index before the shard is past the end too.
        first_row = jnp.uint32(first_index(row_axes, len(shard)))
        shard_index = all_gather(index, shared_axes) - first_row
        values = read_or_zero(shard, shard_index).astype(table.dtype)
        return reduce_scatter(jax.lax.psum(values, summed_axes), shared_axes)

    in_specs = (PartitionSpec(row_axes, column_axes), PartitionSpec(*index_axes))
    out_spec = PartitionSpec(*index_axes, column_axes)
    read_all = on_each_device(mesh, read, in_specs, out_spec)
    return read_all(conversions.widened(table), index)


def _read_each_repeat(table: TableArray, index: Index) -> Vectors:
    """Reads rows, as often as the index has them.

    The transpose is a scatter-add, which a GPU computes by atomic additions.
    """
    return table.at[index].get(mode="fill", fill_value=0)


def _can_sort_index(table: TableArray, index: Index) -> bool:
    """Returns whether `_read_each_row_once` may sort the index.

    This is so if the compiler does not split the batch over devices later. If it did, a sort would
    gather the whole batch on each device.
    """
    # A symbolic size is not an int, and an empty array has no runs.
    if not all(isinstance(size, int) and size for size in (index.size, table.size)):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or jax.sharding.AxisType.Auto not in mesh.axis_types


def _read_each_row_once(table: TableArray, index: Index) -> Vectors:
    """Reads each row once, and copies it to all places that want it.

    The transpose sums the gradients of all places of a row, and writes each sum once. It sorts the
    places by row, so on a GPU the sums are the same from run to run, and the time does not depend
    on how often a row is read.
    """
    row_count = table.shape[0]
    size = index.size
    order = jnp.argsort(index.reshape(-1), stable=True)
    ordered = index.reshape(-1)[order]
    # A run is the places of one row, which are neighbours in this order. The first place starts a
    # run, because `prepend` puts a number before it that differs from its own.
    is_start = jnp.diff(ordered, prepend=ordered[:1] + 1) != 0
    is_end = jnp.roll(is_start, -1)
    # Only the last place of a run reads a row. The other places read past the end of the table,
    # each at another index. So no two indices are equal, as `unique_indices` promises, and the
    # transpose needs no atomic additions.
    past_the_end = row_count + jnp.arange(size, dtype=jnp.uint32)
    unique_ends = jnp.where(is_end & (ordered < row_count), ordered, past_the_end)
    end_rows = table.at[unique_ends].get(mode="fill", fill_value=0, unique_indices=True)
    # This copies the row from the last place of a run to all places of the run. The copy is written
    # as the transpose of a sum over the run, so the transpose of the copy is that sum.
    sum_runs = functools.partial(_sum_runs, is_start)
    (run_rows,) = jax.linear_transpose(sum_runs, end_rows)(end_rows)
    zeros = jnp.zeros_like(run_rows)
    rows = zeros.at[order].add(run_rows, mode="promise_in_bounds", unique_indices=True)
    return rows.reshape(*index.shape, table.shape[1])


def _sum_runs(
    is_start: Bool[jax.Array, "n"], rows: Float[jax.Array, "n d"]
) -> Float[jax.Array, "n d"]:
    """Computes the cumulative sums of rows, which start anew where a run starts.

    `is_start` says which rows start a run. The last sum of a run is the sum over the run.
    """

    def join(left, right):
        """Joins (has_start, total) of two parts that follow each other."""
        left_has_start, left_total = left
        right_has_start, right_total = right
        starts_anew = jax.lax.broadcast_in_dim(right_has_start, right_total.shape, (0, 1))
        # Functions of jax.numpy are not used here: each call is traced and transposed separately,
        # which took most of the tracing time of a step.
        total = jax.lax.select(starts_anew, right_total, jax.lax.add(left_total, right_total))
        return jax.lax.bitwise_or(left_has_start, right_has_start), total

    _, totals = jax.lax.associative_scan(join, (is_start[:, None], rows))
    return totals
