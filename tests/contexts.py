"""All strict modes of jax at once."""

import contextlib

import jax
import numpy as np

MODES = {
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug_nans": lambda: jax.debug_nans(True),
    "legacy_prng_key": lambda: jax.legacy_prng_key("error"),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}


@contextlib.contextmanager
def strict(*without):
    """Each mode only raises errors of its own, which name what it forbids: none hides another's."""
    with contextlib.ExitStack() as modes:
        for mode in MODES.keys() - {*without}:
            modes.enter_context(MODES[mode]())
        yield


def as_dtype(array, dtype):
    """An array of float32 as one of this dtype; any other as it is."""
    is_float = getattr(array, "dtype", None) == np.float32
    return array.astype(dtype) if dtype and is_float else array
