"""Arguments of `te.rows`: names of tables, ids and bounds of each kind, and errors by what they name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import near
from jax import P
from meshes import AUTO, EXPLICIT, mesh_of, put
from refused import each_refused

import transformer_embed as te

TABLE = np.arange(10, dtype=np.float32)[:, None] * np.ones(2, np.float32)
SGD, ADAM = optax.sgd(0.5), optax.adam(0.1)
Shape = jax.ShapeDtypeStruct


def seen(params, ids, **options):
    """The parameters as a loss sees them, and their gradient, of zeros."""
    view = lambda params: (jnp.zeros([]), params)
    (_, seen), grads = te.rows.value_and_grad(view, ids=ids, has_aux=True, **options)(params)
    return seen, grads


def test_ids_of_any_width_take_the_row_that_they_name():
    # jit would cut ids of 64 bits that it is given.
    of_table = lambda table, ids: seen({"t": table}, {"t": ids})[0]["t"]
    wide = jax.jit(lambda table: of_table(table, np.array([2**32 + 5])).ids)
    assert wide(TABLE).tolist() == [9]
    assert of_table(TABLE, np.array([7, -128, 5], np.int8)).ids.tolist() == [0, 5, 7]
    only = of_table(TABLE[:1], [0, 0, 3])
    assert (only.ids.tolist(), only.values.tolist()) == ([0], [[0, 0]])


TREE = {"a/~/b": {"e": TABLE, "w": TABLE[0]}, "c": {"e": TABLE, "d/e": TABLE}}
TREE["l"] = [TABLE, (TABLE, TABLE)]
# Ids, the most rows, and the rows of each table.
NAMED = [
    ({"b/e": [1, 2]}, {"b/e": 1}, {"a/~/b/e": [1]}),
    ({"a/~/b/e": [1, 2]}, 1, {"a/~/b/e": [1]}),
    ({"b/e": [1, 2], "d/e": [3, 1]}, None, {"a/~/b/e": [1, 2], "c/d/e": [1, 3]}),
    ({"l/1/0": [3], "1/1": [1, 2]}, {"1/1": 1}, {"l/1/0": [3], "l/1/1": [1]}),
]


@pytest.mark.parametrize(("ids", "max_rows", "expected"), NAMED)
def test_a_table_is_named_by_an_end_of_its_path(ids, max_rows, expected):
    for tree in seen(TREE, ids, max_rows=max_rows):
        leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "ids"))
        name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        rows = {name(path): leaf.ids.tolist() for path, leaf in leaves if hasattr(leaf, "ids")}
        assert rows == expected


def test_the_largest_table_that_int32_can_count_is_taken():
    shapes = {"t": Shape([2**31 - 3, 1], jnp.float32)}
    jax.eval_shape(functools.partial(seen, ids={"t": [1, 2]}), shapes)


# --- errors


def view(ids, **options):
    params = {
        "i": Shape([5, 2], jnp.int32),
        "v": Shape([5], jnp.float32),
        "huge": Shape([2**31 - 2, 1], jnp.float32),
        "m": {"t": Shape([5, 2], jnp.float32)},
        "n": {"t": Shape([5, 2], jnp.float32)},
    }
    return jax.eval_shape(functools.partial(seen, ids=ids, **options), params)


SMALL = {"t": jnp.ones([5, 2])}
GRADS = {"t": te.rows.RowGradient([1], jnp.ones([1, 2]), 5)}


def update(optimizer=ADAM, grads=GRADS, state=None, params=SMALL):
    state = ADAM.init(SMALL) if state is None else state
    return te.rows.apply_gradients(optimizer, grads, state, params)


def left(leave):
    """A gradient that left its trace."""
    gradient = lambda ids: te.rows.value_and_grad(read, ids={"t": ids})(SMALL)[1]
    read = lambda params: jnp.sum(te.lookup(params["t"], [0]))
    return leave(gradient)(np.array([[0], [3]]))


one_row = te.rows.RowGradient
VALUE_ERRORS = [
    (lambda: view({"x": [1]}), "ids: wanted one of huge, i, m/t, n/t, or an end that only one of them has, got x"),
    (lambda: view({"t": [1]}), "ids: wanted one of m/t, n/t, or an end that only one of them has, got t"),
    (lambda: seen({"x": SMALL}, {"t": [1], "x/t": [3]}), "ids: wanted one name of x/t, got t and x/t"),
    (lambda: view({"v": [1]}), "v: wanted shape [vocab_size, d] with at least one row, got shape [5]"),
    (lambda: view({"m/t": [1]}, max_rows=0), "max_rows: wanted an int of at least 1, got 0"),
    (lambda: view({"m/t": [1]}, max_rows={"v": 2}), "max_rows: ... got v"),
    (lambda: view({"huge": [1, 2]}), "table: wanted at most 2147483645 rows, to take 2 of them, got 2147483646"),
    (lambda: view({"m/t": [1]}, capacity=1.0), "capacity: wanted a table in ids that explicit mesh axes split"),
    (lambda: view({"m/t": [1]}, capacity=0), "capacity: wanted a number above 0 that float32 holds"),
    (lambda: update(grads={}), "params: wanted no others, got t [5, 2]"),
    (lambda: update(params={"t": jnp.ones([6, 2])}), "params: wanted t [5, 2], got t [6, 2]"),
    (lambda: update(state=SGD.init(SMALL)), "state: wanted 0/count [], 0/mu/t [5, 2], 0/nu/t [5, 2], got none"),
    (lambda: update(state=ADAM.init({"t": jnp.ones([6, 2])})), "state: wanted 0/mu/t [5, 2], 0/nu/t [5, 2], got 0/mu/t [6, 2], 0/nu/t "),
    (lambda: update(state=list(ADAM.init(SMALL))), "state: wanted the tree, PyTreeDef((CustomNode"),
    (lambda: one_row([3, 3], jnp.ones([2, 2]), 9), "ids: wanted row ids that ascend from 0 ... got [3, 3]"),
    (lambda: one_row([-1, 3], jnp.ones([2, 2]), 9), "ids: wanted row ids that ascend from 0 ... got [-1, 3]"),
    (lambda: one_row([1, 2], jnp.ones([1, 2]), 9), "values: wanted shape [2, 'd'], a row for each id, got shape [1, 2]"),
    (lambda: jax.tree.map(jnp.add, GRADS, {"t": one_row([2], jnp.ones([1, 2]), 5)}), "...jax.tree.map adds gradients of different ids"),
]  # fmt: skip
OF_ANOTHER = "grads: wanted rows of the same table, [5, 2], got"
LEFT = "grads: wanted a RowGradient of this jit, got one that left its jit or vmap (call te.rows.value_and_grad and te.rows.apply_gradients in one"
TYPE_ERRORS = [
    (lambda: view({"i": [1]}), "i: wanted a floating dtype of 16 to 64 bits, got int32"),
    (lambda: view([1]), "ids: wanted a dict by the names of tables, got list [1]"),
    (lambda: view({"m/t": [1.5]}), "ids: wanted an integer dtype, got float64"),
    (lambda: te.rows.value_and_grad(None, ids={}), "loss: wanted a function, got None"),
    (lambda: te.rows.value_and_grad(sum, ids={}, has_aux=2), "has_aux: wanted a Python bool ... got int 2"),
    (lambda: update(grads=SMALL, params=GRADS), "params['t']: wanted an array, got RowGradient"),
    (lambda: update(state=object()), "state: wanted an array, got object"),
    (lambda: update(optax.adam), "optimizer: wanted an optax.GradientTransformation, got function"),
    (lambda: GRADS["t"] + jnp.ones([5, 2]), OF_ANOTHER),
    (lambda: GRADS["t"] + one_row([1], jnp.ones([1, 2]), 6), OF_ANOTHER),
    (lambda: optax.apply_updates(SMALL, SGD.update(GRADS, SGD.init(SMALL))[0]), "...RowGradient"),
    (lambda: jax.lax.scan(lambda grads, ids: (left(jax.jit), None), GRADS, np.arange(2)), "...scan over the batches inside the loss"),
    (lambda: update(grads=left(jax.jit)), LEFT),
    (lambda: update(grads=left(jax.vmap)), LEFT),
]  # fmt: skip


def test_bad_arguments_are_refused():
    each_refused(ValueError, VALUE_ERRORS)
    each_refused(TypeError, TYPE_ERRORS)


# --- errors on a mesh

ROWS, WIDTH, BOTH = 304, 8, ("data", "model")
LARGE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
IDS = np.arange(8, dtype=np.int32)


def loss(params, ids):
    return jnp.sum(te.lookup(params["t"], ids))


def by_rows(table, ids, capacity=1.0, optimizer=SGD, state=None):
    params = {"t": table}
    grads = te.rows.value_and_grad(loss, ids={"t": ids}, capacity=capacity)(params, ids)[1]
    return te.rows.apply_gradients(optimizer, grads, state or optimizer.init(params), params)


def inside(table, ids):
    step = jax.shard_map(by_rows, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"})
    return step(table, ids)


def mean(table, ids):
    def of_one(_):
        step = te.rows.value_and_grad(loss, ids={"t": ids}, capacity=1.0)
        return te.rows.pmean(step({"t": table}, ids)[1], "i")["t"].values

    return jax.vmap(of_one, axis_name="i")(jnp.zeros(2))


def of_others(table, ids):
    return te.rows.with_exchange(lambda params: loss(params, IDS), ids={"t": ids})({"t": table})


def of_whole_state(table, ids):
    state = jax.tree.map(lambda leaf: put(MESH, np.asarray(leaf)), ADAM.init({"t": LARGE}))
    return by_rows(table, ids, None, ADAM, state)


def load(table, ids, **options):
    return te.rows.exchange_load(table, np.asarray(ids), **options)


MESH = mesh_of((2, 4), BOTH, EXPLICIT)
ON_MESH = [
    (by_rows, P(None, "model"), P(BOTH), "table: ... to exchange rows, got an array split as"),
    (by_rows, P(BOTH), P("data"), "ids: wanted split over the mesh axes of the table's rows, ('data', 'model'), to exch"),
    (of_others, P("model"), P(BOTH), "ids: wanted split over ('model', 'data'), as the ids of the step whose rows are ex"),
    (inside, P("model"), P(BOTH), "capacity: wanted None inside of a shard_map over some of the mesh axes, got 1.0"),
    (of_whole_state, P("model"), P(BOTH), "state: wanted [304, 8] split as its table, ... (jax.device_put), got"),
    (mean, P("model"), P(BOTH), "grads: wanted rows that every device has, got those that devices exchanged"),
    (functools.partial(load, batch_axes=["x"]), P("model"), P(), "batch_axes: wanted a tuple of axes of the mesh"),
    (lambda table, ids: load(table, IDS[:5]), P("model"), P(), "ids: wanted a first dimension that 8 devices divide, got shape [5]"),
    (functools.partial(load, config=te.EmbedderConfig(33, 8)), P("model"), P(), "config: wanted the rows of the table,"),
    (lambda table, ids: load(LARGE, ids), P(), P(), "table: wanted an array, or its shape, on a mesh, got"),
]  # fmt: skip


def test_what_cannot_be_exchanged_or_updated_is_named():
    calls = [
        (lambda row=row: row[0](put(MESH, LARGE, *row[1]), put(MESH, IDS, *row[2])), row[3])
        for row in ON_MESH
    ]
    with jax.set_mesh(MESH):
        each_refused((TypeError, ValueError), calls)
    with jax.set_mesh(mesh_of((2, 4), BOTH, AUTO)), pytest.raises(ValueError, match="explicit_ax"):
        jax.eval_shape(by_rows, LARGE, IDS)


def test_a_split_table_outside_of_its_mesh_is_named():
    """It was an unbound axis, or an ambiguous sharding."""
    table = put(MESH, LARGE, "model")
    x, ids = np.ones((2, WIDTH), np.float32), np.array([1, 2])
    calls = [
        (lambda: te.lookup(table, ids), "ids: wanted ... inside jax.set_mesh(mesh)"),
        (lambda: te.linear_cross_entropy(x, table, ids), "x: wanted ... inside jax.set_mesh(mesh)"),
        (lambda: seen({"t": table}, {"t": ids}), "ids: ... inside jax.set_mesh(mesh)"),
    ]
    each_refused(ValueError, calls)


# --- models


SPREAD = te.Embedder(te.EmbedderConfig(ROWS, WIDTH, spread=True, output=None))


def test_a_loss_that_catches_every_exception_reads_spread_rows():
    def loss(params):
        try:
            return jnp.sum(SPREAD.apply(params, None, IDS, is_training=False))
        except Exception:
            return jnp.zeros([])

    params = SPREAD.init(jax.random.key(0))
    value, _ = te.rows.value_and_grad(loss, ids={"embeddings": IDS})(params)
    assert value != 0
    near(value, loss(params), rtol=1e-5)


def test_two_orders_of_one_table_are_named():
    name = "transformer_embedding/~/token_embedding"

    def both(params):
        x = SPREAD.apply(params, None, IDS, is_training=False)
        return jnp.sum(x + te.lookup(params[name]["embeddings"], IDS))

    with pytest.raises(ValueError, match="wanted one order of rows in all lookups"):
        te.rows.value_and_grad(both, ids={"embeddings": IDS})(SPREAD.init(jax.random.key(0)))
