"""The command `embed`: embeds the lines of a file with a trained or a published model."""

import argparse
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import transformer_embed as te
from transformer_embed.cli.arguments import PATH, UserError, contents, writable, write_whole
from transformer_embed.cli.checkpoint import add_checkpoint_flags, read_checkpoint
from transformer_embed.cli.progress import progress

# Pads short lines if the model has no padding id.
PAD_ID = -1
TOKENS_PER_BATCH = 16_384
BYTES = 256


def add_to(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "embed",
        allow_abbrev=False,
        help="embed the lines of a file with a trained model, or with a published one",
        description="Embeds each line of FILE and writes four numpy arrays: embeddings [lines, "
        "length, d_model], mask [lines, length] "
        "(True = a token, False = padding), positions and ids [lines, length]. Shorter lines are "
        "padded at their end with the model's "
        "padding id, or with -1 if it has none; ignore the embeddings where the mask is False.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        **PATH,
        help="lines of text, each byte a token; or, with --ids, lines of token ids",
    )
    parser.add_argument(
        "--from",
        required=True,
        dest="checkpoint",
        metavar="CHECKPOINT",
        **PATH,
        help="the model: a file that `train --out` wrote, or any checkpoint that `inspect` reads; "
        "a published model needs --ids",
    )
    add_checkpoint_flags(parser)
    parser.add_argument(
        "--out", required=True, metavar="X.npz", help="file to write the arrays to", **PATH
    )
    parser.add_argument(
        "--ids", action="store_true", help="FILE holds integer token ids, separated by spaces"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bars")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Writes the arrays and prints their sizes."""
    out = writable(args.out, (".npz",), args.file, args.checkpoint, args.settings)
    lines = contents(args.file).splitlines()
    found = read_checkpoint(args.checkpoint, args)
    config = found.config
    if not args.ids and config.vocab_size != BYTES:
        raise UserError(
            f"the tokens of {args.checkpoint} are not bytes; give a FILE of ids, as its tokenizer "
            f"makes them, and --ids"
        )
    if args.ids:
        rows = [
            _ids(line, f"{args.file}, line {n}", config.vocab_size)
            for n, line in enumerate(lines, 1)
        ]
    else:
        rows = [np.frombuffer(line, np.uint8) for line in lines]
    length = max(map(len, rows))
    if not length:
        raise UserError(
            f"{args.file} holds no tokens; give a file of {'ids' if args.ids else 'text'}"
        )
    pad_id = PAD_ID if config.pad_id is None else config.pad_id
    config = dataclasses.replace(config, pad_id=pad_id)
    ids = np.full((len(rows), length), pad_id, np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    try:
        positions = _positions(config, ids)
    except ValueError as error:
        raise UserError(
            f"{args.file}: a line has {length} tokens ({error}); split such lines"
        ) from error
    arrays: dict[str, Any] = {
        "embeddings": _embeddings(config, found.params, ids, args.quiet),
        "mask": np.asarray(te.padding_mask(ids, pad_id=pad_id)),
        "positions": np.broadcast_to(positions, ids.shape),
        "ids": ids,
    }
    write_whole(out, lambda file: np.savez(file, **arrays))
    print(f"{args.out}: {len(ids):,} lines of up to {length:,} tokens, {config.d_model} wide")


def _positions(config: te.EmbedderConfig, ids: np.ndarray) -> Any:
    """The positions that the model gives to ids, [lines, length] or [length]."""
    if config.scheme is None:
        return np.arange(ids.shape[1], dtype=np.int32)
    return config.scheme._positions(jnp.asarray(ids), config.pad_id)


def _ids(line: bytes, place: str, vocab_size: int) -> list[int]:
    """The ids that a line holds as decimal numbers."""
    ids = []
    for token in line.split():
        # int() takes "1_0" and "+5", and refuses 5,000 digits in words of its own.
        ids.append(int(token) if token.isdigit() and len(token) < 12 else vocab_size)
        if ids[-1] >= vocab_size:
            raise UserError(
                f"{place}: wanted integers from 0 to {vocab_size - 1}, the vocabulary of the "
                f"parameters, got {token[:20].decode(errors='replace')!r}"
            )
    return ids


def _embeddings(config: te.EmbedderConfig, params: Any, ids: np.ndarray, quiet: bool) -> np.ndarray:
    """Embeds in batches of one shape, so that it compiles once.

    The last batch is filled with rows of padding, which are dropped.
    """
    apply = te.Embedder(config).apply
    count, length = ids.shape
    size = min(count, max(1, TOKENS_PER_BATCH // length))
    pad_id: Any = config.pad_id
    ids = np.pad(ids, ((0, -count % size), (0, 0)), constant_values=pad_id)
    embeddings = np.empty((*ids.shape, config.d_model), np.float32)
    token_types = None if config.num_token_types is None else np.zeros(length, np.int32)
    for start in progress(range(0, count, size), "embedding", quiet=quiet):
        batch = slice(start, start + size)
        embeddings[batch] = apply(
            params, None, ids[batch], is_training=False, token_types=token_types
        )
    return embeddings[:count]
