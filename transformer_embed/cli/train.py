"""The command `train`: trains small Transformers on text, and compares their positions."""

import argparse
import pathlib
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from transformer_embed import pretrained
from transformer_embed._src import arguments

LIBRARY_BYTES = 8_000_000
POSITION_NAMES = ("sinusoidal", "learned", "rotary", "alibi", "none")


def add_to(commands: Any) -> None:
    """Adds the command to the commands of a parser."""
    parser = commands.add_parser(
        "train",
        help="train small causal Transformers on text, and compare their positions",
        description="Trains small causal Transformers (2 layers, 128 wide, 4 heads, a context of "
        "128 bytes) that differ in their positions, from one seed. All train on the first 95% of "
        "the text, on all devices, and are scored on the last 5%, in texts of 128 bytes and of 2 "
        "and 4 times as many. The score is bits per byte: lower is better. Two of them take about "
        "a minute on 2 CPU cores. Equal arguments give equal figures on one machine.",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="text to train on (default: the source of Python's standard library)",
    )
    parser.add_argument(
        "--positions",
        type=_names,
        default="sinusoidal,none",
        metavar="NAME,...",
        help=f"positions to compare, of {', '.join(POSITION_NAMES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        metavar="PARAMS.safetensors",
        help="file to write the model with the first positions to; `inspect` reads it",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=750,
        metavar="N",
        help="training steps for each model (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the parameters and batches (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def _names(text: str) -> list[str]:
    """Returns the names in a list with commas. Refuses an unknown or a repeated name."""
    names = text.split(",")
    # A set has a repeated name once, so it has fewer names than the list.
    known_names = {*names} & {*POSITION_NAMES}
    if len(known_names) < len(names):
        raise argparse.ArgumentTypeError(f"wanted some of {','.join(POSITION_NAMES)}, got {text!r}")
    return names


def run(args: argparse.Namespace) -> None:
    """Trains and scores a model for each of the positions, and prints a row of the table for each.

    With --out, writes the first model.
    """
    arguments.size("--steps", args.steps)
    arguments.integer("--seed", args.seed, at_least=0, at_most=2**31 - 1)
    # If there is no --out, it is None. An empty name is not None, and `_checked_out_path` refuses
    # it.
    out = None if args.out is None else _checked_out_path(args.out)
    source = _read_source(args.files)
    # optax is slow to load, so arguments and files are checked first.
    from transformer_embed.cli import language_model  # noqa: PLC0415

    shortest = language_model.SHORTEST_TEXT
    if len(source.text) < shortest:
        raise ValueError(
            f"the text has {len(source.text)} bytes; give FILEs of {shortest} bytes or more in all"
        )
    lengths = language_model.LENGTHS
    print(f"text: {source.name}, {len(source.text):,} bytes")
    print(f"\nTrained on texts of {lengths[0]} bytes: bits per byte of texts with")
    headings_of_scores = [f"{length} bytes" for length in lengths]
    print(_table_line("positions", "parameters", headings_of_scores), flush=True)
    first_name, *_ = args.positions
    for name in args.positions:
        if not sys.stderr.isatty():
            # A progress bar is for a terminal. Elsewhere a line says what takes so long.
            print(f"{name}: training for {args.steps} steps", file=sys.stderr, flush=True)
        trained = language_model.train(source.text, name, steps=args.steps, seed=args.seed)
        # The first model is written before the others are trained, so that it is in the file even
        # if a later training is stopped.
        if out and name == first_name:
            pretrained.save_embedder(out, language_model.config(name), trained.params)
        scores = [f"{score:.2f}" for score in trained.bits_per_byte]
        # There is a dash for each length of text for which the model has no positions.
        scores += ["-"] * (len(lengths) - len(scores))
        parameter_count = sum(leaf.size for leaf in jax.tree.leaves(trained.params))
        print(_table_line(name, f"{parameter_count:,}", scores), flush=True)
    if out:
        print(f"\nThe model with {first_name} positions is in {args.out}.")


def _table_line(name: str, parameters: str, scores: Sequence[str]) -> str:
    """Returns a line of the table, with a column for each score."""
    columns = [f"{name:<22}", f"{parameters:>12}"]
    columns += [f"{score:>14}" for score in scores]
    return "".join(columns)


def _checked_out_path(name: str) -> pathlib.Path:
    """Returns the path for --out, or raises an error if no file can be written at this path.

    A temporary file is written in the same folder before the training starts, because a trained
    model that cannot be saved is lost.
    """
    path = pathlib.Path(name).expanduser()
    if path.suffix.lower() != ".safetensors":
        raise ValueError(f"--out: wanted a name that ends in .safetensors, got {name!r}")
    if (path.is_symlink() or path.exists()) and not path.is_file():
        raise ValueError(f"--out: wanted a regular file, got {name}")
    try:
        tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ValueError(
            f"--out: wanted a file in a folder that you may write to, got {name} ({error.strerror})"
        ) from error
    return path


class Source(NamedTuple):
    """A text to train on, and what it is called."""

    text: bytes
    name: str


def _read_source(files: Sequence[str]) -> Source:
    """Returns the text of the files, or of Python's standard library if there are none."""
    if not files:
        return _read_library()
    text = b"".join(pathlib.Path(file).read_bytes() for file in files)
    return Source(text=text, name=", ".join(files))


def _read_library() -> Source:
    """Returns the source of the standard library's top-level modules, in sorted order."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    text = b"".join(texts)[:LIBRARY_BYTES]
    if not text:
        raise ValueError(
            f"{folder} does not hold the source of the standard library; name a FILE to train on"
        )
    version, *_ = sys.version.split()
    return Source(text=text, name=f"Python {version} standard library")
