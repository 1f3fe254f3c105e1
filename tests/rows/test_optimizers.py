"""Each optimizer of optax trains as the lazy rule says, or is refused: no third outcome."""

import functools

import jax
import numpy as np
import optax
import optimizers as made
import pytest
from cases import few
from compare import near

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


def gradients(seed):
    """Of the rows that ids name, with padding, and dense; rounding does not grow from step to step."""
    rng, params = np.random.default_rng(seed), made.make_params()
    grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)
    ids = np.append(np.sort(rng.choice(made.VOCAB_SIZE, 6, replace=False)), [made.VOCAB_SIZE] * 2)
    ids[-1] += 1
    rows, table = grads["embed"]["table"][:8], np.zeros_like(grads["embed"]["table"])
    rows[-2:], table[ids[:-2]] = 0, rows[:-2]
    return ids, rows, grads | {"embed": {"table": table}}


def refused_or_lazy(optimizer):
    """The message; or None after steps equal to those of the oracle, in parameters and state."""
    with jax.enable_x64():
        message = made.refusal(optimizer)
        if message is not None:
            ours = "optimizer: wanted each row updated from that row alone, got "
            assert ours in message or message.startswith("state: "), message
            assert len(message) < 450
            return message
        extra = made.extra_arguments(optimizer)

        @functools.partial(jax.jit, compiler_options=FASTER_TO_COMPILE)
        def both_steps(ours, lazy, ids, rows, dense_grads):
            params, state = ours
            by_rows = te.rows.RowGradient(ids, rows, made.VOCAB_SIZE)
            grads = dense_grads | {"embed": {"table": by_rows}}
            return (
                te.rows.apply_gradients(optimizer, grads, state, params, **extra),
                made.lazy_step(optimizer, *lazy, dense_grads, **extra),
            )

        params = made.make_params()
        ours = lazy = params, made.quietly(optimizer.init, params)
        for seed in range(STEPS):
            ours, lazy = made.quietly(both_steps, ours, lazy, *gradients(seed))
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
