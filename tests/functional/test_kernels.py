"""What kernels are told is the rule: as bools of every pair, and by running them interpreted."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import x64
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import transformer_embed as te
from transformer_embed._src.functional import splash_attention

# jax 0.12 points to another package for the GPU's kernel.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as gpu

TokenPositions = te.TokenPositions
BATCH, HEADS, LENGTH, TILE, SIZE = 2, 2, 256, 128, 128
TOLERANCE = 3e-6  # outputs and gradients are of size 1; measured at most 1e-6
FULL = TokenPositions.from_offset([7, 0], LENGTH)
RIGHT = TokenPositions.from_lengths([200, LENGTH], LENGTH)
LEFT = TokenPositions.from_lengths([120, 250], LENGTH, padding_side="left")
PACKED = TokenPositions.from_segment_ids(
    np.stack([np.repeat([1, 2, 3, 0], [100, 20, 60, 76]), np.repeat([4, 2], [129, 127])])
)
INSIDE = TokenPositions.from_ids(np.tile([5, 0, 5, 5], [BATCH, LENGTH // 4]), pad_id=0)
TILES = splash.BlockSizes(*[TILE] * 8)
FUSED_BACKWARD = splash.BlockSizes(*[TILE] * 6, use_fused_bwd_kernel=True)


# What the arguments of a kernel say, [B, T, S].


def from_ids(queries, keys):
    return np.asarray(queries)[:, :, None] == np.asarray(keys)[:, None, :]


def said_by_splash(mask, order, **options):
    heads, ids = te.kernels.splash_attention(mask, 1, order=order, **options)
    said = np.asarray(heads.masks[0][: heads.shape[1], : heads.shape[2]])[None]
    return said if ids is None else said & from_ids(ids.q, ids.kv)


def said_by_flash(mask, order):
    options = te.kernels.flash_attention(mask, order=order)
    ids, said = options["segment_ids"], np.ones(mask.dense().shape[1:], bool)
    if options["causal"]:
        said = np.tri(mask.queries.positions.shape[-1], dtype=bool)[None]
    return said if ids is None else said & from_ids(ids.q, ids.kv)


def said_by_mha(mask, order):
    options = te.kernels.mha(mask, order=order, batch_size=BATCH)
    said = np.tri(mask.queries.positions.shape[-1], dtype=bool)[None] | (not options["causal"])
    ids = options["segment_ids"]
    return said if ids is None else said & from_ids(ids, ids)


def said_by_dot_product(mask, order):
    options = te.kernels.dot_product_attention(mask, order=order)
    (_, keys), length = (mask.queries, mask.keys or mask.queries), mask.queries.positions.shape[-1]
    ahead = np.arange(keys.positions.shape[-1]) - np.arange(length)[:, None]
    left, right = options.get("local_window_size", (1000, 1000))
    said = ((-left <= ahead) & (ahead <= right) & (~(options["is_causal"] & (ahead > 0))))[None]
    if "key_value_seq_lengths" in options:
        lengths = np.asarray(options["key_value_seq_lengths"])[:, None, None]
        said = said & (np.arange(keys.positions.shape[-1]) < lengths)
    return said


KERNELS = {
    "splash": said_by_splash,
    "flash": said_by_flash,
    "mha": said_by_mha,
    "dot": said_by_dot_product,
}
RULES = [
    {"causal": False},
    {"causal": True},
    {"causal": True, "window": (3, 0)},
    {"causal": False, "window": (2, 5)},
    {"causal": False, "window": (None, 4)},
    {"causal": True, "chunk": 4},
    {"causal": False, "chunk": 5, "window": (2, 1)},
]


def assert_said(said, mask):
    """At queries that are tokens and see a key; kernels differ in what the others get."""
    whole = np.asarray(mask.dense())[:, 0]
    counts = np.asarray(mask.queries.padding_mask)[:, :, None] & whole.any(-1, keepdims=True)
    said, whole, counts = np.broadcast_arrays(said, whole, counts)
    assert (said == whole)[counts].all()


ROW = 12
BATCHES = {
    "right": lambda draw: TokenPositions.from_lengths(draw(0, ROW), ROW),
    "left": lambda draw: TokenPositions.from_lengths(draw(0, ROW), ROW, padding_side="left"),
    "full": lambda draw: TokenPositions.from_offset(draw(-9, 10**9), ROW),
    "packed": lambda draw: TokenPositions.from_segment_ids(
        [
            np.repeat([3, 1, 0, 2], [a, 4 - a, b, 8 - b])
            for a, b in zip(draw(0, 4), draw(0, 8), strict=True)
        ]
    ),
    "ids": lambda draw: TokenPositions.from_ids(
        np.random.default_rng(draw(0, 99)).integers(0, 3, (2, ROW)), pad_id=0, start=draw(0, 60)[0]
    ),
}
# What loaders do to every array of a batch [rows, length], by two numbers.
CHANGES = {
    "cut the start": lambda a, n, m: jnp.pad(a[:, n:], ((0, 0), (0, n))),
    "cut the end": lambda a, n, m: jnp.pad(a[:, : a.shape[1] - n], ((0, 0), (n, 0))),
    "pad": lambda a, n, m: jnp.pad(a, ((0, 0), (0, 4))),
    "one row": lambda a, n, m: a.reshape(1, -1),
    "side by side": lambda a, n, m: jnp.concatenate([a, a[::-1]], 1),
    "stack": lambda a, n, m: jnp.concatenate([a, a[::-1]]),
    "every other": lambda a, n, m: a[:, ::2],
    "roll": lambda a, n, m: jnp.roll(a, n, 1),
    "backwards": lambda a, n, m: a[:, ::-1],
    "swap two": lambda a, n, m: a.at[:, n].set(a[:, m]).at[:, m].set(a[:, n]),
}


@settings(max_examples=60)
@given(st.data())
def test_any_change_of_a_batch_is_seen_by_every_kernel(data):
    """What a kernel is told is the rule of the changed batch, or an error."""
    numbers = st.integers(0, 11)

    def draw(low, high):
        return data.draw(st.lists(st.integers(low, high), min_size=2, max_size=2))

    tokens = BATCHES[data.draw(st.sampled_from(sorted(BATCHES)))](draw)
    for name in data.draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=3)):
        change = functools.partial(CHANGES[name], n=data.draw(numbers), m=data.draw(numbers))
        if tokens.positions.shape[1] in (ROW, 2 * ROW):
            tokens = jax.tree.map(change, tokens)
    mask = te.AttentionMask(tokens, **data.draw(st.sampled_from(RULES)))
    for said in KERNELS.values():
        for order in (None, "full", "right", "packed"):
            try:
                bools = said(mask, order)
            except ValueError:
                continue
            assert_said(bools, mask)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_kernel_takes_what_it_can_express(rule):
    """In every order: else all kernels might refuse everything."""
    orders = {"full": FULL, "right": RIGHT, "packed": PACKED}
    for order, tokens in orders.items():
        mask = te.AttentionMask(tokens, **rule)
        takes = {"splash"}
        takes |= {"flash", "mha"} if "window" not in rule else set()
        takes |= {"dot"} if "chunk" not in rule and order != "packed" else set()
        for kernel, said in KERNELS.items():
            if kernel in takes:
                assert_said(said(mask, order), mask)
            else:
                with pytest.raises(ValueError, match=r"^(window|chunk|order): wanted"):
                    said(mask, order)


def test_names_of_chunks_are_unique_whatever_the_tokens():
    """Also of tokens in no order: a mask of chunks alone compares no row indices."""
    ids = np.random.default_rng(0).integers(0, 4, (3, 2, 40))
    tokens = TokenPositions(9 * ids[1] - 5, ids[0])
    for keys in (None, TokenPositions(7 * ids[2] - 5, ids[1])):
        mask = te.AttentionMask(tokens, keys, causal=False, chunk=10)
        assert_said(jax.jit(said_ids, static_argnums=1)(mask, None), mask)
    cut = jax.tree.map(lambda a: a[:, 2:], TokenPositions.from_segment_ids([[1] * 4 + [2] * 4]))
    mask = te.AttentionMask(cut, causal=False, chunk=8)
    assert_said(said_by_flash(mask, None), mask)
    mask = te.AttentionMask(TokenPositions(jnp.arange(40)), tokens, causal=False, chunk=10)
    assert_said(said_by_splash(mask, None), mask)


def said_ids(mask, order):
    ids = te.kernels.flash_attention(mask, order=order)["segment_ids"]
    return ids.q[:, :, None] == ids.kv[:, None, :]


def test_segment_ids_of_64_bits():
    with x64():
        ids = jnp.array([[2**40 + 1, 2**40 + 1, 1, 0]])
        mask = te.AttentionMask(TokenPositions(jnp.array([[0, 1, 0, 0]]), ids), causal=True)
        options = te.kernels.flash_attention(mask, order="packed")
        assert options["segment_ids"].q.dtype == jnp.int32
        assert_said(said_by_flash(mask, "packed"), mask)


def test_queries_that_are_a_part_of_their_keys():
    """A chunked prefill: its queries start at an index of the cache."""
    for keys in (RIGHT, PACKED, LEFT):
        for start in (0, 60, 128):
            queries = jax.tree.map(lambda a, s=start: a[:, s : s + 128], keys)
            for rule in RULES[1:]:
                mask = te.AttentionMask(queries, keys, **rule)
                assert_said(said_by_splash(mask, "packed", query_start=start), mask)
    mask = te.AttentionMask(queries, keys, causal=True)
    with pytest.raises(ValueError, match=r"^queries.positions: wanted the keys from index 100 on"):
        te.kernels.splash_attention(mask, 1, order="packed", query_start=100)
    with pytest.raises(ValueError, match=r"^query_start: wanted an int of at most 128, got 129"):
        te.kernels.splash_attention(mask, 1, order="packed", query_start=129)
    with pytest.raises(ValueError, match=r"^query_start: wanted None, since the mask is self-att"):
        te.kernels.splash_attention(
            te.AttentionMask(keys, causal=True), 1, order="packed", query_start=0
        )


# Kernels that run.


def draws(*shape, seed=0):
    key = jax.random.key(seed)
    return [0.3 * jax.random.normal(each, shape) for each in jax.random.split(key, 4)]


def dense(mask, queries, keys, values):
    """Attention of [B, heads, T, size] with the bool of every pair."""
    precision = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("bhtd,bhsd->bhts", queries, keys, precision=precision)
    weights = jax.nn.softmax(jnp.where(mask.dense(), logits, -1e30))
    return jnp.einsum("bhts,bhsd->bhtd", weights, values, precision=precision)


def check(mask, attend, queries=LENGTH):
    """Outputs and gradients at tokens; outputs at padding only have to be finite."""
    heads, cotangent = draws(BATCH, HEADS, LENGTH, SIZE)[:3], draws(BATCH, HEADS, queries, SIZE)[3]
    heads[0] = heads[0][:, :, :queries]
    is_token = mask.queries.padding_mask[:, None, :, None]

    def loss(attend, *heads):
        outputs = attend(*heads)
        return jnp.where(is_token, outputs * cotangent, 0).sum(), outputs

    both = [
        jax.jit(jax.grad(functools.partial(loss, function), (0, 1, 2), has_aux=True))(*heads)
        for function in (attend, functools.partial(dense, mask))
    ]
    (gradients, outputs), (expected_gradients, expected) = both
    assert jnp.isfinite(outputs).all()
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE)
    close(jnp.where(is_token, outputs, 0), jnp.where(is_token, expected, 0))
    jax.tree.map(close, gradients, expected_gradients)


def call(kernel, queries, keys, values, segment_ids):
    return kernel(queries, keys, values, segment_ids=segment_ids)


def splash_attend(mask, *heads, order="packed", **options):
    said, segment_ids = te.kernels.splash_attention(
        mask, HEADS, order=order, batch_size=BATCH, **options
    )
    kernel = splash.make_splash_mha(
        said, head_shards=1, q_seq_shards=1, block_sizes=TILES, interpret=True
    )
    return jax.vmap(functools.partial(call, kernel))(*heads, segment_ids)


def skipping_attend(mask, *heads, order="packed", block_sizes=TILES, **options):
    kernels, segment_ids = te.kernels.splash_kernels(
        mask,
        HEADS,
        order=order,
        batch_size=BATCH,
        block_sizes=block_sizes,
        interpret=True,
        **options,
    )
    return jax.vmap(call)(kernels, *heads, segment_ids)


def mha_attend(mask, *heads):
    options = te.kernels.mha(mask, order="packed", batch_size=BATCH)
    outputs = gpu.mha(*(array.swapaxes(1, 2) for array in heads), interpret=True, **options)
    return outputs.swapaxes(1, 2)


def dot_product_attend(mask, *heads, order="right"):
    options = te.kernels.dot_product_attention(mask, order=order, batch_size=BATCH)
    heads = (array.swapaxes(1, 2) for array in heads)
    return jax.nn.dot_product_attention(*heads, scale=1.0, **options).swapaxes(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("block_sizes", [TILES, FUSED_BACKWARD], ids=["three", "two"])
def test_splash_attention_skips_tiles_of_other_documents(block_sizes):
    mask = te.AttentionMask(PACKED, causal=True, window=(90, 0))
    check(mask, functools.partial(skipping_attend, mask, block_sizes=block_sizes))


@pytest.mark.slow
def test_splash_attention_runs_with_chunks_and_left_padding():
    mask = te.AttentionMask(LEFT, causal=False, chunk=77, window=(30, 5))
    check(mask, functools.partial(splash_attend, mask))
    check(mask, functools.partial(skipping_attend, mask))


@pytest.mark.slow
def test_splash_attention_of_queries_at_an_offset():
    queries = jax.tree.map(lambda a: a[:, 128:], PACKED)
    mask = te.AttentionMask(queries, PACKED, causal=True, window=(90, 0))
    for attend in (splash_attend, skipping_attend):
        check(mask, functools.partial(attend, mask, query_start=128), queries=128)


@pytest.mark.slow
def test_flash_attention_of_tpus_applies_the_rule(monkeypatch):
    # It has no argument for the interpreter. (pltpu.force_tpu_interpret_mode can deadlock.)
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    mask = te.AttentionMask(PACKED, causal=True, chunk=50)
    options = te.kernels.flash_attention(mask, order="packed")
    check(mask, functools.partial(flash_attention.flash_attention, **options))


@pytest.mark.slow
def test_mha_of_gpus_applies_the_rule():
    mask = te.AttentionMask(PACKED, causal=True, chunk=50)
    check(mask, functools.partial(mha_attend, mask))


@pytest.mark.parametrize("rule", RULES[1:5], ids=str)
def test_dot_product_attention_applies_the_rule_without_a_mask(rule):
    mask = te.AttentionMask(RIGHT, **rule)
    check(mask, functools.partial(dot_product_attend, mask))


def test_dot_product_attention_of_full_rows_has_no_lengths():
    mask = te.AttentionMask(FULL, causal=True)
    assert te.kernels.dot_product_attention(mask, order="full") == {"is_causal": True}
    assert te.kernels.flash_attention(mask, order="full") == {"causal": True, "segment_ids": None}
    check(mask, functools.partial(dot_product_attend, mask, order="full"))


@pytest.mark.parametrize("window", [(20, 130), (None, 40), (9, None)])
def test_a_window_that_is_not_causal_never_comes_alone(window):
    """jax 0.6.1 ignores it then."""
    mask = te.AttentionMask(TokenPositions.from_offset([0, 7], 9), causal=False, window=window)
    options = te.kernels.dot_product_attention(mask, order="full")
    assert options["query_seq_lengths"].tolist() == [9, 9]
    assert options["key_value_seq_lengths"].tolist() == [9, 9]


def test_cudnn_gets_no_window_to_the_right_of_a_causal_rule():
    for causal, window in ((True, (5, 0)), (True, (5, None)), (True, (5, 7)), (False, (5, 0))):
        mask = te.AttentionMask(RIGHT, causal=causal, window=window)
        options = te.kernels.dot_product_attention(mask, order="right")
        assert options["is_causal"]
        assert options["local_window_size"] == (5, 0)


def test_attention_to_another_sequence():
    target, source = RIGHT, TokenPositions.from_lengths([200, 17], 384)
    mask = te.AttentionMask(target, source, causal=False)
    queries = draws(BATCH, HEADS, LENGTH, SIZE)[0]
    keys, values = draws(BATCH, HEADS, 384, SIZE, seed=1)[:2]
    is_token = target.padding_mask[:, None, :, None]
    expected = dense(mask, queries, keys, values)
    for attend in (splash_attend, skipping_attend, dot_product_attend):
        outputs = attend(mask, queries, keys, values, order="right")
        error = jnp.where(is_token, outputs - expected, 0)
        assert jnp.abs(error).max() < TOLERANCE, attend
        assert jnp.isfinite(outputs).all()


def test_another_sequence_of_another_segment_is_not_seen():
    """Lengths come from the segment ids, whatever these are."""
    keys = TokenPositions([[0, 1, 2]] * 2, [[7, 7, 0], [2, 0, 0]])
    mask = te.AttentionMask(TokenPositions([[0, 1]] * 2, [[7, 7], [1, 1]]), keys, causal=False)
    options = te.kernels.dot_product_attention(mask, order="right")
    assert options["key_value_seq_lengths"].tolist() == [2, 0]


@pytest.mark.parametrize("order", ["right", "full"])
def test_decoding_from_a_cache_that_write_made(order):
    """is_causal aligns queries with the first keys, so it is never passed for a cache."""
    written, length = (5, 8) if order == "right" else (8, 8)
    prompt = TokenPositions.from_offset([4, 0], written)
    cache = TokenPositions.empty(BATCH, length).write(prompt, 0)
    mask = te.AttentionMask(TokenPositions.from_offset([6, 2], 1), cache, causal=True)
    queries, keys, values = (draws(BATCH, HEADS, size, 8)[0] for size in (1, length, length))
    outputs = dot_product_attend(mask, queries, keys, values, order=order)
    assert jnp.abs(outputs - dense(mask, queries, keys, values)).max() < TOLERANCE


@pytest.mark.slow
def test_gradients_of_a_query_that_sees_no_key():
    """Those of splash attention are too large, so its docstring says how to drop the outputs."""
    keys = TokenPositions.from_lengths([0, 200], LENGTH)
    mask = te.AttentionMask(RIGHT, keys, causal=False)
    seen = keys.padding_mask.any(-1)[:, None, None, None]

    def attend(function, *heads):
        return jnp.where(seen, function(mask, *heads), 0)

    heads = draws(BATCH, HEADS, LENGTH, SIZE)[:3]
    is_token = RIGHT.padding_mask[:, None, :, None]
    loss = lambda function, *heads: jnp.where(is_token, attend(function, *heads), 0).sum()
    gradients, expected = (
        jax.jit(jax.grad(functools.partial(loss, function), (0, 1, 2)))(*heads)
        for function in (splash_attend, dense)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE * LENGTH)
    jax.tree.map(close, gradients, expected)


@pytest.mark.slow
def test_a_prefix_known_while_tracing():
    images = np.repeat([-1, 4, -1, 7], 64)
    mask = te.AttentionMask(RIGHT.with_block_ids(images), causal=True, window=(100, 0))
    assert_said(said_by_splash(mask, "right"), mask)
    check(mask, functools.partial(skipping_attend, mask))
    part = jax.tree.map(lambda a: a[:, 128:], mask.queries)
    mask = te.AttentionMask(part, mask.queries, causal=True, window=(100, 0))
    assert_said(said_by_splash(mask, "right", query_start=128), mask)


def test_the_static_mask_of_splash_attention_is_the_rule_in_any_tile():
    for window in ((None, 0), (90, 0), (20, 130), (None, 40), (7, None)):
        rule = te.AttentionMask(FULL, causal=False, window=window)
        mask = te.kernels.splash_attention(rule, 1, order="full")[0].masks[0]
        whole = np.asarray(rule.dense()[0, 0])
        for tile in (32, 128):
            for start in np.ndindex(LENGTH // tile, LENGTH // tile):
                cut = tuple(slice(tile * index, tile * (index + 1)) for index in start)
                np.testing.assert_array_equal(mask[cut], whole[cut])


@pytest.mark.slow
def test_under_jit_the_mask_may_be_an_argument_or_be_made_inside():
    heads = draws(BATCH, HEADS, LENGTH, SIZE)[:3]
    mask = te.AttentionMask(PACKED, causal=True, window=(90, 0))
    is_token = PACKED.padding_mask[:, None, :, None]

    @jax.jit
    def inside(segment_ids, *heads):
        tokens = TokenPositions.from_segment_ids(segment_ids)
        return skipping_attend(te.AttentionMask(tokens, causal=True, window=(90, 0)), *heads)

    for outputs in (jax.jit(skipping_attend)(mask, *heads), inside(PACKED.segment_ids, *heads)):
        error = outputs - dense(mask, *heads)
        assert jnp.abs(jnp.where(is_token, error, 0)).max() < TOLERANCE


@pytest.mark.slow
def test_splash_kernels_on_a_mesh():
    """Heads and queries are split; keys are whole on each device. Gradients too."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("heads", "length"))
    mask = te.AttentionMask(PACKED, causal=True, window=(90, 0))
    kernels, segment_ids = te.kernels.splash_kernels(
        mask,
        HEADS,
        order="packed",
        head_shards=2,
        q_seq_shards=2,
        block_sizes=TILES,
        interpret=True,
    )
    row = jax.tree.map(lambda array: array[0], kernels)
    sharding = NamedSharding(mesh, PartitionSpec("heads", "length"))
    specs = row.manual_sharding_spec(sharding)
    specs = jax.tree.map(lambda spec: PartitionSpec(None, *spec), specs)
    queries, keys = PartitionSpec(None, "heads", "length"), PartitionSpec(None, "heads")
    ids = splash.SegmentIds(PartitionSpec(None, "length"), PartitionSpec())
    attend = jax.shard_map(
        jax.vmap(call),
        mesh=mesh,
        in_specs=(specs, queries, keys, keys, ids),
        out_specs=queries,
        check_vma=False,
    )
    check(mask, lambda *heads: attend(kernels, *heads, segment_ids))


@pytest.mark.parametrize("sizes", [TILES, splash.BlockSizes(128, 128)], ids=["both", "inference"])
def test_skipped_tiles_are_those_in_which_no_pair_may_attend(sizes):
    mask = te.AttentionMask(PACKED, causal=True)
    kernels, _ = te.kernels.splash_kernels(
        mask, HEADS, order="packed", block_sizes=sizes, interpret=True
    )
    kinds = np.array(mask.tile_kinds((TILE, TILE)))
    kinds[:, range(2), range(2)] = 1  # a row of tiles always runs one
    infos = [(kernels.fwd_mask_info, False)]
    infos += [(kernels.dkv_mask_info, True)] if sizes.has_backward_blocks else []
    for info, by_keys in infos:
        for row in range(BATCH):
            runs = np.asarray(info.block_mask[row, 0]) > 0
            loads = np.asarray(info.data_next[row, 0])
            ran = {(loads[i, j], j) if by_keys else (i, loads[i, j]) for i, j in np.argwhere(runs)}
            assert ran == {tuple(index) for index in np.argwhere(kinds[row] > 0)}
    # A step that runs nothing loads what the next one that runs does.
    runs, loads = (
        np.asarray(array[0, 0]).ravel()
        for array in (kernels.fwd_mask_info.block_mask, kernels.fwd_mask_info.data_next)
    )
    for step in np.flatnonzero(runs == 0):
        later = np.flatnonzero(runs[step:])
        assert not later.size or loads[step] == loads[step + later[0]]


def test_a_version_of_jax_whose_kernels_describe_tiles_in_another_way(monkeypatch):
    make = splash.make_splash_mha

    def make_differently(*args, **options):
        kernel = make(*args, **options)
        kernel.fwd_mask_info = kernel.fwd_mask_info._replace(
            data_next=kernel.fwd_mask_info.data_next[:, ::-1]
        )
        return kernel

    monkeypatch.setattr(splash, "make_splash_mha", make_differently)
    mask = te.AttentionMask(PACKED, causal=True)
    with pytest.raises(RuntimeError, match=r"^splash_kernels: wanted the tiles of its mask, as fr"):
        te.kernels.splash_kernels(mask, 1, order="packed", interpret=True)


# Errors.

BY_HAND = TokenPositions(jnp.arange(LENGTH)[::-1])
PREFIX = RIGHT.with_block_ids(np.where(np.arange(LENGTH) < 9, 0, -1))
STEP = TokenPositions.from_offset(3, 2)
ONE = TokenPositions.from_offset(9, 1)


def refused(name, tokens, keys=None, order="packed", **rule):
    return name, te.AttentionMask(tokens, keys, **rule), order


REFUSED = [
    ("splash flash mha", *refused("tokens", BY_HAND, causal=True)),
    ("splash flash mha", *refused("tokens", INSIDE, causal=True)),
    ("splash flash mha dot", *refused("order", RIGHT, causal=True, order=None)),
    ("splash", *refused("order", RIGHT, causal=False, window=(3, 3), order=None)),
    ("splash flash", *refused("keys", STEP, RIGHT, causal=True, order="right")),
    ("dot", *refused("keys", STEP, RIGHT, causal=True, order="right")),
    ("flash mha", *refused("window", RIGHT, causal=True, window=(3, 0))),
    ("flash mha dot", *refused("block_ids", PREFIX, causal=True, order="right")),
    ("splash", *refused("chunk", PREFIX, causal=True, chunk=5)),
    ("splash", *refused("chunk", PREFIX, causal=False, chunk=5)),
    ("dot", *refused("chunk", RIGHT, causal=True, chunk=5, order="right")),
    ("dot", *refused("order", PACKED, causal=True)),
    ("dot", *refused("order", LEFT, causal=True)),
    ("dot", *refused("order", PACKED, causal=False, order=None)),
    ("dot", *refused("tokens", LEFT, causal=True, order="right")),
    ("mha", *refused("keys", RIGHT, LEFT, causal=False)),
    ("dot", *refused("tokens", TokenPositions([9]), BY_HAND, causal=True, order="full")),
    ("dot", *refused("window", ONE, RIGHT, causal=True, window=(3, 0), order="right")),
]


@pytest.mark.parametrize(
    ("kernel", "name", "mask", "order"),
    [
        pytest.param(kernel, *case, id=f"{kernel}-{case[0]}-{number}")
        for number, (kernels, *case) in enumerate(REFUSED)
        for kernel in kernels.split()
    ],
)
def test_what_a_kernel_cannot_say_is_refused(kernel, name, mask, order):
    with pytest.raises(ValueError, match=rf"^{name}: wanted .* got "):
        KERNELS[kernel](mask, order)


def test_a_part_that_no_argument_can_say_comes_with_the_way_out():
    mask = te.AttentionMask(RIGHT, causal=True, window=(3, 0))
    want = r"^window: wanted None for flash_attention, .* mask\.dense\(\) and mask\.tile\(\) can"
    with pytest.raises(ValueError, match=want):
        te.kernels.flash_attention(mask, order="right")


def test_block_ids_that_splash_attention_cannot_take():
    rows = jnp.zeros((BATCH, LENGTH), int).at[1, 4].set(-1)

    def said(ids):
        mask = te.AttentionMask(RIGHT.with_block_ids(ids), causal=True)
        return te.kernels.splash_attention(mask, 2, order="right")[1]

    want = r"^block_ids: wanted values known while tracing, the same in every row"
    for ids, function in ((jnp.zeros(LENGTH, int), jax.jit(said)), (rows, said)):
        with pytest.raises(ValueError, match=want):
            function(ids)


@pytest.mark.parametrize("batch_size", [3, 0, 2.0], ids=str)
def test_a_batch_size_that_is_not_the_masks(batch_size):
    mask = te.AttentionMask(RIGHT, causal=True)
    error = TypeError if isinstance(batch_size, float) else ValueError
    with pytest.raises(error, match=r"^batch_size: wanted"):
        te.kernels.flash_attention(mask, order="right", batch_size=batch_size)


def test_the_number_of_rows_that_mha_needs():
    one = te.AttentionMask(TokenPositions(jnp.arange(4)), causal=True)
    with pytest.raises(ValueError, match=r"^batch_size: wanted the number of rows of the queries"):
        te.kernels.mha(one, order="full")


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_a_mask_or_an_order(kernel):
    with pytest.raises(TypeError, match=r"^mask: wanted a te.AttentionMask, got an array bool"):
        KERNELS[kernel](te.causal_mask(4), "right")
    mask = te.AttentionMask(RIGHT, causal=True)
    with pytest.raises(ValueError, match=r"^order: wanted one of 'full', 'right', 'packed', got"):
        KERNELS[kernel](mask, "sorted")


def test_tiles_that_are_too_many_for_a_tpu(monkeypatch):
    monkeypatch.setattr(splash_attention, "SCALAR_MEMORY", 7)
    mask = te.AttentionMask(PACKED, causal=True)
    make = functools.partial(te.kernels.splash_kernels, mask, 1, order="packed")
    with pytest.raises(ValueError, match=r"^block_sizes: wanted tiles whose .*, 7 bytes, got 8 by"):
        make()
    make(interpret=True)


def test_shards_and_tiles_that_do_not_divide():
    mask = te.AttentionMask(PACKED, causal=True)
    make = functools.partial(te.kernels.splash_kernels, mask, HEADS, order="packed")
    with pytest.raises(ValueError, match="should divide"):
        make(block_sizes=splash.BlockSizes(block_q=192, block_kv=128))
    with pytest.raises(ValueError, match=r"^head_shards: wanted an int of at least 1, got 0"):
        make(head_shards=0)
    with pytest.raises(TypeError, match=r"^q_seq_shards: wanted a Python int"):
        make(q_seq_shards=2.0)
