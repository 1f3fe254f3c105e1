"""Finds distinct numbers, in ascending arrays of a fixed size, and searches in them.

The numbers are row indices of a table. Letters of shapes: k and m numbers, n rows of values, d
columns.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import is_explicit
from transformer_embed._src.tokens.lookup_gradient import read_or_zero

# This many rows are updated at a time: a block stays in the processor's cache.
BLOCK = 1024


class SummedRows(NamedTuple):
    """Distinct row indices, ascending and padded, and the sum of the rows of each."""

    row_indices: Int32[Array, "m"]
    sums: Float[Array, "m d"]


def as_max_rows(bound: int | None) -> int:
    """Returns a bound on distinct ids, or for None a bound that int32 ids never reach."""
    return 2**31 if bound is None else arguments.integer("max_rows", bound, at_least=1)


def most_distinct(count: int, num_rows: int, max_rows: int) -> int:
    """Returns how many rows so many ids can ask for at most, but at least 1."""
    return max(1, min(count, num_rows, max_rows))


def distinct_rows(indices: Int32[Array, "..."], num_rows: int, max_rows: int) -> Int32[Array, "k"]:
    """Returns the smallest distinct indices of those inside the table, ascending, then padding.

    Padding consists of distinct numbers of num_rows or above. If there is more than one block,
    padding fills the last one.
    """
    count = most_distinct(indices.size, num_rows, max_rows)
    room = count if count <= BLOCK else -(-count // BLOCK) * BLOCK
    return distinct_ascending(indices, num_rows, room)


def distinct_ascending(values: Int32[Array, "..."], size: int, room: int) -> Int32[Array, "k"]:
    """Returns the `room` smallest distinct values below `size`, ascending, then padding.

    Padding counts from `size` on. If there are more such values, the largest ones are left out.
    """
    if size + room > 2**31 - 1:
        # Padding counts from `size` on, and would wrap as int32.
        most = f"at most {2**31 - 1 - room} rows, to take {room} of them"
        raise arguments.value_error("table", most, size)
    ordered = jnp.sort(values.reshape(-1))
    is_first = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    is_distinct = is_first & (ordered < size)
    # Repeats, and values of `size` or above, go past the end and are dropped.
    slots = jnp.where(is_distinct, jnp.cumsum(is_distinct, dtype=jnp.int32) - 1, room)
    padding = jnp.arange(size, size + room, dtype=jnp.int32)
    return padding.at[slots].set(ordered, mode="drop")


def count_below(
    ascending: Int32[Array, "k"], values: Integer[Array | np.ndarray, "..."]
) -> Int32[Array, "..."]:
    """Counts how many of the ascending numbers are below each value."""
    # This is a binary search. jnp.searchsorted fails if explicit mesh axes split the values.
    size = len(ascending)
    count = jnp.zeros_like(values)
    for bit in reversed(range(size.bit_length())):
        further = count + 2**bit
        is_below = read_each(ascending, jnp.minimum(further, size) - 1) < values
        count = jnp.where((further <= size) & is_below, further, count)
    return count


def read_each(values: Int32[Array, "k"], slots: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns `values[slots]`; under explicit mesh axes, it is split as the slots are."""
    sharding = jax.typeof(slots).sharding
    out_sharding = sharding if is_explicit(sharding.mesh) else None
    return values.at[slots].get(out_sharding=out_sharding)


def find_each(ascending: Int32[Array, "k"], values: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns the place of each value among the ascending numbers, or k for any other value."""
    size = len(ascending)
    place = count_below(ascending, values)
    is_found = read_each(ascending, jnp.minimum(place, size - 1)) == values
    return jnp.where(is_found, place, size)


def sum_rows(
    indices: Int32[Array, "k"],
    rows: Float[Array, "k d"],
    num_rows: int,
    all_indices: Int32[Array, "..."],
) -> SummedRows:
    """Sums the rows of equal indices.

    The result has all distinct numbers of `all_indices` that are below `num_rows`. They include the
    indices of these rows.
    """
    distinct = distinct_ascending(all_indices, num_rows, min(all_indices.size, num_rows))
    sums = sum_by_index(rows, find_each(distinct, indices), len(distinct))
    return SummedRows(row_indices=distinct, sums=sums)


def sum_over_devices(
    indices: Int32[Array, "k"], rows: Float[Array, "k d"], num_rows: int, axis_name: Any
) -> SummedRows:
    """Sums the rows of equal indices over the devices along mapped axes."""
    devices = jax.lax.psum(1, axis_name)
    # Every device learns the indices of all devices from a sum, because shard_map knows that a sum
    # is equal on all of them.
    lists = jnp.zeros([devices, indices.size], jnp.int32)
    own_list = lists.at[jax.lax.axis_index(axis_name)].set(indices)
    all_indices = jax.lax.psum(own_list, axis_name)
    own = sum_rows(indices, rows, num_rows, all_indices)
    return SummedRows(row_indices=own.row_indices, sums=jax.lax.psum(own.sums, axis_name))


def sum_by_index(
    rows: Float[Array, "n d"], index: Int32[Array, "n"], count: int
) -> Float[Array, "m d"]:
    """Sums the rows of each index below `count`.

    This is the transpose of `read_or_zero`, which chooses how to sum on a GPU.
    """
    # Only the type of this array is used. It varies over the mesh as the rows do, so that the
    # transpose does not sum over devices.
    like_sums = jnp.broadcast_to(rows[:1], (count, rows.shape[1]))
    read = functools.partial(read_or_zero, index=index.astype(jnp.uint32))
    (sums,) = jax.linear_transpose(read, like_sums)(rows)
    return sums
