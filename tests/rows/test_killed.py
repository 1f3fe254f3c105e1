"""A process is killed in the middle of a run: the others fail soon, and the checkpoint that it was
writing is not taken for a whole one."""

import inspect
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from compare import equal
from jax import NamedSharding, P
from meshes import EXPLICIT, mesh_of
from test_checkpoints import restored
from test_processes import ROOT, SCRIPT, free_port

import transformer_embed as te

# The runtime gives up a process whose heartbeats it misses for so long (its own default is 100 s);
# the rest is for a busy machine.
HEARTBEATS, TIMEOUT = 4, 60
HAS_HEARTBEATS = (
    "heartbeat_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters
)
VOCAB, WIDTH = 2**17, 128

RUN = f"""
import functools, runpy
import jax
jax.distributed.initialize = functools.partial(jax.distributed.initialize, heartbeat_timeout_seconds={HEARTBEATS})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
SAVE = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp

mesh = jax.make_mesh((8,), ("model",))
table = np.random.default_rng(0).normal(size=(int(sys.argv[2]), int(sys.argv[3]))).astype(np.float32)
place = lambda table: {"t": jax.device_put(table, jax.NamedSharding(mesh, jax.P("model")))}
with ocp.PyTreeCheckpointer() as checkpointer:
    for step in (1, 2):
        checkpointer.save(f"{sys.argv[1]}/{step}", place(table * step))
"""


def environment(devices):
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


@pytest.fixture(scope="module", autouse=True)
def killed_run(tmp_path_factory):
    """The first line of the killed process, the process that is left, when it must have failed, and
    the checkpoint that both wrote.

    It waits for heartbeats while the test before its own runs.
    """
    if not HAS_HEARTBEATS:
        yield None
        return
    command = [sys.executable, "-c", RUN, f"127.0.0.1:{free_port()}", "2"]
    out = tmp_path_factory.mktemp("killed") / "2"
    survivor, victim = (
        subprocess.Popen(
            [*command, str(i), str(out)],
            env=environment(4),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    )
    try:
        # After the first training of three.
        first = victim.stdout.readline()
        victim.kill()
        saved = out.with_suffix(".trained.safetensors")
        yield first, survivor, time.monotonic() + HEARTBEATS + TIMEOUT, saved
    finally:
        for process in (survivor, victim):
            process.kill()
            process.communicate()


@pytest.mark.gate
def test_a_checkpoint_that_a_killed_process_was_writing_is_not_there_and_the_one_before_restores(
    tmp_path,
):
    pytest.importorskip("orbax.checkpoint", reason="Orbax is of the test extra")
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE, str(tmp_path), str(VOCAB), str(WIDTH)], env=environment(8)
    )
    try:
        end = time.monotonic() + TIMEOUT
        # The folder that a save writes into, before it gets its name.
        while (
            not any(path.name.startswith("2") for path in tmp_path.iterdir())
            and process.poll() is None
            and time.monotonic() < end
        ):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert sorted(path.name.split(".")[0] for path in tmp_path.iterdir()) == ["1", "2"]
    assert not (tmp_path / "2").exists()
    over = NamedSharding(mesh_of((1, 2), ("data", "model"), EXPLICIT), P("model"))
    target = {"t": jax.ShapeDtypeStruct((VOCAB, WIDTH), np.float32, sharding=over)}
    found = restored(tmp_path / "1", target)["t"]
    assert found.sharding == over
    expected = np.random.default_rng(0).normal(size=(VOCAB, WIDTH)).astype(np.float32)
    equal(found, expected)


@pytest.mark.gate
@pytest.mark.skipif(not HAS_HEARTBEATS, reason="this jax waits for heartbeats as long as it likes")
def test_a_run_whose_other_process_is_killed_fails_and_leaves_its_last_checkpoint(killed_run):
    """Within the timeout of the runtime."""
    first, survivor, end, saved = killed_run
    # Or TimeoutExpired.
    printed, _ = survivor.communicate(timeout=end - time.monotonic())
    assert first.startswith("process 1 of 2, 8 devices, dense Adam")
    assert survivor.returncode != 0
    assert "by exchanged rows" not in printed
    table = te.pretrained.load_embedder(saved).params["transformer_embedding/~/token_embedding"]
    assert np.isfinite(table["embeddings"]).all()
