"""A cache: what is written where, and what a mask shows of it, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal
from refused import each_refused

import transformer_embed as te

BATCH, SLOTS = 3, 6
EMPTY = te.TokenPositions.empty(BATCH, SLOTS), jnp.zeros((BATCH, SLOTS, 2))


def new_tokens(first, length, rows=BATCH):
    """Tokens whose keys are their numbers, and their numbers [rows, length]."""
    numbers = first + np.arange(rows * length).reshape(rows, length)
    keys = jnp.array(np.stack([numbers, -numbers], axis=-1), jnp.float32)
    return (te.TokenPositions(numbers, segment_ids=np.ones_like(numbers)), keys), numbers


def written_by_loop(held, numbers, slot):
    """Slots [batch, slots] with the number of each slot's token, 0: empty."""
    held, is_written = held.copy(), np.zeros((BATCH, numbers.shape[1]), bool)
    for row in range(BATCH):
        places = np.broadcast_to(slot, BATCH if slot.ndim < 2 else slot.shape)[row].tolist()
        for n, number in enumerate(numbers[row % len(numbers)]):
            first, place = (places, places + n) if slot.ndim < 2 else (places[n],) * 2
            if 0 <= first <= place < SLOTS:
                held[row, place], is_written[row, n] = number, True
    return held, is_written


WRITES = [0, 4, -1, SLOTS, 2**31 - 1, -(2**31), [5, 0, 3], [-1, 6, 2], [-2, 2**31 - 1, 5]]
OF_TOKENS = [[[0, 5, 2], [6, -1, 3], [3, 2, 1]], [[2, 2**31 - 1, -(2**31)]] * 3]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_positions_keys_and_values_are_written_alike(is_compiled):
    """No slot shows a token whose key is another's, also where a write leaves the cache."""
    write = jax.jit(te.write_cache) if is_compiled else te.write_cache
    cache, held = EMPTY, np.zeros((BATCH, SLOTS), int)
    for n, slot in enumerate(jnp.array(each, jnp.int32) for each in (*WRITES, *OF_TOKENS)):
        new, numbers = new_tokens(1 + 100 * n, 3, rows=1 if n % 4 == 1 else BATCH)
        cache, is_written = write(cache, new, slot)
        held, expected = written_by_loop(held, numbers, slot)
        equal(is_written, expected)
        equal(cache[0].positions * cache[0].padding_mask, held)
        equal(cache[1], np.stack([held, -held], axis=-1))


@pytest.mark.parametrize("length", [1, 4])
def test_a_ring_shows_the_window_of_each_new_token(length):
    """window + length - 1 places: a write of `length` tokens must not hide what its first sees."""
    window, total = 3, 24
    places = window + length - 1
    slots = te.TokenPositions.empty(1, places)
    step = jax.jit(
        lambda slots, tokens: te.write_cache(slots, tokens, tokens.positions % places)[0]
    )
    for start in range(0, total, length):
        tokens = te.TokenPositions.from_offset(start, length)
        slots = step(slots, tokens)
        mask = te.AttentionMask(tokens, slots, causal=True, window=(window - 1, 0)).dense()
        for n, row in enumerate(np.asarray(mask)[0, 0]):
            seen = np.sort(np.asarray(slots.positions)[0, row])
            equal(seen, np.arange(max(0, start + n - window + 1), start + n + 1))


def test_a_row_is_cleared_for_a_new_text():
    slots, _ = te.write_cache(EMPTY[0], new_tokens(1, SLOTS)[0][0], 0)
    cleared = jax.jit(te.TokenPositions.clear)(slots, np.array([True, False, True]))
    equal(cleared.padding_mask, [[False] * SLOTS, [True] * SLOTS, [False] * SLOTS])
    equal(cleared.positions[1], slots.positions[1])


def test_a_position_that_a_short_cache_cannot_hold_is_written():
    cache = jax.tree.map(lambda array: array.astype(jnp.uint8), EMPTY[0])
    slots, _ = te.write_cache(cache, te.TokenPositions.from_offset(300, 1), 0)
    equal(slots.positions[:, 0], [300] * BATCH)


NEW = new_tokens(1, 2)[0]
VALUE_ERRORS = [
    (lambda: te.write_cache(EMPTY, NEW[0], 0), "new: ... [1], got .positions, .segment_ids"),
    (lambda: te.write_cache(EMPTY[0], te.TokenPositions([0]), 0), "new: ... got .positions"),
    (lambda: te.write_cache((), (), 0), "new: ... got none"),
    (lambda: te.write_cache(EMPTY[1], jnp.ones(3), 0), "new: ... got shape [3]"),
    (lambda: te.write_cache(EMPTY[1], NEW[1].astype(jnp.bfloat16), 0), "new: ... 1, 2, 2], got bfloat16[3, 2, 2]"),
    (lambda: te.write_cache(EMPTY, (NEW[0], NEW[1][:2]), 0), "new[1]: ... 1, 2, 2], got float32[2, 2, 2]"),
    (lambda: te.write_cache((EMPTY[0], EMPTY[1][:2]), NEW, 0), "cache[1]: ... 6, 2], got float32[2, 6, 2]"),
    (lambda: te.write_cache(EMPTY, (NEW[0], NEW[1][:, :1]), 0), "new[1]: ... 1, 2, 2], got float32[3, 1, 2]"),
    (lambda: te.write_cache(EMPTY, new_tokens(1, 7)[0], 0), "new: ... got 7"),
    (lambda: te.write_cache(EMPTY, NEW, [0, 1]), "slot: ... [3, 2], got shape [2]"),
    (lambda: te.write_cache(EMPTY, NEW, 2**31), f"slot: ... -1..{SLOTS - 1}, got 2147483648"),
    (lambda: te.write_cache(EMPTY, NEW, SLOTS), f"slot: ... -1..{SLOTS - 1}, got {SLOTS}"),
    (lambda: te.write_cache(EMPTY, NEW, [0, 1, -2]), f"slot: ... -1..{SLOTS - 1}, got -2 at index [2]"),
    (lambda: te.TokenPositions([0]).clear([True]), "segment_ids: ... got None"),
    (lambda: EMPTY[0].clear([True]), "where: ... [3] or [3, 6], got shape [1]"),
    (lambda: te.write_cache(EMPTY, NEW, [[1, 2], [-1, -1], [3, 3]]), "slot: ... got two tokens for slot 3 of row 2"),
]  # fmt: skip
TYPE_ERRORS = [
    (lambda: te.write_cache(EMPTY, NEW, 0.5), "slot: ... got float64"),
    (
        lambda: EMPTY[0].clear([1, 0, 0]),
        "where: ... got int64",
    ),
]


def test_bad_arguments_are_refused():
    each_refused(ValueError, VALUE_ERRORS)
    each_refused(TypeError, TYPE_ERRORS)
