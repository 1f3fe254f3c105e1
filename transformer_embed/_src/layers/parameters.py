"""The parameters of an input and an output layer: their shapes, and where they are in a tree."""

import functools
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax.numpy as jnp

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig, OutputConfig

Initializer = hk.initializers.Initializer
Params = Mapping[str, Mapping[str, Any]]

TREE = "a Haiku parameter tree, a dict of dicts"
# Where the layer's modules are in the parameters that `Embedder.init` makes.
ROOT = "transformer_embedding/~/"


class Parameter(NamedTuple):
    """What `hk.get_parameter` takes besides a name."""

    shape: tuple[int, ...]
    dtype: Any
    init: Initializer


# The parameters of a module by their names.
Parameters = dict[str, Parameter]


def table(rows: int, width: int, dtype: Any, stddev: float) -> Parameters:
    """The parameter of a module that is a table."""
    init = hk.initializers.RandomNormal(stddev)
    return {"embeddings": Parameter((rows, width), dtype, init)}


def parameters_of(config: EmbedderConfig) -> dict[str, Parameters]:
    """The parameters of a config's input and output layer, by module."""
    width, dtype, stddevs = config.table_width, config.param_dtype, config.stddevs
    modules = {"token_embedding": table(config.rows, width, dtype, stddevs.tokens)}
    output = config.output or OutputConfig()
    if not output.tied:
        (own,) = table(config.rows, width, dtype, stddevs.output).values()
        modules["token_embedding"]["output_embeddings"] = own
    if output.bias:
        modules["token_embedding"]["output_bias"] = Parameter((config.rows,), dtype, jnp.zeros)
    if config.scheme is not None and config.scheme.is_learned:
        positions = table(config.scheme.max_len, width, dtype, stddevs.added)
        modules["learned_positional_encoding"] = positions
    if config.num_token_types is not None:
        modules["token_type_embedding"] = table(config.num_token_types, width, dtype, stddevs.added)
    if config.layer_norm_eps is not None:
        shape = (width,), arguments.compute_dtype(dtype)
        modules["layer_norm"] = {
            "scale": Parameter(*shape, jnp.ones),
            "offset": Parameter(*shape, jnp.zeros),
        }
    if config.embedding_width is not None:
        init = hk.initializers.TruncatedNormal(1 / math.sqrt(width))
        modules["widen"] = {
            "w": Parameter((width, config.d_model), dtype, init),
            "b": Parameter((config.d_model,), dtype, jnp.zeros),
        }
    return modules


class Leaves:
    """The parameters of the Haiku module that is running, made when they are read.

    They have initial values if these are given. (Not a method: a mixed-precision policy casts what
    methods of modules return.)
    """

    def __init__(self, parameters: Parameters, initial: Mapping[str, Any] | None = None):
        self._parameters = parameters
        self._initial = initial

    def __getitem__(self, name: str) -> Any:
        shape, dtype, init = self._parameters[name]
        if self._initial is not None:
            init = functools.partial(_as_dtype, self._initial[name])
        return hk.get_parameter(name, shape, dtype, init)


def _as_dtype(value: Any, _: Any, dtype: Any) -> Any:
    """A value as an initializer, of any shape."""
    return jnp.asarray(arguments.as_array("initial_params", value), dtype)


def as_initializer(w_init: Initializer | None, default: Initializer) -> Initializer:
    if w_init is None:
        return default
    want = "a function of a shape and a dtype, such as hk.initializers.RandomNormal()"
    return arguments.instance("w_init", w_init, Callable, want)


def dropout_key(is_training: bool, rate: float) -> Any:
    """Haiku's next key if dropout needs one, and None if it has none."""
    # next_rng_key would raise Haiku's error, which does not say how to evaluate.
    is_random = arguments.flag("is_training", is_training) and rate > 0
    return hk.maybe_next_rng_key() if is_random else None


def check_params(name: str, params: Any) -> None:
    """Raises unless params are a dict of dicts."""
    arguments.instance(name, params, Mapping, TREE)
    want = "the parameters of a module, a dict of arrays"
    for path, leaves in params.items():
        arguments.instance(f"{name}: {path}", leaves, Mapping, want)


def table_path(name: str, params: Params, module: str) -> str:
    """The path of the one module of this name that has a table, at any depth of a tree."""
    check_params(name, params)
    # Sorted, so that an error does not depend on the order of the tree.
    paths = [
        path
        for path, leaves in sorted(params.items())
        if module_name(path) == module and "embeddings" in leaves
    ]
    if len(paths) != 1:
        want = f"one {module} with embeddings"
        if paths:
            want += " (of a model with several input layers, pass the modules of one)"
        got = " and ".join(paths) or f"none among {reprlib.repr(sorted(params))}"
        raise arguments.value_error(name, want, got)
    return paths[0]


def module_name(path: str) -> str:
    return path.rsplit("/", 1)[-1]


# Kept, because each eager loss asks for them.
@functools.lru_cache(maxsize=64)
def _shapes_of(config: EmbedderConfig) -> dict[str, tuple[int, ...]]:
    return _shapes(parameters_of(config))


def _shapes(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The shape of each parameter by its module and name."""
    return {path: getattr(leaf, "shape", None) for path, leaf in by_path(modules).items()}


def by_path(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The leaves of a tree of modules, by their paths."""
    return {f"{module}/{name}": leaf for module in tree for name, leaf in tree[module].items()}


def layer_paths(name: str, config: EmbedderConfig, params: Params) -> dict[str, str]:
    """The path of each module of a config's layer by its name, in a tree that may hold others too.

    An error unless the tree has one such layer, with parameters of these names and shapes.
    """
    root = table_path(name, params, "token_embedding").removesuffix("token_embedding")
    # A model may have other modules of these names, but not beside the token table.
    paths = {module_name(path): path for path in params if path == root + module_name(path)}
    want = _shapes_of(config)
    got = _shapes({module: params[path] for module, path in paths.items()})
    if want != got:
        missing, others = want.items() - got.items(), got.items() - want.items()
        missing = dict(sorted(missing)) or "no others"
        raise arguments.value_error(name, str(missing), dict(sorted(others)) or "none of them")
    return paths


def layer_of(name: str, config: EmbedderConfig, params: Params) -> Params:
    """The parameters of a config's layer by the names of its modules; see `layer_paths`."""
    return {module: params[path] for module, path in layer_paths(name, config, params).items()}
