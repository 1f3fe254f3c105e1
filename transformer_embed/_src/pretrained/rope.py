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
ORIGINAL = "original_max_position_embeddings"
TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su")
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


def by_layer(rotary: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The arguments of `apply_rotary` for each kind of layer; "" if there is one kind."""
    differ = all(isinstance(options, Mapping) for options in rotary.values())
    return rotary if differ else {"": rotary}


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
        if kind == "default":
            return None
        if kind == "linear":
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


def to_old_form(entries: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
    """Entries in the old form: `rope_theta`, `partial_rotary_factor` and `rope_scaling` instead of
    `rope_parameters`.

    Within one source, entries inside `rope_parameters` take precedence over those beside it, and
    `rope_scaling` over `rope_parameters`, as in the transformers library.
    """
    given = [name for name in ("rope_scaling", "rope_parameters") if name in entries]
    others = {name: value for name, value in entries.items() if name not in given}
    if not given:
        return others
    name = next((name for name in given if entries[name]), given[0])
    moved, scaling = split_entries(name, entries[name], is_file=is_file)
    return others | moved | {"rope_scaling": scaling}


def to_old_form_by_layer(entries: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
    """Like `to_old_form`, for models whose layers differ: `rope_scaling` is for full layers,
    `sliding_rope_scaling` for the others."""
    found = dict(entries)
    parameters = found.pop("rope_parameters", None)
    scaling = found.pop("rope_scaling", None)
    if parameters is not None:
        known = isinstance(parameters, Mapping) and set(parameters) <= {FULL, SLIDING}
        if not known or not parameters:
            want = f"an object with the entries {FULL} and {SLIDING}"
            got = schema.short_repr(parameters)
            raise arguments.value_error("rope_parameters", want, got)
        for layer, theta, key in (
            (FULL, "rope_theta", "rope_scaling"),
            (SLIDING, "rope_local_base_freq", "sliding_rope_scaling"),
        ):
            if layer in parameters:
                name = f"rope_parameters: {layer}"
                moved, found[key] = split_entries(name, parameters[layer], is_file=is_file)
                if "rope_theta" in moved:
                    found[theta] = moved.pop("rope_theta")
                if moved and not is_file:
                    want = "no entry partial_rotary_factor"
                    raise arguments.value_error(name, want, moved)
    if scaling is not None or ("rope_scaling" in entries and "rope_scaling" not in found):
        _, found["rope_scaling"] = split_entries("rope_scaling", scaling, is_file=is_file)
    return found


def split_entries(name: str, value: Any, *, is_file: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries that the old form has at the top level, and those of a scaling; other entries of
    a file are ignored."""
    if value is None:
        return {}, {}
    if not isinstance(value, Mapping):
        raise arguments.value_error(name, "an object", schema.short_repr(value))
    scaling = {key: item for key, item in value.items() if item is not None}
    # The oldest files call the type "type".
    kind = scaling.pop("type", None)
    if kind is not None:
        scaling.setdefault("rope_type", kind)
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
