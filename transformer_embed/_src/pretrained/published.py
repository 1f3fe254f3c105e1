"""The files of a published model: its tensors, and what config.json says of them."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_embed._src.pretrained.architecture import STACKS, Architecture
from transformer_embed._src.pretrained.files import Tensors, read_json


class Published(NamedTuple):
    """The files of a published model.

    Args:
        tensors: of the checkpoint.
        stack: "encoder", "decoder", or None: not said.
        path: of config.json.
        entries: of config.json, those of the text model.
        model_type: of the text model, as config.json says.
        outer: the type of the whole model, if the text model is a part of it.
        length: of the longest text, or None: not said.
    """

    tensors: Tensors
    stack: str | None = None
    path: pathlib.Path = pathlib.Path()
    entries: Mapping[str, Any] = {}
    model_type: Any = None
    outer: str | None = None
    length: int | None = None

    @property
    def side(self) -> str:
        """The stack that is read."""
        return self.stack or STACKS[0]


class Match(NamedTuple):
    """A row whose tensors a file has below a prefix, and the tensor name for each parameter."""

    kind: Architecture
    prefix: str
    names: dict[str, str]


def open_published(tensors: Tensors, stack: str | None, length: int | None) -> Published:
    """The files of a published model, with the entries of the config.json beside the tensors."""
    path = tensors.path.parent / "config.json"
    # A link that leads nowhere is an error, not a file that is missing.
    whole = read_json(path) if os.path.lexists(path) else {}
    # A config.json of several models has the text model's own; an empty one says nothing.
    part = whole.get("text_config")
    entries = part if part and isinstance(part, dict) else whole
    model_type = entries.get("model_type") or whole.get("model_type")
    outer = None if entries is whole else str(whole.get("model_type"))
    if isinstance(is_tied := whole.get("tie_word_embeddings"), bool):
        # The output layer is the whole model's.
        entries = entries | {"tie_word_embeddings": is_tied}
    if outer == "paligemma":
        # Its caller says where a prompt ends, within which tokens see all.
        entries = entries | {"use_bidirectional_attention": None}
    return Published(tensors, stack, path, entries, model_type, outer, length)
