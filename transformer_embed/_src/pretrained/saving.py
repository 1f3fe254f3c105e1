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

    Use it for a layer that you trained. The metadata of the file hold the config, so you can load
    the file without a config.json. If you pass the `names` that `load_embedder` returned, the
    tensors keep the names of the published model, and other libraries can read the file.

    The file is checked as `load_embedder` would check it, and is written whole or not at all. A
    file that is replaced keeps its permissions. If the parameters are split over devices of several
    processes, call this function in all processes. Each process then gathers the parameters, the
    first process writes the file, and the other processes wait.

    Args:
        path: The file to write or replace.
        config: The config of the layer, as `Embedder` takes it.
        params: A Haiku parameter tree that contains one layer of the config, with the names and
            shapes of `Embedder(config).init`. The layer may be at any path, so you may pass the
            parameters of a whole model. All parameters must be float32, bfloat16 or float16. The
            parameters of the layer are written under the paths that `Embedder(config).init` gives
            them. If you pass the arguments of a `RelativePositionBias` as `bias`, the tree must
            also contain the table of this module. The module may have any path that ends with its
            default name, such as "decoder/relative_position_bias". The table is written under the
            name `relative_position_bias`. All other parameters are written under the paths that
            they have in `params`.
        layers: A `Layer` for each layer of the model, as a sequence. `load_embedder` will return
            the sequence again.
        bias: The keyword arguments of `RelativePositionBias` or `alibi_bias`, if the model has a
            position bias. `load_embedder` will return them again.
        names: The names of the tensors in the file, as a dict {path of a parameter: name of a
            tensor}. The end of a path is enough if no other path ends with it. If a parameter is
            not in the dict, the path of the parameter is used as the name of the tensor.
        no_output: A sentence that says why the config has no output layer. `load_embedder` will
            return the sentence again.

    Raises:
        OSError: The file cannot be written.
        ValueError: There are several causes:

            - No layer in `params` fits the config, or more than one layer fits. If your model has
              several input layers, leave out the parameters of all but one.
            - Two tensors have the same name, or a name cannot be stored in the file.
            - A parameter has a dtype other than float32, bfloat16 or float16.
            - A `Layer` has arguments that `apply_rotary`, `AttentionMask` or `query_scale` refuses.
            - `bias` has arguments that `RelativePositionBias` or `alibi_bias` refuses.
            - The path is a folder, a pipe or a device.

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
        The file has the safetensors format, https://github.com/huggingface/safetensors
    """
    pretrained = PretrainedInput(
        config=config, params={}, layers=layers, bias=bias, names=names, no_output=no_output
    )
    # This raises an error if a field does not fit the function that a caller will pass it to.
    check_described(pretrained)
    # The arguments of T5's bias have "num_buckets", and the arguments of `alibi_bias` do not.
    has_bias_table = bias is not None and "num_buckets" in bias
    # Each parameter, by the path that it has in a tree of `load_embedder`.
    loaded_tree = _with_loaded_paths(config, params, has_bias_table=has_bias_table)
    leaves = leaves_by_path(loaded_tree)
    # The last slash of a path such as "module/leaf" separates the module from the leaf. So the name
    # of a leaf must have no slash.
    for module_leaves in params.values():
        for name in module_leaves:
            if "/" in name:
                raise arguments.value_error("params", "names without a slash", repr(name))
    # A parameter for which the caller gives no name is stored under its path.
    tensor_names: dict[str, Any] = {leaf_path: leaf_path for leaf_path in leaves}
    # A user may name a parameter by the end of its path. `full_paths` returns the whole paths.
    tensor_names.update(full_paths(names or {}, leaves))
    arrays = _arrays_by_tensor(leaves, tensor_names)
    pretrained = pretrained._replace(layers=[*layers], names=tensor_names)
    # `METADATA` is the name under which the file describes its layer, as JSON.
    description_as_json = json.dumps(pretrained._asdict(), default=encode_for_json)
    metadata = {"format": "pt", METADATA: description_as_json}
    file_path = as_path(path).resolve()

    def write() -> None:
        """Writes the file, and keeps it if `load_embedder` could read it."""
        with write_safetensors(file_path, arrays, metadata) as tensors:
            # If the description in the file does not fit the tensors, the file is deleted.
            description = describe_own(tensors)
            check_tensors(tensors, description)

    _call_in_one_process(params, write)


def save_into(
    path: str | os.PathLike[str],
    config: EmbedderConfig,
    params: Params,
    names: Mapping[str, str],
) -> None:
    """Replaces the input and the output layer in an existing checkpoint, and keeps the rest.

    Use this function after you trained the input and output layers of a published model.
    transformers then loads the whole model with your tables. If a shard cannot be written, or if
    the program ends early, the old checkpoint stays as it was. Some checkpoints with a tied output
    layer store the token table twice: under the name of the token table, and under the name of the
    output layer. Then both copies are replaced.

    Args:
        path: The path that you passed to `load_embedder`: a safetensors file, an index file, or a
            folder.
        config: The config of the layer, as `load_embedder` returned it.
        params: A Haiku parameter tree that contains one layer of the config, with the names and
            shapes of `Embedder(config).init`. The layer may be at any path, so you may pass the
            parameters of a whole model. Table rows that `row_multiple` added are not written.
        names: A dict {path of a parameter: name of a tensor}. It says which tensor of the
            checkpoint each parameter replaces. Pass `found.names`, which `load_embedder` returned.
            If you leave out a parameter, the tensor of the parameter does not change in the
            checkpoint.

    Raises:
        OSError: A file cannot be written.
        ValueError: There are several causes:

            - No layer in `params` fits the config, or more than one layer fits.
            - A parameter differs in size from the tensor that it replaces in the checkpoint. If the
              parameter were written, the sizes in config.json would be wrong. Save a resized layer
              with `save_embedder` instead.
            - A parameter has a dtype other than float32, bfloat16 or float16.
            - `config.spread` is True. Use `resize` to make it False.

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
    # The file, of which only the header is read here.
    tensors = open_tensors(path)
    # `BIAS` is the path of T5's table of position biases.
    has_bias_table = BIAS in names
    # Each parameter, by the path that it has in a tree of `load_embedder`.
    loaded_tree = _with_loaded_paths(config, params, has_bias_table=has_bias_table)
    leaves = leaves_by_path(loaded_tree)
    # The name of each parameter's tensor. A user may name a parameter by the end of its path, and
    # these are the whole paths.
    tensor_names = full_paths(names, leaves)
    saved_leaves = {}
    for parameter in tensor_names:
        leaf = leaves[parameter]
        # The parameters with a row for each id.
        if parameter in (TOKENS, OUTPUT_TABLE, OUTPUT_BIAS):
            # The file lacks the rows of zeros that `row_multiple` adds.
            leaf = leaf[: config.vocab_size]
        saved_leaves[parameter] = leaf
    arrays = _arrays_by_tensor(saved_leaves, tensor_names)
    for tensor_name, array in arrays.items():
        # The array in the shape of the tensor, which may have more or fewer axes of length 1.
        arrays[tensor_name] = _as_in_file(tensors, tensor_name, array)
    # With several processes, only one of them writes the file.
    _call_in_one_process(params, lambda: replace_tensors(tensors, arrays))


def _as_in_file(tensors: Tensors, tensor_name: str, array: np.ndarray) -> np.ndarray:
    """Returns an array in the shape of the tensor that it replaces.

    The shape of the array may differ from the tensor's shape in axes of length 1. Raises a
    ValueError if the array has more or fewer values, or a dtype that no parameter can have.
    """
    shape = tensors.entry(tensor_name).shape
    name = f"params: {tensor_name}"
    arguments.check_same(f"{name}: its size", "as in the file", array.size, math.prod(shape))
    if array.dtype not in DTYPES.values():
        raise arguments.value_error(name, " or ".join(DTYPES), array.dtype)
    return array.reshape(shape)


def _call_in_one_process(params: Params, write: Callable[[], None]) -> None:
    """Calls `write` in one process.

    If the parameters are on devices of several processes, all of these processes call this
    function. The first process then writes, and the others wait for it. Otherwise the process that
    calls this function writes.
    """
    is_shared = False
    for leaf in jax.tree.leaves(params):
        # An array of numpy has no such attribute, and is always in this process.
        if not getattr(leaf, "is_fully_addressable", True):
            is_shared = True
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
    stored_tensors = {}
    for path, name in names.items():
        if isinstance(name, str):
            stored_tensors[path] = find_stored_tensor(path, name)
    usable_names = {tensor.name for tensor in stored_tensors.values()}
    # The header of a safetensors file keeps its metadata under this name.
    usable_names.discard("__metadata__")
    # There are fewer usable names than parameters if a name is missing, is no str, is the name of
    # two tensors, or is the name of the metadata.
    if len(usable_names) < len(leaves):
        want = "a tensor's name of its own for each parameter, other than '__metadata__'"
        raise arguments.value_error("names", want, [*names.values()])
    arrays = {}
    for path, tensor in stored_tensors.items():
        leaf = conversions.unwrapped(leaves[path])
        if isinstance(leaf, list | tuple):
            # Masked arrays in a list are refused, because numpy would drop the masks.
            leaf = arguments.as_array(path, leaf)
        # The whole array, also if its parts are on several devices.
        array = gathered(path, leaf)
        if tensor.is_transposed:
            array = array.T
        if tensor.name.endswith(LOGITS_BIAS):
            # The bias of BART is [1, vocab_size] in the file.
            array = array[None]
        # A file has the bytes of an array row by row. So a transpose, which is a view, is copied.
        arrays[tensor.name] = np.asarray(array, order="C")
    return arrays


def _with_loaded_paths(config: EmbedderConfig, params: Params, *, has_bias_table: bool) -> Params:
    """Returns the tree, with the layer's modules under the paths that `load_embedder` uses.

    If `has_bias_table`, T5's table of position biases is moved to its path as well. Other modules
    keep their paths.
    """
    # For each module of the layer, {path in an `Embedder`: path in `params`}.
    paths_in_params = find_parameters(params, config).paths
    # The other way round: {path in `params`: path in an `Embedder`}.
    new_paths = {path: loaded_path for loaded_path, path in paths_in_params.items()}
    if has_bias_table:
        # `BIAS` is "relative_position_bias/embeddings", so the module is "relative_position_bias".
        bias_module, _, _ = BIAS.rpartition("/")
        path_of_bias = _path_of_bias_table(params, bias_module)
        new_paths[path_of_bias] = bias_module
    return {new_paths.get(path, path): leaves for path, leaves in params.items()}


def _path_of_bias_table(params: Params, bias_module: str) -> str:
    """Returns the path of the only module of this name that has a table, at any depth.

    For example, "decoder/relative_position_bias" has this name.
    """
    paths = []
    for path, leaves in sorted(params.items()):
        _, _, module = path.rpartition("/")
        if module == bias_module and "embeddings" in leaves:
            paths.append(path)
    if len(paths) != 1:
        got = " and ".join(paths) or f"none among {sorted(params)}"
        raise arguments.value_error("params", f"one {bias_module} with embeddings", got)
    return paths[0]
