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
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from transformer_embed._src import arguments


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


# Each row of the results is computed from the same row of the operands, if every result has an axis
# of rows (`_moves_rows` has the exceptions). Nothing else has that size, so an axis of rows that an
# equation takes away and makes anew cannot go unseen.
KEEP_ROWS_APART = _words(
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
    """
)
# Equations that only call another program, by the names that jax has given them since 0.6.
CALLS = _words(
    """
    checkpoint closed_call core_call core_closed_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr jit pjit remat remat2
    """
)
CONTROL_FLOW = _words("cond scan while")
# The params of an equation that contain sizes of arrays.
SIZES = _words("shape new_sizes limit_indices sizes")
# A number that is computed from conditions by only these is still a condition: `1 - emit`. Times
# another number it is a step size: `0.1 * emit`.
KEEP_CONDITIONS = _words(
    "add broadcast_in_dim convert_element_type copy max min mul neg reshape squeeze sub"
)
DIFFERS = "a program that depends on the number of rows"
ADVICE = (
    "Train the table densely, or keep that transformation off it with optax.multi_transform. "
    "To clip by a global norm, clip the gradients before update"
)

Shape = jax.ShapeDtypeStruct
NUMBERS = np.ndarray | np.generic | jax.Array | int | float | complex
# An axis of rows, and its sizes in the whole program and in that of a block.
Rows = tuple[int, tuple[int, int]]


class Fact(NamedTuple):
    """What is known about a value of both programs.

    Attributes:
        table: the table that its rows belong to. None: it has no rows, or they are all equal.
        uses: the inputs that a row may be computed from.
        always_uses: those that it is computed from whatever the shared conditions are.
        choice: the error for the first shared condition that left out an input.
        is_condition: whether it is a condition that all rows share.
    """

    table: int | None = None
    uses: frozenset[int] = frozenset()
    always_uses: frozenset[int] = frozenset()
    choice: ValueError | None = None
    is_condition: bool = False


def check(
    step: Callable[[Any], Any],
    whole: Mapping[int, Shape],
    block: Mapping[int, Shape],
    tables: Mapping[int, Sequence[int]],
    update: Callable,
) -> None:
    """Raises a ValueError unless a step on a block of rows gives the rows of the whole step.

    Args:
        step: from the gradients, the rows of tables and of their state, by place, to an array for
            each place, those among them, after the step.
        whole: the shapes of all rows.
        block: those of one block, with another number of rows.
        tables: the places of each table: its gradient, its rows and their state.
        update: the optimizer's function, to name in an error.
    """
    one = _traced(step, whole, update, "update cannot be traced")
    other = _traced(step, block, update, "update cannot be traced with fewer rows")
    reader = _Reader({i: (whole[i].shape[0], block[i].shape[0]) for i in tables}, update)
    owners = {place: table for table, places in tables.items() for place in places}
    operands = [Fact(owners[i], frozenset([i]), frozenset([i])) for i in sorted(owners)]
    facts = reader.follow(one, other, operands)
    outputs = zip(one.jaxpr.outvars, other.jaxpr.outvars, facts, strict=True)
    # New rows of the table must use their gradient, and those of a state the old ones.
    needs = {rows: gradient for gradient, rows, *_ in tables.values()}
    for i, (variable, twin, fact) in enumerate(outputs):
        rows, aval, table = reader.rows(variable, twin), twin.aval, owners.get(i)
        if table is None:
            if rows:
                what = "parameters or state outside the table"
                raise reader.refusal(f"{what} become one row for each of its rows")
            continue
        if rows != (0, reader.sizes[table]) or fact.table not in (None, table):
            raise reader.refusal("a new row is not made from the same row of the table")
        if aval.shape != block[i].shape:
            raise reader.refusal("the new state does not have the shape of the state")
        if aval.dtype != block[i].dtype:
            how = f"a state of dtype {block[i].dtype} becomes {aval.dtype}"
            raise reader.refusal(f"{how}, but a step must keep the dtype")
        if fact.choice and needs.get(i, i) in fact.uses - fact.always_uses:
            raise fact.choice


def _traced(function: Callable, shapes: Any, blamed: Callable, problem: str) -> ClosedJaxpr:
    """The program of a function of arrays of these shapes."""
    try:
        return jax.make_jaxpr(function)(shapes)
    except Exception as error:
        summary = f"{type(error).__name__}: {str(error).split(chr(10), 1)[0][:100]}"
        raise _refusal(_name(blamed), f"{problem} ({summary})") from error


def _refusal(function: str, reason: str) -> ValueError:
    """The error for an optimizer that is not row-wise, because of one of its functions."""
    want = "each row updated from that row alone"
    return ValueError(f"{arguments.wanted('optimizer', want, f'{function}: {reason}')}. {ADVICE}.")


@dataclasses.dataclass
class _Reader:
    """Reads two programs of one function side by side.

    Attributes:
        sizes: for each table, its number of rows in the whole program and in that of a block.
        update: the optimizer's function, to name in an error.
        sources: where the equation that is read, and the calls around it, were written.
    """

    sizes: Mapping[Any, tuple[int, int]]
    update: Callable
    sources: list[Any] = dataclasses.field(default_factory=list)

    def refusal(self, reason: str) -> ValueError:
        """The error for the equation that is read."""
        name, line = _transformation_and_line(self.sources)
        return _refusal(name or _name(self.update), reason + line)

    def follow(self, whole: Any, block: Any, operands: Sequence[Fact] = ()) -> Sequence[Fact]:
        """What is known about the results; without operands, of values that all rows share.

        Raises if the programs differ in more than the number of rows, or mix rows.
        """
        # Called programs may be without constants.
        one, other = (getattr(program, "jaxpr", program) for program in (whole, block))
        consts, block_consts = (getattr(program, "consts", ()) for program in (whole, block))
        if len(one.eqns) != len(other.eqns) or not _same(consts, block_consts):
            raise self.refusal(DIFFERS)
        # For each variable of the whole program, that of the block's and what is known about it.
        facts: dict[Any, tuple[Any, Fact]] = {}

        def define(variables: Sequence[Any], twins: Sequence[Any], new: Sequence[Fact]) -> None:
            facts.update(zip(variables, zip(twins, new, strict=True), strict=True))

        def read(variable: Any, twin: Any) -> Fact:
            expected, fact = variable, Fact()
            if not isinstance(variable, Literal):
                expected, fact = facts[variable]
            if not _same(expected, twin):
                raise self.refusal(DIFFERS)
            return fact

        define(one.constvars, other.constvars, [Fact()] * len(consts))
        define(one.invars, other.invars, operands or [Fact()] * len(one.invars))
        for equation, twin in zip(one.eqns, other.eqns, strict=True):
            self.sources.append(twin.source_info)
            if equation.primitive is not twin.primitive:
                raise self.refusal(DIFFERS)
            inputs = list(map(read, equation.invars, twin.invars))
            define(equation.outvars, twin.outvars, self.results(equation, twin, inputs))
            self.sources.pop()
        return list(map(read, one.outvars, other.outvars))

    def results(self, one: Any, other: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """What is known about the results of an equation, from both programs."""
        name = other.primitive.name
        called = list(zip(_called_programs(one), _called_programs(other), strict=False))
        if name in CALLS and called:
            return self.follow(*called[0], operands)
        if name == "optimization_barrier":
            return operands
        before = list(filter(None, map(self.rows, one.invars, other.invars)))
        after = list(map(self.rows, one.outvars, other.outvars))
        tables = {fact.table for fact in operands} - {None}
        if before:
            self.check_rows_stay_apart(one, other, tables, before, after)
        else:
            self.check_shared(one, other, after)
            for whole, block in called:
                self.follow(whole, block)
        fact = self.uses(name, operands)._replace(table=next(iter(tables), None))
        is_condition = not tables and _stays_condition(other, operands)
        return [
            fact._replace(is_condition=is_condition or (not tables and out.aval.dtype == jnp.bool_))
            for out in other.outvars
        ]

    def rows(self, one: Any, other: Any) -> Rows | None:
        """The axis of rows of a variable: the one whose size differs between the programs."""
        sizes = enumerate(zip(one.aval.shape, other.aval.shape, strict=False))
        rows = [(axis, pair) for axis, pair in sizes if pair[0] != pair[1]]
        if len(rows) > 1:
            raise self.refusal("pairs of rows")
        return next(iter(rows), None)

    def check_shared(self, one: Any, other: Any, after: Sequence[Rows | None]) -> None:
        """Raises unless an equation of shared values gives shared values, or equal rows."""
        name, axes = other.primitive.name, [rows[0] for rows in after if rows]
        is_iota_along_others = name == "iota" and other.params["dimension"] not in axes
        if axes and name != "broadcast_in_dim" and not is_iota_along_others:
            raise self.refusal(f"{name} tells rows apart by their place in the table")
        if not self.has_same_params(one, other, bool(axes)):
            raise self.refusal(f"{name} depends on the number of rows")

    def check_rows_stay_apart(
        self,
        one: Any,
        other: Any,
        tables: set[Any],
        before: Sequence[Rows],
        after: Sequence[Rows | None],
    ) -> None:
        """Raises unless each row of the results is computed from the same row of the operands."""
        name = other.primitive.name
        if name in CONTROL_FLOW:
            how = "on a value outside of the row decides how the row is updated"
            raise self.refusal(f"{name} {how}")
        if name not in KEEP_ROWS_APART:
            raise self.refusal(f"{name} is not known to keep rows apart")
        if len(tables) > 1:
            raise self.refusal(f"{name} mixes the rows of two tables")
        sizes = [self.sizes[table] for table in tables or self.sizes]
        stay = self.has_same_params(one, other, True)
        for rows in after:
            stay &= rows is not None and rows[1] in sizes
            stay &= rows is not None and not any(_moves_rows(other, i, rows[0]) for i, _ in before)
        if not stay:
            raise self.refusal(f"{name} over the rows")

    def has_same_params(self, one: Any, other: Any, has_rows: bool) -> bool:
        """Whether the params are the same in both programs, but for the rows in sizes of arrays."""
        for name, param in other.params.items():
            sizes = self.sizes.values() if has_rows and name in SIZES else ()
            if not _same(one.params[name], param, sizes):
                return False
        return True

    def uses(self, name: str, operands: Sequence[Fact]) -> Fact:
        """What a result is computed from, whatever the shared conditions are."""
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
            choice = self.refusal(f"{name} {how}")
        return Fact(None, uses, always_uses, choice)


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


def _stays_condition(equation: Any, operands: Sequence[Fact]) -> bool:
    """Whether a number that all rows share is computed from conditions alone."""
    pairs = zip(equation.invars, operands, strict=True)
    others = [variable for variable, fact in pairs if not fact.is_condition]
    name = equation.primitive.name
    if name not in KEEP_CONDITIONS or len(others) == len(operands) or (others and name == "mul"):
        return False
    return all(isinstance(variable, Literal) for variable in others)


def _called_programs(equation: Any) -> list[Any]:
    """The programs among the params of an equation."""
    params = jax.tree.leaves(equation.params)
    return [param for param in params if isinstance(param, ClosedJaxpr | Jaxpr)]


def _same(one: Any, other: Any, sizes: Collection[tuple[int, int]] = ()) -> bool:
    """Whether literals, constants or params are the same in two traces, but for these sizes."""
    pairs = itertools.zip_longest(*map(jax.tree.leaves, (one, other)))
    return all(a is b or (a, b) in sizes or _key(a) == _key(b) for a, b in pairs)


def _key(value: Any) -> Any:
    """What is equal if the values are the same."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        # `follow` compares programs.
        return ClosedJaxpr
    if isinstance(value, Literal):
        return str(value.aval), _key(value.val)
    if isinstance(value, NUMBERS) and not arguments.is_traced(value):
        with jax.transfer_guard("allow"):
            array = np.asarray(value)
        return array.shape, array.dtype, array.tobytes()
    # Each trace makes new functions, but with the same code.
    return getattr(value, "__code__", value)


# Names.

UPDATE = re.compile(r"(?:^|\.)(\w+)(?:\.<locals>)?\.update\w*(?:\.|$)")
INSIDE_JAX = re.compile(r"[\\/]jax[\\/](_src|numpy|lax|_)")


def _transformation_and_line(sources: Sequence[Any]) -> tuple[str, str]:
    """The transformation that wrote an equation, and the file and line; empty if unknown."""
    for source in sources:
        frames = list(_frames(source))
        for name, _ in frames:
            if match := UPDATE.search(name):
                return match[1], f" ({frames[0][1]})"
    return "", ""


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__).split(".")[0]


def _frames(source: Any) -> Iterator[tuple[str, str]]:
    """The qualified name and the line of each call outside of jax, the innermost first."""
    if source.traceback is None:
        return
    # Before jax 0.7, frames have no qualified names; their code objects do.
    for code, frame in zip(source.traceback.raw_frames()[0], source.traceback.frames, strict=True):
        path = Path(frame.file_name)
        if path.parent == Path(__file__).parent:
            return
        if not INSIDE_JAX.search(frame.file_name):
            yield code.co_qualname, f"{'/'.join(path.parts[-2:])}:{frame.line_num}"


# The rows of an optimizer's state.


def tables_of_state(
    init: Callable, params: Any, state: Sequence[Shape], tables: Sequence[int]
) -> dict[int, int]:
    """The table, by its index among the parameters, of each leaf of the state that has its rows.

    Such a leaf, given by its index, gains as many rows as the table does.
    """
    leaves, treedef = jax.tree.flatten(params)
    sizes = {}
    for more, table in enumerate(tables, 1):
        size, *rest = leaves[table].shape
        leaves[table] = Shape((size + more, *rest), leaves[table].dtype)
        sizes[(size,), (size + more,)] = table
    longer_params = jax.tree.unflatten(treedef, leaves)
    longer = _traced(init, longer_params, init, "init cannot be traced").out_avals
    if len(longer) != len(state):
        want = f"that of optimizer.init(params), {len(longer)} arrays"
        raise arguments.value_error("state", want, len(state))
    owners = {}
    for i, (before, after) in enumerate(zip(state, longer, strict=True)):
        if before.shape == after.shape:
            continue
        owners[i] = sizes.get((before.shape[:1], after.shape[:1]))
        if owners[i] is None or before.shape[1:] != after.shape[1:]:
            reason = "which does not have one row for each row of a table"
            raise _refusal(_name(init), f"a state of shape {list(before.shape)}, {reason}")
    return owners
