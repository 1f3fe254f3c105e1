"""Slow references: arbitrary precision, and loops."""

import fractions

import mpmath
import numpy as np

from transformer_embed import LinearScaling, Llama3Scaling, LongRopeScaling, NTKScaling, YarnScaling


def mpf(value):
    """Any real number of Python or numpy, as a float64 holds it."""
    return value if isinstance(value, mpmath.mpf) else mpmath.mpf(float(value))


# 6.0e-8 is promised: half a unit in the last place below 1 (2.98e-8, which no float32 result can
# beat), the two roundings of the polynomial (together below half of it again) and the minimax error
# (1.8e-9).
MAX_ERROR = 6.0e-8


def frequency(i, denominator, base=10_000.0, frequency_scale=1.0):
    """frequency_scale * base ** (-i / denominator), to 200 bits."""
    with mpmath.workprec(200):
        if i == 0:
            return mpf(frequency_scale)
        return mpf(frequency_scale) * mpf(base) ** (-mpmath.mpf(i) / mpf(denominator))


def sine(position, radians_per_unit, quarters=0):
    """sin(position * frequency + quarters * pi / 2) for an exact position, to 200 bits."""
    with mpmath.workprec(200):
        angle = mpmath.mpf(position) * radians_per_unit
        return mpmath.cos(angle) if quarters else mpmath.sin(angle)


def error(got, exact):
    """|got - exact| as a float."""
    with mpmath.workprec(200):
        return float(abs(mpmath.mpf(float(got)) - exact))


def encoding(position, d_model, *, layout="interleaved", odd="truncate", **constants):
    """Each channel of the sinusoidal encoding of one position."""
    frequencies = sinusoidal_frequencies(d_model, odd=odd, **constants)
    sines, cosines = ([sine(position, each, n) for each in frequencies] for n in (0, 1))
    if layout == "interleaved":
        values = [value for pair in zip(sines, cosines, strict=True) for value in pair]
    else:
        values = sines + cosines if layout == "sin_cos" else cosines + sines
    return [*values, mpmath.mpf(0)][:d_model]


def sinusoidal_frequencies(
    d_model, *, odd="truncate", base=1e4, shift=None, frequency_scale=1.0, **_
):
    """The frequency of each pair of channels."""
    pairs = d_model // 2 if odd == "zero" else (d_model + 1) // 2
    width = d_model + d_model % 2 if odd == "round_up" else d_model
    with mpmath.workprec(200):
        denominator = mpmath.mpf(width) / 2 if shift is None else width // 2 - mpf(shift)
    return [frequency(i, denominator, base, frequency_scale) for i in range(pairs)]


@mpmath.workprec(200)
def scaled_frequencies(scaling, dim, base):
    """The published formulas: the frequency of each pair of dim channels, and the attention
    factor."""
    plain = [frequency(i, mpf(dim) / 2, base) for i in range(dim // 2)]
    log = lambda factor: mpmath.log(mpf(factor)) if factor > 1 else mpf(0)
    attention = 1
    match scaling:
        case None:
            return plain, attention
        case LinearScaling(factor):
            divisors = [mpf(factor)] * len(plain)
        case NTKScaling(alpha):
            return _stretched(mpf(alpha), dim, base), attention
        case YarnScaling(factor, original):
            shares = _yarn_shares(scaling, dim, base)
            divisors = [1 / (share / mpf(factor) + 1 - share) for share in shares]
            mscale = lambda s: mpf(s) * log(factor) / 10 + 1
            attention = mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
        case Llama3Scaling():
            return [_llama_3(f, scaling) for f in plain], attention
        case LongRopeScaling(short, long, factor, original, length):
            divisors = [mpf(each) for each in (long if length > original else short)]
            attention = mpmath.sqrt(1 + log(factor) / mpmath.log(original))
    if scaling.attention_factor is not None:
        attention = mpf(scaling.attention_factor)
    return [f / divisor for f, divisor in zip(plain, divisors, strict=True)], attention


def _stretched(alpha, dim, base):
    stretched = mpf(base) * alpha ** (mpf(dim) / (dim - 2)) if dim > 2 else mpf(base)
    return [stretched ** (-mpf(2 * i) / dim) for i in range(dim // 2)]


def _yarn_shares(scaling, dim, base):
    """How much of each frequency is divided by the factor."""

    def index(turns):
        of_turns = mpmath.log(scaling.original_length / (mpf(turns) * 2 * mpmath.pi))
        return dim * of_turns / (2 * mpmath.log(mpf(base)))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = mpmath.floor(low), mpmath.ceil(high)
    low, high = max(low, mpf(0)), min(high, mpf(dim - 1))
    high = high + mpf("0.001") if low == high else high
    return [min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]


def _llama_3(frequency, scaling):
    """`apply_scaling` of the published code, by wavelengths."""
    wavelength = 2 * mpmath.pi / frequency
    low, high = mpf(scaling.low_freq_factor), mpf(scaling.high_freq_factor)
    if wavelength < scaling.original_length / high:
        return frequency
    if wavelength > scaling.original_length / low:
        return frequency / mpf(scaling.factor)
    smooth = (scaling.original_length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / mpf(scaling.factor) + smooth * frequency


def alibi_slopes(num_heads, max_bias=8):
    """To 200 bits: a geometric sequence for a power of two; else that of the power below, and every
    other one of twice that power."""
    power = max(2**n for n in range(12) if 2**n <= num_heads)
    with mpmath.workprec(200):
        ratios = {n: mpmath.mpf(2) ** (-mpf(max_bias) / n) for n in (power, 2 * power)}
        sequences = {n: [ratio**i for i in range(1, n + 1)] for n, ratio in ratios.items()}
    return sequences[power] + sequences[2 * power][::2][: num_heads - power]


def t5_bucket(query, key, num_buckets, max_distance, causal):
    """T5's bucket; the floor of the logarithm is the number of powers of max_distance / e that the
    distance has reached."""
    after, buckets = key > query, num_buckets if causal else num_buckets // 2
    distance = 0 if causal and after else abs(key - query)
    exact = buckets // 2
    if distance >= exact:
        steps, base = buckets - exact, fractions.Fraction(max_distance, exact)
        share = fractions.Fraction(distance, exact) ** steps
        distance = exact + sum(share >= base**j for j in range(1, steps))
    return distance + (buckets if after and not causal else 0)


def loop_lookup(table, ids, pad_id=None, out_of_range="nan"):
    """The rows of a NumPy table, one id at a time."""
    vocab_size, width = table.shape
    flat = np.empty((np.size(ids), width), table.dtype)
    for n, token in enumerate(int(token) for token in np.ravel(ids)):
        if token == pad_id:
            flat[n] = 0
        elif 0 <= token < vocab_size or out_of_range == "clip":
            flat[n] = table[min(max(token, 0), vocab_size - 1)]
        else:
            flat[n] = np.nan if out_of_range == "nan" else 0
    return flat.reshape(*np.shape(ids), width)


def loop_lookup_gradient(shape, ids, cotangent, pad_id=None, out_of_range="nan"):
    """float64: each row sums the cotangents of its ids."""
    last, gradient = shape[0] - 1, np.zeros(shape)
    for token, row in zip(np.ravel(ids).tolist(), cotangent.reshape(-1, shape[1]), strict=True):
        if token != pad_id and (0 <= token <= last or out_of_range == "clip"):
            gradient[min(max(token, 0), last)] += row.astype(np.float64)
    return gradient
