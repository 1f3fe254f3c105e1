"""Proves that an optimizer updates each row of a table from that row alone.

The step is traced with a prime in place of each table's number of rows; nothing is computed. An
axis of rows is an axis whose size is that prime. Each row of a value must be computed from the same
row of other values and from values that all rows share. Then the step on a block of rows gives the
rows of the whole step, unless the optimizer computes with the number of rows, or chooses by it.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from transformer_embed._src import arguments
from transformer_embed._src.rows.distinct_ids import BLOCK, most_distinct
from transformer_embed._src.rows.row_gradient import check_shapes, is_gradient


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Each row of the results is computed from the same row of the operands, if every result has an axis
# of rows. Nothing else has that size, so an axis of rows that an equation takes away and makes anew
# cannot go unseen. (A reshape may move rows: see `_problem`.)
KEEP_ROWS_APART = words(
    """
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type broadcast_in_dim cbrt ceil clamp complex concatenate conj
    convert_element_type copy cos cosh digamma div dot_general eq eq_to erf erf_inv erfc exp exp2
    expm1 floor gather ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma
    log log1p logistic lt lt_to max min mul mulhi name ne neg nextafter not or pcast polygamma
    population_count pow pvary real reduce_and reduce_max reduce_min reduce_or reduce_precision
    reduce_prod reduce_sum reduce_xor regularized_incomplete_beta rem reshape round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square
    squeeze stack stop_gradient sub tan tanh transpose unstack xor zeta
    """
)
# These compute nothing themselves: calls of other programs, by the names that jax has given them
# since 0.6, and a barrier.
CALLS = words(
    """
    checkpoint closed_call core_call core_closed_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr jit optimization_barrier pjit remat remat2
    """
)
# These take a window of their first operand.
TAKE = words("gather slice")
# Sizes of arrays are seldom above it, so a prime above is the size of nothing else.
LARGE = 2**16

ADVICE = (
    "Train the table densely, or keep that transformation off it with optax.multi_transform. "
    "To clip by a global norm, clip the gradients before the step"
)
# A transformation's name, in the qualified name of a function inside it.
UPDATE = re.compile(r"(?:^|\.)(\w+)(?:\.<locals>)?\.update\w*(?:\.|$)")

Leaves = dict[int, Any]


class Table(NamedTuple):
    """The arrays of a table among the leaves of (gradients, parameters, state, other arguments).

    Args:
        indices: of its gradient, of itself, and of its state.
        prime: a number in place of its number of rows.
        block_size: how many of its rows are updated at a time.
    """

    indices: list[int]
    prime: int
    block_size: int


def with_rows(leaves: Leaves, sizes: Sequence[tuple[Table, int]]) -> Leaves:
    """The leaves, with the shape of so many rows in place of each array of a table."""
    shapes = {
        n: jax.ShapeDtypeStruct((size, *leaves[n].shape[1:]), leaves[n].dtype)
        for table, size in sizes
        for n in table.indices
    }
    return leaves | shapes


def find_tables(init: Callable, treedef: Any, leaves: Leaves) -> list[Table]:
    """The tables of a step.

    Args:
        init: the optimizer's function.
        treedef: that of (gradients, parameters, state, other arguments).
        leaves: its leaves.
    """
    count = treedef.children()[0].num_leaves
    largest = max(sum((leaf.shape for leaf in leaves.values()), (LARGE,)))
    primes = filter(_is_prime, itertools.count(largest + 1))
    tables = []
    for n in filter(lambda n: is_gradient(leaves[n]), range(count)):
        gradient = leaves[n]
        gradient.check()
        block_size = most_distinct(len(gradient.ids), gradient.vocab_size, BLOCK)
        tables.append(Table([n, count + n], next(primes), block_size))
    _, params, state, _ = treedef.unflatten(leaves.values())
    check_shapes("state", jax.eval_shape(init, params), state)
    primed = with_rows(leaves, [(table, table.prime) for table in tables])
    states = _traced(init, treedef.unflatten(primed.values())[1], init)[1]
    for n, leaf in enumerate(jax.tree.leaves(states), 2 * count):
        for table in tables:
            if leaf.shape[:1] == (table.prime,):
                table.indices.append(n)
    _check_no_sums(treedef.children()[2], 2 * count, tables)
    return tables


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _check_no_sums(state_treedef: Any, first: int, tables: Sequence[Table]) -> None:
    """Raises a ValueError for `optax.apply_every`, whose sums are applied in some steps only."""
    # Slow to load, and only training needs it.
    import optax  # noqa: PLC0415

    def is_sum(node):
        return isinstance(node, optax.ApplyEvery)

    state = state_treedef.unflatten(range(first, first + state_treedef.num_leaves))
    sums = jax.tree.leaves([*filter(is_sum, jax.tree.leaves(state, is_leaf=is_sum))])
    if any(not {*sums}.isdisjoint(table.indices) for table in tables):
        reason = "a row without a gradient would miss the step in which its sum is applied"
        raise _refusal(reason, optax.apply_every)


def check(
    step: Callable[[Any], Any], leaves: Leaves, tables: Sequence[Table], update: Callable
) -> None:
    """Raises a ValueError unless a step computes each row of a table from that row alone.

    Args:
        step: from all leaves, with an array for each gradient, to those after the step.
        leaves: before the step.
        tables: see `find_tables`.
        update: the optimizer's function, to name in an error.
    """
    sizes = {table.prime: len(leaves[table.indices[1]]) for table in tables}
    before = with_rows(leaves, [(table, table.prime) for table in tables])
    program, after = _traced(step, before, update)
    for equation, sources in _equations(program):
        is_call = equation.primitive.name in CALLS
        if not is_call and (problem := _problem(equation, {*sizes})):
            raise _refusal(problem, update, sources)

    def described(array: Any) -> str:
        return f"{array.dtype}{[sizes.get(size, size) for size in array.shape]}"

    for n, new in after.items():
        old = before[n]
        has_rows = not sizes.keys().isdisjoint(old.shape + new.shape)
        if has_rows and (new.shape, new.dtype) != (old.shape, old.dtype):
            raise _refusal(f"{described(old)} becomes {described(new)}", update)


def _equations(program: Any, sources: tuple = ()) -> Iterator[tuple[Any, tuple]]:
    """All equations, those of inner programs first; with each, where the calls to it stand."""
    # Called programs may be without their constants.
    for equation in getattr(program, "jaxpr", program).eqns:
        stack = (*sources, equation.source_info)
        for param in jax.tree.leaves(equation.params):
            if isinstance(param, ClosedJaxpr | Jaxpr):
                yield from _equations(param, stack)
        yield equation, stack


def _traced(function: Callable, shapes: Any, blamed: Callable) -> tuple[ClosedJaxpr, Any]:
    """The program of a function of arrays of these shapes, and the shapes of its results."""
    try:
        return jax.make_jaxpr(function, return_shape=True)(shapes)
    except Exception as error:
        summary = f"{type(error).__name__}: {str(error).split(chr(10), 1)[0][:100]}"
        reason = f"cannot be traced with another number of rows ({summary})"
        raise _refusal(reason, blamed) from error


def _problem(equation: Any, primes: set[int]) -> str | None:
    """Why rows of the results may not be made from the same rows of the operands, if so."""
    name, params = equation.primitive.name, equation.params

    def rows_of(variable: Any) -> tuple[int, ...]:
        return tuple(size for size in variable.aval.shape if size in primes)

    rows = {*map(rows_of, equation.invars)} - {()}
    results = {*map(rows_of, equation.outvars)}
    if rows and name not in KEEP_ROWS_APART:
        return f"{name} is not known to keep rows apart"
    if not rows:
        is_alike = name == "broadcast_in_dim"
        if name == "iota":
            size = equation.outvars[0].aval.shape[params["dimension"]]
            is_alike = size not in primes
        if results - {()} and not is_alike:
            return f"{name} tells rows apart by their place in the table"
    elif len(rows | results) > 1 or (name in TAKE and not _takes_rows_apart(equation, primes)):
        return f"{name} over the rows"
    elif name == "reshape":
        # A row keeps its place if as many entries come before it.
        shapes = (variable.aval.shape for variable in (equation.invars[0], equation.outvars[0]))
        before, after = (math.prod(shape[: shape.index(next(iter(rows))[0])]) for shape in shapes)
        if params["dimensions"] or before != after:
            return "reshape over the rows"
    return None


def _takes_rows_apart(equation: Any, primes: set[int]) -> bool:
    """Whether a slice or gather takes a part of every row: whole axes of rows, without an index."""
    x, params = equation.invars[0].aval.shape, equation.params
    window = params.get("slice_sizes", equation.outvars[0].aval.shape)
    indexed = getattr(params.get("dimension_numbers"), "start_index_map", ())
    return all(
        size == part and axis not in indexed
        for axis, (size, part) in enumerate(zip(x, window, strict=True))
        if {size, part} & primes
    )


def _refusal(reason: str, function: Callable, sources: Sequence[Any] = ()) -> ValueError:
    """The error for an optimizer that is not row-wise.

    It names the transformation that wrote an equation, or one of the optimizer's functions.
    """
    name = getattr(function, "__qualname__", type(function).__name__).split(".")[0]
    got = f"{next(_transformations(sources), name)}: {reason}"
    want = "each row updated from that row alone"
    return ValueError(f"{arguments.wanted('optimizer', want, got)}. {ADVICE}.")


def _transformations(sources: Sequence[Any]) -> Iterator[str]:
    """The transformations that wrote an equation, from where the calls around it were written."""
    for source in sources:
        # The innermost call comes first, outside of this folder.
        frames = source.traceback.raw_frames()[0] if source.traceback else ()
        for code in frames:
            if Path(code.co_filename).parent == Path(__file__).parent:
                break
            if match := UPDATE.search(code.co_qualname):
                yield match[1]
