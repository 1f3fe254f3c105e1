"""The parameters of a module: how they are made, read and found in a tree."""

import contextlib
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import haiku as hk
import jax.numpy as jnp

from transformer_embed._src import arguments

Initializer = hk.initializers.Initializer
Params = Mapping[str, Mapping[str, Any]]


def as_initializer(w_init: Initializer | None, default: Initializer) -> Initializer:
    if w_init is None:
        return default
    want = "a function of a shape and a dtype, such as hk.initializers.RandomNormal()"
    return arguments.instance("w_init", w_init, Callable, want)


def as_params(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """A Haiku parameter tree with its arrays in the byte order of this machine."""
    modules = arguments.instance(name, value, Mapping, "a Haiku parameter tree, a dict of dicts")
    return {path: _leaves(f"{name}: {path}", leaves) for path, leaves in modules.items()}


def _leaves(name: str, value: Any) -> dict[str, Any]:
    want = "the parameters of a module, a dict of arrays"
    leaves = {}
    for key, leaf in arguments.instance(name, value, Mapping, want).items():
        path = f"{name}/{key}"
        # Not an instance of jax.Array: a `StandIn` and what jax.eval_shape returns pass too.
        if not hasattr(leaf, "shape"):
            got = arguments.describe(leaf)
            raise arguments.type_error(path, "an array (use jnp.asarray)", got)
        leaves[key] = arguments.native(path, leaf)
    return leaves


@contextlib.contextmanager
def parameters_from(initial: Mapping[str, Mapping] | None) -> Iterator[None]:
    """Creates parameters with the initial values, and reads them as native arrays.

    (Not a method: a mixed-precision policy casts what methods of modules return.)
    """

    def create(create_default, shape, dtype, init, context):
        if initial is None:
            return create_default(shape, dtype, init)
        path, name = context.full_name.rsplit("/", 1)
        value = initial[module_name(path)][name]
        return jnp.asarray(value, dtype)

    def read(read_default, value, context):
        # jax ignores another byte order at shapes that it has seen.
        return read_default(arguments.native(context.full_name, value))

    with hk.custom_creator(create), hk.custom_getter(read):  # pyright: ignore[reportArgumentType]
        yield


def table_path(name: str, params: Params, module: str) -> str:
    """The path of the one module of this name that has a table, at any depth of a tree."""
    # Sorted, so that an error does not depend on the order of the tree.
    paths = [
        path
        for path, leaves in sorted(params.items())
        if module_name(path) == module and "embeddings" in leaves
    ]
    if len(paths) != 1:
        got = " and ".join(paths) or f"none among {reprlib.repr(sorted(params))}"
        raise arguments.value_error(name, f"one {module} with embeddings", got)
    return paths[0]


def module_name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
