import functools

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer_embed as te
from transformer_embed._src.rows import distinct_ids, update
from transformer_embed._src.rows.gathered_rows import GatheredRows, as_keys
from transformer_embed._src.rows.marks import with_marks, without_marks

VOCAB_SIZE, WIDTH, STEPS, PAD = 23, 3, 20, 4
# 20 steps of some 4 roundings of 2**-24 each, of parameters below 8, or this part of the largest.
DENSE_TOLERANCE = 4e-5
# float32 against float64: as above, and a rounded quotient of moments (relative error some 1e-6)
# times the rate, 20 times.
ORACLE_TOLERANCE = 4e-5
RATE = 0.1


# The lazy rule, one row: (gradient, row, its state, step counted from 1) -> (row, its state), in
# float64.


def sgd(g, p, s, t):
    return p - RATE * g, s


def scheduled_sgd(g, p, s, t):
    return p - RATE / t * g, s


def momentum(g, p, s, t):
    m = g + 0.9 * s[0]
    return p - RATE * m, [m]


def adagrad(g, p, s, t):
    v = s[0] + g**2
    return p - RATE * g / np.sqrt(v + 1e-7), [v]


def rmsprop(g, p, s, t):
    v = 0.9 * s[0] + 0.1 * g**2
    return p - RATE * g / np.sqrt(v + 1e-8), [v]


def centered_rmsprop(g, p, s, t):
    mean, v = 0.9 * s[0] + 0.1 * g, 0.9 * s[1] + 0.1 * g**2
    m = 0.9 * s[2] - RATE * g / np.sqrt(v - mean**2 + 1e-8)
    return p + m, [mean, v, m]


def adam(g, p, s, t, decay=0.0):
    m, v = 0.9 * s[0] + 0.1 * g, 0.999 * s[1] + 0.001 * g**2
    return p - RATE * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + decay * p), [m, v]


def lion(g, p, s, t):
    return p - RATE * (np.sign(0.9 * s[0] + 0.1 * g) + 0.01 * p), [0.99 * s[0] + 0.01 * g]


def adam_then_momentum(g, p, s, t):
    m, v = 0.9 * s[0] + 0.1 * g, 0.999 * s[1] + 0.001 * g**2
    trace = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.5 * s[2]
    return p - RATE * trace, [m, v, trace]


# The optimizer, its rule, and what its states start at.
OPTIMIZERS = {
    "sgd": (optax.sgd(RATE), sgd, []),
    "sgd, a schedule": (optax.sgd(lambda count: RATE / (count + 1)), scheduled_sgd, []),
    "momentum": (optax.sgd(RATE, momentum=0.9), momentum, [0.0]),
    "adagrad": (optax.adagrad(RATE), adagrad, [0.1]),
    "rmsprop": (optax.rmsprop(RATE), rmsprop, [0.0]),
    "rmsprop, centered, momentum": (
        optax.rmsprop(RATE, centered=True, momentum=0.9),
        centered_rmsprop,
        [0.0] * 3,
    ),
    "adam": (optax.adam(RATE), adam, [0.0] * 2),
    "adamw": (optax.adamw(RATE, weight_decay=0.1), functools.partial(adam, decay=0.1), [0.0] * 2),
    "lion": (optax.lion(RATE, weight_decay=0.01), lion, [0.0]),
    "a chain": (
        optax.chain(optax.scale_by_adam(), optax.chain(optax.trace(0.5), optax.scale(-RATE))),
        adam_then_momentum,
        [0.0] * 3,
    ),
    "rates injected": (optax.inject_hyperparams(optax.adam)(RATE), adam, [0.0] * 2),
}


def loss(params, ids, weights):
    rows = te.lookup(params["embed"]["embeddings"], ids, pad_id=PAD, out_of_range="zero")
    return jnp.sum(rows * weights) * params["scale"]


def traced_row_step(optimizer, params, state, ids, weights, **options):
    _, grads = te.rows.value_and_grad(loss, ids={"embed": {"embeddings": ids}}, **options)(
        params, ids, weights
    )
    return te.rows.update(optimizer, grads, state, params)


row_step = jax.jit(traced_row_step, static_argnums=0, static_argnames="max_rows")


@functools.partial(jax.jit, static_argnums=0)
def dense_step(optimizer, params, state, ids, weights):
    updates, state = optimizer.update(jax.grad(loss)(params, ids, weights), state, params)
    return optax.apply_updates(params, updates), state


def trained(optimizer, loss, ids, params, state=None, **options):
    """One step under jit of a loss of the parameters."""

    @jax.jit
    def step(params, state):
        _, grads = te.rows.value_and_grad(loss, ids=ids, **options)(params)
        return te.rows.update(optimizer, grads, state, params)

    return step(params, optimizer.init(params) if state is None else state)


def taken(params, ids, **options):
    """The parameters as a loss sees them, and their gradient, of zeros."""
    see = te.rows.value_and_grad(
        lambda params: (jnp.zeros([]), params), ids=ids, has_aux=True, **options
    )
    (_, seen), grads = see(params)
    return seen, grads


@functools.partial(jax.jit, static_argnames="max_rows")
def taken_rows(table, ids, max_rows=None):
    return taken({"t": table}, {"t": ids}, max_rows=max_rows)[0]["t"]


def make_params(seed=0):
    table = np.random.default_rng(seed).normal(size=(VOCAB_SIZE, WIDTH))
    return {
        "embed": {"embeddings": jnp.asarray(table, jnp.float32)},
        "scale": jnp.array(1.5, jnp.float32),
    }


def table_of(params):
    return np.asarray(params["embed"]["embeddings"])


def batches(ids_of, seed=1):
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        ids = ids_of(rng)
        yield ids, rng.normal(size=(*ids.shape, WIDTH)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_by_rows_equals_dense_training_if_every_row_is_read(name):
    optimizer = OPTIMIZERS[name][0]
    steps = [functools.partial(step, optimizer) for step in (row_step, dense_step)]
    params = make_params()
    states = [optimizer.init(params)] * 2
    # Every row, twice some; padding has no gradient, so weight decay must be nothing there: its row
    # is zeros.
    table = table_of(params).copy()
    table[PAD] = 0
    params = [{**params, "embed": {"embeddings": jnp.asarray(table)}}] * 2
    for ids, weights in batches(
        lambda rng: np.concatenate([rng.permutation(VOCAB_SIZE), [3, 3, 7]])
    ):
        params, states = zip(
            *(
                step(each, state, ids, weights)
                for step, each, state in zip(steps, params, states, strict=True)
            ),
            strict=True,
        )
    for ours, theirs in zip(
        *(jax.tree.leaves((p, s)) for p, s in zip(params, states, strict=True)), strict=True
    ):
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=DENSE_TOLERANCE * max(1, np.abs(theirs).max())
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_touched_at_random_follow_the_lazy_rule(name):
    optimizer, rule, start = OPTIMIZERS[name]
    params = make_params()
    params["scale"] = jnp.ones([])
    state = optimizer.init(params)
    step = functools.partial(row_step, optimizer)
    table = table_of(params).astype(np.float64)
    states = {row: [np.full(WIDTH, value) for value in start] for row in range(VOCAB_SIZE)}
    special = [PAD, PAD, -1, VOCAB_SIZE, 2**31 - 1]
    # Repeats, padding, and ids beyond either end; as many as in the test above, for the same
    # program.
    for t, (ids, weights) in enumerate(
        batches(lambda rng: np.tile(np.append(rng.integers(0, 12, 8), special), 2)), 1
    ):
        scale = float(params["scale"])
        params, state = step(params, state, ids, weights)
        for row in set(ids.tolist()) & set(range(VOCAB_SIZE)) - {PAD}:
            gradient = scale * weights[ids == row].astype(np.float64).sum(0)
            table[row], states[row] = rule(gradient, table[row], states[row], t)
        np.testing.assert_allclose(
            table_of(params), table, rtol=ORACLE_TOLERANCE, atol=ORACLE_TOLERANCE
        )
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state) if leaf.shape == table.shape]
        for i, leaf in enumerate(sorted_as_rule(name, leaves)):
            want = np.stack([states[row][i] for row in range(VOCAB_SIZE)])
            np.testing.assert_allclose(leaf, want, rtol=ORACLE_TOLERANCE, atol=ORACLE_TOLERANCE)


def sorted_as_rule(name, leaves):
    assert len(leaves) == len(OPTIMIZERS[name][2])
    return leaves


def test_lazy_adam_is_not_adam():
    optimizer = optax.adam(RATE)
    params = make_params()
    weights = np.ones((1, WIDTH), np.float32)
    found = []
    for step in (row_step, dense_step):
        after, state = step(optimizer, params, optimizer.init(params), np.array([2]), weights)
        first = table_of(after)
        after, state = step(optimizer, after, state, np.array([5]), weights)
        found.append(table_of(after)[2] - first[2])
    assert (found[0] == 0).all()
    assert (found[1] < -RATE / 2).all()


MOVES_WITHOUT_A_GRADIENT = {
    "momentum": optax.sgd(RATE, momentum=0.9),
    "adamw": optax.adamw(RATE, weight_decay=0.5),
    "lion": optax.lion(RATE, weight_decay=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVES_WITHOUT_A_GRADIENT)
@pytest.mark.parametrize("policy", ["nan", "zero"])
def test_padding_and_out_of_range_ids_change_no_row_or_state(name, policy):
    """Rows and their states, bit for bit: rows 0 and 22 lie where a clipped id would."""
    optimizer = MOVES_WITHOUT_A_GRADIENT[name]
    params, ids = make_params(), np.array([5, PAD, -3, 7, VOCAB_SIZE, 2**31 - 1, 5])
    # As after steps in which all rows had gradients.
    state = jax.tree.map(
        lambda leaf: leaf if leaf.ndim == 0 else np.full(leaf.shape, 0.25, leaf.dtype),
        optimizer.init(params),
    )

    def masked_loss(params):
        rows = te.lookup(params["embed"]["embeddings"], ids, pad_id=PAD, out_of_range=policy)
        return jnp.sum(jnp.where((ids >= 0) & (ids < VOCAB_SIZE), rows.sum(-1), 0))

    after = trained(optimizer, masked_loss, {"embed": {"embeddings": ids}}, params, state)
    still = np.setdiff1d(np.arange(VOCAB_SIZE), [5, 7])
    for old, new in zip(jax.tree.leaves((params, state)), jax.tree.leaves(after), strict=True):
        if old.shape == (VOCAB_SIZE, WIDTH):
            np.testing.assert_array_equal(np.asarray(new)[still], np.asarray(old)[still])
            assert (np.asarray(new)[[5, 7]] != np.asarray(old)[[5, 7]]).all()


def test_clipped_ids_move_the_row_at_the_end():
    params = make_params()

    def clipped(params):
        return te.lookup(
            params["embed"]["embeddings"], [-5, VOCAB_SIZE + 4], out_of_range="clip"
        ).sum()

    after, _ = trained(
        optax.sgd(1.0), clipped, {"embed": {"embeddings": np.array([-5, VOCAB_SIZE + 4])}}, params
    )
    moved = table_of(params) - table_of(after)
    np.testing.assert_allclose(moved[[0, -1]], 1, rtol=1e-6)
    assert (moved[1:-1] == 0).all()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 64])
def test_every_id_finds_its_row_or_none(size):
    held = np.sort(np.random.default_rng(size).permutation(100)[:size]).astype(np.int32)
    values = with_marks(jnp.asarray(held, jnp.float32)[:, None])
    rows = GatheredRows(as_keys(jnp.asarray(held)), values, 100)
    found = np.asarray(jax.jit(te.lookup)(rows, np.arange(100)))[:, 0]
    np.testing.assert_array_equal(
        found, np.where(np.isin(np.arange(100), held), np.arange(100), np.nan)
    )


@pytest.mark.slow
def test_ids_of_any_width_take_the_row_that_they_name():
    table = np.arange(300, dtype=np.float32)[:, None]
    # jit would cut ids of 64 bits that it is given.
    far = jax.jit(
        lambda table: taken({"t": table}, {"t": np.array([2**32 + 5, 2**32 + 7])})[0]["t"]
    )(table)
    assert 5 not in np.asarray(far.ids)
    assert 7 not in np.asarray(far.ids)
    small = taken_rows(table, np.array([127, -128, 5], np.int8))
    assert small.ids.tolist() == [0, 5, 127]
    only = taken_rows(table[:1], np.array([0, 0, 3]))
    assert (only.ids.tolist(), without_marks(only.values).tolist()) == ([0], [[0]])


@pytest.mark.slow
def test_gradients_of_repeated_ids_sum_in_float32():
    # A bfloat16 sum of ones would stop at 256.
    params = {"t": np.zeros([5, 2], jnp.bfloat16)}
    ids = np.full([300], 4)
    after, _ = trained(
        optax.sgd(1.0),
        lambda p: te.lookup(p["t"], ids).astype(jnp.float32).sum(),
        {"t": ids},
        params,
    )
    assert after["t"].dtype == jnp.bfloat16
    assert np.asarray(after["t"])[4].tolist() == [-300, -300]
    assert not np.asarray(after["t"])[:4].any()


def test_fill_ids_update_no_row():
    optimizer = optax.adamw(1.0)

    @jax.jit
    def step(params):
        ids = taken(params, {"t": [1, 1, 1, 1]})[1]["t"].ids
        grads = {"t": te.rows.RowGradient(ids, jnp.ones([4, 2]), 4)}
        return ids, *te.rows.update(optimizer, grads, optimizer.init(params), params)

    ids, after, state = step({"t": np.ones([4, 2], np.float32)})
    assert ids.tolist() == [1, 5, 6, 7]
    assert (np.asarray(after["t"]) != 1).all(axis=1).tolist() == [False, True, False, False]
    assert (np.asarray(state[0].mu["t"]) != 0).all(axis=1).tolist() == [False, True, False, False]


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.integers(-3, 12), min_size=8, max_size=8), st.sampled_from([1, 3, 8, None]))
def test_taken_rows_are_the_distinct_ones(ids, max_rows):
    table = np.arange(10, dtype=np.float32)[:, None] * np.ones(2, np.float32)
    rows = taken_rows(table, np.array(ids), max_rows)
    size = 8 if max_rows is None else max_rows
    want = np.unique(np.clip(ids, 0, 9))[:size]
    assert rows.ids.shape == (size,)
    np.testing.assert_array_equal(np.asarray(rows.ids)[: len(want)], want)
    np.testing.assert_array_equal(
        np.asarray(rows.ids)[len(want) :], 10 + np.arange(len(want), size)
    )
    np.testing.assert_array_equal(np.asarray(rows.values)[: len(want), 0], want)


def test_ids_beyond_max_rows_read_as_nan():
    ids, weights = np.array([1, 2, 3]), np.ones((3, WIDTH), np.float32)

    @jax.jit
    def read(params):
        rows, _ = taken(params, {"embed": {"embeddings": ids}}, max_rows=2)
        return te.lookup(rows["embed"]["embeddings"], ids), loss(rows, ids, weights)

    rows, value = read(make_params())
    assert np.isnan(rows).all(axis=1).tolist() == [False, False, True]
    assert np.isnan(value)


@pytest.mark.slow
def test_a_bound_that_suffices_changes_nothing():
    params, optimizer = make_params(), optax.adam(RATE)
    ids, weights = (
        np.array([9, 2, 9, 2, 9]),
        np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32),
    )
    bounded, unbounded = (
        row_step(optimizer, params, optimizer.init(params), ids, weights, **o)
        for o in ({"max_rows": 2}, {})
    )
    for ours, theirs in zip(jax.tree.leaves(bounded), jax.tree.leaves(unbounded), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_empty_batch_changes_no_table():
    params, optimizer = make_params(), optax.adamw(RATE)
    after, _ = row_step(
        optimizer,
        params,
        optimizer.init(params),
        np.zeros([0], np.int32),
        np.zeros([0, WIDTH], np.float32),
    )
    np.testing.assert_array_equal(table_of(after), table_of(params))


@pytest.mark.slow
def test_updating_in_blocks_equals_updating_all_rows_at_once(monkeypatch):
    params, optimizer = make_params(), optax.adamw(RATE)
    ids, weights = (
        np.arange(17) % 11 + 6,
        np.random.default_rng(0).normal(size=(17, WIDTH)).astype(np.float32),
    )
    count = lambda: (
        jax.eval_shape(lambda params: taken(params, {"embed": {"embeddings": ids}})[1], params)[
            "embed"
        ]["embeddings"].ids.shape
    )
    assert count() == (17,)
    whole = row_step(optimizer, params, optimizer.init(params), ids, weights)
    for module in (distinct_ids, update):
        monkeypatch.setattr(module, "BLOCK", 4)
    assert count() == (20,)
    parts = jax.jit(traced_row_step, static_argnums=0)(
        optimizer, params, optimizer.init(params), ids, weights
    )
    for ours, theirs in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=DENSE_TOLERANCE, atol=DENSE_TOLERANCE)


# Models.


def model(ids, types):
    embed = te.TransformerEmbedding(
        te.EmbedderConfig(
            VOCAB_SIZE,
            8,
            pad_id=0,
            num_token_types=2,
            scheme=te.Learned(16),
            layer_norm_eps=1e-6,
        )
    )
    x = embed(ids, is_training=False, token_types=types)
    return hk.Linear(1)(x).astype(jnp.float32)


def stacked(ids, types):
    embed = te.TransformerEmbedding(
        te.EmbedderConfig(VOCAB_SIZE, 8, pad_id=0, num_token_types=2, scheme=te.Learned(16))
    )
    x = embed(ids, is_training=False, token_types=types)
    return hk.experimental.layer_stack(2)(lambda x: jax.nn.tanh(hk.Linear(8)(x)))(x)


def rematerialised(ids, types):
    return hk.remat(model)(ids, types)


def mixed(ids, types):
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    hk.mixed_precision.set_policy(te.TokenEmbedding, policy)
    try:
        return model(ids, types)
    finally:
        hk.mixed_precision.clear_policy(te.TokenEmbedding)


MODELS = {"layer_stack": stacked, "remat": rematerialised, "mixed_precision": mixed}
IDS = np.array([[5, 9, 5, 0], [11, 1, 0, 0]])
KINDS = np.array([[0, 1, 1, 0], [0, 0, 0, 0]])


def tables_of(params):
    """The ids of each table of a model, by the table's path."""
    ids = {}
    for module, inside in params.items():
        for name, leaf in inside.items():
            if leaf.shape == (VOCAB_SIZE, 8):
                ids[module] = {name: IDS}
            elif leaf.shape == (2, 8) and name == "embeddings":
                ids[module] = {name: KINDS}
            elif leaf.shape == (16, 8) and name != "w":
                ids[module] = {name: np.arange(4)}
    assert len(ids) == 3
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_read_rows_as_they_read_tables(name):
    """Several tables in a tree, each with ids of its own; the optimizer is SGD, for which lazy is
    dense."""
    net = hk.without_apply_rng(hk.transform(MODELS[name]))
    rng, shapes = np.random.default_rng(0), jax.eval_shape(net.init, jax.random.key(0), IDS, KINDS)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype), shapes
    )
    optimizer = optax.sgd(RATE)

    def total(params):
        return jnp.mean(net.apply(params, IDS, KINDS) ** 2)

    @jax.jit
    def step(params, state):
        value, grads = te.rows.value_and_grad(total, ids=tables_of(params))(params)
        return te.rows.update(optimizer, grads, state, params), value

    @jax.jit
    def whole_step(params):
        value, grads = jax.value_and_grad(total)(params)
        return optax.apply_updates(params, jax.tree.map(lambda g: -RATE * g, grads)), value

    (after, _), value = step(params, optimizer.init(params))
    want, dense_value = whole_step(params)
    tolerance = 2e-2 if name == "mixed_precision" else 1e-5
    np.testing.assert_allclose(value, dense_value, rtol=tolerance)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), after, want
    )
    assert jax.tree.structure(after) == jax.tree.structure(params)


@pytest.mark.slow
def test_a_step_works_under_vmap_over_seeds():
    optimizer = optax.adam(RATE)
    params = [make_params(seed) for seed in range(3)]
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 6))
    weights = np.random.default_rng(1).normal(size=(3, 6, WIDTH)).astype(np.float32)
    each = [
        row_step(optimizer, p, optimizer.init(p), i, w)
        for p, i, w in zip(params, ids, weights, strict=True)
    ]
    stack = lambda *leaves: np.stack(leaves)
    together = jax.tree.map(stack, *((p, optimizer.init(p)) for p in params))
    mapped = jax.vmap(functools.partial(row_step, optimizer))(*together, ids, weights)
    for ours, theirs in zip(
        jax.tree.leaves(mapped), jax.tree.leaves(jax.tree.map(stack, *each)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=DENSE_TOLERANCE, atol=DENSE_TOLERANCE)


@pytest.mark.skipif(
    not hasattr(jax, "set_mesh"), reason="jax 0.6 does not scatter under explicit axes"
)
@pytest.mark.parametrize("spec", [("x",), ("x", None), (None, "x")])
def test_a_whole_table_trains_on_a_batch_that_explicit_axes_split(spec):
    """Plain data parallelism."""
    kinds = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=kinds, devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    ids = np.array([[5, 9], [9, VOCAB_SIZE]])
    ids = ids if len(spec) == 2 else ids.reshape(-1)
    optimizer = optax.adamw(RATE)

    @jax.jit
    def step(params, state, ids):
        def loss(params):
            rows = te.lookup(params["embed"]["embeddings"], ids, out_of_range="zero")
            return jnp.sum(jnp.tanh(rows * params["scale"]))

        _, grads = te.rows.value_and_grad(loss, ids={"embed": {"embeddings": ids}})(params)
        return te.rows.update(optimizer, grads, state, params)

    params = make_params()
    expected = step(params, optimizer.init(params), ids)
    with jax.set_mesh(mesh):
        arguments = jax.device_put((params, optimizer.init(params)), everywhere)
        found = step(*arguments, jax.device_put(ids, sharding))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_each_table_may_have_a_bound_of_its_own():
    params, ids = {"a": jnp.ones([9, 2]), "b": jnp.ones([9, 2])}, {"a": [1, 1, 1], "b": [2, 3, 4]}
    grads = jax.eval_shape(lambda params: taken(params, ids, max_rows={"a": 1})[1], params)
    assert [grads[name].values.shape for name in "ab"] == [(1, 2), (3, 2)]


def compiled_step(vocab_size, block=1024):
    params = {
        "embed": {"embeddings": jax.ShapeDtypeStruct([vocab_size, 16], jnp.float32)},
        "scale": jax.ShapeDtypeStruct([], jnp.float32),
    }
    optimizer = optax.adam(RATE)
    step = jax.jit(functools.partial(traced_row_step, optimizer), donate_argnums=(0, 1))
    shapes = jax.eval_shape(lambda params: (params, optimizer.init(params)), params)
    ids, weights = (
        jax.ShapeDtypeStruct([2 * block], jnp.int32),
        jax.ShapeDtypeStruct([2 * block, 16], jnp.float32),
    )
    return step.lower(*shapes, ids, weights).compile()


@pytest.mark.slow
def test_a_step_updates_in_place_and_its_memory_does_not_grow_with_the_vocabulary():
    memory = {
        vocab_size: compiled_step(vocab_size).memory_analysis() for vocab_size in (20_000, 200_000)
    }
    for vocab_size, found in memory.items():
        assert found.alias_size_in_bytes >= 3 * vocab_size * 16 * 4
    assert memory[20_000].temp_size_in_bytes == memory[200_000].temp_size_in_bytes < 20_000 * 16 * 4


def test_a_step_is_traced_once():
    traces = []

    def step(params, state, ids, weights):
        traces.append(1)
        return traced_row_step(optimizer, params, state, ids, weights)

    optimizer, params = optax.adam(RATE), make_params()
    state, compiled = optimizer.init(params), jax.jit(step)
    for ids, weights in batches(lambda rng: rng.integers(0, VOCAB_SIZE, 5)):
        params, state = compiled(params, state, ids, weights)
    assert len(traces) == 1


# Arguments.


def expect(kind, message, call):
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


def test_bad_arguments_of_value_and_grad_raise_errors():
    params = {"m": {"t": jnp.ones([5, 2])}, "i": jnp.ones([5, 2], jnp.int32), "v": jnp.ones(5)}
    message = "params['m']['x']: wanted a table, since ids or max_rows has it, got none among params['m']['t']"
    expect(ValueError, message, lambda: taken(params, {"m": {"x": [1]}}))
    message = (
        "params['m']: wanted a table, since ids or max_rows has it, got none among params['m']['t']"
    )
    expect(ValueError, message, lambda: taken(params, {"m": [1]}))
    expect(
        ValueError,
        "params['v']: wanted shape [vocab_size, d] with at least one row, got shape [5]",
        lambda: taken(params, {"v": [1]}),
    )
    expect(
        TypeError,
        "params['i']: wanted a floating dtype of 16 to 64 bits, got int32",
        lambda: taken(params, {"i": [1]}),
    )
    expect(
        TypeError,
        "ids: wanted an integer dtype, got float64",
        lambda: taken(params, {"m": {"t": [1.5]}}),
    )
    expect(
        ValueError,
        "max_rows: wanted an int of at least 1, got 0",
        lambda: taken(params, {"m": {"t": [1]}}, max_rows=0),
    )
    message = "params['v']: wanted a table in ids, since max_rows has it, got none"
    expect(ValueError, message, lambda: taken(params, {"m": {"t": [1]}}, max_rows={"v": 2}))
    seen = {"m": {"t": taken_rows(params["m"]["t"], np.array([1]))}}
    expect(
        TypeError,
        "params['t']: wanted to be read by te.lookup or te.TokenEmbedding alone",
        lambda: taken(seen, {"m": {"t": [1]}}),
    )
    huge = jax.ShapeDtypeStruct([2**31 - 2, 1], jnp.float32)
    message = "table: wanted at most 2147483645 rows, to take 2 of them, got 2147483646"
    expect(
        ValueError,
        message,
        lambda: jax.eval_shape(lambda table: taken({"t": table}, {"t": [1, 2]}), huge),
    )
    largest = jax.ShapeDtypeStruct([2**31 - 3, 1], jnp.float32)
    jax.eval_shape(lambda table: taken({"t": table}, {"t": [1, 2]}), largest)


def test_rows_added_to_a_table_as_optax_does_name_the_function_to_call():
    params, grads = (
        {"t": jnp.ones([5, 2])},
        {"t": te.rows.RowGradient(jnp.array([1]), jnp.ones([1, 2]), 5)},
    )
    optimizer = optax.sgd(RATE)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    message = (
        "params: wanted a step by te.rows.update(optimizer, grads, state, params), got the sum of "
    )
    for table, kind in ((params["t"], "ArrayImpl"), (np.ones([5, 2]), "float")):
        tables = {"t": table}
        call = functools.partial(optax.apply_updates, tables, updates)
        expect(TypeError, f"{message}{kind} and RowGradient", call)


def doors(convert):
    """What each function that takes a tree of arrays makes of it."""
    plain_params = {"t": np.ones([5, 2], np.float32), "w": np.full(2, 3, np.float32)}
    params, dense = jax.tree.map(convert, (plain_params, {"w": plain_params["w"]}))
    ids, optimizer = np.array([1, 3]), optax.sgd(RATE, 0.9)
    grads = {"t": te.rows.RowGradient(ids, jnp.ones([2, 2]), 5), "w": jnp.ones(2)}
    state = jax.tree.map(np.asarray, optimizer.init(plain_params))
    gradient = te.rows.value_and_grad(
        lambda params: jnp.sum(te.lookup(params["t"], ids) * params["w"]), ids={"t": ids}
    )
    update = functools.partial(te.rows.update, optimizer)
    mesh, rules = jax.sharding.Mesh(jax.devices()[:1], ["x"]), {"*": jax.sharding.PartitionSpec()}
    return {
        "value_and_grad": lambda: jax.tree.map(jnp.asarray, gradient(params)),
        "add": lambda: te.rows.add(dense, {"w": jnp.ones(2)}),
        "update, params": lambda: update(grads, state, params),
        "update, grads": lambda: update(grads | dense, state, plain_params),
        "update, state": lambda: update(grads, jax.tree.map(convert, state), plain_params),
        "shard_params": lambda: te.sharding.shard_params(params, mesh, rules),
    }


@pytest.mark.parametrize("door", doors(np.asarray))
def test_arrays_in_another_byte_order_or_with_a_mask_are_read_right_or_refused(door):
    swapped = lambda array: array.astype(array.dtype.newbyteorder())
    jax.tree.map(np.testing.assert_array_equal, doors(swapped)[door](), doors(np.asarray)[door]())
    with pytest.raises(TypeError, match=r"wanted an array without a mask \(fill it first: "):
        doors(np.ma.masked_array)[door]()


def test_bad_arguments_of_update_raise_errors():
    params, optimizer = {"t": jnp.ones([5, 2])}, optax.adam(RATE)
    state, grads = (
        optimizer.init(params),
        {"t": te.rows.RowGradient(jnp.array([1]), jnp.ones([1, 2]), 5)},
    )
    update = functools.partial(te.rows.update, optimizer)
    expect(
        ValueError,
        "grads: wanted a tree as params, with RowGradient for some tables",
        lambda: update({}, state, params),
    )
    other = {"t": te.rows.RowGradient(jnp.array([1]), jnp.ones([1, 2]), 6)}
    expect(
        ValueError,
        "grads: wanted values [1, 2] of a table [5, 2], got values [1, 2] of one [6, 2]",
        lambda: update(other, state, params),
    )
    message = "grads: wanted values [2, 2] of a table [5, 2], got values [1, 2] of one [5, 2]"
    expect(ValueError, message, lambda: te.rows.RowGradient([1, 2], jnp.ones([1, 2]), 5))
    expect(
        ValueError,
        "state: wanted that of optimizer.init(params)",
        lambda: update(grads, optax.sgd(1.0).init(params), params),
    )
    expect(TypeError, "state: wanted an array, got object", lambda: update(grads, object(), params))
    for other in (None, optax.adam):
        message = f"optimizer: wanted an optax.GradientTransformation, got {type(other).__name__}"
        expect(TypeError, message, lambda other=other: te.rows.update(other, grads, state, params))
