"""What a tutorial on the input layer of a Transformer prints: a PyTorch notebook that builds a
10 x 6 table of encodings step by step."""

from compare import near

import transformer_embed as te

# Four decimals are printed, from float32 values below 1 in magnitude.
PRINTED_ERROR = 0.5e-4 + 2.0**-22

# The last rows of the printout, positions 6..9 and d_model = 6.
PRINTED = [
    [-0.2794, 0.9602, 0.2749, 0.9615, 0.0129, 0.9999],
    [0.6570, 0.7539, 0.3192, 0.9477, 0.0151, 0.9999],
    [0.9894, -0.1455, 0.3629, 0.9318, 0.0172, 0.9999],
    [0.4121, -0.9111, 0.4057, 0.9140, 0.0194, 0.9998],
]


def test_encoding_walk_through_prints_this_table():
    near(te.sinusoidal_table(10, 6)[6:], PRINTED, atol=PRINTED_ERROR)
