"""Replaces a large table by the rows that a batch reads, in the parameters that a loss sees.

The rows come with marks, which are a few rows of known values. A function of all parameters that
would be wrong for some of the rows changes the marks too, and then every lookup reads NaN.

Letters of shapes: k rows that a loss sees, d columns, m marks.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Key

from transformer_embed._src import arguments
from transformer_embed._src.compiled import nan_where
from transformer_embed._src.partitioning import joined_axes, on_each_device, typed_axes
from transformer_embed._src.rows.distinct_ids import count_below, read_each
from transformer_embed._src.rows.row_gradient import SomeRows
from transformer_embed._src.tables.row_order import RowOrder, rows_of_nearest_ids
from transformer_embed._src.tables.stand_in import StandIn
from transformer_embed._src.tokens.lookup import lookup

# The number of marks. With more marks, fewer functions of a row's index give all marks the same
# result.
MARKS = 8


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "marks", "values"],
    meta_fields=["name", "num_rows", "order"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class GatheredRows(SomeRows, StandIn):
    """Some rows of a table, which replace the table in the parameters that a loss reads.

    `lookup`, and so every module of this package, reads the rows like the table. An id inside the
    vocabulary that has no row here reads as NaN. Any other use of the rows is a TypeError. For
    example, a model with a tied output layer also multiplies by the table, so every row of the
    table has a gradient, and you must train the table densely.

    A function of all parameters, such as a norm, sees only the rows of the batch. If the function
    treats each row by itself, wherever the row is in the array, the result is right for the table.
    Any other function raises an error, or makes the lookup read NaN:

    - The `keys` are not numbers, so a function that computes with them raises an error.
    - The `marks` are a row of NaN and some equal rows. Every norm, mean or maximum of all rows is
      NaN, and a function that uses it makes all marks NaN. Noise, or a factor that depends on the
      index of a row, makes equal rows differ.

    Two kinds of wrong functions are not noticed:

    - Some results do not depend on the marks. Examples are sizes, counts, comparisons, and
      functions that skip NaN, such as `jnp.nansum`.
    - Some functions leave the marks as they are, because they change only rows with an index of
      `MARKS` or above.

    Args:
        keys: The indices of the rows, [k], as `as_keys` makes them from int32. The indices ascend.
            If an index repeats, the lookup reads the first of the rows with this index. Negative
            indices, and indices of num_rows or above, are padding.
        marks: A row of NaN and equal rows, [m, d], as `new_marks` makes them in the table's dtype.
        values: The rows, [k, d].
        name: The name of the parameter, for error messages.
        num_rows: The number of rows of the table.
        order: Which row of the table holds which id of the batch.
    """

    keys: Any
    marks: Any
    values: Any
    name: str
    num_rows: int
    order: RowOrder | None = None

    @property
    def row_indices(self) -> Int32[Array, "k"]:
        """The indices of the rows."""
        return jax.random.key_data(self.keys)[..., 0].astype(jnp.int32)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the table, or the dtype that a map over the parameters cast it to."""
        # The dtype of `values` may be wider: rows that devices exchange have the dtype in which
        # gradients are summed.
        return self.marks.dtype

    def gather_rows(
        self, ids: Int32[Array, "..."], order: RowOrder | None
    ) -> Float[Array, "... d"]:
        """Looks up the row of each id.

        An id without a row here reads as NaN. An id out of range reads the first or the last row of
        the table.

        Args:
            ids: The ids.
            order: Which row of the table holds which id, by the config of the layer that calls. It
                must be `self.order`, which is by the config that te.rows has.
        """
        if self.order is None and order is not None:
            want = f"the EmbedderConfig of {self.name}, whose rows are padded or spread"
            raise arguments.value_error("config", f"{want}: pass config= to te.rows", "None")
        if order != self.order:
            want = "a lookup by the layer whose config te.rows has, which orders the rows"
            raise arguments.value_error(self.name, want, "te.lookup, or a layer of another config")
        # The marks are rows of known values, an array beside `values`. A function of all parameters
        # that slices or joins rows does the same to the marks, so their number changes.
        if len(self.marks) != MARKS:
            want = "all of its rows, in their order"
            raise arguments.type_error(self.name, want, f"{len(self.values)} of them")
        # If a function changed the values of the marks so that they show mixed rows, the index of
        # every row becomes -1. No lookup asks for row -1, so every lookup reads NaN.
        are_kept = are_marks_kept(jnp.asarray(self.marks))
        row_indices = jnp.where(are_kept, self.row_indices, -1)
        # The table row of each id, or of the nearest id for an id out of range.
        wanted_rows = rows_of_nearest_ids(ids, self.num_rows, order)
        rows = _read_seen_rows(row_indices, self.values, wanted_rows)
        return rows.astype(self.dtype)


def new_marks(width: int, dtype: Any) -> Float[np.ndarray, "m d"]:
    """Makes the marks: rows of known values, which show whether a function has mixed rows.

    They are numpy arrays, because `jax_debug_nans` raises no error for a NaN in them.
    """
    # The equal rows are tiny, so that noise of any usual size makes them differ. Their squares and
    # inverses are still normal numbers.
    tiny = 2.0 ** (jnp.finfo(dtype).minexp // 2)
    marks = np.full((MARKS, width), tiny)
    marks[0] = np.nan
    return marks.astype(dtype)


def are_marks_kept(marks: Float[Array, "m d"]) -> Bool[Array, ""]:
    """Returns whether the first mark is still a row of NaN, and all others are finite and equal.

    A function that treats each row by itself, such as a product with 2, keeps the marks like that.
    """
    # This is a slice, [1, d], since users may disable jax's rank promotion.
    first_equal_mark = marks[1:2]
    # Equal rows may differ by rounding after a function, because a compiler may compute the rows of
    # one array in two ways.
    tolerance = 4 * jnp.finfo(marks.dtype).eps * jnp.abs(first_equal_mark)
    # If a number is NaN or infinite, its difference is NaN, which is not within the tolerance.
    are_equal = jnp.abs(marks[1:] - first_equal_mark) <= tolerance
    return jnp.all(jnp.isnan(marks[0])) & jnp.all(are_equal)


def as_keys(row_indices: Int32[Array, "k"]) -> Key[Array, "k"]:
    """Wraps row indices as keys of `jax.random`, a dtype that no function can compute with."""
    # A threefry key has two words. Both of them are the index.
    word = row_indices.astype(jnp.uint32)
    words = jnp.stack([word, word], axis=-1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _read_seen_rows(
    row_indices: Int32[Array, "k"], values: Float[Array, "k d"], wanted: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """Returns each wanted row, or NaN for a row that is not among the ascending `row_indices`.

    If the rows are split over devices, each device looks up its own wanted rows in its own rows.
    """
    # The explicit mesh axes that split the rows, () for none.
    row_axes, _ = typed_axes(values)
    if not row_axes:
        return find_rows(row_indices, values, wanted)
    # The mesh axes of each dimension of the wanted rows.
    wanted_axes = typed_axes(wanted)
    all_wanted_axes = joined_axes(wanted_axes)
    if {*all_wanted_axes} != {*row_axes}:
        want = f"an array split over {row_axes}, like the ids that te.rows got"
        raise arguments.value_error("ids", want, f"an array split over {all_wanted_axes}")
    row_spec = PartitionSpec(row_axes)
    id_spec = PartitionSpec(*wanted_axes)
    # The columns of the result are whole.
    out_spec = PartitionSpec(*wanted_axes, ())
    mesh = jax.typeof(values).sharding.mesh
    find_on_each_device = on_each_device(
        mesh, find_rows, in_specs=(row_spec, row_spec, id_spec), out_specs=out_spec
    )
    return find_on_each_device(row_indices, values, wanted)


def find_rows(
    row_indices: Int32[Array, "k"], values: Float[Array, "k d"], wanted: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """Looks up each wanted row, or NaN for a row that is not among the ascending `row_indices`.

    For example, the row indices 2 5 9 with the values a b c, and the wanted rows 9 4, give c NaN.
    """
    # Which of the values belongs to each wanted row: if the row is there, the number of row indices
    # below it. In the example: 2 1. (`find_each` would also say which rows are missing. But XLA
    # would fuse its search into the lookup and also into the comparison, and so search twice.)
    last_index = len(row_indices) - 1
    index_of_value = jnp.minimum(count_below(row_indices, wanted), last_index)
    # `lookup` is used in place of an index because of the gradient of `values`: it sums the
    # gradients of a row that is read several times before it rounds to 16 bits.
    rows = lookup(values, index_of_value, out_of_range="clip")
    is_missing = read_each(row_indices, index_of_value) != wanted
    return nan_where(is_missing, rows)
