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
from transformer_embed._src.pretrained.other_formats import ADAPTER, LFS_POINTER, advice_for

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
    """A tensor's entry in the header of a file.

    Args:
        file: The file that the tensor is in.
        dtype: The dtype, as safetensors names it, such as "BF16".
        shape: The shape.
        start: The number of the tensor's first byte, counted from the start of the file.
        stop: The number of the last byte + 1.
    """

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Header(NamedTuple):
    """What the header of a file says.

    Args:
        entries: The entry of each tensor, by name.
        metadata: The texts that were saved with the file, by name.
    """

    entries: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


class Tensors(NamedTuple):
    """The tensors of a checkpoint.

    Args:
        path: The file, or the index file of shards.
        files: The file of each tensor.
        metadata: The metadata of the file.
        header: A function that returns the header of a file. It opens a shard when one of the
            shard's tensors is needed, and keeps the header.
    """

    path: pathlib.Path
    files: Mapping[str, pathlib.Path]
    metadata: Mapping[str, str]
    header: Callable[[pathlib.Path], Header]

    def entry(self, name: str) -> TensorInfo:
        """Returns the file, dtype and shape of a parameter's tensor.

        Raises:
            ValueError: the tensor is not there, is not whole, or has a dtype that no parameter can
                have, such as "I8".
        """
        entry = self.entry_of_any_dtype(name)
        if entry.dtype not in DTYPES:
            got = f"{entry}: convert it first (a quantized model by its dequantize())"
            raise arguments.value_error(f"{self.path}: {name}", " or ".join(DTYPES), got)
        return entry

    def check_dtype(self, name: str) -> None:
        """Raises a ValueError for a dtype that no parameter can have, as in a quantized model."""
        # This raises the error.
        self.entry(name)

    def entry_of_any_dtype(self, name: str) -> TensorInfo:
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
            # DeepSpeed's ZeRO stage 3 splits each parameter, and may save an empty tensor for it.
            got = f"{entry}, as ZeRO-3 leaves it: gather the model by its zero_to_fp32.py"
            raise arguments.value_error(f"{self.path}: {name}", "a whole tensor", got)
        return entry

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a parameter's tensor."""
        return DTYPES[self.entry(name).dtype]

    def is_stored(self, name: str) -> bool:
        """Returns whether a file holds this tensor.

        An index file may name a tensor that its shards do not hold.
        """
        file = self.files.get(name)
        return file is not None and name in self.header(file).entries

    def are_equal(self, name: str, other: str) -> bool:
        """Returns whether two tensors have the same dtype, shape and bytes."""
        entry = self.entry(name)
        other_entry = self.entry(other)
        if (entry.dtype, entry.shape) != (other_entry.dtype, other_entry.shape):
            return False
        pairs_of_pieces = zip(pieces(entry), pieces(other_entry), strict=True)
        return all(piece == other_piece for piece, other_piece in pairs_of_pieces)

    def read(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> np.ndarray:
        """Returns a copy of a tensor, or of some of its rows and columns, [rows, columns].

        The last axis has the columns, and all other axes together have the rows: a tensor
        [2, 3, 5] is read as [6, 5], and a vector [5] as [1, 5].
        """
        # The entry of the file's header: the dtype, the shape, and where the bytes are.
        entry = self.entry_of_any_dtype(name)
        row_count, width = _as_matrix(entry.shape)
        rows_to_read = range(row_count)[rows]
        columns_to_read = range(width)[columns]
        shape = (len(rows_to_read), len(columns_to_read))
        array = aligned_zeros(shape, dtype_of(entry))
        self.read_into(array, name, rows, columns)
        return array

    def read_into(
        self,
        array: np.ndarray,
        name: str,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> None:
        """Writes a tensor, or some of its rows and columns, into an array [rows, columns].

        Rows and columns are counted as in `read`. The array may have another dtype, and it may be a
        view with strides: if you pass the transpose of an array, the tensor's transpose is written
        to that array without a second copy.
        """
        entry = self.entry_of_any_dtype(name)
        dtype = dtype_of(entry)
        row_count, width = _as_matrix(entry.shape)
        first_row, end_row, _ = rows.indices(row_count)
        row_bytes = width * dtype.itemsize
        # The entry of a tensor says at which bytes of the file it starts and stops. This is the
        # entry of the rows that are read, as if these rows were a tensor of their own.
        start_of_rows = entry.start + first_row * row_bytes
        stop_of_rows = entry.start + end_row * row_bytes
        entry_of_rows = entry._replace(start=start_of_rows, stop=stop_of_rows)
        # Each piece has whole rows, and at least one.
        rows_in_piece = max(1, PIECE_BYTES // row_bytes)
        piece_bytes = rows_in_piece * row_bytes
        first = 0
        for piece in pieces(entry_of_rows, piece_bytes):
            rows_of_piece = np.frombuffer(piece, dtype).reshape(-1, width)
            end = first + len(rows_of_piece)
            array[first:end] = rows_of_piece[:, columns]
            first = end

    def listed(self) -> str:
        """Returns a few names of tensors for a message."""
        return listed(self.files)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the number of rows and of columns of a tensor whose last axis has the columns."""
    width = shape[-1] if shape else 1
    return math.prod(shape) // width, width


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array of zeros that `jax.device_put` does not copy on a CPU.

    For this, jax needs an array that starts at a page boundary. The array's memory is not in the
    huge pages that numpy asks for, because they are slow to get on a busy machine. Pages that
    nobody writes take no memory.
    """
    size = math.prod(shape)
    # A mapping cannot have a size of 0, so an empty array takes 1 byte.
    buffer = mmap.mmap(-1, max(size * dtype.itemsize, 1))
    return np.frombuffer(buffer, dtype, size).reshape(shape)


def dtype_of(entry: TensorInfo) -> np.dtype:
    """Returns the dtype of a tensor, or raises a ValueError for one that numpy does not have."""
    dtypes = DTYPES | OTHER_DTYPES
    if entry.dtype not in dtypes:
        raise arguments.value_error(entry.file, f"one of {', '.join(dtypes)}", entry)
    return dtypes[entry.dtype]


def listed(names: Iterable[str]) -> str:
    """Returns a few names of tensors for a message. Names outside numbered layers come first."""

    def in_layer_then_name(name: str) -> tuple[bool, str]:
        """Returns what to sort by: "h.0.w" is in a numbered layer, and "wte.weight" is not."""
        return re.search(r"\b\d+\b", name) is not None, name

    first_names = sorted(names, key=in_layer_then_name)
    return f"{len(first_names)} tensors: {', '.join(first_names[:4])}"


def pieces(entry: TensorInfo, size: int | None = None) -> Iterator[bytes]:
    """Yields the bytes of a tensor, `size` or fewer at a time.

    The file is not mapped into memory, because the pages of a mapping would count as memory.
    """
    # The default is read at each call, so that tests can make it small.
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
        # The index file says which shard has each tensor.
        return Tensors(path=file, files=_shards(file), metadata={}, header=header)
    entries, metadata = header(file)
    files = dict.fromkeys(entries, file)
    return Tensors(path=file, files=files, metadata=metadata, header=header)


def _file_in_folder(folder: pathlib.Path) -> pathlib.Path:
    """Returns the safetensors file of a folder, or else the index file of its shards.

    If the folder has neither, the error says what to do with a file of another format.
    """
    names = [name for name in (WHOLE, INDEX) if (folder / name).exists()]
    if not names:
        files_below = itertools.islice(folder.rglob("*"), MOST_FILES)
        other_names = [str(path.relative_to(folder)) for path in files_below]
        # For example, "model.gguf: a GGUF file: convert it with ...". If no name is known, "".
        advice = advice_for(*other_names)
        got = advice or "neither"
        raise arguments.value_error(folder, f"a folder with {WHOLE} or {INDEX}", got)
    for adapter in folder.glob("adapter_model.*"):
        # `ADAPTER` says how to merge the adapter. The warning shows the line that called
        # load_embedder.
        warnings.warn(f"{adapter} was not read: {ADAPTER}", stacklevel=4)
    return folder / names[0]


def _shards(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the file of each tensor, as an index file says."""
    files: Any = read_json(path).get("weight_map")
    if not isinstance(files, dict):
        want = "a weight_map from tensors to files"
        raise arguments.value_error(path, want, repr(files))
    # Thousands of tensors are in a few files, so each file is checked once.
    file_names = {str(name) for name in files.values()}
    for name in file_names:
        # A shard must be in the folder of the index file, so "../a" is refused. The shard may be a
        # link to a file elsewhere, as in the cache of the hub.
        is_in_folder = pathlib.Path(name).name == name
        if not is_in_folder or "\0" in name:
            raise arguments.value_error(path, "shards in its folder", repr(name))
    return {tensor: path.parent / str(name) for tensor, name in files.items()}


def _header(path: pathlib.Path) -> Header:
    """Returns what the header of a file says, after a check of the whole file."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (slow to load)

    try:
        # Opening checks the header, and that the file is whole.
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        got = _advice_for_damaged(path) or f"one that cannot be read ({error})"
        raise arguments.value_error(path, "a whole safetensors file", got) from error
    # The file begins with the size of the header, in 8 bytes. Then comes the header, which is JSON.
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    metadata = header.pop("__metadata__", None) or {}
    # The offsets of a tensor count from the first byte after the header.
    header_end = 8 + header_size
    entries = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        entries[name] = TensorInfo(
            file=path,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=header_end + start,
            stop=header_end + stop,
        )
    # If a tensor has several names, safetensors.torch.save_model stores it under one of them. The
    # metadata then map each other name to the stored name.
    entries_of_other_names = {}
    for other_name, stored_name in metadata.items():
        if stored_name in entries:
            entries_of_other_names[other_name] = entries[stored_name]
    # If a name has an entry of its own in the header, this entry is used.
    all_entries = {**entries_of_other_names, **entries}
    return Header(entries=all_entries, metadata=metadata)


def _advice_for_damaged(path: pathlib.Path) -> str:
    """Returns what to do with a file that is not a safetensors file, or "" for an unknown kind.

    Such a file may be the small text file that git-lfs puts in the place of a large file. Or it may
    be of another format, as "model.bin.safetensors".
    """
    with open(path, "rb") as file:
        # The text of git-lfs begins with this word.
        if file.read(7) == b"version":
            return LFS_POINTER
    return advice_for(path.name.removesuffix(".safetensors"))
