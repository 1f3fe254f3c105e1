"""The entries of config.json for rotary embeddings, in the old and the new form, as arguments of
`apply_rotary`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_embed._src import arguments
from transformer_embed._src.functional import rotary_scaling
from transformer_embed._src.functional.rotary import apply_rotary
from transformer_embed._src.pretrained import schema
from transformer_embed._src.pretrained.schema import Count

FULL, SLIDING = "full_attention", "sliding_attention"
# The entries of each kind of layer in the old form: base, share of the channels, and scaling.
LAYERS = {
    FULL: ("rope_theta", "partial_rotary_factor", "rope_scaling"),
    SLIDING: ("rope_local_base_freq", "sliding_rotary_factor", "sliding_rope_scaling"),
}
ORIGINAL = "original_max_position_embeddings"
PROPORTIONAL = "proportional"
TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su", PROPORTIONAL)
MOST_CHANNELS = 2 * schema.MOST[float]
# Wider than published heads: the frequencies of a narrower one lie between those of a wider one.
WIDE_HEAD = 256


def check(options: Mapping[str, Any], head_dim: int | None = None) -> None:
    """Raises as `apply_rotary` does for heads of this size; None: a size that the arguments
    allow."""
    if head_dim is None:
        factors = getattr(options.get("scaling"), "short_factor", ())
        pairs = len(factors) or sum(options.get("sections") or ())
        head_dim = 2 * max(pairs, 0) or max(WIDE_HEAD, options.get("rotary_dim") or 0)
    # The time to trace a rotation grows with this number.
    arguments.integer("head_dim", head_dim, at_least=1, at_most=MOST_CHANNELS)
    axes = () if options.get("sections") is None else (len(options["sections"]),)
    heads = jax.ShapeDtypeStruct((1, 1, head_dim), jnp.float32)
    positions = jax.ShapeDtypeStruct((1, *axes), jnp.int32)
    jax.eval_shape(lambda x, positions: apply_rotary(x, positions, **options), heads, positions)


def by_layer(rotary: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any] | None]:
    """The arguments of `apply_rotary` for each kind of layer (None: not rotated); "" if there is
    one kind."""
    return rotary if differs_by_layer(rotary) or not rotary else {"": rotary}


def differs_by_layer(rotary: Mapping[str, Any]) -> bool:
    """Whether the values are the arguments of each kind of layer, or None for no rotation."""
    kinds = [isinstance(options, Mapping) for options in rotary.values() if options is not None]
    return bool(kinds) and all(kinds)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The entries of `rope_scaling`, or of the new `rope_parameters` without those that the old
    form has at the top level."""

    rope_type: str | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    original_max_position_embeddings: Count | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.rope_type is None and (given := list(self.given())):
            want = f"an entry rope_type, one of {', '.join(TYPES)}"
            raise arguments.value_error("rope_scaling", want, f"only {given}")
        arguments.choice("rope_type", self.rope_type or "default", TYPES)

    def given(self) -> dict[str, Any]:
        """The entries that are not null."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def scaling(
        self, max_len: int | None, original: int | None = None
    ) -> rotary_scaling.Scaling | None:
        """The scaling for a model of `max_len` positions, first trained on `original` positions
        (None: as the entries say)."""
        kind = self.rope_type or "default"
        if kind == "default" or (kind == PROPORTIONAL and self.factor in (None, 1)):
            return None
        if kind in ("linear", PROPORTIONAL):
            return rotary_scaling.LinearScaling(self._required("factor"))
        # Dynamic scaling counts from the model's own length.
        length: Any = max_len
        if kind != "dynamic":
            length = original or self.original_max_position_embeddings or max_len
        needs_factor = kind in ("yarn", "longrope", "su") and self.factor is None
        if length is None or (needs_factor and max_len is None):
            want = "an entry max_position_embeddings beside it"
            raise arguments.value_error("rope_scaling", want, "none")
        factor: Any = (max_len or 0) / length if needs_factor else self.factor
        if kind == "dynamic":
            return rotary_scaling.DynamicNTKScaling(self._required("factor"), length, length)
        if kind == "llama3":
            low, high = self._required("low_freq_factor"), self._required("high_freq_factor")
            return rotary_scaling.Llama3Scaling(self._required("factor"), low, high, length)
        if kind == "yarn":
            names = ["beta_fast", "beta_slow", "truncate", "attention_factor"]
            # The transformers library uses these two only if both are given.
            names += ["mscale", "mscale_all_dim"] if self.mscale and self.mscale_all_dim else []
            given = {name: value for name, value in self.given().items() if name in names}
            return rotary_scaling.YarnScaling(factor, length, **given)
        # For lengths up to the trained one; replace `length` for longer ones.
        return rotary_scaling.LongRopeScaling(
            self._required("short_factor"),
            self._required("long_factor"),
            factor,
            original_length=length,
            length=length,
            attention_factor=self.attention_factor,
        )

    def _required(self, name: str) -> Any:
        """An entry that this type of scaling needs."""
        if getattr(self, name) is None:
            want = f"an entry {name} for the rope_type {self.rope_type!r}"
            raise arguments.value_error("rope_scaling", want, "none")
        return getattr(self, name)


NAMES = [field.name for field in dataclasses.fields(RopeScaling)]


def to_old_form(
    entries: Mapping[str, Any], *, is_file: bool, by_layer: bool = False
) -> dict[str, Any]:
    """Entries in the old form: `rope_theta`, `partial_rotary_factor` and `rope_scaling` instead of
    `rope_parameters`, so that `settings=` can replace the file's whichever form each uses.

    Within one source, entries inside `rope_parameters` take precedence over those beside it, and
    `rope_scaling` over `rope_parameters`, as in the transformers library. With `by_layer`,
    `rope_parameters` has the entries of each kind of layer, and `rope_scaling` is for full layers.
    """
    given = {name: entries[name] for name in ("rope_scaling", "rope_parameters") if name in entries}
    others = {name: value for name, value in entries.items() if name not in given}
    if by_layer:
        others |= _by_layer(given.pop("rope_parameters", None), is_file=is_file)
        if given.get("rope_scaling") is None and "rope_scaling" in others:
            return others
    if given:
        name = next((name for name in given if given[name]), next(iter(given)))
        moved, scaling = split_entries(name, given[name], is_file=is_file)
        others |= moved | {"rope_scaling": scaling}
        if not is_file and scaling.get(ORIGINAL) is not None:
            others.setdefault(ORIGINAL, scaling[ORIGINAL])
    return others


def _by_layer(parameters: Any, *, is_file: bool) -> dict[str, Any]:
    """The entries of each kind of layer, under their names in the old form."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping) or not parameters or set(parameters) - set(LAYERS):
        want = f"an object with the entries {FULL} and {SLIDING}"
        raise arguments.value_error("rope_parameters", want, schema.short_repr(parameters))
    found: dict[str, Any] = {}
    for layer, entries in parameters.items():
        theta, share, scaling = LAYERS[layer]
        name = f"rope_parameters: {layer}"
        moved, found[scaling] = split_entries(name, entries, is_file=is_file)
        old_names = {"rope_theta": theta, "partial_rotary_factor": share}
        found |= {old_names[key]: value for key, value in moved.items()}
    return found


def split_entries(name: str, value: Any, *, is_file: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries that the old form has at the top level, and those of a scaling; other entries of
    a file are ignored."""
    if value is None:
        return {}, {}
    if not isinstance(value, Mapping):
        raise arguments.value_error(name, "an object", schema.short_repr(value))
    if any(isinstance(value.get(layer), Mapping) for layer in LAYERS):
        raise arguments.value_error(name, "one rotation for all layers", schema.short_repr(value))
    scaling = {key: item for key, item in value.items() if item is not None}
    # The oldest files call the type "type".
    kind = scaling.pop("type", None)
    if kind is not None:
        scaling.setdefault("rope_type", kind)
    # Early files of Phi-3 call LongRoPE yarn.
    if scaling.get("rope_type") == "yarn" and "short_factor" in scaling:
        scaling["rope_type"] = "longrope"
    # Phi-MoE's attention factor, up to the trained length and beyond it.
    near, far = scaling.pop("short_mscale", None), scaling.pop("long_mscale", None)
    if near != far:
        want = "short_mscale and long_mscale alike"
        raise arguments.value_error(name, want, schema.short_repr((near, far)))
    if near is not None:
        scaling["attention_factor"] = near
    top = ("rope_theta", "partial_rotary_factor")
    moved = {key: scaling.pop(key) for key in top if key in scaling}
    if not is_file:
        if unknown := [key for key in scaling if key not in NAMES]:
            want = f"entries among {', '.join(NAMES)}"
            raise arguments.value_error(name, want, schema.short_repr(unknown[0]))
        if "rope_type" not in scaling:
            want = "an entry rope_type ('default': no scaling)"
            got = f"only {schema.short_repr([*moved, *scaling])}"
            raise arguments.value_error(name, want, got)
    return moved, {key: item for key, item in scaling.items() if key in NAMES}
