"""Holds the gradient of some rows of a large table, in the place of the table's gradient.

Letters of shapes: k rows with a gradient, d columns of the table.
"""

import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments, conversions
from transformer_embed._src.partitioning import on_each_device, typed_axes
from transformer_embed._src.rows.distinct_ids import SummedRows, sum_rows
from transformer_embed._src.rows.fingerprint import fingerprint, fits, or_nan

# How an error describes a gradient whose row indices belong to a trace that is over.
LEFT_TRACE = (
    "one that left its jit or vmap (call te.rows.value_and_grad and te.rows.apply_gradients in one "
    "jit, or return its row_indices and values)"
)


class SomeRows:
    """Is the parent of classes that hold some rows of a table, or the gradient of these rows.

    The `shape` and the `dtype` are the shape and the dtype of the table.
    """

    values: Any
    num_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the table."""
        return (self.num_rows, self.values.shape[-1])

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return self.values.dtype


class GradientArrays(NamedTuple):
    """Holds the arrays of a `RowGradient`, which a step passes to the devices of a mesh."""

    row_indices: Array
    values: Array
    fingerprint: Array


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient(SomeRows):
    """Holds the gradient of a table [num_rows, d] in which only some rows have a nonzero gradient.

    For each table that you train by rows, `te.rows.value_and_grad` returns a `RowGradient` instead
    of an array. Pass the `RowGradient` on to `te.rows.apply_gradients`. (Do not pass a
    `RowGradient` to `optimizer.update` or `optax.apply_updates`.) A `RowGradient` has the `shape`
    and the `dtype` of the table. It is a pytree with two leaves: the `values`, which are the
    nonzero rows of the dense gradient, and the `fingerprint`, a checksum of the rows. Functions
    like `jax.tree.map` and `optax.global_norm` see both leaves. `optax.global_norm` adds up the
    squares of all numbers in both leaves. The numbers in the fingerprint are so small that the
    squares do not change the sum, so you get the norm of the values alone.

    You may multiply a whole gradient by a number, cast it, or average it over devices whose
    gradients have the same row indices. For everything else, use one of these:

    - `+` adds two gradients of the same table, whose rows may differ. For trees, use `jax.tree.map`
      with `is_leaf=lambda leaf: isinstance(leaf, te.rows.RowGradient)`.
    - `te.rows.pmean` averages gradients over devices with different batches.
    - To add the gradients of many batches, scan over the batches inside the loss. (`jax.lax.scan`
      cannot carry a `RowGradient`.)
    - A gradient that was made inside a `jax.jit` can be used only inside this `jax.jit`. To get the
      gradient out of the `jax.jit`, return its `row_indices` and `values` from the compiled
      function. Then make a new `RowGradient` from the two arrays.

    Any other function of a gradient may give a wrong result, because it sees only some rows of the
    table. For example, `jax.lax.pmean` over devices with different batches mixes rows, and
    `optax.clip_by_block_rms` computes the size of a table from some of the rows. After such a
    function, the values of the gradient no longer fit its `fingerprint`, a checksum of the rows.
    Then `apply_gradients` writes NaN into the table rows of the gradient, so that you do not train
    with a wrong gradient. The same happens after a function that changes each number independently
    of the others, such as `jnp.sign` or `optax.clip`. Such a function is right for the values, but
    the changed values and the fingerprint no longer fit each other. So put the function into the
    optimizer, by `optax.chain`.

    Args:
        row_indices: The indices of the table rows that have a gradient. Integers of shape [k],
            ascending and distinct. An index of `num_rows` or above is padding. Row i is the row of
            id i, except in a table whose `EmbedderConfig` has `spread=True`. In such a table,
            neighbouring ids have rows that are far apart. For example, in a spread table of 12
            rows, id 1 has row 9. If you passed a `capacity` to `value_and_grad`, each device holds
            the indices of its own table rows, in ascending order.
        values: The gradients of these rows. Shape [k, d], floating. Rows of padding are zeros.
        num_rows: The number of rows of the table.

    Raises:
        TypeError: `row_indices` are not integers, or `values` are not floating.
        ValueError: `row_indices` do not ascend, or the number of rows of `values` differs from the
            number of row indices.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> rows = jnp.array([[3.0], [4.0]])
        >>> gradient = te.rows.RowGradient(jnp.array([1, 3]), rows, num_rows=10)
        >>> total = gradient + te.rows.RowGradient(jnp.array([3, 8]), rows, num_rows=10)
        >>> total.row_indices[:3].tolist(), total.values[:3].tolist()
        ([1, 3, 8], [[3.0], [7.0], [4.0]])
        >>> halves = jax.tree.map(lambda g: g / 2, {"t": gradient})["t"]
        >>> halves.row_indices.tolist(), halves.values.tolist()
        ([1, 3], [[1.5], [2.0]])

    Edge cases:
        - A scale may be as small as 1e-12. A cast to float16 loses the fingerprint.
        - The fingerprint is a checksum of the rows, by which `apply_gradients` finds out that
          something changed the values. If the values change by less than a few percent,
          `apply_gradients` does not notice the change. If all values in the first 64 rows are below
          about 1e-26 in magnitude, it notices no change of the values at all.

    Source:
        TensorFlow's IndexedSlices, https://www.tensorflow.org/api_docs/python/tf/IndexedSlices
    """

    row_indices: Any
    values: Any
    num_rows: int
    fingerprint: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Converts and checks the arrays, and makes the fingerprint."""
        arguments.convert_fields(
            self,
            row_indices=arguments.as_int32,
            values=arguments.as_floats,
            num_rows=arguments.size,
        )
        self.check()
        # If the gradient is split, each device has the rows of its own shard. The indices ascend on
        # each device, but not from one device to the next, so they are not checked.
        if not self.is_split:
            _check_ascending(self.row_indices)
        # A fingerprint is a checksum of the rows, by which later code notices if a user's function
        # has mixed them. If the gradient is split, each device makes a fingerprint of its rows.
        make_fingerprint = self._on_shards(fingerprint)
        new_fingerprint = make_fingerprint(self.row_indices, self.values)
        arguments.set_fields(self, fingerprint=new_fingerprint)

    def __add__(self, other: "RowGradient") -> "RowGradient":
        """Adds two gradients of one table; the sum has the rows of both."""
        if not is_gradient(other) or self.shape != other.shape:
            want = f"rows of the same table, {list(self.shape)}"
            raise arguments.type_error("grads", want, type(other).__name__)

        def sum_both(indices: list[Array], values: list[Array]) -> SummedRows:
            """Sums the rows of equal indices of both gradients."""
            all_indices = jnp.concatenate(indices)
            all_values = jnp.concatenate(values)
            # The last argument says which indices the result has: those of both gradients.
            return sum_rows(all_indices, all_values, self.num_rows, all_indices=all_indices)

        # The sum gets a new fingerprint, which is a checksum of its rows. If something has mixed
        # the rows of a gradient, the new fingerprint would hide this. So the old fingerprints are
        # checked first: `trusted_values` are NaN if the fingerprint does not fit.
        values = [self.trusted_values(), other.trusted_values()]
        indices = [self.row_indices, other.row_indices]
        sum_on_shards = self._on_shards(sum_both)
        summed = sum_on_shards(indices, values)
        return RowGradient(
            row_indices=summed.row_indices, values=summed.sums, num_rows=self.num_rows
        )

    @property
    def arrays(self) -> GradientArrays:
        """The row indices, the values and the fingerprint."""
        return GradientArrays(
            row_indices=self.row_indices, values=self.values, fingerprint=self.fingerprint
        )

    def trusted_values(self) -> Float[Array, "k d"]:
        """Returns the values, or NaN if the fingerprint does not fit them.

        The fingerprint does not fit if something changed the values other than by scaling them. If
        each device has the rows of its own shard, each device checks its rows.
        """
        self.check()

        def trusted(indices: Array, values: Array, old_fingerprint: Array) -> Array:
            """Returns the values of one device, or NaN if the fingerprint does not fit them."""
            is_unchanged = fits(indices, values, old_fingerprint)
            return or_nan(is_unchanged, values)

        # If the gradient is split, the function runs on each device, for the rows of its shard.
        trusted_on_shards = self._on_shards(trusted)
        return trusted_on_shards(self.row_indices, self.values, self.fingerprint)

    def check(self) -> None:
        """Raises unless the indices belong to this trace, and each has a row of values."""
        if conversions.is_traced(self.row_indices):
            # If the indices are from a trace that is over, jax raises an error as soon as they are
            # used. Here they are used only for that, and the result is dropped.
            try:
                jnp.negative(self.row_indices)
            except jax.errors.UnexpectedTracerError as error:
                raise arguments.type_error(
                    "grads", "a RowGradient of this jit", LEFT_TRACE
                ) from error
        shape = self.values.shape
        is_right = self.values.ndim == 2 and shape[:1] == self.row_indices.shape
        want = f"{[*self.row_indices.shape, 'd']}, a row for each row index"
        arguments.check_shape("values", shape, is_right, want)

    @property
    def spec(self) -> PartitionSpec:
        """How explicit mesh axes split the rows of the gradient.

        With a `capacity`, the rows are split like the rows of the table, so each device has the
        gradients of its own table rows. Otherwise all devices have all rows.
        """
        return PartitionSpec(*typed_axes(self.row_indices))

    @property
    def is_split(self) -> bool:
        """Whether each device has the gradients of its own shard, as with a `capacity`."""
        return any(self.spec)

    def _on_shards(self, function: Callable) -> Callable:
        """Makes a function of the gradient's arrays run on each device's rows.

        If all devices have the same rows, the function itself is returned.
        """
        if not self.is_split:
            return function
        mesh = jax.typeof(self.row_indices).sharding.mesh
        return on_each_device(mesh, function, in_specs=self.spec, out_specs=self.spec)


class _StaticIndices:
    """Holds row indices as static data of a pytree.

    Two are equal if they are the same array or, outside of jit, have the same values.
    """

    def __init__(self, indices: Any):
        self.indices = indices

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _StaticIndices):
            return False
        own_values = _known_values(self.indices)
        other_values = _known_values(other.indices)
        if own_values is None or other_values is None:
            # Traced indices have no values, but the indices of one batch are one object.
            return self.indices is other.indices
        return np.array_equal(own_values, other_values)

    def __hash__(self) -> int:
        # Equal indices need equal hashes, and traced indices have no values to make a hash of.
        return 0

    def __repr__(self) -> str:
        # jax prints this if the structures of two trees differ.
        return (
            "the ids of one batch (jax.tree.map adds gradients of different ids with is_leaf="
            "lambda leaf: isinstance(leaf, te.rows.RowGradient); a scan cannot carry them: scan "
            "over the batches inside the loss of te.rows.value_and_grad)"
        )


def _known_values(indices: Int32[Array, "k"]) -> np.ndarray | None:
    """Returns the values of indices, or None if they are traced."""
    if conversions.is_traced(indices):
        return None
    # A user's transfer guard is meant for the transfers of the model, not for this check.
    with jax.transfer_guard("allow"):
        return np.asarray(indices)


def _check_ascending(row_indices: Int32[Array, "k"]) -> None:
    """Raises a ValueError if row indices are negative or do not ascend. Traced ones pass."""
    indices = _known_values(row_indices)
    if indices is None:
        return
    # As int32, the difference of two indices may wrap.
    steps = np.diff(indices.astype(np.int64), prepend=-1)
    if (steps <= 0).any():
        want = "row indices that ascend from 0 or above, each of them once"
        raise arguments.value_error("row_indices", want, reprlib.repr(indices.tolist()))


def is_gradient(leaf: Any) -> bool:
    """Returns whether a leaf of a tree is a `RowGradient`, the gradient of some table rows."""
    return isinstance(leaf, RowGradient)


def _flatten(gradient: RowGradient) -> tuple[tuple[Any, Any], tuple]:
    """Returns the leaves of a gradient, which functions of a tree see, and its static data."""
    leaves = gradient.values, gradient.fingerprint
    return leaves, (_StaticIndices(gradient.row_indices), gradient.num_rows)


def _unflatten(static: tuple, leaves: Sequence[Any]) -> RowGradient:
    """Makes a gradient from its leaves, without checks, because jax puts any object into leaves.

    `leaves` and `static` are what `_flatten` returns. `jax.tree.map` may have scaled the leaves.
    """
    static_indices, num_rows = static
    row_indices = static_indices.indices
    values, fingerprint_leaf = leaves
    gradient = object.__new__(RowGradient)
    arguments.set_fields(
        gradient,
        row_indices=row_indices,
        values=values,
        num_rows=num_rows,
        fingerprint=fingerprint_leaf,
    )
    return gradient


jax.tree_util.register_pytree_node(RowGradient, _flatten, _unflatten)
