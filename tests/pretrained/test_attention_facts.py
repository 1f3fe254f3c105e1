"""What `found.layers` says of the attention, against the modules of transformers."""

import pytest
from checkpoints import golden

import transformer_embed as te

CASES = golden("attention_facts.json")["cases"]


@pytest.mark.parametrize("model_type", CASES)
def test_heads_scale_softcap_sinks_and_epsilon_are_as_in_transformers(model_type):
    case = CASES[model_type]
    found = te.pretrained.load_config(case["config"], length=8)
    for number, theirs in case["layers"].items():
        layer = found.layers[int(number)]
        assert layer.attention == pytest.approx(theirs), (number, layer.type)
    if case["norm_eps"] is not None:
        # OLMo's norm has neither weights nor an entry.
        assert found.layers[0].norm_eps in (case["norm_eps"], None)


def test_entries_that_a_config_leaves_out_have_the_defaults_of_its_type():
    entries = {"model_type": "gemma3_text", "vocab_size": 12, "hidden_size": 2560}
    layer = te.pretrained.load_config(entries | {"num_hidden_layers": 6}).layers[5]
    expected = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "scale": 0.0625}
    assert layer.attention == expected
    assert layer.norm_eps == 1e-6
    # The defaults of another type say nothing.
    other = {"model_type": "gemma2"} | {"num_hidden_layers": 6, "vocab_size": 12, "hidden_size": 8}
    settings = {"model_type": "llama", "rope_theta": 1e4}
    assert te.pretrained.load_config(other, settings=settings).layers[0].attention is None


def test_a_null_of_config_json_counts_as_in_transformers():
    small = {"vocab_size": 12, "hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    # The entry of the norm that is not used is null.
    cohere = {"model_type": "cohere2_moe", "layer_types": ["full_attention"], "rms_norm_eps": None}
    for given, epsilon in (
        ({}, 1e-5),
        ({"layer_norm_eps": 2e-5}, 2e-5),
        ({"rms_norm_eps": 3e-5}, 3e-5),
    ):
        assert te.pretrained.load_config(small | cohere | given).layers[0].norm_eps == epsilon
    clova = {"model_type": "hyperclovax"}
    for given, scale in (
        ({}, 24**-0.5),
        ({"attention_multiplier": None}, 24**-0.5),
        ({"attention_multiplier": 0.5}, 0.5),
    ):
        assert (
            te.pretrained.load_config(small | clova | given).layers[0].attention["scale"] == scale
        )


def test_latent_and_linear_attention_are_left_out():
    small = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
    latent = te.pretrained.load_config(small | {"model_type": "deepseek_v3"})
    assert [layer.attention for layer in latent.layers] == [None] * 4
    hybrid = te.pretrained.load_config(small | {"model_type": "qwen3_next"})
    assert [layer.attention is None for layer in hybrid.layers] == [True] * 3 + [False]
