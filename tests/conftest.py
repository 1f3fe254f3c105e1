"""Every test runs with shapes and dtypes checked on what the package returns, and with rank promotion an error."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from jaxtyping import install_import_hook

with install_import_hook("transformer_embed", "beartype.beartype"):
    import transformer_embed  # noqa: F401
