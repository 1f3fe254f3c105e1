"""Position biases against plain Python loops, exact rational arithmetic, published values, and a
small attention."""

import functools
import itertools
import json
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from contexts import x64
from hypothesis import strategies as st

import transformer_embed as te
from transformer_embed._src.functional.relative_bias import (
    alibi_bias,
    alibi_slopes,
    relative_position_buckets,
)

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "position_biases.json").read_text(
        encoding="utf-8"
    )
)

# A slope, a distance past 2**24 and their product are rounded to float32 once each; below 2**24 the
# distance is exact.
BIAS_ERROR = (1 + 2.0**-24) ** 3 - 1
# Both sides of a comparison with another float32 implementation, whose power takes one rounding
# more.
PEER_ERROR = 2 * BIAS_ERROR
# A score of 4 products of numbers below 4 and a bias up to 8 have an absolute error below (4 * 16 +
# 8) * 2**-24, the relative error of its weight; two outputs below 4 are compared, each with one
# such error for the weight and one for the sum of the weights.
ATTENTION_ERROR = 2 * 2 * 4 * 72 * 2.0**-24

QUERIES = {
    1: np.array([1, 2, 9, 4]),
    2: np.array([[1, 2, 3, 4], [0, 1, 2, 3], [20, -30, 40, 2000]]),
}
KEYS = {1: np.arange(5), 2: np.arange(5) + np.array([[0], [1], [100]])}
RANKS = list(itertools.product((1, 2), (1, 2)))
LOWEST, HIGHEST = -(2**31), 2**31 - 1
SETTINGS = [
    (32, 128),
    (32, 64),
    (48, 81),
    (12, 10),
    (33, 100),
    (4, 3),
    (5, 9),
    (64, 20),
    (128, 2048),
    (7, 1000),
]

quick = hypothesis.settings(max_examples=25)

BIASES = {
    "alibi": functools.partial(alibi_bias, num_heads=3),
    "alibi_symmetric": functools.partial(
        alibi_bias, num_heads=3, symmetric=True, dtype=jnp.bfloat16
    ),
    "t5": functools.partial(relative_position_buckets, num_buckets=8, max_distance=20),
    "t5_causal": functools.partial(
        relative_position_buckets, num_buckets=8, max_distance=20, bidirectional=False
    ),
}
every_bias = pytest.mark.parametrize("name", list(BIASES))
every_function = pytest.mark.parametrize("name", ["alibi", "t5"])


def loop(of_pair, queries, keys):
    """[B, T, S] of a function of two Python ints."""
    number = max(len(np.atleast_2d(queries)), len(np.atleast_2d(keys)))
    if np.ndim(queries) == np.ndim(keys) == 1:
        number = 1
    queries, keys = (
        np.broadcast_to(x, (number, np.shape(x)[-1])).tolist() for x in (queries, keys)
    )
    return [[[of_pair(q, k) for k in keys[b]] for q in queries[b]] for b in range(number)]


# --- alibi_slopes

MAX_BIASES = [8, 16.0, 0.3, 126]
HEAD_COUNTS = [*range(1, 20), 31, 32, 33, 71, 112, 128, 255]


@functools.cache
def all_slopes(max_bias):
    return jax.jit(
        lambda: {num_heads: alibi_slopes(num_heads, max_bias=max_bias) for num_heads in HEAD_COUNTS}
    )()


@pytest.mark.parametrize("max_bias", MAX_BIASES)
@pytest.mark.parametrize("num_heads", HEAD_COUNTS)
def test_alibi_slopes_are_the_papers_rounded_once(num_heads, max_bias):
    slopes = all_slopes(max_bias)[num_heads]
    assert slopes.dtype == jnp.float32
    assert slopes.tolist() == [
        np.float32(float(slope)) for slope in oracle.alibi_slopes(num_heads, max_bias)
    ]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 6, 8, 12, 17, 31, 71, 112])
def test_alibi_slopes_are_mpts_too(num_heads):
    # MPT takes the slopes of the power of two above: the second, fourth, ..., then the first,
    # third, ..., as many as there are heads.
    above = 2 ** (num_heads - 1).bit_length()
    all_slopes = alibi_slopes(above).tolist()
    expected = (
        all_slopes if above == num_heads else (all_slopes[1::2] + all_slopes[::2])[:num_heads]
    )
    assert alibi_slopes(num_heads).tolist() == expected


def test_alibi_slopes_published():
    # Press et al., section 3: for 8 heads 1/2, 1/4, ..., 1/256; for 16 heads 1/2**0.5, 1/2**1, ...,
    # 1/2**8.
    assert alibi_slopes(8).tolist() == [
        1 / 2,
        1 / 4,
        1 / 8,
        1 / 16,
        1 / 32,
        1 / 64,
        1 / 128,
        1 / 256,
    ]
    assert alibi_slopes(16).tolist() == [np.float32(2 ** -(n / 2)) for n in range(1, 17)]


def test_alibi_slopes_of_12_heads_published():
    # The authors' code, for a head count that is no power of two: those of 8 heads, then 4 of those
    # of 16.
    expected = [
        1 / 2,
        1 / 4,
        1 / 8,
        1 / 16,
        1 / 32,
        1 / 64,
        1 / 128,
        1 / 256,
        2**-0.5,
        2**-1.5,
        2**-2.5,
        2**-3.5,
    ]
    np.testing.assert_array_equal(alibi_slopes(12), np.float32(expected))


def test_alibi_slopes_of_one_head():
    assert alibi_slopes(1).tolist() == [1 / 256]


def test_alibi_slopes_refuse_bad_arguments():
    with pytest.raises(TypeError, match=r"^num_heads: wanted a Python int, got float 8.0$"):
        alibi_slopes(8.0)
    with pytest.raises(ValueError, match=r"^num_heads: wanted an int of at least 1, got 0$"):
        alibi_slopes(0)
    with pytest.raises(TypeError, match=r"^max_bias: wanted a Python number, got str '8'$"):
        alibi_slopes(8, max_bias="8")
    with pytest.raises(ValueError, match=r"^max_bias: wanted a finite number above 0, got 0$"):
        alibi_slopes(8, max_bias=0)
    with pytest.raises(
        ValueError, match=r"^max_bias: wanted a number above 0, at most 126, got 126.5$"
    ):
        alibi_slopes(8, max_bias=126.5)


def test_alibi_slopes_at_the_largest_max_bias_are_normal_numbers():
    assert alibi_slopes(4, max_bias=126)[-1] == jnp.finfo(jnp.float32).smallest_normal


# --- alibi_bias


def at_all_ranks(build):
    """The values of a function of queries and keys, in one program."""
    return jax.jit(lambda queries, keys: {(q, k): build(queries[q], keys[k]) for q, k in RANKS})(
        QUERIES, KEYS
    )


@functools.cache
def alibi_at_all_ranks(num_heads, symmetric):
    return at_all_ranks(functools.partial(alibi_bias, num_heads=num_heads, symmetric=symmetric))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("num_heads", [1, 3, 8])
@pytest.mark.parametrize(("query_rank", "key_rank"), RANKS)
def test_alibi_bias_is_a_loop(query_rank, key_rank, num_heads, symmetric):
    queries, keys = QUERIES[query_rank], KEYS[key_rank]
    distances = np.array(
        loop(lambda q, k: -abs(k - q) if symmetric else k - q, queries, keys), np.float64
    )
    slopes = np.array([float(slope) for slope in oracle.alibi_slopes(num_heads)])
    expected = slopes[:, None, None] * distances[:, None]
    bias = alibi_at_all_ranks(num_heads, symmetric)[query_rank, key_rank]
    assert bias.dtype == jnp.float32
    assert bias.shape == (1 if query_rank == key_rank == 1 else 3, num_heads, 4, 5)
    np.testing.assert_allclose(bias, expected, rtol=BIAS_ERROR, atol=0)


@quick
@hypothesis.given(st.integers(LOWEST, HIGHEST), st.integers(LOWEST, HIGHEST), st.booleans())
def test_alibi_bias_of_any_two_positions(query, key, symmetric):
    bias = np.asarray(
        alibi_bias([query], [key], num_heads=3, symmetric=symmetric), np.float64
    ).ravel()
    distance = -abs(key - query) if symmetric else key - query
    np.testing.assert_allclose(
        bias, [float(slope) * distance for slope in oracle.alibi_slopes(3)], rtol=BIAS_ERROR, atol=0
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_alibi_bias_depends_on_the_difference_only(dtype):
    positions = np.arange(6)
    bias = alibi_bias(positions, positions, num_heads=12, dtype=dtype)
    for offset in (1, -100, 2**24 + 1, HIGHEST - 5):
        np.testing.assert_array_equal(
            alibi_bias(positions + offset, positions + offset, num_heads=12, dtype=dtype), bias
        )


def test_alibi_bias_is_negative_before_the_query_and_symmetric_on_both_sides():
    one_sided = np.asarray(alibi_bias([3], range(7), num_heads=1)) * 256
    assert one_sided.ravel().tolist() == [-3, -2, -1, 0, 1, 2, 3]
    both_sides = np.asarray(alibi_bias([3], range(7), num_heads=1, symmetric=True)) * 256
    assert both_sides.ravel().tolist() == [-3, -2, -1, 0, -1, -2, -3]


@pytest.mark.parametrize("symmetric", [False, True])
def test_alibi_bias_has_no_negative_zero(symmetric):
    build = functools.partial(alibi_bias, num_heads=2, symmetric=symmetric)
    for bias in (build([5], [5]), jax.jit(build)(np.array([5]), np.array([5]))):
        assert not np.signbit(bias).any()


def test_alibi_bias_published():
    # Press et al., figure 3: rows 0; -1 0; -2 -1 0; ... times the head's slope m.
    positions = np.arange(5)
    bias = np.asarray(alibi_bias(positions, positions, num_heads=8))
    expected = [
        [0, 0, 0, 0, 0],
        [-1, 0, 0, 0, 0],
        [-2, -1, 0, 0, 0],
        [-3, -2, -1, 0, 0],
        [-4, -3, -2, -1, 0],
    ]
    for head, slope in enumerate([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]):
        np.testing.assert_array_equal(np.tril(bias[0, head]), np.array(expected) * slope)


@pytest.mark.parametrize("num_heads", GOLDEN["bloom"])
def test_alibi_bias_of_blooms_key_row(num_heads):
    # A whole row, and one with two tokens of padding on the left, where Bloom multiplies the
    # positions by the mask.
    placed = te.TokenPositions.from_ids([[5, 6, 7, 8, 9], [0, 0, 7, 8, 9]], pad_id=0)
    bias = alibi_bias([0], placed.positions, num_heads=int(num_heads))
    np.testing.assert_allclose(
        np.asarray(bias)[:, :, 0], GOLDEN["bloom"][num_heads], rtol=PEER_ERROR, atol=0
    )


@pytest.mark.parametrize("num_heads", GOLDEN["mpt"])
def test_alibi_bias_of_mpts_key_row(num_heads):
    for max_bias, expected in GOLDEN["mpt"][num_heads].items():
        bias = alibi_bias([4], range(5), num_heads=int(num_heads), max_bias=float(max_bias))
        np.testing.assert_allclose(np.asarray(bias)[0, :, 0], expected, rtol=PEER_ERROR, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("row", [[0], [9]])
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_bias_of_one_row_gives_the_same_weights_but_not_the_symmetric_ones(row, causal):
    positions = np.arange(10)
    q, k, v = qkv(10)
    mask = te.AttentionMask(te.TokenPositions(positions), causal=causal).dense()
    whole, one_row, both_sides = (
        np.asarray(
            attention(
                q, k, v, mask, alibi_bias(queries, positions, num_heads=HEADS, symmetric=symmetric)
            )
        )
        for queries, symmetric in ((positions, False), (row, False), (positions, True))
    )
    np.testing.assert_allclose(one_row, whole, rtol=0, atol=ATTENTION_ERROR)
    if causal:
        np.testing.assert_allclose(both_sides, whole, rtol=0, atol=ATTENTION_ERROR)
    else:
        assert abs(both_sides - whole).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_alibi_bias_in_16_bits_is_rounded_once(dtype):
    positions = np.arange(1024)
    exact = alibi_bias([1023], positions, num_heads=12)
    bias = alibi_bias([1023], positions, num_heads=12, dtype=dtype)
    assert bias.dtype == dtype
    np.testing.assert_array_equal(bias, np.asarray(exact).astype(dtype))
    assert [len(np.unique(head)) for head in np.asarray(exact)[0, :, 0]] == [1024] * 12


def test_alibi_bias_does_not_count_in_bfloat16():
    positions = np.arange(1024)
    distances = (positions - 1023).astype(jnp.bfloat16)
    counted = np.asarray(alibi_slopes(12)).astype(jnp.bfloat16)[:, None] * distances
    ours = np.asarray(alibi_bias([1023], positions, num_heads=12, dtype=jnp.bfloat16))[0, :, 0]
    exact = np.asarray(alibi_bias([1023], positions, num_heads=12))[0, :, 0]
    assert len(np.unique(distances)) == 513
    assert abs(ours - exact).max() < abs(counted - exact).max()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_alibi_bias_and_the_masks_bias_are_finite_and_hide_at_any_distance(dtype, symmetric):
    positions = np.array([LOWEST, -70_000, 0, 5, 40_000, 2**20, HIGHEST])
    mask = te.AttentionMask(te.TokenPositions(positions), causal=True).dense()
    bias = alibi_bias(positions, positions, num_heads=12, symmetric=symmetric, dtype=dtype)
    total = np.asarray(te.mask_to_bias(mask, dtype)) + np.asarray(bias)
    assert total.dtype == dtype
    weights = np.asarray(jax.jit(jax.nn.softmax)(total))
    assert np.isfinite(total).all()
    assert np.isfinite(weights).all()
    assert not np.where(mask, 0, weights.astype(np.float64)).any()


def test_alibi_bias_in_float16_becomes_a_quarter_of_the_largest():
    # IEEE 754-2019, table 3.5: the largest finite binary16 is 65504.
    bias = alibi_bias(
        [0], [-(2**20), -(2**13), 2**13, 2**20], num_heads=2, max_bias=0.5, dtype=jnp.float16
    )
    slope = 2**-0.5
    assert np.asarray(bias)[0, 1, 0].tolist() == [
        -65504 / 4,
        np.float16(-(2**13) * slope),
        np.float16(2**13 * slope),
        65504 / 4,
    ]


def test_alibi_bias_in_float64():
    with x64():
        bias = alibi_bias([2**31 - 1], [0], num_heads=3, dtype=jnp.float64)
        assert bias.dtype == jnp.float64
        # Two roundings to float64, the power's among them.
        np.testing.assert_allclose(
            np.ravel(bias),
            [float(-s * (2**31 - 1)) for s in oracle.alibi_slopes(3)],
            rtol=2**-51,
            atol=0,
        )


# --- relative_position_buckets


LOOP_OPTIONS = {"num_buckets": 12, "max_distance": 30}


@functools.cache
def buckets_at_all_ranks(bidirectional):
    return at_all_ranks(
        functools.partial(relative_position_buckets, **LOOP_OPTIONS, bidirectional=bidirectional)
    )


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("query_rank", "key_rank"), RANKS)
def test_relative_position_buckets_are_a_loop(query_rank, key_rank, bidirectional):
    queries, keys = QUERIES[query_rank], KEYS[key_rank]
    options = {**LOOP_OPTIONS, "bidirectional": bidirectional}
    buckets = buckets_at_all_ranks(bidirectional)[query_rank, key_rank]
    assert buckets.dtype == jnp.int32
    assert buckets.shape == (1 if query_rank == key_rank == 1 else 3, 4, 5)
    assert buckets.tolist() == loop(functools.partial(oracle.t5_bucket, **options), queries, keys)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), SETTINGS)
def test_relative_position_buckets_by_rational_arithmetic(num_buckets, max_distance, bidirectional):
    if max_distance <= num_buckets // (4 if bidirectional else 2):
        max_distance = num_buckets
    options = {
        "num_buckets": num_buckets,
        "max_distance": max_distance,
        "bidirectional": bidirectional,
    }
    distances = [*range(150), max_distance - 1, max_distance, max_distance + 1]
    keys = [*distances, *(-distance for distance in distances)]
    buckets = np.asarray(relative_position_buckets([0], keys, **options))
    assert buckets[0, 0].tolist() == [oracle.t5_bucket(0, key, **options) for key in keys]


@pytest.mark.slow
@quick
@hypothesis.given(
    st.integers(4, 40),
    st.integers(1, 3000),
    st.booleans(),
    st.integers(LOWEST, HIGHEST),
    st.integers(LOWEST, HIGHEST),
)
def test_relative_position_buckets_of_any_setting_and_positions(
    num_buckets, more, bidirectional, query, key
):
    exact = num_buckets // (4 if bidirectional else 2)
    options = {
        "num_buckets": num_buckets,
        "max_distance": exact + more,
        "bidirectional": bidirectional,
    }
    for keys in ([key], [max(query - exact - more // 2, LOWEST)]):
        assert relative_position_buckets([query], keys, **options).item() == oracle.t5_bucket(
            query, keys[0], **options
        )


def test_relative_position_buckets_where_logarithms_are_whole():
    # With e = 24 buckets of one distance and 81 / 24 = (3 / 2)**3, distances 36 and 54 stand at one
    # and two thirds of the logarithm.
    buckets = relative_position_buckets(
        [0], [-35, -36, -53, -54, -80, -81], num_buckets=48, max_distance=81, bidirectional=False
    )
    assert np.ravel(buckets).tolist() == [31, 32, 39, 40, 47, 47]
    # With e = 8 and 128 / 8 = 2**4, distances double every two buckets.
    doubled = relative_position_buckets(
        [0], [-8, -15, -16, -31, -32, -63, -64], num_buckets=32, max_distance=128
    )
    assert np.ravel(doubled).tolist() == [8, 9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    "case",
    GOLDEN["t5"],
    ids=lambda case: f"{case['num_buckets']}-{case['max_distance']}-{case['bidirectional']}",
)
def test_relative_position_buckets_published_by_transformers(case):
    options, expected = (
        {name: case[name] for name in ("num_buckets", "max_distance", "bidirectional")},
        list(case["buckets"]),
    )
    relative = np.arange(-300, 301)
    if (case["num_buckets"], case["max_distance"]) == (48, 81):
        # Distance 54 stands at two thirds of the logarithm, where theirs, in float32, falls short.
        assert expected[-54 + 300] == 39
        expected[-54 + 300] = 40
    assert np.ravel(relative_position_buckets([0], relative, **options)).tolist() == expected


def test_relative_position_buckets_published_by_model_garden():
    # tensorflow/models, official/nlp/modeling/layers/position_embedding_test.py: queries 0..2, keys
    # 0..1.
    assert relative_position_buckets(range(3), range(2)).tolist() == [[[0, 17], [1, 0], [2, 1]]]
    assert relative_position_buckets(range(3), range(2), bidirectional=False).tolist() == [
        [[0, 0], [1, 0], [2, 1]]
    ]


@pytest.mark.parametrize(("bidirectional", "last"), [(True, (15, 31)), (False, (31, 0))])
def test_relative_position_buckets_published_in_the_paper(bidirectional, last):
    # Raffel et al., section 2.1: 32 embeddings, all offsets beyond 128 assigned to one (in each
    # direction).
    far = np.array([128, 129, 500, 10**6, HIGHEST])
    before, after = (
        relative_position_buckets([0], keys, bidirectional=bidirectional) for keys in (-far, far)
    )
    assert (set(np.ravel(before).tolist()), set(np.ravel(after).tolist())) == ({last[0]}, {last[1]})


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (7, 60), (2, 5)])
def test_relative_position_buckets_use_every_row_once_in_order(num_buckets, max_distance):
    keys = -np.arange(max_distance + 1)
    causal = np.asarray(
        relative_position_buckets(
            [0], keys, num_buckets=num_buckets, max_distance=max_distance, bidirectional=False
        )
    )
    assert set(np.diff(causal.ravel()).tolist()) <= {0, 1}
    assert np.unique(causal).tolist() == list(range(num_buckets))


def test_relative_position_buckets_of_the_two_directions():
    keys = np.arange(1, 300)
    before, after = (
        np.asarray(relative_position_buckets([0], side * keys, num_buckets=20)) for side in (-1, 1)
    )
    np.testing.assert_array_equal(after, before + 10)
    assert relative_position_buckets([7], [7], num_buckets=20).tolist() == [[[0]]]
    assert not np.any(relative_position_buckets([0], keys, num_buckets=20, bidirectional=False))


@pytest.mark.parametrize(
    ("query", "key"),
    [(HIGHEST, LOWEST), (LOWEST, HIGHEST), (0, LOWEST), (LOWEST, LOWEST), (HIGHEST, 0)],
)
def test_relative_position_buckets_do_not_wrap(query, key):
    far = {"num_buckets": 8, "max_distance": HIGHEST - 1}
    for options in ({}, far, {"bidirectional": False}, {**far, "bidirectional": False}):
        full = {"num_buckets": 32, "max_distance": 128, "bidirectional": True} | options
        assert relative_position_buckets([query], [key], **options).item() == oracle.t5_bucket(
            query, key, **full
        )


def test_relative_position_buckets_at_the_least():
    assert relative_position_buckets([2], range(5), num_buckets=4, max_distance=2).tolist() == [
        [[1, 1, 0, 3, 3]]
    ]
    causal = relative_position_buckets(
        [2], range(5), num_buckets=2, max_distance=2, bidirectional=False
    )
    assert causal.tolist() == [[[1, 1, 0, 0, 0]]]


def test_an_odd_number_of_buckets_leaves_the_last_unused():
    keys = np.arange(-300, 300)
    odd, even = (relative_position_buckets([0], keys, num_buckets=n) for n in (33, 32))
    np.testing.assert_array_equal(odd, even)


def test_relative_position_buckets_with_many_buckets_need_no_memory_of_their_own():
    lower = jax.jit(
        functools.partial(relative_position_buckets, num_buckets=256, max_distance=4096)
    ).lower
    positions = np.arange(512)
    analysis = lower(positions, positions).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < analysis.output_size_in_bytes


def refused_buckets(error, message, **options):
    with pytest.raises(error, match=message):
        relative_position_buckets([0], [0], **options)


def test_relative_position_buckets_refuse_bad_options():
    refused_buckets(
        TypeError, r"^num_buckets: wanted a Python int, got float 32.0$", num_buckets=32.0
    )
    refused_buckets(ValueError, r"^num_buckets: wanted an int of at least 4, got 3$", num_buckets=3)
    refused_buckets(
        ValueError,
        r"^num_buckets: wanted an int of at least 2, got 1$",
        num_buckets=1,
        bidirectional=False,
    )
    refused_buckets(
        TypeError, r"^max_distance: wanted a Python int, got float 128.0$", max_distance=128.0
    )
    refused_buckets(
        ValueError, r"^max_distance: wanted an int of at least 9, got 8$", max_distance=8
    )
    refused_buckets(
        ValueError,
        r"^max_distance: wanted an int of at least 17, got 16$",
        max_distance=16,
        bidirectional=False,
    )
    refused_buckets(
        ValueError,
        r"^max_distance: wanted an int of at most 2147483646, got 2147483647$",
        max_distance=HIGHEST,
    )
    refused_buckets(TypeError, r"^bidirectional: wanted a Python bool, got int 1$", bidirectional=1)


# --- Both.


@pytest.mark.slow
@every_bias
def test_bias_under_jit_and_vmap_is_the_eager_one(name):
    build = BIASES[name]
    compiled = at_all_ranks(build)
    for query_rank, key_rank in RANKS:
        eager = build(QUERIES[query_rank], KEYS[key_rank])
        assert compiled[query_rank, key_rank].dtype == eager.dtype
        np.testing.assert_array_equal(
            compiled[query_rank, key_rank], eager, err_msg=f"{query_rank=}, {key_rank=}"
        )
    stacked = np.asarray(jax.vmap(build)(QUERIES[2].astype(np.int32), KEYS[2].astype(np.int32)))
    np.testing.assert_array_equal(stacked[:, 0], build(QUERIES[2], KEYS[2]))


@every_bias
def test_bias_has_one_trace_for_all_offsets(name):
    traces, positions = [], np.arange(9)
    whole = np.asarray(BIASES[name](positions, positions))

    @jax.jit
    def step(offset):
        traces.append(offset)
        return BIASES[name](offset + jnp.arange(2), positions)

    for offset in range(7):
        np.testing.assert_array_equal(step(offset), whole[..., offset : offset + 2, :])
    assert len(traces) == 1


@every_bias
def test_bias_while_decoding_has_an_offset_for_each_row(name):
    positions = np.arange(9)
    whole = np.asarray(BIASES[name](positions, positions))[0]
    step = np.asarray(BIASES[name]([[0], [4], [8]], positions))
    for row, offset in enumerate((0, 4, 8)):
        np.testing.assert_array_equal(step[row], whole[..., offset : offset + 1, :])


@every_bias
def test_bias_has_a_shape_without_values(name):
    shape = jax.eval_shape(
        BIASES[name], jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((5,), jnp.int32)
    )
    one = BIASES[name](np.zeros((2, 4), int), range(5))
    assert (shape.shape, shape.dtype) == (one.shape, one.dtype)


@every_bias
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_bias_lowers_for_each_platform(name, platform):
    assert (
        jax.jit(BIASES[name])
        .trace(np.arange(4), np.arange(5))
        .lower(lowering_platforms=(platform,))
        .as_text()
    )


@every_function
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (3, 0), (1, 1)])
def test_bias_of_empty_and_single_sequences(name, queries, keys):
    bias = BIASES[name](np.arange(queries), np.zeros((2, keys), int))
    assert bias.shape == ((2, 3) if name == "alibi" else (2,)) + (queries, keys)
    assert not np.any(np.asarray(bias))


@every_function
@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_bias_takes_host_positions_of_any_integer_dtype(name, dtype):
    expected = BIASES[name]([3, 0], range(4))
    np.testing.assert_array_equal(
        BIASES[name](np.array([3, 0], dtype), np.arange(4, dtype=dtype)), expected
    )
    np.testing.assert_array_equal(BIASES[name]([3, 0], np.arange(4, dtype=dtype)), expected)


@every_function
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16])
def test_bias_of_narrow_positions_does_not_overflow(name, dtype):
    ends = [jnp.iinfo(dtype).min, jnp.iinfo(dtype).max]
    narrow = jax.device_put(np.array(ends, dtype))
    np.testing.assert_array_equal(BIASES[name](narrow, narrow), BIASES[name](ends, ends))


@pytest.mark.slow
@every_bias
def test_bias_of_64_bit_positions(name):
    near = BIASES[name]([0, 7], [5, 6, 40])
    with x64():
        far = BIASES[name](
            jax.device_put(np.array([0, 7]) + 2**40), jax.device_put(np.array([5, 6, 40]) + 2**40)
        )
        mixed = BIASES[name](
            jax.device_put(np.array([0, 7], np.int32)), jax.device_put(np.array([5, 6, 40]))
        )
    assert far.dtype == near.dtype
    np.testing.assert_array_equal(far, near)
    np.testing.assert_array_equal(mixed, near)


def test_bias_of_64_bit_distances():
    with x64():
        query, keys = (jax.device_put(np.array(positions)) for positions in ([2**40], [0, 2**41]))
        assert alibi_bias(query, keys, num_heads=1).tolist() == [[[[-(2**32), 2**32]]]]
        assert relative_position_buckets(query, keys).tolist() == [[[15, 31]]]


@pytest.mark.slow
@every_bias
def test_bias_on_an_explicit_mesh_equals_bias_on_one_device(name):
    axis = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis,))
    rows = np.arange(8)[:, None] + np.arange(3)
    positions = jax.device_put(
        rows, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    )
    for build in (BIASES[name], jax.jit(BIASES[name])):
        bias = build(positions, positions)
        assert jax.typeof(bias).sharding.spec[0] == "data"
        np.testing.assert_array_equal(bias, BIASES[name](rows, rows))


def refused(name, error, message, **arguments):
    with pytest.raises(error, match=message):
        BIASES[name](**({"query_positions": [0, 1], "key_positions": [0, 1]} | arguments))


@every_function
@pytest.mark.parametrize("side", ["query_positions", "key_positions"])
def test_bias_refuses_bad_positions(name, side):
    refused(
        name, TypeError, rf"^{side}: wanted an integer dtype, got float64$", **{side: [0.0, 1.0]}
    )
    refused(
        name, TypeError, rf"^{side}: wanted an integer dtype, got bool$", **{side: [True, False]}
    )
    refused(
        name,
        TypeError,
        rf"^{side}: wanted a signed integer dtype, got uint32$",
        **{side: jnp.arange(2, dtype=jnp.uint32)},
    )
    refused(
        name,
        ValueError,
        rf"^{side}: wanted shape \[length\] or \[batch, length\], got shape \[\]$",
        **{side: 1},
    )
    refused(
        name,
        ValueError,
        rf"^{side}: wanted shape \[length\] or \[batch, length\], got shape \[1, 1, 2\]$",
        **{side: [[[0, 1]]]},
    )
    message = rf"^{side}: wanted integers inside int32, -2147483648\.\.2147483647, got 4294967296 at index \[1\]$"
    refused(name, ValueError, message, **{side: np.array([0, 2**32])})


@every_function
def test_bias_refuses_batches_of_unequal_sizes(name):
    message = (
        r"^query_positions and key_positions: wanted the same number of rows, or 1, got 2 and 3$"
    )
    refused(
        name,
        ValueError,
        message,
        query_positions=np.zeros((2, 4), int),
        key_positions=np.zeros((3, 5), int),
    )


def test_alibi_bias_refuses_bad_options():
    build = functools.partial(alibi_bias, [0], [0])
    with pytest.raises(ValueError, match=r"^num_heads: wanted an int of at least 1, got 0$"):
        build(num_heads=0)
    with pytest.raises(ValueError, match=r"^max_bias: wanted a finite number above 0, got -8$"):
        build(num_heads=8, max_bias=-8)
    with pytest.raises(TypeError, match=r"^symmetric: wanted a Python bool, got str 'yes'$"):
        build(num_heads=8, symmetric="yes")
    with pytest.raises(
        TypeError, match=r"^dtype: wanted a floating dtype of 16 to 64 bits, got int32$"
    ):
        build(num_heads=8, dtype=jnp.int32)


# --- In attention.

HEADS, HEAD_DIM = 3, 4
TABLE = np.random.default_rng(1).normal(size=(8, HEADS)).astype(np.float32)


def t5_bias(query_positions, key_positions):
    buckets = BIASES["t5"](query_positions, key_positions)
    return jnp.moveaxis(te.lookup(TABLE, buckets), -1, 1)


ADDED = {
    "alibi": BIASES["alibi"],
    "alibi_symmetric": functools.partial(BIASES["alibi"], symmetric=True),
    "t5": t5_bias,
}
every_added = pytest.mark.parametrize("name", list(ADDED))


def qkv(length, seed=0):
    return (
        np.random.default_rng(seed)
        .uniform(-2, 2, size=(3, 1, length, HEADS, HEAD_DIM))
        .astype(np.float32)
    )


@jax.jit
def attention(q, k, v, mask, bias):
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / HEAD_DIM**0.5 + bias + te.mask_to_bias(mask)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


@functools.partial(jax.jit, static_argnames=("name", "causal"))
def attend(name, placed, q, k, v, causal):
    mask = te.AttentionMask(placed, causal=causal).dense()
    return attention(q, k, v, mask, ADDED[name](placed.positions, placed.positions))


both_masks = pytest.mark.parametrize("causal", [True, False])


@pytest.mark.slow
@every_added
@both_masks
def test_packed_sequences_attend_as_alone(name, causal):
    first, second = qkv(4), qkv(5, seed=1)
    packed = attend(
        name,
        te.TokenPositions.from_segment_ids([[1, 1, 1, 1, 2, 2, 2, 2, 2]]),
        *np.concatenate([first, second], 2),
        causal=causal,
    )
    alone = [
        attend(
            name, te.TokenPositions.from_lengths([len(x[0, 0])], len(x[0, 0])), *x, causal=causal
        )
        for x in (first, second)
    ]
    np.testing.assert_allclose(packed, np.concatenate(alone, 1), rtol=0, atol=ATTENTION_ERROR)


@every_added
@both_masks
def test_left_padding_attends_as_right_padding(name, causal):
    tokens, padding = qkv(4), qkv(3, seed=2)
    left = attend(
        name,
        te.TokenPositions.from_lengths([4], 7, padding_side="left"),
        *np.concatenate([padding, tokens], 2),
        causal=causal,
    )
    right = attend(
        name,
        te.TokenPositions.from_lengths([4], 7),
        *np.concatenate([tokens, padding], 2),
        causal=causal,
    )
    np.testing.assert_allclose(
        np.asarray(left)[:, 3:], np.asarray(right)[:, :4], rtol=0, atol=ATTENTION_ERROR
    )


@pytest.mark.slow
@every_added
def test_decoding_attends_as_the_whole_sequence(name):
    q, k, v = qkv(6)
    whole = np.asarray(attend(name, te.TokenPositions.from_lengths([6], 6), q, k, v, causal=True))
    for offset in range(6):
        mask = te.AttentionMask(
            te.TokenPositions([offset]), te.TokenPositions(np.arange(6)), causal=True
        ).dense()
        step = attention(q[:, offset : offset + 1], k, v, mask, ADDED[name]([offset], np.arange(6)))
        np.testing.assert_allclose(
            step, whole[:, offset : offset + 1], rtol=0, atol=ATTENTION_ERROR
        )
