"""Each optimizer of optax trains as the lazy rule says, or is refused: no third outcome."""

import functools

import jax
import optax
import optimizers as made
import pytest
from cases import few
from compare import near
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer_embed as te

STEPS = 4
# float64, 4 steps of some 50 roundings each.
TOLERANCE = 1e-11
FASTER_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
EXPORTED = dict(made.exported())
PAGE = made.PAGE.read_text(encoding="utf-8")
needs_the_optax_of_the_page = pytest.mark.skipif(
    optax.__version__ not in PAGE, reason="the page is of another optax"
)


@jax.jit
def both_gradients(batch):
    """By rows, as ids and values, and dense; always at the first parameters: so rounding does not
    grow from step to step."""
    ids, params = {"table": batch[0], "other": batch[1]}, made.make_params()
    _, grads = te.rows.value_and_grad(made.loss, ids=ids)(params, batch)
    is_gradient = lambda leaf: isinstance(leaf, te.rows.RowGradient)
    plain = lambda leaf: (leaf.ids, leaf.values) if is_gradient(leaf) else leaf
    dense = jax.grad(made.loss)(params, batch)
    return jax.tree.map(plain, grads, is_leaf=is_gradient), dense


@functools.cache
def gradients():
    return [both_gradients(made.make_batch(step)) for step in range(STEPS)]


def refused_or_lazy(optimizer):
    """The message; or None after steps equal to those of the oracle, in parameters and state."""
    with jax.enable_x64():
        message = made.refusal(optimizer)
        if message is not None:
            ours = "optimizer: wanted each row updated from that row alone, got "
            assert ours in message or message.startswith("state: "), message
            assert len(message) < 400
            return message
        extra = made.extra_arguments(optimizer)

        @functools.partial(jax.jit, compiler_options=FASTER_TO_COMPILE)
        def both_steps(ours, lazy, grads, dense_grads):
            params, state = ours
            return (
                te.rows.apply_gradients(optimizer, made.by_rows(grads), state, params, **extra),
                made.lazy_step(optimizer, *lazy, dense_grads, **extra),
            )

        params = made.make_params()
        ours = lazy = params, made.quietly(optimizer.init, params)
        for grads in gradients():
            ours, lazy = made.quietly(both_steps, ours, lazy, *grads)
        near(ours, lazy, rtol=TOLERANCE, atol=TOLERANCE)
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", few(EXPORTED, 6))
def test_an_optimizer_of_optax_is_the_lazy_one_or_refused_as_the_page_says(name):
    reason = made.reason(refused_or_lazy(made.quietly(EXPORTED[name])))
    assert reason == made.read_page()[name] or optax.__version__ not in PAGE


@needs_the_optax_of_the_page
def test_the_page_has_every_optimizer_of_optax():
    reasons = made.read_page()
    assert set(reasons) == set(EXPORTED)
    assert made.page({name: reasons[name] for name in EXPORTED}) == PAGE


PARTS = {
    "adam": optax.scale_by_adam,
    "trace": lambda: optax.trace(0.9),
    "clip": lambda: optax.clip(0.3),
    "centralize": optax.centralize,
    "decay": lambda: optax.add_decayed_weights(0.1),
    "schedule": lambda: optax.scale_by_schedule(optax.piecewise_constant_schedule(1.0, {3: 0.5})),
    "global norm": lambda: optax.clip_by_global_norm(1.0),
    "every": lambda: optax.apply_every(2),
    "nans": optax.zero_nans,
}
REFUSED = {"global norm", "every", "nans"}


def chained(names):
    return optax.chain(*(PARTS[name]() for name in names), optax.scale(-0.1))


def combined(names, rest, wrapped):
    if wrapped == "labels":
        return optax.multi_transform({"rows": chained(names), "rest": chained(rest)}, made.labels)
    return optax.masked(chained(names), made.tables_only) if wrapped else chained(names)


@pytest.mark.slow
@settings(max_examples=4)
@given(
    st.lists(st.sampled_from(list(PARTS)), max_size=4),
    st.lists(st.sampled_from(list(PARTS)), max_size=2),
    st.sampled_from(["", "mask", "labels"]),
)
def test_random_chains_masks_and_labels_are_lazy_or_refused_for_their_parts(names, rest, wrapped):
    """Labels keep what is not row-wise off the tables."""
    message = refused_or_lazy(combined(names, rest, wrapped))
    assert (message is not None) == bool(REFUSED & set(names))
