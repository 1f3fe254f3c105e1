"""The contexts of jax that have another name, or another home, in its older versions."""

import importlib

import jax


def x64(enabled=True):
    """64-bit types."""
    home = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    return home.enable_x64(enabled)


def set_mesh(mesh):
    """A mesh."""
    return (getattr(jax, "set_mesh", None) or jax.sharding.use_mesh)(mesh)
