import decimal
import fractions
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest
from compare import equal

from transformer_embed._src.positions import phase


def of_channels(positions, constants):
    return phase.sinusoid(jnp.asarray(positions)[..., None], *constants)


sinusoid = jax.jit(of_channels)


def of_frequencies(frequencies):
    """A sine and a cosine of each."""
    quarters = np.array([0, 1] * len(frequencies), np.uint32)
    channel_frequencies = [f for f in frequencies for _ in range(2)]
    integers = phase.as_fixed_point(channel_frequencies, "base")
    return phase.words_of_fixed_point(integers), quarters


def constants(pairs, base=10_000.0):
    return of_frequencies(phase.geometric_frequencies(pairs, base, pairs))


def test_pi_and_frequencies_to_seventy_digits():
    with mpmath.workdps(90):
        assert str(phase.PI)[:80] == mpmath.nstr(mpmath.pi, 90)[:80]
        for i, frequency in enumerate(phase.geometric_frequencies(5, 10_000.0, 2.5)):
            exact = mpmath.mpf(10_000) ** (-mpmath.mpf(i) / mpmath.mpf("2.5"))
            assert abs(mpmath.mpf(str(frequency)) / exact - 1) < mpmath.mpf(10) ** -70


@pytest.mark.slow
def test_quarter_turns_are_exact():
    with decimal.localcontext(decimal.Context(prec=60)):
        quarter_turn = of_frequencies([phase.PI / 2])
    got = sinusoid(np.array([0, 1, 2, 3, 4, 2**30 + 1, -1]), quarter_turn)
    assert got[:, 0].tolist() == [0.0, 1.0, 0.0, -1.0, 0.0, 1.0, -1.0]


def test_small_angles_and_their_slopes_keep_their_relative_accuracy():
    of_sine = jax.value_and_grad(lambda position: of_channels(position, constants(2, 1e14))[2])
    # The slope is the frequency: at position 1 the cosine rounds to 1.
    frequency = oracle.frequency(1, 2, 1e14)
    exact = oracle.sine(1, frequency), frequency
    for got, want in zip(jax.jit(of_sine)(np.float32(1)), exact, strict=True):
        assert oracle.error(got, want) / float(want) < 2**-22


@functools.cache
def derivative(order):
    found = of_channels
    for _ in range(order):
        found = jax.jacfwd(found)
    return jax.jit(jax.vmap(found, (0, None)))


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("frequency_scale", [1.0, 1000.0])
def test_derivatives_in_float_positions(order, frequency_scale):
    at = np.array([0.3, -7.25, 1000.5], np.float32)
    frequencies = phase.geometric_frequencies(3, 10_000.0, 3, frequency_scale)
    got = np.asarray(derivative(order)(at, of_frequencies(frequencies)))
    for (n, p), c in itertools.product(enumerate(at), range(6)):
        frequency = oracle.frequency(c // 2, 3, 10_000.0, frequency_scale)
        # Each derivative of a sine or cosine is a quarter turn more.
        exact = oracle.sine(p.item(), frequency, (c + order) % 2) * frequency**order
        exact *= (-1) ** ((c % 2 + order) // 2)
        # Each factor is a float32 product: two roundings a derivative, beside the sine's own error.
        bound = float(frequency) ** order * (oracle.MAX_ERROR + order * 2**-22)
        assert oracle.error(got[n, c], exact) <= bound


@pytest.mark.slow
def test_the_gradient_where_there_is_no_phase_is_nan():
    gradient = jax.jit(jax.grad(lambda p: of_channels(p, constants(1)).sum()))
    assert np.isnan(gradient(np.float32(np.inf)))


@pytest.mark.slow
def test_64_bit_mode():
    positions, of_8 = np.array([0, 3, -5, 2**31 - 1]), constants(8)
    with jax.enable_x64():
        wide = np.asarray(sinusoid(np.append(positions, [2**31, 2**40]), of_8))
        floats = sinusoid(np.float64([0.25, 2.0**24 + 0.5]), of_8)
    assert wide.dtype == floats.dtype == jnp.float32
    equal(wide[:4], sinusoid(positions, of_8))
    equal(floats[0], sinusoid(np.float32(0.25), of_8))
    assert all(np.isnan(lost).all() for lost in (wide[4:], floats[1]))


def test_the_phase_of_a_float_is_the_exact_product():
    """Modulo one turn, but for the parts of the three products that are cut off below 2**-64 turns.
    A carry that is lost or too much is 2**32 of these units."""
    random = np.random.default_rng(0)
    magnitudes = np.concatenate(
        [
            random.uniform(0, 2.0**20, 300),
            random.uniform(0, 4, 300),
            np.arange(20.0),
            2.0 ** np.arange(-30, 30),
        ]
    ).astype(np.float32)
    units = [1, 2**32 - 1, 2**64 - 1, 2**63 + 2**31, *map(int, random.integers(1, 2**62, 20))]
    phase_of = jax.jit(phase._float_phase)
    for unit in units:
        got = phase_of(magnitudes[:, None], phase.words_of_fixed_point([unit]))
        whole = [int(high) << 32 | int(low) for high, low in zip(*map(np.ravel, got), strict=True)]
        for magnitude, number in zip(magnitudes.tolist(), whole, strict=True):
            exact = math.floor(fractions.Fraction(magnitude) * unit)
            missing = (exact - number) % 2**64
            assert missing < 4, (magnitude, unit, missing)


def test_no_constant_is_in_a_program_twice():
    """With two more, XLA split the phases of one token over the threads of a CPU, which took longer
    than computing them."""
    encode = jax.jit(functools.partial(of_channels, constants=constants(32)))
    arrays = re.findall(r"dense<(\[\[.*?\]\])>", encode.lower(np.int32([7])).as_text())
    assert 0 < len(arrays) == len(set(arrays)) <= 5
