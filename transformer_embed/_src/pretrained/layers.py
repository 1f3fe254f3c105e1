"""The layers of a published model: which kind each is of, its rotation and its mask."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.pretrained import rope
from transformer_embed._src.pretrained.architecture import (
    CHUNKED,
    CROSS,
    ENTRIES,
    FULL,
    INDEXED,
    LINEAR,
    SLIDING,
    STACKS,
    WINDOWLESS,
    Architecture,
    Options,
)

# Names of older files, by those of today.
RENAMED: Mapping[Any, str] = {
    "attention": FULL,
    "global": FULL,
    "local": SLIDING,
    "mamba": LINEAR,
    "recurrent": LINEAR,
    "deepseek_sparse_attention": INDEXED,
    # Of Nemotron-H and MiMo.
    "*": FULL,
    "M": LINEAR,
    "E": "moe",
    "-": "mlp",
    0: FULL,
    1: SLIDING,
}
# Kinds of layers that rotate nothing.
UNROTATED = (LINEAR, CROSS, "conv", "moe", "mlp")
KNOWN = (FULL, SLIDING, CHUNKED, INDEXED, *UNROTATED)
# What an object for one layer may say besides sizes that tensors have.
OWN = ("head_dim", "sliding_window")
SIZES = ("num_key_value_heads", "intermediate_size")
# Lists with a value for each layer, and the entry that it has there.
BY_LAYER = {
    "layer_types": "layer_types",
    "layer_rope_theta": "rope_theta",
    "no_rope_layers": "no_rope_layers",
    "mlp_layer_types": "mlp_layer_types",
}
# Of a file that anyone may have written.
MOST_LAYERS = 1024


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a published model.

    Args:
        type: its kind, as config.json's `layer_types` names it: "full_attention",
            "sliding_attention", "linear_attention" and so on.
        rotary: the keyword arguments of `apply_rotary`; None if it does not rotate. With
            `pair_axes` (Qwen-VL), positions have three axes, time, height and width, which are
            equal for text.
        mask: the keyword arguments of `AttentionMask`: `causal`, and `window` or `chunk` if it has
            one.
        query_scale: the keyword arguments of `query_scale`; None if queries are not scaled by their
            positions.
    """

    type: str
    rotary: Mapping[str, Any] | None
    mask: Mapping[str, Any]
    query_scale: Mapping[str, Any] | None = None


def layers_of(kind: Architecture, value: Options, count: int) -> tuple[Layer, ...]:
    """The layers of a model whose tensors are those of `count` layers.

    config.json goes before the tensors: a file may have a layer that predicts further tokens, or
    one layer that is used several times.
    """
    if value["num_hidden_layers"] and not kind.has_stacks:
        count = value["num_hidden_layers"]
    least = int(kind.rotary != "")
    arguments.integer("num_hidden_layers", count, at_least=least, at_most=MOST_LAYERS)
    for name in BY_LAYER:
        if value[name]:
            arguments.check_same(name, "a value for each layer", len(value[name]), count)
    value = dict(value)
    if (interval := value["no_rope_layer_interval"]) and not value["no_rope_layers"]:
        value["no_rope_layers"] = [number % interval != 0 for number in range(1, count + 1)]
    value["layer_types"] = _types(kind, value, count)
    layers = []
    for number, layer_type in enumerate(value["layer_types"]):
        entries = value | {
            entry: value[name][number] for name, entry in BY_LAYER.items() if value[name]
        }
        entries |= _own(entries, number, layer_type)
        rotates = _rotates(kind, entries, number, layer_type)
        rotary = rope.rotation(kind, entries, layer_type) if rotates else None
        mask = _mask(kind, entries, layer_type)
        layers.append(Layer(layer_type, rotary, mask, _query_scale(entries, rotates)))
    return tuple(layers)


def _types(kind: Architecture, value: Options, count: int) -> list[str]:
    """The kind of each layer: as config.json lists them, or as the model type does."""
    names, period = value["layer_types"], value["sliding_window_pattern"]
    has_window = value["sliding_window"] and value["use_sliding_window"] is not False
    if names is not None:
        types = [RENAMED.get(each, each) for each in names]
        for each in {*types} - {*KNOWN, *kind.kinds}:
            raise arguments.value_error("layer_types", f"some of {', '.join(KNOWN)}", each)
        return types
    if not kind.kinds:
        return []
    indices = value["attn_layer_indices"]
    # Null is Bamba's default, too.
    indices = kind.default("attn_layer_indices") if indices is None else indices
    if indices is not None:
        seconds = indices
    elif period and (has_window or kind.rotates != WINDOWLESS):
        # EXAONE 4 writes a period out: LLLG.
        period = len(period) if isinstance(period, str) else period
        seconds = range(kind.phase % period, count, period)
    elif value["no_rope_layer_interval"] and (has_window or CHUNKED in kind.kinds):
        # Llama 4 has chunks where it rotates, SmolLM 3 windows where it does not.
        seconds = [number for number in range(count) if value["no_rope_layers"][number]]
    else:
        # The lowest layers of Qwen 2 have no window.
        seconds = range((value["max_window_layers"] or 0) if has_window else count)
    cross = value["cross_attention_layers"] or ()
    return [
        CROSS if number in cross else kind.kinds[-1 if number in seconds else 0]
        for number in range(count)
    ]


def _own(value: Options, number: int, layer_type: str) -> dict[str, Any]:
    """The entries that a layer has of its own."""
    changes = {}
    if value["per_layer_config"] is None and layer_type == FULL and value["global_head_dim"]:
        changes["head_dim"] = value["global_head_dim"]
    entries = (value["per_layer_config"] or {}).get(number, {})
    if unread := [*entries.keys() - {*OWN, *SIZES}]:
        want = f"no entries but {', '.join((*OWN, *SIZES))}"
        raise arguments.value_error(f"per_layer_config: {number}", want, unread)
    changes |= {name: ENTRIES[name](name, entries[name]) for name in OWN if name in entries}
    return changes


def _rotates(kind: Architecture, value: Options, number: int, layer_type: str) -> bool:
    """Whether a layer rotates its heads."""
    # Granite's hybrids say whether they rotate at all; a base of 0 says that a layer does not.
    is_rotary = kind.rotary and value["position_embedding_type"] == "rope" and value["rope_theta"]
    if not is_rotary or layer_type in UNROTATED:
        return False
    if value["no_rope_layer_interval"]:
        return bool(value["no_rope_layers"])
    if not kind.rotates or layer_type == SLIDING:
        return True
    # EXAONE 4 rotates in all layers if it has no window, Cohere 2's MoE in dense ones too.
    if kind.rotates == WINDOWLESS:
        return value["sliding_window"] is None
    kind_of_mlp = value["mlp_layer_types"]
    return kind_of_mlp == "dense" if kind_of_mlp else number < (value["first_k_dense_replace"] or 0)


def _query_scale(value: Options, rotates: bool) -> dict[str, Any] | None:
    """The arguments of `query_scale` for a layer: in Llama 4, for those that do not rotate."""
    if value[rope.BETA]:
        length = (value["rope_scaling"] or {}).get(rope.ORIGINAL) or value[rope.ORIGINAL]
        return {"beta": value[rope.BETA], "length": length or value["max_position_embeddings"]}
    if value["attn_scale"] and value["attn_temperature_tuning"] and not rotates:
        return {"beta": value["attn_scale"], "length": value["floor_scale"], "offset": 1}
    return None


def _mask(kind: Architecture, value: Options, layer_type: str) -> dict[str, Any]:
    """The arguments of `AttentionMask` for a layer."""
    is_causal = kind.is_causal or value["is_decoder"]
    if kind.has_stacks:
        is_causal = value["side"] == STACKS[1]
    # Of chunks, the library does not ask.
    is_causal = is_causal and (value["is_causal"] is not False or layer_type == CHUNKED)
    window, both_sides = value["sliding_window"], value["use_bidirectional_attention"]
    # Gemma 4 says "all", or "vision": only within images. Its windows have their last token.
    if both_sides in (True, "all"):
        is_causal = False
        window = window and window // 2 + (both_sides == "all")
    mask: dict[str, Any] = {"causal": bool(is_causal)}
    if layer_type == SLIDING:
        if value["local_attention"]:
            window = value["local_attention"] // 2
        if value["sliding_window_size"]:
            window = value["sliding_window_size"] + 1
        if window is None and "sliding_window" not in kind.names():
            want = f"{FULL}, since a model {kind.type} has no windows"
            raise arguments.value_error("layer_types", want, layer_type)
        if window:
            # A causal window counts the query's own token, one of both sides does not.
            mask["window"] = (window - 1, 0) if is_causal else (window, window)
    if layer_type == CHUNKED:
        mask["chunk"] = value["attention_chunk_size"]
    return mask
