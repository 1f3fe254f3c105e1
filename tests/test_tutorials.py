"""Five tutorials on the input layer of a Transformer: what they print, the formulas they state, and
the mistakes they make.

- the position embedding note: a PyTorch note on position encoding alone;
- the word embedding notebook: word embedding, positions and masks of one 3 x 8 batch, in PyTorch;
- the DataCamp slides: J. Chapman, "Transformer Models with PyTorch", embedding and positional
encoding;
- the encoding walk-through: a PyTorch notebook that builds a 10 x 6 table step by step;
- the Haiku exercise: embeddings and positional encoding as Haiku modules.
"""

import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_embed as te

# The accuracy that `sinusoidal_encoding` states.
ENCODING_ERROR = 6.0e-8
# Four decimals are printed, from float32 values below 4 in magnitude that torch rounds by at most
# 2**-23 an operation.
PRINTED_ERROR = 0.5e-4 + 4 * 2.0**-23
# Two printed numbers are subtracted.
DIFFERENCE_ERROR = 2 * PRINTED_ERROR
# One product and one sum in float32, of numbers below 4 * sqrt(512) in magnitude.
SUM_ERROR = 4 * math.sqrt(512) * 2.0**-23
# In torch's power the exponent, below 1, is rounded to float32: its error counts log(10000) times
# in the denominator.
POWER_ERROR = math.log(10_000) * 2.0**-24
# A wrong formula is wrong by more than any rounding: this is a tenth of the range of a sine.
VISIBLE = 0.2

BATCH = [
    [101, 3, 2, 5, 7, 8, 102, 0],
    [101, 13, 8, 2, 9, 102, 0, 0],
    [101, 21, 8, 15, 9, 7, 13, 102],
]

# The printout of the word embedding notebook, rows of d_model = 6, whole up to place 6 of the
# second sentence.
ENCODED = [
    [-0.4895, 2.0224, 0.1256, 0.2468, 0.9603, 0.1633],
    [0.5383, -0.0153, -1.7394, 0.5999, -0.2176, 2.6253],
    [0.6448, -2.4575, 0.1297, 2.0142, 0.3538, 1.9979],
    [-1.0599, -1.7332, -0.9198, 3.6886, 0.3467, 0.5871],
    [-0.8170, -0.4961, -2.3759, 1.4874, 0.9827, -0.1997],
    [-0.6883, 0.3148, -0.2839, 0.2361, -0.2783, -0.7248],
    [-2.5828, -0.1106, -0.4562, 0.6592, 0.0090, 1.7933],
    [0.6318, -1.1657, 0.3813, 2.0933, -0.3936, 1.0309],
    [-0.4895, 2.0224, 0.1256, 0.2468, 0.9603, 0.1633],
    [1.9153, 0.2581, -1.4412, 2.0708, 0.1891, 1.6408],
    [1.1799, -0.3850, -0.4212, 0.2586, -0.2847, -0.7248],
    [-0.1233, -3.0313, 0.1758, 2.0088, 0.3559, 1.9979],
    [-1.2965, 0.3316, 2.1926, 0.5421, 0.6768, -0.3318],
    [-3.2623, -0.7871, -0.5011, 0.6709, 0.0069, 1.7933],
    [-0.3046, -0.9594, 0.3369, 2.1071, -0.3957, 1.0310],
]
PRINTED_IDS = (BATCH[0] + BATCH[1])[: len(ENCODED)]
PRINTED_POSITIONS = (list(range(8)) * 2)[: len(ENCODED)]

# The printouts of the encoding walk-through, positions 0..9 and d_model = 6.
EVEN_DENOMINATOR = [1.0000, 21.5443, 464.1590]
ODD_DENOMINATOR = [4.6416, 100.0000, 2154.4343]
WALK_THROUGH_TABLE = [
    [0.0000, 1.0000, 0.0000, 1.0000, 0.0000, 1.0000],
    [0.8415, 0.5403, 0.0464, 0.9989, 0.0022, 1.0000],
    [0.9093, -0.4161, 0.0927, 0.9957, 0.0043, 1.0000],
    [0.1411, -0.9900, 0.1388, 0.9903, 0.0065, 1.0000],
    [-0.7568, -0.6536, 0.1846, 0.9828, 0.0086, 1.0000],
    [-0.9589, 0.2837, 0.2300, 0.9732, 0.0108, 0.9999],
    [-0.2794, 0.9602, 0.2749, 0.9615, 0.0129, 0.9999],
    [0.6570, 0.7539, 0.3192, 0.9477, 0.0151, 0.9999],
    [0.9894, -0.1455, 0.3629, 0.9318, 0.0172, 0.9999],
    [0.4121, -0.9111, 0.4057, 0.9140, 0.0194, 0.9998],
]


def interleaved(sines, cosines):
    table = np.empty((sines.shape[0], sines.shape[1] + cosines.shape[1]))
    table[:, 0::2], table[:, 1::2] = sines, cosines
    return table


def paper(length, d_model, base=10_000.0):
    """Vaswani et al. (2017), section 3.5, in float64."""
    angles = np.arange(length)[:, None] / base ** (2 * np.arange(d_model // 2) / d_model)
    return interleaved(np.sin(angles), np.cos(angles))


def doubled_exponent(length, d_model):
    i = np.arange(0, d_model, 2)
    angles = np.arange(length)[:, None] / 10_000.0 ** (2 * i / d_model)
    return interleaved(np.sin(angles), np.cos(angles))


def multiplied(length, d_model):
    angles = np.arange(length)[:, None] * 100.0 ** np.arange(d_model // 2)
    return interleaved(np.sin(angles), np.cos(angles))


def cosine_first(length, d_model):
    table = paper(length, d_model)
    return interleaved(table[:, 1::2], table[:, 0::2])


def sines_only(length, d_model):
    table = paper(length, d_model)
    return interleaved(table[:, 0::2], table[:, 0::2])


def odd_denominators(length, d_model):
    table = paper(length, d_model)
    angles = np.arange(length)[:, None] / 10_000.0 ** (np.arange(1, d_model, 2) / d_model)
    return interleaved(table[:, 0::2], np.cos(angles))


def base_1000(length, d_model):
    return paper(length, d_model, base=1_000.0)


def dropped_set(length, d_model):
    table = jnp.zeros((length, d_model))
    table.at[:, 0::2].set(paper(length, d_model)[:, 0::2])
    table.at[:, 1::2].set(paper(length, d_model)[:, 1::2])
    return np.asarray(table)


MISTAKES = [
    pytest.param(doubled_exponent, id="the position embedding note doubles the exponent"),
    pytest.param(multiplied, id="the position embedding note multiplies in its worked example"),
    pytest.param(
        cosine_first,
        id="the position embedding note and the DataCamp slides give the cosine the even channels",
    ),
    pytest.param(sines_only, id="the encoding walk-through writes a sine for both halves"),
    pytest.param(
        odd_denominators, id="the encoding walk-through computes denominators of odd channels"
    ),
    pytest.param(base_1000, id="the Haiku exercise writes a base of 1000"),
    pytest.param(dropped_set, id="the Haiku exercise drops the result of set"),
]


def encode(x, **options):
    """PositionalEncoding in evaluation."""
    x = jnp.asarray(x)
    module = hk.transform(
        lambda: te.PositionalEncoding(te.Sinusoidal(**options), x.shape[-1])(x, is_training=False)
    )
    return module.apply({}, None)


def embed(table, ids, **options):
    """TokenEmbedding with a given table."""
    module = hk.transform(lambda: te.TokenEmbedding(*table.shape, **options)(ids))
    return module.apply({"token_embedding": {"embeddings": jnp.asarray(table, jnp.float32)}}, None)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def denominators(d_model):
    """What divides the position in each sine: one over the sine's slope at position 0."""
    slopes = jax.jacfwd(functools.partial(te.sinusoidal_encoding, d_model=d_model))(0.0)
    return 1 / np.asarray(slopes, np.float64)[0::2]


# --- What they print.


def test_word_embedding_notebook_prints_this_padding_mask():
    expected = [[True] * 7 + [False], [True] * 6 + [False] * 2, [True] * 8]
    assert te.padding_mask(BATCH, pad_id=0).tolist() == expected


@pytest.mark.parametrize("token", [0, 2, 8, 102])
def test_word_embedding_notebook_one_id_at_two_places_differs_by_the_encodings(token):
    first, second = [n for n, printed in enumerate(PRINTED_IDS) if printed == token]
    printed = np.subtract(ENCODED[second], ENCODED[first])
    encodings = np.asarray(
        te.sinusoidal_encoding([PRINTED_POSITIONS[first], PRINTED_POSITIONS[second]], 6), np.float64
    )
    np.testing.assert_allclose(encodings[1] - encodings[0], printed, rtol=0, atol=DIFFERENCE_ERROR)
    assert np.abs(printed).max() > VISIBLE


@pytest.mark.slow
def test_encoding_walk_through_prints_this_table():
    np.testing.assert_allclose(
        encode(np.zeros((10, 6), np.float32)), WALK_THROUGH_TABLE, rtol=0, atol=PRINTED_ERROR
    )


@pytest.mark.slow
def test_denominators_are_those_that_the_encoding_walk_through_prints():
    """The position embedding note lists 1, 100 and 10000 for d_model = 4: one too many."""
    np.testing.assert_allclose(
        denominators(6), EVEN_DENOMINATOR, rtol=POWER_ERROR, atol=PRINTED_ERROR
    )
    np.testing.assert_allclose(denominators(4), [1, 100], rtol=2.0**-23)


# --- What they state.


@pytest.mark.slow
def test_datacamp_slides_scale_embeddings_and_then_add_the_encoding():
    ids, table = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), normal(0, 10, 512)
    expected = table.astype(np.float64)[ids] * math.sqrt(512) + paper(4, 512)
    np.testing.assert_allclose(encode(embed(table, ids)), expected, rtol=0, atol=SUM_ERROR)


@pytest.mark.slow
def test_haiku_exercise_scales_the_rows_of_hk_embed():
    ids = np.array([[3, 1], [0, 4]])
    theirs = hk.without_apply_rng(
        hk.transform(lambda: hk.Embed(100, 64, name="token_embedding")(ids) * jnp.sqrt(64))
    )
    ours = hk.without_apply_rng(hk.transform(lambda: te.TokenEmbedding(100, 64)(ids)))
    params = theirs.init(jax.random.key(0))
    np.testing.assert_array_equal(ours.apply(params), theirs.apply(params))


@pytest.mark.slow
def test_haiku_exercise_drops_out_after_the_sum():
    x, rate = normal(0, 2, 12, 64), 0.1
    theirs = hk.transform(
        lambda: hk.dropout(hk.next_rng_key(), rate, x + te.sinusoidal_table(12, 64))
    )
    ours = hk.transform(
        lambda: te.PositionalEncoding(te.Sinusoidal(), 64, dropout_rate=rate)(x, is_training=True)
    )
    theirs, ours = (
        np.asarray(jax.jit(module.apply)({}, jax.random.key(1))) for module in (theirs, ours)
    )
    np.testing.assert_array_equal(theirs == 0, ours == 0)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=SUM_ERROR)
    assert 0 < (ours == 0).mean() < VISIBLE


# --- Their mistakes.


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_differs_and_ours_is_the_paper(mistake):
    table = te.sinusoidal_table(10, 6)
    np.testing.assert_allclose(table, paper(10, 6), rtol=0, atol=ENCODING_ERROR)
    assert np.abs(np.asarray(table) - mistake(10, 6)).max() > VISIBLE


@pytest.mark.slow
def test_encoding_walk_through_odd_denominators_are_not_ours():
    np.testing.assert_allclose(
        10_000.0 ** (np.array([1, 3, 5]) / 6), ODD_DENOMINATOR, rtol=POWER_ERROR, atol=PRINTED_ERROR
    )
    half_turns = np.pi * np.float64([EVEN_DENOMINATOR, ODD_DENOMINATOR])
    even, odd = (
        np.asarray(te.sinusoidal_encoding(row, 6))[range(3), [1, 3, 5]] for row in half_turns
    )
    # The cosine is flat at half a turn: an error of e radians counts e**2 / 2.
    np.testing.assert_allclose(even, -1, rtol=0, atol=2 * ENCODING_ERROR)
    assert (np.abs(odd + 1) > VISIBLE).all()


@pytest.mark.parametrize("scheme", [te.Sinusoidal(), te.Learned(512)])
def test_position_embedding_note_adds_encodings_to_ids_and_ours_refuse(scheme):
    ids = np.array(BATCH, np.int32)
    added = hk.transform(lambda: te.PositionalEncoding(scheme, 8)(ids, is_training=False))
    with pytest.raises(
        TypeError, match=r"^x: wanted a floating dtype of 16 to 64 bits, got int32$"
    ):
        added.init(jax.random.key(0))


@pytest.mark.slow
def test_position_embedding_note_stops_at_max_len_and_learned_positions_say_so():
    module = hk.transform(
        lambda length: te.PositionalEncoding(te.Learned(4), 6)(
            np.zeros((length, 6), np.float32), is_training=False
        )
    )
    assert module.apply(module.init(jax.random.key(0), 4), None, 4).shape == (4, 6)
    with pytest.raises(
        ValueError, match=r"^x: wanted a length of at most 4, where Learned ends, got length 5$"
    ):
        module.init(jax.random.key(0), 5)


@pytest.mark.slow
def test_position_embedding_note_registers_no_table_and_ours_has_none_to_leave_behind():
    # A torch tensor that is no buffer stays where it was made, and is not in what is saved.
    x, device = np.zeros((2, 6), np.float32), jax.devices()[-1]
    module = hk.transform(lambda x: te.PositionalEncoding(te.Sinusoidal(), 6)(x, is_training=False))
    assert module.init(jax.random.key(0), x) == {}
    for apply in (module.apply, jax.jit(module.apply)):
        here, there = apply({}, None, x), apply({}, None, jax.device_put(x, device))
        assert there.devices() == {device} != here.devices()
        np.testing.assert_array_equal(there, here)


def test_haiku_exercise_trains_unless_told_and_ours_must_be_told():
    module = hk.transform(
        lambda: te.PositionalEncoding(te.Sinusoidal(), 6)(np.zeros((2, 6), np.float32))
    )
    with pytest.raises(TypeError, match=r"^.*missing .* argument: 'is_training'"):
        module.init(jax.random.key(0))
