"""`save_embedder` and `save_into`, which write files whole or not at all."""

import json
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
    encoded,
)
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    check_tensors,
    full_paths,
    stored,
)
from transformer_embed._src.pretrained.replacing import replace_tensors
from transformer_embed._src.pretrained.tensors import DTYPES, open_tensors
from transformer_embed._src.pretrained.writing import written


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

    Use it for a layer that you trained, because the file says what the layer is. The file is
    written whole or not at all. The configuration is stored in its metadata. With the
    names that `load_embedder` returned, other libraries find the tensors under their original
    names. The checks of `load_embedder` run before anything is written. A replaced file keeps its
    permissions. If parameters lie on the devices of several
    processes, all must call it: each gathers them, the first one writes, and the others wait.

    Args:
        path: The file to write or replace.
        config: The config of the layer, as for `Embedder`.
        params: A Haiku parameter tree with one layer of the config, at any path, as in a whole
            model, with arrays of float32, bfloat16 or float16. The layer, and T5's table if `bias`
            has buckets, are written with the paths of `load_embedder`, and other parameters with
            their own paths.
        layers: See `PretrainedInput`.
        bias: See `PretrainedInput`.
        names: A tensor name for each parameter; see `load_embedder` for shortened paths. Parameters
            that are left out keep their own names.
        no_output: See `PretrainedInput`.

    Raises:
        OSError: the file cannot be written.
        ValueError: params do not hold one layer of the config (of a model with several input
            layers, pass the modules of one); a name is used twice or cannot be stored; a dtype is
            not supported; the functions of this package refuse what layers or bias say; the path is
            a folder, a pipe or a device.

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
    leaves = leaves_by_path(_with_own_paths(config, params, bias))
    slashed = [name for group in params.values() for name in group if "/" in name]
    if slashed:
        raise arguments.value_error("params", "names without a slash", repr(slashed[0]))
    tensor_names = {path: path for path in leaves} | full_paths(names or {}, leaves)
    arrays = _arrays_by_tensor(leaves, tensor_names)
    pretrained = pretrained._replace(layers=[*layers], names=tensor_names)
    texts = {METADATA: json.dumps(pretrained._asdict(), default=encoded)}
    path = as_path(path).resolve()

    def write() -> None:
        # What is written can be loaded.
        with written(path, arrays, {"format": "pt"} | texts) as tensors:
            check_tensors(tensors, describe_own(tensors))

    _by_one_process(params, write)


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
    bias = {"num_buckets": None} if BIAS in names else None
    leaves = leaves_by_path(_with_own_paths(config, params, bias))
    tensor_names = full_paths(names, leaves)
    with_rows = (TOKENS, OUTPUT_TABLE, OUTPUT_BIAS)
    leaves = {
        # The file lacks the rows of zeros that `row_multiple` adds.
        name: leaves[name][: config.vocab_size] if name in with_rows else leaves[name]
        for name in tensor_names
    }
    arrays = _arrays_by_tensor(leaves, tensor_names)
    for name, array in arrays.items():
        entry = tensors.entry(name)
        arguments.check_same(
            f"params: {name}: its size", "as in the file", array.size, _size(entry)
        )
        if array.dtype not in DTYPES.values():
            raise arguments.value_error(f"params: {name}", " or ".join(DTYPES), array.dtype)
        arrays[name] = array.reshape(entry.shape)
    _by_one_process(params, lambda: replace_tensors(tensors, arrays))


def _size(entry: Any) -> int:
    """Returns the number of values in a tensor."""
    return int(np.prod(entry.shape, dtype=np.int64))


def _by_one_process(params: Params, write: Callable[[], None]) -> None:
    """Writes in the first process; if several hold the parameters, the others wait."""
    leaves = jax.tree.leaves(params)
    is_shared = not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves)
    if not is_shared or jax.process_index() == 0:
        write()
    if is_shared:
        # Slow to load, and only several processes need it.
        from jax.experimental import multihost_utils  # noqa: PLC0415

        multihost_utils.sync_global_devices("save_embedder")


def _arrays_by_tensor(leaves: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of a file: each parameter under its tensor's name, as that tensor lies."""
    places = {path: stored(path, name) for path, name in names.items() if isinstance(name, str)}
    # The header keeps its metadata under this name.
    tensors = {place.name for place in places.values()} - {"__metadata__"}
    if len(tensors) < len(leaves):
        want = "a tensor's name of its own for each parameter, other than '__metadata__'"
        raise arguments.value_error("names", want, [*names.values()])
    arrays = {}
    for path, place in places.items():
        leaf = conversions.unwrapped(leaves[path])
        if isinstance(leaf, list | tuple):
            # Masked arrays in a list are refused, because numpy would drop the masks.
            leaf = arguments.as_array(path, leaf)
        array = gathered(path, leaf)
        if place.is_transposed:
            array = array.T
        if place.name.endswith(LOGITS_BIAS):
            # The bias of BART has an axis of 1 before its own.
            array = array[None]
        # The bytes of an array are written as they lie.
        arrays[place.name] = np.asarray(array, order="C")
    return arrays


def _with_own_paths(config: EmbedderConfig, params: Params, bias: Options | None) -> Params:
    """Returns the tree, with the layer's modules under the paths that `load_embedder` gives."""
    own_paths = {path: own for own, path in find_parameters(params, config).paths.items()}
    if bias is not None and "num_buckets" in bias:
        module = BIAS.rpartition("/")[0]
        own_paths[_bias_path(params, module)] = module
    return {own_paths.get(path, path): leaves for path, leaves in params.items()}


def _bias_path(params: Params, module: str) -> str:
    """Returns the path of the one module with the table of a position bias."""
    paths = [
        path
        for path, leaves in sorted(params.items())
        if path.rpartition("/")[2] == module and "embeddings" in leaves
    ]
    if len(paths) != 1:
        got = " and ".join(paths) or f"none among {sorted(params)}"
        raise arguments.value_error("params", f"one {module} with embeddings", got)
    return paths[0]
