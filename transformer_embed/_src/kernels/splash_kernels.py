"""Makes splash attention kernels for TPUs from a mask, which skip blocks without a pair.

In shapes, b counts batch rows and h counts heads. A mask has r x s blocks of queries and keys, and
the grid of a kernel has i x j steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Integer

from transformer_embed._src import arguments
from transformer_embed._src.attention.attention_mask import AttentionMask
from transformer_embed._src.compiled import compiled
from transformer_embed._src.kernels.row_indices import EVERYTHING, RowRule

# The bytes of scalar memory of one core, from TPU v4 to v6e.
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
    """Makes a splash attention kernel for each batch row, and the segment ids.

    Use it for long or packed rows on TPUs. A kernel does not run a block in which its batch row
    allows no pair, for example a block of two documents. A kernel takes one batch row,
    [heads, T, head_dim], with T a multiple of its block sizes (128 by default). It takes no bias
    and does not scale queries, so multiply them by head_dim**-0.5.

    Args:
        mask: The mask, without block ids. With a causal mask or a window, it is self-attention, or
            needs `q_offset`.
        num_heads: The number of query heads.
        order: The layout of the tokens, see `te.kernels`. It may be None if the mask has neither a
            causal mask nor a window.
        batch_size: The number of batch rows, B. Pass it if the mask was made for one row that is
            used for every batch row. If None, the mask has B rows.
        q_offset: The index, among the keys, of the first query, a Python int. Pass it if the
            queries are a part of the keys, for example the new tokens of a chunked prefill. It is
            the `offset` of jax's splash masks. If None, the keys are another sequence, or the
            queries themselves.
        is_mqa: Whether the kernel is made by `make_splash_mqa`, and not by `make_splash_mha`.
        head_shards: The number of devices that the heads are split over.
        q_seq_shards: The number of devices that the queries are split over (context parallelism).
        **options: Options of jax's function, for example `block_sizes`.

    Returns:
        The kernels as one pytree whose arrays have a leading axis for the batch, and the
        `SegmentIds` int32 [B, T] and [B, S], or None if there is only one segment. Call them in a
        `jax.vmap` over both. On a mesh, the specs of the kernels for `jax.shard_map` are the specs
        of one row with an axis for the batch in front:

            row = jax.tree.map(lambda array: array[0], kernels)
            specs = row.manual_sharding_spec(NamedSharding(mesh, PartitionSpec("heads", "length")))
            specs = jax.tree.map(lambda spec: PartitionSpec("batch", *spec), specs)

    Raises:
        TypeError: `mask` is not an AttentionMask; `num_heads`, `batch_size`, `q_offset` or a number
            of shards is not a Python int; or `is_mqa` is not a Python bool.
        ValueError: Splash attention cannot express a part of the mask; the tokens are not traced
            and lie in another order, or are not the keys from `q_offset` on; a size of a block does
            not divide the length; or the blocks are too many for the scalar memory.

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

    Edge cases:
        - A query that sees no key gets an average of the values, and the kernel makes the gradients
          of that average S times too large. So drop the outputs of such queries. If a source may be
          empty, `jnp.where(keys.padding_mask.any(-1)[:, None, None, None], outputs, 0)` does that.
          A query whose segment has no keys is such a query, too.
        - A kernel keeps some numbers of each block in a TPU's scalar memory of 1 MB, so long rows
          need large blocks: 524,288 tokens without a window need blocks of 1024.

    Source:
        https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention.
        Levanter skips blocks of other documents in the same kernel,
        https://github.com/marin-community/marin/pull/6330.
    """
    # Pallas is imported when it is used, because it takes longer to import than this package.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    rule = RowRule(
        mask=mask,
        kernel="splash attention",
        order=order,
        batch_size=batch_size,
        q_offset=q_offset,
    )
    heads, segment_ids = heads_and_segment_ids(rule, num_heads)
    q_seq_shards = arguments.size("q_seq_shards", q_seq_shards)
    head_shards = arguments.size("head_shards", head_shards)
    is_mqa = arguments.flag("is_mqa", is_mqa)
    make = splash.make_splash_mqa if is_mqa else splash.make_splash_mha
    sizes: Any = options.get("block_sizes") or splash.BlockSizes.get_default()
    # The interpreter has no scalar memory.
    if not options.get("interpret"):
        _check_memory(rule, sizes)
    # Inside jit too, the arrays of a kernel are known.
    with jax.ensure_compile_time_eval():
        kernel = make(heads, head_shards=head_shards, q_seq_shards=q_seq_shards, **options)
    # jax has no public name for the class of its kernels. A kernel shows the arrays by which it
    # skips blocks, for the forward pass and for the gradients of queries and of keys. If one kernel
    # computes both gradients, there is no array for queries alone.
    forward_block = sizes.block_q, sizes.block_kv
    forward = _skipping(rule, kernel.fwd_mask_info, forward_block)
    query_block = sizes.block_q_dq, sizes.block_kv_dq
    query_gradient = _skipping(rule, kernel.dq_mask_info, query_block)
    key_block = sizes.block_q_dkv, sizes.block_kv_dkv
    key_gradient = _skipping_queries(rule, q_seq_shards, kernel.dkv_mask_info, key_block)
    made = type(kernel)(forward, query_gradient, key_gradient, **kernel.kwargs)
    return made, segment_ids


def heads_and_segment_ids(rule: RowRule, num_heads: int) -> tuple[Any, Any]:
    """Makes the mask of row indices, which all batch rows share, and the segment ids."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    from transformer_embed._src.kernels.splash_mask import IndexMask  # noqa: PLC0415

    num_heads = arguments.size("num_heads", num_heads)
    lengths = rule.mask.lengths
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

    jax would find that out too, but only after minutes in which it describes the blocks. Each block
    takes four bytes if there are many.
    """
    queries, keys = rule.mask.lengths
    reach = min(sum(rule.distances()) + sizes.block_q, keys)
    used = 4 * (queries // sizes.block_q) * (reach // sizes.block_kv)
    if used > SCALAR_MEMORY:
        want = f"blocks whose numbers fit into a TPU's scalar memory, {SCALAR_MEMORY} bytes"
        raise arguments.value_error("block_sizes", want, f"{used} bytes (take larger blocks)")


def _skipping(rule: RowRule, info: Any, block: tuple[int, int]) -> Any:
    """Makes the arrays by which each batch row's kernel skips blocks of keys.

    The arrays are not a public interface of jax. This was tried with jax 0.9 to 0.12. In step i, j
    of its grid, a kernel runs unless `info.block_mask` is 0, and loads the block `info.data_next`
    of keys, for block i of queries.

    Args:
        rule: The rule of the mask.
        info: The arrays for all batch rows. If None, there is nothing to skip.
        block: The numbers of queries and of keys of a block.
    """
    if info is None:
        return None
    steps = _steps_of_rows(1, info.data_next, info.block_mask, _may_run(rule, block))
    return _info_of_rows(rule, info, loaded_block=steps.loaded_block, runs=steps.runs)


def _skipping_queries(rule: RowRule, shards: int, info: Any, block: tuple[int, int]) -> Any:
    """Makes the arrays by which each batch row's kernel skips blocks of queries.

    This is for the gradients of keys. In the grid of that kernel, a step loads a block of queries,
    for block j of keys. The block is counted from the first block of its shard.
    """
    if info is None:
        return None

    def swapped(array: Array) -> Array:
        # The blocks that are loaded come last, as in `_skipping`.
        return array.swapaxes(-1, -2)

    may_run = swapped(_may_run(rule, block))
    steps = _steps_of_rows(shards, swapped(info.data_next), swapped(info.block_mask), may_run)
    loaded_block = swapped(steps.loaded_block)
    return _info_of_rows(rule, info, loaded_block=loaded_block, runs=swapped(steps.runs))


def _info_of_rows(rule: RowRule, info: Any, *, loaded_block: Array, runs: Array) -> Any:
    """Gives the arrays of a kernel a batch axis, and puts these two into them."""
    loaded_block = rule.for_rows(loaded_block)
    runs = rule.for_rows(runs)
    batch = jax.tree.map(lambda array: rule.for_rows(array[None]), info)
    return batch._replace(data_next=loaded_block, block_mask=runs)


def _may_run(rule: RowRule, block: tuple[int, int]) -> Bool[Array, "b r s"]:
    """Returns which blocks of each batch row must run: blocks with a pair, and one of each row."""
    return (rule.mask.block_mask(block) != 0) | _on_diagonal(rule, block)


def _on_diagonal(rule: RowRule, block: tuple[int, int]) -> Bool[np.ndarray, "r s"]:
    """Returns the blocks that always run, one for each block of queries.

    If all queries of a block are padding, no block of keys has a pair, and a softmax over no keys
    at all would make the outputs NaN.
    """
    query_count, key_count = rule.mask.lengths
    block_queries, block_keys = block
    queries = np.arange(0, query_count, block_queries)[:, None]
    keys = np.arange(0, key_count, block_keys)
    # There may be more queries than keys.
    queries = np.minimum(queries + (rule.q_offset or 0), keys[-1])
    return queries // block_keys == keys // block_keys


class _Steps(NamedTuple):
    """What each step of a grid does, for each batch row and head."""

    # The block that the step loads, counted from the first block of its shard.
    loaded_block: Integer[Array, "b h i j"]
    # 0 if the step does not run. Other numbers say whether it needs the mask.
    runs: Integer[Array, "b h i j"]


# The function is compiled even if the caller is not.
@compiled(0)
def _steps_of_rows(
    shards: int,
    loaded_block: Integer[Array, "h i j"],
    runs: Integer[Array, "h i j"],
    may_run: Bool[Array, "b r s"],
) -> _Steps:
    """Computes what each step loads and whether it runs, for each batch row.

    Args:
        shards: The number of devices that the blocks that are loaded are split over.
        loaded_block: The block that each step loads, as in `_Steps`.
        runs: Whether each step runs if all blocks have pairs, as in `_Steps`.
        may_run: Which blocks must run, counted from the first block of all.
    """
    step_count = loaded_block.shape[2]
    shard_of_column = np.arange(step_count) // (step_count // shards)
    first_of_shard = shard_of_column * (may_run.shape[2] // shards)
    block = loaded_block + first_of_shard.astype(np.int32)
    has_pair = jnp.take_along_axis(may_run[:, None], block[None], axis=3)
    runs = jnp.where(has_pair, runs, 0)
    # A step that runs nothing loads what the next running step needs, so that nothing is loaded
    # for the idle step alone.
    is_running = runs.reshape(*runs.shape[:2], -1) > 0
    steps = jnp.arange(is_running.shape[2], dtype=jnp.int32)
    next_running = jax.lax.cummin(jnp.where(is_running, steps, steps[-1]), axis=2, reverse=True)
    flat_blocks = jnp.broadcast_to(loaded_block, runs.shape).reshape(is_running.shape)
    flat_blocks = jnp.take_along_axis(flat_blocks, next_running, axis=2)
    return _Steps(loaded_block=flat_blocks.reshape(runs.shape), runs=runs)
