"""Rows by exchange: what devices send to the owners of rows, and get from them.

Each device asks the owners for the rows that its part of the batch reads, and sends them the
gradients of those rows.

Everything here runs inside `jax.shard_map`, on one device among many. Rows are named by their slot
in the sharded array, so a device's shard is a range of slots, and ascending slots are grouped by
owner.

    this device                                    the owners of the rows
    distinct slots          ---- all-to-all ---->  slots asked for, repeats merged
    rows                    <--- all-to-all -----  rows of the shard
    gradients of rows       ---- all-to-all ---->  one gradient per row, repeats summed

These are `ask`, `answer` and `return_gradients`. Each arrow is one all-to-all for each hop (see
`hops`). Buffers have a fixed size; the answer to a slot that does not fit is NaN, and its gradient
is dropped.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from transformer_embed._src.tables.rows.distinct_ids import (
    count_below,
    distinct_ascending,
    find_each,
    sum_by_index,
)
from transformer_embed._src.tables.sharded.hops import Hop
from transformer_embed._src.tokens.lookup_gradient import read_or_zero


class Sent(NamedTuple):
    """Where requests are in the send and receive buffers of one hop, on one device.

    Args:
        starts: [parts + 1], the index of the first slot sent to each part.
        places: [k], the place of each slot in the send buffer; slots that do not fit have distinct
            places past its end.
        merged: [parts * room], for each place of the receive buffer, the index of its slot among
            the distinct ones; padding is that of padding, or past the end.
    """

    starts: Int32[Array, "p"]
    places: Int32[Array, "k"]
    merged: Int32[Array, "s"]


def ask(
    hops: Sequence[Hop], slots: Int32[Array, "k"], size: int
) -> tuple[list[Sent], Int32[Array, "m"]]:
    """Sends ascending, distinct slots to their owners.

    Slots of `size` or above are padding and not sent.

    Returns:
        What was sent over each hop, and the slots that this device is asked for, ascending and
        padded in the same way.
    """
    all_sent = []
    for hop in hops:
        parts = jnp.where(slots < size, slots // hop.stride % hop.parts, hop.parts)
        starts = count_below(parts, jnp.arange(hop.parts + 1, dtype=jnp.int32))
        index = jnp.arange(len(slots), dtype=jnp.int32)
        rank = index - starts[parts]
        fits = (parts < hop.parts) & (rank < hop.room)
        places = jnp.where(fits, parts * hop.room + rank, hop.parts * hop.room + index)
        received = _all_to_all(hop, _send_buffer(hop, starts, slots, size))
        slots = distinct_ascending(received, size, hop.distinct)
        all_sent.append(Sent(starts, places, find_each(slots, received)))
    return all_sent, slots


def answer(
    hops: Sequence[Hop], sent: Sequence[Sent], rows: Float[Array, "m d"]
) -> Float[Array, "k d"]:
    """The rows that the owners send back; NaN for a slot that did not fit."""
    for hop, (_, places, merged) in reversed([*zip(hops, sent, strict=True)]):
        known = (merged < len(rows))[:, None]
        answers = jnp.where(known, read_or_zero(rows, merged.astype(jnp.uint32)), jnp.nan)
        received = _all_to_all(hop, answers)
        rows = received.at[places].get(mode="fill", fill_value=jnp.nan, unique_indices=True)
    return rows


def return_gradients(
    hops: Sequence[Hop], sent: Sequence[Sent], gradients: Float[Array, "k d"]
) -> Float[Array, "m d"]:
    """The gradient of each row that this device was asked for, summed over those that asked.

    It is the transpose of `answer`.
    """
    for hop, (starts, _, merged) in zip(hops, sent, strict=True):
        received = _all_to_all(hop, _send_buffer(hop, starts, gradients, 0))
        gradients = sum_by_index(received, merged, hop.distinct)
    return gradients


def _send_buffer(hop: Hop, starts: Int32[Array, "p"], values: Array, fill: int) -> Array:
    """[parts * room, ...]: the values for each part, which are contiguous, padded with `fill`."""
    index = starts[:-1, None] + jnp.arange(hop.room, dtype=jnp.int32)[None]
    index = jnp.where(index < starts[1:, None], index, len(values)).reshape(-1)
    return values.at[index].get(mode="fill", fill_value=fill)


def _all_to_all(hop: Hop, buffer: Array) -> Array:
    """Sends each part its block of the buffer; returns the blocks received."""
    return jax.lax.all_to_all(buffer, hop.axes, split_axis=0, concat_axis=0, tiled=True)
