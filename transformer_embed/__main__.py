"""The command line: train a small Transformer with and without positions; embed a file with what it learned."""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import transformer_embed as te

PROGRAM = "transformer-embed"
PAD_ID = -1
LIBRARY_BYTES = 8_000_000
TOKENS_A_BATCH = 16_384
CONFIG = "transformer_embed.config"
POSITIONS = {"sinusoidal": te.Sinusoidal, "learned": te.Learned}


class UserError(Exception):
    """What the user can put right; the message is the one line that says how."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 2 after bad input, 130 after Ctrl-C."""
    try:
        args = _parser().parse_args(argv)
        args.command(args)
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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
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
    train.add_argument("--steps", type=_steps, default=750, metavar="N", help="training steps a model (default: %(default)s)")
    train.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the parameters and the batches (default: %(default)s)")
    train.set_defaults(command=_train)
    embed = commands.add_parser(
        "embed",
        allow_abbrev=False,
        help="embed the lines of a file with trained parameters",
        description="Embeds each line of a file and writes, as numpy arrays: embeddings [lines, length, d_model], mask [lines, length] "
        "(True = a token), positions and ids [lines, length]. Shorter lines are padded at their end with id -1; the mask hides what the "
        "embeddings hold there.",
    )
    embed.add_argument("file", metavar="FILE", help="lines of text, each byte a token; or, with --ids, lines of ids")
    embed.add_argument("--params", required=True, metavar="PARAMS.safetensors", help="as `train --out` writes them")
    embed.add_argument("--out", required=True, metavar="X.npz", help="where to write the arrays")
    embed.add_argument("--ids", action="store_true", help="FILE holds integer ids, separated by spaces")
    embed.set_defaults(command=_embed)
    for command in (train, embed):
        command.add_argument("--quiet", action="store_true", help="show no progress bars")
    return parser


def _steps(text: str) -> int:
    return _number(text, 1, 10**9)


def _seed(text: str) -> int:
    return _number(text, 0, 2**31 - 1)


def _number(text: str, lowest: int, highest: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and lowest <= int(text) <= highest):
        raise argparse.ArgumentTypeError(f"wanted an integer from {lowest} to {highest}, got {text[:20]!r}")
    return int(text)


def _train(args: argparse.Namespace) -> None:
    out = args.out and _writable(args.out)
    text, source = _texts(args.files) if args.files else _library()
    from transformer_embed import _train as small  # noqa: PLC0415 (optax is slow to load: flags and files are checked first)

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
    return b"".join(_contents(path) for path in paths), ", ".join(paths)


def _library() -> tuple[bytes, str]:
    """The modules at the top of the standard library, in sorted order; its packages, tests among them, are left out."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:LIBRARY_BYTES]
    if not text:
        raise UserError(f"no source of the standard library in {folder}; name a FILE to learn")
    return text, f"Python {sys.version.split()[0]} standard library"


def _embed(args: argparse.Namespace) -> None:
    out = _writable(args.out)
    lines = _contents(args.file).splitlines()
    config, params = _read_params(args.params)
    rows = [_ids(line, f"{args.file}, line {n}", args.ids, config.vocab_size) for n, line in enumerate(lines, 1)]
    ids = _padded(rows)
    if not ids.size:
        raise UserError(f"{args.file} holds no tokens; give a file of {'ids' if args.ids else 'text'}")
    if isinstance(config.positions, te.Learned) and ids.shape[1] > config.positions.max_len:
        raise UserError(f"{args.file}: a line has {ids.shape[1]} tokens; split lines longer than max_len = {config.positions.max_len}")
    arrays = {
        "embeddings": _embeddings(dataclasses.replace(config, pad_id=PAD_ID), params, ids, args.quiet),
        "mask": np.asarray(te.padding_mask(ids, pad_id=PAD_ID)),
        "positions": np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1)),
        "ids": ids,
    }
    _write_whole(out, lambda file: np.savez(file, **arrays))
    print(f"{out}: {len(ids):,} lines of up to {ids.shape[1]:,} tokens, {config.d_model} wide")


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


def _embeddings(config: te.EmbedderConfig, params: Any, ids: np.ndarray, quiet: bool) -> np.ndarray:
    """One shape for all batches, so one compilation: the last is filled with rows of padding, which are then dropped."""
    from tqdm import tqdm  # noqa: PLC0415

    apply = te.make_embedder(config).apply
    count, length = ids.shape
    size = min(count, max(1, TOKENS_A_BATCH // length))
    embeddings = np.empty((count, length, config.d_model), np.float32)
    for start in tqdm(range(0, count, size), desc="embedding", ncols=79, disable=quiet):
        batch = ids[start : start + size]
        filled = np.pad(batch, ((0, size - len(batch)), (0, 0)), constant_values=PAD_ID)
        embeddings[start : start + size] = apply(params, None, filled, is_training=False)[: len(batch)]
    return embeddings


def _write_params(out: pathlib.Path, config: te.EmbedderConfig, params: Any) -> None:
    from safetensors.numpy import save  # noqa: PLC0415

    arrays = {f"{module}/{name}": np.asarray(array) for module, leaves in params.items() for name, array in leaves.items()}
    data = save(arrays, metadata={CONFIG: _config_to_json(config)})
    _write_whole(out, lambda file: file.write(data))


def _read_params(path: str) -> tuple[te.EmbedderConfig, dict[str, dict[str, jax.Array]]]:
    """The config in a file of `train --out`, and the parameters of the embedder that it describes."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    _contents(path, at_most=1)
    try:
        with safe_open(path, framework="numpy") as file:
            config = _config_from_json((file.metadata() or {}).get(CONFIG))
            if config is None:
                raise UserError(f"{path} describes no embedder of this program; give a file that `train --out` wrote")
            wanted = jax.eval_shape(te.make_embedder(config).init, jax.random.key(0))
            params = {
                module: {name: _tensor(file, path, f"{module}/{name}", leaf) for name, leaf in leaves.items()}
                for module, leaves in wanted.items()
            }
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is no whole safetensors file ({error}); write it again with `train --out`") from error
    return config, params


def _tensor(file: Any, path: str, name: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    array = file.get_tensor(name) if name in set(file.keys()) else None
    if array is None or array.shape != wanted.shape or array.dtype != wanted.dtype:
        want = f"{wanted.dtype.name}{list(wanted.shape)}"
        got = "none" if array is None else f"{array.dtype.name}{list(array.shape)}"
        raise UserError(f"{path}: wanted a parameter {name}, {want}, got {got}; write the file again with `train --out`")
    return jnp.asarray(array)


def _config_to_json(config: te.EmbedderConfig) -> str:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    kinds = {kind: name for name, kind in POSITIONS.items()}
    if config.positions is not None:
        fields["positions"] = {"kind": kinds[type(config.positions)], **dataclasses.asdict(config.positions)}
    return json.dumps({**fields, "param_dtype": jnp.dtype(config.param_dtype).name, "dtype": jnp.dtype(config.dtype).name})


def _config_from_json(text: str | None) -> te.EmbedderConfig | None:
    """None for what is no config, or one that asks for more than a line of ids."""
    try:
        fields = json.loads(text or "")
        if fields["positions"] is not None:
            fields["positions"] = POSITIONS[fields["positions"].pop("kind")](**fields["positions"])
        config = te.EmbedderConfig(**fields)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return config if config.num_token_types is None else None


def _contents(path: str, at_most: int = -1) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(at_most)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {_reason(error)}; name a file that exists and that you may read") from error
    if not data:
        raise UserError(f"{path} is empty; name a file that holds something")
    return data


def _writable(name: str) -> pathlib.Path:
    """The path, once a file was made beside it and removed: hours of work must not end at a folder that takes no file."""
    try:
        path = pathlib.Path(os.path.realpath(name))
        if path.exists() and not path.is_file():
            raise UserError(f"cannot write {name}: it is no regular file; name a file")
        with _temporary(path):
            pass
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {name}: {_reason(error)}; name a file in a folder that exists and that you may write to") from error
    return path


def _write_whole(path: pathlib.Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes beside the file, then takes its place: what is there is old and whole, or new and whole."""
    try:
        with _temporary(path) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {_reason(error)}; make room, or name a file elsewhere") from error


@contextlib.contextmanager
def _temporary(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """A new file beside another, gone at the end unless it was renamed."""
    name = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(name, "xb") as file:
            yield file
    finally:
        name.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


if __name__ == "__main__":
    sys.exit(main())
