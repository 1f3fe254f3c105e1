"""The layers of a published model: the kind, the rotation and the mask of each layer.

In this file, `values` has the checked value of each entry of config.json, by the names in `ENTRIES`
(see `entry_values`). The kind of a layer is a name such as "sliding_attention".
"""

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
    SLIDING_OR_ALL,
    ModelType,
)

# The entries that may be in a layer's object in `per_layer_config`: entries that override the
# entries of the whole model, and entries that change nothing in this file. (`attention_facts` reads
# "num_key_value_heads" from the object itself.)
OVERRIDING_ENTRIES = ("head_dim", "sliding_window")
OTHER_ENTRIES = ("num_key_value_heads", "intermediate_size")
# Entries that are lists with a value for each layer, and the entry that gets the value of one
# layer. For example, value 5 of "layer_rope_theta" is the "rope_theta" of layer 5.
ENTRY_BY_LIST = {
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
    """Describes one layer of a published model, for the attention that you write yourself.

    The result of `load_embedder` has a sequence of `Layer` objects in its field `layers`, one for
    each layer of the model. Read the fields of a `Layer` to build the layer. If you save the input
    layer of a model of your own with `save_embedder`, pass a `Layer` for each layer, so that
    everybody who loads the file can build the layers too.

    Args:
        type: The kind of the layer, as the entry `layer_types` of config.json names it:
            "full_attention", "sliding_attention", "linear_attention" and so on.
        rotary: The keyword arguments of `apply_rotary`. If None, the layer has no rotary
            embeddings. If `rotary` has `pair_axes` (Qwen-VL), each token needs three positions:
            time, height and width. The three positions of a text token are equal. If config.json
            has `qk_rope_head_dim` (DeepSeek), only the last `qk_rope_head_dim` channels of each
            head rotate. Pass only these channels to `apply_rotary`.
        mask: The keyword arguments of `AttentionMask`: `causal`, and `window` or `chunk` if the
            layer has one. In DeepSeek V4, layers with "compressed" in their `type` also see
            averages of earlier tokens. `AttentionMask` cannot describe these averages, so `mask`
            only describes the window of the layer.
        query_scale: The keyword arguments of `te.query_scale`. If None, queries are not scaled by
            positions.
        image_blocks: Which tokens of the same image a token sees (Gemma 3 and 4). If "anywhere", a
            token sees all tokens of the image. If "in window", a token sees all later tokens of the
            image, but earlier tokens of the image only inside the window of `mask`. For example,
            with the window (3, 0), token 6 of an image with 10 tokens sees the tokens 3 to 10. If
            None, images are masked like text. The page "Published models" shows how to make the
            mask.
        attention: The sizes and factors of the attention, as a dict with `num_heads`,
            `num_kv_heads`, `head_dim`, and the `scale` of the logits. If the logits are capped, the
            dict also has `softcap`. The dict has `sinks`, which is True, if each head has a learned
            sink (gpt-oss): a number that the softmax takes as one more logit. If None, the layer
            has no attention, or this package does not know the attention.
        norm_eps: The epsilon of the layer's norms. If None, the epsilon is not known.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> mask = {"causal": True, "window": (1, 0)}
        >>> layer = te.pretrained.Layer("sliding_attention", rotary={"base": 1e6}, mask=mask)
        >>> tokens = te.TokenPositions.from_offset(0, 3)
        >>> te.AttentionMask(tokens, **layer.mask).dense().astype(int).tolist()[0]
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        >>> te.apply_rotary(jnp.ones([3, 2, 8]), tokens.positions, **layer.rotary).shape
        (3, 2, 8)
    """

    type: str
    rotary: Mapping[str, Any] | None
    mask: Mapping[str, Any]
    query_scale: Mapping[str, Any] | None = None
    image_blocks: str | None = None
    attention: Mapping[str, Any] | None = None
    norm_eps: float | None = None


def layers_of(model_type: ModelType, values: Options, count: int) -> tuple[Layer, ...]:
    """Returns the layers of a model, or an empty tuple if the kinds of the layers are not known.

    Args:
        model_type: What is known of the model type.
        values: The values of all entries.
        count: The number of layers that have tensors. If config.json says the number of layers,
            that number is used instead, because a file may have tensors of one more layer, which
            predicts further tokens, or tensors of one layer that the model uses several times.
    """
    # In an encoder-decoder model (`has_stacks`), `num_hidden_layers` may be about the other stack.
    if values["num_hidden_layers"] and not model_type.has_stacks:
        count = values["num_hidden_layers"]
    # `layers` says how each layer rotates, so a model with rotations needs at least one layer.
    at_least = 1 if model_type.rotary else 0
    arguments.integer("num_hidden_layers", count, at_least=at_least, at_most=MOST_LAYERS)
    for list_name in ENTRY_BY_LIST:
        list_of_layers = values[list_name]
        if list_of_layers:
            arguments.check_same(list_name, "a value for each layer", len(list_of_layers), count)
    values = dict(values)
    interval = values["no_rope_layer_interval"]
    if interval and not values["no_rope_layers"]:
        # Every layer rotates except each `interval`th. The list has True for a layer that rotates.
        values["no_rope_layers"] = [(index + 1) % interval != 0 for index in range(count)]
    kinds = kinds_of_layers(model_type, values, count)
    values["layer_types"] = kinds
    return tuple(_layer(model_type, values, index, kind) for index, kind in enumerate(kinds))


def _layer(model_type: ModelType, values: Options, index: int, kind: str) -> Layer:
    """Returns the layer of this index and kind; `values` are about the whole model."""
    per_layer_config = values["per_layer_config"] or {}
    layer_object = per_layer_config.get(index, {})
    # The values of all entries for this layer.
    values = _values_of_layer(values, layer_object, index, kind)
    rotates = _rotates(model_type, values, index, kind)
    # The keyword arguments of `apply_rotary`, and then of `AttentionMask`, for this layer.
    rotary = rope.rotary_arguments(model_type, values, kind) if rotates else None
    mask = _mask(model_type, values, kind)
    # Without a causal mask, all tokens see each other, so the tokens of an image need no mask of
    # their own.
    image_blocks = _image_blocks(model_type, values, kind) if mask["causal"] else None
    facts = attention_facts(model_type, values, layer_object, kind)
    return Layer(
        type=kind,
        rotary=rotary,
        mask=mask,
        query_scale=_query_scale(values, rotates),
        image_blocks=image_blocks,
        attention=facts.attention,
        norm_eps=facts.norm_eps,
    )


def _values_of_layer(
    values: Options, layer_object: Options, index: int, kind: str
) -> dict[str, Any]:
    """Returns the values of all entries for one layer.

    A list with a value for each layer is replaced by the value for this layer: `no_rope_layers` is
    then 0 or 1, and `layer_rope_theta` is read as `rope_theta`. Entries of `layer_object`, the
    layer's object in `per_layer_config`, override all others.
    """
    layer_values = dict(values)
    for list_name, entry in ENTRY_BY_LIST.items():
        list_of_layers = values[list_name]
        if list_of_layers:
            layer_values[entry] = list_of_layers[index]
    # Full-attention layers (`FULL`) of Gemma 4 have wider heads, unless each layer has an object of
    # its own.
    if values["per_layer_config"] is None and kind == FULL and values["global_head_dim"]:
        layer_values["head_dim"] = values["global_head_dim"]
    known_names = (*OVERRIDING_ENTRIES, *OTHER_ENTRIES)
    unknown_names = [*layer_object.keys() - {*known_names}]
    if unknown_names:
        want = f"only the entries {', '.join(known_names)}"
        raise arguments.value_error(f"per_layer_config: {index}", want, unknown_names)
    for name in OVERRIDING_ENTRIES:
        if name in layer_object:
            layer_values[name] = ENTRIES[name].check(name, layer_object[name])
    return layer_values


def _rotates(model_type: ModelType, values: Options, index: int, kind: str) -> bool:
    """Returns whether a layer uses rotary embeddings.

    Args:
        model_type: What is known of the model type.
        values: The values of all entries for this layer alone (see `_values_of_layer`).
        index: The index of the layer.
        kind: The kind of the layer.
    """
    type_has_rotations = model_type.rotary != ""
    if not type_has_rotations or kind in UNROTATED:
        return False
    # In Granite models with Mamba layers, this entry is "nope" if no layer rotates.
    if values["position_embedding_type"] != "rope":
        return False
    # A base of 0 in the list `layer_rope_theta` says that this layer does not rotate.
    if not values["rope_theta"]:
        return False
    if values["no_rope_layer_interval"]:
        # This is the entry of this layer, 0 or 1. In spite of its name, 1 says that it rotates.
        this_layer_rotates = values["no_rope_layers"]
        return bool(this_layer_rotates)
    # The field `rotates` is empty, or says that only sliding layers rotate, with exceptions.
    all_kinds_rotate = model_type.rotates == ""
    if all_kinds_rotate or kind == SLIDING:
        return True
    return _rotates_with_full_attention(model_type, values, index)


def _rotates_with_full_attention(model_type: ModelType, values: Options, index: int) -> bool:
    """Returns whether a full-attention layer rotates in a model whose sliding layers rotate.

    `values` has the values of all entries for this layer alone (see `_values_of_layer`).
    """
    # EXAONE 4 rotates in all layers if it has no window.
    if model_type.rotates == SLIDING_OR_ALL:
        model_has_window = values["sliding_window"] is not None
        return not model_has_window
    # In Cohere 2's MoE, a full-attention layer rotates if its MLP is dense. This is the kind of
    # this layer's MLP, or None if config.json does not list the kinds.
    kind_of_mlp = values["mlp_layer_types"]
    if kind_of_mlp:
        return kind_of_mlp == "dense"
    # Without a list, the first layers are dense, and this entry says how many.
    dense_layers = values["first_k_dense_replace"] or 0
    return index < dense_layers


def _query_scale(values: Options, rotates: bool) -> dict[str, Any] | None:
    """Returns the keyword arguments of `query_scale`, or None if queries are not scaled."""
    # Ministral 3 and Mistral 4 scale the queries of all layers.
    beta = values[rope.BETA]
    if beta:
        # The length of the texts that the model was trained on may be in the scaling's object, or
        # at the top level of config.json. If neither has it, it is the longest length.
        scaling_object = values["rope_scaling"] or {}
        in_object = scaling_object.get(rope.TRAINED_LENGTH)
        at_top_level = values[rope.TRAINED_LENGTH]
        trained_length = in_object or at_top_level or values["max_position_embeddings"]
        return {"beta": beta, "length": trained_length}
    # Llama 4 scales the queries of layers that do not rotate, unless an entry turns this off.
    if values["attn_scale"] and values["attn_temperature_tuning"] and not rotates:
        return {"beta": values["attn_scale"], "length": values["floor_scale"], "offset": 1}
    return None


def _mask(model_type: ModelType, values: Options, kind: str) -> dict[str, Any]:
    """Returns the keyword arguments of `AttentionMask` for a layer."""
    is_causal = _is_causal(model_type, values, kind)
    mask: dict[str, Any] = {"causal": is_causal}
    if kind in WINDOWED:
        width = _window_width(model_type, values, kind)
        if width and is_causal:
            # The width counts the query's own token, and a window of `AttentionMask` does not.
            mask["window"] = (width - 1, 0)
        elif width:
            # The width is the number of tokens on each side.
            mask["window"] = (width, width)
    if kind == CHUNKED:
        mask["chunk"] = values["attention_chunk_size"]
    return mask


def _image_blocks(model_type: ModelType, values: Options, kind: str) -> str | None:
    """Returns where the tokens of one image see each other, as `Layer.image_blocks`."""
    if model_type.has_vision_switch and values["use_bidirectional_attention"] != "vision":
        return None
    return dict(model_type.image_blocks).get(kind)


def _is_causal(model_type: ModelType, values: Options, kind: str) -> bool:
    """Returns whether a token of a layer sees only the tokens before it."""
    # In Gemma 4, the entry is "all" or "vision". If it is "vision", only the tokens of an image see
    # later tokens, and the mask of the layer stays causal. In Gemma 3, the entry is true or false.
    if values["use_bidirectional_attention"] in (True, "all"):
        return False
    if model_type.has_stacks:
        # `STACKS` is ("encoder", "decoder").
        _, decoder = STACKS
        is_decoder = values["stack"] == decoder
    else:
        is_decoder = bool(model_type.is_causal or values["is_decoder"])
    # In layers whose attention is cut into chunks, transformers does not read "is_causal".
    entry_says_bidirectional = values["is_causal"] is False and kind != CHUNKED
    return is_decoder and not entry_says_bidirectional


def _window_width(model_type: ModelType, values: Options, kind: str) -> int | None:
    """Returns the width of the window of a layer, or None if the layer has none.

    If the layer is causal, this is the number of tokens in the window, with the query's own token.
    Otherwise it is the number of tokens on each side of the query. `kind` is the kind of the layer,
    such as "sliding_attention".
    """
    # ModernBERT's entry counts the tokens of both sides.
    if values["local_attention"]:
        return values["local_attention"] // 2
    # MiMo's entry does not count the query's own token.
    if values["sliding_window_size"]:
        return values["sliding_window_size"] + 1
    width = values["sliding_window"]
    if width is None and "sliding_window" not in model_type.names_of_entries():
        # config.json lists a layer with a window, but models of this type have no windows. They
        # have layers of the kind "full_attention" (`FULL`).
        want = f"{FULL}, since a model {model_type.name} has no windows"
        raise arguments.value_error("layer_types", want, kind)
    bidirectional = values["use_bidirectional_attention"]
    is_bidirectional = bidirectional in (True, "all")
    if not width or not is_bidirectional:
        return width
    # In bidirectional models of Gemma, the entry counts the tokens of both sides.
    width_of_a_side = width // 2
    is_gemma_4 = bidirectional == "all"
    # Gemma 4 sees one token more on each side than Gemma 3.
    return width_of_a_side + 1 if is_gemma_4 else width_of_a_side
