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
        >>> params = {"embed": {"embeddings": np.ones([6, 2], np.float32)}}
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
    devices = devices_along(split.mesh, split.batch_axes)
    if not array.ndim or array.shape[0] % devices:
        want = f"a first dimension that {devices} devices divide"
        raise arguments.value_error("ids", want, f"shape {list(array.shape)}")
    return _counted(split, array.reshape(devices, -1), as_max_rows(max_rows))


def _counted(split: TableSplit, ids: np.ndarray, max_rows: int) -> ExchangeLoad:
    """The load of ids [devices, n]."""
    axes, size = split.batch_axes, split.order.size
    asked, room, distinct = split.buffers(axes, ids.size, max_rows)
    # What a device reads, or is asked for: `size` times its number, plus a slot.
    read = np.unique(np.arange(len(ids))[:, None] * size + split.slots(ids))
    sent = _first(_first(read, size, asked), split.shard, room)
    device, slot = divmod(sent, size)
    # The owner has the place of the device, but along the axes of rows.
    shape, of_rows = ([split.mesh.shape[axis] for axis in each] for each in (axes, split.rows))
    places = *np.unravel_index(device, shape), *np.unravel_index(slot // split.shard, of_rows)
    place = dict(zip((*axes, *split.rows), places, strict=True))
    received = np.unique(np.ravel_multi_index([*place.values()], shape) * size + slot)
    held = _first(received, size, distinct)
    dropped = len(read) - len(sent) + len(received) - len(held)
    return ExchangeLoad(np.bincount(held // size, minlength=len(ids)).reshape(shape), dropped)


def _first(ascending: np.ndarray, length: int, most: int) -> np.ndarray:
    """The numbers without those that follow the first `most` in each range of this length."""
    ranges = ascending // length
    return ascending[np.arange(len(ranges)) - ranges.searchsorted(ranges) < most]
