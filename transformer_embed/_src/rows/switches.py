"""Whether a switch that all rows share decides when the sum in a row's state is used.

An optimizer may act only on some of its steps: it sums the gradients of three, then applies the sum
and empties it. A row without a gradient in that third step would miss it.

A schedule is a number that all rows share too, and it may be 0 for a while. What tells it from such
a switch is the sum: a condition, or a number that is made to be exactly 0 now and then, applies and
empties a state if it decides about it both on its way into the table and into that state.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from transformer_embed._src.rows.programs import walk, words

# Kinds of values: the same for all rows, or computed from a row. Of several operands, the last kind
# counts. A constant may be zero; a choice is one of several constants other than 0; a switch is a
# condition, or is made to be 0 in some steps.
CONSTANT, ZERO, SHARED, CHOICE, SWITCH, ROW = range(6)
# Where all operands are 0, or none is, the result of these is too.
KEEP_ZEROS = words("broadcast_in_dim convert_element_type copy div mul neg reshape squeeze")
# Of whole numbers, these are 0 no more often than their operands.
KEEP_WHOLE = words(
    "add broadcast_in_dim convert_element_type copy max min mul neg reshape squeeze sub"
)
# Whole numbers, which are 0 now and then.
MAKE_SWITCHES = words("ceil cond floor rem round sign")
# These add what their operands sum.
ADD = words(
    """
    add add_any broadcast_in_dim concatenate convert_element_type copy gather neg reduce_sum reshape
    select_n slice squeeze stack sub transpose
    """
)

Inputs = frozenset[int]


class Fact(NamedTuple):
    """What is known about a value.

    Attributes:
        kind: one of the kinds above.
        sums: the rows of inputs that it is a sum of, each times numbers that its row shares.
        others: those that it is computed from in another way.
        switched: those that it sums after a switch: a reason, and where it stands.
    """

    kind: int = SHARED
    sums: Inputs = frozenset()
    others: Inputs = frozenset()
    switched: Mapping[int, Any] = {}


def find_switch(program: ClosedJaxpr, tables: Sequence[Sequence[int]]) -> Any:
    """The reason why a row may miss its turn in a step, and where it stands; None without one.

    Args:
        program: that of the step, from its leaves to those after it.
        tables: the indices of each table's gradient, of the table and of its state.
    """
    rows = frozenset().union(*tables)
    operands = [
        Fact(ROW, frozenset([n]))
        if n in rows
        else Fact(SWITCH if aval.dtype == jnp.bool_ else SHARED)
        for n, aval in enumerate(program.in_avals)
    ]
    before, facts = [], []
    while before != operands:
        before, facts = operands, walk(program, operands, _constant, _facts)
        # A switch that is kept in the state is one in the next step.
        operands = [
            fact._replace(kind=SWITCH) if after.kind == SWITCH else fact
            for fact, after in zip(operands, facts, strict=True)
        ]
    for _, table, *states in tables:
        applied = facts[table].switched
        for state in states:
            if state in applied and state in facts[state].switched:
                return applied[state]
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
    if max(kinds, default=ZERO) < ROW:
        return [Fact(_shared_kind(name, kinds, v.aval.dtype)) for v in equation.outvars]
    sums, others = _sums(name, operands)
    switched = {key: why for fact in operands for key, why in fact.switched.items()}
    is_choice = name == "gather" and ZERO < kinds[1] < ROW
    is_decided = kinds[0] < ROW if name == "select_n" else name not in ADD
    if is_choice or (is_decided and SWITCH in kinds):
        how = "by a switch outside of the row decides when the sum in its state is used"
        switched = dict.fromkeys(sums, (f"{name} {how}", sources)) | switched
    return [Fact(ROW, sums, others, switched)] * len(equation.outvars)


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
    cases = kinds[1:] if name == "select_n" else kinds
    last = max(cases, default=ZERO)
    if max(kinds, default=ZERO) <= ZERO:
        return last if name in KEEP_ZEROS else ZERO
    if dtype == jnp.bool_ or name in MAKE_SWITCHES or last == SWITCH:
        return SWITCH
    if name == "select_n":
        return SWITCH if ZERO in cases else (SHARED if SHARED in cases else CHOICE)
    if last == CHOICE:
        return CHOICE if name in KEEP_ZEROS else SWITCH
    is_whole = jnp.issubdtype(dtype, jnp.integer)
    return SWITCH if is_whole and name not in KEEP_WHOLE else SHARED
