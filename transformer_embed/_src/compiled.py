"""Works with the compiler: one program for a private function, and ways around its habits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32


def compiled(*static: int) -> Callable[..., Callable]:
    """Returns a decorator that compiles a function, with the arguments at these places static.

    Without the decorator, a caller outside of jit would run one small program for each operation.
    Inside of jit, the caller's program takes up the function as it is.
    """
    return functools.partial(jax.jit, inline=True, static_argnums=static)


# --- Each function below says what it prevents. The versions 0.9 to 0.12 of jax need all of them.


def change_column(
    values: Float[Array, "t r"], columns: Int32[Array, "#t 1"], change: Callable, *, is_last: bool
) -> Float[Array, "t r"]:
    """Changes the values in one column of each row, or in none if the column is outside.

    On a CPU this avoids an extra pass over memory, which takes 5 percent of a loss's time. Other
    devices fuse the change with another pass, and so does a CPU if the change is not the last one.

    Args:
        values: The values, with t rows and r columns.
        columns: The column to change in each row.
        change: A function of values that computes the new ones.
        is_last: Whether nothing changes the values afterwards.
    """

    def in_one_pass() -> Array:
        is_changed = jnp.arange(values.shape[1], dtype=jnp.int32)[None] == columns
        return jnp.where(is_changed, change(values), values)

    if not is_last:
        return in_one_pass()

    def in_place() -> Array:
        # As uint32, a negative column is past the end.
        index = jnp.broadcast_to(columns, (len(values), 1)).astype(jnp.uint32)
        old = jnp.take_along_axis(values, index, axis=1, mode="clip")
        # This is a vmap, so that a mesh may split the rows.
        write = jax.vmap(lambda row, column, new: row.at[column].set(new, mode="drop"))
        return write(values, index, change(old))

    return jax.lax.platform_dependent(cpu=in_place, default=in_one_pass)


def known_after_reading(ids: Int32[Array, "k"], rows: Float[Array, "n d"]) -> Int32[Array, "k"]:
    """Returns the same ids, so that their use must wait for these rows.

    Without this, XLA copies a donated table, because its rows might be overwritten before they are
    read.
    """
    # Half of 0 or 1 is 0, but XLA does not see that. (It drops an optimization_barrier too early.)
    # All columns of a row are read, for explicit mesh axes may split the columns.
    zero = jnp.isnan(rows[:1]).any().astype(jnp.int32) >> 1
    return ids + zero


def computed_once(rows: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
    """Returns the same array, so that a CPU computes it once.

    Without this, a CPU fuses the computation into whatever broadcasts the array, and so repeats it.
    XLA does not fuse through a gather.
    """
    # Under explicit mesh axes that split the array, the gather would need a sharding.
    if any(jax.typeof(rows).sharding.spec):
        return rows
    every_row = jnp.arange(len(rows), dtype=jnp.int32)
    # No index is out of range. With its default mode, jax would compare each one and select.
    gather = functools.partial(jnp.take, indices=every_row, axis=0, mode="clip")
    return jax.lax.platform_dependent(rows, cpu=gather, default=lambda rows: rows)


def nan_where(is_wrong: Bool[Array, "..."], values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the values, with NaN where they are wrong.

    Args:
        is_wrong: Whether values are wrong, with the leading axes of the values.
        values: The values.
    """
    # With jax_disable_jit, jax_debug_nans looks at each constant, so a constant NaN would raise an
    # error though nothing is wrong. There, NaN is made from bits.
    nan: Any = np.array(np.nan, values.dtype)
    is_wrong = is_wrong.reshape(*is_wrong.shape, *[1] * (values.ndim - is_wrong.ndim))
    # In a compiled program, the bits would cost a TPU a percent.
    config: Any = jax.config
    if config.jax_disable_jit:
        bits = nan.view(f"int{8 * nan.itemsize}")
        bits = jnp.where(is_wrong, bits, np.zeros_like(bits))
        nan = jax.lax.bitcast_convert_type(bits, values.dtype)
    return jnp.where(is_wrong, nan, values)
