"""Finds the tables of which a function sees only some rows, and puts the rows in their place."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.partitioning import check_on_mesh, typed_axes
from transformer_embed._src.rows.batch_rows import BatchRows, read_batch_rows
from transformer_embed._src.rows.distinct_ids import as_max_rows
from transformer_embed._src.rows.exchange import ExchangedRows, exchange_rows
from transformer_embed._src.rows.gathered_rows import GatheredRows, as_keys, new_marks
from transformer_embed._src.rows.trees import Tree, as_arrays
from transformer_embed._src.tables.row_order import RowOrder, rows_of_nearest_ids
from transformer_embed._src.tokens.lookup import as_table

NOTE = (
    "In the loss, the rows of the batch replace {}: only lookup reads them, so leave them out of "
    "functions of all parameters."
)


# The rows of a table that a batch needs. Each device has the same rows, or the rows of its own ids.
TableRows = BatchRows | ExchangedRows


class TableIds(NamedTuple):
    """Holds the ids that a batch looks up in one table.

    Args:
        ids: The ids, of any shape.
        max_rows: A bound on the distinct ids.
        order: Which row of the table holds which id. If None, row i holds id i.
    """

    ids: Any
    max_rows: int
    order: RowOrder | None


class Tables(NamedTuple):
    """Holds parameters, and the ids that a batch looks up in some tables among them.

    Args:
        parameters: All parameters, by their names.
        treedef: The structure of the parameters.
        ids: The ids that the batch looks up in each table, by the name of the table.
        capacity: A factor for the size of the buffers in which devices exchange rows, or None if
            they exchange no rows. See `value_and_grad`.
    """

    parameters: dict[str, Any]
    treedef: Any
    ids: dict[str, TableIds]
    capacity: float | None

    def read_rows(self) -> dict[str, TableRows]:
        """Reads the rows that the batch needs of each table in `ids`, by the name of the table."""
        return {name: self._read_table(name) for name in self.ids}

    def parameters_with_rows(self, rows_of_tables: Mapping[str, TableRows]) -> dict[str, Any]:
        """Returns the parameters by name, with the rows of the batch in the place of each table.

        A loss is differentiated with respect to these parameters. `rows_of_tables` is what
        `read_rows` returned.
        """
        parameters = dict(self.parameters)
        for name, table_rows in rows_of_tables.items():
            parameters[name] = table_rows.rows
        return parameters

    def unflatten(self, values: Mapping[str, Any]) -> Tree:
        """Makes a tree like the parameters from values by name, in any order of the names."""
        return self.treedef.unflatten([values[name] for name in self.parameters])

    @contextlib.contextmanager
    def note_in_errors(self) -> Iterator[None]:
        """Adds a note to every error of the user's function, and raises the error again.

        The note says that the function sees only some rows of the tables, which may be the cause.
        """
        try:
            yield
        except Exception as error:
            error.add_note(NOTE.format(", ".join(self.ids)))
            raise

    def _read_table(self, name: str) -> TableRows:
        """Reads the rows of a table that the batch needs."""
        table = self.parameters[name]
        table_ids = self.ids[name]
        # The explicit mesh axes that split the rows and the columns of the table, () for none.
        row_axes, column_axes = typed_axes(table)
        check_on_mesh("ids", table_ids.ids, row_axes, column_axes)
        indices = rows_of_nearest_ids(table_ids.ids, len(table), table_ids.order)
        # If the user set a `capacity`, devices exchange the rows of each table that is split over
        # them. Another table in `ids` may be so small that it is whole on each device.
        is_split = row_axes or column_axes
        if self.capacity is not None and is_split:
            return exchange_rows(table, indices, table_ids.max_rows, self.capacity)
        return read_batch_rows(table, indices, table_ids.max_rows)

    def tree_for_loss(
        self, rows_of_tables: Mapping[str, TableRows], parameters: Mapping[str, Any]
    ) -> Tree:
        """Makes the tree of parameters that a loss sees, with `GatheredRows` for each table.

        `GatheredRows` hold the rows and their indices, and `lookup` reads them like the table. The
        indices are held as `keys`, which are random keys of jax, so that no function can compute
        with them. `marks` are a few rows of known values, which show whether a function of all
        parameters mixed the rows.

        Args:
            rows_of_tables: For each table, the rows that the batch reads, as `read_rows` returns
                them.
            parameters: The parameters by name, with the rows of the batch in the place of each
                table, as `parameters_with_rows` makes them.
        """
        seen_parameters = dict(parameters)
        for name, table_rows in rows_of_tables.items():
            table = self.parameters[name]
            num_rows, width = table.shape
            # The values of the rows that this device sees, and the indices of these rows in the
            # table. If devices exchange rows, they do it here.
            seen_rows = table_rows.seen(parameters[name])
            seen_parameters[name] = GatheredRows(
                keys=as_keys(seen_rows.row_indices),
                marks=new_marks(width, table.dtype),
                values=seen_rows.values,
                name=name,
                num_rows=num_rows,
                # Which row holds which id. If None, row i holds id i.
                order=self.ids[name].order,
            )
        return self.unflatten(seen_parameters)


def tables_in(
    params: Tree,
    ids: Mapping[str, Any],
    config: EmbedderConfig | None,
    max_rows: int | Mapping[str, int] | None,
    capacity: Any,
) -> Tables:
    """Finds the tables that a user's `ids` name, and checks their ids, bounds and sharding.

    Args:
        params: All parameters, a tree.
        ids, config, max_rows, capacity: As the user passes them to `value_and_grad`.
    """
    leaves, treedef = jax.tree.flatten_with_path(as_arrays("params", params))
    # All parameters by their paths, such as "model/embed/w".
    parameters = {}
    for keys, leaf in leaves:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        parameters[path] = leaf
    # A user may name a table by the end of its path. From here on, the names are whole paths.
    ids = _by_path("ids", parameters, ids)
    bounds = _max_rows_by_path(parameters, ids, max_rows)
    config = arguments.instance("config", config, EmbedderConfig | None, "an EmbedderConfig")
    # The parameters that `ids` name, after a check that they are floating and have rank 2.
    tables = {path: as_table(path, parameters[path]) for path in ids}
    if capacity is not None:
        capacity = arguments.positive("capacity", capacity)
        _check_any_is_split(tables)
    table_ids = {}
    for path, table in tables.items():
        table_ids[path] = TableIds(
            ids=_as_ids(ids[path]),
            max_rows=as_max_rows(bounds[path]),
            # Which row of the table holds which id.
            order=_row_order(table, config),
        )
    # `as_table` made jax arrays of the tables, which replace the arrays that the user passed.
    parameters.update(tables)
    return Tables(parameters=parameters, treedef=treedef, ids=table_ids, capacity=capacity)


def _max_rows_by_path(
    parameters: Mapping[str, Any],
    ids: Mapping[str, Any],
    max_rows: int | Mapping[str, int] | None,
) -> dict[str, Any]:
    """Returns, for each table in `ids`, the user's bound on the distinct ids of a batch, or None.

    Args:
        parameters: All parameters, by their paths.
        ids: The ids of each table, by the path of the table.
        max_rows: One bound for all tables, or a bound for some tables.
    """
    if not isinstance(max_rows, Mapping):
        return dict.fromkeys(ids, max_rows)
    bounds = _by_path("max_rows", parameters, max_rows)
    for path in bounds:
        if path not in ids:
            raise arguments.value_error("max_rows", "bounds of tables in ids", path)
    return {path: bounds.get(path) for path in ids}


def _row_order(table: jax.Array, config: EmbedderConfig | None) -> RowOrder | None:
    """Returns which row of a table holds which id.

    A table with the number of rows of the config is the config's token table, and has the config's
    order. In other tables, such as positions, token types or a second vocabulary, row i holds id i.
    """
    if config is None or len(table) != config.rows:
        return None
    return config.row_order


def _check_any_is_split(tables: Mapping[str, jax.Array]) -> None:
    """Raises an error if no table is split over explicit mesh axes, as an exchange needs."""
    for table in tables.values():
        # The explicit mesh axes that split the rows and the columns of the table, () for none.
        row_axes, column_axes = typed_axes(table)
        if row_axes or column_axes:
            return
    want = "a table in ids that explicit mesh axes split (see jax.sharding.explicit_axes)"
    raise arguments.value_error("capacity", want, "none")


def _as_ids(given_ids: Any) -> jax.Array:
    """Converts the ids of a table to int32, or raises a ValueError if their shape is symbolic."""
    ids = arguments.as_int32("ids", given_ids)
    are_sizes_known = all(isinstance(size, int) for size in np.shape(ids))
    if not are_sizes_known:
        want = "a size known while tracing: te.rows reads as many table rows"
        raise arguments.value_error("ids", want, f"symbolic shape {[*np.shape(ids)]}")
    return ids


def _by_path(
    argument: str, parameters: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a user's dict, with the whole path of a table in the place of each name.

    A user names a table by the path of the parameter, or by an end that only this path has. Two
    names of one table are a ValueError.

    Args:
        argument: The name of the user's argument, for errors.
        parameters: All parameters, by their paths.
        values: What the user gives for some tables, by name.
    """
    values = arguments.instance(argument, values, Mapping, "a dict by the names of tables")
    name_of_path: dict[str, str] = {}
    for name in values:
        path = _path_of(argument, name, parameters)
        if path in name_of_path:
            got = f"{name_of_path[path]} and {name}"
            raise arguments.value_error(argument, f"one name of {path}", got)
        name_of_path[path] = name
    return {path: values[name] for path, name in name_of_path.items()}


def _path_of(argument: str, name: str, parameters: Mapping[str, Any]) -> str:
    """Returns the path of the one parameter that a user names, or raises a ValueError."""
    paths = arguments.paths_of(name, parameters)
    if len(paths) == 1:
        return paths[0]
    # If no path fits, the error lists all tables.
    if not paths:
        paths = [path for path, leaf in parameters.items() if leaf.ndim == 2]
    want = f"one of {', '.join(paths)}, or an end that only one of them has"
    raise arguments.value_error(argument, want, name)
