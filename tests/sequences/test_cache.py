"""Caches where draws do not reach: narrow dtypes, symbolic shapes, errors."""

import jax
import jax.numpy as jnp
import loops
import numpy as np
from compare import equal
from refused import each_raises

import transformer_embed as te

BATCH, SLOTS = 3, 6
EMPTY = te.TokenPositions.empty(BATCH, SLOTS), jnp.zeros((BATCH, SLOTS, 2))
NEW = te.TokenPositions.from_offset([1, 3, 5], 2), jnp.ones((BATCH, 2, 2))


def test_a_position_that_a_short_cache_cannot_hold_is_written():
    cache = jax.tree.map(lambda array: array.astype(jnp.uint8), EMPTY[0])
    slots, _ = te.write_cache(cache, te.TokenPositions.from_offset(300, 1), 0)
    equal(slots.positions[:, 0], [300] * BATCH)


def test_rows_of_any_number_are_cleared():
    clear = lambda ids, where: te.TokenPositions.from_ids(ids, pad_id=0).clear(where).padding_mask
    batch = np.int32([[5, 0], [6, 7]]), np.array([False, True])
    equal(*loops.ROW_MODES["any rows"](clear, [batch]), [[True, False], [False, False]])


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
    "te.write_cache(EMPTY[1], jnp.ones((3, 7, 2)), 0)": "ValueError: new: ... got 7",
    "te.write_cache(EMPTY, NEW, [0, 1])": "ValueError: slot: ... [3, 2], got shape [2]",
    "te.write_cache(EMPTY, NEW, 2**31)": "ValueError: slot: ... -1..5, got 2147483648",
    "te.write_cache(EMPTY, NEW, SLOTS)": "ValueError: slot: ... -1..5, got 6",
    "te.write_cache(EMPTY, NEW, [0, 1, -2])": "ValueError: slot: ... -1..5, got -2 at index [2]",
    "te.TokenPositions([0]).clear([True])": "ValueError: segment_ids: ... got None",
    "EMPTY[0].clear([True])": "ValueError: where: ... [3] or [3, 6], got shape [1]",
    "te.write_cache(EMPTY, NEW, [[1, 2], [-1, -1], [3, 3]])": "ValueError: slot: ... got two tokens for slot 3 of row 2",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
