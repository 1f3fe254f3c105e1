"""The rule of a mask for splash attention on TPUs, with kernels that skip tiles without a pair."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int8, Integer

from transformer_embed._src import arguments
from transformer_embed._src.attention.attention_mask import AttentionMask, reach, sides
from transformer_embed._src.attention.attention_rule import Window
from transformer_embed._src.attention.row_indices import (
    EVERYTHING,
    check_absent,
    check_promise,
    for_rows,
    number_of_rows,
    reach_in_rows,
    refusal,
    segment_ids,
)
from transformer_embed._src.compiled import compiled
from transformer_embed._src.sequences.token_positions import TokenPositions

KERNEL = "splash attention"
# Of one core, from v4 to v6e.
SCALAR_MEMORY = 2**20


def splash_attention(
    mask: AttentionMask,
    num_heads: int,
    *,
    order: str | None = None,
    batch_size: int | None = None,
    query_start: int | None = None,
) -> tuple[Any, Any]:
    """The mask and the segment ids of splash attention on TPUs.

    The kernel takes one row, [heads, T, head_dim], with T a multiple of its block sizes (128 by
    default). It takes no bias, and does not scale queries: multiply them by head_dim**-0.5. It
    keeps some numbers of each tile in a TPU's scalar memory of 1 MB, so long rows need large tiles:
    524,288 tokens without a window need tiles of 1024.

    Args:
        mask: the mask. Block ids must be known while tracing and the same in all rows, without a
            chunk. A causal mask or a window is of self-attention, or needs query_start.
        num_heads: number of query heads.
        order: how the tokens of each row lie; see `te.kernels`. None, if the mask has neither a
            causal mask nor a window.
        batch_size: pass the number of rows of the batch, B, if the mask was made for one row that
            stands for all. None: the mask has B rows.
        query_start: the index, among the keys, of the first query, if the queries are a part of the
            keys: the new tokens of a chunked prefill, for example. A Python int. None: the keys are
            another sequence, or the queries themselves.

    Returns:
        The `MultiHeadMask` [num_heads, T, S] for `make_splash_mha` or `make_splash_mqa`, which is
        never made dense, and the `SegmentIds` int32 [B, T] and [B, S] for a `jax.vmap` of the
        kernel over the rows of the batch; None if there is only one segment.

        A query that sees no key gets an average of the values, and the kernel makes the gradients
        of that average S times too large. Drop these outputs, those of an empty source by
        `jnp.where(keys.padding_mask.any(-1)[:, None, None, None], outputs, 0)`. A query whose
        segment has no keys is such a query too.

    Raises:
        TypeError: mask is not an AttentionMask; num_heads, batch_size or query_start is not a
            Python int.
        ValueError: splash attention cannot express a part of the mask; the tokens are not traced
            and lie in another order, or are not those of the keys from query_start on.

    Example:
        >>> import transformer_embed as te
        >>> tokens = te.TokenPositions.from_segment_ids([[1] * 100 + [2] * 28])
        >>> rule = te.AttentionMask(tokens, causal=True, window=(63, 0))
        >>> mask, segment_ids = te.kernels.splash_attention(rule, num_heads=2, order="packed")
        >>> mask.shape, segment_ids.q.shape
        ((2, 128, 128), (1, 128))

    Source:
        https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention
    """
    # Imported when they are used: Pallas takes longer to import than this package.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    num_heads = arguments.size("num_heads", num_heads)
    query_start = _checked_query_start(mask, query_start)
    check_promise(mask, order, query_start)
    rows, ids = number_of_rows(mask, batch_size), segment_ids(mask, order)
    limits = reach_in_rows(mask, KERNEL, order, query_start)
    heads = splash.MultiHeadMask([_static_mask(mask, limits, query_start or 0)] * num_heads)
    if ids is not None:
        ids = splash.SegmentIds(*(for_rows(rows, of_side) for of_side in ids))
    return heads, ids


def splash_kernels(
    mask: AttentionMask,
    num_heads: int,
    *,
    order: str | None = None,
    batch_size: int | None = None,
    query_start: int | None = None,
    is_mqa: bool = False,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    **options: Any,
) -> tuple[Any, Any]:
    """A splash kernel for each row of the batch, which skips the tiles of other documents.

    The kernel of `splash_attention` computes every tile that the causal mask or the window reaches,
    in all rows alike, and hides other documents inside. These kernels do not run a tile in which
    their row allows no pair.

    Args:
        mask: as for `splash_attention`.
        num_heads: number of query heads.
        order: as for `splash_attention`.
        batch_size: as for `splash_attention`.
        query_start: as for `splash_attention`.
        is_mqa: False: `make_splash_mha`; True: `make_splash_mqa`.
        head_shards: number of devices that the heads are split over.
        q_seq_shards: number of devices that the queries are split over (context parallelism).
        **options: for that function, `block_sizes` for example.

    Returns:
        The kernels as one pytree whose arrays have a leading axis for the batch, and the segment
        ids: call them in a `jax.vmap` over both. `splash_attention` says what a query that sees no
        key gets. On a mesh, the specs of the kernels for `jax.shard_map` are those of one row with
        an axis for the batch in front:

            row = jax.tree.map(lambda array: array[0], kernels)
            specs = row.manual_sharding_spec(NamedSharding(mesh, PartitionSpec("heads", "length")))
            specs = jax.tree.map(lambda spec: PartitionSpec("batch", *spec), specs)

    Raises:
        TypeError: as `splash_attention`; a number of shards is not a Python int.
        ValueError: as `splash_attention`; a size of a tile does not divide the length, or the tiles
            are too many for the scalar memory.
        RuntimeError: this version of jax describes the tiles of its kernels in another way than
            those from 0.9 to 0.12.

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> tokens = te.TokenPositions.from_segment_ids([[1] * 128 + [2] * 128])
        >>> mask = te.AttentionMask(tokens, causal=True)
        >>> options = {"order": "packed", "interpret": True}
        >>> kernels, segment_ids = te.kernels.splash_kernels(mask, 1, **options)
        >>> attend = jax.vmap(lambda kernel, *rows: kernel(*rows[:3], segment_ids=rows[3]))
        >>> heads = jax.random.normal(jax.random.key(0), [1, 1, 256, 128])  # batch, heads, ..
        >>> attend(kernels, heads, heads, heads, segment_ids).shape
        (1, 1, 256, 128)

    Source:
        Levanter skips tiles of other documents in the same kernel,
        https://github.com/marin-community/marin/pull/6330.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    promises = {"order": order, "batch_size": batch_size, "query_start": query_start}
    heads, ids = splash_attention(mask, num_heads, **promises)
    rows, shards = number_of_rows(mask, batch_size), arguments.size("q_seq_shards", q_seq_shards)
    by_row = _ByRow(mask, rows, shards, query_start or 0, bool(options.get("interpret")))
    make = splash.make_splash_mqa if is_mqa else splash.make_splash_mha
    counts = {"head_shards": arguments.size("head_shards", head_shards), "q_seq_shards": shards}
    sizes: Any = options.get("block_sizes") or splash.BlockSizes.get_default()
    by_row.check_number_of_tiles((sizes.block_q, sizes.block_kv))
    # Under jit too, these arrays are known.
    with jax.ensure_compile_time_eval():
        kernel = make(heads, **counts, **options)
    # jax has no public name for the class of its kernels. They show the arrays by which they skip
    # tiles, for the forward pass and for the gradients of queries and of keys; if one kernel
    # computes both, there is none for queries alone.
    kernels = type(kernel)(
        by_row.infos(kernel.fwd_mask_info, (sizes.block_q, sizes.block_kv)),
        by_row.infos(kernel.dq_mask_info, (sizes.block_q_dq, sizes.block_kv_dq)),
        by_row.infos(kernel.dkv_mask_info, (sizes.block_q_dkv, sizes.block_kv_dkv), by_keys=True),
        **kernel.kwargs,
    )
    return kernels, ids


class _ByRow(NamedTuple):
    """Describes the tiles that the kernel of each row runs."""

    mask: AttentionMask
    rows: int
    shards: int
    query_start: int
    is_interpreted: bool

    def band(self, tile: tuple[int, int]) -> Bool[np.ndarray, "m n"]:
        """Which tiles of row indices have a pair that the causal mask and the window allow."""
        shape = self.mask.lengths
        queries, keys = (np.arange(0, *sizes) for sizes in zip(shape, tile, strict=True))
        queries = queries[:, None] + self.query_start
        nearest, furthest = keys - (queries + tile[0] - 1), keys + tile[1] - 1 - queries
        left, right = (np.inf if side is None else side for side in reach(self.mask))
        return (nearest <= right) & (furthest >= -left)

    def check_number_of_tiles(self, tile: tuple[int, int]) -> None:
        """Raises before minutes are spent on describing tiles, of which each takes two bytes."""
        band = self.band(tile)
        self.check_scalar_memory(2 * len(band) * int(band.sum(axis=1).max(initial=0)))

    def check_scalar_memory(self, used: int) -> None:
        """Raises a ValueError if a TPU cannot hold the numbers of the tiles."""
        # The interpreter has no such memory.
        if used > SCALAR_MEMORY and not self.is_interpreted:
            want = f"tiles whose numbers fit into a TPU's scalar memory, {SCALAR_MEMORY} bytes"
            raise arguments.value_error("block_sizes", want, f"{used} bytes (take larger tiles)")

    def infos(self, info: Any, tile: tuple[int, int], by_keys: bool = False) -> Any:
        """The arrays by which the kernel of each row skips tiles, from those for all rows."""
        # Without tiles for gradients, there is nothing to skip for them.
        if info is None:
            return None
        self.check_scalar_memory(sum(array.nbytes for array in jax.tree.leaves(info[:3])))
        has_blocks = self.mask.queries.block_ids is not None
        _check_meaning(info, self.band(tile), has_blocks, self.shards, by_keys)
        may_run = _may_run(self.mask.tile_kinds(tile), tile, self.query_start)
        loads, runs = _steps(info.data_next, info.block_mask, may_run, self.shards, by_keys)
        batch = jax.tree.map(lambda array: for_rows(self.rows, array[None]), info)
        skipping = {"data_next": loads, "block_mask": runs}
        return batch._replace(**{name: for_rows(self.rows, skipping[name]) for name in skipping})


def _checked_query_start(mask: AttentionMask, query_start: int | None) -> int | None:
    if query_start is None:
        return None
    if mask.keys is None:
        arguments.check_left_out("query_start", query_start, "the mask is self-attention")
    queries, keys = mask.lengths
    return arguments.integer("query_start", query_start, at_least=0, at_most=keys - queries)


def _static_mask(mask: AttentionMask, limits: Window, query_start: int) -> Any:
    """The mask of row indices, which is the same for all rows of the batch."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    from transformer_embed._src.attention import splash_mask  # noqa: PLC0415

    has_blocks = mask.queries.block_ids is not None
    if has_blocks:
        check_absent(f"{KERNEL} with block ids", chunk=mask.chunk)
    if limits == EVERYTHING:
        return splash.FullMask(mask.lengths)
    of_indices = splash_mask.IndexMask(mask.lengths, limits, query_start)
    if not has_blocks:
        return of_indices
    return of_indices | splash_mask.BlockMask(*map(_static_block_ids, sides(mask)))


def _static_block_ids(tokens: TokenPositions) -> bytes:
    ids = tokens.block_ids
    rows = None if arguments.is_traced(ids) else np.atleast_2d(np.asarray(ids, np.int64))
    if rows is None or (rows != rows[0]).any():
        want = f"values known while tracing, the same in every row, for {KERNEL}"
        raise refusal("block_ids", want, "others")
    return rows[0].tobytes()


def _check_meaning(
    info: Any, band: Bool[np.ndarray, "m n"], has_blocks: bool, shards: int, by_keys: bool
) -> None:
    """Raises a RuntimeError unless the arrays of a kernel name the tiles of its mask as we expect.

    They are not a public interface of jax, and `_steps` rewrites them.
    """
    try:
        is_known = _names_tiles(info, band, has_blocks, shards, by_keys)
    except (IndexError, TypeError, ValueError):
        is_known = False
    if not is_known:
        want = "the tiles of its mask, as from jax 0.9 to 0.12"
        got = f"others in jax {jax.__version__}; use te.kernels.splash_attention"
        raise RuntimeError(arguments.wanted("splash_kernels", want, got))


def _names_tiles(
    info: Any, band: Bool[np.ndarray, "m n"], has_blocks: bool, shards: int, by_keys: bool
) -> bool:
    """Whether the arrays of a kernel run the tiles of the band; blocks let more tiles run."""
    tiles, runs = np.asarray(info.data_next), np.asarray(info.block_mask) > 0
    heads, rows, columns = np.nonzero(runs)
    loaded = tiles[heads, rows, columns].astype(int)
    if by_keys:
        rows = loaded + _shard_starts(runs.shape[1], band.shape[0], shards)[rows]
    else:
        columns = loaded
    ran = np.zeros((len(runs), *band.shape), bool)
    ran[heads, rows, columns] = True
    differs = band & ~ran if has_blocks else band ^ ran
    # A tile that runs twice is marked once.
    return bool(not differs.any() and ran.sum() == len(heads))


def _shard_starts(steps: int, tiles: int, shards: int) -> np.ndarray:
    """For each step over the queries, the first tile of its shard."""
    return np.arange(steps) // (steps // shards) * (tiles // shards)


# The functions below are compiled even if the caller is not.


@compiled(1, 2)
def _may_run(
    kinds: Int8[Array, "b q k"], tile: tuple[int, int], query_start: int
) -> Bool[Array, "b 1 q k"]:
    """The tiles of each row that have a pair.

    Where all queries of a row of tiles are padding, no tile has one. The tile on the diagonal runs
    there, since a softmax over no keys at all would make the outputs NaN.
    """
    queries, keys = kinds.shape[1:]
    diagonal = (query_start + np.arange(queries) * tile[0]) // tile[1]
    # There may be more queries than keys.
    is_diagonal = np.arange(keys) == np.minimum(diagonal, keys - 1)[:, None]
    is_empty = jnp.all(kinds == 0, axis=2, keepdims=True)
    return ((kinds != 0) | (is_empty & is_diagonal))[:, None]


@compiled(3, 4)
def _steps(
    data_next: Integer[Array, "h i j"],
    block_mask: Integer[Array, "h i j"],
    may_run: Bool[Array, "b 1 q k"],
    shards: int,
    by_keys: bool,
) -> tuple[Integer[Array, "b h i j"], Integer[Array, "b h i j"]]:
    """The tile that each step of the kernel's grid loads, and whether it runs it, for each row.

    Args:
        data_next: index of the tile of keys that step j loads for tile i of queries; if by_keys, of
            the tile of queries that step i loads for tile j of keys, counted from the first one of
            its shard.
        block_mask: 0 for steps that the kernel does not run for any row.
        may_run: whether a tile has a pair.
        shards: number of shards of the queries.
        by_keys: whether the grid is that of the gradients of keys.
    """
    tiles = data_next[None].astype(jnp.int32)
    if by_keys:
        starts = _shard_starts(data_next.shape[1], may_run.shape[2], shards)
        tiles += starts.astype(np.int32)[None, None, :, None]
        may_run, tiles, data_next, block_mask = (
            array.mT for array in (may_run, tiles, data_next, block_mask)
        )
    # The last axis is that of the steps.
    runs = jnp.where(jnp.take_along_axis(may_run, tiles, axis=3), block_mask, 0)
    # A step that runs nothing loads what the next one runs, so that nothing is loaded for it alone.
    is_running = runs.reshape(*runs.shape[:2], -1) > 0
    steps = jnp.arange(is_running.shape[2], dtype=jnp.int32)
    following = jax.lax.cummin(jnp.where(is_running, steps, steps[-1]), axis=2, reverse=True)
    loads = jnp.broadcast_to(data_next, runs.shape).reshape(is_running.shape)
    loads = jnp.take_along_axis(loads, following, axis=2).reshape(runs.shape)
    return (loads.mT, runs.mT) if by_keys else (loads, runs)
