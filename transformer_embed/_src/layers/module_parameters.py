"""Describes the parameters of an input and an output layer, and has Haiku make them."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax.numpy as jnp

from transformer_embed._src import arguments, conversions
from transformer_embed._src.layers.config import EmbedderConfig, OutputConfig

Initializer = hk.initializers.Initializer


class Parameter(NamedTuple):
    """Holds the arguments of `hk.get_parameter` that describe a parameter, without the name."""

    shape: tuple[int, ...]
    dtype: Any
    init: Initializer


# The descriptions of the parameters of one module, by the names of the parameters.
Parameters = dict[str, Parameter]


def table_parameter(rows: int, width: int, dtype: Any, stddev: float) -> Parameter:
    """Describes a table whose initial values are normal numbers."""
    init = hk.initializers.RandomNormal(stddev)
    return Parameter(shape=(rows, width), dtype=dtype, init=init)


def parameters_of(config: EmbedderConfig) -> dict[str, Parameters]:
    """Describes the parameters of a config's input and output layer, by the names of modules."""
    width = config.table_width
    dtype = config.param_dtype
    # The standard deviation of positions and token types, which are added to token vectors.
    added_stddev = config.stddevs.added
    modules = {"token_embedding": _token_parameters(config)}
    # `table_parameter` describes a table: its shape, its dtype and a normal initializer.
    if config.scheme is not None and config.scheme.is_learned:
        positions = table_parameter(config.scheme.max_len, width, dtype, added_stddev)
        modules["learned_positional_encoding"] = {"embeddings": positions}
    if config.num_token_types is not None:
        token_types = table_parameter(config.num_token_types, width, dtype, added_stddev)
        modules["token_type_embedding"] = {"embeddings": token_types}
    if config.layer_norm_eps is not None:
        norm_dtype = conversions.compute_dtype(dtype)
        modules["layer_norm"] = {
            "scale": Parameter(shape=(width,), dtype=norm_dtype, init=jnp.ones),
            "offset": Parameter(shape=(width,), dtype=norm_dtype, init=jnp.zeros),
        }
    if config.embedding_width is not None:
        # hk.Linear has this initializer too. It keeps the variance of x.
        weights_init = hk.initializers.TruncatedNormal(1 / math.sqrt(width))
        modules["widen"] = {
            "w": Parameter(shape=(width, config.d_model), dtype=dtype, init=weights_init),
            "b": Parameter(shape=(config.d_model,), dtype=dtype, init=jnp.zeros),
        }
    return modules


def _token_parameters(config: EmbedderConfig) -> Parameters:
    """Describes the token table, and the parameters that the output layer adds to it."""
    width = config.table_width
    dtype = config.param_dtype
    # The standard deviations of the initial tables.
    stddevs = config.stddevs
    output = config.output or OutputConfig()
    parameters = {"embeddings": table_parameter(config.rows, width, dtype, stddevs.tokens)}
    if not output.tied:
        parameters["output_embeddings"] = table_parameter(config.rows, width, dtype, stddevs.output)
    if output.bias:
        parameters["output_bias"] = Parameter(shape=(config.rows,), dtype=dtype, init=jnp.zeros)
    return parameters


class ModuleParameters:
    """Reads the parameters of the Haiku module that is running, as `parameters[name]`.

    Haiku makes a parameter when it is read for the first time. This is a class and not a method of
    a module, because a mixed-precision policy casts what the methods of modules return.

    Args:
        parameters: The descriptions of the module's parameters.
        initial: The initial value of each parameter. If None, the initializers make the values.
    """

    def __init__(self, parameters: Parameters, initial: Mapping[str, Any] | None = None):
        self._parameters = parameters
        self._initial = initial

    def __getitem__(self, name: str) -> Any:
        parameter = self._parameters[name]
        init = parameter.init
        if self._initial is not None:
            init = functools.partial(_initial_value, self._initial[name])
        return hk.get_parameter(name, parameter.shape, parameter.dtype, init)


def _initial_value(initial: Any, _shape: Any, dtype: Any) -> Any:
    """Acts as an initializer that returns the user's array, in the dtype of the parameter."""
    return jnp.asarray(arguments.as_array("initial_params", initial), dtype)


def as_initializer(w_init: Initializer | None, default: Initializer) -> Initializer:
    """Returns the user's initializer, or the default if there is none."""
    if w_init is None:
        return default
    want = "a function of a shape and a dtype, such as hk.initializers.RandomNormal()"
    return arguments.instance("w_init", w_init, Callable, want)


def dropout_key(is_training: bool, rate: float) -> Any:
    """Returns Haiku's next key if dropout needs one, or None if Haiku has no key.

    If Haiku has none, `apply_dropout` raises an error that says how to evaluate. The error of
    `hk.next_rng_key` would not say this.
    """
    needs_key = arguments.flag("is_training", is_training) and rate > 0
    return hk.maybe_next_rng_key() if needs_key else None
