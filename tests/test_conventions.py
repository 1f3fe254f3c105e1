"""Each row of the tables of notebooks/conventions.md, against a formula written out from the
project that it names."""

import re
from pathlib import Path

import haiku as hk
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import transformer_embed as te

POSITIONS = np.arange(40.0)[:, None]
# A rotation is two products of values up to 1 and a sum, each rounded in float32.
ROTATED = 4 * 2**-24 + 2 * oracle.MAX_ERROR


equal = np.testing.assert_array_equal


def near(ours, expected, atol=oracle.MAX_ERROR, rtol=0.0):
    np.testing.assert_allclose(ours, expected, rtol=rtol, atol=atol)


def halves(frequencies, d_model, first=np.sin, second=np.cos, positions=POSITIONS):
    """All of the first, then all of the second, zeros after them up to d_model."""
    table = np.concatenate([first(positions * frequencies), second(positions * frequencies)], -1)
    return np.pad(table, [(0, 0), (0, d_model - table.shape[1])])


def log_timescales(count, smallest=1.0, largest=1e4):
    """tensor2tensor's: `min_timescale * exp(-i * increment)`."""
    return smallest * np.exp(np.arange(count) * -np.log(largest / smallest) / max(count - 1, 1))


def interleaved(angles):
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(len(angles), -1)


# --- Sinusoids


@pytest.mark.parametrize("d_model", [6, 7])
def test_the_paper_keras_trax_xlm(d_model):
    angles = POSITIONS / 10000 ** (2 * (np.arange(d_model) // 2) / d_model)
    expected = np.where(np.arange(d_model) % 2, np.cos(angles), np.sin(angles))
    near(te.sinusoidal_table(40, d_model), expected)


@pytest.mark.parametrize("d_model", [2, 3, 8, 9])
def test_tensor2tensor_fairseq_m2m100_flaxformer_flax_pegasusx_axlearn_praxis(d_model):
    ours = te.sinusoidal_table(40, d_model, layout="sin_cos", shift=1, odd="zero")
    near(ours, halves(log_timescales(d_model // 2), d_model))


def test_whisper_maxtext():
    """Whisper's `sinusoids`: exp(-log(10000) / (channels // 2 - 1) * arange(channels // 2))."""
    frequencies = np.exp(-np.log(10000) / (16 // 2 - 1) * np.arange(16 // 2))
    near(te.sinusoidal_table(40, 16, layout="sin_cos", shift=1), halves(frequencies, 16))


@pytest.mark.parametrize("d_model", [6, 7])
def test_marian_roformer_ctrl_xlnet(d_model):
    """ceil(d / 2) sines, then floor(d / 2) cosines, with d as it is in the exponents."""
    angles = POSITIONS / 10000 ** (2 * (np.arange(d_model) // 2) / d_model)
    expected = np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], -1)
    near(te.sinusoidal_table(40, d_model, layout="sin_cos"), expected)


def test_musicgen():
    expected = halves(np.exp(np.arange(8) * -(np.log(10000) / (8 - 1))), 17, np.cos, np.sin)
    near(te.sinusoidal_table(40, 17, layout="cos_sin", shift=1, odd="zero"), expected)


@pytest.mark.parametrize("d_model", [6, 7])
def test_positional_encodings_1d(d_model):
    even = 2 * int(np.ceil(d_model / 2))
    expected = interleaved(POSITIONS / 10000 ** (np.arange(0, even, 2) / even))[:, :d_model]
    near(te.sinusoidal_table(40, d_model, odd="round_up"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_diffusers_time_steps(flip, shift):
    times = np.array([0.0, 0.25, 999.5], np.float32)
    frequencies = 2.0 * np.exp(-np.log(10000) * np.arange(4) / (4 - shift))
    expected = halves(
        frequencies,
        9,
        *((np.cos, np.sin) if flip else (np.sin, np.cos)),
        positions=times[:, None].astype(float),
    )
    layout = "cos_sin" if flip else "sin_cos"
    near(
        te.sinusoidal_encoding(
            times, 9, layout=layout, shift=shift, odd="zero", frequency_scale=2.0
        ),
        expected,
    )


def test_timescales_of_tensor2tensor():
    smallest, largest = 0.5, 2e4
    ours = te.sinusoidal_table(
        40, 32, layout="sin_cos", shift=1, frequency_scale=smallest, base=largest / smallest
    )
    near(ours, halves(log_timescales(16, smallest, largest), 32))


# --- Grids


def grid(shape, order, encode):
    """Each point's encodings of its coordinates, point by point."""
    expected = [
        np.concatenate([encode(float(point[axis])) for axis in order])
        for point in np.ndindex(*shape)
    ]
    return np.array(expected).reshape(*shape, -1)


def sines_then_cosines(frequencies):
    return lambda p: np.concatenate([np.sin(p * frequencies), np.cos(p * frequencies)])


@pytest.mark.parametrize("d_model", [12, 14])
def test_tensor2tensor_2d(d_model):
    expected = grid((3, 5), (0, 1), sines_then_cosines(log_timescales(d_model // 4)))
    expected = np.pad(expected, [(0, 0), (0, 0), (0, d_model - expected.shape[-1])])
    near(te.sinusoidal_grid((3, 5), d_model, layout="sin_cos", shift=1, odd="zero"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "d_model"),
    [((3, 5), 12), ((3, 5), 14), ((3, 5), 15), ((2, 3, 4), 12), ((2, 3, 4), 16)],
)
def test_positional_encodings_2d_and_3d(shape, d_model):
    channels = 2 * int(np.ceil(d_model / (2 * len(shape))))
    angle = lambda p: p / 10000 ** (np.arange(0, channels, 2) / channels)
    encode = lambda p: np.stack([np.sin(angle(p)), np.cos(angle(p))], -1).reshape(-1)
    expected = grid(shape, range(len(shape)), encode)[..., :d_model]
    near(te.sinusoidal_grid(shape, d_model, odd="round_up"), expected)


@pytest.mark.slow
def test_mae():
    """get_2d_sincos_pos_embed: width first, omega = 1 / 10000 ** (arange(d / 4) / (d / 4))."""
    expected = grid((3, 5), (1, 0), sines_then_cosines(1 / 10000 ** (np.arange(6) / 6)))
    near(te.sinusoidal_grid((3, 5), 24, axes=(1, 0), layout="sin_cos"), expected)


def test_big_vision():
    """posemb_sincos_2d: width first, omega = 1 / 10000 ** (arange(d / 4) / (d / 4 - 1))."""
    expected = grid((3, 5), (1, 0), sines_then_cosines(1 / 10000 ** (np.arange(6) / 5)))
    near(te.sinusoidal_grid((3, 5), 24, axes=(1, 0), layout="sin_cos", shift=1), expected)


@pytest.mark.slow
def test_diffusers_2d():
    """get_2d_sincos_pos_embed: indices / (grid / base_size) / interpolation_scale, width first."""
    (h, w), base_size, scale = (4, 8), 16, 2.0
    coordinates = [np.arange(n) * base_size / n / scale for n in (h, w)]
    frequencies = 1 / 10000 ** (np.arange(6) / 6)
    encode = sines_then_cosines(frequencies)
    expected = [
        [np.concatenate([encode(coordinates[1][x]), encode(coordinates[0][y])]) for x in range(w)]
        for y in range(h)
    ]
    options = {"axes": (1, 0), "layout": "sin_cos", "axis_positions": coordinates}
    near(te.sinusoidal_grid((h, w), 24, **options), expected)
    ours = te.SinusoidalGrid((h, w), **options)._encoding(np.arange(h * w), 24)
    near(ours.reshape(h, w, 24), expected)


# --- Rotary embeddings

HEAD = np.sin(np.arange(40 * 2 * 8)).reshape(40, 2, 8)


def rotated(frequencies, pairs, x=HEAD, positions=POSITIONS, factor=1.0):
    """Channels (a, b) of each pair rotated by position * frequency, in float64."""
    out, angles = x.copy(), positions * frequencies
    for (a, b), angle in zip(pairs, angles.T, strict=True):
        cos, sin = factor * np.cos(angle)[:, None], factor * np.sin(angle)[:, None]
        out[..., a], out[..., b] = (
            x[..., a] * cos - x[..., b] * sin,
            x[..., b] * cos + x[..., a] * sin,
        )
    return out


def half(dim, start=None):
    return [(i, i + dim // 2) for i in range(dim // 2 if start is None else start)]


def check_rotary(expected, **options):
    x = HEAD.astype(np.float32)
    near(te.apply_rotary(x, np.arange(40), **options), expected, ROTATED)


def geometric(dim, base=10000.0):
    return base ** (-np.arange(0, dim, 2) / dim)


@pytest.mark.slow
def test_llama_neox_gemma_keras_flaxformer():
    check_rotary(rotated(geometric(8), half(8)))


@pytest.mark.slow
def test_gptj_roformer_cohere_torchtune_diffusers():
    check_rotary(
        rotated(geometric(8), [(2 * i, 2 * i + 1) for i in range(4)]), layout="interleaved"
    )


@pytest.mark.slow
def test_partial_rotary_of_gptj_and_neox():
    check_rotary(rotated(geometric(4), half(4)), rotary_dim=4)


@pytest.mark.slow
def test_proportional_rotary_of_gemma():
    check_rotary(rotated(geometric(8)[:2], half(8, 2)), rotary_dim=4, partial="proportional")


@pytest.mark.slow
@pytest.mark.parametrize("pair_axes", [[0, 0, 1, 2], [0, 1, 2, 0], [1, 2, 1, 0]])
def test_axes_of_qwen_vl_and_ernie_vl(pair_axes):
    positions = np.stack([np.arange(40), np.arange(40) // 8, np.arange(40) % 8], -1)
    by_pair = positions[:, pair_axes]
    ours = te.apply_rotary(HEAD.astype(np.float32), positions, pair_axes=pair_axes)
    near(ours, rotated(geometric(8), half(8), positions=by_pair), ROTATED)


@pytest.mark.slow
def test_rotary_timescales():
    """Praxis: timescale = min * (max / min) ** (2i / d), angle = position / timescale."""
    smallest, largest = 2.0, 5e4
    timescale = smallest * (largest / smallest) ** (np.arange(0, 8, 2) / 8)
    check_rotary(
        rotated(1 / timescale, half(8)), base=largest / smallest, scaling=te.LinearScaling(smallest)
    )


def test_position_interpolation():
    check_rotary(rotated(geometric(8) / 4, half(8)), scaling=te.LinearScaling(4.0))


@pytest.mark.slow
def test_ntk_aware_scaling():
    check_rotary(rotated(geometric(8, 10000 * 4.0 ** (8 / 6)), half(8)), scaling=te.NTKScaling(4.0))


@pytest.mark.slow
def test_dynamic_ntk_scaling():
    """transformers: base * (factor * length / original - (factor - 1)) ** (d / (d - 2))."""
    base = 10000 * (2.0 * 64 / 16 - (2.0 - 1)) ** (8 / 6)
    check_rotary(
        rotated(geometric(8, base), half(8)),
        scaling=te.DynamicNTKScaling(2.0, original_length=16, length=64),
    )


@pytest.mark.slow
def test_yarn():
    """transformers' _compute_yarn_parameters, with beta_fast 32 and beta_slow 1."""
    factor, original, base, dim = 4.0, 4096, 10000.0, 8
    where = lambda turns: dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base))
    low, high = max(np.floor(where(32.0)), 0), min(np.ceil(where(1.0)), dim - 1)
    ramp = np.clip((np.arange(4) - low) / (high - low), 0, 1)
    frequencies = geometric(8) / factor * ramp + geometric(8) * (1 - ramp)
    expected = rotated(frequencies, half(8), factor=0.1 * np.log(factor) + 1)
    check_rotary(expected, scaling=te.YarnScaling(factor, original_length=original))


def test_llama3():
    """Meta's apply_scaling, frequency by frequency."""
    expected = []
    for f in geometric(8, 500000.0):
        wavelength = 2 * np.pi / f
        smooth = (8192 / wavelength - 1) / (4 - 1)
        expected.append(
            f
            if wavelength < 8192 / 4
            else f / 8
            if wavelength > 8192
            else (1 - smooth) * f / 8 + smooth * f
        )
    check_rotary(rotated(np.array(expected), half(8)), base=500000.0, scaling=te.Llama3Scaling(8.0))


@pytest.mark.parametrize("length", [16, 64])
def test_longrope_of_phi3(length):
    short, long = [1.0, 1.5, 2.0, 2.5], [4.0, 5.0, 6.0, 7.0]
    frequencies = geometric(8) / np.array(long if length > 32 else short)
    factor = np.sqrt(1 + np.log(4.0) / np.log(32))
    scaling = te.LongRopeScaling(short, long, factor=4.0, original_length=32, length=length)
    check_rotary(rotated(frequencies, half(8), factor=factor), scaling=scaling)


@pytest.mark.slow
def test_dynamic_rope_of_keras_hub():
    """It divides every frequency by factor ** (d / (d - 2)), at every length."""
    check_rotary(
        rotated(geometric(8) / 4.0 ** (8 / 6), half(8)),
        scaling=te.LinearScaling(4.0 ** (8 / (8 - 2))),
    )


def test_ntk_factor_of_diffusers():
    """get_1d_rotary_pos_embed: theta = theta * ntk_factor."""
    check_rotary(rotated(geometric(8, 10000.0 * 3.0), half(8)), base=10000.0 * 3.0)


# --- Biases


def slopes(heads, max_bias=8.0):
    return 2.0 ** (-max_bias * np.arange(1, heads + 1) / heads)[:, None, None]


DISTANCE = np.arange(6)[None] - np.arange(6)[:, None]


def test_alibi():
    near(te.alibi_bias(range(6), range(6), num_heads=4)[0], slopes(4) * DISTANCE, 0, 2e-7)


def test_alibi_of_mpt_and_keras():
    """`-slope * (length - 1 - key)`, with a maximum of its own."""
    expected = slopes(4, 6.0) * (np.arange(6) - 5)[None, None]
    near(te.alibi_bias([5], range(6), num_heads=4, max_bias=6.0)[0], expected, 0, 2e-7)


def test_symmetric_alibi():
    near(
        te.alibi_bias(range(6), range(6), num_heads=4, symmetric=True)[0],
        -slopes(4) * abs(DISTANCE),
        0,
        2e-7,
    )


def test_alibi_of_bloom():
    """build_alibi_tensor: slope * (cumsum(mask) - 1) * mask."""
    ids = np.array([[0, 0, 5, 6, 7]])
    tokens = te.TokenPositions.from_ids(ids, pad_id=0)
    mask = ids != 0
    expected = slopes(4) * ((np.cumsum(mask, -1) - 1) * mask)[:, None, :]
    near(te.alibi_bias([0], tokens.positions, num_heads=4)[0, :, 0], expected[:, 0], 0, 2e-7)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5(bidirectional):
    """transformers' _relative_position_bucket, in float64."""
    relative = np.arange(-300, 301)
    buckets, count = np.zeros(len(relative), int), 32
    if bidirectional:
        count //= 2
        buckets += (relative > 0) * count
        distance = abs(relative)
    else:
        distance = -np.minimum(relative, 0)
    exact = count // 2
    with np.errstate(divide="ignore"):
        # A hair above, for float64 falls short at exact boundaries as float32 does.
        large = exact + np.log(distance / exact) / np.log(128 / exact) * (count - exact) * (
            1 + 1e-12
        )
    buckets += np.where(distance < exact, distance, np.minimum(large, count - 1).clip(0)).astype(
        int
    )
    ours = te.relative_position_buckets([300], relative + 300, bidirectional=bidirectional)
    equal(ours[0, 0], buckets)


# --- Masks

WHERE = np.arange(6)


def mask(block_ids=None, **options):
    tokens = te.TokenPositions(WHERE, block_ids=block_ids)
    return te.AttentionMask(tokens, **{"causal": True} | options).dense()[0, 0]


def rule(allowed):
    return [[allowed(q, k) for k in range(6)] for q in range(6)]


def test_window_of_transformers():
    """sliding_window_overlay and the causal mask: key > query - window."""
    equal(mask(window=(3 - 1, 0)), rule(lambda q, k: q - 3 < k <= q))


def test_window_of_axlearn_and_tensor2tensor():
    equal(mask(window=(2, 0)), rule(lambda q, k: q - 2 <= k <= q))


def test_bidirectional_window_of_transformers():
    equal(mask(window=(2, 2), causal=False), rule(lambda q, k: abs(q - k) <= 2))


def test_chunks_of_llama4_are_counted_from_the_first_token():
    """transformers' chunked_overlay: (key - left_padding) // chunk == (query - left_padding) //
    chunk."""
    tokens = te.TokenPositions.from_ids([[0, 0, 5, 6, 7, 8]], pad_id=0)
    ours = te.AttentionMask(tokens, causal=True, chunk=3).dense()[0, 0]
    expected = rule(lambda q, k: k <= q and (k - 2) // 3 == (q - 2) // 3 and k >= 2)
    equal(ours[2:], expected[2:])


def test_prefix_up_to_the_separator_of_tensor2tensor():
    ids = jnp.array([4, 5, 1, 6, 7, 8])
    blocks = jnp.where(jnp.cumsum(ids == 1, -1) - (ids == 1) == 0, 0, -1)
    ours = mask(block_ids=blocks)
    equal(ours, rule(lambda q, k: k <= q or (q <= 2 and k <= 2)))


def test_flagged_prefix_of_t5x_and_blocks_of_transformers():
    blocks = np.array([0, 0, -1, 1, 1, -1])
    ours = mask(block_ids=blocks)
    equal(ours, rule(lambda q, k: k <= q or (blocks[q] == blocks[k] and blocks[q] >= 0)))


def test_padding_masks_keys_only_in_transformers_keras_and_trax():
    tokens = np.array([True, True, True, True, False, False])
    keys = te.TokenPositions(WHERE, tokens.astype(int))
    equal(mask(keys=keys, causal=False)[0], tokens)
    whole = te.TokenPositions.from_lengths([4], 6)
    of_tokens = te.AttentionMask(whole, causal=False).dense()[0, 0]
    equal(of_tokens[:4], [tokens] * 4)


def test_padding_masks_queries_too_in_flax_and_t5x():
    """make_attention_mask(tokens, tokens): the outer product."""
    tokens = np.array([[True, True, True, True, False, False]])
    keys = te.TokenPositions(WHERE, tokens.astype(int))
    ours = mask(keys=keys, causal=False)[None, None] & tokens[:, None, :, None]
    equal(ours[0, 0], np.outer(tokens, tokens))
    whole = te.TokenPositions.from_lengths([4], 6)
    equal(ours, te.AttentionMask(whole, causal=False).dense())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, np.finfo(np.float32).min / 2),
        (float(jnp.finfo(jnp.float32).min), np.finfo(np.float32).min),
        (-1e9, np.float32(-1e9)),
    ],
    ids=["here", "transformers", "t5x_tensor2tensor"],
)
def test_added_to_the_logits(value, expected):
    equal(te.mask_to_bias([True, False], jnp.float32, value=value), [0, expected])


# --- Rules of masks

PACKED = np.repeat([[1, 2, 3, 0], [7, 4, 5, 0]], [100, 60, 70, 26], axis=1)
INDEX = np.arange(PACKED.shape[1])


def packed_rule(**options):
    tokens = te.TokenPositions.from_segment_ids(PACKED)
    return te.AttentionMask(tokens, **({"causal": True} | options))


def same_segment(window_on_the_left):
    """[batch, T, T]: causal in one segment by row index, as projects without positions write it;
    the queries at padding left out, whose outputs nobody uses."""
    distance = INDEX[:, None] - INDEX
    near = (distance >= 0) & (distance <= window_on_the_left)
    return near & (PACKED[:, :, None] == PACKED[:, None]) & (PACKED[:, :, None] != 0)


def assert_same_at_tokens(ours, theirs):
    is_token = PACKED[:, :, None] != 0
    equal(ours & is_token, np.asarray(theirs) & is_token)


def test_levanters_attention_mask():
    """_materialize_sliding_window_mask: 0 <= query - key < window."""
    rule = packed_rule(window=(40 - 1, 0))
    assert_same_at_tokens(rule.dense()[:, 0], same_segment(39))


def test_attention_of_axlearn_ejkernel_and_flex_attention():
    """axlearn's sliding_window_causal_mask: query - key <= sliding_window_size, and equal segment
    ids. ejkernel's documents count from 0, and -1 is padding."""
    assert_same_at_tokens(packed_rule(window=(40, 0)).dense()[:, 0], same_segment(40))


# --- Position ids

IDS = np.array([[1, 1, 5, 6, 7], [5, 6, 7, 1, 1]])


def test_roberta_and_opt():
    """cumsum(mask) * mask + padding_idx."""
    mask = IDS != 1
    ours = te.TokenPositions.from_ids(IDS, pad_id=1, start=2, at_padding=1)
    equal(ours.positions, np.cumsum(mask, 1) * mask + 1)


@pytest.mark.parametrize("at_padding", [0, 1])
def test_0_or_1_at_padding(at_padding):
    """transformers: position_ids = cumsum(mask) - 1; masked_fill(mask == 0, 0 or 1)."""
    mask = IDS != 1
    ours = te.TokenPositions.from_ids(IDS, pad_id=1, at_padding=at_padding)
    equal(ours.positions, np.where(mask, np.cumsum(mask, 1) - 1, at_padding))


def test_a_past_length_added_before_padding_is_set_apart():
    """OPT: (cumsum(mask) * mask - 1)[:, past:] + offset; the past moves tokens alone."""
    tokens = te.TokenPositions.from_ids(IDS, pad_id=1)
    ours = jnp.where(tokens.padding_mask, tokens.positions + 7, tokens.positions)
    mask = IDS != 1
    equal(ours, np.where(mask, np.cumsum(mask, 1) - 1 + 7, 0))


def test_bart_counts_padding_from_2():
    assert te.Learned(9, start=2)._positions(jnp.asarray(IDS), None).tolist() == [
        2,
        3,
        4,
        5,
        6,
    ]


def test_fairseq_sinusoids_count_from_padding_idx_plus_1():
    scheme = te.Sinusoidal(layout="sin_cos", shift=1, odd="zero", start=2, at_padding=1, pad_id=1)
    mask = IDS != 1
    positions = scheme._positions(jnp.asarray(IDS), None)
    equal(positions, np.cumsum(mask, 1) * mask + 1)


# --- Token rows, and other defaults

TABLE = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)


@pytest.mark.slow
def test_rows_times_the_root_of_d_model_in_the_paper_ctrl_and_marian():
    embed = hk.transform(lambda: te.TokenEmbedding(8, 4, w_init=lambda *_: jnp.asarray(TABLE))(IDS))
    equal(embed.apply(embed.init(None), None), TABLE[IDS] * 2)


def test_bert_gpt2_and_llama_do_not_scale_rows():
    embed = hk.transform(
        lambda: te.TokenEmbedding(8, 4, scale=False, w_init=lambda *_: jnp.asarray(TABLE))(IDS)
    )
    equal(embed.apply(embed.init(None), None), TABLE[IDS])


def test_bert_and_gpt2_count_padding_from_0():
    assert (
        te.Learned(9)._positions(jnp.asarray(IDS), None).tolist()
        == te.Sinusoidal()._positions(jnp.asarray(IDS), None).tolist()
        == [0, 1, 2, 3, 4]
    )


def test_masks_of_floats_in_flax_and_t5x():
    """make_causal_mask(x, dtype): 1.0 = may attend."""
    equal(te.causal_mask(4).astype(float), np.tri(4))


# --- output layers and their loss

HIDDEN = np.random.default_rng(0).normal(size=(2, 5, 8))
MATRIX = np.random.default_rng(1).normal(size=(11, 8))
OFFSETS = np.random.default_rng(2).normal(size=11)
TARGETS = np.random.default_rng(3).integers(0, 11, (2, 5))


def output_logits(output):
    """Of a config with this output layer, in float32."""
    tokens = "transformer_embedding/~/token_embedding"
    table = "embeddings" if output.tied else "output_embeddings"
    params = {"embeddings": np.ones_like(MATRIX), table: MATRIX}
    if output.bias:
        params["output_bias"] = OFFSETS
    params = {tokens: {name: leaf.astype(np.float32) for name, leaf in params.items()}}
    embedder = te.Embedder(te.EmbedderConfig(11, 8, output=output))
    return embedder.logits(params, HIDDEN.astype(np.float32))


@pytest.mark.parametrize(
    ("output", "logits"),
    [
        # transformers: BertLMPredictionHead's decoder, PhiForCausalLM's lm_head.
        (te.OutputLayer(bias=True), HIDDEN @ MATRIX.T + OFFSETS),
        (te.OutputLayer(tied=False, bias=True), HIDDEN @ MATRIX.T + OFFSETS),
        # T5ForConditionalGeneration: sequence_output * d_model**-0.5 before the tied lm_head.
        (te.OutputLayer(scale=8**-0.5), (HIDDEN * 8**-0.5) @ MATRIX.T),
        # Gemma2ForCausalLM: logits / cap, tanh, logits * cap.
        (te.OutputLayer(softcap=2.0), np.tanh(HIDDEN @ MATRIX.T / 2) * 2),
        # CohereForCausalLM: logits * logit_scale. GraniteForCausalLM: logits / logits_scaling.
        (te.OutputLayer(scale=0.0625), HIDDEN @ MATRIX.T * 0.0625),
        (te.OutputLayer(scale=1 / 13), HIDDEN @ MATRIX.T / 13),
    ],
    ids=["bert", "phi", "t5", "gemma2", "cohere", "granite"],
)
def test_output_layers(output, logits):
    near(output_logits(output), logits, 1e-5)


def losses_of(targets, label_smoothing=0.0):
    """optax's, for each token, and log_z."""
    logits = HIDDEN @ MATRIX.T
    log_z = np.log(np.exp(logits).sum(-1))
    one_hot = np.eye(11)[targets] * (1 - label_smoothing) + label_smoothing / 11
    return log_z - (one_hot * logits).sum(-1), log_z


def our_loss(labels, **options):
    hidden, matrix = (array.astype(np.float32) for array in (HIDDEN, MATRIX))
    return te.linear_cross_entropy(hidden, matrix, labels, **options)


@pytest.mark.slow
def test_z_loss_of_palm_t5x_maxtext_liger_levanter():
    """T5X's cross_entropy_with_logits: loss + z_loss * square(log_z)."""
    losses, log_z = losses_of(TARGETS)
    near(our_loss(TARGETS, z_loss=0.1), (losses + 0.1 * log_z**2).mean(), 0, 1e-5)


@pytest.mark.slow
def test_shift_of_cut_cross_entropy():
    """e[..., :-1, :] and targets[..., 1:], without those that are -100."""
    targets = np.where(TARGETS == 4, -100, TARGETS)
    losses, _ = losses_of(np.roll(TARGETS, -1, -1))
    counted = targets[:, 1:] != -100
    near(our_loss(targets, shift=True, pad_id=-100), losses[:, :-1][counted].mean(), 0, 1e-5)


@pytest.mark.slow
def test_ignore_index_and_label_smoothing_of_pytorch():
    losses, _ = losses_of(TARGETS, 0.1)
    counted = TARGETS != 4
    near(
        our_loss(np.where(counted, TARGETS, -1), pad_id=-1, label_smoothing=0.1),
        losses[counted].mean(),
        0,
        1e-5,
    )


@pytest.mark.slow
def test_weights_of_t5x():
    """compute_weighted_cross_entropy: the sum of loss * weights, and the sum of weights."""
    weights = np.random.default_rng(4).random((2, 5)).astype(np.float32)
    losses, _ = losses_of(TARGETS)
    near(our_loss(TARGETS, weights=weights), (losses * weights).sum() / weights.sum(), 0, 1e-5)


def our_log_probs(labels, **options):
    hidden, matrix = (array.astype(np.float32) for array in (HIDDEN, MATRIX))
    return te.linear_log_probs(hidden, matrix, labels, **options)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def of_ids(log_p, ids):
    return np.take_along_axis(log_p, ids[..., None], -1)[..., 0]


def test_selective_log_softmax_of_trl():
    expected = of_ids(log_softmax(HIDDEN @ MATRIX.T)[:, :-1], TARGETS[:, 1:])
    near(our_log_probs(TARGETS, shift=True)[:, 1:], expected, 0, 1e-5)


def test_per_token_logps_of_tunix():
    """Hidden states [-n - 1 : -1] and the last n ids; logits / temperature."""
    log_p = log_softmax(HIDDEN @ MATRIX.T / 0.7)
    expected = of_ids(log_p[:, -4:-1], TARGETS[:, -3:])
    ours = our_log_probs(TARGETS, shift=True, temperature=0.7)[:, -3:]
    near(ours, expected, 0, 1e-5)


def test_log_probs_and_entropy_of_verl():
    """entropy = logsumexp(logits) - sum(softmax(logits) * logits), of logits / temperature."""
    log_p = log_softmax(HIDDEN @ MATRIX.T / 0.7)[:, :-1]
    options = {"shift": True, "temperature": 0.7, "with_entropy": True}
    log_probs, entropy = our_log_probs(TARGETS, **options)
    near(log_probs[:, 1:], of_ids(log_p, TARGETS[:, 1:]), 0, 1e-5)
    near(entropy[:, 1:], -(np.exp(log_p) * log_p).sum(-1), 0, 1e-4)


def test_fused_linear_ppo_of_liger():
    expected = of_ids(log_softmax((HIDDEN @ MATRIX.T + OFFSETS) / 0.7), TARGETS)
    ours = our_log_probs(TARGETS, bias=OFFSETS.astype(np.float32), temperature=0.7)
    near(ours, expected, 0, 1e-5)


PAGE = Path(__file__).parents[1] / "notebooks" / "conventions.md"
ROWS = {
    "Vaswani et al. (2017), Keras, trax, XLM": test_the_paper_keras_trax_xlm,
    "tensor2tensor, fairseq, M2M100, flaxformer, Flax's wmt and lm1b examples, PegasusX, axlearn, praxis": (
        test_tensor2tensor_fairseq_m2m100_flaxformer_flax_pegasusx_axlearn_praxis
    ),
    "Whisper, MaxText": test_whisper_maxtext,
    "Marian, RoFormer, CTRL, XLNet": test_marian_roformer_ctrl_xlnet,
    "MusicGen": test_musicgen,
    "positional-encodings, 1-D": test_positional_encodings_1d,
    "diffusers, time steps": test_diffusers_time_steps,
    "tensor2tensor's `min_timescale` m and `max_timescale` M": test_timescales_of_tensor2tensor,
    "tensor2tensor, 2-D (height first)": test_tensor2tensor_2d,
    "positional-encodings, 2-D (height first)": test_positional_encodings_2d_and_3d,
    "positional-encodings, 3-D": test_positional_encodings_2d_and_3d,
    "MAE (width first)": test_mae,
    "big_vision (width first)": test_big_vision,
    "diffusers, 2-D (width first)": test_diffusers_2d,
    "Llama, Mistral, Qwen, GPT-NeoX, Gemma, Keras, flaxformer": test_llama_neox_gemma_keras_flaxformer,
    "GPT-J, RoFormer, Cohere, GLM, Helium, ERNIE 4.5, DeepSeek, torchtune, diffusers": test_gptj_roformer_cohere_torchtune_diffusers,
    "GPT-J and GPT-NeoX, partial rotary": test_partial_rotary_of_gptj_and_neox,
    "Gemma, proportional rotary": test_proportional_rotary_of_gemma,
    "Qwen2-VL, multi-axis rotary": test_axes_of_qwen_vl_and_ernie_vl,
    "Qwen3-VL, multi-axis rotary": test_axes_of_qwen_vl_and_ernie_vl,
    "ERNIE 4.5-VL, multi-axis rotary": test_axes_of_qwen_vl_and_ernie_vl,
    "rotary code with a `min_timescale` m and `max_timescale` M": test_rotary_timescales,
    'position interpolation ("linear")': test_position_interpolation,
    "NTK-aware scaling": test_ntk_aware_scaling,
    "dynamic NTK scaling": test_dynamic_ntk_scaling,
    "YaRN": test_yarn,
    "Llama 3": test_llama3,
    "LongRoPE (Phi-3)": test_longrope_of_phi3,
    'keras-hub\'s rope type `"dynamic"`': test_dynamic_rope_of_keras_hub,
    "diffusers' `ntk_factor`": test_ntk_factor_of_diffusers,
    "ALiBi (Press et al.)": test_alibi,
    "MPT, Keras (`alibi_bias_max`)": test_alibi_of_mpt_and_keras,
    "ALiBi without a causal mask": test_symmetric_alibi,
    "Bloom": test_alibi_of_bloom,
    "T5 encoder": test_t5,
    "T5 decoder": test_t5,
    "causal window of w tokens that counts the query itself (transformers)": test_window_of_transformers,
    "the query and w tokens to its left (axlearn, tensor2tensor)": test_window_of_axlearn_and_tensor2tensor,
    "tokens within w on both sides (transformers, bidirectional)": test_bidirectional_window_of_transformers,
    "chunked attention (Llama 4), chunks counted from the first token": test_chunks_of_llama4_are_counted_from_the_first_token,
    "prefix up to and including the first separator (tensor2tensor)": test_prefix_up_to_the_separator_of_tensor2tensor,
    "prefix of flagged tokens (T5X), block ids with -1 = causal (transformers)": test_flagged_prefix_of_t5x_and_blocks_of_transformers,
    "padding masks keys only (transformers, Keras, trax)": test_padding_masks_keys_only_in_transformers_keras_and_trax,
    "padding masks queries too (Flax, T5X)": test_padding_masks_queries_too_in_flax_and_t5x,
    "0/1 floats (Flax, T5X)": test_masks_of_floats_in_flax_and_t5x,
    "added to the logits: half of the dtype's lowest value (this package)": test_added_to_the_logits,
    "added to the logits: the dtype's lowest value (transformers)": test_added_to_the_logits,
    "added to the logits: -1e9 (T5X, tensor2tensor)": test_added_to_the_logits,
    "`AttentionMask.causal(sliding_window=w, segment_ids=ids)` (Levanter)": test_levanters_attention_mask,
    "`SegmentIdAttentionBias(ids)` and `sliding_window_causal_mask(w)` (axlearn)": test_attention_of_axlearn_ejkernel_and_flex_attention,
    "`MaskInfo.from_segments(ids).apply_causal().apply_sliding_window((l, r))` (ejkernel)": test_attention_of_axlearn_ejkernel_and_flex_attention,
    "`create_block_mask(mask_mod, ..., BLOCK_SIZE=n)` (FlexAttention)": test_attention_of_axlearn_ejkernel_and_flex_attention,
    "BERT, GPT-2 (0..length - 1, also at padding)": test_bert_and_gpt2_count_padding_from_0,
    "RoBERTa and OPT (padding at 1, tokens from 2)": test_roberta_and_opt,
    "BART (from 2, also at padding)": test_bart_counts_padding_from_2,
    "fairseq's sinusoids (from `padding_idx + 1`)": test_fairseq_sinusoids_count_from_padding_idx_plus_1,
    "0 at padding": test_0_or_1_at_padding,
    "1 at padding": test_0_or_1_at_padding,
    "RoBERTa with a KV cache (the past length is added to tokens, not to padding)": test_a_past_length_added_before_padding_is_set_apart,
    "Vaswani et al. (2017), CTRL, Marian (rows times sqrt(d_model))": test_rows_times_the_root_of_d_model_in_the_paper_ctrl_and_marian,
    "BERT, GPT-2, Llama (rows as they are)": test_bert_gpt2_and_llama_do_not_scale_rows,
    "BERT": test_output_layers,
    "Phi": test_output_layers,
    "T5, tied": test_output_layers,
    "Gemma 2": test_output_layers,
    "Cohere": test_output_layers,
    "Granite": test_output_layers,
    "PaLM, T5X, MaxText (`z_loss`), Liger (`lse_square_scale`), Levanter (`logsumexp_weight`)": (
        test_z_loss_of_palm_t5x_maxtext_liger_levanter
    ),
    "cut-cross-entropy (`shift=True`)": test_shift_of_cut_cross_entropy,
    "PyTorch (`ignore_index`, `label_smoothing`)": (
        test_ignore_index_and_label_smoothing_of_pytorch
    ),
    "T5X (`weights`), the sum over the sum of weights": test_weights_of_t5x,
    "TRL (`selective_log_softmax(logits[:, :-1], ids[:, 1:])`)": test_selective_log_softmax_of_trl,
    "Tunix (`compute_per_token_logps` of the last n tokens)": test_per_token_logps_of_tunix,
    "verl (logits divided by the temperature; entropies beside log-probabilities)": (
        test_log_probs_and_entropy_of_verl
    ),
    "Liger (`LigerFusedLinearPPOBase`: hidden states and `selected_token_ids` that are shifted already, bias, temperature)": (
        test_fused_linear_ppo_of_liger
    ),
}


def test_each_row_of_the_page_has_its_test():
    """Of all tables but the last, whose names tests/test_tutorials.py uses."""
    tables = PAGE.read_text(encoding="utf-8").split("## Names in tutorials")[0]
    cells = re.findall(r"(?m)^\| (.*?) \| .* \|$", tables)
    assert sorted(cell for cell in cells if cell != "project") == sorted(ROWS)
