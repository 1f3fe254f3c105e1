"""The command `train`: trains small Transformers on text, and compares their positions."""

import argparse
import pathlib
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_embed import pretrained
from transformer_embed._src import arguments
from transformer_embed.cli.outputs import draw_file, drawable, writable

LIBRARY_BYTES = 8_000_000
NAMES = ("sinusoidal", "learned", "rotary", "alibi", "none")


def add_to(commands: Any) -> None:
    """Adds the command to the parser's."""
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
        help=f"positions to compare, of {', '.join(NAMES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        metavar="PARAMS.safetensors",
        help="file to write the model with the first positions to; `inspect` reads it",
    )
    parser.add_argument(
        "--plot",
        metavar="X.svg",
        help="file to draw the losses to; X.png and X.pdf choose those formats",
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
    """The names in a list with commas, each once."""
    names = text.split(",")
    if len({*names} & {*NAMES}) < len(names):
        raise argparse.ArgumentTypeError(f"wanted some of {','.join(NAMES)}, got {text!r}")
    return names


def run(args: argparse.Namespace) -> None:
    """Prints the scores and, with --out and --plot, writes the first model and the losses."""
    arguments.size("--steps", args.steps)
    arguments.integer("--seed", args.seed, at_least=0, at_most=2**31 - 1)
    # An empty name is a mistake, not the absence of one.
    out = None if args.out is None else writable(args.out, (".safetensors",), *args.files)
    plot = None if args.plot is None else drawable(args.plot, *args.files)
    text, source = _library()
    if args.files:
        text = b"".join(pathlib.Path(file).read_bytes() for file in args.files)
        source = ", ".join(args.files)
    # optax is slow to load, so arguments and files are checked first.
    from transformer_embed.cli import language_model  # noqa: PLC0415

    if len(text) < language_model.SHORTEST_TEXT:
        shortest = language_model.SHORTEST_TEXT
        raise ValueError(
            f"the text has {len(text)} bytes; give FILEs of {shortest} bytes or more in all"
        )
    # At once, also into a pipe: training takes a minute.
    print(f"text: {source}, {len(text):,} bytes", flush=True)
    results = {}
    for name in args.positions:
        results[name] = language_model.train(text, name, steps=args.steps, seed=args.seed)
        # Before the others, which take as long.
        if out and len(results) == 1:
            pretrained.save_embedder(out, language_model.config(name), results[name].params)
            print(f"The model with {name} positions is in {args.out}.", flush=True)
    if plot:
        draw_file(plot, lambda ax: _curves(ax, results))
        print(f"The losses are in {args.plot}.")
    _print_scores(results, language_model.LENGTHS)


def _print_scores(results: Mapping[str, Any], lengths: Sequence[int]) -> None:
    print(f"\nTrained on texts of {lengths[0]} bytes: bits per byte of texts with")
    print(_row("positions", "parameters", [f"{length} bytes" for length in lengths]))
    for name, result in results.items():
        size = sum(leaf.size for leaf in jax.tree.leaves(result.params))
        bits = [f"{each:.2f}" for each in result.bits]
        # Of longer texts than it has positions for.
        print(_row(name, f"{size:,}", bits + ["-"] * (len(lengths) - len(bits))))


def _row(name: str, size: str, bits: Sequence[str]) -> str:
    return f"{name:<22}{size:>12}" + "".join(f"{each:>14}" for each in bits)


def _curves(ax: Any, results: Mapping[str, Any]) -> str:
    """Draws the mean loss of each fiftieth of the steps; returns a title."""
    for name, result in results.items():
        parts = np.array_split(result.losses, min(50, len(result.losses)))
        steps = np.cumsum([len(part) for part in parts])
        ax.plot(steps, [part.mean() for part in parts], label=name)
    ax.set(xlabel="step", ylabel="loss (bits per byte)")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return "losses of training"


def _library() -> tuple[bytes, str]:
    """The top-level modules of the standard library in sorted order, and their name."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:LIBRARY_BYTES]
    if not text:
        raise ValueError(
            f"{folder} does not hold the source of the standard library; name a FILE to train on"
        )
    return text, f"Python {sys.version.split()[0]} standard library"
