"""The kind of each layer: from a list in config.json, or by a rule for the model type.

The kind of a layer is a name, such as "sliding_attention". `values` has the checked value of each
entry of config.json, by the names in `ENTRIES`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.entries import Options
from transformer_embed._src.pretrained.model_type import (
    CHUNKED,
    COMPRESSED,
    COMPRESSED_SPARSE,
    CROSS,
    FULL,
    INDEXED,
    LINEAR,
    SLIDING,
    SLIDING_OR_ALL,
    ModelType,
)

# The kinds of layers by the names that they have in older files.
RENAMED: Mapping[Any, str] = {
    "attention": FULL,
    "global": FULL,
    "local": SLIDING,
    "mamba": LINEAR,
    "recurrent": LINEAR,
    "deepseek_sparse_attention": INDEXED,
    # Nemotron-H and MiMo have letters and digits.
    "*": FULL,
    "M": LINEAR,
    "E": "moe",
    "-": "mlp",
    0: FULL,
    1: SLIDING,
}
# DeepSeek V4's files list a number for each layer: how many tokens the layer averages. 0 is none.
KINDS_OF_RATIOS = {0: SLIDING, 4: COMPRESSED_SPARSE, 128: COMPRESSED}
# Kinds of layers that rotate nothing.
UNROTATED = (LINEAR, CROSS, "conv", "moe", "mlp")
KNOWN = (FULL, SLIDING, CHUNKED, INDEXED, *UNROTATED)


def kinds_of_layers(model_type: ModelType, values: Options, count: int) -> list[str]:
    """Returns the kind of each layer, or an empty list if the kinds are not known.

    config.json may list the kinds, or DeepSeek V4's ratios, which say the kinds too. Otherwise
    layers are of the two kinds in `model_type.kinds`: a rule gives the indices of the layers of the
    second kind, and all others are of the first kind. Layers of cross attention are listed apart.

    Args:
        model_type: What is known of the model type.
        values: The values of all entries.
        count: The number of layers.
    """
    if values["layer_types"] is not None:
        return _kinds_from_names(model_type, values["layer_types"])
    if values["compress_ratios"]:
        return _kinds_from_ratios(values["compress_ratios"], count)
    if not model_type.kinds:
        return []
    choose_second_kind = _rule_for(model_type, values)
    indices_of_second_kind = choose_second_kind(model_type, values, count)
    indices_of_cross_attention = values["cross_attention_layers"] or ()
    first_kind = model_type.kinds[0]
    # If all layers are of one kind, it is both the first and the last in `kinds`.
    second_kind = model_type.kinds[-1]
    kinds = []
    for index in range(count):
        if index in indices_of_cross_attention:
            kinds.append(CROSS)
        elif index in indices_of_second_kind:
            kinds.append(second_kind)
        else:
            kinds.append(first_kind)
    return kinds


def has_window(values: Options) -> bool:
    """Returns whether a model has layers with a window."""
    return bool(values["sliding_window"]) and values["use_sliding_window"] is not False


def _kinds_from_names(model_type: ModelType, names: Collection[Any]) -> list[str]:
    """Returns the kinds that config.json lists, under the names that kinds have today."""
    kinds = [RENAMED.get(name, name) for name in names]
    for kind in {*kinds} - {*KNOWN, *model_type.kinds}:
        raise arguments.value_error("layer_types", f"some of {', '.join(KNOWN)}", kind)
    return kinds


def _kinds_from_ratios(ratios: Sequence[int], count: int) -> list[str]:
    """Returns the kinds of DeepSeek V4's layers; a ratio is how many tokens a layer averages.

    If there are more ratios than layers, the last ratios are about layers that predict further
    tokens, which are not read.
    """
    if len(ratios) < count:
        # The lengths differ, so this raises an error.
        arguments.check_same("compress_ratios", "a value for each layer", len(ratios), count)
    kinds = []
    for ratio in ratios[:count]:
        if ratio not in KINDS_OF_RATIOS:
            known = ", ".join(map(str, KINDS_OF_RATIOS))
            raise arguments.value_error("compress_ratios", f"some of {known}", ratio)
        kinds.append(KINDS_OF_RATIOS[ratio])
    return kinds


# --- The rules. Each returns the indices of the layers of the second kind in `model_type.kinds`.

Rule = Callable[[ModelType, Options, int], Collection[int]]


def _rule_for(model_type: ModelType, values: Options) -> Rule:
    """Returns the rule that says which layers of a model are of the second kind."""
    if _listed_indices(model_type, values) is not None:
        return _at_indices
    is_deepseek_v4 = COMPRESSED in model_type.kinds
    if is_deepseek_v4:
        return _every_other_from_3
    has_windows = has_window(values)
    # If EXAONE 4 has no window, all of its layers are full, so its pattern has no meaning.
    pattern_has_meaning = has_windows or model_type.rotates != SLIDING_OR_ALL
    if values["sliding_window_pattern"] and pattern_has_meaning:
        return _every_nth
    # In Llama 4, the layers that rotate have chunks. In SmolLM 3, the layers that rotate have full
    # attention, and the others have windows.
    has_two_kinds = has_windows or CHUNKED in model_type.kinds
    if values["no_rope_layer_interval"] and has_two_kinds:
        return _where_rotated
    return _all_or_lowest


def _listed_indices(model_type: ModelType, values: Options) -> Any:
    """Returns the indices of layers that config.json lists, or None if it lists none.

    If config.json says null, the type's default counts, which is an empty list for Bamba.
    """
    indices = values["attn_layer_indices"]
    return model_type.default("attn_layer_indices") if indices is None else indices


def _at_indices(model_type: ModelType, values: Options, _: int) -> Collection[int]:
    """Takes the layers whose indices are listed (Bamba, LFM 2)."""
    return _listed_indices(model_type, values)


def _every_nth(model_type: ModelType, values: Options, count: int) -> Collection[int]:
    """Takes every nth layer (Gemma, Cohere 2).

    The entry says n as a number, or as a text with a letter for each layer: EXAONE 4 has "LLLG".
    """
    period = values["sliding_window_pattern"]
    if isinstance(period, str):
        period = len(period)
    period = arguments.integer("sliding_window_pattern", period, at_least=1)
    return range(model_type.phase % period, count, period)


def _every_other_from_3(_model_type: ModelType, _values: Options, count: int) -> Collection[int]:
    """Takes the layers 3, 5, 7 and so on, as transformers does for DeepSeek V4."""
    return range(3, count, 2)


def _where_rotated(_: ModelType, values: Options, count: int) -> Collection[int]:
    """Takes the layers that rotate."""
    return [index for index in range(count) if values["no_rope_layers"][index]]


def _all_or_lowest(_: ModelType, values: Options, count: int) -> Collection[int]:
    """Takes all layers if the model has no window, or else the lowest layers, as in Qwen 2.

    Qwen 2's entry `max_window_layers` says how many: the layers below this one have no window.
    """
    if not has_window(values):
        return range(count)
    return range(values["max_window_layers"] or 0)
