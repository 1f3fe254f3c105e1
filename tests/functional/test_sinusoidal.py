import math

import hypothesis
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest
from contexts import x64
from hypothesis import strategies as st

import transformer_embed as te

LAYOUTS = ("interleaved", "sin_cos", "cos_sin")


def by_the_formula(positions, d_model, *, base=10_000.0):
    """Vaswani et al. (2017), section 3.5, entry by entry in float64."""
    table = np.zeros((len(positions), d_model))
    for row, position in enumerate(positions):
        for channel in range(d_model):
            angle = position / base ** (channel // 2 * 2 / d_model)
            table[row, channel] = np.cos(angle) if channel % 2 else np.sin(angle)
    return table


# Float64 angles at positions below 1e4 are exact to 1e-12: only our own error remains.
close = {"rtol": 0, "atol": oracle.MAX_ERROR}


@pytest.mark.parametrize("d_model", [1, 2, 3, 6, 7, 64, 513])
def test_the_table_equals_the_papers_formula(d_model):
    np.testing.assert_allclose(
        te.sinusoidal_table(50, d_model), by_the_formula(range(50), d_model), **close
    )


def test_the_paper_holds_at_any_position():
    positions = [2**20 + 1, 2**31 - 1, -(2**31), -3]
    got = np.asarray(te.sinusoidal_encoding(positions, 512))
    for row, position in enumerate(positions):
        for channel in (0, 1, 2, 255, 256, 511):
            assert (
                oracle.error(
                    got[row, channel],
                    oracle.sine(position, oracle.frequency(channel // 2, 256), channel % 2),
                )
                <= oracle.MAX_ERROR
            )


def test_a_published_table():
    """Row 1 of the table of 6 channels in "The Annotated Transformer"'s formula: sin and cos of 1,
    10000^(-1/3), 10000^(-2/3)."""
    np.testing.assert_allclose(
        np.asarray(te.sinusoidal_table(2, 6))[1],
        [0.8415, 0.5403, 0.0464, 0.9989, 0.0022, 1.0],
        atol=5e-5,
    )


@pytest.mark.parametrize("base", [2.0, 1000.0, 500_000.0, 1e7])
def test_any_base(base):
    np.testing.assert_allclose(
        te.sinusoidal_table(9, 12, base=base), by_the_formula(range(9), 12, base=base), **close
    )


def test_table_is_encoding_of_arange():
    np.testing.assert_array_equal(
        te.sinusoidal_table(17, 10), te.sinusoidal_encoding(np.arange(17), 10)
    )


@pytest.mark.parametrize("odd", ["truncate", "round_up"])
@pytest.mark.parametrize("d_model", [6, 7])
def test_layouts_are_orders_of_one_set_of_channels(d_model, odd):
    encode = jax.jit(
        lambda: [te.sinusoidal_table(5, d_model, layout=layout, odd=odd) for layout in LAYOUTS]
    )
    interleaved, sin_cos, cos_sin = map(np.asarray, encode())
    half = (d_model + 1) // 2
    np.testing.assert_array_equal(
        sin_cos, np.concatenate([interleaved[:, 0::2], interleaved[:, 1::2]], -1)
    )
    np.testing.assert_array_equal(cos_sin[:, half:], interleaved[:, 0::2][:, : d_model - half])
    np.testing.assert_array_equal(cos_sin[:, : d_model // 2], interleaved[:, 1::2])


class TestConventions:
    """Tables of published projects, each written out here from its project's formula in float64."""

    positions = np.arange(40.0)[:, None]

    def halves(self, frequencies, d_model):
        angles = self.positions * frequencies
        table = np.concatenate([np.sin(angles), np.cos(angles)], -1)
        return np.pad(table, [(0, 0), (0, d_model - table.shape[1])])

    @pytest.mark.parametrize("d_model", [2, 3, 4, 5, 32, 33])
    def test_tensor2tensor(self, d_model):
        """get_timing_signal_1d; fairseq, Whisper and Flax's examples agree with it at min_timescale
        1."""
        count = d_model // 2
        increment = np.log(1e4 / 1.0) / max(count - 1, 1)
        expected = self.halves(1.0 * np.exp(np.arange(count) * -increment), d_model)
        np.testing.assert_allclose(
            te.sinusoidal_table(40, d_model, layout="sin_cos", shift=1, odd="zero"),
            expected,
            **close,
        )

    def test_tensor2tensor_with_other_timescales(self):
        smallest, largest, count = 0.5, 2e4, 16
        expected = self.halves(
            smallest * np.exp(np.arange(count) * -np.log(largest / smallest) / (count - 1)), 32
        )
        ours = te.sinusoidal_table(
            40, 32, layout="sin_cos", shift=1, base=largest / smallest, frequency_scale=smallest
        )
        np.testing.assert_allclose(ours, expected, **close)

    @pytest.mark.parametrize("shift", [0, 1, 0.5])
    @pytest.mark.parametrize("flip", [False, True])
    @pytest.mark.parametrize("d_model", [8, 9])
    def test_diffusers(self, shift, flip, d_model):
        """get_timestep_embedding, with fractional time steps and scale."""
        half = d_model // 2
        times = np.array([0.0, 0.25, 999.5], np.float32)
        angles = (
            2.0
            * times[:, None].astype(np.float64)
            * np.exp(-np.log(10000) * np.arange(half) / (half - shift))
        )
        parts = [np.cos(angles), np.sin(angles)] if flip else [np.sin(angles), np.cos(angles)]
        expected = np.pad(np.concatenate(parts, -1), [(0, 0), (0, d_model % 2)])
        layout = "cos_sin" if flip else "sin_cos"
        ours = te.sinusoidal_encoding(
            times, d_model, layout=layout, shift=shift, odd="zero", frequency_scale=2.0
        )
        np.testing.assert_allclose(ours, expected, **close)

    @pytest.mark.parametrize("d_model", [6, 7])
    def test_marian(self, d_model):
        """ceil(d/2) sines, then floor(d/2) cosines, with d as it is in the exponents; RoFormer's
        too."""
        angles = self.positions / 10000 ** (2 * (np.arange(d_model) // 2) / d_model)
        expected = np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], -1)
        np.testing.assert_allclose(
            te.sinusoidal_table(40, d_model, layout="sin_cos"), expected, **close
        )

    @pytest.mark.parametrize("d_model", [6, 7])
    def test_positional_encodings(self, d_model):
        """The package of that name: d rounded up to even, sines and cosines interleaved, cut back
        to d."""
        even = d_model + d_model % 2
        angles = self.positions / 10000 ** (np.arange(0, even, 2) / even)
        expected = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(40, even)[:, :d_model]
        np.testing.assert_allclose(
            te.sinusoidal_table(40, d_model, odd="round_up"), expected, **close
        )

    def test_musicgen(self):
        angles = self.positions * np.exp(np.arange(8) * -(np.log(10000) / (8 - 1)))
        expected = np.pad(np.concatenate([np.cos(angles), np.sin(angles)], 1), [(0, 0), (0, 1)])
        np.testing.assert_allclose(
            te.sinusoidal_table(40, 17, layout="cos_sin", shift=1, odd="zero"), expected, **close
        )

    def test_xlnet_descending_positions(self):
        positions = np.arange(7, -5, -1.0)
        angles = positions[:, None] / 10000 ** (np.arange(0, 8, 2) / 8)
        expected = np.concatenate([np.sin(angles), np.cos(angles)], -1)
        np.testing.assert_allclose(
            te.sinusoidal_encoding(positions.astype(int), 8, layout="sin_cos"), expected, **close
        )


class TestMistakes:
    """What the code of others does; each must differ from ours."""

    def test_no_doubled_exponent(self):
        doubled = np.sin(1 / 10000 ** (2 * 2 / 6))
        assert abs(np.asarray(te.sinusoidal_table(2, 6))[1, 2] - doubled) > 0.04

    def test_position_0_alternates_0_and_1(self):
        np.testing.assert_array_equal(te.sinusoidal_table(1, 4), [[0, 1, 0, 1]])

    def test_no_zero_division_at_two_channels(self):
        np.testing.assert_allclose(
            te.sinusoidal_table(3, 2, shift=1), by_the_formula(range(3), 2), **close
        )

    def test_distinct_positions_stay_distinct(self):
        table = np.asarray(te.sinusoidal_table(2048, 2, dtype=jnp.float32))
        assert len(np.unique(table, axis=0)) == 2048

    def test_16_bit_result_is_the_float32_result_rounded(self):
        for dtype in (jnp.bfloat16, jnp.float16):
            ours = te.sinusoidal_table(3000, 6, dtype=dtype)
            np.testing.assert_array_equal(
                ours, np.asarray(te.sinusoidal_table(3000, 6)).astype(dtype)
            )

    def test_constants_do_not_depend_on_call_order(self):
        first = np.asarray(te.sinusoidal_table(4, 8, base=10_000.0))
        other = np.asarray(te.sinusoidal_table(4, 8, base=100.0))
        assert not np.allclose(first, other)
        np.testing.assert_array_equal(te.sinusoidal_table(4, 8, base=10_000.0), first)


@hypothesis.given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4),
    st.sampled_from([2, 5, 8]),
    st.sampled_from(LAYOUTS),
)
@hypothesis.settings(max_examples=40)
def test_encoding_of_any_position(positions, d_model, layout):
    got = np.asarray(te.sinusoidal_encoding(positions, d_model, layout=layout))
    order = np.arange(d_model)
    if layout != "interleaved":
        order = np.concatenate(
            [order[0::2], order[1::2]] if layout == "sin_cos" else [order[1::2], order[0::2]]
        )
        order = order if d_model % 2 == 0 or layout == "sin_cos" else np.array([1, 3, 5, 0, 2])
    for row, position in enumerate(positions):
        for column, channel in enumerate(order):
            exact = oracle.sine(position, oracle.frequency(channel // 2, d_model / 2), channel % 2)
            assert oracle.error(got[row, column], exact) <= oracle.MAX_ERROR


@pytest.mark.parametrize(
    ("position", "d_model", "options"),
    [
        (2**31 - 1, 64, {"layout": "sin_cos", "shift": 0.1, "frequency_scale": 1e6}),
        (2**31 - 1, 64, {"layout": "sin_cos", "shift": 0.1, "frequency_scale": 1e9}),
        (2**31 - 1, 17, {"layout": "sin_cos", "shift": -3.7, "base": 1.5, "odd": "round_up"}),
    ],
)
def test_a_fractional_shift_keeps_the_bound(position, d_model, options):
    check_against_arbitrary_precision([position], d_model, **options)


# Constants are compiled into a program: one for four positions.
POSITIONS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4)
CONSTANTS = st.fixed_dictionaries(
    {"layout": st.sampled_from(LAYOUTS), "odd": st.sampled_from(["truncate", "round_up", "zero"])},
    optional={
        "base": st.one_of(
            st.floats(1e-9, 1, exclude_min=True), st.floats(1, 100), st.floats(100, 1e30)
        ),
        "frequency_scale": st.one_of(st.floats(1e-30, 1), st.floats(1, 1e9), st.floats(1e9, 1e12)),
        "shift": st.one_of(st.floats(-4, 0.999), st.floats(-1e12, 0), st.integers(-(2**40), 0)),
    },
)


@hypothesis.given(POSITIONS, st.sampled_from([2, 5, 9]), CONSTANTS)
@hypothesis.settings(max_examples=15)
def test_the_bound_holds_for_any_constants(positions, d_model, options):
    """Fractional, negative, tiny and huge ones."""
    check_against_arbitrary_precision(positions, d_model, **options)


@pytest.mark.slow
@hypothesis.given(POSITIONS, st.sampled_from([1, 2, 5, 9, 34]), CONSTANTS)
@hypothesis.settings(max_examples=75)
def test_the_bound_holds_for_any_constants_thoroughly(positions, d_model, options):
    check_against_arbitrary_precision(positions, d_model, **options)


def check_against_arbitrary_precision(positions, d_model, **options):
    """Every channel of every position; or, where a frequency passes 2**32 turns per position, the
    error that says so."""
    try:
        got = np.asarray(te.sinusoidal_encoding(np.array(positions), d_model, **options))
    except ValueError as error:
        want = "base and frequency_scale: wanted frequencies below 2**32 turns per position"
        assert str(error).startswith(want)  # noqa: PT017
        assert max(oracle.sinusoidal_frequencies(d_model, **options)) >= 2**33 * mpmath.pi
        return
    for row, position in zip(got, positions, strict=True):
        for channel, exact in zip(row, oracle.encoding(position, d_model, **options), strict=True):
            assert oracle.error(channel, exact) <= oracle.MAX_ERROR


class TestContract:
    def test_jit_and_vmap_and_eval_shape(self):
        positions = np.arange(-6, 6).reshape(3, 4)
        encode = lambda p: te.sinusoidal_encoding(p, 10)
        eager = encode(positions)
        # XLA may contract a product and a sum when it fuses: one rounding of a value up to 1.
        np.testing.assert_allclose(jax.jit(encode)(positions), eager, rtol=0, atol=2**-23)
        np.testing.assert_allclose(jax.vmap(encode)(positions), eager, rtol=0, atol=2**-23)
        assert jax.eval_shape(encode, positions) == jax.ShapeDtypeStruct((3, 4, 10), jnp.float32)

    def test_a_traced_offset_does_not_recompile(self):
        traces = []

        @jax.jit
        def encode(offset):
            traces.append(offset)
            return te.sinusoidal_encoding(offset + jnp.arange(4), 8)

        for offset in (0, 5, np.int32(7), jnp.int32(2**30)):
            # An int is traced as a weak int32: it promotes as int32 does.
            np.testing.assert_array_equal(
                encode(jnp.int32(offset)),
                jax.jit(te.sinusoidal_encoding, static_argnums=1)(np.arange(4) + offset, 8),
            )
        assert len(traces) == 1

    def test_lowered_text_has_constants_of_the_width_only(self):
        text = [
            jax.jit(lambda n=n: te.sinusoidal_table(n, 256)).lower().as_text()
            for n in (512, 131_072)
        ]
        assert abs(len(text[0]) / len(text[1]) - 1) < 0.05
        assert len(text[1]) < 200_000

    def test_edges(self):
        assert te.sinusoidal_table(0, 4).shape == (0, 4)
        assert te.sinusoidal_encoding(3, 1).shape == (1,)
        assert te.sinusoidal_encoding([], 4).shape == (0, 4)
        assert te.sinusoidal_table(3, 1, odd="zero").tolist() == [[0.0]] * 3

    @pytest.mark.parametrize("platform", ["tpu", "cuda"])
    def test_lowers_for_other_platforms(self, platform):
        encode = jax.jit(lambda p: te.sinusoidal_encoding(p, 64))
        assert (
            "stablehlo"
            in encode.trace(np.arange(8)).lower(lowering_platforms=(platform,)).as_text()
        )


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            TypeError,
            "d_model: wanted a Python int, got float 2.5",
            lambda: te.sinusoidal_table(3, 2.5),
        ),
        (
            ValueError,
            "d_model: wanted an int of at least 1, got 0",
            lambda: te.sinusoidal_table(3, 0),
        ),
        (
            TypeError,
            "length: wanted a Python int, got bool True",
            lambda: te.sinusoidal_table(True, 4),
        ),
        (
            ValueError,
            "length: wanted an int of at least 0, got -1",
            lambda: te.sinusoidal_table(-1, 4),
        ),
        (
            ValueError,
            "layout: wanted one of 'interleaved', 'sin_cos', 'cos_sin', got 'paper'",
            lambda: te.sinusoidal_table(3, 4, layout="paper"),
        ),
        (
            ValueError,
            "odd: wanted one of 'truncate', 'round_up', 'zero', got None",
            lambda: te.sinusoidal_table(3, 4, odd=None),
        ),
        (
            ValueError,
            "base: wanted a finite number above 0, got 0",
            lambda: te.sinusoidal_table(3, 4, base=0),
        ),
        (
            TypeError,
            "base: wanted a Python number, got str '10000'",
            lambda: te.sinusoidal_table(3, 4, base="10000"),
        ),
        (
            ValueError,
            "frequency_scale: wanted a finite number above 0, got inf",
            lambda: te.sinusoidal_table(3, 4, frequency_scale=np.inf),
        ),
        (
            ValueError,
            "shift: wanted a number below d_model // 2 = 2, got 2",
            lambda: te.sinusoidal_table(3, 4, shift=2),
        ),
        (
            TypeError,
            "dtype: wanted a floating dtype of 16 to 64 bits, got int32",
            lambda: te.sinusoidal_table(3, 4, dtype=jnp.int32),
        ),
        (
            TypeError,
            "positions: wanted an integer dtype, or float32",
            lambda: te.sinusoidal_encoding(jnp.ones(3, jnp.bfloat16), 4),
        ),
        (
            TypeError,
            "positions: wanted an integer dtype, or float32",
            lambda: te.sinusoidal_encoding(jnp.ones(3, jnp.float16), 4),
        ),
        (
            TypeError,
            "positions: wanted an integer dtype",
            lambda: te.sinusoidal_encoding([True], 4),
        ),
        (
            TypeError,
            "positions: wanted an array of real numbers",
            lambda: te.sinusoidal_encoding([1j], 4),
        ),
        (
            ValueError,
            "positions: wanted integers inside int32, -2147483648..2147483647, "
            "got 2147483648 at index [1]",
            lambda: te.sinusoidal_encoding(np.array([5, 2**31]), 4),
        ),
        (
            ValueError,
            "positions: wanted integers inside int32, -2147483648..2147483647, got 4294967301",
            lambda: te.sinusoidal_encoding(np.uint64(2**32 + 5), 4),
        ),
        (
            ValueError,
            "positions: wanted an array, or nested lists of equal lengths",
            lambda: te.sinusoidal_encoding([[1], [2, 3]], 4),
        ),
    ],
)
def test_errors(kind, message, call):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(message)


class TestGrid:
    def by_hand(self, shape, d_model, axes, frequencies):
        """Sines then cosines of each coordinate, in float64."""
        coordinates = np.meshgrid(*(np.arange(float(n)) for n in shape), indexing="ij")
        parts = [
            np.concatenate(
                [f(coordinates[axis][..., None] * frequencies) for f in (np.sin, np.cos)], -1
            )
            for axis in axes
        ]
        return np.concatenate(parts, -1)

    def test_mae(self):
        """get_2d_sincos_pos_embed: width first, omega = 1 / 10000 ** (arange(d / 4) / (d / 4))."""
        expected = self.by_hand((3, 5), 24, (1, 0), 1 / 10000 ** (np.arange(6) / 6))
        np.testing.assert_allclose(
            te.sinusoidal_grid((3, 5), 24, axes=(1, 0), layout="sin_cos"), expected, **close
        )

    def test_big_vision(self):
        """posemb_sincos_2d: width first, omega = 1 / 10000 ** (arange(d / 4) / (d / 4 - 1))."""
        expected = self.by_hand((4, 3), 24, (1, 0), 1 / 10000 ** (np.arange(6) / 5))
        np.testing.assert_allclose(
            te.sinusoidal_grid((4, 3), 24, axes=(1, 0), layout="sin_cos", shift=1),
            expected,
            **close,
        )

    def test_tensor2tensor(self):
        """add_timing_signal_nd: first axis first, d / (2 * axes) timescales each, log increments
        over one less."""
        expected = self.by_hand((2, 3, 4), 30, (0, 1, 2), np.exp(np.arange(5) * -np.log(1e4) / 4))
        np.testing.assert_allclose(
            te.sinusoidal_grid((2, 3, 4), 30, layout="sin_cos", shift=1), expected, **close
        )

    def test_positional_encodings(self):
        """PositionalEncoding2D: the first axis first, sines and cosines interleaved, an even share
        of the channels each."""
        angles = [np.arange(float(n))[:, None] / 10000 ** (np.arange(0, 6, 2) / 6) for n in (3, 5)]
        first, second = (
            np.stack([np.sin(each), np.cos(each)], -1).reshape(-1, 6) for each in angles
        )
        expected = np.concatenate(
            [np.repeat(first[:, None], 5, 1), np.repeat(second[None], 3, 0)], -1
        )
        np.testing.assert_allclose(te.sinusoidal_grid((3, 5), 12), expected, **close)

    @pytest.mark.parametrize("d_model", [12, 14, 15, 17])
    def test_positional_encodings_where_the_axes_do_not_divide_the_channels(self, d_model):
        """Each axis has 2 * ceil(d / 4) channels; both are concatenated and cut to d."""
        even = 2 * math.ceil(d_model / 4)
        angles = [
            np.arange(float(n))[:, None] / 10000 ** (np.arange(0, even, 2) / even) for n in (3, 5)
        ]
        first, second = (
            np.stack([np.sin(each), np.cos(each)], -1).reshape(-1, even) for each in angles
        )
        expected = np.concatenate(
            [np.repeat(first[:, None], 5, 1), np.repeat(second[None], 3, 0)], -1
        )[..., :d_model]
        np.testing.assert_allclose(
            te.sinusoidal_grid((3, 5), d_model, odd="round_up"), expected, **close
        )

    @pytest.mark.parametrize("d_model", [3, 12, 14, 15])
    def test_tensor2tensor_where_the_axes_do_not_divide_the_channels(self, d_model):
        count = d_model // 4
        expected = self.by_hand(
            (2, 3), d_model, (0, 1), np.exp(np.arange(count) * -np.log(1e4) / max(count - 1, 1))
        )
        expected = np.pad(expected, [(0, 0), (0, 0), (0, d_model - 4 * count)])
        np.testing.assert_allclose(
            te.sinusoidal_grid((2, 3), d_model, layout="sin_cos", shift=1, odd="zero"),
            expected,
            **close,
        )

    def test_diffusers(self):
        """get_2d_sincos_pos_embed: width first, indices times base_size / grid /
        interpolation_scale."""
        (height, width), base_size, scale = (3, 5), 16, 2.0
        rows, columns = (
            np.arange(n, dtype=np.float32) / np.float32(n / base_size) / np.float32(scale)
            for n in (height, width)
        )
        angles = [
            each.astype(float)[:, None] / 10000 ** (np.arange(6) / 6) for each in (rows, columns)
        ]
        of_rows, of_columns = (np.concatenate([np.sin(each), np.cos(each)], -1) for each in angles)
        expected = np.concatenate(
            [np.repeat(of_columns[None], height, 0), np.repeat(of_rows[:, None], width, 1)], -1
        )
        options = {"axes": (1, 0), "layout": "sin_cos", "axis_positions": (rows, columns)}
        ours = np.asarray(te.sinusoidal_grid((height, width), 24, **options))
        np.testing.assert_allclose(ours, expected, **close)
        points = np.array([[0, 7], [14, 15]])
        some = np.asarray(te.sinusoidal_grid((height, width), 24, positions=points, **options))
        np.testing.assert_array_equal(some[0], ours.reshape(-1, 24)[np.array([0, 7])])
        np.testing.assert_array_equal(some[1], [ours[-1, -1], np.full(24, np.nan)])

    def test_axis_positions_are_one_for_each_point(self):
        with pytest.raises(
            ValueError,
            match=r"^axis_positions: wanted arrays as long as the axes, \[\[2\], \[3\]\], "
            r"got \[\[2\], \[2\]\]$",
        ):
            te.sinusoidal_grid((2, 3), 4, axis_positions=([0, 1], [0, 1]))
        with pytest.raises(
            ValueError,
            match=r"^axis_positions: wanted arrays as long as the axes, .*, got \[\[2\]\]$",
        ):
            te.sinusoidal_grid((2, 3), 4, axis_positions=([0, 1],))

    def test_one_axis_is_a_table(self):
        np.testing.assert_array_equal(te.sinusoidal_grid((7,), 6), te.sinusoidal_table(7, 6))

    @pytest.mark.parametrize(
        ("message", "call"),
        [
            (
                "axes: wanted a permutation of the axes of shape (2, 2), at least one, got (0, 0)",
                lambda: te.sinusoidal_grid((2, 2), 4, axes=(0, 0)),
            ),
            (
                "axes: wanted a permutation of the axes of shape (), at least one, got None",
                lambda: te.sinusoidal_grid((), 4),
            ),
            (
                "d_model: wanted a multiple of the 2 axes (or odd='round_up' or 'zero'), got 5",
                lambda: te.sinusoidal_grid((2, 2), 5),
            ),
            (
                "shape[1]: wanted an int of at least 1, got 0",
                lambda: te.sinusoidal_grid((2, 0), 4),
            ),
        ],
    )
    def test_errors(self, message, call):
        with pytest.raises(ValueError, match=r"^(axes|d_model|shape)") as caught:
            call()
        assert str(caught.value) == message


class TestValuesThatFloat32LacksAreLoud:
    def test_host_floats_that_float32_cannot_hold_raise_an_error(self):
        with pytest.raises(
            ValueError, match=r"^positions: wanted floats that float32 holds .*, got 123456789.0$"
        ):
            te.sinusoidal_encoding([0.1, 123456789.0], 4)
        np.testing.assert_array_equal(
            te.sinusoidal_encoding([2.0**30] * 3, 4), te.sinusoidal_encoding([2**30] * 3, 4)
        )
        assert np.isnan(te.sinusoidal_encoding([2.0**40, np.inf, np.nan], 4)).all()

    def test_traced_float64(self):
        with x64():
            got = jax.jit(lambda p: te.sinusoidal_encoding(p, 4))(
                jnp.array([123456789.0, 2.0**30, 0.1])
            )
        assert np.isnan(got).any(-1).tolist() == [True, False, False]

    @pytest.mark.parametrize(
        "options", [{"frequency_scale": 2.7e10}, {"frequency_scale": 1e30}, {"base": 1e-20}]
    )
    def test_frequencies_of_2_to_the_32_turns_raise_an_error(self, options):
        with pytest.raises(
            ValueError,
            match=r"^base and frequency_scale: wanted frequencies below 2\*\*32 turns per position, got ",
        ):
            te.sinusoidal_encoding([1], 64, **options)

    @pytest.mark.parametrize(
        ("message", "call"),
        [
            (
                "base: wanted a Python number, got a traced",
                lambda: jax.jit(lambda b: te.sinusoidal_table(3, 4, base=b))(4.0),
            ),
            ("d_model: wanted a Python int, got list [4]", lambda: te.sinusoidal_table(3, [4])),
            (
                "base: wanted a Python number, got an array float32[]",
                lambda: te.sinusoidal_table(3, 4, base=jnp.float32(1e4)),
            ),
            (
                "shape: wanted a sequence, got int 4",
                lambda: te.sinusoidal_grid(4, 6),
            ),
            (
                "dtype: wanted a floating dtype of 16 to 64 bits, got str 'floaty'",
                lambda: te.sinusoidal_table(3, 4, dtype="floaty"),
            ),
            (
                "dtype: wanted a floating dtype of 16 to 64 bits, got an array float32[2]",
                lambda: te.sinusoidal_table(3, 4, dtype=np.zeros(2, np.float32)),
            ),
            (
                "dtype: wanted a floating dtype of 16 to 64 bits, got NoneType None",
                lambda: te.sinusoidal_table(3, 4, dtype=None),
            ),
        ],
    )
    def test_arguments_that_are_not_static(self, message, call):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).startswith(message)

    def test_a_layout_that_is_a_list(self):
        with pytest.raises(ValueError, match=r"^layout: wanted one of .*, got \['sin_cos'\]$"):
            te.sinusoidal_table(3, 4, layout=["sin_cos"])
