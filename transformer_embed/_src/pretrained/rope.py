"""The entries of config.json for rotary embeddings, as arguments of `apply_rotary`.

A rotation is one way to rotate heads. All layers of a model may share one rotation, or its sliding
layers have a rotation of their own. config.json describes a rotation by entries at the top level,
such as "rope_theta", or by a JSON object, such as "rope_parameters". In this file, `values` has
the checked values of the entries at the top level, and an object is a JSON object.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.positions import rotary_scaling
from transformer_embed._src.pretrained.entries import Options, count
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
        base: The entry that has the base.
        share: The entry that has the share of a head's channels that rotate, such as 0.5.
        sections: The entry that has the number of channel pairs of each axis of positions.
        growth: The entry that has the growth of queries with their positions (see `query_scale`).
        scaling: The entry that has the scaling, an object.
    """

    base: str
    share: str
    sections: str
    growth: str
    scaling: str


# The rotation of all layers, or of the full ones if the sliding ones have another.
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
    names = _entries_of_kind(model_type, kind)
    scaling_object = values[names.scaling] or {}
    rotary_dim = _rotary_dim(values, names.share)
    rotated_channels = rotary_dim or head_dim(values)
    # This type of scaling says which channels rotate, if not all of them do.
    is_proportional = scaling_object.get("rope_type") == PROPORTIONAL
    options = {
        # Sliding layers without a base of their own rotate by the base of the full layers.
        "base": values[names.base] or values["rope_theta"],
        "layout": _layout(model_type, values),
        "scaling": make_scaling(scaling_object, values),
        "pair_axes": _pair_axes(model_type, values["mrope_section"], rotated_channels),
        "partial": PROPORTIONAL if is_proportional and rotary_dim else None,
        "rotary_dim": rotary_dim,
    }
    return {name: value for name, value in options.items() if value is not None}


def _entries_of_kind(model_type: ModelType, kind: str) -> RotationEntries:
    """Returns the names of the entries that describe the rotation of this kind of layers."""
    if COMPRESSED_BASE in model_type.entries:
        return UNCOMPRESSED_ROTATION if kind == SLIDING else COMPRESSED_ROTATION
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
        # This raises the error that num_attention_heads is missing.
        channels = count("num_attention_heads", None)
    # The product is rounded down, because MiMo V2 Flash has a share of 0.334.
    return arguments.integer(share, int(channels * values[share]), at_most=channels)


def head_dim(values: Options) -> int | None:
    """Returns the number of a head's channels, or None if the entries do not say it."""
    if values["head_dim"] or values["num_attention_heads"] is None:
        return values["head_dim"]
    heads = count("num_attention_heads", values["num_attention_heads"])
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
    pairs = rotated_channels // 2 if rotated_channels else sum_of_sections
    for pair in range(pairs):
        turn, axis = divmod(pair, len(sections))
        # When an axis has had all of its pairs, its turns go to the first axis.
        pair_axes.append(axis if turn < sections[axis] else 0)
    return tuple(pair_axes)


# --- Scalings.


def make_scaling(scaling_object: Options, values: Options) -> rotary_scaling.Scaling | None:
    """Returns the scaling of a rotation, or None if frequencies are not scaled.

    Args:
        scaling_object: The object of the scaling, with today's names (see `_use_current_names`).
        values: The values of the entries at the top level of config.json.
    """
    if not scaling_object:
        return None
    rope_type = arguments.choice(
        "rope_scaling: rope_type", scaling_object.get("rope_type"), tuple(SCALINGS)
    )
    # HunYuan has a fixed alpha, so its scaling does not depend on the length of the text.
    has_alpha = bool(scaling_object.get("alpha"))
    scaling_class: Any = rotary_scaling.NTKScaling if has_alpha else SCALINGS[rope_type]
    # "proportional" is about the share of channels that rotate. It may have a factor besides.
    has_factor_of_1 = rope_type == PROPORTIONAL and scaling_object.get("factor", 1) == 1
    if scaling_class is None or has_factor_of_1:
        return None
    # Dynamic scaling computes alpha from the trained length and the length of the text.
    is_dynamic = rope_type == "dynamic" and not has_alpha
    fields = scaling_class.__dataclass_fields__
    options = dict(scaling_object)
    if is_dynamic or "original_length" in fields:
        options |= _original_length(rope_type, scaling_object, values)
    if is_dynamic or "length" in fields:
        options["length"] = arguments.integer("length", values["length"], at_least=0)
    if is_dynamic:
        options["alpha"] = _dynamic_alpha(options)
    # transformers reads these two entries only if config.json has both.
    has_both_scales = options.get("mscale") and options.get("mscale_all_dim")
    if not has_both_scales:
        options |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    # The options that are no fields of this class are left out.
    return scaling_class(**{name: options[name] for name in fields if name in options})


def _original_length(rope_type: str, scaling_object: Options, values: Options) -> dict[str, Any]:
    """Returns {"original_length": the length of the texts that the model was trained on}.

    YaRN and LongRoPE stretch the trained length to the longest one. If their object has no factor,
    the result has "factor" too, the longest length divided by the trained one.

    Args:
        rope_type: The type of the scaling, such as "yarn".
        scaling_object: The object of the scaling.
        values: The values of the entries at the top level of config.json.
    """
    longest = values["max_position_embeddings"]
    at_top_level = values[TRAINED_LENGTH]
    in_object = scaling_object.get(TRAINED_LENGTH)
    trained_length = at_top_level or in_object or longest
    if rope_type == "dynamic":
        # Dynamic scaling begins beyond the longest length of the model.
        trained_length = longest
    trained_length = arguments.integer(TRAINED_LENGTH, trained_length, at_least=1)
    options: dict[str, Any] = {"original_length": trained_length}
    if rope_type in ("yarn", "longrope") and "factor" not in scaling_object:
        # If the longest length is not known, the scaling's class refuses this factor of 0.
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
    """Merges config.json's object of a scaling with the object in settings, which goes first.

    If settings name another type of scaling, nothing of config.json's object is kept.
    """
    is_same_type = in_settings.get("rope_type") in (None, in_file.get("rope_type"))
    return {**in_file, **in_settings} if is_same_type else {**in_settings}


# --- From objects of rotations to entries at the top level.


def flatten_rotations(model_type: ModelType, entries: Options) -> dict[str, Any]:
    """Moves what the objects of rotations hold to the top level, and returns all entries.

    {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5}} becomes
    {"rope_theta": 5, "rope_scaling": {"rope_type": "linear", "factor": 2}}: only the scaling stays
    an object. So settings can override the entries of config.json, whichever form each of the two
    has.

    As in transformers, an entry inside `rope_parameters` goes before one at the top level, and
    `rope_scaling` goes before `rope_parameters`. If an entry inside an object is not known, it is
    named after the object ("rope_scaling: beta").

    Args:
        model_type: What is known of the model type.
        entries: The entries of config.json, or of settings, by the names in `ENTRIES`.
    """
    result = dict(entries)
    objects: dict[str, Any] = {}
    if ROPE_PARAMETERS in entries:
        objects = _objects_in_rope_parameters(model_type, result.pop(ROPE_PARAMETERS))
    for rotation_name, names in _entries_by_rotation(model_type).items():
        scaling_object = result.pop(names.scaling, None)
        # An empty scaling, or null, is read only if `rope_parameters` does not have the rotation.
        is_only_source = names.scaling in entries and rotation_name not in objects
        if scaling_object or is_only_source:
            if rotation_name == COMPRESS:
                scaling_object = _without_base(names.scaling, scaling_object)
            result |= _flatten_rotation(model_type, names, names.scaling, scaling_object)
        elif rotation_name in objects:
            result |= _flatten_rotation(model_type, names, ROPE_PARAMETERS, objects[rotation_name])
    return result


def _entries_by_rotation(model_type: ModelType) -> dict[str, RotationEntries]:
    """Returns the names of the entries for each rotation that a model of this type has.

    The keys are the names that the rotations have in `rope_parameters`. If there is only one
    rotation, it has no name there, and its key is "full_attention".
    """
    if COMPRESSED_BASE in model_type.entries:
        return {MAIN: UNCOMPRESSED_ROTATION, COMPRESS: COMPRESSED_ROTATION}
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
        return {FULL: rope_parameters}
    whole_object = _checked_object(ROPE_PARAMETERS, rope_parameters)
    objects = {name: whole_object[name] for name in whole_object if name in names}
    want = f"an object with the entries {' and '.join(names)}"
    is_deepseek_v4 = COMPRESS in names
    if not is_deepseek_v4:
        # A rotation without an object has the defaults, but nothing else may be inside.
        has_other_entries = len(objects) < len(whole_object)
        if has_other_entries:
            raise arguments.value_error(ROPE_PARAMETERS, want, dict(whole_object))
        return objects
    if not objects:
        # Without the names of the two rotations, the whole object is about the compressed layers.
        # The sliding layers then rotate without a scaling.
        return {COMPRESS: _without_base(ROPE_PARAMETERS, whole_object)}
    # Either both rotations have an object, or none has. Other entries may be beside the two
    # objects, because transformers may leave entries of one object there. They are not read.
    if len(objects) < len(names):
        raise arguments.value_error(ROPE_PARAMETERS, want, objects)
    return objects


def _without_base(source: str, rope_object: Any) -> dict[str, Any]:
    """Returns an object without its base, as transformers reads DeepSeek V4's unnamed object.

    The object is about the compressed layers, whose base is at the top level. YaRN multiplies no
    cosines by a factor unless the object names one.

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
    model_type: ModelType, names: RotationEntries, source: str, rope_object: Any
) -> dict[str, Any]:
    """Returns what the object of one rotation holds, as entries at the top level.

    These are the base, the share and so on under `names`, an object of the scaling alone, and the
    entries that are not known, named after the object.

    Args:
        model_type: What is known of the model type.
        names: The names that the entries get at the top level.
        source: The name of the object, for errors and for entries that are not known.
        rope_object: The object, or None.
    """
    checked_object = _checked_object(source, rope_object)
    unread = {key: item for key, item in checked_object.items() if item is not None}
    _use_current_names(source, unread)
    entries: dict[str, Any] = {}
    # Inside an object, an entry has its usual name: the base of any rotation is "rope_theta".
    for name, usual_name in zip(names, USUAL_ROTATION, strict=True):
        if name and name != names.scaling and usual_name in unread:
            entries[name] = unread.pop(usual_name)
    names_in_scaling = [*NAMES_IN_SCALING, "alpha"] if model_type.has_alpha else NAMES_IN_SCALING
    scaling_object = {key: unread.pop(key) for key in names_in_scaling if key in unread}
    # If the object says only a base or a share, the scaling of another source stays as it is.
    if scaling_object or not entries:
        entries[names.scaling] = scaling_object
    for key, item in unread.items():
        entries[f"{source}: {key}"] = item
    return entries


def _use_current_names(source: str, entries: dict[str, Any]) -> None:
    """Gives the entries of a rotation's object the names of today, in place."""
    # The oldest files call the type "type".
    if "type" in entries:
        entries.setdefault("rope_type", entries.pop("type"))
    # Early files of Phi-3 call LongRoPE "su" or "yarn".
    if entries.get("rope_type") in ("su", "yarn") and "short_factor" in entries:
        entries["rope_type"] = "longrope"
    # Phi-MoE has an attention factor for texts up to the trained length, and one for longer texts.
    # `LongRopeScaling` has one for both.
    factor_of_short_texts = entries.pop("short_mscale", None)
    factor_of_long_texts = entries.pop("long_mscale", None)
    if factor_of_short_texts != factor_of_long_texts:
        want = "equal short_mscale, long_mscale"
        raise arguments.value_error(source, want, (factor_of_short_texts, factor_of_long_texts))
    if factor_of_short_texts is not None:
        entries["attention_factor"] = factor_of_short_texts
