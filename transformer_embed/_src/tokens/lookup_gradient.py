"""Reads rows of a table so that the transpose sums the gradients of repeated rows."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, UInt32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import TableArray, Vectors
from transformer_embed._src.partitioning import (
    Axes,
    all_gather,
    index_along,
    on_each_device,
    reduce_scatter,
    typed_axes,
)

# The row that each place reads. What has no row has an index past the end.
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
    rows, columns = typed_axes(table)
    if any((rows, columns, *index_axes)):
        return read_from_shards(mesh, rows, columns, index_axes, table, index)
    # The gradient of a row is summed in this dtype, over repeats and devices.
    wide = arguments.widened(table)
    if not _can_sort_index(table, index):
        return _read_each_repeat(wide, index).astype(table.dtype)
    # Without a checkpoint, the forward pass would sort the index and keep arrays of the rows' size.
    read_once = jax.checkpoint(_read_each_row_once)
    values = jax.lax.platform_dependent(
        wide, index, cuda=read_once, rocm=read_once, default=_read_each_repeat
    )
    return values.astype(table.dtype)


def read_from_shards(
    mesh: Any,
    rows: Axes,
    columns: Axes,
    index_axes: Sequence[Axes],
    table: TableArray,
    index: Index,
) -> Vectors:
    """Computes `read_or_zero` in a table that is split over a mesh.

    Each device looks up the whole index in its own shard. A row of another device reads as zeros,
    so the sum over the devices is the row.

    Args:
        mesh: The devices.
        rows, columns: The mesh axes that split the table.
        index_axes: The mesh axes that split each dimension of the index.
        table: The table.
        index: The rows to read.
    """
    # An axis that splits both the rows and the index: the index is gathered, and the sums return to
    # the parts of the index.
    gathered = [tuple(axis for axis in axes if axis in rows) for axes in index_axes]
    # An axis that splits the rows alone: every device gets the sums.
    summed = tuple(axis for axis in rows if axis not in sum(index_axes, ()))

    def read(shard, index):
        # The difference is unsigned, so an index before the shard is past the end too.
        first_row = jnp.uint32(index_along(rows) * len(shard))
        shard_index = all_gather(index, gathered) - first_row
        values = read_or_zero(shard, shard_index).astype(table.dtype)
        return reduce_scatter(jax.lax.psum(values, summed), gathered)

    in_specs = (PartitionSpec(rows, columns), PartitionSpec(*index_axes))
    out_spec = PartitionSpec(*index_axes, columns)
    read_all = on_each_device(mesh, read, in_specs, out_spec)
    return read_all(arguments.widened(table), index)


def _read_each_repeat(table: TableArray, index: Index) -> Vectors:
    """Reads rows. The transpose is a scatter-add, which a GPU computes by atomic additions."""
    return table.at[index].get(mode="fill", fill_value=0)


def _can_sort_index(table: TableArray, index: Index) -> bool:
    """Returns whether each device has its own part of the index while tracing.

    If the compiler may split the batch over devices, a sort would gather the whole batch on each
    device.
    """
    # A symbolic size is not an int, and an empty array has no runs.
    if not all(isinstance(size, int) and size for size in (index.size, table.size)):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or jax.sharding.AxisType.Auto not in mesh.axis_types


def _read_each_row_once(table: TableArray, index: Index) -> Vectors:
    """Reads rows. The transpose sums the gradients of each index and writes each sum once.

    The gradients are sorted by index, so on a GPU the sums are the same from run to run, and the
    time does not depend on how often an index repeats.
    """
    row_count = table.shape[0]
    size = index.size
    order = jnp.argsort(index.reshape(-1), stable=True)
    ordered = index.reshape(-1)[order]
    # A run is the places of one index. The first place starts a run, because its index differs from
    # the index plus one, which is put before it.
    is_start = jnp.diff(ordered, prepend=ordered[:1] + 1) != 0
    is_end = jnp.roll(is_start, -1)
    # Only the end of a run reads a row. The other places read past the end of the table, each at
    # another index, so that no two indices are equal.
    past_the_end = row_count + jnp.arange(size, dtype=jnp.uint32)
    unique_ends = jnp.where(is_end & (ordered < row_count), ordered, past_the_end)
    end_rows = table.at[unique_ends].get(mode="fill", fill_value=0, unique_indices=True)
    # The transpose of a sum over a run copies the row at the end of the run to all of its places.
    sum_runs = functools.partial(_sum_runs, is_start)
    (run_rows,) = jax.linear_transpose(sum_runs, end_rows)(end_rows)
    zeros = jnp.zeros_like(run_rows)
    rows = zeros.at[order].add(run_rows, mode="promise_in_bounds", unique_indices=True)
    return rows.reshape(*index.shape, table.shape[1])


def _sum_runs(
    is_start: Bool[jax.Array, "n"], rows: Float[jax.Array, "n d"]
) -> Float[jax.Array, "n d"]:
    """Sums, for each row, the rows of its run up to this row.

    `is_start` says which rows start a run.
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
