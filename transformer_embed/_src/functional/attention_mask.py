"""The rule of an attention mask: who may attend to whom, without a bool for every pair."""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

from transformer_embed._src import arguments
from transformer_embed._src.functional.compiled import compiled
from transformer_embed._src.functional.pytrees import pytree
from transformer_embed._src.functional.token_positions import (
    TokenPositions,
    arrays_of,
    check_token_positions,
)

Window = tuple[int | None, int | None]
# The arrays of a TokenPositions by their names, those that are not None.
Tokens = dict[str, Array]


@pytree("causal", "window", "chunk")
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMask:
    """Who may attend to whom in an attention layer, as a rule of size O(length).

    A query at position q may attend to a key at position k where

        (k <= q if causal, and q - left <= k <= q + right, and q // chunk == k // chunk,
         or both are in the same block)
        and both have the same segment id, and the key is a token, not padding

    and terms whose arguments are not given are left out. The class is a pytree, so it passes
    through `jit`, `vmap` and `scan`, can be sharded over the batch and serialised by `jax.export`.

    Args:
        queries: the tokens that attend. If they have no segment ids, they see the tokens of every
            segment.
        keys: the tokens that are attended to, such as a cache or another sequence. None: the
            queries themselves (self-attention).
        causal: True: keys after the query are hidden (a decoder, GPT). False: a query sees keys on
            both sides (an encoder, BERT). There is no default.
        window: (left, right), how many positions before and after its own a query sees, at least 0;
            None: no limit, so `query - left <= key <= query + right`. A causal window of w tokens
            that includes the query's own, as in transformers, is (w - 1, 0); tensor2tensor and
            axlearn do not count it: (w, 0).
        chunk: length of a chunk, at least 1: a query sees only the keys of its own chunk, positions
            0..chunk-1, chunk..2*chunk-1, ... (Llama 4). Positions from `TokenPositions.from_ids`
            count chunks from the first token that is not padding, as transformers does.

    Raises:
        TypeError: queries or keys are not TokenPositions, causal is not a Python bool, or a window
            or chunk is not a Python int.
        ValueError: queries and keys have different numbers of rows, only one of them has block ids,
            only the queries have segment ids, or a window or chunk is out of range.

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
    window: Window | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.keys is self.queries:
            arguments.set_fields(self, keys=None)
        check_token_positions("queries", self.queries)
        if self.keys is not None:
            check_token_positions("keys", self.keys)
            _check_sides(*self._sides())
        arguments.set_fields(self, causal=arguments.flag("causal", self.causal))
        if self.window is not None:
            arguments.set_fields(self, window=_checked_window(self.window))
        if self.chunk is not None:
            arguments.set_fields(self, chunk=arguments.size("chunk", self.chunk))

    def dense(self) -> Bool[Array, "b 1 t s"]:
        """The mask as an array, in the smallest shape that broadcasts.

        Returns:
            bool [B or 1, 1, T or 1, S], True = may attend, for logits [B, heads, T, S]: the batch
            axis is 1 if all rows have the same mask, the query axis is 1 if all queries have the
            same mask. A row may be all False: see `mask_to_bias`. A mask does not protect against
            keys or values that are NaN or infinite, because 0 times them is NaN.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_offset(0, 3)
            >>> te.AttentionMask(tokens, causal=True, window=(1, 0)).dense()[0, 0].tolist()
            [[True, False, False], [True, True, False], [False, True, True]]
        """
        return _dense(*self._sides(), self.causal, self.window, self.chunk)

    def _sides(self) -> tuple[Tokens, Tokens]:
        """Queries and keys as arrays [B or 1, length]."""
        queries = _rows(self.queries)
        return queries, queries if self.keys is None else _rows(self.keys)


def may_attend(
    queries: Tokens, keys: Tokens, causal: bool, window: Window | None, chunk: int | None
) -> Bool[Array, "..."]:
    """Which queries may attend to which keys, for arrays that broadcast against each other, in the
    smallest shape.

    This is the only place that states the rule. It is jnp on its arguments alone, so that a Pallas
    kernel can call it on what it has loaded.
    """
    query_positions, key_positions = _pair(queries, keys, "positions")
    left, right = window or (None, None)
    allowed = [key_positions <= query_positions] if causal else []
    if right is not None:
        allowed.append(_is_within(key_positions, query_positions, right))
    if left is not None:
        allowed.append(_is_within(query_positions, key_positions, left))
    if chunk is not None:
        allowed.append(query_positions // chunk == key_positions // chunk)
    if "block_ids" in queries and allowed:
        query_blocks, key_blocks = _pair(queries, keys, "block_ids")
        in_block = (query_blocks == key_blocks) & (query_blocks >= 0)
        allowed = [functools.reduce(jnp.logical_and, allowed) | in_block]
    if "segment_ids" in queries:
        query_segments, key_segments = _pair(queries, keys, "segment_ids")
        allowed.append(query_segments == key_segments)
    if "segment_ids" in keys:
        allowed.append(keys["segment_ids"] != 0)
    if not allowed:
        return jnp.ones((1,) * (key_positions.ndim - 1) + key_positions.shape[-1:], bool)
    return functools.reduce(jnp.logical_and, allowed)


def _check_sides(queries: Tokens, keys: Tokens) -> None:
    """Raises a ValueError unless one can attend to the other."""
    for side, arrays, other, others in (
        ("keys", keys, "queries", queries),
        ("queries", queries, "keys", keys),
    ):
        # Without segment ids, queries see the keys of every segment.
        needed = others.keys() - arrays.keys() - ({"segment_ids"} if side == "queries" else set())
        for name in needed:
            want = f"an array, since {other}.{name} is given"
            raise arguments.value_error(f"{side}.{name}", want, "None")
    arrays = {f"queries.{name}": array for name, array in queries.items()}
    arguments.check_numbers_of_rows(
        arrays | {f"keys.{name}": array for name, array in keys.items()}
    )


def _checked_window(window: Window) -> Window:
    if not isinstance(window, tuple) or len(window) != 2:
        want = "a tuple (left, right), None for no limit"
        raise arguments.type_error("window", want, repr(window))
    left, right = (
        None if side is None else arguments.integer(f"window[{n}]", side, at_least=0)
        for n, side in enumerate(window)
    )
    return left, right


def _rows(tokens: TokenPositions) -> Tokens:
    """The arrays of tokens as [B or 1, length]; inside vmap they may be [length]."""
    return {name: arguments.rows(name, array) for name, array in arrays_of(tokens).items()}


def _pair(
    queries: Tokens, keys: Tokens, name: str
) -> tuple[Integer[Array, "..."], Integer[Array, "..."]]:
    """The arrays of both sides, in the wider of their dtypes."""
    dtype = max(queries[name].dtype, keys[name].dtype, key=lambda dtype: dtype.itemsize)
    return queries[name].astype(dtype), keys[name].astype(dtype)


def _is_within(
    first: Integer[Array, "..."], second: Integer[Array, "..."], distance: int
) -> Bool[Array, "..."]:
    """`first - second <= distance`. The difference may not fit the dtype, but it fits the unsigned
    one if it is not negative."""
    if distance == 0:
        return first <= second
    unsigned = jnp.uint64 if first.dtype == jnp.int64 else jnp.uint32
    difference = first.astype(unsigned) - second.astype(unsigned)
    return (first <= second) | (
        difference <= jnp.array(min(distance, jnp.iinfo(unsigned).max), unsigned)
    )


# Compiled even if the caller is not.
@compiled(2, 3, 4)
def _dense(
    queries: Tokens, keys: Tokens, causal: bool, window: Window | None, chunk: int | None
) -> Bool[Array, "b 1 t s"]:
    return may_attend(
        {name: array[:, None, :, None] for name, array in queries.items()},
        {name: array[:, None, None, :] for name, array in keys.items()},
        causal,
        window,
        chunk,
    )
