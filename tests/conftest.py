"""Every test runs on 8 CPU devices, with the shapes and dtypes that annotations state checked on each call."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jaxtyping

with jaxtyping.install_import_hook("transformer_embed", "typecheck.check_arrays"):
    import transformer_embed  # noqa: F401
