"""The entries of config.json for rotary embeddings, as arguments of `apply_rotary`."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_embed._src import arguments
from transformer_embed._src.functional import rotary_scaling
from transformer_embed._src.functional.rotary import apply_rotary
from transformer_embed._src.pretrained import messages

FULL, SLIDING = "full_attention", "sliding_attention"
# The entries of each kind of layer in the old form: base, share of the channels, and scaling.
LAYERS = {
    FULL: ("rope_theta", "partial_rotary_factor", "rope_scaling"),
    SLIDING: ("rope_local_base_freq", "sliding_rotary_factor", "sliding_rope_scaling"),
}
# What the old form has beside the scaling.
TOP = ("rope_theta", "partial_rotary_factor")
ORIGINAL = "original_max_position_embeddings"
PROPORTIONAL = "proportional"
# By the entry rope_type.
SCALINGS = {
    "default": None,
    "linear": rotary_scaling.LinearScaling,
    "dynamic": rotary_scaling.DynamicNTKScaling,
    "yarn": rotary_scaling.YarnScaling,
    "llama3": rotary_scaling.Llama3Scaling,
    "longrope": rotary_scaling.LongRopeScaling,
    "su": rotary_scaling.LongRopeScaling,
    PROPORTIONAL: rotary_scaling.LinearScaling,
    # Sections for images are not a scaling.
    "mrope": None,
}
# Entries that config.json must say if the scaling has such an argument.
NEEDED = ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")
NAMES = (
    *NEEDED,
    *("rope_type", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("attention_factor", ORIGINAL, "mrope_section"),
)
MOST_CHANNELS = 8192
# Wider than published heads: the frequencies of a narrower one lie between those of a wider one.
WIDE_HEAD = 256


def check(options: Mapping[str, Any], head_dim: int | None = None) -> None:
    """Raises as `apply_rotary` does for heads of this size.

    None: a size that the arguments allow.
    """
    sections = options.get("sections")
    if head_dim is None:
        factors = getattr(options.get("scaling"), "short_factor", ())
        pairs = len(factors) or sum(sections or ())
        head_dim = 2 * max(pairs, 0) or max(WIDE_HEAD, options.get("rotary_dim") or 0)
    # The time to trace a rotation grows with this number.
    arguments.integer("head_dim", head_dim, at_least=1, at_most=MOST_CHANNELS)
    axes = () if sections is None else (len(sections),)
    heads = jax.ShapeDtypeStruct((1, 1, head_dim), jnp.float32)
    positions = jax.ShapeDtypeStruct((1, *axes), jnp.int32)
    jax.eval_shape(lambda x, positions: apply_rotary(x, positions, **options), heads, positions)


def by_layer(rotary: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any] | None]:
    """The arguments for each kind of layer (None: not rotated); "" if there is one kind."""
    kinds = [isinstance(options, Mapping) for options in rotary.values() if options is not None]
    differs = bool(kinds) and all(kinds)
    return rotary if differs or not rotary else {"": rotary}


def scaling(
    entries: Mapping[str, Any], max_len: int | None, original: int | None
) -> rotary_scaling.Scaling | None:
    """The scaling that entries of `rope_scaling` describe.

    The model has `max_len` positions and was first trained on `original` (None: as the entries
    say).
    """
    if not entries:
        return None
    if "rope_type" not in entries:
        want = f"an entry rope_type, one of {', '.join(SCALINGS)}"
        raise arguments.value_error("rope_scaling", want, f"only {list(entries)}")
    kind = arguments.choice("rope_type", entries["rope_type"], tuple(SCALINGS))
    made = SCALINGS[kind]
    if made is None or (kind == PROPORTIONAL and entries.get("factor", 1) == 1):
        return None
    values = dict(entries)
    taken = inspect.signature(made).parameters
    if "original_length" in taken:
        # Dynamic scaling counts from the model's own length.
        length = max_len if kind == "dynamic" else original or entries.get(ORIGINAL) or max_len
        has_default = kind in ("yarn", "longrope", "su")
        if length is None or (max_len is None and has_default and "factor" not in entries):
            want = "an entry max_position_embeddings beside it"
            raise arguments.value_error("rope_scaling", want, "none")
        length = arguments.integer(ORIGINAL, length, at_least=1)
        # Factors are chosen for the trained length; replace `length` for longer ones.
        values |= {"original_length": length, "length": length}
        if has_default:
            values.setdefault("factor", (max_len or 0) / length)
    if not (values.get("mscale") and values.get("mscale_all_dim")):
        # The transformers library uses these two only if both are given.
        values |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    for name in NEEDED:
        if name in taken and name not in values:
            want = f"an entry {name} for the rope_type {kind!r}"
            raise arguments.value_error("rope_scaling", want, "none")
    return made(**{name: values[name] for name in taken if name in values})


def to_old_form(
    entries: Mapping[str, Any], *, is_file: bool, by_layer: bool = False
) -> dict[str, Any]:
    """Entries in the old form, with those of `rope_parameters` at the top level.

    So `settings=` can replace the file's whichever form each uses. Within one source, entries
    inside `rope_parameters` take precedence over those beside it, and `rope_scaling` over
    `rope_parameters`, as in the transformers library. With `by_layer`, `rope_parameters` has the
    entries of each kind of layer, and `rope_scaling` is for full layers.
    """
    others = dict(entries)
    scaling, parameters = others.pop("rope_scaling", None), others.pop("rope_parameters", None)
    layers = {}
    if by_layer and parameters is not None:
        if not isinstance(parameters, Mapping) or not parameters or set(parameters) - set(LAYERS):
            want = f"an object with the entries {FULL} and {SLIDING}"
            raise arguments.value_error("rope_parameters", want, messages.short_repr(parameters))
        layers = {layer: (f"rope_parameters: {layer}", parameters[layer]) for layer in parameters}
    elif "rope_parameters" in entries:
        layers = {FULL: ("rope_parameters", parameters)}
    if scaling or ("rope_scaling" in entries and FULL not in layers):
        layers[FULL] = ("rope_scaling", scaling)
    for layer, (name, value) in layers.items():
        moved, parts = split_entries(name, value, is_file=is_file)
        *old_names, old_scaling = LAYERS[layer]
        # A base or a share alone leaves the scaling of another source as it is.
        if parts or not moved:
            others[old_scaling] = parts
        others |= {old: moved[new] for old, new in zip(old_names, TOP, strict=True) if new in moved}
    length = (others.get("rope_scaling") or {}).get(ORIGINAL)
    if length is not None and not is_file:
        others.setdefault(ORIGINAL, length)
    return others


def split_entries(name: str, value: Any, *, is_file: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries that the old form has at the top level, and those of a scaling.

    Other entries of a file are ignored.
    """
    if value is None:
        return {}, {}
    if not isinstance(value, Mapping):
        raise arguments.value_error(name, "an object", messages.short_repr(value))
    if any(isinstance(value.get(layer), Mapping) for layer in LAYERS):
        raise arguments.value_error(name, "one rotation for all layers", messages.short_repr(value))
    scaling = {key: item for key, item in value.items() if item is not None}
    # The oldest files call the type "type".
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    # Early files of Phi-3 call LongRoPE yarn.
    if scaling.get("rope_type") == "yarn" and "short_factor" in scaling:
        scaling["rope_type"] = "longrope"
    # Phi-MoE's attention factor, up to the trained length and beyond it.
    near, far = scaling.pop("short_mscale", None), scaling.pop("long_mscale", None)
    if near != far:
        want = "short_mscale and long_mscale alike"
        raise arguments.value_error(name, want, messages.short_repr((near, far)))
    if near is not None:
        scaling["attention_factor"] = near
    moved = {key: scaling.pop(key) for key in TOP if key in scaling}
    unknown = [key for key in scaling if key not in NAMES]
    if unknown and not is_file:
        want = f"entries among {', '.join(NAMES)}"
        raise arguments.value_error(name, want, messages.short_repr(unknown[0]))
    return moved, {key: item for key, item in scaling.items() if key in NAMES}
