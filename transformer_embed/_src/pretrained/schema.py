"""Reads JSON as the arguments of a class or a function, and checks each value against the
annotation of its parameter."""

import dataclasses
import inspect
import json
import numbers
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NewType

import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import DTypeLike

KIND = "kind"
# Numbers with a range, as annotations.
Count = NewType("Count", int)
Positive = NewType("Positive", float)
Rate = NewType("Rate", float)
RANGES: Mapping[Any, Callable[[str, Any], Any]] = {
    Count: lambda name, value: arguments.integer(name, value, at_least=1),
    Positive: lambda name, value: arguments.real(name, value, above=0),
    Rate: arguments.rate,
}
# numpy has no array with more axes, and no head has more channels: longer lists are a mistake or an
# attack. (A `Sequence` may be longer: its class compares it with other sizes.)
MOST = {int: 64, float: 4096}
WORDS = {
    bool: "true or false",
    int: "an int",
    float: "a number",
    str: "a string",
    types.NoneType: "null",
}
_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 4
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 40, 40, 30


def _is_scalar(kind: Any, value: Any) -> bool:
    """Whether a JSON value is of a kind of WORDS. An int is a number if a float can hold it."""
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, int) and abs(value) < 2**63
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return kind in WORDS and isinstance(value, kind)


def short_repr(value: Any) -> str:
    """A value's repr, cut to a few dozen characters."""
    return _SHORT.repr(value)[:120]


def shorten(text: str, most: int = 100) -> str:
    """A path or a name for a message; only its end if it is long."""
    return text if len(text) <= most else f"...{text[3 - most :]}"


def parse(name: str, text: str | bytes) -> Any:
    """JSON as Python values; a ValueError for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise arguments.value_error(name, "JSON", str(error)[:100]) from error


def call_with_named_errors(
    name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The result of a function; errors become a ValueError that starts with the name."""
    try:
        return function(*args, **kwargs)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {str(error)[:260]}") from error


def fields(
    name: str,
    function: Callable[..., Any],
    value: Any,
    *,
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """The arguments of a class or a function from a JSON object, each checked against the
    annotation of its parameter."""
    if not isinstance(value, dict):
        raise arguments.value_error(name, "a JSON object", short_repr(value))
    annotations = typing.get_type_hints(function)
    known = dict(inspect.signature(function).parameters)
    for parameter in without:
        del known[parameter]
    if unknown := [key for key in value if key not in known]:
        want = f"entries among {', '.join(known)}"
        raise arguments.value_error(name, want, short_repr(unknown[0]))
    required = [key for key, parameter in known.items() if parameter.default is parameter.empty]
    missing = [key for key in required if key not in value]
    if missing:
        got = f"only {short_repr(sorted(value))}"
        raise arguments.value_error(name, f"an entry {missing[0]}", got)
    return {key: checked(f"{name}: {key}", annotations[key], item) for key, item in value.items()}


def checked(name: str, annotation: Any, value: Any) -> Any:
    """A JSON value converted to its annotation (a number, a string, a tuple, a mapping or a
    dataclass), or a ValueError."""
    if annotation is Any:
        return value
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    kinds: Sequence[Any] = typing.get_args(annotation) if is_union else (annotation,)
    classes = {str(kind.__name__): kind for kind in kinds if dataclasses.is_dataclass(kind)}  # pyright: ignore[reportAttributeAccessIssue]
    for kind in kinds:
        # A dtype is a name in JSON; the class that takes it checks the name.
        scalar = str if kind is DTypeLike else getattr(kind, "__supertype__", kind)
        origin, items = typing.get_origin(kind), typing.get_args(kind)
        if _is_scalar(scalar, value):
            number = float(value) if scalar is float else value
            return RANGES[kind](name, number) if kind in RANGES else number
        if origin in (tuple, Sequence) and isinstance(value, list):
            most = MOST[items[0]] if origin is tuple else len(value)
            if len(value) > most:
                raise arguments.value_error(name, f"at most {most} entries", len(value))
            return tuple(checked(f"{name}[{n}]", items[0], item) for n, item in enumerate(value))
        if origin is Mapping and isinstance(value, dict):
            return {
                key: checked(f"{name}: {short_repr(key)}", items[1], item)
                for key, item in value.items()
            }
    if classes and isinstance(value, dict):
        return _instance(name, classes, value)
    words = " or ".join(dict.fromkeys(map(_kind_in_words, kinds)))
    raise arguments.value_error(name, words, short_repr(value))


def _kind_in_words(kind: Any) -> str:
    if typing.get_origin(kind) in (tuple, Sequence):
        return "a list"
    scalar = str if kind is DTypeLike else getattr(kind, "__supertype__", kind)
    return WORDS.get(scalar, "an object")


def _instance(name: str, classes: Mapping[str, Any], value: dict[str, Any]) -> Any:
    """An instance of one of the classes; the entry `kind` says which if there are several."""
    kind = value.get(KIND) if len(classes) > 1 else next(iter(classes))
    if not isinstance(kind, str) or kind not in classes:
        want = "one of " + ", ".join(classes)
        raise arguments.value_error(f"{name}: {KIND}", want, short_repr(kind))
    entries = {key: item for key, item in value.items() if key != KIND}
    return call_with_named_errors(name, classes[kind], **fields(name, classes[kind], entries))


def to_json(value: Any) -> Any:
    """The value as JSON has it: numbers, strings, lists and objects. A dataclass stores its class
    name."""
    if dataclasses.is_dataclass(value):
        entries = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {KIND: type(value).__name__} | to_json(entries)
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.dtype):
        value = jnp.dtype(value).name
    elif isinstance(value, np.bool_ | np.integer):
        value = value.item()
    elif isinstance(value, numbers.Real | np.floating) and not isinstance(value, int):
        value = float(value)
    if not isinstance(value, bool | int | float | str | None):
        want = "numbers, words and scalings"
        raise arguments.type_error("rotary and bias", want, type(value).__name__)
    return value
