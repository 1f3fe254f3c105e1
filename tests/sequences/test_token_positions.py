"""Tokens and caches where draws do not reach: slices, narrow dtypes, symbolic shapes, errors."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import loops
import numpy as np
import pytest
from compare import equal
from refused import each_raises

import transformer_embed as te
from transformer_embed._src.sequences.runs import with_row_indices

TokenPositions = te.TokenPositions


@pytest.mark.parametrize(("length", "devices"), [(2, 1), (8, 2), (12, 3), (24, 4)])
def test_zigzag_gives_each_device_as_many_pairs(length, devices):
    order = te.load_balanced_order(length, devices)
    equal(np.sort(order), np.arange(length))
    shares = order.reshape(devices, 2, -1)
    stripe = length // (2 * devices)
    equal(shares[:, 0, 0], np.arange(devices) * stripe)
    equal(shares.sum((1, 2)), shares[0].sum())
    assert (np.diff(shares) == 1).all()


def test_cyclic_order_deals_blocks_in_turn():
    order = te.load_balanced_order(12, 3, kind="cyclic", stripe=2)
    equal(order, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11])


def test_slices_and_a_short_repr():
    """Also where one row of positions serves all rows."""
    segments = np.array([[1, 1, 1, 2, 2, 0], [0, 0, 9, 9, 0, 6], [0] * 6])
    tokens = TokenPositions(np.arange(6), segment_ids=segments)
    part = tokens[1:, 2:5]
    equal(part.positions, [[2, 3, 4]] * 2)
    equal(part.segment_ids, segments[1:3, 2:5])
    assert (len(tokens), len(part)) == (3, 2)
    assert repr(part) == "TokenPositions(positions=int32[2, 3], segment_ids=int32[2, 3])"
    assert len(repr(te.AttentionMask(tokens, causal=True))) < 200
    repr(jax.tree.map(lambda _: None, tokens))


# --- shapes: [length] stays [length], in tokens and in masks


PARENTS = np.array([-1, 0, 1, 1])
WITHOUT_BATCH = {
    "class": lambda: TokenPositions([0, 1, 2, 3]),
    "class, two arrays": lambda: TokenPositions([0, 1, 2, 3], segment_ids=[1, 1, 2, 2]),
    "from_ids": lambda: TokenPositions.from_ids([5, 6, 0, 7], pad_id=0),
    "from_segment_ids": lambda: TokenPositions.from_segment_ids([1, 1, 2, 0]),
    "from_positions": lambda: TokenPositions.from_positions([0, 1, 0, 1]),
    "from_lengths": lambda: TokenPositions.from_lengths(3, 4),
    "from_offset": lambda: TokenPositions.from_offset(7, 4),
    "from_parents": lambda: TokenPositions.from_parents(PARENTS, offset=3),
    "take": lambda: TokenPositions([0, 1, 2, 3]).take([3, 2, 1, 0]),
    "with_block_ids": lambda: TokenPositions([0, 1, 2, 3]).with_block_ids([0, 0, -1, -1]),
    "clear": lambda: TokenPositions.from_offset(0, 4).clear([True, False, False, True]),
    "clear all": lambda: TokenPositions.from_offset(0, 4).clear(True),
    "slice": lambda: TokenPositions(range(9))[2:6],
}


@pytest.mark.parametrize("name", WITHOUT_BATCH)
def test_tokens_without_a_batch_axis_and_their_masks_have_none(name):
    """What the masks of such tokens say is drawn, in the mode "rows alone"."""

    def made():
        tokens = WITHOUT_BATCH[name]()
        assert len(tokens) == 4
        mask = te.AttentionMask(tokens, causal=True)
        masks = [mask] + [mask & mask] * (name == "from_ids")
        forms = [(each.dense(), each.tile(1, 0, (2, 3)), each.tile_kinds((2, 2))) for each in masks]
        return (tokens, tokens.padding_mask), forms

    arrays, masks = jax.eval_shape(made)
    assert {array.shape for array in jax.tree.leaves(arrays)} == {(4,)}
    for forms in masks:
        assert [form.shape for form in forms] == [(1, 4, 4), (2, 3), (2, 2)]


WITH_BATCH = {
    "class": lambda: TokenPositions([0, 1, 2, 3], segment_ids=[[1, 1, 2, 2]] * 2),
    "from_lengths": lambda: TokenPositions.from_lengths([3, 1], 4),
    "from_offset": lambda: TokenPositions.from_offset([7, 8], 4),
    "from_parents": lambda: TokenPositions.from_parents(PARENTS, offset=[3, 4]),
    "from_parents, batch": lambda: TokenPositions.from_parents([PARENTS] * 2, offset=3),
    "with_block_ids": lambda: TokenPositions([0, 1, 2, 3]).with_block_ids([[0, 0, -1, -1]] * 2),
}


@pytest.mark.parametrize("name", WITH_BATCH)
def test_one_array_with_a_batch_axis_gives_all_of_them_one(name):
    tokens = jax.eval_shape(WITH_BATCH[name])
    assert {array.ndim for array in jax.tree.leaves(tokens)} == {2}
    assert len(tokens) == 2
    dense = jax.eval_shape(lambda: te.AttentionMask(WITH_BATCH[name](), causal=True).dense())
    assert dense.shape[1:] == (1, 4, 4)


def test_tokens_without_a_batch_axis_are_used_for_every_batch_row():
    """As queries, as keys, beside a mask of a batch, and as the new tokens of a cache."""

    @jax.jit
    def found():
        row, batch = TokenPositions([2, 3]), TokenPositions([[0, 1, 2], [1, 2, 3]])
        mask = te.AttentionMask(row, batch, causal=True)
        same = te.AttentionMask(TokenPositions([[2, 3]]), batch, causal=True)
        other = te.AttentionMask(row, TokenPositions([0, 1, 2]), causal=True)
        dense = [each.dense() for each in (mask, same, mask & other, other)]
        kinds = [each.tile_kinds((1, 3)) for each in (other | mask, mask | other)]
        tile = te.AttentionMask(batch, row, causal=True).tile(0, 0, (3, 2))
        tokens = TokenPositions.from_offset(4, 2)
        return dense, kinds, tile, te.write_cache(te.TokenPositions.empty(2, 3), tokens, 0)

    with jax.numpy_rank_promotion("raise"):
        dense, kinds, tile, (slots, written) = found()
    mask, same, joined, other = map(np.asarray, dense)
    equal(mask, same)
    equal(joined, mask & other)
    # Each query sees all keys of the other mask.
    equal(kinds, [np.full((2, 2, 1), 2)] * 2)
    assert tile.shape == (2, 3, 2)
    equal(slots.positions, [[4, 5, 0]] * 2)
    assert written.shape == (2, 2)


# --- caches

BATCH, SLOTS = 3, 6
ZEROS, ONES = np.zeros((BATCH, SLOTS, 2), np.float32), np.ones((BATCH, 2, 2), np.float32)
EMPTY = TokenPositions(ZEROS[..., 0].astype(int), segment_ids=ZEROS[..., 0].astype(int)), ZEROS
NEW = TokenPositions([[1, 2], [3, 4], [5, 6]], segment_ids=[[1, 1]] * BATCH), ONES


def test_a_position_that_a_short_cache_cannot_hold_is_written():
    cache = jax.tree.map(lambda array: array.astype(jnp.uint8), EMPTY[0])
    slots, _ = te.write_cache(cache, te.TokenPositions.from_offset(300, 1), 0)
    equal(np.asarray(slots.positions)[:, 0], [300] * BATCH)


def test_rows_of_any_number_are_cleared():
    clear = lambda ids, where: te.TokenPositions.from_ids(ids, pad_id=0).clear(where).padding_mask
    batch = np.int32([[5, 0], [6, 7]]), np.array([False, True])
    equal(*loops.ROW_MODES["any rows"](clear, [batch]), [[True, False], [False, False]])


# --- errors

from_ids = functools.partial(TokenPositions.from_ids, pad_id=0)
from_lengths, from_offset = TokenPositions.from_lengths, TokenPositions.from_offset
(SYMBOLIC,) = jax.export.symbolic_shape("length")
COMES_BACK = np.array([[1, 1, 2, 0], [4, 0, 4, 0]], np.uint8)
REFUSED = {
    "te.write_cache(EMPTY, NEW, 0.5)": "TypeError: slot: ... got float64",
    "EMPTY[0].clear([1, 0, 0])": "TypeError: where: ... got int64",
    "te.write_cache(EMPTY, NEW[0], 0)": "ValueError: new: ... [1], got .positions, .segment_ids",
    "te.write_cache(EMPTY[0], te.TokenPositions([0]), 0)": "ValueError: new: ... got .positions",
    "te.write_cache((), (), 0)": "ValueError: new: ... got none",
    "te.write_cache(EMPTY[1], jnp.ones(3), 0)": "ValueError: new: ... got shape [3]",
    "te.write_cache(EMPTY[1], NEW[1].astype(jnp.bfloat16), 0)": "ValueError: new: ... 1, 2, 2], got bfloat16[3, 2, 2]",
    "te.write_cache(EMPTY, (NEW[0], NEW[1][:2]), 0)": "ValueError: new[1]: ... 1, 2, 2], got float32[2, 2, 2]",
    "te.write_cache((EMPTY[0], EMPTY[1][:2]), NEW, 0)": "ValueError: cache[1]: ... 6, 2], got float32[2, 6, 2]",
    "te.write_cache(EMPTY, (NEW[0], NEW[1][:, :1]), 0)": "ValueError: new[1]: ... 1, 2, 2], got float32[3, 1, 2]",
    "te.write_cache(EMPTY[1], jnp.ones((3, 7, 2)), 0)": "ValueError: new: wanted at most 6 tokens, as the cache, or a slot for each token (a ring), got 7",
    "te.write_cache(EMPTY, NEW, [0, 1])": "ValueError: slot: ... [3, 2], got shape [2]",
    "te.write_cache(EMPTY, NEW, 2**31)": "ValueError: slot: ... -1..5, got 2147483648",
    "te.write_cache(EMPTY, NEW, SLOTS)": "ValueError: slot: ... -1..5, got 6",
    "te.write_cache(EMPTY, NEW, [0, 1, -2])": "ValueError: slot: ... -1..5, got -2 at index [2]",
    "te.TokenPositions([0]).clear([True])": "ValueError: segment_ids: ... got None",
    "EMPTY[0].clear([True])": "ValueError: where: ... [3] or [3, 6], got shape [1]",
    "jax.jit(TokenPositions)(np.zeros(2, np.uint32))": "TypeError: positions: ... got uint32",
    "TokenPositions([0, 1], block_ids=[True, False])": "TypeError: block_ids: ... got bool",
    "from_ids([1], start=0.5)": "TypeError: start: ... got float 0.5",
    "TokenPositions([[[0, 1]]])": "ValueError: positions: wanted shape [length] or [batch, length], got shape [1, 1, 2]",
    "TokenPositions([0, 2**32])": "ValueError: positions: ... -2147483648..2147483647, got 4294967296 at index [1]",
    "TokenPositions([0, 1], block_ids=[1] * 3)": "ValueError: block_ids: ... 2, got 3",
    "TokenPositions(np.zeros((2, 2), int), segment_ids=np.zeros((3, 2), int))": "ValueError: positions and segment_ids: ... 1, got 2 and 3",
    "from_ids([1], end_id=0)": "ValueError: end_id: ... got 0",
    "from_ids([1] * 4, start=2**31 - 3)": "ValueError: start: ... got 2147483645",
    "from_lengths([[3]], 4)": "ValueError: lengths: ... got shape [1, 1]",
    "from_lengths([3], -1)": "ValueError: length: ... 0, got -1",
    "from_lengths([3], 4, padding_side='both')": "ValueError: padding_side: ... got 'both'",
    "from_lengths([2, -3], 4)": "ValueError: lengths: ... 0..4, got -3 at index [1]",
    "from_lengths([2**31], 2**31)": "ValueError: lengths: ... 0..2147483647, got 2147483648 at index [0]",
    "from_lengths([2**31], SYMBOLIC)": "ValueError: lengths: ... 0..2147483647, got 2147483648 at index [0]",
    "from_offset(0, 5)[0]": "ValueError: index: ... got 0",
    "from_offset(0, 5)[np.array([7])]": "ValueError: index: ... got [7]",
    "from_offset(0, 5)[...]": "ValueError: index: ... got Ellipsis",
    "from_offset(0, 5)[:, 0]": "ValueError: index: ... got (slice(None, None, None), 0)",
    "from_offset(0, 5)[:, :2]": "ValueError: index: wanted one slice, of tokens, got (",
    "from_offset([0], 5)[:, :2, :2]": "ValueError: index: wanted slices of batch rows and of tokens, got (",
    "from_offset(0, 5).take([[0]])": "ValueError: order: ... got shape [1, 1]",
    "from_offset(0, 5).take([5])": "ValueError: order: ... 0..4, got 5 at index [0]",
    "from_offset(0, 5).take([4, 2]).next_token_mask": "ValueError: places: wanted None, for tokens in the order of",
    "te.load_balanced_order(12, 4)": "ValueError: length: ... 8, got 12",
    "te.load_balanced_order(12, 4, kind='cyclic', stripe=4)": "ValueError: length: ... 16, got 12",
    "te.load_balanced_order(8, 4, kind='snake')": "ValueError: kind: ... got 'snake'",
    "from_offset([[3]], 4)": "ValueError: offset: ... got shape [1, 1]",
    "from_offset(2**31, 4)": "ValueError: offset: ... -2147483648..2147483647, got 2147483648",
    "from_offset([0, 2**31 - 2], 3)": "ValueError: offset: ... got 2147483646",
    "TokenPositions.from_segment_ids([[2**40, 2**41]])": "ValueError: segment_ids: ... 0..2147483647, got 1099511627776 at index [0, 0]",
    "TokenPositions.from_segment_ids([[0, 0, 1, -1]])": "ValueError: segment_ids: ... 0..2147483647, got -1 at index [0, 3]",
    "TokenPositions([0, 0], segment_ids=np.int64([0, -1]))": "ValueError: segment_ids: ... 0..2147483647, got -1 at index [1]",
    "TokenPositions.from_segment_ids(COMES_BACK)": "ValueError: segment_ids: ... got two runs of one in row 1",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())


def test_a_segment_of_two_runs_keeps_its_number():
    """Of tokens that look like three sequences, the first and the last one see each other."""
    segments, zeros = np.array([[3, 2, 3]], np.int32), np.zeros((1, 3), np.int32)
    tokens = {"positions": zeros, "places": zeros, "segment_ids": segments}
    equal(jax.jit(with_row_indices)(tokens)["segment_ids"], segments)
