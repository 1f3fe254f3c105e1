"""Model types with an encoder and a decoder, and decoders of such models on their own."""

from transformer_embed._src.positions.schemes import Sinusoidal
from transformer_embed._src.pretrained.model_type import ModelType

# --- What most types of a family have.

# Entries that transformers once wrote for all models with two stacks and sinusoids.
OLD_ENTRIES = "normalize_embedding static_position_embeddings extra_pos_embeddings embed_positions"
FAIRSEQ = Sinusoidal(layout="sin_cos", shift=1, odd="zero")
SEQ2SEQ = ModelType(
    # A stack's own table comes first. If a file has it and a shared table that differs, the model
    # uses the stack's own one.
    tokens="{stack}.embed_tokens shared",
    scale="scale_embedding",
    no_effect=OLD_ENTRIES,
).but(dropout=0.1)
BART = SEQ2SEQ.but(
    positions="{stack}.embed_positions",
    norm="{stack}.layernorm_embedding",
    # The config.json of BART has no epsilon.
    layer_norm_eps=1e-5,
    unread="layer_norm_eps",
)
# The decoder adds positions after the norm, so only the encoder is described.
BLENDERBOT_SMALL = BART.but(
    tokens="encoder.embed_tokens shared",
    positions="encoder.embed_positions",
    norm="encoder.layernorm_embedding",
)
T5 = ModelType(
    tokens="{stack}.embed_tokens shared",
    bias="{stack}.block.0.layer.0.SelfAttention.relative_attention_bias "
    "{stack}.block.0.layer.0.LocalSelfAttention.relative_attention_bias",
    # A tied output layer of T5 divides logits by the root of d_model. In mT5 it does not.
).but(dropout=0.1, scale_decoder_outputs=True)
# In these types, only the decoder reads tokens.
DECODER = SEQ2SEQ.but(tokens="decoder.embed_tokens", positions="decoder.embed_positions")
WHISPER = DECODER.but(
    # Whisper's config.json has scale_embedding, which the decoder does not read.
    scale=False,
    no_effect="scale_embedding",
)
TROCR = DECODER.but(
    norm="decoder.layernorm_embedding",
    may_lack="layer_norm/scale layer_norm/offset",
    layer_norm_eps=1e-5,
    unread="layer_norm_eps",
    no_effect="layernorm_embedding use_learned_position_embeddings",
)
SPEECH_TO_TEXT = DECODER.but(positions="")

# --- The types.

SEQ2SEQ_TYPES = {
    "marian": SEQ2SEQ.but(sinusoids=Sinusoidal(layout="sin_cos"), decoder_vocab_size=None),
    "pegasus": SEQ2SEQ.but(sinusoids=Sinusoidal(layout="sin_cos"), decoder_vocab_size=None),
    "pegasus_x": SEQ2SEQ.but(
        sinusoids=Sinusoidal(layout="sin_cos", shift=1), kinds=(), scale_embedding=True
    ),
    "m2m_100": SEQ2SEQ.but(
        pad_token_id=1, start="pad_token_id", sinusoids=FAIRSEQ, scale_embedding=True
    ),
    "nllb-moe": SEQ2SEQ.but(
        pad_token_id=1, start="pad_token_id", sinusoids=FAIRSEQ, scale_embedding=True
    ),
    "fsmt": SEQ2SEQ.but(
        pad_token_id=1,
        start="pad_token_id",
        sinusoids=FAIRSEQ,
        tie_word_embeddings=False,
        scale_embedding=True,
    ),
    # The table has two rows more than config.json has positions.
    "bart": BART.but(start=2),
    "mbart": BART.but(start=2),
    "mvp": BART.but(start=2),
    "plbart": BART.but(start=2, scale_embedding=True),
    "led": BART.but(kinds=()),
    "blenderbot": BART.but(norm=""),
    # The file has the tensors of a norm that the model does not apply.
    "bigbird_pegasus": BART.but(
        norm="", kinds=(), no_effect=f"{OLD_ENTRIES} layernorm_embedding", scale_embedding=True
    ),
    "blenderbot-small": BLENDERBOT_SMALL,
    "t5": T5,
    "switch_transformers": T5,
    "umt5": T5,
    "mt5": T5.but(scale_decoder_outputs=False),
    "longt5": T5.but(kinds=()),
    "whisper": WHISPER.but(dropout=0.0, aliases="max_position_embeddings: max_target_positions"),
    "trocr": TROCR.but(start=2),
    "speech_to_text": SPEECH_TO_TEXT.but(
        pad_token_id=1, start="pad_token_id", sinusoids=FAIRSEQ, scale_embedding=True
    ),
}
