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
    joined_axes,
    on_every_device,
    reshard,
    typed_axes,
)


class OutputSplit(NamedTuple):
    """Holds the static settings of an output layer, and how the layer is split over a mesh.

    Each device computes the logits of some tokens for some whole rows of the table. To get the
    tokens, x is all-gathered over the mesh axes that split the channels of x or the table. If the
    columns of the table are split, each device has a part of every row. Then an all-to-all over the
    same mesh axes exchanges these parts for whole rows.

    Args:
        vocab_size: The number of ids.
        softcap, scale, pad_id, vocab_axis: As in the output layer.
        mesh: The mesh of devices. A mesh without axes is one device.
        row_axes: The mesh axes that split the rows of the user's table.
        column_axes: The mesh axes that split the columns of the user's table.
        token_axes: For each dimension of the tokens, the mesh axes that split it while logits are
            computed.
    """

    vocab_size: Any
    softcap: float | None
    scale: float
    pad_id: int | None
    vocab_axis: int
    mesh: Any
    row_axes: Axes
    column_axes: Axes
    token_axes: tuple[Axes, ...]

    @property
    def vocabulary_mesh_axes(self) -> Axes:
        """The mesh axes along which devices have different rows while logits are computed."""
        return (*self.row_axes, *self.column_axes)

    @property
    def batch_mesh_axes(self) -> Axes:
        """The mesh axes along which devices have different tokens while logits are computed."""
        return joined_axes(self.token_axes)

    @property
    def table_letters(self) -> str:
        """The letters of the table's dimensions for `jnp.einsum`: v is rows, d is columns."""
        return "dv" if self.vocab_axis == 1 else "vd"

    def specs(self) -> "LayerArrays":
        """Returns a `LayerArrays` that has a `PartitionSpec` in place of each array."""
        table_axes = [self.row_axes, self.column_axes]
        if self.vocab_axis == 1:
            table_axes.reverse()
        return LayerArrays(
            x=PartitionSpec(*self.token_axes),
            table=PartitionSpec(*table_axes),
            bias=PartitionSpec(self.vocabulary_mesh_axes),
            # These rows are None except in the step of a chunk, on one device.
            wide_rows=PartitionSpec(),
            split=self,
        )

    def sum_over_vocabulary(self, values: Any) -> Any:
        """Sums values [t, rows] of each device over the whole vocabulary, to [t, 1].

        `values` is an array, or a tree of arrays, which a single all-reduce adds over devices.
        """
        sums = jax.tree.map(lambda array: array.sum(-1, keepdims=True), values)
        return jax.lax.psum(sums, self.vocabulary_mesh_axes)

    def to_whole_rows(self, shard: Array) -> Array:
        """Returns, inside shard_map, whole rows in exchange for a device's part of more rows.

        For a table of 8 columns that 2 devices split, [6, 4] becomes [3, 8]. If the columns of the
        table are not split, the rows are whole already.
        """
        columns_axis = 1 - self.vocab_axis
        return self._exchange(shard, split_axis=self.vocab_axis, join_axis=columns_axis)

    def to_own_columns(self, rows: Array) -> Array:
        """Undoes `to_whole_rows`, for the rows or for the gradient of the rows.

        The result is a device's part of more rows: the columns that the device has in the user's
        table. If the columns are not split, the rows stay as they are.
        """
        columns_axis = 1 - self.vocab_axis
        return self._exchange(rows, split_axis=columns_axis, join_axis=self.vocab_axis)

    def _exchange(self, array: Array, split_axis: int, join_axis: int) -> Array:
        """Splits one array axis over the devices along `column_axes`, and joins the other axis."""
        if not self.column_axes:
            return array
        return jax.lax.all_to_all(array, self.column_axes, split_axis, join_axis, tiled=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerArrays:
    """Holds the arrays of an output layer, and the x that is multiplied with the table.

    Args:
        x: The hidden vectors of the tokens.
        table: The user's table, or a device's shard of it. In the step of a chunk, the whole rows
            of the device.
        bias: A number for each row, or None.
        wide_rows: In the step of a chunk, the rows of `table` in the dtype of sums. They get the
            gradient in place of `table`, so that gradients are summed over the chunks in that
            dtype. None outside of a step.
        split: How the arrays are split.
    """

    x: Any
    table: Any
    bias: Any
    wide_rows: Any
    split: OutputSplit = dataclasses.field(metadata={"static": True})


# One layer, or the student's and the teacher's.
Layers = tuple[LayerArrays, ...]


def split_output(x: Float[Array, "... d"], output: Any) -> LayerArrays:
    """Splits x and the arrays of an `OutputLayer` over the mesh, as the devices compute logits.

    Explicit mesh axes are found in the types of the arrays. Over automatic axes, jax splits arrays
    as it chooses.
    """
    table = output.table
    bias = output.bias
    # For each dimension of x and of the table, the explicit mesh axes that split it, () for none.
    x_axes = typed_axes(x)
    table_axes = typed_axes(table)
    row_axes = table_axes[output.vocab_axis]
    column_axes = table_axes[1 - output.vocab_axis]
    check_on_mesh("x", x, row_axes, column_axes)
    is_split = any((*x_axes, row_axes, column_axes))
    mesh = jax.typeof(x).sharding.mesh if is_split else AbstractMesh((), ())
    # Devices that split the columns have a part of each row. They exchange these parts, so that
    # each of the devices ends up with whole rows, an equal number each.
    device_count = devices_along(mesh, column_axes)
    if output.row_count % device_count:
        want = f"a multiple of {device_count} rows, as devices split the columns (see row_multiple)"
        raise arguments.value_error("table", want, f"{output.row_count} rows")
    # The logits are [tokens, rows of the table], and a mesh axis may split only one of these two
    # dimensions. All axes that split the table split the rows of the logits. So the tokens are
    # split only over axes that do not split the table.
    axes_of_table = (*row_axes, *column_axes)
    axes_of_tokens = x_axes[: x.ndim - 1]
    token_axes = []
    for axes in axes_of_tokens:
        token_axes.append(tuple(axis for axis in axes if axis not in axes_of_table))
    split = OutputSplit(
        vocab_size=output.size,
        softcap=output.softcap,
        scale=output.scale,
        pad_id=output.pad_id,
        vocab_axis=output.vocab_axis,
        mesh=mesh,
        row_axes=row_axes,
        column_axes=column_axes,
        token_axes=tuple(token_axes),
    )
    specs = split.specs()
    if bias is not None:
        bias = reshard(on_every_device(bias), NamedSharding(mesh, specs.bias))
    x = reshard(x, NamedSharding(mesh, specs.x))
    # `wide_rows`, the rows in the dtype of sums, are made later, when a device takes a chunk of its
    # tokens.
    return LayerArrays(x=x, table=table, bias=bias, wide_rows=None, split=split)
