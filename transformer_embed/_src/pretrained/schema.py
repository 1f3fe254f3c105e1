"""Reads JSON into dataclasses, and checks each value against the annotation of its field."""

import dataclasses
import json
import math
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import DTypeLike

KIND = "kind"
# numpy has no array with more axes, and no head has more channels: longer lists are a mistake or an
# attack.
MOST_INTS = 64
MOST_FLOATS = 4096
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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


SCALARS = {
    types.NoneType: lambda value: value is None,
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    int: _is_int,
    float: _is_number,
}


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
        raise ValueError(arguments.wanted(name, "JSON", str(error)[:100])) from error


def from_json(name: str, kind: type, value: Any) -> Any:
    """An instance of a dataclass, from a JSON object with its fields."""
    return call_with_named_errors(name, kind, fields(name, kind, value))


def call_with_named_errors(name: str, kind: type, given: Mapping[str, Any]) -> Any:
    """An instance of a class; errors become a ValueError that starts with the name."""
    try:
        return kind(**given)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {str(error)[:200]}") from error


def fields(name: str, kind: type, value: Any, *, is_partial: bool = False) -> dict[str, Any]:
    """The given of a dataclass from a JSON object, each checked against the annotation of its
    field.

    With `is_partial`, entries without a default may be missing.
    """
    if not isinstance(value, dict):
        raise ValueError(arguments.wanted(name, "a JSON object", short_repr(value)))
    annotations = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := [key for key in value if key not in known]:
        raise ValueError(
            arguments.wanted(name, f"entries among {', '.join(known)}", short_repr(unknown[0]))
        )
    missing = [key for key, field in known.items() if key not in value and is_required(field)]
    if missing and not is_partial:
        raise ValueError(
            arguments.wanted(name, f"an entry {missing[0]}", f"only {short_repr(sorted(value))}")
        )
    return {key: checked(f"{name}: {key}", annotations[key], each) for key, each in value.items()}


def is_required(field: dataclasses.Field) -> bool:
    """Whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def checked(name: str, annotation: Any, value: Any) -> Any:
    """A JSON value converted to its annotation (a number, a string, a tuple, a mapping or a
    dataclass), or a ValueError."""
    if annotation is Any:
        return value
    # A dtype is a name in JSON; the class that takes it checks the name.
    options = [str if option is DTypeLike else option for option in _options(annotation)]
    for option in options:
        if option in SCALARS and SCALARS[option](value):
            return float(value) if option is float else value
        given = typing.get_args(option)
        if typing.get_origin(option) in (tuple, Sequence) and isinstance(value, list):
            return _tuple(name, given[0], value)
        if typing.get_origin(option) is Mapping and isinstance(value, dict):
            return {
                key: checked(f"{name}: {short_repr(key)}", given[1], each)
                for key, each in value.items()
            }
    classes = {option.__name__: option for option in options if dataclasses.is_dataclass(option)}
    if classes and isinstance(value, dict):
        return _instance(name, classes, value)
    raise ValueError(
        arguments.wanted(
            name,
            " or ".join(dict.fromkeys(_type_in_words(option) for option in options)),
            short_repr(value),
        )
    )


def _options(annotation: Any) -> list[Any]:
    """The types of a union."""
    return (
        list(typing.get_args(annotation))
        if typing.get_origin(annotation) in (types.UnionType, typing.Union)
        else [annotation]
    )


def _tuple(name: str, item: Any, values: list[Any]) -> tuple[Any, ...]:
    most = MOST_INTS if item is int else MOST_FLOATS
    if len(values) > most:
        raise ValueError(arguments.wanted(name, f"at most {most} entries", len(values)))
    return tuple(checked(f"{name}[{n}]", item, value) for n, value in enumerate(values))


def _instance(name: str, classes: Mapping[str, type], value: dict[str, Any]) -> Any:
    kind = value.get(KIND) if len(classes) > 1 else next(iter(classes))
    if not isinstance(kind, str) or kind not in classes:
        raise ValueError(
            arguments.wanted(f"{name}: {KIND}", "one of " + ", ".join(classes), short_repr(kind))
        )
    return from_json(name, classes[kind], {key: each for key, each in value.items() if key != KIND})


def _type_in_words(option: Any) -> str:
    if typing.get_origin(option) in (tuple, Sequence):
        return "a list"
    return WORDS.get(option, "an object")


def to_json(value: Any) -> str:
    """JSON of a dataclass, or of mappings of numbers, strings, tuples and dataclasses. An inner
    dataclass stores its class name."""
    plain = (
        {key: each for key, each in _plain(value).items() if key != KIND}
        if dataclasses.is_dataclass(value)
        else _plain(value)
    )
    return json.dumps(plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        each = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {KIND: type(value).__name__} | {name: _plain(each[name]) for name in each}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype):
        return jnp.dtype(value).name
    if not isinstance(value, bool | int | float | str | None):
        raise TypeError(
            arguments.wanted("rotary and bias", "numbers, words and scalings", type(value).__name__)
        )
    return value
