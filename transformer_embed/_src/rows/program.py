"""A traced function as a flat list of equations, which can be compared, analysed and run in
parts."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive

from transformer_embed._src import arguments

# Equations that only call another program, by the names that jax has given them since 0.6.
CALLS = frozenset(
    re.findall(
        r"\w+",
        "jit pjit closed_call core_call core_closed_call checkpoint remat remat2 custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr",
    )
)
# Where an equation keeps the program that it calls.
CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")

Operand = int | Literal


class Equation(NamedTuple):
    """`outputs = primitive(*inputs, **params)`; values are given by number.

    `sources` says where it was written, outermost call first: the body of a call may have been
    traced for another caller.
    """

    primitive: Primitive
    params: dict[str, Any]
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    sources: tuple[Any, ...]
    has_effects: bool


@dataclasses.dataclass(eq=False)
class Program:
    """Equations in order, with calls inlined. Values are numbered; `types` and `constants` are
    indexed by number."""

    types: list[Any] = dataclasses.field(default_factory=list)
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    equations: list[Equation] = dataclasses.field(default_factory=list)
    inputs: Sequence[int] = ()
    outputs: Sequence[Operand] = ()

    @property
    def holds_tracers(self) -> bool:
        """Whether a constant belongs to a trace that is under way."""
        return any(map(arguments.is_traced, self.constants.values()))

    def type_of(self, operand: Operand) -> Any:
        """Its shape and dtype."""
        return operand.aval if isinstance(operand, Literal) else self.types[operand]

    def needed(self, outputs: Iterable[Operand]) -> list[Equation]:
        """The equations that some outputs depend on, and those with side effects."""
        required = {output for output in outputs if not isinstance(output, Literal)}
        found = []
        for equation in reversed(self.equations):
            if equation.has_effects or not required.isdisjoint(equation.outputs):
                required.update(
                    operand for operand in equation.inputs if not isinstance(operand, Literal)
                )
                found.append(equation)
        return found[::-1]

    def _new_value(self, aval: Any) -> int:
        self.types.append(aval)
        return len(self.types) - 1

    def _new_constant(self, value: Any, aval: Any) -> int:
        number = self._new_value(aval)
        self.constants[number] = value
        return number

    def _inline(
        self,
        jaxpr: Jaxpr,
        constants: Sequence[Any],
        operands: Sequence[Operand],
        sources: tuple[Any, ...],
    ) -> list[Operand]:
        """Appends a jaxpr's equations, with calls inlined; returns the numbers of its results."""
        values: dict[Any, Operand] = dict(zip(jaxpr.invars, operands, strict=True))
        values |= {
            var: self._new_constant(value, var.aval)
            for var, value in zip(jaxpr.constvars, constants, strict=True)
        }

        def read(atom: Any) -> Operand:
            return atom if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            inputs, here = tuple(map(read, equation.invars)), (*sources, equation.source_info)
            called = _inner_jaxpr(equation)
            if called is not None:
                inner, inner_constants = called
                outputs = self._inline(inner, inner_constants, inputs, here)
            else:
                outputs = tuple(self._new_value(var.aval) for var in equation.outvars)
                self.equations.append(
                    Equation(
                        equation.primitive,
                        equation.params,
                        inputs,
                        outputs,
                        here,
                        bool(equation.effects),
                    )
                )
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def trace(function: Callable, operands: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """The program of a function from arrays to a list of arrays. Nothing is computed."""
    return from_jaxpr(jax.make_jaxpr(function)(*operands))


def from_jaxpr(closed: ClosedJaxpr | Jaxpr) -> Program:
    """A jaxpr's equations, with calls inlined."""
    jaxpr, constants = (
        (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, ())
    )
    program = Program()
    if len(constants) != len(jaxpr.constvars):
        raise ValueError("a jaxpr without its constants")
    program.inputs = [program._new_value(var.aval) for var in jaxpr.invars]
    program.outputs = program._inline(jaxpr, constants, program.inputs, ())
    return program


def run(
    equations: Iterable[Equation],
    values: dict[int, Any],
    outputs: Sequence[Operand],
    without: Collection[str] = (),
) -> list[Any]:
    """The values of some outputs, given the values that the equations start from.

    `without`: params to set to None.
    """
    values = dict(values)

    def read(operand: Operand) -> Any:
        return operand.val if isinstance(operand, Literal) else values[operand]

    for equation in equations:
        params = {
            name: None if name in without else value for name, value in equation.params.items()
        }
        bound = equation.primitive.get_bind_params(params)
        # jax 0.6 to 0.8 return functions separately.
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        results = equation.primitive.bind(
            *functions,
            *_vary_over_same_axes([read(operand) for operand in equation.inputs]),
            **params,
        )
        values.update(
            zip(
                equation.outputs,
                results if equation.primitive.multiple_results else [results],
                strict=True,
            )
        )
    return [read(output) for output in outputs]


def same_value(one: Any, other: Any) -> bool:
    """Whether a parameter of an equation, or a constant, is the same in two traces of one
    function."""
    if isinstance(one, tuple | list):
        return (
            isinstance(other, tuple | list)
            and len(one) == len(other)
            and all(map(same_value, one, other))
        )
    if isinstance(one, ClosedJaxpr | Jaxpr):
        return isinstance(other, ClosedJaxpr | Jaxpr) and _same_program(
            from_jaxpr(one), from_jaxpr(other)
        )
    if isinstance(one, np.ndarray | np.generic | jax.Array):
        return one is other or (
            isinstance(other, np.ndarray | np.generic | jax.Array) and _same_numbers(one, other)
        )
    # Each trace makes new functions, but with the same code.
    return one is other or bool(getattr(one, "__code__", one) == getattr(other, "__code__", other))


def _same_numbers(one: Any, other: Any) -> bool:
    if any(
        arguments.is_traced(value) or jnp.issubdtype(value.dtype, jax.dtypes.extended)
        for value in (one, other)
    ):
        return False
    with jax.transfer_guard("allow"):
        one, other = np.asarray(one), np.asarray(other)
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()


def same_operand(one: Operand, other: Operand) -> bool:
    """Whether two operands are the same value in two traces of one function."""
    if isinstance(one, Literal) and isinstance(other, Literal):
        return str(one.aval) == str(other.aval) and _same_numbers(
            np.asarray(one.val), np.asarray(other.val)
        )
    return not isinstance(one, Literal) and not isinstance(other, Literal) and one == other


def _inner_jaxpr(equation: Any) -> tuple[Jaxpr, Sequence[Any]] | None:
    """The program that an equation calls, and its constants."""
    if equation.primitive.name not in CALLS:
        return None
    inner = next((equation.params[name] for name in CALLED if name in equation.params), None)
    if inner is None:
        return None
    return (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())


def _same_program(one: Program, other: Program) -> bool:
    return (
        len(one.equations) == len(other.equations)
        and [(t.shape, t.dtype) for t in one.types] == [(t.shape, t.dtype) for t in other.types]
        and all(map(same_operand, one.outputs, other.outputs))
        and all(
            same_value(value, other.constants.get(number))
            for number, value in one.constants.items()
        )
        and all(map(_same_equation, one.equations, other.equations))
    )


def _same_equation(one: Equation, other: Equation) -> bool:
    return (
        one.primitive is other.primitive
        and len(one.inputs) == len(other.inputs)
        and all(map(same_operand, one.inputs, other.inputs))
        and one.params.keys() == other.params.keys()
        and all(same_value(value, other.params[name]) for name, value in one.params.items())
    )


def _vary_over_same_axes(operands: list[Any]) -> list[Any]:
    """Makes operands vary over the same mesh axes, as a shard_map that checks types requires of an
    equation."""
    axes = [_axes_of(operand) for operand in operands]
    together = frozenset().union(*axes)
    return [
        operand if own == together else _vary(operand, together - own)
        for operand, own in zip(operands, axes, strict=True)
    ]


def _axes_of(operand: Any) -> frozenset[str]:
    """The mesh axes that a value varies over inside a shard_map."""
    aval = jax.typeof(operand)
    # Before jax 0.10, the type has them under another name.
    return frozenset(
        aval.manual_axis_type.varying
        if hasattr(aval, "manual_axis_type")
        else getattr(aval, "vma", ())
    )


def _vary(operand: Any, axes: frozenset[str]) -> Any:
    # jax 0.6 to 0.8 have pcast under another name.
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(operand, tuple(axes), to="varying")
    return getattr(jax.lax, "pvary")(operand, tuple(axes))  # noqa: B009
