"""Runs the README's examples, in order, in one namespace."""

import re
from pathlib import Path

import transformer_embed

README = Path(__file__).parents[1] / "README.md"


def test_examples_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["train"].shape == namespace["x"].shape == (2, 5, 64)
    assert namespace["logits"].shape == (2, 5, 256)
    assert namespace["many"].shape == (3, 2, 5, 64)
    assert namespace["step_x"].shape == (2, 1, 64)
    assert namespace["step_mask"].shape == (2, 1, 1, 8)
    assert namespace["mask"].shape == (1, 1, 6, 6)
    assert namespace["bias"].shape == (1, 8, 6, 6)
    assert namespace["pretrained"].config == namespace["config"]
    assert {path.name for path in tmp_path.iterdir()} == {"mine.safetensors", "again.safetensors"}
    assert namespace["query"].shape == (1, 6, 8, 64)


def test_every_public_name_is_in_it():
    text = README.read_text()
    assert [name for name in transformer_embed.__all__ if name not in text] == []
