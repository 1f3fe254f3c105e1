"""The tables whose rows a function reads in their place."""

import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from transformer_embed._src import arguments
from transformer_embed._src.partitioning import check_on_mesh, is_explicit, typed_axes
from transformer_embed._src.rows.distinct_ids import as_max_rows
from transformer_embed._src.rows.exchange import TakenFromOwners, take_from_owners
from transformer_embed._src.rows.gathered_rows import (
    GatheredRows,
    OtherOrderError,
    Taken,
    as_keys,
    take_rows,
)
from transformer_embed._src.rows.marks import new_marks
from transformer_embed._src.rows.row_gradient import as_arrays, is_leaf
from transformer_embed._src.tokens.lookup import as_table
from transformer_embed._src.tokens.row_order import RowOrder, nearest_rows

Tree = Any
NOTE = (
    "In the loss, the rows of `ids` stand in the place of {}: only lookup reads them, so leave "
    "them out of other functions."
)

# In jax's errors about keys, the leaf of rows that nothing computes with.
OF_KEYS = "key<fry>", "extended dtype", "abstract method"


class Tables(NamedTuple):
    """Parameters, and what is read of the tables among them.

    Args:
        leaves: all parameters, by their names.
        treedef: that of the parameters.
        asked: by the names of the tables that are read by rows, their ids and bounds.
        capacity: see `value_and_grad`.
    """

    leaves: dict[str, Any]
    treedef: Any
    asked: dict[str, tuple[Any, int]]
    capacity: float | None

    def with_rows(self, function: Callable) -> Any:
        """`function(taken, seen)`: of what is taken of each table, and how a loss sees it.

        `seen(held)` is the tree of parameters that a loss sees, with the rows of `held`.
        """
        orders: dict[str, RowOrder | None] = dict.fromkeys(self.asked)
        # Only the lookups know the order of a table's rows; the first one that reads it says so.
        for _ in range(len(orders) + 1):
            taken = {name: self._take(name, order) for name, order in orders.items()}
            try:
                return function(taken, functools.partial(self._seen, taken, orders))
            except OtherOrderError as error:
                orders[error.name] = error.order
            except Exception as error:
                names = ", ".join(self.asked)
                if any(word in str(error) for word in OF_KEYS):
                    want = (
                        "to be read by lookup alone (leave it out of functions of all parameters)"
                    )
                    got = "another use of the rows in its place"
                    raise arguments.type_error(names, want, got) from error
                error.add_note(NOTE.format(names))
                raise
        want = "one order of rows in all lookups (see EmbedderConfig.spread)"
        raise arguments.value_error(", ".join(orders), want, "several")

    def _take(self, name: str, order: RowOrder | None) -> Taken | TakenFromOwners:
        """What is taken of a table."""
        table, (ids, max_rows) = self.leaves[name], self.asked[name]
        check_on_mesh("ids", ids, *typed_axes(table))
        ids = nearest_rows(ids, len(table), order)
        if self.capacity is None:
            return take_rows(table, ids, max_rows)
        if not is_explicit(jax.typeof(table).sharding.mesh):
            want = "rows over explicit mesh axes (see jax.sharding.explicit_axes), for a capacity"
            raise arguments.value_error(name, want, "an array whose type says nothing of a mesh")
        if any(typed_axes(table)):
            return take_from_owners(table, ids, max_rows, self.capacity)
        # A small table beside large ones.
        return take_rows(table, ids, max_rows)

    def _seen(self, taken: Mapping, orders: Mapping, held: Mapping[str, Any]) -> Tree:
        """The parameters that a loss sees."""
        stand_ins = {}
        for name, each in taken.items():
            (size, width), dtype = self.leaves[name].shape, self.leaves[name].dtype
            ids, values = each.read(held[name])
            stand_ins[name] = GatheredRows(
                as_keys(ids), new_marks(width, dtype), values, name, size, orders[name]
            )
        return self.unflatten({**held, **stand_ins})

    def unflatten(self, found: Mapping[str, Any]) -> Tree:
        """A tree like the parameters; jax may have sorted the names."""
        return self.treedef.unflatten([found[name] for name in self.leaves])


def find_tables(params: Tree, ids: Tree, max_rows: int | Tree | None, capacity: Any) -> Tables:
    """The parameters, and what is read of the tables in `ids`."""
    capacity = None if capacity is None else arguments.positive("capacity", capacity)
    paths, treedef = jax.tree_util.tree_flatten_with_path(
        as_arrays("params", params), is_leaf=is_leaf
    )
    leaves = {_name(path): leaf for path, leaf in paths}
    ids = _at_leaves(leaves, ids)
    bounds: dict[str, Any] = dict.fromkeys(ids, max_rows)
    if not isinstance(max_rows, numbers.Number | None):
        bounds = _at_leaves(leaves, max_rows)
    for name in bounds.keys() - ids.keys():
        raise arguments.value_error(name, "a table in ids, since max_rows has it", "none")
    asked = {}
    for name, table_ids in ids.items():
        leaves[name] = as_table(name, leaves[name])
        asked[name] = arguments.as_int32("ids", table_ids), as_max_rows(bounds.get(name))
    return Tables(leaves, treedef, asked, capacity)


def _at_leaves(names: Mapping[str, Any], tree: Tree) -> dict[str, Any]:
    """What a tree has at the places of the parameters, by their names; it may be a list there."""
    parts = jax.tree.leaves_with_path(
        tree, is_leaf=lambda path, _: _name(path) in names, is_leaf_takes_path=True
    )
    found = {_name(path): part for path, part in parts if part is not None}
    for name in found.keys() - names.keys():
        got = f"none among {', '.join(names)}"
        raise arguments.value_error(name, "a table, where ids or max_rows has an array", got)
    return found


def _name(path: Any) -> str:
    """A parameter's name in errors."""
    return f"params{jax.tree_util.keystr(path)}"
