"""The registry of published models: a row for each kind of input layer, and defaults of types.

Types, tensor names and defaults are those of the transformers library.
"""

import functools
from typing import Any

from transformer_embed._src.pretrained.architecture import (
    FULL,
    INDEXED,
    LINEAR,
    SLIDING,
    WINDOWLESS,
    Architecture,
)
from transformer_embed._src.pretrained.entries import REQUIRED
from transformer_embed._src.pretrained.rope import CONSECUTIVE, IN_TURNS

# Kinds of layers, for `Architecture.kinds`.
_HYBRID = (LINEAR, FULL)
_SIN_COS = {"layout": "sin_cos"}
_FAIRSEQ = {"layout": "sin_cos", "shift": 1, "odd": "zero"}

# Entries that the library once wrote for all models with two stacks.
_OLD = "normalize_embedding static_position_embeddings extra_pos_embeddings"


def _row(types: str, **said: Any) -> Architecture:
    """A row; keywords that are not its fields are entries that it reads, with their defaults."""
    entries = {name: said.pop(name) for name in said.keys() - {*Architecture._fields}}
    return Architecture(types, **said, entries=entries)


# --- Families: what most of their rows say.

_bert = functools.partial(
    _row,
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    dropout="hidden_dropout_prob",
    is_causal=False,
    is_decoder=None,
    no_output="a dense layer and a norm come before it",
)
_rotated_bert = functools.partial(
    _bert, positions="", rotary="half", meaningless="position_embedding_type"
)
_generation = functools.partial(
    _bert, token_types="", head="lm_head.decoder lm_head output", no_output=""
)
_gpt2 = functools.partial(
    _row,
    tokens="wte",
    dropout="embd_pdrop",
)
_seq2seq = functools.partial(
    _row,
    # A stack's own table comes first: if the two are not tied, the shared one is not used.
    tokens="{stack}.embed_tokens shared",
    scale="scale_embedding",
    dropout="dropout",
    meaningless=_OLD,
)
_bart = functools.partial(
    _seq2seq,
    positions="{stack}.embed_positions",
    norm="{stack}.layernorm_embedding",
    # Its config.json has no epsilon.
    fixed={"layer_norm_eps": 1e-5},
)
# Parameters of one stack, a decoder.
_decoder = functools.partial(
    _seq2seq, tokens="decoder.embed_tokens", positions="decoder.embed_positions"
)
_t5 = functools.partial(
    _row,
    tokens="{stack}.embed_tokens shared",
    bias="{stack}.block.0.layer.0.SelfAttention.relative_attention_bias "
    "{stack}.block.0.layer.0.LocalSelfAttention.relative_attention_bias",
    dropout="dropout_rate",
    # A tied output layer of T5 divides by the root of d_model; mT5's does not.
    scale_decoder_outputs=True,
)
_clip = functools.partial(
    _row,
    tokens="embeddings.token_embedding",
    positions="embeddings.position_embedding",
    no_output="it has none",
)
_mamba = functools.partial(_row, tokens="embeddings", meaningless="rope_theta")
_llama = functools.partial(_row, tokens="embed_tokens", rotary="half", tie_word_embeddings=False)
_like_llama = functools.partial(
    _llama,
    # Ministral 3 scales its queries. The library ignores the share.
    meaningless="llama_4_scaling_beta max_position_embeddings partial_rotary_factor",
)
_interleaved = functools.partial(_llama, rotary="interleaved")
# A base of their own for sliding layers.
_by_layer = functools.partial(_llama, rope_local_base_freq=10_000.0)
_modernbert = functools.partial(
    _by_layer,
    tokens="embeddings.tok_embeddings",
    norm="embeddings.norm",
    dropout="embedding_dropout",
    may_lack="layer_norm/offset",
    no_output="a dense layer and a norm come before it",
    phase=0,
    local_attention=128,
)
_gemma = functools.partial(
    _llama, scale=True, final_logit_softcapping=None, use_bidirectional_attention=None
)
_gemma3 = functools.partial(_gemma, rope_local_base_freq=10_000.0)
# Each layer has an input of its own.
_gemma3n = functools.partial(
    _gemma3,
    per_layer_table="embed_tokens_per_layer",
    per_layer_weights="per_layer_model_projection",
    per_layer_norm="per_layer_projection_norm",
)
# Its full layers have wider heads. Large ones have no inputs of layers.
_gemma4 = functools.partial(
    _gemma3n,
    may_lack="per_layer_inputs/embeddings per_layer_inputs/w per_layer_inputs/scale",
    global_head_dim=512,
    head_dim=256,
)
_granite = functools.partial(_llama, scale="embedding_multiplier", logits_scaling=1.0)
_hyperclovax = functools.partial(
    _llama,
    scale="embedding_multiplier",
    aliases={"logit_scale": "lm_head_multiplier logits_scaling"},
    logit_scale=1.0,
)
_phi = functools.partial(_llama, dropout="embd_pdrop")

# The default rotation has a scaling.
_SCALED = (
    "gpt_oss ministral3 apertus apertus1p5_text higgs_audio_v2 cwm openai_privacy_filter mistral4 "
    "gemma4_text gemma4_unified_text embedding_gemma2_text"
)
# For an entry, the defaults that types of one row have of their own.
DEFAULTS: dict[str, dict[Any, str]] = {
    "rope_scaling": {
        REQUIRED: _SCALED,
    },
    "rope_theta": {
        REQUIRED: _SCALED,
        1_000.0: "nomic_bert",
        20_000.0: "jina_embeddings_v3",
        100_000.0: "helium",
        160_000.0: "gte modernbert modernbert-decoder",
        500_000.0: "flex_olmo bitnet mllama_text_model exaone paddleocr_vl_text qwen3_vl_text "
        "qwen3_vl_moe_text ernie4_5 ernie4_5_moe cohere llama4 llama4_text olmo3 mellum",
        1_000_000.0: "mixtral phimoe solar_open emu3_text_model minimax lfm2 qwen2_vl_text "
        "qwen2_5_vl_text qwen2_vl qwen2_5_vl qwen2_5_omni_text qwen3_omni_moe_text gemma3 "
        "gemma3_text gemma3n_text",
        2_000_000.0: "smollm3",
        5_000_000.0: "minimax_m2 mimo_v2_flash",
        11_158_840.0: "hy_v3",
        100_000_000.0: "cosmos3_edge_text",
    },
    "partial_rotary_factor": {
        0.25: "gemma4_text gemma4_unified_text stablelm qwen3_next qwen3_5_text qwen3_5_moe_text "
        "gpt_neox",
        0.334: "mimo_v2_flash",
        0.5: "recurrent_gemma phi glm4_moe nemotron persimmon bamba glm4v_moe_text glm glm4",
        1.0: "nomic_bert minimax_m2 embedding_gemma2_text phi3 phi4_multimodal glm_image_text "
        "glm4v_text glm_ocr_text gpt_neox_japanese",
    },
    "sliding_window": {
        None: "doge ministral3 mixtral phimoe starcoder2 smollm3 phi3 phi4_multimodal",
        128: "gpt_oss openai_privacy_filter granitemoe_swa granite_swa",
        129: "mimo_v2_flash",
        256: "gpt_neo",
        512: "lara_mini gemma3n_text gemma4_text embedding_gemma2_text",
        513: "flint",
        1024: "afmoe gemma4_unified_text mellum",
        2048: "recurrent_gemma",
        4096: "mistral ministral voxtral_realtime_text qwen2 qwen3 qwen2_moe qwen3_moe "
        "qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl cohere2 cohere2_moe exaone4 "
        "exaone_moe gemma2 vaultgemma gemma3 gemma3_text olmo3",
        8192: "cwm",
        32768: "qwen2_5_omni_text",
    },
    "use_sliding_window": {
        False: "qwen2 qwen3 qwen2_moe qwen3_moe qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl "
        "qwen2_5_omni_text smollm3",
    },
    "max_window_layers": {
        28: "qwen2 qwen3 qwen2_moe qwen2_5_omni_text",
        80: "qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl",
    },
    "sliding_window_pattern": {
        2: "gpt_neo gpt_oss minimax gemma2 vaultgemma",
        3: "recurrent_gemma modernbert modernbert-decoder",
        4: "olmo_hybrid cwm cohere2 exaone4 exaone_moe afmoe olmo3 granitemoe_swa granite_swa "
        "qwen3_next qwen3_5_text qwen3_5_moe_text",
        5: "gemma3n_text",
        6: "gemma3 gemma3_text gemma4_text gemma4_unified_text embedding_gemma2_text",
    },
    "layer_types": {
        REQUIRED: "lara_mini cohere2_moe flint gemma4_text gemma4_unified_text "
        "embedding_gemma2_text mimo_v2_flash",
    },
    "num_attention_heads": {
        REQUIRED: "gpt_neox mpt bloom",
    },
    "tie_word_embeddings": {
        False: "git rembert gptj codegen fsmt jamba kimi_linear mamba2 nemotron_h",
        True: "jetmoe starcoder2 lfm2 paddleocr_vl_text ernie4_5 ernie4_5_moe youtu cohere "
        "cohere2 cohere2_moe lara_mini smollm3 gemma gemma2 vaultgemma recurrent_gemma "
        "gemma3 gemma3_text gemma3n_text gemma4_text gemma4_unified_text "
        "embedding_gemma2_text modernbert modernbert-decoder granite_swa "
        "granite_docling_text minicpm minicpm3 gpt_neox_japanese falcon",
    },
    "scale_embedding": {
        True: "biogpt speech_to_text xglm pegasus_x m2m_100 nllb-moe fsmt plbart bigbird_pegasus",
    },
    "scale_decoder_outputs": {
        False: "mt5",
    },
    "dim_model_base": {
        1: "minicpm",
    },
    "final_logit_softcapping": {
        30.0: "gemma2 vaultgemma recurrent_gemma gemma3n_text",
    },
    "layer_norm_eps": {
        1e-7: "deberta deberta-v2",
        1e-5: "altclip_text_model bridgetower_text_model layoutlmv3 jina_embeddings_v3 modernbert "
        "modernbert-decoder bloom",
    },
    "hidden_dropout_prob": {
        0.0: "flava_text_model blip_text_model nomic_bert albert rembert",
    },
    "hidden_dropout": {
        0.0: "gpt_neox gpt_neox_japanese",
    },
    "embd_pdrop": {
        0.0: "gpt_neo gptj codegen whisper phi glm4_moe nemotron persimmon bamba stablelm "
        "qwen3_next phi3 phi4_multimodal",
    },
    "embedding_dropout": {
        0.0: "starcoder2 modernbert modernbert-decoder",
    },
}

ARCHITECTURES = (
    _bert(
        "bert dpr ernie splinter visual_bert align_text_model chinese_clip_text_model "
        "layoutlm fnet roc_bert markuplm tapas flava_text_model"
    ),
    # Its attention is sparse.
    _bert("big_bird", scale="rescale_embeddings", kinds=()),
    _bert(
        "deberta deberta-v2",
        may_lack="learned_positional_encoding/embeddings token_type_embedding/embeddings",
        # Each layer's attention reads its table of relative positions.
        meaningless="relative_attention position_biased_input position_buckets norm_rel_ebd",
    ),
    _bert(
        "roberta xlm-roberta camembert data2vec-text luke xmod roberta-prelayernorm "
        "clap_text_model lilt altclip_text_model bridgetower_text_model layoutlmv3",
        start="pad_token_id",
    ),
    # Some of its tokens see all.
    _bert("longformer", start="pad_token_id", kinds=()),
    _bert("xlm-roberta-xl", start="pad_token_id", norm=""),
    _bert("megatron-bert", norm=""),
    _bert(
        "mpnet",
        token_types="",
        start="pad_token_id",
        bias="encoder.relative_attention_bias",
        fixed={"pad_token_id": 1},
    ),
    # Its caller says whether it is a decoder.
    _bert("blip_text_model", token_types="", kinds=(), fixed={"is_decoder": None}),
    _generation("bert-generation"),
    _generation("git", is_causal=True),
    _rotated_bert("nomic_bert", norm="emb_ln", rotary="rotary_emb_interleaved"),
    # The type new is of Alibaba's own code of GTE.
    _rotated_bert("gte new", may_lack="token_type_embedding/embeddings"),
    _rotated_bert("jina_embeddings_v3", norm="emb_ln"),
    _rotated_bert(
        "roformer",
        rotary="interleaved",
        widen="embeddings_project",
        may_lack="widen/w widen/b",
        # The sinusoids that rotate heads.
        meaningless="embed_positions",
    ),
    _bert(
        "distilbert",
        token_types="",
        dropout="dropout",
        # Its config.json has no epsilon.
        fixed={"layer_norm_eps": 1e-12},
        meaningless="tie_weights_ sinusoidal_pos_embds",
    ),
    _bert("albert rembert", widen="encoder.embedding_hidden_mapping_in"),
    _bert("electra convbert", widen="embeddings_project", may_lack="widen/w widen/b"),
    _row(
        "xlm flaubert",
        tokens="embeddings",
        positions="position_embeddings",
        norm="layer_norm_emb",
        dropout="hidden_dropout_prob",
        meaningless="use_lang_emb sinusoidal_embeddings share_inout_emb",
        is_causal=False,
        head="pred_layer.proj",
    ),
    _row(
        "xlnet",
        tokens="word_embedding",
        dropout="dropout",
        # Its attention adds sinusoids of distances. The embedding of what a query is to predict.
        meaningless="mask_emb untie_r",
        is_causal=False,
        head="lm_loss",
    ),
    _gpt2("gpt2 gpt_bigcode gpt-sw3", positions="wpe"),
    _gpt2("gpt_neo", positions="wpe", phase=0),
    _gpt2("openai-gpt", tokens="tokens_embed", positions="positions_embed"),
    _gpt2("ctrl", tokens="w", scale=True, sinusoids=_SIN_COS),
    _gpt2("gptj codegen", rotary="interleaved", meaningless="rotary", rotary_dim=64),
    _row(
        "opt",
        tokens="decoder.embed_tokens",
        positions="decoder.embed_positions",
        # Its table has two rows more than config.json has positions.
        start=2,
        pad_token_id=1,
    ),
    _row(
        "biogpt",
        tokens="embed_tokens",
        positions="embed_positions",
        start=2,
        scale="scale_embedding",
        head="output_projection",
    ),
    _decoder(
        "whisper",
        # Its config.json has this entry, which the decoder does not read.
        scale=False,
        dropout="embd_pdrop",
        meaningless="scale_embedding",
        aliases={"embd_pdrop": "dropout"},
        head="proj_out",
    ),
    _decoder(
        "trocr",
        norm="decoder.layernorm_embedding",
        may_lack="layer_norm/scale layer_norm/offset",
        fixed={"layer_norm_eps": 1e-5},
        start=2,
        meaningless="layernorm_embedding use_learned_position_embeddings",
        head="output_projection decoder.output_projection",
    ),
    _decoder("speech_to_text", positions="", start="pad_token_id", sinusoids=_FAIRSEQ),
    _seq2seq(
        "xglm",
        tokens="embed_tokens",
        start=2,
        sinusoids=_FAIRSEQ,
        fixed={"pad_token_id": None},
    ),
    _t5("t5 switch_transformers umt5 mt5"),
    _t5("longt5", kinds=()),
    _seq2seq(
        "marian pegasus",
        sinusoids=_SIN_COS,
        decoder_vocab_size=None,
        share_encoder_decoder_embeddings=True,
    ),
    _seq2seq("pegasus_x", kinds=(), sinusoids={"layout": "sin_cos", "shift": 1}),
    _seq2seq(
        "m2m_100 nllb-moe fsmt",
        start="pad_token_id",
        sinusoids=_FAIRSEQ,
        head="lm_head decoder.output_projection",
    ),
    _bart("bart mbart mvp plbart", start=2),
    _bart("led", kinds=()),
    # Its decoder adds positions after the norm.
    _bart(
        "blenderbot-small",
        tokens="encoder.embed_tokens shared",
        positions="encoder.embed_positions",
        norm="encoder.layernorm_embedding",
    ),
    _bart("blenderbot", norm=""),
    # Its encoder has a norm that it does not apply.
    _bart(
        "bigbird_pegasus",
        norm="",
        kinds=(),
        meaningless=f"{_OLD} layernorm_embedding",
    ),
    _clip(
        "clip clip_text_model clipseg_text_model groupvit_text_model metaclip_2_text_model "
        "owlv2_text_model owlvit_text_model xclip_text_model aimv2_text_model"
    ),
    _clip("siglip_text_model siglip2_text_model", is_causal=False),
    _mamba("jamba kimi_linear", tokens="embed_tokens", kinds=()),
    _mamba("mamba falcon_mamba mamba2", kinds=(LINEAR,)),
    _mamba("nemotron_h", kinds=()),
    _like_llama(
        "llama olmo olmo2 olmoe seed_oss arcee internlm3 aria_text diffllama iquestcoder jais2 "
        "mistral ministral voxtral_realtime_text qwen2 qwen3 qwen2_moe qwen3_moe doge gpt_oss "
        "ministral3 apertus apertus1p5_text higgs_audio_v2 flex_olmo bitnet mixtral phimoe "
        "solar_open emu3_text_model hy_v3 jetmoe"
    ),
    _like_llama("eurobert", is_causal=False),
    _like_llama("olmo_hybrid", kinds=_HYBRID),
    _like_llama("unlimited_ocr_text", kinds=("reference_sliding_attention",)),
    _like_llama("cwm", phase=0),
    _like_llama("mllama_text_model", cross_attention_layers=(3, 8, 13, 18, 23, 28, 33, 38)),
    _like_llama("minimax", kinds=_HYBRID, phase=0),
    _llama("hunyuan_v1_dense hunyuan_v1_moe", has_alpha=True),
    _llama("exaone", tokens="wte"),
    _llama("starcoder2", dropout="embedding_dropout"),
    _llama("lfm2", meaningless="use_pos_enc theta", attn_layer_indices=None),
    _llama("minimax_m2", rotary_dim=None),
    _llama(
        "qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl qwen2_5_omni_text paddleocr_vl_text "
        "glm4v_moe_text glm_image_text",
        sections=CONSECUTIVE,
    ),
    _llama(
        "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text cosmos3_edge_text",
        sections=IN_TURNS,
        meaningless="mrope_interleaved interleaved",
    ),
    _interleaved("helium ernie4_5 ernie4_5_moe deepseek_v2 glm glm4"),
    _interleaved("deepseek_v32", kinds=(INDEXED,)),
    _interleaved("openai_privacy_filter", is_causal=False),
    _interleaved("glm4v_text glm_ocr_text", sections=CONSECUTIVE),
    _llama("glm_moe_dsa", rotary="rope_interleave", kinds=(INDEXED,)),
    _llama("deepseek_v3 axk1 glm4_moe_lite kimi_k2 sarvam_mla youtu", rotary="rope_interleave"),
    _llama(
        "mistral4",
        rotary="rope_interleave",
        # It scales its queries. The channels that rotate are a head of their own.
        meaningless="llama_4_scaling_beta max_position_embeddings partial_rotary_factor",
    ),
    _interleaved("cohere", logit_scale=0.0625),
    _interleaved(
        "cohere2",
        rotates=SLIDING,
        meaningless="position_embedding_type use_embedding_sharing",
        logit_scale=0.0625,
    ),
    # Its first layers may be dense, which rotate with full attention too.
    _interleaved(
        "cohere2_moe",
        rotates=SLIDING,
        logit_scale=0.0625,
        mlp_layer_types=None,
        first_k_dense_replace=None,
    ),
    _llama("exaone4 exaone_moe", rotates=WINDOWLESS),
    _llama("afmoe", scale="mup_enabled", rotates=SLIDING),
    _llama("flint lara_mini", rotates=SLIDING),
    _llama(
        "smollm3",
        no_rope_layer_interval=4,
        no_rope_layers=None,
    ),
    _interleaved(
        "llama4 llama4_text",
        # It scales the queries of layers that are not rotated.
        meaningless="floor_scale",
        attention_chunk_size=8192,
        no_rope_layer_interval=4,
        no_rope_layers=None,
    ),
    _gemma("gemma gemma2 vaultgemma"),
    _gemma(
        "recurrent_gemma",
        meaningless="embeddings_scale_by_sqrt_dim",
        kinds=(LINEAR, SLIDING),
    ),
    _gemma3("gemma3 gemma3_text"),
    _gemma3n(
        "gemma3n_text",
        # Of what the layers do to several hidden vectors.
        meaningless="altup_correct_scale laurel_rank",
    ),
    _gemma4("gemma4_text gemma4_unified_text"),
    _gemma4("embedding_gemma2_text", is_causal=False),
    _by_layer("olmo3", rope_local_base_freq=500_000.0),
    _by_layer("mellum", kinds=(FULL,)),
    _by_layer("mimo_v2_flash", sliding_window_size=None, sliding_rotary_factor=0.334),
    _modernbert("modernbert", is_causal=False),
    _modernbert("modernbert-decoder"),
    _granite("granite granitemoe granitemoeshared"),
    _granite("granitemoe_swa granite_swa", layer_rope_theta=None, phase=0),
    _granite("granite_docling_text", embedding_multiplier=12.0, logits_scaling=4.0),
    _granite("granitemoehybrid", position_embedding_type=None, kinds=(LINEAR,)),
    _hyperclovax("hyperclovax"),
    _hyperclovax("falcon_h1", kinds=("hybrid",)),
    _llama(
        "minicpm minicpm3",
        scale="scale_emb",
        meaningless="mup_denominator",
        dim_model_base=256,
    ),
    # The library reads the share, not Phi's `rotary_dim` beside it.
    _phi("phi", meaningless="rotary_dim"),
    _phi("glm4_moe nemotron persimmon stablelm"),
    _phi("bamba", attn_layer_indices=()),
    _phi("qwen3_next", kinds=_HYBRID),
    _phi("phi3 phi4_multimodal", original_max_position_embeddings=4096),
    _llama(
        "qwen3_5_text qwen3_5_moe_text",
        kinds=_HYBRID,
        sections=IN_TURNS,
        meaningless="mrope_interleaved",
    ),
    _llama(
        "gpt_neox gpt_neox_japanese",
        tokens="embed_in",
        dropout="hidden_dropout",
        head="embed_out lm_head",
    ),
    _llama("falcon", tokens="word_embeddings"),
    _row(
        "mpt",
        tokens="wte",
        has_alibi=True,
        # It has no other positions.
        meaningless="learned_pos_emb alibi",
    ),
    _row(
        "bloom",
        tokens="word_embeddings",
        norm="word_embeddings_layernorm",
        has_alibi=True,
        meaningless="offset_alibi",
        fixed={"alibi_bias_max": 8.0},
    ),
)


def by_model_type(model_type: Any) -> Architecture | None:
    """The architecture of config.json's model_type, with the defaults of that type."""
    for row in ARCHITECTURES:
        if model_type in row.types.split():
            own = {
                entry: value
                for entry, values in DEFAULTS.items()
                for value, types in values.items()
                if model_type in types.split()
            }
            return row._replace(types=model_type, entries={**row.entries, **own})
    return None
