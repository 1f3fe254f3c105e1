"""What is proved of an optimizer, and that it trains as the lazy rule says or is refused: no third
outcome."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers as made
import pytest
from contexts import x64
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import transformer_embed as te

STEPS = 20
# float64, 20 steps of some 50 roundings each.
TOLERANCE = 1e-11
FASTER_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
EXPORTED = dict(made.exported())
FEW = [
    "adam",
    "amsgrad",
    "adan",
    "radam",
    "optimistic_adam",
    "rprop",
    "multi_transform",
    "apply_every",
    "MultiSteps",
    "zero_nans",
    "snapshot",
]


def global_norm(tree):
    """optax's, deprecated under this name since 0.2.7."""
    return made.quietly(optax.global_norm, tree)


def plain(grads):
    """Ids and values in place of a RowGradient, for a gradient to leave jit."""
    return jax.tree.map(
        lambda g: (g.ids, g.values) if isinstance(g, te.rows.RowGradient) else g,
        grads,
        is_leaf=lambda g: isinstance(g, te.rows.RowGradient),
    )


@jax.jit
def both_gradients(batch):
    """By rows and dense, always at the first parameters: so rounding does not grow from step to
    step."""
    ids, params = {"embed": {"table": batch[0]}, "other": batch[1]}, made.make_params()
    return plain(te.rows.value_and_grad(made.loss, ids=ids)(params, batch)[1]), jax.grad(made.loss)(
        params, batch
    )


@functools.cache
def gradients():
    return [both_gradients(made.make_batch(step)) for step in range(STEPS)]


@functools.cache
def refusal_of(name):
    """What `made.refusal` says of an optimizer that optax exports: asked for each, and again for
    the page of all."""
    with x64():
        return made.refusal(made.quietly(EXPORTED[name]))


def refused_or_lazy(optimizer, refusal=made.refusal):
    """The message; or None after 20 steps equal to those of the oracle, in parameters and state."""
    with x64():
        message = refusal(optimizer)
        if message is not None:
            assert (
                "optimizer: wanted each row updated from that row alone, got " in message
                or message.startswith("state: ")
            ), message
            assert len(message) < 400
            return message
        extra = made.extra_arguments(optimizer)

        @functools.partial(jax.jit, compiler_options=FASTER_TO_COMPILE)
        def both_steps(ours, lazy, grads, dense_grads):
            params, state = ours
            return (
                te.rows.update(optimizer, made.by_rows(grads), state, params, **extra),
                made.lazy_step(optimizer, *lazy, dense_grads, **extra),
            )

        params = made.make_params()
        ours = lazy = params, made.quietly(optimizer.init, params)
        for grads in gradients():
            ours, lazy = made.quietly(both_steps, ours, lazy, *grads)
        for found, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(lazy), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        return None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in EXPORTED]
)
def test_every_optimizer_of_optax_is_the_lazy_one_or_refused(name):
    message = refused_or_lazy(made.quietly(EXPORTED[name]), lambda _: refusal_of(name))
    assert name not in FEW or (message is not None) == (name in FEW[7:])
    listed = made.PAGE.read_text(encoding="utf-8").split("## These cannot")[
        0 if message is None else 1
    ]
    assert f"`{name}`" in listed or optax.__version__ not in made.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_says_what_is_proved():
    with x64():
        page = made.page(refusal_of)
    assert page == made.PAGE.read_text(
        encoding="utf-8"
    ) or optax.__version__ not in made.PAGE.read_text(encoding="utf-8")


# The faults that a probe did not see. Of a table of 1000 rows, few are read.

PARAMS = {"t": np.ones([1000, 2], np.float32), "w": np.ones([3, 2], np.float32)}
IDS = np.array([0, 3, 3, 701])


def step(optimizer, ids=IDS, params=PARAMS):
    @jax.jit
    def run(params, state):
        _, grads = te.rows.value_and_grad(
            lambda p: jnp.sum(te.lookup(p["t"], ids)) + jnp.sum(p["w"]), ids={"t": ids}
        )(params)
        return te.rows.update(optimizer, grads, state, params)

    return run(params, optimizer.init(params))


def refuse(optimizer, message):
    with pytest.raises(
        ValueError, match=r"^optimizer: wanted each row updated from that row alone, got "
    ) as error:
        step(optimizer)
    assert message in str(error.value)
    assert (
        "Train the table densely, or keep that transformation off it with optax.multi_transform."
        in str(error.value)
    )


def by_size(large, small):
    return lambda params: jax.tree.map(lambda leaf: large if leaf.size > 100 else small, params)


def stateless(change):
    """A transformation of the user's own."""
    return optax.GradientTransformation(
        lambda params: (),
        lambda updates, state, params=None: (jax.tree.map(change, updates), state),
    )


def test_labels_by_size_do_not_train_rows_by_the_wrong_rule():
    """Few rows are smaller than the bound, their table is not."""
    optimizer = optax.multi_transform(
        {"large": optax.sgd(1.0), "small": optax.set_to_zero()}, by_size("large", "small")
    )
    with pytest.raises(
        ValueError, match=r"^optimizer: wanted each row updated from that row alone, got "
    ):
        step(optimizer)
    mask = optax.add_decayed_weights(0.1, mask=by_size(True, False))
    with pytest.raises(ValueError, match="it cannot be traced for an unknown number of rows"):
        step(optax.chain(mask, optax.sgd(1.0)))


def test_labels_by_size_that_rows_share_with_their_table_are_right():
    """As many rows as lie above the bound too."""
    optimizer = optax.multi_transform(
        {"large": optax.sgd(0.25), "small": optax.set_to_zero()}, by_size("large", "small")
    )
    ids = np.arange(100)
    after, _ = step(optimizer, ids)
    np.testing.assert_array_equal(
        np.asarray(after["t"])[:, 0], np.where(np.arange(1000) < 100, 0.75, 1.0)
    )


FREEZING = {
    # jax 0.6 first computes the index from the number of rows.
    "row 0": (stateless(lambda g: g.at[0].set(0.0)), "stateless: "),
    "rows from 700 on": (
        stateless(lambda g: jnp.where(jnp.arange(g.shape[0])[:, None] < 700, g, 0.0)),
        "stateless: iota tells rows apart",
    ),
    "a mask of rows": (
        stateless(lambda g: g * np.ones([1000, 1]) if g.shape[0] != 3 else g),
        "stateless: it cannot be traced for an unknown number of rows (TypeError: mul got incompat",
    ),
    "a slice": (
        stateless(
            lambda g: jnp.concatenate(
                [jnp.zeros([1, 2]), jax.lax.slice_in_dim(g, 1, g.shape[0])], dtype=g.dtype
            )
        ),
        "stateless: slice over the rows",
    ),
}


@pytest.mark.parametrize("name", FREEZING)
def test_an_optimizer_that_freezes_some_rows_does_not_freeze_others(name):
    refuse(*FREEZING[name])


def scaled_by_the_largest():
    """Scales another parameter by the table's largest update."""

    def update(updates, state, params=None):
        return {**updates, "w": updates["w"] * jnp.max(jnp.abs(updates["t"]))}, state

    return optax.GradientTransformation(lambda params: (), update)


SHARED = {
    "found_nan": (
        optax.zero_nans,
        "got zero_nans: reduce_or over the rows",
    ),
    "global norm": (
        lambda: optax.chain(optax.snapshot("norm", global_norm), optax.sgd(0.1)),
        "got snapshot: reduce_sum over the rows",
    ),
    "another parameter": (
        scaled_by_the_largest,
        "got scaled_by_the_largest: reduce_max over the rows",
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_leaves_that_are_not_tables_never_depend_on_rows(name):
    make, message = SHARED[name]
    if name == "global norm" and not hasattr(optax, "snapshot"):
        pytest.skip("this optax has no snapshot")
    refuse(make(), message)


APART = {
    "softmax": jax.nn.softmax,
    "logsumexp": lambda g: g - jax.nn.logsumexp(g, axis=-1, keepdims=True),
    "a name": lambda g: checkpoint_name(g, "gradient"),
    "bits": lambda g: jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(g, jnp.int32) ^ 1, jnp.float32
    ),
    "bits of another width": lambda g: jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(g, jnp.int16), jnp.float32
    ),
    "a stack": lambda g: jnp.stack([g, 2 * g], -1).sum(-1),
    "a matrix": lambda g: g @ jnp.array([[1.0, 2.0], [3.0, 4.0]]),
    "transposed": lambda g: (g.T * 2).T.reshape(-1, 1, 2).squeeze(1),
    "columns": lambda g: g[:, :1] * g[..., 1, None] + g[:, 0][:, None] * g[:, -1:],
    "columns by index": lambda g: jnp.take(g, jnp.array([1, 0]), axis=1),
    "a table for all rows": lambda g: jnp.array([3.0, 5.0])[(g > 0).astype(jnp.int32)],
    "a barrier": lambda g: jnp.prod(jnp.stack(jax.lax.optimization_barrier((g, 2 * g))), axis=0),
    "constants": lambda g: g * jax.jit(lambda: jax.random.uniform(KEY) * np.array([1, 2.0]))(),
}
KEY = jax.random.key(0)


@pytest.mark.parametrize("name", APART)
def test_what_is_one_row_in_a_table_trains_as_the_dense_step(name):
    scale = np.arange(8, dtype=np.float32).reshape(4, 2) - 3
    table, ids = np.ones([9, 2], np.float32), np.array([2, 3, 5, 7])
    loss = lambda params: jnp.sum(te.lookup(params["t"], ids) * scale)

    @jax.jit
    def run(params):
        _, grads = te.rows.value_and_grad(loss, ids={"t": ids})(params)
        return te.rows.update(stateless(APART[name]), grads, (), params)[0]["t"]

    expected = table.copy()
    expected[ids] += APART[name](jnp.asarray(scale))
    np.testing.assert_allclose(run({"t": table}), expected, rtol=1e-6)


MOVED = {
    "gather over the rows": lambda g: jax.lax.gather(
        g, jnp.array([1]), jax.lax.GatherDimensionNumbers((0, 1), (), (0,)), g.shape, mode="clip"
    ),
    # As many columns of one row as the table has rows.
    "slice over the rows": lambda g: (
        jax.lax.slice(jnp.broadcast_to(g[:, :1], [g.shape[0], 1000]), (0, 0), (1, g.shape[0])).T
    ),
    "rev is not known to keep rows apart": lambda g: jax.lax.rev(g, (0,)),
    "sort is not known to keep rows apart": lambda g: jnp.sort(g, axis=0),
    "cumsum is not known to keep rows apart": lambda g: jnp.cumsum(g, axis=0),
    "pad is not known to keep rows apart": lambda g: jax.lax.pad(g, 0.0, ((1, -1, 0), (0, 0, 0))),
    "reshape over the rows": lambda g: g.reshape(2, -1).T,
    "dot_general over the rows": lambda g: g @ (g.T @ g),
    "dot_general over the rows.": lambda g: (g @ g.T) @ g,
    "scan is not known to keep rows apart": lambda g: jax.lax.scan(
        lambda total, x: (total + x, total), jnp.zeros(2), g
    )[1],
}


@pytest.mark.parametrize("reason", MOVED)
def test_what_mixes_or_moves_rows_is_refused(reason):
    refuse(stateless(MOVED[reason]), reason)


MIXED = {
    "add got incompatible shapes": lambda s, t: (s + t, t),
    "a state float32.* becomes": lambda s, t: (t, s),
}


@pytest.mark.parametrize("reason", MIXED)
def test_rows_of_two_tables_are_never_mixed(reason):
    """Not even where both have as many rows, so that the shapes of a step fit."""
    params = {name: jnp.ones([6, 2]) for name in "st"}
    ids = {name: np.array([1, 3]) for name in params}

    def mixed(updates, state, params=None):
        return updates, dict(zip("st", MIXED[reason](updates["s"], updates["t"]), strict=True))

    optimizer = optax.GradientTransformation(lambda params: params, mixed)
    loss = lambda p: sum(te.lookup(p[name], ids[name]).sum() for name in p)
    _, grads = te.rows.value_and_grad(loss, ids=ids)(params)
    with pytest.raises(ValueError, match=reason):
        te.rows.update(optimizer, grads, params, params)


def shared_scan_over_rows(updates):
    """A number that all rows share, from a loop of as many steps as there are rows."""
    steps = updates["t"].shape[0]
    number = jax.lax.scan(lambda x, _: (0.9 * x, None), 1.0, None, length=steps)[0]
    return jax.tree.map(lambda g: number * g, updates)


def shared_branch_over_rows(updates):
    """A number that all rows share, from a branch that counts the rows."""
    count = jax.lax.cond(
        updates["w"][0, 0] > 0, lambda: jnp.ones(updates["t"].shape[0]).sum(), lambda: 1.0
    )
    return jax.tree.map(lambda g: count * g, updates)


@pytest.mark.parametrize("change", [shared_scan_over_rows, shared_branch_over_rows])
def test_a_shared_number_that_depends_on_the_number_of_rows_is_refused(change):
    optimizer = optax.GradientTransformation(
        lambda params: (), lambda updates, state, params=None: (change(updates), state)
    )
    with pytest.raises(ValueError, match="wanted each row updated from that row alone"):
        step(optimizer)


# One number for the table of 1000 rows and another for the rest, as a constant of each kind.


def chosen(one, other):
    """Multiplies by one of two numbers."""
    return lambda make: lambda g: g * make(one if g.shape == (1000, 2) else other)


def hidden(value):
    """In the middle of more numbers than `str` prints."""
    return jnp.asarray(np.insert(np.ones(5000, np.float32), 2500, value)).prod()


def at_once(value):
    with jax.ensure_compile_time_eval():
        return jnp.sin(jnp.array([value, 1.0]))


def called_back(callback):
    return lambda value: callback(lambda: np.float32(value), Shape([], np.float32))


Shape = jax.ShapeDtypeStruct
CONSTANTS = {
    "float": float,
    "numpy": lambda value: np.array([value, 1], np.float32),
    "jax": lambda value: jnp.array([value, 1]),
    "long": hidden,
    "computed at once": at_once,
    "nested": lambda value: jax.jit(lambda: np.array([value, 1], np.float32))(),
    "branch": lambda value: jax.lax.cond(
        jnp.ones([]) > 0, lambda: jnp.array([value, 1]), lambda: jnp.ones(2)
    ),
    "loop": lambda value: jax.lax.fori_loop(0, 2, lambda _, x: x * value, jnp.ones([])),
    "remat": jax.checkpoint(lambda value: jnp.array([value, 1]), static_argnums=0),
    "key": lambda value: jax.random.uniform(jax.random.key(int(8 * value))),
    "sign of zero": lambda value: jnp.array([np.copysign(0, value - 0.3), 1]),
    "pure_callback": called_back(jax.pure_callback),
    "io_callback": called_back(jax.experimental.io_callback),
}
CHOSEN = {name: chosen(0.5, 0.25)(make) for name, make in CONSTANTS.items()} | {
    "power": lambda g: g ** g.shape[0] if g.ndim == 2 and g.shape[0] != 3 else g,
    "equation": lambda g: 2 * g if g.shape[0] == 1000 else jnp.abs(g),
    "comparison": lambda g: jnp.where(g > 0 if g.shape[0] == 1000 else g >= 0, g, 1.0),
    "column": lambda g: g * (g[:, :1] if g.shape[0] == 1000 else g[:, 1:]),
    "height": lambda g: g * np.full(2, g.shape[0], np.float32),
    "block": lambda g: g * (0.5 if g.shape[0] == len(IDS) else 0.25),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_an_optimizer_that_chooses_by_the_number_of_rows_is_refused(name):
    """A block has another number, so it would train by another rule."""
    reason = f"{name} is not known to keep rows apart" if "callback" in name else ""
    refuse(stateless(CHOSEN[name]), reason)


def test_a_state_that_a_shared_choice_empties_is_refused():
    """It keeps the last gradient of even steps."""

    def update(updates, state, params=None):
        count, _ = state
        last = jax.tree.map(lambda g: jnp.where(count % 2 == 0, g, 0.0), updates)
        return jax.tree.map(lambda g: -g, updates), (count + 1, last)

    init = lambda params: (jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))
    refuse(
        optax.GradientTransformation(init, update),
        "select_n by a condition outside of the row decides whether its gradient or state is used",
    )


def emitting(emit):
    """Gathers gradients, and emits them on some steps."""

    def update(updates, state, params=None):
        count, gathered = state
        now = emit(count)
        gathered = jax.tree.map(jnp.add, gathered, updates)
        emitted = jax.tree.map(lambda g: -now * g, gathered)
        return emitted, (count + 1, jax.tree.map(lambda g: (1 - now) * g, gathered))

    init = lambda params: (jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))
    return optax.GradientTransformation(init, update)


def choosing(choose):
    """Chooses by the number of the step."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros([], jnp.int32),
        lambda updates, count, params=None: (
            jax.tree.map(functools.partial(choose, count), updates),
            count + 1,
        ),
    )


def test_a_choice_of_all_rows_may_not_decide_whether_a_gradient_is_used():
    refuse(
        emitting(lambda count: (count % 3 == 2).astype(jnp.float32)),
        "by a condition outside of the row decides whether its gradient or state is used",
    )
    refuse(
        choosing(lambda count, g: jnp.stack([jnp.zeros_like(g), g], 1)[:, (count % 3 == 2) * 1]),
        "gather by a condition outside of the row decides whether its gradient or state is used",
    )
    refuse(
        stateless(lambda g: jnp.where(jnp.sum(jnp.ones(3)) > 2, g, 0.0)),
        "select_n by a condition outside of the row decides whether its gradient or state is used",
    )


@pytest.mark.parametrize(
    "schedule",
    [
        lambda count: jnp.where(count < 1, 0.5, 0.25),
        lambda count: jnp.where(count < 1, 0.5, 0.25) + 0.1 * (count > 5),
        lambda count: 0.5 * (count < 100) + 0.25 * (count >= 100),
        lambda count: 0.5 * 0.5 ** (count > 0),
    ],
    ids=["a choice", "a sum", "products", "a power"],
)
def test_a_schedule_that_chooses_a_step_size_is_no_such_choice(schedule):
    by_hand = choosing(lambda count, g: -schedule(count) * g)
    for optimizer in (optax.sgd(schedule), by_hand):
        after, _ = step(optimizer)
        np.testing.assert_allclose(np.asarray(after["t"])[[0, 3], 0], [0.5, 0])


# Dtypes.

DTYPES = ["bfloat16", "float16", "float32", "int8", "int32"]


def with_state(state_dtype, added_dtype):
    """Adds the sign of the gradient, in one dtype, to a state of another."""

    def update(updates, state, params=None):
        after = jax.tree.map(lambda s, g: s + jnp.sign(g).astype(added_dtype), state, updates)
        return jax.tree.map(lambda g: -g, updates), after

    init = lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, state_dtype), params)
    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(DTYPES[:3]), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_a_state_keeps_its_dtype_or_is_refused(dtype, state_dtype, added_dtype):
    params = {"t": jnp.ones([1000, 2], dtype), "w": jnp.ones([3, 2])}
    optimizer = with_state(state_dtype, added_dtype)
    widened = jnp.promote_types(state_dtype, added_dtype)
    if widened != jnp.dtype(state_dtype):
        with pytest.raises(ValueError, match=rf"state {state_dtype}\[.* becomes {widened}\["):
            step(optimizer, params=params)
        return
    after, state = step(optimizer, params=params)
    assert (after["t"].dtype, state["t"].dtype) == (dtype, state_dtype)
    assert np.asarray(state["t"][:4, 0], np.float32).tolist() == [1, 0, 0, 1]


def test_float32_hyperparameters_do_not_widen_a_state_of_16_bits():
    params = {"t": jnp.ones([1000, 2], jnp.bfloat16), "w": jnp.ones([3, 2])}
    optimizer = optax.inject_hyperparams(optax.radam, hyperparam_dtype=jnp.float32)(0.1)
    with pytest.raises(ValueError, match=r"a state bfloat16\[.* becomes float32\["):
        step(optimizer, params=params)


def test_a_state_of_another_shape_is_refused():
    """Its rows would be broadcast, or read as those of the table."""
    narrow = lambda state: jax.tree.map(lambda s: s.mean(1, keepdims=True), state)
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    refuse(
        optax.GradientTransformation(
            zeros, lambda updates, state, params: (updates, narrow(state))
        ),
        "a state float32[table0_rows, 2] becomes float32[table0_rows, 1]",
    )
    squares = lambda params: jax.tree.map(lambda p: jnp.zeros((p.shape[0], p.shape[0])), params)
    scaled = lambda updates, state: jax.tree.map(lambda g, s: g * s.sum(1)[:, None], updates, state)
    refuse(
        optax.GradientTransformation(
            squares, lambda updates, state, params: (scaled(updates, state), state)
        ),
        "it cannot be traced for an unknown number of rows (TypeError: mul got incompatible",
    )


def test_a_state_of_another_optimizer_is_not_blamed_on_the_optimizer():
    adam, more = optax.adam(0.1), {"t": jnp.ones([1001, 2]), "w": PARAMS["w"]}
    states = {
        "[0].mu['t'] [1000, 2], got [0].mu['t'] [1001, 2]": adam.init(more),
        "[0].count [], got no array there": optax.sgd(0.1).init(PARAMS),
        "[0].count [], got [0].trace['t'] [1000, 2]": optax.sgd(0.1, 0.9).init(PARAMS),
        "no array there, got [0].nu_max['t'] [1000, 2]": optax.amsgrad(0.1).init(PARAMS),
        "its structure, got another": list(adam.init(PARAMS)),
    }
    for message, state in states.items():
        with pytest.raises(ValueError, match=r"^state: wanted that of optimizer\.init") as error:
            te.rows.update(adam, rows([1, 2]), state, PARAMS)
        assert message in str(error.value)
    two = lambda p: (jnp.zeros_like(p),) * (2 if p.shape[0] == 1000 else 1)
    init = lambda params: jax.tree.map(two, params)
    refuse(
        optax.GradientTransformation(init, lambda updates, state, params: (updates, state)),
        "init depends on the number of rows",
    )


def test_a_refusal_gives_the_true_reason():
    every_third = optax.MultiSteps(optax.adam(0.1), 3)
    refuse(optax.novograd(0.1), "scale_by_novograd: reduce_sum over the rows")
    refuse(every_third, "one condition for the whole table decides how its rows are updated")
    refuse(optax.adaptive_grad_clip(0.1), "it cannot be traced for an unknown number of rows")


# Nothing is kept beyond a trace.


def test_an_optimizer_that_closes_over_a_value_uses_that_of_each_trace():
    rate = [1.0]
    optimizer = stateless(lambda g: -rate[0] * g)

    def after_with(value):
        rate[0] = value
        return float(step(optimizer)[0]["t"][0, 0])

    def after_with_traced(value):
        @jax.jit
        def run(params, value):
            rate[0] = value
            grads = {"t": te.rows.RowGradient(jnp.array([0]), jnp.ones([1, 2]), 1000)}
            params, _ = te.rows.update(optimizer, grads, (), params)
            return params["t"][0, 0]

        return float(run({"t": jnp.ones([1000, 2])}, value))

    assert [after_with(0.5), after_with(0.25)] == [0.5, 0.75]
    assert [after_with_traced(0.5), after_with_traced(0.25)] == [0.5, 0.75]


def test_extra_arguments_may_be_anything_that_the_optimizer_takes():
    def update(updates, state, params=None, *, flag, mode, value):
        assert (flag, mode) == (True, "double")
        return jax.tree.map(lambda g: -2 * value * g, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    arguments = {"flag": True, "mode": "double", "value": jnp.array(0.25)}
    after, _ = te.rows.update(optimizer, rows([1, 2]), (), PARAMS, **arguments)
    np.testing.assert_array_equal(np.asarray(after["t"])[:4, 0], [1, 0.5, 0.5, 1])


@pytest.mark.parametrize("ids", [[3, 3], [5, 2], [-1, 3]])
def test_ids_made_by_hand_must_ascend(ids):
    message = (
        r"^grads: wanted row ids that ascend from 0 or above, each of them once, got \[-?\d, \d\]$"
    )
    with pytest.raises(ValueError, match=message):
        te.rows.update(optax.sgd(1.0), rows(ids), optax.sgd(1.0).init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=message):
        te.rows.add(rows([1, 2]), rows(ids))


def test_two_updates_of_one_gradient_both_start_from_the_rows_as_they_are():
    @jax.jit
    def twice(params, state):
        _, grads = te.rows.value_and_grad(
            lambda p: jnp.sum(te.lookup(p["t"], IDS)), ids={"t": IDS}
        )(params)
        params, state = te.rows.update(optimizer, grads, state, params)
        params = jax.tree.map(lambda leaf: leaf * 10, params)
        return te.rows.update(optimizer, grads, state, params)

    optimizer = optax.sgd(0.25)
    after, _ = twice(PARAMS, optimizer.init(PARAMS))
    np.testing.assert_array_equal(np.asarray(after["t"])[[0, 1, 3], 0], [7.25, 10.0, 4.5])


def rows(ids, scale=1.0):
    """Gradients of one number, and of zeros for padding."""
    ids, ones = np.array(ids), np.ones([len(ids), 2], np.float32)
    ones[ids >= 1000] = 0
    return {
        "t": te.rows.RowGradient(ids, scale * ones, 1000),
        "w": scale * np.ones([3, 2], np.float32),
    }


def dense(ids, values):
    """The table's gradient, which drops padding."""
    table = np.zeros([2000, 2], np.float32)
    np.add.at(table, np.asarray(ids), np.asarray(values))
    return table[:1000]


def test_tree_map_refuses_to_add_gradients_of_different_rows():
    with pytest.raises(ValueError, match=r"te\.rows\.add adds gradients of different ids"):
        jax.tree.map(jnp.add, rows([1, 2]), rows([3, 4]))
    same = jax.tree.map(np.add, rows([1, 2]), rows([1, 2], 2.0))
    assert (same["t"].ids.tolist(), same["t"].values.tolist()) == ([1, 2], [[3.0, 3.0]] * 2)
    optimizer = optax.sgd(0.25)
    after, _ = te.rows.update(optimizer, rows([1, 2]), optimizer.init(PARAMS), PARAMS)
    assert np.flatnonzero(np.asarray(after["t"][:, 0]) != 1).tolist() == [1, 2]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_gradient_of_rows_means_what_the_dense_one_means(jit):
    def sums(scale):
        some, more = rows([1, 3, 1000], 1.0), rows([3, 998, 1001], scale)
        total = te.rows.add(some, more)
        halves = jax.tree.map(lambda g: g / 2, total)
        return (
            [plain(grads)["t"] for grads in (some, more, total, halves)],
            global_norm({"t": total["t"]}),
            len(jax.tree.leaves(total)),
        )

    grads, norm, leaves = (jax.jit(sums) if jit else sums)(3.0)
    some, more, total, halves = (dense(*each) for each in grads)
    np.testing.assert_array_equal(total, some + more)
    np.testing.assert_array_equal(halves, (some + more) / 2)
    np.testing.assert_allclose(norm, np.linalg.norm(total), rtol=1e-6)
    assert leaves == 3  # the rows, their fingerprint, and w


@pytest.mark.parametrize("leave", [jax.jit, jax.vmap])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("use", ["add", "update"])
def test_a_gradient_that_left_its_trace_names_the_way(leave, jit, use):
    optimizer = optax.sgd(0.1)

    def grads(ids):
        step = te.rows.value_and_grad(lambda p: jnp.sum(te.lookup(p["t"], ids)), ids={"t": ids})
        return step(PARAMS)[1]

    left = leave(grads)(IDS[:, None])
    uses = {
        "add": lambda grads: te.rows.add(grads, grads),
        "update": lambda grads: te.rows.update(optimizer, grads, optimizer.init(PARAMS), PARAMS),
    }
    message = (
        r"^grads: wanted a RowGradient of this jit, got one that left its jit or vmap \(call "
        r"te\.rows\.value_and_grad and te\.rows\.update in one jit, or return its ids and values\)$"
    )
    with pytest.raises(TypeError, match=message):
        (jax.jit(uses[use]) if jit else uses[use])(left)


def test_a_scan_that_carries_a_gradient_names_the_way():
    def body(grads, ids):
        step = te.rows.value_and_grad(lambda p: jnp.sum(te.lookup(p["t"], ids)), ids={"t": ids})
        return te.rows.add(grads, step(PARAMS)[1]), None

    with pytest.raises(TypeError, match=r"scan over the batches inside the loss of te\.rows\.v"):
        jax.lax.scan(body, rows([1, 2]), np.array([[1, 2], [3, 4]]))


def test_a_gradient_without_rows_changes_no_table():
    optimizer = optax.adam(0.1)
    none = {"t": te.rows.RowGradient([], np.zeros([0, 2], np.float32), 1000), "w": PARAMS["w"]}
    step = jax.jit(lambda state: te.rows.update(optimizer, none, state, PARAMS))
    after, _ = step(optimizer.init(PARAMS))
    np.testing.assert_array_equal(after["t"], PARAMS["t"])
    assert len(te.rows.add(none, rows([3]))["t"].ids) == 1


def test_tables_in_lists_and_tuples_have_ids_in_lists_and_tuples():
    table = np.arange(10.0, dtype=np.float32).reshape(5, 2)
    params, ids = {"e": [table, (table, table)], "w": table}, {"e": [None, ([3], [1, 2])]}

    def loss(params):
        unread, (first, second) = params["e"]
        return te.lookup(first, [3]).sum() + te.lookup(second, [1, 2]).sum() + unread.sum()

    step = te.rows.value_and_grad(loss, ids=ids, max_rows={"e": ([None, (None, 1)])})
    value, grads = step(params)
    assert np.isnan(value)
    assert grads["e"][0].shape == (5, 2)
    assert [grad.ids.tolist() for grad in grads["e"][1]] == [[3], [1]]
    for max_rows in ({"e": [2]}, {"e": 2}, [2]):
        with pytest.raises(ValueError, match=r"^params\S*: wanted a table"):
            te.rows.value_and_grad(loss, ids=ids, max_rows=max_rows)(params)


def test_a_gradient_from_outside_is_a_constant_of_the_program_and_the_next_is_another():
    optimizer = optax.sgd(0.25)
    run = jax.jit(
        lambda params, grads: te.rows.update(optimizer, grads, optimizer.init(params), params)
    )
    for ids in ([0, 3, 701], [1, 3, 999]):
        after, _ = run(PARAMS, rows(ids))
        assert np.flatnonzero(np.asarray(after["t"][:, 0]) != 1).tolist() == ids


# Steps in other forms.


def test_steps_in_a_scan_and_with_aux_are_those_of_a_loop():
    optimizer, batches = optax.adamw(0.1), np.array([[0, 3], [3, 5], [0, 0]])

    def one(carry, ids):
        params, state = carry
        loss = lambda p: (jnp.sum(jnp.tanh(te.lookup(p["t"], ids))), ids)
        (value, aux), grads = te.rows.value_and_grad(loss, ids={"t": ids}, has_aux=True)(params)
        return te.rows.update(optimizer, grads, state, params), (value, aux)

    first = jax.tree.map(jnp.asarray, (PARAMS, optimizer.init(PARAMS)))
    scanned, (_, aux) = jax.jit(lambda carry: jax.lax.scan(one, carry, batches))(first)
    looped = functools.reduce(lambda carry, ids: jax.jit(one)(carry, ids)[0], batches, first)
    np.testing.assert_array_equal(aux, batches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), scanned, looped)


def test_a_step_inside_of_a_shard_map_with_a_table_on_each_device():
    optimizer = optax.adam(0.1)
    mesh, split = jax.sharding.Mesh(np.array(jax.devices()), ["x"]), jax.sharding.PartitionSpec("x")
    tables, ids = np.ones([8 * 20, 2], np.float32), np.arange(16) % 5

    def one(table, ids):
        params = {"t": table}
        _, grads = te.rows.value_and_grad(
            lambda p: jnp.sum(jnp.tanh(te.lookup(p["t"], ids))), ids={"t": ids}
        )(params)
        return te.rows.update(optimizer, grads, optimizer.init(params), params)[0]["t"]

    found = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(split, split), out_specs=split))(
        tables, ids
    )
    want = [
        jax.jit(one)(table, some)
        for table, some in zip(np.split(tables, 8), np.split(ids, 8), strict=True)
    ]
    np.testing.assert_allclose(found, np.concatenate([*map(np.asarray, want)]), rtol=1e-6)


def test_the_global_norm_is_clipped_before_the_update():
    clip, optimizer, ids = optax.clip_by_global_norm(0.5), optax.sgd(1.0), np.array([0, 3, 3])
    loss = lambda p: jnp.sum(jnp.tanh(te.lookup(p["t"], ids))) + jnp.sum(p["w"])

    @jax.jit
    def run(params):
        _, grads = te.rows.value_and_grad(loss, ids={"t": ids})(params)
        grads, _ = clip.update(grads, optax.EmptyState())
        return te.rows.update(optimizer, grads, optimizer.init(params), params)[0]

    @jax.jit
    def dense_run(params):
        chain = optax.chain(clip, optimizer)
        return optax.apply_updates(
            params, chain.update(jax.grad(loss)(params), chain.init(params))[0]
        )

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), run(PARAMS), dense_run(PARAMS)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_tables_of_16_bits_train(dtype):
    params, optimizer = {"t": np.ones([5, 2], dtype)}, optax.chain(optax.clip(0.5), optax.sgd(1.0))

    @jax.jit
    def run(params, ids, values):
        return te.rows.update(
            optimizer, {"t": te.rows.RowGradient(ids, values, 5)}, optimizer.init(params), params
        )

    after, _ = run(params, np.array([3]), np.ones([1, 2], dtype))
    assert after["t"].dtype == dtype
    assert np.asarray(after["t"])[:, 0].tolist() == [1, 1, 1, 0.5, 1]


@pytest.mark.parametrize("size", [1, 2, 1024, 1025])
def test_a_batch_may_have_as_many_ids_as_the_table_has_rows(size):
    """The proof tells rows from other sizes: the number that is updated at a time is never the
    table's."""
    after, _ = step(
        optax.sgd(0.25), np.arange(size), {"t": np.ones([size, 2], np.float32), "w": PARAMS["w"]}
    )
    np.testing.assert_array_equal(after["t"], 0.75)


# Random combinations.

PARTS = {
    "adam": optax.scale_by_adam,
    "trace": lambda: optax.trace(0.9),
    "rms": optax.scale_by_rms,
    "clip": lambda: optax.clip(0.3),
    "centralize": optax.centralize,
    "decay": lambda: optax.add_decayed_weights(0.1),
    "decay, masked": lambda: optax.add_decayed_weights(0.1, mask=made.tables_only),
    "schedule": lambda: optax.scale_by_schedule(optax.piecewise_constant_schedule(1.0, {3: 0.5})),
    "global norm": lambda: optax.clip_by_global_norm(1.0),
    "every": lambda: optax.apply_every(2),
    "nans": optax.zero_nans,
}
REFUSED = {"global norm", "every", "nans"}


def combined(names, rest, wrapped):
    chain = optax.chain(*(PARTS[name]() for name in names), optax.scale(-0.1))
    if wrapped == "labels":
        others = optax.chain(*(PARTS[name]() for name in rest), optax.scale(-0.1))
        return optax.multi_transform({"rows": chain, "rest": others}, made.labels)
    return optax.masked(chain, made.tables_only) if wrapped == "mask" else chain


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(list(PARTS)), max_size=4),
    st.lists(st.sampled_from(list(PARTS)), max_size=2),
    st.sampled_from(["", "mask", "labels"]),
)
def test_random_chains_masks_and_labels_are_lazy_or_refused(names, rest, wrapped):
    message = refused_or_lazy(combined(names, rest, wrapped))
    assert (message is not None) == bool(REFUSED & set(names))


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.lists(st.sampled_from(list(PARTS)), max_size=4),
    st.lists(st.sampled_from(list(PARTS)), max_size=2),
    st.sampled_from(["", "mask", "labels"]),
)
def test_a_combination_is_refused_only_for_its_parts(names, rest, wrapped):
    """Labels keep what is not row-wise off the tables."""
    assert (made.refusal(combined(names, rest, wrapped)) is not None) == bool(REFUSED & set(names))


def test_tables_whose_sizes_are_close_are_told_apart():
    """The check adds rows to each table; with its own rows one has as many as another."""
    params = {f"t{i:02}": jnp.ones([20 - i, 2]) for i in range(8)}
    ids = {name: np.array([1, 3]) for name in params}
    optimizer = optax.adam(0.1)

    @jax.jit
    def run(params, state):
        loss = lambda p: sum(te.lookup(p[name], ids[name]).sum() for name in p)
        _, grads = te.rows.value_and_grad(loss, ids=ids)(params)
        return te.rows.update(optimizer, grads, state, params)

    after, state = run(params, optimizer.init(params))
    for tree in (after, state[0].mu, state[0].nu):
        for name, table in tree.items():
            changed = np.asarray(table != (1 if tree is after else 0)).all(axis=1)
            assert (table.shape, np.flatnonzero(changed).tolist()) == (params[name].shape, [1, 3])


def test_many_tables_share_the_traces_of_one_step():
    """Two for the check, and one for the step: tracing would take seconds otherwise."""
    adam, traces = optax.adam(0.1), []

    def count_and_update(*args):
        traces.append(args)
        return adam.update(*args)

    optimizer = optax.GradientTransformation(adam.init, count_and_update)
    params = {f"t{i}": jax.ShapeDtypeStruct([10000 + i, 8], jnp.float32) for i in range(10)}
    ids = {name: np.arange(2000) for name in params}

    def step(params):
        _, grads = te.rows.value_and_grad(lambda p: jnp.zeros([]), ids=ids)(params)
        return te.rows.update(optimizer, grads, optimizer.init(params), params)

    jax.eval_shape(step, params)
    assert len(traces) == 3


# Last, for they clear what is compiled.

STRICT = {"jax_debug_nans": True, "jax_disable_jit": True, "jax_transfer_guard": "disallow"}


@jax.jit
def adam_step(params, state, ids):
    _, grads = te.rows.value_and_grad(
        lambda p: jnp.sum(te.lookup(p["t"], ids)) + jnp.sum(p["w"]), ids={"t": ids}
    )(params)
    return te.rows.update(optax.adam(0.1), grads, state, params)


@functools.cache
def in_no_strict_mode():
    """The arguments of a step, and its result."""
    arguments = jax.tree.map(jnp.asarray, (PARAMS, optax.adam(0.1).init(PARAMS), IDS))
    return arguments, adam_step(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("flag", STRICT)
def test_the_proof_holds_in_strict_modes(flag):
    arguments, want = in_no_strict_mode()
    jax.clear_caches()
    before = getattr(jax.config, flag)
    jax.config.update(flag, STRICT[flag])
    try:
        found = adam_step(*arguments)
    finally:
        jax.config.update(flag, before)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, want)
