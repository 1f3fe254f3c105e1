"""The gradient of a loss that reads large tables: only the rows that its batch reads."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import as_table
from transformer_embed._src.functional.partitioning import on_every_device
from transformer_embed._src.rows.distinct_ids import distinct_rows
from transformer_embed._src.rows.gathered_rows import GatheredRows, RowTable, is_leaf, read_rows

Tree = Any


def value_and_grad(
    loss: Callable, *, ids: Tree, has_aux: bool = False, max_rows: int | Tree | None = None
) -> Callable:
    """`jax.value_and_grad` for a loss that reads few rows of large tables.

    A table's gradient holds only these rows. Like `jax.value_and_grad`, it differentiates the first
    argument. While the loss runs, the rows of the batch take the place of each table. Only `lookup`
    can read them; other uses of the table raise an error. A term over all parameters, such as an L2
    term, becomes infinite: leave the tables out of it.

    For a sharded table, every device receives the rows of the whole batch: ids are all-gathered and
    one all-reduce over the shards collects the rows. For an interleaved table, each device receives
    the rows of its own part of the batch from their owners (see `interleave` of
    `sharding.shard_params`).

    Args:
        loss: a function of (params, ...) to a scalar, or to (scalar, aux). It reads the tables in
            `ids` only by `lookup`, as `TokenEmbedding` does.
        ids: a tree of dicts like `params`. In a table's place it has all ids that the loss looks
            up, [...], including padding and ids outside the vocabulary. Ids may repeat.
        has_aux: whether the loss returns (scalar, aux).
        max_rows: a bound on the distinct ids of a table in a batch; a bound below the number of ids
            makes the step cheaper. An int, or a tree like `ids` with an int for each table that has
            a bound. If a batch has more, the highest ids read as NaN. For an interleaved table it
            bounds the distinct ids of each device's part of the batch, and so the buffers of the
            exchange; the ids that read as NaN are then not always the highest.

    Returns:
        A function of (params, ...) to (value, gradients), or to ((value, aux), gradients). The
        gradients are a tree like `params`, with a `RowGradient` for each table in `ids`. It holds k
        rows, the smallest of the number of ids, vocab_size and max_rows (above 1024, rounded up to
        a multiple of 1024). For an interleaved table, each device has the gradient of its own
        shard's rows, which `ids` count from the start of the shard; their number is the largest
        that it can be asked for.

    Raises:
        TypeError: ids are not integers; a table does not have a floating dtype; the loss uses a
            table other than by `lookup`.
        ValueError: `params` has no table [vocab_size, d] where `ids` has an array; a sharded table
            whose columns are split; a max_rows below 1, or for a table that is not in `ids`.

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

    @functools.wraps(loss)
    def value_and_row_grads(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        trees, treedef = jax.tree.flatten(params, is_leaf=is_leaf)
        gathered = _gather_tables(trees, treedef, ids, max_rows)

        def loss_of(leaves: dict[int, Any]) -> Any:
            rows = {n: dataclasses.replace(rows, values=leaves[n]) for n, rows in gathered.items()}
            return loss(jax.tree.unflatten(treedef, (leaves | rows).values()), *args, **kwargs)

        leaves = dict(enumerate(trees)) | {n: rows.values for n, rows in gathered.items()}
        value, gradients = jax.value_and_grad(loss_of, has_aux=has_aux)(leaves)
        gradients |= {n: rows.gradient(gradients[n]) for n, rows in gathered.items()}
        return value, jax.tree.unflatten(treedef, gradients.values())

    return value_and_row_grads


def _gather_tables(
    leaves: Sequence[Any], treedef: Any, ids: Tree, max_rows: int | Tree | None
) -> dict[int, GatheredRows]:
    """The rows that a batch reads from each table in `ids`, by the table's index as a leaf."""
    indices = dict(_named("params", jax.tree.unflatten(treedef, range(len(leaves)))))
    gathered, bounds = {}, dict(_named("params", max_rows))
    # One bound is for all tables.
    of_all = None if isinstance(max_rows, Mapping) else bounds.pop("params")
    for name, table_ids in _named("params", ids):
        index = indices.get(name)
        if not isinstance(index, int):
            got = f"none among {', '.join(indices)}"
            raise arguments.value_error(name, "a table, since ids has it", got)
        bound = bounds.pop(name, of_all)
        most = 2**31 if bound is None else arguments.integer("max_rows", bound, at_least=1)
        table: Any = as_table(name, leaves[index])
        integers = arguments.as_int32("ids", table_ids)
        if isinstance(table, RowTable):
            rows = table._take_rows(integers, most)
        else:
            held = distinct_rows(on_every_device(integers), table.shape[0], most)
            rows = GatheredRows(held, read_rows(table, held), table.shape[0])
        # Loud, if the loss reads all leaves of the parameters as numbers.
        sentinel = jnp.full((1, table.shape[1]), jnp.inf, rows.values.dtype)
        gathered[index] = dataclasses.replace(rows, sentinel=sentinel, name=name)
    for name in bounds:
        raise arguments.value_error(name, "a table in ids, since max_rows has it", "none")
    return gathered


def _named(name: str, tree: Tree) -> Iterator[tuple[str, Any]]:
    """The name and value of each entry of a tree of dicts."""
    if not isinstance(tree, Mapping):
        yield name, tree
        return
    for key, inner in tree.items():
        yield from _named(f"{name}[{key!r}]", inner)
