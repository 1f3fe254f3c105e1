"""What an exchange of rows asks of the devices for one batch, counted on the host."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.partitioning import Axes, devices_along
from transformer_embed._src.tables.rows.distinct_ids import as_max_rows, most_distinct
from transformer_embed._src.tables.sharded.hops import Hop
from transformer_embed._src.tables.sharded.table import Sharded


class ExchangeLoad(NamedTuple):
    """The load of a batch, as `exchange_load` returns it.

    Args:
        rows: int64, [size of each mesh axis of the batch, ...], the rows that each device is asked
            for. An id counts once per device that asks, or once per group of devices whose requests
            are merged on the way.
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
    array = arguments.on_host("ids", arguments.as_int32("ids", ids))
    split = table.split
    if not split.order.is_striped:
        want = "a striped table (see `stripe` of shard_params)"
        raise arguments.value_error("table", want, "a contiguous table")
    batch = split.batch_axes
    devices = devices_along(split.mesh, batch)
    if array.shape[0] % devices:
        want = f"a first dimension that {devices} devices divide"
        raise arguments.value_error("ids", want, f"shape {list(array.shape)}")
    most = as_max_rows(max_rows)
    asked = most_distinct(array.size // devices, split.order.vocab_size, most)
    slots = [np.unique(split.slots(part)) for part in array.reshape(devices, -1)]
    held = [part[:asked] for part in slots]
    rows, dropped = simulate(split.hops(devices, asked), held, dict(split.mesh.shape), batch)
    return ExchangeLoad(rows, dropped + sum(len(part[asked:]) for part in slots))


def simulate(
    hops: Sequence[Hop], asked: Sequence[np.ndarray], sizes: Mapping[str, int], batch: Axes
) -> tuple[np.ndarray, int]:
    """What an exchange does with the ascending, distinct slots that each device asks for.

    Returns:
        The number of slots that each device is asked for over the last hop, [size of each axis of
        the batch, ...], and how many did not fit.
    """
    shape, dropped = tuple(sizes[axis] for axis in batch), 0
    # Each request is a pair of device and slot; the pairs ascend.
    devices, slots = np.repeat(np.arange(len(asked)), [*map(len, asked)]), np.concatenate(asked)
    received = devices
    for hop in hops:
        parts = slots // hop.stride % hop.parts
        fits = _rank(devices * hop.parts + parts) < hop.room
        owners = np.array(np.unravel_index(devices, shape))
        along = [batch.index(axis) for axis in hop.axes]
        owners[along] = np.unravel_index(parts, [sizes[axis] for axis in hop.axes])
        received = np.ravel_multi_index(tuple(owners[:, fits]), shape)
        # Requests of several devices for one slot are merged.
        pairs = np.unique([received, slots[fits]], axis=1)
        held = _rank(pairs[0]) < hop.distinct
        dropped += np.sum(~fits) + np.sum(~held)
        devices, slots = pairs[:, held]
    return np.bincount(received, minlength=len(asked)).reshape(shape), int(dropped)


def _rank(values: np.ndarray) -> np.ndarray:
    """How many equal ones stand before each of these values, which ascend."""
    return np.arange(len(values)) - np.searchsorted(values, values)
