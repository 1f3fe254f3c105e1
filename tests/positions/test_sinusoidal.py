"""The tables of published projects are in tests/test_conventions.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import check
from refused import each_refused

import transformer_embed as te


def test_the_size_of_a_program_does_not_depend_on_the_length():
    encode = jax.jit(lambda n: te.sinusoidal_table(n, 256), static_argnums=0)
    sizes = [len(encode.lower(n).as_text()) for n in (512, 131_072)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.05
    assert sizes[1] < 200_000


@pytest.mark.slow
def test_floats_on_the_host_that_float32_lacks():
    check(te.sinusoidal_encoding, [2.0**30, 2.0**40, np.inf, np.nan], 4)
    message = r"^positions: wanted floats that float32 holds .*, got 123456789.0$"
    with pytest.raises(ValueError, match=message):
        te.sinusoidal_encoding([0.1, 123456789.0], 4)


table = functools.partial(te.sinusoidal_table, 3, 4)
grid = te.SinusoidalGrid
encode = functools.partial(te.sinusoidal_encoding, d_model=4)
INT32 = "positions: ... -2147483648..2147483647, got "
MANY, FREQUENCIES = 2**31 - 2, f"number of frequencies: ... {2**23}, got "
DTYPE = "dtype: ... got "
TYPE_ERRORS = [
    (lambda: te.sinusoidal_table(3, 2.5), "d_model: ... got float 2.5"),
    (lambda: te.sinusoidal_table(True, 4), "length: ... got bool True"),
    (lambda: table(base=jnp.float32(1e4)), "base: ... got an array float32[]"),
    (lambda: jax.jit(lambda base: table(base=base))(4.0), "base: ... got a traced"),
    (lambda: table(dtype=jnp.int32), DTYPE + "int32"),
    (lambda: table(dtype=np.zeros(2, np.float32)), DTYPE + "an array float32[2]"),
    (lambda: grid(4), "shape: ... got int 4"),
    (lambda: encode(jnp.ones(3, jnp.bfloat16)), "positions: ... got bfloat16"),
]  # fmt: skip
VALUE_ERRORS = [
    (lambda: te.sinusoidal_table(3, 0), "d_model: ... 1, got 0"),
    (lambda: te.sinusoidal_table(-1, 4), "length: ... 0, got -1"),
    (lambda: table(layout=["sin_cos"]), "layout: ... got ['sin_cos']"),
    (lambda: table(odd=None), "odd: ... got None"),
    (lambda: table(base=0), "base: ... got 0"),
    (lambda: table(frequency_scale=np.inf), "frequency_scale: ... got inf"),
    (lambda: table(shift=2), "shift: ... 2, got 2"),
    (lambda: table(base=1e-30), "base and frequency_scale: wanted frequencies below 2**32 turns per"),
    (lambda: grid((2, 2), axes=(0, 0)), "axes: ... got (0, 0)"),
    (lambda: grid(()), "axes: ... (), ... got None"),
    (lambda: grid((2, 2, 2)).encoding([0], 4), "d_model: ... got 4"),
    (lambda: grid((2, 0)), "shape[1]: ... 1, got 0"),
    (lambda: grid((2, 3), axis_positions=([0, 1],)), "axis_positions: ... [[2], [3]], got [[2]]"),
    (lambda: te.sinusoidal_encoding([0], MANY), FREQUENCIES),
    (lambda: te.EmbedderConfig(3, MANY), FREQUENCIES),
    (lambda: grid((2, 2)).encoding([0], MANY), FREQUENCIES),
    (lambda: encode(np.array([5, 2**31])), INT32 + "2147483648 at index [1]"),
]  # fmt: skip


def test_bad_arguments_are_refused():
    each_refused(TypeError, TYPE_ERRORS)
    each_refused(ValueError, VALUE_ERRORS)
