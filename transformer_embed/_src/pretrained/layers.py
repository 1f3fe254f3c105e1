"""The layers of a published model: the kind of each, its rotation and its mask."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.pretrained import rope
from transformer_embed._src.pretrained.attention import attention_facts
from transformer_embed._src.pretrained.entries import ENTRIES, Options
from transformer_embed._src.pretrained.layer_kinds import UNROTATED, kinds_of_layers
from transformer_embed._src.pretrained.layer_parts import STACKS
from transformer_embed._src.pretrained.model_type import (
    CHUNKED,
    COMPRESSED,
    COMPRESSED_SPARSE,
    FULL,
    SLIDING,
    WINDOWLESS,
    ModelType,
)

# What an object for one layer may say, besides sizes that tensors have.
OWN_ENTRIES = ("head_dim", "sliding_window")
SIZES = ("num_key_value_heads", "intermediate_size")
# Lists with a value for each layer, and the entry that the value is for.
ENTRIES_OF_LISTS = {
    "layer_types": "layer_types",
    "layer_rope_theta": "rope_theta",
    "no_rope_layers": "no_rope_layers",
    "mlp_layer_types": "mlp_layer_types",
}
# Kinds of layers with a window.
WINDOWED = (SLIDING, COMPRESSED, COMPRESSED_SPARSE)
# Anyone may have written a file, so a number of layers in it has a limit.
MOST_LAYERS = 1024


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a published model.

    Args:
        type: The kind, as config.json's `layer_types` names it: "full_attention",
            "sliding_attention", "linear_attention" and so on.
        rotary: The keyword arguments of `apply_rotary`. If None, the layer does not rotate. With
            `pair_axes` (Qwen-VL), positions have three axes, time, height and width, which are
            equal for text. In models with `qk_rope_head_dim` (DeepSeek), pass only the channels
            that rotate to `apply_rotary`: the last ones of each head, as many as this entry says.
        mask: The keyword arguments of `AttentionMask`: `causal`, and `window` or `chunk` if the
            layer has one. It is about single tokens: in DeepSeek V4, the two kinds of layers with
            "compressed" in their names see averages of earlier tokens besides.
        query_scale: The keyword arguments of `query_scale`. If None, queries are not scaled by
            their positions.
        image_blocks: Where the tokens of one image see each other, before and after their own
            place (Gemma 3 and 4). "anywhere": at any distance. "in window": as far as `mask` has
            its window, whose left side holds for them too. If None, images are masked like text.
            The page "Published models" has the mask that follows from it.
        attention: What attention needs besides: `num_heads`, `num_kv_heads`, `head_dim`, and the
            `scale` of the logits; `softcap`, if there is one; and `sinks`, which is True if the
            model has a learned sink for each head (gpt-oss). If None, it is not known, or the layer
            has no attention.
        norm_eps: The epsilon of the norms, or None if it is not known.
    """

    type: str
    rotary: Mapping[str, Any] | None
    mask: Mapping[str, Any]
    query_scale: Mapping[str, Any] | None = None
    image_blocks: str | None = None
    attention: Mapping[str, Any] | None = None
    norm_eps: float | None = None


def layers_of(row: ModelType, values: Options, count: int) -> tuple[Layer, ...]:
    """Returns the layers of a model whose tensors are of `count` layers.

    The number of layers in config.json goes before the number in the tensors: a file may have a
    layer that predicts further tokens, or one layer that is used several times.
    """
    if values["num_hidden_layers"] and not row.has_stacks:
        count = values["num_hidden_layers"]
    least = 1 if row.rotary else 0
    arguments.integer("num_hidden_layers", count, at_least=least, at_most=MOST_LAYERS)
    for name in ENTRIES_OF_LISTS:
        if values[name]:
            arguments.check_same(name, "a value for each layer", len(values[name]), count)
    values = dict(values)
    interval = values["no_rope_layer_interval"]
    if interval and not values["no_rope_layers"]:
        values["no_rope_layers"] = [number % interval != 0 for number in range(1, count + 1)]
    values["layer_types"] = kinds_of_layers(row, values, count)
    return tuple(
        _layer(row, values, number, kind) for number, kind in enumerate(values["layer_types"])
    )


def _layer(row: ModelType, values: Options, number: int, kind: str) -> Layer:
    """Returns one layer."""
    in_lists = {
        entry: values[name][number] for name, entry in ENTRIES_OF_LISTS.items() if values[name]
    }
    values = {**values, **in_lists}
    values |= _own_entries(values, number, kind)
    rotates = _rotates(row, values, number, kind)
    mask = _mask(row, values, kind)
    own = (values["per_layer_config"] or {}).get(number, {})
    facts = attention_facts(row, values, own, kind)
    return Layer(
        type=kind,
        rotary=rope.rotation(row, values, kind) if rotates else None,
        mask=mask,
        query_scale=_query_scale(values, rotates),
        image_blocks=_image_blocks(row, values, kind) if mask["causal"] else None,
        attention=facts.attention,
        norm_eps=facts.norm_eps,
    )


def _own_entries(values: Options, number: int, kind: str) -> dict[str, Any]:
    """Returns the entries that a layer has of its own."""
    by_layer = values["per_layer_config"]
    own = {}
    if by_layer is None and kind == FULL and values["global_head_dim"]:
        own["head_dim"] = values["global_head_dim"]
    entries = (by_layer or {}).get(number, {})
    unread = [*entries.keys() - {*OWN_ENTRIES, *SIZES}]
    if unread:
        want = f"no entries but {', '.join((*OWN_ENTRIES, *SIZES))}"
        raise arguments.value_error(f"per_layer_config: {number}", want, unread)
    for name in OWN_ENTRIES:
        if name in entries:
            own[name] = ENTRIES[name].check(name, entries[name])
    return own


def _rotates(row: ModelType, values: Options, number: int, kind: str) -> bool:
    """Returns whether a layer rotates its heads."""
    # Granite's hybrids say whether they rotate at all, and a base of 0 that a layer does not.
    is_rotary = row.rotary and values["position_embedding_type"] == "rope" and values["rope_theta"]
    if not is_rotary or kind in UNROTATED:
        return False
    if values["no_rope_layer_interval"]:
        return bool(values["no_rope_layers"])
    if not row.rotates or kind == SLIDING:
        return True
    # EXAONE 4 rotates in all layers if it has no window.
    if row.rotates == WINDOWLESS:
        return values["sliding_window"] is None
    # The first layers of Cohere 2's MoE may be dense. These rotate with full attention too.
    kind_of_mlp = values["mlp_layer_types"]
    if kind_of_mlp:
        return kind_of_mlp == "dense"
    return number < (values["first_k_dense_replace"] or 0)


def _query_scale(values: Options, rotates: bool) -> dict[str, Any] | None:
    """Returns the arguments of `query_scale`, which Llama 4 has in layers that do not rotate."""
    beta = values[rope.BETA]
    if beta:
        in_scaling = (values["rope_scaling"] or {}).get(rope.ORIGINAL)
        length = in_scaling or values[rope.ORIGINAL] or values["max_position_embeddings"]
        return {"beta": beta, "length": length}
    if values["attn_scale"] and values["attn_temperature_tuning"] and not rotates:
        return {"beta": values["attn_scale"], "length": values["floor_scale"], "offset": 1}
    return None


def _mask(row: ModelType, values: Options, kind: str) -> dict[str, Any]:
    """Returns the arguments of `AttentionMask` for a layer."""
    is_causal = _is_causal(row, values, kind)
    mask: dict[str, Any] = {"causal": is_causal}
    if kind in WINDOWED:
        width = _window_width(row, values, kind)
        if width:
            # A causal window counts the query's own token, and one of both sides does not.
            mask["window"] = (width - 1, 0) if is_causal else (width, width)
    if kind == CHUNKED:
        mask["chunk"] = values["attention_chunk_size"]
    return mask


def _image_blocks(row: ModelType, values: Options, kind: str) -> str | None:
    """Returns where the tokens of one image see each other."""
    if row.has_vision_switch and values["use_bidirectional_attention"] != "vision":
        return None
    return dict(row.image_blocks).get(kind)


def _is_causal(row: ModelType, values: Options, kind: str) -> bool:
    """Returns whether a token of a layer sees only the tokens before it."""
    # Gemma 4 says "all", or "vision", which concerns images alone.
    if values["use_bidirectional_attention"] in (True, "all"):
        return False
    is_causal = bool(row.is_causal or values["is_decoder"])
    if row.has_stacks:
        is_causal = values["side"] == STACKS[1]
    # transformers does not ask whether chunks are causal.
    return is_causal and (values["is_causal"] is not False or kind == CHUNKED)


def _window_width(row: ModelType, values: Options, kind: str) -> int | None:
    """Returns the tokens in a window, the query's own among them if the window is causal."""
    if values["local_attention"]:
        return values["local_attention"] // 2
    if values["sliding_window_size"]:
        return values["sliding_window_size"] + 1
    width = values["sliding_window"]
    if width is None and "sliding_window" not in row.names_of_entries():
        want = f"{FULL}, since a model {row.name} has no windows"
        raise arguments.value_error("layer_types", want, kind)
    both_sides = values["use_bidirectional_attention"]
    if width and both_sides in (True, "all"):
        # The windows of Gemma 4 have their last token.
        return width // 2 + (both_sides == "all")
    return width
