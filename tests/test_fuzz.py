"""Any arguments at all: a public function gives what a slow oracle gives, or raises a TypeError or
ValueError of ours, which names one."""

import inspect
import itertools
import random

import cases
import jax
import jax.numpy as jnp
import numpy as np
import public
import pytest
from cases import few
from fuzzing import ARRAYS, VALUES, bounded, call, named_on_failure
from references import CHECKS, assert_right, dense_mask

import transformer_embed as te

# What makes a call that works; the fuzzer puts other values in some places.
X, TABLE, IDS, POSITIONS = ARRAYS[9], ARRAYS[8], ARRAYS[1] % 4, np.arange(3)
GOOD = {
    te.resize_positions: {
        "params": {"m/learned_positional_encoding": {"embeddings": jnp.asarray(TABLE)}},
        "max_len": 6,
    },
    te.resize_vocabulary: {
        "params": {"m/token_embedding": {"embeddings": jnp.asarray(TABLE)}},
        "vocab_size": 3,
    },
    te.alibi_bias: {"query_positions": POSITIONS, "key_positions": POSITIONS, "num_heads": 2},
    te.alibi_slopes: {"num_heads": 2},
    te.apply_rotary: {"x": X, "positions": POSITIONS},
    dense_mask: {"query_positions": POSITIONS, "key_positions": POSITIONS, "causal": True},
    te.causal_mask: {"length": 3},
    te.check_ids: {"ids": IDS, "vocab_size": 4},
    te.check_order: {"tokens": te.TokenPositions([0, 1], [1, 1]), "order": "full"},
    te.dropout: {"rng": jax.random.key(0), "rate": 0.5, "x": X},
    te.lookup: {"table": TABLE, "ids": IDS},
    te.mask_to_bias: {"mask": ARRAYS[2]},
    te.padding_mask: {"ids": IDS, "pad_id": 0},
    te.permute_rotary_weights: {
        "weights": X,
        "num_heads": 1,
        "source": "half",
        "target": "interleaved",
    },
    te.relative_position_buckets: {"query_positions": POSITIONS, "key_positions": POSITIONS},
    te.sinusoidal_encoding: {"positions": POSITIONS, "d_model": 4},
    te.sinusoidal_grid: {"shape": (2, 3), "d_model": 4},
    te.sinusoidal_table: {"length": 3, "d_model": 4},
    te.linear_cross_entropy: {"x": TABLE[:2], "table": TABLE, "labels": np.array([1, 2])},
    te.linear_log_probs: {"x": TABLE[:2], "table": TABLE, "labels": np.array([1, 2])},
    te.linear_logits: {"x": TABLE[:2], "table": TABLE},
    te.TokenPositions.from_ids: {"ids": IDS, "pad_id": 0},
    te.TokenPositions.from_lengths: {"lengths": np.array([1, 2]), "length": 3},
    te.TokenPositions.from_offset: {"offset": np.array([1, 2]), "length": 3},
    te.TokenPositions.from_segment_ids: {"segment_ids": np.array([1, 1, 2])},
    te.LinearScaling: {"factor": 2.0},
    te.NTKScaling: {"alpha": 2.0},
    te.DynamicNTKScaling: {"factor": 2.0, "original_length": 4, "length": 8},
    te.YarnScaling: {"factor": 2.0, "original_length": 4},
    te.Llama3Scaling: {"factor": 8.0},
    te.LongRopeScaling: {
        "short_factor": [1.0],
        "long_factor": [2.0],
        "factor": 2.0,
        "original_length": 4,
        "length": 8,
    },
}


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
