"""Rows by exchange: what devices send to the owners of rows, and get from them.

Each device asks the owners for the rows that its part of the batch reads, and sends them the
gradients of those rows:

    a device                                       the owners of the rows
    distinct slots of its part  - all-to-all --->  slots asked for, repeats merged
    rows                       <--- all-to-all --  rows of the shard
    gradients of these rows     - all-to-all --->  one gradient for each row, repeats summed,
                                                   for the shard's own update

Buffers have a fixed size (see `buffers`); the answer to a slot that does not fit is NaN, and its
gradient is dropped.

A slot is the index of an id's row in the sharded array, so a device's shard is a range of slots,
and ascending slots are grouped by owner. Each list ascends, and numbers past the end are padding.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.compiled import known_after_reading
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
)
from transformer_embed._src.tables.rows.row_gradient import RowGradient
from transformer_embed._src.tables.sharded.table_split import RowReader, TableSplit
from transformer_embed._src.tokens.lookup_gradient import read_or_zero


def gather_from_owners(
    split: TableSplit, array: Float[Array, "m d"], ids: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """The row of each id; each device asks for the distinct rows of its part of the ids.

    The gradient goes back the same way.
    """
    # Owners sum the gradients that devices return, before these round to 16 bits.
    rows, _ = take_from_owners(split, arguments.widened(array), ids, as_max_rows(None))
    return rows.reader.read(rows.ids, rows.values, ids).astype(array.dtype)


def take_from_owners(
    split: TableSplit, array: Float[Array, "m d"], ids: Int32[Array, "..."], max_rows: int
) -> tuple[GatheredRows, Callable[[Array], RowGradient]]:
    """On each device, the distinct rows of its part of the ids; see `ArrayTable`.

    The gradient has, on each device, the rows of its shard that were asked for.
    """
    _, id_axes = split.axes_of(ids)
    if not set(split.rows) <= set(id_axes):
        want = (
            f"split over the mesh axes of the table's rows, {split.rows}, to exchange them "
            "(their first dimension is the batch, which the devices must divide)"
        )
        got = f"shape {list(ids.shape)} split over {id_axes}"
        raise arguments.value_error("ids", want, got)
    slots, values, *request = _ask_owners(split, max_rows, array, ids)
    vocab_size = split.order.vocab_size

    def gradient(cotangent: Float[Array, "n d"]) -> RowGradient:
        shard_rows, sums = _return_to_owners(split, id_axes, *request, cotangent)
        return RowGradient(shard_rows, sums.astype(array.dtype), vocab_size, split)

    reader = RowReader(split, id_axes, array.dtype)
    return GatheredRows(as_keys(slots), values, vocab_size, reader), gradient


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ask_owners(
    split: TableSplit, max_rows: int, array: Float[Array, "m d"], ids: Int32[Array, "..."]
) -> tuple[Array, Array, Array, Array, Array]:
    """On each device, the slots that it asks for, and their rows in float32 or wider.

    Then what `_return_to_owners` needs: the index of the first slot sent to each owner, where each
    slot received is among the distinct ones, and the rows of its shard that these are.
    """
    size, (by_dimension, id_axes) = split.order.size, split.axes_of(ids)
    most, room, distinct = sizes(split, id_axes, ids.size, max_rows)
    owners = devices_along(split.mesh, split.rows)

    def take(shard, ids):
        slots, index = distinct_ascending(split.slots(ids), size, most), jnp.arange(most)
        starts = count_below(slots, jnp.arange(owners + 1, dtype=jnp.int32) * len(shard))
        received = _send(split, room, starts, slots, size)
        answers, merged, shard_rows = _answer(split, distinct, shard, received)
        owner = jnp.minimum(slots // len(shard), owners)
        rank = index - starts[owner]
        fits = (owner < owners) & (rank < room)
        # What does not fit has an index of its own past the buffer: none repeats.
        places = jnp.where(fits, owner * room + rank, owners * room + index)
        answered = _all_to_all(split, answers).at[places]
        values = answered.get(mode="fill", fill_value=jnp.nan, unique_indices=True)
        # Padding does not fit either, but only a row that was asked for may read as NaN.
        values = arguments.widened(jnp.where((slots < size)[:, None], values, 0))
        return slots, values, starts, merged, known_after_reading(shard_rows, values)

    in_specs = PartitionSpec(split.rows), PartitionSpec(*by_dimension)
    return split.map(take, in_specs, PartitionSpec(id_axes))(array, ids)


def sizes(split: TableSplit, id_axes: Axes, count: int, max_rows: int) -> tuple[int, int, int]:
    """How many slots each device asks for, has room for, and is asked for, of `count` ids."""
    devices = devices_along(split.mesh, id_axes)
    most = most_distinct(count // devices, split.order.vocab_size, max_rows)
    return most, *split.buffers(devices, most)


def _answer(
    split: TableSplit, distinct: int, shard: Float[Array, "s d"], received: Int32[Array, "n"]
) -> tuple[Float[Array, "n d"], Int32[Array, "n"], Int32[Array, "m"]]:
    """Inside shard_map, the rows of the slots that others ask a shard for.

    With them, where each slot is among the distinct ones, and the rows of the shard that these are.
    """
    asked = distinct_ascending(received, split.order.size, distinct)
    merged = find_each(asked, received)
    shard_rows = asked - index_along(split.rows) * len(shard)
    # Padding lies past the shard and reads zeros.
    values = shard.at[shard_rows].get(
        mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
    )
    known = (merged < distinct)[:, None]
    answers = jnp.where(known, read_or_zero(values, merged.astype(jnp.uint32)), jnp.nan)
    return answers, merged, shard_rows


@functools.partial(jax.jit, static_argnums=(0, 1))
def _return_to_owners(
    split: TableSplit,
    id_axes: Axes,
    starts: Int32[Array, "p"],
    merged: Int32[Array, "s"],
    shard_rows: Int32[Array, "m"],
    gradient: Float[Array, "n d"],
) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """On each device, the rows of its shard that were asked for, and the sum of their gradients."""
    # Devices along these axes hold the same rows.
    replicas = tuple(axis for axis in id_axes if axis not in split.rows)
    owners = devices_along(split.mesh, split.rows)

    def send(starts, merged, shard_rows, gradient):
        room = len(merged) // owners
        received = _send(split, room, starts, gradient, 0)
        sums = sum_by_index(received, merged, len(shard_rows))
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
    return send_all(starts, merged, shard_rows, gradient)


def _send(
    split: TableSplit, room: int, starts: Int32[Array, "p"], values: Array, fill: int
) -> Array:
    """Inside shard_map, sends each owner its values, which are contiguous, padded with `fill`.

    Returns those received, [owners * room, ...].
    """
    index = starts[:-1, None] + jnp.arange(room, dtype=jnp.int32)[None]
    index = jnp.where(index < starts[1:, None], index, len(values)).reshape(-1)
    return _all_to_all(split, values.at[index].get(mode="fill", fill_value=fill))


def _all_to_all(split: TableSplit, buffer: Array) -> Array:
    """Inside shard_map, sends each owner its block of the buffer; returns the blocks received."""
    return jax.lax.all_to_all(buffer, split.rows, split_axis=0, concat_axis=0, tiled=True)
