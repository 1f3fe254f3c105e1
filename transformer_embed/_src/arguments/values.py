"""Checks Python values, which are known while tracing.

`name` is always the argument that an error names.
"""

import dataclasses
import functools
import math
import numbers
import reprlib
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from transformer_embed._src.arguments.messages import describe, type_error, value_error
from transformer_embed._src.conversions import unwrapped


def set_fields(instance: Any, **values: Any) -> None:
    """Sets fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def convert_fields(instance: Any, **converters: Callable[[str, Any], Any]) -> None:
    """Checks and converts fields of a frozen dataclass, in the `__post_init__` of the dataclass.

    The converter of a field is called as `converter(name, value)`. If a field is None, and
    None is the default, the field is left as it is.
    """
    for field in dataclasses.fields(instance):
        name = field.name
        value = getattr(instance, name)
        is_left_out = value is None and field.default is None
        if name in converters and not is_left_out:
            convert = converters[name]
            converted = convert(name, value)
            set_fields(instance, **{name: converted})


def instance(name: str, value: Any, kinds: Any, want: str) -> Any:
    """Returns a value of one of these types, and raises a TypeError for a value of another type.

    `want` describes the types in the error.
    """
    if not isinstance(value, kinds):
        raise type_error(name, want, describe(value))
    return value


def integer(
    name: str, value: Any, *, at_least: float = -math.inf, at_most: float = math.inf
) -> int:
    """Returns a Python int that is known while tracing, after a check of the bounds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise type_error(name, "a Python int", describe(value))
    # A numpy integer is converted, because it would overflow in sums.
    number = int(value)
    if number < at_least:
        raise value_error(name, f"an int of at least {at_least}", number)
    if number > at_most:
        raise value_error(name, f"an int of at most {at_most}", number)
    return number


# Returns the size of an axis.
size = functools.partial(integer, at_least=1, at_most=2**31 - 1)
# Returns an id or a position. The lowest and the highest int32 are refused, because `as_int32`
# returns them for integers outside int32.
int32 = functools.partial(integer, at_least=-(2**31) + 1, at_most=2**31 - 2)


def length(name: str, value: Any, *, at_most: int = 2**31) -> Any:
    """Returns how many positions 0, 1, ... there are: an int, or a symbolic size of `jax.export`.

    The largest number is 2**31, because the positions are int32.
    """
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
    """Returns a Python float that is known while tracing, after a check of the bounds.

    `want` describes the bounds in the error.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise type_error(name, "a Python number", describe(value))
    # An int is compared as it is, because it may be larger than all floats.
    number = value if isinstance(value, int) else float(value)
    # For NaN, all comparisons are False. So the condition says what is allowed, and NaN is refused.
    if not lowest <= number <= highest:
        raise value_error(name, want, value)
    return float(number)


_TINY = float(np.finfo(np.float32).tiny)
# Programs compute in float32, and compilers multiply by the inverse in place of a division. So both
# the number and the inverse must be normal numbers of float32, because smaller ones become 0.
positive = functools.partial(
    real,
    lowest=_TINY,
    highest=1 / _TINY,
    want=f"a number above 0 that float32 holds, {_TINY:.3g} to {1 / _TINY:.3g}",
)
not_negative = functools.partial(real, lowest=0, want="a finite number of at least 0")
_BELOW_1 = math.nextafter(1, 0)
# Returns a share of a whole, such as the share of one part in a mixture of two.
share = functools.partial(
    real, lowest=math.nextafter(0, 1), highest=_BELOW_1, want="a number above 0 and below 1"
)
# Returns a rate, such as the rate of dropout.
rate = functools.partial(real, lowest=0, highest=_BELOW_1, want="a number in [0, 1)")


def flag(name: str, value: Any) -> bool:
    """Returns a Python bool, after a check that the value is a bool and is not traced."""
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
    """Checks and converts the entries of a sequence, and returns them as a tuple.

    Args:
        name: The argument.
        value: The sequence, or an array with an axis.
        convert: Called as `convert("name[n]", entry, **options)` for entry n.
        count: How many entries there must be. If None, any number.
        form: What is wanted, in words, for the error. If None, it is a sequence of `count` values.
        **options: Further arguments for `convert`.
    """
    is_text = isinstance(value, str | bytes)
    is_scalar_array = getattr(value, "ndim", 1) == 0
    is_sequence = isinstance(value, Sequence | np.ndarray | jax.Array)
    is_as_wanted = is_sequence and not is_text and not is_scalar_array
    if is_as_wanted and count is not None:
        is_as_wanted = len(value) == count
    if not is_as_wanted:
        want = "a sequence" if count is None else f"a sequence of {count} values"
        raise type_error(name, form or want, describe(value))
    return tuple(convert(f"{name}[{n}]", entry, **options) for n, entry in enumerate(value))


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Returns a string, after a check that it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        listed_choices = ", ".join(map(repr, choices))
        raise value_error(name, f"one of {listed_choices}", reprlib.repr(value))
    # A `numpy.str_` is converted, because the type would show in the repr of a config.
    return str(value)


def floating_dtype(name: str, dtype: Any) -> jnp.dtype:
    """Returns a dtype, after a check that the dtype is floating and has 16 to 64 bits."""
    want = "a floating dtype of 16 to 64 bits"
    try:
        converted = jnp.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise type_error(name, want, describe(dtype)) from error
    # `jnp.dtype` converts None to float64, and an array to the dtype of the array.
    is_dtype = dtype is not None and not isinstance(dtype, jax.Array | np.ndarray)
    if not is_dtype or not is_floating(converted):
        raise type_error(name, want, converted)
    return converted


def is_floating(dtype: Any) -> bool:
    """Returns whether a dtype is floating, with 16 to 64 bits."""
    # Floats of 8 and 4 bits are refused, because some of them have no NaN or no zero, which results
    # may need.
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in (2, 4, 8)


def result_dtype(dtype: Any) -> jnp.dtype:
    """Converts a floating dtype of 16 to 64 bits to one that jax can compute in.

    If x64 is off, float64 becomes float32, and jax warns.
    """
    dtype = floating_dtype("dtype", dtype)
    if jax.dtypes.canonicalize_dtype(dtype) == dtype:
        return dtype
    # jax warns when it makes an array of this dtype. To make an array takes longer than all other
    # checks of a call, so none is made for other dtypes.
    return jnp.zeros(0, dtype).dtype


def paths_of(name: Any, paths: Collection[str]) -> list[str]:
    """Returns the paths that a name means: the path itself, or all paths that end in "/name".

    For "embed/w", it returns ["embed/w"] if there is this path, or else such as ["model/embed/w"].
    """
    # A name that is a whole path means only this path, also if a longer path ends in it.
    if name in paths:
        return [name]
    return [path for path in paths if path.endswith(f"/{name}")]


def as_key(rng: Any) -> jax.Array:
    """Returns a single typed key, as `jax.random.key` makes it. An old uint32 key is converted."""
    rng = unwrapped(rng)
    want = "one key of jax.random.key or jax.random.PRNGKey"
    instance("rng", rng, jax.Array | np.ndarray, want)
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        key = rng
    elif rng.dtype == np.uint32:
        key = jax.random.wrap_key_data(rng)
    else:
        # Integers are probably ids, which are the argument next to the key in many calls.
        are_ids = jnp.issubdtype(rng.dtype, jnp.integer)
        advice = " (ids are the argument after rng)" if are_ids else ""
        raise type_error("rng", want, describe(rng) + advice)
    if key.shape != ():
        raise type_error("rng", want, describe(rng))
    return key
