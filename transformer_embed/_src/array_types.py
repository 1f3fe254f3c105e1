"""Names the types of arguments and of common arrays.

`ArrayLike` is the union `jax.typing.ArrayLike`, or nested lists of its members. `DTypeLike` is the
union `jax.typing.DTypeLike`. Type checkers read these unions. When the program runs, both names are
classes, because `help` shows a class by its name, but a union by all of its members.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import jax.typing
import numpy as np
from jaxtyping import Array, Float, Int32

__all__ = ["ArrayLike", "DTypeLike"]

# Arrays that many functions take or return: an id for each token, a vector for each token, and a
# table of v rows and d columns.
Ids = Int32[Array, "..."]
Vectors = Float[Array, "... d"]
TableArray = Float[Array, "v d"]

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    ArrayLike: TypeAlias = "jax.typing.ArrayLike | Sequence[ArrayLike]"
else:
    # With these types of the two classes, `isinstance(value, ArrayLike)` works.
    class _ArrayLikeType(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (jax.Array, *get_args(jax.typing.ArrayLike)))

    class _DTypeLikeType(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, str | type | np.dtype) or hasattr(value, "dtype")

    ArrayLike = _ArrayLikeType("ArrayLike", (), {"__module__": "jax.typing"})
    DTypeLike = _DTypeLikeType("DTypeLike", (), {"__module__": "jax.typing"})
