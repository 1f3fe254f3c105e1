"""The mesh axes that each dimension of an array is split over, and what devices along them send."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from transformer_embed._src import arguments

Axes = tuple[str, ...]


def spec_axes(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """The mesh axes of each of ndim dimensions, and of those that only the spec has."""
    padded = (*spec, *[None] * (ndim - len(spec)))
    # A name is a leaf itself, and None has no leaves.
    return [tuple(jax.tree.leaves(names)) for names in padded]


def typed_axes(array: Any) -> list[Axes]:
    """The explicit mesh axes that each dimension is split over, as the array's type says."""
    return spec_axes(jax.typeof(array).sharding.spec, array.ndim)


def check_on_mesh(name: str, array: Any, *axes_of_table: Axes) -> None:
    """A ValueError if a table is split over axes of a mesh that an array knows nothing of."""
    if any(axes_of_table) and jax.typeof(array).sharding.mesh.empty:
        want = "an array on the mesh that splits the table: call inside jax.set_mesh(mesh)"
        raise arguments.value_error(name, want, arguments.describe(array))


def is_explicit(mesh: Any) -> bool:
    """Whether types say how arrays are split over some axes of a mesh."""
    return AxisType.Explicit in mesh.axis_types


def free_axes(mesh: Any) -> Axes:
    """The axes of a mesh, without those of an enclosing shard_map.

    An array here is one device's along those: no other device can be reached by its type.
    """
    return axes_of_kind(mesh, AxisType.Auto, AxisType.Explicit)


def axes_of_kind(mesh: Any, *kinds: AxisType) -> Axes:
    """The axes of a mesh of these kinds."""
    each = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in each if kind in kinds)


def along(sharding: NamedSharding, axes: Axes) -> NamedSharding:
    """A sharding without other axes than these."""
    dimensions = spec_axes(sharding.spec, 0)
    spec = (tuple(axis for axis in each if axis in axes) for each in dimensions)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def on_each_device(mesh: Any, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """The function, run on each device along the free axes of a mesh.

    Types say what varies along each axis, those of an enclosing shard_map too: jax then sums
    gradients over devices where an array is shared, and nowhere else.
    """
    free = frozenset(free_axes(mesh))
    if not free:
        return function
    if len(free) < len(mesh.axis_names):
        if jax.__version_info__ < (0, 10):
            # Its programs do not compile, or wait for each other without an end.
            want = (
                "jax 0.10 or newer, to read arrays that it splits, inside a shard_map over others"
            )
            raise arguments.value_error("mesh", want, jax.__version__)
        # What a shard_map inside another one keeps for its gradient gets a wrong spec from jax,
        # unless it is an argument: one checkpoint for each order of derivatives.
        function = jax.checkpoint(jax.checkpoint(function))
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=free
    )


def devices_along(mesh: Any, axes: Axes) -> int:
    """The number of devices along these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def index_along(axes: Axes) -> Array | int:
    """Inside shard_map, the index of this device's block along these axes."""
    return jax.lax.axis_index(axes) if axes else 0


def varying_axes(array: Any) -> frozenset[str]:
    """Inside shard_map, the mesh axes along which an array differs, if its type says so."""
    kind: Any = jax.typeof(array)
    # Since jax 0.10, the axes are a part of another attribute.
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma


def varying(array: Array, axes: Iterable[str]) -> Array:
    """Inside shard_map, the array with a type that lets it differ along these axes too.

    Its gradient is summed over them here, for example before a loop and not in each of its steps.
    """
    others = tuple(sorted({*axes} - varying_axes(array)))
    return jax.lax.pcast(array, others, to="varying") if others else array


def gathered(name: str, array: Any) -> np.ndarray:
    """All values of an array, on the host; if several processes hold it, each of them must ask."""
    arguments.check_known(name, array)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        # Slow to load, and only several processes need it.
        from jax.experimental import multihost_utils  # noqa: PLC0415

        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(arguments.native(name, array))


def on_every_device(array: Array) -> Array:
    """The array, all-gathered if explicit mesh axes split it."""
    mesh = jax.typeof(array).sharding.mesh
    return reshard(array, NamedSharding(mesh, PartitionSpec())) if is_explicit(mesh) else array


def with_whole_rows(array: Array, axis: int = -1) -> Array:
    """The array, all-gathered along an axis if explicit mesh axes split it.

    A split axis has neither a cumulative sum nor a neighbour at its ends.
    """
    sharding = jax.typeof(array).sharding
    axes = spec_axes(sharding.spec, array.ndim)
    if not axes[axis]:
        return array
    axes[axis] = ()
    return reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*axes)))


def reshard(array: Array, sharding: NamedSharding) -> Array:
    """The array with this sharding, under automatic or explicit axes, or some of each kind."""
    if not free_axes(sharding.mesh):
        return array
    if not is_explicit(sharding.mesh):
        return jax.lax.with_sharding_constraint(array, sharding)
    # A function of jax accepts axes of one kind.
    explicit, automatic = (
        along(sharding, axes_of_kind(sharding.mesh, kind))
        for kind in (AxisType.Explicit, AxisType.Auto)
    )
    array = jax.sharding.reshard(array, explicit)
    return jax.lax.with_sharding_constraint(array, automatic) if any(automatic.spec) else array


def split_like(array: Array, other: Array) -> Array:
    """The array, split over explicit mesh axes as the leading dimensions of the other one."""
    sharding = jax.typeof(other).sharding
    if not is_explicit(sharding.mesh):
        return array
    # A dimension of 1 is broadcast to the other's size, and cannot be split.
    names = zip(array.shape, other.shape, sharding.spec, strict=False)
    spec = PartitionSpec(*(axes if size == whole else None for size, whole, axes in names))
    return reshard(array, NamedSharding(sharding.mesh, spec))


def all_gather(array: Array, axes: Sequence[Axes]) -> Array:
    """Inside shard_map, the array, gathered in its dimensions over these axes."""
    for dimension, names in enumerate(axes[: array.ndim]):
        if names:
            array = jax.lax.all_gather(array, names, axis=dimension, tiled=True)
    return array


def reduce_scatter(array: Array, axes: Sequence[Axes]) -> Array:
    """The transpose of `all_gather`: the sum over these axes, each device with its own block."""
    for dimension, names in enumerate(axes):
        if names:
            array = jax.lax.psum_scatter(array, names, scatter_dimension=dimension, tiled=True)
    return array
