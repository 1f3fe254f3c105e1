"""Recognises the model of a checkpoint: by the model type, or by tensor names that only one model
has."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.pretrained import schema
from transformer_embed._src.pretrained.architectures import ARCHITECTURES, by_model_type
from transformer_embed._src.pretrained.description import (
    BIAS,
    LOGITS_BIAS,
    NORM_SCALE,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    POSITIONS,
    ROOT,
    STACKS,
    TOKEN_TYPES,
    TOKENS,
    VECTORS,
    WIDEN,
    WIDEN_OFFSET,
    Architecture,
)
from transformer_embed._src.pretrained.files import Tensors, shown_path

# Characters.
LISTED = 90
MOST = 700
BY_HAND = (
    "by hand: load_embedder(path, config=EmbedderConfig(vocab_size, d_model, scheme=None, "
    "scale=False), names={'token_embedding/embeddings': 'embedding.weight'})"
)
# Tensors that may be a table of tokens, if no row has their names.
TABLE = re.compile(r"(?!.*(position|type)).*(embed|wte|shared|table|token|word)", re.IGNORECASE)


def recognised(
    tensors: Tensors, model_type: Any, stack: str | None, config: pathlib.Path
) -> tuple[Architecture, dict[str, str]]:
    """The architecture, and the tensor name for each of its parameters.

    Args:
        tensors: the tensors of the checkpoint.
        model_type: from settings or config.json, or None.
        stack: "encoder", "decoder", or None.
        config: the path that a config.json would have.
    """
    named = by_model_type(model_type)
    own = stack or STACKS[0]
    if model_type is not None and named is None:
        want, got = "a known one", f"{schema.short_repr(model_type)}; {_advice(tensors, own)}"
        raise arguments.value_error("model_type", want, got)
    kinds = ARCHITECTURES if named is None else (named,)
    found = _all_matches(kinds, tensors, own)
    if not found:
        raise _missing_tensors(tensors, named, stack)
    if named is None:
        found = _unambiguous(tensors, found, config)
    kind, prefix, names = found[0]
    where = shown_path(tensors.path)
    if len(found) != 1:
        prefixes = schema.short_repr([prefix for _, prefix, _ in found])
        want = (
            f"one model {kind.name} in a file (save each to its own file, or load one with "
            f"config and names)"
        )
        raise arguments.value_error(where, want, f"{len(found)} of them, under {prefixes}")
    if stack is not None and not kind.has_stacks:
        raise arguments.value_error("stack", f"None, since {kind.name} has one stack", repr(stack))
    for tensor, reason in kind.refused.items():
        if prefix + tensor.format(stack=own) in tensors.files:
            raise arguments.value_error(where, f"an input layer like that of {kind.name}", reason)
    return kind, names | _output_names(kind, prefix, tensors.files)


def _missing_tensors(tensors: Tensors, named: Architecture | None, stack: str | None) -> ValueError:
    """The error for a file without the tensors of a model, or of any known one."""
    own, other = stack or STACKS[0], STACKS[1]
    model = "a known model" if named is None else f"a model {named.name}"
    want = f"the tensors of {model}, or {_by_hand(tensors, _guess(tensors))}"
    kinds = ARCHITECTURES if named is None else (named,)
    if stack is None and _all_matches(kinds, tensors, other):
        want = f"the {own} of {model}; pass stack={other!r} for the {other}, which is there"
    where = schema.shorten(str(tensors.path), 60)
    return ValueError(f"{where}: wanted {want}; got {listed(tensors)}")


def _advice(tensors: Tensors, stack: str) -> str:
    """What a model of an unknown type may be loaded as."""
    matching = _all_matches(ARCHITECTURES, tensors, stack)
    fitting = [match for match in matching if _fits(tensors, match)]
    where = shown_path(tensors.path)
    if not fitting:
        return f"load {where} {_by_hand(tensors, _guess(tensors))}"
    # Of those with equally many tensors, the row with the most types is the likeliest.
    kind, _, names = max(
        fitting, key=lambda match: (match[0].has_stacks, len(match[2]), len(match[0].model_types))
    )
    return (
        f"the tensors of {where} fit a model {kind.name}: pass settings={{'model_type': "
        f"{kind.name!r}}} if it computes the same, or load it {_by_hand(tensors, names)}"
    )


def _fits(tensors: Tensors, match: "Match") -> bool:
    """Whether the tensors of a match have the ranks and the width of one input layer."""
    _, _, names = match
    shapes = {name: tensors.entry(tensor).shape for name, tensor in names.items() if name != BIAS}
    ranks = all(len(shape) == 2 - (name in VECTORS) for name, shape in shapes.items())
    widths = {shape[-1] for name, shape in shapes.items() if name != WIDEN_OFFSET}
    return ranks and len(widths) == 1


def _guess(tensors: Tensors) -> dict[str, str]:
    """The largest table of two axes outside of numbered layers whose name may be that of tokens."""
    sizes = {
        name: tensors.entry(name).shape
        for name in tensors.files
        if TABLE.match(name) and not re.search(r"\b\d+\b", name)
    }
    tables = [name for name, shape in sizes.items() if len(shape) == 2]
    return {TOKENS: max(tables, key=lambda name: sizes[name][0])} if tables else {}


def _by_hand(tensors: Tensors, names: Mapping[str, str]) -> str:
    """The call that loads these tensors without a row, for a model without scale."""
    own = {name.removeprefix(ROOT): tensor for name, tensor in names.items() if name != BIAS}
    if not own or len(str(own)) > MOST:
        return BY_HAND
    shapes = {name: tensors.entry(tensor).shape for name, tensor in names.items()}
    rows, width = shapes[TOKENS]
    scheme = f"Learned({shapes[POSITIONS][0]})" if POSITIONS in shapes else "None"
    options = f"{rows}, {shapes.get(WIDEN, (width,))[0]}, scheme={scheme}, scale=False"
    if TOKEN_TYPES in shapes:
        options += f", num_token_types={shapes[TOKEN_TYPES][0]}"
    if NORM_SCALE in shapes:
        options += ", layer_norm_eps=1e-12"
    if WIDEN in shapes:
        options += f", embedding_width={width}"
    return f"by hand: load_embedder(path, config=EmbedderConfig({options}), names={own})"


Match = tuple[Architecture, str, dict[str, str]]


def _all_matches(kinds: Sequence[Architecture], tensors: Tensors, stack: str) -> list[Match]:
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
        types = [kind.name for kind, *_ in found]
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
    kind: Architecture, files: Mapping[str, pathlib.Path], stack: str
) -> list[tuple[str, dict[str, str]]]:
    """Each prefix that has all tensors of an architecture, with the tensor name for each
    parameter."""
    ends = [end.format(stack=stack) for end in kind.tensors[TOKENS]]
    prefixes = dict.fromkeys(
        name[: -len(end)]
        for end in ends
        for name in files
        if name == end or name.endswith(f".{end}")
    )
    found = ((prefix, _names_under_prefix(prefix, kind, files, stack)) for prefix in prefixes)
    return [(prefix, names) for prefix, names in found if names is not None]


def _names_under_prefix(
    prefix: str, kind: Architecture, files: Mapping[str, pathlib.Path], stack: str
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


def _output_names(
    kind: Architecture, prefix: str, files: Mapping[str, pathlib.Path]
) -> dict[str, str]:
    """The tensors of the output layer that a file has: beside those of the input layer, or further
    out."""
    parts = prefix.split(".")[:-1]
    outer = ["".join(f"{part}." for part in parts[:n]) for n in range(len(parts), -1, -1)]
    heads = [start + head for start in outer for head in kind.head.split()]
    biases = [f"{head}.bias" for head in heads] + [start + LOGITS_BIAS for start in outer]
    names = {OUTPUT_TABLE: [f"{head}.weight" for head in heads], OUTPUT_BIAS: biases}
    found = {name: [end for end in ends if end in files] for name, ends in names.items()}
    return {name: ends[0] for name, ends in found.items() if ends}


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
