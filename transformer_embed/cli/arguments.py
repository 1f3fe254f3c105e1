"""What several commands take: a checkpoint and what describes it, a file or a picture to write."""

import argparse
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from transformer_embed import pretrained
from transformer_embed._src.plots import matplotlib
from transformer_embed._src.pretrained.files import open_whole, read_json

PIXELS_WIDE = 960


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


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for what the files of a checkpoint may not say."""
    parser.add_argument(
        "--stack",
        choices=("encoder", "decoder"),
        help="stack to read if the checkpoint has both (default: encoder)",
    )
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="model type, such as bert or llama, if no config.json has it",
    )
    parser.add_argument(
        "--settings",
        metavar="FILE.json",
        help="entries of a config.json, which override those beside the checkpoint",
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="TOKENS",
        help="tokens of the longest text, for models whose rotation depends on it (Phi-3 128k)",
    )


def read_checkpoint(args: argparse.Namespace) -> pretrained.PretrainedInput:
    """The input layer of a checkpoint, which the flags may describe."""
    settings = {}
    if args.settings is not None:
        settings = read_json(pathlib.Path(args.settings).expanduser())
    if args.model_type is not None:
        settings["model_type"] = args.model_type
    return pretrained.load_embedder(
        args.checkpoint, stack=args.stack, settings=settings or None, length=args.length
    )


def drawable(name: str, *inputs: str, flag: str = "--out") -> pathlib.Path:
    """The path of a picture, which can be drawn and written; see `writable`."""
    matplotlib("figure")
    return writable(name, (".png", ".svg", ".pdf"), *inputs, flag=flag)


def draw_file(path: pathlib.Path, draw: Callable[[Any], str], *, width: float = 6.4) -> str:
    """Writes what is drawn on an Axes; `draw` returns its title."""
    # Whatever the user's settings.
    with matplotlib("style").context("default"):
        # As many pixels at any width.
        figure = matplotlib("figure").Figure(
            (width, 0.75 * width), PIXELS_WIDE / width, layout="constrained"
        )
        title = draw(figure.subplots())
        figure.suptitle(title, wrap=True)
        with open_whole(path) as file:
            figure.savefig(file, format=path.suffix[1:].lower())
    return title
