"""The parameters of an input layer: their paths, shapes, and names of tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import haiku as hk
import jax

from transformer_embed._src import arguments
from transformer_embed._src.functional.relative_bias import alibi_bias
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.embedder import Embedder
from transformer_embed._src.layers.modules import RelativePositionBias
from transformer_embed._src.pretrained import messages, rope
from transformer_embed._src.pretrained.description import WIDEN

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
            messages.call_with_named_errors(place, rope.check, options)
    try:
        tree = jax.eval_shape(lambda: Embedder(config).init(jax.random.key(0)))
    except OverflowError as error:
        got = str(error)[:100]
        raise arguments.value_error(where, "sizes that jax can hold", got) from error
    of_bias = messages.call_with_named_errors(f"{where}: bias", _bias_parameters, bias)
    return {
        f"{module}/{name}": leaf
        for module, group in {**tree, **of_bias}.items()
        for name, leaf in group.items()
    }


def _bias_parameters(bias: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The parameters of the bias as `jax.eval_shape` gives them, which checks its arguments."""
    if bias is None:
        return {}
    name = "num_buckets" if "num_buckets" in bias else "num_heads"
    arguments.integer(name, bias.get(name), at_least=1, at_most=MOST_BUCKETS)
    if name == "num_heads":
        jax.eval_shape(lambda: alibi_bias([0], [0], **bias))
        return {}
    init = hk.transform(lambda: RelativePositionBias(**bias)([0], [0])).init
    return jax.eval_shape(lambda: init(jax.random.key(0)))


def full_paths(names: Mapping[Any, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The same mapping with full paths; a key is a path, or a suffix of exactly one path."""
    full = {}
    for name, value in names.items():
        ends = [path for path in paths if isinstance(name, str) and path.endswith(f"/{name}")]
        found = [name] if name in paths else ends
        if len(found) != 1 or found[0] in full:
            among = ", ".join(map(short_path, paths))
            want = f"a parameter's path, or a suffix that only one path has, among {among}"
            raise arguments.value_error("names", want[:250], messages.short_repr(name))
        full[found[0]] = value
    return full


def short_path(path: str) -> str:
    """The last two parts of a path."""
    return "/".join(path.split("/")[-2:])


def is_transposed(name: str, tensor: str) -> bool:
    """Whether a tensor is [out, in].

    A linear layer's weights are, unless they have this package's own name.
    """
    return name == WIDEN and tensor != name
