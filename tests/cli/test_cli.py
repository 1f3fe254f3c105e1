import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import transformer_embed as te
from transformer_embed.cli import main as command_line
from transformer_embed.cli import train as _train
from transformer_embed.cli.main import PAD_ID, main
from transformer_embed.pretrained import CONFIG
from transformer_embed.pretrained import files as _files
from transformer_embed.pretrained.config_json import config_from_json, config_to_json

LAST_LINE = re.compile(r"bits per byte: sinusoidal (\d+\.\d\d), none (\d+\.\d\d), unigram (\d+\.\d\d)")
TABLE = "transformer_embedding/~/token_embedding/embeddings"
# float32 values below 8 are rounded by at most 2**-22: the factor, the product, the encoding and the sum are.
BY_HAND = 4 * 2.0**-22
# Batches of other shapes are other programs: XLA may fuse the product and the sum, which is one rounding less.
FUSED_SUM = 2 * 2.0**-22
# A float64 mean of n < 1000 terms of one sign: at most n roundings.
FLOAT64_MEAN = 1000 * 2.0**-53


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text, and %d squared is %d\n" % (n, n, n * n) for n in range(100)))
    return path


@pytest.fixture(scope="module", autouse=True)
def one_layer():
    """A model that compiles in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_train, "NUM_LAYERS", 1)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory, text_file):
    """What a training printed, and the parameters that it wrote."""
    path = tmp_path_factory.mktemp("trained") / "params.safetensors"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["train", str(text_file), "--steps", "2", "--out", str(path), "--quiet"]) == 0
    assert err.getvalue() == ""
    return out.getvalue(), path


@pytest.fixture(scope="module")
def trained(run):
    return run[1]


def fails(capsys, *arguments):
    """The one line on stderr of a command that must fail."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("transformer-embed: error: ")
    return captured.err


def by_hand(params, ids):
    """The embeddings from the paper's formula: row times sqrt(d_model), plus the sinusoids; rows of padding are zeros."""
    table = np.asarray(params, np.float64)
    rows = np.where((ids >= 0)[..., None], table[np.maximum(ids, 0)], 0) * math.sqrt(table.shape[1])
    angles = np.arange(ids.shape[1])[:, None] * 10_000.0 ** (-2 * np.arange(table.shape[1] // 2) / table.shape[1])
    return rows + np.stack([np.sin(angles), np.cos(angles)], -1).reshape(ids.shape[1], -1)


def test_train_prints_a_table(run, text_file):
    lines = run[0].splitlines()
    assert lines[1] == f"sha256: {hashlib.sha256(text_file.read_bytes()).hexdigest()}"
    assert max(map(len, lines[1:])) <= 80
    figures = LAST_LINE.fullmatch(lines[-1])
    assert [line.split()[-1] for line in lines[-5:-2]] == list(figures.groups())


def test_training_twice_gives_the_same_output_and_parameters(capsys, run, text_file, tmp_path):
    printed, params = run
    assert main(["train", str(text_file), "--steps", "2", "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "again").read_bytes() == params.read_bytes()


def test_another_seed_gives_another_model(run, text_file):
    result = _train.train(text_file.read_bytes(), te.Sinusoidal(), "sinusoidal", steps=2, seed=1, quiet=True)
    with safe_open(run[1], framework="numpy") as file:
        assert (file.get_tensor(TABLE) != result.params[TABLE.rsplit("/", 1)[0]]["embeddings"]).mean() > 0.99


def test_unigram_bits_are_those_of_counts(text_file):
    text = text_file.read_bytes()
    cut = len(text) - int(len(text) * _train.HELD_OUT)
    training, held_out = text[:cut], text[cut:]
    scored = held_out[1 : 1 + (len(held_out) - 1) // _train.CONTEXT * _train.CONTEXT]
    bits = [-math.log2((training.count(bytes([byte])) + 1) / (len(training) + 256)) for byte in scored]
    assert _train.unigram_bits(text) == pytest.approx(math.fsum(bits) / len(bits), rel=FLOAT64_MEAN)


def test_training_lowers_the_bits_below_those_of_a_model_that_knows_nothing(text_file):
    result = _train.train(text_file.read_bytes(), te.Sinusoidal(), "sinusoidal", steps=30, seed=0, quiet=True)
    assert result.bits < _train.unigram_bits(text_file.read_bytes())


def test_logits_see_only_what_came_before():
    config = te.EmbedderConfig(_train.VOCAB_SIZE, _train.D_MODEL, dropout_rate=0.0)
    model = _train.hk.without_apply_rng(_train.hk.transform(lambda ids: _train.next_byte_logits(config, ids, is_training=False)))
    ids = np.arange(12, dtype=np.uint8)[None]
    other = ids.copy()
    other[0, 7] = 200
    params = model.init(jax.random.key(0), ids)
    first, second = (np.asarray(model.apply(params, each)) for each in (ids, other))
    np.testing.assert_array_equal(first[:, :7], second[:, :7])
    assert (first[:, 7:] != second[:, 7:]).any(-1).all()


def test_the_shortest_text_is_enough():
    result = _train.train(b"abc" * (_train.SHORTEST_TEXT // 3), None, "none", steps=1, seed=0, quiet=True)
    assert math.isfinite(result.bits)


def test_a_text_one_byte_too_short(capsys, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a" * (_train.SHORTEST_TEXT - 1))
    line = fails(capsys, "train", path)
    assert f"the text has {_train.SHORTEST_TEXT - 1} bytes; give FILEs of {_train.SHORTEST_TEXT} bytes or more in all" in line


def test_files_are_joined(monkeypatch, text_file):
    seen = []

    def stop(text, *args, **options):
        seen.append(text)
        raise command_line.UserError("seen")

    monkeypatch.setattr(_train, "train", stop)
    assert main(["train", str(text_file), str(text_file), "--quiet"]) == 2
    assert seen == [text_file.read_bytes() * 2]


def test_the_default_text_is_the_standard_library():
    text, source = command_line._library()
    assert pathlib.Path(json.__file__).parents[1].joinpath("types.py").read_bytes() in text
    assert source == f"Python {sys.version.split()[0]} standard library"
    assert text == command_line._library()[0]


def test_no_standard_library(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command_line.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert f"no source of the standard library in {tmp_path}; name a FILE to learn" in fails(capsys, "train")


def test_bars_are_on_stderr_until_quiet(capsys, trained, text_file, tmp_path):
    command = ["embed", str(text_file), "--params", str(trained), "--out", str(tmp_path / "x.npz")]
    assert main(command) == 0
    assert "embedding: 100%" in capsys.readouterr().err
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_params_hold_the_model_and_the_config(trained):
    with safe_open(trained, framework="numpy") as file:
        names = set(file.keys())
        fields = json.loads(file.metadata()[CONFIG])
        table = file.get_tensor(TABLE)
    assert {TABLE, "query/w", "layer_norm/scale"} <= names
    assert table.shape == (256, 128)
    assert (fields["vocab_size"], fields["d_model"], fields["positions"]["kind"]) == (256, 128, "Sinusoidal")
    assert [path.name for path in trained.parent.iterdir()] == [trained.name]


@pytest.mark.parametrize("tokens_a_batch", [1, 40, 16_384])
def test_embed_is_the_embedder_on_padded_lines(monkeypatch, capsys, trained, tmp_path, tokens_a_batch):
    monkeypatch.setattr(command_line, "TOKENS_A_BATCH", tokens_a_batch)
    lines = ["short", "", "a longer line", "ünï"]
    source, out = tmp_path / "lines.txt", tmp_path / "x.npz"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main(["embed", str(source), "--params", str(trained), "--out", str(out), "--quiet"]) == 0
    assert capsys.readouterr().out == f"{out}: 4 lines of up to 13 tokens, 128 wide\n"
    with np.load(out) as arrays:
        got = dict(arrays)
    ids = np.full((4, 13), PAD_ID, np.int32)
    for row, line in zip(ids, lines, strict=True):
        row[: len(line.encode())] = list(line.encode())
    np.testing.assert_array_equal(got["ids"], ids)
    np.testing.assert_array_equal(got["mask"], ids != PAD_ID)
    np.testing.assert_array_equal(got["positions"], [list(range(13))] * 4)
    assert {name: array.dtype for name, array in got.items()} == {"ids": "i4", "mask": "?", "positions": "i4", "embeddings": "f4"}
    with safe_open(trained, framework="numpy") as file:
        table = file.get_tensor(TABLE)
        config = config_from_json(file.metadata()[CONFIG])
    np.testing.assert_allclose(got["embeddings"], by_hand(table, ids), rtol=0, atol=BY_HAND)
    module, name = TABLE.rsplit("/", 1)
    apply = te.make_embedder(dataclasses.replace(config, pad_id=PAD_ID)).apply
    np.testing.assert_allclose(got["embeddings"], apply({module: {name: table}}, None, ids, is_training=False), rtol=0, atol=FUSED_SUM)


def test_all_batches_have_one_shape(monkeypatch, trained, text_file, tmp_path):
    shapes = []

    def make_embedder(config):
        embedder = real(config)

        def apply(params, rng, ids, **options):
            shapes.append(ids.shape)
            return embedder.apply(params, rng, ids, **options)

        return embedder._replace(apply=apply)

    real = te.make_embedder
    monkeypatch.setattr(te, "make_embedder", make_embedder)
    monkeypatch.setattr(command_line, "TOKENS_A_BATCH", 1_000)
    assert main(["embed", str(text_file), "--params", str(trained), "--out", str(tmp_path / "x.npz"), "--quiet"]) == 0
    assert len(shapes) > 1
    assert len(set(shapes)) == 1
    assert len(shapes) * shapes[0][0] % 100 != 0


def test_ids_and_bytes_are_the_same_tokens(trained, tmp_path):
    (tmp_path / "text").write_bytes(b"ab\r\n\xff\n")
    (tmp_path / "ids").write_bytes(b"97  98\n\t255 \n")
    for name, flags in (("text", []), ("ids", ["--ids"])):
        out = str(tmp_path / f"{name}.npz")
        assert main(["embed", str(tmp_path / name), "--params", str(trained), "--out", out, "--quiet", *flags]) == 0
    with np.load(tmp_path / "text.npz") as text, np.load(tmp_path / "ids.npz") as ids:
        assert text["ids"].tolist() == [[97, 98], [255, PAD_ID]]
        for name in text.files:
            np.testing.assert_array_equal(text[name], ids[name])


@pytest.mark.parametrize("wrong", ["256", "-1", "x", "1.0", "1_0", "+5", "٣", "9" * 5000])
def test_a_wrong_id_is_named(capsys, trained, tmp_path, wrong):
    source, out = tmp_path / "ids", tmp_path / "x.npz"
    source.write_text(f"1 2 3\n4 {wrong} 5\n", encoding="utf-8")
    line = fails(capsys, "embed", source, "--ids", "--params", trained, "--out", out)
    assert f"{source}, line 2: wanted integers from 0 to 255, the vocabulary of the parameters, got {wrong[:20]!r}" in line
    assert list(tmp_path.iterdir()) == [source]


def save_embedder(path, config, **change):
    params = te.make_embedder(config).init(jax.random.key(0))
    arrays = {f"{module}/{name}": np.asarray(leaf) for module, leaves in params.items() for name, leaf in leaves.items()}
    save_file(change.get("arrays", arrays), path, metadata={CONFIG: change.get("text", config_to_json(config))})
    return path


def test_a_byte_past_a_small_vocabulary_is_named(capsys, tmp_path):
    source = tmp_path / "text"
    source.write_bytes(b"\x05\x09")
    params = save_embedder(tmp_path / "p", te.EmbedderConfig(7, 6))
    assert "wanted integers from 0 to 6, the vocabulary of the parameters, got 'byte 9'" in fails(
        capsys, "embed", source, "--params", params, "--out", tmp_path / "x.npz"
    )


def test_a_line_past_max_len_is_refused(capsys, tmp_path):
    source, out = tmp_path / "ids", tmp_path / "x.npz"
    params = save_embedder(tmp_path / "p", te.EmbedderConfig(7, 6, positions=te.Learned(3)))
    source.write_text("1 2 3 4")
    line = fails(capsys, "embed", source, "--ids", "--params", params, "--out", out)
    assert "a line has 4 tokens (ids or x: wanted a length of at most max_len = 3, got length 4); split such lines" in line
    source.write_text("1 2 3")
    assert main(["embed", str(source), "--ids", "--params", str(params), "--out", str(out), "--quiet"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrays": {"a": np.zeros(3)}}, f"wanted a tensor {TABLE}, got the tensors a F64[3]"),
        ({"arrays": {TABLE: np.zeros((7, 5), np.float32)}}, "wanted shape [7, 6], as the configuration says, "),
        ({"arrays": {TABLE: np.zeros((7, 6), np.float64)}}, "rounded to the config's param_dtype), got F64[7, 6]"),
        ({"text": "{}"}, "wanted an entry vocab_size, got only []; write it again with `train --out`"),
        ({"text": "[1]"}, "transformer_embed.config: wanted a JSON object, got [1]"),
        ({"text": '{"vocab_size": 0, "d_model": 6, "positions": null}'}, "wanted shape [0, 6], as the configuration says"),
        (
            {"text": '{"vocab_size": 7, "d_model": 6, "positions": {"kind": "rotary"}}'},
            "positions: kind: wanted one of Sinusoidal, SinusoidalGrid, Learned, got 'rotary'",
        ),
    ],
)
def test_parameters_of_another_kind(capsys, tmp_path, text_file, change, message):
    params = save_embedder(tmp_path / "p", te.EmbedderConfig(7, 6), **change)
    assert message in fails(capsys, "embed", text_file, "--params", params, "--out", tmp_path / "x.npz")
    assert list(tmp_path.iterdir()) == [params]


def test_parameters_without_metadata(capsys, tmp_path, text_file):
    save_file({"a": np.zeros(3)}, tmp_path / "p")
    assert "describes no embedder" in fails(capsys, "embed", text_file, "--params", tmp_path / "p", "--out", tmp_path / "x.npz")


@pytest.mark.parametrize("keep", [1, 7, 100, -1])
def test_truncated_parameters(capsys, trained, tmp_path, text_file, keep):
    params = tmp_path / "p"
    params.write_bytes(trained.read_bytes()[:keep])
    line = fails(capsys, "embed", text_file, "--params", params, "--out", tmp_path / "x.npz")
    assert f"{params}: wanted a whole safetensors file" in line
    assert "write it again with `train --out`" in line
    assert list(tmp_path.iterdir()) == [params]


@pytest.mark.parametrize("command", ["train", "embed"])
@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "null"])
def test_a_file_that_cannot_be_read(capsys, trained, tmp_path, command, kind):
    path = tmp_path / "bad"
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    name = "bad\0" if kind == "null" else path
    flags = ["--params", trained, "--out", tmp_path / "x.npz"] if command == "embed" else []
    line = fails(capsys, command, name, *flags)
    assert ("is empty; name a file that holds something" if kind == "empty" else "; name a file that exists and that you may read") in line
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize("content", [b"\n\n\n", b" \n"])
def test_a_file_without_tokens(capsys, trained, tmp_path, content):
    source = tmp_path / "lines"
    source.write_bytes(content)
    line = fails(capsys, "embed", source, "--ids", "--params", trained, "--out", tmp_path / "x.npz")
    assert f"{source} holds no tokens; give a file of ids" in line


def test_missing_parameters(capsys, text_file, tmp_path):
    line = fails(capsys, "embed", text_file, "--params", tmp_path / "none", "--out", tmp_path / "x.npz")
    assert f"cannot read {tmp_path / 'none'}: No such file or directory" in line


@pytest.mark.parametrize("command", ["train", "embed"])
@pytest.mark.parametrize("place", ["missing/x", "file/x", "", "x" * 300])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(monkeypatch, capsys, trained, text_file, tmp_path, command, place):
    monkeypatch.setattr(_train, "train", lambda *args, **options: pytest.fail("trained first"))
    (tmp_path / "file").write_text("kept")
    flags = ["--params", trained] if command == "embed" else []
    assert f"cannot write {tmp_path / place}: " in fails(capsys, command, text_file, "--out", tmp_path / place, *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_without_permission(monkeypatch, capsys, text_file, tmp_path):
    def refuse(name, *args, **options):
        if pathlib.Path(name).parent == tmp_path:
            raise PermissionError(13, "Permission denied")
        return open(name, *args, **options)

    monkeypatch.setattr(_files, "open", refuse, raising=False)
    line = fails(capsys, "train", text_file, "--out", tmp_path / "x")
    assert "Permission denied; name a file in a folder that exists and that you may write to" in line


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError(28, "No space left on device"), 2, "No space left on device; make room, or name a file elsewhere"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "out of memory; give a smaller FILE, or split it and its longest lines"),
    ],
)
def test_what_fails_while_writing_leaves_the_old_file(monkeypatch, capsys, trained, text_file, tmp_path, error, status, message):
    def half(file, **arrays):
        file.write(b"half")
        raise error

    monkeypatch.setattr(np, "savez", half)
    out = tmp_path / "x.npz"
    out.write_bytes(b"old")
    assert main(["embed", str(text_file), "--params", str(trained), "--out", str(out), "--quiet"]) == status
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert out.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_link_keeps_pointing_at_what_is_written(trained, text_file, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert main(["embed", str(text_file), "--params", str(trained), "--out", str(tmp_path / "link"), "--quiet"]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "--wrong"], "unrecognized arguments: --wrong"),
        (["train", "--step", "3"], "unrecognized arguments: --step"),
        (["train", "--steps", "0"], "argument --steps: wanted an integer from 1 to 1000000000, got '0'"),
        (["train", "--steps", "1e3"], "argument --steps: wanted an integer from 1 to 1000000000, got '1e3'"),
        (["train", "--seed", "2147483648"], "argument --seed: wanted an integer from 0 to 2147483647, got '2147483648'"),
        (["embed", "x"], "the following arguments are required: --out"),
        (["embed", "x", "--out", "y"], "one of the arguments --params --from is required"),
        (["embed", "x", "--out", "y", "--params", "p", "--from", "c"], "argument --from: not allowed with argument --params"),
        (["inspect", "c", "--stack", "both"], "argument --stack: invalid choice: 'both'"),
    ],
)
def test_wrong_flags(capsys, arguments, message):
    line = fails(capsys, *arguments)
    assert message in line
    assert "--help` lists what there is" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["train", "embed", "with and without positions"]),
        (["train"], ["FILE", "--out", "--steps", "--seed", "--quiet", "the last 5% of", "bits per byte", "standard library"]),
        (["embed"], ["FILE", "--params", "--out", "--ids", "--quiet", "embeddings [lines,", "mask", "id -1"]),
    ],
)
def test_help_explains(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [word for word in words if word not in out] == []


def test_ctrl_c_stops_training_with_one_line_and_no_file(text_file, tmp_path):
    arguments = [sys.executable, "-m", "transformer_embed", "train", str(text_file), "--steps", "1000000", "--out", str(tmp_path / "x")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    shown = b""
    while b"training:  0%" not in shown and b"training:   0%" not in shown:
        chunk = process.stderr.read1(4096)
        assert chunk, "ended before it trained"
        shown += chunk
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest.decode().splitlines()[-1] == "transformer-embed: interrupted"
    assert b"Traceback" not in shown + rest
    assert list(tmp_path.iterdir()) == []


def test_wrong_flags_and_help_load_nothing_slow():
    code = (
        "import sys\nfrom transformer_embed.cli.main import main\nassert main(['train', '--wrong']) == 2\n"
        "print([name for name in ('optax', 'tqdm', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr.count("\n") == 1


def test_no_file_is_written_over_one_that_is_read(capsys, trained, text_file, tmp_path):
    text, params, link = tmp_path / "text", tmp_path / "params", tmp_path / "link"
    text.write_bytes(text_file.read_bytes())
    params.write_bytes(trained.read_bytes())
    link.symlink_to(text)
    for out in (text, params, link):
        assert "it is also read; name another file" in fails(capsys, "embed", text, "--params", params, "--out", out)
    assert "it is also read; name another file" in fails(capsys, "train", text, "--out", text)
    assert text.read_bytes() == text_file.read_bytes()
    assert params.read_bytes() == trained.read_bytes()


def test_a_line_past_the_grid_is_refused(capsys, tmp_path, text_file):
    params = save_embedder(tmp_path / "p", te.EmbedderConfig(256, 8, positions=te.SinusoidalGrid((2, 2))))
    line = fails(capsys, "embed", text_file, "--params", params, "--out", tmp_path / "x.npz")
    assert "wanted a length of at most the 4 points of the grid, got length" in line


def test_an_unknown_flag_names_the_help_of_its_command(capsys, text_file):
    line = fails(capsys, "train", text_file, "--step", "3")
    assert line.endswith("unrecognized arguments: --step 3; `transformer-embed train --help` lists what there is\n")


def test_a_reader_that_has_enough_ends_it_in_silence(trained):
    command = f"{sys.executable} -m transformer_embed inspect {trained}; echo $? >&2"
    done = subprocess.run(["bash", "-c", f"({command}) | true"], capture_output=True, text=True, check=False)
    assert done.stderr == "1\n"
