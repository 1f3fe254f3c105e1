"""What a loss may do with the rows that stand in place of a table: look them up. Any other use raises
an error, or is not finite."""

import contextlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

import transformer_embed as te
from transformer_embed._src.rows.gathered_rows import GatheredRows

ROWS = GatheredRows(jnp.array([1, 2]), jnp.ones([2, 3]), 5)


def embed_by_haiku(rows):
    params = {"embed": {"embeddings": rows}}
    return hk.without_apply_rng(
        hk.transform(lambda: hk.Embed(5, 3, name="embed")(jnp.array([1])))
    ).apply(params)


OTHER_USES = {
    "times a number": lambda rows: rows * 2,
    "a number times": lambda rows: 2.0 * rows,
    "array times": lambda rows: jnp.ones(3) * rows,
    "numpy array plus": lambda rows: np.ones(3) + rows,
    "matmul": lambda rows: jnp.ones([1, 5]) @ rows,
    "transposed": lambda rows: jnp.ones([1, 3]) @ rows.T,
    "astype": lambda rows: rows.astype(jnp.bfloat16),
    "indexed": lambda rows: rows[jnp.array([1])],
    "at": lambda rows: rows.at[0].set(1),
    "jnp.asarray": jnp.asarray,
    "np.asarray": np.asarray,
    "jnp.sum": jnp.sum,
    "jnp.dot": lambda rows: jnp.dot(jnp.ones(5), rows),
    "jnp.take": lambda rows: jnp.take(rows, jnp.array([1]), axis=0),
    "einsum": lambda rows: jnp.einsum("vd->v", rows),
    "hk.Embed": embed_by_haiku,
}


@pytest.mark.parametrize("name", OTHER_USES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_any_other_use_of_rows_is_a_type_error(name, jit):
    # jax 0.6.0 has its own TypeError for a sum.
    ours, jaxs = (
        "table: wanted to be read by te.lookup or te.TokenEmbedding alone, since "
        "te.rows.value_and_grad has its ids, got another use of its rows",
        "expected ArrayLike, got GatheredRows",
    )
    with pytest.raises(TypeError, match=f"{ours}|{jaxs}" if name == "jnp.sum" else ours):
        (jax.jit(OTHER_USES[name]) if jit else OTHER_USES[name])(ROWS)


def test_rows_look_like_the_table():
    assert (ROWS.shape, ROWS.dtype) == ((5, 3), jnp.float32)
    assert not hasattr(ROWS, "ndim")
    copied = jax.tree.map(lambda leaf: leaf + 0, ROWS)
    assert copied.shape == (5, 3)


def test_rows_whose_ids_were_cast_to_floats_raise_an_error():
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ROWS)
    with pytest.raises(
        TypeError,
        match=r"^table: wanted rows with int32 ids \(map over floating leaves only\), got ids of bfloat16",
    ):
        te.lookup(cast, [1])


@pytest.mark.slow
def test_a_tied_table_is_refused():
    message = "table: wanted a whole table, trained densely, since the output layer is tied to it, got some of its rows"
    with pytest.raises(TypeError, match=message):
        te.linear_logits(np.ones(3, np.float32), ROWS)

    def tied(ids):
        embed = te.TokenEmbedding(5, 3)
        return embed.logits(embed(ids))

    net = hk.without_apply_rng(hk.transform(tied))
    params = jax.eval_shape(net.init, jax.random.key(0), np.array([1]))
    step = te.rows.value_and_grad(
        lambda params: net.apply(params, [1]).sum(), ids={"token_embedding": {"embeddings": [1]}}
    )
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(step, params)


def test_hk_embed_names_the_parameter_and_the_module_to_use():
    def embed(ids):
        return hk.Embed(5, 3, name="embed")(ids)

    net = hk.without_apply_rng(hk.transform(embed))
    params = net.init(jax.random.key(0), IDS)
    step = te.rows.value_and_grad(
        lambda params: net.apply(params, IDS).sum(), ids={"embed": {"embeddings": IDS}}
    )
    message = (
        r"^params\['embed'\]\['embeddings'\]: wanted to be read by te\.lookup or te\.TokenEmbedding"
    )
    with pytest.raises(TypeError, match=message):
        step(params)


# Functions of all leaves of the parameters.

IDS = np.array([1, 3, 3, 4])
TABLE = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
OF_A_LEAF = {
    "squares": lambda leaf: jnp.sum(jnp.square(leaf)),
    "sum": jnp.sum,
    "mean": jnp.mean,
    "variance": jnp.var,
    "norm": lambda leaf: jnp.linalg.norm(leaf.reshape(-1)),
    "largest": lambda leaf: jnp.max(jnp.abs(leaf)),
    "in float32": lambda leaf: jnp.sum(leaf.astype(jnp.float32)),
    "huber": lambda leaf: optax.huber_loss(leaf).sum(),
}
TOGETHER = {
    "sum": sum,
    "largest": lambda numbers: jnp.max(jnp.stack(numbers)),
    "stacked": lambda numbers: jnp.linalg.norm(jnp.stack(numbers)),
}
WHOLE = {
    "ravel": lambda params: jnp.sum(ravel_pytree(params)[0] ** 2),
    "reduce": lambda params: jax.tree.reduce(lambda total, x: total + jnp.sum(x**2), params, 0.0),
}
FILTERS = {
    "all": lambda leaf: True,
    "matrices": lambda leaf: leaf.ndim == 2,
    "floats": lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating),
}


def placed(kind):
    """Parameters with a table of a kind."""
    if kind == "plain":
        return {"t": jnp.asarray(TABLE), "w": jnp.ones([2])}
    mesh = Mesh(np.array(jax.devices()[:2]), ["model"])
    options = {"interleave": "t", "virtual_shards": 2} if kind == "interleaved" else {}
    params = {"t": TABLE, "w": np.ones(2, np.float32)}
    return te.sharding.shard_params(
        params, mesh, {"t": PartitionSpec("model")}, tables="t", **options
    )


@st.composite
def whole_tree_functions(draw):
    """A function of all leaves of the parameters to one number."""
    if draw(st.booleans()):
        return WHOLE[draw(st.sampled_from(list(WHOLE)))]
    of_a_leaf = OF_A_LEAF[draw(st.sampled_from(list(OF_A_LEAF)))]
    together = TOGETHER[draw(st.sampled_from(list(TOGETHER)))]
    is_counted = FILTERS[draw(st.sampled_from(list(FILTERS)))]

    def function(params):
        leaves = jax.tree.leaves(params)
        return together([of_a_leaf(leaf) for leaf in leaves if is_counted(leaf)])

    return function


def check_whole_tree(function, kind, jit, debug_nans):
    """A loss with the function raises or is not finite; without it, it is what it was."""

    def loss(params, scale):
        regularized = function(params) if scale else 0
        return jnp.sum(te.lookup(params["t"], IDS)) + regularized

    def value(params, scale):
        return te.rows.value_and_grad(lambda p: loss(p, scale), ids={"t": IDS})(params)[0]

    value = jax.jit(value, static_argnums=1) if jit else value
    with jax.debug_nans(debug_nans):
        np.testing.assert_allclose(value(placed(kind), 0.0), TABLE[IDS].sum(), rtol=1e-5)
        with contextlib.suppress(TypeError, FloatingPointError):
            assert not np.isfinite(value(placed(kind), 0.1))


@pytest.mark.parametrize("kind", ["plain", "contiguous", "interleaved"])
def test_an_l2_term_of_all_parameters_is_not_finite(kind):
    check_whole_tree(WHOLE["reduce"], kind, jit=True, debug_nans=False)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    whole_tree_functions(),
    st.sampled_from(["plain", "contiguous", "interleaved"]),
    st.booleans(),
    st.booleans(),
)
def test_any_function_of_all_parameters_raises_or_is_not_finite(function, kind, jit, debug_nans):
    check_whole_tree(function, kind, jit, debug_nans)
