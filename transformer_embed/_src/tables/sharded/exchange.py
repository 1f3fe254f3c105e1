"""Rows by exchange: what devices send to the owners of rows, and get from them.

Each device asks the owners for the rows that its part of the batch reads, and sends them the
gradients of those rows:

    a device                                       the owners of the rows
    distinct slots of its part  - all-to-all --->  slots asked for, repeats merged
    rows                       <--- all-to-all --  rows of the shard
    gradients of these rows     - all-to-all --->  one gradient for each row, repeats summed,
                                                   for the shard's own update

These are `_ask`, `_answer` and `_return`. Each arrow is one all-to-all for each hop (see `hops`).
Buffers have a fixed size; the answer to a slot that does not fit is NaN, and its gradient is
dropped.

A slot is the index of an id's row in the sharded array, so a device's shard is a range of slots,
and ascending slots are grouped by owner. `shard_rows` count rows from the start of a device's
shard. Each list ascends, and numbers past the end are padding.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import Axes, devices_along, index_along
from transformer_embed._src.tables.rows.distinct_ids import (
    as_max_rows,
    count_below,
    distinct_ascending,
    find_each,
    most_distinct,
    sum_by_index,
    sum_rows,
)
from transformer_embed._src.tables.rows.gathered_rows import (
    GatheredRows,
    as_keys,
    known_after_reading,
)
from transformer_embed._src.tables.rows.marks import with_marks, without_marks
from transformer_embed._src.tables.rows.row_gradient import RowGradient
from transformer_embed._src.tables.sharded.hops import Hop
from transformer_embed._src.tables.sharded.table_split import RowReader, TableSplit
from transformer_embed._src.tokens.lookup_gradient import read_or_zero


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["starts", "buffer_slots", "merged"],
    meta_fields=["hop"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """Where requests are in the send and receive buffers of one hop, on one device.

    Args:
        hop: the hop.
        starts: [parts + 1], the index of the first slot sent to each part.
        buffer_slots: [k], where each slot is in the send buffer; slots that do not fit have
            distinct numbers past its end.
        merged: [parts * room], for each slot of the receive buffer, its index among the distinct
            ones; padding is that of padding, or past the end.
    """

    hop: Hop
    starts: Int32[Array, "p"]
    buffer_slots: Int32[Array, "k"]
    merged: Int32[Array, "s"]


def gather_from_owners(
    split: TableSplit, array: Float[Array, "m d"], ids: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """The row of each id; each device asks for the distinct rows of its part of the ids.

    The gradient goes back the same way.
    """
    # Owners sum the gradients that devices return, before these round to 16 bits.
    rows, _ = take_from_owners(split, arguments.widened(array), ids, as_max_rows(None))
    return rows._gather_rows(ids).astype(array.dtype)


def take_from_owners(
    split: TableSplit, array: Float[Array, "m d"], ids: Int32[Array, "..."], max_rows: int
) -> tuple[GatheredRows, Callable[[Array], RowGradient]]:
    """On each device, the distinct rows of its part of the ids; see `Table._take_rows`.

    The gradient has, on each device, the rows of its shard that were asked for.
    """
    _, id_axes = split.axes_of(ids)
    if not set(split.rows) <= set(id_axes):
        want = (
            f"split over the mesh axes of the table's rows, {split.rows}, to exchange them "
            "(the batch must divide by the devices)"
        )
        got = f"shape {list(ids.shape)} split over {id_axes}"
        raise arguments.value_error("ids", want, got)
    slots, values, sent, asked = _ask_owners(split, max_rows, array, ids)
    vocab_size = split.order.vocab_size

    def gradient(cotangent: Float[Array, "n d"]) -> RowGradient:
        shard_rows, sums = _return_to_owners(split, id_axes, sent, asked, cotangent)
        return RowGradient(shard_rows, sums.astype(array.dtype), vocab_size, split)

    reader = RowReader(split, id_axes, array.dtype)
    return GatheredRows(as_keys(slots), values, vocab_size, reader), gradient


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ask_owners(
    split: TableSplit, max_rows: int, array: Float[Array, "m d"], ids: Int32[Array, "..."]
) -> tuple[Array, Array, list[Sent], Array]:
    """On each device, the slots that it asks for, their rows in float32 or wider, and the marks.

    Also what it sent over each hop, and the rows of its shard that it is asked for.
    """
    size, (by_dimension, id_axes) = split.order.size, split.axes_of(ids)
    devices = devices_along(split.mesh, id_axes)
    most = most_distinct(ids.size // devices, split.order.vocab_size, max_rows)
    hops = split.hops(devices, most)

    def take(shard, ids):
        slots = distinct_ascending(split.slots(ids), size, most)
        sent, asked = _ask(hops, slots, size)
        shard_rows = asked - index_along(split.rows) * len(shard)
        # Padding lies past the shard and reads zeros.
        values = shard.at[shard_rows].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )
        answers = _answer(sent, values)
        # Padding does not fit either, but only a row that was asked for may read as NaN.
        values = jnp.where((slots < size)[:, None], answers, 0)
        values = with_marks(arguments.widened(values))
        return slots, values, sent, known_after_reading(shard_rows, values)

    in_specs = PartitionSpec(split.rows), PartitionSpec(*by_dimension)
    return split.map(take, in_specs, PartitionSpec(id_axes))(array, ids)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _return_to_owners(
    split: TableSplit,
    id_axes: Axes,
    sent: Sequence[Sent],
    asked: Int32[Array, "m"],
    gradient: Float[Array, "n d"],
) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """On each device, the rows of its shard that were asked for, and the sum of their gradients."""
    # Devices along these axes hold the same rows.
    replicas = tuple(axis for axis in id_axes if axis not in split.rows)

    def send(sent, shard_rows, gradient):
        sums = _return(sent, without_marks(gradient))
        if replicas:
            shard_rows, sums = (
                jax.lax.all_gather(array, replicas, tiled=True) for array in (shard_rows, sums)
            )
            shard_rows, sums = sum_rows(shard_rows, sums, split.shard)
        return shard_rows, sums

    # Unchecked: shard_map cannot infer that gathered values are equal along the axis that they were
    # gathered over.
    send_all = jax.shard_map(
        send,
        mesh=split.mesh,
        in_specs=PartitionSpec(id_axes),
        out_specs=PartitionSpec(split.rows),
        check_vma=False,
    )
    return send_all(sent, asked, gradient)


# --- on each device, inside shard_map


def _ask(
    hops: Sequence[Hop], slots: Int32[Array, "k"], size: int
) -> tuple[list[Sent], Int32[Array, "m"]]:
    """Sends ascending, distinct slots to their owners.

    Slots of `size` or above are padding and not sent.

    Returns:
        What was sent over each hop, and the slots that this device is asked for, ascending and
        padded in the same way.
    """
    sent = []
    for hop in hops:
        parts = jnp.where(slots < size, slots // hop.stride % hop.parts, hop.parts)
        starts = count_below(parts, jnp.arange(hop.parts + 1, dtype=jnp.int32))
        index = jnp.arange(len(slots), dtype=jnp.int32)
        rank = index - starts[parts]
        fits = (parts < hop.parts) & (rank < hop.room)
        # What does not fit has an index of its own past the buffer: `_answer` promises that none
        # repeats.
        buffer_slots = jnp.where(fits, parts * hop.room + rank, hop.parts * hop.room + index)
        received = _send(hop, starts, slots, size)
        slots = distinct_ascending(received, size, hop.distinct)
        sent.append(Sent(hop, starts, buffer_slots, find_each(slots, received)))
    return sent, slots


def _answer(sent: Sequence[Sent], rows: Float[Array, "m d"]) -> Float[Array, "k d"]:
    """The rows that the owners send back; NaN for a slot that did not fit."""
    for each in reversed(sent):
        known = (each.merged < len(rows))[:, None]
        answers = jnp.where(known, read_or_zero(rows, each.merged.astype(jnp.uint32)), jnp.nan)
        received = _all_to_all(each.hop, answers).at[each.buffer_slots]
        rows = received.get(mode="fill", fill_value=jnp.nan, unique_indices=True)
    return rows


def _return(sent: Sequence[Sent], gradients: Float[Array, "k d"]) -> Float[Array, "m d"]:
    """The gradient of each row that this device was asked for, summed over those that asked.

    It is the transpose of `_answer`.
    """
    for each in sent:
        received = _send(each.hop, each.starts, gradients, 0)
        gradients = sum_by_index(received, each.merged, each.hop.distinct)
    return gradients


def _send(hop: Hop, starts: Int32[Array, "p"], values: Array, fill: int) -> Array:
    """Sends each part its values, which are contiguous, padded with `fill`; returns those received.

    Each is [parts * room, ...].
    """
    index = starts[:-1, None] + jnp.arange(hop.room, dtype=jnp.int32)[None]
    index = jnp.where(index < starts[1:, None], index, len(values)).reshape(-1)
    return _all_to_all(hop, values.at[index].get(mode="fill", fill_value=fill))


def _all_to_all(hop: Hop, buffer: Array) -> Array:
    """Sends each part its block of the buffer; returns the blocks received."""
    return jax.lax.all_to_all(buffer, hop.axes, split_axis=0, concat_axis=0, tiled=True)
