"""What replaces a table inside of a loss that is differentiated by some of its rows."""

from typing import Any, NoReturn

import numpy as np

from transformer_embed._src import arguments
from transformer_embed._src.array_types import Ids, Vectors
from transformer_embed._src.tokens.row_order import RowOrder


class StandIn(np.lib.mixins.NDArrayOperatorsMixin):
    """Some rows of a table in the table's place; `lookup` reads them.

    It has the `shape` and `dtype` of the table, so that hk.get_parameter accepts it. Any other use
    as an array is a TypeError.
    """

    # [rows, d], and the dtype of the rows.
    shape: Any
    dtype: Any
    # The parameter, for error messages.
    name: str

    def gather_rows(self, ids: Ids, order: RowOrder | None) -> Vectors:
        """The row of each id; an id out of range reads the nearest row.

        Gradients of repeated ids are summed in float32 or wider.
        """
        raise NotImplementedError

    def _raise_not_an_array(self, *args: Any, **kwargs: Any) -> NoReturn:
        want = "to be read by te.lookup or te.TokenEmbedding alone, since te.rows has its ids"
        raise _NotAnArrayError(arguments.wanted(self.name, want, "another use of its rows"))

    # Operators and numpy's functions, numpy.asarray, jax's functions, indexing.
    __array_ufunc__ = __array__ = __jax_array__ = __getitem__ = _raise_not_an_array
    # Attributes that only an array has: `T`, `at`, `astype`, ...
    __getattr__ = _raise_not_an_array


class _NotAnArrayError(TypeError, AttributeError):
    """Also an AttributeError, so that hasattr returns False."""
