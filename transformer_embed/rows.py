"""Trains only the rows of a large table that a batch reads.

The cost of a step follows the batch, not the vocabulary.
"""

from transformer_embed._src.tables.rows.devices import pmean
from transformer_embed._src.tables.rows.row_gradient import RowGradient, add
from transformer_embed._src.tables.rows.update import update
from transformer_embed._src.tables.rows.value_and_grad import value_and_grad

__all__ = ["RowGradient", "add", "pmean", "update", "value_and_grad"]
