"""Numbers beside some rows of a table that show what a function did to all of them.

A loss sees some rows of a table in the table's place. A function of such an array (a norm, a mean,
a maximum, noise) does not give what it gives for the table. But a function of all parameters meets
this array too, and changes it:

    NaN             becomes every sum, mean, norm and maximum, also as a term of the loss
    u, u, ...       tiny numbers: anything that is added changes their ratio to
    2u, 2u, ...     these

A function that treats each number alike, such as a scale or a cast, keeps NaN and the ratios.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

MARKS = 3


def new_marks(width: int, dtype: Any) -> Float[np.ndarray, "3 d"]:
    """The marks of rows. Of numpy, since jax_debug_nans lets them pass."""
    # Its products with usual numbers are neither zero nor subnormal.
    unit = 2.0 ** (jnp.finfo(dtype).minexp // 2)
    return np.repeat([[np.nan], [unit], [2 * unit]], width, axis=1).astype(dtype)


def are_marks(marks: Float[Array, "3 d"]) -> Bool[Array, ""]:
    """Whether marks are as they were, up to a scale of each column."""
    # Of all at once, which is not NaN.
    is_nan = np.isnan(marks) if isinstance(marks, np.ndarray) else jnp.isnan(marks)
    units, doubles = marks[1], marks[2]
    tolerance = 2 * jnp.finfo(marks.dtype).eps * jnp.abs(doubles)
    return jnp.all(is_nan[0] & (jnp.abs(doubles - 2 * units) <= tolerance))
