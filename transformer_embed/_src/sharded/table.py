"""A table on a mesh: what contiguous and interleaved tables share."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, Shaped

from transformer_embed._src.functional.partitioning import (
    Axes,
    partition_spec,
    replicated,
    reshard,
    spec_axes,
)
from transformer_embed._src.rows.gathered_rows import RowTable
from transformer_embed._src.sharded.row_order import Contiguous, Interleaved


@dataclasses.dataclass(frozen=True, eq=False)
class Sharded(RowTable):
    """A sharded table, as a leaf of a parameter tree; `lookup`, `linear_logits` and every module of
    this package read it.

    `shard_params` makes it. It is a pytree whose one leaf is the padded array, so gradients,
    optimizer states and checkpoints have the same structure and sharding. No device holds, sends or
    receives a whole table. Padding rows are never read and get no gradient. Their logits are half
    of the dtype's lowest number, so they do not affect softmax, argmax or cross-entropy.

    `lookup` returns the same values as on one device, bit for bit. `linear_logits` returns [...,
    padded vocab_size], split over the table's axes. x is first gathered over every axis that splits
    its channels or the table, and over the later axes of the same dimension. If columns are split,
    an all-to-all first splits the table by rows instead. A gradient of the table is summed over the
    axes that the batch is split over and stays in its shard.

    Args:
        array: [padded vocab_size, d], or [padded vocab_size] for optimizer state with one number
            for each row. A contiguous table is padded to a multiple of 128 rows, so a checkpoint of
            it can be restored on every mesh whose devices along its axes divide 128.
        vocab_size: number of rows without padding.
        sharding: of the array.
        batch_axes: under automatic axes, the mesh axes that the first dimension of ids and x is
            split over, if the number of devices along them divides it. Under explicit axes, the
            arrays' own shardings are used instead.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec
        >>> import transformer_embed as te
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ["model"])
        >>> params = {"embed": {"embeddings": np.ones([5, 2], np.float32)}}
        >>> rules = {"embed/*": PartitionSpec("model")}
        >>> table = te.sharding.shard_params(params, mesh, rules)["embed"]["embeddings"]
        >>> isinstance(table, te.sharding.Sharded), table.shape, te.lookup(table, [4]).tolist()
        (True, (5, 2), [[1.0, 1.0]])

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

    @property
    def shape(self) -> tuple[int, ...]:
        """(vocab_size, d), without the padding."""
        return (self.vocab_size, *self.array.shape[1:])

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the rows."""
        return self.array.dtype

    @property
    def _mesh(self) -> Any:
        """The devices."""
        return self.sharding.mesh

    @property
    def _axes(self) -> tuple[Axes, Axes]:
        """The mesh axes that the rows are split over, and those of the columns."""
        row_axes, column_axes = spec_axes(self.sharding.spec, 2)
        return row_axes, column_axes

    @property
    def _order(self) -> Contiguous | Interleaved:
        """Which slot of the array holds which row."""
        raise NotImplementedError

    def use_error(self) -> str:
        """See `Table`."""
        return super().use_error().replace(type(self).__name__, Sharded.__name__)

    def in_vocabulary_order(self) -> np.ndarray:
        """All rows, on the host. This process must be able to see all shards."""
        return self._order.from_array(np.asarray(self.array))

    def with_rows(self, rows: np.ndarray) -> "Sharded":
        """A table of the same kind and sharding with these rows, which are in vocabulary order."""
        return dataclasses.replace(self, vocab_size=len(rows))._filled(rows)

    def _filled(self, rows: np.ndarray | jax.ShapeDtypeStruct) -> "Sharded":
        """The table with these rows, which are in vocabulary order, or with the shape of its
        array."""
        shape = (self._order.size, *rows.shape[1:])
        if isinstance(rows, jax.ShapeDtypeStruct):
            array = jax.ShapeDtypeStruct(shape, rows.dtype, sharding=self.sharding)
        else:
            # Each device receives only its own part.
            array = jax.make_array_from_callback(
                shape, self.sharding, lambda index: self._order.block(rows, index)
            )
        return dataclasses.replace(self, array=array)

    def _slots(self, ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """The slot of each id's row; an id outside the vocabulary counts as the first or the
        last."""
        return self._order.slots(ids.clip(0, self.vocab_size - 1))

    def _update_shards(
        self,
        step: Callable,
        shared: Any,
        gradient: tuple[Int32[Array, "k"], Shaped[Array, "k d"]],
        gradient_spec: PartitionSpec,
        states: Sequence["Sharded"],
    ) -> list["Sharded"]:
        """The table and its state after step(shared, gradient, arrays) on each device, where
        `arrays` are its shards."""
        by_owner = partition_spec(self._axes[0])
        # The state has the table's rows, but not always its columns, nor its sharding.
        sharding = NamedSharding(self._mesh, by_owner)
        arrays = [self.array, *(reshard(state.array, sharding) for state in states)]
        shared = jax.tree.map(functools.partial(_gathered, self._mesh), shared)
        update_all = jax.shard_map(
            step,
            mesh=self._mesh,
            in_specs=(PartitionSpec(), gradient_spec, by_owner),
            out_specs=by_owner,
        )
        written = update_all(shared, gradient, arrays)
        tables = zip([self, *states], written, strict=True)
        return [dataclasses.replace(table, array=array) for table, array in tables]


def _gathered(mesh: Any, array: Array) -> Array:
    """The array, all-gathered if explicit axes split it: shard_map gathers it under automatic ones.
    XLA drops the all-gather of what is not used."""
    is_split = AxisType.Explicit in mesh.axis_types and any(jax.typeof(array).sharding.spec)
    return replicated(array, mesh) if is_split else array
