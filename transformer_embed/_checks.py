"""One function a kind of bad argument: each error names the argument, what was wanted and what came."""

import math
import numbers
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import ArrayLike

SCALAR_HINT = "; add jnp.arange(length) to a scalar offset; jax.vmap maps keyword arguments over axis 0: bind them with functools.partial"


def wanted(name: str, want: str, got: Any) -> str:
    """The message of every error of this package."""
    return f"{name}: wanted {want}, got {got}"


def integer(name: str, value: Any, *, at_least: int, at_most: int | None = None) -> int:
    """A Python int, known while tracing."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(wanted(name, "a Python int", _describe(value)))
    value = int(value)
    if value < at_least:
        raise ValueError(wanted(name, f"an int of at least {at_least}", value))
    if at_most is not None and value > at_most:
        raise ValueError(wanted(name, f"an int of at most {at_most}", value))
    return value


def length(name: str, value: Any) -> Any:
    """A number of positions, known while tracing, or a symbolic dimension of jax.export."""
    return value if export.is_symbolic_dim(value) else integer(name, value, at_least=0)


def real(name: str, value: Any, *, above: float = -math.inf) -> float:
    """A finite Python float, known while tracing."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | np.floating):
        raise TypeError(wanted(name, "a Python number", _describe(value)))
    if not math.isfinite(value) or value <= above:
        raise ValueError(wanted(name, f"a finite number above {above:g}" if above > -math.inf else "a finite number", value))
    return float(value)


def flag(name: str, value: Any) -> bool:
    """A Python bool: a traced one would make two programs into one."""
    if not isinstance(value, bool | np.bool_):
        hint = " known while tracing (bind it with functools.partial, or make it a static argument of jit)" if is_traced(value) else ""
        raise TypeError(wanted(name, f"a Python bool{hint}", _describe(value)))
    return bool(value)


def sequence(name: str, value: Any) -> tuple[Any, ...]:
    """A few values in order."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(wanted(name, "a sequence", _describe(value)))
    return tuple(value)


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(wanted(name, "one of " + ", ".join(map(repr, choices)), reprlib.repr(value)))
    return value


def floating_dtype(name: str, dtype: Any) -> jnp.dtype:
    """A dtype with a fraction."""
    try:
        dtype = jnp.dtype("" if dtype is None else dtype)
    except TypeError as error:
        raise TypeError(wanted(name, "a floating dtype of 16 bits or more", _describe(dtype))) from error
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise TypeError(wanted(name, "a floating dtype of 16 bits or more", dtype))
    return dtype


def is_traced(value: Any) -> bool:
    """Whether a value is known only when the compiled program runs."""
    return isinstance(value, jax.core.Tracer)


def as_array(name: str, value: ArrayLike | Sequence[Any]) -> jax.Array | np.ndarray:
    """What is a jax array stays one; anything else becomes a numpy array, with the width it came in."""
    if isinstance(value, jax.Array):
        return value
    try:
        array = np.asarray(value)
    except jax.errors.TracerArrayConversionError as error:
        raise TypeError(
            wanted(name, "one array (to jit, a list is many scalars: make it an array first)", "a list of traced values")
        ) from error
    except ValueError as error:
        raise ValueError(wanted(name, "an array, or nested lists of equal lengths", "lists of unequal lengths")) from error
    if array.dtype.kind in "OSUMm":
        raise TypeError(wanted(name, "an array of numbers of at most 64 bits", _describe(value)))
    return array


def as_positions(name: str, value: ArrayLike) -> jax.Array | np.ndarray:
    """Integers of any width, or floats that hold every integer below 2**24."""
    array = as_array(name, value)
    if isinstance(array, np.ndarray) and array.dtype == np.float64:
        return _as_float32(name, array)
    if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype in (jnp.float32, jnp.float64):
        return array
    raise TypeError(wanted(name, "an integer dtype, or float32 (16-bit floats skip integers)", array.dtype))


def _as_float32(name: str, array: np.ndarray) -> np.ndarray:
    """Host floats as float32; a ValueError names the first that would become another integer."""
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    moved = np.isfinite(array) & (np.abs(array) >= 2**24) & (narrow != array)
    if moved.any():
        raise ValueError(wanted(name, "floats that float32 holds (pass large positions as integers)", array[moved][0]))
    return narrow


def as_integers(name: str, value: ArrayLike) -> jax.Array | np.ndarray:
    """Integers of any width; an empty list, which numpy takes for floats, is one of integers."""
    array = as_array(name, value)
    if array.size == 0 and isinstance(value, list | tuple):
        return array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(wanted(name, "an integer dtype", array.dtype))
    return array


def as_int32(name: str, value: ArrayLike) -> jax.Array:
    """Integers of any width as int32; what is outside int32 becomes its nearest end, never a wrapped value."""
    array = as_integers(name, value)
    if isinstance(array, jax.Array) and array.dtype == jnp.int32 and not array.weak_type:
        return array
    if array.dtype == jnp.int32 or array.dtype.itemsize < 4:
        return jnp.asarray(array, jnp.int32)
    library = np if isinstance(array, np.ndarray) else jnp
    info = jnp.iinfo(jnp.int32)
    lowest = info.min if jnp.issubdtype(array.dtype, jnp.signedinteger) else 0
    return jnp.asarray(library.clip(array, np.array(lowest, array.dtype), np.array(info.max, array.dtype)).astype(np.int32))


def as_fitting_int32(name: str, value: ArrayLike) -> jax.Array:
    """As `as_int32`, but a ValueError names the first that int32 does not hold, where values are known."""
    array = as_integers(name, value)
    if array.dtype.itemsize >= 4 and array.dtype != jnp.int32 and not is_traced(array):
        return jnp.asarray(fits_int32(name, np.asarray(array)))
    return as_int32(name, array)


def last_position_fits(name: str, first: int, length: int) -> None:
    """A ValueError where positions from the first on would run past int32; a symbolic length is taken to be small enough."""
    if not export.is_symbolic_dim(length) and first + length > 2**31:
        raise ValueError(wanted(name, f"an int of at most {2**31 - length}, for {length} positions inside int32", first))


def _describe(value: Any) -> str:
    if is_traced(value):
        return f"a traced {value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def int32(name: str, value: Any) -> int:
    """A Python int inside int32, and not its highest value, which stands for all that lies beyond it."""
    value = integer(name, value, at_least=-(2**31) + 1)
    if value >= 2**31 - 1:
        raise ValueError(wanted(name, "an int below 2**31 - 1", value))
    return value


def as_mask(name: str, value: ArrayLike, is_true: str = "may attend") -> jax.Array:
    """A bool array."""
    array = as_array(name, value)
    if array.dtype != jnp.bool_:
        raise TypeError(wanted(name, f"a bool array, True = {is_true}", array.dtype))
    return jnp.asarray(array)


def broadcastable(name: str, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    """The shape that all broadcast to."""
    try:
        return jnp.broadcast_shapes(*shapes)
    except ValueError as error:
        raise ValueError(wanted(name, "shapes that broadcast", " and ".join(str(list(shape)) for shape in shapes))) from error


def as_ordered(name: str, value: ArrayLike) -> jax.Array:
    """Signed integers, to compare with others: what does not fit is refused, for clamped or wrapped values would compare wrongly."""
    array = as_integers(name, value)
    if isinstance(array, np.ndarray):
        return jnp.asarray(fits_int32(name, array))
    if array.dtype.itemsize < 4:
        return array.astype(jnp.int32)
    if not jnp.issubdtype(array.dtype, jnp.signedinteger):
        raise TypeError(wanted(name, "a signed integer dtype", array.dtype))
    return array


def fits_int32(name: str, array: np.ndarray) -> np.ndarray:
    """Host integers as int32; a ValueError names the first that does not fit."""
    info = np.iinfo(np.int32)
    inside(name, array, info.min, info.max, "int32")
    return array.astype(np.int32)


def inside(name: str, array: np.ndarray, lowest: int, highest: int, what: str) -> None:
    """A ValueError names the first host integer outside lowest..highest, and its index."""
    outside = np.argwhere((array < lowest) | (array > highest))
    if len(outside):
        index = tuple(int(i) for i in outside[0])
        place = f" at index {list(index)}" if index else ""
        raise ValueError(wanted(name, f"integers inside {what}, {lowest}..{highest}", f"{int(array[index])}{place}"))


def as_floats(name: str, value: ArrayLike) -> jax.Array:
    """A floating jax array."""
    array = as_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(wanted(name, "a floating dtype", array.dtype))
    return jnp.asarray(array)


def rate(name: str, value: Any) -> int | float | np.floating:
    """A probability of dropping, in [0, 1), known while tracing; a numpy scalar keeps its width."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        raise TypeError(wanted(name, "a Python float known while tracing", _describe(value)))
    if not 0 <= value < 1:
        raise ValueError(wanted(name, "a number in [0, 1)", value))
    return value


def broadcasts_to(name: str, shape: tuple[int, ...], other: str, target: tuple[int, ...]) -> None:
    """A shape that adds nothing to the target's."""
    if broadcastable(f"{name} and {other}", shape, target) != target:
        raise ValueError(wanted(name, f"a shape that broadcasts to that of {other}, {list(target)}", f"shape {list(shape)}"))


def ends_in_length(name: str, shape: tuple[int, ...], target: tuple[int, ...], other: str = "the ids") -> None:
    """A shape that broadcasts to the target's and has its last axis."""
    if not shape or shape[-1] != target[-1]:
        hint = SCALAR_HINT if not shape else ""
        raise ValueError(wanted(name, f"a last axis of {other}' length, {target[-1]}", f"shape {list(shape)}{hint}"))
    broadcasts_to(name, shape, other, target)


def unwanted(name: str, value: Any, why: str) -> None:
    """An argument that must be left out."""
    if value is not None:
        raise ValueError(wanted(name, f"None, since {why}", _describe(value)))


def same(name: str, what: str, got: int, want: int) -> None:
    """Two sizes that must agree."""
    if got != want:
        raise ValueError(wanted(name, f"{what}, {want}", got))


def rows(name: str, array: Any) -> Any:
    """[length] or [batch, length], as [1 or batch, length]."""
    if array.ndim not in (1, 2):
        raise ValueError(wanted(name, "shape [length] or [batch, length]", f"shape {list(array.shape)}"))
    return array if array.ndim == 2 else array[None]


def as_key(name: str, rng: Any) -> jax.Array:
    """One typed key, from a typed or a raw one."""
    want = "one key of jax.random.key or jax.random.PRNGKey"
    try:
        key = rng if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(wanted(name, want, _describe(rng))) from error
    if key.shape != ():
        raise TypeError(wanted(name, want, f"keys of shape {list(key.shape)}"))
    return key


def params(value: Any, argument: str = "params") -> None:
    """A Haiku parameter tree."""
    if not isinstance(value, Mapping) or not all(isinstance(module, Mapping) for module in value.values()):
        got = "a dict of others" if isinstance(value, Mapping) else type(value).__name__
        raise TypeError(wanted(argument, "a Haiku parameter tree, a dict of dicts", got))
    for path, module in value.items():
        for leaf_name, leaf in module.items():
            if not hasattr(leaf, "shape"):
                raise TypeError(wanted(f"{argument}: {path}/{leaf_name}", "an array (use jnp.asarray)", _describe(leaf)))


def name(argument: str, value: Any) -> str | None:
    """The name of a module; Haiku refuses the strings that are not identifiers."""
    if value is not None and not isinstance(value, str):
        raise TypeError(wanted(argument, "a string or None", _describe(value)))
    return value
