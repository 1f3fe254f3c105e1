"""The config, the schemes and the output layer as values: equal by value, each field checked."""

import dataclasses
import re
import reprlib

import jax.numpy as jnp
import numpy as np
import pytest
from calls import SCALINGS
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


# --- A field that is given as another type is the same value, of the same type, or an error.

# The arguments that a class needs, and a value for each field that is None or a bool by default.
NEEDED = {
    te.EmbedderConfig: {"vocab_size": 7, "d_model": 8},
    te.OutputConfig: {},
    te.Sinusoidal: {},
    te.SinusoidalGrid: {"shape": (2, 2)},
    te.Learned: {"max_len": 9},
} | SCALINGS
VALUES = {
    "pad_id": 3,
    "scale": 3.0,
    "num_token_types": 2,
    "layer_norm_eps": 0.125,
    "embedding_width": 4,
    "init_stddev": 0.125,
    "shift": 0.5,
    "at_padding": 1,
    "axes": (1, 0),
    "axis_positions": ((0.0, 0.5), (0.0, 2.0)),
    "attention_factor": 1.25,
    "dropout_rate": 0.5,
    "start": 1,
    "mscale_all_dim": 0.5,
    "truncate": False,
    "softcap": 2.5,
}
# What each kind of value may be given as.
FORMS = {
    bool: [np.bool_, jnp.bool_],
    int: [np.int16, np.int64, np.uint16, jnp.int32],
    float: [np.float16, np.float32, np.float64, np.longdouble, jnp.float32, jnp.bfloat16],
    str: [np.str_],
}


def forms_of(value):
    """A value as other types' scalars; the entries of a tuple likewise."""
    if isinstance(value, tuple):
        entries = zip(*map(forms_of, value), strict=False)
        return [list(value), np.asarray(value), *map(tuple, entries)]
    return [form(value) for form in FORMS.get(type(value), [])]


def made_or_refused(kind, arguments, name):
    """None for an error of ours that names the field."""
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        if not re.match(rf"{name}(\[\d\])*: wanted |shape and axes: wanted ", str(error)):
            raise
        return None


@pytest.mark.parametrize("kind", NEEDED)
def test_a_field_of_any_type_is_converted_or_refused_by_name(kind):
    pads = {"pad_id": 0} if "pad_id" in kind.__dataclass_fields__ else {}
    for field in dataclasses.fields(kind):
        name, needed = field.name, pads | NEEDED[kind]
        value = (NEEDED[kind] | VALUES).get(name, field.default)
        forms = [made_or_refused(kind, needed | {name: form}, name) for form in forms_of(value)]
        expected = kind(**needed | {name: value})
        # The repr shows the type of a number inside of a tuple too.
        found = [(made, hash(made), repr(made)) for made in forms if made is not None]
        assert found == [(expected, hash(expected), repr(expected))] * len(found)
        assert found or not forms


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
        (lambda: te.Learned(), TypeError, "Learned.__init__() missing 1 required positional argument: 'max_len'"),
        (lambda: te.Learned(0), ValueError, "max_len: ... 1, got 0"),
        (lambda: te.Learned(9, at_padding=True), TypeError, "at_padding: ... got bool True"),
        (lambda: te.Learned(9, start=9), ValueError, "start: ... 9), got 9"),
        (lambda: te.Learned(9, start=-1), ValueError, "start: ... 9), got -1"),
        (lambda: te.Learned(9, at_padding=9), ValueError, "at_padding: ... 9), got 9"),
        (lambda: te.Sinusoidal(start=2**31), ValueError, f"start: ... 2147483646, got {2**31}"),
        (lambda: te.Sinusoidal(base=0), ValueError, "base: ... got 0"),
        (lambda: te.Sinusoidal(layout="halves"), ValueError, "layout: ... got 'halves'"),
        (lambda: te.Sinusoidal(odd="drop"), ValueError, "odd: ... got 'drop'"),
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
        (lambda: grid(axis_positions=2), TypeError, "axis_positions: ... got int 2"),
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
        lambda: te.EmbedderConfig(3, 10**12, scheme=te.Learned(3)),
        lambda: te.EmbedderConfig(3, 10**12, scheme=grid()),
        lambda: te.sinusoidal_table(3, 10**12),
        lambda: te.SinusoidalGrid((2, 2), odd="zero").encoding([0], 10**30),
    ],
)
def test_a_width_that_no_array_has_is_refused_at_once(call):
    with pytest.raises(ValueError, match=r"^d_model: wanted an int of at most \d+, got 10+$"):
        call()
