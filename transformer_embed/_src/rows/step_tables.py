"""Finds the tables of an optimizer's step, among the leaves of everything that the step takes.

The leaves of (gradients, parameters, state, other arguments) are numbered in this order, and held
in a dict {number: array}. In this dict, some rows of a table can take the place of the table.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from transformer_embed._src.rows.distinct_ids import BLOCK
from transformer_embed._src.rows.row_gradient import is_gradient
from transformer_embed._src.rows.trees import check_shapes

Leaves = dict[int, Any]
# An optimizer may make arrays whose sizes are not known before the trace. Few of them are larger
# than this.
LARGEST_UNKNOWN_SIZE = 2**16


class TableStep(NamedTuple):
    """Describes one table of a step.

    Args:
        gradient: The number of the leaf that is the gradient of the table.
        arrays: The numbers of the leaves that have a row for each row of the table: the table
            itself, then its state.
        prime: A prime number that takes the place of the table's number of rows, while the step is
            traced to prove that it updates each row by itself.
        block_size: How many rows are updated at a time.
    """

    gradient: int
    arrays: list[int]
    prime: int
    block_size: int

    @property
    def leaves(self) -> list[int]:
        """The numbers of all leaves of the table."""
        return [self.gradient, *self.arrays]

    @property
    def parameter(self) -> int:
        """The number of the leaf that is the table itself."""
        return self.arrays[0]


def with_block_shapes(leaves: Leaves, tables: Sequence[TableStep]) -> Leaves:
    """Replaces each array of a table by the shape that it would have with `block_size` rows."""
    shapes = dict(leaves)
    for table in tables:
        shapes.update(_shapes_with_rows(leaves, table, table.block_size))
    return shapes


def with_primes(leaves: Leaves, tables: Sequence[TableStep]) -> Leaves:
    """Replaces each array of a table by the shape that it would have with `prime` rows."""
    shapes = dict(leaves)
    for table in tables:
        shapes.update(_shapes_with_rows(leaves, table, table.prime))
    return shapes


def _shapes_with_rows(leaves: Leaves, table: TableStep, row_count: int) -> Leaves:
    """Returns, for each array of a table, the shape that it would have with so many rows."""
    shapes = {}
    for number in table.leaves:
        leaf = leaves[number]
        shapes[number] = jax.ShapeDtypeStruct((row_count, *leaf.shape[1:]), leaf.dtype)
    return shapes


def tables_of_step(
    init: Callable, shapes_of_state: Callable, treedef: Any, leaves: Leaves
) -> list[TableStep]:
    """Finds the tables of a step, and the arrays of the state that have a row for each table row.

    A table is a parameter whose gradient is a `RowGradient`. To find the arrays of the state, each
    table gets a prime number of rows, and the optimizer says which shapes the state would have. An
    array of the state that has this prime as the first size belongs to the table.

    Args:
        init: The function of the optimizer that makes a state.
        shapes_of_state: Returns the shapes of the state for the shapes of the parameters, or raises
            an error that names the optimizer.
        treedef: The structure of (gradients, parameters, state, other arguments).
        leaves: The leaves of all of them, by number.
    """
    # The trees are (gradients, parameters, state, other arguments).
    grads_treedef, *_ = treedef.children()
    parameter_count = grads_treedef.num_leaves
    tables = _tables_without_state(parameter_count, leaves)
    _, params, state, _ = treedef.unflatten(leaves.values())
    expected_state = jax.eval_shape(init, params)
    check_shapes("state", expected_state, state)
    # The shapes of all leaves, with a prime for each table in the place of its number of rows. An
    # array of the state whose first axis is this prime has a row for each row of the table.
    shapes = with_primes(leaves, tables)
    _, param_shapes, _, _ = treedef.unflatten(shapes.values())
    state_shapes = jax.tree.leaves(shapes_of_state(param_shapes))
    # Leaves are numbered in the order of gradients, parameters and state, and there are as many
    # parameters as gradients.
    first_state_leaf = 2 * parameter_count
    for number, leaf in enumerate(state_shapes, start=first_state_leaf):
        for table in tables:
            if leaf.shape[:1] == (table.prime,):
                table.arrays.append(number)
    return tables


def _tables_without_state(parameter_count: int, leaves: Leaves) -> list[TableStep]:
    """Finds the tables of a step by their gradients, without the optimizer state.

    The caller adds the arrays of the state to `TableStep.arrays`. A leaf that is a `RowGradient` is
    the gradient of a table. The first `parameter_count` leaves are the gradients, and the
    parameters come next, in the same order.
    """
    # The step is traced with a prime in the place of each table's number of rows. An axis of this
    # size can only be the rows of this table: the prime is larger than all other sizes, and it is
    # no product of smaller sizes, which a reshape could make.
    largest_size = LARGEST_UNKNOWN_SIZE
    for leaf in leaves.values():
        for size in leaf.shape:
            largest_size = max(largest_size, size)
    primes = filter(is_prime, itertools.count(largest_size + 1))
    tables = []
    for number in range(parameter_count):
        gradient = leaves[number]
        if is_gradient(gradient):
            gradient.check()
            # The step will update BLOCK rows of the table at a time, or all rows of the gradient if
            # there are fewer.
            row_count = min(len(gradient.row_indices), gradient.num_rows)
            block_size = max(1, min(row_count, BLOCK))
            parameter = parameter_count + number
            table = TableStep(
                gradient=number,
                arrays=[parameter],
                prime=next(primes),
                block_size=block_size,
            )
            tables.append(table)
    return tables


def is_prime(number: int) -> bool:
    """Returns whether a number of at least 2 is a prime."""
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
