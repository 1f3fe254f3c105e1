"""Updates the rows of tables in place, one block of rows at a time, on each device that has rows.

Letters of shapes: k rows with a gradient, d columns of the table, c columns of one device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments, conversions
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import (
    Axes,
    all_gather,
    first_index,
    on_each_device,
    on_every_device,
    typed_axes,
)
from transformer_embed._src.rows.batch_rows import read_rows
from transformer_embed._src.rows.fingerprint import fits, or_nan
from transformer_embed._src.rows.row_gradient import GradientArrays
from transformer_embed._src.rows.step_tables import Leaves, TableStep, with_rows


def update_tables(step: Callable, leaves: Leaves, tables: Sequence[TableStep]) -> Leaves:
    """Returns all leaves after a step; the gradients stay as they are.

    Args:
        step: A function from all leaves, with an array for each gradient, to all leaves after the
            step.
        leaves: The leaves before the step.
        tables: The tables, as `row_check.find_tables` returns them.
    """
    blocks = with_rows(leaves, [(table, table.block_size) for table in tables])
    # Everything that is not a table is updated once. The rows of tables do not count here.
    no_rows = {n: jnp.zeros_like(blocks[n]) for table in tables for n in table.leaves}
    shared = leaves | no_rows
    if any(map(conversions.is_traced, jax.tree.leaves(shared))):
        # The calls below have the shapes of a block, so they share the trace of this call.
        step = jax.jit(step, inline=True)
    new_leaves = step(shared)
    for table in tables:
        arrays = [leaves[n] for n in table.arrays]
        gradient = leaves[table.gradient]
        gradient_arrays = gradient.arrays
        update = functools.partial(_update_in_blocks, step, table)
        if any(typed_axes(arrays[0])):
            update = _on_shards(step, table, arrays, gradient.owners)
            # shard_map would do this under automatic axes. XLA drops the all-gather of what is not
            # used.
            shared = jax.tree.map(on_every_device, shared)
            if not any(gradient.owners):
                gradient_arrays = jax.tree.map(on_every_device, gradient_arrays)
        new_arrays = update(shared, gradient_arrays, arrays)
        new_leaves |= zip(table.arrays, new_arrays, strict=True)
    return new_leaves


def _on_shards(
    step: Callable, table: TableStep, arrays: Sequence[Array], owners: PartitionSpec
) -> Callable:
    """Makes `_update_in_blocks` run on each device, for its own shard of a table and of its state.

    The devices send nothing but blocks of rows, and these only if their columns are split.

    Args:
        step: The step of the optimizer, as in `update_tables`.
        table: The table.
        arrays: The table itself, then its state.
        owners: How the gradient is split, if each device has the gradient of its own shard.
    """
    mesh = jax.typeof(arrays[0]).sharding.mesh
    row_axes, column_axes = typed_axes(arrays[0])
    specs = [_checked_spec(arrays[0], array) for array in arrays]
    # The leaves whose columns are split.
    split_leaves = [n for n, spec in zip(table.arrays, specs, strict=True) if any(spec[1:])]

    def step_on_whole_rows(leaves):
        whole = {n: all_gather(leaves[n], ((), column_axes)) for n in split_leaves}
        new = step(leaves | whole)
        return new | {n: _own_columns(new[n], leaves[n], column_axes) for n in split_leaves}

    def update_shard(shared, gradient, arrays):
        # Row indices of other shards are before this shard or past its end.
        first = first_index(row_axes, len(arrays[0]))
        return _update_in_blocks(step_on_whole_rows, table, shared, gradient, arrays, first)

    in_specs = PartitionSpec(), owners, specs
    return compiled()(on_each_device(mesh, update_shard, in_specs, specs))


def _checked_spec(table: Array, state: Array) -> PartitionSpec:
    """Returns how a table or its state is split: as the table, in the dimensions that both have.

    If the state is split otherwise, a device would lack the state of its rows: a ValueError.
    """
    dimensions = zip(typed_axes(table), table.shape, state.shape, strict=False)
    axes = [names if size == own_size else () for names, size, own_size in dimensions]
    axes += [()] * (state.ndim - len(axes))
    if typed_axes(state) != axes:
        want = f"{list(state.shape)} split as its table, {PartitionSpec(*axes)} (jax.device_put)"
        raise arguments.value_error("state", want, jax.typeof(state).sharding.spec)
    return PartitionSpec(*axes)


def _own_columns(rows: Float[Array, "k d"], own: Float[Array, "k c"], column_axes: Axes) -> Array:
    """Returns the columns of whole rows that this device holds."""
    width = own.shape[1]
    first = first_index(column_axes, width)
    return jax.lax.dynamic_slice_in_dim(rows, first, width, axis=1)


def _update_in_blocks(
    step: Callable,
    table: TableStep,
    leaves: Leaves,
    gradient: GradientArrays,
    arrays: Sequence[Array],
    first: Array | int = 0,
) -> list[Array]:
    """Returns a table and its state after a step, read and written one block of rows at a time.

    All rows at once would allocate new memory for each array. There may be any number of rows. If
    the fingerprint does not fit, each row with a gradient is updated by NaN.

    Args:
        step: The step of the optimizer, as in `update_tables`.
        table: The table.
        leaves: All leaves, with blocks of zeros in the place of tables.
        gradient: The arrays of the gradient. Row indices ascend, and others than the rows of
            `arrays` are padding.
        arrays: The table itself, then its state.
        first: The row index of the first row of `arrays`.
    """
    fits_fingerprint = fits(*gradient)
    row_indices = gradient.row_indices - first
    # If there are no rows, no block can be sliced, not even in a loop that does not run.
    if not len(row_indices):
        return list(arrays)
    block_size = len(leaves[table.gradient])
    blocks = _in_whole_blocks(block_size, len(arrays[0]), row_indices, gradient.values)

    def update_block(i: Any, arrays: list[Array]) -> list[Array]:
        block_indices, block_values = (
            jax.lax.dynamic_slice_in_dim(array, i * block_size, block_size) for array in blocks
        )
        # The check is applied here, where it costs no pass over all rows.
        block_gradient = or_nan(fits_fingerprint, block_values)
        return _update_rows(step, table, leaves, arrays, block_indices, block_gradient)

    if len(blocks.row_indices) == block_size:
        return update_block(0, list(arrays))
    count = len(blocks.row_indices) // block_size
    return jax.lax.fori_loop(0, count, update_block, list(arrays))


def _update_rows(
    step: Callable,
    table: TableStep,
    leaves: Leaves,
    arrays: Sequence[Array],
    row_indices: Int32[Array, "k"],
    gradient: Float[Array, "k d"],
) -> list[Array]:
    """Returns a table and its state after a step that changes only the rows of one block.

    A row of the block whose gradient is 0 stays as it is.
    """
    old_rows = [read_rows(array, row_indices) for array in arrays]
    rows = dict(zip(table.leaves, [gradient, *old_rows], strict=True))
    new = step(leaves | rows)
    has_gradient = jnp.any(gradient != 0, axis=-1)
    # The state may have one number for each row, and vmap takes arrays of any rank.
    choose = jax.vmap(jnp.where)
    new_rows = [choose(has_gradient, new[n], rows[n]) for n in table.arrays]
    return [
        _write(array, row_indices, rows_of_array)
        for array, rows_of_array in zip(arrays, new_rows, strict=True)
    ]


class _Blocks(NamedTuple):
    """Row indices and their gradient, in whole blocks."""

    row_indices: Array
    values: Array


def _in_whole_blocks(
    block_size: int, num_rows: int, row_indices: Int32[Array, "k"], values: Float[Array, "k d"]
) -> _Blocks:
    """Adds padding that fills the last block."""
    count = -len(row_indices) % block_size
    # Each write is told that indices ascend and are distinct.
    past = jnp.maximum(row_indices[-1] + 1, num_rows) + jnp.arange(count, dtype=jnp.int32)
    return _Blocks(
        row_indices=jnp.concatenate([row_indices, past]),
        values=jnp.pad(values, ((0, count), (0, 0))),
    )


def _write(array: Array, row_indices: Int32[Array, "k"], rows: Array) -> Array:
    """Writes rows at ascending indices; rows whose index is outside of the array are dropped."""
    return array.at[row_indices].set(
        rows,
        mode="drop",
        unique_indices=True,
        indices_are_sorted=True,
        wrap_negative_indices=False,
    )
