"""Entries of config.json and of settings that are wrong, or that concern a layer and that nothing
reads: errors name them."""

import pytest
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

from transformer_embed._src.pretrained import architectures, description

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


def qwen(sections):
    return model("qwen2_vl", rope_scaling={"rope_type": "default", "mrope_section": sections})


OF_LLAMA = "ValueError: ... for a model llama: "
UNREAD = f"{OF_LLAMA}... is not read ... got "
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
    "llama(rotary_fancy=3, rope_odd=4)": "ValueError: config.json, for a model llama: wanted no entry that concerns the layer and is not read (if they mean nothing here: settings={'rotary_fancy': None, 'rope_odd': None}), got rotary_fancy: 3, rope_odd: 4",
    "llama(rotary_dim=8)": f"{UNREAD}rotary_dim: 8",
    "llama(alibi=True)": f"{UNREAD}alibi: True",
    "llama(embedding_multiplier=2.0)": f"{UNREAD}embedding_multiplier: 2.0",
    "llama(final_logit_softcapping=30.0)": f"{UNREAD}final_logit_softcapping: 30.0",
    "llama(position_embedding_type='relative_key')": f"{UNREAD}position_embedding_type: ",
    "llama(no_rope_layers=[1, 0])": f"{UNREAD}no_rope_layers: ",
    "llama(share_tables=True)": f"{UNREAD}share_tables: ",
    "llama(rope_scaling={'type': 'linear', 'factor': 2.0, 'beta': 1000.0})": f"{UNREAD}rope_scaling: beta: ",
    "llama(rope_scaling={'type': 'dynamic', 'factor': 1.0, 'alpha': 9.0})": f"{UNREAD}rope_scaling: alpha: 9.0",
    # As in Jina's v3, whose positions are rotated.
    "model('xlm-roberta', 'embeddings.word_embeddings.weight')": "ValueError: ... wanted the tensors of one model xlm-roberta",
    # What a row of the registry cannot say. The library adds the scaling of the type's default.
    "model('gpt_oss', rope_theta=150_000.0)": "ValueError: ... wanted rope_scaling of gpt_oss, from settings or a config.json",
    "model('granite_swa', layer_rope_theta=[1e4])": "ValueError: ... layer_rope_theta: wanted a value for each layer, 6, got 1",
    "model('mistral', layer_types=['foo'] * 6)": "ValueError: ... layer_types: wanted some of ... got foo",
    "llama(layer_types=SLIDING)": "ValueError: ... layer_types: wanted full_attention, since a model llama has no windows",
    "llama(per_layer_config={'3': {'rope_theta': 1e4}})": "ValueError: ... per_layer_config: 3: wanted no entries but head_dim, sliding_window, ... got ['rope_theta']",
    "llama(num_hidden_layers=10**12)": "ValueError: ... num_hidden_layers: wanted an int of at most 1024, got 1000",
    "model('phi3', max_position_embeddings=131_072, rope_scaling={'rope_type': 'dynamic', 'factor': 3.0})": "ValueError: ... length: wanted a Python int, got None",
    "llama(num_hidden_layers=None)": "ValueError: ... num_hidden_layers: wanted an int of at least 1, got 0",
    "model('xlm', *XLM, asm=True)": "ValueError: ... is not read ... got asm: True",
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
    """And what an error says to do loads the model."""
    each_raises(REFUSED, globals())
    for call, settings in (
        (lambda: llama(rotary_fancy=3, rope_odd=4), {"rotary_fancy": None, "rope_odd": None}),
        (lambda: in_file("bert", vocab_size=13), {"vocab_size": 12}),
    ):
        with pytest.raises(ValueError, match="settings=") as error:
            call()
        assert str(settings) in str(error.value)
        assert load_embedder("model.safetensors", settings=settings).config.vocab_size == 12


def test_a_long_list_is_refused_at_once_and_shortly():
    with pytest.raises(ValueError, match="its sum: wanted an int of at most 8192, got 819200000"):
        qwen([8192] * 10**5)
    assert "mrope_section: its sum: wanted an int" in refused("model.safetensors")


def test_meaningless_entries_concern_the_layer():
    """Otherwise they need not be listed."""
    inside_a_scaling = {"max_position_embeddings", "interleaved"}
    for name in " ".join(architectures.FAMILIES).split():
        kind = architectures.by_model_type(name)
        bare = kind._replace(meaningless="")
        for entry in set(kind.meaningless.split()) - inside_a_scaling:
            assert bare.concerns(f"rope_scaling: {entry}", "x"), entry


def test_published_files_are_not_refused():
    """What they say besides is known to mean nothing."""
    for model_type, entries in golden("config_entries.json").items():
        kind = architectures.by_model_type(model_type)
        _, unread = description.read(kind, entries)
        concerning = [name for name, value in unread.items() if kind.concerns(name, value)]
        assert concerning == [], model_type
