"""Errors that name a file's entry."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from transformer_embed._src import arguments


def call_with_named_errors(
    name: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The result of a function; errors become a ValueError that starts with the name."""
    try:
        return function(*args, **kwargs)
    # JSON may nest deeper than Python calls, and has infinities, which no int has.
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{arguments.shown(name)}: {arguments.shown(error)}") from error


def check_mappings(**values: Any) -> None:
    """Raises a TypeError unless each value is a mapping or None."""
    for name, value in values.items():
        arguments.instance(name, value, Mapping | None, "a mapping, or None")


def parse(
    name: Any, text: str | bytes, decode: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """A JSON object, each inner one decoded; a ValueError for any other text."""
    value = call_with_named_errors(f"{name}, as JSON", json.loads, text, object_hook=decode)
    if not isinstance(value, dict):
        raise arguments.value_error(name, "a JSON object", type(value).__name__)
    return value
