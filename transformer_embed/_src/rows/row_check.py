"""Checks that an optimizer updates each row of a table from that row alone.

The step is traced with a prime in place of each table's number of rows; nothing is computed. An
axis of rows is an axis whose size is that prime. Each row of a value must be computed from the same
row of other values and from values that all rows share. The programs for the whole table and for a
block of its rows must compute the same as that one. Then a block's program gives the rows that the
whole program would. (The proved program itself does not run: inside shard_map and under explicit
axes, arrays have types that it was not traced with.)

What all rows share must not decide when a sum of gradients is used; see `switches`.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from transformer_embed._src import arguments
from transformer_embed._src.rows.distinct_ids import BLOCK, most_distinct
from transformer_embed._src.rows.programs import are_same, called, equations, words
from transformer_embed._src.rows.row_gradient import (
    RowGradient,
    check_shapes,
    is_gradient,
    is_leaf,
)
from transformer_embed._src.rows.switches import find_switch

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
# These take a window of their first operand.
TAKE = words("gather slice")
REASONS = {"cond": "one condition for the whole table decides how its rows are updated"}
# The params of an equation that contain sizes of arrays.
SIZES = words("shape new_sizes limit_indices sizes slice_sizes")
# Sizes of arrays are seldom above it, so a prime above is the size of nothing else.
LARGE = 2**16

DIFFERS = "a program that depends on the number of rows"
UNTRACED = "for another number of rows, it"
ADVICE = (
    "Train the table densely, or keep that transformation off it with optax.multi_transform. "
    "To clip by a global norm, clip the gradients before update"
)
# A transformation's name, in the qualified name of a function inside it.
UPDATE = re.compile(r"(?:^|\.)(\w+)(?:\.<locals>)?\.update\w*(?:\.|$)")

Shape = jax.ShapeDtypeStruct


class Tables(NamedTuple):
    """The tables of a step, each by a prime in place of its number of rows.

    Attributes:
        leaves: those of (gradients, parameters, state, other arguments).
        indices: those of a table's gradient, of the table and of its state among the leaves.
        vocab_sizes: the number of rows of each table.
        block_sizes: how many of them are updated at a time.
    """

    leaves: dict[int, Any]
    indices: Mapping[Any, list[int]]
    vocab_sizes: Mapping[Any, int]
    block_sizes: Mapping[Any, int]

    def rows(self, sizes: Mapping[Any, int]) -> dict[int, Shape]:
        """The shape at each index of a table, with a number in place of its prime, if given."""
        return {
            n: Shape((sizes.get(prime, prime), *self.leaves[n].shape[1:]), self.leaves[n].dtype)
            for prime, indices in self.indices.items()
            for n in indices
        }


def find_tables(init: Callable, treedef: Any, leaves: dict[int, Any]) -> Tables:
    """The tables of a step.

    Args:
        init: the optimizer's function.
        treedef: that of (gradients, parameters, state, other arguments).
        leaves: its leaves.
    """
    size = treedef.children()[0].num_leaves
    gradients = [n for n in range(size) if is_gradient(leaves[n])]
    for n in gradients:
        leaves[n].check(leaves[size + n].shape)
    primes = _primes_above_sizes(leaves)
    indices = {next(primes): [n, size + n] for n in gradients}
    vocab_sizes, block_sizes = (
        {prime: rows(leaves[n]) for prime, (n, _) in indices.items()}
        for rows in (operator.attrgetter("vocab_size"), _block_size)
    )
    tables = Tables(leaves, indices, vocab_sizes, block_sizes)
    first, expected = (
        _traced(init, treedef.unflatten((leaves | tables.rows(sizes)).values())[1], init, "init")[1]
        for sizes in ({}, vocab_sizes)
    )
    check_shapes("state", expected, treedef.unflatten(leaves.values())[2])
    if jax.tree.structure(first, is_leaf=is_leaf) != treedef.children()[2]:
        raise _refusal("init depends on the number of rows", init)
    for index, leaf in enumerate(jax.tree.leaves(first, is_leaf=is_leaf), 2 * size):
        prime, *columns = leaf.shape or (0,)
        if (vocab_sizes.get(prime), *columns) == leaves[index].shape:
            indices[prime].append(index)
    return tables


def _primes_above_sizes(leaves: dict[int, Any]) -> Iterator[int]:
    largest = max(LARGE, *sum((leaf.shape for leaf in leaves.values()), ()))
    return filter(_is_prime, itertools.count(largest + 1))


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _block_size(gradient: RowGradient) -> int:
    return most_distinct(len(gradient.ids), gradient.vocab_size, BLOCK)


def check(step: Callable[[Any], Sequence[Any]], tables: Tables, update: Callable) -> None:
    """Raises a ValueError unless a step on a block of rows gives the rows of the whole step.

    Args:
        step: from all leaves, with an array for each leaf of a table, to those after the step.
        tables: see `find_tables`.
        update: the optimizer's function, to name in an error.
    """

    # The whole table first, for an error that has nothing to do with another number of rows.
    of_all_rows, program, block = (
        _traced(step, tables.leaves | tables.rows(sizes), update, what)[0]
        for sizes, what in (
            (tables.vocab_sizes, "update"),
            ({}, UNTRACED),
            (tables.block_sizes, UNTRACED),
        )
    )
    _check_rows_apart(program, tables, update)
    is_same = are_same(program, of_all_rows, tables.vocab_sizes)
    # An optimizer may choose by the number of rows, which no prime above equals.
    if not is_same or not are_same(program, block, tables.block_sizes):
        raise _refusal(DIFFERS, update)


def _check_rows_apart(program: ClosedJaxpr, tables: Tables, update: Callable) -> None:
    """Raises a ValueError unless a step computes each row from that row alone; see `check`."""
    rows, sizes = tables.rows({}), tables.vocab_sizes
    for equation, sources in equations(program):
        is_passed = called(equation) or equation.primitive.name == "optimization_barrier"
        if not is_passed and (problem := _problem(equation, {*sizes})):
            raise _refusal(problem, update, sources)

    def described(shape: Any) -> str:
        return f"{shape.dtype}{[sizes.get(size, size) for size in shape.shape]}"

    for index, new in enumerate(program.out_avals):
        old = rows.get(index)
        if old is None and not sizes.keys().isdisjoint(new.shape):
            what = "parameters or state outside the table"
            raise _refusal(f"{what} become one row for each of its rows", update)
        if old is not None and (new.shape, new.dtype) != (old.shape, old.dtype):
            raise _refusal(f"a state {described(old)} becomes {described(new)}", update)
    if switch := find_switch(program, [*tables.indices.values()]):
        raise _refusal(switch[0], update, switch[1])


def _traced(
    function: Callable, shapes: Any, blamed: Callable, what: str
) -> tuple[ClosedJaxpr, Any]:
    """The program of a function of arrays of these shapes, and the shapes of its results."""
    try:
        return jax.make_jaxpr(function, return_shape=True)(shapes)
    except Exception as error:
        summary = f"{type(error).__name__}: {str(error).split(chr(10), 1)[0][:100]}"
        raise _refusal(f"{what} cannot be traced ({summary})", blamed) from error


def _problem(equation: Any, primes: set[int]) -> str | None:
    """Why rows of the results may not be made from the same rows of the operands, if so."""
    name, params = equation.primitive.name, equation.params

    def rows_of(variable: Any) -> tuple[int, ...]:
        return tuple(size for size in variable.aval.shape if size in primes)

    rows = {*map(rows_of, equation.invars)} - {()}
    results = {*map(rows_of, equation.outvars)}
    if (rows and name not in KEEP_ROWS_APART) or (results and name.endswith("callback")):
        return REASONS.get(name, f"{name} is not known to keep rows apart")
    others = [param for key, param in params.items() if key not in SIZES]
    if any(isinstance(param, int) and param in primes for param in jax.tree.leaves(others)):
        return DIFFERS
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
