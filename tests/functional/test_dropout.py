import functools
import importlib
import math

import haiku as hk
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import set_mesh, x64
from hypothesis import strategies as st

import transformer_embed as te

module = importlib.import_module("transformer_embed._src.functional.dropout")

SHAPES = [(), (1,), (7,), (0, 3), (3, 5), (2, 3, 4), (1, 129)]
RATES = [1e-9, 0.1, 0.25, 0.5, 0.9, 1 - 2**-25]
KEYS = {
    "typed": jax.random.key,
    "raw": jax.random.PRNGKey,
    "rbg": lambda seed: jax.random.key(seed, impl="rbg"),
    "unsafe_rbg": lambda seed: jax.random.key(seed, impl="unsafe_rbg"),
}


def same_bits(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def compare(key, rate, x):
    """Compiled against compiled: eager, Haiku's product and quotient are two roundings that XLA may
    fuse."""
    same_bits(*jax.jit(lambda k, x: (te.dropout(k, rate, x), hk.dropout(k, rate, x)))(key, x))


def normal(shape, dtype):
    return jax.device_put(np.asarray(np.random.default_rng(9).normal(size=shape)).astype(dtype))


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
@hypothesis.settings(max_examples=60)
def test_dropout_equals_hk_dropout_bit_for_bit(shape, rate, dtype, kind, seed, wide, partitionable):
    with x64(wide), jax.threefry_partitionable(partitionable):
        compare(KEYS[kind](seed), rate, normal(shape, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.5, 1 / 3, 0.999, 1e-9])
def test_dropout_of_many_elements_equals_hk_dropout_bit_for_bit(rate):
    compare(jax.random.key(4), rate, normal((64, 1024), jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_under_vmap_equals_hk_dropout_bit_for_bit(rate):
    keys, x = jax.random.split(jax.random.key(1), 3), normal((3, 4, 5), jnp.float32)
    same_bits(
        *jax.jit(jax.vmap(lambda k, x: (te.dropout(k, rate, x), hk.dropout(k, rate, x))))(keys, x)
    )


def test_the_gradient_equals_that_of_hk_dropout():
    key, x = jax.random.key(2), normal((40, 30), jnp.float32)
    ours, theirs = (
        jax.jit(jax.grad(lambda x, f=f: (f(key, 0.3, x) ** 2).sum()))(x)
        for f in (te.dropout, hk.dropout)
    )
    same_bits(ours, theirs)


def test_the_fast_path_is_taken_where_it_holds():
    """Without it the property above would compare Haiku with itself. Jax's own generator is a
    loop."""

    def program():
        return (
            jax.jit(lambda k, x: te.dropout(k, 0.1, x))
            .lower(jax.random.key(0), jnp.ones((4, 4)))
            .compile()
            .as_text()
        )

    assert "while" not in program()
    with x64():
        assert "while" in program()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_numpy_scalar_is_its_python_float(dtype):
    x, rate = normal((5, 7), jnp.bfloat16), dtype(0.3)
    key = jax.random.key(2)
    same_bits(te.dropout(key, rate, x), te.dropout(key, float(rate), x))


def test_counters_are_places_in_the_flattened_array():
    counters = module._counters((3, 1, 4, 5))
    np.testing.assert_array_equal(counters, np.arange(60).reshape(3, 1, 4, 5))


@pytest.mark.parametrize(("rows", "fits"), [(2, True), (3, False), (4, False)])
def test_arrays_with_more_elements_than_a_word_counts_use_jaxs_generator(monkeypatch, rows, fits):
    shapes = []

    def keep_all(key, *, keep_rate, shape):
        shapes.append(shape)
        return jnp.ones(shape, bool)

    monkeypatch.setattr(module, "_keep_mask_in_registers", keep_all)
    mask = functools.partial(module._keep_mask, keep_rate=0.9, shape=(rows, 2**30 + 2**29))
    jax.eval_shape(mask, jax.random.key(0))
    assert bool(shapes) == fits


def test_rate_zero_returns_x():
    x = normal((3,), jnp.float32)
    assert te.dropout(jax.random.key(0), 0.0, x) is x


def test_elements_are_dropped_at_the_given_rate():
    x = jnp.ones(100_000)
    dropped = np.asarray(te.dropout(jax.random.key(0), 0.25, x))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    # Five standard deviations of the mean of 100,000 draws of 0 or 1.
    assert abs((dropped == 0).mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 100_000)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtype_is_kept(dtype):
    assert te.dropout(jax.random.key(0), 0.1, jnp.ones(3, dtype)).dtype == dtype


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_for_other_platforms(platform):
    drop = jax.jit(lambda k, x: te.dropout(k, 0.1, x))
    assert (
        drop.trace(jax.random.key(0), jnp.ones((4, 4)))
        .lower(lowering_platforms=(platform,))
        .as_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_dropout_on_a_mesh_equals_hk_dropout_bit_for_bit(kind):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    with set_mesh(mesh):
        x = jax.device_put(
            normal((8, 16), jnp.float32),
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b")),
        )
        mask = te.dropout(jax.random.key(3), 0.4, jnp.ones((8, 16))) != 0
        dropped = jax.jit(lambda k, x: te.dropout(k, 0.4, x))(jax.random.key(3), x)
    assert dropped.sharding.spec == x.sharding.spec
    # The signs of zeros follow from XLA's order of passes, which a partitioned program changes for
    # Haiku's dropout too.
    np.testing.assert_array_equal(np.asarray(dropped) != 0, np.asarray(mask))
    np.testing.assert_array_equal(
        dropped,
        jax.jit(lambda k, x: hk.dropout(k, 0.4, x))(
            jax.random.key(3), normal((8, 16), jnp.float32)
        ),
    )


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            ValueError,
            "rate: wanted a number in [0, 1), got 1.0",
            lambda k, x: te.dropout(k, 1.0, x),
        ),
        (
            ValueError,
            "rate: wanted a number in [0, 1), got -0.1",
            lambda k, x: te.dropout(k, -0.1, x),
        ),
        (
            ValueError,
            "rate: wanted a finite number, got nan",
            lambda k, x: te.dropout(k, math.nan, x),
        ),
        (
            TypeError,
            "rate: wanted a Python number, got str '0.1'",
            lambda k, x: te.dropout(k, "0.1", x),
        ),
        (
            TypeError,
            "rate: wanted a Python number, got a traced",
            lambda k, x: jax.jit(lambda r: te.dropout(k, r, x))(0.1),
        ),
        (
            TypeError,
            "x: wanted a floating dtype of 16 to 64 bits, got int32",
            lambda k, x: te.dropout(k, 0.1, x.astype(jnp.int32)),
        ),
        (
            TypeError,
            "rng: wanted one key of jax.random.key or jax.random.PRNGKey, got NoneType",
            lambda k, x: te.dropout(None, 0.1, x),
        ),
        (
            TypeError,
            "rng: wanted one key of jax.random.key or jax.random.PRNGKey, got int",
            lambda k, x: te.dropout(3, 0.1, x),
        ),
        (
            TypeError,
            "rng: wanted one key of jax.random.key or jax.random.PRNGKey, got keys of shape [2]",
            lambda k, x: te.dropout(jax.random.split(k), 0.1, x),
        ),
    ],
)
def test_bad_arguments_raise_errors(kind, message, call):
    with pytest.raises(kind) as caught:
        call(jax.random.key(0), jnp.ones(4))
    assert str(caught.value).startswith(message)
