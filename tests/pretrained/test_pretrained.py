"""The numbers of the original: small models of the transformers library, made by
tests/golden/make_pretrained.py and make_heads.py, which name versions and seed."""

import functools
import re

import embeddings
import haiku as hk
import numpy as np
import pytest
from cases import few
from checkpoints import (
    CASES,
    EMBED_TOKENS,
    GOLDEN,
    HEADS,
    LENGTH,
    checkpoint,
    load,
    load_embedder,
    load_table,
    rotary_of,
    tensors_of,
    unpack,
)
from compare import near

import transformer_embed as te
from transformer_embed._src.pretrained import encoder_types, llama_types, registry
from transformer_embed._src.pretrained.entries import ENTRIES

PAD = 1
# A unit in the last place of float32, at the largest value. Layer norms sum their channels in
# another order than the original does; tests/benchmarks/pretrained.py --precision measures wider
# models.
ULPS = 5
# Of rotated heads, of at most 1 and a few roundings.
SAME = 1e-6
# The original rounds a frequency three times (power, reciprocal, scaling) and its product with the
# position once, to 24 bits each.
THEIR_ANGLE = 4 * 2.0**-24
FLOAT32 = [name for name, case in CASES.items() if case["dtype"] == "float32"]


def assert_same(ours, theirs):
    """Within some units in the last place of the largest value."""
    near(np.asarray(ours), theirs, atol=ULPS * np.spacing(np.abs(theirs).max()))


@pytest.mark.parametrize("name", FLOAT32)
def test_embeddings_are_the_originals(name):
    """Of the layer in float64, which the layer is compared with in tests/layers."""
    case, found = CASES[name], load(name)
    short, config = embeddings.by_name(found.params), found.config
    ours = embeddings.embedded(config, short, case["ids"], None, case.get("token_types"))
    if config.embedding_width is not None:
        ours = ours @ short["widen/w"] + short["widen/b"]
    # Of padding, M2M100 has zeros for a position.
    seen = np.not_equal(case["ids"], PAD) | (not name.startswith("m2m100"))
    theirs = unpack(case["embeddings"])
    assert_same(ours[seen], theirs[seen])
    assert np.abs(theirs).max() > 0.1


@pytest.mark.parametrize("name", few(FLOAT32, 4))
def test_the_layers_embeddings_are_the_originals(name):
    case, found = CASES[name], load(name)
    apply = functools.partial(te.Embedder(found.config).apply, is_training=False)
    ours = apply(found.params, None, np.int32(case["ids"]), token_types=case.get("token_types"))
    seen = np.not_equal(case["ids"], PAD) | (not name.startswith("m2m100"))
    assert_same(np.asarray(ours)[seen], unpack(case["embeddings"])[seen])


def test_the_tolerance_that_is_documented_is_the_one_that_is_tested():
    """1e-6 was said, which values around 7 do not keep: 5 units in the last place are 2.4e-6
    there."""
    documented = f"by at most {ULPS} units in the last place (ulp) of the largest value"
    assert documented in " ".join(load_embedder.__doc__.split())
    assert max(np.abs(unpack(CASES[name]["embeddings"])).max() for name in FLOAT32) > 7


ROTARY = [(name, n) for name, case in CASES.items() for n in range(len(case.get("rotary", [])))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), few(ROTARY, 7))
def test_rotated_heads_are_the_originals(name, n):
    """[positions, 1, head_dim]."""
    case = CASES[name]["rotary"][n]
    found = load(name, length=case["length"] or LENGTH)
    kinds = {layer.type: layer.rotary for layer in found.layers} | {None: found.layers[0].rotary}
    theirs, positions = unpack(case["rotated"]), np.asarray(case["positions"])
    heads = np.arange(theirs.size, dtype=np.float32).reshape(theirs.shape)
    heads = (heads * 5 % 17 - 8) / 8
    ours = np.asarray(te.apply_rotary(heads, positions, **kinds[case["layer"]]))
    # No frequency is above 1 radian a position, and a pair is as long as two channels.
    angle_errors = positions[:, None, None] * THEIR_ANGLE * np.sqrt(2) * np.abs(heads).max()
    assert np.all(np.abs(ours - theirs) <= SAME + angle_errors)
    near(ours[positions < 10], theirs[positions < 10], atol=SAME)
    assert np.abs(theirs - heads)[1:].max(axis=(1, 2)).min() > 0.1


@pytest.mark.parametrize("name", ["t5", "t5, its decoder", "t5, rounded buckets"])
def test_t5_bias_is_the_originals(name):
    found = load(name)
    bias = hk.transform(lambda: te.RelativePositionBias(**found.bias)([999, 0], range(1000)))
    ours = np.asarray(bias.apply(found.params, None)).swapaxes(0, 1)
    differing = np.argwhere((np.abs(ours - unpack(CASES[name]["bias"])) > SAME).any(1))
    # 54 is 24 * (81 / 24) ** (16 / 24), the first distance of a bucket, which float32 logarithms
    # put into the one before.
    assert differing.tolist() == ([[0, 999 - 54]] if name == "t5, rounded buckets" else [])
    assert found.bias["causal"] == (name != "t5")
    assert len(np.unique(ours)) > 20


# --- The output layer.


@pytest.mark.parametrize("name", HEADS)
def test_logits_equal_the_model(name):
    """Of the model's own hidden states. Saving and loading are drawn in test_forms.py."""
    case = HEADS[name]
    found = load_embedder(checkpoint(case), stack=case["stack"])
    used = [
        key for key in case["tensors"] if re.search("head|final_logits|embed_out|pred_|output", key)
    ]
    assert sorted(used) == sorted(each for key, each in found.names.items() if "output" in key)
    output = te.Embedder(found.config).output(found.params)
    assert_same(te.linear_logits(unpack(case["states"]), output), unpack(case["logits"]))


NOT_THERE = (
    "the file has no lm_head.weight (dequantize a quantized model first), and it is not tied to "
    "the table"
)


HEAD, UNTIED = "lm_head.weight", te.OutputConfig(tied=False)


def output_of(found):
    """The output layer, or why there is none."""
    has_own = any("output" in key for key in found.names)
    output = found.config.output
    assert has_own == (output is not None and (output.bias or not output.tied))
    return output or found.no_output


def whole(name, rows=None, **entries):
    """Of a whole model, whose head has as many rows of the table; 0: it has none."""
    case = HEADS[name]
    change = {HEAD: tensors_of(case)[EMBED_TOKENS][:rows]} if rows else {}
    settings = {"text_config": case["settings"]} | entries
    path = checkpoint(case, settings=settings, drop=[HEAD] * (rows == 0), change=change)
    return output_of(load_embedder(path))


# A whole model may leave out the scale and softcap of its text model, and says whether it is tied,
# unless the tables differ.
OUTPUTS = {
    "output_of(load('bert with a head'))": "a dense layer and a norm come before it",
    "output_of(load('clip with images'))": "it has none",
    "output_of(load('bart, untied encoder'))": "it is the decoder's, which stack='decoder' loads",
    "output_of(load('llama, older'))": NOT_THERE,
    "whole('granite', model_type='llava_next')": UNTIED,
    "whole('gemma2', model_type='llava')": te.OutputConfig(),
    "whole('gemma2', model_type='paligemma')": te.OutputConfig(softcap=0.75),
    "whole('cohere', model_type='fuyu')": "fuyu may leave out the scale and softcap of its text model",
    "whole('llama', model_type='fuyu')": UNTIED,
    "whole('llama', tie_word_embeddings=True)": UNTIED,
    "whole('llama', 12, tie_word_embeddings=True)": te.OutputConfig(),
    "whole('llama', 11, tie_word_embeddings=True)": "its shape is [11, 8], not [12, 8]",
    "whole('phi', 0, tie_word_embeddings=True)": te.OutputConfig(bias=True),
    "whole('qwen2, tied', tie_word_embeddings=False)": NOT_THERE,
    "whole('qwen2, tied', tie_word_embeddings=None)": te.OutputConfig(),
}  # fmt: skip


@pytest.mark.parametrize("call", OUTPUTS)
def test_which_output_layer_is_read_and_why_not(call):
    assert eval(call) == OUTPUTS[call]


# --- The documentation.

NOTEBOOKS = GOLDEN.parents[1] / "notebooks"


def test_every_model_named_is_tested():
    """By a golden file, or by the sweep whose table is in the documentation."""
    tested = {case["settings"]["model_type"] for case in CASES.values()}
    page = (NOTEBOOKS / "supported_models.md").read_text()
    page = re.sub("(?s)^.*?(?=## How to)|## Refused, because.*?(?=## Not)", "", page)
    # MiniCPM and new are not in that library, and compute what MiniCPM 3 and GTE do; the others
    # are parts of models.
    unswept = "minicpm new voxtral_realtime_text kimi_k2 exaone4_5_text esm"
    assert {*registry.MODEL_TYPES} - tested - {*re.findall(r"`([^`]+)`", page)} == {
        *unswept.split()
    }


def test_rows_name_entries_that_are_known():
    """What is neither a field nor an entry is a slip of the pen."""
    for name in registry.MODEL_TYPES:
        row = registry.model_type_or_none(name)
        named = {*row.entries, *row.unread.split(), *row.aliases.split(":")[:1]} - {""}
        assert named <= ENTRIES.keys(), name
        assert not {*row.unread.split()} & row.names_of_entries().keys(), name


def test_windows_that_a_row_speaks_of_have_a_width():
    """A row with a period of sliding layers, or with their rotation, says how wide windows are."""
    widths = {"sliding_window", "local_attention", "sliding_window_size"}
    for name in registry.MODEL_TYPES:
        row = registry.model_type_or_none(name)
        if "sliding_attention" in row.kinds and "sliding_window_pattern" in row.entries:
            assert widths & row.entries.keys(), name


def rows_of_contributing(n):
    """A block of code under "Add a published model"."""
    page = (NOTEBOOKS / "contributing.md").read_text().split("### Add a published model")[1]
    names = vars(encoder_types) | vars(llama_types)
    return eval(re.findall(r"```\n(\{.*?)```", page, re.S)[n], names)


def test_a_new_type_is_one_row(monkeypatch):
    monkeypatch.setattr(registry, "MODEL_TYPES", rows_of_contributing(0))
    for name, base in (("a_new_type", 1e4), ("another_new_type", 1e6)):
        found = load_table({"model_type": name})
        assert rotary_of(found) == {"base": base, "layout": "half"}


def test_a_new_architecture_is_one_row(monkeypatch):
    monkeypatch.setattr(registry, "MODEL_TYPES", rows_of_contributing(1))
    entries = {"norm_eps": 0.5, "multiplier": 1.5, "rope_theta": 70.0}
    tensors = {"m.tok.weight": (12, 16), "m.tok_norm.weight": (16,)}
    found = load_table({"model_type": "a_new_architecture"} | entries, **tensors)
    options = {"scheme": None, "scale": 1.5, "layer_norm_eps": 0.5, "output": None}
    assert found.config == te.EmbedderConfig(12, 16, **options)
    assert found.no_output == NOT_THERE
    assert rotary_of(found) == {"base": 70.0, "layout": "interleaved"}
