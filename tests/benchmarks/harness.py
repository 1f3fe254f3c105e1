"""The command of a benchmark, interleaved timing, paired ratios, and Markdown tables."""

import argparse
import dataclasses
import json
import os
import platform
import random
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

Samples = Mapping[str, np.ndarray]


@dataclasses.dataclass
class Report:
    """What one case found: a table, remarks under it, and the times."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def markdown(self):
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"\n## {self.title}\n\n{markdown_table(self.columns, self.rows)}\n{notes}"


def markdown_table(columns, rows):
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def interleave(calls, rounds, label, repeats=1):
    """Milliseconds a call, one sample a round and line; every round takes the lines in another
    order."""
    jax.block_until_ready([call() for call in calls.values()])
    order = list(calls)
    samples = {name: [] for name in order}
    shuffle = random.Random(0).shuffle
    for _ in tqdm(range(rounds), desc=label, leave=False):
        shuffle(order)
        for name in order:
            samples[name].append(_milliseconds(calls[name], repeats))
            _settle()
    return {name: np.array(values) for name, values in samples.items()}


def _settle():
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


def _of_other_threads():
    return time.process_time() - time.thread_time()


def _milliseconds(call, repeats):
    """Until the results are there; that the memory of the last one is given back is not counted."""
    start = time.perf_counter()
    for _ in range(repeats):
        result = jax.block_until_ready(call())
    elapsed = time.perf_counter() - start
    del result
    return 1e3 * elapsed / repeats


def ratio(samples, line, by):
    """The median over the rounds of one line's time by another's."""
    return float(np.median(samples[line] / samples[by]))


def timing_report(title, samples, references):
    """Medians, and each line's paired ratio to each reference."""
    report = Report(title, ["line", "median, ms", *(f"/ {name}" for name in references)])
    for name, times in samples.items():
        ratios = [f"{ratio(samples, name, reference):.2f}" for reference in references]
        report.rows.append([name, f"{np.median(times):.4g}", *ratios])
        report.samples[f"{name}, ms"] = times.tolist()
    return report


def print_machine(packages, what):
    """The machine, and the versions of what is installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    where = f"{os.cpu_count()} CPUs, {platform.platform()}, jax on {jax.default_backend()}"
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{where}, {what}\n\n{names}\n", flush=True)
    return {"cpus": os.cpu_count(), "platform": platform.platform(), "versions": versions}


def parser_of(document):
    return argparse.ArgumentParser(description=document.split("\n\n", maxsplit=1)[0])


def run(
    document,
    cases,
    packages,
    rounds,
):
    """The command of a benchmark: a Markdown table a case."""
    parser = parser_of(document)
    parser.add_argument("--rounds", type=int, default=rounds, help="a case (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all samples and tables here")
    parser.add_argument(
        "--only", nargs="+", choices=cases, default=list(cases), metavar="CASE",
        help=f"some of: {', '.join(cases)}",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.json:
        # Fails now rather than after all rounds.
        arguments.json.touch()
    machine = print_machine(packages, f"{arguments.rounds} rounds")
    reports = {}
    for name in tqdm(arguments.only, desc="cases"):
        reports[name] = cases[name](arguments.rounds)
        tqdm.write(reports[name].markdown(), file=sys.stdout)
        sys.stdout.flush()
    if arguments.json:
        found = {name: dataclasses.asdict(report) for name, report in reports.items()}
        found = {"machine": machine, "rounds": arguments.rounds, "cases": found}
        arguments.json.write_text(json.dumps(found, indent=1))
