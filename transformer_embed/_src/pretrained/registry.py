"""The registry of published models: a `ModelType` for each type, and the models around text models.

The names of types and tensors, and the defaults of entries, are as in transformers.
"""

import difflib
from typing import Any

from transformer_embed._src import arguments
from transformer_embed._src.pretrained import (
    decoder_types,
    encoder_types,
    llama_types,
    seq2seq_types,
)
from transformer_embed._src.pretrained.model_type import ModelType

MODEL_TYPES: dict[str, ModelType] = (
    encoder_types.ENCODER_TYPES
    | seq2seq_types.SEQ2SEQ_TYPES
    | decoder_types.DECODER_TYPES
    | llama_types.LLAMA_TYPES
)

# Models around a text model that scale and bound logits as the text model alone does.
SCALED_WITHIN = (
    "paligemma gemma3n gemma4 gemma4_unified granite_docling granite4_vision "
    "hyperclovax_vision_v2 blip-2 instructblip instructblipvideo"
)
# Models around a text model that do not scale or bound logits, although the text model alone does.
UNSCALED_WITHIN = (
    "aya_vision cohere2_vision gemma3 granite_speech granite_speech_plus idefics2 idefics3 "
    "internvl llava llava_next llava_next_video llava_onevision mistral3 smolvlm video_llava "
    "vipllava"
)
# Other known models around a text model. Their logits were not compared, or the text model neither
# scales nor bounds logits.
OTHERS_AROUND = (
    "aimv2 align altclip apertus1p5 aria audioflamingo3 blip bridgetower chinese_clip clap clip "
    "clipseg cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid embedding_gemma2 emu3 "
    "exaone4_5 flava fuyu glm46v glm4v glm4v_moe glm_image glm_ocr glmasr glmga got_ocr2 groupvit "
    "hunyuan_vl janus jev kimi_k25 lfm2_vl lighton_ocr llama4 metaclip_2 minicpm_ocr minicpmv4_6 "
    "minicpmv4_7 mllama modernvbert moss_transcribe_diarize musicflamingo nemotron_h_omni omniasr "
    "ovis2 owlv2 owlvit paddleocr_vl pe_audio perception_lm pp_chart2table qianfan_ocr "
    "qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr "
    "qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe sam3 shieldgemma2 siglip siglip2 unlimited_ocr "
    "video_llama_3 vision-text-dual-encoder voxtral voxtral_realtime xclip"
)


def is_known_outer_type(type_name: str) -> bool:
    """Returns whether a type of models around a text model is known.

    If the model around the text model has no type in config.json, `type_name` is "None". The result
    is then True.
    """
    # A config.json may leave out the outer type, which then is the text "None".
    if type_name == str(None) or type_name in MODEL_TYPES:
        return True
    # Each of these is a text of type names, with spaces between them.
    for names in (SCALED_WITHIN, UNSCALED_WITHIN, OTHERS_AROUND):
        if type_name in names.split():
            return True
    return False


def model_type_or_none(type_name: Any) -> ModelType | None:
    """Returns what is known of the type with this name, or None if there is no such type."""
    if not isinstance(type_name, str) or type_name not in MODEL_TYPES:
        return None
    return MODEL_TYPES[type_name]._replace(name=type_name)


def find_model_type(name: str) -> ModelType:
    """Returns what this package knows about a type of published models, such as "llama".

    The result shows which tensors and which config.json entries belong to the input layer of a
    published model. It also shows the default of each entry, which is used if config.json leaves
    the entry out. `python -m transformer_embed inspect --model-type NAME` prints the same.

    Args:
        name: The type, as config.json's `model_type` names it.

    Returns:
        A `ModelType`, which has a field for each of these facts.

    Raises:
        ValueError: This package does not know the model type.

    Example:
        >>> import transformer_embed as te
        >>> llama_4 = te.pretrained.find_model_type("llama4_text")
        >>> llama_4.tokens, llama_4.rotary, llama_4.default("rope_theta")
        ('embed_tokens', 'interleaved', 500000.0)
    """
    model_type = model_type_or_none(name)
    if model_type is None:
        near = difflib.get_close_matches(str(name), MODEL_TYPES) or [*MODEL_TYPES][:3]
        raise arguments.value_error("name", f"a known model type, such as {near[0]!r}", repr(name))
    return model_type
