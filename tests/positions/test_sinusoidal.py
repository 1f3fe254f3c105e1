"""The tables of published projects are in tests/test_conventions.py."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from references import check
from refused import each_refused

import transformer_embed as te
from transformer_embed._src.positions.sinusoidal import LAYOUTS, ODD

# A program has its constants: one for four positions.
POSITIONS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4)
CONSTANTS = st.fixed_dictionaries(
    {"layout": st.sampled_from(LAYOUTS), "odd": st.sampled_from(ODD)},
    optional={
        "base": st.one_of(st.floats(1e-9, 1), st.floats(1, 1e30)),
        "frequency_scale": st.one_of(st.floats(1e-30, 1), st.floats(1, 1e12)),
        "shift": st.one_of(st.floats(-1e12, 0.999), st.integers(-(2**40), 0)),
    },
)


@pytest.mark.slow
@hypothesis.given(POSITIONS, st.sampled_from([1, 2, 5, 9, 34]), CONSTANTS)
@hypothesis.settings(max_examples=25)
def test_any_constants(positions, d_model, options):
    """Fractional, negative, tiny and huge ones: the bound holds, or a frequency passes 2**32 turns
    per position and the error says so."""
    if max(oracle.sinusoidal_frequencies(d_model, **options), default=0) < 2**33 * mpmath.pi:
        check(te.sinusoidal_encoding, positions, d_model, **options)
    else:
        with pytest.raises(
            ValueError, match=r"^base and frequency_scale: wanted frequencies below"
        ):
            te.sinusoidal_encoding(positions, d_model, **options)


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
