"""One step of an optimizer that updates only the rows with a gradient, one block at a time.

`optimizer.update` is called once for all that is not a table, with zeros in place of the tables'
rows, and once in the loop over the blocks of each table, with the rows of the block in their place.
XLA drops the results that are not used, so a block costs what its rows cost. `row_check` makes sure
beforehand that this gives the rows of the dense step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.rows import row_check
from transformer_embed._src.rows.distinct_ids import BLOCK
from transformer_embed._src.rows.gathered_rows import RowTable, is_table, read_rows
from transformer_embed._src.rows.row_gradient import RowGradient, check_ascending

if TYPE_CHECKING:
    import optax

Tree = Any


def update(
    optimizer: "optax.GradientTransformation",
    grads: Tree,
    state: Tree,
    params: Tree,
    **extra_args: Any,
) -> tuple[Tree, Tree]:
    """One step of an optimizer that updates, in each table, only the rows with a gradient.

    Parameters whose gradient is not a `RowGradient` are updated by `optimizer.update` and
    `optax.apply_updates` as usual. In a table, only the rows with a nonzero gradient change,
    together with their optimizer state. Every other row stays the same bit for bit, including rows
    that the batch does not read and the padding row; ids out of range change nothing. Such a lazy
    update differs from the dense one if the dense optimizer moves rows without a gradient: until
    its next gradient, a row's moments do not decay, momentum does not move it, and weight decay
    does not shrink it. Step counts, and so bias correction and schedules, advance for all rows. SGD
    without momentum and Adagrad leave rows without a gradient alone, so they train the same either
    way.

    Under jit with params and state donated, tables and state are written in place, at a cost that
    follows the batch. In a sharded table, each shard updates its own rows: only their gradient is
    sent, by one all-reduce over the devices that share the batch.

    `update` first traces the optimizer and follows the data to prove that each row is updated from
    that row alone: under jit, once. Adam, Adagrad, Lion and most others pass, with schedules, masks
    and labels. Global norms, Adafactor, noise and gradient accumulation (`optax.MultiSteps`) do
    not. To clip by a global norm, clip the gradients before `update`.

    Args:
        optimizer: an optax optimizer.
        grads: the gradients that `value_and_grad` returned.
        state: that of optimizer.init(params).
        params: the parameters.
        **extra_args: handed to optimizer.update.

    Returns:
        (params, state).

    Raises:
        TypeError: the optimizer does not have `init` and `update`, as those of optax do.
        ValueError: the optimizer may update a row from other rows (the message names the
            transformation and the reason), or changes the dtype of its state; trees that do not
            fit together; a gradient from another trace, or with ids that do not ascend.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import transformer_embed as te
        >>> params = {"embeddings": jnp.ones([5, 2]), "scale": jnp.array(2.0)}
        >>> loss = lambda params, ids: jnp.sum(params["scale"] * te.lookup(params["embeddings"], ids))
        >>> optimizer = optax.sgd(0.1)
        >>> state = optimizer.init(params)
        >>> def step(params, state, ids):
        ...     value, grads = te.rows.value_and_grad(loss, ids={"embeddings": ids})(params, ids)
        ...     params, state = te.rows.update(optimizer, grads, state, params)
        ...     return params, state, value
        >>> params, state, value = jax.jit(step, donate_argnums=(0, 1))(params, state, jnp.array([3, 3, 1]))
        >>> print(params["embeddings"][:, 0], params["scale"])
        [1.  0.8 1.  0.6 1. ] 1.4

    Source:
        Lazy Adam: https://www.tensorflow.org/addons/api_docs/python/tfa/optimizers/LazyAdam;
        https://docs.pytorch.org/docs/stable/generated/torch.optim.SparseAdam.html. Why the rows:
        https://github.com/jax-ml/jax/issues/851
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        got = type(optimizer).__name__
        raise TypeError(arguments.wanted("optimizer", "an optax.GradientTransformation", got))
    params_leaves, params_tree = jax.tree.flatten(params, is_leaf=is_table)
    state_leaves, state_tree = jax.tree.flatten(state, is_leaf=is_table)
    gradients = _checked_gradients(params_leaves, params_tree, grads)
    of_rows = {i: leaf for i, leaf in enumerate(gradients) if isinstance(leaf, RowGradient)}
    in_state = row_check.state_of_tables(
        optimizer.init,
        params_tree,
        list(map(_shape_and_dtype, params_leaves)),
        list(map(_state_shape_and_dtype, state_leaves)),
        list(of_rows),
    )
    layout = _Layout(params_tree, state_tree, in_state)
    tables = layout.take(params_leaves, state_leaves)
    inputs = {i: [of_rows[i], *arrays] for i, arrays in tables.items()}
    whole = {i: _with_rows(arrays, arrays[0].shape[0]) for i, arrays in inputs.items()}
    block = {i: _with_rows(arrays, _block_size(*arrays[:2])) for i, arrays in inputs.items()}
    dense_gradients = [None if i in of_rows else leaf for i, leaf in enumerate(gradients)]
    shared, rebuild = _split_arrays((dense_gradients, params_leaves, state_leaves, extra_args))

    def step(shared: Any, rows: Mapping[int, Sequence[Array]]) -> tuple[Any, Any]:
        return layout.step(optimizer, rows, *rebuild(shared))

    row_check.check(functools.partial(step, shared), whole, block, optimizer.update)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), block)
    if any(map(arguments.is_traced, jax.tree.leaves(zeros))):
        # The calls below have the same shapes: they share a trace.
        step = jax.jit(step, inline=True)
    _, new_leaves = step(shared, zeros)
    new_tables = {}
    for i, arrays in tables.items():

        def step_of_block(shared: Any, gradient: Array, rows: Sequence[Array], i: int = i) -> Any:
            return step(shared, zeros | {i: [gradient, *rows]})[0][i]

        update_arrays = functools.partial(_update_in_blocks, step_of_block, block[i][0].shape[0])
        if isinstance(arrays[0], RowTable):
            new_tables[i] = arrays[0].update_rows(update_arrays, shared, of_rows[i], arrays[1:])
        else:
            # Rows made by hand may hold arrays of numpy, and ids of any width.
            ids, values = arguments.as_int32("ids", of_rows[i].ids), jnp.asarray(of_rows[i].values)
            new_tables[i] = update_arrays(shared, ids, values, arrays)
    return layout.tree(new_tables, *new_leaves)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the rows of tables are among the leaves of the parameters and the state.

    Args:
        params_tree: the structure of the parameters.
        state_tree: that of the state.
        in_state: for each table, by its index among the parameters, the indices of the leaves of
            the state that have its rows.
    """

    params_tree: Any
    state_tree: Any
    in_state: Mapping[int, Sequence[int]]

    def take(self, params: list[Any], state: list[Any]) -> dict[int, list[Any]]:
        """For each table, [rows, *rows of its state], replaced by None in the leaves."""
        tables = {}
        for table, indices in self.in_state.items():
            tables[table] = [params[table], *(state[i] for i in indices)]
            params[table] = None
            for i in indices:
                state[i] = None
        return tables

    def tree(
        self, tables: Mapping[int, Sequence[Any]], params: Sequence[Any], state: Sequence[Any]
    ) -> tuple[Tree, Tree]:
        """The parameters and the state, from their leaves and what `take` took."""
        params, state = list(params), list(state)
        for table, (rows, *states) in tables.items():
            params[table] = rows
            for i, leaf in zip(self.in_state[table], states, strict=True):
                state[i] = leaf
        return jax.tree.unflatten(self.params_tree, params), jax.tree.unflatten(
            self.state_tree, state
        )

    def step(
        self,
        optimizer: Any,
        tables: Mapping[int, Sequence[Any]],
        gradients: Sequence[Any],
        params: Sequence[Any],
        state: Sequence[Any],
        extra_args: Mapping[str, Any],
    ) -> tuple[dict[int, list[Any]], tuple[list[Any], list[Any]]]:
        """The new [rows, *rows of its state] of each table, from its [gradient, rows, *rows of its
        state], and all other leaves of the new parameters and the new state."""
        # Slow to load, and only training needs it.
        import optax  # noqa: PLC0415

        gradients = list(gradients)
        for table, (gradient, *_) in tables.items():
            gradients[table] = gradient
        before = self.tree({i: arrays[1:] for i, arrays in tables.items()}, params, state)
        updates, new_state = optimizer.update(
            jax.tree.unflatten(self.params_tree, gradients), before[1], before[0], **extra_args
        )
        after = optax.apply_updates(before[0], updates), new_state
        if jax.tree.structure(after) != jax.tree.structure(before):
            raise TypeError("updates and state do not have the structure of parameters and state")
        new_params, new_state = (jax.tree.leaves(tree, is_leaf=is_table) for tree in after)
        return self.take(new_params, new_state), (new_params, new_state)


def _split_arrays(tree: Tree) -> tuple[dict[int, Array], Callable[[Mapping[int, Array]], Tree]]:
    """The jax arrays of a tree, and a function that puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

    def rebuild(arrays: Mapping[int, Array]) -> Tree:
        return jax.tree.unflatten(treedef, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])

    return arrays, rebuild


def _update_in_blocks(
    step_of_block: Callable,
    block: int,
    shared: Any,
    ids: Int32[Array, "k"],
    gradient: Float[Array, "k d"],
    wholes: Sequence[Array],
) -> list[Array]:
    """A table and its state after `step_of_block(shared, gradient, [rows, *rows of the state])`,
    read and written one block of rows at a time.

    All rows at once would allocate new memory for each array. There may be any number of ids. They
    ascend, and ids past the end of the table are padding.
    """
    padding = -len(ids) % block
    if padding:
        past = jnp.maximum(ids[-1] + 1, wholes[0].shape[0]) + jnp.arange(padding, dtype=jnp.int32)
        ids, gradient = jnp.concatenate([ids, past]), jnp.pad(gradient, ((0, padding), (0, 0)))

    def update_block(i: Any, wholes: list[Array]) -> list[Array]:
        block_ids, block_gradient = (
            jax.lax.dynamic_slice_in_dim(array, i * block, block) for array in (ids, gradient)
        )
        old = [read_rows(whole, block_ids) for whole in wholes]
        new = step_of_block(shared, block_gradient, old)
        moved = jnp.any(block_gradient != 0, axis=-1)
        written = []
        for whole, before, after in zip(wholes, old, new, strict=True):
            rows = jnp.where(moved.reshape(-1, *[1] * (before.ndim - 1)), after, before)
            # Ids past the end of the table are dropped.
            target = whole.at[block_ids]
            written.append(
                target.set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)
            )
        return written

    wholes = list(map(jnp.asarray, wholes))
    if len(ids) == block:
        return update_block(0, wholes)
    return jax.lax.fori_loop(0, len(ids) // block, update_block, wholes)


def _block_size(gradient: RowGradient, table: Any) -> int:
    """How many rows are updated at a time. Never the table's size, so that the check can tell the
    two apart."""
    block = min(len(gradient.ids), BLOCK)
    return block + 1 if block == table.shape[0] else block


def _with_rows(arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes of arrays that have `size` rows."""
    shapes = map(_shape_and_dtype, arrays)
    return [jax.ShapeDtypeStruct((size, *shape.shape[1:]), shape.dtype) for shape in shapes]


def _shape_and_dtype(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, or of the table that a leaf stands for."""
    if isinstance(leaf, Table | RowGradient):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _state_shape_and_dtype(leaf: Any) -> jax.ShapeDtypeStruct:
    try:
        return _shape_and_dtype(leaf)
    except TypeError as error:
        want = "the arrays of optimizer.init(params)"
        raise TypeError(arguments.wanted("state", want, f"a {type(leaf).__name__}")) from error


def _checked_gradients(leaves: Sequence[Any], treedef: Any, grads: Tree) -> list[Any]:
    """The leaves of a gradient of the parameters: `RowGradient` for some tables."""
    gradients, grads_treedef = jax.tree.flatten(
        grads, is_leaf=lambda leaf: isinstance(leaf, RowGradient | Table)
    )
    if grads_treedef != treedef:
        want = "a tree as params, with RowGradient for some tables"
        raise ValueError(arguments.wanted("grads", want, str(grads_treedef)))
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if not isinstance(gradient, RowGradient):
            continue
        want, got = list(_shape_and_dtype(leaf).shape), list(gradient.shape)
        if got != want:
            raise ValueError(arguments.wanted("grads", f"rows of a table {want}", f"of one {got}"))
        ids, rows = len(gradient.ids), len(gradient.values)
        if ids != rows:
            raise ValueError(
                arguments.wanted("grads", f"a row for each of {ids} ids", f"{rows} rows")
            )
        _check_trace(gradient.ids)
        check_ascending(gradient)
    return gradients


def _check_trace(ids: Any) -> None:
    """Raises if a gradient's ids belong to another trace, or would become constants of this one."""
    remedy = "(its ids stay behind: return .ids and .values, and make a RowGradient of them)"
    want = "a gradient made by value_and_grad in the same jit, scan or shard_map"
    try:
        now = jnp.add(ids, 0)
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(arguments.wanted("grads", want, f"one from another {remedy}")) from error
    if arguments.is_traced(now) and not arguments.is_traced(ids):
        raise ValueError(arguments.wanted("grads", want, f"one from outside {remedy}"))
