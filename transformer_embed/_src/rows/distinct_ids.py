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

# This many rows, a block, are updated at a time, so that a block stays in the processor's cache.
BLOCK = 1024


class SummedRows(NamedTuple):
    """Holds distinct row indices, ascending and padded, and the sum of the rows of each index."""

    row_indices: Int32[Array, "m"]
    sums: Float[Array, "m d"]


def as_max_rows(bound: int | None) -> int:
    """Checks a bound on distinct ids. If it is None, returns a bound that ids never exceed."""
    return 2**31 if bound is None else arguments.integer("max_rows", bound, at_least=1)


def most_distinct(count: int, num_rows: int, max_rows: int) -> int:
    """Returns the largest number of distinct rows that `count` ids can ask for, but at least 1."""
    return max(1, min(count, num_rows, max_rows))


def distinct_rows(indices: Int32[Array, "..."], num_rows: int, max_rows: int) -> Int32[Array, "k"]:
    """Returns the distinct indices below `num_rows`, ascending, then padding.

    If there are more than `max_rows` of them, the largest ones are left out. The padding is
    `num_rows` or above. If there is more than one block, padding fills the last block.
    """
    # The most distinct indices that there can be.
    count = most_distinct(indices.size, num_rows, max_rows)
    length = count
    # The optimizer updates BLOCK rows at a time, so the length becomes a multiple of BLOCK.
    if count > BLOCK:
        block_count = -(-count // BLOCK)
        length = block_count * BLOCK
    return distinct_ascending(indices, num_rows, length)


def distinct_ascending(
    indices: Int32[Array, "..."], num_rows: int, length: int
) -> Int32[Array, "k"]:
    """Returns `length` numbers: the distinct indices below `num_rows`, ascending, then padding.

    If there are more than `length` of them, the largest ones are left out. The padding is
    `num_rows` or above, and ascends. For example, the indices 7 2 7 9 with 8 rows and length 4 give
    2 7 10 11.
    """
    highest_int32 = 2**31 - 1
    if num_rows + length > highest_int32:
        # The last number of the padding would wrap as int32.
        most = f"at most {highest_int32 - length} rows, to take {length} of them"
        raise arguments.value_error("table", most, num_rows)
    # In the example: 2 7 7 9.
    ordered = jnp.sort(indices.reshape(-1))
    # True for the first of equal indices.
    true = jnp.ones_like(ordered[:1], bool)
    is_first = jnp.concatenate([true, ordered[1:] != ordered[:-1]])
    is_kept = is_first & (ordered < num_rows)
    # Where in the result each kept index goes. All others go past the end, so they are dropped. In
    # the example: 0 1 4 4.
    number_of_kept = jnp.cumsum(is_kept, dtype=jnp.int32) - 1
    target = jnp.where(is_kept, number_of_kept, length)
    # In the example: 8 9 10 11.
    padding = jnp.arange(num_rows, num_rows + length, dtype=jnp.int32)
    return padding.at[target].set(ordered, mode="drop")


def count_below(
    ascending: Int32[Array, "k"], values: Integer[Array | np.ndarray, "..."]
) -> Int32[Array, "..."]:
    """Counts how many of the ascending numbers are below each value.

    This is a binary search. jnp.searchsorted fails if explicit mesh axes split the values.

    For example, of the numbers 1 2 5 7, three are below 6. The search tries the counts 4 (no, 7 is
    not below 6), 2 (yes, 2 is below 6) and 3 (yes, 5 is below 6).
    """
    size = len(ascending)
    count = jnp.zeros_like(values)
    # The bits of the counts are found one by one, the highest bit first.
    for bit in reversed(range(size.bit_length())):
        larger_count = count + 2**bit
        # If the number at the index `larger_count - 1` is below the value, at least `larger_count`
        # numbers are below the value. A count above `size` is impossible, and is refused below. Its
        # index would be past the end, so the last number is read in its place.
        last_index = jnp.minimum(larger_count, size) - 1
        is_below = read_each(ascending, last_index) < values
        is_count_reached = (larger_count <= size) & is_below
        count = jnp.where(is_count_reached, larger_count, count)
    return count


def read_each(values: Int32[Array, "k"], index: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns `values[index]`, split over explicit mesh axes as the index is, if there are any."""
    sharding = jax.typeof(index).sharding
    out_sharding = sharding if is_explicit(sharding.mesh) else None
    return values.at[index].get(out_sharding=out_sharding)


def find_each(ascending: Int32[Array, "k"], values: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns the index of each value among k ascending numbers, or k if the value is not there."""
    size = len(ascending)
    index = count_below(ascending, values)
    is_found = read_each(ascending, jnp.minimum(index, size - 1)) == values
    return jnp.where(is_found, index, size)


def sum_rows(
    indices: Int32[Array, "k"],
    rows: Float[Array, "k d"],
    num_rows: int,
    all_indices: Int32[Array, "..."],
) -> SummedRows:
    """Sums the rows of equal indices.

    Args:
        indices: The index of each row.
        rows: The rows.
        num_rows: The number of rows of the table. Larger indices are padding.
        all_indices: The indices that the result has, with or without repeats, all of `indices`
            among them. An index without a row gets a sum of zeros.
    """
    # There are at most as many distinct rows as indices, and at most as many as the table has.
    length = min(all_indices.size, num_rows)
    # The distinct indices, ascending, then padding.
    distinct = distinct_ascending(all_indices, num_rows, length)
    # For each row, where its index is among the distinct ones.
    index_of_sum = find_each(distinct, indices)
    sums = sum_by_index(rows, index_of_sum, len(distinct))
    return SummedRows(row_indices=distinct, sums=sums)


def sum_over_devices(
    indices: Int32[Array, "k"], rows: Float[Array, "k d"], num_rows: int, axis_name: Any
) -> SummedRows:
    """Sums the rows of equal indices over the devices along mapped axes.

    First, each device sums its own rows into an array that has the distinct indices of all devices.
    Then these arrays, which have the same indices in the same order, are added.
    """
    device_count = jax.lax.psum(1, axis_name)
    # Every device learns the indices of all devices from a sum: each device fills one row of an
    # array of zeros. An all_gather would give the same array. But only for a sum does shard_map
    # know that the result is equal on all devices.
    zeros = jnp.zeros([device_count, indices.size], jnp.int32)
    own_row = zeros.at[jax.lax.axis_index(axis_name)].set(indices)
    all_indices = jax.lax.psum(own_row, axis_name)
    # The sums of this device's rows, with a sum of zeros for each index that only others have.
    own_sums = sum_rows(indices, rows, num_rows, all_indices=all_indices)
    sums = jax.lax.psum(own_sums.sums, axis_name)
    return SummedRows(row_indices=own_sums.row_indices, sums=sums)


def sum_by_index(
    rows: Float[Array, "n d"], index: Int32[Array, "n"], count: int
) -> Float[Array, "m d"]:
    """Sums the rows of each index below `count`, and drops rows with other indices.

    For example, the rows a, b, c with the index 0 2 0 and a count of 2 give a + c and 0.

    jax makes this function from `read_or_zero(table, index)`, as the gradient of the table. So a
    GPU sums in the way that `read_or_zero` chooses.
    """
    # This array has the type of the table. Its values are not used. It varies over the mesh as the
    # rows do, so that the transpose does not sum over devices.
    like_sums = jnp.broadcast_to(rows[:1], (count, rows.shape[1]))
    read = functools.partial(read_or_zero, index=index.astype(jnp.uint32))
    (sums,) = jax.linear_transpose(read, like_sums)(rows)
    return sums
