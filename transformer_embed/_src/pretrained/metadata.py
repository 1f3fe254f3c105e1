"""The metadata that `save_embedder` writes, as JSON: a config, rotary embeddings and a bias.

What is read is checked by the classes and functions that it is for.
"""

import json
import numbers
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.functional.rotary_scaling import Scaling
from transformer_embed._src.layers.config import OutputLayer
from transformer_embed._src.layers.schemes import Scheme
from transformer_embed._src.pretrained.messages import (
    call_with_named_errors,
    check_mappings,
    parse,
    short_repr,
)

# Of the file's metadata.
CONFIG = "transformer_embed.config"
EXTRAS = "transformer_embed.extras"
# The entry of an object that has the name of its class.
KIND = "kind"
CLASSES = (OutputLayer, *typing.get_args(Scheme), *typing.get_args(Scaling))
KINDS = {kind.__name__: kind for kind in CLASSES}


class Extras(NamedTuple):
    """The metadata besides the config."""

    rotary: Mapping[str, Any] | None = None
    bias: Mapping[str, Any] | None = None
    names: Mapping[str, str] | None = None


def to_json(values: Mapping[str, Any]) -> str:
    """Fields of a config or of extras: a scheme has its class name, and so has a scaling."""
    return json.dumps(dict(values), default=_encoded)


def from_json(name: str, text: str) -> dict[str, Any]:
    """The inverse of `to_json`; a ValueError for any other text.

    A config's arguments are not yet checked, so that sizes can be compared with the tensors before
    the config is made.
    """
    return call_with_named_errors(name, _decoded, parse(name, text))


def extras_from_json(name: str, text: str) -> Extras:
    """The extras, with a mapping in each field that is not None."""
    extras = call_with_named_errors(name, Extras, **from_json(name, text))
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
