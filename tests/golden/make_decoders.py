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
import zipfile

import numpy as np
import torch
import transformers
from models import DATA, PAD, model_of, saved
from safetensors.torch import save

ARCHIVE = pathlib.Path(__file__).parents[2] / "notebooks" / "data" / "decoders.zip"
LENGTH, STRIDE = 24, 4
# How many tokens of padding each row starts with.
PADDING = (0, 9)
IDS = np.random.default_rng(0).integers(3, 64, (len(PADDING), LENGTH))
IDS[np.arange(LENGTH) < np.array(PADDING)[:, None]] = PAD


def built(case):
    """A model with random weights, multiples of 1/8, so that the file is small."""
    model = model_of(case, attn_implementation="eager")
    scalars = [value for name, value in model.named_buffers() if name.endswith("layer_scalar")]
    for parameter in [*model.parameters(), *scalars]:
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
    for case in DATA["decoders"]:
        model = built(case)
        folder = case["name"].lower().replace(" ", "_")
        settings, tensors = saved(model)
        array = io.BytesIO()
        np.save(array, logits_of(model, IDS)[:, STRIDE - 1 :: STRIDE])
        yield f"{folder}/config.json", json.dumps(settings, indent=1).encode()
        yield f"{folder}/model.safetensors", save(tensors)
        yield f"{folder}/logits.npy", array.getvalue()
        print(f"{folder:10}{sum(tensor.numel() for tensor in tensors.values()):8,} numbers")


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    ARCHIVE.parent.mkdir(exist_ok=True)
    with torch.no_grad(), zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_LZMA) as archive:
        for path, data in members():
            # A fixed date, so that the file is the same in each run.
            archive.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_LZMA)
    print(f"{ARCHIVE.stat().st_size:,} bytes", file=sys.stderr)
