"""Rows of an interleaved table on a mesh: each device asks the owners for the rows that its own
part of the batch reads.

The batch is split over at least the mesh axes that the rows are split over.

    a device                                 the owners of the rows
    distinct slots of its part  --------->  asked: rows of the shard
    rows                        <---------
    gradients of these rows     --------->  owned: ids and summed gradients (`OwnedRows`), for
                                            the shard's own update

Each arrow is an exchange (see `exchange` and `hops`). Ids are what the user sees. A slot is the
index of an id's row in the interleaved array. `shard_rows` count rows from the start of a device's
shard. Each list ascends, and numbers past the end are padding.
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
from transformer_embed._src.functional.lookup import rows_at
from transformer_embed._src.functional.partitioning import (
    Axes,
    OutputLayout,
    array_axes,
    devices_along,
    index_along,
    partition_spec,
)
from transformer_embed._src.rows.distinct_ids import count_below, distinct_ascending
from transformer_embed._src.rows.gathered_rows import GatheredRows
from transformer_embed._src.rows.row_gradient import RowGradient, register_row_gradient
from transformer_embed._src.sharded import exchange
from transformer_embed._src.sharded.contiguous import gather_from_shards
from transformer_embed._src.sharded.hops import Hop, plan_hops
from transformer_embed._src.sharded.row_order import Interleaved
from transformer_embed._src.sharded.table import Sharded


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["vocab_size", "sharding", "batch_axes", "virtual_shards", "capacity"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class InterleavedTable(Sharded):
    """A sharded table whose rows are dealt to virtual shards; see `shard_params`.

    Args:
        virtual_shards: a power of two.
        capacity: see `shard_params`.
    """

    virtual_shards: int
    capacity: float

    @property
    def _order(self) -> Interleaved:
        """See `Sharded`."""
        return Interleaved(self.vocab_size, self.virtual_shards)

    def _hops(self, devices: int, asked: int) -> tuple[Hop, ...]:
        """The hops for `devices` devices that each ask for at most `asked` distinct rows."""
        sizes = tuple(self._mesh.shape[axis] for axis in self._axes[0])
        shard = self._order.size // devices_along(self._mesh, self._axes[0])
        return plan_hops(asked, self._axes[0], sizes, shard, devices, self.capacity)

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`; split as the ids are. Ids that are not split over the rows' axes are looked
        up in all shards."""
        split = array_axes(self._mesh, self.batch_axes, ids, ids.ndim)
        by_exchange = set(self._axes[0]) <= {axis for axes in split for axis in axes}
        return (_gather_from_owners if by_exchange else gather_from_shards)(self, ids)

    def output_layout(self, x: Float[Array, "... d"]) -> tuple[Array, OutputLayout]:
        """Raises a TypeError: an output layer needs rows in vocabulary order."""
        want = "rows in vocabulary order for a tied output layer: leave it out of `interleave`"
        raise arguments.type_error("table", want, "an interleaved table")

    def take_rows(
        self, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]
    ) -> "ExchangedRows":
        """See `Table`; on each device, the distinct rows of its part of the ids."""
        return _take_from_owners(self, ids, distinct)

    def update_rows(
        self, step: Callable, shared: Any, gradient: RowGradient, states: Sequence[Sharded]
    ) -> list[Sharded]:
        """See `Table`; each shard updates its own rows. Nothing is sent."""
        if not isinstance(gradient, OwnedRows):
            want = (
                "the gradient of an interleaved table as `value_and_grad` returns it: each device "
                "has those of its own rows"
            )
            raise arguments.type_error("grads", want, f"plain {type(gradient).__name__}")

        plan = gradient.plan

        def update_shard(shared, gradient, shards):
            ids, values = gradient
            return step(shared, plan.shard_rows(ids), values, shards)

        owned, by_owner = (gradient.ids, gradient.values), partition_spec(self._axes[0])
        return self._update_shards(update_shard, shared, owned, by_owner, states)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """How a batch of ids reaches the owners of its rows; static.

    Args:
        mesh: the devices.
        owners: the mesh axes that the rows are split over.
        batch_axes: as in `Sharded`.
        split: the mesh axes that each dimension of the ids is split over.
        hops: those of the exchange.
        order: which slot holds which row.
    """

    mesh: Any
    owners: Axes
    batch_axes: Axes
    split: tuple[Axes, ...]
    hops: tuple[Hop, ...]
    order: Interleaved

    @property
    def id_axes(self) -> Axes:
        """The mesh axes that the ids are split over."""
        return tuple(axis for axes in self.split for axis in axes)

    @property
    def shard(self) -> int:
        """Rows of a device's shard."""
        return self.hops[-1].stride

    def shard_rows(self, ids: Int32[Array, "k"]) -> Int32[Array, "k"]:
        """The row of each id, counted from the start of this device's shard; past its end for ids
        outside the vocabulary."""
        vocab_size, past = self.order.vocab_size, jnp.arange(len(ids), dtype=jnp.int32)
        slots = self.order.slots(jnp.minimum(ids, vocab_size - 1))
        shard_rows = slots - index_along(self.owners) * self.shard
        return jnp.where(ids < vocab_size, shard_rows, self.shard + past)

    def ids(self, shard_rows: Int32[Array, "k"]) -> Int32[Array, "k"]:
        """The inverse of `shard_rows`."""
        past = jnp.arange(len(shard_rows), dtype=jnp.int32)
        slots = jnp.minimum(shard_rows, self.shard - 1) + index_along(self.owners) * self.shard
        return jnp.where(
            shard_rows < self.shard, self.order.ids(slots), self.order.vocab_size + past
        )

    def ask_owners(self, slots: Int32[Array, "k"], shard: Float[Array, "s d"]):
        """The rows in ascending, distinct slots; what was sent to get them; and the rows of this
        shard that devices ask for."""
        sent, asked = exchange.ask(self.hops, slots, self.order.size)
        shard_rows = asked - index_along(self.owners) * len(shard)
        values = shard.at[shard_rows].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )
        answers = exchange.answer(self.hops, sent, values)
        # Padding does not fit either, but only a row that was asked for may read as NaN.
        return jnp.where((slots < self.order.size)[:, None], answers, 0), sent, shard_rows


def _planned(
    table: InterleavedTable, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]
) -> _Exchange:
    """The exchange for a batch, of which each device reads the ids that `distinct` returns for its
    part."""
    mesh, owners = table._mesh, table._axes[0]
    split = tuple(array_axes(mesh, table.batch_axes, ids, ids.ndim))
    id_axes = tuple(axis for axes in split for axis in axes)
    if not set(owners) <= set(id_axes):
        want = (
            f"split over the mesh axes of the table's rows, {owners}, to exchange them "
            "(the batch must divide by the devices)"
        )
        got = f"shape {list(ids.shape)} split over {id_axes}"
        raise arguments.value_error("ids", want, got)
    devices = devices_along(mesh, id_axes)
    on_device = jax.shard_map(
        distinct, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    part = jax.ShapeDtypeStruct((ids.size // devices,), ids.dtype)
    (asked,) = jax.eval_shape(on_device, part).shape
    hops = table._hops(devices, asked)
    return _Exchange(mesh, owners, table.batch_axes, split, hops, table._order)


def _rows_in_slots(
    held: Int32[Array, "k"], values: Float[Array, "k d"], slots: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """The row in each slot; NaN for a slot that is not held."""
    index = jnp.minimum(count_below(held, slots), len(held) - 1)
    return jnp.where((held[index] == slots)[..., None], rows_at(values, index), jnp.nan)


# --- lookup


@jax.jit
def _gather_from_owners(table: InterleavedTable, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """Each device asks for the distinct rows of its part of the ids; the gradient goes back the
    same way."""

    def distinct(slots):
        return distinct_ascending(
            slots, table._order.size, max(1, min(slots.size, table.vocab_size))
        )

    plan = _planned(table, ids, distinct)

    def read(shard, ids):
        slots = table._slots(ids)
        held = distinct(slots)
        values, *_ = plan.ask_owners(held, shard)
        return _rows_in_slots(held, values, slots)

    read_all = jax.shard_map(
        read,
        mesh=plan.mesh,
        in_specs=(partition_spec(plan.owners), partition_spec(*plan.split)),
        out_specs=partition_spec(*plan.split, ()),
    )
    return read_all(arguments.widened(table.array), ids).astype(table.dtype)


# --- training by rows


@functools.partial(jax.jit, static_argnums=2)
def _take_from_owners(
    table: InterleavedTable, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]
) -> "ExchangedRows":
    """On each device, the distinct rows of its part of the ids."""
    plan = _planned(table, ids, distinct)

    def take(shard, ids):
        held = distinct(ids)
        past = table._order.size + jnp.arange(len(held), dtype=jnp.int32)
        slots = jnp.sort(jnp.where(held < table.vocab_size, table._slots(held), past))
        values, sent, shard_rows = plan.ask_owners(slots, shard)
        return slots, arguments.widened(values), sent, shard_rows

    take_all = jax.shard_map(
        take,
        mesh=plan.mesh,
        in_specs=(partition_spec(plan.owners), partition_spec(*plan.split)),
        out_specs=partition_spec(plan.id_axes),
    )
    slots, values, sent, asked = take_all(table.array, ids)
    return ExchangedRows(slots, values, table.vocab_size, table.dtype, sent, asked, plan)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "values", "sentinel", "sent", "asked"],
    meta_fields=["vocab_size", "name", "row_dtype", "plan"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class ExchangedRows(GatheredRows):
    """On each device, the rows that its part of a batch reads.

    Args:
        ids: [devices * k], slots of the interleaved array, ascending and distinct on each device.
        values: [devices * k, d], the rows, in float32 or wider: their gradient is summed over
            devices before it is rounded.
        vocab_size: number of rows of the table.
        row_dtype: dtype of the table.
        sent: what each device sent to get them, over each hop.
        asked: [devices * m], the rows that each device was asked for, counted from the start of its
            shard.
        plan: how they were exchanged.
    """

    row_dtype: Any
    sent: list[exchange.Sent]
    asked: Any
    plan: _Exchange

    @property
    def dtype(self) -> jnp.dtype:
        """That of the table."""
        return self.row_dtype

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`; the ids must be split as the batch is."""
        return _gather_exchanged(self, ids)

    def gradient(self, values: Float[Array, "k d"]) -> RowGradient:
        """On each device, the gradient of its shard's rows, summed over all devices."""
        ids, sums = _return_gradients(self, values)
        return OwnedRows(ids, sums.astype(self.dtype), self.vocab_size, self.plan)


@jax.jit
def _gather_exchanged(taken: ExchangedRows, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    plan = taken.plan
    split = array_axes(plan.mesh, plan.batch_axes, ids, ids.ndim)
    if {axis for axes in split for axis in axes} != set(plan.id_axes):
        want = f"split over the mesh axes of the ids given to te.rows, {plan.id_axes}"
        got = f"shape {list(ids.shape)} split over {tuple(split)}"
        raise arguments.value_error("ids", want, got)

    def read(held, values, ids):
        slots = plan.order.slots(jnp.clip(ids, 0, taken.vocab_size - 1))
        return _rows_in_slots(held, values, slots)

    everyone = partition_spec(plan.id_axes)
    read_all = jax.shard_map(
        read,
        mesh=plan.mesh,
        in_specs=(everyone, everyone, partition_spec(*split)),
        out_specs=partition_spec(*split, ()),
    )
    return read_all(taken.ids, taken.values, ids).astype(taken.dtype)


@jax.jit
def _return_gradients(
    taken: ExchangedRows, gradient: Float[Array, "k d"]
) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """On each device, the ids of its shard that were asked for, and the sum of their gradients."""
    plan = taken.plan
    # Devices along these axes hold the same rows.
    replicas = tuple(axis for axis in plan.id_axes if axis not in plan.owners)

    def send(sent, shard_rows, gradient):
        sums = exchange.return_gradients(plan.hops, sent, gradient)
        if replicas:
            shard_rows, sums = (
                jax.lax.all_gather(array, replicas, tiled=True) for array in (shard_rows, sums)
            )
            shard_rows, sums = exchange.sum_repeats(shard_rows, sums, plan.shard)
        return plan.ids(shard_rows), sums

    # Unchecked: shard_map cannot infer that gathered values are equal along the axis that they were
    # gathered over.
    send_all = jax.shard_map(
        send,
        mesh=plan.mesh,
        in_specs=partition_spec(plan.id_axes),
        out_specs=partition_spec(plan.owners),
        check_vma=False,
    )
    return send_all(taken.sent, taken.asked, gradient)


@register_row_gradient
@dataclasses.dataclass(frozen=True, eq=False)
class OwnedRows(RowGradient):
    """On each device, the gradient of some of its shard's rows: ids ascend by their slot in the
    shard."""

    plan: _Exchange

    def __add__(self, other: RowGradient) -> RowGradient:
        """See `RowGradient`; each device adds its own rows."""
        if self.ids is other.ids or not isinstance(other, OwnedRows):
            return super().__add__(other)
        plan = self.plan

        def merge(ids, values):
            shard_rows, sums = exchange.sum_repeats(
                plan.shard_rows(jnp.concatenate(ids)), jnp.concatenate(values), plan.shard
            )
            return plan.ids(shard_rows), sums

        owners = partition_spec(plan.owners)
        merge_all = jax.shard_map(merge, mesh=plan.mesh, in_specs=owners, out_specs=owners)
        ids, values = merge_all([self.ids, other.ids], [self.values, other.values])
        return dataclasses.replace(self, ids=ids, values=values)
