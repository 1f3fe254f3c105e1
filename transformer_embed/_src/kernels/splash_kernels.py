"""Splash attention on TPUs by the rule of a mask, with kernels that skip blocks without a pair."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Integer

from transformer_embed._src import arguments
from transformer_embed._src.attention.attention_mask import AttentionMask
from transformer_embed._src.compiled import compiled
from transformer_embed._src.kernels.row_indices import EVERYTHING, RowRule

# Of one core, from v4 to v6e.
SCALAR_MEMORY = 2**20


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
    """A splash attention kernel for each row of the batch, and the segment ids.

    A kernel does not run a block in which its row allows no pair, such as a block of two documents.
    It takes one row, [heads, T, head_dim], with T a multiple of its block sizes (128 by default).
    It takes no bias, and does not scale queries: multiply them by head_dim**-0.5. It keeps some
    numbers of each block in a TPU's scalar memory of 1 MB, so long rows need large blocks: 524,288
    tokens without a window need blocks of 1024.

    Args:
        mask: the mask, without block ids. A causal mask or a window is of self-attention, or needs
            q_offset.
        num_heads: number of query heads.
        order: the layout of the tokens; see `te.kernels`. None, if the mask has neither a
            causal mask nor a window.
        batch_size: pass the number of rows of the batch, B, if the mask was made for one row that
            stands for all. None: the mask has B rows.
        q_offset: the index, among the keys, of the first query, if the queries are a part of the
            keys: the new tokens of a chunked prefill, for example. It is the `offset` of jax's
            splash masks, a Python int. None: the keys are another sequence, or the queries
            themselves.
        is_mqa: False: `make_splash_mha`; True: `make_splash_mqa`.
        head_shards: number of devices that the heads are split over.
        q_seq_shards: number of devices that the queries are split over (context parallelism).
        **options: for that function, `block_sizes` for example.

    Returns:
        The kernels as one pytree whose arrays have a leading axis for the batch, and the
        `SegmentIds` int32 [B, T] and [B, S], or None if there is only one segment: call them in a
        `jax.vmap` over both. On a mesh, the specs of the kernels for `jax.shard_map` are those of
        one row with an axis for the batch in front:

            row = jax.tree.map(lambda array: array[0], kernels)
            specs = row.manual_sharding_spec(NamedSharding(mesh, PartitionSpec("heads", "length")))
            specs = jax.tree.map(lambda spec: PartitionSpec("batch", *spec), specs)

        A query that sees no key gets an average of the values, and the kernel makes the gradients
        of that average S times too large. Drop these outputs, those of an empty source by
        `jnp.where(keys.padding_mask.any(-1)[:, None, None, None], outputs, 0)`. A query whose
        segment has no keys is such a query too.

    Raises:
        TypeError: mask is not an AttentionMask; num_heads, batch_size, q_offset or a number of
            shards is not a Python int, or is_mqa is not a Python bool.
        ValueError: splash attention cannot express a part of the mask; the tokens are not traced
            and lie in another order, or are not those of the keys from q_offset on; a size of a
            block does not divide the length, or the blocks are too many for the scalar memory.

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
        https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention.
        Levanter skips blocks of other documents in the same kernel,
        https://github.com/marin-community/marin/pull/6330.
    """
    # Imported when it is used: Pallas takes longer to import than this package.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    rule = RowRule(
        mask=mask,
        kernel="splash attention",
        order=order,
        batch_size=batch_size,
        q_offset=q_offset,
    )
    heads, segment_ids = heads_and_segment_ids(rule, num_heads)
    shards = arguments.size("q_seq_shards", q_seq_shards)
    counts = {"head_shards": arguments.size("head_shards", head_shards), "q_seq_shards": shards}
    is_mqa = arguments.flag("is_mqa", is_mqa)
    make = splash.make_splash_mqa if is_mqa else splash.make_splash_mha
    sizes: Any = options.get("block_sizes") or splash.BlockSizes.get_default()
    # The interpreter has no such memory.
    if not options.get("interpret"):
        _check_memory(rule, sizes)
    # Under jit too, the arrays of a kernel are known.
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
    infos = (_skipping(rule, shards, *grid) for grid in grids)
    return type(kernel)(*infos, **kernel.kwargs), segment_ids


def heads_and_segment_ids(rule: RowRule, num_heads: int) -> tuple[Any, Any]:
    """The mask of row indices, which is the same for all rows of the batch, and segment ids."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    from transformer_embed._src.kernels.splash_mask import IndexMask  # noqa: PLC0415

    num_heads, lengths = arguments.size("num_heads", num_heads), rule.mask.lengths
    mask = splash.FullMask(lengths)
    reach = rule.checked_reach()
    if reach != EVERYTHING:
        mask = IndexMask(lengths, reach, rule.q_offset or 0)
    ids = rule.segment_ids()
    if ids is not None:
        ids = splash.SegmentIds(*map(rule.for_rows, ids))
    return splash.MultiHeadMask([mask] * num_heads), ids


def _check_memory(rule: RowRule, sizes: Any) -> None:
    """Raises a ValueError if a TPU cannot hold the numbers of the blocks that queries reach.

    Before minutes are spent on describing blocks, of which each takes four bytes if there are many.
    """
    queries, keys = rule.mask.lengths
    reach = min(sum(rule.distances()) + sizes.block_q, keys)
    used = 4 * (queries // sizes.block_q) * (reach // sizes.block_kv)
    if used > SCALAR_MEMORY:
        want = f"blocks whose numbers fit into a TPU's scalar memory, {SCALAR_MEMORY} bytes"
        raise arguments.value_error("block_sizes", want, f"{used} bytes (take larger blocks)")


def _skipping(rule: RowRule, shards: int, info: Any, block: tuple[int, int], by_keys: bool) -> Any:
    """The arrays by which the kernel of each row skips blocks, from those for all rows.

    They are not a public interface of jax; this was tried with jax 0.9 to 0.12. In step i, j of its
    grid, a kernel runs unless `block_mask` is 0, and loads the block `data_next` of keys, for block
    i of queries. In the grid of the gradients of keys, it loads a block of queries, for block j of
    keys, counted from the first one of its shard.
    """
    # Without blocks for gradients, there is nothing to skip for them.
    if info is None:
        return None

    def by_loaded(array):
        # The blocks that are loaded are along the last axis.
        return array.swapaxes(-1, -2) if by_keys else array

    may_run = by_loaded((rule.mask.block_mask(block) != 0) | _on_diagonal(rule, block))
    loads, runs = map(by_loaded, (info.data_next, info.block_mask))
    steps = _skipped(shards if by_keys else 1, loads, runs, may_run)
    loads, runs = (rule.for_rows(by_loaded(array)) for array in steps)
    batch = jax.tree.map(lambda array: rule.for_rows(array[None]), info)
    return batch._replace(data_next=loads, block_mask=runs)


def _on_diagonal(rule: RowRule, block: tuple[int, int]) -> Bool[np.ndarray, "r s"]:
    """The blocks that always run, one in each row of blocks.

    Where all queries of a row of blocks are padding, no block has a pair, and a softmax over no
    keys at all would make the outputs NaN.
    """
    queries, keys = (np.arange(0, *sizes) for sizes in zip(rule.mask.lengths, block, strict=True))
    # There may be more queries than keys.
    queries = np.minimum(queries[:, None] + (rule.q_offset or 0), keys[-1])
    return queries // block[1] == keys // block[1]


# Compiled even if the caller is not.
@compiled(0)
def _skipped(
    shards: int,
    loads: Integer[Array, "h i j"],
    runs: Integer[Array, "h i j"],
    may_run: Bool[Array, "b r s"],
) -> tuple[Integer[Array, "b h i j"], Integer[Array, "b h i j"]]:
    """What each step loads and whether it runs, for each row of the batch."""
    shard = np.arange(loads.shape[2]) // (loads.shape[2] // shards)
    blocks = loads + (shard * (may_run.shape[2] // shards)).astype(np.int32)
    runs = jnp.where(jnp.take_along_axis(may_run[:, None], blocks[None], axis=3), runs, 0)
    # A step that runs nothing loads what the next one runs, so that nothing is loaded for it alone.
    is_running = runs.reshape(*runs.shape[:2], -1) > 0
    steps = jnp.arange(is_running.shape[2], dtype=jnp.int32)
    following = jax.lax.cummin(jnp.where(is_running, steps, steps[-1]), axis=2, reverse=True)
    loads = jnp.broadcast_to(loads, runs.shape).reshape(is_running.shape)
    return jnp.take_along_axis(loads, following, axis=2).reshape(runs.shape), runs
