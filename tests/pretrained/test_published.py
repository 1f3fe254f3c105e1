"""Which model a file holds: by its type, by names of tensors, or an error that says what to try."""

import pytest
from checkpoints import (
    CASES,
    EMBED_TOKENS,
    ROOT,
    assert_identical,
    checkpoint,
    golden,
    load,
    load_embedder,
    load_table,
    rotary_of,
    save_embedder,
    tensors_of,
)

from transformer_embed._src.pretrained import architecture
from transformer_embed._src.pretrained.checkpoints import decoded


@pytest.mark.parametrize("case", golden("published_forms.json", object_hook=decoded))
def test_published_forms_are_read_and_read_back(case):
    """What files of published models say, and which layers, rotations, masks and biases they mean;
    the file says why."""
    found = load_table(case["entries"], length=case.get("length"), **case["tensors"])
    values = found._asdict() | vars(found.config) | {"rotary": rotary_of(found)}
    assert {field: values[field] for field in case["expected"]} == case["expected"]
    save_embedder("saved", *found)
    again = load_embedder("saved")
    assert (again.config, again.layers, again.bias) == (found.config, found.layers, found.bias)


def test_older_names_of_a_norm():
    case, new = CASES["bert"], load("bert")
    norms = {name: array for name, array in tensors_of(case).items() if "LayerNorm" in name}
    gamma = lambda name: name.replace("weight", "gamma").replace("bias", "beta")
    old = {gamma(name): array for name, array in norms.items()}
    found = load_embedder(checkpoint(case, drop=norms, change=old))
    assert_identical(new, found._replace(names=new.names))
    assert "embeddings.LayerNorm.gamma" in found.names.values()


def test_each_stack_of_two_vocabularies_has_its_own_size():
    path = checkpoint(CASES["marian, two vocabularies"])
    found = [load_embedder(path, stack=stack) for stack in architecture.STACKS]
    assert [each.config.vocab_size for each in found] == [12, 15]


def test_buffers_and_other_streams_are_left_out():
    others = """model.embed_positions.position_ids model.layers.0.rotary_emb.inv_freq
    model.rotary_emb.inv_freq vision.embed_positions.weight model.image_embeddings.weight"""
    found = load_table({"model_type": "llama"}, EMBED_TOKENS, *others.split())
    assert list(found.params) == [f"{ROOT}token_embedding"]


# --- Files that are refused.


@pytest.mark.parametrize("name", ["albert", "bert", "llama", "t5"])
def test_names_that_models_share_want_a_model_type(name):
    """No model is proposed: those that fit by names may rotate other pairs."""
    path = checkpoint(CASES[name], settings={})
    start = r"^model_type: wanted that of a known model, from settings or .*config\.json, "
    with pytest.raises(ValueError, match=start + r"got None; load any table with config and names"):
        load_embedder(path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["weird.table", "h.0.w", "h.1.w", "h.2.w"], r"names \(4 tensors: weird\.table, h\.0\.w, h\.1\.w, h\.2\.w\)$"),
        ([f"{'deep.' * 15}{n}.{'x' * 60}" for n in range(26)], r"names \(26 tensors: "),
    ],
)  # fmt: skip
def test_a_model_of_an_unknown_type_names_some_tensors(names, message):
    with pytest.raises(ValueError, match=message) as error:
        load_table({"model_type": "mamba9"}, *names)
    assert len(str(error.value)) < 900


def test_two_models_in_one_file():
    case = CASES["bert"]
    twice = {f"{side}.{name}": value for side in "qc" for name, value in case["tensors"].items()}
    message = r"wanted the tensors of one model bert, or .*, got those under \['c\.', 'q\.'\]"
    with pytest.raises(ValueError, match=message):
        load_embedder(checkpoint(case | {"tensors": twice}))


@pytest.mark.parametrize(
    ("name", "stack", "message"),
    [
        ("bert", "decoder", r"^stack: wanted None, since bert has one stack, got str 'decoder'$"),
        ("t5, an encoder alone", "decoder", r"tensors of one model t5 \(its decoder; `stack` says which\), or load any table .*, got \d+ tensors: .*shared\.w"),
        ("t5", "both", r"^stack: wanted one of 'encoder', 'decoder', got 'both'$"),
        ("own", "decoder", r"^stack: wanted None, since names or metadata say what it would, got str 'dec"),
    ],
)  # fmt: skip
def test_a_stack_that_is_not_there(name, stack, message):
    save_embedder("own", *load("t5"))
    path = "own" if name == "own" else checkpoint(CASES[name])
    with pytest.raises(ValueError, match=message):
        load_embedder(path, stack=stack)


def test_a_decoder_alone_says_to_pass_the_stack():
    case = CASES["bart, its decoder"]
    drop = [name for name in case["tensors"] if "encoder" in name or "shared" in name]
    rows = {"model.decoder.embed_tokens.weight": tensors_of(case)["model.shared.weight"]}
    path = checkpoint(case, drop=drop, change=rows)
    message = r"one model bart \(its encoder; `stack` .*, got \d+ tensors"
    with pytest.raises(ValueError, match=message):
        load_embedder(path)
    assert load_embedder(path, stack="decoder").config.d_model == 8


BIAS_OF_0 = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


@pytest.mark.parametrize(
    ("model_type", "tensors"),
    [
        ("opt", ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight", "model.decoder.project_in.weight"]),
        ("t5", ["shared.weight", BIAS_OF_0, BIAS_OF_0.replace("block.0", "block.1")]),
        ("llama", [EMBED_TOKENS, "model.embed_positions.weight"]),
        ("llama", [EMBED_TOKENS, "model.token_type_embeddings.weight"]),
        ("t5", ["shared.weight", BIAS_OF_0, "encoder.embed_positions.weight"]),
        ("gpt2", ["wte.weight", "wpe.weight", "lang_embeddings.weight"]),
    ],
)  # fmt: skip
def test_tensors_of_another_input_layer_are_named(model_type, tensors):
    want = (
        f"wanted an input layer like that of {model_type}, or load any table with config and names"
    )
    with pytest.raises(ValueError, match=f"{want}, got also {tensors[-1]}, which is not read$"):
        load_table({"model_type": model_type}, *tensors)
