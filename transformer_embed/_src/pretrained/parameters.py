"""The parameters of an input layer: their paths, their shapes, and the tensors that they are in."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embedder import Embedder
from transformer_embed._src.layers.parameters import Params, leaves_by_path
from transformer_embed._src.pretrained.entries import Options
from transformer_embed._src.pretrained.files import call_with_named_errors
from transformer_embed._src.pretrained.layer_parts import (
    BIAS,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    PER_LAYER_WEIGHTS,
    TOKENS,
    WIDEN,
)
from transformer_embed._src.pretrained.layers import Layer
from transformer_embed._src.pretrained.tensors import Tensors, aligned_zeros

# The parameters of linear layers, which this package has as [in, out].
LINEAR_WEIGHTS = (WIDEN, PER_LAYER_WEIGHTS)
# What the caller adds to the name of a tensor to have its transpose.
TRANSPOSED = ".T"
# The shape and the dtype of each parameter (`jax.ShapeDtypeStruct`), by its path.
Specs = dict[str, Any]


class PretrainedInput(NamedTuple):
    """Holds the input layer of a checkpoint, as `load_embedder` returns it.

    To save such an input layer, call `save_embedder(path, *found)`.

    Args:
        config: The config for `Embedder` and `TransformerEmbedding`.
        params: The parameters, for `Embedder(config).apply`. For T5, `params` also has the table of
            position biases, under `relative_position_bias`. In Gemma 3n and small Gemma 4 models,
            one more table gives each layer an extra vector for each id. This table, and the
            parameters that are needed with it, are under `per_layer_inputs`. Notebook 08 shows how
            to use them. If `save_embedder` wrote the file, `params` has all parameters that were
            saved. For example, if you saved a whole model, `params` also has the parameters of the
            attention layers, under the paths that they had in the model.
        layers: A `Layer` for each layer of the model. It says what your attention layers need: the
            arguments of `apply_rotary` and of `AttentionMask`, the numbers of heads, and more. The
            sequence is empty if the number of layers is not known, or if the layers differ in a way
            that this package does not know.
        bias: The keyword arguments of `RelativePositionBias` (T5) or `alibi_bias` (Bloom). If None,
            the model adds no position bias to the attention logits.
        names: The name of each parameter's tensor, as a dict {path of a parameter: name of a
            tensor}.
        no_output: Why `config.output` is None, as a sentence. If `no_output` is None, the model has
            an output layer.

    Example:
        >>> import transformer_embed as te
        >>> te.pretrained.PretrainedInput._fields
        ('config', 'params', 'layers', 'bias', 'names', 'no_output')
    """

    config: EmbedderConfig
    params: Params
    layers: Sequence[Layer] = ()
    bias: Mapping[str, Any] | None = None
    names: Mapping[str, str] | None = None
    no_output: str | None = None


def shapes_of(config: EmbedderConfig, bias: Options | None = None) -> Specs:
    """Returns the shape and the dtype of each parameter of an input layer, by its path.

    With the arguments of T5's bias, the table of biases is among the parameters.
    """
    # For each module, the shape and dtype of each parameter by name.
    modules: Any = dict(jax.eval_shape(Embedder(config).init, jax.random.key(0)))
    # Only the bias of T5 has buckets, and with them a table.
    if bias is not None and "num_buckets" in bias:
        module, _, name = BIAS.rpartition("/")
        table_shape = bias["num_buckets"], bias.get("num_heads")
        modules[module] = {name: jax.ShapeDtypeStruct(table_shape, np.float32)}
    return leaves_by_path(modules)


def full_paths(
    names: Mapping[Any, Any], paths: Collection[str], argument: str = "names"
) -> dict[str, Any]:
    """Returns a mapping whose keys are whole paths.

    Args:
        names: The mapping, such as {"layer_norm/scale": "norm.weight"}. A key is a path, or a
            suffix that exactly one path has.
        paths: The paths of all parameters.
        argument: The name of the caller's argument that is the mapping, for errors.
    """
    by_path = {}
    for name, value in names.items():
        # The path itself, or the paths that end with this name.
        paths_of_name = arguments.paths_of(name, paths)
        is_one_path = len(paths_of_name) == 1
        is_named_once = by_path.keys().isdisjoint(paths_of_name)
        if not is_one_path or not is_named_once:
            among = ", ".join(paths)
            want = f"a parameter's path, or a suffix that only one path has, among {among}"
            raise arguments.value_error(argument, want, repr(name))
        (path,) = paths_of_name
        by_path[path] = value
    return by_path


class StoredTensor(NamedTuple):
    """Where a parameter is stored.

    Args:
        name: The name of the tensor.
        is_transposed: Whether the tensor is the transpose of the parameter.
    """

    name: str
    is_transposed: bool

    def swap_if_transposed(self, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns sizes or slices in the reversed order if the tensor is the transpose.

        So the shape (2, 3) of the parameter gives the shape (3, 2) of the tensor. The same call
        also leads from the tensor back to the parameter.
        """
        return sizes[::-1] if self.is_transposed else sizes


def find_stored_tensor(parameter: str, tensor: str) -> StoredTensor:
    """Returns the tensor that a parameter is stored in, and whether it is the transpose.

    A name that ends with ".T" asks for the transpose. Otherwise the end of the name says how a
    linear layer is stored: "kernel" (Flax) and "w" (Haiku) are [in, out], and all other names are
    [out, in], as in PyTorch. In this package, linear layers are [in, out], and tables are
    [rows, width], which is [out, in] for an output layer.

    Args:
        parameter: The path of the parameter.
        tensor: The tensor's name, from the caller or the model type, perhaps with ".T" at the end.
    """
    if tensor.endswith(TRANSPOSED):
        return StoredTensor(name=tensor.removesuffix(TRANSPOSED), is_transposed=True)
    if tensor == parameter:
        # `save_embedder` stored the parameter as it is.
        return StoredTensor(name=tensor, is_transposed=False)
    tensor_is_in_out = re.search(r"\b(kernel|w)$", tensor) is not None
    if parameter == OUTPUT_TABLE:
        # The parameter is [out, in].
        return StoredTensor(name=tensor, is_transposed=tensor_is_in_out)
    if parameter in LINEAR_WEIGHTS:
        # The parameter is [in, out].
        return StoredTensor(name=tensor, is_transposed=not tensor_is_in_out)
    return StoredTensor(name=tensor, is_transposed=False)


def check_tensors(
    tensors: Tensors,
    pretrained: PretrainedInput,
    may_lack: Collection[str] = (),
) -> Specs:
    """Returns the shape and the dtype of each parameter that is to be read.

    For the parameters of the layer, these are the shapes that the config says, and each tensor is
    checked for this shape. A file of a whole model also has parameters outside the layer. For them,
    no shape is known, so the result has the shape of the tensor.

    Args:
        tensors: The tensors of the file.
        pretrained: The description of the layer, and the tensor of each parameter.
        may_lack: The paths of the parameters that may have no tensor.

    Raises:
        ValueError: a parameter has no tensor, or a tensor of another shape.
    """
    config = pretrained.config
    # The shape and the dtype that the config says for each parameter, by its path.
    specs = shapes_of(config, pretrained.bias)
    # The name of each parameter's tensor, by the parameter's path.
    names = pretrained.names or {}
    parameters_without_tensor = specs.keys() - names.keys()
    missing = parameters_without_tensor - set(may_lack)
    if missing:
        want = f"a tensor for each parameter, also for {', '.join(sorted(missing))}"
        raise arguments.value_error(tensors.path, want, f"only {sorted(names)}")
    for parameter, name in names.items():
        # The tensor's name in the file, and whether the tensor is stored transposed.
        tensor = find_stored_tensor(parameter, str(name))
        # The dtype and the shape that the file says.
        info = tensors.entry(tensor.name)
        if parameter not in specs:
            # The config says nothing of a parameter outside the layer, so the file says its shape.
            parameter_shape = tensor.swap_if_transposed(info.shape)
            specs[parameter] = jax.ShapeDtypeStruct(parameter_shape, config.param_dtype)
        shape = specs[parameter].shape
        possible_shapes = [shape]
        # The parameters with a row for each id.
        if parameter in (TOKENS, OUTPUT_TABLE, OUTPUT_BIAS):
            # The file may lack the rows of zeros that `row_multiple` adds.
            possible_shapes.append((config.vocab_size, *shape[1:]))
        # A tensor may have more axes of length 1 at the front.
        leading_ones = (1,) * (len(info.shape) - len(shape))
        shapes_in_file = []
        for possible_shape in possible_shapes:
            shapes_in_file.append(leading_ones + tensor.swap_if_transposed(possible_shape))
        if info.shape not in shapes_in_file:
            shape_in_file = list(tensor.swap_if_transposed(shape))
            want = f"shape {shape_in_file}, as the configuration says"
            raise arguments.value_error(f"{tensors.path}: {tensor.name}", want, info)
    return specs


def read_parameters(
    tensors: Tensors, pretrained: PretrainedInput, specs: Specs, shardings: Options
) -> Params:
    """Returns the parameters, with zeros for a parameter without a tensor.

    Args:
        tensors: The tensors of the file.
        pretrained: The description of the layer, and the tensor of each parameter.
        specs: The shape and the dtype of each parameter, from `check_tensors`.
        shardings: The shardings of parameters, by their paths. Each device's part is then read on
            its own. If there are any, the other parameters are whole on each device of the mesh.
    """
    params: dict[str, dict[str, Array]] = {}
    names = pretrained.names or {}
    # The sharding of a parameter that is not in `shardings`.
    default_sharding = None
    if shardings:
        first_sharding, *_ = shardings.values()
        default_sharding = NamedSharding(first_sharding.mesh, P())
    for path, spec in specs.items():
        # `read_part(index)` reads the part of the parameter that a slice for each axis selects.
        read_part = functools.partial(_read_part, tensors, path, names.get(path), spec)
        sharding = shardings.get(path, default_sharding)
        if sharding is None:
            whole = (slice(None),) * len(spec.shape)
            # Unlike jnp.asarray, this makes no copy on a CPU.
            array = jax.device_put(read_part(whole))
        else:
            make_array: Any = jax.make_array_from_callback
            array = call_with_named_errors(
                f"shardings: {path}", make_array, spec.shape, sharding, read_part
            )
        module, _, leaf = path.rpartition("/")
        params.setdefault(module, {})[leaf] = array
    return params


def _read_part(
    tensors: Tensors, path: str, name: Any, spec: Any, index: tuple[slice, ...]
) -> np.ndarray:
    """Returns the part of a parameter that an index selects.

    Args:
        tensors: The tensors of the file.
        path: The path of the parameter.
        name: The name of its tensor, or None for zeros.
        spec: The shape and the dtype of the whole parameter.
        index: A slice for each axis. If the parameter is a matrix, only the rows of the slice are
            read.
    """
    if name is None:
        # All elements of this array are one zero in memory.
        zeros = np.broadcast_to(np.zeros((), spec.dtype), spec.shape)
        return zeros[index]
    tensor = find_stored_tensor(path, name)
    part_shape = []
    for size, axis_slice in zip(spec.shape, index, strict=True):
        indices_in_slice = range(size)[axis_slice]
        part_shape.append(len(indices_in_slice))
    # The part starts as zeros, because the last rows of a token table may be missing in the file:
    # if `config.row_multiple` is above 1, the parameter has more rows than the vocabulary has ids.
    part = aligned_zeros(tuple(part_shape), tensors.dtype(tensor.name))
    if len(index) == 2:
        # If the tensor is the transpose, the second slice selects rows of the tensor.
        rows, columns = tensor.swap_if_transposed(index)
        # The transpose is a view of the same memory, so `read_into` writes to `part`.
        part_as_stored = part.T if tensor.is_transposed else part
        tensors.read_into(part_as_stored, tensor.name, rows, columns)
    else:
        vector = tensors.read(tensor.name).reshape(-1)
        # A vector, such as an output bias, may also lack the last values in the file.
        stored_values = vector[index]
        part[: len(stored_values)] = stored_values
    return part
