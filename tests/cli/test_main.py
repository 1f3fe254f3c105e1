import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from transformer_embed.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "--wrong"], "unrecognized arguments: --wrong"),
        (["train", "--step", "3"], "unrecognized arguments: --step"),
        (
            ["train", "--steps", "0"],
            "argument --steps: wanted an integer from 1 to 1000000000, got '0'",
        ),
        (
            ["train", "--steps", "1e3"],
            "argument --steps: wanted an integer from 1 to 1000000000, got '1e3'",
        ),
        (
            ["train", "--seed", "2147483648"],
            "argument --seed: wanted an integer from 0 to 2147483647, got '2147483648'",
        ),
        (["embed", "x"], "the following arguments are required: --from, --out"),
        (["inspect", "c", "--stack", "both"], "argument --stack: invalid choice: 'both'"),
    ],
)
def test_wrong_flags(fails, arguments, message):
    line = fails(*arguments)
    assert message in line
    assert "--help` lists the arguments" in line


def test_an_unknown_flag_names_the_help_of_its_command(fails, text_file):
    line = fails("train", text_file, "--step", "3")
    assert line.endswith(
        "unrecognized arguments: --step 3; `transformer-embed train --help` lists the arguments\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["train", "embed", "inspect", "show", "with and without positions"]),
        (
            ["train"],
            [
                "FILE",
                "--out",
                "--steps",
                "--seed",
                "--quiet",
                "the last 5%",
                "bits per byte: lower is better",
                "standard library",
            ],
        ),
        (
            ["embed"],
            [
                "FILE",
                "--from",
                "--from",
                "--model-type",
                "--settings",
                "--out",
                "--ids",
                "--quiet",
                "embeddings [lines,",
                "id",
            ],
        ),
        (["inspect"], ["CHECKPOINT", "--stack", "--model-type", "--settings", "config.json"]),
    ],
)
def test_help_explains(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [word for word in words if word not in out] == []


@pytest.mark.slow
def test_wrong_flags_and_help_load_nothing_slow():
    code = (
        "import sys\nfrom transformer_embed.cli.main import main\nassert main(['train', '--wrong']) == 2\n"
        "print([name for name in ('optax', 'tqdm', 'safetensors', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_closed_pipe_ends_the_command_without_a_message(model_file):
    command = f"{sys.executable} -m transformer_embed inspect {model_file}; echo $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({command}) | true"], capture_output=True, text=True, check=False
    )
    assert done.stderr == "1\n"


# --- Standard streams.

CLOSED = st.fixed_dictionaries(
    {},
    optional={
        "0": st.sampled_from(["<&-", "</dev/null"]),
        "1": st.sampled_from([">&-", ">/dev/full", ">/dev/null"]),
        "2": st.sampled_from(["2>&-", "2>/dev/full", "2>/dev/null"]),
    },
)


def run_in_shell(command, streams, **variables):
    """The exit status, stdout and stderr of a command with other standard streams."""
    line = f"{sys.executable} -m transformer_embed {command} {' '.join(streams.values())}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, check=False, env=os.environ | variables
    )


@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CLOSED)
@example({"1": ">&-"})
@example({"2": "2>&-"})
@example({"1": ">&-", "2": "2>&-"})
@example({"1": ">/dev/full"})
@example({"1": ">/dev/full", "2": "2>/dev/full"})
def test_closed_and_full_streams_do_not_cost_the_work(model_file, text_file, streams):
    """The file is whole, and stderr has at most one line."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/x.npz"
        done = run_in_shell(f"embed {text_file} --from {model_file} --out {out}", streams)
        with np.load(out) as arrays:
            assert arrays["embeddings"].shape[-1] == 128
    is_full = streams.get("1") == ">/dev/full"
    assert done.returncode == int(is_full)
    line = b""
    if is_full and "2" not in streams:
        line = (
            b"transformer-embed: error: cannot write to standard output: No space left on device\n"
        )
    assert done.stderr == line


@pytest.mark.slow
@pytest.mark.parametrize("command", ["--help", "inspect {model}", "train x --steps 0"])
@pytest.mark.parametrize("stream", [">&-", "2>&-", ">/dev/full", "2>/dev/full"])
def test_no_command_shows_a_traceback(model_file, command, stream):
    done = run_in_shell(command.format(model=model_file), {"1": stream})
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
    is_lost = stream == ">/dev/full" and "inspect" in command
    assert done.returncode == (2 if "train" in command else int(is_lost))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_name_that_the_terminal_cannot_show_is_escaped(model_file, text_file, tmp_path, encoding):
    """A letter that the encoding lacks, and a byte that is no letter in any."""
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xc3\xbc\xff.npz")
    command = ["embed", text_file, "--from", model_file, "--out", out]
    done = subprocess.run(
        [sys.executable, "-m", "transformer_embed", *command],
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert done.stderr == b""
    assert b"\\udcff.npz: 100 lines of" in done.stdout
    assert pathlib.Path(out).exists()
