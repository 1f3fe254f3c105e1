"""Input layers of published checkpoints: load them, save them and resize their tables.

See `load_embedder` for how far embeddings are from the original model's.
"""

from transformer_embed._src.pretrained.checkpoints import load_config, load_embedder, save_embedder
from transformer_embed._src.pretrained.model_type import ModelType
from transformer_embed._src.pretrained.parameters import PretrainedInput
from transformer_embed._src.pretrained.registry import find_model_type
from transformer_embed._src.pretrained.resizing import resize

__all__ = [
    "ModelType",
    "PretrainedInput",
    "find_model_type",
    "load_config",
    "load_embedder",
    "resize",
    "save_embedder",
]
