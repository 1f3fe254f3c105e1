"""Two processes of four devices each, on the loopback with JAX's own runtime, against one process
of eight."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "two_processes.py"
# A hang fails; a run takes some five seconds.
TIMEOUT = 120
# The sums over the devices may go in another order: a gradient that differs by 2**-24 of itself, a
# few times, makes Adam's step of 0.01 differ by some parts in 2**-20 of that, in each of four
# steps; the losses are means of numbers below 16.
LOSS_ERROR = 16 * 16 * 2.0**-24
TABLE_ERROR = 4 * 0.01 * 2.0**-10


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def run(num_processes, out):
    """What each process printed, once all have ended well; none is left running."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), f"127.0.0.1:{free_port()}", str(num_processes)]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(out)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(num_processes)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text
    return printed


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    printed = {count: run(count, folder / f"{count}.npz") for count in (1, 2)}
    return printed, {count: dict(np.load(folder / f"{count}.npz")) for count in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "by_rows", "by_exchange"])
def test_two_processes_train_as_one(results, name):
    _, found = results
    one, two = (
        {part: found[count][f"{name}_{part}"] for part in ("losses", "table")} for count in (1, 2)
    )
    assert one["losses"].shape == two["losses"].shape == (4,)
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=0, atol=LOSS_ERROR)
    np.testing.assert_allclose(two["table"], one["table"], rtol=0, atol=TABLE_ERROR)
    assert one["losses"][-1] < one["losses"][0]


@pytest.mark.slow
def test_two_processes_by_exchange_train_as_by_replicated_rows(results):
    _, found = results
    np.testing.assert_allclose(
        found[2]["by_exchange_losses"], found[2]["by_rows_losses"], rtol=0, atol=LOSS_ERROR
    )
    np.testing.assert_allclose(
        found[2]["by_exchange_table"], found[2]["by_rows_table"], rtol=0, atol=TABLE_ERROR
    )


@pytest.mark.slow
def test_every_process_sees_every_device_and_the_same_losses(results):
    printed, _ = results
    lines = [text.splitlines() for text in printed[2]]
    rows = (
        "lazy Adam by rows, squared error of the embeddings",
        "lazy Adam by exchanged rows, squared error of the embeddings",
    )
    for i, name in enumerate(("dense Adam, cross entropy of the tied output", *rows)):
        heads, losses = zip(*(each[i].split(": ") for each in lines), strict=True)
        assert heads == tuple(f"process {process} of 2, 8 devices, {name}" for process in range(2))
        assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_output_explains_itself_and_holds_nothing_else(results):
    (first, second), (alone,) = (results[0][count] for count in (2, 1))
    assert [len(text.splitlines()) for text in (first, second, alone)] == [4, 3, 4]
    last = first.splitlines()[-1]
    assert (
        "they fall, and every process prints the same. The dense training has another loss than the two by rows."
        in last
    )
