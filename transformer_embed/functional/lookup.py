"""Rows of a table: what an id outside the vocabulary gives, the padding row, and the tied output layer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from transformer_embed import _checks

OUT_OF_RANGE = ("nan", "clip", "zero")
LOOKUP_STYLES = ("gather", "one_hot")


class Table(np.lib.mixins.NDArrayOperatorsMixin):
    """A table [vocab_size, d] held in another form than one array: a leaf of a parameter tree that `lookup` and `tied_logits` read.

    It has the `shape` and `dtype` of the array that it stands for, so that hk.get_parameter takes it. Any other use of it as an
    array is a TypeError.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """[vocab_size, d]."""
        raise NotImplementedError

    @property
    def dtype(self) -> jnp.dtype:
        """Of its rows."""
        raise NotImplementedError

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """The row of each id, an id beyond either end giving the row at that end; repeats are summed in float32 or wider."""
        raise NotImplementedError

    def logits(self, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """The product of x with every row, in float32 or wider."""
        raise NotImplementedError

    def shards(self, x: Float[Array, "... d"]) -> tuple[Array, Any, tuple[str, ...], tuple[str, ...], Sequence[tuple[str, ...]]]:
        """The array that it is kept in, its mesh, and the mesh axes over which its rows, its columns and each dimension of x are split."""
        raise TypeError(
            _checks.wanted("table", "a whole table, or one in shards, since the output layer is tied to it", type(self).__name__)
        )

    def take_rows(self, ids: Int32[Array, "..."], distinct: Callable[[Array], Array]) -> Any:
        """The rows of distinct(ids), for a loss to read in this table's place: a `rows.TakenRows`."""
        raise NotImplementedError

    def update_rows(self, step: Callable, needed: Sequence[Array], gradient: Any, states: Sequence[Any]) -> Sequence[Any]:
        """This table and what follows it in an optimizer's state, after step(needed, ids, values, arrays) on the arrays that hold them.

        `needed` are values that all rows share; ids count from an array's first row, and those past its end are of no row.
        """
        raise NotImplementedError

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _NotAnArrayError(
            _checks.wanted("table", "to be read by lookup or tied_logits alone", f"another use of {type(self).__name__}")
        )

    # Operators and numpy's functions, numpy.asarray, jax's functions, indexing.
    __array_ufunc__ = __array__ = __jax_array__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        """What an array has and this has not: `T`, `at`, `astype`, ..."""
        self._refuse()


class _NotAnArrayError(TypeError, AttributeError):
    """Also an AttributeError, for hasattr to answer False."""


def lookup(
    table: ArrayLike | Table, ids: ArrayLike, *, pad_id: int | None = None, out_of_range: str = "nan", lookup_style: str = "gather"
) -> Float[Array, "... d"]:
    """The row of the table for each id.

    Args:
        table: [vocab_size, d], a floating dtype.
        ids: [...], any integer dtype. Negative ids are out of range: they do not count from the end.
        pad_id: the id of padding: its row reads as zeros and gets no gradient, whatever the table holds. It may lie outside the
            vocabulary. None: no padding.
        out_of_range: what an id outside [0, vocab_size) gives.
            `"nan"`: a row of NaN, no gradient. Loud, and the only way to be loud under jit.
            `"clip"`: the nearest row of the table, which gets the gradient.
            `"zero"`: a row of zeros, no gradient.
        lookup_style: how the rows are read; the values are the same.
            `"gather"`: each row is copied.
            `"one_hot"`: a product with a [..., vocab_size] matrix of zeros and ones, at full precision. Its cost grows with the
            vocabulary: for matrix units (TPU) and small vocabularies. The table must be finite: 0 times infinity is NaN.

    Returns:
        [..., d] of the table's dtype. Under explicit mesh axes its sharding is that of the ids, then that of the table's columns.

    Raises:
        TypeError: ids are not integers; the table has no floating dtype.
        ValueError: the table is not of rank 2 or has no row; an unknown out_of_range or lookup_style; a pad_id outside int32.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> te.lookup(table, [1, 0, 2**32 + 1], pad_id=0).tolist()
        [[3.0, 4.0], [0.0, 0.0], [nan, nan]]

    Source:
        The input embedding of Vaswani et al., "Attention Is All You Need" (2017), section 3.4, https://arxiv.org/abs/1706.03762
    """
    _checks.choice("out_of_range", out_of_range, OUT_OF_RANGE)
    read_rows = {"gather": _gather, "one_hot": _multiply_by_one_hot}[_checks.choice("lookup_style", lookup_style, LOOKUP_STYLES)]
    table = as_table("table", table)
    ids = _checks.as_int32("ids", ids)
    rows = table.gather(ids) if isinstance(table, Table) else rows_at(table, ids, read_rows)
    if out_of_range != "clip":
        outside = ids.astype(jnp.uint32) >= table.shape[0]
        rows = jnp.where(outside[..., None], jnp.array(jnp.nan if out_of_range == "nan" else 0, table.dtype), rows)
    if pad_id is not None:
        padding = ids == _checks.int32("pad_id", pad_id)
        rows = jnp.where(padding[..., None], jnp.zeros((), table.dtype), rows)
    return rows


def tied_logits(x: ArrayLike, table: ArrayLike | Table, *, pad_id: int | None = None) -> Float[Array, "... v"]:
    """The logits of an output layer that shares the embedding table: the product of x with every row.

    Args:
        x: [..., d], a floating dtype.
        table: [vocab_size, d], a floating dtype.
        pad_id: the id whose row counts as zeros, as in `lookup`: its logit is 0 and its row gets no gradient. The row must be
            finite all the same, for x's gradient has 0 times it. None: none.

    Returns:
        [..., vocab_size], summed and returned in float32 (float64 if an input is). A table in shards pads the vocabulary: see
        `sharding.Sharded`.

    Raises:
        TypeError: x or the table has no floating dtype.
        ValueError: the table is not of rank 2, or its width is not x's.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.tied_logits(jnp.array([1.0, 1.0]), jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [3.0, 7.0]

    Source:
        Press and Wolf, "Using the Output Embedding to Improve Language Models" (2017), https://arxiv.org/abs/1608.05859;
        Vaswani et al., "Attention Is All You Need" (2017), section 3.4, https://arxiv.org/abs/1706.03762
    """
    x, table = as_wide_as_table(x, table)
    dtype = jnp.promote_types(jnp.float32, jnp.promote_types(x.dtype, table.dtype))
    logits = table.logits(x) if isinstance(table, Table) else jnp.einsum("...d,vd->...v", x, table, preferred_element_type=dtype)
    if pad_id is not None and _checks.int32("pad_id", pad_id) < table.shape[0]:
        padding = jnp.arange(logits.shape[-1], dtype=jnp.int32) == pad_id
        logits = jnp.where(padding, jnp.zeros((), dtype), logits)
    return logits


def check_ids(ids: ArrayLike, vocab_size: int) -> None:
    """Raises if an id lies outside the vocabulary; for the host, before a step: under jit, `lookup` answers with NaN instead.

    Args:
        ids: [...], any integer dtype; not traced.
        vocab_size: number of rows, at least 1.

    Raises:
        TypeError: ids are not integers, or they are traced.
        ValueError: an id outside [0, vocab_size): the message has the first one and its index.

    Example:
        >>> import transformer_embed as te
        >>> te.check_ids([[1, 2], [3, 50257]], vocab_size=50257)
        Traceback (most recent call last):
        ValueError: ids: wanted integers inside the vocabulary, 0..50256, got 50257 at index [1, 1]

    Source:
        The check that hk.Embed leaves out; own.
    """
    _checks.integer("vocab_size", vocab_size, at_least=1)
    array = _checks.as_integers("ids", ids)
    if _checks.is_traced(array):
        raise TypeError(_checks.wanted("ids", "values on the host, outside of jit", f"a traced {array.dtype}{list(array.shape)}"))
    _checks.inside("ids", np.asarray(array), 0, vocab_size - 1, "the vocabulary")


def as_table(name: str, table: ArrayLike | Table) -> Float[Array, "v d"] | Table:
    """A floating array of rank 2 with at least one row, or what stands for one."""
    if isinstance(table, Table):
        return table
    array = _checks.as_floats(name, table)
    if array.ndim != 2 or array.shape[0] == 0:
        raise ValueError(_checks.wanted(name, "shape [vocab_size, d] with at least one row", f"shape {list(array.shape)}"))
    return array


def as_wide_as_table(x: ArrayLike, table: ArrayLike | Table) -> tuple[Float[Array, "... d"], Float[Array, "v d"] | Table]:
    """Floating x with a last axis as wide as the table."""
    table, x = as_table("table", table), _checks.as_floats("x", x)
    if x.ndim == 0 or x.shape[-1] != table.shape[1]:
        raise ValueError(_checks.wanted("x", f"a last axis of the table's width, {table.shape[1]}", f"shape {list(x.shape)}"))
    return x, table


def rows_at(
    table: Float[Array, "v d"], ids: Int32[Array, "..."], read_rows: Callable[[Array, Array], Array] | None = None
) -> Float[Array, "... d"]:
    """`table[ids]`, an id beyond either end giving the row at that end; a row's repeats are summed in float32 or wider."""
    read_rows = read_rows or _gather
    return _summing_in_float32(read_rows, table, ids) if table.dtype.itemsize < 4 else read_rows(table, ids)


@functools.partial(jax.jit, static_argnums=0)
def _summing_in_float32(read_rows: Callable, table: Float[Array, "v d"], ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """The gradient of a row is the sum over its repeats, which 16 bits would stop counting at some 256.

    Compiled, the conversion fuses into the gather: no float32 table is made.
    """
    return read_rows(table.astype(jnp.float32), ids).astype(table.dtype)


def _gather(table: Float[Array, "v d"], ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """`table[ids]`, an id beyond either end giving the row at that end."""
    sharding = jax.typeof(ids).sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    if explicit:
        columns = jax.typeof(table).sharding.spec[1]
        if columns is not None and columns in sharding.spec:
            raise ValueError(_checks.wanted("table", "columns over a mesh axis that the ids do not use", f"both over {columns!r}"))
        by_ids = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, columns))
        return table.at[jnp.clip(ids, 0, table.shape[0] - 1)].get(mode="promise_in_bounds", out_sharding=by_ids)
    dimensions = jax.lax.GatherDimensionNumbers(offset_dims=(ids.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return jax.lax.gather(table, ids[..., None], dimensions, (1, table.shape[1]), mode="clip")


def _multiply_by_one_hot(table: Float[Array, "v d"], ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """As `_gather`, for a finite table."""
    one_hot = jax.nn.one_hot(jnp.clip(ids, 0, table.shape[0] - 1), table.shape[0], dtype=table.dtype)
    return jnp.matmul(one_hot, table, precision=jax.lax.Precision.HIGHEST)
