"""The registry of published models: a row for each kind of input layer and its defaults.

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
# The default rotation has a scaling.
_SCALED: Any = {"rope_theta": REQUIRED, "rope_scaling": REQUIRED}

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
_albert = functools.partial(
    _bert,
    widen="encoder.embedding_hidden_mapping_in",
    hidden_dropout_prob=0.0,
)
_roberta = functools.partial(
    _bert,
    start="pad_token_id",
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
_gpt2_itself = functools.partial(_gpt2, positions="wpe")
_seq2seq = functools.partial(
    _row,
    # A stack's own table comes first: if the two are not tied, the shared one is not used.
    tokens="{stack}.embed_tokens shared",
    scale="scale_embedding",
    dropout="dropout",
    meaningless=_OLD,
)
_m2m = functools.partial(
    _seq2seq,
    start="pad_token_id",
    sinusoids=_FAIRSEQ,
    head="lm_head decoder.output_projection",
    scale_embedding=True,
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
_deepseek = functools.partial(_llama, rotary="rope_interleave")
# Windows that the layers above `max_window_layers` have, if they are used.
_windows = {"sliding_window": 4096, "use_sliding_window": False}
_qwen2_vl = functools.partial(_llama, sections=CONSECUTIVE)
_qwen3_vl = functools.partial(
    _llama, sections=IN_TURNS, meaningless="mrope_interleaved interleaved"
)
_by_layer = functools.partial(_llama, rope_local_base_freq=10_000.0)
_modernbert = functools.partial(
    _by_layer,
    tokens="embeddings.tok_embeddings",
    norm="embeddings.norm",
    dropout="embedding_dropout",
    may_lack="layer_norm/offset",
    no_output="a dense layer and a norm come before it",
    phase=0,
    embedding_dropout=0.0,
    layer_norm_eps=1e-5,
    local_attention=128,
    rope_theta=160_000.0,
    sliding_window_pattern=3,
    tie_word_embeddings=True,
)
_gemma = functools.partial(
    _llama, scale=True, final_logit_softcapping=None, tie_word_embeddings=True
)
_gemma3 = functools.partial(
    _gemma,
    sliding_window_pattern=6,
    use_bidirectional_attention=None,
    rope_local_base_freq=10_000.0,
    rope_theta=1_000_000.0,
)
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
    layer_types=REQUIRED,
    global_head_dim=512,
    head_dim=256,
    partial_rotary_factor=0.25,
    rope_theta=REQUIRED,
    rope_scaling=REQUIRED,
)
_granite = functools.partial(_llama, scale="embedding_multiplier", logits_scaling=1.0)
_granite_swa = functools.partial(
    _granite, layer_rope_theta=None, sliding_window=128, sliding_window_pattern=4, phase=0
)
_hyperclovax = functools.partial(
    _llama,
    scale="embedding_multiplier",
    aliases={"logit_scale": "lm_head_multiplier logits_scaling"},
    logit_scale=1.0,
)
_minicpm = functools.partial(
    _llama, scale="scale_emb", meaningless="mup_denominator", tie_word_embeddings=True
)
_phi = functools.partial(
    _llama,
    dropout="embd_pdrop",
    embd_pdrop=0.0,
)
_gpt_neox = functools.partial(
    _llama,
    tokens="embed_in",
    dropout="hidden_dropout",
    head="embed_out lm_head",
    hidden_dropout=0.0,
)

ARCHITECTURES = (
    _bert(
        "bert dpr ernie splinter visual_bert align_text_model chinese_clip_text_model "
        "layoutlm fnet roc_bert markuplm tapas",
    ),
    # Its attention is sparse.
    _bert("big_bird", scale="rescale_embeddings", kinds=()),
    _bert(
        "deberta deberta-v2",
        may_lack="learned_positional_encoding/embeddings token_type_embedding/embeddings",
        # Each layer's attention reads its table of relative positions.
        meaningless="relative_attention position_biased_input position_buckets norm_rel_ebd",
        layer_norm_eps=1e-7,
    ),
    _roberta(
        "roberta xlm-roberta camembert data2vec-text luke xmod roberta-prelayernorm "
        "clap_text_model lilt"
    ),
    # Some of its tokens see all.
    _roberta("longformer", kinds=()),
    _roberta("altclip_text_model bridgetower_text_model layoutlmv3", layer_norm_eps=1e-5),
    _bert("xlm-roberta-xl", start="pad_token_id", norm=""),
    _bert("megatron-bert", norm=""),
    _bert(
        "mpnet",
        token_types="",
        start="pad_token_id",
        bias="encoder.relative_attention_bias",
        fixed={"pad_token_id": 1},
    ),
    _bert("flava_text_model", hidden_dropout_prob=0.0),
    # Its caller says whether it is a decoder.
    _bert(
        "blip_text_model",
        token_types="",
        kinds=(),
        fixed={"is_decoder": None},
        hidden_dropout_prob=0.0,
    ),
    _generation("bert-generation"),
    _generation("git", is_causal=True, tie_word_embeddings=False),
    _rotated_bert(
        "nomic_bert",
        norm="emb_ln",
        rotary="rotary_emb_interleaved",
        hidden_dropout_prob=0.0,
        partial_rotary_factor=1.0,
        rope_theta=1_000.0,
    ),
    _rotated_bert("gte", may_lack="token_type_embedding/embeddings", rope_theta=160_000.0),
    # Alibaba's own code of GTE.
    _rotated_bert("new", may_lack="token_type_embedding/embeddings"),
    _rotated_bert(
        "jina_embeddings_v3",
        norm="emb_ln",
        layer_norm_eps=1e-5,
        rope_theta=20_000.0,
    ),
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
    _albert("albert"),
    _albert("rembert", tie_word_embeddings=False),
    _bert(
        "electra convbert",
        widen="embeddings_project",
        may_lack="widen/w widen/b",
    ),
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
    _gpt2_itself("gpt2 gpt_bigcode gpt-sw3"),
    _gpt2_itself(
        "gpt_neo",
        phase=0,
        sliding_window=256,
        sliding_window_pattern=2,
        embd_pdrop=0.0,
    ),
    _gpt2("openai-gpt", tokens="tokens_embed", positions="positions_embed"),
    _gpt2("ctrl", tokens="w", scale=True, sinusoids=_SIN_COS),
    _gpt2(
        "gptj codegen",
        rotary="interleaved",
        meaningless="rotary",
        embd_pdrop=0.0,
        rotary_dim=64,
        tie_word_embeddings=False,
    ),
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
        scale_embedding=True,
    ),
    _decoder(
        "whisper",
        # Its config.json has this entry, which the decoder does not read.
        scale=False,
        dropout="embd_pdrop",
        meaningless="scale_embedding",
        aliases={"embd_pdrop": "dropout"},
        head="proj_out",
        embd_pdrop=0.0,
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
    _decoder(
        "speech_to_text",
        positions="",
        start="pad_token_id",
        sinusoids=_FAIRSEQ,
        scale_embedding=True,
    ),
    _seq2seq(
        "xglm",
        tokens="embed_tokens",
        start=2,
        sinusoids=_FAIRSEQ,
        fixed={"pad_token_id": None},
        scale_embedding=True,
    ),
    # A tied output layer of T5 divides by the root of d_model; mT5's does not.
    _t5("t5 switch_transformers umt5", scale_decoder_outputs=True),
    _t5("longt5", kinds=(), scale_decoder_outputs=True),
    _t5("mt5", scale_decoder_outputs=False),
    _seq2seq(
        "marian pegasus",
        sinusoids=_SIN_COS,
        decoder_vocab_size=None,
        share_encoder_decoder_embeddings=True,
    ),
    _seq2seq(
        "pegasus_x", kinds=(), sinusoids={"layout": "sin_cos", "shift": 1}, scale_embedding=True
    ),
    _m2m("m2m_100 nllb-moe"),
    _m2m("fsmt", tie_word_embeddings=False),
    _bart("bart mbart mvp", start=2),
    _bart("plbart", start=2, scale_embedding=True),
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
        scale_embedding=True,
    ),
    _clip(
        "clip clip_text_model clipseg_text_model groupvit_text_model metaclip_2_text_model "
        "owlv2_text_model owlvit_text_model xclip_text_model aimv2_text_model"
    ),
    _clip("siglip_text_model siglip2_text_model", is_causal=False),
    _mamba("jamba kimi_linear", tokens="embed_tokens", kinds=(), tie_word_embeddings=False),
    _mamba("mamba falcon_mamba", kinds=(LINEAR,)),
    _mamba("mamba2", tie_word_embeddings=False, kinds=(LINEAR,)),
    _mamba(
        "nemotron_h",
        kinds=(),
        tie_word_embeddings=False,
    ),
    _like_llama(
        "llama olmo olmo2 olmoe seed_oss arcee internlm3 aria_text diffllama iquestcoder jais2"
    ),
    _like_llama("mistral ministral voxtral_realtime_text", sliding_window=4096),
    _like_llama("qwen2 qwen3 qwen2_moe", max_window_layers=28, **_windows),
    _like_llama("qwen3_moe", **_windows),
    _like_llama("doge", sliding_window=None),
    _like_llama("eurobert", is_causal=False),
    _like_llama("olmo_hybrid", kinds=_HYBRID, sliding_window_pattern=4),
    _like_llama("unlimited_ocr_text", kinds=("reference_sliding_attention",)),
    _like_llama("gpt_oss", sliding_window=128, sliding_window_pattern=2, **_SCALED),
    _like_llama("ministral3", sliding_window=None, **_SCALED),
    _like_llama("apertus apertus1p5_text higgs_audio_v2", **_SCALED),
    _like_llama("cwm", phase=0, sliding_window=8192, sliding_window_pattern=4, **_SCALED),
    _like_llama("flex_olmo bitnet", rope_theta=500_000.0),
    _like_llama(
        "mllama_text_model",
        cross_attention_layers=(3, 8, 13, 18, 23, 28, 33, 38),
        rope_theta=500_000.0,
    ),
    _like_llama("mixtral phimoe", rope_theta=1_000_000.0, sliding_window=None),
    _like_llama("solar_open emu3_text_model", rope_theta=1_000_000.0),
    _like_llama(
        "minimax", kinds=_HYBRID, phase=0, rope_theta=1_000_000.0, sliding_window_pattern=2
    ),
    _like_llama("hy_v3", rope_theta=11_158_840.0),
    _llama("hunyuan_v1_dense hunyuan_v1_moe", has_alpha=True),
    _llama("exaone", tokens="wte", rope_theta=500_000.0),
    _llama(
        "lara_mini",
        rotates=SLIDING,
        layer_types=REQUIRED,
        sliding_window=512,
        tie_word_embeddings=True,
    ),
    _like_llama("jetmoe", tie_word_embeddings=True),
    _llama(
        "starcoder2",
        dropout="embedding_dropout",
        embedding_dropout=0.0,
        sliding_window=None,
        tie_word_embeddings=True,
    ),
    _llama(
        "lfm2",
        meaningless="use_pos_enc theta",
        attn_layer_indices=None,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    ),
    _llama("minimax_m2", partial_rotary_factor=1.0, rope_theta=5_000_000.0, rotary_dim=None),
    _qwen2_vl(
        "qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl",
        max_window_layers=80,
        rope_theta=1_000_000.0,
        **_windows,
    ),
    _qwen2_vl(
        "qwen2_5_omni_text",
        max_window_layers=28,
        rope_theta=1_000_000.0,
        **_windows | {"sliding_window": 32768},
    ),
    _qwen2_vl("paddleocr_vl_text", rope_theta=500_000.0, tie_word_embeddings=True),
    _qwen3_vl("qwen3_vl_text qwen3_vl_moe_text", rope_theta=500_000.0),
    _qwen3_vl("qwen3_omni_moe_text", rope_theta=1_000_000.0),
    _qwen3_vl("cosmos3_edge_text", rope_theta=100_000_000.0),
    _interleaved("helium", rope_theta=100_000.0),
    _interleaved("ernie4_5 ernie4_5_moe", rope_theta=500_000.0, tie_word_embeddings=True),
    _interleaved("deepseek_v2"),
    _interleaved("deepseek_v32 glm_moe_dsa", kinds=(INDEXED,)),
    _interleaved("openai_privacy_filter", is_causal=False, sliding_window=128, **_SCALED),
    _deepseek("deepseek_v3 axk1 glm4_moe_lite kimi_k2 sarvam_mla"),
    _deepseek("youtu", tie_word_embeddings=True),
    _deepseek(
        "mistral4",
        # It scales its queries. The channels that rotate are a head of their own.
        meaningless="llama_4_scaling_beta max_position_embeddings partial_rotary_factor",
        **_SCALED,
    ),
    _interleaved("cohere", logit_scale=0.0625, rope_theta=500_000.0, tie_word_embeddings=True),
    _interleaved(
        "cohere2",
        rotates=SLIDING,
        meaningless="position_embedding_type use_embedding_sharing",
        logit_scale=0.0625,
        sliding_window=4096,
        sliding_window_pattern=4,
        tie_word_embeddings=True,
    ),
    # Its first layers may be dense, which rotate with full attention too.
    _interleaved(
        "cohere2_moe",
        rotates=SLIDING,
        layer_types=REQUIRED,
        logit_scale=0.0625,
        mlp_layer_types=None,
        first_k_dense_replace=None,
        sliding_window=4096,
        tie_word_embeddings=True,
    ),
    _llama("exaone4 exaone_moe", rotates=WINDOWLESS, sliding_window=4096, sliding_window_pattern=4),
    _llama(
        "afmoe",
        scale="mup_enabled",
        rotates=SLIDING,
        sliding_window=1024,
        sliding_window_pattern=4,
    ),
    _llama("flint", rotates=SLIDING, layer_types=REQUIRED, sliding_window=513),
    _llama(
        "smollm3",
        no_rope_layer_interval=4,
        no_rope_layers=None,
        sliding_window=None,
        use_sliding_window=False,
        rope_theta=2_000_000.0,
        tie_word_embeddings=True,
    ),
    _interleaved(
        "llama4 llama4_text",
        # It scales the queries of layers that are not rotated.
        meaningless="floor_scale",
        attention_chunk_size=8192,
        no_rope_layer_interval=4,
        no_rope_layers=None,
        rope_theta=500_000.0,
    ),
    _gemma("gemma", use_bidirectional_attention=None),
    _gemma(
        "gemma2 vaultgemma",
        final_logit_softcapping=30.0,
        sliding_window=4096,
        sliding_window_pattern=2,
        use_bidirectional_attention=None,
    ),
    _gemma(
        "recurrent_gemma",
        meaningless="embeddings_scale_by_sqrt_dim",
        kinds=(LINEAR, SLIDING),
        final_logit_softcapping=30.0,
        partial_rotary_factor=0.5,
        sliding_window=2048,
        sliding_window_pattern=3,
    ),
    _gemma3("gemma3 gemma3_text", sliding_window=4096),
    _gemma3n(
        "gemma3n_text",
        # Of what the layers do to several hidden vectors.
        meaningless="altup_correct_scale laurel_rank",
        final_logit_softcapping=30.0,
        sliding_window=512,
        sliding_window_pattern=5,
    ),
    _gemma4("gemma4_text", sliding_window=512),
    _gemma4("gemma4_unified_text", sliding_window=1024),
    _gemma4(
        "embedding_gemma2_text",
        is_causal=False,
        partial_rotary_factor=1.0,
        sliding_window=512,
    ),
    _by_layer(
        "olmo3",
        rope_local_base_freq=500_000.0,
        rope_theta=500_000.0,
        sliding_window=4096,
        sliding_window_pattern=4,
    ),
    _by_layer("mellum", rope_theta=500_000.0, sliding_window=1024, kinds=(FULL,)),
    _by_layer(
        "mimo_v2_flash",
        layer_types=REQUIRED,
        sliding_window=129,
        sliding_window_size=None,
        partial_rotary_factor=0.334,
        rope_theta=5_000_000.0,
        sliding_rotary_factor=0.334,
    ),
    _modernbert("modernbert", is_causal=False),
    _modernbert("modernbert-decoder"),
    _granite("granite granitemoe granitemoeshared"),
    _granite_swa("granitemoe_swa"),
    _granite_swa("granite_swa", tie_word_embeddings=True),
    _granite(
        "granite_docling_text",
        embedding_multiplier=12.0,
        logits_scaling=4.0,
        tie_word_embeddings=True,
    ),
    _granite("granitemoehybrid", position_embedding_type=None, kinds=(LINEAR,)),
    _hyperclovax("hyperclovax"),
    _hyperclovax("falcon_h1", kinds=("hybrid",)),
    _minicpm("minicpm", dim_model_base=1),
    _minicpm("minicpm3", dim_model_base=256),
    # The library reads the share, not Phi's `rotary_dim` beside it.
    _phi("phi", meaningless="rotary_dim", partial_rotary_factor=0.5),
    _phi("glm4_moe nemotron persimmon", partial_rotary_factor=0.5),
    _phi(
        "bamba",
        attn_layer_indices=(),
        partial_rotary_factor=0.5,
    ),
    _phi("stablelm", partial_rotary_factor=0.25),
    _phi(
        "qwen3_next",
        kinds=_HYBRID,
        partial_rotary_factor=0.25,
        sliding_window_pattern=4,
    ),
    _phi(
        "phi3 phi4_multimodal",
        sliding_window=None,
        original_max_position_embeddings=4096,
        partial_rotary_factor=1.0,
    ),
    _llama("glm4v_moe_text", sections=CONSECUTIVE, partial_rotary_factor=0.5),
    _llama("glm_image_text", sections=CONSECUTIVE, partial_rotary_factor=1.0),
    _interleaved("glm4v_text glm_ocr_text", sections=CONSECUTIVE, partial_rotary_factor=1.0),
    _llama(
        "qwen3_5_text qwen3_5_moe_text",
        kinds=_HYBRID,
        sections=IN_TURNS,
        meaningless="mrope_interleaved",
        sliding_window_pattern=4,
        partial_rotary_factor=0.25,
    ),
    _interleaved("glm glm4", partial_rotary_factor=0.5),
    _gpt_neox("gpt_neox", num_attention_heads=REQUIRED, partial_rotary_factor=0.25),
    _gpt_neox("gpt_neox_japanese", partial_rotary_factor=1.0, tie_word_embeddings=True),
    _llama(
        "falcon",
        tokens="word_embeddings",
        tie_word_embeddings=True,
    ),
    _row(
        "mpt",
        tokens="wte",
        has_alibi=True,
        # It has no other positions.
        meaningless="learned_pos_emb alibi",
        num_attention_heads=REQUIRED,
    ),
    _row(
        "bloom",
        tokens="word_embeddings",
        norm="word_embeddings_layernorm",
        has_alibi=True,
        meaningless="offset_alibi",
        layer_norm_eps=1e-5,
        num_attention_heads=REQUIRED,
        fixed={"alibi_bias_max": 8.0},
    ),
)


def by_model_type(model_type: Any) -> Architecture | None:
    """The architecture of config.json's model_type, under that name."""
    for row in ARCHITECTURES:
        if model_type in row.model_types:
            return row._replace(types=f"{model_type} {row.types}")
    return None
