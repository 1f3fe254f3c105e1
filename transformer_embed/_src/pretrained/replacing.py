"""Replacing tensors in a checkpoint: the other tensors are copied, in pieces."""

import functools
import json
import math
import os
import pathlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from transformer_embed._src.pretrained.files import read_json
from transformer_embed._src.pretrained.tensors import DTYPES, TensorInfo, Tensors, pieces
from transformer_embed._src.pretrained.writing import replace_file

NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


def replace_tensors(tensors: Tensors, arrays: Mapping[str, np.ndarray]) -> None:
    """Replaces tensors of a checkpoint. `arrays` has the new values, by the names of the tensors.

    A tied output layer may be stored as a copy of the token table, under another name. If the table
    is replaced, such a copy is replaced too. At any time, the checkpoint is the whole old one or
    the whole new one.
    """
    # A tied model may store copies of its table under other names, which get the new values, too.
    all_arrays = {**arrays, **_arrays_of_tied_copies(tensors, arrays)}
    if tensors.path.name.endswith(".json"):
        _replace_shards(tensors, all_arrays)
    else:
        write = functools.partial(_write, tensors, tensors.path, all_arrays)
        with replace_file(tensors.path, write):
            # The new file replaces the old one when this block ends.
            pass


def _replace_shards(tensors: Tensors, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes new shards in place of the shards that have these tensors, and a new index file.

    The new shards have new names. The new index file is renamed to the path of the old one, which
    switches all shards at once. Then the old shards are deleted. If anything fails before, the new
    shards are deleted.
    """
    old_shards = {tensors.files[name] for name in arrays}
    new_shards: dict[pathlib.Path, pathlib.Path] = {}
    try:
        for old_shard in old_shards:
            new_name = f"{old_shard.stem}-{secrets.token_hex(4)}{old_shard.suffix}"
            new_shards[old_shard] = old_shard.with_name(new_name)
            write = functools.partial(_write, tensors, old_shard, arrays)
            with replace_file(new_shards[old_shard], write):
                # The new shard gets its name when this block ends.
                pass
        index = read_json(tensors.path)
        for tensor, old_shard in tensors.files.items():
            index["weight_map"][tensor] = new_shards.get(old_shard, old_shard).name
        text = json.dumps(index, indent=2).encode()
        with replace_file(tensors.path, lambda file: file.write(text)):
            # The new index file replaces the old one when this block ends.
            pass
    # Ctrl-C must not leave new shards behind either.
    except BaseException:
        for new_shard in new_shards.values():
            new_shard.unlink(missing_ok=True)
        raise
    for old_shard in old_shards:
        old_shard.unlink(missing_ok=True)


def _arrays_of_tied_copies(
    tensors: Tensors, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Finds copies of the replaced tensors in the checkpoint, and returns their new arrays.

    A tied model may store its table under the name of its output layer too. The result is then
    {"lm_head.weight": array}, with the array that replaces the token table. Only matrices are
    compared, because vectors, such as the scales of norms, may be equal by chance.
    """
    arrays_of_copies = {}
    for name, array in arrays.items():
        info = tensors.entry(name)
        if len(info.shape) != 2:
            continue
        for other_name in tensors.files.keys() - arrays.keys():
            if not tensors.is_stored(other_name):
                continue
            other_info = tensors.entry_of_any_dtype(other_name)
            # The dtypes are compared first, because `are_equal` raises an error for a dtype that no
            # parameter can have.
            is_alike = (other_info.dtype, other_info.shape) == (info.dtype, info.shape)
            if is_alike and tensors.are_equal(name, other_name):
                arrays_of_copies[other_name] = array
    return arrays_of_copies


class TensorToWrite(NamedTuple):
    """A tensor of a file that is written.

    Args:
        name: The name of the tensor.
        entry: The tensor's entry in the old file.
        array: The array that replaces the tensor. If None, the tensor is copied from the old file.
    """

    name: str
    entry: TensorInfo
    array: np.ndarray | None

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.entry.stop - self.entry.start if self.array is None else self.array.nbytes

    @property
    def dtype(self) -> str:
        """The dtype, as safetensors names it."""
        return self.entry.dtype if self.array is None else NAMES_OF_DTYPES[self.array.dtype]


def _write(
    tensors: Tensors, path: pathlib.Path, arrays: Mapping[str, np.ndarray], file: BinaryIO
) -> None:
    """Writes a new version of one file of a checkpoint. Copies tensors without a new array.

    Args:
        tensors: The old checkpoint.
        path: The old file.
        arrays: The arrays that replace tensors, by the tensors' names.
        file: The new file.
    """
    # The tensors of the new file in their order, each with a new array, or with an entry that says
    # where the bytes are in the old file.
    tensors_to_write = _tensors_to_write(tensors, path, arrays)
    header = _encoded_header(tensors_to_write, tensors.header(path).metadata)
    # The file begins with the size of the header, in 8 bytes.
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for tensor in tensors_to_write:
        if tensor.array is not None:
            file.write(tensor.array.tobytes())
        else:
            for piece in pieces(tensor.entry):
                file.write(piece)
    os.fsync(file.fileno())


def _encoded_header(
    tensors_to_write: Sequence[TensorToWrite], metadata: Mapping[str, str]
) -> bytes:
    """Returns the header of a file that has these tensors one after the other, as JSON."""
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = dict(metadata)
    # The offsets of bytes count from the end of the header.
    start = 0
    for tensor in tensors_to_write:
        stop = start + tensor.size
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces make the header a multiple of 8 bytes, so that the bytes of tensors are aligned.
    padded_size = math.ceil(len(text) / 8) * 8
    return text.ljust(padded_size)


def _tensors_to_write(
    tensors: Tensors, path: pathlib.Path, arrays: Mapping[str, np.ndarray]
) -> list[TensorToWrite]:
    """Returns the tensors of a file, in the order of their bytes."""
    header = tensors.header(path)
    # If a tensor has several names (see `tensors._header`), all of them have the same bytes.
    names_by_bytes: dict[tuple[int, int], list[str]] = {}
    for name, entry in header.entries.items():
        names_by_bytes.setdefault((entry.start, entry.stop), []).append(name)
    tensors_to_write = []
    for first_and_last_byte in sorted(names_by_bytes):
        names = names_by_bytes[first_and_last_byte]
        # The metadata map each name to the stored name, except the stored name itself. Only the
        # stored name is in the new header.
        stored_name = next(name for name in names if header.metadata.get(name) not in names)
        # The new array may be under any of the names. If there is none, the tensor is copied.
        array = next((arrays[name] for name in names if name in arrays), None)
        tensors_to_write.append(
            TensorToWrite(name=stored_name, entry=header.entries[stored_name], array=array)
        )
    return tensors_to_write
