"""Reads the rows of a table that a whole batch needs, the same rows on every device.

Letters of shapes: v rows of the table, k rows that the batch reads, d columns.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from transformer_embed._src.compiled import known_after_reading
from transformer_embed._src.partitioning import on_every_device, typed_axes, varying_axes
from transformer_embed._src.rows.distinct_ids import distinct_rows, sum_over_devices
from transformer_embed._src.rows.row_gradient import RowGradient
from transformer_embed._src.tokens.lookup_gradient import read_or_zero


class SeenRows(NamedTuple):
    """Holds the rows that a loss sees on each device, and the row indices, ascending and padded."""

    row_indices: Int32[Array, "k"]
    values: Float[Array, "k d"]


class BatchRows(NamedTuple):
    """Holds the rows of a table that the whole batch reads, the same on every device.

    Args:
        table: The table, [v, d].
        row_indices: The indices of the rows, [k], ascending and padded.
        rows: The rows, [k, d]. The loss is differentiated with respect to them.
    """

    table: Array
    row_indices: Array
    rows: Array

    def seen(self, rows: Float[Array, "k d"]) -> SeenRows:
        """Returns the rows that a loss sees, with these values in the place of `self.rows`."""
        return SeenRows(row_indices=self.row_indices, values=rows)

    def gradient(self, sums: Float[Array, "k d"]) -> RowGradient:
        """Returns the gradient of the table.

        Args:
            sums: The gradients of the rows. Each is summed over the ids that read the row.
        """
        num_rows = len(self.table)
        # The optimizer will write new rows at these indices into the table, in place if the table
        # is donated. XLA writes without a copy of the table only if all rows are read before. So
        # `known_after_reading` returns the same indices, but as a result of the read rows.
        row_indices = known_after_reading(self.row_indices, self.rows)
        # If devices with different batches share the table, the gradients of all devices must be
        # summed. For an array that is the same on all devices, `jax.grad` inserts this sum. Here,
        # each device has read different rows, so the sum must add the rows of equal indices. The
        # devices whose gradients are summed are along the mesh axes on which the gradients vary,
        # while the table is the same on these devices. (`varying_axes` are the axes of a shard_map
        # along which an array has a value for each device.)
        batch_axes = varying_axes(sums) - varying_axes(self.table)
        if batch_axes:
            axis_names = tuple(sorted(batch_axes))
            row_indices, sums = sum_over_devices(row_indices, sums, num_rows, axis_names)
        return RowGradient(row_indices=row_indices, values=sums, num_rows=num_rows)


def read_batch_rows(
    table: Float[Array, "v d"], indices: Int32[Array, "..."], max_rows: int
) -> BatchRows:
    """Reads the distinct rows that the whole batch needs, on every device.

    Args:
        table: The table.
        indices: The row index of each id of the batch.
        max_rows: A bound on the number of distinct rows. Rows with higher indices are left out.
    """
    all_indices = on_every_device(indices)
    row_indices = distinct_rows(all_indices, len(table), max_rows)
    # The explicit mesh axes that split the rows and the columns, () for none.
    row_axes, column_axes = typed_axes(table)
    is_split = row_axes or column_axes
    if is_split:
        # In `read_or_zero`, each device reads zeros for the rows that it does not have, and the
        # devices add what they read. Padding, which is past the end, reads zeros. `read_or_zero`
        # takes uint32.
        rows = read_or_zero(table, row_indices.astype(jnp.uint32))
    else:
        # Padding reads the last row.
        rows = read_rows(table, row_indices)
    return BatchRows(table=table, row_indices=row_indices, rows=rows)


def read_rows(table: Array, row_indices: Int32[Array, "k"]) -> Array:
    """Reads the rows of ascending indices; an index outside of the table reads the nearest row."""
    return table.at[row_indices].get(
        mode="clip", indices_are_sorted=True, wrap_negative_indices=False
    )
