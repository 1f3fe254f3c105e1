"""The rules by which one equation of a traced program keeps the rows of a table apart.

In the traced program, the number of rows is a prime that no other array has as a size. So an axis
of rows is an axis whose size is one of the primes.
"""

import math
from typing import Any


def words(text: str) -> frozenset[str]:
    """Splits a text into its words."""
    return frozenset(text.split())


# Each row of the results is computed from the same row of the operands, if every result has an axis
# of rows. Nothing else has the size of this axis, so an equation that takes away an axis of rows
# and makes a new one cannot go unseen. (A reshape may move rows: see `_moves_rows`.)
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
# These compute nothing themselves. They are calls of other programs, by the names that jax has
# given them since 0.6, and a barrier.
CALLS = words(
    """
    checkpoint closed_call core_call core_closed_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr jit optimization_barrier pjit remat remat2
    """
)
# These take a window of their first operand.
TAKE = words("gather slice")


def why_rows_mix(equation: Any, primes: set[int]) -> str | None:
    """Returns why an equation may make a row from other rows, or None if it keeps rows apart."""
    name = equation.primitive.name
    if name in CALLS:
        return None
    # The sizes of the axes of rows, for each operand and result that has some.
    operands = {_row_axes(variable, primes) for variable in equation.invars} - {()}
    results = {_row_axes(variable, primes) for variable in equation.outvars}
    if not operands:
        return _why_places_matter(equation, primes, has_rows=bool(results - {()}))
    if name not in KEEP_ROWS_APART:
        return f"{name} is not known to keep rows apart"
    has_other_axes = len(operands | results) > 1
    takes_some_rows = name in TAKE and not _takes_of_every_row(equation, primes)
    if has_other_axes or takes_some_rows or _moves_rows(equation, *operands):
        return f"{name} over the rows"
    return None


def _row_axes(variable: Any, primes: set[int]) -> tuple[int, ...]:
    """Returns the sizes of those axes of a variable that are axes of rows."""
    return tuple(size for size in variable.aval.shape if size in primes)


def _why_places_matter(equation: Any, primes: set[int], *, has_rows: bool) -> str | None:
    """Returns why an equation without rows among its operands may tell rows apart, or None."""
    name = equation.primitive.name
    # A broadcast gives every row the same value.
    is_alike = name == "broadcast_in_dim"
    if name == "iota":
        size = equation.outvars[0].aval.shape[equation.params["dimension"]]
        is_alike = size not in primes
    if has_rows and not is_alike:
        return f"{name} tells rows apart by their place in the table"
    return None


def _takes_of_every_row(equation: Any, primes: set[int]) -> bool:
    """Returns whether a slice or gather takes a part of every row.

    This is so if it takes whole axes of rows, without an index for such an axis.
    """
    shape = equation.invars[0].aval.shape
    params = equation.params
    window = params.get("slice_sizes", equation.outvars[0].aval.shape)
    indexed_axes = getattr(params.get("dimension_numbers"), "start_index_map", ())
    return all(
        size == part and axis not in indexed_axes
        for axis, (size, part) in enumerate(zip(shape, window, strict=True))
        if {size, part} & primes
    )


def _moves_rows(equation: Any, row_axes: tuple[int, ...]) -> bool:
    """Returns whether an equation is a reshape that may move rows.

    A row stays if as many entries come before it.
    """
    if equation.primitive.name != "reshape":
        return False
    prime = row_axes[0]
    shape = equation.invars[0].aval.shape
    new_shape = equation.outvars[0].aval.shape
    before = math.prod(shape[: shape.index(prime)])
    new_before = math.prod(new_shape[: new_shape.index(prime)])
    return bool(equation.params["dimensions"]) or before != new_before
