"""Exchanges rows of a table between the devices that read them and the devices that have them.

The rows of the table are split over devices. The owner of a row is a device whose shard has the
row. Each device asks the owners for the rows that its part of the batch reads, and sends them the
gradients of those rows:

    a device                                       the owners of the rows
    distinct rows of its part   - all-to-all --->  rows asked for, repeats merged
    rows                       <--- all-to-all --  rows of the shard
    gradients of these rows     - all-to-all --->  one gradient for each row, repeats summed,
                                                   for the shard's own update

A loss is differentiated with respect to the rows of the shards. So jax makes the last of these
steps, which is the transpose of the second step. Buffers have a fixed size (see `buffers`). If a
row index does not fit, the device gets NaN for the row, and the gradient of the row is dropped.

The shard of a device is a range of row indices, so ascending indices are grouped by owner. Each
list of indices ascends, and numbers past the end of the table are padding.

Letters of shapes: v rows of the table, d columns, s rows of a shard, k rows that devices ask for, n
rows that owners are asked for.
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
    joined_axes,
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


class ExchangePlan(NamedTuple):
    """Says which devices ask which others for rows of a table, and for how many at most.

    The owner of a row is a device whose shard of the table has the row. The plan is static, so a
    function can be compiled for it.

    Args:
        mesh: The devices.
        owner_axes: The mesh axes that the rows of the table are split over.
        replica_axes: The other mesh axes that ids are split over. Devices along these axes have the
            same shard of the table.
        id_axes: The mesh axes of each dimension of ids.
        num_rows: The number of rows of the table.
        most_asked: How many rows a device can ask for in all.
        most_sent: How many rows a device can ask of each owner.
        most_received: How many distinct rows an owner can be asked for by all devices.
    """

    mesh: Any
    owner_axes: Axes
    replica_axes: Axes
    id_axes: tuple[Axes, ...]
    num_rows: int
    most_asked: int
    most_sent: int
    most_received: int

    @property
    def shard_rows(self) -> int:
        """The number of table rows that each owner has."""
        return self.num_rows // devices_along(self.mesh, self.owner_axes)

    @property
    def device_spec(self) -> PartitionSpec:
        """The spec of an array whose first dimension has one part for each device."""
        return PartitionSpec((*self.owner_axes, *self.replica_axes))

    def all_to_all(self, buffer: Array) -> Array:
        """Sends one block of a buffer to each owner, and returns the blocks that the owners send.

        Call it inside shard_map, where the buffer is an array of this device.
        """
        return jax.lax.all_to_all(buffer, self.owner_axes, split_axis=0, concat_axis=0, tiled=True)


def plan_exchange(
    table: Any, id_axes: Sequence[Axes], id_count: int, max_rows: int, capacity: float
) -> ExchangePlan:
    """Plans an exchange of rows from the sharding of a table and from the number of ids.

    Args:
        table: An array, or its shape, dtype and sharding.
        id_axes: The mesh axes of each dimension of ids.
        id_count: The number of ids of all devices.
        max_rows: A bound on the distinct rows that a device asks for.
        capacity: A factor for the size of the buffers in which devices send requests and rows. With
            2.0, a buffer has room for at least twice the mean number of requests of a batch whose
            ids are all different.
    """
    num_rows = table.shape[0]
    mesh = table.sharding.mesh
    # The mesh axes that split the rows and the columns. The owner of a row is a device whose shard
    # has the row, so the owners are the devices along the axes of the rows.
    owner_axes, column_axes = spec_axes(table.sharding.spec, 2)
    all_id_axes = joined_axes(id_axes)
    if column_axes or not owner_axes:
        want = "rows split over mesh axes, and columns that are not split, to exchange rows"
        raise arguments.value_error("table", want, f"an array split as {table.sharding.spec}")
    if not {*owner_axes} <= {*all_id_axes}:
        want = f"an array split over the mesh axes of the table's rows, {owner_axes}"
        got = f"an array split over {all_id_axes}"
        raise arguments.value_error("ids", want, got)
    num_owners = devices_along(mesh, owner_axes)
    device_count = devices_along(mesh, all_id_axes)
    # A device asks once for each distinct row of its own part of the ids.
    ids_of_device = id_count // device_count
    # So `most_asked` is the smallest of the number of these ids, the number of rows, and `max_rows`
    # (but at least 1).
    most_asked = most_distinct(ids_of_device, num_rows, max_rows)
    shard_rows = num_rows // num_owners
    # The sizes of the buffers: how many rows a device can ask of each owner (`most_sent`), and how
    # many distinct rows an owner can be asked for by all devices (`most_received`).
    buffer_sizes = plan_buffers(most_asked, num_owners, shard_rows, device_count, capacity)
    return ExchangePlan(
        mesh=mesh,
        owner_axes=owner_axes,
        replica_axes=tuple(axis for axis in all_id_axes if axis not in owner_axes),
        id_axes=tuple(id_axes),
        num_rows=num_rows,
        most_asked=most_asked,
        most_sent=buffer_sizes.most_sent,
        most_received=buffer_sizes.most_received,
    )


class Requests(NamedTuple):
    """Holds what each device asks for, and what it is asked for; split over all devices.

    Args:
        row_indices: The indices of the rows that the device asks for, ascending and padded. Indices
            that do not fit into the buffer of the owner are left out.
        owned_indices: The indices of the rows that the device is asked for, ascending and padded.
            The device owns these rows. Indices that do not fit are left out.
        rows: The values of the rows of `owned_indices`, in float32 or wider.
        answer_index: For each request that the device received, which of `rows` is the answer.
        has_no_answer: For each request that the device received, whether the row was left out of
            `owned_indices`, because too many rows were asked for.
    """

    row_indices: Int32[Array, "k"]
    owned_indices: Int32[Array, "n"]
    rows: Float[Array, "n d"]
    answer_index: Array
    has_no_answer: Array


class ExchangedRows(NamedTuple):
    """Holds the rows of a table that each device reads for its own ids.

    Args:
        plan: Which devices ask which others for rows, and for how many at most.
        table: The table, [v, d].
        requests: What the devices ask each other for. The loss is differentiated with respect to
            their rows.
    """

    plan: ExchangePlan
    table: Array
    requests: Requests

    @property
    def rows(self) -> Float[Array, "n d"]:
        """The rows that the loss is differentiated with respect to."""
        return self.requests.rows

    def seen(self, rows: Float[Array, "n d"]) -> SeenRows:
        """Sends each device the rows that it asked for, and returns them with their indices.

        `rows` are the rows that each owner was asked for, in the place of `self.rows`.
        """
        requests = self.requests
        # Each owner sends the rows that it was asked for. For each request, `answer_index` says
        # which of `rows` is the answer, and `has_no_answer` says that there is none.
        answers = _answer(self.plan, requests.answer_index, requests.has_no_answer, rows)
        return SeenRows(row_indices=requests.row_indices, values=answers)

    def gradient(self, sums: Float[Array, "n d"]) -> RowGradient:
        """Returns the gradient of the table. Each device holds the gradients of rows of one shard.

        Args:
            sums: The gradients of `rows`. Each is the sum over the devices that asked for the row.
        """
        # The indices of the rows that each device owns and was asked for.
        row_indices = self.requests.owned_indices
        plan = self.plan
        if plan.replica_axes:
            # Devices along these mesh axes have copies of the same shard, and each copy was read by
            # different devices. So each copy has only the gradients of its own readers, and the
            # gradients of all copies are summed.
            sum_on_device = functools.partial(
                sum_over_devices, num_rows=plan.num_rows, axis_name=plan.replica_axes
            )
            shard_spec = PartitionSpec(plan.owner_axes)
            sum_over_copies = on_each_device(
                plan.mesh, sum_on_device, in_specs=plan.device_spec, out_specs=shard_spec
            )
            row_indices, sums = sum_over_copies(row_indices, sums)
        values = sums.astype(self.table.dtype)
        return RowGradient(row_indices=row_indices, values=values, num_rows=plan.num_rows)


def exchange_rows(
    table: Float[Array, "v d"], indices: Int32[Array, "..."], max_rows: int, capacity: float
) -> ExchangedRows:
    """Reads the distinct rows that each device needs for a part of the batch, from their owners.

    Args:
        table: The table, split over explicit mesh axes.
        indices: The rows that the batch reads.
        max_rows: A bound on the distinct rows that a device asks for.
        capacity: A factor for the size of buffers, as in `plan_exchange`.
    """
    table_type = jax.typeof(table)
    if table_type.sharding.mesh.manual_axes:
        # An exchange inside a user's shard_map is refused. Each device along the axes of that
        # shard_map would return another gradient for the same row, and nothing would sum them.
        want = "None, because the call is inside of a shard_map over some of the mesh axes"
        raise arguments.value_error("capacity", want, capacity)
    plan = plan_exchange(table_type, typed_axes(indices), indices.size, max_rows, capacity)
    # The table is widened here, so that owners sum the gradients of a row in float32 or wider,
    # before the sum is rounded to a table of 16 bits.
    requests = _ask_owners(plan, conversions.widened(table), indices)
    return ExchangedRows(plan=plan, table=table, requests=requests)


@compiled(0)
def _ask_owners(
    plan: ExchangePlan, table: Float[Array, "v d"], indices: Int32[Array, "..."]
) -> Requests:
    """Sends the row indices of each device to the owners, which read the rows from their shards.

    The owner of a row is a device whose shard has the row. The rows are not sent back here (see
    `_answer`).

    Args:
        plan: The mesh axes and the sizes of the buffers.
        table: The table, [v, d].
        indices: The rows that the batch reads.
    """
    num_rows = plan.num_rows

    def ask(shard: Float[Array, "s d"], indices: Int32[Array, "..."]) -> Requests:
        """Asks the owners for rows, and reads the rows that other devices ask this device for."""
        # The distinct rows that this device reads, ascending, then padding. `most_asked` is how
        # many rows a device can ask for in all.
        distinct = distinct_ascending(indices, num_rows, plan.most_asked)
        # The shard of owner i has the rows from shard_starts[i] to shard_starts[i + 1].
        shard_starts = jnp.arange(0, num_rows + 1, len(shard), dtype=jnp.int32)
        # The buffer `sent` has room for `most_sent` requests to each owner, one owner after the
        # other. Each request is the index of a row. An unused request is num_rows, which is past
        # all rows.
        index_in_distinct = _group_by_range(distinct, shard_starts, plan.most_sent)
        sent = distinct.at[index_in_distinct].get(mode="fill", fill_value=num_rows)
        # The row of each request, for the lookup, which needs ascending row indices. So an unused
        # request repeats the row before it, or is -1 if there is none.
        is_used = index_in_distinct < plan.most_asked
        row_indices = jax.lax.cummax(jnp.where(is_used, sent, -1))
        received = plan.all_to_all(sent)
        # The distinct rows that other devices ask this device for, ascending, then padding.
        # `most_received` is how many rows an owner can be asked for.
        owned_indices = distinct_ascending(received, num_rows, plan.most_received)
        # The index in the table of this shard's first row. Padding is past the end of the shard,
        # and reads zeros.
        first_row = first_index(plan.owner_axes, len(shard))
        rows = shard.at[owned_indices - first_row].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )
        # For each received request, the index of its row among `owned_indices`. If the row is not
        # there, the index is `most_received`, which is past the end.
        answer_index = find_each(owned_indices, received)
        is_not_there = answer_index == plan.most_received
        is_request = received < num_rows
        has_no_answer = is_not_there & is_request
        # The optimizer will write new rows at these indices into the table, in place if the table
        # is donated. XLA writes without a copy of the table only if all rows are read before. So
        # `known_after_reading` returns the same indices, but as a result of the read rows.
        owned_indices = known_after_reading(owned_indices, rows)
        return Requests(
            row_indices=row_indices,
            owned_indices=owned_indices,
            rows=rows,
            answer_index=answer_index,
            has_no_answer=has_no_answer,
        )

    table_spec = PartitionSpec(plan.owner_axes)
    id_spec = PartitionSpec(*plan.id_axes)
    ask_on_each_device = on_each_device(
        plan.mesh, ask, in_specs=(table_spec, id_spec), out_specs=plan.device_spec
    )
    return ask_on_each_device(table, indices)


def _group_by_range(
    ascending: Int32[Array, "n"], bounds: Int32[Array, "m"], slots_per_range: int
) -> Int32[Array, "k"]:
    """Groups n ascending numbers by ranges, and returns the indices of the numbers of each range.

    A range goes from one of the m bounds to the next. Each range gets `slots_per_range` entries of
    the result, and further numbers of the range are left out. An unused entry is n, an index past
    the end.

    For example, take the numbers 1 2 5 7, the bounds 0 4 8, and 3 slots per range. The first range
    has the numbers 1 and 2, and gets the indices 0 1 4. The second range gets 2 3 4.
    """
    # The index of the first number of each range, which is how many numbers are below the range. In
    # the example: 0 2 4.
    first_indices = count_below(ascending, bounds)
    range_starts = first_indices[:-1, None]
    # [m - 1, slots_per_range]. In the example: 0 1 2, and 2 3 4.
    indices = range_starts + jnp.arange(slots_per_range, dtype=jnp.int32)[None]
    range_ends = first_indices[1:, None]
    indices_or_end = jnp.where(indices < range_ends, indices, len(ascending))
    return indices_or_end.reshape(-1)


@compiled(0)
def _answer(
    plan: ExchangePlan, answer_index: Array, has_no_answer: Array, rows: Float[Array, "n d"]
) -> Float[Array, "k d"]:
    """Sends each device the rows that it asked for, and returns these rows.

    Args:
        plan: The plan of the exchange, which has the mesh axes.
        answer_index: For each request that a device received, the index of the answer in `rows`.
        has_no_answer: For each of these requests, whether the row is missing in `rows`. The answer
            is then NaN.
        rows: On each device, the rows of its shard that other devices asked for.
    """

    def exchange_answers(answer_index: Array, has_no_answer: Array, rows: Array) -> Array:
        """Answers the requests of other devices, and returns their answers to this device."""
        # `read_or_zero` takes uint32. For an index past the end, it reads zeros.
        answers = read_or_zero(rows, answer_index.astype(jnp.uint32))
        nan = np.array(np.nan, rows.dtype)
        answers_or_nan = jnp.where(has_no_answer[:, None], nan, answers)
        return plan.all_to_all(answers_or_nan)

    exchange_on_each_device = on_each_device(
        plan.mesh, exchange_answers, in_specs=plan.device_spec, out_specs=plan.device_spec
    )
    return exchange_on_each_device(answer_index, has_no_answer, rows)
