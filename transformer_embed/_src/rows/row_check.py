"""Proves that an optimizer updates each row of a table from that row alone.

The step is traced, and nothing is computed. A table is a parameter of which only some rows have a
gradient. For the trace, each table gets a prime number of rows that no other array has as a size.
So in the traced program, an axis of this size is an axis of the table's rows. Each row of a value
must be computed from the same row of other values, and from values that all rows share (see
`row_rules`). Then the step on a block of rows gives the same rows as a step on the whole table,
unless the optimizer computes with the number of rows, or chooses by it.

The proof does not say that rows without a gradient stay as they are. Adam passes, although its
dense step changes such rows, and a row-wise step leaves them.
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
# Finds the name of a transformation in the qualified name of a function inside it: `scale_by_adam`
# in `scale_by_adam.<locals>.update_fn`.
UPDATE = re.compile(r"(?:^|\.)(\w+)(?:\.<locals>)?\.update\w*(?:\.|$)")


def find_tables(init: Callable, treedef: Any, leaves: Leaves) -> list[TableStep]:
    """Finds the tables of a step, which are the parameters of which only some rows have a gradient.

    Raises a ValueError for a state that no row-wise step can have.

    Args:
        init: The function of the optimizer that makes a state.
        treedef: The structure of (gradients, parameters, state, other arguments).
        leaves: The leaves of all of them, by number.
    """

    def shapes_of_state(param_shapes: Any) -> Any:
        """Returns the shapes of the state that `init` makes for parameters of these shapes."""
        traced = _traced(init, param_shapes, blamed=init)
        return traced.results

    # The numbers of the leaves that are a table, its state and its gradient, for each table.
    tables = tables_of_step(init, shapes_of_state, treedef, leaves)
    # The leaves are numbered in this order. There are as many parameters as gradients.
    grads_treedef, _, state_treedef, _ = treedef.children()
    parameter_count = grads_treedef.num_leaves
    first_state_leaf = parameter_count + parameter_count
    _refuse_apply_every(state_treedef, first_state_leaf, tables)
    return tables


def _refuse_apply_every(
    state_treedef: Any, first_state_leaf: int, tables: Sequence[TableStep]
) -> None:
    """Raises a ValueError if `optax.apply_every` sums the gradients of a table.

    That transformation adds up the gradients in its state, and applies the sums only in every k-th
    step. So it is refused if its state has an array that belongs to a table.

    Args:
        state_treedef: The structure of the state.
        first_state_leaf: The number of the first leaf of the state.
        tables: The tables.
    """
    # optax is slow to load, and only training needs it.
    import optax  # noqa: PLC0415

    def is_apply_every(node: Any) -> bool:
        """Returns whether a part of the state belongs to `optax.apply_every`."""
        return isinstance(node, optax.ApplyEvery)

    # A tree like the state, which holds the number of each leaf in the place of the leaf.
    leaf_numbers = range(first_state_leaf, first_state_leaf + state_treedef.num_leaves)
    tree_of_numbers = state_treedef.unflatten(leaf_numbers)
    nodes = jax.tree.leaves(tree_of_numbers, is_leaf=is_apply_every)
    apply_every_nodes = [node for node in nodes if is_apply_every(node)]
    # The numbers of the leaves that are sums of gradients.
    summed_leaves = set(jax.tree.leaves(apply_every_nodes))
    for table in tables:
        # `table.leaves` are the numbers of the leaves that belong to the table.
        if not summed_leaves.isdisjoint(table.leaves):
            reason = "a row without a gradient would miss the step in which its sum is applied"
            raise _refusal(reason, optax.apply_every)


def check(
    step: Callable[[Any], Any], leaves: Leaves, tables: Sequence[TableStep], update: Callable
) -> None:
    """Raises a ValueError unless a step computes each row of a table from that row alone.

    The step is traced with a prime in the place of each table's number of rows. The primes are
    sizes that no other array has, so the trace shows which axes are rows of a table.

    Args:
        step: A function from all leaves, with an array for each gradient, to all leaves after the
            step.
        leaves: The leaves before the step.
        tables: The tables, as `find_tables` returns them.
        update: The optimizer's function, to name in an error.
    """
    # The real number of rows of each table, by the prime that replaces this number in the trace.
    real_row_counts = {table.prime: len(leaves[table.parameter]) for table in tables}
    primes = set(real_row_counts)
    old_shapes = with_primes(leaves, tables)
    # The program of the step, and the shapes and dtypes of its results.
    traced = _traced(step, old_shapes, blamed=update)
    # Each equation of the program, and where in the code it was written (`sources`).
    for located in _equations(traced.program):
        reason = why_rows_mix(located.equation, row_counts=primes)
        if reason:
            raise _refusal(reason, update, located.sources)

    def described(array: Any) -> str:
        """Describes an array as the user knows it, with the number of rows for the prime."""
        shape = [real_row_counts.get(size, size) for size in array.shape]
        return f"{array.dtype}{shape}"

    # Blocks of rows are written into the old arrays, so the step must keep shapes and dtypes.
    for number, new in traced.results.items():
        old = old_shapes[number]
        has_rows = any(size in primes for size in (*old.shape, *new.shape))
        is_changed = (new.shape, new.dtype) != (old.shape, old.dtype)
        if has_rows and is_changed:
            raise _refusal(f"{described(old)} becomes {described(new)}", update)


class _LocatedEquation(NamedTuple):
    """Holds an equation of a program, and where it and the calls that lead to it were written."""

    equation: Any
    sources: tuple


class _Traced(NamedTuple):
    """Holds the program of a function, and the shapes of its results."""

    program: ClosedJaxpr
    results: Any


def _equations(program: Any, sources: tuple = ()) -> Iterator[_LocatedEquation]:
    """Lists all equations, the equations of called programs before the call."""
    # A called program may be a Jaxpr, without constants, or a ClosedJaxpr that holds one.
    for equation in getattr(program, "jaxpr", program).eqns:
        equation_sources = (*sources, equation.source_info)
        for param in jax.tree.leaves(equation.params):
            if isinstance(param, ClosedJaxpr | Jaxpr):
                yield from _equations(param, equation_sources)
        yield _LocatedEquation(equation=equation, sources=equation_sources)


def _traced(function: Callable, shapes: Any, blamed: Callable) -> _Traced:
    """Traces a function of arrays of these shapes. An error names the function `blamed`."""
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
    # The name of the optax transformation in whose code the wrong equation was written, or else the
    # function's own name.
    innermost_name = next(_transformations(sources), own_name)
    got = f"{innermost_name}: {reason}"
    message = arguments.wanted("optimizer", "each row updated from that row alone", got)
    return ValueError(f"{message}. {ADVICE}.")


def _transformations(sources: Sequence[Any]) -> Iterator[str]:
    """Lists the transformations of optax that wrote an equation, the innermost one first.

    For example, `optax.chain` calls `scale_by_adam`, and `scale_by_adam` computes a square. For the
    equation of the square, this lists "scale_by_adam", then "chain".

    Args:
        sources: Where the equation, and each call that leads to the equation, was written.
    """
    for source in sources:
        if source.traceback is None:
            continue
        codes, _ = source.traceback.raw_frames()
        # The functions that were running, the innermost first. The functions up to the first one of
        # this folder belong to the optimizer, because this folder calls the optimizer.
        for code in codes:
            is_in_this_folder = Path(code.co_filename).parent == Path(__file__).parent
            if is_in_this_folder:
                break
            # The name of an `update` function starts with the name of its transformation.
            match = UPDATE.search(code.co_qualname)
            if match:
                yield match[1]
