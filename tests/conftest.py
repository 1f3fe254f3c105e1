"""Every test runs on 8 CPU devices, with the shapes and dtypes that annotations state checked on each call."""

import os

DEVICES = "--xla_force_host_platform_device_count"
FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = FLAGS if DEVICES in FLAGS else f"{FLAGS} {DEVICES}=8"

import jaxtyping

with jaxtyping.install_import_hook("transformer_embed", "typecheck.check_arrays"):
    import transformer_embed  # noqa: F401
