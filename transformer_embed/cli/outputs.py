"""Files that a command writes: their names are checked before the work."""

import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from transformer_embed._src.plots import matplotlib
from transformer_embed._src.pretrained.files import open_whole


def writable(name: str, suffixes: Sequence[str], *inputs: str, flag: str = "--out") -> pathlib.Path:
    """The path of a file to write, which is not one of the inputs.

    A file in its folder is tried at once, so that hours of work are not lost.
    """
    if pathlib.Path(name).suffix.lower() not in suffixes:
        raise ValueError(f"{flag}: wanted a name that ends in {', '.join(suffixes)}, got {name!r}")
    # What a link leads to is replaced, so that the link stays; of a loop, `realpath` leaves a link.
    path = pathlib.Path(os.path.realpath(os.path.expanduser(name)))
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"cannot write {name}: it is not a regular file")
    if path.exists() and any(os.path.exists(file) and path.samefile(file) for file in inputs):
        raise ValueError(f"cannot write {name}: it is also read; name another file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(
            f"cannot write {name}: {error.strerror}; name a file in a folder that you may write to"
        ) from error
    return path


def drawable(name: str, *inputs: str) -> pathlib.Path:
    """The path of a picture, which can be drawn and written; see `writable`."""
    matplotlib("figure")
    return writable(name, (".png", ".svg", ".pdf"), *inputs, flag="--plot")


def draw_file(path: pathlib.Path, draw: Callable[[Any], str]) -> None:
    """Writes what is drawn on an Axes; `draw` returns its title."""
    # Whatever the user's settings.
    with matplotlib("style").context("default"):
        figure = matplotlib("figure").Figure((6.4, 4.8), 150, layout="constrained")
        figure.suptitle(draw(figure.subplots()))
        with open_whole(path) as file:
            figure.savefig(file, format=path.suffix[1:].lower())
