"""Writes notebooks/data/decoders.zip: small random models of the transformers library, a folder
each, with what their logits are.

Run: python tests/golden/make_decoders.py
Needs: torch (a CPU build), transformers.
"""

import inspect
import io
import json
import pathlib
import sys
import tempfile
import zipfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save

DATA = pathlib.Path(__file__).parents[2] / "notebooks" / "data" / "decoders.zip"
LENGTH, PAD, STRIDE = 24, 1, 4
# How many tokens of padding each row starts with.
PADDING = (0, 9)
IDS = np.random.default_rng(0).integers(3, 64, (len(PADDING), LENGTH))
IDS[np.arange(LENGTH) < np.array(PADDING)[:, None]] = PAD

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
HEADS = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
MIXED = {
    "sliding_window": 6,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
HALF = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}
# Name, class, and arguments of its config.
CASES = {
    "Llama 3": ("LlamaForCausalLM", SMALL | {"rope_parameters": LLAMA3}),
    "Qwen 2": ("Qwen2ForCausalLM", SMALL | {"rope_parameters": YARN}),
    "Qwen 3": ("Qwen3ForCausalLM", SMALL | {"head_dim": 12, "tie_word_embeddings": True}),
    "Mistral": ("MistralForCausalLM", SMALL | {"sliding_window": 5}),
    "Granite": (
        "GraniteForCausalLM",
        SMALL
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "SmolLM 3": ("SmolLM3ForCausalLM", SMALL | {"no_rope_layers": [1, 0]}),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        SMALL | MIXED | {"head_dim": 12, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    ),
    "Gemma 3": ("Gemma3ForCausalLM", SMALL | MIXED | {"head_dim": 12, "query_pre_attn_scalar": 16}),
    "OLMo 2": ("Olmo2ForCausalLM", SMALL),
    "GLM": ("GlmForCausalLM", SMALL | HALF | {"head_dim": 16, "attention_bias": True}),
    "StableLM": ("StableLmForCausalLM", SMALL | HALF),
    "Phi": ("PhiForCausalLM", SMALL | HALF),
    "Phi 3": ("Phi3ForCausalLM", SMALL),
    "Cohere": ("CohereForCausalLM", SMALL),
    "GPT-NeoX": ("GPTNeoXForCausalLM", HEADS | HALF),
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 40}
        | {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2},
    ),
    "OPT": ("OPTForCausalLM", HEADS | {"ffn_dim": 40, "word_embed_proj_dim": 32}),
    "Bloom": ("BloomForCausalLM", HEADS | {"n_layer": 2, "n_head": 4}),
}  # fmt: skip


def built(kind, arguments):
    """A model with random weights, multiples of 1/8, so that the file is small."""
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**arguments, attn_implementation="eager")
    model = model_class(config).eval()
    for parameter in model.parameters():
        # Norms of ones and biases of zeros would hide a wrong tensor.
        spread = 0.2 if parameter.ndim > 1 else 0.3
        parameter.data += spread * torch.randn_like(parameter)
        parameter.data = (8 * parameter.data).round() / 8
    return model


def logits_of(model, ids):
    """The library's logits [batch, length, vocab_size]; positions count the tokens."""
    is_token = torch.tensor(ids != PAD)
    given = {"input_ids": torch.tensor(ids), "attention_mask": is_token.long(), "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = (is_token.cumsum(-1) - 1).clamp(min=0)
    return model(**given).logits.numpy()


def members():
    """The files in the archive: a checkpoint's folder for each model, and what they are given."""
    yield "ids.json", json.dumps(IDS.tolist()).encode()
    for name, case in CASES.items():
        model = built(*case)
        folder = name.lower().replace(" ", "_")
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            settings = json.loads(pathlib.Path(saved, "config.json").read_text())
            tensors = load_file(f"{saved}/model.safetensors")
        array = io.BytesIO()
        np.save(array, logits_of(model, IDS)[:, STRIDE - 1 :: STRIDE])
        yield f"{folder}/config.json", json.dumps(settings, indent=1).encode()
        yield f"{folder}/model.safetensors", save(tensors)
        yield f"{folder}/logits.npy", array.getvalue()
        print(f"{name:10}{sum(tensor.numel() for tensor in tensors.values()):8,} numbers")


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    DATA.parent.mkdir(exist_ok=True)
    with torch.no_grad(), zipfile.ZipFile(DATA, "w", zipfile.ZIP_LZMA) as archive:
        for path, data in members():
            # A fixed date, so that the file is the same in each run.
            archive.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_LZMA)
    print(f"{DATA.stat().st_size:,} bytes", file=sys.stderr)
