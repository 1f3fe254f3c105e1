"""Which tensors of a file are a model's input and output layer, or an error that says why."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.layer_parts import OUTPUT_TABLE, STACKS, TOKENS
from transformer_embed._src.pretrained.other_formats import ADAPTER
from transformer_embed._src.pretrained.published import BY_HAND, Published
from transformer_embed._src.pretrained.registry import is_known_outside
from transformer_embed._src.pretrained.tensors import Tensors

# A tensor that may belong to the input layer: beside the token table, outside of numbered layers,
# with a name of positions or embeddings; or a bias of T5 that is not the first layer's. Buffers,
# second streams, and what only attention or the end of the model reads do not belong to it.
BESIDE_TABLE = re.compile(
    r".*\.(Local)?SelfAttention\.relative|"
    r"(?!.*(\b\d+\b|_ids$|inv_freq|entity|visual|vision|image|audio|patch_|embed_global|"
    r"embedding_norm|embedding_projection|rel_embeddings|(^|\.)pos_embed))"
    r"(embeddings\.|((encoder|decoder)\.)?[^.]*"
    r"(emb|pos_|posit|rel_|relative|token_type|wte|wpe|project_in))"
)
# What peft adds to a module outside of numbered layers.
ADAPTED = re.compile(
    r"((?!\d+\.)[^.]+\.)*(base_layer|lora_\w+|modules_to_save|original_module|token_adapter|"
    r"prompt_encoder)\."
)
# A tensor of a numbered layer: the modules before the number, but for the last one.
IN_LAYER = re.compile(r"(\D*?)[^.]+\.\d+\.")


class Recognised(NamedTuple):
    """The tensors of a model's input and output layer.

    Args:
        prefix: How the names of the model's tensors begin.
        names: The tensor of each parameter.
    """

    prefix: str
    names: dict[str, str]


def recognised(file: Published, *, is_tied: bool) -> Recognised:
    """Returns the tensors of a model.

    A tied model may keep its table under the name of the output layer alone. The table is then in
    this tensor, and the output layer has none of its own.

    Raises:
        ValueError: there is no such model in the file, or more than one; or its input layer has
            tensors that are not read.
    """
    tensors = file.tensors
    for name in filter(ADAPTED.match, sorted(tensors.files)):
        raise arguments.value_error(tensors.path, "a whole model", f"{name}, of {ADAPTER}")
    matches = _matches(file)
    if not matches and is_tied and not file.row.has_stacks:
        matches = _matches_by_head(file)
    if len(matches) != 1:
        raise _not_one_model(file, matches)
    ((prefix, names),) = matches.items()
    # An index may name an output table that no shard has, because it is the token table.
    if is_tied and OUTPUT_TABLE in names and not tensors.is_stored(names[OUTPUT_TABLE]):
        del names[OUTPUT_TABLE]
    # A quantized model, which has scales beside its tensors, is refused for its dtypes first.
    for tensor in names.values():
        tensors.entry(tensor)
    _check_read(file, prefix, {*names.values()})
    return Recognised(prefix, names)


def _matches(file: Published) -> dict[str, dict[str, str]]:
    """Returns the tensors below each prefix that has all that a model of this type needs."""
    # Several names of a table may have one prefix.
    prefixes = {
        name.removesuffix(end)
        for end in _tables(file)
        for name in file.tensors.files
        if f".{name}".endswith(f".{end}")
    }
    of_part = {prefix for prefix in prefixes if prefix.startswith(file.prefix)}
    prefixes = of_part or prefixes
    # A layer that predicts further tokens, as DeepSeek V3 has, has the table once more.
    outside_layers = {prefix for prefix in prefixes if not re.search(r"\b\d+\.", prefix)}
    matches = {}
    for prefix in sorted(outside_layers or prefixes):
        names = file.row.tensors(file.tensors.files, file.side, prefix)
        if names:
            matches[prefix] = names
    return matches


def _matches_by_head(file: Published) -> dict[str, dict[str, str]]:
    """Returns the tensors of a tied model whose table is under the head's name."""
    table = file.row.tokens.split()[0]
    # The numbered layers lie where the table would, or one stack below it.
    stack = table.removesuffix(table.rpartition(".")[2])
    prefixes = {
        found[1].removesuffix(stack) for found in map(IN_LAYER.match, file.tensors.files) if found
    }
    for prefix in (*sorted(prefixes), ""):
        files = {*file.tensors.files, f"{prefix}{table}.weight"}
        names = file.row.tensors(files, file.side, prefix)
        if OUTPUT_TABLE in names:
            names[TOKENS] = names.pop(OUTPUT_TABLE)
            return {prefix: names}
    return {}


def _tables(file: Published) -> list[str]:
    """Returns the tensors that may be the token table, below a prefix."""
    return [f"{module}.weight" for module in file.row.table_modules(file.side)]


def _not_one_model(file: Published, matches: Mapping[str, Mapping[str, str]]) -> ValueError:
    """Returns the error for a file with no model of this type, or with several."""
    row, tensors = file.row, file.tensors
    side = f" (its {file.side}; `stack` says which)" if row.has_stacks else ""
    want = f"the tensors of one model {row.name}{side}, or {BY_HAND}"
    if matches:
        got = f"those under {[*matches]} (`part` chooses)"
        return arguments.value_error(tensors.path, want, got)
    tables = _tables(file)
    has_table = any(f".{name}".endswith(f".{end}") for end in tables for name in tensors.files)
    missing = "" if has_table else f" ({tables[0]} is missing)"
    return arguments.value_error(tensors.path, want, tensors.listed() + missing)


def _check_read(file: Published, prefix: str, read: set[str]) -> None:
    """Raises a ValueError for a tensor of the input layer that this type does not have."""
    row, tensors = file.row, file.tensors
    left_out = {*row.no_effect.split()}
    # A stack has the other one beside it.
    first_module = row.tokens.format(stack=file.side).partition(".")[0]
    if first_module in STACKS:
        left_out |= {*STACKS} - {first_module}
    for name in sorted({*tensors.files} - read):
        below = name.removeprefix(prefix)
        is_own = name.startswith(prefix) and not left_out & {*below.split(".")}
        if is_own and BESIDE_TABLE.match(below):
            want = f"an input layer like that of {row.name}, or {BY_HAND}"
            raise arguments.value_error(tensors.path, want, f"also {name}, which is not read")


def number_of_layers(tensors: Tensors, start: str) -> int:
    """Returns how many numbered layers a checkpoint has below the start of a name."""
    pattern = re.compile(rf"{re.escape(start)}\D*?\b(\d+)\.")
    numbers = [int(found[1]) for found in map(pattern.match, tensors.files) if found]
    return 1 + max(numbers, default=-1)


def tensors_beside_head(file: Published, model: Recognised) -> list[str]:
    """Returns the tensors around the text model, if the model around it is of an unknown type.

    A drafter, for example, has the text model of its target, but computes the input of the first
    layer and the logits with tensors of its own, which are beside the head.

    Raises:
        ValueError: there are some, and the caller did not name the part that is to be read.
    """
    if file.outer is None or is_known_outside(file.outer):
        return []
    level = _level_of_head(file, model.names)
    # The text model is in one of the modules at this level.
    own_module = model.prefix.removeprefix(level).partition(".")[0]
    if not model.prefix.startswith(level) or not own_module:
        return []
    others = []
    for name in sorted({*file.tensors.files} - {*model.names.values()}):
        module = name.removeprefix(level).partition(".")[0]
        if name.startswith(level) and module != own_module:
            others.append(name)
    if others and file.part is None:
        want = (
            f"a known model around {file.row.name} (part='text_config' reads the text model alone)"
        )
        got = f"{file.outer!r}, with {others[0]} beside the output layer"
        raise arguments.value_error(file.path, want, got)
    return others


def _level_of_head(file: Published, names: Mapping[str, str]) -> str:
    """Returns the prefix of the head; a head that is left out would be outside of all parts."""
    head = names.get(OUTPUT_TABLE, "")
    for module in file.row.head.split():
        if head.endswith(f"{module}.weight"):
            return head.removesuffix(f"{module}.weight")
    return ""
