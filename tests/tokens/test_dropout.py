import functools
import importlib

import draws
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal
from drawn import normal
from meshes import AUTO, EXPLICIT, mesh_of, put
from refused import each_raises

import transformer_embed as te

module = importlib.import_module("transformer_embed._src.tokens.dropout")

WRAPPED = "jax.random.wrap_key_data(data, impl='{}')"
SPACE = draws.Space(
    {
        "shape": [(), (7,), (0, 3), (2, 3, 4), (1, 129), (4, 32, 128)],
        "broadcast_dims": lambda chosen: [
            (),
            *[dims for dims in [(0,), (-1,), (1, 2)] if max(dims) < len(chosen["shape"]) > 0],
        ],
        "rate": [1e-9, 0.1, 1 / 3, 0.9, 1 - 2**-25],
        "dtype": ["float32", "bfloat16", "float16"],
        "impl": ["threefry2x32", "rbg"],
        "key": lambda chosen: [WRAPPED.format(chosen["impl"]), "data"][
            : 1 + (chosen["impl"] != "rbg")
        ],
        "partitionable": [True, False],
        # Eager, Haiku's product and quotient are two roundings; it needs promotion of bools.
        "mode": [mode for mode in draws.MODES if mode not in ("eager", "strict")],
    },
    default=11,
    quick=8,
)
PROGRAM = """\
import draws, drawn, haiku as hk, jax, transformer_embed as te
def run(dropout, data, x):
    y, pull = jax.vjp(lambda x: dropout({key}, {rate}, x, broadcast_dims={broadcast_dims}), x)
    return y, pull(y)
f = lambda *arrays: (run(te.dropout, *arrays), run(hk.dropout, *arrays))
data = lambda n: jax.device_get(jax.random.key_data(jax.random.key(n, impl={impl!r})))
batches = [(data(n), drawn.normal(n, *{shape}).astype({dtype!r})) for n in {seeds}]
with jax.threefry_partitionable({partitionable}):
    found = draws.call({mode!r}, f, batches)"""


ON_GPU = SPACE.on_gpu(modes=[mode for mode in draws.ONE_DEVICE if mode != "eager"])


@pytest.mark.parametrize("number", SPACE.numbers())
def test_dropout_and_its_gradient_equal_haikus_to_the_bit(number):
    run(number, SPACE.choices(number))


@pytest.mark.gpu
@pytest.mark.parametrize("number", ON_GPU.numbers())
def test_dropout_and_its_gradient_on_gpu_equal_haikus_to_the_bit(number):
    run(number, ON_GPU.choices(number))


def run(number, chosen):
    program = PROGRAM.format(**vars(chosen), seeds=[2 * number, 2 * number + 1])
    with draws.repeated_by(number, program):
        for ours, theirs in draws.run(number, program).found:
            for got, want in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
                assert got.dtype == want.dtype
                assert bits(got) == bits(want)


def bits(array):
    """The bits of an array. A rate near 1 divides 0 by 0 in float16, and NaN has any sign."""
    array = np.asarray(array)
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array).tobytes()


@pytest.mark.parametrize("rate", [0.1, 1 / 3, 0.5, 0.7, 1e-7])
def test_an_element_is_kept_as_jax_compares_its_bits_with_the_rate(monkeypatch, rate):
    """At the numbers beside the bound, which random bits hit once in eight million."""
    keep_rate = 1 - rate
    bound = int(float(np.float32(keep_rate)) * 2**23)
    numbers = np.arange(bound - 2, bound + 3).clip(0, 2**23 - 1).astype(np.uint32)
    words = lambda *_: (jnp.asarray(numbers << 9), np.zeros(5, np.uint32))
    monkeypatch.setattr(module, "_threefry", words)
    kept = module._keep_mask(jax.random.key(0), keep_rate, (5,))
    equal(kept, np.float32(numbers / 2**23) < np.float32(keep_rate))


@pytest.mark.slow
def test_the_fast_path_is_taken_where_it_holds():
    """Without it the property above would compare Haiku with itself. Jax's own generator is a
    loop."""

    key, x = jax.random.key(0), np.ones((4, 4), np.float32)
    program = lambda: jax.jit(lambda k, x: te.dropout(k, 0.1, x)).lower(key, x).as_text()
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


ONES = jnp.asarray(np.ones(4, np.float32))


def test_rate_zero_returns_x():
    assert te.dropout(jax.random.key(0), 0.0, ONES) is ONES


dropped_by_haiku = jax.jit(lambda key, x: hk.dropout(key, 0.4, x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_dropout_on_a_mesh_equals_hk_dropout(kind):
    mesh = mesh_of((2, 2), ("a", "b"), kind)
    key, x = jax.random.key(3), normal(9, 4, 8)
    expected = dropped_by_haiku(key, x)
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
    "drop(0.1, ONES, broadcast_dims=[1])": "ValueError: broadcast_dims[0]: ... at most 0, got 1",
    "drop(0.1, ONES, broadcast_dims=[0, -2])": "ValueError: broadcast_dims[1]: ... at least -1, got -2",
    "drop(0.0, ONES, broadcast_dims=0)": "TypeError: broadcast_dims: ... got int 0",
    "drop(0.1, ONES, broadcast_dims=[0.0])": "TypeError: broadcast_dims[0]: ... Python int, got float 0.0",
    "te.dropout(None, 0.1, ONES)": "TypeError: rng: ... got None",
    "te.dropout(3, 0.1, ONES)": "TypeError: rng: ... got int",
    "te.dropout(jax.random.split(jax.random.key(0)), 0.1, ONES)": "TypeError: rng: ... got an array key<fry>[2]",
}


def test_bad_arguments_are_refused():
    each_raises(REFUSED, globals())
