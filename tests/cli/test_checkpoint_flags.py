import json

import numpy as np
import pytest
from safetensors.numpy import save_file

SHAPES = {
    "word_embeddings.weight": (12, 8),
    "position_embeddings.weight": (10, 8),
    "token_type_embeddings.weight": (2, 8),
    "LayerNorm.weight": 8,
    "LayerNorm.bias": 8,
}


@pytest.fixture
def bert(tmp_path):
    """A checkpoint of BERT without its config.json."""
    path = tmp_path / "model.safetensors"
    tensors = {f"embeddings.{name}": np.ones(shape, "f4") for name, shape in SHAPES.items()}
    save_file(tensors, path)
    return path


@pytest.fixture
def said(tmp_path):
    """A file of settings."""

    def write(**settings):
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(settings))
        return "--settings", path

    return write


def test_what_a_lone_file_lacks_is_asked_for(fails, bert):
    assert "model_type: wanted that of a known model" in fails("inspect", bert)
    assert "layer_norm_eps" in fails("inspect", bert, "--model-type", "bert")


def test_settings_are_read_from_a_file_and_model_type_is_added(prints, bert, said):
    flags = [*said(layer_norm_eps=0.5, model_type="gpt2"), "--model-type", "bert"]
    assert "layer_norm_eps=0.5" in prints("inspect", bert, *flags).out
    flags = said(layer_norm_eps=0.25, model_type="bert")
    assert "layer_norm_eps=0.25" in prints("inspect", bert, *flags).out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "settings.json: wanted a JSON object, got list"),
        (None, "No such file or directory"),
    ],
)
def test_settings_that_cannot_be_read(fails, bert, tmp_path, content, message):
    path = tmp_path / "settings.json"
    if content is not None:
        path.write_text(content)
    assert message in fails("inspect", bert, "--settings", path)
