"""Counts, on the host, what devices exchange for a batch."""

import math
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.partitioning import Axes, devices_along
from transformer_embed._src.rows.distinct_ids import as_max_rows
from transformer_embed._src.rows.exchange import ExchangePlan, plan_exchange
from transformer_embed._src.tables.row_order import rows_of_nearest_ids


def exchange_load(
    table: Any,
    ids: ArrayLike,
    *,
    config: EmbedderConfig | None = None,
    batch_axes: Axes | None = None,
    capacity: float = 1.0,
    max_rows: int | None = None,
) -> dict[str, Any]:
    """Counts the rows that each device is asked for in a batch, and the requests that do not fit.

    Use it before you train with the argument `capacity` of `value_and_grad`. If you pass this
    argument, each device requests rows from the devices that own them, through buffers of fixed
    size. The counts show whether one device owns most of the rows that your batches read, and
    whether all requests fit into the buffers. The function needs no devices: the mesh may be a
    `jax.sharding.AbstractMesh`, so you can plan for devices that you do not have.

    Args:
        table: The table: an array on a mesh, or a `jax.ShapeDtypeStruct` with a sharding. Shape
            [rows, d].
        ids: The ids of the whole batch, on all devices together. Shape [batch, ...], of any integer
            dtype, and not traced. A negative id is counted as id 0, and an id past the end as the
            last id.
        config: The `EmbedderConfig` of the table. Set it if the config has a `row_multiple` or
            `spread`. If None, row i holds id i.
        batch_axes: The names of the mesh axes that the first dimension of `ids` is split over, as a
            tuple. If None, the dimension is split over all axes of the mesh.
        capacity: A factor for the size of the buffers, as in `value_and_grad`.
        max_rows: A bound on the number of distinct ids of each device, as in `value_and_grad`.

    Returns:
        A dict with two entries. `rows` says how many distinct rows each device is asked for. If
        several devices ask for the same row, the row is counted once. `rows` is an int64 array with
        one axis for each mesh axis in `batch_axes`. Devices send each other requests in buffers of
        fixed size, and `dropped` is the number of requests that do not fit. `rows` also counts the
        rows of these requests. In training, `lookup` returns NaN for the ids of these requests.

    Raises:
        TypeError: `ids` are not integers, `ids` are traced, or `max_rows` is not an int.
        ValueError: `table` has no sharding over a mesh, the rows of `table` are not split, or the
            columns of `table` are split. A mesh axis that splits the rows is not in `batch_axes`.
            `config` has another number of rows than `table`. The number of devices does not divide
            the batch size. `batch_axes` are not axes of the mesh. `capacity` is not above 0, or
            `max_rows` is below 1.

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
    if not isinstance(getattr(table, "sharding", None), NamedSharding):
        want = "an array, or its shape, on a mesh"
        raise arguments.value_error("table", want, arguments.describe(table))
    config = arguments.instance("config", config, EmbedderConfig | None, "an EmbedderConfig")
    if config is not None:
        arguments.check_same("config", "the rows of the table", config.rows, table.shape[0])
    array = arguments.on_host("ids", arguments.as_int32("ids", ids))
    mesh = table.sharding.mesh
    axes = mesh.axis_names if batch_axes is None else batch_axes
    are_axes_of_mesh = isinstance(axes, tuple) and {*axes} <= {*mesh.axis_names}
    if not are_axes_of_mesh:
        want = f"a tuple of axes of the mesh, {mesh.axis_names}, or None"
        raise arguments.value_error("batch_axes", want, repr(batch_axes))
    device_count = devices_along(mesh, axes)
    has_equal_parts = array.ndim > 0 and array.shape[0] % device_count == 0
    if not has_equal_parts:
        want = f"a first dimension that {device_count} devices divide"
        raise arguments.value_error("ids", want, f"shape {list(array.shape)}")
    capacity = arguments.positive("capacity", capacity)
    # For each dimension of the ids, the mesh axes that split it. All axes split the first one.
    id_axes = [axes]
    # The plan has the number of rows of the table, and how many rows devices can ask for.
    plan = plan_exchange(table, id_axes, array.size, as_max_rows(max_rows), capacity)
    # Which row of the table holds which id. If None, row i holds id i.
    order = None if config is None else config.row_order
    ids_of_devices = array.reshape(device_count, -1)
    indices = rows_of_nearest_ids(ids_of_devices, plan.num_rows, order)
    return _counted(plan, indices)


def _counted(plan: ExchangePlan, indices: np.ndarray) -> dict[str, Any]:
    """Counts the rows that each device is asked for, and the requests that do not fit.

    The owner of a row is the device that is asked for the row. A request is held as one number,
    `device * num_rows + row`, for the device that asks and the row that it asks for. So all
    requests of a device are in one range of `num_rows` numbers. And all requests of a device to one
    owner are in one range of `shard_rows` numbers, because each owner has that many consecutive
    rows.

    Args:
        plan: The plan of the exchange, which has the sizes of the buffers.
        indices: The row indices that each device reads, [devices, n].
    """
    devices = np.arange(len(indices))[:, None]
    # A device asks only once for a row that its ids repeat.
    requests = np.unique(devices * plan.num_rows + indices)
    # Each device asks for at most `most_asked` rows, and drops the highest ones beyond that.
    within_bound = _first_of_each_range(requests, plan.num_rows, plan.most_asked)
    # Then each device asks each owner for at most `most_sent` of these rows.
    sent = _first_of_each_range(within_bound, plan.shard_rows, plan.most_sent)
    not_sent = len(requests) - len(sent)
    received = _count_rows_of_each_owner(plan, sent)
    not_received = np.maximum(received - plan.most_received, 0).sum()
    rows = _count_rows_of_each_owner(plan, requests)
    return {"rows": rows, "dropped": int(not_sent + not_received)}


def _count_rows_of_each_owner(plan: ExchangePlan, requests: np.ndarray) -> np.ndarray:
    """Counts the distinct rows that each device is asked for.

    A device asks the owner of a row, which is a device whose shard of the table has the row.
    Devices are numbered along the mesh axes that the batch is split over.

    For example, a mesh has the axes "data" of size 2 and "model" of size 4. The batch is split over
    both axes, so device 5 is at the coordinates (1, 1). The 8 rows of a table are split over
    "model", so each shard has 2 rows. Now device 5 asks for row 6. This row is in shard 3, because
    6 // 2 = 3, so the owner is at the coordinates (1, 3). This is device 1 * 4 + 3 = 7.

    Args:
        plan: The plan of the exchange, which says how the rows and the batch are split.
        requests: The numbers `device * num_rows + row`, for the device that asks and the row that
            it asks for.

    Returns:
        int64, with one axis for each mesh axis that the batch is split over.
    """
    # `id_axes` has the mesh axes of each dimension of the ids that is split. Here only the first
    # dimension is split, over the axes of the batch.
    (batch_axes,) = plan.id_axes
    mesh_shape = [plan.mesh.shape[axis] for axis in batch_axes]
    owner_mesh_shape = [plan.mesh.shape[axis] for axis in plan.owner_axes]
    asking_devices, rows = np.divmod(requests, plan.num_rows)
    # For each mesh axis, the coordinate of each request's device along this axis.
    asking_coordinates = np.unravel_index(asking_devices, mesh_shape)
    shards = rows // plan.shard_rows
    shard_coordinates = np.unravel_index(shards, owner_mesh_shape)
    # The owner has the coordinates of the asking device, except along the axes that split the rows.
    # Along these, it has the coordinates of the shard.
    coordinates = dict(zip(batch_axes, asking_coordinates, strict=True))
    coordinates.update(zip(plan.owner_axes, shard_coordinates, strict=True))
    owner_coordinates = [coordinates[axis] for axis in batch_axes]
    owners = np.ravel_multi_index(owner_coordinates, mesh_shape)
    # If several devices ask an owner for the same row, the row counts once. So the pairs of an
    # owner and a row are made distinct, each as one number.
    distinct_pairs = np.unique(owners * plan.num_rows + rows)
    owner_of_row = distinct_pairs // plan.num_rows
    counts = np.bincount(owner_of_row, minlength=math.prod(mesh_shape))
    return counts.reshape(mesh_shape)


def _first_of_each_range(ascending: np.ndarray, length: int, most: int) -> np.ndarray:
    """Keeps at most `most` numbers, the lowest ones, of each range 0..length-1, length.., ...

    For example, the numbers 1 2 3 5 with length 4 and at most 2 of each range give 1 2 5.
    """
    ranges = ascending // length
    first_index_of_range = ranges.searchsorted(ranges)
    index_in_range = np.arange(len(ranges)) - first_index_of_range
    return ascending[index_in_range < most]
