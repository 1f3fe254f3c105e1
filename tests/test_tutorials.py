"""Tutorials on the input layer of a Transformer: what they print and the formulas they
state.

- the position embedding note: a PyTorch note on position encoding alone;
- the word embedding notebook: word embedding, positions and masks of one 3 x 8 batch, in PyTorch;
- the DataCamp slides: J. Chapman, "Transformer Models with PyTorch", embedding and positional
encoding;
- the encoding walk-through: a PyTorch notebook that builds a 10 x 6 table step by step.
"""

import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import near

import transformer_embed as te

# Four decimals are printed, from float32 values below 4 in magnitude that torch rounds by at most
# 2**-23 an operation.
PRINTED_ERROR = 0.5e-4 + 4 * 2.0**-23
# Two printed numbers are subtracted.
DIFFERENCE_ERROR = 2 * PRINTED_ERROR
# One product and one sum in float32, of numbers below 4 * sqrt(512) in magnitude.
SUM_ERROR = 4 * math.sqrt(512) * 2.0**-23
# In torch's power the exponent, below 1, is rounded to float32: its error counts log(10000) times
# in the denominator.
POWER_ERROR = math.log(10_000) * 2.0**-24
# A wrong formula is wrong by more than any rounding: this is a tenth of the range of a sine.
VISIBLE = 0.2

BATCH = [
    [101, 3, 2, 5, 7, 8, 102, 0],
    [101, 13, 8, 2, 9, 102, 0, 0],
    [101, 21, 8, 15, 9, 7, 13, 102],
]

# From the printout of the word embedding notebook, d_model = 6: ids that stand at two places, by position.
PRINTED = {
    0: {7: [0.6318, -1.1657, 0.3813, 2.0933, -0.3936, 1.0309], 6: [-0.3046, -0.9594, 0.3369, 2.1071, -0.3957, 1.0310]},
    2: {2: [0.6448, -2.4575, 0.1297, 2.0142, 0.3538, 1.9979], 3: [-0.1233, -3.0313, 0.1758, 2.0088, 0.3559, 1.9979]},
    8: {5: [-0.6883, 0.3148, -0.2839, 0.2361, -0.2783, -0.7248], 2: [1.1799, -0.3850, -0.4212, 0.2586, -0.2847, -0.7248]},
    102: {6: [-2.5828, -0.1106, -0.4562, 0.6592, 0.0090, 1.7933], 5: [-3.2623, -0.7871, -0.5011, 0.6709, 0.0069, 1.7933]},
}  # fmt: skip

# The printouts of the encoding walk-through, positions 0..9 and d_model = 6.
EVEN_DENOMINATOR = [1.0000, 21.5443, 464.1590]
WALK_THROUGH_TABLE = [
    [0.0000, 1.0000, 0.0000, 1.0000, 0.0000, 1.0000],
    [0.8415, 0.5403, 0.0464, 0.9989, 0.0022, 1.0000],
    [0.9093, -0.4161, 0.0927, 0.9957, 0.0043, 1.0000],
    [0.1411, -0.9900, 0.1388, 0.9903, 0.0065, 1.0000],
    [-0.7568, -0.6536, 0.1846, 0.9828, 0.0086, 1.0000],
    [-0.9589, 0.2837, 0.2300, 0.9732, 0.0108, 0.9999],
    [-0.2794, 0.9602, 0.2749, 0.9615, 0.0129, 0.9999],
    [0.6570, 0.7539, 0.3192, 0.9477, 0.0151, 0.9999],
    [0.9894, -0.1455, 0.3629, 0.9318, 0.0172, 0.9999],
    [0.4121, -0.9111, 0.4057, 0.9140, 0.0194, 0.9998],
]


def encode(x):
    """PositionalEncoding in evaluation."""
    x = jnp.asarray(x)
    module = hk.transform(
        lambda: te.PositionalEncoding(te.Sinusoidal(), x.shape[-1])(x, is_training=False)
    )
    return module.apply({}, None)


def embed(table, ids):
    """TokenEmbedding with a given table."""
    module = hk.transform(lambda: te.TokenEmbedding(*table.shape)(ids))
    return module.apply({"token_embedding": {"embeddings": jnp.asarray(table, jnp.float32)}}, None)


def denominators(d_model):
    """What divides the position in each sine: one over the sine's slope at position 0."""
    slopes = jax.jacfwd(functools.partial(te.sinusoidal_encoding, d_model=d_model))(0.0)
    return 1 / np.asarray(slopes, np.float64)[0::2]


# --- What they print.


def test_word_embedding_notebook_prints_this_padding_mask():
    expected = [[True] * 7 + [False], [True] * 6 + [False] * 2, [True] * 8]
    assert te.padding_mask(BATCH, pad_id=0).tolist() == expected


@pytest.mark.parametrize("token", PRINTED)
def test_word_embedding_notebook_one_id_at_two_places_differs_by_the_encodings(token):
    printed = np.diff(list(PRINTED[token].values()), axis=0)
    encodings = np.asarray(te.sinusoidal_encoding(list(PRINTED[token]), 6), np.float64)
    near(np.diff(encodings, axis=0), printed, atol=DIFFERENCE_ERROR)
    assert np.abs(printed).max() > VISIBLE


@pytest.mark.slow
def test_encoding_walk_through_prints_this_table():
    near(encode(np.zeros((10, 6), np.float32)), WALK_THROUGH_TABLE, atol=PRINTED_ERROR)


@pytest.mark.slow
def test_denominators_are_those_that_the_encoding_walk_through_prints():
    """The position embedding note lists 1, 100 and 10000 for d_model = 4: one too many."""
    near(denominators(6), EVEN_DENOMINATOR, rtol=POWER_ERROR, atol=PRINTED_ERROR)
    near(denominators(4), [1, 100], rtol=2.0**-23)


# --- What they state.


@pytest.mark.slow
def test_datacamp_slides_scale_embeddings_and_then_add_the_encoding():
    ids, rows = (
        np.array([[1, 2, 3, 4], [5, 6, 7, 8]]),
        np.random.default_rng(0).normal(size=(10, 512)),
    )
    angles = np.arange(4)[:, None] / 10_000 ** (np.arange(256) / 256)
    sinusoids = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(4, 512)
    expected = rows.astype(np.float64)[ids] * math.sqrt(512) + sinusoids
    near(encode(embed(rows, ids)), expected, atol=SUM_ERROR)
