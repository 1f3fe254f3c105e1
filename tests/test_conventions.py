"""The code of each row of the tables of notebooks/conventions.md, beside a formula written out from
the project that it names."""

import dataclasses
import functools
import re
from pathlib import Path

import compare
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import transformer_embed as te

POSITIONS = np.arange(40.0)[:, None]
# A rotation is two products of values up to 1 and a sum, each rounded in float32.
ROTATED = 4 * 2**-24 + 2 * oracle.MAX_ERROR

PAGE = (Path(__file__).parents[1] / "notebooks" / "conventions.md").read_text(encoding="utf-8")
# Of all tables but the last, which lists names.
CELLS = dict(re.findall(r"(?m)^\| (.*?) \| (.*) \|$", PAGE.split("## Names in tutorials")[0]))


def made(name, part=0, call="dict", dots="", **names):
    """What the code of a row gives with these names, and these dots: arguments, or a value."""
    code = re.findall("`([^`]+)`", CELLS[name])
    if not code or code[part].startswith('"'):
        return {}
    text = code[part].replace("...", dots)
    is_call = re.fullmatch(r"[\w.]+\(.*\)", text)
    return eval(text if is_call else f"{call}({text})", {"np": np, "jnp": jnp, **vars(te), **names})


def every(rows):
    return pytest.mark.parametrize("name", rows)


near = functools.partial(compare.near, atol=oracle.MAX_ERROR)


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


# Widths, and a formula of the width d.
SINUSOIDS = {
    "Vaswani et al. (2017), Keras, trax, XLM": (
        [1, 6, 7],
        "np.where(np.arange(d) % 2, np.cos(of_the_paper(d)), np.sin(of_the_paper(d)))",
    ),
    "tensor2tensor, fairseq, M2M100, flaxformer, Flax's wmt and lm1b examples, PegasusX, axlearn, praxis": (
        [2, 9],
        "halves(log_timescales(d // 2))",
    ),
    "Whisper, MaxText": ([16], "halves(log_timescales(d // 2))"),
    # ceil(d / 2) sines, then floor(d / 2) cosines, with d as it is in the exponents.
    "Marian, RoFormer, CTRL, XLNet": (
        [6, 7],
        "np.hstack([np.sin(of_the_paper(d)[:, ::2]), np.cos(of_the_paper(d)[:, 1::2])])",
    ),
    "MusicGen": ([17], "halves(log_timescales(d // 2), np.cos, np.sin)"),
    "positional-encodings, 1-D": ([6, 7], "interleaved(round_up(d))"),
    "tensor2tensor's `min_timescale` m and `max_timescale` M": (
        [32],
        "halves(log_timescales(d // 2, 0.5, 2e4))",
    ),
}


@every(SINUSOIDS)
def test_sinusoids(name):
    widths, formula = SINUSOIDS[name]
    for d in widths:
        ours = te.sinusoidal_table(40, d, **made(name, m=0.5, M=2e4))
        near(ours, fit(eval(formula, globals() | {"d": d}), d))


TIME_STEPS = "diffusers, time steps"


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 1])
def test_diffusers_time_steps(shift):
    times = np.array([0.0, 0.25, 999.5], np.float32)
    frequencies = 2.0 * np.exp(-np.log(10000) * np.arange(4) / (4 - shift))
    others = made(TIME_STEPS, -1, downscale_freq_shift=shift, scale=2.0)
    expected = fit(halves(frequencies, positions=np.float64(times)[:, None]), 9)
    near(te.sinusoidal_encoding(times, 9, **made(TIME_STEPS), **others), expected)


# --- Grids


# Shape, widths, and a formula of the width d and of the coordinates along an axis.
GRIDS = {
    "tensor2tensor, 2-D (height first)": (
        (3, 5),
        [14],
        "halves(log_timescales(d // 4), positions=at)",
    ),
    "positional-encodings, 2-D (height first)": (
        (3, 5),
        [12, 15],
        "interleaved(round_up(d, 2), at)",
    ),
    "positional-encodings, 3-D": ((2, 3, 4), [16], "interleaved(round_up(d, 3), at)"),
    # get_2d_sincos_pos_embed: omega = 1 / 10000 ** (arange(d / 4) / (d / 4)).
    "MAE (width first)": ((3, 5), [24], "halves(1 / 10000 ** (np.arange(6) / 6), positions=at)"),
    # posemb_sincos_2d: omega = 1 / 10000 ** (arange(d / 4) / (d / 4 - 1)).
    "big_vision (width first)": (
        (3, 5),
        [24],
        "halves(1 / 10000 ** (np.arange(6) / 5), positions=at)",
    ),
    # Indices / (grid / base_size) / interpolation_scale.
    "diffusers, 2-D (width first)": (
        (4, 8),
        [24],
        "halves(1 / 10000 ** (np.arange(6) / 6), positions=at)",
    ),
}


@pytest.mark.slow
@every(GRIDS)
def test_grids(name):
    shape, widths, formula = GRIDS[name]
    names = dict(zip("xyz" if len(shape) == 3 else "hw", shape, strict=True))
    names |= {"base_size": 16, "interpolation_scale": 2.0}
    scheme, along = made(name, **names), map(np.arange, shape)
    if isinstance(scheme, dict):
        scheme = dataclasses.replace(made("MAE (width first)", **names), **scheme)
        along = [np.arange(n) * 16 / n / 2.0 for n in shape]
    coordinates = np.meshgrid(*along, indexing="ij")
    ordered = coordinates[::-1] if "width first" in name else coordinates
    points = np.arange(np.prod(shape)).reshape(shape)
    for d in widths:
        parts = [eval(formula, globals() | {"d": d, "at": at[..., None]}) for at in ordered]
        near(scheme.encoding(points, d), fit(np.concatenate(parts, -1), d))


# --- Rotary embeddings

HEAD = np.sin(np.arange(40 * 128)).reshape(40, 1, 128)
# Time, height and width; time alone if there is one axis.
ON_AXES = np.stack([np.arange(40), np.arange(40) // 8, np.arange(40) % 8], -1)
HALF = slice(64), slice(64, 128)
NEIGHBOURS = slice(0, 128, 2), slice(1, 128, 2)


def geometric(dim, base=10000.0):
    return base ** (-np.arange(0, dim, 2) / dim)


# The frequency of each pair, the first and second channels of pairs, and the axis of each pair.
ROTARY = {
    "Llama, Mistral, Qwen, GPT-NeoX, Gemma, Keras, flaxformer": (geometric(128), HALF),
    "GPT-J, RoFormer, Cohere, GLM, Helium, ERNIE 4.5, DeepSeek, torchtune, diffusers": (
        geometric(128),
        NEIGHBOURS,
    ),
    "GPT-J and GPT-NeoX, partial rotary": (geometric(32), (slice(16), slice(16, 32))),
    "Gemma, proportional rotary": (geometric(128)[:16], (slice(16), slice(64, 80))),
    # mrope_section.
    "Qwen2-VL, multi-axis rotary": (geometric(128), HALF, [0] * 16 + [1] * 24 + [2] * 24),
    "Qwen3-VL, multi-axis rotary": (geometric(128), HALF, [0, 1, 2] * 20 + [0] * 4),
    "ERNIE 4.5-VL, multi-axis rotary": (geometric(128), NEIGHBOURS, [1, 2] * 22 + [0] * 20),
    # Praxis: timescale = min * (max / min) ** (2i / d), angle = position / timescale.
    "rotary code with a `min_timescale` m and `max_timescale` M": (
        geometric(128, 5e4 / 2.0) / 2.0,
        HALF,
    ),
    "NTK-aware scaling": (geometric(128, 10000 * 4.0 ** (128 / 126)), HALF),
    # It divides every frequency by factor ** (d / (d - 2)), at every length.
    'keras-hub\'s rope type `"dynamic"`': (geometric(128) / 4.0 ** (128 / 126), HALF),
    # get_1d_rotary_pos_embed: theta = theta * ntk_factor.
    "diffusers' `ntk_factor`": (geometric(128, 10000.0 * 3.0), HALF),
}
OF_ROTARY = {"m": 2.0, "M": 5e4, "factor": 4.0, "d": 128, "theta": 10000.0, "ntk_factor": 3.0}


@pytest.mark.slow
@every(ROTARY)
def test_rotary(name):
    """Channels a and b of each pair rotated by position * frequency, in float64."""
    frequencies, (a, b), *axes = ROTARY[name]
    options = made(name, dots="32", **OF_ROTARY)
    options = options if isinstance(options, dict) else {"scaling": options}
    angles = ON_AXES[:, axes[0] if axes else [0]] * frequencies
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    expected = HEAD.copy()
    expected[..., a] = HEAD[..., a] * cos - HEAD[..., b] * sin
    expected[..., b] = HEAD[..., b] * cos + HEAD[..., a] * sin
    positions = ON_AXES if axes else ON_AXES[:, 0]
    near(te.apply_rotary(HEAD.astype(np.float32), positions, **options), expected, atol=ROTATED)


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
OF_SIX = {"n": 4, "query_positions": SIX, "key_positions": SIX, "length": 6, "alibi_bias_max": 6.0}
OF_SIX |= {"tokens": te.TokenPositions([[0, 0, 0, 1, 2]], segment_ids=[[0, 0, 1, 1, 1]])}
BIASES = {
    "ALiBi (Press et al.)": slopes(4) * DISTANCE,
    # `-slope * (length - 1 - key)`, with a maximum of its own.
    "MPT, Keras (`alibi_bias_max`)": slopes(4, 6.0) * (SIX - 5),
    "ALiBi without a causal mask": -slopes(4) * abs(DISTANCE),
    # build_alibi_tensor: slope * (cumsum(mask) - 1) * mask.
    "Bloom": slopes(4) * [0, 0, 0, 1, 2],
}


@every(BIASES)
def test_biases(name):
    ours = np.asarray(made(name, dots="query_positions, key_positions, num_heads=n", **OF_SIX))
    near(ours.reshape(BIASES[name].shape), BIASES[name], rtol=2e-7)


# --- Masks: the formula of a query and a key in one document

DOCUMENTS = np.array([0, 0, 1, 1, 1, 1, 1, 2, 2, 2])
PLACE = np.array([0, 1, 0, 1, 2, 3, 4, 0, 1, 2])
TOKENS = te.TokenPositions(PLACE, segment_ids=DOCUMENTS)
BLOCKS = np.array([0, 0, 0, 0, -1, 3, 3, 0, -1, -1])
OF_MASKS = {"w": 3, "size": 3, "l": 2, "r": 0, "n": 1, "tokens": TOKENS, "block_ids": BLOCKS}
OF_MASKS |= {"ids": DOCUMENTS, "rule": te.AttentionMask(TOKENS, causal=True, window=(2, 0))}
SEPARATED = "prefix up to and including the first separator (tensor2tensor)"
MASKS = {
    # sliding_window_overlay and the causal mask: key > query - window.
    "causal window of w tokens that counts the query itself (transformers)": "(q - 3 < k) & (k <= q)",
    "the query and w tokens to its left (axlearn, tensor2tensor)": "(q - 3 <= k) & (k <= q)",
    "tokens within w on both sides (transformers, bidirectional)": "abs(q - k) <= 3",
    # chunked_overlay: (key - left_padding) // chunk == (query - left_padding) // chunk.
    "chunked attention (Llama 4), chunks counted from the first token": "(k <= q) & (PLACE[k] // 3 == PLACE[q] // 3)",
    SEPARATED: "(k <= q) | ((q <= 4) & (k <= 4))",
    "prefix of flagged tokens (T5X), block ids with -1 = causal (transformers)": "(k <= q) | ((BLOCKS[q] == BLOCKS[k]) & (BLOCKS[k] >= 0))",
    "padding masks keys only (transformers, Keras, trax)": "k >= 0",
    # make_attention_mask(tokens, tokens): the outer product.
    "padding masks queries too (Flax, T5X)": "k >= 0",
    # _materialize_sliding_window_mask: 0 <= query - key < window.
    "`AttentionMask.causal(sliding_window=w, segment_ids=ids)` (Levanter)": "(0 <= q - k) & (q - k < 3)",
    # query - key <= sliding_window_size.
    "`SegmentIdAttentionBias(ids)` and `sliding_window_causal_mask(w)` (axlearn)": "(0 <= q - k) & (q - k <= 3)",
    "`MaskInfo.from_segments(ids).apply_causal().apply_sliding_window((l, r))` (ejkernel)": "(0 <= q - k) & (q - k <= 2)",
    "`create_block_mask(mask_mod, ..., BLOCK_SIZE=n)` (FlexAttention)": "(0 <= q - k) & (q - k <= 2)",
}


def dense(value):
    """Of a rule, of its arguments, of tokens with block ids, or of blocks of one pair."""
    if isinstance(value, dict):
        value = te.AttentionMask(**{"queries": TOKENS, "causal": True} | value)
    if isinstance(value, te.TokenPositions):
        value = te.AttentionMask(value, causal=True)
    pairs = value.dense() if isinstance(value, te.AttentionMask) else np.asarray(value) == 2
    # Rows that are alike may be one.
    return np.broadcast_to(np.asarray(pairs).reshape(-1, 10), (10, 10))


@every(MASKS)
def test_masks(name):
    names = OF_MASKS
    if name == SEPARATED:
        names = names | {"block_ids": made(name, 1, ids=np.arange(10), sep=4)}
    if "ejkernel" in name:
        names = names | {"ids": DOCUMENTS - 1}
    same = (DOCUMENTS[:, None] == DOCUMENTS) | ("keys only" in name)
    pairs = eval(MASKS[name], globals() | {"q": np.arange(10)[:, None], "k": np.arange(10)})
    compare.equal(dense(made(name, **names)), same & (DOCUMENTS > 0) & pairs)


# --- What is equal to the bit

IDS = np.array([[1, 1, 5, 6, 7], [5, 6, 7, 1, 1]])
# RoBERTa's and OPT's is cumsum(mask) * mask + padding_idx.
MASK = IDS != 1
COUNTED = np.cumsum(MASK, 1)
FROM_0 = np.where(MASK, COUNTED - 1, 0)
TABLE = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
LOWEST = float(jnp.finfo(jnp.float32).min)
OF_EQUAL = {"mask": np.array([True, False]), "dtype": jnp.float32, "ids": IDS * MASK, "max_len": 9}
OF_EQUAL |= {"tokens": te.TokenPositions(FROM_0, segment_ids=MASK.astype(int)), "past": 7}
FROM_2 = "RoBERTa and OPT (padding at 1, tokens from 2)"
EQUAL = {
    "added to the logits: half of the dtype's lowest value (this package)": [0, LOWEST / 2],
    "added to the logits: the dtype's lowest value (transformers)": [0, LOWEST],
    "added to the logits: -1e9 (T5X, tensor2tensor)": np.float32([0, -1e9]),
    # make_causal_mask(x, dtype): 1.0 = may attend.
    "0/1 floats (Flax, T5X)": [1, 0],
    FROM_2: COUNTED * MASK + 1,
    "BART (from 2, also at padding)": np.arange(2, 7),
    "fairseq's sinusoids (from `padding_idx + 1`)": COUNTED * MASK + 1,
    # transformers: position_ids = cumsum(mask) - 1; masked_fill(mask == 0, 0 or 1).
    "0 at padding": FROM_0,
    "1 at padding": np.where(MASK, FROM_0, 1),
    # OPT: (cumsum(mask) * mask - 1)[:, past:] + offset; the past moves tokens alone.
    "RoBERTa with a KV cache (the past length is added to tokens, not to padding)": np.where(
        MASK, FROM_0 + 7, 0
    ),
    "Vaswani et al. (2017), CTRL, Marian (rows times sqrt(d_model))": TABLE[IDS] * 2,
    "BERT, GPT-2, Llama (rows as they are)": TABLE[IDS],
}
UNMASKED = "BERT, GPT-2 (0..length - 1, also at padding)"


def found_in(value):
    """Positions that a scheme or tokens have, rows that arguments give, or the value itself."""
    if isinstance(value, te.TokenPositions):
        return value.positions
    if isinstance(value, te.PositionScheme):
        return value.positions(jnp.asarray(IDS))
    if not isinstance(value, dict):
        return value
    embedder = te.Embedder(te.EmbedderConfig(8, 4, None, **value))
    ((path, _),) = jax.eval_shape(embedder.init, jax.random.key(0)).items()
    return embedder.apply({path: {"embeddings": TABLE}}, None, IDS, is_training=False)


@pytest.mark.slow
@every(EQUAL)
def test_results_are_equal_to_the_bit(name):
    part = 1 if name == "0 at padding" else 0
    found = made(name, part, dots='layout="sin_cos", shift=1, odd="zero"', **OF_EQUAL)
    compare.equal(found_in(found), EQUAL[name])


def test_positions_are_counted_at_padding_unless_it_is_named():
    for scheme in (te.Learned(9), te.Sinusoidal()):
        compare.equal(found_in(scheme), np.arange(5))
    compare.equal(
        found_in(made(FROM_2, 1, ids=IDS)),
        COUNTED * MASK + 1,
    )


IDS_OF_ROW = np.array([[1, 1, 1, 2, 2, 0, 0, 0]])
PLACES = np.array([[0, 1, 2, 0, 1, 0, 0, 0]])
SHIFTED = np.array([[1, 1, 0, 1, 0, 0, 0, 0]], bool)
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
        "target_labels": np.where(SHIFTED, 7, -1),
    },
    "Tunix": {"segment_positions": PLACES, "segment_ids": IDS_OF_ROW},
    "Levanter, ejkernel: segments from 0, padding is -1": {"segment_ids": IDS_OF_ROW - 1},
    "transformers, torchtitan: positions that restart, without padding": {
        "position_ids": PLACES[:, :5]
    },
}


@every(PACKED)
def test_a_packed_batch_of_another_project_is_taken_by_the_call_of_the_page(name):
    tokens = made(name, batch=PACKED[name])
    length = tokens.positions.shape[1]
    compare.equal(tokens.positions, PLACES[:, :length])
    segments = IDS_OF_ROW[:, :length]
    compare.equal(tokens.padding_mask, segments != 0)
    same = (segments[:, :, None] == segments[:, None]) & (segments[:, None] != 0)
    mask = te.AttentionMask(tokens, causal=True).dense()
    compare.equal(np.asarray(mask)[:, 0], same & np.tri(length, dtype=bool))
    compare.equal(tokens.next_token_mask, SHIFTED[:, :length])
    if "shifted" in name:
        compare.equal(made(name, 1, batch=PACKED[name])["mask"], SHIFTED)


# --- Starts

STARTS = {
    # transformers: initializer_range of the configs; gemma's init_input_embeddings.
    "BERT, GPT-2, Llama, EasyDeL": 0.02,
    "Gemma": 0.01,
    # variance_scaling of 1 by the fan of a row.
    "`nnx.Embed`, axlearn": 0.125,
    "`hk.Embed`, Equinox, MaxText, T5": 1.0,
    "Levanter": 1 / 64,
}


@every(STARTS)
def test_starts(name):
    """That tables are drawn so is in tests/layers/test_starts.py."""
    assert made(name, d_model=64) == {"init_stddev": STARTS[name]}


# --- Output layers and their loss

RANDOM = np.random.default_rng(0)
HIDDEN, MATRIX, OFFSETS = (RANDOM.normal(size=shape) for shape in ((2, 5, 8), (11, 8), (11,)))
TARGETS = RANDOM.integers(0, 11, (2, 5))
LOGITS = HIDDEN @ MATRIX.T
X, WEIGHT, BIAS = (array.astype(np.float32) for array in (HIDDEN, MATRIX, OFFSETS))
OUTPUTS = {
    # transformers: BertLMPredictionHead's decoder, PhiForCausalLM's lm_head.
    "BERT": LOGITS + OFFSETS,
    "Phi": LOGITS + OFFSETS,
    # T5ForConditionalGeneration: sequence_output * d_model**-0.5 before the tied lm_head.
    "T5, tied": (HIDDEN * 8**-0.5) @ MATRIX.T,
    # Gemma2ForCausalLM: logits / cap, tanh, logits * cap.
    "Gemma 2": np.tanh(LOGITS / 2) * 2,
    # CohereForCausalLM: logits * logit_scale. GraniteForCausalLM: logits / logits_scaling.
    "Cohere": LOGITS * 0.0625,
    "Granite": LOGITS / 13,
}
OF_OUTPUTS = {
    "d_model": 8,
    "final_logit_softcapping": 2.0,
    "logit_scale": 0.0625,
    "logits_scaling": 13,
}


@every(OUTPUTS)
def test_output_layers(name):
    """That a module's layer does what its fields say is in tests/layers/test_output_layer.py."""
    fields = made(name, call="OutputConfig", **OF_OUTPUTS)
    output = te.OutputLayer(
        WEIGHT, BIAS if fields.bias else None, softcap=fields.softcap, scale=fields.scale
    )
    near(te.linear_logits(X, output), OUTPUTS[name], atol=1e-5)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def of_ids(log_p, ids):
    return np.take_along_axis(log_p, ids[..., None], -1)[..., 0]


LOG_Z = np.log(np.exp(LOGITS).sum(-1))
LOG_P = log_softmax(LOGITS)
LOG_P_COOL = log_softmax(LOGITS / 0.7)
LOSSES = -of_ids(LOG_P, TARGETS)
SHIFTED_LOSSES = -of_ids(LOG_P[:, :-1], TARGETS[:, 1:])
SMOOTH_LOSSES = 0.9 * LOSSES - 0.1 * LOG_P.mean(-1)
WEIGHTS = RANDOM.random((2, 5)).astype(np.float32)
# Without the targets that are 4.
COUNTS = TARGETS != 4


def cross_entropy(labels=TARGETS, pad_id=None, **options):
    labels = labels if pad_id is None else np.where(COUNTS, labels, pad_id)
    return te.linear_cross_entropy(X, te.OutputLayer(WEIGHT, pad_id=pad_id), labels, **options)


def log_probs(*arguments, **options):
    """Of labels, or of an output layer and labels."""
    *output, labels = arguments
    found = te.linear_log_probs(X, *(output or [WEIGHT]), labels, **options)
    return np.stack(found) if isinstance(found, tuple) else np.asarray(found)


OF_LOSSES = {
    # T5X's cross_entropy_with_logits: loss + z_loss * square(log_z).
    "PaLM, T5X, MaxText (`z_loss`), Liger (`lse_square_scale`), Levanter (`logsumexp_weight`)": (
        (LOSSES + 0.1 * LOG_Z**2).mean()
    ),
    # e[..., :-1, :] and targets[..., 1:], without those that are -100.
    "cut-cross-entropy (`shift=True`)": SHIFTED_LOSSES[COUNTS[:, 1:]].mean(),
    "PyTorch (`ignore_index`, `label_smoothing`)": SMOOTH_LOSSES[COUNTS].mean(),
    # compute_weighted_cross_entropy: the sum of loss * weights, and the sum of weights.
    "T5X (`weights`), the sum over the sum of weights": (LOSSES * WEIGHTS).sum() / WEIGHTS.sum(),
}
COOL = of_ids(LOG_P_COOL[:, :-1], TARGETS[:, 1:])
OF_LOG_PROBS = {
    "TRL (`selective_log_softmax(logits[:, :-1], ids[:, 1:])`)": -SHIFTED_LOSSES,
    # Hidden states [-n - 1 : -1] and the last n ids; logits / temperature.
    "Tunix (`compute_per_token_logps` of the last n tokens)": COOL,
    # entropy = logsumexp(logits) - sum(softmax(logits) * logits), of logits / temperature.
    "verl (logits divided by the temperature; entropies beside log-probabilities)": (
        [COOL, -(np.exp(LOG_P_COOL) * LOG_P_COOL).sum(-1)[:, :-1]]
    ),
    "Liger (`LigerFusedLinearPPOBase`: hidden states and `selected_token_ids` that are shifted already, bias, temperature)": (
        of_ids(log_softmax((LOGITS + OFFSETS) / 0.7), TARGETS)
    ),
}
NAMES = {
    "cross_entropy": cross_entropy,
    "log_probs": log_probs,
    "z_loss": 0.1,
    "label_smoothing": 0.1,
}
NAMES |= {"ignore_index": -1, "weights": WEIGHTS, "ids": TARGETS, "selected_token_ids": TARGETS}
NAMES |= {"table": WEIGHT, "bias": BIAS, "temperature": 0.7}


@every(OF_LOSSES)
def test_losses(name):
    near(made(name, call="cross_entropy", **NAMES), OF_LOSSES[name], rtol=1e-5)


@every(OF_LOG_PROBS)
def test_log_probs(name):
    """The first token of a row that is shifted has none."""
    ours = made(name, call="log_probs", **NAMES)
    near(ours[..., 1:] if "shift=True" in CELLS[name] else ours, OF_LOG_PROBS[name], rtol=1e-5)


def test_each_row_of_the_page_has_its_test():
    tested = {
        TIME_STEPS,
        UNMASKED,
        *SINUSOIDS,
        *GRIDS,
        *ROTARY,
        *PUBLISHED,
        *BIASES,
        *MASKS,
        *EQUAL,
    }
    tested |= {*PACKED, *STARTS, *OUTPUTS, *OF_LOSSES, *OF_LOG_PROBS}
    assert CELLS.keys() - {"project"} == tested
