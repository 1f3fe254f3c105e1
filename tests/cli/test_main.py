"""The parser, help and standard streams."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import transformer_embed as te
from transformer_embed.cli.main import main
from transformer_embed.cli.main import run as program

STEPS = "argument --steps: wanted an integer from 1 to 1000000000, got"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "x", "--step", "3"], "unrecognized arguments: --step 3; `transformer-embed train --help`"),
        (["train", "--steps", "0"], f"{STEPS} '0'"),
        (["train", "--seed", "2147483648"], "argument --seed: wanted an integer from 0 to 2147483647, got '2147483648'"),
        (["embed", "x"], "the following arguments are required: --from, --out"),
        (["inspect", "c", "--stack", "both"], "argument --stack: invalid choice: 'both'"),
    ],
)  # fmt: skip
def test_wrong_flags(fails, arguments, message):
    line = fails(*arguments)
    assert message in line
    assert "--help` lists the arguments" in line


@pytest.mark.parametrize(
    "command", ["", "train", "embed", "inspect", "show", "show encoding", "show rotary", "show mask", "show error"]
)  # fmt: skip
def test_help_fits_a_terminal(capsys, monkeypatch, command):
    """tests/test_docs.py compares it with the page of the command line."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: transformer-embed {command}".rstrip())
    assert max(map(len, out.splitlines())) <= 80


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"transformer-embed {te.__version__}\n"


# --- Standard streams.


@pytest.fixture
def exits(monkeypatch):
    """The exit status of the program with these standard streams, which are closed after it."""

    def run(stdout, stderr, *arguments):
        monkeypatch.setattr(sys, "argv", ["transformer-embed", *map(str, arguments)])
        with monkeypatch.context() as patch, stdout, stderr:
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", stderr)
            with pytest.raises(SystemExit) as stop:
                program()
            stderr.flush()
        return stop.value.code

    return run


def reader_is_gone():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full():
    return open("/dev/full", "w")


FULL = "transformer-embed: error: cannot write to standard output: No space left on device\n"
STEPS_0 = ["train", "x", "--steps", "0"]


@pytest.mark.parametrize(
    ("stdout", "stderr", "arguments", "status", "shown"),
    [
        (full, None, ["inspect"], 1, FULL),
        (full, full, ["inspect"], 1, ""),
        (reader_is_gone, None, ["inspect"], 1, ""),
        (None, full, ["inspect"], 0, ""),
        (None, full, STEPS_0, 2, ""),
    ],
)
def test_full_streams_show_no_traceback(
    exits, model_file, tmp_path, stdout, stderr, arguments, status, shown
):
    out, err = tmp_path / "out", tmp_path / "err"
    files = (made() if made else path.open("w") for made, path in ((stdout, out), (stderr, err)))
    arguments = [*arguments, model_file] if arguments == ["inspect"] else arguments
    assert exits(*files, *arguments) == status
    assert shown == (err.read_text() if stderr is None else "")


def test_a_name_that_the_terminal_cannot_show_is_escaped(exits, model_file, tmp_path):
    """A letter that the encoding lacks, and a byte that is no letter in any."""
    source, printed = tmp_path / "text", tmp_path / "printed"
    source.write_text("abc\n")
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xc3\xbc\xff.npz")
    arguments = ["embed", source, "--from", model_file, "--out", out]
    streams = printed.open("w", encoding="ascii"), (tmp_path / "err").open("w")
    assert exits(*streams, *arguments) == 0
    assert b"\\xfc\\udcff.npz: 1 lines of" in printed.read_bytes()
    assert pathlib.Path(out).exists()


@pytest.mark.gate
def test_closed_streams_do_not_cost_the_work(model_file, tmp_path):
    """In a process of its own: the file is whole, and not what XLA prints."""
    out, source = tmp_path / "x.npz", tmp_path / "text"
    source.write_text("abc\n")
    command = f"{sys.executable} -m transformer_embed embed {source} --from {model_file}"
    done = subprocess.run(["bash", "-c", f"{command} --out {out} <&- >&- 2>&-"], check=False)
    with np.load(out) as arrays:
        assert arrays["embeddings"].shape == (1, 3, 128)
    assert done.returncode == 0


@pytest.mark.gate
def test_wrong_flags_and_the_package_load_nothing_slow():
    code = (
        "import sys\nfrom transformer_embed.cli.main import main\nassert main(['train', '--wrong']) == 2\n"
        "print([name for name in ('optax', 'tqdm', 'safetensors', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr.count("\n") == 1
