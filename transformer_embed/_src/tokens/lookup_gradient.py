"""Reads rows of a table, and sums the gradients of a row that is read several times.

A read is linear in the table, so jax transposes the read to get the gradient of the table. Here, a
place is an element of the index. Each place reads one row, and several places may read the same
row.

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
    joined_axes,
    on_each_device,
    reduce_scatter,
    typed_axes,
)

# The number of the row that each place reads. A number past the end of the table reads zeros.
Index = UInt32[jax.Array, "..."]


@jax.jit
def read_or_zero(table: TableArray, index: Index) -> Vectors:
    """Returns `table[index]`, and zeros where the index is past the end of the table.

    jax computes the gradient of the table by the transpose of this function. The transpose drops
    the gradients of elements whose index is past the end. So if some ids must not change the table,
    pass an index past the end for them. This is cheaper than to multiply the gradients of all
    elements, [..., d], by a mask.
    """
    mesh = jax.typeof(index).sharding.mesh
    # For each dimension, the explicit mesh axes that split it, () for none.
    index_axes = typed_axes(index)
    row_axes, column_axes = typed_axes(table)
    is_split = any((row_axes, column_axes, *index_axes))
    if is_split:
        return read_from_shards(mesh, row_axes, column_axes, index_axes, table, index)
    # The transpose sums the gradients of a row in the dtype of `wide_table`, float32 or wider,
    # because a sum in 16 bits stops growing after some 256 equal numbers. XLA fuses the conversion
    # into the read, so no float32 copy of the table exists.
    wide_table = conversions.widened(table)
    if not _can_sort_index(table, index):
        return _read_with_repeats(wide_table, index).astype(table.dtype)
    # On a GPU, `_read_each_row_once` gives gradients that are the same from run to run. To do so,
    # it sorts the index, for the backward pass alone. Without the checkpoint, the forward pass
    # would also sort, and would keep arrays as large as all rows that are read.
    read_once = jax.checkpoint(_read_each_row_once)
    rows = jax.lax.platform_dependent(
        wide_table, index, cuda=read_once, rocm=read_once, default=_read_with_repeats
    )
    return rows.astype(table.dtype)


def read_from_shards(
    mesh: Any,
    row_axes: Axes,
    column_axes: Axes,
    index_axes: Sequence[Axes],
    table: TableArray,
    index: Index,
) -> Vectors:
    """Computes `read_or_zero` in a table that is split over a mesh.

    An element of the index is called a place. It reads one row. Each device looks up places in its
    own shard. A row of another device reads as zeros, so the sum over the devices is the row.

    Args:
        mesh: The devices.
        row_axes, column_axes: The mesh axes that split the rows and the columns of the table.
        index_axes: The mesh axes that split each dimension of the index.
        table: The table.
        index: The rows to read.
    """
    # Some mesh axes split both the rows and the index. Along these axes, each shard must be read
    # for the places of all devices. So the index is all-gathered over them. Afterwards a
    # reduce-scatter adds the rows of the devices, and returns to each device the rows of its own
    # places.
    shared_axes = []
    for axes in index_axes:
        shared_axes.append(tuple(axis for axis in axes if axis in row_axes))
    # Other mesh axes split only the rows. Along these axes, all devices have the same places, so a
    # sum over the devices is enough.
    all_index_axes = joined_axes(index_axes)
    summed_axes = tuple(axis for axis in row_axes if axis not in all_index_axes)

    def read(shard, index):
        """Reads the rows of this device's places from all shards."""
        # The index of a place into the shard. A row after the shard is past the end. So is a row
        # before the shard, because the difference is unsigned and wraps to a large number.
        first_row = jnp.uint32(first_index(row_axes, len(shard)))
        shard_index = all_gather(index, shared_axes) - first_row
        rows_or_zeros = read_or_zero(shard, shard_index).astype(table.dtype)
        rows = jax.lax.psum(rows_or_zeros, summed_axes)
        return reduce_scatter(rows, shared_axes)

    table_spec = PartitionSpec(row_axes, column_axes)
    index_spec = PartitionSpec(*index_axes)
    row_spec = PartitionSpec(*index_axes, column_axes)
    read_on_each_device = on_each_device(
        mesh, read, in_specs=(table_spec, index_spec), out_specs=row_spec
    )
    return read_on_each_device(conversions.widened(table), index)


def _read_with_repeats(table: TableArray, index: Index) -> Vectors:
    """Reads the row of each element of the index, so a row may be read several times.

    The transpose is a scatter-add, which a GPU computes by atomic additions.
    """
    return table.at[index].get(mode="fill", fill_value=0)


def _can_sort_index(table: TableArray, index: Index) -> bool:
    """Returns whether `_read_each_row_once` may sort the index.

    The sizes must be known and not 0. And the compiler must not split the batch over devices later,
    because a sort would then gather the whole batch on each device.
    """
    for size in (index.size, table.size):
        is_symbolic = not isinstance(size, int)
        if is_symbolic or size == 0:
            return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or jax.sharding.AxisType.Auto not in mesh.axis_types


def _read_each_row_once(table: TableArray, index: Index) -> Vectors:
    """Reads each row once, and copies it to all places that read it.

    The transpose sums the gradients of all places of a row, and writes each sum once. It sorts the
    places by row, so on a GPU the sums are the same from run to run, and the time does not depend
    on how often a row is read.

    For example, the index 7 2 7 reads rows r7 r2 r7 of a table of 8 rows:

        index               7     2     7
        ordered_index       2     7     7      a run of one place, and a run of two
        is_run_start        True  True  False
        is_run_end          True  False True
        unique_index        2     9     7      9 is past the end
        rows_at_run_ends    r2    0     r7
        ordered_rows        r2    r7    r7
        rows                r7    r2    r7
    """
    row_count = table.shape[0]
    place_count = index.size
    order = jnp.argsort(index.reshape(-1), stable=True)
    ordered_index = index.reshape(-1)[order]
    # A run is all places of one row, which are neighbours in this order. A run starts where the row
    # differs from the row before. The first place starts a run, so another number is put before it.
    other_than_first = ordered_index[:1] + 1
    is_run_start = jnp.diff(ordered_index, prepend=other_than_first) != 0
    # A run ends where the next place starts a run. The last place of all gets the first value,
    # which is True.
    is_run_end = jnp.roll(is_run_start, -1)
    # Only the last place of each run reads a row. All other places read zeros: place i of n reads
    # row `row_count + i`, which is past the end of the table. (In the example, place 1 reads row
    # 9.) So all indices differ, as `unique_indices` promises, and the transpose needs no atomic
    # additions.
    past_the_end = row_count + jnp.arange(place_count, dtype=jnp.uint32)
    reads_row = is_run_end & (ordered_index < row_count)
    unique_index = jnp.where(reads_row, ordered_index, past_the_end)
    rows_at_run_ends = table.at[unique_index].get(mode="fill", fill_value=0, unique_indices=True)
    # `sum_runs` adds all places of a run, and puts the sum at the last place of the run. Its
    # transpose does the reverse: it copies the row at the last place of a run to all places of the
    # run. jax makes this copy from the sum, so the gradient of the copy is computed by the sum.
    sum_runs = functools.partial(_sum_runs, is_run_start)
    copy_to_run = jax.linear_transpose(sum_runs, rows_at_run_ends)
    (ordered_rows,) = copy_to_run(rows_at_run_ends)
    # The rows return to the order of the index: row n belongs to the place `order[n]`.
    zeros = jnp.zeros_like(ordered_rows)
    rows = zeros.at[order].add(ordered_rows, mode="promise_in_bounds", unique_indices=True)
    return rows.reshape(*index.shape, table.shape[1])


def _sum_runs(
    is_run_start: Bool[jax.Array, "n"], rows: Float[jax.Array, "n d"]
) -> Float[jax.Array, "n d"]:
    """Computes the cumulative sums of rows, which start anew where a run starts.

    So the last sum of a run is the sum over the run. For example, the rows a, b, c in a run of two
    and a run of one give a, a + b, c.
    """

    def join(left, right):
        """Joins two parts that follow each other: (has a run start, sum since the last start)."""
        left_has_start, left_sum = left
        right_has_start, right_sum = right
        # Functions of jax.lax are called, because each call of a jax.numpy function is traced and
        # transposed separately, which took most of the tracing time of a step.
        # The flags [n, 1] are repeated along the columns, which makes them [n, d], like the sums.
        starts_anew = jax.lax.broadcast_in_dim(right_has_start, right_sum.shape, (0, 1))
        joined_sum = jax.lax.select(starts_anew, right_sum, jax.lax.add(left_sum, right_sum))
        return jax.lax.bitwise_or(left_has_start, right_has_start), joined_sum

    _, sums = jax.lax.associative_scan(join, (is_run_start[:, None], rows))
    return sums
