"""Lookup in an embedding table: rows, ids out of range, and the padding row."""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike, Ids, TableArray, Vectors
from transformer_embed._src.compiled import compiled, nan_where
from transformer_embed._src.partitioning import is_explicit, reshard, spec_axes, typed_axes
from transformer_embed._src.tokens.lookup_gradient import read_or_zero

OUT_OF_RANGE = ("nan", "clip", "zero")
LOOKUP_STYLES = ("gather", "one_hot")


class Table(np.lib.mixins.NDArrayOperatorsMixin):
    """A leaf of parameters that stands for a table [vocab_size, d] but is not one plain array.

    `te.sharding.Sharded` is one, and so is what replaces a table inside `te.rows.value_and_grad`.
    Use it in annotations and to find such leaves. `lookup`, `linear_logits` and
    `linear_cross_entropy` read it. It has the `shape` and `dtype` of the array that it replaces, so
    that hk.get_parameter accepts it. Any other use as an array is a TypeError.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> params = {"token_embedding": {"embeddings": jax.numpy.ones([128, 2])}}
        >>> rules = {"*": jax.sharding.PartitionSpec("rows")}
        >>> params = te.sharding.shard_params(params, jax.make_mesh((1,), ("rows",)), rules)
        >>> isinstance(params["token_embedding"]["embeddings"], te.Table)
        True
    """

    # [vocab_size, d], and the dtype of the rows.
    shape: Any
    dtype: Any

    def _gather_rows(self, ids: Ids) -> Vectors:
        """The row of each id; an id out of range reads the nearest row.

        Gradients of repeated ids are summed in float32 or wider.
        """
        raise NotImplementedError

    def _output_split(self, x: Vectors) -> tuple[TableArray, tuple[Any, ...]]:
        """The rows in vocabulary order, then padding, and how their product with x is split.

        That is a mesh, and the axes of the rows, of the columns and of each dimension of x.
        """
        want = "a whole table, trained densely, since the output layer is tied to it"
        raise arguments.type_error("table", want, "some of its rows")

    def _all_rows(self) -> Any:
        """All rows in vocabulary order, on the host; None if this holds only some of them."""
        return None

    def _use_error(self) -> str:
        """The message for any other use."""
        want = (
            "to be read by lookup or linear_logits alone (in_vocabulary_order() returns the rows "
            "of a sharded table, and `tables` of shard_params leaves other modules their arrays)"
        )
        return arguments.wanted("table", want, f"another use of {type(self).__name__}")

    def _raise_not_an_array(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _NotAnArrayError(self._use_error())

    # Operators and numpy's functions, numpy.asarray, jax's functions, indexing.
    __array_ufunc__ = __array__ = __jax_array__ = __getitem__ = _raise_not_an_array

    def __getattr__(self, name: str) -> NoReturn:
        """Raises an error for attributes that only an array has: `T`, `at`, `astype`, ..."""
        self._raise_not_an_array()


class _NotAnArrayError(TypeError, AttributeError):
    """Also an AttributeError, so that hasattr returns False."""


def lookup(
    table: ArrayLike | Table,
    ids: ArrayLike,
    *,
    pad_id: int | None = None,
    out_of_range: str = "nan",
    lookup_style: str = "gather",
) -> Float[Array, "... d"]:
    """The row of the table for each id.

    Args:
        table: [vocab_size, d], a floating dtype.
        ids: [...], any integer dtype. Negative ids are out of range: they do not count from the
            end.
        pad_id: the id of padding: its row reads as zeros and gets no gradient, whatever the table
            holds. It may lie outside the vocabulary. None: no padding.
        out_of_range: what to return for an id outside [0, vocab_size).
            `"nan"`: a row of NaN, no gradient: the error cannot be missed, under jit too.
            `"clip"`: the nearest row of the table, which gets the gradient.
            `"zero"`: a row of zeros, no gradient.
        lookup_style: how the rows are read; the values are the same. `"gather"`: each row is
            copied. `"one_hot"`: a product with a [..., vocab_size] matrix of zeros and ones, at
            full precision. Its cost grows with the vocabulary, so use it for small vocabularies on
            matrix units (TPU). The table must be finite: 0 times infinity is NaN.

    Returns:
        [..., d] of the table's dtype. Under explicit mesh axes, leading axes are sharded like the
        ids and the last axis like the table's columns, over the axes that do not split the ids.

    Raises:
        TypeError: ids are not integers; the table does not have a floating dtype of 16 bits or
            more.
        ValueError: the table does not have rank 2, or has no row; an unknown out_of_range or
            lookup_style; a pad_id outside int32.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> te.lookup(table, [1, 0, 2**32 + 1], pad_id=0).tolist()
        [[3.0, 4.0], [0.0, 0.0], [nan, nan]]
    """
    arguments.choice("out_of_range", out_of_range, OUT_OF_RANGE)
    arguments.choice("lookup_style", lookup_style, LOOKUP_STYLES)
    pad_id = None if pad_id is None else arguments.int32("pad_id", pad_id)
    table = as_table("table", table)
    ids = arguments.as_int32("ids", ids)
    return look_up(table, ids, pad_id, out_of_range, lookup_style)


def as_table(name: str, table: ArrayLike | Table) -> TableArray | Table:
    """A floating array of rank 2 with at least one row, or a `Table`."""
    if not isinstance(table, Table):
        table = arguments.unwrapped(table)
    if isinstance(table, Table):
        return table
    array = arguments.as_floats(name, table)
    if array.ndim != 2 or array.shape[0] == 0:
        raise arguments.value_error(
            name, "shape [vocab_size, d] with at least one row", f"shape {list(array.shape)}"
        )
    return array


@compiled(2, 3, 4)
def look_up(
    table: Any, ids: Ids, pad_id: int | None, out_of_range: str, lookup_style: str
) -> Vectors:
    """`lookup` of checked arguments, compiled for eager callers too."""
    sharding = jax.typeof(ids).sharding
    # Of a `Table` too, whose first leaf is its array or has no columns.
    first, *_ = jax.tree.leaves(table)
    columns = spec_axes(jax.typeof(first).sharding.spec, 2)[1]
    of_ids = typed_axes(ids)
    batch_axes = set(sum(of_ids, ()))
    if batch_axes.isdisjoint(columns):
        return _look_up(table, ids, pad_id, out_of_range, lookup_style)
    # No axis may split two dimensions: each device reads its columns for the ids of all of them.
    others = [tuple(axis for axis in axes if axis not in columns) for axes in of_ids]
    ids = reshard(ids, NamedSharding(sharding.mesh, PartitionSpec(*others)))
    rows = _look_up(table, ids, pad_id, out_of_range, lookup_style)
    kept = tuple(axis for axis in columns if axis not in batch_axes)
    return reshard(rows, NamedSharding(sharding.mesh, PartitionSpec(*of_ids, kept)))


def _look_up(
    table: Any, ids: Ids, pad_id: int | None, out_of_range: str, lookup_style: str
) -> Vectors:
    """`look_up` of ids that are not split over the mesh axes of the table's columns."""
    if isinstance(table, Table):
        rows = table._gather_rows(ids)
    elif lookup_style == "gather":
        return _gather(table, ids, pad_id, out_of_range)
    else:
        # A product at full precision with a row of one 1 for each id: the table must be finite.
        wide, vocab_size = arguments.widened(table), table.shape[0]
        one_hot = jax.nn.one_hot(jnp.clip(ids, 0, vocab_size - 1), vocab_size, dtype=wide.dtype)
        rows = jnp.matmul(one_hot, wide, precision=jax.lax.Precision.HIGHEST).astype(table.dtype)
    return _replace_special_rows(rows, ids, table.shape[0], pad_id, out_of_range)


def _replace_special_rows(
    rows: Vectors, ids: Ids, vocab_size: Any, pad_id: int | None, out_of_range: str
) -> Vectors:
    """The rows, with NaN or zeros at ids out of range and zeros at padding."""
    if out_of_range != "clip":
        # As uint32, a negative id lies above any vocabulary: one comparison tells both ends.
        outside = ids.astype(jnp.uint32) >= vocab_size
        if out_of_range == "nan":
            rows = nan_where(outside, rows)
        else:
            rows = jnp.where(outside[..., None], 0, rows)
    if pad_id is not None:
        rows = jnp.where((ids == pad_id)[..., None], 0, rows)
    return rows


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _gather(table: TableArray, ids: Ids, pad_id: int | None, out_of_range: str) -> Vectors:
    """`lookup` in a plain table."""
    if is_explicit(jax.typeof(ids).sharding.mesh):
        rows = read_or_zero(table, jnp.clip(ids, 0, table.shape[0] - 1).astype(jnp.uint32))
    else:
        # XLA's gather clips by itself.
        rows = jnp.take(table, ids, axis=0, mode="clip")
    return _replace_special_rows(rows, ids, table.shape[0], pad_id, out_of_range)


@_gather.defjvp
def _gather_jvp(
    pad_id: int | None, out_of_range: str, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Vectors, Any]:
    table, ids = primals
    # An index past the end reads zeros, and its gradient is dropped. Negative ids become such ones.
    index = jnp.clip(ids, 0, table.shape[0] - 1) if out_of_range == "clip" else ids
    index = index.astype(jnp.uint32)
    if pad_id is not None:
        index = jnp.where(ids == pad_id, np.uint32(2**32 - 1), index)
    return _gather(table, ids, pad_id, out_of_range), read_or_zero(tangents[0], index)
