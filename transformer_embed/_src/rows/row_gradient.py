"""The gradient of some rows of a large table, as a leaf of a gradient tree."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_embed._src import arguments
from transformer_embed._src.rows.distinct_ids import sum_rows

Tree = Any


def register_row_gradient(cls: type) -> type:
    """Makes a kind of `RowGradient` a pytree whose one leaf is `values`."""

    def flatten(gradient: Any) -> tuple[Any, Any]:
        ids, values, *static = vars(gradient).values()
        return (values,), (_Ids(ids), *static)

    def unflatten(data: Any, children: Any) -> Any:
        ids, *static = data
        return cls(ids.ids, *children, *static)

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


@register_row_gradient
@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """The gradient of some rows of a table [vocab_size, d]; all other rows have a gradient of zero.

    It replaces the table in the gradients. It is a pytree whose one leaf is `values`, so
    `jax.tree.map`, `optax.global_norm` and the like see the nonzero numbers of the dense gradient.
    The ids are static and belong to the trace that made them. To return a gradient from jit, or
    carry it through a loop, return its `ids` and `values` and make a new `RowGradient` from them.
    `add` adds gradients of different rows; `jax.tree.map` raises an error. Train with
    `te.rows.update`: `optimizer.update` and `optax.apply_updates` do not take a `RowGradient`.
    Inside your own `shard_map`, `jax.lax.psum` would add rows of different ids: sum the loss there,
    not its gradient.

    Args:
        ids: [k], int32, ascending and distinct; ids of vocab_size or above are padding.
        values: [k, d], the gradient of each row; zeros for padding.
        vocab_size: number of rows of the table.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> rows = jnp.array([[3.0], [4.0]])
        >>> gradient = te.rows.RowGradient(jnp.array([1, 3]), rows, vocab_size=10)
        >>> halves = jax.tree.map(lambda g: g / 2, {"t": gradient})["t"]
        >>> halves.ids.tolist(), halves.values.tolist()
        ([1, 3], [[1.5], [2.0]])

    Source:
        TensorFlow's IndexedSlices, https://www.tensorflow.org/api_docs/python/tf/IndexedSlices
    """

    ids: Any
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

    def __add__(self, other: "RowGradient") -> "RowGradient":
        """The sum; it has the rows of both."""
        if type(other) is not type(self) or other.shape != self.shape:
            want = f"rows of the same table, {list(self.shape)}"
            raise arguments.type_error("grads", want, type(other).__name__)
        check_ascending(self)
        check_ascending(other)
        if _Ids(self.ids) == _Ids(other.ids):
            return dataclasses.replace(self, values=self.values + other.values)
        ids, values = self.sum_rows([self.ids, other.ids], [self.values, other.values])
        return dataclasses.replace(self, ids=ids, values=values)

    def sum_rows(self, ids: Sequence[Array], values: Sequence[Array]) -> tuple[Array, Array]:
        """The ids of all lists, and the sum of the values of each."""
        return sum_rows(ids, values, self.vocab_size)

    def __radd__(self, other: Any) -> NoReturn:
        """Raises a TypeError: `optax.apply_updates` does not take a `RowGradient`."""
        want = "a step by te.rows.update(optimizer, grads, state, params)"
        got = f"the sum of {type(other).__name__} and RowGradient"
        raise arguments.type_error("params", want, got)


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
            return self.ids is other.ids
        return np.array_equal(ids, others)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "the ids of one batch (te.rows.add adds gradients of different ids)"


def _on_host(ids: Any) -> np.ndarray | None:
    """The values of some ids, if they can be read."""
    if arguments.is_traced(ids) or not isinstance(ids, jax.Array | np.ndarray):
        return None
    with jax.transfer_guard("allow"):
        return np.asarray(ids)


def check_ascending(gradient: RowGradient) -> None:
    """Raises a ValueError if the ids of a gradient made by hand, outside of jit, do not ascend."""
    ids = _on_host(gradient.ids) if type(gradient) is RowGradient else None
    if ids is not None and len(ids) and (ids[0] < 0 or (ids[1:] <= ids[:-1]).any()):
        want = "row ids that ascend from 0 or above, each of them once"
        raise arguments.value_error("grads", want, str(ids.tolist())[:60])


def is_row_gradient(leaf: Any) -> bool:
    """Whether a leaf of a gradient tree is the gradient of some rows."""
    return isinstance(leaf, RowGradient)


def add(grads: Tree, more: Tree) -> Tree:
    """Adds two gradients of the same parameters, which may hold different rows.

    Use it to accumulate gradients. If both have the same ids, `jax.tree.map(jax.numpy.add, grads,
    more)` works as well.

    Args:
        grads: gradients that `value_and_grad` returned.
        more: others, of the same parameters.

    Returns:
        The sum. A sum of two `RowGradient` has the rows of both, at most vocab_size.

    Raises:
        TypeError: rows of different tables.
        ValueError: trees that do not fit together; ids that do not ascend.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> one = te.rows.RowGradient(jnp.array([1, 3]), jnp.array([[1.0], [3.0]]), vocab_size=10)
        >>> other = te.rows.RowGradient(jnp.array([3, 8]), jnp.array([[0.5], [8.0]]), vocab_size=10)
        >>> total = te.rows.add({"t": one}, {"t": other})["t"]
        >>> total.ids[:3].tolist(), total.values[:3].tolist()
        ([1, 3, 8], [[1.0], [3.5], [8.0]])
    """
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_row_gradient)
    others, other_treedef = jax.tree.flatten(more, is_leaf=is_row_gradient)
    if other_treedef != treedef:
        raise arguments.value_error("more", f"a tree as grads, {treedef}", str(other_treedef))
    return jax.tree.unflatten(treedef, map(operator.add, leaves, others))
