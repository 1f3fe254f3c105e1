"""Checks that an optimizer updates each row of a table from that row alone.

The step is traced with a symbol in place of each table's number of rows; nothing is computed. An
axis of rows is an axis whose size is a symbol. Each row of a value must be computed from the same
row of other values and from values that all rows share. Then a block's program gives the rows that
the whole program would.

One more rule: a choice that all rows share (a schedule that emits on every third step) must not
decide whether a row's gradient or state is used, because a row without a gradient would miss it.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from transformer_embed._src import arguments


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


# Each row of the results is computed from the same row of the operands, if every result has an axis
# of rows. Nothing else has that size, so an axis of rows that an equation takes away and makes anew
# cannot go unseen. (A reshape may move rows: see `_problems`.)
KEEP_ROWS_APART = _words(
    """
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type broadcast_in_dim cbrt ceil clamp complex concatenate conj
    convert_element_type copy cos cosh digamma div dot_general eq eq_to erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log
    log1p logistic lt lt_to max min mul mulhi name ne neg nextafter not or pcast polygamma
    population_count pow pvary real reduce_and reduce_max reduce_min reduce_or reduce_precision
    reduce_prod reduce_sum reduce_xor regularized_incomplete_beta rem reshape round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square
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
PROGRAMS = ClosedJaxpr | Jaxpr
DIFFERS = "a program that depends on the number of rows"
ADVICE = (
    "Train the table densely, or keep that transformation off it with optax.multi_transform. "
    "To clip by a global norm, clip the gradients before update"
)

Shape = jax.ShapeDtypeStruct


class Fact(NamedTuple):
    """What is known about a value.

    Attributes:
        uses: the inputs that a row may be computed from; none if all rows share the value.
        always_uses: those that it is computed from whatever the shared conditions are.
        choice: the error for the first shared condition that left out an input.
        is_condition: whether it is a condition that all rows share.
    """

    uses: frozenset[int] = frozenset()
    always_uses: frozenset[int] = frozenset()
    choice: ValueError | None = None
    is_condition: bool = False


class Tables(NamedTuple):
    """The tables of a step that is checked; each is named by the place of its gradient.

    Attributes:
        shapes: those of all leaves of (gradients, parameters, state).
        places: for each table, where its gradient, its rows and their state are among the leaves.
        blocks: for each table, the number of rows that are updated at a time.
    """

    shapes: Sequence[Shape]
    places: Mapping[int, list[int]]
    blocks: Mapping[int, int]

    def with_rows(self, rows: Mapping[int, Any]) -> dict[int, Shape]:
        """The shape at each place of a table, with this number of its rows."""
        return {
            place: Shape((rows[table], *self.shapes[place].shape[1:]), self.shapes[place].dtype)
            for table, places in self.places.items()
            for place in places
        }

    def symbols(self) -> dict[int, Any]:
        """A symbol for each number of rows, of at least a block's and at most the table's."""
        names, bounds = [f"table{table}_rows" for table in self.blocks], []
        for name, (table, block) in zip(names, self.blocks.items(), strict=True):
            least, most = sorted((block, self.shapes[table].shape[0]))
            bounds += [f"{name} >= {least}", f"{name} <= {most}"]
        symbols = export.symbolic_shape(",".join(names), constraints=bounds)
        return dict(zip(self.blocks, symbols, strict=True))


def find_tables(
    init: Callable, treedef: Any, shapes: Sequence[Shape], blocks: Mapping[int, int]
) -> Tables:
    """The tables of a step, with the leaves of the state that have their rows.

    Args:
        init: the optimizer's function.
        treedef: that of (gradients, parameters, state).
        shapes: those of its leaves.
        blocks: see `Tables`.
    """
    size = treedef.children()[0].num_leaves
    tables = Tables(shapes, {table: [table, size + table] for table in blocks}, blocks)
    symbols, leaves = tables.symbols(), dict(enumerate(shapes))
    leaves.update(tables.with_rows(symbols))
    _, params, _ = jax.tree.unflatten(treedef, leaves.values())
    avals = _traced(init, params, init, DIFFERS).out_avals
    if len(avals) != len(shapes) - 2 * size:
        want = f"that of optimizer.init(params), {len(avals)} arrays"
        raise arguments.value_error("state", want, len(shapes) - 2 * size)
    owners = {(symbol,): table for table, symbol in symbols.items()}
    for place, aval in enumerate(avals, 2 * size):
        table, shape = owners.get(aval.shape[:1]), aval.shape
        if table is not None:
            tables.places[table].append(place)
            shape = (shapes[table].shape[0], *shape[1:])
        if shape != shapes[place].shape:
            state = f"a state of shape {list(shapes[place].shape)}"
            reason = f"{state}, which does not have one row for each row of a table"
            raise _refusal(_name(init), reason)
    return tables


def check(step: Callable[[Any], Sequence[Any]], tables: Tables, update: Callable) -> None:
    """Raises a ValueError unless a step on a block of rows gives the rows of the whole step.

    Args:
        step: from an array for each place of a table to all leaves after the step.
        tables: see `Tables`.
        update: the optimizer's function, to name in an error.
    """
    sizes = {table: tables.shapes[table].shape[0] for table in tables.places}
    whole = _traced(step, tables.with_rows(sizes), update, "update cannot be traced")
    symbols = tables.symbols()
    inputs = tables.with_rows(symbols)
    program = _traced(step, inputs, update, DIFFERS)
    reader = _Reader(update)
    facts = reader.follow(program, [Fact(frozenset([i]), frozenset([i])) for i in sorted(inputs)])
    # New rows of the table must use their gradient, and those of a state the old ones.
    needs = {rows: gradient for gradient, rows, *_ in tables.places.values()}
    for place, (aval, fact) in enumerate(zip(program.out_avals, facts, strict=True)):
        old = inputs.get(place)
        if old is None:
            if any(map(export.is_symbolic_dim, aval.shape)):
                what = "parameters or state outside the table"
                raise reader.refusal(f"{what} become one row for each of its rows")
            continue
        if aval.shape != old.shape:
            raise reader.refusal("the new state does not have the rows and the shape of the state")
        if aval.dtype != old.dtype:
            how = f"a state of dtype {old.dtype} becomes {aval.dtype}"
            raise reader.refusal(f"{how}, but a step must keep the dtype")
        if fact.choice and needs.get(place, place) in fact.uses - fact.always_uses:
            raise fact.choice
    # A symbol is not equal to any number, but the number of rows may be.
    block = _traced(step, tables.with_rows(tables.blocks), update, DIFFERS)
    for other, rows in ((whole, sizes), (block, tables.blocks)):
        outline = _outline(program)
        for table, symbol in symbols.items():
            outline = outline.replace(str(symbol), str(rows[table]))
        if outline != _outline(other):
            raise reader.refusal(DIFFERS)


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
    """Reads a program.

    Attributes:
        update: the optimizer's function, to name in an error.
        sources: where the equation that is read, and the calls around it, were written.
    """

    update: Callable
    sources: list[Any] = dataclasses.field(default_factory=list)

    def refusal(self, reason: str) -> ValueError:
        """The error for the equation that is read."""
        name, line = _transformation_and_line(self.sources)
        return _refusal(name or _name(self.update), reason + line)

    def follow(self, program: Any, operands: Sequence[Fact] = ()) -> Sequence[Fact]:
        """What is known about the results; without operands, of values that all rows share.

        Raises if the program mixes rows.
        """
        # Called programs may be without constants.
        program = getattr(program, "jaxpr", program)
        facts = collections.defaultdict(Fact, zip(program.invars, operands, strict=False))

        def read(variable: Any) -> Fact:
            return Fact() if isinstance(variable, Literal) else facts[variable]

        for equation in program.eqns:
            self.sources.append(equation.source_info)
            results = self.results(equation, list(map(read, equation.invars)))
            facts.update(zip(equation.outvars, results, strict=True))
            self.sources.pop()
        return list(map(read, program.outvars))

    def results(self, equation: Any, operands: Sequence[Fact]) -> Sequence[Fact]:
        """What is known about the results of an equation."""
        name, params = equation.primitive.name, jax.tree.leaves(equation.params)
        programs = [param for param in params if isinstance(param, PROGRAMS)]
        if name in CALLS and programs:
            return self.follow(programs[0], operands)
        if name == "optimization_barrier":
            return operands
        for problem in _problems(equation):
            raise self.refusal(problem)
        for program in programs:
            self.follow(program)
        fact = self.uses(name, operands)
        stays_condition = _stays_condition(equation, operands)
        return [
            fact._replace(
                is_condition=not fact.uses and (stays_condition or out.aval.dtype == jnp.bool_)
            )
            for out in equation.outvars
        ]

    def uses(self, name: str, operands: Sequence[Fact]) -> Fact:
        """What a result is computed from, whatever the shared conditions are."""
        uses = frozenset().union(*(fact.uses for fact in operands))
        always_uses = frozenset().union(*(fact.always_uses for fact in operands))
        # select_n(condition, a, b) uses what both branches use; a product with 0 uses nothing.
        if name == "select_n" and operands[0].is_condition:
            always_uses = frozenset.intersection(*(fact.always_uses for fact in operands[1:]))
        elif name in ("and", "mul") and any(fact.is_condition for fact in operands):
            always_uses = frozenset()
        choice = next((fact.choice for fact in operands if fact.choice), None)
        if choice is None and uses != always_uses:
            how = "by a condition outside of the row decides whether its gradient is used"
            choice = self.refusal(f"{name} {how}")
        return Fact(uses, always_uses, choice)


def _problems(equation: Any) -> Iterator[str]:
    """The reasons why rows of the results may not be made from the same rows of the operands."""
    name, params = equation.primitive.name, equation.params
    before = list(filter(None, map(_row_axes, equation.invars)))
    after = list(map(_row_axes, equation.outvars))
    if before and name in CONTROL_FLOW:
        yield f"{name} on a value outside of the row decides how the row is updated"
    if before and name not in KEEP_ROWS_APART:
        yield f"{name} is not known to keep rows apart"
    others = [param for key, param in params.items() if key not in SIZES]
    if any(map(export.is_symbolic_dim, jax.tree.leaves(others))):
        yield DIFFERS
    for axes in after:
        if len(axes) > 1:
            yield "pairs of rows"
        if before and list(axes.values()) != list(before[0].values()):
            yield f"{name} over the rows"
        is_equal = name == "broadcast_in_dim" or (
            name == "iota" and params["dimension"] not in axes
        )
        if axes and not before and not is_equal:
            yield f"{name} tells rows apart by their place in the table"
    if before and name == "reshape":
        (operand, *_), (result,) = equation.invars, equation.outvars
        # A row keeps its place if as many entries come before it.
        first = math.prod(operand.aval.shape[: min(before[0])])
        if params["dimensions"] or first != math.prod(result.aval.shape[: min(after[0])]):
            yield "reshape over the rows"


def _row_axes(variable: Any) -> dict[int, Any]:
    """The axes of rows of a variable, and their sizes: symbols."""
    sizes = enumerate(variable.aval.shape)
    return {axis: size for axis, size in sizes if export.is_symbolic_dim(size)}


def _stays_condition(equation: Any, operands: Sequence[Fact]) -> bool:
    """Whether a number that all rows share is computed from conditions alone."""
    pairs = zip(equation.invars, operands, strict=True)
    others = [variable for variable, fact in pairs if not fact.is_condition]
    name = equation.primitive.name
    if name not in KEEP_CONDITIONS or len(others) == len(operands) or (others and name == "mul"):
        return False
    return all(isinstance(variable, Literal) for variable in others)


def _outline(program: Any) -> str:
    """A program and those that it calls, as text.

    `str` would write a program that is called twice only once, if the sizes are the same.
    """
    program = getattr(program, "jaxpr", program)
    numbers = {variable: i for i, variable in enumerate((*program.constvars, *program.invars))}

    def name(variable: Any) -> str:
        if isinstance(variable, Literal):
            return str(variable)
        return f"{numbers.setdefault(variable, len(numbers))}:{variable.aval}"

    words = []
    for equation in program.eqns:
        words += [equation.primitive.name, *map(name, (*equation.invars, *equation.outvars))]
        for param in jax.tree.leaves(equation.params):
            words.append(_outline(param) if isinstance(param, PROGRAMS) else str(param))
    words += map(name, program.outvars)
    # Functions have addresses.
    return re.sub("at 0x[0-9a-f]+", "", " ".join(words))


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
