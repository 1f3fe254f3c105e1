"""Which model a file holds: by its type, by names of tensors, or an error that says what to try."""

import dataclasses
import json
import pathlib

import pytest
from cases import few
from checkpoints import (
    CASES,
    EMBED_TOKENS,
    HEADS,
    ROOT,
    TOKENS,
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
from refused import each_raises, refused

import transformer_embed as te
from transformer_embed._src.pretrained import layer_parts
from transformer_embed._src.pretrained.own_files import decode_from_json

FORMS = golden("published_forms.json", object_hook=decode_from_json)


def of_form(case):
    return load_table(case["entries"], length=case.get("length"), **case["tensors"])


@pytest.mark.parametrize("case", FORMS)
def test_published_forms_are_read(case):
    """What files of published models say, and which layers, rotations, masks and biases they mean;
    the file says why."""
    found = of_form(case)
    # Attention has a test of its own.
    layers = tuple(
        dataclasses.replace(each, attention=None, norm_eps=None) for each in found.layers
    )
    values = found._asdict() | vars(found.config) | {"rotary": rotary_of(found), "layers": layers}
    assert {field: values[field] for field in case["expected"]} == case["expected"]


@pytest.mark.parametrize("case", few(FORMS, 13))
def test_published_forms_are_read_back(case):
    found = of_form(case)
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
    found = [load_embedder(path, stack=stack) for stack in layer_parts.STACKS]
    assert [each.config.vocab_size for each in found] == [12, 15]


def test_buffers_and_other_streams_are_left_out():
    others = """model.embed_positions.position_ids model.layers.0.rotary_emb.inv_freq
    model.rotary_emb.inv_freq vision.embed_positions.weight model.image_embeddings.weight"""
    found = load_table({"model_type": "llama"}, EMBED_TOKENS, *others.split())
    assert list(found.params) == [f"{ROOT}token_embedding"]


# A tied model's table may be stored under the name of its output layer alone.
UNDER_THE_HEAD = {
    "llama": {"lm_head.weight": (12, 16), "model.layers.0.q.weight": (16, 16)},
    "gpt2": {"lm_head.weight": (12, 16), "transformer.wpe.weight": (9, 16), "transformer.h.0.w": (2,)},
    "opt": {
        "lm_head.weight": (12, 16),
        "model.decoder.embed_positions.weight": (9, 16),
        "model.decoder.layers.0.w": (2,),
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", UNDER_THE_HEAD)
def test_a_tied_table_under_the_heads_name_is_read(model_type):
    found = load_table(
        {"model_type": model_type, "tie_word_embeddings": True}, **UNDER_THE_HEAD[model_type]
    )
    assert found.names[TOKENS] == "lm_head.weight"
    assert (found.config.vocab_size, found.config.output) == (12, te.OutputConfig())
    assert len(found.layers) in (0, 6)
    save_embedder("saved", *found)
    assert load_embedder("saved").config == found.config


def test_an_index_may_name_a_tied_head_that_no_shard_has():
    found = load_embedder(checkpoint(HEADS["qwen2, tied"]))
    shard = pathlib.Path("model.safetensors").rename("model-1.safetensors").name
    names = [*tensors_of(HEADS["qwen2, tied"]), "lm_head.weight"]
    index = json.dumps({"weight_map": dict.fromkeys(names, shard)})
    pathlib.Path("model.safetensors.index.json").write_text(index)
    assert_identical(found, load_embedder("."))
    untied = {"tie_word_embeddings": False}
    with refused(ValueError, "model-1.safetensors: wanted a tensor lm_head.weight, which model.safetensors.index.json says is there, got ..."):  # fmt: skip
        load_embedder(".", settings=untied)


# --- A text model inside a model of a type that is not known.

SMALL_LLAMA = {"model_type": "llama", "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1}
DRAFTER = {"model_type": "a_drafter", "text_config": SMALL_LLAMA}
OWN_TENSORS = {"pre_projection.weight": (4, 4), "masked_embedding.centroids.weight": (4, 4)}
UNKNOWN = "the model type 'a_drafter' is not known, so only its text_config was read, a model llama"


def test_a_text_model_inside_an_unknown_model_is_read_with_a_warning():
    names = {"model.language_model.embed_tokens.weight": (12, 16), "lm_head.weight": (12, 16)}
    images = {"model.vision_tower.embeddings.weight": (2, 2), "model.projector.weight": (2, 2)}
    with pytest.warns(UserWarning, match=UNKNOWN):
        found = load_table(DRAFTER, **names, **images)
    assert found.config.output == te.OutputConfig(tied=False)
    with pytest.warns(UserWarning, match=UNKNOWN):
        te.pretrained.load_config(DRAFTER)


@pytest.mark.filterwarnings(f"ignore:.*{UNKNOWN}")
def test_a_drafter_is_refused_unless_its_part_is_named():
    """Its input and its logits need tensors of its own, which are beside the head."""
    names = {EMBED_TOKENS: (12, 16)} | OWN_TENSORS
    tied = DRAFTER | {"tie_word_embeddings": True}
    with refused(ValueError, "...config.json: wanted a known model around llama (part='text_config' reads the text model alone), got 'a_drafter', with masked_embedding.centroids.weight beside the output layer"):  # fmt: skip
        load_table(tied, **names)
    found = load_embedder(".", part="text_config")
    assert found.config.output is None
    assert found.no_output.startswith("a_drafter may compute its logits by masked_embedding")


# --- Files that are refused.


def own(**options):
    """A file that describes itself."""
    save_embedder("own", *load("t5"))
    return load_embedder("own", **options)


def untyped(name):
    """Without a config.json."""
    return load_embedder(checkpoint(CASES[name], settings={}))


def twice():
    case = CASES["bert"]
    tensors = {f"{side}.{name}": value for side in "qc" for name, value in case["tensors"].items()}
    return load_embedder(checkpoint(case | {"tensors": tensors}))


def model(name, *tensors):
    return load_table({"model_type": name}, *tensors)


def decoder(**options):
    """Without the encoder."""
    case = CASES["bart, its decoder"]
    drop = [name for name in case["tensors"] if "encoder" in name or "shared" in name]
    rows = {"model.decoder.embed_tokens.weight": tensors_of(case)["model.shared.weight"]}
    return load_embedder(checkpoint(case, drop=drop, change=rows), **options)


# No model is proposed: those that fit by names may rotate other pairs.
UNTYPED = "ValueError: model_type: wanted the type of a known model, from settings or ...config.json, got None; load any table with config and names"
LONG = [f"{'deep.' * 15}{n}.{'x' * 60}" for n in range(26)]
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
DEEPER = BIAS.replace("block.0", "block.1")
ANOTHER = "ValueError: ... wanted an input layer like that of {}, or load any table with config and names, got also {}, which is not read"
REFUSED = {
    "untyped('albert')": UNTYPED,
    "untyped('bert')": UNTYPED,
    "untyped('llama')": UNTYPED,
    "untyped('t5')": UNTYPED,
    "model('mamba9', 'weird.table', 'h.0.w', 'h.1.w')": "ValueError: ... names (3 tensors: weird.table, h.0.w, h.1.w)",
    "model('mamba9', *LONG)": "ValueError: ... names (26 tensors: ",
    "model('llama', 'lm_head.weight')": "ValueError: ... wanted the tensors of one model llama, ... got 1 tensors: lm_head.weight (embed_tokens.weight is missing)",
    "twice()": "ValueError: ... wanted the tensors of one model bert, or ... got those under ['c.', 'q.']",
    "load('bert', stack='decoder')": "ValueError: stack: wanted None, since bert has one stack, got str 'decoder'",
    "load('t5, an encoder alone', stack='decoder')": "ValueError: ... tensors of one model t5 (its decoder; `stack` says which), or load any table ... tensors: ...shared.w",
    "load('t5', stack='both')": "ValueError: stack: wanted one of 'encoder', 'decoder', got 'both'",
    "own(stack='decoder')": "ValueError: stack: wanted None, since names or metadata say what it would, got str 'dec",
    "own(settings={'model_type': 'mamba9'})": "ValueError: settings: wanted None, since names or metadata say what it would, got dict {'model",
    "decoder()": "ValueError: ... one model bart (its encoder; `stack` ... tensors",
    "model('opt', 'model.decoder.embed_tokens.weight', 'model.decoder.embed_positions.weight', 'model.decoder.project_in.weight')": ANOTHER.format("opt", "model.decoder.project_in.weight"),
    "model('t5', 'shared.weight', BIAS, DEEPER)": ANOTHER.format("t5", DEEPER),
    "model('t5', 'shared.weight', BIAS, 'encoder.embed_positions.weight')": ANOTHER.format("t5", "encoder.embed_positions.weight"),
    "model('llama', EMBED_TOKENS, 'model.embed_positions.weight')": ANOTHER.format("llama", "model.embed_positions.weight"),
    "model('llama', EMBED_TOKENS, 'model.token_type_embeddings.weight')": ANOTHER.format("llama", "model.token_type_embeddings.weight"),
    "model('gpt2', 'wte.weight', 'wpe.weight', 'lang_embeddings.weight')": ANOTHER.format("gpt2", "lang_embeddings.weight"),
}  # fmt: skip


def test_files_of_other_models_are_refused():
    each_raises(REFUSED, globals())
    assert decoder(stack="decoder").config.d_model == 8


def test_names_are_listed_shortly():
    with pytest.raises(ValueError, match="tensors") as error:
        model("mamba9", *LONG)
    assert len(str(error.value)) < 900
