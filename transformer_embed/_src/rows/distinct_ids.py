"""Distinct ids in ascending order, in arrays of a fixed size, and a search in them."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def distinct_ascending(values: Int32[Array, "..."], size: int, room: int) -> Int32[Array, "k"]:
    """The `room` smallest distinct values below `size`, ascending, then distinct values of `size`
    or above as padding."""
    ordered = jnp.sort(values.reshape(-1))
    first = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    return compacted(ordered, first & (ordered < size), size, room)


def compacted(
    values: Int32[Array, "n"], kept: Bool[Array, "n"], size: int, room: int
) -> Int32[Array, "k"]:
    """The first `room` values that are kept, in order, then distinct values of `size` or above as
    padding."""
    slots = jnp.where(kept, jnp.cumsum(kept, dtype=jnp.int32) - 1, room)
    return jnp.arange(size, size + room, dtype=jnp.int32).at[slots].set(values, mode="drop")


def count_below(ascending: Int32[Array, "k"], values: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """How many of the ascending numbers are below each value: `jnp.searchsorted`, which older jax
    does not trace inside `shard_map`."""
    size = len(ascending)
    count = jnp.zeros_like(values)
    for step in (2**bit for bit in reversed(range(size.bit_length()))):
        further = count + step
        is_below = ascending[jnp.minimum(further, size) - 1] < values
        count = jnp.where((further <= size) & is_below, further, count)
    return count
