"""Says over which mesh axes arrays are split, and sends parts of arrays between devices."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from transformer_embed._src import arguments

# The mesh axes that one dimension of an array is split over; empty if it is whole.
Axes = tuple[str, ...]


def spec_axes(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """Returns the mesh axes of each of ndim dimensions, and of further ones that the spec has."""
    padded = (*spec, *[None] * (ndim - len(spec)))
    # A name is a leaf itself, and None has no leaves.
    return [tuple(jax.tree.leaves(names)) for names in padded]


def typed_axes(array: Any) -> list[Axes]:
    """Returns the explicit mesh axes of each dimension, which the type of an array says."""
    return spec_axes(jax.typeof(array).sharding.spec, array.ndim)


def check_on_mesh(name: str, array: Any, *axes_of_table: Axes) -> None:
    """Raises a ValueError if a table is split over a mesh, and an array is on no mesh."""
    if any(axes_of_table) and jax.typeof(array).sharding.mesh.empty:
        want = "an array on the mesh that splits the table: call inside jax.set_mesh(mesh)"
        raise arguments.value_error(name, want, arguments.describe(array))


def is_explicit(mesh: Any) -> bool:
    """Returns whether types say how arrays are split over some axes of a mesh."""
    return AxisType.Explicit in mesh.axis_types


def free_axes(mesh: Any) -> Axes:
    """Returns the axes of a mesh, without the axes of an enclosing shard_map.

    Inside a shard_map, an array belongs to one device along its axes, and the type of the array
    reaches no other device.
    """
    return axes_of_kind(mesh, AxisType.Auto, AxisType.Explicit)


def axes_of_kind(mesh: Any, *kinds: AxisType) -> Axes:
    """Returns the axes of a mesh that have one of these kinds."""
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in axes if kind in kinds)


def restricted(sharding: NamedSharding, axes: Axes) -> NamedSharding:
    """Returns a sharding that splits over no other axes than these."""
    dimensions = spec_axes(sharding.spec, 0)
    spec = (tuple(axis for axis in names if axis in axes) for names in dimensions)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def on_each_device(mesh: Any, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Returns a function that runs on each device along the free axes of a mesh.

    Types say what varies along each axis, including the axes of an enclosing shard_map. So jax sums
    gradients over devices where an array is shared, and nowhere else.
    """
    free = frozenset(free_axes(mesh))
    if not free:
        return function
    if len(free) < len(mesh.axis_names):
        if jax.__version_info__ < (0, 10):
            # The programs of older versions do not compile, or wait for each other without an end.
            want = (
                "jax 0.10 or newer, to read arrays that it splits, inside a shard_map over others"
            )
            raise arguments.value_error("mesh", want, jax.__version__)
        # jax gives a wrong spec to what a shard_map inside another one keeps for its gradient,
        # unless this is an argument. A checkpoint keeps only arguments. There is one for each order
        # of derivatives.
        function = jax.checkpoint(jax.checkpoint(function))
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=free
    )


def devices_along(mesh: Any, axes: Axes) -> int:
    """Returns the number of devices along these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def index_along(axes: Axes) -> Array | int:
    """Returns, inside shard_map, the index of this device's block along these axes."""
    return jax.lax.axis_index(axes) if axes else 0


def first_index(axes: Axes, size: int) -> Array | int:
    """Returns, inside shard_map, where this device's block of an array starts.

    Subtract it from an index into the whole array, and you have the index into the block.

    Args:
        axes: The mesh axes that the dimension is split over.
        size: The size of the block in this dimension.
    """
    return index_along(axes) * size


def varying_axes(array: Any) -> frozenset[str]:
    """Returns, inside shard_map, the mesh axes along which an array differs, as its type says."""
    array_type: Any = jax.typeof(array)
    # Since jax 0.10, the axes are a part of another attribute.
    return array_type.mat.varying if hasattr(array_type, "mat") else array_type.vma


def varying(array: Array, axes: Iterable[str]) -> Array:
    """Returns, inside shard_map, an array whose type lets it differ along these axes too.

    The gradient of the array is summed over the axes here. So call this before a loop, and the
    gradients are not summed in each step of the loop.
    """
    others = tuple(sorted({*axes} - varying_axes(array)))
    return jax.lax.pcast(array, others, to="varying") if others else array


def gathered(name: str, array: Any) -> np.ndarray:
    """Returns all values of an array on the host; each process that holds a part must call this."""
    arguments.check_known(name, array)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        # This module is slow to load, and only several processes need it.
        from jax.experimental import multihost_utils  # noqa: PLC0415

        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(arguments.native(name, array))


def on_every_device(array: Array) -> Array:
    """Returns the whole array on each device, all-gathered if explicit mesh axes split it."""
    mesh = jax.typeof(array).sharding.mesh
    return reshard(array, NamedSharding(mesh, PartitionSpec())) if is_explicit(mesh) else array


def with_whole_rows(array: Array, axis: int = -1) -> Array:
    """Returns the array with one axis whole, all-gathered if explicit mesh axes split the axis.

    Call this before a cumulative sum or a shift, since a split axis has no neighbours at its ends.
    """
    sharding = jax.typeof(array).sharding
    axes = spec_axes(sharding.spec, array.ndim)
    if not axes[axis]:
        return array
    axes[axis] = ()
    return reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*axes)))


def reshard(array: Array, sharding: NamedSharding) -> Array:
    """Returns the array with this sharding, under automatic or explicit axes, or both kinds."""
    if not free_axes(sharding.mesh):
        return array
    if not is_explicit(sharding.mesh):
        return jax.lax.with_sharding_constraint(array, sharding)
    # A function of jax accepts axes of one kind.
    explicit, automatic = (
        restricted(sharding, axes_of_kind(sharding.mesh, kind))
        for kind in (AxisType.Explicit, AxisType.Auto)
    )
    array = jax.sharding.reshard(array, explicit)
    return jax.lax.with_sharding_constraint(array, automatic) if any(automatic.spec) else array


def split_like(array: Array, other: Array) -> Array:
    """Returns the array, split over explicit mesh axes as the other one's leading dimensions."""
    sharding = jax.typeof(other).sharding
    if not is_explicit(sharding.mesh):
        return array
    # A dimension of 1 is broadcast to the other's size, and cannot be split.
    dimensions = zip(array.shape, other.shape, sharding.spec, strict=False)
    names = (axes if size == other_size else None for size, other_size, axes in dimensions)
    return reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*names)))


def all_gather(array: Array, axes: Sequence[Axes]) -> Array:
    """Returns, inside shard_map, the array with each dimension gathered over these axes."""
    for dimension, names in enumerate(axes[: array.ndim]):
        if names:
            array = jax.lax.all_gather(array, names, axis=dimension, tiled=True)
    return array


def reduce_scatter(array: Array, axes: Sequence[Axes]) -> Array:
    """Sums over these axes, and leaves each device its own block: the transpose of `all_gather`."""
    for dimension, names in enumerate(axes):
        if names:
            array = jax.lax.psum_scatter(array, names, scatter_dimension=dimension, tiled=True)
    return array
