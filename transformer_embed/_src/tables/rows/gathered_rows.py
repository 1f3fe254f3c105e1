"""The rows of a large table that a batch reads, as a leaf of the parameters that a loss sees."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key

from transformer_embed._src import arguments
from transformer_embed._src.compiled import known_after_reading, nan_where
from transformer_embed._src.partitioning import on_every_device, varying_axes
from transformer_embed._src.tables.rows.distinct_ids import (
    count_below,
    distinct_rows,
    read_each,
    sum_over_devices,
)
from transformer_embed._src.tables.rows.marks import MARKS, are_marks, new_marks
from transformer_embed._src.tables.rows.row_gradient import RowGradient, SomeRows
from transformer_embed._src.tokens.lookup import Table, lookup


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "marks"],
    meta_fields=["name", "vocab_size", "reader"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class GatheredRows(SomeRows, Table):
    """Some rows of a table. It replaces the table in the parameters that a loss reads.

    `lookup`, and so every module of this package, reads it like the table. An id inside the
    vocabulary whose row is not held reads as NaN. Any other use is a TypeError: a model that also
    multiplies by the table, as a tied output layer does, has a gradient for every row, and must
    train the table densely.

    A function of its leaves sees only these rows. Its result is an error or not finite: `keys` are
    no numbers, and a lookup reads NaN if the marks are not as they were. Only what no number
    decides passes: sizes, counts, comparisons with NaN.

    Args:
        keys: [k], the ids as `as_keys` makes them: int32, ascending and distinct; ids of vocab_size
            or above are padding.
        values: [k, d], the rows.
        marks: [3, d], of the table's dtype (see `marks`).
        name: the parameter, for error messages.
        vocab_size: number of rows of the table.
        reader: see `Taken`.
    """

    keys: Any
    values: Any
    marks: Any
    name: str
    vocab_size: int
    reader: Any = None

    @property
    def ids(self) -> Int32[Array, "k"]:
        """The ids of the rows."""
        return jax.random.key_data(self.keys)[..., 0].astype(jnp.int32)

    @property
    def dtype(self) -> jnp.dtype:
        """That of the table, or the one that a map over the parameters cast it to."""
        # Rows of a sharded table may be wider: their gradients are summed in that dtype.
        return self.marks.dtype

    def _gather_rows(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """The row of each id, or NaN; an id out of range reads the first or the last row."""
        if len(self.marks) != MARKS:
            want = "its rows in their places"
            raise arguments.type_error(self.name, want, f"{len(self.values)} of them")
        # No id finds a row that is not one.
        held = jnp.where(are_marks(self.marks), self.ids, -1)
        read = self.reader.read if self.reader else rows_of_ids
        return read(held, self.values, jnp.clip(ids, 0, self.vocab_size - 1)).astype(self.dtype)

    def _use_error(self) -> str:
        """The message for any other use."""
        readers = "te.lookup or te.TokenEmbedding alone, since te.rows.value_and_grad has its ids"
        return arguments.wanted(self.name, f"to be read by {readers}", "another use of its rows")


def as_keys(ids: Int32[Array, "k"]) -> Key[Array, "k"]:
    """Ids as keys of `jax.random`: a dtype that nothing computes with."""
    # A key has two words.
    bits = ids.astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack([bits, bits], axis=-1), impl="threefry2x32")


def rows_of_ids(
    held: Int32[Array, "k"], values: Float[Array, "n d"], ids: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """The value of each id, or NaN for an id that is not among the ascending ones that are held."""
    # `find_each` would search again for the rows: XLA fuses its result into both uses.
    slots = jnp.minimum(count_below(held, ids), len(held) - 1)
    # Its gradient sums the repeats of a row before they round to 16 bits.
    rows = lookup(values, slots, out_of_range="clip")
    is_right = read_each(held, slots) == ids
    return nan_where(~is_right, rows)


def read_rows(table: Array, ids: Int32[Array, "k"]) -> Array:
    """The rows of ascending ids; an id outside the vocabulary reads the first or the last row."""
    return table.at[ids].get(mode="clip", indices_are_sorted=True, wrap_negative_indices=False)


class Taken(NamedTuple):
    """What is taken of a table for a loss to read, and its gradient.

    Args:
        rows: [n, d], what the loss is differentiated by.
        read: from these to the ids whose rows are read, ascending and padded, and their rows.
        gradient: from their gradient to the table's.
        reader: how rows that devices of a mesh hold are read, by its `read`. None: as those of a
            plain array.
    """

    rows: Array
    read: Callable[[Array], tuple[Array, Array]]
    gradient: Callable[[Array], RowGradient]
    reader: Any = None

    def in_place_of(self, table: Any, name: str, rows: Array) -> GatheredRows:
        """What a loss reads in the table's place."""
        (vocab_size, width), (ids, values) = table.shape, self.read(rows)
        marks = new_marks(width, table.dtype)
        return GatheredRows(as_keys(ids), values, marks, name, vocab_size, self.reader)


def take_from_array(array: Float[Array, "v d"], ids: Int32[Array, "..."], max_rows: int) -> Taken:
    """What is taken of a plain array; `Sharded._take_rows` is its like."""
    spec = jax.typeof(array).sharding.spec
    if any(spec):
        want = "a whole array, or a Sharded one (te.sharding.shard_params makes it)"
        raise arguments.value_error("table", want, f"an array split as {spec}")
    held = distinct_rows(on_every_device(ids), len(array), max_rows)
    return as_taken(array, len(array), held, read_rows(array, held))


def as_taken(
    array: Array,
    vocab_size: int,
    ids: Int32[Array, "k"],
    rows: Float[Array, "k d"],
    reader: Any = None,
) -> Taken:
    """What is taken of a table whose rows are the same wherever the batch is read."""

    def gradient(sums: Float[Array, "k d"]) -> RowGradient:
        held = known_after_reading(ids, rows)
        # `jax.grad` inserts this sum for arrays that devices with different batches share.
        if axes := tuple(sorted(varying_axes(sums) - varying_axes(array))):
            held, sums = sum_over_devices(held, sums, vocab_size, axes)
        return RowGradient(held, sums, vocab_size)

    return Taken(rows, lambda values: (ids, values), gradient, reader)
