"""Files that describe themselves: what `save_embedder` writes is read back, or not written."""

import fractions
import functools
import json
import os
import pathlib
import re
import struct
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import (
    MOST,
    PARAMS,
    ROOT,
    SMALL,
    TOKENS,
    assert_identical,
    load_embedder,
    refused,
    save_embedder,
)
from compare import equal
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import each_raises
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import transformer_embed as te
from transformer_embed._src.layers.parameters import leaves_by_path
from transformer_embed._src.pretrained.own_files import METADATA
from transformer_embed._src.rows.gathered_rows import GatheredRows

Layer = te.pretrained.Layer

# --- There and back.

QUARTER = fractions.Fraction(1, 4)


@pytest.mark.parametrize(
    "config",
    [
        te.EmbedderConfig(
            7, 8, te.Sinusoidal(layout="sin_cos", base=10**20, shift=QUARTER), layer_norm_eps=QUARTER
        ),
        te.EmbedderConfig(np.int64(7), 6, te.Learned(9, start=2), dropout_rate=np.float32(0.25)),
        te.EmbedderConfig(
            7, 8, te.SinusoidalGrid((np.int64(3), 4), axes=(1, 0)), output=te.OutputConfig(scale=3, softcap=2)
        ),
        te.EmbedderConfig(7, 8, te.SinusoidalGrid((5000,), axis_positions=[np.arange(5000) / 7])),
    ],
)  # fmt: skip
def test_any_config_and_the_parameters_beside_the_layer_come_back(config):
    """Arrays by value: of either byte order, with any stride."""
    beside = {
        "w": jnp.arange(6.0),
        ">": np.arange(6, dtype=">f4")[::2],
        "<": np.ones(6, "<f2")[::-1],
    }
    params = {**drawn(te.Embedder(config).init), "head": beside}
    save_embedder("x", config, params)
    read = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype.newbyteorder("=")), params)
    own = te.pretrained.PretrainedInput(
        config, read, names={path: path for path in leaves_by_path(params)}
    )
    assert_identical(own, load_embedder("x"))


def layer(rotary, **mask):
    return Layer("full_attention", rotary, {"causal": True} | mask)


LONG = te.LongRopeScaling([1.0, 2.0], [1.0, 3.0], 4.0, 8, 8)
BUCKETS = {"num_heads": 2, "num_buckets": 32, "causal": False}
BIAS_TABLE = {"relative_position_bias": {"embeddings": np.zeros((32, 2), np.float32)}}
ROTARIES = [
    {"base": fractions.Fraction(20001, 2), "layout": "interleaved", "rotary_dim": 6, "partial": "proportional"},
    {"base": 10**20, "rotary_dim": 512, "scaling": None},
    {"pair_axes": (0, 1), "rotary_dim": 4, "scaling": LONG},
    {"scaling": te.YarnScaling(2.0, 8, attention_factor=3e37)},
    None,
]  # fmt: skip
BIASES = [
    {"num_heads": 3, "causal": False, "max_bias": 100.0},
    BUCKETS | {"causal": True, "max_distance": 2**31 - 2},
]


@pytest.mark.parametrize("bias", BIASES)
def test_arguments_that_can_be_used_come_back(bias):
    layers = tuple(map(layer, ROTARIES))
    save_embedder("x", SMALL, PARAMS | BIAS_TABLE, layers, bias)
    assert load_embedder("x")[2:4] == (layers, bias)


@pytest.mark.parametrize("root", ["", "model/~/input/~/"])
def test_only_modules_beside_the_table_are_the_layers(root):
    """The layer may be at the root of the tree, where each path begins like the layer's."""
    table = {
        f"{root}token_embedding": {"embeddings": PARAMS[TOKENS.rpartition("/")[0]]["embeddings"]}
    }
    deeper = {f"{root}{name}/layer_norm": {"scale": np.ones(3, "f4")} for name in ("x", "x/y")}
    save_embedder("x", SMALL, table | deeper)
    found = load_embedder("x")
    assert found.params.keys() == {TOKENS.rpartition("/")[0], *deeper}
    equal(found.params[TOKENS.rpartition("/")[0]]["embeddings"], np.arange(42).reshape(7, 6))


@pytest.mark.parametrize(
    ("bias", "causal"),
    [({"num_heads": 3}, True), ({"num_heads": 2, "num_buckets": 32}, False)],
)
def test_a_bias_of_an_older_file_gets_the_default_of_that_time(bias, causal):
    """Older files leave `causal` out if it was the default of the function."""
    save_embedder("x", SMALL, PARAMS | BIAS_TABLE, bias=bias | {"causal": causal})
    with safe_open("x", "numpy") as file:
        described = json.loads(file.metadata()[METADATA])
    del described["bias"]["causal"]
    save_file(load_file("x"), "old", {METADATA: json.dumps(described)})
    assert load_embedder("old").bias == bias | {"causal": causal}


# --- What cannot be loaded again is refused before a good file is touched.


def saved(params=PARAMS, config=SMALL, **options):
    save_embedder("x.safetensors", config, params, **options)


def beside(value, **options):
    saved(PARAMS | {"a": {"b": value}}, **options)


GATHERED = {
    "embeddings": GatheredRows(
        np.array([1], np.int32), None, np.ones([1, 6], np.float32), "table", 7
    )
}
DTYPES = "ValueError: ...x.safetensors: a/b: wanted F32 or BF16 or F16, got"
MASKED = np.ma.masked_array(np.ones(2, np.float32), [True, False])
UNSAVED = {
    "saved(layers=[5])": "TypeError: layers[0]: wanted a Layer, got int 5",
    # What the functions of the package would refuse.
    "saved(layers=[layer({'base': -1})])": "ValueError: layers[0].rotary: base: wanted a number above 0",
    "saved(layers=[layer(None), layer({'rotary_dim': 3})])": "ValueError: layers[1].rotary: rotary_dim: ... got 3",
    "saved(layers=[layer({'rotary_dim': 10**9})])": "ValueError: layers[0].rotary: rotary_dim: wanted an int of at most 8192, got 1000000000",
    "saved(layers=[layer({'angle': 3})])": "ValueError: layers[0].rotary: apply_rotary() got an unexpected keyword argument 'angle'",
    "saved(layers=[layer(None, window=3)])": "ValueError: layers[0].mask: window: ... got",
    "saved(layers=[Layer(5, None, {'causal': True})])": "TypeError: layers[0].type: wanted a kind of layers, got int 5",
    "saved(layers=[Layer('x', 5, 5)])": "TypeError: layers[0].rotary: wanted a mapping, or None, got int 5",
    "saved(layers=[Layer('x', None, {})])": "ValueError: layers[0].mask: ...missing 1 required keyword-only argument: 'causal'",
    "saved(layers=[Layer('x', None, {'causal': True}, {'beta': 1.0})])": "ValueError: layers[0].query_scale: query_scale() missing 1 required keyword-only argument: 'length'",
    "saved(layers=[Layer('x', None, {'causal': True}, image_blocks='near')])": "ValueError: layers[0].image_blocks: wanted one of 'anywhere', 'in window', got 'near'",
    "saved(layers=[Layer('x', None, {'causal': True}, attention={'num_heads': MASKED})])": "TypeError: layers and bias: wanted an array without a mask",
    "saved(bias={'num_heads': 2, 'causal': True, 'max_bias': 200.0})": "ValueError: bias: max_bias: ... got 200",
    "saved(bias={'num_heads': 10**9})": "ValueError: bias: num_heads: wanted an int of at most 8192, got 1000000000",
    "saved(PARAMS | BIAS_TABLE, bias=BUCKETS | {'max_distance': 0})": "ValueError: bias: max_distance: ... got 0",
    "saved(names={TOKENS: '__metadata__'})": "ValueError: ... other than '__metadata__'",
    "saved(names={TOKENS: '\\ud800'})": "UnicodeEncodeError: 'utf-8' codec can't encode character",
    "saved(names=['x'])": "TypeError: names: wanted a mapping, or None, got list",
    "saved(names={'embedings': 'x'})": "ValueError: names: wanted a parameter's path, or a suffix that only one path has, among ",
    "beside(np.ones(1, 'f4'), names={TOKENS: 'x', 'a/b': 'x'})": "ValueError: names: wanted a tensor's name of its own",
    "saved(bias=BUCKETS)": "ValueError: params: wanted one relative_position_bias with embeddings, got none among ['transformer",
    "saved({'embeddings': np.ones(2)})": "TypeError: params: embeddings: wanted the parameters of a module, a dict of arrays, got an array",
    "saved(PARAMS | {'a': {'b/c': np.ones(1)}})": "ValueError: params: wanted names without a slash, got 'b/c'",
    "beside([1.0])": f"{DTYPES} F64[1]",
    "beside(jnp.ones(1, 'float8_e4m3fn'))": DTYPES,
    "beside(MASKED)": "TypeError: a/b: wanted an array without a mask, got a masked array",
    "beside([MASKED, MASKED])": "TypeError: a/b: wanted an array without a mask, got a masked array",
    "saved({f'{ROOT}token_embedding': GATHERED})": "_NotAnArrayError: table: wanted to be read by te.lookup or te.TokenEmbedding alone, ",
    "saved(config=te.EmbedderConfig(7, 6, te.Learned(8)))": "ValueError: params: wanted {'learned_positional_encoding/embeddings': (8, 6)}, got none of them",
    "saved(config=te.EmbedderConfig(8, 6))": "ValueError: params: wanted {'token_embedding/embeddings': (8, 6)}, got {'token_embedding/embeddings': (7, 6)}",
    "jax.jit(saved)(PARAMS)": f"TypeError: {TOKENS}: wanted ... got a traced float32[7, 6]",
}  # fmt: skip


def test_layer_that_would_not_load_again_is_not_saved(monkeypatch):
    """Nor what is only half written."""
    path = pathlib.Path("x.safetensors")
    path.write_bytes(b"good")
    each_raises(UNSAVED, globals())

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        saved()
    assert os.listdir() == [path.name]
    assert path.read_bytes() == b"good"


# --- Hostile metadata.

MANY = ", ".join(['{"kind": "LinearScaling", "factor": 2}'] * 9_000)
# The names of the table of tokens, as the metadata have them.
NAMES = f'{{"{TOKENS}": "{TOKENS}"}}'
BIASED = NAMES[:-1] + f', "relative_position_bias/embeddings": "{TOKENS}"}}'
HOSTILE = {
    '{"config": {"vocab_size": 7, "kind": "OutputConfig"}}': "OutputConfig.__init__() got an unexpected keyword",
    '{"config": {"unknown": 1}}': "EmbedderConfig.__init__() got an unexpected keyword argument 'unknown'",
    '{"config": {"scheme": {"kind": "Learned", "max_len": 1152921504606846976}}}': "max_len: wanted an int of at most",
    '{"config": {"scheme": {"kind": ["Learned"]}}}': "kind: wanted one of 'EmbedderConfig', 'OutputConfig', 'Layer', 'Sinusoidal', 'SinusoidalGrid', 'Learned', ",
    '{"names": ["a"]}': "names: wanted a mapping, or None, got tuple",
    f'{{"names": {{"a/b": "{TOKENS}"}}}}': f"wanted a tensor for each parameter, also for {TOKENS}, got only ['a/b']",
    '{"layers": [{"scaling": {"kind": "YarnScaling"}}]}': "missing 2 required positional arguments: 'factor' and",
    f'{{"layers": [{MANY}]}}': "layers[0]: wanted a Layer, got LinearScaling",
    '{"layers": [{"kind": "os.system"}]}': "got 'os.system'",
    f'{{"names": {BIASED}, "bias": {{"num_heads": 2, "num_buckets": 7}}}}': "wanted shape [7, 2], as the con",
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_metadata_is_refused_at_once(text):
    said = json.loads(text)
    config = {"kind": "EmbedderConfig", "vocab_size": 7, "d_model": 6} | said.pop("config", {})
    entries = {"config": config, "params": {}, "names": json.loads(NAMES)} | said
    tensors = {TOKENS: np.ones((7, 6), np.float32)}
    save_file(tensors, "x.safetensors", {METADATA: json.dumps(entries)})
    assert HOSTILE[text] in refused("x.safetensors")


# --- Damaged files: a right result, or a short error of ours.

ORIGINAL = te.EmbedderConfig(7, 6, layer_norm_eps=1e-5)


def written():
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        layers = [layer({"base": 1e4, "scaling": te.LinearScaling(2.0)})]
        save_embedder(file.name, ORIGINAL, drawn(te.Embedder(ORIGINAL).init), layers)
        return pathlib.Path(file.name).read_bytes()


original = functools.cache(written)


def test_equal_arguments_write_equal_files():
    assert all(written() == original() for _ in range(3))


BYTES = b'0|9|-|[|{|}|"|,|e9|null|NaN|1e999|\\ud800|true|\xff'.split(b"|")


def flips():
    header = 8 + struct.unpack("<Q", original()[:8])[0]
    flip = st.tuples(st.integers(0, header + 40), st.sampled_from(BYTES))
    return st.lists(flip, min_size=1, max_size=3)


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
    tensors, params = load_file(path), leaves_by_path(found.params)
    for parameter, tensor in found.names.items():
        got = np.asarray(params[parameter])
        assert got.tobytes() == tensors[tensor].tobytes()
        assert got.shape == tensors[tensor].shape


@pytest.mark.slow
@settings(max_examples=40)
@given(st.deferred(flips), st.deferred(lambda: st.none() | st.integers(0, len(original()))))
def test_flipped_and_truncated_files(changes, keep):
    data = bytearray(original())
    for at, token in changes:
        data[at : at + len(token)] = token
    pathlib.Path("x.safetensors").write_bytes(data[:keep])
    right_or_refused("x.safetensors")


@pytest.mark.parametrize("place", ["transformer_embedding", "layer_norm", "offset"])
def test_a_renamed_offset_is_refused(place):
    """Zeros stand for an offset that a published file lacks; in ours, a missing one is damage."""
    name = f"{ROOT}layer_norm/offset"
    renamed = name.replace(place, f"0{place[1:]}").encode()
    # The first of the two in each pair of names is the parameter's.
    pathlib.Path("x.safetensors").write_bytes(original().replace(name.encode(), renamed, 1))
    assert f"a tensor for each parameter, also for {ROOT}layer_norm/o" in refused("x.safetensors")
