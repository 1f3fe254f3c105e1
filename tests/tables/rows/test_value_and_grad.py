"""Which rows a loss sees in a table's place, for which ids and bounds."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import equal, near
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer_embed as te
from transformer_embed._src.tables.rows.marks import without_marks

TABLE = np.arange(10, dtype=np.float32)[:, None] * np.ones(2, np.float32)


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


@pytest.mark.slow
@settings(max_examples=10)
@given(st.lists(st.integers(-3, 12), min_size=8, max_size=8), st.sampled_from([1, 3, None]))
def test_taken_rows_are_the_smallest_distinct_ones_then_padding(ids, max_rows):
    rows = taken_rows(TABLE, np.array(ids), max_rows)
    size = max_rows or 8
    want = np.unique(np.clip(ids, 0, 9))[:size]
    assert rows.ids.shape == (size,)
    equal(rows.ids[: len(want)], want)
    equal(rows.ids[len(want) :], 10 + np.arange(len(want), size))
    equal(rows.values[: len(want), 0], want)


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_every_id_finds_its_row_or_nan(size):
    held = np.sort(np.random.default_rng(size).permutation(100)[:size])
    table, every = np.arange(100, dtype=np.float32)[:, None], np.arange(100)
    found = te.lookup(taken_rows(table, held), every)[:, 0]
    equal(found, np.where(np.isin(every, held), every, np.nan))


def test_ids_of_any_width_take_the_row_that_they_name():
    # jit would cut ids of 64 bits that it is given.
    far = jax.jit(lambda t: taken({"t": t}, {"t": np.array([2**32 + 5])})[0]["t"].ids)(TABLE)
    assert far.tolist() == [9]
    assert taken_rows(TABLE, np.array([7, -128, 5], np.int8)).ids.tolist() == [0, 5, 7]
    only = taken_rows(TABLE[:1], np.array([0, 0, 3]))
    assert (only.ids.tolist(), without_marks(only.values).tolist()) == ([0], [[0, 0]])


@pytest.mark.slow
def test_tables_in_lists_and_tuples_have_ids_and_bounds_in_lists_and_tuples():
    params, ids = {"e": [TABLE, (TABLE, TABLE)], "w": TABLE}, {"e": [None, ([3], [1, 2])]}

    def loss(params):
        unread, (first, second) = params["e"]
        return te.lookup(first, [3]).sum() + te.lookup(second, [1, 2]).sum() + unread.sum()

    step = te.rows.value_and_grad(loss, ids=ids, max_rows={"e": [None, (None, 1)]})
    value, grads = step(params)
    assert np.isnan(value)
    assert grads["e"][0].shape == (10, 2)
    assert [grad.ids.tolist() for grad in grads["e"][1]] == [[3], [1]]
    for max_rows in ({"e": [2]}, {"e": 2}, [2]):
        with pytest.raises(ValueError, match=r"^params\S*: wanted a table"):
            te.rows.value_and_grad(loss, ids=ids, max_rows=max_rows)(params)


NONE = "wanted a table, since ids or max_rows has it, got none among params['m']['t']"
ERRORS = {
    f"params['m']['x']: {NONE}": {"ids": {"m": {"x": [1]}}},
    f"params['m']: {NONE}": {"ids": {"m": [1]}},
    "params['v']: wanted shape [vocab_size, d] with at least one row, got shape [5]": {
        "ids": {"v": [1]}
    },
    "params['i']: wanted a floating dtype of 16 to 64 bits, got int32": {"ids": {"i": [1]}},
    "ids: wanted an integer dtype, got float64": {"ids": {"m": {"t": [1.5]}}},
    "max_rows: wanted an int of at least 1, got 0": {"ids": {"m": {"t": [1]}}, "max_rows": 0},
    "params['v']: wanted a table in ids, since max_rows has it, got none": {
        "ids": {"m": {"t": [1]}},
        "max_rows": {"v": 2},
    },
    "table: wanted at most 2147483645 rows, to take 2 of them, got 2147483646": {
        "ids": {"huge": [1, 2]}
    },
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments_raise_errors(message):
    shapes = {
        "i": ([5, 2], jnp.int32),
        "v": ([5], jnp.float32),
        "huge": ([2**31 - 2, 1], "float32"),
    }
    params = {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()}
    params["m"] = {"t": jnp.ones([5, 2])}
    with pytest.raises((TypeError, ValueError)) as error:
        jax.eval_shape(functools.partial(taken, **ERRORS[message]), params)
    assert message in str(error.value)


def test_the_largest_table_that_int32_can_count_is_taken():
    largest = {"t": jax.ShapeDtypeStruct([2**31 - 3, 1], jnp.float32)}
    jax.eval_shape(functools.partial(taken, ids={"t": [1, 2]}), largest)


# --- models

IDS = np.array([[5, 9, 5, 0], [11, 1, 0, 0]])
KINDS = np.array([[0, 1, 1, 0], [0, 0, 0, 0]])


def model(ids, kinds):
    def embedded(ids, kinds):
        config = te.EmbedderConfig(23, 8, pad_id=0, num_token_types=2, scheme=te.Learned(16))
        return te.TransformerEmbedding(config)(ids, is_training=False, token_types=kinds)

    x = hk.remat(embedded)(ids, kinds)
    return hk.experimental.layer_stack(2)(lambda x: jax.nn.tanh(hk.Linear(8)(x)))(x)


@pytest.mark.slow
def test_a_model_with_remat_and_a_layer_stack_reads_rows_as_it_reads_tables():
    net = hk.without_apply_rng(hk.transform(model))
    rng, shapes = np.random.default_rng(0), jax.eval_shape(net.init, jax.random.key(0), IDS, KINDS)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    ids_of = {(23, 8): IDS, (2, 8): KINDS, (16, 8): np.arange(4)}
    ids = {
        module: {name: ids_of[leaf.shape] for name, leaf in inside.items() if leaf.ndim == 2}
        for module, inside in params.items()
        if "layer_stack" not in module
    }
    assert len(jax.tree.leaves(ids)) == 3

    def loss(params):
        return jnp.mean(net.apply(params, IDS, KINDS) ** 2)

    @jax.jit
    def both(params):
        value, grads = te.rows.value_and_grad(loss, ids=ids)(params)
        for module, inside in ids.items():
            for name in inside:
                rows = grads[module][name]
                table = jnp.zeros(rows.shape).at[rows.ids].set(rows.values, mode="drop")
                grads[module] = grads[module] | {name: table}
        return (value, grads), jax.value_and_grad(loss)(params)

    found, expected = both(params)
    near(found, expected, rtol=1e-5, atol=1e-5)
