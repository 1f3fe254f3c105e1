"""Compiles the private half of a public function."""

import functools
from collections.abc import Callable

import jax


def compiled(*static: int) -> Callable[..., Callable]:
    """A decorator that compiles a function, with the arguments of these indices static.

    Without it, a caller who is not compiled would run one small program for each operation. The
    program of a caller who is compiled takes up the function as it is.
    """
    return functools.partial(jax.jit, inline=True, static_argnums=static)
