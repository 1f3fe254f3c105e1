import decimal
import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest
from contexts import x64
from hypothesis import strategies as st

import transformer_embed as te
from transformer_embed._src.functional import phase

BASES = (2.0, 10_000.0, 1e7)
BOUNDARIES = [
    0,
    1,
    -1,
    2,
    2**15,
    2**16 - 1,
    2**16,
    2**24 - 1,
    2**24,
    2**30,
    2**31 - 1,
    -(2**24),
    -(2**31) + 1,
    -(2**31),
]


def of_channels(positions, constants):
    return phase.sinusoid(jnp.asarray(positions)[..., None], *constants)


sinusoid = jax.jit(of_channels)


def of_frequencies(frequencies, quarters):
    return phase.words(frequencies), np.array(quarters, np.uint32)


def constants(pairs, base, frequency_scale=1.0):
    frequencies = phase.geometric_frequencies(pairs, base, pairs, frequency_scale)
    return of_frequencies([f for f in frequencies for _ in range(2)], [0, 1] * pairs)


def worst_error(positions, pairs, base, columns, frequency_scale=1.0):
    got = np.asarray(sinusoid(positions, constants(pairs, base, frequency_scale)))
    frequencies = {c: oracle.frequency(c // 2, pairs, base, frequency_scale) for c in columns}
    return max(
        oracle.error(got[n, c], oracle.sine(p.item(), frequency, c % 2))
        for n, p in enumerate(np.asarray(positions))
        for c, frequency in frequencies.items()
    )


def some_columns(pairs, rng, count=24):
    return sorted({0, 1, 2 * pairs - 2, 2 * pairs - 1, *rng.integers(0, 2 * pairs, count).tolist()})


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("pairs", [1, 2, 32, 256, 4096])
def test_integer_positions_against_arbitrary_precision(pairs, base):
    rng = np.random.default_rng(pairs)
    positions = np.concatenate(
        [BOUNDARIES, rng.integers(-(2**31), 2**31, 40), rng.integers(-5000, 5000, 40)]
    ).astype(np.int32)
    assert worst_error(positions, pairs, base, some_columns(pairs, rng)) <= oracle.MAX_ERROR


@pytest.mark.parametrize("base", BASES)
def test_unsigned_positions_against_arbitrary_precision(base):
    rng = np.random.default_rng(1)
    positions = np.concatenate(
        [[0, 2**31 - 1, 2**31, 2**32 - 1], rng.integers(0, 2**32, 60)]
    ).astype(np.uint32)
    assert worst_error(positions, 32, base, some_columns(32, rng)) <= oracle.MAX_ERROR


@pytest.mark.parametrize("frequency_scale", [1.0, 0.125, 1000.0])
def test_float_positions_against_arbitrary_precision(frequency_scale):
    rng = np.random.default_rng(2)
    positions = np.concatenate(
        [[0.5, -0.5, 2**24 - 1], *(rng.uniform(-m, m, 30) for m in (1e-6, 1e-3, 1.0, 1e3, 2.0**24))]
    )
    assert (
        worst_error(
            positions.astype(np.float32), 32, 10_000.0, some_columns(32, rng), frequency_scale
        )
        <= oracle.MAX_ERROR
    )


def test_whole_floats_equal_integers():
    positions = np.array([0, 1, -1, 77, -4096, 2**24, -(2**24)])
    ours = constants(16, 10_000.0)
    # The same phase, reached as p and as -(-p): its low words may differ by one unit of 2**-64, the
    # sine by a rounding.
    np.testing.assert_allclose(
        sinusoid(positions.astype(np.float32), ours), sinusoid(positions, ours), rtol=0, atol=2**-23
    )


multiply_high = jax.jit(phase.multiply_high)


@hypothesis.given(
    st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8), st.integers(0, 2**32 - 1)
)
@hypothesis.settings(max_examples=50)
def test_multiply_high_is_the_upper_word(numbers, other):
    got = multiply_high(np.array(numbers, np.uint32), np.uint32(other))
    assert got.tolist() == [n * other >> 32 for n in numbers]
    signed = np.array(numbers, np.uint32).astype(np.int32)
    assert multiply_high(signed, np.uint32(other)).tolist() == [
        (n * other >> 32) % 2**32 for n in signed.tolist()
    ]


def test_constants_have_pi_to_their_precision():
    with mpmath.workdps(90):
        assert str(phase.PI)[:80] == mpmath.nstr(mpmath.pi, 90)[:80]


def test_frequencies_to_seventy_digits():
    with mpmath.workdps(90):
        for i, frequency in enumerate(phase.geometric_frequencies(5, 10_000.0, 2.5)):
            exact = mpmath.mpf(10_000) ** (-mpmath.mpf(i) / mpmath.mpf("2.5"))
            assert abs(mpmath.mpf(str(frequency)) / exact - 1) < mpmath.mpf(10) ** -70


def test_words_of_a_frequency():
    with decimal.localcontext(decimal.Context(prec=60)):
        half_a_turn = phase.PI
        words = phase.words([half_a_turn, 5 * half_a_turn])
    assert words.turns.tolist() == [0, 2]
    assert words.high.tolist() == [2**31, 2**31]
    assert words.low.tolist() == [0, 0]


def test_quarter_turns_are_exact():
    with decimal.localcontext(decimal.Context(prec=60)):
        ours = of_frequencies([phase.PI / 2], [0])
    got = sinusoid(np.array([0, 1, 2, 3, 4, 2**30 + 1, -1]), ours)
    assert np.ravel(got).tolist() == [0.0, 1.0, 0.0, -1.0, 0.0, 1.0, -1.0]


def test_small_angles_keep_their_relative_accuracy():
    ours = constants(2, 1e7 * 1e7)
    exact = oracle.sine(1, oracle.frequency(1, 2, 1e14))
    assert (
        oracle.error(np.asarray(sinusoid(np.array([1]), ours))[0, 2], exact) / float(exact) < 2**-22
    )


def test_odd_symmetry():
    positions = np.random.default_rng(3).integers(0, 2**31 - 1, 500)
    ours = constants(8, 10_000.0)
    forward, backward = (
        np.asarray(sinusoid(positions, ours)),
        np.asarray(sinusoid(-positions, ours)),
    )
    # One rounding of a result below 1, either way.
    np.testing.assert_allclose(backward[:, 0::2], -forward[:, 0::2], rtol=0, atol=2**-23)


def test_all_integer_dtypes_agree():
    ours = constants(4, 10_000.0)
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64):
        np.testing.assert_array_equal(
            sinusoid(np.arange(100, dtype=dtype), ours),
            sinusoid(np.arange(100, dtype=np.int32), ours),
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**31, -(2.0**31), 1e30])
def test_float_positions_without_a_phase_give_nan(bad):
    assert np.isnan(sinusoid(np.float32(bad), constants(2, 10_000.0))).all()


def test_large_float_positions_have_a_phase():
    exact = oracle.sine(2**31 - 128, oracle.frequency(1, 2))
    assert (
        oracle.error(
            np.asarray(sinusoid(np.float32(2**31 - 128), constants(2, 10_000.0)))[2], exact
        )
        <= oracle.MAX_ERROR
    )


@functools.cache
def derivative_at_each(order):
    derivative = of_channels
    for _ in range(order):
        derivative = jax.jacfwd(derivative)
    return jax.jit(jax.vmap(derivative, (0, None)))


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("frequency_scale", [1.0, 1000.0])
def test_derivatives_in_float_positions(order, frequency_scale):
    at = np.array([0.3, -7.25, 1000.5], np.float32)
    got = np.asarray(derivative_at_each(order)(at, constants(3, 10_000.0, frequency_scale)))
    for n, p in enumerate(at):
        for c in range(6):
            frequency = oracle.frequency(c // 2, 3, 10_000.0, frequency_scale)
            exact = frequency**order * oracle.sine(
                p.item(), frequency, 0 if (c + order) % 2 == 0 else 1
            )
            exact *= (-1) ** ((order + c % 2) // 2)
            # Each factor is a float32 product: two roundings a derivative, beside the sine's own
            # error.
            assert oracle.error(got[n, c], exact) <= float(frequency) ** order * (
                oracle.MAX_ERROR + order * 2**-22
            )


@pytest.mark.slow
def test_gradient_reverse_mode_equals_forward_mode():
    ours = constants(3, 10_000.0)
    total = lambda p: of_channels(p, ours).sum()
    p = np.float32(2.5)
    reverse, forward, second = jax.jit(
        lambda p: (jax.grad(total)(p), jax.jacfwd(total)(p), jax.hessian(total)(p))
    )(p)
    np.testing.assert_allclose(reverse, forward, rtol=1e-6)
    assert np.isfinite(second)


def test_derivative_where_there_is_no_phase_is_nan():
    assert np.isnan(
        jax.jit(jax.grad(lambda p: of_channels(p, constants(1, 2.0)).sum()))(np.float32(np.inf))
    )


@pytest.mark.slow
def test_64_bit_mode_changes_nothing():
    ours = constants(8, 10_000.0)
    positions = np.array([0, 3, -5, 2**31 - 1])
    with x64():
        traced = np.asarray(sinusoid(np.append(positions, 2**31), ours))
        fraction = sinusoid(np.float64(0.25), ours)
    assert traced.dtype == fraction.dtype == jnp.float32
    assert np.isnan(traced[-1]).all()
    np.testing.assert_array_equal(traced[:-1], sinusoid(positions, ours))
    np.testing.assert_array_equal(fraction, sinusoid(np.float32(0.25), ours))


@pytest.mark.slow
def test_vmap_and_shapes():
    ours = constants(4, 10_000.0)
    positions = np.arange(12).reshape(3, 4)
    # XLA may contract a product and a sum when it fuses: one rounding of a value up to 1.
    mapped = jax.jit(jax.vmap(lambda p: of_channels(p, ours)))(positions)
    np.testing.assert_allclose(mapped, sinusoid(positions, ours), rtol=0, atol=2**-23)
    shapes = [
        jax.eval_shape(lambda p: of_channels(p, ours), p).shape
        for p in (np.zeros([0], np.int32), 7)
    ]
    assert shapes == [(0, 8), (8,)]


@pytest.mark.slow
@pytest.mark.parametrize("scalar", [2**40, 2.0**24 + 0.5])
def test_scalars_that_32_bits_lack_are_nan_with_x64(scalar):
    with x64():
        weak = jnp.zeros((), int) + scalar
        for position in (jnp.asarray(scalar), weak):
            assert position.dtype.itemsize == 8
            assert np.isnan(sinusoid(position, constants(2, 10_000.0))).all()


def test_no_constant_is_in_a_program_twice():
    """With two more, XLA split the phases of one token over the threads of a CPU, which took longer
    than computing them."""
    ours = constants(32, 10_000.0)
    text = jax.jit(lambda positions: of_channels(positions, ours)).lower(np.int32([7])).as_text()
    arrays = re.findall(r"dense<(\[\[.*?\]\])>", text)
    assert 0 < len(arrays) == len(set(arrays)) <= 5


@pytest.mark.parametrize(
    "call",
    [
        lambda size: te.sinusoidal_encoding([0], size),
        lambda size: te.EmbedderConfig(3, size),
        lambda size: te.sinusoidal_grid((2, 2), size),
        te.plots.plot_wavelengths,
    ],
    ids=["encoding", "config", "grid", "plot"],
)
def test_more_frequencies_than_a_program_can_hold_are_refused_at_once(call):
    with pytest.raises(ValueError, match=r"^number of frequencies: wanted an int of at most"):
        call(2**31 - 2)
