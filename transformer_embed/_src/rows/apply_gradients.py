"""Updates only the rows of tables that have a gradient, by one step of an optimizer.

`optimizer.update` is called once for everything that is not a table. In this call, blocks of zeros
replace the tables. Then a loop over the blocks of each table calls it again, with the rows of one
block in the place of the zeros. XLA drops the results that are not used, so each call computes only
the rows of its block. `row_check` makes sure beforehand that this gives the rows of the dense step.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from transformer_embed._src import arguments
from transformer_embed._src.rows import row_check
from transformer_embed._src.rows.row_gradient import is_gradient
from transformer_embed._src.rows.step_tables import Leaves
from transformer_embed._src.rows.trees import Tree, as_arrays, check_shapes
from transformer_embed._src.rows.update_tables import update_tables

if TYPE_CHECKING:
    import optax


def apply_gradients(
    optimizer: "optax.GradientTransformation",
    grads: Tree,
    state: Tree,
    params: Tree,
    **extra_args: Any,
) -> tuple[Tree, Tree]:
    """Updates parameters by one optimizer step, and in each table only the rows with a gradient.

    Use it with the gradients of `te.rows.value_and_grad`. In each table, only rows with a nonzero
    gradient are updated, together with the optimizer state of these rows. All other table rows stay
    the same bit for bit. Among these are the rows that the batch does not read, and the row of the
    `pad_id`. Ids outside the vocabulary change no row. Parameters whose gradient is an ordinary
    array are updated by `optimizer.update` and `optax.apply_updates` as usual.

    Compile the step with `jax.jit`, and donate `params` and `state`. Then tables and state are
    written in place, so the cost of a step depends on the size of the batch and not of the tables.

    The function first traces the optimizer, to check that the new value of each table row depends
    on no other row of the table. (Under `jax.jit`, this happens only once.) The page "Optimizers
    for row-wise training" lists the optimizers that pass this check. Even if an optimizer passes
    the check, a step with a dense gradient may give a different result from this function. For
    example, Adam passes the check. With a dense gradient, Adam also changes rows whose gradient is
    zero, but this function leaves these rows as they are. To clip by a global norm, clip the
    gradients before you call this function.

    Args:
        optimizer: The optax optimizer.
        grads: The gradients that `value_and_grad` returned. You may scale them. If you change a
            `RowGradient` in any other way, the table rows of this gradient become NaN (see
            `RowGradient`).
        state: The state of the optimizer, as `optimizer.init(params)` makes it.
        params: The parameters.
        **extra_args: Further arguments for `optimizer.update`.

    Returns:
        The new parameters and the new state, as a tuple (params, state).

    Raises:
        TypeError: `optimizer` has no functions `init` and `update`, or a leaf of `params` or
            `state` is not an array. A `RowGradient` was made inside a `jax.jit`, and this call is
            outside of it.
        ValueError: The optimizer is refused, because it could compute the new value of a table row
            from other rows. The message names the optax transformation that could do this, and the
            reason. The optimizer changes the dtype of its state. `grads`, `state` and `params` are
            not trees of the same parameters.

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
        The lazy Adam of TensorFlow and the sparse Adam of PyTorch update the same rows as this
        function: https://www.tensorflow.org/addons/api_docs/python/tfa/optimizers/LazyAdam,
        https://docs.pytorch.org/docs/stable/generated/torch.optim.SparseAdam.html. The need for row
        gradients in JAX is discussed in https://github.com/jax-ml/jax/issues/851
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        got = type(optimizer).__name__
        raise arguments.type_error("optimizer", "an optax.GradientTransformation", got)
    grads = as_arrays("grads", grads)
    params = as_arrays("params", params)
    state = as_arrays("state", state)
    # `update_tables` may call the step inside a shard_map. A function inside a shard_map can use a
    # sharded array only if the array is one of its arguments. So the arrays among the extra
    # arguments become arguments of the step. All other extra arguments are fixed in `update` below.
    extra_leaves, extra_treedef = jax.tree.flatten(extra_args)
    # The arrays, by their numbers among the leaves of the extra arguments.
    extra_arrays = {}
    for number, leaf in enumerate(extra_leaves):
        if isinstance(leaf, jax.Array):
            extra_arrays[number] = leaf
    step_trees = (grads, params, state, extra_arrays)
    numbered_leaves, treedef = jax.tree.flatten(step_trees, is_leaf=is_gradient)
    check_shapes("params", grads, params)
    leaves = dict(enumerate(numbered_leaves))
    # The tables are the parameters whose gradient is a `RowGradient`. Each entry of `tables` has
    # the numbers of the leaves that are the table, its state and its gradient. `init` shows which
    # arrays of the state belong to a table.
    tables = row_check.find_tables(optimizer.init, treedef, leaves)

    def update(grads: Tree, state: Tree, params: Tree, extra_arrays: dict[int, Any]) -> Any:
        """Calls the optimizer, with these arrays in the place of the user's extra arrays."""
        new_leaves = list(extra_leaves)
        for number, array in extra_arrays.items():
            new_leaves[number] = array
        new_extra_args = jax.tree.unflatten(extra_treedef, new_leaves)
        return optimizer.update(grads, state, params, **new_extra_args)

    step = functools.partial(_optimizer_step, update, treedef)
    # This raises an error if the optimizer may update a table row from other rows.
    row_check.check(step, leaves, tables, optimizer.update)
    # All leaves by number, in the same order as `leaves`.
    new_leaves = update_tables(step, leaves, tables)
    _, new_params, new_state, _ = jax.tree.unflatten(treedef, new_leaves.values())
    return new_params, new_state


def _optimizer_step(update: Callable, treedef: Any, leaves: Leaves) -> Leaves:
    """Returns all leaves after a step. The gradients and the extra arrays stay as they are.

    Args:
        update: The optimizer's `update`, a function of the trees (gradients, state, parameters,
            extra arrays).
        treedef: The structure of the leaves, which are in another order than the arguments of
            `update`: (gradients, parameters, state, extra arrays).
        leaves: The leaves before the step, as a dict {number of the leaf: leaf}.
    """
    # optax is slow to load, and only training needs it.
    import optax  # noqa: PLC0415

    grads, params, state, extra_arrays = jax.tree.unflatten(treedef, leaves.values())
    updates, new_state = update(grads, state, params, extra_arrays)
    new_params = optax.apply_updates(params, updates)
    new_trees = (grads, new_params, new_state, extra_arrays)
    # A gradient may still be a `RowGradient`, which counts as one leaf, as it does before the step.
    new_leaves, new_treedef = jax.tree.flatten(new_trees, is_leaf=is_gradient)
    if new_treedef != treedef:
        raise TypeError("updates and state do not have the structure of parameters and state")
    return dict(enumerate(new_leaves))
