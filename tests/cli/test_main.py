"""The parser, help and standard streams."""

import subprocess
import sys

import pytest

import transformer_embed as te
from transformer_embed.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "--steps", "-1"], "--steps: wanted an int of at least 1, got -1"),
        (["train", "--seed", "2147483648"], "--seed: wanted an int of at most 2147483647, got 2147483648"),
        (["inspect"], "the following arguments are required: CHECKPOINT"),
        (["inspect", "c", "--stack", "both"], "argument --stack: invalid choice: 'both'"),
    ],
)  # fmt: skip
def test_wrong_flags(fails, arguments, message):
    assert message in fails(*arguments)


@pytest.mark.parametrize("command", ["", "train", "inspect"])
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


# --- Standard streams, in a process of its own.


@pytest.mark.gate
def test_a_reader_that_exits_first_is_no_error(model_file):
    command = f"{sys.executable} -m transformer_embed inspect {model_file} | head -c 1"
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    assert (len(done.stdout), done.stderr) == (1, b"")


@pytest.mark.gate
def test_wrong_flags_and_the_package_load_nothing_slow():
    code = (
        "import sys\nfrom transformer_embed.cli.main import main\nassert main(['inspect', '/missing']) == 2\n"
        "print([name for name in ('optax', 'tqdm', 'safetensors', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr.count("\n") == 1
