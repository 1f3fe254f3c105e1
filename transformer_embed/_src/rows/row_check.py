"""Proves that an optimizer updates each row of a table from that row alone.

The step is traced with a prime in the place of each table's number of rows; nothing is computed.
Each row of a value must be computed from the same row of other values, and from values that all
rows share (see `row_rules`). Then the step on a block of rows gives the same rows as a step on the
whole table, unless the optimizer computes with the number of rows, or chooses by it.

The proof does not say that rows without a gradient stay as they are. Adam passes, although its
dense step moves such rows: a row-wise step is lazy.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from transformer_embed._src import arguments
from transformer_embed._src.rows.row_rules import why_rows_mix
from transformer_embed._src.rows.step_tables import (
    Leaves,
    TableStep,
    tables_of_step,
    with_primes,
)

ADVICE = (
    "Train the table densely, or keep that transformation off it with optax.multi_transform. "
    "To clip by a global norm, clip the gradients before the step"
)
# Finds the name of a transformation in the qualified name of a function inside it.
UPDATE = re.compile(r"(?:^|\.)(\w+)(?:\.<locals>)?\.update\w*(?:\.|$)")


def find_tables(init: Callable, treedef: Any, leaves: Leaves) -> list[TableStep]:
    """Finds the tables of a step.

    Args:
        init: The function of the optimizer that makes a state.
        treedef: The structure of (gradients, parameters, state, other arguments).
        leaves: The leaves of these.
    """

    def trace(function: Callable, shapes: Any) -> Any:
        return _traced(function, shapes, init).results

    tables = tables_of_step(init, trace, treedef, leaves)
    grads_treedef, _, state_treedef, _ = treedef.children()
    _check_no_sums(state_treedef, 2 * grads_treedef.num_leaves, tables)
    return tables


def _check_no_sums(state_treedef: Any, first: int, tables: Sequence[TableStep]) -> None:
    """Raises a ValueError for `optax.apply_every`, which applies its sums in some steps only.

    Args:
        state_treedef: The structure of the state.
        first: The number of the first leaf of the state.
        tables: The tables, whose sums are refused.
    """
    # optax is slow to load, and only training needs it.
    import optax  # noqa: PLC0415

    def is_sum(node):
        return isinstance(node, optax.ApplyEvery)

    numbers = state_treedef.unflatten(range(first, first + state_treedef.num_leaves))
    nodes = jax.tree.leaves(numbers, is_leaf=is_sum)
    sums = {*jax.tree.leaves([*filter(is_sum, nodes)])}
    if any(not sums.isdisjoint(table.leaves) for table in tables):
        reason = "a row without a gradient would miss the step in which its sum is applied"
        raise _refusal(reason, optax.apply_every)


def check(
    step: Callable[[Any], Any], leaves: Leaves, tables: Sequence[TableStep], update: Callable
) -> None:
    """Raises a ValueError unless a step computes each row of a table from that row alone.

    Args:
        step: A function from all leaves, with an array for each gradient, to all leaves after the
            step.
        leaves: The leaves before the step.
        tables: The tables, as `find_tables` returns them.
        update: The optimizer's function, to name in an error.
    """
    sizes = {table.prime: len(leaves[table.parameter]) for table in tables}
    before = with_primes(leaves, tables)
    traced = _traced(step, before, update)
    for call in _equations(traced.program):
        reason = why_rows_mix(call.equation, {*sizes})
        if reason:
            raise _refusal(reason, update, call.sources)

    def described(array: Any) -> str:
        """Describes an array as the user knows it, with the number of rows for the prime."""
        return f"{array.dtype}{[sizes.get(size, size) for size in array.shape]}"

    for n, new in traced.results.items():
        old = before[n]
        has_rows = not sizes.keys().isdisjoint(old.shape + new.shape)
        if has_rows and (new.shape, new.dtype) != (old.shape, old.dtype):
            raise _refusal(f"{described(old)} becomes {described(new)}", update)


class _Call(NamedTuple):
    """Holds an equation of a program, and where the calls that lead to it were written."""

    equation: Any
    sources: tuple


class _Traced(NamedTuple):
    """Holds the program of a function, and the shapes of its results."""

    program: ClosedJaxpr
    results: Any


def _equations(program: Any, sources: tuple = ()) -> Iterator[_Call]:
    """Lists all equations, the ones of inner programs first."""
    # Called programs may be without their constants.
    for equation in getattr(program, "jaxpr", program).eqns:
        stack = (*sources, equation.source_info)
        for param in jax.tree.leaves(equation.params):
            if isinstance(param, ClosedJaxpr | Jaxpr):
                yield from _equations(param, stack)
        yield _Call(equation=equation, sources=stack)


def _traced(function: Callable, shapes: Any, blamed: Callable) -> _Traced:
    """Traces a function of arrays of these shapes; an error names `blamed`."""
    try:
        program, results = jax.make_jaxpr(function, return_shape=True)(shapes)
    except Exception as error:
        first_line = str(error).split("\n", 1)[0]
        summary = f"{type(error).__name__}: {first_line[:100]}"
        reason = f"cannot be traced with another number of rows ({summary})"
        raise _refusal(reason, blamed) from error
    return _Traced(program=program, results=results)


def _refusal(reason: str, function: Callable, sources: Sequence[Any] = ()) -> ValueError:
    """Makes the error for an optimizer that is not row-wise.

    The error names the transformation that wrote an equation, or one of the optimizer's functions.
    """
    qualified_name = getattr(function, "__qualname__", type(function).__name__)
    own_name = qualified_name.split(".")[0]
    got = f"{next(_transformations(sources), own_name)}: {reason}"
    message = arguments.wanted("optimizer", "each row updated from that row alone", got)
    return ValueError(f"{message}. {ADVICE}.")


def _transformations(sources: Sequence[Any]) -> Iterator[str]:
    """Lists the transformations that wrote an equation, from where the calls around it stand."""
    for source in sources:
        # The innermost call comes first. The frames from this folder on are not the optimizer's.
        frames = source.traceback.raw_frames()[0] if source.traceback else ()
        for code in frames:
            if Path(code.co_filename).parent == Path(__file__).parent:
                break
            match = UPDATE.search(code.co_qualname)
            if match:
                yield match[1]
