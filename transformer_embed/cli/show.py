"""The command `show`: pictures of encodings, masks and errors."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

import transformer_embed as te
from transformer_embed.cli.user import UserError, at_least_one, distance, number, writable, write_whole
from transformer_embed.functional.sinusoidal import LAYOUTS

# Formats of pictures, and the metadata that would tell two runs apart.
PICTURES = {"png": ("Software",), "svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer")}


def add_show(commands: Any) -> None:
    """Adds the command to the parser's."""
    show = commands.add_parser(
        "show",
        allow_abbrev=False,
        help="draw a picture of an encoding, a mask or an error",
        description="Draws one picture of what this package computes and writes it to a file: as PNG, SVG or PDF, by the file's suffix. "
        "Equal arguments give equal files. Needs matplotlib: pip install matplotlib.",
    )
    pictures = show.add_subparsers(required=True, metavar="PICTURE")

    def picture(draw: Callable[[argparse.Namespace, Any], str], about: str) -> argparse.ArgumentParser:
        parser = pictures.add_parser(draw.__name__.removeprefix("_draw_"), allow_abbrev=False, help=about, description=f"Draws {about}.")
        parser.add_argument("--out", required=True, metavar="X.png", help="where to write the picture; X.svg and X.pdf will do too")
        parser.set_defaults(command=_show, draw=draw)
        return parser

    def size(parser: Any, flag: str, default: int, about: str, highest: int = 4096, lowest: int = 1) -> None:
        parser.add_argument(
            flag, type=lambda text: number(text, lowest, highest), default=default, metavar="N", help=f"{about} (default: %(default)s)"
        )

    encoding = picture(_draw_encoding, "a heat map of sinusoidal positions")
    encoding.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="order of the channels (default: %(default)s)")
    wavelengths = picture(_draw_wavelengths, "how many positions a full turn of each pair of channels takes")
    similarity = picture(_draw_similarity, "the dot product of two sinusoidal positions over their distance")
    rotary = picture(_draw_rotary, "where rotary embeddings turn a pair of channels")
    error = picture(_draw_error, "the error of sinusoidal positions beside that of the usual float32 product, from 1 to 2**31 - 1")
    for each, length in ((encoding, 128), (similarity, 512), (rotary, 6)):
        size(each, "--length", length, "positions")
    for each in (encoding, wavelengths, similarity, error):
        size(each, "--d-model", 64, "channels")
    size(rotary, "--head-dim", 64, "channels of a head, even")
    for each in (encoding, wavelengths, similarity, rotary, error):
        each.add_argument("--base", type=float, default=10_000.0, metavar="X", help="of the wavelengths (default: %(default)s)")
    mask = picture(_draw_mask, "which keys each query may attend to; causal unless told otherwise")
    queries = mask.add_mutually_exclusive_group()
    size(queries, "--length", 16, "positions")
    queries.add_argument("--tokens", nargs="+", metavar="TOKEN", help="names for the positions, in place of their number")
    mask.add_argument("--bidirectional", action="store_true", help="hide no key for being after its query")
    mask.add_argument("--window", nargs=2, type=distance, metavar=("LEFT", "RIGHT"), help="how far before and after itself a query looks")
    mask.add_argument("--chunk", type=at_least_one, metavar="N", help="hide keys outside the query's chunk of N positions")
    mask.add_argument("--prefix", type=distance, default=0, metavar="N", help="the first N positions all see each other")
    bias = picture(_draw_bias, "ALiBi's bias of one head")
    size(bias, "--length", 16, "positions", 512)
    size(bias, "--num-heads", 8, "heads", 128)
    size(bias, "--head", 0, "which head, from 0", 127, lowest=0)
    bias.add_argument("--symmetric", action="store_true", help="keys after the query are as far as those before it, and none is hidden")


def _show(args: argparse.Namespace) -> None:
    kind = pathlib.Path(args.out).suffix.lower().removeprefix(".")
    if kind not in PICTURES:
        raise UserError(f"--out: wanted a name that ends in {', '.join(f'.{known}' for known in PICTURES)}, got {args.out!r}")
    out = writable(args.out)
    try:
        te.plots  # noqa: B018 (it loads on first use)
    except AttributeError as error:
        raise UserError(str(error)) from error
    import matplotlib.style  # noqa: PLC0415 (slow to load)
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.style.context("default"), matplotlib.rc_context({"svg.hashsalt": "transformer-embed"}):
        figure = Figure(layout="constrained", dpi=150)
        ax = figure.subplots()
        try:
            title = args.draw(args, ax)
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from error
        ax.set_title(title)
        write_whole(out, lambda file: figure.savefig(file, format=kind, metadata=dict.fromkeys(PICTURES[kind])))
    print(f"{out}: {title}")


def _draw_encoding(args: argparse.Namespace, ax: Any) -> str:
    table = te.sinusoidal_table(args.length, args.d_model, base=args.base, layout=args.layout)
    te.plots.plot_encoding(table, ax=ax)
    return f'sinusoidal positions, d_model {args.d_model}, layout "{args.layout}"'


def _draw_wavelengths(args: argparse.Namespace, ax: Any) -> str:
    te.plots.plot_wavelengths(args.d_model, ax=ax, base=args.base)
    return f"wavelengths, d_model {args.d_model}, base {args.base:g}"


def _draw_similarity(args: argparse.Namespace, ax: Any) -> str:
    te.plots.plot_similarity(te.sinusoidal_table(args.length, args.d_model, base=args.base), ax=ax)
    return f"dot products of sinusoidal positions, d_model {args.d_model}"


def _draw_rotary(args: argparse.Namespace, ax: Any) -> str:
    te.plots.plot_rotary(np.arange(args.length), args.head_dim, ax=ax, base=args.base)
    return f"pairs turned by rotary embeddings, head_dim {args.head_dim}"


def _draw_mask(args: argparse.Namespace, ax: Any) -> str:
    positions = np.arange(len(args.tokens) if args.tokens else args.length)
    if args.prefix > len(positions):
        raise UserError(f"--prefix: wanted at most the {len(positions)} tokens, got {args.prefix}")
    prefix = np.where(positions < args.prefix, 0, -1) if args.prefix else None
    mask = te.attention_mask(
        query_positions=positions,
        key_positions=positions,
        causal=not args.bidirectional,
        window=args.window and tuple(args.window),
        chunk=args.chunk,
        query_block_ids=prefix,
        key_block_ids=prefix,
    )
    full = np.broadcast_to(mask, (1, 1, len(positions), len(positions)))
    te.plots.plot_mask(full, ax=ax, query_tokens=args.tokens, key_tokens=args.tokens)
    options = {"window": args.window, "chunk": args.chunk, "prefix": args.prefix}
    asked = "".join(f", {name} {' '.join(map(str, np.atleast_1d(value)))}" for name, value in options.items() if value)
    return ("bidirectional" if args.bidirectional else "causal") + " mask" + asked


def _draw_bias(args: argparse.Namespace, ax: Any) -> str:
    positions = np.arange(args.length)
    bias = te.alibi_bias(positions, positions, num_heads=args.num_heads, symmetric=args.symmetric)
    if not args.symmetric:
        bias = bias + te.mask_to_bias(te.causal_mask(args.length))
    te.plots.plot_bias(bias, ax=ax, head=args.head)
    return f"ALiBi's bias, head {args.head} of {args.num_heads}"


def _draw_error(args: argparse.Namespace, ax: Any) -> str:
    te.plots.plot_error(args.d_model, ax=ax, base=args.base)
    return f"error of sinusoidal positions, d_model {args.d_model}, base {args.base:g}"
