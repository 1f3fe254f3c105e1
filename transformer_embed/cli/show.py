"""The command `show`: draws a picture of an encoding, a mask, a bias or an error."""

import argparse
import inspect
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import transformer_embed as te
from transformer_embed._src.functional.sinusoidal import LAYOUTS
from transformer_embed._src.plots import matplotlib_module
from transformer_embed.cli.arguments import (
    COUNT,
    DISTANCE,
    UserError,
    number,
    writable,
    write_whole,
)

# Metadata that would make files of equal pictures differ, by format.
PICTURES = {
    ".png": ("Software",),
    ".svg": ("Date", "Creator"),
    ".pdf": ("CreationDate", "Creator", "Producer"),
}
PIXELS_WIDE = 960
FONT = "DejaVu Sans"
# Pictures of more numbers would fill the memory.
SIZE = {"type": number(1, 4096), "metavar": "N"}
# What a parameter of a function that draws is on the command line; its default is the function's.
FLAGS: Mapping[str, Mapping[str, Any]] = {
    "out": {
        "required": True,
        "metavar": "X.png",
        "help": "file to write; X.svg and X.pdf choose those formats",
    },
    "width": {
        "type": number(2, 40, float),
        "metavar": "INCHES",
        "help": "width of the picture; text is relatively larger in a narrower one",
    },
    "length": {**SIZE, "help": "number of positions"},
    "d_model": {**SIZE, "help": "number of channels"},
    "head_dim": {**SIZE, "help": "number of channels of a head, even"},
    "base": {"type": float, "metavar": "X", "help": "base of the wavelengths"},
    "layout": {"choices": LAYOUTS, "help": "order of the channels"},
    "tokens": {
        "nargs": "+",
        "metavar": "TOKEN",
        "help": "tokens to write at the positions, in place of their numbers",
    },
    "font": {"metavar": "NAME", "help": "font to write the tokens in"},
    "bidirectional": {
        "action": "store_true",
        "help": "let queries attend to later keys too, which a causal mask hides",
    },
    "window": {
        "nargs": 2,
        "type": DISTANCE,
        "metavar": ("BACK", "AHEAD"),
        "help": "how many keys before and after its position a query may attend to",
    },
    "chunk": {
        "type": COUNT,
        "metavar": "N",
        "help": "hide keys outside the query's chunk of N positions",
    },
    "prefix": {
        "type": DISTANCE,
        "metavar": "N",
        "help": "let the first N positions all attend to each other",
    },
    "num_heads": {"type": number(1, 128), "metavar": "N", "help": "number of heads"},
    "head": {"type": number(0, 127), "metavar": "N", "help": "which head, from 0"},
    "symmetric": {
        "action": "store_true",
        "help": "give later keys the same bias as earlier ones instead of hiding them",
    },
}


def add_to(commands: Any) -> None:
    """Adds the command to the parser's."""
    show = commands.add_parser(
        "show",
        allow_abbrev=False,
        help="draw a picture of an encoding, a mask, a bias or an error",
        description="Draws a picture of what this package computes and writes it to a PNG, SVG or "
        "PDF file. Equal arguments give equal "
        "files. Needs matplotlib: pip install '.[plots]'.",
    )
    pictures = show.add_subparsers(required=True, metavar="PICTURE")
    for draw in (encoding, wavelengths, similarity, rotary, error, mask, bias):
        about = inspect.getdoc(draw) or ""
        parser = pictures.add_parser(
            draw.__name__,
            allow_abbrev=False,
            help=about[0].lower() + about[1:-1],
            description=f"Draws {about[0].lower()}{about[1:]}",
        )
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(draw).parameters.items()
            if name != "ax"
        }
        parser.set_defaults(run=run, draw=draw, names=tuple(defaults))
        one_of = parser.add_mutually_exclusive_group() if "tokens" in defaults else parser
        for name, default in {"out": None, "width": 6.4, **defaults}.items():
            options = {"default": default, **FLAGS[name]}
            if default:
                options["help"] += " (default: %(default)s)"
            group = one_of if name in ("length", "tokens") else parser
            group.add_argument(f"--{name.replace('_', '-')}", **options)


def run(args: argparse.Namespace) -> None:
    """Writes the picture and prints its title."""
    out = writable(args.out, tuple(PICTURES))
    kind = pathlib.Path(args.out).suffix.lower()
    options = {name: getattr(args, name) for name in args.names}
    try:
        style, figures = map(matplotlib_module, ("style", "figure"))
        # Whatever the user's settings.
        fonts = [options.get("font", FONT), FONT]
        settings = {"svg.hashsalt": "transformer-embed", "font.family": fonts}
        with style.context(["default", settings]), warnings.catch_warnings():
            # A letter that the font lacks would be drawn as a box, with a warning.
            warnings.simplefilter("error", UserWarning)
            figure = figures.Figure(
                (args.width, 0.75 * args.width), layout="constrained", dpi=PIXELS_WIDE / args.width
            )
            ax = figure.subplots()
            title = args.draw(ax, **options)
            figure.suptitle(title, wrap=True)
            metadata = dict.fromkeys(PICTURES[kind])
            write_whole(out, lambda file: figure.savefig(file, format=kind[1:], metadata=metadata))
    except UserWarning as error:
        raise UserError(f"{error}; try another --font or --width") from error
    except (ImportError, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    print(f"{args.out}: {title}")


def encoding(
    ax: Any,
    *,
    layout: str = LAYOUTS[0],
    length: int = 128,
    d_model: int = 64,
    base: float = 10_000.0,
) -> str:
    """A heat map of sinusoidal positions."""
    te.plots.plot_encoding(te.sinusoidal_table(length, d_model, base=base, layout=layout), ax=ax)
    return f'sinusoidal positions (d_model {d_model}, layout "{layout}")'


def wavelengths(ax: Any, *, d_model: int = 64, base: float = 10_000.0) -> str:
    """The wavelength of each pair of channels, in positions."""
    te.plots.plot_wavelengths(d_model, ax=ax, base=base)
    return f"wavelength of each pair of channels (d_model {d_model}, base {base:,g})"


def similarity(ax: Any, *, length: int = 512, d_model: int = 64, base: float = 10_000.0) -> str:
    """The dot product of two sinusoidal positions by distance."""
    te.plots.plot_similarity(te.sinusoidal_table(length, d_model, base=base), ax=ax)
    return f"dot product of two sinusoidal positions (d_model {d_model})"


def rotary(ax: Any, *, length: int = 6, head_dim: int = 64, base: float = 10_000.0) -> str:
    """Where rotary embeddings rotate a point in some pairs of channels."""
    te.plots.plot_rotary(np.arange(length), head_dim, ax=ax, base=base)
    return f"points rotated by rotary embeddings (head_dim {head_dim})"


def error(ax: Any, *, d_model: int = 64, base: float = 10_000.0) -> str:
    """The error of sinusoidal positions, and of the usual float32 product, from 1 to 2**31 - 1."""
    te.plots.plot_error(d_model, ax=ax, base=base)
    return f"error of sinusoidal positions (d_model {d_model}, base {base:,g})"


def mask(
    ax: Any,
    *,
    length: int = 16,
    tokens: Sequence[str] | None = None,
    font: str = FONT,
    bidirectional: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int | None = None,
    prefix: int = 0,
) -> str:
    """Which keys each query may attend to."""
    try:
        matplotlib_module("font_manager").findfont(font, fallback_to_default=False)
    except ValueError as error:
        want = f"wanted the name of an installed font, got {font!r}"
        raise UserError(f"--font: {want}; `fc-list : family` lists them") from error
    length = len(tokens) if tokens else length
    if prefix > length:
        raise UserError(f"--prefix: wanted at most the {length} tokens, got {prefix}")
    positions = np.arange(length)
    rule = te.AttentionMask(
        # Two of the same block may attend to each other.
        te.TokenPositions(positions, block_ids=np.where(positions < prefix, 0, -1)),
        causal=not bidirectional,
        window=window and (window[0], window[1]),
        chunk=chunk,
    )
    full = np.broadcast_to(rule.dense(), (1, 1, length, length))
    te.plots.plot_mask(full, ax=ax, query_tokens=tokens, key_tokens=tokens)
    words = ["bidirectional mask" if bidirectional else "causal mask"]
    if window:
        words.append(f"window: {window[0]} back")
        if bidirectional:
            words[-1] += f" and {window[1]} ahead"
    if chunk:
        words.append(f"chunks of {chunk}")
    if prefix:
        words.append(f"prefix: {prefix} token" + "s" * (prefix > 1))
    return ", ".join(words)


def bias(
    ax: Any, *, length: int = 16, num_heads: int = 8, head: int = 0, symmetric: bool = False
) -> str:
    """The ALiBi bias of one head."""
    positions = np.arange(length)
    values = te.alibi_bias(positions, positions, num_heads=num_heads, symmetric=symmetric)
    title = f"ALiBi bias, head {head} of {num_heads}"
    if not symmetric:
        values += te.mask_to_bias(te.causal_mask(length))
        title += " (hatched: hidden)"
    te.plots.plot_bias(values, ax=ax, head=head)
    return title
