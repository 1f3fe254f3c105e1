"""`save_embedder` and `save_into`, which write files whole or not at all."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_embed._src import arguments, conversions
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.parameters import Params, find_parameters, leaves_by_path
from transformer_embed._src.partitioning import gathered
from transformer_embed._src.pretrained.entries import Options
from transformer_embed._src.pretrained.files import as_path
from transformer_embed._src.pretrained.layer_parts import (
    BIAS,
    LOGITS_BIAS,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    TOKENS,
)
from transformer_embed._src.pretrained.layers import Layer
from transformer_embed._src.pretrained.own_files import (
    METADATA,
    check_described,
    describe_own,
    encode_for_json,
)
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    check_tensors,
    find_stored_tensor,
    full_paths,
)
from transformer_embed._src.pretrained.replacing import replace_tensors
from transformer_embed._src.pretrained.tensors import DTYPES, Tensors, open_tensors
from transformer_embed._src.pretrained.writing import write_safetensors


def save_embedder(
    path: str | os.PathLike[str],
    config: EmbedderConfig,
    params: Params,
    layers: Sequence[Layer] = (),
    bias: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    no_output: str | None = None,
) -> None:
    """Writes a safetensors file that `load_embedder` reads back bit for bit.

    Use it for a layer that you trained: the file holds the configuration too, in its metadata, so
    you can load it without a config.json. If you pass the names that `load_embedder` returned,
    other libraries find the tensors under their original names.

    The file is written whole or not at all, after the checks that `load_embedder` makes. A replaced
    file keeps its permissions. If parameters lie on the devices of several processes, call this in
    all processes: each process gathers the parameters, the first one writes, and the others wait.

    Args:
        path: The file to write or replace.
        config: The config of the layer, as for `Embedder`.
        params: A Haiku parameter tree with one layer of the config, at any path, as in a whole
            model, with arrays of float32, bfloat16 or float16. The parameters of the layer, and
            T5's table of biases if `bias` has `num_buckets`, are written under the paths that
            `load_embedder` gives them. Other parameters are written under their own paths.
        layers: The facts of each layer, as `load_embedder` returned them, to be read back.
        bias: The keyword arguments of `RelativePositionBias` or `alibi_bias`, as `load_embedder`
            returned them, to be read back.
        names: A tensor name for each parameter, by the parameter's path, which may be shortened to
            a suffix that no other parameter has. A parameter that is left out is written under its
            path.
        no_output: Why the config has no output layer, as `load_embedder` returned it, to be read
            back.

    Raises:
        OSError: the file cannot be written.
        ValueError: params do not hold one layer of the config (if your model has several input
            layers, pass the modules of one); a name is used twice or cannot be stored; a dtype is
            not supported; `apply_rotary`, `AttentionMask` or another function refuses the arguments
            that layers or bias have for it; the path is a folder, a pipe or a device.

    Example:
        >>> import pathlib, tempfile
        >>> import jax
        >>> import transformer_embed as te
        >>> config = te.EmbedderConfig(9, 4)
        >>> params = te.Embedder(config).init(jax.random.key(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "mine.safetensors")
        >>> te.pretrained.save_embedder(path, config, params)
        >>> te.pretrained.load_embedder(path).config == config
        True

    Source:
        The safetensors format, https://github.com/huggingface/safetensors
    """
    pretrained = PretrainedInput(
        config=config, params={}, layers=layers, bias=bias, names=names, no_output=no_output
    )
    check_described(pretrained)
    leaves = leaves_by_path(_with_loaded_paths(config, params, bias))
    # In a path such as "module/leaf", the last slash ends the module, so a leaf has none.
    leaf_names = [name for module_leaves in params.values() for name in module_leaves]
    for name in leaf_names:
        if "/" in name:
            raise arguments.value_error("params", "names without a slash", repr(name))
    # A parameter for which the caller gives no name is stored under its path.
    tensor_names: dict[str, Any] = {leaf_path: leaf_path for leaf_path in leaves}
    tensor_names.update(full_paths(names or {}, leaves))
    arrays = _arrays_by_tensor(leaves, tensor_names)
    pretrained = pretrained._replace(layers=[*layers], names=tensor_names)
    metadata = {"format": "pt", METADATA: json.dumps(pretrained._asdict(), default=encode_for_json)}
    file_path = as_path(path).resolve()

    def write() -> None:
        """Writes the file, and keeps it if `load_embedder` could read it."""
        with write_safetensors(file_path, arrays, metadata) as tensors:
            check_tensors(tensors, describe_own(tensors))

    _call_in_one_process(params, write)


def save_into(
    path: str | os.PathLike[str],
    config: EmbedderConfig,
    params: Params,
    names: Mapping[str, str],
) -> None:
    """Replaces the input and the output layer in an existing checkpoint, and keeps the rest.

    Use it after training the ends of a published model: transformers then loads the whole model
    with your tables. The checkpoint is changed whole or not at all: if a shard cannot be written,
    or the program ends early, the old checkpoint is still there. A copy of the table that a tied
    model stores under the name of its output layer is replaced too.

    Args:
        path: What you passed to `load_embedder`: a file, an index file, or a folder.
        config: The config of the layer, as `load_embedder` returned it.
        params: A Haiku parameter tree with one layer of the config, at any path, as in a whole
            model. Rows that `row_multiple` added are left out.
        names: The tensor name for each parameter, as `load_embedder` returned them. Parameters
            that are left out are not saved.

    Raises:
        OSError: a file cannot be written.
        ValueError: params do not hold one layer of the config; a parameter has another shape than
            its tensor, since config.json would then be wrong (save a resized layer with
            `save_embedder`); a dtype is not supported; rows are spread.

    Example:
        >>> import json, pathlib, tempfile
        >>> import jax, numpy as np, safetensors.numpy
        >>> import transformer_embed as te
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> tensors = {"w.weight": np.ones([9, 4], np.float32), "h.0.w": np.ones(3, np.float32)}
        >>> safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        >>> entries = {"model_type": "ctrl", "n_layer": 1, "n_head": 1}
        >>> _ = (folder / "config.json").write_text(json.dumps(entries))
        >>> found = te.pretrained.load_embedder(folder)
        >>> trained = jax.tree.map(lambda leaf: leaf + 1, found.params)
        >>> te.pretrained.save_into(folder, found.config, trained, found.names)
    """
    arguments.instance("config", config, EmbedderConfig, "an EmbedderConfig")
    arguments.instance("names", names, Mapping, "a mapping")
    if config.spread:
        raise arguments.value_error("config.spread", "False; te.pretrained.resize changes it", True)
    tensors = open_tensors(path)
    # T5's table of biases is one of the parameters if it has a name.
    bias = {"num_buckets": None} if BIAS in names else None
    leaves = leaves_by_path(_with_loaded_paths(config, params, bias))
    tensor_names = full_paths(names, leaves)
    saved_leaves = {}
    for parameter in tensor_names:
        leaf = leaves[parameter]
        if parameter in (TOKENS, OUTPUT_TABLE, OUTPUT_BIAS):
            # The file lacks the rows of zeros that `row_multiple` adds.
            leaf = leaf[: config.vocab_size]
        saved_leaves[parameter] = leaf
    arrays = _arrays_by_tensor(saved_leaves, tensor_names)
    for tensor_name, array in arrays.items():
        arrays[tensor_name] = _as_in_file(tensors, tensor_name, array)
    _call_in_one_process(params, lambda: replace_tensors(tensors, arrays))


def _as_in_file(tensors: Tensors, tensor_name: str, array: np.ndarray) -> np.ndarray:
    """Returns an array in the shape of the tensor that it replaces.

    Raises a ValueError if the array has more or fewer values, or a dtype of no parameter. Shapes
    may differ in axes of length 1.
    """
    shape = tensors.entry(tensor_name).shape
    name = f"params: {tensor_name}"
    arguments.check_same(f"{name}: its size", "as in the file", array.size, math.prod(shape))
    if array.dtype not in DTYPES.values():
        raise arguments.value_error(name, " or ".join(DTYPES), array.dtype)
    return array.reshape(shape)


def _call_in_one_process(params: Params, write: Callable[[], None]) -> None:
    """Calls `write` in one process.

    If the parameters lie on devices of several processes, the first process writes, and the others
    wait until it has. Otherwise the process that calls this writes.
    """
    leaves = jax.tree.leaves(params)
    # An array of numpy has no such attribute, and is always in this process.
    is_here = [getattr(leaf, "is_fully_addressable", True) for leaf in leaves]
    is_shared = False in is_here
    if not is_shared or jax.process_index() == 0:
        write()
    if is_shared:
        # This module is slow to load, and only several processes need it.
        from jax.experimental import multihost_utils  # noqa: PLC0415

        multihost_utils.sync_global_devices("save_embedder")


def _arrays_by_tensor(leaves: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the array of each tensor that is to be written, by the tensor's name.

    Args:
        leaves: The parameters, by their paths.
        names: The name of each parameter's tensor, by the same paths. The name says whether the
            tensor is the parameter's transpose (see `find_stored_tensor`).
    """
    stored_tensors = {
        path: find_stored_tensor(path, name)
        for path, name in names.items()
        if isinstance(name, str)
    }
    # The header of a safetensors file keeps its metadata under this name.
    free_names = {tensor.name for tensor in stored_tensors.values()} - {"__metadata__"}
    if len(free_names) < len(leaves):
        want = "a tensor's name of its own for each parameter, other than '__metadata__'"
        raise arguments.value_error("names", want, [*names.values()])
    arrays = {}
    for path, tensor in stored_tensors.items():
        leaf = conversions.unwrapped(leaves[path])
        if isinstance(leaf, list | tuple):
            # Masked arrays in a list are refused, because numpy would drop the masks.
            leaf = arguments.as_array(path, leaf)
        array = gathered(path, leaf)
        if tensor.is_transposed:
            array = array.T
        if tensor.name.endswith(LOGITS_BIAS):
            # The bias of BART is [1, vocab_size] in the file.
            array = array[None]
        # The bytes are written in the order in which they lie, so a transpose is copied.
        arrays[tensor.name] = np.asarray(array, order="C")
    return arrays


def _with_loaded_paths(config: EmbedderConfig, params: Params, bias: Options | None) -> Params:
    """Returns the tree, with the layer's modules under the paths that `load_embedder` uses.

    If `bias` has "num_buckets", T5's table of biases is moved to its path as well. Other modules
    keep their paths.
    """
    loaded_path_of_module = {}
    for loaded_path, path in find_parameters(params, config).paths.items():
        loaded_path_of_module[path] = loaded_path
    if bias is not None and "num_buckets" in bias:
        bias_module, _, _ = BIAS.rpartition("/")
        loaded_path_of_module[_path_of_bias_table(params, bias_module)] = bias_module
    return {loaded_path_of_module.get(path, path): leaves for path, leaves in params.items()}


def _path_of_bias_table(params: Params, bias_module: str) -> str:
    """Returns the path of the only module of this name that has a table, inside any modules."""
    paths = []
    for path, leaves in sorted(params.items()):
        _, _, module = path.rpartition("/")
        if module == bias_module and "embeddings" in leaves:
            paths.append(path)
    if len(paths) != 1:
        got = " and ".join(paths) or f"none among {sorted(params)}"
        raise arguments.value_error("params", f"one {bias_module} with embeddings", got)
    return paths[0]
