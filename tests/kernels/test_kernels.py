"""What kernels are told is the rule: as bools of every pair, and by running them interpreted."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import kernel_masks
import numpy as np
import pytest
from batches import RULES
from cases import few
from compare import equal, near
from jax import NamedSharding, P
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from kernel_masks import KERNELS, mask_of_flash, mask_of_splash
from meshes import mesh_of
from refused import each_raises, pattern

import transformer_embed as te
from transformer_embed._src.kernels import row_indices, splash_kernels
from transformer_embed._src.sequences import token_order

# jax 0.12 points to another package for the GPU's kernel.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as gpu

TokenPositions, AttentionMask = te.TokenPositions, te.AttentionMask
BATCH, HEADS, LENGTH, BLOCK, SIZE = 2, 2, 256, 128, 128
TOLERANCE = 3e-6  # outputs and gradients are of size 1; measured at most 1e-6


def tokens_between(starts, ends, length=LENGTH):
    """Tokens whose positions count from the start of each row."""
    from_start = np.arange(length) - np.array(starts)[:, None]
    is_token = (from_start >= 0) & (np.arange(length) < np.array(ends)[:, None])
    return TokenPositions(np.where(is_token, from_start, 0), segment_ids=is_token.astype(int))


FULL = TokenPositions(
    np.arange(LENGTH) + np.array([[7], [0]]), segment_ids=np.ones((BATCH, LENGTH), int)
)
RIGHT = tokens_between([0, 0], [200, LENGTH])
LEFT = tokens_between([LENGTH - 120, LENGTH - 250], [LENGTH, LENGTH])
PACKED = TokenPositions(
    [[*range(100), *range(20), *range(60), *[0] * 76], [*range(129), *range(127)]],
    segment_ids=[np.repeat([1, 2, 3, 0], [100, 20, 60, 76]), np.repeat([4, 2], [129, 127])],
)
BLOCKS = splash.BlockSizes(*[BLOCK] * 8)
FUSED_BACKWARD = splash.BlockSizes(*[BLOCK] * 6, use_fused_bwd_kernel=True)


def assert_mask(found, mask):
    kernel_masks.assert_mask(found, np.asarray(mask.dense())[:, 0], mask.queries.padding_mask)


@pytest.mark.parametrize("rule", RULES)
def test_each_kernel_takes_every_rule_it_can_express(rule):
    """In every order: else all kernels might refuse everything."""
    orders = {"full": FULL, "right": RIGHT, "packed": PACKED}
    for order, tokens in orders.items():
        mask = AttentionMask(tokens, **rule)
        takes = {"splash_kernels"}
        takes |= {"flash_attention_kwargs", "mha_kwargs"} if "window" not in rule else set()
        if "chunk" not in rule and order != "packed":
            takes |= {"dot_product_attention_kwargs"}
        takes = set() if "sinks" in rule else takes
        for kernel, mask_of in KERNELS.items():
            if kernel in takes:
                assert_mask(mask_of(mask, order), mask)
            else:
                with pytest.raises(ValueError, match=r"^(window|chunk|order|sinks): wanted"):
                    mask_of(mask, order)


def test_arguments_that_change_nothing_are_left_out():
    """Segments, but for chunks, also at two offsets; an order; a window to the right of a causal
    rule, which cuDNN refuses."""
    mask = AttentionMask(FULL, causal=True)
    rule = row_indices.RowRule(mask, "splash attention", "full")
    assert splash_kernels.splash_segment_ids(rule) is None
    assert te.kernels.dot_product_attention_kwargs(mask, order="full") == {"is_causal": True}
    for kernel in (te.kernels.flash_attention_kwargs, te.kernels.mha_kwargs):
        assert kernel(mask, order="full") == {"causal": True, "segment_ids": None}
    chunks = AttentionMask(FULL, causal=True, chunk=8)
    rows = te.kernels.mha_kwargs(chunks, order="full")["segment_ids"]
    equal(np.diff(rows) != 0, np.diff(np.asarray(FULL.positions) // 8) != 0)
    mask = AttentionMask(TokenPositions(range(9)), causal=False)
    assert te.kernels.dot_product_attention_kwargs(mask) == {"is_causal": False}
    # Nor the order of a row.
    mask = AttentionMask(PACKED.take(np.arange(LENGTH)[::-1]), causal=False)
    assert_mask(mask_of_flash(mask, None), mask)
    for causal, window in ((True, (5, None)), (True, (5, 7)), (False, (5, 0))):
        mask = AttentionMask(RIGHT, causal=causal, window=window)
        options = te.kernels.dot_product_attention_kwargs(mask, order="right")
        assert (options["is_causal"], options["local_window_size"]) == (True, (5, 0))


def test_orders_of_kernels_are_those_that_check_batch_knows():
    assert tuple(token_order.WANTED_LAYOUTS) == row_indices.ORDERS


def test_queries_without_segments_see_the_chunks_of_every_segment():
    for order, keys in {"right": RIGHT, "packed": PACKED}.items():
        mask = AttentionMask(TokenPositions(FULL.positions), keys, causal=False, chunk=50)
        assert_mask(mask_of_flash(mask, order), mask)


@pytest.mark.slow
def test_segment_ids_of_64_bits():
    with jax.enable_x64():
        ids = jnp.array([[2**40 + 1, 2**40 + 1, 1, 0]])
        tokens = TokenPositions(jnp.array([[0, 1, 0, 0]]), segment_ids=ids)
        mask = AttentionMask(tokens, causal=True)
        options = te.kernels.flash_attention_kwargs(mask, order="packed")
        assert options["segment_ids"].q.dtype == jnp.int32
        assert_mask(mask_of_flash(mask, "packed"), mask)


@pytest.mark.parametrize(("order", "written"), [("full", 8), ("right", 5)])
def test_a_step_of_a_cache_is_told_how_many_keys_it_sees(order, written):
    """is_causal aligns queries with the first keys, so it is never passed for a cache."""
    tokens = TokenPositions.from_offset([4, 0], 8)
    cache = TokenPositions(tokens.positions, segment_ids=(np.arange(8) < written)[None] * 1)
    mask = AttentionMask(TokenPositions.from_offset([9, 2], 1), cache, causal=True)
    assert_mask(KERNELS["dot_product_attention_kwargs"](mask, order), mask)


def test_part_of_tokens_must_come_from_the_keys():
    """Padding sees nothing, so it may have any position."""
    keys, last = TokenPositions.from_offset(0, 256), np.arange(128, 256)
    is_token = (last < 200).astype(int)
    part = functools.partial(TokenPositions, segment_ids=is_token)
    options = {"order": "right", "q_offset": 128}
    mask_of_splash(AttentionMask(part(last * is_token), keys, causal=True), **options)
    with pytest.raises(
        ValueError, match=pattern("queries.positions: ... 128 ... got other numbers")
    ):
        mask_of_splash(AttentionMask(part((last + 1) * is_token), keys, causal=True), **options)
    # Without segments of their own, where the keys are one sequence.
    positions = np.asarray(RIGHT.positions)[:, 128:192]
    mask = AttentionMask(TokenPositions(positions), RIGHT, causal=True)
    assert_mask(mask_of_splash(mask, **options), mask)


# Kernels that run.


@jax.jit
def dense(bools, cotangent, *heads):
    """Outputs and gradients of attention with the bool of every pair."""

    def attend(*heads):
        heads = (array.swapaxes(1, 2) for array in heads)
        return jax.nn.dot_product_attention(*heads, scale=1.0, mask=bools).swapaxes(1, 2)

    outputs, back = jax.vjp(attend, *heads)
    return outputs, back(cotangent)


def check(mask, attend):
    """At tokens that see a key; outputs at others only have to be finite."""
    sides = mask.queries, mask.keys or mask.queries
    lengths = [side.positions.shape[-1] for side in sides]
    random = np.random.default_rng(0)
    cotangent, *heads = (
        0.3 * random.normal(size=(BATCH, HEADS, length, SIZE)).astype(np.float32)
        for length in (lengths[0], *lengths, lengths[1])
    )
    bools = np.broadcast_to(mask.dense(), (BATCH, 1, *lengths))
    counts = bools.any(-1)[..., None] & np.asarray(mask.queries.padding_mask)[:, None, :, None]
    cotangent = np.where(counts, cotangent, 0)
    expected, expected_gradients = dense(bools, cotangent, *heads)

    def run(cotangent, *heads):
        outputs, back = jax.vjp(attend, *heads)
        return outputs, back(cotangent)

    close = functools.partial(near, atol=TOLERANCE)
    outputs, gradients = jax.jit(run)(cotangent, *heads)
    close(gradients, expected_gradients)
    assert np.isfinite(outputs).all()
    close(np.where(counts, outputs, 0), np.where(counts, expected, 0))


def call(kernel, queries, keys, values, segment_ids):
    return kernel(queries, keys, values, segment_ids=segment_ids)


def splash_attend(mask, *heads, order="packed", block_sizes=BLOCKS, **options):
    options |= {"order": order, "block_sizes": block_sizes, "batch_size": BATCH}
    kernels, segment_ids = te.kernels.splash_kernels(mask, HEADS, interpret=True, **options)
    return jax.vmap(call)(kernels, *heads, segment_ids)


def flash_attend(mask, *heads):
    options = te.kernels.flash_attention_kwargs(mask, order="packed")
    return flash_attention.flash_attention(*heads, **options)


def mha_attend(mask, *heads):
    options = te.kernels.mha_kwargs(mask, order="packed", batch_size=BATCH)
    outputs = gpu.mha(*(array.swapaxes(1, 2) for array in heads), interpret=True, **options)
    return outputs.swapaxes(1, 2)


def dot_product_attend(mask, *heads, order="right"):
    options = te.kernels.dot_product_attention_kwargs(mask, order=order, batch_size=BATCH)
    heads = (array.swapaxes(1, 2) for array in heads)
    return jax.nn.dot_product_attention(*heads, scale=1.0, **options).swapaxes(1, 2)


def attend_on_a_mesh(mask, *heads):
    """Heads and queries are split; keys are whole on each device."""
    mesh = mesh_of((2, 2), ("heads", "length"))
    shards = {"head_shards": 2, "q_seq_shards": 2, "interpret": True}
    kernels, segment_ids = te.kernels.splash_kernels(
        mask, HEADS, order="packed", block_sizes=BLOCKS, **shards
    )
    row = jax.tree.map(lambda array: array[0], kernels)
    specs = row.manual_sharding_spec(NamedSharding(mesh, P("heads", "length")))
    specs = jax.tree.map(lambda spec: P(None, *spec), specs)
    queries, keys = P(None, "heads", "length"), P(None, "heads")
    in_specs = specs, queries, keys, keys, splash.SegmentIds(P(None, "length"), P())
    options = {"mesh": mesh, "in_specs": in_specs, "out_specs": queries, "check_vma": False}
    return jax.shard_map(jax.vmap(call), **options)(kernels, *heads, segment_ids)


def since(start, tokens):
    positions, segments = np.asarray(tokens.positions), np.asarray(tokens.segment_ids)
    return TokenPositions(positions[:, start:], segment_ids=segments[:, start:])


SECOND_HALF = since(128, PACKED)
# The queries of the first row see no key.
SHORT = tokens_between([0, 0], [0, 217], 384)
# A function of heads, and its mask.
RUNS = [
    "jax.jit(splash_attend), AttentionMask(LEFT, causal=False, chunk=77, window=(30, 5))",
    "functools.partial(splash_attend, q_offset=128), AttentionMask(SECOND_HALF, PACKED, causal=True, window=(90, 0))",
    "attend_on_a_mesh, AttentionMask(PACKED, causal=True, window=(90, 0))",
    "functools.partial(splash_attend, order='right', block_sizes=FUSED_BACKWARD), AttentionMask(RIGHT, SHORT, causal=False)",
    "dot_product_attend, AttentionMask(RIGHT, causal=False, window=(2, 5))",
    "dot_product_attend, AttentionMask(RIGHT, SHORT, causal=False)",
    "flash_attend, AttentionMask(PACKED, causal=True, chunk=50)",
    "mha_attend, AttentionMask(PACKED, causal=True, chunk=50)",
]


@pytest.mark.slow
@pytest.mark.parametrize("run", few(RUNS, 3))
def test_kernels_apply_the_rule(run, monkeypatch):
    """A query that sees no key has gradients that are too large, unless its output is dropped."""
    # flash_attention has no argument for the interpreter. (pltpu.force_tpu_interpret_mode can
    # deadlock.)
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    attend, mask = eval(run)
    check(mask, functools.partial(attend, mask))


DOCUMENTS = np.repeat([[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]], [130, 126, 200, 100, 84], axis=1)


@pytest.mark.slow
def test_steps_run_the_tiles_in_which_a_pair_may_attend_and_load_no_others():
    mask = AttentionMask(TokenPositions.from_segment_ids(DOCUMENTS), causal=True)
    kernels, _ = te.kernels.splash_kernels(
        mask, HEADS, order="packed", block_sizes=BLOCKS, interpret=True
    )
    kinds = np.array(mask.tile_kinds((BLOCK, BLOCK)))
    kinds[:, range(5), range(5)] = 1  # a row of tiles always runs one
    infos = [(kernels.fwd_mask_info, False), (kernels.dkv_mask_info, True)]
    for (info, by_keys), row in itertools.product(infos, range(BATCH)):
        runs = np.asarray(info.block_mask[row, 0]) > 0
        loads = np.asarray(info.data_next[row, 0])
        ran = {(loads[i, j], j) if by_keys else (i, loads[i, j]) for i, j in np.argwhere(runs)}
        assert ran == {tuple(index) for index in np.argwhere(kinds[row] > 0)}
        # A step that runs nothing loads what the next one that runs does, so nothing for itself.
        runs, loads = (array.T.ravel() if by_keys else array.ravel() for array in (runs, loads))
        running = np.flatnonzero(runs)
        for step in range(running[-1]):
            assert loads[step] == loads[running[running >= step][0]]


def test_a_row_of_tiles_runs_one_even_if_all_of_its_queries_are_padding():
    """Else their softmax would have no keys, and the outputs would be NaN. Here, the window leaves the
    last two of three tiles to the queries, which are the last tokens of the keys."""
    keys = tokens_between([0, 0], [200, 384], 384)
    mask = AttentionMask(since(256, keys), keys, causal=True, window=(50, 0))
    kernels, _ = te.kernels.splash_kernels(
        mask, HEADS, order="right", q_offset=256, block_sizes=BLOCKS, interpret=True
    )
    for info in (kernels.fwd_mask_info, kernels.dq_mask_info):
        assert (np.asarray(info.block_mask) > 0).any(-1).all()


# Errors.

BY_HAND = TokenPositions(jnp.asarray(np.arange(LENGTH, dtype=np.int32)[::-1]))
PREFIX = dataclasses.replace(RIGHT, block_ids=np.where(np.arange(LENGTH) < 9, 0, -1))
STEP, ONE = (TokenPositions(each, segment_ids=[1] * len(each)) for each in ([3, 4], [9]))
CAUSAL = AttentionMask(RIGHT, causal=True)
# An argument, which kernels name it, and the mask and order.
REFUSED = [
    ("tokens", "splash flash mha", "AttentionMask(BY_HAND, causal=True), 'packed'"),
    ("order", "splash flash mha dot", "CAUSAL, None"),
    ("order", "splash flash mha dot", "CAUSAL, 'sorted'"),
    ("keys", "splash flash dot", "AttentionMask(STEP, RIGHT, causal=True), 'right'"),
    ("block_ids", "splash flash mha dot", "AttentionMask(PREFIX, causal=True), 'right'"),
    ("keys", "mha", "AttentionMask(RIGHT, LEFT, causal=False), None"),
    ("window", "dot", "AttentionMask(ONE, RIGHT, causal=True, window=(3, 0)), 'right'"),
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_rule_that_a_kernel_cannot_express_is_refused(kernel):
    call = f"KERNELS[{kernel!r}]"
    rows = {
        f"{call}({each})": name
        for name, kernels, each in REFUSED
        if kernel.split("_")[0] in kernels
    }
    rows = {row: f"ValueError: {name}: wanted ... got " for row, name in rows.items()}
    mask = "TypeError: mask: wanted a te.AttentionMask, not joined ... got an array bool"
    each_raises(rows | {f"{call}(te.causal_mask(4), 'right')": mask}, globals())


WITH_KEYS = AttentionMask(SECOND_HALF, PACKED, causal=True)
splash_of = functools.partial(te.kernels.splash_kernels, num_heads=HEADS, order="packed")
kernels = functools.partial(splash_of, AttentionMask(PACKED, causal=True))
WRONG = {
    'te.kernels.dot_product_attention_kwargs(AttentionMask(TokenPositions([3]), TokenPositions(np.arange(8)), causal=True, window=(0, 0)), order="full")': "ValueError: window: wanted no limit on the left for a single query",
    "kernels(is_mqa='a')": "TypeError: is_mqa: wanted a Python bool ..., got str 'a'",
    'te.kernels.flash_attention_kwargs(CAUSAL, order="right", batch_size=3)': "ValueError: batch_size: ... 2 rows, got 3",
    'te.kernels.mha_kwargs(AttentionMask(TokenPositions(np.arange(4)), causal=True), order="full")': "ValueError: batch_size: ... got None",
    'te.kernels.flash_attention_kwargs(AttentionMask(RIGHT, causal=True, window=(3, 0)), order="right")': "ValueError: window: ... flash_attention, ... got (3, 0); mask.dense() and mask.tile() can",
    'te.kernels.flash_attention_kwargs(AttentionMask(TokenPositions(jnp.arange(4), segment_ids=jnp.array([1, 1, -1, -1])), causal=True), order="packed")': "ValueError: segment_ids: ... got -1 at index [0, 2]",
    "splash_of(WITH_KEYS, q_offset=100)": "ValueError: queries.positions: ... 100 ",
    "splash_of(WITH_KEYS, q_offset=129)": "ValueError: q_offset: ... 128, got 129",
    "splash_of(CAUSAL, q_offset=1)": "ValueError: q_offset: ... 0, got 1",
    "splash_of(AttentionMask(TokenPositions(PACKED.positions[:, 130:170]), PACKED, causal=True), q_offset=130)": "ValueError: queries.segment_ids: wanted the segment ids of the keys",
    "kernels(block_sizes=splash.BlockSizes(block_q=192, block_kv=128))": "ValueError: q_block_size=192 should divide",
    "kernels(head_shards=0)": "ValueError: head_shards: ... 1, got 0",
    "kernels(q_seq_shards=0)": "ValueError: q_seq_shards: ... 1, got 0",
}  # fmt: skip


def test_bad_arguments_are_refused():
    each_raises(WRONG, globals())


def test_blocks_that_are_too_many_are_refused_before_they_are_described(monkeypatch):
    """That takes minutes. Fewer fit, as those of a window do."""
    monkeypatch.setattr(splash, "make_splash_mha", None)
    tokens = TokenPositions.from_offset(0, 2**17)
    window = AttentionMask(tokens, causal=True, window=(2**14, 0))
    with pytest.raises(TypeError, match="NoneType"):
        te.kernels.splash_kernels(window, 1, order="full")
    mask = AttentionMask(tokens, causal=True)
    with pytest.raises(ValueError, match=r"^block_sizes: wanted blocks .*, got 4194304 bytes"):
        te.kernels.splash_kernels(mask, 1, order="full")


def test_a_step_that_runs_nothing_loads_the_next_block_that_runs():
    """For each batch row and head, in the order of the grid; after the last one, the last tile."""
    random, (heads, rows, columns) = np.random.default_rng(0), (2, 3, 4)
    loads = random.integers(0, columns, (heads, rows, columns)).astype(np.int32)
    runs = random.integers(0, 3, loads.shape).astype(np.int32)
    may_run = random.random((3, rows, columns)) < 0.4
    got_loads, got_runs = map(np.asarray, splash_kernels._steps_of_rows(1, loads, runs, may_run))
    for batch, head in np.ndindex(3, heads):
        steps = [*np.ndindex(rows, columns)]
        kept = [runs[head, i, j] * may_run[batch, i, loads[head, i, j]] for i, j in steps]
        equal(got_runs[batch, head].ravel(), kept)
        for n in range(len(steps)):
            following = next((m for m in range(n, len(steps)) if kept[m]), len(steps) - 1)
            assert got_loads[batch, head][steps[n]] == loads[head][steps[following]]


def test_blocks_of_each_shard_are_counted_from_its_first_block():
    """With two shards of three blocks each, for the gradients of keys."""
    loads = np.array([[[0, 1, 2, 2, 1, 0]]], np.int32)
    may_run = np.array([[[True, False, True, False, False, True]]])
    _, runs = splash_kernels._steps_of_rows(2, loads, np.ones_like(loads), may_run)
    equal(runs[0, 0, 0], [1, 0, 1, 1, 0, 0])
