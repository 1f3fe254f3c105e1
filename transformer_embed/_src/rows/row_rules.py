"""States the rules by which one equation of a traced program keeps the rows of a table apart.

In the traced program, the number of rows is a prime that no other array has as a size. So an axis
of rows is an axis whose size is one of the primes.
"""

import math
from typing import Any


def _names_in(text: str) -> frozenset[str]:
    """Returns the names that a text lists."""
    return frozenset(text.split())


# Each row of the results is computed from the same row of the operands, if every result has an axis
# of rows. Nothing else has the size of this axis, so an equation that takes away an axis of rows
# and makes a new one cannot go unseen. (A reshape may move rows: see `_moves_rows`.)
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
TAKE = _names_in("gather slice")


def why_rows_mix(equation: Any, primes: set[int]) -> str | None:
    """Returns why an equation may make a row from other rows, or None if it keeps rows apart.

    Args:
        equation: An equation of a traced program.
        primes: The numbers of rows of all tables in the program.
    """
    name = equation.primitive.name
    if name in CALLS:
        return None
    # The primes among the sizes of each operand and of each result, without repeats. An operand
    # without rows is left out. A result without rows is kept as ().
    operand_axes = {_row_axes(variable, primes) for variable in equation.invars} - {()}
    result_axes = {_row_axes(variable, primes) for variable in equation.outvars}
    if not operand_axes:
        return _why_places_matter(equation, primes, has_rows=any(result_axes))
    if name not in KEEP_ROWS_APART:
        return f"{name} is not known to keep rows apart"
    mixes_rows = f"{name} over the rows"
    # If the axes differ, an operand has the rows of another table, or a result has lost its axis.
    if len(operand_axes | result_axes) > 1:
        return mixes_rows
    if name in TAKE and not _takes_of_every_row(equation, primes):
        return mixes_rows
    (row_axes,) = operand_axes
    return mixes_rows if _moves_rows(equation, row_axes) else None


def _row_axes(variable: Any, primes: set[int]) -> tuple[int, ...]:
    """Returns the sizes of those axes of a variable that are axes of rows, () for none."""
    return tuple(size for size in variable.aval.shape if size in primes)


def _why_places_matter(equation: Any, primes: set[int], *, has_rows: bool) -> str | None:
    """Returns why an equation may give rows different values by their place, or None if it cannot.

    This is for an equation whose operands have no axis of rows.
    """
    name = equation.primitive.name
    # A broadcast gives every row the same value.
    are_rows_alike = name == "broadcast_in_dim"
    if name == "iota":
        (result,) = equation.outvars
        counted_size = result.aval.shape[equation.params["dimension"]]
        are_rows_alike = counted_size not in primes
    if has_rows and not are_rows_alike:
        return f"{name} tells rows apart by their place in the table"
    return None


def _takes_of_every_row(equation: Any, primes: set[int]) -> bool:
    """Returns whether a slice or gather takes the same part of every row, such as `table[:, :3]`.

    This is so if it takes whole axes of rows, without an index for such an axis. A slice such as
    `table[:3]` does not, because it takes some of the rows.
    """
    shape = equation.invars[0].aval.shape
    params = equation.params
    # A gather has the sizes of its windows and the axes that it indexes. A slice has neither.
    window = params.get("slice_sizes", equation.outvars[0].aval.shape)
    indexed_axes = getattr(params.get("dimension_numbers"), "start_index_map", ())
    for axis, (size, window_size) in enumerate(zip(shape, window, strict=True)):
        is_row_axis = size in primes or window_size in primes
        takes_all = size == window_size and axis not in indexed_axes
        if is_row_axis and not takes_all:
            return False
    return True


def _moves_rows(equation: Any, row_axes: tuple[int, ...]) -> bool:
    """Returns whether an equation is a reshape that may move entries from row to row.

    Rows keep apart if the axes before the axis of rows have the same number of entries before the
    reshape as after it. For example, with 7 rows, a reshape of [6, 7, 4] to [2, 3, 7, 4] keeps them
    apart, but a reshape to [2, 7, 12] moves entries.
    """
    if equation.primitive.name != "reshape":
        return False
    prime = row_axes[0]
    shape = equation.invars[0].aval.shape
    new_shape = equation.outvars[0].aval.shape
    leading_size = math.prod(shape[: shape.index(prime)])
    new_leading_size = math.prod(new_shape[: new_shape.index(prime)])
    # A reshape with `dimensions` transposes first.
    return bool(equation.params["dimensions"]) or leading_size != new_leading_size
