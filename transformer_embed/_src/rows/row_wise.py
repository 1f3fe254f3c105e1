"""Proves that an optimizer updates each row of a table from that row alone, and splits its step by
table.

The step is traced twice: with each table at its real size, and with the number of rows that are
updated at a time. Nothing is computed. The two programs must differ only in that size. The data is
then followed through them: each row of an array must be computed from the same row of its operands
and from values that all rows share. So the second program computes the same new rows as the first.
"""

import dataclasses
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import AxisType
from jaxtyping import Array

from transformer_embed._src import arguments
from transformer_embed._src.rows.program import (
    Equation,
    Operand,
    Program,
    run,
    same_operand,
    same_value,
    trace,
)

ELEMENTWISE = frozenset(
    re.findall(
        r"\w+",
        """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
    convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi ne neg nextafter not or
    pcast polygamma population_count pow pvary real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
    """,
    )
)
REDUCTIONS = frozenset(
    re.findall(
        r"\w+",
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor",
    )
)
CUMULATIVE = frozenset(re.findall(r"\w+", "cumlogsumexp cummax cummin cumprod cumsum"))
CONTROL_FLOW = frozenset(["cond", "scan", "while"])
# A number computed from conditions by only these is still a condition; multiplied by another number
# it is a step size.
KEEP_CONDITIONS = frozenset(
    re.findall(
        r"\w+",
        "add and broadcast_in_dim convert_element_type copy max min mul neg not or reshape squeeze sub xor",
    )
)
# The params of an equation that contain sizes of arrays, and those that say how an array is
# sharded.
SIZES = ("shape", "new_sizes", "limit_indices", "sizes", "dimensions")
SHARDINGS = ("sharding", "out_sharding")

# Owners of an array that no table owns.
SHARED, UNKNOWN = -1, -2
ADVICE = (
    "Train the table densely, or keep that transformation off it with optax.multi_transform. To clip by a global norm, clip the gradients "
    "before update"
)


class NotRowWiseError(Exception):
    """Why an optimizer is not row-wise, and the equation that shows it."""

    def __init__(self, reason: str, equation: Equation | None = None):
        super().__init__(reason)
        self.equation = equation


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known about a value.

    Attributes:
        axis: the axis of rows. None: all rows share the value.
        table: the table that the rows belong to. None: no table; all rows are equal.
        possible_inputs: the inputs that a row may depend on.
        certain_inputs: the inputs that a row depends on whatever the shared conditions are.
        is_condition: whether it is a shared condition.
        first_conditional: the equation that first used a condition.
    """

    axis: int | None = None
    table: int | None = None
    possible_inputs: frozenset[int] = frozenset()
    certain_inputs: frozenset[int] = frozenset()
    is_condition: bool = False
    first_conditional: Equation | None = None


class Split(NamedTuple):
    """A step of an optimizer, split by table.

    Attributes:
        program: all equations, for the number of rows that are updated at a time.
        results: the structure of (new parameters, new state).
        owners_in: for each input, the table whose rows it has, or SHARED.
        owners_out: the same for each output.
        shared: the equations whose results all rows share.
        rows: the equations of each table's rows.
        needs: the shared values that each table's rows are computed from.
    """

    program: Program
    results: Any
    owners_in: Sequence[int]
    owners_out: Sequence[int]
    shared: list[Equation]
    rows: Mapping[int, list[Equation]]
    needs: Mapping[int, list[int]]

    def run_shared(self, inputs_of_step: Any) -> tuple[Any, dict[int, list[Any]]]:
        """(new parameters, new state), with shapes in place of rows, and the shared values that
        each table's rows need. Reads no rows."""
        inputs = zip(
            self.program.inputs, jax.tree.leaves(inputs_of_step), self.owners_in, strict=True
        )
        known = self.program.constants | {
            number: jnp.asarray(value) for number, value, owner in inputs if owner == SHARED
        }
        outputs = [
            output
            for output, owner in zip(self.program.outputs, self.owners_out, strict=True)
            if owner == SHARED
        ]
        found = iter(
            run(
                self.shared,
                known,
                [*outputs, *(number for numbers in self.needs.values() for number in numbers)],
            )
        )
        results = [
            next(found) if owner == SHARED else self.program.type_of(output)
            for output, owner in self._outputs()
        ]
        return jax.tree.unflatten(self.results, results), {
            table: [next(found) for _ in numbers] for table, numbers in self.needs.items()
        }

    def run_rows(self, table: int, needed: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The new rows of a table and its state, from the shared values that they need and the old
        rows."""
        own = [
            number
            for number, owner in zip(self.program.inputs, self.owners_in, strict=True)
            if owner == table
        ]
        known = dict(zip(own, inputs, strict=True)) | dict(
            zip(self.needs[table], needed, strict=True)
        )
        return run(
            self.rows[table],
            known,
            [output for output, owner in self._outputs() if owner == table],
            without=SHARDINGS,
        )

    def _outputs(self) -> Iterator[tuple[Operand, int]]:
        return zip(self.program.outputs, self.owners_out, strict=True)


def split_step(
    optimizer: Any, inputs_of_step: Any, owners: Any, sizes: Mapping[int, tuple[int, int]]
) -> Split:
    """Splits a step of an optimizer by table, once it is proved that each row is updated from that
    row alone.

    Args:
        optimizer: an optax optimizer.
        inputs_of_step: trees (gradients, state, parameters, extra inputs_of_step) of arrays or
            shapes; tables that are updated by rows are shapes.
        owners: the same trees, with the table whose rows each array has, or SHARED.
        sizes: for each table, its number of rows and the number that is updated at a time, which
            must differ.

    Raises:
        ValueError: the proof fails: an update of a row may need more than that row.
    """
    leaves, treedef = jax.tree.flatten(inputs_of_step)
    shapes, owners_in = tuple(map(_shape_and_sharding, leaves)), tuple(jax.tree.leaves(owners))
    key = ("split", treedef, shapes, owners_in, tuple(sizes.items()), _jax_settings())
    return _cached(
        optimizer.update, key, lambda: _split(optimizer.update, treedef, shapes, owners_in, sizes)
    )


def _split(
    update: Callable,
    treedef: Any,
    shapes: Sequence[Any],
    owners_in: Sequence[int],
    sizes: Mapping[int, tuple[int, int]],
) -> Split:
    grads_indices, state_indices, params_indices, _ = jax.tree.unflatten(
        treedef, range(len(shapes))
    )
    # A new table must depend on its gradient, and new state on the old state.
    keeps = jax.tree.leaves((grads_indices, state_indices))
    owners_out = [owners_in[index] for index in jax.tree.leaves((params_indices, state_indices))]
    shrunk = [_resized(*each, sizes) for each in zip(shapes, owners_in, strict=True)]
    try:
        full, small = (
            _traced(update, treedef, shapes, ""),
            _traced(update, treedef, shrunk, "with fewer rows "),
        )
        facts = _follow(full, small, owners_in, sizes)
        for output, owner, kept in zip(small.outputs, owners_out, keeps, strict=True):
            _check_output(small, facts, output, owner, small.inputs[kept])
    except NotRowWiseError as problem:
        name, where = _transformation_and_line(problem.equation, update)
        raise ValueError(refusal(f"{name}: {problem}{where}")) from problem.__cause__
    results = jax.tree.structure((params_indices, state_indices))
    return _split_by_table(small, facts, results, owners_in, owners_out)


def _cached(update: Callable, key: Any, make: Callable) -> Any:
    """The result of `make`, cached as long as the optimizer lives, unless it holds tracers."""
    try:
        proofs = _PROOFS.setdefault(update, {})
    except TypeError:
        return make()
    if key in proofs:
        return proofs[key]
    found = make()
    if not (isinstance(found, Split) and found.program.holds_tracers):
        proofs[key] = found
    return found


_PROOFS: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _jax_settings() -> tuple[Any, ...]:
    """The settings of jax that a trace depends on."""
    names = (
        "jax_enable_x64",
        "jax_default_matmul_precision",
        "jax_numpy_dtype_promotion",
        "jax_default_prng_impl",
    )
    return tuple(getattr(jax.config, name) for name in names)


def _shape_and_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, and under explicit mesh axes how it is split."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(jnp.asarray(leaf))
    explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=aval.sharding if explicit else None,
        weak_type=aval.weak_type,
    )


def refusal(found: str) -> str:
    """The message for an optimizer that is not row-wise."""
    return (
        f"{arguments.wanted('optimizer', 'each row updated from that row alone', found)}. {ADVICE}."
    )


def _traced(
    update: Callable, treedef: Any, shapes: Sequence[jax.ShapeDtypeStruct], how: str
) -> Program:
    """The step from the leaves of its inputs_of_step to those of (new parameters, new state)."""

    def step(*leaves: Array) -> list[Array]:
        grads, state, params, extra_args = jax.tree.unflatten(treedef, leaves)
        # Slow to load, and only training needs it.
        import optax  # noqa: PLC0415

        updates, after = update(grads, state, params, **extra_args)
        results, want = (optax.apply_updates(params, updates), after), (params, state)
        if jax.tree.structure(results) != jax.tree.structure(want):
            raise TypeError("updates and state do not have the structure of parameters and state")
        return jax.tree.leaves(results)

    try:
        return trace(step, shapes)
    except Exception as error:
        raise NotRowWiseError(f"update cannot be traced {how}({_summary(error)})") from error


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(chr(10), 1)[0][:100]}"


def _resized(
    shape: jax.ShapeDtypeStruct, owner: int, sizes: Mapping[int, tuple[int, int]]
) -> jax.ShapeDtypeStruct:
    return (
        shape
        if owner == SHARED
        else jax.ShapeDtypeStruct((sizes[owner][1], *shape.shape[1:]), shape.dtype)
    )


def _split_by_table(
    program: Program,
    facts: Mapping[int, Fact],
    results: Any,
    owners_in: Sequence[int],
    owners_out: Sequence[int],
) -> Split:
    """The equations of each table's rows, and the others."""
    rows, needs = {}, {}
    for table in sorted({*owners_in} - {SHARED}):
        outputs = [
            output
            for output, owner in zip(program.outputs, owners_out, strict=True)
            if owner == table
        ]
        rows[table] = [
            each
            for each in program.needed(outputs)
            if each.outputs and facts[each.outputs[0]].axis is not None
        ]
        read = [operand for equation in rows[table] for operand in equation.inputs]
        needs[table] = sorted(
            {each for each in read if not isinstance(each, Literal) and facts[each].axis is None}
        )
    outputs = [
        output for output, owner in zip(program.outputs, owners_out, strict=True) if owner == SHARED
    ]
    shared = program.needed(
        [*outputs, *(number for numbers in needs.values() for number in numbers)]
    )
    return Split(program, results, owners_in, owners_out, shared, rows, needs)


def _check_output(
    program: Program, facts: Mapping[int, Fact], output: Operand, owner: int, kept: int
) -> None:
    """Raises if an output does not have the rows that it should, or if a shared condition can make
    it ignore `kept`."""
    fact = _fact(facts, output)
    if owner == SHARED:
        if fact.axis is not None:
            raise NotRowWiseError(
                "parameters or state outside the table become one row for each of its rows"
            )
        return
    if fact.axis != 0 or fact.table not in (None, owner):
        raise NotRowWiseError("a new row is not made from the same row of the table")
    if program.type_of(output).shape != program.types[kept].shape:
        raise NotRowWiseError("the new state does not have the shape of the state")
    if kept in fact.possible_inputs - fact.certain_inputs:
        name = fact.first_conditional.primitive.name if fact.first_conditional else "a branch"
        raise NotRowWiseError(
            f"{name} by a condition outside of the row decides whether its gradient is used",
            fact.first_conditional,
        )


# Following the data.


def _follow(
    full: Program, small: Program, owners_in: Sequence[int], sizes: Mapping[int, tuple[int, int]]
) -> dict[int, Fact]:
    """What is known about each value that an output needs. Raises if the programs differ in more
    than the number of rows."""
    differ = "a program that depends on the number of rows"
    if len(full.equations) != len(small.equations) or len(full.outputs) != len(small.outputs):
        raise NotRowWiseError(differ)
    facts = {n: Fact() for n in small.constants}
    for number, value in small.constants.items():
        if number not in full.constants or not same_value(full.constants[number], value):
            raise NotRowWiseError("a constant that depends on the number of rows")
    for number, owner in zip(small.inputs, owners_in, strict=True):
        if owner == SHARED:
            facts[number] = Fact(is_condition=small.types[number].dtype == jnp.bool_)
        else:
            own = frozenset([number])
            facts[number] = Fact(axis=0, table=owner, possible_inputs=own, certain_inputs=own)
    live = {id(equation) for equation in small.needed(small.outputs)}
    for full_equation, equation in zip(full.equations, small.equations, strict=True):
        if (
            full_equation.primitive is not equation.primitive
            or full_equation.outputs != equation.outputs
            or not all(map(same_operand, full_equation.inputs, equation.inputs))
        ):
            raise NotRowWiseError(differ, equation)
        if id(equation) in live:
            facts |= zip(
                equation.outputs,
                _follow_equation(full, small, full_equation, equation, facts, sizes),
                strict=True,
            )
    if not all(map(same_operand, full.outputs, small.outputs)):
        raise NotRowWiseError(differ)
    return facts


def _fact(facts: Mapping[int, Fact], operand: Operand) -> Fact:
    return Fact() if isinstance(operand, Literal) else facts[operand]


def _follow_equation(
    full: Program,
    small: Program,
    full_equation: Equation,
    equation: Equation,
    facts: Mapping[int, Fact],
    sizes: Mapping[int, tuple[int, int]],
) -> list[Fact]:
    """What is known about an equation's results; `full_equation` is the same equation of the full
    program."""
    operands = [_fact(facts, operand) for operand in equation.inputs]
    grown = [
        _row_axis(full.types[n].shape, small.types[n].shape, equation) for n in equation.outputs
    ]
    name = equation.primitive.name
    if equation.has_effects and any(fact.axis is not None for fact in operands):
        raise NotRowWiseError(f"{name} has a side effect on rows", equation)
    has_rows = any(fact.axis is not None for fact in operands)
    if name in CONTROL_FLOW and has_rows:
        raise NotRowWiseError(
            f"{name} on a value outside of the row decides how the row is updated", equation
        )
    if not _same_params(
        full_equation, equation, any(axis is not None for axis in grown), set(sizes.values())
    ):
        raise NotRowWiseError(
            f"{name} over the rows" if has_rows else f"{name} depends on the number of rows",
            equation,
        )
    if not has_rows:
        if any(axis is not None for axis in grown):
            _check_broadcast(small, equation, grown[0])
        return [
            _combined_fact(equation, operands, axis, small.types[n].dtype == jnp.bool_)
            for axis, n in zip(grown, equation.outputs, strict=True)
        ]
    if len({fact.table for fact in operands} - {None}) > 1:
        raise NotRowWiseError(f"{name} mixes the rows of two tables", equation)
    axis = _result_axis(full, full_equation, operands)
    if axis is None or any(each != axis for each in grown):
        raise NotRowWiseError(f"{name} over the rows", equation)
    return [
        _combined_fact(equation, operands, axis, small.types[n].dtype == jnp.bool_)
        for n in equation.outputs
    ]


def _row_axis(full: Sequence[int], small: Sequence[int], equation: Equation) -> int | None:
    """The axis whose size differs between the two programs, which is the axis of rows."""
    if len(full) != len(small):
        raise NotRowWiseError("a program that depends on the number of rows", equation)
    axes = [
        axis for axis, sizes in enumerate(zip(full, small, strict=True)) if sizes[0] != sizes[1]
    ]
    if len(axes) > 1:
        raise NotRowWiseError(f"{equation.primitive.name} pairs rows with rows", equation)
    return axes[0] if axes else None


def _same_params(
    full_equation: Equation, equation: Equation, grows: bool, sizes: set[tuple[int, int]]
) -> bool:
    """Whether the params are the same in both programs, except for the number of rows in the size
    of an array."""

    def same(name: str, before: Any, after: Any) -> bool:
        if same_value(before, after) or (grows and name in SHARDINGS):
            return True
        if not (grows and name in SIZES and isinstance(after, tuple) and len(before) == len(after)):
            return False
        return all(a == b or (a, b) in sizes for a, b in zip(before, after, strict=True))

    return all(
        same(name, full_equation.params[name], after) for name, after in equation.params.items()
    )


def _check_broadcast(program: Program, equation: Equation, axis: int | None) -> None:
    """Raises unless all rows of a result are equal, if its operands have no rows."""
    name, params = equation.primitive.name, equation.params
    if name == "broadcast_in_dim":
        sources = dict(
            zip(
                params["broadcast_dimensions"],
                program.type_of(equation.inputs[0]).shape,
                strict=True,
            )
        )
        if sources.get(axis, 1) == 1:
            return
    if name == "iota" and params["dimension"] != axis:
        return
    raise NotRowWiseError(f"{name} tells rows apart by their place in the table", equation)


def _combined_fact(
    equation: Equation, operands: Sequence[Fact], axis: int | None, is_bool: bool
) -> Fact:
    """What a result depends on, and whether a condition decides about it."""
    name = equation.primitive.name
    table = next((fact.table for fact in operands if fact.table is not None), None)
    possible = frozenset().union(*(fact.possible_inputs for fact in operands))
    certain = frozenset().union(*(fact.certain_inputs for fact in operands))
    first_conditional = next(
        (fact.first_conditional for fact in operands if fact.first_conditional is not None), None
    )
    conditions = [fact.is_condition for fact in operands]
    if name == "select_n" and operands[0].is_condition:
        certain = frozenset.intersection(*(fact.certain_inputs for fact in operands[1:]))
    elif name in ("mul", "and", "div") and any(conditions):
        certain = frozenset()
    if certain != possible and first_conditional is None:
        first_conditional = equation
    is_condition = table is None and (is_bool or _stays_condition(equation, conditions))
    return Fact(axis, table, possible, certain, is_condition, first_conditional)


def _stays_condition(equation: Equation, conditions: Sequence[bool]) -> bool:
    """Whether a number is still a condition: `1 - emit` is one, `0.1 * emit` is a step size."""
    rest = [
        operand
        for operand, is_condition in zip(equation.inputs, conditions, strict=True)
        if not is_condition
    ]
    shifts = equation.primitive.name in ("add", "sub", "max", "min") and all(
        isinstance(operand, Literal) for operand in rest
    )
    return equation.primitive.name in KEEP_CONDITIONS and any(conditions) and (not rest or shifts)


def _result_axis(program: Program, equation: Equation, operands: Sequence[Fact]) -> int | None:
    """The axis of rows of an equation's results. None: there is none, or a row is not computed from
    the same row of the operands."""
    name, params = equation.primitive.name, equation.params
    axes = [fact.axis for fact in operands]
    shapes = [program.type_of(operand).shape for operand in equation.inputs]
    if name == "dot_general":
        return _dot_axis(params["dimension_numbers"], axes, shapes)
    axis, *others = {axis for axis in axes if axis is not None}
    if others:
        return None
    if name in ELEMENTWISE:
        return axis
    if name in REMOVED_AXES_PARAM:
        over = params[REMOVED_AXES_PARAM[name]]
        return None if axis in over else axis - sum(each < axis for each in over)
    if name in ALONG_AXIS_PARAM:
        return None if axis == params[ALONG_AXIS_PARAM[name]] else axis
    if name in NEW_AXIS:
        return NEW_AXIS[name](params, shapes[0], axis)
    raise NotRowWiseError(f"{name} does not keep rows apart", equation)


def _sliced_axis(params: Mapping[str, Any], shape: Sequence[int], axis: int) -> int | None:
    strides = params["strides"] or [1] * len(shape)
    is_whole = (params["start_indices"][axis], params["limit_indices"][axis], strides[axis]) == (
        0,
        shape[axis],
        1,
    )
    return axis if is_whole else None


def _reshaped_axis(params: Mapping[str, Any], shape: Sequence[int], axis: int) -> int | None:
    """The new axis with the same size and the same number of entries before it."""
    sizes, before = params["new_sizes"], math.prod(shape[:axis])
    fit = (
        new
        for new, size in enumerate(sizes)
        if size == shape[axis] and math.prod(sizes[:new]) == before
    )
    return next(fit, None) if params["dimensions"] is None else None


def _dot_axis(
    numbers: Any, axes: Sequence[int | None], shapes: Sequence[Sequence[int]]
) -> int | None:
    contracting, batch = numbers
    sides = [side for side, axis in enumerate(axes) if axis is not None]
    if any(axes[side] in contracting[side] for side in sides):
        return None
    batch_axes = {
        batch[side].index(axes[side]) if axes[side] in batch[side] else None for side in sides
    }
    if len(sides) == 2:
        return batch_axes.pop() if len(batch_axes) == 1 else None
    if batch_axes != {None}:
        return None
    axis = axes[sides[0]]
    free = [
        [i for i in range(len(shape)) if i not in (*c, *b)]
        for shape, c, b in zip(shapes, contracting, batch, strict=True)
    ]
    return (
        len(batch[0])
        + (len(free[0]) if sides[0] else 0)
        + [i == axis for i in free[sides[0]]].index(True)
    )


# Equations that remove axes, and the param that names these.
REMOVED_AXES_PARAM = dict.fromkeys(REDUCTIONS, "axes") | {"squeeze": "dimensions"}
# Equations along one axis, and the param that names it.
ALONG_AXIS_PARAM = {
    "concatenate": "dimension",
    "sort": "dimension",
    "split": "axis",
} | dict.fromkeys(CUMULATIVE, "axis")
# Equations that move axes, and the new index of the axis of rows.
NEW_AXIS: Mapping[str, Callable[[Mapping[str, Any], Sequence[int], int], int | None]] = {
    "broadcast_in_dim": lambda params, _, axis: params["broadcast_dimensions"][axis],
    "transpose": lambda params, _, axis: params["permutation"].index(axis),
    "rev": lambda params, _, axis: None if axis in params["dimensions"] else axis,
    "pad": lambda params, _, axis: (
        axis if tuple(params["padding_config"][axis]) == (0, 0, 0) else None
    ),
    "slice": _sliced_axis,
    "reshape": _reshaped_axis,
}


# Names.

UPDATE = re.compile(r"(?:^|\.)(\w+)(?:\.<locals>)?\.update\w*(?:\.|$)")
SLASH = r"[\\/]"
INSIDE_JAX = re.compile(rf"{SLASH}jax{SLASH}(_src|numpy|lax|_)")


def _transformation_and_line(equation: Equation | None, update: Callable) -> tuple[str, str]:
    """The transformation that wrote an equation, and the file and line."""
    for source in equation.sources if equation else ():
        frames = list(_frames(source))
        for name, _, _ in frames:
            if match := UPDATE.search(name):
                _, file, line = frames[0]
                return match[1], f" ({'/'.join(re.split(SLASH, file)[-2:])}:{line})"
    return _name(update), ""


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__).split(".")[0]


def _frames(source: Any) -> Iterator[tuple[str, str, int]]:
    """The qualified name, file and line of each call outside of jax, from the innermost call to the
    step."""
    if source.traceback is None:
        return
    # Before jax 0.7, frames have no qualified names; their code objects do.
    for code, frame in zip(source.traceback.raw_frames()[0], source.traceback.frames, strict=True):
        if frame.file_name == __file__:
            return
        if not INSIDE_JAX.search(frame.file_name):
            yield code.co_qualname, frame.file_name, frame.line_num


# The rows of an optimizer's state.


def state_owners(
    optimizer: Any,
    treedef: Any,
    params: Sequence[Any],
    tables: tuple[int, ...],
    state: Sequence[Any],
    is_leaf: Callable,
) -> tuple[int | None, ...]:
    """For each leaf of the state, the table whose rows it has, or None.

    A leaf belongs to a table if it gains as many rows as the table does. `params` are leaves, or
    shapes for tables; `state` are shapes.
    """
    flat, inner = jax.tree.flatten(list(params))
    shapes = jax.tree.unflatten(inner, list(map(_shape_and_sharding, flat)))
    key = (
        "owners",
        optimizer.init,
        treedef,
        inner,
        tuple(map(_shape_and_sharding, flat)),
        tables,
        tuple(state),
        _jax_settings(),
    )
    return _cached(
        optimizer.update,
        key,
        lambda: _owners(optimizer.init, treedef, shapes, tables, state, is_leaf),
    )


def _owners(
    init: Callable,
    treedef: Any,
    params: Sequence[Any],
    tables: tuple[int, ...],
    state: Sequence[Any],
    is_leaf: Callable,
) -> tuple[int | None, ...]:
    more = {table: n for n, table in enumerate(tables, 1)}
    try:
        longer = jax.eval_shape(
            init,
            jax.tree.unflatten(
                treedef, [_with_more_rows(leaf, more.get(i, 0)) for i, leaf in enumerate(params)]
            ),
        )
    except Exception as error:
        raise ValueError(
            refusal(f"{_name(init)}: init cannot be traced ({_summary(error)})")
        ) from error
    given, grown = [leaf.shape for leaf in state], _shapes(longer, is_leaf)
    owners = (
        [_owner_of(*each, params, more) for each in zip(given, grown, strict=True)]
        if len(given) == len(grown)
        else [UNKNOWN]
    )
    if UNKNOWN not in owners:
        return tuple(None if owner == SHARED else owner for owner in owners)
    if given != _shapes(jax.eval_shape(init, jax.tree.unflatten(treedef, params)), is_leaf):
        raise ValueError(
            arguments.wanted("state", "that of optimizer.init(params)", "arrays of other shapes")
        )
    index = owners.index(UNKNOWN)
    raise ValueError(
        refusal(
            f"{_name(init)}: a state of shape {list(given[index])}, which does not have one row for each row of a table"
        )
    )


def _shapes(state: Any, is_leaf: Callable) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(state, is_leaf=is_leaf)]


def _owner_of(
    have: Sequence[int], want: Sequence[int], params: Sequence[Any], more: Mapping[int, int]
) -> int:
    """The table whose rows an array has; UNKNOWN if its shape changes in another way."""
    grown = (
        [b - a for a, b in zip(have, want, strict=True)] if len(have) == len(want) else [UNKNOWN]
    )
    if not any(grown):
        return SHARED
    fits = (
        table
        for table, n in more.items()
        if grown == [n] + [0] * (len(have) - 1) and have[0] == params[table].shape[0]
    )
    return next(fits, UNKNOWN)


def _with_more_rows(leaf: Any, rows: int) -> Any:
    return (
        jax.ShapeDtypeStruct((leaf.shape[0] + rows, *leaf.shape[1:]), leaf.dtype) if rows else leaf
    )
