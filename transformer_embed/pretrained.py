"""Input layers of published checkpoints: load them and save them.

See `load_embedder` for how far embeddings are from the original model's.
"""

from transformer_embed._src.pretrained.checkpoints import load_config, load_embedder, save_embedder
from transformer_embed._src.pretrained.layers import Layer
from transformer_embed._src.pretrained.parameters import PretrainedInput

__all__ = [
    "Layer",
    "PretrainedInput",
    "load_config",
    "load_embedder",
    "save_embedder",
]
