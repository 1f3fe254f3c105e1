"""The parameters of an input layer: their paths, shapes, tensors, and how they are read."""

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
from transformer_embed._src.layers.parameters import ROOT, Params, by_path, parameters_of
from transformer_embed._src.pretrained.entries import Options
from transformer_embed._src.pretrained.files import Tensors, call_with_named_errors
from transformer_embed._src.pretrained.layer_parts import (
    BIAS,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    PER_LAYER_WEIGHTS,
    TOKENS,
    WIDEN,
)
from transformer_embed._src.pretrained.layers import Layer

# Parameters that are [in, out].
LINEAR = (WIDEN, PER_LAYER_WEIGHTS)
TRANSPOSED = ".T"
# What has the shape and the dtype of each parameter, by its path.
Specs = dict[str, Any]


class PretrainedInput(NamedTuple):
    """The input layer of a checkpoint, as `load_embedder` returns it.

    `save_embedder(path, *pretrained)` writes all of it.

    Args:
        config: for `Embedder` and `TransformerEmbedding`.
        params: for the `apply` of that embedder; T5's table of biases is under
            `relative_position_bias`, and what the layers of Gemma 3n and small Gemma 4 models read
            besides is under `per_layer_inputs` (notebook 08 computes it). Of a file of
            `save_embedder`, all that was saved: with a whole model, its other parameters too, under
            their own paths.
        layers: what each layer rotates by and may attend to. Empty if the file says neither how
            many layers there are nor how they rotate, or if they differ in a way that is not known.
            Each has `type`, its kind as config.json's `layer_types` names it; `rotary`, the keyword
            arguments of `apply_rotary`, or None if it does not rotate; `mask`, those of
            `AttentionMask`, with `window` or `chunk` if it has one; and `query_scale`, those of
            `query_scale`, or None. With `pair_axes` (Qwen-VL), positions have three axes, time,
            height and width, which are equal for text.
        bias: the keyword arguments of `RelativePositionBias` (T5) or `alibi_bias` (Bloom); None if
            the model has no bias.
        names: the name of the tensor that each parameter came from.
        no_output: why `config.output` is None, in words; None if it is not.

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
    """The shape and dtype of each parameter, by its path."""
    modules: Any = {ROOT + module: leaves for module, leaves in parameters_of(config).items()}
    if bias is not None and "num_buckets" in bias:
        module, _, name = BIAS.rpartition("/")
        shape = bias["num_buckets"], bias.get("num_heads")
        modules[module] = {name: jax.ShapeDtypeStruct(shape, np.float32)}
    return by_path(modules)


def full_paths(
    names: Mapping[Any, Any], paths: Collection[str], what: str = "names"
) -> dict[str, Any]:
    """The same mapping with full paths; a key is a path, or a suffix of exactly one path."""
    full = {}
    for name, value in names.items():
        matches = arguments.paths_of(name, paths)
        if len(matches) != 1 or matches[0] in full:
            among = ", ".join(paths)
            want = f"a parameter's path, or a suffix that only one path has, among {among}"
            raise arguments.value_error(what, want, repr(name))
        full[matches[0]] = value
    return full


def stored(name: str, tensor: str) -> tuple[str, bool]:
    """The tensor of a parameter, and whether it is the parameter's transpose.

    Weights of PyTorch are [out, in], as a table is; kernels of Flax and weights of Haiku are
    [in, out], as this package's own linear layers are. A ".T" at the end says it of any other.
    """
    if tensor.endswith(TRANSPOSED):
        return tensor.removesuffix(TRANSPOSED), True
    if tensor == name:
        return tensor, False
    is_in_out = re.search(r"\b(kernel|w)$", tensor) is not None
    return tensor, is_in_out if name == OUTPUT_TABLE else name in LINEAR and not is_in_out


def check_tensors(
    tensors: Tensors,
    pretrained: PretrainedInput,
    may_lack: Collection[str] = (),
) -> Specs:
    """The parameters; raises unless each has a tensor of its shape.

    What stands beside the layer of the config is as it is stored.
    """
    parameters, names = shapes_of(pretrained.config, pretrained.bias), pretrained.names or {}
    if missing := parameters.keys() - names.keys() - set(may_lack):
        want = f"a tensor for each parameter, also for {', '.join(sorted(missing))}"
        raise arguments.value_error(tensors.path, want, f"only {sorted(names)}")
    for name, tensor in names.items():
        tensor, is_transposed = stored(name, str(tensor))  # noqa: PLW2901
        entry, step = tensors.entry(tensor), -1 if is_transposed else 1
        beside = jax.ShapeDtypeStruct(entry.shape[::step], pretrained.config.param_dtype)
        shape = plain = parameters.setdefault(name, beside).shape[::step]
        if name in (TOKENS, OUTPUT_TABLE, OUTPUT_BIAS):
            # Rows that `row_multiple` adds are zeros.
            plain = (pretrained.config.vocab_size, *parameters[name].shape[1:])[::step]
        # Apart from leading axes of 1.
        ones = (1,) * (len(entry.shape) - len(shape))
        if entry.shape not in (ones + shape, ones + plain):
            want = f"shape {list(shape)}, as the configuration says"
            raise arguments.value_error(f"{tensors.path}: {tensor}", want, entry)
    return parameters


def read_parameters(
    tensors: Tensors, pretrained: PretrainedInput, parameters: Specs, shardings: Options
) -> Params:
    """The parameters, each device's part of those that are split; zeros for those without a tensor.

    If any is split, the others are whole on each device of its mesh.
    """
    params: dict[str, dict[str, Array]] = {}
    others = next((NamedSharding(each.mesh, P()) for each in shardings.values()), None)
    for name, parameter in parameters.items():
        module, _, leaf = name.rpartition("/")
        tensor = (pretrained.names or {}).get(name)
        read = functools.partial(_read, tensors, name, tensor, parameter)
        sharding = shardings.get(name, others)
        if sharding is None:
            # Unlike jnp.asarray, this makes no copy on a CPU.
            array = jax.device_put(read((slice(None),) * len(parameter.shape)))
        else:
            make = functools.partial(jax.make_array_from_callback, parameter.shape, sharding)
            array = call_with_named_errors(f"shardings: {name}", make, read)
        params.setdefault(module, {})[leaf] = array
    return params


def _read(
    tensors: Tensors, name: str, tensor: Any, parameter: Any, index: tuple[slice, ...]
) -> np.ndarray:
    """A part of a parameter. Of one with rows, nothing else is read."""
    if tensor is None:
        return np.broadcast_to(np.zeros((), parameter.dtype), parameter.shape)[index]
    tensor, is_transposed = stored(name, tensor)
    if len(index) == 2:
        array = tensors.read(tensor, *(index[::-1] if is_transposed else index))
        # Rows that `row_multiple` adds are missing.
        array = np.ascontiguousarray(array.T) if is_transposed else array
    else:
        array = tensors.read(tensor).reshape(-1)[index]
    sizes = [len(range(size)[each]) for size, each in zip(parameter.shape, index, strict=True)]
    more = [(0, size - rows) for size, rows in zip(sizes, array.shape, strict=True)]
    return np.pad(array, more) if np.any(more) else array
