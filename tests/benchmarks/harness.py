"""Interleaved timing, paired ratios, Markdown tables, and files that are written whole or not at
all."""

import dataclasses
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

Samples = Mapping[str, np.ndarray]


@dataclasses.dataclass
class Report:
    """What one case found: a table, remarks under it, and the figures that targets are held
    against."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def markdown(self) -> str:
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"\n## {self.title}\n\n{markdown_table(self.columns, self.rows)}" + (
            "\n" + notes if notes else ""
        )


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def interleave(
    calls: Mapping[str, Callable[[], Any]], rounds: int, label: str, repeats: int = 1
) -> Samples:
    """Milliseconds a call, one sample a round and line; every round takes the lines in another
    order."""
    order = list(calls)
    samples = {name: [] for name in order}
    shuffle = random.Random(0).shuffle
    for _ in tqdm(range(rounds), desc=label, leave=False):
        shuffle(order)
        for name in order:
            samples[name].append(_milliseconds(calls[name], repeats))
            _settle()
    return {name: np.array(values) for name, values in samples.items()}


def _settle() -> None:
    """Waits, at most 0.5 s, until other threads have been idle for 20 ms: a line must not pay for
    memory that another gives back.

    It keeps its own processor busy meanwhile, for one that slept is slow at first.
    """
    end, idle = time.perf_counter() + 0.5, 0
    while idle < 4 and time.perf_counter() < end:
        before, soon = _of_other_threads(), time.perf_counter() + 0.005
        while time.perf_counter() < soon:
            pass
        idle = idle + 1 if _of_other_threads() - before < 0.0005 else 0


def _of_other_threads() -> float:
    return time.process_time() - time.thread_time()


def _milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Until the results are there; that the memory of the last one is given back is not counted."""
    start = time.perf_counter()
    for _ in range(repeats):
        result = jax.block_until_ready(call())
    elapsed = time.perf_counter() - start
    del result
    return 1e3 * elapsed / repeats


def ratio(samples: Samples, line: str, by: str) -> float:
    """The median over the rounds of one line's time by another's; NaN where either was not
    timed."""
    if line not in samples or by not in samples:
        return float("nan")
    return float(np.median(samples[line] / samples[by]))


def timing_report(
    title: str,
    samples: Samples,
    references: Sequence[str],
    skipped: Mapping[str, str],
    unit: str = "ms",
) -> Report:
    """Medians, and each line's paired ratio to each reference."""
    report = Report(
        title, ["line", f"median, {unit}", *(f"/ {reference}" for reference in references)]
    )
    for name, times in samples.items():
        ratios = [f"{ratio(samples, name, reference):.2f}" for reference in references]
        report.rows.append(
            [name, f"{np.median(times) * (1e3 if unit == 'us' else 1):.4g}", *ratios]
        )
        report.samples[f"{name}, ms"] = [float(value) for value in times]
    report.notes += not_timed(skipped)
    return report


def not_timed(skipped: Mapping[str, str]) -> list[str]:
    return [f"not timed: {name} ({reason})" for name, reason in skipped.items()]


def seconds_in_fresh_processes(programs: Mapping[str, str], repeats: int, label: str) -> Samples:
    """Each program prints a number of seconds; they alternate, and a first run of each, which fills
    the caches of files, is dropped."""
    samples = {name: [] for name in programs}
    for repeat in tqdm(range(repeats + 1), desc=label, leave=False):
        for name, program in programs.items():
            output = subprocess.run(
                [sys.executable, "-c", program], check=True, capture_output=True, text=True
            ).stdout
            if repeat:
                samples[name].append(1e3 * float(output.split()[-1]))
    return {name: np.array(values) for name, values in samples.items()}


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """The machine and the versions of what is installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "versions": versions,
    }


def write_whole(path: Path, value: Any) -> None:
    """As JSON, beside the file, then in its place."""
    text = json.dumps(value, indent=1, allow_nan=False)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
