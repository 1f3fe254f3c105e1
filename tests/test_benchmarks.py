"""The commands behind the README's figures run, and find what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import oracle

ROOT = Path(__file__).parents[1]


def test_accuracy():
    command = [sys.executable, "tests/benchmarks/accuracy.py", "--positions=20", "--d-model=8", "--head-dim=4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"\| (\d\.\de[-+]\d\d) \| (\d\.\de[-+]\d\d) \|$", printed, re.MULTILINE)
    ours, theirs = (max(float(row[which]) for row in rows) for which in (0, 1))
    assert len(rows) == 12
    assert ours <= oracle.MAX_ERROR
    assert theirs > 1
