"""Writes attention_facts.json: the attention of each layer in small decoders of transformers.

Run: python tests/golden/make_attention_facts.py
Needs: torch (a CPU build), transformers. Models are built without weights.
"""

import contextlib
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "pretrained"), str(HERE.parents[1])]

import sweep
import torch
import transformers
from transformers.models.auto import configuration_auto

from transformer_embed._src.pretrained import attention, registry

ATTENTION = r"layers\.(\d+)\.(self_attn|attention)$"
OTHER_PARTS = "vision|audio|image"
NORM = r"layers\.\d+\.\w*(norm|layernorm)\w*$"


def model_of(config):
    """Returns the first class of a type that can be built, without weights."""
    with contextlib.suppress(ValueError):
        for kind in dict.fromkeys(sweep.classes(config)):
            with contextlib.suppress(Exception), torch.device("meta"):
                return kind._from_config(config)
    return None


def facts(model, config):
    """Returns the attention of each layer, and the epsilon of the layers' norms."""
    layers = {}
    text_heads = config.num_attention_heads
    for name, part in model.named_modules():
        found = re.search(ATTENTION, name)
        if not found or re.search(OTHER_PARTS, name) or getattr(part, "scaling", None) is None:
            continue
        sinks = any("sink" in key for key, _ in part.named_parameters())
        layers[found[1]] = {
            "num_heads": text_heads,
            "num_kv_heads": text_heads // getattr(part, "num_key_value_groups", 1),
            "head_dim": getattr(part, "head_dim", None) or part.head_size,
            "scale": part.scaling,
            **({"softcap": cap} if (cap := getattr(part, "attn_logit_softcapping", None)) else {}),
            **({"sinks": True} if sinks else {}),
        }
    eps = {
        getattr(part, "variance_epsilon", None) or getattr(part, "eps", None)
        for name, part in model.named_modules()
        if re.search(NORM, name) and not re.search(OTHER_PARTS, name)
    } - {None}
    return layers, eps.pop() if len(eps) == 1 else None


def main():
    """Writes a line for each type whose attention the registry describes."""
    lines = []
    for name, row in sorted(registry.ROWS.items()):
        if not row.attention or name not in configuration_auto.CONFIG_MAPPING_NAMES:
            continue
        config = sweep.config_of(name, is_odd=True)
        if config.get_text_config() is not config:
            continue
        model = model_of(config)
        if model is None:
            continue
        layers, eps = facts(model, config)
        entries = json.loads(config.to_json_string(use_diff=False))
        read = {"model_type"}.union(*row.names_of_entries().values())
        read |= attention.NAMES_OF_ATTENTION
        entries = {key: entries[key] for key in entries if key in read}
        case = {"config": entries, "layers": layers, "norm_eps": eps}
        lines.append(f"{json.dumps(name)}: {json.dumps(case)}")
    made = json.dumps(f"transformers {transformers.__version__}")
    text = ",\n".join(lines)
    (HERE / "attention_facts.json").write_text(f'{{"made": {made}, "cases": {{\n{text}\n}}}}\n')


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity(50)
    main()
