"""The rows of a large table that a batch reads, as a leaf of the parameters that a loss sees."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32, Key

from transformer_embed._src import arguments
from transformer_embed._src.compiled import known_after_reading, nan_where
from transformer_embed._src.partitioning import (
    on_each_device,
    on_every_device,
    typed_axes,
    varying_axes,
)
from transformer_embed._src.rows.distinct_ids import (
    count_below,
    distinct_rows,
    read_each,
    sum_over_devices,
)
from transformer_embed._src.rows.row_gradient import RowGradient, SomeRows
from transformer_embed._src.tokens.lookup import lookup
from transformer_embed._src.tokens.lookup_gradient import read_or_zero
from transformer_embed._src.tokens.row_order import RowOrder, nearest_rows
from transformer_embed._src.tokens.stand_in import StandIn


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "marks", "values"],
    meta_fields=["name", "vocab_size", "order"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class GatheredRows(SomeRows, StandIn):
    """Some rows of a table. It replaces the table in the parameters that a loss reads.

    `lookup`, and so every module of this package, reads it like the table. An id inside the
    vocabulary without a row here reads as NaN. Any other use is a TypeError: a model that also
    multiplies by the table, as a tied output layer does, has a gradient for every row, and must
    train the table densely.

    A function of its leaves sees only these rows. One that treats them one by one is right. The
    result of any other is an error or NaN: `keys` are no numbers, and of the marks, a row of NaN
    and one of ones, NaN gets into every norm, mean or maximum, and so into the ones. Not noticed:
    what no number decides (sizes, counts, comparisons with NaN), and what only the place of a row
    decides (noise, a factor of each row).

    Args:
        keys: [k], the ids as `as_keys` makes them: int32, ascending and distinct; ids of vocab_size
            or above are padding. Here an id is the number of a row.
        marks: [2, d], of the table's dtype: NaN, then ones.
        values: [k, d], the rows.
        name: the parameter, for error messages.
        vocab_size: number of rows of the table.
        order: which row of the table holds which id of the batch.
    """

    keys: Any
    marks: Any
    values: Any
    name: str
    vocab_size: int
    order: RowOrder | None = None

    @property
    def ids(self) -> Int32[Array, "k"]:
        """The ids of the rows."""
        return jax.random.key_data(self.keys)[..., 0].astype(jnp.int32)

    @property
    def dtype(self) -> jnp.dtype:
        """That of the table, or the one that a map over the parameters cast it to."""
        # Rows that are exchanged are wider: their gradients are summed in that dtype.
        return self.marks.dtype

    def gather_rows(
        self, ids: Int32[Array, "..."], order: RowOrder | None
    ) -> Float[Array, "... d"]:
        """The row of each id, or NaN; an id out of range reads the first or the last row."""
        if order != self.order:
            want = f"that of {self.name}, whose rows are padded or spread"
            raise arguments.value_error("config", want, "another one or none")
        if len(self.marks) != 2:
            want = "its rows in their places"
            raise arguments.type_error(self.name, want, f"{len(self.values)} of them")
        marks = jnp.asarray(self.marks)
        # No id finds a row that is not one.
        are_kept = jnp.all(jnp.isnan(marks[0]) & jnp.isfinite(marks[1]))
        row_ids = jnp.where(are_kept, self.ids, -1)
        index = nearest_rows(ids, self.vocab_size, order)
        return _read(row_ids, self.values, index).astype(self.dtype)


def new_marks(width: int, dtype: Any) -> Float[np.ndarray, "2 d"]:
    """The marks of rows. Of numpy, since jax_debug_nans lets them pass."""
    return np.repeat([[np.nan], [1]], width, axis=1).astype(dtype)


def as_keys(ids: Int32[Array, "k"]) -> Key[Array, "k"]:
    """Ids as keys of `jax.random`: a dtype that nothing computes with."""
    # A key has two words.
    bits = ids.astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack([bits, bits], axis=-1), impl="threefry2x32")


def _read(
    row_ids: Int32[Array, "k"], values: Float[Array, "n d"], ids: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """`rows_of_ids`; if devices have different rows, each reads its own for its part of the ids."""
    (owners, _), by_dimension = typed_axes(values), typed_axes(ids)
    if not owners:
        return rows_of_ids(row_ids, values, ids)
    id_axes = sum(by_dimension, ())
    if {*id_axes} != {*owners}:
        want = f"split over {owners}, as the ids of the step whose rows are exchanged"
        raise arguments.value_error("ids", want, f"an array split over {id_axes}")
    by_owner, of_ids = PartitionSpec(owners), PartitionSpec(*by_dimension)
    mesh, of_rows = jax.typeof(values).sharding.mesh, PartitionSpec(*by_dimension, ())
    read = on_each_device(mesh, rows_of_ids, (by_owner, by_owner, of_ids), of_rows)
    return read(row_ids, values, ids)


def rows_of_ids(
    row_ids: Int32[Array, "k"], values: Float[Array, "n d"], ids: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """The value of each id, or NaN for an id that is not among the ascending ids of rows."""
    # `find_each` would search again for the rows: XLA fuses its result into both uses.
    slots = jnp.minimum(count_below(row_ids, ids), len(row_ids) - 1)
    # Its gradient sums the repeats of a row before they round to 16 bits.
    rows = lookup(values, slots, out_of_range="clip")
    return nan_where(read_each(row_ids, slots) != ids, rows)


def read_rows(table: Array, ids: Int32[Array, "k"]) -> Array:
    """The rows of ascending ids; an id outside the vocabulary reads the first or the last row."""
    return table.at[ids].get(mode="clip", indices_are_sorted=True, wrap_negative_indices=False)


class BatchRows(NamedTuple):
    """The rows of a table that a batch reads, the same wherever it is read.

    Args:
        table: [v, d].
        ids: [k], ascending and padded.
        rows: [k, d], what the loss is differentiated by.
    """

    table: Array
    ids: Array
    rows: Array

    def seen(self, rows: Float[Array, "k d"]) -> tuple[Array, Array]:
        """The ids whose rows a loss sees, ascending and padded, and their rows."""
        return self.ids, rows

    def gradient(self, sums: Float[Array, "k d"]) -> RowGradient:
        """The table's, from that of the rows."""
        size, ids = len(self.table), known_after_reading(self.ids, self.rows)
        # `jax.grad` inserts this sum for arrays that devices with different batches share.
        if axes := tuple(sorted(varying_axes(sums) - varying_axes(self.table))):
            ids, sums = sum_over_devices(ids, sums, size, axes)
        return RowGradient(ids, sums, size)


def read_batch_rows(
    table: Float[Array, "v d"], ids: Int32[Array, "..."], max_rows: int
) -> BatchRows:
    """The distinct rows of the whole batch, on every device."""
    distinct = distinct_rows(on_every_device(ids), len(table), max_rows)
    if any(typed_axes(table)):
        return BatchRows(table, distinct, read_or_zero(table, distinct.astype(jnp.uint32)))
    return BatchRows(table, distinct, read_rows(table, distinct))
