"""Trains only the rows of a large table that a batch reads: the cost of a step follows the batch,
not the vocabulary."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from transformer_embed._src import arguments
from transformer_embed._src.functional.lookup import Table, as_table, not_whole_error, rows_at
from transformer_embed._src.rows import row_wise
from transformer_embed._src.rows.distinct_ids import count_below
from transformer_embed._src.rows.row_wise import SHARED

if TYPE_CHECKING:
    import optax

Tree = Any

BLOCK = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The gradient of some rows of a table [vocab_size, d]; all other rows have a gradient of zero.
    It replaces the table in the gradients.

    `Rows` is a pytree whose one leaf is `values`, so `jax.tree.map`, `optax.global_norm` and the
    like see the nonzero numbers of the dense gradient. The ids are static and belong to the trace
    that made them. To return a gradient from jit, or carry it through a loop, return its `ids` and
    `values` and make a new `Rows` from them. `add` adds gradients of different rows; `jax.tree.map`
    raises an error. Train with `te.rows.update`: `optimizer.update` and `optax.apply_updates` do
    not take a gradient with `Rows`. Inside your own `shard_map`, `jax.lax.psum` would add rows of
    different ids: sum the loss there, not its gradient.

    Args:
        ids: [k], int32, ascending and distinct; ids of vocab_size or above are padding.
        values: [k, d], the gradient of each row; zeros for padding.
        vocab_size: number of rows of the table.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> grads = {"t": te.rows.Rows(jnp.array([1, 3]), jnp.array([[3.0], [4.0]]), vocab_size=10)}
        >>> halves = jax.tree.map(lambda g: g / 2, grads)["t"]
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

    def __add__(self, other: "Rows") -> "Rows":
        """The sum; it has the rows of both."""
        if not isinstance(other, Rows) or other.shape != self.shape:
            raise TypeError(
                arguments.wanted(
                    "grads", f"rows of the same table, {list(self.shape)}", type(other).__name__
                )
            )
        if _Ids(self.ids) == _Ids(other.ids):
            return dataclasses.replace(self, values=self.values + other.values)
        ids = _distinct(self.vocab_size + 1, 2**31, jnp.concatenate([self.ids, other.ids]))
        zeros = jnp.zeros((len(ids), self.shape[1]), jnp.promote_types(self.dtype, other.dtype))
        first, second = (each._indices_in(ids) for each in (self, other))
        values = (
            zeros.at[first]
            .set(self.values, mode="drop")
            .at[second]
            .add(other.values, mode="drop", unique_indices=True)
        )
        return dataclasses.replace(self, ids=ids, values=values)

    def _indices_in(self, ids: Int32[Array, "m"]) -> Int32[Array, "k"]:
        """The index of each own id in `ids`; padding gets distinct indices past the end, so that a
        GPU needs no atomic sum."""
        past = len(ids) + jnp.arange(len(self.ids), dtype=jnp.int32)
        return jnp.where(self.ids < self.vocab_size, count_below(ids, self.ids), past)

    def __radd__(self, other: Any) -> NoReturn:
        """Raises a TypeError: `optax.apply_updates` does not take `Rows`."""
        want = "a step by te.rows.update(optimizer, grads, state, params)"
        raise TypeError(
            arguments.wanted("params", want, f"the sum of {type(other).__name__} and Rows")
        )


class _Ids:
    """Ids as static data of a pytree: equal if they are the same array or, outside of jit, have the
    same values."""

    def __init__(self, ids: Any):
        self.ids = ids

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Ids):
            return False
        if self.ids is other.ids:
            return True
        both = (self.ids, other.ids)
        if not all(
            isinstance(ids, jax.Array | np.ndarray) and not arguments.is_traced(ids) for ids in both
        ):
            return False
        with jax.transfer_guard("allow"):
            return np.array_equal(np.asarray(self.ids), np.asarray(other.ids))

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "the ids of one batch (te.rows.add adds gradients of different ids)"


def flatten_with_keys(rows: Rows) -> tuple[Any, Any]:
    """The values, and the static data."""
    return ((jax.tree_util.GetAttrKey("values"), rows.values),), (
        type(rows),
        _Ids(rows.ids),
        rows.vocab_size,
    )


def _unflatten(kept: Any, values: Any) -> Rows:
    kind, ids, vocab_size = kept
    return kind(ids.ids, *values, vocab_size)


jax.tree_util.register_pytree_with_keys(Rows, flatten_with_keys, _unflatten)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ids", "values"], meta_fields=["vocab_size"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class TakenRows(Table):
    """Some rows of a table. It replaces the table in the parameters that a loss reads.

    `lookup`, and so every module of this package, reads it like the table. An id inside the
    vocabulary whose row is not held reads as NaN. Any other use is a TypeError: a model that also
    multiplies by the table, as a tied output layer does, has a gradient for every row, and must
    train the table densely.

    Args:
        ids: [k], int32, ascending and distinct; ids of vocab_size or above are padding.
        values: [k, d], the rows.
        vocab_size: number of rows of the table.
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
        """The row of each id, or NaN; an id outside the vocabulary reads the first or the last
        row."""
        if self.ids.dtype != jnp.int32:
            raise TypeError(
                arguments.wanted(
                    "table",
                    "rows with int32 ids (map over floating leaves only)",
                    f"ids of {self.ids.dtype}",
                )
            )
        ids = jnp.clip(ids, 0, self.vocab_size - 1)
        slots = jnp.minimum(count_below(self.ids, ids), len(self.ids) - 1)
        rows = rows_at(self.values, slots)
        return jnp.where((self.ids[slots] == ids)[..., None], rows, jnp.array(jnp.nan, rows.dtype))

    def logits(self, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """Raises a TypeError: the gradient of an output layer has every row."""
        raise not_whole_error()

    def gradient(self, values: Float[Array, "k d"]) -> Rows:
        """The gradient of these rows."""
        # XLA copies a table that may be overwritten before it is read: with this zero, the update
        # waits for the read.
        zero = jnp.isnan(self.values[0, 0]).astype(jnp.int32) >> 1
        return Rows(self.ids + zero, values, self.vocab_size)


def value_and_grad(
    loss: Callable, *, ids: Tree, has_aux: bool = False, max_rows: int | Tree | None = None
) -> Callable:
    """`jax.value_and_grad` for a loss that reads large tables: a table's gradient holds only the
    rows that the batch reads.

    Like `jax.value_and_grad`, it differentiates the first argument. For a sharded table, every
    device receives the rows of the whole batch: ids are all-gathered and one all-reduce over the
    shards collects the rows. For a dealt table, each device receives the rows of its own part of
    the batch from their owners (see `deal` of `sharding.shard_params`).

    Args:
        loss: a function of (params, ...) to a scalar, or to (scalar, aux). It reads the tables in
            `ids` only by `lookup`.
        ids: a tree of dicts like `params`. In a table's place it has all ids that the loss looks
            up, [...], including padding and ids outside the vocabulary. Ids may repeat.
        has_aux: whether the loss returns (scalar, aux).
        max_rows: a bound on the distinct ids of a table in a batch; a bound below the number of ids
            makes the step cheaper. An int, or a tree like `ids` with an int for each table that has
            a bound. If a batch has more, the highest ids read as NaN. For a dealt table it bounds
            the distinct ids of each device's part of the batch, and so the buffers of the exchange.

    Returns:
        A function of (params, ...) to (value, gradients), or to ((value, aux), gradients). The
        gradients are a tree like `params`, with `Rows` for each table in `ids`: min(number of ids,
        vocab_size, max_rows) rows, at least 1, and above 1024 rounded up to a multiple of 1024. For
        a dealt table, the number of rows on each device is the largest number that it can be asked
        for.

    Raises:
        TypeError: ids are not integers; a table does not have a floating dtype; the loss uses a
            table other than by `lookup`.
        ValueError: `params` has no table [vocab_size, d] where `ids` has an array; a sharded table
            whose columns are split; a max_rows below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> params = {"embed": {"embeddings": jnp.arange(20.0).reshape(10, 2)}}
        >>> ids = jnp.array([7, 2, 7])
        >>> loss = lambda params: jnp.sum(te.lookup(params["embed"]["embeddings"], ids))
        >>> value, grads = te.rows.value_and_grad(loss, ids={"embed": {"embeddings": ids}})(params)
        >>> rows = grads["embed"]["embeddings"]
        >>> float(value), rows.ids.tolist(), rows.values.tolist()
        (67.0, [2, 7, 12], [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    """

    @functools.wraps(loss)
    def value_and_row_grads(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        leaves, treedef = jax.tree.flatten(params, is_leaf=_is_table)
        taken = _take_tables(leaves, treedef, ids, max_rows)

        def loss_of(leaves: Sequence[Any]) -> Any:
            filled = [
                dataclasses.replace(taken[i], values=leaf) if i in taken else leaf
                for i, leaf in enumerate(leaves)
            ]
            return loss(jax.tree.unflatten(treedef, filled), *args, **kwargs)

        floats = [taken[i].values if i in taken else leaf for i, leaf in enumerate(leaves)]
        value, gradients = jax.value_and_grad(loss_of, has_aux=has_aux)(floats)
        gradients = [
            taken[i].gradient(leaf) if i in taken else leaf for i, leaf in enumerate(gradients)
        ]
        return value, jax.tree.unflatten(treedef, gradients)

    return value_and_row_grads


def add(grads: Tree, more: Tree) -> Tree:
    """Adds two gradients of the same parameters, which may hold different rows. Use it to
    accumulate gradients.

    If both have the same ids, `jax.tree.map(jax.numpy.add, grads, more)` works as well.

    Args:
        grads: gradients that `value_and_grad` returned.
        more: others, of the same parameters.

    Returns:
        The sum. A sum of `Rows` has the rows of both, at most vocab_size.

    Raises:
        TypeError: rows of different tables.
        ValueError: trees that do not fit together.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> one = {"t": te.rows.Rows(jnp.array([1, 3]), jnp.array([[1.0], [3.0]]), vocab_size=10)}
        >>> other = {"t": te.rows.Rows(jnp.array([3, 8]), jnp.array([[0.5], [8.0]]), vocab_size=10)}
        >>> total = te.rows.add(one, other)["t"]
        >>> total.ids[:3].tolist(), total.values[:3].tolist()
        ([1, 3, 8], [[1.0], [3.5], [8.0]])
    """
    some, treedef = jax.tree.flatten(grads, is_leaf=_is_rows)
    others, found = jax.tree.flatten(more, is_leaf=_is_rows)
    if found != treedef:
        raise ValueError(arguments.wanted("more", f"a tree as grads, {treedef}", str(found)))
    return jax.tree.unflatten(treedef, map(operator.add, some, others))


def update(
    optimizer: "optax.GradientTransformation",
    grads: Tree,
    state: Tree,
    params: Tree,
    **extra_args: Any,
) -> tuple[Tree, Tree]:
    """One step of an optimizer that updates, in each table, only the rows with a gradient.

    Parameters whose gradient is not `Rows` are updated by `optimizer.update` and
    `optax.apply_updates` as usual. In a table, only the rows with a nonzero gradient change,
    together with their optimizer state. Every other row stays the same bit for bit, including rows
    that the batch does not read and the padding row; ids out of range change nothing. Such a lazy
    update differs from the dense one if the dense optimizer moves rows without a gradient: until
    its next gradient, a row's moments do not decay, momentum does not move it, and weight decay
    does not shrink it. Step counts, and so bias correction and schedules, advance for all rows. SGD
    without momentum and Adagrad leave rows without a gradient alone, so they train the same either
    way.

    Under jit with params and state donated, tables and state are written in place, at a cost that
    follows the batch. In a sharded table, each shard updates its own rows: only their gradient is
    sent, by one all-reduce over the devices that share the batch.

    When a step is traced, `update` traces the optimizer and follows the data to prove that each row
    is updated from that row alone. Adam, Adagrad, Lion and most others pass, with schedules, masks
    and labels. Global norms, Adafactor, noise and gradient accumulation (`optax.MultiSteps`) do
    not. To clip by a global norm, clip the gradients before `update`.

    Args:
        optimizer: an optax optimizer.
        grads: the gradients that `value_and_grad` returned.
        state: that of optimizer.init(params).
        params: the parameters.
        **extra_args: handed to optimizer.update.

    Returns:
        (params, state).

    Raises:
        TypeError: the optimizer does not have `init` and `update`, as those of optax do.
        ValueError: the optimizer may update a row from other rows (the message names the
            transformation and the reason); trees that do not fit together; a gradient from another
            trace.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import transformer_embed as te
        >>> params = {"embeddings": jnp.ones([5, 2]), "scale": jnp.array(2.0)}
        >>> loss = lambda params, ids: jnp.sum(params["scale"] * te.lookup(params["embeddings"], ids))
        >>> optimizer = optax.sgd(0.1)
        >>> state = optimizer.init(params)
        >>> def step(params, state, ids):
        ...     value, grads = te.rows.value_and_grad(loss, ids={"embeddings": ids})(params, ids)
        ...     params, state = te.rows.update(optimizer, grads, state, params)
        ...     return params, state, value
        >>> params, state, value = jax.jit(step, donate_argnums=(0, 1))(params, state, jnp.array([3, 3, 1]))
        >>> print(params["embeddings"][:, 0], params["scale"])
        [1.  0.8 1.  0.6 1. ] 1.4

    Source:
        Lazy Adam: https://www.tensorflow.org/addons/api_docs/python/tfa/optimizers/LazyAdam;
        https://docs.pytorch.org/docs/stable/generated/torch.optim.SparseAdam.html. Why the rows:
        https://github.com/jax-ml/jax/issues/851
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            arguments.wanted(
                "optimizer", "an optax.GradientTransformation", type(optimizer).__name__
            )
        )
    leaves, treedef = jax.tree.flatten(params, is_leaf=_is_table)
    gradients = _checked_gradients(leaves, treedef, grads)
    tables = {index: leaf for index, leaf in enumerate(gradients) if isinstance(leaf, Rows)}
    state_leaves, state_treedef = jax.tree.flatten(state, is_leaf=_is_table)
    plain = [
        _shape_and_dtype(leaf) if index in tables else leaf for index, leaf in enumerate(leaves)
    ]
    follows = row_wise.state_owners(
        optimizer,
        treedef,
        plain,
        tuple(tables),
        list(map(_state_shape_and_dtype, state_leaves)),
        _is_table,
    )

    # The optimizer sees tables that are updated by rows, and their state, as plain arrays.
    own = [index if index in tables else None for index in range(len(leaves))]
    trees = (
        (treedef, gradients, own),
        (state_treedef, state_leaves, follows),
        (treedef, leaves, own),
    )
    inputs_of_step = (*(_plain_tree(*each) for each in trees), extra_args)
    owners = (*(_owner_tree(*each) for each in trees), jax.tree.map(lambda _: SHARED, extra_args))
    sizes = {
        index: (leaves[index].shape[0], _block_size(len(rows.ids), leaves[index].shape[0]))
        for index, rows in tables.items()
    }
    split = row_wise.split_step(optimizer, inputs_of_step, owners, sizes)

    (new_params, new_state), needs = split.run_shared(inputs_of_step)
    new_leaves, new_states = (
        jax.tree.leaves(tree, is_leaf=_is_table) for tree in (new_params, new_state)
    )
    for index, rows in tables.items():
        whole, follow = leaves[index], [i for i, owner in enumerate(follows) if owner == index]
        step = functools.partial(
            _update_in_blocks, functools.partial(split.run_rows, index), sizes[index][1]
        )
        states = [state_leaves[i] for i in follow]
        if isinstance(whole, Table):
            written = whole.update_rows(step, needs[index], rows, states)
        else:
            written = step(needs[index], rows.ids, rows.values, [whole, *states])
        new_leaves[index], new_states = written[0], _replace_at(new_states, follow, written[1:])
    return jax.tree.unflatten(treedef, new_leaves), jax.tree.unflatten(state_treedef, new_states)


def _take_tables(
    leaves: Sequence[Any], treedef: Any, ids: Tree, max_rows: int | Tree | None
) -> dict[int, TakenRows]:
    """The rows that a batch reads from each table in `ids`, by the table's index among the
    leaves."""
    indices = jax.tree.unflatten(treedef, range(len(leaves)))
    named = list(_tables_at_ids(indices, ids, "params"))
    if isinstance(max_rows, Mapping):
        bounds = {index: bound for _, index, bound in _tables_at_ids(indices, max_rows, "params")}
    else:
        bounds = dict.fromkeys((index for _, index, _ in named), max_rows)
    taken = {}
    for path, index, some in named:
        table, integers = as_table(path, leaves[index]), arguments.as_int32("ids", some)
        if isinstance(table, TakenRows):
            raise TypeError(arguments.wanted(path, "a whole table", "some of its rows"))
        bound = bounds.get(index)
        bound = 2**31 if bound is None else arguments.integer("max_rows", bound, at_least=1)
        distinct = functools.partial(_distinct, table.shape[0], bound)
        if isinstance(table, Table):
            taken[index] = table.take_rows(integers, distinct)
        else:
            held = distinct(integers)
            taken[index] = TakenRows(held, _read(table, held), table.shape[0])
    return taken


def _update_in_blocks(
    by_rows: Callable,
    block: int,
    needed: Any,
    ids: Int32[Array, "k"],
    gradient: Float[Array, "k d"],
    wholes: Sequence[Array],
) -> list[Array]:
    """A table and its states after `by_rows(needed, [gradient, *states' rows, rows])`, read and
    written one block of rows at a time.

    A block stays in the processor's cache; all rows at once would allocate new memory for each
    array. There may be any number of ids. They ascend, and ids past the end of the table are
    padding.
    """
    padding = -len(ids) % block
    if padding:
        past = jnp.maximum(ids[-1] + 1, wholes[0].shape[0]) + jnp.arange(padding, dtype=jnp.int32)
        ids, gradient = jnp.concatenate([ids, past]), jnp.pad(gradient, ((0, padding), (0, 0)))

    def update_block(i: Any, wholes: list[Array]) -> list[Array]:
        some, changes = (
            jax.lax.dynamic_slice_in_dim(array, i * block, block) for array in (ids, gradient)
        )
        old = [_read(whole, some) for whole in wholes]
        new = by_rows(needed, [changes, *old[1:], old[0]])
        moved = jnp.any(changes != 0, axis=-1)
        return [
            _write(whole, some, jnp.where(_expand_like(moved, b), b, a))
            for whole, a, b in zip(wholes, old, new, strict=True)
        ]

    wholes = list(map(jnp.asarray, wholes))
    return (
        update_block(0, wholes)
        if len(ids) == block
        else jax.lax.fori_loop(0, len(ids) // block, update_block, wholes)
    )


def _expand_like(moved: Array, rows: Array) -> Array:
    return moved.reshape(-1, *[1] * (rows.ndim - 1))


def _block_size(size: int, vocab_size: int) -> int:
    """How many rows are updated at a time. Never the table's size, so that the proof can tell the
    two apart."""
    block = min(size, BLOCK)
    return block + 1 if block == vocab_size else block


def _replace_at(leaves: Sequence[Any], indices: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """The leaves, some of them replaced."""
    return [*(dict(enumerate(leaves)) | dict(zip(indices, new, strict=True))).values()]


def _rounded_up(size: int) -> int:
    """A multiple of the block size if there is more than one block."""
    return size if size <= BLOCK else -(-size // BLOCK) * BLOCK


def _distinct(vocab_size: int, max_rows: int, ids: Int32[Array, "..."]) -> Int32[Array, "k"]:
    """The distinct ids, ascending and clipped to the vocabulary, then distinct ids of vocab_size or
    above as padding."""
    size = _rounded_up(max(1, min(ids.size, vocab_size, max_rows)))
    if vocab_size + size > 2**31 - 1:
        raise ValueError(
            arguments.wanted(
                "table", f"at most {2**31 - 1 - size} rows, to take {size} of them", vocab_size
            )
        )
    ordered = jnp.sort(jnp.clip(ids.reshape(-1), 0, vocab_size - 1))
    first = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    slots = jnp.cumsum(first, dtype=jnp.int32) - 1
    return (
        jnp.arange(vocab_size, vocab_size + size, dtype=jnp.int32)
        .at[slots]
        .set(ordered, mode="drop", indices_are_sorted=True)
    )


def _read(table: Array, ids: Int32[Array, "k"]) -> Array:
    """The rows of ascending ids; an id past the vocabulary reads an arbitrary row."""
    return table.at[ids].get(mode="clip", indices_are_sorted=True)


def _write(table: Array, ids: Int32[Array, "k"], rows: Array) -> Array:
    """The table with new rows at ascending, distinct ids; ids past the vocabulary are dropped."""
    return table.at[ids].set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)


def _is_table(leaf: Any) -> bool:
    return isinstance(leaf, Table)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, Rows)


def _shape_and_dtype(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, or of the table that a leaf stands for."""
    shape, dtype = (
        (leaf.shape, leaf.dtype)
        if isinstance(leaf, Table | Rows)
        else (jnp.shape(leaf), jnp.result_type(leaf))
    )
    return jax.ShapeDtypeStruct(shape, dtype)


def _state_shape_and_dtype(leaf: Any) -> jax.ShapeDtypeStruct:
    try:
        return _shape_and_dtype(leaf)
    except TypeError as error:
        raise TypeError(
            arguments.wanted(
                "state", "the arrays of optimizer.init(params)", f"a {type(leaf).__name__}"
            )
        ) from error


def _plain_tree(treedef: Any, leaves: Sequence[Any], owners: Sequence[int | None]) -> Tree:
    """The tree, with shapes in place of arrays that are updated by rows."""
    return jax.tree.unflatten(
        treedef,
        [
            leaf if owner is None else _shape_and_dtype(leaf)
            for leaf, owner in zip(leaves, owners, strict=True)
        ],
    )


def _owner_tree(treedef: Any, leaves: Sequence[Any], owners: Sequence[int | None]) -> Tree:
    """A tree with the owner of each array."""
    marked = [
        jax.tree.map(lambda _: SHARED, leaf) if owner is None else owner
        for leaf, owner in zip(leaves, owners, strict=True)
    ]
    return jax.tree.unflatten(treedef, marked)


def _tables_at_ids(params: Tree, ids: Tree, path: str) -> Iterator[tuple[str, Any, Any]]:
    """For each leaf of `ids` (anything but a dict): its path, the entry of `params` at that path,
    and the leaf."""
    if not isinstance(ids, Mapping):
        if not isinstance(params, int):
            got = f"a {type(params).__name__} that holds {_paths(params)}; name it in ids as well"
            raise ValueError(arguments.wanted(path, "a table, since ids has an array there", got))
        yield path, params, ids
        return
    for key, some in ids.items():
        here = f"{path}[{key!r}]"
        try:
            inner = params[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                arguments.wanted(
                    here, "a table, since ids has it", f"nothing ({path} holds {_paths(params)})"
                )
            ) from error
        yield from _tables_at_ids(inner, some, here)


def _paths(params: Tree) -> str:
    """The first few paths of a tree of parameters."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return (
        ", ".join(path or "an array" for path in paths[:4])
        + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
        or "nothing"
    )


def _checked_gradients(leaves: Sequence[Any], treedef: Any, grads: Tree) -> list[Any]:
    """The leaves of a gradient of the parameters: `Rows` for some tables."""
    gradients, found = jax.tree.flatten(grads, is_leaf=lambda leaf: isinstance(leaf, Rows | Table))
    if found != treedef:
        raise ValueError(
            arguments.wanted("grads", "a tree as params, with Rows for some tables", str(found))
        )
    for leaf, rows in zip(leaves, gradients, strict=True):
        if not isinstance(rows, Rows):
            continue
        want = _shape_and_dtype(leaf).shape
        if rows.shape != want:
            raise ValueError(
                arguments.wanted(
                    "grads", f"rows of a table {list(want)}", f"of one {list(rows.shape)}"
                )
            )
        if len(rows.ids) != len(rows.values):
            raise ValueError(
                arguments.wanted(
                    "grads", f"a row for each of {len(rows.ids)} ids", f"{len(rows.values)} rows"
                )
            )
        _check_trace(rows.ids)
    return gradients


def _check_trace(ids: Any) -> None:
    """Raises if a gradient's ids belong to another trace, or would become constants of this one."""
    remedy = "(its ids stay behind: return .ids and .values, and make Rows of them)"
    want = "a gradient made by value_and_grad in the same jit, scan or shard_map"
    try:
        now = jnp.add(ids, 0)
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(arguments.wanted("grads", want, f"one from another {remedy}")) from error
    if arguments.is_traced(now) and not arguments.is_traced(ids):
        raise ValueError(arguments.wanted("grads", want, f"one from outside {remedy}"))
