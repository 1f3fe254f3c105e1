"""Recognises the model of a checkpoint by its type, or by tensor names that only one model has."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.layers.embedder import ROOT
from transformer_embed._src.pretrained import messages
from transformer_embed._src.pretrained.architectures import ARCHITECTURES, as_type, by_model_type
from transformer_embed._src.pretrained.description import (
    BIAS,
    LOGITS_BIAS,
    NORM_SCALE,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    POSITIONS,
    STACKS,
    TOKEN_TYPES,
    TOKENS,
    VECTORS,
    WIDEN,
    WIDEN_OFFSET,
    Architecture,
)
from transformer_embed._src.pretrained.files import Tensors, shown_path

# Characters of a mapping in a message.
MOST = 700
BY_HAND = (
    "by hand: load_embedder(path, config=EmbedderConfig(vocab_size, d_model, scheme=None, "
    "scale=False), names={'token_embedding/embeddings': 'embedding.weight'})"
)
# Tensors that may be a table of tokens, if no row has their names.
TABLE = re.compile(r"(?!.*(position|type)).*(embed|wte|shared|table|token|word)", re.IGNORECASE)


class Match(NamedTuple):
    """A row whose tensors a file has below a prefix, and the tensor name for each parameter."""

    kind: Architecture
    prefix: str
    names: dict[str, str]


def recognised(tensors: Tensors, model_type: Any, stack: str | None, config: pathlib.Path) -> Match:
    """The architecture of a checkpoint, with the tensors of its input and output layers.

    Args:
        tensors: the tensors of the checkpoint.
        model_type: from settings or config.json, or None.
        stack: "encoder", "decoder", or None.
        config: the path that a config.json would have.
    """
    named = by_model_type(model_type)
    own = stack or STACKS[0]
    if model_type is not None and named is None:
        got = f"{messages.short_repr(model_type)}; {_advice(tensors, own)}"
        raise arguments.value_error("model_type", "a known one", got)
    kinds = ARCHITECTURES if named is None else (named,)
    found = matches(kinds, tensors.files, own)
    if not found:
        raise _missing_tensors(tensors, named, stack)
    if named is None:
        found = _unambiguous(tensors, found, config)
    kind, prefix, names = found[0]
    kind = named or as_type(kind, kind.name)
    where = shown_path(tensors.path)
    if len(found) != 1:
        prefixes = messages.short_repr([match.prefix for match in found])
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
    return Match(kind, prefix, names | _output_names(kind, prefix, tensors.files))


def matches(
    kinds: Sequence[Architecture], files: Mapping[str, pathlib.Path], stack: str
) -> list[Match]:
    """The rows whose tensors a file has, for each prefix."""
    found = []
    for kind in kinds:
        tensors = kind.tensors(stack)
        ends = [(name, end) for end in tensors[TOKENS] for name in files if name.endswith(end)]
        prefixes = [name.removesuffix(end) for name, end in ends]
        for prefix in dict.fromkeys(prefixes):
            names = {}
            for parameter, several in tensors.items():
                candidates = [prefix + end for end in several if prefix + end in files]
                if candidates:
                    names[parameter] = candidates[0]
            is_whole = not tensors.keys() - names.keys() - set(kind.may_lack)
            if is_whole and (not prefix or prefix.endswith(".")):
                found.append(Match(kind, prefix, names))
    return found


def _missing_tensors(tensors: Tensors, named: Architecture | None, stack: str | None) -> ValueError:
    """The error for a file without the tensors of a model, or of any known one."""
    own, other = stack or STACKS[0], STACKS[1]
    model = "a known model" if named is None else f"a model {named.name}"
    want = f"the tensors of {model}, or {_by_hand(tensors, _guess(tensors))}"
    kinds = ARCHITECTURES if named is None else (named,)
    if stack is None and matches(kinds, tensors.files, other):
        want = f"the {own} of {model}; pass stack={other!r} for the {other}, which is there"
    where = messages.shorten(str(tensors.path), 60)
    return ValueError(f"{where}: wanted {want}; got {tensors.listed()}")


def _advice(tensors: Tensors, stack: str) -> str:
    """What a model of an unknown type may be loaded as."""
    matching = matches(ARCHITECTURES, tensors.files, stack)
    fitting = [match for match in matching if _fits(tensors, match.names)]
    where = shown_path(tensors.path)
    if not fitting:
        return f"load {where} {_by_hand(tensors, _guess(tensors))}"
    # Of those with equally many tensors, the row with the most types is the likeliest.
    kind, _, names = max(
        fitting,
        key=lambda match: (match.kind.has_stacks, len(match.names), len(match.kind.model_types)),
    )
    return (
        f"the tensors of {where} fit a model {kind.name}: pass settings={{'model_type': "
        f"{kind.name!r}}} if it computes the same, or load it {_by_hand(tensors, names)}"
    )


def _fits(tensors: Tensors, names: Mapping[str, str]) -> bool:
    """Whether tensors have the ranks and the width of one input layer."""
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


def _unambiguous(tensors: Tensors, found: list[Match], config: pathlib.Path) -> list[Match]:
    """The matches with tensor names that only one model has; of these, those with the most."""
    certain = [match for match in found if match.kind.is_unambiguous(match.prefix)]
    if not certain:
        types = list(dict.fromkeys(match.kind.name for match in found))
        problem = f"no config.json beside {shown_path(tensors.path)}: it would name"
        remedy = "add one"
        if config.is_file():
            problem, remedy = f"no model_type in {shown_path(config)}: it names", "add it"
        raise ValueError(
            f"{problem} the architecture; {remedy}, or pass settings={{'model_type': "
            f"{types[0]!r}}} (the names of the tensors fit {', '.join(types)})"
        )
    most = max(len(match.names) for match in certain)
    return [match for match in certain if len(match.names) == most]


def _output_names(
    kind: Architecture, prefix: str, files: Mapping[str, pathlib.Path]
) -> dict[str, str]:
    """The tensors of the output layer, beside those of the input layer or further out."""
    parts = prefix.split(".")[:-1]
    outer = ["".join(f"{part}." for part in parts[:n]) for n in range(len(parts), -1, -1)]
    heads = [start + head for start in outer for head in kind.head.split()]
    biases = [f"{head}.bias" for head in heads] + [start + LOGITS_BIAS for start in outer]
    names = {OUTPUT_TABLE: [f"{head}.weight" for head in heads], OUTPUT_BIAS: biases}
    found = {name: [end for end in ends if end in files] for name, ends in names.items()}
    return {name: ends[0] for name, ends in found.items() if ends}
