"""The tables of published projects are in tests/test_conventions.py."""

import functools

import jax
import numpy as np
import pytest
from compare import equal
from references import check
from refused import each_raises

import transformer_embed as te


def test_the_size_of_a_program_does_not_depend_on_the_length():
    encode = jax.jit(lambda n: te.sinusoidal_table(n, 256), static_argnums=0)
    sizes = [len(encode.lower(n).as_text()) for n in (512, 131_072)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.05
    assert sizes[1] < 200_000


@pytest.mark.slow
def test_floats_on_the_host_that_float32_lacks():
    check(te.sinusoidal_encoding, [2.0**30, 2.0**40, np.inf, np.nan], 4)


table = functools.partial(te.sinusoidal_table, 3, 4)
grid = te.SinusoidalGrid
encode = functools.partial(te.sinusoidal_encoding, d_model=4)
MANY = 2**31 - 2
scale = functools.partial(te.query_scale, beta=0.1, length=8)
REFUSED = {
    "scale([1], beta=-1.0)": "ValueError: beta: ... got -1.0",
    "scale([1], length=0)": "ValueError: length: ... got 0",
    "scale([1], offset=2)": "ValueError: offset: ... got 2",
    "scale([1], offset=-1)": "ValueError: offset: ... got -1",
    "scale([1.0])": "TypeError: positions: ... got float64",
    "te.sinusoidal_table(3, 2.5)": "TypeError: d_model: ... got float 2.5",
    "te.sinusoidal_table(True, 4)": "TypeError: length: ... got bool True",
    "table(base=jax.numpy.float32(1e4))": "TypeError: base: ... got an array float32[]",
    "jax.jit(lambda base: table(base=base))(4.0)": "TypeError: base: ... got a traced",
    "table(dtype=jax.numpy.int32)": "TypeError: dtype: ... got int32",
    "table(dtype=np.zeros(2, np.float32))": "TypeError: dtype: ... got an array float32[2]",
    "grid(4)": "TypeError: shape: ... got int 4",
    "encode(jax.numpy.ones(3, 'bfloat16'))": "TypeError: positions: ... got bfloat16",
    "te.sinusoidal_table(3, 0)": "ValueError: d_model: ... 1, got 0",
    "te.sinusoidal_table(-1, 4)": "ValueError: length: ... 0, got -1",
    "table(layout=['sin_cos'])": "ValueError: layout: ... got ['sin_cos']",
    "table(odd=None)": "ValueError: odd: ... got None",
    "table(base=0)": "ValueError: base: ... got 0",
    "table(frequency_scale=np.inf)": "ValueError: frequency_scale: ... got inf",
    "table(shift=2)": "ValueError: shift: ... 2, got 2",
    "table(base=1e-30)": "ValueError: base and frequency_scale: wanted frequencies below 2**32 turns per",
    "grid((2, 2), axes=(0, 0))": "ValueError: axes: ... got (0, 0)",
    "grid(())": "ValueError: axes: ... (), ... got None",
    "grid((2, 2, 2)).encoding([0], 4)": "ValueError: d_model: ... got 4",
    "grid((2, 0))": "ValueError: shape[1]: ... 1, got 0",
    "grid((2, 3), axis_positions=([0, 1],))": "ValueError: axis_positions: ... [[2], [3]], got [[2]]",
    "te.sinusoidal_encoding([0], MANY)": "ValueError: number of frequencies: ... 8388608, got ",
    "te.EmbedderConfig(3, MANY)": "ValueError: number of frequencies: ... 8388608, got ",
    "grid((2, 2)).encoding([0], MANY)": "ValueError: number of frequencies: ... 8388608, got ",
    "encode([0.1, 123456789.0])": "ValueError: positions: wanted floats that float32 holds ..., got 123456789.0",
    "encode(np.array([5, 2**31]))": "ValueError: positions: ... -2147483648..2147483647, got 2147483648 at index [1]",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())


def test_channels_that_no_axis_of_a_grid_takes_are_zeros():
    encoding = grid((2, 3), odd="zero").encoding(np.arange(6), 6)
    equal(encoding, np.pad(grid((2, 3)).encoding(np.arange(6), 4), [(0, 0), (0, 2)]))
