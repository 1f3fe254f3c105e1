"""The gradient of a loss that reads large tables: only the rows that its batch reads."""

import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax

from transformer_embed._src import arguments
from transformer_embed._src.tables.rows.distinct_ids import as_max_rows
from transformer_embed._src.tables.rows.gathered_rows import Taken, take_from_array
from transformer_embed._src.tables.rows.row_gradient import as_arrays, is_leaf
from transformer_embed._src.tokens.lookup import Table, as_table

Tree = Any
NOTE = (
    "In the loss, the rows of `ids` stand in the place of {}: only lookup reads them, so leave "
    "them out of other functions."
)


def value_and_grad(
    loss: Callable, *, ids: Tree, has_aux: bool = False, max_rows: int | Tree | None = None
) -> Callable:
    """`jax.value_and_grad` for a loss that reads few rows of large tables.

    Like `jax.value_and_grad`, it differentiates the first argument. The gradient of a table holds
    only the rows that the batch reads; `te.rows.update` takes it.

    While the loss runs, only `lookup` can read these tables, so leave them out of functions of all
    parameters, such as an L2 norm. "Training by rows", a section of the reference page, says what
    these see. To add gradients of many batches, or to average them over devices, see the page
    "Training loops".

    Args:
        loss: a function of (params, ...) to a scalar, or to (scalar, aux). It reads the tables in
            `ids` only by `lookup`, as `TokenEmbedding` does.
        ids: a tree like `params`, of the tables that are trained by rows; a list or tuple has None
            for other entries. In a table's place it has all ids that the loss looks up, [...],
            including padding and ids outside the vocabulary; others read as NaN. Ids may repeat.
        has_aux: whether the loss returns (scalar, aux).
        max_rows: a bound on the distinct ids of a table in a batch; a bound below the number of ids
            makes the step cheaper. An int, or a tree like `ids` with an int for each table that has
            a bound. If a batch has more, the highest ids read as NaN. For a striped table it
            bounds the distinct ids of each device's part of the batch, and so the buffers of the
            exchange; the ids that read as NaN are then not always the highest.

    Returns:
        A function that you call like the loss. It returns (value, gradients), or ((value, aux),
        gradients). The gradients are a tree like `params`, with a `RowGradient` for each table in
        `ids`. It has k rows: the number of ids, vocab_size or max_rows, whichever is smallest
        (above 1024, rounded up to a multiple of 1024). For a striped table, each device has
        the gradient of its own shard's rows, as many as it can be asked for.

    Raises:
        TypeError: ids are not integers; a table does not have a floating dtype; the loss uses a
            table other than by `lookup`.
        ValueError: `params` has no table [vocab_size, d] where `ids` has an array; a sharded table
            whose columns are split; an array that explicit mesh axes split; a max_rows below 1, or
            for a table that is not in `ids`.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> params = {"embed": {"embeddings": jnp.arange(20.0).reshape(10, 2)}}
        >>> ids = jnp.array([7, 2, 7])
        >>> loss = lambda params: jnp.sum(te.lookup(params["embed"]["embeddings"], ids))
        >>> value, grads = te.rows.value_and_grad(loss, ids={"embed": {"embeddings": ids}})(params)
        >>> rows = grads["embed"]["embeddings"]
        >>> float(value), rows.ids.tolist(), rows.values.tolist()
        (67.0, [2, 7, 12], [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    """

    loss = arguments.instance("loss", loss, Callable, "a function")
    has_aux = arguments.flag("has_aux", has_aux)

    @functools.wraps(loss)
    def value_and_row_grads(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        params = as_arrays("params", params)
        paths, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
        leaves = {_name(path): leaf for path, leaf in paths}
        taken = _take_tables(leaves, ids, max_rows)

        def loss_of(held: dict[str, Any]) -> Any:
            read = {
                name: each.in_place_of(leaves[name], name, held[name])
                for name, each in taken.items()
            }
            try:
                return loss(unflatten(held | read), *args, **kwargs)
            except Exception as error:
                error.add_note(NOTE.format(", ".join(taken)))
                raise

        def unflatten(found: dict[str, Any]) -> Tree:
            # jax sorts the names.
            return treedef.unflatten([found[name] for name in leaves])

        held = leaves | {name: each.rows for name, each in taken.items()}
        value, gradients = jax.value_and_grad(loss_of, has_aux=has_aux)(held)
        gradients |= {name: each.gradient(gradients[name]) for name, each in taken.items()}
        return value, unflatten(gradients)

    return value_and_row_grads


def _take_tables(
    leaves: Mapping[str, Any], ids: Tree, max_rows: int | Tree | None
) -> dict[str, Taken]:
    """What is taken of each table in `ids`."""
    ids = _at_leaves(leaves, ids)
    bounds: dict[str, Any] = dict.fromkeys(ids, max_rows)
    if not isinstance(max_rows, numbers.Integral | None):
        bounds = _at_leaves(leaves, max_rows)
    for name in bounds.keys() - ids.keys():
        raise arguments.value_error(name, "a table in ids, since max_rows has it", "none")
    taken = {}
    for name, table_ids in ids.items():
        table = as_table(name, leaves[name])
        asked = arguments.as_int32("ids", table_ids), as_max_rows(bounds.get(name))
        is_plain = not isinstance(table, Table)
        taken[name] = take_from_array(table, *asked) if is_plain else table._take_rows(*asked)
    return taken


def _at_leaves(names: Mapping[str, Any], tree: Tree) -> dict[str, Any]:
    """What a tree has at the places of the parameters, by their names; it may be a list there."""
    parts = jax.tree.leaves_with_path(
        tree, is_leaf=lambda path, _: _name(path) in names, is_leaf_takes_path=True
    )
    found = {_name(path): part for path, part in parts if part is not None}
    for name in found.keys() - names.keys():
        got = f"none among {', '.join(names)}"
        raise arguments.value_error(name, "a table, where ids or max_rows has an array", got)
    return found


def _name(path: Any) -> str:
    """A parameter's name in errors."""
    return f"params{jax.tree_util.keystr(path)}"
