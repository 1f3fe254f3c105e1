"""Whether two traced programs compute the same.

Values are numbered: what is computed by the same primitive, with the same parameters and constants,
from equal operands has the same number. So two programs are the same if their results have the same
numbers. Constants count by their bytes, wherever a program or those that it calls keep them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

PROGRAMS = ClosedJaxpr | Jaxpr


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Equations that only call another program, by the names that jax has given them since 0.6.
CALLS = words(
    """
    checkpoint closed_call core_call core_closed_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr jit pjit remat remat2
    """
)


def inner_programs(equation: Any) -> list[Any]:
    """The programs in the params of an equation."""
    params = jax.tree.leaves(equation.params)
    return [param for param in params if isinstance(param, PROGRAMS)]


def called(equation: Any) -> Any:
    """The program of an equation that only calls it, if so."""
    is_call = equation.primitive.name in CALLS
    return next(iter(inner_programs(equation)), None) if is_call else None


def opened(program: Any) -> Any:
    """A program without its constants. (Called programs may be without them.)"""
    return getattr(program, "jaxpr", program)


def equations(program: Any, sources: tuple = ()) -> Iterator[tuple[Any, tuple]]:
    """All equations, those of inner programs first; with each, where the calls to it stand."""
    for equation in opened(program).eqns:
        stack = (*sources, equation.source_info)
        for inner in inner_programs(equation):
            yield from equations(inner, stack)
        yield equation, stack


def walk(
    program: Any, operands: Sequence[Any], constant: Callable, visit: Callable, sources: tuple = ()
) -> list[Any]:
    """What is known of a program's results, from what is known of its operands.

    Args:
        program: the program; those that it only calls are entered.
        operands: what is known of each operand.
        constant: what is known of a constant.
        visit: what is known of an equation's results, from the equation, what is known of its
            operands, and where it and the calls to it stand.
        sources: where the calls to the program stand.
    """
    jaxpr = opened(program)
    values = dict(zip(jaxpr.invars, operands, strict=True))
    values |= zip(jaxpr.constvars, map(constant, getattr(program, "consts", ())), strict=True)

    def read(variable: Any) -> Any:
        return constant(variable.val) if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        stack, known = (*sources, equation.source_info), list(map(read, equation.invars))
        if inner := called(equation):
            results = walk(inner, known, constant, visit, stack)
        else:
            results = visit(equation, known, stack)
        values |= zip(equation.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars))


def are_same(program: Any, other: Any, sizes: Mapping[Any, int]) -> bool:
    """Whether two programs compute the same, with a number in place of some sizes of the first."""
    numbers: dict[Any, int] = {}

    def number(*key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    def results(program: Any) -> tuple[int, ...]:
        """The numbers of a program's results, for any operands."""
        operands = [number("operand", n) for n, _ in enumerate(opened(program).invars)]
        return tuple(walk(program, operands, of_constant, of_results))

    def of_results(equation: Any, operands: Sequence[int], _: Any) -> list[int]:
        params, treedef = jax.tree.flatten(equation.params)
        key = (equation.primitive.name, treedef, *map(of_param, params), *operands)
        return [number(key, n) for n, _ in enumerate(equation.outvars)]

    def of_param(param: Any) -> Any:
        if isinstance(param, PROGRAMS):
            return results(param)
        # By bytes: 0.0 equals -0.0, and an array is not hashable.
        if isinstance(param, float | np.ndarray | jax.Array):
            return of_constant(param)
        return sizes.get(param, param)

    def of_constant(value: Any) -> int:
        try:
            array = np.asarray(jax.device_get(value))
        except (TypeError, RuntimeError):
            # A traced value, a key, or an array of other processes. Both programs keep it alive, so
            # no other object gets its id.
            return number("object", id(value))
        return number(array.shape, array.dtype, array.tobytes())

    return results(program) == results(other)
