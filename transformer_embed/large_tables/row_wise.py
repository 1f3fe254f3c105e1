"""Whether an optax transformation updates a row of a table by that row alone: a list of those that do, and a probe for the others."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from transformer_embed import _checks

PROBE_ROWS, PROBE_WIDTH, PROBE_STEPS, PROBE_WATCHED = 256, 128, 3, 64
OTHER_MAGNITUDES = (0.0, 1e-6, 1e6, 1e15, np.inf, np.nan)
COUNTS = (2, 0, 1, 3, 7)
# Rounding may differ with the number of rows; what looks at other rows differs by more.
PROBE_TOLERANCE = 1e-3


def state_owners(
    optimizer: optax.GradientTransformation,
    treedef: Any,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    tables: tuple[int, ...],
    state: Sequence[jax.ShapeDtypeStruct],
) -> tuple[int | None, ...]:
    """For each leaf of the state the table whose rows it follows, once the optimizer has proved to be one of rows."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(_checks.wanted("optimizer", "an optax.GradientTransformation", type(optimizer).__name__))
    for part in _parts(optimizer):
        if _code(part) not in _ROW_WISE:
            _probe(part.init, part.update, treedef, shapes, tables)
    want, owners = _followers(optimizer.init, treedef, shapes, tables)
    if [leaf.shape for leaf in state] != list(want):
        raise ValueError(_checks.wanted("state", "that of optimizer.init(params)", "leaves of other shapes"))
    return owners


def _code(part: optax.GradientTransformation) -> Any:
    """The code of an update: what a transformation is, whatever its options."""
    return getattr(part.update, "__code__", None)


def _name(update: Callable) -> str:
    """The name under which optax has it."""
    return getattr(update, "__qualname__", type(update).__name__).split(".")[0]


def _parts(optimizer: optax.GradientTransformation) -> Iterator[optax.GradientTransformation]:
    """What a chain is made of, and the chains in it."""
    if _code(optimizer) is _CHAIN:
        inits = inspect.getclosurevars(optimizer.init).nonlocals["init_fns"]
        updates = inspect.getclosurevars(optimizer.update).nonlocals["update_fns"]
        for pair in zip(inits, updates, strict=True):
            yield from _parts(optax.GradientTransformation(*pair))
    elif _code(optimizer) is _WRAPPED:
        yield from _parts(inspect.getclosurevars(optimizer.update).nonlocals["tx"])
    else:
        yield optimizer


_WRAPPED = _code(optax.with_extra_args_support(optax.identity()))
_CHAIN = _code(optax.chain(optax.identity()))
# Each of these is held by a test against the same optimizer on whole tables.
_ROW_WISE = frozenset(
    _code(part)
    for part in (
        optax.identity(),
        optax.scale(1.0),
        optax.scale_by_schedule(optax.constant_schedule(1.0)),
        optax.trace(0.9),
        optax.scale_by_rss(),
        optax.scale_by_rms(),
        optax.scale_by_stddev(),
        optax.scale_by_adam(),
        optax.scale_by_lion(),
        optax.add_decayed_weights(0.1),
    )
)


@functools.lru_cache(maxsize=64)
def _followers(
    init: Callable, treedef: Any, shapes: tuple[jax.ShapeDtypeStruct, ...], tables: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int | None, ...]]:
    """The shape of each leaf of the state, and the table that it follows: the one whose rows and columns it has, and grows with."""

    def state(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(init, jax.tree.unflatten(treedef, shapes)))]

    here = state(shapes)
    owners: list[int | None] = [None] * len(here)
    for table in tables:
        for axis in range(2):
            grown = [jax.ShapeDtypeStruct(_longer(s.shape, axis), s.dtype) if i == table else s for i, s in enumerate(shapes)]
            for leaf, (shape, other) in enumerate(zip(here, state(grown), strict=True)):
                if shape != other:
                    if shape != shapes[table].shape or other != grown[table].shape:
                        raise ValueError(_not_row_wise(init, f"whose state has a leaf of shape {list(shape)}, not the table's"))
                    owners[leaf] = table
    return tuple(here), tuple(owners)


def _longer(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(n + (i == axis) for i, n in enumerate(shape))


def _not_row_wise(function: Callable, what: str) -> str:
    return _checks.wanted("optimizer", "transformations that update a row by that row alone", f"{_name(function)}, {what}")


@functools.lru_cache(maxsize=64)
def _probe(init: Callable, update: Callable, treedef: Any, shapes: tuple[jax.ShapeDtypeStruct, ...], tables: tuple[int, ...]) -> None:
    """Raises if a row's update, or its row of the state, changes with another row's gradient, with the rows that there are besides,
    or with a step counter in the state, as where gradients are accumulated.

    A trial is some steps, the gradients of the rows that are not watched of another magnitude in each.
    """
    shapes = tuple(_probe_shape(shape, i in tables) for i, shape in enumerate(shapes))
    owners = _followers(init, treedef, shapes, tables)[1]
    trial = jax.jit(functools.partial(_trial, init, update, treedef, tables, owners))
    rng = np.random.default_rng(0)
    watched = np.sort(rng.permutation(PROBE_ROWS)[:PROBE_WATCHED])
    params, gradients = _probe_values(rng, shapes, tables)

    def inputs(magnitude: float, count: int, rows: Any = slice(None)) -> tuple[list[np.ndarray], list[np.ndarray], np.int32]:
        given = [_scaled_but(watched, gradient, magnitude) if i in tables else gradient * magnitude for i, gradient in enumerate(gradients)]
        given = [gradient[:, rows] if i in tables else gradient for i, gradient in enumerate(given)]
        return [leaf[rows] if i in tables else leaf for i, leaf in enumerate(params)], given, np.int32(count)

    def outcome(found: Any, rows: Any = watched) -> list[list[np.ndarray]]:
        return [[np.asarray(leaf, np.float64)[rows] for leaf in leaves] for leaves in found]

    with np.errstate(all="ignore"):
        first, few = inputs(1.0, COUNTS[0]), inputs(1.0, COUNTS[0], watched)
        try:
            # Compiled ahead: called by its name, it would become a part of the step that is being traced.
            run, run_few = trial.lower(*first).compile(), trial.lower(*few).compile()
        except Exception as error:
            raise ValueError(_not_row_wise(update, f"which raised {type(error).__name__}")) from error
        want, alone = outcome(run(*first)), outcome(run_few(*few), slice(None))
        others = [outcome(run(*inputs(magnitude, COUNTS[0]))) for magnitude in OTHER_MAGNITUDES]
        counted = [outcome(run(*inputs(1.0, count)))[1] for count in COUNTS]
    if not all(_equal(want, other) for other in others):
        raise ValueError(_not_row_wise(update, "whose update of a row changes with another row's gradient"))
    if not _equal(want, alone, PROBE_TOLERANCE):
        raise ValueError(_not_row_wise(update, "whose update of a row changes with the rows beside it"))
    if not all(_equal([want[1]], [other]) for other in counted):
        raise ValueError(_not_row_wise(update, "whose state of a row changes with a step counter, as where gradients are accumulated"))


def _probe_shape(shape: jax.ShapeDtypeStruct, is_table: bool) -> jax.ShapeDtypeStruct:
    """A table wide enough for what factors large ones only, in a dtype for the magnitudes; the rest of the tree costs nothing."""
    if is_table:
        return jax.ShapeDtypeStruct((PROBE_ROWS, max(shape.shape[1], PROBE_WIDTH)), jnp.float32)
    return jax.ShapeDtypeStruct(tuple(min(n, 2) for n in shape.shape), shape.dtype)


def _probe_values(
    rng: np.random.Generator, shapes: Sequence[jax.ShapeDtypeStruct], tables: Sequence[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Parameters, and gradients with an axis of steps in front, the rows of a table over twelve magnitudes."""
    params = [rng.normal(size=shape.shape).astype(shape.dtype) for shape in shapes]
    gradients = [rng.normal(size=(PROBE_STEPS, *shape.shape)).astype(shape.dtype) for shape in shapes]
    for table in tables:
        gradients[table] *= 10.0 ** rng.uniform(-6, 6, (1, PROBE_ROWS, 1)).astype(shapes[table].dtype)
    return params, gradients


def _scaled_but(watched: np.ndarray, gradient: np.ndarray, magnitude: float) -> np.ndarray:
    scaled = gradient * np.array(magnitude, gradient.dtype)
    scaled[:, watched] = gradient[:, watched]
    return scaled


def _trial(
    init: Callable,
    update: Callable,
    treedef: Any,
    tables: Sequence[int],
    owners: Sequence[int | None],
    params: Sequence[Array],
    gradients: Sequence[Array],
    count: ArrayLike,
) -> tuple[list[Array], list[Array]]:
    """The last updates of the tables, and the leaves of the state that follow them, the counters having been set before the last step."""
    params = jax.tree.unflatten(treedef, params)
    state = init(params)
    updates = params
    for step in range(PROBE_STEPS):
        if step == PROBE_STEPS - 1:
            state = jax.tree.map(lambda leaf: jnp.full_like(leaf, count) if _is_counter(leaf) else leaf, state)
        updates, state = update(jax.tree.unflatten(treedef, [gradient[step] for gradient in gradients]), state, params)
    followers = [leaf for leaf, owner in zip(jax.tree.leaves(state), owners, strict=True) if owner is not None]
    return [jax.tree.leaves(updates)[table] for table in tables], followers


def _is_counter(leaf: Array) -> bool:
    return leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)


def _equal(some: list[list[np.ndarray]], others: list[list[np.ndarray]], tolerance: float = 0.0) -> bool:
    """Whether all agree, to a part of the row's largest entry; NaN agrees with NaN."""
    pairs = [pair for leaves in zip(some, others, strict=True) for pair in zip(*leaves, strict=True)]
    return all(_close(a, b, tolerance) for a, b in pairs)


def _close(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= tolerance * np.max(np.abs(a), axis=-1, keepdims=True)
    return bool(np.all(near | (a == b) | (np.isnan(a) & np.isnan(b))))
