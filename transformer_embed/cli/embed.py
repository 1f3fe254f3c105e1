"""The command `embed`: embeds the lines of a file with a trained or a published model."""

import argparse
import dataclasses
import functools
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

import transformer_embed as te
from transformer_embed._src.pretrained.files import open_whole
from transformer_embed.cli.arguments import add_checkpoint_flags, read_checkpoint, writable

# Pads short lines if the model has no padding id.
PAD_ID = -1
TOKENS_PER_BATCH = 16_384
BYTES = 256


def add_to(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "embed",
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
        help="lines of text, each byte a token; or, with --ids, lines of token ids",
    )
    parser.add_argument(
        "--from",
        required=True,
        dest="checkpoint",
        metavar="CHECKPOINT",
        help="the model: a file that `train --out` wrote, or any checkpoint that `inspect` reads; "
        "a published model needs --ids",
    )
    add_checkpoint_flags(parser)
    parser.add_argument("--out", required=True, metavar="X.npz", help="file to write the arrays to")
    parser.add_argument(
        "--ids", action="store_true", help="FILE holds integer token ids, separated by spaces"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Writes the arrays and prints their sizes."""
    out = writable(args.out, (".npz",), args.file, args.checkpoint)
    lines = pathlib.Path(args.file).read_bytes().splitlines()
    found = read_checkpoint(args)
    config = found.config
    if not args.ids and config.vocab_size != BYTES:
        raise ValueError(
            f"the tokens of {args.checkpoint} are not bytes; give a FILE of ids, as its tokenizer "
            f"makes them, and --ids"
        )
    rows = [[int(token) for token in line.split()] if args.ids else [*line] for line in lines]
    length = max(map(len, rows), default=0)
    if not length:
        raise ValueError(f"{args.file} holds no tokens")
    pad_id = PAD_ID if config.pad_id is None else config.pad_id
    config = dataclasses.replace(config, pad_id=pad_id)
    # In int32, a wrong id could be another one.
    ids = np.array([row + [pad_id] * (length - len(row)) for row in rows], np.int64)
    te.check_batch(np.where(ids == pad_id, 0, ids), vocab_size=config.vocab_size)
    ids = ids.astype(np.int32)
    positions = np.arange(length, dtype=np.int32)
    if config.scheme is not None:
        positions = config.scheme.positions(jnp.asarray(ids), pad_id)
    arrays: dict[str, Any] = {
        "embeddings": _embeddings(config, found.params, ids),
        "mask": ids != pad_id,
        "positions": np.broadcast_to(positions, ids.shape),
        "ids": ids,
    }
    with open_whole(out) as file:
        np.savez(file, **arrays)
    print(f"{args.out}: {len(ids):,} lines of up to {length:,} tokens, {config.d_model} wide")


def _embeddings(config: te.EmbedderConfig, params: Any, ids: np.ndarray) -> np.ndarray:
    """The embeddings of rows of ids, of which a batch is embedded at a time."""
    count, length = ids.shape
    size = min(count, max(1, TOKENS_PER_BATCH // length))
    # All batches have one shape, so that it compiles once: rows come again in the last one.
    batches = np.resize(ids, (-(-count // size), size, length))
    token_types = None if config.num_token_types is None else np.zeros(length, np.int32)
    apply = functools.partial(te.Embedder(config).apply, params, None, is_training=False)
    found = [np.asarray(apply(batch, token_types=token_types), np.float32) for batch in batches]
    return np.concatenate(found)[:count]
