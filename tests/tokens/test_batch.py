"""`te.check_batch`: ids in the vocabulary, padding's id at padding, the order of a row's tokens."""

import itertools

import batches
import draws
import jax
import ml_dtypes
import numpy as np
import pytest
from refused import each_raises

import transformer_embed as te
from transformer_embed import TokenPositions

check = te.check_batch


def check_order(tokens, order):
    te.check_batch(np.zeros(tokens.positions.shape, int), tokens, vocab_size=1, order=order)


def test_ids_in_the_vocabulary_pass():
    for ids, vocab_size in (
        (0, 5),
        ([], 5),
        (np.array([[4]], np.uint64), 5),
        # A vocabulary that the dtype of the ids does not hold.
        (np.array([0, 127], np.int8), 200),
        (np.array([0, 1, 1], ml_dtypes.int2), 2),
    ):
        te.check_batch(ids, vocab_size=vocab_size)


def test_the_id_of_padding_may_stand_at_padding():
    ids = [[5, 6, 7, 8, 0], [5, 6, 7, 8, 9]]
    te.check_batch(ids, TWO, vocab_size=10, pad_id=0, order="packed")
    # One row of tokens serves all rows of ids.
    te.check_batch(ids, TokenPositions(range(5)), vocab_size=10, pad_id=-100, order="full")
    te.check_batch(ids, TWO, vocab_size=10, pad_id=0, max_len=5)


@pytest.mark.parametrize("pad_id", [-100, 10, 2**31 - 2])
def test_the_id_of_padding_may_lie_outside_the_vocabulary(pad_id):
    """As in `lookup`, the losses and `TokenPositions.from_ids`."""
    ids = np.array([[5, 6, 7, 8, pad_id], [5, 6, 7, 8, 9]])
    for array in (ids, jax.numpy.asarray(ids), ids.tolist()):
        te.check_batch(array, vocab_size=10, pad_id=pad_id)
        te.check_batch(array, TWO, vocab_size=10, pad_id=pad_id, order="packed")
    te.check_batch([], vocab_size=10, pad_id=pad_id)
    te.check_batch(np.array([0, 1], ml_dtypes.int2), vocab_size=2, pad_id=pad_id)


TWO = TokenPositions([[0, 1, 0, 1, 0], range(5)], segment_ids=[[1, 1, 2, 2, 0], [3] * 5])
BLOCKS = TokenPositions([[0, 1]], block_ids=[[0, 0]] * 2)
REFUSED = {
    "check([[0, 1], [2, 5], [-1, 0]], vocab_size=5)": "ValueError: ids: ... 0..4, got 5 at index [1, 1]",
    "check(np.array([2**64 - 1], np.uint64), vocab_size=5)": "ValueError: ids: ... 0..4, got 18446744073709551615 at index [0]",
    "check(jax.numpy.array([[-1]]), vocab_size=5)": "ValueError: ids: ... 0..4, got -1 at index [0, 0]",
    "check(np.array([0, 127], np.int8), vocab_size=127)": "ValueError: ids: ... 0..126, got 127 at index [1]",
    "check(np.array([0, 1], ml_dtypes.int2), vocab_size=1)": "ValueError: ids: ... 0..0, got 1 at index [1]",
    "check([True], vocab_size=5)": "TypeError: ids: ... got bool",
    "check([0], vocab_size=0)": "ValueError: vocab_size: ... 1, got 0",
    "check([0], vocab_size=5.0)": "TypeError: vocab_size: ... got float 5.0",
    "check([2**70] * 10_000, vocab_size=4)": "TypeError: ids: ... got list ",
    "jax.jit(lambda ids: check(ids, vocab_size=5))(np.zeros(2, np.int32))": "TypeError: ids: ... got a traced int32[2]",
    "jax.jit(lambda tokens: check_order(tokens, 'full'))(TokenPositions(range(3)))": "TypeError: tokens: ... got a traced int32[1, 3]",
    "check([[5, 6, 7, 8, 0], [5, 6, 0, 8, 9]], TWO, vocab_size=10, pad_id=0)": "ValueError: ids: ... 0 at [1, 2], a token",
    "check([[5, 6, 7, 8]] * 2, TWO, vocab_size=10)": "ValueError: ids: ... [2, 5], got [2, 4]",
    "check([[1, 2]] * 3, BLOCKS, vocab_size=10)": "ValueError: ids: ... [2, 2], got [3, 2]",
    "check([5] * 5, TWO, vocab_size=10)": "ValueError: ids: ... [2, 5], got [1, 5]",
    "check([[5, 6, -1, 8, 0]] * 2, TWO, vocab_size=10, pad_id=-1)": "ValueError: ids: ... pad_id, -1, at padding ... -1 at [0, 2], a token",
    "check([[3, 10, -100]], vocab_size=10, pad_id=-100)": "ValueError: ids: ... pad_id, -100, 0..9, got 10 at index [0, 1]",
    "check(np.array([2**64 - 1], np.uint64), vocab_size=5, pad_id=-1)": "ValueError: ids: ... got 18446744073709551615 at index [0]",
    "check([True], vocab_size=5, pad_id=-1)": "TypeError: ids: ... got bool",
    "check([[1]], vocab_size=10, order='full')": "ValueError: tokens: ... got None",
    "check([[1] * 5] * 2, TWO, vocab_size=10, order='left')": "ValueError: order: wanted one of ",
    "check([[1] * 5] * 2, TWO, vocab_size=10, max_len=4)": "ValueError: positions: ... inside the learned positions, 0..3, got 4 at index [1, 4]",
    "check([[1]], TokenPositions([[-1]]), vocab_size=10, max_len=4)": "ValueError: positions: ... 0..3, got -1 at index [0, 0]",
    "check([[1]], vocab_size=10, max_len=4)": "ValueError: tokens: ... to check their order or their positions, got None",
    "check([[1] * 5] * 2, TWO, vocab_size=10, max_len=0)": "ValueError: max_len: ... 1, got 0",
}


def test_batches_that_do_not_fit_are_found():
    each_raises(REFUSED, globals())


# The orders that a row has: this one and those after it.
ORDERS = {
    "full": [[1, 1, 1, 1]],
    "right": [[7, 7, 0, 0], [0, 0, 0, 0]],
    "packed": [[2, 2, 0, 1], [0, 5, 5, 5], [0, 3, 0, 0]],
    None: [[1, 0, 1, 1], [1, 2, 2, 1]],
}


def test_a_row_is_taken_in_the_orders_that_it_has():
    words = ["full", "right", "packed"]
    counted = jax.jit(TokenPositions.from_segment_ids)
    for number, rows in enumerate(ORDERS.values()):
        for row, (place, order) in itertools.product(rows, enumerate(words)):
            # Positions from 5 on in each run, as a cut batch has them.
            tokens = TokenPositions(counted(np.array(row, np.int32)).positions + 5, segment_ids=row)
            if place >= number:
                check_order(tokens, order)
            else:
                with pytest.raises(ValueError, match=r"^tokens: wanted .* got another order"):
                    check_order(tokens, order)


@pytest.mark.parametrize(
    ("positions", "place"),
    [
        ([0, 1, 3], 2),
        ([0, 2, 1], 1),
        ([-(2**31), 2**31 - 1, 0], 1),
        # In 32 bits, the difference would be 1.
        ([2**31 - 2, 2**31 - 1, -(2**31)], 2),
    ],
)
def test_positions_that_do_not_rise_by_one_are_found(positions, place):
    want = r"^tokens: wanted positions that rise by one from token to .* got another one at "
    for order in ("full", "right", "packed"):
        with pytest.raises(ValueError, match=rf"{want}\[0, {place}\]"):
            check_order(TokenPositions(positions), order)


# --- draws

SPACE = draws.Space(
    {
        "kind": ["padded", "ended"],
        "tokens": [
            batches.MAKE["padded"],
            "T.from_segment_ids(T.from_ids(x[0], pad_id=0).positions)",
            "T.from_positions(T.from_ids(x[0], pad_id=0).positions)",
            "T.from_ids(np.roll(x[0], 1, 1), pad_id=0)",
            "T.from_ids(x[0][:, ::-1], pad_id=0)",
            "T.from_ids(x[0][::-1], pad_id=0)",
            "T.from_ids(x[0], pad_id=1)",
            "T.from_ids(x[0], pad_id=0).take([*range(12)][::-1])",
            "T.from_lengths((x[0] != 0).sum(1), 12)",
        ],
    },
    default=20,
    quick=20,
)
PROGRAM = """\
import batches, numpy as np, transformer_embed as te
T, x = te.TokenPositions, batches.arrays({kind!r}, {seed})
tokens = {tokens}
check = lambda: te.check_batch(x[0], tokens, vocab_size=9, pad_id=0)
fits = np.array_equal(x[0] != 0, tokens.padding_mask)
"""


@pytest.mark.parametrize("number", SPACE.numbers())
def test_a_batch_passes_if_padding_and_its_id_agree(number):
    chosen = SPACE.choices(number)
    program = PROGRAM.format(**vars(chosen), seed=number)
    with draws.repeated_by(number, program):
        ran = draws.run(number, program)
        if ran.fits:
            ran.check()
        else:
            with pytest.raises(ValueError, match=r"^ids: wanted pad_id, 0, at padding and nowhere"):
                ran.check()
