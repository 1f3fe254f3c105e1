"""Shards large token tables over a mesh of devices."""

from transformer_embed._src.tables.sharded.load import ExchangeLoad, exchange_load
from transformer_embed._src.tables.sharded.placement import init_params, shard_params
from transformer_embed._src.tables.sharded.table import Sharded

__all__ = ["ExchangeLoad", "Sharded", "exchange_load", "init_params", "shard_params"]
