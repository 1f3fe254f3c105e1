"""Values that a host refuses: on a device, no token sees a later one or one of another text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal
from refused import each_raises

import transformer_embed as te

T = te.TokenPositions
END = 2**31 - 1

# Each array is an error on the host: the constructor, the array, and positions and segment ids of
# the tokens on a device.
CASES = {
    "a mask with a gap": (T.from_segment_ids, [1, 1, 0, 1, 1], [0, 1, 0, 2, 3], [1, 1, 0, 1, 1]),
    "two texts, mixed": (T.from_segment_ids, [3, 1, 3, 3, 1], [0, 0, 1, 2, 1], [3, 1, 3, 3, 1]),
    "padding of -1": (T.from_segment_ids, [4, 4, -1, 2, -1], [0, 1, 0, 0, 0], [4, 4, 0, 2, 0]),
    "an offset too far": (
        functools.partial(T.from_offset, length=5),
        END - 2,
        [END - 2, END - 1, END, 0, 0],
        [1, 1, 1, 0, 0],
    ),
    "a cycle": (T.from_parents, [-1, 2, 3, 1, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 1]),
    "a cycle below": (T.from_parents, [0, -1, 0, 1, 3], [0, 0, 0, 1, 2], [0, 1, 0, 1, 1]),
    "a parent outside": (T.from_parents, [-1, 0, 7, 2, 1], [0, 1, 0, 0, 2], [1, 1, 0, 0, 1]),
    "a parent below -2": (T.from_parents, [-1, -3, 1, 0, 3], [0, 0, 0, 1, 2], [1, 0, 0, 1, 1]),
    "a parent of padding": (T.from_parents, [-2, 0, 1, -1, 3], [0, 0, 0, 0, 1], [0, 0, 0, 1, 1]),
    "a negative length": (functools.partial(T.from_lengths, length=5), -3, [0] * 5, [0] * 5),
    "a length too long": (
        functools.partial(T.from_lengths, length=5),
        9,
        [0, 1, 2, 3, 4],
        [1, 1, 1, 1, 1],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_that_a_host_refuses_see_nothing_wrong_on_a_device(name):
    make, array, positions, segment_ids = CASES[name]
    with pytest.raises(ValueError, match=r": wanted "):
        make(array)
    tokens = make(jnp.asarray(array))
    equal(tokens.positions, positions)
    equal(tokens.segment_ids, segment_ids)
    mask = np.asarray(te.AttentionMask(tokens, causal=True).dense())[0]
    is_later = np.asarray(positions) > np.asarray(positions)[:, None]
    assert not (mask & is_later).any()
    assert not mask[np.asarray(segment_ids) == 0].any()
    assert not mask[:, np.asarray(segment_ids) == 0].any()
    # Each token sees itself.
    equal(np.diagonal(mask), np.asarray(segment_ids) != 0)


def test_positions_that_wrap_begin_a_segment():
    tokens = T.from_positions([END - 1, END, -END - 1, -END])
    equal(tokens.segment_ids, [1, 1, 2, 2])


def test_a_negative_number_of_tokens_makes_the_row_padding():
    parents = te.shared_prefix_parents(
        jnp.array([2, -1, 2]), jnp.array([[1, 2]] * 2 + [[1, -2]]), 5
    )
    equal(parents, [[-1, 0, 1, 1, 3], [-2] * 5, [-2] * 5])


def test_a_mask_with_gaps_is_one_sequence():
    """As `from_ids` of the same places, with every option."""
    random = np.random.default_rng(0)
    for shape, options in (((9,), {}), ((4, 9), {"start": 2, "at_padding": 1})):
        ids = random.integers(0, 3, shape)
        tokens = T.from_mask(ids != 0, **options)
        equal(tokens, T.from_ids(ids, pad_id=0, **options))
        equal(jax.jit(functools.partial(T.from_mask, **options))(ids != 0), tokens)
    tokens = T.from_mask([[False, True, False, True]], start=2, at_padding=1)
    equal(tokens.positions, [[1, 2, 1, 3]])
    assert T.from_mask(np.zeros((2, 0), bool)).positions.shape == (2, 0)


def test_padding_between_documents_is_no_document():
    equal(T.from_segment_ids([[1, 0, 2, 0, 3]]).positions, [[0] * 5])
    equal(T.from_segment_ids([[0, 0, 1, 0, 0, 2, 2, 0, 0]]).positions, [[0] * 6 + [1, 0, 0]])


TOKENS = T([0, 1, 2], segment_ids=[1, 1, 1])
MASK = te.AttentionMask(TOKENS, causal=True)
HEADS = np.zeros((3, 2, 4), np.float32)
OF_ITS_ARRAYS = "TypeError: TokenPositions: wanted one of its arrays, tokens.positions, tokens.segment_ids or tokens.padding_mask, got the tokens"
ITS_ARRAY = "TypeError: AttentionMask: wanted its array, mask.dense(), got the mask"
REFUSED = {
    "T.from_mask([1, 1, 0])": "TypeError: mask: wanted a bool array, True = a token (`mask != 0` makes one), got int64",
    "T.from_mask([[[True]]])": "ValueError: mask: ... got shape [1, 1, 1]",
    "T.from_mask([True] * 4, start=2**31 - 3)": "ValueError: start: ... got 2147483645",
    "T.from_segment_ids([[True, False]])": "TypeError: segment_ids: wanted integers, a number for each sequence (te.TokenPositions.from_mask takes a bool mask), got bool",
    "T([0, 1], segment_ids=jnp.array([True, False]))": "TypeError: segment_ids: wanted integers, a number for each sequence (te.TokenPositions.from_mask takes a bool mask), got bool",
    "T.from_segment_ids([[1, 1, 0, 1]])": "ValueError: segment_ids: wanted one run of tokens for each number (te.TokenPositions.from_mask takes a mask with gaps), got two runs of one in row 0",
    "T(TOKENS)": OF_ITS_ARRAYS,
    "T.from_segment_ids(TOKENS)": OF_ITS_ARRAYS,
    "te.apply_rotary(HEADS, TOKENS)": OF_ITS_ARRAYS,
    "te.sinusoidal_encoding(TOKENS, 4)": OF_ITS_ARRAYS,
    "te.alibi_bias(TOKENS, [0], 4, causal=True)": OF_ITS_ARRAYS,
    "te.mask_to_bias(TOKENS)": OF_ITS_ARRAYS,
    "te.shift_right([1, 2, 3], 0, segment_ids=TOKENS)": OF_ITS_ARRAYS,
    "np.asarray(TOKENS)": OF_ITS_ARRAYS,
    "te.linear_cross_entropy(HEADS[:, 0], np.zeros((5, 4), np.float32), [1, 2, 3], mask=TOKENS)": OF_ITS_ARRAYS,
    "te.mask_to_bias(MASK)": ITS_ARRAY,
    "jnp.where(MASK, 1, 0)": ITS_ARRAY,
    "np.asarray(MASK)": ITS_ARRAY,
    "jax.nn.dot_product_attention(HEADS, HEADS, HEADS, mask=MASK)": ITS_ARRAY,
    "jax.nn.dot_product_attention(HEADS, HEADS, HEADS, mask=MASK & MASK)": ITS_ARRAY.replace(
        "AttentionMask", "JoinedMask"
    ),
}


def test_objects_and_bools_in_the_place_of_arrays_are_refused():
    each_raises(REFUSED, globals())
