"""Rows of a contiguous table on a mesh, collected by a sum over the shards: each row is nonzero in
only one of them.

    a device that holds some rows                  devices that read rows
    ids of all of them      <--- all-gather -----  ids of their own part of the batch
    its rows, zeros for others  ---- sum -------->  all rows

In training by rows, every device gets all distinct rows of the whole batch, and reads those of its
own part of the batch. Their gradient is summed over the devices that the batch is split over, and
each device then updates the rows that it holds. So what a device sends grows with the whole batch,
which is cheaper than an exchange up to some dozens of devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup_gradient import read_or_zero
from transformer_embed._src.functional.partitioning import (
    Axes,
    OutputLayout,
    all_gather,
    array_axes,
    devices_along,
    index_along,
    partition_spec,
    reduce_scatter,
    replicated,
)
from transformer_embed._src.rows.gathered_rows import GatheredRows
from transformer_embed._src.rows.row_gradient import RowGradient
from transformer_embed._src.sharded.row_order import Contiguous
from transformer_embed._src.sharded.table import Sharded


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["vocab_size", "sharding", "batch_axes"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class ContiguousTable(Sharded):
    """A sharded table with a block of consecutive ids on each device."""

    @property
    def _order(self) -> Contiguous:
        """See `Sharded`."""
        row_axes, column_axes = self._axes
        return Contiguous(self.vocab_size, devices_along(self._mesh, row_axes + column_axes))

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`; split as the ids are, then as the columns are."""
        return gather_from_shards(self, ids)

    def output_layout(self, x: Float[Array, "... d"]) -> tuple[Array, OutputLayout]:
        """See `Table`."""
        split = array_axes(self._mesh, self.batch_axes, x, x.ndim - 1)
        return self.array, OutputLayout(self._mesh, *self._axes, tuple(split))

    def take_rows(
        self, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]
    ) -> "ReplicatedRows":
        """See `Table`; the distinct rows of the whole batch, on every device."""
        if self._axes[1]:
            want = "rows over mesh axes, and whole columns"
            raise arguments.value_error("table", want, self.sharding.spec)
        distinct_everywhere = jax.shard_map(
            distinct, mesh=self._mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
        )
        held = distinct_everywhere(replicated(ids, self._mesh))
        values = dataclasses.replace(self, batch_axes=()).gather(held)
        return ReplicatedRows(held, values, self.vocab_size, self._mesh, self.batch_axes)

    def update_rows(
        self, step: Callable, shared: Any, gradient: RowGradient, states: Sequence[Sharded]
    ) -> list[Sharded]:
        """See `Table`; each shard updates its own rows. Nothing is sent."""

        def update_shard(shared, gradient, shards):
            ids, values = gradient
            shard_rows, order = _rows_of_this_shard(self, ids, len(shards[0]))
            return step(shared, shard_rows, values[order], shards)

        whole = (gradient.ids, gradient.values)
        return self._update_shards(update_shard, shared, whole, PartitionSpec(), states)


@jax.jit
def gather_from_shards(table: Sharded, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """Every shard looks up the ids that it holds and reads zeros for the others; a sum over the
    shards collects the rows."""
    row_axes, column_axes = table._axes
    split = array_axes(table._mesh, table.batch_axes, ids, ids.ndim)
    id_axes = {axis for axes in split for axis in axes}
    if id_axes & set(column_axes):
        want = "columns over a mesh axis that the ids do not use"
        raise arguments.value_error("table", want, f"both over {column_axes!r}")
    gathered = [tuple(axis for axis in axes if axis in row_axes) for axes in split]
    elsewhere = tuple(axis for axis in row_axes if axis not in id_axes)

    def read(shard, ids):
        slots = table._slots(all_gather(ids, gathered)) - index_along(row_axes) * len(shard)
        # Unsigned, for a negative index would count from the end.
        values = read_or_zero(shard, slots.astype(jnp.uint32)).astype(table.dtype)
        values = jax.lax.psum(values, elsewhere) if elsewhere else values
        return reduce_scatter(values, gathered)

    read_all = jax.shard_map(
        read,
        mesh=table._mesh,
        in_specs=(partition_spec(row_axes, column_axes), partition_spec(*split)),
        out_specs=partition_spec(*split, column_axes),
    )
    return read_all(arguments.widened(table.array), ids)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "values", "sentinel"],
    meta_fields=["vocab_size", "name", "mesh", "batch_axes"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class ReplicatedRows(GatheredRows):
    """Rows on every device; each finds those of its own part of the batch, and the gradient is
    summed over the parts."""

    mesh: Any
    batch_axes: Axes

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`."""
        return _gather_replicated(self, ids)


@jax.jit
def _gather_replicated(taken: ReplicatedRows, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    split = array_axes(taken.mesh, taken.batch_axes, ids, ids.ndim)

    def read(held, values, ids):
        return GatheredRows(held, values, taken.vocab_size).gather(ids).astype(taken.dtype)

    specs = (PartitionSpec(), PartitionSpec(), partition_spec(*split))
    read_all = jax.shard_map(
        read, mesh=taken.mesh, in_specs=specs, out_specs=partition_spec(*split, ())
    )
    return read_all(taken.ids, arguments.widened(taken.values), ids)


def _rows_of_this_shard(
    table: ContiguousTable, ids: Int32[Array, "k"], size: int
) -> tuple[Int32[Array, "k"], Int32[Array, "k"]]:
    """The rows of this shard among the ids, counted from its start, then ids past its end as
    padding; and the index of each in `ids`."""
    first, index = index_along(table._axes[0]) * size, jnp.arange(len(ids), dtype=jnp.int32)
    order = (index + jnp.sum(ids < first, dtype=jnp.int32)) % len(ids)
    shard_rows = ids[order] - first
    here = (shard_rows >= 0) & (shard_rows < size) & (ids[order] < table.vocab_size)
    return jnp.where(here, shard_rows, size + index), order
