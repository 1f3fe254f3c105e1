"""The registry of published models: a row for each kind of input layer.

Types, tensor names and defaults are those of the transformers library.
"""

import dataclasses
from typing import Any

from transformer_embed._src.pretrained.description import (
    BIAS,
    NORM_OFFSET,
    NORM_SCALE,
    POSITIONS,
    REQUIRED,
    ROTATED,
    TOKEN_TYPES,
    TOKENS,
    UNROTATED,
    WIDEN,
    WIDEN_OFFSET,
    Architecture,
    Entry,
    Positions,
    Rotary,
)
from transformer_embed._src.pretrained.rope import FULL, SLIDING, RopeScaling
from transformer_embed._src.pretrained.schema import Count, Positive, Rate

SIZE = Count | None


def _is_tied(default: bool) -> dict[str, Entry]:
    return {"tie_word_embeddings": Entry(bool, default)}


def _width(name: str) -> dict[str, Entry]:
    return {"hidden_size": Entry(SIZE, names=name)}


def _length(name: str) -> dict[str, Entry]:
    return {"max_position_embeddings": Entry(SIZE, names=name)}


def _pad_id(kind: Any = int, default: int | None = 1) -> dict[str, Entry]:
    return {"pad_token_id": Entry(kind, default, may_guess=False)}


def _eps(default: Any, name: str = "") -> dict[str, Entry]:
    return {"layer_norm_eps": Entry(Positive, default, name, may_guess=False)}


def _scale(name: str, default: bool | float) -> dict[str, Entry]:
    kind = bool if isinstance(default, bool) else Positive
    return {name: Entry(kind, default, may_guess=False)}


def _share(default: float, name: str = "") -> dict[str, Entry]:
    """The share of a head's channels that rotate, and the entries that give the head's size."""
    return {
        "partial_rotary_factor": Entry(Positive, default, name, may_guess=False),
        "num_attention_heads": Entry(SIZE, may_guess=False),
        "head_dim": Entry(SIZE),
    }


def _softcap(name: str = "") -> dict[str, Entry]:
    return {"final_logit_softcapping": Entry(Positive | None, names=name)}


# --- Entries.

_SIZES = {"vocab_size": Entry(SIZE), "hidden_size": Entry(SIZE)} | _is_tied(True)
_LEARNED = _SIZES | _length("")
_BERT = _LEARNED | {
    "type_vocab_size": Entry(SIZE),
    "layer_norm_eps": Entry(Positive, 1e-12, may_guess=False),
    "position_embedding_type": Entry(str | None),
    "hidden_dropout_prob": Entry(Rate, Rate(0.1)),
}
_NARROW = _BERT | {"embedding_size": Entry(SIZE)}
_SEQ2SEQ = (
    _LEARNED
    | _width("d_model")
    | _scale("scale_embedding", False)
    | {"dropout": Entry(Rate, Rate(0.1))}
)
_GPT2 = (
    _LEARNED | _width("n_embd") | _length("n_positions") | {"embd_pdrop": Entry(Rate, Rate(0.1))}
)
_T5 = (
    _SIZES
    | _width("d_model")
    | {
        "num_attention_heads": Entry(SIZE, names="num_heads"),
        "relative_attention_num_buckets": Entry(SIZE),
        "relative_attention_max_distance": Entry(int, 128, may_guess=False),
        "dropout_rate": Entry(Rate, Rate(0.1)),
        "scale_decoder_outputs": Entry(bool, True),
    }
)
_ROTARY = (
    _SIZES
    | _is_tied(False)
    | {
        "rope_theta": Entry(Positive, 10_000.0, may_guess=False),
        "rope_scaling": Entry(RopeScaling | None),
        "rope_parameters": Entry(type(None)),
        "max_position_embeddings": Entry(SIZE),
        "original_max_position_embeddings": Entry(SIZE),
    }
)
_LOGIT_SCALE = {"logit_scale": Entry(Positive, 0.0625)}
_PARTIAL = _ROTARY | _share(0.5)
_BY_LAYER = (
    _ROTARY
    | _is_tied(True)
    | _share(1.0)
    | {
        "rope_theta": Entry(Positive, 1_000_000.0, may_guess=False),
        "rope_local_base_freq": Entry(Positive | None, 10_000.0, may_guess=False),
        "sliding_rope_scaling": Entry(RopeScaling | None),
        "sliding_rotary_factor": Entry(Positive | None),
        "global_head_dim": Entry(SIZE),
    }
)
# As in Cohere 2: layers with a sliding window rotate, those with full attention do not.
_SLIDING_ROTATES = (SLIDING, FULL)
_MULTIPLIED = (
    _ROTARY | _scale("embedding_multiplier", 1.0) | {"logits_scaling": Entry(Positive, 1.0)}
)
_DENSE = "a dense layer and a norm come before it"
_ABSOLUTE = {
    "position_embedding_type": (
        ("absolute", None),
        "others are not part of the input layer",
    )
}

# --- Tensors.

_BERT_TOKENS = {TOKENS: ("embeddings.word_embeddings.weight",)}
_BERT_POSITIONS = {POSITIONS: ("embeddings.position_embeddings.weight",)}
_BERT_TYPES = {TOKEN_TYPES: ("embeddings.token_type_embeddings.weight",)}
_BERT_NORM = {
    NORM_SCALE: ("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"),
    NORM_OFFSET: ("embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta"),
}
_BERT_TENSORS = _BERT_TOKENS | _BERT_POSITIONS | _BERT_TYPES | _BERT_NORM
# A stack's own table comes first: if the two are not tied, the shared one is not used.
_STACKED = {TOKENS: ("{stack}.embed_tokens.weight", "shared.weight")}
_STACKED_LEARNED = _STACKED | {POSITIONS: ("{stack}.embed_positions.weight",)}
_STACKED_NORM = {
    NORM_SCALE: ("{stack}.layernorm_embedding.weight",),
    NORM_OFFSET: ("{stack}.layernorm_embedding.bias",),
}
_DECODER = {TOKENS: ("embed_tokens.weight",)}
_DECODER_LEARNED = {
    TOKENS: ("decoder.embed_tokens.weight",),
    POSITIONS: ("decoder.embed_positions.weight",),
}
_OPTIONAL = {
    POSITIONS: ("?embeddings.position_embeddings.weight",),
    TOKEN_TYPES: ("?embeddings.token_type_embeddings.weight",),
}

_AFTER_PADDING = Positions(start=None)
_FAIRSEQ = {"layout": "sin_cos", "shift": 1, "odd": "zero"}

# Without a config.json, only names that a single architecture has are recognised; for others, the
# user must give the model type.
ARCHITECTURES = (
    Architecture(
        types="bert dpr ernie splinter visual_bert align_text_model "
        "chinese_clip_text_model flava_text_model layoutlm fnet roc_bert markuplm tapas",
        tensors=_BERT_TENSORS,
        no_output=_DENSE,
        entries=_BERT,
        positions=Positions(),
        refused={
            "embeddings_project.weight": "it has narrow tables that a linear layer widens",
            "embeddings.task_type_embeddings.weight": "it adds a table of tasks",
            "embeddings.x_position_embeddings.weight": "it adds tables of places on a page",
            "embeddings.xpath_embeddings.inner2emb.weight": "it adds a table of paths in a page",
            "embeddings.projection.weight": "a linear layer follows the norm",
            "embeddings.shape_embed.weight": "it adds tables of shapes and sounds",
            "embeddings.token_type_embeddings_0.weight": "it adds several tables of token types",
        },
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="big_bird",
        tensors=_BERT_TENSORS,
        no_output=_DENSE,
        entries=_BERT | _scale("rescale_embeddings", False),
        scale="rescale_embeddings",
        positions=Positions(),
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="deberta deberta-v2",
        tensors=_BERT_TENSORS | _OPTIONAL,
        no_output=_DENSE,
        entries=_BERT,
        positions=Positions(),
        refused={"embeddings.embed_proj.weight": "a linear layer follows the tables"},
    ),
    Architecture(
        types="roberta xlm-roberta camembert data2vec-text luke xmod longformer "
        "roberta-prelayernorm altclip_text_model bridgetower_text_model clap_text_model "
        "layoutlmv3 lilt",
        tensors=_BERT_TENSORS,
        no_output=_DENSE,
        entries=_BERT | _pad_id(),
        positions=_AFTER_PADDING,
        prefixes=("roberta.",),
        refused={
            "embeddings.x_position_embeddings.weight": "it adds tables of places on a page",
            "layout_embeddings.x_position_embeddings.weight": "it has a second stream for places",
        },
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="xlm-roberta-xl",
        tensors=_BERT_TOKENS | _BERT_POSITIONS | _BERT_TYPES,
        no_output=_DENSE,
        entries=_BERT | _pad_id(),
        positions=_AFTER_PADDING,
    ),
    Architecture(
        types="megatron-bert",
        tensors=_BERT_TOKENS | _BERT_POSITIONS | _BERT_TYPES,
        no_output=_DENSE,
        entries=_BERT,
        positions=Positions(),
    ),
    Architecture(
        types="mpnet",
        tensors=_BERT_TOKENS | _BERT_POSITIONS | _BERT_NORM,
        no_output=_DENSE,
        entries=_BERT,
        positions=_AFTER_PADDING._replace(padding=1),
    ),
    Architecture(
        types="blip_text_model",
        tensors=_BERT_TOKENS | _BERT_POSITIONS | _BERT_NORM,
        no_output=_DENSE,
        entries=_BERT,
        positions=Positions(),
    ),
    Architecture(
        types="bert-generation git",
        tensors=_BERT_TOKENS | _BERT_POSITIONS | _BERT_NORM,
        head="lm_head.decoder lm_head output",
        entries=_BERT,
        positions=Positions(),
    ),
    Architecture(
        types="nomic_bert",
        tensors=_BERT_TOKENS
        | _BERT_TYPES
        | {NORM_SCALE: ("emb_ln.weight",), NORM_OFFSET: ("emb_ln.bias",)},
        no_output=_DENSE,
        entries=_BERT | _ROTARY | _is_tied(True) | _share(1.0),
        rotary=Rotary(),
    ),
    Architecture(
        types="distilbert",
        tensors=_BERT_TOKENS | _BERT_POSITIONS | _BERT_NORM,
        no_output=_DENSE,
        entries=_LEARNED | _width("dim") | {"dropout": Entry(Rate, Rate(0.1))},
        positions=Positions(),
        norm_eps=1e-12,
        prefixes=("distilbert.",),
    ),
    Architecture(
        types="albert rembert",
        tensors=_BERT_TENSORS
        | {
            WIDEN: ("encoder.embedding_hidden_mapping_in.weight",),
            WIDEN_OFFSET: ("encoder.embedding_hidden_mapping_in.bias",),
        },
        no_output=_DENSE,
        entries=_BERT | {"embedding_size": Entry(SIZE)},
        positions=Positions(),
        has_unique_names=True,
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="electra convbert",
        tensors=_BERT_TENSORS
        | {WIDEN: ("?embeddings_project.weight",), WIDEN_OFFSET: ("?embeddings_project.bias",)},
        no_output=_DENSE,
        entries=_BERT | {"embedding_size": Entry(SIZE)},
        positions=Positions(),
        prefixes=("electra.",),
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="xlm flaubert",
        tensors={
            TOKENS: ("embeddings.weight",),
            POSITIONS: ("position_embeddings.weight",),
            NORM_SCALE: ("layer_norm_emb.weight",),
            NORM_OFFSET: ("layer_norm_emb.bias",),
        },
        head="pred_layer.proj",
        entries=_BERT | _width("emb_dim") | {"asm": Entry(bool, False)},
        positions=Positions(),
        refused_entries={"asm": ((False,), "its output layer is an adaptive softmax")},
    ),
    Architecture(
        types="gpt2 gpt_neo gpt_bigcode gpt-sw3",
        tensors={TOKENS: ("wte.weight",), POSITIONS: ("wpe.weight",)},
        entries=_GPT2,
        positions=Positions(),
        prefixes=("", "transformer."),
    ),
    Architecture(
        types="openai-gpt",
        tensors={TOKENS: ("tokens_embed.weight",), POSITIONS: ("positions_embed.weight",)},
        entries=_GPT2,
        positions=Positions(),
    ),
    Architecture(
        types="ctrl",
        tensors={TOKENS: ("w.weight",)},
        entries=_GPT2,
        scale=True,
        positions=Positions(sinusoids={"layout": "sin_cos"}),
    ),
    Architecture(
        types="opt",
        tensors=_DECODER_LEARNED,
        entries=_LEARNED | _pad_id(int | None),
        positions=Positions(start=2, at_padding=1),
        refused={"decoder.project_in.weight": "it widens tokens before positions are added"},
    ),
    Architecture(
        types="biogpt",
        tensors=_DECODER | {POSITIONS: ("embed_positions.weight",)},
        head="output_projection",
        entries=_LEARNED | _scale("scale_embedding", True),
        scale="scale_embedding",
        positions=Positions(start=2),
    ),
    Architecture(
        types="whisper",
        tensors=_DECODER_LEARNED,
        head="proj_out",
        entries=_SEQ2SEQ | _length("max_target_positions"),
        positions=Positions(),
    ),
    Architecture(
        types="trocr",
        tensors=_DECODER_LEARNED
        | {
            NORM_SCALE: ("?decoder.layernorm_embedding.weight",),
            NORM_OFFSET: ("?decoder.layernorm_embedding.bias",),
        },
        head="output_projection decoder.output_projection",
        entries=_SEQ2SEQ,
        scale="scale_embedding",
        positions=Positions(start=2),
        norm_eps=1e-5,
    ),
    Architecture(
        types="xglm",
        tensors=_DECODER,
        entries=_SEQ2SEQ | _scale("scale_embedding", True) | _pad_id(int | None),
        scale="scale_embedding",
        positions=Positions(start=2, sinusoids=_FAIRSEQ),
        refused_entries={
            "pad_token_id": ((1, 0, None), "the sinusoid of that position would be zeros")
        },
    ),
    Architecture(
        types="t5 mt5 switch_transformers umt5 longt5",
        tensors=_STACKED
        | {
            BIAS: (
                "{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                "{stack}.block.0.layer.0.LocalSelfAttention.relative_attention_bias.weight",
            )
        },
        entries=_T5,
        refused={
            "{stack}.block.1.layer.0.SelfAttention.relative_attention_bias.weight": (
                "every layer has a bias of its own, as in UMT5"
            )
        },
    ),
    Architecture(
        types="marian pegasus",
        tensors=_STACKED,
        entries=_SEQ2SEQ
        | {
            "decoder_vocab_size": Entry(SIZE),
            "share_encoder_decoder_embeddings": Entry(bool, True),
        },
        scale="scale_embedding",
        positions=Positions(sinusoids={"layout": "sin_cos"}),
    ),
    Architecture(
        types="pegasus_x",
        tensors=_STACKED,
        entries=_SEQ2SEQ | _scale("scale_embedding", True),
        scale="scale_embedding",
        positions=Positions(sinusoids={"layout": "sin_cos", "shift": 1}),
    ),
    Architecture(
        types="m2m_100 nllb-moe fsmt",
        tensors=_STACKED,
        head="lm_head decoder.output_projection",
        entries=_SEQ2SEQ | _scale("scale_embedding", True) | _pad_id(),
        scale="scale_embedding",
        positions=_AFTER_PADDING._replace(sinusoids=_FAIRSEQ),
    ),
    Architecture(
        types="speech_to_text",
        tensors={TOKENS: ("decoder.embed_tokens.weight",)},
        entries=_SEQ2SEQ | _scale("scale_embedding", True) | _pad_id(),
        scale="scale_embedding",
        positions=_AFTER_PADDING._replace(sinusoids=_FAIRSEQ),
    ),
    Architecture(
        types="bart mbart mvp plbart",
        tensors=_STACKED_LEARNED | _STACKED_NORM,
        entries=_SEQ2SEQ,
        scale="scale_embedding",
        positions=Positions(start=2),
        norm_eps=1e-5,
    ),
    Architecture(
        types="led",
        tensors=_STACKED_LEARNED | _STACKED_NORM,
        entries=_SEQ2SEQ,
        scale="scale_embedding",
        positions=Positions(),
        norm_eps=1e-5,
    ),
    # Its decoder adds positions after the norm.
    Architecture(
        types="blenderbot-small",
        tensors={
            TOKENS: ("encoder.embed_tokens.weight", "shared.weight"),
            POSITIONS: ("encoder.embed_positions.weight",),
            NORM_SCALE: ("encoder.layernorm_embedding.weight",),
            NORM_OFFSET: ("encoder.layernorm_embedding.bias",),
        },
        entries=_SEQ2SEQ,
        scale="scale_embedding",
        positions=Positions(),
        norm_eps=1e-5,
    ),
    Architecture(
        types="blenderbot bigbird_pegasus",
        tensors=_STACKED_LEARNED,
        entries=_SEQ2SEQ,
        scale="scale_embedding",
        positions=Positions(),
    ),
    Architecture(
        types="clip clip_text_model siglip_text_model siglip2_text_model clipseg_text_model "
        "groupvit_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model "
        "xclip_text_model aimv2_text_model",
        tensors={
            TOKENS: ("embeddings.token_embedding.weight",),
            POSITIONS: ("embeddings.position_embedding.weight",),
        },
        no_output="it has none",
        entries=_LEARNED,
        positions=Positions(),
        has_unique_names=True,
    ),
    Architecture(
        types="jamba",
        tensors=_DECODER,
        entries=_SIZES | _is_tied(False),
    ),
    Architecture(
        types="mamba mamba2 falcon_mamba",
        tensors={TOKENS: ("embeddings.weight",)},
        entries=_SIZES,
    ),
    Architecture(
        types="llama mistral qwen2 qwen3 mixtral qwen2_moe qwen3_moe gpt_oss olmo olmo2 olmoe "
        "olmo_hybrid flex_olmo starcoder2 ministral3 phimoe seed_oss arcee apertus "
        "internlm3 minimax minimax_m2 aria_text diffllama doge eurobert iquestcoder jais2 jetmoe "
        "bitnet hy_v3 lfm2 solar_open cwm higgs_audio_v2 "
        "voxtral_realtime_text cosmos3_edge_text unlimited_ocr_text emu3_text_model "
        "qwen2_vl_text qwen2_5_vl_text "
        "qwen2_5_omni_text qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text",
        tensors=_DECODER,
        entries=_ROTARY,
        rotary=Rotary(),
    ),
    Architecture(
        types="cohere",
        tensors=_DECODER,
        entries=_ROTARY | _is_tied(True) | _LOGIT_SCALE,
        rotary=Rotary("interleaved"),
    ),
    Architecture(
        types="helium ernie4_5 ernie4_5_moe deepseek_v2 glm_moe_dsa openai_privacy_filter",
        tensors=_DECODER,
        entries=_ROTARY,
        rotary=Rotary("interleaved"),
    ),
    Architecture(
        types="deepseek_v3 axk1 glm4_moe_lite youtu",
        tensors=_DECODER,
        entries=_ROTARY | {"rope_interleave": Entry(bool, True, may_guess=False)},
        rotary=Rotary("rope_interleave"),
    ),
    Architecture(
        types="cohere2",
        tensors=_DECODER,
        entries=_ROTARY | _LOGIT_SCALE | _is_tied(True),
        rotary=Rotary("interleaved", kinds=_SLIDING_ROTATES),
    ),
    Architecture(
        types="exaone4 exaone_moe",
        tensors=_DECODER,
        entries=_ROTARY | {"sliding_window": Entry(int | None, 4096)},
        rotary=Rotary(kinds=_SLIDING_ROTATES, unless_null="sliding_window"),
    ),
    Architecture(
        types="afmoe flint",
        tensors=_DECODER,
        entries=_ROTARY,
        rotary=Rotary(kinds=_SLIDING_ROTATES),
    ),
    Architecture(
        types="smollm3",
        tensors=_DECODER,
        entries=_ROTARY | _is_tied(True),
        rotary=Rotary(kinds=(ROTATED, UNROTATED)),
    ),
    Architecture(
        types="llama4 llama4_text",
        tensors=_DECODER,
        entries=_ROTARY,
        rotary=Rotary("interleaved", kinds=(ROTATED, UNROTATED)),
    ),
    Architecture(
        types="gemma gemma2 vaultgemma",
        tensors=_DECODER,
        entries=_ROTARY | _is_tied(True) | _softcap(),
        scale=True,
        rotary=Rotary(),
    ),
    Architecture(
        types="recurrent_gemma",
        tensors=_DECODER,
        entries=_PARTIAL | _is_tied(True) | _softcap("logits_soft_cap"),
        scale=True,
        rotary=Rotary(),
    ),
    Architecture(
        types="gemma3 gemma3_text gemma3n_text gemma4_text gemma4_unified_text "
        "embedding_gemma2_text",
        tensors=_DECODER,
        entries=_BY_LAYER | _softcap(),
        scale=True,
        rotary=Rotary(by_layer=True),
        refused={
            "embed_tokens_per_layer.weight": "every layer adds a row of embed_tokens_per_layer"
        },
    ),
    Architecture(
        types="olmo3 mellum mimo_v2_flash",
        tensors=_DECODER,
        entries=_BY_LAYER | _is_tied(False),
        rotary=Rotary(by_layer=True),
    ),
    Architecture(
        types="modernbert modernbert-decoder",
        tensors={
            TOKENS: ("embeddings.tok_embeddings.weight",),
            NORM_SCALE: ("embeddings.norm.weight",),
            NORM_OFFSET: ("?embeddings.norm.bias",),
        },
        no_output=_DENSE,
        entries=_BY_LAYER
        | _eps(1e-5, "norm_eps")
        | {
            "rope_theta": Entry(Positive, 160_000.0, "global_rope_theta", may_guess=False),
            "rope_local_base_freq": Entry(
                Positive | None, 10_000.0, "local_rope_theta", may_guess=False
            ),
        },
        rotary=Rotary(by_layer=True),
        has_unique_names=True,
    ),
    Architecture(
        types="granite granitemoe granitemoeshared granitemoehybrid granite_docling_text",
        tensors=_DECODER,
        entries=_MULTIPLIED,
        scale="embedding_multiplier",
        rotary=Rotary(),
    ),
    Architecture(
        types="hyperclovax falcon_h1",
        tensors=_DECODER,
        entries=_ROTARY
        | _scale("embedding_multiplier", 1.0)
        | {"logit_scale": Entry(Positive, 1.0, "lm_head_multiplier logits_scaling")},
        scale="embedding_multiplier",
        rotary=Rotary(),
    ),
    Architecture(
        types="minicpm minicpm3",
        tensors=_DECODER,
        entries=_ROTARY
        | _is_tied(True)
        | _scale("scale_emb", 12.0)
        | {"dim_model_base": Entry(SIZE, 256, may_guess=False)},
        scale="scale_emb",
        rotary=Rotary(),
    ),
    Architecture(
        types="phi glm4_moe glm4v_moe_text nemotron persimmon stablelm qwen3_next qwen3_5_text "
        "qwen3_5_moe_text bamba",
        tensors=_DECODER,
        entries=_PARTIAL | {"embd_pdrop": Entry(Rate, Rate(0.0))},
        rotary=Rotary(),
    ),
    Architecture(
        types="glm glm4",
        tensors=_DECODER,
        entries=_PARTIAL,
        rotary=Rotary("interleaved"),
    ),
    Architecture(
        types="phi3 phi4_multimodal",
        tensors=_DECODER,
        entries=_ROTARY
        | _share(1.0)
        | {
            "original_max_position_embeddings": Entry(Count, 4096, may_guess=False),
            "embd_pdrop": Entry(Rate, Rate(0.0)),
        },
        rotary=Rotary(),
    ),
    Architecture(
        types="gpt_neox gpt_neox_japanese",
        tensors={TOKENS: ("embed_in.weight",)},
        head="embed_out lm_head",
        entries=_ROTARY
        | _share(0.25, "rotary_pct")
        | {
            "rope_theta": Entry(Positive, 10_000.0, "rotary_emb_base", may_guess=False),
            "embd_pdrop": Entry(Rate, Rate(0.0), "hidden_dropout"),
        },
        rotary=Rotary(),
        has_unique_names=True,
    ),
    Architecture(
        types="gptj codegen",
        tensors={TOKENS: ("wte.weight",)},
        entries=_GPT2
        | _is_tied(False)
        | {
            "rope_theta": Entry(Positive, 10_000.0),
            "rotary_dim": Entry(SIZE, 64, may_guess=False),
        },
        rotary=Rotary("interleaved"),
    ),
    Architecture(
        types="falcon",
        tensors={TOKENS: ("word_embeddings.weight",)},
        entries=_ROTARY | _is_tied(True) | {"alibi": Entry(bool, False, may_guess=False)},
        rotary=Rotary(),
        refused_entries={"alibi": ((False,), "its ALiBi is divided by the width of a head's root")},
    ),
    Architecture(
        types="mpt",
        tensors={TOKENS: ("wte.weight",)},
        entries=_SIZES
        | _width("d_model")
        | {"num_attention_heads": Entry(Count, REQUIRED, "n_heads")},
        alibi={},
    ),
    Architecture(
        types="bloom",
        tensors={
            TOKENS: ("word_embeddings.weight",),
            NORM_SCALE: ("word_embeddings_layernorm.weight",),
            NORM_OFFSET: ("word_embeddings_layernorm.bias",),
        },
        entries=_SIZES
        | _eps(1e-5, "layer_norm_epsilon")
        | {"num_attention_heads": Entry(Count, REQUIRED, "n_head")},
        alibi={},
        has_unique_names=True,
    ),
)

# Defaults in which types differ from their row; REQUIRED: config.json must say it.
DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("dim_model_base", 1, "minicpm"),
    ("embedding_multiplier", 12.0, "granite_docling_text"),
    ("layer_norm_eps", 1e-5, "altclip_text_model bridgetower_text_model xlm-roberta-xl layoutlmv3"),
    ("layer_norm_eps", 1e-7, "deberta deberta-v2"),
    ("pad_token_id", 0, "lilt"),
    (
        "partial_rotary_factor",
        0.25,
        "gemma4_text gemma4_unified_text stablelm qwen3_next qwen3_5_text qwen3_5_moe_text",
    ),
    ("partial_rotary_factor", 0.334, "mimo_v2_flash"),
    ("partial_rotary_factor", 1.0, "gpt_neox_japanese"),
    ("sliding_rotary_factor", 0.334, "mimo_v2_flash"),
    ("rope_local_base_freq", 500_000.0, "olmo3"),
    ("rope_theta", 1_000.0, "nomic_bert"),
    ("rope_theta", 100_000.0, "helium"),
    (
        "rope_theta",
        500_000.0,
        "flex_olmo bitnet qwen3_vl_text qwen3_vl_moe_text cohere "
        "ernie4_5 ernie4_5_moe llama4_text olmo3 mellum",
    ),
    (
        "rope_theta",
        1_000_000.0,
        "mixtral phimoe minimax lfm2 solar_open emu3_text_model qwen2_vl_text "
        "qwen2_5_vl_text qwen2_5_omni_text qwen3_omni_moe_text",
    ),
    ("rope_theta", 2_000_000.0, "smollm3"),
    ("rope_theta", 5_000_000.0, "minimax_m2 mimo_v2_flash"),
    ("rope_theta", 11_158_840.0, "hy_v3"),
    ("rope_theta", 100_000_000.0, "cosmos3_edge_text"),
    # A scaling comes with it.
    (
        "rope_theta",
        REQUIRED,
        "gpt_oss ministral3 apertus cwm higgs_audio_v2 openai_privacy_filter gemma4_text "
        "gemma4_unified_text",
    ),
    ("final_logit_softcapping", 30.0, "gemma2 vaultgemma recurrent_gemma gemma3n_text"),
    ("logits_scaling", 4.0, "granite_docling_text"),
    ("scale_decoder_outputs", False, "mt5"),
    ("scale_embedding", True, "plbart bigbird_pegasus"),
    ("tie_word_embeddings", False, "git rembert fsmt mamba2"),
    (
        "tie_word_embeddings",
        True,
        "starcoder2 jetmoe lfm2 cohere ernie4_5 ernie4_5_moe youtu "
        "granite_docling_text gpt_neox_japanese",
    ),
)


def by_model_type(model_type: Any) -> Architecture | None:
    """The architecture of config.json's model_type, with the defaults of that type."""
    row = next((row for row in ARCHITECTURES if model_type in row.model_types), None)
    if row is None:
        return None
    entries = dict(row.entries)
    for name, default, types in DEFAULTS:
        if model_type in types.split():
            entries[name] = entries[name]._replace(default=default)
    return dataclasses.replace(row, types=f"{model_type} {row.types}", entries=entries)
