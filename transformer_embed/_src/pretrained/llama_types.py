"""Decoders like Llama, which rotate heads, and Gemma."""

from transformer_embed._src.pretrained.entries import REQUIRED
from transformer_embed._src.pretrained.model_type import (
    ANYWHERE,
    CHUNKED,
    COMPRESSED,
    COMPRESSED_SPARSE,
    CONSECUTIVE,
    FULL,
    HEAD_DIM,
    IN_TURNS,
    IN_WINDOW,
    INDEXED,
    LINEAR,
    MULTIPLIER,
    MULTIPLIER_OR_HEAD_DIM,
    QUERY_SCALAR,
    SLIDING,
    SLIDING_OR_ALL,
    UNSCALED,
    ModelType,
)

# --- What most types of a family have.

LLAMA = ModelType(tokens="embed_tokens", rotary="half", attention=HEAD_DIM).but(
    tie_word_embeddings=False
)
# Multi-head latent attention has two head sizes, so the attention is not described.
LATENT = LLAMA.but(attention="")
WHOLE_LLAMA = LLAMA.but(no_effect="max_position_embeddings partial_rotary_factor")
QWEN2_VL = LLAMA.but(
    sections=CONSECUTIVE,
    mrope_section=(16, 24, 24),
    rope_theta=1_000_000.0,
    sliding_window=4096,
    use_sliding_window=False,
    max_window_layers=80,
)
GEMMA = LLAMA.but(
    scale=True,
    final_logit_softcapping=None,
    use_bidirectional_attention=None,
    tie_word_embeddings=True,
)
GEMMA3 = GEMMA.but(
    attention=QUERY_SCALAR,
    image_blocks=((FULL, ANYWHERE), (SLIDING, IN_WINDOW)),
    rope_local_base_freq=10_000.0,
    rope_theta=1_000_000.0,
    sliding_window=4096,
    sliding_window_pattern=6,
)
GEMMA4 = GEMMA.but(
    attention=UNSCALED,
    # Only sliding layers are listed, because full layers are causal for images, too.
    image_blocks=((SLIDING, IN_WINDOW),),
    has_vision_switch=True,
    per_layer="per_layer",
    # Large Gemma 4 models have no extra inputs for their layers.
    may_lack="per_layer_inputs/embeddings per_layer_inputs/w per_layer_inputs/scale",
    rope_local_base_freq=10_000.0,
    head_dim=256,
    # Full layers have wider heads.
    global_head_dim=512,
    # These are required, because the type's default rotation has a scaling.
    rope_scaling=REQUIRED,
    rope_theta=REQUIRED,
    partial_rotary_factor=0.25,
    sliding_window=512,
    sliding_window_pattern=6,
    layer_types=REQUIRED,
)

# --- The types.

LLAMA_TYPES = {
    # In these types, transformers ignores the share of the channels that rotate.
    "llama": WHOLE_LLAMA,
    "olmo": WHOLE_LLAMA,
    "olmo2": WHOLE_LLAMA,
    "olmoe": WHOLE_LLAMA,
    "seed_oss": WHOLE_LLAMA,
    "arcee": WHOLE_LLAMA,
    "internlm3": WHOLE_LLAMA,
    "aria_text": WHOLE_LLAMA,
    "diffllama": WHOLE_LLAMA,
    "iquestcoder": WHOLE_LLAMA,
    "jais2": WHOLE_LLAMA,
    "mistral": WHOLE_LLAMA.but(sliding_window=4096),
    "ministral": WHOLE_LLAMA.but(sliding_window=4096),
    "voxtral_realtime_text": WHOLE_LLAMA.but(sliding_window=4096),
    "qwen2": WHOLE_LLAMA.but(sliding_window=4096, use_sliding_window=False, max_window_layers=28),
    "qwen3": WHOLE_LLAMA.but(sliding_window=4096, use_sliding_window=False, max_window_layers=28),
    "qwen2_moe": WHOLE_LLAMA.but(
        sliding_window=4096, use_sliding_window=False, max_window_layers=28
    ),
    "qwen3_moe": WHOLE_LLAMA.but(sliding_window=4096, use_sliding_window=False),
    "doge": WHOLE_LLAMA.but(sliding_window=None),
    "gpt_oss": WHOLE_LLAMA.but(
        has_sinks=True,
        rope_scaling=REQUIRED,
        rope_theta=REQUIRED,
        sliding_window=128,
        sliding_window_pattern=2,
    ),
    "ministral3": WHOLE_LLAMA.but(
        llama_4_scaling_beta=None, rope_scaling=REQUIRED, rope_theta=REQUIRED, sliding_window=None
    ),
    "apertus": WHOLE_LLAMA.but(rope_scaling=REQUIRED, rope_theta=REQUIRED),
    "apertus1p5_text": WHOLE_LLAMA.but(rope_scaling=REQUIRED, rope_theta=REQUIRED),
    "higgs_audio_v2": WHOLE_LLAMA.but(rope_scaling=REQUIRED, rope_theta=REQUIRED),
    "flex_olmo": WHOLE_LLAMA.but(rope_theta=500_000.0),
    "bitnet": WHOLE_LLAMA.but(rope_theta=500_000.0),
    "mixtral": WHOLE_LLAMA.but(rope_theta=1_000_000.0, sliding_window=None),
    "phimoe": WHOLE_LLAMA.but(rope_theta=1_000_000.0, sliding_window=None),
    "solar_open": WHOLE_LLAMA.but(rope_theta=1_000_000.0),
    "emu3_text_model": WHOLE_LLAMA.but(rope_theta=1_000_000.0),
    "hy_v3": WHOLE_LLAMA.but(rope_theta=11_158_840.0),
    "jetmoe": WHOLE_LLAMA.but(attention="", tie_word_embeddings=True),
    "eurobert": WHOLE_LLAMA.but(is_causal=False),
    "olmo_hybrid": WHOLE_LLAMA.but(kinds=(LINEAR, FULL), sliding_window_pattern=4),
    "unlimited_ocr_text": WHOLE_LLAMA.but(kinds=("reference_sliding_attention",)),
    "cwm": WHOLE_LLAMA.but(
        phase=0,
        rope_scaling=REQUIRED,
        rope_theta=REQUIRED,
        sliding_window=8192,
        sliding_window_pattern=4,
    ),
    "mllama_text_model": WHOLE_LLAMA.but(
        cross_attention_layers=(3, 8, 13, 18, 23, 28, 33, 38), rope_theta=500_000.0
    ),
    "mllama": WHOLE_LLAMA.but(
        cross_attention_layers=(3, 8, 13, 18, 23, 28, 33, 38), rope_theta=500_000.0
    ),
    "minimax": WHOLE_LLAMA.but(
        attention="",
        kinds=(LINEAR, FULL),
        phase=0,
        rope_theta=1_000_000.0,
        sliding_window_pattern=2,
    ),
    # In the types that follow, transformers reads the share of the channels that rotate.
    #
    # cla_share_factor says how many layers share keys and values.
    "hunyuan_v1_dense": LLAMA.but(has_alpha=True, no_effect="cla_share_factor"),
    "hunyuan_v1_moe": LLAMA.but(has_alpha=True, no_effect="cla_share_factor"),
    # For images, the two channels of a pair may have different axes, which is no rotation. The
    # sections change nothing for text.
    "hunyuan_vl": LLAMA.but(
        has_alpha=True, no_effect="mrope_section xdrope_section", tie_word_embeddings=True
    ),
    "hunyuan_vl_text": LLAMA.but(
        has_alpha=True, no_effect="mrope_section xdrope_section", tie_word_embeddings=True
    ),
    "exaone": LLAMA.but(attention="", tokens="wte", rope_theta=500_000.0),
    "dbrx": LLAMA.but(attention="", tokens="wte", aliases="max_position_embeddings: max_seq_len"),
    "starcoder2": LLAMA.but(dropout=0.0, sliding_window=None, tie_word_embeddings=True),
    "lfm2": LLAMA.but(
        kinds=("conv", FULL),
        no_effect="use_pos_enc theta",
        attn_layer_indices=None,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    ),
    "minimax_m2": LLAMA.but(rotary_dim=None, rope_theta=5_000_000.0, partial_rotary_factor=1.0),
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_VL,
    # If config.json has no sections, transformers has these, in this type and in the next ones.
    "qwen2_5_omni_text": LLAMA.but(
        sections=CONSECUTIVE,
        mrope_section=(16, 24, 24),
        rope_theta=1_000_000.0,
        sliding_window=32768,
        use_sliding_window=False,
        max_window_layers=28,
        tie_word_embeddings=True,
    ),
    "paddleocr_vl_text": LLAMA.but(
        sections=CONSECUTIVE,
        mrope_section=(16, 24, 24),
        rope_theta=500_000.0,
        tie_word_embeddings=True,
    ),
    "glm4v_moe_text": LLAMA.but(
        sections=CONSECUTIVE, mrope_section=(8, 12, 12), partial_rotary_factor=0.5
    ),
    "glm_image_text": LLAMA.but(
        sections=CONSECUTIVE, mrope_section=(8, 12, 12), partial_rotary_factor=1.0
    ),
    "glm4v_text": LLAMA.but(
        rotary="interleaved",
        sections=CONSECUTIVE,
        mrope_section=(8, 12, 12),
        partial_rotary_factor=1.0,
    ),
    "glm_ocr_text": LLAMA.but(
        rotary="interleaved",
        sections=CONSECUTIVE,
        mrope_section=(8, 12, 12),
        partial_rotary_factor=1.0,
    ),
    "qwen3_vl_text": LLAMA.but(
        sections=IN_TURNS,
        mrope_section=(24, 20, 20),
        no_effect="mrope_interleaved interleaved",
        head_dim=128,
        rope_theta=500_000.0,
    ),
    "qwen3_vl_moe_text": LLAMA.but(
        sections=IN_TURNS,
        mrope_section=(24, 20, 20),
        no_effect="mrope_interleaved interleaved",
        rope_theta=500_000.0,
        tie_word_embeddings=True,
    ),
    "qwen3_omni_moe_text": LLAMA.but(
        sections=IN_TURNS,
        mrope_section=(24, 20, 20),
        no_effect="mrope_interleaved interleaved",
        rope_theta=1_000_000.0,
    ),
    "cosmos3_edge_text": LLAMA.but(
        sections=IN_TURNS,
        mrope_section=(24, 20, 20),
        no_effect="mrope_interleaved interleaved",
        head_dim=128,
        rope_theta=100_000_000.0,
    ),
    "helium": LLAMA.but(rotary="interleaved", rope_theta=100_000.0),
    "ernie4_5": LLAMA.but(rotary="interleaved", rope_theta=500_000.0, tie_word_embeddings=True),
    "ernie4_5_moe": LLAMA.but(rotary="interleaved", rope_theta=500_000.0, tie_word_embeddings=True),
    "deepseek_v2": LATENT.but(rotary="interleaved"),
    "deepseek_v32": LATENT.but(rotary="interleaved", kinds=(INDEXED,)),
    "glm": LLAMA.but(rotary="interleaved", head_dim=128, partial_rotary_factor=0.5),
    "glm4": LLAMA.but(rotary="interleaved", head_dim=128, partial_rotary_factor=0.5),
    "glm_moe_dsa": LATENT.but(rotary="rope_interleave", kinds=(INDEXED,)),
    # Both queries and keys are scaled, so the attention is not described.
    "openai_privacy_filter": LLAMA.but(
        attention="",
        rotary="interleaved",
        is_causal=False,
        rope_scaling=REQUIRED,
        rope_theta=REQUIRED,
        sliding_window=128,
    ),
    "deepseek_v3": LATENT.but(rotary="rope_interleave"),
    "axk1": LATENT.but(rotary="rope_interleave"),
    "glm4_moe_lite": LATENT.but(rotary="rope_interleave"),
    "kimi_k2": LATENT.but(rotary="rope_interleave"),
    "sarvam_mla": LATENT.but(rotary="rope_interleave"),
    "youtu": LATENT.but(rotary="rope_interleave", tie_word_embeddings=True),
    # The channels that rotate are a part of a head with its own size, so all channels of this part
    # rotate.
    "mistral4": LATENT.but(
        rotary="rope_interleave",
        no_effect="max_position_embeddings partial_rotary_factor",
        llama_4_scaling_beta=None,
        rope_scaling=REQUIRED,
        rope_theta=REQUIRED,
    ),
    # Most layers see averages of tokens in addition to tokens, so the attention is not described.
    # These layers have a rotation of their own.
    "deepseek_v4": LLAMA.but(
        attention="",
        tokens="embed_tokens embed",
        head="lm_head head",
        rotary="interleaved",
        kinds=(COMPRESSED, COMPRESSED_SPARSE),
        no_effect="rope_interleave partial_rotary_factor",
        compress_ratios=None,
        compress_rope_theta=160_000.0,
        # This is the trained length for YaRN, if the scaling has none.
        max_position_embeddings=1_048_576,
        sliding_rope_scaling=None,
        sliding_window=128,
    ),
    "cohere": LLAMA.but(
        rotary="interleaved", logit_scale=0.0625, rope_theta=500_000.0, tie_word_embeddings=True
    ),
    "cohere2": LLAMA.but(
        rotary="interleaved",
        rotates=SLIDING,
        no_effect="position_embedding_type use_embedding_sharing",
        logit_scale=0.0625,
        sliding_window=4096,
        sliding_window_pattern=4,
        tie_word_embeddings=True,
    ),
    # The first layers of Cohere 2's MoE may be dense. Dense layers rotate with full attention too.
    "cohere2_moe": LLAMA.but(
        rotary="interleaved",
        rotates=SLIDING,
        mlp_layer_types=None,
        logit_scale=0.0625,
        sliding_window=4096,
        layer_types=REQUIRED,
        tie_word_embeddings=True,
    ),
    # EXAONE 4 rotates in sliding layers, or in all layers if there is no window.
    "exaone4": LLAMA.but(rotates=SLIDING_OR_ALL, sliding_window=4096, sliding_window_pattern=4),
    "exaone4_5_text": LLAMA.but(
        rotates=SLIDING_OR_ALL, sliding_window=4096, sliding_window_pattern=4
    ),
    "exaone_moe": LLAMA.but(rotates=SLIDING_OR_ALL, sliding_window=4096, sliding_window_pattern=4),
    "afmoe": LLAMA.but(
        scale="mup_enabled", rotates=SLIDING, sliding_window=1024, sliding_window_pattern=4
    ),
    "flint": LLAMA.but(has_sinks=True, rotates=SLIDING, sliding_window=513, layer_types=REQUIRED),
    "lara_mini": LLAMA.but(
        rotates=SLIDING, sliding_window=512, layer_types=REQUIRED, tie_word_embeddings=True
    ),
    # SmolLM 3 has windows in the layers that do not rotate.
    "smollm3": LLAMA.but(
        no_rope_layer_interval=4,
        rope_theta=2_000_000.0,
        sliding_window=None,
        use_sliding_window=False,
        tie_word_embeddings=True,
    ),
    # Llama 4 has chunks in the layers that rotate.
    "llama4": LLAMA.but(
        rotary="interleaved",
        kinds=(FULL, CHUNKED),
        attn_scale=0.1,
        attention_chunk_size=8192,
        no_rope_layer_interval=4,
        rope_theta=500_000.0,
    ),
    "llama4_text": LLAMA.but(
        rotary="interleaved",
        kinds=(FULL, CHUNKED),
        attn_scale=0.1,
        attention_chunk_size=8192,
        no_rope_layer_interval=4,
        rope_theta=500_000.0,
    ),
    "olmo3": LLAMA.but(
        rope_local_base_freq=500_000.0,
        rope_theta=500_000.0,
        sliding_window=4096,
        sliding_window_pattern=4,
    ),
    "mellum": LLAMA.but(
        kinds=(FULL,), rope_local_base_freq=10_000.0, rope_theta=500_000.0, sliding_window=1024
    ),
    # The sliding layers of MiMo have a base and a share of their own.
    "mimo_v2_flash": LLAMA.but(
        attention="",
        sliding_window_size=None,
        sliding_rotary_factor=0.334,
        rope_local_base_freq=10_000.0,
        head_dim=192,
        rope_theta=5_000_000.0,
        partial_rotary_factor=0.334,
        sliding_window=129,
        layer_types=REQUIRED,
    ),
    "granite": LLAMA.but(attention=MULTIPLIER, scale="embedding_multiplier", logits_scaling=1.0),
    "granitemoe": LLAMA.but(attention=MULTIPLIER, scale="embedding_multiplier", logits_scaling=1.0),
    "granitemoeshared": LLAMA.but(
        attention=MULTIPLIER, scale="embedding_multiplier", logits_scaling=1.0
    ),
    "granitemoehybrid": LLAMA.but(
        attention="",
        scale="embedding_multiplier",
        kinds=(LINEAR,),
        position_embedding_type=None,
        logits_scaling=1.0,
    ),
    "granitemoe_swa": LLAMA.but(
        attention=MULTIPLIER,
        has_sinks=True,
        scale="embedding_multiplier",
        phase=0,
        layer_rope_theta=None,
        logits_scaling=1.0,
        sliding_window=128,
        sliding_window_pattern=4,
    ),
    "granite_swa": LLAMA.but(
        attention=MULTIPLIER,
        has_sinks=True,
        scale="embedding_multiplier",
        phase=0,
        layer_rope_theta=None,
        logits_scaling=1.0,
        sliding_window=128,
        sliding_window_pattern=4,
        tie_word_embeddings=True,
    ),
    "granite_docling_text": LLAMA.but(
        attention=MULTIPLIER,
        scale="embedding_multiplier",
        embedding_multiplier=12.0,
        logits_scaling=4.0,
        tie_word_embeddings=True,
    ),
    "minicpm": LLAMA.but(
        scale="scale_emb", no_effect="mup_denominator", tie_word_embeddings=True, dim_model_base=1
    ),
    "minicpm3": LATENT.but(
        scale="scale_emb", no_effect="mup_denominator", tie_word_embeddings=True, dim_model_base=256
    ),
    # For Phi, transformers reads partial_rotary_factor, and not the rotary_dim beside it.
    "phi": LLAMA.but(dropout=0.0, no_effect="rotary_dim", partial_rotary_factor=0.5),
    "glm4_moe": LLAMA.but(partial_rotary_factor=0.5),
    "nemotron": LLAMA.but(partial_rotary_factor=0.5),
    "persimmon": LLAMA.but(partial_rotary_factor=0.5),
    "stablelm": LLAMA.but(partial_rotary_factor=0.25),
    "bamba": LLAMA.but(
        attention="", kinds=(LINEAR, FULL), attn_layer_indices=(), partial_rotary_factor=0.5
    ),
    "qwen3_next": LLAMA.but(
        kinds=(LINEAR, FULL), head_dim=256, partial_rotary_factor=0.25, sliding_window_pattern=4
    ),
    "phi3": LLAMA.but(
        dropout=0.0,
        original_max_position_embeddings=4096,
        partial_rotary_factor=1.0,
        sliding_window=None,
    ),
    "phi4_multimodal": LLAMA.but(
        dropout=0.0,
        original_max_position_embeddings=4096,
        partial_rotary_factor=1.0,
        sliding_window=None,
    ),
    "qwen3_5_text": LLAMA.but(
        kinds=(LINEAR, FULL),
        sections=IN_TURNS,
        mrope_section=(11, 11, 10),
        no_effect="mrope_interleaved",
        head_dim=256,
        partial_rotary_factor=0.25,
        sliding_window_pattern=4,
    ),
    "qwen3_5_moe_text": LLAMA.but(
        kinds=(LINEAR, FULL),
        sections=IN_TURNS,
        mrope_section=(11, 11, 10),
        no_effect="mrope_interleaved",
        head_dim=256,
        partial_rotary_factor=0.25,
        sliding_window_pattern=4,
    ),
    "gpt_neox": LLAMA.but(
        tokens="embed_in", dropout=0.0, partial_rotary_factor=0.25, num_attention_heads=REQUIRED
    ),
    "gpt_neox_japanese": LLAMA.but(
        tokens="embed_in", dropout=0.0, partial_rotary_factor=1.0, tie_word_embeddings=True
    ),
    "falcon": LLAMA.but(attention="", tokens="word_embeddings", tie_word_embeddings=True),
    "hyperclovax": LLAMA.but(
        attention=MULTIPLIER_OR_HEAD_DIM,
        scale="embedding_multiplier",
        aliases="logit_scale: lm_head_multiplier logits_scaling",
        logit_scale=1.0,
    ),
    "falcon_h1": LLAMA.but(
        attention="",
        scale="embedding_multiplier",
        aliases="logit_scale: lm_head_multiplier logits_scaling",
        kinds=("hybrid",),
        logit_scale=1.0,
    ),
    # Gemma.
    "gemma": GEMMA,
    "gemma2": GEMMA.but(
        attention=QUERY_SCALAR,
        sliding_window=4096,
        sliding_window_pattern=2,
        final_logit_softcapping=30.0,
    ),
    "vaultgemma": GEMMA.but(
        attention=QUERY_SCALAR,
        sliding_window=4096,
        sliding_window_pattern=2,
        final_logit_softcapping=30.0,
    ),
    "recurrent_gemma": GEMMA.but(
        attention="",
        kinds=(LINEAR, SLIDING),
        no_effect="embeddings_scale_by_sqrt_dim",
        partial_rotary_factor=0.5,
        sliding_window=2048,
        sliding_window_pattern=3,
        final_logit_softcapping=30.0,
    ),
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    # Gemma 3n keeps several hidden vectors of each token. These two entries are about what layers
    # do to the vectors.
    "gemma3n_text": GEMMA.but(
        attention=UNSCALED,
        per_layer="per_layer",
        scale=True,
        no_effect="altup_correct_scale laurel_rank",
        rope_local_base_freq=10_000.0,
        rope_theta=1_000_000.0,
        sliding_window=512,
        sliding_window_pattern=5,
        final_logit_softcapping=30.0,
    ),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4.but(
        image_blocks=((FULL, ANYWHERE), (SLIDING, ANYWHERE)), sliding_window=1024
    ),
    "embedding_gemma2_text": GEMMA4.but(
        image_blocks=(), is_causal=False, partial_rotary_factor=1.0
    ),
}
