"""Any config and any arguments of an embedder's functions: the result of a formula in float64, or a
TypeError or ValueError of ours."""

import dataclasses
import itertools
import random
import warnings

import cases
import pytest
from cases import few
from drawn import drawn
from embeddings import by_name, check_apply
from fuzzing import ARRAYS, VALUES, bounded, call, named_on_failure

import transformer_embed as te

IDS = ARRAYS[1] % 4
GOOD = {"vocab_size": 5, "d_model": 4}
FIELDS = [field.name for field in dataclasses.fields(te.EmbedderConfig)]
LIKELY = {
    "scheme": [
        None,
        te.Learned(max_len=3),
        te.Learned(max_len=6, start=2, at_padding=1, pad_id=1),
        te.Sinusoidal(layout="sin_cos", start=5),
        te.Sinusoidal(odd="zero", at_padding=0, pad_id=2),
        te.SinusoidalGrid((2, 3), axes=(1, 0)),
    ],
    "dropout_rate": [0, 0.5],
    "pad_id": [0, 3],
    "scale": [1.0, 3.0],
    "out_of_range": ["nan", "clip", "zero"],
    "lookup_style": ["gather", "one_hot"],
}
APPLIED = {
    "rng": None,
    "ids": IDS,
    "is_training": False,
    "positions": None,
    "token_types": None,
}
every_field = pytest.mark.parametrize("field", FIELDS)


def values_for(field):
    return [*VALUES, *LIKELY.get(field, [])]


def config_of(fields):
    """Whether there is such a config, and what."""
    fields = {name: bounded(name, value) for name, value in fields.items()}
    return call(te.EmbedderConfig, GOOD | fields)


MADE = {}


def made(config):
    """The embedder of a config, and its parameters: as drawn, and by the end of their path in
    float64."""
    if config not in MADE:
        embedder = te.Embedder(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            params = drawn(embedder.init)
        short = by_name(params)
        MADE[config] = embedder, params, short
    return MADE[config]


def expect_right(config, *changes):
    """Applies an embedder to its usual arguments, some of them changed: whether it returned."""
    embedder, params, short = made(config)
    arguments = APPLIED | {"params": params}
    if config.num_token_types is not None:
        arguments["token_types"] = IDS % config.num_token_types
    arguments |= dict(changes)
    with named_on_failure({"config": config} | arguments):
        returned, result = call(embedder.apply, arguments)
        if returned and arguments.pop("params") is params:
            check_apply(config, short, result, **arguments)
    return returned


# Any value of any one argument.
CHANGES = list(itertools.product(["params", *APPLIED], VALUES))


@every_field
def test_a_config_takes_a_value_or_names_its_field(field):
    for value in values_for(field):
        config_of({field: value})


@pytest.mark.slow
def test_any_argument_gives_a_right_result_or_our_error():
    for change in few(CHANGES, 80):
        expect_right(te.EmbedderConfig(**GOOD), change)


@pytest.mark.slow
@every_field
def test_a_value_of_a_field_embeds_rightly_or_is_our_error(field):
    for value in [*few(VALUES, 12), *LIKELY.get(field, [])]:
        exists, config = config_of({field: value})
        if exists:
            expect_right(config)


@pytest.mark.slow
def test_any_config_and_arguments_give_a_right_result_or_our_error():
    rng = random.Random(cases.CHOICE)
    for _ in range(100):
        fields = {field: rng.choice(values_for(field)) for field in rng.sample(FIELDS, 2)}
        exists, config = config_of(fields)
        if exists:
            expect_right(config, *rng.sample(CHANGES, rng.randint(0, 2)))
