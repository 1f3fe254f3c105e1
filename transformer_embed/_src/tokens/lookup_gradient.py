"""The gradient of a lookup: a read whose transpose sums the gradients of repeated rows."""

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

# Past the end for what has no row.
Index = UInt32[jax.Array, "..."]


@jax.jit
def read_or_zero(table: TableArray, index: Index) -> Vectors:
    """`table[index]`, and zeros for an index past the end.

    It is linear in the table, and its transpose is the table's gradient.

    The transpose drops rows whose index is past the end, so the gradient needs no mask of the rows'
    size. It sums the repeats of a row in float32 or wider, because a 16-bit sum stops growing after
    some 256 of them. XLA fuses the conversion into the read, so no float32 copy of the table
    exists.
    """
    mesh = jax.typeof(index).sharding.mesh
    by_dimension, (rows, columns) = typed_axes(index), typed_axes(table)
    if any((rows, columns, *by_dimension)):
        return read_from_shards(mesh, rows, columns, by_dimension, table, index)
    # A row's gradient is summed in this dtype, over repeats and devices.
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
    by_dimension: Sequence[Axes],
    table: TableArray,
    index: Index,
) -> Vectors:
    """`read_or_zero` in a table that is split over a mesh, with these axes.

    Every shard looks up all of the index, and zeros are added for the rows of the others.
    """
    gathered = [tuple(axis for axis in axes if axis in rows) for axes in by_dimension]
    elsewhere = tuple(axis for axis in rows if axis not in sum(by_dimension, ()))

    def read(shard, index):
        # Unsigned, so that an index before the shard is past its end too.
        first = jnp.uint32(index_along(rows) * len(shard))
        values = read_or_zero(shard, all_gather(index, gathered) - first).astype(table.dtype)
        return reduce_scatter(jax.lax.psum(values, elsewhere), gathered)

    in_specs = PartitionSpec(rows, columns), PartitionSpec(*by_dimension)
    read_all = on_each_device(mesh, read, in_specs, PartitionSpec(*by_dimension, columns))
    return read_all(arguments.widened(table), index)


def _read_each_repeat(table: TableArray, index: Index) -> Vectors:
    """A read whose transpose is a scatter-add, by atomic additions on a GPU."""
    return table.at[index].get(mode="fill", fill_value=0)


def _can_sort_index(table: TableArray, index: Index) -> bool:
    """Whether each device has its part of the index while tracing.

    If the compiler may split the batch over devices, a sort would gather all of it on each device.
    """
    # A symbolic size is not an int, and an empty array has no runs.
    if not all(isinstance(size, int) and size for size in (index.size, table.size)):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or jax.sharding.AxisType.Auto not in mesh.axis_types


def _read_each_row_once(table: TableArray, index: Index) -> Vectors:
    """A read whose transpose sums the rows of each index and writes each sum once.

    It sorts the rows by index, so the gradient on a GPU is the same from run to run, and its time
    does not depend on how often an index repeats.
    """
    vocab_size, size = table.shape[0], index.size
    order = jnp.argsort(index.reshape(-1), stable=True)
    ordered = index.reshape(-1)[order]
    # The first row starts a run, whatever its index: it differs from its own plus one.
    starts = jnp.diff(ordered, prepend=ordered[:1] + 1) != 0
    ends = jnp.roll(starts, -1)
    # All are distinct, also those past the end.
    once = jnp.where(
        ends & (ordered < vocab_size), ordered, vocab_size + jnp.arange(size, dtype=jnp.uint32)
    )
    at_ends = table.at[once].get(mode="fill", fill_value=0, unique_indices=True)
    (spread,) = jax.linear_transpose(functools.partial(_sum_runs, starts), at_ends)(at_ends)
    rows = (
        jnp.zeros_like(spread).at[order].add(spread, mode="promise_in_bounds", unique_indices=True)
    )
    return rows.reshape(*index.shape, table.shape[1])


def _sum_runs(
    starts: Bool[jax.Array, "n"], rows: Float[jax.Array, "n d"]
) -> Float[jax.Array, "n d"]:
    """For each row, the sum of its run up to that row. `starts` says where runs start."""

    def join(left, right):
        (left_starts, left_sum), (right_starts, right_sum) = left, right
        starts_anew = jax.lax.broadcast_in_dim(right_starts, right_sum.shape, (0, 1))
        # Not with jax.numpy functions: each call is traced and transposed separately, which took
        # most of the tracing time of a step.
        return jax.lax.bitwise_or(left_starts, right_starts), jax.lax.select(
            starts_anew, right_sum, jax.lax.add(left_sum, right_sum)
        )

    return jax.lax.associative_scan(join, (starts[:, None], rows))[1]
