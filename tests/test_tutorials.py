"""What a tutorial prints: a PyTorch notebook that builds a 10 x 6 table of positions."""

import haiku as hk
import numpy as np
import pytest
from compare import near

import transformer_embed as te

# Four decimals are printed, from float32 values below 1 that torch rounds by at most 2**-24 an
# operation.
PRINTED_ERROR = 0.5e-4 + 4 * 2.0**-24
PRINTED = {
    0: [0.0000, 1.0000, 0.0000, 1.0000, 0.0000, 1.0000],
    1: [0.8415, 0.5403, 0.0464, 0.9989, 0.0022, 1.0000],
    9: [0.4121, -0.9111, 0.4057, 0.9140, 0.0194, 0.9998],
}


@pytest.mark.slow
def test_a_tutorial_prints_these_rows():
    module = hk.transform(lambda x: te.PositionalEncoding(te.Sinusoidal(), 6)(x, is_training=False))
    table = module.apply({}, None, np.zeros((10, 6), np.float32))
    near(table[np.array([*PRINTED])], [*PRINTED.values()], atol=PRINTED_ERROR)
