"""Writes image_masks.json: the masks of transformers for a batch of text and images.

Run: python tests/golden/make_image_masks.py
Needs: torch (a CPU build), transformers. No model is built.
"""

import json
import pathlib

import torch
import transformers
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gemma4_unified import modeling_gemma4_unified as gemma4_unified

HERE = pathlib.Path(__file__).parent
# Rows of text (0) and images (1), with padding on the right and on the left (0 in TOKENS).
IMAGES = [
    [0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0],
    [1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
]
TOKENS = [[1] * 13, [1] * 10 + [0] * 3, [0] * 3 + [1] * 10]
ENTRIES = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
SIZES = {
    "vocab_size": 9,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 8,
}


def masks(module, config_class, **entries):
    """Returns the entries of a small config.json, and for each kind of layers who sees whom."""
    config = config_class(**SIZES, **ENTRIES, **entries)
    config._attn_implementation = "eager"
    make = module.create_masks_for_vision_model
    if module is gemma4_unified:
        make = module.create_masks_for_generate
    images = torch.tensor(IMAGES)
    made = make(
        config=config,
        inputs_embeds=torch.zeros(*images.shape, 8),
        attention_mask=torch.tensor(TOKENS),
        cache=None,
        position_ids=None,
        block_sequence_ids=module.get_block_sequence_ids_for_mask(images, device=images.device),
    )
    case = {"config": {"model_type": config.model_type, **ENTRIES, **entries}}
    for kind, mask in made.items():
        seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > -1
        rows = seen.reshape(-1, seen.shape[-1]).int().tolist()
        case[kind] = ["".join(map(str, row)) for row in rows]
    return case


def main():
    """Writes a line for each model."""
    vision = {"use_bidirectional_attention": "vision"}
    cases = {
        "gemma3": masks(gemma3, transformers.Gemma3TextConfig),
        "gemma4": masks(gemma4, transformers.Gemma4TextConfig, **vision),
        "gemma4_unified": masks(gemma4_unified, gemma4_unified.Gemma4UnifiedTextConfig, **vision),
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    made = json.dumps(f"transformers {transformers.__version__}")
    head = f'"made": {made},\n"images": {json.dumps(IMAGES)},\n"tokens": {json.dumps(TOKENS)},\n'
    (HERE / "image_masks.json").write_text(f'{{{head}"cases": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
