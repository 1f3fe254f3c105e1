"""Rows that devices exchange without a step by rows: read alone, or trained densely."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.partitioning import Axes, devices_along
from transformer_embed._src.rows.distinct_ids import as_max_rows
from transformer_embed._src.rows.exchange import Exchange, plan_exchange
from transformer_embed._src.rows.tables import find_tables
from transformer_embed._src.tables.row_order import nearest_rows

Tree = Any


def with_exchange(
    function: Callable,
    *,
    ids: Mapping[str, ArrayLike],
    config: EmbedderConfig | None = None,
    capacity: float = 1.0,
    max_rows: int | Mapping[str, int] | None = None,
) -> Callable:
    """A function of parameters whose devices exchange the rows that it looks up.

    By itself, `lookup` collects the rows of a table that explicit mesh axes split from all devices
    that own some, for the ids of all devices along these axes. In this function, each device asks
    the owners for the distinct rows of its own part of the batch. Use it to evaluate a model on
    many devices, or with `jax.grad` to train its tables densely.

    Args:
        function: a function of (params, ...). It reads the tables in `ids` only by `lookup`.
        ids, config, capacity, max_rows: as in `value_and_grad`.

    Returns:
        The function, with the same arguments and the same result.

    Raises:
        TypeError: as in `value_and_grad`.
        ValueError: as in `value_and_grad`.

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
        tables = find_tables(params, ids, config, max_rows, capacity)

        def call(values: Any, view: Callable, _: Any) -> Any:
            return function(view(values), *args, **kwargs)

        return tables.with_rows(call)

    return exchanging


def exchange_load(
    table: Any,
    ids: ArrayLike,
    *,
    config: EmbedderConfig | None = None,
    batch_axes: Axes | None = None,
    capacity: float = 1.0,
    max_rows: int | None = None,
) -> dict[str, Any]:
    """Counts what devices exchange of a table for a batch, and how many ids do not fit.

    It runs on the host, and needs no devices: the mesh may be a `jax.sharding.AbstractMesh`.

    Args:
        table: [rows, d], an array on a mesh, or a jax.ShapeDtypeStruct with its sharding.
        ids: [batch, ...], any integer dtype, not traced: the ids of all devices. One outside the
            table counts as the nearest row.
        config: that of the table, if its rows are spread or padded. None: row i holds id i.
        batch_axes: the mesh axes that the first dimension of ids is split over. None: all.
        capacity: as in `value_and_grad`.
        max_rows: as in `value_and_grad`.

    Returns:
        A dict. `rows` is int64, [size of each mesh axis of the batch, ...]: how many rows each
        device is asked for, whether they fit or not. A row that several devices ask for counts
        once. `dropped` is the number of requests that do not fit, whose ids read as NaN.

    Raises:
        TypeError: ids are not integers, or are traced; max_rows is not an int.
        ValueError: a table that does not lie on a mesh, or whose rows cannot be exchanged; a config
            of another number of rows; a batch that the devices do not divide; a capacity or
            max_rows out of range.

    Example:
        >>> import jax, numpy as np
        >>> import transformer_embed as te
        >>> mesh = jax.sharding.AbstractMesh((4,), ("model",))
        >>> over = jax.NamedSharding(mesh, jax.P("model"))
        >>> table = jax.ShapeDtypeStruct((1024, 64), np.float32, sharding=over)
        >>> te.rows.exchange_load(table, np.arange(8))["rows"].tolist()
        [8, 0, 0, 0]
        >>> config = te.EmbedderConfig(1024, 64, spread=True, output=None)
        >>> te.rows.exchange_load(table, np.arange(8), config=config)["rows"].tolist()
        [3, 2, 2, 1]
    """
    want = "an array, or its shape, on a mesh"
    if not isinstance(getattr(table, "sharding", None), NamedSharding):
        raise arguments.value_error("table", want, arguments.describe(table))
    config = arguments.instance("config", config, EmbedderConfig | None, "an EmbedderConfig")
    if config is not None:
        arguments.check_same("config", "the rows of the table", config.rows, table.shape[0])
    array = arguments.on_host("ids", arguments.as_int32("ids", ids))
    mesh = table.sharding.mesh
    axes = mesh.axis_names if batch_axes is None else batch_axes
    if not isinstance(axes, tuple) or not {*axes} <= {*mesh.axis_names}:
        want = f"a tuple of axes of the mesh, {mesh.axis_names}, or None"
        raise arguments.value_error("batch_axes", want, repr(batch_axes))
    devices = devices_along(mesh, axes)
    if not array.ndim or array.shape[0] % devices:
        want = f"a first dimension that {devices} devices divide"
        raise arguments.value_error("ids", want, f"shape {list(array.shape)}")
    capacity = arguments.positive("capacity", capacity)
    plan = plan_exchange(table, [axes], array.size, as_max_rows(max_rows), capacity)
    order = None if config is None else config.row_order
    return _counted(plan, nearest_rows(array.reshape(devices, -1), plan.size, order))


def _counted(plan: Exchange, ids: np.ndarray) -> dict[str, Any]:
    """Counts what the devices ask for with these ids, [devices, n], which are numbers of rows."""
    devices = np.arange(len(ids))[:, None]
    # A device and a row that it asks for are one number, device * size + row.
    asked = np.unique(devices * plan.size + ids)
    shard = plan.size // devices_along(plan.mesh, plan.owners)
    sent = _first(_first(asked, plan.size, plan.asked), shard, plan.sent)
    received = _rows_by_owner(plan, sent)
    dropped = len(asked) - len(sent) + np.maximum(received - plan.received, 0).sum()
    return {"rows": _rows_by_owner(plan, asked), "dropped": int(dropped)}


def _rows_by_owner(plan: Exchange, requests: np.ndarray) -> np.ndarray:
    """Counts the distinct rows that each device is asked for, [size of each axis of the batch]."""
    (axes,) = plan.by_dimension
    shape = [plan.mesh.shape[axis] for axis in axes]
    owner_shape = [plan.mesh.shape[axis] for axis in plan.owners]
    shard = plan.size // devices_along(plan.mesh, plan.owners)
    device, row = divmod(requests, plan.size)
    # An owner has the coordinates of the device that asks, except along the axes of the rows.
    coordinates = dict(zip(axes, np.unravel_index(device, shape), strict=True))
    coordinates |= zip(plan.owners, np.unravel_index(row // shard, owner_shape), strict=True)
    owner = np.ravel_multi_index([*coordinates.values()], shape)
    distinct = np.unique(owner * plan.size + row)
    return np.bincount(distinct // plan.size, minlength=math.prod(shape)).reshape(shape)


def _first(ascending: np.ndarray, length: int, most: int) -> np.ndarray:
    """Takes the first `most` numbers in each range of this length."""
    ranges = ascending // length
    return ascending[np.arange(len(ranges)) - ranges.searchsorted(ranges) < most]
