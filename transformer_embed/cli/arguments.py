"""Arguments of the commands: numbers, files to read, files to write, and the error for invalid
ones."""

import argparse
import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from transformer_embed._src.pretrained import files as _files


class UserError(Exception):
    """A mistake that the user can correct; the message is one line and says how."""


def at_least_one(text: str) -> int:
    """A number of steps or tokens."""
    return number(text, 1, 10**9)


def seed(text: str) -> int:
    """The seed of a key."""
    return number(text, 0, 2**31 - 1)


def number(text: str, lowest: int, highest: int) -> int:
    """A decimal integer in lowest..highest."""
    if not (
        text.isascii() and text.isdigit() and len(text) < 12 and lowest <= int(text) <= highest
    ):
        raise argparse.ArgumentTypeError(
            f"wanted an integer from {lowest} to {highest}, got {text[:20]!r}"
        )
    return int(text)


def real(text: str, lowest: float, highest: float) -> float:
    """A number in lowest..highest."""
    with contextlib.suppress(ValueError):
        if lowest <= float(text) <= highest:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"wanted a number from {lowest} to {highest}, got {text[:20]!r}"
    )


def distance(text: str) -> int:
    """A number of tokens, from 0."""
    return number(text, 0, 10**9)


def contents(path: str) -> bytes:
    """The bytes of a file that is not empty."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path}: {reason(error)}; name a file that exists and that you may read"
        ) from error
    if not data:
        raise UserError(f"{path} is empty; name a file that holds something")
    return data


def writable(name: str, suffixes: Sequence[str], *inputs: str | None) -> pathlib.Path:
    """The path of a file to write, after checking its suffix, that it is not one of the inputs, and
    that its folder is writable.

    A temporary file tests the folder, so that hours of work are not lost because the result cannot
    be written.
    """
    if pathlib.Path(name).suffix.lower() not in suffixes:
        raise UserError(f"--out: wanted a name that ends in {', '.join(suffixes)}, got {name!r}")
    try:
        path = pathlib.Path(os.path.realpath(name))
        if path.exists() and any(_is_same(path, each) for each in inputs):
            raise UserError(f"cannot write {name}: it is also read; name another file")
        if path.exists() and not path.is_file():
            raise UserError(f"cannot write {name}: it is not a regular file; name a file")
        with _files.temporary(path):
            pass
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot write {name}: {reason(error)}; name a file in a folder that exists and that "
            f"you may write to"
        ) from error
    return path


def _is_same(path: pathlib.Path, other: str | None) -> bool:
    try:
        return other is not None and path.samefile(other)
    except (OSError, ValueError):
        return False


def write_whole(path: pathlib.Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file whole or not at all."""
    with writing(path):
        _files.write_whole(path, write)


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError of writing into a message that says what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {reason(error)}; free some space, or name a file elsewhere"
        ) from error


def reason(error: Exception) -> str:
    """The system's message, without its number."""
    return getattr(error, "strerror", None) or str(error)
