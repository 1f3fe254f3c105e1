"""Checks arrays, and converts them to jax arrays."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from transformer_embed._src.arguments.messages import describe, type_error, value_error
from transformer_embed._src.arguments.shapes import check_shape
from transformer_embed._src.arguments.values import is_floating
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.conversions import is_traced, on_device, unwrapped


def check_known(name: str, array: Any) -> None:
    """Raises a TypeError if an array is traced, because then nobody can read the values yet."""
    if is_traced(array):
        raise type_error(name, "values on the host, outside of jit", describe(array))


def on_host(name: str, array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the values of an array as a numpy array.

    Raises an error for a traced array, and for one that is split over several processes.
    """
    check_known(name, array)
    if isinstance(array, jax.Array):
        has_all_values = array.is_fully_addressable or array.is_fully_replicated
        if not has_all_values:
            # jax would raise an error too, but an error that does not name the argument.
            want = "values that this process has (each checks its own part of a batch)"
            raise value_error(name, want, "an array of several processes")
    return jax.device_get(array)


def as_array(name: str, value: ArrayLike | Sequence[Any]) -> jax.Array | np.ndarray:
    """Returns a jax array as it is, and anything else as a numpy array with numpy's dtype.

    The numpy array is always a copy, because jax may share the memory of a numpy array, and read
    the memory after the caller has changed it. The copy is in the byte order of this machine. In
    another byte order, jax would misread the numbers if a program for the shape is already
    compiled.
    """
    value = unwrapped(value)
    if isinstance(value, jax.Array):
        return value
    if _has_mask(value):
        # The conversion would drop the mask.
        raise type_error(name, "an array without a mask", "a masked array")
    try:
        array = np.asarray(value)
    except (ValueError, jax.errors.TracerArrayConversionError) as error:
        # The value is a list of lists that differ in length, or a list that jax.jit has made a list
        # of traced scalars.
        want = "one array (jnp.stack makes it of a list), or nested lists of equal lengths"
        raise type_error(name, want, f"a {type(value).__name__}") from error
    if array.dtype == object:
        raise type_error(name, "an array", describe(value))
    return array.astype(array.dtype.newbyteorder("="))


def native_leaves(name: str, tree: Any) -> Any:
    """Returns a tree of parameters with all numpy arrays in the byte order of this machine.

    A masked array is a TypeError that names the path of the leaf. Call this function before the
    tree is passed to a compiled function, because `jax.jit` would drop the mask of a masked array,
    and could misread the bytes of another byte order.
    """
    # Most trees have jax arrays alone. For these, the test takes a microsecond.
    has_numpy_leaves = any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree))
    if not has_numpy_leaves:
        return tree

    def native_leaf(path: Any, leaf: Any) -> Any:
        return native(name + jax.tree_util.keystr(path), leaf)

    return jax.tree.map_with_path(native_leaf, tree)


def native(name: str, leaf: Any) -> Any:
    """Returns a numpy array in the byte order of this machine, and any other value as it is.

    Raises a TypeError for a masked array.
    """
    if not isinstance(leaf, np.ndarray):
        return leaf
    if _has_mask(leaf):
        raise type_error(name, "an array without a mask", "a masked array")
    return leaf.astype(leaf.dtype.newbyteorder("="), copy=False)


def _has_mask(value: Any) -> bool:
    """Returns whether a value is a masked array of numpy, or a sequence that holds one."""
    if isinstance(value, np.ndarray):
        return isinstance(value, np.ma.MaskedArray)
    # `has_ordered_items` is True for lists, tuples, deques and the like. It is False for a dtype,
    # which has items and a length, but no iterator.
    has_ordered_items = isinstance(value, Collection) and hasattr(type(value), "__getitem__")
    if not has_ordered_items or isinstance(value, str | bytes | jax.Array | Mapping):
        return False
    # A list may have a million numbers. A set of the types takes less time than a call of this
    # function for each number.
    item_types = set(map(type, value))
    if item_types <= {bool, int, float}:
        return False
    return any(map(_has_mask, value))


def as_integers(
    name: str,
    value: ArrayLike,
    lowest: int = -(2**31),
    highest: int = 2**31 - 1,
    what: str = "int32",
) -> jax.Array | np.ndarray:
    """Converts integers to int32, after a check that they are in a range.

    The ValueError names the first integer outside the range, and the index of this integer. Lists
    and numpy arrays are checked, and stay on the host as numpy arrays. The values of a jax array
    are not checked. If its dtype has numbers outside int32, such as uint32, the array stays as it
    is. (`as_int32` converts such an array too.)

    Args:
        name: The argument, for errors.
        value: The integers.
        lowest, highest: The range, with both ends.
        what: What the range is, in words, for errors.
    """
    if is_int32(value):
        return value
    array = _any_integers(name, value)
    if isinstance(array, jax.Array):
        # Whether int32 has all numbers of the dtype.
        is_part_of_int32 = np.can_cast(array.dtype, np.int32)
        return array.astype(np.int32) if is_part_of_int32 else array
    is_outside = (array < lowest) | (array > highest)
    if is_outside.any():
        first_index = np.argwhere(is_outside)[0].tolist()
        first_outside = array[tuple(first_index)]
        want = f"integers inside {what}, {lowest}..{highest}"
        raise value_error(name, want, f"{first_outside} at index {first_index}")
    return array.astype(np.int32)


def as_int32(name: str, value: ArrayLike) -> jax.Array:
    """Converts integers to int32, and clips integers outside int32 to the nearest end."""
    if is_int32(value):
        return value
    array = _any_integers(name, value)
    is_wider_than_int32 = not np.can_cast(array.dtype, np.int32)
    if is_wider_than_int32:
        # The bounds of int32 must be numbers of the array's dtype. For an unsigned dtype, the lower
        # bound is 0, because the dtype has no negative numbers.
        as_number_of_dtype = array.dtype.type
        lowest_of_dtype = jnp.iinfo(array.dtype).min
        lowest = as_number_of_dtype(max(lowest_of_dtype, -(2**31)))
        highest = as_number_of_dtype(2**31 - 1)
        if isinstance(array, jax.Array):
            # `device_put` is called because users may forbid jax to move numbers to a device by
            # itself.
            lowest, highest = jax.device_put((lowest, highest))
        array = array.clip(lowest, highest)
    # This also makes a weakly typed int32 an ordinary one. A compiled function would be traced
    # again for a weak type.
    return jnp.asarray(array, jnp.int32)


def as_indices(name: str, value: ArrayLike, highest: int, what: str, *axes: str) -> jax.Array:
    """Converts indices to an int32 jax array, after a check that those on the host are in range.

    The range is 0 to `highest`.

    Args:
        name: The argument, for errors.
        value: The indices.
        highest: The highest index. A symbolic size of `jax.export` counts as high enough.
        what: What the range is, in words, for errors.
        *axes: The names of the axes that the indices must have, such as "batch", "length".
    """
    is_symbolic = not isinstance(highest, int)
    highest_int32 = 2**31 - 1
    highest = highest_int32 if is_symbolic else min(highest, highest_int32)
    checked = as_integers(name, value, 0, highest, what)
    array = as_int32(name, checked)
    has_all_axes = array.ndim == len(axes)
    check_shape(name, array.shape, has_all_axes, f"[{', '.join(axes)}]")
    return array


def _any_integers(name: str, value: ArrayLike) -> jax.Array | np.ndarray:
    """Converts integers to an array, of int32 if they have 8 bits or less.

    Wider integers keep the dtype. Raises a TypeError for an array of another kind of numbers.
    """
    array = as_array(name, value)
    is_empty_list = array.size == 0 and isinstance(value, list | tuple)
    if is_empty_list:
        # numpy has made the list an array of float64.
        return array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise type_error(name, "an integer dtype", array.dtype)
    # Integers of 2, 4 and 8 bits have an itemsize of 1 byte. They are converted, because numpy
    # cannot compare integers of 2 and 4 bits.
    has_itemsize_1 = array.dtype.itemsize == 1
    return array.astype(np.int32) if has_itemsize_1 else array


# A comparison of a dtype with `jnp.int32`, which is a type, would add a microsecond to each token
# of decoding.
_INT32 = np.dtype(np.int32)


def is_int32(value: Any) -> TypeGuard[jax.Array]:
    """Returns whether a value is a jax array that needs no conversion to int32."""
    return isinstance(value, jax.Array) and value.dtype == _INT32 and not value.weak_type


def as_mask(name: str, value: ArrayLike, is_true: str = "may attend") -> jax.Array:
    """Converts a mask to a bool array. `is_true` says in an error what True means."""
    array = as_array(name, value)
    if array.dtype != jnp.bool_:
        raise type_error(name, f"a bool array, True = {is_true}", array.dtype)
    return on_device(array)


def as_floats(name: str, value: ArrayLike) -> jax.Array:
    """Converts floating numbers of 16 bits or more to a jax array."""
    array = as_array(name, value)
    if not is_floating(array.dtype):
        raise type_error(name, "a floating dtype of 16 to 64 bits", array.dtype)
    return on_device(array)
