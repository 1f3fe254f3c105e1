"""Which tensors of a file are a model's input and output layer, or an error that says why.

The name of a tensor has these parts. In "model.decoder.embed_tokens.weight", "model." is the prefix
that all names of the model share, and "decoder.embed_tokens" is the module of the token table. In
"model.decoder.layers.0.fc1.weight", the numbered layer is "layers.0". The head is the output layer.
In a model around a text model, the head may be outside the text model: "lm_head.weight" is beside
"model.language_model.embed_tokens.weight".
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.layer_parts import OUTPUT_TABLE, STACKS, TOKENS
from transformer_embed._src.pretrained.model_type import ends_with_parts
from transformer_embed._src.pretrained.other_formats import ADAPTER
from transformer_embed._src.pretrained.published import ADVICE_FOR_UNKNOWN_TYPE, Published
from transformer_embed._src.pretrained.registry import is_known_outer_type
from transformer_embed._src.pretrained.tensors import Tensors

# Matches the name of a tensor, without the prefix of the model, that may belong to the input layer.
# There are two cases. The first line is T5's table of position biases in another layer than the
# first. The other lines are tensors outside of numbered layers whose names speak of embeddings or
# positions, such as "encoder.pos_emb.weight". The part in "(?!...)" leaves out numbered layers,
# buffers, tensors for images and other inputs, and tensors that only attention or the end of the
# model reads.
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
# Matches the name of a tensor in a numbered layer, such as "model.decoder.layers.0.q.weight". The
# group is what comes before the list of layers: "model.decoder.".
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
        ValueError: there is no such model in the file, or there are several. The input layer has
            tensors that are not read.
    """
    tensors = published.tensors
    for name in sorted(tensors.files):
        # peft adds tensors such as "model.embed_tokens.lora_A.weight" for an adapter. The error
        # says how to merge the adapter (`ADAPTER`).
        if PEFT_TENSOR.match(name):
            raise arguments.value_error(tensors.path, "a whole model", f"{name}, of {ADAPTER}")
    # For each model of this type in the file: the prefix, and the name of each parameter's tensor.
    matches = _names_by_prefix(published)
    # In a tied model, the one table may be stored under the name of the output layer, the head.
    # (`has_stacks` is True for encoder-decoder models.)
    head_may_be_table = is_tied and not published.model_type.has_stacks
    if not matches and head_may_be_table:
        matches = _names_with_head_as_table(published)
    if len(matches) != 1:
        raise _not_one_model(published, matches)
    (prefix,) = matches
    names = matches[prefix]
    # The index file of a tied model may name an output table that no shard has.
    if is_tied and OUTPUT_TABLE in names and not tensors.is_stored(names[OUTPUT_TABLE]):
        del names[OUTPUT_TABLE]
    # The dtypes are checked before `_check_all_read`. Both checks refuse a quantized model, and the
    # error about the dtype says what to do.
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
    # The token table may have several names in files of one type. If a file has two of them below
    # one prefix, the prefix is found twice, so this is a set.
    prefixes = set()
    for table_name in _names_of_table(published):
        for name in published.tensors.files:
            if ends_with_parts(name, table_name):
                prefixes.add(name.removesuffix(table_name))
    # If the caller chose a part of the file, only the prefixes in this part are kept, unless there
    # are none.
    prefixes_in_part = {prefix for prefix in prefixes if prefix.startswith(published.prefix)}
    if prefixes_in_part:
        prefixes = prefixes_in_part
    # DeepSeek V3 has a copy of the table in a numbered layer ("model.layers.61.embed_tokens") that
    # predicts further tokens. So prefixes with a number are left out, unless all have one.
    prefixes_outside_layers = {prefix for prefix in prefixes if not re.search(r"\b\d+\.", prefix)}
    if prefixes_outside_layers:
        prefixes = prefixes_outside_layers
    matches = {}
    for prefix in sorted(prefixes):
        names = published.model_type.tensors(published.tensors.files, published.stack, prefix)
        if names:
            matches[prefix] = names
    return matches


def _names_with_head_as_table(published: Published) -> dict[str, dict[str, str]]:
    """Returns the tensor names of a tied model that stores its one table under the head's name.

    The result has at most one model, in the form of `_names_by_prefix`. The token table is missing
    in the file, so the names of numbered layers say the prefix. For example, if the token table of
    this type is "decoder.embed_tokens", the tensor "model.decoder.layers.0.fc1.weight" says that
    the prefix is "model.".
    """
    # If this type has several names for the table, the first one does: no tensor of it is read.
    table_module, *_ = published.model_type.tokens.split()
    # "decoder." for "decoder.embed_tokens", or "" for "embed_tokens".
    around_table, dot, _ = table_module.rpartition(".")
    prefixes = set()
    for name in published.tensors.files:
        match = IN_LAYER.match(name)
        if match:
            before_layers = match[1]
            prefixes.add(before_layers.removesuffix(around_table + dot))
    for prefix in (*sorted(prefixes), ""):
        # `tensors` finds nothing without a token table, so the name of one is added here. Then the
        # head takes the place of the table.
        files_with_table = {*published.tensors.files, f"{prefix}{table_module}.weight"}
        names = published.model_type.tensors(files_with_table, published.stack, prefix)
        if OUTPUT_TABLE in names:
            names[TOKENS] = names.pop(OUTPUT_TABLE)
            return {prefix: names}
    return {}


def _names_of_table(published: Published) -> list[str]:
    """Returns the names of the token table without the prefix, such as "embed_tokens.weight"."""
    return [f"{module}.weight" for module in published.model_type.table_modules(published.stack)]


def _not_one_model(published: Published, matches: Mapping[str, Mapping[str, str]]) -> ValueError:
    """Returns the error for a file with no model of this type, or with several.

    The keys of `matches` are the prefixes of the models.
    """
    model_type = published.model_type
    tensors = published.tensors
    # For an encoder-decoder model: " (its encoder; `stack` says which)".
    which_stack = f" (its {published.stack}; `stack` says which)" if model_type.has_stacks else ""
    want = f"the tensors of one model {model_type.name}{which_stack}, or {ADVICE_FOR_UNKNOWN_TYPE}"
    if matches:
        prefixes = [*matches]
        got = f"those under {prefixes} (`part` chooses)"
        return arguments.value_error(tensors.path, want, got)
    names_of_table = _names_of_table(published)
    has_table = any(
        ends_with_parts(name, table_name) for table_name in names_of_table for name in tensors.files
    )
    missing = "" if has_table else f" ({names_of_table[0]} is missing)"
    return arguments.value_error(tensors.path, want, tensors.listed() + missing)


def _check_all_read(published: Published, prefix: str, names_read: set[str]) -> None:
    """Raises a ValueError if the input layer seems to have a tensor that is not in `names_read`.

    A tensor seems to belong to the input layer if `BESIDE_TABLE` matches the tensor's name.
    """
    model_type = published.model_type
    tensors = published.tensors
    # A tensor is ignored if one of these modules is in the tensor's name.
    ignored_modules = {*model_type.no_effect.split()}
    # If the token table is inside a stack, as "decoder.embed_tokens", the tensors of the other
    # stack, such as "encoder.embed_positions.weight", are ignored.
    table_module = model_type.tokens.format(stack=published.stack)
    module_around_table, _, _ = table_module.partition(".")
    # The two stacks are "encoder" and "decoder".
    if module_around_table in STACKS:
        ignored_modules.update(stack for stack in STACKS if stack != module_around_table)
    unread_names = {*tensors.files} - names_read
    for name in sorted(unread_names):
        if not name.startswith(prefix):
            continue
        name_below_prefix = name.removeprefix(prefix)
        modules = name_below_prefix.split(".")
        is_ignored = not ignored_modules.isdisjoint(modules)
        if not is_ignored and BESIDE_TABLE.match(name_below_prefix):
            want = f"an input layer like that of {model_type.name}, or {ADVICE_FOR_UNKNOWN_TYPE}"
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


def tensors_beside_text_model(published: Published, model: LayerTensors) -> list[str]:
    """Returns the names of tensors that an unknown outer model has beside its text model.

    An outer model is a model around a text model. If the type of the outer model is not known, it
    may compute its logits with these tensors. For example, a drafter has the tensors
    "model.embed_tokens.weight" and "lm_head.weight", as its target has, and "fc.weight". The text
    model is in the module "model", and "lm_head.weight" is the output layer, so the result is
    ["fc.weight"]. If the type of the outer model is known, or if there is no outer model, the
    result is empty.

    Raises:
        ValueError: there are such tensors, and the caller did not name the part to read.
    """
    if published.outer_type is None or is_known_outer_type(published.outer_type):
        return []
    # The names of the head and of the outer model's other tensors begin with this prefix: "" for
    # "lm_head.weight".
    outer_prefix = _prefix_of_head(published, model.names)
    # The head may be in a module that does not hold the text model. The result is then empty, too.
    if not model.prefix.startswith(outer_prefix):
        return []
    # The module of the text model, which is the first part of its prefix below the outer prefix:
    # "model" for the prefix "model.". It is "" if the head and the text model are in one module.
    prefix_below_outer = model.prefix.removeprefix(outer_prefix)
    text_module, _, _ = prefix_below_outer.partition(".")
    if not text_module:
        return []
    names_beside = []
    unread_names = {*published.tensors.files} - {*model.names.values()}
    for name in sorted(unread_names):
        if not name.startswith(outer_prefix):
            continue
        module, _, _ = name.removeprefix(outer_prefix).partition(".")
        if module != text_module:
            names_beside.append(name)
    if names_beside and published.part is None:
        want = (
            f"a known model around {published.model_type.name} "
            "(part='text_config' reads the text model alone)"
        )
        got = f"{published.outer_type!r}, with {names_beside[0]} beside the output layer"
        raise arguments.value_error(published.path, want, got)
    return names_beside


def _prefix_of_head(published: Published, names: Mapping[str, str]) -> str:
    """Returns how the name of the head's tensor begins: "" for "lm_head.weight".

    The head of a tied model may have no tensor. Such a head is taken to be outside of all modules,
    so the result is "".
    """
    head = names.get(OUTPUT_TABLE, "")
    for module in published.model_type.head.split():
        if head.endswith(f"{module}.weight"):
            return head.removesuffix(f"{module}.weight")
    return ""
