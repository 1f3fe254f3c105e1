"""Translates the rule of a mask into row indices and segment ids.

The rule of a mask says which query may attend to which key. Fused attention kernels compare only
row indices and segment ids. They have no argument for positions or block ids.

This file reads three attributes of a mask:

- `sides`: the queries and the keys;
- `lengths`: the numbers of queries and of keys;
- `reach`: a pair (left, right), how many positions before and after its own a query sees. None
  means no limit. A causal mask has the right side 0.

In shapes, b counts batch rows, t counts queries and s counts keys.
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
from transformer_embed._src.sequences.token_positions import TokenPositions
from transformer_embed._src.tokens.batch import check_batch

# The layouts of tokens that a caller may declare. `te.kernels` describes them.
ORDERS = ("full", "right", "packed")
# The end of an error for a mask that a kernel cannot express.
OTHER_METHODS = "; mask.dense() and mask.tile() can express it"
# The reach of a causal mask without a window.
CAUSAL_REACH = (None, 0)
# The reach of a mask that is neither causal nor has a window.
UNLIMITED_REACH = (None, None)


def refusal(name: str, want: str, got: Any) -> ValueError:
    """Makes the error for a part of a rule that a kernel cannot express.

    The error ends with `OTHER_METHODS`, which names the methods of a mask that can express every
    rule.
    """
    return arguments.value_error(name, want, f"{got}{OTHER_METHODS}")


@dataclasses.dataclass(frozen=True)
class RowRule:
    """Translates the rule of a mask for a fused kernel, for tokens in the order that is declared.

    An error names the part of the rule that the kernel cannot express, or the token that lies in
    another order. Only tokens whose values the host knows are checked.

    Args:
        mask: The mask.
        kernel: The name of the kernel, for error messages.
        order: The layout of the tokens, one of `ORDERS`. If None, the caller declares nothing.
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
        want = f"a te.AttentionMask, not joined by & or |{OTHER_METHODS}"
        mask = arguments.instance("mask", self.mask, AttentionMask, want)

        def with_batch_axis(array: Array) -> Array:
            """Gives an array without a batch axis one of size 1, which broadcasts to all rows."""
            return array if array.ndim == 2 else array[None]

        # Kernels take batches, so all arrays become [1 or b, length].
        mask = jax.tree.map(with_batch_axis, mask)
        arguments.set_fields(self, mask=mask)
        query_count, key_count = mask.lengths
        # In self-attention, the only offset is 0.
        last_offset = key_count - query_count
        arguments.convert_fields(
            self,
            order=functools.partial(arguments.choice, choices=ORDERS),
            batch_size=arguments.size,
            q_offset=functools.partial(arguments.integer, at_least=0, at_most=last_offset),
        )
        queries, keys = mask.sides
        # A mask has block ids for the queries and the keys or for neither, so the check reads one
        # of them.
        self.check_absent(sinks=mask.sinks, block_ids=queries.block_ids)
        # A caller declares an order because the kernel compares row indices. The kernel also does
        # so if a causal mask or a window limits how far a query sees.
        compares_row_indices = self.order is not None or mask.reach != UNLIMITED_REACH
        if compares_row_indices:
            # Tokens have an array `places` if they are a tree, or if `take` has put them in another
            # order. In both cases, row indices cannot replace positions.
            self.check_absent(**{"queries.places": queries.places, "keys.places": keys.places})
        if self._is_known_on_host():
            self._check_order()
            self._check_queries_are_keys()

    def _is_known_on_host(self) -> bool:
        """Returns whether the host has the values of all tokens, so that it can check them."""
        for array in jax.tree.leaves(self.mask):
            is_traced = conversions.is_traced(array)
            # If several processes share an array, this process may have only some of the values.
            if is_traced or not getattr(array, "is_fully_addressable", True):
                return False
        return True

    def _check_order(self) -> None:
        """Raises unless the tokens lie in the declared order."""
        if self.order is None:
            return
        queries, keys = self.mask.sides
        _check_tokens(queries, self.order)
        if self.mask.keys is not None:
            _check_tokens(keys, self.order)

    def _check_queries_are_keys(self) -> None:
        """Raises unless the queries have the tokens of the keys from `q_offset` on."""
        start = self.q_offset
        if start is None:
            return
        queries, keys = self.mask.sides
        query_count, _ = self.mask.lengths
        # The arrays are compared by numpy. Inside of `jax.jit`, operations of jax would be traced,
        # and could not raise an error.
        segment_ids = jax.device_get(queries.segment_ids)
        is_token = True if segment_ids is None else segment_ids != 0
        # `places` are the numbers that replace positions in masks. Most tokens have none.
        for name in ("positions", "segment_ids", "places"):
            query_array = jax.device_get(getattr(queries, name))
            if query_array is None:
                continue
            key_array = jax.device_get(getattr(keys, name))
            expected = key_array[..., start : start + query_count]
            # A query at padding may have other numbers than the key, because it sees no key.
            is_wrong = (query_array != expected) & is_token
            if is_wrong.any():
                want = f"the {name} of the keys from index {start} on (q_offset)"
                raise arguments.value_error(f"queries.{name}", want, "other numbers")

    def check_absent(self, **parts: Any) -> None:
        """Raises a ValueError unless these parts of the rule are None.

        Args:
            **parts: Parts that the kernel has no argument for, by the names that the error uses.
        """
        for name, part in parts.items():
            if part is not None:
                want = f"None for {self.kernel}, which has no argument for it"
                got = part if isinstance(part, int | tuple) else "an array"
                raise refusal(name, want, got)

    def check_order_is_given(self, parts: str, choices: tuple[str, ...] = ORDERS) -> None:
        """Raises a ValueError unless the declared order is one of `choices`.

        Args:
            parts: The parts of the rule that need an order, in words.
            choices: The orders that the kernel can use.
        """
        if self.order not in choices:
            want = f"{' or '.join(map(repr, choices))}, for {parts} in {self.kernel}"
            raise arguments.value_error("order", want, repr(self.order))

    def check_self_attention(self, parts: str) -> None:
        """Raises a ValueError if the keys are another sequence than the queries.

        Args:
            parts: The parts of the rule that need self-attention, in words.
        """
        if self.mask.keys is not None:
            want = f"None (self-attention) for {parts} in {self.kernel}"
            raise refusal("keys", want, "another sequence")

    @property
    def has_segments(self) -> bool:
        """Returns whether some keys of a row may be padding, or belong to another sequence."""
        _, keys = self.mask.sides
        return keys.segment_ids is not None and self.order != "full"

    def index_reach(self) -> tuple[int | None, int | None]:
        """Returns how many row indices before and after its own a query sees: (left, right).

        None means no limit. The numbers are the ones of `mask.reach`, which counts positions: in
        every order of `ORDERS`, positions rise by one along the tokens of a segment. So inside a
        segment, a difference of positions is the same difference of row indices.

        Raises:
            ValueError: The rule has a causal mask or a window, and row indices cannot replace its
                positions.
        """
        reach = self.mask.reach
        if reach == UNLIMITED_REACH:
            return reach
        # The part of the mask that needs the checks below, for their errors.
        limited_part = "a causal mask or a window, as row indices are compared"
        if self.q_offset is None:
            self.check_self_attention(limited_part)
        self.check_order_is_given(limited_part)
        # Queries without segment ids see the keys of every segment by position. Row indices cannot
        # replace these positions, because positions begin again in each segment.
        sees_every_segment = self.has_segments and self.mask.queries.segment_ids is None
        if self.order == "packed" and sees_every_segment:
            want = f"the segment ids of the keys, for {limited_part} in {self.kernel}"
            raise refusal("queries.segment_ids", want, None)
        return reach

    def bounded_reach(self) -> tuple[int, ...]:
        """Returns `index_reach` with a number for each side.

        A side without a limit gets the length of the mask, because two tokens are never that far
        apart.
        """
        length = max(self.mask.lengths)
        left, right = self.index_reach()
        left = length if left is None else min(left, length)
        right = length if right is None else min(right, length)
        return left, right

    def segment_ids(self) -> list[Integer[Array, "b t"]] | None:
        """Computes ids of queries [b, t] and of keys [b, s], for a kernel that compares such ids.

        A query and a key have equal ids if they are in the same segment and the same chunk. Padding
        has the id 0. Returns None if all ids are equal.
        """
        chunk = self.mask.chunk
        if not self.has_segments and chunk is None:
            return None
        # `jax.tree.map` may have made arrays of 8 or 16 bits. A new object converts these to int32.
        sides = [TokenPositions(**vars(side)) for side in self.mask.sides]
        # Queries and keys may have different dtypes, so both get the wider one.
        dtype = np.result_type(*(array.dtype for array in jax.tree.leaves(sides)))
        ids = []
        for side in sides:
            if side.segment_ids is None:
                # Without segment ids, every token is in segment 1.
                ids.append(jnp.ones((1, side.positions.shape[1]), dtype))
            else:
                ids.append(side.segment_ids.astype(dtype))
        if self.mask.queries.segment_ids is None:
            # Queries without segment ids see the tokens of every segment. So all tokens get the id
            # 1, and padding keeps the id 0.
            ids = [(side_ids != 0).astype(dtype) for side_ids in ids]
        if chunk is not None:
            # Each pair (segment, chunk) gets a number of its own.
            chunks = [side.positions.astype(dtype) // chunk for side in sides]
            return _number_pairs(ids, chunks)
        if dtype == jnp.int32:
            return ids
        # Kernels compare int32, in which ids of a wider dtype could wrap. So each id gets a number
        # from 1 on, and padding keeps 0.
        return _number_pairs(ids, ids)

    @property
    def row_count(self) -> int:
        """Returns the number of batch rows: `batch_size`, or the number that the mask has."""
        counts = {array.shape[0] for array in jax.tree.leaves(self.mask)}
        # Each array has one batch row, or as many batch rows as the mask. (`max` could not be used,
        # because a symbolic dimension of jax.export has no order.)
        rows = 1
        for count in counts:
            if count != 1:
                rows = count
        if self.batch_size is None:
            return rows
        if rows not in (1, self.batch_size):
            raise arguments.value_error("batch_size", f"the mask's {rows} rows", self.batch_size)
        return self.batch_size

    def broadcast_to_rows(self, array: Array) -> Array:
        """Broadcasts an array [1 or B, ...] to all batch rows."""
        return jnp.broadcast_to(array, (self.row_count, *array.shape[1:]))

    def number_in_rows(self, is_counted: Bool[Array, "b t"]) -> Int32[Array, "b"]:
        """Counts, for every batch row, the tokens for which `is_counted` is true."""
        # Kernels take only int32, and a sum of bools has 64 bits if jax_enable_x64 is on.
        counts = jnp.sum(is_counted, axis=-1, dtype=jnp.int32)
        return self.broadcast_to_rows(counts)

    def kernel_segment_ids(self, make: Callable[[Array, Array], Any]) -> Any:
        """Makes the segment ids in the form that a kernel takes, or None if all ids are equal.

        Args:
            make: Makes this form from the ids of the queries [B, T] and of the keys [B, S].
        """
        ids = self.segment_ids()
        if ids is None:
            return None
        query_ids, key_ids = ids
        return make(self.broadcast_to_rows(query_ids), self.broadcast_to_rows(key_ids))


def _check_tokens(tokens: TokenPositions, order: str) -> None:
    """Raises a ValueError unless tokens whose values are known lie in this order."""
    # `check_batch` also checks the ids of a batch, which a mask does not have. So it is passed
    # zeros, which are valid ids.
    ids = np.zeros((len(tokens), tokens.positions.shape[1]), np.int32)
    check_batch(ids, tokens, vocab_size=1, order=order)


# The function is compiled even if the caller is not.
@functools.partial(jax.jit, inline=True)
def _number_pairs(segments: list[Array], chunks: list[Array]) -> list[Int32[Array, "b t"]]:
    """Numbers the pairs (segment, chunk) of each batch row from 1 on, and gives padding 0.

    Tokens get equal numbers if they have equal pairs, also if one is a query and the other a key.
    So queries and keys are numbered together. For example:

        queries: segments 7 7, chunks 0 1
        keys: segments 7 9 0, chunks 1 1 0 (the last key is padding)

    The sorted pairs are (0, 0), (7, 0), (7, 1) and (9, 1). So the queries get the numbers 2 3, and
    the keys 3 4 0. The pair of the padding takes the number 1, which no token has.

    Args:
        segments: The segment ids of the queries and of the keys.
        chunks: The chunks of the queries and of the keys. A chunk is a fixed range of positions,
            whose tokens see only each other (see `AttentionMask`).
    """
    pairs_of_sides = []
    for side_segments, side_chunks in zip(segments, chunks, strict=True):
        # Segments and chunks have 1 or b batch rows each. The stacked pairs are
        # [1 or b, length, 2].
        same_shape = jnp.broadcast_arrays(side_segments, side_chunks)
        pairs_of_sides.append(jnp.stack(same_shape, axis=2))
    query_pairs, key_pairs = pairs_of_sides
    # The queries or the keys may have one batch row, which is used for all batch rows.
    batch = max(len(query_pairs), len(key_pairs))
    query_pairs = jnp.broadcast_to(query_pairs, (batch, *query_pairs.shape[1:]))
    key_pairs = jnp.broadcast_to(key_pairs, (batch, *key_pairs.shape[1:]))
    pairs = jnp.concatenate([query_pairs, key_pairs], axis=1)

    def number_row(row_pairs: Integer[Array, "n 2"]) -> Integer[Array, "n"]:
        """Returns, for each pair of a batch row, its index in the sorted list of the pairs."""
        # `jnp.unique` returns the sorted list, and where in the list each pair is (the inverse).
        _, pair_indices = jnp.unique(row_pairs, axis=0, size=len(row_pairs), return_inverse=True)
        return pair_indices

    numbers_from_0 = jax.vmap(number_row)(pairs)
    is_padding = pairs[..., 0] == 0
    numbers = jnp.where(is_padding, 0, numbers_from_0.astype(jnp.int32) + 1)
    query_count = query_pairs.shape[1]
    return [numbers[:, :query_count], numbers[:, query_count:]]
