"""Files: paths, JSON, and errors that name what is wrong."""

import errno
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from transformer_embed._src import arguments

NO_FILE = (
    "No such file or directory (for a model's name, pass the folder that "
    "huggingface_hub.snapshot_download(name) returns)"
)


def as_path(value: Any) -> pathlib.Path:
    """Returns a path. A "~" at the beginning is replaced by the user's home."""
    arguments.instance("path", value, str | os.PathLike, "a str or another path")
    text = os.fsdecode(value)
    if "\0" in text:
        raise arguments.value_error("path", "a path without null bytes", repr(text))
    return pathlib.Path(text).expanduser()


def existing_path(value: Any) -> pathlib.Path:
    """Returns the path of a file or a folder that is there."""
    path = as_path(value)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, NO_FILE, str(path))
    return path


def call_with_named_errors(
    name: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a function. If it raises an error, raises a ValueError that starts with `name`.

    `name` says where the arguments came from, such as the path of a file.
    """
    try:
        return function(*args, **kwargs)
    # A RecursionError comes from JSON that nests deeper than Python's calls, and an ArithmeticError
    # from an infinity in JSON, which cannot become an int.
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{arguments.shown(name)}: {arguments.shown(error)}") from error


def check_mappings(**values: Any) -> None:
    """Raises a TypeError if one of the values is neither a mapping nor None."""
    for name, value in values.items():
        arguments.instance(name, value, Mapping | None, "a mapping, or None")


def parse(
    name: Any, text: str | bytes, decode: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """Returns the JSON object that a text holds, or raises a ValueError for any other text.

    Args:
        name: Where the text came from, for errors.
        text: The text.
        decode: A function that replaces each JSON object, the innermost ones first.
    """
    value = call_with_named_errors(f"{name}, as JSON", json.loads, text, object_hook=decode)
    if not isinstance(value, dict):
        raise arguments.value_error(name, "a JSON object", type(value).__name__)
    return value


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or raises a ValueError if the file holds another value."""
    return parse(path, path.read_bytes())


def read_json_if_there(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} if there is no such file."""
    return read_json(path) if path.exists() else {}
