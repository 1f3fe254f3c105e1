"""Checkpoints for tests: the golden models as files."""

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
from transformer_embed._src.pretrained import architectures
from transformer_embed._src.pretrained.checkpoints import decoded

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def golden(name):
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))["cases"]


def published(kind):
    """What published files say, and what is read of it."""
    text = (GOLDEN / "published_forms.json").read_text(encoding="utf-8")
    return [tuple(case.values()) for case in json.loads(text, object_hook=decoded)[kind]]


CASES = {case["name"]: case for case in golden("pretrained.json")}
HEADS = {case["name"]: case for case in golden("heads.json")}
PAD = 1
# A unit in the last place of float32, at the largest value. Layer norms sum their channels in
# another order than the original does; tests/benchmarks/pretrained.py --precision measures wider
# models.
ULPS = 5
# Characters of a message.
MOST = 1200
load_embedder, save_embedder = te.pretrained.load_embedder, te.pretrained.save_embedder
ROOT = "transformer_embedding/~/"
TOKENS = f"{ROOT}token_embedding/embeddings"
POSITIONS = f"{ROOT}learned_positional_encoding/embeddings"
SMALL = te.EmbedderConfig(7, 6)
PARAMS = {f"{ROOT}token_embedding": {"embeddings": np.arange(42, dtype="f4").reshape(7, 6)}}


def refused(*arguments, **options):
    """The message of a refusal, which is short and soon."""
    start = time.process_time()
    with pytest.raises((TypeError, ValueError, FileNotFoundError)) as error:
        load_embedder(*arguments, **options)
    assert time.process_time() - start < 5
    assert len(str(error.value)) < MOST
    return str(error.value)


def unpack(value):
    if "data" not in value:
        return np.zeros(value["shape"], np.float32)
    return np.frombuffer(zlib.decompress(base64.b85decode(value["data"])), "<f4").reshape(
        value["shape"]
    )


def assert_same(ours, theirs):
    """Within some units in the last place of the largest value."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ULPS * np.spacing(np.abs(theirs).max()))


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


def checkpoint(folder, case, *, settings=None, drop=(), change=None):
    """A folder with the tensors and the config.json of a case; settings=None: as they are, {}: no
    file."""
    tensors = {name: array for name, array in tensors_of(case).items() if name not in drop}
    save_file(tensors | (change or {}), folder / "model.safetensors", {"format": "pt"})
    settings = case["settings"] if settings is None else settings
    if settings:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder / "model.safetensors"


# Of the longest text; scalings of the cases were trained on more.
LENGTH = 8


def table(folder, entries, *tensors, **others):
    """A checkpoint of 12 tokens with 16 channels, and other tensors by name and shape."""
    shapes = dict.fromkeys(tensors or ["model.embed_tokens.weight"], (12, 16)) | others
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    entries = {"vocab_size": 12, "num_hidden_layers": 6} | entries
    return checkpoint(folder, {"tensors": {}}, settings=entries, change=arrays)


def load(folder, name, **options):
    case = CASES[name]
    options = {"stack": case["stack"], "length": LENGTH} | options
    return load_embedder(checkpoint(folder, case), **options)


def rotary_of(found):
    """The rotation of all layers, or if they differ, of each kind."""
    kinds = {layer.type: layer.rotary for layer in found.layers}
    return kinds if len(kinds) > 1 else next(iter(kinds.values()), None)


def kind_of(case):
    return architectures.by_model_type(case["settings"]["model_type"])


def embed(found, ids, token_types=None):
    apply = te.Embedder(found.config).apply
    return np.asarray(apply(found.params, None, ids, is_training=False, token_types=token_types))
