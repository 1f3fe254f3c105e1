"""The scale of queries against float64, at both sides of each step and at the ends of int32."""

import functools

import draws
import numpy as np
import pytest
from refused import each_raises

import transformer_embed as te

# log1p of a float32, its product and its sum, of 1 and more.
ULPS = 2
SPACE = {
    "length": [1, 7, 8192, 16_384, 2**31 - 1],
    "beta": [0.0, 0.1, 0.5, 4],
    "offset": [0, 1],
    "dtype": ["int8", "int32", "uint16", "uint32"],
    "mode": [mode for mode in draws.MODES if mode not in ("shard_map", "exported")],
}
PROGRAM = """\
from test_query_scale import *

rng = np.random.default_rng({number})
ends = np.iinfo({dtype!r}).min, np.iinfo({dtype!r}).max, 0, -1, 2**31 - 2
steps = rng.integers(0, 4, (2, 3, 8)) * {length} + rng.integers(-2, 2, (2, 3, 8))
steps.flat[:5] = ends
batches = [(np.clip(each, ends[0], min(ends[1], 2**31 - 2)).astype({dtype!r}),) for each in steps]
scale = lambda x: te.query_scale(x, beta={beta}, length={length}, offset={offset})
found = draws.call({mode!r}, scale, batches)"""


@pytest.mark.parametrize("number", draws.numbers(24))
def test_the_scale_is_that_of_float64(number):
    chosen = draws.choices(number, SPACE)
    program = PROGRAM.format(number=number, **vars(chosen))
    with draws.repeated_by(number, program):
        drawn = draws.run(number, program)
        for (positions,), ours in zip(drawn.batches, drawn.found, strict=True):
            counts = np.maximum(positions.astype(np.int64), 0) + chosen.offset
            expected = 1 + chosen.beta * np.log1p((counts // chosen.length).astype(np.float64))
            assert ours.dtype == np.float32
            atol = ULPS * np.spacing(expected.astype(np.float32))
            np.testing.assert_array_less(np.abs(np.asarray(ours, np.float64) - expected), atol)


scale = functools.partial(te.query_scale, beta=0.1, length=8)
REFUSED = {
    "scale([1], beta=-1.0)": "ValueError: beta: ... got -1.0",
    "scale([1], length=0)": "ValueError: length: ... got 0",
    "scale([1], offset=2)": "ValueError: offset: ... got 2",
    "scale([1], offset=-1)": "ValueError: offset: ... got -1",
    "scale([1.0])": "TypeError: positions: ... got float64",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
