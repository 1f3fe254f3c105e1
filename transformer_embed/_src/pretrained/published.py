"""Describes the layer of a published model: its tensors have the names of its model type."""

import contextlib
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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
)
from transformer_embed._src.pretrained.entries import ENTRIES
from transformer_embed._src.pretrained.files import DTYPES, Tensors, read_json
from transformer_embed._src.pretrained.messages import call_with_named_errors, short_repr
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    Specs,
    check_tensors,
    parameters_of,
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
# Entries that may say that tokens are scaled.
SCALE = re.compile(r"(?=.*(emb|input))(?=.*(scal|multiplier))|mup_")


class Published(NamedTuple):
    """The files of a published model.

    Args:
        tensors: of the checkpoint.
        stack: "encoder", "decoder", or None: not said.
        path: of config.json.
        entries: of config.json, those of the text model.
        model_type: of the text model, as config.json says.
        outer: the type of the whole model, if the text model is a part of it.
    """

    tensors: Tensors
    stack: str | None = None
    path: pathlib.Path = pathlib.Path()
    entries: Mapping[str, Any] = {}
    model_type: Any = None
    outer: str | None = None

    @property
    def side(self) -> str:
        """The stack that is read."""
        return self.stack or STACKS[0]


class Match(NamedTuple):
    """A row whose tensors a file has below a prefix, and the tensor name for each parameter."""

    kind: Architecture
    prefix: str
    names: dict[str, str]


def describe_published(
    tensors: Tensors, stack: str | None, settings: dict[str, Any]
) -> tuple[PretrainedInput, Specs]:
    """The layer of a known model, which config.json and `settings` describe."""
    path = tensors.path.parent / "config.json"
    whole = read_json(path) if os.path.lexists(path) else {}
    # A config.json of several models has the text model's own.
    parts = [whole.get("text_config"), whole.get("text"), whole]
    entries = next(part for part in parts if isinstance(part, dict))
    type_in_file = entries.get("model_type") or whole.get("model_type")
    outer = None if entries is whole else str(whole.get("model_type"))
    if isinstance(is_tied := whole.get("tie_word_embeddings"), bool):
        # The output layer is the whole model's.
        entries = entries | {"tie_word_embeddings": is_tied}
    file = Published(tensors, stack, path, entries, type_in_file, outer)
    return _described(file, recognised(file, settings.pop("model_type", None)), settings)


def _described(
    file: Published, match: Match, settings: Mapping[str, Any]
) -> tuple[PretrainedInput, Specs]:
    """All but the parameters, and their shapes, which the tensors have."""
    kind, _, names = match
    tensors, place = file.tensors, f"{file.path}, for a model {kind.name}"
    entries = _entries(kind, place, file.entries, settings)
    value = kind.with_defaults(file.path, entries, file.model_type)
    where = f"settings and {place}"
    table = names.get(OUTPUT_TABLE)
    # As in the library: two tables that differ are not tied, whatever config.json says.
    if table and value["tie_word_embeddings"] and tensors.are_equal(table, names[TOKENS]):
        del names[OUTPUT_TABLE]
    # The last two axes of each tensor.
    shapes = {name: (1, 1, *tensors.entry(names[name]).shape)[-2:] for name in names}
    options, rotary, bias = call_with_named_errors(where, kind.describe, value, shapes, file.side)
    options["output"] = _output_within(file.outer, options["output"])
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
    kind: Architecture, place: str, in_file: Mapping[str, Any], settings: Mapping[str, Any]
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


# --- Which model it is.


def recognised(file: Published, model_type: Any) -> Match:
    """The row of a checkpoint, with the tensors of its input and output layers.

    The type is that of settings, of config.json, or of the model that alone has such tensors.
    """
    tensors, where = file.tensors, file.tensors.path
    model_type = model_type or file.model_type or type_by_names(file)
    kind = by_model_type(model_type)
    if kind is None:
        want = f"that of a known model, from settings or a config.json beside {where}"
        raise arguments.value_error(
            "model_type", want, f"{short_repr(model_type)}; {_advice(file)}"
        )
    found = matches([kind], file)
    if not found:
        want = f"the tensors of a model {kind.name}, or {_by_hand(file, kind)}"
        if matches([kind], file._replace(stack=STACKS[1])):
            want = f"the encoder of {kind.name}; pass stack='decoder' for its decoder"
        raise arguments.value_error(where, want, tensors.listed())
    if len(found) > 1:
        want = f"one model {kind.name} in a file (or load one with config and names)"
        got = short_repr([match.prefix for match in found])
        raise arguments.value_error(where, want, f"those under {got}")
    if not kind.has_stacks:
        arguments.check_left_out("stack", file.stack, f"{kind.name} has one stack")
    if reason := _reason(found[0], file):
        alone = _by_hand(file, kind, found[0].names[TOKENS])
        want = f"an input layer like that of {kind.name}, or {alone}"
        raise arguments.value_error(where, want, reason)
    return found[0]


def matches(kinds: Iterable[Architecture], file: Published) -> list[Match]:
    """The rows whose tensors a file has, for each prefix."""
    files, found = file.tensors.files, []
    for kind in kinds:
        prefixes = [
            name.removesuffix(end)
            for end in kind.tensors(file.side)[TOKENS]
            for name in files
            if f".{name}".endswith(f".{end}")
        ]
        for prefix in dict.fromkeys(prefixes):
            tensors = kind.tensors(file.side, prefix)
            names = _first_present(tensors, files)
            if not tensors.keys() - names.keys() - set(kind.may_lack):
                names |= _output_names(kind, prefix, files)
                found.append(Match(kind, prefix, names))
    return found


def _output_names(kind: Architecture, prefix: str, files: Collection[str]) -> dict[str, str]:
    """The tensors of the output layer, beside those of the input layer or further out."""
    outer = [prefix]
    while outer[-1]:
        outer.append(re.sub(r"[^.]*\.$", "", outer[-1]))
    heads = [start + head for start in outer for head in kind.head.split()]
    biases = [f"{head}.bias" for head in heads] + [start + LOGITS_BIAS for start in outer]
    tables = [f"{head}.weight" for head in heads]
    return _first_present({OUTPUT_TABLE: tables, OUTPUT_BIAS: biases}, files)


def _first_present(
    candidates: Mapping[str, Sequence[str]], files: Collection[str]
) -> dict[str, str]:
    """The first of each parameter's names that a file has, if it has any."""
    present = {name: [end for end in ends if end in files] for name, ends in candidates.items()}
    return {name: ends[0] for name, ends in present.items() if ends}


def type_by_names(file: Published) -> str | None:
    """The type of the model that alone has such names of tensors, if there is one."""
    certain = {
        match.kind.name: len(match.names)
        for match in matches(ARCHITECTURES, file)
        if re.search(match.kind.known_below, match.prefix)
    }
    return max(certain, key=certain.__getitem__, default=None)


def _reason(match: Match, file: Published) -> str:
    """Why the input layer is not like that of the row, as its tensors show; "": it is."""
    kind, prefix, names = match
    files = file.tensors.files
    for tensor, reason in kind.refused.items():
        if prefix + tensor.format(stack=file.side) in files:
            return reason
    own = kind.tokens.format(stack=file.side).partition(".")[0]
    left_out = {*kind.meaningless.split()}
    if kind.sinusoids is not None:
        left_out.add("embed_positions")
    if own in STACKS:
        left_out |= {*STACKS} - {own}
    for name in sorted(files.keys() - names.values()):
        below = name.removeprefix(prefix)
        is_own = name.startswith(prefix) and not left_out & {*below.split(".")}
        if is_own and BESIDE.match(below):
            return f"also {name}, which is not read"
    return ""


# --- What to do with one that is not known.


def _advice(file: Published) -> str:
    """What a model of an unknown type may be loaded as."""
    fitting = {}
    for match in matches(ARCHITECTURES, file):
        # Of the rows that say the same, the first.
        fitting.setdefault(_said_by(match, file), match)
    fitting.pop("", None)
    if not fitting:
        return f"load {_by_hand(file)}, which has {file.tensors.listed()}"
    most = max(len(match.names) for match in fitting.values())
    kinds = [match.kind.name for match in fitting.values() if len(match.names) == most]
    return (
        f"tensors and entries fit a model {' or '.join(kinds[:3])}: pass that model_type in "
        f"settings if it computes the same, or load {_by_hand(file)}"
    )


def _said_by(match: Match, file: Published) -> str:
    """The layer that a row describes if it reads what concerns it and guesses nothing, or ""."""
    if (file.stack and not match.kind.has_stacks) or _reason(match, file):
        return ""
    # Types that differ only in whether they tie their output layer are the same here.
    entries = {"tie_word_embeddings": True, **file.entries}
    try:
        said, parameters = _described(file._replace(entries=entries, model_type=None), match, {})
    except ValueError:
        return ""
    # A table alone, of which nothing is said, is any model's.
    is_alone = (
        parameters.keys() <= {TOKENS, OUTPUT_TABLE, OUTPUT_BIAS}
        and said.rotary is None
        and said.bias is None
    )
    return "" if is_alone else str(said)


def _by_hand(file: Published, kind: Architecture | None = None, table: str | None = None) -> str:
    """The call that loads the table of tokens alone, if the table and its scale are certain."""
    tensors = file.tensors
    tables = [name for name in tensors.files if TABLE.fullmatch(name)]
    if table is None and tables and all(tensors.are_equal(tables[0], each) for each in tables):
        table = tables[0]
    shape, scale = tensors.entry(table).shape if table else (), _scale(file, kind)
    if len(shape) != 2 or scale is None:
        return "any table with config and names"
    return (
        f"its table of tokens alone: load_embedder(path, config=EmbedderConfig({shape[0]}, "
        f"{shape[1]}, scheme=None, scale={scale}, output=None), "
        f"names={{'token_embedding/embeddings': {table!r}}})"
    )


def _scale(file: Published, kind: Architecture | None) -> bool | float | None:
    """The scale of tokens, as the row or the entries of any row say; None: it is not certain."""
    rows = [row for row in ARCHITECTURES if row.scale in file.entries]
    kind = kind or [*rows, Architecture("", "")][0]
    for name, value in file.entries.items():
        if name != kind.scale and SCALE.search(name) and kind.concerns(name, value):
            return None
    if isinstance(kind.scale, bool):
        return kind.scale
    default = kind.entries.get(kind.scale, ENTRIES[kind.scale].default)
    with contextlib.suppress(TypeError, ValueError):
        return ENTRIES[kind.scale].check("", file.entries.get(kind.scale, default))
    return None
