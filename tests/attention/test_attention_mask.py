"""The rule of a mask and its forms: the dense mask, tiles and kinds of tiles against the rule, pair
by pair."""

import dataclasses
import itertools

import haiku as hk
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import EXACT, KINDS, RULES, some_tokens
from cases import few
from compare import equal, near
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import mesh_of, put
from references import allowed_pairs
from refused import each_refused, refused

import transformer_embed as te

TokenPositions, AttentionMask = te.TokenPositions, te.AttentionMask
LENGTH, BATCH = 24, 3
TILES = [(4, 4), (8, 3), (6, 12)]


def by_pairs(mask):
    rule = {name: getattr(mask, name) for name in ("causal", "window", "chunk", "sinks")}
    return allowed_pairs(mask.queries, mask.keys or mask.queries, **rule)


def expect_dense(mask):
    expected = by_pairs(mask)[:, None]
    got = mask.dense()
    assert (got.dtype, got.shape) == (jnp.bool_, expected.shape)
    equal(got, expected)


# --- dense


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_the_dense_mask_is_the_rule_in_the_smallest_shape(rule):
    random = np.random.default_rng(0)
    tokens, others = some_tokens("packed", random), some_tokens("by hand", random)
    blocks = np.sort(random.integers(-2, 3, (BATCH, LENGTH)))
    expect_dense(AttentionMask(tokens, **rule))
    expect_dense(AttentionMask(tokens, others, **rule))
    expect_dense(AttentionMask(others.with_block_ids(blocks), **rule))
    expect_dense(AttentionMask(TokenPositions(np.arange(6)), **rule))
    expect_dense(AttentionMask(TokenPositions([3, 1]), others, **rule))


WINDOWS = [(None, 0), (0, None), (2, 3), (2**31, 2**31), (2**33, 0), (0, 2**33), (None, None)]
FAR = [2**31 - 1, -(2**31), 0, 5, -7]


def test_a_window_of_any_distance_at_any_position():
    tokens = TokenPositions([*range(-3, 4), *FAR])
    masks = [AttentionMask(tokens, causal=False, window=window) for window in WINDOWS]
    compiled = jax.jit(lambda masks: [mask.dense() for mask in masks])
    for mask, got in zip(masks, compiled(masks), strict=True):
        equal(got[:, 0], by_pairs(mask))


@pytest.mark.parametrize(("batch", "length"), [(1, 0), (0, 2)])
def test_no_tokens(batch, length):
    mask = AttentionMask(TokenPositions(np.zeros((batch, length), int)), causal=True)
    assert mask.dense().shape == (batch, 1, length, length)
    assert mask.tile_kinds((1, 1)).shape == (batch, length, length)


# --- kinds of tiles


def expect_kinds(mask, tile, is_exact=False):
    lengths = mask.queries.positions.shape[-1], (mask.keys or mask.queries).positions.shape[-1]
    dense = by_pairs(mask)
    dense = np.broadcast_to(dense, (len(dense), *lengths))
    loose = expect_kinds_of(dense, mask.tile_kinds(tile), tile, is_exact)
    if mask.queries.block_ids is None:
        equal(mask.tile_kinds(tile) == 2, expected_kinds(dense, tile) == 2)
    return loose


def expected_kinds(dense, tile):
    counts = [length // size for length, size in zip(dense.shape[1:], tile, strict=True)]
    tiles = dense.reshape(len(dense), counts[0], tile[0], counts[1], tile[1])
    return tiles.any((2, 4)).astype(int) + tiles.all((2, 4))


def expect_kinds_of(dense, kinds, tile, is_exact=False):
    """A kind is never wrong: other than by the pairs, it may only be "some"."""
    expected = np.broadcast_to(expected_kinds(dense, tile), kinds.shape)
    assert kinds.dtype == jnp.int8
    loose = np.asarray(kinds) != expected
    equal(np.asarray(kinds)[loose], 1)
    assert not (is_exact and loose.any()), (np.asarray(kinds), expected)
    return loose.mean()


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "tile"), few(itertools.product(RULES, TILES), 3))
def test_kinds_of_tiles_are_exact_in_self_attention_and_never_wrong(rule, tile):
    for seed, kind in itertools.product(range(6), KINDS):
        random = np.random.default_rng(seed)
        tokens = some_tokens(kind, random)
        expect_kinds(AttentionMask(tokens, **rule), tile, is_exact=kind in EXACT)
        other = random.choice(KINDS)
        keys = some_tokens(other, random, 36)
        is_exact = not {kind, other} & {"packed", "by hand", "runs by hand"}
        expect_kinds(AttentionMask(tokens, keys, **rule), tile, is_exact)
        blocks = np.sort(random.integers(-1, 3, (BATCH, LENGTH)))[:, :: random.choice([1, -1])]
        expect_kinds(AttentionMask(tokens.with_block_ids(blocks), **rule), tile)


@pytest.mark.slow
def test_kinds_of_a_prefix_are_exact():
    tokens = TokenPositions.from_lengths([24, 20, 13], LENGTH)
    is_prefix = np.arange(LENGTH) < np.array([[3], [8], [13]])
    mask = AttentionMask(tokens.with_block_ids(np.where(is_prefix, 0, -1)), causal=True)
    for tile in [(4, 4), (6, 12)]:
        expect_kinds(mask, tile, is_exact=True)


def test_a_tile_inside_of_a_block_needs_no_mask():
    mask = AttentionMask(
        TokenPositions(np.arange(6)).with_block_ids([0] * 4 + [-1] * 2), causal=True
    )
    equal(mask.tile_kinds((2, 2))[0], [[2, 2, 0], [2, 2, 0], [2, 2, 1]])


def test_tiles_by_hand_that_are_loose_are_few():
    """Positions in no order: how many tiles say "some" although no pair may attend."""
    tokens = [some_tokens("by hand", np.random.default_rng(seed)) for seed in range(20)]
    masks = [AttentionMask(each, causal=True, window=(5, 0)) for each in tokens]
    assert np.mean([expect_kinds(mask, (4, 4)) for mask in masks]) < 0.35


NO_ORDER = [
    ([2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1], [1, 1, 1, 1]),
    ([0, 1, 0, 1], [1, 1, 0, 1]),
    ([0, 1, 0, 0], [1, 1, 0, 1]),
    ([0, 1, 0, 1], [1, 1, 2, 1]),
    ([0, 1, 3, 4], [1, 1, 1, 1]),
    ([3, 2, 1, 0], [1, 1, 1, 1]),
    ([0, 1, 2, 0], [2**31 - 1] * 3 + [-(2**31)]),
    ([0, 1, 2, 3], [-1, 1, -1, 1]),
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [RULES[2], RULES[5]])
def test_kinds_rely_on_no_order(rule):
    for tile, (positions, segment_ids) in itertools.product([(1, 1), (2, 2)], NO_ORDER):
        tokens = TokenPositions(positions, segment_ids=jnp.array(segment_ids))
        expect_kinds(AttentionMask(tokens, **rule), tile)


@pytest.mark.slow
def test_kinds_of_tiles_without_a_rule():
    tokens, segments = TokenPositions(np.arange(6)), [[0, 0, 0, 0], [1, 1, 1, 0]]
    expect_kinds(AttentionMask(tokens, causal=False), (2, 3), is_exact=True)
    keys = TokenPositions(np.arange(4), segment_ids=segments)
    expect_kinds(AttentionMask(tokens, keys, causal=False), (2, 2), is_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_batches_of_a_short_dtype_mean_the_same(dtype):
    """Row indices, chunks and names of segments may not fit the dtype of a smaller transfer."""
    length = 2 * (np.iinfo(dtype).max + 1)
    segments = np.arange(length) * 4 // length + 1
    tokens = TokenPositions(np.arange(length) % (length // 4), segment_ids=segments)
    short = jax.tree.map(lambda array: array.astype(dtype), tokens)
    for rule in ({"window": (length // 9, 0)}, {"chunk": length}):
        wide, narrow = (AttentionMask(each, causal=True, **rule) for each in (tokens, short))
        equal(narrow.tile_kinds((length // 16,) * 2), wide.tile_kinds((length // 16,) * 2))
        equal(narrow.tile(9, 0, (90, 90)), wide.tile(9, 0, (90, 90)))
        said = [te.kernels.splash_attention(each, 1, order="packed")[1] for each in (wide, narrow)]
        equal(said[0].q, said[1].q)


ORDERS = {
    "tiles": np.random.default_rng(0).permutation(6)[:, None] * 4 + np.arange(4),
    "zigzag": te.load_balanced_order(LENGTH, 3),
    "cyclic": te.load_balanced_order(LENGTH, 3, kind="cyclic", tile=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ORDERS)
def test_tokens_in_another_order_keep_their_rule_and_exact_kinds(rule, name):
    """Also a part of them beside another part, as on two devices."""
    order = ORDERS[name].ravel()
    for seed, kind in itertools.product(range(4), [*EXACT, "by hand"]):
        tokens = some_tokens(kind, np.random.default_rng(seed))
        dense = by_pairs(AttentionMask(tokens, **rule))
        dense = np.broadcast_to(dense, (len(dense), LENGTH, LENGTH))[:, order][:, :, order]
        taken = tokens.take(order)
        # Chunks of packed rows that share a tile are told apart only in the row's own order.
        is_exact = kind in EXACT and ("chunk" not in rule or kind != "packed")
        for queries, keys in ((taken, None), (taken[:, 8:16], taken[:, :8])):
            mask = AttentionMask(queries, keys, **rule)
            rows = slice(None) if keys is None else slice(8, 16)
            expected = dense[:, rows, : 8 if keys else LENGTH]
            equal(np.broadcast_to(mask.dense()[:, 0], expected.shape), expected)
            expect_kinds_of(expected, mask.tile_kinds((4, 4)), (4, 4), is_exact)


# --- masks joined


@pytest.mark.slow
def test_masks_are_joined_in_each_form():
    """By what each of them allows; kinds are never wrong, and few are loose."""
    loose = {"&": [], "|": []}
    for seed, (n, join) in itertools.product(range(6), enumerate("&|&|")):
        random = np.random.default_rng(seed)
        kind = EXACT[(seed + n) % len(EXACT)]
        tokens = some_tokens(kind, random)
        own = TokenPositions(np.sort(random.integers(0, 9, (BATCH, LENGTH))))
        parts = [
            AttentionMask(tokens, **RULES[random.integers(len(RULES))]),
            AttentionMask(own, causal=bool(n % 3), window=(4, 2)),
            AttentionMask(tokens, causal=False),
        ]
        dense = [np.broadcast_to(by_pairs(part), (BATCH, LENGTH, LENGTH)) for part in parts]
        expected = (dense[0] & dense[1] if join == "&" else dense[0] | dense[1]) & dense[2]
        joined = (parts[0] & parts[1] if join == "&" else parts[0] | parts[1]) & parts[2]
        joined = jax.tree.map(jnp.asarray, joined)
        equal(jax.jit(lambda mask: mask.dense()[:, 0])(joined), expected)
        equal(joined.tile(5, 2, (8, 6)), expected[:, 5:13, 2:8])
        loose[join].append(expect_kinds_of(expected, joined.tile_kinds((4, 4)), (4, 4)))
    assert max(np.mean(loose[join]) for join in loose) < 0.15


# --- trees


def some_parents(random, length, is_ordered):
    """Trees, in depth-first order or in any, and padding."""
    parents, path = np.full(length, -2), []
    for n in range(random.integers(1, length + 1)):
        path = path[: random.integers(0, len(path) + 1)] if random.random() < 0.4 else path
        parents[n] = path[-1] if path else -1
        path = [*path, n]
    if is_ordered:
        return parents
    number = random.permutation(length)
    return np.where(parents < 0, parents, number[parents])[np.argsort(number)]


def ancestors(parents):
    """Which tokens are itself or above it, [length, length]."""
    sees = np.zeros((len(parents),) * 2, bool)
    for n in np.flatnonzero(parents > -2):
        above = n
        while above >= 0:
            sees[n, above] = True
            above = parents[above]
    return sees


@pytest.mark.slow
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_token_of_a_tree_sees_its_ancestors(is_ordered):
    for seed in range(25):
        random = np.random.default_rng(seed)
        parents = np.stack([some_parents(random, LENGTH, is_ordered) for _ in range(BATCH)])
        tree = TokenPositions.from_parents(parents, offset=[0, 5, 9])
        sees = np.stack([ancestors(row) for row in parents])
        mask = AttentionMask(tree, causal=True)
        equal(mask.dense()[:, 0], sees)
        equal(tree.positions, (sees.sum(2) - 1 + np.array([[0], [5], [9]])) * (parents > -2))
        expect_kinds_of(sees, mask.tile_kinds((4, 6)), (4, 6), is_exact=is_ordered)
        order = random.permutation(LENGTH)
        taken = AttentionMask(tree.take(order), causal=True).dense()
        equal(taken[:, 0], sees[:, order][:, :, order])


@pytest.mark.slow
def test_drafts_in_a_cache_see_its_tokens_and_their_ancestors():
    slots = TokenPositions.from_parents(np.full((2, 12), -2))
    slots, _ = te.write_cache(slots, TokenPositions.from_lengths([4, 2], 4), 0)
    parents, lengths = np.array([-1, 0, 0, 1, -1]), np.array([4, 2])
    drafts = TokenPositions.from_parents(parents, offset=lengths)
    slots, _ = te.write_cache(slots, drafts, lengths)
    mask = np.asarray(AttentionMask(drafts, slots, causal=True).dense())[:, 0]
    for row, length in enumerate(lengths):
        expected = np.zeros((5, 12), bool)
        expected[:, :length] = True
        expected[:, length : length + 5] = ancestors(parents)
        equal(mask[row], expected)
    # A token of the cache sees none of the drafts, which are after it.
    step = AttentionMask(TokenPositions.from_offset(lengths - 1, 1), slots, causal=True)
    equal(step.dense()[:, 0, 0].sum(-1), lengths)


@pytest.mark.slow
def test_answers_see_the_prompt_that_they_share():
    lengths = [[3, 0, 5], [2, 2, 2]]
    parents = te.shared_prefix_parents([4, 1], lengths, 16)
    make = jax.jit(te.shared_prefix_parents, static_argnums=2)
    equal(parents, make(jnp.array([4, 1]), jnp.array(lengths), 16))
    # A prompt without answers.
    equal(te.shared_prefix_parents([2], np.zeros((1, 0), int), 3), [[-1, 0, -2]])
    mask = AttentionMask(TokenPositions.from_parents(parents), causal=True).dense()[:, 0]
    equal(mask, np.stack([ancestors(np.asarray(row)) for row in parents]))
    for row, (prefix, answers) in enumerate(zip([4, 1], lengths, strict=True)):
        assert np.sum(parents[row] > -2) == prefix + sum(answers)
        last = np.flatnonzero(np.asarray(mask[row]).sum(0) == 1)
        equal(mask[row].sum(1)[last], [prefix + length for length in answers if length])


@pytest.mark.slow
def test_a_long_chain_is_a_tree():
    """The sum of the sizes of its subtrees is beyond int32."""
    tree = TokenPositions.from_parents(np.arange(2**17) - 1)
    equal(tree.places[0], np.arange(2**17))
    equal(tree.positions, tree.places)
    equal(tree.ends[0], np.full(2**17, 2**17))


# --- tiles


@jax.jit
def tile(mask, query_start, key_start):
    return mask.tile(query_start, key_start, (8, 6))


@pytest.mark.slow
@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=st.integers(0, 99), starts=st.tuples(st.integers(0, 16), st.integers(0, 18)))
def test_a_tile_is_that_of_the_rule(seed, starts):
    random, shape = np.random.default_rng(seed), (8, 6)
    sides = [some_tokens(random.choice(KINDS), random) for _ in range(2)]
    for mask in (AttentionMask(sides[0], **RULES[6]), AttentionMask(*sides, **RULES[6])):
        rows, columns = (slice(n, n + size) for n, size in zip(starts, shape, strict=True))
        expected = by_pairs(mask)[:, rows, columns]
        equal(tile(mask, *starts), expected)
    for outside in (-1, LENGTH - 7, 2**31 - 1):
        assert not tile(mask, outside, 4).any()


# --- the rule as a tree

TOKENS = TokenPositions.from_segment_ids([[1, 1, 1, 2], [1, 2, 2, 0]])
TREE = TokenPositions.from_parents([-1, 0])
MASK = AttentionMask(TOKENS, causal=True, window=(1, None), chunk=3)


@jax.jit
def forms(mask):
    return mask.dense(), mask.tile(1, 0, (2, 2)), mask.tile_kinds((2, 2))


def expect_same(got):
    for ours, theirs in zip(got, forms(MASK), strict=True):
        equal(np.reshape(ours, theirs.shape), theirs)


@pytest.mark.slow
def test_it_passes_through_transformations_export_and_a_mesh():
    carried, _ = jax.lax.scan(lambda mask, _: (mask, None), MASK, length=2)
    expect_same(forms(carried))
    expect_same(jax.vmap(forms)(MASK))
    loss = lambda x, mask: jnp.where(mask.dense(), x, 0).sum()
    gradient = jax.grad(loss)(jnp.ones((2, 1, 4, 4)), MASK)
    equal(gradient, MASK.dense().astype(float))

    exported = jax.export.export(jax.jit(lambda mask: (mask, forms(mask))))(MASK)
    returned, got = jax.export.deserialize(exported.serialize()).call(MASK)
    expect_same(got)
    assert (returned.window, returned.chunk) == ((1, None), 3)

    mesh, spec = mesh_of((2,), ("batch",)), PartitionSpec("batch")
    placed = put(mesh, MASK, "batch")
    assert placed.queries.positions.sharding.spec == spec
    expect_same(forms(placed))
    expect_same(jax.jit(jax.shard_map(forms, mesh=mesh, in_specs=spec, out_specs=spec))(placed))


@pytest.mark.slow
def test_a_row_alone_has_the_ranks_that_a_layer_takes():
    """Gradients of each example: inside vmap and without, as a batch of one row."""
    ids = jnp.array([[1, 2, 3, 0], [4, 5, 0, 0]])
    embedder = te.Embedder(te.EmbedderConfig(vocab_size=6, d_model=8, pad_id=0))
    params = embedder.init(jax.random.key(0))

    def attend(x, mask):
        init = hk.initializers.VarianceScaling(1.0)
        return hk.MultiHeadAttention(2, 4, w_init=init)(x, x, x, mask=mask)

    layer = hk.without_apply_rng(hk.transform(attend))
    weights = layer.init(jax.random.key(0), jnp.ones((1, 8)), jnp.ones((1, 1, 1), bool))

    def loss(params, ids):
        tokens = TokenPositions.from_ids(ids, pad_id=0)
        x = embedder.apply(params, None, ids, is_training=False, positions=tokens.positions)
        x = layer.apply(weights, x, AttentionMask(tokens, causal=True).dense())
        labels, output = jnp.roll(ids, -1, axis=-1), embedder.output(params)
        return te.linear_cross_entropy(x, output, labels, mask=tokens.next_token_mask)

    gradient = jax.grad(loss)
    rows = jax.vmap(gradient, in_axes=(None, 0))(params, ids)
    for row, one in enumerate(ids):
        got = jax.tree.map(lambda array, row=row: array[row], rows)
        near(got, gradient(params, one), rtol=1e-5, atol=1e-6)
        near(got, gradient(params, one[None]), rtol=1e-5, atol=1e-6)


def test_trees_of_anything_are_not_checked():
    shapes = jax.eval_shape(lambda: MASK)
    assert jax.eval_shape(lambda mask: mask.dense(), shapes).shape == (2, 1, 4, 4)
    assert jax.tree.leaves(jax.tree.map(lambda _: None, MASK)) == []
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(MASK)]
    assert names == [".queries.positions", ".queries.segment_ids"]


def test_fields_have_one_form():
    """Queries as keys are self-attention, and a list is a window."""
    assert AttentionMask(TOKENS, TOKENS, causal=True).keys is None
    assert dataclasses.replace(MASK, keys=TOKENS).keys is None
    rule = AttentionMask(TOKENS, causal=True, window=[3, None])  # pyright: ignore[reportArgumentType]
    assert rule.window == (3, None)
    hash(jax.tree.structure(rule))


# --- errors

WANTED = "wanted a TokenPositions, from te.TokenPositions.from_ids(ids, pad_id=0) for example, got"


def mask_of(queries=TOKENS, keys=None, causal=True, **rule):
    return AttentionMask(queries, keys, causal=causal, **rule)


TYPE_ERRORS = [
    (lambda: mask_of(np.arange(3)), f"queries: {WANTED} an array int64[3]"),
    (lambda: mask_of(keys=[0, 1]), f"keys: {WANTED} list [0, 1]"),
    (lambda: jax.jit(lambda causal: mask_of(causal=causal).causal)(True), "causal: ... got a traced bool[]"),
    (lambda: mask_of(window={5, 1}), "window: ... got set {1, 5}"),
    (lambda: mask_of(window={5: 0, 1: 0}), "window: ... got dict {"),
    (lambda: mask_of(window=(1, 0.5)), "window[1]: ... got float 0.5"),
    (lambda: MASK.tile_kinds((2.0, 2)), "shape[0]: ... got float 2.0"),
    (lambda: MASK & MASK.dense(), "mask: ... got an array bool[2, 1, 4, 4]"),
    (lambda: te.kernels.flash_attention(MASK & MASK), "mask: ... got JoinedMask"),
    (lambda: MASK.tile(0, 0.5, (2, 2)), "key_start: ... got float64"),
    (lambda: jax.nn.dot_product_attention(*[jnp.ones((2, 4, 1, 8))] * 3, mask=MASK), "AttentionMask: ... got the rule of one (mask.dense() is its array)"),
    (lambda: MASK and MASK, "AttentionMask: ... got a condition"),
    (lambda: te.mask_to_bias(MASK), "AttentionMask: ... got the rule of one (mask.dense() is its array)"),
]  # fmt: skip
VALUE_ERRORS = [
    (lambda: mask_of(keys=TokenPositions.from_lengths([1, 2, 3], 4)), "queries and keys: ... 1, got 2 and 3"),
    (lambda: mask_of(keys=TokenPositions([0, 1])), "keys.segment_ids: ... got None"),
    (lambda: mask_of(TOKENS.with_block_ids([0] * 4), TOKENS), "keys.block_ids: ... got None"),
    (lambda: mask_of(keys=TOKENS.with_block_ids([0] * 4)), "queries.block_ids: ... got None"),
    (lambda: mask_of(window=(-1, 0)), "window[0]: ... 0, got -1"),
    (lambda: mask_of(window=(1,)), "window: ... got (1,)"),
    (lambda: mask_of(chunk=0), "chunk: ... 1, got 0"),
    (lambda: MASK.tile_kinds((3, 2)), "shape: ... got 3"),
    (lambda: MASK.tile([0], 0, (2, 2)), "query_start: ... [], got shape [1]"),
    (lambda: AttentionMask(TREE, causal=False), "causal: ... got False"),
    (lambda: AttentionMask(TREE, causal=True, window=(1, 0)), "window: ... got tuple (1, 0)"),
    (lambda: TokenPositions.from_parents([1, 0]), "parents: ... got a cycle"),
    (lambda: TokenPositions.from_parents([-2, 0]), "parents: ... got padding for a parent"),
    (lambda: TokenPositions.from_parents([-1, 2]), "parents: ... -2..1, got 2 at index [0, 1]"),
    (lambda: TokenPositions.from_parents([-1], offset=[[1]]), "offset: ... got shape [1, 1]"),
    (lambda: te.shared_prefix_parents([2], [3], 9), "answer_lengths: ... got shape [1]"),
    (lambda: te.shared_prefix_parents([2], [[3], [1]], 9), "answer_lengths: ... 1, got 2"),
    (lambda: te.shared_prefix_parents([-1], [[3]], 9), "prefix_lengths: ... 0..9, got -1 at index [0]"),
    (lambda: te.shared_prefix_parents([6], [[2, 2]], 9), "length: ... got 9"),
    (lambda: jax.jit(lambda: te.shared_prefix_parents([6], [[2, 2]], 9))(), "length: ... got 9"),
    (lambda: MASK | mask_of(TREE), "mask: ... (4, 4), got (2, 2)"),
    (lambda: MASK & mask_of(TokenPositions([range(4)] * 3)), "mask and other: ... 1, got 2 and 3"),
    (lambda: mask_of(sinks=1), "sinks: ... got int 1"),
    (lambda: MASK.tile(3, 0, (2, 2)), "query_start: ... (2, 2), 0..2, got 3"),
    (lambda: MASK.tile(0, 0, (2, 8)), "shape: ... (4, 4), got (2, 8)"),
]  # fmt: skip


def test_bad_arguments_are_refused():
    each_refused(TypeError, TYPE_ERRORS)
    each_refused(ValueError, VALUE_ERRORS)


@pytest.mark.slow
def test_a_mask_is_exported_for_any_batch_and_length():
    def last_queries(ids):
        tokens = TokenPositions.from_ids(ids, pad_id=0)
        return AttentionMask(tokens[:, 1:], tokens, causal=True, window=(2, 0))

    def dense(ids):
        mask = last_queries(ids)
        with refused(ValueError, "shape: ... t - 1 (..., got 2"):
            mask.tile_kinds((2, 2))
        return mask.dense(), mask.tile(ids[0, 0], 0 * ids[0, 0], (1, 2))

    ids = np.array([[0, 5, 6, 7], [5, 6, 0, 0], [5, 6, 7, 8]], np.int32)
    any_ids = jax.export.symbolic_args_specs(ids, "b, t", constraints=["t >= 2"])
    exported = jax.export.export(jax.jit(dense))(any_ids)
    for rows in (ids, ids[:1, :3]):
        mask, tile = exported.call(rows)
        equal(mask, last_queries(rows).dense())
        equal(tile, last_queries(rows).tile(rows[0, 0], 0, (1, 2)))
