"""Which model a file holds: by its type, by names of tensors, or an error that says what to try."""

import numpy as np
import pytest
from checkpoints import (
    CASES,
    ROOT,
    assert_identical,
    checkpoint,
    load,
    load_embedder,
    save_embedder,
    table,
    tensors_of,
)
from safetensors.numpy import save_file

from transformer_embed._src.pretrained import architecture


def test_older_names_of_a_norm(tmp_path):
    case = CASES["bert"]
    norms = {name: array for name, array in tensors_of(case).items() if "LayerNorm" in name}
    gamma = lambda name: name.replace("weight", "gamma").replace("bias", "beta")
    old = {gamma(name): array for name, array in norms.items()}
    new = load(tmp_path, "bert")
    found = load_embedder(checkpoint(tmp_path, case, drop=norms, change=old))
    assert_identical(new, found._replace(names=new.names))
    assert "embeddings.LayerNorm.gamma" in found.names.values()


def test_each_stack_of_two_vocabularies_has_its_own_size(tmp_path):
    folder = checkpoint(tmp_path, CASES["marian, two vocabularies"])
    found = [load_embedder(folder, stack=stack) for stack in architecture.STACKS]
    assert [each.config.vocab_size for each in found] == [12, 15]


# --- Names that models share.


@pytest.mark.parametrize("name", ["albert", "bert", "llama", "t5"])
def test_names_that_models_share_want_a_model_type(tmp_path, name):
    """No model is proposed: those that fit by names may rotate other pairs."""
    path = checkpoint(tmp_path, CASES[name], settings={})
    start = r"^model_type: wanted that of a known model, from settings or .*config\.json, "
    with pytest.raises(ValueError, match=start + r"got None; load any table with config and names"):
        load_embedder(path)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"weird.table": (5, 4)} | {f"h.{n}.w": (2, 2) for n in range(3)},
         r"names \(4 tensors: weird\.table, h\.0\.w, h\.1\.w, h\.2\.w\)$"),
        ({f"{'deep.' * 15}{n}.{'x' * 60}": (1,) for n in range(26)}, r"names \(26 tensors: "),
    ],
)  # fmt: skip
def test_a_model_of_an_unknown_type_names_some_tensors(tmp_path, shapes, message):
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", {})
    with pytest.raises(ValueError, match=message) as error:
        load_embedder(tmp_path, settings={"model_type": "mamba9"})
    assert len(str(error.value)) < 900


# --- Files that are refused.


def test_two_models_in_one_file(tmp_path):
    case = CASES["bert"]
    twice = {f"{side}.{name}": value for side in "qc" for name, value in case["tensors"].items()}
    with pytest.raises(
        ValueError,
        match=r"wanted the tensors of one model bert, or .*, got those under \['c\.', 'q\.'\]",
    ):
        load_embedder(checkpoint(tmp_path, case | {"tensors": twice}))


def test_a_stack_that_is_not_there(tmp_path):
    for name, stack, message in [
        ("bert", "decoder", r"^stack: wanted None, since bert has one stack, got str 'decoder'$"),
        ("t5, an encoder alone", "decoder", r"tensors of one model t5 \(its decoder; `stack` says which\), or load any table .*, got \d+ tensors: .*shared\.w"),
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
    message = r"one model bart \(its encoder; `stack` .*, got \d+ tensors"
    with pytest.raises(ValueError, match=message):
        load_embedder(path)
    assert load_embedder(path, stack="decoder").config.d_model == 8


ANOTHER = "wanted an input layer like that of {}, or load any table with config and names, got "
LLAMA = ["model.embed_tokens.weight"]
BIAS_OF_0 = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


@pytest.mark.parametrize(
    ("entries", "tensors"),
    [
        ({"model_type": "opt"}, ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight", "model.decoder.project_in.weight"]),
        ({"model_type": "t5"}, ["shared.weight", BIAS_OF_0, BIAS_OF_0.replace("block.0", "block.1")]),
        ({"model_type": "llama"}, [*LLAMA, "model.embed_positions.weight"]),
        ({"model_type": "llama"}, [*LLAMA, "model.token_type_embeddings.weight"]),
        ({"model_type": "t5"}, ["shared.weight", BIAS_OF_0, "encoder.embed_positions.weight"]),
        ({"model_type": "gpt2"}, ["wte.weight", "wpe.weight", "lang_embeddings.weight"]),
    ],
)  # fmt: skip
def test_tensors_of_another_input_layer_are_named(tmp_path, entries, tensors):
    got = f"also {tensors[-1]}, which is not read"
    with pytest.raises(ValueError, match=ANOTHER.format(entries["model_type"]) + f"{got}$"):
        load_embedder(table(tmp_path, entries, *tensors))


def test_buffers_and_other_streams_are_left_out(tmp_path):
    others = """model.embed_positions.position_ids model.layers.0.rotary_emb.inv_freq
    model.rotary_emb.inv_freq vision.embed_positions.weight model.image_embeddings.weight"""
    found = load_embedder(table(tmp_path, {"model_type": "llama"}, *LLAMA, *others.split()))
    assert list(found.params) == [f"{ROOT}token_embedding"]
