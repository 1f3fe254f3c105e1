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

# Parameters that are [in, out].
LINEAR_WEIGHTS = (WIDEN, PER_LAYER_WEIGHTS)
TRANSPOSED = ".T"
# A shape and a dtype for each parameter, by its path.
Specs = dict[str, Any]


class PretrainedInput(NamedTuple):
    """The input layer of a checkpoint, as `load_embedder` returns it.

    `save_embedder(path, *found)` writes all of it.

    Args:
        config: The config for `Embedder` and `TransformerEmbedding`.
        params: The parameters for the `apply` of that embedder. T5's table of biases is under
            `relative_position_bias`, and what the layers of Gemma 3n and small Gemma 4 models read
            besides is under `per_layer_inputs` (notebook 08 computes it). From a file of
            `save_embedder`, params are all that was saved: the other parameters of a whole model
            are there too, under their own paths.
        layers: The facts of each layer, for your attention layers. Each has `type`, the kind as
            config.json's `layer_types` names it; `rotary`, the keyword arguments of `apply_rotary`,
            or None if it does not rotate; `mask`, the keyword arguments of `AttentionMask`;
            `query_scale`, the keyword arguments of `query_scale`, or None; `image_blocks`, where
            the tokens of an image see each other; `attention`, the heads, the scale, the softcap
            and the sinks, or None if they are not known; and `norm_eps`. With `pair_axes`
            (Qwen-VL), positions have three axes, time, height and width, which are equal for text.
            The sequence is empty if the file says neither how many layers there are nor how they
            rotate, or if they differ in a way that is not known.
        bias: The keyword arguments of `RelativePositionBias` (T5) or `alibi_bias` (Bloom). If None,
            the model has no bias.
        names: The name of the tensor that each parameter came from.
        no_output: Why `config.output` is None, in words. If None, there is an output layer.

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
    """Returns the shape and dtype of each parameter, by its path."""
    modules: Any = dict(jax.eval_shape(Embedder(config).init, jax.random.key(0)))
    if bias is not None and "num_buckets" in bias:
        module, _, name = BIAS.rpartition("/")
        shape = bias["num_buckets"], bias.get("num_heads")
        modules[module] = {name: jax.ShapeDtypeStruct(shape, np.float32)}
    return leaves_by_path(modules)


def full_paths(
    names: Mapping[Any, Any], paths: Collection[str], what: str = "names"
) -> dict[str, Any]:
    """Returns a mapping with full paths; a key is a path, or a suffix of exactly one path."""
    full = {}
    for name, value in names.items():
        matches = arguments.paths_of(name, paths)
        if len(matches) != 1 or matches[0] in full:
            among = ", ".join(paths)
            want = f"a parameter's path, or a suffix that only one path has, among {among}"
            raise arguments.value_error(what, want, repr(name))
        full[matches[0]] = value
    return full


class StoredTensor(NamedTuple):
    """Where a parameter is: the name of its tensor, and whether the tensor is its transpose."""

    name: str
    is_transposed: bool


def stored(parameter: str, tensor: str) -> StoredTensor:
    """Returns the tensor of a parameter, whose name says how it lies.

    Weights of PyTorch are [out, in], as a table is. Kernels of Flax and weights of Haiku are
    [in, out], as this package's own linear layers are. A ".T" at the end says that any other tensor
    is the parameter's transpose.
    """
    if tensor.endswith(TRANSPOSED):
        return StoredTensor(tensor.removesuffix(TRANSPOSED), is_transposed=True)
    if tensor == parameter:
        return StoredTensor(tensor, is_transposed=False)
    is_in_out = re.search(r"\b(kernel|w)$", tensor) is not None
    if parameter == OUTPUT_TABLE:
        return StoredTensor(tensor, is_transposed=is_in_out)
    return StoredTensor(tensor, is_transposed=parameter in LINEAR_WEIGHTS and not is_in_out)


def check_tensors(
    tensors: Tensors,
    pretrained: PretrainedInput,
    may_lack: Collection[str] = (),
) -> Specs:
    """Returns the parameters, or raises a ValueError unless each has a tensor of its shape.

    A parameter beside the layer of the config has the shape that is stored.
    """
    config = pretrained.config
    specs = shapes_of(config, pretrained.bias)
    names = pretrained.names or {}
    missing = specs.keys() - names.keys() - set(may_lack)
    if missing:
        want = f"a tensor for each parameter, also for {', '.join(sorted(missing))}"
        raise arguments.value_error(tensors.path, want, f"only {sorted(names)}")
    for parameter, name in names.items():
        tensor = stored(parameter, str(name))
        entry = tensors.entry(tensor.name)
        step = -1 if tensor.is_transposed else 1
        beside = jax.ShapeDtypeStruct(entry.shape[::step], config.param_dtype)
        whole_shape = specs.setdefault(parameter, beside).shape
        shapes = [whole_shape[::step]]
        if parameter in (TOKENS, OUTPUT_TABLE, OUTPUT_BIAS):
            # The file lacks the rows of zeros that `row_multiple` adds.
            shapes.append((config.vocab_size, *whole_shape[1:])[::step])
        # Leading axes of 1 are dropped.
        ones = (1,) * (len(entry.shape) - len(whole_shape))
        if entry.shape not in [ones + shape for shape in shapes]:
            want = f"shape {list(shapes[0])}, as the configuration says"
            raise arguments.value_error(f"{tensors.path}: {tensor.name}", want, entry)
    return specs


def read_parameters(
    tensors: Tensors, pretrained: PretrainedInput, specs: Specs, shardings: Options
) -> Params:
    """Returns the parameters, with zeros for a parameter without a tensor.

    Each device's part of a split parameter is read on its own. If any parameter is split, the
    others are whole on each device of its mesh.
    """
    params: dict[str, dict[str, Array]] = {}
    names = pretrained.names or {}
    meshes = [sharding.mesh for sharding in shardings.values()]
    whole_on_mesh = NamedSharding(meshes[0], P()) if meshes else None
    for path, spec in specs.items():
        module, _, leaf = path.rpartition("/")
        read = functools.partial(_read_part, tensors, path, names.get(path), spec)
        sharding = shardings.get(path, whole_on_mesh)
        if sharding is None:
            # Unlike jnp.asarray, this makes no copy on a CPU.
            array = jax.device_put(read((slice(None),) * len(spec.shape)))
        else:
            make = functools.partial(jax.make_array_from_callback, spec.shape, sharding)
            array = call_with_named_errors(f"shardings: {path}", make, read)
        params.setdefault(module, {})[leaf] = array
    return params


def _read_part(
    tensors: Tensors, path: str, name: Any, spec: Any, index: tuple[slice, ...]
) -> np.ndarray:
    """Returns a part of a parameter; of a parameter with rows, nothing else is read."""
    if name is None:
        return np.broadcast_to(np.zeros((), spec.dtype), spec.shape)[index]
    tensor = stored(path, name)
    shape = tuple(len(range(size)[part]) for size, part in zip(spec.shape, index, strict=True))
    dtype = tensors.dtype(tensor.name)
    # Rows that `row_multiple` adds are not in the file, and stay zeros.
    array = aligned_zeros(shape, dtype)
    if len(index) == 2:
        rows, columns = index[::-1] if tensor.is_transposed else index
        as_stored = array.T if tensor.is_transposed else array
        tensors.read_into(as_stored, tensor.name, rows, columns)
    else:
        values = tensors.read(tensor.name).reshape(-1)[index]
        array[: len(values)] = values
    return array
