"""Two processes of four devices each, on the loopback with JAX's own runtime, against one process
of eight."""

import os
import pathlib
import runpy
import socket
import subprocess
import sys

import numpy as np
import pytest
from compare import near

ROOT = pathlib.Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "two_processes.py"
NAMES = ("dense", "by_rows", "by_exchange")
# A hang fails; a run takes some five seconds.
TIMEOUT = 240
# The sums over the devices may go in another order: a gradient that differs by 2**-24 of itself, a
# few times, makes Adam's step of 0.01 differ by some parts in 2**-20 of that, in each of four
# steps; the losses are means of numbers below 16.
LOSS_ERROR = 16 * 16 * 2.0**-24
TABLE_ERROR = 4 * 0.01 * 2.0**-10


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def start(out, port, number):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), f"127.0.0.1:{port}", "2", str(number), str(out)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def alone():
    """The losses and the table of each training, in this process."""
    argv, environment = sys.argv, dict(os.environ)
    sys.argv = [str(SCRIPT), "", "1", "0"]
    try:
        script = runpy.run_path(str(SCRIPT))
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
    return {name: script["trained"](name) for name in NAMES}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes printed, what they found, and what one process finds."""
    out, port = tmp_path_factory.mktemp("processes") / "2.npz", free_port()
    processes = [start(out, port, number) for number in range(2)]
    try:
        one = alone()
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text
    return printed, dict(np.load(out)), one


@pytest.mark.gate
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_as_one(results, name):
    _, two, one = results
    losses, table = one[name]
    assert losses[-1] < losses[0]
    near(two[f"{name}_losses"], losses, atol=LOSS_ERROR)
    near(two[f"{name}_table"], table, atol=TABLE_ERROR)


@pytest.mark.gate
def test_each_process_prints_the_same_losses_and_the_first_what_they_are(results):
    first, second = (text.splitlines() for text in results[0])
    *first, last = first
    assert "they fall, and every process prints the same. The dense training has another" in last
    said = "dense Adam, cross", "lazy Adam by rows, squared", "lazy Adam by exchanged rows, squared"
    for name, *lines in zip(said, first, second, strict=True):
        for number, line in enumerate(lines):
            assert line.startswith(f"process {number} of 2, 8 devices, {name}")
        assert len({line.split(": ")[1] for line in lines}) == 1
