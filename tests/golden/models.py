"""Small models of the transformers library, drawn from seed 0: models.json has their classes and
the arguments of their configurations, most beside those of a base."""

import base64
import copy
import json
import pathlib
import tempfile
import zlib

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
DATA = json.loads((HERE / "models.json").read_text())
PAD = 1
IDS = [[5, 6, 7, 8, 9, 3], [4, 5, 6, PAD, PAD, PAD], [PAD, PAD, 10, 11, 2, 0]]
# Entries of config.json that say nothing about the input or output layer.
UNUSED = ("architectures", "dtype", "transformers_version", "id2label", "label2id")


def config_of(case):
    """The arguments of a case's configuration."""
    return DATA["bases"].get(case.get("base"), {}) | case["config"]


def model_of(case, **options):
    """A model in evaluation, before `add_noise`."""
    torch.manual_seed(0)
    kind = getattr(transformers, case["class"])
    arguments = copy.deepcopy(config_of(case) | case.get("old", {}))
    return kind(kind.config_class(**arguments, **options)).eval()


def add_noise(model, spread=0.1):
    """A norm of ones and a padding row of zeros would hide a wrong tensor; sinusoids are fixed."""
    biases = [value for key, value in model.named_buffers() if key == "final_logits_bias"]
    for value in [*filter(lambda each: each.requires_grad, model.parameters()), *biases]:
        value.data += spread * torch.randn_like(value)


def saved(model):
    """The entries of its config.json, and its tensors."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = json.loads(pathlib.Path(folder, "config.json").read_text())
        return settings, load_file(f"{folder}/model.safetensors")


def pack(array):
    """Shape and little-endian float32 values."""
    array = np.ascontiguousarray(np.asarray(array.detach().float()), "<f4")
    data = base64.b85encode(zlib.compress(array.tobytes(), 9)).decode()
    return {"shape": list(array.shape), "data": data}


def write(name, cases):
    """A line for each case."""
    made = {"torch": torch.__version__, "transformers": transformers.__version__, "seed": 0}
    lines = ",\n".join(json.dumps(case) for case in cases)
    (HERE / name).write_text(f'{{"made": {json.dumps(made)}, "cases": [\n{lines}\n]}}\n')
