"""Which layer of a published model is of which kind, with its rotation and its mask."""

import pytest
from checkpoints import EMBED_TOKENS, WTE, load_embedder, load_table, published, save_embedder

WINDOWS = {"sliding_attention": "window", "chunked_attention": "chunk"}
OF_MODERNBERT = ["model.embeddings.tok_embeddings.weight"], {"model.embeddings.norm.weight": (16,)}
TENSORS = {
    "modernbert": OF_MODERNBERT,
    "modernbert-decoder": OF_MODERNBERT,
    "gpt_neo": ([WTE], {"transformer.wpe.weight": (12, 16)}),
    "nemotron_h": (["backbone.embeddings.weight"], {}),
}


@pytest.mark.parametrize(("entries", "types", "reach", "bases"), published("layers"))
def test_each_layer_has_its_kind_its_rotation_and_its_mask(entries, types, reach, bases):
    tables, others = TENSORS.get(entries["model_type"], ([EMBED_TOKENS], {}))
    entries = {"num_hidden_layers": 8, "num_attention_heads": 2, "rope_scaling": None} | entries
    found = load_table(entries, *tables, **others)
    assert [layer.type for layer in found.layers] == [*types]
    is_causal = entries["model_type"] != "modernbert" and reach != (4, 4)
    for number, layer in enumerate(found.layers):
        base, limit = bases[layer.type], WINDOWS.get(layer.type)
        base = base[number] if isinstance(base, tuple) else base
        assert (layer.rotary and layer.rotary["base"]) == base
        assert layer.mask == {"causal": is_causal} | ({limit: reach} if limit and reach else {})


SCALED = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
SCALED |= {"original_max_position_embeddings": 16_384, "llama_4_scaling_beta": 0.1}
MINISTRAL, LLAMA_4 = {"model_type": "ministral3"}, {"model_type": "llama4_text"}
OF_LLAMA_4 = {"beta": 0.1, "length": 8192, "offset": 1}


@pytest.mark.parametrize(
    ("entries", "scales"),
    [
        (MINISTRAL | {"rope_parameters": SCALED}, [{"beta": 0.1, "length": 16_384}] * 4),
        (MINISTRAL | {"rope_parameters": SCALED | {"llama_4_scaling_beta": None}}, [None] * 4),
        (LLAMA_4, [None] * 3 + [OF_LLAMA_4]),
        (LLAMA_4 | {"attn_scale": 0.5, "floor_scale": 64}, [None] * 3 + [OF_LLAMA_4 | {"beta": 0.5, "length": 64}]),
        (LLAMA_4 | {"attn_temperature_tuning": False}, [None] * 4),
    ],
)  # fmt: skip
def test_queries_are_scaled_by_position_where_the_model_does(entries, scales):
    found = load_table(entries | {"num_hidden_layers": 4})
    assert [layer.query_scale for layer in found.layers] == scales
    save_embedder("saved", *found)
    assert load_embedder("saved").layers == found.layers


@pytest.mark.parametrize(("is_causal", "window"), [(False, (8, 8)), (True, (7, 0))])
def test_a_decoder_may_see_both_sides(is_causal, window):
    """And tensors say how many layers there are if config.json does not."""
    others = {f"model.layers.{number}.mlp.0.weight": (2, 2) for number in (0, 10, 2)}
    entries = {"model_type": "mistral", "sliding_window": 8, "num_hidden_layers": None}
    found = load_table(entries | {"is_causal": is_causal}, EMBED_TOKENS, **others)
    assert [layer.mask for layer in found.layers] == [{"causal": is_causal, "window": window}] * 11
