"""Exchanges rows between devices without a row-wise step: to read them, or to train densely."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.rows.tables import tables_in
from transformer_embed._src.rows.trees import Tree


def with_exchange(
    function: Callable,
    *,
    ids: Mapping[str, ArrayLike],
    config: EmbedderConfig | None = None,
    capacity: float = 1.0,
    max_rows: int | Mapping[str, int] | None = None,
) -> Callable:
    """Returns a function of parameters that reads tables by an exchange of rows between devices.

    Use it to evaluate a model on many devices, or with `jax.grad` to train tables densely. It is
    for tables whose rows are split over explicit mesh axes. In an ordinary `lookup`, each device
    makes an array with one row for every id of all devices, and fills in the rows that it holds.
    The devices then add up these arrays. For example, if 4 devices look up 1000 ids each, each
    device makes an array of 4000 rows. In the function that `te.rows.with_exchange` returns, each
    device asks only for the distinct rows of its own ids, here at most 1000 rows. A row is sent by
    a device that holds it, the owner of the row.

    Args:
        function: A function of (params, ...). In this function, only `lookup` may read the tables
            that have an entry in `ids`.
        ids: The ids that the function looks up, as a dict {name of a table: ids}. This and the next
            arguments are as in `value_and_grad`.
        config: The `EmbedderConfig` of the token table, if it pads or spreads the table rows.
        capacity: A factor for the size of the buffers through which devices exchange rows, a number
            above 0. A buffer has room for at least `capacity` times the mean number of requests. If
            all devices are equally likely to be asked for rows, 1.0 is enough, because the package
            adds some room for random differences. Otherwise pass a larger number, such as 2.0.
        max_rows: A bound on the number of distinct ids that each device looks up in a table. If
            None, there is no bound.

    Returns:
        A function that has the arguments of `function` and returns the same result.

    Raises:
        TypeError: The ids are not integers, or a table has a dtype that is not floating. A table
            has an entry in `ids`, but `function` applies an operation other than `lookup` to the
            table.
        ValueError: `value_and_grad` with a `capacity` would raise a ValueError for the same
            arguments, for example because the rows of no table are split.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> split = lambda array: jax.device_put(array, jax.NamedSharding(mesh, jax.P("model")))
        >>> params, ids = {"t": split(jnp.arange(8.0).reshape(4, 2))}, split(jnp.array([3, 1]))
        >>> read = te.rows.with_exchange(lambda params: te.lookup(params["t"], ids), ids={"t": ids})
        >>> with jax.set_mesh(mesh):
        ...     jax.jit(read)(params).tolist()
        [[6.0, 7.0], [2.0, 3.0]]
    """
    function = arguments.instance("function", function, Callable, "a function")
    capacity = arguments.positive("capacity", capacity)

    @functools.wraps(function)
    def exchanging(params: Tree, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with parameters in which rows of the batch replace each table."""
        # The tables that have an entry in `ids`, checked, with the ids of each table.
        tables = tables_in(params, ids, config, max_rows, capacity)
        # For each table, an object with the rows that the batch reads.
        rows_of_tables = tables.read_rows()
        # All parameters by name, in which arrays of these rows replace the tables.
        parameters = tables.parameters_with_rows(rows_of_tables)
        # An error of the function gets a note, which says that the function sees only some rows.
        with tables.note_in_errors():
            # This tree is like `params`, but has an object in the place of each table. The object
            # holds the rows, and only `lookup` can read it.
            params_with_rows = tables.tree_for_loss(rows_of_tables, parameters)
            return function(params_with_rows, *args, **kwargs)

    return exchanging
