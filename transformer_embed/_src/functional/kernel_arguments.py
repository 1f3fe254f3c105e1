"""The rule of a mask in the arguments of fused attention kernels, or an error that says why not.

The kernels know row indices and segment ids, but no positions. `_reach_in_rows` and `_segment_ids`
are the translation that all of them share; each method adds what its kernel cannot say.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int8, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.functional.attention_mask import AttentionMask, lengths, reach, sides
from transformer_embed._src.functional.attention_rule import Window, fields
from transformer_embed._src.functional.compiled import compiled
from transformer_embed._src.functional.tile_kinds import in_row
from transformer_embed._src.functional.token_positions import TokenPositions

WAY_OUT = "; rule.dense() and rule.tile() can express it"
# What a query reaches without a window, with and without a causal mask.
CAUSAL, EVERYTHING = (None, 0), (None, None)


@dataclasses.dataclass(frozen=True, eq=False)
class KernelArguments:
    """The arguments with which fused attention kernels apply a rule, without a mask [T, S].

    Each kernel takes flags, lengths or segment ids of its own, and compares row indices instead of
    positions. A method returns the arguments of one kernel that mean exactly the rule, or raises a
    ValueError that names the part which the kernel cannot express. Outputs of queries at padding
    are finite, and differ from kernel to kernel. A bias such as ALiBi's is not part of the rule.

    Args:
        rule: the rule. A causal mask, a window or a chunk needs self-attention of tokens from a
            constructor of TokenPositions. With a window, do not use `from_ids`, which allows
            padding between tokens.
        batch_size: B of the queries, to repeat what a rule with one row for all rows says; `mha`
            needs it. None: the rule's number of rows.

    Raises:
        TypeError: rule is not an AttentionMask, or batch_size is not a Python int.
        ValueError: batch_size is less than 1, or the rule has another number of rows.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> tokens = te.TokenPositions.from_lengths([3, 2], 4)
        >>> rule = te.AttentionMask(tokens, causal=True, window=(1, 0))
        >>> options = te.KernelArguments(rule).dot_product_attention()
        >>> options["is_causal"], options["local_window_size"]
        (True, (1, 0))
        >>> options["key_value_seq_lengths"].tolist()
        [3, 2]
        >>> heads = jax.random.normal(jax.random.key(0), [2, 4, 1, 8])
        >>> jax.nn.dot_product_attention(heads, heads, heads, **options).shape
        (2, 4, 1, 8)

    Source:
        Dao et al., "FlashAttention" (2022), section 3.1, https://arxiv.org/abs/2205.14135, on
        attention that holds one tile at a time.
    """

    rule: AttentionMask
    batch_size: int | None = None

    def __post_init__(self) -> None:
        arguments.instance("rule", self.rule, AttentionMask, "a te.AttentionMask")
        arguments.convert_fields(self, batch_size=arguments.size)
        if self.batch_size is not None and self._rows not in (1, self.batch_size):
            want = f"the rule's {self._rows} rows"
            raise arguments.value_error("batch_size", want, self.batch_size)

    def dot_product_attention(self) -> dict[str, Any]:
        """Of `jax.nn.dot_product_attention`, as cuDNN takes them with `implementation="cudnn"`.

        The rule may be self-attention of tokens without padding or padded on the right; attention
        to another sequence that is padded on the right; or one query a row, as in decoding, to a
        cache that is filled from the left. cuDNN itself refuses a window that reaches to the right.

        Returns:
            `is_causal`, and where they are needed `local_window_size`, `query_seq_lengths` and
            `key_value_seq_lengths` (int32 [B]). With lengths, outputs of queries at padding are 0.

        Raises:
            ValueError: packed sequences, padding on the left, a chunk, block ids, or another part
                that these arguments cannot express.
        """
        kernel = "jax.nn.dot_product_attention"
        rule, (queries, keys) = self.rule, sides(self.rule)
        _check_absent(kernel, block_ids=queries.block_ids, chunk=rule.chunk)
        for side, tokens in (("queries", queries), ("keys", keys)):
            if tokens.segment_ids is not None and tokens.arrangement not in ("right", "offset"):
                want = (
                    f"no padding, or all of it on the right, for {kernel}: tokens from"
                    " TokenPositions.from_lengths or from_offset"
                )
                raise _refusal(side, want, f"the arrangement {tokens.arrangement!r}")
        if rule.keys is not None and lengths(rule)[0] == 1:
            return self._of_one_query()
        left, right = _reach_in_rows(rule, kernel)
        is_causal = right == 0
        options: dict[str, Any] = {"is_causal": is_causal}
        has_window = (left, right) not in (CAUSAL, EVERYTHING)
        if has_window:
            # A side without a limit gets the length, which no distance reaches. cuDNN refuses a
            # window to the right, which is 0 in a causal one.
            length = max(lengths(rule))
            options["local_window_size"] = tuple(
                length if side is None else side for side in (left, right)
            )
        is_padded = "right" in (queries.arrangement, keys.arrangement)
        # jax 0.6.1 forgets a window that comes with neither a causal mask nor lengths.
        if is_padded or (has_window and not is_causal):
            for side, tokens in (("query", queries), ("key_value", keys)):
                counts = tokens.padding_mask.sum(axis=-1, dtype=jnp.int32)
                options[f"{side}_seq_lengths"] = self._for_rows(counts)
        return options

    def _of_one_query(self) -> dict[str, Any]:
        """The arguments for a query that sees a number of keys, counted from the left.

        The keys lie in the order of their positions, and the query sees those up to some position.
        """
        kernel = "a single query in jax.nn.dot_product_attention"
        left, right = reach(self.rule)
        if left is not None:
            raise _refusal("window", f"no limit on the left for {kernel}", self.rule.window)
        if right is not None and sides(self.rule)[1].arrangement == "any":
            raise _unknown_order("keys", "a causal mask or a window", kernel, "any")
        counts = self.rule.dense()[:, 0, 0].sum(axis=-1, dtype=jnp.int32)
        return {"is_causal": False, "key_value_seq_lengths": self._for_rows(counts)}

    def splash_attention(self, num_heads: int) -> tuple[Any, Any]:
        """The mask and the segment ids of splash attention on TPUs.

        The rule may be any but a causal one, a window or a chunk between two sequences. Block ids
        must be known while tracing and the same in all rows, without a chunk. The kernel takes one
        row, [heads, T, head_dim], with T a multiple of its block sizes (128 by default). It takes
        no bias, and does not scale queries: multiply them by head_dim**-0.5.

        Args:
            num_heads: number of query heads.

        Returns:
            The `MultiHeadMask` [num_heads, T, S] for `make_splash_mha` or `make_splash_mqa`, which
            is never made dense, and the `SegmentIds` int32 [B, T] and [B, S] for a `jax.vmap` of
            the kernel over the rows of the batch; None if there is only one segment.

        Raises:
            TypeError: num_heads is not a Python int.
            ValueError: splash attention cannot express a part of the rule.

        Example:
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_segment_ids([[1] * 100 + [2] * 28])
            >>> rule = te.AttentionMask(tokens, causal=True, window=(63, 0))
            >>> mask, segment_ids = te.KernelArguments(rule).splash_attention(num_heads=2)
            >>> mask.shape, segment_ids.q.shape
            ((2, 128, 128), (1, 128))
        """
        # Imported when they are used: Pallas takes longer to import than this package.
        from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

        from transformer_embed._src.functional import splash_mask  # noqa: PLC0415

        rule, kernel = self.rule, "splash attention"
        shape, limits = lengths(rule), _reach_in_rows(rule, kernel)
        has_blocks = rule.queries.block_ids is not None
        if has_blocks:
            _check_absent(f"{kernel} with block ids", chunk=rule.chunk)
        mask = splash.FullMask(shape)
        if limits != EVERYTHING:
            mask = splash_mask.IndexMask(shape, limits, 0)
            if has_blocks:
                mask = mask | splash_mask.BlockMask(_static_block_ids(rule.queries, kernel))
        heads = splash.MultiHeadMask([mask] * arguments.size("num_heads", num_heads))
        return heads, self._segment_ids(splash.SegmentIds)

    def splash_kernels(
        self, num_heads: int, *, is_mqa: bool = False, **options: Any
    ) -> tuple[Any, Any]:
        """A splash kernel for each row of the batch, which skips the tiles of other documents.

        The kernel of `splash_attention` computes every tile that the causal mask or the window
        reaches, in all rows alike, and hides other documents inside. These kernels do not run a
        tile in which their row allows no pair. Inside `jax.shard_map`, make them of the rows and
        heads of the device.

        Args:
            num_heads: number of query heads.
            is_mqa: False: `make_splash_mha`; True: `make_splash_mqa`.
            **options: for that function, `block_sizes` for example; without `head_shards` and
                `q_seq_shards`, which are 1.

        Returns:
            The kernels as one pytree whose arrays have a leading axis for the batch, and the
            segment ids: call them in a `jax.vmap` over both.

        Raises:
            TypeError: num_heads is not a Python int.
            ValueError: splash attention cannot express a part of the rule, or a size of a tile does
                not divide the length.

        Example:
            >>> import jax
            >>> import transformer_embed as te
            >>> tokens = te.TokenPositions.from_segment_ids([[1] * 128 + [2] * 128])
            >>> arguments = te.KernelArguments(te.AttentionMask(tokens, causal=True))
            >>> kernels, segment_ids = arguments.splash_kernels(1, interpret=True)
            >>> attend = jax.vmap(lambda kernel, *rows: kernel(*rows[:3], segment_ids=rows[3]))
            >>> heads = jax.random.normal(jax.random.key(0), [1, 1, 256, 128])  # batch, heads, ..
            >>> attend(kernels, heads, heads, heads, segment_ids).shape
            (1, 1, 256, 128)

        Source:
            Levanter skips tiles of other documents in the same kernel,
            https://github.com/marin-community/marin/pull/6330.
        """
        from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

        mask, segment_ids = self.splash_attention(num_heads)
        make = splash.make_splash_mqa if is_mqa else splash.make_splash_mha
        kernel = make(mask, head_shards=1, q_seq_shards=1, **options)
        sizes = kernel.kwargs["block_sizes"]

        def by_row(info: Any, tile: tuple[int, int], by_keys: bool = False) -> Any:
            kinds = self.rule.tile_kinds(tile)
            loads, runs = _steps(info.data_next, info.block_mask, kinds, by_keys)
            rows = jax.tree.map(lambda array: array[None], info)
            rows = rows._replace(data_next=loads, block_mask=runs)
            return jax.tree.map(self._for_rows, rows)

        dq = kernel.dq_mask_info
        # jax has no public name for the class of its kernels. They show the arrays by which they
        # skip tiles, for the forward pass and for the gradients of queries and of keys; if one
        # kernel computes both, there is none for queries alone.
        kernels = type(kernel)(
            by_row(kernel.fwd_mask_info, (sizes.block_q, sizes.block_kv)),
            None if dq is None else by_row(dq, (sizes.block_q_dq, sizes.block_kv_dq)),
            by_row(kernel.dkv_mask_info, (sizes.block_q_dkv, sizes.block_kv_dkv), by_keys=True),
            **kernel.kwargs,
        )
        return kernels, segment_ids

    def flash_attention(self) -> dict[str, Any]:
        """Of Pallas' `flash_attention` on TPUs: as for splash, without a window or block ids.

        Returns:
            `causal`, and `segment_ids`: `SegmentIds` int32 [B, T] and [B, S], or None.

        Raises:
            ValueError: a window, block ids, or another part that the kernel cannot express.
        """
        from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds  # noqa: PLC0415

        return self._without_windows("flash_attention", SegmentIds)

    def mha(self) -> dict[str, Any]:
        """Of Pallas' `mha` on GPUs: self-attention, with neither a window nor block ids.

        Returns:
            `causal`, and `segment_ids`: int32 [B, T], or None.

        Raises:
            ValueError: a part that the kernel cannot express, or batch_size is None: the kernel
                would read beyond the end of segment ids that have one row for all.
        """
        kernel = "Pallas' mha"
        if self.batch_size is None:
            want = f"the number of rows of the queries, for {kernel}"
            raise arguments.value_error("batch_size", want, None)
        if self.rule.keys is not None:
            raise _refusal("keys", f"None (self-attention) for {kernel}", "another sequence")
        return self._without_windows(kernel, lambda queries, _: queries)

    def _without_windows(self, kernel: str, make: Callable[[Array, Array], Any]) -> dict[str, Any]:
        """The arguments of a kernel that can say neither a window nor blocks."""
        limits = _reach_in_rows(self.rule, kernel)
        window = None if limits in (CAUSAL, EVERYTHING) else self.rule.window
        _check_absent(kernel, window=window, block_ids=self.rule.queries.block_ids)
        return {"causal": limits == CAUSAL, "segment_ids": self._segment_ids(make)}

    def _segment_ids(self, make: Callable[[Array, Array], Any]) -> Any:
        """Ids that are equal for one segment and chunk, as `make` takes those of queries and keys.

        None if all of them are equal.
        """
        rule, (queries, keys) = self.rule, sides(self.rule)
        if rule.chunk is not None:
            chunks = _segments_of_chunks(queries, rule.chunk)
            ids = [chunks, chunks]
        elif keys.segment_ids is None or queries.arrangement == keys.arrangement == "offset":
            return None
        elif queries.segment_ids is None:
            # Without segments of their own, queries see the tokens of every segment.
            ids = [side.padding_mask.astype(jnp.int32) for side in (queries, keys)]
        else:
            ids = [queries.segment_ids, keys.segment_ids]
        return make(*map(self._for_rows, ids))

    def _for_rows(self, array: Array) -> Array:
        """An array of [1 or B, ...] with all rows of the batch."""
        return jnp.broadcast_to(array, (self.batch_size or self._rows, *array.shape[1:]))

    @property
    def _rows(self) -> int:
        return max(arguments.rows("rule", array).shape[0] for array in jax.tree.leaves(self.rule))


def _reach_in_rows(rule: AttentionMask, kernel: str) -> Window:
    """How many tokens before and after its own a query sees, as far as its segment reaches.

    A constructor of TokenPositions lets positions rise along the tokens of a segment, so a causal
    mask may compare row indices instead. It lets them rise by one if no padding is in between, so a
    window may, too. A chunk becomes a segment of its own.
    """
    limits = reach(rule)
    if limits != EVERYTHING or rule.chunk is not None:
        parts = "a causal mask, a window or a chunk"
        if rule.keys is not None:
            want = f"None (self-attention) for {parts} in {kernel}, which compares row indices"
            raise _refusal("keys", want, "another sequence")
        arrangement = rule.queries.arrangement
        has_window = limits not in (CAUSAL, EVERYTHING)
        if arrangement == "any" or (has_window and arrangement == "ordered"):
            raise _unknown_order("queries", parts, kernel, arrangement)
    return limits


def _refusal(name: str, want: str, got: Any) -> ValueError:
    return arguments.value_error(name, want, f"{got}{WAY_OUT}")


def _unknown_order(side: str, limits: str, kernel: str, arrangement: str) -> ValueError:
    want = f"positions that count the tokens of a row, for {limits} in {kernel}"
    constructors = "from_lengths, from_segment_ids or from_offset"
    got = f"the arrangement {arrangement!r}; use TokenPositions.{constructors}"
    return _refusal(side, want, got)


def _check_absent(kernel: str, **parts: Any) -> None:
    """Raises a ValueError for a part that a kernel has no argument for."""
    for name, part in parts.items():
        if part is not None:
            got = part if isinstance(part, int | tuple) else "an array"
            raise _refusal(name, f"None for {kernel}, which has no argument for it", got)


def _static_block_ids(queries: TokenPositions, kernel: str) -> bytes:
    ids = queries.block_ids
    rows = None if arguments.is_traced(ids) else np.atleast_2d(np.asarray(ids, np.int64))
    if rows is None or (rows != rows[0]).any():
        want = f"values known while tracing, the same in every row, for {kernel}"
        raise _refusal("block_ids", want, "others")
    return rows[0].tobytes()


# The functions below are compiled even if the caller is not.


@compiled(1)
def _segments_of_chunks(tokens: TokenPositions, chunk: int) -> Int32[Array, "b t"]:
    """Segment ids that differ where the segment or the chunk does; 0 at padding."""
    # In rows of several segments, a chunk is named by the index of its first token.
    named = in_row(fields(tokens, tokens, chunk), chunk)
    # Odd numbers are never 0. They wrap, but 2**31 chunks do not fit into a row.
    return jnp.where(named["is_token"], 2 * named["chunk"].astype(jnp.int32) + 1, 0)


@compiled(3)
def _steps(
    data_next: Integer[Array, "h i j"],
    block_mask: Integer[Array, "h i j"],
    kinds: Int8[Array, "b q k"],
    by_keys: bool,
) -> tuple[Integer[Array, "b h i j"], Integer[Array, "b h i j"]]:
    """The tile that each step of the kernel's grid loads, and whether it runs it, for each row.

    Args:
        data_next: index of the tile of keys that step j loads for tile i of queries; if by_keys, of
            the tile of queries that step i loads for tile j of keys.
        block_mask: 0 for steps that the kernel does not run for any row.
        kinds: kinds of tiles. Where all queries of a row of tiles are padding, no tile has a pair.
            The tile on the diagonal runs there, since a softmax over no keys at all would make the
            outputs NaN.
        by_keys: whether the grid is that of the gradients of keys.
    """
    queries, keys = kinds.shape[1:]
    is_diagonal = jnp.arange(keys) == (jnp.arange(queries) * keys // queries)[:, None]
    is_empty = jnp.all(kinds == 0, axis=2, keepdims=True)
    may_run = ((kinds != 0) | (is_empty & is_diagonal))[:, None]
    if by_keys:
        may_run, data_next, block_mask = may_run.mT, data_next.mT, block_mask.mT
    # The last axis is that of the steps.
    tiles = data_next[None].astype(jnp.int32)
    runs = jnp.where(jnp.take_along_axis(may_run, tiles, axis=3), block_mask, 0)
    # A step that runs nothing loads what the next one runs, so that nothing is loaded for it alone.
    is_running = runs.reshape(*runs.shape[:2], -1) > 0
    steps = jnp.arange(is_running.shape[2], dtype=jnp.int32)
    following = jax.lax.cummin(jnp.where(is_running, steps, steps[-1]), axis=2, reverse=True)
    loads = jnp.broadcast_to(data_next, runs.shape).reshape(is_running.shape)
    loads = jnp.take_along_axis(loads, following, axis=2).reshape(runs.shape)
    return (loads.mT, runs.mT) if by_keys else (loads, runs)
