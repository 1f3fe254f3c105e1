"""Tutorials on the input layer of a Transformer: what they print and the formulas they state.

- the encoding walk-through: a PyTorch notebook that builds a 10 x 6 table step by step;
- the DataCamp slides: J. Chapman, "Transformer Models with PyTorch", embedding and positional
encoding.
"""

import math

import haiku as hk
import jax.numpy as jnp
import numpy as np
import pytest
from compare import near

import transformer_embed as te

# Four decimals are printed, from float32 values below 1 that torch rounds by at most 2**-24 an
# operation.
PRINTED_ERROR = 0.5e-4 + 4 * 2.0**-24
# One product and one sum in float32, of numbers below 4 * sqrt(512) in magnitude.
SUM_ERROR = 4 * math.sqrt(512) * 2.0**-23
PRINTED = {
    0: [0.0000, 1.0000, 0.0000, 1.0000, 0.0000, 1.0000],
    1: [0.8415, 0.5403, 0.0464, 0.9989, 0.0022, 1.0000],
    9: [0.4121, -0.9111, 0.4057, 0.9140, 0.0194, 0.9998],
}


def encode(x):
    """PositionalEncoding in evaluation."""
    x = jnp.asarray(x)
    module = hk.transform(
        lambda: te.PositionalEncoding(te.Sinusoidal(), x.shape[-1])(x, is_training=False)
    )
    return module.apply({}, None)


@pytest.mark.slow
def test_encoding_walk_through_prints_these_rows():
    rows = encode(np.zeros((10, 6), np.float32))[np.array([*PRINTED])]
    near(rows, [*PRINTED.values()], atol=PRINTED_ERROR)


@pytest.mark.slow
def test_datacamp_slides_scale_embeddings_and_then_add_the_encoding():
    table = np.random.default_rng(0).normal(size=(10, 512)).astype(np.float32)
    ids = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    angles = np.arange(4)[:, None] / 10_000 ** (np.arange(256) / 256)
    sinusoids = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(4, 512)
    rows = hk.transform(lambda: te.TokenEmbedding(10, 512)(ids))
    scaled = rows.apply({"token_embedding": {"embeddings": table}}, None)
    near(encode(scaled), table[ids] * math.sqrt(512) + sinusoids, atol=SUM_ERROR)
