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
def written(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]
) -> Iterator[Tensors]:
    """Yields what is written to a safetensors file, which is whole, or not there if you raise."""
    from safetensors.numpy import save  # noqa: PLC0415 (slow to load)

    def write(file: BinaryIO) -> None:
        file.write(_with_sorted_metadata(save({**arrays}, metadata)))

    with replaced(path, write) as temporary:
        # Errors name the path.
        yield open_tensors(temporary)._replace(path=path)


@contextlib.contextmanager
def replaced(path: pathlib.Path, write: Callable[[BinaryIO], Any]) -> Iterator[pathlib.Path]:
    """Yields a temporary file that was written, which takes the path's place unless you raise.

    The temporary file is renamed at the end, so that the path always has a whole file. A replaced
    file keeps its mode.
    """
    exists = path.exists()
    if exists and not path.is_file():
        got = f"a folder, a pipe or a device, {path}"
        raise arguments.value_error("path", "a regular file", got)
    # A new file has the mode of any new file: what the umask leaves of this.
    mode = stat.S_IMODE(path.stat().st_mode) if exists else 0o666
    # In the same folder: a file of another file system cannot be renamed to the path.
    temporary = path.parent / f".transformer_embed-{secrets.token_hex(8)}.tmp"
    # A private file's replacement must not be readable by others, not even while it is written.
    try:
        with open(temporary, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            if exists:
                # The umask took bits away that the replaced file has.
                temporary.chmod(mode)
            write(file)
            file.flush()
            yield temporary
            # The data first: after a crash, the new name must not have an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _with_sorted_metadata(data: bytes) -> bytes:
    """Returns a file with sorted metadata, so that equal arguments write equal files."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return data[:8] + text.encode().ljust(end - 8) + data[end:]
