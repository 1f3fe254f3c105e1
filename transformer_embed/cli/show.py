"""The command `show`: draws a picture of an encoding, a mask, a bias or an error."""

import argparse
import math
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
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
PIXELS_WIDE, WIDTH, TITLE_LETTERS_PER_INCH = 960, 6.4, 9.5
FONT = "DejaVu Sans"


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
    for name, (draw, about, flags) in DRAWN.items():
        parser = pictures.add_parser(
            name, allow_abbrev=False, help=about, description=f"Draws {about}."
        )
        parser.set_defaults(run=run, draw=draw)
        one_of = parser.add_mutually_exclusive_group() if "--tokens" in flags else parser
        for flag, options in {**COMMON_FLAGS, **flags}.items():
            group = one_of if flag in ("--length", "--tokens") else parser
            group.add_argument(flag, **options)


def run(args: argparse.Namespace) -> None:
    """Writes the picture and prints its title."""
    out = writable(args.out, tuple(PICTURES))
    kind = pathlib.Path(args.out).suffix.lower()
    try:
        figure_module = matplotlib_module("figure")
    except ImportError as error:
        raise UserError(str(error)) from error

    # Whatever the user's settings.
    fonts = {
        "svg.hashsalt": "transformer-embed",
        "font.family": [getattr(args, "font", FONT), FONT],
    }
    with matplotlib_module("style").context(["default", fonts]):
        figure = figure_module.Figure(
            (args.width, 0.75 * args.width), layout="constrained", dpi=PIXELS_WIDE / args.width
        )
        ax = figure.subplots()
        try:
            title = args.draw(args, ax)
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from error
        ax.set_title(_wrapped(title, round(TITLE_LETTERS_PER_INCH * args.width)))
        write_whole(
            out,
            lambda file: figure.savefig(
                file, format=kind[1:], metadata=dict.fromkeys(PICTURES[kind])
            ),
        )
    print(f"{args.out}: {title}")


def _wrapped(title: str, letters: int) -> str:
    """The title in lines of at most `letters` letters and about equal length."""
    lines = math.ceil(len(title) / letters)
    return textwrap.fill(title, min(letters, len(title) // lines + 6))


def _draw_encoding(args: argparse.Namespace, ax: Any) -> str:
    table = te.sinusoidal_table(args.length, args.d_model, base=args.base, layout=args.layout)
    te.plots.plot_encoding(table, ax=ax)
    return f'sinusoidal positions (d_model {args.d_model}, layout "{args.layout}")'


def _draw_wavelengths(args: argparse.Namespace, ax: Any) -> str:
    te.plots.plot_wavelengths(args.d_model, ax=ax, base=args.base)
    return f"wavelength of each pair of channels (d_model {args.d_model}, base {args.base:,g})"


def _draw_similarity(args: argparse.Namespace, ax: Any) -> str:
    te.plots.plot_similarity(te.sinusoidal_table(args.length, args.d_model, base=args.base), ax=ax)
    return f"dot product of two sinusoidal positions (d_model {args.d_model})"


def _draw_rotary(args: argparse.Namespace, ax: Any) -> str:
    te.plots.plot_rotary(np.arange(args.length), args.head_dim, ax=ax, base=args.base)
    return f"points rotated by rotary embeddings (head_dim {args.head_dim})"


def _draw_mask(args: argparse.Namespace, ax: Any) -> str:
    positions = np.arange(len(args.tokens) if args.tokens else args.length)
    if args.prefix > len(positions):
        raise UserError(f"--prefix: wanted at most the {len(positions)} tokens, got {args.prefix}")
    _check_font(args.tokens or (), args.font)
    mask = te.AttentionMask(
        # Two of the same block may attend to each other.
        te.TokenPositions(positions, block_ids=np.where(positions < args.prefix, 0, -1)),
        causal=not args.bidirectional,
        window=args.window and tuple(args.window),
        chunk=args.chunk,
    )
    full = np.broadcast_to(mask.dense(), (1, 1, len(positions), len(positions)))
    te.plots.plot_mask(full, ax=ax, query_tokens=args.tokens, key_tokens=args.tokens)
    words = ["bidirectional mask" if args.bidirectional else "causal mask"]
    if args.window:
        back, ahead = args.window
        words.append(f"window: {back} back" + (f" and {ahead} ahead" if args.bidirectional else ""))
    if args.chunk:
        words.append(f"chunks of {args.chunk}")
    if args.prefix:
        words.append(f"prefix: {args.prefix} tokens" if args.prefix > 1 else "prefix: 1 token")
    return ", ".join(words)


def _check_font(tokens: Sequence[str], name: str) -> None:
    """Raises for a letter that would be drawn as a box."""
    from matplotlib import font_manager  # noqa: PLC0415 (slow to load)

    try:
        fonts = [
            font_manager.get_font(font_manager.findfont(font, fallback_to_default=False))
            for font in (name, FONT)
        ]
    except ValueError as error:
        raise UserError(
            f"--font: wanted the name of an installed font, got {name!r}; `fc-list : family` "
            f"lists them"
        ) from error
    for letter in filter(str.isprintable, "".join(tokens)):
        if not any(font.get_char_index(ord(letter)) for font in fonts):
            raise UserError(
                f"--tokens: the font {name} cannot draw {letter!r} (U+{ord(letter):04X}); name a "
                f"font that can, such as --font 'Noto Sans CJK JP'"
            )


def _draw_bias(args: argparse.Namespace, ax: Any) -> str:
    positions = np.arange(args.length)
    bias = te.alibi_bias(positions, positions, num_heads=args.num_heads, symmetric=args.symmetric)
    if not args.symmetric:
        bias = bias + te.mask_to_bias(te.causal_mask(args.length))
    te.plots.plot_bias(bias, ax=ax, head=args.head)
    hidden = "" if args.symmetric else " (hatched: hidden)"
    return f"ALiBi bias, head {args.head} of {args.num_heads}{hidden}"


def _draw_error(args: argparse.Namespace, ax: Any) -> str:
    te.plots.plot_error(args.d_model, ax=ax, base=args.base)
    return f"error of sinusoidal positions (d_model {args.d_model}, base {args.base:,g})"


def _size(default: int, about: str, lowest: int = 1, highest: int = 4096) -> dict[str, Any]:
    """The options of a flag that takes an integer."""
    return {
        "type": number(lowest, highest),
        "default": default,
        "metavar": "N",
        "help": f"{about} (default: %(default)s)",
    }


POSITIONS = "number of positions"
D_MODEL = _size(64, "number of channels")
BASE = {
    "type": float,
    "default": 10_000.0,
    "metavar": "X",
    "help": "base of the wavelengths (default: %(default)s)",
}
COMMON_FLAGS: Mapping[str, Any] = {
    "--out": {
        "required": True,
        "metavar": "X.png",
        "help": "file to write; X.svg and X.pdf choose those formats",
    },
    "--width": {
        "type": number(2, 40, float),
        "default": WIDTH,
        "metavar": "INCHES",
        "help": "width of the picture; text is relatively larger in a narrower one (default: "
        "%(default)s)",
    },
}
# How each picture is drawn, what it shows, and its own flags.
DRAWN: Mapping[str, tuple[Callable[[argparse.Namespace, Any], str], str, dict[str, Any]]] = {
    "encoding": (
        _draw_encoding,
        "a heat map of sinusoidal positions",
        {
            "--layout": {
                "choices": LAYOUTS,
                "default": LAYOUTS[0],
                "help": "order of the channels (default: %(default)s)",
            },
            "--length": _size(128, POSITIONS),
            "--d-model": D_MODEL,
            "--base": BASE,
        },
    ),
    "wavelengths": (
        _draw_wavelengths,
        "the wavelength of each pair of channels, in positions",
        {"--d-model": D_MODEL, "--base": BASE},
    ),
    "similarity": (
        _draw_similarity,
        "the dot product of two sinusoidal positions by distance",
        {"--length": _size(512, POSITIONS), "--d-model": D_MODEL, "--base": BASE},
    ),
    "rotary": (
        _draw_rotary,
        "where rotary embeddings rotate a point in some pairs of channels",
        {
            "--length": _size(6, POSITIONS),
            "--head-dim": _size(64, "number of channels of a head, even"),
            "--base": BASE,
        },
    ),
    "error": (
        _draw_error,
        "the error of sinusoidal positions, and of the usual float32 product, from 1 to 2**31 - 1",
        {"--d-model": D_MODEL, "--base": BASE},
    ),
    "mask": (
        _draw_mask,
        "which keys each query may attend to",
        {
            "--length": _size(16, POSITIONS),
            "--tokens": {
                "nargs": "+",
                "metavar": "TOKEN",
                "help": "tokens to write at the positions, in place of their numbers",
            },
            "--font": {
                "default": FONT,
                "metavar": "NAME",
                "help": "font to write the tokens in (default: %(default)s)",
            },
            "--bidirectional": {
                "action": "store_true",
                "help": "let queries attend to later keys too (default: causal)",
            },
            "--window": {
                "nargs": 2,
                "type": DISTANCE,
                "metavar": ("BACK", "AHEAD"),
                "help": "how many keys before and after its position a query may attend to",
            },
            "--chunk": {
                "type": COUNT,
                "metavar": "N",
                "help": "hide keys outside the query's chunk of N positions",
            },
            "--prefix": {
                "type": DISTANCE,
                "default": 0,
                "metavar": "N",
                "help": "let the first N positions all attend to each other",
            },
        },
    ),
    "bias": (
        _draw_bias,
        "the ALiBi bias of one head",
        {
            "--length": _size(16, POSITIONS, highest=512),
            "--num-heads": _size(8, "number of heads", highest=128),
            "--head": _size(0, "which head, from 0", lowest=0, highest=127),
            "--symmetric": {
                "action": "store_true",
                "help": "give later keys the same bias as earlier ones instead of hiding them",
            },
        },
    ),
}
