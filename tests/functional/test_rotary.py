import dataclasses
import itertools
import json
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest
from contexts import set_mesh, x64
from hypothesis import strategies as st
from references import check_words

from transformer_embed._src.functional import rotary, rotary_scaling
from transformer_embed._src.functional.rotary import apply_rotary, permute_rotary_weights
from transformer_embed._src.functional.rotary_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    YarnScaling,
)

LAYOUTS = ("half", "interleaved")
GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "rotary_frequencies.json").read_text(
        encoding="utf-8"
    )
)

# a * cos - b * sin in float32, beside the error of cos and sin: each product and their sum are
# rounded once, by 2**-24 of each term.
ROUNDINGS = 2**-23
# The attention factor rounded to float32, and its product with a cosine: 2**-24 each.
OF_A_FACTOR = 2**-23
# XLA may contract a product and a sum when it fuses: half a unit in the last place of either term.
FUSION = 2**-23
# Two rotations one after the other, of pairs whose channels add up to at most 8.
TWICE = 2 * 8 * (oracle.MAX_ERROR + ROUNDINGS)
# What a float32 program makes of a frequency: its exponent is off by 2**-24 of up to ln(1e6) = 14,
# and the power and some products round.
FLOAT32_POWER = 2**-19

SCALINGS = [
    LinearScaling(4.0),
    NTKScaling(8.0),
    DynamicNTKScaling(2.0, original_length=2048, length=5000),
    YarnScaling(4.0, original_length=4096),
    YarnScaling(
        40.0,
        original_length=4096,
        truncate=False,
        mscale=0.7,
        mscale_all_dim=0.3,
        beta_fast=24.0,
        beta_slow=1.5,
    ),
    YarnScaling(4.0, original_length=200_000),
    YarnScaling(4.0, original_length=4096, beta_slow=1e-5),
    Llama3Scaling(8.0),
    Llama3Scaling(32.0, low_freq_factor=1.5, high_freq_factor=5.0, original_length=2000),
    LongRopeScaling(
        np.linspace(1, 2, 16), np.linspace(1.1, 30, 16), 32.0, original_length=4096, length=10_000
    ),
]


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def pair_channels(head_dim, layout):
    i = np.arange(head_dim // 2)
    return (i, i + head_dim // 2) if layout == "half" else (2 * i, 2 * i + 1)


def by_equation_34(x, positions, *, base=10_000.0, layout="half"):
    """RoFormer's rotation, each pair as a complex number times exp(1j * m * theta_i), in
    complex128."""
    first, second = pair_channels(x.shape[-1], layout)
    theta = base ** (-2 * np.arange(len(first)) / x.shape[-1])
    turn = np.exp(1j * np.asarray(positions, np.float64)[..., None, None] * theta)
    product = (x[..., first].astype(np.float64) + 1j * x[..., second]) * turn
    rotated = np.zeros(x.shape)
    rotated[..., first], rotated[..., second] = product.real, product.imag
    return rotated


def assert_rotated(got, x, expected, layout="half"):
    """Within the bound of the two terms that make each channel."""
    first, second = pair_channels(x.shape[-1], layout)
    size = np.zeros(x.shape)
    size[..., first] = size[..., second] = np.abs(x[..., first]) + np.abs(x[..., second])
    excess = np.abs(np.asarray(got, np.float64) - expected) - size * (oracle.MAX_ERROR + ROUNDINGS)
    assert excess.max(initial=0) <= 0


def cos_and_sin(positions, head_dim, **options):
    """float32 [positions, pairs] each: the pairs (1, 0), rotated."""
    x = np.concatenate(
        [np.ones([len(positions), 1, head_dim // 2]), np.zeros([len(positions), 1, head_dim // 2])],
        -1,
    )
    rotated = np.asarray(apply_rotary(x.astype(np.float32), positions, **options))[:, 0]
    return rotated[:, : head_dim // 2], rotated[:, head_dim // 2 :]


class TestOracle:
    @pytest.mark.slow
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(
        ("head_dim", "base"), [(2, 10_000.0), (8, 2.0), (64, 10_000.0), (128, 1e6)]
    )
    def test_rotation_equals_equation_34_of_the_paper(self, layout, head_dim, base):
        x, positions = normal(2, 9, 3, head_dim), np.arange(9) * 37
        got = apply_rotary(x, positions, base=base, layout=layout)
        assert_rotated(got, x, by_equation_34(x, positions, base=base, layout=layout), layout)

    def test_positions_of_each_row(self):
        x, positions = normal(2, 5, 3, 8), np.random.default_rng(1).integers(-50, 5000, [2, 5])
        assert_rotated(apply_rotary(x, positions), x, by_equation_34(x, positions))

    @pytest.mark.slow
    @hypothesis.given(
        st.lists(st.integers(-(2**31), 2**31 - 1), min_size=5, max_size=5),
        st.sampled_from([2, 64]),
        st.sampled_from([2.0, 1e7]),
    )
    @hypothesis.settings(max_examples=24)
    def test_any_position(self, positions, head_dim, base):
        cos, sin = cos_and_sin(positions, head_dim, base=base)
        for n, position in enumerate(positions):
            for i in {0, 1, head_dim // 2 - 1} & set(range(head_dim // 2)):
                frequency = oracle.frequency(i, head_dim / 2, base)
                assert (
                    oracle.error(cos[n, i], oracle.sine(position, frequency, 1)) <= oracle.MAX_ERROR
                )
                assert oracle.error(sin[n, i], oracle.sine(position, frequency)) <= oracle.MAX_ERROR

    def test_unsigned_and_fractional_positions(self):
        for positions in (
            np.array([2**31, 2**32 - 1], np.uint32),
            np.array([0.5, -1234.75, 2.0**23 + 0.5], np.float32),
        ):
            cos, sin = cos_and_sin(positions, 8)
            for n, position in enumerate(positions.tolist()):
                for i in range(4):
                    assert (
                        oracle.error(cos[n, i], oracle.sine(position, oracle.frequency(i, 4), 1))
                        <= oracle.MAX_ERROR
                    )
                    assert (
                        oracle.error(sin[n, i], oracle.sine(position, oracle.frequency(i, 4)))
                        <= oracle.MAX_ERROR
                    )


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
def test_scalings_at_any_position_against_arbitrary_precision(scaling):
    positions = [1, 4095, 2**20 + 1, 2**31 - 1, -(2**31)]
    cos, sin = cos_and_sin(positions, 32, scaling=scaling)
    with mpmath.workprec(200):
        frequencies, attention = oracle.scaled_frequencies(scaling, 32, 10_000.0)
        bound = float(attention) * (oracle.MAX_ERROR + (OF_A_FACTOR if attention != 1 else 0))
        for n, position in enumerate(positions):
            for i, frequency in enumerate(frequencies):
                assert (
                    oracle.error(cos[n, i], attention * oracle.sine(position, frequency, 1))
                    <= bound
                )
                assert (
                    oracle.error(sin[n, i], attention * oracle.sine(position, frequency)) <= bound
                )


positive = st.one_of(st.floats(1e-9, 1e-2), st.floats(0.01, 100), st.floats(100, 1e12))
lengths = st.one_of(st.integers(2, 100), st.integers(2, 2**40))
half_of_8 = st.lists(positive, min_size=4, max_size=4)
maybe = lambda values: st.one_of(st.none(), values)
not_negative = st.one_of(st.just(0.0), positive)
two_in_order = st.tuples(positive, positive).map(sorted).filter(lambda pair: pair[0] < pair[1])
ANY_SCALING = {
    "linear": st.builds(LinearScaling, positive),
    "ntk": st.builds(NTKScaling, positive),
    "dynamic": st.builds(DynamicNTKScaling, positive, lengths, st.one_of(st.just(0), lengths)),
    "yarn": st.builds(
        lambda betas, *rest: YarnScaling(*rest[:2], betas[1], betas[0], *rest[2:]),
        *(
            two_in_order,
            positive,
            lengths,
            st.booleans(),
            not_negative,
            not_negative,
            maybe(positive),
        ),
    ),
    "llama3": st.builds(
        lambda factor, freqs, length: Llama3Scaling(factor, *freqs, length),
        positive,
        two_in_order,
        lengths,
    ),
    "longrope": st.builds(
        LongRopeScaling,
        half_of_8,
        half_of_8,
        positive,
        lengths,
        st.one_of(st.just(0), lengths),
        maybe(positive),
    ),
}
any_base = st.one_of(st.floats(1.001, 100), st.floats(100, 1e15))
five_of = lambda values: st.lists(values, min_size=5, max_size=5)
every_scaling = pytest.mark.parametrize("name", ANY_SCALING)


def accepted(frequencies):
    """Whether no frequency passes 2**32 turns per position."""
    return max(frequencies) < 2**33 * mpmath.pi


@every_scaling
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=30)
def test_the_frequencies_of_any_scaling_are_rounded_once(name, data):
    """Fractional, tiny and huge constants: each is a float64, and nothing after it is."""
    scaling, base = data.draw(ANY_SCALING[name]), data.draw(any_base)
    if accepted(oracle.scaled_frequencies(scaling, 8, base)[0]):
        check_words(scaling, 8, base)
    else:
        with pytest.raises(
            ValueError, match=r"wanted frequencies below 2\*\*32 turns per position"
        ):
            check_words(scaling, 8, base)


@pytest.mark.slow
@every_scaling
@hypothesis.given(
    st.data(),
    st.one_of(
        five_of(st.integers(-(2**31), 2**31 - 1)), five_of(st.floats(-(2.0**24), 2.0**24, width=32))
    ),
)
@hypothesis.settings(max_examples=6)
def test_any_scaling_keeps_the_bound_at_any_position(name, data, positions):
    """Five positions for a scaling: each scaling is a program."""
    scaling, base = data.draw(ANY_SCALING[name]), data.draw(any_base)
    frequencies, attention = oracle.scaled_frequencies(scaling, 8, base)
    hypothesis.assume(
        max(frequencies) < 1000 if isinstance(positions[0], float) else accepted(frequencies)
    )
    cos, sin = cos_and_sin(np.array(positions), 8, base=base, scaling=scaling)
    bound = float(attention) * (oracle.MAX_ERROR + (OF_A_FACTOR if attention != 1 else 0))
    for (n, position), (i, frequency) in itertools.product(
        enumerate(positions), enumerate(frequencies)
    ):
        with mpmath.workprec(200):
            exact = [attention * oracle.sine(position, frequency, quarter) for quarter in (1, 0)]
        assert oracle.error(cos[n, i], exact[0]) <= bound
        assert oracle.error(sin[n, i], exact[1]) <= bound


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicNTKScaling(2.0, np.int8(5), np.int64(7)),
        YarnScaling(2.0, np.uint8(11)),
        Llama3Scaling(8.0, original_length=np.int16(13)),
        LongRopeScaling([1.0] * 4, [2.0] * 4, 2.0, np.int8(17), np.int8(19)),
    ],
    ids=lambda s: type(s).__name__,
)
def test_lengths_that_are_integers_of_numpy_are_pythons(scaling):
    check_words(scaling, 8, 10_000.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda case: f"{case['source'].split('.')[-1].split(',')[0]}"
)
def test_published_frequencies(case):
    """Each frequency is tried where it has turned by some radian, so that the lowest count as the
    highest do."""
    frequencies = np.array(case["frequencies"])
    scaling = (
        getattr(rotary_scaling, case["scaling"])(**case["arguments"]) if case["scaling"] else None
    )
    options = {"base": case["base"], "scaling": scaling}
    if "rotary_dim" in case:
        options |= {"rotary_dim": case["rotary_dim"], "partial": "proportional"}
    positions = np.where(
        frequencies > 0, np.round(1 / np.maximum(frequencies, 1e-9)), 2**30
    ).astype(np.int64)
    cos, sin = cos_and_sin(positions, case["head_dim"], **options)
    attention, angles = case["attention_factor"], positions * frequencies
    tolerance = attention * (
        FLOAT32_POWER * max(1.0, angles.max()) + oracle.MAX_ERROR + OF_A_FACTOR
    )
    np.testing.assert_allclose(np.diag(cos), attention * np.cos(angles), rtol=0, atol=tolerance)
    np.testing.assert_allclose(np.diag(sin), attention * np.sin(angles), rtol=0, atol=tolerance)


def test_every_published_function_has_a_golden_case():
    assert {case["scaling"] for case in GOLDEN} == {
        None,
        "LinearScaling",
        "DynamicNTKScaling",
        "YarnScaling",
        "Llama3Scaling",
        "LongRopeScaling",
    }


class TestIdentities:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("far", [2**20, 2**30])
    def test_scores_depend_on_the_difference_only(self, layout, far):
        query, key = normal(50, 2, 64), normal(50, 2, 64, seed=1)
        near = np.arange(50) % 7
        score = lambda shift: np.einsum(
            "thd,thd->th",
            np.asarray(apply_rotary(query, near + 13 + shift, layout=layout), np.float64),
            np.asarray(apply_rotary(key, near + shift, layout=layout), np.float64),
        )
        size = np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1)
        assert (np.abs(score(far) - score(0)) / size).max() <= 1e-6

    @pytest.mark.slow
    @hypothesis.given(
        st.integers(-(2**31), 2**31 - 1),
        st.sampled_from(LAYOUTS),
        st.sampled_from([(8, 6), (16, 16)]),
    )
    @hypothesis.settings(max_examples=30)
    def test_a_rotation_keeps_lengths(self, position, layout, sizes):
        head_dim, rotary_dim = sizes
        x = normal(1, 3, head_dim)
        rotated = np.asarray(
            apply_rotary(x, [position], layout=layout, rotary_dim=rotary_dim), np.float64
        )
        # Each pair's length is off by at most the errors of its two channels.
        np.testing.assert_allclose(
            np.linalg.norm(rotated, axis=-1),
            np.linalg.norm(x, axis=-1),
            rtol=2 * (oracle.MAX_ERROR + ROUNDINGS),
        )

    def test_rotated_again_adds_positions(self):
        """So keys that a cache holds rotated must not be rotated again."""
        x = normal(4, 2, 8)
        twice = np.asarray(apply_rotary(apply_rotary(x, [5, 6, 7, 8]), [2**30] * 4))
        np.testing.assert_allclose(
            twice, apply_rotary(x, np.arange(5, 9) + 2**30), rtol=0, atol=TWICE
        )
        assert np.abs(twice - np.asarray(apply_rotary(x, [5, 6, 7, 8]))).max() > 0.1

    def test_a_negative_position_undoes_the_rotation(self):
        x = normal(4, 2, 8)
        back = apply_rotary(apply_rotary(x, [3, 99, 10**6, 2**30]), [-3, -99, -(10**6), -(2**30)])
        np.testing.assert_allclose(back, x, rtol=0, atol=TWICE)

    def test_position_0_changes_nothing(self):
        x = normal(4, 2, 8)
        np.testing.assert_array_equal(apply_rotary(x, [0, 0, 0, 0]), x)

    def test_linear_scaling_is_interpolated_positions(self):
        x, positions = normal(6, 2, 8), np.array([0, 1, 2, 3, 1001, 5000])
        np.testing.assert_allclose(
            apply_rotary(x, positions, scaling=LinearScaling(8.0)),
            apply_rotary(x, positions.astype(np.float32) / 8),
            rtol=0,
            atol=1e-6,
        )

    def test_scalings_that_scale_nothing(self):
        scalings = [
            LinearScaling(1),
            NTKScaling(1.0),
            DynamicNTKScaling(4.0, original_length=2048, length=2048),
            DynamicNTKScaling(4.0, original_length=2048, length=0),
            YarnScaling(1.0, original_length=2048),
            Llama3Scaling(1.0),
            LongRopeScaling([1.0] * 4, [9.0] * 4, 1.0, original_length=2048, length=2048),
        ]
        rotate = jax.jit(
            lambda x, positions: [
                apply_rotary(x, positions, scaling=scaling) for scaling in (None, *scalings)
            ]
        )
        plain, *scaled = rotate(normal(4, 2, 8), np.array([0, 1, 10**6, -(2**31)]))
        for scaling, rotated in zip(scalings, scaled, strict=True):
            np.testing.assert_array_equal(rotated, plain, err_msg=str(scaling))

    def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest(self):
        positions = np.arange(0, 8000, 800)
        (cos, _), (scaled, _) = (
            cos_and_sin(positions, 8),
            cos_and_sin(positions, 8, scaling=NTKScaling(8.0)),
        )
        np.testing.assert_array_equal(scaled[:, 0], cos[:, 0])
        np.testing.assert_array_equal(scaled[:, -1], cos_and_sin(positions // 8, 8)[0][:, -1])

    def test_dynamic_ntk_is_ntk_at_its_length(self):
        x, positions = normal(4, 2, 8), [0, 1, 10**6, 2**30]
        dynamic = DynamicNTKScaling(4.0, original_length=1000, length=2500)
        np.testing.assert_array_equal(
            apply_rotary(x, positions, scaling=dynamic),
            apply_rotary(x, positions, scaling=NTKScaling(7.0)),
        )

    def test_longrope_chooses_by_its_length(self):
        x, positions = normal(3, 2, 4), [1, 100, 10**6]
        scaling = LongRopeScaling(
            [1.0, 2.0], [3.0, 4.0], 16.0, original_length=256, length=256, attention_factor=1.0
        )
        short, long = (
            apply_rotary(x, positions, scaling=dataclasses.replace(scaling, length=n))
            for n in (256, 257)
        )
        only = lambda factors: dataclasses.replace(scaling, short_factor=factors)
        np.testing.assert_array_equal(short, apply_rotary(x, positions, scaling=scaling))
        np.testing.assert_array_equal(long, apply_rotary(x, positions, scaling=only([3.0, 4.0])))
        assert np.abs(np.asarray(short) - np.asarray(long)).max() > 0.1

    def test_the_attention_factor_multiplies_cosines_and_sines(self):
        x, plain = normal(4, 2, 8), YarnScaling(4.0, original_length=64, attention_factor=1)
        doubled = dataclasses.replace(plain, attention_factor=2)
        got, half = (
            np.asarray(apply_rotary(x, [1, 2, 3, 4], scaling=scaling))
            for scaling in (doubled, plain)
        )
        np.testing.assert_array_equal(got, 2 * half)


class TestPermutation:
    @pytest.mark.parametrize("rotary_dim", [None, 4])
    def test_scores_survive_a_change_of_layout(self, rotary_dim):
        tokens, positions, heads = normal(6, 5), np.arange(6), 3
        query, key = normal(5, heads * 8, seed=1), normal(5, heads * 8, seed=2)

        def scores(layout, query, key):
            rotate = lambda w: np.asarray(
                apply_rotary(
                    (tokens @ w).reshape(6, heads, 8),
                    positions,
                    layout=layout,
                    rotary_dim=rotary_dim,
                )
            )
            return np.einsum("thd,shd->hts", rotate(query), rotate(key))

        permuted = [
            np.asarray(
                permute_rotary_weights(
                    w, heads, source="interleaved", target="half", rotary_dim=rotary_dim
                )
            )
            for w in (query, key)
        ]
        np.testing.assert_allclose(
            scores("half", *permuted), scores("interleaved", query, key), rtol=0, atol=1e-4
        )
        assert np.abs(scores("half", query, key) - scores("interleaved", query, key)).max() > 1

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [{}, {"rotary_dim": 4}, {"scaling": Llama3Scaling(8.0)}, {"partial": "proportional"}],
    )
    def test_rotation_commutes_with_permutation(self, options):
        x, positions = normal(4, 2, 8), [1, 20, 300, 4000]
        permute = lambda x, source, target: np.asarray(
            permute_rotary_weights(
                x, 1, source=source, target=target, rotary_dim=options.get("rotary_dim")
            )
        )
        half = apply_rotary(permute(x, "interleaved", "half"), positions, layout="half", **options)
        back = permute(half, "half", "interleaved")
        np.testing.assert_allclose(
            back,
            apply_rotary(x, positions, layout="interleaved", **options),
            rtol=0,
            atol=4 * FUSION,
        )

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
    def test_permuting_empty_weights(self, shape):
        layouts = {"source": "half", "target": "interleaved"}
        assert permute_rotary_weights(jnp.zeros(shape), 2, **layouts).shape == shape

    def test_permuting_to_the_other_layout_and_back_is_the_identity(self):
        bias = np.arange(24, dtype=np.int32)
        there = permute_rotary_weights(bias, 3, source="half", target="interleaved", rotary_dim=6)
        assert there.tolist()[:8] == [0, 3, 1, 4, 2, 5, 6, 7]
        assert there.tolist()[8:16] == [8, 11, 9, 12, 10, 13, 14, 15]
        np.testing.assert_array_equal(
            permute_rotary_weights(there, 3, source="interleaved", target="half", rotary_dim=6),
            bias,
        )
        np.testing.assert_array_equal(
            permute_rotary_weights(bias, 3, source="half", target="half"), bias
        )

    def test_as_the_conversion_of_llama(self):
        """The transformers library's `permute` for a torch weight [out, in]: view(heads, d/2, 2,
        in), axes 1 and 2 swapped."""
        weights = normal(2 * 6, 4)
        expected = weights.reshape(2, 3, 2, 4).swapaxes(1, 2).reshape(12, 4)
        ours = permute_rotary_weights(weights.T, 2, source="interleaved", target="half")
        np.testing.assert_array_equal(np.transpose(np.asarray(ours)), expected)


class TestPartial:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_first_channels_are_a_head_of_their_own(self, layout):
        x, positions = normal(5, 2, 16), np.arange(5) * 100
        got = np.asarray(apply_rotary(x, positions, layout=layout, rotary_dim=6))
        np.testing.assert_array_equal(got[..., 6:], x[..., 6:])
        assert_rotated(
            got[..., :6], x[..., :6], by_equation_34(x[..., :6], positions, layout=layout), layout
        )

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_proportional_rotates_the_first_pairs_of_the_whole_head(self, layout):
        x, positions = normal(5, 2, 16), np.arange(5) * 100
        got = np.asarray(
            apply_rotary(x, positions, layout=layout, rotary_dim=4, partial="proportional")
        )
        whole = np.asarray(apply_rotary(x, positions, layout=layout))
        turned = np.concatenate([channels[:2] for channels in pair_channels(16, layout)])
        still = np.setdiff1d(np.arange(16), turned)
        np.testing.assert_allclose(got[..., turned], whole[..., turned], rtol=0, atol=4 * FUSION)
        np.testing.assert_array_equal(got[..., still], x[..., still])

    @pytest.mark.parametrize("partial", ["first", "proportional"])
    def test_all_channels_are_the_default(self, partial):
        x = normal(4, 2, 8)
        np.testing.assert_array_equal(
            apply_rotary(x, np.arange(4), rotary_dim=8, partial=partial),
            apply_rotary(x, np.arange(4)),
        )

    def test_an_odd_head_with_an_even_part(self):
        x = normal(5, 2, 7)
        np.testing.assert_array_equal(
            np.asarray(apply_rotary(x, np.arange(5), rotary_dim=4))[..., 4:], x[..., 4:]
        )

    @pytest.mark.slow
    def test_scalings_see_the_rotated_channels_only(self):
        x, positions = normal(5, 2, 16), np.arange(5) * 100
        for scaling in (
            NTKScaling(4.0),
            LongRopeScaling([1.0] * 4, [2.0] * 4, 8.0, original_length=8, length=9),
        ):
            got = np.asarray(apply_rotary(x, positions, rotary_dim=8, scaling=scaling))
            np.testing.assert_allclose(
                got[..., :8],
                apply_rotary(x[..., :8], positions, scaling=scaling),
                rtol=0,
                atol=4 * FUSION,
            )
            np.testing.assert_array_equal(got[..., 8:], x[..., 8:])


class TestAxes:
    pair_axes = np.repeat([0, 1, 2], [2, 3, 3])

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_equal_positions_on_every_axis_are_one_axis(self, layout):
        x, positions = normal(2, 5, 3, 16), np.arange(10).reshape(2, 5) * 1000
        got = apply_rotary(
            x, np.repeat(positions[..., None], 3, -1), layout=layout, pair_axes=self.pair_axes
        )
        np.testing.assert_allclose(
            got, apply_rotary(x, positions, layout=layout), rtol=0, atol=4 * FUSION
        )

    def test_qwen2_vl(self):
        """Its angles of each axis, split by section, the section's own axis taken of each;
        halves."""
        x, positions = normal(5, 3, 16), np.random.default_rng(1).integers(0, 500, [5, 3])
        angles = positions.T[..., None] * 1e6 ** (-np.arange(0, 16, 2) / 16)
        split = [np.split(axis, [2, 5], -1) for axis in angles]
        angles = np.concatenate([split[n % 3][n] for n in range(3)], -1)[:, None]
        a, b = x[..., :8], x[..., 8:]
        expected = np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )
        assert_rotated(apply_rotary(x, positions, base=1e6, pair_axes=self.pair_axes), x, expected)

    def test_qwen3_vl(self):
        """Every third pair from the second is of height and from the third of width, as often as
        the sections (4, 2, 2) say; the others are of time."""
        x, positions = normal(5, 3, 16), np.random.default_rng(1).integers(0, 500, [5, 3])
        angles = positions[..., None] * 1e6 ** (-np.arange(0, 16, 2) / 16)
        of_time, *others = angles.transpose(1, 0, 2).copy()
        for start, other in enumerate(others, 1):
            of_time[:, start : 2 * 3 : 3] = other[:, start : 2 * 3 : 3]
        angles = of_time[:, None]
        a, b = x[..., :8], x[..., 8:]
        expected = np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )
        pair_axes = [0, 1, 2] * 2 + [0] * 2
        assert_rotated(apply_rotary(x, positions, base=1e6, pair_axes=pair_axes), x, expected)

    def test_axes_of_no_pair_and_one_axis(self):
        x, positions = normal(4, 2, 8), np.arange(4)
        expected = apply_rotary(x, positions)
        np.testing.assert_array_equal(
            apply_rotary(x, positions[:, None], pair_axes=[0] * 4), expected
        )
        np.testing.assert_array_equal(
            apply_rotary(x, np.stack([positions + 7, positions], -1), pair_axes=[1] * 4), expected
        )

    def test_fractional_coordinates_and_scaling(self):
        x, grid = normal(4, 2, 8), np.array([[0, 0], [0, 0.5], [0.5, 0], [0.5, 0.5]], np.float32)
        got = apply_rotary(x, grid, pair_axes=(0, 0, 1, 1), scaling=LinearScaling(0.5))
        np.testing.assert_allclose(
            got,
            apply_rotary(x, (2 * grid).astype(int), pair_axes=(0, 0, 1, 1)),
            rtol=0,
            atol=4 * FUSION,
        )


def test_min_timescale_divides_frequencies():
    """MaxText, praxis: timescale = min * (max / min) ** (2i / d), angle = position / timescale. (In
    sinusoids it multiplies.)"""
    smallest, largest, positions = 4.0, 20_000.0, np.arange(50)
    timescale = smallest * (largest / smallest) ** (np.arange(0, 16, 2) / 16)
    cos, sin = cos_and_sin(positions, 16, base=largest / smallest, scaling=LinearScaling(smallest))
    angles = positions[:, None] / timescale
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=oracle.MAX_ERROR)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=oracle.MAX_ERROR)


class TestMistakes:
    """What the code of others does; each must differ from ours."""

    def test_layouts_differ(self):
        x = normal(4, 2, 8)
        half, interleaved = (
            np.asarray(apply_rotary(x, [1, 2, 3, 4], layout=layout)) for layout in LAYOUTS
        )
        assert np.abs(half - interleaved).max() > 0.1

    def test_constants_do_not_depend_on_call_order(self):
        x, positions = normal(4, 2, 8), [1, 2, 3, 4]
        first = np.asarray(apply_rotary(x, positions, base=10_000.0))
        for options in (
            {"base": 500.0},
            {"scaling": LinearScaling(2.0)},
            {"scaling": NTKScaling(2.0)},
            {"layout": "interleaved"},
        ):
            assert np.abs(first - np.asarray(apply_rotary(x, positions, **options))).max() > 1e-3
        np.testing.assert_array_equal(apply_rotary(x, positions, base=10_000), first)

    def test_partial_exponents_are_those_of_its_channels(self):
        x, positions = normal(4, 2, 8), [1, 2, 3, 4]
        whole = np.asarray(apply_rotary(x[..., [0, 1, 2, 2, 3, 4, 5, 5]], positions))
        assert (
            np.abs(
                np.asarray(apply_rotary(x, positions, rotary_dim=4))[..., 1] - whole[..., 1]
            ).max()
            > 1e-2
        )

    @pytest.mark.slow
    def test_16_bit_result_is_the_float32_result_rounded(self):
        for dtype in (jnp.bfloat16, jnp.float16):
            x = normal(300, 2, 8, dtype=dtype)
            ours = apply_rotary(x, np.arange(300))
            assert ours.dtype == dtype
            expected = apply_rotary(x.astype(np.float32), np.arange(300))
            # Contraction may move a value across the boundary between two neighbours: one unit in
            # the last place.
            np.testing.assert_allclose(
                np.asarray(ours, np.float32), expected, rtol=float(jnp.finfo(dtype).eps), atol=1e-6
            )
        with_16_bit_product = np.ones([], jnp.bfloat16) * np.cos(np.array(299.0, jnp.bfloat16))
        assert abs(float(with_16_bit_product) - np.cos(299.0)) > 0.1

    def test_float32_angles_are_wrong_at_position_one_million(self):
        angles = np.float32(10**6 + 1) * np.float32(10_000.0 ** (-2 / 64))
        cos, _ = cos_and_sin([10**6 + 1], 64)
        exact = oracle.sine(10**6 + 1, oracle.frequency(1, 32), 1)
        assert oracle.error(cos[0, 1], exact) <= oracle.MAX_ERROR
        assert oracle.error(np.cos(angles), exact) > 1e-3


class TestContract:
    options = pytest.mark.parametrize(
        "options",
        [
            {},
            {"layout": "interleaved", "rotary_dim": 4},
            {"scaling": YarnScaling(4.0, original_length=64)},
        ],
    )

    @pytest.mark.slow
    @options
    def test_jit_vmap_and_eval_shape(self, options):
        x, positions = normal(3, 5, 2, 8), np.arange(15).reshape(3, 5)
        rotate = lambda x, p: apply_rotary(x, p, **options)
        eager = rotate(x, positions)
        compiled, mapped, of_one_row = jax.jit(
            lambda x, p: (
                rotate(x, p),
                jax.vmap(rotate)(x, p),
                jax.vmap(rotate, in_axes=(0, None))(x, p[1]),
            )
        )(x, positions)
        np.testing.assert_allclose(compiled, eager, rtol=0, atol=4 * FUSION)
        np.testing.assert_allclose(mapped, eager, rtol=0, atol=4 * FUSION)
        np.testing.assert_allclose(
            np.asarray(of_one_row)[1], np.asarray(eager)[1], rtol=0, atol=4 * FUSION
        )
        assert jax.eval_shape(rotate, x, positions) == jax.ShapeDtypeStruct(
            (3, 5, 2, 8), jnp.float32
        )

    @pytest.mark.slow
    def test_lists_and_one_row_for_all(self):
        x, positions = normal(3, 5, 2, 8), np.arange(5)
        eager = apply_rotary(x, positions)
        assert isinstance(eager, jax.Array)
        for other in (
            apply_rotary(x.tolist(), positions.tolist()),
            apply_rotary(x, positions[None]),
            apply_rotary(x, np.arange(5.0)),
        ):
            np.testing.assert_allclose(other, eager, rtol=0, atol=4 * FUSION)

    @options
    def test_the_gradient_is_rotated_by_the_negative_position(self, options):
        x, back = normal(5, 2, 8), normal(5, 2, 8, seed=1)
        positions = np.array([0, 3, -9, 10**6, 2**31 - 1])
        (pulled,) = jax.jit(
            lambda x, back: jax.vjp(lambda x: apply_rotary(x, positions, **options), x)[1](back)
        )(x, back)
        np.testing.assert_allclose(
            pulled, apply_rotary(back, -positions, **options), rtol=0, atol=TWICE
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("pair_axes", [None, (0,) * 4])
    def test_the_gradient_in_float_positions(self, pair_axes):
        x, positions = normal(2, 3, 8), np.array([0.25, -70.5], np.float32)
        total = lambda p: jnp.sum(
            apply_rotary(x, p[:, None] if pair_axes else p, pair_axes=pair_axes) * x[::-1]
        )
        step, at = 1e-4, lambda p: np.sum(by_equation_34(x, p) * x[::-1])
        gradient, hessian = jax.jit(lambda p: (jax.grad(total)(p), jax.hessian(total)(p)))(
            positions
        )
        for n, along in enumerate(np.eye(2)):
            slope = (at(positions + step * along) - at(positions - step * along)) / (2 * step)
            np.testing.assert_allclose(np.asarray(gradient)[n], slope, rtol=1e-4)
        assert np.isfinite(hessian).all()

    def test_a_traced_offset_does_not_recompile(self):
        traces = []

        @jax.jit
        def rotate(x, offset):
            traces.append(offset)
            return apply_rotary(x, offset + jnp.arange(4))

        x = normal(4, 2, 8)
        for offset in (0, 5, 2**30):
            np.testing.assert_allclose(
                rotate(x, np.int32(offset)),
                apply_rotary(x, offset + np.arange(4)),
                rtol=0,
                atol=4 * FUSION,
            )
        assert len(traces) == 1

    def test_without_jit_it_compiles_once(self):
        x = normal(4, 2, 8)
        apply_rotary(x, np.arange(4))
        before = rotary._rotated._cache_size()
        for base in (10_000, 10_000.0, np.float64(10_000.0)):
            apply_rotary(x, np.arange(4) + 5, base=base)
        assert rotary._rotated._cache_size() == before

    def test_phases_are_computed_once_for_all_heads(self):
        """On a CPU, XLA computes what it fuses again for each head: only the loop's result is ready
        before the products."""
        text = (
            jax.jit(apply_rotary)
            .lower(np.zeros([4, 64, 8, 32], np.float32), np.zeros([4, 64], np.int32))
            .compile()
            .as_text()
        )
        assert " while(" in text

    def test_lowered_text_has_constants_of_the_width_only(self):
        text = [
            jax.jit(lambda x, n=n: apply_rotary(x, np.arange(n)))
            .lower(np.zeros([n, 1, 64], np.float32))
            .as_text()
            for n in (8, 9)
        ]
        assert len(text[1]) < 100_000
        assert abs(len(text[0]) / len(text[1]) - 1) < 0.05

    @pytest.mark.parametrize("platform", ["tpu", "cuda"])
    def test_lowers_for_other_platforms(self, platform):
        text = (
            jax.jit(apply_rotary)
            .trace(np.zeros([8, 2, 16], np.float32), np.arange(8))
            .lower(lowering_platforms=(platform,))
            .as_text()
        )
        assert "stablehlo.cosine" not in text
        # Older releases of jax leave the choice of the platform to the compiler.
        assert "stablehlo.while" not in text or "stablehlo.case" in text

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
    def test_rotation_on_a_mesh_equals_rotation_on_one_device(self, layout, kind):
        mesh = jax.make_mesh((2, 2, 2), ("rows", "length", "heads"), axis_types=(kind,) * 3)
        x, positions = normal(4, 6, 4, 8), np.arange(24, dtype=np.int32).reshape(4, 6)
        expected = np.asarray(apply_rotary(x, positions, layout=layout))
        place = lambda array, *axes: jax.device_put(
            array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        )
        with set_mesh(mesh):
            sharded_x, sharded_positions = (
                place(x, "rows", "length", "heads"),
                place(positions, "rows", "length"),
            )
            rotate = jax.jit(
                lambda x, *all_positions: [
                    apply_rotary(x, each, layout=layout) for each in all_positions
                ]
            )
            for rotated in rotate(sharded_x, sharded_positions, place(positions)):
                np.testing.assert_allclose(rotated, expected, rtol=0, atol=4 * FUSION)
                assert rotated.sharding.is_equivalent_to(sharded_x.sharding, 4)

    @pytest.mark.parametrize(
        "shape", [(0, 2, 8), (1, 2, 8), (3, 1, 8), (3, 0, 8), (0, 3, 2, 8), (2, 3, 2, 2)]
    )
    def test_empty_and_single_tokens_and_heads_are_rotated(self, shape):
        x, positions = normal(*shape), np.arange(shape[-3])
        assert_rotated(apply_rotary(x, positions), x, by_equation_34(x, positions))

    def test_64_bit_mode(self):
        x, positions = normal(4, 2, 8), np.array([0, 3, -5, 2**31 - 1])
        with x64():
            ours, wide = (
                np.asarray(apply_rotary(*map(jax.device_put, arrays)))
                for arrays in ((x, positions), (x.astype(np.float64), np.array([0, 3, -5, 2**31])))
            )
        assert (ours.dtype, wide.dtype) == (jnp.float32, jnp.float64)
        np.testing.assert_allclose(ours, apply_rotary(x, positions), rtol=0, atol=4 * FUSION)
        np.testing.assert_allclose(wide[:3], ours[:3], rtol=0, atol=1e-6)
        assert np.isnan(wide[3]).all()

    @pytest.mark.slow
    def test_scalings_are_static_arguments(self):
        for scaling in SCALINGS:
            assert hash(scaling) == hash(dataclasses.replace(scaling))
            assert scaling == dataclasses.replace(scaling)
        traced = jax.jit(apply_rotary, static_argnames="scaling")
        x = normal(5, 1, 32)
        for scaling in (SCALINGS[0], SCALINGS[-1]):
            expected = apply_rotary(x, np.arange(5), scaling=scaling)
            np.testing.assert_allclose(
                traced(x, np.arange(5), scaling=scaling), expected, rtol=0, atol=8 * FUSION
            )


X = np.zeros([2, 3, 4, 8], np.float32)
P = np.arange(3)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            TypeError,
            "x: wanted a floating dtype of 16 to 64 bits, got int32",
            lambda: apply_rotary(np.ones([3, 4, 8], np.int32), P),
        ),
        (
            ValueError,
            "x: wanted shape [..., length, heads, head_dim], got shape [3, 8]",
            lambda: apply_rotary(X[0, :, 0], P),
        ),
        (
            ValueError,
            "layout: wanted one of 'half', 'interleaved', got 'neox'",
            lambda: apply_rotary(X, P, layout="neox"),
        ),
        (
            ValueError,
            "partial: wanted one of 'first', 'proportional', got 0.5",
            lambda: apply_rotary(X, P, partial=0.5),
        ),
        (
            ValueError,
            "head_dim: wanted an even number of channels, to make pairs, got 7",
            lambda: apply_rotary(X[..., :7], P),
        ),
        (
            ValueError,
            "head_dim: wanted an even number of channels, to make pairs, got 7",
            lambda: apply_rotary(X[..., :7], P, rotary_dim=4, partial="proportional"),
        ),
        (
            ValueError,
            "rotary_dim: wanted an even number of channels, to make pairs, got 3",
            lambda: apply_rotary(X, P, rotary_dim=3),
        ),
        (
            ValueError,
            "rotary_dim: wanted an int of at least 2, got 0",
            lambda: apply_rotary(X, P, rotary_dim=0),
        ),
        (
            ValueError,
            "rotary_dim: wanted an int of at most 8, got 10",
            lambda: apply_rotary(X, P, rotary_dim=10),
        ),
        (
            TypeError,
            "rotary_dim: wanted a Python int, got float 0.5",
            lambda: apply_rotary(X, P, rotary_dim=0.5),
        ),
        (
            ValueError,
            "base: wanted a finite number above 0, got 0",
            lambda: apply_rotary(X, P, base=0),
        ),
        (
            TypeError,
            "base: wanted a Python number, got bool True",
            lambda: apply_rotary(X, P, base=True),
        ),
        (
            TypeError,
            "scaling: wanted LinearScaling(...), another scaling of this package, or None, got float 2.0",
            lambda: apply_rotary(X, P, scaling=2.0),
        ),
        (
            TypeError,
            "positions: wanted an integer dtype, or float32",
            lambda: apply_rotary(X, jnp.ones(3, jnp.bfloat16)),
        ),
        (
            ValueError,
            "positions: wanted a last axis of x's tokens' length, 3, got shape [4]",
            lambda: apply_rotary(X, np.arange(4)),
        ),
        (
            ValueError,
            "positions: wanted a last axis of x's tokens' length, 3, got shape [2, 1]",
            lambda: apply_rotary(X, np.zeros([2, 1], int)),
        ),
        (
            ValueError,
            "positions: wanted a last axis of x's tokens' length, 3, got shape []; add jnp.arange(length) to a scalar offset; "
            "jax.vmap maps keyword arguments over axis 0: "
            "bind them with functools.partial",
            lambda: jax.vmap(apply_rotary, in_axes=0)(X[:, None].repeat(3, 0)[:3], positions=P),
        ),
        (
            ValueError,
            "positions: wanted a shape that broadcasts to that of x's tokens, [2, 3], got shape [5, 2, 3]",
            lambda: apply_rotary(X, np.zeros([5, 2, 3], int)),
        ),
        (
            ValueError,
            "positions: wanted a shape that broadcasts to that of x's tokens, [2, 3], got shape [4, 3]",
            lambda: apply_rotary(X, np.zeros([4, 3], int)),
        ),
        (
            ValueError,
            "positions: wanted integers inside int32, -2147483648..2147483647, got 4294967301 at index [1]",
            lambda: apply_rotary(X, [0, 2**32 + 5, 1]),
        ),
        (
            ValueError,
            "positions: wanted shape [..., length, 2 or more], as pair_axes says, got shape [3]",
            lambda: apply_rotary(X, P, pair_axes=(0, 0, 1, 1)),
        ),
        (
            ValueError,
            "positions: wanted a last axis of x's tokens' length, 3, got shape [4]",
            lambda: apply_rotary(X, np.zeros([4, 2], int), pair_axes=(0, 0, 1, 1)),
        ),
        (
            ValueError,
            "pair_axes: wanted a number for each pair, 4, got 5",
            lambda: apply_rotary(X, P, pair_axes=(0, 0, 1, 1, 1)),
        ),
        (
            ValueError,
            "pair_axes[1]: wanted an int of at least 0, got -2",
            lambda: apply_rotary(X, P, pair_axes=(0, -2)),
        ),
        (
            TypeError,
            "pair_axes: wanted a sequence, got int 4",
            lambda: apply_rotary(X, P, pair_axes=4),
        ),
        (
            TypeError,
            "pair_axes[0]: wanted a Python int, got float 2.0",
            lambda: apply_rotary(X, P, pair_axes=(2.0, 2.0)),
        ),
        (
            ValueError,
            "base: wanted a finite number above 1, got 1.0",
            lambda: apply_rotary(X, P, base=1, scaling=SCALINGS[3]),
        ),
        (
            ValueError,
            "long_factor: wanted half as many numbers as rotated channels, 4, got 16",
            lambda: apply_rotary(X, P, scaling=SCALINGS[-1]),
        ),
        (ValueError, "factor: wanted a finite number above 0, got 0", lambda: LinearScaling(0)),
        (TypeError, "factor: wanted a Python number, got str '2'", lambda: LinearScaling("2")),
        (ValueError, "alpha: wanted a finite number above 0, got -1", lambda: NTKScaling(-1)),
        (
            ValueError,
            "factor: wanted a finite number above 0, got 0",
            lambda: DynamicNTKScaling(0, 8, 8),
        ),
        (
            ValueError,
            "original_length: wanted an int of at least 2, got 0",
            lambda: DynamicNTKScaling(2.0, 0, 8),
        ),
        (
            ValueError,
            "length: wanted an int of at least 0, got -1",
            lambda: DynamicNTKScaling(2.0, 8, -1),
        ),
        (
            TypeError,
            "length: wanted a Python int, got a traced int32[]",
            lambda: jax.jit(lambda n: apply_rotary(X, P, scaling=DynamicNTKScaling(2.0, 8, n)))(9),
        ),
        (
            ValueError,
            "factor: wanted a finite number above 0, got inf",
            lambda: YarnScaling(np.inf, 8),
        ),
        (
            ValueError,
            "original_length: wanted an int of at least 2, got 0",
            lambda: YarnScaling(2.0, 0),
        ),
        (
            ValueError,
            "beta_slow: wanted a finite number above 0, got 0",
            lambda: YarnScaling(2.0, 8, beta_slow=0),
        ),
        (
            ValueError,
            "beta_fast: wanted a finite number above 1, got 1",
            lambda: YarnScaling(2.0, 8, beta_fast=1),
        ),
        (TypeError, "truncate: wanted a Python bool", lambda: YarnScaling(2.0, 8, truncate=1)),
        (
            ValueError,
            "mscale: wanted a finite number of at least 0, got -1",
            lambda: YarnScaling(2.0, 8, mscale=-1),
        ),
        (
            ValueError,
            "mscale_all_dim: wanted a finite number of at least 0, got -1",
            lambda: YarnScaling(2.0, 8, mscale_all_dim=-1),
        ),
        (
            ValueError,
            "attention_factor: wanted a finite number above 0, got 0",
            lambda: YarnScaling(2.0, 8, attention_factor=0),
        ),
        (ValueError, "factor: wanted a finite number above 0, got 0", lambda: Llama3Scaling(0)),
        (
            ValueError,
            "low_freq_factor: wanted a finite number above 0, got 0",
            lambda: Llama3Scaling(8.0, low_freq_factor=0),
        ),
        (
            ValueError,
            "high_freq_factor: wanted a finite number above 1, got 1",
            lambda: Llama3Scaling(8.0, high_freq_factor=1),
        ),
        (
            ValueError,
            "original_length: wanted an int of at least 2, got 0",
            lambda: Llama3Scaling(8.0, original_length=0),
        ),
        (
            ValueError,
            "short_factor[1]: wanted a finite number above 0, got 0",
            lambda: LongRopeScaling([1, 0], [1, 1], 2.0, 8, 8),
        ),
        (
            TypeError,
            "long_factor[0]: wanted a Python number, got str 'a'",
            lambda: LongRopeScaling([1], ["a"], 2.0, 8, 8),
        ),
        (
            TypeError,
            "long_factor: wanted a sequence, got str '1'",
            lambda: LongRopeScaling([1], "1", 2.0, 8, 8),
        ),
        (
            TypeError,
            "short_factor: wanted a sequence, got NoneType None",
            lambda: LongRopeScaling(None, [1], 2.0, 8, 8),
        ),
        (
            ValueError,
            "factor: wanted a finite number above 0, got 0",
            lambda: LongRopeScaling([1], [1], 0, 8, 8),
        ),
        (
            ValueError,
            "original_length: wanted an int of at least 2, got 1",
            lambda: LongRopeScaling([1], [1], 2.0, 1, 8),
        ),
        (
            ValueError,
            "length: wanted an int of at least 0, got -1",
            lambda: LongRopeScaling([1], [1], 2.0, 8, -1),
        ),
        (
            TypeError,
            "length: wanted a Python int, got a traced int32[]",
            lambda: jax.jit(
                lambda n: apply_rotary(X, P, scaling=LongRopeScaling([1] * 4, [1] * 4, 2.0, 8, n))
            )(9),
        ),
        (
            ValueError,
            "attention_factor: wanted a finite number above 0, got -1",
            lambda: LongRopeScaling([1], [1], 2.0, 8, 8, attention_factor=-1),
        ),
        (
            ValueError,
            "num_heads: wanted an int of at least 1, got 0",
            lambda: permute_rotary_weights(np.ones(8, np.float32), 0, source="half", target="half"),
        ),
        (
            ValueError,
            "source: wanted one of 'half', 'interleaved', got 'llama'",
            lambda: permute_rotary_weights(
                np.ones(8, np.float32), 1, source="llama", target="half"
            ),
        ),
        (
            ValueError,
            "target: wanted one of 'half', 'interleaved', got None",
            lambda: permute_rotary_weights(np.ones(8, np.float32), 1, source="half", target=None),
        ),
        (
            ValueError,
            "head_dim: wanted an even number of channels, to make pairs, got 3",
            lambda: permute_rotary_weights(
                np.ones(9, np.float32), 3, source="half", target="interleaved"
            ),
        ),
        (
            ValueError,
            "weights: wanted a last axis of 3 heads times head_dim, got shape [2, 8]",
            lambda: permute_rotary_weights(
                np.ones([2, 8], np.float32), 3, source="half", target="half"
            ),
        ),
        (
            ValueError,
            "weights: wanted a last axis of 3 heads times head_dim, got shape []",
            lambda: permute_rotary_weights(1.0, 3, source="half", target="half"),
        ),
        (
            ValueError,
            "rotary_dim: wanted an int of at most 4, got 6",
            lambda: permute_rotary_weights(
                np.ones(8, np.float32), 2, source="half", target="interleaved", rotary_dim=6
            ),
        ),
    ],
)
def test_bad_arguments_raise_errors(kind, message, call):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_pair_axes_past_those_of_the_positions_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^positions: wanted shape \[..., length, 3 or more\], as pair_axes says, got shape \[3, 2\]",
    ):
        apply_rotary(X, np.zeros([3, 2], int), pair_axes=(0, 0, 1, 2))
