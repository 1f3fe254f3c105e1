"""Every test runs on 8 CPU devices, with the shapes and dtypes that annotations state checked on each call.

Most of XLA's optimizations for the CPU are off: programs that run once compile in less than half of the time. To test what users get, as
.ci/run does on the newest Python, set JAX_DISABLE_MOST_OPTIMIZATIONS=0.

What one process compiles, the others load: the workers of pytest-xdist, notebooks and commands share a cache of compiled programs. It
lives as long as the run. Set JAX_COMPILATION_CACHE_DIR to keep it from run to run.
"""

import importlib.metadata
import os
import shutil
import tempfile

FLAGS = {"--xla_force_host_platform_device_count": "8"}
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# XLA ends a process that names a flag which it does not have, as a newer one does not.
HAS_FUSION_EMITTERS_FLAG = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) <= (0, 10)
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and HAS_FUSION_EMITTERS_FLAG:
    FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([GIVEN, *(f"{name}={value}" for name, value in FLAGS.items() if name not in GIVEN)])

OWN_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    OWN_CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="transformer-embed-programs-")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# To leave jax's own frames out of a traceback takes a millisecond an error, and most of the tests' errors are wanted.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

import typecheck

typecheck.install("transformer_embed._checks", "transformer_embed.functional", "transformer_embed.layers")


def pytest_unconfigure():
    """The process that made the cache removes it."""
    if OWN_CACHE:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)
