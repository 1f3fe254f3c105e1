"""Writes hub_facts.json: what the transformers library makes of the configs in hub_configs.json.

Run: python tests/golden/make_hub_facts.py
Needs: torch (a CPU build), transformers. Models are built without weights.
"""

import json
import math
import pathlib
import re
import sys

import torch
import transformers
from transformers.models.auto import configuration_auto

HERE = pathlib.Path(__file__).parent
# The library's own words where it reads others than the published file has, and its class.
OWN_WORDS = {
    "nomic-ai/nomic-embed-text-v1.5": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.0,
    },
}
CLASSES = {
    "MPTForCausalLM": "MptForCausalLM",
    "NomicBertModel": "NomicBertModel",
    "BartModel": "BartForConditionalGeneration",
    None: "DebertaV2ForMaskedLM",
}
# Their own code computes what the library's class of that type does not.
WITHOUT_CLASS = (
    "jinaai/jina-embeddings-v2-base-en",
    "jinaai/jina-embeddings-v3",
    "Alibaba-NLP/gte-base-en-v1.5",
    "Alibaba-NLP/gte-multilingual-base",
)


def small(config):
    """One layer of each kind is enough for names, and two for relative biases."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers"):
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, min(4, getattr(part, name)))
        if getattr(part, "layer_types", None):
            part.layer_types = (list(dict.fromkeys(part.layer_types)) * 4)[:4]
    return config


def rotations(model):
    """For each kind of layer, the frequencies and the factor of cosines and sines."""
    found = {}
    for name, part in model.named_modules():
        if "rotary" not in name.lower() or "vision" in name or not hasattr(part, "config"):
            continue
        made = type(part)(config=part.config)
        for buffer, frequencies in made.named_buffers():
            kind, _, end = buffer.rpartition("inv_freq")
            if end == "" and "original" not in buffer:
                kind = kind.rstrip("_")
                scale = getattr(made, f"{kind}_attention_scaling".lstrip("_"))
                found[kind or "all layers"] = {
                    "pairs": len(frequencies),
                    "frequencies": [float(frequencies[n]) for n in picked(len(frequencies))],
                    "factor": float(scale),
                }
    return found


def picked(pairs):
    """Nine of the pairs, the first and the last among them."""
    return sorted({round(n * (pairs - 1) / 8) for n in range(9)})


def norms(model):
    """The epsilon of the norm beside the table of tokens."""
    for name, part in model.named_modules():
        if re.search(
            r"(embeddings\.(LayerNorm|norm)|emb_ln|layernorm_embedding|embeddings_layernorm)$", name
        ):
            return getattr(part, "eps", None) or part.variance_epsilon
    return None


def starts(model):
    """The position of the first token, and how many positions the table has."""
    for name, part in model.named_modules():
        is_table = re.search(r"(position_embeddings|embed_positions|wpe)$", name)
        # A decoder's come after its encoder's.
        if not is_table or re.search(r"vision|(?<!de)encoder\.embed_positions", name):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        count = "create_position_ids_from_input_ids"
        counts = hasattr(parent, count) or hasattr(sys.modules[type(parent).__module__], count)
        padding = parent.padding_idx + 1 if counts else 0
        return [getattr(part, "offset", padding), part.num_embeddings]
    return None


def facts(config, repository):
    """What the library says of a model."""
    entries = {key: value for key, value in config.items() if key != "architectures"}
    made = configuration_auto.CONFIG_MAPPING[config["model_type"]].from_dict(
        entries | OWN_WORDS.get(repository, {})
    )
    architecture = config.get("architectures", [None])[0]
    kind = getattr(transformers, CLASSES.get(architecture, architecture))
    with torch.device("meta"):
        model = kind(small(made))
    text = made.get_text_config(decoder=True)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = bool(getattr(made, "tie_word_embeddings", True)) if head is not None else None
    scales = [
        getattr(table, "scalar_embed_scale", None),
        getattr(text, "embedding_multiplier", None),
        math.sqrt(text.hidden_size) if made.model_type in ("gemma", "gemma2") else None,
    ]
    return {
        "table": list(table.weight.shape),
        "tied": is_tied,
        "scale": next((scale for scale in scales if scale is not None), 1.0),
        "norm": norms(model),
        "positions": starts(model),
        "bias": [
            getattr(made, f"relative_attention_{name}", None)
            for name in ("num_buckets", "max_distance")
        ],
        "softcap": getattr(text, "final_logit_softcapping", None),
        "rotations": rotations(model),
    }


def main():
    """A line for each repository."""
    configs = json.loads((HERE / "hub_configs.json").read_text())["configs"]
    lines = []
    for repository, config in configs.items():
        if repository in WITHOUT_CLASS:
            continue
        found = facts(config, repository)
        print(repository, found)
        lines.append(f"{json.dumps(repository)}: {json.dumps(found)}")
    made = json.dumps({"transformers": transformers.__version__})
    text = ",\n".join(lines)
    (HERE / "hub_facts.json").write_text(f'{{"made": {made}, "cases": {{\n{text}\n}}}}\n')


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    main()
