"""Entries and tensors that concern a layer and that nothing reads: errors name them."""

import numpy as np
import pytest
from checkpoints import CASES, checkpoint, kind_of

import transformer_embed as te
from transformer_embed._src.pretrained import architectures

LLAMA = {"model_type": "llama", "vocab_size": 12}
ROWS = {
    kind_of(case).types: name for name, case in CASES.items() if name != "llama, a stray factor"
}


def file(folder, entries, *tensors, prefix="", **others):
    """A checkpoint of 12 tokens with 16 channels, and other tensors by name and shape."""
    shapes = {prefix + name: (12, 16) for name in tensors or ["embed_tokens.weight"]} | others
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return checkpoint(folder, {"tensors": {}, "settings": entries}, change=arrays)


@pytest.mark.parametrize("name", ROWS.values())
def test_an_entry_that_concerns_the_layer_is_refused_by_name(tmp_path, name):
    """Unless settings say that it means nothing."""
    case = CASES[name]
    settings = case["settings"]
    text = settings.get("text_config", settings)
    text |= {"rotary_fancy": 3}
    try:
        path = checkpoint(tmp_path, case | {"settings": settings})
        with pytest.raises(
            ValueError,
            match=r"config.json, for a model .*: wanted no entry that concerns the layer and is not "
            r"read \(if it means nothing here: settings=\{'rotary_fancy': None\}\), got "
            r"rotary_fancy: 3$",
        ):
            te.pretrained.load_embedder(path, stack=case["stack"])
        te.pretrained.load_embedder(path, stack=case["stack"], settings={"rotary_fancy": None})
    finally:
        del text["rotary_fancy"]


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
        {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1000.0}},
    ],
)
def test_entries_of_other_models_are_refused_in_a_llama(tmp_path, entries):
    (name,) = entries
    with pytest.raises(ValueError, match=f"is not read .*, got {name}: "):
        te.pretrained.load_embedder(file(tmp_path, LLAMA | entries))


def test_entries_that_say_nothing_or_concern_other_parts_are_left_out(tmp_path):
    entries = {
        "rotary_fancy": None,
        "rope_interleaved": False,
        "embedding_multiplier": 1.0,
        "position_embedding_type": "absolute",
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.3,
        "rms_norm_eps": 0.1,
        "initializer_factor": 2.0,
        "n_positions": 9,
        "num_key_value_heads": 2,
        "pad_token_id": 3,
        "rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True},
    }
    found = te.pretrained.load_embedder(file(tmp_path, LLAMA | entries))
    scaling = te.LinearScaling(2.0)
    assert found.rotary == {"base": 10_000.0, "layout": "half", "scaling": scaling}


def test_settings_may_be_null_only_for_an_entry_of_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"^settings: wanted entries .*, got 'rotary_fancy'$"):
        te.pretrained.load_embedder(file(tmp_path, LLAMA), settings={"rotary_fancy": None})


def test_meaningless_entries_concern_the_layer():
    """Otherwise they need not be listed."""
    for row in architectures.ARCHITECTURES:
        bare = row._replace(meaningless="")
        for entry in row.meaningless.split():
            is_inside_a_scaling = entry in ("max_position_embeddings", "interleaved")
            assert is_inside_a_scaling or bare.concerns(f"rope_scaling: {entry}", "x"), entry


# Of published files: what each says, and what differs from the library's own names.
HUB = {
    "MiniMax-M2": (
        {"model_type": "minimax_m2", "head_dim": 8, "rotary_dim": 4, "use_qk_norm": True},
        ["model.embed_tokens.weight"],
        {"rotary": {"base": 5e6, "layout": "half", "rotary_dim": 4}},
    ),
    "nomic-embed-text-v1.5": (
        {"model_type": "nomic_bert", "n_embd": 16, "n_head": 2, "n_positions": 8192}
        | {"layer_norm_epsilon": 1e-5, "rotary_emb_base": 10_000, "rotary_emb_fraction": 0.5}
        | {"rotary_emb_interleaved": True, "rotary_emb_scale_base": None, "resid_pdrop": 0.25}
        | {"rotary_scaling_factor": None, "scale_attn_weights": True, "pad_vocab_size_multiple": 64}
        | {"max_trained_positions": 2048, "qkv_proj_bias": False, "embd_pdrop": 0.0},
        [f"embeddings.{name}_embeddings.weight" for name in ("word", "token_type")],
        {
            "layer_norm_eps": 1e-5,
            "dropout_rate": 0.25,
            "rotary": {"base": 1e4, "layout": "interleaved", "rotary_dim": 4},
        },
    ),
    "granite-4.0-h": (
        {"model_type": "granitemoehybrid", "position_embedding_type": "nope", "rope_theta": 1e4},
        ["model.embed_tokens.weight"],
        {"rotary": None},
    ),
    "granite-4.0": (
        {"model_type": "granitemoehybrid", "position_embedding_type": "rope", "rope_theta": 1e7},
        ["model.embed_tokens.weight"],
        {"rotary": {"base": 1e7, "layout": "half"}},
    ),
    "afmoe": (
        {"model_type": "afmoe", "mup_enabled": True},
        ["model.embed_tokens.weight"],
        {"scale": True},
    ),
    "starcoder2": (
        {"model_type": "starcoder2", "embedding_dropout": 0.25, "norm_epsilon": 1e-5},
        ["model.embed_tokens.weight"],
        {"dropout_rate": 0.25},
    ),
    "gpt-neo": (
        {"model_type": "gpt_neo", "embed_dropout": 0.25},
        ["transformer.wte.weight", "transformer.wpe.weight"],
        {"dropout_rate": 0.25},
    ),
    "LFM2": (
        {"model_type": "lfm2", "tie_embedding": False, "theta": 1e6, "use_pos_enc": True},
        ["model.embed_tokens.weight", "lm_head.weight"],
        {"output": te.OutputLayer(tied=False)},
    ),
    "SmolLM": (
        {"model_type": "llama", "rope_interleaved": False, "is_llama_config": True},
        ["model.embed_tokens.weight"],
        {"rotary": {"base": 1e4, "layout": "half"}},
    ),
    "command-r7b": (
        {"model_type": "cohere2", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0}
        | {"use_embedding_sharing": True, "use_parallel_block": True, "logit_scale": 0.25},
        ["model.embed_tokens.weight"],
        {"output": te.OutputLayer(scale=0.25)},
    ),
    "recurrentgemma": (
        {"model_type": "recurrent_gemma", "embeddings_scale_by_sqrt_dim": True}
        | {"num_attention_heads": 2, "logits_soft_cap": 20.0},
        ["model.embed_tokens.weight"],
        {"output": te.OutputLayer(softcap=20.0)},
    ),
    "Minitron": (
        {"model_type": "nemotron", "rope_percent": 0.25, "num_attention_heads": 2},
        ["model.embed_tokens.weight"],
        {"rotary": {"base": 1e4, "layout": "half", "rotary_dim": 2}},
    ),
    "gpt-j": (
        {"model_type": "gptj", "rotary": True, "rotary_dim": 8, "scale_attn_weights": True},
        ["transformer.wte.weight"],
        {"rotary": {"base": 1e4, "layout": "interleaved", "rotary_dim": 8}},
    ),
    "bloom": (
        {"model_type": "bloom", "n_embed": 16, "n_head": 4, "offset_alibi": 100},
        ["word_embeddings.weight"],
        {"bias": {"num_heads": 4}},
    ),
    "deberta-v3": (
        {"model_type": "deberta-v2", "relative_attention": True, "position_buckets": 256}
        | {"norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p"}
        | {"position_biased_input": False, "max_relative_positions": -1},
        ["deberta.embeddings.word_embeddings.weight", "deberta.encoder.rel_embeddings.weight"],
        {"scheme": None},
    ),
    "pegasus": (
        {"model_type": "pegasus", "static_position_embeddings": True, "extra_pos_embeddings": 1}
        | {"scale_embedding": True, "normalize_before": True, "add_final_layer_norm": True},
        ["model.shared.weight", "model.encoder.embed_positions.weight"],
        {"scale": True},
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_published_forms_are_read(tmp_path, name):
    entries, tensors, expected = HUB[name]
    norms = {"bloom": "word_embeddings_layernorm", "nomic-embed-text-v1.5": "emb_ln"}
    norms["deberta-v3"] = "deberta.embeddings.LayerNorm"
    ends = ("weight", "bias") if name in norms else ()
    others = {f"{norms[name]}.{end}": (16,) for end in ends}
    path = file(tmp_path, entries | {"vocab_size": 12}, *tensors, **others)
    found = te.pretrained.load_embedder(path)
    for field, value in expected.items():
        where = found if field in found._fields else found.config
        assert getattr(where, field) == value


# What published config.json files say besides, as far as its names concern any layer.
PUBLISHED = {
    "bert": {"directionality": "bidi", "pooler_fc_size": 768, "gradient_checkpointing": False},
    "xlm-roberta": {"output_past": True},
    "albert": {
        "down_scale_factor": 1,
        "gap_size": 0,
        "net_structure_type": 0,
        "inner_group_num": 1,
        "num_memory_blocks": 0,
    },
    "electra": {"summary_type": "first"},
    "distilbert": {"tie_weights_": True, "sinusoidal_pos_embds": False, "seq_classif_dropout": 0.2},
    "gpt2": {
        "n_ctx": 1024,
        "layer_norm_epsilon": 1e-05,
        "scale_attn_weights": True,
        "reorder_and_upcast_attn": False,
        "task_specific_params": {},
    },
    "gptj": {"rotary": True, "scale_attn_weights": True},
    "opt": {
        "word_embed_proj_dim": 768,
        "_remove_final_layer_norm": False,
        "do_layer_norm_before": True,
        "prefix": "</s>",
    },
    "t5": {"n_positions": 512, "output_past": True, "layer_norm_epsilon": 1e-06},
    "bart": {
        "normalize_embedding": True,
        "normalize_before": False,
        "add_bias_logits": False,
        "static_position_embeddings": False,
        "extra_pos_embeddings": 2,
    },
    "marian": {
        "normalize_embedding": False,
        "static_position_embeddings": True,
        "add_final_layer_norm": False,
        "num_beams": 6,
    },
    "m2m_100": {"normalize_before": True},
    "whisper": {"scale_embedding": False, "max_source_positions": 1500},
    "llama": {
        "pretraining_tp": 1,
        "mlp_bias": False,
        "attention_bias": False,
        "max_sequence_length": 2048,
    },
    "mistral": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28, "use_mrope": False},
    "qwen3": {"head_dim": 128, "attention_bias": False},
    "qwen2_5_vl": {
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_start_token_id": 1,
        "vision_config": {"x": 1},
    },
    "gemma": {"hidden_activation": None},
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 256,
        "cache_implementation": "hybrid",
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
    },
    "phi": {"qk_layernorm": False},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
    "phimoe": {"lm_head_bias": True, "attention_bias": True, "input_jitter_noise": 0.01},
    "deepseek_v3": {
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "routed_scaling_factor": 2.5,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "initial_context_length": 4096,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "swiglu_limit": 7.0,
    },
    "cohere": {"model_max_length": 8192, "use_qk_norm": False},
    "granite": {"attention_multiplier": 0.0078, "residual_multiplier": 0.22},
    "stablelm": {"rotary_scaling_factor": 1.0, "norm_eps": 1e-05, "use_qkv_bias": False},
    "gpt_neox": {"use_parallel_residual": True},
    "falcon": {
        "bias": False,
        "multi_query": True,
        "n_head": 71,
        "n_layer": 32,
        "parallel_attn": True,
    },
    "falcon_h1": {
        "attention_in_multiplier": 1.0,
        "key_multiplier": 0.3,
        "mlp_multipliers": [0.8, 0.2],
        "ssm_multipliers": [0.3],
        "mlp_expansion_factor": 8,
    },
    "mpt": {
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
        "embedding_fraction": 1.0,
        "emb_pdrop": 0,
        "learned_pos_emb": True,
        "logit_scale": None,
        "norm_type": "x",
    },
    "bloom": {
        "offset_alibi": 100,
        "skip_bias_add": True,
        "seq_length": 2048,
        "masked_softmax_fusion": True,
    },
    "starcoder2": {
        "norm_type": "layer_norm",
        "norm_epsilon": 1e-05,
        "use_bias": True,
        "mlp_type": "default",
    },
    "modernbert": {
        "position_embedding_type": "absolute",
        "repad_logits_with_grad": False,
        "sparse_prediction": False,
        "decoder_bias": True,
    },
    "minicpm": {"scale_depth": 1.4},
    "smollm3": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 4, "use_mla": False},
    "llama4_text": {
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "attn_temperature_tuning": True,
        "no_rope_layers": [1, 0],
        "qk_norm": True,
    },
    "mamba": {
        "pad_vocab_size_multiple": 8,
        "residual_in_fp32": True,
        "time_step_scale": 1.0,
        "rescale_prenorm_residual": False,
        "d_inner": 8,
    },
    "clip_text_model": {"logit_scale_init_value": 2.66, "projection_dim": 512},
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "max_relative_positions": -1,
    },
    "xlm": {
        "share_inout_emb": True,
        "use_lang_emb": True,
        "sinusoidal_embeddings": False,
        "embed_init_std": 0.02,
    },
    "kimi_linear": {"rope_theta": 10000.0, "mla_use_nope": True, "qk_rope_head_dim": 64},
    "jina_embeddings_v3": {
        "position_embedding_type": "rotary",
        "emb_pooler": "mean",
        "lora_rank": 4,
    },
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_files_are_not_refused(model_type):
    """What they say besides is known to mean nothing."""
    kind = architectures.by_model_type(model_type)
    _, unread = kind.read("config.json", PUBLISHED[model_type])
    assert [name for name, value in unread.items() if kind.concerns(name, value)] == []


def test_mpnet_has_a_bias_of_relative_positions(tmp_path):
    entries = {"model_type": "mpnet", "vocab_size": 12, "num_attention_heads": 2}
    entries |= {"relative_attention_num_buckets": 8}
    tables = [f"mpnet.embeddings.{name}_embeddings.weight" for name in ("word", "position")]
    norm = {f"mpnet.embeddings.LayerNorm.{end}": (16,) for end in ("weight", "bias")}
    bias = {"mpnet.encoder.relative_attention_bias.weight": (8, 2)}
    found = te.pretrained.load_embedder(file(tmp_path, entries, *tables, **norm, **bias))
    expected = {"num_heads": 2, "num_buckets": 8, "max_distance": 128, "bidirectional": True}
    assert found.bias == expected
    assert found.params["relative_position_bias"]["embeddings"].shape == (8, 2)


@pytest.mark.parametrize(
    ("entries", "tensor", "others"),
    [
        (LLAMA, "model.embed_positions.weight", []),
        (LLAMA, "model.token_type_embeddings.weight", []),
        ({"model_type": "mpt", "n_heads": 2}, "transformer.wpe.weight", ["transformer.wte.weight"]),
        (
            {"model_type": "t5"},
            "encoder.embed_positions.weight",
            [
                "shared.weight",
                "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            ],
        ),
    ],
)
def test_a_tensor_beside_the_table_that_is_not_read_is_named(tmp_path, entries, tensor, others):
    path = file(tmp_path, entries, *(others or ["model.embed_tokens.weight"]), tensor)
    with pytest.raises(
        ValueError,
        match=rf"wanted an input layer like that of {entries['model_type']}, or its table of tokens "
        rf"alone: .*, got also {tensor}, which is not read$",
    ):
        te.pretrained.load_embedder(path)


def test_a_table_of_languages_is_named(tmp_path):
    case = next(each for each in CASES.values() if each["settings"]["model_type"] == "gpt2")
    stray = {"transformer.lang_embeddings.weight": np.ones([3, 8], np.float32)}
    with pytest.raises(
        ValueError, match=r"got also transformer.lang_embeddings.weight, which is not read$"
    ):
        te.pretrained.load_embedder(checkpoint(tmp_path, case, change=stray))


def test_buffers_and_other_streams_are_left_out(tmp_path):
    tensors = ["model.embed_tokens.weight", "model.embed_positions.position_ids"]
    tensors += ["model.layers.0.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    tensors += ["vision.embed_positions.weight", "model.image_embeddings.weight"]
    te.pretrained.load_embedder(file(tmp_path, LLAMA, *tensors))
