"""What config.json and tensors say together: the description of a published model's layer.

In this file, `values` has the checked value of each entry of config.json, by the names in `ENTRIES`
(see `entry_values`), and `shapes` has the shape of each parameter, by the parameter's path.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.layers.config import EmbedderConfig
from transformer_embed._src.positions.schemes import Learned, PositionScheme
from transformer_embed._src.pretrained.entries import Options, check_count
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
    find_layer_tensors,
    number_of_layers,
    tensors_beside_text_model,
)


def describe_published(published: Published) -> PretrainedInput:
    """Returns the input layer of a published checkpoint, without its parameters.

    Warns:
        UserWarning: config.json has entries that are not known. (`entry_values` warns.)
    """
    tensors = published.tensors
    # The value of each entry of config.json: from settings, from the file, or a default.
    values = entry_values(published)
    is_tied = values["tie_word_embeddings"]
    # The prefix of the model's tensor names, and the name of each parameter's tensor.
    layer_tensors = find_layer_tensors(published, is_tied=is_tied)
    # If a model of an unknown type is around the text model, it may compute its logits with these
    # tensors. Otherwise this list is empty.
    outer_tensors = tensors_beside_text_model(published, layer_tensors)
    # The name of each parameter's tensor, by the parameter's path.
    names = layer_tensors.names
    # A tied model may store a copy of its table for the output layer. The copy is not read. If the
    # two tables differ, they are not tied, whatever config.json says. This is as in transformers.
    has_two_tables = OUTPUT_TABLE in names
    if is_tied and has_two_tables and tensors.are_equal(names[OUTPUT_TABLE], names[TOKENS]):
        del names[OUTPUT_TABLE]
    shapes = {path: _as_matrix(tensors.entry(name).shape) for path, name in names.items()}
    # How the names of the numbered layers begin, such as "model.", or "model.decoder" for the
    # decoder of an encoder-decoder model.
    prefix_of_layers = layer_tensors.prefix
    if published.model_type.has_stacks:
        prefix_of_layers += published.stack
    layer_count = number_of_layers(tensors, prefix_of_layers)
    dtype = tensors.dtype(names[TOKENS])
    # This calls `_describe` with the arguments after it. An error in the call is about an entry of
    # settings or of config.json, so it names both.
    pretrained = call_with_named_errors(
        f"settings and {published.where}", _describe, published, values, shapes, dtype, layer_count
    )
    if outer_tensors and pretrained.config.output is not None:
        config = dataclasses.replace(pretrained.config, output=None)
        reason = f"{published.outer_type} may compute its logits by {outer_tensors[0]} too"
        pretrained = pretrained._replace(config=config, no_output=reason)
    if pretrained.config.output is None:
        # The tensors of an output layer that cannot be described are not read.
        names.pop(OUTPUT_TABLE, None)
        names.pop(OUTPUT_BIAS, None)
    return pretrained._replace(names=names)


def describe_config(published: Published) -> PretrainedInput:
    """Returns the input layer that a config.json describes, without any tensors.

    Warns:
        UserWarning: config.json has entries that are not known. (`entry_values` warns.)
    """
    # The value of each entry of config.json: from settings, from the file, or a default.
    values = entry_values(published)
    # This calls `_describe_without_tensors` with the arguments after it. An error in the call is
    # about an entry of settings or of config.json, so it names both.
    return call_with_named_errors(
        f"settings and {published.where}", _describe_without_tensors, published, values
    )


def _describe_without_tensors(published: Published, values: Options) -> PretrainedInput:
    """Returns the input layer, with the sizes and the dtype that config.json says."""
    dtype = published.entries.get("dtype") or published.entries.get("torch_dtype") or "float32"
    layer_count = check_count("num_hidden_layers", _layer_count_in_config(published, values))
    shapes = _shapes_in_config(published.model_type, values)
    return _describe(published, values, shapes, dtype, layer_count)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the last two axes of a shape, or (1, n) for a vector of length n."""
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


def _layer_count_in_config(published: Published, values: Options) -> Any:
    """Returns the number of layers that a config.json says, of the stack that is read."""
    # BART has "encoder_layers" and "decoder_layers", and T5 has "num_decoder_layers".
    entries = published.entries
    stack = published.stack
    layers_of_stack = entries.get(f"{stack}_layers") or entries.get(f"num_{stack}_layers")
    if layers_of_stack:
        return layers_of_stack
    return values["num_hidden_layers"] or len(values["layer_types"] or ())


def _shapes_in_config(model_type: ModelType, values: Options) -> dict[str, tuple[int, int]]:
    """Returns the shape of each parameter, as config.json says it.

    A vector of length n has the shape (1, n). config.json does not say whether there is an output
    bias, so the bias is left out.
    """
    # The entry that has the width of the tables. A linear layer may widen their rows.
    width_entry = "embedding_size" if model_type.widen else "hidden_size"
    vocabulary_entry = _entry_of_vocabulary(values)
    # For each matrix, by the path of the parameter: the entry that has the number of rows, and the
    # entry that has the number of columns.
    entries_of_shapes = {
        TOKENS: (vocabulary_entry, width_entry),
        POSITIONS: ("max_position_embeddings", width_entry),
        TOKEN_TYPES: ("type_vocab_size", width_entry),
        WIDEN: ("hidden_size", width_entry),
        BIAS: ("relative_attention_num_buckets", "num_attention_heads"),
        OUTPUT_TABLE: (vocabulary_entry, width_entry),
    }
    shapes = {}
    for parameter, (rows_entry, columns_entry) in entries_of_shapes.items():
        # A number of rows of 0 says that the model has no such table, for example no token types.
        if not _type_has(model_type, parameter) or values[rows_entry] == 0:
            continue
        # config.json does not say whether a model has learned positions. So this raises an error if
        # only some models of the type have them. (The same check of the norm is below.)
        if parameter == POSITIONS:
            _check_not_optional(model_type, parameter)
        rows = check_count(rows_entry, values[rows_entry])
        columns = check_count(columns_entry, values[columns_entry])
        shapes[parameter] = rows, columns
    if _type_has(model_type, NORM_SCALE):
        _check_not_optional(model_type, NORM_SCALE)
        _, width = shapes[TOKENS]
        shapes[NORM_SCALE] = 1, width
    if values["tie_word_embeddings"]:
        del shapes[OUTPUT_TABLE]
    # A type may leave out the linear layer if the table is already as wide as the model.
    table_is_wide_enough = values[width_entry] == values["hidden_size"]
    if _is_optional(model_type, WIDEN) and table_is_wide_enough:
        shapes.pop(WIDEN, None)
    return shapes


def _type_has(model_type: ModelType, parameter: str) -> bool:
    """Returns whether models of a type have a parameter, at least in some files."""
    # `TENSORS` has the field of the type with the modules of the parameter, such as "positions",
    # and the names of the tensor in these modules.
    field, _ = TENSORS[parameter]
    return getattr(model_type, field) != ""


def _is_optional(model_type: ModelType, parameter: str) -> bool:
    """Returns whether some models of a type have a parameter, and others do not."""
    ends_of_optional_paths = tuple(model_type.may_lack.split())
    return parameter.endswith(ends_of_optional_paths)


def _check_not_optional(model_type: ModelType, parameter: str) -> None:
    """Raises a ValueError for a parameter that only some models of a type have.

    Only the tensors of a checkpoint say whether such a model has the parameter.
    """
    if _is_optional(model_type, parameter):
        want = f"a checkpoint, since config.json does not say whether it has {parameter}"
        raise arguments.value_error(model_type.name, want, "none")


def _entry_of_vocabulary(values: Options) -> str:
    """Returns the name of the entry that has the size of the vocabulary.

    A decoder may have another vocabulary than the encoder (Marian).
    """
    # `STACKS` is ("encoder", "decoder").
    _, decoder = STACKS
    has_own_vocabulary = values["stack"] == decoder and values["decoder_vocab_size"]
    return "decoder_vocab_size" if has_own_vocabulary else "vocab_size"


# --- Parts of the layer.


def _describe(
    published: Published, values: Options, shapes: Shapes, dtype: Any, layer_count: int
) -> PretrainedInput:
    """Returns the input layer, without the parameters and the names of their tensors.

    Args:
        published: The files of the model, and what is known of its type.
        values: The values of all entries.
        shapes: The shape of each parameter, by the path of the parameter. A vector of length n has
            the shape (1, n).
        dtype: The dtype of the token table.
        layer_count: The number of layers that have tensors.
    """
    model_type = published.model_type
    if values["token_dropout"]:
        # An input layer of this package does not do this, so the message says how to do it (ESM).
        instead = (
            "embeddings multiplied by 0.88 / (1 - the share of <mask> in their row), "
            "those of <mask> by 0"
        )
        raise arguments.value_error("token_dropout", f"False, and {instead}", True)
    # `TOKENS`, `WIDEN` and so on are the paths of parameters. All shapes are (rows, columns).
    rows, table_width = shapes[TOKENS]
    # If a linear layer widens the vectors of the table, its tensor is [d_model, table_width].
    d_model = table_width
    if WIDEN in shapes:
        d_model, _ = shapes[WIDEN]
    token_types = 0
    if TOKEN_TYPES in shapes:
        token_types, _ = shapes[TOKEN_TYPES]
    sizes = {
        "hidden_size": d_model,
        "embedding_size": table_width,
        "type_vocab_size": token_types,
    }
    # "vocab_size", or "decoder_vocab_size" for a decoder with its own vocabulary.
    vocabulary_entry = _entry_of_vocabulary(values)
    sizes[vocabulary_entry] = rows
    # This raises an error if an entry of config.json says another size than the tensors.
    _check_sizes(values, sizes)
    # The output layer, or the reason why there is none.
    output = find_output_layer(published, values, shapes)
    config = EmbedderConfig(
        rows,
        d_model,
        scheme=_scheme(model_type, values, shapes),
        scale=_scale(model_type, values),
        dropout_rate=values["dropout"],
        num_token_types=token_types or None,
        layer_norm_eps=values["layer_norm_eps"] if NORM_SCALE in shapes else None,
        embedding_width=table_width if WIDEN in shapes else None,
        output=output.config,
        param_dtype=dtype,
    )
    return PretrainedInput(
        config=config,
        params={},
        layers=layers_of(model_type, {**values, **sizes}, layer_count),
        bias=_bias(model_type, values, shapes),
        no_output=output.reason,
    )


def _check_sizes(values: Options, sizes: Mapping[str, int]) -> None:
    """Raises a ValueError if an entry and the tensors disagree on a size."""
    for name, size in sizes.items():
        if values[name] not in (None, size):
            want = f"{size}, as the tensors say (if they are right: settings={{{name!r}: {size}}})"
            raise arguments.value_error(name, want, values[name])


def _scale(model_type: ModelType, values: Options) -> Any:
    """Returns the scale of the tokens, as `EmbedderConfig` takes it."""
    # `model_type.scale` is the scale, or the name of the entry that has the scale.
    scale = values.get(model_type.scale, model_type.scale)
    # A bool says whether tokens are scaled by the usual factor.
    if isinstance(scale, bool):
        return "sqrt_d_model" if scale else 1.0
    return scale


def _scheme(model_type: ModelType, values: Options, shapes: Shapes) -> PositionScheme | None:
    """Returns the position scheme, or None if no positions are added to tokens."""
    if model_type.sinusoids is None and POSITIONS not in shapes:
        return None
    max_len = values["max_position_embeddings"]
    if isinstance(model_type.start, str):
        # `start` is the name of the entry that has the id of padding. Positions start after this
        # id (RoBERTa), and config.json counts all rows of the table of positions.
        entry_with_padding_id = model_type.start
        padding_id = arguments.integer(entry_with_padding_id, values[entry_with_padding_id])
        first_position = padding_id + 1
    else:
        # Positions start at a fixed number (OPT has 2). `max_position_embeddings` does not count
        # the table rows before this number, so they are added.
        first_position = model_type.start
        max_len = None if max_len is None else max_len + first_position
    options: dict[str, Any] = {"start": first_position}
    pad_id = values["pad_token_id"]
    if pad_id is not None:
        # Padding tokens have the position before the first one.
        options["at_padding"] = first_position - 1
        options["pad_id"] = pad_id
    if model_type.sinusoids is not None:
        return dataclasses.replace(model_type.sinusoids, **options)
    # If config.json and the table differ in size, `check_tensors` later refuses the table.
    rows_of_table, _ = shapes[POSITIONS]
    return Learned(max_len or rows_of_table, **options)


def _bias(model_type: ModelType, values: Options, shapes: Shapes) -> Options | None:
    """Returns the keyword arguments of `alibi_bias` or `RelativePositionBias`, or None."""
    if model_type.has_alibi:
        heads = check_count("num_attention_heads", values["num_attention_heads"])
        return {"num_heads": heads, "causal": True, "max_bias": values["alibi_bias_max"]}
    if BIAS not in shapes:
        return None
    buckets, heads = shapes[BIAS]
    # `STACKS` is ("encoder", "decoder").
    _, decoder = STACKS
    # A size in config.json goes before the shape of the tensor, so that `check_tensors` finds a
    # tensor of another shape. T5's decoder is causal, and T5's encoder is bidirectional.
    return {
        "num_heads": values["num_attention_heads"] or heads,
        "num_buckets": values["relative_attention_num_buckets"] or buckets,
        "max_distance": values["relative_attention_max_distance"],
        "causal": values["stack"] == decoder,
    }
