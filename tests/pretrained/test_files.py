"""Hostile and unusual files: each gives a right result or an error of ours that is short and says
what to do."""

import contextlib
import dataclasses
import fractions
import glob
import json
import os
import pathlib
import re
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from checkpoints import CASES, checkpoint, load
from drawn import drawn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import transformer_embed as te
from transformer_embed._src.pretrained import description, files, own, parameters

load_embedder, save_embedder = te.pretrained.load_embedder, te.pretrained.save_embedder
CONFIG, EXTRAS = own.CONFIG, own.EXTRAS
SMALL = te.EmbedderConfig(7, 6)
PARAMS = drawn(te.Embedder(SMALL).init)
MOST = 1200
ROOT = pathlib.Path(te.__file__).parents[1]


def refused(*arguments, **options):
    """The message of a refusal, which is short."""
    with pytest.raises((TypeError, ValueError, FileNotFoundError)) as error:
        load_embedder(*arguments, **options)
    assert len(str(error.value)) < MOST
    return str(error.value)


# --- What a newcomer meets first.


def test_a_lone_file_says_that_config_json_is_missing(tmp_path):
    path = checkpoint(tmp_path, CASES["bert"], settings={})
    message = refused(path)
    assert message.startswith(
        "model_type: wanted that of a known model, from settings or a config.json beside "
        f"{path}, got None; load its table of tokens alone: "
    )


class Pickled:
    """A tensor of torch, as the advice sees it: save_file refuses memory that two tensors share."""

    def __init__(self, is_cloned=False):
        self.is_cloned = is_cloned

    def clone(self):
        return Pickled(is_cloned=True)

    def contiguous(self):
        return self


def follow(advice, folder, monkeypatch):
    """Runs the expression after "convert it with", on files that hold tied tensors."""
    saved = {}
    load = lambda file, weights_only: {"head": Pickled(), file: Pickled()}
    monkeypatch.chdir(folder)
    names = {"torch": SimpleNamespace(load=load), "glob": glob}
    save_file = lambda tensors, file: saved.update({file: tensors})
    names["safetensors"] = SimpleNamespace(torch=SimpleNamespace(save_file=save_file))
    eval(re.search(r"convert it with (safetensors.*?'model\.safetensors'\))\)", advice)[1], names)
    assert all(tensor.is_cloned for tensor in saved["model.safetensors"].values())
    return set(saved["model.safetensors"]) - {"head"}


@pytest.mark.parametrize(
    "names",
    [
        ["pytorch_model.bin"],
        ["pytorch_model.bin.index.json", *(f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2))],
    ],
)
def test_a_folder_with_pickles_alone_says_how_to_convert_them(tmp_path, monkeypatch, names):
    for name in names:
        (tmp_path / name).write_bytes(b"PK\x03\x04")
    message = refused(tmp_path)
    assert "a pickle may run code and is not opened: convert it" in message
    assert follow(message, tmp_path, monkeypatch) == {n for n in names if n.endswith(".bin")}


def test_a_pickle_says_how_to_convert_it(tmp_path, monkeypatch):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"PK\x03\x04")
    assert follow(refused(path), tmp_path, monkeypatch) == {path.name}


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_an_adapter_alone_says_where_the_model_is(tmp_path, name):
    for each in (name, "adapter_config.json"):
        (tmp_path / each).write_text("{}")
    message = refused(tmp_path)
    assert "save an adapter with its model by peft's model.merge_and_unload().save_" in message


@pytest.mark.parametrize("name", ["bert-base-uncased", "meta-llama/Llama-3.2-1B"])
def test_a_model_name_in_place_of_a_path_says_to_download_it(name):
    assert (
        "No such file or directory (for a model's name, pass the folder that huggingface_hub.snapshot_download(name)"
        in refused(name)
    )


def test_an_unknown_model_with_long_names_is_refused_briefly(tmp_path):
    names = {
        f"{'deep.' * 15}{n}.{'x' * 60}{chr(97 + n)}": np.zeros((2, 2), np.float32)
        for n in range(26)
    }
    save_file(names, tmp_path / "model.safetensors")
    assert "got None; load any table with config and names, which has 26" in refused(tmp_path)


# --- By hand.


def by_hand(folder, tensors, config, names):
    save_file(tensors, folder / "x.safetensors")
    return load_embedder(folder / "x.safetensors", config=config, names=names)


def test_a_layer_norm_without_offset_is_loaded_with_zeros(tmp_path):
    config = te.EmbedderConfig(5, 4, scheme=None, scale=False, layer_norm_eps=1e-5)
    names = {"token_embedding/embeddings": "t", "layer_norm/scale": "n", "layer_norm/offset": None}
    found = by_hand(
        tmp_path,
        {"t": np.eye(5, 4, dtype=np.float32), "n": np.full(4, 2, np.float32)},
        config,
        names,
    )
    np.testing.assert_array_equal(
        found.params["transformer_embedding/~/layer_norm"]["offset"], np.zeros(4)
    )
    x = te.Embedder(config).apply(found.params, None, [[0]], is_training=False)
    rows = np.array([1.0, 0, 0, 0])
    np.testing.assert_allclose(x[0, 0], 2 * (rows - 0.25) / np.sqrt(0.1875 + 1e-5), rtol=1e-6)
    assert "layer_norm/offset" not in str(found.names)
    with pytest.raises(
        ValueError, match=r"x\.safetensors: wanted a tensor None, got 1 tensors: t$"
    ):
        by_hand(
            tmp_path,
            {"t": np.eye(5, 4, dtype=np.float32)},
            config,
            names | {"layer_norm/scale": None},
        )


def test_leading_axes_of_one_are_dropped(tmp_path):
    config = te.EmbedderConfig(5, 4, scheme=te.Learned(3))
    positions = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    names = {"token_embedding/embeddings": "t", "learned_positional_encoding/embeddings": "p"}
    found = by_hand(tmp_path, {"t": np.eye(5, 4, dtype=np.float32), "p": positions}, config, names)
    np.testing.assert_array_equal(
        found.params["transformer_embedding/~/learned_positional_encoding"]["embeddings"],
        positions[0],
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_float64_table_is_rounded_to_the_configs_dtype(tmp_path, dtype):
    table = np.random.default_rng(0).random((5, 4))
    config = te.EmbedderConfig(5, 4, param_dtype=dtype)
    found = by_hand(tmp_path, {"t": table}, config, {"token_embedding/embeddings": "t"})
    got = found.params["transformer_embedding/~/token_embedding"]["embeddings"]
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), table.astype(jnp.dtype(dtype)))


def test_a_float64_number_that_float32_does_not_hold_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"^t: overflow encountered in cast$",
    ):
        by_hand(
            tmp_path,
            {"t": np.full((5, 4), 1e300)},
            te.EmbedderConfig(5, 4),
            {"token_embedding/embeddings": "t"},
        )


def test_the_end_of_a_path_names_a_parameter_if_no_other_has_it(tmp_path):
    config = te.EmbedderConfig(5, 4, scheme=te.Learned(3))
    tensors = {"t": np.eye(5, 4, dtype=np.float32), "p": np.zeros((3, 4), np.float32)}
    for name in ("embeddings", "bedding/embeddings", "token_embedding", 3):
        with pytest.raises(
            ValueError,
            match=r"^names: wanted a parameter's path, or a suffix that only one path has, among .*, got ",
        ):
            by_hand(tmp_path, tensors, config, {name: "t"})
    twice = {"token_embedding/embeddings": "t", description.TOKENS: "p"}
    with pytest.raises(ValueError, match=r"^names: wanted a parameter's path"):
        by_hand(tmp_path, tensors, config, twice)
    found = by_hand(
        tmp_path, tensors, config, {"token_embedding/embeddings": "t", description.POSITIONS: "p"}
    )
    assert found.names == {description.TOKENS: "t", description.POSITIONS: "p"}
    save_embedder(
        tmp_path / "y", config, found.params, names={"token_embedding/embeddings": "wte.weight"}
    )
    assert set(load_file(tmp_path / "y")) == {"wte.weight", description.POSITIONS}


def test_a_free_multiplier_is_saved_and_loaded(tmp_path):
    config = te.EmbedderConfig(7, 6, scale=12.0)
    save_embedder(tmp_path / "x", config, PARAMS)
    assert load_embedder(tmp_path / "x").config == config


# --- What cannot be saved is refused before a good file is touched.

BIAS_TABLE = {"relative_position_bias": {"embeddings": np.zeros((32, 2), np.float32)}}
HEAD = {"head": {"w": np.zeros(2, np.float32)}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": {description.TOKENS: "__metadata__"}}, "other than '__metadata__'"),
        (
            {"names": {description.TOKENS: 5}},
            "names: wanted a tensor's name of its own for each par",
        ),
        ({"names": {description.TOKENS: None}}, "other than '__metadata__', got [None]"),
        ({"names": {description.TOKENS: "\ud800"}}, "'utf-8' codec can't encode character"),
        ({"names": ["x"]}, "names: wanted a mapping, or None, got list"),
        (
            {"rotary": {"base": "x"}},
            "rotary, all layers: base: wanted a Python number, got str 'x'",
        ),
        ({"rotary": {"base": -1.0}}, "base: wanted a finite number above 0, got -1.0"),
        (
            {"rotary": {"layout": "thirds"}},
            "layout: wanted one of 'half', 'interleaved', got 'thirds'",
        ),
        (
            {"rotary": {"full": {"rotary_dim": 3}}},
            "rotary, full: rotary_dim: wanted an even number of channels, to make pairs, got 3",
        ),
        (
            {"rotary": {"scaling": 2.0}},
            "rotary, all layers: scaling: wanted LinearScaling(...), another scaling of this package, or None, got float 2.0",
        ),
        (
            {"rotary": {"base": jnp.ones(2)}},
            "Only scalar arrays can be converted to Python scalars",
        ),
        ({"rotary": 3}, "rotary: wanted a mapping, or None, got int"),
        ({"bias": {"num_heads": 0}}, "bias: num_heads: wanted an int of at least 1, got 0"),
        (
            {
                "params": PARAMS | BIAS_TABLE,
                "bias": {"num_heads": 2, "num_buckets": 32, "max_distance": 3},
            },
            "max_distance: wanted an int of at least 9, got 3",
        ),
        (
            {"bias": {"num_heads": 2, "num_buckets": 32}},
            "params: wanted one relative_position_bias with embeddings, got none among ['transformer",
        ),
        ({"bias": {}}, "bias: num_heads: wanted a Python int, got NoneType None"),
        (
            {"params": PARAMS | {"a": {"b/c": np.zeros(1, np.float32)}}},
            "params: wanted names without a slash, got 'b/c'",
        ),
        (
            {"params": PARAMS | {5: {"a": np.zeros(1, np.float32)}}},
            "'<' not supported between instances of 'int' and 'str'",
        ),
        (
            {"params": PARAMS | {"a": {"b": np.ma.masked_array([1.0], [True])}}},
            "params: a/b: wanted an array without a mask (fill it first: x.filled(...)), got a masked",
        ),
        ({"params": PARAMS | {"a": {"b": [1.0]}}}, "params: "),
        (
            {"params": PARAMS | {"a": {"b": np.zeros(1, ml_dtypes.float8_e4m3fn)}}},
            "x.safetensors: a/b: wanted shape [1], as the configuration says, of F32 or BF16 or F16, got",
        ),
        (
            {"params": PARAMS | {"a": {"b": jax.random.key(0)}}},
            "array with PRNGKey dtype cannot be converted to a NumPy array",
        ),
        ({"config": 3}, "config: wanted an EmbedderConfig, got int"),
    ],
)
def test_what_would_not_load_again_is_not_saved(tmp_path, options, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"good")
    with pytest.raises((TypeError, ValueError)) as error:
        save_embedder(path, **({"config": SMALL, "params": PARAMS} | options))
    assert message in str(error.value)
    assert len(str(error.value)) < MOST
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"good"]


def test_traced_parameters_are_not_saved(tmp_path):
    with pytest.raises(
        TypeError,
        match=r"was called on traced array",
    ):
        jax.jit(lambda params: save_embedder(tmp_path / "x", SMALL, params))(PARAMS)


STORED = st.builds(
    lambda values, dtype, order, step: np.array(values, jnp.dtype(dtype).newbyteorder(order))[
        ::step
    ],
    st.lists(st.floats(-9, 9, width=16), max_size=6),
    st.sampled_from(["float32", "float16"]),
    st.sampled_from("<>=|"),
    st.sampled_from([1, -1, 2]),
)


@settings(max_examples=40)
@given(STORED, st.booleans())
def test_arrays_of_any_layout_are_saved_by_value(array, is_param):
    """Of either byte order, with any stride, and inside Flax's nnx.Param."""
    leaf = nnx.Param(jnp.asarray(array)) if is_param and array.dtype.isnative else array
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "x")
        save_embedder(path, SMALL, PARAMS | {"a": {"b": leaf}})
        got = load_embedder(path).params["a"]["b"]
    assert got.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(got, array)


def test_parameters_of_flax_are_saved(tmp_path):
    params = jax.tree.map(nnx.Param, PARAMS)
    save_embedder(tmp_path / "x", SMALL, params)
    found = load_embedder(tmp_path / "x").params
    jax.tree.map(np.testing.assert_array_equal, found, PARAMS)


def test_arrays_of_the_other_byte_order_are_saved_by_value(tmp_path):
    save_embedder(tmp_path / "x", SMALL, PARAMS | {"a": {"b": np.array([1.5, -2], ">f4")}})
    np.testing.assert_array_equal(load_embedder(tmp_path / "x").params["a"]["b"], [1.5, -2])


# --- Where a file is written.


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_saving_keeps_the_mode_of_a_file(tmp_path, mode):
    path = tmp_path / "x"
    path.touch()
    path.chmod(mode)
    save_embedder(path, SMALL, PARAMS)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_new_files(tmp_path):
    (tmp_path / "plain").touch()
    save_embedder(tmp_path / "x", SMALL, PARAMS)
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_only_a_regular_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".."):
        with pytest.raises(
            ValueError,
            match=r"^path: wanted a regular file, got a folder, a pipe or a device, ",
        ):
            save_embedder(tmp_path / name, SMALL, PARAMS)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    save_embedder(tmp_path / "link", SMALL, PARAMS)
    assert (tmp_path / "link").is_symlink()
    assert load_embedder(tmp_path / "target").config == SMALL


def pipe_as(path):
    os.mkfifo(path)
    return path


PLACES = {
    "a file": lambda folder: pipe_as(folder / "x.safetensors"),
    "the file of a folder": lambda folder: pipe_as(folder / "model.safetensors").parent,
    "an index": lambda folder: pipe_as(folder / "x.json"),
    "the index of a folder": lambda folder: pipe_as(folder / "model.safetensors.index.json").parent,
    "a shard": lambda folder: index_of(folder, pipe_as(folder / "shard").name),
    "a device": lambda folder: index_of(folder, link_to(folder / "x", "/dev/zero").name),
}


def link_to(path, target):
    path.symlink_to(target)
    return path


def index_of(folder, shard):
    (folder / "x.json").write_text(
        json.dumps({"weight_map": {"wte.weight": shard, "wpe.weight": shard}})
    )
    return folder / "x.json"


@pytest.fixture
def soon():
    """Ends a test that waits for the other end of a pipe."""

    def stop(*_):
        pytest.fail("waits for ever")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("place", PLACES)
def test_only_regular_files_are_opened(tmp_path, place):
    assert "path: wanted a regular file, got a " in refused(PLACES[place](tmp_path))


@pytest.mark.usefixtures("soon")
def test_a_pipe_named_like_our_temporary_files_stays(tmp_path):
    name = pipe_as(tmp_path / f"{files.TEMPORARY}x.tmp")
    save_embedder(tmp_path / "x", SMALL, PARAMS)
    assert set(tmp_path.iterdir()) == {name, tmp_path / "x"}


STOPPED = """
import pathlib, signal, sys
from transformer_embed._src.pretrained import files
with files.open_whole(pathlib.Path(sys.argv[1])):
    print("written", flush=True)
    signal.pause()
"""


@pytest.mark.slow
def test_a_killed_save_leaves_a_file_that_a_later_one_removes(tmp_path):
    """One that may still be written stays."""
    path = tmp_path / "x"
    command = [sys.executable, "-c", STOPPED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout.readline() == b"written\n"
        child.kill()
    (left,) = tmp_path.iterdir()
    save_embedder(path, SMALL, PARAMS)
    assert set(tmp_path.iterdir()) == {path, left}
    old = time.time() - files.STALE - 60
    os.utime(left, (old, old))
    save_embedder(path, SMALL, PARAMS)
    assert list(tmp_path.iterdir()) == [path]


def test_what_another_process_removes_first_fails_no_save(tmp_path, monkeypatch):
    left = tmp_path / f"{files.TEMPORARY}x.tmp"
    left.touch()

    def remove_and_ask():
        left.unlink(missing_ok=True)
        return 10 * files.STALE + left.parent.stat().st_mtime

    monkeypatch.setattr(files.time, "time", remove_and_ask)
    save_embedder(tmp_path / "x", SMALL, PARAMS)
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_config_that_is_not_a_regular_file_is_an_error(tmp_path, make):
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    make(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"^path: wanted a regular file, got a folder, a pipe"):
        load_embedder(tmp_path, settings={"model_type": "bert"})


def test_a_config_that_is_a_dangling_link_is_an_error(tmp_path):
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    link_to(tmp_path / "config.json", tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_embedder(tmp_path, settings={"model_type": "bert"})


@pytest.mark.parametrize("shard", ["../x.safetensors", "a/../../x", "/x.safetensors"])
def test_shards_are_in_the_folder_of_their_index(tmp_path, shard):
    assert "wanted shards in its folder, got " in refused(index_of(tmp_path, shard))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        save_embedder(tmp_path / "missing" / "x", SMALL, PARAMS)
    assert "/missing/" in str(missing.value)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as other:
        save_embedder(tmp_path / "file" / "x", SMALL, PARAMS)
    assert "/file/" in str(other.value)


# --- Hostile files.


def written(path, metadata, tensors=None):
    tensors = {description.TOKENS: np.ones((7, 6), np.float32)} if tensors is None else tensors
    save_file(tensors, path, metadata=metadata)
    return path


CONFIG_TEXT = json.dumps({"vocab_size": 7, "d_model": 6})


@pytest.mark.parametrize(
    ("config", "extras", "message"),
    [
        ("[" * 100_000, "{}", "config, as JSON: maximum recursion"),
        ('{"a":' * 100_000, "{}", "config, as JSON: maximum recursion"),
        (CONFIG_TEXT, "[" * 100_000, "extras, as JSON: maximum recursion"),
        ({"vocab_size": 2**40}, {}, "wanted shape [1099511627776, 6]"),
        ({"vocab_size": 10**4000}, {}, "embeddings: wanted shape [1000000"),
        ({"d_model": 10**8}, {}, "wanted shape [7, 100000000]"),
        ({"d_model": "6"}, {}, "embeddings: wanted shape [7, '6']"),
        ({"d_model": True}, {}, "embeddings: wanted shape [7, True]"),
        ({"scale": "yes"}, {}, "scale: wanted True, False, or a number above 0 "),
        ({"dropout_rate": float("nan")}, {}, "dropout_rate: wanted a finite number, got nan"),
        ({"param_dtype": "float31"}, {}, "param_dtype: wanted a floating dtype"),
        (
            {"unknown": 1},
            {},
            "EmbedderConfig.__init__() got an unexpected keyword argument 'unknown'",
        ),
        (
            {"scheme": {"kind": "SinusoidalGrid", "shape": [2] * 500}},
            {},
            "shape: its number of points: wanted an int of at most 2147483647, got ",
        ),
        (
            {"scheme": {"kind": "Learned", "max_len": 2**60}},
            {},
            "max_len: wanted an int of at most",
        ),
        (
            {"scheme": {"kind": ["Learned"]}},
            {},
            "kind: wanted one of 'OutputLayer', 'Sinusoidal', 'SinusoidalGrid', 'Learned', ",
        ),
        (
            {"scheme": "sinusoidal"},
            {},
            "scheme: wanted Sinusoidal(...), SinusoidalGrid(...) or Learned(max_len=...), or None, got str 'sinus",
        ),
        ({}, {"names": ["a"]}, "names: wanted a mapping, or None, got tuple"),
        (
            {},
            {"names": {"a": ["b"]}},
            "wanted a tensor ('b',), got 1 tensors: ",
        ),
        (
            {},
            {"names": {"noslash": description.TOKENS}},
            "wanted a tensor for each parameter, also for transformer_embedding/~/token_embedding/embeddings, got only ['noslash']",
        ),
        (
            {},
            {"names": {"a/b": description.TOKENS}},
            "wanted a tensor for each parameter, also for transformer_embedding/~/token_embedding/embeddings, got only ['a/b']",
        ),
        ({}, {"rotary": "base"}, "rotary: wanted a mapping, or None, got str"),
        (
            {},
            {"rotary": {"base": [1]}},
            "rotary, all layers: base: wanted a Python number, got tuple (1,)",
        ),
        (
            {},
            {"rotary": {"scaling": {"kind": "YarnScaling", "factor": 0, "original_length": 4}}},
            "factor: wanted a finite number above 0",
        ),
        (
            {},
            {"rotary": {"scaling": {"kind": "os.system"}}},
            "got 'os.system'",
        ),
        (
            {},
            {"rotary": {"x": {"scaling": {"kind": "LinearScaling", "factor": 1e400}}}},
            "factor: wanted a finite number above 0, got inf",
        ),
        ({}, {"bias": {"num_heads": 2**40, "num_buckets": 32}}, "num_heads: wanted an int of at"),
        ({}, {"bias": [1, 2]}, "bias: wanted a mapping, or None, got tuple"),
    ],
)
def test_hostile_metadata_is_refused_at_once(tmp_path, config, extras, message):
    config = json.dumps(json.loads(CONFIG_TEXT) | config) if isinstance(config, dict) else config
    names = {description.TOKENS: description.TOKENS}
    if "names" not in extras and "bias" in extras and isinstance(extras["bias"], dict):
        names |= {description.BIAS: "bias"}
    if '"Learned"' in config and "max_len" in config:
        names |= {description.POSITIONS: "positions"}
    extras = json.dumps({"names": names} | extras) if isinstance(extras, dict) else extras
    path = written(tmp_path / "x.safetensors", {CONFIG: config, EXTRAS: extras})
    start = time.process_time()
    assert message in refused(path)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("bert", {"model_type": ["bert"]}, ", got ['bert']; tensors and entries fit a model bert"),
        ("bert", {"hidden_size": 2**40}, "hidden_size: wanted 8, as the tensors say"),
        ("bert", {"vocab_size": {}}, "vocab_size: wanted a Python int, got dict {}"),
        ("marian", {"d_model": 10**8}, "hidden_size: wanted 8, as the tensors say"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling: wanted an object, got 'linear'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": {"a": 1}}},
            "'mrope', got {'a': 1}",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1] * 5000, "long_factor": [1]}},
            "head_dim: wanted an int of at most 8192, got 10000",
        ),
        ("phi", {"head_dim": 2**62}, "head_dim: wanted an int of at most 8192, got 2305"),
    ],
)
def test_hostile_config_json_is_refused_at_once(tmp_path, name, entries, message):
    path = checkpoint(tmp_path, CASES[name], settings=CASES[name]["settings"] | entries)
    start = time.process_time()
    assert message in refused(path)
    assert time.process_time() - start < 5


def test_the_shapes_are_those_of_the_module():
    """They are told from the sizes alone, so that a hostile size costs nothing."""
    for name in ("bert", "albert", "marian"):
        with tempfile.TemporaryDirectory() as folder:
            found = load(pathlib.Path(folder), name)
        made = te.Embedder(found.config).init(jax.random.key(0))
        assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, found.params)
        big = dataclasses.replace(found.config, vocab_size=2**31 - 1)
        table = parameters.parameters_of("x", big)[description.TOKENS]
        assert table.shape == (2**31 - 1, big.table_width)


ROTARIES = st.fixed_dictionaries(
    {},
    optional={
        "base": st.sampled_from([0.5, 1.0, 1e4, 10**20, fractions.Fraction(20001, 2)]),
        "layout": st.sampled_from(["half", "interleaved"]),
        "rotary_dim": st.sampled_from([None, 1, 2, 4, 6]),
        "partial": st.sampled_from(["first", "proportional"]),
        "pair_axes": st.none() | st.lists(st.integers(-1, 3), max_size=3).map(tuple),
        "scaling": st.sampled_from(
            [
                None,
                te.LinearScaling(2.0),
                te.NTKScaling(3.0),
                te.DynamicNTKScaling(2.0, 8, 16),
                te.YarnScaling(2.0, 8),
                te.YarnScaling(2.0, 8, attention_factor=3e37),
                te.Llama3Scaling(8.0),
                te.LongRopeScaling([1.0, 2.0], [1.0, 3.0], 4.0, 8, 8),
                te.LongRopeScaling([1e-30], [1.0], 4.0, 8, 8),
            ]
        ),
    },
)
BIASES = st.fixed_dictionaries(
    {"num_heads": st.integers(0, 3)},
    optional={"symmetric": st.booleans(), "max_bias": st.floats(-1, 300)},
) | st.fixed_dictionaries(
    {"num_heads": st.integers(0, 3), "num_buckets": st.integers(0, 9)},
    optional={"bidirectional": st.booleans(), "max_distance": st.sampled_from([1, 5, 2**31])},
)


def rotates(rotary):
    """Whether heads of some size can be rotated so."""
    axes = (1 + max(rotary["pair_axes"]),) if rotary.get("pair_axes") else ()
    for head_dim in (*range(2, 20, 2), 256):
        with contextlib.suppress(ValueError):
            te.apply_rotary(
                np.ones((1, 1, head_dim), np.float32), np.ones((1, *axes), int), **rotary
            )
            return True
    return False


@settings(max_examples=60)
@given(ROTARIES)
def test_rotary_arguments_are_saved_if_and_only_if_they_can_be_used(rotary):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "x")
        try:
            save_embedder(path, SMALL, PARAMS, rotary=rotary)
        except ValueError:
            assert not rotates(rotary)
            return
        assert load_embedder(path).rotary == rotary
        assert rotates(rotary)


@settings(max_examples=60)
@given(BIASES)
def test_bias_arguments_are_saved_if_and_only_if_they_can_be_used(bias):
    table = np.zeros((bias.get("num_buckets", 0), bias["num_heads"]), np.float32)
    params = PARAMS | {"relative_position_bias": {"embeddings": table}}
    makes = te.alibi_bias
    if "num_buckets" in bias:
        makes = lambda *positions, **options: jax.eval_shape(
            hk.transform(lambda: te.RelativePositionBias(**options)(*positions)).init,
            jax.random.key(0),
        )
    try:
        makes([0, 1], [0, 1], **bias)
        is_usable = True
    except ValueError:
        is_usable = False
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "x")
        try:
            save_embedder(path, SMALL, params, bias=bias)
        except ValueError:
            assert not is_usable
            return
        assert load_embedder(path).bias == bias
        assert is_usable


def test_a_share_above_one_of_a_head_is_refused(tmp_path):
    message = "partial_rotary_factor: wanted an int of at most 16, got 32"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "phi", settings={"partial_rotary_factor": 2.0})


SCHEMES = [
    te.Sinusoidal(base=fractions.Fraction(20001, 2)),
    te.Sinusoidal(base=10**20, shift=fractions.Fraction(1, 4)),
    te.SinusoidalGrid((5000,), axis_positions=[np.arange(5000) / 7]),
    te.SinusoidalGrid((5, 5000), axis_positions=[range(5), np.arange(5000)]),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=range(len(SCHEMES)))
def test_any_config_can_be_saved(tmp_path, scheme):
    config = te.EmbedderConfig(7, 8, scheme=scheme, layer_norm_eps=fractions.Fraction(1, 4))
    save_embedder(tmp_path / "x", config, drawn(te.Embedder(config).init))
    assert load_embedder(tmp_path / "x").config == config


def original():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "x.safetensors")
        save_embedder(
            path,
            te.EmbedderConfig(7, 6, layer_norm_eps=1e-5),
            drawn(te.Embedder(te.EmbedderConfig(7, 6, layer_norm_eps=1e-5)).init),
            rotary={"base": 1e4, "scaling": te.LinearScaling(2.0)},
        )
        return path.read_bytes()


SAVED = original()
HEADER = 8 + struct.unpack("<Q", SAVED[:8])[0]
TOKEN = st.sampled_from(
    [
        b"0",
        b"9",
        b"-",
        b"[",
        b"{",
        b"}",
        b'"',
        b",",
        b"e9",
        b"null",
        b"NaN",
        b"1e999",
        b"\\ud800",
        b"true",
        b"\xff",
    ]
)
CHANGES = st.lists(st.tuples(st.integers(0, HEADER + 40), TOKEN), min_size=1, max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


# Refusals are ours, or Python's of text that is not JSON and of an argument that a class does not
# have.
OURS = r"wanted |, as JSON: |an unexpected keyword argument"


def right_or_refused(path, *, is_embedded=False):
    """What loads is what the file says, read slowly: by the package's own reader, json and a
    formula. All else is an error of ours."""
    try:
        found = load_embedder(path)
    except (TypeError, ValueError, FileNotFoundError) as error:
        message = str(error)
        assert re.search(OURS, message)
        assert len(message) < MOST
        return
    tensors = load_file(path)
    for parameter, tensor in found.names.items():
        module, leaf = parameter.rsplit("/", 1)
        got = np.asarray(found.params[module][leaf])
        assert got.tobytes() == tensors[tensor].tobytes()
        assert got.shape == tensors[tensor].shape
    assert found.params[description.TOKENS.rsplit("/", 1)[0]]["embeddings"].shape == (
        found.config.vocab_size,
        found.config.d_model,
    )
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    if CONFIG in metadata:
        for name, value in json.loads(metadata[CONFIG]).items():
            if isinstance(value, bool | int | float | None):
                assert getattr(found.config, name) == value
    if is_embedded:
        embeds_as_the_formula(
            found,
            {
                "/".join(name.split("/")[-2:]): tensors[tensor]
                for name, tensor in found.names.items()
            },
        )


def embeds_as_the_formula(found, given):
    """One row of the first and the last id, in float64, where its numbers are of a common size."""
    config, ids = found.config, np.array([0, found.config.vocab_size - 1])
    if isinstance(config.scheme, te.SinusoidalGrid) or config.dtype not in (None, np.float32):
        return
    with np.errstate(invalid="ignore"):  # A flipped bit can make a signaling NaN.
        given = {name: array.astype(np.float64) for name, array in given.items()}
    if any(not np.all(np.abs(array) < 1e6) for array in given.values()):
        return
    positions, scheme = None, config.scheme
    if scheme is not None:
        tokens = np.ones(2, bool) if scheme.at_padding is None else ids != scheme.pad_id
        positions = np.where(tokens, np.cumsum(tokens) - 1 + scheme.start, scheme.at_padding or 0)
    options = {} if config.num_token_types is None else {"token_types": np.zeros(2, np.int32)}
    got = te.Embedder(config).apply(found.params, None, ids, is_training=False, **options)
    scale = np.sqrt(config.table_width) if config.scale is True else config.scale or 1
    x = (
        np.where((ids == config.pad_id)[:, None], 0, given["token_embedding/embeddings"][ids])
        * scale
    )
    if isinstance(config.scheme, te.Learned):
        x = x + given["learned_positional_encoding/embeddings"][positions]
    elif config.scheme is not None:
        names = ("base", "layout", "shift", "odd", "frequency_scale")
        constants = {name: getattr(config.scheme, name) for name in names}
        x = x + np.array(
            [
                [float(c) for c in oracle.encoding(int(p), config.table_width, **constants)]
                for p in positions
            ]
        )
    if config.num_token_types is not None:
        x = x + given["token_type_embedding/embeddings"][0]
    size = np.abs(x).max(initial=1)
    if config.layer_norm_eps is not None:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.layer_norm_eps)
        x = scaled * given["layer_norm/scale"] + given.get("layer_norm/offset", 0)
        # An error of the sum is divided by the deviation of its channels.
        spread = np.sqrt((centred**2).mean(-1).min() + config.layer_norm_eps)
        size = size / spread * np.abs(given["layer_norm/scale"]).max() + np.abs(x).max()
    np.testing.assert_allclose(got, x, rtol=0, atol=size * 2**-19)


def with_changes(data, changes, keep):
    data = bytearray(data)
    for at, token in changes:
        data[at : at + len(token)] = token
    return bytes(data[:keep])


@pytest.mark.parametrize("place", ["transformer_embedding", "layer_norm", "offset"])
def test_a_renamed_offset_is_refused(tmp_path, place):
    name = "transformer_embedding/~/layer_norm/offset"
    renamed = name.replace(place, f"0{place[1:]}").encode()
    path = tmp_path / "x.safetensors"
    # The first of the two in each pair of names is the parameter's.
    path.write_bytes(SAVED.replace(name.encode(), renamed, 1))
    with pytest.raises(
        ValueError,
        match=r"a tensor for each parameter, also for transformer_embedding/~/layer_norm/o",
    ):
        load_embedder(path)


@settings(max_examples=100)
@given(CHANGES, st.none() | st.integers(0, len(SAVED)))
def test_flipped_and_truncated_files(changes, keep):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "x.safetensors")
        path.write_bytes(with_changes(SAVED, changes, keep))
        right_or_refused(path)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.one_of(
        CHANGES,
        st.lists(
            st.tuples(st.integers(HEADER, len(SAVED) - 4), st.binary(min_size=1, max_size=4)),
            max_size=4,
        ),
    )
)
def test_flipped_files_embed_as_the_formula_says(changes):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "x.safetensors")
        path.write_bytes(with_changes(SAVED, changes, None))
        right_or_refused(path, is_embedded=True)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(list(te.EmbedderConfig.__dataclass_fields__)), JSON, max_size=3
    ),
    st.dictionaries(st.sampled_from(["rotary", "bias", "names"]), JSON, max_size=2),
)
def test_crafted_metadata(config, extras):
    with tempfile.TemporaryDirectory() as folder:
        config = {"vocab_size": 7, "d_model": 6, "scheme": None} | config
        path = pathlib.Path(folder, "x.safetensors")
        right_or_refused(written(path, {CONFIG: json.dumps(config), EXTRAS: json.dumps(extras)}))


NAMES = [
    "vocab_size",
    "hidden_size",
    "model_type",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "text_config",
    "layer_norm_eps",
]
NAMES += [
    "pad_token_id",
    "max_position_embeddings",
    "head_dim",
    "num_attention_heads",
    "partial_rotary_factor",
    "scale_embedding",
]


@settings(max_examples=100)
@given(
    st.sampled_from(["bert", "roberta", "phi", "llama, llama3", "gemma3", "m2m100"]),
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3),
)
def test_crafted_config_json(name, entries):
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(
            pathlib.Path(folder), CASES[name], settings=CASES[name]["settings"] | entries
        )
        right_or_refused(path)


SOME = st.fixed_dictionaries(
    {
        "scheme": st.sampled_from(
            [
                None,
                {"kind": "Sinusoidal", "base": 7.5, "shift": 0.25, "start": -3},
                {"kind": "Sinusoidal"},
            ]
        )
    },
    optional={
        "scale": st.sampled_from([True, False, 2.5]),
        "pad_id": st.sampled_from([None, 0, 6]),
        "dtype": st.sampled_from([None, "float32"]),
    },
)


@pytest.mark.slow
@settings(max_examples=60)
@given(SOME)
def test_files_of_any_config_embed_as_the_formula_says(config):
    with tempfile.TemporaryDirectory() as folder:
        config = {"vocab_size": 7, "d_model": 6} | config
        path = pathlib.Path(folder, "x.safetensors")
        right_or_refused(written(path, {CONFIG: json.dumps(config)}), is_embedded=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "bart"])
def test_published_models_embed_as_the_formula_says(tmp_path, name):
    found = load(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    embeds_as_the_formula(
        found,
        {"/".join(name.split("/")[-2:]): tensors[tensor] for name, tensor in found.names.items()},
    )


def test_the_largest_piece_is_bounded(tmp_path, monkeypatch):
    """Pieces of one row, and of a leading axis of 1, join to the whole."""
    monkeypatch.setattr(files, "PIECE", 1)
    table = np.random.default_rng(0).random((1, 1, 9, 4), np.float32)
    save_file({"t": table}, tmp_path / "x")
    array = files.open_tensors(tmp_path / "x").read("t")
    np.testing.assert_array_equal(array, table)
