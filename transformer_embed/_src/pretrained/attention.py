"""What config.json says of the attention of a layer: heads, scale, softcap, sinks, and the norm."""

import itertools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src.pretrained.attention_defaults import ATTENTION_DEFAULTS
from transformer_embed._src.pretrained.entries import ALIASES, Options
from transformer_embed._src.pretrained.model_type import (
    FULL,
    HEAD_DIM,
    LINEAR,
    MULTIPLIER_OR_HEAD_DIM,
    QUERY_SCALAR,
    UNSCALED,
    ModelType,
)

# The names that each entry of attention may have in config.json. If a file has several of the names
# of an entry, the first of them is read.
NAMES_OF_ENTRIES = {
    "num_attention_heads": ("num_attention_heads", *ALIASES["num_attention_heads"].split()),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "query_pre_attn_scalar": ("query_pre_attn_scalar",),
    "attention_multiplier": ("attention_multiplier",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "norm_eps": (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_eps",
        "norm_epsilon",
        "layernorm_epsilon",
    ),
    "num_global_key_value_heads": ("num_global_key_value_heads",),
    "attention_k_eq_v": ("attention_k_eq_v",),
}

# All of these names.
NAMES_OF_ATTENTION = frozenset(itertools.chain.from_iterable(NAMES_OF_ENTRIES.values()))


class AttentionFacts(NamedTuple):
    """What config.json says of the attention and the norms of one layer.

    Args:
        attention: The heads, the scale and so on, as `Layer.attention` has them. If None, the layer
            has no attention, or the attention is not known.
        norm_eps: The epsilon of the norms. If None, the epsilon is not known.
    """

    attention: Mapping[str, Any] | None
    norm_eps: float | None


def attention_entries(
    model_type: ModelType, entries: Options, *, has_defaults: bool
) -> dict[str, Any]:
    """Returns the entries of attention, such as the number of heads, each under one fixed name.

    The names in the result are the keys of `NAMES_OF_ENTRIES`: the entry "n_head" of a file becomes
    "num_attention_heads". If the value of an entry is not a number above 0, the result has None.

    Args:
        model_type: What is known of the model type.
        entries: The entries of config.json and of settings.
        has_defaults: Whether an entry that is left out has the default of this type in
            transformers. Pass False if config.json does not name the type.
    """
    attention = _defaults(model_type.name) if has_defaults else {}
    for entry, possible_names in NAMES_OF_ENTRIES.items():
        values = [entries[name] for name in possible_names if name in entries]
        if entry == "norm_eps":
            # Types with two kinds of norms have a null for the kind that they do not use.
            values = [value for value in values if value is not None]
        if values:
            first_value = values[0]
            is_number = isinstance(first_value, int | float) and first_value > 0
            attention[entry] = first_value if is_number else None
    return attention


def _defaults(type_name: str) -> dict[str, Any]:
    """Returns the defaults of a type, or {} if the table has no line for the type.

    A line is "llama num_attention_heads=32 norm_eps=1e-06".
    """
    for line in ATTENTION_DEFAULTS.splitlines():
        name, *pairs = line.split()
        if name == type_name:
            defaults = {}
            for pair in pairs:
                entry, _, value = pair.partition("=")
                defaults[entry] = json.loads(value)
            return defaults
    return {}


def attention_facts(
    model_type: ModelType, values: Options, layer_object: Options, kind: str
) -> AttentionFacts:
    """Returns what is known of the attention and the norms of a layer.

    Args:
        model_type: What is known of the model type.
        values: The values of all entries for this layer. The entries of attention are under the key
            "attention".
        layer_object: The layer's object in `per_layer_config`, or {}.
        kind: The kind of the layer, such as "full_attention" or "moe".
    """
    if not model_type.attention:
        return AttentionFacts(attention=None, norm_eps=None)
    # The entries about attention and norms, from config.json, from settings, or defaults.
    entries = values["attention"]
    norm_eps = entries.get("norm_eps")
    heads = entries.get("num_attention_heads")
    # These heads are the heads of softmax attention. "linear_attention" has other heads.
    is_softmax_attention = kind.endswith("_attention") and kind != LINEAR
    if not heads or not is_softmax_attention:
        return AttentionFacts(attention=None, norm_eps=norm_eps)
    head_dim = _head_dim(entries, values, layer_object, kind)
    if not head_dim:
        return AttentionFacts(attention=None, norm_eps=norm_eps)
    attention: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": _kv_heads(entries, layer_object, kind) or heads,
        "head_dim": head_dim,
        "scale": _scale(model_type, entries, head_dim),
    }
    if entries.get("attn_logit_softcapping"):
        attention["softcap"] = entries["attn_logit_softcapping"]
    if model_type.has_sinks:
        attention["sinks"] = True
    return AttentionFacts(attention=attention, norm_eps=norm_eps)


def _head_dim(entries: Options, values: Options, layer_object: Options, kind: str) -> int | None:
    """Returns the number of a head's channels in a layer."""
    # Full-attention layers (`FULL`) of Gemma 4 have wider heads.
    if kind == FULL and values["global_head_dim"]:
        # `layers._values_of_layer` has put the width of these heads here.
        return values["head_dim"]
    head_dim = layer_object.get("head_dim") or entries.get("head_dim")
    return head_dim or values["hidden_size"] // entries["num_attention_heads"]


def _kv_heads(entries: Options, layer_object: Options, kind: str) -> int | None:
    """Returns the number of key-value heads, or None if each head has its own keys and values."""
    if layer_object.get("num_key_value_heads"):
        return layer_object["num_key_value_heads"]
    kv_heads = entries.get("num_key_value_heads")
    if kind == FULL and entries.get("attention_k_eq_v"):
        # Full-attention layers (`FULL`) of Gemma 4 may have another number than the other layers.
        return entries.get("num_global_key_value_heads") or kv_heads
    return kv_heads


def _scale(model_type: ModelType, entries: Options, head_dim: int) -> float | None:
    """Returns the number that multiplies the logits of attention, or None if it is not known."""
    if model_type.attention == HEAD_DIM:
        return head_dim**-0.5
    if model_type.attention == UNSCALED:
        return 1.0
    # In `entries`, a value is None or a number above 0 (see `attention_entries`).
    if model_type.attention == QUERY_SCALAR:
        query_scalar = entries.get("query_pre_attn_scalar")
        return query_scalar**-0.5 if query_scalar else None
    multiplier = entries.get("attention_multiplier")
    if multiplier is None and model_type.attention == MULTIPLIER_OR_HEAD_DIM:
        return head_dim**-0.5
    return multiplier
