"""The gradient of some rows of a large table, as a leaf of a gradient tree."""

import dataclasses
import functools
import operator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.rows.distinct_ids import sum_rows

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class SomeRows:
    """Some rows of a table, or their gradient. It has the shape and the dtype of the table."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient(SomeRows):
    """The gradient of some rows of a table [vocab_size, d]; all other rows have a gradient of zero.

    It replaces the table in the gradients, and has its `shape` and `dtype`. It is a pytree whose
    one leaf is `values`, so `jax.tree.map`, `optax.global_norm` and the like see the nonzero
    numbers of the dense gradient. The ids are static and belong to the trace that made them. To
    return a gradient from jit, or carry it through a loop, return its `ids` and `values` and make a
    new `RowGradient` from them. `add` adds gradients of different rows; `jax.tree.map` raises an
    error. Train with `te.rows.update`: `optimizer.update` and `optax.apply_updates` do not take a
    `RowGradient`. Inside your own `shard_map`, `jax.lax.psum` would add rows of different ids: sum
    the loss there, not its gradient.

    Args:
        ids: [k], int32, ascending and distinct; ids of vocab_size or above are padding.
        values: [k, d], the gradient of each row; zeros for padding.
        vocab_size: number of rows of the table.
        layout: that of an interleaved table: on each device, ids count from the start of its shard.
            None: of any other table.

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

    layout: Any = None

    def __add__(self, other: "RowGradient") -> "RowGradient":
        """The sum; it has the rows of both."""
        is_same = isinstance(other, RowGradient) and self.shape == other.shape
        if not is_same or self.layout != other.layout:
            want = f"rows of the same table, {list(self.shape)}"
            raise arguments.type_error("grads", want, type(other).__name__)
        check_ascending(self)
        check_ascending(other)
        sum_all = functools.partial(sum_rows, size=self.vocab_size)
        if self.layout is not None:
            sum_all = self.layout.on_shards(functools.partial(sum_rows, size=self.layout.shard))
        ids, values = sum_all([self.ids, other.ids], [self.values, other.values])
        return dataclasses.replace(self, ids=ids, values=values)

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


jax.tree_util.register_pytree_node(
    RowGradient,
    lambda rows: ((rows.values,), (_Ids(rows.ids), rows.vocab_size, rows.layout)),
    lambda data, values: RowGradient(data[0].ids, *values, *data[1:]),
)


def _on_host(ids: Any) -> np.ndarray | None:
    """The values of some ids, if they can be read."""
    if arguments.is_traced(ids):
        return None
    with jax.transfer_guard("allow"):
        return np.asarray(ids)


def check_ascending(gradient: RowGradient) -> None:
    """Raises a ValueError if the ids of a gradient made by hand, outside of jit, do not ascend."""
    ids = _on_host(gradient.ids) if gradient.layout is None else None
    if ids is not None and (np.diff(ids.astype(np.int64), prepend=-1) <= 0).any():
        want = "row ids that ascend from 0 or above, each of them once"
        raise arguments.value_error("grads", want, str(ids.tolist())[:60])


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
        ValueError: ids that do not ascend.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> one = te.rows.RowGradient(jnp.array([1, 3]), jnp.array([[1.0], [3.0]]), vocab_size=10)
        >>> other = te.rows.RowGradient(jnp.array([3, 8]), jnp.array([[0.5], [8.0]]), vocab_size=10)
        >>> total = te.rows.add({"t": one}, {"t": other})["t"]
        >>> total.ids[:3].tolist(), total.values[:3].tolist()
        ([1, 3, 8], [[1.0], [3.5], [8.0]])
    """
    return jax.tree.map(operator.add, grads, more, is_leaf=lambda g: isinstance(g, RowGradient))
