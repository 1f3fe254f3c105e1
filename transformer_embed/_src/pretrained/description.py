"""What config.json and tensors say together: the description of a published model's layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.positions.schemes import Learned, PositionScheme
from transformer_embed._src.pretrained.entries import Options, count
from transformer_embed._src.pretrained.entry_values import entry_values
from transformer_embed._src.pretrained.files import call_with_named_errors
from transformer_embed._src.pretrained.layer_parts import (
    BIAS,
    NORM_SCALE,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    POSITIONS,
    STACKS,
    TENSORS,
    TOKEN_TYPES,
    TOKENS,
    WIDEN,
)
from transformer_embed._src.pretrained.layers import layers_of
from transformer_embed._src.pretrained.model_type import ModelType
from transformer_embed._src.pretrained.output_layer import Shapes, find_output_layer
from transformer_embed._src.pretrained.parameters import PretrainedInput
from transformer_embed._src.pretrained.published import Published
from transformer_embed._src.pretrained.recognition import (
    number_of_layers,
    recognised,
    tensors_beside_head,
)
from transformer_embed._src.pretrained.tensors import DTYPES


def describe_published(file: Published) -> PretrainedInput:
    """Returns all but the parameters of a published model."""
    tensors = file.tensors
    values = entry_values(file)
    model = recognised(file, is_tied=values["tie_word_embeddings"] is True)
    others = tensors_beside_head(file, model)
    names = model.names
    table = names.get(OUTPUT_TABLE)
    # As in transformers, two tables that differ are not tied, whatever config.json says.
    if table and values["tie_word_embeddings"] and tensors.are_equal(table, names[TOKENS]):
        del names[OUTPUT_TABLE]
    infos = {name: tensors.entry(tensor) for name, tensor in names.items()}
    shapes = {name: (1, 1, *info.shape)[-2:] for name, info in infos.items()}
    stack = file.side if file.row.has_stacks else ""
    depth = number_of_layers(tensors, model.prefix + stack)
    dtype = DTYPES[infos[TOKENS].dtype]
    pretrained = call_with_named_errors(
        f"settings and {file.place}", _described, file, values, shapes, dtype, depth
    )
    if others and pretrained.config.output is not None:
        config = dataclasses.replace(pretrained.config, output=None)
        reason = f"{file.outer} may compute its logits by {others[0]} too"
        pretrained = pretrained._replace(config=config, no_output=reason)
    if pretrained.config.output is None:
        # The tensors of an output layer that cannot be described are not read.
        names.pop(OUTPUT_TABLE, None)
        names.pop(OUTPUT_BIAS, None)
    return pretrained._replace(names=names)


def describe_config(file: Published) -> PretrainedInput:
    """Returns all that a config.json says, for tensors that are not there."""
    values = entry_values(file)
    entries = file.entries
    dtype = entries.get("dtype") or entries.get("torch_dtype") or "float32"

    def described() -> PretrainedInput:
        depth = count("num_hidden_layers", _depth(file, values))
        return _described(file, values, _shapes(file.row, values), dtype, depth)

    return call_with_named_errors(f"settings and {file.place}", described)


def _depth(file: Published, values: Options) -> Any:
    """Returns the number of layers that a config.json says, of the stack that is read."""
    of_stack = file.entries.get(f"{file.side}_layers") or file.entries.get(
        f"num_{file.side}_layers"
    )
    return of_stack or values["num_hidden_layers"] or len(values["layer_types"] or ())


def _shapes(row: ModelType, values: Options) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the parameters, as config.json says them."""
    may_lack = tuple(row.may_lack.split())
    width = "embedding_size" if row.widen else "hidden_size"
    # The entry that has the number of rows of each parameter. The norm is a vector.
    entries_of_rows = {
        TOKENS: _vocabulary(values),
        POSITIONS: "max_position_embeddings",
        TOKEN_TYPES: "type_vocab_size",
        NORM_SCALE: width,
        WIDEN: "hidden_size",
        BIAS: "relative_attention_num_buckets",
        OUTPUT_TABLE: _vocabulary(values),
    }
    shapes = {}
    for name, entry in entries_of_rows.items():
        part, _ = TENSORS[name]
        if not getattr(row, part) or values[entry] == 0:
            continue
        if name in (POSITIONS, NORM_SCALE) and name.endswith(may_lack):
            want = f"a checkpoint, since config.json does not say whether it has {name}"
            raise arguments.value_error(row.name, want, "none")
        columns = "num_attention_heads" if name == BIAS else width
        shapes[name] = count(entry, values[entry]), count(columns, values[columns])
    if values["tie_word_embeddings"]:
        del shapes[OUTPUT_TABLE]
    if WIDEN.endswith(may_lack) and values[width] == values["hidden_size"]:
        shapes.pop(WIDEN, None)
    return shapes


def _vocabulary(values: Options) -> str:
    """Returns the entry that has the size of the vocabulary, of which a decoder may have one."""
    has_own = values["side"] == STACKS[1] and values["decoder_vocab_size"]
    return "decoder_vocab_size" if has_own else "vocab_size"


# --- Parts of the layer.


def _described(
    file: Published, values: Options, shapes: Shapes, dtype: Any, depth: int
) -> PretrainedInput:
    """Returns the layer that the values of all entries and the tensors describe."""
    row = file.row
    if values["token_dropout"]:
        want = (
            "False, and embeddings multiplied by 0.88 / (1 - the share of <mask> in their row), "
            "those of <mask> by 0"
        )
        raise arguments.value_error("token_dropout", want, True)
    rows, width = shapes[TOKENS]
    d_model, _ = shapes.get(WIDEN, (width, rows))
    types, _ = shapes.get(TOKEN_TYPES, (0, width))
    sizes = {"hidden_size": d_model, "embedding_size": width, "type_vocab_size": types}
    sizes[_vocabulary(values)] = rows
    _check_sizes(values, sizes)
    output = find_output_layer(file, values, shapes)
    config = EmbedderConfig(
        rows,
        d_model,
        scheme=_scheme(row, values, shapes),
        scale=_scale(row, values),
        dropout_rate=values["dropout"],
        num_token_types=types or None,
        layer_norm_eps=values["layer_norm_eps"] if NORM_SCALE in shapes else None,
        embedding_width=width if WIDEN in shapes else None,
        output=output.config,
        param_dtype=dtype,
    )
    return PretrainedInput(
        config=config,
        params={},
        layers=layers_of(row, {**values, **sizes}, depth),
        bias=_bias(row, values, shapes),
        no_output=output.reason,
    )


def _check_sizes(values: Options, sizes: Mapping[str, int]) -> None:
    """Raises a ValueError if an entry and the tensors disagree on a size."""
    for name, size in sizes.items():
        if values[name] not in (None, size):
            want = f"{size}, as the tensors say (if they are right: settings={{{name!r}: {size}}})"
            raise arguments.value_error(name, want, values[name])


def _scale(row: ModelType, values: Options) -> Any:
    """Returns the scale of the tokens, which older files only say to be there or not."""
    scale = values.get(row.scale, row.scale)
    if isinstance(scale, bool):
        return "sqrt_d_model" if scale else 1.0
    return scale


def _scheme(row: ModelType, values: Options, shapes: Shapes) -> PositionScheme | None:
    """Returns the position scheme."""
    if row.sinusoids is None and POSITIONS not in shapes:
        return None
    start = row.start
    if isinstance(start, str):
        start = arguments.integer(start, values[start]) + 1
    pad_id = values["pad_token_id"]
    options: dict[str, Any] = {"start": start}
    if pad_id is not None:
        options |= {"at_padding": start - 1, "pad_id": pad_id}
    if row.sinusoids is not None:
        return dataclasses.replace(row.sinusoids, **options)
    max_len = values["max_position_embeddings"]
    # RoBERTa counts from its padding id, and config.json counts all rows of the table. The
    # config.json of OPT leaves out the rows before the first position.
    if max_len is not None and not isinstance(row.start, str):
        max_len += row.start
    # A table of another size than config.json says is refused later, by its shape.
    rows_of_table, _ = shapes[POSITIONS]
    return Learned(max_len or rows_of_table, **options)


def _bias(row: ModelType, values: Options, shapes: Shapes) -> Options | None:
    """Returns the arguments of `alibi_bias` or `RelativePositionBias`."""
    if row.has_alibi:
        heads = count("num_attention_heads", values["num_attention_heads"])
        return {"num_heads": heads, "causal": True, "max_bias": values["alibi_bias_max"]}
    if BIAS not in shapes:
        return None
    buckets, heads = shapes[BIAS]
    # Entries go before shapes, so that a tensor which disagrees is refused. T5's encoder looks
    # both ways.
    return {
        "num_heads": values["num_attention_heads"] or heads,
        "num_buckets": values["relative_attention_num_buckets"] or buckets,
        "max_distance": values["relative_attention_max_distance"],
        "causal": values["side"] == STACKS[1],
    }
