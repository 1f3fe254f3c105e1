"""Runs the example of every docstring."""

import doctest
import importlib
import pkgutil

import pytest

import transformer_embed

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [
    module.name
    for module in pkgutil.walk_packages(transformer_embed.__path__, "transformer_embed.")
    if module.name != "transformer_embed.__main__"
]


@pytest.mark.documentation
@pytest.mark.filterwarnings("error:.* rows of a table are padding")
@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=FLAGS).failed == 0
