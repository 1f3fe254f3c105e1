"""Every test runs on 8 CPU devices, with the shapes and dtypes that annotations state checked on each call.

What one process compiles, the others load: the workers of pytest-xdist, notebooks and commands share a cache of compiled programs. It
lives as long as the run. Set JAX_COMPILATION_CACHE_DIR to keep it from run to run.
"""

import os
import shutil
import tempfile

DEVICES = "--xla_force_host_platform_device_count"
FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = FLAGS if DEVICES in FLAGS else f"{FLAGS} {DEVICES}=8"

OWN_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    OWN_CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="transformer-embed-programs-")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jaxtyping

with jaxtyping.install_import_hook("transformer_embed", "typecheck.check_arrays"):
    import transformer_embed  # noqa: F401


def pytest_unconfigure():
    """The process that made the cache removes it."""
    if OWN_CACHE:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)
