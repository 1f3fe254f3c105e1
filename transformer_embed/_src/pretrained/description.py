"""What config.json and tensors say together: the description of a published model's layer."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig, OutputConfig
from transformer_embed._src.positions.schemes import Learned, PositionScheme
from transformer_embed._src.pretrained import architectures, rope
from transformer_embed._src.pretrained.architecture import (
    BIAS,
    DEFAULTS,
    ENTRIES,
    HARMLESS,
    NORM_SCALE,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    POSITIONS,
    REQUIRED,
    STACKS,
    TENSORS,
    TOKEN_TYPES,
    TOKENS,
    WIDEN,
    Architecture,
    Options,
    as_scale,
    count,
)
from transformer_embed._src.pretrained.files import DTYPES, call_with_named_errors
from transformer_embed._src.pretrained.layers import layers_of
from transformer_embed._src.pretrained.parameters import PretrainedInput
from transformer_embed._src.pretrained.recognition import Published, beside_head, recognised

# The last two axes of each tensor; the first is 1 for a vector.
Shapes = Mapping[str, tuple[int, int]]


def describe(file: Published) -> PretrainedInput:
    """All but the parameters of a published model."""
    tensors, value = file.tensors, _values(file)
    prefix, names = recognised(file, is_tied=value["tie_word_embeddings"] is True)
    others = beside_head(file, prefix, names)
    table = names.get(OUTPUT_TABLE)
    # As in the library: two tables that differ are not tied, whatever config.json says.
    if table and value["tie_word_embeddings"] and tensors.are_equal(table, names[TOKENS]):
        del names[OUTPUT_TABLE]
    infos = {name: tensors.entry(tensor) for name, tensor in names.items()}
    shapes = {name: (1, 1, *info.shape)[-2:] for name, info in infos.items()}
    depth, dtype = number_of_layers(file, prefix), DTYPES[infos[TOKENS].dtype]
    pretrained = call_with_named_errors(
        f"settings and {file.place}", _described, file, value, shapes, dtype, depth
    )
    if others and pretrained.config.output is not None:
        reason = f"{file.outer} may compute its logits by {others[0]} too"
        config = dataclasses.replace(pretrained.config, output=None)
        pretrained = pretrained._replace(config=config, no_output=reason)
    if pretrained.config.output is None:
        # It is not read.
        names.pop(OUTPUT_TABLE, None)
        names.pop(OUTPUT_BIAS, None)
    return pretrained._replace(names=names)


def describe_config(file: Published) -> PretrainedInput:
    """All that a config.json says, for tensors that are not there."""
    value, entries = _values(file), file.entries
    depth = entries.get(f"{file.side}_layers") or entries.get(f"num_{file.side}_layers")
    dtype = entries.get("dtype") or entries.get("torch_dtype") or "float32"

    def described() -> PretrainedInput:
        layers = depth or value["num_hidden_layers"] or len(value["layer_types"] or ())
        layers = count("num_hidden_layers", layers)
        return _described(file, value, _shapes(file.kind, value), dtype, layers)

    return call_with_named_errors(f"settings and {file.place}", described)


def _shapes(kind: Architecture, value: Options) -> dict[str, tuple[int, int]]:
    """The shapes of the parameters, as config.json says them."""
    may_lack = tuple(kind.may_lack.split())
    width = "embedding_size" if kind.widen else "hidden_size"
    rows = {
        TOKENS: _vocabulary(value),
        POSITIONS: "max_position_embeddings",
        TOKEN_TYPES: "type_vocab_size",
        # A vector.
        NORM_SCALE: width,
        WIDEN: "hidden_size",
        BIAS: "relative_attention_num_buckets",
        OUTPUT_TABLE: _vocabulary(value),
    }
    shapes = {}
    for name, entry in rows.items():
        if not getattr(kind, TENSORS[name][0]) or value[entry] == 0:
            continue
        if name in (POSITIONS, NORM_SCALE) and name.endswith(may_lack):
            want = f"a checkpoint, since config.json does not say whether it has {name}"
            raise arguments.value_error(kind.type, want, "none")
        columns = "num_attention_heads" if name == BIAS else width
        shapes[name] = count(entry, value[entry]), count(columns, value[columns])
    if value["tie_word_embeddings"]:
        del shapes[OUTPUT_TABLE]
    if WIDEN.endswith(may_lack) and value[width] == value["hidden_size"]:
        shapes.pop(WIDEN, None)
    return shapes


def _vocabulary(value: Options) -> str:
    """The entry that has the vocabulary's size: Marian's decoder may have one of its own."""
    has_own = value["side"] == STACKS[1] and value["decoder_vocab_size"]
    return "decoder_vocab_size" if has_own else "vocab_size"


def number_of_layers(file: Published, prefix: str) -> int:
    """How many numbered layers a checkpoint has of the stack that is read."""
    start = prefix + (file.side if file.kind.has_stacks else "")
    pattern = re.compile(rf"{re.escape(start)}\D*?\b(\d+)\.")
    numbers = filter(None, map(pattern.match, file.tensors.files))
    return 1 + max((int(name[1]) for name in numbers), default=-1)


# --- Entries of config.json.


def read(kind: Architecture, entries: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked values of the entries of a config.json or `settings=`, and those not read."""
    unread, values = {**entries}, {}
    for entry, aliases in kind.names().items():
        candidates = [unread.pop(name) for name in aliases if name in unread]
        if candidates:
            # The model's own name goes first; null does not hide another name's value.
            values[entry] = next((value for value in candidates if value is not None), None)
    if kind.rotary:
        # Before the checks, which are of entries at the top level.
        values = rope.flat(kind, values)
    unread |= {entry: values.pop(entry) for entry in [*values] if entry not in kind.names()}
    for entry, value in values.items():
        if value is not None or entry in DEFAULTS:
            values[entry] = ENTRIES[entry](entry, value)
    return values, unread


def _entries(file: Published) -> dict[str, Any]:
    """The values of the entries that are read; settings go before those of config.json.

    Raises a ValueError for settings that are not read, and for entries of config.json whose names
    concern the layer, unless settings say that they are null.
    """
    kind = file.kind
    entries, unread = call_with_named_errors(file.place, read, kind, file.entries)
    overrides, unknown = call_with_named_errors("settings", read, kind, file.settings)
    # Null takes away an entry of config.json that is not read; there must be one of that name.
    unknown = [
        name
        for name, value in unknown.items()
        if not kind.ignores(name) and (value is not None or unread.pop(name, None) is None)
    ]
    if unknown:
        reads = ", ".join(aliases[0] for aliases in kind.names().values())
        want = f"entries that a model {kind.type} reads ({reads})"
        raise arguments.value_error("settings", want, ", ".join(map(repr, unknown)))
    concerned = {name: value for name, value in unread.items() if kind.concerns(name, value)}
    if concerned:
        want = (
            "no entry that concerns the layer and is not read (if they mean nothing here: "
            f"settings={dict.fromkeys(concerned)})"
        )
        got = ", ".join(f"{name}: {value!r}" for name, value in concerned.items())
        raise arguments.value_error(file.place, want, got)
    for *_, name in rope.LAYERS.values():
        if overrides.get(name):
            overrides[name] = rope.merged(entries.get(name) or {}, overrides[name])
    # What settings say inside a scaling goes before what config.json says beside it.
    length = overrides.get("rope_scaling", {}).get(rope.ORIGINAL)
    if length is not None:
        overrides.setdefault(rope.ORIGINAL, length)
    return entries | overrides


def _values(file: Published) -> dict[str, Any]:
    """The values of all entries; None means nothing. Raises for those that must be said."""
    kind, entries = file.kind, _entries(file)
    value = {entry: kind.default(entry) for entry in ENTRIES} | entries
    # If config.json does not name this type, its defaults may be another model's.
    known = entries.keys() | (ENTRIES if file.model_type == kind.type else HARMLESS.split())
    missing = [
        aliases[0]
        for entry, aliases in kind.names().items()
        if value[entry] is REQUIRED or (entry not in known and value[entry] is not None)
    ]
    if missing:
        names = ", ".join(sorted(missing))
        want = f"{names} of {kind.type}, from settings or a config.json of that model_type"
        raise arguments.value_error(file.path, want, f"model_type {file.model_type!r} there")
    return value | {"length": file.length, "side": file.side}


# --- Parts of the layer.


def _described(
    file: Published, value: Options, shapes: Shapes, dtype: Any, depth: int
) -> PretrainedInput:
    """The layer that the values of all entries and the tensors describe."""
    kind = file.kind
    if value["token_dropout"]:
        want = (
            "False, and embeddings multiplied by 0.88 / (1 - the share of <mask> in their row), "
            "those of <mask> by 0"
        )
        raise arguments.value_error("token_dropout", want, True)
    rows, width = shapes[TOKENS]
    d_model, _ = shapes.get(WIDEN, (width, rows))
    types, _ = shapes.get(TOKEN_TYPES, (0, width))
    sizes = {"hidden_size": d_model, "embedding_size": width, "type_vocab_size": types}
    sizes[_vocabulary(value)] = rows
    _check_sizes(value, sizes)
    output, no_output = _output(file, value, shapes)
    config = EmbedderConfig(
        rows,
        d_model,
        scheme=_scheme(kind, value, shapes),
        scale=as_scale(value.get(kind.scale, kind.scale)),
        dropout_rate=value["dropout"],
        num_token_types=types or None,
        layer_norm_eps=value["layer_norm_eps"] if NORM_SCALE in shapes else None,
        embedding_width=width if WIDEN in shapes else None,
        output=output,
        param_dtype=dtype,
    )
    layers = layers_of(kind, {**value, **sizes}, depth)
    bias = _bias(kind, value, shapes)
    return PretrainedInput(config, {}, layers, bias, no_output=no_output)


def _check_sizes(value: Options, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if value[name] not in (None, size):
            want = f"{size}, as the tensors say (if they are right: settings={{{name!r}: {size}}})"
            raise arguments.value_error(name, want, value[name])


def _scheme(kind: Architecture, value: Options, shapes: Shapes) -> PositionScheme | None:
    """The position scheme; a learned table has `start` more rows than config.json says."""
    if kind.sinusoids is None and POSITIONS not in shapes:
        return None
    start, pad_id = kind.start, value["pad_token_id"]
    rows = value["max_position_embeddings"]
    # RoBERTa counts from its padding id, and config.json counts all rows of the table; OPT's
    # config.json leaves out the rows before the first position.
    if isinstance(start, str):
        start = arguments.integer(start, value[start]) + 1
    elif rows is not None:
        rows += start
    padding: dict[str, Any] = {"start": start}
    if pad_id is not None:
        padding |= {"at_padding": start - 1, "pad_id": pad_id}
    if kind.sinusoids is not None:
        return dataclasses.replace(kind.sinusoids, **padding)
    # A table of another size than config.json says is refused later, by its shape.
    return Learned(rows or shapes[POSITIONS][0], **padding)


def _output(
    file: Published, value: Options, shapes: Shapes
) -> tuple[OutputConfig | None, str | None]:
    """The output layer, and why there is none."""
    kind, (rows, width) = file.kind, shapes[TOKENS]
    is_tied = value["tie_word_embeddings"] and OUTPUT_TABLE not in shapes
    is_the_decoders = not is_tied or value["share_encoder_decoder_embeddings"] is False
    # Cohere multiplies logits, Granite divides them.
    scale = value["logit_scale"] / value["logits_scaling"]
    # T5 scales them only if they come from its table of tokens.
    if value["tie_word_embeddings"] and value["scale_decoder_outputs"]:
        scale = width**-0.5
    if value["dim_model_base"]:
        scale = value["dim_model_base"] / width
    output = plain = OutputConfig(is_tied, OUTPUT_BIAS in shapes)
    # A model around a text model may leave out what the text model does to its logits.
    if file.outer not in architectures.UNSCALED_WITHIN.split():
        output = dataclasses.replace(plain, softcap=value["final_logit_softcapping"], scale=scale)
    # An `OutputConfig` has the vocabulary and the width of the table.
    fitting = {OUTPUT_TABLE: (rows, width), OUTPUT_BIAS: (1, rows)}
    wrong = [name for name, shape in fitting.items() if shapes.get(name, shape) != shape]
    if kind.no_output:
        reason = kind.no_output
    elif kind.has_stacks and file.side == STACKS[0] and is_the_decoders:
        reason = f"it is the decoder's, which stack={STACKS[1]!r} loads"
    elif not is_tied and OUTPUT_TABLE not in shapes:
        # GPTQ has other tensors in its place.
        reason = (
            "the file has no lm_head.weight (dequantize a quantized model first), and it is not "
            "tied to the table"
        )
    elif wrong:
        reason = f"its shape is {list(shapes[wrong[0]])}, not {list(fitting[wrong[0]])}"
    elif file.outer is None or output == plain or file.outer in architectures.SCALED_WITHIN.split():
        return output, None
    else:
        reason = f"{file.outer} may leave out the scale and softcap of its text model"
    return None, reason


def _bias(kind: Architecture, value: Options, shapes: Shapes) -> Options | None:
    """The arguments of `alibi_bias` or `RelativePositionBias`; T5's encoder looks both ways."""
    if kind.has_alibi:
        heads = count("num_attention_heads", value["num_attention_heads"])
        return {"num_heads": heads, "max_bias": value["alibi_bias_max"]}
    if BIAS not in shapes:
        return None
    buckets, heads = shapes[BIAS]
    return {
        # Entries go before shapes, so that a tensor which disagrees is refused.
        "num_heads": value["num_attention_heads"] or heads,
        "num_buckets": value["relative_attention_num_buckets"] or buckets,
        "max_distance": value["relative_attention_max_distance"],
        "causal": value["side"] == STACKS[1],
    }
