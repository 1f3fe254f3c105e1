"""Trains only the rows of a large table that a batch reads.

The cost of a step follows the batch, not the vocabulary.
"""

from transformer_embed._src.rows.apply_gradients import apply_gradients
from transformer_embed._src.rows.devices import pmean
from transformer_embed._src.rows.exchange_load import exchange_load
from transformer_embed._src.rows.row_gradient import RowGradient
from transformer_embed._src.rows.value_and_grad import value_and_grad
from transformer_embed._src.rows.with_exchange import with_exchange

__all__ = [
    "RowGradient",
    "apply_gradients",
    "exchange_load",
    "pmean",
    "value_and_grad",
    "with_exchange",
]
