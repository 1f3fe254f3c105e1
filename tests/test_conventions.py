"""Each row of the tables of notebooks/conventions.md: our arguments, and a formula written out from
the project that it names."""

import functools
import itertools
import json
import re
from pathlib import Path

import haiku as hk
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from compare import equal

import transformer_embed as te

POSITIONS = np.arange(40.0)[:, None]
# A rotation is two products of values up to 1 and a sum, each rounded in float32.
ROTATED = 4 * 2**-24 + 2 * oracle.MAX_ERROR


def every(rows):
    return pytest.mark.parametrize("name", rows)


def golden(name):
    path = Path(__file__).parent / "golden" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def near(ours, expected, atol=oracle.MAX_ERROR, rtol=0.0):
    np.testing.assert_allclose(ours, expected, rtol=rtol, atol=atol)


# --- Sinusoids


def fit(rows, d_model):
    """Zeros after the channels up to d_model, or no more than d_model of them."""
    missing = max(0, d_model - rows.shape[-1])
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])[..., :d_model]


def halves(frequencies, first=np.sin, second=np.cos, positions=POSITIONS):
    """All of the first, then all of the second."""
    angles = positions * frequencies
    return np.concatenate([first(angles), second(angles)], -1)


def log_timescales(count, smallest=1.0, largest=1e4):
    """tensor2tensor's: `min_timescale * exp(-i * increment)`. Whisper's and MusicGen's are the
    same."""
    return smallest * np.exp(np.arange(count) * -np.log(largest / smallest) / max(count - 1, 1))


def of_the_paper(d_model):
    """The angle of each channel: 10000^(2i / d) divides the position."""
    return POSITIONS / 10000 ** (2 * (np.arange(d_model) // 2) / d_model)


def interleaved(frequencies, positions=POSITIONS):
    angles = positions * frequencies
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(*angles.shape[:-1], -1)


def round_up(d_model, parts=1):
    """positional-encodings': as many channels as a pair of each axis needs, then those that fit."""
    channels = 2 * int(np.ceil(d_model / (2 * parts)))
    return 1 / 10000 ** (np.arange(0, channels, 2) / channels)


ZERO = {"shift": 1, "odd": "zero"}
# Widths, arguments, and a formula of the width.
SINUSOIDS = {
    "Vaswani et al. (2017), Keras, trax, XLM": (
        [1, 2, 6, 7],
        {},
        lambda d: np.where(np.arange(d) % 2, np.cos(of_the_paper(d)), np.sin(of_the_paper(d))),
    ),
    "tensor2tensor, fairseq, M2M100, flaxformer, Flax's wmt and lm1b examples, PegasusX, axlearn, praxis": (
        [2, 3, 8, 9],
        {"layout": "sin_cos"} | ZERO,
        lambda d: halves(log_timescales(d // 2)),
    ),
    "Whisper, MaxText": (
        [16],
        {"layout": "sin_cos", "shift": 1},
        lambda d: halves(log_timescales(d // 2)),
    ),
    # ceil(d / 2) sines, then floor(d / 2) cosines, with d as it is in the exponents.
    "Marian, RoFormer, CTRL, XLNet": (
        [6, 7],
        {"layout": "sin_cos"},
        lambda d: np.hstack([np.sin(of_the_paper(d)[:, ::2]), np.cos(of_the_paper(d)[:, 1::2])]),
    ),
    "MusicGen": (
        [17],
        {"layout": "cos_sin"} | ZERO,
        lambda d: halves(log_timescales(d // 2), np.cos, np.sin),
    ),
    "positional-encodings, 1-D": (
        [6, 7],
        {"odd": "round_up"},
        lambda d: interleaved(round_up(d)),
    ),
    "tensor2tensor's `min_timescale` m and `max_timescale` M": (
        [32],
        {"layout": "sin_cos", "shift": 1, "frequency_scale": 0.5, "base": 2e4 / 0.5},
        lambda d: halves(log_timescales(d // 2, 0.5, 2e4)),
    ),
}


@every(SINUSOIDS)
def test_sinusoids(name):
    widths, options, formula = SINUSOIDS[name]
    for d_model in widths:
        near(te.sinusoidal_table(40, d_model, **options), fit(formula(d_model), d_model))


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 1])
def test_diffusers_time_steps(shift):
    times = np.array([0.0, 0.25, 999.5], np.float32)
    frequencies = 2.0 * np.exp(-np.log(10000) * np.arange(4) / (4 - shift))
    options = {"shift": shift, "odd": "zero", "frequency_scale": 2.0}
    for layout, waves in (("sin_cos", (np.sin, np.cos)), ("cos_sin", (np.cos, np.sin))):
        expected = fit(halves(frequencies, *waves, times[:, None].astype(float)), 9)
        near(te.sinusoidal_encoding(times, 9, layout=layout, **options), expected)


# --- Grids


def grid(along, order, encode):
    """Each point's encodings of its coordinates, point by point."""
    points = [
        np.concatenate([encode(point[axis]) for axis in order])
        for point in itertools.product(*along)
    ]
    return np.reshape(points, (*map(len, along), -1))


def of_coordinates(frequencies, waves=halves):
    return lambda coordinate: waves(frequencies, positions=np.float64(coordinate))


WIDTH_FIRST = {"axes": (1, 0), "layout": "sin_cos"}
# get_2d_sincos_pos_embed: indices / (grid / base_size) / interpolation_scale.
STRETCHED = [np.arange(n) * 16 / n / 2.0 for n in (4, 8)]
# Shape, widths, arguments, and a formula of a coordinate.
GRIDS = {
    "tensor2tensor, 2-D (height first)": (
        (3, 5),
        [12, 14],
        {"layout": "sin_cos"} | ZERO,
        lambda d: of_coordinates(log_timescales(d // 4)),
    ),
    "positional-encodings, 2-D (height first)": (
        (3, 5),
        [12, 14, 15],
        {"odd": "round_up"},
        lambda d: of_coordinates(round_up(d, 2), interleaved),
    ),
    "positional-encodings, 3-D": (
        (2, 3, 4),
        [12, 16],
        {"odd": "round_up"},
        lambda d: of_coordinates(round_up(d, 3), interleaved),
    ),
    # get_2d_sincos_pos_embed: omega = 1 / 10000 ** (arange(d / 4) / (d / 4)).
    "MAE (width first)": (
        (3, 5),
        [24],
        WIDTH_FIRST,
        lambda d: of_coordinates(1 / 10000 ** (np.arange(6) / 6)),
    ),
    # posemb_sincos_2d: omega = 1 / 10000 ** (arange(d / 4) / (d / 4 - 1)).
    "big_vision (width first)": (
        (3, 5),
        [24],
        WIDTH_FIRST | {"shift": 1},
        lambda d: of_coordinates(1 / 10000 ** (np.arange(6) / 5)),
    ),
    "diffusers, 2-D (width first)": (
        (4, 8),
        [24],
        WIDTH_FIRST | {"axis_positions": STRETCHED},
        lambda d: of_coordinates(1 / 10000 ** (np.arange(6) / 6)),
    ),
}


@pytest.mark.slow
@every(GRIDS)
def test_grids(name):
    shape, widths, options, encode = GRIDS[name]
    along = options.get("axis_positions", [np.arange(n) for n in shape])
    order = options.get("axes", range(len(shape)))
    for d_model in widths:
        expected = fit(grid(along, order, encode(d_model)), d_model)
        near(te.sinusoidal_grid(shape, d_model, **options), expected)


# --- Rotary embeddings

HEAD = np.sin(np.arange(40 * 2 * 8)).reshape(40, 2, 8)


def rotated(frequencies, pairs=None, positions=POSITIONS):
    """Channels (a, b) of each pair rotated by position * frequency, in float64."""
    out, angles = HEAD.copy(), positions * frequencies
    for (a, b), angle in zip(pairs or half(8), angles.T, strict=True):
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out[..., a] = HEAD[..., a] * cos - HEAD[..., b] * sin
        out[..., b] = HEAD[..., b] * cos + HEAD[..., a] * sin
    return out


def half(dim, start=None):
    return [(i, i + dim // 2) for i in range(dim // 2 if start is None else start)]


def neighbours(dim):
    return [(i, i + 1) for i in range(0, dim, 2)]


def geometric(dim, base=10000.0):
    return base ** (-np.arange(0, dim, 2) / dim)


def timescales(smallest, largest):
    """Praxis: timescale = min * (max / min) ** (2i / d), angle = position / timescale."""
    return 1 / (smallest * (largest / smallest) ** (np.arange(0, 8, 2) / 8))


# Arguments, and a formula.
ROTARY = {
    "Llama, Mistral, Qwen, GPT-NeoX, Gemma, Keras, flaxformer": (
        {},
        lambda: rotated(geometric(8)),
    ),
    "GPT-J, RoFormer, Cohere, GLM, Helium, ERNIE 4.5, DeepSeek, torchtune, diffusers": (
        {"layout": "interleaved"},
        lambda: rotated(geometric(8), neighbours(8)),
    ),
    "GPT-J and GPT-NeoX, partial rotary": (
        {"rotary_dim": 4},
        lambda: rotated(geometric(4), half(4)),
    ),
    "Gemma, proportional rotary": (
        {"rotary_dim": 4, "partial": "proportional"},
        lambda: rotated(geometric(8)[:2], half(8, 2)),
    ),
    "rotary code with a `min_timescale` m and `max_timescale` M": (
        {"base": 5e4 / 2, "scaling": te.LinearScaling(2.0)},
        lambda: rotated(timescales(2.0, 5e4)),
    ),
    "NTK-aware scaling": (
        {"scaling": te.NTKScaling(4.0)},
        lambda: rotated(geometric(8, 10000 * 4.0 ** (8 / 6))),
    ),
    # It divides every frequency by factor ** (d / (d - 2)), at every length.
    'keras-hub\'s rope type `"dynamic"`': (
        {"scaling": te.LinearScaling(4.0 ** (8 / (8 - 2)))},
        lambda: rotated(geometric(8) / 4.0 ** (8 / 6)),
    ),
    # get_1d_rotary_pos_embed: theta = theta * ntk_factor.
    "diffusers' `ntk_factor`": (
        {"base": 10000.0 * 3.0},
        lambda: rotated(geometric(8, 10000.0 * 3.0)),
    ),
}


def rotate(positions, **options):
    return te.apply_rotary(HEAD.astype(np.float32), positions, **options)


@pytest.mark.slow
@every(ROTARY)
def test_rotary(name):
    options, formula = ROTARY[name]
    near(rotate(np.arange(40), **options), formula(), ROTATED)


# tests/positions/test_rotary.py has the frequencies that transformers printed of each.
PUBLISHED = {
    'position interpolation ("linear")': "LinearScaling",
    "dynamic NTK scaling": "DynamicNTKScaling",
    "YaRN": "YarnScaling",
    "Llama 3": "Llama3Scaling",
    "LongRoPE (Phi-3)": "LongRopeScaling",
}


def test_published_scalings():
    scalings = {case["scaling"] for case in golden("rotary_frequencies")}
    assert scalings == {None, *PUBLISHED.values()}


AXES = {
    "Qwen2-VL, multi-axis rotary": ({"pair_axes": [0, 0, 1, 2]}, half(8)),
    "Qwen3-VL, multi-axis rotary": ({"pair_axes": [0, 1, 2, 0]}, half(8)),
    "ERNIE 4.5-VL, multi-axis rotary": (
        {"pair_axes": [1, 2, 1, 0], "layout": "interleaved"},
        neighbours(8),
    ),
}


@pytest.mark.slow
@every(AXES)
def test_rotary_of_several_axes(name):
    options, pairs = AXES[name]
    positions = np.stack([np.arange(40), np.arange(40) // 8, np.arange(40) % 8], -1)
    of_pairs = positions[:, options["pair_axes"]]
    near(rotate(positions, **options), rotated(geometric(8), pairs, of_pairs), ROTATED)


# --- Biases


def slopes(heads, max_bias=8.0):
    return 2.0 ** (-max_bias * np.arange(1, heads + 1) / heads)[:, None, None]


SIX = np.arange(6)
DISTANCE = SIX - SIX[:, None]
PADDED = np.array([[0, 0, 5, 6, 7]])
# The positions of queries and of keys, options, and a formula.
BIASES = {
    "ALiBi (Press et al.)": (SIX, SIX, {}, slopes(4) * DISTANCE),
    # `-slope * (length - 1 - key)`, with a maximum of its own.
    "MPT, Keras (`alibi_bias_max`)": ([5], SIX, {"max_bias": 6.0}, slopes(4, 6.0) * (SIX - 5)),
    "ALiBi without a causal mask": (SIX, SIX, {"symmetric": True}, -slopes(4) * abs(DISTANCE)),
    # build_alibi_tensor: slope * (cumsum(mask) - 1) * mask.
    "Bloom": (
        [0],
        te.TokenPositions.from_ids(PADDED, pad_id=0).positions,
        {},
        slopes(4) * ((np.cumsum(PADDED != 0, -1) - 1) * (PADDED != 0)),
    ),
}


@every(BIASES)
def test_biases(name):
    queries, keys, options, expected = BIASES[name]
    near(te.alibi_bias(queries, keys, num_heads=4, **options)[0], expected, 0, 2e-7)


RANGE = np.arange(601)
T5 = {"T5 encoder": True, "T5 decoder": False}


@every(T5)
def test_t5(name):
    """transformers' _relative_position_bucket of key - query in -300..300."""
    (expected,) = (
        case["buckets"]
        for case in golden("position_biases")["t5"]
        if (case["num_buckets"], case["bidirectional"]) == (32, T5[name])
    )
    bias = hk.transform(lambda: te.RelativePositionBias(1, bidirectional=T5[name])([300], RANGE))
    table = jnp.arange(32.0)[:, None]
    equal(bias.apply({"relative_position_bias": {"embeddings": table}}, None)[0, 0, 0], expected)


# --- Masks: the queries, the keys if they differ, the rule, and its formula for a query and a key.


def positions(**options):
    return te.TokenPositions(SIX, **options)


IS_TOKEN = SIX < 4
BEFORE_SEPARATOR = jnp.array([4, 5, 1, 6, 7, 8]) == 1
BEFORE_SEPARATOR = jnp.cumsum(BEFORE_SEPARATOR) - BEFORE_SEPARATOR == 0
BLOCKS = np.array([0, 0, -1, 1, 1, -1])
DOCUMENTS = np.array([1, 1, 1, 1, 2, 2, 0])
PACKED = te.TokenPositions.from_segment_ids(DOCUMENTS)


def same_document(query, key):
    return DOCUMENTS[query] == DOCUMENTS[key] != 0


MASKS = {
    # sliding_window_overlay and the causal mask: key > query - window.
    "causal window of w tokens that counts the query itself (transformers)": (
        *(positions(), None, {"window": (3 - 1, 0)}),
        lambda q, k: q - 3 < k <= q,
    ),
    "the query and w tokens to its left (axlearn, tensor2tensor)": (
        *(positions(), None, {"window": (2, 0)}),
        lambda q, k: q - 2 <= k <= q,
    ),
    "tokens within w on both sides (transformers, bidirectional)": (
        *(positions(), None, {"window": (2, 2), "causal": False}),
        lambda q, k: abs(q - k) <= 2,
    ),
    # chunked_overlay: (key - left_padding) // chunk == (query - left_padding) // chunk.
    "chunked attention (Llama 4), chunks counted from the first token": (
        *(te.TokenPositions.from_ids([[0, 0, 5, 6, 7, 8]], pad_id=0), None, {"chunk": 3}),
        lambda q, k: 2 <= k <= q and (k - 2) // 3 == (q - 2) // 3,
    ),
    "prefix up to and including the first separator (tensor2tensor)": (
        *(positions(block_ids=jnp.where(BEFORE_SEPARATOR, 0, -1)), None, {}),
        lambda q, k: k <= q or (q <= 2 and k <= 2),
    ),
    "prefix of flagged tokens (T5X), block ids with -1 = causal (transformers)": (
        *(positions(block_ids=BLOCKS), None, {}),
        lambda q, k: k <= q or BLOCKS[q] == BLOCKS[k] >= 0,
    ),
    "padding masks keys only (transformers, Keras, trax)": (
        *(positions(), positions(segment_ids=IS_TOKEN.astype(int)), {"causal": False}),
        lambda q, k: IS_TOKEN[k],
    ),
    # make_attention_mask(tokens, tokens): the outer product.
    "padding masks queries too (Flax, T5X)": (
        *(te.TokenPositions.from_lengths([4], 6), None, {"causal": False}),
        lambda q, k: IS_TOKEN[q] and IS_TOKEN[k],
    ),
    # _materialize_sliding_window_mask: 0 <= query - key < window.
    "`AttentionMask.causal(sliding_window=w, segment_ids=ids)` (Levanter)": (
        *(PACKED, None, {"window": (3 - 1, 0)}),
        lambda q, k: 0 <= q - k < 3 and same_document(q, k),
    ),
    # query - key <= sliding_window_size.
    **dict.fromkeys(
        [
            "`SegmentIdAttentionBias(ids)` and `sliding_window_causal_mask(w)` (axlearn)",
            "`MaskInfo.from_segments(ids).apply_causal().apply_sliding_window((l, r))` (ejkernel)",
            "`create_block_mask(mask_mod, ..., BLOCK_SIZE=n)` (FlexAttention)",
        ],
        (
            *(PACKED, None, {"window": (2, 0)}),
            lambda q, k: 0 <= q - k <= 2 and same_document(q, k),
        ),
    ),
}


@every(MASKS)
def test_masks(name):
    queries, keys, options, rule = MASKS[name]
    ours = te.AttentionMask(queries, keys, **{"causal": True} | options).dense()[0, 0]
    size = ours.shape[-1]
    expected = [[rule(q, k) for k in range(size)] for q in range(size)]
    equal(np.broadcast_to(ours, (size, size)), expected)


LOWEST = float(jnp.finfo(jnp.float32).min)
ADDED = {
    "added to the logits: half of the dtype's lowest value (this package)": (None, LOWEST / 2),
    "added to the logits: the dtype's lowest value (transformers)": (LOWEST, LOWEST),
    "added to the logits: -1e9 (T5X, tensor2tensor)": (-1e9, np.float32(-1e9)),
}


@every(ADDED)
def test_added_to_the_logits(name):
    value, expected = ADDED[name]
    equal(te.mask_to_bias([True, False], jnp.float32, value=value), [0, expected])


# --- What is equal to the bit

IDS = np.array([[1, 1, 5, 6, 7], [5, 6, 7, 1, 1]])
# RoBERTa's and OPT's is cumsum(mask) * mask + padding_idx.
MASK = IDS != 1
COUNTED = np.cumsum(MASK, 1)
TABLE = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
from_ids = functools.partial(te.TokenPositions.from_ids, IDS, pad_id=1)


def embedded(**options):
    embed = hk.transform(lambda: te.TokenEmbedding(8, 4, **options)(IDS))
    return embed.apply({"token_embedding": {"embeddings": jnp.asarray(TABLE)}}, None)


def counted_by(scheme):
    return scheme._positions(jnp.asarray(IDS), None)


def with_a_past(tokens):
    """OPT: (cumsum(mask) * mask - 1)[:, past:] + offset; the past moves tokens alone."""
    return jnp.where(tokens.padding_mask, tokens.positions + 7, tokens.positions)


FAIRSEQ = te.Sinusoidal(layout="sin_cos", shift=1, odd="zero", start=2, at_padding=1, pad_id=1)
EQUAL = {
    # make_causal_mask(x, dtype): 1.0 = may attend.
    "0/1 floats (Flax, T5X)": (lambda: te.causal_mask(4).astype(float), np.tri(4)),
    "BERT, GPT-2 (0..length - 1, also at padding)": (
        lambda: [counted_by(scheme) for scheme in (te.Learned(9), te.Sinusoidal())],
        [np.arange(5)] * 2,
    ),
    "RoBERTa and OPT (padding at 1, tokens from 2)": (
        lambda: from_ids(start=2, at_padding=1).positions,
        COUNTED * MASK + 1,
    ),
    "BART (from 2, also at padding)": (
        lambda: counted_by(te.Learned(9, start=2)),
        np.arange(2, 7),
    ),
    "fairseq's sinusoids (from `padding_idx + 1`)": (
        lambda: counted_by(FAIRSEQ),
        COUNTED * MASK + 1,
    ),
    # transformers: position_ids = cumsum(mask) - 1; masked_fill(mask == 0, 0 or 1).
    "0 at padding": (lambda: from_ids().positions, np.where(MASK, COUNTED - 1, 0)),
    "1 at padding": (lambda: from_ids(at_padding=1).positions, np.where(MASK, COUNTED - 1, 1)),
    "RoBERTa with a KV cache (the past length is added to tokens, not to padding)": (
        lambda: with_a_past(from_ids()),
        np.where(MASK, COUNTED - 1 + 7, 0),
    ),
    "Vaswani et al. (2017), CTRL, Marian (rows times sqrt(d_model))": (embedded, TABLE[IDS] * 2),
    "BERT, GPT-2, Llama (rows as they are)": (lambda: embedded(scale=False), TABLE[IDS]),
}


@pytest.mark.slow
@every(EQUAL)
def test_what_is_equal_to_the_bit(name):
    ours, expected = EQUAL[name]
    equal(ours(), expected)


# --- Output layers and their loss

RANDOM = np.random.default_rng(0)
HIDDEN, MATRIX, OFFSETS = (RANDOM.normal(size=shape) for shape in ((2, 5, 8), (11, 8), (11,)))
TARGETS = RANDOM.integers(0, 11, (2, 5))
LOGITS = HIDDEN @ MATRIX.T
NARROW = [array.astype(np.float32) for array in (HIDDEN, MATRIX)]


def output_logits(output):
    """Of a config with this output layer, in float32."""
    table = "embeddings" if output.tied else "output_embeddings"
    params = {"embeddings": np.ones_like(MATRIX), table: MATRIX}
    if output.bias:
        params["output_bias"] = OFFSETS
    params = {name: leaf.astype(np.float32) for name, leaf in params.items()}
    embedder = te.Embedder(te.EmbedderConfig(11, 8, output=output))
    tokens = "transformer_embedding/~/token_embedding"
    return embedder.logits({tokens: params}, NARROW[0])


OUTPUTS = {
    # transformers: BertLMPredictionHead's decoder, PhiForCausalLM's lm_head.
    "BERT": (te.OutputLayer(bias=True), LOGITS + OFFSETS),
    "Phi": (te.OutputLayer(tied=False, bias=True), LOGITS + OFFSETS),
    # T5ForConditionalGeneration: sequence_output * d_model**-0.5 before the tied lm_head.
    "T5, tied": (te.OutputLayer(scale=8**-0.5), (HIDDEN * 8**-0.5) @ MATRIX.T),
    # Gemma2ForCausalLM: logits / cap, tanh, logits * cap.
    "Gemma 2": (te.OutputLayer(softcap=2.0), np.tanh(LOGITS / 2) * 2),
    # CohereForCausalLM: logits * logit_scale. GraniteForCausalLM: logits / logits_scaling.
    "Cohere": (te.OutputLayer(scale=0.0625), LOGITS * 0.0625),
    "Granite": (te.OutputLayer(scale=1 / 13), LOGITS / 13),
}


@every(OUTPUTS)
def test_output_layers(name):
    output, expected = OUTPUTS[name]
    near(output_logits(output), expected, 1e-5)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def of_ids(log_p, ids):
    return np.take_along_axis(log_p, ids[..., None], -1)[..., 0]


LOG_Z = np.log(np.exp(LOGITS).sum(-1))
LOG_P = log_softmax(LOGITS)
LOG_P_COOL = log_softmax(LOGITS / 0.7)
LOSSES = -of_ids(LOG_P, TARGETS)
SMOOTH_LOSSES = 0.9 * LOSSES - 0.1 * LOG_P.mean(-1)
SHIFTED_LOSSES = -of_ids(LOG_P[:, :-1], TARGETS[:, 1:])
WEIGHTS = RANDOM.random((2, 5)).astype(np.float32)
# Without the targets that are 4.
COUNTS = TARGETS != 4
# Labels, arguments, and a formula.
CROSS_ENTROPIES = {
    # T5X's cross_entropy_with_logits: loss + z_loss * square(log_z).
    "PaLM, T5X, MaxText (`z_loss`), Liger (`lse_square_scale`), Levanter (`logsumexp_weight`)": (
        *(TARGETS, {"z_loss": 0.1}),
        (LOSSES + 0.1 * LOG_Z**2).mean(),
    ),
    # e[..., :-1, :] and targets[..., 1:], without those that are -100.
    "cut-cross-entropy (`shift=True`)": (
        *(np.where(COUNTS, TARGETS, -100), {"shift": True, "pad_id": -100}),
        SHIFTED_LOSSES[COUNTS[:, 1:]].mean(),
    ),
    "PyTorch (`ignore_index`, `label_smoothing`)": (
        *(np.where(COUNTS, TARGETS, -1), {"pad_id": -1, "label_smoothing": 0.1}),
        SMOOTH_LOSSES[COUNTS].mean(),
    ),
    # compute_weighted_cross_entropy: the sum of loss * weights, and the sum of weights.
    "T5X (`weights`), the sum over the sum of weights": (
        *(TARGETS, {"weights": WEIGHTS}),
        (LOSSES * WEIGHTS).sum() / WEIGHTS.sum(),
    ),
}


@pytest.mark.slow
@every(CROSS_ENTROPIES)
def test_cross_entropies(name):
    labels, options, expected = CROSS_ENTROPIES[name]
    near(te.linear_cross_entropy(*NARROW, labels, **options), expected, 0, 1e-5)


COOL = {"shift": True, "temperature": 0.7}
# Arguments, the tokens that are compared, and formulas: of log-probabilities, perhaps of entropies.
LOG_PROBS = {
    "TRL (`selective_log_softmax(logits[:, :-1], ids[:, 1:])`)": (
        *({"shift": True}, slice(1, None)),
        [of_ids(LOG_P[:, :-1], TARGETS[:, 1:])],
    ),
    # Hidden states [-n - 1 : -1] and the last n ids; logits / temperature.
    "Tunix (`compute_per_token_logps` of the last n tokens)": (
        *(COOL, slice(-3, None)),
        [of_ids(LOG_P_COOL[:, -4:-1], TARGETS[:, -3:])],
    ),
    # entropy = logsumexp(logits) - sum(softmax(logits) * logits), of logits / temperature.
    "verl (logits divided by the temperature; entropies beside log-probabilities)": (
        *(COOL | {"with_entropy": True}, slice(1, None)),
        [
            of_ids(LOG_P_COOL[:, :-1], TARGETS[:, 1:]),
            -(np.exp(LOG_P_COOL) * LOG_P_COOL).sum(-1)[:, :-1],
        ],
    ),
    "Liger (`LigerFusedLinearPPOBase`: hidden states and `selected_token_ids` that are shifted already, bias, temperature)": (
        *({"bias": OFFSETS.astype(np.float32), "temperature": 0.7}, slice(None)),
        [of_ids(log_softmax((LOGITS + OFFSETS) / 0.7), TARGETS)],
    ),
}


@pytest.mark.slow
@every(LOG_PROBS)
def test_log_probs(name):
    options, tokens, expected = LOG_PROBS[name]
    ours = te.linear_log_probs(*NARROW, TARGETS, **options)
    ours = ours if options.get("with_entropy") else [ours]
    for found, wanted in zip(ours, expected, strict=True):
        near(found[:, tokens], wanted, 0, 1e-5)


PAGE = Path(__file__).parents[1] / "notebooks" / "conventions.md"
LISTS = [SINUSOIDS, GRIDS, ROTARY, PUBLISHED, AXES, BIASES, T5, MASKS, ADDED, EQUAL, OUTPUTS]
LISTS += [CROSS_ENTROPIES, LOG_PROBS]


def test_each_row_of_the_page_has_its_test():
    """Of all tables but the last, which lists names."""
    tables = PAGE.read_text(encoding="utf-8").split("## Names in tutorials")[0]
    cells = re.findall(r"(?m)^\| (.*?) \| .* \|$", tables)
    tested = ["diffusers, time steps", *itertools.chain(*LISTS)]
    assert sorted(cell for cell in cells if cell != "project") == sorted(tested)
