"""Saves input layers as safetensors files that describe themselves."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import Table
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embedder import Params
from transformer_embed._src.pretrained import metadata
from transformer_embed._src.pretrained.description import LOGITS_BIAS
from transformer_embed._src.pretrained.files import DTYPES, as_path, write_tensors
from transformer_embed._src.pretrained.messages import check_mappings, short_repr, shorten
from transformer_embed._src.pretrained.parameters import (
    by_path,
    full_paths,
    is_transposed,
    parameters_of,
)
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
    params = arguments.as_params("params", params)
    check_mappings(rotary=rotary, bias=bias, names=names)
    for module, group in params.items():
        for name in group:
            if not (isinstance(module, str) and isinstance(name, str)) or "/" in name:
                want = "names that are strings, those of parameters without a slash"
                raise arguments.value_error("params", want, short_repr((module, name)))
    leaves = {name: _on_host(name, leaf) for name, leaf in by_path(params).items()}
    tensor_names = {name: name for name in leaves} | full_paths(names or {}, leaves)
    text = metadata.to_json({"rotary": rotary, "bias": bias, "names": tensor_names})
    # Read back, so that what is written can be loaded.
    extras = metadata.extras_from_json("save_embedder", text)
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
    texts = {metadata.CONFIG: metadata.to_json(vars(config)), metadata.EXTRAS: text}
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
