"""How an output layer, the product of x with every row of a table, is split over a mesh."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from transformer_embed._src.partitioning import (
    Axes,
    all_gather,
    on_each_device,
    on_every_device,
    reduce_scatter,
    replicated,
    reshard,
    spec_axes,
)
from transformer_embed._src.tokens.lookup import Table


class Layer(NamedTuple):
    """Tokens and the output layer that they meet; on a device, with whole rows of its table.

    `wide` are the rows in the dtype of the sums, which get the gradient in place of the table, so
    that it is summed over the chunks in that dtype.
    """

    x: Any
    table: Any
    bias: Any
    wide: Any = None


class OutputSplit(NamedTuple):
    """What is static of an output layer, and how it is split over a mesh.

    Each device receives two things. One is tokens: x is all-gathered over every axis that splits
    its channels or the table, and over the later axes of the same dimension. The other is whole
    rows: if the table's columns are split, an all-to-all splits its rows instead.

    Args:
        vocab_size, softcap, scale, pad_id: those of the output layer.
        mesh: the devices; None: one.
        rows: the mesh axes that the table's rows are split over.
        columns: those of its columns.
        x: those of each dimension of x.
    """

    vocab_size: Any
    softcap: float | None
    scale: float
    pad_id: int | None
    mesh: Any = None
    rows: Axes = ()
    columns: Axes = ()
    x: tuple[Axes, ...] = ()

    @property
    def vocabulary(self) -> Axes:
        """The axes that the vocabulary is split over, once columns are exchanged for rows."""
        return (*self.rows, *self.columns)

    @property
    def tokens(self) -> tuple[Axes, ...]:
        """The axes that each dimension of the tokens stays split over.

        They are the leading ones that do not split the table: such a part of x is one block.
        """
        return tuple(
            tuple(itertools.takewhile(lambda axis: axis not in self.vocabulary, axes))
            for axes in self.x[:-1]
        )

    @property
    def gathered(self) -> list[Axes]:
        """The axes of the vocabulary that each dimension of x is gathered over, on each device.

        The gradient of x is summed over them as it is scattered. (jax gathers x over its other
        axes before: a device's type cannot say that what it gathered is alike on others.)
        """
        kept = (*self.tokens, ())
        rest = [axes[len(leading) :] for axes, leading in zip(self.x, kept, strict=False)]
        in_table = self.vocabulary.__contains__
        return [tuple(itertools.takewhile(in_table, axes)) for axes in rest]

    def specs(self) -> Layer:
        """How the arrays of a layer are split."""
        kept = (*self.tokens, ())
        of_x = (axes + more for axes, more in zip(kept, self.gathered, strict=False))
        of_table, of_bias = PartitionSpec(self.rows, self.columns), PartitionSpec(self.vocabulary)
        return Layer(PartitionSpec(*of_x), of_table, of_bias, PartitionSpec())

    def put(self, array: Array, spec: PartitionSpec) -> Array:
        """The array, split so over the mesh."""
        if self.mesh is None:
            return array
        return reshard(array, NamedSharding(self.mesh, spec))

    def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """The function, run on each device."""
        if self.mesh is None:
            return function
        return on_each_device(self.mesh, function, in_specs, out_specs)

    def gather(self, layer: Layer) -> Layer:
        """Inside shard_map, the layer with whole rows and the tokens that they meet."""
        x, rows = all_gather(layer.x, self.gathered), self.exchange(layer.table, 0, 1)
        return layer._replace(x=x, table=rows)

    def exchange(self, array: Array, split: int, concat: int) -> Array:
        """Inside shard_map, a shard as whole rows (split 0, concat 1), or back (1, 0)."""
        if not self.columns:
            return array
        return jax.lax.all_to_all(array, self.columns, split, concat, tiled=True)

    def scatter(self, values: Array) -> Array:
        """This device's part of gathered x, after a sum over the vocabulary."""
        gathered = sum(self.gathered, ())
        others = tuple(axis for axis in self.vocabulary if axis not in gathered)
        return reduce_scatter(jax.lax.psum(values, others), self.gathered)


def split_output(
    x: Float[Array, "... d"], output: Any, *, by_type: bool
) -> tuple[OutputSplit, Layer]:
    """How x and an `OutputLayer` are split, and their arrays as functions of `map` take them.

    A plain table is split `by_type`, if explicit axes split it or x, or as jax does by itself.
    """
    table: Any = output.table
    axes: Any = ()
    if isinstance(table, Table):
        table, axes = table._output_split(x)
    elif by_type:
        of_x, (rows, columns) = (
            spec_axes(jax.typeof(array).sharding.spec, array.ndim) for array in (x, table)
        )
        if any((rows, columns, *of_x)):
            axes = jax.typeof(x).sharding.mesh, rows, columns, tuple(of_x)
    split = OutputSplit(output.table.shape[0], output.softcap, output.scale, output.pad_id, *axes)
    specs, bias = split.specs(), output.bias
    if bias is not None:
        bias = on_every_device(bias) if split.mesh is None else replicated(bias, split.mesh)
        # Rows that only fill a shard have a bias of 0.
        bias = split.put(jnp.pad(bias, (0, table.shape[0] - len(bias))), specs.bias)
    return split, Layer(split.put(x, specs.x), table, bias)
