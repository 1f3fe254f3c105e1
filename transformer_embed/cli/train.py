"""The command `train`: trains a small Transformer on text, with positions and without."""

import argparse
import hashlib
import pathlib
import sys
import sysconfig
from typing import Any

import jax

import transformer_embed as te
from transformer_embed import pretrained
from transformer_embed.cli.arguments import (
    COUNT,
    PATH,
    UserError,
    contents,
    number,
    writable,
    writing,
)

LIBRARY_BYTES = 8_000_000


def add_to(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train a small causal Transformer on text, with and without positions",
        description="Trains a small causal Transformer (2 layers, 128 wide, 4 heads, a context of "
        "128 bytes) twice, with sinusoidal "
        "positions and without positions. Both train on the first 95% of the text and are scored "
        "on the last 5%, beside a unigram "
        "model (the frequencies of single bytes). The score is bits per byte: lower is better. It "
        "takes about a minute on 2 CPU cores. "
        "Equal arguments give equal figures on one machine.",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        **PATH,
        help="text to train on (default: the source of Python's standard library)",
    )
    parser.add_argument(
        "--out",
        metavar="PARAMS.safetensors",
        **PATH,
        help="file to write the model with sinusoidal positions to; `embed` reads it",
    )
    parser.add_argument(
        "--steps",
        type=COUNT,
        default=750,
        metavar="N",
        help="training steps for each model (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=number(0, 2**31 - 1),
        default=0,
        metavar="N",
        help="seed of the parameters and batches (default: %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bars")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the scores and, with --out, writes the model."""
    # An empty name is a mistake, not the absence of one.
    out = None if args.out is None else writable(args.out, (".safetensors",), *args.files)
    text, source = b"".join(map(contents, args.files)), ", ".join(args.files)
    if not args.files:
        text, source = _library()
    # optax is slow to load, so arguments and files are checked first.
    from transformer_embed.cli import language_model  # noqa: PLC0415

    if len(text) < language_model.SHORTEST_TEXT:
        shortest = language_model.SHORTEST_TEXT
        raise UserError(
            f"the text has {len(text)} bytes; give FILEs of {shortest} bytes or more in all"
        )
    digest = hashlib.sha256(text).hexdigest()
    # At once, also into a pipe: training takes a minute.
    print(f"text: {source}, {len(text):,} bytes\nsha256: {digest}", flush=True)
    options = {"steps": args.steps, "seed": args.seed, "quiet": args.quiet}
    sinusoidal = language_model.train(text, te.Sinusoidal(), "sinusoidal", **options)
    kept = "The model is not kept; `--out PARAMS.safetensors` writes it to a file."
    if out:
        with writing(out):
            pretrained.save_embedder(out, sinusoidal.config, sinusoidal.params)
        kept = f"The model with sinusoidal positions is in {args.out}."
    print(kept, flush=True)
    none = language_model.train(text, None, "none", **options)
    unigram = language_model.unigram_bits(text)
    size = sum(leaf.size for leaf in jax.tree.leaves(none.params))
    print(f"\n{'model':<30}{'parameters':>12}{'bits per byte':>16}")
    rows = (
        ("sinusoidal positions", size, sinusoidal.bits),
        ("no positions", size, none.bits),
        # Shares that sum to 1.
        ("unigram", language_model.VOCAB_SIZE - 1, unigram),
    )
    for name, parameters, bits in rows:
        print(f"{name:<30}{parameters:>12,}{bits:>16.2f}")
    print(f"\n{verdict(sinusoidal.bits, none.bits, args.steps)}")


def verdict(with_positions: float, without: float, steps: int) -> str:
    """A sentence on what positions are worth, rounded like the table."""
    saved = round(without, 2) - round(with_positions, 2)
    if abs(saved) < 0.005:
        return f"Positions make no difference after {steps:,} steps."
    if saved < 0:
        worse = f"{-saved:.2f} bits per byte more, after {steps:,} steps"
        return f"With positions the model needs {worse}."
    return f"With positions the model needs {saved:.2f} bits per byte fewer."


def _library() -> tuple[bytes, str]:
    """The top-level modules of the standard library in sorted order, and their name."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:LIBRARY_BYTES]
    if not text:
        raise UserError(
            f"{folder} does not hold the source of the standard library; name a FILE to train on"
        )
    return text, f"Python {sys.version.split()[0]} standard library"
