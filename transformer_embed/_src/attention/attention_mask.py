"""Says who may attend to whom by a rule, without a bool for every pair.

In shapes, b counts batch rows, t counts queries and s counts keys.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Bool, Int8

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.attention.attention_rule import (
    Fields,
    Window,
    may_attend,
    rule_fields,
    rule_fields_of_whole_rows,
    with_conditions,
)
from transformer_embed._src.attention.joined_mask import Mask
from transformer_embed._src.attention.tile_kinds import compute_tile_kinds
from transformer_embed._src.compiled import compiled
from transformer_embed._src.pytrees import register_pytree
from transformer_embed._src.sequences.token_arrays import check_batch_sizes
from transformer_embed._src.sequences.token_positions import (
    TokenPositions,
    check_token_positions,
    number_of_rows,
)


# Two masks are not compared by their fields (`eq=False`), because `==` of two arrays is an array,
# which is neither true nor false.
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMask(Mask):
    """Says who may attend to whom in an attention layer, by a rule of size O(length).

    You make a mask from tokens, and pass the array `mask.dense()` to your attention layer (not the
    mask itself). For long rows, an attention kernel of your own can use two methods in place of the
    whole array: `tile` computes one rectangle of the array, and `tile_kinds` says which rectangles
    are empty or full. `te.kernels` translates a mask into the arguments of fused kernels.

    With `window=(left, right)`, a query at position q may attend to a key at position k if

        (k <= q if causal, and k <= q + right, and (q - left <= k or k < sinks),
         and q // chunk == k // chunk,
         or both are in the same block)
        and both have the same segment id, and the key is a token, not padding

    A condition that names an argument (`causal`, `window`, `sinks` or `chunk`) applies only if you
    set the argument. For example, without `window` a query sees keys at any distance. The class is
    a pytree, so it passes through `jit`, `vmap` and `scan`, can be sharded over the batch, and
    `jax.export` can save it.

    You can join two masks. `mask & other` allows the pairs that both masks allow, and
    `mask | other` allows the pairs that at least one mask allows. The joined mask has the methods
    `dense`, `tile` and `tile_kinds`, too. The second mask may be a rule of your own, for which you
    make a `TokenPositions` from your own integers. For example, if you pass the number of each
    token's paragraph, from 1 on, as `segment_ids`, a token sees only its own paragraph. After
    `mask | other`, a token may see other documents and padding, which `mask` alone hides. To hide
    these keys again, write `(mask | other) & AttentionMask(tokens, causal=False)`, because a mask
    with `causal=False` allows all pairs inside each document.

    You can translate a mask into the arguments of a kernel of your own, as `te.kernels` does. The
    arguments of `AttentionMask` (see below) are attributes of the mask, such as `mask.window`. The
    mask also has three pairs:

    - `mask.sides` holds the queries and the keys, as two `TokenPositions`. For example,
      `mask.sides[1].segment_ids` says to which sequence each key belongs. The entry of
      `TokenPositions` explains the other arrays: `positions`, `block_ids`, `places`, `ends` and
      `padding_mask`.
    - `mask.lengths` holds the numbers of queries and of keys.
    - `mask.reach` says how far a query sees to the left and to the right under `causal` and
      `window` together. With `causal=True` and `window=(3, 5)`, `mask.reach` is (3, 0). None means
      no limit.

    Args:
        queries: The tokens that attend. Queries without segment ids see the keys of every segment.
        keys: The tokens that are attended to, such as a cache or the source of a translation. If
            None, the queries are also the keys (self-attention).
        causal: Whether keys at later positions than the query are hidden. Set True for a decoder
            (GPT), and False for an encoder (BERT), in which a query sees keys on both sides. There
            is no default.
        window: How far a query sees, a pair (left, right) of numbers of positions before and after
            the query. Each number is at least 0, or None for no limit. For the sliding window of
            size w in transformers, pass `(w - 1, 0)`: the query sees its own key and the w - 1 keys
            before it.
        chunk: The length of a chunk, at least 1. A chunk is a fixed range of positions, as in Llama
            4. With `chunk=4`, a query at position 5 sees only keys at positions 4 to 7. If padding
            is on the left, use `TokenPositions.from_ids`, so the first chunk begins at the first
            token, as in transformers.
        sinks: How many of the first positions (the sinks) stay visible to the left of a window, at
            least 1. For example, with `window=(3, 0)`, the query at position 9 sees the positions 6
            to 9. With `sinks=2`, this query also sees the positions 0 and 1. Pass `sinks` only with
            a window that has a left limit. A sink ignores only this left limit, and all other
            limits still hold. For example, with `window=(3, 0)`, the query at position 0 does not
            see position 1, because the right limit is 0. If you also set `chunk`, a query sees no
            sink outside of its own chunk. For example, with `chunk=4`, the chunk of the query at
            position 9 is the positions 8 to 11. So this query does not see the sinks 0 and 1.

    Raises:
        TypeError: `queries` or `keys` is not a `TokenPositions`, or `causal` is not a Python bool.
            `chunk`, `sinks` or a limit of the window is not a Python int.
        ValueError: There are several causes:

            - The queries and the keys have different numbers of batch rows, such as 2 and 3. (A
              single batch row fits any number.)
            - Only the queries or only the keys have block ids, which number groups of tokens that
              always see each other (from `TokenPositions.with_block_ids`).
            - The queries have segment ids and the keys have none.
            - `window`, `chunk` or `sinks` is out of range.
            - You pass `sinks` (how many of the first positions stay visible), but no `window` with
              a left limit.
            - The keys are a tree of tokens (from `TokenPositions.from_parents`), and you set
              `causal=False`, `window` or `chunk`.

    Example:
        >>> import jax.numpy as jnp
        >>> import transformer_embed as te
        >>> tokens = te.TokenPositions.from_ids([[5, 6, 7, 0], [8, 9, 0, 0]], pad_id=0)
        >>> te.AttentionMask(tokens, causal=True).dense().shape
        (2, 1, 4, 4)
        >>> step = te.TokenPositions.from_offset([3, 2], 1)
        >>> mask = te.AttentionMask(step, tokens, causal=True).dense()  # tokens in a cache
        >>> mask[:, 0, 0].astype(int).tolist()
        [[1, 1, 1, 0], [1, 1, 0, 0]]

    Source:
        The causal mask is from Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3,
        https://arxiv.org/abs/1706.03762. Windows are from Beltagy et al., "Longformer" (2020),
        section 3.1, https://arxiv.org/abs/2004.05150. Segments are from Raffel et al., "T5" (2020),
        section 3.5.2, https://arxiv.org/abs/1910.10683. Chunks are the blocks of the "fixed
        pattern" in Child et al., "Generating Long Sequences with Sparse Transformers" (2019),
        section 4.3, https://arxiv.org/abs/1904.10509. Groups of tokens that all see each other
        (`block_ids`) are like the prefix of a text in section 3.2.1 of the T5 paper. Gemma 3 in
        transformers has several such groups in one text: one for each image.
    """

    queries: TokenPositions
    keys: TokenPositions | None = None
    _: dataclasses.KW_ONLY
    causal: bool
    window: tuple[int | None, int | None] | None = None
    chunk: int | None = None
    sinks: int | None = None

    def __post_init__(self) -> None:
        """Checks the tokens and the options, and converts the options."""
        # A user may pass one object as queries and keys. This is self-attention, too, so `keys`
        # becomes None: kernels that compare row indices then know that query i is key i.
        if self.keys is self.queries:
            arguments.set_fields(self, keys=None)
        check_token_positions("queries", self.queries)
        if self.keys is not None:
            check_token_positions("keys", self.keys)
            _check_sides(self.queries, self.keys)
        arguments.convert_fields(
            self,
            causal=arguments.flag,
            window=_window,
            chunk=arguments.size,
            sinks=arguments.size,
        )
        # How many places before its own a query sees, None for no limit.
        left_limit, _ = self.reach
        if left_limit is None:
            why = "the window has no left side, from which sinks are exempt"
            arguments.check_left_out("sinks", self.sinks, why)
        _, keys = self.sides
        # Only tokens of a tree have `ends`: one past the last place that sees the token.
        keys_are_tree = keys.ends is not None
        if keys_are_tree:
            self._check_options_of_tree()

    def _check_options_of_tree(self) -> None:
        """Raises a ValueError unless the options are possible for keys of a tree.

        The places of a tree are in depth-first order. So a window, which counts places, would not
        count ancestors.
        """
        if not self.causal:
            raise arguments.value_error("causal", "True, for keys of a tree", False)
        why = (
            "the keys are of a tree. For a limit by depth, join this mask & te.AttentionMask("
            "te.TokenPositions(tree.positions, segment_ids=tree.segment_ids), ...)"
        )
        arguments.check_left_out("window", self.window, why)
        arguments.check_left_out("chunk", self.chunk, why)

    @property
    def sides(self) -> tuple[TokenPositions, TokenPositions]:
        """Returns the queries and the keys, which are one object in self-attention."""
        return self.queries, self.queries if self.keys is None else self.keys

    @property
    def lengths(self) -> tuple[Any, Any]:
        """Returns the numbers of queries and of keys."""
        queries, keys = self.sides
        return queries.positions.shape[-1], keys.positions.shape[-1]

    @property
    def reach(self) -> Window:
        """Returns (left, right): how many places before and after its own a query sees.

        None means no limit. A causal mask has the right limit 0.
        """
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    def dense(self) -> Bool[Array, "*b 1 t s"]:
        """Makes the mask as an array, in the smallest shape that broadcasts.

        Returns:
            A bool array [B, 1, T, S], True = may attend, which broadcasts to attention logits [B,
            heads, T, S]. If all batch rows have the same mask, the first axis has length 1. If all
            queries have the same mask, the axis of the queries has length 1. If neither the queries
            nor the keys have a batch axis, the result has no batch axis, and broadcasts to logits
            [heads, T, S].

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_offset(0, 3)
            >>> te.AttentionMask(tokens, causal=True, window=(1, 0)).dense()[0].tolist()
            [[True, False, False], [True, True, False], [False, True, True]]

        Edge cases:
            - Some queries see no key at all, for example queries at padding. A softmax over -inf
              alone is NaN. `mask_to_bias` avoids this NaN.
            - Keep NaN and infinite numbers out of all keys and values, also out of those that the
              mask hides. The attention weight of a masked key is 0, but 0 times NaN is NaN.
        """
        return self._with_rank(_dense(self))

    def _with_rank(self, array: Array) -> Array:
        """Drops the batch axis of an array [1, ...] if neither queries nor keys have one."""
        has_batch = any(side.positions.ndim == 2 for side in self.sides)
        return array if has_batch else array[0]

    def tile(
        self, query_start: ArrayLike, key_start: ArrayLike, shape: tuple[int, int]
    ) -> Bool[Array, "*b t s"]:
        """Makes a rectangle of the mask, without the rest of the mask.

        Use this method in an attention kernel of your own, which computes some queries and keys at
        a time. In a Pallas kernel, make an `AttentionMask` of the T queries and S keys that the
        kernel has loaded, from their positions and segment ids (shapes [1, T] and [1, S]). Then
        call `tile(0, 0, (T, S))` on this mask to get the whole mask as one array.

        Args:
            query_start: The index in the row of the first query of the tile. An integer, which may
                be traced.
            key_start: The index in the row of the first key of the tile. An integer, which may be
                traced.
            shape: The number of queries and the number of keys of the tile, at least 1 each.

        Returns:
            bool [B or 1, shape[0], shape[1]], True = may attend. If the tokens have no batch axis,
            the result has none. The tile is a part of the array `dense()`, without the axis of the
            heads. The part begins at `query_start` and `key_start`.

        Raises:
            TypeError: `query_start` or `key_start` is not an integer, or `shape` does not hold two
                Python ints.
            ValueError: The tile is larger than the mask. `query_start` or `key_start` is a Python
                or numpy integer, and a part of the tile would be outside the mask.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_offset(0, 1_000_000)
            >>> te.AttentionMask(tokens, causal=True).tile(500_000, 499_999, (2, 3)).tolist()
            [[True, True, False], [True, True, True]]

        Edge cases:
            A jax array as `query_start` or `key_start` is not checked. If a part of the tile would
            then be outside the mask, the whole tile is False.
        """
        shape = arguments.entries("shape", shape, arguments.size, count=2)
        query_length, key_length = self.lengths
        query_count, key_count = shape
        for length, size in zip(self.lengths, shape, strict=True):
            # A symbolic length of jax.export cannot be compared with a number.
            if not export.is_symbolic_dim(length) and length < size:
                want = f"a size inside the mask's {self.lengths}"
                raise arguments.value_error("shape", want, shape)
        # The errors name this range: "query_start: wanted integers inside the mask, for ...".
        range_name = f"the mask, for a tile of {shape}"
        last_query_start: Any = query_length - query_count
        # `as_indices` makes a scalar int32, after a check that a number on the host is in range.
        query_start = arguments.as_indices("query_start", query_start, last_query_start, range_name)
        last_key_start: Any = key_length - key_count
        key_start = arguments.as_indices("key_start", key_start, last_key_start, range_name)
        return self._with_rank(_tile(self, query_start, key_start, shape))

    def tile_kinds(self, shape: tuple[int, int]) -> Int8[Array, "*b m n"]:
        """Says of each tile of the mask whether none, some or all of the pairs may attend.

        A tile is a rectangle of the mask, such as the queries 0 to 127 and the keys 128 to 255. Use
        this method in an attention kernel: skip the tiles in which no pair may attend, and leave
        out the mask in the tiles in which all pairs may attend. Time and memory are O(T + S +
        number of tiles).

        Args:
            shape: The number of queries, which must divide T, and the number of keys of a tile,
                which must divide S.

        Returns:
            int8 [B or 1, T / shape[0], S / shape[1]], the kind of each tile. If the tokens have no
            batch axis, the result has none. 0 means that no pair of the tile may attend, so skip
            the tile. 2 means that all pairs may attend, so leave out the mask. 1 means that you
            must mask the tile, for example by `tile`.

        Raises:
            TypeError: `shape` does not hold two Python ints.
            ValueError: `shape[0]` does not divide the number of queries, or `shape[1]` does not
                divide the number of keys.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_segment_ids([[1] * 6 + [2] * 6])
            >>> te.AttentionMask(tokens, causal=True).tile_kinds((3, 3))[0].tolist()
            [[1, 0, 0, 0], [2, 1, 0, 0], [0, 0, 1, 0], [0, 0, 2, 1]]

        Edge cases:
            Sometimes a tile gets the kind 1, although no pair of the tile may attend (kind 0) or
            all pairs may (kind 2), because `tile_kinds` does not find that out. A kernel that masks
            this tile still gives the right result.

            This may happen in two kinds of masks. In the first, the tokens have block ids (from
            `TokenPositions.with_block_ids`). They number groups of tokens that always see each
            other. In the second, you set both `sinks` and `chunk`. For all other masks, every tile
            gets its exact kind in two cases:

            - self-attention of padded or packed rows, if all sequences of a batch row begin at the
              same position;
            - attention of one sequence to its cache.
        """
        shape = arguments.entries("shape", shape, arguments.size, count=2)
        for side, length, size in zip(("queries", "keys"), self.lengths, shape, strict=True):
            if export.is_symbolic_dim(length) or length % size:
                want = f"a divisor of the number of {side}, {length} (pad the batch to a multiple)"
                raise arguments.value_error("shape", want, size)
        return self._with_rank(compute_tile_kinds(self, shape))


register_pytree(AttentionMask, "causal", "window", "chunk", "sinks")


def _check_sides(queries: TokenPositions, keys: TokenPositions) -> None:
    """Raises a ValueError unless queries and keys have arrays that can be compared."""

    arrays = {
        "queries.segment_ids": queries.segment_ids,
        "keys.segment_ids": keys.segment_ids,
        "queries.block_ids": queries.block_ids,
        "keys.block_ids": keys.block_ids,
    }

    def check_given_if(given_name: str, name: str) -> None:
        """Raises a ValueError if the array `given_name` is given, but the array `name` is not."""
        if arrays[name] is None and arrays[given_name] is not None:
            raise arguments.value_error(name, f"an array, since {given_name} is given", None)

    # Queries may lack segment ids, even if the keys have them. These queries see the keys of every
    # segment.
    check_given_if("queries.segment_ids", "keys.segment_ids")
    check_given_if("queries.block_ids", "keys.block_ids")
    check_given_if("keys.block_ids", "queries.block_ids")
    check_batch_sizes({"queries": number_of_rows(queries), "keys": number_of_rows(keys)})


def _limit(name: str, distance: Any) -> int | None:
    """Converts one side of a window to an int of at least 0, or None for no limit."""
    return None if distance is None else arguments.integer(name, distance, at_least=0)


_window = functools.partial(
    arguments.entries,
    convert=_limit,
    count=2,
    form="a pair (left, right), such as (w - 1, 0) for the w latest keys",
)


def _slice_tokens(fields: Fields, start: Array, count: int) -> Fields:
    """Takes the fields of `count` tokens, from the index `start` on."""
    if count == fields["places"].shape[1]:
        # Kernels for TPUs cannot slice arrays dynamically, so a slice of all tokens is left out.
        return fields
    return jax.tree.map(
        lambda array: jax.lax.dynamic_slice_in_dim(array, start, count, axis=1), fields
    )


def _mask_of_pairs(
    mask: AttentionMask, query_fields: Fields, key_fields: Fields
) -> Bool[Array, "b t s"]:
    """Computes for each pair of a query and a key whether the mask lets the query see the key."""

    def with_axis(fields: Fields, axis: int) -> Fields:
        """Adds an axis of size 1 to each array."""
        return {name: jnp.expand_dims(array, axis) for name, array in fields.items()}

    # The arrays of the queries become [b, t, 1], and the arrays of the keys [b, 1, s]. So they
    # broadcast to [b, t, s].
    # `with_conditions` adds which tokens are no padding, and from which places each key is seen.
    query_columns = with_axis(query_fields, 2)
    queries = with_conditions(query_columns, mask)
    key_rows = with_axis(key_fields, 1)
    keys = with_conditions(key_rows, mask)
    return may_attend(queries, keys)


# The functions below are compiled even if the caller is not.


@compiled()
def _dense(mask: AttentionMask) -> Bool[Array, "b 1 t s"]:
    """Computes the mask of all pairs, with a query axis of 1 if all queries have the same mask."""
    # The fields are arrays with a number for each query or key, by which the rule of the mask
    # decides. Explicit mesh axes may split the queries over devices. Each query needs all keys, so
    # only the fields of keys are made whole on each device.
    query_fields, _ = rule_fields(mask)
    _, key_fields = rule_fields_of_whole_rows(mask)
    # One flag says that every query is a token. A flag for each query would give the mask a query
    # axis, even if all queries have the same mask. The mask of a query at padding is still all
    # False: such a query is in segment 0, and all keys in segment 0 are padding.
    query_fields["token_flags"] = jnp.ones((1, 1), jnp.int32)
    pairs = _mask_of_pairs(mask, query_fields, key_fields)
    # The axis of the heads.
    return jnp.expand_dims(pairs, 1)


@compiled(3)
def _tile(
    mask: AttentionMask, query_start: Array, key_start: Array, shape: tuple[int, int]
) -> Bool[Array, "b t s"]:
    """Computes the mask of a rectangle of pairs, all False if a part of it is outside the mask."""
    # The fields are arrays with a number for each query or key, by which the rule of the mask
    # decides. A rectangle may be anywhere in the rows, so each device needs whole rows.
    query_fields, key_fields = rule_fields_of_whole_rows(mask)
    query_length, key_length = mask.lengths
    query_count, key_count = shape
    tile_queries = _slice_tokens(query_fields, query_start, query_count)
    tile_keys = _slice_tokens(key_fields, key_start, key_count)
    tile = _mask_of_pairs(mask, tile_queries, tile_keys)
    # If a start leaves no room for the rectangle, the dynamic slice moves the start, and so takes
    # other tokens than the caller asked for. In this case the result is False.
    has_room_for_queries = (query_start >= 0) & (query_start <= query_length - query_count)
    tile &= has_room_for_queries
    has_room_for_keys = (key_start >= 0) & (key_start <= key_length - key_count)
    tile &= has_room_for_keys
    return tile
