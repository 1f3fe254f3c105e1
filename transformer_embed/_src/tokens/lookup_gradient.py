"""The gradient of a lookup: a read whose transpose sums the gradients of repeated rows."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Integer, UInt32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import TableArray, Vectors
from transformer_embed._src.partitioning import is_explicit

# Past the end for what has no row.
Index = UInt32[Array, "..."]


@jax.jit
def read_or_zero(table: TableArray, index: Index) -> Vectors:
    """`table[index]`, and zeros for an index past the end.

    It is linear in the table, and its transpose is the table's gradient.

    The transpose drops rows whose index is past the end, so the gradient needs no mask of the rows'
    size. It sums the repeats of a row in float32 or wider, because a 16-bit sum stops growing after
    some 256 of them. XLA fuses the conversion into the read, so no float32 copy of the table
    exists.
    """
    # A row's gradient is summed in this dtype, over repeats and devices.
    wide = arguments.widened(table)
    explicit = explicit_sharding(table, index)
    of_rows = jax.typeof(table).sharding.spec[:1]
    is_split = any((*of_rows, *jax.typeof(index).sharding.spec))
    # jax cannot transpose a read with it inside a user's shard_map over some of the mesh axes.
    out_sharding = explicit if is_split else None

    def read_each_repeat(table, index):
        """A read whose transpose is a scatter-add, by atomic additions on a GPU."""
        return table.at[index].get(mode="fill", fill_value=0, out_sharding=out_sharding)

    if not _can_sort_index(table, index):
        return read_each_repeat(wide, index).astype(table.dtype)
    # Without a checkpoint, the forward pass would sort the index and keep arrays of the rows' size.
    read_once = jax.checkpoint(_read_each_row_once)
    if explicit is not None:
        # Each device sums the repeats of its own part of the index.
        specs = (jax.typeof(table).sharding.spec, jax.typeof(index).sharding.spec)
        read_once = jax.shard_map(
            read_once, mesh=explicit.mesh, in_specs=specs, out_specs=explicit.spec
        )
    rows = jax.lax.platform_dependent(
        wide, index, cuda=read_once, rocm=read_once, default=read_each_repeat
    )
    return rows.astype(table.dtype)


def _can_sort_index(table: TableArray, index: Index) -> bool:
    """Whether each device has the whole vocabulary, and its part of the index while tracing.

    If the compiler may split the batch over devices, a sort would gather all of it on each device.
    """
    # A symbolic size is not an int, and an empty array has no runs.
    if not all(isinstance(size, int) and size for size in (index.size, table.size)):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    kinds = set(mesh.axis_types)
    if kinds == {jax.sharding.AxisType.Explicit}:
        # Before jax 0.10, the transpose of such a shard_map has automatic axes where explicit ones
        # are wanted.
        can_transpose = jax.__version_info__ >= (0, 10)
        return can_transpose and jax.typeof(table).sharding.spec[0] is None
    devices = jax.device_count() if mesh.empty else mesh.size
    return devices == 1 or kinds == {jax.sharding.AxisType.Manual}


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


def _sum_runs(starts: Bool[Array, "n"], rows: Float[Array, "n d"]) -> Float[Array, "n d"]:
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


def explicit_sharding(table: TableArray, ids: Integer[Array, "..."]) -> NamedSharding | None:
    """The sharding of the rows under explicit mesh axes; None under other axes.

    It is that of the ids, then that of the table's columns.
    """
    sharding = jax.typeof(ids).sharding
    if not is_explicit(sharding.mesh):
        return None
    columns = jax.typeof(table).sharding.spec[1]
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, columns))
