"""The mesh axes that each dimension of an array is split over, and conversions between them and a
PartitionSpec."""

import importlib
import math
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

Axes = tuple[str, ...]


def spec_axes(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """The mesh axes of each of ndim dimensions."""
    named = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec]
    return named + [()] * (ndim - len(named))


def partition_spec(*axes: Axes) -> PartitionSpec:
    """The spec of dimensions that are split over these axes."""
    return PartitionSpec(*[some if len(some) > 1 else some[0] if some else None for some in axes])


def leading_axes_outside(axes: Axes, others: Axes) -> Axes:
    """The leading ones that are none of the others: an array split over these alone is one
    block."""
    return axes[: next((i for i, axis in enumerate(axes) if axis in others), len(axes))]


def array_axes(mesh: Any, batch: Axes, array: Array, batch_dimensions: int) -> list[Axes]:
    """The mesh axes that each dimension is split over: from the array's type under explicit axes,
    else `batch` for the first one."""
    if AxisType.Explicit in mesh.axis_types:
        return spec_axes(jax.typeof(array).sharding.spec, array.ndim)
    size = math.prod(mesh.shape[axis] for axis in batch)
    first = batch if batch_dimensions and array.shape[0] % size == 0 else ()
    return [first, *[()] * (array.ndim - 1)][: array.ndim]


def index_along(axes: Axes) -> Int32[Array, ""] | int:
    """Inside shard_map, the index of this device's block of an array that is split over these
    axes."""
    return jax.lax.axis_index(axes) if axes else 0


def reshard(array: Array, sharding: NamedSharding) -> Array:
    """The array with this sharding, under automatic or explicit axes."""
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return jax.lax.with_sharding_constraint(array, sharding)
    # jax 0.6 has it elsewhere.
    if not hasattr(jax.sharding, "reshard"):
        return importlib.import_module("jax.experimental.shard").reshard(array, sharding)
    return jax.sharding.reshard(array, sharding)
