"""Every public function, slowly: plain loops over Python ints, mpmath, and float64 sums.

`CHECKS` has a function for each public one. It takes the result and all of the arguments, defaults
included, and asserts that the result is right within what the docstring of the public function
promises.
"""

import jax.numpy as jnp
import mpmath
import numpy as np
import oracle

import transformer_embed as te
from transformer_embed._src.functional import rotary

# a * cos - b * sin in float32: each product and their sum are rounded once, by 2**-24 of each term.
ROUNDINGS = 2**-23
# The relative error of a product with a slope, as alibi_bias has it.
SLOPE_ERROR = 1.8e-7


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
    np.testing.assert_array_equal(got.astype(expected.dtype).ravel(), expected.ravel())


def within(got, expected, error, dtype=jnp.float32):
    """|got - expected| <= error, and one rounding to the dtype; NaN where NaN is expected."""
    dtype = jnp.dtype(dtype).newbyteorder("=")
    assert np.asarray(got).dtype == (np.float32 if dtype == np.float64 else dtype)
    got, expected = floats(got).ravel(), np.asarray(expected, np.float64).ravel()
    assert got.size == expected.size
    rounding = (
        0
        if dtype.itemsize > 2
        else float(jnp.finfo(dtype).eps) * np.abs(expected)
        + float(jnp.finfo(dtype).smallest_subnormal)
    )
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    excess = np.abs(got - expected) - np.ravel(error) - rounding
    assert not np.any(excess > 0), np.nanmax(excess)


# --- positions and phases


def exact_positions(value):
    """As Python numbers: floats as float32 holds them, None for what has no phase."""
    array = np.asarray(value)
    if np.issubdtype(array.dtype, np.floating):
        narrow = [float(each) for each in array.astype(np.float32).ravel()]
        return [each if abs(each) < 2**31 else None for each in narrow], array.shape
    found = [int(each) for each in integers(value).ravel()]
    return [
        each if array.dtype.itemsize < 8 or -(2**31) <= each < 2**31 else None for each in found
    ], array.shape


def is_promised(positions, *constants):
    """Whether the bound is promised at these positions: at float ones up to frequencies of 1000,
    below 2**24."""
    whole = all(isinstance(each, int) for each in positions if each is not None)
    return whole or (
        all(each is None or abs(each) < 2**24 for each in positions)
        and all(c is None or 1 <= c <= 1000 for c in constants)
    )


def encoding(got, positions, d_model, *, dtype, **options):
    points, _ = exact_positions(positions)
    frequencies = (1, options["frequency_scale"], 1 if options["base"] >= 1 else None)
    assert np.shape(got) == (*np.shape(positions), d_model)
    if (
        is_promised(points, *(each for each in frequencies if each is not None))
        and None not in frequencies[2:]
    ):
        expected = [
            oracle.encoding(p, d_model, **options) if p is not None else [np.nan] * d_model
            for p in points
        ]
        within(
            got, [[float(channel) for channel in row] for row in expected], oracle.MAX_ERROR, dtype
        )


def table(got, length, d_model, **options):
    encoding(got, np.arange(length), d_model, **options)


def grid(got, shape, d_model, *, positions, axes, axis_positions, odd, dtype, **options):
    parts = len(shape)
    width = {
        "truncate": d_model // parts,
        "round_up": 2 * -(-d_model // (2 * parts)),
        "zero": 2 * (d_model // (2 * parts)),
    }[odd]
    order = range(parts) if axes is None else axes
    along = (
        [range(n) for n in shape]
        if axis_positions is None
        else [exact_positions(each)[0] for each in axis_positions]
    )
    points = list(np.ndindex(*shape))
    if positions is None:
        chosen = points
        assert np.shape(got) == (*shape, d_model)
    else:
        chosen = [points[p] if 0 <= p < len(points) else None for p in integers(positions).ravel()]
        assert np.shape(got) == (*np.shape(positions), d_model)
    expected = []
    for point in chosen:
        channels = [
            float(value)
            for axis in (order if width and point is not None else [])
            for value in (oracle.encoding(along[axis][point[axis]], width, **options))
        ]
        expected.append(
            [np.nan] * d_model if point is None else [*channels, *[0.0] * d_model][:d_model]
        )
    if is_promised(
        [each for axis in along for each in axis],
        options["frequency_scale"],
        max(options["base"], 1),
    ):
        within(got, expected, oracle.MAX_ERROR, dtype)


def rotated(got, x, positions, *, base, layout, rotary_dim, partial, scaling, pair_axes):
    x = floats(x)
    head_dim, dtype = x.shape[-1], np.asarray(got).dtype
    turning = head_dim if rotary_dim is None else rotary_dim
    dim = head_dim if partial == "proportional" else turning
    frequencies, attention = (
        oracle.scaled_frequencies(scaling, dim, base) if scaling is not None else (None, 1)
    )
    if frequencies is None:
        frequencies = [oracle.frequency(i, mpmath.mpf(dim) / 2, base) for i in range(dim // 2)]
    frequencies = [f if i < turning // 2 else 0 for i, f in enumerate(frequencies)]
    axis_of = [0] * (dim // 2) if pair_axes is None else pair_axes
    shape = np.shape(positions) if pair_axes is not None else (*np.shape(positions), 1)
    points = np.empty(shape, object)
    points.ravel()[:] = exact_positions(positions)[0]
    points = np.broadcast_to(points, (*x.shape[:-2], shape[-1]))
    expected, size = x.copy(), np.zeros(x.shape)
    for *place, head in np.ndindex(*x.shape[:-1]):
        for i, frequency in enumerate(frequencies):
            a, b = (i, i + dim // 2) if layout == "half" else (2 * i, 2 * i + 1)
            point, (first, second) = points[(*place, axis_of[i])], x[(*place, head)][[a, b]]
            cos, sin = (
                (np.nan, np.nan)
                if point is None
                else (float(attention * oracle.sine(point, frequency, n)) for n in (1, 0))
            )
            expected[(*place, head, a)], expected[(*place, head, b)] = (
                first * cos - second * sin,
                second * cos + first * sin,
            )
            size[(*place, head, a)] = size[(*place, head, b)] = abs(first) + abs(second)
    of_a_factor = 0 if attention == 1 else 2**-23
    if is_promised(points.ravel().tolist(), *(max(float(f), 1) for f in frequencies)):
        within(
            got,
            expected,
            float(attention) * size * (oracle.MAX_ERROR + ROUNDINGS + of_a_factor),
            dtype,
        )


def scaling(got, *_, **__):
    """The frequencies of 8 channels, as turns in units of 2**-64, rounded once; the attention
    factor rounded to a float64."""
    dim = 8
    if isinstance(got, te.LongRopeScaling):
        dim = 2 * len(got.long_factor if got.length > got.original_length else got.short_factor)
    if dim:
        check_words(got, dim, 10_000.0)


def check_words(scaling, dim, base):
    words, attention = rotary._frequencies(
        rotary._Options(dim, dim // 2, base, scaling, (dim // 2,))
    )
    frequencies, exact_attention = oracle.scaled_frequencies(scaling, dim, base)
    with mpmath.workprec(300):
        for turns, high, low, frequency in zip(
            words.turns, words.high, words.low, frequencies, strict=True
        ):
            word = (int(turns) << 64) + (int(high) << 32) + int(low)
            assert abs(word - frequency / (2 * mpmath.pi) * 2**64) <= 0.5 + 1e-9
        assert abs(attention - exact_attention) <= 2**-52 * abs(exact_attention)


def permuted(got, weights, num_heads, *, source, target, rotary_dim):
    weights = np.asarray(weights)
    head_dim = weights.shape[-1] // num_heads
    dim = head_dim if rotary_dim is None else rotary_dim
    expected = weights.copy()
    for head in range(num_heads):
        for i in range(dim // 2):
            layouts = {"half": (i, i + dim // 2), "interleaved": (2 * i, 2 * i + 1)}
            for old, new in zip(layouts[source], layouts[target], strict=True):
                expected[..., head * head_dim + new] = weights[..., head * head_dim + old]
    same(got, expected)


# --- biases


def slopes(got, num_heads, *, max_bias):
    same(got, np.float32([float(slope) for slope in oracle.alibi_slopes(num_heads, max_bias)]))


def alibi(got, query_positions, key_positions, *, num_heads, symmetric, max_bias, dtype):
    dtype = jnp.dtype(dtype).newbyteorder("=")
    most = float(jnp.finfo(np.asarray(got).dtype).max) / 4
    distance = np.array(
        pairs_of(lambda q, k: -abs(k - q) if symmetric else k - q, query_positions, key_positions),
        np.float64,
    )
    exact = [
        np.clip(float(slope) * distance, -most, most)
        for slope in oracle.alibi_slopes(num_heads, max_bias)
    ]
    expected = np.stack(exact, 1) if distance.size else np.zeros(0)
    within(got, expected, SLOPE_ERROR * np.abs(expected) + 2.0**-149, dtype)


def buckets(got, query_positions, key_positions, *, num_buckets, max_distance, bidirectional):
    rule = lambda q, k: oracle.t5_bucket(q, k, num_buckets, max_distance, bidirectional)
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
    queries = te.TokenPositions(query_positions, query_segment_ids, query_block_ids)
    keys = te.TokenPositions(key_positions, key_segment_ids, key_block_ids)
    return te.AttentionMask(queries, keys, causal=causal, window=window, chunk=chunk).dense()


def attention(got, *, query_positions, key_positions, causal, window, chunk, **ids):
    ids = {name: each for name, each in ids.items() if each is not None}
    rows = rows_of(query_positions, key_positions, *ids.values())
    side = dict(zip(["q", "k", *ids], rows, strict=True))
    left, right = window or (None, None)

    def allowed(b, t, s):
        q, k = side["q"][b][t], side["k"][b][s]
        seen = not causal or k <= q
        seen = seen and (left is None or q - k <= left) and (right is None or k - q <= right)
        seen = seen and (chunk is None or q // chunk == k // chunk)
        if "query_block_ids" in side:
            seen = seen or side["query_block_ids"][b][t] == side["key_block_ids"][b][s] >= 0
        if "query_segment_ids" in side:
            seen = seen and side["query_segment_ids"][b][t] == side["key_segment_ids"][b][s]
        return bool(seen and ("key_segment_ids" not in side or side["key_segment_ids"][b][s] != 0))

    batch, queries, keys = (
        len(side["q"]),
        np.shape(query_positions)[-1],
        np.shape(key_positions)[-1],
    )
    expected = [
        [[allowed(b, t, s) for s in range(keys)] for t in range(queries)] for b in range(batch)
    ]
    assert np.ndim(got) == 4
    same(np.broadcast_to(np.asarray(got)[:, 0], (batch, queries, keys)), np.array(expected, bool))


def padding(got, ids, *, pad_id):
    same(got, np.array([each != pad_id for each in integers(ids).ravel()], bool))


def causal(got, length):
    same(got, np.array([[s <= t for s in range(length)] for t in range(length)], bool))


# --- tables


def checked_ids(got, ids, vocab_size):
    assert all(0 <= each < vocab_size for each in integers(ids).ravel())


def ordered(got, tokens, order):
    positions, segments = (np.atleast_2d(a) for a in (tokens.positions, tokens.segment_ids))
    for row, of_row in zip(positions, segments, strict=True):
        ended = set()
        for n, segment in enumerate(of_row):
            before = of_row[n - 1] if n else 0
            if before != segment:
                ended.add(before)
            if segment == 0:
                assert order != "full"
            elif segment == before:
                assert row[n] == row[n - 1] + 1
            else:
                assert segment not in ended
                assert order == "packed" or n == 0


def looked_up(got, table, ids, *, pad_id, out_of_range, lookup_style):
    table = np.asarray(table)
    rows = []
    for token in integers(ids).ravel():
        if token == pad_id:
            rows.append(np.zeros(table.shape[1], table.dtype))
        elif 0 <= token < len(table) or out_of_range == "clip":
            rows.append(table[min(max(token, 0), len(table) - 1)])
        else:
            rows.append(
                np.full(table.shape[1], np.nan if out_of_range == "nan" else 0, table.dtype)
            )
    assert np.shape(got) == (*np.shape(ids), table.shape[1])
    within(
        got, np.array(rows, np.float64), 0, np.float32 if table.dtype.itemsize > 4 else table.dtype
    )


def _capped(products, bias, softcap, scale):
    u = float(scale) * (products + (0 if bias is None else floats(bias)))
    return u if softcap is None else float(softcap) * np.tanh(u / float(softcap))


def _without(values, pad_id):
    """Values [..., v] without that of padding."""
    return values[..., np.arange(values.shape[-1]) != pad_id]


def logits(got, x, table, *, bias, softcap, scale, pad_id):
    x, table = floats(x), floats(table)
    expected = _capped(x @ table.T, bias, softcap, scale)
    # Each of d products and sums is rounded to float32, by 2**-24 of the terms.
    terms = np.abs(x) @ np.abs(table).T + (0 if bias is None else np.abs(floats(bias)))
    error = 2**-23 * (table.shape[1] + 4) * max(1, float(scale)) * terms
    if pad_id is not None and 0 <= pad_id < len(table):
        same(got[..., pad_id], np.full(x.shape[:-1], np.finfo(np.float32).min / 2))
    within(*(_without(values, pad_id) for values in (got, expected, error)))


def cross_entropy(
    got,
    x,
    table,
    labels,
    *,
    bias,
    softcap,
    scale,
    pad_id,
    mask,
    weights,
    shift,
    segment_ids,
    label_smoothing,
    z_loss,
    reduction,
    chunk_size,
):
    table, labels = floats(table), integers(labels)
    shape, smoothing = labels.shape, float(label_smoothing)
    total, total_weight, terms = 0.0, 0.0, 0.0
    for index in np.ndindex(shape):
        target = index
        if shift:
            target = (*index[:-1], index[-1] + 1)
            if target[-1] == shape[-1]:
                continue
            if segment_ids is not None:
                segments = np.broadcast_to(integers(segment_ids), shape)
                if segments[index] == 0 or segments[index] != segments[target]:
                    continue
        if labels[target] == pad_id or not np.broadcast_to(mask is None or mask, shape)[target]:
            continue
        z = _capped(table @ floats(x)[index], bias, softcap, scale)
        chosen = z[labels[target]] if 0 <= labels[target] < len(table) else np.nan
        z = _without(z, pad_id)
        log_z = np.log(np.exp(z - z.max()).sum()) + z.max()
        loss = log_z - (1 - smoothing) * chosen - smoothing * z.mean()
        weight = 1.0 if weights is None else np.broadcast_to(floats(weights), shape)[target]
        total += weight * (loss + float(z_loss) * log_z**2)
        total_weight += weight
        size = max(1, np.abs(z).max())
        terms += abs(weight) * (size + float(z_loss) * size**2)
    divisor = (total_weight or 1) if reduction == "mean" else 1
    if total / divisor > np.finfo(np.float32).max:
        assert np.isposinf(got)
        return
    # Sums of some tens of float32 terms, each rounded by 2**-24.
    within(got, total / divisor, 1e-5 * terms / abs(divisor))


# --- positions


def counted(token, start, at_padding):
    positions, before = [], 0
    for each in token:
        positions.append(start + before if each else at_padding)
        before += bool(each)
    return positions


def from_ids(got, ids, *, pad_id, start, at_padding):
    tokens = [[each != pad_id for each in row] for row in rows_of(ids)[0]]
    same(got.positions, np.array([counted(row, start, at_padding) for row in tokens], np.int64))
    same(got.segment_ids, np.array(tokens, np.int64))


def from_lengths(got, lengths, length, *, padding_side):
    tokens = [[n < each for n in range(length)] for each in integers(lengths)]
    tokens = [row if padding_side == "right" else row[::-1] for row in tokens]
    same(got.positions, np.array([counted(row, 0, 0) for row in tokens], np.int64))
    same(got.segment_ids, np.array(tokens, np.int64))


def from_segment_ids(got, segment_ids):
    positions = []
    for row in rows_of(segment_ids)[0]:
        line = []
        for n, each in enumerate(row):
            line.append(0 if each == 0 or n == 0 or row[n - 1] != each else line[-1] + 1)
        positions.append(line)
    same(got.positions, np.array(positions, np.int64))
    same(got.segment_ids, np.array(rows_of(segment_ids)[0], np.int64))


def from_offset(got, offset, length):
    same(
        got.positions,
        np.array(
            [[first + n for n in range(length)] for first in integers(offset).ravel()], np.int64
        ),
    )
    same(got.segment_ids, np.ones(got.positions.shape, np.int64))


# --- random


def dropped_out(got, rng, rate, x):
    got, given = floats(got), np.asarray(x)
    if rate == 0:
        return same(got, floats(x))
    kept = got != 0
    # The division, and with a numpy scalar of 16 bits the rate too, are rounded to the result's
    # dtype.
    error = (
        2 * float(jnp.finfo(given.dtype).eps)
        if given.dtype.itemsize == 2 or getattr(rate, "itemsize", 4) == 2
        else 2**-23
    )
    np.testing.assert_allclose(got[kept], (floats(x) / (1 - float(rate)))[kept], rtol=error, atol=0)
    same(te.dropout(rng, rate, x), got)
    size = 4096
    share = (np.asarray(te.dropout(rng, rate, np.ones(size, np.float32))) != 0).mean()
    # Six standard deviations.
    assert (
        abs(share - (1 - float(rate)))
        <= 6 * np.sqrt(float(rate) * (1 - float(rate)) / size) + 2**-11
    )
    return None


# --- what config and parameters are made of


def sinusoids(got, *, start, at_padding, pad_id, **options):
    ids = jnp.array([[5, 5 if pad_id is None else pad_id]], jnp.int32)
    padding = 5 if pad_id is None else pad_id
    tokens = [int(each) != padding for each in ids[0]]
    at_padding = start if at_padding is None else at_padding
    try:
        positions, values = got._positions(ids, 5), got._encoding(np.array([start]), 4)
    except ValueError:
        # Two positions from start on leave int32, or the shift does not fit 4 channels.
        assert start + 2 > 2**31 or options["shift"] is not None
        return
    same(positions, np.array(counted(tokens, start, at_padding), np.int64))
    encoding(values, np.array([start]), 4, dtype=np.float32, **options)


def sinusoids_of_a_grid(got, shape, axes, axis_positions, *, odd, **options):
    d_model = 2 * len(shape)
    try:
        values = got._encoding(np.arange(-1, 3), d_model)
    except ValueError:
        assert options["shift"] is not None
        return
    grid(
        values,
        shape,
        d_model,
        positions=np.arange(-1, 3),
        axes=axes,
        axis_positions=axis_positions,
        odd=odd,
        dtype=np.float32,
        **options,
    )


def learned(got, max_len, *, start, at_padding, pad_id):
    length = min(2, max_len - start)
    same(got._counted("ids", length), np.arange(start, start + length))


def resized_vocabulary(got, params, vocab_size, rng):
    ((path, leaves),) = params.items()
    old, new = floats(leaves["embeddings"]), floats(got[path]["embeddings"])
    assert new.shape == (vocab_size, old.shape[1])
    same(new[: len(old)], old[:vocab_size])
    # A normal number stays within eight deviations.
    assert np.all(np.abs(new[len(old) :] - old.mean(0)) <= 8 * old.std(0) + 1e-6)


def resized_positions(got, params, max_len, *, start):
    """Weights of a triangle, as wide as the steps are long where rows become fewer."""
    ((path, leaves),) = params.items()
    old, new = floats(leaves["embeddings"]), floats(got[path]["embeddings"])
    assert new.shape == (max_len, old.shape[1])
    same(new[:start], old[:start])
    rows, step = old[start:], (len(old) - start) / (max_len - start)
    for n in range(max_len - start):
        weights = np.maximum(
            0, 1 - np.abs((n + 0.5) * step - 0.5 - np.arange(len(rows))) / max(step, 1)
        )
        np.testing.assert_allclose(
            new[start + n], weights @ rows / weights.sum(), rtol=1e-5, atol=1e-5
        )


CHECKS = {
    te.Learned: learned,
    te.Sinusoidal: sinusoids,
    te.SinusoidalGrid: sinusoids_of_a_grid,
    te.resize_positions: resized_positions,
    te.resize_vocabulary: resized_vocabulary,
    te.alibi_bias: alibi,
    te.alibi_slopes: slopes,
    te.apply_rotary: rotated,
    dense_mask: attention,
    te.causal_mask: causal,
    te.check_ids: checked_ids,
    te.check_order: ordered,
    te.dropout: dropped_out,
    te.lookup: looked_up,
    te.mask_to_bias: bias,
    te.padding_mask: padding,
    te.permute_rotary_weights: permuted,
    te.relative_position_buckets: buckets,
    te.sinusoidal_encoding: encoding,
    te.sinusoidal_grid: grid,
    te.sinusoidal_table: table,
    te.linear_cross_entropy: cross_entropy,
    te.linear_logits: logits,
    te.TokenPositions.from_ids: from_ids,
    te.TokenPositions.from_lengths: from_lengths,
    te.TokenPositions.from_offset: from_offset,
    te.TokenPositions.from_segment_ids: from_segment_ids,
    te.LinearScaling: scaling,
    te.NTKScaling: scaling,
    te.DynamicNTKScaling: scaling,
    te.YarnScaling: scaling,
    te.Llama3Scaling: scaling,
    te.LongRopeScaling: scaling,
}
