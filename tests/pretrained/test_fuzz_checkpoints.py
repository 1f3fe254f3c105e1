"""Any arguments of `save_embedder` and `load_embedder`: what was saved is read back, or an error of
ours says what was wanted."""

import pytest
from compare import equal
from drawn import drawn
from fuzzing import VALUES, call

import transformer_embed as te

CONFIG = te.EmbedderConfig(5, 4)
PARAMS = drawn(te.Embedder(CONFIG).init)
BY_HAND = {"config": CONFIG, "names": {"token_embedding/embeddings": "wte"}}
SAVED = {"path": "saved", "params": PARAMS} | BY_HAND
SAVE, LOAD = te.pretrained.save_embedder, te.pretrained.load_embedder


def is_read_back(found):
    assert found.config == CONFIG
    equal(found.params, PARAMS)


@pytest.mark.parametrize(
    ("function", "arguments", "names"),
    [
        (SAVE, SAVED | {"names": None}, ["path", "config", "params", "bias", "names"]),
        (LOAD, {"path": "saved"}, ["path", "stack", "settings", "config", "names"]),
        (LOAD, {"path": "saved"} | BY_HAND, ["path", "stack", "settings", "config", "names"]),
    ],
)
def test_any_argument_is_right_or_named(function, arguments, names):
    SAVE(**SAVED)
    assert call(function, arguments)[0]
    for name in names:
        for value in VALUES:
            given = arguments | {name: value}
            try:
                returned, found = call(function, given)
            except OSError:
                assert name == "path"
                continue
            if returned:
                is_read_back(LOAD(given["path"]) if function is SAVE else found)
