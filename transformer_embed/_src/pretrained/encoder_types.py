"""Model types that read whole texts: BERT and its like, CLIP's text models, ModernBERT."""

from transformer_embed._src.pretrained.model_type import ModelType

# --- What most types of a family have.

BERT = ModelType(
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    is_causal=False,
    no_output="a dense layer and a norm come before it",
).but(dropout=0.1, is_decoder=None)
ROBERTA = BERT.but(start="pad_token_id", pad_token_id=1)
DEBERTA = BERT.but(
    may_lack="learned_positional_encoding/embeddings token_type_embedding/embeddings",
    # These entries are about the relative positions that attention reads in each layer.
    no_effect="relative_attention position_biased_input position_buckets norm_rel_ebd",
)
MPNET = ROBERTA.but(token_types="", bias="encoder.relative_attention_bias", unread="pad_token_id")
DISTILBERT = BERT.but(
    token_types="",
    # DistilBERT's config.json has no epsilon.
    unread="layer_norm_eps",
    no_effect="tie_weights_ sinusoidal_pos_embds",
)
BERT_WITH_HEAD = BERT.but(token_types="", no_output="")
ROTARY_BERT = BERT.but(positions="", rotary="half", no_effect="position_embedding_type")
# ESM-2. In transformers, its embeddings have no dropout, and are zeros at padding.
ESM = BERT.but(
    positions="",
    token_types="",
    norm="",
    rotary="half",
    dropout=0.0,
    unread="dropout",
    token_dropout=False,
    no_effect="position_embedding_type emb_layer_norm_before emb_layer_norm_after",
)
XLM = ModelType(
    tokens="embeddings",
    positions="position_embeddings",
    norm="layer_norm_emb",
    no_effect="use_lang_emb sinusoidal_embeddings share_inout_emb",
).but(dropout=0.1)
XLNET = ModelType(
    tokens="word_embedding",
    # XLNet's attention adds sinusoids of distances. mask_emb is the vector of a query for a token
    # that is to be predicted.
    no_effect="mask_emb untie_r",
).but(dropout=0.1)
CLIP = ModelType(
    tokens="embeddings.token_embedding",
    positions="embeddings.position_embedding",
    no_output="it has none",
)
MODERNBERT = ModelType(
    tokens="embeddings.tok_embeddings",
    norm="embeddings.norm",
    rotary="half",
    may_lack="layer_norm/offset",
    # Published files have names for rotary positions here that only the code that trained the model
    # knows.
    no_effect="position_embedding_type",
    no_output="a dense layer and a norm come before it",
).but(local_attention=128, tie_word_embeddings=False)

# --- The types.

ENCODER_TYPES = {
    # BERT. In RoBERTa and similar types, the first position is the id of padding + 1.
    "bert": BERT,
    "dpr": BERT,
    "ernie": BERT,
    "splinter": BERT,
    "visual_bert": BERT,
    "align_text_model": BERT,
    "chinese_clip_text_model": BERT,
    "layoutlm": BERT,
    "fnet": BERT,
    "roc_bert": BERT,
    "markuplm": BERT,
    "tapas": BERT,
    "flava_text_model": BERT.but(dropout=0.0),
    # BigBird has sparse layers, and tokens that see all others, so its layers are not described.
    "big_bird": BERT.but(scale="rescale_embeddings", kinds=()),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "data2vec-text": ROBERTA,
    "luke": ROBERTA,
    "xmod": ROBERTA,
    "roberta-prelayernorm": ROBERTA,
    "clap_text_model": ROBERTA,
    # The padding of LiLT has the id 0.
    "lilt": BERT.but(pad_token_id=0, start="pad_token_id"),
    "altclip_text_model": ROBERTA.but(layer_norm_eps=1e-05),
    "bridgetower_text_model": ROBERTA.but(layer_norm_eps=1e-05),
    "layoutlmv3": ROBERTA.but(layer_norm_eps=1e-05),
    "longformer": ROBERTA.but(kinds=()),
    "xlm-roberta-xl": BERT.but(norm="", pad_token_id=1, start="pad_token_id"),
    "megatron-bert": BERT.but(norm=""),
    # The caller of BLIP says whether the text model is a decoder.
    "blip_text_model": BERT.but(token_types="", dropout=0.0, kinds=(), unread="is_decoder"),
    "albert": BERT.but(widen="encoder.embedding_hidden_mapping_in", dropout=0.0),
    "rembert": BERT.but(
        widen="encoder.embedding_hidden_mapping_in", dropout=0.0, tie_word_embeddings=False
    ),
    "electra": BERT.but(widen="embeddings_project", may_lack="widen/w widen/b"),
    "convbert": BERT.but(widen="embeddings_project", may_lack="widen/w widen/b"),
    "deberta": DEBERTA.but(layer_norm_eps=1e-07),
    "deberta-v2": DEBERTA.but(layer_norm_eps=1e-07),
    "mpnet": MPNET,
    "distilbert": DISTILBERT,
    # The output layers of these two types have no dense layer before them.
    "bert-generation": BERT_WITH_HEAD,
    "git": BERT_WITH_HEAD.but(is_causal=True, tie_word_embeddings=False),
    # Encoders that rotate heads. "new" is the type of GTE in Alibaba's own code.
    "nomic_bert": ROTARY_BERT.but(
        norm="emb_ln",
        dropout=0.0,
        aliases="dropout: resid_pdrop",
        rotary="rotary_emb_interleaved",
        rope_theta=1000.0,
        partial_rotary_factor=1.0,
    ),
    "gte": ROTARY_BERT.but(may_lack="token_type_embedding/embeddings", rope_theta=160_000.0),
    "new": ROTARY_BERT.but(may_lack="token_type_embedding/embeddings"),
    "jina_embeddings_v3": ROTARY_BERT.but(norm="emb_ln", rope_theta=20_000.0, layer_norm_eps=1e-05),
    # The tensor "embed_positions" has the sinusoids that rotate heads.
    "roformer": ROTARY_BERT.but(
        widen="embeddings_project",
        may_lack="widen/w widen/b",
        rotary="interleaved",
        no_effect="position_embedding_type embed_positions",
    ),
    "esm": ESM,
    # Types of other families.
    "xlm": XLM.but(is_causal=False),
    "flaubert": XLM.but(is_causal=False),
    "xlnet": XLNET.but(is_causal=False),
    # The text models of CLIP and similar models.
    "clip": CLIP,
    "clip_text_model": CLIP,
    "clipseg_text_model": CLIP,
    "groupvit_text_model": CLIP,
    "metaclip_2_text_model": CLIP,
    "owlv2_text_model": CLIP,
    "owlvit_text_model": CLIP,
    "xclip_text_model": CLIP,
    "aimv2_text_model": CLIP,
    "siglip_text_model": CLIP.but(is_causal=False),
    "siglip2_text_model": CLIP.but(is_causal=False),
    "modernbert": MODERNBERT.but(
        dropout=0.0,
        phase=0,
        is_causal=False,
        rope_local_base_freq=10_000.0,
        rope_theta=160_000.0,
        sliding_window_pattern=3,
        tie_word_embeddings=True,
        layer_norm_eps=1e-05,
    ),
    "modernbert-decoder": MODERNBERT.but(
        dropout=0.0,
        phase=0,
        rope_local_base_freq=10_000.0,
        rope_theta=160_000.0,
        sliding_window_pattern=3,
        tie_word_embeddings=True,
        layer_norm_eps=1e-05,
    ),
}
