"""The gradient of some rows of a large table, as a leaf of a gradient tree."""

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import on_each_device, typed_axes
from transformer_embed._src.rows.distinct_ids import sum_rows
from transformer_embed._src.rows.fingerprint import fingerprint, fits, or_nan

Tree = Any
# What ids are that belong to a trace that is over.
LEFT = (
    "one that left its jit or vmap (call te.rows.value_and_grad and te.rows.apply_gradients in one "
    "jit, or return its ids and values)"
)


class SomeRows:
    """Some rows of a table, or their gradient. It has the shape and the dtype of the table."""

    values: Any
    vocab_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """That of the table."""
        return (self.vocab_size, self.values.shape[-1])

    @property
    def dtype(self) -> jnp.dtype:
        """That of the values."""
        return self.values.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient(SomeRows):
    """The gradient of some rows of a table [vocab_size, d]; all other rows have a gradient of zero.

    It replaces the table in the gradients, and has its `shape` and `dtype`. It is a pytree of
    `values` and a few tiny numbers, so `jax.tree.map`, `optax.global_norm` and the like see the
    nonzero numbers of the dense gradient. Train with `te.rows.apply_gradients`: `optimizer.update`
    and `optax.apply_updates` do not take a `RowGradient`.

    The ids are static and belong to the trace that made them. To return a gradient from jit, return
    its `ids` and `values` and make a new `RowGradient` from them. A scan cannot carry a gradient:
    to add the gradients of many batches, scan over the batches inside the loss.

    Two gradients of different rows of one table are added by `+`, and trees of them by
    `jax.tree.map` with an `is_leaf` that is true of them. `te.rows.pmean` averages them over
    devices. The tiny numbers, the `fingerprint`, show if something else mixed rows:
    after `jax.lax.pmean` over devices with different ids, `apply_gradients` writes NaN. They
    keep their ratios if a gradient is scaled as a whole (by 1e-12 or more), cast to a dtype other
    than float16, or averaged over devices that have the same ids. Other functions of the gradient,
    such as its sign, end in NaN as well.

    Args:
        ids: [k], integers, ascending and distinct; ids of vocab_size or above are padding. Where
            rows are exchanged, each device has those of its own shard, ascending on that device.
            With `EmbedderConfig.spread`, they are the numbers of rows, not of tokens.
        values: [k, d], the gradient of each row; zeros for padding.
        vocab_size: number of rows of the table.

    Raises:
        TypeError: ids are not integers, or values not floating.
        ValueError: ids that do not ascend, or not a row of values for each.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> rows = jnp.array([[3.0], [4.0]])
        >>> gradient = te.rows.RowGradient(jnp.array([1, 3]), rows, vocab_size=10)
        >>> total = gradient + te.rows.RowGradient(jnp.array([3, 8]), rows, vocab_size=10)
        >>> total.ids[:3].tolist(), total.values[:3].tolist()
        ([1, 3, 8], [[3.0], [7.0], [4.0]])
        >>> halves = jax.tree.map(lambda g: g / 2, {"t": gradient})["t"]
        >>> halves.ids.tolist(), halves.values.tolist()
        ([1, 3], [[1.5], [2.0]])

    Source:
        TensorFlow's IndexedSlices, https://www.tensorflow.org/api_docs/python/tf/IndexedSlices
    """

    ids: Any
    values: Any
    vocab_size: int
    fingerprint: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self):
        arguments.convert_fields(
            self, ids=arguments.as_int32, values=arguments.as_floats, vocab_size=arguments.size
        )
        self.check()
        ids = None if any(self.owners) else _on_host(self.ids)
        # As int32, the difference of two ids may wrap.
        if ids is not None and (np.diff(ids.astype(np.int64), prepend=-1) <= 0).any():
            want = "row ids that ascend from 0 or above, each of them once"
            raise arguments.value_error("ids", want, reprlib.repr(ids.tolist()))
        arguments.set_fields(self, fingerprint=self._on_shards(fingerprint)(self.ids, self.values))

    def __add__(self, other: "RowGradient") -> "RowGradient":
        """The sum; it has the rows of both."""
        if not is_gradient(other) or self.shape != other.shape:
            want = f"rows of the same table, {list(self.shape)}"
            raise arguments.type_error("grads", want, type(other).__name__)

        def sum_both(ids: list[Array], values: list[Array]) -> tuple[Array, Array]:
            both = jnp.concatenate(ids)
            return sum_rows(both, jnp.concatenate(values), self.vocab_size, both)

        # The sum gets a fingerprint of its own, which would hide that something mixed these rows.
        values = [self.trusted_values(), other.trusted_values()]
        ids, sums = self._on_shards(sum_both)([self.ids, other.ids], values)
        return RowGradient(ids, sums, self.vocab_size)

    @property
    def parts(self) -> tuple[Array, ...]:
        """The ids, the values and the fingerprint."""
        return self.ids, self.values, self.fingerprint

    def trusted_values(self) -> Float[Array, "k d"]:
        """The values, or NaN if the fingerprint shows that something mixed rows."""
        self.check()

        def trusted(ids: Array, values: Array, scaled: Array) -> Array:
            return or_nan(fits(ids, values, scaled), values)

        return self._on_shards(trusted)(*self.parts)

    def check(self) -> None:
        """Raises unless the ids belong to this trace, and each has a row of values."""
        if arguments.is_traced(self.ids):
            try:
                jnp.negative(self.ids)
            except jax.errors.UnexpectedTracerError as error:
                raise arguments.type_error("grads", "a RowGradient of this jit", LEFT) from error
        shape, is_matrix = self.values.shape, self.values.ndim == 2
        want = f"{[*self.ids.shape, 'd']}, a row for each id"
        arguments.check_shape("values", shape, is_matrix and shape[:1] == self.ids.shape, want)

    @property
    def owners(self) -> PartitionSpec:
        """How ids and values are split, if each device has those of its own rows."""
        return PartitionSpec(*typed_axes(self.ids))

    def _on_shards(self, function: Callable) -> Callable:
        """A function of the rows, on each device that has its own."""
        if not any(self.owners):
            return function
        mesh = jax.typeof(self.ids).sharding.mesh
        return on_each_device(mesh, function, self.owners, self.owners)


class _Ids:
    """Ids as static data of a pytree.

    Two are equal if they are the same array or, outside of jit, have the same values.
    """

    def __init__(self, ids: Any):
        self.ids = ids

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Ids):
            return False
        ids, others = _on_host(self.ids), _on_host(other.ids)
        if ids is None or others is None:
            # Traced ids have no values: those of one batch are one object.
            return self.ids is other.ids
        return np.array_equal(ids, others)

    def __hash__(self) -> int:
        # Equal ids need equal hashes, and traced ones have no values to make one of.
        return 0

    def __repr__(self) -> str:
        return (
            "the ids of one batch (jax.tree.map adds gradients of different ids with is_leaf="
            "lambda leaf: isinstance(leaf, te.rows.RowGradient); a scan cannot carry them: scan "
            "over the batches inside the loss of te.rows.value_and_grad)"
        )


def _flatten(gradient: RowGradient) -> tuple[tuple[Any, Any], tuple]:
    leaves = gradient.values, gradient.fingerprint
    return leaves, (_Ids(gradient.ids), gradient.vocab_size)


def _unflatten(static: tuple, leaves: Sequence[Any]) -> RowGradient:
    """The gradient as it was, unchecked: leaves may be anything."""
    (static_ids, vocab_size), (values, scaled) = static, leaves
    fields = {"ids": static_ids.ids, "values": values, "vocab_size": vocab_size}
    gradient = object.__new__(RowGradient)
    arguments.set_fields(gradient, **fields, fingerprint=scaled)
    return gradient


jax.tree_util.register_pytree_node(RowGradient, _flatten, _unflatten)


def _on_host(ids: Any) -> np.ndarray | None:
    """The values of some ids, if they can be read."""
    if arguments.is_traced(ids):
        return None
    # A transfer guard is meant for the model's transfers, not for those of a check.
    with jax.transfer_guard("allow"):
        return np.asarray(ids)


def is_gradient(leaf: Any) -> bool:
    """Whether a leaf of a tree is the gradient of some rows of a table."""
    return isinstance(leaf, RowGradient)


def as_arrays(name: str, tree: Tree) -> Any:
    """A tree of jax arrays; that of `grads` may have gradients of rows too."""

    def convert(path: Any, leaf: Any) -> Any:
        if name == "grads" and is_gradient(leaf):
            return leaf
        full_name = name + jax.tree_util.keystr(path)
        leaf = arguments.native(full_name, leaf)
        try:
            return arguments.on_device(leaf)
        except (TypeError, ValueError, OverflowError) as error:
            raise arguments.type_error(full_name, "an array", arguments.describe(leaf)) from error

    return jax.tree.map_with_path(convert, tree, is_leaf=is_gradient)


def check_shapes(name: str, want: Tree, got: Tree) -> None:
    """A ValueError unless two trees are alike, with leaves of the same paths and shapes."""

    def shapes(tree: Tree) -> set[str]:
        paths = jax.tree.leaves_with_path(tree, is_leaf=is_gradient)
        keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        return {f"{keystr(path)} {[*np.shape(leaf)]}" for path, leaf in paths}

    missing, unknown = sorted(shapes(want) - shapes(got)), sorted(shapes(got) - shapes(want))
    if missing or unknown:
        found = ", ".join(unknown) or "none of them"
        raise arguments.value_error(name, ", ".join(missing) or "no others", found)
    wanted, found = (jax.tree.structure(tree, is_leaf=is_gradient) for tree in (want, got))
    arguments.check_same(name, "the tree", found, wanted)
