"""Marked rows at the end of an array of rows, which show what a function did to all of it.

A loss sees some rows of a table in the table's place. A function of such an array (a norm, a mean,
a maximum, noise) does not give what it gives for the table, but it also changes the marks:

    infinity      changes every sum, mean, norm and maximum
    u, u, ...     tiny numbers: anything that is added changes their ratio
    u * 2**p      for each column, another power of two

A function that treats each number alike, such as a scale or a cast, keeps infinity and the ratios.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

MARKS = 3


def with_marks(values: Float[Array, "k d"]) -> Float[Array, "k+3 d"]:
    """The rows, then the marks."""
    width, dtype = values.shape[1], values.dtype
    # Its products with usual numbers are neither zero nor subnormal.
    unit = 2.0 ** (jnp.finfo(dtype).minexp // 2)
    marks = np.stack([np.full(width, np.inf), np.full(width, unit), unit * _powers(width)])
    return jnp.concatenate([values, marks.astype(dtype)])


def without_marks(values: Float[Array, "n d"]) -> Float[Array, "n-3 d"]:
    """The rows alone."""
    return values[: len(values) - MARKS]


def are_marks(marks: Float[Array, "3 d"]) -> Bool[Array, ""]:
    """Whether marks are as they were, up to a scale of each column."""
    infinite, units, powers = marks
    tolerance = 2 * jnp.finfo(marks.dtype).eps
    expected = units * _powers(marks.shape[1]).astype(marks.dtype)
    is_near = jnp.abs(powers - expected) <= tolerance * jnp.abs(expected)
    return jnp.all(jnp.isinf(infinite) & is_near)


def _powers(width: int) -> np.ndarray:
    """A power of two for each column, 2 to 16, that neighbours do not share in general."""
    words = np.arange(width, dtype=np.uint64) * 0x9E3779B1 >> 7
    return 2.0 ** (1 + words % 4)
