"""Differentiates a loss that reads large tables, with respect to the rows that its batch reads."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.rows.tables import tables_in
from transformer_embed._src.rows.trees import Tree


def value_and_grad(
    loss: Callable,
    *,
    ids: Mapping[str, ArrayLike],
    config: EmbedderConfig | None = None,
    has_aux: bool = False,
    max_rows: int | Mapping[str, int] | None = None,
    capacity: float | None = None,
) -> Callable:
    """Returns a function like `jax.value_and_grad` of a loss that reads few rows of large tables.

    Use it with `te.rows.apply_gradients`, so that the cost of a training step follows the batch and
    not the size of the vocabulary. Like `jax.value_and_grad`, it differentiates the loss with
    respect to the first argument. The gradient of a table holds only the rows that the batch reads.

    While the loss runs, only `lookup` can read these tables. So leave the tables out of functions
    of all parameters, such as an L2 norm: "Training by rows", a section of the reference page, says
    what such functions see. To add the gradients of many batches, or to average them over devices,
    see the page "Training loops".

    Args:
        loss: A function of (params, ...) that returns a scalar, or (scalar, aux). It reads the
            tables in `ids` only by `lookup`, as `TokenEmbedding` does.
        ids: The ids that the loss looks up, {name: ids}, for each table that is trained row-wise. A
            name is the path of a parameter, or an end of the path that no other parameter has, such
            as "token_embedding/embeddings". The ids of a table, [...], are all ids that the loss
            looks up, including padding and ids outside the vocabulary. Other ids read as NaN. Ids
            may repeat.
        config: The `EmbedderConfig` of the token table. Set it if `row_multiple` or `spread` pad or
            spread the rows of the table.
        has_aux: Whether the loss returns (scalar, aux).
        max_rows: A bound on the distinct ids of a table in a batch, as an int, or {name: int} for
            the tables that have a bound. A bound below the number of ids makes the step cheaper. If
            a batch has more distinct ids, the highest ones read as NaN. With a capacity, it bounds
            the distinct ids of each device's part of the batch.
        capacity: How much room the buffers have in which devices exchange rows. If None, nothing is
            exchanged: every device gets the distinct rows of the whole batch. If it is a number
            above 0, each device gets the rows of its own part of the batch from the devices that
            own them, and sends their gradients back. Then explicit mesh axes must split the rows of
            a table, and must split its ids over these axes too. A buffer holds the ids that go to
            one owner. It is large enough if the owners are evenly spread over the ids (see
            `EmbedderConfig.spread`), and holds at least `capacity` times the mean number of ids of
            a batch without repeats. So for evenly spread ids, 1.0 is enough. Ids that do not fit
            read as NaN. Call `exchange_load` to count them.

    Returns:
        A function that you call like the loss. It returns (value, gradients), or ((value, aux),
        gradients). The gradients are a tree like `params`, with a `RowGradient` for each table in
        `ids`. It has k rows: the number of ids, of the table's rows or max_rows, whichever is
        smallest (above 1024, rounded up to a multiple of 1024). With a capacity, each device has
        the gradient of the rows of its own shard, as many as it can be asked for.

    Raises:
        TypeError: ids are not integers; a table does not have a floating dtype; or the loss uses a
            table other than by `lookup`.
        ValueError: no table [vocab_size, d] of `params` has a name in `ids`, or several tables have
            it; one table has two names; a table with padded or spread rows lacks its config; a
            max_rows is below 1, or is for a table that is not in `ids`; or the shape of the ids is
            symbolic. With a capacity: no table in `ids` is split over explicit mesh axes, or the
            columns of a table are; ids are not split over the axes of the rows; or there is an
            enclosing shard_map over some of the mesh axes.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> params = {"embed": {"embeddings": jnp.arange(20.0).reshape(10, 2)}}
        >>> ids = jnp.array([7, 2, 7])
        >>> loss = lambda params: jnp.sum(te.lookup(params["embed"]["embeddings"], ids))
        >>> value, grads = te.rows.value_and_grad(loss, ids={"embeddings": ids})(params)
        >>> rows = grads["embed"]["embeddings"]
        >>> float(value), rows.row_indices.tolist(), rows.values.tolist()
        (67.0, [2, 7, 12], [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    """
    loss = arguments.instance("loss", loss, Callable, "a function")
    has_aux = arguments.flag("has_aux", has_aux)

    @functools.wraps(loss)
    def value_and_row_grads(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        tables = tables_in(params, ids, config, max_rows, capacity)

        # The arguments are described in `Tables.with_rows`.
        def differentiate(values: Mapping, view: Callable, reads: Mapping) -> tuple[Any, Tree]:
            """Returns the value of the loss, and the gradients as a tree like the parameters."""

            def loss_of_values(values: Mapping) -> Any:
                """Computes the loss from parameters by name, with the rows of each table."""
                return loss(view(values), *args, **kwargs)

            value, gradients = jax.value_and_grad(loss_of_values, has_aux=has_aux)(values)
            # Until here, the gradient of a table is an array, of the rows that were read.
            for name, read in reads.items():
                gradients[name] = read.gradient(gradients[name])
            return value, tables.unflatten(gradients)

        return tables.with_rows(differentiate)

    return value_and_row_grads
