"""The parameters of an input layer: their paths, shapes, and names of tensors."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import haiku as hk
import jax

from transformer_embed._src import arguments
from transformer_embed._src.functional.relative_bias import alibi_bias
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embedder import ROOT, Embedder
from transformer_embed._src.layers.modules import RelativePositionBias
from transformer_embed._src.pretrained import rope
from transformer_embed._src.pretrained.description import WIDEN
from transformer_embed._src.pretrained.messages import call_with_named_errors, short_repr

# The time to trace a bias grows with its buckets or heads. Real models have up to some hundred.
MOST_BUCKETS = 4096


def parameters_of(
    where: str,
    config: EmbedderConfig,
    rotary: Mapping[str, Any] | None = None,
    bias: Mapping[str, Any] | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of each parameter, by its path, computed without allocating any array.

    Raises a ValueError for arguments that `apply_rotary` or the bias refuses.
    """
    for layer, options in rope.by_layer(rotary or {}).items():
        place = f"{where}: rotary" + (f": {layer!r}" if layer else "")
        if options is not None:
            call_with_named_errors(place, rope.check, options)
    init = functools.partial(Embedder(config).init, jax.random.key(0))
    tree = call_with_named_errors(where, jax.eval_shape, init)
    tree |= call_with_named_errors(f"{where}: bias", _bias_parameters, bias)
    return by_path(tree)


def _bias_parameters(bias: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The parameters of the bias as `jax.eval_shape` gives them, which checks its arguments."""
    if bias is None:
        return {}
    name = "num_buckets" if "num_buckets" in bias else "num_heads"
    arguments.integer(name, bias.get(name), at_least=1, at_most=MOST_BUCKETS)

    def compute() -> jax.Array:
        if name == "num_heads":
            return alibi_bias([0], [0], **bias)
        return RelativePositionBias(**bias)([0], [0])

    return jax.eval_shape(hk.transform(compute).init, jax.random.key(0))


def by_path(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The leaves of a Haiku parameter tree, by their paths."""
    return {f"{module}/{name}": leaf for module in tree for name, leaf in tree[module].items()}


def full_paths(names: Mapping[Any, Any], paths: Collection[str]) -> dict[str, Any]:
    """The same mapping with full paths; a key is a path, or a suffix of exactly one path."""
    full = {}
    for name, value in names.items():
        ends = [path for path in paths if path.endswith(f"/{name}")]
        found = [name] if name in paths else ends
        if len(found) != 1 or found[0] in full:
            among = ", ".join(path.removeprefix(ROOT) for path in paths)
            want = f"a parameter's path, or a suffix that only one path has, among {among}"
            raise arguments.value_error("names", want[:250], short_repr(name))
        full[found[0]] = value
    return full


def is_transposed(name: str, tensor: str) -> bool:
    """Whether a tensor is [out, in].

    A linear layer's weights are, unless they have this package's own name.
    """
    return name == WIDEN and tensor != name
