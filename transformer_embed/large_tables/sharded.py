"""A table on a mesh: who holds which rows, and what is sent when they are read, trained, or multiplied by.

The array of a `Sharded` table is split over mesh axes, by rows, by columns, or by both. No device holds, sends or receives a whole table.

A *cut* table keeps its rows in vocabulary order, a contiguous block on each device, with zeros after the last row up to the mesh.
    lookup      each device reads the ids that it holds, and a sum over the shards collects the rows. Ids that are split over an axis of the
                rows are all-gathered first, and the sums scattered back.
    rows        every device receives the distinct rows of the whole batch; their gradients are summed over the devices that split it.
    logits      every device multiplies x by its rows: logits are split over the vocabulary.

A *dealt* table (see `dealing`) is for batches that are split over the axes of its rows, on many devices.
    lookup      each device asks the owners of the rows that its part of the batch reads (see `exchange`). Other ids are read as above.
    rows        the same, and the gradients go back to the owners, who sum repeats.
    logits      an error: the output layer wants the vocabulary in order.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed import _checks
from transformer_embed._typing import ArrayLike
from transformer_embed.functional.lookup import Table, read_or_zero, rows_at
from transformer_embed.functional.mesh import Axes, leading_without, per_dimension, spec_of
from transformer_embed.large_tables import exchange, routes, rows
from transformer_embed.large_tables.dealing import Deal


class ExchangeLoad(NamedTuple):
    """What an exchange of rows asks of the devices for one batch; see `Sharded.exchange_load`."""

    rows: np.ndarray
    dropped: int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["vocab_size", "sharding", "batch", "virtual_shards", "capacity"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Sharded(Table):
    """A sharded table, as a leaf of a parameter tree; `lookup`, `tied_logits` and every module of this package read it.

    `shard_params` makes it. It is a pytree whose one leaf is the padded array, so gradients, optimizer states and checkpoints have the same
    form and the same sharding. Rows of padding are never read and get no gradient. Their logits are half of the dtype's lowest
    number, so no softmax, argmax or cross-entropy sees them.

    `lookup` returns the values of one device bit for bit. `tied_logits` returns [..., padded vocab_size], split over the table's axes;
    x is all-gathered over the mesh axes from the first that also splits the table on, and a table whose columns are split exchanges
    columns for rows first. A gradient of the table is summed over the axes that the batch is split over and stays in the shard.

    Args:
        array: [padded vocab_size, d].
        vocab_size: number of rows without padding.
        sharding: of the array.
        batch: under automatic axes, the mesh axes that the first dimension of ids and x is split over, if it divides by their size. Under
            explicit axes the arrays' own types say.
        virtual_shards: the rows are dealt over this many virtual shards (see `shard_params`). None: they are in vocabulary order.
        capacity: of a dealt table; see `shard_params`.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> import transformer_embed as te
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ["model"])
        >>> params = {"embed": {"embeddings": np.ones([5, 2], np.float32)}}
        >>> table = te.sharding.shard_params(params, mesh, {"embed/*": PartitionSpec("model")})["embed"]["embeddings"]
        >>> type(table).__name__, table.shape, te.lookup(table, [4]).tolist()
        ('Sharded', (5, 2), [[1.0, 1.0]])

    Source:
        Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019), section 3,
        https://arxiv.org/abs/1909.08053. The exchange: Ivchenko et al., "TorchRec: a PyTorch Domain Library for Recommendation
        Systems" (2022), https://doi.org/10.1145/3523227.3547387
    """

    array: Any
    vocab_size: int
    sharding: NamedSharding
    batch: Axes
    virtual_shards: int | None = None
    capacity: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """(vocab_size, d), without the padding."""
        return (self.vocab_size, self.array.shape[-1])

    @property
    def dtype(self) -> jnp.dtype:
        """Of the rows."""
        return self.array.dtype

    @property
    def deal(self) -> Deal | None:
        """Where a dealt table keeps its rows."""
        return None if self.virtual_shards is None else Deal(self.vocab_size, self.virtual_shards)

    @property
    def axes(self) -> tuple[Axes, Axes]:
        """The mesh axes that the rows are split over, and those of the columns."""
        row_axes, column_axes = per_dimension(self.sharding.spec, 2)
        return row_axes, column_axes

    def positions(self, ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """Where the array has the row of each id; an id beyond either end counts as the one at that end."""
        inside = ids.clip(0, self.vocab_size - 1)
        return inside if self.deal is None else self.deal.positions(inside)

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`; split as the ids are, then as the columns are."""
        split = split_over(self.sharding.mesh, self.batch, ids, ids.ndim)
        by_exchange = self.deal is not None and set(self.axes[0]) <= {axis for axes in split for axis in axes}
        return _gather_from_owners(self, ids) if by_exchange else _gather_from_shards(self, ids)

    def logits(self, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """See `Table`; split as x is, less the table's axes, then over the table's axes."""
        self._check_in_order()
        return _logits(self, x)

    def shards(self, x: Float[Array, "... d"]) -> tuple[Array, Any, Axes, Axes, Sequence[Axes]]:
        """See `Table`."""
        self._check_in_order()
        return self.array, self.sharding.mesh, *self.axes, split_over(self.sharding.mesh, self.batch, x, x.ndim - 1)

    def take_rows(self, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]) -> rows.TakenRows:
        """See `Table`; of a dealt table, each device takes the rows of its part of the ids, otherwise every device takes those of all."""
        if self.axes[1]:
            raise ValueError(_checks.wanted("table", "rows over mesh axes, and whole columns", self.sharding.spec))
        return _take_everywhere(self, ids, distinct) if self.deal is None else _take_from_owners(self, ids, distinct)

    def update_rows(self, step: Callable, needed: Sequence[Array], gradient: rows.Rows, states: Sequence["Sharded"]) -> list["Sharded"]:
        """See `Table`; each shard updates its own rows. Nothing is sent."""
        if self.deal is not None and not isinstance(gradient, _OwnedRows):
            want = "the gradient of a dealt table as `value_and_grad` returns it: each device has those of its own rows"
            raise TypeError(_checks.wanted("grads", want, f"plain {type(gradient).__name__}"))
        mesh, deal, wholes = self.sharding.mesh, self.deal, [self, *states]

        def update_shard(needed, ids, values, shards):
            size = shards[0].shape[0]
            if deal is not None:
                return step(needed, _own_of_ids(deal, self.axes[0], ids, size), values, shards)
            own, order = _own_rows(self, ids, size)
            return step(needed, own, values[order], shards)

        given, split = PartitionSpec() if deal is None else spec_of(self.axes[0]), [self.sharding.spec] * len(wholes)
        specs = ([_spec_inside(mesh, array) for array in needed], given, given, split)
        update_all = jax.shard_map(update_shard, mesh=mesh, in_specs=specs, out_specs=split)
        written = update_all(list(needed), gradient.ids, gradient.values, [each.array for each in wholes])
        return [dataclasses.replace(each, array=array) for each, array in zip(wholes, written, strict=True)]

    def exchange_load(self, ids: ArrayLike) -> "ExchangeLoad":
        """Counts, on the host, how many rows of a dealt table each device sends for a batch, and how many ids find no room.

        The table may also be its shape, as `shard_params` makes it from jax.eval_shape.

        Args:
            ids: [batch, ...], any integer dtype, not traced: the ids of all devices, whose first dimension is split over `batch`.

        Returns:
            rows: int64, [size of each mesh axis of the batch, ...], the rows that each device is asked for: an id counts once for each
            device that asks, or, if the exchange goes over one mesh axis after the other, for each line of devices.
            dropped: the number of requests that find no room: these ids read as NaN.

        Raises:
            TypeError: ids are not integers, or are traced.
            ValueError: the table is not dealt; a batch that the devices do not divide.

        Example:
            >>> import jax, numpy as np
            >>> from jax.sharding import Mesh, PartitionSpec
            >>> import transformer_embed as te
            >>> mesh = Mesh(np.array(jax.devices()[:1]), ["model"])
            >>> params = {"embed": {"embeddings": np.ones([5, 2], np.float32)}}
            >>> params = te.sharding.shard_params(params, mesh, {"*": PartitionSpec("model")}, deal="embed/*", virtual_shards=2)
            >>> load = params["embed"]["embeddings"].exchange_load(np.array([4, 1, 4]))
            >>> load.rows.tolist(), load.dropped
            ([2], 0)
        """
        array = _checks.as_integers("ids", ids)
        if _checks.is_traced(array):
            raise TypeError(_checks.wanted("ids", "values on the host, outside of jit", f"a traced {array.dtype}{list(array.shape)}"))
        if self.deal is None:
            raise ValueError(_checks.wanted("table", "a dealt table (see `deal` of shard_params)", "a table in vocabulary order"))
        return _load(self, self.deal, np.asarray(array))

    def in_vocabulary_order(self) -> np.ndarray:
        """See `Table`; this process must be able to see all shards."""
        array = np.asarray(self.array)
        return array[: self.vocab_size] if self.deal is None else array[self.deal.positions(np.arange(self.vocab_size, dtype=np.int32))]

    def with_rows(self, rows: np.ndarray) -> "Sharded":
        """See `Table`; split over the same mesh axes, and dealt if this one is."""
        size = math.prod(self.sharding.mesh.shape[axis] for axes in self.axes for axis in axes)
        resized = dataclasses.replace(self, vocab_size=len(rows))
        padded = -(-len(rows) // size) * size if resized.deal is None else resized.deal.size
        return dataclasses.replace(resized, array=place_rows(rows, (padded, rows.shape[1]), self.sharding, resized.deal))

    def _check_in_order(self) -> None:
        if self.deal is not None:
            raise TypeError(
                _checks.wanted("table", "rows in vocabulary order for a tied output layer: leave it out of `deal`", "a dealt table")
            )


def place_rows(rows: np.ndarray, shape: tuple[int, ...], sharding: NamedSharding, deal: Deal | None) -> Array:
    """Rows of the host on a mesh, dealt or in order, with zeros where the shape has more; each device is sent its own part."""

    def part(index):
        full = [len(range(*each.indices(size))) for each, size in zip(index, shape, strict=True)]
        if deal is None:
            some = rows[index]
            return np.pad(some, [(0, size - have) for size, have in zip(full, some.shape, strict=True)])
        ids = deal.ids(np.arange(*index[0].indices(shape[0]), dtype=np.int32))
        return np.where((ids < len(rows))[:, None], rows[np.minimum(ids, len(rows) - 1)], np.zeros((), rows.dtype))

    return jax.make_array_from_callback(shape, sharding, part)


def split_over(mesh: Any, batch: Axes, array: Array, batch_dimensions: int) -> list[Axes]:
    """The mesh axes that each dimension is split over: under explicit axes its type says, else `batch` does, for the first one."""
    if AxisType.Explicit in mesh.axis_types:
        return per_dimension(jax.typeof(array).sharding.spec, array.ndim)
    size = math.prod(mesh.shape[axis] for axis in batch)
    first = batch if batch_dimensions and array.shape[0] % size == 0 else ()
    return [first, *[()] * (array.ndim - 1)][: array.ndim]


# --- rows of a cut table: a sum over the shards has each row once


@jax.jit
def _gather_from_shards(table: Sharded, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """Every shard looks up the ids that it holds, zeros for the others; the sum over the shards has one term that is not zero."""
    row_axes, column_axes = table.axes
    split = split_over(table.sharding.mesh, table.batch, ids, ids.ndim)
    if set(column_axes) & {axis for axes in split for axis in axes}:
        raise ValueError(_checks.wanted("table", "columns over a mesh axis that the ids do not use", f"both over {column_axes!r}"))
    by_dimension = [tuple(axis for axis in axes if axis in row_axes) for axes in split]
    elsewhere = tuple(axis for axis in row_axes if not any(axis in axes for axes in by_dimension))

    def read(shard, ids):
        for dimension, axes in enumerate(by_dimension):
            ids = jax.lax.all_gather(ids, axes, axis=dimension, tiled=True) if axes else ids
        row = table.positions(ids) - _index(row_axes) * shard.shape[0]
        # Unsigned, for a negative index would count from the end.
        rows = read_or_zero(shard, row.astype(jnp.uint32)).astype(table.dtype)
        rows = jax.lax.psum(rows, elsewhere) if elsewhere else rows
        for dimension, axes in enumerate(by_dimension):
            rows = jax.lax.psum_scatter(rows, axes, scatter_dimension=dimension, tiled=True) if axes else rows
        return rows

    specs = (spec_of(row_axes, column_axes), spec_of(*split))
    return jax.shard_map(read, mesh=table.sharding.mesh, in_specs=specs, out_specs=spec_of(*split, column_axes))(_wide(table), ids)


def _take_everywhere(table: Sharded, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]) -> "_RowsEverywhere":
    """The distinct rows of the whole batch, on every device."""
    mesh = table.sharding.mesh
    held = jax.shard_map(distinct, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(_replicate(ids, mesh))
    everywhere = dataclasses.replace(table, batch=())
    return _RowsEverywhere(held, everywhere.gather(held), table.vocab_size, mesh, table.batch)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ids", "values"], meta_fields=["vocab_size", "mesh", "batch"])
@dataclasses.dataclass(frozen=True, eq=False)
class _RowsEverywhere(rows.TakenRows):
    """Rows on every device; each finds those of its own part of the batch, and the gradient is summed over the parts."""

    mesh: Any
    batch: Axes

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        return _gather_from_everywhere(self, ids)


@jax.jit
def _gather_from_everywhere(taken: _RowsEverywhere, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    split = split_over(taken.mesh, taken.batch, ids, ids.ndim)

    def read(held, values, ids):
        return rows.TakenRows(held, values, taken.vocab_size).gather(ids).astype(taken.dtype)

    specs = (PartitionSpec(), PartitionSpec(), spec_of(*split))
    read_all = jax.shard_map(read, mesh=taken.mesh, in_specs=specs, out_specs=spec_of(*split, ()))
    return read_all(taken.ids, _widened(taken.values), ids)


def _own_rows(table: Sharded, ids: Int32[Array, "k"], size: int) -> tuple[Int32[Array, "k"], Int32[Array, "k"]]:
    """The ids that this shard holds, counted from its first row, then ids past its end, so that all ascend; and where they came from."""
    first = _index(table.axes[0]) * size
    order = (jnp.arange(len(ids), dtype=jnp.int32) + jnp.sum(ids < first, dtype=jnp.int32)) % len(ids)
    own = ids[order] - first
    here = (own >= 0) & (own < size) & (ids[order] < table.vocab_size)
    return jnp.where(here, own, jnp.arange(size, size + len(ids), dtype=jnp.int32)), order


def _replicate(ids: Int32[Array, "..."], mesh: Any) -> Int32[Array, "..."]:
    """On every device: few and small, the ids of the whole batch."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    if AxisType.Explicit not in mesh.axis_types:
        return jax.lax.with_sharding_constraint(ids, everywhere)
    home = jax.sharding if hasattr(jax.sharding, "reshard") else importlib.import_module("jax.experimental.shard")
    return home.reshard(ids, everywhere)


def _spec_inside(mesh: Any, leaf: Any) -> PartitionSpec:
    """How a parameter is handed to every device: under explicit axes as it is split, else whole."""
    return jax.typeof(leaf).sharding.spec if AxisType.Explicit in mesh.axis_types else PartitionSpec()


# --- rows of a dealt table: asked for from their owners


@dataclasses.dataclass(frozen=True)
class _Traffic:
    """How a batch of ids reaches the owners of its rows.

    Args:
        mesh: the devices.
        owners: the mesh axes that the rows are split over.
        batch: as of `Sharded`.
        split: the mesh axes that each dimension of the ids is split over.
        route: of the exchange.
        deal: the table's.
    """

    mesh: Any
    owners: Axes
    batch: Axes
    split: tuple[Axes, ...]
    route: routes.Route
    deal: Deal

    @property
    def askers(self) -> Axes:
        """The mesh axes that the ids are split over."""
        return tuple(axis for axes in self.split for axis in axes)

    @property
    def twins(self) -> Axes:
        """The mesh axes that the ids are split over and the rows are not: devices along them hold the same rows."""
        return tuple(axis for axis in self.askers if axis not in self.owners)


def _plan(table: Sharded, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]) -> _Traffic:
    """The traffic of a batch whose devices each read at most the ids that `distinct` leaves of their part."""
    mesh, owners, deal = table.sharding.mesh, table.axes[0], table.deal
    assert deal is not None
    split = tuple(split_over(mesh, table.batch, ids, ids.ndim))
    askers = [axis for axes in split for axis in axes]
    if not set(owners) <= set(askers):
        want = f"split over the mesh axes of the table's rows, {owners}, to exchange them (the batch must divide by the devices)"
        raise ValueError(_checks.wanted("ids", want, f"shape {list(ids.shape)} split over {tuple(askers)}"))
    devices = math.prod(mesh.shape[axis] for axis in askers)
    on_device = jax.shard_map(distinct, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    asked = jax.eval_shape(on_device, jax.ShapeDtypeStruct((ids.size // devices,), ids.dtype)).shape[0]
    return _Traffic(mesh, owners, table.batch, split, _route(table, devices, asked), deal)


def _route(table: Sharded, devices: int, asked: int) -> routes.Route:
    """The route for so many devices that each ask for so many distinct rows at most."""
    owners = table.axes[0]
    sizes = tuple(table.sharding.mesh.shape[axis] for axis in owners)
    return routes.plan_route(asked, owners, sizes, table.array.shape[0] // math.prod(sizes), devices, table.capacity)


def _ask_owners(traffic: _Traffic, positions: Int32[Array, "k"], shard: Float[Array, "s d"]):
    """The rows at ascending, distinct positions; what was sent for them; and the positions in this shard that others ask for."""
    size = traffic.deal.size
    sent, asked = exchange.ask(traffic.route, positions, size)
    own = asked - _index(traffic.owners) * shard.shape[0]
    own_rows = shard.at[own].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)
    answers = exchange.answer(traffic.route, sent, own_rows)
    # A filler has no room either, but only a row that was asked for is NaN.
    return jnp.where((positions < size)[:, None], answers, 0), sent, own


@jax.jit
def _gather_from_owners(table: Sharded, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """Each device asks for the distinct rows of its part of the ids; the gradient goes back the same way."""

    def distinct(positions):
        return exchange.distinct_ascending(positions, table.array.shape[0], max(1, min(positions.size, table.vocab_size)))

    traffic = _plan(table, ids, distinct)

    def read(shard, ids):
        positions = table.positions(ids)
        held = distinct(positions)
        values, *_ = _ask_owners(traffic, held, shard)
        return _read_held(held, values, positions)

    specs = (spec_of(traffic.owners), spec_of(*traffic.split))
    wide = jax.shard_map(read, mesh=traffic.mesh, in_specs=specs, out_specs=spec_of(*traffic.split, ()))(_wide(table), ids)
    return wide.astype(table.dtype)


def _read_held(held: Int32[Array, "k"], values: Float[Array, "k d"], positions: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """The row at each position, one of those held; NaN at any other."""
    slots = jnp.minimum(exchange.count_below(held, positions), len(held) - 1)
    return jnp.where((held[slots] == positions)[..., None], rows_at(values, slots), jnp.nan)


def _load(table: Sharded, deal: Deal, ids: np.ndarray) -> ExchangeLoad:
    """Of a lookup of these ids, whose first dimension is split over the batch's axes; see `routes.simulate`."""
    sizes = dict(table.sharding.mesh.shape)
    devices = math.prod(sizes[axis] for axis in table.batch)
    if ids.ndim == 0 or ids.shape[0] % devices:
        raise ValueError(_checks.wanted("ids", f"a first dimension that {devices} devices divide", f"shape {list(ids.shape)}"))
    positions = deal.positions(np.clip(ids, 0, table.vocab_size - 1).astype(np.int32))
    asked = max(1, min(ids.size // devices, table.vocab_size))
    return ExchangeLoad(*routes.simulate(_route(table, devices, asked), positions.reshape(devices, -1), sizes, table.batch))


@functools.partial(jax.jit, static_argnums=2)
def _take_from_owners(table: Sharded, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]) -> "_ExchangedRows":
    """On each device, the distinct rows of its part of the ids."""
    traffic = _plan(table, ids, distinct)

    def take(shard, ids):
        held = distinct(ids)
        places = jnp.arange(len(held), dtype=jnp.int32)
        positions = jnp.sort(jnp.where(held < table.vocab_size, table.positions(held), traffic.deal.size + places))
        values, sent, own = _ask_owners(traffic, positions, shard)
        return positions, _widened(values), sent, own

    specs = (spec_of(traffic.owners), spec_of(*traffic.split))
    take_all = jax.shard_map(take, mesh=traffic.mesh, in_specs=specs, out_specs=spec_of(traffic.askers))
    positions, values, sent, asked = take_all(table.array, ids)
    return _ExchangedRows(positions, values, table.vocab_size, table.dtype, sent, asked, traffic)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "values", "sent", "asked"],
    meta_fields=["vocab_size", "row_dtype", "traffic"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class _ExchangedRows(rows.TakenRows):
    """On each device, the rows that its part of a batch reads.

    Args:
        ids: [devices * k], positions in the dealt array, ascending and distinct on each device.
        values: [devices * k, d], the rows, in float32 or wider: their gradient is summed over devices before it is rounded.
        vocab_size: number of rows of the table.
        row_dtype: dtype of the table.
        sent: what each device sent for them.
        asked: [devices * m], the rows that each device was asked for, counted from its first.
        traffic: how they came.
    """

    row_dtype: Any
    sent: exchange.SentOnRoute
    asked: Any
    traffic: _Traffic

    @property
    def dtype(self) -> jnp.dtype:
        """That of the table."""
        return self.row_dtype

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`; of ids that are split as those of the batch are."""
        return _gather_exchanged(self, ids)

    def gradient(self, values: Float[Array, "k d"]) -> rows.Rows:
        """On each device, the gradient of its shard's rows, summed over all devices."""
        ids, sums = _return_gradients(self, values)
        return _OwnedRows(ids, sums.astype(self.dtype), self.vocab_size, self.traffic)


@jax.jit
def _gather_exchanged(taken: _ExchangedRows, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    traffic = taken.traffic
    split = split_over(traffic.mesh, traffic.batch, ids, ids.ndim)
    if {axis for axes in split for axis in axes} != set(traffic.askers):
        want = f"split over the mesh axes of the ids given to te.rows, {traffic.askers}"
        raise ValueError(_checks.wanted("ids", want, f"shape {list(ids.shape)} split over {tuple(split)}"))

    def read(held, values, ids):
        return _read_held(held, values, traffic.deal.positions(jnp.clip(ids, 0, taken.vocab_size - 1)))

    everyone = spec_of(traffic.askers)
    read_all = jax.shard_map(read, mesh=traffic.mesh, in_specs=(everyone, everyone, spec_of(*split)), out_specs=spec_of(*split, ()))
    return read_all(taken.ids, taken.values, ids).astype(taken.dtype)


@jax.jit
def _return_gradients(taken: _ExchangedRows, gradient: Float[Array, "k d"]) -> tuple[Int32[Array, "m"], Float[Array, "m d"]]:
    """On each device, the ids of its shard that were asked for, and the sum of their gradients."""
    traffic = taken.traffic
    shard = traffic.route.hops[-1].stride

    def send(sent, own, gradient):
        sums = exchange.return_gradients(traffic.route, sent, gradient)
        if traffic.twins:
            own, sums = (jax.lax.all_gather(each, traffic.twins, tiled=True) for each in (own, sums))
            own, sums = exchange.sum_repeats(own, sums, shard)
        return _ids_of_own(traffic.deal, traffic.owners, own, shard), sums

    everyone, owners = spec_of(traffic.askers), spec_of(traffic.owners)
    # Unchecked: that what was gathered over an axis is alike along it is not seen from the types.
    send_all = jax.shard_map(send, mesh=traffic.mesh, in_specs=everyone, out_specs=(owners, owners), check_vma=False)
    return send_all(taken.sent, taken.asked, gradient)


@dataclasses.dataclass(frozen=True, eq=False)
class _OwnedRows(rows.Rows):
    """On each device, the gradient of some of its shard's rows: ids ascend by their position in the shard."""

    traffic: _Traffic

    def __add__(self, other: rows.Rows) -> rows.Rows:
        """See `rows.Rows`; each device adds its own."""
        if self.ids is other.ids or not isinstance(other, _OwnedRows):
            return super().__add__(other)
        traffic = self.traffic
        shard = traffic.route.hops[-1].stride

        def merge(ids, values):
            ids, values = jnp.concatenate(ids), jnp.concatenate(values)
            own, sums = exchange.sum_repeats(_own_of_ids(traffic.deal, traffic.owners, ids, shard), values, shard)
            return _ids_of_own(traffic.deal, traffic.owners, own, shard), sums

        owners = spec_of(traffic.owners)
        merge_all = jax.shard_map(merge, mesh=traffic.mesh, in_specs=owners, out_specs=owners)
        ids, values = merge_all([self.ids, other.ids], [self.values, other.values])
        return dataclasses.replace(self, ids=ids, values=values)


def _flatten_owned(owned: _OwnedRows) -> tuple[Any, Any]:
    values, kept = rows.flatten_with_keys(owned)
    return values, (kept, owned.traffic)


def _unflatten_owned(kept: Any, children: Any) -> _OwnedRows:
    (_, ids, vocab_size), traffic = kept
    (values,) = children
    return _OwnedRows(ids=ids.ids, values=values, vocab_size=vocab_size, traffic=traffic)


jax.tree_util.register_pytree_with_keys(_OwnedRows, _flatten_owned, _unflatten_owned)


def _own_of_ids(deal: Deal, owners: Axes, ids: Int32[Array, "k"], shard: int) -> Int32[Array, "k"]:
    """The rows of this device's shard that have these ids, counted from its first; rows past its end for ids outside the vocabulary."""
    own = deal.positions(jnp.minimum(ids, deal.vocab_size - 1)) - _index(owners) * shard
    return jnp.where(ids < deal.vocab_size, own, shard + jnp.arange(len(ids), dtype=jnp.int32))


def _ids_of_own(deal: Deal, owners: Axes, own: Int32[Array, "k"], shard: int) -> Int32[Array, "k"]:
    """The inverse of `_own_of_ids`."""
    ids = deal.ids(jnp.minimum(own, shard - 1) + _index(owners) * shard)
    return jnp.where(own < shard, ids, deal.vocab_size + jnp.arange(len(own), dtype=jnp.int32))


# --- the tied output layer


@jax.jit
def _logits(table: Sharded, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
    """Every shard multiplies by its rows; columns change hands for rows first, since a shard of the table is less than partial logits."""
    row_axes, column_axes = table.axes
    table_axes = (*row_axes, *column_axes)
    split = split_over(table.sharding.mesh, table.batch, x, x.ndim - 1)
    kept = [leading_without(axes, table_axes) for axes in split[:-1]]
    gathered = [axes[len(some) :] for axes, some in zip(split[:-1], kept, strict=True)] + [split[-1]]
    dtype = jnp.promote_types(jnp.float32, jnp.promote_types(x.dtype, table.dtype))

    def multiply(shard, x):
        for dimension, axes in enumerate(gathered):
            x = jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x
        if column_axes:
            shard = jax.lax.all_to_all(shard, column_axes, split_axis=0, concat_axis=1, tiled=True)
        logits = jnp.einsum("...d,vd->...v", x, shard, preferred_element_type=dtype)
        if table.array.shape[0] == table.vocab_size:
            return logits
        row = _index(table_axes) * shard.shape[0] + jnp.arange(shard.shape[0], dtype=jnp.int32)
        return jnp.where(row < table.vocab_size, logits, jnp.finfo(dtype).min / 2)

    specs = (spec_of(row_axes, column_axes), spec_of(*split))
    # Unchecked: that logits of what was gathered over another axis than the table's are alike along it is not seen from the types.
    run = jax.shard_map(multiply, mesh=table.sharding.mesh, in_specs=specs, out_specs=spec_of(*kept, table_axes), check_vma=False)
    return run(table.array, x)


# --- small things of all of these


def _wide(table: Sharded) -> Array:
    """Float32 or wider: a row's gradient is summed so over its repeats and over the devices, as on one device."""
    return _widened(table.array)


def _widened(array: Array) -> Array:
    return array.astype(jnp.promote_types(jnp.float32, array.dtype))


def _index(axes: Axes) -> Int32[Array, ""] | int:
    return jax.lax.axis_index(axes) if axes else 0
