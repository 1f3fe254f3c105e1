"""Files on disk: safetensors, shards, pickles, pipes, and how a file is replaced."""

import json
import os
import pathlib
import pickle
import stat
import tracemalloc

import jax
import ml_dtypes  # noqa: F401 (for arrays as text)
import numpy as np
import pytest
from checkpoints import (
    CASES,
    PARAMS,
    POSITIONS,
    ROOT,
    SMALL,
    TOKENS,
    assert_identical,
    checkpoint,
    load,
    load_embedder,
    refused,
    save_embedder,
    tensors_of,
)
from compare import equal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refused import each_raises
from refused import refused as refused_error
from safetensors.numpy import load_file, save_file

import transformer_embed as te
from transformer_embed._src.pretrained import parameters
from transformer_embed._src.pretrained import tensors as tensors_module

# --- Other formats, and damaged files, each with what to do.


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


PICKLE = pickle.dumps(Bomb())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pytorch_model.bin", PICKLE, "a pickle may run code and is not opened: convert it"),
        ("adapter_model.safetensors", b"{}", "an adapter: merge it, by peft's model.merge_and_unload().save_"),
        ("model.Q4.gguf", b"{}", "model.Q4.gguf: a GGUF file: convert it with transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="),
        ("model.onnx", b"{}", "an ONNX file: convert it with safetensors.numpy.save_file("),
        ("__0_0.distcp", b"{}", "a checkpoint of torch.distributed: convert it with torch.distributed"),
        ("model-00001-of-00002.safetensors", b"{}", "a shard: put the index file of all shards beside it"),
        ("model.fp16.safetensors", b"", "model.fp16.safetensors: pass it"),
        ("model.safetensors.index.fp16.json", b"", "index.fp16.json: pass it"),
        ("0_Transformer/model.safetensors", b"", "0_Transformer/model.safetensors: pass it"),
        ("orbax/0/default/_METADATA", b"{}", "_METADATA: restore it with the library"),
        ("epoch=3.ckpt.meta", b"{}", "epoch=3.ckpt.meta: restore it with the library"),
        ("config.json", b"{}", "config.json: te.pretrained.load_config reads it without parameters"),
        ("other", b"", "wanted a folder with model.safetensors or model.safetensors.index.json"),
    ],
)  # fmt: skip
def test_folder_without_the_usual_file_gives_advice(tmp_path, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
    if "index" in name:
        (tmp_path / "model.fp16-00001-of-00002.safetensors").touch()
    assert message in refused(tmp_path)
    if content and not name.startswith(("model-", "adapter", "config")):
        assert message in refused(path)
    assert not os.path.exists("exploded")


WHOLE = "model.safetensors: wanted a whole safetensors file, got one that cannot be read ("
SHARDS = "wanted shards in its folder, got "
INDEX = "model.safetensors.index.json"


def with_header(text):
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("meta-llama/Llama-3.2-1B", None, "No such file or directory (for a model's name, pass the folder that huggingface_hub"),
        (None, None, "path: wanted a str or another path, got None"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid 0\n", "fetch it with `git lfs pull`"),
        ("model.safetensors", b"", WHOLE),
        ("model.safetensors", with_header(b"{}trailing"), WHOLE),
        ("model.safetensors", with_header(b'{"wte.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 8]}}'), WHOLE),
        ("model.safetensors", with_header(b'{"wte.weight": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}'), WHOLE),
        ("config.json", b"{", "config.json, as JSON: Expecting "),
        ("config.json", b"[]", "config.json: wanted a JSON object, got list"),
        ("config.json", b"[" * 100_000, "config.json, as JSON: maximum recursion"),
        (INDEX, b'{"weight_map": {}}', "got 0 tensors: "),
        (INDEX, b'{"weight_map": ["a"]}', "wanted a weight_map from tensors to files, got ['a']"),
        (INDEX, b'{"weight_map": {"a": "/etc/passwd"}}', f"{SHARDS}'/etc/passwd'"),
        (INDEX, b'{"weight_map": {"a": "../x.safetensors"}}', f"{SHARDS}'../x.safetensors'"),
        (INDEX, b'{"weight_map": {"a": "a/../../x"}}', f"{SHARDS}'a/../../x'"),
        (INDEX, b'{"weight_map": {"a": "x\\u0000"}}', f"{SHARDS}'x\\x00'"),
        (INDEX, b'{"weight_map": {"wte.weight": "other", "wpe.weight": "other"}}', "other: wanted a tensor wte.weight, which model.safetensors.index.json says is there, got 1 tensors: other"),
        ("a\0b", None, "path: wanted a path without null bytes, got 'a\\x00b'"),
    ],
)  # fmt: skip
def test_a_missing_or_damaged_file(name, content, message):
    path = checkpoint(CASES["gpt2"])
    if content is None:
        path = name
    elif name == INDEX:
        path = path.rename("other").with_name(INDEX)
        save_file({"other": np.zeros(1, np.float32)}, "other", {})
    if content is not None:
        pathlib.Path(name).write_bytes(content)
    assert message in refused(path)


@pytest.mark.parametrize("keep", [7, 100, -1])
def test_a_truncated_file(keep):
    path = checkpoint(CASES["bert"])
    path.write_bytes(path.read_bytes()[:keep])
    assert WHOLE in refused(path)


CONVERT = "wte.weight: wanted F32 or BF16 or F16, got {}: convert it first (a quantized"
UNREAD = {
    "np.ones((12, 8))": CONVERT.format("F64[12, 8]"),
    "np.ones((12, 8), ml_dtypes.float8_e4m3fn)": CONVERT.format("F8_E4M3[12, 8]"),
    # As ZeRO-3 leaves it.
    "np.zeros(0, 'f4')": "wte.weight: wanted a whole tensor, got F32[0]",
    "np.zeros((0, 8), 'f4')": "wte.weight: wanted a whole tensor, got F32[0, 8]",
}


@pytest.mark.parametrize("array", UNREAD)
def test_a_tensor_that_is_not_read(array):
    # A quantized model's scale is not what is wrong.
    tensor, scale = eval(array), eval(array)[:1]
    change = {"transformer.wte.weight": tensor, "transformer.wte.weight_scale": scale}
    assert UNREAD[array] in refused(checkpoint(CASES["gpt2"], change=change))


# --- What is read.


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_only_shards_that_are_needed_are_opened(name):
    expected = load(name)
    whole = pathlib.Path("model.safetensors").rename("model-1.safetensors").name
    shards = dict.fromkeys(tensors_of(CASES[name]), "missing.safetensors")
    shards |= dict.fromkeys(expected.names.values(), whole)
    pathlib.Path(INDEX).write_text(json.dumps({"weight_map": shards}))
    assert_identical(expected, load_embedder("."))


def test_only_parameters_are_read_and_each_is_copied_once(monkeypatch):
    made, addresses = parameters.aligned_zeros, []

    def aligned_zeros(*args):
        array = made(*args)
        addresses.append(array.ctypes.data)
        return array

    monkeypatch.setattr(parameters, "aligned_zeros", aligned_zeros)
    found = load("bert with a head")
    assert len(addresses) == len(found.names) == 5
    leaves = jax.tree.leaves(found.params)
    assert {leaf.unsafe_buffer_pointer() for leaf in leaves} == set(addresses)


@pytest.mark.slow
def test_added_rows_take_no_second_table():
    """Neither on one device nor on several, and a transpose is written where it belongs."""
    rows, width = 40_001, 256
    table = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    save_file({"model.embed_tokens.weight": table}, "model.safetensors")
    entries = {"model_type": "llama", "tie_word_embeddings": True, "num_hidden_layers": 1}
    pathlib.Path("config.json").write_text(json.dumps(entries))
    mesh = jax.make_mesh((8,), ("data",))
    split = {"token_embedding/embeddings": NamedSharding(mesh, P("data"))}
    load_embedder(".")
    for shardings in (None, split):
        tracemalloc.start()
        found = load_embedder(".", row_multiple=1024, shardings=shardings)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # The result itself is in pages that Python does not count.
        assert peak < table.nbytes / 2
        read = np.asarray(found.params[f"{ROOT}token_embedding"]["embeddings"])
        assert read.shape == (40 * 1024, width)
        equal(read[:rows], table)
        equal(read[rows:], np.zeros((40 * 1024 - rows, width)))


@pytest.mark.parametrize("piece", [1, 13])
def test_pieces_of_any_size_join_to_the_whole(monkeypatch, piece):
    monkeypatch.setattr(tensors_module, "PIECE_BYTES", piece)
    table = np.random.default_rng(0).random((1, 1, 9, 4), np.float32)
    others = {"wide": table.reshape(4, 9), "other": -table}
    save_file({"t": table, "same": table} | others, "x")
    tensors = tensors_module.open_tensors("x")
    for part in np.s_[:, :], np.s_[2:7, 1:3], np.s_[3:3, 0:0]:
        equal(tensors.read("t", *part), table[0, 0][part])
    assert tensors.are_equal("t", "same")
    # Equal bytes of another shape are another tensor.
    assert not tensors.are_equal("t", "other")
    assert not tensors.are_equal("t", "wide")


# --- By hand: with a config, and the names of the tensors.

AT = te.EmbedderConfig(5, 4, scheme=te.Learned(3))
NORMED = te.EmbedderConfig(5, 4, scheme=None, layer_norm_eps=1e-5)
PLAIN = te.EmbedderConfig(5, 4, scheme=None)
SHORT = {"token_embedding/embeddings": "t"}
SCALE = {"layer_norm/scale": "n", "layer_norm/offset": None}
TENSORS = {
    "t": np.eye(5, 4, dtype=np.float32),
    "n": np.ones(4, np.float32),
    "p": np.arange(12, dtype=np.float32).reshape(1, 3, 4),
    "wide": np.ones((5, 4)),
}


def by_hand(config, names, tensors=TENSORS):
    save_file(tensors, "x.safetensors")
    return load_embedder("x.safetensors", config=config, names=names)


def test_paths_may_be_shortened_offsets_left_out_and_leading_axes_of_one_dropped():
    found = by_hand(AT, SHORT | {POSITIONS: "p"})
    assert found.names == {TOKENS: "t", POSITIONS: "p"}
    equal(jax.tree.leaves(found.params)[0], TENSORS["p"][0])
    normed = by_hand(NORMED, SHORT | SCALE)
    norm = normed.params[f"{ROOT}layer_norm"]
    assert (norm["scale"].tolist(), norm["offset"].tolist()) == ([1] * 4, [0] * 4)
    assert f"{ROOT}layer_norm/offset" not in normed.names
    save_embedder("y", AT, found.params, names={"token_embedding/embeddings": "wte"})
    assert set(load_file("y")) == {"wte", POSITIONS}


@pytest.mark.parametrize("width", [4, 5])
@pytest.mark.parametrize("name", ["h.kernel", "h/w", "w.table.T", "h.weight", "w.table"])
def test_a_name_says_how_a_linear_layer_lies(name, width):
    """Of a square one, nothing else does."""
    config = te.EmbedderConfig(5, width, scheme=None, output=te.OutputConfig(tied=False))
    output, tensor = np.arange(5.0 * width, dtype="f4").reshape(5, width), name.removesuffix(".T")
    lies = output if name in ("h.weight", "w.table") else np.ascontiguousarray(output.T)
    names = SHORT | {"output_embeddings": name}
    found = by_hand(config, names, {"t": output, tensor: lies})
    equal(found.params[f"{ROOT}token_embedding"]["output_embeddings"], output)
    save_embedder("saved", *found)
    equal(load_file("saved")[tensor], lies)
    assert_identical(load_embedder("saved"), found)


PATHS = "ValueError: names: wanted a parameter's path, or a suffix that only one path has, among"
WRONG_NAMES = {
    "by_hand(AT, {'embeddings': 't'})": PATHS,
    "by_hand(AT, {'bedding/embeddings': 't'})": PATHS,
    "by_hand(AT, SHORT | {TOKENS: 'p'})": PATHS,
    "by_hand(AT, SHORT | {'head/w': 't'})": f"{PATHS} ... got 'head/w'",
    "by_hand(AT, SHORT)": f"ValueError: ... for each parameter, also for {POSITIONS}, got only ['transformer_",
    "by_hand(AT, None)": "ValueError: config and names: wanted both or neither, got one of them",
    "by_hand(PLAIN, {TOKENS: 'x'})": "ValueError: x.safetensors: wanted a tensor x, got 4 tensors: n, p, t, wide",
    "by_hand(PLAIN, {TOKENS: 'wide'})": "ValueError: ... wide: wanted F32 or BF16 or F16, got F64[5, 4]: convert it first",
    "by_hand(NORMED, SHORT | SCALE | {'layer_norm/scale': None})": "ValueError: x.safetensors: wanted a tensor None, got 4",
}  # fmt: skip


def test_names_by_hand_that_are_wrong():
    each_raises(WRONG_NAMES, globals())


# --- Where a file is written.


@pytest.mark.parametrize("mode", [0o600, 0o664, None])
def test_file_keeps_its_mode_and_new_file_has_the_default_mode(mode):
    """A link stays a link, and only regular files are replaced."""
    path, link = pathlib.Path("x"), pathlib.Path("link")
    path.touch()
    expected = stat.S_IMODE(path.stat().st_mode) if mode is None else mode
    path.chmod(expected)
    link.symlink_to(path)
    if mode is None:
        path.unlink()
    save_embedder(link, SMALL, PARAMS)
    assert stat.S_IMODE(path.stat().st_mode) == expected
    assert link.is_symlink()
    assert load_embedder(link).config == SMALL
    os.mkfifo("pipe")
    with refused_error(ValueError, "path: wanted a path without null bytes, got 'a\\x00b'"):
        save_embedder("a\0b", SMALL, PARAMS)
    for name in ("pipe", ".."):
        with pytest.raises(ValueError, match=r"^path: wanted a regular file, got a folder, a pipe"):
            save_embedder(name, SMALL, PARAMS)
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)
