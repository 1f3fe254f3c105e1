"""Recognises the model of a checkpoint: by the model type, or by tensor names that only one model
has."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.pretrained import architectures as known
from transformer_embed._src.pretrained import schema
from transformer_embed._src.pretrained.files import Tensors, shown_path

# Characters.
LISTED = 90
BY_HAND = (
    "by hand: load_embedder(path, config=EmbedderConfig(vocab_size, d_model, scheme=None, "
    "scale=False), "
    "names={'token_embedding/embeddings': 'embedding.weight'})"
)


def recognised(
    tensors: Tensors, model_type: Any, stack: str | None, config: pathlib.Path
) -> tuple[known.Architecture, dict[str, str]]:
    """The architecture, and the tensor name for each of its parameters.

    Args:
        tensors: the tensors of the checkpoint.
        model_type: from settings or config.json, or None.
        stack: "encoder", "decoder", or None.
        config: the path that a config.json would have.
    """
    named = known.by_model_type(model_type)
    if model_type is not None and named is None:
        types = sorted(name for kind in known.ARCHITECTURES for name in kind.model_types)
        got = schema.short_repr(model_type)
        raise arguments.value_error("model_type", f"one of {', '.join(types)}", got)
    kinds = known.ARCHITECTURES if named is None else (named,)
    own = stack or known.STACKS[0]
    found = _all_matches(kinds, tensors, own)
    if not found:
        other = known.STACKS[1]
        has_other = stack is None and bool(_all_matches(kinds, tensors, other))
        model = "a known model" if named is None else f"a model {named.model_types[0]}"
        want = f"the tensors of {model}, or {BY_HAND}"
        if has_other:
            want = f"the {own} of {model}; pass stack={other!r} for the {other}, which is there"
        where = schema.shorten(str(tensors.path), 60)
        raise ValueError(f"{where}: wanted {want}; got {listed(tensors)}")
    if named is None:
        found = _unambiguous(tensors, found, config)
    kind, prefix, names = found[0]
    model, where = kind.model_types[0], shown_path(tensors.path)
    if len(found) != 1:
        prefixes = schema.short_repr([prefix for _, prefix, _ in found])
        want = (
            f"one model {model} in a file (save each to its own file, or load one with "
            f"config and names)"
        )
        raise arguments.value_error(where, want, f"{len(found)} of them, under {prefixes}")
    if stack is not None and not kind.has_stacks:
        raise arguments.value_error("stack", f"None, since {model} has one stack", repr(stack))
    for tensor, reason in kind.refused.items():
        if prefix + tensor.format(stack=own) in tensors.files:
            raise arguments.value_error(where, f"an input layer like that of {model}", reason)
    return kind, names


Match = tuple[known.Architecture, str, dict[str, str]]


def _all_matches(kinds: Sequence[known.Architecture], tensors: Tensors, stack: str) -> list[Match]:
    return [
        (kind, prefix, names)
        for kind in kinds
        for prefix, names in matches(kind, tensors.files, stack)
    ]


def _unambiguous(tensors: Tensors, found: list[Match], config: pathlib.Path) -> list[Match]:
    """The matches with tensor names that only one model has; of these, those with the most
    tensors."""
    certain = [
        (kind, prefix, names) for kind, prefix, names in found if kind.is_unambiguous(prefix)
    ]
    if not certain:
        types = [kind.model_types[0] for kind, *_ in found]
        hint = (
            f"pass settings={{'model_type': {types[0]!r}}} (the names of the tensors fit "
            f"{', '.join(dict.fromkeys(types))})"
        )
        if config.is_file():
            raise ValueError(
                f"no model_type in {shown_path(config)}: it names the architecture; add it, or "
                f"{hint}"
            )
        raise ValueError(
            f"no config.json beside {shown_path(tensors.path)}: it would name the architecture; "
            f"add one, or {hint}"
        )
    most = max(len(names) for _, _, names in certain)
    return [match for match in certain if len(match[2]) == most]


def matches(
    kind: known.Architecture, files: Mapping[str, pathlib.Path], stack: str
) -> list[tuple[str, dict[str, str]]]:
    """Each prefix that has all tensors of an architecture, with the tensor name for each
    parameter."""
    ends = [end.format(stack=stack) for end in kind.tensors[known.TOKENS]]
    prefixes = dict.fromkeys(
        name[: -len(end)]
        for end in ends
        for name in files
        if name == end or name.endswith(f".{end}")
    )
    found = ((prefix, _names_under_prefix(prefix, kind, files, stack)) for prefix in prefixes)
    return [(prefix, names) for prefix, names in found if names is not None]


def _names_under_prefix(
    prefix: str, kind: known.Architecture, files: Mapping[str, pathlib.Path], stack: str
) -> dict[str, str] | None:
    names = {}
    for parameter, ends in kind.tensors.items():
        candidates = (prefix + end.removeprefix("?").format(stack=stack) for end in ends)
        tensor = next((candidate for candidate in candidates if candidate in files), None)
        if tensor is not None:
            names[parameter] = tensor
        elif not ends[0].startswith("?"):
            return None
    return names


def listed(tensors: Tensors) -> str:
    """A few tensor names for a message, without layer numbers; tensors outside of numbered layers
    come first."""
    is_open = set(tensors.files.values()) == {tensors.path}
    seen = {
        re.sub(r"\b\d+\b", "*", name): f" {tensors.entry(name)}" if is_open else ""
        for name in sorted(tensors.files)
    }
    order = [
        schema.shorten(name, 40) + seen[name]
        for name in sorted(seen, key=lambda name: ("*" in name, name))
    ]
    count = next(
        (n for n in range(1, len(order)) if len(", ".join(order[: n + 1])) > LISTED), len(order)
    )
    more = f" and {len(order) - count} more" if len(order) > count else ""
    return "the tensors " + ", ".join(order[:count]) + more if order else "an empty file"
