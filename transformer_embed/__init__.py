"""The input and output layers of a Transformer for JAX and Haiku.

Token lookup, positions, attention masks, dropout, logits and their loss.
"""

from transformer_embed import kernels, plots, pretrained, rows
from transformer_embed._src.attention.attention_mask import AttentionMask
from transformer_embed._src.attention.masks import (
    causal_mask,
    mask_to_bias,
    padding_mask,
)
from transformer_embed._src.layers.config import EmbedderConfig, OutputConfig
from transformer_embed._src.layers.embedder import Embedder
from transformer_embed._src.layers.parameters import find_parameters
from transformer_embed._src.layers.positional_encoding import PositionalEncoding
from transformer_embed._src.layers.relative_position_bias import RelativePositionBias
from transformer_embed._src.layers.token_embedding import TokenEmbedding
from transformer_embed._src.layers.transformer_embedding import TransformerEmbedding
from transformer_embed._src.positions.query_scale import query_scale
from transformer_embed._src.positions.relative_bias import (
    alibi_bias,
    alibi_slopes,
    relative_position_buckets,
)
from transformer_embed._src.positions.rotary import apply_rotary, permute_rotary_weights
from transformer_embed._src.positions.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    YarnScaling,
)
from transformer_embed._src.positions.schemes import (
    Learned,
    PositionScheme,
    Sinusoidal,
    SinusoidalGrid,
)
from transformer_embed._src.positions.sinusoidal import sinusoidal_encoding, sinusoidal_table
from transformer_embed._src.sequences.cache import write_cache
from transformer_embed._src.sequences.load_balance import load_balanced_order
from transformer_embed._src.sequences.token_positions import TokenPositions
from transformer_embed._src.sequences.trees import shared_prefix_parents
from transformer_embed._src.tokens.batch import check_batch
from transformer_embed._src.tokens.cross_entropy import LossMetrics, linear_cross_entropy
from transformer_embed._src.tokens.divergence import linear_divergence
from transformer_embed._src.tokens.dropout import dropout
from transformer_embed._src.tokens.log_probs import linear_log_probs, linear_top_k
from transformer_embed._src.tokens.lookup import lookup
from transformer_embed._src.tokens.output_layer import OutputLayer, linear_logits

__version__ = "0.1.0"

__all__ = [
    "AttentionMask",
    "Embedder",
    "EmbedderConfig",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "LossMetrics",
    "NTKScaling",
    "OutputConfig",
    "OutputLayer",
    "PositionScheme",
    "PositionalEncoding",
    "RelativePositionBias",
    "Sinusoidal",
    "SinusoidalGrid",
    "TokenEmbedding",
    "TokenPositions",
    "TransformerEmbedding",
    "YarnScaling",
    "alibi_bias",
    "alibi_slopes",
    "apply_rotary",
    "causal_mask",
    "check_batch",
    "dropout",
    "find_parameters",
    "kernels",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_logits",
    "linear_top_k",
    "load_balanced_order",
    "lookup",
    "mask_to_bias",
    "padding_mask",
    "permute_rotary_weights",
    "plots",
    "pretrained",
    "query_scale",
    "relative_position_buckets",
    "rows",
    "shared_prefix_parents",
    "sinusoidal_encoding",
    "sinusoidal_table",
    "write_cache",
]
