"""What an exchange of rows asks of the devices for one batch, counted on the host."""

from typing import NamedTuple

import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import devices_along
from transformer_embed._src.tables.rows.distinct_ids import as_max_rows
from transformer_embed._src.tables.sharded.table import Sharded


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
    axes, size, shard = split.batch_axes, split.order.size, split.shard
    devices = devices_along(split.mesh, axes)
    if not array.ndim or array.shape[0] % devices:
        want = f"a first dimension that {devices} devices divide"
        raise arguments.value_error("ids", want, f"shape {list(array.shape)}")
    asked, room, distinct = split.buffers(axes, array.size, as_max_rows(max_rows))
    numbers = np.arange(devices).reshape([split.mesh.shape[axis] for axis in axes])
    # Devices that exchange rows with each other differ along the axes of rows alone. Here they
    # follow each other, as many as there are owners.
    along = [axes.index(axis) for axis in split.rows]
    order = np.moveaxis(numbers, along, range(-len(along), 0)).reshape(-1)
    # What a device reads, or is asked for, is its place in this order times `size`, plus a slot.
    slots = split.slots(array.reshape(devices, -1)[order])
    read = np.unique(np.arange(devices)[:, None] * size + slots)
    sent = _first(_first(read, size, asked), shard, room)
    device, slot = divmod(sent, size)
    owner = device - device % (size // shard) + slot // shard
    received = np.unique(owner * size + slot)
    held = _first(received, size, distinct)
    rows = np.bincount(held // size, minlength=devices)[order.argsort()]
    dropped = len(read) - len(sent) + len(received) - len(held)
    return ExchangeLoad(rows.reshape(numbers.shape), dropped)


def _first(ascending: np.ndarray, length: int, most: int) -> np.ndarray:
    """The numbers without those that follow the first `most` in each range of this length."""
    ranges = ascending // length
    return ascending[np.arange(len(ranges)) - ranges.searchsorted(ranges) < most]
