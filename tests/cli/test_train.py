import contextlib
import functools
import io
import json
import math
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from compare import equal
from drawn import drawn

import transformer_embed as te
from transformer_embed.cli import language_model, train
from transformer_embed.cli.main import main

MODULE = "transformer_embedding/~/token_embedding"
# Enough to beat the frequencies of bytes on the text. All trainings share it, and so what they
# compile.
STEPS = 20
POSITIONS = "sinusoidal", "learned"


@pytest.fixture(scope="module", autouse=True)
def one_layer():
    """A model that compiles in half the time, and trains in less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "NUM_LAYERS", 1)
        patch.setattr(language_model, "BATCH_SIZE", 1)
        patch.setattr(language_model, "EVALUATION_TOKENS", max(language_model.LENGTHS))
        yield


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file):
    """The lines that a training printed, its progress bars, and the parameters that it wrote."""
    path = tmp_path_factory.mktemp("trained") / "params.safetensors"
    command = ["train", str(text_file), "--steps", str(STEPS), "--out", str(path)]
    command += ["--positions", ",".join(POSITIONS)]
    out, err = io.StringIO(), Terminal()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(command) == 0
    return out.getvalue().splitlines(), err.getvalue(), path


@pytest.mark.slow
def test_train_prints_a_table(trained, text_file):
    lines, _, path = trained
    text = text_file.read_bytes()
    assert lines[0] == f"text: {text_file}, {len(text):,} bytes"
    assert lines[-1] == f"The model with sinusoidal positions is in {path}."
    assert max(map(len, lines[1:-1])) <= 80
    assert lines[3].split()[2:] == ["128", "bytes", "256", "bytes", "512", "bytes"]
    sinusoidal, learned = (line.split() for line in lines[4:6])
    assert (sinusoidal[0], learned[0]) == POSITIONS
    # It has no positions for longer texts.
    assert learned[3:] == ["-", "-"]
    assert max(map(float, (sinusoidal[2], learned[2]))) < frequency_bits(text)


def frequency_bits(text):
    """Bits per byte of a model that knows the frequencies of single bytes."""
    shares = np.bincount(np.frombuffer(text, np.uint8)) / len(text)
    return -sum(share * math.log2(share) for share in shares if share)


@pytest.mark.slow
@pytest.mark.parametrize("positions", train.NAMES)
def test_positions_change_what_the_model_says_of_the_order_of_bytes(positions):
    """Without any, the last byte of a causal layer sees a set."""
    init, apply = language_model.model(positions)
    ids = np.array([[3, 1, 4, 1, 5, 9], [9, 5, 1, 4, 1, 9]], np.uint8)
    ids[0, -1] = 9
    ids[0, :-1] = sorted(ids[1, :-1])
    params = jax.tree.map(lambda leaf: 0.3 * leaf, drawn(init, ids))
    one, other = np.asarray(apply(params, ids))[:, -1]
    assert np.allclose(one, other, atol=1e-5) == (positions == "none")


@pytest.mark.slow
def test_longer_texts_are_scored_on_as_many_bytes():
    """A model whose logits are all equal needs eight bits for any byte."""
    text = bytes(range(256)) * 50
    params = language_model.model("none").init(jax.random.key(0), np.zeros([1, 4], np.uint8))
    params = jax.tree.map(np.zeros_like, params)
    over_devices = jax.sharding.NamedSharding(
        jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec("data")
    )
    bits = jax.jit(functools.partial(language_model._bits, "none", params))
    for length in language_model.LENGTHS:
        score = language_model._score(bits, np.frombuffer(text, np.uint8), over_devices, length)
        assert score == pytest.approx(8.0, abs=1e-5)


@pytest.mark.parametrize("names", ["sky", "none,none", "none,"])
def test_positions_are_names_each_once(fails, names):
    wanted = f"wanted some of sinusoidal,learned,rotary,alibi,none, got '{names}'"
    assert f"argument --positions: {wanted}" in fails("train", "--positions", names)


@pytest.mark.slow
def test_a_seed_decides_the_model_and_its_figures(prints, trained, text_file, tmp_path):
    lines, _, params = trained
    again = tmp_path / "again.safetensors"
    command = ["train", text_file, "--steps", STEPS, "--out", again]
    command += ["--positions", ",".join(POSITIONS)]
    printed = prints(*command)
    assert printed.out.replace(str(again), str(params)).splitlines() == lines
    # A bar is for a terminal.
    assert printed.err == ""
    found = te.pretrained.load_embedder(params)
    jax.tree.map(equal, te.pretrained.load_embedder(again).params, found.params)
    other = language_model.train(text_file.read_bytes(), "sinusoidal", steps=STEPS, seed=1)
    tables = found.params[MODULE]["embeddings"], other[0][MODULE]["embeddings"]
    assert np.not_equal(*tables).mean() > 0.99


@pytest.mark.slow
def test_a_bar_shows_compiling_training_with_the_loss_and_scoring(trained):
    shown = re.findall(r"(\w+), (compiling|training|scoring): ", trained[1])
    stages = [(name, stage) for name in POSITIONS for stage in ("compiling", "training", "scoring")]
    assert list(dict.fromkeys(shown)) == stages
    losses = re.findall(r"\w+, training: .* tokens/s, loss=(\d+\.\d\d)", trained[1])
    assert 0 < max(map(float, losses)) < 9


@pytest.mark.slow
def test_logits_see_only_what_came_before():
    init, apply = language_model.model("sinusoidal")
    ids = np.arange(12, dtype=np.uint8)[None]
    other = np.where(ids == 7, np.uint8(200), ids)
    params = jax.tree.map(lambda leaf: 0.05 * leaf, drawn(init, ids))
    logits = jax.jit(functools.partial(apply, params))
    first, second = (np.asarray(logits(each)) for each in (ids, other))
    equal(first[:, :7], second[:, :7])
    assert (first[:, 7:] != second[:, 7:]).any(-1).all()


def test_one_step_is_enough():
    """The warm-up is shorter than the training."""
    assert language_model._optimizer(1).init({"w": np.ones(3, np.float32)})


# --- Texts.


@pytest.fixture
def read(monkeypatch):
    """The text that a command would train on."""

    def run(*arguments):
        seen = []

        def stop(text, *args, **options):
            seen.append(text)
            raise ValueError("seen")

        monkeypatch.setattr(language_model, "train", stop)
        assert main(["train", *map(str, arguments)]) == 2
        return seen[0]

    return run


def test_files_are_joined_and_the_default_is_the_standard_library(read, capsys, text_file):
    assert read(text_file, text_file) == text_file.read_bytes() * 2
    capsys.readouterr()
    text = read()
    assert pathlib.Path(json.__file__).parents[1].joinpath("types.py").read_bytes() in text
    source = f"text: Python {sys.version.split()[0]} standard library, {len(text):,} bytes\n"
    assert capsys.readouterr().out.startswith(source)


def test_no_standard_library(monkeypatch, fails, tmp_path):
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    message = "does not hold the source of the standard library; name a FILE to train on"
    assert f"{tmp_path} {message}" in fails("train")


def test_the_shortest_text_is_enough_and_one_byte_less_is_named(fails, read, tmp_path):
    path, shortest = tmp_path / "text", language_model.SHORTEST_TEXT
    training, held_out = language_model.split(b"a" * shortest)
    # The longest text that is scored, and the byte after it.
    assert len(held_out) == language_model.LENGTHS[-1] + 1 <= len(training)
    path.write_bytes(b"a" * shortest)
    assert len(read(path)) == shortest
    path.write_bytes(b"a" * (shortest - 1))
    message = f"the text has {shortest - 1} bytes; give FILEs of {shortest} bytes or more in all"
    assert message in fails("train", path)


# --- The file that it writes.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--out: wanted a name that ends in .safetensors, got ''"),
        ("x.txt", "--out: wanted a name that ends in .safetensors, got '...x.txt'"),
        ("missing/x.safetensors", "--out: wanted a file in a folder that you may write to, got"),
        ("folder.safetensors", "--out: wanted a regular file, got"),
        ("loop.safetensors", "--out: wanted a regular file, got"),
    ],
)
def test_files_that_cannot_be_written_are_named_before_training(
    fails, monkeypatch, text_file, tmp_path, name, message
):
    monkeypatch.setattr(language_model, "train", lambda *_, **__: pytest.fail("trained first"))
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    printed = fails("train", text_file, "--out", tmp_path / name if name else "")
    assert all(part in printed for part in message.split("..."))


@pytest.mark.slow
def test_params_hold_the_model_and_the_config(prints, trained):
    path = trained[2]
    found = te.pretrained.load_embedder(path)
    assert {f"{MODULE}/embeddings", "query/w", "layer_norm/scale"} <= found.names.keys()
    assert found.config == te.EmbedderConfig(256, 128)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert "te.EmbedderConfig(vocab_size=256, d_model=128)" in prints("inspect", path).out


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_first_model_is_saved_and_its_scores_are_out_before_the_second_is_trained(
    monkeypatch, text_file, tmp_path, is_kept
):
    out, seen = tmp_path / "x.safetensors", []
    params = drawn(te.Embedder(language_model.config("sinusoidal")).init)
    pipe = io.TextIOWrapper(io.BytesIO())

    def record(text, name, **options):
        seen.append((name, out.exists(), pipe.buffer.getvalue().splitlines()[-1].split()[0]))
        return params, [2.0, 2.0, 2.0]

    monkeypatch.setattr(language_model, "train", record)
    with contextlib.redirect_stdout(pipe):
        assert main(["train", str(text_file), *(["--out", str(out)] if is_kept else [])]) == 0
    assert seen == [("sinusoidal", False, b"positions"), ("none", is_kept, b"sinusoidal")]


# --- Ctrl-C, in a process of its own.


@pytest.fixture
def ctrl_c_is_heard():
    """A child ignores Ctrl-C if this process does, as under `nohup ... &`; a handler here becomes
    the default one there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.gate
@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_stops_training_and_leaves_no_file(text_file, tmp_path):
    command = [sys.executable, "-m", "transformer_embed", "train", text_file]
    # Minutes of training, which end even if the signal is not heard.
    command += ["--steps", "5000", "--out", tmp_path / "x.safetensors"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # It prints this line just before it trains.
        assert process.stdout.readline().startswith(b"text: ")
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT
    assert list(tmp_path.iterdir()) == []
