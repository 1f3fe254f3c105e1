"""What a user says on the command line: numbers, files to read, files to write; and what is said of those that will not do."""

import argparse
import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from transformer_embed.pretrained import files as _files


class UserError(Exception):
    """What the user can put right; the message is the one line that says how."""


def at_least_one(text: str) -> int:
    """A number of steps or tokens."""
    return number(text, 1, 10**9)


def seed(text: str) -> int:
    """What a key is made from."""
    return number(text, 0, 2**31 - 1)


def number(text: str, lowest: int, highest: int) -> int:
    """A decimal integer in lowest..highest."""
    if not (text.isascii() and text.isdigit() and len(text) < 12 and lowest <= int(text) <= highest):
        raise argparse.ArgumentTypeError(f"wanted an integer from {lowest} to {highest}, got {text[:20]!r}")
    return int(text)


def distance(text: str) -> int:
    """A number of tokens, or none."""
    return number(text, 0, 10**9)


def contents(path: str, at_most: int = -1) -> bytes:
    """The bytes of a file, which has some."""
    try:
        with open(path, "rb") as file:
            data = file.read(at_most)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}; name a file that exists and that you may read") from error
    if not data:
        raise UserError(f"{path} is empty; name a file that holds something")
    return data


def writable(name: str, *inputs: str | None) -> pathlib.Path:
    """The path, once a file was made beside it and removed: hours of work must not end at a folder that takes no file.

    It is none of the inputs.
    """
    try:
        path = pathlib.Path(os.path.realpath(name))
        if path.exists() and any(_is_same(path, each) for each in inputs):
            raise UserError(f"cannot write {name}: it is also read; name another file")
        if path.exists() and not path.is_file():
            raise UserError(f"cannot write {name}: it is no regular file; name a file")
        with _files.temporary(path):
            pass
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {name}: {reason(error)}; name a file in a folder that exists and that you may write to") from error
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
    """Says of a file that could not be written what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}; make room, or name a file elsewhere") from error


def reason(error: Exception) -> str:
    """What the system said, without its number."""
    return getattr(error, "strerror", None) or str(error)
