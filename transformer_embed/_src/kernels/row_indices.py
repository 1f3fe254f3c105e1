"""The rule of a mask in row indices and segment ids, which is all that fused kernels compare."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.attention.attention_mask import AttentionMask
from transformer_embed._src.attention.attention_rule import Window, fields
from transformer_embed._src.compiled import compiled
from transformer_embed._src.sequences.token_order import ORDERS, check_order
from transformer_embed._src.sequences.token_positions import arrays_of, number_of_rows

WAY_OUT = "; mask.dense() and mask.block() can express it"
# What a query reaches without a window, with and without a causal mask.
CAUSAL, EVERYTHING = (None, 0), (None, None)


def refusal(name: str, want: str, got: Any) -> ValueError:
    """The error for a part of a rule that a kernel cannot express."""
    return arguments.value_error(name, want, f"{got}{WAY_OUT}")


@dataclasses.dataclass(frozen=True)
class RowRule:
    """The rule of a mask for a kernel, if the tokens lie as its caller declares.

    An error says which part of the rule the kernel cannot express, or which token on the host lies
    in another order.
    """

    mask: AttentionMask
    kernel: str
    order: str | None = None
    batch_size: int | None = None
    q_offset: int | None = None

    def __post_init__(self):
        want = f"a te.AttentionMask, not joined by & or |{WAY_OUT}"
        mask = arguments.instance("mask", self.mask, AttentionMask, want)
        queries, keys = mask.sides
        # In self-attention, 0.
        last = mask.lengths[1] - mask.lengths[0]
        arguments.convert_fields(
            self,
            order=functools.partial(arguments.choice, choices=tuple(ORDERS)),
            batch_size=arguments.size,
            q_offset=functools.partial(arguments.integer, at_least=0, at_most=last),
        )
        self.check_absent(sinks=mask.sinks, block_ids=queries.block_ids)
        if self.order is not None or mask.reach != EVERYTHING:
            # Tokens that were taken in another order than that of their row.
            self.check_absent(**{"queries.places": queries.places, "keys.places": keys.places})
        # Tokens that are traced, or of other processes too, cannot be checked.
        is_unknown = any(
            arguments.is_traced(array) or not getattr(array, "is_fully_addressable", True)
            for array in jax.tree.leaves(mask)
        )
        if not is_unknown:
            if self.order is not None:
                # One object in self-attention.
                for tokens in dict.fromkeys(mask.sides):
                    check_order(tokens, self.order)
            self._check_part()

    def _check_part(self) -> None:
        """Raises unless the queries are the keys from q_offset on."""
        start = self.q_offset
        if start is None:
            return
        queries, keys = (jax.device_get(arrays_of(side)) for side in self.mask.sides)
        is_token = queries.get("segment_ids", 1) != 0
        for name, array in queries.items():
            differs = array != keys[name][:, start : start + array.shape[1]]
            # Padding sees nothing, wherever it is.
            if (differs & is_token).any():
                want = f"the keys from index {start} on (q_offset)"
                raise arguments.value_error(f"queries.{name}", want, "others")

    def check_absent(self, **parts: Any) -> None:
        """Raises a ValueError for a part that the kernel has no argument for."""
        for name, part in parts.items():
            if part is not None:
                want = f"None for {self.kernel}, which has no argument for it"
                raise refusal(name, want, part if isinstance(part, int | tuple) else "an array")

    def check_order_is_given(self, parts: str, choices: tuple[str, ...] = tuple(ORDERS)) -> None:
        """Raises a ValueError if parts of the rule need an order and none is given."""
        if self.order not in choices:
            want = f"{' or '.join(map(repr, choices))}, for {parts} in {self.kernel}"
            raise arguments.value_error("order", want, repr(self.order))

    def check_self_attention(self, parts: str) -> None:
        """Raises a ValueError if the keys are another sequence."""
        if self.mask.keys is not None:
            want = f"None (self-attention) for {parts} in {self.kernel}"
            raise refusal("keys", want, "another sequence")

    @property
    def has_segments(self) -> bool:
        """Whether some keys of a row may be padding, or of another sequence."""
        return self.mask.sides[1].segment_ids is not None and self.order != "full"

    @property
    def reach(self) -> Window:
        """How many tokens before and after its own a query sees, as far as its segment reaches.

        In an order, positions rise by one along the tokens of a segment, so a causal mask and a
        window may compare row indices instead.
        """
        limits = self.mask.reach
        if limits != EVERYTHING:
            parts = "a causal mask or a window, as row indices are compared"
            if self.q_offset is None:
                self.check_self_attention(parts)
            self.check_order_is_given(parts)
            # Queries without segments see every sequence by position, each of which counts its own.
            is_apart = self.has_segments and self.mask.queries.segment_ids is None
            if self.order == "packed" and is_apart:
                want = f"those of the keys, for {parts} in {self.kernel}"
                raise refusal("queries.segment_ids", want, None)
        return limits

    @property
    def distances(self) -> tuple[int, ...]:
        """The reach in numbers: without a limit the length, which no distance reaches."""
        length = max(self.mask.lengths)
        return tuple(length if side is None else min(side, length) for side in self.reach)

    def segment_ids(self) -> list[Integer[Array, "b t"]] | None:
        """Ids of queries and of keys that are equal for one segment and chunk; 0 at padding.

        None if all of them are equal.
        """
        if not self.has_segments and self.mask.chunk is None:
            return None
        sides = fields(self.mask)
        ids = [side["token"] for side in sides]
        if self.mask.queries.segment_ids is None:
            # Without segments of their own, queries see the tokens of every segment.
            ids = [(side != 0).astype(side.dtype) for side in ids]
        # Kernels compare int32: ids of another dtype could wrap, and are numbered.
        if self.mask.chunk is None and ids[0].dtype == jnp.int32:
            return ids
        return _names(ids, [side.get("chunk", side["token"]) for side in sides])

    @property
    def rows(self) -> int:
        """The number of rows of the queries: batch_size, or the mask's."""
        rows = number_of_rows(self.mask)
        if self.batch_size is None:
            return rows
        if rows not in (1, self.batch_size):
            raise arguments.value_error("batch_size", f"the mask's {rows} rows", self.batch_size)
        return self.batch_size

    def for_rows(self, array: Array) -> Array:
        """An array of [1 or B, ...] for all rows."""
        return jnp.broadcast_to(array, (self.rows, *array.shape[1:]))


# Compiled even if the caller is not.
@compiled()
def _names(segments: list[Array], chunks: list[Array]) -> list[Int32[Array, "b t"]]:
    """Numbers of the pairs of a segment and a chunk: equal for equal pairs, whatever the tokens."""
    # Queries and keys are numbered together: apart, one pair could get two numbers.
    sides = [
        jnp.stack(jnp.broadcast_arrays(*side), axis=2)
        for side in zip(segments, chunks, strict=True)
    ]
    batch = max(map(len, sides))
    pairs = jnp.concatenate([jnp.broadcast_to(side, (batch, *side.shape[1:])) for side in sides], 1)
    unique = functools.partial(jnp.unique, axis=0, size=pairs.shape[1], return_inverse=True)
    _, numbers = jax.vmap(unique)(pairs)
    names = jnp.where(pairs[..., 0] == 0, 0, numbers.astype(jnp.int32) + 1)
    length = segments[0].shape[1]
    return [names[:, :length], names[:, length:]]
