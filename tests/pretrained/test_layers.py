"""Which layer of a published model is of which kind, with its rotation and its mask."""

import pytest
from checkpoints import load_embedder, published, save_embedder, table

import transformer_embed as te

S, F, L, C = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"
ROTATED, UNROTATED = True, False
TABLES = {
    "modernbert": "model.embeddings.tok_embeddings.weight",
    "modernbert-decoder": "model.embeddings.tok_embeddings.weight",
    "gpt_neo": "transformer.wte.weight",
    "nemotron_h": "backbone.embeddings.weight",
}


@pytest.mark.parametrize(("entries", "types", "reach", "bases"), published("layers"))
def test_each_layer_has_its_kind_its_rotation_and_its_mask(tmp_path, entries, types, reach, bases):
    others = {}
    if "modernbert" in entries["model_type"]:
        others["model.embeddings.norm.weight"] = (16,)
    if entries["model_type"] == "gpt_neo":
        others["transformer.wpe.weight"] = (12, 16)
    name = TABLES.get(entries["model_type"], "model.embed_tokens.weight")
    entries = {"num_hidden_layers": 8, "num_attention_heads": 2, "rope_scaling": None} | entries
    found = load_embedder(table(tmp_path, entries, name, **others))
    assert [layer.type for layer in found.layers] == [*types]
    for number, layer in enumerate(found.layers):
        base = bases[layer.type]
        base = base[number] if isinstance(base, tuple) else base
        assert (layer.rotary and layer.rotary["base"]) == base
        seen = {S: "window", C: "chunk"}.get(layer.type)
        limits = {name: limit for name, limit in layer.mask.items() if name != "causal"}
        assert limits == ({seen: reach} if seen and reach else {})
        is_causal = entries["model_type"] != "modernbert" and reach != (4, 4)
        assert layer.mask["causal"] == is_causal


SCALED = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
SCALED |= {"original_max_position_embeddings": 16_384, "llama_4_scaling_beta": 0.1}
LLAMA_4 = {"beta": 0.1, "length": 8192, "offset": 1}


@pytest.mark.parametrize(
    ("entries", "scales"),
    [
        ({"model_type": "ministral3", "rope_parameters": SCALED}, [{"beta": 0.1, "length": 16_384}] * 4),
        ({"model_type": "ministral3", "rope_parameters": SCALED | {"llama_4_scaling_beta": None}}, [None] * 4),
        ({"model_type": "llama4_text"}, [None] * 3 + [LLAMA_4]),
        ({"model_type": "llama4_text", "attn_scale": 0.5, "floor_scale": 64}, [None] * 3 + [{"beta": 0.5, "length": 64, "offset": 1}]),
        ({"model_type": "llama4_text", "attn_temperature_tuning": False}, [None] * 4),
    ],
)  # fmt: skip
def test_queries_are_scaled_by_position_where_the_model_does(tmp_path, entries, scales):
    found = load_embedder(table(tmp_path, entries | {"num_hidden_layers": 4}))
    assert [layer.query_scale for layer in found.layers] == scales
    save_embedder(tmp_path / "saved", *found)
    assert load_embedder(tmp_path / "saved").layers == found.layers


def test_a_decoder_may_see_both_sides_and_an_unknown_kind_of_layer_is_refused(tmp_path):
    entries = {"model_type": "mistral", "sliding_window": 8, "num_hidden_layers": 1}
    for said, mask in (
        (False, {"causal": False, "window": (8, 8)}),
        (True, {"causal": True, "window": (7, 0)}),
    ):
        found = load_embedder(
            table(tmp_path, entries | {"is_causal": said}, "model.embed_tokens.weight")
        )
        assert found.layers[0].mask == mask
    with pytest.raises(ValueError, match=r"layer_types: wanted some of .*, got foo$"):
        load_embedder(
            table(tmp_path, entries | {"layer_types": ["foo"]}, "model.embed_tokens.weight")
        )


def test_tensors_say_how_many_layers_there_are_if_config_json_does_not(tmp_path):
    others = {f"model.layers.{number}.mlp.0.weight": (2, 2) for number in (0, 10, 2)}
    entries = {"model_type": "llama", "num_hidden_layers": None}
    found = load_embedder(table(tmp_path, entries, "model.embed_tokens.weight", **others))
    assert len(found.layers) == 11


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_has_its_older_names_and_phi_moes_factor(tmp_path, name):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"factor": 4.0, "original_length": 16, "length": 8, "attention_factor": 1.25}
    entries = {"type": name, "short_mscale": 1.25, "long_mscale": 1.25} | factors
    said = {"model_type": "phimoe", "num_attention_heads": 2, "max_position_embeddings": 64}
    said |= {"original_max_position_embeddings": 16, "rope_scaling": entries}
    found = load_embedder(table(tmp_path, said), length=8)
    assert found.layers[0].rotary["scaling"] == te.LongRopeScaling(**factors, **sizes)


FACTORS = [1.0] * 4, [4.0] * 4
PHI = dict(zip(("short_factor", "long_factor"), FACTORS, strict=True))


@pytest.mark.parametrize(
    ("entries", "short", "long"),
    [
        (
            PHI | {"type": "longrope"},
            te.LongRopeScaling(*FACTORS, 32.0, 4096, 100),
            te.LongRopeScaling(*FACTORS, 32.0, 4096, 262_144),
        ),
        ({"rope_type": "dynamic", "factor": 3.0}, te.NTKScaling(1.0), te.NTKScaling(4.0)),
    ],
)
def test_a_rotation_that_depends_on_the_length_is_that_of_the_length(
    tmp_path, entries, short, long
):
    """Phi-3's 128k model was given the rotation of texts of up to 4,096 tokens."""
    said = {"model_type": "phi3", "num_attention_heads": 2, "max_position_embeddings": 131072}
    path = table(tmp_path, said | {"rope_scaling": entries})
    with pytest.raises(ValueError, match=r"length: wanted a Python int, got None$"):
        load_embedder(path)
    for length, scaling in ((100, short), (262_144, long)):
        assert load_embedder(path, length=length).layers[0].rotary["scaling"] == scaling
