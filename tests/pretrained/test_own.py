"""Files that describe themselves: what `save_embedder` writes is read back, or not written."""

import contextlib
import fractions
import json
import os
import pathlib
import re
import struct
import tempfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    MOST,
    PARAMS,
    POSITIONS,
    ROOT,
    SMALL,
    TOKENS,
    assert_identical,
    load,
    load_embedder,
    refused,
    save_embedder,
)
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import transformer_embed as te
from transformer_embed._src.layers.parameters import by_path
from transformer_embed._src.pretrained.checkpoints import METADATA
from transformer_embed._src.pretrained.layers import Layer
from transformer_embed._src.rows.gathered_rows import GatheredRows


@contextlib.contextmanager
def in_a_folder():
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder, "x.safetensors")


# --- There and back.


CONFIGS = [
    te.EmbedderConfig(
        7,
        8,
        scheme=te.Sinusoidal(layout="sin_cos", base=10**20, shift=fractions.Fraction(1, 4)),
        scale=12.0,
        layer_norm_eps=fractions.Fraction(1, 4),
        dtype="bfloat16",
        pad_id=3,
    ),
    te.EmbedderConfig(
        np.int64(7),
        6,
        scheme=te.Learned(9, start=2, at_padding=1, pad_id=1),
        layer_norm_eps=1e-5,
        embedding_width=4,
        dropout_rate=np.float32(0.25),
    ),
    te.EmbedderConfig(
        7,
        8,
        scheme=te.SinusoidalGrid((np.int64(3), 4), axes=(1, 0)),
        num_token_types=2,
        param_dtype="float16",
    ),
    te.EmbedderConfig(
        7, 8, scheme=te.SinusoidalGrid((5000,), axis_positions=[np.arange(5000) / 7])
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_any_config_and_what_stands_beside_the_layer_come_back(tmp_path, config):
    params = {**drawn(te.Embedder(config).init), "head": {"w": jnp.arange(6.0)}}
    params = jax.tree.map(lambda leaf: leaf.astype(config.param_dtype), params)
    save_embedder(str(tmp_path / "x"), config, params)
    own = te.pretrained.PretrainedInput(
        config, params, names={path: path for path in by_path(params)}
    )
    assert_identical(own, load_embedder(tmp_path / "x"))


def layer(rotary, **mask):
    return Layer("full_attention", rotary, {"causal": True} | mask)


LONG = te.LongRopeScaling([1.0, 2.0], [1.0, 3.0], 4.0, 8, 8)
BUCKETS = {"num_heads": 2, "num_buckets": 32}
BIAS_TABLE = {"relative_position_bias": {"embeddings": np.zeros((32, 2), np.float32)}}
ROTARIES = [
    {"base": fractions.Fraction(20001, 2), "layout": "interleaved", "rotary_dim": 6, "partial": "proportional"},
    {"base": 10**20, "rotary_dim": 512, "scaling": None},
    {"pair_axes": (0, 1), "rotary_dim": 4, "scaling": LONG},
    {"scaling": te.YarnScaling(2.0, 8, attention_factor=3e37)},
]  # fmt: skip
BIASES = [
    {"num_heads": 3, "causal": False, "max_bias": 100.0},
    BUCKETS | {"causal": True, "max_distance": 2**31 - 2},
]


@pytest.mark.parametrize(
    "extras",
    [{"layers": (layer(each), layer(None))} for each in ROTARIES]
    + [{"bias": each} for each in BIASES],
)
def test_arguments_that_can_be_used_come_back(tmp_path, extras):
    save_embedder(tmp_path / "x", SMALL, PARAMS | BIAS_TABLE, **extras)
    found = load_embedder(tmp_path / "x")
    assert {name: getattr(found, name) for name in extras} == extras


def test_a_layer_inside_a_model_is_saved_and_loaded(tmp_path):
    """With T5's table of biases, which is elsewhere in the model."""
    found, path = load(tmp_path, "t5"), tmp_path / "tuned.safetensors"
    linear = {"model/linear": {"w": jnp.ones((8, 4))}}
    model = {f"model/{module}": leaves for module, leaves in found.params.items()}
    save_embedder(path, found.config, model | linear, found.layers, found.bias)
    again = load_embedder(path)
    assert (again.config, again.bias) == (found.config, found.bias)
    jax.tree.map(np.testing.assert_array_equal, dict(again.params), {**found.params, **linear})


@pytest.mark.parametrize("leaf", [np.arange(6, dtype=">f4")[::2], np.arange(6, dtype="<f2")[::-1]])
def test_arrays_of_any_layout_are_saved_by_value(tmp_path, leaf):
    """Of either byte order, with any stride."""
    save_embedder(tmp_path / "x", SMALL, PARAMS | {"a": {"b": leaf}})
    got = load_embedder(tmp_path / "x").params["a"]["b"]
    assert got.dtype == leaf.dtype.newbyteorder("=")
    np.testing.assert_array_equal(got, leaf)


# --- What cannot be loaded again is refused before a good file is touched.


def beside(value):
    return {"params": PARAMS | {"a": {"b": value}}}


GATHERED = {"embeddings": GatheredRows(jnp.array([1]), None, jnp.ones([1, 6]), "table", 7)}
UNSAVED = [
    ({"layers": [5]}, "layers[0]: wanted a Layer, got int 5"),
    ({"names": {TOKENS: "__metadata__"}}, "other than '__metadata__'"),
    ({"names": {TOKENS: "\ud800"}}, "'utf-8' codec can't encode character"),
    ({"names": ["x"]}, "names: wanted a mapping, or None, got list"),
    ({"names": {"embedings": "x"}}, "names: wanted a parameter's path, or a suffix that only one path has, among "),
    (beside(np.ones(1, np.float32)) | {"names": {TOKENS: "x", "a/b": "x"}}, "names: wanted a tensor's name of its own"),
    ({"bias": BUCKETS}, "params: wanted one relative_position_bias with embeddings, got none among ['transformer"),
    ({"params": {"embeddings": np.ones(2)}}, "params: embeddings: wanted the parameters of a module, a dict of arrays, got an array"),
    ({"params": PARAMS | {"a": {"b/c": np.ones(1)}}}, "params: wanted names without a slash, got 'b/c'"),
    (beside([1.0]), "x.safetensors: a/b: wanted F32 or BF16 or F16, got F64[1]"),
    (beside(np.ones(1, ml_dtypes.float8_e4m3fn)), "x.safetensors: a/b: wanted F32 or BF16 or F16, got"),
    ({"params": {f"{ROOT}token_embedding": GATHERED}}, "table: wanted to be read by te.lookup or te.TokenEmbedding alone, "),
    ({"config": te.EmbedderConfig(7, 6, scheme=te.Learned(8))}, "params: wanted {'learned_positional_encoding/embeddings': (8, 6)}, got none of them"),
    ({"config": te.EmbedderConfig(8, 6)}, "params: wanted {'token_embedding/embeddings': (8, 6)}, got {'token_embedding/embeddings': (7, 6)}"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), UNSAVED)
def test_what_would_not_load_again_is_not_saved(tmp_path, options, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"good")
    with pytest.raises((TypeError, ValueError)) as error:
        save_embedder(path, **({"config": SMALL, "params": PARAMS} | options))
    assert message in str(error.value)
    assert len(str(error.value)) < MOST
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"good"]


def test_traced_parameters_are_not_saved(tmp_path):
    with pytest.raises(TypeError, match=rf"^{TOKENS}: wanted .* got a traced float32\[7, 6\]$"):
        jax.jit(lambda params: save_embedder(tmp_path / "x", SMALL, params))(PARAMS)
    assert list(tmp_path.iterdir()) == []


def test_a_file_half_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        save_embedder(path, SMALL, PARAMS)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]


# --- Hostile metadata.

SIZES = {"kind": "EmbedderConfig", "vocab_size": 7, "d_model": 6}


def described(path, text):
    """A file with a table of tokens and this metadata."""
    save_file({TOKENS: np.ones((7, 6), np.float32)}, path, {METADATA: text})
    return path


TABLE = {TOKENS: TOKENS}
ALSO = "wanted a tensor for each parameter, also for transformer_embedding/~/token_embedding/embeddings, got only "
HOSTILE = [
    ({"vocab_size": 7, "kind": "OutputConfig"}, {}, "OutputConfig.__init__() got an unexpected keyword"),
    ({"unknown": 1}, {}, "EmbedderConfig.__init__() got an unexpected keyword argument 'unknown'"),
    ({"scheme": {"kind": "Learned", "max_len": 2**60}}, {}, "max_len: wanted an int of at most"),
    ({"scheme": {"kind": ["Learned"]}}, {}, "kind: wanted one of 'EmbedderConfig', 'OutputConfig', 'Layer', 'Sinusoidal', 'SinusoidalGrid', 'Learned', "),
    ({}, {"names": ["a"]}, "names: wanted a mapping, or None, got tuple"),
    ({}, {"names": {"a/b": TOKENS}}, f"{ALSO}['a/b']"),
    ({}, {"layers": [{"scaling": {"kind": "YarnScaling"}}]}, "missing 2 required positional arguments: 'factor' and"),
    ({}, {"layers": [{"kind": "LinearScaling", "factor": 2}] * 9_000}, "layers[0]: wanted a Layer, got LinearScaling"),
    ({}, {"layers": [{"kind": "os.system"}]}, "got 'os.system'"),
    ({}, {"names": TABLE | {"relative_position_bias/embeddings": TOKENS}, "bias": {"num_heads": 2, "num_buckets": 7}}, "wanted shape [7, 2], as the con"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "extras", "message"), HOSTILE)
def test_hostile_metadata_is_refused_at_once(tmp_path, config, extras, message):
    names = TABLE | ({POSITIONS: "positions"} if "max_len" in str(config) else {})
    entries = {"config": SIZES | config, "params": {}, "names": names} | extras
    assert message in refused(described(tmp_path / "x.safetensors", json.dumps(entries)))


# --- Damaged files: a right result, or a short error of ours.

ORIGINAL = te.EmbedderConfig(7, 6, layer_norm_eps=1e-5)


def original():
    with in_a_folder() as path:
        layers = [layer({"base": 1e4, "scaling": te.LinearScaling(2.0)})]
        save_embedder(path, ORIGINAL, drawn(te.Embedder(ORIGINAL).init), layers)
        return path.read_bytes()


SAVED = original()


def test_equal_arguments_write_equal_files():
    assert all(original() == SAVED for _ in range(8))


HEADER = 8 + struct.unpack("<Q", SAVED[:8])[0]
BYTES = b'0|9|-|[|{|}|"|,|e9|null|NaN|1e999|\\ud800|true|\xff'.split(b"|")
FLIPS = st.lists(
    st.tuples(st.integers(0, HEADER + 40), st.sampled_from(BYTES)), min_size=1, max_size=3
)
# Refusals are ours, or Python's of text that is not JSON and of an argument that a class does not
# have or lacks.
OURS = r"wanted |, as JSON: |an unexpected keyword argument|required positional argument"


def right_or_refused(path):
    """What loads is what the file says, read slowly: by safetensors and json. All else is an error
    of ours."""
    try:
        found = load_embedder(path)
    except (TypeError, ValueError, FileNotFoundError) as error:
        if not re.search(OURS, str(error)) or len(str(error)) > MOST:
            raise
        return
    tensors = load_file(path)
    for parameter, tensor in found.names.items():
        module, leaf = parameter.rsplit("/", 1)
        got = np.asarray(found.params[module][leaf])
        assert got.tobytes() == tensors[tensor].tobytes()
        assert got.shape == tensors[tensor].shape


@settings(max_examples=40)
@given(FLIPS, st.none() | st.integers(0, len(SAVED)))
def test_flipped_and_truncated_files(changes, keep):
    with in_a_folder() as path:
        data = bytearray(SAVED)
        for at, token in changes:
            data[at : at + len(token)] = token
        path.write_bytes(data[:keep])
        right_or_refused(path)


@pytest.mark.parametrize("place", ["transformer_embedding", "layer_norm", "offset"])
def test_a_renamed_offset_is_refused(tmp_path, place):
    """Zeros stand for an offset that a published file lacks; in ours, a missing one is damage."""
    name = f"{ROOT}layer_norm/offset"
    renamed = name.replace(place, f"0{place[1:]}").encode()
    path = tmp_path / "x.safetensors"
    # The first of the two in each pair of names is the parameter's.
    path.write_bytes(SAVED.replace(name.encode(), renamed, 1))
    assert f"a tensor for each parameter, also for {ROOT}layer_norm/o" in refused(path)
