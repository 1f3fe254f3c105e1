"""Replacing tensors in a checkpoint: the other tensors are copied, in pieces."""

import functools
import json
import os
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any, BinaryIO

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


def _write(
    tensors: Tensors, path: pathlib.Path, arrays: Mapping[str, np.ndarray], file: BinaryIO
) -> None:
    """Writes one file of a checkpoint, with its other tensors as they are."""
    entries, metadata = tensors.header(path)
    # Several names of one tensor (safetensors.torch.save_model) have the same place.
    names = {(entry.start, entry.stop): name for name, entry in entries.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts: list[TensorInfo | np.ndarray] = []
    end = 0
    for place, name in sorted(names.items()):
        entry = entries[name]
        same_place = [each for each, info in entries.items() if (info.start, info.stop) == place]
        array = next((arrays[each] for each in same_place if each in arrays), None)
        part = entry if array is None else array
        size = entry.stop - entry.start if array is None else array.nbytes
        dtype = entry.dtype if array is None else NAMES_OF_DTYPES[array.dtype]
        # The name that the metadata do not explain is the one in the file.
        kept = next(each for each in same_place if metadata.get(each) not in same_place)
        header[kept] = {
            "dtype": dtype,
            "shape": list(entry.shape),
            "data_offsets": [end, end + size],
        }
        end += size
        parts.append(part)
    text = json.dumps(header, separators=(",", ":")).encode()
    # The header is padded, so that the bytes of tensors are aligned.
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for part in parts:
        if isinstance(part, TensorInfo):
            for piece in pieces(part):
                file.write(piece)
        else:
            file.write(part.tobytes())
    os.fsync(file.fileno())
