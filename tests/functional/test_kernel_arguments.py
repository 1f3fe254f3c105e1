"""Fused kernels with our arguments, in interpret mode, against dense attention with the same rule."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, PartitionSpec

import transformer_embed as te

# jax 0.12 points to another package for the GPU's kernel.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as gpu

BATCH, HEADS, LENGTH, TILE, SIZE = 2, 2, 384, 128, 128
TOLERANCE = 3e-6  # outputs and gradients are of size 1; measured at most 1e-6
BATCHES = {
    "right": te.TokenPositions.from_lengths([200, 384], LENGTH),
    "left": te.TokenPositions.from_lengths([120, 300], LENGTH, padding_side="left"),
    "packed": te.TokenPositions.from_segment_ids(
        np.stack([np.repeat([1, 2, 3, 0], [100, 20, 140, 124]), np.repeat([4, 2], [129, 255])])
    ),
    "ordered": te.TokenPositions.from_ids(
        np.where(np.random.default_rng(0).random((BATCH, LENGTH)) < 0.2, 0, 5), pad_id=0
    ),
    "offset": te.TokenPositions.from_offset([7, 0], LENGTH),
}
RULES = {
    "bidirectional": {"causal": False},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": (90, 0)},
    "causal by its window": {"causal": False, "window": (None, 0)},
    "window": {"causal": False, "window": (20, 130)},
    "window on the right": {"causal": False, "window": (None, 40)},
    "chunk": {"causal": True, "chunk": 50},
    "chunk and window": {"causal": False, "chunk": 77, "window": (30, 5)},
}
WINDOWS = [name for name, rule in RULES.items() if rule.get("window", (None, 0)) != (None, 0)]
FULL = splash.BlockSizes(*[TILE] * 8)
FUSED_BACKWARD = splash.BlockSizes(*[TILE] * 6, use_fused_bwd_kernel=True)


def draws(*shape, seed=0):
    key = jax.random.key(seed)
    return [0.3 * jax.random.normal(each, shape) for each in jax.random.split(key, 4)]


def dense(rule, queries, keys, values):
    """Attention of [B, heads, T, size] with the bool of every pair."""
    precision = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("bhtd,bhsd->bhts", queries, keys, precision=precision)
    weights = jax.nn.softmax(jnp.where(rule.dense(), logits, -1e30))
    return jnp.einsum("bhts,bhsd->bhtd", weights, values, precision=precision)


def check(rule, attend, length=LENGTH):
    """Outputs and gradients at tokens; outputs at padding only have to be finite."""
    *heads, cotangent = draws(BATCH, HEADS, length, SIZE)
    is_token = rule.queries.padding_mask[:, None, :, None]

    def loss(attend, *heads):
        outputs = attend(*heads)
        return jnp.where(is_token, outputs * cotangent, 0).sum(), outputs

    both = [
        jax.jit(jax.grad(functools.partial(loss, function), (0, 1, 2), has_aux=True))(*heads)
        for function in (attend, functools.partial(dense, rule))
    ]
    (gradients, outputs), (expected_gradients, expected) = both
    assert jnp.isfinite(outputs).all()
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE)
    close(jnp.where(is_token, outputs, 0), jnp.where(is_token, expected, 0))
    jax.tree.map(close, gradients, expected_gradients)


def splash_attend(rule, queries, keys, values, make=splash.make_splash_mha):
    mask, segment_ids = te.KernelArguments(rule, BATCH).splash_attention(HEADS)
    kernel = make(mask, head_shards=1, q_seq_shards=1, block_sizes=FULL, interpret=True)
    return jax.vmap(lambda *row: kernel(*row[:3], segment_ids=row[3]))(
        queries, keys, values, segment_ids
    )


def skipping_attend(rule, queries, keys, values, block_sizes=FULL):
    kernels, segment_ids = te.KernelArguments(rule, BATCH).splash_kernels(
        HEADS, block_sizes=block_sizes, interpret=True
    )
    return jax.vmap(lambda kernel, *row: kernel(*row[:3], segment_ids=row[3]))(
        kernels, queries, keys, values, segment_ids
    )


def flash_attend(rule, *heads):
    return flash_attention.flash_attention(
        *heads, **te.KernelArguments(rule, BATCH).flash_attention()
    )


def mha_attend(rule, *heads):
    options = te.KernelArguments(rule, BATCH).mha()
    outputs = gpu.mha(*(array.swapaxes(1, 2) for array in heads), interpret=True, **options)
    return outputs.swapaxes(1, 2)


def dot_product_attend(rule, *heads):
    options = te.KernelArguments(rule, BATCH).dot_product_attention()
    outputs = jax.nn.dot_product_attention(
        *(array.swapaxes(1, 2) for array in heads), scale=1.0, **options
    )
    return outputs.swapaxes(1, 2)


def expressible(batches, rules=tuple(RULES)):
    """Pairs of a batch and a rule; padding between tokens leaves no window in row indices."""
    return [
        pytest.param(BATCHES[batch], RULES[rule], id=f"{batch}-{rule}")
        for batch in batches
        for rule in rules
        if (batch, rule) not in {("ordered", window) for window in WINDOWS}
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "rule"), expressible(BATCHES, ["causal", "window", "chunk and window"])
)
def test_splash_attention_applies_the_rule(tokens, rule):
    rule = te.AttentionMask(tokens, **rule)
    check(rule, functools.partial(splash_attend, rule))


@pytest.mark.slow
@pytest.mark.parametrize("block_sizes", [FULL, FUSED_BACKWARD], ids=["three", "two"])
@pytest.mark.parametrize(
    ("tokens", "rule"),
    expressible(["packed", "left"], ["bidirectional", "causal window"]),
)
def test_splash_attention_skips_tiles_of_other_documents(tokens, rule, block_sizes):
    rule = te.AttentionMask(tokens, **rule)
    check(rule, functools.partial(skipping_attend, rule, block_sizes=block_sizes))


NO_WINDOW = [name for name in RULES if name not in WINDOWS]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "rule"), expressible(["packed", "left"], NO_WINDOW))
def test_flash_attention_of_tpus_applies_the_rule(tokens, rule, monkeypatch):
    # It has no argument for the interpreter. (pltpu.force_tpu_interpret_mode can deadlock.)
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    rule = te.AttentionMask(tokens, **rule)
    check(rule, functools.partial(flash_attend, rule))


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "rule"), expressible(["packed", "left"], NO_WINDOW))
def test_mha_of_gpus_applies_the_rule(tokens, rule):
    rule = te.AttentionMask(tokens, **rule)
    check(rule, functools.partial(mha_attend, rule))


@pytest.mark.parametrize(
    ("tokens", "rule"),
    expressible(["right", "offset"], [name for name in RULES if "chunk" not in name]),
)
def test_dot_product_attention_applies_the_rule_without_a_mask(tokens, rule):
    rule = te.AttentionMask(tokens, **rule)
    check(rule, functools.partial(dot_product_attend, rule))


@pytest.mark.parametrize("window", [(20, 130), (None, 40), (9, None)])
def test_a_window_that_is_not_causal_never_comes_alone(window):
    """jax 0.6.1 ignores it then."""
    rule = te.AttentionMask(te.TokenPositions.from_offset([0, 7], 9), causal=False, window=window)
    options = te.KernelArguments(rule).dot_product_attention()
    assert options["query_seq_lengths"].tolist() == [9, 9]
    assert options["key_value_seq_lengths"].tolist() == [9, 9]


def test_cudnn_gets_no_window_to_the_right_of_a_causal_rule():
    for window in ((5, 0), (5, None), (5, 7)):
        rule = te.AttentionMask(BATCHES["right"], causal=True, window=window)
        assert te.KernelArguments(rule).dot_product_attention()["local_window_size"] == (5, 0)
    rule = te.AttentionMask(BATCHES["right"], causal=False, window=(5, 0))
    assert te.KernelArguments(rule).dot_product_attention()["is_causal"]


def test_queries_without_segments_see_the_tokens_of_every_segment():
    keys = te.TokenPositions.from_segment_ids(np.repeat([[1, 2, 0]], 128, axis=1))
    rule = te.AttentionMask(te.TokenPositions(jnp.arange(LENGTH)), keys, causal=False)
    check(rule, functools.partial(splash_attend, rule))


def test_attention_to_another_sequence():
    target, source = BATCHES["right"], te.TokenPositions.from_lengths([200, 17], 256)
    rule = te.AttentionMask(target, source, causal=False)
    queries = draws(BATCH, HEADS, LENGTH, SIZE)[0]
    keys, values = draws(BATCH, HEADS, 256, SIZE, seed=1)[:2]
    is_token = target.padding_mask[:, None, :, None]
    expected = dense(rule, queries, keys, values)
    for attend in (splash_attend, skipping_attend, dot_product_attend):
        outputs = attend(rule, queries, keys, values)
        error = jnp.where(is_token, outputs - expected, 0)
        assert jnp.abs(error).max() < TOLERANCE, attend
        assert jnp.isfinite(outputs).all()


@pytest.mark.parametrize("tokens", [1, 3], ids=["one query", "three queries"])
def test_decoding_with_the_arguments_for_cudnn(tokens):
    """is_causal aligns queries with the first keys, so it is never passed for a cache."""
    step = te.TokenPositions.from_offset([5, 200], tokens)
    cache = te.TokenPositions.from_lengths([6, 203], LENGTH)
    rule = te.AttentionMask(step, cache, causal=True)
    queries = draws(BATCH, HEADS, tokens, SIZE)[0]
    keys, values = draws(BATCH, HEADS, LENGTH, SIZE, seed=1)[:2]
    if tokens > 1:
        with pytest.raises(ValueError, match=r"keys: wanted None \(self-attention\)"):
            dot_product_attend(rule, queries, keys, values)
        return
    outputs = dot_product_attend(rule, queries, keys, values)
    assert jnp.abs(outputs - dense(rule, queries, keys, values)).max() < TOLERANCE


def test_a_prefix_known_while_tracing():
    blocks = np.where(np.arange(LENGTH) < 200, 0, -1)
    rule = te.AttentionMask(BATCHES["packed"].with_block_ids(blocks), causal=True)
    check(rule, functools.partial(splash_attend, rule))
    check(rule, functools.partial(skipping_attend, rule))
    images = np.repeat([-1, 4, -1, 7, -1, 9], 64)
    rule = te.AttentionMask(BATCHES["right"].with_block_ids(images), causal=True, window=(100, 0))
    check(rule, functools.partial(splash_attend, rule))


def test_the_static_mask_of_splash_attention_is_the_rule_in_any_tile():
    for window in ((None, 0), (90, 0), (20, 130), (None, 40), (7, None)):
        rule = te.AttentionMask(BATCHES["offset"], causal=False, window=window)
        mask = te.KernelArguments(rule).splash_attention(1)[0].masks[0]
        whole = np.asarray(rule.dense()[0, 0])
        for tile in (32, 96, 128):
            for start in np.ndindex(LENGTH // tile, LENGTH // tile):
                cut = tuple(slice(tile * index, tile * (index + 1)) for index in start)
                np.testing.assert_array_equal(mask[cut], whole[cut])


def test_under_jit_the_rule_may_be_an_argument_or_be_made_inside():
    heads = draws(BATCH, HEADS, LENGTH, SIZE)[:3]
    rule = te.AttentionMask(BATCHES["packed"], causal=True, window=(90, 0))
    expected = dense(rule, *heads)
    is_token = rule.queries.padding_mask[:, None, :, None]

    @jax.jit
    def inside(segment_ids, *heads):
        tokens = te.TokenPositions.from_segment_ids(segment_ids)
        return skipping_attend(te.AttentionMask(tokens, causal=True, window=(90, 0)), *heads)

    for outputs in (
        jax.jit(skipping_attend)(rule, *heads),
        inside(BATCHES["packed"].segment_ids, *heads),
    ):
        assert jnp.abs(jnp.where(is_token, outputs - expected, 0)).max() < TOLERANCE


@pytest.mark.slow
def test_splash_attention_on_a_mesh():
    """Heads and queries are sharded; keys are whole on each device."""
    shards = 2, 3
    mesh = Mesh(
        np.array(jax.devices()[: shards[0] * shards[1]]).reshape(shards), ("heads", "length")
    )
    rule = te.AttentionMask(BATCHES["packed"], causal=True, window=(90, 0))
    mask, segment_ids = te.KernelArguments(rule).splash_attention(HEADS)
    kernel = splash.make_splash_mha(
        mask, head_shards=shards[0], q_seq_shards=shards[1], block_sizes=FULL, interpret=True
    )
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("heads", "length"))
    queries, keys = PartitionSpec(None, "heads", "length"), PartitionSpec(None, "heads")
    ids = splash.SegmentIds(PartitionSpec(None, "length"), PartitionSpec())
    attend = jax.shard_map(
        lambda kernel, q, k, v, ids: jax.vmap(
            lambda q, k, v, ids: kernel(q, k, v, segment_ids=ids)
        )(q, k, v, ids),
        mesh=mesh,
        in_specs=(kernel.manual_sharding_spec(sharding), queries, keys, keys, ids),
        out_specs=queries,
        check_vma=False,
    )
    arrays = draws(BATCH, HEADS, LENGTH, SIZE)[:3]
    error = attend(kernel, *arrays, segment_ids) - dense(rule, *arrays)
    is_token = rule.queries.padding_mask[:, None, :, None]
    assert jnp.abs(jnp.where(is_token, error, 0)).max() < TOLERANCE


def test_skipped_tiles_are_those_in_which_no_pair_may_attend():
    rule = te.AttentionMask(BATCHES["packed"], causal=True)
    kernels, _ = te.KernelArguments(rule).splash_kernels(HEADS, block_sizes=FULL, interpret=True)
    kinds = np.array(rule.tile_kinds((TILE, TILE)))
    kinds[:, range(3), range(3)] = 1  # a row of tiles always runs one
    for info, by_keys in ((kernels.fwd_mask_info, False), (kernels.dkv_mask_info, True)):
        for row in range(BATCH):
            runs = np.asarray(info.block_mask[row, 0]) > 0
            loads = np.asarray(info.data_next[row, 0])
            ran = {(loads[i, j], j) if by_keys else (i, loads[i, j]) for i, j in np.argwhere(runs)}
            assert ran == {tuple(index) for index in np.argwhere(kinds[row] > 0)}


@settings(max_examples=40)
@given(st.data())
def test_segments_and_row_indices_say_the_rule_for_random_batches(data):
    """What splash attention computes from its mask and segment ids is the rule at all tokens."""
    length = 48
    counts = st.lists(st.integers(0, length), min_size=2, max_size=2)
    kind = data.draw(st.sampled_from(["right", "left", "packed", "ordered", "offset"]))
    start = data.draw(st.integers(-5, 60))
    if kind in ("right", "left"):
        tokens = te.TokenPositions.from_lengths(data.draw(counts), length, padding_side=kind)
    elif kind == "offset":
        tokens = te.TokenPositions.from_offset(data.draw(st.integers(-9, 10**9)), length)
    elif kind == "ordered":
        ids = data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        tokens = te.TokenPositions.from_ids([ids], pad_id=0, start=start)
    else:
        cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=6)))
        numbers = data.draw(st.permutations(range(len(cuts) + 1)))
        tokens = te.TokenPositions.from_segment_ids(
            np.repeat(numbers, np.diff([0, *cuts, length]))[None]
        )
    limits = st.none() | st.integers(0, 50)
    window = None if kind == "ordered" else data.draw(st.none() | st.tuples(limits, limits))
    chunk = data.draw(st.none() | st.integers(1, 30))
    rule = te.AttentionMask(tokens, causal=data.draw(st.booleans()), window=window, chunk=chunk)
    mask, segment_ids = te.KernelArguments(rule).splash_attention(1)
    said = np.asarray(mask.masks[0][:length, :length])[None]
    if segment_ids is not None:
        said = said & np.asarray(segment_ids.q[:, :, None] == segment_ids.kv[:, None, :])
    whole = np.broadcast_to(rule.dense()[:, 0], (tokens.positions.shape[0], length, length))
    is_token = np.asarray(tokens.padding_mask)
    assert (np.where(is_token[:, :, None], said, False) == whole).all()


BY_HAND = te.TokenPositions(jnp.arange(LENGTH)[::-1])
PREFIX = BATCHES["right"].with_block_ids(np.where(np.arange(LENGTH) < 9, 0, -1))
STEP = te.TokenPositions.from_offset(3, 2)


def refused(name, tokens, keys=None, **rule):
    return te.AttentionMask(tokens, keys, **rule), name


KERNELS = {
    "splash": lambda arguments: arguments.splash_attention(2),
    "flash": te.KernelArguments.flash_attention,
    "mha": te.KernelArguments.mha,
    "dot": te.KernelArguments.dot_product_attention,
}
REFUSED = [
    ("splash flash mha dot", *refused("queries", BY_HAND, causal=True)),
    ("splash flash mha", *refused("queries", BATCHES["ordered"], causal=False, window=(3, 3))),
    ("splash flash mha dot", *refused("keys", STEP, BATCHES["right"], causal=True)),
    ("flash mha", *refused("window", BATCHES["right"], causal=True, window=(3, 0))),
    ("flash mha dot", *refused("block_ids", PREFIX, causal=True)),
    ("splash", *refused("chunk", PREFIX, causal=True, chunk=5)),
    ("splash", *refused("chunk", PREFIX, causal=False, chunk=5)),
    ("dot", *refused("chunk", BATCHES["right"], causal=True, chunk=5)),
    ("dot", *refused("queries", BATCHES["packed"], causal=True)),
    ("dot", *refused("queries", BATCHES["left"], causal=True)),
    ("dot", *refused("queries", BATCHES["ordered"], causal=False)),
    ("mha", *refused("keys", BATCHES["right"], BATCHES["left"], causal=False)),
    ("dot", *refused("keys", te.TokenPositions([9]), BY_HAND, causal=True)),
    (
        "dot",
        *refused(
            "window",
            te.TokenPositions.from_offset(9, 1),
            BATCHES["right"],
            causal=True,
            window=(3, 0),
        ),
    ),
]


@pytest.mark.parametrize(
    ("kernel", "rule", "name"),
    [
        pytest.param(kernel, rule, name, id=f"{kernel}-{name}-{number}")
        for number, (kernels, rule, name) in enumerate(REFUSED)
        for kernel in kernels.split()
    ],
)
def test_what_a_kernel_cannot_say_is_refused_with_the_way_out(kernel, rule, name):
    with pytest.raises(ValueError, match=rf"^{name}: wanted .* got .*rule\.dense\(\)"):
        KERNELS[kernel](te.KernelArguments(rule, BATCH))


def test_block_ids_that_splash_attention_cannot_take():
    traced = jax.jit(
        lambda ids: te.KernelArguments(
            te.AttentionMask(BATCHES["right"].with_block_ids(ids), causal=True)
        ).splash_attention(2)[1]
    )
    with pytest.raises(ValueError, match=r"^block_ids: wanted values known while tracing"):
        traced(jnp.zeros(LENGTH, int))
    rows = jnp.zeros((BATCH, LENGTH), int).at[1, 4].set(-1)
    rule = te.AttentionMask(BATCHES["right"].with_block_ids(rows), causal=True)
    with pytest.raises(
        ValueError, match=r"^block_ids: wanted values known while tracing, the same in every row"
    ):
        te.KernelArguments(rule).splash_attention(2)


@pytest.mark.parametrize("batch_size", [3, 0, 2.0], ids=str)
def test_a_batch_size_that_is_not_the_rules(batch_size):
    rule = te.AttentionMask(BATCHES["right"], causal=True)
    error = TypeError if isinstance(batch_size, float) else ValueError
    with pytest.raises(error, match=r"^batch_size: wanted"):
        te.KernelArguments(rule, batch_size)


def test_what_is_not_a_rule():
    mask = te.causal_mask(4)
    with pytest.raises(TypeError, match=r"^rule: wanted a te.AttentionMask, got an array bool"):
        te.KernelArguments(mask)


def test_the_number_of_rows_that_mha_needs():
    rule = te.AttentionMask(BATCHES["offset"], causal=True)
    with pytest.raises(ValueError, match=r"^batch_size: wanted the number of rows of the queries"):
        te.KernelArguments(rule).mha()


def test_a_tile_that_does_not_divide_the_length():
    sizes = splash.BlockSizes(block_q=256, block_kv=128)
    rule = te.AttentionMask(BATCHES["packed"], causal=True)
    with pytest.raises(ValueError, match="should divide"):
        te.KernelArguments(rule).splash_kernels(HEADS, block_sizes=sizes)
