"""Any config and any arguments of an embedder's functions: the result of a formula in float64, or a
TypeError or ValueError of ours."""

import dataclasses
import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from drawn import drawn
from fuzzing import ARRAYS, VALUES, call, named_on_failure, too_large

import transformer_embed as te

IDS = ARRAYS[1] % 4
GOOD = {"vocab_size": 5, "d_model": 4}
SIZES = {"vocab_size", "d_model", "num_token_types", "embedding_width"}
FIELDS = [field.name for field in dataclasses.fields(te.EmbedderConfig)]
SCHEMES = [
    None,
    te.Learned(max_len=3),
    te.Learned(max_len=6, start=2, at_padding=1, pad_id=1),
    te.Sinusoidal(layout="sin_cos", start=5),
    te.Sinusoidal(odd="zero", at_padding=0, pad_id=2),
    te.SinusoidalGrid((2, 3), axes=(1, 0)),
]
LIKELY = {
    "scheme": SCHEMES,
    "dropout_rate": [0, 0.5],
    "pad_id": [0, 3],
    "scale": [False, 3.0],
    "out_of_range": ["nan", "clip", "zero"],
    "lookup_style": ["gather", "one_hot"],
}
LABELS = np.array([[1, 2, 0], [3, 1, 1]])
CALLS = {
    "apply": {
        "rng": None,
        "ids": IDS,
        "is_training": False,
        "positions": None,
        "token_types": None,
    },
    "logits": {"x": None},
    "cross_entropy": {
        "x": None,
        "labels": LABELS,
        "mask": None,
        "label_smoothing": 0.0,
        "reduction": "mean",
        "chunk_size": None,
    },
}


def values_for(name):
    return [*VALUES, *LIKELY.get(name, [])]


def values_of_argument(name):
    """Without a tree that lacks parameters: Haiku names the first that it does not find."""
    return [value for value in VALUES if name != "params" or not isinstance(value, dict) or value]


def config_of(fields):
    """Whether there is such a config, and what; without the sizes that fill the memory."""
    small = {
        name: 5
        if name in SIZES and too_large(value) and not isinstance(value, bool | float)
        else value
        for name, value in fields.items()
    }
    return call(te.EmbedderConfig, GOOD | small)


MADE = {}


def made(config):
    """The embedder of a config, and its parameters: as drawn, and by the end of their path in
    float64."""
    # By what it says of itself: True == 1, but a scale of True is another than 1.
    key = repr(config)
    if key not in MADE:
        embedder = te.Embedder(config)
        MADE[key] = embedder, *parameters(embedder)
    return MADE[key]


def parameters(embedder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params = drawn(embedder.init)
    short = {
        f"{path.rsplit('/', 1)[-1]}/{name}": np.asarray(leaf).astype(np.float64)
        for path, group in params.items()
        for name, leaf in group.items()
    }
    return params, short


def rows(config, table, ids, pad_id=None):
    size, width = table.shape

    def row(i):
        if config.out_of_range == "clip":
            i = min(max(i, 0), size - 1)
        if i == pad_id:
            return np.zeros(width)
        return (
            table[i]
            if 0 <= i < size
            else np.full(width, np.nan if config.out_of_range == "nan" else 0.0)
        )

    return np.array([row(int(i)) for i in np.ravel(ids)]).reshape(*np.shape(ids), width)


def counted(config, ids):
    """The positions of ids when none are given."""
    scheme, pad_id = config.scheme, config.pad_id
    pad_id = pad_id if scheme.pad_id is None else scheme.pad_id
    if pad_id is None or isinstance(scheme, te.SinusoidalGrid):
        return scheme.start + np.arange(ids.shape[-1])
    at_padding = scheme.start if scheme.at_padding is None else scheme.at_padding
    is_token = np.vectorize(int, otypes=[object])(ids) != pad_id
    return np.where(is_token, scheme.start + np.cumsum(is_token, -1) - 1, at_padding)


def encoding(config, short, positions):
    scheme, width = config.scheme, int(config.table_width)
    if isinstance(scheme, te.Learned):
        return rows(config, short["learned_positional_encoding/embeddings"], positions)
    if isinstance(scheme, te.SinusoidalGrid):
        return np.asarray(
            te.sinusoidal_grid(scheme.shape, width, axes=scheme.axes, positions=positions),
            np.float64,
        )
    exact = [
        oracle.encoding(each.item(), width, layout=scheme.layout, odd=scheme.odd)
        for each in np.ravel(positions)
    ]
    return np.array([[float(channel) for channel in row] for row in exact]).reshape(
        *np.shape(positions), width
    )


def embedded(config, short, ids, positions, token_types):
    """[..., length, width of the tables] in float64, before dropout."""
    width, ids = config.table_width, np.asarray(ids)
    factor = width**0.5 if config.scale is True else 1 if config.scale is False else config.scale
    total = rows(config, short["token_embedding/embeddings"], ids, config.pad_id) * factor
    if config.scheme is not None:
        total = total + encoding(
            config,
            short,
            np.asarray(counted(config, ids) if positions is None else positions),
        )
    if config.num_token_types is not None:
        total = total + rows(
            config, short["token_type_embedding/embeddings"], np.asarray(token_types)
        )
    if config.layer_norm_eps is not None:
        centred, variance = total - total.mean(-1, keepdims=True), total.var(-1, keepdims=True)
        # A square that leaves float32 is infinite.
        variance = np.where(variance > np.finfo(np.float32).max, np.inf, variance)
        total = centred / np.sqrt(variance + config.layer_norm_eps)
        total = total * short["layer_norm/scale"] + short["layer_norm/offset"]
    return total


def close(got, expected, dtype):
    """To a few roundings of the dtype, whose overflow is infinite."""
    dtype = jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))
    assert np.asarray(got).dtype == dtype
    assert np.shape(got) == np.shape(expected)
    eps = max(float(jnp.finfo(dtype).eps), 2**-22)
    with np.errstate(over="ignore"):
        rounded = np.asarray(expected).astype(dtype).astype(np.float64)
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), rounded, rtol=8 * eps, atol=32 * eps
    )


def expect_right(config, name, changes):
    """Calls one of an embedder's functions with its usual arguments, some of them changed."""
    embedder, params, short = made(config)
    arguments = {"params": params, **CALLS[name]}
    if name == "apply" and config.num_token_types is not None:
        arguments["token_types"] = IDS % config.num_token_types
    if "x" in arguments:
        arguments["x"] = np.linspace(-1, 1, 6 * config.table_width, dtype=np.float32).reshape(
            2, 3, config.table_width
        )
    arguments |= changes
    with named_on_failure({"config": config} | arguments):
        returned, result = call(getattr(embedder, name), arguments)
        if returned and arguments["params"] is params:
            CHECKS[name](
                config,
                short,
                result,
                **{key: value for key, value in arguments.items() if key != "params"},
            )


def check_apply(config, short, result, *, rng, ids, is_training, positions, token_types):
    dtype = config.param_dtype if config.dtype is None else config.dtype
    assert result.shape == (*np.shape(ids), config.d_model)
    dropped = is_training and config.dropout_rate > 0
    if config.embedding_width is not None:
        return
    total = embedded(config, short, ids, positions, token_types)
    if dropped:
        got = np.asarray(result)
        kept = np.isnan(got) | (got != 0)
        result, total = (
            np.where(kept, got, np.zeros_like(got)),
            np.where(kept, total / (1 - config.dropout_rate), 0),
        )
    close(result, total, dtype)


def check_logits(config, short, result, *, x):
    assert result.shape == (*np.shape(x)[:-1], config.vocab_size)
    expected = (
        np.asarray(x).astype(np.float64)
        @ rows(
            config, short["token_embedding/embeddings"], np.arange(config.vocab_size), config.pad_id
        ).T
    )
    close(result, expected, result.dtype)


def check_cross_entropy(
    config, short, result, *, x, labels, mask, label_smoothing, reduction, chunk_size
):
    x, labels = np.asarray(x), np.asarray(labels)
    logits = (
        x.astype(np.float64)
        @ rows(
            config, short["token_embedding/embeddings"], np.arange(config.vocab_size), config.pad_id
        ).T
    )
    log_sums = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    counted = (labels != (-1 if config.pad_id is None else config.pad_id)) & (
        True if mask is None else np.asarray(mask)
    )
    if np.any(counted & ((labels < 0) | (labels >= config.vocab_size))):
        return
    of_label = np.take_along_axis(
        logits, np.clip(labels, 0, config.vocab_size - 1)[..., None].astype(int), -1
    )[..., 0]
    losses = log_sums - (1 - label_smoothing) * of_label - label_smoothing * logits.mean(-1)
    total = np.sum(np.where(counted, losses, 0))
    expected = (
        total / max(np.sum(counted), 1)
        if reduction == "mean"
        else total
        if reduction == "sum"
        else np.where(counted, losses, 0)
    )
    np.testing.assert_allclose(
        np.asarray(result).astype(np.float64),
        expected,
        rtol=2e-2 if x.dtype.itemsize < 4 else 1e-4,
        atol=1e-4,
    )


CHECKS = {"apply": check_apply, "logits": check_logits, "cross_entropy": check_cross_entropy}
every_call = pytest.mark.parametrize("name", CALLS)


def check(name, rng):
    """With any values in up to two fields of the config, and in up to two arguments."""
    fields = {
        field: rng.choice(values_for(field)) for field in rng.sample(FIELDS, rng.randint(0, 2))
    }
    exists, config = config_of(fields)
    if exists:
        arguments = rng.sample(["params", *CALLS[name]], rng.randint(0, 2))
        expect_right(
            config,
            name,
            {argument: rng.choice(values_of_argument(argument)) for argument in arguments},
        )


@pytest.mark.parametrize("field", FIELDS)
def test_a_config_takes_a_value_or_names_its_field(field):
    for value in values_for(field):
        config_of({field: value})


@every_call
def test_the_arguments_that_the_fuzzer_starts_from_give_a_right_result(name):
    expect_right(te.EmbedderConfig(**GOOD), name, {})


@every_call
def test_any_config_and_arguments_give_a_right_result_or_our_error(name):
    rng = random.Random(0)
    for _ in range(8):
        check(name, rng)


@pytest.mark.slow
@every_call
def test_any_config_and_arguments_give_a_right_result_or_our_error_thoroughly(name):
    rng = random.Random(1)
    for _ in range(200):
        check(name, rng)


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_every_value_of_every_field_embeds_rightly_or_is_our_error(field):
    for value in values_for(field):
        exists, config = config_of({field: value})
        if exists:
            expect_right(config, "apply", {})


@pytest.mark.slow
@every_call
def test_every_value_of_every_argument_gives_a_right_result_or_our_error(name):
    for argument in ["params", *CALLS[name]]:
        for value in values_of_argument(argument):
            expect_right(te.EmbedderConfig(**GOOD), name, {argument: value})


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_an_embedder_and_init_take_a_value_or_name_their_argument(value):
    assert not call(te.Embedder, {"config": value})[0]
    returned, params = call(te.Embedder(te.EmbedderConfig(**GOOD)).init, {"rng": value})
    assert not returned or jax.tree.leaves(params)[0].shape == (5, 4)
