"""The registry of published models: a row for each kind of input layer.

Types, tensor names and defaults are those of the transformers library.
"""

import functools
from typing import Any

from transformer_embed._src.pretrained.description import (
    NORM_OFFSET,
    NORM_SCALE,
    POSITIONS,
    REQUIRED,
    ROTATED,
    TOKEN_TYPES,
    UNROTATED,
    WIDEN,
    WIDEN_OFFSET,
    Architecture,
)
from transformer_embed._src.pretrained.rope import CONSECUTIVE, FULL, IN_TURNS, SLIDING

# As in Cohere 2: layers with a sliding window rotate, those with full attention do not.
_SLIDING_ROTATES = (SLIDING, FULL)
_SIN_COS = {"layout": "sin_cos"}
_FAIRSEQ = {"layout": "sin_cos", "shift": 1, "odd": "zero"}
_PLACES = "it adds tables of places on a page"
# They list the layers, whose kinds `PretrainedInput.rotary` names.
_UNROTATED_LAYERS = "no_rope_layers no_rope_layer_interval"

_IGNORED = "the transformers library ignores what config.json says"

# Entries that the library once wrote for all models with two stacks.
_OLD = "normalize_embedding static_position_embeddings extra_pos_embeddings"

# --- Families: what most of their rows say.

_bert = functools.partial(
    Architecture,
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    dropout="hidden_dropout_prob",
    entries="layer_norm_eps",
    no_output="a dense layer and a norm come before it",
    refused_entries={"position_embedding_type": "others are not part of the input layer"},
)
_rotated_bert = functools.partial(
    _bert, positions="", rotary="half", refused_entries={}, meaningless="position_embedding_type"
)
_gpt2 = functools.partial(
    Architecture,
    tokens="wte",
    dropout="embd_pdrop",
    aliases={"hidden_size": "n_embd", "max_position_embeddings": "n_positions"},
)
_seq2seq = functools.partial(
    Architecture,
    # A stack's own table comes first: if the two are not tied, the shared one is not used.
    tokens="{stack}.embed_tokens shared",
    scale="scale_embedding",
    dropout="dropout",
    meaningless=_OLD,
    aliases={"hidden_size": "d_model"},
)
_bart = functools.partial(
    _seq2seq,
    positions="{stack}.embed_positions",
    norm="{stack}.layernorm_embedding",
    defaults={"layer_norm_eps": 1e-5},
)
# Parameters of one stack, a decoder.
_decoder = functools.partial(
    _seq2seq, tokens="decoder.embed_tokens", positions="decoder.embed_positions"
)
_llama = functools.partial(
    Architecture,
    tokens="embed_tokens",
    rotary="half",
    defaults={"tie_word_embeddings": False},
)
_gemma = functools.partial(_llama, scale=True, entries="final_logit_softcapping")
_by_layer = functools.partial(_llama, rotates_share=True, rotates_by_layer=True)

# Without a model type, only names that a single architecture has are recognised; for others, the
# user must give the model type.
ARCHITECTURES = (
    _bert(
        "bert dpr ernie splinter visual_bert align_text_model chinese_clip_text_model "
        "flava_text_model layoutlm fnet roc_bert markuplm tapas",
        refused={
            "embeddings_project.weight": "it has narrow tables that a linear layer widens",
            "embeddings.task_type_embeddings.weight": "it adds a table of tasks",
            "embeddings.x_position_embeddings.weight": _PLACES,
            "embeddings.xpath_embeddings.inner2emb.weight": "it adds a table of paths in a page",
            "embeddings.projection.weight": "a linear layer follows the norm",
            "embeddings.shape_embed.weight": "it adds tables of shapes and sounds",
            "embeddings.token_type_embeddings_0.weight": "it adds several tables of token types",
        },
    ),
    _bert("big_bird", scale="rescale_embeddings"),
    _bert(
        "deberta deberta-v2",
        may_lack=(POSITIONS, TOKEN_TYPES),
        # Each layer's attention reads its table of relative positions.
        meaningless="relative_attention position_biased_input position_buckets norm_rel_ebd",
        refused={"embeddings.embed_proj.weight": "a linear layer follows the tables"},
    ),
    _bert(
        "roberta xlm-roberta camembert data2vec-text luke xmod longformer roberta-prelayernorm "
        "altclip_text_model bridgetower_text_model clap_text_model layoutlmv3 lilt",
        entries="layer_norm_eps pad_token_id",
        start=None,
        known_below=r"\broberta\.$",
        refused={
            "embeddings.x_position_embeddings.weight": _PLACES,
            "layout_embeddings.x_position_embeddings.weight": "it has a second stream for places",
        },
    ),
    _bert("xlm-roberta-xl", entries="pad_token_id", start=None, norm=""),
    _bert("megatron-bert", entries="", norm=""),
    _bert(
        "mpnet",
        token_types="",
        start=None,
        bias="encoder.relative_attention_bias",
        defaults={"pad_token_id": 1},
    ),
    _bert("blip_text_model", token_types=""),
    _bert(
        "bert-generation git", token_types="", head="lm_head.decoder lm_head output", no_output=""
    ),
    _rotated_bert(
        "nomic_bert",
        norm="emb_ln",
        rotary="rotary_emb_interleaved",
        rotates_share=True,
        aliases={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "hidden_dropout_prob": "resid_pdrop",
            "layer_norm_eps": "layer_norm_epsilon",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_emb_fraction",
        },
    ),
    # Alibaba's own code of GTE is the type new.
    _rotated_bert("gte new", may_lack=(TOKEN_TYPES,)),
    _rotated_bert("jina_embeddings_v3", norm="emb_ln", aliases={"rope_theta": "rotary_emb_base"}),
    _rotated_bert(
        "roformer",
        rotary="interleaved",
        widen="embeddings_project",
        may_lack=(WIDEN, WIDEN_OFFSET),
        # The sinusoids that rotate heads.
        meaningless="embed_positions",
    ),
    _bert(
        "distilbert",
        token_types="",
        entries="",
        defaults={"layer_norm_eps": 1e-12},
        dropout="dropout",
        meaningless="tie_weights_ sinusoidal_pos_embds",
        aliases={"hidden_size": "dim"},
        known_below=r"\bdistilbert\.$",
    ),
    _bert("albert rembert", widen="encoder.embedding_hidden_mapping_in", known_below=""),
    _bert(
        "electra convbert",
        widen="embeddings_project",
        may_lack=(WIDEN, WIDEN_OFFSET),
        known_below=r"\belectra\.$",
    ),
    Architecture(
        "xlm flaubert",
        tokens="embeddings",
        positions="position_embeddings",
        norm="layer_norm_emb",
        entries="layer_norm_eps",
        dropout="hidden_dropout_prob",
        meaningless="use_lang_emb sinusoidal_embeddings share_inout_emb",
        aliases={"hidden_size": "emb_dim"},
        head="pred_layer.proj",
        refused_entries={"asm": "its output layer is an adaptive softmax"},
    ),
    Architecture(
        "xlnet",
        tokens="word_embedding",
        dropout="dropout",
        # Its attention adds sinusoids of distances. The embedding of what a query is to predict.
        meaningless="mask_emb untie_r",
        aliases={"hidden_size": "d_model"},
        head="lm_loss",
    ),
    _gpt2(
        "gpt2 gpt_neo gpt_bigcode gpt-sw3",
        positions="wpe",
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "embd_pdrop": "embed_dropout",
        },
        known_below=r"^$|\btransformer\.$",
    ),
    _gpt2("openai-gpt", tokens="tokens_embed", positions="positions_embed"),
    _gpt2("ctrl", tokens="w", scale=True, sinusoids=_SIN_COS),
    _gpt2("gptj codegen", rotary="interleaved", entries="rotary_dim", meaningless="rotary"),
    Architecture(
        "opt",
        tokens="decoder.embed_tokens",
        positions="decoder.embed_positions",
        entries="pad_token_id",
        start=2,
        refused={"decoder.project_in.weight": "it widens tokens before positions are added"},
    ),
    Architecture(
        "biogpt",
        tokens="embed_tokens",
        positions="embed_positions",
        start=2,
        scale="scale_embedding",
        head="output_projection",
    ),
    _decoder(
        "whisper",
        scale=False,
        meaningless="scale_embedding",
        aliases={"hidden_size": "d_model", "max_position_embeddings": "max_target_positions"},
        head="proj_out",
    ),
    _decoder(
        "trocr",
        norm="decoder.layernorm_embedding",
        may_lack=(NORM_SCALE, NORM_OFFSET),
        defaults={"layer_norm_eps": 1e-5},
        start=2,
        meaningless="layernorm_embedding",
        refused_entries={"use_learned_position_embeddings": "the file has no sinusoids"},
        head="output_projection decoder.output_projection",
    ),
    _decoder(
        "speech_to_text", positions="", entries="pad_token_id", start=None, sinusoids=_FAIRSEQ
    ),
    _seq2seq(
        "xglm",
        tokens="embed_tokens",
        start=2,
        sinusoids=_FAIRSEQ,
        refused_entries={"pad_token_id": "the sinusoid of that position would be zeros"},
    ),
    Architecture(
        "t5 mt5 switch_transformers umt5 longt5",
        tokens="{stack}.embed_tokens shared",
        bias="{stack}.block.0.layer.0.SelfAttention.relative_attention_bias "
        "{stack}.block.0.layer.0.LocalSelfAttention.relative_attention_bias",
        dropout="dropout_rate",
        entries="scale_decoder_outputs",
        aliases={"hidden_size": "d_model", "num_attention_heads": "num_heads"},
        refused={
            "{stack}.block.1.layer.0.SelfAttention.relative_attention_bias.weight": (
                "every layer has a bias of its own, as in UMT5"
            )
        },
    ),
    _seq2seq(
        "marian pegasus",
        sinusoids=_SIN_COS,
        entries="decoder_vocab_size share_encoder_decoder_embeddings",
    ),
    _seq2seq("pegasus_x", sinusoids={"layout": "sin_cos", "shift": 1}),
    _seq2seq(
        "m2m_100 nllb-moe fsmt",
        entries="pad_token_id",
        start=None,
        sinusoids=_FAIRSEQ,
        head="lm_head decoder.output_projection",
    ),
    _bart("bart mbart mvp plbart", start=2),
    _bart("led"),
    # Its decoder adds positions after the norm.
    _bart(
        "blenderbot-small",
        tokens="encoder.embed_tokens shared",
        positions="encoder.embed_positions",
        norm="encoder.layernorm_embedding",
    ),
    _bart("blenderbot", norm=""),
    # Its encoder has a norm that it does not apply.
    _bart("bigbird_pegasus", norm="", meaningless=f"{_OLD} layernorm_embedding"),
    Architecture(
        "clip clip_text_model siglip_text_model siglip2_text_model clipseg_text_model "
        "groupvit_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model "
        "xclip_text_model aimv2_text_model",
        tokens="embeddings.token_embedding",
        positions="embeddings.position_embedding",
        no_output="it has none",
        known_below="",
    ),
    Architecture("jamba kimi_linear", tokens="embed_tokens", meaningless="rope_theta"),
    Architecture(
        "mamba mamba2 falcon_mamba nemotron_h", tokens="embeddings", meaningless="rope_theta"
    ),
    _llama(
        "llama mistral qwen2 qwen3 mixtral qwen2_moe qwen3_moe gpt_oss olmo olmo2 olmoe "
        "olmo_hybrid flex_olmo ministral3 phimoe seed_oss arcee apertus "
        "internlm3 minimax aria_text diffllama doge eurobert iquestcoder jais2 jetmoe "
        "bitnet hy_v3 solar_open cwm higgs_audio_v2 "
        "voxtral_realtime_text unlimited_ocr_text emu3_text_model mllama_text_model",
        # Ministral 3 scales its queries. The library ignores the share.
        meaningless="llama_4_scaling_beta max_position_embeddings partial_rotary_factor",
    ),
    _llama("starcoder2", dropout="embedding_dropout"),
    _llama(
        "lfm2", meaningless="use_pos_enc theta", aliases={"tie_word_embeddings": "tie_embedding"}
    ),
    _llama("minimax_m2", rotates_share=True, entries="rotary_dim"),
    _llama(
        "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen2_vl qwen2_5_vl paddleocr_vl_text",
        sections=CONSECUTIVE,
    ),
    _llama(
        "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text cosmos3_edge_text",
        sections=IN_TURNS,
        meaningless="mrope_interleaved interleaved",
    ),
    _llama(
        "helium ernie4_5 ernie4_5_moe deepseek_v2 deepseek_v32 glm_moe_dsa openai_privacy_filter",
        rotary="interleaved",
    ),
    _llama("deepseek_v3 axk1 glm4_moe_lite youtu", rotary="rope_interleave"),
    _llama(
        "mistral4",
        rotary="rope_interleave",
        # It scales its queries. The channels that rotate are a head of their own.
        meaningless="llama_4_scaling_beta max_position_embeddings partial_rotary_factor",
    ),
    _llama("cohere", rotary="interleaved", entries="logit_scale"),
    _llama(
        "cohere2",
        rotary="interleaved",
        rotated_kinds=_SLIDING_ROTATES,
        entries="logit_scale",
        meaningless="position_embedding_type use_embedding_sharing",
    ),
    # Its first layers may be dense, which rotate with full attention too.
    _llama(
        "cohere2_moe",
        rotary="interleaved",
        rotated_kinds=(ROTATED, UNROTATED),
        entries="logit_scale",
    ),
    _llama("exaone4 exaone_moe", rotated_kinds=_SLIDING_ROTATES, entries="sliding_window"),
    _llama("afmoe", scale="mup_enabled", rotated_kinds=_SLIDING_ROTATES),
    _llama("flint", rotated_kinds=_SLIDING_ROTATES),
    _llama("smollm3", rotated_kinds=(ROTATED, UNROTATED), meaningless=_UNROTATED_LAYERS),
    _llama(
        "llama4 llama4_text",
        rotary="interleaved",
        rotated_kinds=(ROTATED, UNROTATED),
        # It scales the queries of layers that are not rotated.
        meaningless=f"floor_scale {_UNROTATED_LAYERS}",
    ),
    _gemma("gemma gemma2 vaultgemma"),
    _gemma(
        "recurrent_gemma",
        rotates_share=True,
        meaningless="embeddings_scale_by_sqrt_dim",
        aliases={"final_logit_softcapping": "logits_soft_cap"},
    ),
    _gemma(
        "gemma3 gemma3_text gemma3n_text gemma4_text gemma4_unified_text embedding_gemma2_text",
        rotates_share=True,
        rotates_by_layer=True,
        refused={
            "embed_tokens_per_layer.weight": "every layer adds a row of embed_tokens_per_layer"
        },
    ),
    _llama(
        "nanochat",
        refused={
            "layers.0.self_attn.q_proj.weight": "a norm without parameters follows, and heads "
            "rotate backwards"
        },
    ),
    _seq2seq(
        "t5gemma",
        tokens="{stack}.embed_tokens",
        refused={"{stack}.embed_tokens.weight": "config.json describes each stack apart"},
    ),
    _by_layer("olmo3 mellum mimo_v2_flash"),
    _by_layer(
        "modernbert modernbert-decoder",
        tokens="embeddings.tok_embeddings",
        norm="embeddings.norm",
        dropout="embedding_dropout",
        entries="layer_norm_eps",
        may_lack=(NORM_OFFSET,),
        aliases={
            "layer_norm_eps": "norm_eps",
            "rope_theta": "global_rope_theta",
            "rope_local_base_freq": "local_rope_theta",
        },
        no_output="a dense layer and a norm come before it",
        known_below="",
    ),
    _llama(
        "granite granitemoe granitemoeshared granite_docling_text granite_swa granitemoe_swa",
        scale="embedding_multiplier",
        entries="logits_scaling",
    ),
    _llama(
        "granitemoehybrid",
        scale="embedding_multiplier",
        entries="logits_scaling position_embedding_type",
    ),
    _llama(
        "hyperclovax falcon_h1",
        scale="embedding_multiplier",
        entries="logit_scale",
        aliases={"logit_scale": "lm_head_multiplier logits_scaling"},
    ),
    _llama(
        "minicpm minicpm3",
        scale="scale_emb",
        entries="dim_model_base",
        meaningless="mup_denominator",
    ),
    _llama(
        "phi glm4_moe nemotron persimmon stablelm qwen3_next bamba phi3 phi4_multimodal",
        dropout="embd_pdrop",
        rotates_share=True,
        aliases={"partial_rotary_factor": "partial_rotary_factor rope_pct rope_percent"},
    ),
    _llama("glm4v_moe_text glm_image_text", rotates_share=True, sections=CONSECUTIVE),
    _llama(
        "glm4v_text glm_ocr_text",
        rotary="interleaved",
        rotates_share=True,
        sections=CONSECUTIVE,
    ),
    _llama(
        "qwen3_5_text qwen3_5_moe_text",
        rotates_share=True,
        sections=IN_TURNS,
        meaningless="mrope_interleaved",
    ),
    _llama("glm glm4", rotary="interleaved", rotates_share=True),
    _llama(
        "gpt_neox gpt_neox_japanese",
        tokens="embed_in",
        dropout="hidden_dropout",
        rotates_share=True,
        aliases={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        head="embed_out lm_head",
        known_below="",
    ),
    _llama(
        "falcon",
        tokens="word_embeddings",
        aliases={"hidden_size": "n_embed"},
        refused_entries={"alibi": "its ALiBi is divided by the width of a head's root"},
    ),
    Architecture(
        "mpt",
        tokens="wte",
        has_alibi=True,
        meaningless="learned_pos_emb",
        aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads"},
        defaults={"alibi": True},
        refused_entries=dict.fromkeys(("alibi", "alibi_bias_max"), _IGNORED),
    ),
    Architecture(
        "bloom",
        tokens="word_embeddings",
        norm="word_embeddings_layernorm",
        entries="layer_norm_eps",
        has_alibi=True,
        meaningless="offset_alibi",
        aliases={
            "hidden_size": "n_embed",
            "layer_norm_eps": "layer_norm_epsilon",
            "num_attention_heads": "n_head",
        },
        known_below="",
    ),
)

# The default rotation of these types has a scaling.
_SCALED = (
    "gpt_oss ministral3 mistral4 apertus cwm higgs_audio_v2 openai_privacy_filter "
    "gemma4_text gemma4_unified_text"
)
# Defaults of entries in which types differ from their row, with the types; REQUIRED: config.json
# must say it.
DEFAULTS: dict[str, dict[Any, str]] = {
    "dim_model_base": {1: "minicpm"},
    "embd_pdrop": {
        0.0: "phi glm4_moe nemotron persimmon stablelm qwen3_next bamba phi3 phi4_multimodal "
        "gpt_neo gptj codegen"
    },
    "embedding_dropout": {0.0: "modernbert modernbert-decoder starcoder2"},
    "embedding_multiplier": {12.0: "granite_docling_text"},
    "final_logit_softcapping": {30.0: "gemma2 vaultgemma recurrent_gemma gemma3n_text"},
    "hidden_dropout": {0.0: "gpt_neox gpt_neox_japanese"},
    "layer_norm_eps": {
        1e-5: "altclip_text_model bridgetower_text_model jina_embeddings_v3 layoutlmv3 modernbert "
        "modernbert-decoder bloom",
        1e-7: "deberta deberta-v2",
    },
    "logit_scale": {0.0625: "cohere cohere2 cohere2_moe"},
    "logits_scaling": {4.0: "granite_docling_text"},
    "num_attention_heads": {REQUIRED: "mpt bloom gpt_neox"},
    "original_max_position_embeddings": {4096: "phi3 phi4_multimodal"},
    "partial_rotary_factor": {
        0.25: "gemma4_text gemma4_unified_text stablelm qwen3_next qwen3_5_text qwen3_5_moe_text "
        "gpt_neox",
        0.334: "mimo_v2_flash",
        0.5: "phi glm4_moe glm4v_moe_text nemotron persimmon bamba glm glm4 recurrent_gemma",
    },
    "position_embedding_type": {None: "granitemoehybrid"},
    "rope_local_base_freq": {500_000.0: "olmo3"},
    "rope_scaling": {REQUIRED: _SCALED},
    "rope_theta": {
        1_000.0: "nomic_bert",
        20_000.0: "jina_embeddings_v3",
        100_000.0: "helium",
        160_000.0: "modernbert modernbert-decoder gte",
        500_000.0: "paddleocr_vl_text flex_olmo bitnet qwen3_vl_text qwen3_vl_moe_text cohere "
        "ernie4_5 ernie4_5_moe llama4_text mllama_text_model olmo3 mellum",
        1_000_000.0: "mixtral phimoe minimax lfm2 solar_open emu3_text_model qwen2_vl_text "
        "qwen2_5_vl_text qwen2_5_omni_text qwen2_vl qwen2_5_vl qwen3_omni_moe_text gemma3 "
        "gemma3_text gemma3n_text embedding_gemma2_text",
        2_000_000.0: "smollm3",
        5_000_000.0: "minimax_m2 mimo_v2_flash",
        11_158_840.0: "hy_v3",
        100_000_000.0: "cosmos3_edge_text",
        REQUIRED: _SCALED,
    },
    "rotary_dim": {None: "minimax_m2"},
    "scale_decoder_outputs": {False: "mt5"},
    "scale_embedding": {
        True: "biogpt bigbird_pegasus fsmt m2m_100 nllb-moe pegasus_x plbart speech_to_text xglm"
    },
    "sliding_rotary_factor": {0.334: "mimo_v2_flash"},
    "tie_word_embeddings": {
        False: "git rembert fsmt mamba2 jamba kimi_linear nemotron_h gptj codegen",
        True: "paddleocr_vl_text starcoder2 jetmoe lfm2 cohere cohere2 cohere2_moe ernie4_5 "
        "ernie4_5_moe youtu smollm3 granite_docling_text granite_swa gpt_neox_japanese "
        "gemma gemma2 vaultgemma recurrent_gemma gemma3 gemma3_text "
        "gemma3n_text gemma4_text gemma4_unified_text embedding_gemma2_text "
        "modernbert modernbert-decoder minicpm minicpm3 falcon",
    },
}

# Models around a text model that scale and bound its logits as it does alone, and that do not.
SCALED_WITHIN = (
    "paligemma gemma3n gemma4 gemma4_unified granite_docling granite4_vision "
    "hyperclovax_vision_v2 blip-2 instructblip instructblipvideo"
)
UNSCALED_WITHIN = (
    "aya_vision cohere2_vision gemma3 granite_speech granite_speech_plus idefics2 idefics3 "
    "internvl llava llava_next llava_next_video llava_onevision mistral3 smolvlm video_llava "
    "vipllava"
)


def by_model_type(model_type: Any) -> Architecture | None:
    """The architecture of config.json's model_type, with the defaults of that type."""
    for row in ARCHITECTURES:
        if model_type in row.model_types:
            break
    else:
        return None
    defaults = dict(row.defaults)
    for entry, types_of in DEFAULTS.items():
        for default, types in types_of.items():
            if model_type in types.split():
                defaults[entry] = default
    return row._replace(types=f"{model_type} {row.types}", defaults=defaults)
