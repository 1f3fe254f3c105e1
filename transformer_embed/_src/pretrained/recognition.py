"""Which model a file holds: by its type, by names of tensors, or an error that says what to try."""

import re
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.pretrained.architecture import (
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    STACKS,
    TOKENS,
    Architecture,
)
from transformer_embed._src.pretrained.architectures import by_model_type
from transformer_embed._src.pretrained.messages import short_repr
from transformer_embed._src.pretrained.published import Match, Published

# Not a ready call: neither a table's name nor its config.json says how its tokens are scaled.
BY_HAND = "load any table with config and names"
WORDS = "emb|pos_|posit|rel_|relative|token_type|wte|wpe|project_in"
# Tensors that may stand beside that table: its siblings, outside of numbered layers, and a bias of
# T5 that is not the first layer's. Not buffers, second streams, or what only attention or the end
# of the model reads.
BESIDE = re.compile(
    r".*\.(Local)?SelfAttention\.relative|(?!.*(\b\d+\b|_ids$|inv_freq|entity|visual|vision|image|audio|patch_|embed_global|embedding_norm|"
    r"embedding_projection|rel_embeddings|(^|\.)pos_embed))"
    rf"(embeddings\.|((encoder|decoder)\.)?[^.]*({WORDS}))"
)
# Tables of tokens of one name; a file that anyone wrote may have as many as tensors.
MOST_PREFIXES = 100


def recognised(file: Published, model_type: Any) -> Match:
    """The row of a checkpoint, with the tensors of its input and output layers.

    The type is that of settings or of config.json.
    """
    tensors, where = file.tensors, file.tensors.path
    model_type = model_type or file.model_type
    kind = by_model_type(model_type)
    if kind is None:
        want = f"that of a known model, from settings or a config.json beside {where}"
        got = f"{short_repr(model_type)}; {BY_HAND} ({tensors.listed()})"
        raise arguments.value_error("model_type", want, got)
    found = matches(kind, file)
    if not found:
        want = f"the tensors of a model {kind.name}, or {BY_HAND}"
        if matches(kind, file._replace(stack=STACKS[1])):
            want = f"the encoder of {kind.name}; pass stack='decoder' for its decoder"
        raise arguments.value_error(where, want, tensors.listed())
    if len(found) > 1:
        want = f"one model {kind.name} in a file ({BY_HAND})"
        got = short_repr([match.prefix for match in found])
        raise arguments.value_error(where, want, f"those under {got}")
    if not kind.has_stacks:
        arguments.check_left_out("stack", file.stack, f"{kind.name} has one stack")
    if reason := _reason(found[0], file):
        want = f"an input layer like that of {kind.name}, or {BY_HAND}"
        raise arguments.value_error(where, want, reason)
    return found[0]


def matches(kind: Architecture, file: Published) -> list[Match]:
    """The prefixes below which a file has the tensors of a row."""
    files, found = file.tensors.files, []
    ends = kind.tensors(file.side)[TOKENS]
    tables = [
        name.removesuffix(end) for name in files for end in ends if f".{name}".endswith(f".{end}")
    ]
    if len(tables) > MOST_PREFIXES:
        want = f"at most {MOST_PREFIXES} tensors of the name of a table, {' or '.join(ends)}"
        raise arguments.value_error(file.tensors.path, want, len(tables))
    may_lack = (*kind.may_lack.split(), OUTPUT_TABLE, OUTPUT_BIAS)
    # Several names of a table may have one prefix.
    for prefix in dict.fromkeys(tables):
        tensors = kind.tensors(file.side, prefix)
        present = {name: [end for end in ends if end in files] for name, ends in tensors.items()}
        names = {name: ends[0] for name, ends in present.items() if ends}
        missing = tensors.keys() - names.keys()
        if all(name.endswith(may_lack) for name in missing):
            found.append(Match(kind, prefix, names))
    return found


def _reason(match: Match, file: Published) -> str:
    """Why the input layer is not like that of the row, as its tensors show; "": it is."""
    kind, prefix, names = match
    files = file.tensors.files
    own = kind.tokens.format(stack=file.side).partition(".")[0]
    # Sinusoids may be stored; a stack has the other one beside it.
    left_out = {*kind.meaningless.split()}
    if kind.sinusoids is not None:
        left_out.add("embed_positions")
    if own in STACKS:
        left_out |= {*STACKS} - {own}
    read = {*names.values()}
    for name in sorted(files):
        below = name.removeprefix(prefix)
        is_own = name.startswith(prefix) and name not in read and not left_out & {*below.split(".")}
        if is_own and BESIDE.match(below):
            return f"also {name}, which is not read"
    return ""
