import functools
import json
import pathlib
import re
from dataclasses import replace

import jax
import numpy as np
import oracle
import pytest
from compare import equal, near
from drawn import normal
from meshes import AUTO, EXPLICIT, mesh_of, put
from references import ROUNDINGS, assert_right, check_frequencies
from refused import each_raises
from test_draws_positions import SCALINGS

import transformer_embed as te
from transformer_embed import (
    LongRopeScaling,
    YarnScaling,
    apply_rotary,
    permute_rotary_weights,
)
from transformer_embed._src.positions import rotary, rotary_scaling

FILE = pathlib.Path(__file__).parents[1] / "golden" / "rotary_frequencies.json"
GOLDEN = json.loads(FILE.read_bytes())
# Two rotations one after the other, of pairs whose channels add up to at most 8.
TWICE = 2 * 8 * (oracle.MAX_ERROR + ROUNDINGS)
# What a float32 program makes of a frequency: its exponent is off by 2**-24 of up to ln(1e6) = 14,
# and the power and some products round.
FLOAT32_POWER = 2**-19

YARN = YarnScaling(4.0, original_length=64)
LONG = LongRopeScaling(np.linspace(1, 2, 4), np.linspace(1.1, 30, 4), 32.0, 4096, 10_000)


@pytest.mark.parametrize("base", [10_000.0, 1.001, 1e15])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_of_a_scaling_are_rounded_once(scaling, base):
    check_frequencies(eval(scaling, {"te": te}), 6, base)


@pytest.mark.parametrize("case", GOLDEN)
def test_published_frequencies(case):
    scaling = case["scaling"] and getattr(rotary_scaling, case["scaling"])(**case["arguments"])
    pairs = case.get("rotary_dim", case["head_dim"]) // 2
    units, attention = rotary._frequencies(case["head_dim"], pairs, case["base"], scaling)
    radians = 2 * np.pi * np.array([unit * 2.0**-64 for unit in units])
    near(radians, case["frequencies"], rtol=FLOAT32_POWER, atol=2.0**-64)
    near(attention, case["attention_factor"], rtol=FLOAT32_POWER)


def test_a_permutation_is_the_conversion_of_llama():
    """The transformers library's `permute` for a torch weight [out, in]: view(heads, d/2, 2, in),
    axes 1 and 2 swapped."""
    weights = normal(0, 2 * 6, 4)
    expected = weights.reshape(2, 3, 2, 4).swapaxes(1, 2).reshape(12, 4)
    ours = permute_rotary_weights(weights.T, 2, source="interleaved", target="half")
    equal(ours, expected.T)


@pytest.mark.slow
def test_the_gradient_is_rotated_by_the_negative_position():
    x, back = normal(0, 5, 2, 8), normal(1, 5, 2, 8)
    positions = np.array([0, 3, -9, 10**6, 2**31 - 1])
    turn = functools.partial(apply_rotary, layout="interleaved", rotary_dim=4, scaling=YARN)
    (pulled,) = jax.jit(lambda x, back: jax.vjp(lambda x: turn(x, positions), x)[1](back))(x, back)
    near(pulled, turn(back, -positions), atol=TWICE)


def test_without_jit_it_compiles_once():
    """For other positions, a base of another type, and lengths that scale alike."""
    scaling = LongRopeScaling([1.0] * 4, [2.0] * 4, 4.0, 64, 64)
    plain = [{"base": base} for base in (10_000.0, 10_000, np.float64(10_000.0))]
    scaled = [{"scaling": replace(scaling, length=n)} for n in (65, 90, 1, 40, 64)]
    for alike in (plain, scaled[:2], scaled[2:]):
        rotate(**alike[0])
        before = rotary._rotate._cache_size()
        for number, options in enumerate(alike):
            rotate(positions=P + number, **options)
        assert rotary._rotate._cache_size() == before


@pytest.mark.slow
def test_phases_are_computed_once_for_all_heads():
    """On a CPU, XLA computes what it fuses again for each head: only the gather's result is ready
    before the products."""
    arrays = np.zeros([2, 3, 4, 8], np.float32), np.zeros([2, 3], np.int32)
    text = jax.jit(apply_rotary).lower(*arrays).compile().as_text()
    (last,) = re.findall(
        r"^ENTRY.*?ROOT %\S+ = \S+ fusion\((.*?)\)", text, re.DOTALL | re.MULTILINE
    )
    assert "gather" in last


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_have_no_cosine_and_no_loop(platform):
    traced = jax.jit(apply_rotary).trace(np.zeros([8, 2, 16], np.float32), np.arange(8))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.cosine" not in text
    # Older releases of jax leave the choice of the platform to the compiler.
    assert "stablehlo.while" not in text or "stablehlo.case" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("split", [("rows", "length"), ()])
def test_rotation_on_a_mesh_equals_rotation_on_one_device(kind, split):
    mesh = mesh_of((2, 2, 2), ("rows", "length", "heads"), kind)
    x, positions = normal(0, 2, 2, 2, 4), np.array([[0, 1], [70, 2**30]], np.int32)
    with jax.set_mesh(mesh):
        sharded_x = put(mesh, x, "rows", "length", "heads")
        rotated = jax.jit(apply_rotary)(sharded_x, put(mesh, positions, *split))
    assert_right(apply_rotary, rotated, x, positions)
    assert rotated.sharding.is_equivalent_to(sharded_x.sharding, 4)


X = np.zeros([2, 3, 4, 8], np.float32)
P = np.arange(3)
AXES = {"pair_axes": (0, 0, 1, 1)}
ODD = X[..., :7]
permute = functools.partial(permute_rotary_weights, source="half", target="half")


def rotate(**changes):
    return apply_rotary(**{"x": X, "positions": P} | changes)


REFUSED = {
    "rotate(x=P)": "TypeError: x: ... got int64",
    "rotate(x=X[0, 0])": "ValueError: x: ... got shape [4, 8]",
    "rotate(layout='neox')": "ValueError: layout: ... got 'neox'",
    "rotate(partial=0.5)": "ValueError: partial: ... got 0.5",
    "rotate(x=ODD)": "ValueError: head_dim: ... got 7",
    "rotate(x=ODD, rotary_dim=4, partial='proportional')": "ValueError: head_dim: ... got 7",
    "rotate(rotary_dim=3)": "ValueError: rotary_dim: ... got 3",
    "rotate(rotary_dim=0)": "ValueError: rotary_dim: ... 2, got 0",
    "rotate(rotary_dim=10)": "ValueError: rotary_dim: ... 8, got 10",
    "rotate(base=0)": "ValueError: base: ... got 0",
    "rotate(base=1e-30)": "ValueError: base and scaling: ... turns per position, got 3.16e+22 radians",
    "rotate(base=1, scaling=YARN)": "ValueError: base: ... 1, got 1.0",
    "rotate(scaling=2.0)": "TypeError: scaling: ... got float 2.0",
    "rotate(scaling=LONG, rotary_dim=4)": "ValueError: long_factor: ... 2, got 4",
    "rotate(positions=np.zeros([2, 1], int))": "ValueError: positions: ... its last axis, got shape [2, 1]",
    "rotate(positions=np.zeros([4, 2], int), **AXES)": "ValueError: positions: ... its last axis, got shape [4]",
    "rotate(positions=7)": "ValueError: positions: ... its last axis, got shape []",
    "rotate(positions=np.zeros([5, 2, 3], int))": "ValueError: positions: ... its last axis, got shape [5, 2, 3]",
    "rotate(**AXES)": "ValueError: positions: ... 2 ... got shape [3]",
    "rotate(positions=np.zeros([3, 2], int), pair_axes=(0, 0, 1, 2))": "ValueError: positions: ... 3 ... got shape [3, 2]",
    "rotate(pair_axes=[0] * 5)": "ValueError: pair_axes: ... 4, got 5",
    "rotate(pair_axes=(0, -2))": "ValueError: pair_axes[1]: ... 0, got -2",
    "replace(YARN, factor=0)": "ValueError: factor: ... got 0",
    "replace(YARN, original_length=1)": "ValueError: original_length: ... got 1",
    "replace(YARN, beta_fast=0.5)": "ValueError: beta_fast: ... of at least beta_slow, 1, got 0.5",
    "replace(YARN, beta_slow=0)": "ValueError: beta_slow: ... got 0",
    "replace(YARN, mscale=-1)": "ValueError: mscale: ... got -1",
    "replace(YARN, mscale_all_dim=-1)": "ValueError: mscale_all_dim: ... got -1",
    "replace(YARN, attention_factor=0)": "ValueError: attention_factor: ... got 0",
    "replace(LONG, factor=0)": "ValueError: factor: ... got 0",
    "replace(LONG, original_length=1)": "ValueError: original_length: ... got 1",
    "replace(LONG, length=-1)": "ValueError: length: ... got -1",
    "replace(LONG, attention_factor=0)": "ValueError: attention_factor: ... got 0",
    "replace(te.LinearScaling(4.0), factor=0)": "ValueError: factor: ... got 0",
    "replace(te.NTKScaling(8.0), alpha=0)": "ValueError: alpha: ... got 0",
    "replace(te.Llama3Scaling(8.0), factor=0)": "ValueError: factor: ... got 0",
    "replace(te.Llama3Scaling(8.0), low_freq_factor=0)": "ValueError: low_freq_factor: ... got 0",
    "replace(te.Llama3Scaling(8.0), high_freq_factor=0.5)": "ValueError: high_freq_factor: ... got 0.5",
    "replace(te.Llama3Scaling(8.0), original_length=1)": "ValueError: original_length: ... got 1",
    "replace(LONG, short_factor=[1, 0])": "ValueError: short_factor[1]: ... got 0",
    "replace(LONG, long_factor=[1, 0])": "ValueError: long_factor[1]: ... got 0",
    "te.LinearScaling('2')": "TypeError: factor: ... got str '2'",
    "YarnScaling(2.0, 8, truncate=1)": "TypeError: truncate: ... got int 1",
    "LongRopeScaling([1], ['a'], 2.0, 8, 8)": "TypeError: long_factor[0]: ... got str 'a'",
    "LongRopeScaling(None, [1], 2.0, 8, 8)": "TypeError: short_factor: ... got None",
    "jax.jit(lambda n: LongRopeScaling([1], [1], 2.0, 8, n))(9)": "TypeError: length: ... got a traced int32[]",
    "permute(X, 0)": "ValueError: num_heads: ... 1, got 0",
    "permute(X, 1, source='llama')": "ValueError: source: ... got 'llama'",
    "permute(X, 1, target=None)": "ValueError: target: ... got None",
    "permute(X, 8)": "ValueError: head_dim: ... got 1",
    "permute(X, 3)": "ValueError: weights: ... got shape [2, 3, 4, 8]",
    "permute(X, 2, rotary_dim=6)": "ValueError: rotary_dim: ... 4, got 6",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
