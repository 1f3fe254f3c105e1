"""Any arguments at all: a public function gives what a slow oracle gives, or raises a TypeError or ValueError of ours, which names one."""

import fractions
import inspect
import re
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from references import CHECKS

import transformer_embed as te

OURS = re.compile(r"^[\w. ,\[\]']+: wanted ")
MISSING = re.compile(r"(missing|unexpected|required).* argument")

NUMBERS = [
    0,
    1,
    2,
    -1,
    3,
    0.5,
    -0.25,
    1e30,
    2**31 - 1,
    2**31,
    -(2**31),
    2**64,
    10**400,
    float("nan"),
    float("inf"),
    fractions.Fraction(1, 3),
]
NUMBERS += [True, np.int8(3), np.float16(0.5), np.longdouble(0.5), jnp.int32(2), 1j]
WORDS = ["half", "interleaved", "sin_cos", "first", "proportional", "zero", "round_up", "nan", "gather", "left", "mean", "", "abc", b"half"]
DTYPES = ["float32", "bfloat16", "float16", "int32", jnp.bfloat16, np.dtype(">f4"), float, int, "float8_e4m3fn"]
ARRAYS = [
    np.arange(3),
    np.arange(6).reshape(2, 3),
    np.arange(9).reshape(3, 3) % 2 == 0,
    np.array([0, 1, 1], np.uint8),
    np.array([2**40, 0, -1]),
    np.array([3_000_000_000, 1, 0], np.uint32),
    np.arange(3, dtype=">i4"),
    np.linspace(0, 1, 3),
    np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
    np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 3, 2, 4),
    np.zeros((0, 3), np.float32),
    np.ones((1, 1, 3, 3), bool),
    np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
    np.array([1, 2, 3], ml_dtypes.int4),
    np.array([1, 2, 3], ml_dtypes.float8_e4m3fn),
    np.array(2),
    jnp.arange(3),
    jnp.arange(3.0),
    jnp.ones((4, 3), jnp.bfloat16),
]
OTHERS = [
    None,
    [],
    [1, 2, 3],
    [[1], [2, 3]],
    (1, 0),
    (None, None),
    (2, 3),
    "abc",
    {},
    {1: 2},
    object(),
    te.LinearScaling(2.0),
    jax.random.key(0),
]
OTHERS += [te.TokenPositions.from_offset(0, 3), jax.random.PRNGKey(0), range(3), (1, 1)]
VALUES = [*NUMBERS, *WORDS, *DTYPES, *ARRAYS, *OTHERS]

# What makes a call that works; the fuzzer puts other values in some places.
X, TABLE, IDS, POSITIONS = ARRAYS[9], ARRAYS[8], ARRAYS[1] % 4, np.arange(3)
GOOD = {
    te.Learned: {"max_len": 3},
    te.Sinusoidal: {},
    te.SinusoidalGrid: {"shape": (1, 3)},
    te.resize_positions: {"params": {"m/learned_positional_encoding": {"embeddings": jnp.asarray(TABLE)}}, "max_len": 6},
    te.resize_vocabulary: {"params": {"m/token_embedding": {"embeddings": jnp.asarray(TABLE)}}, "vocab_size": 3},
    te.alibi_bias: {"query_positions": POSITIONS, "key_positions": POSITIONS, "num_heads": 2},
    te.alibi_slopes: {"num_heads": 2},
    te.apply_rotary: {"x": X, "positions": POSITIONS},
    te.attention_mask: {"query_positions": POSITIONS, "key_positions": POSITIONS, "causal": True},
    te.causal_mask: {"length": 3},
    te.check_ids: {"ids": IDS, "vocab_size": 4},
    te.combine_masks: {"masks": (ARRAYS[11], ARRAYS[11])},
    te.dropout: {"rng": jax.random.key(0), "rate": 0.5, "x": X},
    te.lookup: {"table": TABLE, "ids": IDS},
    te.mask_to_bias: {"mask": ARRAYS[2]},
    te.padding_mask: {"ids": IDS},
    te.permute_rotary_weights: {"weights": X, "num_heads": 1, "source": "half", "target": "interleaved"},
    te.relative_position_buckets: {"query_positions": POSITIONS, "key_positions": POSITIONS},
    te.segment_mask: {"query_segment_ids": POSITIONS, "key_segment_ids": POSITIONS},
    te.sinusoidal_encoding: {"positions": POSITIONS, "d_model": 4},
    te.sinusoidal_grid: {"shape": (2, 3), "d_model": 4},
    te.sinusoidal_table: {"length": 3, "d_model": 4},
    te.tied_cross_entropy: {"x": TABLE[:2], "table": TABLE, "labels": np.array([1, 2])},
    te.tied_logits: {"x": TABLE[:2], "table": TABLE},
    te.window_mask: {"query_positions": POSITIONS, "key_positions": POSITIONS, "left": 1},
    te.TokenPositions.from_ids: {"ids": IDS},
    te.TokenPositions.from_lengths: {"lengths": np.array([1, 2]), "length": 3},
    te.TokenPositions.from_offset: {"offset": np.array([1, 2]), "length": 3},
    te.TokenPositions.from_segment_ids: {"segment_ids": np.array([1, 1, 2])},
    te.LinearScaling: {"factor": 2.0},
    te.NTKScaling: {"alpha": 2.0},
    te.DynamicNTKScaling: {"factor": 2.0, "original_length": 4, "length": 8},
    te.YarnScaling: {"factor": 2.0, "original_length": 4},
    te.Llama3Scaling: {"factor": 8.0},
    te.LongRopeScaling: {"short_factor": [1.0], "long_factor": [2.0], "factor": 2.0, "original_length": 4, "length": 8},
}


def too_large(value):
    """Numbers for which a right answer would fill the memory."""
    try:
        return bool(np.ndim(value) == 0 and abs(value) > 64)
    except (TypeError, ValueError):
        return False


def call(function, arguments):
    """Whether it returns, and what."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return True, function(*arguments["masks"]) if "masks" in arguments else function(**arguments)
        except (TypeError, ValueError) as error:
            message = str(error)
            if not (OURS.match(message) or MISSING.search(message)):
                raise AssertionError(f"not our error: {type(error).__name__}: {message[:300]}") from error
            return False, None


SIZES = {"length", "max_len", "vocab_size", "num_heads", "num_buckets", "max_distance", "d_model"}


def check(function, data):
    arguments = dict(GOOD[function])
    names = list(inspect.signature(function).parameters)
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        if name == "masks":
            value = data.draw(st.lists(st.sampled_from(VALUES), max_size=3), label=name)
        else:
            value = data.draw(st.sampled_from(VALUES), label=name)
        if name in SIZES and not isinstance(value, bool) and too_large(value) and not isinstance(value, float):
            value = 5
        arguments[name] = value
    expect_right(function, arguments)


def expect_right(function, arguments):
    returned, result = call(function, arguments)
    if returned:
        full = inspect.signature(function).bind(*arguments.get("masks", ()), **{k: v for k, v in arguments.items() if k != "masks"})
        full.apply_defaults()
        CHECKS[function](result, *full.args, **full.kwargs)


every_function = pytest.mark.parametrize("function", GOOD, ids=lambda function: function.__qualname__)


@every_function
@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, derandomize=True, max_examples=8, suppress_health_check=list(hypothesis.HealthCheck))
def test_any_argument_gives_a_right_result_or_our_error(function, data):
    check(function, data)


@pytest.mark.slow
@every_function
@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=400, suppress_health_check=list(hypothesis.HealthCheck))
def test_any_argument_gives_a_right_result_or_our_error_thoroughly(function, data):
    check(function, data)


@every_function
def test_the_arguments_that_the_fuzzer_starts_from_give_a_right_result(function):
    returned, _ = call(function, GOOD[function])
    assert returned
    expect_right(function, GOOD[function])


@pytest.mark.slow
@every_function
def test_every_value_in_every_place_gives_a_right_result_or_our_error(function):
    for name in inspect.signature(function).parameters:
        for value in VALUES:
            is_size = name in SIZES and not isinstance(value, bool) and too_large(value)
            expect_right(function, GOOD[function] | {name: (value,) if name == "masks" else 5 if is_size else value})


def test_every_public_function_is_fuzzed():
    functions = {name for name in te.__all__ if inspect.isfunction(getattr(te, name))}
    assert functions - {function.__name__ for function in CHECKS} == {"make_embedder"}
    assert set(GOOD) == set(CHECKS)
