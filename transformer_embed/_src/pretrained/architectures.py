"""The registry of published models: a row for each kind of input layer.

Types, tensor names and defaults are those of the transformers library.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformer_embed._src.pretrained.description import (
    BIAS,
    NORM_OFFSET,
    NORM_SCALE,
    POSITIONS,
    REQUIRED,
    TOKEN_TYPES,
    TOKENS,
    WIDEN,
    WIDEN_OFFSET,
    Architecture,
    Entry,
    Positions,
    Rotary,
)
from transformer_embed._src.pretrained.rope import RopeScaling
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
_PARTIAL = _ROTARY | _share(0.5)
_BY_LAYER = _ROTARY | {
    "rope_theta": Entry(Positive, 1_000_000.0, may_guess=False),
    "rope_local_base_freq": Entry(Positive | None, 10_000.0, may_guess=False),
    "sliding_rope_scaling": Entry(RopeScaling | None),
}
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

_AFTER_PADDING = Positions(start=None)
_FAIRSEQ = {"layout": "sin_cos", "shift": 1, "odd": "zero"}

# Without a config.json, only names that a single architecture has are recognised; for others, the
# user must give the model type.
ARCHITECTURES = (
    Architecture(
        types="bert dpr ernie splinter visual_bert convbert align_text_model "
        "chinese_clip_text_model flava_text_model",
        tensors=_BERT_TENSORS,
        entries=_BERT,
        positions=Positions(),
        refused={
            "embeddings_project.weight": "it has narrow tables that a linear layer widens",
            "embeddings.task_type_embeddings.weight": "it adds a table of tasks",
        },
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="big_bird",
        tensors=_BERT_TENSORS,
        entries=_BERT | _scale("rescale_embeddings", False),
        scale="rescale_embeddings",
        positions=Positions(),
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="roberta xlm-roberta camembert data2vec-text luke xmod ibert longformer "
        "roberta-prelayernorm altclip_text_model bridgetower_text_model clap_text_model",
        tensors=_BERT_TENSORS,
        entries=_BERT | _pad_id(),
        positions=_AFTER_PADDING,
        prefixes=("roberta.",),
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="distilbert",
        tensors=_BERT_TOKENS | _BERT_POSITIONS | _BERT_NORM,
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
        entries=_NARROW,
        positions=Positions(),
        has_unique_names=True,
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="electra",
        tensors=_BERT_TENSORS
        | {WIDEN: ("?embeddings_project.weight",), WIDEN_OFFSET: ("?embeddings_project.bias",)},
        entries=_NARROW,
        positions=Positions(),
        prefixes=("electra.",),
        refused_entries=_ABSOLUTE,
    ),
    Architecture(
        types="gpt2 gpt_neo gpt_bigcode gpt-sw3",
        tensors={TOKENS: ("wte.weight",), POSITIONS: ("wpe.weight",)},
        entries=_GPT2,
        positions=Positions(),
        prefixes=("", "transformer."),
    ),
    Architecture(
        types="opt",
        tensors={
            TOKENS: ("decoder.embed_tokens.weight",),
            POSITIONS: ("decoder.embed_positions.weight",),
        },
        entries=_LEARNED | _pad_id(int | None),
        positions=Positions(start=2, at_padding=1),
        refused={"decoder.project_in.weight": "it widens tokens before positions are added"},
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
        entries=_SEQ2SEQ | {"decoder_vocab_size": Entry(SIZE)},
        scale="scale_embedding",
        positions=Positions(sinusoids={"layout": "sin_cos"}),
    ),
    Architecture(
        types="m2m_100 nllb-moe",
        tensors=_STACKED,
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
        types="clip clip_text_model siglip_text_model siglip2_text_model clipseg_text_model "
        "groupvit_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model "
        "xclip_text_model aimv2_text_model",
        tensors={
            TOKENS: ("embeddings.token_embedding.weight",),
            POSITIONS: ("embeddings.position_embedding.weight",),
        },
        entries=_LEARNED,
        positions=Positions(),
        has_unique_names=True,
    ),
    Architecture(
        types="llama mistral qwen2 qwen3 mixtral qwen2_moe qwen3_moe gpt_oss olmo olmo2 olmoe "
        "starcoder2 ministral ministral3 phimoe seed_oss arcee apertus internlm3 minimax_m2 "
        "qwen2_vl_text qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text",
        tensors=_DECODER,
        entries=_ROTARY,
        rotary=Rotary(),
    ),
    Architecture(
        types="gemma gemma2 vaultgemma",
        tensors=_DECODER,
        entries=_ROTARY | _is_tied(True),
        scale=True,
        rotary=Rotary(),
    ),
    Architecture(
        types="gemma3 gemma3_text",
        tensors=_DECODER,
        entries=_BY_LAYER | _is_tied(True),
        scale=True,
        rotary=Rotary(by_layer=True),
    ),
    Architecture(
        types="phi",
        tensors=_DECODER,
        entries=_PARTIAL | {"embd_pdrop": Entry(Rate, Rate(0.0))},
        rotary=Rotary(),
    ),
    Architecture(
        types="phi3",
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
        types="gpt_neox",
        tensors={TOKENS: ("embed_in.weight",)},
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

# Defaults in which a type differs from its row.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {}


def by_model_type(model_type: Any) -> Architecture | None:
    """The architecture of config.json's model_type, with the defaults of that type."""
    row = next((row for row in ARCHITECTURES if model_type in row.model_types), None)
    if row is None:
        return None
    changes = DEFAULTS.get(model_type, {}).items()
    entries = {name: row.entries[name]._replace(default=value) for name, value in changes}
    types = f"{model_type} {row.types}"
    return dataclasses.replace(row, types=types, entries={**row.entries, **entries})
