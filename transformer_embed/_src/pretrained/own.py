"""Files that describe themselves: `save_embedder` writes them, and `load_embedder` reads them back.

Their metadata is JSON: a config, rotary embeddings, a bias, and names. What is read is checked by
the classes and functions that it is for.
"""

import json
import numbers
import os
import typing
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.functional.rotary_scaling import Scaling
from transformer_embed._src.layers.config import EmbedderConfig, OutputLayer
from transformer_embed._src.layers.embedder import Params
from transformer_embed._src.layers.schemes import Scheme
from transformer_embed._src.pretrained.description import LOGITS_BIAS, TOKENS
from transformer_embed._src.pretrained.files import DTYPES, Tensors, as_path, write_tensors
from transformer_embed._src.pretrained.messages import (
    call_with_named_errors,
    check_mappings,
    parse,
    short_repr,
    shorten,
)
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    by_path,
    checked_config,
    full_paths,
    is_transposed,
    parameters_of,
    read_parameters,
)
from transformer_embed._src.sharded.table import Sharded

# Of the file's metadata.
CONFIG = "transformer_embed.config"
EXTRAS = "transformer_embed.extras"
# The entry of an object that has the name of its class.
KIND = "kind"
CLASSES = (OutputLayer, *typing.get_args(Scheme), *typing.get_args(Scaling))
KINDS = {kind.__name__: kind for kind in CLASSES}


def save_embedder(
    path: str | os.PathLike[str],
    config: EmbedderConfig,
    params: Params,
    rotary: Mapping[str, Any] | None = None,
    bias: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file that `load_embedder` reads back bit for bit.

    The file is written whole or not at all. The configuration is stored in its  With the
    names that `load_embedder` returned, other libraries find the tensors under their original
    names. The checks of `load_embedder` run before anything is written. A replaced file keeps its
    permissions. If a save was killed, a later one in the same folder removes the temporary file
    that it left, once that file is a day old.

    Args:
        path: the file to write or replace.
        config: as for `Embedder`.
        params: all parameters of the config, and any others (T5's table); arrays of float32,
            bfloat16 or float16.
        rotary: see `PretrainedInput`.
        bias: see `PretrainedInput`.
        names: a tensor name for each parameter; see `load_embedder` for shortened paths. Parameters
            that are left out keep their own names.

    Raises:
        OSError: the file cannot be written.
        TypeError: an argument has the wrong type.
        ValueError: parameters disagree with the config; a name is used twice or cannot be stored; a
            dtype is not supported; `rotary` or `bias` has arguments that their functions do not
            take; the path is a folder, a pipe or a device.

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
    params = arguments.as_params("params", params)
    check_mappings(rotary=rotary, bias=bias, names=names)
    for module, group in params.items():
        for name in group:
            if not (isinstance(module, str) and isinstance(name, str)) or "/" in name:
                want = "names that are strings, those of parameters without a slash"
                raise arguments.value_error("params", want, short_repr((module, name)))
    leaves = {name: _on_host(name, leaf) for name, leaf in by_path(params).items()}
    tensor_names = {name: name for name in leaves} | full_paths(names or {}, leaves)
    text = to_json({"rotary": rotary, "bias": bias, "names": tensor_names})
    # Read back, so that what is written can be loaded.
    extras = extras_from_json("save_embedder", text)
    tensors = sorted(tensor_names.values())
    if "__metadata__" in tensors or len(set(tensors)) < len(tensors):
        want = "a tensor of its own for each parameter, other than '__metadata__'"
        raise arguments.value_error("names", want, short_repr(tensors))
    parameters = parameters_of("save_embedder", config, extras.rotary, extras.bias)
    for name, parameter in parameters.items():
        got = list(leaves[name].shape) if name in leaves else "none"
        if got != list(parameter.shape):
            want = f"shape {list(parameter.shape)}, as the config says"
            raise arguments.value_error(f"params: {shorten(name)}", want, got)
    arrays = {}
    for name, tensor in tensor_names.items():
        array = leaves[name].T if is_transposed(name, tensor) else leaves[name]
        arrays[tensor] = array[None] if tensor.endswith(LOGITS_BIAS) else array
    texts = {CONFIG: to_json(vars(config)), EXTRAS: text}
    write_tensors(as_path(path).resolve(), arrays, {"format": "pt"} | texts)


def _on_host(name: str, leaf: Any) -> np.ndarray:
    """An array of this process in its own dtype, in the byte order of this machine."""
    name = f"params: {shorten(name)}"
    if isinstance(leaf, Sharded):
        leaf = leaf.in_vocabulary_order()
    if isinstance(leaf, Table):
        got = f"a table held as {type(leaf).__name__}"
        raise arguments.type_error(name, "a whole array", got)
    if not isinstance(leaf, jax.Array) and hasattr(type(leaf), "__jax_array__"):
        # Flax's nnx.Param, for example.
        leaf = leaf.__jax_array__()
    array = np.asarray(leaf)
    if array.dtype not in DTYPES.values():
        raise arguments.value_error(name, "float32, bfloat16 or float16", array.dtype)
    return array


def read_own(tensors: Tensors) -> PretrainedInput:
    """The layer that `save_embedder` described in the metadata."""
    path = shorten(tensors.path)
    where, place = f"{path}: {CONFIG}", f"{path}: {EXTRAS}"
    options = from_json(where, tensors.metadata[CONFIG])
    text = tensors.metadata.get(EXTRAS, "{}")
    extras = extras_from_json(place, text)
    names = extras.names or {}
    config = checked_config(tensors, where, options, names.get(TOKENS, TOKENS))
    parameters = parameters_of(where, config, extras.rotary, extras.bias)
    names = names or {name: name for name in parameters}
    for name in names.keys() - parameters.keys():
        # It stands beside the input layer.
        shape = tensors.entry(names[name]).shape
        parameters[name] = jax.ShapeDtypeStruct(shape, config.param_dtype)
    params, names = read_parameters(tensors, f"{place}: names", names, parameters)
    return extras._replace(config=config, params=params, names=names)


def to_json(values: Mapping[str, Any]) -> str:
    """Fields of a config or of extras: a scheme has its class name, and so has a scaling."""
    return json.dumps(dict(values), default=_encoded)


def from_json(name: str, text: str) -> dict[str, Any]:
    """The inverse of `to_json`; a ValueError for any other text.

    A config's arguments are not yet checked, so that sizes can be compared with the tensors before
    the config is made.
    """
    return call_with_named_errors(name, _decoded, parse(name, text))


def extras_from_json(name: str, text: str) -> PretrainedInput:
    """Rotary, bias and names, without a config and parameters."""
    extras = call_with_named_errors(name, PretrainedInput, None, {}, **from_json(name, text))
    call_with_named_errors(name, check_mappings, **extras._asdict())
    for parameter, tensor in (extras.names or {}).items():
        module, _, leaf = parameter.rpartition("/")
        if not (module and leaf and isinstance(tensor, str)):
            want = "parameters as module/name, with their tensors' names"
            got = short_repr({parameter: tensor})
            raise arguments.value_error(f"{name}: names", want, got)
    return extras


def _encoded(value: Any) -> Any:
    """A value of a type that JSON does not have."""
    if isinstance(value, CLASSES):
        return {KIND: type(value).__name__} | vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, np.bool_ | np.integer):
        return value.item()
    if isinstance(value, numbers.Real | np.generic):
        return float(value)
    want = "numbers, words and scalings"
    raise arguments.type_error("rotary and bias", want, type(value).__name__)


def _decoded(value: Any) -> Any:
    """A value with tuples for lists, and instances for objects that name their class."""
    if isinstance(value, list):
        return tuple(map(_decoded, value))
    if not isinstance(value, dict):
        return value
    entries = {name: _decoded(item) for name, item in value.items()}
    if KIND not in entries:
        return entries
    return KINDS[arguments.choice(KIND, entries.pop(KIND), tuple(KINDS))](**entries)
