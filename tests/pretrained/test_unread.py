"""Entries of config.json and of settings that are wrong, or that concern a layer and that nothing
reads: errors name them."""

import ast
import re

import numpy as np
import pytest
from cases import few
from checkpoints import (
    CASES,
    EMBED_TOKENS,
    LENGTH,
    checkpoint,
    golden,
    load_embedder,
    load_table,
    refused,
)
from refused import each_raises

import transformer_embed as te
from transformer_embed._src.pretrained import entry_values, known_entries, registry
from transformer_embed._src.pretrained.entries import ENTRIES
from transformer_embed._src.pretrained.model_type import EntryStatus

SLIDING = ["sliding_attention"] * 6


def in_file(name, **entries):
    """A golden model with these entries in config.json."""
    case = CASES[name]
    path = checkpoint(case, settings=case["settings"] | entries)
    return load_embedder(path, stack=case["stack"], length=LENGTH)


def said(name, **entries):
    """A golden model with these settings."""
    return load_embedder(checkpoint(CASES[name]), settings=entries, length=LENGTH)


def without(name, left_out, model_type, type_in_file):
    """A golden model whose type settings say, since config.json has another or none."""
    entries = {key: each for key, each in CASES[name]["settings"].items() if key not in left_out}
    path = checkpoint(CASES[name], settings=entries | {"model_type": type_in_file})
    return load_embedder(path, settings={"model_type": model_type})


def llama(**entries):
    return load_table({"model_type": "llama"} | entries)


def model(name, *tensors, **entries):
    return load_table({"model_type": name} | entries, *tensors)


def composite(**entries):
    return load_table({"text_config": entries}, f"language_model.{EMBED_TOKENS}")


OF_LLAMA = "ValueError: ... for a model llama: "
UNREAD = f"{OF_LLAMA}... only entries that can be read ... got "
READ = "ValueError: settings: wanted entries that a model ... reads (...), got "
POSITIVE = "wanted a number above 0 that float32 holds"
REFUSED = {
    "in_file('bert', vocab_size=13)": "ValueError: ... for a model bert: vocab_size: wanted 12, as the tensors say (...), got 13",
    "in_file('opt', max_position_embeddings=9)": "ValueError: ...embed_positions.weight: wanted shape [11, 8]",
    "in_file('t5', num_heads=3)": "ValueError: ...relative_attention_bias.weight: wanted shape [32, 3]",
    "in_file('bert', layer_norm_eps=-1)": f"ValueError: ... for a model bert: ...{POSITIVE}",
    "in_file('llama', rope_parameters={'rope_type': 'quantum'})": "ValueError: ... rope_type: wanted one of 'default', ... got 'quantum'",
    "in_file('llama', rope_parameters={'rope_type': 'linear'})": f"{OF_LLAMA}... missing 1 required positional argument: 'factor'",
    "in_file('llama', rope_parameters=[1])": f"{OF_LLAMA}rope_parameters: wanted an object, got list [1]",
    "in_file('phi', num_attention_heads=0, rope_parameters=None)": "ValueError: ... num_attention_heads: wanted an int of at least 1, got 0",
    "in_file('llama', rope_scaling={'type': 'mrope', 'mrope_section': [4, 4]})": f"{UNREAD}mrope_section: ",
    "in_file('llama', rope_scaling={'short_mscale': 1.0, 'long_mscale': 1.5})": "ValueError: ... rope_scaling: wanted equal short_mscale, long_mscale, got (1.0, 1.5)",
    "said('bert', layer_norm_epsilons=1e-3)": f"{READ}'layer_norm_ep",
    "said('llama', rotary_fancy=None)": f"{READ}'rotary_fancy'",
    "said('llama', rope_scaling={'type': 'linear', 'facter': 2})": f"{READ}'rope_scaling: facter'",
    "said('gemma3', rope_parameters={'rope_theta': 5.0})": "ValueError: ... rope_parameters: wanted an object with the entries full_attention and sliding",
    "said('llama', rope_theta=True)": "ValueError: settings: rope_theta: wanted a Python number, got bool True",
    "said('llama', rope_theta=0)": f"ValueError: settings: rope_theta: {POSITIVE}",
    "said('llama', rope_scaling={'rope_type': 'yarn', 'factor': 0})": f"ValueError: ... factor: {POSITIVE}",
    "said('phi', partial_rotary_factor=2.0)": "ValueError: settings and ...: partial_rotary_factor: wanted an int of at most 16, got 32",
    "said('roberta', pad_token_id=None)": "ValueError: settings and ...: pad_token_id: wanted a Python int, got None",
    # Without the type in the file there are no defaults.
    "without('bert', ['layer_norm_eps'], 'bert', None)": "ValueError: ... wanted layer_norm_eps of bert, from settings or ... got model_type None there",
    "without('bert', ['layer_norm_eps'], 'bert', 'electra')": "ValueError: ... wanted layer_norm_eps of bert, ... got model_type 'electra' there",
    "without('t5', ['relative_attention_max_distance'], 't5', 'dpr')": "ValueError: ... wanted relative_attention_max_distance of t5, ... 'dpr' there",
    "without('bert', ['layer_norm_eps', 'pad_token_id'], 'roberta', None)": "ValueError: ... wanted layer_norm_eps, pad_token_id of roberta",
    "without('bloom', ['n_head', 'layer_norm_epsilon'], 'bloom', None)": "ValueError: ... wanted layer_norm_eps, num_attention_heads of bloom",
    # Entries of other models.
    "llama(rotary_value=3, alibi=4)": "ValueError: config.json, for a model llama: wanted only entries that can be read (to ignore the others, if they mean nothing here: settings={'rotary_value': None, 'alibi': None}), got rotary_value: 3, alibi: 4",
    "llama(rotary_dim=8)": f"{UNREAD}rotary_dim: 8",
    "llama(alibi=True)": f"{UNREAD}alibi: True",
    "llama(embedding_multiplier=2.0)": f"{UNREAD}embedding_multiplier: 2.0",
    "llama(final_logit_softcapping=30.0)": f"{UNREAD}final_logit_softcapping: 30.0",
    "llama(position_embedding_type='relative_key')": f"{UNREAD}position_embedding_type: ",
    "llama(no_rope_layers=[1, 0])": f"{UNREAD}no_rope_layers: ",
    "llama(share_tables=True)": f"{UNREAD}share_tables: ",
    "llama(rope_scaling={'type': 'linear', 'factor': 2.0, 'beta': 1000.0})": f"{UNREAD}rope_scaling: beta: ",
    "llama(max_position_embeddings=64, rope_scaling={'type': 'dynamic', 'factor': 1.0, 'alpha': 9.0})": f"{UNREAD}rope_scaling: alpha: 9.0",
    # As in Jina's v3, whose positions are rotated.
    "model('xlm-roberta', 'embeddings.word_embeddings.weight')": "ValueError: ... wanted the tensors of one model xlm-roberta",
    # What a row of the registry cannot say. The library adds the scaling of the type's default.
    "model('gpt_oss', rope_theta=150_000.0)": "ValueError: ... wanted rope_scaling of gpt_oss, from settings or a config.json",
    "model('granite_swa', layer_rope_theta=[1e4])": "ValueError: ... layer_rope_theta: wanted a value for each layer, 6, got 1",
    "model('mistral', layer_types=['foo'] * 6)": "ValueError: ... layer_types: wanted some of ... got foo",
    "llama(layer_types=SLIDING)": "ValueError: ... layer_types: wanted full_attention, since a model llama has no windows",
    "llama(per_layer_config={'3': {'rope_theta': 1e4}})": "ValueError: ... per_layer_config: 3: wanted only the entries head_dim, sliding_window, ... got ['rope_theta']",
    "llama(num_hidden_layers=10**12)": "ValueError: ... num_hidden_layers: wanted an int of at most 1024, got 1000",
    "model('phi3', max_position_embeddings=131_072, rope_scaling={'rope_type': 'dynamic', 'factor': 3.0})": "ValueError: ... length: wanted a Python int, got None",
    "llama(num_hidden_layers=None)": "ValueError: ... num_hidden_layers: wanted an int of at least 1, got 0",
    "model('xlm', *XLM, asm=True)": "ValueError: ... only entries that can be read ... got asm: True",
    "model('esm', 'embeddings.word_embeddings.weight', token_dropout=True)": "ValueError: ... token_dropout: wanted False, and embeddings multiplied by 0.88 / (1 - the share of <mask>",
    "composite(model_type='mllama_text_model', vocab_size=4)": "ValueError: ... vocab_size: wanted 12, as the tensors say (if they are right: settings=... got 4",
}  # fmt: skip
XLM = (
    "embeddings.weight",
    "position_embeddings.weight",
    "layer_norm_emb.weight",
    "layer_norm_emb.bias",
)


def test_entries_that_mean_nothing_are_refused_by_name():
    each_raises(REFUSED, globals())


def advised(call):
    """The settings that the message of a refusal advises, or None."""
    try:
        call()
    except ValueError as error:
        found = re.search(r"settings=(\{.*?\})", str(error))
        return ast.literal_eval(found[1]) if found else None
    return {}


def test_advice_of_each_message_loads_the_model():
    """Whatever is refused with advice: entries at the top level, inside a rotation, and sizes."""
    for call in REFUSED:
        settings = advised(lambda call=call: eval(call, globals()))
        # The small files of these two lack more than what the message is about.
        if settings and not call.startswith(("model('xlm'", "composite(")):
            load_embedder("model.safetensors", settings=settings, length=LENGTH)
    small = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
    loud = [name for name in (*ENTRIES, *known_entries.LOUD.split()) if known_entries.is_loud(name)]
    for model_type in ("bert", "llama", "mpt"):
        row = registry.model_type_or_none(model_type)
        entries = small | {"model_type": model_type, "max_position_embeddings": 8}
        entries |= {"type_vocab_size": 2}
        unread = [name for name in loud if row.status(name, "x") is EntryStatus.REFUSED]
        assert len(unread) > 20
        for name in few(unread, 10):
            in_file = entries | {name: "x"}
            settings = advised(lambda: te.pretrained.load_config(in_file))  # noqa: B023
            assert settings == {name: None}
            te.pretrained.load_config(in_file, settings=settings)


def test_entries_that_nobody_knows_are_warned_of():
    fancy = {"rotary_fancy": 3, "my_note": "x", "an_empty_one": None}
    words = "config.json, for a model llama: entries that are not known were not read: rotary_fancy, my_note .if they mean nothing here: settings={'rotary_fancy': None, 'my_note': None}"
    with pytest.warns(UserWarning, match=words):
        llama(**fancy)
    # As the warning advises.
    settings = {"rotary_fancy": None, "my_note": None}
    assert load_embedder("model.safetensors", settings=settings).config.vocab_size == 12


# What published files say, that their class does not read: of Devstral 2, of granite-embedding r2,
# of Hy-MT2, and of a draft model for Gemma 3.
HARMLESS = {
    "ministral3": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e8, "factor": 64.0,
            "original_max_position_embeddings": 4096, "llama_4_scaling_beta": 0},
    },
    "modernbert": {"position_embedding_type": "sans_pos", "local_rope_theta": 10000.0},
    "hunyuan_v1_dense": {"use_rotary_pos_emb": True, "num_media_embeds": 257, "cla_share_factor": 2,
        "position_embedding_xdrope": False, "attention_head_dim": 128},
    "llama": {"rope_local_base_freq": 10000, "sliding_window_pattern": 6, "draft_vocab_size": 32000,
        "query_pre_attn_scalar": 256, "final_logit_softcapping": None, "pretraining_tp": 1,
        "position_embedding_type": "rope"},
}  # fmt: skip


@pytest.mark.parametrize("model_type", HARMLESS)
def test_entries_without_an_effect_are_not_refused(model_type):
    small = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
    small |= {"max_position_embeddings": 64, "model_type": model_type}
    plain = {key: each for key, each in HARMLESS[model_type].items() if key == "rope_parameters"}
    found = te.pretrained.load_config(small | HARMLESS[model_type])
    assert found == te.pretrained.load_config(small | plain)
    assert all(layer.query_scale is None for layer in found.layers)


@pytest.mark.parametrize("has_list", [True, False])
def test_exaone_4_5_has_windows(has_list):
    """Its text model is EXAONE 4, under a name of its own."""
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    entries = {
        "vocab_size": 12,
        "hidden_size": 16,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
    }
    entries |= {"sliding_window": 32, "sliding_window_pattern": "LLLG"}
    entries |= {"layer_types": kinds} if has_list else {}
    found, other = (
        te.pretrained.load_config(entries | {"model_type": name})
        for name in ("exaone4_5_text", "exaone4")
    )
    assert found == other
    assert [layer.type for layer in found.layers] == kinds
    assert found.layers[0].mask == {"causal": True, "window": (31, 0)}
    assert [layer.rotary is not None for layer in found.layers] == [True, True, True, False] * 2


@pytest.mark.slow
def test_a_long_list_is_refused_at_once_and_shortly():
    entries = {"model_type": "qwen2_vl", "vocab_size": 12, "num_hidden_layers": 6}
    entries |= {"rope_scaling": {"rope_type": "default", "mrope_section": [8192] * 10**5}}
    tables = {EMBED_TOKENS: np.ones((12, 16), np.float32)}
    path = checkpoint({"tensors": {}}, settings=entries, change=tables)
    message = "mrope_section: its sum: wanted an int of at most 8192, got 819200000"
    assert message in refused(path)


def test_entries_without_an_effect_would_be_refused():
    """Otherwise a row need not list them."""
    inside_a_scaling = {"max_position_embeddings", "interleaved"}
    for name in registry.MODEL_TYPES:
        row = registry.model_type_or_none(name)
        bare = row._replace(no_effect="")
        for entry in set(row.no_effect.split()) - inside_a_scaling:
            status = bare.status(entry, "x")
            assert status is EntryStatus.REFUSED, (name, entry)


def test_published_files_are_not_refused():
    """What they say besides is known to mean nothing."""
    for model_type, entries in golden("config_entries.json").items():
        row = registry.model_type_or_none(model_type)
        unread = entry_values.read_entries(row, entries).unread
        status = {row.status(name, value) for name, value in unread.items()}
        assert status <= {EntryStatus.OF_NO_CONCERN}, model_type
