"""Arguments of the commands: numbers, files to read and to write, errors for invalid ones."""

import argparse
import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from transformer_embed._src.pretrained import files as _files


class UserError(Exception):
    """A mistake that the user can correct; the message is one line and says how."""


def number(lowest: int, highest: int, kind: type = int) -> Callable[[str], Any]:
    """A type of argument: a number in lowest..highest."""

    def convert(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if lowest <= kind(text) <= highest:
                return kind(text)
        what = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(
            f"wanted {what} from {lowest} to {highest}, got {text[:20]!r}"
        )

    return convert


# Of a file that is read whole.
MOST_BYTES = 2**30
# Steps or tokens, and the distance between two tokens.
COUNT, DISTANCE = number(1, 10**9), number(0, 10**9)
# A shell leaves the ~ of `--out=~/x` as it is.
PATH: dict[str, Any] = {"type": os.path.expanduser}


def contents(path: str) -> bytes:
    """The bytes of a file that is not empty."""
    try:
        with open(path, "rb") as file:
            # A device may have no end.
            data = file.read(MOST_BYTES + 1)
    # A path with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not data:
        raise UserError(f"{path} is empty; name a file that holds something")
    if len(data) > MOST_BYTES:
        raise UserError(f"{path} holds more than {MOST_BYTES:,} bytes; split it")
    return data


def unreadable(path: str, error: Exception) -> UserError:
    """The error for a file that cannot be read."""
    return UserError(
        f"cannot read {path}: {reason(error)}; name a file that exists and that you may read"
    )


class _TriedError(Exception):
    """Leaves a file as it was."""


def writable(name: str, suffixes: Sequence[str], *inputs: str | None) -> pathlib.Path:
    """The path of a file to write, which has such a suffix, is not read, and can be written.

    What will write it tries at once, so that hours of work are not lost.
    """
    if pathlib.Path(name).suffix.lower() not in suffixes:
        raise UserError(f"--out: wanted a name that ends in {', '.join(suffixes)}, got {name!r}")
    try:
        # What a link leads to is replaced, so that the link stays.
        path = pathlib.Path(os.path.realpath(name))
        if path.exists():
            read = [file for file in inputs if file and os.path.exists(file)]
            if any(map(path.samefile, read)):
                raise UserError(f"cannot write {name}: it is also read; name another file")
        # `realpath` leaves a loop of links as a link, of which `exists` says that it is not there.
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"cannot write {name}: it is not a regular file; name a file")
        with contextlib.suppress(_TriedError), _files.open_whole(path):
            raise _TriedError
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot write {name}: {reason(error)}; name a file in a folder that exists and that "
            f"you may write to"
        ) from error
    return path


def write_whole(path: pathlib.Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file whole or not at all."""
    with writing(path), _files.open_whole(path) as file:
        write(file)


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
