"""Exchanges rows: what devices send to the owners of rows, and what they get from them.

The rows of the table are split over devices. The owner of a row is the device whose shard has the
row. Each device asks the owners for the rows that its part of the batch reads, and sends them the
gradients of those rows:

    a device                                       the owners of the rows
    distinct rows of its part   - all-to-all --->  rows asked for, repeats merged
    rows                       <--- all-to-all --  rows of the shard
    gradients of these rows     - all-to-all --->  one gradient for each row, repeats summed,
                                                   for the shard's own update

A loss is differentiated with respect to the rows of the shards, so jax finds the last step as the
transpose of the one before it. Buffers have a fixed size (see `buffers`). If the index of a row
does not fit, the answer is NaN, and the gradient of the row is dropped.

The shard of a device is a range of row indices, so ascending indices are grouped by owner. Each
list of indices ascends, and numbers past the end of the table are padding.

Letters of shapes: v rows of the table, d columns, k rows that devices ask for, n rows that owners
have for them.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments, conversions
from transformer_embed._src.compiled import compiled, known_after_reading
from transformer_embed._src.partitioning import (
    Axes,
    devices_along,
    first_index,
    on_each_device,
    spec_axes,
    typed_axes,
)
from transformer_embed._src.rows.batch_rows import SeenRows
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
    """Says who asks whom for rows, and how many. It is static.

    Args:
        mesh: The devices.
        owners: The mesh axes that the rows of the table are split over.
        replicas: The other mesh axes that ids are split over.
        id_axes: The mesh axes of each dimension of ids.
        num_rows: The number of rows of the table.
        asked: How many rows a device asks for at most.
        sent: How many of them it can ask of each owner.
        received: How many distinct rows an owner can be asked for.
    """

    mesh: Any
    owners: Axes
    replicas: Axes
    id_axes: tuple[Axes, ...]
    num_rows: int
    asked: int
    sent: int
    received: int

    @property
    def devices(self) -> PartitionSpec:
        """How an array is split if each device has a part of its own."""
        return PartitionSpec((*self.owners, *self.replicas))

    def all_to_all(self, buffer: Array) -> Array:
        """Inside shard_map, sends each owner its block of a buffer, and returns received blocks."""
        return jax.lax.all_to_all(buffer, self.owners, split_axis=0, concat_axis=0, tiled=True)


def plan_exchange(
    table: Any, id_axes: Sequence[Axes], count: int, max_rows: int, capacity: float
) -> Exchange:
    """Plans how rows of a table are exchanged for `count` ids, as the table's sharding says.

    Args:
        table: An array, or its shape, dtype and sharding.
        id_axes: The mesh axes of each dimension of ids.
        count: The number of ids of all devices.
        max_rows: A bound on the distinct rows that a device asks for.
        capacity: The room of buffers; see `plan_buffers`.
    """
    num_rows = table.shape[0]
    mesh = table.sharding.mesh
    owners, columns = spec_axes(table.sharding.spec, 2)
    all_axes = sum(id_axes, ())
    if columns or not owners:
        want = "rows over mesh axes and whole columns, to exchange rows"
        raise arguments.value_error("table", want, f"an array split as {table.sharding.spec}")
    if not {*owners} <= {*all_axes}:
        want = f"split over the mesh axes of the table's rows, {owners}, to exchange them"
        raise arguments.value_error("ids", want, f"an array split over {all_axes}")
    num_owners = devices_along(mesh, owners)
    devices = devices_along(mesh, all_axes)
    asked = most_distinct(count // devices, num_rows, max_rows)
    sizes = plan_buffers(asked, num_owners, num_rows // num_owners, devices, capacity)
    return Exchange(
        mesh=mesh,
        owners=owners,
        replicas=tuple(axis for axis in all_axes if axis not in owners),
        id_axes=tuple(id_axes),
        num_rows=num_rows,
        asked=asked,
        sent=sizes.sent,
        received=sizes.received,
    )


class Requests(NamedTuple):
    """Holds what each device asks for, and what it is asked for; split over all devices.

    Args:
        row_indices: The rows that the device asks for, as far as they find room; ascending and
            padded.
        owned_indices: The rows of its shard that the device is asked for; ascending and padded.
        rows: The values of these rows, in float32 or wider.
        slots: For each request that the device received, which of its rows it asks for.
        is_lost: For each request, whether it found no room among these rows.
    """

    row_indices: Int32[Array, "k"]
    owned_indices: Int32[Array, "n"]
    rows: Float[Array, "n d"]
    slots: Array
    is_lost: Array


class ExchangedRows(NamedTuple):
    """Holds the rows of a table that each device reads for its own ids.

    Args:
        exchange: The plan.
        table: The table, [v, d].
        requests: What the devices ask each other for. The loss is differentiated with respect to
            their rows.
    """

    exchange: Exchange
    table: Array
    requests: Requests

    @property
    def rows(self) -> Float[Array, "n d"]:
        """The rows that the loss is differentiated with respect to."""
        return self.requests.rows

    def seen(self, rows: Float[Array, "n d"]) -> SeenRows:
        """Returns the rows that each device sees, from the rows of the shards."""
        requests = self.requests
        answers = _answer(self.exchange, requests.slots, requests.is_lost, rows)
        return SeenRows(row_indices=requests.row_indices, values=answers)

    def gradient(self, sums: Float[Array, "n d"]) -> RowGradient:
        """Returns the gradient of the table: on each device, of the rows of its shard."""
        row_indices = self.requests.owned_indices
        plan = self.exchange
        if plan.replicas:
            own = functools.partial(
                sum_over_devices, num_rows=plan.num_rows, axis_name=plan.replicas
            )
            out_specs = PartitionSpec(plan.owners)
            sum_replicas = on_each_device(plan.mesh, own, plan.devices, out_specs)
            row_indices, sums = sum_replicas(row_indices, sums)
        values = sums.astype(self.table.dtype)
        return RowGradient(row_indices=row_indices, values=values, num_rows=plan.num_rows)


def exchange_rows(
    table: Float[Array, "v d"], indices: Int32[Array, "..."], max_rows: int, capacity: float
) -> ExchangedRows:
    """Reads, for each device, the distinct rows of its part of the batch from their owners.

    Args:
        table: The table, split over explicit mesh axes.
        indices: The rows that the batch reads.
        max_rows: A bound on the distinct rows that a device asks for.
        capacity: The room of buffers; see `plan_buffers`.
    """
    table_type = jax.typeof(table)
    if table_type.sharding.mesh.manual_axes:
        # Each device along these axes would return a gradient of its own for the same row, and
        # nothing would sum them.
        want = "None, because the call is inside of a shard_map over some of the mesh axes"
        raise arguments.value_error("capacity", want, capacity)
    exchange = plan_exchange(table_type, typed_axes(indices), indices.size, max_rows, capacity)
    # The table is widened here, so that owners sum the gradients of a row in float32 or wider,
    # before the sum is rounded to a table of 16 bits.
    requests = _ask_owners(exchange, conversions.widened(table), indices)
    return ExchangedRows(exchange=exchange, table=table, requests=requests)


@compiled(0)
def _ask_owners(
    exchange: Exchange, table: Float[Array, "v d"], indices: Int32[Array, "..."]
) -> Requests:
    """Sends the row indices of each device to the owners, which read their rows."""
    num_rows = exchange.num_rows

    def ask(shard, indices):
        """Asks the owners for the rows that this device reads, and reads those it is asked for."""
        distinct = distinct_ascending(indices, num_rows, exchange.asked)
        bounds = jnp.arange(0, num_rows + 1, len(shard), dtype=jnp.int32)
        slots = _slots_of_owners(distinct, bounds, exchange.sent)
        sent = distinct.at[slots].get(mode="fill", fill_value=num_rows)
        # The rest of an owner's part repeats the index before it, so that all of them ascend.
        row_indices = jax.lax.cummax(jnp.where(slots < exchange.asked, sent, -1))
        received = exchange.all_to_all(sent)
        owned_indices = distinct_ascending(received, num_rows, exchange.received)
        # Padding lies past the shard and reads zeros.
        first_row = first_index(exchange.owners, len(shard))
        rows = shard.at[owned_indices - first_row].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )
        owned_slots = find_each(owned_indices, received)
        is_lost = (owned_slots == exchange.received) & (received < num_rows)
        return Requests(
            row_indices=row_indices,
            owned_indices=known_after_reading(owned_indices, rows),
            rows=rows,
            slots=owned_slots,
            is_lost=is_lost,
        )

    in_specs = PartitionSpec(exchange.owners), PartitionSpec(*exchange.id_axes)
    return on_each_device(exchange.mesh, ask, in_specs, exchange.devices)(table, indices)


def _slots_of_owners(
    ascending: Int32[Array, "n"], bounds: Int32[Array, "m"], room: int
) -> Int32[Array, "k"]:
    """Returns the places of the numbers between each two bounds, as many as there is room.

    A place that is left is n, past the end.
    """
    starts = count_below(ascending, bounds)
    places = starts[:-1, None] + jnp.arange(room, dtype=jnp.int32)[None]
    return jnp.where(places < starts[1:, None], places, len(ascending)).reshape(-1)


@compiled(0)
def _answer(
    exchange: Exchange, slots: Array, is_lost: Array, rows: Float[Array, "n d"]
) -> Float[Array, "k d"]:
    """Returns, on each device, the rows that it asks for, from the rows of all shards."""

    def answer(slots, is_lost, rows):
        answers = read_or_zero(rows, slots.astype(jnp.uint32))
        nan = np.array(np.nan, rows.dtype)
        return exchange.all_to_all(jnp.where(is_lost[:, None], nan, answers))

    run = on_each_device(exchange.mesh, answer, exchange.devices, exchange.devices)
    return run(slots, is_lost, rows)
