"""Errors that name a file's entry, with values and names cut to a line."""

import json
import reprlib
from collections.abc import Callable
from typing import Any

from transformer_embed._src import arguments

_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 4
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 40, 40, 30


def short_repr(value: Any) -> str:
    """A value's repr, cut to a few dozen characters."""
    return _SHORT.repr(value)[:120]


def shorten(text: str, most: int = 100) -> str:
    """A path or a name for a message; only its end if it is long."""
    return text if len(text) <= most else f"...{text[3 - most :]}"


def call_with_named_errors(
    name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The result of a function; errors become a ValueError that starts with the name."""
    try:
        return function(*args, **kwargs)
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {str(error)[:260]}") from error


def parse(name: str, text: str | bytes) -> dict[str, Any]:
    """A JSON object; a ValueError for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise arguments.value_error(name, "JSON", str(error)[:100]) from error
    if not isinstance(value, dict):
        raise arguments.value_error(name, "a JSON object", type(value).__name__)
    return value
