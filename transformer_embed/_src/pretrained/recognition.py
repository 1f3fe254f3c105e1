"""Which model a file holds: by its type, by names of tensors, or an error that says what to try."""

import pathlib
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.architecture import (
    OUTPUT_TABLE,
    STACKS,
    TOKENS,
    Architecture,
    Options,
)
from transformer_embed._src.pretrained.architectures import by_model_type, is_known_outside
from transformer_embed._src.pretrained.files import ADAPTER, Tensors

# Not a ready call: neither a table's name nor its config.json says how its tokens are scaled.
BY_HAND = "load any table with config and names"
# Tensors that may stand beside that table: its siblings, outside of numbered layers, and a bias of
# T5 that is not the first layer's. Not buffers, second streams, or what only attention or the end
# of the model reads.
BESIDE = re.compile(
    r".*\.(Local)?SelfAttention\.relative|(?!.*(\b\d+\b|_ids$|inv_freq|entity|visual|vision|image|audio|patch_|embed_global|embedding_norm|"
    r"embedding_projection|rel_embeddings|(^|\.)pos_embed))"
    r"(embeddings\.|((encoder|decoder)\.)?[^.]*"
    r"(emb|pos_|posit|rel_|relative|token_type|wte|wpe|project_in))"
)
# What peft adds to a module outside of numbered layers.
ADAPTED = re.compile(
    r"((?!\d+\.)[^.]+\.)*(base_layer|lora_\w+|modules_to_save|original_module|token_adapter|"
    r"prompt_encoder)\."
)


class Published(NamedTuple):
    """The files of a published model.

    Args:
        tensors: of the checkpoint.
        side: the stack that is read.
        prefix: how the names of the tensors of the part that was asked for may begin.
        path: of config.json.
        entries: of config.json, those of the text model.
        settings: those of the caller, which go first, without the type.
        model_type: of the text model, as config.json says.
        kind: what the registry says of the type in settings, or else of that one.
        outer: the type of the whole model, if the text model is a part of it.
        part: the path of the part that the caller chose, or None.
        length: of the longest text, or None: not said.
    """

    tensors: Tensors
    side: str
    prefix: str
    path: pathlib.Path
    entries: Options
    settings: Options
    model_type: Any
    kind: Architecture
    outer: str | None
    part: str | None
    length: int | None

    @property
    def place(self) -> str:
        """What an error about entries of config.json is to blame."""
        return f"{self.path}, for a model {self.kind.type}"


def open_published(
    path: pathlib.Path,
    whole: Options,
    tensors: Tensors,
    settings: Options | None,
    stack: str | None,
    length: int | None,
    part: str | None,
) -> Published:
    """A model's tensors, with the entries of its config.json."""
    side = arguments.choice("stack", STACKS[0] if stack is None else stack, STACKS)
    outside, entries = _part(path, whole, part)
    # Qwen 2.5-Omni's thinker_config describes tensors that begin with "thinker.".
    prefix = part.partition(".")[0].removesuffix("_config") + "." if part else ""
    model_type = entries.get("model_type") or outside.get("model_type")
    outer = None if entries is outside else str(outside.get("model_type"))
    if isinstance(is_tied := outside.get("tie_word_embeddings"), bool):
        # The output layer is the whole model's.
        entries = {**entries, "tie_word_embeddings": is_tied}
    if isinstance(attention := entries.get("attn_config"), Mapping):
        # MPT and DBRX say some entries there; what stands outside goes first.
        entries = {**attention, **entries}
    if outer == "paligemma":
        # Its caller says where a prompt ends, within which tokens see all.
        entries = {**entries, "use_bidirectional_attention": None}
    settings = dict(settings or {})
    type_name = settings.pop("model_type", None) or model_type
    kind = by_model_type(type_name)
    if kind is None:
        want = f"that of a known model, from settings or {path}"
        got = f"{type_name!r}; {BY_HAND} ({tensors.listed()})"
        raise arguments.value_error("model_type", want, got)
    if not kind.has_stacks:
        arguments.check_left_out("stack", stack, f"{kind.type} has one stack")
    if part is None and outer is not None and not is_known_outside(outer):
        message = (
            f"{path}: the model type {outer!r} is not known, so what was read is its text_config, "
            f"a model {kind.type} (part='text_config' says that this is meant)"
        )
        # The caller of load_embedder or of load_config.
        warnings.warn(message, stacklevel=3)
    return Published(
        tensors=tensors,
        side=side,
        prefix=prefix,
        path=path,
        entries=entries,
        settings=settings,
        model_type=model_type,
        kind=kind,
        outer=outer,
        part=part,
        length=length,
    )


def _part(path: pathlib.Path, whole: Options, part: str | None) -> tuple[Options, Options]:
    """The entries of a text model, after those of the model around it.

    A config.json of several models has them apart; an empty `text_config` says nothing.
    """
    if part is None:
        text = whole.get("text_config")
        return whole, text if text and isinstance(text, Mapping) else whole
    outside, entries = whole, whole
    for name in part.split("."):
        outside, entries = entries, entries.get(name)
        if not isinstance(entries, Mapping):
            parts = [each for each, value in outside.items() if isinstance(value, Mapping)]
            raise arguments.value_error(f"part {part!r}", f"of {path}, one of {parts}", repr(name))
    return outside, entries


def recognised(file: Published, *, is_tied: bool) -> tuple[str, dict[str, str]]:
    """Returns the prefix of a model's tensors, and each parameter's tensor.

    A tied model may keep its table under the name of the output layer alone. The table is then in
    this tensor, and the output layer has none of its own.
    """
    tensors, files, kind = file.tensors, file.tensors.files, file.kind
    for name in filter(ADAPTED.match, sorted(files)):
        raise arguments.value_error(tensors.path, "a whole model", f"{name}, of {ADAPTER}")
    tables = [f"{module}.weight" for module in kind.tokens.format(stack=file.side).split()]
    # Several names of a table may have one prefix.
    prefixes = {
        name.removesuffix(end) for end in tables for name in files if f".{name}".endswith(f".{end}")
    }
    if not prefixes and is_tied and not kind.has_stacks:
        return _tied_to_head(file)
    prefixes = {prefix for prefix in prefixes if prefix.startswith(file.prefix)} or prefixes
    # A layer that predicts further tokens, as DeepSeek V3 has, has the table once more.
    outside = [prefix for prefix in prefixes if not re.search(r"\b\d+\.", prefix)]
    matches = {
        prefix: names
        for prefix in sorted(outside or prefixes)
        if (names := kind.tensors(files, file.side, prefix))
    }
    if len(matches) != 1:
        side = f" (its {file.side}; `stack` says which)" if kind.has_stacks else ""
        want = f"the tensors of one model {kind.type}{side}, or {BY_HAND}"
        under = f"those under {[*matches]} (`part` chooses)"
        missing = "" if prefixes else f" ({tables[0]} is missing)"
        got = under if matches else tensors.listed() + missing
        raise arguments.value_error(tensors.path, want, got)
    ((prefix, names),) = matches.items()
    # An index may name an output table that no shard has, because it is the token table.
    if is_tied and OUTPUT_TABLE in names and not tensors.is_stored(names[OUTPUT_TABLE]):
        del names[OUTPUT_TABLE]
    for tensor in names.values():
        # Those of a quantized model, which has scales beside them, are refused for their dtypes.
        tensors.entry(tensor)
    _check_read(file, prefix, {*names.values()})
    return prefix, names


def _tied_to_head(file: Published) -> tuple[str, dict[str, str]]:
    """Returns the prefix and the tensors of a tied model whose table is under the head's name."""
    tensors, kind = file.tensors, file.kind
    # The numbered layers lie where the table would, or one stack below it.
    layers = {
        match[1] for name in tensors.files if (match := re.match(r"(\D*?)[^.]+\.\d+\.", name))
    }
    table = kind.tokens.split()[0]
    stack = table.removesuffix(table.rpartition(".")[2])
    prefixes = sorted({layer.removesuffix(stack) for layer in layers})
    for prefix in (*prefixes, ""):
        files = {*tensors.files, f"{prefix}{table}.weight"}
        names = kind.tensors(files, file.side, prefix)
        if OUTPUT_TABLE in names:
            names[TOKENS] = names.pop(OUTPUT_TABLE)
            for tensor in names.values():
                tensors.entry(tensor)
            _check_read(file, prefix, {*names.values()})
            return prefix, names
    want = f"the tensors of one model {kind.type}, or {BY_HAND}"
    got = f"{tensors.listed()} ({table}.weight is missing)"
    raise arguments.value_error(tensors.path, want, got)


def _check_read(file: Published, prefix: str, read: set[str]) -> None:
    """Raises a ValueError for a tensor beside these that a layer of this kind does not have."""
    tensors, kind = file.tensors, file.kind
    left_out = {*kind.meaningless.split()}
    # A stack has the other one beside it.
    if (own := kind.tokens.format(stack=file.side).partition(".")[0]) in STACKS:
        left_out |= {*STACKS} - {own}
    for name in sorted({*tensors.files} - read):
        below = name.removeprefix(prefix)
        is_own = name.startswith(prefix) and not left_out & {*below.split(".")}
        if is_own and BESIDE.match(below):
            want = f"an input layer like that of {kind.type}, or {BY_HAND}"
            raise arguments.value_error(tensors.path, want, f"also {name}, which is not read")


def beside_head(file: Published, prefix: str, names: Mapping[str, str]) -> list[str]:
    """Returns the tensors around the text model, if the model around it is of an unknown type.

    A drafter, for example, has the text model of its target, but computes the input of the first
    layer and the logits with tensors of its own, which are beside the head.

    Raises:
        ValueError: there are some, and the caller did not name the part that is to be read.
    """
    if file.outer is None or is_known_outside(file.outer):
        return []
    # A head that the file leaves out would be outside of all parts.
    head = names.get(OUTPUT_TABLE, "")
    ends = (f"{module}.weight" for module in file.kind.head.split())
    level = next((head.removesuffix(end) for end in ends if head.endswith(end)), "")
    own = prefix.removeprefix(level).partition(".")[0]
    if not prefix.startswith(level) or not own:
        return []
    outside = {*file.tensors.files} - {*names.values()}
    beneath = {name: name.removeprefix(level) for name in outside if name.startswith(level)}
    # The text model is in one of the modules at this level.
    others = sorted(name for name, rest in beneath.items() if rest.partition(".")[0] != own)
    if others and file.part is None:
        want = (
            f"a known model around {file.kind.type} (part='text_config' reads the text model alone)"
        )
        got = f"{file.outer!r}, with {others[0]} beside the output layer"
        raise arguments.value_error(file.path, want, got)
    return others
