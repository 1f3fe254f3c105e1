"""The proof that an optimizer updates each row from that row alone: what passes, and what is
refused for which reason."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal
from refused import each_raises

import transformer_embed as te
from transformer_embed._src.rows import row_check, step_tables
from transformer_embed._src.rows.row_gradient import is_gradient

# Of a table of 1000 rows, few are read; the last id is padding.
PARAMS = {"t": np.ones([1000, 2], np.float32), "w": np.ones([3, 2], np.float32)}
IDS = np.array([0, 3, 701, 1000])
VALUES = np.array([[1, 1], [2, 2], [1, 1], [0, 0]], np.float32)
KEY = jax.random.key(0)


def step(optimizer, params=PARAMS, state=None):
    """One step outside of jit; a refusal comes before anything is computed."""
    table = params["t"]
    gradient = te.rows.RowGradient(IDS, VALUES.astype(table.dtype), len(table))
    state = optimizer.init(params) if state is None else state
    return te.rows.apply_gradients(optimizer, {"t": gradient, "w": params["w"]}, state, params)


def transformation(change, init=lambda params: ()):
    """A transformation of the user's own, by a function of (updates, state)."""
    return optax.GradientTransformation(
        init, lambda grads, state, params=None: change(grads, state)
    )


def stateless(change):
    """Changes each leaf."""
    return transformation(lambda updates, state: (jax.tree.map(change, updates), state))


# --- the numbers of rows that a step is traced with


def test_the_numbers_of_rows_are_primes_that_no_array_has():
    """65,537 is the first prime that would be taken."""
    tables = [jax.ShapeDtypeStruct([9, 2], jnp.float32), jax.ShapeDtypeStruct([9, 5], jnp.float32)]
    others = {"w": jax.ShapeDtypeStruct([65_537], jnp.float32)}
    primes = []

    def find(_):
        rows = [te.rows.RowGradient([1], jnp.ones([1, each.shape[1]]), 9) for each in tables]
        trees = {"t": rows} | others, {"t": tables} | others, (), {}
        leaves, treedef = jax.tree.flatten(trees, is_leaf=is_gradient)
        found = row_check.find_tables(lambda _: (), treedef, dict(enumerate(leaves)))
        primes.extend(table.prime for table in found)

    jax.eval_shape(find, 0)
    # The next two primes after 65,537.
    assert primes == [65_539, 65_543]
    assert [n for n in range(2, 50) if step_tables.is_prime(n)] == [
        2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47,
    ]  # fmt: skip


# --- what passes

bits = jax.lax.bitcast_convert_type
# Of a gradient g.
APART = [
    "g - jax.nn.logsumexp(g, axis=-1, keepdims=True)",
    "bits(bits(g, jnp.int16), jnp.float32)",
    "g @ jnp.array([[1.0, 2.0], [3.0, 4.0]])",
    "(g.T * 2).T.reshape(-1, 1, 2).squeeze(1)",
    "g[:, :1] * g[..., 1, None] + g[:, 0][:, None] * g[:, -1:]",
    "jnp.take(g, jnp.array([1, 0]), axis=1)",
    "jnp.array([3.0, 5.0])[(g > 0).astype(jnp.int32)]",
    "jnp.prod(jnp.stack(jax.lax.optimization_barrier((g, 2 * g))), axis=0)",
    "g * jax.jit(lambda: jax.random.uniform(KEY) * np.array([1, 2.0]))()",
]


@pytest.mark.slow
def test_row_of_any_shape_trains_as_in_the_dense_step():
    gradient = np.arange(8, dtype=np.float32).reshape(4, 2) - 3
    table, ids = np.ones([9, 2], np.float32), np.array([2, 3, 5, 7])
    changes = {text: eval(f"lambda g: {text}", globals()) for text in APART}

    each_of = lambda values: {name: change(values[name]) for name, change in changes.items()}
    every = transformation(lambda updates, state: (each_of(updates), state))

    @jax.jit
    def tables(table, values):
        """The tables after a step, and what each change makes of the gradient."""
        copies = dict.fromkeys(changes, table)
        grads = dict.fromkeys(changes, te.rows.RowGradient(ids, values, 9))
        after, _ = te.rows.apply_gradients(every, grads, (), copies)
        return after, each_of(dict.fromkeys(changes, values))

    after, updates = jax.device_get(tables(table, gradient))
    for name, found in after.items():
        expected = table.copy()
        expected[ids] += updates[name]
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_many_tables_share_the_traces_of_one_step():
    """One for the proof, one for the step, and none for each table, which would take seconds."""
    traces = []
    counting = stateless(lambda g: traces.append(g) or -g)
    params = [jax.ShapeDtypeStruct([10_000 + i, 8], jnp.float32) for i in range(10)]

    def train(params):
        grads = [te.rows.RowGradient(np.arange(2000), p[:2000], len(p)) for p in params]
        return te.rows.apply_gradients(counting, grads, (), params)

    jax.eval_shape(train, params)
    assert len(traces) == 2 * len(params)


@pytest.mark.slow
def test_the_proof_holds_in_strict_modes():
    params = jax.tree.map(jnp.asarray, PARAMS)
    negated = lambda params: step(stateless(jnp.negative), params)[0]
    with jax.transfer_guard("disallow"):
        after = jax.jit(negated)(params)
    equal(np.asarray(after["t"])[:4, 0], [0, 1, 1, -1])
    with jax.disable_jit():
        # The proof is made while the step is traced: nothing need be computed.
        assert jax.eval_shape(negated, params) == jax.eval_shape(lambda tree: tree, params)
        with pytest.raises(ValueError, match="iota tells rows apart"):
            jax.eval_shape(functools.partial(step, BY_PLACE), params)


def test_apply_every_may_train_other_parameters_than_tables():
    kinds = {"t": optax.sgd(0.25), "w": optax.chain(optax.apply_every(2), optax.sgd(0.1))}
    optimizer = optax.multi_transform(kinds, {"t": "t", "w": "w"})
    after, _ = jax.jit(functools.partial(step, optimizer))(PARAMS)
    equal(np.asarray(after["t"])[:4, 0], [0.75, 1, 1, 0.5])


# --- what is refused


def one_of_all_rows(g):
    index = jax.lax.GatherDimensionNumbers((0, 1), (), (0,))
    return jax.lax.gather(g, jnp.array([1]), index, g.shape, mode="clip")


def without_the_first(g):
    first, others = jnp.zeros([1, 2]), jax.lax.slice_in_dim(g, 1, g.shape[0])
    return jnp.concatenate([first, others], dtype=g.dtype)


def with_state(dtype, change):
    """A state of this dtype, which each step changes."""
    init = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
    return transformation(lambda grads, state: (grads, jax.tree.map(change, state)), init)


BY_PLACE = stateless(lambda g: jnp.where(jnp.arange(g.shape[0])[:, None] < 700, g, 0.0))
of_largest = lambda g, state: (g | {"w": g["w"] * jnp.max(jnp.abs(g["t"]))}, state)
of_rows = lambda g, state: (g, state | {"w": g["t"].sum(1)})
sums = lambda g: jax.lax.scan(lambda s, x: (s + x, s), jnp.zeros(2), g)[1]
longer = lambda g: g * np.ones([1000, 1]) if g.shape[0] != 3 else g
OPTIMIZERS = {
    "BY_PLACE": "transformation: iota tells rows apart by their place",
    "stateless(longer)": "transformation: cannot be traced with another number of rows (TypeError: mul got in",
    "stateless(one_of_all_rows)": "transformation: gather over the rows",
    "stateless(without_the_first)": "transformation: slice over the rows",
    "stateless(lambda g: g.reshape(2, -1).T)": "transformation: reshape over the rows",
    "stateless(lambda g: jax.lax.reshape(g, g.shape, (1, 0)))": "transformation: reshape over the rows",
    "stateless(lambda g: (g @ g.T) @ g)": "transformation: dot_general over the rows",
    "stateless(lambda g: jnp.flip(g, 0))": "transformation: rev is not known to keep rows apart",
    "stateless(sums)": "transformation: scan is not known to keep rows apart",
    "transformation(of_largest)": "transformation: reduce_max over the rows",
    "optax.novograd(0.1)": "scale_by_novograd: reduce_sum over the rows",
    "optax.MultiSteps(optax.adam(0.1), 3)": "MultiSteps: cond is not known to keep rows apart",
    "optax.chain(optax.trace(0.9), optax.apply_every(2))": "apply_every: a row without a gradient",
    "with_state('float32', lambda s: s.mean(1, keepdims=True))": "transformation: float32[1000, 2] becomes float32[1000, 1]",
    "with_state('int8', lambda s: s.astype(jnp.int32))": "transformation: int8[1000, 2] becomes int32[1000, 2]",
    "transformation(of_rows, lambda params: params)": "transformation: float32[3, 2] becomes float32[1000]",
}  # fmt: skip


def test_update_that_mixes_rows_or_tells_them_apart_is_refused():
    alone = "ValueError: optimizer: wanted each row updated from that row alone, got "
    each_raises({f"step({made})": alone + why for made, why in OPTIMIZERS.items()}, globals())
    with pytest.raises(ValueError, match="Train the table densely, or keep that transformation"):
        step(BY_PLACE)


@pytest.mark.parametrize(
    ("reason", "mix"),
    [
        ("add got incompatible shapes", lambda s, t: (s + t, t)),
        ("float32.* becomes", lambda s, t: (t, s)),
    ],
)
def test_rows_of_two_tables_are_never_mixed(reason, mix):
    """Not even where both have as many rows, so that the shapes of a step fit."""
    params = [np.ones([6, 2], np.float32)] * 2
    grads = [te.rows.RowGradient([1, 3], np.ones([2, 2], np.float32), 6)] * 2
    mixed = transformation(lambda updates, _: (updates, [*mix(*updates)]), lambda params: params)
    with pytest.raises(ValueError, match=reason):
        te.rows.apply_gradients(mixed, grads, params, params)
