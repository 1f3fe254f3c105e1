"""Input layers of published checkpoints: load them, save them and resize their tables.

The docstring of `load_embedder` says how closely the embeddings agree with transformers.
"""

from transformer_embed._src.pretrained.layers import Layer
from transformer_embed._src.pretrained.loading import load_config, load_embedder
from transformer_embed._src.pretrained.model_type import ModelType
from transformer_embed._src.pretrained.parameters import PretrainedInput
from transformer_embed._src.pretrained.reading import Checkpoint, TensorFacts, open_checkpoint
from transformer_embed._src.pretrained.registry import find_model_type
from transformer_embed._src.pretrained.resizing import resize
from transformer_embed._src.pretrained.saving import save_embedder, save_into

__all__ = [
    "Checkpoint",
    "Layer",
    "ModelType",
    "PretrainedInput",
    "TensorFacts",
    "find_model_type",
    "load_config",
    "load_embedder",
    "open_checkpoint",
    "resize",
    "save_embedder",
    "save_into",
]
