"""The metadata that `save_embedder` writes: an `EmbedderConfig`, and the arguments of rotary
embeddings and biases."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax

from transformer_embed._src import arguments
from transformer_embed._src.functional.relative_bias import alibi_bias
from transformer_embed._src.functional.rotary import apply_rotary
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.modules import RelativePositionBias
from transformer_embed._src.pretrained import rope, schema

# Of the file's metadata.
CONFIG = "transformer_embed.config"
EXTRAS = "transformer_embed.extras"


@dataclasses.dataclass(frozen=True)
class Extras:
    """The metadata besides the config."""

    rotary: Mapping[str, Any] | None = None
    bias: Mapping[str, Any] | None = None
    names: Mapping[str, str] | None = None


def config_to_json(config: EmbedderConfig) -> str:
    """The config's fields; the position scheme has its class name, and dtypes are names."""
    entries = schema.to_json(config)
    del entries[schema.KIND]
    return json.dumps(entries)


def options_from_json(name: str, text: str) -> dict[str, Any]:
    """The config's arguments, so that sizes can be compared with the tensors before the config is
    made."""
    return schema.fields(name, EmbedderConfig, schema.parse(name, text))


def extras_to_json(extras: Mapping[str, Any]) -> str:
    """Rotary, bias and names; a scaling has its class name."""
    return json.dumps(schema.to_json(extras))


def extras_from_json(name: str, text: str) -> Extras:
    """The inverse of `extras_to_json`; a ValueError for any other text."""
    found = schema.fields(name, Extras, schema.parse(name, text))
    rotary, bias = found.get("rotary"), found.get("bias")
    if rotary is not None:
        found["rotary"] = _rotary_from_json(f"{name}: rotary", rotary)
    if bias is not None:
        positions = ("query_positions", "key_positions")
        function, without = alibi_bias, (*positions, "dtype")
        if "num_buckets" in bias:
            function = RelativePositionBias.__init__
            without = ("self", "w_init", "param_dtype", "dtype", "name")
        found["bias"] = schema.fields(f"{name}: bias", function, bias, without=without)
    return Extras(**found)


def _rotary_from_json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `apply_rotary`, or those of each kind of layer."""
    read = functools.partial(schema.fields, function=apply_rotary, without=("x", "positions"))
    if rope.differs_by_layer(value) and "scaling" not in value:
        return {
            layer: item and read(f"{name}: {schema.short_repr(layer)}", value=item)
            for layer, item in value.items()
        }
    return read(name, value=value)


def check_rotary(name: str, rotary: Mapping[str, Any] | None) -> None:
    """Raises a ValueError for arguments that `apply_rotary` refuses."""
    for layer, options in rope.by_layer(rotary or {}).items():
        if options is None:
            continue
        where = f"{name}: rotary" + (f": {layer!r}" if layer else "")
        schema.call_with_named_errors(where, rope.check, options)


def bias_parameters(bias: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The parameters of the bias as `jax.eval_shape` gives them, which also checks its
    arguments."""
    if bias is None:
        return {}
    # The time to trace a bias grows with this number. Real models have up to some hundred.
    name = "num_buckets" if "num_buckets" in bias else "num_heads"
    arguments.integer(name, bias.get(name), at_least=1, at_most=schema.MOST[float])
    if name == "num_heads":
        jax.eval_shape(lambda: alibi_bias([0], [0], **bias))
        return {}
    init = hk.transform(lambda: RelativePositionBias(**bias)([0], [0])).init
    return jax.eval_shape(lambda: init(jax.random.key(0)))
