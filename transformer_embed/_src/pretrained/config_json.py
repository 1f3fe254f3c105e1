"""The metadata that `save_embedder` writes: an `EmbedderConfig`, and the arguments of rotary
embeddings and biases."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.pretrained import rope, schema


@dataclasses.dataclass(frozen=True)
class T5BiasArguments:
    """The arguments of `RelativePositionBias`."""

    num_heads: int
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self):
        arguments.integer("num_heads", self.num_heads, at_least=1)
        buckets = arguments.integer(
            "num_buckets", self.num_buckets, at_least=4 if self.bidirectional else 2
        )
        arguments.integer(
            "max_distance",
            self.max_distance,
            at_least=buckets // (4 if self.bidirectional else 2) + 1,
            at_most=2**31 - 2,
        )


@dataclasses.dataclass(frozen=True)
class AlibiArguments:
    """The arguments of `alibi_bias`."""

    num_heads: int
    symmetric: bool = False
    max_bias: float = 8.0

    def __post_init__(self):
        arguments.integer("num_heads", self.num_heads, at_least=1)
        arguments.real("max_bias", self.max_bias, above=0)


@dataclasses.dataclass(frozen=True)
class Extras:
    """The metadata besides the config."""

    rotary: Mapping[str, Any] | None = None
    bias: Mapping[str, Any] | None = None
    names: Mapping[str, str] | None = None


def config_to_json(config: EmbedderConfig) -> str:
    """The config's fields; the position scheme has its class name, and dtypes are names."""
    return schema.to_json(config)


def options_from_json(name: str, text: str) -> dict[str, Any]:
    """The config's arguments, so that sizes can be compared with the tensors before an array is
    allocated."""
    return schema.fields(name, EmbedderConfig, schema.parse(name, text))


def extras_to_json(extras: Mapping[str, Any]) -> str:
    """Rotary, bias and names; a scaling has its class name."""
    return schema.to_json(extras)


def extras_from_json(name: str, text: str) -> Extras:
    """The inverse of `extras_to_json`; a ValueError for any other text."""
    found = schema.fields(name, Extras, schema.parse(name, text))
    rotary, bias = found.get("rotary"), found.get("bias")
    if rotary is not None:
        rotary = _rotary(f"{name}: rotary", rotary)
    if bias is not None:
        bias = _arguments(
            f"{name}: bias", T5BiasArguments if "num_buckets" in bias else AlibiArguments, bias
        )
    return Extras(rotary, bias, found.get("names"))


def _rotary(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `apply_rotary`, or those of each kind of layer."""
    if not set(value) <= {field.name for field in dataclasses.fields(rope.Rotary)}:
        return {
            layer: _arguments(f"{name}: {schema.short_repr(layer)}", rope.Rotary, each)
            for layer, each in value.items()
        }
    return _arguments(name, rope.Rotary, value)


def _arguments(name: str, kind: type, value: Any) -> dict[str, Any]:
    """The given fields of a dataclass, after checking that it can be made from them."""
    found = schema.fields(name, kind, value)
    schema.call_with_named_errors(name, kind, found)
    return found
