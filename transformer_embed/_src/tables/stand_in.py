"""Replaces a table inside of a loss that is differentiated by some rows of the table."""

from typing import Any, NoReturn

import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import Ids, Vectors
from transformer_embed._src.tables.row_order import RowOrder


class StandIn(np.lib.mixins.NDArrayOperatorsMixin):
    """Some rows of a table, in the place of the table, which `lookup` can read.

    It has the `shape` and the `dtype` of the table, so that `hk.get_parameter` accepts it. Any
    other use as an array is a TypeError.
    """

    # The shape of the table, [rows, d], and the dtype of its rows.
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
        want = "to be read by te.lookup or te.TokenEmbedding alone, since te.rows has its ids"
        raise _NotAnArrayError(arguments.wanted(self.name, want, "another use of its rows"))

    # Operators and numpy's functions, numpy.asarray, jax's functions, and indexing call these.
    __array_ufunc__ = __array__ = __jax_array__ = __getitem__ = _raise_not_an_array
    # Python calls this for attributes that only an array has: `T`, `at`, `astype`, ...
    __getattr__ = _raise_not_an_array


class _NotAnArrayError(TypeError, AttributeError):
    """An error that is also an AttributeError, so that hasattr returns False."""
