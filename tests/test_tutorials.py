"""What tutorials on the input layer of a Transformer print.

- the word embedding notebook: word embedding, positions and masks of one 3 x 8 batch, in PyTorch;
- the encoding walk-through: a PyTorch notebook that builds a 10 x 6 table step by step.
"""

import numpy as np
import pytest
from compare import near

import transformer_embed as te

# Four decimals are printed, from float32 values below 4 in magnitude that torch rounds by at most
# 2**-23 an operation.
PRINTED_ERROR = 0.5e-4 + 4 * 2.0**-23
# Two printed numbers are subtracted.
DIFFERENCE_ERROR = 2 * PRINTED_ERROR
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

# The printout of the encoding walk-through, positions 0..9 and d_model = 6.
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


def test_word_embedding_notebook_prints_this_padding_mask():
    expected = [[True] * 7 + [False], [True] * 6 + [False] * 2, [True] * 8]
    assert te.padding_mask(BATCH, pad_id=0).tolist() == expected


@pytest.mark.parametrize("token", PRINTED)
def test_word_embedding_notebook_one_id_at_two_places_differs_by_the_encodings(token):
    printed = np.diff(list(PRINTED[token].values()), axis=0)
    encodings = np.asarray(te.sinusoidal_encoding(list(PRINTED[token]), 6), np.float64)
    near(np.diff(encodings, axis=0), printed, atol=DIFFERENCE_ERROR)
    assert np.abs(printed).max() > VISIBLE


def test_encoding_walk_through_prints_this_table():
    near(te.sinusoidal_table(10, 6), WALK_THROUGH_TABLE, atol=PRINTED_ERROR)
