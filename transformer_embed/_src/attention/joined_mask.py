"""Joins masks by `&` and `|`, in each of the forms of a mask."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int8

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.pytrees import register_pytree
from transformer_embed._src.sequences.token_arrays import check_batch_sizes
from transformer_embed._src.sequences.token_positions import number_of_rows

# How two masks are joined, as bools or as kinds of tiles (0, 1, 2: no, some or all pairs). The kind
# of a tile in which both masks have some pairs is 1, though the joined mask may have none or all.
JOINS = {"&": jnp.minimum, "|": jnp.maximum}


class Mask:
    """Has what every mask has: `&` and `|`, and errors where the array of the mask is wanted."""

    def __and__(self, other: Any) -> "JoinedMask":
        """Joins two masks, and allows what both allow."""
        return JoinedMask(self, other, "&")

    def __or__(self, other: Any) -> "JoinedMask":
        """Joins two masks, and allows what one of them allows."""
        return JoinedMask(self, other, "|")

    def __bool__(self) -> bool:
        """Raises a TypeError, because a mask is no condition."""
        # Without this error, `and` would keep one of two masks.
        want = "to be joined by & or |, or its array, mask.dense()"
        raise arguments.type_error(type(self).__name__, want, "a condition")

    def __jax_array__(self) -> Array:
        """Raises a TypeError that names `mask.dense()`, which makes the array."""
        # Public functions, jax and numpy call this if they are passed the mask itself. If it made
        # the array, users would not notice that the array has a bool for each pair.
        want = "its array, mask.dense()"
        raise arguments.type_error(type(self).__name__, want, "the mask")

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        """Raises a TypeError, as `__jax_array__` does."""
        return np.asarray(self.__jax_array__())


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedMask(Mask):
    """Allows the pairs that both masks allow (`&`), or that one of them allows (`|`)."""

    first: Any
    second: Any
    join: str

    def __post_init__(self) -> None:
        """Checks that the second mask is a mask, with as many queries and keys as the first."""
        arguments.instance("mask", self.second, Mask, "a te.AttentionMask, to join with another")
        want = "the queries and keys of the other mask"
        arguments.check_same("mask", want, self.second.lengths, self.first.lengths)
        batch_sizes = {"mask": number_of_rows(self.first), "other": number_of_rows(self.second)}
        check_batch_sizes(batch_sizes)

    @property
    def lengths(self) -> tuple[Any, Any]:
        """Returns the numbers of queries and of keys."""
        return self.first.lengths

    def dense(self) -> Bool[Array, "*b 1 t s"]:
        """Makes the joined mask as an array. See `AttentionMask.dense`."""
        return self._joined(self.first.dense(), self.second.dense())

    def tile(
        self, query_start: ArrayLike, key_start: ArrayLike, shape: tuple[int, int]
    ) -> Bool[Array, "*b t s"]:
        """Makes a rectangle of the joined mask. See `AttentionMask.tile`."""
        first = self.first.tile(query_start, key_start, shape)
        second = self.second.tile(query_start, key_start, shape)
        return self._joined(first, second)

    def tile_kinds(self, shape: tuple[int, int]) -> Int8[Array, "*b m n"]:
        """Says of each tile whether no, some or all pairs may attend: 0, 1 or 2.

        Unlike in `AttentionMask.tile_kinds`, any tile may get a 1 in place of 0 or 2.
        """
        return self._joined(self.first.tile_kinds(shape), self.second.tile_kinds(shape))

    def _joined(self, first: Array, second: Array) -> Array:
        """Joins two arrays, of which one may have no batch axis."""
        # Under strict rank promotion, jax adds no axis by itself.
        if first.ndim < second.ndim:
            first = first[None]
        elif second.ndim < first.ndim:
            second = second[None]
        return JOINS[self.join](first, second)


register_pytree(JoinedMask, "join")
