"""Training of large tables by the rows that a batch touches: the cost of a step follows the batch, not the vocabulary."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from transformer_embed import _checks
from transformer_embed.functional.lookup import Table, as_table, rows_at
from transformer_embed.large_tables.row_wise import state_owners

Tree = Any

BLOCK = 1024


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ids", "values"], meta_fields=["vocab_size"])
@dataclasses.dataclass(frozen=True, eq=False)
class Rows(Table):
    """Some rows of a table [vocab_size, d], in its place in a parameter tree: what `take` makes.

    `lookup`, and with it every module of this package, reads it as it reads the table. An id inside the vocabulary whose row is
    not held reads as NaN. Any other use is a TypeError: a model that also multiplies by the table, as a tied output layer does,
    has a gradient for every row, and must train the table densely.

    Args:
        ids: [k], int32, ascending and distinct; those past the vocabulary fill up and hold no row.
        values: [k, d], the rows.
        vocab_size: number of rows of the table.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> rows = te.rows.Rows(jnp.array([1, 3]), jnp.array([[1.0], [3.0]]), vocab_size=10)
        >>> rows.shape, te.lookup(rows, [3, 1, 2]).tolist()
        ((10, 1), [[3.0], [1.0], [nan]])

    Source:
        Own. The rows of a sparse gradient: TensorFlow's IndexedSlices, https://www.tensorflow.org/api_docs/python/tf/IndexedSlices
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
        """That of the table."""
        return self.values.dtype

    def gather(self, ids: Int32[Array, "..."]) -> Float[Array, "... d"]:
        """The row of each id, or NaN; an id beyond either end is the id at that end."""
        ids = jnp.clip(ids, 0, self.vocab_size - 1)
        slots = jnp.minimum(_count_below(self.ids, ids), len(self.ids) - 1)
        rows = rows_at(self.values, slots)
        return jnp.where((self.ids[slots] == ids)[..., None], rows, jnp.array(jnp.nan, rows.dtype))

    def logits(self, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """A TypeError: the gradient of an output layer has every row."""
        raise TypeError(_checks.wanted("table", "a whole table, trained densely, since the output layer is tied to it", "some of its rows"))


def take(params: Tree, ids: Tree, *, max_rows: int | None = None) -> Tree:
    """The parameters, each table that a batch reads by its ids replaced by the `Rows` that it touches.

    Of a table in shards, they are put together from the shards that hold them, on every device: the ids of the whole batch are sent, and
    a sum over the shards has each row once.

    Args:
        params: a parameter tree, of Haiku or any other.
        ids: a tree of dicts as `params`, with the integers that the model looks up, [...], where `params` has the table: all of
            them, padding and what lies outside the vocabulary among them. Repeats are welcome.
        max_rows: the most distinct ids of a table in a batch, where that is known to be less than their number: a smaller step. If
            a batch has more, the highest of them read as NaN: no row is left out in silence.

    Returns:
        The tree, each such table [vocab_size, d] a `Rows` of min(number of ids, vocab_size, max_rows) rows, at least 1; beyond 1024
        a multiple of it.

    Raises:
        TypeError: ids are not integers; a table has no floating dtype, or is `Rows` already.
        ValueError: `params` has nothing, or no table [vocab_size, d], where `ids` has an array; a table in shards that are not whole rows;
            a max_rows below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> params = {"embed": {"embeddings": jnp.arange(20.0).reshape(10, 2)}}
        >>> rows = te.rows.take(params, {"embed": {"embeddings": [[7, 2, 7]]}})["embed"]["embeddings"]
        >>> rows.ids.tolist(), rows.values[:2].tolist()
        ([2, 7, 12], [[4.0, 5.0], [14.0, 15.0]])

    Source:
        Own.
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=_is_table)
    places = jax.tree.unflatten(treedef, range(len(leaves)))
    bound = 2**31 if max_rows is None else _checks.integer("max_rows", max_rows, at_least=1)
    for path, place, some in _named(places, ids, "params"):
        table, integers = as_table(path, leaves[place]), _checks.as_int32("ids", some)
        if isinstance(table, Rows):
            raise TypeError(_checks.wanted(path, "a whole table", "some of its rows"))
        distinct = functools.partial(_distinct, table.shape[0], bound)
        if isinstance(table, Table):
            leaves[place] = table.take_rows(integers, distinct)
        else:
            held = distinct(integers)
            leaves[place] = Rows(held, _read(table, held), table.shape[0])
    return jax.tree.unflatten(treedef, leaves)


def update(optimizer: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, rows: Tree) -> tuple[Tree, Tree]:
    """The parameters and the state of an optimizer after one step, the tables' by the rows that the batch touches.

    What is no `Rows` trains as by `optimizer.update` and `optax.apply_updates`. Of a table, the rows with a gradient that is not
    all zeros are updated, with their rows of the state; every other row, and its rows of the state, stay as they are, bit for bit:
    those that the batch does not hold, the padding row, what is out of range. That is lazy, and differs from the dense optimizer
    where that moves a row without a gradient. Until its next gradient a row's moments do not decay, so momentum does not carry it
    on, and weight decay does not shrink it; step counts, and with them bias correction and schedules, go on for all rows. SGD
    without momentum and Adagrad, which leave such a row alone, train the same either way.

    Under jit with params and state donated, tables and state are written in place, at a cost that follows the batch. A table in shards
    is updated by each shard's own rows: only the gradient of the rows is sent, a sum over the devices that share the batch.

    Args:
        optimizer: of transformations that update a row by that row alone: sgd, momentum, adagrad, rmsprop, adam, adamw, lion, and
            chains of what these are made of. Any other is probed when the step is traced: on tables of 256 rows, with gradients
            of many magnitudes. A row's state that depends on a step counter is refused too, AMSGrad's for one, though its rows
            are apart: the probe cannot tell it from an accumulation of gradients.
        grads: the gradient by `rows`: jax.grad(loss, allow_int=True)(rows, ...), since a `Rows` has integers.
        state: that of optimizer.init(params).
        params: the parameters.
        rows: take(params, ...).

    Returns:
        (params, state).

    Raises:
        TypeError: the optimizer is none.
        ValueError: the optimizer's update of a row needs more than that row, as do clipping by a global norm, Adafactor, SM3, noise
            and the accumulation of gradients: the message names what does; trees that do not fit together.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import transformer_embed as te
        >>> params = {"embeddings": jnp.ones([5, 2]), "scale": jnp.array(2.0)}
        >>> loss = lambda params, ids: jnp.sum(params["scale"] * te.lookup(params["embeddings"], ids))
        >>> optimizer = optax.sgd(0.1)
        >>> state = optimizer.init(params)
        >>> def step(params, state, ids):
        ...     rows = te.rows.take(params, {"embeddings": ids})
        ...     grads = jax.grad(loss, allow_int=True)(rows, ids)
        ...     return te.rows.update(optimizer, grads, state, params, rows)
        >>> params, state = jax.jit(step, donate_argnums=(0, 1))(params, state, jnp.array([3, 3, 1]))
        >>> print(params["embeddings"][:, 0], params["scale"])
        [1.  0.8 1.  0.6 1. ] 1.4

    Source:
        Lazy Adam: https://www.tensorflow.org/addons/api_docs/python/tfa/optimizers/LazyAdam;
        https://docs.pytorch.org/docs/stable/generated/torch.optim.SparseAdam.html. Why the rows: https://github.com/jax-ml/jax/issues/851
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=_is_table)
    taken, gradients = _leaves("rows", treedef, rows), _leaves("grads", treedef, grads)
    _check_match(leaves, taken, gradients)
    state_leaves, state_treedef = jax.tree.flatten(state, is_leaf=_is_table)
    tables = [i for i, leaf in enumerate(taken) if isinstance(leaf, Rows)]
    owners = state_owners(optimizer, treedef, tuple(map(_struct, leaves)), tuple(tables), list(map(_struct, state_leaves)))
    step = functools.partial(_step, optimizer, treedef, state_treedef)

    # While one table is updated, every other has one row, whose update is not used.
    values = [_one_row(leaf) if isinstance(leaf, Rows) else leaf for leaf in taken]
    given = [_one_row(leaf) if isinstance(leaf, Rows) else leaf for leaf in gradients]
    held = [leaf if owner is None else _one_row(leaf) for leaf, owner in zip(state_leaves, owners, strict=True)]
    new_values, new_state = step(values, given, held)
    rest = jax.tree.map(lambda leaf: _one_row(leaf) if _is_table(leaf) else jnp.asarray(leaf), (values, given, held), is_leaf=_is_table)
    for table in tables:
        follow = [i for i, owner in enumerate(owners) if owner == table]
        in_place = functools.partial(_in_place, functools.partial(_by_rows, step, table, follow))
        whole, states = leaves[table], [state_leaves[i] for i in follow]
        some = (rest, taken[table], gradients[table].values)
        written = whole.update_rows(in_place, *some, states) if isinstance(whole, Table) else in_place(*some, [whole, *states])
        new_values, new_state = _put(new_values, [table], written[:1]), _put(new_state, follow, written[1:])
    return jax.tree.unflatten(treedef, new_values), jax.tree.unflatten(state_treedef, new_state)


def _step(
    optimizer: optax.GradientTransformation,
    treedef: Any,
    state_treedef: Any,
    values: Sequence[Array],
    gradients: Sequence[Array],
    state: Sequence[Array],
) -> tuple[list[Any], list[Any]]:
    """A step of an optimizer, from leaves to leaves."""
    params = jax.tree.unflatten(treedef, values)
    updates, after = optimizer.update(jax.tree.unflatten(treedef, gradients), jax.tree.unflatten(state_treedef, state), params)
    return jax.tree.leaves(optax.apply_updates(params, updates), is_leaf=_is_table), jax.tree.leaves(after, is_leaf=_is_table)


def _by_rows(
    step: Callable,
    table: int,
    follow: Sequence[int],
    rest: tuple[list[Any], list[Any], list[Any]],
    rows: Float[Array, "k d"],
    gradient: Float[Array, "k d"],
    states: Sequence[Array],
) -> tuple[Array, list[Array]]:
    """A step with these rows in one table's place, and theirs of the state: what becomes of them."""
    values, gradients, state = rest
    new_values, new_state = step(_put(values, [table], [rows]), _put(gradients, [table], [gradient]), _put(state, follow, states))
    return new_values[table], [new_state[i] for i in follow]


def _in_place(by_rows: Callable, rest: Any, rows: Rows, gradient: Array, wholes: list[Array]) -> list[Array]:
    """A table and its states after `by_rows(rest, rows, gradient, states' rows)`, read and written some rows at a time.

    A few rows stay in the processor's cache; all of them at once would ask the system for a new block of memory for each array.
    """
    size = len(rows.ids)
    block = BLOCK if size % BLOCK == 0 else size

    def update_block(i: ArrayLike, wholes: list[Array]) -> list[Array]:
        ids, values, changes = (jax.lax.dynamic_slice_in_dim(array, i * block, block) for array in (rows.ids, rows.values, gradient))
        old = [values, *(_read(whole, ids) for whole in wholes[1:])]
        new, new_states = by_rows(rest, values, changes, old[1:])
        moved = jnp.any(changes != 0, axis=-1)[:, None]
        return [_write(whole, ids, jnp.where(moved, *pair)) for whole, *pair in zip(wholes, [new, *new_states], old, strict=True)]

    return update_block(0, wholes) if size == block else jax.lax.fori_loop(0, size // block, update_block, wholes)


def _one_row(table: Any) -> Array:
    """Zeros in a table's place, as wide."""
    return jnp.zeros((1, table.shape[1]), table.dtype)


def _put(leaves: Sequence[Array], places: Sequence[int], new: Sequence[Array]) -> list[Array]:
    """The leaves, some of them replaced."""
    return [*(dict(enumerate(leaves)) | dict(zip(places, new, strict=True))).values()]


def _rounded_up(size: int) -> int:
    """To blocks, where there is more than one."""
    return size if size <= BLOCK else -(-size // BLOCK) * BLOCK


def _distinct(vocab_size: int, max_rows: int, ids: Int32[Array, "..."]) -> Int32[Array, "k"]:
    """The distinct ids, ascending, and the nearest row for one outside, filled up with distinct ones past the vocabulary."""
    size = _rounded_up(max(1, min(ids.size, vocab_size, max_rows)))
    if vocab_size + size > 2**31 - 1:
        raise ValueError(_checks.wanted("table", f"at most {2**31 - 1 - size} rows, to take {size} of them", vocab_size))
    ordered = jnp.sort(jnp.clip(ids.reshape(-1), 0, vocab_size - 1))
    first = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    slots = jnp.cumsum(first, dtype=jnp.int32) - 1
    return jnp.arange(vocab_size, vocab_size + size, dtype=jnp.int32).at[slots].set(ordered, mode="drop", indices_are_sorted=True)


def _count_below(ascending: Int32[Array, "k"], values: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """How many of the ascending ids are below each value: `jnp.searchsorted`, which older jax does not trace inside of a shard_map."""
    size = len(ascending)
    count = jnp.zeros_like(values)
    for step in (2**bit for bit in reversed(range(size.bit_length()))):
        further = count + step
        is_below = ascending[jnp.minimum(further, size) - 1] < values
        count = jnp.where((further <= size) & is_below, further, count)
    return count


def _read(table: Array, ids: Int32[Array, "k"]) -> Array:
    """The rows of ascending ids, anything for those past the vocabulary."""
    return table.at[ids].get(mode="clip", indices_are_sorted=True)


def _write(table: Array, ids: Int32[Array, "k"], rows: Array) -> Array:
    """The table with other rows at ascending, distinct ids; what is past the vocabulary is dropped."""
    return table.at[ids].set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)


def _is_table(leaf: Any) -> bool:
    return isinstance(leaf, Table)


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = (leaf.shape, leaf.dtype) if isinstance(leaf, Table) else (jnp.shape(leaf), jnp.result_type(leaf))
    return jax.ShapeDtypeStruct(shape, dtype)


def _named(params: Tree, ids: Tree, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Where `ids` has something other than a dict: the path, what `params` has there, and it."""
    if not isinstance(ids, Mapping):
        if not isinstance(params, int):
            raise ValueError(_checks.wanted(path, "a table, since ids has an array there", f"a {type(params).__name__}"))
        yield path, params, ids
        return
    for key, some in ids.items():
        here = f"{path}[{key!r}]"
        try:
            inner = params[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(_checks.wanted(here, "a table, since ids has it", "nothing")) from error
        yield from _named(inner, some, here)


def _leaves(name: str, treedef: Any, tree: Tree) -> list[Any]:
    """The leaves of a tree that is as the parameters, but for its `Rows`."""
    leaves, found = jax.tree.flatten(tree, is_leaf=_is_table)
    if found != treedef:
        raise ValueError(_checks.wanted(name, "a tree as params, with Rows for its tables", str(found)))
    return leaves


def _check_match(leaves: Sequence[Any], taken: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Rows of the tables that params has, and their gradients."""
    for leaf, rows, gradient in zip(leaves, taken, gradients, strict=True):
        if isinstance(rows, Rows) != isinstance(gradient, Rows):
            raise ValueError(_checks.wanted("grads", "the gradient by rows, a Rows where they have one", type(gradient).__name__))
        want = _struct(leaf).shape
        if isinstance(rows, Rows) and rows.shape != want:
            raise ValueError(_checks.wanted("rows", f"rows of a table {list(want)}", f"of one {list(rows.shape)}"))
