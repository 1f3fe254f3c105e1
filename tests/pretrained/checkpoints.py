"""Checkpoints for tests: the golden models as files, in the folder that a test runs in."""

import base64
import json
import pathlib
import time
import zlib

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import transformer_embed as te
from transformer_embed._src.pretrained import registry

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def golden(name, **options):
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"), **options)


CASES = {case["name"]: case for case in golden("pretrained.json")["cases"]}
HEADS = {case["name"]: case for case in golden("heads.json")["cases"]}
# Characters of a message.
MOST = 1200
# Of the longest text; scalings of the cases were trained on more.
LENGTH = 8
load_embedder, save_embedder = te.pretrained.load_embedder, te.pretrained.save_embedder
ROOT = "transformer_embedding/~/"
TOKENS = f"{ROOT}token_embedding/embeddings"
POSITIONS = f"{ROOT}learned_positional_encoding/embeddings"
SMALL = te.EmbedderConfig(7, 6)
PARAMS = {f"{ROOT}token_embedding": {"embeddings": np.arange(42, dtype="f4").reshape(7, 6)}}
EMBED_TOKENS = "model.embed_tokens.weight"


def refused(path, **options):
    """The message of a refusal, which is short and soon."""
    start = time.process_time()
    with pytest.raises((TypeError, ValueError, FileNotFoundError)) as error:
        load_embedder(path, **options)
    assert time.process_time() - start < 5
    assert len(str(error.value)) < MOST
    return str(error.value)


def unpack(value):
    if "data" not in value:
        return np.zeros(value["shape"], np.float32)
    data = zlib.decompress(base64.b85decode(value["data"]))
    return np.frombuffer(data, "<f4").reshape(value["shape"])


def assert_identical(left, right):
    """Config, extras, names, and every bit of the parameters."""
    assert left[0] == right[0]
    assert left[2:] == right[2:]
    assert jax.tree.structure(left.params) == jax.tree.structure(right.params)
    for one, other in zip(jax.tree.leaves(left.params), jax.tree.leaves(right.params), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def tensors_of(case):
    dtype = np.dtype(case.get("dtype", "float32"))
    return {name: unpack(value).astype(dtype) for name, value in case["tensors"].items()}


def text_of(case):
    """The entries of its text model."""
    return case["settings"].get("text_config", case["settings"])


def kind_of(case):
    return registry.model_type_or_none(case["settings"]["model_type"])


def checkpoint(case, *, settings=None, drop=(), change=None):
    """A file with the tensors of a case, and its config.json; settings {}: without one."""
    tensors = {name: array for name, array in tensors_of(case).items() if name not in drop}
    path, config = pathlib.Path("model.safetensors"), pathlib.Path("config.json")
    save_file(tensors | (change or {}), path, {"format": "pt"})
    config.write_text(json.dumps(case["settings"] if settings is None else settings))
    if settings == {}:
        config.unlink()
    return path


def load(name, **options):
    case = CASES[name]
    options = {"stack": case["stack"], "length": LENGTH} | options
    return load_embedder(checkpoint(case), **options)


def load_table(entries, *tensors, length=None, **others):
    """Loads tables of 12 rows with 16 channels, and other tensors by name and shape."""
    shapes = dict.fromkeys(tensors, (12, 16)) | others or {EMBED_TOKENS: (12, 16)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    entries = {"vocab_size": 12, "num_hidden_layers": 6} | entries
    path = checkpoint({"tensors": {}}, settings=entries, change=arrays)
    return load_embedder(path, length=length)


def rotary_of(found):
    """The rotation of all layers, or if they differ, of each kind."""
    kinds = {layer.type: layer.rotary for layer in found.layers}
    return kinds if len(kinds) > 1 else next(iter(kinds.values()), None)
