"""Arrays and parameters for tests in which any values do."""

import jax
import numpy as np


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn(init, *arguments, scale=1.0):
    """Draws by NumPy the tree of an init, with its shapes and dtypes.

    An init would be compiled for each shape, in half a second.
    """
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), *arguments))
    random = np.random.default_rng(0)

    def leaf_of(shape):
        values = scale * random.normal(0.5, 1, shape.shape)
        return jax.device_put(values.astype(shape.dtype))

    return jax.tree.map(leaf_of, shapes)


def positions(kind, seed, *shape):
    """Near, far, extreme, unsigned or fractional positions."""
    random = np.random.default_rng(seed)
    match kind:
        case "near":
            return random.integers(-50, 3000, shape).astype(np.int32)
        case "far":
            return random.integers(-(2**31), 2**31, shape).astype(np.int32)
        case "ends":
            ends = np.array([-(2**31), -(2**31) + 1, -1, 0, 1, 2**16, 2**24, 2**31 - 1], np.int32)
            return random.choice(ends, shape)
        case "unsigned":
            return random.integers(0, 2**32, shape).astype(np.uint32)
        case "fractional":
            sizes = 2.0 ** random.integers(-6, 23, shape)
            return (random.uniform(-1, 1, shape) * sizes).astype(np.float32)
        case "no phase":
            return random.choice(np.float32([np.nan, np.inf, 2.0**31, -(2.0**40), 0.5]), shape)


def steps(length, seed, dtype):
    """Positions at both sides of multiples of a length, and at the ends of a dtype."""
    ends, random = np.iinfo(dtype), np.random.default_rng(seed)
    found = random.integers(0, 4, 24) * length + random.integers(-2, 2, 24)
    found[:5] = ends.min, ends.max, 0, -1, 2**31 - 2
    return np.clip(found, ends.min, min(ends.max, 2**31 - 2)).astype(dtype)
