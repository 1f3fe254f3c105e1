"""Arbitrary-precision references."""

import mpmath

# 6.0e-8 is promised: half a unit in the last place below 1 (2.98e-8, which no float32 result can beat), the two roundings of
# the polynomial (together below half of it again) and the minimax error (1.8e-9).
MAX_ERROR = 6.0e-8


def frequency(i, denominator, base=10_000.0, frequency_scale=1.0):
    """frequency_scale * base ** (-i / denominator), to 200 bits."""
    with mpmath.workprec(200):
        if i == 0:
            return mpmath.mpf(frequency_scale)
        return mpmath.mpf(frequency_scale) * mpmath.mpf(base) ** (-mpmath.mpf(i) / mpmath.mpf(denominator))


def sine(position, radians_per_unit, quarters=0):
    """sin(position * frequency + quarters * pi / 2) for an exact position, to 200 bits."""
    with mpmath.workprec(200):
        angle = mpmath.mpf(position) * radians_per_unit
        return mpmath.cos(angle) if quarters else mpmath.sin(angle)


def error(got, exact):
    """|got - exact| as a float."""
    with mpmath.workprec(200):
        return float(abs(mpmath.mpf(float(got)) - exact))
