"""The command `show`: draws a picture of an encoding, a rotation, a mask or an error."""

import argparse
from typing import Any

import numpy as np

import transformer_embed as te
from transformer_embed._src import arguments
from transformer_embed.cli.arguments import draw_file, drawable

# Pictures of more numbers would fill the memory.
SIZES, LARGEST = {"length", "d_model", "head_dim"}, 4096
NUMBER = {"type": int, "metavar": "N"}
FLAGS: dict[str, dict[str, Any]] = {
    "out": {
        "required": True,
        "metavar": "X.png",
        "help": "file to write; X.svg and X.pdf choose those formats",
    },
    "width": {
        "type": float,
        "metavar": "INCHES",
        "help": "width of the picture; text is relatively larger in a narrower one "
        "(default: %(default)s)",
    },
    "length": {**NUMBER, "help": "number of positions (default: %(default)s)"},
    "d-model": {**NUMBER, "help": "number of channels (default: %(default)s)"},
    "head-dim": {**NUMBER, "help": "number of channels of a head, even (default: %(default)s)"},
    "base": {
        "type": float,
        "metavar": "X",
        "help": "base of the wavelengths (default: %(default)s)",
    },
    "tokens": {
        "nargs": "+",
        "metavar": "TOKEN",
        "help": "tokens to write at the positions (default: their numbers, 0 to 15)",
    },
    "bidirectional": {
        "action": "store_true",
        "help": "let queries attend to later keys too, which a causal mask hides",
    },
    "window": {
        "nargs": 2,
        "type": int,
        "metavar": ("BACK", "AHEAD"),
        "help": "how many keys before and after its position a query may attend to",
    },
    "chunk": {**NUMBER, "help": "hide keys outside the query's chunk of N positions"},
    "prefix": {**NUMBER, "help": "let the first N positions all attend to each other"},
}


def add_to(commands: Any) -> None:
    """Adds the command to the parser's."""
    show = commands.add_parser(
        "show",
        help="draw a picture of an encoding, a rotation, a mask or an error",
        description="Draws a picture of what this package computes and writes it to a PNG, SVG or "
        "PDF file. Needs matplotlib: pip install '.[plots]'.",
    )
    pictures = show.add_subparsers(required=True, metavar="PICTURE")
    for draw, defaults in PICTURES.items():
        parser = pictures.add_parser(draw.__name__, help=draw.__doc__, description=draw.__doc__)
        parser.set_defaults(run=run, draw=draw)
        for name, default in {"out": None, "width": 6.4, **defaults}.items():
            parser.add_argument(f"--{name}", default=default, **FLAGS[name])


def run(args: argparse.Namespace) -> None:
    """Writes the picture and prints its title."""
    path = drawable(args.out)
    arguments.real("width", args.width, lowest=2, highest=40, want="2 to 40 inches")
    for name in SIZES & vars(args).keys():
        arguments.integer(name, vars(args)[name], at_least=1, at_most=LARGEST)
    title = draw_file(path, lambda ax: args.draw(ax, args), width=args.width)
    print(f"{args.out}: {title}")


# Each picture is a function that draws on an Axes and returns a title.
def encoding(ax: Any, args: argparse.Namespace) -> str:
    """Draws a heat map of sinusoidal positions."""
    te.plots.plot_encoding(te.sinusoidal_table(args.length, args.d_model, base=args.base), ax=ax)
    return f"sinusoidal positions (d_model {args.d_model})"


def rotary(ax: Any, args: argparse.Namespace) -> str:
    """Draws points of some pairs of channels, rotated by rotary embeddings."""
    te.plots.plot_rotary(np.arange(args.length), args.head_dim, ax=ax, base=args.base)
    return f"points rotated by rotary embeddings (head_dim {args.head_dim})"


def error(ax: Any, args: argparse.Namespace) -> str:
    """Draws the error of sinusoidal positions, and of the usual float32 product."""
    te.plots.plot_error(args.d_model, ax=ax, base=args.base)
    return f"error of sinusoidal positions (d_model {args.d_model}, base {args.base:,g})"


def mask(ax: Any, args: argparse.Namespace) -> str:
    """Draws which keys each query may attend to."""
    length, prefix = len(args.tokens), arguments.length("prefix", args.prefix)
    # Two of the same block may attend to each other.
    blocks = np.where(np.arange(length) < prefix, 0, -1)
    rule = te.AttentionMask(
        te.TokenPositions.from_offset(0, length).with_block_ids(blocks),
        causal=not args.bidirectional,
        window=args.window,
        chunk=args.chunk,
    )
    # A rule that hides nothing has axes of size 1.
    full = np.broadcast_to(rule.dense(), (1, 1, length, length))
    te.plots.plot_mask(full, ax=ax, query_tokens=args.tokens, key_tokens=args.tokens)
    words = ["bidirectional mask" if args.bidirectional else "causal mask"]
    if args.window:
        words.append(f"window: {args.window[0]} back")
        if args.bidirectional:
            words.append(f"{args.window[1]} ahead")
    if args.chunk:
        words.append(f"chunks of {args.chunk}")
    if prefix:
        words.append(f"prefix of {prefix}")
    return ", ".join(words)


# The flags of each picture, with their defaults.
PICTURES: dict[Any, dict[str, Any]] = {
    encoding: {"length": 128, "d-model": 64, "base": 10_000.0},
    rotary: {"length": 6, "head-dim": 64, "base": 10_000.0},
    error: {"d-model": 64, "base": 10_000.0},
    mask: {
        "tokens": range(16),
        "bidirectional": False,
        "window": None,
        "chunk": None,
        "prefix": 0,
    },
}
