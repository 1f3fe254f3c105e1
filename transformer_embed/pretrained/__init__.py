"""Input layers of published checkpoints: load them and save them.

A loaded layer gives the embeddings of the original model, in float32 to 3 units in the last place of the largest value.
"""

from transformer_embed.pretrained.checkpoints import PretrainedInput, load_embedder, save_embedder

__all__ = ["PretrainedInput", "load_embedder", "save_embedder"]
