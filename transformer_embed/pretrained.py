"""Input layers of published checkpoints: load them and save them.

In float32, the embeddings agree with the original model's to within 3 ulp of the largest value.
"""

from transformer_embed._src.pretrained.checkpoints import (
    PretrainedInput,
    load_embedder,
    save_embedder,
)

__all__ = ["PretrainedInput", "load_embedder", "save_embedder"]
