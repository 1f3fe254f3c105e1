"""Input layers of published checkpoints: load them and save them.

See `load_embedder` for how far embeddings are from the original model's.
"""

from transformer_embed._src.pretrained.load import PretrainedInput, load_embedder
from transformer_embed._src.pretrained.save import save_embedder

__all__ = ["PretrainedInput", "load_embedder", "save_embedder"]
