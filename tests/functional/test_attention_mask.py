"""The rule of a mask and its forms: tiles and kinds of tiles against the dense mask."""

import dataclasses
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

import transformer_embed as te

LENGTH, BATCH = 24, 3
TILES = [(4, 4), (8, 3), (6, 12)]
RULES = [
    {"causal": causal, "window": window, "chunk": chunk}
    for causal, window, chunk in [
        (True, None, None),
        (False, None, None),
        (True, (5, 0), None),
        (True, None, 7),
        (False, (2, 6), 5),
        (True, (3, None), 4),
        (False, (None, 4), None),
    ]
]
quick = hypothesis.settings(max_examples=40)


def packed(random, batch, length):
    """Rows of documents of any numbers, with padding before, between and after them."""
    rows = np.zeros((batch, length), np.int32)
    for row in rows:
        rises = random.random() < 0.5
        numbers = np.sort(random.permutation(40) - 20) if rises else random.permutation(40) - 20
        start = random.integers(0, 5)
        for number in numbers[numbers != 0]:
            row[start : start + random.integers(1, length // 2)] = number
            start = np.flatnonzero(row)[-1] + 1 if row.any() else start + 1
            start += random.integers(0, 4) if random.random() < 0.3 else 0
    return rows


def some_tokens(kind, random, length=LENGTH, batch=BATCH):
    match kind:
        case "packed":
            return te.TokenPositions.from_segment_ids(packed(random, batch, length))
        case "left" | "right":
            lengths = random.integers(0, length + 1, batch)
            return te.TokenPositions.from_lengths(lengths, length, padding_side=kind)
        case "ids":
            return te.TokenPositions.from_ids(random.integers(0, 4, (batch, length)), pad_id=0)
        case "offset":
            return te.TokenPositions.from_offset(random.integers(0, 50, batch), length)
        case "by hand":
            positions, segments = random.integers(-9, 9, (2, batch, length))
            return te.TokenPositions(positions, segments // 5)
        case "runs by hand":
            # Positions that rise by one, but segments that come back and positions that jump.
            segments = np.sort(random.integers(0, 4, (batch, length)))
            positions = np.cumsum(random.integers(0, 20, (batch, length)) != 0, axis=1)
            return te.TokenPositions(positions, np.where(segments == 3, 1, segments))


EXACT = ["packed", "left", "right", "ids", "offset"]
KINDS = [*EXACT, "by hand", "runs by hand"]


def full(mask, queries=LENGTH, keys=LENGTH):
    dense = np.asarray(mask.dense())
    return np.broadcast_to(dense[:, 0], (dense.shape[0], queries, keys))


def kinds_of(dense, tile):
    """0 none, 1 some, 2 all, by looking at every pair."""
    batch, queries, keys = dense.shape
    tiles = dense.reshape(batch, queries // tile[0], tile[0], keys // tile[1], tile[1])
    return tiles.any((2, 4)).astype(int) + tiles.all((2, 4))


def expect_never_wrong(kinds, dense, tile):
    """Tiles that are not as the dense mask has them are "some"; returns how many are."""
    expected = np.broadcast_to(kinds_of(dense, tile), kinds.shape)
    assert kinds.dtype == jnp.int8
    loose = np.asarray(kinds) != expected
    np.testing.assert_array_equal(np.asarray(kinds)[loose], 1)
    np.testing.assert_array_equal((np.asarray(kinds) == 2), expected == 2)
    return loose.sum()


masks = st.tuples(
    st.integers(0, 2**32), st.sampled_from(KINDS), st.sampled_from(RULES), st.sampled_from(TILES)
)


@pytest.mark.slow
@quick
@hypothesis.given(masks)
def test_kinds_of_tiles_in_self_attention(case):
    seed, kind, rule, tile = case
    mask = te.AttentionMask(some_tokens(kind, np.random.default_rng(seed)), **rule)
    loose = expect_never_wrong(mask.tile_kinds(tile), full(mask), tile)
    assert loose == 0 or kind not in EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_kinds_are_exact_for_many_packed_batches(rule):
    """Windows, chunks and padding together; the hypothesis test sees fewer batches."""
    for seed, kind in itertools.product(range(12), ["packed", "left", "ids"]):
        tokens = some_tokens(kind, np.random.default_rng(seed), batch=8)
        mask = te.AttentionMask(tokens, **rule)
        assert expect_never_wrong(mask.tile_kinds((4, 4)), full(mask), (4, 4)) == 0


@pytest.mark.parametrize("start", [3, -5])
def test_kinds_are_exact_from_any_first_position(start):
    """Chunks do not begin where the documents do."""
    for seed in range(4):
        rows = packed(np.random.default_rng(seed), 8, LENGTH)
        tokens = te.TokenPositions.from_segment_ids(rows)
        tokens = te.TokenPositions(tokens.positions + start, tokens.segment_ids)
        mask = te.AttentionMask(tokens, causal=False, window=(2, 6), chunk=5)
        assert expect_never_wrong(mask.tile_kinds((3, 3)), full(mask), (3, 3)) == 0


@pytest.mark.slow
@quick
@hypothesis.given(masks, st.sampled_from(KINDS))
def test_kinds_of_tiles_between_two_sequences(case, other):
    seed, kind, rule, tile = case
    random = np.random.default_rng(seed)
    queries = some_tokens(kind, random, batch=random.choice([1, BATCH]))
    mask = te.AttentionMask(queries, some_tokens(other, random, 36), **rule)
    loose = expect_never_wrong(mask.tile_kinds(tile), full(mask, keys=36), tile)
    assert loose == 0 or {kind, other} & {"packed", "by hand", "runs by hand"}


@pytest.mark.slow
@quick
@hypothesis.given(masks)
def test_kinds_of_tiles_with_blocks_are_never_wrong(case):
    seed, kind, rule, tile = case
    random = np.random.default_rng(seed)
    tokens = some_tokens(kind, random)
    blocks = np.sort(random.integers(-1, 3, (BATCH, LENGTH)))[:, :: random.choice([1, -1])]
    mask = te.AttentionMask(tokens.with_block_ids(blocks), **rule)
    kinds, dense = np.asarray(mask.tile_kinds(tile)), full(mask)
    expected = np.broadcast_to(kinds_of(dense, tile), kinds.shape)
    np.testing.assert_array_equal(kinds[kinds != expected], 1)


def test_kinds_of_a_prefix_are_exact():
    tokens = te.TokenPositions.from_lengths([24, 20, 13], LENGTH)
    is_prefix = np.arange(LENGTH) < np.array([[3], [8], [13]])
    mask = te.AttentionMask(tokens.with_block_ids(np.where(is_prefix, 0, -1)), causal=True)
    for tile in [(4, 4), (3, 3), (6, 12)]:
        np.testing.assert_array_equal(mask.tile_kinds(tile), kinds_of(full(mask), tile))


def test_tiles_by_hand_that_are_loose_are_few():
    """Positions in no order: how many tiles say "some" although no pair may attend."""
    loose = tiles = 0
    for seed in range(20):
        tokens = some_tokens("by hand", np.random.default_rng(seed))
        mask = te.AttentionMask(tokens, causal=True, window=(5, 0))
        loose += expect_never_wrong(mask.tile_kinds((4, 4)), full(mask), (4, 4))
        tiles += 36 * BATCH
    assert loose / tiles < 0.35


@pytest.mark.parametrize(
    "tokens",
    [
        te.TokenPositions([2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1], [1, 1, 1, 1]),
        te.TokenPositions([0, 1, 0, 1], [1, 1, 0, 1]),
        te.TokenPositions([0, 1, 0, 1], [1, 1, 2, 1]),
        te.TokenPositions([0, 1, 3, 4], [1, 1, 1, 1]),
        te.TokenPositions([3, 2, 1, 0], [1, 1, 1, 1]),
        te.TokenPositions([0, 1, 2, 0], [2**31 - 1] * 3 + [-(2**31)]),
        te.TokenPositions([0, 1, 2, 3], [-1, 1, -1, 1]),
    ],
    ids=["wrap", "gap", "back", "jump", "fall", "ends of int32", "take turns"],
)
@pytest.mark.parametrize("rule", RULES[:4], ids=str)
def test_kinds_rely_on_no_order(tokens, rule):
    mask = te.AttentionMask(tokens, **rule)
    for tile in [(1, 1), (2, 1), (2, 2)]:
        expect_never_wrong(mask.tile_kinds(tile), full(mask, 4, 4), tile)


def test_segments_that_come_back_on_a_device_are_found():
    """`from_segment_ids` can only refuse them on the host."""
    tokens = jax.jit(te.TokenPositions.from_segment_ids)(np.array([[1, 1, 2, 2, 1, 1]]))
    mask = te.AttentionMask(tokens, causal=True, window=(1, 0))
    expect_never_wrong(mask.tile_kinds((2, 2)), full(mask, 6, 6), (2, 2))


def test_kinds_of_no_tokens():
    for tokens in (te.TokenPositions([]), te.TokenPositions.from_lengths([0], 0)):
        assert te.AttentionMask(tokens, causal=True).tile_kinds((4, 4)).shape == (1, 0, 0)


def test_kinds_of_tiles_without_a_rule():
    tokens = te.TokenPositions(np.arange(6))
    assert te.AttentionMask(tokens, causal=False).tile_kinds((2, 3)).tolist() == [[[2, 2]] * 3]
    keys = te.TokenPositions(np.arange(4), [[0, 0, 0, 0], [1, 1, 1, 0]])
    kinds = te.AttentionMask(tokens, keys, causal=False).tile_kinds((2, 2))
    assert kinds.tolist() == [[[0, 0]] * 3, [[2, 1]] * 3]


@pytest.mark.slow
@quick
@hypothesis.given(masks, st.sampled_from([None, *KINDS]), st.data())
def test_a_tile_is_that_of_the_dense_mask(case, other, data):
    seed, kind, rule, tile = case
    random = np.random.default_rng(seed)
    queries = some_tokens(kind, random)
    keys = None if other is None else some_tokens(other, random)
    mask = te.AttentionMask(queries, keys, **rule)
    first, second = (data.draw(st.integers(0, LENGTH - size)) for size in tile)
    expected = full(mask)[:, first : first + tile[0], second : second + tile[1]]
    for starts in ((first, second), (jnp.int32(first), jnp.int32(second))):
        got = mask.tile(*starts, tile)
        assert got.shape == (got.shape[0], *tile)
        np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))


def test_a_tile_in_a_loop_is_compiled_once_and_outside_is_empty():
    tokens = some_tokens("packed", np.random.default_rng(0))
    mask = te.AttentionMask(tokens, causal=True)
    tile = jax.jit(lambda mask, start: mask.tile(start, 4, (8, 6)))
    for start in range(LENGTH - 8 + 1):
        np.testing.assert_array_equal(
            tile(mask, start), full(mask)[:, start : start + 8, 4 : 4 + 6]
        )
    assert tile._cache_size() == 1
    for start in (-1, LENGTH - 7, 2**31 - 1):
        assert not tile(mask, start).any()


@pytest.mark.parametrize("rule", RULES[:5], ids=str)
def test_a_pallas_kernel_makes_its_tile_of_what_it_loads(rule):
    tokens = some_tokens("packed", np.random.default_rng(1))
    mask = te.AttentionMask(tokens, **rule)
    rows, columns = 8, 6

    def kernel(query_positions, query_segments, key_positions, key_segments, out):
        queries = te.TokenPositions(query_positions[...], query_segments[...])
        keys = te.TokenPositions(key_positions[...], key_segments[...])
        out[...] = te.AttentionMask(queries, keys, **rule).tile(0, 0, (rows, columns))

    of_queries = pl.BlockSpec((1, rows), lambda b, i, j: (b, i))
    of_keys = pl.BlockSpec((1, columns), lambda b, i, j: (b, j))
    got = pl.pallas_call(
        kernel,
        grid=(BATCH, LENGTH // rows, LENGTH // columns),
        in_specs=[of_queries, of_queries, of_keys, of_keys],
        out_specs=pl.BlockSpec((1, rows, columns), lambda b, i, j: (b, i, j)),
        out_shape=jax.ShapeDtypeStruct((BATCH, LENGTH, LENGTH), jnp.bool_),
        interpret=True,
    )(*(tokens.positions, tokens.segment_ids) * 2)
    np.testing.assert_array_equal(got, full(mask))


def test_a_pallas_kernel_takes_a_tile_at_an_offset_of_the_grid():
    tokens = some_tokens("left", np.random.default_rng(1), batch=1)
    mask = te.AttentionMask(tokens, causal=True)

    def kernel(positions, segments, out):
        whole = te.AttentionMask(
            te.TokenPositions(positions[...], segments[...]), causal=mask.causal
        )
        starts = (8 * pl.program_id(0), 6 * pl.program_id(1))
        out[...] = whole.tile(*starts, (8, 6))

    got = pl.pallas_call(
        kernel,
        grid=(LENGTH // 8, LENGTH // 6),
        out_specs=pl.BlockSpec((1, 8, 6), lambda i, j: (0, i, j)),
        out_shape=jax.ShapeDtypeStruct((1, LENGTH, LENGTH), jnp.bool_),
        interpret=True,
    )(tokens.positions, tokens.segment_ids)
    np.testing.assert_array_equal(got, full(mask))


# --- The rule as a tree

TOKENS = te.TokenPositions.from_segment_ids([[1, 1, 1, 2], [1, 2, 2, 0]])
MASK = te.AttentionMask(TOKENS, causal=True, window=(1, None), chunk=3)


def forms(mask):
    return mask.dense(), mask.tile(1, 0, (2, 2)), mask.tile_kinds((2, 2))


def expect_same(got, expected=None):
    for ours, theirs in zip(got, expected or forms(MASK), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_it_passes_through_jit_scan_and_grad():
    expect_same(jax.jit(forms)(MASK))
    carried, _ = jax.lax.scan(lambda mask, _: (mask, None), MASK, length=2)
    expect_same(forms(carried))
    loss = lambda x, mask: jnp.where(mask.dense(), x, 0).sum()
    np.testing.assert_array_equal(
        jax.grad(loss)(jnp.ones((2, 1, 4, 4)), MASK), MASK.dense().astype(float)
    )


def test_it_passes_through_vmap_row_by_row():
    for ours, theirs in zip(jax.vmap(forms)(MASK), forms(MASK), strict=True):
        np.testing.assert_array_equal(np.reshape(ours, theirs.shape), theirs)


def test_it_passes_through_export():
    exported = jax.export.export(jax.jit(forms))(MASK)
    loaded = jax.export.deserialize(exported.serialize())
    expect_same(loaded.call(MASK))
    same = jax.export.export(jax.jit(lambda mask: mask))(MASK)
    returned = jax.export.deserialize(same.serialize()).call(MASK)
    assert (returned.window, returned.chunk) == ((1, None), 3)


def test_it_is_sharded_over_the_batch():
    mesh = jax.make_mesh((2,), ("batch",))
    sharding = NamedSharding(mesh, PartitionSpec("batch"))
    placed = jax.device_put(MASK, sharding)
    assert placed.queries.positions.sharding == sharding
    expect_same(jax.jit(forms)(placed))
    in_shards = jax.jit(
        jax.shard_map(
            forms, mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec("batch")
        )
    )
    expect_same(in_shards(placed))


def test_trees_of_anything_are_not_checked():
    shapes = jax.eval_shape(lambda: MASK)
    assert jax.eval_shape(lambda mask: mask.dense(), shapes).shape == (2, 1, 4, 4)
    assert jax.tree.leaves(jax.tree.map(lambda _: None, MASK)) == []
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(MASK)]
    assert names == [".queries.positions", ".queries.segment_ids"]


def test_queries_as_keys_are_self_attention():
    assert te.AttentionMask(TOKENS, TOKENS, causal=True).keys is None
    assert dataclasses.replace(MASK, keys=TOKENS).keys is None


def test_queries_without_segments_see_every_token():
    keys = te.TokenPositions(np.arange(4), [1, 2, 0, 1])
    mask = te.AttentionMask(te.TokenPositions([3, 1]), keys, causal=True)
    assert mask.dense()[0, 0].astype(int).tolist() == [[1, 1, 0, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            TypeError,
            "queries: wanted a TokenPositions, from te.TokenPositions.from_ids(ids, pad_id=0) for example, got an array int64[3]",
            lambda: te.AttentionMask(np.arange(3), causal=True),
        ),
        (
            TypeError,
            "keys: wanted a TokenPositions, from te.TokenPositions.from_ids(ids, pad_id=0) for example, got list [0, 1]",
            lambda: te.AttentionMask(TOKENS, [0, 1], causal=True),
        ),
        (
            ValueError,
            "queries.positions and queries.segment_ids and keys.positions and keys.segment_ids: wanted the same number of rows, or 1, got 2 and 2 and 3 and 3",
            lambda: te.AttentionMask(
                TOKENS, te.TokenPositions.from_lengths([1, 2, 3], 4), causal=True
            ),
        ),
        (
            ValueError,
            "keys.segment_ids: wanted an array, since queries.segment_ids is given, got None",
            lambda: te.AttentionMask(TOKENS, te.TokenPositions([0, 1]), causal=True),
        ),
        (
            ValueError,
            "keys.block_ids: wanted an array, since queries.block_ids is given, got None",
            lambda: te.AttentionMask(TOKENS.with_block_ids([0] * 4), MASK.queries, causal=True),
        ),
        (
            ValueError,
            "queries.block_ids: wanted an array, since keys.block_ids is given, got None",
            lambda: te.AttentionMask(TOKENS, TOKENS.with_block_ids([0] * 4), causal=True),
        ),
        (
            ValueError,
            "shape: wanted a divisor of the number of queries, 4 (pad the batch to a multiple), got 3",
            lambda: MASK.tile_kinds((3, 2)),
        ),
        (
            ValueError,
            "shape: wanted a divisor of the number of keys, 4 (pad the batch to a multiple), got 8",
            lambda: MASK.tile_kinds((2, 8)),
        ),
        (
            TypeError,
            "shape[0]: wanted a Python int, got float 2.0",
            lambda: MASK.tile_kinds((2.0, 2)),
        ),
        (TypeError, "shape: wanted a sequence, got int 2", lambda: MASK.tile_kinds(2)),
        (
            ValueError,
            "shape: wanted two values, got (2,)",
            lambda: MASK.tile_kinds((2,)),
        ),
        (
            ValueError,
            "shape[0]: wanted an int of at most 2147483647, got 2147483648",
            lambda: MASK.tile_kinds((2**31, 2)),
        ),
        (
            ValueError,
            "query_start: wanted integers inside the mask, for a tile of (2, 2), 0..2, got 3",
            lambda: MASK.tile(3, 0, (2, 2)),
        ),
        (
            ValueError,
            "key_start: wanted integers inside the mask, for a tile of (2, 8), 0..-4, got 0",
            lambda: MASK.tile(0, 0, (2, 8)),
        ),
        (
            TypeError,
            "key_start: wanted an integer dtype, got float64",
            lambda: MASK.tile(0, 0.5, (2, 2)),
        ),
    ],
)
def test_bad_arguments_raise_errors(kind, message, call):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


# --- Biases of a tile


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(
    "bias",
    [
        lambda queries, keys: te.alibi_bias(queries, keys, num_heads=3),
        lambda queries, keys: te.alibi_bias(queries, keys, num_heads=3, symmetric=True),
        te.relative_position_buckets,
        lambda queries, keys: te.relative_position_buckets(queries, keys, bidirectional=False),
    ],
    ids=["alibi", "symmetric alibi", "buckets", "causal buckets"],
)
def test_a_bias_of_a_tile_is_the_tile_of_the_bias(kind, bias):
    positions = some_tokens(kind, np.random.default_rng(0)).positions
    whole = bias(positions, positions)
    tile = bias(positions[:, 8:16], positions[:, 3:9])
    np.testing.assert_array_equal(tile, whole[..., 8:16, 3:9])
