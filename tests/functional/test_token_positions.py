import dataclasses
import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import set_mesh

import transformer_embed as te


def count_by_hand(segment_ids):
    positions = np.zeros_like(segment_ids)
    for row, line in enumerate(segment_ids):
        for column, segment in enumerate(line):
            if segment != 0:
                run = column
                while run > 0 and line[run - 1] == segment:
                    run -= 1
                positions[row, column] = column - run
    return positions


SEGMENTS = np.array(
    [[1, 1, 1, 2, 2, 0, 0], [0, 0, 5, 5, 0, 6, 6], [0] * 7, [3] * 7, [1, 2, 3, 4, 5, 6, 7]]
)


def test_positions_restart_at_each_segment():
    token_positions = te.TokenPositions.from_segment_ids(SEGMENTS)
    np.testing.assert_array_equal(token_positions.positions, count_by_hand(SEGMENTS))
    np.testing.assert_array_equal(token_positions.segment_ids, SEGMENTS)
    np.testing.assert_array_equal(token_positions.padding_mask, SEGMENTS != 0)
    assert token_positions.positions.dtype == token_positions.segment_ids.dtype == jnp.int32


def next_by_hand(segment_ids):
    return [
        [a != 0 and a == b for a, b in zip(row, [*row, 0][1:], strict=True)] for row in segment_ids
    ]


@pytest.mark.parametrize(
    "segments", [SEGMENTS, [[4]], np.zeros((2, 0), int), [[-1, -1, 0, 2]]], ids=len
)
def test_the_last_token_of_each_sequence_has_no_next_one(segments):
    """Also where the row ends, and where its first token is of the same segment."""
    mask = te.TokenPositions.from_segment_ids(np.asarray(segments)[:, :3]).next_token_mask
    assert mask.tolist() == next_by_hand(np.asarray(segments)[:, :3].tolist())
    compiled = jax.jit(lambda held: held.next_token_mask)
    segments = jnp.asarray(segments, jnp.int32)
    mask = compiled(te.TokenPositions.from_segment_ids(segments))
    assert (mask.dtype, mask.shape) == (jnp.bool_, segments.shape)
    assert mask.tolist() == next_by_hand(segments.tolist())


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_padded_rows_have_next_tokens(padding_side):
    held = te.TokenPositions.from_lengths([0, 1, 3, 4], 4, padding_side=padding_side)
    assert held.next_token_mask.tolist() == next_by_hand(held.segment_ids.tolist())
    ids = np.where(held.padding_mask, 7, 0)
    of_ids = te.TokenPositions.from_ids(ids, pad_id=0)
    np.testing.assert_array_equal(of_ids.next_token_mask, held.next_token_mask)


def test_a_decoded_token_has_no_next_one():
    assert te.TokenPositions.from_offset([3, 5], 1).next_token_mask.tolist() == [[False], [False]]


def test_packed_sequences_train_like_the_sequences_alone():
    """Without the mask, the last token of each document is asked for the first of the next."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((9, 4), np.float32)
    documents = [rng.integers(1, 9, size) for size in (3, 1, 4)]
    losses = [
        te.linear_cross_entropy(table[ids[:-1]], table, ids[1:], reduction="sum")
        for ids in documents
    ]
    packed = np.concatenate([*documents, [0, 0]])[None]
    batch = te.TokenPositions.from_segment_ids([[1] * 3 + [2] + [3] * 4 + [0, 0]])
    together = te.linear_cross_entropy(
        table[packed],
        table,
        jnp.roll(packed, -1, axis=-1),
        mask=batch.next_token_mask,
        reduction="sum",
    )
    np.testing.assert_allclose(together, sum(losses), rtol=1e-6)


@pytest.mark.parametrize("function", [te.padding_mask, te.TokenPositions.from_ids])
def test_the_padding_id_has_no_default(function):
    """In GPT-2, id 0 is "!"."""
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'pad_id'"):
        function([[1, 0]])


def test_ids_padded_on_either_side():
    token_positions = te.TokenPositions.from_ids(
        [[9, 8, 7, 0, 0], [0, 0, 9, 8, 7], [0, 9, 8, 7, 0], [0] * 5], pad_id=0
    )
    assert token_positions.positions.tolist() == [
        [0, 1, 2, 0, 0],
        [0, 0, 0, 1, 2],
        [0, 0, 1, 2, 0],
        [0] * 5,
    ]


def test_padding_gets_no_negative_position():
    assert te.TokenPositions.from_ids([[0, 0, 5]], pad_id=0).positions.min() == 0


def test_positions_equal_fairseqs_for_roberta():
    """fairseq's make_positions: cumsum of the mask times the mask, plus padding_idx."""
    ids = np.array([[0, 31414, 232, 2, 1, 1], [1, 1, 0, 5, 6, 2], [0, 1, 5, 1, 1, 2]])
    mask = (ids != 1).astype(int)
    token_positions = te.TokenPositions.from_ids(ids, pad_id=1, start=2, at_padding=1)
    np.testing.assert_array_equal(token_positions.positions, np.cumsum(mask, 1) * mask + 1)


def test_positions_equal_fairseqs_for_opt():
    """OPT's positions: cumsum of the mask times the mask, minus one, plus the offset of 2."""
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    token_positions = te.TokenPositions.from_ids(mask, pad_id=0, start=2, at_padding=1)
    np.testing.assert_array_equal(token_positions.positions, np.cumsum(mask, 1) * mask - 1 + 2)


def test_roberta_with_a_cache():
    """Its positions in a step: cumsum of the mask plus the past length, times the mask, plus
    padding_idx."""
    mask, past = np.array([[1, 1, 0], [1, 1, 1]]), np.array([[4], [7]])
    step = te.TokenPositions.from_ids(mask, pad_id=0, start=2, at_padding=1)
    positions = np.where(step.padding_mask, step.positions + past, step.positions)
    np.testing.assert_array_equal(positions, (np.cumsum(mask, 1) + past) * mask + 1)


def test_wide_host_ids_are_not_padding():
    token_positions = te.TokenPositions.from_ids(np.array([2**32, 5, 0, -(2**32)]), pad_id=0)
    assert token_positions.positions.tolist() == [[0, 1, 0, 2]]
    assert token_positions.padding_mask.tolist() == [[True, True, False, True]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_from_lengths_marks_the_padding_side(side):
    token_positions = te.TokenPositions.from_lengths([0, 2, 4], 4, padding_side=side)
    expected = [[0] * 4, [0, 0, 1, 1] if side == "left" else [1, 1, 0, 0], [1] * 4]
    assert token_positions.segment_ids.tolist() == expected
    np.testing.assert_array_equal(token_positions.positions, count_by_hand(np.array(expected)))


@pytest.mark.parametrize("offset", [3, [3], [3, 0, 2**31 - 5]])
def test_from_offset_counts_from_the_offset(offset):
    token_positions = te.TokenPositions.from_offset(offset, 2)
    np.testing.assert_array_equal(
        token_positions.positions, np.atleast_1d(offset)[:, None] + np.arange(2)
    )
    assert np.asarray(token_positions.padding_mask).all()


def test_left_padding_equals_right_padding_after_a_shift():
    left, right = (
        te.TokenPositions.from_lengths([2, 3], 5, padding_side=side) for side in ("left", "right")
    )
    for row, length in enumerate([2, 3]):
        np.testing.assert_array_equal(
            np.asarray(left.positions)[row, 5 - length :], np.asarray(right.positions)[row, :length]
        )


def test_one_trace_for_all_values():
    traces = []

    @jax.jit
    def place(ids, offset):
        traces.append(ids)
        return (
            te.TokenPositions.from_ids(ids, pad_id=0),
            te.TokenPositions.from_offset(offset, 1),
            te.TokenPositions.from_lengths(offset, 4),
            te.TokenPositions.from_segment_ids(ids),
        )

    for seed in range(3):
        ids = jnp.array(np.random.default_rng(seed).integers(0, 3, (2, 4)))
        compiled = place(ids, jnp.array([seed, 2 * seed]))
        np.testing.assert_array_equal(
            compiled[0].positions, te.TokenPositions.from_ids(ids, pad_id=0).positions
        )
        np.testing.assert_array_equal(
            compiled[3].positions, te.TokenPositions.from_segment_ids(ids).positions
        )
    assert len(traces) == 1


def test_vmap_over_batches():
    ids = np.random.default_rng(0).integers(0, 3, (5, 2, 6))
    mapped = jax.vmap(functools.partial(te.TokenPositions.from_ids, pad_id=0))(ids)
    for batch, positions in zip(ids, mapped.positions, strict=True):
        np.testing.assert_array_equal(
            positions, te.TokenPositions.from_ids(batch, pad_id=0).positions
        )


class TestMasks:
    """What AttentionMask makes of token positions, against the rule written out token by token."""

    def allowed(self, token_positions, row, t, s):
        segments, padding, positions = (
            np.asarray(each)[row]
            for each in (
                token_positions.segment_ids,
                token_positions.padding_mask,
                token_positions.positions,
            )
        )
        return bool(segments[t] == segments[s] and padding[s] and positions[s] <= positions[t])

    @pytest.mark.parametrize(
        "token_positions",
        [
            te.TokenPositions.from_segment_ids(SEGMENTS),
            te.TokenPositions.from_ids([[0, 0, 7, 8], [5, 6, 7, 0]], pad_id=0),
            te.TokenPositions.from_lengths([1, 3], 4, padding_side="left"),
        ],
    )
    def test_the_mask_of_any_token_positions_follows_the_rule(self, token_positions):
        mask = te.AttentionMask(token_positions, causal=True).dense()
        batch, length = token_positions.positions.shape
        expected = [
            [[self.allowed(token_positions, b, t, s) for s in range(length)] for t in range(length)]
            for b in range(batch)
        ]
        np.testing.assert_array_equal(mask[:, 0], expected)

    def test_decoding_with_one_offset_a_row(self):
        step, cache = (
            te.TokenPositions.from_offset([5, 2], 1),
            te.TokenPositions.from_lengths([6, 3], 8),
        )
        mask = te.AttentionMask(step, cache, causal=True).dense()
        assert mask.shape == (2, 1, 1, 8)
        assert mask.sum(-1).ravel().tolist() == [6, 3]


COMES_BACK = np.array([[1, 1, 2, 0], [4, 0, 4, 0]], np.uint8)


def test_positions_reach_the_ends_of_int32():
    assert te.TokenPositions.from_offset(2**31 - 3, 3).positions[0, -1] == 2**31 - 1
    assert (
        te.TokenPositions.from_ids([1, 1, 1], pad_id=0, start=2**31 - 3).positions[0, -1]
        == 2**31 - 1
    )
    assert te.TokenPositions.from_offset(-(2**31), 1).positions.tolist() == [[-(2**31)]]


def test_any_number_but_zero_is_a_segment():
    placed = te.TokenPositions.from_segment_ids([[-1, -1, 7, 7, 0, 0]])
    assert placed.positions.tolist() == [[0, 1, 0, 1, 0, 0]]
    assert placed.padding_mask.tolist() == [[True] * 4 + [False] * 2]


def test_they_pass_through_scan_and_the_serialisation_of_an_exported_program():
    offset = jnp.array([3, 5])

    def advance(held, _):
        return dataclasses.replace(held, positions=held.positions + 1), held.padding_mask

    held = dataclasses.replace(te.TokenPositions.from_offset(offset, 2))
    held, _ = jax.lax.scan(advance, held, length=4)
    exported = jax.export.export(jax.jit(lambda held: advance(held, None)[0]))(held)
    loaded = jax.export.deserialize(exported.serialize())
    stepped = loaded.call(held)
    assert isinstance(stepped, te.TokenPositions)
    assert stepped.positions.tolist() == [[8, 9], [10, 11]]


def test_empty():
    assert te.TokenPositions.from_lengths([0], 0).positions.shape == (1, 0)
    assert te.TokenPositions.from_ids(np.zeros([2, 0], int), pad_id=0).positions.shape == (2, 0)
    assert te.TokenPositions.from_offset(3, 0).positions.shape == (1, 0)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            TypeError,
            "ids: wanted an integer dtype, got float32",
            lambda: te.TokenPositions.from_ids(np.ones([1, 2], np.float32), pad_id=0),
        ),
        (
            ValueError,
            "ids: wanted shape [length] or [batch, length], got shape [1, 1, 1]",
            lambda: te.TokenPositions.from_ids([[[1]]], pad_id=0),
        ),
        (
            TypeError,
            "pad_id: wanted a Python int, got",
            lambda: te.TokenPositions.from_ids([1], pad_id=None),
        ),
        (
            TypeError,
            "start: wanted a Python int, got float 0.5",
            lambda: te.TokenPositions.from_ids([1], pad_id=0, start=0.5),
        ),
        (
            ValueError,
            "lengths: wanted shape [batch], got shape []",
            lambda: te.TokenPositions.from_lengths(3, 4),
        ),
        (
            ValueError,
            "length: wanted an int of at least 0, got -1",
            lambda: te.TokenPositions.from_lengths([3], -1),
        ),
        (
            ValueError,
            "padding_side: wanted one of 'right', 'left', got 'both'",
            lambda: te.TokenPositions.from_lengths([3], 4, padding_side="both"),
        ),
        (
            TypeError,
            "segment_ids: wanted an integer dtype, got bool",
            lambda: te.TokenPositions.from_segment_ids(np.ones([1, 2], bool)),
        ),
        (
            ValueError,
            "offset: wanted shape [] or [batch], got shape [1, 1]",
            lambda: te.TokenPositions.from_offset([[3]], 4),
        ),
        (
            ValueError,
            "offset: wanted integers inside int32",
            lambda: te.TokenPositions.from_offset(2**31, 4),
        ),
        (
            ValueError,
            "offset: wanted an int of at most 2147483645, for 3 positions",
            lambda: te.TokenPositions.from_offset([0, 2**31 - 2], 3),
        ),
        (
            ValueError,
            "start: wanted an int of at most 2147483644, for 4 positions",
            lambda: te.TokenPositions.from_ids([1] * 4, pad_id=0, start=2**31 - 3),
        ),
        (
            ValueError,
            "lengths: wanted integers inside the padded length, 0..4, got -3 at index [1]",
            lambda: te.TokenPositions.from_lengths([2, -3], 4),
        ),
        (
            ValueError,
            "lengths: wanted integers inside the padded length, 0..4, got 5 at index [1]",
            lambda: te.TokenPositions.from_lengths([4, 5], 4),
        ),
        (
            ValueError,
            "segment_ids: wanted integers inside int32",
            lambda: te.TokenPositions.from_segment_ids([[2**40, 2**41]]),
        ),
        (
            ValueError,
            "segment_ids: wanted one run of tokens for each number, got two runs of one in row 1",
            lambda: te.TokenPositions.from_segment_ids(COMES_BACK),
        ),
        (
            TypeError,
            "offset: wanted an integer dtype, got float64",
            lambda: te.TokenPositions.from_offset(0.5, 4),
        ),
    ],
)
def test_bad_arguments_raise_errors(kind, message, call):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(message)


# --- write


def cache_of(length):
    return te.TokenPositions.from_lengths([3, 1], length)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "jit"])
def test_tokens_are_written_into_slots_of_a_cache(compile):
    write = lambda cache, tokens, slot: cache.write(tokens, slot)
    write = jax.jit(write) if compile else write
    written = write(cache_of(5), te.TokenPositions.from_offset([3, 1], 2), 3)
    np.testing.assert_array_equal(written.positions, [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    np.testing.assert_array_equal(written.segment_ids, [[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]])


@pytest.mark.parametrize("slot", [4, 5, -1, 2**31 - 1])
def test_tokens_that_do_not_fit_overwrite_nothing(slot):
    cache, tokens = cache_of(5), te.TokenPositions.from_offset(3, 2)
    with pytest.raises(ValueError, match=rf"^slot: wanted .* 0\.\.3, got {slot}$"):
        cache.write(tokens, slot)
    written = jax.jit(lambda slot: cache.write(tokens, slot))(jnp.int32(slot))
    np.testing.assert_array_equal(written.positions, cache.positions)
    np.testing.assert_array_equal(written.segment_ids, cache.segment_ids)


# --- orders

ORDERS = {
    "full": [[1, 1, 1, 1]],
    "right": [[7, 7, 0, 0], [0, 0, 0, 0]],
    "packed": [[2, 2, 0, 1], [0, 5, 5, 5], [0, 3, 0, 0]],
    None: [[1, 0, 1, 1], [1, 2, 2, 1]],
}


def test_check_order_takes_each_row_in_the_orders_that_it_has():
    words = ["full", "right", "packed"]
    for number, (name, rows) in enumerate(ORDERS.items()):
        assert name in (*words, None)
        for row in rows:
            tokens = te.TokenPositions(starts_of_runs(row), row)
            for place, order in enumerate(words):
                if place >= number:
                    te.check_order(tokens, order)
                else:
                    with pytest.raises(ValueError, match=r"^tokens: wanted .* got another order"):
                        te.check_order(tokens, order)


def starts_of_runs(row):
    """Positions from 5 on in each run, as a cut batch has them."""
    positions = [5]
    for before, segment in itertools.pairwise(row):
        positions.append(positions[-1] + 1 if before == segment else 5)
    return positions


@pytest.mark.parametrize(
    ("positions", "place"), [([0, 1, 3], 2), ([0, 2, 1], 1), ([-(2**31), 2**31 - 1, 0], 1)]
)
def test_check_order_finds_positions_that_do_not_rise_by_one(positions, place):
    want = rf"^tokens: wanted positions that rise by one from token to .* got another one at \[0, {place}\]"
    for order in ("full", "right", "packed"):
        with pytest.raises(ValueError, match=want):
            te.check_order(te.TokenPositions(positions), order)


def test_check_order_is_for_the_host():
    check = lambda tokens: te.check_order(tokens, "full")
    with pytest.raises(TypeError, match=r"^tokens: wanted values on the host, outside of jit, got"):
        jax.jit(check)(te.TokenPositions.from_offset(0, 3))
    with pytest.raises(ValueError, match=r"^order: wanted one of 'full', 'right', 'packed', got"):
        te.check_order(te.TokenPositions.from_offset(0, 3), "left")


# --- meshes with explicit axes


@pytest.mark.parametrize("spec", [(None, "m"), ("m", None)], ids=["length", "batch"])
def test_tokens_split_over_explicit_axes(spec):
    """Along the length, rows are gathered where a row is needed whole."""
    mesh = jax.make_mesh((2,), ("m",), axis_types=(jax.sharding.AxisType.Explicit,))
    ids = np.array([[0, 5, 6, 7, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]])
    segments = np.array([[1, 1, 2, 2, 2, 0, 3, 3], [4, 4, 4, 4, 5, 5, 5, 5]])

    def everything(ids, segments):
        both = [
            te.TokenPositions.from_ids(ids, pad_id=0),
            te.TokenPositions.from_segment_ids(segments),
        ]
        masks = [te.AttentionMask(tokens, causal=True, window=(2, 0)) for tokens in both]
        return [
            [tokens, tokens.next_token_mask, mask.dense(), mask.tile_kinds((2, 4))]
            for tokens, mask in zip(both, masks, strict=True)
        ]

    expected = everything(ids, segments)
    with set_mesh(mesh):
        arrays = [jax.device_put(a, jax.P(*spec)) for a in (ids, segments)]
        for function in (everything, jax.jit(everything)):
            jax.tree.map(np.testing.assert_array_equal, function(*arrays), expected)
