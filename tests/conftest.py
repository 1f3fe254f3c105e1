"""Every test runs on 8 CPU devices, with the shapes and dtypes that annotations state checked on
each call.

Most of XLA's optimizations for the CPU are off: programs that run once compile in less than half of
the time. To test what users get, as .ci/run does on the newest Python, set
JAX_DISABLE_MOST_OPTIMIZATIONS=0.

Compiled programs are kept in .jax_cache, so that the next run compiles only what changed.
"""

import gc
import importlib.metadata
import os
import pathlib
import shutil

# The programs are too small for several threads to compile one of them.
FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# XLA ends a process that names a flag which it does not have, as a newer one does not.
HAS_FUSION_EMITTERS_FLAG = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) <= (
    0,
    10,
)
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and HAS_FUSION_EMITTERS_FLAG:
    FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [GIVEN, *(f"{name}={value}" for name, value in FLAGS.items() if name not in GIVEN)]
)

# Filtering jax's own frames out of a traceback takes a millisecond an error, and the tests raise
# thousands of errors on purpose.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

CACHE = pathlib.Path(__file__).parents[1] / ".jax_cache"
CACHE_BYTES = 500_000_000
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import cases
import draws
import hypothesis
import pytest
import typecheck

# The same examples in each run, so that a red one can be run again; `pytest --hypothesis-profile
# random` tries others.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.load_profile("same")

typecheck.install("transformer_embed._src")


def pytest_addoption(parser):
    parser.addoption(
        "--cases",
        default=cases.CHOICE,
        help="which cases of long lists to run: few (the same in each run), a number (others), all",
    )
    parser.addoption(
        "--draws", help="how many draws of each space to run (2000), or which of them (500:1000)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Tests run on all cores: a worker runs whole files, whose tests share what they compile. One
    file or test alone starts sooner without workers."""
    is_worker = hasattr(config, "workerinput")
    if config.pluginmanager.hasplugin("xdist") and not is_worker:
        options, is_folder = config.option, pathlib.Path(config.args[0]).is_dir()
        options.loadscopereorder = False
        if options.dist == "no":
            options.dist = "loadfile"
        if options.numprocesses is None:
            options.numprocesses = "auto" if is_folder or len(config.args) > 1 else 0


def pytest_configure(config):
    """Empties the cache once it is large: no entry is ever removed from it otherwise."""
    cases.CHOICE, draws.WANTED = config.getoption("cases"), config.getoption("draws")
    is_worker = hasattr(config, "workerinput")
    if not is_worker and sum(path.stat().st_size for path in CACHE.glob("*")) > CACHE_BYTES:
        shutil.rmtree(CACHE)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """So that `-m "not slow"`, which takes the place of the expression in pyproject.toml, leaves
    out what that one does."""
    for item in items:
        if {"documentation", "gate"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker("slow")


def pytest_collection_finish():
    """Spares the garbage collector what lives to the end, such as modules and tests: going through
    it took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
