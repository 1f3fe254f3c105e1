"""Trains only the rows of a large table that a batch reads.

The cost of a step follows the batch, not the vocabulary.
"""

from transformer_embed._src.rows.devices import pmean
from transformer_embed._src.rows.exchanged import ExchangeLoad, exchange_load, exchanged
from transformer_embed._src.rows.row_gradient import RowGradient, add
from transformer_embed._src.rows.update import update
from transformer_embed._src.rows.value_and_grad import value_and_grad

__all__ = [
    "ExchangeLoad",
    "RowGradient",
    "add",
    "exchange_load",
    "exchanged",
    "pmean",
    "update",
    "value_and_grad",
]
