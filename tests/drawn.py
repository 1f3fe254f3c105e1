"""Arrays and parameters for tests in which any values do."""

import jax
import numpy as np


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn(init, *arguments):
    """In the tree, shapes and dtypes that an init gives, drawn by NumPy: an init is compiled for
    each shape, in half a second."""
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), *arguments))
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jax.device_put(random.normal(0.5, 1, leaf.shape).astype(leaf.dtype)), shapes
    )
