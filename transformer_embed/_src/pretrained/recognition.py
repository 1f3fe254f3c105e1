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

# Matches the name of a tensor that may belong to the input layer, without the prefix of the token
# table: outside of numbered layers, with a name of positions or embeddings; or T5's bias in another
# layer than the first. The second part leaves out buffers, tensors for images and other inputs, and
# tensors that only attention or the end of the model reads.
BESIDE_TABLE = re.compile(
    r".*\.(Local)?SelfAttention\.relative|"
    r"(?!.*(\b\d+\b|_ids$|inv_freq|entity|visual|vision|image|audio|patch_|embed_global|"
    r"embedding_norm|embedding_projection|rel_embeddings|(^|\.)pos_embed))"
    r"(embeddings\.|((encoder|decoder)\.)?[^.]*"
    r"(emb|pos_|posit|rel_|relative|token_type|wte|wpe|project_in))"
)
# Matches a name with what peft adds to a module outside of numbered layers.
ADAPTED = re.compile(
    r"((?!\d+\.)[^.]+\.)*(base_layer|lora_\w+|modules_to_save|original_module|token_adapter|"
    r"prompt_encoder)\."
)
# Matches the name of a tensor in a numbered layer, such as "model.layers.0.q.weight". The group is
# what comes before the list of layers: "model.".
IN_LAYER = re.compile(r"(\D*?)[^.]+\.\d+\.")


class Recognised(NamedTuple):
    """The tensors of a model's input and output layer.

    Args:
        prefix: How the names of the model's tensors begin.
        names: The name of each parameter's tensor, by the parameter's path.
    """

    prefix: str
    names: dict[str, str]


def recognised(file: Published, *, is_tied: bool) -> Recognised:
    """Returns the tensors of the input and the output layer of a model.

    If a tied model has its table under the name of the output layer alone, this tensor is the token
    table, and the output layer has no tensor.

    Raises:
        ValueError: there is no such model in the file, or more than one; or its input layer has
            tensors that are not read.
    """
    tensors = file.tensors
    for name in sorted(tensors.files):
        if ADAPTED.match(name):
            raise arguments.value_error(tensors.path, "a whole model", f"{name}, of {ADAPTER}")
    matches = _names_by_prefix(file)
    if not matches and is_tied and not file.model_type.has_stacks:
        matches = _names_by_prefix_of_head(file)
    if len(matches) != 1:
        raise _not_one_model(file, matches)
    ((prefix, names),) = matches.items()
    # An index may name an output table that no shard has, because it is the token table.
    if is_tied and OUTPUT_TABLE in names and not tensors.is_stored(names[OUTPUT_TABLE]):
        del names[OUTPUT_TABLE]
    # `entry` refuses the dtypes of a quantized model. This comes before `_check_read`, which would
    # refuse the model for its scales.
    for tensor in names.values():
        tensors.entry(tensor)
    _check_read(file, prefix, {*names.values()})
    return Recognised(prefix=prefix, names=names)


def _names_by_prefix(file: Published) -> dict[str, dict[str, str]]:
    """Returns the names of the parameters' tensors, by the prefix that these names have.

    There is an entry for each prefix below which the file has all tensors that a model of this type
    needs: none, if the file has another model; several, if it has several models.
    """
    # A set, because a file may have several of the names of a table below one prefix.
    prefixes = set()
    for table in _names_of_table(file):
        for name in file.tensors.files:
            if f".{name}".endswith(f".{table}"):
                prefixes.add(name.removesuffix(table))
    prefixes_of_part = {prefix for prefix in prefixes if prefix.startswith(file.prefix)}
    prefixes = prefixes_of_part or prefixes
    # DeepSeek V3 has a copy of the table in a numbered layer, which predicts further tokens.
    outside_layers = {prefix for prefix in prefixes if not re.search(r"\b\d+\.", prefix)}
    matches = {}
    for prefix in sorted(outside_layers or prefixes):
        names = file.model_type.tensors(file.tensors.files, file.side, prefix)
        if names:
            matches[prefix] = names
    return matches


def _names_by_prefix_of_head(file: Published) -> dict[str, dict[str, str]]:
    """Returns what `_names_by_prefix` does, if the token table is under the head's name alone."""
    table_module = file.model_type.tokens.split()[0]
    # The names of the numbered layers say the prefix. They begin as the table's name would, with
    # the stack that the table is in: "decoder." for "decoder.embed_tokens".
    stack = table_module.removesuffix(table_module.rpartition(".")[2])
    prefixes = set()
    for name in file.tensors.files:
        in_layer = IN_LAYER.match(name)
        if in_layer:
            prefixes.add(in_layer[1].removesuffix(stack))
    for prefix in (*sorted(prefixes), ""):
        files_with_table = {*file.tensors.files, f"{prefix}{table_module}.weight"}
        names = file.model_type.tensors(files_with_table, file.side, prefix)
        if OUTPUT_TABLE in names:
            names[TOKENS] = names.pop(OUTPUT_TABLE)
            return {prefix: names}
    return {}


def _names_of_table(file: Published) -> list[str]:
    """Returns the names that the tensor of the token table may have, without a prefix."""
    return [f"{module}.weight" for module in file.model_type.table_modules(file.side)]


def _not_one_model(file: Published, matches: Mapping[str, Mapping[str, str]]) -> ValueError:
    """Returns the error for a file with no model of this type, or with several."""
    model_type, tensors = file.model_type, file.tensors
    side = f" (its {file.side}; `stack` says which)" if model_type.has_stacks else ""
    want = f"the tensors of one model {model_type.name}{side}, or {BY_HAND}"
    if matches:
        got = f"those under {[*matches]} (`part` chooses)"
        return arguments.value_error(tensors.path, want, got)
    tables = _names_of_table(file)
    has_table = any(f".{name}".endswith(f".{table}") for table in tables for name in tensors.files)
    missing = "" if has_table else f" ({tables[0]} is missing)"
    return arguments.value_error(tensors.path, want, tensors.listed() + missing)


def _check_read(file: Published, prefix: str, names_read: set[str]) -> None:
    """Raises a ValueError for a tensor of the input layer that is not among `names_read`."""
    model_type, tensors = file.model_type, file.tensors
    ignored_modules = {*model_type.no_effect.split()}
    # The tensors of the other stack are beside the ones of this stack.
    first_module, _, _ = model_type.tokens.format(stack=file.side).partition(".")
    if first_module in STACKS:
        ignored_modules |= {*STACKS} - {first_module}
    for name in sorted({*tensors.files} - names_read):
        below = name.removeprefix(prefix)
        is_ignored = not name.startswith(prefix) or ignored_modules & {*below.split(".")}
        if not is_ignored and BESIDE_TABLE.match(below):
            want = f"an input layer like that of {model_type.name}, or {BY_HAND}"
            raise arguments.value_error(tensors.path, want, f"also {name}, which is not read")


def number_of_layers(tensors: Tensors, prefix: str) -> int:
    """Returns how many numbered layers have tensors whose names begin with the prefix.

    Layers count from 0, so this is one more than the highest number.
    """
    first_number = re.compile(rf"{re.escape(prefix)}\D*?\b(\d+)\.")
    highest = -1
    for name in tensors.files:
        match = first_number.match(name)
        if match:
            highest = max(highest, int(match[1]))
    return highest + 1


def tensors_beside_head(file: Published, model: Recognised) -> list[str]:
    """Returns the names of the tensors beside the head, if the outer model's type is not known.

    The outer model is the one around a text model. A drafter, for example, has the text model of
    its target, but computes the input of the first layer and the logits with tensors of its own.

    Raises:
        ValueError: there are such tensors, and the caller did not name the part to read.
    """
    if file.outer is None or is_known_outside(file.outer):
        return []
    prefix_of_head = _prefix_of_head(file, model.names)
    # The head is beside the module that has the text model: "model" for "model.embed_tokens".
    text_module, _, _ = model.prefix.removeprefix(prefix_of_head).partition(".")
    if not model.prefix.startswith(prefix_of_head) or not text_module:
        return []
    others = []
    for name in sorted({*file.tensors.files} - {*model.names.values()}):
        module, _, _ = name.removeprefix(prefix_of_head).partition(".")
        if name.startswith(prefix_of_head) and module != text_module:
            others.append(name)
    if others and file.part is None:
        want = (
            f"a known model around {file.model_type.name} "
            "(part='text_config' reads the text model alone)"
        )
        got = f"{file.outer!r}, with {others[0]} beside the output layer"
        raise arguments.value_error(file.path, want, got)
    return others


def _prefix_of_head(file: Published, names: Mapping[str, str]) -> str:
    """Returns how the name of the head's tensor begins: "" for "lm_head.weight".

    A tied head may have no tensor. It would be outside of all modules, so its prefix is "".
    """
    head = names.get(OUTPUT_TABLE, "")
    for module in file.model_type.head.split():
        if head.endswith(f"{module}.weight"):
            return head.removesuffix(f"{module}.weight")
    return ""
