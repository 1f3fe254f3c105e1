"""Every field of every config, scheme and scaling, given as Python's, numpy's and jax's scalar: the
same compiled result, or our error."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_embed as te

# The arguments that a class needs, and a value for each field that is None or a bool by default.
CONFIG = {"vocab_size": 7, "d_model": 8, "dropout_rate": 0.5}
NEEDED = {
    te.EmbedderConfig: CONFIG,
    te.OutputLayer: {},
    te.Sinusoidal: {},
    te.SinusoidalGrid: {"shape": (2, 2)},
    te.Learned: {"max_len": 9},
    te.LinearScaling: {"factor": 2.0},
    te.NTKScaling: {"alpha": 2.0},
    te.DynamicNTKScaling: {"factor": 2.0, "original_length": 4, "length": 8},
    te.YarnScaling: {"factor": 2.0, "original_length": 4},
    te.Llama3Scaling: {"factor": 2.0},
    te.LongRopeScaling: {
        "short_factor": [1.0, 1.0],
        "long_factor": [2.0, 4.0],
        "factor": 4.0,
        "original_length": 4,
        "length": 8,
    },
}
VALUES = {
    "scheme": te.Learned(3),
    "pad_id": 3,
    "scale": 3.0,
    "num_token_types": 2,
    "layer_norm_eps": 0.125,
    "embedding_width": 4,
    "dtype": np.dtype("float32"),
    "shift": 0.5,
    "at_padding": 1,
    "axes": (1, 0),
    "axis_positions": ((0.0, 0.5), (0.0, 2.0)),
    "attention_factor": 1.25,
    "dropout_rate": 0.5,
    "start": 1,
    "mscale_all_dim": 0.5,
    "truncate": False,
    "output": te.OutputLayer(tied=False),
    "softcap": 2.5,
}
FIELDS = [
    (kind, field.name) for kind, needed in NEEDED.items() for field in dataclasses.fields(kind)
]
# What each kind of value may be given as.
FORMS = {
    bool: [np.bool_, jnp.bool_],
    int: [np.int16, np.int64, np.uint16, jnp.int32],
    float: [np.float16, np.float32, np.float64, np.longdouble, jnp.float32, jnp.bfloat16],
    str: [np.str_],
}


def forms_of(value):
    """A value as other types' scalars; the entries of a tuple likewise."""
    if isinstance(value, tuple | list):
        entries = [forms_of(entry) for entry in value]
        return [list(value), np.asarray(value)] + [
            tuple(forms) for forms in zip(*entries, strict=False)
        ]
    return [form(value) for form in FORMS.get(type(value), [])]


def arguments_with(kind, name, value):
    return NEEDED[kind] | {name: value}


def computed(made):
    """What a config, a scheme or a scaling computes, compiled before or not."""
    if isinstance(made, te.OutputLayer):
        embedder = te.Embedder(te.EmbedderConfig(**CONFIG, output=made))
        params = embedder.init(jax.random.key(0))
        x = jnp.linspace(-3, 4, 8)[None]
        return params, embedder.logits(params, x), embedder.cross_entropy(params, x, [2])
    if isinstance(made, te.EmbedderConfig):
        embedder, ids = te.Embedder(made), np.array([[3, 1, 2]])
        types = {} if made.num_token_types is None else {"token_types": ids % 2}
        params = embedder.init(jax.random.key(0))
        trained = embedder.apply(params, jax.random.key(1), ids, is_training=True, **types)
        return params, trained
    if hasattr(made, "start") or hasattr(made, "axes"):
        return computed(te.EmbedderConfig(**CONFIG, pad_id=0, scheme=made))
    return te.apply_rotary(np.ones((3, 1, 4), np.float32), [0, 5, 9], base=100.0, scaling=made)


def same(made, expected):
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def made_or_refused(kind, options):
    try:
        return kind(**options), None
    except (TypeError, ValueError) as error:
        return None, error


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_a_field_of_any_type_gives_the_same_compiled_result_or_our_error(kind, name):
    default = {field.name: field.default for field in dataclasses.fields(kind)}
    value = (NEEDED[kind] | VALUES).get(name, default[name])
    value = tuple(value) if isinstance(value, list) else value
    expected = kind(**arguments_with(kind, name, value))
    result = computed(expected)
    forms = forms_of(value)
    assert forms or name in ("scheme", "param_dtype", "dtype", "output")
    accepted = 0
    for form in forms:
        made, error = made_or_refused(kind, arguments_with(kind, name, form))
        if error is not None:
            assert re.match(rf"^{name}(\[\d\])*: wanted |^shape and axes: wanted ", str(error))
            continue
        accepted += 1
        assert isinstance(getattr(made, name), type(getattr(expected, name)))
        assert (made, hash(made), repr(made)) == (expected, hash(expected), repr(expected))
        jax.clear_caches()
        same(computed(made), result)
    assert accepted or not forms


@pytest.mark.parametrize("rate", [np.float16(0.5), np.float32(0.5), np.float64(0.5), 0.5])
def test_which_of_two_equal_configs_ran_first_decides_nothing(rate):
    config = te.EmbedderConfig(7, 8, dropout_rate=rate, dtype=jnp.bfloat16)
    made = computed(config)
    jax.clear_caches()
    same(computed(dataclasses.replace(config, dropout_rate=0.5)), made)


@pytest.mark.parametrize(
    "call",
    [
        lambda: te.EmbedderConfig(3, 10**30),
        lambda: te.EmbedderConfig(3, 10**12, scheme=te.Learned(3)),
        lambda: te.EmbedderConfig(3, 10**12, scheme=te.SinusoidalGrid((2, 2))),
        lambda: te.sinusoidal_encoding([0], 10**12),
        lambda: te.sinusoidal_table(3, 10**12),
        lambda: te.sinusoidal_grid((2, 2), 10**12),
        lambda: te.sinusoidal_grid((2, 2), 10**30, odd="zero"),
    ],
)
def test_a_width_that_no_array_has_is_refused_at_once(call):
    with pytest.raises(ValueError, match=r"^d_model: wanted an int of at most \d+, got 10+$"):
        call()
