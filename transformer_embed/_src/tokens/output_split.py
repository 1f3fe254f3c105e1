"""How an output layer, the product of x with every row of a table, is split over a mesh."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import (
    Axes,
    check_on_mesh,
    devices_along,
    on_every_device,
    reshard,
    typed_axes,
)


class OutputSplit(NamedTuple):
    """What is static of an output layer, and how it is split over a mesh.

    Each device receives two things. One is tokens: x is all-gathered over the axes that split its
    channels or the table. The other is whole rows: if the table's columns are split, an all-to-all
    splits its rows instead.

    Args:
        vocab_size, softcap, scale, pad_id: those of the output layer.
        mesh: the devices; without axes: one.
        rows: the mesh axes that the table's rows are split over.
        columns: those of its columns.
        tokens: those that each dimension of the tokens stays split over.
    """

    vocab_size: Any
    softcap: float | None
    scale: float
    pad_id: int | None
    mesh: Any
    rows: Axes
    columns: Axes
    tokens: tuple[Axes, ...]
    vocab_axis: int = 0

    @property
    def vocabulary(self) -> Axes:
        """The axes that the vocabulary is split over, once columns are exchanged for rows."""
        return (*self.rows, *self.columns)

    def specs(self) -> "Layer":
        """How the arrays of a layer are split."""
        table, bias = PartitionSpec(self.rows, self.columns), PartitionSpec(self.vocabulary)
        if self.vocab_axis == 1:
            table = PartitionSpec(self.columns, self.rows)
        return Layer(PartitionSpec(*self.tokens), table, bias, PartitionSpec(), self)

    def total(self, values: Any) -> Any:
        """On each device, the sums [t, 1] over the whole vocabulary of values [t, rows]."""
        sums = jax.tree.map(lambda array: array.sum(-1, keepdims=True), values)
        return jax.lax.psum(sums, self.vocabulary)

    @property
    def table_letters(self) -> str:
        """The axes of the table for `jnp.einsum`: v is rows, d is columns."""
        return "dv" if self.vocab_axis == 1 else "vd"

    def to_rows(self, shard: Array) -> Array:
        """Inside shard_map, exchanges a device's shard of a table for whole rows."""
        return self._exchange(shard, self.vocab_axis, 1 - self.vocab_axis)

    def to_columns(self, rows: Array) -> Array:
        """Inside shard_map, exchanges whole rows for the device's shard of the table."""
        return self._exchange(rows, 1 - self.vocab_axis, self.vocab_axis)

    def _exchange(self, array: Array, split_axis: int, join_axis: int) -> Array:
        if not self.columns:
            return array
        return jax.lax.all_to_all(array, self.columns, split_axis, join_axis, tiled=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """Tokens and the output layer that they meet; on a device, with whole rows of its table.

    `wide` are the rows in the dtype of the sums, which get the gradient in place of the table, so
    that it is summed over the chunks in that dtype.
    """

    x: Any
    table: Any
    bias: Any
    wide: Any
    split: OutputSplit = dataclasses.field(metadata={"static": True})


def split_output(x: Float[Array, "... d"], output: Any) -> Layer:
    """The arrays of x and an `OutputLayer` as functions on devices take them.

    Explicit mesh axes are those of the arrays' types; what automatic ones split is jax's to choose.
    """
    table, bias = output.table, output.bias
    of_x, table_axes = typed_axes(x), typed_axes(table)
    rows, columns = table_axes[output.vocab_axis], table_axes[1 - output.vocab_axis]
    check_on_mesh("x", x, rows, columns)
    is_split = any((*of_x, rows, columns))
    mesh = jax.typeof(x).sharding.mesh if is_split else AbstractMesh((), ())
    if output.row_count % devices_along(mesh, columns):
        want = f"rows that the devices along its columns' {columns} divide (see row_multiple)"
        raise arguments.value_error("table", want, f"{output.row_count} rows")
    # No axis splits the tokens and the vocabulary of their logits.
    of_table = {*rows, *columns}
    tokens = tuple(
        tuple(axis for axis in axes if axis not in of_table) for axes in of_x[: x.ndim - 1]
    )
    options = output.size, output.softcap, output.scale, output.pad_id
    split = OutputSplit(*options, mesh, rows, columns, tokens, output.vocab_axis)
    specs = split.specs()
    if bias is not None:
        bias = reshard(on_every_device(bias), NamedSharding(mesh, specs.bias))
    return Layer(reshard(x, NamedSharding(mesh, specs.x)), table, bias, None, split)
