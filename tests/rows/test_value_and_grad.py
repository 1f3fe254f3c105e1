"""Which rows a loss sees in a table's place, for which ids and bounds."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import near

import transformer_embed as te

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


def test_ids_of_any_width_take_the_row_that_they_name():
    # jit would cut ids of 64 bits that it is given.
    far = jax.jit(lambda table: taken({"t": table}, {"t": np.array([2**32 + 5])})[0]["t"].ids)
    assert far(TABLE).tolist() == [9]
    assert taken_rows(TABLE, np.array([7, -128, 5], np.int8)).ids.tolist() == [0, 5, 7]
    only = taken_rows(TABLE[:1], np.array([0, 0, 3]))
    assert (only.ids.tolist(), only.values.tolist()) == ([0], [[0, 0]])


@pytest.mark.slow
def test_tables_in_lists_and_tuples_have_ids_and_bounds_in_lists_and_tuples():
    params, ids = {"e": [TABLE, (TABLE, TABLE)]}, {"e": [None, ([3], [1, 2])]}
    seen, grads = taken(params, ids, max_rows={"e": [None, (None, 1)]})
    assert seen["e"][0].shape == grads["e"][0].shape == TABLE.shape
    assert [rows.ids.tolist() for rows in (*seen["e"][1], *grads["e"][1])] == [[3], [1]] * 2
    for max_rows in ({"e": [2]}, {"e": 2}, [2]):
        with pytest.raises(ValueError, match=r"^params\S*: wanted a table"):
            taken(params, ids, max_rows=max_rows)


NONE = "wanted a table, where ids or max_rows has an array, got none among params['huge'], params['i'],"
OF_T = {"ids": {"m": {"t": [1]}}}
ERRORS = {
    f"params['m']['x'][0]: {NONE}": {"ids": {"m": {"x": [1]}}},
    f"params['m'][0]: {NONE}": {"ids": {"m": [1]}},
    f"params: {NONE}": {"ids": np.array([1])},
    "params['v']: wanted shape [vocab_size, d] with at least one row, got shape [5]": {
        "ids": {"v": [1]}
    },
    "params['i']: wanted a floating dtype of 16 to 64 bits, got int32": {"ids": {"i": [1]}},
    "ids: wanted an integer dtype, got float64": {"ids": {"m": {"t": [1.5]}}},
    "max_rows: wanted an int of at least 1, got 0": OF_T | {"max_rows": 0},
    "params['v']: wanted a table in ids, since max_rows has it, got none": (
        OF_T | {"max_rows": {"v": 2}}
    ),
    "table: wanted at most 2147483645 rows, to take 2 of them, got 2147483646": {
        "ids": {"huge": [1, 2]}
    },
}
Shape = jax.ShapeDtypeStruct


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments_raise_errors(message):
    params = {
        "i": Shape([5, 2], jnp.int32),
        "v": Shape([5], jnp.float32),
        "huge": Shape([2**31 - 2, 1], jnp.float32),
        "m": {"t": Shape([5, 2], jnp.float32)},
    }
    with pytest.raises((TypeError, ValueError)) as error:
        jax.eval_shape(functools.partial(taken, **ERRORS[message]), params)
    assert message in str(error.value)


def test_a_loss_is_a_function_and_has_aux_a_bool():
    with pytest.raises(TypeError, match=r"^loss: wanted a function, got None$"):
        te.rows.value_and_grad(None, ids={})
    with pytest.raises(TypeError, match=r"^has_aux: wanted a Python bool .*, got int 2$"):
        te.rows.value_and_grad(jnp.sum, ids={}, has_aux=2)


def test_an_error_of_others_that_a_table_meets_says_what_stands_in_its_place():
    step = te.rows.value_and_grad(lambda params: params["t"].shape + 1, ids={"t": [1]})
    with pytest.raises(TypeError) as error:
        step({"t": jnp.ones([5, 2])})
    note = "In the loss, the rows of `ids` stand in the place of params['t']: only lookup reads"
    assert note in error.value.__notes__[0]
    norm = lambda params: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    step = te.rows.value_and_grad(norm, ids={"t": [1]})
    with pytest.raises(TypeError, match=r"^params\['t'\]: wanted to be read by lookup alone"):
        step({"t": jnp.ones([5, 2])})


def test_the_largest_table_that_int32_can_count_is_taken():
    largest = {"t": Shape([2**31 - 3, 1], jnp.float32)}
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
def test_a_model_with_remat_and_a_layer_stack_trains_by_rows_as_densely():
    net, sgd = hk.without_apply_rng(hk.transform(model)), optax.sgd(1.0)
    rng, shapes = np.random.default_rng(0), jax.eval_shape(net.init, jax.random.key(0), IDS, KINDS)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    ids = {"token_embedding": IDS, "token_type_embedding": KINDS}
    ids["learned_positional_encoding"] = np.arange(4)
    ids = {f"transformer_embedding/~/{name}": {"embeddings": each} for name, each in ids.items()}

    def loss(params):
        return jnp.mean(net.apply(params, IDS, KINDS) ** 2)

    @jax.jit
    def both(params):
        value, grads = te.rows.value_and_grad(loss, ids=ids)(params)
        after, _ = te.rows.apply_gradients(sgd, grads, sgd.init(params), params)
        expected, grads = jax.value_and_grad(loss)(params)
        return (value, after), (expected, jax.tree.map(jnp.subtract, params, grads))

    near(*both(params), rtol=1e-5, atol=1e-5)
