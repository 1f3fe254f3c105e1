"""The input layer of a Transformer for JAX and Haiku: token lookup, positions and attention masks."""

import importlib
from types import ModuleType

from transformer_embed.functional.bias import alibi_bias, alibi_slopes, relative_position_buckets
from transformer_embed.functional.cross_entropy import tied_cross_entropy
from transformer_embed.functional.dropout import dropout
from transformer_embed.functional.lookup import check_ids, lookup, tied_logits
from transformer_embed.functional.masks import (
    attention_mask,
    causal_mask,
    combine_masks,
    mask_to_bias,
    padding_mask,
    segment_mask,
    window_mask,
)
from transformer_embed.functional.positions import TokenPositions
from transformer_embed.functional.rotary import apply_rotary, permute_rotary_weights
from transformer_embed.functional.rotary_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    YarnScaling,
)
from transformer_embed.functional.sinusoidal import sinusoidal_encoding, sinusoidal_grid, sinusoidal_table
from transformer_embed.layers.config import EmbedderConfig
from transformer_embed.layers.embedder import Embedder, make_embedder, resize_positions, resize_vocabulary
from transformer_embed.layers.modules import PositionalEncoding, RelativePositionBias, TokenEmbedding, TransformerEmbedding
from transformer_embed.layers.schemes import Learned, Sinusoidal, SinusoidalGrid

__version__ = "0.1.0"

__all__ = [
    "DynamicNTKScaling",
    "Embedder",
    "EmbedderConfig",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NTKScaling",
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
    "attention_mask",
    "causal_mask",
    "check_ids",
    "combine_masks",
    "dropout",
    "lookup",
    "make_embedder",
    "mask_to_bias",
    "padding_mask",
    "permute_rotary_weights",
    "relative_position_buckets",
    "resize_positions",
    "resize_vocabulary",
    "segment_mask",
    "sinusoidal_encoding",
    "sinusoidal_grid",
    "sinusoidal_table",
    "tied_cross_entropy",
    "tied_logits",
    "window_mask",
]

_ON_FIRST_USE = {"plots": "plots", "pretrained": "pretrained", "rows": "large_tables.rows", "sharding": "large_tables.sharding"}


def __getattr__(name: str) -> ModuleType:
    """Loads a part that needs what the others do without, on its first use."""
    if name in _ON_FIRST_USE:
        try:
            return importlib.import_module(f"{__name__}.{_ON_FIRST_USE[name]}")
        except ImportError as error:
            raise AttributeError(str(error)) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
