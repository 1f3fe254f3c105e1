"""Translates the rule of a mask into row indices and segment ids.

Fused attention kernels compare only these. They have no argument for positions or block ids.

Of a mask, this file reads `sides` (the queries and the keys), `lengths` (the numbers of queries and
of keys) and `reach` (how many positions before and after its own a query sees, as (left, right),
where None means no limit).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer

from transformer_embed._src import arguments, conversions
from transformer_embed._src.attention.attention_mask import AttentionMask
from transformer_embed._src.compiled import compiled
from transformer_embed._src.sequences.token_order import ORDERS, check_order
from transformer_embed._src.sequences.token_positions import TokenPositions

WAY_OUT = "; mask.dense() and mask.tile() can express it"
# The reach of a mask without a window.
CAUSAL = (None, 0)
EVERYTHING = (None, None)


def refusal(name: str, want: str, got: Any) -> ValueError:
    """Makes the error for a part of a rule that a kernel cannot express."""
    return arguments.value_error(name, want, f"{got}{WAY_OUT}")


@dataclasses.dataclass(frozen=True)
class RowRule:
    """Rule of a mask for a fused kernel, if the tokens lie in the order that the caller declares.

    An error names the part of the rule that the kernel cannot express, or the token that lies in
    another order. Only tokens whose values the host knows are checked.

    Args:
        mask: The mask.
        kernel: The name of the kernel, for error messages.
        order: The layout of the tokens, a name in `ORDERS`. None, if nothing is declared.
        batch_size: The number of batch rows, if the mask was made for one row that is used for
            every batch row.
        q_offset: The index, among the keys, of the first query, if the queries are a part of the
            keys.
    """

    mask: AttentionMask
    kernel: str
    order: str | None = None
    batch_size: int | None = None
    q_offset: int | None = None

    def __post_init__(self) -> None:
        """Checks the mask and the options, and gives tokens without a batch axis one."""
        want = f"a te.AttentionMask, not joined by & or |{WAY_OUT}"
        mask = arguments.instance("mask", self.mask, AttentionMask, want)
        # Kernels take batches. Tokens without a batch axis are used for every batch row.
        mask = jax.tree.map(lambda array: array if array.ndim == 2 else array[None], mask)
        arguments.set_fields(self, mask=mask)
        query_count, key_count = mask.lengths
        # In self-attention, the only offset is 0.
        last_offset = key_count - query_count
        arguments.convert_fields(
            self,
            order=functools.partial(arguments.choice, choices=tuple(ORDERS)),
            batch_size=arguments.size,
            q_offset=functools.partial(arguments.integer, at_least=0, at_most=last_offset),
        )
        queries, keys = mask.sides
        self.check_absent(sinks=mask.sinks, block_ids=queries.block_ids)
        compares_indices = self.order is not None or mask.reach != EVERYTHING
        if compares_indices:
            # Tokens with places were taken in another order than the order of the row, so row
            # indices cannot replace positions.
            self.check_absent(**{"queries.places": queries.places, "keys.places": keys.places})
        if self._is_known_on_host():
            self._check_order()
            self._check_queries_are_keys()

    def _is_known_on_host(self) -> bool:
        """Returns whether the host has the values of all tokens, so that it can check them."""
        # The values of traced tokens are unknown, and other processes may have some of the values.
        return not any(
            conversions.is_traced(array) or not getattr(array, "is_fully_addressable", True)
            for array in jax.tree.leaves(self.mask)
        )

    def _check_order(self) -> None:
        """Raises unless the tokens lie in the declared order."""
        if self.order is None:
            return
        # In self-attention, both sides are one object, which is checked once.
        for tokens in dict.fromkeys(self.mask.sides):
            check_order(tokens, self.order)

    def _check_queries_are_keys(self) -> None:
        """Raises unless the queries are the keys from `q_offset` on."""
        start = self.q_offset
        if start is None:
            return
        queries, keys = self.mask.sides
        # The arrays are fetched first: inside of `jax.jit`, operations of jax would be traced.
        segment_ids = jax.device_get(queries.segment_ids)
        is_token = True if segment_ids is None else segment_ids != 0
        for name in ("positions", "segment_ids", "places"):
            query_array = jax.device_get(getattr(queries, name))
            if query_array is None:
                continue
            key_array = jax.device_get(getattr(keys, name))
            expected = key_array[..., start : start + query_array.shape[-1]]
            # Padding may differ, because it sees nothing wherever it is.
            is_wrong = (query_array != expected) & is_token
            if is_wrong.any():
                want = f"the {name} of the keys from index {start} on (q_offset)"
                raise arguments.value_error(f"queries.{name}", want, "other numbers")

    def check_absent(self, **parts: Any) -> None:
        """Raises a ValueError for a part of the rule that the kernel has no argument for."""
        for name, part in parts.items():
            if part is not None:
                want = f"None for {self.kernel}, which has no argument for it"
                got = part if isinstance(part, int | tuple) else "an array"
                raise refusal(name, want, got)

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
        """Returns whether some keys of a row may be padding, or belong to another sequence."""
        _, keys = self.mask.sides
        return keys.segment_ids is not None and self.order != "full"

    def index_reach(self) -> tuple[int | None, int | None]:
        """Returns the mask's reach, if a kernel may apply it to row indices instead of positions.

        In every order of `ORDERS`, positions rise by one along the tokens of a segment. So
        differences of positions are differences of row indices there.

        Raises:
            ValueError: The rule has a causal mask or a window, and row indices cannot replace its
                positions.
        """
        reach = self.mask.reach
        if reach == EVERYTHING:
            return reach
        parts = "a causal mask or a window, as row indices are compared"
        if self.q_offset is None:
            self.check_self_attention(parts)
        self.check_order_is_given(parts)
        # Queries without segments see the keys of every segment by position. Row indices cannot
        # replace these positions, because each segment counts positions of its own.
        sees_every_segment = self.has_segments and self.mask.queries.segment_ids is None
        if self.order == "packed" and sees_every_segment:
            want = f"the segment ids of the keys, for {parts} in {self.kernel}"
            raise refusal("queries.segment_ids", want, None)
        return reach

    def bounded_reach(self) -> tuple[int, ...]:
        """Returns `index_reach` with a number for each side.

        A side without a limit gets the length of the mask, which no distance reaches.
        """
        length = max(self.mask.lengths)
        return tuple(
            length if limit is None else min(limit, length) for limit in self.index_reach()
        )

    def segment_ids(self) -> list[Integer[Array, "b t"]] | None:
        """Computes ids of queries and of keys that are equal within one segment and chunk.

        Padding has the id 0. Returns None if all ids are equal.
        """
        chunk = self.mask.chunk
        if not self.has_segments and chunk is None:
            return None
        # `jax.tree.map` may have narrowed the arrays, and a new object has full dtypes.
        sides = [TokenPositions(**vars(side)) for side in self.mask.sides]
        # Queries and keys may have different dtypes.
        dtype = np.result_type(*(array.dtype for array in jax.tree.leaves(sides)))
        ids = [_segments(side, dtype) for side in sides]
        if self.mask.queries.segment_ids is None:
            # Queries without segments see the tokens of every segment, so all tokens get the id 1.
            ids = [(side_ids != 0).astype(dtype) for side_ids in ids]
        # Kernels compare int32. Ids of another dtype could wrap as int32, so they are numbered.
        if chunk is None:
            return ids if dtype == jnp.int32 else _numbered(ids, ids)
        return _numbered(ids, [side.positions.astype(dtype) // chunk for side in sides])

    @property
    def rows(self) -> int:
        """Returns the number of batch rows of the queries: `batch_size`, or the mask's."""
        counts = {array.shape[0] for array in jax.tree.leaves(self.mask)}
        # A symbolic dimension of jax.export has no order, so a maximum would fail.
        rows = next(iter(counts - {1}), 1)
        if self.batch_size is None:
            return rows
        if rows not in (1, self.batch_size):
            raise arguments.value_error("batch_size", f"the mask's {rows} rows", self.batch_size)
        return self.batch_size

    def broadcast_to_rows(self, array: Array) -> Array:
        """Broadcasts an array [1 or B, ...] to all batch rows."""
        return jnp.broadcast_to(array, (self.rows, *array.shape[1:]))

    def number_in_rows(self, is_counted: Bool[Array, "b t"]) -> Int32[Array, "b"]:
        """Counts the tokens of each batch row for which the bool is true."""
        # Kernels take only int32, and a sum of bools has 64 bits if jax_enable_x64 is on.
        counts = jnp.sum(is_counted, axis=-1, dtype=jnp.int32)
        return self.broadcast_to_rows(counts)

    def kernel_segment_ids(self, make: Callable[[Array, Array], Any]) -> Any:
        """Passes the segment ids of queries and keys to `make`, or returns None if all are equal.

        Args:
            make: Makes what the kernel takes from the ids of the queries and of the keys, which
                both have all batch rows.
        """
        ids = self.segment_ids()
        if ids is None:
            return None
        query_ids, key_ids = ids
        return make(self.broadcast_to_rows(query_ids), self.broadcast_to_rows(key_ids))


def _segments(tokens: TokenPositions, dtype: Any) -> Integer[Array, "b t"]:
    """Returns the segment ids of tokens in this dtype, or ones if there are none."""
    if tokens.segment_ids is None:
        return jnp.ones((1, tokens.positions.shape[1]), dtype)
    return tokens.segment_ids.astype(dtype)


# The function is compiled even if the caller is not.
@compiled()
def _numbered(segments: list[Array], chunks: list[Array]) -> list[Int32[Array, "b t"]]:
    """Numbers the pairs of a segment and a chunk, from 1 on.

    Equal pairs get equal numbers, whichever tokens have them. Padding gets 0.

    Args:
        segments: The segment ids of the queries and of the keys.
        chunks: The chunks of the queries and of the keys.
    """
    # [batch, length, 2], for the queries and for the keys.
    side_pairs = [
        jnp.stack(jnp.broadcast_arrays(side_segments, side_chunks), axis=2)
        for side_segments, side_chunks in zip(segments, chunks, strict=True)
    ]
    # Queries and keys are numbered together, because apart, one pair could get two numbers.
    batch = max(map(len, side_pairs))
    pairs = jnp.concatenate(
        [jnp.broadcast_to(side, (batch, *side.shape[1:])) for side in side_pairs], axis=1
    )
    unique = functools.partial(jnp.unique, axis=0, size=pairs.shape[1], return_inverse=True)
    _, indices = jax.vmap(unique)(pairs)
    is_padding = pairs[..., 0] == 0
    numbers = jnp.where(is_padding, 0, indices.astype(jnp.int32) + 1)
    query_count = segments[0].shape[1]
    return [numbers[:, :query_count], numbers[:, query_count:]]
