"""Which tensors of a file are a model's input and output layer, or an error that says why."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.layer_parts import OUTPUT_TABLE, STACKS, TOKENS
from transformer_embed._src.pretrained.other_formats import ADAPTER
from transformer_embed._src.pretrained.published import BY_HAND, Published
from transformer_embed._src.pretrained.registry import is_known_outer_type
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
# Matches the name of a tensor that peft added outside of numbered layers, such as
# "model.embed_tokens.lora_A.weight". An adapter may then change the input or the output layer.
PEFT_TENSOR = re.compile(
    r"((?!\d+\.)[^.]+\.)*(base_layer|lora_\w+|modules_to_save|original_module|token_adapter|"
    r"prompt_encoder)\."
)
# Matches the name of a tensor in a numbered layer, such as "model.layers.0.q.weight". The group is
# what comes before the list of layers: "model.".
IN_LAYER = re.compile(r"(\D*?)[^.]+\.\d+\.")


class LayerTensors(NamedTuple):
    """The tensors of a model's input and output layer.

    Args:
        prefix: How the names of the model's tensors begin.
        names: The name of each parameter's tensor, by the parameter's path.
    """

    prefix: str
    names: dict[str, str]


def find_layer_tensors(published: Published, *, is_tied: bool) -> LayerTensors:
    """Finds the tensors of the input layer and the output layer of a model.

    A tied model may store its one table under the name of the output layer only. This tensor is
    then returned as the token table.

    Args:
        published: The files of the model, and what is known of its type.
        is_tied: Whether config.json says that the output layer uses the token table.

    Raises:
        ValueError: there is no such model in the file, or more than one; or its input layer has
            tensors that are not read.
    """
    tensors = published.tensors
    for name in sorted(tensors.files):
        if PEFT_TENSOR.match(name):
            raise arguments.value_error(tensors.path, "a whole model", f"{name}, of {ADAPTER}")
    matches = _names_by_prefix(published)
    has_one_stack = not published.model_type.has_stacks
    if not matches and is_tied and has_one_stack:
        matches = _names_by_prefix_of_head(published)
    if len(matches) != 1:
        raise _not_one_model(published, matches)
    (prefix,) = matches
    names = matches[prefix]
    # The index file of a tied model may name an output table that no shard has.
    if is_tied and OUTPUT_TABLE in names and not tensors.is_stored(names[OUTPUT_TABLE]):
        del names[OUTPUT_TABLE]
    # The dtypes of a quantized model are refused first, because this error says what to do. After
    # that, `_check_all_read` would refuse the model for the tensors of its quantization scales.
    for name in names.values():
        tensors.check_dtype(name)
    _check_all_read(published, prefix, {*names.values()})
    return LayerTensors(prefix=prefix, names=names)


def _names_by_prefix(published: Published) -> dict[str, dict[str, str]]:
    """Returns the tensor name of each parameter, for each model of this type in the file.

    The key of a model is the prefix of its tensor names, such as "model." for
    "model.embed_tokens.weight". The result is empty if no prefix has all tensors that this type
    needs.
    """
    # This is a set, because a file may have a table under several names below one prefix.
    prefixes = set()
    for table in _names_of_table(published):
        for name in published.tensors.files:
            if f".{name}".endswith(f".{table}"):
                prefixes.add(name.removesuffix(table))
    # If the caller chose a part, the prefixes of this part count, as far as the file has any.
    prefixes_of_part = {prefix for prefix in prefixes if prefix.startswith(published.prefix)}
    prefixes = prefixes_of_part or prefixes
    # DeepSeek V3 has a copy of the table in a numbered layer, which predicts further tokens. So
    # prefixes outside of numbered layers go first.
    outside_layers = {prefix for prefix in prefixes if not re.search(r"\b\d+\.", prefix)}
    matches = {}
    for prefix in sorted(outside_layers or prefixes):
        names = published.model_type.tensors(published.tensors.files, published.stack, prefix)
        if names:
            matches[prefix] = names
    return matches


def _names_by_prefix_of_head(published: Published) -> dict[str, dict[str, str]]:
    """Returns the tensor names as `_names_by_prefix` does, with the head's tensor as token table.

    The head is the output layer. A tied model may have its one table under the head's name.
    """
    table_module = published.model_type.tokens.split()[0]
    # The names of the numbered layers say the prefix. After the prefix comes the stack, as in the
    # name of the table: "decoder." for "decoder.embed_tokens".
    stack, dot, _ = table_module.rpartition(".")
    prefixes = set()
    for name in published.tensors.files:
        in_layer = IN_LAYER.match(name)
        if in_layer:
            before_layers = in_layer[1]
            prefixes.add(before_layers.removesuffix(stack + dot))
    for prefix in (*sorted(prefixes), ""):
        # The other parameters are found as if the file had a token table under this prefix.
        files_with_table = {*published.tensors.files, f"{prefix}{table_module}.weight"}
        names = published.model_type.tensors(files_with_table, published.stack, prefix)
        if OUTPUT_TABLE in names:
            names[TOKENS] = names.pop(OUTPUT_TABLE)
            return {prefix: names}
    return {}


def _names_of_table(published: Published) -> list[str]:
    """Returns the names that the token table's tensor may have below the prefix of the model."""
    return [f"{module}.weight" for module in published.model_type.table_modules(published.stack)]


def _not_one_model(published: Published, matches: Mapping[str, Mapping[str, str]]) -> ValueError:
    """Returns the error for a file with no model of this type, or with several."""
    model_type = published.model_type
    tensors = published.tensors
    which_stack = f" (its {published.stack}; `stack` says which)" if model_type.has_stacks else ""
    want = f"the tensors of one model {model_type.name}{which_stack}, or {BY_HAND}"
    if matches:
        got = f"those under {[*matches]} (`part` chooses)"
        return arguments.value_error(tensors.path, want, got)
    names_of_table = _names_of_table(published)
    # The name of a table is the end of the tensor's name, from a dot on.
    ends = tuple(f".{name}" for name in names_of_table)
    has_table = any(f".{name}".endswith(ends) for name in tensors.files)
    missing = "" if has_table else f" ({names_of_table[0]} is missing)"
    return arguments.value_error(tensors.path, want, tensors.listed() + missing)


def _check_all_read(published: Published, prefix: str, names_read: set[str]) -> None:
    """Raises a ValueError if a tensor of the input layer is not among `names_read`."""
    model_type = published.model_type
    tensors = published.tensors
    ignored_modules = {*model_type.no_effect.split()}
    # The tensors of the other stack are beside the ones of this stack.
    first_module, _, _ = model_type.tokens.format(stack=published.stack).partition(".")
    if first_module in STACKS:
        ignored_modules |= {*STACKS} - {first_module}
    for name in sorted({*tensors.files} - names_read):
        if not name.startswith(prefix):
            continue
        name_below_prefix = name.removeprefix(prefix)
        modules = {*name_below_prefix.split(".")}
        is_ignored = not modules.isdisjoint(ignored_modules)
        if not is_ignored and BESIDE_TABLE.match(name_below_prefix):
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


def tensors_beside_head(published: Published, model: LayerTensors) -> list[str]:
    """Returns the names of tensors with which an unknown outer model may compute its logits.

    The outer model is the one around a text model. A drafter, for example, has the text model of
    its target, but computes the input of the first layer and the logits with tensors of its own.
    These tensors are beside the head, the output layer. If the outer model's type is known, or
    there is no outer model, the result is empty.

    Raises:
        ValueError: there are such tensors, and the caller did not name the part to read.
    """
    if published.outer_type is None or is_known_outer_type(published.outer_type):
        return []
    prefix_of_head = _prefix_of_head(published, model.names)
    # The head is beside the module that has the text model: "model" for "model.embed_tokens".
    text_module, _, _ = model.prefix.removeprefix(prefix_of_head).partition(".")
    if not model.prefix.startswith(prefix_of_head) or not text_module:
        return []
    names_beside_head = []
    for name in sorted({*published.tensors.files} - {*model.names.values()}):
        module, _, _ = name.removeprefix(prefix_of_head).partition(".")
        if name.startswith(prefix_of_head) and module != text_module:
            names_beside_head.append(name)
    if names_beside_head and published.part is None:
        want = (
            f"a known model around {published.model_type.name} "
            "(part='text_config' reads the text model alone)"
        )
        got = f"{published.outer_type!r}, with {names_beside_head[0]} beside the output layer"
        raise arguments.value_error(published.path, want, got)
    return names_beside_head


def _prefix_of_head(published: Published, names: Mapping[str, str]) -> str:
    """Returns how the name of the head's tensor begins: "" for "lm_head.weight".

    A tied head may have no tensor. It would be outside of all modules, so its prefix is "".
    """
    head = names.get(OUTPUT_TABLE, "")
    for module in published.model_type.head.split():
        if head.endswith(f"{module}.weight"):
            return head.removesuffix(f"{module}.weight")
    return ""
