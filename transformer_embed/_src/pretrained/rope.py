"""The entries of config.json for rotary embeddings, as arguments of `apply_rotary`.

A rotation is one way to rotate heads. All layers of a model may share one rotation, or its sliding
layers have a rotation of their own. config.json describes a rotation by entries at the top level,
such as "rope_theta", or by a JSON object, such as "rope_parameters". (An entry at the top level is
in config.json itself, and not in an object inside it.) In this file, `values` has the checked
values of the entries at the top level, and an object is a JSON object.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.positions import rotary_scaling
from transformer_embed._src.pretrained.entries import Options, check_count
from transformer_embed._src.pretrained.model_type import CONSECUTIVE, FULL, SLIDING, ModelType

BETA = "llama_4_scaling_beta"
LOCAL_BASE = "rope_local_base_freq"
COMPRESSED_BASE = "compress_rope_theta"
TRAINED_LENGTH = "original_max_position_embeddings"
ROPE_PARAMETERS = "rope_parameters"
PROPORTIONAL = "proportional"


class RotationEntries(NamedTuple):
    """The names of the entries of config.json for one rotation; "" if there is no such entry.

    Args:
        base: The name of the entry that has the base.
        share: The name of the entry that has the share of a head's channels that rotate, such as
            0.5.
        sections: The name of the entry that has the number of channel pairs of each axis of
            positions.
        growth: The name of the entry that says how much queries grow with their positions (the
            `beta` of `query_scale`).
        scaling: The name of the entry that has the scaling, an object.
    """

    base: str
    share: str
    sections: str
    growth: str
    scaling: str


# The rotation of all layers. If sliding layers have a rotation of their own, it is the rotation of
# the other layers.
USUAL_ROTATION = RotationEntries(
    base="rope_theta",
    share="partial_rotary_factor",
    sections="mrope_section",
    growth=BETA,
    scaling="rope_scaling",
)
# The rotation of the sliding layers of Gemma 3 and others.
SLIDING_ROTATION = RotationEntries(
    base=LOCAL_BASE,
    share="sliding_rotary_factor",
    sections="",
    growth="",
    scaling="sliding_rope_scaling",
)
# The two rotations of DeepSeek V4: of the layers that see averages of tokens, and of the sliding
# layers. A `rope_scaling` scales the first one alone.
COMPRESSED_ROTATION = RotationEntries(
    base=COMPRESSED_BASE, share="", sections="", growth="", scaling="rope_scaling"
)
UNCOMPRESSED_ROTATION = RotationEntries(
    base="rope_theta", share="", sections="", growth="", scaling="sliding_rope_scaling"
)
# The entries that have the object of a scaling.
ENTRIES_OF_SCALINGS = ("rope_scaling", "sliding_rope_scaling")
# The names that DeepSeek V4's two rotations have in `rope_parameters`. The sliding layers have the
# "main" rotation, and the layers that see averages of tokens have the "compress" rotation.
MAIN, COMPRESS = "main", "compress"
# The class of the scaling of each rope_type. None is no scaling: "mrope" only says that there are
# sections for images.
SCALINGS = {
    "default": None,
    "linear": rotary_scaling.LinearScaling,
    "dynamic": rotary_scaling.NTKScaling,
    "yarn": rotary_scaling.YarnScaling,
    "deepseek_yarn": rotary_scaling.YarnScaling,
    "llama3": rotary_scaling.Llama3Scaling,
    "longrope": rotary_scaling.LongRopeScaling,
    PROPORTIONAL: rotary_scaling.LinearScaling,
    "xdrope": rotary_scaling.NTKScaling,
    "mrope": None,
}
# The entries of a rotation's object that are about the scaling.
NAMES_IN_SCALING = (
    "rope_type factor low_freq_factor high_freq_factor short_factor long_factor beta_fast "
    f"beta_slow truncate mscale mscale_all_dim attention_factor {TRAINED_LENGTH}"
).split()
# Anyone may have written a file, so a number of channels in it has a limit.
MOST_CHANNELS = 8192


# --- The rotation of a layer.


def rotary_arguments(model_type: ModelType, values: Options, kind: str) -> dict[str, Any]:
    """Returns the keyword arguments of `apply_rotary` for a layer.

    Arguments that are not needed are left out, so that `apply_rotary` uses its defaults.

    Args:
        model_type: What is known of the model type.
        values: The values of all entries for this layer.
        kind: The kind of the layer, such as "sliding_attention".
    """
    # The names of the entries for this kind. For example, `entry_names.base` is "rope_theta" for
    # most layers, and "rope_local_base_freq" for the sliding layers of Gemma 3.
    entry_names = _entries_of_kind(model_type, kind)
    scaling_object = values[entry_names.scaling] or {}
    # The number of channels of a head that rotate, or None if all do. `entry_names.share` is the
    # entry that has their share, such as 0.5.
    rotary_dim = _rotary_dim(values, entry_names.share)
    rotated_channels = rotary_dim or head_dim(values)
    # If only some channels of a head rotate, `partial` says which. `apply_rotary` chooses them in
    # its default way, unless the scaling has the type "proportional".
    partial = None
    if rotary_dim and scaling_object.get("rope_type") == PROPORTIONAL:
        partial = PROPORTIONAL
    options = {
        # Sliding layers without a base of their own rotate by the base of the full layers.
        "base": values[entry_names.base] or values["rope_theta"],
        "layout": _layout(model_type, values),
        "scaling": make_scaling(scaling_object, values),
        "pair_axes": _pair_axes(model_type, values["mrope_section"], rotated_channels),
        "partial": partial,
        "rotary_dim": rotary_dim,
    }
    return {name: value for name, value in options.items() if value is not None}


def _entries_of_kind(model_type: ModelType, kind: str) -> RotationEntries:
    """Returns the names of the entries that describe the rotation of this kind of layers."""
    # DeepSeek V4 has one base for its compressed layers, and another for its sliding layers.
    if COMPRESSED_BASE in model_type.entries:
        return UNCOMPRESSED_ROTATION if kind == SLIDING else COMPRESSED_ROTATION
    # Types such as Gemma 3 have another base for sliding layers ("rope_local_base_freq").
    if kind == SLIDING and LOCAL_BASE in model_type.entries:
        return SLIDING_ROTATION
    return USUAL_ROTATION


def _layout(model_type: ModelType, values: Options) -> str:
    """Returns the layout of the pairs of channels, "half" or "interleaved"."""
    # `rotary` is a layout, or the name of the entry that says whether pairs are interleaved.
    is_name_of_entry = model_type.rotary in values
    if not is_name_of_entry:
        return model_type.rotary
    return "interleaved" if values[model_type.rotary] else "half"


def _rotary_dim(values: Options, share: str) -> int | None:
    """Returns the number of a head's channels that rotate, or None if all rotate.

    The entry "rotary_dim" may say this number. Otherwise the entry named `share` may say which
    share of the channels rotates, such as 0.5.
    """
    if values["rotary_dim"] is not None:
        return values["rotary_dim"]
    if values.get(share) in (None, 1):
        return None
    channels = head_dim(values)
    if not channels:
        # The number of heads is missing, so this raises an error that names the entry.
        channels = check_count("num_attention_heads", None)
    # The product is rounded down, because MiMo V2 Flash has a share of 0.334.
    return arguments.integer(share, int(channels * values[share]), at_most=channels)


def head_dim(values: Options) -> int | None:
    """Returns the number of a head's channels, or None if the entries do not say it."""
    if values["head_dim"] or values["num_attention_heads"] is None:
        return values["head_dim"]
    heads = check_count("num_attention_heads", values["num_attention_heads"])
    return values["hidden_size"] // heads


def _pair_axes(
    model_type: ModelType, sections: tuple[int, ...] | None, rotated_channels: int | None
) -> tuple[int, ...] | None:
    """Returns, for each channel pair, the axis of the positions that rotates the pair.

    The axes are 0 for time, 1 for height and 2 for width. `sections` has the number of pairs of
    each axis. With sections (2, 1, 1), consecutive axes are (0, 0, 1, 2), and axes in turns are
    (0, 1, 2, 0). If `sections` is None, positions have one axis, and the result is None.
    """
    if sections is None:
        return None
    # The sum is checked first, because memory is taken for each pair.
    sum_of_sections = arguments.integer(
        "mrope_section: its sum", sum(sections), at_most=MOST_CHANNELS
    )
    pair_axes: list[int] = []
    if model_type.sections == CONSECUTIVE:
        for axis, pairs_of_axis in enumerate(sections):
            pair_axes += [axis] * pairs_of_axis
        return tuple(pair_axes)
    # If config.json does not say the size of a head, there are as many pairs as the sections have.
    pair_count = rotated_channels // 2 if rotated_channels else sum_of_sections
    for pair in range(pair_count):
        turn, axis = divmod(pair, len(sections))
        # When an axis has had all of its pairs, its turns go to the first axis.
        axis_has_pairs_left = turn < sections[axis]
        axis_of_pair = axis if axis_has_pairs_left else 0
        pair_axes.append(axis_of_pair)
    return tuple(pair_axes)


# --- Scalings.


def make_scaling(scaling_object: Options, values: Options) -> rotary_scaling.Scaling | None:
    """Returns the scaling of a rotation, or None if frequencies are not scaled.

    Args:
        scaling_object: The object of the scaling. Old names of its entries were already replaced by
            `_use_current_names`.
        values: The values of the entries at the top level of config.json.
    """
    if not scaling_object:
        return None
    rope_type = arguments.choice(
        "rope_scaling: rope_type", scaling_object.get("rope_type"), tuple(SCALINGS)
    )
    # HunYuan's files have the `alpha` of NTK scaling, so the scaling does not depend on the length
    # of the text.
    has_alpha = bool(scaling_object.get("alpha"))
    scaling_class: Any = rotary_scaling.NTKScaling if has_alpha else SCALINGS[rope_type]
    if scaling_class is None:
        return None
    # The type "proportional" says which channels rotate. It scales frequencies only if the object
    # also has a factor other than 1.
    if rope_type == PROPORTIONAL and scaling_object.get("factor", 1) == 1:
        return None
    # Without an `alpha` in the file, dynamic scaling computes it from two lengths: the length of
    # the longest text for the unscaled model, and the length of the longest text now.
    computes_alpha = rope_type == "dynamic" and not has_alpha
    fields = scaling_class.__dataclass_fields__
    needs_original_length = computes_alpha or "original_length" in fields
    needs_length = computes_alpha or "length" in fields
    options = dict(scaling_object)
    if needs_original_length:
        options |= _original_length(rope_type, scaling_object, values)
    if needs_length:
        options["length"] = arguments.integer("length", values["length"], at_least=0)
    if computes_alpha:
        options["alpha"] = _dynamic_alpha(options)
    # transformers uses YaRN's `mscale` and `mscale_all_dim` only if config.json has both of them,
    # and neither is 0. Otherwise it uses these two defaults.
    has_both_scales = options.get("mscale") and options.get("mscale_all_dim")
    if not has_both_scales:
        options["mscale"] = 1.0
        options["mscale_all_dim"] = 0.0
    # The options that are no fields of this class are left out.
    return scaling_class(**{name: options[name] for name in fields if name in options})


def _original_length(rope_type: str, scaling_object: Options, values: Options) -> dict[str, Any]:
    """Returns {"original_length": the length of the texts that the model was trained on}.

    YaRN and LongRoPE prepare a model for texts of up to `max_position_embeddings` tokens, the
    longest length. If their object has no factor, the result also has "factor", the longest length
    divided by the trained one. For example, a model for 16384 tokens that was trained on 4096
    tokens gives {"original_length": 4096, "factor": 4.0}.

    Args:
        rope_type: The type of the scaling, such as "yarn".
        scaling_object: The entries that describe the scaling, such as {"rope_type": "yarn",
            "factor": 4.0}.
        values: The values of the entries at the top level of config.json.
    """
    longest = values["max_position_embeddings"]
    if rope_type == "dynamic":
        # Dynamic scaling starts with texts that are longer than `max_position_embeddings`.
        trained_length = longest
    else:
        # The trained length may be at the top level of config.json, or in the scaling's object. If
        # neither has it, the model was trained on the longest length.
        at_top_level = values[TRAINED_LENGTH]
        in_object = scaling_object.get(TRAINED_LENGTH)
        trained_length = at_top_level or in_object or longest
    trained_length = arguments.integer(TRAINED_LENGTH, trained_length, at_least=1)
    options: dict[str, Any] = {"original_length": trained_length}
    if rope_type in ("yarn", "longrope") and "factor" not in scaling_object:
        # If the longest length is not known (None), the factor becomes 0. Then `YarnScaling` or
        # `LongRopeScaling`, which get these options, raise an error.
        options["factor"] = (longest or 0) / trained_length
    return options


def _dynamic_alpha(options: Options) -> float:
    """Returns the alpha that dynamic NTK scaling has for the current length.

    Alpha is 1 up to the original length, and grows by `factor` for each further original length.
    For example, with a factor of 4 and three times the original length, alpha is 9.
    """
    factor = arguments.positive("factor", options.get("factor"))
    times_longer = max(options["length"] / options["original_length"], 1)
    return factor * times_longer - (factor - 1)


def merge_scalings(in_file: Options, in_settings: Options) -> dict[str, Any]:
    """Merges config.json's object of a scaling with the object in settings, which overrides it.

    If settings name another type of scaling, nothing of config.json's object is kept.
    """
    is_same_type = in_settings.get("rope_type") in (None, in_file.get("rope_type"))
    return {**in_file, **in_settings} if is_same_type else {**in_settings}


# --- From objects of rotations to entries at the top level.


def flatten_rotations(model_type: ModelType, entries: Options) -> dict[str, Any]:
    """Moves what the objects of rotations hold to the top level, and returns all entries.

    {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5}} becomes
    {"rope_theta": 5, "rope_scaling": {"rope_type": "linear", "factor": 2}}: only the scaling stays
    an object. Both config.json and settings are brought into this form, so that an entry of
    settings can override an entry of config.json.

    As in transformers, an entry inside `rope_parameters` overrides an entry at the top level, and
    `rope_scaling` overrides `rope_parameters`. If an entry inside an object is not known, it is
    named after the object ("rope_scaling: beta").

    Args:
        model_type: What is known of the model type.
        entries: The entries of config.json, or of settings, by the names in `ENTRIES`.
    """
    result = dict(entries)
    # The object of each rotation in `rope_parameters`, by the rotation's name.
    objects: dict[str, Any] = {}
    if ROPE_PARAMETERS in entries:
        objects = _objects_in_rope_parameters(model_type, result.pop(ROPE_PARAMETERS))
    # For each rotation of this type, the names that its entries get at the top level.
    for rotation_name, entry_names in _entries_by_rotation(model_type).items():
        # The entry that has the scaling of this rotation, such as "rope_scaling".
        scaling_entry = entry_names.scaling
        scaling_object = result.pop(scaling_entry, None)
        is_in_rope_parameters = rotation_name in objects
        # A scaling overrides `rope_parameters`. If the scaling is null or empty, it is used only if
        # `rope_parameters` has no object for this rotation.
        is_empty_but_alone = scaling_entry in entries and not is_in_rope_parameters
        if scaling_object or is_empty_but_alone:
            source = scaling_entry
            rope_object = scaling_object
            if rotation_name == COMPRESS:
                # This is the rotation of DeepSeek V4's compressed layers.
                rope_object = _for_compressed_layers(source, scaling_object)
        elif is_in_rope_parameters:
            source = ROPE_PARAMETERS
            rope_object = objects[rotation_name]
        else:
            # No object describes this rotation.
            continue
        # What the object holds, as entries at the top level: the base, the scaling, ...
        result |= _flatten_rotation(model_type, entry_names, source, rope_object)
    return result


def _entries_by_rotation(model_type: ModelType) -> dict[str, RotationEntries]:
    """Returns the names of the entries for each rotation that a model of this type has.

    The keys are the names that the rotations have in `rope_parameters`. If there is only one
    rotation, it has no name there, and its key is "full_attention".
    """
    # DeepSeek V4 has one base for its compressed layers, and another for its sliding layers.
    if COMPRESSED_BASE in model_type.entries:
        return {MAIN: UNCOMPRESSED_ROTATION, COMPRESS: COMPRESSED_ROTATION}
    # Types such as Gemma 3 have another base for sliding layers ("rope_local_base_freq").
    if LOCAL_BASE in model_type.entries:
        return {FULL: USUAL_ROTATION, SLIDING: SLIDING_ROTATION}
    return {FULL: USUAL_ROTATION}


def _objects_in_rope_parameters(model_type: ModelType, rope_parameters: Any) -> dict[str, Any]:
    """Returns the object of each rotation that `rope_parameters` has, by the rotation's name.

    The names are the keys of `_entries_by_rotation`. In a type with one rotation,
    `rope_parameters` is the object of this rotation itself.
    """
    names = [*_entries_by_rotation(model_type)]
    if len(names) == 1:
        # The key of the only rotation is "full_attention".
        return {FULL: rope_parameters}
    whole_object = _checked_object(ROPE_PARAMETERS, rope_parameters)
    objects = {name: whole_object[name] for name in whole_object if name in names}
    want = f"an object with the entries {' and '.join(names)}"
    # Of all types, only DeepSeek V4 has a rotation of this name.
    is_deepseek_v4 = COMPRESS in names
    if not is_deepseek_v4:
        # A rotation may lack an object, and then has the defaults. No other entry may be inside.
        has_other_entries = len(objects) < len(whole_object)
        if has_other_entries:
            raise arguments.value_error(ROPE_PARAMETERS, want, dict(whole_object))
        return objects
    if not objects:
        # If no rotation is named, the whole object is about the compressed layers, the ones that
        # see averages of tokens. The sliding layers then rotate without a scaling.
        return {COMPRESS: _for_compressed_layers(ROPE_PARAMETERS, whole_object)}
    # If one rotation is named, the other one must be named too. Further entries beside the two
    # objects are ignored, because transformers may leave copies of an object's entries there.
    if len(objects) < len(names):
        raise arguments.value_error(ROPE_PARAMETERS, want, objects)
    return objects


def _for_compressed_layers(source: str, rope_object: Any) -> dict[str, Any]:
    """Returns an object as transformers reads it for DeepSeek V4's compressed layers.

    The object gets no base, because the base of these layers is the entry `compress_rope_theta` at
    the top level of config.json. With YaRN, cosines and sines are multiplied by no factor, unless
    the object has an `attention_factor`.

    Args:
        source: The name of the object, for errors.
        rope_object: The object, or None.
    """
    entries = dict(_checked_object(source, rope_object))
    entries.pop("rope_theta", None)
    if "yarn" in (entries.get("rope_type"), entries.get("type")):
        entries.setdefault("attention_factor", 1.0)
    return entries


def _checked_object(name: str, rope_object: Any) -> Options:
    """Returns a JSON object, which is {} for null, or raises a TypeError for any other value."""
    return arguments.instance(name, rope_object, Mapping | None, "an object") or {}


def _flatten_rotation(
    model_type: ModelType, entry_names: RotationEntries, source: str, rope_object: Any
) -> dict[str, Any]:
    """Returns the entries in one rotation's object, as entries at the top level of config.json.

    For example, the object "rope_parameters" of sliding layers

        {"rope_theta": 5, "rope_type": "linear", "factor": 2, "beta": 1}

    becomes

        {"rope_local_base_freq": 5, "sliding_rope_scaling": {"rope_type": "linear", "factor": 2},
         "rope_parameters: beta": 1}

    The base gets the name that `entry_names` says, the scaling stays an object, and an entry that
    is not known is named after the object.

    Args:
        model_type: What is known of the model type.
        entry_names: The names that the entries get at the top level.
        source: The name of the object, for errors and for entries that are not known.
        rope_object: The object, or None.
    """
    checked_object = _checked_object(source, rope_object)
    unread = {key: item for key, item in checked_object.items() if item is not None}
    _use_current_names(source, unread)
    entries: dict[str, Any] = {}
    for field in ("base", "share", "sections", "growth"):
        # The base of any rotation is "rope_theta" inside an object, as in `USUAL_ROTATION`.
        name_in_object = getattr(USUAL_ROTATION, field)
        name_at_top_level = getattr(entry_names, field)
        if name_at_top_level and name_in_object in unread:
            entries[name_at_top_level] = unread.pop(name_in_object)
    names_in_scaling = [*NAMES_IN_SCALING, "alpha"] if model_type.has_alpha else NAMES_IN_SCALING
    scaling_object = {key: unread.pop(key) for key in names_in_scaling if key in unread}
    # An object that only has a base, for example, says nothing of a scaling, so the scaling of
    # another source, such as config.json, stays. An empty object says that there is no scaling.
    says_nothing_of_scaling = entries and not scaling_object
    if not says_nothing_of_scaling:
        entries[entry_names.scaling] = scaling_object
    for key, item in unread.items():
        entries[f"{source}: {key}"] = item
    return entries


def _use_current_names(source: str, entries: dict[str, Any]) -> None:
    """Renames entries that have an old name in the object of a rotation. Changes `entries`."""
    # The oldest files call the type "type".
    if "type" in entries:
        entries.setdefault("rope_type", entries.pop("type"))
    # Early files of Phi-3 call LongRoPE "su" or "yarn".
    if entries.get("rope_type") in ("su", "yarn") and "short_factor" in entries:
        entries["rope_type"] = "longrope"
    # Phi-MoE's files have two attention factors: `short_mscale` for texts up to the trained length,
    # and `long_mscale` for longer texts. `LongRopeScaling` has one factor, so they must be equal.
    factor_of_short_texts = entries.pop("short_mscale", None)
    factor_of_long_texts = entries.pop("long_mscale", None)
    if factor_of_short_texts != factor_of_long_texts:
        want = "equal short_mscale, long_mscale"
        raise arguments.value_error(source, want, (factor_of_short_texts, factor_of_long_texts))
    if factor_of_short_texts is not None:
        entries["attention_factor"] = factor_of_short_texts
