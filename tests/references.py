"""Functions of arrays, slowly: plain loops over Python ints, mpmath, and float64 sums.

`CHECKS` has a function for each of them. It takes the result and all of the arguments, defaults
included, and asserts that the result is right within what the docstring of the public function
promises.
"""

import inspect

import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
from compare import equal, near

import transformer_embed as te
from transformer_embed._src.positions import rotary

# a * cos - b * sin in float32: each product and their sum are rounded once, by 2**-24 of each term.
ROUNDINGS = 2**-23
# The attention factor rounded to float32, and its product with a cosine: 2**-24 each.
OF_A_FACTOR = 2**-23
# The relative error of a product with a slope, as alibi_bias has it.
SLOPE_ERROR = 1.8e-7


def check(function, *arguments, **options):
    """The result, after asserting that it is right."""
    result = function(*arguments, **options)
    assert_right(function, result, *arguments, **options)
    return result


def assert_right(function, result, *arguments, **options):
    full = inspect.signature(function).bind(*arguments, **options)
    full.apply_defaults()
    CHECKS[function](result, *full.args, **full.kwargs)


def integers(value):
    """Python ints, in an array of objects: no width, no sign, no byte order."""
    array = np.asarray(value)
    if array.dtype.kind == "V":
        array = array.astype(np.int8)
    return np.array([int(each) for each in array.ravel()], object).reshape(array.shape)


def floats(value):
    return np.asarray(value).astype(np.float64)


def rows_of(*arrays):
    """[B, T] each, as lists, for shapes [T] or [B, T]."""
    arrays = [np.atleast_2d(integers(array)) for array in arrays]
    batch = max(len(array) for array in arrays) if all(map(len, arrays)) else 0
    return [[array[b if len(array) > 1 else 0].tolist() for b in range(batch)] for array in arrays]


def pairs_of(rule, queries, keys):
    """[B, T, S] of a function of two Python ints."""
    queries, keys = rows_of(queries, keys)
    return [[[rule(q, k) for k in keys[b]] for q in queries[b]] for b in range(len(queries))]


def same(got, expected):
    """Equal to the bit, in shape too, if there is anything to compare."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.size == expected.size
    equal(got.astype(expected.dtype).ravel(), expected.ravel())


def within(got, expected, error, dtype=jnp.float32):
    """|got - expected| <= error, and one rounding to the dtype; NaN where NaN is expected."""
    dtype = jnp.dtype(dtype).newbyteorder("=")
    assert np.asarray(got).dtype == (np.float32 if dtype == np.float64 else dtype)
    got, expected = floats(got).ravel(), np.asarray(expected, np.float64).ravel()
    assert got.size == expected.size
    rounding = 0
    if dtype.itemsize == 2:
        of_dtype = jnp.finfo(dtype)
        rounding = float(of_dtype.eps) * np.abs(expected) + float(of_dtype.smallest_subnormal)
    equal(np.isnan(got), np.isnan(expected))
    excess = np.abs(got - expected) - np.ravel(error) - rounding
    assert not np.any(excess > 0), np.nanmax(excess)


# --- positions and phases


def exact_positions(value):
    """An array of Python numbers, floats as float32 holds them; None for what has no phase."""
    array = np.asarray(value)
    if np.issubdtype(array.dtype, np.floating):
        numbers = array.astype(np.float32).ravel().tolist()
        has_phase = lambda number: abs(number) < 2**31
    else:
        numbers = integers(value).ravel()
        has_phase = lambda number: array.dtype.itemsize < 8 or -(2**31) <= number < 2**31
    points = np.array([number if has_phase(number) else None for number in numbers], object)
    return points.reshape(array.shape)


def sine_error(points, frequencies):
    """Of floats it is promised below 2**24 and up to 1000 radians a position."""
    points = [point for point in points.ravel() if point is not None]
    is_promised = all(isinstance(point, int) for point in points) or (
        max(frequencies, default=0) <= 1000 and all(abs(point) < 2**24 for point in points)
    )
    return oracle.MAX_ERROR if is_promised else 2.0


def exact_encoding(points, width, **options):
    """float64 [*points.shape, width]."""
    rows = [
        np.full(width, np.nan) if point is None else oracle.encoding(point, width, **options)
        for point in points.ravel()
    ]
    return np.array(rows, np.float64).reshape(*points.shape, width)


def encoding(got, positions, d_model, *, dtype, **options):
    points = exact_positions(positions)
    assert np.shape(got) == (*points.shape, d_model)
    error = sine_error(points, oracle.sinusoidal_frequencies(d_model, **options))
    within(got, exact_encoding(points, d_model, **options), error, dtype)


def table(got, length, d_model, **options):
    encoding(got, np.arange(length), d_model, **options)


def grid_encoding(positions, d_model, **options):
    return te.SinusoidalGrid(**options).encoding(positions, d_model)


def grid(got, positions, d_model, *, shape, axes=None, axis_positions=None, odd, **options):
    parts = len(shape)
    width = {
        "truncate": d_model // parts,
        "round_up": 2 * -(-d_model // (2 * parts)),
        "zero": 2 * (d_model // (2 * parts)),
    }[odd]
    along = map(np.arange, shape) if axis_positions is None else axis_positions
    along = [exact_positions(each) for each in along]
    points = np.meshgrid(*along, indexing="ij")
    order = range(parts) if axes is None else axes
    encodings = [exact_encoding(points[axis], width, **options) for axis in order]
    expected = np.concatenate([*encodings, np.zeros((*shape, d_model))], -1)[..., :d_model]
    rows, outside = expected.reshape(-1, d_model), np.full(d_model, np.nan)
    numbers = integers(positions)
    chosen = [rows[n] if 0 <= n < len(rows) else outside for n in numbers.ravel()]
    expected = np.array(chosen).reshape(*numbers.shape, d_model)
    assert np.shape(got) == expected.shape
    frequencies = oracle.sinusoidal_frequencies(width, **options)
    within(got, expected, sine_error(np.concatenate(along), frequencies), np.float32)


def pairs(dim, layout):
    """The first and the second channel of each pair."""
    pair = np.arange(dim // 2)
    return (pair, pair + dim // 2) if layout == "half" else (2 * pair, 2 * pair + 1)


def rotated(got, x, positions, *, base, layout, rotary_dim, partial, scaling, pair_axes):
    x = floats(x)
    rotating = x.shape[-1] if rotary_dim is None else rotary_dim
    dim = x.shape[-1] if partial == "proportional" else rotating
    frequencies, attention = oracle.scaled_frequencies(scaling, dim, base)
    frequencies = np.array(frequencies, object)
    frequencies[rotating // 2 :] = 0
    points = exact_positions(positions)
    if pair_axes is None:
        points, pair_axes = points[..., None], [0] * len(frequencies)
    points = np.broadcast_to(points, (*x.shape[:-2], points.shape[-1]))
    points = points[..., None, np.array(pair_axes, int)]

    def wave(point, frequency, quarter):
        return np.nan if point is None else attention * oracle.sine(point, frequency, quarter)

    cos, sin = (np.vectorize(wave, otypes=[float])(points, frequencies, n) for n in (1, 0))
    a, b = pairs(dim, layout)
    first, second = x[..., a], x[..., b]
    expected, size = x.copy(), np.zeros(x.shape)
    expected[..., a], expected[..., b] = first * cos - second * sin, second * cos + first * sin
    size[..., a] = size[..., b] = np.abs(first) + np.abs(second)
    error = sine_error(points, frequencies) + ROUNDINGS + (0 if attention == 1 else OF_A_FACTOR)
    within(got, expected, float(attention) * size * error, np.asarray(got).dtype)


def scaling(got, *_, **__):
    dim = 8
    if isinstance(got, te.LongRopeScaling):
        dim = 2 * len(got.long_factor if got.length > got.original_length else got.short_factor)
    if dim:
        check_frequencies(got, dim, 10_000.0)


def check_frequencies(scaling, dim, base):
    """As turns in units of 2**-64, rounded once; the attention factor rounded to a float64."""
    units, attention = rotary._frequencies(dim, dim // 2, base, scaling)
    frequencies, exact_attention = oracle.scaled_frequencies(scaling, dim, base)
    with mpmath.workprec(300):
        for unit, frequency in zip(units, frequencies, strict=True):
            assert abs(unit - frequency / (2 * mpmath.pi) * 2**64) <= 0.5 + 1e-9
        assert abs(attention - exact_attention) <= 2**-52 * abs(exact_attention)


def permuted(got, weights, num_heads, *, source, target, rotary_dim):
    weights = np.asarray(weights)
    head_dim = weights.shape[-1] // num_heads
    dim = head_dim if rotary_dim is None else rotary_dim
    heads = weights.reshape(*weights.shape[:-1], num_heads, head_dim)
    expected = heads.copy()
    for old, new in zip(pairs(dim, source), pairs(dim, target), strict=True):
        expected[..., new] = heads[..., old]
    same(got, expected)


def scaled(got, positions, *, beta, length, offset):
    counts = np.array(np.maximum(integers(positions), 0), np.int64) + offset
    expected = 1 + beta * np.log1p((counts // length).astype(np.float64))
    # log1p of a float32, its product and its sum, of 1 and more.
    within(got, expected, 2 * np.spacing(expected.astype(np.float32)))


# --- biases


def slopes(got, num_heads, *, max_bias):
    same(got, np.float32([float(slope) for slope in oracle.alibi_slopes(num_heads, max_bias)]))


def alibi(got, query_positions, key_positions, num_heads, *, causal, max_bias, dtype):
    most = float(jnp.finfo(np.asarray(got).dtype).max) / 4
    rule = lambda q, k: k - q if causal else -abs(k - q)
    distances = np.array(pairs_of(rule, query_positions, key_positions), np.float64)
    slopes = np.array([float(slope) for slope in oracle.alibi_slopes(num_heads, max_bias)])
    expected = np.zeros(0)
    if distances.size:
        expected = np.clip(slopes[:, None, None] * distances[:, None], -most, most)
    within(got, expected, SLOPE_ERROR * np.abs(expected) + 2.0**-149, dtype)


def buckets(got, query_positions, key_positions, *, num_buckets, max_distance, causal):
    rule = lambda q, k: oracle.t5_bucket(q, k, num_buckets, max_distance, causal)
    same(got, np.array(pairs_of(rule, query_positions, key_positions), np.int64))


# --- parameters


def resized(got, params, config, new_config, *, rng, grids, keep_positions):
    """Checks kept rows. tests/pretrained/test_resizing.py checks new rows, and grids."""
    assert grids is None
    assert not config.spread | new_config.spread
    for path, leaves in params.items():
        for name, leaf in leaves.items():
            if path.endswith("token_embedding"):
                kept = min(config.vocab_size, new_config.vocab_size)
                assert got[path][name].shape == (new_config.rows, *leaf.shape[1:])
                same(floats(got[path][name])[:kept], floats(leaf)[:kept])
            elif not path.endswith("learned_positional_encoding"):
                same(got[path][name], leaf)
            elif keep_positions:
                kept = min(config.scheme.max_len, new_config.scheme.max_len)
                assert len(got[path][name]) == new_config.scheme.max_len
                same(floats(got[path][name])[:kept], floats(leaf)[:kept])
            elif config.scheme.max_len != new_config.scheme.max_len:
                resized_positions(got[path][name], leaf, new_config.scheme)


def resized_positions(got, table, scheme):
    """Weights of a triangle, as wide as the steps are long where rows become fewer."""
    old, new, start = floats(table), floats(got), scheme.start
    rounding = max(1e-5, float(jnp.finfo(got.dtype).eps))
    assert new.shape == (scheme.max_len, old.shape[1])
    same(new[:start], old[:start])
    rows, step = old[start:], (len(old) - start) / (len(new) - start)
    for n, row in enumerate(new[start:]):
        distances = (n + 0.5) * step - 0.5 - np.arange(len(rows))
        weights = np.maximum(0, 1 - np.abs(distances) / max(step, 1))
        near(row, weights @ rows / weights.sum(), rtol=rounding, atol=rounding)


CHECKS = {
    te.pretrained.resize: resized,
    te.alibi_bias: alibi,
    te.alibi_slopes: slopes,
    te.apply_rotary: rotated,
    te.permute_rotary_weights: permuted,
    te.query_scale: scaled,
    te.relative_position_buckets: buckets,
    te.sinusoidal_encoding: encoding,
    grid_encoding: grid,
    te.sinusoidal_table: table,
    te.LinearScaling: scaling,
    te.NTKScaling: scaling,
    te.YarnScaling: scaling,
    te.Llama3Scaling: scaling,
    te.LongRopeScaling: scaling,
}
