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

    Use it with `te.rows.apply_gradients`. Then the cost of a training step depends on the size of
    the batch, and not on the size of the vocabulary. Like `jax.value_and_grad`, it differentiates
    the loss with respect to the first argument. The gradient of a table holds only the rows that
    the batch reads.

    `ids` is a dict with an entry for each table that is trained by rows: in a step, only the table
    rows that the batch reads get a gradient. Inside the loss, only `lookup` can read these tables.
    An L2 norm of all parameters, for example, would read the tables without `lookup`. So if the
    loss has such a term, compute the term without the tables. The section "Training by rows" of the
    reference page says what happens otherwise. To add the gradients of many batches, or to average
    them over devices, see the page "Training loops".

    Args:
        loss: A function of (params, ...) that returns a scalar, or (scalar, aux). In the loss, only
            `lookup` may read the tables that have an entry in `ids`. (`TokenEmbedding` reads its
            table by `lookup`.)
        ids: The ids that the loss looks up, as a dict {name of a table: ids}. Add an entry for each
            table that you want to train by rows. A name is the path of the parameter, such as
            "model/token_embedding/embeddings", or an end of the path, such as
            "token_embedding/embeddings". No other path may have the same end. The ids have any
            shape, and may repeat. Pass all ids that the loss looks up in the table, including
            padding and ids outside the vocabulary. For an id that you leave out, `lookup` returns
            NaN.
        config: The `EmbedderConfig` of the token table. Pass it if the field `row_multiple` adds
            rows to the table, or if the field `spread` changes the order of the rows. If you leave
            it out, the lookup in such a table raises an error.
        has_aux: Whether the loss returns (scalar, aux).
        max_rows: A bound on the number of distinct ids that a batch looks up in a table. Pass an
            int for all tables, or a dict {name of a table: int}. A bound below the size of the
            batch makes the step cheaper. For example, a batch of 8192 ids usually has far fewer
            distinct ids, because words repeat. If a batch has more distinct ids than the bound,
            `lookup` returns NaN for the ids that have the highest row indices. If you set
            `capacity`, the bound is for each device's part of the batch.
        capacity: A factor for the size of the buffers through which devices exchange table rows. If
            None, nothing is exchanged, and every device gets the distinct rows of the whole batch.
            If you pass a number above 0, each device asks only for the rows of its own part of the
            batch. The device that holds a row, the owner of the row, sends the row, and gets the
            gradient back. For that, explicit mesh axes must split the rows of the table, and the
            ids must be split over the same axes. The requests of a device to one owner go into a
            buffer of fixed size. The buffer has room for at least `capacity` times the mean number
            of requests, counted for a batch whose ids are all different. If all owners are equally
            likely to be asked (see `EmbedderConfig.spread`), 1.0 is enough, because the package
            adds some room for random differences. Otherwise pass a larger number, such as 2.0. For
            an id that does not fit, `lookup` returns NaN. `exchange_load` counts the ids that do
            not fit.

    Returns:
        A function that you call like the loss. It returns (value, gradients), or ((value, aux),
        gradients). The gradients are a tree like `params`, with a `RowGradient` for each table in
        `ids`. The number k of rows in a `RowGradient` is fixed, so some of the rows may be padding.
        Padding has an index past the end of the table, such as 12 in the example, whose table has
        10 rows. k is the smallest of three numbers: the number of ids, the number of table rows,
        and `max_rows`. If k is above 1024, it is rounded up to a multiple of 1024. If you set
        `capacity`, each device has the gradients of rows of its own shard, and k is the largest
        number of rows that the devices can ask one device for.

    Raises:
        TypeError: The ids are not integers, or a table has a dtype that is not floating. A table
            has an entry in `ids`, but the loss applies an operation other than `lookup` to the
            table.
        ValueError: A name in `ids` fits no parameter or several parameters, or two names fit the
            same parameter. The parameter of a name is not a table [vocab_size, d]. A layer of the
            loss pads or spreads the rows of a table, and `config` is not the config of this layer.
            `max_rows` is below 1, or has an entry for a table that has no entry in `ids`. The shape
            of the ids is symbolic. With a `capacity`, these are errors, too: `capacity` is not
            above 0, no table in `ids` is split over explicit mesh axes, the columns of a table are
            split, the ids are not split over the mesh axes of the table rows, or the call is inside
            a `jax.shard_map` over some of the mesh axes.

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
        """Computes the loss, and its gradients with a `RowGradient` for each table in `ids`."""
        # The tables that have an entry in `ids`, checked, with the ids of each table.
        tables = tables_in(params, ids, config, max_rows, capacity)
        # For each table, an object with the rows that the batch reads.
        rows_of_tables = tables.read_rows()
        # A dict of all parameters by name, in which arrays of these rows replace the tables. The
        # loss is differentiated with respect to these arrays.
        parameters = tables.parameters_with_rows(rows_of_tables)

        def loss_of_rows(parameters: Mapping) -> Any:
            """Computes the loss from parameters by name, with rows in the place of each table."""
            # This tree is like `params`, but has an object in the place of each table. The object
            # holds the rows, and only `lookup` can read it.
            params_of_loss = tables.tree_for_loss(rows_of_tables, parameters)
            return loss(params_of_loss, *args, **kwargs)

        differentiate = jax.value_and_grad(loss_of_rows, has_aux=has_aux)
        # An error of the loss gets a note, which says that the loss sees only some rows.
        with tables.note_in_errors():
            value, gradients = differentiate(parameters)
            # Until here, the gradient of a table is an array: the gradients of the rows.
            for name, table_rows in rows_of_tables.items():
                gradients[name] = table_rows.gradient(gradients[name])
            return value, tables.unflatten(gradients)

    return value_and_row_grads
