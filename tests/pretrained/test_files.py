"""Files on disk: safetensors, shards, pickles, pipes, and how a file is replaced."""

import json
import os
import pickle
import re
import stat

import jax
import ml_dtypes
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
from safetensors.numpy import load_file, save_file

import transformer_embed as te
from transformer_embed._src.pretrained import files

# --- Other formats, each with what to do.


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_pickles_are_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        assert "a pickle may run code and is not opened: convert it" in refused(path)
    assert not (tmp_path / "exploded").exists()


def test_only_regular_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".."):
        with pytest.raises(ValueError, match=r"^path: wanted a regular file, got a folder, a pipe"):
            save_embedder(tmp_path / name, SMALL, PARAMS)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_model.safetensors", b"{}", "an adapter: merge it, by peft's model.merge_and_unload().save_"),
        ("model.Q4.gguf", b"{}", "restore it with the library that reads it and save it as safetensors"),
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
def test_a_folder_without_the_usual_file_says_what_to_do(tmp_path, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
    if "index" in name:
        (tmp_path / "model.fp16-00001-of-00002.safetensors").touch()
    assert message in refused(tmp_path)
    if content and not name.startswith(("model-", "adapter", "config")):
        assert message in refused(path)


def test_files_that_are_elsewhere_say_how_to_get_them(tmp_path):
    (tmp_path / "x").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid 0\n")
    assert "fetch it with `git lfs pull`" in refused(tmp_path / "x")


def test_a_model_name_in_place_of_a_path_says_to_download_it():
    message = "No such file or directory (for a model's name, pass the folder that huggingface_hub"
    assert message in refused("meta-llama/Llama-3.2-1B")
    with pytest.raises(TypeError, match=r"^path: wanted a str or another path, got None$"):
        load_embedder(None)


# --- Damaged files.


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file(tmp_path, keep):
    path = checkpoint(tmp_path, CASES["bert"])
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors: wanted a whole safetensors file, got one" in refused(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{}trailing",
        b'{"wte.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 8]}}',
        b'{"wte.weight": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_a_wrong_header(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "file, got one that cannot be read (" in refused(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json, as JSON: Expecting "),
        ("[]", "config.json: wanted a JSON object, got list"),
        ("[" * 100_000, "config.json, as JSON: maximum recursion"),
    ],
)
def test_a_damaged_config(tmp_path, text, message):
    path = checkpoint(tmp_path, CASES["bert"])
    (tmp_path / "config.json").write_text(text)
    assert message in refused(path)


@pytest.mark.parametrize(
    ("dtype", "code"), [("float64", "F64"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")]
)
def test_a_dtype_that_is_not_read(tmp_path, dtype, code):
    tensors = {name: array.astype(dtype) for name, array in tensors_of(CASES["gpt2"]).items()}
    # A quantized model's scale, which is not what is wrong.
    scales = {f"{name}_scale": array[:1] for name, array in tensors.items() if "wte" in name}
    path = checkpoint(tmp_path, CASES["gpt2"], change=tensors | scales)
    message = (
        rf"wte\.weight: wanted F32 or BF16 or F16, got {code}\[.*\]: convert it first \(a quantized"
    )
    assert re.search(message, refused(path))


def test_a_part_of_zero_3_is_refused(tmp_path):
    """It asked for settings={'hidden_size': 0}."""
    empty = {"wte.weight": np.zeros(0, np.float32)}
    for change in (empty, {"wte.weight": np.zeros((0, 8), np.float32)}):
        path = checkpoint(
            tmp_path, CASES["gpt2"], change={f"transformer.{k}": v for k, v in change.items()}
        )
        assert "transformer.wte.weight: wanted a whole tensor, got F32[0" in refused(path)


# --- What is read.


def in_shards(folder, case):
    """Each tensor in a file of its own."""
    tensors = tensors_of(case)
    names = {name: f"model-{n:05}.safetensors" for n, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file, {})
    (folder / "config.json").write_text(json.dumps(case["settings"]))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return names


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_shards_are_the_same_and_only_those_needed_are_opened(tmp_path, name):
    (tmp_path / "whole").mkdir()
    expected = load(tmp_path / "whole", name)
    for tensor, file in in_shards(tmp_path, CASES[name]).items():
        if tensor not in expected.names.values():
            (tmp_path / file).unlink()
    assert_identical(expected, load_embedder(tmp_path))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {}}, "got 0 tensors: "),
        ({"weight_map": ["a"]}, "wanted a weight_map from tensors to files, got ['a']"),
        ({"weight_map": {"a": "/etc/passwd"}}, "wanted shards in its folder, got '/etc/passwd'"),
        ({"weight_map": {"a": "../x.safetensors"}}, "wanted shards in its folder, got '../x.s"),
        ({"weight_map": {"a": "a/../../x"}}, "wanted shards in its folder, got 'a/../../x'"),
        ({"weight_map": {"wte.weight": "s", "wpe.weight": "s"}}, "s: wanted a tensor wte.weight, got"),
    ],
)  # fmt: skip
def test_a_damaged_index(tmp_path, index, message):
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "s", {})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert message in refused(tmp_path, settings={"model_type": "gpt2"})


def test_only_parameters_are_read_and_each_is_copied_once(tmp_path, monkeypatch):
    copied, addresses = files.Tensors.read, []

    def read(*args):
        array = copied(*args)
        addresses.append(array.ctypes.data)
        return array

    monkeypatch.setattr(files.Tensors, "read", read)
    found = load(tmp_path, "bert with a head")
    assert len(addresses) == len(found.names) == 5
    leaves = jax.tree.leaves(found.params)
    assert {leaf.unsafe_buffer_pointer() for leaf in leaves} == set(addresses)


@pytest.mark.parametrize("piece", [1, 13])
def test_pieces_of_any_size_join_to_the_whole(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(files, "PIECE", piece)
    table = np.random.default_rng(0).random((1, 1, 9, 4), np.float32)
    save_file({"t": table, "same": table, "other": -table}, tmp_path / "x")
    tensors = files.open_tensors(tmp_path / "x")
    for rows, columns in (
        (slice(None), slice(None)),
        (slice(2, 7), slice(1, 3)),
        (slice(3, 3), slice(0, 0)),
    ):
        np.testing.assert_array_equal(tensors.read("t", rows, columns), table[0, 0, rows, columns])
    assert tensors.are_equal("t", "same")
    assert not tensors.are_equal("t", "other")


# --- By hand: with a config, and the names of the tensors.

AT = te.EmbedderConfig(5, 4, scheme=te.Learned(3))
NORMED = te.EmbedderConfig(5, 4, scheme=None, layer_norm_eps=1e-5)
PLAIN = te.EmbedderConfig(5, 4, scheme=None)
EYE = np.eye(5, 4, dtype=np.float32)
PLACES = np.arange(12, dtype=np.float32).reshape(3, 4)
SHORT = {"token_embedding/embeddings": "t"}
SCALE = {"layer_norm/scale": "n", "layer_norm/offset": None}
NORM = {"t": EYE, "n": np.ones(4, np.float32)}


def by_hand(folder, config, names, tensors):
    save_file(tensors, folder / "x.safetensors")
    return load_embedder(folder / "x.safetensors", config=config, names=names)


def test_paths_may_be_shortened_offsets_left_out_and_leading_axes_of_one_dropped(tmp_path):
    found = by_hand(tmp_path, AT, SHORT | {POSITIONS: "p"}, {"t": EYE, "p": PLACES[None]})
    assert found.names == {TOKENS: "t", POSITIONS: "p"}
    np.testing.assert_array_equal(jax.tree.leaves(found.params)[0], PLACES)
    normed = by_hand(tmp_path, NORMED, SHORT | SCALE, NORM)
    norm = normed.params[f"{ROOT}layer_norm"]
    assert (norm["scale"].tolist(), norm["offset"].tolist()) == ([1] * 4, [0] * 4)
    assert f"{ROOT}layer_norm/offset" not in normed.names
    save_embedder(tmp_path / "y", AT, found.params, names={"token_embedding/embeddings": "wte"})
    assert set(load_file(tmp_path / "y")) == {"wte", POSITIONS}


@pytest.mark.parametrize("width", [4, 5])
@pytest.mark.parametrize(
    ("name", "is_in_out"),
    [
        ("h.kernel", True),
        ("h/w", True),
        ("h.weight", False),
        ("w.table", False),
        ("w.table.T", True),
    ],
)
def test_a_name_says_how_a_linear_layer_lies(tmp_path, name, is_in_out, width):
    """Of a square one, nothing else does."""
    config = te.EmbedderConfig(5, width, scheme=None, output=te.OutputConfig(tied=False))
    output = np.arange(5.0 * width, dtype=np.float32).reshape(5, width)
    lies = np.ascontiguousarray(output.T) if is_in_out else output
    tensors = {"t": output, name.removesuffix(".T"): lies}
    names = SHORT | {"output_embeddings": name}
    found = by_hand(tmp_path, config, names, tensors)
    table = found.params[f"{ROOT}token_embedding"]["output_embeddings"]
    np.testing.assert_array_equal(table, output)
    save_embedder(tmp_path / "saved", *found)
    np.testing.assert_array_equal(load_file(tmp_path / "saved")[name.removesuffix(".T")], lies)
    assert_identical(load_embedder(tmp_path / "saved"), found)


PATHS = "names: wanted a parameter's path, or a suffix that only one path has, among"
EACH = "wanted a tensor for each parameter, also for"


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (AT, {"embeddings": "t"}, PATHS),
        (AT, {"bedding/embeddings": "t"}, PATHS),
        (AT, SHORT | {TOKENS: "p"}, PATHS),
        (AT, SHORT | {"head/w": "t"}, "learned_positional_encoding/embeddings, got 'head/w'"),
        (AT, SHORT, f"{EACH} {POSITIONS}, got only ['transformer_"),
        (AT, None, "config and names: wanted both or neither, got one of them"),
        (PLAIN, {TOKENS: "x"}, "x.safetensors: wanted a tensor x, got 4 tensors: n, p, t, wide"),
        (PLAIN, {TOKENS: "wide"}, "wide: wanted F32 or BF16 or F16, got F64[5, 4]: convert it first"),
        (NORMED, SHORT | SCALE | {"layer_norm/scale": None}, "x.safetensors: wanted a tensor None, got 4"),
    ],
)  # fmt: skip
def test_names_by_hand_that_are_wrong(tmp_path, config, names, message):
    tensors = NORM | {"p": PLACES, "wide": np.ones((5, 4))}
    with pytest.raises((TypeError, ValueError)) as error:
        by_hand(tmp_path, config, names, tensors)
    assert message in str(error.value)


# --- Where a file is written.


@pytest.mark.parametrize("mode", [0o600, 0o664, None])
def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_new_files(tmp_path, mode):
    path, plain = tmp_path / "x", tmp_path / "plain"
    plain.touch()
    if mode is not None:
        path.touch()
        path.chmod(mode)
    save_embedder(path, SMALL, PARAMS)
    expected = stat.S_IMODE(plain.stat().st_mode) if mode is None else mode
    assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    save_embedder(tmp_path / "link", SMALL, PARAMS)
    assert (tmp_path / "link").is_symlink()
    assert load_embedder(tmp_path / "target").config == SMALL
