"""Files: safetensors read by pieces, and files that are written whole or not at all."""

import contextlib
import dataclasses
import json
import math
import mmap
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_embed import _checks

DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}
INDEX = ".index.json"
WHOLE = "model.safetensors"
PIECE = 2**25
PICKLE_STARTS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))


class Entry(NamedTuple):
    """Where one tensor lies."""

    file: pathlib.Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a checkpoint, by name; a shard is opened when one of its tensors is asked for."""

    path: pathlib.Path
    files: Mapping[str, pathlib.Path]
    metadata: Mapping[str, str]
    _opened: dict[pathlib.Path, dict[str, Entry]] = dataclasses.field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        """Where a tensor lies; a ValueError if its file lacks it."""
        file = self.files[name]
        if file not in self._opened:
            self._opened[file] = _header(file)[0]
        entries = self._opened[file]
        if name not in entries:
            raise ValueError(_checks.wanted(str(file), f"the tensor {name}, as {self.path.name} says", f"{len(entries)} others"))
        return entries[name]

    def read(self, name: str, *, transposed: bool = False) -> jax.Array:
        """The tensor, copied once from the mapped file."""
        entry = self.entry(name)
        if entry.dtype not in DTYPES:
            raise ValueError(_checks.wanted(f"{entry.file}: {name}", "a dtype among F32, BF16 and F16", entry))
        array = _copied(entry, DTYPES[entry.dtype])
        # Unlike jnp.asarray, this makes no copy on a CPU.
        return jax.device_put(np.ascontiguousarray(array.T) if transposed else array)


def open_tensors(path: str | os.PathLike[str]) -> Tensors:
    """The tensors of a safetensors file, of an index file with its shards, or of a folder that holds one of the two."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(_checks.wanted("path", "a str or a path", type(path).__name__))
    found = _find(pathlib.Path(path))
    if found.name.endswith(".json"):
        return Tensors(found, _shards(found), {})
    entries, metadata = _header(found)
    return Tensors(found, dict.fromkeys(entries, found), metadata, {found: entries})


def _find(path: pathlib.Path) -> pathlib.Path:
    if not path.is_dir():
        return path
    found = next((path / name for name in (WHOLE, WHOLE + INDEX) if (path / name).is_file()), None)
    if found is None:
        raise ValueError(_checks.wanted(str(path), f"a folder with {WHOLE} or {WHOLE}{INDEX}", "neither"))
    return found


def _shards(path: pathlib.Path) -> dict[str, pathlib.Path]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(_checks.wanted(str(path), "a weight_map from tensors to files", "none"))
    elsewhere = next((name for name in names.values() if name != pathlib.Path(name).name or name in ("", "..")), None)
    if elsewhere is not None:
        raise ValueError(_checks.wanted(str(path), "files of the same folder", repr(elsewhere)))
    return {tensor: path.parent / name for tensor, name in names.items()}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; a ValueError if the file holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(_checks.wanted(str(path), "JSON", str(error))) from error
    if not isinstance(value, dict):
        raise ValueError(_checks.wanted(str(path), "a JSON object", type(value).__name__))
    return value


def _header(path: pathlib.Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Each tensor's place, and the metadata. The package checks the header: offsets without holes that end where the file does."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (slow to load)

    with open(path, "rb") as file:
        start = file.read(64)
        try:
            with safe_open(path, framework="numpy") as checked:
                metadata = checked.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ValueError(_checks.wanted(str(path), "a whole safetensors file", _instead(start, error))) from error
        size = int.from_bytes(start[:8], "little")
        file.seek(8)
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    places = {
        name: Entry(path, 8 + size + tensor["data_offsets"][0], tensor["dtype"], tuple(tensor["shape"])) for name, tensor in header.items()
    }
    return places, metadata


def _instead(start: bytes, error: Exception) -> str:
    if start.startswith(PICKLE_STARTS):
        return "a pickle, which may run code and is not opened; save its state_dict with safetensors.torch.save_file"
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of git-lfs; fetch the file itself with `git lfs pull`"
    return str(error)


def _copied(entry: Entry, dtype: np.dtype) -> np.ndarray:
    """By pieces, each mapped for itself: pages of the file that were read leave the memory again.

    The copy begins with a page of memory, so that jax takes it as it is on a CPU, and is not made of the huge pages that numpy asks
    for, which a busy machine is slow to find.
    """
    size = math.prod(entry.shape) * dtype.itemsize
    buffer = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size)
    for at in range(0, size, PIECE):
        piece = buffer[at : at + PIECE]
        piece[:] = np.memmap(entry.file, np.uint8, "r", entry.start + at, piece.shape)
    return buffer.view(dtype).reshape(entry.shape)


def write_tensors(path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """A safetensors file, written whole or not at all; no copy of the arrays is made."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    # Wider ones first, so that each array starts at a multiple of its item's size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    ends = np.cumsum([0, *(arrays[name].nbytes for name in names)]).tolist()
    header = {"__metadata__": dict(metadata)} | {
        name: {"dtype": codes[arrays[name].dtype], "shape": list(arrays[name].shape), "data_offsets": [start, end]}
        for name, start, end in zip(names, ends[:-1], ends[1:], strict=True)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write(file: IO[bytes]) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)

    write_whole(path, write)


def write_whole(path: pathlib.Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes beside the file, then takes its place: what is there is old and whole, or new and whole."""
    with temporary(path) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, path)


@contextlib.contextmanager
def temporary(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """A new file beside another, gone at the end unless it was renamed."""
    name = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(name, "xb") as file:
            yield file
    finally:
        name.unlink(missing_ok=True)
