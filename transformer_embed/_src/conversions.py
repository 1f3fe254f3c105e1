"""Converts arrays without checks."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp


def compute_dtype(*dtypes: Any) -> jnp.dtype:
    """Returns the dtype to compute in: float32, or float64 if one of the dtypes is float64."""
    # `jnp.promote_types` is not called, because it raises an error under strict promotion.
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def widened(array: Any) -> Any:
    """Casts a floating array to float32, but leaves an array of float64 as it is."""
    return array.astype(compute_dtype(array.dtype))


def is_traced(value: Any) -> bool:
    """Returns whether a value is known only when the compiled program runs."""
    return isinstance(value, jax.core.Tracer)


def unwrapped(value: Any) -> Any:
    """Returns what a wrapper such as Flax's nnx.Param holds, and any other value as it is."""
    if isinstance(value, jax.Array) or not hasattr(type(value), "__jax_array__"):
        return value
    return value.__jax_array__()


def on_device(array: Any) -> jax.Array:
    """Converts an array to a jax array."""
    # For an array that is a jax array already, `jnp.asarray` would take 10 microseconds.
    return array if isinstance(array, jax.Array) else jnp.asarray(array)
