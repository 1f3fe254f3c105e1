"""Any arguments at all: a public function gives what a slow oracle gives, or raises a TypeError or
ValueError of ours, which names one."""

import inspect
import itertools
import random

import cases
import matplotlib.figure
import public
import pytest
from calls import GOOD, IDS, POSITIONS, TABLE
from cases import few
from fuzzing import VALUES, bounded, call, named_on_failure
from meshes import mesh_of, put
from references import CHECKS, assert_right

import transformer_embed as te

every_function = pytest.mark.parametrize(
    "function", GOOD, ids=lambda function: function.__qualname__
)


def changes_of(function):
    """Any value in any one place."""
    return list(itertools.product(inspect.signature(function).parameters, VALUES))


def expect_right(function, *changes):
    """The result with these changes of the arguments, or None after an error of ours."""
    arguments = GOOD[function] | {name: bounded(name, value) for name, value in changes}
    with named_on_failure(arguments):
        returned, result = call(function, arguments)
        if returned:
            assert_right(function, result, **arguments)
    return returned


@every_function
def test_an_argument_gives_a_right_result_or_our_error(function):
    assert expect_right(function)
    for change in few(changes_of(function), 3):
        expect_right(function, change)


@pytest.mark.slow
@every_function
def test_any_argument_gives_a_right_result_or_our_error(function):
    for change in few(changes_of(function), 40):
        expect_right(function, change)


@pytest.mark.slow
@every_function
def test_any_two_arguments_give_a_right_result_or_our_error(function):
    rng = random.Random(cases.CHOICE)
    for _ in range(30):
        expect_right(function, *rng.sample(changes_of(function), 2))


def test_every_public_function_is_fuzzed():
    functions = {name for name in public.TOP if inspect.isfunction(getattr(te, name))}
    assert functions <= {function.__name__ for function in CHECKS}
    assert set(GOOD) == set(CHECKS)


# --- what has no oracle

TOKENS = te.TokenPositions.from_segment_ids([[1, 1, 1, 1]])
MASK = te.AttentionMask(TOKENS, causal=True)
PARAMS = {"embeddings": TABLE}
SPLIT = put(mesh_of((2,), ("x",)), TABLE, "x")
PROMISE = {"mask": MASK, "order": "full"}
DOORS = [
    (te.AttentionMask, {"queries": TOKENS, "keys": None, "causal": True, "window": None, "chunk": None, "sinks": None}),
    (MASK.block, {"query_start": 0, "key_start": 0, "shape": (2, 2)}),
    (MASK.block_mask, {"shape": (2, 2)}),
    (te.TokenPositions, {"positions": POSITIONS, "segment_ids": None, "block_ids": None, "places": None, "ends": None}),
    (te.TokenPositions.from_parents, {"parents": POSITIONS - 1, "offset": 0}),
    (TOKENS.take, {"order": POSITIONS}),
    (TOKENS.with_block_ids, {"block_ids": [0, 0, 1, 1]}),
    (TOKENS.clear, {"where": [True]}),
    (te.kernels.dot_product_attention_kwargs, PROMISE),
    (te.kernels.flash_attention_kwargs, PROMISE),
    (te.kernels.mha_kwargs, PROMISE | {"batch_size": 1}),
    (te.kernels.visible_ranges, PROMISE),
    (te.rows.exchange_load, {"table": SPLIT, "ids": IDS, "config": None, "batch_axes": None, "capacity": 1.0, "max_rows": None}),
    (te.rows.RowGradient, {"ids": POSITIONS, "values": TABLE[:3], "vocab_size": 4}),
    (te.OutputLayer, {"table": TABLE, "bias": None, "softcap": None, "scale": 1.0, "pad_id": None}),
    (te.OutputConfig, {"tied": True, "bias": False, "softcap": None, "scale": 1.0}),
    (te.EmbedderConfig, vars(te.EmbedderConfig(8, 4))),
    (te.Sinusoidal, vars(te.Sinusoidal())),
    (te.SinusoidalGrid, vars(te.SinusoidalGrid((2, 2)))),
    (te.Learned, vars(te.Learned(4))),
    (te.plots.plot_encoding, {"encoding": TABLE, "tokens": None, "limit": None}),
    (te.plots.plot_mask, {"mask": TABLE > 0, "query_tokens": None, "key_tokens": None}),
    (te.plots.plot_rotary, {"positions": POSITIONS, "head_dim": 4, "base": 10.0, "scaling": None}),
    (te.plots.plot_bias, {"bias": TABLE, "query_tokens": None, "key_tokens": None}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("door", "good"), DOORS, ids=lambda part: getattr(part, "__name__", ""))
def test_any_argument_at_a_door_gives_a_result_or_our_error(door, good):
    if door.__name__ in te.plots.__all__:
        good = good | {"ax": matplotlib.figure.Figure().subplots()}
    assert call(door, good)[0]
    for name, value in few(itertools.product(good.keys() - {"init", "ax"}, VALUES), 12):
        with named_on_failure({name: value}):
            call(door, good | {name: bounded(name, value)})
