"""Rows by exchange: what devices send to the owners of rows, and get from them.

Each device asks the owners for the rows that its part of the batch reads, and sends them the
gradients of those rows:

    a device                                       the owners of the rows
    distinct ids of its part    - all-to-all --->  ids asked for, repeats merged
    rows                       <--- all-to-all --  rows of the shard
    gradients of these rows     - all-to-all --->  one gradient for each row, repeats summed,
                                                   for the shard's own update

A loss is differentiated by the rows of the shards, so jax finds the last step as the transpose of
the one before it. Buffers have a fixed size (see `buffers`); the answer to an id that does not fit
is NaN, and its gradient is dropped.

Here an id is the number of a row. A device's shard is a range of ids, so ascending ids are grouped
by owner. Each list ascends, and numbers past the end are padding.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.compiled import compiled, known_after_reading
from transformer_embed._src.partitioning import (
    Axes,
    devices_along,
    index_along,
    on_each_device,
    spec_axes,
    typed_axes,
)
from transformer_embed._src.rows.buffers import plan_buffers
from transformer_embed._src.rows.distinct_ids import (
    count_below,
    distinct_ascending,
    find_each,
    most_distinct,
    sum_over_devices,
)
from transformer_embed._src.rows.row_gradient import RowGradient
from transformer_embed._src.tokens.lookup_gradient import read_or_zero


class Exchange(NamedTuple):
    """Who asks whom for rows; static.

    Args:
        mesh: the devices.
        owners: the mesh axes that the table's rows are split over.
        replicas: the other axes that ids are split over.
        by_dimension: the axes of each dimension of ids.
        size: rows of the table.
        asked: how many ids a device asks for at most.
        sent: how many of them it can send to each owner.
        received: how many distinct ids an owner can receive.
    """

    mesh: Any
    owners: Axes
    replicas: Axes
    by_dimension: tuple[Axes, ...]
    size: int
    asked: int
    sent: int
    received: int

    @property
    def devices(self) -> PartitionSpec:
        """How an array is split of which each device has a part of its own."""
        return PartitionSpec((*self.owners, *self.replicas))

    def all_to_all(self, buffer: Array) -> Array:
        """Inside shard_map, sends each owner its block of the buffer; the blocks received."""
        return jax.lax.all_to_all(buffer, self.owners, split_axis=0, concat_axis=0, tiled=True)


def plan_exchange(
    table: Any, by_dimension: Sequence[Axes], count: int, max_rows: int, capacity: float
) -> Exchange:
    """How rows of a table, as its sharding says, are exchanged for `count` ids.

    Args:
        table: an array, or its shape, dtype and sharding.
        by_dimension: the mesh axes of each dimension of ids.
        count: of the ids of all devices.
        max_rows, capacity: see `value_and_grad`.
    """
    size, mesh = table.shape[0], table.sharding.mesh
    owners, columns = spec_axes(table.sharding.spec, 2)
    id_axes = sum(by_dimension, ())
    if columns or not owners:
        want = "rows over mesh axes and whole columns, to exchange rows"
        raise arguments.value_error("table", want, f"an array split as {table.sharding.spec}")
    if not {*owners} <= {*id_axes}:
        want = f"split over the mesh axes of the table's rows, {owners}, to exchange them"
        raise arguments.value_error("ids", want, f"an array split over {id_axes}")
    replicas = tuple(axis for axis in id_axes if axis not in owners)
    parts, devices = devices_along(mesh, owners), devices_along(mesh, id_axes)
    asked = most_distinct(count // devices, size, max_rows)
    sent, received = plan_buffers(asked, parts, size // parts, devices, capacity)
    return Exchange(mesh, owners, replicas, tuple(by_dimension), size, asked, sent, received)


class ExchangedRows(NamedTuple):
    """The rows of a table that each device reads for its own ids.

    Args:
        exchange: static.
        table: [v, d].
        ids: those that a device asks for, as far as they find room; ascending and padded.
        owned_ids: those of its shard that it is asked for.
        rows: theirs, in float32 or wider, which the loss is differentiated by.
        slots: for each request that the device received, which of the rows it asks for.
        is_lost: whether it is none of them.
    """

    exchange: Exchange
    table: Array
    ids: Array
    owned_ids: Array
    rows: Array
    slots: Array
    is_lost: Array

    def seen(self, rows: Float[Array, "n d"]) -> tuple[Array, Array]:
        """The ids whose rows each device sees, ascending and padded, and their rows."""
        return self.ids, _answer(self.exchange, self.slots, self.is_lost, rows)

    def gradient(self, sums: Float[Array, "n d"]) -> RowGradient:
        """The table's, from that of the rows: on each device, of its own shard."""
        ids, plan = self.owned_ids, self.exchange
        if plan.replicas:
            own = functools.partial(sum_over_devices, vocab_size=plan.size, axis_name=plan.replicas)
            out_specs = PartitionSpec(plan.owners)
            ids, sums = on_each_device(plan.mesh, own, plan.devices, out_specs)(ids, sums)
        return RowGradient(ids, sums.astype(self.table.dtype), plan.size)


def exchange_rows(
    table: Float[Array, "v d"], ids: Int32[Array, "..."], max_rows: int, capacity: float
) -> ExchangedRows:
    """The distinct rows of its part of the ids, on each device."""
    kind = jax.typeof(table)
    if kind.sharding.mesh.manual_axes:
        # Devices along these axes would return gradients of one row apart.
        want = "None inside of a shard_map over some of the mesh axes"
        raise arguments.value_error("capacity", want, capacity)
    exchange = plan_exchange(kind, typed_axes(ids), ids.size, max_rows, capacity)
    # Owners sum the gradients that devices return, before these round to 16 bits.
    wide = arguments.widened(table)
    return ExchangedRows(exchange, table, *_ask_owners(exchange, wide, ids))


@compiled(0)
def _ask_owners(
    exchange: Exchange, table: Float[Array, "v d"], ids: Int32[Array, "..."]
) -> tuple[Array, ...]:
    """The arrays of `ExchangedRows`, without the table."""
    size = exchange.size

    def ask(shard, ids):
        distinct = distinct_ascending(ids, size, exchange.asked)
        bounds = jnp.arange(0, size + 1, len(shard), dtype=jnp.int32)
        slots = _by_owner(distinct, bounds, exchange.sent)
        requests = distinct.at[slots].get(mode="fill", fill_value=size)
        # The rest of an owner's part repeats the id before it, so that all of them ascend.
        sent_ids = jax.lax.cummax(jnp.where(slots < exchange.asked, requests, -1))
        received = exchange.all_to_all(requests)
        owned_ids = distinct_ascending(received, size, exchange.received)
        # Padding lies past the shard and reads zeros.
        rows = shard.at[owned_ids - index_along(exchange.owners) * len(shard)].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )
        index = find_each(owned_ids, received)
        is_lost = (index == exchange.received) & (received < size)
        return sent_ids, known_after_reading(owned_ids, rows), rows, index, is_lost

    in_specs = PartitionSpec(exchange.owners), PartitionSpec(*exchange.by_dimension)
    return on_each_device(exchange.mesh, ask, in_specs, exchange.devices)(table, ids)


def _by_owner(ids: Int32[Array, "n"], bounds: Int32[Array, "m"], room: int) -> Int32[Array, "k"]:
    """The indices of the ids between each two bounds, as many as there is room; n: none."""
    starts = count_below(ids, bounds)
    index = starts[:-1, None] + jnp.arange(room, dtype=jnp.int32)[None]
    return jnp.where(index < starts[1:, None], index, len(ids)).reshape(-1)


@compiled(0)
def _answer(exchange: Exchange, *request_and_rows: Array) -> Float[Array, "k d"]:
    """On each device, the rows of the ids that it asks for, from those of all shards."""

    def answer(index, is_lost, rows):
        answers = read_or_zero(rows, index.astype(jnp.uint32))
        nan = np.array(np.nan, rows.dtype)
        return exchange.all_to_all(jnp.where(is_lost[:, None], nan, answers))

    run = on_each_device(exchange.mesh, answer, exchange.devices, exchange.devices)
    return run(*request_and_rows)
