"""What a loss may do with the rows that stand in place of a table: look them up. Any other use raises
an error, or is not finite."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal, near
from meshes import EXPLICIT, mesh_of, put
from refused import each_raises
from steps import add

import transformer_embed as te
from transformer_embed._src.rows.distinct_ids import count_below, distinct_ascending
from transformer_embed._src.rows.gathered_rows import GatheredRows, as_keys, new_marks

IDS = np.array([1, 3, 3, 4])
TABLE = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
PARAMS = {"t": TABLE, "w": np.ones(3, np.float32)}


@functools.cache
def rows():
    keys, marks = as_keys(jnp.array([1, 2])), new_marks(3, jnp.float32)
    return GatheredRows(keys, marks, jnp.ones([2, 3]), "table", 6)


def test_binary_search_counts_the_numbers_below():
    ascending = [np.int32([2 * n for n in range(length)]) for length in (1, 2, 3, 4, 7, 8)]
    values = [np.arange(-1, 2 * len(each) + 1, dtype=np.int32) for each in ascending]
    counts = jax.jit(functools.partial(jax.tree.map, count_below))(ascending, values)
    for found, *arrays in zip(counts, ascending, values, strict=True):
        equal(found, np.searchsorted(*arrays))


def test_distinct_ids_ascend_and_are_followed_by_numbers_past_the_table():
    """Values past the table are dropped, whichever they are."""
    found = jax.jit(distinct_ascending, static_argnums=(1, 2))(np.array([5, 9, 2, 7, 2, 6]), 6, 4)
    assert found.tolist() == [2, 5, 8, 9]


def test_rows_look_like_the_table():
    assert (rows().shape, rows().dtype) == ((6, 3), jnp.float32)
    assert not hasattr(rows(), "ndim")
    assert jax.tree.map(jnp.copy, rows()).shape == (6, 3)


def train(model):
    net = hk.without_apply_rng(hk.transform(model))
    params = jax.eval_shape(net.init, jax.random.key(0), IDS)
    step = te.rows.value_and_grad(lambda p: net.apply(p, IDS).sum(), ids={"embeddings": IDS})
    return jax.eval_shape(step, params)


def tied(ids):
    embed = te.TokenEmbedding(6, 3, name="embed")
    return te.linear_logits(embed(ids), embed.output())


def loss(params, ids=IDS):
    return jnp.sum(te.lookup(params["t"], ids).astype(jnp.float32))


def of_leaves(change):
    """A loss after a change of every leaf of the rows."""
    changed = lambda params: loss(params | {"t": jax.tree.map(change, params["t"])})
    return jax.eval_shape(te.rows.value_and_grad(changed, ids={"t": IDS}), PARAMS)


OURS = "_NotAnArrayError: table: wanted to be read by te.lookup or te.TokenEmbedding alone, since te.rows has its ids"
OTHER_USES = {
    "jnp.ones(3) * rows()": OURS,
    "jnp.ones([1, 6]) @ rows()": OURS,
    "rows().astype(jnp.bfloat16)": OURS,
    "rows()[jnp.array([1])]": OURS,
    "np.asarray(rows())": OURS,
    "jnp.sum(rows())": OURS,
    "train(tied)": "TypeError: table: wanted a whole table, trained densely, since the output layer is",
    'train(lambda ids: hk.Embed(6, 3, name="embed")(ids))': "_NotAnArrayError: embed/embeddings: wanted to be read by te",
    "of_leaves(jnp.tanh)": "TypeError: ...In the loss, the rows of the batch replace t: only lookup",
    "of_leaves(jnp.sum)": "TypeError: ...In the loss, the rows of the batch replace t: only lookup",
    "of_leaves(lambda x: x[:1])": "TypeError: t: wanted all of its rows, in their order, got 1 of them",
}  # fmt: skip


def test_any_other_use_of_rows_is_an_error_that_names_the_table():
    each_raises(OTHER_USES, globals())


# --- functions of all leaves of the parameters


def map_floats(function, params):
    """Keys are not floats."""
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.tree.map(lambda leaf: function(leaf) if is_float(leaf) else leaf, params)


# Of each leaf x, before the loss, in the order of its last two axes: what treats rows one by one is
# right, and the others are NaN.
ROW_BY_ROW = [
    "x * jnp.full(3, -0.7)",
    "x.astype(jnp.bfloat16)",
    "x.astype(jnp.float16)",
    "jnp.tanh(x) + 1",
    "x / jnp.linalg.norm(x, axis=-1, keepdims=True)",
    "jnp.sign(x) + 0.1 * jax.nn.softmax(x, axis=-1)",
    "x + jax.random.normal(jax.random.key(0), (1, 3))",
]
MIXED = [
    "x / jnp.linalg.norm(x)",
    "jnp.round(7 * x / jnp.max(jnp.abs(x)))",
    "x - x.mean(0)",
    "jnp.nan_to_num(x)",
    "x[::-1]",
    "jnp.zeros_like(x)",
    "jnp.asarray(x).at[2].set(1)",
    "x + 1e-3 * jax.random.normal(jax.random.key(0), x.shape)",
    "(x + 1) * jax.random.bernoulli(jax.random.key(0), shape=x.shape)",
    "x * (1 + jnp.arange(len(x))[:, None])",
    "jnp.where(jnp.arange(len(x))[:, None] % 2, x, 0)",
]
MAPS = [*ROW_BY_ROW, *MIXED]
# Added to the loss, of each leaf.
TERMS = ["jnp.exp(-(x**2))", "jnp.max(x)"]


@jax.jit
def row_by_row(table):
    """The table after each change of its rows."""
    return {text: eval(f"lambda x: {text}", globals())(table) for text in ROW_BY_ROW}


def loss_with(text):
    change = eval(f"lambda x: {text}", globals())
    if text in MAPS:
        return lambda params, ids: loss(map_floats(change, params), ids)

    def with_term(params, ids):
        terms = jax.tree.leaves(map_floats(lambda x: jnp.sum(change(x)), params))
        return loss(params, ids) + sum(each for each in terms if each.ndim == 0)

    return with_term


# Whether a mesh of two devices splits the table, and the capacity of an exchange.
KINDS = {"plain": (False, None), "split": (True, None), "exchanged": (True, 1.0)}
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("split", "exchanged")]
every_kind = pytest.mark.parametrize("kind", ["plain", *SLOW])


def called(kind, function):
    """`function(value_and_grad, params)`, of parameters with a table of a kind."""
    is_split, capacity = KINDS[kind]

    def run(ids, params):
        of_ids = lambda loss, **more: te.rows.value_and_grad(
            lambda params: loss(params, ids), ids={"t": ids}, capacity=capacity, **more
        )
        return jax.device_get(jax.jit(lambda params: function(of_ids, params))(params))

    if not is_split:
        return run(IDS, PARAMS)
    mesh = mesh_of((2,), ("x",), EXPLICIT)
    with jax.set_mesh(mesh):
        return run(put(mesh, IDS, "x"), {"t": put(mesh, TABLE, "x"), "w": put(mesh, PARAMS["w"])})


@pytest.mark.slow
@every_kind
def test_a_function_of_all_parameters_is_nan_unless_it_treats_rows_one_by_one(kind):
    texts = [*MAPS, *TERMS][:: 1 if kind == "plain" else 8]

    def every_loss(params, ids):
        """The first loss, of which there is a gradient, and all others."""
        found = {text: loss_with(text)(params, ids) for text in texts}
        return found[texts[0]], found

    values = lambda step, params: step(every_loss, has_aux=True)(params)[0][1]
    tables = row_by_row(TABLE)
    for text, value in called(kind, values).items():
        expected = np.float32(tables[text])[IDS].sum() if text in tables else np.nan
        rtol = 1e-2 if "16" in text else 1e-5
        np.testing.assert_allclose(value, expected, rtol=rtol, err_msg=text)


@every_kind
def test_a_gradient_of_mixed_rows_updates_them_by_nan(kind):
    optimizer = optax.sgd(0.5)

    def steps(step, params):
        _, grads = step(loss)(params)
        doubled, signs = (jax.tree.map(change, grads) for change in (lambda g: 2 * g, jnp.sign))
        changed = [doubled, signs]
        if kind == "plain":
            changed += [add(grads, signs), add(signs, grads)]
        # Each updates a table of its own, so that the step is proven once.
        tables, of_tables = zip(*[(params["t"], each["t"]) for each in changed], strict=True)
        return te.rows.apply_gradients(optimizer, of_tables, optimizer.init(tables), tables)[0]

    doubled, *mixed = called(kind, steps)
    gradient = np.zeros([6, 3], np.float32)
    np.add.at(gradient, IDS, 1)
    near(doubled, TABLE - gradient, rtol=1e-5)
    equal(mixed, [np.where(gradient, np.nan, TABLE)] * len(mixed))
