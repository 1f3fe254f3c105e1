"""The commands behind the README's figures run, and find what they promise."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest

ROOT = Path(__file__).parents[1]


SAMPLES = {
    "Flax, ms": [9.0, 8.0, 7.0],
    "ours, ms": [4.0, 2.0, 3.0],
    "bare gather, ms": [2.0, 1.0, 1.5],
}
RESULTS = {
    "machine": {"cpus": 2},
    "cases": {case: {"samples": SAMPLES} for case in ("eval", "train", "grad")},
}
TABLE = """\
|  | evaluation | forward pass in training (dropout 0.1) | forward and backward pass in training |
| --- | --- | --- | --- |
| Flax | 8.0 (2.33) | 8.0 (2.33) | 8.0 (2.33) |
| **this package** | 3.0 | 3.0 | 3.0 |
| bare gather | 1.5 (0.50) | 1.5 (0.50) | 1.5 (0.50) |
"""


@pytest.fixture
def chart(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    return importlib.import_module("chart")


@pytest.mark.slow
def test_the_chart_and_the_table_of_speeds_are_made_from_the_same_results(
    chart, monkeypatch, tmp_path
):
    ax = chart.draw(RESULTS).axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["bare gather", "transformer_embed", "Flax"]
    assert [text.get_text() for text in ax.texts] == ["0.5", "1.0", "2.3"]
    for name in ("RESULTS", "CHART", "PAGE"):
        monkeypatch.setattr(chart, name, tmp_path / name)
    chart.RESULTS.write_text(json.dumps(RESULTS))
    chart.PAGE.write_text(f"before\n\n{TABLE.replace('| Flax', '| Keras')}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["chart.py", str(chart.RESULTS)])
    chart.main()
    assert chart.PAGE.read_text() == f"before\n\n{TABLE}\nafter\n"
    assert source(chart.CHART) == chart.digest(RESULTS)


@pytest.mark.slow
def test_the_chart_and_the_table_of_the_documentation_are_of_the_stored_results(chart):
    results = json.loads(chart.RESULTS.read_text())
    assert f"\n{chart.table(results)}\n" in chart.PAGE.read_text()
    assert source(chart.CHART) == chart.digest(results)


def source(picture):
    image = pytest.importorskip("PIL.Image").open(picture)
    return image.text["Source"]


def printed_by(*command):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *command]
    return subprocess.check_output(command, cwd=ROOT, env=environment, text=True)


@pytest.mark.gate
def test_accuracy():
    printed = printed_by("tests/benchmarks/accuracy.py", "--positions=20", "--d-model=8")
    rows = re.findall(r"\| (\d\.\de[-+]\d\d) \| (\d\.\de[-+]\d\d) \|$", printed, re.MULTILINE)
    ours, theirs = np.max(np.array(rows, float), axis=0)
    assert len(rows) == 4
    assert ours <= oracle.MAX_ERROR
    assert theirs > 1


@pytest.mark.gate
def test_two_checkouts_in_one_process():
    """Here the other one is this one too."""
    printed = printed_by("tests/benchmarks/versions.py", ".", "--rounds=2", "--only=tile")
    times = r"\| [\d.]+ \| [\d.]+ \| \d\.\d{3} \| [\d.]+ to [\d.]+ \|\n$"
    assert re.search(rf"\| tile {times}", printed)
