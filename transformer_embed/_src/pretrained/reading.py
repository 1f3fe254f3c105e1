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
from transformer_embed._src.pretrained.files import call_with_named_errors, read_json_if_there
from transformer_embed._src.pretrained.layer_parts import STACKS
from transformer_embed._src.pretrained.model_type import ModelType, ends_with_parts
from transformer_embed._src.pretrained.parameters import TRANSPOSED
from transformer_embed._src.pretrained.registry import model_type_or_none
from transformer_embed._src.pretrained.tensors import Tensors, aligned_zeros, dtype_of, open_tensors


class TensorFacts(NamedTuple):
    """Holds what a checkpoint says of a tensor, as `Checkpoint.facts` returns it.

    Args:
        shape: The shape of the tensor in the file.
        dtype: The dtype of the tensor in the file.
        is_transposed: How the weight of a linear layer is stored. If True, the weight is stored as
            [out, in] (PyTorch). `hk.Linear` needs a weight `w` of shape [in, out], the transpose.
            To read the transpose, put ".T" at the end of the name that you pass to
            `Checkpoint.read`. If False, the weight is stored as [in, out] (Flax, Haiku, and the
            layers of GPT-2), so you need no ".T". If None, the tensor is not the weight of a linear
            layer, but a table or a bias, for example. It is also None if this package does not know
            how the weight is stored, because the model type is unknown.

    Example:
        >>> import transformer_embed as te
        >>> te.pretrained.TensorFacts._fields
        ('shape', 'dtype', 'is_transposed')
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_transposed: bool | None


class Checkpoint:
    """Reads the tensors of a checkpoint. `open_checkpoint` returns it.

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

    def __init__(self, tensors: Tensors, model_type: ModelType | None):
        self._tensors = tensors
        self._model_type = model_type
        self.names: Sequence[str] = sorted(tensors.files)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self._tensors.path)!r}, {len(self.names)} tensors)"

    def facts(self, name: str) -> TensorFacts:
        """Returns the shape and the dtype of a tensor, and whether it is transposed.

        Args:
            name: The name of the tensor, as the file has it.

        Raises:
            ValueError: The name is not in the checkpoint, or its tensor is empty, as in checkpoints
                that DeepSpeed saved with ZeRO stage 3.
        """
        entry = self._tensors.entry_of_any_dtype(name)
        return TensorFacts(
            shape=entry.shape,
            dtype=dtype_of(entry),
            is_transposed=_is_transposed(name, entry.shape, self._model_type),
        )

    def read(
        self,
        names: Sequence[str],
        *,
        shardings: Mapping[str, NamedSharding] | None = None,
        dtype: DTypeLike | None = None,
    ) -> dict[str, Array]:
        """Reads tensors from the file, straight to the devices that need them.

        Args:
            names: The names of tensors, as the files have them. If you add ".T" to a name, the
                transpose of the tensor is read.
            shardings: How tensors are split over a mesh, as a dict {name: sharding}, with names
                that are in `names`. For each device, only the rows that the device needs are read.
                A tensor that you leave out is put on the default device.
            dtype: The dtype of all arrays. If None, each array has the dtype that the tensor has in
                the file. Values are cast in pieces, so no second copy of a tensor is made.

        Returns:
            The arrays, as a dict {name: array} with the names in `names`.

        Raises:
            TypeError: `names` is a str, or a value of `shardings` is not a `NamedSharding`.
            ValueError: A name is not in the checkpoint, or its tensor is empty, as in checkpoints
                that DeepSpeed saved with ZeRO stage 3. `shardings` splits an axis of a tensor over
                devices, but the length of the axis is not a multiple of their number. A tensor has
                a dtype of 64 bits, which jax would narrow to 32 bits. (Pass a `dtype`.)
        """
        if isinstance(names, str):
            raise arguments.type_error("names", "a sequence of names", repr(names))
        shardings = {} if shardings is None else shardings
        for name, sharding in shardings.items():
            arguments.instance(f"shardings: {name}", sharding, NamedSharding, "a NamedSharding")
            if name not in names:
                raise arguments.value_error("shardings", "some of the names", repr(name))
        return {name: self._read_one(name, shardings.get(name), dtype) for name in names}

    def _read_one(
        self, name: str, sharding: NamedSharding | None, dtype: DTypeLike | None
    ) -> Array:
        """Returns one tensor, or its transpose if ".T" was added to the name."""
        # The name of a tensor in the file may itself end with ".T".
        is_transposed = name.endswith(TRANSPOSED) and name not in self._tensors.files
        tensor_name = name.removesuffix(TRANSPOSED) if is_transposed else name
        entry = self._tensors.entry_of_any_dtype(tensor_name)
        array_dtype = dtype_of(entry) if dtype is None else jnp.dtype(dtype)
        # Without x64, jax would silently make float32 of float64, and int32 of int64.
        if jax.dtypes.canonicalize_dtype(array_dtype) != array_dtype:
            want = "a dtype that jax has (or x64 turned on)"
            raise arguments.value_error(f"dtype of {name}", want, array_dtype)
        array_shape = entry.shape[::-1] if is_transposed else entry.shape

        def read_part(index: tuple[slice, ...]) -> np.ndarray:
            """Returns the part of the array that a slice for each axis selects."""
            return _read_part(self._tensors, tensor_name, array_dtype, index, is_transposed)

        if sharding is None:
            whole = (slice(None),) * len(array_shape)
            # Unlike jnp.asarray, this makes no copy on a CPU.
            return jax.device_put(read_part(whole))
        make_array: Any = jax.make_array_from_callback
        return call_with_named_errors(
            f"shardings: {name}", make_array, array_shape, sharding, read_part
        )


def _read_part(
    tensors: Tensors, name: str, dtype: np.dtype, index: tuple[slice, ...], is_transposed: bool
) -> np.ndarray:
    """Returns a part of a tensor, or of the tensor's transpose.

    `index` has a slice for each axis of the tensor, or of the transpose if `is_transposed`.
    """
    shape = tensors.entry_of_any_dtype(name).shape
    if len(shape) == 2:
        return _read_part_of_matrix(tensors, name, dtype, index, is_transposed)
    # A tensor with more or fewer axes is read whole, in rows of its last axis.
    whole = aligned_zeros(shape, dtype)
    width = shape[-1] if shape else 1
    tensors.read_into(whole.reshape(-1, width), name)
    array = whole.T if is_transposed else whole
    # The ellipsis makes numpy return an array, and not a number, for a tensor without axes.
    return array[(*index, ...)]


def _read_part_of_matrix(
    tensors: Tensors, name: str, dtype: np.dtype, index: tuple[slice, ...], is_transposed: bool
) -> np.ndarray:
    """Returns a part of a matrix, or of the transpose. Reads only the rows that the part needs.

    `index` has a slice for each axis of the result. If `is_transposed`, the first slice selects
    columns of the tensor, and the second slice selects rows.
    """
    row_count, column_count = tensors.entry_of_any_dtype(name).shape
    if is_transposed:
        column_slice, row_slice = index
    else:
        row_slice, column_slice = index
    rows = range(row_count)[row_slice]
    columns = range(column_count)[column_slice]
    if is_transposed:
        part = aligned_zeros((len(columns), len(rows)), dtype)
        # Each row of the tensor is written to a column of the part, without a second copy.
        tensors.read_into(part.T, name, row_slice, column_slice)
        return part
    part = aligned_zeros((len(rows), len(columns)), dtype)
    tensors.read_into(part, name, row_slice, column_slice)
    return part


def _is_transposed(name: str, shape: tuple[int, ...], model_type: ModelType | None) -> bool | None:
    """Returns whether a linear layer's weight is stored as [out, in].

    The result is None if the tensor is no weight of a linear layer, or if neither its name nor the
    model type says how it is stored.
    """
    module, _, leaf = name.rpartition(".")
    if len(shape) != 2:
        return None
    if leaf in ("kernel", "w"):
        return False
    if leaf != "weight" or model_type is None or _is_table(module, model_type):
        return None
    return not model_type.has_conv1d


def _is_table(module: str, model_type: ModelType) -> bool:
    """Returns whether a module of a model of this type is a table, and not a linear layer."""
    # Each of these texts has the modules of one table, with spaces between them. The table of
    # `bias` is T5's table of position biases. In a module, "{stack}" is "encoder" or "decoder".
    modules_of_tables = [
        model_type.tokens,
        model_type.positions,
        model_type.token_types,
        model_type.bias,
        model_type.head,
    ]
    for modules in modules_of_tables:
        for stack in STACKS:
            for module_of_table in modules.format(stack=stack).split():
                if ends_with_parts(module, module_of_table):
                    return True
    return False


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint, so that you can read any of its tensors.

    Use it after `load_embedder` to load the other layers of the same model. This function only
    opens the checkpoint. A tensor is read when you call `Checkpoint.read`, and the values go
    straight to the devices that need them. If the checkpoint has several files (shards), the file
    of a shard is opened when you first call `read` or `facts` for a tensor in it.

    Args:
        path: A safetensors file, an index file (`model.safetensors.index.json`) beside its shards,
            or a folder that holds `model.safetensors` or that index file.

    Returns:
        A `Checkpoint`. The attribute `names` lists the names of all tensors. The method
        `facts(name)` returns the shape and the dtype of a tensor, and whether the tensor is the
        transpose of a Haiku weight. The method `read(names)` reads tensors.

    Raises:
        FileNotFoundError: There is no file at the path.
        ValueError: The file is damaged, or is not in the safetensors format.

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
    config_path = tensors.path.parent / "config.json"
    entries = read_json_if_there(config_path)
    text_entries = entries.get("text_config")
    type_name = entries.get("model_type")
    if isinstance(text_entries, Mapping):
        type_name = text_entries.get("model_type") or type_name
    return Checkpoint(tensors, model_type_or_none(type_name))
