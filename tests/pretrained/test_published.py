"""Which model a file holds: by its type, by names of tensors, or an error that says what to try."""

import re
from pathlib import Path

import numpy as np
import pytest
from cases import few
from checkpoints import (
    CASES,
    ROOT,
    TOKENS,
    assert_identical,
    checkpoint,
    golden,
    kind_of,
    load,
    load_embedder,
    save_embedder,
    table,
    tensors_of,
)
from safetensors.numpy import save_file

import transformer_embed as te
from transformer_embed._src.pretrained import architecture, files, published, recognition


@pytest.mark.parametrize("name", few(CASES, 10))
def test_settings_alone_say_what_config_json_does(tmp_path, name):
    """Or what it leaves out, which has no default here, is asked for."""
    beside, case = load(tmp_path, name), CASES[name]
    (tmp_path / "config.json").unlink()
    text = case["settings"].get("text_config", case["settings"])
    read = {"model_type"}.union(*kind_of(case).names().values())
    said = {entry: value for entry, value in text.items() if entry in read}
    try:
        alone = load_embedder(tmp_path, stack=case["stack"], settings=said)
    except ValueError as error:
        asked = re.search(r": wanted (.*) of \w+, from settings or", str(error))[1]
        if set(asked.split(", ")) & said.keys():
            raise
        return
    assert_identical(beside, alone)


@pytest.mark.parametrize("name", ["albert", "gpt2", "clip"])
def test_without_a_config_names_and_shapes_tell_the_model(tmp_path, name):
    path = checkpoint(tmp_path, CASES[name], settings={})
    said = {"layer_norm_eps": 1e-12} if name == "albert" else {}
    found = load_embedder(path, settings=said)
    other = load(tmp_path, name)
    assert (found.names, found.config.scheme) == (other.names, other.config.scheme)


def test_older_names_of_a_norm(tmp_path):
    case = CASES["bert"]
    norms = {name: array for name, array in tensors_of(case).items() if "LayerNorm" in name}
    gamma = lambda name: name.replace("weight", "gamma").replace("bias", "beta")
    old = {gamma(name): array for name, array in norms.items()}
    new = load(tmp_path, "bert")
    found = load_embedder(checkpoint(tmp_path, case, drop=norms, change=old))
    assert_identical(new, found._replace(names=new.names))
    assert "embeddings.LayerNorm.gamma" in found.names.values()


@pytest.mark.parametrize("outer", ["gemma3", "llava"])
def test_a_text_model_inside_of_another(tmp_path, outer):
    case = CASES["gemma3"]
    inside = {f"language_model.{name}": value for name, value in case["tensors"].items()}
    settings = {"model_type": outer, "text_config": case["settings"]}
    found = load_embedder(checkpoint(tmp_path, case | {"tensors": inside}, settings=settings))
    assert found.names[TOKENS] == "language_model.model.embed_tokens.weight"
    assert found.layers == load(tmp_path, "gemma3").layers


def test_each_stack_of_two_vocabularies_has_its_own_size(tmp_path):
    folder = checkpoint(tmp_path, CASES["marian, two vocabularies"])
    found = [load_embedder(folder, stack=stack) for stack in architecture.STACKS]
    assert [each.config.vocab_size for each in found] == [12, 15]


# --- Names that models share.

# Input layers that compute the same, under names that only they share: it does not matter which of
# them it is.
SAME = {
    "gpt2": "gpt-sw3 gpt_bigcode gpt_neo imagegpt",
    "clip": "aimv2 clipseg groupvit metaclip_2 owlv2 owlvit sam3 sam3_video siglip siglip2 xclip",
    "roberta": "altclip xmod",
    "gpt_neox": "gpt_neox_japanese",
    "albert": "rembert",
}


@pytest.mark.slow
def test_names_of_tensors_that_other_models_share_are_asked_for():
    """300 model types of the transformers library whose names match one of ours."""
    foreign, path = golden("foreign_names.json"), Path("none/model.safetensors")
    for case in foreign:
        tensors = files.Tensors(path, dict.fromkeys(case["names"], path), {}, lambda path: ({}, {}))
        for stack in architecture.STACKS:
            known = recognition.type_by_names(published.Published(tensors, stack))
            assert known is None or set(case["model_types"]) <= set(SAME[known].split()), case
    types = {each for case in foreign for each in case["model_types"]}
    assert {"whisper", "blenderbot-small", "led", "umt5"} <= types


def advised(path, start, **options):
    """What the call gives that an error proposes."""
    with pytest.raises(ValueError, match=start) as error:
        load_embedder(path, **options)
    message = str(error.value)
    assert len(message) < 1200
    line = re.search(r"table of tokens alone: (load_embedder\(.*?\}\))", message)
    names = vars(te) | {"load_embedder": load_embedder, "path": path}
    return line and eval(line[1], names)


@pytest.mark.parametrize("name", few(CASES, 8))
def test_an_unknown_type_names_the_table_alone(tmp_path, name):
    """What is printed is followed: it is right or not there."""
    case, known = CASES[name], load(tmp_path, name)
    entries, stack = case["settings"], case["stack"]
    text = entries.get("text_config", entries) | {"model_type": "mamba9"}
    path = checkpoint(tmp_path, case, settings=text)
    alone = advised(path, r"^model_type: wanted .*, got 'mamba9'; ", stack=stack)
    has_several = name.endswith(("untied encoder", "untied decoder", "two vocabularies"))
    assert (alone is None) == has_several
    assert alone is None or alone.names == {TOKENS: known.names[TOKENS]}


@pytest.mark.parametrize("name", ["bert", "llama", "marian", "t5"])
def test_names_that_models_share_want_a_model_type(tmp_path, name):
    path = checkpoint(tmp_path, CASES[name], settings={})
    start = f"^model_type: wanted that of a known model, from .* beside {re.escape(str(path))}, got None; "
    alone = advised(path, start)
    assert alone.names[TOKENS] == load(tmp_path, name).names[TOKENS]


@pytest.mark.parametrize(
    ("entries", "scale"),
    [
        ({}, False),
        ({"scale_embedding": True, "tie_word_embeddings": False}, True),
        ({"embedding_multiplier": 3.0}, 3.0),
        ({"mup_enabled": True, "hidden_size": 16}, True),
        # Nothing certain is said.
        ({"scale_embedding": 0.5}, None),
        ({"emb_multiplier": 0.5}, None),
        ({"model_type": "llama", "input_embedding_scale": 2.0}, None),
        # Known types, whose input layer is not like theirs.
        ({"model_type": "llama"}, False),
        ({"model_type": "gemma"}, True),
        ({"model_type": "granite", "embedding_multiplier": 3.0}, 3.0),
        ({"model_type": "granite"}, False),
    ],
)
def test_the_call_for_a_table_alone_says_what_the_file_says(tmp_path, entries, scale):
    """It said scale=False and a tied output layer, whatever config.json says."""
    entries = {"model_type": "mamba9"} | entries
    path = table(tmp_path, entries, "model.embed_tokens.weight", "model.embed_positions.weight")
    alone = advised(path, "wanted")
    assert (alone is None) == (scale is None)
    assert alone is None or (alone.config.scale, alone.config.output) == (scale, None)


EMBEDDINGS = "embeddings.token_embedding.weight"


@pytest.mark.parametrize(
    ("shapes", "alone", "message"),
    [
        # Names that fit with other widths, such as an encoder of images', are no model.
        ({EMBEDDINGS: (6, 4), "embeddings.position_embedding.weight": (3, 2)}, EMBEDDINGS, "got 'mamba9'; load its table of tokens"),
        ({"layers.0.embedding.weight": (9, 4), "token_type_embeddings.weight": (9, 4)}, None, "got 'mamba9'; load any table with"),
        ({"a.embed_tokens.weight": (9, 4), "b.embed_tokens.weight": (8, 4)}, None, "got 'mamba9'; load any table with"),
        ({"embed_tokens.weight": (9,)}, None, "got 'mamba9'; load any table with config and names \\(1 tensors: embed_tokens.weight\\)"),
        ({"weird.table": (5, 4)} | {f"h.{n}.w": (2, 2) for n in range(3)}, None,
         r"names \(4 tensors: weird\.table, h\.0\.w, h\.1\.w, h\.2\.w\)$"),
        ({f"{'deep.' * 15}{n}.{'x' * 60}": (1,) for n in range(26)}, None, r"names \(26 tensors: "),
    ],
)  # fmt: skip
def test_no_table_is_proposed_that_is_not_certain(tmp_path, shapes, alone, message):
    tensors = {
        name: np.full(shape, n, np.float32) for n, (name, shape) in enumerate(shapes.items())
    }
    save_file(tensors, tmp_path / "model.safetensors", {})
    found = advised(tmp_path, message, settings={"model_type": "mamba9"})
    assert (found and found.names) == (alone and {TOKENS: alone})


# --- Files that are refused.


def test_two_models_in_one_file(tmp_path):
    case = CASES["bert"]
    twice = {f"{side}.{name}": value for side in "qc" for name, value in case["tensors"].items()}
    with pytest.raises(
        ValueError,
        match=r"wanted one model bert in a file .*, got those under \['c\.', 'q\.'\]",
    ):
        load_embedder(checkpoint(tmp_path, case | {"tensors": twice}))


def test_a_stack_that_is_not_there(tmp_path):
    for name, stack, message in [
        ("bert", "decoder", r"^stack: wanted None, since bert has one stack, got str 'decoder'$"),
        ("t5, an encoder alone", "decoder", r"tensors of a model t5, or its table .*, got \d+ tensors: .*shared\.w"),
        ("t5", "both", r"^stack: wanted one of 'encoder', 'decoder', got 'both'$"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            load(tmp_path, name) and load_embedder(tmp_path, stack=stack)
    save_embedder(tmp_path / "own", *load(tmp_path, "t5"))
    said = r"^stack: wanted None, since names or metadata say what it would, got str 'dec"
    with pytest.raises(ValueError, match=said):
        load_embedder(tmp_path / "own", stack="decoder")


def test_a_decoder_alone_says_to_pass_the_stack(tmp_path):
    case = CASES["bart, its decoder"]
    drop = [name for name in case["tensors"] if "encoder" in name or "shared" in name]
    rows = {"model.decoder.embed_tokens.weight": tensors_of(case)["model.shared.weight"]}
    path = checkpoint(tmp_path, case, drop=drop, change=rows)
    message = r"wanted the encoder of bart; pass stack='decoder' for its decoder, got \d+ tensors"
    with pytest.raises(ValueError, match=message):
        load_embedder(path)
    assert load_embedder(path, stack="decoder").config.d_model == 8


ANOTHER = "wanted an input layer like that of {}, or its table of tokens alone: .*, got "
LLAMA = ["model.embed_tokens.weight"]
BIAS_OF_0 = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


@pytest.mark.parametrize(
    ("entries", "tensors", "got"),
    [
        ({"model_type": "opt"}, ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight", "model.decoder.project_in.weight"],
         "it widens tokens before positions are added"),
        ({"model_type": "t5"}, ["shared.weight", BIAS_OF_0, BIAS_OF_0.replace("block.0", "block.1")],
         "every layer has a bias of its own, as in UMT5"),
        ({"model_type": "llama"}, [*LLAMA, "model.embed_positions.weight"], None),
        ({"model_type": "llama"}, [*LLAMA, "model.token_type_embeddings.weight"], None),
        ({"model_type": "t5"}, ["shared.weight", BIAS_OF_0, "encoder.embed_positions.weight"], None),
        ({"model_type": "gpt2"}, ["wte.weight", "wpe.weight", "lang_embeddings.weight"], None),
    ],
)  # fmt: skip
def test_tensors_of_another_input_layer_are_named(tmp_path, entries, tensors, got):
    got = got or f"also {tensors[-1]}, which is not read"
    with pytest.raises(ValueError, match=ANOTHER.format(entries["model_type"]) + f"{got}$"):
        load_embedder(table(tmp_path, entries, *tensors))


def test_buffers_and_other_streams_are_left_out(tmp_path):
    others = """model.embed_positions.position_ids model.layers.0.rotary_emb.inv_freq
    model.rotary_emb.inv_freq vision.embed_positions.weight model.image_embeddings.weight"""
    found = load_embedder(table(tmp_path, {"model_type": "llama"}, *LLAMA, *others.split()))
    assert list(found.params) == [f"{ROOT}token_embedding"]
