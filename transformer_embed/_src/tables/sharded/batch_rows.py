"""The rows of a sharded table that a batch reads, and their gradient.

If the rows are exchanged, each device holds those that its own part of the batch reads:

    a device                                 the owners of the rows
    distinct slots of its part  --------->  asked: rows of the shard
    rows                        <---------
    gradients of these rows     --------->  owned: rows of the shard and their summed gradients,
                                            for the shard's own update

Each arrow is an exchange (see `exchange` and `hops`). A slot is the index of an id's row in the
array. `shard_rows` count rows from the start of a device's shard. Each list ascends, and numbers
past the end are padding.

Otherwise every device holds all rows that the batch reads, and their gradient is summed over the
devices that the batch is split over.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import (
    Axes,
    devices_along,
    index_along,
)
from transformer_embed._src.tables.rows.distinct_ids import distinct_ascending, sum_rows
from transformer_embed._src.tables.rows.gathered_rows import (
    GatheredRows,
    as_keys,
    known_after_reading,
    rows_of_ids,
)
from transformer_embed._src.tables.rows.marks import with_marks, without_marks
from transformer_embed._src.tables.rows.row_gradient import RowGradient
from transformer_embed._src.tables.sharded import exchange
from transformer_embed._src.tables.sharded.hops import Hop
from transformer_embed._src.tables.sharded.layout import Layout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "sentinel", "sent", "asked"],
    meta_fields=["vocab_size", "name", "row_dtype", "layout", "id_axes", "hops"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class BatchRows(GatheredRows):
    """The rows of a sharded table that a batch reads, on each device or on all.

    Args:
        keys: [devices * k], slots of the array, ascending and distinct on each device; or [k], if
            every device holds all rows. See `GatheredRows`.
        values: a row for each and the marks, on each device, in float32 or wider if their gradient
            is exchanged: it is summed over devices before it is rounded.
        vocab_size: number of rows of the table.
        row_dtype: dtype of the table.
        layout: that of the table.
        id_axes: the mesh axes that the ids were split over to exchange them.
        hops: those of the exchange; none if every device holds all rows.
        sent: what each device sent to get them, over each hop.
        asked: [devices * m], the rows that each device was asked for, counted from the start of its
            shard.
    """

    row_dtype: Any
    layout: Layout
    id_axes: Axes = ()
    hops: tuple[Hop, ...] = ()
    sent: Sequence[exchange.Sent] = ()
    asked: Any = None

    @property
    def dtype(self) -> jnp.dtype:
        """That of the table."""
        return self.row_dtype

    @jax.jit
    def _gather_rows(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, ids: Int32[Array, "..."]
    ) -> Float[Array, "... d"]:
        """See `Table`; exchanged rows are read by ids that are split as the batch is."""
        split, _ = self.layout.split(ids)

        def read(held, values, ids):
            return rows_of_ids(held, values, self.layout.slots(ids))

        held_by = PartitionSpec(self.id_axes)
        read_all = jax.shard_map(
            read,
            mesh=self.layout.mesh,
            in_specs=(held_by, held_by, PartitionSpec(*split)),
            out_specs=PartitionSpec(*split, ()),
        )
        return read_all(self.ids, arguments.widened(self.values), ids).astype(self.dtype)

    def gradient(self, values: Float[Array, "n d"]) -> RowGradient:
        """See `GatheredRows`; exchanged, on each device, that of its shard's rows."""
        if not self.hops:
            return super().gradient(values)
        ids, sums = _return_gradients(self, values)
        return RowGradient(ids, sums.astype(self.dtype), self.vocab_size, self.layout)


@jax.jit
def _return_gradients(
    taken: BatchRows, gradient: Float[Array, "n d"]
) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """On each device, the rows of its shard that were asked for, and the sum of their gradients."""
    layout = taken.layout
    # Devices along these axes hold the same rows.
    replicas = tuple(axis for axis in taken.id_axes if axis not in layout.rows)

    def send(sent, shard_rows, gradient):
        sums = exchange.return_gradients(taken.hops, sent, without_marks(gradient))
        if replicas:
            shard_rows, sums = (
                jax.lax.all_gather(array, replicas, tiled=True) for array in (shard_rows, sums)
            )
            shard_rows, sums = sum_rows([shard_rows], [sums], layout.shard)
        return shard_rows, sums

    # Unchecked: shard_map cannot infer that gathered values are equal along the axis that they were
    # gathered over.
    send_all = jax.shard_map(
        send,
        mesh=layout.mesh,
        in_specs=PartitionSpec(taken.id_axes),
        out_specs=PartitionSpec(layout.rows),
        check_vma=False,
    )
    return send_all(taken.sent, taken.asked, gradient)


# --- the exchange


@functools.partial(jax.jit, static_argnums=0)
def gather_from_owners(
    layout: Layout, array: Float[Array, "m d"], ids: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """The row of each id; each device asks for the distinct rows of its part of the ids.

    The gradient goes back the same way.
    """
    taken = take_from_owners(layout, arguments.widened(array), ids)
    return taken._gather_rows(ids).astype(array.dtype)


@functools.partial(jax.jit, static_argnums=(0, 3))
def take_from_owners(
    layout: Layout, array: Float[Array, "m d"], ids: Int32[Array, "..."], max_rows: int = 2**31
) -> BatchRows:
    """On each device, the distinct rows of its part of the ids."""
    split, id_axes = layout.split(ids)
    if not set(layout.rows) <= set(id_axes):
        want = (
            f"split over the mesh axes of the table's rows, {layout.rows}, to exchange them "
            "(the batch must divide by the devices)"
        )
        got = f"shape {list(ids.shape)} split over {id_axes}"
        raise arguments.value_error("ids", want, got)
    size, devices = layout.order.size, devices_along(layout.mesh, id_axes)
    most = layout.most_asked(ids.size // devices, max_rows)
    hops = layout.hops(devices, most)

    def take(shard, ids):
        slots = distinct_ascending(layout.slots(ids), size, most)
        sent, asked = exchange.ask(hops, slots, size)
        shard_rows = asked - index_along(layout.rows) * len(shard)
        values = shard.at[shard_rows].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )
        answers = exchange.answer(hops, sent, values)
        # Padding does not fit either, but only a row that was asked for may read as NaN.
        values = jnp.where((slots < size)[:, None], answers, 0)
        values = with_marks(arguments.widened(values))
        return slots, values, sent, known_after_reading(shard_rows, values)

    take_all = jax.shard_map(
        take,
        mesh=layout.mesh,
        in_specs=(PartitionSpec(layout.rows), PartitionSpec(*split)),
        out_specs=PartitionSpec(id_axes),
    )
    slots, values, sent, asked = take_all(array, ids)
    vocab_size = layout.order.vocab_size
    keys = as_keys(slots)
    return BatchRows(keys, values, vocab_size, array.dtype, layout, id_axes, hops, sent, asked)
