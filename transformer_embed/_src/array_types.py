"""Names the types of arguments: `ArrayLike` and `DTypeLike` of `jax.typing`, and nested lists.

When the program runs, both are classes, because `help` shows a class by its name, and a union by
all of its members.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import jax.typing
import numpy as np
from jaxtyping import Array, Float, Int32

__all__ = ["ArrayLike", "DTypeLike"]

# The shapes that many functions take or return: an id for each token, a vector for each token, and
# a table with v rows of d columns.
Ids = Int32[Array, "..."]
Vectors = Float[Array, "... d"]
TableArray = Float[Array, "v d"]

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    ArrayLike: TypeAlias = "jax.typing.ArrayLike | Sequence[ArrayLike]"
else:

    class _Arrays(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (jax.Array, *get_args(jax.typing.ArrayLike)))

    class _DTypes(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, str | type | np.dtype) or hasattr(value, "dtype")

    ArrayLike = _Arrays("ArrayLike", (), {"__module__": "jax.typing"})
    DTypeLike = _DTypes("DTypeLike", (), {"__module__": "jax.typing"})
