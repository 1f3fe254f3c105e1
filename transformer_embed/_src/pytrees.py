"""Registers dataclasses as pytrees whose leaves may be anything."""

import ast
import dataclasses
from typing import Any

import jax
from jax import export


def register_pytree(cls: type, *static: str) -> None:
    """Makes a dataclass a pytree, for `jax.export` too.

    `static` are the names of the static fields. The other fields are the leaves.

    `jax.tree_util.register_dataclass` is not used, because it would call the class to make an
    instance of new leaves. The class checks its fields, but jax also puts shapes, shardings or None
    into leaves. In a file of `jax.export`, the static fields are written as Python literals.
    """
    leaf_names = tuple(field.name for field in dataclasses.fields(cls) if field.name not in static)

    def flatten(instance: Any) -> tuple[Any, Any]:
        leaves = tuple(getattr(instance, name) for name in leaf_names)
        static_values = tuple(getattr(instance, name) for name in static)
        return leaves, static_values

    def flatten_with_keys(instance: Any) -> tuple[Any, Any]:
        leaves, static_values = flatten(instance)
        keys = map(jax.tree_util.GetAttrKey, leaf_names)
        return tuple(zip(keys, leaves, strict=True)), static_values

    def unflatten(static_values: tuple[Any, ...], leaves: Any) -> Any:
        instance = object.__new__(cls)
        instance.__dict__.update(zip(leaf_names, leaves, strict=True))
        instance.__dict__.update(zip(static, static_values, strict=True))
        return instance

    # If `flatten` were not passed too, jax would make keys in every flattening and drop them.
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"transformer_embed.{cls.__name__}",
        serialize_auxdata=lambda static_values: repr(static_values).encode(),
        deserialize_auxdata=lambda text: ast.literal_eval(text.decode()),
    )
