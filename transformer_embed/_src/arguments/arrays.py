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
    """Raises a TypeError for a traced array, before its values are read."""
    if is_traced(array):
        raise type_error(name, "values on the host, outside of jit", describe(array))


def on_host(name: str, array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the values of an array that is not traced."""
    check_known(name, array)
    if isinstance(array, jax.Array):
        is_here = array.is_fully_addressable or array.is_fully_replicated
        if not is_here:
            # jax's error would not name the argument.
            want = "values that this process has (each checks its own part of a batch)"
            raise value_error(name, want, "an array of several processes")
    return jax.device_get(array)


def as_array(name: str, value: ArrayLike | Sequence[Any]) -> jax.Array | np.ndarray:
    """Returns a jax array as it is, and anything else as a numpy array of its own width.

    The numpy array is always a copy, since jax may share its memory and read it after the caller
    has changed it. The array is in the byte order of this machine, because jax reads the bytes of
    another order as they are at shapes that it has seen.
    """
    value = unwrapped(value)
    if isinstance(value, jax.Array):
        return value
    if _has_mask(value):
        # numpy would drop the mask.
        raise type_error(name, "an array without a mask", "a masked array")
    try:
        array = np.asarray(value)
    except (ValueError, jax.errors.TracerArrayConversionError) as error:
        # jit takes a list apart into scalars.
        want = "one array (jnp.stack makes it of a list), or nested lists of equal lengths"
        raise type_error(name, want, f"a {type(value).__name__}") from error
    if array.dtype == object:
        raise type_error(name, "an array", describe(value))
    return array.astype(array.dtype.newbyteorder("="))


def native_leaves(name: str, tree: Any) -> Any:
    """Returns a tree of parameters whose numpy arrays jit reads right.

    jit drops the mask of a masked array, and reads the bytes of another byte order as they are at
    shapes that it has seen. The other leaves stay as they are.
    """
    # Most trees have jax arrays alone, and this takes a microsecond of each call.
    if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree)):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    names = (name + jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree))
    return treedef.unflatten(map(native, names, leaves))


def native(name: str, leaf: Any) -> Any:
    """Returns a numpy array in the byte order of this machine, and any other value as it is.

    A masked array is a TypeError.
    """
    if not isinstance(leaf, np.ndarray):
        return leaf
    if _has_mask(leaf):
        raise type_error(name, "an array without a mask", "a masked array")
    return leaf.astype(leaf.dtype.newbyteorder("="), copy=False)


def _has_mask(value: Any) -> bool:
    """Returns whether a value is a masked array, or a list or other sequence that holds one."""
    if isinstance(value, np.ndarray):
        return isinstance(value, np.ma.MaskedArray)
    # A list, a tuple, a deque and the like are collections with an order. (Not a dtype, which has
    # items and a length, but no iterator.)
    is_sequence = isinstance(value, Collection) and hasattr(type(value), "__getitem__")
    if not is_sequence or isinstance(value, str | bytes | jax.Array | Mapping):
        return False
    # The types are compared first, because a list may have a million numbers.
    has_numbers_alone = {*map(type, value)} <= {bool, int, float}
    return not has_numbers_alone and any(map(_has_mask, value))


def as_integers(
    name: str,
    value: ArrayLike,
    lowest: int = -(2**31),
    highest: int = 2**31 - 1,
    what: str = "int32",
) -> jax.Array | np.ndarray:
    """Returns integers as int32, but a wider jax array as it is.

    Values on the host are inside the range: a ValueError names the first one outside, and its
    index.

    Args:
        name: The argument.
        value: The integers.
        lowest, highest: The range.
        what: What the range is, in words.
    """
    if is_int32(value):
        return value
    array = _any_integers(name, value)
    if isinstance(array, jax.Array):
        return array.astype(np.int32) if np.can_cast(array.dtype, np.int32) else array
    is_outside = (array < lowest) | (array > highest)
    if is_outside.any():
        index = np.argwhere(is_outside)[0].tolist()
        want = f"integers inside {what}, {lowest}..{highest}"
        raise value_error(name, want, f"{array[tuple(index)]} at index {index}")
    return array.astype(np.int32)


def as_int32(name: str, value: ArrayLike) -> jax.Array:
    """Returns integers as int32; those outside become its lowest or highest value."""
    if is_int32(value):
        return value
    array = _any_integers(name, value)
    if not np.can_cast(array.dtype, np.int32):
        # Neither end may be outside the array's own dtype.
        lowest = array.dtype.type(max(jnp.iinfo(array.dtype).min, -(2**31)))
        highest = array.dtype.type(2**31 - 1)
        if isinstance(array, jax.Array):
            # device_put is called by name, for users may forbid jax to move numbers by itself.
            lowest, highest = jax.device_put((lowest, highest))
        array = array.clip(lowest, highest)
    # A weak int32 is converted too, because it would be traced again.
    return jnp.asarray(array, jnp.int32)


def as_indices(name: str, value: ArrayLike, highest: int, what: str, *axes: str) -> jax.Array:
    """Returns integers with these axes, as int32; those on the host are inside 0..highest.

    A symbolic `highest` of jax.export is assumed to be high enough.
    """
    highest = min(highest, 2**31 - 1) if isinstance(highest, int) else 2**31 - 1
    array = as_int32(name, as_integers(name, value, 0, highest, what))
    check_shape(name, array.shape, array.ndim == len(axes), f"[{', '.join(axes)}]")
    return array


def _any_integers(name: str, value: ArrayLike) -> jax.Array | np.ndarray:
    """Returns integers of any width."""
    array = as_array(name, value)
    # numpy makes an empty list float64.
    if array.size == 0 and isinstance(value, list | tuple):
        return array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise type_error(name, "an integer dtype", array.dtype)
    # numpy cannot compare integers of 2 and 4 bits.
    return array.astype(np.int32) if array.dtype.itemsize == 1 else array


# Comparing with `jnp.int32`, a type, takes a microsecond of each decoded token.
_INT32 = np.dtype(np.int32)


def is_int32(value: Any) -> TypeGuard[jax.Array]:
    """Returns whether a value needs no conversion to int32."""
    return isinstance(value, jax.Array) and value.dtype == _INT32 and not value.weak_type


def as_mask(name: str, value: ArrayLike, is_true: str = "may attend") -> jax.Array:
    """Returns a bool array; `is_true` says in an error what True means."""
    array = as_array(name, value)
    if array.dtype != jnp.bool_:
        raise type_error(name, f"a bool array, True = {is_true}", array.dtype)
    return on_device(array)


def as_floats(name: str, value: ArrayLike) -> jax.Array:
    """Returns a floating jax array of 16 bits or more."""
    array = as_array(name, value)
    if not is_floating(array.dtype):
        raise type_error(name, "a floating dtype of 16 to 64 bits", array.dtype)
    return on_device(array)
