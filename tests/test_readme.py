"""The README and the pages of the documentation: their Python blocks run, in order, each document in a namespace of its own."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    path for path in [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.md"))] if "```python\n" in path.read_text(encoding="utf-8")
]


def blocks_of(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_python_blocks_run(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in blocks_of(path):
        exec(compile(block, f"{path.name}: {block.splitlines()[0]}", "exec"), namespace)
