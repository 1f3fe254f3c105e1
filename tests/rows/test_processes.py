"""Two processes that share eight devices, on the loopback with JAX's own runtime, against one
process."""

import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys

import numpy as np
import pytest
from compare import near

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "two_processes.py"
COUNT = 2
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


def start(out, port, count, number):
    command = [sys.executable, SCRIPT, f"127.0.0.1:{port}", f"{count}", f"{number}", out]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **options)


@pytest.fixture(scope="module")
def one():
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
def results(tmp_path_factory, one):
    """What each process printed, what they found, and how they met the functions of the package."""
    out, port = tmp_path_factory.mktemp("processes") / "2.npz", free_port()
    processes = [start(out, port, COUNT, number) for number in range(COUNT)]
    try:
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text
    surfaces = [
        json.loads(pathlib.Path(f"{out}.{i}.json").read_text()) for i in range(len(printed))
    ]
    return printed, dict(np.load(out)), surfaces


@pytest.mark.gate
@pytest.mark.parametrize("name", NAMES)
def test_several_processes_train_as_one(results, one, name):
    _, several, _ = results
    losses, table = one[name]
    assert losses[-1] < losses[0]
    near(several[f"{name}_losses"], losses, atol=LOSS_ERROR)
    near(several[f"{name}_table"], table, atol=TABLE_ERROR)


@pytest.mark.gate
def test_each_process_prints_the_same_losses_and_the_first_explains_them(results):
    assert "they fall, and every process prints the\nsame. The dense training" in results[0][0]
    # Warnings of libraries may stand between them.
    lines = [text.splitlines() for text in results[0]]
    texts = [[line for line in each if line.startswith("process ")] for each in lines]
    said = "dense Adam, cross", "lazy Adam by rows, squared", "lazy Adam by exchanged rows, squared"
    for name, *lines in zip(said, *texts, strict=True):
        for number, line in enumerate(lines):
            assert line.startswith(f"process {number} of {len(texts)}, 8 devices, {name}")
        assert len({line.split(": ")[1] for line in lines}) == 1


@pytest.mark.gate
def test_every_function_takes_or_names_arrays_of_several_processes(results):
    """Each device of a process would hold another "replica" otherwise, or jax's error speak of
    devices that are not addressable."""
    first, *others = results[2]
    assert all(other == first for other in others)
    for name, found in first.items():
        blamed = {"exchange_load": "ids"}.get(name, name.removeprefix("check_batch, "))
        message = f"{blamed}: wanted values that this process has (each checks its own part of"
        takes = name in ("save_embedder", "resize")
        assert (found is True) if takes else found.startswith(message), (name, found)
