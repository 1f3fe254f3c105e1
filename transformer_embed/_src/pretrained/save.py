"""Saves input layers as safetensors files that describe themselves."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embedder import Params
from transformer_embed._src.pretrained import messages, metadata
from transformer_embed._src.pretrained.description import LOGITS_BIAS
from transformer_embed._src.pretrained.files import DTYPES, write_tensors
from transformer_embed._src.pretrained.parameters import full_paths, is_transposed, parameters_of
from transformer_embed._src.sharded.table import Sharded


def save_embedder(
    path: str | os.PathLike[str],
    config: EmbedderConfig,
    params: Params,
    rotary: Mapping[str, Any] | None = None,
    bias: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file that `load_embedder` reads back bit for bit.

    The file is written whole or not at all. The configuration is stored in its metadata. With the
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
    if not isinstance(config, EmbedderConfig):
        raise arguments.type_error("config", "an EmbedderConfig", type(config).__name__)
    if not isinstance(path, str | os.PathLike):
        raise arguments.type_error("path", "a str or a path", type(path).__name__)
    params = arguments.as_params("params", params)
    messages.check_mappings(rotary=rotary, bias=bias, names=names)
    leaves = {
        _leaf_name(module, name): _on_host(f"{module}/{name}", leaf)
        for module, group in params.items()
        for name, leaf in group.items()
    }
    tensor_names = _tensor_names(names or {}, leaves)
    text = metadata.extras_to_json(metadata.Extras(rotary, bias, tensor_names))
    # Read back, so that what is written can be loaded.
    extras = metadata.extras_from_json("save_embedder", text)
    _check_shapes(leaves, parameters_of("save_embedder", config, extras.rotary, extras.bias))
    arrays = {
        tensor: _as_stored(name, tensor, leaves[name]) for name, tensor in tensor_names.items()
    }
    texts = {metadata.CONFIG: metadata.config_to_json(config), metadata.EXTRAS: text}
    write_tensors(pathlib.Path(os.path.realpath(path)), arrays, {"format": "pt"} | texts)


def _tensor_names(names: Mapping[str, str], leaves: Mapping[str, Any]) -> dict[str, str]:
    """A tensor's name for each parameter: its own unless `names` has another."""
    tensor_names = {name: name for name in leaves} | full_paths(names, leaves)
    for tensor in tensor_names.values():
        got = messages.short_repr(tensor)
        if not isinstance(tensor, str):
            raise arguments.type_error("names", "tensors' names as strings", got)
        if tensor == "__metadata__" or any(0xD800 <= ord(letter) < 0xE000 for letter in tensor):
            want = "names that UTF-8 can encode, other than '__metadata__'"
            raise arguments.value_error("names", want, got)
    if len(set(tensor_names.values())) < len(tensor_names):
        got = messages.short_repr(sorted(tensor_names.values()))
        raise arguments.value_error("names", "a tensor of its own for each parameter", got)
    return tensor_names


def _check_shapes(
    leaves: Mapping[str, np.ndarray], parameters: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    """Raises unless each parameter of the config has an array of its shape."""
    for name, parameter in parameters.items():
        if name not in leaves or leaves[name].shape != parameter.shape:
            want = f"shape {list(parameter.shape)}, as the config says"
            got = f"none among {messages.short_repr(sorted(leaves))}"
            if name in leaves:
                got = f"shape {list(leaves[name].shape)}"
            raise arguments.value_error(f"params: {messages.shorten(name)}", want, got)


def _leaf_name(module: Any, name: Any) -> str:
    """A parameter's path, which can be split into module and name again."""
    for part in (module, name):
        if not isinstance(part, str):
            got = messages.short_repr(part)
            raise arguments.type_error("params", "names that are strings", got)
    if not name or "/" in name:
        got = messages.short_repr(f"{module}/{name}")
        raise arguments.value_error("params", "names of parameters without a slash", got)
    return f"{module}/{name}"


def _as_stored(name: str, tensor: str, array: np.ndarray) -> np.ndarray:
    """A parameter as its tensor has it."""
    if is_transposed(name, tensor):
        return array.T
    return array[None] if tensor.endswith(LOGITS_BIAS) else array


def _on_host(name: str, leaf: Any) -> np.ndarray:
    """An array of this process in its own dtype, in the byte order of this machine."""
    name, want = f"params: {messages.shorten(name)}", "an array of float32, bfloat16 or float16"
    if isinstance(leaf, Sharded):
        leaf = leaf.in_vocabulary_order()
    if isinstance(leaf, Table):
        got = f"a table held as {type(leaf).__name__}"
        raise arguments.type_error(name, "a whole array", got)
    if not isinstance(leaf, jax.Array) and hasattr(type(leaf), "__jax_array__"):
        # Flax's nnx.Param, for example.
        leaf = leaf.__jax_array__()
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
        raise arguments.type_error(name, want, type(leaf).__name__)
    if arguments.is_traced(leaf):
        raise arguments.type_error(name, f"{want}, outside jit", "a traced array")
    # (A key's dtype is not one of numpy.)
    if not isinstance(leaf.dtype, np.dtype) or leaf.dtype not in DTYPES.values():
        raise arguments.value_error(name, "float32, bfloat16 or float16", leaf.dtype)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        want = "an array on this process's devices (gather it first)"
        raise arguments.value_error(name, want, "one on other processes too")
    return np.asarray(leaf)
