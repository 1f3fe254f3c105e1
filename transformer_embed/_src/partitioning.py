"""Says over which mesh axes arrays are split, and sends parts of arrays between devices."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from transformer_embed._src import arguments

# The names of the mesh axes that one dimension of an array is split over, () if it is whole.
Axes = tuple[str, ...]


def spec_axes(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """Returns the mesh axes of each dimension of an array.

    For `PartitionSpec("data", None, ("x", "y"))` and 4 dimensions, it returns
    [("data",), (), ("x", "y"), ()]. The list has `ndim` entries, or as many as the spec if it is
    longer.
    """
    axes_of_dimensions: list[Axes] = []
    for names in spec:
        # The leaves of a tuple are its names, the leaf of a name is the name, and None has no leaf.
        axes_of_dimensions.append(tuple(jax.tree.leaves(names)))
    # A spec may leave out the last dimensions, which are whole.
    missing_dimensions = ndim - len(spec)
    whole: Axes = ()
    return axes_of_dimensions + [whole] * missing_dimensions


def typed_axes(array: Any) -> list[Axes]:
    """Returns the explicit mesh axes that split each dimension, from the array's type.

    A dimension that is whole, or split over automatic axes, has ().
    """
    return spec_axes(jax.typeof(array).sharding.spec, array.ndim)


def joined_axes(axes_of_dimensions: Iterable[Axes]) -> Axes:
    """Returns the mesh axes of all dimensions in one tuple.

    The axes ("data",), () and ("x", "y") of three dimensions become ("data", "x", "y").
    """
    return tuple(itertools.chain.from_iterable(axes_of_dimensions))


def check_on_mesh(name: str, array: Any, *table_axes: Axes) -> None:
    """Raises a ValueError if a table is split over a mesh, but an array is on no mesh.

    `table_axes` are the mesh axes that split the dimensions of the table.
    """
    if any(table_axes) and jax.typeof(array).sharding.mesh.empty:
        want = "an array on the mesh that splits the table: call inside jax.set_mesh(mesh)"
        raise arguments.value_error(name, want, arguments.describe(array))


def is_explicit(mesh: Any) -> bool:
    """Returns whether a mesh has explicit axes, over which the types of arrays say the split."""
    return AxisType.Explicit in mesh.axis_types


def free_axes(mesh: Any) -> Axes:
    """Returns the axes of a mesh, without the axes of an enclosing shard_map.

    Along the axes of a shard_map, the code inside sees the array of a single device, so arrays
    cannot be split over these axes once more.
    """
    return axes_of_kind(mesh, AxisType.Auto, AxisType.Explicit)


def axes_of_kind(mesh: Any, *kinds: AxisType) -> Axes:
    """Returns the axes of a mesh that have one of these kinds."""
    kind_of_axis = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kind_of_axis if kind in kinds)


def restricted(sharding: NamedSharding, axes: Axes) -> NamedSharding:
    """Returns the sharding over these mesh axes alone.

    A dimension that only other axes split becomes whole.
    """
    spec = []
    for mesh_axes in spec_axes(sharding.spec, ndim=len(sharding.spec)):
        kept_axes = tuple(axis for axis in mesh_axes if axis in axes)
        spec.append(kept_axes)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def on_each_device(mesh: Any, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Makes a function run on each device of a mesh, by `jax.shard_map`.

    The shard_map is over the free axes of the mesh, which are all axes except those of an enclosing
    shard_map. If there are no free axes, the function itself is returned.

    The type of an array says along which mesh axes the array differs between devices, also along
    the axes of an enclosing shard_map. So if devices share an argument, jax sums the gradient of
    the argument over these devices, and over no others.

    Args:
        mesh: The mesh.
        function: A function of the parts of the arrays that one device has.
        in_specs: The specs of the arguments, as in `jax.shard_map`.
        out_specs: The specs of the results.
    """
    free = frozenset(free_axes(mesh))
    if not free:
        return function
    is_inside_shard_map = len(free) < len(mesh.axis_names)
    if is_inside_shard_map:
        if jax.__version_info__ < (0, 10):
            # Older versions make programs that do not compile, or whose devices wait for each other
            # without an end.
            want = "jax 0.10 or newer, to read split arrays inside a shard_map over other mesh axes"
            raise arguments.value_error("mesh", want, jax.__version__)
        # A shard_map inside another one keeps arrays for the backward pass, and jax gives a wrong
        # spec to an array that is not an argument. A checkpoint keeps only the arguments, and the
        # backward pass computes the other arrays again. First derivatives need one checkpoint, and
        # second derivatives need two.
        with_one_checkpoint = jax.checkpoint(function)
        function = jax.checkpoint(with_one_checkpoint)
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=free
    )


def devices_along(mesh: Any, axes: Axes) -> int:
    """Returns the number of devices along these mesh axes, 1 for no axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def index_along(axes: Axes) -> Array | int:
    """Returns, inside shard_map, which block along these axes this device has, counted from 0."""
    return jax.lax.axis_index(axes) if axes else 0


def first_index(axes: Axes, size: int) -> Array | int:
    """Returns, inside shard_map, the index in the whole array where this device's block starts.

    An index into the whole array, minus this index, is the index into the block.

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
    """Returns, inside shard_map, the array with a type that lets it differ along these axes too.

    The transpose of this call sums the gradient of the array over the axes that are added. So call
    it before a loop: then the gradients are summed once, and not in each step of the loop.
    """
    added_axes = tuple(sorted({*axes} - varying_axes(array)))
    return jax.lax.pcast(array, added_axes, to="varying") if added_axes else array


def gathered(name: str, array: Any) -> np.ndarray:
    """Returns all values of an array on the host.

    If the array is split over processes, each of these processes must call this.
    """
    arguments.check_known(name, array)
    is_split_over_processes = isinstance(array, jax.Array) and not array.is_fully_addressable
    if is_split_over_processes:
        # `multihost_utils` is slow to load, and only programs of several processes need it.
        from jax.experimental import multihost_utils  # noqa: PLC0415

        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(arguments.native(name, array))


def on_every_device(array: Array) -> Array:
    """Returns the whole array on each device, all-gathered if explicit mesh axes split it."""
    mesh = jax.typeof(array).sharding.mesh
    if not is_explicit(mesh):
        return array
    return reshard(array, NamedSharding(mesh, PartitionSpec()))


def with_whole_rows(array: Array, axis: int = -1) -> Array:
    """Returns the array with one axis whole, all-gathered if explicit mesh axes split the axis.

    Call this before a cumulative sum or a shift, because the ends of a split axis have no
    neighbours on the same device.
    """
    sharding = jax.typeof(array).sharding
    axes_of_dimensions = spec_axes(sharding.spec, array.ndim)
    if not axes_of_dimensions[axis]:
        return array
    axes_of_dimensions[axis] = ()
    return reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*axes_of_dimensions)))


def reshard(array: Array, sharding: NamedSharding) -> Array:
    """Returns the array with this sharding, which may have automatic and explicit mesh axes.

    If the mesh has no axes, or only the axes of an enclosing shard_map, the array is returned as it
    is, because nothing can split it.
    """
    mesh = sharding.mesh
    # The axes of the mesh that no enclosing shard_map has taken.
    if not free_axes(mesh):
        return array
    if not is_explicit(mesh):
        return jax.lax.with_sharding_constraint(array, sharding)
    # Each of jax's two functions accepts axes of one kind.
    explicit_sharding = restricted(sharding, axes_of_kind(mesh, AxisType.Explicit))
    automatic_sharding = restricted(sharding, axes_of_kind(mesh, AxisType.Auto))
    array = jax.sharding.reshard(array, explicit_sharding)
    if not any(automatic_sharding.spec):
        return array
    return jax.lax.with_sharding_constraint(array, automatic_sharding)


def split_like(array: Array, other: Array) -> Array:
    """Splits the leading dimensions of an array over explicit mesh axes as another array is split.

    A dimension of size 1, which broadcasts to the size of the other array, stays whole.
    """
    sharding = jax.typeof(other).sharding
    if not is_explicit(sharding.mesh):
        return array
    spec = []
    # `zip` stops at the last dimension that both arrays have.
    for size, other_size, mesh_axes in zip(array.shape, other.shape, sharding.spec, strict=False):
        spec.append(mesh_axes if size == other_size else None)
    return reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def all_gather(array: Array, axes_of_dimensions: Sequence[Axes]) -> Array:
    """Returns, inside shard_map, the array with each dimension gathered over its mesh axes."""
    for dimension, axes in enumerate(axes_of_dimensions[: array.ndim]):
        if axes:
            array = jax.lax.all_gather(array, axes, axis=dimension, tiled=True)
    return array


def reduce_scatter(array: Array, axes_of_dimensions: Sequence[Axes]) -> Array:
    """Returns, inside shard_map, this device's block of the sum of the devices' arrays.

    The sum is over the mesh axes of all dimensions. Each dimension of the sum is split over the
    mesh axes of this dimension. So the function is the transpose of `all_gather`.
    """
    for dimension, axes in enumerate(axes_of_dimensions):
        if axes:
            array = jax.lax.psum_scatter(array, axes, scatter_dimension=dimension, tiled=True)
    return array
