"""The rule of an attention mask: who may attend to whom, without a bool for every pair."""

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
    fields,
    may_attend,
    whole_fields,
    with_conditions,
)
from transformer_embed._src.attention.block_mask import block_mask
from transformer_embed._src.attention.joined_mask import Mask
from transformer_embed._src.compiled import compiled
from transformer_embed._src.pytrees import register_pytree
from transformer_embed._src.sequences.token_arrays import check_batch_sizes
from transformer_embed._src.sequences.token_positions import (
    TokenPositions,
    check_token_positions,
    number_of_rows,
)


# Not compared by its fields: equality of arrays is an array, which has no truth value.
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMask(Mask):
    """Who may attend to whom in an attention layer, as a rule of size O(length).

    A query at position q may attend to a key at position k where

        (k <= q if causal, and k <= q + right, and (q - left <= k or k < sinks),
         and q // chunk == k // chunk,
         or both are in the same block)
        and both have the same segment id, and the key is a token, not padding

    and terms whose arguments are not given are left out. The class is a pytree, so it passes
    through `jit`, `vmap` and `scan`, can be sharded over the batch and serialised by `jax.export`.

    `mask & other` allows the pairs that both allow, and `mask | other` those of either; the result
    has `dense`, `block` and `block_mask`, too. A rule of your own is a mask of your own integers: a
    causal mask compares positions, and segment ids are compared for equality. Each mask hides the
    padding and the other segments of its own tokens, so `|` of rules with other integers can show
    what one of them hides; to keep that hidden, join `& AttentionMask(tokens, causal=False)`.

    Args:
        queries: the tokens that attend. If they have no segment ids, they see the tokens of every
            segment.
        keys: the tokens that are attended to, such as a cache or another sequence. None: the
            queries themselves (self-attention).
        causal: True: keys after the query are hidden (a decoder, GPT). False: a query sees keys on
            both sides (an encoder, BERT). There is no default.
        window: (left, right); (w - 1, 0) for the w latest keys, the query's own among them, as in
            transformers. How many positions before and after its own a query sees, at least 0;
            None: no limit.
        chunk: length of a chunk, at least 1: a query sees only the keys of its own chunk, positions
            0..chunk-1, chunk..2*chunk-1, ... (Llama 4). Positions from `TokenPositions.from_ids`
            count chunks from the first token that is not padding, as transformers does.
        sinks: number of first positions of each sequence, at least 1, which the left side of a
            window does not hide: those below it. (Its right side and a chunk do.)

    Raises:
        TypeError: queries or keys are not TokenPositions, causal is not a Python bool, or a window
            or chunk is not a Python int.
        ValueError: queries and keys have different numbers of rows (1 serves any number), only one
            of them has block ids, only the queries have segment ids, or a window or chunk is out of
            range.

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
        Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3,
        https://arxiv.org/abs/1706.03762. Windows: Beltagy et al., "Longformer" (2020), section 3.1,
        https://arxiv.org/abs/2004.05150. Segments: Raffel et al., "T5" (2020), section 3.5.2,
        https://arxiv.org/abs/1910.10683. Chunks: the block of the fixed pattern of Child et al.,
        "Generating Long Sequences with Sparse Transformers" (2019), section 4.3,
        https://arxiv.org/abs/1904.10509. Blocks: the prefix language model of T5, section 3.2.1;
        numbered blocks (images in text, for example) as in transformers' Gemma 3.
    """

    queries: TokenPositions
    keys: TokenPositions | None = None
    _: dataclasses.KW_ONLY
    causal: bool
    window: tuple[int | None, int | None] | None = None
    chunk: int | None = None
    sinks: int | None = None

    def __post_init__(self) -> None:
        # None means that query i is key i, as kernels that compare row indices need it.
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
        if self.reach[0] is None:
            arguments.check_left_out("sinks", self.sinks, "no left side of a window hides them")
        if self.sides[1].ends is not None:
            if not self.causal:
                raise arguments.value_error("causal", "True, for keys of a tree", False)
            why = (
                "the keys are of a tree: join & te.AttentionMask(te.TokenPositions("
                "tree.positions, segment_ids=tree.segment_ids), ...), which counts by depth"
            )
            for name in ("window", "chunk"):
                arguments.check_left_out(name, getattr(self, name), why)

    @property
    def sides(self) -> tuple[TokenPositions, TokenPositions]:
        """The queries and the keys, one object in self-attention."""
        return self.queries, self.queries if self.keys is None else self.keys

    @property
    def lengths(self) -> tuple[Any, Any]:
        """The numbers of queries and of keys."""
        queries, keys = self.sides
        return queries.positions.shape[-1], keys.positions.shape[-1]

    @property
    def reach(self) -> Window:
        """How many places before and after its own a query sees; None: no limit."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    def dense(self) -> Bool[Array, "*b 1 t s"]:
        """The mask as an array, in the smallest shape that broadcasts.

        Returns:
            bool [B or 1, 1, T or 1, S], True = may attend, for logits [B, heads, T, S]: the batch
            axis is 1 if all rows have the same mask, the query axis is 1 if all queries have the
            same mask. If queries and keys have no batch axis, the mask has none either: bool
            [1, T or 1, S], for logits [heads, T, S]. A row of the mask may be all False: see
            `mask_to_bias`. A mask does not protect against keys or values that are
            NaN or infinite, because 0 times them is NaN.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_offset(0, 3)
            >>> te.AttentionMask(tokens, causal=True, window=(1, 0)).dense()[0].tolist()
            [[True, False, False], [True, True, False], [False, True, True]]
        """
        return self._with_rank(_dense(self))

    def _with_rank(self, array: Array) -> Array:
        """Returns an array [1 or B, ...] without the batch axis if no side has one."""
        has_batch = any(side.positions.ndim == 2 for side in self.sides)
        return array if has_batch else array[0]

    def block(
        self, query_start: ArrayLike, key_start: ArrayLike, shape: tuple[int, int]
    ) -> Bool[Array, "*b t s"]:
        """A rectangle of the mask, without the rest of it.

        In a Pallas kernel, make a mask of the positions and segment ids that the kernel has loaded,
        each [1, size], and ask for its only block: `block(0, 0, (T, S))`.

        Args:
            query_start: integer, the index of the first query of the block in its row. It may be
                traced.
            key_start: integer, the index of the first key; it may be traced.
            shape: (number of queries, number of keys), at least 1 each.

        Returns:
            bool [B or 1, *shape], or [*shape] without a batch axis, True = may attend:
            `dense()[..., 0, query_start:, key_start:]`, cut to the shape. It is all False if a
            traced start leaves no room for the shape.

        Raises:
            TypeError: a start is not an integer, or shape does not hold two Python ints.
            ValueError: the block is larger than the mask, or not inside it (a traced start is not
                checked).

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_offset(0, 1_000_000)
            >>> te.AttentionMask(tokens, causal=True).block(500_000, 499_999, (2, 3)).tolist()
            [[True, True, False], [True, True, True]]
        """
        shape = arguments.entries("shape", shape, arguments.size, count=2)
        sides, starts = (("query_start", query_start), ("key_start", key_start)), []
        for axis, (name, start) in enumerate(sides):
            last = self.lengths[axis] - shape[axis]
            # A symbolic length has no order.
            if not export.is_symbolic_dim(self.lengths[axis]) and last < 0:
                want = f"a size inside the mask's {self.lengths}"
                raise arguments.value_error("shape", want, shape)
            inside = f"the mask, for a block of {shape}"
            starts.append(arguments.as_indices(name, start, last, inside))
        return self._with_rank(_block(self, starts, shape))

    def block_mask(self, shape: tuple[int, int]) -> Int8[Array, "*b m n"]:
        """For each block of the mask, whether none, some or all of its pairs may attend.

        An attention kernel skips the blocks without a pair, and needs no mask where all pairs may
        attend. Time and memory are O(T + S + number of blocks).

        Args:
            shape: (number of queries, number of keys) of a block; they must divide T and S.

        Returns:
            int8 [B or 1, T / shape[0], S / shape[1]], or without the batch axis. Skip
            a block of 0: no pair may attend. Leave out the mask in a block of 2: all pairs may.
            Mask a block of 1, by `block` for example.

            Padded or packed self-attention (with the same first position in each sequence of a
            row), and a sequence with its cache, have a 1 only where some pairs may and some may
            not. With block ids, with both sinks and a chunk, or in other batches, a 1 may also
            stand where none or all may.

        Raises:
            TypeError: shape does not hold two Python ints.
            ValueError: shape does not divide the lengths of queries and keys.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_segment_ids([[1] * 6 + [2] * 6])
            >>> te.AttentionMask(tokens, causal=True).block_mask((3, 3))[0].tolist()
            [[1, 0, 0, 0], [2, 1, 0, 0], [0, 0, 1, 0], [0, 0, 2, 1]]
        """
        shape = arguments.entries("shape", shape, arguments.size, count=2)
        for side, length, size in zip(("queries", "keys"), self.lengths, shape, strict=True):
            if export.is_symbolic_dim(length) or length % size:
                want = f"a divisor of the number of {side}, {length} (pad the batch to a multiple)"
                raise arguments.value_error("shape", want, size)
        return self._with_rank(block_mask(self, shape))


register_pytree(AttentionMask, "causal", "window", "chunk", "sinks")


def _check_sides(queries: TokenPositions, keys: TokenPositions) -> None:
    """Raises a ValueError unless one can attend to the other."""
    sides = {"queries": queries, "keys": keys}
    # Without segment ids, queries see the keys of every segment.
    for field, side, other in (
        ("segment_ids", "keys", "queries"),
        ("block_ids", "keys", "queries"),
        ("block_ids", "queries", "keys"),
    ):
        if getattr(sides[side], field) is None and getattr(sides[other], field) is not None:
            want = f"an array, since {other}.{field} is given"
            raise arguments.value_error(f"{side}.{field}", want, None)
    check_batch_sizes({side: number_of_rows(tokens) for side, tokens in sides.items()})


def _limit(name: str, distance: Any) -> int | None:
    return None if distance is None else arguments.integer(name, distance, at_least=0)


_window = functools.partial(
    arguments.entries,
    convert=_limit,
    count=2,
    form="a pair (left, right), such as (w - 1, 0) for the w latest keys",
)


def _slice(tokens: Fields, start: Array, size: int) -> Fields:
    """A stretch of tokens."""
    if size == tokens["places"].shape[1]:
        # A kernel for TPUs has no dynamic slice of its values.
        return tokens
    return jax.tree.map(
        lambda array: jax.lax.dynamic_slice_in_dim(array, start, size, axis=1), tokens
    )


def _pairs(mask: AttentionMask, queries: Fields, keys: Fields) -> Bool[Array, "b t s"]:
    sides = []
    for side, axis in ((queries, 2), (keys, 1)):
        expanded = {name: jnp.expand_dims(array, axis) for name, array in side.items()}
        sides.append(with_conditions(expanded, mask))
    return may_attend(*sides)


# The functions below are compiled even if the caller is not.
@compiled()
def _dense(mask: AttentionMask) -> Bool[Array, "b 1 t s"]:
    # Only the queries' length may stay split.
    queries, keys = fields(mask)[0], whole_fields(mask)[1]
    # That a query is a token follows from the equal segment of a key, and would give each query a
    # row of its own.
    queries["token"] = jnp.ones((1, 1), jnp.int32)
    return jnp.expand_dims(_pairs(mask, queries, keys), 1)


@compiled(2)
def _block(
    mask: AttentionMask, starts: list[Array], shape: tuple[int, int]
) -> Bool[Array, "b t s"]:
    block = _pairs(mask, *map(_slice, whole_fields(mask), starts, shape))
    # A dynamic slice moves a stretch that does not fit.
    for start, length, size in zip(starts, mask.lengths, shape, strict=True):
        block &= (start >= 0) & (start <= length - size)
    return block
