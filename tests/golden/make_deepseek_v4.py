"""Writes deepseek_v4.json: the kinds of DeepSeek V4's layers, and its two rotations.

Run: python tests/golden/make_deepseek_v4.py
Needs: torch (a CPU build), transformers. No model is built.
"""

import json
import pathlib

import transformers
from make_hub_facts import picked
from transformers.models.deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

HERE = pathlib.Path(__file__).parent
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
CASES = {
    # What the published file of 61 layers says; the last ratio is about a layer that predicts
    # further tokens.
    "published": {
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
        "compress_rope_theta": 160000,
        "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "max_position_embeddings": 1048576,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
    },
    "defaults": {"num_hidden_layers": 6},
    # The base inside of the scaling is not read.
    "one object for both rotations": {
        "num_hidden_layers": 3,
        "layer_types": KINDS,
        "rope_theta": 500.0,
        "compress_rope_theta": 7000.0,
        "rope_parameters": {**YARN, "rope_theta": 77.0},
        "sliding_window": 9,
    },
    # One object for both turns YaRN's factor off, but an object of its own does not.
    "an object for each rotation": {
        "num_hidden_layers": 3,
        "layer_types": KINDS,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 600.0, "partial_rotary_factor": 0.125},
            "compress": {**YARN, "rope_theta": 8000.0, "partial_rotary_factor": 0.125},
        },
    },
}


def facts(config):
    """Returns the kinds of layers and the rotations of a configuration."""
    rotary = DeepseekV4RotaryEmbedding(config)
    rotations = {}
    for name in ("main", "compress"):
        frequencies = getattr(rotary, f"{name}_inv_freq")
        rotations[name] = {
            "pairs": len(frequencies),
            "frequencies": [float(frequencies[n]) for n in picked(len(frequencies))],
            "factor": float(getattr(rotary, f"{name}_attention_scaling")),
        }
    return {"types": config.layer_types, "window": config.sliding_window, "rotations": rotations}


def main():
    """Writes a line for each case."""
    lines = []
    for name, entries in CASES.items():
        config = DeepseekV4Config.from_dict(json.loads(json.dumps(entries)))
        saved = json.loads(config.to_json_string())
        for case_name, case_entries in ((name, entries), (f"{name}, saved again", saved)):
            case = {"name": case_name, "config": case_entries, **facts(config)}
            lines.append(json.dumps(case))
    made = json.dumps(f"transformers {transformers.__version__}")
    text = ",\n".join(lines)
    (HERE / "deepseek_v4.json").write_text(f'{{"made": {made},\n"cases": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
