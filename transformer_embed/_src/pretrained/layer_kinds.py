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
# DeepSeek V4's files list a ratio for each layer: how many tokens the layer joins in one average. A
# layer with the ratio 0 has no averages.
KINDS_OF_RATIOS = {0: SLIDING, 4: COMPRESSED_SPARSE, 128: COMPRESSED}
# Kinds of layers that rotate nothing.
UNROTATED = (LINEAR, CROSS, "conv", "moe", "mlp")
KNOWN = (FULL, SLIDING, CHUNKED, INDEXED, *UNROTATED)


def kinds_of_layers(model_type: ModelType, values: Options, count: int) -> list[str]:
    """Returns the kind of each layer, or an empty list if the kinds are not known.

    config.json may list the kinds. For DeepSeek V4, it may list a ratio for each layer, which says
    the kind of the layer (see `KINDS_OF_RATIOS`). Otherwise layers are of the two kinds in
    `model_type.kinds`: a rule gives the indices of the layers of the second kind, and all others
    are of the first kind. Layers of cross attention have a list of their own.

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
    """Returns the kind of each of DeepSeek V4's layers, from the layers' ratios.

    A ratio says how many tokens the layer joins in one average. The ratios (0, 4, 128) give
    "sliding_attention", "compressed_sparse_attention" and "heavily_compressed_attention". Files may
    have more ratios than layers. The last ratios are then about extra layers, which predict the
    tokens after the next one. These layers are not read.
    """
    has_ratio_for_each_layer = len(ratios) >= count
    if not has_ratio_for_each_layer:
        # The two lengths differ, so this always raises the error that names both.
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
    # Some types list the indices of the layers of the second kind in an entry.
    if _listed_indices(model_type, values) is not None:
        return _at_indices
    # Only DeepSeek V4 has layers of the kind "heavily_compressed_attention".
    is_deepseek_v4 = COMPRESSED in model_type.kinds
    if is_deepseek_v4:
        return _every_other_from_3
    model_has_window = has_window(values)
    # If EXAONE 4 has no window, all of its layers are full, and its pattern is ignored.
    is_exaone_4 = model_type.rotates == SLIDING_OR_ALL
    ignores_pattern = is_exaone_4 and not model_has_window
    if values["sliding_window_pattern"] and not ignores_pattern:
        return _every_nth
    # In two types, the layers that rotate are of the second kind: in Llama 4, they have chunks and
    # the others have full attention, and in a SmolLM 3 with a window, they have full attention and
    # the others have the window.
    has_chunks = CHUNKED in model_type.kinds
    kind_depends_on_rotation = values["no_rope_layer_interval"] and (has_chunks or model_has_window)
    if kind_depends_on_rotation:
        return _that_rotate
    return _without_window


def _listed_indices(model_type: ModelType, values: Options) -> Any:
    """Returns the indices of layers that config.json lists, or None if it lists none.

    If config.json says null, the type's default is used, which is an empty list for Bamba.
    """
    indices = values["attn_layer_indices"]
    return model_type.default("attn_layer_indices") if indices is None else indices


def _at_indices(model_type: ModelType, values: Options, _: int) -> Collection[int]:
    """Returns the indices of layers that config.json lists (Bamba, LFM 2)."""
    return _listed_indices(model_type, values)


def _every_nth(model_type: ModelType, values: Options, count: int) -> Collection[int]:
    """Returns the index of every nth layer (Gemma, Cohere 2).

    The entry says n as a number, or as a text with a letter for each of n layers: EXAONE 4 has
    "LLLG". With n = 4, the indices are 3, 7, 11 and so on, or 0, 4, 8 and so on if
    `model_type.phase` is 0.
    """
    period = values["sliding_window_pattern"]
    if isinstance(period, str):
        period = len(period)
    period = arguments.integer("sliding_window_pattern", period, at_least=1)
    return range(model_type.phase % period, count, period)


def _every_other_from_3(_model_type: ModelType, _values: Options, count: int) -> Collection[int]:
    """Returns the indices 3, 5, 7 and so on, as transformers does for DeepSeek V4."""
    return range(3, count, 2)


def _that_rotate(_: ModelType, values: Options, count: int) -> Collection[int]:
    """Returns the indices of the layers that rotate.

    In spite of its name, `no_rope_layers` has 1 for a layer that rotates, and 0 for another layer.
    """
    return [index for index in range(count) if values["no_rope_layers"][index]]


def _without_window(_: ModelType, values: Options, count: int) -> Collection[int]:
    """Returns the indices of the layers without a window.

    These are the lowest layers, or all layers if the model has no window.
    Qwen 2's entry `max_window_layers` says how many lowest layers have no window.
    """
    if not has_window(values):
        return range(count)
    return range(values["max_window_layers"] or 0)
