"""The parts of an input layer: their parameters, tensors, and entries of config.json.

A constant such as `TOKENS` is the path of a parameter, as `find_parameters` names it.
"""

from transformer_embed._src.layers.parameters import ROOT

TOKENS = f"{ROOT}token_embedding/embeddings"
POSITIONS = f"{ROOT}learned_positional_encoding/embeddings"
TOKEN_TYPES = f"{ROOT}token_type_embedding/embeddings"
NORM_SCALE = f"{ROOT}layer_norm/scale"
NORM_OFFSET = f"{ROOT}layer_norm/offset"
WIDEN = f"{ROOT}widen/w"
WIDEN_OFFSET = f"{ROOT}widen/b"
OUTPUT_TABLE = f"{ROOT}token_embedding/output_embeddings"
OUTPUT_BIAS = f"{ROOT}token_embedding/output_bias"
BIAS = "relative_position_bias/embeddings"
PER_LAYER_TABLE = "per_layer_inputs/embeddings"
PER_LAYER_WEIGHTS = "per_layer_inputs/w"
PER_LAYER_SCALE = "per_layer_inputs/scale"

# Parameters that a published model may lack: biases, which are then zeros.
OFFSETS = (NORM_OFFSET, WIDEN_OFFSET)
# The stacks of layers of an encoder-decoder model.
STACKS = ("encoder", "decoder")
# Modules that may be the output layer.
HEADS = (
    "lm_head.decoder lm_head output embed_out output_projection decoder.output_projection proj_out "
    "lm_loss pred_layer.proj"
)
# The tensor of the output bias of BART and similar models, [1, vocab_size]. It has no module.
LOGITS_BIAS = "final_logits_bias"

# For each parameter: the field of `ModelType` that has the parameter's modules, and the names that
# the parameter's tensor may have, with {} for a module. For example, with the module "ln", the name
# "{}.weight" is "ln.weight". In older files of BERT, a norm has gamma and beta.
TENSORS = {
    TOKENS: ("tokens", "{}.weight"),
    POSITIONS: ("positions", "{}.weight"),
    TOKEN_TYPES: ("token_types", "{}.weight"),
    NORM_SCALE: ("norm", "{}.weight {}.gamma"),
    NORM_OFFSET: ("norm", "{}.bias {}.beta"),
    WIDEN: ("widen", "{}.weight"),
    WIDEN_OFFSET: ("widen", "{}.bias"),
    BIAS: ("bias", "{}.weight"),
    PER_LAYER_TABLE: ("per_layer", "embed_tokens_{}.weight"),
    PER_LAYER_WEIGHTS: ("per_layer", "{}_model_projection.weight"),
    PER_LAYER_SCALE: ("per_layer", "{}_projection_norm.weight"),
    OUTPUT_TABLE: ("head", "{}.weight"),
    OUTPUT_BIAS: ("head", "{}.bias " + LOGITS_BIAS),
}
# The entries that come with a field of `ModelType`, or with another entry. For example, each type
# whose field `positions` is not empty reads "max_position_embeddings", and each type that has
# "attn_scale" in its field `entries` also reads "floor_scale".
READS = {
    "tokens": "vocab_size hidden_size tie_word_embeddings num_hidden_layers layer_types "
    "per_layer_config is_causal",
    "positions": "max_position_embeddings",
    "norm": "layer_norm_eps",
    "token_types": "type_vocab_size",
    "widen": "embedding_size",
    "bias": "num_attention_heads relative_attention_num_buckets relative_attention_max_distance",
    "has_alibi": "num_attention_heads alibi_bias_max",
    "sections": "mrope_section num_attention_heads head_dim",
    "attn_scale": "floor_scale attn_temperature_tuning",
    "rotary": "rope_theta rope_scaling rope_parameters max_position_embeddings "
    "original_max_position_embeddings",
    "partial_rotary_factor": "num_attention_heads head_dim",
    "no_rope_layer_interval": "no_rope_layers",
    "mlp_layer_types": "first_k_dense_replace",
    "decoder_vocab_size": "share_encoder_decoder_embeddings",
    "rope_local_base_freq": "sliding_rope_scaling partial_rotary_factor sliding_rotary_factor "
    "num_attention_heads head_dim global_head_dim",
}
