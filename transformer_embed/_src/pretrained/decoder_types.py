"""Decoders of other families than Llama: GPT-2 and its like, ALiBi, models without positions."""

from transformer_embed._src.positions.schemes import Sinusoidal
from transformer_embed._src.pretrained.entries import REQUIRED
from transformer_embed._src.pretrained.model_type import LINEAR, ModelType
from transformer_embed._src.pretrained.seq2seq_types import FAIRSEQ, SEQ2SEQ

# --- What most types of a family have.

GPT = ModelType(tokens="wte").but(dropout=0.1)
GPT2 = GPT.but(positions="wpe", has_conv1d=True)
OPENAI_GPT = GPT.but(tokens="tokens_embed", positions="positions_embed", has_conv1d=True)
CTRL = GPT.but(tokens="w")
GPTJ = GPT.but(no_effect="rotary", rotary_dim=64)
OPT = ModelType(tokens="decoder.embed_tokens", positions="decoder.embed_positions")
BIOGPT = ModelType(tokens="embed_tokens", positions="embed_positions", scale="scale_embedding")
XGLM = SEQ2SEQ.but(tokens="embed_tokens", unread="pad_token_id")
MPT = ModelType(
    tokens="wte",
    has_alibi=True,
    # MPT has no positions but ALiBi, whatever these two entries say.
    no_effect="learned_pos_emb alibi",
)
BLOOM = ModelType(
    tokens="word_embeddings",
    norm="word_embeddings_layernorm",
    has_alibi=True,
    no_effect="offset_alibi",
    unread="alibi_bias_max",
)
MAMBA = ModelType(tokens="embeddings", no_effect="rope_theta")

# --- The types.

DECODER_TYPES = {
    "gpt2": GPT2,
    "gpt_bigcode": GPT2.but(has_conv1d=False),
    "gpt-sw3": GPT2,
    "gpt_neo": GPT2.but(
        has_conv1d=False, dropout=0.0, phase=0, sliding_window=256, sliding_window_pattern=2
    ),
    "openai-gpt": OPENAI_GPT,
    "ctrl": CTRL.but(sinusoids=Sinusoidal(layout="sin_cos"), scale=True),
    "gptj": GPTJ.but(dropout=0.0, rotary="interleaved", tie_word_embeddings=False),
    "codegen": GPTJ.but(dropout=0.0, rotary="interleaved", tie_word_embeddings=False),
    # The table has two rows more than config.json has positions.
    "opt": OPT.but(pad_token_id=1, start=2),
    "biogpt": BIOGPT.but(start=2, scale_embedding=True),
    "xglm": XGLM.but(start=2, sinusoids=FAIRSEQ, scale_embedding=True),
    "mpt": MPT.but(num_attention_heads=REQUIRED),
    "bloom": BLOOM.but(num_attention_heads=REQUIRED, layer_norm_eps=1e-05),
    "mamba": MAMBA.but(kinds=(LINEAR,)),
    "falcon_mamba": MAMBA.but(kinds=(LINEAR,)),
    "mamba2": MAMBA.but(kinds=(LINEAR,), tie_word_embeddings=False),
    "nemotron_h": MAMBA.but(kinds=(), tie_word_embeddings=False),
    "jamba": MAMBA.but(tokens="embed_tokens", kinds=(), tie_word_embeddings=False),
    "kimi_linear": MAMBA.but(tokens="embed_tokens", kinds=(), tie_word_embeddings=False),
}
