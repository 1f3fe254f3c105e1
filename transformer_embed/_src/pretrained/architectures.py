"""The registry of published models: families of input layers, and what types have of their own.

Types, tensor names and defaults are those of the transformers library.
"""

from typing import Any

from transformer_embed._src.positions.schemes import Sinusoidal
from transformer_embed._src.pretrained.architecture import (
    CHUNKED,
    FULL,
    INDEXED,
    LINEAR,
    REQUIRED,
    SLIDING,
    WINDOWLESS,
    Architecture,
)
from transformer_embed._src.pretrained.rope import CONSECUTIVE, IN_TURNS

# --- Families: fields of `Architecture`, and entries of config.json with their defaults.

_BERT: dict[str, Any] = {
    "tokens": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "dropout": 0.1,
    "is_causal": False,
    "is_decoder": None,
    "no_output": "a dense layer and a norm come before it",
}
_GPT: dict[str, Any] = {"tokens": "wte", "dropout": 0.1}
# Entries that the library once wrote for all models with two stacks, and sinusoids.
_OLD = "normalize_embedding static_position_embeddings extra_pos_embeddings embed_positions"
_SEQ2SEQ: dict[str, Any] = {
    # A stack's own table comes first: if the two are not tied, the shared one is not used.
    "tokens": "{stack}.embed_tokens shared",
    "scale": "scale_embedding",
    "dropout": 0.1,
    "meaningless": _OLD,
}
_BART = _SEQ2SEQ | {
    "positions": "{stack}.embed_positions",
    "norm": "{stack}.layernorm_embedding",
    # Its config.json has no epsilon.
    "layer_norm_eps": 1e-5,
    "fixed": "layer_norm_eps",
}
# Parameters of one stack, a decoder.
_DECODER = _SEQ2SEQ | {
    "tokens": "decoder.embed_tokens",
    "positions": "decoder.embed_positions",
}
_LLAMA: dict[str, Any] = {"tokens": "embed_tokens", "rotary": "half", "tie_word_embeddings": False}

# By the types of each.
FAMILIES: dict[str, dict[str, Any]] = {
    "bert dpr ernie splinter visual_bert align_text_model chinese_clip_text_model layoutlm fnet "
    "roc_bert markuplm tapas flava_text_model big_bird roberta xlm-roberta camembert "
    "data2vec-text luke xmod roberta-prelayernorm clap_text_model lilt altclip_text_model "
    "bridgetower_text_model layoutlmv3 longformer xlm-roberta-xl megatron-bert blip_text_model "
    "albert rembert electra convbert": _BERT,
    "deberta deberta-v2": _BERT
    | {
        "may_lack": "learned_positional_encoding/embeddings token_type_embedding/embeddings",
        # Each layer's attention reads its table of relative positions.
        "meaningless": "relative_attention position_biased_input position_buckets norm_rel_ebd",
    },
    "mpnet": _BERT | {"bias": "encoder.relative_attention_bias", "fixed": "pad_token_id"},
    "distilbert": _BERT
    | {
        # Its config.json has no epsilon.
        "fixed": "layer_norm_eps",
        "meaningless": "tie_weights_ sinusoidal_pos_embds",
    },
    "bert-generation git": _BERT | {"no_output": ""},
    # The type new is of Alibaba's own code of GTE.
    "nomic_bert gte new jina_embeddings_v3 roformer": _BERT
    | {"positions": "", "rotary": "half", "meaningless": "position_embedding_type"},
    # ESM-2. Its library does not drop, and keeps zeros at padding.
    "esm": _BERT
    | {
        "positions": "",
        "token_types": "",
        "norm": "",
        "rotary": "half",
        "dropout": 0.0,
        "fixed": "dropout",
        "token_dropout": False,
        "meaningless": "position_embedding_type emb_layer_norm_before emb_layer_norm_after",
    },
    "xlm flaubert": {
        "tokens": "embeddings",
        "positions": "position_embeddings",
        "norm": "layer_norm_emb",
        "dropout": 0.1,
        "meaningless": "use_lang_emb sinusoidal_embeddings share_inout_emb",
    },
    "xlnet": {
        "tokens": "word_embedding",
        "dropout": 0.1,
        # Its attention adds sinusoids of distances. The embedding of what a query is to predict.
        "meaningless": "mask_emb untie_r",
    },
    "gpt2 gpt_bigcode gpt-sw3 gpt_neo": _GPT | {"positions": "wpe"},
    "openai-gpt": _GPT | {"tokens": "tokens_embed", "positions": "positions_embed"},
    "ctrl": _GPT | {"tokens": "w"},
    "gptj codegen": _GPT | {"meaningless": "rotary", "rotary_dim": 64},
    "opt": {
        "tokens": "decoder.embed_tokens",
        "positions": "decoder.embed_positions",
    },
    "biogpt": {
        "tokens": "embed_tokens",
        "positions": "embed_positions",
        "scale": "scale_embedding",
    },
    "whisper": _DECODER
    | {
        # Its config.json has this entry, which the decoder does not read.
        "scale": False,
        "meaningless": "scale_embedding",
    },
    "trocr": _DECODER
    | {
        "norm": "decoder.layernorm_embedding",
        "may_lack": "layer_norm/scale layer_norm/offset",
        "layer_norm_eps": 1e-5,
        "fixed": "layer_norm_eps",
        "meaningless": "layernorm_embedding use_learned_position_embeddings",
    },
    "speech_to_text": _DECODER | {"positions": ""},
    "xglm": _SEQ2SEQ | {"tokens": "embed_tokens", "fixed": "pad_token_id"},
    "marian pegasus pegasus_x m2m_100 nllb-moe fsmt": _SEQ2SEQ,
    "bart mbart mvp plbart led blenderbot bigbird_pegasus": _BART,
    # Its decoder adds positions after the norm.
    "blenderbot-small": _BART
    | {
        "tokens": "encoder.embed_tokens shared",
        "positions": "encoder.embed_positions",
        "norm": "encoder.layernorm_embedding",
    },
    "t5 switch_transformers umt5 mt5 longt5": {
        "tokens": "{stack}.embed_tokens shared",
        "bias": "{stack}.block.0.layer.0.SelfAttention.relative_attention_bias "
        "{stack}.block.0.layer.0.LocalSelfAttention.relative_attention_bias",
        "dropout": 0.1,
        # A tied output layer of T5 divides by the root of d_model; mT5's does not.
        "scale_decoder_outputs": True,
    },
    "clip clip_text_model clipseg_text_model groupvit_text_model metaclip_2_text_model "
    "owlv2_text_model owlvit_text_model xclip_text_model aimv2_text_model siglip_text_model "
    "siglip2_text_model": {
        "tokens": "embeddings.token_embedding",
        "positions": "embeddings.position_embedding",
        "no_output": "it has none",
    },
    "mamba falcon_mamba mamba2 nemotron_h jamba kimi_linear deepseek_v4": {
        "tokens": "embeddings",
        "meaningless": "rope_theta",
    },
    "llama olmo olmo2 olmoe seed_oss arcee internlm3 aria_text diffllama iquestcoder jais2 "
    "mistral ministral voxtral_realtime_text qwen2 qwen3 qwen2_moe qwen3_moe doge gpt_oss "
    "ministral3 apertus apertus1p5_text higgs_audio_v2 flex_olmo bitnet mixtral phimoe "
    "solar_open emu3_text_model hy_v3 jetmoe eurobert olmo_hybrid unlimited_ocr_text cwm "
    "mllama_text_model mllama minimax": _LLAMA
    # The library ignores the share.
    | {"meaningless": "max_position_embeddings partial_rotary_factor"},
    "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hunyuan_vl_text exaone dbrx starcoder2 lfm2 "
    "minimax_m2 qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl qwen2_5_omni_text "
    "paddleocr_vl_text glm4v_moe_text glm_image_text glm4v_text glm_ocr_text qwen3_vl_text "
    "qwen3_vl_moe_text qwen3_omni_moe_text cosmos3_edge_text helium ernie4_5 ernie4_5_moe "
    "deepseek_v2 deepseek_v32 glm glm4 glm_moe_dsa openai_privacy_filter deepseek_v3 axk1 "
    "glm4_moe_lite kimi_k2 sarvam_mla youtu mistral4 cohere cohere2 cohere2_moe exaone4 "
    "exaone4_5_text exaone_moe afmoe flint lara_mini smollm3 llama4 llama4_text olmo3 mellum "
    "mimo_v2_flash granite granitemoe granitemoeshared granitemoehybrid granitemoe_swa "
    "granite_swa granite_docling_text minicpm minicpm3 phi glm4_moe nemotron persimmon stablelm "
    "bamba qwen3_next phi3 phi4_multimodal qwen3_5_text qwen3_5_moe_text gpt_neox "
    "gpt_neox_japanese falcon hyperclovax falcon_h1": _LLAMA,
    "modernbert modernbert-decoder": _LLAMA
    | {
        "tokens": "embeddings.tok_embeddings",
        "norm": "embeddings.norm",
        "may_lack": "layer_norm/offset",
        "no_output": "a dense layer and a norm come before it",
        "local_attention": 128,
    },
    "gemma gemma2 vaultgemma recurrent_gemma gemma3 gemma3_text gemma3n_text gemma4_text "
    "gemma4_unified_text embedding_gemma2_text": _LLAMA
    | {"final_logit_softcapping": None, "use_bidirectional_attention": None},
    "mpt": {
        "tokens": "wte",
        "has_alibi": True,
        # It has no other positions.
        "meaningless": "learned_pos_emb alibi",
    },
    "bloom": {
        "tokens": "word_embeddings",
        "norm": "word_embeddings_layernorm",
        "has_alibi": True,
        "meaningless": "offset_alibi",
        "fixed": "alibi_bias_max",
    },
}

# --- What types have of their own, for each field or entry.

_FAIRSEQ = Sinusoidal(layout="sin_cos", shift=1, odd="zero")
# Positions count from the id of padding.
_PADDED = (
    "roberta xlm-roberta camembert data2vec-text luke xmod roberta-prelayernorm clap_text_model "
    "altclip_text_model bridgetower_text_model layoutlmv3 longformer xlm-roberta-xl mpnet "
    "speech_to_text m2m_100 nllb-moe fsmt"
)
# The default rotation has a scaling.
_SCALED = (
    "gpt_oss ministral3 apertus apertus1p5_text higgs_audio_v2 cwm openai_privacy_filter mistral4 "
    "gemma4_text gemma4_unified_text embedding_gemma2_text"
)
# Its full layers have wider heads.
_GEMMA4 = "gemma4_text gemma4_unified_text embedding_gemma2_text"
# Each layer has an input of its own.
_GEMMA3N = f"gemma3n_text {_GEMMA4}"
_GEMMAS = f"gemma3 gemma3_text {_GEMMA3N}"
_COHERE = "cohere cohere2 cohere2_moe"
_HYPERCLOVAX = "hyperclovax falcon_h1"
_HUNYUAN_VL = "hunyuan_vl hunyuan_vl_text"
OWN: dict[str, dict[Any, str]] = {
    "tokens": {
        "wte": "exaone dbrx",
        "embed_tokens embed": "deepseek_v4",
        "embed_in": "gpt_neox gpt_neox_japanese",
        "word_embeddings": "falcon",
        "embed_tokens": "jamba kimi_linear",
    },
    "token_types": {
        "": "mpnet blip_text_model bert-generation git distilbert",
    },
    "norm": {
        "": "xlm-roberta-xl megatron-bert blenderbot bigbird_pegasus",
        "emb_ln": "nomic_bert jina_embeddings_v3",
    },
    "widen": {
        "embeddings_project": "electra convbert roformer",
        "encoder.embedding_hidden_mapping_in": "albert rembert",
    },
    "per_layer": {
        "per_layer": _GEMMA3N,
    },
    "may_lack": {
        "widen/w widen/b": "electra convbert roformer",
        "token_type_embedding/embeddings": "gte new",
        # Large ones have no inputs of layers.
        "per_layer_inputs/embeddings per_layer_inputs/w per_layer_inputs/scale": _GEMMA4,
    },
    "pad_token_id": {
        0: "lilt",
        1: f"{_PADDED} opt",
    },
    "start": {
        "pad_token_id": f"lilt {_PADDED}",
        # The table of OPT has two rows more than config.json has positions.
        2: "opt biogpt trocr xglm bart mbart mvp plbart",
    },
    "sinusoids": {
        Sinusoidal(layout="sin_cos"): "ctrl marian pegasus",
        Sinusoidal(layout="sin_cos", shift=1): "pegasus_x",
        _FAIRSEQ: "speech_to_text xglm m2m_100 nllb-moe fsmt",
    },
    "scale": {
        True: f"ctrl gemma gemma2 vaultgemma recurrent_gemma {_GEMMAS}",
        "rescale_embeddings": "big_bird",
        "mup_enabled": "afmoe",
        "embedding_multiplier": "granite granitemoe granitemoeshared granitemoehybrid "
        f"granitemoe_swa granite_swa granite_docling_text {_HYPERCLOVAX}",
        "scale_emb": "minicpm minicpm3",
    },
    "dropout": {
        0.0: "flava_text_model blip_text_model nomic_bert albert rembert gpt_neo gptj codegen "
        "whisper starcoder2 modernbert modernbert-decoder gpt_neox gpt_neox_japanese phi phi3 "
        "phi4_multimodal",
    },
    "head": {
        "lm_head head": "deepseek_v4",
    },
    "aliases": {
        "max_position_embeddings: max_seq_len": "dbrx",
        "max_position_embeddings: max_target_positions": "whisper",
        "dropout: resid_pdrop": "nomic_bert",
        "logit_scale: lm_head_multiplier logits_scaling": _HYPERCLOVAX,
    },
    "rotary": {
        "interleaved": "roformer gptj codegen helium ernie4_5 ernie4_5_moe deepseek_v2 "
        "deepseek_v32 glm glm4 openai_privacy_filter glm4v_text glm_ocr_text llama4 llama4_text "
        f"{_COHERE}",
        "rope_interleave": "glm_moe_dsa deepseek_v3 axk1 glm4_moe_lite kimi_k2 sarvam_mla youtu "
        "mistral4",
        "rotary_emb_interleaved": "nomic_bert",
    },
    "kinds": {
        # Some layers are sparse, or some tokens see all; Blip's caller says if it is a decoder.
        (): "big_bird longformer longt5 pegasus_x led bigbird_pegasus blip_text_model jamba "
        "kimi_linear nemotron_h deepseek_v4",
        (FULL,): "mellum",
        (LINEAR,): "mamba falcon_mamba mamba2 granitemoehybrid",
        (INDEXED,): "deepseek_v32 glm_moe_dsa",
        (LINEAR, FULL): "olmo_hybrid minimax qwen3_next qwen3_5_text qwen3_5_moe_text bamba",
        ("conv", FULL): "lfm2",
        (FULL, CHUNKED): "llama4 llama4_text",
        (LINEAR, SLIDING): "recurrent_gemma",
        ("reference_sliding_attention",): "unlimited_ocr_text",
        ("hybrid",): "falcon_h1",
    },
    "phase": {
        0: "gpt_neo cwm minimax granitemoe_swa granite_swa modernbert modernbert-decoder",
    },
    "rotates": {
        SLIDING: "cohere2 cohere2_moe afmoe flint lara_mini",
        WINDOWLESS: "exaone4 exaone4_5_text exaone_moe",
    },
    "is_causal": {
        False: "xlm flaubert xlnet siglip_text_model siglip2_text_model eurobert "
        "openai_privacy_filter embedding_gemma2_text modernbert",
        True: "git",
    },
    "sections": {
        CONSECUTIVE: "qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl qwen2_5_omni_text "
        "paddleocr_vl_text glm4v_moe_text glm_image_text glm4v_text glm_ocr_text",
        IN_TURNS: "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text cosmos3_edge_text "
        "qwen3_5_text qwen3_5_moe_text",
    },
    # If config.json has none, the library has these.
    "mrope_section": {
        (8, 12, 12): "glm4v_moe_text glm_image_text glm4v_text glm_ocr_text",
        (11, 11, 10): "qwen3_5_text qwen3_5_moe_text",
        (16, 24, 24): "qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl qwen2_5_omni_text "
        "paddleocr_vl_text",
        (24, 20, 20): "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text cosmos3_edge_text",
    },
    "has_alpha": {
        True: f"hunyuan_v1_dense hunyuan_v1_moe {_HUNYUAN_VL}",
    },
    "fixed": {
        "is_decoder": "blip_text_model",
        # A layer also sees averages of other tokens, which no mask says.
        "layer_types": "deepseek_v4",
    },
    "meaningless": {
        # The sinusoids that rotate heads.
        "embed_positions": "roformer",
        # It has a norm that it does not apply.
        f"{_OLD} layernorm_embedding": "bigbird_pegasus",
        "use_pos_enc theta": "lfm2",
        # Of keys and values that layers share.
        "cla_share_factor": "hunyuan_v1_dense hunyuan_v1_moe",
        # Nothing is said of its layers.
        "rope_theta compress_rope_theta rope_scaling rope_parameters compress_rope_parameters "
        "rope_interleave "
        "partial_rotary_factor": "deepseek_v4",
        # Each channel of a pair may have an axis of its own for images.
        "mrope_section xdrope_section": _HUNYUAN_VL,
        "mrope_interleaved": "qwen3_5_text qwen3_5_moe_text",
        "mrope_interleaved interleaved": "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text "
        "cosmos3_edge_text",
        # The channels that rotate are a head of their own.
        "max_position_embeddings partial_rotary_factor": "mistral4",
        "position_embedding_type use_embedding_sharing": "cohere2",
        "embeddings_scale_by_sqrt_dim": "recurrent_gemma",
        # Of what the layers do to several hidden vectors.
        "altup_correct_scale laurel_rank": "gemma3n_text",
        "mup_denominator": "minicpm minicpm3",
        # The library reads the share, not Phi's `rotary_dim` beside it.
        "rotary_dim": "phi",
    },
    "llama_4_scaling_beta": {
        None: "ministral3 mistral4",
    },
    "attn_scale": {
        0.1: "llama4 llama4_text",
    },
    "attention_chunk_size": {
        8192: "llama4 llama4_text",
    },
    "no_rope_layer_interval": {
        4: "smollm3 llama4 llama4_text",
    },
    "attn_layer_indices": {
        None: "lfm2",
        (): "bamba",
    },
    "cross_attention_layers": {
        (3, 8, 13, 18, 23, 28, 33, 38): "mllama_text_model mllama",
    },
    # The first layers of Cohere 2's MoE may be dense, which rotate with full attention too.
    "mlp_layer_types": {
        None: "cohere2_moe",
    },
    "layer_rope_theta": {
        None: "granitemoe_swa granite_swa",
    },
    "position_embedding_type": {
        None: "granitemoehybrid",
    },
    "sliding_window_size": {
        None: "mimo_v2_flash",
    },
    "sliding_rotary_factor": {
        0.334: "mimo_v2_flash",
    },
    # Sliding layers have a base of their own.
    "rope_local_base_freq": {
        10_000.0: f"modernbert modernbert-decoder mellum mimo_v2_flash {_GEMMAS}",
        500_000.0: "olmo3",
    },
    "original_max_position_embeddings": {
        4096: "phi3 phi4_multimodal",
    },
    "rotary_dim": {
        None: "minimax_m2",
    },
    "head_dim": {
        128: "glm glm4 qwen3_vl_text cosmos3_edge_text",
        192: "mimo_v2_flash",
        256: f"qwen3_next qwen3_5_text qwen3_5_moe_text {_GEMMA4}",
    },
    "global_head_dim": {
        512: _GEMMA4,
    },
    "embedding_multiplier": {
        12.0: "granite_docling_text",
    },
    "logit_scale": {
        0.0625: _COHERE,
        1.0: _HYPERCLOVAX,
    },
    "logits_scaling": {
        1.0: "granite granitemoe granitemoeshared granitemoehybrid granitemoe_swa granite_swa",
        4.0: "granite_docling_text",
    },
    "decoder_vocab_size": {
        None: "marian pegasus",
    },
    "rope_scaling": {
        REQUIRED: _SCALED,
    },
    "rope_theta": {
        REQUIRED: _SCALED,
        1_000.0: "nomic_bert",
        20_000.0: "jina_embeddings_v3",
        100_000.0: "helium",
        160_000.0: "gte modernbert modernbert-decoder",
        500_000.0: "flex_olmo bitnet mllama_text_model mllama exaone paddleocr_vl_text "
        "qwen3_vl_text "
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
        4: "olmo_hybrid cwm cohere2 exaone4 exaone4_5_text exaone_moe afmoe olmo3 "
        "granitemoe_swa granite_swa qwen3_next qwen3_5_text qwen3_5_moe_text",
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
        False: "git rembert gptj codegen fsmt jamba kimi_linear mamba2 nemotron_h deepseek_v4",
        True: "qwen2_5_omni_text qwen3_vl_moe_text jetmoe "
        "starcoder2 lfm2 paddleocr_vl_text ernie4_5 ernie4_5_moe youtu cohere "
        "cohere2 cohere2_moe lara_mini smollm3 gemma gemma2 vaultgemma recurrent_gemma "
        "gemma3 gemma3_text gemma3n_text gemma4_text gemma4_unified_text "
        "embedding_gemma2_text modernbert modernbert-decoder granite_swa "
        f"granite_docling_text minicpm minicpm3 gpt_neox_japanese falcon {_HUNYUAN_VL}",
    },
    "scale_embedding": {
        True: "biogpt speech_to_text xglm pegasus_x m2m_100 nllb-moe fsmt plbart bigbird_pegasus",
    },
    "scale_decoder_outputs": {
        False: "mt5",
    },
    "dim_model_base": {
        1: "minicpm",
        256: "minicpm3",
    },
    "final_logit_softcapping": {
        30.0: "gemma2 vaultgemma recurrent_gemma gemma3n_text",
    },
    "layer_norm_eps": {
        1e-7: "deberta deberta-v2",
        1e-5: "altclip_text_model bridgetower_text_model layoutlmv3 jina_embeddings_v3 modernbert "
        "modernbert-decoder bloom",
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


# Models around a text model whose logits were not compared, or are its own without a scale.
OTHERS_AROUND = (
    "aimv2 align altclip apertus1p5 aria audioflamingo3 blip bridgetower chinese_clip clap clip "
    "clipseg cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid embedding_gemma2 emu3 "
    "exaone4_5 flava fuyu glm46v glm4v glm4v_moe glm_image glm_ocr glmasr glmga got_ocr2 groupvit "
    "hunyuan_vl janus jev kimi_k25 lfm2_vl lighton_ocr llama4 metaclip_2 minicpm_ocr minicpmv4_6 "
    "minicpmv4_7 mllama modernvbert moss_transcribe_diarize musicflamingo nemotron_h_omni omniasr "
    "ovis2 owlv2 owlvit paddleocr_vl pe_audio perception_lm pp_chart2table qianfan_ocr "
    "qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr "
    "qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe sam3 shieldgemma2 siglip siglip2 unlimited_ocr "
    "video_llama_3 vision-text-dual-encoder voxtral voxtral_realtime xclip"
)


def is_known_outside(model_type: str) -> bool:
    """Returns whether a whole model of this type was compared with its text model.

    A config.json that does not name the type ("None") says nothing against it.
    """
    known = {*SCALED_WITHIN.split(), *UNSCALED_WITHIN.split(), *OTHERS_AROUND.split()}
    is_known = model_type in known or by_model_type(model_type) is not None
    return is_known or model_type == str(None)


def by_model_type(model_type: Any) -> Architecture | None:
    """The architecture of config.json's model_type, with what that type has of its own."""
    for types, family in FAMILIES.items():
        if model_type in types.split():
            own = {
                name: value
                for name, values in OWN.items()
                for value, types in values.items()
                if model_type in types.split()
            }
            fields = family | own
            entries = {name: fields.pop(name) for name in fields.keys() - {*Architecture._fields}}
            return Architecture(model_type, **fields, entries=entries)
    return None
