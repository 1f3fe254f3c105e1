"""States the rules by which one equation of a traced program keeps the rows of a table apart.

A row of the result must be computed from the same row of the operands. In the traced program, the
number of rows of each table is a prime number that no other axis has as its size. So an axis of
this size is an axis of the rows of that table.
"""

import math
from typing import Any


def _names_in(text: str) -> frozenset[str]:
    """Returns the names that a text lists."""
    return frozenset(text.split())


# Each row of the results is computed from the same row of the operands, if every result has an axis
# of rows. Only rows have the size of this axis, so it is noticed if an equation takes away an axis
# of rows, and if it makes a new one. (A reshape may move rows: see `_reshape_moves_rows`.)
KEEP_ROWS_APART = _names_in(
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
# Equations that compute nothing themselves: calls of other programs, by the names that jax has used
# since 0.6, and a barrier.
CALLS = _names_in(
    """
    checkpoint closed_call core_call core_closed_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr jit optimization_barrier pjit remat remat2
    """
)
# Equations that take a window of their first operand.
TAKE_A_WINDOW = _names_in("gather slice")


def why_rows_mix(equation: Any, row_counts: set[int]) -> str | None:
    """Returns why an equation may make a row from other rows, or None if it keeps rows apart.

    For example, a sum of a table [7, 4] over the axis of its 7 rows makes one row from all rows.

    Args:
        equation: An equation of a traced program.
        row_counts: The number of rows of each table in the program. In the program, these are
            primes that no other axis has as its size, so an axis of such a size has table rows.
    """
    name = equation.primitive.name
    # A call of another program computes nothing itself. The equations of that program are checked.
    if name in CALLS:
        return None
    # For a table of 7 rows, a variable [7, 4] has the row counts (7,), and a variable [4] has ().
    counts_of_operands = {_row_counts_in(variable, row_counts) for variable in equation.invars}
    counts_of_results = {_row_counts_in(variable, row_counts) for variable in equation.outvars}
    # An operand without rows is the same for all rows, so it may be used for each of them.
    counts_of_operands.discard(())
    if not counts_of_operands:
        has_new_rows = any(counts_of_results)
        # An array whose rows are all equal, such as zeros, does not tell rows apart.
        tells_apart = has_new_rows and not _makes_equal_rows(equation, row_counts)
        return f"{name} tells rows apart by their place in the table" if tells_apart else None
    if name not in KEEP_ROWS_APART:
        return f"{name} is not known to keep rows apart"
    mixes_rows = f"{name} over the rows"
    # If the row counts differ, then two operands have rows of different tables, or a result has
    # lost its axis of rows.
    if len(counts_of_operands | counts_of_results) > 1:
        return mixes_rows
    if name in TAKE_A_WINDOW and not _takes_same_part_of_rows(equation, row_counts):
        return mixes_rows
    # All operands with rows have the rows of one table.
    (same_counts,) = counts_of_operands
    moves_rows = name == "reshape" and _reshape_moves_rows(equation, row_count=same_counts[0])
    return mixes_rows if moves_rows else None


def _row_counts_in(variable: Any, row_counts: set[int]) -> tuple[int, ...]:
    """Returns the sizes of those axes of a variable that are axes of rows, () for none."""
    return tuple(size for size in variable.aval.shape if size in row_counts)


def _makes_equal_rows(equation: Any, row_counts: set[int]) -> bool:
    """Returns whether an equation without rows in its operands gives every row the same value.

    A broadcast does. An iota does if it counts along another axis than the axis of rows.
    """
    if equation.primitive.name == "iota":
        (result,) = equation.outvars
        counted_axis = equation.params["dimension"]
        return result.aval.shape[counted_axis] not in row_counts
    return equation.primitive.name == "broadcast_in_dim"


def _takes_same_part_of_rows(equation: Any, row_counts: set[int]) -> bool:
    """Returns whether a slice or gather takes all rows, and the same part of each.

    For example, `table[:, :3]` takes the first three columns of every row. `table[:3]` takes only
    three of the rows.

    Args:
        equation: A slice or a gather.
        row_counts: The sizes by which an axis of rows is known (see `why_rows_mix`).
    """
    params = equation.params
    shape = equation.invars[0].aval.shape
    # How much is taken along each axis. A gather has the parameter `slice_sizes`. A slice does not,
    # but its result has this shape.
    window_shape = params.get("slice_sizes", equation.outvars[0].aval.shape)
    # A gather takes its windows at an index along these axes. A slice has no such axes.
    indexed_axes = getattr(params.get("dimension_numbers"), "start_index_map", ())
    for axis, (size, window_size) in enumerate(zip(shape, window_shape, strict=True)):
        is_row_axis = size in row_counts or window_size in row_counts
        takes_whole_axis = size == window_size and axis not in indexed_axes
        if is_row_axis and not takes_whole_axis:
            return False
    return True


def _reshape_moves_rows(equation: Any, row_count: int) -> bool:
    """Returns whether a reshape may move entries from row to row.

    Rows keep apart if the axes before the axis of rows have the same number of entries before the
    reshape as after it. For example, with 7 rows, a reshape of [6, 7, 4] to [2, 3, 7, 4] keeps them
    apart, but a reshape to [2, 7, 12] moves entries.

    Args:
        equation: A reshape.
        row_count: The size of the axis of rows, before and after the reshape.
    """
    shape = equation.invars[0].aval.shape
    new_shape = equation.outvars[0].aval.shape
    leading_size = math.prod(shape[: shape.index(row_count)])
    new_leading_size = math.prod(new_shape[: new_shape.index(row_count)])
    # A reshape with `dimensions` transposes first.
    transposes_first = bool(equation.params["dimensions"])
    return transposes_first or leading_size != new_leading_size
