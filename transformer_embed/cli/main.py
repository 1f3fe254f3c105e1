"""Train a small Transformer; embed a file with what it, or a published model, learned; inspect a checkpoint; show pictures."""

import argparse
import dataclasses
import hashlib
import os
import pathlib
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import transformer_embed as te
from transformer_embed import pretrained
from transformer_embed.cli.show import add_show
from transformer_embed.cli.user import UserError, at_least_one, contents, reason, seed, writable, write_whole, writing
from transformer_embed.pretrained import files as _files

PROGRAM = "transformer-embed"
PAD_ID = -1
LIBRARY_BYTES = 8_000_000
TOKENS_A_BATCH = 16_384


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 2 after bad input, 130 after Ctrl-C."""
    try:
        args, unknown = _parser().parse_known_args(argv)
        if unknown:
            raise UserError(f"unrecognized arguments: {' '.join(unknown)}; `{PROGRAM} {args.name} --help` lists what there is")
        args.command(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # What read the output has ended; Python would flush the rest once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UserError as error:
        return _failed(f"error: {error}", 2)
    except MemoryError:
        return _failed("error: out of memory; give a smaller FILE, or split it and its longest lines", 2)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    return 0


def _failed(message: str, status: int) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {te.__version__}")
    commands = parser.add_subparsers(required=True, dest="name", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train a small causal Transformer on text, with and without positions",
        description="Trains a small causal Transformer (2 layers, 128 wide, 4 heads, a context of 128 bytes) on all but the last 5% of "
        "a text, with sinusoidal positions and with none, and scores both, beside the frequencies of single bytes, on the rest. About a "
        "minute on 2 CPU cores. The last line of output has the bits per byte, lower is better; equal arguments give equal figures on "
        "one machine.",
    )
    train.add_argument("files", nargs="*", metavar="FILE", help="text to learn (default: the source of Python's standard library)")
    train.add_argument("--out", metavar="PARAMS.safetensors", help="where to write the parameters of the model with sinusoidal positions")
    train.add_argument("--steps", type=at_least_one, default=750, metavar="N", help="training steps a model (default: %(default)s)")
    train.add_argument("--seed", type=seed, default=0, metavar="N", help="of the parameters and the batches (default: %(default)s)")
    train.set_defaults(command=_train)
    embed = commands.add_parser(
        "embed",
        allow_abbrev=False,
        help="embed the lines of a file with trained parameters, or with those of a published model",
        description="Embeds each line of a file and writes, as numpy arrays: embeddings [lines, length, d_model], mask [lines, length] "
        "(True = a token), positions and ids [lines, length]. Shorter lines are padded at their end with id -1; the mask hides what the "
        "embeddings hold there.",
    )
    embed.add_argument("file", metavar="FILE", help="lines of text, each byte a token; or, with --ids, lines of ids")
    source = embed.add_mutually_exclusive_group(required=True)
    source.add_argument("--params", metavar="PARAMS.safetensors", help="as `train --out` writes them")
    source.add_argument("--from", dest="checkpoint", metavar="CHECKPOINT", help="as `inspect` reads them; FILE then holds ids")
    _add_stack(embed)
    embed.add_argument("--out", required=True, metavar="X.npz", help="where to write the arrays")
    embed.add_argument("--ids", action="store_true", help="FILE holds integer ids, separated by spaces")
    embed.set_defaults(command=_embed)
    for command in (train, embed):
        command.add_argument("--quiet", action="store_true", help="show no progress bars")
    _add_inspect(commands)
    add_show(commands)
    return parser


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        allow_abbrev=False,
        help="print the input layer found in a checkpoint",
        description="Prints what the input layer of a published model's checkpoint is: the configuration, each parameter with the tensor "
        "that it comes from, and the arguments of rotary embeddings or of a bias, where the model has them.",
    )
    inspect.add_argument("checkpoint", metavar="CHECKPOINT", help="a safetensors file, its index file if it is in shards, or their folder")
    _add_stack(inspect)
    inspect.set_defaults(command=_inspect)


def _add_stack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stack", choices=("encoder", "decoder"), help="of a checkpoint with both (default: encoder)")


def _train(args: argparse.Namespace) -> None:
    out = args.out and writable(args.out, *args.files)
    text, source = _texts(args.files) if args.files else _library()
    from transformer_embed.cli import train as small  # noqa: PLC0415 (optax is slow to load: flags and files are checked first)

    if len(text) < small.SHORTEST_TEXT:
        raise UserError(f"the text has {len(text)} bytes; give FILEs of {small.SHORTEST_TEXT} bytes or more in all")
    print(f"text: {source}, {len(text):,} bytes\nsha256: {hashlib.sha256(text).hexdigest()}", flush=True)
    options = {"steps": args.steps, "seed": args.seed, "quiet": args.quiet}
    sinusoidal = small.train(text, te.Sinusoidal(), "sinusoidal", **options)
    none = small.train(text, None, "none", **options)
    unigram = small.unigram_bits(text)
    if out:
        _write_params(out, sinusoidal.config, sinusoidal.params)
    print(f"\n{'model':<30}{'parameters':>12}{'bits per byte':>16}")
    size = sum(leaf.size for leaf in jax.tree.leaves(none.params))
    rows = [("sinusoidal positions", size, sinusoidal.bits), ("no positions", size, none.bits), ("unigram", small.VOCAB_SIZE - 1, unigram)]
    for name, parameters, bits in rows:
        print(f"{name:<30}{parameters:>12,}{bits:>16.2f}")
    print(f"\nbits per byte: sinusoidal {sinusoidal.bits:.2f}, none {none.bits:.2f}, unigram {unigram:.2f}")


def _texts(paths: Sequence[str]) -> tuple[bytes, str]:
    return b"".join(contents(path) for path in paths), ", ".join(paths)


def _library() -> tuple[bytes, str]:
    """The modules at the top of the standard library, in sorted order; its packages, tests among them, are left out."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:LIBRARY_BYTES]
    if not text:
        raise UserError(f"no source of the standard library in {folder}; name a FILE to learn")
    return text, f"Python {sys.version.split()[0]} standard library"


def _embed(args: argparse.Namespace) -> None:
    if args.checkpoint is not None and not args.ids:
        raise UserError(f"the tokens of {args.checkpoint} are no bytes; give a FILE of ids, as its tokenizer makes them, and --ids")
    if args.checkpoint is None and args.stack is not None:
        raise UserError("--stack is for --from: what `train` writes has one stack; leave it out")
    out = writable(args.out, args.file, args.params, args.checkpoint)
    lines = contents(args.file).splitlines()
    config, params = _read_params(args.params) if args.checkpoint is None else _read_checkpoint(args)[:2]
    rows = [_ids(line, f"{args.file}, line {n}", args.ids, config.vocab_size) for n, line in enumerate(lines, 1)]
    ids = _padded(rows)
    if not ids.size:
        raise UserError(f"{args.file} holds no tokens; give a file of {'ids' if args.ids else 'text'}")
    try:
        positions = _positions(config.positions, ids)
    except ValueError as error:
        raise UserError(f"{args.file}: a line has {ids.shape[1]} tokens ({error}); split such lines") from error
    arrays: dict[str, Any] = {
        "embeddings": _embeddings(dataclasses.replace(config, pad_id=PAD_ID), params, ids, positions, args.quiet),
        "mask": np.asarray(te.padding_mask(ids, pad_id=PAD_ID)),
        "positions": np.tile(positions, (len(ids) // len(positions), 1)),
        "ids": ids,
    }
    write_whole(out, lambda file: np.savez(file, **arrays))
    print(f"{out}: {len(ids):,} lines of up to {ids.shape[1]:,} tokens, {config.d_model} wide")


def _positions(scheme: Any, ids: np.ndarray) -> np.ndarray:
    """int32 [lines, length], or one row for all lines alike."""
    if scheme is None:
        return np.arange(ids.shape[1], dtype=np.int32)[None]
    pad_id = getattr(scheme, "pad_id", None)
    return np.atleast_2d(scheme.positions(jnp.asarray(ids if pad_id is None else np.where(ids == PAD_ID, pad_id, ids))))


def _inspect(args: argparse.Namespace) -> None:
    found = _read_checkpoint(args)
    print(args.checkpoint)
    for field in dataclasses.fields(found.config):
        print(f"  {field.name:<18}{getattr(found.config, field.name)}")
    for name, tensor in sorted((found.names or {}).items()):
        module, leaf = name.rsplit("/", 1)
        array = found.params[module][leaf]
        print(f"{name}\n  {array.dtype}{list(array.shape)}, from {tensor}")
    turning = found.rotary or {}
    by_layer = {f"rotary, {kind}": each for kind, each in turning.items() if isinstance(each, dict)} or {"rotary": turning}
    for name, options in by_layer.items():
        if options:
            print(f"{name}\n  apply_rotary(x, positions, {_arguments(options)})")
    if found.bias is not None:
        call = "RelativePositionBias(" if "num_buckets" in found.bias else "alibi_bias(query_positions, key_positions, "
        print(f"bias\n  {call}{_arguments(found.bias)})")


def _arguments(options: Any) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _ids(line: bytes, place: str, are_ids: bool, vocab_size: int) -> np.ndarray:
    ids = [_id(token) for token in line.split()] if are_ids else list(line)
    wrong = next((n for n, i in enumerate(ids) if not 0 <= i < vocab_size), None)
    if wrong is not None:
        got = line.split()[wrong][:20].decode(errors="replace") if are_ids else f"byte {ids[wrong]}"
        raise UserError(f"{place}: wanted integers from 0 to {vocab_size - 1}, the vocabulary of the parameters, got {got!r}")
    return np.array(ids, np.int32)


def _id(token: bytes) -> int:
    return int(token) if token.isdigit() and len(token) < 12 else -1


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    ids = np.full((len(rows), max(map(len, rows), default=0)), PAD_ID, np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    return ids


def _embeddings(config: te.EmbedderConfig, params: Any, ids: np.ndarray, positions: np.ndarray, quiet: bool) -> np.ndarray:
    """One shape for all batches, so one compilation: the last is filled with rows of padding, which are then dropped."""
    from tqdm import tqdm  # noqa: PLC0415

    apply = te.make_embedder(config).apply
    count, length = ids.shape
    size = min(count, max(1, TOKENS_A_BATCH // length))
    embeddings = np.empty((count, length, config.d_model), np.float32)
    options = {} if config.num_token_types is None else {"token_types": np.zeros(length, np.int32)}
    for start in tqdm(range(0, count, size), desc="embedding", ncols=79, disable=quiet):
        batch = ids[start : start + size]
        filling = ((0, size - len(batch)), (0, 0))
        if len(positions) == count > 1:
            options["positions"] = np.pad(positions[start : start + size], filling)
        filled = np.pad(batch, filling, constant_values=PAD_ID)
        embeddings[start : start + size] = apply(params, None, filled, is_training=False, **options)[: len(batch)]
    return embeddings


def _write_params(out: pathlib.Path, config: te.EmbedderConfig, params: Any) -> None:
    with writing(out):
        pretrained.save_embedder(out, config, params)


def _read_params(path: str) -> tuple[te.EmbedderConfig, Any]:
    """The config in a file of `train --out`, and the parameters of the embedder that it describes."""
    contents(path, at_most=1)
    try:
        if pretrained.CONFIG not in _files.open_tensors(path).metadata:
            raise UserError(f"{path} describes no embedder of this program; give a file that `train --out` wrote, or use --from")
        return pretrained.load_embedder(path)[:2]
    except (OSError, ValueError) as error:
        raise UserError(f"{error}; write it again with `train --out`") from error


def _read_checkpoint(args: argparse.Namespace) -> pretrained.PretrainedInput:
    try:
        return pretrained.load_embedder(args.checkpoint, stack=args.stack)
    except OSError as error:
        raise UserError(f"cannot read {args.checkpoint}: {reason(error)}; name a file that exists and that you may read") from error
    except ValueError as error:
        raise UserError(str(error)) from error
