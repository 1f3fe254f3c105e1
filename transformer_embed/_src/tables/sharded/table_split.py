"""How a table lies on a mesh: which device holds which rows, and how its batch is split."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, Shaped

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import (
    Axes,
    along,
    array_axes,
    devices_along,
    free_axes,
    is_explicit,
    on_each_device,
    spec_axes,
)
from transformer_embed._src.tables.rows.distinct_ids import most_distinct
from transformer_embed._src.tables.rows.gathered_rows import rows_of_ids
from transformer_embed._src.tables.sharded.buffers import plan_buffers
from transformer_embed._src.tables.sharded.row_order import RowOrder


class TableSplit(NamedTuple):
    """A table on a mesh, without its rows; static.

    Args:
        order: which slot of the array holds which row.
        sharding: of the array.
        batch_axes: under automatic axes, the mesh axes that the first dimension of ids and x is
            split over, if the number of devices along them divides it. Under explicit axes, the
            arrays' own shardings are used instead.
        capacity: of a striped table; see `shard_params`.
    """

    order: RowOrder
    sharding: NamedSharding
    batch_axes: Axes
    capacity: float

    def here(self, *arrays: Array) -> "TableSplit":
        """The same around a call with these arrays, on this mesh, as the mesh of the context is.

        Inside somebody's shard_map, it is without its axes, along which the table is whole.
        """
        here = jax.sharding.get_abstract_mesh()
        of_arrays = (jax.typeof(array).sharding.mesh for array in arrays)
        for mesh in (here, *filter(is_explicit, of_arrays)):
            own = self.mesh.abstract_mesh
            is_own = mesh.shape == own.shape if mesh.manual_axes else mesh == own
            if not (is_own or mesh.empty):
                want = f"a table on the mesh of ids, of x or of jax.set_mesh, {mesh}"
                raise arguments.value_error("table", want, f"one on {self.mesh}")
        if not here.manual_axes:
            return self
        free = free_axes(here)
        batch_axes = tuple(axis for axis in self.batch_axes if axis in free)
        sharding = along(self.sharding, free, here)
        return self._replace(sharding=sharding, batch_axes=batch_axes)

    def __reduce__(self) -> tuple[Callable, tuple[Any, ...]]:
        """For pickle and jax.export: literals, with the numbers of the devices for a mesh."""
        mesh = self.mesh
        kinds = [kind.name for kind in mesh.axis_types]
        axes = mesh.device_ids.tolist(), mesh.axis_names, kinds, [*self.sharding.spec]
        return restored, (*axes, [*self.order], self.batch_axes, self.capacity)

    @property
    def mesh(self) -> Any:
        """The devices."""
        return self.sharding.mesh

    @property
    def rows(self) -> Axes:
        """The mesh axes that the rows are split over."""
        return spec_axes(self.sharding.spec, 2)[0]

    @property
    def columns(self) -> Axes:
        """The mesh axes that the columns are split over."""
        return spec_axes(self.sharding.spec, 2)[1]

    @property
    def shard(self) -> int:
        """Rows of a device's shard."""
        return self.order.size // devices_along(self.mesh, self.rows)

    def axes_of(self, array: Shaped[Array, "..."], channels: int = 0) -> list[Axes]:
        """The mesh axes that each dimension of ids is split over, or of x, which has channels."""
        return array_axes(self.mesh, self.batch_axes, array, array.ndim - channels)

    def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """The function, run on each device."""
        return on_each_device(self.mesh, function, in_specs, out_specs)

    def buffers(self, axes: Axes, count: int, max_rows: int) -> tuple[int, int, int]:
        """How many slots each device along the axes asks for at most, of `count` ids in all.

        Then how many it can send to each owner, and how many distinct ones it can receive.
        """
        devices, owners = (devices_along(self.mesh, each) for each in (axes, self.rows))
        asked = most_distinct(count // devices, self.order.vocab_size, max_rows)
        return asked, *plan_buffers(asked, owners, self.shard, devices, self.capacity)

    def slots(self, ids: Any) -> Any:
        """The slot of each id's row; an id out of range counts as the first or the last one.

        Ids are int32, of numpy or jax.
        """
        return self.order.slots(ids.clip(0, self.order.vocab_size - 1))


def restored(
    numbers: Any, names: Axes, kinds: Any, spec: Any, order: Any, batch_axes: Axes, capacity: float
) -> TableSplit:
    """A split, from what `TableSplit.__reduce__` makes of it."""
    devices = {device.id: device for device in jax.devices()}
    if (missing := np.setdiff1d(numbers, [*devices])).size:
        want = f"the devices that the table was placed on, {numbers}"
        raise arguments.value_error("mesh", want, f"none with the numbers {missing.tolist()}")
    grid = np.vectorize(devices.get, otypes=[object])(numbers)
    mesh = Mesh(grid, names, axis_types=tuple(AxisType[kind] for kind in kinds))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return TableSplit(RowOrder(*order), sharding, batch_axes, capacity)


class RowReader(NamedTuple):
    """How the rows of a sharded table are read, as `GatheredRows` asks; static.

    Args:
        split: that of the table.
        holders: the mesh axes along which devices hold different rows; none if all hold the same.
    """

    split: TableSplit
    holders: Axes

    @functools.partial(jax.jit, static_argnums=0)
    def read(
        self, held: Int32[Array, "k"], values: Float[Array, "n d"], ids: Int32[Array, "..."]
    ) -> Float[Array, "... d"]:
        """The row of each id, in float32 or wider.

        If devices hold different rows, ids are split as the batch is.
        """
        by_dimension, by_holder = self.split.axes_of(ids), PartitionSpec(self.holders)

        def read(held, values, ids):
            return rows_of_ids(held, values, self.split.slots(ids))

        in_specs = by_holder, by_holder, PartitionSpec(*by_dimension)
        read_all = self.split.map(read, in_specs, PartitionSpec(*by_dimension, ()))
        # Gradients are summed over devices before they are rounded.
        return read_all(held, arguments.widened(values), ids)
