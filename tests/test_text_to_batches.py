"""The program of the page "From text to batches": killed and resumed, alone and as two processes."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

PROGRAM = pathlib.Path(__file__).parents[1] / "notebooks" / "text_to_batches.py"
# With shorter rows, and checkpoints that come sooner.
SMALLER = """
import text_to_batches

text_to_batches.LENGTH, text_to_batches.STEPS_BETWEEN_CHECKPOINTS = 64, 3
text_to_batches.main()
"""
pytestmark = pytest.mark.gate


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for n in range(20):
        (folder / f"{n}.txt").write_text(f"{n} times <pad> is not {n + 1}.\n" * (20 + 9 * n))
    return sorted(folder.iterdir())


def start(out, text, steps, *process):
    command = [sys.executable, "-c", SMALLER, "--out", out, "--steps", str(steps), *text]
    command += ["--process", *process] if process else []
    # Of the two devices that a process has, each takes a part of a batch.
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (PROGRAM.parents[1], PROGRAM.parent)))
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **output)


def digest(program):
    printed, _ = program.communicate(timeout=300)
    assert program.returncode == 0, printed
    return re.search("parameters: sha256 (.*)", printed)[1], printed


def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path, text):
    whole, printed = digest(start(tmp_path / "whole", text, 5))
    assert re.search(r"step 1: loss 7\.\d+, log\(vocabulary\) 7\.625", printed)
    killed = start(tmp_path / "killed", text, 5)
    while not (tmp_path / "killed" / "checkpoints" / "3").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert digest(start(tmp_path / "killed", text, 5))[0] == whole


def test_two_processes_train_one_model(tmp_path, text):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [start(tmp_path / "out", text, 4, str(n), "2", address) for n in (0, 1)]
    printed = "".join(each.communicate(timeout=300)[0] for each in both)
    assert [each.returncode for each in both] == [0, 0], printed
    assert "held out: " in printed
