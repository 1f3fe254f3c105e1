"""Checkpoints for tests: the golden models as files."""

import base64
import json
import pathlib
import zlib

import numpy as np
from safetensors.numpy import save_file

import transformer_embed as te
from transformer_embed._src.pretrained import architectures

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = {
    case["name"]: case for case in json.loads((GOLDEN / "pretrained.json").read_text())["cases"]
}
PAD = 1
# A unit in the last place of float32, at the largest value. Layer norms sum their channels in
# another order than the original does; tests/benchmarks/pretrained.py --precision measures wider
# models.
ULPS = 5


def unpack(value):
    if "data" not in value:
        return np.zeros(value["shape"], np.float32)
    return np.frombuffer(zlib.decompress(base64.b85decode(value["data"])), "<f4").reshape(
        value["shape"]
    )


def assert_same(ours, theirs):
    """Within some units in the last place of the largest value."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ULPS * np.spacing(np.abs(theirs).max()))


def tensors_of(case):
    dtype = np.dtype(case.get("dtype", "float32"))
    return {name: unpack(value).astype(dtype) for name, value in case["tensors"].items()}


def checkpoint(folder, case, *, settings=None, drop=(), change=None):
    """A folder with the tensors and the config.json of a case; settings=None: as they are, {}: no
    file."""
    tensors = {name: array for name, array in tensors_of(case).items() if name not in drop} | (
        change or {}
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = case["settings"] if settings is None else settings
    if settings:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder / "model.safetensors"


def load(folder, name, **options):
    case = CASES[name]
    return te.pretrained.load_embedder(checkpoint(folder, case), stack=case["stack"], **options)


def kind_of(case):
    return architectures.by_model_type(case["settings"]["model_type"])


def read_by(case):
    """The entries of a config.json that its architecture reads."""
    known = {
        "model_type",
        *(name for names in kind_of(case).names().values() for name in names),
    }
    return {name: value for name, value in case["settings"].items() if name in known}
