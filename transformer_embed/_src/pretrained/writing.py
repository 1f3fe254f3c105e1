"""Writing: a file is written whole or not at all."""

import contextlib
import functools
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.tensors import Tensors, open_tensors


@contextlib.contextmanager
def write_safetensors(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]
) -> Iterator[Tensors]:
    """Writes a safetensors file, which the caller can check before it is at the path.

    This is a context manager, for `with`. It writes the arrays to a temporary file, yields the
    tensors of this file to the block, and moves the file to the path when the block ends. If the
    block raises an error, the temporary file is deleted, and an old file at the path stays.
    """
    from safetensors.numpy import save  # noqa: PLC0415 (slow to load)

    def write(file: BinaryIO) -> None:
        """Writes the whole file."""
        file.write(_with_sorted_metadata(save({**arrays}, metadata)))

    with replace_file(path, write) as temporary:
        # An error should name the path that the caller knows, and not the temporary file.
        yield open_tensors(temporary)._replace(path=path)


@contextlib.contextmanager
def replace_file(path: pathlib.Path, write: Callable[[BinaryIO], Any]) -> Iterator[pathlib.Path]:
    """Writes a temporary file, and renames it to the path when the block of a `with` ends.

    So there is a whole file at the path at any time: the old one in the block, and the new one
    after it. If the block raises an error, the temporary file is deleted. If the new file replaces
    an old one, it gets the mode of the old one (its permissions).

    Args:
        path: The path, where a file may be.
        write: A function that writes to the open file. It is called before the block begins.

    Yields:
        The path of the temporary file.
    """
    exists = path.exists()
    if exists and not path.is_file():
        got = f"a folder, a pipe or a device, {path}"
        raise arguments.value_error("path", "a regular file", got)
    # The umask takes bits of this mode away, as for any new file.
    mode = stat.S_IMODE(path.stat().st_mode) if exists else 0o666
    # The temporary file is in the same folder, because a file of another file system cannot be
    # renamed to the path.
    temporary = path.parent / f".transformer_embed-{secrets.token_hex(8)}.tmp"
    # The temporary file gets its mode when it is made. So if it replaces a private file, others can
    # never read it.
    try:
        with open(temporary, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            if exists:
                # The umask may have taken away bits that the old file has.
                temporary.chmod(mode)
            write(file)
            file.flush()
            yield temporary
            # The data must be on the disk before the new name is: otherwise, after a crash, there
            # could be an empty file at the path.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _with_sorted_metadata(data: bytes) -> bytes:
    """Returns the bytes of a safetensors file whose header is sorted.

    So equal arguments of `save_embedder` write equal files. The header keeps its size.
    """
    # The file has the size of the header in 8 bytes, then the header, then the tensors.
    size_bytes = data[:8]
    header_size = int.from_bytes(size_bytes, "little")
    header_end = 8 + header_size
    header = json.loads(data[8:header_end])
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    # Spaces at the end keep the size.
    sorted_header = text.encode().ljust(header_size)
    return size_bytes + sorted_header + data[header_end:]
