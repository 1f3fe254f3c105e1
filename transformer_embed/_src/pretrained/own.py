"""Files that describe themselves: `save_embedder` writes them, and `load_embedder` reads them back.

Their metadata is JSON: a config, rotary embeddings, a bias, and names. What is read is checked by
the classes and functions that it is for.
"""

import functools
import json
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig, NoOutput, OutputConfig
from transformer_embed._src.layers.embedder import ROOT, Params
from transformer_embed._src.layers.parameters import as_params, table_path
from transformer_embed._src.layers.transformer_embedding import layer_paths
from transformer_embed._src.partitioning import gathered
from transformer_embed._src.positions.rotary_scaling import Scaling
from transformer_embed._src.positions.schemes import PositionScheme
from transformer_embed._src.pretrained.architecture import BIAS, LOGITS_BIAS
from transformer_embed._src.pretrained.entries import as_scale
from transformer_embed._src.pretrained.files import (
    Tensors,
    written,
)
from transformer_embed._src.pretrained.layers import Layer
from transformer_embed._src.pretrained.messages import (
    call_with_named_errors,
    check_mappings,
    parse,
)
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    by_path,
    check_tensors,
    full_paths,
    is_transposed,
)
from transformer_embed._src.tokens.lookup import Table

# Of the file's metadata.
CONFIG = "transformer_embed.config"
EXTRAS = "transformer_embed.extras"
# The entry of an object that has the name of its class.
KIND = "kind"


def save_embedder(
    path: str | os.PathLike[str],
    config: EmbedderConfig,
    params: Params,
    layers: Sequence[Layer] = (),
    bias: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    per_layer: Mapping[str, Any] | None = None,
) -> None:
    """Writes a safetensors file that `load_embedder` reads back bit for bit.

    The file is written whole or not at all. The configuration is stored in its metadata. With the
    names that `load_embedder` returned, other libraries find the tensors under their original
    names. The checks of `load_embedder` run before anything is written. A replaced file keeps its
    permissions. Equal arguments write equal bytes. If parameters lie on the devices of several
    processes, all must call it: each gathers them, the first one writes, and the others wait.

    Args:
        path: the file to write or replace.
        config: as for `Embedder`.
        params: a Haiku parameter tree with one layer of the config, at any path, as in a whole
            model; arrays of float32, bfloat16 or float16. The layer, and T5's table if `bias` has
            buckets, are written with the paths of `load_embedder`, other parameters with their own.
        layers: see `PretrainedInput`.
        bias: see `PretrainedInput`.
        names: a tensor name for each parameter; see `load_embedder` for shortened paths. Parameters
            that are left out keep their own names.
        per_layer: see `PretrainedInput`.

    Raises:
        OSError: the file cannot be written.
        ValueError: params do not hold one layer of the config; a name is used twice or cannot be
            stored; a dtype is not supported; the path is a folder, a pipe or a device.

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
    arguments.instance("config", config, EmbedderConfig, "an EmbedderConfig")
    _check_extras(layers, bias, names, per_layer)
    params = as_params("params", params)
    if slashed := [name for group in params.values() for name in group if "/" in name]:
        raise arguments.value_error("params", "names without a slash", repr(slashed[0]))
    leaves = by_path(_with_own_paths(config, params, bias))
    tensor_names = {name: name for name in leaves} | full_paths(names or {}, leaves)
    arrays = _by_tensor_name(leaves, tensor_names)
    extras = {"layers": [*layers], "bias": bias, "names": tensor_names, "per_layer": per_layer}
    texts = {
        CONFIG: json.dumps(vars(config), default=encoded),
        EXTRAS: json.dumps(extras, default=encoded),
    }
    path, metadata = arguments.path("path", path).resolve(), {"format": "pt"} | texts
    is_shared = not all(
        getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(params)
    )
    if not is_shared or jax.process_index() == 0:
        # What is written can be loaded.
        with written(path, arrays, metadata) as tensors:
            check_tensors(tensors, describe_own(tensors))
    if is_shared:
        # Slow to load, and only several processes need it.
        from jax.experimental import multihost_utils  # noqa: PLC0415

        multihost_utils.sync_global_devices("save_embedder")


def _check_extras(layers: Any, bias: Any, names: Any, per_layer: Any) -> None:
    """Raises a TypeError for extras of another type."""
    check_mappings(bias=bias, names=names, per_layer=per_layer)
    check = functools.partial(arguments.instance, kinds=Layer, want="a Layer")
    arguments.entries("layers", layers, check)


def _by_tensor_name(leaves: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a file: each parameter under its tensor's name, and as that tensor lies."""
    arrays = {}
    for name, tensor in names.items():
        array = _on_host(leaves[name])
        array = array.T if is_transposed(name, tensor) else array
        # BART's own has an axis of 1 before it.
        array = array[None] if str(tensor).endswith(LOGITS_BIAS) else array
        # Its bytes are written as they lie.
        arrays[tensor] = np.asarray(array, order="C")
    # Parameters that share a name leave one array; the header keeps its metadata under the other.
    tensors = [name for name in arrays if isinstance(name, str) and name != "__metadata__"]
    if len(tensors) < len(leaves):
        want = "a tensor's name of its own for each parameter, other than '__metadata__'"
        raise arguments.value_error("names", want, [*names.values()])
    return arrays


def _with_own_paths(
    config: EmbedderConfig, params: Params, bias: Mapping[str, Any] | None
) -> Params:
    """The tree with the modules that `load_embedder` knows under the paths that it gives them."""
    paths = {path: ROOT + name for name, path in layer_paths("params", config, params).items()}
    if bias is not None and "num_buckets" in bias:
        module = BIAS.rpartition("/")[0]
        paths[table_path("params", params, module)] = module
    return {paths.get(path, path): leaves for path, leaves in params.items()}


def _on_host(leaf: Any) -> np.ndarray:
    """An array, whole and in its own dtype."""
    # A wrapper such as nnx.Param may hold a table, which raises if it is asked for one array.
    if not isinstance(leaf, Table):
        leaf = arguments.unwrapped(leaf)
    rows = leaf._all_rows() if isinstance(leaf, Table) else None
    return gathered(leaf if rows is None else rows)


def describe_own(tensors: Tensors) -> PretrainedInput:
    """The layer that `save_embedder` described in the metadata."""
    path = tensors.path
    options = parse(f"{path}: {CONFIG}", tensors.metadata[CONFIG], decoded)
    entries = parse(f"{path}: {EXTRAS}", tensors.metadata.get(EXTRAS, "{}"), decoded)
    extras = call_with_named_errors(path, PretrainedInput, None, {}, **entries)
    call_with_named_errors(path, _check_extras, *extras[2:])
    names = {name: str(tensor) for name, tensor in (extras.names or {}).items()}
    options["scale"] = as_scale(options.get("scale"))
    config = call_with_named_errors(path, EmbedderConfig, **options)
    return extras._replace(config=config, names=names)


def _kinds() -> dict[str, Callable]:
    """What a file may name: it can make no other object. A scheme may be the user's own."""
    schemes, scalings = PositionScheme.__subclasses__(), typing.get_args(Scaling)
    return {kind.__name__: kind for kind in (OutputConfig, NoOutput, Layer, *schemes, *scalings)}


def encoded(value: Any) -> Any:
    """A value of a type that JSON does not have: a class has its name, with its fields."""
    kind = type(value).__name__
    if kind in _kinds():
        return {KIND: kind} | vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.dtype):
        return value.name
    # A number or an array of numpy, or a fraction.
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else float(value)


def decoded(entries: dict[str, Any]) -> Any:
    """An object with tuples for lists, or an instance of the class that it names."""
    for name, value in entries.items():
        # JSON has no tuples, which configurations and `pair_axes` are compared by.
        if isinstance(value, list):
            entries[name] = tuple(value)
    if KIND not in entries:
        return entries
    kinds = _kinds()
    return kinds[arguments.choice(KIND, entries.pop(KIND), tuple(kinds))](**entries)
