"""Whether something that all rows share may leave out what a row needs.

An optimizer may act only on some of its steps: it sums the gradients of three, then applies the sum
and empties it. A row without a gradient in that third step would miss it. So a condition that all
rows share must not decide whether a row's gradient or state is used.

A schedule is a number that all rows share too, and it may be 0 for a while. What tells it from such
a switch is a sum: a number that is made to be exactly 0 now and then, and that multiplies a state
both on its way into the table and on its way into the same state, applies and empties it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from transformer_embed._src.tables.rows.programs import walk, words

# Kinds of values: the same for all rows, or computed from a row. Of several operands, the last kind
# counts. A number is a switch if it is made to be 0 in some steps; a choice is one of several
# constants other than 0.
CONSTANT, ZERO, SHARED, CHOICE, SWITCH, CONDITION, ROW = range(7)
# A number that is computed from conditions and constants by only these is still a condition:
# `1 - emit`. Times a constant it is a step size: `0.1 * emit`.
KEEP_CONDITIONS = words(
    "add broadcast_in_dim convert_element_type copy max min mul neg reshape squeeze sub"
)
# Where all operands are 0, or none is, the result of these is too.
KEEP_ZEROS = words("broadcast_in_dim convert_element_type copy div mul neg reshape squeeze")
# Whole numbers, which are 0 now and then.
MAKE_SWITCHES = words("ceil cond floor rem round sign")
# A condition among the operands of these may decide whether the others are used.
DECIDE = words("and mul or select_n")
# These add what their operands sum.
ADD = words(
    """
    add add_any broadcast_in_dim concatenate convert_element_type copy neg reduce_sum reshape
    select_n slice squeeze stack sub transpose
    """
)
# Among the inputs that a value is computed from: any that is not a table.
DATA = -1

Inputs = frozenset[int]


class Fact(NamedTuple):
    """What is known about a value.

    Attributes:
        kind: one of the kinds above.
        uses: the inputs that a value is computed from, whatever the shared conditions are.
        loss: the first shared condition that may leave out another input: a reason, and where it
            stands.
        sums: the rows of inputs that it is a sum of, each times numbers that its row shares.
        others: those that it is computed from in another way.
        switched: those that it sums after a switch: a reason, and where it stands.
    """

    kind: int = SHARED
    uses: Inputs = frozenset()
    loss: Any = None
    sums: Inputs = frozenset()
    others: Inputs = frozenset()
    switched: Mapping[int, Any] = {}


def find_loss(
    program: ClosedJaxpr, rows: Sequence[int | None], indices: Sequence[Sequence[int]]
) -> Any:
    """The reason why a step may leave out what a row needs, and where it stands; None without one.

    Args:
        program: that of the step, from its leaves to those after it.
        rows: for each operand, its index if it has rows of a table.
        indices: those of each table's gradient, of the table and of its state.
    """
    operands = [
        Fact(CONDITION if aval.dtype == jnp.bool_ else SHARED, frozenset([DATA]))
        if index is None
        else Fact(ROW, frozenset([index]), sums=frozenset([index]))
        for index, aval in zip(rows, program.in_avals, strict=True)
    ]
    before, facts = [], []
    while before != operands:
        before, facts = operands, walk(program, operands, _constant, _facts)
        # A switch that is kept in the state is one in the next step.
        kept = (
            fact._replace(kind=SWITCH) if fact.kind < SWITCH <= after.kind < ROW else fact
            for fact, after in zip(operands, facts, strict=False)
        )
        operands = [*kept, *operands[len(facts) :]]
    after = dict(zip(rows, facts, strict=False))
    for gradient, table, *states in indices:
        # New rows of the table must use their gradient, and those of a state the old ones.
        for new, old in [(table, gradient), *((state, state) for state in states)]:
            if after[new].loss and old not in after[new].uses:
                return after[new].loss
        for state in states:
            if state in {*after[table].switched} & {*after[state].switched}:
                return after[table].switched[state]
    return None


def _constant(value: Any) -> Fact:
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        # A key, or a traced value.
        return Fact()
    return Fact(CONSTANT if np.all(np.isfinite(array) & (array != 0)) else ZERO)


def _facts(equation: Any, operands: Sequence[Fact], sources: Sequence[Any]) -> Sequence[Fact]:
    """What is known about the results of an equation; see `walk`."""
    name, kinds = equation.primitive.name, [fact.kind for fact in operands]
    if name == "optimization_barrier":
        return operands
    uses = frozenset().union(*(fact.uses for fact in operands))
    if max(kinds, default=SHARED) < ROW:
        return [Fact(_shared_kind(name, kinds, v.aval.dtype), uses) for v in equation.outvars]
    loss = next((fact.loss for fact in operands if fact.loss), None)
    is_choice = name == "gather" and kinds[1] < ROW and bool(operands[1].uses)
    if is_choice or (name in DECIDE and CONDITION in kinds):
        # select_n(condition, a, b) uses what both use; a product with 0 uses nothing.
        cases = operands[1:] if name == "select_n" else operands
        before, uses = uses, frozenset.intersection(*(fact.uses for fact in cases))
        if not loss and before - uses - {DATA}:
            how = "by a condition outside of the row decides whether its gradient or state is used"
            loss = f"{name} {how}", sources
    sums, others = _sums(name, operands)
    switched = {key: why for fact in operands for key, why in fact.switched.items()}
    is_decided = kinds[0] < ROW if name == "select_n" else name not in ADD
    if is_choice or (is_decided and {SWITCH, CONDITION} & {*kinds}):
        how = "by a switch outside of the row decides when the sum in its state is used"
        switched = dict.fromkeys(sums, (f"{name} {how}", sources)) | switched
    return [Fact(ROW, uses, loss, sums, others, switched)] * len(equation.outvars)


def _sums(name: str, operands: Sequence[Fact]) -> tuple[Inputs, Inputs]:
    """The inputs that a row of results sums, and the others; see `Fact`."""
    sums = frozenset().union(*(fact.sums for fact in operands))
    others = frozenset().union(*(fact.others for fact in operands))
    if name in ("mul", "div"):
        # Of a product, what is in both factors; of a quotient, what is in the divisor.
        first, second = (fact.sums | fact.others for fact in operands)
        others |= second & first if name == "mul" else second
    elif name not in ADD:
        others |= sums
    return sums - others, others


def _shared_kind(name: str, kinds: Sequence[int], dtype: Any) -> int:
    """The kind of a result that all rows share."""
    if dtype == jnp.bool_:
        return CONDITION
    is_kept, is_whole = name in KEEP_CONDITIONS, jnp.issubdtype(dtype, jnp.integer)
    last = max(kinds[1:] if name == "select_n" else kinds, default=SHARED)
    if name == "select_n" and last < SWITCH and ZERO not in kinds:
        return CHOICE if last in (CONSTANT, CHOICE) else SHARED
    if is_kept and {SHARED, CHOICE, SWITCH}.isdisjoint(kinds):
        is_step_size = name == "mul" and min(kinds) < CONDITION == last
        return SWITCH if is_step_size else last
    if name in MAKE_SWITCHES or (is_whole and not is_kept) or ZERO < last != SHARED:
        return CHOICE if last == CHOICE and name in KEEP_ZEROS else SWITCH
    return SWITCH if name == "select_n" else SHARED
