"""A table on a mesh: which device holds which rows, and what is sent when they are read, trained,
or multiplied by.

The array of a `Sharded` table is split over mesh axes, by rows, by columns, or by both. No device
holds, sends or receives a whole table.

A *cut* table keeps its rows in vocabulary order, a contiguous block on each device, with zeros
after the last row (see `replicated_rows`).
    lookup      each device reads the ids that it holds, and a sum over the shards collects the
    rows. Ids that are split over an axis of the
                rows are all-gathered first, and the sums scattered back.
    rows        every device receives the distinct rows of the whole batch; their gradients are
    summed over the devices that split it. logits      every device multiplies x by its rows: logits
    are split over the vocabulary.

A *dealt* table (see `dealing`) is for batches that are split over the axes of its rows, on many
devices (see `exchanged_rows`).
    lookup      each device asks the owners of the rows that its part of the batch reads (see
    `exchange`). Other ids are read as above. rows        the same, and the gradients go back to the
    owners, who sum repeats. logits      an error: the output layer needs rows in vocabulary order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.functional.partitioning import (
    Axes,
    array_axes,
    index_along,
    leading_axes_outside,
    partition_spec,
    reshard,
    spec_axes,
)
from transformer_embed._src.rows.gathered_rows import GatheredRows, RowTable
from transformer_embed._src.rows.row_gradient import RowGradient
from transformer_embed._src.sharded import exchanged_rows, replicated_rows
from transformer_embed._src.sharded.dealing import Deal

# Megatron-LM's `make-vocab-size-divisible-by`, and the lanes of a TPU.
ROW_MULTIPLE = 128


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["vocab_size", "sharding", "batch_axes", "virtual_shards", "capacity"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Sharded(RowTable):
    """A sharded table, as a leaf of a parameter tree; `lookup`, `tied_logits` and every module of
    this package read it.

    `shard_params` makes it. It is a pytree whose one leaf is the padded array, so gradients,
    optimizer states and checkpoints have the same structure and sharding. Padding rows are never
    read and get no gradient. Their logits are half of the dtype's lowest number, so they do not
    affect softmax, argmax or cross-entropy.

    `lookup` returns the same values as on one device, bit for bit. `tied_logits` returns [...,
    padded vocab_size], split over the table's axes. It all-gathers x over the mesh axes that split
    x's channels or the table, and, in a dimension split over several axes, over those that follow
    one of these. If columns are split, an all-to-all first splits the table by rows instead. A
    gradient of the table is summed over the axes that the batch is split over and stays in its
    shard.

    Args:
        array: [padded vocab_size, d], or [padded vocab_size] for optimizer state with one number
            for each row. A cut table is padded to a multiple of 128 rows, so a checkpoint of it
            can be restored on every mesh whose devices along its axes divide 128.
        vocab_size: number of rows without padding.
        sharding: of the array.
        batch_axes: under automatic axes, the mesh axes that the first dimension of ids and x is
            split over, if the number of devices along them divides it. Under explicit axes, the
            arrays' own shardings are used instead.
        virtual_shards: the rows are dealt over this many virtual shards (see `shard_params`). None:
            they are in vocabulary order.
        capacity: for a dealt table; see `shard_params`.

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
        Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism" (2019), section 3, https://arxiv.org/abs/1909.08053. The exchange: Ivchenko et
        al., "TorchRec: a PyTorch Domain Library for Recommendation Systems" (2022),
        https://doi.org/10.1145/3523227.3547387
    """

    array: Any
    vocab_size: int
    sharding: NamedSharding
    batch_axes: Axes
    virtual_shards: int | None = None
    capacity: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """(vocab_size, d), without the padding."""
        return (self.vocab_size, *self.array.shape[1:])

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the rows."""
        return self.array.dtype

    @property
    def deal(self) -> Deal | None:
        """How the rows of a dealt table are ordered; None for a cut table."""
        return None if self.virtual_shards is None else Deal(self.vocab_size, self.virtual_shards)

    @property
    def axes(self) -> tuple[Axes, Axes]:
        """The mesh axes that the rows are split over, and those of the columns."""
        row_axes, column_axes = spec_axes(self.sharding.spec, 2)
        return row_axes, column_axes

    def positions(self, ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """The index of each id's row in the array; an id outside the vocabulary counts as the first
        or the last."""
        inside = ids.clip(0, self.vocab_size - 1)
        return inside if self.deal is None else self.deal.positions(inside)

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`; split as the ids are, then as the columns are."""
        split = array_axes(self.sharding.mesh, self.batch_axes, ids, ids.ndim)
        by_exchange = self.deal is not None and set(self.axes[0]) <= {
            axis for axes in split for axis in axes
        }
        return (
            exchanged_rows.gather_from_owners(self, ids)
            if by_exchange
            else replicated_rows.gather_from_shards(self, ids)
        )

    def logits(self, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """See `Table`; split as x is, less the table's axes, then over the table's axes."""
        self._check_not_dealt()
        return _logits(self, x)

    def shards(self, x: Float[Array, "... d"]) -> tuple[Array, Any, Axes, Axes, Sequence[Axes]]:
        """See `Table`."""
        self._check_not_dealt()
        return (
            self.array,
            self.sharding.mesh,
            *self.axes,
            array_axes(self.sharding.mesh, self.batch_axes, x, x.ndim - 1),
        )

    def take_rows(
        self, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]
    ) -> GatheredRows:
        """See `Table`; each device takes the rows of its part of the ids if the table is dealt,
        otherwise those of all ids."""
        if self.axes[1]:
            raise ValueError(
                arguments.wanted(
                    "table", "rows over mesh axes, and whole columns", self.sharding.spec
                )
            )
        return (
            replicated_rows.take_replicated(self, ids, distinct)
            if self.deal is None
            else exchanged_rows.take_from_owners(self, ids, distinct)
        )

    def update_rows(
        self,
        step: Callable,
        shared: Any,
        gradient: RowGradient,
        states: Sequence["Sharded"],
    ) -> list["Sharded"]:
        """See `Table`; each shard updates its own rows. Nothing is sent."""
        if self.deal is not None and not isinstance(gradient, exchanged_rows.OwnedRows):
            want = "the gradient of a dealt table as `value_and_grad` returns it: each device has those of its own rows"
            raise TypeError(arguments.wanted("grads", want, f"plain {type(gradient).__name__}"))
        mesh, deal = self.sharding.mesh, self.deal
        by_owner = partition_spec(self.axes[0])
        # The state has the table's rows, but not always its columns, nor its sharding.
        arrays = [self.array, *(reshard(s.array, NamedSharding(mesh, by_owner)) for s in states)]

        def update_shard(shared, ids, values, shards):
            size = shards[0].shape[0]
            if deal is not None:
                return step(
                    shared,
                    exchanged_rows.shard_rows_of_ids(deal, self.axes[0], ids, size),
                    values,
                    shards,
                )
            own, order = replicated_rows.rows_of_this_shard(self, ids, size)
            return step(shared, own, values[order], shards)

        given, split = PartitionSpec() if deal is None else by_owner, [by_owner] * len(arrays)
        specs = (PartitionSpec(), given, given, split)
        update_all = jax.shard_map(update_shard, mesh=mesh, in_specs=specs, out_specs=split)
        shared = jax.tree.map(functools.partial(_gathered, mesh), shared)
        written = update_all(shared, gradient.ids, gradient.values, arrays)
        return [
            dataclasses.replace(table, array=array)
            for table, array in zip([self, *states], written, strict=True)
        ]

    def exchange_load(self, ids: ArrayLike) -> exchanged_rows.ExchangeLoad:
        """Counts, on the host, how many rows of a dealt table each device sends for a batch, and
        how many ids do not fit.

        It also works on a table of shapes, which `shard_params` makes from the result of
        jax.eval_shape.

        Args:
            ids: [batch, ...], any integer dtype, not traced: the ids of all devices, whose first
                dimension is split over `batch_axes`.

        Returns:
            rows: int64, [size of each mesh axis of the batch, ...], the rows that each device is
            asked for. An id counts once per device that asks, or once per group of devices whose
            requests are merged on the way. dropped: the number of requests that do not fit; these
            ids read as NaN.

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
        array = arguments.as_integers("ids", ids)
        if arguments.is_traced(array):
            raise TypeError(
                arguments.wanted(
                    "ids",
                    "values on the host, outside of jit",
                    f"a traced {array.dtype}{list(array.shape)}",
                )
            )
        if self.deal is None:
            raise ValueError(
                arguments.wanted(
                    "table",
                    "a dealt table (see `deal` of shard_params)",
                    "a table in vocabulary order",
                )
            )
        return exchanged_rows.exchange_load(self, self.deal, np.asarray(array))

    def in_vocabulary_order(self) -> np.ndarray:
        """See `Table`; this process must be able to see all shards."""
        array = np.asarray(self.array)
        return (
            array[: self.vocab_size]
            if self.deal is None
            else array[self.deal.positions(np.arange(self.vocab_size, dtype=np.int32))]
        )

    def with_rows(self, rows: np.ndarray) -> "Sharded":
        """See `Table`; split over the same mesh axes, and dealt if this one is."""
        parts = math.prod(self.sharding.mesh.shape[axis] for axes in self.axes for axis in axes)
        resized = dataclasses.replace(self, vocab_size=len(rows))
        size = padded_size(len(rows), parts) if resized.deal is None else resized.deal.size
        array = place_rows(rows, (size, *rows.shape[1:]), self.sharding, resized.deal)
        return dataclasses.replace(resized, array=array)

    def _check_not_dealt(self) -> None:
        if self.deal is not None:
            raise TypeError(
                arguments.wanted(
                    "table",
                    "rows in vocabulary order for a tied output layer: leave it out of `deal`",
                    "a dealt table",
                )
            )


def _gathered(mesh: Any, array: Array) -> Array:
    """The array, all-gathered if explicit axes split it: shard_map gathers it under automatic ones.
    XLA drops the all-gather of what is not used."""
    is_split = AxisType.Explicit in mesh.axis_types and any(jax.typeof(array).sharding.spec)
    return reshard(array, NamedSharding(mesh, PartitionSpec())) if is_split else array


@jax.jit
def _logits(table: Sharded, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
    """Every shard multiplies by its rows. Split columns become split rows first: a shard of the
    table is smaller than partial logits."""
    row_axes, column_axes = table.axes
    table_axes = (*row_axes, *column_axes)
    split = array_axes(table.sharding.mesh, table.batch_axes, x, x.ndim - 1)
    kept = [leading_axes_outside(axes, table_axes) for axes in split[:-1]]
    gathered = [axes[len(some) :] for axes, some in zip(split[:-1], kept, strict=True)] + [
        split[-1]
    ]
    dtype = arguments.compute_dtype(x.dtype, table.dtype)

    def multiply(shard, x):
        if x.dtype != shard.dtype:
            x, shard = x.astype(dtype), shard.astype(dtype)
        for dimension, axes in enumerate(gathered):
            x = jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x
        if column_axes:
            shard = jax.lax.all_to_all(shard, column_axes, split_axis=0, concat_axis=1, tiled=True)
        logits = jnp.einsum("...d,vd->...v", x, shard, preferred_element_type=dtype)
        if table.array.shape[0] == table.vocab_size:
            return logits
        row = index_along(table_axes) * shard.shape[0] + jnp.arange(shard.shape[0], dtype=jnp.int32)
        return jnp.where(row < table.vocab_size, logits, jnp.finfo(dtype).min / 2)

    specs = (partition_spec(row_axes, column_axes), partition_spec(*split))
    # Unchecked: the types do not show that logits are equal along an axis that x was gathered over
    # and the table is not split over.
    run = jax.shard_map(
        multiply,
        mesh=table.sharding.mesh,
        in_specs=specs,
        out_specs=partition_spec(*kept, table_axes),
        check_vma=False,
    )
    return run(table.array, x)


def padded_size(vocab_size: int, parts: int) -> int:
    """The rows of a cut table's array: the same on every mesh whose devices divide ROW_MULTIPLE."""
    multiple = math.lcm(ROW_MULTIPLE, parts)
    return -(-vocab_size // multiple) * multiple


def place_rows(
    rows: np.ndarray, shape: tuple[int, ...], sharding: NamedSharding, deal: Deal | None
) -> Array:
    """Puts rows from the host on a mesh, dealt or in order, padded with zeros to the shape; each
    device receives only its own part."""

    def part(index):
        full = [len(range(*each.indices(size))) for each, size in zip(index, shape, strict=True)]
        if deal is None:
            some = rows[index]
            missing = [(0, size - have) for size, have in zip(full, some.shape, strict=True)]
            return np.pad(some, missing) if missing else some
        ids = deal.ids(np.arange(*index[0].indices(shape[0]), dtype=np.int32))
        dealt = rows[np.minimum(ids, len(rows) - 1)]
        dealt[ids >= len(rows)] = 0
        return dealt

    return jax.make_array_from_callback(shape, sharding, part)
