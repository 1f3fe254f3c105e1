"""Files: reads safetensors in pieces, and writes files whole or not at all."""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import mmap
import os
import pathlib
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.pretrained import schema

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}
FLOAT64 = "F64"
INDEX = ".index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_config.json"
PIECE = 2**23
ZIP = b"PK\x03\x04"
PICKLE_STARTS = (ZIP, *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
TEMPORARY = ".transformer_embed-"
# Tied tensors share memory, which save_file refuses: each is cloned.
CONVERT = (
    "convert it with safetensors.torch.save_file({{k: v.clone().contiguous() "
    "for f in glob.glob({!r}) for k, v in torch.load(f, weights_only=True).items()}}, "
    "'model.safetensors')"
)


class Entry(NamedTuple):
    """A tensor's entry in the header."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a checkpoint, by name; a shard is opened when one of its tensors is needed."""

    path: pathlib.Path
    files: Mapping[str, pathlib.Path]
    metadata: Mapping[str, str]
    _opened: dict[pathlib.Path, dict[str, Entry]] = dataclasses.field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        """A tensor's file, dtype and shape; a ValueError if its file does not contain it."""
        file = self.files[name]
        if file not in self._opened:
            self._opened[file] = _header(file)[0]
        entries = self._opened[file]
        if name not in entries:
            want = f"the tensor {schema.shorten(name)}, as {schema.shorten(self.path.name)} says"
            raise arguments.value_error(shown_path(file), want, f"{len(entries)} others")
        return entries[name]

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same bytes."""
        entries = [self.entry(name), self.entry(other)]
        if entries[0][1:] != entries[1][1:]:
            return False
        pieces = zip(_pieces(name, entries[0]), _pieces(other, entries[1]), strict=True)
        return all(one.tobytes() == two.tobytes() for (_, one), (_, two) in pieces)

    def read(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, *, transposed: bool = False
    ) -> jax.Array:
        """Reads a tensor of this shape, apart from leading axes of 1. It keeps its dtype, but
        float64 is rounded to `dtype`."""
        entry = self.entry(name)
        with np.errstate(over="ignore"):
            array = _read_in_pieces(name, entry, DTYPES.get(entry.dtype, dtype)).reshape(
                shape[::-1] if transposed else shape
            )
        if entry.dtype not in DTYPES and np.isinf(array).any():
            want = f"numbers that fit into {dtype}"
            raise arguments.value_error(
                f"{shown_path(entry.file)}: {schema.shorten(name)}", want, "larger ones"
            )
        # Unlike jnp.asarray, this makes no copy on a CPU.
        return jax.device_put(np.ascontiguousarray(array.T) if transposed else array)


def open_tensors(path: str | os.PathLike[str]) -> Tensors:
    """The tensors of a safetensors file, of an index file with its shards, or of a folder that
    holds one of the two."""
    if not isinstance(path, str | os.PathLike):
        raise arguments.type_error("path", "a str or a path", type(path).__name__)
    found = _find(pathlib.Path(path))
    if found.name.endswith(".json"):
        return Tensors(found, _shards(found), {})
    entries, metadata = _header(found)
    return Tensors(found, dict.fromkeys(entries, found), metadata, {found: entries})


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path for a message."""
    return schema.shorten(os.fspath(path))


def _find(path: pathlib.Path) -> pathlib.Path:
    if "\0" in str(path):
        raise arguments.value_error(
            "path", "a path without null characters", schema.short_repr(str(path))
        )
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, _missing_file_message(path), shown_path(path))
    if not path.is_dir():
        return path
    for name in (WHOLE, WHOLE + INDEX):
        if (path / name).exists():
            return path / name
    names = sorted(name.name for name in path.iterdir())
    if any(name.startswith("pytorch_model") for name in names):
        convert = CONVERT.format("pytorch_model*.bin")
        raise ValueError(f"{shown_path(path)}: {convert}: a pickle may run code and is not opened")
    if ADAPTER in names:
        want = (
            "a whole model, which peft's AutoPeftModel.from_pretrained(folder).merge_and_unload()"
            ".save_pretrained(new_folder) writes, or the folder of the base model"
        )
        raise arguments.value_error(shown_path(path), want, "the changes of an adapter")
    what = f"a folder with {WHOLE} or {WHOLE}{INDEX}"
    others = [name for name in names if name.endswith(".safetensors")]
    hint = f" (or pass the file: {shown_path(others[0])})" if others else ""
    raise arguments.value_error(shown_path(path), what + hint, "neither")


def _missing_file_message(path: pathlib.Path) -> str:
    """The message for a path that does not exist, with a hint if it may be a model's name: one or
    two words without a suffix."""
    is_name = (
        not path.is_absolute()
        and len(path.parts) <= 2
        and path.suffix not in (".safetensors", ".json", ".bin")
    )
    hint = ""
    if is_name:
        call = "huggingface_hub.snapshot_download(name)"
        hint = f" (for a model's name, pass the folder that {call} returns)"
    return os.strerror(errno.ENOENT) + hint


def _shards(path: pathlib.Path) -> dict[str, pathlib.Path]:
    names = read_json(path).get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise arguments.value_error(shown_path(path), "a weight_map from tensors to files", "none")
    elsewhere = next(
        (
            name
            for name in names.values()
            if name != pathlib.Path(name).name or name in ("", "..") or "\0" in name
        ),
        None,
    )
    if elsewhere is not None:
        raise arguments.value_error(
            shown_path(path), "files in the same folder", schema.short_repr(elsewhere)
        )
    return {tensor: path.parent / name for tensor, name in names.items()}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; a ValueError if the file holds anything else."""
    _regular_mode(path)
    value = schema.parse(shown_path(path), path.read_bytes())
    if not isinstance(value, dict):
        raise arguments.value_error(shown_path(path), "a JSON object", type(value).__name__)
    return value


def _header(path: pathlib.Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Each tensor's dtype and shape, and the metadata."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (slow to load)

    _regular_mode(path)
    with open(path, "rb") as file:
        start = file.read(256)
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is not a mapping)
            entries = {
                name: Entry(path, each.get_dtype(), tuple(each.get_shape()))
                for name, each in slices.items()
            }
            return entries, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise arguments.value_error(
            shown_path(path),
            "a whole safetensors file",
            _describe_contents(path.name, start, error),
        ) from error


def _describe_contents(name: str, start: bytes, error: Exception) -> str:
    if start.startswith(ZIP) and b".npy" in start:
        convert = f"safetensors.numpy.save_file(dict(numpy.load({name!r})), 'model.safetensors')"
        return f"an archive of numpy arrays; convert it with {convert}"
    if start.startswith(PICKLE_STARTS):
        return f"a pickle, which may run code and is not opened; {CONVERT.format(name)}"
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of git-lfs; fetch the file itself with `git lfs pull`"
    reason = str(error).removeprefix("Error while deserializing header: ")[:120]
    return f"a file that is cut off, damaged or of another kind ({reason})"


def _read_in_pieces(name: str, entry: Entry, dtype: np.dtype) -> np.ndarray:
    """A copy of a tensor, read in pieces along its first axis that is not 1.

    The file is opened again for each piece, so that its pages leave memory once they are copied.
    The copy starts at a page boundary, so that jax does not copy it again on a CPU. It avoids the
    huge pages that numpy asks for, which are slow to get on a busy machine.
    """
    size = math.prod(entry.shape)
    buffer = np.frombuffer(mmap.mmap(-1, max(size * dtype.itemsize, 1)), dtype, size).reshape(
        entry.shape
    )
    for piece, array in _pieces(name, entry):
        buffer[piece] = array
    return buffer


def _pieces(name: str, entry: Entry) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """The pieces of a tensor, each with its place."""
    from safetensors import safe_open  # noqa: PLC0415 (slow to load)

    ones = next((n for n, length in enumerate(entry.shape) if length != 1), 0)
    itemsize = DTYPES.get(entry.dtype, np.dtype(float)).itemsize
    rows = max(1, PIECE // max(1, math.prod(entry.shape[ones + 1 :]) * itemsize))
    count = entry.shape[ones] if math.prod(entry.shape) else 0
    for start in range(0, count, rows):
        piece = (slice(0, 1),) * ones + (slice(start, min(start + rows, count)),)
        with safe_open(entry.file, framework="numpy") as file:
            yield piece, file.get_slice(name)[piece]


def write_tensors(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, whole or not at all.

    `save_file` of safetensors reports a full disk without an errno, and before 0.8 it copies all
    arrays.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    # Wider dtypes first, so that each array starts at a multiple of its item size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        array, start = arrays[name], end
        end += array.nbytes
        offsets = {"shape": array.shape, "data_offsets": [start, end]}
        header[name] = {"dtype": codes[array.dtype]} | offsets
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write(file: IO[bytes]) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)

    write_whole(path, write)


def write_whole(path: pathlib.Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a temporary file and renames it, so that the path always has a whole file, old or
    new."""
    with temporary(path) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, path)


@contextlib.contextmanager
def temporary(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """A new file in the same folder, with the mode of the file at `path`; removed at the end unless
    it was renamed.

    A process locks its file while it lives. Unlocked ones were left by killed processes and are
    removed first.
    """
    want = "a regular file, or a new name in a folder that exists"
    mode = _regular_mode(path, want) if path.exists() else None
    for name in path.parent.glob(f"{TEMPORARY}*.tmp"):
        if name.is_file():
            with contextlib.suppress(OSError), open(name, "rb") as stale:
                if _lock(stale):
                    name.unlink()
    # A private file's replacement must not be readable by others, not even while it is written.
    with _new_locked_file(path.parent, 0o666 if mode is None else 0o600) as file:
        name = pathlib.Path(file.name)
        try:
            if mode is not None:
                name.chmod(mode)
            yield file
        finally:
            name.unlink(missing_ok=True)


def _new_locked_file(folder: pathlib.Path, mode: int) -> IO[bytes]:
    while True:
        name = folder / f"{TEMPORARY}{secrets.token_hex(8)}.tmp"
        file = open(name, "xb", opener=functools.partial(os.open, mode=mode))  # noqa: SIM115
        _lock(file, waits=True)
        if name.exists():
            return file
        # Another process took it for one that was left, before it was locked.
        file.close()


def _regular_mode(path: pathlib.Path, want: str = "a regular file") -> int:
    """The mode of a regular file. A ValueError for anything else: to open a pipe is to wait for its
    other end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        got = f"{kinds.get(stat.S_IFMT(mode), 'a device')}, {shown_path(path)}"
        raise arguments.value_error("path", want, got)
    return stat.S_IMODE(mode)


def _lock(file: IO[bytes], *, waits: bool = False) -> bool:
    """Locks a file, and returns whether it worked; the system releases the lock when the process
    ends."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
