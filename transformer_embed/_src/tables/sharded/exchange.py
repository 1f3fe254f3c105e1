"""Rows by exchange: what devices send to the owners of rows, and get from them.

Each device asks the owners for the rows that its part of the batch reads, and sends them the
gradients of those rows:

    a device                                       the owners of the rows
    distinct slots of its part  - all-to-all --->  slots asked for, repeats merged
    rows                       <--- all-to-all --  rows of the shard
    gradients of these rows     - all-to-all --->  one gradient for each row, repeats summed,
                                                   for the shard's own update

A loss is differentiated by the rows of the shards, so jax finds the last step as the transpose of
the one before it. Buffers have a fixed size (see `buffers`); the answer to a slot that does not fit
is NaN, and its gradient is dropped.

A slot is the index of an id's row in the sharded array, so a device's shard is a range of slots,
and ascending slots are grouped by owner. Each list ascends, and numbers past the end are padding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.compiled import known_after_reading
from transformer_embed._src.partitioning import Axes, devices_along, index_along
from transformer_embed._src.tables.rows.distinct_ids import (
    count_below,
    distinct_ascending,
    find_each,
    sum_over_devices,
)
from transformer_embed._src.tables.rows.gathered_rows import Taken
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
    taken = take_from_owners(split, arguments.widened(array), ids, ids.size)
    return taken.reader.read(*taken.read(taken.rows), ids).astype(array.dtype)


def take_from_owners(
    split: TableSplit, array: Float[Array, "m d"], ids: Int32[Array, "..."], max_rows: int
) -> Taken:
    """Differentiated by the rows of its shard that each device is asked for.

    It reads the distinct rows of its part of the ids.
    """
    id_axes = sum(split.axes_of(ids), ())
    replicas = tuple(axis for axis in id_axes if axis not in split.rows)
    axes = (*split.rows, *replicas)
    if len(axes) > len(id_axes):
        want = (
            f"split over the mesh axes of the table's rows, {split.rows}, to exchange them "
            "(their first dimension is the batch, which the devices must divide)"
        )
        got = f"shape {list(ids.shape)} split over {id_axes}"
        raise arguments.value_error("ids", want, got)
    rows, shard_rows, held, *request = _ask_owners(split, axes, max_rows, array, ids)

    def read(rows: Float[Array, "n d"]) -> tuple[Array, Array]:
        return held, _answer(split, axes, *request, rows)

    def gradient(sums: Float[Array, "n d"]) -> RowGradient:
        ids = shard_rows
        if replicas:
            own = functools.partial(sum_over_devices, vocab_size=split.shard, axis_name=replicas)
            sum_all = split.map(own, PartitionSpec(axes), PartitionSpec(split.rows))
            ids, sums = sum_all(ids, sums)
        return RowGradient(ids, sums.astype(array.dtype), split.order.vocab_size, split)

    return Taken(rows, read, gradient, RowReader(split, axes))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _ask_owners(
    split: TableSplit,
    axes: Axes,
    max_rows: int,
    array: Float[Array, "m d"],
    ids: Int32[Array, "..."],
) -> tuple[Array, ...]:
    """On each device, the rows of its shard that are asked for, in float32 or wider, and which.

    Then the slots that the device asks for, as far as they find room, and what `_answer` needs: for
    each slot that it receives, which of the rows it is, and whether it is none of them.
    """
    size, owners = split.order.size, devices_along(split.mesh, split.rows)
    most, room, distinct = split.buffers(axes, ids.size, max_rows)

    def ask(shard, ids):
        slots = distinct_ascending(split.slots(ids), size, most)
        index = _by_owner(slots, jnp.arange(owners + 1, dtype=jnp.int32) * len(shard), room)
        sent = slots.at[index].get(mode="fill", fill_value=size)
        # The rest of an owner's part repeats the slot before it, so that all of them ascend.
        held = jax.lax.cummax(jnp.where(index < most, sent, -1))
        received = _all_to_all(split, sent)
        asked = distinct_ascending(received, size, distinct)
        shard_rows = asked - index_along(split.rows) * len(shard)
        # Padding lies past the shard and reads zeros.
        rows = shard.at[shard_rows].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )
        which = find_each(asked, received)
        is_lost = (which == distinct) & (received < size)
        shard_rows = known_after_reading(shard_rows, rows)
        return arguments.widened(rows), shard_rows, held, which, is_lost

    in_specs = PartitionSpec(split.rows), PartitionSpec(*split.axes_of(ids))
    return split.map(ask, in_specs, PartitionSpec(axes))(array, ids)


def _by_owner(slots: Int32[Array, "n"], bounds: Int32[Array, "m"], room: int) -> Int32[Array, "k"]:
    """The indices of the slots between each two bounds, as many as there is room; n: none."""
    starts = count_below(slots, bounds)
    index = starts[:-1, None] + jnp.arange(room, dtype=jnp.int32)[None]
    return jnp.where(index < starts[1:, None], index, len(slots)).reshape(-1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _answer(split: TableSplit, axes: Axes, *request_and_rows: Array) -> Float[Array, "k d"]:
    """On each device, the rows of the slots that it asks for, from those of all shards."""

    def answer(which, is_lost, rows):
        answers = read_or_zero(rows, which.astype(jnp.uint32))
        return _all_to_all(
            split, jnp.where(is_lost[:, None], np.array(np.nan, rows.dtype), answers)
        )

    spec = PartitionSpec(axes)
    return split.map(answer, spec, spec)(*request_and_rows)


def _all_to_all(split: TableSplit, buffer: Array) -> Array:
    """Inside shard_map, sends each owner its block of the buffer; returns the blocks received."""
    return jax.lax.all_to_all(buffer, split.rows, split_axis=0, concat_axis=0, tiled=True)
