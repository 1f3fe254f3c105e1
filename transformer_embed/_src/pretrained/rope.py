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
    """The entries of config.json for the rotation of one kind of layers; "": there is none.

    Args:
        base: The entry that has the base.
        share: The entry that has the share of the channels that rotate.
        sections: The entry that has the numbers of pairs of each axis.
        growth: The entry that has the growth of queries.
        scaling: The entry that has the scaling.
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
# The rotation of DeepSeek V4's layers that see averages of tokens, and of its sliding layers. One
# object for both scales the first alone.
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
# The class of each rope_type. Sections for images ("mrope") are not a scaling.
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
# What an object for a rotation may say of its scaling.
NAMES_IN_SCALING = (
    "rope_type factor low_freq_factor high_freq_factor short_factor long_factor beta_fast "
    f"beta_slow truncate mscale mscale_all_dim attention_factor {ORIGINAL}"
).split()
# Anyone may have written a file, so a number of channels in it has a limit.
MOST_CHANNELS = 8192


# --- The rotation of a layer.


def rotation(row: ModelType, values: Options, kind: str) -> dict[str, Any]:
    """Returns the arguments of `apply_rotary` for a kind of layers."""
    names = _entries_of_kind(row, kind)
    in_scaling = values[names.scaling] or {}
    rotary_dim = _rotary_dim(values, names.share)
    is_proportional = in_scaling.get("rope_type") == PROPORTIONAL
    dim = rotary_dim or head_dim(values)
    arguments_of_rotary = {
        # If sliding layers have no base of their own, they have the base of the full ones.
        "base": values[names.base] or values["rope_theta"],
        "layout": _layout(row, values),
        "scaling": scaling(in_scaling, values),
        "pair_axes": _pair_axes(row, values["mrope_section"], dim),
        "partial": PROPORTIONAL if is_proportional and rotary_dim else None,
        "rotary_dim": rotary_dim,
    }
    return {name: value for name, value in arguments_of_rotary.items() if value is not None}


def _entries_of_kind(row: ModelType, kind: str) -> RotationEntries:
    """Returns the entries for the rotation of a kind of layers."""
    if COMPRESSED_BASE in row.entries:
        return OF_UNCOMPRESSED if kind == SLIDING else OF_COMPRESSED
    return OF_SLIDING if kind == SLIDING and LOCAL in row.entries else USUAL


def _layout(row: ModelType, values: Options) -> str:
    """Returns the layout, which an entry may say."""
    if row.rotary not in values:
        return row.rotary
    return "interleaved" if values[row.rotary] else "half"


def _rotary_dim(values: Options, share: str) -> int | None:
    """Returns the number of a head's channels that rotate, or None for all."""
    if values["rotary_dim"] is not None or values.get(share) in (None, 1):
        return values["rotary_dim"]
    channels = head_dim(values) or count("num_attention_heads", None)
    # Rounded down: the share of MiMo V2 Flash is 0.334.
    return arguments.integer(share, int(channels * values[share]), at_most=channels)


def head_dim(values: Options) -> int | None:
    """Returns the number of a head's channels, or None if the entries do not say it."""
    if values["head_dim"] or values["num_attention_heads"] is None:
        return values["head_dim"]
    heads = count("num_attention_heads", values["num_attention_heads"])
    return values["hidden_size"] // heads


def _pair_axes(
    row: ModelType, sections: tuple[int, ...] | None, dim: int | None
) -> tuple[int, ...] | None:
    """Returns the axis that rotates each pair, from the number of pairs that each axis rotates."""
    if sections is None:
        return None
    # The sum is checked first, because memory is taken for each pair.
    sum_of_sections = arguments.integer(
        "mrope_section: its sum", sum(sections), at_most=MOST_CHANNELS
    )
    if row.sections == CONSECUTIVE:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    # The axes take turns. When the turns of an axis have ended, the first axis takes its place.
    # There are as many pairs as the head has.
    pairs = dim // 2 if dim else sum_of_sections
    pair_axes = []
    for pair in range(pairs):
        turn, axis = divmod(pair, len(sections))
        pair_axes.append(axis if turn < sections[axis] else 0)
    return tuple(pair_axes)


# --- Scalings.


def scaling(entries: Options, values: Options) -> rotary_scaling.Scaling | None:
    """Returns the scaling that the entries of an object describe."""
    if not entries:
        return None
    rope_type = arguments.choice(
        "rope_scaling: rope_type", entries.get("rope_type"), tuple(SCALINGS)
    )
    # A fixed alpha, as HunYuan has, leaves nothing dynamic.
    scaling_class: Any = SCALINGS[rope_type]
    if entries.get("alpha"):
        scaling_class = rotary_scaling.NTKScaling
    if scaling_class is None or (rope_type == PROPORTIONAL and entries.get("factor", 1) == 1):
        return None
    is_dynamic = rope_type == "dynamic" and not entries.get("alpha")
    fields = scaling_class.__dataclass_fields__
    options = dict(entries)
    if is_dynamic or "original_length" in fields:
        options |= _original_length(rope_type, entries, values)
    if is_dynamic or "length" in fields:
        options["length"] = arguments.integer("length", values["length"], at_least=0)
    if is_dynamic:
        options["alpha"] = _dynamic_alpha(options)
    # transformers uses these two only if both are given.
    if not (options.get("mscale") and options.get("mscale_all_dim")):
        options |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    return scaling_class(**{name: options[name] for name in fields if name in options})


def _original_length(rope_type: str, entries: Options, values: Options) -> dict[str, Any]:
    """Returns the trained length, and the factor if it follows from the length."""
    longest = values["max_position_embeddings"]
    original = values[ORIGINAL] or entries.get(ORIGINAL) or longest
    if rope_type == "dynamic":
        # Dynamic scaling counts from the model's own length.
        original = longest
    length = arguments.integer(ORIGINAL, original, at_least=1)
    options: dict[str, Any] = {"original_length": length}
    if rope_type in ("yarn", "longrope") and "factor" not in entries:
        options["factor"] = (longest or 0) / length
    return options


def _dynamic_alpha(options: Options) -> float:
    """Returns the alpha of the current length."""
    factor = arguments.positive("factor", options.get("factor"))
    times_longer = max(options["length"] / options["original_length"], 1)
    return factor * times_longer - (factor - 1)


def merged(in_file: Options, settings: Options) -> dict[str, Any]:
    """Returns the entries of a scaling; those of settings go before those of the file.

    A scaling of another type takes none from the file.
    """
    is_same_type = settings.get("rope_type") in (None, in_file.get("rope_type"))
    return {**in_file, **settings} if is_same_type else {**settings}


# --- Objects for rotations, as entries at the top level.


def flat(row: ModelType, entries: Options) -> dict[str, Any]:
    """Returns the entries without objects: what an object holds is at the top level.

    So `settings=` can replace the file's entries whichever form each of the two uses. Within one
    source, as in transformers, entries inside `rope_parameters` take precedence over those beside
    it, and `rope_scaling` over `rope_parameters`. An entry that is not known inside an object is
    named after the object ("rope_scaling: beta").
    """
    result = dict(entries)
    source = "rope_parameters"
    objects: dict[str, Any] = {}
    if source in entries:
        objects = _objects_of_rotations(row, source, result.pop(source))
    for rotation_name, names in _rotations(row).items():
        beside = result.pop(names.scaling, None)
        if beside or (names.scaling in entries and rotation_name not in objects):
            if rotation_name == COMPRESS:
                beside = _as_compressed(names.scaling, beside)
            result |= _taken_apart(row, names, names.scaling, beside)
        elif rotation_name in objects:
            result |= _taken_apart(row, names, source, objects[rotation_name])
    return result


def _rotations(row: ModelType) -> dict[str, RotationEntries]:
    """Returns the entries of each rotation of a type, by its name in `rope_parameters`.

    The only rotation of a type has no name there. It is under "full_attention".
    """
    if COMPRESSED_BASE in row.entries:
        return {MAIN: OF_UNCOMPRESSED, COMPRESS: OF_COMPRESSED}
    if LOCAL in row.entries:
        return {FULL: USUAL, SLIDING: OF_SLIDING}
    return {FULL: USUAL}


def _objects_of_rotations(row: ModelType, source: str, value: Any) -> dict[str, Any]:
    """Returns the object of each rotation, by the names of `_rotations`."""
    names = [*_rotations(row)]
    if len(names) == 1:
        return {FULL: value}
    objects = _object(source, value)
    if COMPRESS in names:
        if not {MAIN, COMPRESS} & objects.keys():
            return {COMPRESS: _as_compressed(source, objects)}
        # transformers may leave entries of one object beside the two.
        objects = {name: item for name, item in objects.items() if name in names}
    unnamed = objects.keys() - {*names}
    if unnamed or (COMPRESS in names and len(objects) < len(names)):
        want = f"an object with the entries {' and '.join(names)}"
        raise arguments.value_error(source, want, objects)
    return {**objects}


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


def _taken_apart(row: ModelType, names: RotationEntries, source: str, value: Any) -> dict[str, Any]:
    """Returns the base and the like of an object, its scaling, and what is not known in it."""
    rest = {key: item for key, item in _object(source, value).items() if item is not None}
    _rename_old(source, rest)
    entries = {}
    # An object names its base and so on as full layers do.
    for name, inside in zip(names, USUAL, strict=True):
        if name and name != names.scaling and inside in rest:
            entries[name] = rest.pop(inside)
    allowed = [*NAMES_IN_SCALING, "alpha"] if row.has_alpha else NAMES_IN_SCALING
    in_scaling = {key: rest.pop(key) for key in allowed if key in rest}
    # A base or a share alone leaves the scaling of another source as it is.
    if in_scaling or not entries:
        entries[names.scaling] = in_scaling
    return entries | {f"{source}: {key}": item for key, item in rest.items()}


def _rename_old(source: str, inside: dict[str, Any]) -> None:
    """Gives the entries of an object the names of today."""
    # The oldest files call the type "type".
    if "type" in inside:
        inside.setdefault("rope_type", inside.pop("type"))
    # Early files of Phi-3 call LongRoPE su, or yarn.
    if inside.get("rope_type") in ("su", "yarn") and "short_factor" in inside:
        inside["rope_type"] = "longrope"
    # Phi-MoE has an attention factor up to the trained length, and one beyond it.
    near = inside.pop("short_mscale", None)
    far = inside.pop("long_mscale", None)
    if near != far:
        want = "equal short_mscale, long_mscale"
        raise arguments.value_error(source, want, (near, far))
    if near is not None:
        inside["attention_factor"] = near
