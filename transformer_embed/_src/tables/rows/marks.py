"""Marked rows at the end of an array of rows, which show what a function did to all of it.

A loss sees some rows of a table in the table's place. A function of such an array (a norm, a mean,
a maximum, noise) does not give what it gives for the table, but it also changes the marks:

    infinity        changes every sum, mean, norm and maximum
    u, u, ...       tiny numbers: anything that is added changes their ratio to
    2u, 2u, ...     these

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
    marks = np.repeat([[np.inf], [unit], [2 * unit]], width, axis=1)
    return jnp.concatenate([values, marks.astype(dtype)])


def without_marks(values: Float[Array, "n d"]) -> Float[Array, "n-3 d"]:
    """The rows alone."""
    return values[: len(values) - MARKS]


def are_marks(marks: Float[Array, "3 d"]) -> Bool[Array, ""]:
    """Whether marks are as they were, up to a scale of each column."""
    infinite, units, doubles = marks
    tolerance = 2 * jnp.finfo(marks.dtype).eps * jnp.abs(doubles)
    is_near = jnp.abs(doubles - 2 * units) <= tolerance
    return jnp.all(jnp.isinf(infinite) & is_near)
