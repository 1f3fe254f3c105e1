"""Input layers of published checkpoints: load them, save them."""

from transformer_embed.pretrained.checkpoints import CONFIG, PretrainedInput, load_embedder, save_embedder

__all__ = ["CONFIG", "PretrainedInput", "load_embedder", "save_embedder"]
