"""Steps on some rows of a table: the lazy rule of each optimizer in float64, and the forms that a
step may have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near
from meshes import EXPLICIT, mesh_of, put

import transformer_embed as te

VOCAB_SIZE, WIDTH, STEPS, PAD = 23, 3, 6, 4
# float32 against float64: some 4 roundings of 2**-24 each a step, of parameters below 8, and a
# rounded quotient of moments (relative error some 1e-6) times the rate.
TOLERANCE = 4e-5
RATE = 0.1


# The lazy rule, one row: (gradient, row, its state, step counted from 1) -> (row, its state), in
# float64.


def scheduled_sgd(g, p, s, t):
    return p - RATE / t * g, s


def adamw(g, p, s, t):
    m, v = 0.9 * s[0] + 0.1 * g, 0.999 * s[1] + 0.001 * g**2
    return p - RATE * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.1 * p), [m, v]


def adam_then_momentum(g, p, s, t):
    m, v = 0.9 * s[0] + 0.1 * g, 0.999 * s[1] + 0.001 * g**2
    trace = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.5 * s[2]
    return p - RATE * trace, [m, v, trace]


# The optimizer, its rule, and what its states start at.
OPTIMIZERS = {
    "sgd, a schedule": (optax.sgd(lambda count: RATE / (count + 1)), scheduled_sgd, []),
    "adamw": (optax.adamw(RATE, weight_decay=0.1), adamw, [0.0] * 2),
    "a chain": (
        optax.chain(optax.scale_by_adam(), optax.chain(optax.trace(0.5), optax.scale(-RATE))),
        adam_then_momentum,
        [0.0] * 3,
    ),
}


def loss(params, ids, weights):
    rows = te.lookup(params["embed"]["embeddings"], ids, pad_id=PAD, out_of_range="zero")
    return jnp.sum(rows * weights) * params["scale"]


def row_step(optimizer, params, state, ids, weights):
    ids_of = {"embed": {"embeddings": ids}}
    _, grads = te.rows.value_and_grad(loss, ids=ids_of)(params, ids, weights)
    return te.rows.update(optimizer, grads, state, params)


@functools.cache
def jitted_step(optimizer):
    return jax.jit(functools.partial(row_step, optimizer))


ADAMW = optax.adamw(RATE)


def make_params(seed=0):
    table = np.random.default_rng(seed).normal(size=(VOCAB_SIZE, WIDTH)).astype(np.float32)
    return {"embed": {"embeddings": table}, "scale": np.float32(1)}


def table_of(params):
    return np.asarray(params["embed"]["embeddings"])


def assert_close(found, expected, **options):
    options = {"rtol": TOLERANCE, "atol": TOLERANCE} | options
    near(found, expected, **options)


def batch_of(rng):
    """Repeats, padding, and ids beyond either end, which would be clipped to rows 0 and 22."""
    special = [PAD, PAD, -1, VOCAB_SIZE, 2**31 - 1]
    ids = np.tile(np.append(rng.integers(1, 12, 8), special), 2)
    return ids, rng.normal(size=(*ids.shape, WIDTH)).astype(np.float32)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name != "adamw" else ()) for name in OPTIMIZERS],
)
def test_rows_follow_the_lazy_rule_and_others_stay_bit_for_bit(name):
    optimizer, rule, start = OPTIMIZERS[name]
    params, rng, traces = make_params(), np.random.default_rng(1), []
    state = optimizer.init(params)

    @jax.jit
    def step(*arguments):
        traces.append(1)
        return row_step(optimizer, *arguments)

    table, first = table_of(params).astype(np.float64), table_of(params)
    states = {row: [np.full(WIDTH, value) for value in start] for row in range(VOCAB_SIZE)}
    for t in range(1, STEPS + 1):
        ids, weights = batch_of(rng)
        scale = float(params["scale"])
        params, state = step(params, state, ids, weights)
        for row in set(ids.tolist()) & set(range(VOCAB_SIZE)) - {PAD}:
            gradient = scale * weights[ids == row].astype(np.float64).sum(0)
            table[row], states[row] = rule(gradient, table[row], states[row], t)
        assert_close(table_of(params), table)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state) if leaf.shape == table.shape]
        assert len(leaves) == len(start)
        for i, leaf in enumerate(leaves):
            assert_close(leaf, np.stack([states[row][i] for row in range(VOCAB_SIZE)]))
    still = [0, PAD, *range(12, VOCAB_SIZE)]
    equal(table_of(params)[still], first[still])
    assert len(traces) == 1


PARAMS = {"t": np.ones([1000, 2], np.float32), "w": np.ones([3, 2], np.float32)}
IDS = np.array([0, 3, 3, 701])
SGD = optax.sgd(0.25)


def tanh_loss(params, ids=IDS):
    return jnp.sum(jnp.tanh(te.lookup(params["t"], ids))) + jnp.sum(params["w"])


def gradient(params, ids=IDS, loss=tanh_loss):
    return te.rows.value_and_grad(loss, ids={"t": ids})(params, ids)[1]


def rows(ids, values, size=1000):
    return {"t": te.rows.RowGradient(np.array(ids), values, size)}


@pytest.mark.slow
def test_more_rows_than_a_block_are_updated_in_blocks():
    """Some gradients are zeros, and the last block is not full."""
    ids, rng = np.arange(1500, 3000), np.random.default_rng(0)
    table, values = rng.normal(size=(2, 3000, 2)).astype(np.float32)
    values[::7] = 0
    optimizer = optax.sgd(0.5, momentum=0.9)

    @jax.jit
    def step(params, state, values):
        return te.rows.update(optimizer, rows(ids, values, 3000), state, params)

    params, state = {"t": table}, optimizer.init({"t": table})
    for _ in range(2):
        params, state = step(params, state, values[ids])
    # Not in place: jax may still read the first table.
    expected = table.copy()
    expected[ids] -= 0.5 * (1 + 1.9) * values[ids]
    assert_close(params["t"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 1024, 1025])
def test_a_batch_may_have_as_many_ids_as_the_table_has_rows(size):
    """The proof tells rows from other sizes: the number that is updated at a time is never the
    table's."""
    params, ids = {"t": jnp.ones([size, 2])}, np.arange(size)
    step = jax.jit(
        lambda params: te.rows.update(
            SGD,
            gradient(params, ids, lambda p, ids: te.lookup(p["t"], ids).sum()),
            SGD.init(params),
            params,
        )[0]
    )
    equal(step(params)["t"], 0.75)


@pytest.mark.slow
def test_clipped_ids_move_the_row_at_the_end():
    clipped = lambda params, ids: te.lookup(params["t"], ids, out_of_range="clip").sum()
    grads = gradient(PARAMS, np.array([-5, 1004]), clipped)
    after, _ = te.rows.update(SGD, {"t": grads["t"]}, (SGD.init({})), {"t": PARAMS["t"]})
    assert np.flatnonzero(np.asarray(after["t"])[:, 0] != 1).tolist() == [0, 999]


@pytest.mark.slow
def test_a_table_of_16_bits_keeps_its_dtype_and_sums_repeats_in_float32():
    """A sum of ones in 16 bits would stop at 256."""
    dtype, ids = jnp.bfloat16, np.full([2050], 4)
    params = {"t": jnp.zeros([5, 2], dtype)}

    @jax.jit
    def step(params):
        grads = gradient(params, ids, lambda p, ids: te.lookup(p["t"], ids).astype(float).sum())
        return te.rows.update(SGD, grads, SGD.init(params), params)[0]["t"]

    after = step(params)
    assert after.dtype == dtype
    assert after[:, 0].tolist() == [0, 0, 0, 0, jnp.asarray(-2050 / 4, dtype)]


# --- arguments that change


@pytest.mark.slow
def test_an_optimizer_that_closes_over_a_value_uses_that_of_each_trace():
    rate = [1.0]
    optimizer = optax.stateless(lambda grads, _: jax.tree.map(lambda g: -rate[0] * g, grads))

    def after_with(value):
        rate[0] = value
        grads = rows([0], jnp.ones([1, 2]))
        params, _ = te.rows.update(optimizer, grads, optimizer.init({}), {"t": PARAMS["t"]})
        return params["t"][0, 0]

    assert [after_with(0.5), after_with(0.25)] == [0.5, 0.75]
    traced = [jax.jit(after_with), jax.jit(lambda value: after_with(value))]
    assert [step(value) for step, value in zip(traced, [0.5, 0.25], strict=True)] == [0.5, 0.75]


def test_extra_arguments_may_be_anything_that_the_optimizer_takes():
    def update(updates, state, params=None, *, flag, mode, value):
        assert (flag, mode) == (True, "double")
        return jax.tree.map(lambda g: -2 * value * g, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    extra = {"flag": True, "mode": "double", "value": jnp.array(0.25)}
    grads = rows([1, 2], jnp.ones([2, 2]))
    after, _ = te.rows.update(optimizer, grads, (), {"t": PARAMS["t"]}, **extra)
    equal(after["t"][:4, 0], [1, 0.5, 0.5, 1])


# --- steps in other forms


@pytest.mark.slow
def test_steps_in_a_scan_and_with_aux_are_those_of_a_loop():
    optimizer, batches = optax.adamw(0.1), np.array([[0, 3], [3, 5], [0, 0]])

    def one(carry, ids):
        params, state = carry
        step = te.rows.value_and_grad(
            lambda p, ids: (tanh_loss(p, ids), ids), ids={"t": ids}, has_aux=True
        )
        (_, aux), grads = step(params, ids)
        return te.rows.update(optimizer, grads, state, params), aux

    first = jax.tree.map(jnp.asarray, (PARAMS, optimizer.init(PARAMS)))
    scanned, aux = jax.jit(lambda carry: jax.lax.scan(one, carry, batches))(first)
    single = jax.jit(one)
    looped = functools.reduce(lambda carry, ids: single(carry, ids)[0], batches, first)
    equal(aux, batches)
    assert_close(scanned, looped, rtol=1e-6)


@pytest.mark.slow
def test_a_step_works_under_vmap_over_seeds():
    optimizer, ids = optax.adam(RATE), np.array([[0, 3, 3], [5, 0, 8]])
    tables = np.stack([table_of(make_params(seed)) for seed in range(2)])

    def one(table, ids):
        params = {"t": table, "w": jnp.ones(3)}
        return te.rows.update(optimizer, gradient(params, ids), optimizer.init(params), params)[0][
            "t"
        ]

    alone = jax.jit(one)
    expected = np.stack([alone(*each) for each in zip(tables, ids, strict=True)])
    assert (expected != tables).any(axis=2).sum(axis=1).tolist() == [2, 3]
    assert_close(jax.jit(jax.vmap(one))(tables, ids), expected)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [("x",), (None, "x")])
def test_a_whole_table_trains_on_a_batch_that_explicit_axes_split(spec):
    """Plain data parallelism."""
    mesh, step = mesh_of((2,), ("x",), EXPLICIT), jitted_step(ADAMW)
    place = functools.partial(put, mesh)
    params, ids = make_params(), np.array([[5, 9], [9, VOCAB_SIZE]])
    state = ADAMW.init(params)
    weights = np.ones((*ids.shape, WIDTH), np.float32)
    expected = step(params, state, ids, weights)
    with jax.set_mesh(mesh):
        found = step(*place((params, state)), place(ids, *spec), place(weights, *spec))
    assert_close(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_step_updates_in_place_and_its_memory_does_not_grow_with_the_vocabulary():
    vocab_size, count, adam = 200_000, 2048, optax.adam(RATE)
    shape = jax.ShapeDtypeStruct
    params = {
        "embed": {"embeddings": shape([vocab_size, 16], jnp.float32)},
        "scale": shape([], jnp.float32),
    }
    step = jax.jit(functools.partial(row_step, adam), donate_argnums=(0, 1))
    batch = shape([count], jnp.int32), shape([count, 16], jnp.float32)
    memory = (
        step.lower(params, jax.eval_shape(adam.init, params), *batch).compile().memory_analysis()
    )
    assert memory.alias_size_in_bytes >= 3 * vocab_size * 16 * 4
    # Some arrays of the batch's rows.
    assert memory.temp_size_in_bytes < 10 * count * 16 * 4


# --- arguments


def doors(convert):
    """What each function that takes a tree of arrays makes of it."""
    plain = {"t": np.ones([5, 2], np.float32), "w": np.full(2, 3, np.float32)}
    params = jax.tree.map(convert, plain)
    ids, optimizer = np.array([1, 3]), optax.sgd(RATE, 0.9)
    grads = rows(ids, jnp.ones([2, 2]), 5) | {"w": jnp.ones(2)}
    state = jax.tree.map(np.asarray, optimizer.init(plain))
    step = te.rows.value_and_grad(
        lambda params: jnp.sum(te.lookup(params["t"], ids) * params["w"]), ids={"t": ids}
    )
    update = functools.partial(te.rows.update, optimizer)
    mesh, rules = jax.sharding.Mesh(jax.devices()[:1], ["x"]), {"*": jax.sharding.PartitionSpec()}
    return {
        "value_and_grad": lambda: jax.tree.map(jnp.asarray, step(params)),
        "add": lambda: te.rows.add({"w": params["w"]}, {"w": jnp.ones(2)}),
        "update": lambda: update(grads, jax.tree.map(convert, state), params),
        "shard_params": lambda: te.sharding.shard_params(params, mesh, rules),
    }


@pytest.mark.slow
@pytest.mark.parametrize("door", doors(np.asarray))
def test_arrays_in_another_byte_order_or_with_a_mask_are_read_right_or_refused(door):
    swapped = lambda array: array.astype(array.dtype.newbyteorder())
    equal(doors(swapped)[door](), doors(np.asarray)[door]())
    with pytest.raises(TypeError, match=r"wanted an array without a mask \(fill it first: "):
        doors(np.ma.masked_array)[door]()


ADAM, SMALL = optax.adam(RATE), {"t": jnp.ones([5, 2])}
GRADS, STATE = rows([1], jnp.ones([1, 2]), 5), ADAM.init(SMALL)
ERRORS = {
    "grads: wanted a tree as params, with RowGradient for some tables": (ADAM, {}, STATE),
    "grads: wanted values [1, 2] of a table [5, 2], got values [1, 2] of one [6, 2]": (
        ADAM,
        rows([1], jnp.ones([1, 2]), 6),
        STATE,
    ),
    "state: wanted that of optimizer.init(params)": (ADAM, GRADS, SGD.init(SMALL)),
    "state: wanted an array, got object": (ADAM, GRADS, object()),
    "optimizer: wanted an optax.GradientTransformation, got NoneType": (None, GRADS, STATE),
    "optimizer: wanted an optax.GradientTransformation, got function": (optax.adam, GRADS, STATE),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments_raise_errors(message):
    with pytest.raises((TypeError, ValueError)) as error:
        te.rows.update(*ERRORS[message], SMALL)
    assert message in str(error.value)


def test_a_gradient_needs_a_row_for_each_id():
    message = (
        r"^grads: wanted values \[2, 2\] of a table \[5, 2\], got values \[1, 2\] of one \[5, 2\]"
    )
    with pytest.raises(ValueError, match=message):
        rows([1, 2], jnp.ones([1, 2]), 5)
