"""A sharded table, as a leaf of a parameter tree."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.compiled import compiled
from transformer_embed._src.partitioning import (
    free_axes,
    gathered,
    index_along,
    on_every_device,
    reshard,
)
from transformer_embed._src.pytrees import register_pytree
from transformer_embed._src.tables.rows.gathered_rows import Taken
from transformer_embed._src.tables.rows.row_gradient import RowGradient
from transformer_embed._src.tables.sharded.contiguous import (
    gather_from_shards,
    take_from_shards,
)
from transformer_embed._src.tables.sharded.exchange import gather_from_owners, take_from_owners
from transformer_embed._src.tables.sharded.table_split import TableSplit, restored
from transformer_embed._src.tokens.lookup import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Sharded(Table):
    """A sharded table, as a leaf of a parameter tree.

    `lookup`, `linear_logits` and every module of this package read it. `shard_params` makes it. It
    is a pytree whose one leaf is the padded array, so gradients, optimizer states and checkpoints
    have the same structure and sharding. A checkpoint is refused where rows lie in another order.
    No device holds, sends or receives a whole table. Padding rows are never read and get no
    gradient. Their logits are half of the dtype's lowest number, so they do not affect softmax,
    argmax or cross-entropy.

    A table can be pickled, and be an argument of what jax.export writes: both hold the numbers of
    its devices. Inside `jax.vmap`, leave `spmd_axis_name` out: jax refuses it around programs that
    run on each device. Inside somebody's `jax.shard_map` over some mesh axes, a loss has first and
    second derivatives; jax cannot compile higher ones there.

    `lookup` returns the same values as on one device, bit for bit. `linear_logits` returns [...,
    padded vocab_size], split over the table's axes. x is first gathered over every axis that splits
    its channels or the table. If columns are split, an all-to-all first splits the table by rows
    instead. A gradient of the table is summed over the axes that the batch is split over and stays
    in its shard.

    Args:
        array: [padded vocab_size, d], or [padded vocab_size] for optimizer state with one number
            for each row. A contiguous table is padded to a multiple of 128 rows, so a checkpoint of
            it can be restored on every mesh whose devices along its axes divide 128.
        split: how it lies on the mesh; see `shard_params`.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> import transformer_embed as te
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ["model"])
        >>> params = {"embed": {"embeddings": np.ones([128, 2], np.float32)}}
        >>> rules = {"embed/*": PartitionSpec("model")}
        >>> table = te.sharding.shard_params(params, mesh, rules)["embed"]["embeddings"]
        >>> isinstance(table, te.sharding.Sharded), table.shape, te.lookup(table, [4]).tolist()
        (True, (128, 2), [[1.0, 1.0]])

    Source:
        Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism" (2019), section 3, https://arxiv.org/abs/1909.08053. The exchange: Ivchenko et
        al., "TorchRec: a PyTorch Domain Library for Recommendation Systems" (2022),
        https://doi.org/10.1145/3523227.3547387
    """

    array: Any
    split: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From pickle and copy: jax reads a pickled array into one device."""
        array, split = state["array"], state["split"]
        if isinstance(array, jax.Array) and not arguments.is_traced(array):
            array = jax.device_put(array, split.sharding)
        arguments.set_fields(self, array=array, split=split)

    @property
    def shape(self) -> tuple[int, ...]:
        """(vocab_size, d), without the padding."""
        return (self.split.order.vocab_size, *self.array.shape[1:])

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the rows."""
        return self.array.dtype

    @property
    def sharding(self) -> NamedSharding:
        """That of the array; under jit, the one that `shard_params` gave it."""
        # After jax.device_put, an array may lie otherwise than its split says.
        held = None if arguments.is_traced(self.array) else getattr(self.array, "sharding", None)
        return held or self.split.sharding

    def _split_here(self, *arrays: Array) -> TableSplit:
        """Its split, as somebody's shard_map around a call with these arrays has it."""
        size, held = self.split.order.size, self.array.shape[0]
        if held != size:
            want = "all of its rows inside a shard_map, by a spec that does not split them"
            raise arguments.value_error("table", want, f"{held} of {size}")
        split = self.split.here(*arrays)
        if split.mesh.axis_names != free_axes(split.mesh) and jax.__version_info__ < (0, 10):
            # Its programs wait for each other without an end.
            want = "jax 0.10 or newer, to read a sharded table inside a shard_map"
            raise arguments.value_error("table", want, jax.__version__)
        return split

    def _gather_rows(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """See `Table`; split as the ids are, then as the columns are.

        An exchange needs ids that are split over the rows' axes; others are looked up in all
        shards.
        """
        split = self._split_here(ids)
        by_exchange = split.order.is_striped and {*split.rows} <= {*sum(split.axes_of(ids), ())}
        # Without axes of rows, inside somebody's shard_map, this device holds every row.
        gather = gather_from_owners if by_exchange and split.rows else gather_from_shards
        return gather(split, self.array, ids)

    def _output_split(self, x: Float[Array, "... d"]) -> tuple[Array, tuple[Any, ...]]:
        """See `Table`."""
        split = self._split_here(x)
        if split.order.is_striped:
            want = "rows in vocabulary order for a tied output layer: leave it out of `stripe`"
            raise arguments.type_error("table", want, "a striped table")
        of_x = split.axes_of(x, channels=1)
        return self.array, (split.mesh, split.rows, split.columns, of_x)

    def _take_rows(self, ids: Int32[Array, "..."], max_rows: int) -> Taken:
        """What a loss reads in this table's place."""
        split = self._split_here(ids)
        if split.order.is_striped and split.mesh.manual_axes:
            # Devices along these axes would return gradients of one row apart.
            want = "a contiguous one, to train by rows inside a shard_map over some mesh axes"
            raise arguments.value_error("table", want, "a striped table")
        take = take_from_owners if split.order.is_striped else take_from_shards
        return take(split, self.array, ids, max_rows)

    def _update_rows(
        self, step: Callable, shared: Any, gradient: RowGradient, states: Sequence[Any]
    ) -> list["Sharded"]:
        """This table and its state after a step: each shard updates its own rows. Nothing is sent.

        The step is `step(shared, parts, first, arrays)`. `shared` is a tree of arrays that every
        device needs whole, `parts` are those of a gradient, and `first` is the id of the first row
        of the arrays; an id outside of them names no row.
        """
        split, is_owned = self._split_here(), self.split.order.is_striped
        if is_owned and gradient.split != split:
            want = (
                "the gradient of a striped table as `value_and_grad` returns it: each device "
                "has those of its own rows"
            )
            raise arguments.type_error("grads", want, f"plain {type(gradient).__name__}")

        def update_shard(shared, parts, shards):
            # Ids of other shards are before this one or past its end.
            first = 0 if is_owned else index_along(split.rows) * split.shard
            return step(shared, parts, first, shards)

        by_owner = PartitionSpec(split.rows)
        gradient_spec = by_owner if is_owned else PartitionSpec()
        # The state has the table's rows, but not always its columns, nor its sharding.
        sharding = NamedSharding(split.mesh, by_owner)
        arrays = [self.array, *(reshard(state.array, sharding) for state in states)]
        in_specs = PartitionSpec(), gradient_spec, by_owner
        update_all = compiled()(split.map(update_shard, in_specs, by_owner))
        # As shard_map does under automatic axes. XLA drops the all-gather of what is not used.
        shared = jax.tree.map(on_every_device, shared)
        written = update_all(shared, gradient.parts, arrays)
        tables = zip([self, *states], written, strict=True)
        return [dataclasses.replace(table, array=array) for table, array in tables]

    def in_vocabulary_order(self) -> Any:
        """All rows, on the host, or their shape; each process that has a shard must ask."""
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        return self.split.order.from_array(gathered("table", self.array))

    _all_rows = in_vocabulary_order

    def _moved(self, split: TableSplit) -> "Sharded":
        """The same rows, split otherwise. They go from device to device."""
        array, mesh = self.array, Mesh(self.split.mesh.devices, self.split.mesh.axis_names)
        if split.order != self.split.order:
            # In an order of rows, columns stay where they are.
            sharding = NamedSharding(mesh, self.split.sharding.spec)

            def reorder(array: Array) -> Array:
                rows = self.split.order.in_vocabulary_order(array, mesh, self.split.rows)
                return split.order.to_array(rows, mesh, self.split.rows)

            with jax.set_mesh(mesh):
                array = jax.jit(reorder)(jax.device_put(array, sharding))
        return Sharded(jax.device_put(array, split.sharding), split)

    def _with_rows(self, rows: Any) -> "Sharded":
        """A table like this one with these rows, as `_all_rows` gives them."""
        order = self.split.order._replace(vocab_size=len(rows))
        return sharded(rows, self.split._replace(order=order))


register_pytree(
    Sharded,
    "split",
    to_literals=lambda static: static[0].__reduce__()[1],
    from_literals=lambda literals: (restored(*literals),),
    # So that no checkpoint is restored in another order of rows.
    names=lambda table: [table.split.order.name],
)


def sharded(rows: Any, split: TableSplit) -> Sharded:
    """A table with these rows, which are in vocabulary order, or with the shape of its array."""
    shape = (split.order.size, *rows.shape[1:])
    block = functools.partial(split.order.block, rows)
    return Sharded(put(rows, shape, split.sharding, block), split)


def put(rows: Any, shape: tuple[int, ...], sharding: NamedSharding, block: Callable) -> Any:
    """An array on a mesh, whose `array[index]` is `block(index)`; for a shape, its shape."""
    if isinstance(rows, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, rows.dtype, sharding=sharding)
    # Each device receives only its own part.
    return jax.make_array_from_callback(shape, sharding, block)
