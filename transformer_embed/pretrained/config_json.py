"""An `EmbedderConfig`, and what stands beside it in a checkpoint, as JSON and back."""

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_embed.functional.rotary_scaling import Scaling
from transformer_embed.layers.config import EmbedderConfig
from transformer_embed.layers.schemes import Learned, Sinusoidal, SinusoidalGrid

SCHEMES = {"sinusoidal": Sinusoidal, "sinusoidal_grid": SinusoidalGrid, "learned": Learned}
SCALINGS = {kind.__name__: kind for kind in typing.get_args(Scaling)}


def config_to_json(config: EmbedderConfig) -> str:
    """The fields; the scheme with its kind, the dtypes by name."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    kinds = {kind: name for name, kind in SCHEMES.items()}
    if config.positions is not None:
        fields["positions"] = {"kind": kinds[type(config.positions)], **dataclasses.asdict(config.positions)}
    dtypes = {name: jnp.dtype(fields[name]).name for name in ("param_dtype", "dtype") if fields[name] is not None}
    return json.dumps(fields | dtypes, default=_number)


def config_from_json(text: str) -> EmbedderConfig:
    """The config; an AttributeError, KeyError, TypeError or ValueError for any other text."""
    fields = json.loads(text)
    if fields["positions"] is not None:
        kind = SCHEMES[fields["positions"].pop("kind")]
        fields["positions"] = kind(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in fields["positions"].items()}
        )
    return EmbedderConfig(**fields)


def extras_to_json(extras: Mapping[str, Any]) -> str:
    """Nested mappings; a scaling as one whose `scaling` is its name."""
    return json.dumps(_to_fields(extras), default=_number)


def extras_from_json(text: str) -> dict[str, Any]:
    """What `extras_to_json` was given; errors as in `config_from_json`."""
    return _from_fields(json.loads(text))


def _number(value: np.generic) -> Any:
    """A numpy scalar as Python's."""
    return value.item()


def _to_fields(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _to_fields(each) for name, each in value.items()}
    return {"scaling": type(value).__name__, **dataclasses.asdict(value)} if isinstance(value, Scaling) else value


def _from_fields(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("scaling"), str):
        return SCALINGS[value["scaling"]](**{name: each for name, each in value.items() if name != "scaling"})
    return {name: _from_fields(each) for name, each in value.items()}
