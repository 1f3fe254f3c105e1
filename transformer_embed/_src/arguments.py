"""Checks of arguments, one function for each kind.

An error names the argument, what was wanted and what was passed. A function called `as_...`
converts to an array, `check_...` only raises, and all others return a Python value that is known
while tracing.
"""

import dataclasses
import functools
import math
import numbers
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import export

from transformer_embed._src.array_types import ArrayLike

# Letters of a name, of what was wanted and of what was passed.
LONGEST = 800


def shown(value: Any) -> str:
    """A text of others for a terminal, without its middle if it is long.

    A control code in a name of a file could clear the screen, or forge a line of output.
    """
    text, half = str(value), LONGEST // 2
    if len(text) > LONGEST:
        text = f"{text[:half]}...{text[-half:]}"
    return text if text.isprintable() else repr(text)[1:-1]


def wanted(name: Any, want: str, got: Any) -> str:
    """The message of every error of this package."""
    return f"{shown(name)}: wanted {shown(want)}, got {shown(got)}"


def value_error(name: Any, want: str, got: Any) -> ValueError:
    """An error for a value that is out of range or does not fit the others."""
    return ValueError(wanted(name, want, got))


def type_error(name: str, want: str, got: Any) -> TypeError:
    """An error for a value of another type or dtype."""
    return TypeError(wanted(name, want, got))


def set_fields(instance: Any, **values: Any) -> None:
    """Sets fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def convert_fields(instance: Any, **converters: Callable[[str, Any], Any]) -> None:
    """Converts fields of a frozen dataclass in its `__post_init__`.

    None stays where it is the default.
    """
    for field in dataclasses.fields(instance):
        name, value = field.name, getattr(instance, field.name)
        is_left_out = value is None and field.default is None
        if name in converters and not is_left_out:
            set_fields(instance, **{name: converters[name](name, value)})


def instance(name: str, value: Any, kinds: Any, want: str) -> Any:
    """A value of one of these types."""
    if not isinstance(value, kinds):
        raise type_error(name, want, describe(value))
    return value


def integer(
    name: str, value: Any, *, at_least: float = -math.inf, at_most: float = math.inf
) -> int:
    """A Python int that is known while tracing."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise type_error(name, "a Python int", describe(value))
    # A numpy integer would wrap in sums.
    value = int(value)
    if value < at_least:
        raise value_error(name, f"an int of at least {at_least}", value)
    if value > at_most:
        raise value_error(name, f"an int of at most {at_most}", value)
    return value


# The size of an axis.
size = functools.partial(integer, at_least=1, at_most=2**31 - 1)
# An id or a position; `as_int32` gives the two ends of int32 to values outside too.
int32 = functools.partial(integer, at_least=-(2**31) + 1, at_most=2**31 - 2)


def length(name: str, value: Any, *, at_most: int = 2**31) -> Any:
    """A number of int32 positions 0, 1, ..., or a symbolic dimension of jax.export."""
    if export.is_symbolic_dim(value):
        return value
    return integer(name, value, at_least=0, at_most=at_most)


def real(
    name: str,
    value: Any,
    *,
    lowest: float = -sys.float_info.max,
    highest: float = sys.float_info.max,
    want: str = "a finite number",
) -> float:
    """A Python float that is known while tracing, inside bounds that `want` describes."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise type_error(name, "a Python number", describe(value))
    # An int may be larger than all floats.
    number = value if isinstance(value, int) else float(value)
    # Not what is outside, for NaN is neither.
    if not lowest <= number <= highest:
        raise value_error(name, want, value)
    return float(number)


_TINY = float(np.finfo(np.float32).tiny)
# Programs compute in float32, and compilers multiply by the inverse of a divisor: both must be
# normal numbers there, for others are flushed to 0.
positive = functools.partial(
    real,
    lowest=_TINY,
    highest=1 / _TINY,
    want=f"a number above 0 that float32 holds, {_TINY:.3g} to {1 / _TINY:.3g}",
)
not_negative = functools.partial(real, lowest=0, want="a finite number of at least 0")
_BELOW_1 = math.nextafter(1, 0)
part = functools.partial(
    real, lowest=math.nextafter(0, 1), highest=_BELOW_1, want="a number above 0 and below 1"
)
rate = functools.partial(real, lowest=0, highest=_BELOW_1, want="a number in [0, 1)")


def flag(name: str, value: Any) -> bool:
    """A Python bool, known while tracing."""
    want = "a Python bool (bound by functools.partial, or static under jit)"
    return bool(instance(name, value, bool | np.bool_, want))


def entries(
    name: str,
    value: Any,
    convert: Callable,
    *,
    count: int | None = None,
    form: str | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Several values in order, each converted by `convert(its name, it, ...)`."""
    is_sequence = isinstance(value, Sequence | np.ndarray | jax.Array)
    is_sequence &= not isinstance(value, str | bytes) and getattr(value, "ndim", 1) > 0
    if not is_sequence or count not in (None, len(value)):
        want = "a sequence" if count is None else f"a sequence of {count} values"
        raise type_error(name, form or want, describe(value))
    return tuple(convert(f"{name}[{n}]", entry, **options) for n, entry in enumerate(value))


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise value_error(name, f"one of {', '.join(map(repr, choices))}", reprlib.repr(value))
    # numpy's str_ would show in the repr of a config.
    return str(value)


def floating_dtype(name: str, dtype: Any) -> jnp.dtype:
    """A floating dtype of 16 to 64 bits."""
    want = "a floating dtype of 16 to 64 bits"
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise type_error(name, want, describe(dtype)) from error
    # numpy takes None for float64, and an array for its dtype.
    if dtype is None or isinstance(dtype, jax.Array | np.ndarray) or not _is_floating(found):
        raise type_error(name, want, found)
    return found


def _is_floating(dtype: Any) -> bool:
    # Floats of 8 and 4 bits lack the NaN or the zero that results may need.
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in (2, 4, 8)


def result_dtype(dtype: Any) -> jnp.dtype:
    """A `floating_dtype` that jax has: with x64 off, float64 becomes float32 with jax's warning."""
    dtype = floating_dtype("dtype", dtype)
    # An array is made only where jax would warn: it takes longer than all other checks of a call.
    return dtype if jax.dtypes.canonicalize_dtype(dtype) == dtype else jnp.zeros(0, dtype).dtype


def compute_dtype(*dtypes: Any) -> jnp.dtype:
    """The dtype to compute in: float32, or float64 if one of the dtypes is."""
    # jnp.promote_types raises under strict promotion.
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def widened(array: Any) -> Any:
    """An array in the dtype to compute in."""
    return array.astype(compute_dtype(array.dtype))


def is_traced(value: Any) -> bool:
    """Whether a value is known only when the compiled program runs."""
    return isinstance(value, jax.core.Tracer)


def check_known(name: str, array: Any) -> None:
    """A TypeError for a traced array, where its values are read."""
    if is_traced(array):
        raise type_error(name, "values on the host, outside of jit", describe(array))


def on_host(name: str, array: jax.Array | np.ndarray) -> np.ndarray:
    """The values of an array that is not traced."""
    check_known(name, array)
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        # jax's error would not name the argument.
        want = "values that this process has (each checks its own part of a batch)"
        raise value_error(name, want, "an array of several processes")
    return jax.device_get(array)


def as_array(name: str, value: ArrayLike | Sequence[Any]) -> jax.Array | np.ndarray:
    """A jax array as it is; anything else as an array of numpy of its own width.

    The numpy array is always a copy, since jax may share its memory and read it after the caller
    has changed it. It is in the byte order of this machine, because jax reads the bytes of another
    one as they are at shapes that it has seen.
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


def _has_mask(value: Any) -> bool:
    """Returns whether a value is a masked array, or a list or other sequence that holds one."""
    if isinstance(value, np.ndarray):
        return isinstance(value, np.ma.MaskedArray)
    kind = type(value)
    is_sequence = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    if not is_sequence or isinstance(value, str | bytes | jax.Array | Mapping):
        return False
    # The types are compared first, because a list may have a million numbers.
    has_numbers_alone = {*map(type, value)} <= {bool, int, float}
    return not has_numbers_alone and any(map(_has_mask, value))


def native_leaves(name: str, tree: Any) -> Any:
    """Returns a tree of parameters whose numpy arrays jit reads right.

    jit drops the mask of a masked array, and reads the bytes of another byte order as they are at
    shapes that it has seen. The other leaves stay as they are.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if not any(isinstance(leaf, np.ndarray) for leaf in leaves):
        return tree
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


def unwrapped(value: Any) -> Any:
    """What a wrapper such as Flax's nnx.Param holds; anything else as it is."""
    if isinstance(value, jax.Array) or not hasattr(type(value), "__jax_array__"):
        return value
    return value.__jax_array__()


def on_device(array: Any) -> jax.Array:
    """A jax array. One that is given stays as it is: `jnp.asarray` would take ten microseconds."""
    return array if isinstance(array, jax.Array) else jnp.asarray(array)


def as_integers(
    name: str,
    value: ArrayLike,
    lowest: int = -(2**31),
    highest: int = 2**31 - 1,
    what: str = "int32",
) -> jax.Array | np.ndarray:
    """Integers as int32, but a wider jax array as it is; those on the host are inside the range.

    A ValueError names the first one outside, and its index.
    """
    if is_int32(value):
        return value
    array = _integers(name, value)
    if isinstance(array, jax.Array):
        return array.astype(np.int32) if np.can_cast(array.dtype, np.int32) else array
    is_outside = (array < lowest) | (array > highest)
    if is_outside.any():
        index = np.argwhere(is_outside)[0].tolist()
        want = f"integers inside {what}, {lowest}..{highest}"
        raise value_error(name, want, f"{array[tuple(index)]} at index {index}")
    return array.astype(np.int32)


def as_int32(name: str, value: ArrayLike) -> jax.Array:
    """Integers as int32. Those outside become its lowest or highest value; they never wrap."""
    if is_int32(value):
        return value
    array = _integers(name, value)
    if not np.can_cast(array.dtype, np.int32):
        # Neither end may be outside the array's own dtype.
        lowest, highest = map(
            array.dtype.type, (max(jnp.iinfo(array.dtype).min, -(2**31)), 2**31 - 1)
        )
        if isinstance(array, jax.Array):
            # By name, for users may forbid jax to move numbers to a device by itself.
            lowest, highest = jax.device_put((lowest, highest))
        array = array.clip(lowest, highest)
    # A weak int32 too: it would be traced again.
    return jnp.asarray(array, jnp.int32)


def as_indices(name: str, value: ArrayLike, highest: int, what: str, *axes: str) -> jax.Array:
    """Integers with these axes, as int32; those on the host are inside 0..highest.

    A symbolic `highest` of jax.export is assumed to be high enough.
    """
    highest = min(highest, 2**31 - 1) if isinstance(highest, int) else 2**31 - 1
    array = as_int32(name, as_integers(name, value, 0, highest, what))
    check_shape(name, array.shape, array.ndim == len(axes), f"[{', '.join(axes)}]")
    return array


def _integers(name: str, value: ArrayLike) -> jax.Array | np.ndarray:
    """Integers of any width."""
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
    """Whether a value needs no conversion to int32."""
    return isinstance(value, jax.Array) and value.dtype == _INT32 and not value.weak_type


def describe(value: Any) -> str:
    if value is None:
        return "None"
    if is_traced(value):
        return f"a traced {value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def as_mask(name: str, value: ArrayLike, is_true: str = "may attend") -> jax.Array:
    """A bool array."""
    array = as_array(name, value)
    if array.dtype != jnp.bool_:
        raise type_error(name, f"a bool array, True = {is_true}", array.dtype)
    return on_device(array)


def as_floats(name: str, value: ArrayLike) -> jax.Array:
    """A floating jax array of 16 bits or more."""
    array = as_array(name, value)
    if not _is_floating(array.dtype):
        raise type_error(name, "a floating dtype of 16 to 64 bits", array.dtype)
    return on_device(array)


def check_broadcasts(
    name: str,
    shape: tuple[int, ...],
    target: tuple[int, ...],
    other: str = "the ids",
    *,
    with_length: bool = False,
) -> None:
    """A ValueError unless a shape broadcasts to the target, and has the same last axis, if any."""
    try:
        fits = jnp.broadcast_shapes(shape, target) == target
    except ValueError:
        fits = False
    want = f"that broadcasts to that of {other}, {list(target)}"
    if with_length and target:
        want += ", with its last axis"
        fits &= shape[-1:] == target[-1:]
    check_shape(name, shape, fits, want)


def check_shape(name: str, shape: tuple[int, ...], is_right: bool, want: str) -> None:
    """A ValueError that shows a shape, unless it is right."""
    if not is_right:
        raise value_error(name, f"shape {want}", f"shape {list(shape)}")


def check_left_out(name: str, value: Any, why: str) -> None:
    """A ValueError if an argument is given."""
    if value is not None:
        raise value_error(name, f"None, since {why}", describe(value))


def check_same(name: str, what: str, size: Any, expected: Any) -> None:
    """A ValueError unless two sizes are equal."""
    if size != expected:
        raise value_error(name, f"{what}, {expected}", size)


def paths_of(name: Any, paths: Collection[str]) -> list[str]:
    """The path of a parameter by its name, which may leave out how the path begins.

    Several, if it is the end of several.
    """
    # A whole path goes first: it may also be the end of a longer one.
    return [name] if name in paths else [path for path in paths if path.endswith(f"/{name}")]


def as_key(rng: Any) -> jax.Array:
    """Returns one typed key, made from a typed key or a raw one."""
    rng = unwrapped(rng)
    want = "one key of jax.random.key or jax.random.PRNGKey"
    instance("rng", rng, jax.Array | np.ndarray, want)
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        key = rng
    elif rng.dtype == np.uint32:
        key = jax.random.wrap_key_data(rng)
    else:
        # Integers are probably ids, since a key and ids stand side by side in many calls.
        ids = " (ids are the argument after rng)" if jnp.issubdtype(rng.dtype, jnp.integer) else ""
        raise type_error("rng", want, describe(rng) + ids)
    if key.shape != ():
        raise type_error("rng", want, describe(rng))
    return key
