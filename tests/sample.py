"""A batch of a small model, and where the model's tables are."""

import jax
import numpy as np

KEY = jax.random.key(0)
IDS = np.array([[5, 6, 7, 0, 3], [1, 2, 10, 4, 4]], np.int32)
TYPES = (IDS > 4).astype(np.int32)
ROOT = "transformer_embedding/~/"
TOKENS, POSITIONS = f"{ROOT}token_embedding", f"{ROOT}learned_positional_encoding"
