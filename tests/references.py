"""Every public function, slowly: plain loops over Python ints, mpmath, and float64 sums.

`CHECKS` has a function for each public one. It takes the result and all of the arguments, defaults
included, and asserts that the result is right within what the docstring of the public function
promises.
"""

import functools
import inspect
from typing import NamedTuple

import jax.numpy as jnp
import loops
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


def flat(function):
    """The function with the fields of its output layer among its own arguments."""
    fields = inspect.signature(te.OutputLayer).parameters.values()
    # Rows that are padding are drawn with tables on a mesh.
    fields = [each for each in fields if each.name != "vocab_size"]

    @functools.wraps(function)
    def call(x, table, *arguments, **options):
        given = {each.name: options.pop(each.name) for each in fields if each.name in options}
        return function(x, te.OutputLayer(table, **given), *arguments, **options)

    x, _, *others = inspect.signature(function).parameters.values()
    bias = fields[1].replace(kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = sorted([x, fields[0], *others, bias, *fields[2:]], key=lambda each: each.kind)
    call.__signature__ = inspect.Signature(parameters)
    return call


linear_logits, linear_cross_entropy, linear_top_k, linear_divergence = map(
    flat, (te.linear_logits, te.linear_cross_entropy, te.linear_top_k, te.linear_divergence)
)
linear_log_probs = flat(te.linear_log_probs)


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


# --- masks


def bias(got, mask, dtype, *, value):
    dtype = np.asarray(got).dtype
    low = float(jnp.finfo(dtype).min) / 2 if value is None else float(value)
    same(got, np.where(np.asarray(mask), 0.0, low).astype(dtype))


def dense_mask(
    *,
    query_positions,
    key_positions,
    causal,
    window=None,
    chunk=None,
    query_segment_ids=None,
    key_segment_ids=None,
    query_block_ids=None,
    key_block_ids=None,
):
    """AttentionMask as a function of arrays."""
    queries = te.TokenPositions(
        query_positions, segment_ids=query_segment_ids, block_ids=query_block_ids
    )
    keys = te.TokenPositions(key_positions, segment_ids=key_segment_ids, block_ids=key_block_ids)
    return te.AttentionMask(queries, keys, causal=causal, window=window, chunk=chunk).dense()


def attention(got, *, causal, window, chunk, **arrays):
    sides = []
    for side in ("query", "key"):
        positions, segments, blocks = (
            arrays[f"{side}_{field}"] for field in ("positions", "segment_ids", "block_ids")
        )
        tokens = loops.TokenPositions(integers(positions), segment_ids=segments)
        sides.append(tokens if blocks is None else tokens.with_block_ids(blocks))
    expected = loops.AttentionMask(*sides, causal=causal, window=window, chunk=chunk).allowed
    same(*np.broadcast_arrays(np.asarray(got)[:, 0], expected))


def padding(got, ids, *, pad_id):
    same(got, np.array([each != pad_id for each in integers(ids).ravel()], bool))


def causal(got, length):
    same(got, np.tri(length, dtype=bool))


# --- tables


def checked(got, ids, tokens=None, *, vocab_size, pad_id=None, order=None):
    ids = np.atleast_2d(integers(ids))
    assert all(0 <= each < vocab_size for each in ids.ravel())
    if tokens is not None:
        is_token = np.broadcast_to(np.asarray(tokens.padding_mask), ids.shape)
        assert pad_id is None or np.array_equal(ids != pad_id, is_token)
    if order is not None:
        ordered(tokens, order)


def ordered(tokens, order):
    for row, segments in zip(*rows_of(tokens.positions, tokens.segment_ids), strict=True):
        for n, (before, segment) in enumerate(zip([0, *segments], segments, strict=False)):
            if segment == 0:
                assert order != "full"
            elif segment == before:
                assert row[n] == row[n - 1] + 1
            else:
                assert segment not in segments[:n]
                assert order == "packed" or n == 0


def balanced(got, length, devices, *, kind, block):
    size = length // (2 * devices) if kind == "zigzag" else block
    stripes = [[*range(n, n + size)] for n in range(0, length, size)]
    of_devices = [stripes[n::devices] for n in range(devices)]
    if kind == "zigzag":
        of_devices = [[stripes[n], stripes[-1 - n]] for n in range(devices)]
    same(got, np.concatenate([np.concatenate(each) for each in of_devices]))


def parents(got, prefix_lengths, answer_lengths, length):
    lengths = integers(prefix_lengths), integers(answer_lengths)
    same(got, loops.shared_prefix_parents(*lengths, length))


def written(got, cache, new, slot):
    held, new, slot = np.array(cache), np.asarray(new), integers(slot)
    is_written = np.zeros((len(held), new.shape[1]), bool)
    for row, n, place in loops.places(slot, *is_written.shape, held.shape[1]):
        held[row, place], is_written[row, n] = new[row % len(new), n], True
    same(got[0], held)
    same(got[1], is_written)


def looked_up(got, table, ids, *, pad_id, out_of_range, lookup_style):
    table, ids = np.asarray(table), integers(ids)
    dtype = np.float32 if table.dtype.itemsize > 4 else table.dtype
    assert np.shape(got) == (*ids.shape, table.shape[1])
    within(got, floats(oracle.loop_lookup(table, ids, pad_id, out_of_range)), 0, dtype)


def whole_logits(x, table, bias=None, softcap=None, scale=1.0):
    """In float64, and how much faster they rise than products do."""
    scale = float(scale)
    u = scale * (floats(x) @ floats(table).T + (0 if bias is None else floats(bias)))
    if softcap is None:
        return u, scale
    softcap = float(softcap)
    with np.errstate(over="ignore"):
        capped = np.where(np.isneginf(u), u, softcap * np.tanh(u / softcap))
        return capped, scale / np.cosh(u / softcap) ** 2


class Losses(NamedTuple):
    """Of each label: whether it counts, its token's x, and values from whole logits; the last is
    the gradient of the products."""

    counted: np.ndarray
    x: np.ndarray
    losses: np.ndarray
    entropies: np.ndarray
    sizes: np.ndarray
    slopes: np.ndarray
    metrics: tuple[np.ndarray, ...]


def whole_losses(
    x, table, labels, *, pad_id=None, mask=None, shift=False, segment_ids=None,
    label_smoothing=0.0, z_loss=0.0, temperature=1.0, of_candidates=False, **of_logits,
):  # fmt: skip
    settings = (label_smoothing, z_loss, temperature)
    smoothing, z_loss, temperature = (
        np.broadcast_to(floats(each), labels.shape)[..., None] for each in settings
    )
    x = floats(x) if not shift else np.roll(floats(x), shift, -2)
    counted = counted_labels(labels.shape, mask, shift, segment_ids) & np.not_equal(labels, pad_id)
    if shift and not of_candidates and pad_id is not None and 0 <= pad_id < len(table):
        # Padding on the left predicts nothing.
        counted = counted & (np.roll(labels, shift, -1) != pad_id)
    x, labels = np.where(counted[..., None], x, 0), np.where(counted, labels, 0)
    logits, rise = whole_logits(x, table, **of_logits)
    logits, rise = logits / temperature, rise / temperature
    ids = np.arange(len(table))
    predicted, is_label = ids != pad_id, np.equal(labels[..., None], ids)
    log_z = np.logaddexp.reduce(np.where(predicted, logits, -np.inf), -1, keepdims=True)
    log_p = np.where(predicted, logits - log_z, 0)
    p = np.where(predicted, np.exp(log_p), 0)
    possible = predicted & ~np.isneginf(logits)
    share = possible / possible.sum(-1, keepdims=True)
    wanted = (1 - smoothing) * is_label + smoothing * share
    wanted = np.where(is_label.any(-1, keepdims=True), wanted, np.nan)
    losses = -(wanted * np.where(wanted == 0, 0, log_p)).sum(-1) + (z_loss * log_z**2)[..., 0]
    slopes = (p * (1 + 2 * z_loss * log_z) - wanted) * rise
    sizes = np.maximum(1, np.abs(np.where(predicted & (p > 0), logits, 0)).max(-1))
    entropies = -(p * np.where(p > 0, log_p, 0)).sum(-1)
    is_right = np.where(predicted, logits, -np.inf).argmax(-1) == labels
    metrics = is_right, (z_loss * log_z**2)[..., 0], log_z[..., 0]
    return Losses(counted, x, losses, entropies, sizes, slopes, metrics)


def counted_labels(shape, mask, shift, segment_ids):
    counted = np.broadcast_to(True if mask is None else mask, shape)
    if not shift:
        return counted
    # The first labels of a row and of a segment are those of no token.
    segments = np.broadcast_to(1 if segment_ids is None else segment_ids, shape)
    earlier = np.concatenate([0 * segments[..., :shift], segments], -1)[..., : shape[-1]]
    return counted & (segments == earlier) & (segments != 0)


def counted_weights(counted, weights, reduction):
    """Zero where a label does not count, and what divides their losses."""
    weights = np.where(counted, 1.0 if weights is None else floats(weights), 0)
    return weights, (weights.sum() or 1.0) if reduction == "mean" else 1.0


def logits(got, x, table, *, bias, softcap, scale, pad_id, out_sharding):
    assert out_sharding is None
    expected, _ = whole_logits(x, table, bias, softcap, scale)
    # Each of d products and sums is rounded to float32, by 2**-24 of the terms.
    terms = np.abs(floats(x)) @ np.abs(floats(table)).T
    terms = terms + (0 if bias is None else np.abs(floats(bias)))
    error = 2**-23 * (np.shape(table)[1] + 4) * max(1, float(scale)) * terms
    if pad_id is not None and 0 <= pad_id < len(table):
        expected[..., pad_id] = np.finfo(np.float32).min / 2
    within(got, expected, error)


# Sums of some tens of float32 terms, each rounded by 2**-24.
OF_A_LOSS = 1e-5


def cross_entropy(
    got, x, table, labels, *, weights, reduction, with_metrics, chunk_size, z_loss, **options
):
    counted, _, losses, _, sizes, _, metrics = whole_losses(
        x, table, integers(labels), z_loss=z_loss, **options
    )
    weights, divisor = counted_weights(counted, weights, reduction)
    losses = np.where(counted, losses, 0) * weights
    error = OF_A_LOSS * np.abs(weights) * (sizes + floats(z_loss) * sizes**2)
    if with_metrics:
        got, (*of_labels, weight) = got
        near(weight, weights if reduction == "none" else weights.sum(), rtol=1e-6)
        for ours, want in zip(of_labels, metrics, strict=True):
            within_sum(ours, np.where(counted, want, 0) * weights, error, reduction, divisor)
    within_sum(got, losses, error, reduction, divisor)


def within_sum(got, terms, error, reduction, divisor):
    if reduction == "none":
        within(got, terms, error)
    elif terms.sum() / divisor > np.finfo(np.float32).max:
        assert np.isposinf(got)
    else:
        within(got, terms.sum() / divisor, error.sum() / abs(divisor))


def of_candidates(x, table, labels, *, mask=None, **options):
    """Log-probabilities [..., k], -inf at those that are not counted; and sizes."""
    masks = np.broadcast_to(True if mask is None else mask, labels.shape)
    found = [
        whole_losses(x, table, labels[..., n], mask=masks[..., n], of_candidates=True, **options)
        for n in range(labels.shape[-1])
    ]
    wanted = [np.where(each.counted, -each.losses, -np.inf) for each in found]
    return np.stack(wanted, -1), np.stack([each.sizes for each in found], -1)


def within_finite(got, want, error):
    equal(np.isneginf(got), np.isneginf(want))
    is_finite = ~np.isneginf(want)
    within(np.asarray(got)[is_finite], want[is_finite], error[is_finite])


def log_probs(got, x, table, labels, *, with_entropy, chunk_size, **options):
    labels = integers(labels)
    if labels.ndim == np.ndim(x):
        wanted, sizes = of_candidates(x, table, labels, **options)
        within_finite(got, wanted, OF_A_LOSS * sizes)
        return
    found = whole_losses(x, table, labels, **options)
    for ours, expected in zip(
        got if with_entropy else [got], (-found.losses, found.entropies), strict=False
    ):
        within(ours, np.where(found.counted, expected, 0), OF_A_LOSS * found.sizes)


def top_k(got, x, table, k, *, pad_id, chunk_size, **of_logits):
    """Of ids whose logits are closer than their rounding, either may be first."""
    log_probs, ids = (np.asarray(each) for each in got)
    logits, _ = whole_logits(x, table, **of_logits)
    if pad_id is not None and 0 <= pad_id < len(table):
        logits[..., pad_id] = -np.inf
        assert pad_id not in ids
    exact = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    error = OF_A_LOSS * np.maximum(
        1, np.abs(np.where(np.isfinite(logits), logits, 0)).max(initial=0)
    )
    for want in (np.take_along_axis(exact, ids, -1), -np.sort(-exact, -1)[..., :k]):
        equal(np.isneginf(log_probs), np.isneginf(want))
        is_possible = np.isfinite(want)
        within(log_probs[is_possible], want[is_possible], error)
    assert all(len(set(row)) == k for row in ids.reshape(-1, k).tolist())


def divergence(
    got, x, table, teacher_x, teacher_output, *, kind, beta, temperature, mask, weights, shift,
    segment_ids, reduction, chunk_size, pad_id, **of_logits,
):  # fmt: skip
    shape = np.shape(x)[:-1]
    counted = counted_labels(shape, mask, shift, segment_ids)
    temperature = np.broadcast_to(floats(temperature), shape)[..., None]
    xs = (np.roll(floats(each), shift, -2) if shift else floats(each) for each in (x, teacher_x))
    x, teacher_x = (np.where(counted[..., None], each, 0) for each in xs)
    student = whole_logits(x, table, **of_logits)[0] / temperature
    teacher = whole_logits(teacher_x, teacher_output)[0] / temperature
    losses = whole_divergences(student, teacher, kind, 0.5 if beta is None else beta)
    weights, divisor = counted_weights(counted, weights, reduction)
    sizes = np.maximum(1, np.abs([student, teacher]).max((0, -1)))
    error = OF_A_LOSS * np.abs(weights) * sizes
    within_sum(got, np.where(counted, losses, 0) * weights, error, reduction, divisor)


def whole_divergences(student, teacher, kind, beta=0.5):
    """Of each token, from its logits in float64."""
    s, t = (z - np.logaddexp.reduce(z, -1, keepdims=True) for z in (student, teacher))

    def kl(a, b):
        possible = a > -np.inf
        difference = np.where(possible, a, 0) - np.where(possible, b, 0)
        return (np.exp(a) * difference).sum(-1)

    if kind != "js":
        return kl(t, s) if kind == "forward" else kl(s, t)
    mixture = np.logaddexp(t + np.log(beta), s + np.log1p(-beta))
    return beta * kl(t, mixture) + (1 - beta) * kl(s, mixture)


# --- positions


def tokens_of(constructor):
    """The check of a constructor of token positions."""

    def compare(got, array, *sizes, **options):
        want = getattr(loops.TokenPositions, constructor.__name__)
        want = want(integers(array), *sizes, **options)
        same(got.positions, want.positions)
        same(got.segment_ids, want.segment_ids)

    return compare


# --- random


def dropped_out(got, rng, rate, x):
    """Which ones are dropped is in test_dropout.py."""
    x, kept = np.asarray(x), floats(got) != 0
    kept |= float(rate) == 0
    # The division, and with a numpy scalar of 16 bits the rate too, are rounded to the result's
    # dtype.
    is_narrow = x.dtype.itemsize == 2 or getattr(rate, "itemsize", 4) == 2
    error = 2 * float(jnp.finfo(x.dtype).eps) if is_narrow else 2**-23
    expected = floats(x) / (1 - float(rate))
    near(floats(got)[kept], expected[kept], rtol=error)


# --- parameters


def resized(got, params, config, new_config, *, rng, grids):
    """How new rows are drawn, and grids, are in tests/pretrained/test_resizing.py."""
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


def scaled_queries(got, positions, *, beta, length, offset):
    counts = np.maximum(np.asarray(positions, np.int64), 0) + offset
    near(got, 1 + beta * np.log1p((counts // length).astype(np.float64)), rtol=3e-7)


CHECKS = {
    te.pretrained.resize: resized,
    te.alibi_bias: alibi,
    te.alibi_slopes: slopes,
    te.apply_rotary: rotated,
    dense_mask: attention,
    te.causal_mask: causal,
    te.check_batch: checked,
    te.dropout: dropped_out,
    te.load_balanced_order: balanced,
    te.lookup: looked_up,
    te.mask_to_bias: bias,
    te.padding_mask: padding,
    te.permute_rotary_weights: permuted,
    te.query_scale: scaled_queries,
    te.relative_position_buckets: buckets,
    te.shared_prefix_parents: parents,
    te.sinusoidal_encoding: encoding,
    grid_encoding: grid,
    te.sinusoidal_table: table,
    linear_cross_entropy: cross_entropy,
    linear_divergence: divergence,
    linear_log_probs: log_probs,
    linear_top_k: top_k,
    linear_logits: logits,
    te.write_cache: written,
    te.LinearScaling: scaling,
    te.NTKScaling: scaling,
    te.YarnScaling: scaling,
    te.Llama3Scaling: scaling,
    te.LongRopeScaling: scaling,
}
CONSTRUCTORS = [
    te.TokenPositions.from_ids,
    te.TokenPositions.from_lengths,
    te.TokenPositions.from_offset,
    te.TokenPositions.from_positions,
    te.TokenPositions.from_segment_ids,
]
CHECKS |= {constructor: tokens_of(constructor) for constructor in CONSTRUCTORS}
