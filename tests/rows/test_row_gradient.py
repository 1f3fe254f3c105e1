"""A gradient of some rows means what the dense gradient means, and never meets other rows
unnoticed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near
from refused import pattern
from steps import add

import transformer_embed as te

PARAMS = {"t": np.ones([1000, 2], np.float32), "w": np.ones([3, 2], np.float32)}
SGD = optax.sgd(0.25)


def rows(ids, scale=1.0):
    """Gradients of one number, and of zeros for padding."""
    ids = np.array(ids, int)
    ones = np.where(ids[:, None] < 1000, np.ones(2, np.float32), 0)
    return {"t": te.rows.RowGradient(ids, scale * ones, 1000), "w": scale * PARAMS["w"]}


def dense(ids, values):
    """The table's gradient, which drops padding."""
    table = np.zeros([2000, 2], np.float32)
    np.add.at(table, np.asarray(ids), np.asarray(values))
    return table[:1000]


def from_loss(ids):
    step = te.rows.value_and_grad(lambda p: jnp.sum(te.lookup(p["t"], ids)), ids={"t": ids})
    return step(PARAMS)[1]


@pytest.mark.parametrize("ids", [[3, 3], [5, 2], [-1, 3]])
def test_ids_made_by_hand_must_ascend(ids):
    message = (
        r"^grads: wanted row ids that ascend from 0 or above, each of them once, got \[-?\d, \d\]$"
    )
    with pytest.raises(ValueError, match=message):
        rows(ids)


@pytest.mark.slow
def test_the_sum_scale_and_norm_are_those_of_the_dense_gradient():
    @jax.jit
    def sums(scale):
        some, more = rows([1, 3, 1000], 1.0), rows([3, 998, 1001], scale)
        total = add(some, more)
        halves = jax.tree.map(lambda g: g / 2, total)
        assert len(jax.tree.leaves(total)) == 3  # the rows, their fingerprint, and w
        clip = optax.clip_by_global_norm(0.5)
        clipped, _ = clip.update({"t": total["t"]}, optax.EmptyState())
        return [(g["t"].ids, g["t"].values) for g in (some, more, total, halves, clipped)]

    some, more, total, halves, clipped = (dense(*each) for each in sums(3.0))
    equal(total, some + more)
    equal(halves, total / 2)
    near(clipped, 0.5 * total / np.linalg.norm(total), rtol=1e-6)


def test_tree_map_adds_gradients_of_the_same_rows_alone():
    with pytest.raises(ValueError, match=r"jax.tree.map adds gradients of different ids"):
        jax.tree.map(jnp.add, rows([1, 2]), rows([3, 4]))
    same = jax.tree.map(jnp.add, rows([1, 2]), rows([1, 2], 2.0))
    equal(same["t"].trusted_values(), 3)


def test_gradients_of_other_tables_are_not_added():
    one = te.rows.RowGradient([1], jnp.ones([1, 2]), 5)
    for other in (jnp.ones([5, 2]), te.rows.RowGradient([1], jnp.ones([1, 2]), 6)):
        with pytest.raises(
            TypeError, match=r"^grads: wanted rows of the same table, \[5, 2\], got "
        ):
            one + other


def test_a_number_is_no_rows_of_values():
    with pytest.raises(ValueError, match=r"^values: wanted shape \[k, d\], got shape \[\]"):
        te.rows.RowGradient([1], 1.5, 9)


@pytest.mark.slow
@pytest.mark.parametrize("leave", [jax.jit, jax.vmap])
def test_a_gradient_that_left_its_trace_names_the_way(leave):
    left = leave(from_loss)(np.array([[0], [3]]))
    message = (
        r"^grads: wanted a RowGradient of this jit, got one that left its jit or vmap \(call "
        r"te\.rows\.value_and_grad and te\.rows\.apply_gradients in one jit, or return its ids and values\)$"
    )
    update = lambda grads: te.rows.apply_gradients(SGD, grads, SGD.init(PARAMS), PARAMS)
    for use in (lambda grads: add(grads, grads), update, jax.jit(update)):
        with pytest.raises(TypeError, match=message):
            use(left)


def test_a_gradient_that_is_known_keeps_ids_that_are_traced():
    """Of a loss that reads no row, vmap traces only the ids."""

    def step(ids):
        grads = te.rows.value_and_grad(lambda params: jnp.zeros(()), ids={"t": ids})(PARAMS)[1]
        doubled = jax.tree.map(lambda leaf: 2 * leaf, grads)
        return te.rows.apply_gradients(SGD, doubled, SGD.init(PARAMS), PARAMS)[0]["t"]

    for updated in jax.vmap(step)(np.array([[0, 1], [3, 3]])):
        equal(updated, PARAMS["t"])


def test_a_scan_that_carries_a_gradient_names_the_way():
    def body(grads, ids):
        return add(grads, from_loss(ids)), None

    with pytest.raises(TypeError, match=r"scan over the batches inside the loss of te\.rows\.v"):
        jax.lax.scan(body, rows([1, 2]), np.array([[1, 2], [3, 4]]))


@pytest.mark.slow
def test_a_gradient_without_rows_changes_no_table():
    none, adam = rows([]), optax.adam(0.1)
    after, _ = te.rows.apply_gradients(adam, none, adam.init(PARAMS), PARAMS)
    equal(after["t"], PARAMS["t"])
    assert add(none, rows([3]))["t"].ids.tolist() == [3]


def test_a_gradient_from_outside_is_a_constant_of_the_program_and_the_next_is_another():
    run = jax.jit(
        lambda params, grads: te.rows.apply_gradients(SGD, grads, SGD.init(params), params)[0]
    )
    for ids in ([0, 3, 701], [1, 3, 999]):
        equal(np.flatnonzero(run(PARAMS, rows(ids))["t"][:, 0] != 1), ids)


def test_rows_added_to_a_table_as_optax_does_name_the_function_to_call():
    message = pattern("params: ... te.rows.apply_gradients(...), got ... and RowGradient")
    updates, _ = SGD.update(rows([1]), SGD.init(PARAMS), PARAMS)
    for convert in (jnp.asarray, np.asarray):
        with pytest.raises(TypeError, match=message):
            optax.apply_updates(jax.tree.map(convert, PARAMS), updates)
