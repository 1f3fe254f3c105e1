"""Rows of a cut table on a mesh, collected by a sum over the shards: each row is nonzero in only
one of them.

The table's rows lie in vocabulary order, a contiguous block on each device.

    a device that holds some rows                     devices that want rows ids of all of them
    <--- all-gather -----  ids, each of its own part of the batch its rows, zeros for others ----
    sum ----------->  all rows                              (`gather_from_shards`)

In training by rows (`take_replicated`), every device gets all distinct rows of the whole batch, and
reads those of its own part of the batch. Their gradient is summed over the devices that the batch
is split over, and each device then updates the rows that it holds (`rows_of_this_shard`). So what a
device sends grows with the whole batch, which is cheaper than an exchange up to some dozens of
devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import in_compute_dtype, read_or_zero
from transformer_embed._src.functional.partitioning import (
    Axes,
    array_axes,
    index_along,
    partition_spec,
    reshard,
)
from transformer_embed._src.rows.gathered_rows import GatheredRows

if TYPE_CHECKING:
    from transformer_embed._src.sharded.sharded import Sharded


@jax.jit
def gather_from_shards(table: "Sharded", ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """Every shard looks up the ids that it holds and reads zeros for the others; a sum over the
    shards collects the rows."""
    row_axes, column_axes = table.axes
    split = array_axes(table.sharding.mesh, table.batch_axes, ids, ids.ndim)
    if set(column_axes) & {axis for axes in split for axis in axes}:
        raise ValueError(
            arguments.wanted(
                "table",
                "columns over a mesh axis that the ids do not use",
                f"both over {column_axes!r}",
            )
        )
    by_dimension = [tuple(axis for axis in axes if axis in row_axes) for axes in split]
    elsewhere = tuple(axis for axis in row_axes if not any(axis in axes for axes in by_dimension))

    def read(shard, ids):
        for dimension, axes in enumerate(by_dimension):
            ids = jax.lax.all_gather(ids, axes, axis=dimension, tiled=True) if axes else ids
        row = table.positions(ids) - index_along(row_axes) * shard.shape[0]
        # Unsigned, for a negative index would count from the end.
        rows = read_or_zero(shard, row.astype(jnp.uint32)).astype(table.dtype)
        rows = jax.lax.psum(rows, elsewhere) if elsewhere else rows
        for dimension, axes in enumerate(by_dimension):
            rows = (
                jax.lax.psum_scatter(rows, axes, scatter_dimension=dimension, tiled=True)
                if axes
                else rows
            )
        return rows

    specs = (partition_spec(row_axes, column_axes), partition_spec(*split))
    return jax.shard_map(
        read,
        mesh=table.sharding.mesh,
        in_specs=specs,
        out_specs=partition_spec(*split, column_axes),
    )(in_compute_dtype(table.array), ids)


def take_replicated(
    table: "Sharded", ids: Int32[Array, "..."], distinct: Callable[[Array], Array]
) -> "_ReplicatedRows":
    """The distinct rows of the whole batch, on every device."""
    mesh = table.sharding.mesh
    held = jax.shard_map(distinct, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(
        # The ids of the whole batch are few and small.
        reshard(ids, NamedSharding(mesh, PartitionSpec()))
    )
    everywhere = dataclasses.replace(table, batch_axes=())
    return _ReplicatedRows(held, everywhere.gather(held), table.vocab_size, mesh, table.batch_axes)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "values", "sentinel"],
    meta_fields=["vocab_size", "name", "mesh", "batch_axes"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class _ReplicatedRows(GatheredRows):
    """Rows on every device; each finds those of its own part of the batch, and the gradient is
    summed over the parts."""

    mesh: Any
    batch_axes: Axes

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        return _gather_replicated(self, ids)


@jax.jit
def _gather_replicated(taken: _ReplicatedRows, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    split = array_axes(taken.mesh, taken.batch_axes, ids, ids.ndim)

    def read(held, values, ids):
        return GatheredRows(held, values, taken.vocab_size).gather(ids).astype(taken.dtype)

    specs = (PartitionSpec(), PartitionSpec(), partition_spec(*split))
    read_all = jax.shard_map(
        read, mesh=taken.mesh, in_specs=specs, out_specs=partition_spec(*split, ())
    )
    return read_all(taken.ids, in_compute_dtype(taken.values), ids)


def rows_of_this_shard(
    table: "Sharded", ids: Int32[Array, "k"], size: int
) -> tuple[Int32[Array, "k"], Int32[Array, "k"]]:
    """The rows of this shard among the ids, counted from its start, then ids past its end as
    padding; and the index of each in `ids`."""
    first = index_along(table.axes[0]) * size
    order = (jnp.arange(len(ids), dtype=jnp.int32) + jnp.sum(ids < first, dtype=jnp.int32)) % len(
        ids
    )
    own = ids[order] - first
    here = (own >= 0) & (own < size) & (ids[order] < table.vocab_size)
    return jnp.where(here, own, jnp.arange(size, size + len(ids), dtype=jnp.int32)), order
