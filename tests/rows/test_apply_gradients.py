"""What no draw of steps has: gradients made by hand, more rows than a block, arguments that change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near
from steps import add

import transformer_embed as te
from transformer_embed._src.rows import update_tables
from transformer_embed._src.rows.fingerprint import fingerprint, fits

PARAMS = {"t": np.ones([1000, 2], np.float32), "w": np.ones([3, 2], np.float32)}
SGD = optax.sgd(0.25)


def rows(ids, scale=1.0):
    """Gradients of one number, and of zeros for padding."""
    ids = np.array(ids, int)
    ones = np.where(ids[:, None] < 1000, np.ones(2, np.float32), 0)
    return {"t": te.rows.RowGradient(ids, scale * ones, 1000), "w": scale * PARAMS["w"]}


def update(grads, params=PARAMS, optimizer=SGD):
    return te.rows.apply_gradients(optimizer, grads, optimizer.init(params), params)[0]


def total(params, ids):
    return jnp.sum(jnp.tanh(te.lookup(params["t"], ids))) + jnp.sum(params["w"])


def gradient(params, ids, loss=total):
    return te.rows.value_and_grad(loss, ids={"t": ids})(params, ids)[1]


def dense(row_indices, values):
    """The table's gradient, which drops padding."""
    table = np.zeros([2000, 2], np.float32)
    np.add.at(table, np.asarray(row_indices), np.asarray(values))
    return table[:1000]


@pytest.mark.slow
def test_sum_scale_and_norm_equal_dense_gradient():

    @jax.jit
    def changed(one, *of_same_ids):
        both = add(rows([1, 3, 1000], one), rows([3, 998, 1001], 3 * one))
        assert len(jax.tree.leaves(both)) == 3  # the rows, their fingerprint, and w
        clip = optax.clip_by_global_norm(0.5)
        clipped, _ = clip.update({"t": both["t"]}, optax.EmptyState())
        halved = jax.tree.map(lambda g: g / 2, both)
        found = [(each["t"].row_indices, each["t"].values) for each in (both, halved, clipped)]
        return found, jax.tree.map(jnp.add, *of_same_ids)["t"].trusted_values()

    found, same = changed(np.float32(1), rows([1, 2]), rows([1, 2], 2.0))
    both, halved, clipped = (dense(*arrays) for arrays in found)
    expected = np.zeros([1000, 2])
    expected[[1, 3, 998]] = [[1], [1 + 3], [3]]
    equal(both, expected)
    equal(halved, expected / 2)
    near(clipped, 0.5 * expected / np.linalg.norm(expected), rtol=1e-6)
    equal(same, 3)


@pytest.mark.slow
def test_a_gradient_without_rows_changes_no_table():

    @jax.jit
    def updated_and_added(none):
        added = add(none, rows([3]))
        return update(none, optimizer=optax.adam(0.1))["t"], added["t"].row_indices

    updated, row_indices = updated_and_added(rows([]))
    equal(updated, PARAMS["t"])
    assert row_indices.tolist() == [3]


@pytest.mark.parametrize("params", [{}, {"s": np.float32(2)}])
def test_a_tree_may_have_no_axis(params):
    equal(update(jax.tree.map(np.ones_like, params), params), dict.fromkeys(params, 1.75))


def test_a_gradient_from_outside_is_a_constant_of_the_program_and_the_next_is_another():
    run = jax.jit(lambda params, grads: update(grads, params))
    for ids in ([0, 3, 701], [1, 3, 999]):
        equal(np.flatnonzero(np.asarray(run(PARAMS, rows(ids))["t"])[:, 0] != 1), ids)


@pytest.mark.slow
def test_a_gradient_that_is_known_keeps_ids_that_are_traced():
    """Of a loss that reads no row, vmap traces only the ids."""

    def step(ids):
        grads = gradient(PARAMS, ids, lambda params, _: jnp.zeros(()))
        return update(jax.tree.map(lambda leaf: 2 * leaf, grads))["t"]

    updated = jax.jit(jax.vmap(step))(np.array([[0, 1], [3, 3]]))
    equal(updated, np.stack([PARAMS["t"]] * 2))


@pytest.mark.slow
def test_a_fingerprint_fits_its_ids_alone_and_keeps_its_ratios():
    """Also where one of many devices has other ids."""
    ids, values = np.int32([1, 4, 7, 20, 21]), np.ones([5, 3], np.float32)
    mark = np.asarray(fingerprint(ids, values))
    for scale in (1, -1, 1e-12, 2.0**15, 0.3, 1e30):
        for dtype in (np.float32, jnp.bfloat16):
            factor = np.asarray(scale, dtype)
            assert fits(ids, values.astype(dtype) * factor, mark.astype(dtype) * factor)
    for others in (ids + 1, ids[::-1], ids + np.eye(5, dtype=np.int32)[2], [*ids, 22], ids[:0]):
        other_mark = fingerprint(np.int32(others), np.ones([len(others), 3], np.float32))
        for devices in (1, 2, 30_000):
            mean = ((devices - 1) * np.float64(mark) + np.float64(other_mark)) / devices
            assert not fits(ids, values, mean.astype(np.float32))
    for changed in (np.sign(mark), 0 * mark, mark.astype("float16"), mark + np.float32(1e-20)):
        assert not fits(ids, values, changed)
    assert not fits(ids, values, mark * np.float32(np.inf))


def scaled_values(shape, scale):
    """Values of both signs, some of them 0."""
    values = np.random.default_rng(0).normal(size=shape) * scale
    return np.where(values > 2 * scale, 0, values).astype(np.float32)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-20, 1e-30, 1e10])
@pytest.mark.parametrize("shape", [(1, 1), (200, 16)])
def test_a_fingerprint_shows_values_that_were_scaled_by_another_number(shape, scale):
    ids, values = np.arange(shape[0], dtype=np.int32), scaled_values(shape, scale)
    mark_of = lambda values: np.asarray(fingerprint(ids, values))
    mark = mark_of(values)
    for dtype in (np.float32, jnp.bfloat16):
        tenth = np.asarray(0.1, dtype)
        assert fits(ids, tenth * values.astype(dtype), tenth * mark.astype(dtype))
        for factor in np.asarray([0.1, 0.8, 1.5, -1.0], dtype):
            is_right = fits(ids, factor * values.astype(dtype), mark.astype(dtype))
            # Sums of smaller values are zero in the fingerprint.
            assert not is_right or scale == 1e-30
    # The values of a small table are float16, and those of the fingerprint are not.
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    assert fits(ids, narrow * np.float16(1e-3), mark_of(narrow) * np.float32(1e-3))
    others = scaled_values(shape, 3 * scale)[::-1]
    mean = (mark + mark_of(others)) / 2
    assert fits(ids, (values + others) / 2, mean)
    assert not fits(ids, (values + 3 * others) / 2, mean) or scale == 1e-30


OWN_SIZES = {
    "a block's RMS": lambda grads: optax.clip_by_block_rms(0.1).update(grads, None)[0],
    "a norm": lambda grads: jax.tree.map(lambda leaf: leaf / jnp.linalg.norm(leaf), grads),
    "a mean": lambda grads: jax.tree.map(lambda leaf: leaf / jnp.mean(leaf), grads),
}


def test_a_gradient_that_was_scaled_by_its_own_size_updates_rows_by_nan():
    """A table's size is not that of the rows of a batch."""

    @jax.jit
    def updates(scale):
        grads = {name: change(rows([1, 3], scale)) for name, change in OWN_SIZES.items()}
        return update(grads, dict.fromkeys(OWN_SIZES, PARAMS))

    for name, after in updates(np.float32(10)).items():
        equal(np.isnan(after["t"]).any(axis=1).nonzero()[0].tolist(), [1, 3])
        assert np.isfinite(after["w"]).all(), name


# --- steps


@pytest.mark.slow
def test_rows_are_updated_in_blocks_also_all_of_a_table():
    """Some gradients are zeros, and the last block is not full. The proof tells rows from other
    sizes: the number that is updated at a time is never the table's."""
    # The first row that is read, and the number of rows, of each table.
    sizes = {"one": (0, 1), "block": (0, 1024), "more": (0, 1025)}
    rng, optimizer = np.random.default_rng(0), optax.sgd(0.5, momentum=0.9)
    tables = {name: np.float32(rng.normal(size=(size, 2))) for name, (_, size) in sizes.items()}
    weights = {name: np.float32(rng.normal(size=table.shape)) for name, table in tables.items()}
    ids = {name: np.arange(*size) for name, size in sizes.items()}
    for each in weights.values():
        each[3::7] = 0

    def loss(params):
        read = {name: te.lookup(params[name], each) for name, each in ids.items()}
        return sum(jnp.vdot(rows, weights[name][ids[name]]) for name, rows in read.items())

    @jax.jit
    def step(params, state):
        _, grads = te.rows.value_and_grad(loss, ids=ids)(params)
        return te.rows.apply_gradients(optimizer, grads, state, params)

    after, state = tables, optimizer.init(tables)
    for _ in range(2):
        after, state = step(after, state)
    # Not in place: jax may still read the first tables.
    expected = {name: table.copy() for name, table in tables.items()}
    for name, read in ids.items():
        expected[name][read] -= 0.5 * (1 + 1.9) * weights[name][read]
    near(after, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_optimizer_that_closes_over_a_value_reads_it_at_each_trace():
    rate = [1.0]
    optimizer = optax.stateless(lambda grads, _: jax.tree.map(lambda g: -rate[0] * g, grads))
    for rate[0] in (0.5, 0.25):
        run = jax.jit(lambda grads: update(grads, optimizer=optimizer))
        assert np.asarray(run(rows([0]))["t"])[0, 0] == 1 - rate[0]


def test_extra_arguments_may_be_anything_that_the_optimizer_takes():
    def double(updates, state, params=None, *, flag, mode, value):
        assert (flag, mode) == (True, "double")
        return jax.tree.map(lambda g: -2 * value * g, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), double)
    extra = {"flag": True, "mode": "double", "value": np.float32(0.25)}
    update = lambda: te.rows.apply_gradients(optimizer, rows([1, 2]), (), PARAMS, **extra)
    after, _ = jax.jit(update)()
    equal(np.asarray(after["t"])[:4, 0], [1, 0.5, 0.5, 1])


@pytest.mark.slow
def test_a_step_works_under_vmap_over_seeds():
    decayed = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))

    def one(ids):
        return update(gradient(PARAMS, ids), PARAMS, decayed)["t"]

    ids = np.array([[0, 3, 3], [5, 0, 8]])
    both = jax.jit(lambda ids: (jax.vmap(one)(ids), jax.lax.map(one, ids)))
    found, expected = jax.device_get(both(ids))
    assert (expected != 1).any(axis=2).sum(axis=1).tolist() == [2, 3]
    near(found, expected, rtol=1e-6, atol=1e-6)


def test_padding_of_a_block_has_indices_above_all_others():
    """Writes are told that indices ascend and are distinct."""
    fill = jax.jit(update_tables._fill_last_block, static_argnums=(2, 3))
    padded_indices, padded_values = fill(np.int32([1, 6, 7]), np.ones([3, 2], np.float32), 5, 6)
    assert padded_indices.tolist() == [1, 6, 7, 8, 9]
    equal(padded_values, [[1, 1]] * 3 + [[0, 0]] * 2)
