"""Finds the parameters of an input and an output layer in the parameters of a whole model."""

import functools
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.layers.module_parameters import parameters_of

# A Haiku parameter tree: {path of a module: {name of a parameter: array}}.
Params = Mapping[str, Mapping[str, Any]]
# What errors call such a tree.
TREE = "a Haiku parameter tree, a dict of dicts"
# How the paths of the layer's modules begin in the parameters that `Embedder.init` makes.
ROOT = "transformer_embedding/~/"


class LayerParameters(NamedTuple):
    """Holds the parameters of one input layer and its output layer, from `find_parameters`.

    Args:
        params: The layer's parameters alone, as a tree like `Embedder(config).init` makes.
        paths: Where the modules are in the whole tree: {path in `params`: path in the whole tree}.
    """

    params: Params
    paths: Mapping[str, str]


def find_parameters(params: Params, config: EmbedderConfig) -> LayerParameters:
    """Returns the parameters of an input layer and its output layer, found in a whole model's tree.

    Use this function if you need the parameters of the layer alone: to restore them with Orbax, to
    train them with an optimizer of their own, or to put changed parameters back into the model. You
    do not need it for `Embedder` and `te.pretrained`, which take the parameters of a whole model.

    Args:
        params: The parameters of a model, as Haiku makes them. The model must contain one
            `TransformerEmbedding` of this config, which may be inside other modules. The leaves may
            be arrays or shapes (`jax.ShapeDtypeStruct`), so you can also pass the result of
            `jax.eval_shape` or the metadata of an Orbax checkpoint.
        config: The description of the layer.

    Returns:
        A record with two fields. `params` is the tree of the layer's parameters, with the paths
        that `Embedder(config).init` gives them. The leaves are the leaves of the whole model, not
        copies. `paths` is a dict from the path of each module in `params` to the path of the same
        module in the whole model.

    Raises:
        TypeError: `params` are not a dict of dicts, or `config` is not an `EmbedderConfig`.
        ValueError: `params` must contain exactly one layer of this config, but contain none, or
            more than one. A layer is found by the names and the shapes of its parameters. If your
            model has other names, the page "Other parameter names" shows how to rename the
            parameters.

    Example:
        >>> import haiku as hk, jax
        >>> import transformer_embed as te
        >>> config = te.EmbedderConfig(vocab_size=100, d_model=64)
        >>> def model(ids):
        ...     x = te.TransformerEmbedding(config, name="input")(ids, is_training=False)
        ...     return hk.Linear(2)(x)
        >>> params = hk.transform(model).init(jax.random.key(0), [[1, 2, 3]])
        >>> found = te.find_parameters(params, config)
        >>> found.paths
        {'transformer_embedding/~/token_embedding': 'input/~/token_embedding'}

        The layer is trained on its own, then put back:

        >>> halves = jax.tree.map(lambda leaf: leaf / 2, found.params)
        >>> params |= {found.paths[path]: leaves for path, leaves in halves.items()}
        >>> sorted(params)
        ['input/~/token_embedding', 'linear']
    """
    arguments.instance("config", config, EmbedderConfig, "an EmbedderConfig")
    # {name of a module of the layer: path of the module in `params`}.
    module_paths = layer_paths("params", config, params)
    layer_params = {}
    paths = {}
    for module, path in module_paths.items():
        # `ROOT` is how the paths begin in the parameters of an `Embedder`.
        layer_params[ROOT + module] = params[path]
        paths[ROOT + module] = path
    return LayerParameters(params=layer_params, paths=paths)


def layer_of(name: str, config: EmbedderConfig, params: Params) -> Params:
    """Returns the parameters of a config's layer: {name of a module: its parameters}.

    `name` is the argument that an error names, as in `layer_paths`.
    """
    module_paths = layer_paths(name, config, params)
    return {module: params[path] for module, path in module_paths.items()}


def layer_paths(name: str, config: EmbedderConfig, params: Params) -> dict[str, str]:
    """Finds the modules of a config's layer in a tree: {name of a module: path in the tree}.

    Raises a ValueError unless the tree has one such layer, whose parameters have the names and the
    shapes of the config. `name` is the argument that the error names.
    """
    root = table_path(name, params, "token_embedding").removesuffix("token_embedding")
    # The modules of a layer have the same parent as the token table. Modules of the same names
    # under any other parent, such as "root/inner/layer_norm", belong to other parts of the model.
    paths = {}
    for path in params:
        module = module_name(path)
        if path == root + module:
            paths[module] = path
    found_modules = {module: params[path] for module, path in paths.items()}
    found_shapes = _leaf_shapes(found_modules)
    expected_shapes = _expected_shapes(config)
    if expected_shapes != found_shapes:
        # The error says which parameters are missing, and which ones are there instead: "wanted
        # {'token_embedding/embeddings': (8, 4)}, got none of them".
        missing_shapes = dict(sorted(expected_shapes.items() - found_shapes.items()))
        other_shapes = dict(sorted(found_shapes.items() - expected_shapes.items()))
        want = str(missing_shapes or "no others")
        got = other_shapes or "none of them"
        raise arguments.value_error(name, want, got)
    return paths


def table_path(name: str, params: Params, module: str) -> str:
    """Finds the path of the module that has this name and a table, at any depth of a tree.

    Raises a ValueError, which names the argument `name`, unless there is exactly one.
    """
    check_params(name, params)
    paths = []
    # The paths are sorted, so that an error does not depend on the order of the tree.
    for path in sorted(params):
        has_table = "embeddings" in params[path]
        if module_name(path) == module and has_table:
            paths.append(path)
    if len(paths) > 1:
        want = f"one {module} with embeddings (of a model with several, pass the modules of one)"
        raise arguments.value_error(name, want, " and ".join(paths))
    if not paths:
        want = f'one {module} with embeddings (see the page "Other parameter names")'
        raise arguments.value_error(name, want, f"none among {reprlib.repr(sorted(params))}")
    return paths[0]


def check_params(name: str, params: Any) -> None:
    """Raises a TypeError unless params are a dict of dicts."""
    arguments.instance(name, params, Mapping, TREE)
    want = "the parameters of a module, a dict of arrays"
    for path, leaves in params.items():
        arguments.instance(f"{name}: {path}", leaves, Mapping, want)


def module_name(path: str) -> str:
    """Returns the last part of a module's path, "token_embedding" of "input/~/token_embedding"."""
    return path.rsplit("/", 1)[-1]


# The shapes are cached, because each loss that is not compiled asks for them.
@functools.lru_cache(maxsize=64)
def _expected_shapes(config: EmbedderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter of a config: {"module/name": shape}."""
    return _leaf_shapes(parameters_of(config))


def _leaf_shapes(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the shape of each parameter: {"module/name": shape}, None for a leaf without one."""
    leaves = leaves_by_path(modules)
    return {path: getattr(leaf, "shape", None) for path, leaf in leaves.items()}


def leaves_by_path(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the leaves of a tree of modules: {"module/name": leaf}."""
    leaves = {}
    for module, module_leaves in tree.items():
        for name, leaf in module_leaves.items():
            leaves[f"{module}/{name}"] = leaf
    return leaves
