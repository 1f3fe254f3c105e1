"""The command `embed`: embeds the lines of a file with a trained or a published model."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import transformer_embed as te
from transformer_embed._src.layers.schemes import positions_of_ids
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
        for flag in ("--stack", "--model-type", "--settings"):
            if getattr(args, flag[2:].replace("-", "_")) is not None:
                raise UserError(
                    f"{flag} is for --from; leave it out: a file that `train` wrote needs no such "
                    f"flag"
                )
    out = writable(args.out, (".npz",), args.file, args.params, args.checkpoint, args.settings)
    lines = contents(args.file).splitlines()
    config, params = _model(args)
    rows = [
        _ids(line, f"{args.file}, line {n}", args.ids, config.vocab_size)
        for n, line in enumerate(lines, 1)
    ]
    pad_id = PAD_ID if config.pad_id is None else config.pad_id
    ids = _padded(rows, pad_id)
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
        "positions": np.tile(positions, (len(ids) // len(positions), 1)),
        "ids": ids,
    }
    write_whole(out, lambda file: np.savez(file, **arrays))
    print(f"{args.out}: {len(ids):,} lines of up to {ids.shape[1]:,} tokens, {config.d_model} wide")


def _model(args: argparse.Namespace) -> tuple[te.EmbedderConfig, Any]:
    """The model that --params or --from names. An error if FILE holds text and the model's tokens
    are not bytes."""
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
    own = getattr(config.scheme, "pad_id", None)
    return np.atleast_2d(
        positions_of_ids(
            config.scheme,
            jnp.asarray(ids if own is None else np.where(ids == PAD_ID, own, ids)),
            config.pad_id,
        )
    )


def _ids(line: bytes, place: str, are_ids: bool, vocab_size: int) -> np.ndarray:
    ids = [_id(token) for token in line.split()] if are_ids else list(line)
    wrong = next((n for n, i in enumerate(ids) if not 0 <= i < vocab_size), None)
    if wrong is not None:
        got = line.split()[wrong][:20].decode(errors="replace") if are_ids else f"byte {ids[wrong]}"
        raise UserError(
            f"{place}: wanted integers from 0 to {vocab_size - 1}, the vocabulary of the "
            f"parameters, got {got!r}"
        )
    return np.array(ids, np.int32)


def _id(token: bytes) -> int:
    return int(token) if token.isdigit() and len(token) < 12 else -1


def _padded(rows: Sequence[np.ndarray], pad_id: int) -> np.ndarray:
    ids = np.full((len(rows), max(map(len, rows), default=0)), pad_id, np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    return ids


def _embeddings(
    config: te.EmbedderConfig,
    params: Any,
    ids: np.ndarray,
    positions: np.ndarray,
    pad_id: int,
    quiet: bool,
) -> np.ndarray:
    """Embeds in batches of one shape, so that it compiles once; the last batch is filled with rows
    of padding, which are dropped."""
    apply = te.make_embedder(dataclasses.replace(config, pad_id=pad_id)).apply
    count, length = ids.shape
    size = min(count, max(1, TOKENS_PER_BATCH // length))
    embeddings = np.empty((count, length, config.d_model), np.float32)
    options = {} if config.num_token_types is None else {"token_types": np.zeros(length, np.int32)}
    for start in progress(range(0, count, size), "embedding", quiet=quiet):
        batch = ids[start : start + size]
        filling = ((0, size - len(batch)), (0, 0))
        if len(positions) == count > 1:
            options["positions"] = np.pad(positions[start : start + size], filling)
        filled = np.pad(batch, filling, constant_values=pad_id)
        embeddings[start : start + size] = apply(
            params, None, filled, is_training=False, **options
        )[: len(batch)]
    return embeddings
