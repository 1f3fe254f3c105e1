"""Distinct ids in ascending order, in arrays of a fixed size, and a search in them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import is_explicit
from transformer_embed._src.tokens.lookup_gradient import read_or_zero

# Rows that are updated at a time: a block stays in the processor's cache.
BLOCK = 1024


def as_max_rows(bound: int | None) -> int:
    """A bound on distinct ids; one that no number of int32 ids reaches for None."""
    return 2**31 if bound is None else arguments.integer("max_rows", bound, at_least=1)


def most_distinct(count: int, vocab_size: int, max_rows: int) -> int:
    """The rows that so many ids can ask for at most, but at least 1."""
    return max(1, min(count, vocab_size, max_rows))


def distinct_rows(ids: Int32[Array, "..."], vocab_size: int, max_rows: int) -> Int32[Array, "k"]:
    """The smallest distinct ids of those inside the vocabulary, ascending, then padding.

    Padding is distinct ids of vocab_size or above. Above one block, there are whole blocks.
    """
    count = most_distinct(ids.size, vocab_size, max_rows)
    room = count if count <= BLOCK else -(-count // BLOCK) * BLOCK
    return distinct_ascending(ids, vocab_size, room)


def distinct_ascending(values: Int32[Array, "..."], size: int, room: int) -> Int32[Array, "k"]:
    """The `room` smallest distinct values below `size`, ascending, then values above as padding."""
    # Padding counts from `size` on: int32 would wrap.
    if size + room > 2**31 - 1:
        most = f"at most {2**31 - 1 - room} rows, to take {room} of them"
        raise arguments.value_error("table", most, size)
    ordered = jnp.sort(values.reshape(-1))
    first = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    is_distinct = first & (ordered < size)
    # Repeats, and values of `size` or above, go past the end and are dropped.
    slots = jnp.where(is_distinct, jnp.cumsum(is_distinct, dtype=jnp.int32) - 1, room)
    return jnp.arange(size, size + room, dtype=jnp.int32).at[slots].set(ordered, mode="drop")


def count_below(
    ascending: Int32[Array, "k"], values: Integer[Array | np.ndarray, "..."]
) -> Int32[Array, "..."]:
    """How many of the ascending numbers are below each value."""
    # jnp.searchsorted fails where explicit mesh axes split the values.
    size = len(ascending)
    count = jnp.zeros_like(values)
    for step in (2**bit for bit in reversed(range(size.bit_length()))):
        further = count + step
        is_below = read_each(ascending, jnp.minimum(further, size) - 1) < values
        count = jnp.where((further <= size) & is_below, further, count)
    return count


def read_each(values: Int32[Array, "k"], slots: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """`values[slots]`; under explicit mesh axes, split as the slots are."""
    sharding = jax.typeof(slots).sharding
    explicit = is_explicit(sharding.mesh)
    return values.at[slots].get(out_sharding=sharding if explicit else None)


def find_each(ascending: Int32[Array, "k"], values: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """The index of each value among the ascending numbers, or k if it is not among them."""
    size = len(ascending)
    index = count_below(ascending, values)
    is_found = read_each(ascending, jnp.minimum(index, size - 1)) == values
    return jnp.where(is_found, index, size)


def sum_rows(
    ids: Int32[Array, "k"],
    rows: Float[Array, "k d"],
    size: int,
    every: Int32[Array, "..."],
) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """The distinct ids below `size`, ascending and padded, and the sum of the rows of each.

    They are those of `every`, which include the ids that have rows.
    """
    distinct = distinct_ascending(every, size, min(every.size, size))
    return distinct, sum_by_index(rows, find_each(distinct, ids), len(distinct))


def sum_over_devices(
    ids: Int32[Array, "k"], values: Float[Array, "k d"], vocab_size: int, axis_name: Any
) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """The distinct ids of all devices along mapped axes, and the sum of the rows of each."""
    # As sums, which shard_map knows to be equal on all devices.
    lists = jnp.zeros([jax.lax.psum(1, axis_name), ids.size], jnp.int32)
    lists = jax.lax.psum(lists.at[jax.lax.axis_index(axis_name)].set(ids), axis_name)
    distinct, own = sum_rows(ids, values, vocab_size, lists)
    return distinct, jax.lax.psum(own, axis_name)


def sum_by_index(
    rows: Float[Array, "n d"], index: Int32[Array, "n"], count: int
) -> Float[Array, "m d"]:
    """The sum of the rows of each index below `count`.

    It is the transpose of `read_or_zero`, which chooses how to sum on a GPU.
    """
    # Only the type is used: it varies over the mesh as the rows do, so that the transpose does not
    # sum over devices.
    sums = jnp.broadcast_to(rows[:1], (count, rows.shape[1]))
    read = functools.partial(read_or_zero, index=index.astype(jnp.uint32))
    return jax.linear_transpose(read, sums)(rows)[0]
