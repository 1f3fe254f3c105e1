"""The tables whose rows a function reads in their place."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.partitioning import check_on_mesh, typed_axes
from transformer_embed._src.rows.distinct_ids import as_max_rows
from transformer_embed._src.rows.exchange import ExchangedRows, exchange_rows
from transformer_embed._src.rows.gathered_rows import (
    BatchRows,
    GatheredRows,
    as_keys,
    new_marks,
    read_batch_rows,
)
from transformer_embed._src.rows.row_gradient import as_arrays
from transformer_embed._src.tables.row_order import RowOrder, nearest_rows
from transformer_embed._src.tokens.lookup import as_table

Tree = Any
NOTE = (
    "In the loss, rows stand in the place of {}: only lookup reads them, so leave them out of "
    "functions of all parameters."
)


class Tables(NamedTuple):
    """Parameters, and the tables among them of which a function sees the rows of a batch.

    Args:
        parameters: all parameters, by their names.
        treedef: that of the parameters.
        ids: the ids of each table that is read by rows, a bound on the distinct ones, and which row
            holds which id.
        capacity: see `value_and_grad`.
    """

    parameters: dict[str, Any]
    treedef: Any
    ids: dict[str, tuple[Any, int, RowOrder | None]]
    capacity: float | None

    def with_rows(self, function: Callable) -> Any:
        """`function(values, view, reads)`.

        values: the parameters by their names, with rows in place of the tables. view: from such
        values to the tree of parameters that a loss sees. reads: how rows are read of each table.
        """
        reads = {name: self._read(name) for name in self.ids}
        values = self.parameters | {name: read.rows for name, read in reads.items()}
        try:
            return function(values, functools.partial(self._view, reads), reads)
        except Exception as error:
            error.add_note(NOTE.format(", ".join(self.ids)))
            raise

    def _read(self, name: str) -> BatchRows | ExchangedRows:
        """The rows of a table that its ids read."""
        table, (ids, max_rows, order) = self.parameters[name], self.ids[name]
        check_on_mesh("ids", ids, *typed_axes(table))
        ids = nearest_rows(ids, len(table), order)
        # With a capacity, a small table beside large ones may be whole.
        if self.capacity is None or not any(typed_axes(table)):
            return read_batch_rows(table, ids, max_rows)
        return exchange_rows(table, ids, max_rows, self.capacity)

    def _view(self, reads: Mapping, values: Mapping[str, Any]) -> Tree:
        """The parameters that a loss sees."""
        stand_ins = {}
        for name, read in reads.items():
            table = self.parameters[name]
            vocab_size, width = table.shape
            ids, rows = read.seen(values[name])
            *_, order = self.ids[name]
            stand_ins[name] = GatheredRows(
                keys=as_keys(ids),
                marks=new_marks(width, table.dtype),
                values=rows,
                name=name,
                vocab_size=vocab_size,
                order=order,
            )
        return self.unflatten({**values, **stand_ins})

    def unflatten(self, values: Mapping[str, Any]) -> Tree:
        """A tree like the parameters; jax may have sorted the names."""
        return self.treedef.unflatten([values[name] for name in self.parameters])


def find_tables(
    params: Tree,
    ids: Mapping[str, Any],
    config: EmbedderConfig | None,
    max_rows: int | Mapping[str, int] | None,
    capacity: Any,
) -> Tables:
    """The parameters, and the tables in `ids`."""
    paths, treedef = jax.tree.flatten_with_path(as_arrays("params", params))
    parameters = {jax.tree_util.keystr(k, simple=True, separator="/"): leaf for k, leaf in paths}
    ids = _by_parameter("ids", parameters, ids)
    bounds: dict[str, Any] = dict.fromkeys(ids, max_rows)
    if isinstance(max_rows, Mapping):
        bounds = _by_parameter("max_rows", parameters, max_rows)
    for name in bounds.keys() - ids.keys():
        raise arguments.value_error("max_rows", "bounds of tables in ids", name)
    config = arguments.instance("config", config, EmbedderConfig | None, "an EmbedderConfig")
    orders: dict[str, Any] = dict.fromkeys(ids)
    for name in ids:
        parameters[name] = as_table(name, parameters[name])
        # Tables of positions or token types have no order, nor has a model's second vocabulary.
        if config is not None and len(parameters[name]) == config.rows:
            orders[name] = config.row_order
    if capacity is not None:
        capacity = arguments.positive("capacity", capacity)
        if not any(any(typed_axes(parameters[name])) for name in ids):
            want = "a table in ids that explicit mesh axes split (see jax.sharding.explicit_axes)"
            raise arguments.value_error("capacity", want, "none")
    for array in ids.values():
        if not all(isinstance(size, int) for size in np.shape(array)):
            want = "a size known while tracing: te.rows reads as many table rows"
            raise arguments.value_error("ids", want, f"symbolic shape {[*np.shape(array)]}")
    bounded_ids = {
        name: (arguments.as_int32("ids", each), as_max_rows(bounds.get(name)), orders[name])
        for name, each in ids.items()
    }
    return Tables(parameters, treedef, bounded_ids, capacity)


def _by_parameter(
    argument: str, parameters: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The values by the paths of parameters, of which each name is one, or the end of one."""
    values = arguments.instance(argument, values, Mapping, "a dict by the names of tables")
    names: dict[str, str] = {}
    for name in values:
        paths = arguments.paths_of(name, parameters)
        if len(paths) != 1:
            tables = paths or [path for path, leaf in parameters.items() if leaf.ndim == 2]
            want = f"one of {', '.join(tables)}, or an end that only one of them has"
            raise arguments.value_error(argument, want, name)
        first = names.setdefault(paths[0], name)
        if first != name:
            raise arguments.value_error(argument, f"one name of {paths[0]}", f"{first} and {name}")
    return {path: values[name] for path, name in names.items()}
