"""Writes heads.json: output layers of small models of the transformers library, drawn from seed 0,
with the logits that they give from hidden states.

Run: python tests/golden/make_heads.py
Needs: torch (a CPU build), transformers, safetensors.
"""

import re

import torch
import transformers
from models import DATA, IDS, UNUSED, add_noise, model_of, pack, saved, write


def case_of(case):
    model = model_of(case)
    own = model.get_output_embeddings()
    if case["name"] == "t5, untied":
        # The library ties T5 unless the file has both tables.
        own.weight = torch.nn.Parameter(torch.randn_like(own.weight))
    add_noise(model)
    settings, tensors = saved(model)
    states = []

    def after(_, args, output):
        if getattr(output, "last_hidden_state", None) is not None:
            states.append(output.last_hidden_state)

    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.register_forward_hook(after)
    inputs = {"input_ids": torch.tensor(IDS)}
    has_decoder = model.config.is_encoder_decoder
    if has_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    logits = model(**inputs).logits
    return {
        "name": case["name"],
        "settings": {key: value for key, value in settings.items() if key not in UNUSED},
        "stack": "decoder" if has_decoder else None,
        "tensors": {
            key: pack(value)
            for key, value in tensors.items()
            if "relative" in key or not re.search(r"\.\d+\.", key)
        },
        "states": pack(states[-1]),
        "logits": pack(logits),
    }


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    with torch.no_grad():
        write("heads.json", [case_of(case) for case in DATA["heads"]])
