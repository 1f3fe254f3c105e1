"""Reads the layer of a published model: its tensors have the names of its model type."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig, OutputLayer
from transformer_embed._src.layers.embedder import ROOT
from transformer_embed._src.pretrained import rope
from transformer_embed._src.pretrained.architectures import ARCHITECTURES, by_model_type
from transformer_embed._src.pretrained.description import (
    BIAS,
    LOGITS_BIAS,
    NORM_SCALE,
    OFFSETS,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    POSITIONS,
    STACKS,
    TOKEN_TYPES,
    TOKENS,
    WIDEN,
    WIDEN_OFFSET,
    Architecture,
    Shapes,
)
from transformer_embed._src.pretrained.files import DTYPES, Tensors, read_json
from transformer_embed._src.pretrained.messages import call_with_named_errors, short_repr
from transformer_embed._src.pretrained.parameters import (
    PretrainedInput,
    check_tensors,
    parameters_of,
    read_parameters,
)

BY_HAND = (
    "by hand: load_embedder(path, config=EmbedderConfig(vocab_size, d_model, scheme=None, "
    "scale=False), names={'token_embedding/embeddings': 'embedding.weight'})"
)
# Tensors outside of numbered layers that may be a table of tokens, if no row has their names.
TABLE = re.compile(
    r"(?!.*(position|type|\b\d+\b)).*(embed|wte|shared|table|token|word)", re.IGNORECASE
)
# Tensors that may stand beside that table: its siblings, outside of numbered layers. Not buffers,
# second streams, or what only attention or the end of the model reads.
BESIDE = re.compile(
    r"(?!.*(\b\d+\b|_ids$|inv_freq|entity|visual|vision|image|audio|patch_|embed_global|embedding_norm|"
    r"embedding_projection|rel_embeddings|(^|\.)pos_embed))"
    r"(embeddings\.|((encoder|decoder)\.)?[^.]*(emb|pos_|posit|rel_|relative|token_type|wte|wpe))"
)
_words = str.split
# Models around a text model that scale and bound its logits as it does alone, and that do not.
SCALED_WITHIN = (
    None,
    *_words(
        "paligemma gemma3n gemma4 gemma4_unified granite_docling granite4_vision blip-2"
        " hyperclovax_vision_v2 instructblip instructblipvideo"
    ),
)
UNSCALED_WITHIN = _words(
    "aya_vision cohere2_vision gemma3 granite_speech granite_speech_plus idefics2 idefics3 llava"
    " internvl llava_next llava_next_video llava_onevision mistral3 smolvlm video_llava vipllava"
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
    kind, names = recognised(tensors, model_type or _type_by_names(tensors, stack), stack)
    place = f"{path}, for a model {kind.name}"
    entries = _entries(kind, place, in_file, settings)
    value = kind.with_defaults(path, entries, type_in_file)
    table = names.get(OUTPUT_TABLE)
    # As in the library: two tables that differ are not tied, whatever config.json says.
    if table and value["tie_word_embeddings"] and tensors.are_equal(table, names[TOKENS]):
        del names[OUTPUT_TABLE]
    shapes = shapes_of(tensors, names)
    where = f"settings and {place}"
    options, rotary, bias = call_with_named_errors(
        where, kind.describe, value, shapes, stack or STACKS[0]
    )
    options["output"] = _output_within(outer, options["output"])
    dtype = tensors.entry(names[TOKENS]).dtype
    options["param_dtype"] = DTYPES.get(dtype, jnp.dtype("float32"))
    config = call_with_named_errors(where, EmbedderConfig, **options)
    parameters = parameters_of(where, config, rotary, bias)
    # An output layer that the config does not have is not read, and an offset that the file does
    # not have is zeros. (In a file that `save_embedder` wrote, a missing offset is damage.)
    stored = {name: tensor for name, tensor in names.items() if name in parameters}
    check_tensors(tensors, stored, parameters, may_lack=OFFSETS)
    params = read_parameters(tensors, stored, parameters)
    return PretrainedInput(config, params, rotary, bias, stored)


def _output_within(outer: str | None, output: OutputLayer | str) -> OutputLayer | str:
    """The output layer of a text model inside a model of the type `outer`, or why there is none."""
    if isinstance(output, str) or outer in SCALED_WITHIN:
        return output
    plain = OutputLayer(output.tied, output.bias)
    if output == plain or outer in UNSCALED_WITHIN:
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
    tensors: Tensors, model_type: Any, stack: str | None
) -> tuple[Architecture, dict[str, str]]:
    """The architecture of a checkpoint, with the tensors of its input and output layers.

    Args:
        tensors: the tensors of the checkpoint.
        model_type: from settings or config.json, or None.
        stack: "encoder", "decoder", or None.
    """
    kind, side = by_model_type(model_type), stack or STACKS[0]
    where = tensors.path
    if kind is None:
        want = f"that of a known model, from settings or a config.json beside {where}"
        got = f"{short_repr(model_type)}; {_advice(tensors, side)}"
        raise arguments.value_error("model_type", want, got)
    found = matches([kind], tensors.files, side)
    if not found:
        want = f"the tensors of a model {kind.name}, or {_by_hand(tensors, {})}"
        if matches([kind], tensors.files, STACKS[1]):
            want = f"the encoder of {kind.name}; pass stack='decoder' for its decoder"
        raise arguments.value_error(where, want, tensors.listed())
    if len(found) > 1:
        want = f"one model {kind.name} in a file (or load one with config and names)"
        got = short_repr([match.prefix for match in found])
        raise arguments.value_error(where, want, f"those under {got}")
    if not kind.has_stacks:
        arguments.check_left_out("stack", stack, f"{kind.name} has one stack")
    _, prefix, names = found[0]
    for tensor, reason in kind.refused.items():
        if prefix + tensor.format(stack=side) in tensors.files:
            raise arguments.value_error(where, f"an input layer like that of {kind.name}", reason)
    names |= _output_names(kind, prefix, tensors.files)
    if unread := _unread(kind, prefix, side, tensors.files.keys() - names.values()):
        want = f"an input layer like that of {kind.name} (or load it with config and names)"
        raise arguments.value_error(where, want, f"also {unread[0]}, which is not read")
    return kind, names


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


def _advice(tensors: Tensors, stack: str) -> str:
    """What a model of an unknown type may be loaded as."""
    fitting = []
    for match in matches(ARCHITECTURES, tensors.files, stack):
        shapes = shapes_of(tensors, match.names)
        widths = {shapes[name][-1] for name in shapes.keys() - {BIAS, WIDEN_OFFSET}}
        if len(widths) == 1:
            fitting.append(match)
    if not fitting:
        return f"load it {_by_hand(tensors, {})}, which has {tensors.listed()}"
    kind, _, names = max(fitting, key=lambda match: (match.kind.has_stacks, len(match.names)))
    return (
        f"the tensors fit a model {kind.name}: pass settings={{'model_type': {kind.name!r}}} if it "
        f"computes the same, or load it {_by_hand(tensors, names)}"
    )


def _by_hand(tensors: Tensors, names: Mapping[str, str]) -> str:
    """The call that loads these tensors without a row, for a model without scale.

    Without names, it is for the largest table whose name may be that of tokens.
    """
    if not names:
        shapes = {name: tensors.entry(name).shape for name in tensors.files if TABLE.match(name)}
        tables = [name for name, shape in shapes.items() if len(shape) == 2]
        if not tables:
            return BY_HAND
        names = {TOKENS: max(tables, key=lambda name: shapes[name])}
    own = {name.removeprefix(ROOT): tensor for name, tensor in names.items() if name != BIAS}
    shapes = shapes_of(tensors, names)
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


def _output_names(kind: Architecture, prefix: str, files: Collection[str]) -> dict[str, str]:
    """The tensors of the output layer, beside those of the input layer or further out."""
    outer = [prefix]
    while outer[-1]:
        outer.append(re.sub(r"[^.]*\.$", "", outer[-1]))
    heads = [start + head for start in outer for head in kind.head.split()]
    biases = [f"{head}.bias" for head in heads] + [start + LOGITS_BIAS for start in outer]
    tables = [f"{head}.weight" for head in heads]
    return _first_present({OUTPUT_TABLE: tables, OUTPUT_BIAS: biases}, files)
