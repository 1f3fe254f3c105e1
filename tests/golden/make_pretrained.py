"""Writes pretrained.json: small models of the transformers library, drawn from seed 0, with what
their input layers give.

Run: python tests/golden/make_pretrained.py
Needs: torch (a CPU build), transformers, safetensors.

A case of models.json also says where its first layer is; "old" has the entries of an older
config.json.
"""

import importlib
import re

import numpy as np
import torch
import transformers
from models import DATA, IDS, PAD, UNUSED, add_noise, config_of, model_of, pack, saved, write

INPUT = re.compile(r"embed(?!_out)|wte|wpe|shared|relative|norm_emb")
POSITIONS = [0, 1, 2, 16, 100, 999]


class StopAtFirstLayerError(Exception):
    """Carries what the first layer was given."""


def first_input(model, where, inputs):
    def stop(module, args, kwargs):
        raise StopAtFirstLayerError(args[0] if args else kwargs["hidden_states"])

    handle = model.get_submodule(where).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**inputs)
    except StopAtFirstLayerError as captured:
        return captured.args[0]
    finally:
        handle.remove()


def part_of(model, case):
    """The stack or the part that reads the ids, and its first layer."""
    where, path = case["where"], ""
    arguments = config_of(case)
    if "decoder_layers" in arguments or ("d_kv" in arguments and "Encoder" not in case["class"]):
        path = f"{where.partition('coder.')[0]}coder"
    path = case.get("part", path)
    return model.get_submodule(path), where.removeprefix(f"{path}.")


def case_of(case):
    model = model_of(case)
    add_noise(model, case.get("noise", 0.1))
    dtype, config, tokens = case.get("dtype", "float32"), model.config, torch.tensor(IDS)
    settings, tensors = saved(model.to(getattr(torch, dtype)))
    if "old" in case:
        left = ("rope_parameters", case.get("left"))
        settings = {key: settings[key] for key in settings if key not in left} | case["old"]
    found = {
        "name": case["name"],
        "settings": {key: value for key, value in settings.items() if key not in UNUSED},
        "stack": case.get("stack"),
        "dtype": dtype,
        "ids": IDS,
        "tensors": {
            key: pack(value) if INPUT.search(key) else {"shape": list(value.shape)}
            for key, value in tensors.items()
        },
    }
    inputs = {"input_ids": tokens}
    is_token = (tokens != PAD).long()
    if "mask" in case:
        inputs["attention_mask"] = is_token
    if any("token_type_embeddings" in key for key in tensors):
        types = np.indices(tokens.shape).sum(0) % config.type_vocab_size
        found["token_types"] = types.tolist()
        inputs["token_type_ids"] = torch.tensor(types)
    part, where = part_of(model, case)
    found["embeddings"] = pack(first_input(part, where, inputs))
    if "rope_parameters" in config.to_dict() and dtype == "float32":
        layers = case.get("layer_types", [None])
        found["rotary"] = [rotary_of(model, layer, case.get("length")) for layer in layers]
    if "d_kv" in case["config"] or case.get("base") == "t5":
        stack = getattr(model, case.get("stack", "encoder"))
        bias = stack.block[0].layer[0].SelfAttention.compute_bias(1000, 1000)[0]
        found["bias"] = pack(bias[:, [999, 0]].swapaxes(0, 1))
    return found


def rotary_of(model, layer, length):
    base, config = model.base_model, model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Multiples of 1/8 between -1 and 1, [positions, head_dim].
    numbers = np.arange(len(POSITIONS) * head_dim, dtype=np.float32).reshape(-1, head_dim)
    heads = torch.tensor((numbers * 5 % 17 - 8) / 8)[None, None]
    arguments = [heads, torch.tensor([POSITIONS])] + ([] if layer is None else [layer])
    cos, sin = base.rotary_emb(*arguments)
    turned = importlib.import_module(type(base).__module__).apply_rotary_pos_emb
    first, rest = heads.split([cos.shape[-1], head_dim - cos.shape[-1]], -1)
    rotated = torch.cat([turned(first, first, cos, sin)[0], rest], -1)[0]
    found = {"layer": layer, "positions": POSITIONS, "length": length}
    return found | {"rotated": pack(rotated.transpose(0, 1))}


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    with torch.no_grad():
        write("pretrained.json", [case_of(case) for case in DATA["pretrained"]])
