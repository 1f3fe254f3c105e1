import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from transformer_embed.cli.main import main

SHAPES = {
    "embeddings.word_embeddings.weight": (12, 8),
    "embeddings.position_embeddings.weight": (10, 8),
    "embeddings.token_type_embeddings.weight": (2, 8),
    "embeddings.LayerNorm.weight": (8,),
    "embeddings.LayerNorm.bias": (8,),
}


@pytest.fixture
def bert(tmp_path):
    """A checkpoint of BERT without its config.json."""
    path = tmp_path / "model.safetensors"
    save_file({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}, path)
    return path


def inspected(capsys, *arguments):
    assert main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_what_a_lone_file_lacks_is_asked_for_by_the_names_of_flags(fails, bert):
    assert "(on the command line: --model-type NAME, --settings FILE.json)" in fails(
        "inspect", bert
    )
    line = fails("inspect", bert, "--model-type", "bert")
    assert "layer_norm_eps" in line
    assert "--settings FILE.json" in line


def test_settings_are_read_from_a_file_and_model_type_is_added(capsys, bert, tmp_path):
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"layer_norm_eps": 0.5}))
    assert "layer_norm_eps=0.5" in inspected(
        capsys, bert, "--settings", settings, "--model-type", "bert"
    )
    settings.write_text(json.dumps({"layer_norm_eps": 0.25, "model_type": "bert"}))
    assert "layer_norm_eps=0.25" in inspected(capsys, bert, "--settings", settings)


def test_embed_takes_them_too(bert, tmp_path):
    ids, settings = tmp_path / "ids", tmp_path / "settings.json"
    ids.write_text("1 2 3\n")
    settings.write_text(json.dumps({"layer_norm_eps": 0.5}))
    flags = [
        "--model-type",
        "bert",
        "--settings",
        settings,
        "--ids",
        "--out",
        tmp_path / "x.npz",
        "--quiet",
    ]
    assert main([str(each) for each in ("embed", ids, "--from", bert, *flags)]) == 0
    with np.load(tmp_path / "x.npz") as arrays:
        assert arrays["embeddings"].shape == (1, 3, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "--settings: {path} is not JSON (Expecting property name"),
        ("[" * 100_000, "--settings: {path} is not JSON ("),
        ("\xff", "--settings: {path} is not JSON ("),
        ("[1]", "--settings: wanted a JSON object such as config.json holds, got a list in {path}"),
        ("", "{path} is empty; name a file that holds something"),
        (None, "cannot read {path}: No such file or directory"),
    ],
)
def test_settings_that_cannot_be_read(fails, bert, tmp_path, content, message):
    path = tmp_path / "settings.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    assert message.format(path=path) in fails("inspect", bert, "--settings", path)


def test_the_stack_of_a_file_that_train_wrote_is_refused(fails, text_file, model_file, tmp_path):
    flags = ["--stack", "decoder", "--out", tmp_path / "x.npz"]
    line = fails("embed", text_file, "--from", model_file, *flags)
    assert "stack: wanted None, since names or metadata say each parameter's tensor" in line


def test_the_tokens_of_a_published_model_are_not_bytes(fails, text_file, bert, tmp_path):
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"layer_norm_eps": 0.5, "model_type": "bert"}))
    flags = ["--settings", settings, "--out", tmp_path / "x.npz"]
    line = fails("embed", text_file, "--from", bert, *flags)
    assert (
        f"the tokens of {bert} are not bytes; give a FILE of ids, as its tokenizer makes them, and --ids"
        in line
    )
