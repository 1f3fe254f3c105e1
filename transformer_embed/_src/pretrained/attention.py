"""What config.json says of the attention of a layer: heads, scale, softcap, sinks, and the norm."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src.pretrained.attention_defaults import ATTENTION_DEFAULTS
from transformer_embed._src.pretrained.entries import ALIASES, Options
from transformer_embed._src.pretrained.model_type import (
    FULL,
    HEAD_DIM,
    MULTIPLIER,
    QUERY_SCALAR,
    UNSCALED,
    ModelType,
)

# The names that the entries of attention have in config.json.
NAMES = {
    "num_attention_heads": f"num_attention_heads {ALIASES['num_attention_heads']}",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attention_multiplier": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon "
    "layernorm_epsilon",
    "num_global_key_value_heads": "num_global_key_value_heads",
    "attention_k_eq_v": "attention_k_eq_v",
}

NAMES_OF_ATTENTION = frozenset(" ".join(NAMES.values()).split())


class AttentionFacts(NamedTuple):
    """The attention of a layer, for `Layer`.

    Args:
        attention: See `Layer`.
        norm_eps: See `Layer`.
    """

    attention: Mapping[str, Any] | None
    norm_eps: float | None


def attention_entries(row: ModelType, entries: Options, *, has_defaults: bool) -> dict[str, Any]:
    """Returns the entries of attention; an entry that is no number counts as missing.

    Args:
        row: The row of the model type.
        entries: The entries of config.json and of settings.
        has_defaults: Whether a missing entry has the default of transformers, because config.json
            names this type.
    """
    found = _defaults(row.name) if has_defaults else {}
    for name, names in NAMES.items():
        given = [entries[alias] for alias in names.split() if alias in entries]
        if given:
            is_number = isinstance(given[0], int | float) and given[0] > 0
            found[name] = given[0] if is_number else None
    return found


def _defaults(model_type: str) -> dict[str, Any]:
    """Returns the defaults of a type, which the table has as "name=value"."""
    for line in ATTENTION_DEFAULTS.splitlines():
        name, *pairs = line.split()
        if name == model_type:
            return {entry: json.loads(value) for entry, _, value in map(_parts, pairs)}
    return {}


def _parts(pair: str) -> tuple[str, str, str]:
    """Returns the entry, the sign and the value of a pair."""
    return pair.partition("=")


def attention_facts(row: ModelType, values: Options, own: Options, kind: str) -> AttentionFacts:
    """Returns the facts of a layer.

    Args:
        row: The row of the model type.
        values: The values of all entries, those of attention under the key "attention".
        own: What an object of config.json says for this layer alone.
        kind: The kind of the layer.
    """
    entries = values["attention"]
    heads = entries.get("num_attention_heads")
    norm_eps = entries.get("norm_eps") if row.attention else None
    if not row.attention or not heads or not kind.endswith("_attention") or kind.startswith("lin"):
        return AttentionFacts(attention=None, norm_eps=norm_eps)
    head_dim = own.get("head_dim") or entries.get("head_dim") or values["hidden_size"] // heads
    if kind == FULL and values["global_head_dim"]:
        head_dim = values["head_dim"]
    if not head_dim:
        return AttentionFacts(attention=None, norm_eps=norm_eps)
    attention: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": _kv_heads(entries, own, kind) or heads,
        "head_dim": head_dim,
        "scale": _scale(row, entries, head_dim),
    }
    if entries.get("attn_logit_softcapping"):
        attention["softcap"] = entries["attn_logit_softcapping"]
    if row.has_sinks:
        attention["sinks"] = True
    return AttentionFacts(attention=attention, norm_eps=norm_eps)


def _kv_heads(entries: Options, own: Options, kind: str) -> int | None:
    """Returns the number of key-value heads, which full layers of Gemma 4 may have of their own."""
    if own.get("num_key_value_heads"):
        return own["num_key_value_heads"]
    if kind == FULL and entries.get("attention_k_eq_v"):
        of_full = entries.get("num_global_key_value_heads")
        return of_full or entries.get("num_key_value_heads")
    return entries.get("num_key_value_heads")


def _scale(row: ModelType, entries: Options, head_dim: int) -> float | None:
    """Returns the factor of the attention logits, or None if config.json does not say it."""
    if row.attention == HEAD_DIM:
        return head_dim**-0.5
    if row.attention == UNSCALED:
        return 1.0
    value = entries.get(QUERY_SCALAR if row.attention == QUERY_SCALAR else MULTIPLIER)
    if not value:
        return None
    return value**-0.5 if row.attention == QUERY_SCALAR else value
