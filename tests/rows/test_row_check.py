"""The proof that an optimizer updates each row from that row alone: what passes, and what is
refused for which reason."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import equal

import transformer_embed as te

# Of a table of 1000 rows, few are read; the last id is padding.
PARAMS = {"t": np.ones([1000, 2], np.float32), "w": np.ones([3, 2], np.float32)}
IDS = np.array([0, 3, 701, 1000])
VALUES = np.array([[1, 1], [2, 2], [1, 1], [0, 0]], np.float32)
KEY = jax.random.key(0)
Shape = jax.ShapeDtypeStruct


def step(optimizer, params=PARAMS, state=None):
    """One step outside of jit; a refusal comes before anything is computed."""
    table = params["t"]
    gradient = te.rows.RowGradient(IDS, VALUES.astype(table.dtype), len(table))
    state = optimizer.init(params) if state is None else state
    return te.rows.apply_gradients(optimizer, {"t": gradient, "w": params["w"]}, state, params)


def refuse(optimizer, message, **options):
    start = r"^optimizer: wanted each row updated from that row alone, got "
    with pytest.raises(ValueError, match=start) as error:
        step(optimizer, **options)
    assert message in str(error.value)
    advice = "Train the table densely, or keep that transformation off it with optax.multi_transf"
    assert advice in str(error.value)


def transformation(change, init=lambda params: ()):
    """A transformation of the user's own, by a function of (updates, state)."""
    return optax.GradientTransformation(
        init, lambda grads, state, params=None: change(grads, state)
    )


def stateless(change):
    """Changes each leaf."""
    return transformation(lambda updates, state: (jax.tree.map(change, updates), state))


def counted(change):
    """Changes each leaf, by the number of the step."""

    def update(updates, count):
        return jax.tree.map(functools.partial(change, count), updates), count + 1

    return transformation(update, lambda params: jnp.zeros([], jnp.int32))


def zeros(params):
    return jax.tree.map(jnp.zeros_like, params)


# --- what passes

APART = {
    "logsumexp": lambda g: g - jax.nn.logsumexp(g, axis=-1, keepdims=True),
    "bits of another width": lambda g: jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(g, jnp.int16), jnp.float32
    ),
    "a matrix": lambda g: g @ jnp.array([[1.0, 2.0], [3.0, 4.0]]),
    "transposed": lambda g: (g.T * 2).T.reshape(-1, 1, 2).squeeze(1),
    "columns": lambda g: g[:, :1] * g[..., 1, None] + g[:, 0][:, None] * g[:, -1:],
    "columns by index": lambda g: jnp.take(g, jnp.array([1, 0]), axis=1),
    "a table for all rows": lambda g: jnp.array([3.0, 5.0])[(g > 0).astype(jnp.int32)],
    "a barrier": lambda g: jnp.prod(jnp.stack(jax.lax.optimization_barrier((g, 2 * g))), axis=0),
    "constants": lambda g: g * jax.jit(lambda: jax.random.uniform(KEY) * np.array([1, 2.0]))(),
}


@pytest.mark.slow
def test_what_is_one_row_in_a_table_trains_as_the_dense_step():
    gradient = np.arange(8, dtype=np.float32).reshape(4, 2) - 3
    table, ids = np.ones([9, 2], np.float32), np.array([2, 3, 5, 7])

    @jax.jit
    def tables(table, values):
        grads, update = te.rows.RowGradient(ids, values, 9), te.rows.apply_gradients
        steps = {name: stateless(change) for name, change in APART.items()}
        return {name: update(step, grads, (), table)[0] for name, step in steps.items()}

    for name, found in tables(table, gradient).items():
        expected = table.copy()
        expected[ids] += APART[name](jnp.asarray(gradient))
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        lambda count: jnp.where(count < 1, 0.5, 0.25) + 0.1 * (count > 5),
        lambda count: 0.5 * (count < 100) + 0.25 * (count >= 100),
        lambda count: 0.5 * 0.5 ** (count > 0),
        lambda count: 0.5 * (1 - (count % 3 == 2)),
        optax.join_schedules([optax.constant_schedule(0.5), optax.constant_schedule(0.0)], [9]),
    ],
)
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_schedule_may_choose_a_step_size(schedule, momentum):
    after, _ = step(optax.sgd(schedule, momentum))
    equal(after["t"][np.array([0, 1, 3]), 0], [0.5, 1, 0])


def test_a_schedule_may_choose_how_much_of_a_state_is_kept():
    choices = optax.inject_hyperparams(optax.sgd)(0.5, lambda n: jnp.where(n < 9, 0.5, 0.9))
    for optimizer in (choices, optax.inject_hyperparams(optax.sgd)(0.5, lambda n: 1 / (n + 1))):
        equal(step(optimizer)[0]["t"][:4, 0], [0.5, 1, 1, 0])


@pytest.mark.slow
def test_a_choice_by_size_that_is_the_same_for_every_block_passes():
    optimizer, ids = labelled_by_size(), np.arange(100)
    grads = {"t": te.rows.RowGradient(ids, jnp.ones([100, 2]), 1000), "w": PARAMS["w"]}
    after, _ = te.rows.apply_gradients(optimizer, grads, optimizer.init(PARAMS), PARAMS)
    equal(after["t"][:, 0], np.repeat([0, 1], [100, 900]))
    equal(after["w"], PARAMS["w"])


@pytest.mark.slow
def test_many_tables_share_the_traces_of_one_step():
    """Three for the proof, and none for each table: tracing would take seconds otherwise."""
    traces = []
    counting = stateless(lambda g: traces.append(g) or -g)
    params = [Shape([10_000 + i, 8], jnp.float32) for i in range(10)]

    def train(params):
        grads = [te.rows.RowGradient(np.arange(2000), p[:2000], len(p)) for p in params]
        return te.rows.apply_gradients(counting, grads, (), params)

    jax.eval_shape(train, params)
    assert len(traces) == 3 * len(params)


@pytest.mark.slow
def test_the_proof_holds_in_strict_modes():
    params = jax.tree.map(jnp.asarray, PARAMS)
    for mode in (jax.disable_jit(), jax.transfer_guard("disallow")):
        with mode:
            after = jax.jit(lambda params: step(stateless(jnp.negative), params)[0])(params)
        equal(np.asarray(after["t"])[:4, 0], [0, 1, 1, -1])


# --- what is refused


def labelled_by_size():
    """Few rows are smaller than the bound; their table is not."""
    kinds = {"large": optax.sgd(1.0), "small": optax.set_to_zero()}
    label = lambda leaf: "large" if leaf.size > 100 else "small"
    return optax.multi_transform(kinds, lambda params: jax.tree.map(label, params))


def by_the_largest_row(updates, state):
    return {**updates, "w": updates["w"] * jnp.max(jnp.abs(updates["t"]))}, state


def by_a_scan_over_the_rows(g):
    return g * jax.lax.scan(lambda x, _: (0.9 * x, None), 1.0, None, length=g.shape[0])[0]


def by_a_count_in_a_branch(g):
    return g * jax.lax.cond(jnp.ones([]) > 0, lambda: jnp.ones(len(g)).sum(), lambda: 1.0)


def narrowed(updates, state):
    return updates, jax.tree.map(lambda s: s.mean(1, keepdims=True), state)


def as_many_arrays_as_the_size_asks(params):
    return jax.tree.map(lambda p: (jnp.zeros_like(p),) * (2 if p.shape[0] == 1000 else 1), params)


def accumulator(emitted, emptied):
    """Sums gradients, and applies the sum in the steps in which a number is not 0."""

    def update(updates, state):
        count, sums, last = state
        emit, sums = emitted(count, last), jax.tree.map(jnp.add, sums, updates)
        after = jax.tree.map(lambda acc: emptied(acc, emit), sums)
        last = jnp.where(count % 3 == 1, 1.0, 0.0)
        return jax.tree.map(lambda acc: -0.1 * emit * acc, sums), (count + 1, after, last)

    return transformation(update, lambda params: (jnp.int32(0), zeros(params), jnp.float32(0)))


SWITCHES = {
    "where": lambda n, _: jnp.where(n % 3 == 2, 1.0, 0.0),
    "rem": lambda n, _: n % 2,
    "square": lambda n, _: (n % 2) ** 2,
    "exp": lambda n, _: jnp.exp(jnp.where(n % 3 == 2, 0, -jnp.inf)),
    "cond": lambda n, _: jax.lax.cond(n % 3 == 2, lambda: 1.0, lambda: 0.0),
    "by index": lambda n, _: jnp.array([0.0, 0.0, 1.0])[n % 3],
    "less one": lambda n, _: jnp.where(n % 3 == 2, 2.0, 1.0) - 1,
    "floor": lambda n, _: jnp.floor((n + 1) / 3) - jnp.floor(n / 3),
    "in the state": lambda n, last: last,
    "a condition": lambda n, _: n % 3 == 2,
}


def one_of_all_rows(g):
    index = jax.lax.GatherDimensionNumbers((0, 1), (), (0,))
    return jax.lax.gather(g, jnp.array([1]), index, g.shape, mode="clip")


def without_the_first(g):
    first, others = jnp.zeros([1, 2]), jax.lax.slice_in_dim(g, 1, g.shape[0])
    return jnp.concatenate([first, others], dtype=g.dtype)


def as_many_columns_as_rows(g):
    columns = jnp.broadcast_to(g[:, :1], [g.shape[0], 1000])
    return jax.lax.slice(columns, (0, 0), (1, g.shape[0])).T


UNKNOWN = "for another number of rows, it cannot be traced"
REFUSED = {
    # Rows told apart by their place.
    "rows from 700 on": (
        stateless(lambda g: jnp.where(jnp.arange(g.shape[0])[:, None] < 700, g, 0.0)),
        "transformation: iota tells rows apart",
    ),
    "a mask of rows": (
        stateless(lambda g: g * np.ones([1000, 1]) if g.shape[0] != 3 else g),
        f"transformation: {UNKNOWN} (TypeError: mul got incompat",
    ),
    "labels by size": (labelled_by_size(), "row alone, got "),
    # Rows that meet.
    "novograd": (optax.novograd(0.1), "scale_by_novograd: reduce_sum over the rows"),
    "a block's norm": (optax.adaptive_grad_clip(0.1), "reduce_sum over the rows"),
    "another parameter": (
        transformation(by_the_largest_row),
        "got transformation: reduce_max over the rows",
    ),
    "gather": (stateless(one_of_all_rows), "gather over the rows"),
    "slice": (stateless(without_the_first), "slice over the rows"),
    "slice of columns": (stateless(as_many_columns_as_rows), UNKNOWN),
    "reshape": (stateless(lambda g: g.reshape(2, -1).T), "reshape over the rows"),
    "a matrix of rows": (stateless(lambda g: (g @ g.T) @ g), "dot_general over the rows"),
    "rev": (stateless(lambda g: jnp.flip(g, 0)), "rev is not known to keep rows apart"),
    "scan": (
        stateless(lambda g: jax.lax.scan(lambda s, x: (s + x, s), jnp.zeros(2), g)[1]),
        "scan is not known to keep rows apart",
    ),
    # The number of rows.
    "a scan": (stateless(by_a_scan_over_the_rows), "row alone"),
    "a branch": (stateless(by_a_count_in_a_branch), "row alone"),
    # A choice of all rows, by which a row without a gradient would miss its turn.
    "MultiSteps": (
        optax.MultiSteps(optax.adam(0.1), 3),
        "one condition for the whole table decides how its rows are updated",
    ),
    # States.
    "a narrow state": (
        transformation(narrowed, zeros),
        "a state float32[1000, 2] becomes float32[1000, 1]",
    ),
    "a state of another structure": (
        transformation(lambda *both: both, as_many_arrays_as_the_size_asks),
        "init depends on the number of rows",
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_sum_that_a_number_applies_and_empties_is_refused(name):
    """A row without a gradient in the step that applies it would miss its turn."""
    reason = "mul by a switch outside of the row decides when the sum in its state is used"
    ways = (
        lambda acc, emit: (1 - emit) * acc,
        lambda acc, emit: acc - emit * acc,
        lambda acc, emit: jnp.where(emit > 0, 0.0, acc),
        lambda acc, emit: jnp.take(jnp.stack([acc, 0 * acc], 1), (emit > 0) * 1, 1),
    )
    for optimizer in (accumulator(SWITCHES[name], emptied) for emptied in ways):
        refuse(optimizer, reason)
    refuse(optax.chain(optax.scale_by_adam(), optimizer), reason)


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_or_tells_them_apart_is_refused(name):
    refuse(*REFUSED[name])


# One number for the table of 1000 rows and another for the rest, as a constant of each kind.


def hidden(value):
    """In the middle of more numbers than `str` prints."""
    return jnp.asarray(np.insert(np.ones(5000, np.float32), 2500, value)).prod()


def at_once(value):
    with jax.ensure_compile_time_eval():
        return jnp.sin(jnp.array([value, 1.0]))


CONSTANTS = {
    "float": float,
    "long": hidden,
    "computed at once": at_once,
    "nested": lambda value: jax.jit(lambda: np.array([value, 1], np.float32))(),
    "branch": lambda value: jax.lax.cond(
        jnp.ones([]) > 0, lambda: jnp.array([value, 1]), lambda: jnp.ones(2)
    ),
    "key": lambda value: jax.random.uniform(jax.random.key(int(8 * value))),
    "sign of zero": lambda value: jnp.array([np.copysign(0, value - 0.3), 1]),
    "pure_callback": lambda value: jax.pure_callback(
        lambda: np.float32(value), Shape([], np.float32)
    ),
}
CHOSEN = {
    name: lambda g, make=make: g * make(0.5 if g.shape == (1000, 2) else 0.25)
    for name, make in CONSTANTS.items()
} | {
    "power": lambda g: g ** g.shape[0] if g.ndim == 2 and g.shape[0] != 3 else g,
    "equation": lambda g: 2 * g if g.shape[0] == 1000 else jnp.abs(g),
    "comparison": lambda g: jnp.where(g > 0 if g.shape[0] == 1000 else g >= 0, g, 1.0),
    "column": lambda g: g * (g[:, :1] if g.shape[0] == 1000 else g[:, 1:]),
    "block": lambda g: g * (0.5 if g.shape[0] == len(IDS) else 0.25),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_an_optimizer_that_chooses_by_the_number_of_rows_is_refused(name):
    """A block has another number, so it would train by another rule."""
    reason = f"{name} is not known to keep rows apart" if "callback" in name else "row alone"
    refuse(stateless(CHOSEN[name]), reason)


@pytest.mark.parametrize(
    ("reason", "mix"),
    [
        ("add got incompatible shapes", lambda s, t: (s + t, t)),
        ("a state float32.* becomes", lambda s, t: (t, s)),
    ],
)
def test_rows_of_two_tables_are_never_mixed(reason, mix):
    """Not even where both have as many rows, so that the shapes of a step fit."""
    params = [jnp.ones([6, 2])] * 2
    grads = [te.rows.RowGradient([1, 3], jnp.ones([2, 2]), 6)] * 2
    mixed = transformation(lambda updates, _: (updates, [*mix(*updates)]), lambda params: params)
    with pytest.raises(ValueError, match=reason):
        te.rows.apply_gradients(mixed, grads, params, params)


# --- states


@pytest.mark.parametrize(
    ("state_dtype", "added"), [("float32", "int8"), ("int8", "int32"), ("bfloat16", "float16")]
)
def test_a_state_keeps_its_dtype_or_is_refused(state_dtype, added):
    def signs(updates, state):
        return updates, jax.tree.map(lambda s, g: s + jnp.sign(g).astype(added), state, updates)

    init = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, state_dtype), params)
    optimizer, params = transformation(signs, init), PARAMS | {"t": jnp.ones([1000, 2], "bfloat16")}
    widened = jnp.promote_types(state_dtype, added)
    if widened == state_dtype:
        after, state = step(optimizer, params)
        assert (after["t"].dtype, state["t"].dtype) == ("bfloat16", state_dtype)
    else:
        message = f"a state {state_dtype}[1000, 2] becomes {widened}["
        refuse(optimizer, message, params=params)


def test_a_state_of_another_optimizer_is_not_blamed_on_the_optimizer():
    adam, more = optax.adam(0.1), PARAMS | {"t": jnp.ones([1001, 2])}
    states = {
        "wanted 0/mu/t [1000, 2], 0/nu/t [1000, 2], got 0/mu/t [1001, 2], 0/nu/t": adam.init(more),
        "wanted 0/count [], 0/mu/t [1000, 2], 0/mu/w [3, 2], 0/nu/t": optax.sgd(0.1).init(PARAMS),
        "wanted no others, got 0/nu_max/t [1000, 2], 0/nu_max/w [3, 2]": (
            optax.amsgrad(0.1).init(PARAMS)
        ),
        "wanted the tree, PyTreeDef((CustomNode": list(adam.init(PARAMS)),
    }
    for message, state in states.items():
        with pytest.raises(ValueError, match=f"^{re.escape(f'state: {message}')}"):
            step(adam, state=state)
