"""Any arguments of `save_embedder` and `load_embedder`: what was saved is read back, or an error of
ours says what was wanted."""

import jax
import numpy as np
import pytest
from drawn import drawn
from fuzzing import VALUES, call

import transformer_embed as te

CONFIG = te.EmbedderConfig(5, 4)
PARAMS = drawn(te.Embedder(CONFIG).init)
NAMES = {"token_embedding/embeddings": "wte"}


@pytest.fixture(autouse=True)
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    te.pretrained.save_embedder("saved", CONFIG, PARAMS, names=NAMES)


def is_read_back(found):
    assert found.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, found.params, PARAMS)


@pytest.mark.parametrize("name", ["path", "config", "params", "bias", "names"])
def test_what_is_saved_with_any_argument_is_read_back(name):
    for value in VALUES:
        arguments = {"path": "saved", "config": CONFIG, "params": PARAMS} | {name: value}
        try:
            returned, _ = call(te.pretrained.save_embedder, arguments)
        except OSError:
            assert name == "path"
            continue
        if returned:
            is_read_back(te.pretrained.load_embedder(arguments["path"]))


@pytest.mark.parametrize("name", ["path", "stack", "settings", "config", "names"])
@pytest.mark.parametrize("is_by_hand", [False, True])
def test_any_argument_loads_what_was_saved_or_is_named(name, is_by_hand):
    arguments = {"path": "saved"} | ({"config": CONFIG, "names": NAMES} if is_by_hand else {})
    assert call(te.pretrained.load_embedder, arguments)[0]
    for value in VALUES:
        try:
            returned, found = call(te.pretrained.load_embedder, arguments | {name: value})
        except FileNotFoundError:
            assert name == "path"
            continue
        if returned:
            is_read_back(found)
