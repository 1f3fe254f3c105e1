"""The command `train`: its table, its model, its text, and the file that it writes."""

import contextlib
import io
import math
import pathlib
import re
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from compare import equal
from drawn import drawn

import transformer_embed as te
from transformer_embed.cli import language_model, train
from transformer_embed.cli.main import main

MODULE = "transformer_embedding/~/token_embedding"
# 8 steps are enough to beat the frequencies of bytes on the text.
COMMAND = "train {} --steps 8 --out {} --positions sinusoidal,learned"


@pytest.fixture(scope="module", autouse=True)
def one_layer():
    """A model that compiles in half the time, and trains in less and in fewer steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "NUM_LAYERS", 1)
        patch.setattr(language_model, "D_MODEL", 64)
        patch.setattr(language_model, "BATCH_SIZE", 1)
        patch.setattr(language_model, "PEAK_LEARNING_RATE", 2e-2)
        patch.setattr(language_model, "EVALUATION_TOKENS", max(language_model.LENGTHS))
        # Eight devices that share the cores of one machine are slower than two.
        two_devices = jax.devices()[:2]
        patch.setattr(jax, "devices", lambda: two_devices)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file):
    """The lines that a training printed, its progress bars, and the parameters that it wrote."""
    path = tmp_path_factory.mktemp("trained") / "params.safetensors"
    out, err = io.StringIO(), io.StringIO()
    err.isatty = lambda: True
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(COMMAND.format(text_file, path).split()) == 0
    return out.getvalue().splitlines(), err.getvalue(), path


@pytest.mark.slow
def test_train_prints_a_table_while_bars_show_its_stages(trained, text_file):
    lines, bars, path = trained
    text = text_file.read_bytes()
    assert lines[0] == f"text: {text_file}, {len(text):,} bytes"
    assert lines[-1] == f"The model with sinusoidal positions is in {path}."
    assert max(map(len, lines[1:-1])) <= 80
    assert lines[3].split()[2:] == ["128", "bytes", "256", "bytes", "512", "bytes"]
    sinusoidal, learned = (line.split() for line in lines[4:6])
    # It has no positions for longer texts.
    assert learned[3:] == ["-", "-"]
    shares = np.bincount(np.frombuffer(text, np.uint8)) / len(text)
    of_frequencies = -sum(share * math.log2(share) for share in shares if share)
    assert max(map(float, (sinusoidal[2], learned[2]))) < of_frequencies
    shown = dict.fromkeys(re.findall(r"(\w+, (?:compiling|training|scoring)): ", bars))
    stages = "compiling", "training", "scoring"
    assert [*shown] == [f"{row[0]}, {stage}" for row in (sinusoidal, learned) for stage in stages]
    losses = re.findall(r"\w+, training: .* tokens/s, loss=(\d+\.\d\d)", bars)
    assert 0 < max(map(float, losses)) < 9


@pytest.mark.slow
def test_train_writes_the_first_model(prints, trained):
    _, _, path = trained
    assert [*path.parent.iterdir()] == [path]
    found = te.pretrained.load_embedder(path)
    assert {f"{MODULE}/embeddings", "query/w", "layer_norm/scale"} <= found.names.keys()
    config = f"te.EmbedderConfig(vocab_size=256, d_model={language_model.D_MODEL})"
    assert config in prints(f"inspect {path}").out


@pytest.mark.slow
def test_a_seed_decides_the_model_and_its_figures(prints, monkeypatch, text_file, tmp_path):
    """Without layers, and scored on one length, because all of them are slow to compile."""
    monkeypatch.setattr(language_model, "NUM_LAYERS", 0)
    printed, tables = [], []
    for seed in (0, 0, 1):
        path = tmp_path / "params.safetensors"
        command = f"train {text_file} --seed {seed} --steps 2 --out {path} --positions learned"
        printed.append(prints(command))
        tables.append(te.pretrained.load_embedder(path).params[MODULE]["embeddings"])
    assert printed[0] == printed[1]
    equal(tables[0], tables[1])
    assert printed[0].out != printed[2].out
    assert np.not_equal(tables[0], tables[2]).any()
    # A bar is for a terminal. Elsewhere, a line says that a model is being trained.
    assert printed[0].err.splitlines() == ["learned: training for 2 steps"]


# --- The model.


@pytest.mark.slow
@pytest.mark.parametrize("positions", train.POSITION_NAMES)
def test_logits_depend_on_earlier_tokens_and_through_positions_on_their_order(positions):
    """Without any, the last byte of a causal layer sees a set."""
    init, apply = language_model.model(positions)
    ids = np.array([[1, 1, 4, 5, 9, 9], [9, 5, 1, 4, 1, 9], [1, 1, 4, 5, 8, 9]], np.uint8)
    params = drawn(init, ids, scale=0.3)
    ordered, shuffled, other = np.asarray(jax.jit(apply)(params, ids))
    assert np.allclose(ordered[-1], shuffled[-1], atol=1e-5) == (positions == "none")
    np.testing.assert_allclose(ordered[:4], other[:4], atol=1e-6)
    assert (ordered[4:] != other[4:]).any(-1).all()


@pytest.mark.parametrize("length", language_model.LENGTHS)
def test_each_byte_is_scored_once(length):
    """But the first one, and the rest that is shorter than a piece."""
    text = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    bits = lambda windows: np.asarray(windows)[:, 1:].mean(-1)
    score = language_model._score(bits, text, device, length)
    count = (len(text) - 1) // length * length
    assert score == pytest.approx(text[1 : 1 + count].mean())


# --- Arguments and texts.


@pytest.fixture
def read(monkeypatch):
    """The text that a command would train on."""

    def run(*files):
        seen = []

        def stop(text, *_, **__):
            seen.append(text)
            raise ValueError

        monkeypatch.setattr(language_model, "train", stop)
        assert main(["train", *map(str, files)]) == 2
        return seen[0]

    return run


def test_files_are_joined_and_the_default_is_the_standard_library(read, capsys, text_file):
    assert read(text_file, text_file) == text_file.read_bytes() * 2
    capsys.readouterr()
    text = read()
    assert pathlib.Path(types.__file__).read_bytes() in text
    source = f"text: Python {sys.version.split()[0]} standard library, {len(text):,} bytes\n"
    assert capsys.readouterr().out.startswith(source)


def test_the_shortest_text_is_enough(read, tmp_path):
    text = b"a" * language_model.SHORTEST_TEXT
    training, held_out = language_model.split(text)
    # The longest text that is scored, and the byte after it.
    assert len(held_out) == language_model.LENGTHS[-1] + 1 <= len(training)
    (tmp_path / "text").write_bytes(text)
    assert read(tmp_path / "text") == text
    # The warm-up is shorter than one step.
    assert language_model._optimizer(1).init({"w": np.ones(3, np.float32)})


SOME = "argument --positions: wanted some of sinusoidal,learned,rotary,alibi,none, got "
SHORT = language_model.SHORTEST_TEXT - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--positions sky", f"{SOME}'sky'"),
        ("--positions none,none", f"{SOME}'none,none'"),
        ("--positions none,", f"{SOME}'none,'"),
        ("--out ''", "--out: wanted a name that ends in .safetensors, got ''"),
        ("--out x.txt", "--out: wanted a name that ends in .safetensors, got 'x.txt'"),
        ("--out missing/x.safetensors", "--out: wanted a file in a folder that you may write to, got"),
        ("--out folder.safetensors", "--out: wanted a regular file, got"),
        ("--out loop.safetensors", "--out: wanted a regular file, got"),
        ("short", f"the text has {SHORT} bytes; give FILEs of {SHORT + 1} bytes or more in all"),
        ("", "folder.safetensors does not hold the source of the standard library; name a FILE to"),
    ],
)  # fmt: skip
def test_faulty_arguments_are_named_before_training(
    fails, monkeypatch, tmp_path, arguments, message
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("folder.safetensors").mkdir()
    pathlib.Path("loop.safetensors").symlink_to("loop.safetensors")
    pathlib.Path("short").write_bytes(b"a" * SHORT)
    stdlib = "." if arguments else "folder.safetensors"
    pathlib.Path("text.py").write_bytes(b"a" * 2 * SHORT)
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: {"stdlib": stdlib})
    monkeypatch.setattr(language_model, "train", lambda *_, **__: pytest.fail("trained first"))
    assert message in fails(f"train {arguments}")


def test_the_first_model_is_saved_and_its_scores_are_out_before_the_second_is_trained(
    monkeypatch, text_file, tmp_path
):
    out, seen = tmp_path / "x.safetensors", []
    params = drawn(te.Embedder(language_model.config("sinusoidal")).init)
    pipe = io.TextIOWrapper(io.BytesIO())

    def record(text, name, **options):
        seen.append((name, out.exists(), pipe.buffer.getvalue().splitlines()[-1].split()[0]))
        return language_model.TrainedModel(params=params, bits_per_byte=[2.0, 2.0, 2.0])

    monkeypatch.setattr(language_model, "train", record)
    with contextlib.redirect_stdout(pipe):
        assert main(["train", str(text_file), "--out", str(out)]) == 0
    assert seen == [("sinusoidal", False, b"positions"), ("none", True, b"sinusoidal")]


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
    # Minutes of training, which end even if the signal is not heard.
    arguments = f"train {text_file} --steps 5000 --out {tmp_path}/x.safetensors"
    command = [sys.executable, "-m", "transformer_embed", *arguments.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # It prints this line just before it trains.
        assert process.stdout.readline().startswith(b"text: ")
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT
    assert list(tmp_path.iterdir()) == []
