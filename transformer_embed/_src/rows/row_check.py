"""Checks that an optimizer updates each row of a table from that row alone.

The step is traced twice, with all rows of the tables and with one block of them; nothing is
computed. The two programs are read side by side. They must be the same but for the number of rows,
so an axis whose size differs between them is an axis of rows. Each row of a value must be computed
from the same row of other values and from values that all rows share. Then a block's program gives
the rows that the whole program would.

One more rule: a choice that all rows share (a schedule that emits on every third step) must not
decide whether a row's gradient or state is used, because a row without a gradient would miss it.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from transformer_embed._src import arguments

# Each row of the results is computed from the same row of the operands, if every result has an axis
# of rows (`_moves_rows` has the exceptions). Nothing else has that size, so an axis of rows that an
# equation takes away and makes anew cannot go unseen.
KEEP_ROWS_APART = frozenset(
    re.findall(
        r"\w+",
        """
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bessel_i0e
    bessel_i1e bitcast_convert_type broadcast_in_dim cbrt ceil clamp complex concatenate conj
    convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum digamma div
    dot_general eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
    mulhi name ne neg nextafter not or pad pcast polygamma population_count pow pvary real
    reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum
    reduce_xor regularized_incomplete_beta rem reshape rev round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square
    squeeze stack stop_gradient sub tan tanh transpose unstack xor zeta
    """,
    )
)
# Equations that only call another program, by the names that jax has given them since 0.6.
CALLS = (
    "checkpoint",
    "closed_call",
    "core_call",
    "core_closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
)
CONTROL_FLOW = ("cond", "scan", "while")
# The params of an equation that contain sizes of arrays.
SIZES = ("shape", "new_sizes", "limit_indices", "sizes")
# A number that is computed from conditions by only these is still a condition: `1 - emit`. Times
# another number it is a step size: `0.1 * emit`.
KEEP_CONDITIONS = (
    "add",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "max",
    "min",
    "mul",
    "neg",
    "reshape",
    "squeeze",
    "sub",
)
DIFFERS = "a program that depends on the number of rows"
ADVICE = (
    "Train the table densely, or keep that transformation off it with optax.multi_transform. "
    "To clip by a global norm, clip the gradients before update"
)

Shape = jax.ShapeDtypeStruct
NUMBERS = np.ndarray | np.generic | jax.Array | int | float | complex
EXTENDED = jax.dtypes.extended


class NotRowWiseError(Exception):
    """Why an optimizer is not row-wise, and the sources of the equation, outermost call first."""

    def __init__(self, reason: str, sources: Sequence[Any] = ()):
        super().__init__(reason)
        self.sources = sources


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known about a value of both programs.

    Attributes:
        table: the table that its rows belong to. None: it has no rows, or they are all equal.
        uses: the inputs that a row may be computed from.
        always_uses: those that it is computed from whatever the shared conditions are.
        choice: where a shared condition first left out an input.
        is_condition: whether it is a condition that all rows share.
        problem: why its rows may depend on other rows, or on how many there are.
    """

    table: int | None = None
    uses: frozenset[int] = frozenset()
    always_uses: frozenset[int] = frozenset()
    choice: NotRowWiseError | None = None
    is_condition: bool = False
    problem: NotRowWiseError | None = None


def check(
    step: Callable[[Any], tuple[Any, Any]],
    whole: Mapping[int, Shape],
    block: Mapping[int, Shape],
    owners: Mapping[int, int],
    update: Callable,
) -> None:
    """Raises a ValueError unless a step on a block of rows gives the rows of the whole step.

    Args:
        step: from the gradients, the rows of tables and of their state, by place, to the new rows
            of tables and state, by place, and all else that the optimizer returns.
        whole: the shapes of all rows.
        block: those of one block, with another number of rows.
        owners: the table of each place, named by the place of its gradient; the table's rows come
            first after it.
        update: the optimizer's function, to name in an error.
    """
    places = sorted(owners)
    operands = [Fact(owners[i], frozenset([i]), frozenset([i])) for i in places]
    sizes = {owners[i]: (whole[i].shape[0], block[i].shape[0]) for i in places}
    try:
        one, other = _traced(step, whole, ""), _traced(step, block, "with fewer rows ")
        facts = _Reader(sizes).follow(one, other, operands)
        outputs = zip(one.jaxpr.outvars, other.jaxpr.outvars, facts, strict=True)
        # New rows of the table must use their gradient, and those of a state the old ones.
        needs = {table: table for table in owners.values()}
        for place in places:
            table = owners[place]
            if place != table:
                _check_rows(*next(outputs), table, block[place], needs.pop(table, place))
        for output in outputs:
            if _checked_row_axis(*output) is not None:
                what = "parameters or state outside the table"
                raise NotRowWiseError(f"{what} become one row for each of its rows")
    except NotRowWiseError as problem:
        name, where = _transformation_and_line(problem.sources, update)
        raise ValueError(refusal(f"{name}: {problem}{where}")) from problem.__cause__


def _checked_row_axis(one: Any, other: Any, fact: Fact) -> int | None:
    """The axis of rows of an output. Raises if its rows may depend on other rows."""
    if fact.problem:
        raise fact.problem
    return _row_axis(one, other)


def _check_rows(one: Any, other: Any, fact: Fact, table: int, shape: Shape, needed: int) -> None:
    """Raises unless an output has new rows of a table or of its state, made with input `needed`."""
    aval = other.aval
    if _checked_row_axis(one, other, fact) != 0 or fact.table not in (None, table):
        raise NotRowWiseError("a new row is not made from the same row of the table")
    if aval.shape != shape.shape:
        raise NotRowWiseError("the new state does not have the shape of the state")
    if aval.dtype != shape.dtype:
        how = f"a state of dtype {shape.dtype} becomes {aval.dtype}"
        raise NotRowWiseError(f"{how}, but a step must keep the dtype")
    if needed in fact.uses - fact.always_uses and fact.choice:
        raise fact.choice


def refusal(reason: str) -> str:
    """The message for an optimizer that is not row-wise."""
    message = arguments.wanted("optimizer", "each row updated from that row alone", reason)
    return f"{message}. {ADVICE}."


def _traced(step: Callable, shapes: Any, how: str) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(step)(shapes)
    except Exception as error:
        raise NotRowWiseError(f"update cannot be traced {how}({_summary(error)})") from error


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(chr(10), 1)[0][:100]}"


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads two programs of one function side by side.

    Args:
        sizes: for each table, its number of rows in the whole program and in that of a block.
    """

    sizes: Mapping[int, tuple[int, int]]

    def follow(
        self,
        whole: ClosedJaxpr,
        block: ClosedJaxpr,
        operands: Sequence[Fact],
        sources: tuple[Any, ...] = (),
    ) -> list[Fact]:
        """What is known about the results.

        Raises if the programs differ in more than the number of rows.
        """
        one, other = whole.jaxpr, block.jaxpr
        if len(one.eqns) != len(other.eqns) or len(whole.consts) != len(block.consts):
            raise NotRowWiseError(DIFFERS, sources)
        if not all(map(_same, whole.consts, block.consts)):
            raise NotRowWiseError("a constant that depends on the number of rows", sources)
        # For each variable of the whole program, that of the block's and what is known about it.
        facts: dict[Any, tuple[Any, Fact]] = {}

        def define(variables: Sequence[Any], twins: Sequence[Any], new: Sequence[Fact]) -> None:
            facts.update(zip(variables, zip(twins, new, strict=True), strict=True))

        def read(variable: Any, twin: Any) -> Fact:
            if isinstance(variable, Literal) or isinstance(twin, Literal):
                is_same, fact = _same(variable, twin), Fact()
            else:
                expected, fact = facts[variable]
                is_same = expected is twin
            return fact if is_same else Fact(problem=NotRowWiseError(DIFFERS, here))

        here = sources
        define(one.constvars, other.constvars, [Fact() for _ in block.consts])
        define(one.invars, other.invars, operands)
        for equation, twin in zip(one.eqns, other.eqns, strict=True):
            here = (*sources, twin.source_info)
            if equation.primitive is not twin.primitive:
                raise NotRowWiseError(DIFFERS, here)
            inputs = list(map(read, equation.invars, twin.invars))
            try:
                results = self._results(equation, twin, inputs, here)
            except NotRowWiseError as problem:
                problem.sources = problem.sources or here
                if twin.effects:
                    raise
                # No matter, unless an output needs one of the results.
                results = [Fact(problem=problem) for _ in twin.outvars]
            define(equation.outvars, twin.outvars, results)
        return list(map(read, one.outvars, other.outvars))

    def _results(
        self, one: Any, other: Any, operands: Sequence[Fact], sources: tuple[Any, ...]
    ) -> Sequence[Fact]:
        """What is known about the results of an equation, from both programs."""
        name = other.primitive.name
        called = list(zip(_called_programs(one), _called_programs(other), strict=False))
        if name in CALLS and called:
            return self.follow(*called[0], operands, sources)
        if name == "optimization_barrier":
            return operands
        for fact in operands:
            if fact.problem:
                raise fact.problem
        axes = set(map(_row_axis, one.invars, other.invars)) - {None}
        if axes:
            self._check_rows_stay_apart(one, other, operands, axes)
        else:
            self._check_shared(one, other, called, sources)
        return [
            _result_fact(other, operands, variable.aval.dtype == jnp.bool_, sources)
            for variable in other.outvars
        ]

    def _check_shared(
        self, one: Any, other: Any, called: Sequence[Any], sources: tuple[Any, ...]
    ) -> None:
        """Raises unless an equation of shared values gives shared values, or equal rows."""
        name, params = other.primitive.name, other.params
        axes = set(map(_row_axis, one.outvars, other.outvars)) - {None}
        is_iota_along_others = name == "iota" and {params["dimension"]}.isdisjoint(axes)
        if axes and name != "broadcast_in_dim" and not is_iota_along_others:
            raise NotRowWiseError(f"{name} tells rows apart by their place in the table")
        if not self._has_same_params(one, other, bool(axes)):
            raise NotRowWiseError(f"{name} depends on the number of rows")
        for whole, block in called:
            no_rows = [Fact() for _ in block.jaxpr.invars]
            for fact in self.follow(whole, block, no_rows, sources):
                if fact.problem:
                    raise fact.problem

    def _check_rows_stay_apart(
        self, one: Any, other: Any, operands: Sequence[Fact], axes: Collection[Any]
    ) -> None:
        """Raises unless each row of the results is computed from the same row of the operands."""
        name = other.primitive.name
        if other.effects:
            raise NotRowWiseError(f"{name} has a side effect on rows")
        if name in CONTROL_FLOW:
            how = "on a value outside of the row decides how the row is updated"
            raise NotRowWiseError(f"{name} {how}")
        if name not in KEEP_ROWS_APART:
            raise NotRowWiseError(f"{name} is not known to keep rows apart")
        tables = _tables(operands)
        if len(tables) > 1:
            raise NotRowWiseError(f"{name} mixes the rows of two tables")
        sizes = {self.sizes[table] for table in tables} or {*self.sizes.values()}
        for variables in zip(one.outvars, other.outvars, strict=True):
            new_axis = _row_axis(*variables)
            if (
                new_axis is None
                or tuple(variable.aval.shape[new_axis] for variable in variables) not in sizes
                or any(_moves_rows(other, axis, new_axis) for axis in axes)
                or not self._has_same_params(one, other, True)
            ):
                raise NotRowWiseError(f"{name} over the rows")

    def _has_same_params(self, one: Any, other: Any, has_rows: bool) -> bool:
        """Whether the params are the same in both programs, but for the rows in sizes of arrays."""
        for name, param in other.params.items():
            sizes = self.sizes.values() if has_rows and name in SIZES else ()
            (before, tree), (after, other_tree) = map(jax.tree.flatten, (one.params[name], param))
            if tree != other_tree or not all(
                (a, b) in sizes or _same(a, b) for a, b in zip(before, after, strict=True)
            ):
                return False
        return True


def _row_axis(one: Any, other: Any) -> int | None:
    """The axis of rows of a variable: the one whose size differs between the programs."""
    shape, other_shape = (getattr(variable.aval, "shape", ()) for variable in (one, other))
    if len(shape) != len(other_shape):
        raise NotRowWiseError(DIFFERS)
    axes = [i for i, size in enumerate(shape) if size != other_shape[i]]
    if len(axes) > 1:
        raise NotRowWiseError("pairs of rows")
    return axes[0] if axes else None


def _tables(operands: Sequence[Fact]) -> set[int]:
    return {fact.table for fact in operands if fact.table is not None}


def _moves_rows(equation: Any, axis: int, new_axis: int) -> bool:
    """Whether an equation whose operand and result have these axes of rows mixes or moves rows."""
    params = equation.params
    match equation.primitive.name:
        case "cumlogsumexp" | "cummax" | "cummin" | "cumprod" | "cumsum":
            return params["axis"] == axis
        case "pad":
            return tuple(params["padding_config"][axis]) != (0, 0, 0)
        case "reshape":
            # A row keeps its place if as many entries come before it.
            before = math.prod(equation.invars[0].aval.shape[:axis])
            after = math.prod(equation.outvars[0].aval.shape[:new_axis])
            return params["dimensions"] is not None or before != after
        case "rev":
            return axis in params["dimensions"]
        case "sort":
            return params["dimension"] == axis
    return False


def _result_fact(
    equation: Any, operands: Sequence[Fact], is_bool: bool, sources: tuple[Any, ...]
) -> Fact:
    """What a result is computed from, and whether a shared condition decides about it."""
    name = equation.primitive.name
    uses = frozenset().union(*(fact.uses for fact in operands))
    always_uses = frozenset().union(*(fact.always_uses for fact in operands))
    # select_n(condition, a, b) uses what both branches use; a product with 0 uses nothing.
    if name == "select_n" and operands[0].is_condition:
        always_uses = frozenset.intersection(*(fact.always_uses for fact in operands[1:]))
    elif name in ("and", "div", "mul") and any(fact.is_condition for fact in operands):
        always_uses = frozenset()
    choice = next((fact.choice for fact in operands if fact.choice), None)
    if choice is None and uses != always_uses:
        how = "by a condition outside of the row decides whether its gradient is used"
        choice = NotRowWiseError(f"{name} {how}", sources)
    table = next(iter(_tables(operands)), None)
    is_condition = table is None and (is_bool or _stays_condition(equation, operands))
    return Fact(table, uses, always_uses, choice, is_condition)


def _stays_condition(equation: Any, operands: Sequence[Fact]) -> bool:
    """Whether a number that all rows share is computed from conditions alone."""
    others = [
        variable
        for variable, fact in zip(equation.invars, operands, strict=True)
        if not fact.is_condition
    ]
    name = equation.primitive.name
    if name not in KEEP_CONDITIONS or len(others) == len(operands) or (others and name == "mul"):
        return False
    return all(isinstance(variable, Literal) for variable in others)


def _called_programs(equation: Any) -> list[ClosedJaxpr]:
    """The programs among the params of an equation."""
    params = jax.tree.leaves(equation.params)
    programs = [param for param in params if isinstance(param, ClosedJaxpr | Jaxpr)]
    return [p if isinstance(p, ClosedJaxpr) else ClosedJaxpr(p, ()) for p in programs]


def _same(one: Any, other: Any) -> bool:
    """Whether a literal, a constant or a param is the same in two traces.

    Programs are compared by `follow`.
    """
    if one is other or isinstance(one, ClosedJaxpr | Jaxpr):
        return True
    if isinstance(one, Literal) and isinstance(other, Literal):
        return str(one.aval) == str(other.aval) and _same(one.val, other.val)
    if isinstance(one, NUMBERS):
        return isinstance(other, NUMBERS) and _same_numbers(one, other)
    # Each trace makes new functions, but with the same code.
    return bool(getattr(one, "__code__", one) == getattr(other, "__code__", other))


def _same_numbers(one: Any, other: Any) -> bool:
    for value in (one, other):
        if arguments.is_traced(value) or jnp.issubdtype(jnp.result_type(value), EXTENDED):
            return False
    with jax.transfer_guard("allow"):
        one, other = np.asarray(one), np.asarray(other)
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()


# Names.

UPDATE = re.compile(r"(?:^|\.)(\w+)(?:\.<locals>)?\.update\w*(?:\.|$)")
SLASH = r"[\\/]"
FOLDER = Path(__file__).parent
INSIDE_JAX = re.compile(rf"{SLASH}jax{SLASH}(_src|numpy|lax|_)")


def _transformation_and_line(sources: Sequence[Any], update: Callable) -> tuple[str, str]:
    """The transformation that wrote an equation, and the file and line."""
    for source in sources:
        frames = list(_frames(source))
        for name, _, _ in frames:
            if match := UPDATE.search(name):
                _, file, line = frames[0]
                return match[1], f" ({'/'.join(re.split(SLASH, file)[-2:])}:{line})"
    return _name(update), ""


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__).split(".")[0]


def _frames(source: Any) -> Iterator[tuple[str, str, int]]:
    """The qualified name, file and line of each call outside of jax, the innermost first."""
    if source.traceback is None:
        return
    # Before jax 0.7, frames have no qualified names; their code objects do.
    for code, frame in zip(source.traceback.raw_frames()[0], source.traceback.frames, strict=True):
        if Path(frame.file_name).parent == FOLDER:
            return
        if not INSIDE_JAX.search(frame.file_name):
            yield code.co_qualname, frame.file_name, frame.line_num


# The rows of an optimizer's state.


def tables_of_state(
    init: Callable,
    treedef: Any,
    params: Sequence[Shape],
    state: Sequence[Shape],
    tables: Sequence[int],
) -> dict[int, int]:
    """The table, by its index among the parameters, of each leaf of the state that has its rows.

    Such a leaf, given by its index, gains as many rows as the table does.
    """
    longer_params = list(params)
    for n, table in enumerate(tables, 1):
        size, *rest = params[table].shape
        longer_params[table] = Shape((size + n, *rest), params[table].dtype)
    shapes = _state_shapes(init, jax.tree.unflatten(treedef, params))
    longer_shapes = _state_shapes(init, jax.tree.unflatten(treedef, longer_params))
    if shapes != [leaf.shape for leaf in state]:
        want = "that of optimizer.init(params)"
        raise arguments.value_error("state", want, "arrays of other shapes")
    if len(longer_shapes) != len(shapes):
        raise ValueError(refusal(f"{_name(init)}: {DIFFERS}"))
    owners = {}
    for i, (shape, longer) in enumerate(zip(shapes, longer_shapes, strict=True)):
        if shape == longer:
            continue
        for table in tables:
            sizes = params[table].shape[0], longer_params[table].shape[0]
            if (shape[:1], longer) == (sizes[:1], (sizes[1], *shape[1:])):
                owners[i] = table
        if i not in owners:
            reason = "which does not have one row for each row of a table"
            raise ValueError(refusal(f"{_name(init)}: a state of shape {list(shape)}, {reason}"))
    return owners


def _state_shapes(init: Callable, params: Any) -> list[tuple[int, ...]]:
    """The shapes of the state of parameters of these shapes."""
    try:
        state = jax.eval_shape(init, params)
    except Exception as error:
        reason = f"{_name(init)}: init cannot be traced ({_summary(error)})"
        raise ValueError(refusal(reason)) from error
    return [leaf.shape for leaf in jax.tree.leaves(state)]
