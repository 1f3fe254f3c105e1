"""The gradient of a loss that reads large tables: only the rows that its batch reads."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.rows.tables import find_tables

Tree = Any


def value_and_grad(
    loss: Callable,
    *,
    ids: Mapping[str, ArrayLike],
    config: EmbedderConfig | None = None,
    has_aux: bool = False,
    max_rows: int | Mapping[str, int] | None = None,
    capacity: float | None = None,
) -> Callable:
    """`jax.value_and_grad` for a loss that reads few rows of large tables.

    Like `jax.value_and_grad`, it differentiates the first argument. The gradient of a table holds
    only the rows that the batch reads; `te.rows.apply_gradients` takes it.

    While the loss runs, only `lookup` can read these tables, so leave them out of functions of all
    parameters, such as an L2 norm. "Training by rows", a section of the reference page, says what
    these see. To add gradients of many batches, or to average them over devices, see the page
    "Training loops".

    Args:
        loss: a function of (params, ...) to a scalar, or to (scalar, aux). It reads the tables in
            `ids` only by `lookup`, as `TokenEmbedding` does.
        ids: {name: ids} of the tables that are trained by rows. A name is the path of a parameter,
            or an end of it that only one has, as "token_embedding/embeddings". The ids of a table,
            [...], are all that the loss looks up, including padding and ids outside the vocabulary;
            others read as NaN. Ids may repeat.
        config: that of the token table, if `row_multiple` or `spread` pad or spread its rows.
        has_aux: whether the loss returns (scalar, aux).
        max_rows: a bound on the distinct ids of a table in a batch; a bound below the number of ids
            makes the step cheaper. An int, or {name: int} of the tables that have a bound. If a
            batch has more, the highest ids read as NaN. With a capacity, it bounds the distinct ids
            of each device's part of the batch.
        capacity: None: every device gets the distinct rows of the whole batch. A number above 0:
            each device gets the rows of its own part of the batch from the devices that own them,
            and sends their gradients back. Explicit mesh axes must split the rows of a table, and
            its ids over these axes too. The buffers have room for ids whose owners are spread
            evenly (see `EmbedderConfig.spread`), and for at least `capacity` times the mean of a
            batch without repeats; 1.0 is enough for such ids. Ids that do not fit read as NaN;
            `exchange_load` counts them.

    Returns:
        A function that you call like the loss. It returns (value, gradients), or ((value, aux),
        gradients). The gradients are a tree like `params`, with a `RowGradient` for each table in
        `ids`. It has k rows: the number of ids, of the table's rows or max_rows, whichever is
        smallest (above 1024, rounded up to a multiple of 1024). With a capacity, each device has
        the gradient of its own shard's rows, as many as it can be asked for.

    Raises:
        TypeError: ids are not integers; a table does not have a floating dtype; the loss uses a
            table other than by `lookup`.
        ValueError: a name in `ids` that no table [vocab_size, d] of `params` has, or several; two
            names of one table; a table with padded or spread rows without its config; a max_rows
            below 1, or for a table that is not in `ids`. With a capacity: no table in `ids` is
            split over explicit mesh axes, or the columns of one are; ids that are not split over
            the axes of the rows; an enclosing shard_map over some mesh axes.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> params = {"embed": {"embeddings": jnp.arange(20.0).reshape(10, 2)}}
        >>> ids = jnp.array([7, 2, 7])
        >>> loss = lambda params: jnp.sum(te.lookup(params["embed"]["embeddings"], ids))
        >>> value, grads = te.rows.value_and_grad(loss, ids={"embeddings": ids})(params)
        >>> rows = grads["embed"]["embeddings"]
        >>> float(value), rows.ids.tolist(), rows.values.tolist()
        (67.0, [2, 7, 12], [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    """
    loss = arguments.instance("loss", loss, Callable, "a function")
    has_aux = arguments.flag("has_aux", has_aux)

    @functools.wraps(loss)
    def value_and_row_grads(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        tables = find_tables(params, ids, config, max_rows, capacity)

        def differentiate(values: Mapping, view: Callable, reads: Mapping) -> tuple[Any, Tree]:
            def loss_of(values: Mapping) -> Any:
                return loss(view(values), *args, **kwargs)

            value, gradients = jax.value_and_grad(loss_of, has_aux=has_aux)(values)
            gradients |= {name: read.gradient(gradients[name]) for name, read in reads.items()}
            return value, tables.unflatten(gradients)

        return tables.with_rows(differentiate)

    return value_and_row_grads
