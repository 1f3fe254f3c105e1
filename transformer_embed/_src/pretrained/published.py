"""Reads the layer of a published model: its tensors have the names of its model type."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig, OutputLayer
from transformer_embed._src.pretrained import rope
from transformer_embed._src.pretrained.architectures import (
    ARCHITECTURES,
    SCALED_WITHIN,
    UNSCALED_WITHIN,
    by_model_type,
)
from transformer_embed._src.pretrained.description import (
    LOGITS_BIAS,
    OFFSETS,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    STACKS,
    TOKENS,
    Architecture,
    Shapes,
)
from transformer_embed._src.pretrained.files import DTYPES, Tensors, read_json
from transformer_embed._src.pretrained.messages import call_with_named_errors, short_repr
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    Specs,
    check_tensors,
    parameters_of,
    read_parameters,
)

# Tensors that may be a table of tokens, if no row has their names.
TABLE = re.compile(
    r"(?!.*\b\d+\b)(.*\.)?(embed_tokens|(word_|tok(en)?s?_)?emb(ed(ding)?s?)?|wte|shared|embed_in)\.weight"
)
# Tensors that may stand beside that table: its siblings, outside of numbered layers. Not buffers,
# second streams, or what only attention or the end of the model reads.
BESIDE = re.compile(
    r"(?!.*(\b\d+\b|_ids$|inv_freq|entity|visual|vision|image|audio|patch_|embed_global|embedding_norm|"
    r"embedding_projection|rel_embeddings|(^|\.)pos_embed))"
    r"(embeddings\.|((encoder|decoder)\.)?[^.]*(emb|pos_|posit|rel_|relative|token_type|wte|wpe))"
)


class Match(NamedTuple):
    """A row whose tensors a file has below a prefix, and the tensor name for each parameter."""

    kind: Architecture
    prefix: str
    names: dict[str, str]


def read_published(
    tensors: Tensors, stack: str | None, settings: dict[str, Any]
) -> PretrainedInput:
    """The layer of a known model, which config.json and `settings` describe."""
    path = tensors.path.parent / "config.json"
    whole = read_json(path) if os.path.lexists(path) else {}
    # A config.json of several models has the text model's own.
    parts = [whole.get("text_config"), whole.get("text"), whole]
    in_file = next(part for part in parts if isinstance(part, dict))
    type_in_file = in_file.get("model_type") or whole.get("model_type")
    outer = None if in_file is whole else str(whole.get("model_type"))
    if isinstance(is_tied := whole.get("tie_word_embeddings"), bool):
        # The output layer is the whole model's.
        in_file = in_file | {"tie_word_embeddings": is_tied}
    model_type = settings.pop("model_type", None) or type_in_file
    match = recognised(tensors, model_type or _type_by_names(tensors, stack), stack, in_file)
    kind = match.kind
    place = f"{path}, for a model {kind.name}"
    entries = _entries(kind, place, in_file, settings)
    value = kind.with_defaults(path, entries, type_in_file)
    where = f"settings and {place}"
    found, parameters = _described(tensors, match, value, where, stack or STACKS[0], outer)
    return found._replace(params=read_parameters(tensors, found.names or {}, parameters))


def _described(
    tensors: Tensors,
    match: Match,
    value: Mapping[str, Any],
    where: str,
    stack: str,
    outer: str | None = None,
) -> tuple[PretrainedInput, Specs]:
    """All but the parameters, and their shapes, which the tensors have."""
    kind, _, names = match
    table = names.get(OUTPUT_TABLE)
    # As in the library: two tables that differ are not tied, whatever config.json says.
    if table and value["tie_word_embeddings"] and tensors.are_equal(table, names[TOKENS]):
        del names[OUTPUT_TABLE]
    shapes = shapes_of(tensors, names)
    options, rotary, bias = call_with_named_errors(where, kind.describe, value, shapes, stack)
    options["output"] = _output_within(outer, options["output"])
    dtype = tensors.entry(names[TOKENS]).dtype
    options["param_dtype"] = DTYPES.get(dtype, jnp.dtype("float32"))
    config = call_with_named_errors(where, EmbedderConfig, **options)
    parameters = parameters_of(where, config, rotary, bias)
    # An output layer that the config does not have is not read, and an offset that the file does
    # not have is zeros. (In a file that `save_embedder` wrote, a missing offset is damage.)
    stored = {name: tensor for name, tensor in names.items() if name in parameters}
    check_tensors(tensors, stored, parameters, may_lack=OFFSETS)
    return PretrainedInput(config, {}, rotary, bias, stored), parameters


def _output_within(outer: str | None, output: OutputLayer | str) -> OutputLayer | str:
    """The output layer of a text model inside a model of the type `outer`, or why there is none."""
    if outer is None or isinstance(output, str) or outer in SCALED_WITHIN.split():
        return output
    plain = OutputLayer(output.tied, output.bias)
    if output == plain or outer in UNSCALED_WITHIN.split():
        return plain
    return f"whether a model {outer} scales or bounds the logits like its text model is not known"


def _entries(
    kind: Architecture, place: str, in_file: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """The values of the entries that are read; settings go before those of config.json.

    Raises a ValueError for settings that are not read, and for entries of config.json whose names
    concern the layer, unless settings say that they are null.
    """
    entries, unread = kind.read(place, in_file)
    said, unknown = kind.read("settings", settings)
    for name, value in unknown.items():
        if value is not None or unread.pop(name, None) is None:
            reads = ", ".join(aliases[0] for aliases in kind.names().values())
            want = f"entries that a model {kind.name} reads ({reads})"
            raise arguments.value_error("settings", want, short_repr(name))
    for name, value in unread.items():
        if kind.concerns(name, value):
            want = (
                "no entry that concerns the layer and is not read (if it means nothing here: "
                f"settings={{{name!r}: None}})"
            )
            raise arguments.value_error(place, want, f"{name}: {short_repr(value)}")
    # What settings say inside a scaling goes before what config.json says beside it.
    length = said.get("rope_scaling", {}).get(rope.ORIGINAL)
    if length is not None:
        said.setdefault(rope.ORIGINAL, length)
    return entries | said


def _type_by_names(tensors: Tensors, stack: str | None) -> str | None:
    """The type of the model that alone has such names of tensors, if there is one."""
    found = matches(ARCHITECTURES, tensors.files, stack or STACKS[0])
    certain = [match for match in found if re.search(match.kind.known_below, match.prefix)]
    if not certain:
        return None
    return max(certain, key=lambda match: len(match.names)).kind.name


def recognised(
    tensors: Tensors, model_type: Any, stack: str | None, in_file: dict[str, Any]
) -> Match:
    """The row of a checkpoint, with the tensors of its input and output layers.

    Args:
        tensors: the tensors of the checkpoint.
        model_type: from settings or config.json, or None.
        stack: "encoder", "decoder", or None.
        in_file: the entries of config.json.
    """
    kind, side = by_model_type(model_type), stack or STACKS[0]
    where = tensors.path
    if kind is None:
        want = f"that of a known model, from settings or a config.json beside {where}"
        got = f"{short_repr(model_type)}; {_advice(tensors, stack, in_file)}"
        raise arguments.value_error("model_type", want, got)
    found = matches([kind], tensors.files, side)
    if not found:
        want = f"the tensors of a model {kind.name}, or {_by_hand(tensors)}"
        if matches([kind], tensors.files, STACKS[1]):
            want = f"the encoder of {kind.name}; pass stack='decoder' for its decoder"
        raise arguments.value_error(where, want, tensors.listed())
    if len(found) > 1:
        want = f"one model {kind.name} in a file (or load one with config and names)"
        got = short_repr([match.prefix for match in found])
        raise arguments.value_error(where, want, f"those under {got}")
    if not kind.has_stacks:
        arguments.check_left_out("stack", stack, f"{kind.name} has one stack")
    if reason := _reason(found[0], side, tensors.files):
        alone = _by_hand(tensors, found[0].names[TOKENS])
        want = f"an input layer like that of {kind.name}, or {alone}"
        raise arguments.value_error(where, want, reason)
    return found[0]


def _reason(match: Match, stack: str, files: Collection[str]) -> str:
    """Why the input layer is not like that of the row, as its tensors show; "": it is."""
    kind, prefix, names = match
    for tensor, reason in kind.refused.items():
        if prefix + tensor.format(stack=stack) in files:
            return reason
    unread = _unread(kind, prefix, stack, set(files) - set(names.values()))
    return f"also {unread[0]}, which is not read" if unread else ""


def _unread(kind: Architecture, prefix: str, stack: str, files: Collection[str]) -> list[str]:
    """Of the tensors that are not read, those that may belong to the input layer of this stack."""
    own = kind.tokens.format(stack=stack).partition(".")[0]
    others = [other for other in STACKS if own in STACKS and other != own]
    known = kind.meaningless.split() + ["embed_positions"] * (kind.sinusoids is not None)
    unread = []
    for name in sorted(files):
        parts = name.removeprefix(prefix).split(".")
        is_own = name.startswith(prefix) and parts[0] not in others and not {*parts} & {*known}
        if is_own and BESIDE.match(".".join(parts)):
            unread.append(name)
    return unread


def matches(kinds: Sequence[Architecture], files: Collection[str], stack: str) -> list[Match]:
    """The rows whose tensors a file has, for each prefix."""
    found = []
    for kind in kinds:
        prefixes = [
            name.removesuffix(end)
            for end in kind.tensors(stack)[TOKENS]
            for name in files
            if f".{name}".endswith(f".{end}")
        ]
        for prefix in dict.fromkeys(prefixes):
            tensors = kind.tensors(stack, prefix)
            names = _first_present(tensors, files)
            if not tensors.keys() - names.keys() - set(kind.may_lack):
                names |= _output_names(kind, prefix, files)
                found.append(Match(kind, prefix, names))
    return found


def shapes_of(tensors: Tensors, names: Mapping[str, str]) -> Shapes:
    """The last two axes of each tensor."""
    shapes = {}
    for name, tensor in names.items():
        *_, rows, width = (1, 1, *tensors.entry(tensor).shape)
        shapes[name] = rows, width
    return shapes


def _first_present(
    candidates: Mapping[str, Sequence[str]], files: Collection[str]
) -> dict[str, str]:
    """The first of each parameter's names that a file has, if it has any."""
    present = {name: [end for end in ends if end in files] for name, ends in candidates.items()}
    return {name: ends[0] for name, ends in present.items() if ends}


def _advice(tensors: Tensors, stack: str | None, in_file: dict[str, Any]) -> str:
    """What a model of an unknown type may be loaded as."""
    fitting = {"": []}
    for match in matches(ARCHITECTURES, tensors.files, stack or STACKS[0]):
        fitting.setdefault(_said_by(match, tensors, stack, in_file), []).append(match)
    # Of the rows that say the same, the first.
    found = [same[0] for said, same in fitting.items() if said]
    if not found:
        return f"load {_by_hand(tensors)}, which has {tensors.listed()}"
    most = max(len(match.names) for match in found)
    kinds = [match.kind.name for match in found if len(match.names) == most]
    return (
        f"tensors and entries fit a model {' or '.join(kinds[:3])}: pass that model_type in "
        f"settings if it computes the same, or load {_by_hand(tensors)}"
    )


def _said_by(match: Match, tensors: Tensors, stack: str | None, in_file: dict[str, Any]) -> str:
    """The layer that a row describes if it reads what concerns it and guesses nothing, or ""."""
    kind, side = by_model_type(match.kind.name), stack or STACKS[0]
    has_stack = stack is None or match.kind.has_stacks
    if kind is None or not has_stack or _reason(match, side, tensors.files):
        return ""
    is_tied = {"tie_word_embeddings": True}
    try:
        # Types that differ only in whether they tie their output layer are the same here.
        value = kind.with_defaults("", _entries(kind, "", is_tied | in_file, {}), None)
        said, parameters = _described(tensors, match._replace(kind=kind), value, "", side)
    except ValueError:
        return ""
    # A table alone, of which nothing is said, is any model's.
    is_alone = (
        parameters.keys() <= {TOKENS, OUTPUT_TABLE, OUTPUT_BIAS}
        and said.rotary is None
        and said.bias is None
    )
    return "" if is_alone else str(said)


def _by_hand(tensors: Tensors, table: str | None = None) -> str:
    """The call that loads the table of tokens alone, if it is certain."""
    tables = [name for name in tensors.files if TABLE.fullmatch(name)]
    if table is None and tables and all(tensors.are_equal(tables[0], each) for each in tables):
        table = tables[0]
    shape = tensors.entry(table).shape if table else ()
    if len(shape) != 2:
        return "any table with config and names"
    return (
        f"its table of tokens alone: load_embedder(path, config=EmbedderConfig({shape[0]}, "
        f"{shape[1]}, scheme=None, scale=False), names={{'token_embedding/embeddings': {table!r}}})"
    )


def _output_names(kind: Architecture, prefix: str, files: Collection[str]) -> dict[str, str]:
    """The tensors of the output layer, beside those of the input layer or further out."""
    outer = [prefix]
    while outer[-1]:
        outer.append(re.sub(r"[^.]*\.$", "", outer[-1]))
    heads = [start + head for start in outer for head in kind.head.split()]
    biases = [f"{head}.bias" for head in heads] + [start + LOGITS_BIAS for start in outer]
    tables = [f"{head}.weight" for head in heads]
    return _first_present({OUTPUT_TABLE: tables, OUTPUT_BIAS: biases}, files)
