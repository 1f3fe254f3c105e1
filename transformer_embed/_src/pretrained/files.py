"""Files: reads safetensors in pieces, writes files whole or not at all, names what is wrong."""

import contextlib
import errno
import functools
import itertools
import json
import math
import mmap
import os
import pathlib
import re
import secrets
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments

DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Bytes that are read at once.
PIECE = 2**23
# Below a folder, searched for the message of an error.
MOST_FILES = 1000
NO_FILE = (
    "No such file or directory (for a model's name, pass the folder that "
    "huggingface_hub.snapshot_download(name) returns)"
)
POINTER = "a pointer of git-lfs: fetch it with `git lfs pull`"
ADAPTER = "an adapter: merge it, by peft's model.merge_and_unload().save_pretrained(folder)"
# What to do with other files, by their names; of those in a folder, the first of these counts. An
# index file names all shards, those of a variant such as fp16 too. (Tied tensors share memory,
# which save_file refuses: each is cloned.)
STEPS = {
    r"\.safetensors\.index\.": "pass it",
    r"(^|/)adapter_": ADAPTER,
    r"-of-\d+\.safetensors$": "a shard: put the index file of all shards beside it",
    r"\.safetensors$": "pass it",
    r"\.bin$": (
        "a pickle may run code and is not opened: convert it with "
        "safetensors.torch.save_file({k: v.clone().contiguous() "
        "for f in glob.glob('pytorch_model*.bin') "
        "for k, v in torch.load(f, weights_only=True).items()}, 'model.safetensors')"
    ),
    r"\.gguf$": (
        "a GGUF file: convert it with transformers.AutoModelForCausalLM.from_pretrained(folder, "
        "gguf_file=name).save_pretrained(new_folder), which dequantizes it, and load new_folder"
    ),
    r"\.onnx$": (
        "an ONNX file: convert it with safetensors.numpy.save_file({t.name: "
        "onnx.numpy_helper.to_array(t) for t in onnx.load(name).graph.initializer}, "
        "'model.safetensors')"
    ),
    r"\.distcp$": (
        "a checkpoint of torch.distributed: convert it with torch.distributed.checkpoint."
        "format_utils.dcp_to_torch_save(folder, 'pytorch_model.bin'), and load that file with "
        "torch.load(weights_only=True) to save it with safetensors.torch.save_file"
    ),
    # The second half is of Orbax and T5X.
    r"\.(h5|msgpack|pth?|npz|ckpt(\.(index|meta|data-\S+))?)$|"
    r"(^|/)(_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|\.zarray)$": (
        "restore it with the library that reads it and save it as safetensors, or put its arrays "
        "where te.pretrained.load_config says"
    ),
    r"^config\.json$": "te.pretrained.load_config reads it without parameters",
}


class TensorInfo(NamedTuple):
    """A tensor's entry in the header; its bytes are those from `start` to `stop` of the file."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


# The entries of a file, and its metadata.
Header = tuple[dict[str, TensorInfo], Mapping[str, str]]


class Tensors(NamedTuple):
    """The tensors of a checkpoint.

    Args:
        path: the file, or the index file of shards.
        files: the file of each tensor.
        metadata: of the file.
        header: the entries of a file and its metadata. A shard is opened when one of its tensors is
            needed.
    """

    path: pathlib.Path
    files: Mapping[str, pathlib.Path]
    metadata: Mapping[str, str]
    header: Callable[[pathlib.Path], Header]

    def entry(self, name: str) -> TensorInfo:
        """A tensor's file, dtype and shape; a ValueError if it is not there or is not read."""
        file = self.files.get(name)
        if file is None:
            raise arguments.value_error(self.path, f"a tensor {name}", self.listed())
        entries, _ = self.header(file)
        entry = entries.get(name)
        if entry is None:
            want = f"a tensor {name}, which {self.path.name} says is there"
            raise arguments.value_error(file, want, listed(entries))
        if 0 in entry.shape:
            got = f"{entry}, as ZeRO-3 leaves it: gather the model by its zero_to_fp32.py"
            raise arguments.value_error(f"{self.path}: {name}", "a whole tensor", got)
        if entry.dtype not in DTYPES:
            got = f"{entry}: convert it first (a quantized model by its dequantize())"
            raise arguments.value_error(f"{self.path}: {name}", " or ".join(DTYPES), got)
        return entry

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same bytes."""
        first, second = self.entry(name), self.entry(other)
        # Tensors of one shape and dtype have as many pieces.
        pieces = zip(_pieces(first), _pieces(second), strict=False)
        return str(first) == str(second) and all(one == two for one, two in pieces)

    def read(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> np.ndarray:
        """A copy of a tensor, or of a part, of two axes; the last one has the columns.

        The copy starts at a page boundary, so that jax does not copy it again on a CPU. It avoids
        the huge pages that numpy asks for, which are slow to get on a busy machine.
        """
        entry = self.entry(name)
        dtype = DTYPES[entry.dtype]
        width = entry.shape[-1] if entry.shape else 1
        start, stop, _ = rows.indices(math.prod(entry.shape) // width)
        shape = stop - start, len(range(width)[columns])
        # No mapping has a size of 0.
        buffer = mmap.mmap(-1, max(math.prod(shape) * dtype.itemsize, 1))
        array = np.frombuffer(buffer, dtype, math.prod(shape)).reshape(shape)
        size = width * dtype.itemsize
        count = max(1, PIECE // size)
        part = entry._replace(start=entry.start + start * size, stop=entry.start + stop * size)
        for n, piece in enumerate(_pieces(part, count * size)):
            lines = np.frombuffer(piece, dtype).reshape(-1, width)
            array[n * count : n * count + len(lines)] = lines[:, columns]
        return array

    def is_stored(self, name: str) -> bool:
        """Returns whether a file holds this tensor; an index may name one that none has."""
        file = self.files.get(name)
        if file is None:
            return False
        entries, _ = self.header(file)
        return name in entries

    def listed(self) -> str:
        """Returns a few names of tensors for a message."""
        return listed(self.files)


def listed(tensors: Iterable[str]) -> str:
    """Returns a few names of tensors for a message; names outside numbered layers come first."""
    names = sorted(tensors, key=lambda name: (re.search(r"\b\d+\b", name) is not None, name))
    return f"{len(names)} tensors: {', '.join(names[:4])}"


def _pieces(entry: TensorInfo, size: int = PIECE) -> Iterator[bytes]:
    """Some bytes of a tensor at a time; the file is not mapped, to save memory."""
    with open(entry.file, "rb") as file:
        file.seek(entry.start)
        for start in range(entry.start, entry.stop, size):
            yield file.read(min(size, entry.stop - start))


def as_path(value: Any) -> pathlib.Path:
    """Returns a path; a first ~ is the user's home."""
    arguments.instance("path", value, str | os.PathLike, "a str or another path")
    if "\0" in os.fsdecode(value):
        raise arguments.value_error("path", "a path without null bytes", repr(os.fsdecode(value)))
    return pathlib.Path(value).expanduser()


def open_tensors(path: str | os.PathLike[str]) -> Tensors:
    """The tensors of a safetensors file, of an index file, or of a folder that holds one of them.

    An index file lists shards, which are beside it.
    """
    file = as_path(path)
    if not file.exists():
        raise FileNotFoundError(errno.ENOENT, NO_FILE, str(file))
    if file.is_dir():
        names = [name for name in (WHOLE, INDEX) if (file / name).exists()]
        if not names:
            below = itertools.islice(file.rglob("*"), MOST_FILES)
            got = _step(*(str(path.relative_to(file)) for path in below)) or "neither"
            raise arguments.value_error(file, f"a folder with {WHOLE} or {INDEX}", got)
        for adapter in file.glob("adapter_model.*"):
            warnings.warn(f"{adapter} was not read: {ADAPTER}", stacklevel=3)
        file /= names[0]
    # The header of a shard is read once, when its first tensor is asked for.
    header = functools.cache(_header)
    if file.name.endswith(".json"):
        return Tensors(file, _shards(file), {}, header)
    entries, metadata = header(file)
    return Tensors(file, dict.fromkeys(entries, file), metadata, header)


def _step(*names: str) -> str:
    """A file that is not read and what to do with it; an empty string for unknown ones."""
    for pattern, step in STEPS.items():
        for name in names:
            if re.search(pattern, name):
                return f"{name}: {step}"
    return ""


def _shards(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file of each tensor, as an index file says."""
    names: Any = read_json(path).get("weight_map")
    if not isinstance(names, dict):
        want = "a weight_map from tensors to files"
        raise arguments.value_error(path, want, repr(names))
    # Thousands of tensors are in a few files.
    for name in {*map(str, names.values())}:
        # Links are followed: a cache of the hub has links to files elsewhere.
        if pathlib.Path(name).name != name or "\0" in name:
            raise arguments.value_error(path, "shards in its folder", repr(name))
    return {tensor: path.parent / str(name) for tensor, name in names.items()}


def call_with_named_errors(
    name: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The result of a function; errors become a ValueError that starts with the name."""
    try:
        return function(*args, **kwargs)
    # JSON may nest deeper than Python calls, and has infinities, which no int has.
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{arguments.shown(name)}: {arguments.shown(error)}") from error


def check_mappings(**values: Any) -> None:
    """Raises a TypeError unless each value is a mapping, or None."""
    for name, value in values.items():
        arguments.instance(name, value, Mapping | None, "a mapping, or None")


def parse(
    name: Any, text: str | bytes, decode: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """A JSON object, each inner one decoded; a ValueError for any other text."""
    value = call_with_named_errors(f"{name}, as JSON", json.loads, text, object_hook=decode)
    if not isinstance(value, dict):
        raise arguments.value_error(name, "a JSON object", type(value).__name__)
    return value


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; a ValueError if the file holds anything else."""
    return parse(path, path.read_bytes())


def _header(path: pathlib.Path) -> Header:
    """Each tensor's entry, and the metadata."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (slow to load)

    try:
        # It checks the header, and that the file is whole.
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        with open(path, "rb") as file:
            is_pointer = file.read(7) == b"version"
        step = POINTER if is_pointer else _step(path.name.removesuffix(".safetensors"))
        got = step or f"one that cannot be read ({error})"
        raise arguments.value_error(path, "a whole safetensors file", got) from error
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    metadata = header.pop("__metadata__", None) or {}
    entries = {
        name: TensorInfo(
            path,
            entry["dtype"],
            tuple(entry["shape"]),
            *(8 + size + offset for offset in entry["data_offsets"]),
        )
        for name, entry in header.items()
    }
    # safetensors.torch.save_model keeps one of several names, and says the others here.
    others = {name: entries[kept] for name, kept in metadata.items() if kept in entries}
    return others | entries, metadata


@contextlib.contextmanager
def written(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]
) -> Iterator[Tensors]:
    """What is written to a safetensors file, whole, or not at all if the caller raises.

    A temporary file is renamed at the end, so that the path always has a whole file. A replaced
    file keeps its mode.
    """
    from safetensors.numpy import save  # noqa: PLC0415 (slow to load)

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
            file.write(_in_order(save({**arrays}, metadata)))
            file.flush()
            # Errors name the path.
            yield open_tensors(temporary)._replace(path=path)
            # The data first: after a crash, the new name must not have an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _in_order(data: bytes) -> bytes:
    """A safetensors file whose metadata are sorted, so that equal arguments write equal files."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return data[:8] + text.encode().ljust(end - 8) + data[end:]
