"""Defines what replaces a table in a row-wise step, which has only some rows of the table."""

from typing import Any, NoReturn

import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import Ids, Vectors
from transformer_embed._src.tables.row_order import RowOrder


class StandIn(np.lib.mixins.NDArrayOperatorsMixin):
    """Takes the place of a table, and holds only some rows of the table, which `lookup` can read.

    `te.rows` puts it among the parameters while a loss runs. It has the `shape` and the `dtype` of
    the table, so that `hk.get_parameter` accepts it. Any other use as an array raises a TypeError.
    A subclass has the rows.
    """

    # The shape of the whole table, [rows, d], and the dtype of the rows.
    shape: Any
    dtype: Any
    # The name of the parameter, for error messages.
    name: str

    def gather_rows(self, ids: Ids, order: RowOrder | None) -> Vectors:
        """Returns the row of each id, or the nearest row for an id outside the vocabulary.

        The gradients of repeated ids are summed in float32 or wider.
        """
        raise NotImplementedError

    def _raise_not_an_array(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises the error for every use other than a lookup."""
        want = "to be read by te.lookup or te.TokenEmbedding alone, since te.rows has its ids"
        raise _NotAnArrayError(arguments.wanted(self.name, want, "another use of its rows"))

    # Operators and numpy's functions call the first of these, numpy.asarray calls the second, jax's
    # functions call the third, and indexing calls the last.
    __array_ufunc__ = __array__ = __jax_array__ = __getitem__ = _raise_not_an_array
    # Python calls this for attributes that only an array has: `T`, `at`, `astype`, ...
    __getattr__ = _raise_not_an_array


class _NotAnArrayError(TypeError, AttributeError):
    """Says that a table was used as an array. It is an AttributeError for the sake of `hasattr`."""
