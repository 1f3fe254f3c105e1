"""Sets up a test run: eight CPU devices, and functions that check the shapes and dtypes of arrays.

The tests run on the CPU, on a machine with a GPU too, because only the CPU can be divided into eight
devices. If you set JAX_PLATFORMS, your choice is kept. Only `pytest -m gpu` runs on a GPU.

Most of XLA's optimizations for the CPU are off, because programs that run once then compile in less
than half of the time. To test what users get, as .ci/run does on the newest Python, set
JAX_DISABLE_MOST_OPTIMIZATIONS=0.

Compiled programs are kept in .jax_cache, so that the next run compiles only what changed.
"""

import collections
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

# A program carries the traceback of each of its operations, and pytest's tracebacks are long.
# Without them, to lower and to compile a program takes about a tenth less time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

CACHE = pathlib.Path(__file__).parents[1] / ".jax_cache"
CACHE_BYTES = 500_000_000
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import cases
import draws
import hypothesis
import jax
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
    parser.addoption("--first", type=int, help="how many cases of each test function to run (all)")
    parser.addoption(
        "--draws", help="how many draws of each space to run (200), or which of them (500:1000)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Runs the tests on all cores.

    A worker runs the tests of a file one after the other, because they share what they compile.
    When it has no more tests, it takes some of another worker. One file or test alone starts sooner
    without workers, and a GPU is for one process.
    """
    is_worker = hasattr(config, "workerinput")
    if config.pluginmanager.hasplugin("xdist") and not is_worker:
        options = config.option
        options.loadscopereorder = False
        if options.dist == "no":
            options.dist = "worksteal"
        if options.numprocesses is None:
            has_many_files = pathlib.Path(config.args[0]).is_dir() or len(config.args) > 1
            options.numprocesses = "auto" if has_many_files and not wants_gpu(config) else 0


def wants_gpu(config):
    """Returns whether the user asked for the tests of a GPU alone."""
    return config.option.markexpr == "gpu"


def pytest_configure(config):
    """Chooses the platform, and empties the cache of compiled programs once it is large."""
    if wants_gpu(config):
        # Users have all optimizations. The oracles are exact, so products are in float32, not TF32.
        jax.config.update("jax_disable_most_optimizations", False)
        jax.config.update("jax_default_matmul_precision", "highest")
    elif "JAX_PLATFORMS" not in os.environ:
        # Processes that tests start read the first, and this one the second.
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
    cases.CHOICE = config.getoption("cases")
    draws.WANTED = config.getoption("draws")
    is_worker = hasattr(config, "workerinput")
    if not is_worker and sum(path.stat().st_size for path in CACHE.glob("*")) > CACHE_BYTES:
        shutil.rmtree(CACHE)


def pytest_runtest_setup(item):
    """Skips the tests of a GPU on a machine without one."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Marks what only its own command runs as slow, and keeps the first cases of each function.

    `-m "not slow"` replaces the expression in pyproject.toml, and must leave out the same tests.
    """
    for item in items:
        if {"documentation", "gate", "gpu"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker("slow")
    # Here, pytest leaves out the tests of other marks.
    result = yield
    most_cases = config.getoption("first")
    if most_cases is not None:
        items[:] = first_cases(items, most_cases)
    return result


def first_cases(items, most_cases):
    """Returns the tests without those cases of a function that come after `most_cases` others."""
    counts = collections.Counter()
    kept = []
    for item in items:
        function, _, _ = item.nodeid.partition("[")
        counts[function] += 1
        if counts[function] <= most_cases:
            kept.append(item)
    return kept


def pytest_collection_finish():
    """Spares the garbage collector the objects that live to the end, such as modules and tests.

    Going through them took a tenth of the time of a run.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
