"""Caches: tokens for any slots against a loop over tokens, and rings that are shorter than a prompt."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
from compare import equal

import transformer_embed as te

SLOTS = 5


def by_loop(slot, batch, length):
    """Keys [batch, slots], and which tokens are written: the last one of each slot."""
    keys, is_written = np.zeros((batch, SLOTS)), np.zeros((batch, length), bool)
    for row, n, place in loops.places(slot, batch, length, SLOTS):
        keys[row, place] = 1 + n + 100 * row
        is_written[row, n] = True
    return keys, is_written


@pytest.mark.parametrize(("length", "rows"), [(1, 3), (SLOTS + 1, 1), (3 * SLOTS + 2, 3)])
def test_any_slots_of_any_number_of_tokens(length, rows):
    """Several tokens may have one slot, on the host and on a device."""
    random, empty = np.random.default_rng(length), np.zeros((3, SLOTS))
    new = 1.0 + np.arange(length)[None] + 100 * np.arange(3)[:, None]

    @jax.jit
    def write(empty, new, slot):
        """On a device, a slot may be outside the cache."""
        batch = te.write_cache(empty, new, slot)
        if rows == 1:
            return batch, None
        cache = te.TokenPositions.empty(3, SLOTS), empty
        tokens = te.TokenPositions([range(length)] * 3, segment_ids=[[1] * length] * 3)
        return batch, jax.vmap(te.write_cache)(cache, (tokens, new), slot)

    for _ in range(4):
        slot = random.integers(-1, SLOTS, (rows, length))
        equal(te.write_cache(empty, new, slot), by_loop(slot, 3, length))
        for slots in (slot, random.integers(-3, SLOTS + 3, (rows, length))):
            batch, each_row = write(empty, new, slots)
            expected = by_loop(slots, 3, length)
            equal(batch, expected)
            if each_row:
                (held, keys), is_written = each_row
                equal((keys, is_written), expected)
                equal(held.positions, np.maximum(np.asarray(keys) % 100 - 1, 0))


@pytest.mark.parametrize("length", [3, 7])
def test_a_ring_keeps_the_latest_tokens_of_each_row(length):
    """With padding on the left, and then one token more."""
    lengths = np.array([length, length - 2])

    @jax.jit
    def written():
        prompt = te.TokenPositions.from_lengths(lengths, length, padding_side="left")
        slot = jnp.where(prompt.padding_mask, prompt.positions % SLOTS, -1)
        ring, _ = te.write_cache(te.TokenPositions.empty(2, SLOTS), prompt, slot)
        step = te.TokenPositions.from_offset(lengths, 1)
        ring, is_written = te.write_cache(ring, step, step.positions % SLOTS)
        mask = te.AttentionMask(step, ring, causal=True, window=(SLOTS - 1, 0))
        return ring.positions, ring.padding_mask, is_written, mask.dense()

    positions, is_held, is_written, mask = map(np.asarray, written())
    assert is_written.all()
    for row, count in enumerate(lengths):
        held = positions[row][is_held[row]]
        equal(np.sort(held), np.arange(max(0, count + 1 - SLOTS), count + 1))
    equal(mask.sum((1, 2, 3)), np.minimum(lengths + 1, SLOTS))


def test_slots_that_may_be_of_rows_or_of_tokens_are_refused():
    """Two tokens without a batch axis, in a cache of two rows."""
    cache, tokens = te.TokenPositions.empty(2, SLOTS), te.TokenPositions.from_offset(3, 2)
    with pytest.raises(ValueError, match=r"^slot: wanted shape \[1, 2\] for a slot of each token"):
        te.write_cache(cache, tokens, tokens.positions % SLOTS)

    @jax.jit
    def written():
        batch = te.TokenPositions.from_offset([3], 2)
        writes = [(cache, batch, [3, 4]), (cache, tokens, [[3, 4]])]
        writes += [(cache[:1], tokens[:1], [3]), (cache, tokens[:1], [3, 4])]
        return [te.write_cache(*each)[1] for each in writes]

    expected = [[True, True], [True, False]], [[True, True]] * 2, [[True]], [[True]] * 2
    assert [array.tolist() for array in written()] == [*expected]


def test_more_tokens_than_slots_need_a_slot_each():
    write = functools.partial(te.write_cache, np.zeros((2, SLOTS)), np.ones((2, SLOTS + 1)))
    for slot in (0, [0, 0], jnp.array(0)):
        with pytest.raises(ValueError, match=r"^new: wanted at most 5 tokens, .*a ring"):
            write(slot)


@pytest.mark.parametrize(("first", "written"), [(-1, []), (1, [1, 2, 3]), (3, [3, 4])])
def test_a_row_that_begins_before_its_cache_is_not_written(first, written):
    """Beyond the end, the tokens that fit are written."""
    cache, is_written = te.write_cache(np.zeros((1, SLOTS)), np.ones((1, 3)), jnp.array([first]))
    assert np.flatnonzero(cache[0]).tolist() == written
    assert np.asarray(is_written).sum() == len(written)
