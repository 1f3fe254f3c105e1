"""`Published`: the files of a published model, and the part of config.json that describes it."""

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.entries import Options
from transformer_embed._src.pretrained.layer_parts import STACKS
from transformer_embed._src.pretrained.model_type import ModelType
from transformer_embed._src.pretrained.registry import is_known_outside, row_of
from transformer_embed._src.pretrained.tensors import Tensors


class Published(NamedTuple):
    """The files of a published model.

    Args:
        tensors: The tensors of the checkpoint.
        side: The stack that is read.
        prefix: How the names of the tensors of the part that was asked for may begin.
        path: The path of config.json.
        entries: The entries of config.json, of the text model.
        settings: The entries of the caller, which go first, without the type.
        model_type: The type of the text model, as config.json says.
        row: What the registry says of the type in settings, or else of `model_type`.
        outer: The type of the whole model, if the text model is a part of it.
        part: The path of the part that the caller chose, or None.
        length: The length of the longest text, or None if it was not said.
    """

    tensors: Tensors
    side: str
    prefix: str
    path: pathlib.Path
    entries: Options
    settings: Options
    model_type: Any
    row: ModelType
    outer: str | None
    part: str | None
    length: int | None

    @property
    def place(self) -> str:
        """What an error about entries of config.json is to blame."""
        return f"{self.path}, for a model {self.row.name}"


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
    """Returns a model's tensors, with the entries of its config.json.

    Raises:
        ValueError: the model type is not known, or the part is not there.

    Warns:
        UserWarning: the model around the text model is of an unknown type.
    """
    side = arguments.choice("stack", STACKS[0] if stack is None else stack, STACKS)
    outside, text = _part(path, whole, part)
    model_type = text.get("model_type") or outside.get("model_type")
    outer = None if text is outside else str(outside.get("model_type"))
    settings = dict(settings or {})
    row = _known_row(path, settings.pop("model_type", None) or model_type, tensors)
    if not row.has_stacks:
        arguments.check_left_out("stack", stack, f"{row.name} has one stack")
    if part is None and outer is not None and not is_known_outside(outer):
        message = (
            f"{path}: the model type {outer!r} is not known, so what was read is its text_config, "
            f"a model {row.name} (part='text_config' says that this is meant)"
        )
        # The line that is shown is the caller's of load_embedder or load_config.
        warnings.warn(message, stacklevel=3)
    return Published(
        tensors=tensors,
        side=side,
        prefix=_prefix_of_part(part),
        path=path,
        entries=_text_entries(outside, text, outer),
        settings=settings,
        model_type=model_type,
        row=row,
        outer=outer,
        part=part,
        length=length,
    )


def _known_row(path: pathlib.Path, model_type: Any, tensors: Tensors) -> ModelType:
    """Returns the row of a type, or raises an error that says how to load an unknown one."""
    row = row_of(model_type)
    if row is not None:
        return row
    want = f"the type of a known model, from settings or {path}"
    if not tensors.files:
        # `load_config` takes no names, because it reads no tensors.
        step = "make an EmbedderConfig yourself"
        raise arguments.value_error("model_type", want, f"{model_type!r}; {step}")
    got = f"{model_type!r}; {BY_HAND} ({tensors.listed()})"
    raise arguments.value_error("model_type", want, got)


# Neither the name of a table nor its config.json says how its tokens are scaled, so no call is
# made ready.
BY_HAND = "load any table with config and names"


def _prefix_of_part(part: str | None) -> str:
    """Returns how names of the part's tensors may begin.

    The thinker_config of Qwen 2.5-Omni describes tensors that begin with "thinker.".
    """
    if not part:
        return ""
    return part.partition(".")[0].removesuffix("_config") + "."


def _part(path: pathlib.Path, whole: Options, part: str | None) -> tuple[Options, Options]:
    """Returns the entries of the model around a text model, and the text model's entries.

    They are the same if the text model is the whole model. An empty `text_config` says nothing.
    """
    if part is None:
        text = whole.get("text_config")
        return whole, text if text and isinstance(text, Mapping) else whole
    outside, entries = whole, whole
    for name in part.split("."):
        outside, entries = entries, entries.get(name)
        if not isinstance(entries, Mapping):
            parts = [name for name, value in outside.items() if isinstance(value, Mapping)]
            raise arguments.value_error(f"part {part!r}", f"of {path}, one of {parts}", repr(name))
    return outside, entries


def _text_entries(outside: Options, text: Options, outer: str | None) -> Options:
    """Returns the text model's entries, and what the model around it says of it."""
    entries = dict(text)
    is_tied = outside.get("tie_word_embeddings")
    if isinstance(is_tied, bool):
        # The output layer is the whole model's.
        entries["tie_word_embeddings"] = is_tied
    attention = entries.get("attn_config")
    if isinstance(attention, Mapping):
        # MPT and DBRX say some entries there; what stands outside goes first.
        entries = {**attention, **entries}
    if outer == "paligemma":
        # Its caller says where a prompt ends, within which tokens see all.
        entries["use_bidirectional_attention"] = None
    return entries
