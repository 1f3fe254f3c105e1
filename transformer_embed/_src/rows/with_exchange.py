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

    Use it to evaluate a model on many devices, or with `jax.grad` to train tables densely. If
    explicit mesh axes split the rows of a table, an ordinary `lookup` sends each device the rows
    for the ids of all devices along these axes. In the returned function, each device asks only for
    the distinct rows of its own part of the batch, so each device receives less. A row is sent by
    its owner, which is the device that holds the row.

    Args:
        function: A function of (params, ...). The function must read the tables that `ids` names
            only by `lookup`.
        ids, config, capacity, max_rows: The ids that are looked up in each table, the config of the
            token table, the room in the buffers, and a bound on the distinct ids of each device.
            See `value_and_grad`, which takes the same arguments.

    Returns:
        A function that has the arguments of `function` and returns the same result.

    Raises:
        TypeError: The ids are not integers, a table has a dtype that is not floating, or the
            function uses a table in an operation other than `lookup`.
        ValueError: One of the conditions holds that `value_and_grad` lists under ValueError, for a
            step with a `capacity`.

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
        tables = tables_in(params, ids, config, max_rows, capacity)
        reads = tables.read_rows()
        parameters = tables.replace_tables(reads)
        with tables.note_in_errors():
            return function(tables.seen_by_loss(reads, parameters), *args, **kwargs)

    return exchanging
