"""The config, the schemes and the output layer as values: equal by value, each field checked."""

import dataclasses
import reprlib

import jax.numpy as jnp
import pytest
from refused import refused

import transformer_embed as te

CONFIG = te.EmbedderConfig(vocab_size=11, d_model=8, pad_id=0)


def test_configs_are_frozen_hashable_and_equal_by_value():
    same = te.EmbedderConfig(vocab_size=11, d_model=8, pad_id=0, param_dtype="float32")
    assert same == CONFIG
    assert {CONFIG: 1}[same] == 1
    assert dataclasses.replace(CONFIG, d_model=9) != CONFIG
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'd_model'"):
        CONFIG.d_model = 9


# --- Errors of each field.

FIELDS = [
    ("vocab_size", 0, ValueError, "0"),
    ("d_model", -1, ValueError, "-1"),
    ("scheme", "learned", TypeError, "str 'learned'"),
    ("scheme", te.Sinusoidal, TypeError, f"type {reprlib.repr(te.Sinusoidal)}"),
    ("dropout_rate", 1.0, ValueError, "1.0"),
    ("pad_id", 0.0, TypeError, "float 0.0"),
    ("scale", True, TypeError, "bool True"),
    ("scale", 0.0, ValueError, "0.0"),
    ("scale", None, ValueError, "None"),
    ("scale", "sqrt", ValueError, "'sqrt'"),
    ("num_token_types", 0, ValueError, "0"),
    ("layer_norm_eps", 0.0, ValueError, "0.0"),
    ("embedding_width", 0, ValueError, "0"),
    ("init_stddev", 0.0, ValueError, "0.0"),
    ("row_multiple", 0, ValueError, "0"),
    ("spread", 1, TypeError, "int 1"),
    ("out_of_range", "wrap", ValueError, "'wrap'"),
    ("lookup_style", "matmul", ValueError, "'matmul'"),
    ("param_dtype", jnp.int32, TypeError, "int32"),
    ("dtype", "int8", TypeError, "int8"),
    ("output", False, TypeError, "bool False"),
    ("output", "a reason", TypeError, "str 'a reason'"),
]
OUTPUT_FIELDS = [
    ("tied", 0, TypeError, "int 0"),
    ("bias", None, TypeError, "None"),
    ("softcap", 0.0, ValueError, "0.0"),
    ("scale", 0, ValueError, "0"),
    ("scale", None, TypeError, "None"),
]


@pytest.mark.parametrize(
    ("made", "fields"),
    [(CONFIG, FIELDS), (te.OutputConfig(), OUTPUT_FIELDS)],
)
def test_each_field_is_refused_by_name(made, fields):
    for name, value, error, got in fields:
        with refused(error, f"{name}: ... got {got}"):
            dataclasses.replace(made, **{name: value})
    assert {each[0] for each in fields} == {field.name for field in dataclasses.fields(made)}


def grid(shape=(2, 3), **options):
    return te.SinusoidalGrid(shape, **options)


TOO_FAST = "base and frequency_scale: ... got 1.00e+30 radians"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: te.Learned(0), ValueError, "max_len: ... 1, got 0"),
        (lambda: te.Learned(9, at_padding=True), TypeError, "at_padding: ... got bool True"),
        (lambda: te.Learned(9, start=9), ValueError, "start: ... 8, got 9"),
        (lambda: te.Learned(9, at_padding=9), ValueError, "at_padding: ... 8, got 9"),
        (lambda: te.Sinusoidal(start=2**31), ValueError, f"start: ... 2147483646, got {2**31}"),
        (lambda: te.Sinusoidal(layout="halves"), ValueError, "layout: ... got 'halves'"),
        (lambda: te.EmbedderConfig(9, 2, te.Sinusoidal(odd="zero", frequency_scale=1e30)), ValueError, TOO_FAST),
        (lambda: te.EmbedderConfig(11, 8, te.Sinusoidal(shift=3), embedding_width=4), ValueError,
         "shift: ... 2, got 3.0"),
        (lambda: te.EmbedderConfig(11, 8, te.Learned(9, at_padding=1)), ValueError,
         "pad_id: ... got None"),
        (lambda: te.EmbedderConfig(8, 7, grid()), ValueError,
         "d_model: ... got 7"),
        (lambda: grid(axes=(0, 0)), ValueError, "axes: ... got (0, 0)"),
        (lambda: grid((46341, 46341)), ValueError, f"shape: ... {2**31 - 1}, got 2147488281"),
        (lambda: grid(axis_positions=[[0, 1]]), ValueError, "axis_positions: ... [[2], [3]], got [[2]]"),
        (lambda: grid(axis_positions=[[0, "a"], [0, 1, 2]]), TypeError, "axis_positions[0][1]: ... got str 'a'"),
    ],
)  # fmt: skip
def test_bad_schemes_are_refused(make, error, text):
    with refused(error, text):
        make()


@pytest.mark.parametrize(
    "call",
    [
        lambda: te.EmbedderConfig(3, 10**30),
        lambda: te.sinusoidal_table(3, 10**12),
        lambda: te.SinusoidalGrid((2, 2), odd="zero").encoding([0], 10**30),
    ],
)
def test_a_width_that_no_array_has_is_refused_at_once(call):
    with pytest.raises(ValueError, match=r"^d_model: wanted an int of at most \d+, got 10+$"):
        call()
