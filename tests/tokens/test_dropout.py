import functools
import importlib

import haiku as hk
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal
from drawn import normal
from hypothesis import strategies as st
from meshes import AUTO, EXPLICIT, mesh_of, put
from refused import each_raises

import transformer_embed as te

module = importlib.import_module("transformer_embed._src.tokens.dropout")

SHAPES = [(), (7,), (0, 3), (2, 3, 4), (1, 129)]
RATES = [1e-9, 0.1, 1 / 3, 0.9, 1 - 2**-25]
KEYS = {
    "typed": jax.random.key,
    "raw": jax.random.PRNGKey,
    "rbg": lambda seed: jax.random.key(seed, impl="rbg"),
}


def same_bits(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def both(rate):
    """Ours and Haiku's, both compiled: eager, Haiku's product and quotient are two roundings that
    XLA may fuse."""
    return lambda key, x: (te.dropout(key, rate, x), hk.dropout(key, rate, x))


@pytest.mark.slow
@hypothesis.given(
    shape=st.sampled_from(SHAPES),
    rate=st.sampled_from(RATES),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    kind=st.sampled_from(sorted(KEYS)),
    seed=st.integers(0, 2**31 - 1),
    wide=st.booleans(),
    partitionable=st.booleans(),
)
@hypothesis.settings(max_examples=12)
def test_dropout_equals_hk_dropout_bit_for_bit(shape, rate, dtype, kind, seed, wide, partitionable):
    with jax.enable_x64(wide), jax.threefry_partitionable(partitionable):
        same_bits(*jax.jit(both(rate))(KEYS[kind](seed), normal(9, *shape).astype(dtype)))


@pytest.mark.parametrize("rate", [1 / 3, 1e-9])
def test_many_elements_and_their_gradient_under_vmap_equal_those_of_hk_dropout(rate):
    keys, x = jax.random.split(jax.random.key(2), 3), normal(9, 3, 4, 32, 128)

    def gradients(drop):
        loss = lambda x, key: (drop(key, rate, x) ** 2).sum()
        return jax.jit(jax.vmap(jax.value_and_grad(loss)))(x, keys)

    for ours, theirs in zip(gradients(te.dropout), gradients(hk.dropout), strict=True):
        same_bits(ours, theirs)


@pytest.mark.slow
def test_the_fast_path_is_taken_where_it_holds():
    """Without it the property above would compare Haiku with itself. Jax's own generator is a
    loop."""

    def program():
        drop = jax.jit(lambda k, x: te.dropout(k, 0.1, x))
        return drop.lower(jax.random.key(0), jnp.ones((4, 4))).compile().as_text()

    assert "while" not in program()
    with jax.enable_x64():
        assert "while" in program()


@pytest.mark.parametrize(("rows", "fits"), [(2, True), (3, False), (4, False)])
def test_arrays_with_more_elements_than_a_word_counts_use_jaxs_generator(monkeypatch, rows, fits):
    counted = []

    def draw(key_0, key_1, counters):
        counted.append(counters.shape)
        return counters, counters

    monkeypatch.setattr(module, "_threefry", draw)
    mask = functools.partial(module._keep_mask, keep_rate=0.9, shape=(rows, 2**30 + 2**29))
    jax.eval_shape(mask, jax.random.key(0))
    assert bool(counted) == fits


ONES = jnp.ones(4)


def test_rate_zero_returns_x():
    assert te.dropout(jax.random.key(0), 0.0, ONES) is ONES


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_dropout_on_a_mesh_equals_hk_dropout(kind):
    mesh = mesh_of((2, 2), ("a", "b"), kind)
    key, x = jax.random.key(3), normal(9, 4, 8)
    expected = jax.jit(lambda key, x: hk.dropout(key, 0.4, x))(key, x)
    with jax.set_mesh(mesh):
        sharded = put(mesh, x, "a", "b")
        dropped = jax.jit(lambda key, x: te.dropout(key, 0.4, x))(key, sharded)
    assert dropped.sharding.spec == sharded.sharding.spec
    # Not to the bit: the signs of zeros follow from XLA's order of passes, which a partitioned
    # program changes for Haiku's dropout too.
    equal(dropped, expected)


drop = functools.partial(te.dropout, jax.random.key(0))
REFUSED = {
    "drop(1.0, ONES)": "ValueError: rate: ... [0, 1), got 1.0",
    "drop(-0.1, ONES)": "ValueError: rate: ... [0, 1), got -0.1",
    "drop(float('nan'), ONES)": "ValueError: rate: ... got nan",
    "drop('0.1', ONES)": "TypeError: rate: ... got str '0.1'",
    "drop(0.1, np.arange(4))": "TypeError: x: ... got int64",
    "te.dropout(None, 0.1, ONES)": "TypeError: rng: ... got None",
    "te.dropout(3, 0.1, ONES)": "TypeError: rng: ... got int",
    "te.dropout(jax.random.split(jax.random.key(0)), 0.1, ONES)": "TypeError: rng: ... got an array key<fry>[2]",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
