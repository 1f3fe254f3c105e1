"""Saving the ends of a model into its own checkpoint: the rest stays, whole or not at all."""

import json
import pathlib

import jax
import numpy as np
import pytest
from checkpoints import CASES, HEADS, checkpoint, load, load_embedder, tensors_of
from compare import equal
from refused import each_raises
from safetensors.numpy import load_file, save_file

import transformer_embed as te
from transformer_embed._src.pretrained import replacing

save_into = te.pretrained.save_into


def trained(found):
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf) * 2 + 1), found.params)


def sharded(case):
    """The tensors of a case, in a shard each, with an index."""
    checkpoint(case)
    tensors = load_file("model.safetensors")
    pathlib.Path("model.safetensors").unlink()
    files = {name: f"model-{n:05}.safetensors" for n, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name]}, file, {"format": "pt"})
    index = {"metadata": {"total_size": 3}, "weight_map": files}
    pathlib.Path("model.safetensors.index.json").write_text(json.dumps(index))


def stored():
    """All tensors of the checkpoint in this folder."""
    path = pathlib.Path("model.safetensors.index.json")
    if not path.exists():
        return load_file("model.safetensors")
    files = json.loads(path.read_text())["weight_map"]
    return {name: load_file(file)[name] for name, file in files.items()}


@pytest.mark.parametrize("form", [checkpoint, sharded])
@pytest.mark.parametrize("name", ["bert", "t5", "gemma3", "llama, older"])
def test_the_ends_are_replaced_and_the_rest_stays(name, form):
    case = CASES[name]
    form(case)
    found = load_embedder(".", stack=case["stack"], length=8)
    save_into(".", found.config, trained(found), found.names)
    again = load_embedder(".", stack=case["stack"], length=8)
    assert again._replace(params={}) == found._replace(params={})
    jax.tree.map(equal, again.params, trained(found))
    before, after = tensors_of(case), stored()
    assert after.keys() == before.keys()
    for key in before.keys() - {*found.names.values()}:
        equal(after[key], before[key])
    assert not [*pathlib.Path().glob(".transformer_embed-*")]
    # One file for each tensor, and the index.
    files = [*pathlib.Path().glob("*.safetensors*")]
    assert len(files) == (1 if form is checkpoint else len(before) + 1)


def test_added_rows_are_left_out_and_tied_copies_are_replaced():
    """A tied output layer may be stored as well, as a tensor of equal values."""
    case = HEADS["qwen2, tied"]
    table = tensors_of(case)["model.embed_tokens.weight"]
    checkpoint(case, change={"lm_head.weight": table})
    found = load_embedder(".", row_multiple=8)
    assert found.config.output.tied
    assert found.config.rows > found.config.vocab_size
    save_into(".", found.config, trained(found), found.names)
    after = stored()
    equal(after["model.embed_tokens.weight"], table * 2 + 1)
    equal(after["lm_head.weight"], table * 2 + 1)
    assert load_embedder(".").config.output.tied


def test_a_write_that_fails_leaves_the_old_checkpoint(monkeypatch):
    case = CASES["gpt2"]
    sharded(case)
    found = load_embedder(".")
    before = {path: path.read_bytes() for path in pathlib.Path().iterdir()}
    calls = []

    def write(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("no space left")

    monkeypatch.setattr(replacing, "_write", write)
    with pytest.raises(OSError, match="no space left"):
        save_into(".", found.config, trained(found), found.names)
    assert {path: path.read_bytes() for path in pathlib.Path().iterdir()} == before


def resized(name):
    """A model with one more id."""
    found = load(name)
    config = te.EmbedderConfig(**{**vars(found.config), "vocab_size": found.config.vocab_size + 1})
    params = te.pretrained.resize(found.params, found.config, config, rng=jax.random.key(0))
    save_into(".", config, params, found.names)


def named(**names):
    found = load("gpt2")
    save_into(".", found.config, found.params, names)


REFUSED = {
    "resized('gpt2')": "ValueError: params: transformer.wte.weight: its size: wanted as in the file, ",
    "named(x='y')": "ValueError: names: wanted a parameter's path",
    "named(**{'token_embedding/embeddings': 'y'})": "ValueError: ...model.safetensors: wanted a tensor y, got",
}  # fmt: skip


def test_wrong_parameters_and_names_are_refused():
    each_raises(REFUSED, globals())
    assert np.all(np.isfinite(stored()["transformer.wte.weight"]))
