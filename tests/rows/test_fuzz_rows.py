"""Any arguments of the functions of `te.rows`: the step of SGD by plain loops, or a TypeError or
ValueError of ours."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steps
from cases import few
from compare import near
from fuzzing import ARRAYS, VALUES, call, named_on_failure

import transformer_embed as te

OPTIMIZER = optax.sgd(0.5)
PARAMS = {"table": jnp.asarray(ARRAYS[8])}
IDS = ARRAYS[1] % 4
STEP = {"table": PARAMS["table"], "ids": IDS, "max_rows": None}
GRADS = {"table": te.rows.RowGradient(jnp.array([0, 2]), jnp.ones([2, 3]), vocab_size=4)}
CALLS = {
    te.rows.value_and_grad: {"ids": {"table": IDS}},
    te.rows.apply_gradients: {"grads": GRADS, "params": PARAMS},
}


def two_steps_at_once(table, ids, max_rows):
    """SGD with the gradient of the sum of the rows of ids, twice: the value, and the table."""

    def loss(params):
        return jnp.sum(te.lookup(params["table"], ids).astype(jnp.float32))

    params = {"table": table}
    value, grads = te.rows.value_and_grad(loss, ids={"table": ids}, max_rows=max_rows)(params)
    params, _ = te.rows.apply_gradients(
        OPTIMIZER, steps.add(grads, grads), OPTIMIZER.init(params), params
    )
    return value, params["table"]


def check(changes):
    with named_on_failure(changes):
        arguments = STEP | changes
        if isinstance(arguments["ids"], dict):  # a gradient of plain arrays, by jax alone
            return
        returned, result = call(two_steps_at_once, arguments)
        assert returned or changes
        if returned:
            check_result(*result, **arguments)


def check_result(value, got, *, table, ids, max_rows):
    table = np.asarray(table).astype(np.float64)
    ids = [int(each) for each in np.ravel(np.asarray(ids))]
    held = sorted({min(max(i, 0), len(table) - 1) for i in ids})
    if not isinstance(max_rows, dict | list | tuple | None):
        held = held[: int(max_rows)]
    for i in ids:
        if i in held:
            table[i] -= 1
    near(np.asarray(got).astype(np.float64), table, rtol=1e-2 if got.dtype.itemsize == 2 else 1e-6)
    assert np.isnan(value) == any(i not in held for i in ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEP)
def test_any_value_in_a_place_of_a_step_is_right_or_our_error(name):
    check({})
    for value in few(VALUES, 5):
        check({name: value})


def step_of_trees(function, **arguments):
    if function is te.rows.apply_gradients:
        # Errors about a state or an optimizer are those of jax and optax.
        return function(OPTIMIZER, state=OPTIMIZER.init(PARAMS), **arguments)
    loss = lambda params: jnp.sum(te.lookup(params["table"], IDS))
    return function(loss, **arguments)(PARAMS)


TREES = [(function, name) for function, arguments in CALLS.items() for name in arguments]


@pytest.mark.parametrize(
    ("function", "name"), TREES, ids=lambda each: getattr(each, "__name__", each)
)
def test_any_tree_is_taken_or_named(function, name):
    assert call(functools.partial(step_of_trees, function), CALLS[function])[0]
    for value in few(VALUES, 8):
        with named_on_failure({name: value}):
            call(functools.partial(step_of_trees, function), CALLS[function] | {name: value})
