"""The commands behind the README's figures run, and find what they promise."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import oracle
import pytest

ROOT = Path(__file__).parents[1]


RESULTS = {
    "machine": {"cpus": 2},
    "cases": {
        "grad": {
            "samples": {
                "Flax, ms": [9.0, 8.0, 7.0],
                "ours, ms": [4.0, 2.0, 3.0],
                "bare gather, ms": [2.0, 1.0, 1.5],
            }
        }
    },
}


def test_the_chart_of_speeds_is_drawn_from_the_results(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    chart = importlib.import_module("chart")
    assert chart.ratios(RESULTS, "grad") == {"bare gather": 0.5, "ours": 1.0, "Flax": 7 / 3}
    ax = chart.draw(RESULTS, "grad").axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "bare gather",
        "transformer_embed",
        "Flax",
    ]
    assert [text.get_text() for text in ax.texts] == ["0.5", "1.0", "2.3"]
    results, out = tmp_path / "speed.json", tmp_path / "speed.png"
    results.write_text(json.dumps(RESULTS))
    monkeypatch.setattr(sys, "argv", ["chart.py", str(results), "--out", str(out)])
    chart.main()
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_accuracy():
    command = [
        sys.executable,
        "tests/benchmarks/accuracy.py",
        "--positions=20",
        "--d-model=8",
        "--head-dim=4",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    rows = re.findall(r"\| (\d\.\de[-+]\d\d) \| (\d\.\de[-+]\d\d) \|$", printed, re.MULTILINE)
    ours, theirs = (max(float(row[which]) for row in rows) for which in (0, 1))
    assert len(rows) == 12
    assert ours <= oracle.MAX_ERROR
    assert theirs > 1
