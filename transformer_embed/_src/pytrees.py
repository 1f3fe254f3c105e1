"""Registers dataclasses as pytrees whose leaves may be anything."""

import ast
import dataclasses
import functools
from typing import Any

import jax
from jax import export


def register_pytree(cls: type, *static: str) -> None:
    """Makes a dataclass a pytree with these static fields, for jax.export too.

    `jax.tree_util.register_dataclass` would call the class to make an instance of new leaves, and
    so check them. But jax also puts shapes, shardings or None into leaves, so here they are not
    checked. In a file of jax.export, the static fields are literals of Python.
    """
    fields = tuple(field.name for field in dataclasses.fields(cls) if field.name not in static)

    def flatten(instance: Any) -> tuple[Any, Any]:
        field_value = functools.partial(getattr, instance)
        return tuple(map(field_value, fields)), tuple(map(field_value, static))

    def flatten_with_keys(instance: Any) -> tuple[Any, Any]:
        leaves, auxiliary = flatten(instance)
        keys = map(jax.tree_util.GetAttrKey, fields)
        return tuple(zip(keys, leaves, strict=True)), auxiliary

    def unflatten(auxiliary: tuple[Any, ...], leaves: Any) -> Any:
        instance = object.__new__(cls)
        instance.__dict__.update(zip(fields + static, (*leaves, *auxiliary), strict=True))
        return instance

    # Without the last argument, jax would make keys in every flattening and drop them.
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"transformer_embed.{cls.__name__}",
        serialize_auxdata=lambda auxiliary: repr(auxiliary).encode(),
        deserialize_auxdata=lambda text: ast.literal_eval(text.decode()),
    )
