"""`open_checkpoint`, which reads any tensor of a checkpoint, one at a time, straight to a mesh."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from transformer_embed._src import arguments
from transformer_embed._src.array_types import DTypeLike
from transformer_embed._src.pretrained.files import call_with_named_errors, read_json
from transformer_embed._src.pretrained.model_type import ModelType
from transformer_embed._src.pretrained.parameters import TRANSPOSED
from transformer_embed._src.pretrained.registry import row_of
from transformer_embed._src.pretrained.tensors import Tensors, dtype_of, empty_array, open_tensors


class TensorFacts(NamedTuple):
    """What a checkpoint says of a tensor, as `Checkpoint.facts` returns it.

    Args:
        shape: The shape in the file.
        dtype: The dtype in the file.
        is_transposed: True if the tensor is the weight of a linear layer that lies [out, in], as in
            PyTorch: the `w` of `hk.Linear` is the transpose, which you read by the name with ".T"
            at the end. False if it lies [in, out] (Flax, Haiku, and the layers of GPT-2). None if
            it is no weight of a linear layer, as far as its name and the model's type say.

    Example:
        >>> import transformer_embed as te
        >>> te.pretrained.TensorFacts._fields
        ('shape', 'dtype', 'is_transposed')
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_transposed: bool | None


class Checkpoint:
    """The tensors of a checkpoint, as `open_checkpoint` returns them.

    Args:
        names: The names of all tensors, as the files have them.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np, safetensors.numpy
        >>> import transformer_embed as te
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
        >>> safetensors.numpy.save_file({"norm.weight": np.ones(8, np.float32)}, path)
        >>> checkpoint = te.pretrained.open_checkpoint(path)
        >>> checkpoint.names
        ['norm.weight']
        >>> checkpoint.read(checkpoint.names)["norm.weight"].shape
        (8,)
    """

    def __init__(self, tensors: Tensors, row: ModelType | None):
        self._tensors = tensors
        self._row = row
        self.names: Sequence[str] = sorted(tensors.files)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self._tensors.path)!r}, {len(self.names)} tensors)"

    def facts(self, name: str) -> TensorFacts:
        """Returns the shape and the dtype of a tensor, and whether it is transposed.

        Args:
            name: The name of the tensor, as the file has it.

        Raises:
            ValueError: there is no such tensor, or it is not whole.
        """
        entry = self._tensors.any_entry(name)
        return TensorFacts(
            shape=entry.shape,
            dtype=dtype_of(entry),
            is_transposed=_is_transposed(name, entry.shape, self._row),
        )

    def read(
        self,
        names: Sequence[str],
        *,
        shardings: Mapping[str, NamedSharding] | None = None,
        dtype: DTypeLike | None = None,
    ) -> dict[str, Array]:
        """Reads tensors, each device its own part.

        Args:
            names: The names of tensors, as the files have them. With ".T" at the end of a name, the
                transpose of the tensor is read.
            shardings: How tensors are split over a mesh, by the same names. A tensor that is left
                out is on the default device. Only the rows that a device needs are read for it.
            dtype: The dtype of all arrays. If None, each has the dtype of its tensor. Values are
                cast in pieces, so no second copy is made.

        Returns:
            The arrays, by the same names.

        Raises:
            TypeError: an argument is of another type.
            ValueError: there is no such tensor; it is not whole; the devices do not divide it; or
                it has 64 bits, which jax would narrow (pass a dtype).
        """
        if isinstance(names, str):
            raise arguments.type_error("names", "a sequence of names", repr(names))
        shardings = {} if shardings is None else shardings
        for name, sharding in shardings.items():
            arguments.instance(f"shardings: {name}", sharding, NamedSharding, "a NamedSharding")
            if name not in names:
                raise arguments.value_error("shardings", "some of the names", repr(name))
        return {name: self._read(name, shardings.get(name), dtype) for name in names}

    def _read(self, name: str, sharding: NamedSharding | None, dtype: DTypeLike | None) -> Array:
        """Returns one tensor."""
        is_transposed = name.endswith(TRANSPOSED) and name not in self._tensors.files
        stored_name = name.removesuffix(TRANSPOSED) if is_transposed else name
        entry = self._tensors.any_entry(stored_name)
        wanted = dtype_of(entry) if dtype is None else jnp.dtype(dtype)
        if jax.dtypes.canonicalize_dtype(wanted) != wanted:
            want = "a dtype that jax has (or x64 turned on)"
            raise arguments.value_error(f"dtype of {name}", want, wanted)
        shape = entry.shape[::-1] if is_transposed else entry.shape

        def read_part(index: tuple[slice, ...]) -> np.ndarray:
            return _read_part(self._tensors, stored_name, entry.shape, wanted, index, is_transposed)

        if sharding is None:
            # Unlike jnp.asarray, this makes no copy on a CPU.
            return jax.device_put(read_part((slice(None),) * len(shape)))
        make: Any = jax.make_array_from_callback
        return call_with_named_errors(f"shardings: {name}", make, shape, sharding, read_part)


def _read_part(
    tensors: Tensors,
    name: str,
    stored_shape: tuple[int, ...],
    dtype: np.dtype,
    index: tuple[slice, ...],
    is_transposed: bool,
) -> np.ndarray:
    """Returns a part of a tensor or of its transpose."""
    stored_index = index[::-1] if is_transposed else index
    if len(stored_shape) == 2:
        rows, columns = stored_index
        sizes = [
            len(range(size)[part]) for size, part in zip(stored_shape, stored_index, strict=True)
        ]
        array = empty_array(tuple(sizes[::-1] if is_transposed else sizes), dtype)
        tensors.read_into(array.T if is_transposed else array, name, rows, columns)
        return array
    # A tensor with other axes is read whole, with its last axis for columns.
    array = empty_array(stored_shape, dtype)
    width = stored_shape[-1] if stored_shape else 1
    tensors.read_into(array.reshape(-1, width), name)
    whole = array.T if is_transposed else array
    # With an ellipsis, a part of an array without axes is an array, too.
    return whole[(*index, ...)]


def _is_transposed(name: str, shape: tuple[int, ...], row: ModelType | None) -> bool | None:
    """Returns whether a linear layer lies [out, in]; None: it is none, or that is not known."""
    module, _, leaf = name.rpartition(".")
    if len(shape) != 2:
        return None
    if leaf in ("kernel", "w"):
        return False
    if leaf != "weight" or row is None:
        return None
    tables = f"{row.tokens} {row.positions} {row.token_types} {row.bias} {row.head}"
    is_table = any(
        f".{module}".endswith(f".{table}")
        for stack in ("encoder", "decoder")
        for table in tables.format(stack=stack).split()
    )
    if is_table:
        return None
    return not row.has_conv1d


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint, of which you can then read any tensor.

    Use it after `load_embedder` to load the layers of the same model: each tensor is read when you
    ask for it, straight to the devices that need it. A shard is opened when one of its tensors is
    asked for.

    Args:
        path: As for `load_embedder`.

    Returns:
        A `Checkpoint`, whose `names` lists the tensors. `facts(name)` has a tensor's shape and
        dtype, and whether it is the transpose of a Haiku weight; `read(names)` reads tensors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or has another format.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np, safetensors.numpy
        >>> import transformer_embed as te
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
        >>> safetensors.numpy.save_file({"h.0.q.weight": np.ones([8, 4], np.float32)}, path)
        >>> checkpoint = te.pretrained.open_checkpoint(path)
        >>> checkpoint.facts("h.0.q.weight").shape
        (8, 4)
        >>> arrays = checkpoint.read(["h.0.q.weight.T"], dtype="bfloat16")
        >>> arrays["h.0.q.weight.T"].shape
        (4, 8)
    """
    tensors = open_tensors(path)
    beside = tensors.path.parent / "config.json"
    entries = read_json(beside) if beside.exists() else {}
    text = entries.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return Checkpoint(tensors, row_of(inner or entries.get("model_type")))
