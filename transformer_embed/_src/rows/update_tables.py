"""Updates the rows of tables in place, one block of rows at a time, on each device that has rows.

Letters of shapes: v rows of the table, k rows with a gradient, d columns of the table, c columns of
one device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
from transformer_embed._src.rows.step_tables import Leaves, TableStep, with_block_shapes


def update_tables(step: Callable, leaves: Leaves, tables: Sequence[TableStep]) -> Leaves:
    """Returns all leaves after a step; the gradients stay as they are.

    Args:
        step: A function from all leaves, with an array for each gradient, to all leaves after the
            step.
        leaves: The leaves before the step.
        tables: The tables, as `row_check.find_tables` returns them.
    """
    # Rows of tables are updated in blocks, so many rows at a time. The first call of the step
    # updates everything that is not a table. In this call, zeros with as many rows as a block
    # replace each table, its state and its gradient. What the step makes of the zeros is not used.
    block_shapes = with_block_shapes(leaves, tables)
    leaves_with_zeros = dict(leaves)
    for table in tables:
        # The numbers of the leaves that are the gradient, the table and its state.
        for number in table.leaves:
            leaves_with_zeros[number] = jnp.zeros_like(block_shapes[number])
    if any(map(conversions.is_traced, jax.tree.leaves(leaves_with_zeros))):
        # The step is called here, and below for each block of rows, with arrays of the same shapes.
        # As a jit function, it is traced only once for all of these calls.
        step = jax.jit(step, inline=True)
    new_leaves = step(leaves_with_zeros)
    for table in tables:
        # The table itself, then its state.
        arrays = [leaves[number] for number in table.arrays]
        # A `RowGradient`, with some rows of the table's gradient.
        gradient = leaves[table.gradient]
        gradient_arrays = gradient.arrays
        # The explicit mesh axes that split the rows and the columns of the table, () for none.
        row_axes, column_axes = typed_axes(arrays[0])
        if row_axes or column_axes:
            # `gradient.spec` is the PartitionSpec of the gradient's rows.
            update_rows = _on_shards(step, table, arrays, gradient.spec)
            # Each device calls the step with whole arrays, so arrays that explicit axes split are
            # gathered first. (Over automatic axes, shard_map gathers arrays by itself.) XLA drops
            # the all-gather of an array that is not used.
            leaves_with_zeros = jax.tree.map(on_every_device, leaves_with_zeros)
            # If devices have exchanged the gradient (`is_split`), each device has the gradients of
            # its own shard already. Otherwise each device gets the gradients of all rows.
            if not gradient.is_split:
                gradient_arrays = jax.tree.map(on_every_device, gradient_arrays)
        else:
            update_rows = functools.partial(_update_in_blocks, step, table)
        new_arrays = update_rows(leaves_with_zeros, gradient_arrays, arrays)
        for number, new_array in zip(table.arrays, new_arrays, strict=True):
            new_leaves[number] = new_array
    return new_leaves


def _on_shards(
    step: Callable, table: TableStep, arrays: Sequence[Array], gradient_spec: PartitionSpec
) -> Callable:
    """Makes `_update_in_blocks` run on each device, for its own shard of a table and of its state.

    The result is a function of (all leaves, the arrays of the gradient, the arrays of the table)
    that returns the new arrays of the table. If the columns of a table are split, the devices send
    each other the columns of the rows that are updated. They send nothing else.

    Args:
        step: The step of the optimizer, as in `update_tables`.
        table: Which leaves of the step are the table, the state of the table and the gradient, by
            their numbers in the tree.
        arrays: The table itself, then its state.
        gradient_spec: The PartitionSpec of the gradient, if each device has the gradients of its
            own shard. Otherwise it is empty, and each device has the gradients of all rows.
    """
    table_array = arrays[0]
    mesh = jax.typeof(table_array).sharding.mesh
    # The explicit mesh axes that split the rows and the columns of the table, () for none.
    row_axes, column_axes = typed_axes(table_array)
    # The PartitionSpecs of the table and of its state.
    specs = [_checked_spec(table_array, array) for array in arrays]
    # The numbers of the leaves, among the table and its state, whose columns are split.
    split_leaves = []
    for number, spec in zip(table.arrays, specs, strict=True):
        # The mesh axes of each dimension. The first dimension counts rows.
        _, *axes_of_columns = spec
        if any(axes_of_columns):
            split_leaves.append(number)

    # A block of rows, which `step_on_whole_rows` gets, has all of its rows on this device, so no
    # axis splits them. The columns are split as the columns of the table.
    block_axes = [(), column_axes]

    def step_on_whole_rows(leaves: Leaves) -> Leaves:
        """Calls the step with all columns of the rows, and returns this device's columns."""
        whole_leaves = dict(leaves)
        for number in split_leaves:
            whole_leaves[number] = all_gather(leaves[number], block_axes)
        new_leaves = dict(step(whole_leaves))
        for number in split_leaves:
            width_on_device = leaves[number].shape[1]
            whole_rows = new_leaves[number]
            new_leaves[number] = _own_columns(whole_rows, width_on_device, column_axes)
        return new_leaves

    def update_shard(
        leaves: Leaves, gradient: GradientArrays, arrays: Sequence[Array]
    ) -> list[Array]:
        """Updates the rows of this device's shard."""
        # The index, in the whole table, of the shard's first row. `_update_in_blocks` subtracts it
        # from the row indices. Then the indices of rows of other shards are negative or past the
        # end of the shard, so these rows are dropped.
        first_row = first_index(row_axes, len(arrays[0]))
        return _update_in_blocks(step_on_whole_rows, table, leaves, gradient, arrays, first_row)

    leaf_spec = PartitionSpec()
    update_on_each_device = on_each_device(
        mesh, update_shard, in_specs=(leaf_spec, gradient_spec, specs), out_specs=specs
    )
    # Compiled, so that a caller outside of `jax.jit` does not run many small programs.
    as_one_program = compiled()
    return as_one_program(update_on_each_device)


def _checked_spec(table: Array, state: Array) -> PartitionSpec:
    """Returns the PartitionSpec that an array of the optimizer's state must have.

    A dimension of the state that is as long as the same dimension of the table must be split over
    the same mesh axes. Any other dimension must be whole, which means not split. For example, the
    second dimension of a state [v, 1], which has one number for each row, must be whole.

    Args:
        table: The table, [v, d].
        state: An array of the state that belongs to the table, such as momenta, or the table
            itself.

    Raises:
        ValueError: The state is split in another way, so a device would lack the state of some of
            the rows that it has.
    """
    # A tuple of mesh axes for each dimension, () for a whole dimension.
    table_axes = typed_axes(table)
    wanted_axes: list[Axes] = [()] * state.ndim
    for dimension in range(min(table.ndim, state.ndim)):
        if state.shape[dimension] == table.shape[dimension]:
            wanted_axes[dimension] = table_axes[dimension]
    spec = PartitionSpec(*wanted_axes)
    if typed_axes(state) != wanted_axes:
        want = f"{list(state.shape)} split as its table, {spec} (jax.device_put)"
        raise arguments.value_error("state", want, jax.typeof(state).sharding.spec)
    return spec


def _own_columns(rows: Float[Array, "k d"], width: int, column_axes: Axes) -> Array:
    """Returns the `width` columns that this device holds of whole rows."""
    first_column = first_index(column_axes, width)
    return jax.lax.dynamic_slice_in_dim(rows, first_column, width, axis=1)


def _update_in_blocks(
    step: Callable,
    table: TableStep,
    leaves: Leaves,
    gradient: GradientArrays,
    arrays: Sequence[Array],
    first_row: Array | int = 0,
) -> list[Array]:
    """Returns a table and its state after a step, read and written one block of rows at a time.

    A block is some consecutive rows of the gradient. A step on all rows at once would allocate new
    memory for each array. If something has changed the gradient, so that its fingerprint no longer
    fits the values, each row with a gradient becomes NaN.

    Args:
        step: The step of the optimizer, as in `update_tables`.
        table: The numbers of the leaves that are the table, its state and its gradient.
        leaves: All leaves by number. But the leaves that are the table, its state and its gradient
            are arrays of zeros, with as many rows as a block.
        gradient: The arrays of the gradient. Row indices ascend. An index that is no row of
            `arrays` is padding.
        arrays: The table itself, then its state.
        first_row: The row index of the first row of `arrays`.
    """
    # The fingerprint is a checksum, which `value_and_grad` made of the gradient.
    is_unchanged = fits(gradient.row_indices, gradient.values, gradient.fingerprint)
    row_indices = gradient.row_indices - first_row
    # A gradient without rows has no block. The loop below would not run, but jax would
    # still trace the slice of a block, and raise an error.
    if not len(row_indices):
        return list(arrays)
    # The zeros in the place of the gradient have as many rows as a block.
    block_size = len(leaves[table.gradient])
    padded_indices, padded_values = _fill_last_block(
        row_indices, gradient.values, block_size, num_rows=len(arrays[0])
    )

    def update_block(i: Any, arrays: list[Array]) -> list[Array]:
        """Updates the rows of block i."""
        block_indices = jax.lax.dynamic_slice_in_dim(padded_indices, i * block_size, block_size)
        block_values = jax.lax.dynamic_slice_in_dim(padded_values, i * block_size, block_size)
        # If something has changed the gradient, the values become NaN here, block by block. This
        # costs no pass over all rows.
        block_gradient = or_nan(is_unchanged, block_values)
        return _update_rows(step, table, leaves, arrays, block_indices, block_gradient)

    block_count = len(padded_indices) // block_size
    if block_count == 1:
        return update_block(0, list(arrays))
    return jax.lax.fori_loop(0, block_count, update_block, list(arrays))


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

    Args:
        step: The step of the optimizer.
        table: The numbers of the leaves that are the table, its state and its gradient.
        leaves: All leaves by number.
        arrays: The table itself, then its state.
        row_indices: The rows of the block.
        gradient: The gradient of these rows.
    """
    old_rows = [read_rows(array, row_indices) for array in arrays]
    # The step gets the rows of the block in the place of the whole arrays.
    before = dict(leaves)
    before[table.gradient] = gradient
    before.update(zip(table.arrays, old_rows, strict=True))
    after = step(before)
    has_gradient = jnp.any(gradient != 0, axis=-1)
    # An array of the state may have one number for each row in place of d columns. `vmap` chooses
    # row by row, so it takes arrays of any rank.
    choose_rows = jax.vmap(jnp.where)
    new_rows = [choose_rows(has_gradient, after[n], before[n]) for n in table.arrays]
    return [
        _write(array, row_indices, array_rows)
        for array, array_rows in zip(arrays, new_rows, strict=True)
    ]


def _fill_last_block(
    row_indices: Int32[Array, "k"], values: Float[Array, "k d"], block_size: int, num_rows: int
) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """Adds padding, so that blocks of `block_size` divide the row indices and their values.

    The padding is row indices past the end of the table, with zeros. For example, the indices 1 4
    in a table of 5 rows, in blocks of 3, become 1 4 5.
    """
    padding_count = -len(row_indices) % block_size
    # `_write` promises XLA that indices ascend and are distinct. So the padding starts after the
    # last index, and also after the last row of the table.
    first_padding = jnp.maximum(row_indices[-1] + 1, num_rows)
    padding = first_padding + jnp.arange(padding_count, dtype=jnp.int32)
    padded_indices = jnp.concatenate([row_indices, padding])
    padded_values = jnp.pad(values, ((0, padding_count), (0, 0)))
    return padded_indices, padded_values


def _write(array: Array, row_indices: Int32[Array, "k"], rows: Array) -> Array:
    """Writes rows at ascending indices; rows whose index is outside of the array are dropped."""
    return array.at[row_indices].set(
        rows,
        mode="drop",
        unique_indices=True,
        indices_are_sorted=True,
        wrap_negative_indices=False,
    )
