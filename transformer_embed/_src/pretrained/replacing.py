"""Replacing tensors in a checkpoint: the other tensors are copied, in pieces."""

import functools
import json
import os
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from transformer_embed._src.pretrained.files import read_json
from transformer_embed._src.pretrained.tensors import DTYPES, TensorInfo, Tensors, pieces
from transformer_embed._src.pretrained.writing import replaced

NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


def replace_tensors(tensors: Tensors, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the files of a checkpoint anew, with other arrays for some tensors.

    A single file is renamed into its place. New shards get names of their own, so that the new
    index file, which is renamed into its place, switches all of them at once.
    """
    arrays = dict(arrays) | _tied_copies(tensors, arrays)
    files = {tensors.files[name] for name in arrays}
    if not tensors.path.name.endswith(".json"):
        with replaced(tensors.path, functools.partial(_write, tensors, tensors.path, arrays)):
            return
    new_names = {file: f"{file.stem}-{secrets.token_hex(4)}{file.suffix}" for file in files}
    written: list[pathlib.Path] = []
    try:
        for file, name in new_names.items():
            written.append(file.with_name(name))
            with replaced(written[-1], functools.partial(_write, tensors, file, arrays)):
                pass
        index = read_json(tensors.path)
        for tensor, file in tensors.files.items():
            index["weight_map"][tensor] = new_names.get(file, file.name)
        text = json.dumps(index, indent=2).encode()
        with replaced(tensors.path, lambda file: file.write(text)):
            pass
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    for file in files:
        file.unlink(missing_ok=True)


def _tied_copies(tensors: Tensors, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays for tensors that are equal to a replaced one, as a tied output layer is."""
    copies = {}
    for name, array in arrays.items():
        entry = tensors.entry(name)
        for other in tensors.files.keys() - arrays.keys():
            if not tensors.is_stored(other) or len(entry.shape) != 2:
                continue
            info = tensors.any_entry(other)
            is_alike = (info.dtype, info.shape) == (entry.dtype, entry.shape)
            if is_alike and tensors.are_equal(name, other):
                copies[other] = array
    return copies


class Part(NamedTuple):
    """A tensor of a file that is written: as it was, or replaced."""

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
    """Writes one file of a checkpoint, with its other tensors as they are."""
    metadata = tensors.header(path).metadata
    parts = _parts(tensors, path, arrays)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for part in parts:
        offsets = [end, end + part.size]
        shape = list(part.entry.shape)
        header[part.name] = {"dtype": part.dtype, "shape": shape, "data_offsets": offsets}
        end += part.size
    text = json.dumps(header, separators=(",", ":")).encode()
    # The header is padded, so that the bytes of tensors are aligned.
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for part in parts:
        if part.array is not None:
            file.write(part.array.tobytes())
        else:
            for piece in pieces(part.entry):
                file.write(piece)
    os.fsync(file.fileno())


def _parts(tensors: Tensors, path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> list[Part]:
    """Returns the tensors of a file, in the order of their bytes."""
    entries, metadata = tensors.header(path)
    # Several names of one tensor (safetensors.torch.save_model) have the same place.
    names_by_place: dict[tuple[int, int], list[str]] = {}
    for name, entry in entries.items():
        names_by_place.setdefault((entry.start, entry.stop), []).append(name)
    parts = []
    for _, names in sorted(names_by_place.items()):
        # The name that the metadata do not explain is the one in the file.
        kept = next(name for name in names if metadata.get(name) not in names)
        array = next((arrays[name] for name in names if name in arrays), None)
        parts.append(Part(name=kept, entry=entries[kept], array=array))
    return parts
