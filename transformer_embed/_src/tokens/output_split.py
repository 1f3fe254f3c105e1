"""Says how an output layer, the product of x with every row of a table, is split over a mesh."""

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
    """Holds what is static in an output layer, and how the layer is split over a mesh.

    Each device receives tokens and whole rows. To get the tokens, x is all-gathered over the mesh
    axes that split its channels or the table. To get whole rows, if the table's columns are split,
    an all-to-all splits its rows instead.

    Args:
        vocab_size: The number of ids.
        softcap, scale, pad_id, vocab_axis: As in the output layer.
        mesh: The devices. A mesh without axes is one device.
        rows: The mesh axes that split the table's rows.
        columns: The mesh axes that split the table's columns.
        tokens: For each dimension of the tokens, the mesh axes that still split it on a device.
    """

    vocab_size: Any
    softcap: float | None
    scale: float
    pad_id: int | None
    vocab_axis: int
    mesh: Any
    rows: Axes
    columns: Axes
    tokens: tuple[Axes, ...]

    @property
    def vocabulary(self) -> Axes:
        """The axes that split the vocabulary, once columns are exchanged for rows."""
        return (*self.rows, *self.columns)

    @property
    def batch_axes(self) -> Axes:
        """The axes that split the tokens."""
        return sum(self.tokens, ())

    @property
    def table_letters(self) -> str:
        """The axes of the table for `jnp.einsum`: v is rows, d is columns."""
        return "dv" if self.vocab_axis == 1 else "vd"

    def specs(self) -> "LayerArrays":
        """Returns how the arrays of a layer are split."""
        table_axes = [self.rows, self.columns]
        if self.vocab_axis == 1:
            table_axes.reverse()
        return LayerArrays(
            x=PartitionSpec(*self.tokens),
            table=PartitionSpec(*table_axes),
            bias=PartitionSpec(self.vocabulary),
            sum_rows=PartitionSpec(),
            split=self,
        )

    def sum_over_vocabulary(self, values: Any) -> Any:
        """Sums values [t, rows] of each device over the whole vocabulary, to [t, 1]."""
        sums = jax.tree.map(lambda array: array.sum(-1, keepdims=True), values)
        return jax.lax.psum(sums, self.vocabulary)

    def to_rows(self, shard: Array) -> Array:
        """Exchanges a device's shard of a table for whole rows, inside shard_map."""
        return self._exchange(shard, self.vocab_axis, 1 - self.vocab_axis)

    def to_columns(self, rows: Array) -> Array:
        """Exchanges whole rows for the device's shard of the table, inside shard_map."""
        return self._exchange(rows, 1 - self.vocab_axis, self.vocab_axis)

    def _exchange(self, array: Array, split_axis: int, join_axis: int) -> Array:
        """Splits one axis over the devices that split the columns, and joins the other axis."""
        if not self.columns:
            return array
        return jax.lax.all_to_all(array, self.columns, split_axis, join_axis, tiled=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerArrays:
    """Tokens, and the arrays of the output layer that they meet.

    Args:
        x: The hidden vectors of the tokens.
        table: The rows, or a shard of them. On a device, inside an engine, whole rows.
        bias: A number for each row, or None.
        sum_rows: On a device, the whole rows in the dtype of sums. These rows get the gradient in
            place of the table, so that it is summed over the chunks in that dtype. None elsewhere.
        split: How the arrays are split.
    """

    x: Any
    table: Any
    bias: Any
    sum_rows: Any
    split: OutputSplit = dataclasses.field(metadata={"static": True})


# One layer, or the student's and the teacher's.
Layers = tuple[LayerArrays, ...]


def split_output(x: Float[Array, "... d"], output: Any) -> LayerArrays:
    """Splits the arrays of x and an `OutputLayer` as functions on devices take them.

    Explicit mesh axes are found in the types of the arrays. Over automatic axes, jax splits arrays
    as it chooses.
    """
    table = output.table
    bias = output.bias
    x_axes = typed_axes(x)
    table_axes = typed_axes(table)
    rows = table_axes[output.vocab_axis]
    columns = table_axes[1 - output.vocab_axis]
    check_on_mesh("x", x, rows, columns)
    is_split = any((*x_axes, rows, columns))
    mesh = jax.typeof(x).sharding.mesh if is_split else AbstractMesh((), ())
    if output.row_count % devices_along(mesh, columns):
        want = f"rows that the devices along its columns' {columns} divide (see row_multiple)"
        raise arguments.value_error("table", want, f"{output.row_count} rows")
    # An axis that splits the table does not split the tokens: no axis may split both dimensions of
    # the logits.
    token_axes = tuple(
        tuple(axis for axis in axes if axis not in (*rows, *columns))
        for axes in x_axes[: x.ndim - 1]
    )
    split = OutputSplit(
        vocab_size=output.size,
        softcap=output.softcap,
        scale=output.scale,
        pad_id=output.pad_id,
        vocab_axis=output.vocab_axis,
        mesh=mesh,
        rows=rows,
        columns=columns,
        tokens=token_axes,
    )
    specs = split.specs()
    if bias is not None:
        bias = reshard(on_every_device(bias), NamedSharding(mesh, specs.bias))
    x = reshard(x, NamedSharding(mesh, specs.x))
    return LayerArrays(x=x, table=table, bias=bias, sum_rows=None, split=split)
