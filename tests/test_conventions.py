"""Each row of the tables of notebooks/conventions.md: our arguments, and a formula written out from
the project that it names."""

import functools
import itertools
import math
import re
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from compare import equal
from references import linear_cross_entropy, linear_log_probs, linear_logits

import transformer_embed as te

POSITIONS = np.arange(40.0)[:, None]
# A rotation is two products of values up to 1 and a sum, each rounded in float32.
ROTATED = 4 * 2**-24 + 2 * oracle.MAX_ERROR


def every(rows):
    return pytest.mark.parametrize("name", rows)


def near(ours, expected, atol=oracle.MAX_ERROR, rtol=0.0):
    np.testing.assert_allclose(ours, expected, rtol=rtol, atol=atol)


# --- Sinusoids


def fit(rows, d_model):
    """Zeros after the channels up to d_model, or no more than d_model of them."""
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, d_model)])[..., :d_model]


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
    options = {"layout": "sin_cos", "shift": shift, "odd": "zero", "frequency_scale": 2.0}
    expected = fit(halves(frequencies, positions=np.float64(times)[:, None]), 9)
    near(te.sinusoidal_encoding(times, 9, **options), expected)


# --- Grids


WIDTH_FIRST = {"axes": (1, 0), "layout": "sin_cos"}
# get_2d_sincos_pos_embed: indices / (grid / base_size) / interpolation_scale.
STRETCHED = [np.arange(n) * 16 / n / 2.0 for n in (4, 8)]
# Shape, widths, arguments, and a formula of the width and of the coordinates along an axis.
GRIDS = {
    "tensor2tensor, 2-D (height first)": (
        (3, 5),
        [12, 14],
        {"layout": "sin_cos"} | ZERO,
        lambda d, at: halves(log_timescales(d // 4), positions=at),
    ),
    "positional-encodings, 2-D (height first)": (
        (3, 5),
        [12, 14, 15],
        {"odd": "round_up"},
        lambda d, at: interleaved(round_up(d, 2), at),
    ),
    "positional-encodings, 3-D": (
        (2, 3, 4),
        [12, 16],
        {"odd": "round_up"},
        lambda d, at: interleaved(round_up(d, 3), at),
    ),
    # get_2d_sincos_pos_embed: omega = 1 / 10000 ** (arange(d / 4) / (d / 4)).
    "MAE (width first)": (
        (3, 5),
        [24],
        WIDTH_FIRST,
        lambda d, at: halves(1 / 10000 ** (np.arange(6) / 6), positions=at),
    ),
    # posemb_sincos_2d: omega = 1 / 10000 ** (arange(d / 4) / (d / 4 - 1)).
    "big_vision (width first)": (
        (3, 5),
        [24],
        WIDTH_FIRST | {"shift": 1},
        lambda d, at: halves(1 / 10000 ** (np.arange(6) / 5), positions=at),
    ),
    "diffusers, 2-D (width first)": (
        (4, 8),
        [24],
        WIDTH_FIRST | {"axis_positions": STRETCHED},
        lambda d, at: halves(1 / 10000 ** (np.arange(6) / 6), positions=at),
    ),
}


@pytest.mark.slow
@every(GRIDS)
def test_grids(name):
    shape, widths, options, formula = GRIDS[name]
    along = options.get("axis_positions", map(np.arange, shape))
    coordinates = np.meshgrid(*along, indexing="ij")
    order = options.get("axes", range(len(shape)))
    for d_model in widths:
        parts = [formula(d_model, coordinates[axis][..., None]) for axis in order]
        expected = fit(np.concatenate(parts, -1), d_model)
        points = np.arange(np.prod(shape)).reshape(shape)
        near(te.SinusoidalGrid(shape, **options).encoding(points, d_model), expected)


# --- Rotary embeddings

HEAD = np.sin(np.arange(40 * 2 * 8)).reshape(40, 2, 8)
# Time, height and width; time alone if there is one axis.
ON_AXES = np.stack([np.arange(40), np.arange(40) // 8, np.arange(40) % 8], -1)


HALF = slice(4), slice(4, 8)
NEIGHBOURS = slice(0, 8, 2), slice(1, 8, 2)


def geometric(dim, base=10000.0):
    return base ** (-np.arange(0, dim, 2) / dim)


# Arguments, the frequency of each pair, and the first and the second channels of pairs.
ROTARY = {
    "Llama, Mistral, Qwen, GPT-NeoX, Gemma, Keras, flaxformer": ({}, geometric(8), HALF),
    "GPT-J, RoFormer, Cohere, GLM, Helium, ERNIE 4.5, DeepSeek, torchtune, diffusers": (
        {"layout": "interleaved"},
        geometric(8),
        NEIGHBOURS,
    ),
    "GPT-J and GPT-NeoX, partial rotary": (
        {"rotary_dim": 4},
        geometric(4),
        (slice(2), slice(2, 4)),
    ),
    "Gemma, proportional rotary": (
        {"rotary_dim": 4, "partial": "proportional"},
        geometric(8)[:2],
        (slice(2), slice(4, 6)),
    ),
    "Qwen2-VL, multi-axis rotary": ({"pair_axes": [0, 0, 1, 2]}, geometric(8), HALF),
    "Qwen3-VL, multi-axis rotary": ({"pair_axes": [0, 1, 2, 0]}, geometric(8), HALF),
    "ERNIE 4.5-VL, multi-axis rotary": (
        {"pair_axes": [1, 2, 1, 0], "layout": "interleaved"},
        geometric(8),
        NEIGHBOURS,
    ),
    # Praxis: timescale = min * (max / min) ** (2i / d), angle = position / timescale.
    "rotary code with a `min_timescale` m and `max_timescale` M": (
        {"base": 5e4 / 2, "scaling": te.LinearScaling(2.0)},
        1 / (2.0 * (5e4 / 2.0) ** (np.arange(0, 8, 2) / 8)),
        HALF,
    ),
    "NTK-aware scaling": (
        {"scaling": te.NTKScaling(4.0)},
        geometric(8, 10000 * 4.0 ** (8 / 6)),
        HALF,
    ),
    # It divides every frequency by factor ** (d / (d - 2)), at every length.
    'keras-hub\'s rope type `"dynamic"`': (
        {"scaling": te.LinearScaling(4.0 ** (8 / (8 - 2)))},
        geometric(8) / 4.0 ** (8 / 6),
        HALF,
    ),
    # get_1d_rotary_pos_embed: theta = theta * ntk_factor.
    "diffusers' `ntk_factor`": ({"base": 10000.0 * 3.0}, geometric(8, 10000.0 * 3.0), HALF),
}


@pytest.mark.slow
@every(ROTARY)
def test_rotary(name):
    """Channels a and b of each pair rotated by position * frequency, in float64."""
    options, frequencies, (a, b) = ROTARY[name]
    positions = ON_AXES if "pair_axes" in options else ON_AXES[:, 0]
    angles = ON_AXES[:, options.get("pair_axes", [0])] * frequencies
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    expected = HEAD.copy()
    expected[..., a] = HEAD[..., a] * cos - HEAD[..., b] * sin
    expected[..., b] = HEAD[..., b] * cos + HEAD[..., a] * sin
    near(te.apply_rotary(HEAD.astype(np.float32), positions, **options), expected, ROTATED)


# tests/positions compares these with the frequencies and buckets that transformers printed.
PUBLISHED = [
    'position interpolation ("linear")',
    "dynamic NTK scaling",
    "YaRN",
    "Llama 3",
    "LongRoPE (Phi-3)",
    "T5 encoder",
    "T5 decoder",
]


# --- Biases


def slopes(heads, max_bias=8.0):
    return 2.0 ** (-max_bias * np.arange(1, heads + 1) / heads)[:, None, None]


SIX = np.arange(6)
DISTANCE = SIX - SIX[:, None]
PADDED = te.TokenPositions.from_ids([[0, 0, 5, 6, 7]], pad_id=0)
# The positions of queries and of keys, options, and a formula.
BIASES = {
    "ALiBi (Press et al.)": (SIX, SIX, {}, slopes(4) * DISTANCE),
    # `-slope * (length - 1 - key)`, with a maximum of its own.
    "MPT, Keras (`alibi_bias_max`)": ([5], SIX, {"max_bias": 6.0}, slopes(4, 6.0) * (SIX - 5)),
    "ALiBi without a causal mask": (SIX, SIX, {"causal": False}, -slopes(4) * abs(DISTANCE)),
    # build_alibi_tensor: slope * (cumsum(mask) - 1) * mask.
    "Bloom": ([0], PADDED.positions, {}, slopes(4) * [0, 0, 0, 1, 2]),
}


@every(BIASES)
def test_biases(name):
    queries, keys, options, expected = BIASES[name]
    near(te.alibi_bias(queries, keys, num_heads=4, **options)[0], expected, 0, 2e-7)


# --- Masks: the rule, and its formula for a query and a key.


def positions(**options):
    return te.TokenPositions(SIX, **options)


IS_TOKEN = SIX < 4
# Up to and including the separator, which is the third token.
PREFIX = np.array([0, 0, 0, -1, -1, -1])
BLOCKS = np.array([0, 0, -1, 1, 1, -1])
DOCUMENTS = np.array([1, 1, 1, 1, 2, 2, 0])
PACKED = te.TokenPositions.from_segment_ids(DOCUMENTS)
LEFT_PADDED = te.TokenPositions.from_ids([[0, 0, 5, 6, 7, 8]], pad_id=0)
KEYS = positions(segment_ids=IS_TOKEN.astype(int))
causal = functools.partial(te.AttentionMask, causal=True)
whole = functools.partial(te.AttentionMask, causal=False)


def same_document(query, key):
    return DOCUMENTS[query] == DOCUMENTS[key] != 0


MASKS = {
    # sliding_window_overlay and the causal mask: key > query - window.
    "causal window of w tokens that counts the query itself (transformers)": (
        causal(positions(), window=(3 - 1, 0)),
        lambda q, k: q - 3 < k <= q,
    ),
    "the query and w tokens to its left (axlearn, tensor2tensor)": (
        causal(positions(), window=(2, 0)),
        lambda q, k: q - 2 <= k <= q,
    ),
    "tokens within w on both sides (transformers, bidirectional)": (
        whole(positions(), window=(2, 2)),
        lambda q, k: abs(q - k) <= 2,
    ),
    # chunked_overlay: (key - left_padding) // chunk == (query - left_padding) // chunk.
    "chunked attention (Llama 4), chunks counted from the first token": (
        causal(LEFT_PADDED, chunk=3),
        lambda q, k: 2 <= k <= q and (k - 2) // 3 == (q - 2) // 3,
    ),
    "prefix up to and including the first separator (tensor2tensor)": (
        causal(positions(block_ids=PREFIX)),
        lambda q, k: k <= q or (q <= 2 and k <= 2),
    ),
    "prefix of flagged tokens (T5X), block ids with -1 = causal (transformers)": (
        causal(positions(block_ids=BLOCKS)),
        lambda q, k: k <= q or BLOCKS[q] == BLOCKS[k] >= 0,
    ),
    "padding masks keys only (transformers, Keras, trax)": (
        whole(positions(), KEYS),
        lambda q, k: IS_TOKEN[k],
    ),
    # make_attention_mask(tokens, tokens): the outer product.
    "padding masks queries too (Flax, T5X)": (
        whole(te.TokenPositions.from_lengths([4], 6)),
        lambda q, k: IS_TOKEN[q] and IS_TOKEN[k],
    ),
    # _materialize_sliding_window_mask: 0 <= query - key < window.
    "`AttentionMask.causal(sliding_window=w, segment_ids=ids)` (Levanter)": (
        causal(PACKED, window=(3 - 1, 0)),
        lambda q, k: 0 <= q - k < 3 and same_document(q, k),
    ),
    # query - key <= sliding_window_size.
    **dict.fromkeys(
        [
            "`SegmentIdAttentionBias(ids)` and `sliding_window_causal_mask(w)` (axlearn)",
            "`MaskInfo.from_segments(ids).apply_causal().apply_sliding_window((l, r))` (ejkernel)",
            "`create_block_mask(mask_mod, ..., BLOCK_SIZE=n)` (FlexAttention)",
        ],
        (causal(PACKED, window=(2, 0)), lambda q, k: 0 <= q - k <= 2 and same_document(q, k)),
    ),
}


@every(MASKS)
def test_masks(name):
    mask, rule = MASKS[name]
    ours = mask.dense()
    size = ours.shape[-1]
    ours = ours.reshape(-1, size)
    expected = [[rule(q, k) for k in range(size)] for q in range(size)]
    equal(np.broadcast_to(ours, (size, size)), expected)


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
    return scheme.positions(jnp.asarray(IDS))


def with_a_past(tokens):
    """OPT: (cumsum(mask) * mask - 1)[:, past:] + offset; the past moves tokens alone."""
    return jnp.where(tokens.padding_mask, tokens.positions + 7, tokens.positions)


LOWEST = float(jnp.finfo(jnp.float32).min)
added = functools.partial(te.mask_to_bias, [True, False], jnp.float32)
FAIRSEQ = te.Sinusoidal(layout="sin_cos", shift=1, odd="zero", start=2, at_padding=1, pad_id=1)
EQUAL = {
    "added to the logits: half of the dtype's lowest value (this package)": (
        added,
        [0, LOWEST / 2],
    ),
    "added to the logits: the dtype's lowest value (transformers)": (
        lambda: added(value=LOWEST),
        [0, LOWEST],
    ),
    "added to the logits: -1e9 (T5X, tensor2tensor)": (
        lambda: added(value=-1e9),
        np.float32([0, -1e9]),
    ),
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
    "BERT, GPT-2, Llama (rows as they are)": (lambda: embedded(scale=1.0), TABLE[IDS]),
}


IDS_OF_ROW = jnp.array([[1, 1, 1, 2, 2, 0, 0, 0]])
PLACES = jnp.array([[0, 1, 2, 0, 1, 0, 0, 0]])
SHIFTED = jnp.array([[1, 1, 0, 1, 0, 0, 0, 0]], bool)
# The batch as they make it, the call of the page, and the mask of the labels that it names, if any.
PACKED = {
    "grain, which packs a feature `ids`": {"ids_positions": PLACES, "ids_segment_ids": IDS_OF_ROW},
    "MaxText; `targets` are shifted": {
        "inputs_position": PLACES,
        "inputs_segmentation": IDS_OF_ROW,
        "targets_segmentation": IDS_OF_ROW * SHIFTED,
    },
    "axlearn; `target_labels` are shifted": {
        "input_positions": PLACES,
        "input_segment_ids": IDS_OF_ROW,
        "target_labels": jnp.where(SHIFTED, 7, -1),
    },
    "Tunix": {"segment_positions": PLACES, "segment_ids": IDS_OF_ROW},
    "Levanter, ejkernel: segments from 0, padding is -1": {"segment_ids": IDS_OF_ROW - 1},
    "transformers, torchtitan: positions that restart, without padding": {
        "position_ids": PLACES[:, :5]
    },
}


@every(PACKED)
def test_a_packed_batch_of_another_project_is_taken_by_the_call_of_the_page(name):
    row = next(
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {name} |")
    )
    made, *mask = re.findall(r"`([^`]+)`", row.split(" | ")[1])
    scope = {"batch": PACKED[name], "jnp": jnp, "TokenPositions": te.TokenPositions}
    tokens = eval(made, scope)
    length = tokens.positions.shape[1]
    equal(tokens.positions, PLACES[:, :length])
    expected = te.TokenPositions.from_segment_ids(IDS_OF_ROW[:, :length])
    equal(tokens.padding_mask, expected.padding_mask)
    equal(*(te.AttentionMask(each, causal=True).dense() for each in (tokens, expected)))
    equal(tokens.next_token_mask, SHIFTED[:, :length])
    for text in mask:
        equal(eval(text.removeprefix("mask="), scope), SHIFTED)


@pytest.mark.slow
@every(EQUAL)
def test_what_is_equal_to_the_bit(name):
    ours, expected = EQUAL[name]
    equal(ours(), expected)


# --- Starts

WIDE = 64
STARTS = {
    # transformers: initializer_range of the configs; gemma's init_input_embeddings.
    "BERT, GPT-2, Llama, EasyDeL": (0.02, 0.02),
    "Gemma": (0.01, 0.01),
    # variance_scaling of 1 by the fan of a row.
    "`nnx.Embed`, axlearn": (WIDE**-0.5, math.sqrt(1 / WIDE)),
    "`hk.Embed`, Equinox, MaxText, T5": (1.0, 1.0),
    "Levanter": (1 / WIDE, 1 / WIDE),
}


@every(STARTS)
def test_starts(name):
    init_stddev, expected = STARTS[name]
    config = te.EmbedderConfig(2000, WIDE, None, init_stddev=init_stddev)
    (leaves,) = te.Embedder(config).init(jax.random.key(0)).values()
    near(np.std(leaves["embeddings"]), expected, 0, 0.01)


# --- Output layers and their loss

RANDOM = np.random.default_rng(0)
HIDDEN, MATRIX, OFFSETS = (RANDOM.normal(size=shape) for shape in ((2, 5, 8), (11, 8), (11,)))
TARGETS = RANDOM.integers(0, 11, (2, 5))
LOGITS = HIDDEN @ MATRIX.T
NARROW = [array.astype(np.float32) for array in (HIDDEN, MATRIX)]
BIAS = OFFSETS.astype(np.float32)


OUTPUTS = {
    # transformers: BertLMPredictionHead's decoder, PhiForCausalLM's lm_head.
    "BERT": (te.OutputConfig(bias=True), LOGITS + OFFSETS),
    "Phi": (te.OutputConfig(tied=False, bias=True), LOGITS + OFFSETS),
    # T5ForConditionalGeneration: sequence_output * d_model**-0.5 before the tied lm_head.
    "T5, tied": (te.OutputConfig(scale=8**-0.5), (HIDDEN * 8**-0.5) @ MATRIX.T),
    # Gemma2ForCausalLM: logits / cap, tanh, logits * cap.
    "Gemma 2": (te.OutputConfig(softcap=2.0), np.tanh(LOGITS / 2) * 2),
    # CohereForCausalLM: logits * logit_scale. GraniteForCausalLM: logits / logits_scaling.
    "Cohere": (te.OutputConfig(scale=0.0625), LOGITS * 0.0625),
    "Granite": (te.OutputConfig(scale=1 / 13), LOGITS / 13),
}


@every(OUTPUTS)
def test_output_layers(name):
    """That a module's layer does what its fields say is in tests/layers/test_output_layer.py."""
    output, expected = OUTPUTS[name]
    options = {"softcap": output.softcap, "scale": output.scale}
    ours = linear_logits(*NARROW, bias=BIAS if output.bias else None, **options)
    near(ours, expected, 1e-5)


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
COOL = {"shift": True, "temperature": 0.7}
cross_entropy = functools.partial(linear_cross_entropy, *NARROW)
log_probs = functools.partial(linear_log_probs, *NARROW, TARGETS)
LOSSES_OF_PROJECTS = {
    # T5X's cross_entropy_with_logits: loss + z_loss * square(log_z).
    "PaLM, T5X, MaxText (`z_loss`), Liger (`lse_square_scale`), Levanter (`logsumexp_weight`)": (
        lambda: cross_entropy(TARGETS, z_loss=0.1),
        (LOSSES + 0.1 * LOG_Z**2).mean(),
    ),
    # e[..., :-1, :] and targets[..., 1:], without those that are -100.
    "cut-cross-entropy (`shift=True`)": (
        lambda: cross_entropy(np.where(COUNTS, TARGETS, -100), shift=True, pad_id=-100),
        SHIFTED_LOSSES[COUNTS[:, 1:]].mean(),
    ),
    "PyTorch (`ignore_index`, `label_smoothing`)": (
        lambda: cross_entropy(np.where(COUNTS, TARGETS, -1), pad_id=-1, label_smoothing=0.1),
        SMOOTH_LOSSES[COUNTS].mean(),
    ),
    # compute_weighted_cross_entropy: the sum of loss * weights, and the sum of weights.
    "T5X (`weights`), the sum over the sum of weights": (
        lambda: cross_entropy(TARGETS, weights=WEIGHTS),
        (LOSSES * WEIGHTS).sum() / WEIGHTS.sum(),
    ),
    "TRL (`selective_log_softmax(logits[:, :-1], ids[:, 1:])`)": (
        lambda: log_probs(shift=True)[:, 1:],
        of_ids(LOG_P[:, :-1], TARGETS[:, 1:]),
    ),
    # Hidden states [-n - 1 : -1] and the last n ids; logits / temperature.
    "Tunix (`compute_per_token_logps` of the last n tokens)": (
        lambda: log_probs(**COOL)[:, -3:],
        of_ids(LOG_P_COOL[:, -4:-1], TARGETS[:, -3:]),
    ),
    # entropy = logsumexp(logits) - sum(softmax(logits) * logits), of logits / temperature.
    "verl (logits divided by the temperature; entropies beside log-probabilities)": (
        lambda: jnp.stack(log_probs(with_entropy=True, **COOL))[..., 1:],
        [
            of_ids(LOG_P_COOL[:, :-1], TARGETS[:, 1:]),
            -(np.exp(LOG_P_COOL) * LOG_P_COOL).sum(-1)[:, :-1],
        ],
    ),
    "Liger (`LigerFusedLinearPPOBase`: hidden states and `selected_token_ids` that are shifted already, bias, temperature)": (
        lambda: log_probs(bias=BIAS, temperature=0.7),
        of_ids(log_softmax((LOGITS + OFFSETS) / 0.7), TARGETS),
    ),
}


@pytest.mark.slow
@every(LOSSES_OF_PROJECTS)
def test_losses(name):
    ours, expected = LOSSES_OF_PROJECTS[name]
    near(ours(), expected, 0, 1e-5)


PAGE = Path(__file__).parents[1] / "notebooks" / "conventions.md"
LISTS = [
    SINUSOIDS,
    GRIDS,
    ROTARY,
    PUBLISHED,
    BIASES,
    MASKS,
    EQUAL,
    PACKED,
    STARTS,
    OUTPUTS,
    LOSSES_OF_PROJECTS,
]


def test_each_row_of_the_page_has_its_test():
    """Of all tables but the last, which lists names."""
    tables = PAGE.read_text(encoding="utf-8").split("## Names in tutorials")[0]
    cells = re.findall(r"(?m)^\| (.*?) \| .* \|$", tables)
    tested = ["diffusers, time steps", *itertools.chain(*LISTS)]
    assert sorted(cell for cell in cells if cell != "project") == sorted(tested)
