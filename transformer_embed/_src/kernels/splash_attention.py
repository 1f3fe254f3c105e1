"""The rule of a mask for splash attention on TPUs, with kernels that skip blocks without a pair."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int8, Int32, Integer

from transformer_embed._src import arguments
from transformer_embed._src.attention.attention_mask import AttentionMask
from transformer_embed._src.compiled import compiled
from transformer_embed._src.kernels.row_indices import EVERYTHING, RowRule, refusal
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
    q_offset: int | None = None,
) -> tuple[Any, Any]:
    """The mask and the segment ids of splash attention on TPUs.

    The kernel takes one row, [heads, T, head_dim], with T a multiple of its block sizes (128 by
    default). It takes no bias, and does not scale queries: multiply them by head_dim**-0.5. It
    keeps some numbers of each block in a TPU's scalar memory of 1 MB, so long rows need large
    blocks: 524,288 tokens without a window need blocks of 1024.

    Args:
        mask: the mask. Block ids must be known while tracing and the same in all rows, without a
            chunk. A causal mask or a window is of self-attention, or needs q_offset.
        num_heads: number of query heads.
        order: how the tokens of each row lie; see `te.kernels`. None, if the mask has neither a
            causal mask nor a window.
        batch_size: pass the number of rows of the batch, B, if the mask was made for one row that
            stands for all. None: the mask has B rows.
        q_offset: the index, among the keys, of the first query, if the queries are a part of the
            keys: the new tokens of a chunked prefill, for example. It is the `offset` of jax's
            splash masks, a Python int. None: the keys are another sequence, or the queries
            themselves.

    Returns:
        The `MultiHeadMask` [num_heads, T, S] for `make_splash_mha` or `make_splash_mqa`, which is
        never made dense, and the `SegmentIds` int32 [B, T] and [B, S] for a `jax.vmap` of the
        kernel over the rows of the batch; None if there is only one segment.

        A query that sees no key gets an average of the values, and the kernel makes the gradients
        of that average S times too large. Drop these outputs, those of an empty source by
        `jnp.where(keys.padding_mask.any(-1)[:, None, None, None], outputs, 0)`. A query whose
        segment has no keys is such a query too.

    Raises:
        TypeError: mask is not an AttentionMask; num_heads, batch_size or q_offset is not a
            Python int.
        ValueError: splash attention cannot express a part of the mask; the tokens are not traced
            and lie in another order, or are not those of the keys from q_offset on.

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
    return _said(RowRule(mask, KERNEL, order, batch_size, q_offset), num_heads)


def splash_kernels(
    mask: AttentionMask,
    num_heads: int,
    *,
    order: str | None = None,
    batch_size: int | None = None,
    q_offset: int | None = None,
    is_mqa: bool = False,
    head_shards: int = 1,
    q_seq_shards: int = 1,
    **options: Any,
) -> tuple[Any, Any]:
    """A splash kernel for each row of the batch, which skips the blocks of other documents.

    The kernel of `splash_attention` computes every block that the causal mask or the window
    reaches, in all rows alike, and hides other documents inside. These kernels do not run a block
    in which their row allows no pair.

    Args:
        mask: as for `splash_attention`.
        num_heads: number of query heads.
        order: as for `splash_attention`.
        batch_size: as for `splash_attention`.
        q_offset: as for `splash_attention`.
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
        TypeError: as `splash_attention`; a number of shards is not a Python int, or is_mqa is not a
            Python bool.
        ValueError: as `splash_attention`; a size of a block does not divide the length, or the
            blocks are too many for the scalar memory.
        RuntimeError: this version of jax describes the blocks of its kernels in another way than
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
        Levanter skips blocks of other documents in the same kernel,
        https://github.com/marin-community/marin/pull/6330.
    """
    # Imported when they are used: Pallas takes longer to import than this package.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    rule = RowRule(mask, KERNEL, order, batch_size, q_offset)
    heads, ids = _said(rule, num_heads)
    shards = arguments.size("q_seq_shards", q_seq_shards)
    is_mqa = arguments.flag("is_mqa", is_mqa)
    make = splash.make_splash_mqa if is_mqa else splash.make_splash_mha
    counts = {"head_shards": arguments.size("head_shards", head_shards), "q_seq_shards": shards}
    sizes: Any = options.get("block_sizes") or splash.BlockSizes.get_default()
    # The interpreter has no such memory.
    memory = np.inf if options.get("interpret") else SCALAR_MEMORY
    # Before minutes are spent on describing blocks, of which each takes two bytes.
    band, _ = _band_and_diagonal(rule, (sizes.block_q, sizes.block_kv))
    _check_memory(2 * len(band) * int(band.sum(axis=1).max(initial=0)), memory)
    # Under jit too, these arrays are known.
    with jax.ensure_compile_time_eval():
        kernel = make(heads, **counts, **options)
    # jax has no public name for the class of its kernels. They show the arrays by which they skip
    # blocks, for the forward pass and for the gradients of queries and of keys; if one kernel
    # computes both, there is none for queries alone.
    grids = (
        (kernel.fwd_mask_info, (sizes.block_q, sizes.block_kv), False),
        (kernel.dq_mask_info, (sizes.block_q_dq, sizes.block_kv_dq), False),
        (kernel.dkv_mask_info, (sizes.block_q_dkv, sizes.block_kv_dkv), True),
    )
    infos = (_skipping(rule, memory, shards, *grid) for grid in grids)
    return type(kernel)(*infos, **kernel.kwargs), ids


def _skipping(
    rule: RowRule, memory: float, shards: int, info: Any, block: tuple[int, int], by_keys: bool
) -> Any:
    """The arrays by which the kernel of each row skips blocks, from those for all rows."""
    # Without blocks for gradients, there is nothing to skip for them.
    if info is None:
        return None
    _check_memory(sum(array.nbytes for array in jax.tree.leaves(info[:3])), memory)

    def turned(array):
        # Step i, j loads a block of keys for block i of queries. In the grid of the gradients of
        # keys, it loads a block of queries for block j of keys: its axes are exchanged.
        return array.swapaxes(-1, -2) if by_keys else array

    band, diagonal = map(turned, _band_and_diagonal(rule, block))
    loads, runs, blocks = _loaded(info, turned, band, shards if by_keys else 1)
    steps = _steps(loads, runs, blocks, turned(rule.mask.block_mask(block)), diagonal)
    loads, runs = (rule.for_rows(turned(array)) for array in steps)
    batch = jax.tree.map(lambda array: rule.for_rows(array[None]), info)
    return batch._replace(data_next=loads, block_mask=runs)


def _check_memory(used: int, memory: float) -> None:
    """Raises a ValueError if a TPU cannot hold the numbers of the blocks."""
    if used > memory:
        want = f"blocks whose numbers fit into a TPU's scalar memory, {memory} bytes"
        raise arguments.value_error("block_sizes", want, f"{used} bytes (take larger blocks)")


def _band_and_diagonal(rule: RowRule, block: tuple[int, int]) -> list[Bool[np.ndarray, "m n"]]:
    """Which blocks have a pair that the causal mask and the window allow, and which always run.

    The blocks on the diagonal run: where all queries of a row of blocks are padding, no block has a
    pair, and a softmax over no keys at all would make the outputs NaN.
    """
    queries, keys = (np.arange(0, *sizes) for sizes in zip(rule.mask.lengths, block, strict=True))
    queries = queries[:, None] + (rule.q_offset or 0)
    # How far the first key is after the first query.
    ahead = keys - queries
    left, right = rule.distances
    band = (ahead - right < block[0]) & (ahead + left > -block[1])
    # There may be more queries than keys.
    return [band, np.minimum(queries, keys[-1]) // block[1] == keys // block[1]]


def _loaded(
    info: Any, turned: Callable, band: Bool[np.ndarray, "r s"], shards: int
) -> tuple[Integer[np.ndarray, "h i j"], ...]:
    """The arrays of the steps, turned, and the block that each loads, from the first of the row.

    A RuntimeError unless the kernel runs the blocks of the band, or more, as for blocks: its arrays
    are not a public interface of jax, and `_steps` rewrites them.
    """
    with contextlib.suppress(IndexError, TypeError, ValueError):
        loads, steps = (turned(np.asarray(array)) for array in (info.data_next, info.block_mask))
        runs = steps > 0
        # They are counted from the first one of the shard of the queries.
        shard = np.arange(loads.shape[2]) // (loads.shape[2] // shards)
        blocks = (loads + shard * (band.shape[1] // shards)).astype(np.int32)
        ran = np.zeros((len(runs), *band.shape), bool)
        ran[*np.nonzero(runs)[:2], blocks[runs]] = True
        # A block that runs twice is marked once.
        if not (band & ~ran).any() and ran.sum() == runs.sum():
            return loads, steps, blocks
    want = "the blocks of its mask, as from jax 0.9 to 0.12"
    got = f"others in jax {jax.__version__}; use te.kernels.splash_attention"
    raise RuntimeError(arguments.wanted("splash_kernels", want, got))


def _said(rule: RowRule, num_heads: int) -> tuple[Any, Any]:
    """The mask of row indices, which is the same for all rows of the batch, and segment ids."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    from transformer_embed._src.kernels import splash_mask  # noqa: PLC0415

    num_heads, mask, ids = arguments.size("num_heads", num_heads), rule.mask, rule.segment_ids()
    if ids is not None:
        ids = splash.SegmentIds(*map(rule.for_rows, ids))
    has_blocks = mask.queries.block_ids is not None
    if has_blocks:
        rule.check_absent(chunk=mask.chunk)
    static = splash.FullMask(mask.lengths)
    if rule.reach != EVERYTHING:
        static = splash_mask.IndexMask(mask.lengths, rule.reach, rule.q_offset or 0)
        if has_blocks:
            static |= splash_mask.SameBlockId(*map(_static_block_ids, mask.sides))
    return splash.MultiHeadMask([static] * num_heads), ids


def _static_block_ids(tokens: TokenPositions) -> bytes:
    ids = tokens.block_ids
    rows = None if arguments.is_traced(ids) else np.atleast_2d(np.asarray(ids, np.int64))
    if rows is None or (rows != rows[0]).any():
        want = f"values known while tracing, the same in every row, for {KERNEL}"
        raise refusal("block_ids", want, "others")
    return rows[0].tobytes()


# Compiled even if the caller is not.
@compiled()
def _steps(
    data_next: Integer[Array, "h i j"],
    block_mask: Integer[Array, "h i j"],
    blocks: Int32[Array, "h i j"],
    kinds: Int8[Array, "b r s"],
    diagonal: Bool[Array, "r s"],
) -> list[Integer[Array, "b h i j"]]:
    """What each step loads and whether it runs, for each row: the blocks that have a pair."""
    may_run = (kinds != 0) | diagonal
    runs = jnp.where(jnp.take_along_axis(may_run[:, None], blocks[None], axis=3), block_mask, 0)
    # A step that runs nothing loads what the next one runs, so that nothing is loaded for it alone.
    is_running = runs.reshape(*runs.shape[:2], -1) > 0
    steps = jnp.arange(is_running.shape[2], dtype=jnp.int32)
    following = jax.lax.cummin(jnp.where(is_running, steps, steps[-1]), axis=2, reverse=True)
    loads = jnp.broadcast_to(data_next, runs.shape).reshape(is_running.shape)
    loads = jnp.take_along_axis(loads, following, axis=2).reshape(runs.shape)
    return [loads, runs]
