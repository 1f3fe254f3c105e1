"""Contexts of jax: all strict modes at once, and those that have another name, or another home, in
its older versions."""

import contextlib
import importlib

import jax

MODES = {
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug_nans": lambda: jax.debug_nans(True),
    "legacy_prng_key": lambda: jax.legacy_prng_key("error"),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}


def x64(enabled=True):
    """64-bit types."""
    home = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    return home.enable_x64(enabled)


def set_mesh(mesh):
    """A mesh."""
    return (getattr(jax, "set_mesh", None) or jax.sharding.use_mesh)(mesh)


@contextlib.contextmanager
def strict(*without):
    """Each mode only raises errors of its own, which name what it forbids: none hides another's."""
    with contextlib.ExitStack() as modes:
        for mode in MODES.keys() - {*without}:
            modes.enter_context(MODES[mode]())
        yield
