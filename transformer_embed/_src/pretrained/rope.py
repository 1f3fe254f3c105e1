"""The entries of config.json for rotary embeddings, as arguments of `apply_rotary`."""

from collections.abc import Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.positions import rotary_scaling
from transformer_embed._src.pretrained.architecture import (
    FULL,
    SLIDING,
    Architecture,
    Options,
    count,
)

BETA = "llama_4_scaling_beta"
LOCAL = "rope_local_base_freq"
# For each kind of layer, the entries of config.json that have its base, its share of the channels
# that rotate, its sections, the growth of its queries and its scaling. Sliding layers have no
# sections.
LAYERS = {
    FULL: ("rope_theta", "partial_rotary_factor", "mrope_section", BETA, "rope_scaling"),
    SLIDING: (LOCAL, "sliding_rotary_factor", "sliding_rope_scaling"),
}
ORIGINAL = "original_max_position_embeddings"
PROPORTIONAL = "proportional"
# By the entry rope_type.
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
    # Sections for images are not a scaling.
    "mrope": None,
}
NAMES = (
    "rope_type factor low_freq_factor high_freq_factor short_factor long_factor beta_fast "
    f"beta_slow truncate mscale mscale_all_dim attention_factor {ORIGINAL}"
)
CONSECUTIVE, IN_TURNS = "consecutive", "in turns"
# Of a file that anyone may have written.
MOST_CHANNELS = 8192


def rotation(kind: Architecture, value: Options, layer_type: str) -> dict[str, Any]:
    """The arguments of `apply_rotary` for a kind of layer."""
    is_local = layer_type == SLIDING and LOCAL in kind.entries
    base, share, *_, scaling_name = LAYERS[SLIDING if is_local else FULL]
    entries = value[scaling_name] or {}
    layout = kind.rotary
    if layout in value:
        layout = "interleaved" if value[layout] else "half"
    is_proportional = entries.get("rope_type") == PROPORTIONAL
    rotary_dim = _rotary_dim(value, share)
    dim = rotary_dim or _head_dim(value)
    options = {
        # A base that sliding layers do not have is the full ones'.
        "base": value[base] or value["rope_theta"],
        "layout": layout,
        "scaling": scaling(entries, value),
        "pair_axes": _pair_axes(kind, value["mrope_section"], dim),
        "partial": PROPORTIONAL if is_proportional and rotary_dim else None,
        "rotary_dim": rotary_dim,
    }
    return {name: option for name, option in options.items() if option is not None}


def _rotary_dim(value: Options, share: str) -> int | None:
    """The number of a head's channels that rotate; None: all."""
    if value["rotary_dim"] is not None or value[share] in (None, 1):
        return value["rotary_dim"]
    head_dim = _head_dim(value) or count("num_attention_heads", None)
    # Rounded down: the share of MiMo V2 Flash is 0.334.
    return arguments.integer(share, int(head_dim * value[share]), at_most=head_dim)


def _head_dim(value: Options) -> int | None:
    """The number of a head's channels; None: not said."""
    if value["head_dim"] or value["num_attention_heads"] is None:
        return value["head_dim"]
    return value["hidden_size"] // count("num_attention_heads", value["num_attention_heads"])


def _pair_axes(
    kind: Architecture, sections: tuple[int, ...] | None, dim: int | None
) -> tuple[int, ...] | None:
    """The axis that rotates each pair, where each axis rotates a number of pairs."""
    if sections is None:
        return None
    # All of them, since memory is taken for each pair.
    pairs = arguments.integer("mrope_section: its sum", sum(sections), at_most=MOST_CHANNELS)
    if kind.sections == CONSECUTIVE:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    # Those that are left when the turns of an axis have ended are the first axis's. There are as
    # many pairs as the head has.
    turns = (divmod(pair, len(sections)) for pair in range(dim // 2 if dim else pairs))
    return tuple(axis if turn < sections[axis] else 0 for turn, axis in turns)


def scaling(entries: Options, value: Options) -> rotary_scaling.Scaling | None:
    """The scaling that entries of `rope_scaling` describe."""
    if not entries:
        return None
    kind = arguments.choice("rope_scaling: rope_type", entries.get("rope_type"), tuple(SCALINGS))
    made: Any = rotary_scaling.NTKScaling if entries.get("alpha") else SCALINGS[kind]
    if made is None or (kind == PROPORTIONAL and entries.get("factor", 1) == 1):
        return None
    values = dict(entries)
    fields = made.__dataclass_fields__
    # A fixed alpha, as HunYuan has, leaves nothing dynamic.
    is_dynamic = kind == "dynamic" and not entries.get("alpha")
    if is_dynamic or "original_length" in fields:
        longest = value["max_position_embeddings"]
        original = value[ORIGINAL] or entries.get(ORIGINAL) or longest
        # Dynamic scaling counts from the model's own length.
        original = longest if kind == "dynamic" else original
        values["original_length"] = arguments.integer(ORIGINAL, original, at_least=1)
        if kind in ("yarn", "longrope"):
            values.setdefault("factor", (longest or 0) / values["original_length"])
    if is_dynamic or "length" in fields:
        values["length"] = arguments.integer("length", value["length"], at_least=0)
    if is_dynamic:
        factor = arguments.positive("factor", values.get("factor"))
        longer = max(values["length"] / values["original_length"], 1)
        values["alpha"] = factor * longer - (factor - 1)
    if not (values.get("mscale") and values.get("mscale_all_dim")):
        # The transformers library uses these two only if both are given.
        values |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    return made(**{name: values[name] for name in fields if name in values})


def flat(kind: Architecture, entries: Options) -> dict[str, Any]:
    """Entries without objects: what these hold is at the top level, named as in `LAYERS`.

    So `settings=` can replace the file's whichever form each uses. Within one source, entries
    inside `rope_parameters` take precedence over those beside it, and `rope_scaling` over
    `rope_parameters`, as in the transformers library. What means nothing inside an object is named
    after the object.
    """
    result, source = dict(entries), "rope_parameters"
    objects = {FULL: result.pop(source)} if source in entries else {}
    if objects and LOCAL in kind.entries:
        # Sliding layers have a base of their own, and each kind of layer an object.
        objects = _object(source, objects[FULL])
        if objects.keys() - LAYERS:
            want = f"an object with the entries {FULL} and {SLIDING}"
            raise arguments.value_error(source, want, objects)
    for layer, (*_, scaling) in LAYERS.items():
        beside = result.pop(scaling, None)
        if beside or (scaling in entries and layer not in objects):
            result |= _apart(kind, layer, scaling, _object(scaling, beside))
        elif layer in objects:
            result |= _apart(kind, layer, source, _object(source, objects[layer]))
    return result


def _object(name: str, value: Any) -> Options:
    """An object, empty for null."""
    return arguments.instance(name, value, Mapping | None, "an object") or {}


def _apart(kind: Architecture, layer: str, source: str, value: Options) -> dict[str, Any]:
    """The base and the like of an object, its scaling, and what is not known in it."""
    *names, scaling = LAYERS[layer]
    unread = {key: item for key, item in value.items() if item is not None}
    _rename_old(source, unread)
    # An object names its base and share as full layers do.
    pairs = zip(names, LAYERS[FULL], strict=False)
    entries = {name: unread.pop(full) for name, full in pairs if full in unread}
    fields = [*NAMES.split(), *["alpha"] * kind.has_alpha]
    inside = {key: unread.pop(key) for key in fields if key in unread}
    # A base or a share alone leaves the scaling of another source as it is.
    if inside or not entries:
        entries[scaling] = inside
    return entries | {f"{source}: {key}": item for key, item in unread.items()}


def merged(in_file: Options, settings: Options) -> dict[str, Any]:
    """The entries of a scaling, those of settings first; another type has none of the file's."""
    is_same = settings.get("rope_type") in (None, in_file.get("rope_type"))
    return {**in_file, **settings} if is_same else {**settings}


def _rename_old(source: str, inside: dict[str, Any]) -> None:
    """Gives the entries of an object the names of today."""
    # The oldest files call the type "type".
    if "type" in inside:
        inside.setdefault("rope_type", inside.pop("type"))
    # Early files of Phi-3 call LongRoPE su, or yarn.
    if inside.get("rope_type") in ("su", "yarn") and "short_factor" in inside:
        inside["rope_type"] = "longrope"
    # Phi-MoE's attention factor, up to the trained length and beyond it.
    near, far = inside.pop("short_mscale", None), inside.pop("long_mscale", None)
    if near != far:
        want = "equal short_mscale, long_mscale"
        raise arguments.value_error(source, want, (near, far))
    if near is not None:
        inside["attention_factor"] = near
