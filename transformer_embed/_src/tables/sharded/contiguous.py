"""Rows collected by a sum over the shards: each row is nonzero in only one of them.

    a device that holds some rows                  devices that read rows
    ids of all of them      <--- all-gather -----  ids of their own part of the batch
    its rows, zeros for others  ---- sum -------->  all rows

In training by rows, every device gets all distinct rows of the whole batch, and reads those of its
own part of the batch. Their gradient is summed over the devices that the batch is split over, and
each device then updates the rows that it holds. So what a device sends grows with the whole batch,
which is cheaper than an exchange up to some dozens of devices.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import replicated
from transformer_embed._src.tables.rows.distinct_ids import distinct_rows
from transformer_embed._src.tables.rows.gathered_rows import Taken, as_taken
from transformer_embed._src.tables.sharded.table_split import RowReader, TableSplit
from transformer_embed._src.tokens.lookup_gradient import read_from_shards


@functools.partial(jax.jit, static_argnums=0)
def gather_from_shards(
    split: TableSplit, array: Float[Array, "m c"], ids: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """The row of each id, which every shard looks up; zeros are added for those of the others."""
    place = split.mesh, split.rows, split.columns, split.axes_of(ids)
    return read_from_shards(*place, array, split.slots(ids).astype(jnp.uint32))


def take_from_shards(
    split: TableSplit, array: Float[Array, "m d"], ids: Int32[Array, "..."], max_rows: int
) -> Taken:
    """The distinct rows of the whole batch, on every device."""
    if split.columns:
        want = "rows over mesh axes, and whole columns"
        raise arguments.value_error("table", want, split.sharding.spec)
    vocab_size = split.order.vocab_size
    held = distinct_rows(replicated(ids, split.mesh), vocab_size, max_rows)
    rows = gather_from_shards(split._replace(batch_axes=()), array, held)
    return as_taken(array, vocab_size, held, rows, RowReader(split, ()))
