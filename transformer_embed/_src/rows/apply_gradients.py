"""One step of an optimizer that updates only the rows with a gradient, one block at a time.

`optimizer.update` is called once for all that is not a table, with zeros in place of the tables'
rows, and once in the loop over the blocks of each table, with the rows of the block in their place.
XLA drops the results that are not used, so a block costs what its rows cost. `row_check` makes sure
beforehand that this gives the rows of the dense step.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import (
    Axes,
    all_gather,
    index_along,
    on_each_device,
    on_every_device,
    typed_axes,
)
from transformer_embed._src.rows import row_check
from transformer_embed._src.rows.fingerprint import fits, or_nan
from transformer_embed._src.rows.gathered_rows import read_rows
from transformer_embed._src.rows.row_gradient import as_arrays, check_shapes, is_gradient

if TYPE_CHECKING:
    import optax

Tree = Any


def apply_gradients(
    optimizer: "optax.GradientTransformation",
    grads: Tree,
    state: Tree,
    params: Tree,
    **extra_args: Any,
) -> tuple[Tree, Tree]:
    """One step of an optimizer that updates, in each table, only the rows with a gradient.

    In a table, only the rows with a nonzero gradient change, together with their optimizer state.
    Every other row stays the same bit for bit, including rows that the batch does not read and the
    padding row; ids out of range change nothing. Parameters whose gradient is not a `RowGradient`
    are updated by `optimizer.update` and `optax.apply_updates` as usual.

    Under jit with params and state donated, tables and state are written in place, at a cost that
    follows the batch.

    It first traces the optimizer, once under jit, to prove that each row is updated from that row
    alone. The page "Optimizers that train by rows" lists which optimizers pass. To clip by a global
    norm, clip the gradients first.

    Args:
        optimizer: an optax optimizer.
        grads: the gradients that `value_and_grad` returned, scaled as you like. Rows whose gradient
            was mixed with those of other ids become NaN (see `RowGradient`).
        state: that of optimizer.init(params).
        params: the parameters.
        **extra_args: handed to optimizer.update.

    Returns:
        (params, state).

    Raises:
        TypeError: the optimizer has no `init` and `update`; params or a state that do not
            consist of arrays; a `RowGradient` that left the jit that made it.
        ValueError: the optimizer may update a row from other rows (the message names the
            transformation and the reason), or changes the dtype of its state; trees that do not fit
            together.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import transformer_embed as te
        >>> params = {"embeddings": jnp.ones([5, 2]), "scale": jnp.array(2.0)}
        >>> def loss(params, ids):
        ...     return jnp.sum(params["scale"] * te.lookup(params["embeddings"], ids))
        >>> optimizer = optax.sgd(0.1)
        >>> state = optimizer.init(params)
        >>> def step(params, state, ids):
        ...     value, grads = te.rows.value_and_grad(loss, ids={"embeddings": ids})(params, ids)
        ...     params, state = te.rows.apply_gradients(optimizer, grads, state, params)
        ...     return params, state, value
        >>> step = jax.jit(step, donate_argnums=(0, 1))
        >>> params, state, value = step(params, state, jnp.array([3, 3, 1]))
        >>> print(params["embeddings"][:, 0], params["scale"])
        [1.  0.8 1.  0.6 1. ] 1.4

    Source:
        Lazy Adam: https://www.tensorflow.org/addons/api_docs/python/tfa/optimizers/LazyAdam;
        https://docs.pytorch.org/docs/stable/generated/torch.optim.SparseAdam.html. Why the rows:
        https://github.com/jax-ml/jax/issues/851
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        got = type(optimizer).__name__
        raise arguments.type_error("optimizer", "an optax.GradientTransformation", got)
    # shard_map takes no sharded arrays but as arguments.
    others, extra_treedef = jax.tree.flatten(extra_args)
    arrays = {n: leaf for n, leaf in enumerate(others) if isinstance(leaf, jax.Array)}
    inputs = {"grads": grads, "params": params, "state": state}
    converted = [as_arrays(name, tree) for name, tree in inputs.items()]
    trees, treedef = jax.tree.flatten((*converted, arrays), is_leaf=is_gradient)
    check_shapes("params", *converted[:2])
    leaves = dict(enumerate(trees))
    tables = row_check.find_tables(optimizer.init, treedef, leaves)

    def extra_of(arrays: dict[int, Any]) -> dict[str, Any]:
        return jax.tree.unflatten(extra_treedef, (dict(enumerate(others)) | arrays).values())

    step = functools.partial(_step, optimizer.update, extra_of, treedef)
    row_check.check(step, leaves, tables, optimizer.update)
    new_leaves = _update_tables(step, leaves, tables)
    _, params, state, _ = jax.tree.unflatten(treedef, new_leaves.values())
    return params, state


def _step(
    update: Callable, extra_of: Callable, treedef: Any, leaves: dict[int, Any]
) -> dict[int, Any]:
    """The leaves of (grads, params, state, arrays) after a step; the first and the last stay."""
    # Slow to load, and only training needs it.
    import optax  # noqa: PLC0415

    grads, params, state, arrays = jax.tree.unflatten(treedef, leaves.values())
    updates, state = update(grads, state, params, **extra_of(arrays))
    after = grads, optax.apply_updates(params, updates), state, arrays
    new_leaves, new_treedef = jax.tree.flatten(after, is_leaf=is_gradient)
    if new_treedef != treedef:
        raise TypeError("updates and state do not have the structure of parameters and state")
    return dict(enumerate(new_leaves))


def _update_tables(
    step: Callable, leaves: row_check.Leaves, tables: Sequence[row_check.Table]
) -> row_check.Leaves:
    """All leaves after a step; the gradients stay."""
    blocks = row_check.with_rows(leaves, [(table, table.block_size) for table in tables])
    of_tables = [n for table in tables for n in table.indices]
    # All that is not a table is updated once; a table's rows do not count here.
    shared = leaves | {n: jnp.zeros_like(blocks[n]) for n in of_tables}
    if any(map(arguments.is_traced, jax.tree.leaves(shared))):
        # The calls below have the shapes of a block: they share its trace.
        step = jax.jit(step, inline=True)
    new_leaves = step(shared)
    for indices in (table.indices for table in tables):
        gradient, *arrays = (leaves[n] for n in indices)
        update_arrays, parts = functools.partial(_update_in_blocks, step, indices), gradient.parts
        if any(typed_axes(arrays[0])):
            update_arrays = _on_shards(step, indices, arrays, gradient.owners)
            # As shard_map does under automatic axes. XLA drops the all-gather of what is not used.
            shared = jax.tree.map(on_every_device, shared)
            if not any(gradient.owners):
                parts = jax.tree.map(on_every_device, parts)
        new = update_arrays(shared, parts, arrays)
        new_leaves |= zip(indices[1:], new, strict=True)
    return new_leaves


def _on_shards(
    step: Callable, indices: Sequence[int], arrays: Sequence[Array], owners: PartitionSpec
) -> Callable:
    """`_update_in_blocks` on each device, of its own shard of a table and its state.

    Nothing is sent but blocks of rows, if their columns are split.
    """
    mesh, (rows, columns) = jax.typeof(arrays[0]).sharding.mesh, typed_axes(arrays[0])
    specs = [_checked_spec(arrays[0], array) for array in arrays]
    cut = [n for n, spec in zip(indices[1:], specs, strict=True) if any(spec[1:])]

    def step_on_whole_rows(leaves):
        whole = {n: all_gather(leaves[n], ((), columns)) for n in cut}
        new = step(leaves | whole)
        return new | {n: _own_columns(new[n], leaves[n], columns) for n in cut}

    def update_shard(shared, parts, arrays):
        # Ids of other shards are before this one or past its end.
        first = index_along(rows) * len(arrays[0])
        return _update_in_blocks(step_on_whole_rows, indices, shared, parts, arrays, first)

    in_specs = PartitionSpec(), owners, specs
    return compiled()(on_each_device(mesh, update_shard, in_specs, specs))


def _checked_spec(table: Array, state: Array) -> PartitionSpec:
    """How a table or its state is split: as the table, in the dimensions that both have.

    Raises a ValueError if it is split otherwise: each device must have the state of its rows.
    """
    sizes = zip(typed_axes(table), table.shape, state.shape, strict=False)
    axes = [names if size == own else () for names, size, own in sizes]
    axes += [()] * (state.ndim - len(axes))
    if typed_axes(state) != axes:
        want = f"{list(state.shape)} split as its table, {PartitionSpec(*axes)} (jax.device_put)"
        raise arguments.value_error("state", want, jax.typeof(state).sharding.spec)
    return PartitionSpec(*axes)


def _own_columns(rows: Float[Array, "k d"], own: Float[Array, "k c"], columns: Axes) -> Array:
    """The columns of whole rows that this device holds."""
    width = own.shape[1]
    return jax.lax.dynamic_slice_in_dim(rows, index_along(columns) * width, width, axis=1)


def _update_in_blocks(
    step: Callable,
    indices: Sequence[int],
    leaves: dict[int, Any],
    parts: Sequence[Array],
    arrays: Sequence[Array],
    first: Array | int = 0,
) -> list[Array]:
    """A table and its state after a step, read and written one block of rows at a time.

    All rows at once would allocate new memory for each array. There may be any number of ids. They
    ascend, and count from the first row of the arrays on; others are padding. Each is updated by
    NaN if the gradient is not of these ids.
    """
    ids, gradient, scaled = parts
    is_right, ids = fits(ids, gradient, scaled), ids - first
    # Of no ids, no block can be sliced, not even in a loop that does not run.
    if not len(ids):
        return list(arrays)
    block = len(leaves[indices[0]])
    ids, gradient = _in_whole_blocks(block, len(arrays[0]), ids, gradient)

    def update_block(i: Any, arrays: list[Array]) -> list[Array]:
        block_ids, block_gradient = (
            jax.lax.dynamic_slice_in_dim(array, i * block, block) for array in (ids, gradient)
        )
        old = (read_rows(array, block_ids) for array in arrays)
        # Here, where it costs no pass over all rows.
        block_gradient = or_nan(is_right, block_gradient)
        rows = dict(zip(indices, [block_gradient, *old], strict=True))
        new = step(leaves | rows)
        moved = jnp.any(block_gradient != 0, axis=-1)

        # State may have one number for each row: vmap takes arrays of any rank.
        choose = jax.vmap(jnp.where)
        after = [choose(moved, new[index], rows[index]) for index in indices[1:]]
        return [_write(array, block_ids, each) for array, each in zip(arrays, after, strict=True)]

    if len(ids) == block:
        return update_block(0, list(arrays))
    return jax.lax.fori_loop(0, len(ids) // block, update_block, list(arrays))


def _in_whole_blocks(
    block: int, rows: int, ids: Int32[Array, "k"], gradient: Float[Array, "k d"]
) -> tuple[Array, Array]:
    """The ids and their gradient, with padding that fills the last block."""
    count = -len(ids) % block
    # A write is told that ids ascend and are distinct.
    past = jnp.maximum(ids[-1] + 1, rows) + jnp.arange(count, dtype=jnp.int32)
    return jnp.concatenate([ids, past]), jnp.pad(gradient, ((0, count), (0, 0)))


def _write(array: Array, ids: Int32[Array, "k"], rows: Array) -> Array:
    """The array with other rows at these ids, which ascend; those outside of it are dropped."""
    return array.at[ids].set(
        rows,
        mode="drop",
        unique_indices=True,
        indices_are_sorted=True,
        wrap_negative_indices=False,
    )
