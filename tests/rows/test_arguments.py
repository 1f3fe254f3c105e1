"""Arguments of `te.rows`: names of tables, ids and bounds of each kind, and errors by what they name."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn import drawn
from jax import P
from meshes import AUTO, EXPLICIT, mesh_of, put
from refused import each_raises

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
    @jax.jit
    def found(table):
        # Arguments of 64 bits would be cut, and constants are not.
        of_ids = lambda table, ids: seen({"t": table}, {"t": ids})[0]["t"]
        wide, narrow = np.array([2**32 + 5]), np.array([7, -128, 5], np.int8)
        only = of_ids(table[:1], [0, 0, 3])
        wide, narrow = (of_ids(table, ids).row_indices for ids in (wide, narrow))
        return wide, narrow, only.row_indices, only.values

    assert [each.tolist() for each in found(TABLE)] == [[9], [0, 5, 7], [0], [[0, 0]]]


TREE = {"a/~/b": {"e": TABLE, "w": TABLE[0]}, "c": {"e": TABLE, "d/e": TABLE}}
TREE["l"] = [TABLE, (TABLE, TABLE)]
# Ids, the most rows, and the rows of each table.
NAMED = [
    ({"b/e": [1, 2]}, {"b/e": 1}, {"a/~/b/e": [1]}),
    ({"a/~/b/e": [1, 2]}, 1, {"a/~/b/e": [1]}),
    ({"b/e": [1, 2], "d/e": [3, 1]}, None, {"a/~/b/e": [1, 2], "c/d/e": [1, 3]}),
    ({"l/1/0": [3], "1/1": [1, 2]}, {"1/1": 1}, {"l/1/0": [3], "l/1/1": [1]}),
]


def rows_by_name(tree):
    """The row indices of each table of a tree that has rows in its place."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "row_indices"))
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    tables = [(path, leaf) for path, leaf in leaves if hasattr(leaf, "row_indices")]
    return {name(path): leaf.row_indices for path, leaf in tables}


def test_a_table_is_named_by_an_end_of_its_path():
    @jax.jit
    def found(tree):
        """Of each case the rows that the loss sees, and those of the gradient."""
        cases = [seen(tree, ids, max_rows=max_rows) for ids, max_rows, _ in NAMED]
        return [[*map(rows_by_name, trees)] for trees in cases]

    for rows, (_, _, expected) in zip(found(TREE), NAMED, strict=True):
        assert jax.tree.map(np.ndarray.tolist, jax.device_get(rows)) == [expected, expected]


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


SMALL = {"t": jnp.asarray(np.ones([5, 2], np.float32))}


def gradients():
    return {"t": te.rows.RowGradient([1], jnp.ones([1, 2]), 5)}


def update(optimizer=ADAM, grads=None, state=None, params=SMALL):
    grads = gradients() if grads is None else grads
    state = ADAM.init(SMALL) if state is None else state
    return te.rows.apply_gradients(optimizer, grads, state, params)


def read(params):
    return jnp.sum(te.lookup(params["t"], [0]))


def left(leave):
    """A gradient that left its trace."""
    gradient = lambda ids: te.rows.value_and_grad(read, ids={"t": ids})(SMALL)[1]
    return leave(gradient)(np.array([[0], [3]]))


def exported():
    """A step on a batch of any size."""
    (batch,) = jax.export.symbolic_shape("b")
    step = lambda ids: te.rows.value_and_grad(read, ids={"t": ids})(SMALL)[0]
    return jax.export.export(jax.jit(step))(Shape([batch, 2], jnp.int32))


one_row = te.rows.RowGradient
OF_ANOTHER = "grads: wanted rows of the same table, [5, 2], got"
LEFT = "grads: wanted a RowGradient of this jit, got one that left its jit or vmap (call te.rows.value_and_grad and te.rows.apply_gradients in one"
WRONG = {
    'view({"x": [1]})': "ValueError: ids: wanted one of huge, i, m/t, n/t, or an end that only one of them has, got x",
    'view({"t": [1]})': "ValueError: ids: wanted one of m/t, n/t, or an end that only one of them has, got t",
    'seen({"x": SMALL}, {"t": [1], "x/t": [3]})': "ValueError: ids: wanted one name of x/t, got t and x/t",
    'view({"v": [1]})': "ValueError: v: wanted shape [vocab_size, d] with at least one row, got shape [5]",
    'view({"m/t": [1]}, max_rows=0)': "ValueError: max_rows: wanted an int of at least 1, got 0",
    'view({"m/t": [1]}, max_rows={"v": 2})': "ValueError: max_rows: ... got v",
    'view({"huge": [1, 2]})': "ValueError: table: wanted at most 2147483645 rows, to take 2 of them, got 2147483646",
    'view({"m/t": [1]}, capacity=1.0)': "ValueError: capacity: wanted a table in ids that explicit mesh axes split",
    'view({"m/t": [1]}, capacity=0)': "ValueError: capacity: wanted a number above 0 that float32 holds",
    "update(grads={})": "ValueError: params: wanted no others, got t [5, 2]",
    'update(params={"t": jnp.ones([6, 2])})': "ValueError: params: wanted t [5, 2], got t [6, 2]",
    "update(state=SGD.init(SMALL))": "ValueError: state: wanted 0/count [], 0/mu/t [5, 2], 0/nu/t [5, 2], got none",
    'update(state=ADAM.init({"t": jnp.ones([6, 2])}))': "ValueError: state: wanted 0/mu/t [5, 2], 0/nu/t [5, 2], got 0/mu/t [6, 2], 0/nu/t ",
    "update(state=list(ADAM.init(SMALL)))": "ValueError: state: wanted the tree, PyTreeDef((CustomNode",
    "one_row([1, 2], jnp.ones([1, 2]), 9)": "ValueError: values: wanted shape [2, 'd'], a row for each row index, got shape [1, 2]",
    'jax.tree.map(jnp.add, gradients(), {"t": one_row([2], jnp.ones([1, 2]), 5)})': "ValueError: ...jax.tree.map adds gradients of different ids",
    'view({"i": [1]})': "TypeError: i: wanted a floating dtype of 16 to 64 bits, got int32",
    'te.rows.value_and_grad(read, ids={"t": [1]})({"t": np.ma.masked_array(SMALL["t"])})': "TypeError: params['t']: wanted an array without a mask",
    "exported()": "ValueError: ids: wanted a size known while tracing: ... got symbolic shape [b, 2]",
    "view([1])": "TypeError: ids: wanted a dict by the names of tables, got list [1]",
    'view({"m/t": [1.5]})': "TypeError: ids: wanted an integer dtype, got float64",
    "te.rows.value_and_grad(None, ids={})": "TypeError: loss: wanted a function, got None",
    "te.rows.value_and_grad(sum, ids={}, has_aux=2)": "TypeError: has_aux: wanted a Python bool ... got int 2",
    "update(grads=SMALL, params=gradients())": "TypeError: params['t']: wanted an array, got RowGradient",
    "update(state=object())": "TypeError: state: wanted an array, got object",
    "update(optax.adam)": "TypeError: optimizer: wanted an optax.GradientTransformation, got function",
    'gradients()["t"] + jnp.ones([5, 2])': f"TypeError: {OF_ANOTHER}",
    'gradients()["t"] + one_row([1], jnp.ones([1, 2]), 6)': f"TypeError: {OF_ANOTHER}",
    "optax.apply_updates(SMALL, SGD.update(gradients(), SGD.init(SMALL))[0])": "TypeError: ...RowGradient",
    "jax.lax.scan(lambda grads, ids: (left(jax.jit), None), gradients(), np.arange(2))": "TypeError: ...scan over the batches inside the loss",
    "update(grads=left(jax.vmap))": f"TypeError: {LEFT}",
}  # fmt: skip


# Those that only a call outside of jit shows.
WRONG_VALUES = {
    "one_row([3, 3], jnp.ones([2, 2]), 9)": "ValueError: row_indices: wanted row indices that ascend from 0 ... got [3, 3]",
    "one_row([-1, 3], jnp.ones([2, 2]), 9)": "ValueError: row_indices: wanted row indices that ascend from 0 ... got [-1, 3]",
    "update(grads=left(jax.jit))": f"TypeError: {LEFT}",
}  # fmt: skip


def test_bad_arguments_are_refused():
    # Under eval_shape, nothing that comes before an error is compiled.
    jax.eval_shape(lambda: each_raises(WRONG, globals()))
    each_raises(WRONG_VALUES, globals())


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
        _, grads = seen({"t": table}, {"t": ids}, capacity=1.0)
        return te.rows.pmean(grads, "i")["t"].values

    return jax.vmap(of_one, axis_name="i")(jnp.zeros(2))


def of_others(table, ids):
    return te.rows.with_exchange(lambda params: loss(params, IDS), ids={"t": ids})({"t": table})


def of_whole_state(table, ids):
    return by_rows(table, ids, None, ADAM, put(MESH, ADAM.init({"t": LARGE})))


load = te.rows.exchange_load
MESH = mesh_of((2, 4), BOTH, EXPLICIT)
on = functools.partial(put, MESH)
TABLE_ON, IDS_ON = on(LARGE, "model"), on(IDS, BOTH)
ON_MESH = {
    'by_rows(on(LARGE, None, "model"), IDS_ON)': "ValueError: table: ... to exchange rows, got an array split as",
    'by_rows(on(LARGE, BOTH), on(IDS, "data"))': "ValueError: ids: wanted an array split over the mesh axes of the table's rows, ('data', 'model')",
    "of_others(TABLE_ON, IDS_ON)": "ValueError: ids: wanted an array split over ('model', 'data'), like the ids that te.rows got, got",
    "inside(TABLE_ON, IDS_ON)": "ValueError: capacity: wanted None, because the call is inside of a shard_map over some of the mesh axes, got 1.0",
    "of_whole_state(TABLE_ON, IDS_ON)": "ValueError: state: wanted [304, 8] split as its table, ... (jax.device_put), got",
    "mean(TABLE_ON, IDS_ON)": "TypeError: grads: wanted rows that every device has, got those that devices exchanged",
}  # fmt: skip
LOADS = {
    "load(TABLE_ON, IDS, batch_axes=['x'])": "ValueError: batch_axes: wanted a tuple of axes of the mesh",
    "load(TABLE_ON, IDS[:5])": "ValueError: ids: wanted a first dimension that 8 devices divide, got shape [5]",
    "load(TABLE_ON, IDS, config=te.EmbedderConfig(33, 8))": "ValueError: config: wanted the rows of the table,",
    "load(LARGE, IDS)": "ValueError: table: wanted an array, or its shape, on a mesh, got",
}  # fmt: skip
# They were an unbound axis, or an ambiguous sharding.
OUTSIDE = {
    "te.lookup(TABLE_ON, IDS)": "ValueError: ids: wanted ... inside jax.set_mesh(mesh)",
    "te.linear_cross_entropy(LARGE[:8], TABLE_ON, IDS)": "ValueError: x: wanted ... inside jax.set_mesh(mesh)",
    'seen({"t": TABLE_ON}, {"t": IDS})': "ValueError: ids: ... inside jax.set_mesh(mesh)",
}


@pytest.mark.slow
def test_errors_name_the_argument_that_cannot_be_exchanged_or_updated():
    with jax.set_mesh(MESH):
        jax.eval_shape(lambda: each_raises(ON_MESH, globals()))
        each_raises(LOADS, globals())
    each_raises(OUTSIDE, globals())
    with jax.set_mesh(mesh_of((2, 4), BOTH, AUTO)), pytest.raises(ValueError, match="explicit_ax"):
        jax.eval_shape(by_rows, LARGE, IDS)


# --- models


SPREAD = te.Embedder(te.EmbedderConfig(ROWS, WIDTH, spread=True, output=None))


def spread_loss(params, plain):
    x = SPREAD.apply(params, None, IDS, is_training=False)
    ((_, leaves),) = params.items()
    return jnp.sum(x + plain * te.lookup(leaves["embeddings"], IDS) if plain else x)


def by_spread_rows(params, loss, config):
    return te.rows.value_and_grad(loss, ids={"embeddings": IDS}, config=config)(params)[0]


ORDERS = [
    (0.0, None, r"^config: wanted the EmbedderConfig of transformer_embedding.*: pass config= to"),
    (1.0, SPREAD.config, r"^transformer_embedding/.*: wanted a lookup by the layer whose config"),
]


@pytest.mark.parametrize(("plain", "config", "message"), ORDERS)
def test_an_order_that_no_config_says_is_named(plain, config, message):
    loss = functools.partial(spread_loss, plain=plain)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: by_spread_rows(drawn(SPREAD.init), loss, config))
