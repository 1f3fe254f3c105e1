"""Trains only the rows of a large table that a batch reads: the cost of a step follows the batch,
not the vocabulary."""

from transformer_embed._src.rows.rows import Rows, add, update, value_and_grad

__all__ = ["Rows", "add", "update", "value_and_grad"]
