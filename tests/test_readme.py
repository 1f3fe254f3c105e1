"""Runs the README's examples, in order, in one namespace."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["train"].shape == namespace["x"].shape == (2, 5, 64)
    assert namespace["logits"].shape == (2, 5, 256)
    assert namespace["many"].shape == (3, 2, 5, 64)
    assert namespace["step"].shape == (2, 1, 64)
    assert namespace["step_mask"].shape == (2, 1, 1, 8)
    assert namespace["mask"].shape == (2, 1, 5, 5)
