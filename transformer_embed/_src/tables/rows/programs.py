"""Whether two traced programs compute the same.

Values are numbered: what is computed by the same primitive, with the same parameters and constants,
from equal operands has the same number. So two programs are the same if their results have the same
numbers. Constants count by their bytes, wherever a program or those that it calls keep them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

PROGRAMS = ClosedJaxpr | Jaxpr


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(re.findall(r"\w+", text))


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


def are_same(program: Any, other: Any, sizes: Mapping[Any, int]) -> bool:
    """Whether two programs compute the same, with a number in place of each symbol in the first."""
    numbering = _Numbering(sizes)
    return numbering.results(program) == numbering.results(other)


class _Numbering:
    """The numbers of values; see above.

    Args:
        sizes: a number in place of each symbol.
    """

    def __init__(self, sizes: Mapping[Any, int]):
        self._sizes = sizes
        self._numbers: dict[Any, int] = {}

    def results(self, program: Any, operands: Sequence[int] | None = None) -> tuple[int, ...]:
        """The numbers of a program's results, from those of its operands or for any operands."""
        jaxpr = opened(program)
        if operands is None:
            operands = [self._number("operand", n) for n, _ in enumerate(jaxpr.invars)]
        constants = map(self._constant, getattr(program, "consts", ()))
        values = dict(zip(jaxpr.invars, operands, strict=True))
        values |= zip(jaxpr.constvars, constants, strict=True)

        def read(variable: Any) -> int:
            if isinstance(variable, Literal):
                return self._constant(variable.val)
            return values[variable]

        sources = {result: equation for equation in jaxpr.eqns for result in equation.outvars}
        for equation in jaxpr.eqns:
            operands = list(map(read, equation.invars))
            if inner := called(equation):
                results = self.results(inner, operands)
            elif inner := _of_columns(equation, sources, self._sizes):
                results = self.results(inner, operands[:1])
            else:
                params, treedef = jax.tree.flatten(equation.params)
                key = (equation.primitive.name, treedef, *map(self._param, params), *operands)
                results = [self._number(key, n) for n, _ in enumerate(equation.outvars)]
            values |= zip(equation.outvars, results, strict=True)
        return tuple(map(read, jaxpr.outvars))

    def _param(self, param: Any) -> Any:
        if isinstance(param, PROGRAMS):
            return self.results(param)
        # By bytes: 0.0 equals -0.0, and an array is not hashable.
        if isinstance(param, float | np.ndarray | jax.Array):
            return self._constant(param)
        return self._sizes.get(param, param)

    def _constant(self, value: Any) -> int:
        try:
            array = np.asarray(jax.device_get(value))
        except (TypeError, RuntimeError):
            # A traced value, a key, or an array of other processes. Both programs keep it alive, so
            # no other object gets its id.
            return self._number("object", id(value))
        return self._number(array.shape, array.dtype, array.tobytes())

    def _number(self, *key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _of_columns(equation: Any, sources: Mapping[Any, Any], sizes: Mapping[Any, int]) -> Any:
    """The program of `x[:, 0]`, which jax writes as a gather where a size is a symbol, or None.

    Args:
        equation: the equation.
        sources: the equation that made each variable.
        sizes: a number in place of each symbol.
    """
    if equation.primitive.name != "gather" or isinstance(equation.invars[1], Literal):
        return None
    source = sources.get(equation.invars[1])
    if source is None or source.primitive.name != "broadcast_in_dim":
        return None
    (index,), axes = source.invars, equation.params["dimension_numbers"]
    if not isinstance(index, Literal) or source.params["shape"] != (1,):
        return None

    def columns(x: jax.Array) -> jax.Array:
        starts: Any = np.zeros(x.ndim, int)
        starts[list(axes.start_index_map)] = index.val
        limits: Any = starts + [sizes.get(size, size) for size in equation.params["slice_sizes"]]
        return jax.lax.squeeze(jax.lax.slice(x, starts, limits), axes.collapsed_slice_dims)

    x = equation.invars[0].aval
    shape = [sizes.get(size, size) for size in x.shape]
    try:
        return jax.make_jaxpr(columns)(jax.ShapeDtypeStruct(shape, x.dtype))
    except TypeError:
        # Out of range.
        return None
