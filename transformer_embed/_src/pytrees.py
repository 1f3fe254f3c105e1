"""Registers dataclasses as pytrees whose leaves may be anything."""

import ast
import dataclasses
from typing import Any

import jax
from jax import export


def register_pytree(cls: type, *static: str) -> None:
    """Makes a dataclass a pytree, which `jax.export` can also save.

    `static` are the names of the static fields. The other fields are the leaves. Below, the static
    values of an instance are the values of the static fields, in the order of the names.

    `jax.tree_util.register_dataclass` is not used, because it would call the class to make an
    instance of new leaves. The class checks its fields, but jax also puts shapes, shardings or None
    into leaves. In a file of `jax.export`, the static fields are written as Python literals.
    """
    leaf_names = tuple(field.name for field in dataclasses.fields(cls) if field.name not in static)

    def flatten(instance: Any) -> tuple[Any, Any]:
        """Returns the leaves and the static values of an instance."""
        leaves = tuple(getattr(instance, name) for name in leaf_names)
        static_values = tuple(getattr(instance, name) for name in static)
        return leaves, static_values

    def flatten_with_keys(instance: Any) -> tuple[Any, Any]:
        """Returns a pair (key, leaf) for each leaf, and the static values of an instance."""
        leaves, static_values = flatten(instance)
        keys = [jax.tree_util.GetAttrKey(name) for name in leaf_names]
        return tuple(zip(keys, leaves, strict=True)), static_values

    def unflatten(static_values: tuple[Any, ...], leaves: Any) -> Any:
        """Makes an instance from static values and leaves, without calling the class."""
        instance = object.__new__(cls)
        # The class is frozen, so the fields are written to its dict.
        instance.__dict__.update(zip(leaf_names, leaves, strict=True))
        instance.__dict__.update(zip(static, static_values, strict=True))
        return instance

    def as_bytes(static_values: tuple[Any, ...]) -> bytes:
        """Writes static values as a Python literal, such as "(True, (3, 0))"."""
        return repr(static_values).encode()

    def from_bytes(text: bytes | bytearray) -> tuple[Any, ...]:
        """Reads what `as_bytes` wrote."""
        return ast.literal_eval(text.decode())

    # If `flatten` were not passed too, jax would make keys in every flattening and drop them.
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"transformer_embed.{cls.__name__}",
        serialize_auxdata=as_bytes,
        deserialize_auxdata=from_bytes,
    )
