"""The entries of config.json for rotary embeddings, in the old and the new form, as arguments of
`apply_rotary`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.functional import rotary_scaling
from transformer_embed._src.functional.rotary import LAYOUTS, PARTIAL
from transformer_embed._src.pretrained import schema

FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The keyword arguments of `apply_rotary`, as a file holds them."""

    base: float = 10_000.0
    layout: str = "half"
    rotary_dim: int | None = None
    partial: str = "first"
    scaling: rotary_scaling.Scaling | None = None
    sections: tuple[int, ...] | None = None

    def __post_init__(self):
        arguments.real("base", self.base, above=0)
        arguments.choice("layout", self.layout, LAYOUTS)
        arguments.choice("partial", self.partial, PARTIAL)
        if self.rotary_dim is not None:
            rotary_dim(self.rotary_dim)


def rotary_dim(value: int) -> int:
    """How many channels of a head are rotated: an even number."""
    if arguments.integer("rotary_dim", value, at_least=2) % 2:
        raise ValueError(arguments.wanted("rotary_dim", "an even int", value))
    return value


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
    original_max_position_embeddings: int | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.rope_type is None and (
            given := [name for name in self._names() if getattr(self, name) is not None]
        ):
            raise ValueError(
                arguments.wanted(
                    "rope_scaling",
                    f"an entry rope_type, one of {', '.join(SCALINGS)}",
                    f"only {given}",
                )
            )
        arguments.choice("rope_type", self.rope_type or "default", tuple(SCALINGS))

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    def scaling(
        self, max_len: int | None, original: int | None = None
    ) -> rotary_scaling.Scaling | None:
        """The scaling for a model of `max_len` positions, first trained on `original` positions
        (None: as the entries say)."""
        make = SCALINGS[self.rope_type or "default"]
        return (
            None
            if make is None
            else make(
                self,
                max_len,
                self.original_max_position_embeddings if original is None else original,
            )
        )

    def get(self, name: str) -> Any:
        """An entry that this type of scaling needs."""
        if getattr(self, name) is None:
            raise ValueError(
                arguments.wanted(
                    "rope_scaling", f"an entry {name} for the rope_type {self.rope_type!r}", "none"
                )
            )
        return getattr(self, name)


def _linear(
    entries: RopeScaling, max_len: int | None, original: int | None
) -> rotary_scaling.LinearScaling:
    return rotary_scaling.LinearScaling(entries.get("factor"))


def _dynamic(
    entries: RopeScaling, max_len: int | None, original: int | None
) -> rotary_scaling.DynamicNTKScaling:
    length = _required_max_len(max_len)
    return rotary_scaling.DynamicNTKScaling(
        entries.get("factor"), original_length=length, length=length
    )


def _yarn(
    entries: RopeScaling, max_len: int | None, original: int | None
) -> rotary_scaling.YarnScaling:
    original = _required_max_len(max_len) if original is None else _at_least_one(ORIGINAL, original)
    names = ("beta_fast", "beta_slow", "truncate", "attention_factor")
    # The transformers library uses these two only if both are given.
    pair = ("mscale", "mscale_all_dim") if entries.mscale and entries.mscale_all_dim else ()
    given = {
        name: getattr(entries, name)
        for name in (*names, *pair)
        if getattr(entries, name) is not None
    }
    return rotary_scaling.YarnScaling(
        _context_factor(entries, max_len, original), original, **given
    )


def _llama3(
    entries: RopeScaling, max_len: int | None, original: int | None
) -> rotary_scaling.Llama3Scaling:
    factors = (entries.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return rotary_scaling.Llama3Scaling(
        *factors, original_length=_required_max_len(max_len) if original is None else original
    )


def _longrope(
    entries: RopeScaling, max_len: int | None, original: int | None
) -> rotary_scaling.LongRopeScaling:
    """For lengths up to the trained one; replace `length` for longer ones."""
    original = _required_max_len(max_len) if original is None else _at_least_one(ORIGINAL, original)
    return rotary_scaling.LongRopeScaling(
        entries.get("short_factor"),
        entries.get("long_factor"),
        _context_factor(entries, max_len, original),
        original_length=original,
        length=original,
        attention_factor=entries.attention_factor,
    )


def _context_factor(entries: RopeScaling, max_len: int | None, original: int) -> float:
    return _required_max_len(max_len) / original if entries.factor is None else entries.factor


def _required_max_len(max_len: int | None) -> int:
    if max_len is None:
        raise ValueError(
            arguments.wanted("rope_scaling", "an entry max_position_embeddings beside it", "none")
        )
    return _at_least_one("max_position_embeddings", max_len)


def _at_least_one(name: str, value: int) -> int:
    return arguments.integer(name, value, at_least=1)


SCALINGS = {
    "default": None,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
}


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


def by_layer(entries: Mapping[str, Any], *, is_file: bool) -> dict[str, Any]:
    """Like `to_old_form`, for models whose layers differ: `rope_scaling` is for full layers,
    `sliding_rope_scaling` for the others."""
    found = {
        name: value
        for name, value in entries.items()
        if name not in ("rope_scaling", "rope_parameters")
    }
    parameters = entries.get("rope_parameters")
    if parameters is not None:
        if (
            not isinstance(parameters, Mapping)
            or not parameters
            or not set(parameters) <= {FULL, SLIDING}
        ):
            raise ValueError(
                arguments.wanted(
                    "rope_parameters",
                    f"an object with the entries {FULL} and {SLIDING}",
                    schema.short_repr(parameters),
                )
            )
        for layer, theta, scaling in (
            (FULL, "rope_theta", "rope_scaling"),
            (SLIDING, "rope_local_base_freq", "sliding_rope_scaling"),
        ):
            if layer in parameters:
                moved, found[scaling] = split_entries(
                    f"rope_parameters: {layer}", parameters[layer], is_file=is_file
                )
                found |= {theta: moved.pop("rope_theta")} if "rope_theta" in moved else {}
                if moved and not is_file:
                    raise ValueError(
                        arguments.wanted(
                            f"rope_parameters: {layer}", "no entry partial_rotary_factor", moved
                        )
                    )
    if "rope_scaling" in entries and (
        entries["rope_scaling"] is not None or "rope_scaling" not in found
    ):
        found["rope_scaling"] = split_entries(
            "rope_scaling", entries["rope_scaling"], is_file=is_file
        )[1]
    return found


def split_entries(name: str, value: Any, *, is_file: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries that the old form has at the top level, and those of a scaling; other entries of
    a file are ignored."""
    if value is None:
        return {}, {}
    if not isinstance(value, Mapping):
        raise ValueError(arguments.wanted(name, "an object", schema.short_repr(value)))
    value = {
        "rope_type" if key == "type" and "rope_type" not in value else key: each
        for key, each in value.items()
        if each is not None
    }
    moved = {key: value.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in value}
    known = RopeScaling._names()
    unknown = [key for key in value if key not in known and key != "type"]
    if unknown and not is_file:
        raise ValueError(
            arguments.wanted(
                name, f"entries among {', '.join(known)}", schema.short_repr(unknown[0])
            )
        )
    scaling = {key: each for key, each in value.items() if key in known}
    if not is_file and "rope_type" not in scaling:
        raise ValueError(
            arguments.wanted(
                name,
                "an entry rope_type ('default': no scaling)",
                f"only {schema.short_repr([*moved, *scaling])}",
            )
        )
    return moved, scaling
