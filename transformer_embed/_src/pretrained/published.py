"""`Published`: the files of a published model, and the part of config.json that describes it."""

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.entries import Options
from transformer_embed._src.pretrained.layer_parts import STACKS
from transformer_embed._src.pretrained.model_type import ModelType
from transformer_embed._src.pretrained.registry import is_known_outer_type, model_type_or_none
from transformer_embed._src.pretrained.tensors import Tensors


class Published(NamedTuple):
    """The files of a published model.

    Args:
        tensors: The tensors of the checkpoint.
        stack: The stack that is read, "encoder" or "decoder". It is "encoder" for a model of one
            stack, too.
        prefix: How the tensor names of the caller's `part` begin, such as "thinker.". If there is
            no part, "".
        path: The path of config.json.
        entries: The entries of config.json for the text model.
        settings: The caller's `settings`, without the type. They override `entries`.
        type_in_config: The `model_type` of the text model in config.json, or None.
        model_type: What is known of the type that `settings` name, or else of `type_in_config`.
        outer_type: The type of the model around the text model, such as "llava". If the text model
            is the whole model, None.
        part: The caller's `part`, or None.
        length: The caller's `length`, or None.
    """

    tensors: Tensors
    stack: str
    prefix: str
    path: pathlib.Path
    entries: Options
    settings: Options
    type_in_config: Any
    model_type: ModelType
    outer_type: str | None
    part: str | None
    length: int | None

    @property
    def where(self) -> str:
        """Where the entries are, for errors: the path of config.json, and the type of the model."""
        return f"{self.path}, for a model {self.model_type.name}"


def open_published(
    path: pathlib.Path,
    whole: Options,
    tensors: Tensors,
    *,
    settings: Options | None,
    stack: str | None,
    length: int | None,
    part: str | None,
) -> Published:
    """Returns the files of a published model, and what is known of the model type.

    Args:
        path: The path of config.json, for errors.
        whole: All entries of config.json, or {} if there is no config.json.
        tensors: The tensors of the checkpoint.
        settings: The entries that override the entries of config.json, such as {"vocab_size": 9}.
        stack: The stack of an encoder-decoder model that the caller chose, or None.
        length: The length of the longest text, or None.
        part: The path in config.json of the text model that the caller chose, such as
            "thinker_config.text_config", or None.

    Raises:
        ValueError: the model type is not known, or the part is not there.

    Warns:
        UserWarning: the model around the text model is of an unknown type.
    """
    # The two stacks of an encoder-decoder model: "encoder" and "decoder".
    encoder, _ = STACKS
    stack_to_read = encoder if stack is None else arguments.choice("stack", stack, STACKS)
    outer_entries, text_entries = _outer_and_text_entries(path, whole, part)
    type_in_config = text_entries.get("model_type") or outer_entries.get("model_type")
    # If no model is around the text model, both names are for the same dict.
    is_whole_model = text_entries is outer_entries
    # The type of the model around the text model, such as "llava", or None.
    outer_type = None if is_whole_model else str(outer_entries.get("model_type"))
    settings = dict(settings or {})
    type_name = settings.pop("model_type", None) or type_in_config
    model_type = _known_model_type(path, type_name, tensors)
    if not model_type.has_stacks:
        arguments.check_left_out("stack", stack, f"{model_type.name} has one stack")
    if part is None and outer_type is not None and not is_known_outer_type(outer_type):
        message = (
            f"{path}: the model type {outer_type!r} is not known, so only its text_config was "
            f"read, a model {model_type.name} (if this is what you want: part='text_config')"
        )
        # The warning shows the line that called load_embedder or load_config.
        warnings.warn(message, stacklevel=3)
    return Published(
        tensors=tensors,
        stack=stack_to_read,
        prefix=_prefix_of_part(part),
        path=path,
        entries=_joined_entries(outer_entries, text_entries, outer_type),
        settings=settings,
        type_in_config=type_in_config,
        model_type=model_type,
        outer_type=outer_type,
        part=part,
        length=length,
    )


def _known_model_type(path: pathlib.Path, type_name: Any, tensors: Tensors) -> ModelType:
    """Returns a known type, or raises an error that says how to load a model of an unknown one."""
    model_type = model_type_or_none(type_name)
    if model_type is not None:
        return model_type
    want = f"the type of a known model, from settings or {path}"
    if not tensors.files:
        # `load_config` reads no tensors, so the caller cannot name any.
        got = f"{type_name!r}; make an EmbedderConfig yourself"
        raise arguments.value_error("model_type", want, got)
    # The advice is to pass a config and the names of the tensors, so the tensors are listed.
    got = f"{type_name!r}; {ADVICE_FOR_UNKNOWN_TYPE} ({tensors.listed()})"
    raise arguments.value_error("model_type", want, got)


# What to do with a model of an unknown type. This is no call with all arguments, because neither
# the name of a table nor config.json says how tokens are scaled.
ADVICE_FOR_UNKNOWN_TYPE = "load any table with config and names"


def _prefix_of_part(part: str | None) -> str:
    """Returns how the names of a part's tensors may begin.

    This is "thinker." for "thinker_config.text_config", and "" for None.
    """
    if not part:
        return ""
    outermost, _, _ = part.partition(".")
    return outermost.removesuffix("_config") + "."


def _outer_and_text_entries(
    path: pathlib.Path, whole: Options, part: str | None
) -> tuple[Options, Options]:
    """Returns two dicts: the entries of the model around a text model, and the text model's own.

    If config.json has no `text_config`, or an empty one, the text model is the whole model. Both
    results are then the same dict, `whole`.

    Args:
        path: The path of config.json, for errors.
        whole: All entries of config.json.
        part: The path of the JSON object with the text model's entries, such as
            "thinker_config.text_config". If None, `text_config` is read.
    """
    if part is None:
        text_config = whole.get("text_config")
        if text_config and isinstance(text_config, Mapping):
            return whole, text_config
        return whole, whole
    # Each name of the path leads from an object to an object inside it.
    outer_entries = whole
    entries: Any = whole
    for name in part.split("."):
        outer_entries = entries
        entries = outer_entries.get(name)
        if not isinstance(entries, Mapping):
            parts = [key for key, value in outer_entries.items() if isinstance(value, Mapping)]
            want = f"of {path}, one of {parts}"
            raise arguments.value_error(f"part {part!r}", want, repr(name))
    return outer_entries, entries


def _joined_entries(
    outer_entries: Options, text_entries: Options, outer_type: str | None
) -> Options:
    """Returns the entries of the text model, with entries of the outer model that concern it."""
    entries = dict(text_entries)
    is_tied = outer_entries.get("tie_word_embeddings")
    if isinstance(is_tied, bool):
        # The output layer is a part of the outer model.
        entries["tie_word_embeddings"] = is_tied
    attention = entries.get("attn_config")
    if isinstance(attention, Mapping):
        # MPT and DBRX have some entries in this object. An entry beside the object overrides the
        # same entry inside.
        entries = {**attention, **entries}
    if outer_type == "paligemma":
        # In PaliGemma, the tokens of a prompt see each other, and only the caller knows where the
        # prompt ends. So the masks are causal, whatever the entry says.
        entries["use_bidirectional_attention"] = None
    return entries
