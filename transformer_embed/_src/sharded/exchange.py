"""Rows by exchange: each device asks the owners of the rows that its part of the batch reads, and
sends them the gradients of those rows.

Everything here runs inside `jax.shard_map`, on one device among many. Rows are named by their
position in the sharded array, so a device's shard is a range of positions and an ascending list of
positions is grouped by owner.

    this device                          the owners of the rows distinct positions  ---- all-to-all
    ---->  positions asked for, repeats merged rows                <--- all-to-all -----  rows of
    the shard                       (`ask`, then `answer`) gradients of rows   ---- all-to-all ---->
    one gradient per row, repeats summed    (`return_gradients`)

Each arrow is one all-to-all for each hop of the route (see `routes`): a direct one, others one
after the other, or both. Buffers have a fixed size; the answer to a position that does not fit is
NaN, and its gradient is dropped.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from transformer_embed._src.functional.lookup import read_or_zero
from transformer_embed._src.rows.distinct_ids import compacted, count_below, distinct_ascending
from transformer_embed._src.sharded.routes import Hop, Route


class Sent(NamedTuple):
    """Where the positions that went over a hop are in its buffers, on one device.

    Args:
        starts: [parts + 1], the index of the first position sent to each part.
        slots: [asked], the slot of each position in the send buffer; positions that do not fit have
            distinct slots past its end.
        found: [parts * room], for each slot of the receive buffer, the index of its position among
            the distinct ones; past the end: none.
    """

    starts: Int32[Array, "p"]
    slots: Int32[Array, "k"]
    found: Int32[Array, "s"]


class SentOnRoute(NamedTuple):
    """Where the positions that went over a route are in its buffers, on one device.

    Args:
        direct: for the direct hop. Its `slots` and `found` also count the buffers of the rest,
            which follow its own.
        left: [rest], the index of each position of the rest among those asked for; past their end:
            none.
        over_hops: for each hop.
    """

    direct: Sent | None
    left: Int32[Array, "r"] | None
    over_hops: list[Sent]


def ask(
    route: Route, positions: Int32[Array, "k"], size: int
) -> tuple[SentOnRoute, Int32[Array, "m"]]:
    """Sends ascending, distinct positions to their owners; positions of `size` or above are padding
    and not sent.

    Returns:
        What was sent, and the positions that this device is asked for, ascending and padded in the
        same way.
    """
    if route.direct is None:
        over_hops, asked = _ask_over_hops(route.hops, positions, size)
        return SentOnRoute(None, None, over_hops), asked
    hop, count = route.direct, len(positions)
    direct_slots = hop.parts * hop.room
    starts, slots, arrived = _send_positions(hop, positions, size)
    goes = slots < direct_slots
    in_rest = ~goes & (positions < size)
    left = compacted(jnp.arange(count, dtype=jnp.int32), in_rest, count, route.rest)
    rest = jnp.where(
        left < count,
        positions.at[left].get(mode="clip"),
        size + jnp.arange(route.rest, dtype=jnp.int32),
    )
    over_hops, of_rest = _ask_over_hops(route.hops, rest, size)
    slots = jnp.where(
        in_rest,
        direct_slots + jnp.cumsum(in_rest, dtype=jnp.int32) - 1,
        jnp.where(goes, slots, slots + route.rest),
    )
    asked, found = _merge_requests(jnp.concatenate([arrived, of_rest]), size, route.distinct)
    return SentOnRoute(Sent(starts, slots, found), left, over_hops), asked


def answer(route: Route, sent: SentOnRoute, rows: Float[Array, "m d"]) -> Float[Array, "k d"]:
    """Sends the rows that this device was asked for back to the devices that asked; NaN for a
    position that did not fit."""
    if route.direct is None or sent.direct is None:
        return _answer_over_hops(route.hops, sent.over_hops, rows)
    answers, direct_slots = (
        _rows_found(rows, sent.direct.found),
        route.direct.parts * route.direct.room,
    )
    direct, rest = (
        _all_to_all(route.direct, answers[:direct_slots]),
        _answer_over_hops(route.hops, sent.over_hops, answers[direct_slots:]),
    )
    return _rows_in_slots(jnp.concatenate([direct, rest]), sent.direct.slots)


def return_gradients(
    route: Route, sent: SentOnRoute, gradients: Float[Array, "k d"]
) -> Float[Array, "m d"]:
    """The gradient of each row that this device was asked for, summed over the devices that asked:
    the transpose of `answer`."""
    if route.direct is None or sent.direct is None:
        return _return_over_hops(route.hops, sent.over_hops, gradients)
    direct = _all_to_all(route.direct, _send_buffer(route.direct, sent.direct.starts, gradients, 0))
    rest = _return_over_hops(
        route.hops, sent.over_hops, gradients.at[sent.left].get(mode="fill", fill_value=0)
    )
    return _sum_by_index(jnp.concatenate([direct, rest]), sent.direct.found, route.distinct)


def _ask_over_hops(
    hops: Sequence[Hop], positions: Int32[Array, "k"], size: int
) -> tuple[list[Sent], Int32[Array, "m"]]:
    sent = []
    for hop in hops:
        starts, slots, received = _send_positions(hop, positions, size)
        positions, found = _merge_requests(received, size, hop.distinct)
        sent.append(Sent(starts, slots, found))
    return sent, positions


def _answer_over_hops(
    hops: Sequence[Hop], sent: Sequence[Sent], rows: Float[Array, "m d"]
) -> Float[Array, "k d"]:
    for hop, (_, slots, found) in reversed([*zip(hops, sent, strict=True)]):
        rows = _rows_in_slots(_all_to_all(hop, _rows_found(rows, found)), slots)
    return rows


def _return_over_hops(
    hops: Sequence[Hop], sent: Sequence[Sent], gradients: Float[Array, "k d"]
) -> Float[Array, "m d"]:
    for hop, (starts, _, found) in zip(hops, sent, strict=True):
        gradients = _sum_by_index(
            _all_to_all(hop, _send_buffer(hop, starts, gradients, 0)), found, hop.distinct
        )
    return gradients


def _send_positions(
    hop: Hop, positions: Int32[Array, "k"], size: int
) -> tuple[Int32[Array, "p"], Int32[Array, "k"], Int32[Array, "s"]]:
    """The index of the first position sent to each part, the slot of each position, and the
    positions received."""
    parts = jnp.where(positions < size, positions // hop.stride % hop.parts, hop.parts)
    starts = count_below(parts, jnp.arange(hop.parts + 1, dtype=jnp.int32))
    index = jnp.arange(len(positions), dtype=jnp.int32)
    rank = index - starts[parts]
    fits = (parts < hop.parts) & (rank < hop.room)
    slots = jnp.where(fits, parts * hop.room + rank, hop.parts * hop.room + index)
    return starts, slots, _all_to_all(hop, _send_buffer(hop, starts, positions, size))


def _merge_requests(
    received: Int32[Array, "s"], size: int, room: int
) -> tuple[Int32[Array, "m"], Int32[Array, "s"]]:
    """The distinct positions received, and for each slot the index of its position among them; past
    the end: none."""
    positions = distinct_ascending(received, size, room)
    found = count_below(positions, received)
    known = (received < size) & (positions[jnp.minimum(found, room - 1)] == received)
    return positions, jnp.where(known, found, room)


def _rows_found(rows: Float[Array, "m d"], found: Int32[Array, "s"]) -> Float[Array, "s d"]:
    """The row for each slot; NaN if there is none."""
    return jnp.where(
        (found < len(rows))[:, None], read_or_zero(rows, found.astype(jnp.uint32)), jnp.nan
    )


def _rows_in_slots(buffer: Float[Array, "s d"], slots: Int32[Array, "k"]) -> Float[Array, "k d"]:
    """The row in each slot; NaN for one past the end."""
    return buffer.at[slots].get(mode="fill", fill_value=jnp.nan, unique_indices=True)


def _sum_by_index(
    rows: Float[Array, "s d"], found: Int32[Array, "s"], count: int
) -> Float[Array, "m d"]:
    """The sum of the rows of each index below count, as the transpose of `read_or_zero`, which
    chooses how to sum on a GPU."""
    # Only the type is used: it varies over the mesh as the rows do, so that the transpose does not
    # sum over devices.
    sums = jnp.broadcast_to(rows[:1], (count, rows.shape[1]))
    return jax.linear_transpose(lambda sums: read_or_zero(sums, found.astype(jnp.uint32)), sums)(
        rows
    )[0]


def sum_repeats(
    positions: Int32[Array, "n"], gradients: Float[Array, "n d"], size: int
) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """The distinct positions below `size`, ascending and padded, and the sum of each one's
    gradients."""
    distinct = distinct_ascending(positions, size, min(len(positions), size))
    found = jnp.where(positions < size, count_below(distinct, positions), len(distinct))
    return distinct, _sum_by_index(gradients, found, len(distinct))


def _send_buffer(hop: Hop, starts: Int32[Array, "p"], values: Array, fill: int) -> Array:
    """[parts * room, ...]: the values for each part, which are contiguous, padded with `fill`."""
    index = starts[:-1, None] + jnp.arange(hop.room, dtype=jnp.int32)[None]
    index = jnp.where(index < starts[1:, None], index, len(values)).reshape(-1)
    return values.at[index].get(mode="fill", fill_value=fill)


def _all_to_all(hop: Hop, buffer: Array) -> Array:
    """Sends each part its block of the buffer; returns the blocks received."""
    return jax.lax.all_to_all(buffer, hop.axes, split_axis=0, concat_axis=0, tiled=True)
