"""Shards large token tables over a mesh of devices."""

from transformer_embed._src.sharded.sharded import Sharded
from transformer_embed._src.sharded.sharding import shard_params

__all__ = ["Sharded", "shard_params"]
