"""Position biases against plain Python loops, exact rational arithmetic and published values."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from compare import near
from meshes import EXPLICIT, mesh_of, put
from references import check
from refused import each_raises

import transformer_embed as te
from transformer_embed import alibi_bias, alibi_slopes, relative_position_buckets
from transformer_embed._src.positions.relative_bias import _bucket_starts

FILE = pathlib.Path(__file__).parents[1] / "golden" / "position_biases.json"
GOLDEN = json.loads(FILE.read_bytes())
# A slope, a distance past 2**24, their product and the power of another float32 implementation
# are rounded to float32 once each, on both sides.
PEER_ERROR = 2 * ((1 + 2.0**-24) ** 3 - 1)

LOWEST, HIGHEST = -(2**31), 2**31 - 1
EXTREMES = np.array([LOWEST, LOWEST + 1, -(2**24) - 1, 0, 2**24 + 1, HIGHEST])

OF_8 = {"num_buckets": 8, "max_distance": 20, "causal": False}
every_function = pytest.mark.parametrize(
    ("function", "options"),
    [(alibi_bias, {"num_heads": 3, "causal": True}), (relative_position_buckets, OF_8)],
)


# --- ALiBi


@pytest.mark.parametrize("max_bias", [8, 0.3, 126])
def test_slopes_are_the_papers_rounded_once(max_bias):
    for num_heads in [*range(1, 20), 71, 112, 128, 255]:
        assert check(alibi_slopes, num_heads, max_bias=max_bias).shape == (num_heads,)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_bias_has_no_negative_zero(causal):
    assert not np.signbit(alibi_bias([5], [5], num_heads=2, causal=causal)).any()


@pytest.mark.parametrize("num_heads", GOLDEN["bloom"])
def test_alibi_bias_of_blooms_key_row(num_heads):
    """A whole row, and one with two tokens of padding on the left, where Bloom multiplies the
    positions by the mask."""
    tokens = te.TokenPositions.from_ids([[5, 6, 7, 8, 9], [0, 0, 7, 8, 9]], pad_id=0)
    bias = alibi_bias([0], tokens.positions, num_heads=int(num_heads), causal=True)
    near(np.asarray(bias)[:, :, 0], GOLDEN["bloom"][num_heads], rtol=PEER_ERROR)


@pytest.mark.parametrize("num_heads", GOLDEN["mpt"])
def test_alibi_bias_of_mpts_key_row(num_heads):
    for max_bias, expected in GOLDEN["mpt"][num_heads].items():
        options = {"num_heads": int(num_heads), "max_bias": float(max_bias)}
        bias = alibi_bias([4], range(5), causal=True, **options)
        near(np.asarray(bias)[:, 0], expected, rtol=PEER_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_alibi_bias_and_the_masks_bias_are_finite_and_hide_at_any_distance(dtype):

    @jax.jit
    def biased(positions):
        mask = te.AttentionMask(te.TokenPositions(positions), causal=True).dense()
        bias = alibi_bias(positions, positions, num_heads=12, causal=True, dtype=dtype)
        total = te.mask_to_bias(mask, dtype) + bias
        return mask, jnp.isfinite(total), jax.nn.softmax(total).astype(jnp.float32)

    mask, is_finite, weights = map(np.asarray, biased(EXTREMES.astype(np.int32)))
    assert is_finite.all()
    assert np.isfinite(weights).all()
    assert not np.where(mask, 0, weights).any()


def test_alibi_bias_in_float64():
    with jax.enable_x64():
        bias = alibi_bias([HIGHEST], [0], num_heads=3, causal=True, dtype=jnp.float64)
    assert bias.dtype == jnp.float64
    expected = [float(-slope * HIGHEST) for slope in oracle.alibi_slopes(3)]
    # Two roundings to float64, the power's among them.
    near(np.ravel(bias), expected, rtol=2**-51)


# --- T5

# The usual one, one with whole logarithms at 36 and 54, the largest and smallest, and another.
BUCKETS = [(32, 128, False), (48, 81, True), (8, HIGHEST - 1, False), (4, 2, False), (2, 2, True)]
BUCKETS += [(33, 100, False)]


@pytest.mark.parametrize(("num_buckets", "max_distance", "causal"), BUCKETS)
def test_buckets_by_rational_arithmetic(num_buckets, max_distance, causal):
    distances = np.array([*range(150), max_distance - 1, max_distance, HIGHEST])
    options = {"max_distance": max_distance, "causal": causal}
    keys = [*distances, *-distances, LOWEST]
    check(relative_position_buckets, [0], keys, num_buckets=num_buckets, **options)


@pytest.mark.parametrize("case", GOLDEN["t5"])
def test_buckets_published_by_transformers(case):
    options = {**case}
    expected, both_ways = list(options.pop("buckets")), options.pop("bidirectional")
    if options["max_distance"] == 81:
        # Distance 54 stands at two thirds of the logarithm, where theirs, in float32, falls short.
        assert expected[-54 + 300] == 39
        expected[-54 + 300] = 40
    buckets = relative_position_buckets([0], np.arange(-300, 301), causal=not both_ways, **options)
    assert np.ravel(buckets).tolist() == expected


def test_each_bucket_starts_at_its_exact_distance():
    """Where the logarithm is a whole number, a bucket starts at this distance and not at the next."""
    exact_starts = 0
    for each_way in range(2, 13):
        exact = each_way // 2
        steps = each_way - exact
        for max_distance in range(exact + 1, 100):
            expected = []
            for j in range(1, steps):
                # n / exact >= (max_distance / exact) ** (j / steps), in integers.
                power = max_distance**j * exact ** (steps - j)
                start = next(n for n in range(max_distance + 1) if n**steps >= power)
                exact_starts += start**steps == power
                expected.append(start)
            assert _bucket_starts(each_way, max_distance) == (*expected,)
    assert exact_starts > 40


@pytest.mark.slow
def test_many_buckets_need_no_memory_of_their_own():
    options = {"num_buckets": 128, "max_distance": 2048, "causal": False}
    build = functools.partial(relative_position_buckets, **options)
    program = jax.jit(build).lower(np.arange(256), np.arange(256)).compile()
    analysis = program.memory_analysis()
    assert analysis.temp_size_in_bytes < analysis.output_size_in_bytes


# --- Both


def test_biases_without_a_batch_axis_have_none():
    alibi = functools.partial(alibi_bias, num_heads=4, causal=True)
    buckets = functools.partial(relative_position_buckets, causal=False)
    with jax.numpy_rank_promotion("raise"):
        alone = jax.eval_shape(lambda: [f([0, 1], [0, 1, 2]) for f in (alibi, buckets)])
        of_batch = jax.eval_shape(
            lambda: [alibi([0, 1], [[0, 1, 2]] * 5), buckets([[0, 1]] * 5, [0, 1, 2])]
        )
    assert [array.shape for array in alone] == [(4, 2, 3), (2, 3)]
    assert [array.shape for array in of_batch] == [(5, 4, 2, 3), (5, 2, 3)]


@pytest.mark.slow
@every_function
def test_bias_of_64_bit_positions_and_on_an_explicit_mesh(function, options):
    with jax.enable_x64():
        keys = jnp.array([0, 2**40 + 7, 2**41])
        for query in (jnp.array([2**40]), jnp.array([3], "int32")):
            check(function, query, keys, **options)
    rows = put(mesh_of((2,), ("data",), EXPLICIT), np.arange(12).reshape(4, 3), "data")
    assert jax.typeof(check(function, rows, rows, **options)).sharding.spec[0] == "data"


alibi = functools.partial(alibi_bias, [0], [0], num_heads=8, causal=True)
buckets = functools.partial(relative_position_buckets, [0], [0], **OF_8)
REFUSED = {
    "alibi_slopes(8.0)": "TypeError: num_heads: ... got float 8.0",
    "alibi(causal='yes')": "TypeError: causal: ... got str",
    "alibi(dtype=jnp.int32)": "TypeError: dtype: ... got int32",
    "buckets(num_buckets=8.0)": "TypeError: num_buckets: ... got float 8.0",
    "alibi_slopes(0)": "ValueError: num_heads: ... 1, got 0",
    "alibi(max_bias=0)": "ValueError: max_bias: ... got 0",
    "alibi(max_bias=126.5)": "ValueError: max_bias: ... 126, got 126.5",
    "buckets(num_buckets=3)": "ValueError: num_buckets: ... 4, got 3",
    "buckets(num_buckets=1, causal=True)": "ValueError: num_buckets: ... 2, got 1",
    "buckets(max_distance=2)": "ValueError: max_distance: ... 3, got 2",
    "buckets(max_distance=4, causal=True)": "ValueError: max_distance: ... 5, got 4",
    "alibi_bias([0], [0], 8)": "TypeError: ...missing 1 required keyword-only argument: 'causal'",
    "relative_position_buckets([0], [0])": "TypeError: ...missing 1 required keyword-only argument: 'causal'",
    "alibi_bias(1, [0], 3, causal=True)": "ValueError: query_positions: ... got shape []",
    "relative_position_buckets([0], 1, causal=True)": "ValueError: key_positions: ... got shape []",
    "alibi_bias(np.zeros((2, 4), int), np.zeros((3, 5), int), 3, causal=True)": "ValueError: query_positions and key_positions: ... 1, got 2 and 3",
    "buckets(max_distance=HIGHEST)": "ValueError: max_distance: ... 2147483646, got 2147483647",
}


def test_bad_options():
    each_raises(REFUSED, globals())
