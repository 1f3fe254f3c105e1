"""Makes splash attention kernels for TPUs from a mask, which skip tiles without a pair.

A tile is a rectangle of queries and keys, which a kernel computes at one time. jax calls it a
block. The tiles of a mask are in rows of tiles (the same queries) and columns of tiles (the same
keys).

A kernel computes tiles step by step. In each step it loads one tile, and either computes the tile
(the step runs) or skips it. For one row of tiles, the kernel has steps only for the tiles that the
causal mask or the window leaves, so there may be fewer steps than tiles. An array of the kernel
says which tile each step loads. jax calls the arrays of a kernel a MaskInfo, which has the fields
`data_next` (the tile that each step loads) and `block_mask` (whether each step runs).

In shapes, b counts batch rows and h counts heads. A mask has r x s tiles, and the grid of a kernel
has i x j steps.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Integer

from transformer_embed._src import arguments
from transformer_embed._src.attention.attention_mask import AttentionMask
from transformer_embed._src.kernels.row_indices import UNLIMITED_REACH, RowRule

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

    Use this function for long or packed rows on TPUs. Splash attention computes a mask in tiles. A
    tile is a rectangle of the mask, such as the queries 0 to 127 and the keys 128 to 255. Each
    kernel skips the tiles in which no query may attend to any key, for example if the queries and
    the keys are in different documents. A kernel takes one batch row, [heads, T, head_dim], where T
    is a multiple of the block sizes (128 by default). A kernel takes no bias and does not scale
    queries, so multiply the queries by `head_dim**-0.5` yourself.

    Args:
        mask: The mask, without block ids. (Block ids number groups of tokens that always see each
            other.) If the mask is causal or has a window, the keys must be the queries themselves
            (self-attention). If such a mask is for queries that follow cached tokens, pass
            `q_offset`.
        num_heads: The number of query heads.
        order: The layout of the tokens, `"full"`, `"right"` or `"packed"`. `te.kernels` explains
            the three words. Required if the mask is causal or has a window.
        batch_size: The number of batch rows, B. Pass it if the mask has a single row, which is then
            used for every batch row. If None, B is the number of rows of the mask.
        q_offset: The index of the first query among the keys, a Python int. Pass it if the keys
            begin with cached tokens, and the tokens of the queries come after them. For example,
            pass 1024 if a cache has 1024 tokens and the queries are the next tokens of the prompt.
            Query 0 and key 1024 are then the same token. jax's masks for this kernel (splash
            attention) call the argument `offset`. Pass None for self-attention without a cache, and
            for attention to another sequence.
        is_mqa: Whether the kernels are made by `make_splash_mqa`, for keys and values of a single
            head. If False, they are made by `make_splash_mha`.
        head_shards: The number of devices that the heads are split over.
        q_seq_shards: The number of devices that the queries are split over (context parallelism).
        **options: Options of jax's function, for example `block_sizes`.

    Returns:
        A pair (kernels, segment_ids). `kernels` is one pytree whose arrays have a leading axis for
        the batch. `segment_ids` is `SegmentIds` of int32 arrays [B, T] and [B, S], or None if there
        is only one segment. Map over both by `jax.vmap`, as in the example. Inside `jax.vmap`, you
        have the kernel of one batch row, and call it like a function. On a mesh, `jax.shard_map`
        needs a `PartitionSpec` for each array of `kernels`. First take index 0 of each array. The
        result `row` is the kernel of the first batch row, and `row.manual_sharding_spec` makes a
        `PartitionSpec` for each array of `row`. The arrays of `kernels` also have a batch axis in
        front, so put the mesh axis of the batch in front of each spec:

            row = jax.tree.map(lambda array: array[0], kernels)
            specs = row.manual_sharding_spec(NamedSharding(mesh, PartitionSpec("heads", "length")))
            specs = jax.tree.map(lambda spec: PartitionSpec("batch", *spec), specs)

    Raises:
        TypeError: `mask` is not an AttentionMask, or `is_mqa` is not a Python bool. `num_heads`,
            `batch_size`, `q_offset` or a number of shards is not a Python int.
        ValueError: The splash attention kernel cannot express a part of the mask. A block size does
            not divide the length. The row has so many tiles that the numbers about them do not fit
            into the scalar memory of a TPU, which has 1 MB (see below). The tokens are not in the
            layout that you pass as `order`. You pass a `q_offset` that does not fit the tokens: the
            key at index `q_offset` must be the same token as query 0, and so on. (The tokens are
            not checked inside `jax.jit`.)

    Example:
        >>> import jax
        >>> import transformer_embed as te
        >>> tokens = te.TokenPositions.from_segment_ids([[1] * 128 + [2] * 128])
        >>> mask = te.AttentionMask(tokens, causal=True)
        >>> options = {"order": "packed", "interpret": True}
        >>> kernels, segment_ids = te.kernels.splash_kernels(mask, 1, **options)
        >>> def attend(kernel, queries, keys, values, ids):  # of one batch row
        ...     return kernel(queries, keys, values, segment_ids=ids)
        >>> heads = jax.random.normal(jax.random.key(0), [1, 1, 256, 128])  # batch, heads, ..
        >>> jax.vmap(attend)(kernels, heads, heads, heads, segment_ids).shape
        (1, 1, 256, 128)

    Edge cases:
        - If the mask hides all keys from a query, the kernel returns an average of values, which
          means nothing. With S keys, the gradients of this query are S times too large. This
          happens if a segment has queries but no keys, for example if the source of a translation
          is empty. So drop the outputs of these queries. For empty sources, write
          `jnp.where(keys.padding_mask.any(-1)[:, None, None, None], outputs, 0)`.
        - A kernel keeps a few numbers for each tile in the scalar memory of a TPU, which has 1 MB.
          A row with many tiles needs more memory than this. For a long row, pass larger
          `block_sizes`, so that the row has fewer tiles. For example, 524,288 tokens without a
          window need block sizes of 1024.

    Source:
        The kernel is
        https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention.
        Levanter also skips the tiles of two documents in this kernel, see
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
    # What row indices say about the mask goes into `head_masks`, and the rest into segment ids.
    head_masks = index_masks(rule, num_heads)
    segment_ids = splash_segment_ids(rule)
    q_seq_shards = arguments.size("q_seq_shards", q_seq_shards)
    head_shards = arguments.size("head_shards", head_shards)
    is_mqa = arguments.flag("is_mqa", is_mqa)
    make = splash.make_splash_mqa if is_mqa else splash.make_splash_mha
    sizes: Any = options.get("block_sizes") or splash.BlockSizes.get_default()
    # The interpreter has no scalar memory.
    if not options.get("interpret"):
        _check_memory(rule, sizes)
    # Inside `jax.jit` too, the arrays of the kernel must be numbers and not tracers.
    with jax.ensure_compile_time_eval():
        kernel = make(head_masks, head_shards=head_shards, q_seq_shards=q_seq_shards, **options)
    # For each batch row, the kernel also skips the tiles in which no pair of the row may attend.
    return _kernels_of_rows(rule, kernel, sizes, q_seq_shards), segment_ids


def _kernels_of_rows(rule: RowRule, kernel: Any, sizes: Any, q_seq_shards: int) -> Any:
    """Makes a kernel for each batch row, from one kernel of jax that all batch rows would share.

    jax's kernel skips only the tiles that the causal mask or the window hides. The kernel of a
    batch row also skips the tiles in which no pair of this batch row may attend. A kernel has
    arrays that say which tiles it skips (a MaskInfo): one set for the forward pass, and one each
    for the gradients of queries (dq) and of keys (dkv). If one kernel computes both gradients, the
    set for dq is None.

    Args:
        rule: The mask, checked for this kernel, and what it says about row indices.
        kernel: The kernel, which is the same for all batch rows.
        sizes: The block sizes of the kernel.
        q_seq_shards: The number of devices that the queries are split over.
    """
    forward_tile = sizes.block_q, sizes.block_kv
    forward = _info_that_skips_keys(rule, kernel.fwd_mask_info, forward_tile)
    query_tile = sizes.block_q_dq, sizes.block_kv_dq
    query_gradient = _info_that_skips_keys(rule, kernel.dq_mask_info, query_tile)
    key_tile = sizes.block_q_dkv, sizes.block_kv_dkv
    key_gradient = _info_that_skips_queries(rule, q_seq_shards, kernel.dkv_mask_info, key_tile)
    # The class is taken from the kernel, because jax has no public name for this class.
    return type(kernel)(forward, query_gradient, key_gradient, **kernel.kwargs)


def index_masks(rule: RowRule, num_heads: int) -> Any:
    """Makes splash attention's mask of row indices, which all heads and all batch rows share.

    Splash attention is jax's attention kernel for TPUs. `rule` has the mask, checked for this
    kernel, and what it says about row indices.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    from transformer_embed._src.kernels.splash_mask import IndexMask  # noqa: PLC0415

    num_heads = arguments.size("num_heads", num_heads)
    lengths = rule.mask.lengths
    # The numbers of row indices that a query sees before and after its own. (None, None) means that
    # there is no limit.
    reach = rule.index_reach()
    if reach == UNLIMITED_REACH:
        mask = splash.FullMask(lengths)
    else:
        mask = IndexMask(lengths, reach, rule.q_offset or 0)
    return splash.MultiHeadMask([mask] * num_heads)


def splash_segment_ids(rule: RowRule) -> Any:
    """Makes splash attention's segment ids, or returns None if there is only one segment."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    return rule.kernel_segment_ids(splash.SegmentIds)


def _check_memory(rule: RowRule, sizes: Any) -> None:
    """Raises a ValueError if a TPU's scalar memory cannot hold a number for each tile that runs.

    jax would raise an error too, but only after it has described all tiles, which takes minutes.
    The estimate is four bytes a tile. jax takes fewer if there are few tiles, which always fit.
    """
    query_count, key_count = rule.mask.lengths
    # The numbers of row indices that a query sees before and after its own. If there is no limit,
    # they are the length of the row.
    left, right = rule.bounded_reach()
    # The number of keys that the queries of one tile see.
    seen_keys = min(left + right + sizes.block_q, key_count)
    tile_count = (query_count // sizes.block_q) * (seen_keys // sizes.block_kv)
    used = 4 * tile_count
    if used > SCALAR_MEMORY:
        want = f"blocks whose numbers fit into a TPU's scalar memory, {SCALAR_MEMORY} bytes"
        raise arguments.value_error("block_sizes", want, f"{used} bytes (take larger block sizes)")


def _info_that_skips_keys(rule: RowRule, info: Any, tile: tuple[int, int]) -> Any:
    """Makes the arrays by which each batch row's kernel skips tiles of keys.

    The arrays are not a public interface of jax. This was tried with jax 0.9 to 0.12. The steps
    [i, j] of a kernel are for the tiles in row i: step [i, j] loads the keys of the tile in row i
    and column `info.data_next[i, j]`. It computes nothing if `info.block_mask[i, j]` is 0.

    Args:
        rule: The mask, checked for this kernel, and what it says about row indices.
        info: The arrays of jax's kernel, which are the same for all batch rows. If None, there is
            nothing to skip.
        tile: The numbers of queries and of keys of a tile.
    """
    if info is None:
        return None
    must_run = _tiles_that_must_run(rule, tile)
    # All keys are on each device, so the tiles of keys are in one shard.
    steps = _steps_of_rows(1, info.data_next, info.block_mask, must_run)
    return _info_for_every_row(rule, info, steps.loaded_tile, steps.block_mask)


def _info_that_skips_queries(rule: RowRule, shards: int, info: Any, tile: tuple[int, int]) -> Any:
    """Makes the arrays by which each batch row's kernel skips tiles of queries.

    This is for the gradients of keys. The steps [i, j] of that kernel are for the tiles in column
    j: step [i, j] loads the queries of the tile in row `info.data_next[i, j]` and column j. If the
    queries are split over devices, each device counts the rows from 0.

    Args:
        rule: The mask, checked for this kernel, and what it says about row indices.
        shards: The number of devices that the queries are split over.
        info: The arrays of jax's kernel, which are the same for all batch rows. If None, there is
            nothing to skip.
        tile: The numbers of queries and of keys of a tile.
    """
    if info is None:
        return None

    def transposed(array: Array) -> Array:
        """Swaps the last two axes: queries and keys of tiles, or i and j of steps."""
        return array.swapaxes(-1, -2)

    # `_steps_of_rows` is for kernels that run the steps of a row of tiles one after the other. This
    # kernel runs the steps of a column one after the other, so all arrays are transposed, and the
    # results are transposed back.
    must_run = transposed(_tiles_that_must_run(rule, tile))
    # The tile that each step loads, and 0 for each step that does not run.
    data_next = transposed(info.data_next)
    block_mask = transposed(info.block_mask)
    steps = _steps_of_rows(shards, data_next, block_mask, must_run)
    loaded_tile = transposed(steps.loaded_tile)
    block_mask = transposed(steps.block_mask)
    return _info_for_every_row(rule, info, loaded_tile, block_mask)


def _info_for_every_row(rule: RowRule, info: Any, loaded_tile: Array, block_mask: Array) -> Any:
    """Makes the arrays of a kernel for every batch row, with a batch axis in front.

    The two arrays that are passed replace arrays of jax's kernel. The others are the same in every
    batch row.

    Args:
        rule: The mask, checked for this kernel, and what it says about row indices.
        info: The arrays of jax's kernel.
        loaded_tile: The tile that each step loads, [1 or b, h, i, j].
        block_mask: 0 for each step that does not run, [1 or b, h, i, j].
    """
    loaded_tile = rule.broadcast_to_rows(loaded_tile)
    block_mask = rule.broadcast_to_rows(block_mask)
    batch = jax.tree.map(lambda array: rule.broadcast_to_rows(array[None]), info)
    return batch._replace(data_next=loaded_tile, block_mask=block_mask)


def _tiles_that_must_run(rule: RowRule, tile: tuple[int, int]) -> Bool[Array, "b r s"]:
    """Returns which tiles of each batch row must run.

    These are the tiles in which some pair may attend, and one more tile in each row r of tiles.
    """
    has_pair = rule.mask.tile_kinds(tile) != 0
    return has_pair | _tiles_that_always_run(rule, tile)


def _tiles_that_always_run(rule: RowRule, tile: tuple[int, int]) -> Bool[np.ndarray, "r s"]:
    """Returns one tile in each row of tiles, which runs even if no pair of the tile may attend.

    If all queries of a row of tiles are padding, no tile of that row has a pair that may attend.
    Without a tile that runs, their softmax would have no keys at all, and the outputs would be NaN.
    """
    query_count, key_count = rule.mask.lengths
    tile_queries, tile_keys = tile
    # The first query of each row of tiles, [r, 1], and the first key of each column, [s].
    first_queries = np.arange(0, query_count, tile_queries)[:, None]
    first_keys = np.arange(0, key_count, tile_keys)
    # The tile is the one with the key that is the first query itself. If the queries are a part of
    # the keys, `q_offset` is the index of query 0 among the keys. If there are more queries than
    # keys, the last queries get the last tile of keys.
    index_of_first_queries = first_queries + (rule.q_offset or 0)
    own_keys = np.minimum(index_of_first_queries, first_keys[-1])
    own_tiles = own_keys // tile_keys
    every_tile = first_keys // tile_keys
    return own_tiles == every_tile


class _Steps(NamedTuple):
    """Says what each step of a grid does, for each batch row and head."""

    # The tile that the step loads, as an index along the row of tiles, counted from the first tile
    # of its shard. (A shard has the tiles of one device.)
    loaded_tile: Integer[Array, "b h i j"]
    # 0 if the step does not run. Another number means that the step runs, and says whether it needs
    # the mask.
    block_mask: Integer[Array, "b h i j"]


# The function is compiled even if the caller is not.
@functools.partial(jax.jit, inline=True, static_argnums=0)
def _steps_of_rows(
    shards: int,
    loaded_tile: Integer[Array, "h i j"],
    block_mask: Integer[Array, "h i j"],
    must_run: Bool[Array, "b r s"],
) -> _Steps:
    """Computes what each step loads and whether it runs, for each batch row.

    A tile is a rectangle of queries and keys. A step of a kernel loads one tile, and computes its
    part of the attention if the step runs. Tile [r, s] is in row r and column s of the tiles. Step
    [i, j] loads a tile of row i.

    Args:
        shards: The number of devices that the tiles along the last axis are split over.
        loaded_tile: The tile that each step of jax's kernel loads, as in `_Steps`: an index of the
            last axis of `must_run`, counted from the first tile of the device's shard.
        block_mask: Which steps of jax's kernel run, as in `_Steps`.
        must_run: Which tiles must run in each batch row, counted from the first tile of all shards.
    """
    step_count = loaded_tile.shape[2]
    steps_per_shard = step_count // shards
    tiles_per_shard = must_run.shape[2] // shards
    shard_of_step = np.arange(step_count) // steps_per_shard
    first_tile_of_shard = shard_of_step * tiles_per_shard
    # `loaded_tile` counts tiles from the first tile of the shard. `must_run` counts from the first
    # tile of all shards, so the number of tiles in the shards before is added.
    tile = loaded_tile + first_tile_of_shard.astype(np.int32)
    # Whether the tile of each step must run, [b, h, i, j]. Step [i, j] is for row i of tiles, so
    # row i of `must_run` [b, 1, r, s] is read at the column `tile[h, i, j]`.
    step_must_run = jnp.take_along_axis(must_run[:, None], tile[None], axis=3)
    block_mask = jnp.where(step_must_run, block_mask, 0)
    # A step that does not run needs no tile. It loads the tile that the next running step needs, so
    # no time is lost on a tile that nobody reads.
    next_tile = _tile_of_next_running_step(loaded_tile, block_mask)
    return _Steps(loaded_tile=next_tile, block_mask=block_mask)


def _tile_of_next_running_step(
    loaded_tile: Integer[Array, "h i j"], block_mask: Integer[Array, "b h i j"]
) -> Integer[Array, "b h i j"]:
    """Returns a tile for each step: its own tile if it runs, or the tile of the next running step.

    So a step that does not run loads what the next running step needs anyway. The steps of a grid
    follow each other row by row. For example, if the steps load the tiles 0 1 2 / 0 1 2, and the
    block mask is 0 0 1 / 0 1 0, the result is 2 2 2 / 1 1 2. The steps after the last running step
    get the tile of the last step of all.
    """
    batch, heads, _, _ = block_mask.shape
    # [b, h, steps].
    is_running = block_mask.reshape(batch, heads, -1) > 0
    steps = jnp.arange(is_running.shape[2], dtype=jnp.int32)
    running_or_last = jnp.where(is_running, steps, steps[-1])
    # The next running step is the lowest number from the step itself to the last step.
    next_running = jax.lax.cummin(running_or_last, axis=2, reverse=True)
    tile_of_step = jnp.broadcast_to(loaded_tile, block_mask.shape).reshape(is_running.shape)
    next_tile = jnp.take_along_axis(tile_of_step, next_running, axis=2)
    return next_tile.reshape(block_mask.shape)
