"""What an exchange of rows asks of the devices for one batch, counted on the host."""

from typing import NamedTuple

import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import devices_along
from transformer_embed._src.tables.rows.distinct_ids import as_max_rows
from transformer_embed._src.tables.sharded.table import Sharded
from transformer_embed._src.tables.sharded.table_split import TableSplit


class ExchangeLoad(NamedTuple):
    """The load of a batch, as `exchange_load` returns it.

    Args:
        rows: int64, [size of each mesh axis of the batch, ...], the rows that each device is asked
            for; an id that several of them ask for counts once.
        dropped: the number of requests that do not fit; these ids read as NaN.

    Example:
        >>> import numpy as np
        >>> import transformer_embed as te
        >>> te.sharding.ExchangeLoad(np.array([3, 4]), dropped=0).rows.max()
        np.int64(4)
    """

    rows: np.ndarray
    dropped: int


def exchange_load(table: Sharded, ids: ArrayLike, *, max_rows: int | None = None) -> ExchangeLoad:
    """Counts what devices send of a striped table for a batch, and how many ids do not fit.

    It runs on the host. It also works on a table of shapes, which `shard_params` makes from the
    result of jax.eval_shape.

    Args:
        table: a striped table; see `shard_params`.
        ids: [batch, ...], any integer dtype, not traced: the ids of all devices, whose first
            dimension is split over `batch_axes`.
        max_rows: that of `te.rows.value_and_grad`, if a step trains with one.

    Returns:
        The rows that each device is asked for, and the number of requests that do not fit.

    Raises:
        TypeError: ids are not integers, or are traced; max_rows is not an int.
        ValueError: the table is not striped; a batch that the devices do not divide; a max_rows
            below 1.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> import transformer_embed as te
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ["model"])
        >>> params = {"embed": {"embeddings": np.ones([5, 2], np.float32)}}
        >>> rules = {"*": PartitionSpec("model")}
        >>> params = te.sharding.shard_params(params, mesh, rules, stripe="*", virtual_shards=2)
        >>> load = te.sharding.exchange_load(params["embed"]["embeddings"], np.array([4, 1, 4]))
        >>> load.rows.tolist(), load.dropped
        ([2], 0)
    """
    want = "a striped table (see `stripe` of shard_params)"
    split = arguments.instance("table", table, Sharded, want).split
    array = arguments.on_host("ids", arguments.as_int32("ids", ids))
    if not split.order.is_striped:
        raise arguments.value_error("table", want, "a contiguous table")
    axes = split.batch_axes
    devices = devices_along(split.mesh, axes)
    if not array.ndim or array.shape[0] % devices:
        want = f"a first dimension that {devices} devices divide"
        raise arguments.value_error("ids", want, f"shape {list(array.shape)}")
    buffers = split.buffers(axes, array.size, as_max_rows(max_rows))
    numbers = np.arange(devices).reshape([split.mesh.shape[axis] for axis in axes])
    # Devices that exchange rows with each other differ along the axes of rows alone.
    along = [axes.index(axis) for axis in split.rows]
    groups = np.moveaxis(numbers, along, range(-len(along), 0))
    groups = groups.reshape(-1, devices_along(split.mesh, split.rows))
    rows, dropped = _counted(split, buffers, array.reshape(devices, -1), groups)
    return ExchangeLoad(rows.reshape(numbers.shape), dropped)


def _counted(
    split: TableSplit, buffers: tuple[int, ...], ids: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, int]:
    """The rows that each device is asked for by ids [devices, ...], and what does not fit."""
    asked, room, distinct = buffers
    slots = [np.unique(split.slots(part)) for part in ids]
    dropped = sum(len(part[asked:]) for part in slots)
    bounds = np.arange(1, groups.shape[1]) * split.shard
    # What each device asks of each owner.
    parts = [np.split(part[:asked], np.searchsorted(part[:asked], bounds)) for part in slots]
    rows = np.zeros(len(ids), np.int64)
    for group in groups:
        of_owners = zip(*(parts[device] for device in group), strict=True)
        for owner, requests in zip(group, of_owners, strict=True):
            received = np.unique(np.concatenate([part[:room] for part in requests]))
            rows[owner] = len(received[:distinct])
            dropped += len(received[distinct:]) + sum(len(part[room:]) for part in requests)
    return rows, dropped
