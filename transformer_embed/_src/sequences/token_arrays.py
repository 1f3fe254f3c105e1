"""Converts and checks the arrays of tokens: positions, segment ids and the like.

All of them are signed integers, [length] or [batch, length]. Arrays [length] are used for every
batch row, so a batch of 1 fits any other.
"""

from typing import Any

from jax import export
from jaxtyping import Array, Integer

from transformer_embed._src import arguments, conversions
from transformer_embed._src.array_types import ArrayLike


def as_segment_ids(name: str, value: ArrayLike) -> Any:
    """Converts segment ids to int32, or raises a ValueError if one on the host is negative.

    The message says that 0 is padding, because some loaders number documents from 0 and mark
    padding by -1.
    """
    return arguments.as_integers(name, value, lowest=0, what="int32, where 0 is padding")


def checked_segment_ids(value: ArrayLike) -> Any:
    """Converts segment ids to int32, or keeps a wider jax array. An array on the host stays there.

    Raises:
        TypeError: The segment ids are not integers. If they are bools, the message names the
            constructor that takes a bool mask.
        ValueError: A segment id on the host is negative or outside int32.
    """
    if arguments.is_int32(value):
        return value
    array = arguments.as_array("segment_ids", value)
    if array.dtype == bool:
        want = (
            "integers, a number for each sequence (te.TokenPositions.from_mask takes a bool mask)"
        )
        raise arguments.type_error("segment_ids", want, array.dtype)
    # numpy makes an empty list an array of floats, which would be refused. So the list itself is
    # passed on.
    integers = value if array.size == 0 else array
    # This converts to int32, and refuses negative numbers.
    return as_segment_ids("segment_ids", integers)


def as_comparable(name: str, value: ArrayLike) -> Integer[Array, "..."]:
    """Converts positions, segment ids and the like to int32.

    A jax array of a wider signed dtype stays as it is, because numbers that are clamped or wrapped
    to int32 would compare wrongly.
    """
    if name == "segment_ids":
        integers = checked_segment_ids(value)
    else:
        integers = arguments.as_integers(name, value)
    return as_signed(name, integers)


def as_signed(name: str, integers: Any) -> Integer[Array, "..."]:
    """Puts integers on a device, or raises a TypeError if they are unsigned.

    `arguments.as_integers` leaves only those integers unsigned that int32 may not hold.
    """
    if integers.dtype.kind != "i":
        raise arguments.type_error(name, "a signed integer dtype", integers.dtype)
    return conversions.on_device(integers)


def as_batch(name: str, array: Any) -> Any:
    """Returns an array [length] or [batch, length] as [1 or batch, length]."""
    has_valid_rank = array.ndim in (1, 2)
    arguments.check_shape(name, array.shape, has_valid_rank, "[length] or [batch, length]")
    return array if array.ndim == 2 else array[None]


def comparable_arrays(**values: ArrayLike) -> dict[str, Integer[Array, "*b t"]]:
    """Converts positions, segment ids and the like to int32 arrays with the same number of axes.

    Each array is converted by `as_comparable`, which keeps wider dtypes. If all arrays are
    [length], the results are [length], too. Otherwise all results are [1 or batch, length].
    """
    arrays = {name: as_comparable(name, value) for name, value in values.items()}
    has_no_batch = all(array.ndim == 1 for array in arrays.values())
    # `as_batch` below would add a batch axis, which would have to be dropped again. Outside of jit,
    # this would take half a millisecond.
    if has_no_batch:
        return arrays
    batches = {name: as_batch(name, array) for name, array in arrays.items()}
    batch_sizes = {name: array.shape[0] for name, array in batches.items()}
    check_batch_sizes(batch_sizes)
    return batches


def check_batch_sizes(sizes: dict[str, Any]) -> None:
    """Raises a ValueError unless all numbers of batch rows are the same, or 1.

    `sizes` has the number of batch rows of each argument, by the argument's name.
    """
    different_sizes = {*sizes.values()} - {1}
    if len(different_sizes) > 1:
        want = "the same number of rows, or 1"
        got = " and ".join(map(str, sizes.values()))
        raise arguments.value_error(" and ".join(sizes), want, got)


def check_last_position(name: str, first: int, length: Any) -> None:
    """Raises a ValueError if positions first, first + 1, ... would leave int32."""
    # A symbolic length is assumed to be small enough.
    if not export.is_symbolic_dim(length) and first + length > 2**31:
        want = f"an int of at most {2**31 - length}, for {length} positions inside int32"
        raise arguments.value_error(name, want, first)
