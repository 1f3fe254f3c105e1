import dataclasses
import functools
import json
import pathlib
import re

import hypothesis
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest
from compare import equal, near
from hypothesis import strategies as st
from meshes import AUTO, EXPLICIT, mesh_of, put
from references import ROUNDINGS, assert_right, check, check_frequencies

from transformer_embed._src.positions import rotary, rotary_scaling
from transformer_embed._src.positions.rotary import apply_rotary, permute_rotary_weights
from transformer_embed._src.positions.rotary_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    YarnScaling,
)

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "rotary_frequencies.json").read_text(
        encoding="utf-8"
    )
)
# XLA may contract a product and a sum when it fuses: half a unit in the last place of either term.
FUSION = 2**-23
# Two rotations one after the other, of pairs whose channels add up to at most 8.
TWICE = 2 * 8 * (oracle.MAX_ERROR + ROUNDINGS)
# What a float32 program makes of a frequency: its exponent is off by 2**-24 of up to ln(1e6) = 14,
# and the power and some products round.
FLOAT32_POWER = 2**-19

YARN = YarnScaling(4.0, original_length=64)
LONG = LongRopeScaling(np.linspace(1, 2, 4), np.linspace(1.1, 30, 4), 32.0, 4096, 10_000)
SCALINGS = [
    LinearScaling(4.0),
    NTKScaling(8.0),
    DynamicNTKScaling(2.0, original_length=2048, length=5000),
    DynamicNTKScaling(4.0, original_length=2048, length=0),
    YARN,
    YarnScaling(40.0, 4096, 24.0, 1.5, truncate=False, mscale=0.7, mscale_all_dim=0.3),
    YarnScaling(4.0, original_length=200_000),
    YarnScaling(4.0, original_length=4096, beta_slow=1e-5, attention_factor=2),
    Llama3Scaling(8.0),
    Llama3Scaling(32.0, low_freq_factor=1.5, high_freq_factor=5.0, original_length=2000),
    # Llama 4 Scout.
    Llama3Scaling(16.0, low_freq_factor=1.0, high_freq_factor=1.0),
    LONG,
    dataclasses.replace(LONG, length=4096, attention_factor=1.5),
]


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# Near, far and negative.
FAR = np.array([0, 1, -4095, 2**20 + 1, 2**31 - 1, -(2**31)])
GRID = np.random.default_rng(1).integers(0, 500, [6, 3])


# Shapes, positions and options.
CASES = [
    *[
        ((6, 2, 8), FAR, options)
        for options in (
            {},
            {"base": 1e6, "layout": "interleaved"},
            {"base": 2.0, "rotary_dim": 4},
            {"layout": "interleaved", "rotary_dim": 6},
            {"rotary_dim": 4, "partial": "proportional"},
            {"rotary_dim": 4, "partial": "proportional", "layout": "interleaved"},
            {"rotary_dim": 8, "scaling": NTKScaling(4.0), "partial": "proportional"},
            {"rotary_dim": 4, "scaling": NTKScaling(4.0)},
            {"scaling": YARN},
            {"scaling": dataclasses.replace(LONG, attention_factor=1.5), "base": 500.0},
        )
    ],
    ((6, 2, 7), FAR, {"rotary_dim": 4}),
    ((2, 6, 3, 4), np.random.default_rng(1).integers(-50, 5000, [2, 6]), {}),
    ((2, 6, 3, 4), FAR[None], {}),
    ((2, 1, 2), np.array([2**31, 2**32 - 1], np.uint32), {}),
    ((3, 1, 4), np.array([0.5, -1234.75, 2.0**23 + 0.5], np.float32), {}),
    ((0, 3, 2, 2), [0, 1, 2], {}),
    ((1, 0, 2), [7.0], {}),
    ((2, 1, 0), [0, 1], {"layout": "interleaved"}),
    ((2, 3, 0, 4), [0, 1, 2], {"rotary_dim": 2}),
    # Qwen2-VL: sections (2, 3, 3), one after the other. Qwen3-VL: they take turns.
    ((2, 6, 1, 16), GRID, {"pair_axes": np.repeat([0, 1, 2], [2, 3, 3]), "base": 1e6}),
    ((2, 6, 1, 16), GRID, {"pair_axes": [0, 1, 2] * 2 + [0] * 2, "layout": "interleaved"}),
    ((2, 6, 1, 16), GRID[:, :2], {"pair_axes": [1] * 8, "scaling": YARN}),
    ((2, 6, 1, 16), GRID[:, :2].astype(np.float32) / 2, {"pair_axes": (0,) * 4 + (1,) * 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "positions", "options"), CASES)
def test_rotations_in_arbitrary_precision(shape, positions, options):
    check(apply_rotary, normal(*shape), positions, **options)


def test_16_bit_results_are_rounded_once():
    for dtype in (jnp.bfloat16, jnp.float16):
        check(apply_rotary, normal(64, 1, 8, dtype=dtype), np.arange(64))


@pytest.mark.slow
def test_64_bit_mode():
    x, positions = normal(4, 2, 8), np.array([0, 3, -5, 2**31])
    with jax.enable_x64():
        wide = np.asarray(apply_rotary(*map(jax.device_put, (x.astype(float), positions))))
    assert wide.dtype == jnp.float64
    assert_right(apply_rotary, wide[:3].astype(np.float32), x[:3], positions[:3])
    assert np.isnan(wide[3]).all()


positive = st.one_of(st.floats(1e-9, 1e-2), st.floats(0.01, 100), st.floats(100, 1e12))
lengths = st.one_of(st.integers(2, 100), st.integers(2, 2**40))
current_lengths = st.one_of(st.just(0), lengths)
half_of_8 = st.lists(positive, min_size=4, max_size=4)
maybe = st.one_of(st.none(), positive)
not_negative = st.one_of(st.just(0.0), positive)
two_in_order = st.tuples(positive, positive).map(sorted).filter(lambda pair: pair[0] < pair[1])
ANY_SCALING = st.one_of(
    st.builds(LinearScaling, positive),
    st.builds(NTKScaling, positive),
    st.builds(DynamicNTKScaling, positive, lengths, current_lengths),
    st.builds(
        lambda betas, *rest: YarnScaling(*rest[:2], betas[1], betas[0], *rest[2:]),
        two_in_order,
        *(positive, lengths, st.booleans(), not_negative, not_negative, maybe),
    ),
    st.builds(
        lambda factor, freqs, length: Llama3Scaling(factor, *freqs, length),
        *(positive, two_in_order, lengths),
    ),
    st.builds(LongRopeScaling, half_of_8, half_of_8, positive, lengths, current_lengths, maybe),
)


class TestFrequencies:
    @pytest.mark.slow
    @hypothesis.given(ANY_SCALING, st.one_of(st.floats(1.001, 100), st.floats(100, 1e15)))
    @hypothesis.settings(max_examples=100)
    def test_those_of_any_scaling_are_rounded_once(self, scaling, base):
        """Fractional, tiny and huge constants: each is a float64, and nothing after it is."""
        if max(oracle.scaled_frequencies(scaling, 8, base)[0]) < 2**33 * mpmath.pi:
            check_frequencies(scaling, 8, base)
        else:
            with pytest.raises(ValueError, match=r"wanted frequencies below 2\*\*32 turns per"):
                check_frequencies(scaling, 8, base)

    @pytest.mark.parametrize("dim", [2, 8, 64])
    def test_those_of_usual_scalings_are_rounded_once(self, dim):
        for scaling in SCALINGS[: None if dim == 8 else -2]:
            check_frequencies(scaling, dim, 10_000.0)

    @pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["scaling"]))
    def test_published(self, case):
        scaling = case["scaling"] and getattr(rotary_scaling, case["scaling"])(**case["arguments"])
        pairs = case.get("rotary_dim", case["head_dim"]) // 2
        words, attention = rotary._frequencies(
            rotary._Options(case["head_dim"], pairs, case["base"], scaling, ())
        )
        turns, high, low = (word.astype(np.float64) for word in words)
        near(
            2 * np.pi * (turns + high * 2.0**-32 + low * 2.0**-64),
            case["frequencies"],
            rtol=FLOAT32_POWER,
            atol=2.0**-64,
        )
        assert attention == pytest.approx(case["attention_factor"], rel=FLOAT32_POWER)


class TestPermutation:
    @pytest.mark.parametrize(
        ("shape", "num_heads", "rotary_dim"),
        [
            ((24,), 3, None),
            ((5, 24), 3, 6),
            ((2, 3, 8), 1, 4),
            ((0, 4), 2, None),
            ((4, 0), 2, None),
        ],
    )
    def test_each_channel_of_a_pair_moves(self, shape, num_heads, rotary_dim):
        weights = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        for source in rotary.LAYOUTS:
            for target in rotary.LAYOUTS:
                layouts = {"source": source, "target": target}
                check(permute_rotary_weights, weights, num_heads, **layouts, rotary_dim=rotary_dim)

    def test_as_the_conversion_of_llama(self):
        """The transformers library's `permute` for a torch weight [out, in]: view(heads, d/2, 2,
        in), axes 1 and 2 swapped."""
        weights = normal(2 * 6, 4)
        expected = weights.reshape(2, 3, 2, 4).swapaxes(1, 2).reshape(12, 4)
        ours = permute_rotary_weights(weights.T, 2, source="interleaved", target="half")
        equal(np.transpose(np.asarray(ours)), expected)


class TestContract:
    @pytest.mark.slow
    def test_vmap(self):
        x, positions = normal(3, 6, 2, 8), np.arange(18).reshape(3, 6)
        rotate = lambda x, p: apply_rotary(x, p, layout="interleaved", rotary_dim=4, scaling=YARN)
        mapped, of_one_row = jax.jit(
            lambda x, p: (jax.vmap(rotate)(x, p), jax.vmap(rotate, in_axes=(0, None))(x, p[1]))
        )(x, positions)
        expected = rotate(x, positions)
        near(mapped, expected, atol=4 * FUSION)
        near(of_one_row[1], expected[1], atol=4 * FUSION)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options", [{}, {"layout": "interleaved", "rotary_dim": 4, "scaling": YARN}]
    )
    def test_the_gradient_is_rotated_by_the_negative_position(self, options):
        x, back = normal(5, 2, 8), normal(5, 2, 8, seed=1)
        positions = np.array([0, 3, -9, 10**6, 2**31 - 1])
        rotate = lambda x: apply_rotary(x, positions, **options)
        (pulled,) = jax.jit(lambda x, back: jax.vjp(rotate, x)[1](back))(x, back)
        expected = apply_rotary(back, -positions, **options)
        near(pulled, expected, atol=TWICE)

    @pytest.mark.slow
    def test_a_traced_offset_does_not_recompile(self):
        traces, x = [], normal(4, 2, 8)

        @jax.jit
        def rotate(x, offset):
            traces.append(offset)
            return apply_rotary(x, offset + jnp.arange(4))

        for offset in (0, 5, 2**30):
            assert_right(apply_rotary, rotate(x, np.int32(offset)), x, offset + np.arange(4))
        assert len(traces) == 1

    def test_without_jit_it_compiles_once(self):
        x = normal(4, 2, 8)
        apply_rotary(x, np.arange(4))
        before = rotary._rotated._cache_size()
        for base in (10_000, 10_000.0, np.float64(10_000.0)):
            apply_rotary(x, np.arange(4) + 5, base=base)
        assert rotary._rotated._cache_size() == before

    @pytest.mark.slow
    def test_phases_are_computed_once_for_all_heads(self):
        """On a CPU, XLA computes what it fuses again for each head: only the loop's result is ready
        before the products."""
        arrays = np.zeros([2, 3, 4, 8], np.float32), np.zeros([2, 3], np.int32)
        assert " while(" in jax.jit(apply_rotary).lower(*arrays).compile().as_text()

    @pytest.mark.parametrize("platform", ["tpu", "cuda"])
    def test_other_platforms_have_no_cosine_and_no_loop(self, platform):
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
    @pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
    def test_rotation_on_a_mesh_equals_rotation_on_one_device(self, kind):
        mesh = mesh_of((2, 2, 2), ("rows", "length", "heads"), kind)
        x, positions = normal(2, 2, 2, 4), np.array([[0, 1], [70, 2**30]], np.int32)
        place = functools.partial(put, mesh)
        with jax.set_mesh(mesh):
            sharded_x = place(x, "rows", "length", "heads")
            rotate = jax.jit(
                lambda x, sharded, replicated: (
                    apply_rotary(x, sharded),
                    apply_rotary(x, replicated, layout="interleaved"),
                )
            )
            rotated = rotate(sharded_x, place(positions, "rows", "length"), place(positions))
        for layout, each in zip(rotary.LAYOUTS, rotated, strict=True):
            assert_right(apply_rotary, each, x, positions, layout=layout)
            assert each.sharding.is_equivalent_to(sharded_x.sharding, 4)


X = np.zeros([2, 3, 4, 8], np.float32)
P = np.arange(3)
LENGTH = "positions: wanted a last axis of x's tokens' length, 3, got shape "
BROADCAST = "positions: wanted a shape that broadcasts to that of x's tokens, [2, 3], got shape "
EVEN = "wanted an even number of channels, to make pairs, got "
AXES = {"pair_axes": (0, 0, 1, 1)}


ODD = X[..., :7]
ERRORS = [
    (TypeError, {"x": P}, "x: wanted a floating dtype of 16 to 64 bits, got int64"),
    (ValueError, {"x": X[0, 0]}, "x: wanted shape [..., length, heads, head_dim], got"),
    (ValueError, {"layout": "neox"}, "layout: wanted one of 'half', 'interleaved', got"),
    (ValueError, {"partial": 0.5}, "partial: wanted one of 'first', 'proportional', got"),
    (ValueError, {"x": ODD}, f"head_dim: {EVEN}7"),
    (ValueError, {"x": ODD, "rotary_dim": 4, "partial": "proportional"}, f"head_dim: {EVEN}7"),
    (ValueError, {"rotary_dim": 3}, f"rotary_dim: {EVEN}3"),
    (ValueError, {"rotary_dim": 0}, "rotary_dim: wanted an int of at least 2, got 0"),
    (ValueError, {"rotary_dim": 10}, "rotary_dim: wanted an int of at most 8, got 10"),
    (TypeError, {"rotary_dim": 0.5}, "rotary_dim: wanted a Python int, got float 0.5"),
    (ValueError, {"base": 0}, "base: wanted a finite number above 0, got 0"),
    (TypeError, {"base": True}, "base: wanted a Python number, got bool True"),
    (ValueError, {"base": 1, "scaling": YARN}, "base: wanted a finite number above 1, got 1.0"),
    (TypeError, {"scaling": 2.0}, "scaling: wanted LinearScaling(...), another scaling of this package, or None, got"),
    (ValueError, {"scaling": LONG, "rotary_dim": 4}, "long_factor: wanted half as many numbers as rotated channels, 2, got 4"),
    (TypeError, {"positions": jnp.ones(3, "bfloat16")}, "positions: wanted an integer dtype, or float32"),
    (ValueError, {"positions": np.arange(4)}, LENGTH + "[4]"),
    (ValueError, {"positions": np.zeros([2, 1], int)}, LENGTH + "[2, 1]"),
    (ValueError, {"positions": np.zeros([4, 2], int)} | AXES, LENGTH + "[4]"),
    (ValueError, {"positions": 7}, LENGTH + "[]; add jnp.arange(length) to a scalar offset; jax.vmap maps keyword arguments over axis 0: bind them with functools.partial"),
    (ValueError, {"positions": np.zeros([5, 2, 3], int)}, BROADCAST + "[5, 2, 3]"),
    (ValueError, {"positions": np.zeros([4, 3], int)}, BROADCAST + "[4, 3]"),
    (ValueError, {"positions": [0, 2**32 + 5, 1]}, "positions: wanted integers inside int32, -2147483648..2147483647, got 4294967301 at index [1]"),
    (ValueError, AXES, "positions: wanted shape [..., length, 2 or more], as pair_axes says, got shape [3]"),
    (ValueError, {"positions": np.zeros([3, 2], int), "pair_axes": (0, 0, 1, 2)}, "positions: wanted shape [..., length, 3 or more], as pair_axes says, got shape [3, 2]"),
    (ValueError, {"pair_axes": [0] * 5}, "pair_axes: wanted a number for each pair, 4, got 5"),
    (ValueError, {"pair_axes": (0, -2)}, "pair_axes[1]: wanted an int of at least 0, got -2"),
    (TypeError, {"pair_axes": 4}, "pair_axes: wanted a sequence, got int 4"),
    (TypeError, {"pair_axes": [2.0]}, "pair_axes[0]: wanted a Python int, got float 2.0"),
]  # fmt: skip


def test_bad_arguments_of_a_rotation():
    for kind, changes, message in ERRORS:
        with pytest.raises(kind, match="^" + re.escape(message)):
            apply_rotary(**{"x": X, "positions": P} | changes)


# The fields of the scalings, and a value outside of the range.
RANGES = {
    ("factor", "alpha", "beta_slow", "low_freq_factor", "attention_factor"): (
        "a finite number above 0",
        0,
    ),
    ("short_factor", "long_factor"): ("a finite number above 0", 0),
    ("beta_fast",): ("a finite number above 1", 1),
    ("high_freq_factor",): ("a number of at least low_freq_factor, 1", 0.5),
    ("mscale", "mscale_all_dim"): ("a finite number of at least 0", -1),
    ("original_length",): ("an int of at least 2", 1),
    ("length",): ("an int of at least 0", -1),
}


@pytest.mark.parametrize("scaling", [YARN, LONG, *SCALINGS[:3], Llama3Scaling(8.0)])
def test_each_field_of_a_scaling_has_a_range(scaling):
    fields = {field.name for field in dataclasses.fields(scaling)} - {"truncate"}
    for names, (wanted, bad) in RANGES.items():
        for name in fields.intersection(names):
            fields.remove(name)
            is_list = name in ("short_factor", "long_factor")
            message = re.escape(f"{name}[1]" if is_list else name) + f": wanted {wanted}, got {bad}"
            with pytest.raises(ValueError, match="^" + message):
                dataclasses.replace(scaling, **{name: [1, bad] if is_list else bad})
    assert not fields


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("factor: wanted a Python number, got str '2'", lambda: LinearScaling("2")),
        ("truncate: wanted a Python bool", lambda: YarnScaling(2.0, 8, truncate=1)),
        (
            "long_factor[0]: wanted a Python number, got str 'a'",
            lambda: LongRopeScaling([1], ["a"], 2.0, 8, 8),
        ),
        (
            "short_factor: wanted a sequence, got NoneType None",
            lambda: LongRopeScaling(None, [1], 2.0, 8, 8),
        ),
        (
            "length: wanted a Python int, got a traced int32[]",
            lambda: jax.jit(lambda n: DynamicNTKScaling(2.0, 8, n))(9),
        ),
    ],
)
def test_fields_of_other_types(message, call):
    with pytest.raises(TypeError, match="^" + re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("message", "weights", "num_heads", "options"),
    [
        ("num_heads: wanted an int of at least 1, got 0", X, 0, {}),
        ("source: wanted one of 'half', 'interleaved', got 'llama'", X, 1, {"source": "llama"}),
        ("target: wanted one of 'half', 'interleaved', got None", X, 1, {"target": None}),
        (f"head_dim: {EVEN}1", X, 8, {}),
        ("weights: wanted a last axis of 3 heads times head_dim, got shape [2, 3, 4, 8]", X, 3, {}),
        ("weights: wanted a last axis of 3 heads times head_dim, got shape []", 1.0, 3, {}),
        ("rotary_dim: wanted an int of at most 4, got 6", X, 2, {"rotary_dim": 6}),
    ],
)
def test_bad_arguments_of_a_permutation(message, weights, num_heads, options):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        permute_rotary_weights(
            weights, num_heads, **{"source": "half", "target": "interleaved", **options}
        )
