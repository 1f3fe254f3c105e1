"""The entries of config.json for rotary embeddings, as arguments of `apply_rotary`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.positions import rotary_scaling
from transformer_embed._src.pretrained.entries import Options, count
from transformer_embed._src.pretrained.model_type import CONSECUTIVE, FULL, SLIDING, ModelType

BETA = "llama_4_scaling_beta"
LOCAL = "rope_local_base_freq"
COMPRESSED_BASE = "compress_rope_theta"
ORIGINAL = "original_max_position_embeddings"
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
USUAL = RotationEntries(
    base="rope_theta",
    share="partial_rotary_factor",
    sections="mrope_section",
    growth=BETA,
    scaling="rope_scaling",
)
# The rotation of the sliding layers of Gemma 3 and others.
OF_SLIDING = RotationEntries(
    base=LOCAL,
    share="sliding_rotary_factor",
    sections="",
    growth="",
    scaling="sliding_rope_scaling",
)
# The two rotations of DeepSeek V4: of the layers that see averages of tokens, and of the sliding
# layers. A `rope_scaling` scales the first one alone.
OF_COMPRESSED = RotationEntries(
    base=COMPRESSED_BASE, share="", sections="", growth="", scaling="rope_scaling"
)
OF_UNCOMPRESSED = RotationEntries(
    base="rope_theta", share="", sections="", growth="", scaling="sliding_rope_scaling"
)
# The entries that have a scaling.
ENTRIES_OF_SCALINGS = ("rope_scaling", "sliding_rope_scaling")
# The names of DeepSeek V4's rotations in `rope_parameters`.
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
# The entries that the object of a rotation may have for the scaling.
NAMES_IN_SCALING = (
    "rope_type factor low_freq_factor high_freq_factor short_factor long_factor beta_fast "
    f"beta_slow truncate mscale mscale_all_dim attention_factor {ORIGINAL}"
).split()
# Anyone may have written a file, so a number of channels in it has a limit.
MOST_CHANNELS = 8192


# --- The rotation of a layer.


def rotation(model_type: ModelType, values: Options, kind: str) -> dict[str, Any]:
    """Returns the keyword arguments of `apply_rotary` for a kind of layers.

    Arguments that are not needed are left out, so that `apply_rotary` uses its defaults.
    """
    names = _entries_of_kind(model_type, kind)
    in_scaling = values[names.scaling] or {}
    rotary_dim = _rotary_dim(values, names.share)
    is_proportional = in_scaling.get("rope_type") == PROPORTIONAL
    rotated_channels = rotary_dim or head_dim(values)
    arguments_of_rotary = {
        # Sliding layers without a base of their own rotate by the base of the full layers.
        "base": values[names.base] or values["rope_theta"],
        "layout": _layout(model_type, values),
        "scaling": scaling(in_scaling, values),
        "pair_axes": _pair_axes(model_type, values["mrope_section"], rotated_channels),
        "partial": PROPORTIONAL if is_proportional and rotary_dim else None,
        "rotary_dim": rotary_dim,
    }
    return {name: value for name, value in arguments_of_rotary.items() if value is not None}


def _entries_of_kind(model_type: ModelType, kind: str) -> RotationEntries:
    """Returns the names of the entries for the rotation of a kind of layers."""
    if COMPRESSED_BASE in model_type.entries:
        return OF_UNCOMPRESSED if kind == SLIDING else OF_COMPRESSED
    return OF_SLIDING if kind == SLIDING and LOCAL in model_type.entries else USUAL


def _layout(model_type: ModelType, values: Options) -> str:
    """Returns the layout: the row names it, or an entry that says whether it is interleaved."""
    is_name_of_entry = model_type.rotary in values
    if not is_name_of_entry:
        return model_type.rotary
    return "interleaved" if values[model_type.rotary] else "half"


def _rotary_dim(values: Options, share: str) -> int | None:
    """Returns the number of a head's channels that rotate, or None if all rotate.

    `share` is the entry that has the share of the channels. The entry rotary_dim goes before it.
    """
    if values["rotary_dim"] is not None or values.get(share) in (None, 1):
        return values["rotary_dim"]
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


def scaling(entries: Options, values: Options) -> rotary_scaling.Scaling | None:
    """Returns the scaling of a rotation.

    Args:
        entries: The entries of the object that config.json has for the scaling.
        values: The values of all entries at the top level of config.json.
    """
    if not entries:
        return None
    rope_type = arguments.choice(
        "rope_scaling: rope_type", entries.get("rope_type"), tuple(SCALINGS)
    )
    # HunYuan has a fixed alpha, so its scaling does not depend on the length of the text.
    has_alpha = bool(entries.get("alpha"))
    scaling_class: Any = rotary_scaling.NTKScaling if has_alpha else SCALINGS[rope_type]
    scales_nothing = rope_type == PROPORTIONAL and entries.get("factor", 1) == 1
    if scaling_class is None or scales_nothing:
        return None
    is_dynamic = rope_type == "dynamic" and not has_alpha
    fields = scaling_class.__dataclass_fields__
    options = dict(entries)
    if is_dynamic or "original_length" in fields:
        options |= _original_length(rope_type, entries, values)
    if is_dynamic or "length" in fields:
        options["length"] = arguments.integer("length", values["length"], at_least=0)
    if is_dynamic:
        options["alpha"] = _dynamic_alpha(options)
    # transformers reads these two entries only if config.json has both.
    if not (options.get("mscale") and options.get("mscale_all_dim")):
        options |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    # The options that are no fields of this class are left out.
    return scaling_class(**{name: options[name] for name in fields if name in options})


def _original_length(rope_type: str, entries: Options, values: Options) -> dict[str, Any]:
    """Returns the length that the model was trained on, as the field `original_length`.

    If the entries of YaRN or LongRoPE have no factor, the result has the field `factor` too: the
    longest length, divided by the trained one.
    """
    longest = values["max_position_embeddings"]
    original_length = values[ORIGINAL] or entries.get(ORIGINAL) or longest
    if rope_type == "dynamic":
        # Dynamic scaling begins beyond the longest length of the model.
        original_length = longest
    original_length = arguments.integer(ORIGINAL, original_length, at_least=1)
    options: dict[str, Any] = {"original_length": original_length}
    if rope_type in ("yarn", "longrope") and "factor" not in entries:
        options["factor"] = (longest or 0) / original_length
    return options


def _dynamic_alpha(options: Options) -> float:
    """Returns the alpha that dynamic NTK scaling has for the current length.

    It is 1 up to the original length, and grows by `factor` for each further original length.
    """
    factor = arguments.positive("factor", options.get("factor"))
    times_longer = max(options["length"] / options["original_length"], 1)
    return factor * times_longer - (factor - 1)


def merged(in_file: Options, settings: Options) -> dict[str, Any]:
    """Returns the entries of a scaling, of which settings override the ones of config.json.

    If settings name another type of scaling, no entry of config.json is kept.
    """
    is_same_type = settings.get("rope_type") in (None, in_file.get("rope_type"))
    return {**in_file, **settings} if is_same_type else {**settings}


# --- Objects for rotations, as entries at the top level.


def without_objects(model_type: ModelType, entries: Options) -> dict[str, Any]:
    """Returns the entries of a config.json or of settings, without objects for rotations.

    What such an object holds is then beside the other entries: {"rope_parameters": {"rope_type":
    "linear", "factor": 2, "rope_theta": 5}} becomes {"rope_theta": 5, "rope_scaling": {"rope_type":
    "linear", "factor": 2}}. So settings can override the entries of config.json, whichever form
    each of the two has.

    As in transformers, an entry inside `rope_parameters` goes before one beside it, and
    `rope_scaling` goes before `rope_parameters`. If an entry inside an object is not known, it is
    named after the object ("rope_scaling: beta").
    """
    result = dict(entries)
    source = "rope_parameters"
    objects: dict[str, Any] = {}
    if source in entries:
        objects = _objects_of_rotations(model_type, source, result.pop(source))
    for rotation_name, names in _rotations(model_type).items():
        scaling_object = result.pop(names.scaling, None)
        has_no_other = names.scaling in entries and rotation_name not in objects
        if scaling_object or has_no_other:
            if rotation_name == COMPRESS:
                scaling_object = _as_compressed(names.scaling, scaling_object)
            result |= _taken_apart(model_type, names, names.scaling, scaling_object)
        elif rotation_name in objects:
            result |= _taken_apart(model_type, names, source, objects[rotation_name])
    return result


def _rotations(model_type: ModelType) -> dict[str, RotationEntries]:
    """Returns the names of the entries for each rotation that a model of this type has.

    The keys are the names that the rotations have in `rope_parameters`. If there is only one
    rotation, it has no name there, and its key is "full_attention".
    """
    if COMPRESSED_BASE in model_type.entries:
        return {MAIN: OF_UNCOMPRESSED, COMPRESS: OF_COMPRESSED}
    if LOCAL in model_type.entries:
        return {FULL: USUAL, SLIDING: OF_SLIDING}
    return {FULL: USUAL}


def _objects_of_rotations(model_type: ModelType, source: str, value: Any) -> dict[str, Any]:
    """Returns the object of each rotation in `rope_parameters`, by the keys of `_rotations`.

    Args:
        model_type: What is known of the model type.
        source: The name of the entry, for errors.
        value: The value of the entry.
    """
    names = [*_rotations(model_type)]
    if len(names) == 1:
        return {FULL: value}
    objects = dict(_object(source, value))
    if COMPRESS in names:
        if MAIN not in objects and COMPRESS not in objects:
            return {COMPRESS: _as_compressed(source, objects)}
        # transformers may leave entries of one object beside the two objects.
        objects = {name: item for name, item in objects.items() if name in names}
        is_right = len(objects) == len(names)
    else:
        # A rotation without an object has the defaults.
        is_right = objects.keys() <= {*names}
    if not is_right:
        want = f"an object with the entries {' and '.join(names)}"
        raise arguments.value_error(source, want, objects)
    return objects


def _as_compressed(source: str, value: Any) -> dict[str, Any]:
    """Returns DeepSeek V4's object for both rotations, as the one of the compressed layers.

    As in transformers, the base is not read inside of it, and YaRN multiplies no cosines by a
    factor unless the object names one.
    """
    entries = dict(_object(source, value))
    without_base = {name: item for name, item in entries.items() if name != "rope_theta"}
    if "yarn" in (entries.get("rope_type"), entries.get("type")):
        without_base.setdefault("attention_factor", 1.0)
    return without_base


def _object(name: str, value: Any) -> Options:
    """Returns an object, which is empty for null."""
    return arguments.instance(name, value, Mapping | None, "an object") or {}


def _taken_apart(
    model_type: ModelType, names: RotationEntries, source: str, value: Any
) -> dict[str, Any]:
    """Returns the entries of the object of one rotation, for the top level.

    These are the base, the share and so on under `names`, an object of the scaling alone, and the
    entries that are not known, named after the object.

    Args:
        model_type: What is known of the model type.
        names: The names that the entries get at the top level.
        source: The name of the object, for errors and for entries that are not known.
        value: The object, or None.
    """
    unread = {key: item for key, item in _object(source, value).items() if item is not None}
    _rename_old(source, unread)
    entries: dict[str, Any] = {}
    # Inside an object, an entry has its usual name: the base of any rotation is "rope_theta".
    for name, usual_name in zip(names, USUAL, strict=True):
        if name and name != names.scaling and usual_name in unread:
            entries[name] = unread.pop(usual_name)
    names_in_scaling = [*NAMES_IN_SCALING, "alpha"] if model_type.has_alpha else NAMES_IN_SCALING
    in_scaling = {key: unread.pop(key) for key in names_in_scaling if key in unread}
    # If the object says only a base or a share, the scaling of another source stays as it is.
    if in_scaling or not entries:
        entries[names.scaling] = in_scaling
    for key, item in unread.items():
        entries[f"{source}: {key}"] = item
    return entries


def _rename_old(source: str, entries: dict[str, Any]) -> None:
    """Gives the entries of a rotation's object the names of today, in place."""
    # The oldest files call the type "type".
    if "type" in entries:
        entries.setdefault("rope_type", entries.pop("type"))
    # Early files of Phi-3 call LongRoPE "su" or "yarn".
    if entries.get("rope_type") in ("su", "yarn") and "short_factor" in entries:
        entries["rope_type"] = "longrope"
    # Phi-MoE has an attention factor for texts up to the trained length, and one for longer texts.
    # `LongRopeScaling` has one for both.
    near = entries.pop("short_mscale", None)
    far = entries.pop("long_mscale", None)
    if near != far:
        want = "equal short_mscale, long_mscale"
        raise arguments.value_error(source, want, (near, far))
    if near is not None:
        entries["attention_factor"] = near
