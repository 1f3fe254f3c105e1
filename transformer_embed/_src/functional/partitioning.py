"""The mesh axes that each dimension of an array is split over, and what devices along them send."""

import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

Axes = tuple[str, ...]


def spec_axes(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """The mesh axes of each of ndim dimensions."""
    named = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec]
    return named + [()] * (ndim - len(named))


def partition_spec(*axes: Axes) -> PartitionSpec:
    """The spec of dimensions that are split over these axes."""
    return PartitionSpec(*[some if len(some) > 1 else some[0] if some else None for some in axes])


def array_axes(mesh: Any, batch: Axes, array: Array, batch_dimensions: int) -> list[Axes]:
    """The mesh axes that each dimension is split over.

    They come from the array's type under explicit axes; else the first one is split over `batch`.
    """
    if AxisType.Explicit in mesh.axis_types:
        return spec_axes(jax.typeof(array).sharding.spec, array.ndim)
    size = devices_along(mesh, batch)
    first = batch if batch_dimensions and array.shape[0] % size == 0 else ()
    return [first, *[()] * (array.ndim - 1)][: array.ndim]


def devices_along(mesh: Any, axes: Axes) -> int:
    """The number of devices along these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def index_along(axes: Axes) -> Int32[Array, ""] | int:
    """Inside shard_map, the index of this device's block along these axes."""
    return jax.lax.axis_index(axes) if axes else 0


def replicated(array: Array, mesh: Any) -> Array:
    """The array, whole on every device."""
    return reshard(array, NamedSharding(mesh, PartitionSpec()))


def on_every_device(array: Array) -> Array:
    """The array, all-gathered if explicit mesh axes split it."""
    mesh = jax.typeof(array).sharding.mesh
    return replicated(array, mesh) if AxisType.Explicit in mesh.axis_types else array


def reshard(array: Array, sharding: NamedSharding) -> Array:
    """The array with this sharding, under automatic or explicit axes."""
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return jax.lax.with_sharding_constraint(array, sharding)
    # jax 0.6 has it elsewhere.
    if not hasattr(jax.sharding, "reshard"):
        return importlib.import_module("jax.experimental.shard").reshard(array, sharding)
    return jax.sharding.reshard(array, sharding)


def all_gather(array: Array, axes: Sequence[Axes]) -> Array:
    """Inside shard_map, the array, gathered in each dimension over these axes."""
    for dimension, names in enumerate(axes):
        if names:
            array = jax.lax.all_gather(array, names, axis=dimension, tiled=True)
    return array


def reduce_scatter(array: Array, axes: Sequence[Axes]) -> Array:
    """The transpose of `all_gather`: the sum over these axes, each device with its own block."""
    for dimension, names in enumerate(axes):
        if names:
            array = jax.lax.psum_scatter(array, names, scatter_dimension=dimension, tiled=True)
    return array


class OutputLayout(NamedTuple):
    """How an output layer, the product of x with every row of a table, is split over a mesh.

    Each device first receives two things. One is tokens: x is all-gathered over every axis that
    splits its channels or the table, and over the later axes of the same dimension. The other is
    whole rows: if the table's columns are split, an all-to-all splits its rows instead.

    Args:
        mesh: the devices.
        rows: the mesh axes that the table's rows are split over.
        columns: those of its columns.
        x: those of each dimension of x.
    """

    mesh: Any
    rows: Axes
    columns: Axes
    x: tuple[Axes, ...]

    @property
    def vocabulary(self) -> Axes:
        """The axes that the vocabulary is split over, once columns are exchanged for rows."""
        return (*self.rows, *self.columns)

    @property
    def tokens(self) -> tuple[Axes, ...]:
        """The axes that each dimension of the tokens stays split over."""
        return tuple(_leading_axes_outside(axes, self.vocabulary) for axes in self.x[:-1])

    @property
    def gathered(self) -> list[Axes]:
        """The axes that each dimension of x is gathered over."""
        pairs = zip(self.x, self.tokens, strict=False)
        return [*(axes[len(outside) :] for axes, outside in pairs), self.x[-1]]

    def specs(self) -> tuple[PartitionSpec, PartitionSpec]:
        """The specs of x and of the table."""
        return partition_spec(*self.x), partition_spec(self.rows, self.columns)

    def whole_rows(self, shard: Float[Array, "v d"]) -> Float[Array, "w c"]:
        """Inside shard_map, this device's rows with all columns."""
        return _exchange(shard, self.columns, split=0, concatenated=1)

    def split_bias(self, bias: Float[Array, "v"] | None, size: int) -> Float[Array, "w"] | None:
        """The numbers of all rows of a table of this size, split as the vocabulary; zeros are added
        for its padding."""
        if bias is None:
            return None
        padded = jnp.pad(replicated(bias, self.mesh), (0, size - len(bias)))
        return reshard(padded, NamedSharding(self.mesh, partition_spec(self.vocabulary)))

    def split_columns(self, rows: Float[Array, "w c"]) -> Float[Array, "v d"]:
        """The inverse of `whole_rows`."""
        return _exchange(rows, self.columns, split=1, concatenated=0)

    def own_tokens(self, values: Float[Array, "..."]) -> Float[Array, "..."]:
        """This device's part of values of each gathered token, which are equal on all devices that
        have the token."""
        axes = self.gathered[:-1]
        copies = devices_along(self.mesh, tuple(axis for names in axes for axis in names))
        return reduce_scatter(values / copies, axes)

    def sum_of_x(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The sum of a gathered x over the vocabulary, scattered to where x came from."""
        gathered = [axis for axes in self.gathered for axis in axes]
        x = jax.lax.psum(x, tuple(axis for axis in self.vocabulary if axis not in gathered))
        # Devices along the other axes have the same sum.
        copies = [self.mesh.shape[axis] for axis in gathered if axis not in self.vocabulary]
        return reduce_scatter(x / math.prod(copies), self.gathered)


def _leading_axes_outside(axes: Axes, others: Axes) -> Axes:
    """The leading ones that are none of the others.

    An array that is split over these alone is one block.
    """
    return axes[: next((i for i, axis in enumerate(axes) if axis in others), len(axes))]


def _exchange(array: Array, axes: Axes, *, split: int, concatenated: int) -> Array:
    if not axes:
        return array
    return jax.lax.all_to_all(array, axes, split_axis=split, concat_axis=concatenated, tiled=True)
