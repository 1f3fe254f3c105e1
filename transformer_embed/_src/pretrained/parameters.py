"""The parameters of an input layer: their paths, shapes, and names of tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embedder import Embedder
from transformer_embed._src.pretrained import schema
from transformer_embed._src.pretrained.config_json import bias_parameters
from transformer_embed._src.pretrained.description import LOGITS_BIAS, WIDEN


def parameters_of(
    where: str, config: EmbedderConfig, bias: Mapping[str, Any] | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of each parameter, by its path, computed without allocating any array."""
    try:
        tree = jax.eval_shape(lambda: Embedder(config).init(jax.random.key(0)))
    except OverflowError as error:
        got = str(error)[:100]
        raise arguments.value_error(where, "sizes that jax can hold", got) from error
    of_bias = schema.call_with_named_errors(f"{where}: bias", bias_parameters, bias)
    return {
        f"{module}/{name}": leaf
        for module, group in {**tree, **of_bias}.items()
        for name, leaf in group.items()
    }


def full_paths(names: Mapping[Any, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The same mapping with full paths; a key is a path, or a suffix of exactly one path."""
    full = {}
    for name, value in names.items():
        ends = [path for path in paths if isinstance(name, str) and path.endswith(f"/{name}")]
        found = [name] if name in paths else ends
        if len(found) != 1 or found[0] in full:
            among = ", ".join(map(short_path, paths))
            want = f"a parameter's path, or a suffix that only one path has, among {among}"
            raise arguments.value_error("names", want[:250], schema.short_repr(name))
        full[found[0]] = value
    return full


def short_path(path: str) -> str:
    """The last two parts of a path."""
    return "/".join(path.split("/")[-2:])


def is_transposed(name: str, tensor: str) -> bool:
    """Whether a tensor is [out, in], as a linear layer's weights are unless they have this
    package's own name."""
    return name == WIDEN and tensor != name


def as_stored(name: str, tensor: str, array: np.ndarray) -> np.ndarray:
    """A parameter as its tensor has it."""
    if is_transposed(name, tensor):
        return array.T
    return array[None] if tensor.endswith(LOGITS_BIAS) else array
