"""The rule of a mask and its forms: the dense mask, tiles and the kinds of tiles against the rule, pair
by pair."""

import dataclasses

import jax
import loops
import numpy as np
import pytest
from compare import equal
from refused import each_raises

import transformer_embed as te
from transformer_embed._src.kernels.row_indices import RowRule

TokenPositions, AttentionMask = te.TokenPositions, te.AttentionMask


@pytest.mark.parametrize(("batch", "length"), [(1, 0), (0, 2)])
def test_no_tokens(batch, length):
    mask = AttentionMask(TokenPositions(np.zeros((batch, length), int)), causal=True)
    assert mask.dense().shape == (batch, 1, length, length)
    assert mask.tile_kinds((1, 1)).shape == (batch, length, length)


# --- kinds of tiles


def test_a_tile_of_one_block_id_needs_no_mask():
    mask = AttentionMask(
        TokenPositions(np.arange(6)).with_block_ids([0] * 4 + [-1] * 2), causal=True
    )
    equal(mask.tile_kinds((2, 2)), [[2, 2, 0], [2, 2, 0], [2, 2, 1]])


@pytest.mark.slow
def test_batches_of_a_short_dtype_mean_the_same():
    """Row indices, chunks and names of segments may not fit the dtype of a smaller transfer."""
    length = 512
    segments = np.arange(length) * 4 // length + 1
    tokens = TokenPositions(np.arange(length) % (length // 4), segment_ids=segments)
    window, chunk = {"window": (length // 9, 0)}, {"chunk": length}

    def forms(tokens):
        mask = AttentionMask(tokens, causal=True, **window, **chunk)
        masks = (AttentionMask(tokens, causal=True, **rule) for rule in (window, chunk))
        of_rows = [RowRule(mask, "a kernel", "packed").segment_ids() for mask in masks]
        return mask.tile_kinds((length // 16,) * 2), mask.tile(9, 0, (90, 90)), of_rows

    (positions, segments), structure = jax.tree.flatten(tokens)
    narrow = positions.astype(np.uint8), segments.astype(np.int8)
    equal(forms(jax.tree.unflatten(structure, narrow)), forms(tokens))


@pytest.mark.slow
def test_a_long_chain_is_a_tree():
    """The sum of the sizes of its subtrees is beyond int32."""
    tree = TokenPositions.from_parents(np.arange(2**17) - 1)
    equal(tree.places, np.arange(2**17))
    equal(tree.positions, tree.places)
    equal(tree.ends, np.full(2**17, 2**17))


# --- sinks


def test_sinks_are_the_keys_below_a_position():
    """With a window of one token, counted from the position and not from the place in the row."""

    @jax.jit
    def forms(positions):
        mask = AttentionMask(TokenPositions(positions), causal=True, window=(0, 0), sinks=2)
        return mask.dense()[0], mask.tile(3, 0, (4, 5)), mask.tile_kinds((1, 1))

    for first in (0, 1):
        is_sink = np.arange(8) + first < 2
        expected = np.eye(8, dtype=bool) | (is_sink & np.tri(8, dtype=bool))
        equal(forms(np.arange(8) + first), (expected, expected[3:7, :5], 2 * expected))


@pytest.mark.parametrize("sinks", [2, 5])
def test_sinks_of_two_texts_in_another_order_than_that_of_the_row(sinks):
    order = np.array([7, 2, 0, 5, 1, 4, 3, 6])
    text, position = np.divmod(order, 4)
    tokens = TokenPositions(position, segment_ids=text + 1, places=order)
    mask = AttentionMask(tokens, causal=True, window=(0, 0), sinks=sinks)
    expected = (text[:, None] == text) & (position <= position[:, None])
    expected &= (position < sinks) | np.eye(8, dtype=bool)
    equal(mask.dense()[0], expected)


# --- kinds of tiles

# Padding may have any position. In the second row, the first document goes on from an earlier batch.
ROWS = [[0] * 2 + [1] * 5 + [2] * 9, [0] * 2 + [1] * 6 + [2] * 8]
POSITIONS = [[99] * 2 + [*range(5), *range(9)], [99] * 2 + [*range(7, 13), *range(8)]]
PARTS = [
    [-1] * 4 + [5] * 4 + [-1] * 2 + [7] * 3 + [-1] * 3,
    [0] * 3 + [-1] * 4 + [3] * 5 + [-1] * 4,
]


def test_kinds_of_tiles_of_packed_rows_are_no_looser_than_the_mask():
    """A looser kind is right too, but costs a kernel time."""
    tokens = TokenPositions(POSITIONS, segment_ids=ROWS)

    @jax.jit
    def kinds_and_masks():
        in_parts = AttentionMask(tokens.with_block_ids(PARTS), causal=True)
        in_chunks = AttentionMask(tokens, causal=False, chunk=2)
        return [(mask.tile_kinds((4, 4)), mask.dense()) for mask in (in_parts, in_chunks)]

    for kinds, mask in kinds_and_masks():
        allowed = np.asarray(mask)[:, 0]
        equal(kinds, loops.AttentionMask(None, allowed=allowed).tile_kinds((4, 4)))


# --- the rule as a tree

TOKENS = TokenPositions([[0, 1, 2, 0], [0, 0, 1, 0]], segment_ids=[[1, 1, 1, 2], [1, 2, 2, 0]])
TREE = TokenPositions([0, 1], places=[0, 1], ends=[2, 2])
MASK = AttentionMask(TOKENS, causal=True, window=(1, None), chunk=3)


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


def mask_of(queries=TOKENS, keys=None, causal=True, **rule):
    return AttentionMask(queries, keys, causal=causal, **rule)


REFUSED = {
    "mask_of(np.arange(3))": "TypeError: queries: wanted a TokenPositions, from te.TokenPositions.from_ids(ids, pad_id=0) for example, got an array int64[3]",
    "mask_of(keys=[0, 1])": "TypeError: keys: wanted a TokenPositions, from te.TokenPositions.from_ids(ids, pad_id=0) for example, got list [0, 1]",
    "jax.jit(lambda causal: mask_of(causal=causal).causal)(True)": "TypeError: causal: ... got a traced bool[]",
    "mask_of(window={5, 1})": "TypeError: window: ... got set {1, 5}",
    "mask_of(window={5: 0, 1: 0})": "TypeError: window: ... got dict {",
    "mask_of(window=(1, 0.5))": "TypeError: window[1]: ... got float 0.5",
    "mask_of(window=(1,))": "TypeError: window: ... got tuple (1,)",
    "mask_of(window=8)": "TypeError: window: wanted a pair (left, right), such as (w - 1, 0) for the w latest keys, got int 8",
    "MASK.tile_kinds((2.0, 2))": "TypeError: shape[0]: ... got float 2.0",
    "MASK & MASK.dense()": "TypeError: mask: ... got an array bool[2, 1, 4, 4]",
    "te.kernels.flash_attention_kwargs(MASK & MASK)": "TypeError: mask: ... got JoinedMask",
    "MASK.tile(0, 0.5, (2, 2))": "TypeError: key_start: ... got float64",
    "MASK and MASK": "TypeError: AttentionMask: ... got a condition",
    "te.mask_to_bias(MASK)": "TypeError: AttentionMask: wanted its array, mask.dense(), got the mask",
    "mask_of(keys=TokenPositions([range(4)] * 3, segment_ids=[[1] * 4] * 3))": "ValueError: queries and keys: ... 1, got 2 and 3",
    "mask_of(keys=TokenPositions([0, 1]))": "ValueError: keys.segment_ids: ... got None",
    "mask_of(TOKENS.with_block_ids([0] * 4), TOKENS)": "ValueError: keys.block_ids: ... got None",
    "mask_of(keys=TOKENS.with_block_ids([0] * 4))": "ValueError: queries.block_ids: ... got None",
    "mask_of(window=(-1, 0))": "ValueError: window[0]: ... 0, got -1",
    "mask_of(chunk=0)": "ValueError: chunk: ... 1, got 0",
    "MASK.tile_kinds((3, 2))": "ValueError: shape: ... got 3",
    "MASK.tile([0], 0, (2, 2))": "ValueError: query_start: ... [], got shape [1]",
    "AttentionMask(TREE, causal=False)": "ValueError: causal: ... got False",
    "AttentionMask(TREE, causal=True, window=(1, 0))": "ValueError: window: ... got tuple (1, 0)",
    "TokenPositions.from_parents([1, 0])": "ValueError: parents: ... got a cycle",
    "TokenPositions.from_parents([-2, 0])": "ValueError: parents: ... got padding for a parent",
    "TokenPositions.from_parents([-1, 2])": "ValueError: parents: ... -2..1, got 2 at index [0, 1]",
    "TokenPositions.from_parents([-1], offset=[[1]])": "ValueError: offset: ... got shape [1, 1]",
    "TokenPositions.from_parents([-1, 0], offset=2**31 - 2)": "ValueError: offset: ... got 2147483646",
    "te.shared_prefix_parents([2], [3], 9)": "ValueError: answer_lengths: ... got shape [1]",
    "te.shared_prefix_parents([2], [[3], [1]], 9)": "ValueError: answer_lengths: ... 1, got 2",
    "te.shared_prefix_parents([-1], [[3]], 9)": "ValueError: prefix_lengths: ... 0..9, got -1 at index [0]",
    "te.shared_prefix_parents([6], [[2, 2]], 9)": "ValueError: length: ... got 9",
    "jax.jit(lambda: te.shared_prefix_parents([6], [[2, 2]], 9))()": "ValueError: length: ... got 9",
    "MASK | mask_of(TREE)": "ValueError: mask: ... (4, 4), got (2, 2)",
    "MASK & mask_of(TokenPositions([range(4)] * 3))": "ValueError: mask and other: ... 1, got 2 and 3",
    "mask_of(sinks=1)": "ValueError: sinks: ... got int 1",
    "MASK.tile(3, 0, (2, 2))": "ValueError: query_start: ... (2, 2), 0..2, got 3",
    "MASK.tile(0, 0, (2, 8))": "ValueError: shape: ... (4, 4), got (2, 8)",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
