"""Rows of a dealt table on a mesh: each device asks the owners for the rows that its own part of
the batch reads.

The rows are dealt over the devices (see `dealing`), and the batch is split over at least the same
mesh axes.

    a device                                      the owners of the rows distinct positions of its
    part  ----------->  asked: rows of the shard rows                            <-----------
    (`gather_from_owners`, `take_from_owners`) gradients of these rows         ----------->  owned:
    ids and summed gradients  (`OwnedRows`), for the shard's own update

Each arrow is an exchange over a route (see `exchange` and `routes`). Ids are what the user sees. A
position is the index of an id's row in the dealt array. `shard_rows` count rows from the start of a
device's shard. Each list ascends, and numbers past the end are padding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import in_compute_dtype, rows_at
from transformer_embed._src.functional.partitioning import (
    Axes,
    array_axes,
    index_along,
    partition_spec,
)
from transformer_embed._src.rows.distinct_ids import count_below, distinct_ascending
from transformer_embed._src.rows.gathered_rows import GatheredRows
from transformer_embed._src.rows.row_gradient import RowGradient, register_row_gradient
from transformer_embed._src.sharded import exchange, routes
from transformer_embed._src.sharded.dealing import Deal

if TYPE_CHECKING:
    from transformer_embed._src.sharded.sharded import Sharded


# --- lookup


@jax.jit
def gather_from_owners(table: "Sharded", ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """Each device asks for the distinct rows of its part of the ids; the gradient goes back the
    same way."""

    def distinct(positions):
        return distinct_ascending(
            positions, table.array.shape[0], max(1, min(positions.size, table.vocab_size))
        )

    plan = _exchange_plan(table, ids, distinct)

    def read(shard, ids):
        positions = table.positions(ids)
        held = distinct(positions)
        values, *_ = _ask_owners(plan, held, shard)
        return _rows_at_positions(held, values, positions)

    specs = (partition_spec(plan.owners), partition_spec(*plan.split))
    wide = jax.shard_map(
        read, mesh=plan.mesh, in_specs=specs, out_specs=partition_spec(*plan.split, ())
    )(in_compute_dtype(table.array), ids)
    return wide.astype(table.dtype)


@dataclasses.dataclass(frozen=True)
class _ExchangePlan:
    """How a batch of ids reaches the owners of its rows.

    Args:
        mesh: the devices.
        owners: the mesh axes that the rows are split over.
        batch_axes: as in `Sharded`.
        split: the mesh axes that each dimension of the ids is split over.
        route: the route of the exchange.
        deal: how the table is dealt.
    """

    mesh: Any
    owners: Axes
    batch_axes: Axes
    split: tuple[Axes, ...]
    route: routes.Route
    deal: Deal

    @property
    def id_axes(self) -> Axes:
        """The mesh axes that the ids are split over."""
        return tuple(axis for axes in self.split for axis in axes)

    @property
    def replica_axes(self) -> Axes:
        """The mesh axes that the ids are split over and the rows are not: devices along them hold
        the same rows."""
        return tuple(axis for axis in self.id_axes if axis not in self.owners)


def _exchange_plan(
    table: "Sharded", ids: Int32[Array, "..."], distinct: Callable[[Array], Array]
) -> _ExchangePlan:
    """The plan for a batch, of which each device reads the ids that `distinct` returns for its
    part."""
    mesh, owners, deal = table.sharding.mesh, table.axes[0], table.deal
    assert deal is not None
    split = tuple(array_axes(mesh, table.batch_axes, ids, ids.ndim))
    id_axes = [axis for axes in split for axis in axes]
    if not set(owners) <= set(id_axes):
        want = f"split over the mesh axes of the table's rows, {owners}, to exchange them (the batch must divide by the devices)"
        raise ValueError(
            arguments.wanted("ids", want, f"shape {list(ids.shape)} split over {tuple(id_axes)}")
        )
    devices = math.prod(mesh.shape[axis] for axis in id_axes)
    on_device = jax.shard_map(
        distinct, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    asked = jax.eval_shape(
        on_device, jax.ShapeDtypeStruct((ids.size // devices,), ids.dtype)
    ).shape[0]
    return _ExchangePlan(mesh, owners, table.batch_axes, split, _route(table, devices, asked), deal)


def _route(table: "Sharded", devices: int, asked: int) -> routes.Route:
    """The route for `devices` devices that each ask for at most `asked` distinct rows."""
    owners = table.axes[0]
    sizes = tuple(table.sharding.mesh.shape[axis] for axis in owners)
    return routes.plan_route(
        asked, owners, sizes, table.array.shape[0] // math.prod(sizes), devices, table.capacity
    )


def _ask_owners(plan: _ExchangePlan, positions: Int32[Array, "k"], shard: Float[Array, "s d"]):
    """The rows at ascending, distinct positions; what was sent to get them; and the rows of this
    shard that devices ask for."""
    size = plan.deal.size
    sent, asked = exchange.ask(plan.route, positions, size)
    shard_rows = asked - index_along(plan.owners) * shard.shape[0]
    values = shard.at[shard_rows].get(
        mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
    )
    answers = exchange.answer(plan.route, sent, values)
    # Padding does not fit either, but only a row that was asked for may read as NaN.
    return jnp.where((positions < size)[:, None], answers, 0), sent, shard_rows


def _rows_at_positions(
    held: Int32[Array, "k"], values: Float[Array, "k d"], positions: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """The row at each position; NaN for a position that is not held."""
    slots = jnp.minimum(count_below(held, positions), len(held) - 1)
    return jnp.where((held[slots] == positions)[..., None], rows_at(values, slots), jnp.nan)


# --- training by rows


@functools.partial(jax.jit, static_argnums=2)
def take_from_owners(
    table: "Sharded", ids: Int32[Array, "..."], distinct: Callable[[Array], Array]
) -> "_ExchangedRows":
    """On each device, the distinct rows of its part of the ids."""
    plan = _exchange_plan(table, ids, distinct)

    def take(shard, ids):
        held = distinct(ids)
        index = jnp.arange(len(held), dtype=jnp.int32)
        positions = jnp.sort(
            jnp.where(held < table.vocab_size, table.positions(held), plan.deal.size + index)
        )
        values, sent, shard_rows = _ask_owners(plan, positions, shard)
        return positions, in_compute_dtype(values), sent, shard_rows

    specs = (partition_spec(plan.owners), partition_spec(*plan.split))
    take_all = jax.shard_map(
        take, mesh=plan.mesh, in_specs=specs, out_specs=partition_spec(plan.id_axes)
    )
    positions, values, sent, asked = take_all(table.array, ids)
    return _ExchangedRows(positions, values, table.vocab_size, table.dtype, sent, asked, plan)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "values", "sentinel", "sent", "asked"],
    meta_fields=["vocab_size", "name", "row_dtype", "plan"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class _ExchangedRows(GatheredRows):
    """On each device, the rows that its part of a batch reads.

    Args:
        ids: [devices * k], positions in the dealt array, ascending and distinct on each device.
        values: [devices * k, d], the rows, in float32 or wider: their gradient is summed over
            devices before it is rounded.
        vocab_size: number of rows of the table.
        row_dtype: dtype of the table.
        sent: what each device sent to get them.
        asked: [devices * m], the rows that each device was asked for, counted from the start of its
            shard.
        plan: how they were exchanged.
    """

    row_dtype: Any
    sent: exchange.SentOnRoute
    asked: Any
    plan: _ExchangePlan

    @property
    def dtype(self) -> jnp.dtype:
        """That of the table."""
        return self.row_dtype

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`; the ids must be split as the batch is."""
        return _gather_exchanged(self, ids)

    def gradient(self, values: Float[Array, "k d"]) -> RowGradient:
        """On each device, the gradient of its shard's rows, summed over all devices."""
        ids, sums = _return_gradients(self, values)
        return OwnedRows(ids, sums.astype(self.dtype), self.vocab_size, self.plan)


@jax.jit
def _gather_exchanged(taken: _ExchangedRows, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    plan = taken.plan
    split = array_axes(plan.mesh, plan.batch_axes, ids, ids.ndim)
    if {axis for axes in split for axis in axes} != set(plan.id_axes):
        want = f"split over the mesh axes of the ids given to te.rows, {plan.id_axes}"
        raise ValueError(
            arguments.wanted("ids", want, f"shape {list(ids.shape)} split over {tuple(split)}")
        )

    def read(held, values, ids):
        return _rows_at_positions(
            held, values, plan.deal.positions(jnp.clip(ids, 0, taken.vocab_size - 1))
        )

    everyone = partition_spec(plan.id_axes)
    read_all = jax.shard_map(
        read,
        mesh=plan.mesh,
        in_specs=(everyone, everyone, partition_spec(*split)),
        out_specs=partition_spec(*split, ()),
    )
    return read_all(taken.ids, taken.values, ids).astype(taken.dtype)


@jax.jit
def _return_gradients(
    taken: _ExchangedRows, gradient: Float[Array, "k d"]
) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """On each device, the ids of its shard that were asked for, and the sum of their gradients."""
    plan = taken.plan
    shard = plan.route.hops[-1].stride

    def send(sent, shard_rows, gradient):
        sums = exchange.return_gradients(plan.route, sent, gradient)
        if plan.replica_axes:
            shard_rows, sums = (
                jax.lax.all_gather(each, plan.replica_axes, tiled=True)
                for each in (shard_rows, sums)
            )
            shard_rows, sums = exchange.sum_repeats(shard_rows, sums, shard)
        return _ids_of_shard_rows(plan.deal, plan.owners, shard_rows, shard), sums

    everyone, owners = partition_spec(plan.id_axes), partition_spec(plan.owners)
    # Unchecked: the types do not show that gathered values are equal along the axis that they were
    # gathered over.
    send_all = jax.shard_map(
        send, mesh=plan.mesh, in_specs=everyone, out_specs=(owners, owners), check_vma=False
    )
    return send_all(taken.sent, taken.asked, gradient)


@register_row_gradient
@dataclasses.dataclass(frozen=True, eq=False)
class OwnedRows(RowGradient):
    """On each device, the gradient of some of its shard's rows: ids ascend by their position in the
    shard."""

    plan: _ExchangePlan

    def __add__(self, other: RowGradient) -> RowGradient:
        """See `RowGradient`; each device adds its own rows."""
        if self.ids is other.ids or not isinstance(other, OwnedRows):
            return super().__add__(other)
        plan = self.plan
        shard = plan.route.hops[-1].stride

        def merge(ids, values):
            ids, values = jnp.concatenate(ids), jnp.concatenate(values)
            shard_rows, sums = exchange.sum_repeats(
                shard_rows_of_ids(plan.deal, plan.owners, ids, shard), values, shard
            )
            return _ids_of_shard_rows(plan.deal, plan.owners, shard_rows, shard), sums

        owners = partition_spec(plan.owners)
        merge_all = jax.shard_map(merge, mesh=plan.mesh, in_specs=owners, out_specs=owners)
        ids, values = merge_all([self.ids, other.ids], [self.values, other.values])
        return dataclasses.replace(self, ids=ids, values=values)


def shard_rows_of_ids(
    deal: Deal, owners: Axes, ids: Int32[Array, "k"], shard: int
) -> Int32[Array, "k"]:
    """The row of each id, counted from the start of this device's shard; past its end for ids
    outside the vocabulary."""
    shard_rows = deal.positions(jnp.minimum(ids, deal.vocab_size - 1)) - index_along(owners) * shard
    return jnp.where(
        ids < deal.vocab_size, shard_rows, shard + jnp.arange(len(ids), dtype=jnp.int32)
    )


def _ids_of_shard_rows(
    deal: Deal, owners: Axes, shard_rows: Int32[Array, "k"], shard: int
) -> Int32[Array, "k"]:
    """The inverse of `shard_rows_of_ids`."""
    ids = deal.ids(jnp.minimum(shard_rows, shard - 1) + index_along(owners) * shard)
    return jnp.where(
        shard_rows < shard, ids, deal.vocab_size + jnp.arange(len(shard_rows), dtype=jnp.int32)
    )


# --- the load of a batch, on the host


class ExchangeLoad(NamedTuple):
    """What an exchange of rows asks of the devices for one batch; see `Sharded.exchange_load`."""

    rows: np.ndarray
    dropped: int


def exchange_load(table: "Sharded", deal: Deal, ids: np.ndarray) -> ExchangeLoad:
    """The load of a lookup of these ids, whose first dimension is split over the batch's axes; see
    `routes.simulate`."""
    sizes = dict(table.sharding.mesh.shape)
    devices = math.prod(sizes[axis] for axis in table.batch_axes)
    if ids.ndim == 0 or ids.shape[0] % devices:
        raise ValueError(
            arguments.wanted(
                "ids",
                f"a first dimension that {devices} devices divide",
                f"shape {list(ids.shape)}",
            )
        )
    positions = deal.positions(np.clip(ids, 0, table.vocab_size - 1).astype(np.int32))
    asked = max(1, min(ids.size // devices, table.vocab_size))
    return ExchangeLoad(
        *routes.simulate(
            _route(table, devices, asked), positions.reshape(devices, -1), sizes, table.batch_axes
        )
    )
