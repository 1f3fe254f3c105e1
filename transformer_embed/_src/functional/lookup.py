"""Lookup in an embedding table: rows, ids out of range, the padding row, and the tied output
layer."""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Integer, UInt32

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike

OUT_OF_RANGE = ("nan", "clip", "zero")
LOOKUP_STYLES = ("gather", "one_hot")


class Table(np.lib.mixins.NDArrayOperatorsMixin):
    """A table [vocab_size, d] that is not stored as one plain array: a leaf of a parameter tree
    that `lookup` and `tied_logits` read.

    It has the `shape` and `dtype` of the array that it replaces, so that hk.get_parameter accepts
    it. Any other use as an array is a TypeError.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """[vocab_size, d]."""
        raise NotImplementedError

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of its rows."""
        raise NotImplementedError

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """The row of each id; an id out of range reads the nearest row. Gradients of repeated ids
        are summed in float32 or wider."""
        raise NotImplementedError

    def logits(self, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """The product of x with every row, in float32 or wider."""
        raise NotImplementedError

    def shards(
        self, x: Float[Array, "... d"]
    ) -> tuple[Array, Any, tuple[str, ...], tuple[str, ...], Sequence[tuple[str, ...]]]:
        """The array that holds the table, its mesh, and the mesh axes that split its rows, its
        columns and each dimension of x."""
        raise not_whole_error()

    def use_error(self) -> str:
        """The message for any other use."""
        got = f"another use of {type(self).__name__}"
        return arguments.wanted("table", "to be read by lookup or tied_logits alone", got)

    def _raise_not_an_array(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _NotAnArrayError(self.use_error())

    # Operators and numpy's functions, numpy.asarray, jax's functions, indexing.
    __array_ufunc__ = __array__ = __jax_array__ = __getitem__ = _raise_not_an_array

    def __getattr__(self, name: str) -> NoReturn:
        """Raises an error for attributes that only an array has: `T`, `at`, `astype`, ..."""
        self._raise_not_an_array()


def not_whole_error() -> TypeError:
    """The error of an output layer that is tied to only some rows of a table."""
    want = "a whole table, trained densely, since the output layer is tied to it"
    return TypeError(arguments.wanted("table", want, "some of its rows"))


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
        ids and the last axis like the table's columns.

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

    Source:
        The input embedding of Vaswani et al., "Attention Is All You Need" (2017), section 3.4,
        https://arxiv.org/abs/1706.03762
    """
    arguments.choice("out_of_range", out_of_range, OUT_OF_RANGE)
    arguments.choice("lookup_style", lookup_style, LOOKUP_STYLES)
    pad_id = None if pad_id is None else arguments.int32("pad_id", pad_id)
    table = as_table("table", table)
    ids = arguments.as_int32("ids", ids)
    if isinstance(table, Table):
        return _replace_special_rows(table.gather(ids), ids, table.shape[0], pad_id, out_of_range)
    return _lookup_in_array(table, ids, pad_id, out_of_range, lookup_style)


def tied_logits(
    x: ArrayLike, table: ArrayLike | Table, *, pad_id: int | None = None
) -> Float[Array, "... v"]:
    """The logits of an output layer that shares the embedding table: the product of x with every
    row.

    Args:
        x: [..., d], a floating dtype.
        table: [vocab_size, d], a floating dtype.
        pad_id: the id whose row counts as zeros, as in `lookup`: its logit is 0 and its row gets no
            gradient. The row must still be finite, because 0 times the row enters x's gradient. To
            sample from the logits, exclude it: 0 is not the lowest logit. None: no padding.

    Returns:
        [..., vocab_size], summed and returned in float32 (float64 if an input is). A sharded table
        pads the vocabulary: see `sharding.Sharded`.

    Raises:
        TypeError: x or the table does not have a floating dtype of 16 bits or more.
        ValueError: the table does not have rank 2, or its width is not that of x.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> te.tied_logits(jnp.array([1.0, 1.0]), jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [3.0, 7.0]

        Padding has a logit of 0, so this line comes before `jax.random.categorical`:

        >>> logits = te.tied_logits(jnp.array([-1.0]), jnp.array([[0.5], [1.0]]), pad_id=0)
        >>> logits.at[..., 0].set(-jnp.inf).tolist()
        [-inf, -1.0]

    Source:
        Press and Wolf, "Using the Output Embedding to Improve Language Models" (2017),
        https://arxiv.org/abs/1608.05859; Vaswani et al., "Attention Is All You Need" (2017),
        section 3.4, https://arxiv.org/abs/1706.03762
    """
    x, table = as_wide_as_table(x, table)
    pad_id = None if pad_id is None else arguments.int32("pad_id", pad_id)
    logits = table.logits(x) if isinstance(table, Table) else _logits_of_array(x, table)
    return logits if pad_id is None or pad_id >= table.shape[0] else _zero_column(logits, pad_id)


def check_ids(ids: ArrayLike, vocab_size: int) -> None:
    """Raises if an id is outside the vocabulary. Use it on the host, before a step: under jit,
    `lookup` returns NaN instead.

    Args:
        ids: [...], any integer dtype; not traced.
        vocab_size: number of rows, at least 1.

    Raises:
        TypeError: ids are not integers, or they are traced.
        ValueError: an id is outside [0, vocab_size); the message gives the first such id and its
            index.

    Example:
        >>> import transformer_embed as te
        >>> te.check_ids([[1, 2], [3, 50257]], vocab_size=50257)
        Traceback (most recent call last):
        ValueError: ids: wanted integers inside the vocabulary, 0..50256, got 50257 at index [1, 1]
    """
    arguments.integer("vocab_size", vocab_size, at_least=1)
    array = arguments.as_integers("ids", ids)
    if arguments.is_traced(array):
        raise TypeError(
            arguments.wanted(
                "ids",
                "values on the host, outside of jit",
                f"a traced {array.dtype}{list(array.shape)}",
            )
        )
    arguments.inside("ids", jax.device_get(array), 0, vocab_size - 1, "the vocabulary")


def as_table(name: str, table: ArrayLike | Table) -> Float[Array, "v d"] | Table:
    """A floating array of rank 2 with at least one row, or a `Table`."""
    if isinstance(table, Table):
        return table
    array = arguments.as_floats(name, table)
    if array.ndim != 2 or array.shape[0] == 0:
        raise ValueError(
            arguments.wanted(
                name, "shape [vocab_size, d] with at least one row", f"shape {list(array.shape)}"
            )
        )
    return array


def as_wide_as_table(
    x: ArrayLike, table: ArrayLike | Table
) -> tuple[Float[Array, "... d"], Float[Array, "v d"] | Table]:
    """Floating x with a last axis as wide as the table."""
    table, x = as_table("table", table), arguments.as_floats("x", x)
    if x.ndim == 0 or x.shape[-1] != table.shape[1]:
        raise ValueError(
            arguments.wanted(
                "x", f"a last axis of the table's width, {table.shape[1]}", f"shape {list(x.shape)}"
            )
        )
    return x, table


def rows_at(table: Float[Array, "v d"], ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
    """`table[ids]`; an id out of range reads the nearest row. Gradients of repeated ids are summed
    in float32 or wider."""
    return _gather(table, ids, None, "clip")


@functools.partial(jax.jit, inline=True, static_argnums=(2, 3, 4))
def _lookup_in_array(
    table: Float[Array, "v d"],
    ids: Int32[Array, "..."],
    pad_id: int | None,
    out_of_range: str,
    lookup_style: str,
) -> Float[Array, "... d"]:
    """Compiled for eager callers too."""
    if lookup_style == "gather":
        return _gather(table, ids, pad_id, out_of_range)
    return _replace_special_rows(
        _multiply_by_one_hot(table, ids), ids, table.shape[0], pad_id, out_of_range
    )


@functools.partial(jax.jit, inline=True)
def _logits_of_array(x: Float[Array, "... d"], table: Float[Array, "v d"]) -> Float[Array, "... v"]:
    dtype = arguments.compute_dtype(x.dtype, table.dtype)
    if x.dtype != table.dtype:
        x, table = x.astype(dtype), table.astype(dtype)
    return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=dtype)


@functools.partial(jax.jit, inline=True, static_argnums=1)
def _zero_column(logits: Float[Array, "... v"], pad_id: int) -> Float[Array, "... v"]:
    padding = jnp.arange(logits.shape[-1], dtype=jnp.int32) == pad_id
    return jnp.where(
        jnp.expand_dims(padding, range(logits.ndim - 1)), jnp.zeros((), logits.dtype), logits
    )


def _replace_special_rows(
    rows: Float[Array, "... d"],
    ids: Int32[Array, "..."],
    vocab_size: int,
    pad_id: int | None,
    out_of_range: str,
) -> Float[Array, "... d"]:
    """The rows, with NaN or zeros at ids out of range and zeros at padding."""
    if out_of_range != "clip":
        outside = ids.astype(jnp.uint32) >= vocab_size
        rows = jnp.where(
            outside[..., None], jnp.array(jnp.nan if out_of_range == "nan" else 0, rows.dtype), rows
        )
    if pad_id is not None:
        rows = jnp.where((ids == pad_id)[..., None], jnp.zeros((), rows.dtype), rows)
    return rows


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _gather(
    table: Float[Array, "v d"], ids: Int32[Array, "..."], pad_id: int | None, out_of_range: str
) -> Float[Array, "... d"]:
    """`lookup` in a plain table."""
    index = jnp.clip(ids, 0, table.shape[0] - 1)
    explicit = _explicit_sharding(table, ids)
    if explicit:
        rows = table.at[index].get(mode="promise_in_bounds", out_sharding=explicit)
    else:
        dimensions = jax.lax.GatherDimensionNumbers(
            offset_dims=(ids.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,)
        )
        rows = jax.lax.gather(table, ids[..., None], dimensions, (1, table.shape[1]), mode="clip")
    return _replace_special_rows(rows, ids, table.shape[0], pad_id, out_of_range)


@_gather.defjvp
def _gather_jvp(pad_id, out_of_range, primals, tangents):
    table, ids = primals
    index = jnp.clip(ids, 0, table.shape[0] - 1) if out_of_range == "clip" else ids
    index = index.astype(jnp.uint32)
    if pad_id is not None:
        index = jnp.where(ids == pad_id, np.uint32(2**32 - 1), index)
    return _gather(table, ids, pad_id, out_of_range), read_or_zero(tangents[0], index)


@jax.jit
def read_or_zero(table: Float[Array, "v d"], index: UInt32[Array, "..."]) -> Float[Array, "... d"]:
    """`table[index]`, and zeros for an index past the end. It is linear in the table, and its
    transpose is the table's gradient.

    The transpose drops rows whose index is past the end, so the gradient needs no mask of the rows'
    size. It sums the repeats of a row in float32 or wider, because a 16-bit sum stops growing after
    some 256 of them. XLA fuses the conversion into the read, so no float32 copy of the table
    exists.
    """
    wide = in_compute_dtype(table)
    explicit = _explicit_sharding(table, index)
    by_repeats, by_runs = (
        functools.partial(read, explicit)
        for read in (_read_each_repeat, _read_each_row_once_per_device)
    )
    if _can_sort_index(table, index, explicit):
        rows = jax.lax.platform_dependent(
            wide, index, cuda=by_runs, rocm=by_runs, default=by_repeats
        )
    else:
        rows = by_repeats(wide, index)
    return rows.astype(table.dtype)


def _can_sort_index(
    table: Float[Array, "v d"], index: UInt32[Array, "..."], explicit: NamedSharding | None
) -> bool:
    """Whether each device can sort its index: it has the whole vocabulary, and its part of the
    index is known while tracing."""
    if not index.size * table.size or any(
        map(export.is_symbolic_dim, (*table.shape, *index.shape))
    ):
        return False
    if explicit is None:
        return _is_on_one_device()
    all_explicit = set(explicit.mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    # Before jax 0.7, a shard_map under explicit axes has no transpose.
    return all_explicit and jax.typeof(table).sharding.spec[0] is None and hasattr(jax, "set_mesh")


def in_compute_dtype(table: Float[Array, "v d"]) -> Float[Array, "v d"]:
    """The table in float32 or wider, so that a row's gradient is summed in that dtype over repeats
    and devices."""
    return table.astype(arguments.compute_dtype(table.dtype))


def _read_each_repeat(
    explicit: NamedSharding | None, table: Float[Array, "v d"], index: UInt32[Array, "..."]
) -> Float[Array, "... d"]:
    """A read whose transpose is a scatter-add with repeated indices, which uses atomic additions on
    a GPU."""
    return table.at[index].get(mode="fill", fill_value=0, out_sharding=explicit)


def _read_each_row_once_per_device(
    explicit: NamedSharding | None, table: Float[Array, "v d"], index: UInt32[Array, "..."]
) -> Float[Array, "... d"]:
    """Under explicit mesh axes, each device sums the repeats of its own part of the index."""
    read = jax.checkpoint(_read_each_row_once)
    if explicit is None:
        return read(table, index)
    specs = (jax.typeof(table).sharding.spec, jax.typeof(index).sharding.spec)
    return jax.shard_map(read, mesh=explicit.mesh, in_specs=specs, out_specs=explicit.spec)(
        table, index
    )


def _read_each_row_once(
    table: Float[Array, "v d"], index: UInt32[Array, "..."]
) -> Float[Array, "... d"]:
    """A read whose transpose sorts the rows by index, sums each run of equal indices, and writes
    each sum once.

    So the gradient on a GPU is the same from run to run, and its time does not depend on how often
    an index repeats.
    """
    vocab_size, size = table.shape[0], index.size
    order = jnp.argsort(index.reshape(-1), stable=True)
    ordered = index.reshape(-1)[order]
    changes, edge = ordered[1:] != ordered[:-1], jnp.ones((1,), bool)
    starts, ends = jnp.concatenate([edge, changes]), jnp.concatenate([changes, edge])
    # All are distinct, also those past the end.
    once = jnp.where(
        ends & (ordered < vocab_size), ordered, vocab_size + jnp.arange(size, dtype=jnp.uint32)
    )
    at_ends = table.at[once].get(mode="fill", fill_value=0, unique_indices=True)
    (spread,) = jax.linear_transpose(functools.partial(_sum_runs, starts), at_ends)(at_ends)
    rows = (
        jnp.zeros_like(spread).at[order].add(spread, mode="promise_in_bounds", unique_indices=True)
    )
    return rows.reshape(*index.shape, table.shape[1])


def _sum_runs(starts: Bool[Array, "n"], rows: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """For each row, the sum of its run up to that row. `starts` says where runs start."""

    def join(left, right):
        (left_starts, left_sum), (right_starts, right_sum) = left, right
        starts_anew = jax.lax.broadcast_in_dim(right_starts, right_sum.shape, (0, 1))
        # Not with jax.numpy functions: each call is traced and transposed separately, which took
        # most of the tracing time of a step.
        return jax.lax.bitwise_or(left_starts, right_starts), jax.lax.select(
            starts_anew, right_sum, jax.lax.add(left_sum, right_sum)
        )

    return jax.lax.associative_scan(join, (starts[:, None], rows))[1]


def _is_on_one_device() -> bool:
    """Whether it is known while tracing that the program, or its part inside a shard_map, runs on
    one device.

    If the compiler may split the batch over devices, a sort would gather all of it on each device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    manual = jax.sharding.AxisType.Manual
    return all(
        kind == manual or size == 1
        for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    )


def _explicit_sharding(
    table: Float[Array, "v d"], ids: Integer[Array, "..."]
) -> NamedSharding | None:
    """Under explicit mesh axes, the sharding of the rows: that of the ids, then that of the table's
    columns."""
    sharding = jax.typeof(ids).sharding
    if jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    columns = jax.typeof(table).sharding.spec[1]
    if columns is not None and columns in sharding.spec:
        raise ValueError(
            arguments.wanted(
                "table",
                "columns over a mesh axis that the ids do not use",
                f"both over {columns!r}",
            )
        )
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, columns))


@jax.jit
def _multiply_by_one_hot(
    table: Float[Array, "v d"], ids: Int32[Array, "..."]
) -> Float[Array, "... d"]:
    """`rows_at`, for a finite table."""
    wide = in_compute_dtype(table)
    one_hot = jax.nn.one_hot(jnp.clip(ids, 0, table.shape[0] - 1), table.shape[0], dtype=wide.dtype)
    return jnp.matmul(one_hot, wide, precision=jax.lax.Precision.HIGHEST).astype(table.dtype)
