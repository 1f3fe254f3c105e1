"""Compiles private functions, and avoids programs that XLA would make slow."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32


def compiled(*static: int) -> Callable[..., Callable]:
    """Returns a decorator that compiles a function. `static` are the indices of static arguments.

    Without the decorator, a caller outside of jit would run one small program for each operation.
    If the caller is compiled too, the function becomes a part of the caller's program.
    """
    return functools.partial(jax.jit, inline=True, static_argnums=static)


# --- Each function below says what would happen without it. Versions 0.9 to 0.12 of jax need all.


def change_column(
    values: Float[Array, "t r"],
    columns: Int32[Array, "#t 1"],
    change: Callable,
    *,
    is_last_change: bool,
) -> Float[Array, "t r"]:
    """Changes the value in one column of each row. A column out of range changes nothing.

    Most devices fuse the change with another pass over the values. On a CPU, if no other operation
    on all of the values follows, the change would be a pass of its own, which takes 5 percent of
    the time of a loss. So in this case, a CPU writes only the changed values.

    Args:
        values: The values, with t rows and r columns.
        columns: The column to change in each row.
        change: A function that computes new values from old ones, such as `lambda old: old - 1`.
        is_last_change: Whether the caller uses the result as it is. Pass False if the caller then
            multiplies or adds to all of the result.
    """

    def in_one_pass() -> Array:
        """Computes every value of the result, from the old value or from the changed one."""
        every_column = jnp.arange(values.shape[1], dtype=jnp.int32)[None]
        is_changed = every_column == columns
        return jnp.where(is_changed, change(values), values)

    if not is_last_change:
        return in_one_pass()

    def write_in_row(row: Array, column: Array, new_value: Array) -> Array:
        """Writes a value into one column of one row, unless the column is past the end."""
        return row.at[column].set(new_value, mode="drop")

    def in_place() -> Array:
        """Writes only the changed values."""
        # As uint32, a negative column is past the end.
        column_of_row = jnp.broadcast_to(columns, (len(values), 1)).astype(jnp.uint32)
        old_values = jnp.take_along_axis(values, column_of_row, axis=1, mode="clip")
        new_values = change(old_values)
        # `vmap` runs over the rows, so that no index counts them. If a mesh splits the rows, such
        # an index would reach over the parts of all devices.
        return jax.vmap(write_in_row)(values, column_of_row, new_values)

    return jax.lax.platform_dependent(cpu=in_place, default=in_one_pass)


def known_after_reading(ids: Int32[Array, "k"], rows: Float[Array, "n d"]) -> Int32[Array, "k"]:
    """Returns the same ids, as an array that is known only when the rows are computed.

    The rows are read from a donated table, and later the ids say which rows are written to. If the
    ids were known before, XLA would copy the table, because a row might be overwritten before it is
    read.
    """
    # The result is the ids plus 0. This 0 is computed from the rows, as 0 >> 1 or 1 >> 1, and XLA
    # does not notice that both are 0. So the result is known only after the rows. (XLA drops a
    # `jax.lax.optimization_barrier` too early.) All columns of a row are read, because explicit
    # mesh axes may split the columns.
    has_nan = jnp.isnan(rows[:1]).any()
    zero = has_nan.astype(jnp.int32) >> 1
    return ids + zero


def computed_once(rows: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
    """Returns the same array, in a program that computes it only once on a CPU.

    Without this, XLA fuses the computation of the array into the operation that broadcasts it, and
    so a CPU repeats the computation. XLA does not fuse through a gather, so all rows are gathered.
    """
    # Under explicit mesh axes that split the array, the gather would need a sharding.
    if any(jax.typeof(rows).sharding.spec):
        return rows
    every_row = jnp.arange(len(rows), dtype=jnp.int32)
    # No index is out of range. In the default mode, jax would still compare each index with the
    # range, and select NaN.
    gather = functools.partial(jnp.take, indices=every_row, axis=0, mode="clip")

    def keep(rows: Array) -> Array:
        """Returns the rows as they are."""
        return rows

    return jax.lax.platform_dependent(rows, cpu=gather, default=keep)


def nan_where(is_wrong: Bool[Array, "..."], values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the values, with NaN where `is_wrong` is True.

    Args:
        is_wrong: True where a value, or a vector of values, becomes NaN. The shape is the first
            part of the shape of `values`, such as [t] for values [t, d].
        values: The values.
    """
    nan: Any = np.array(np.nan, values.dtype)
    added_axes = [1] * (values.ndim - is_wrong.ndim)
    is_wrong = is_wrong.reshape(*is_wrong.shape, *added_axes)
    config: Any = jax.config
    if config.jax_disable_jit:
        # If users disable jit and set jax_debug_nans, jax looks at each constant, and would raise
        # an error for a constant NaN even if no value is wrong. So `nan` becomes an array that is
        # NaN only where a value is wrong, and 0 elsewhere. The array is made from the bits of NaN,
        # as integers. A compiled program keeps the constant, because the array would cost one
        # percent of the time on a TPU.
        integer_dtype = f"int{8 * nan.itemsize}"
        nan_bits = nan.view(integer_dtype)
        bits = jnp.where(is_wrong, nan_bits, np.zeros_like(nan_bits))
        nan = jax.lax.bitcast_convert_type(bits, values.dtype)
    return jnp.where(is_wrong, nan, values)
