"""Any argument of an embedder: the result of a formula in float64, or a TypeError or ValueError of
ours. (Fields of a config are fuzzed in tests/test_fuzz.py.)"""

import itertools

import pytest
from cases import few
from drawn import drawn
from embeddings import by_name, check_apply
from fuzzing import ARRAYS, VALUES, call, named_on_failure

import transformer_embed as te

APPLIED = {
    "rng": None,
    "ids": ARRAYS[1] % 4,
    "is_training": False,
    "positions": None,
    "token_types": None,
}
# Any value of any one argument.
CHANGES = list(itertools.product(["params", *APPLIED], VALUES))


@pytest.mark.slow
def test_any_argument_gives_a_right_result_or_our_error():
    embedder = te.Embedder(te.EmbedderConfig(5, 4))
    params = drawn(embedder.init)
    for name, value in few(CHANGES, 80):
        arguments = APPLIED | {"params": params, name: value}
        with named_on_failure(arguments):
            returned, result = call(embedder.apply, arguments)
            if returned and arguments.pop("params") is params:
                check_apply(embedder.config, by_name(params), result, **arguments)
