import contextlib
import functools
import hashlib
import io
import json
import math
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time

import jax
import numpy as np
import pytest
from command_line import TABLE
from safetensors import safe_open

import transformer_embed as te
from transformer_embed._src.pretrained.own import CONFIG
from transformer_embed.cli import language_model, train
from transformer_embed.cli.arguments import UserError
from transformer_embed.cli.main import main

SCORE = re.compile(r"\d+\.\d\d")
# Enough to beat the frequencies of bytes on the text. All trainings share it, and so what they
# compile.
STEPS = 30
# A float64 mean of n < 1000 terms of one sign: at most n roundings.
FLOAT64_MEAN = 1000 * 2.0**-53


@pytest.fixture(scope="module", autouse=True)
def one_layer():
    """A model that compiles in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "NUM_LAYERS", 1)
        yield


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file):
    """What a training printed, its progress bars, and the parameters that it wrote."""
    path = tmp_path_factory.mktemp("trained") / "params.safetensors"
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(Terminal()) as err,
    ):
        assert main(["train", str(text_file), "--steps", str(STEPS), "--out", str(path)]) == 0
    return out.getvalue(), err.getvalue(), path


def scores_of(lines):
    """The last column of the table: with positions, without, and of single bytes."""
    return [line.split()[-1] for line in lines[5:8]]


@pytest.mark.slow
def test_train_prints_a_table(trained, text_file):
    lines = trained[0].splitlines()
    assert lines[1] == f"sha256: {hashlib.sha256(text_file.read_bytes()).hexdigest()}"
    assert max(len(line) for line in lines[1:] if str(trained[2]) not in line) <= 80
    assert [line[:20].strip() for line in lines[5:8]] == [
        "sinusoidal positions",
        "no positions",
        "unigram",
    ]
    assert all(map(SCORE.fullmatch, scores_of(lines)))


@pytest.mark.slow
def test_train_says_in_a_sentence_what_positions_are_worth(trained):
    lines = trained[0].splitlines()
    with_positions, without, _ = map(float, scores_of(lines))
    assert lines[-1] == train.verdict(with_positions, without, STEPS)


@pytest.mark.parametrize(
    ("with_positions", "without", "sentence"),
    [
        (2.534, 3.086, "With positions the model needs 0.56 bits per byte fewer."),
        (3.0, 2.9, "With positions the model needs 0.10 bits per byte more, after 1,000 steps."),
        (3.004, 3.001, "Positions make no difference after 1,000 steps."),
    ],
)
def test_the_verdict_agrees_with_the_figures_of_the_table(with_positions, without, sentence):
    assert train.verdict(with_positions, without, 1000) == sentence


@pytest.mark.slow
def test_train_says_where_the_model_is_or_how_to_keep_it(monkeypatch, capsys, trained, text_file):
    assert trained[0].splitlines()[2] == f"The model with sinusoidal positions is in {trained[2]}."
    monkeypatch.setattr(
        language_model,
        "train",
        lambda *_, **__: language_model.Result(te.EmbedderConfig(1, 1), {}, 2.0),
    )
    assert main(["train", str(text_file)]) == 0
    assert (
        capsys.readouterr().out.splitlines()[2]
        == "The model is not kept; `--out PARAMS.safetensors` writes it to a file."
    )


@pytest.mark.slow
def test_the_progress_bar_shows_the_loss_falling(trained):
    losses = [
        float(loss)
        for loss in re.findall(r"sinusoidal, training: 100%.*loss=(\d+\.\d\d)\]", trained[1])
    ]
    assert losses[-1] < 8.0
    assert "none, training: 100%" in trained[1]


@pytest.mark.slow
def test_training_twice_gives_the_same_output_and_parameters(capsys, trained, text_file, tmp_path):
    printed, _, params = trained
    again = tmp_path / "again.safetensors"
    assert (
        main(["train", str(text_file), "--steps", str(STEPS), "--out", str(again), "--quiet"]) == 0
    )
    captured = capsys.readouterr()
    assert captured.out.replace(str(again), str(params)) == printed
    assert captured.err == ""
    assert again.read_bytes() == params.read_bytes()


@pytest.mark.slow
def test_another_seed_gives_another_model(trained, text_file):
    result = language_model.train(
        text_file.read_bytes(), te.Sinusoidal(), "sinusoidal", steps=STEPS, seed=1, quiet=True
    )
    with safe_open(trained[2], framework="numpy") as file:
        assert (
            file.get_tensor(TABLE) != result.params[TABLE.rsplit("/", 1)[0]]["embeddings"]
        ).mean() > 0.99


def test_unigram_bits_are_those_of_counts(text_file):
    text = text_file.read_bytes()
    cut = len(text) - int(len(text) * language_model.HELD_OUT)
    training, held_out = text[:cut], text[cut:]
    scored = held_out[
        1 : 1 + (len(held_out) - 1) // language_model.CONTEXT * language_model.CONTEXT
    ]
    bits = [
        -math.log2((training.count(bytes([byte])) + 1) / (len(training) + 256)) for byte in scored
    ]
    assert language_model.unigram_bits(text) == pytest.approx(
        math.fsum(bits) / len(bits), rel=FLOAT64_MEAN
    )


@pytest.mark.slow
def test_training_lowers_the_bits_below_those_of_a_model_that_knows_nothing(trained, text_file):
    bits = float(scores_of(trained[0].splitlines())[0])
    # The printed figure is rounded by at most half a hundredth.
    assert bits + 0.005 < language_model.unigram_bits(text_file.read_bytes())


def test_logits_see_only_what_came_before():
    config = te.EmbedderConfig(language_model.VOCAB_SIZE, language_model.D_MODEL, dropout_rate=0.0)
    init, apply = language_model.model(config)
    ids = np.arange(12, dtype=np.uint8)[None]
    other = ids.copy()
    other[0, 7] = 200
    params = jax.jit(init)(jax.random.key(0), ids)
    logits = jax.jit(functools.partial(apply, params))
    first, second = (np.asarray(logits(each)) for each in (ids, other))
    np.testing.assert_array_equal(first[:, :7], second[:, :7])
    assert (first[:, 7:] != second[:, 7:]).any(-1).all()


@pytest.mark.slow
def test_the_shortest_text_is_enough(trained):
    text = b"abc" * (language_model.SHORTEST_TEXT // 3)
    assert math.isfinite(
        language_model.train(text, None, "none", steps=STEPS, seed=0, quiet=True).bits
    )


def test_a_text_one_byte_too_short(fails, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a" * (language_model.SHORTEST_TEXT - 1))
    shortest = language_model.SHORTEST_TEXT
    assert (
        f"the text has {shortest - 1} bytes; give FILEs of {shortest} bytes or more in all"
        in fails("train", path)
    )


def test_files_are_joined(monkeypatch, text_file):
    seen = []

    def stop(text, *args, **options):
        seen.append(text)
        raise UserError("seen")

    monkeypatch.setattr(language_model, "train", stop)
    assert main(["train", str(text_file), str(text_file), "--quiet"]) == 2
    assert seen == [text_file.read_bytes() * 2]


def test_the_default_text_is_the_standard_library():
    text, source = train._library()
    assert pathlib.Path(json.__file__).parents[1].joinpath("types.py").read_bytes() in text
    assert source == f"Python {sys.version.split()[0]} standard library"
    assert text == train._library()[0]


def test_no_standard_library(monkeypatch, fails, tmp_path):
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert (
        f"{tmp_path} does not hold the source of the standard library; name a FILE to train on"
        in fails("train")
    )


@pytest.mark.slow
def test_params_hold_the_model_and_the_config(trained):
    path = trained[2]
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        fields = json.loads(file.metadata()[CONFIG])
        table = file.get_tensor(TABLE)
    assert {TABLE, "multi_head_attention/query/w", "layer_norm/scale"} <= names
    assert table.shape == (256, 128)
    assert (fields["vocab_size"], fields["d_model"], fields["scheme"]["kind"]) == (
        256,
        128,
        "Sinusoidal",
    )
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.slow
def test_embed_takes_what_train_wrote(capsys, trained, tmp_path):
    (tmp_path / "text").write_text("abc\n")
    assert (
        main(
            [
                "embed",
                str(tmp_path / "text"),
                "--from",
                str(trained[2]),
                "--out",
                str(tmp_path / "x.npz"),
                "--quiet",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == f"{tmp_path / 'x.npz'}: 1 lines of up to 3 tokens, 128 wide\n"


def test_a_folder_without_permission(monkeypatch, fails, text_file, tmp_path):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    line = fails("train", text_file, "--out", tmp_path / "x.safetensors")
    assert (
        "Permission denied; name a file in a folder that exists and that you may write to" in line
    )


def interrupted(command, *, at=r"training: +0%", by=signal.SIGINT):
    """The exit status, and what it showed on its terminal, of a command that gets a signal once it
    shows a text. It never outlives the call."""
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    try:
        shown = b""
        while not re.search(at.encode(), shown):
            chunk = read_terminal(ours)
            assert chunk, f"ended before it trained: {shown.decode()}"
            shown += chunk
        process.send_signal(by)
        process.communicate(timeout=60)
        while chunk := read_terminal(ours):
            shown += chunk
        return process.returncode, shown.decode()
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def read_terminal(ours):
    """What a terminal shows within a minute; nothing once its last writer has ended."""
    with contextlib.suppress(OSError):
        if select.select([ours], [], [], 60)[0]:
            return os.read(ours, 4096)
    return b""


@pytest.fixture
def ctrl_c_is_heard():
    """A child ignores Ctrl-C if this process does, as under `nohup ... &`; a handler here becomes
    the default one there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_training_and_leaves_no_file(text_file, tmp_path, by):
    out = tmp_path / "x.safetensors"
    status, shown = interrupted(
        [
            sys.executable,
            "-m",
            "transformer_embed",
            "train",
            text_file,
            "--steps",
            "1000000",
            "--out",
            out,
        ],
        by=by,
    )
    assert status == -by
    assert shown.splitlines()[-1].startswith("sinusoidal, training:")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_the_first_model_is_saved_before_the_second_is_trained(text_file, tmp_path, by):
    out = tmp_path / "x.safetensors"
    command = [sys.executable, "-m", "transformer_embed", "train", text_file, "--out", out]
    status, shown = interrupted([*command, "--steps", "10"], at=r"none, training: +0%", by=by)
    assert status == -by
    assert "Traceback" not in shown
    assert te.pretrained.load_embedder(out).config.d_model == 128
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seconds", [0.3, 0.6, 0.9, 1.2, 1.6, 2.2])
def test_ctrl_c_in_the_first_seconds_is_heard_and_prints_nothing(text_file, by, seconds):
    """Also while the package is imported."""
    command = [sys.executable, "-m", "transformer_embed", "train", text_file, "--steps", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        time.sleep(seconds)
        process.send_signal(by)
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -by
    assert shown == b""


@pytest.fixture
def in_the_background():
    """Under `nohup pytest &` SIGINT is ignored, and a child inherits that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


WAITS = "import sys, time; print('training:   0%', file=sys.stderr, flush=True); time.sleep(60)"


@pytest.mark.usefixtures("in_the_background", "ctrl_c_is_heard")
def test_ctrl_c_is_heard_where_the_tests_run_in_the_background():
    status, shown = interrupted([sys.executable, "-c", WAITS])
    assert status == -signal.SIGINT
    # Newer versions of Python print it in colour.
    assert re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()[-1] == "KeyboardInterrupt"


def test_a_command_that_does_not_hear_ctrl_c_never_outlives_the_test(monkeypatch):
    started = []

    class Impatient(subprocess.Popen):
        def communicate(self, input=None, timeout=None):
            started.append(self)
            return super().communicate(input, timeout and 0.1)

    monkeypatch.setattr(subprocess, "Popen", Impatient)
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    with pytest.raises(subprocess.TimeoutExpired):
        interrupted([sys.executable, "-c", f"{deaf}; {WAITS}"])
    assert started[0].poll() is not None
