"""The tensors of a checkpoint: found by their names, and read from safetensors in pieces."""

import functools
import itertools
import json
import math
import mmap
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.files import existing_path, read_json
from transformer_embed._src.pretrained.other_formats import ADAPTER, POINTER, step_for

# The dtypes of parameters, by their names in safetensors.
DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}
# The other dtypes that any tensor of a checkpoint may have.
OTHER_DTYPES = {
    "F64": np.dtype("float64"),
    "F8_E4M3": jnp.dtype("float8_e4m3fn"),
    "F8_E5M2": jnp.dtype("float8_e5m2"),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U64": np.dtype("uint64"),
    "U32": np.dtype("uint32"),
    "U16": np.dtype("uint16"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The bytes that are read at once.
PIECE_BYTES = 2**23
# The files below a folder that are searched for the message of an error.
MOST_FILES = 1000


class TensorInfo(NamedTuple):
    """A tensor's entry in the header; its bytes are from `start` to `stop` of the file."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Header(NamedTuple):
    """What the header of a file says: the entries of its tensors, and its metadata."""

    entries: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


class Tensors(NamedTuple):
    """The tensors of a checkpoint.

    Args:
        path: The file, or the index file of shards.
        files: The file of each tensor.
        metadata: The metadata of the file.
        header: Returns the header of a file. A shard is opened when one of its tensors is needed.
    """

    path: pathlib.Path
    files: Mapping[str, pathlib.Path]
    metadata: Mapping[str, str]
    header: Callable[[pathlib.Path], Header]

    def entry(self, name: str) -> TensorInfo:
        """Returns the file, dtype and shape of a parameter's tensor.

        Raises:
            ValueError: the tensor is not there, is not whole, or has a dtype of no parameter.
        """
        entry = self.any_entry(name)
        if entry.dtype not in DTYPES:
            got = f"{entry}: convert it first (a quantized model by its dequantize())"
            raise arguments.value_error(f"{self.path}: {name}", " or ".join(DTYPES), got)
        return entry

    def any_entry(self, name: str) -> TensorInfo:
        """Returns the file, dtype and shape of a tensor of any dtype.

        Raises:
            ValueError: the tensor is not there, or is not whole.
        """
        file = self.files.get(name)
        if file is None:
            raise arguments.value_error(self.path, f"a tensor {name}", self.listed())
        entries = self.header(file).entries
        entry = entries.get(name)
        if entry is None:
            want = f"a tensor {name}, which {self.path.name} says is there"
            raise arguments.value_error(file, want, listed(entries))
        if 0 in entry.shape:
            got = f"{entry}, as ZeRO-3 leaves it: gather the model by its zero_to_fp32.py"
            raise arguments.value_error(f"{self.path}: {name}", "a whole tensor", got)
        return entry

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a parameter's tensor."""
        return DTYPES[self.entry(name).dtype]

    def is_stored(self, name: str) -> bool:
        """Returns whether a file holds this tensor; an index may name one that none has."""
        file = self.files.get(name)
        return file is not None and name in self.header(file).entries

    def are_equal(self, name: str, other: str) -> bool:
        """Returns whether two tensors have the same dtype, shape and bytes."""
        first, second = self.entry(name), self.entry(other)
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        pairs = zip(pieces(first), pieces(second), strict=True)
        return all(piece == other_piece for piece, other_piece in pairs)

    def read(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> np.ndarray:
        """Returns a copy of a tensor, or of a part, of two axes; the last one has the columns."""
        entry = self.any_entry(name)
        width = entry.shape[-1] if entry.shape else 1
        start, stop, _ = rows.indices(math.prod(entry.shape) // width)
        shape = stop - start, len(range(width)[columns])
        array = empty_array(shape, dtype_of(entry))
        self.read_into(array, name, rows, columns)
        return array

    def read_into(
        self,
        array: np.ndarray,
        name: str,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> None:
        """Writes a tensor, or a part, into an array of two axes, which may have another dtype.

        The array may have strides, so a transpose is written without a second copy.
        """
        entry = self.any_entry(name)
        dtype = dtype_of(entry)
        width = entry.shape[-1] if entry.shape else 1
        start, stop, _ = rows.indices(math.prod(entry.shape) // width)
        row_bytes = width * dtype.itemsize
        rows_of_piece = max(1, PIECE_BYTES // row_bytes)
        wanted = entry._replace(
            start=entry.start + start * row_bytes, stop=entry.start + stop * row_bytes
        )
        first = 0
        for piece in pieces(wanted, rows_of_piece * row_bytes):
            whole_rows = np.frombuffer(piece, dtype).reshape(-1, width)
            array[first : first + len(whole_rows)] = whole_rows[:, columns]
            first += len(whole_rows)

    def listed(self) -> str:
        """Returns a few names of tensors for a message."""
        return listed(self.files)


def empty_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array of zeros that jax does not copy again on a CPU.

    It starts at a page boundary, which jax needs for that. It avoids the huge pages that numpy asks
    for, which are slow to get on a busy machine. Pages that nobody writes take no memory.
    """
    size = math.prod(shape)
    # No mapping has a size of 0.
    buffer = mmap.mmap(-1, max(size * dtype.itemsize, 1))
    return np.frombuffer(buffer, dtype, size).reshape(shape)


def dtype_of(entry: TensorInfo) -> np.dtype:
    """Returns the dtype of a tensor, or raises a ValueError for one that numpy does not have."""
    dtypes = DTYPES | OTHER_DTYPES
    if entry.dtype not in dtypes:
        raise arguments.value_error(entry.file, f"one of {', '.join(dtypes)}", entry)
    return dtypes[entry.dtype]


def listed(names: Iterable[str]) -> str:
    """Returns a few names of tensors for a message; names outside numbered layers come first."""
    names = sorted(names, key=lambda name: (re.search(r"\b\d+\b", name) is not None, name))
    return f"{len(names)} tensors: {', '.join(names[:4])}"


def pieces(entry: TensorInfo, size: int | None = None) -> Iterator[bytes]:
    """Yields some bytes of a tensor at a time; the file is not mapped, to save memory."""
    size = PIECE_BYTES if size is None else size
    with open(entry.file, "rb") as file:
        file.seek(entry.start)
        for start in range(entry.start, entry.stop, size):
            yield file.read(min(size, entry.stop - start))


# --- Which files.


def open_tensors(path: str | os.PathLike[str]) -> Tensors:
    """Returns the tensors of a safetensors file, of an index file, or of a folder with one of them.

    An index file lists shards, which are beside it.
    """
    file = existing_path(path)
    if file.is_dir():
        file = _file_in_folder(file)
    # The header of a shard is read once, when its first tensor is asked for.
    header = functools.cache(_header)
    if file.name.endswith(".json"):
        return Tensors(path=file, files=_shards(file), metadata={}, header=header)
    entries, metadata = header(file)
    files = dict.fromkeys(entries, file)
    return Tensors(path=file, files=files, metadata=metadata, header=header)


def _file_in_folder(folder: pathlib.Path) -> pathlib.Path:
    """Returns the usual file of a folder, or raises an error that says what to do with others."""
    names = [name for name in (WHOLE, INDEX) if (folder / name).exists()]
    if not names:
        below = itertools.islice(folder.rglob("*"), MOST_FILES)
        got = step_for(*(str(path.relative_to(folder)) for path in below)) or "neither"
        raise arguments.value_error(folder, f"a folder with {WHOLE} or {INDEX}", got)
    for adapter in folder.glob("adapter_model.*"):
        # The line that is shown is the one that called load_embedder.
        warnings.warn(f"{adapter} was not read: {ADAPTER}", stacklevel=4)
    return folder / names[0]


def _shards(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the file of each tensor, as an index file says."""
    files: Any = read_json(path).get("weight_map")
    if not isinstance(files, dict):
        want = "a weight_map from tensors to files"
        raise arguments.value_error(path, want, repr(files))
    # Thousands of tensors are in a few files, so each file is checked once.
    for name in {*map(str, files.values())}:
        # Links are followed: a cache of the hub has links to files elsewhere.
        if pathlib.Path(name).name != name or "\0" in name:
            raise arguments.value_error(path, "shards in its folder", repr(name))
    return {tensor: path.parent / str(name) for tensor, name in files.items()}


def _header(path: pathlib.Path) -> Header:
    """Returns what the header of a file says, after a check of the whole file."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (slow to load)

    try:
        # It checks the header, and that the file is whole.
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        with open(path, "rb") as file:
            is_pointer = file.read(7) == b"version"
        step = POINTER if is_pointer else step_for(path.name.removesuffix(".safetensors"))
        got = step or f"one that cannot be read ({error})"
        raise arguments.value_error(path, "a whole safetensors file", got) from error
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    metadata = header.pop("__metadata__", None) or {}
    entries = {name: _info(path, 8 + size, entry) for name, entry in header.items()}
    # safetensors.torch.save_model keeps one of several names, and says the others here.
    others = {name: entries[kept] for name, kept in metadata.items() if kept in entries}
    return Header(entries=others | entries, metadata=metadata)


def _info(path: pathlib.Path, first_byte: int, entry: Mapping[str, Any]) -> TensorInfo:
    """Returns the entry of a tensor, whose offsets count from the first byte after the header."""
    start, stop = entry["data_offsets"]
    return TensorInfo(
        file=path,
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        start=first_byte + start,
        stop=first_byte + stop,
    )
