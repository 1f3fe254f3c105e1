"""Entries of config.json that concern a layer and that nothing reads: errors name them."""

import json

import pytest
from checkpoints import GOLDEN, load_embedder, published, rotary_of, table

import transformer_embed as te
from transformer_embed._src.pretrained import architectures, description

LLAMA = {"model_type": "llama"}
BY_BASE = {"model_type": "granite_swa"}
HALF, TURNED = {"layout": "half"}, {"layout": "interleaved"}
EMBED_TOKENS, WTE = "model.embed_tokens.weight", "transformer.wte.weight"


def test_an_entry_that_concerns_the_layer_is_refused_by_name(tmp_path):
    """Unless settings say that it means nothing."""
    path = table(tmp_path, LLAMA | {"rotary_fancy": 3, "rope_odd": 4})
    message = (
        r"config.json, for a model llama: wanted no entry that concerns the layer and is not read "
        r"\(if they mean nothing here: settings=\{'rotary_fancy': None, 'rope_odd': None\}\), got "
        r"rotary_fancy: 3, rope_odd: 4$"
    )
    with pytest.raises(ValueError, match=message):
        load_embedder(path)
    load_embedder(path, settings={"rotary_fancy": None, "rope_odd": None})


@pytest.mark.parametrize(
    "entries",
    [
        {"rotary_dim": 8},
        {"alibi": True},
        {"embedding_multiplier": 2.0},
        {"final_logit_softcapping": 30.0},
        {"position_embedding_type": "relative_key"},
        {"no_rope_layers": [1, 0]},
        {"share_tables": True},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1000.0}},
    ],
)
def test_entries_of_other_models_are_refused_in_a_llama(tmp_path, entries):
    (name,) = entries
    with pytest.raises(ValueError, match=f"is not read .*, got {name}: "):
        load_embedder(table(tmp_path, LLAMA | entries))


def test_alibi_inside_the_attention_of_mpt_is_read(tmp_path):
    """As MPT's own code does; the transformers library adds a bias of 8 whatever it says."""
    entries = {"model_type": "mpt", "d_model": 16, "n_heads": 4}
    said = {"alibi": True, "alibi_bias_max": 16, "softmax_scale": 2.0}
    for attn_config, max_bias in ((None, 8.0), ({}, 8.0), (said, 16.0)):
        found = load_embedder(table(tmp_path, entries | {"attn_config": attn_config}, WTE))
        assert found.bias == {"num_heads": 4, "max_bias": max_bias}


OF_NEW_ROWS = [
    (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 9.0}}, EMBED_TOKENS, "is not read .*, got rope_scaling: alpha: 9.0"),
    # The library adds the scaling of the type's default.
    ({"model_type": "gpt_oss", "rope_theta": 150_000.0}, EMBED_TOKENS,
     "wanted rope_scaling of gpt_oss, from settings or a config.json"),
    (BY_BASE | {"layer_rope_theta": [1e4]}, EMBED_TOKENS, "layer_rope_theta: wanted a value for each layer, 6, got 1"),
    (LLAMA | {"layer_types": ["sliding_attention"] * 6}, EMBED_TOKENS, "layer_types: wanted full_attention, since a model llama has no windows"),
    (LLAMA | {"per_layer_config": {"3": {"rope_theta": 1e4}}}, EMBED_TOKENS,
     r"per_layer_config: 3: wanted no entries but head_dim, sliding_window, .*, got \['rope_theta'\]$"),
    (LLAMA | {"num_hidden_layers": 10**12}, EMBED_TOKENS, "num_hidden_layers: wanted an int of at most 1024, got 1000"),
    (LLAMA | {"num_hidden_layers": None}, EMBED_TOKENS, "num_hidden_layers: wanted an int of at least 1, got 0"),
    ({"model_type": "xlm", "asm": True}, "embeddings.weight position_embeddings.weight layer_norm_emb.weight layer_norm_emb.bias",
     "is not read .*, got asm: True$"),
    ({"model_type": "esm", "token_dropout": True}, "embeddings.word_embeddings.weight",
     r"token_dropout: wanted False, and embeddings multiplied by 0\.88 / \(1 - the share of <mask>"),
    ({"text_config": {"model_type": "mllama_text_model", "vocab_size": 4}}, "language_model.model.embed_tokens.weight",
     r"vocab_size: wanted 12, as the tensors say \(if they are right: settings=.*, got 4$"),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "tensors", "message"), OF_NEW_ROWS)
def test_what_a_row_cannot_say_is_refused_with_the_reason(tmp_path, entries, tensors, message):
    with pytest.raises(ValueError, match=message):
        load_embedder(table(tmp_path, entries, *tensors.split()))


def test_entries_that_say_nothing_or_concern_other_parts_are_left_out(tmp_path):
    entries = {
        "rotary_fancy": None,
        "rope_interleaved": False,
        "embedding_multiplier": 1.0,
        "position_embedding_type": "absolute",
        "attention_multiplier": 0.3,
        "rms_norm_eps": 0.1,
        "initializer_factor": 2.0,
        "n_positions": 9,
        "num_key_value_heads": 2,
        "pad_token_id": 3,
        "rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True},
    }
    found = load_embedder(table(tmp_path, LLAMA | entries))
    assert rotary_of(found) == HALF | {"base": 10_000.0, "scaling": te.LinearScaling(2.0)}


def test_meaningless_entries_concern_the_layer():
    """Otherwise they need not be listed."""
    inside_a_scaling = {"max_position_embeddings", "interleaved"}
    for types in architectures.FAMILIES:
        for kind in map(architectures.by_model_type, types.split()):
            bare = kind._replace(meaningless="")
            for entry in set(kind.meaningless.split()) - inside_a_scaling:
                assert bare.concerns(f"rope_scaling: {entry}", "x"), entry


def test_published_files_are_not_refused():
    """What they say besides is known to mean nothing."""
    published = json.loads((GOLDEN / "config_entries.json").read_text(encoding="utf-8"))
    for model_type, entries in published.items():
        kind = architectures.by_model_type(model_type)
        _, unread = description.read(kind, entries)
        concerning = [name for name, value in unread.items() if kind.concerns(name, value)]
        assert concerning == [], model_type


@pytest.mark.parametrize(("entries", "tensors", "expected"), published("forms"))
def test_published_forms_are_read(tmp_path, entries, tensors, expected):
    names = tensors.split()
    tables = [name for name in names if name.endswith(".weight")]
    norms = {
        f"{norm}.{end}": (16,) for norm in set(names) - set(tables) for end in ("weight", "bias")
    }
    found = load_embedder(table(tmp_path, entries, *tables, **norms))
    for field, value in expected.items():
        if field == "rotary":
            assert rotary_of(found) == value
        else:
            assert getattr(found if field in found._fields else found.config, field) == value
