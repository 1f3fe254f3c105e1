"""The command `embed`: embeds the lines of a file with a trained or a published model."""

import argparse
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import transformer_embed as te
from transformer_embed.cli.arguments import UserError, contents, writable, write_whole
from transformer_embed.cli.checkpoint import add_checkpoint_flags, is_ours, read_checkpoint
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
        help="lines of text, each byte a token; or, with --ids, lines of token ids",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--params", metavar="PARAMS.safetensors", help="a model that `train --out` wrote"
    )
    source.add_argument(
        "--from",
        dest="checkpoint",
        metavar="CHECKPOINT",
        help="any checkpoint that `inspect` reads; a published model needs --ids",
    )
    add_checkpoint_flags(parser)
    parser.add_argument("--out", required=True, metavar="X.npz", help="file to write the arrays to")
    parser.add_argument(
        "--ids", action="store_true", help="FILE holds integer token ids, separated by spaces"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bars")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Writes the arrays and prints their sizes."""
    if args.checkpoint is None:
        for name in ("stack", "model_type", "settings"):
            if getattr(args, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} is for --from; leave it out: a file that `train` "
                    f"wrote needs no such flag"
                )
    out = writable(args.out, (".npz",), args.file, args.params, args.checkpoint, args.settings)
    lines = contents(args.file).splitlines()
    config, params = _model(args)
    rows = [
        _ids(line, f"{args.file}, line {n}", args.ids, config.vocab_size)
        for n, line in enumerate(lines, 1)
    ]
    pad_id = PAD_ID if config.pad_id is None else config.pad_id
    ids = np.full((len(rows), max(map(len, rows))), pad_id, np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    if not ids.size:
        raise UserError(
            f"{args.file} holds no tokens; give a file of {'ids' if args.ids else 'text'}"
        )
    try:
        positions = _positions(config, ids)
    except ValueError as error:
        raise UserError(
            f"{args.file}: a line has {ids.shape[1]} tokens ({error}); split such lines"
        ) from error
    arrays: dict[str, Any] = {
        "embeddings": _embeddings(config, params, ids, positions, pad_id, args.quiet),
        "mask": np.asarray(te.padding_mask(ids, pad_id=pad_id)),
        "positions": np.broadcast_to(positions, ids.shape),
        "ids": ids,
    }
    write_whole(out, lambda file: np.savez(file, **arrays))
    print(f"{args.out}: {len(ids):,} lines of up to {ids.shape[1]:,} tokens, {config.d_model} wide")


def _model(args: argparse.Namespace) -> tuple[te.EmbedderConfig, Any]:
    """The model that --params or --from names.

    An error if FILE holds text and the model's tokens are not bytes.
    """
    is_published = args.params is None
    path = args.checkpoint if is_published else args.params
    found = None
    try:
        if is_ours(path) or (is_published and args.ids):
            found = read_checkpoint(path, args)
    except UserError as error:
        advice = "" if is_published else "; write it again with `train --out`"
        raise UserError(f"{error}{advice}") from error
    if found is None and not is_published:
        raise UserError(
            f"{path} was not written by `train --out`; if it is a published model, use --from "
            f"{path}"
        )
    if found is None or (not args.ids and found.config.vocab_size > BYTES):
        raise UserError(
            f"the tokens of {path} are not bytes; give a FILE of ids, as its tokenizer makes "
            f"them, and --ids"
        )
    return found.config, found.params


def _positions(config: te.EmbedderConfig, ids: np.ndarray) -> np.ndarray:
    """int32 [lines, length], or one row if the positions of all lines are equal."""
    if config.scheme is None:
        return np.arange(ids.shape[1], dtype=np.int32)[None]
    return np.atleast_2d(config.scheme._positions(jnp.asarray(ids), config.pad_id))


def _ids(line: bytes, place: str, are_ids: bool, vocab_size: int) -> np.ndarray:
    ids, tokens = np.frombuffer(line, np.uint8), line.split()
    if are_ids:
        ids = np.array(list(map(_id, tokens)), np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        n = outside[0]
        got = tokens[n][:20].decode(errors="replace") if are_ids else f"byte {ids[n]}"
        raise UserError(
            f"{place}: wanted integers from 0 to {vocab_size - 1}, the vocabulary of the "
            f"parameters, got {got!r}"
        )
    return ids


def _id(token: bytes) -> int:
    return int(token) if token.isdigit() and len(token) < 12 else -1


def _embeddings(
    config: te.EmbedderConfig,
    params: Any,
    ids: np.ndarray,
    positions: np.ndarray,
    pad_id: int,
    quiet: bool,
) -> np.ndarray:
    """Embeds in batches of one shape, so that it compiles once.

    The last batch is filled with rows of padding, which are dropped.
    """
    apply = te.Embedder(dataclasses.replace(config, pad_id=pad_id)).apply
    count, length = ids.shape
    size = min(count, max(1, TOKENS_PER_BATCH // length))
    filling = ((0, -count % size), (0, 0))
    ids = np.pad(ids, filling, constant_values=pad_id)
    embeddings = np.empty((*ids.shape, config.d_model), np.float32)
    options = {} if config.num_token_types is None else {"token_types": np.zeros(length, np.int32)}
    has_own_positions = len(positions) == count > 1
    if has_own_positions:
        positions = np.pad(positions, filling)
    for start in progress(range(0, count, size), "embedding", quiet=quiet):
        batch = slice(start, start + size)
        if has_own_positions:
            options["positions"] = positions[batch]
        embeddings[batch] = apply(params, None, ids[batch], is_training=False, **options)
    return embeddings[:count]
