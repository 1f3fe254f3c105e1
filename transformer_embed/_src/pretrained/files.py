"""Files: reads safetensors in pieces, and writes files whole or not at all."""

import dataclasses
import errno
import functools
import json
import math
import mmap
import os
import pathlib
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.messages import parse, short_repr, shorten

DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}
FLOAT64 = "F64"
INDEX = ".index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_config.json"
# Numbers that are read at once.
PIECE = 2**21
# Names of tensors in a message.
LISTED = 4
ZIP = b"PK\x03\x04"
PICKLE_STARTS = (ZIP, *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
TEMPORARY = ".transformer_embed-"
# Seconds after which a temporary file is taken for one that a killed process left.
STALE = 24 * 60 * 60
# Tied tensors share memory, which save_file refuses: each is cloned.
PICKLE = (
    "a pickle, which may run code and is not opened; convert it with "
    "safetensors.torch.save_file({{k: v.clone().contiguous() "
    "for f in glob.glob({!r}) for k, v in torch.load(f, weights_only=True).items()}}, "
    "'model.safetensors')"
)


class TensorInfo(NamedTuple):
    """A tensor's entry in the header; `start` is where its bytes begin in the file."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a checkpoint, by name; a shard is opened when one of its tensors is needed."""

    path: pathlib.Path
    files: Mapping[str, pathlib.Path]
    metadata: Mapping[str, str]
    _opened: dict[pathlib.Path, dict[str, TensorInfo]] = dataclasses.field(default_factory=dict)

    def entry(self, name: str) -> TensorInfo:
        """A tensor's file, dtype and shape; a ValueError if it is not there."""
        if name not in self.files:
            want = f"a tensor {shorten(name)}"
            raise arguments.value_error(shorten(self.path), want, self.listed())
        file = self.files[name]
        if file not in self._opened:
            self._opened[file] = _header(file)[0]
        entries = self._opened[file]
        if name not in entries:
            index = shorten(self.path.name)
            want = f"the tensor {shorten(name)}, as {index} says"
            raise arguments.value_error(shorten(file), want, f"{len(entries)} others")
        return entries[name]

    def place(self, name: str) -> str:
        """A tensor for a message."""
        return f"{shorten(self.path)}: {shorten(name)}"

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same bytes."""
        first, second = self.entry(name), self.entry(other)
        if str(first) != str(second):
            return False
        pairs = zip(_pieces(first), _pieces(second), strict=True)
        return all(one.tobytes() == two.tobytes() for (_, one), (_, two) in pairs)

    def read(self, name: str, float64_as: np.dtype) -> np.ndarray:
        """A copy of a tensor in its own dtype; float64 is rounded.

        The copy starts at a page boundary, so that jax does not copy it again on a CPU. It avoids
        the huge pages that numpy asks for, which are slow to get on a busy machine.
        """
        entry = self.entry(name)
        dtype, size = DTYPES.get(entry.dtype, float64_as), math.prod(entry.shape)
        array = np.frombuffer(mmap.mmap(-1, max(size * dtype.itemsize, 1)), dtype, size)
        with np.errstate(over="ignore"):
            for start, piece in _pieces(entry):
                array[start : start + PIECE] = piece
        if entry.dtype == FLOAT64 and np.isinf(array).any():
            want = f"numbers that fit into {dtype}"
            raise arguments.value_error(self.place(name), want, "larger ones")
        return array.reshape(entry.shape)

    def listed(self) -> str:
        """A few names for a message; those outside of numbered layers come first."""
        names = sorted(self.files, key=lambda name: (re.search(r"\b\d+\b", name) is not None, name))
        listed = []
        for name in names[:LISTED]:
            info = f" {self.entry(name)}" if self.files[name] == self.path else ""
            listed.append(shorten(name, 40) + info)
        return f"{len(names)} tensors: {', '.join(listed)}"


def _pieces(entry: TensorInfo) -> Iterator[tuple[int, np.ndarray]]:
    """Some numbers of a tensor at a time, and the index of the first of them.

    The file is not mapped, to save memory.
    """
    dtype, size = DTYPES.get(entry.dtype, np.dtype(np.float64)), math.prod(entry.shape)
    with open(entry.file, "rb") as file:
        file.seek(entry.start)
        for start in range(0, size, PIECE):
            yield start, np.fromfile(file, dtype, min(size - start, PIECE))


def open_tensors(path: str | os.PathLike[str]) -> Tensors:
    """The tensors of a safetensors file, of an index file, or of a folder that holds one of them.

    An index file lists shards, which are beside it.
    """
    found = _find(as_path(path))
    if found.name.endswith(".json"):
        return Tensors(found, _shards(found), {})
    entries, metadata = _header(found)
    return Tensors(found, dict.fromkeys(entries, found), metadata, {found: entries})


def as_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """The argument `path`."""
    return pathlib.Path(arguments.instance("path", path, str | os.PathLike, "a str or a path"))


def _find(path: pathlib.Path) -> pathlib.Path:
    """The file that a path names, or the one inside a folder."""
    if not path.exists():
        error = os.strerror(errno.ENOENT)
        # One or two words may be a model's name.
        if len(path.parts) <= 2:
            error += (
                " (for a model's name, pass the folder that huggingface_hub.snapshot_download(name)"
                " returns)"
            )
        raise FileNotFoundError(errno.ENOENT, error, shorten(path))
    if not path.is_dir():
        return path
    for name in (WHOLE, WHOLE + INDEX):
        if (path / name).exists():
            return path / name
    names = sorted(name.name for name in path.iterdir())
    want, got = f"a folder with {WHOLE} or {WHOLE}{INDEX}", "neither"
    others = [name for name in names if name.endswith(".safetensors")]
    if any(name.startswith("pytorch_model") for name in names):
        got = PICKLE.format("pytorch_model*.bin")
    elif ADAPTER in names:
        want = (
            "a whole model, which peft's AutoPeftModel.from_pretrained(folder).merge_and_unload()"
            ".save_pretrained(new_folder) writes, or the folder of the base model"
        )
        got = "the changes of an adapter"
    elif others:
        want += f" (or pass the file: {shorten(others[0])})"
    raise arguments.value_error(shorten(path), want, got)


def _shards(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file of each tensor, as an index file says."""
    names: Any = read_json(path).get("weight_map")
    files = list(names.values()) if isinstance(names, dict) else []
    are_names = [isinstance(name, str) and re.fullmatch(r"[^/\\\0]+", name) for name in files]
    if not files or not all(are_names):
        want = "a weight_map from tensors to files in the same folder"
        raise arguments.value_error(shorten(path), want, short_repr(names))
    return {tensor: path.parent / name for tensor, name in names.items()}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; a ValueError if the file holds anything else."""
    _regular_mode(path)
    return parse(shorten(path), path.read_bytes())


def _header(path: pathlib.Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Each tensor's entry, and the metadata."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (slow to load)

    _regular_mode(path)
    try:
        # It checks the header, and that the file is whole.
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        got = _describe_contents(path, error)
        raise arguments.value_error(shorten(path), "a whole safetensors file", got) from error
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    metadata = header.pop("__metadata__", None) or {}
    entries = {}
    for name, entry in header.items():
        start = 8 + size + entry["data_offsets"][0]
        entries[name] = TensorInfo(path, entry["dtype"], tuple(entry["shape"]), start)
    return entries, metadata


def _describe_contents(path: pathlib.Path, error: Exception) -> str:
    """What a file is that is not a safetensors file."""
    name = path.name
    with open(path, "rb") as file:
        start = file.read(256)
    if start.startswith(ZIP) and b".npy" in start:
        convert = f"safetensors.numpy.save_file(dict(numpy.load({name!r})), 'model.safetensors')"
        return f"an archive of numpy arrays; convert it with {convert}"
    if start.startswith(PICKLE_STARTS):
        return PICKLE.format(name)
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of git-lfs; fetch the file itself with `git lfs pull`"
    reason = str(error).removeprefix("Error while deserializing header: ")[:120]
    return f"a file that is cut off, damaged or of another kind ({reason})"


def write_tensors(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, whole or not at all.

    `save_file` of safetensors reports a full disk without an errno, and before 0.8 it copies all
    arrays.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    # Wider dtypes first, so that each array starts at a multiple of its item size.
    stored = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in stored:
        offsets = [end, end + array.nbytes]
        header[name] = {
            "dtype": codes[array.dtype],
            "shape": array.shape,
            "data_offsets": offsets,
        }
        end = offsets[1]
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def write(file: IO[bytes]) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in stored:
            file.write(np.ascontiguousarray(array).view(np.uint8).data)

    write_whole(path, write)


def write_whole(path: pathlib.Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a temporary file and renames it, so that the path always has a whole file.

    A replaced file keeps its mode. What killed processes left in the folder is removed.
    """
    want = "a regular file, or a new name in a folder that exists"
    exists = path.exists()
    mode = _regular_mode(path, want) if exists else 0o666
    # With a separator at its end, only the name of a folder is found.
    os.stat(os.path.join(path.parent, ""))
    for name in path.parent.glob(f"{TEMPORARY}*.tmp"):
        if name.is_file() and time.time() - name.stat().st_mtime > STALE:
            name.unlink(missing_ok=True)
    name = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}.tmp"
    # A private file's replacement must not be readable by others, not even while it is written.
    opener = functools.partial(os.open, mode=mode)
    try:
        with open(name, "xb", opener=opener) as file:
            if exists:
                name.chmod(mode)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        name.unlink(missing_ok=True)


def _regular_mode(path: pathlib.Path, want: str = "a regular file") -> int:
    """The mode of a regular file.

    A ValueError for anything else: to open a pipe is to wait for its other end.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise arguments.value_error("path", want, f"a folder, a pipe or a device, {shorten(path)}")
    return stat.S_IMODE(mode)
