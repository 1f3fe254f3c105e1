"""The output layer of a published model, or why there is none."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from transformer_embed._src.layers.config import OutputConfig
from transformer_embed._src.pretrained.entries import Options
from transformer_embed._src.pretrained.layer_parts import OUTPUT_BIAS, OUTPUT_TABLE, STACKS, TOKENS
from transformer_embed._src.pretrained.published import Published
from transformer_embed._src.pretrained.registry import SCALED_WITHIN, UNSCALED_WITHIN

# The shape of each parameter's tensor, by the parameter's path. A vector has the shape (1, n), and
# leading axes are left out.
Shapes = Mapping[str, tuple[int, int]]


class FoundOutput(NamedTuple):
    """The output layer of a published model, or why there is none.

    Args:
        config: The output layer. If None, there is none that an `OutputConfig` can describe.
        reason: Why `config` is None, in words. If there is a config, None.
    """

    config: OutputConfig | None
    reason: str | None


def find_output_layer(published: Published, values: Options, shapes: Shapes) -> FoundOutput:
    """Returns the output layer that the entries and the shapes of the tensors describe."""
    output = _config(published, values, shapes)
    reason = _why_missing(published, values, shapes, output)
    # If there is a reason why an `OutputConfig` cannot describe the layer, no config is returned.
    config = None if reason else output
    return FoundOutput(config=config, reason=reason)


def _config(published: Published, values: Options, shapes: Shapes) -> OutputConfig:
    """Returns the output layer, as the text model or the model around it computes the logits."""
    output = OutputConfig(tied=_is_tied(values, shapes), bias=OUTPUT_BIAS in shapes)
    # A model around a text model may leave out what the text model does to its logits. The types of
    # these outer models are `UNSCALED_WITHIN`.
    if published.outer_type in UNSCALED_WITHIN.split():
        return output
    softcap = values["final_logit_softcapping"]
    return dataclasses.replace(output, softcap=softcap, scale=_scale(values, shapes))


def _is_tied(values: Options, shapes: Shapes) -> bool:
    """Returns whether the output layer has no table of its own."""
    return values["tie_word_embeddings"] and OUTPUT_TABLE not in shapes


def _scale(values: Options, shapes: Shapes) -> float:
    """Returns the number that multiplies the logits."""
    _, width = shapes[TOKENS]
    if values["dim_model_base"]:
        return values["dim_model_base"] / width
    # T5 scales logits only if they come from its table of tokens.
    if values["tie_word_embeddings"] and values["scale_decoder_outputs"]:
        return width**-0.5
    # Cohere multiplies logits, Granite divides them.
    return values["logit_scale"] / values["logits_scaling"]


def _why_missing(
    published: Published, values: Options, shapes: Shapes, output: OutputConfig
) -> str | None:
    """Returns why the output layer cannot be loaded, or None if it can be loaded."""
    model_type = published.model_type
    rows, width = shapes[TOKENS]
    if model_type.no_output:
        # This field of the type is a reason, in words.
        return model_type.no_output
    # `STACKS` is ("encoder", "decoder").
    encoder, decoder = STACKS
    is_encoder = model_type.has_stacks and published.stack == encoder
    # The output layer belongs to the decoder. The encoder has it only if the output layer is tied
    # to a table that both stacks share.
    stacks_share_table = values["share_encoder_decoder_embeddings"] is not False
    encoder_has_output = output.tied and stacks_share_table
    if is_encoder and not encoder_has_output:
        return f"it is the decoder's, which stack={decoder!r} loads"
    if not output.tied and OUTPUT_TABLE not in shapes:
        # A file that GPTQ quantized has no "lm_head.weight", but tensors of other names.
        return (
            "the file has no lm_head.weight (dequantize a quantized model first), and it is not "
            "tied to the table"
        )
    # An `OutputConfig` can only describe an output layer with the vocabulary and the width of the
    # token table.
    needed_shapes = {OUTPUT_TABLE: (rows, width), OUTPUT_BIAS: (1, rows)}
    for name, needed_shape in needed_shapes.items():
        if name in shapes and shapes[name] != needed_shape:
            return f"its shape is {list(shapes[name])}, not {list(needed_shape)}"
    if _outer_logits_may_differ(published, output):
        return f"{published.outer_type} may leave out the scale and softcap of its text model"
    return None


def _outer_logits_may_differ(published: Published, output: OutputConfig) -> bool:
    """Returns whether the model around a text model may compute other logits than this layer.

    This is so if the text model scales or bounds its logits, and it is not known that the outer
    model does the same.
    """
    changes_logits = output.scale != 1 or output.softcap is not None
    if published.outer_type is None or not changes_logits:
        return False
    return published.outer_type not in SCALED_WITHIN.split()
