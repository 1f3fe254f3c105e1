"""Any field of a config and any argument of an embedder: the result of a formula in float64, or a
TypeError or ValueError of ours."""

import dataclasses
import itertools

import pytest
from cases import few
from drawn import drawn
from embeddings import by_name, check_apply
from fuzzing import ARRAYS, VALUES, bounded, call, named_on_failure

import transformer_embed as te

GOOD = {"vocab_size": 5, "d_model": 4}
FIELDS = [field.name for field in dataclasses.fields(te.EmbedderConfig)]
APPLIED = {
    "rng": None,
    "ids": ARRAYS[1] % 4,
    "is_training": False,
    "positions": None,
    "token_types": None,
}
# Any value of any one argument.
CHANGES = list(itertools.product(["params", *APPLIED], VALUES))


@pytest.mark.parametrize("field", FIELDS)
def test_a_config_takes_a_value_or_names_its_field(field):
    for value in VALUES:
        call(te.EmbedderConfig, GOOD | {field: bounded(field, value)})


@pytest.mark.slow
def test_any_argument_gives_a_right_result_or_our_error():
    embedder = te.Embedder(te.EmbedderConfig(**GOOD))
    params = drawn(embedder.init)
    for name, value in few(CHANGES, 80):
        arguments = APPLIED | {"params": params, name: value}
        with named_on_failure(arguments):
            returned, result = call(embedder.apply, arguments)
            if returned and arguments.pop("params") is params:
                check_apply(embedder.config, by_name(params), result, **arguments)
