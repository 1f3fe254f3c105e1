"""Draws the times of `input_layer.py --json RESULTS.json` as bars: how many times as long as ours
each library's input layer takes.

Usage: python tests/benchmarks/chart.py RESULTS.json --out notebooks/pictures/speed.png [--case
    grad]
"""

import argparse
import json
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure

OURS, PACKAGE = "ours", "transformer_embed"
TITLES = {
    "eval": "forward, evaluation",
    "train": "forward, training",
    "grad": "forward and backward",
}
OUR_COLOR, OTHER_COLOR = "#0072B2", "#B0B0B0"
# For a place 270 pixels wide in the README: text of 10 points in 4 inches.
INCHES, PIXELS_WIDE = (4.0, 3.0), 960


def ratios(results: dict, case: str) -> dict[str, float]:
    """Of each line that was timed, the median over the rounds of its time divided by ours, the
    fastest first."""
    samples = {
        name.removesuffix(", ms"): np.asarray(times)
        for name, times in results["cases"][case]["samples"].items()
    }
    if OURS not in samples:
        raise SystemExit(
            f"the case {case} has no line '{OURS}'; run input_layer.py with --only {case}"
        )
    medians = {name: float(np.median(times / samples[OURS])) for name, times in samples.items()}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


def draw(results: dict, case: str) -> Figure:
    """A bar for each line."""
    times = ratios(results, case)
    figure = Figure(INCHES, layout="constrained", dpi=PIXELS_WIDE / INCHES[0])
    ax = figure.subplots()
    bars = ax.barh(
        [PACKAGE if name == OURS else name for name in times],
        list(times.values()),
        color=[OUR_COLOR if name == OURS else OTHER_COLOR for name in times],
    )
    ax.bar_label(bars, [f"{time:.1f}" for time in times.values()], padding=3)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    ax.set(xlabel=f"time / {PACKAGE}'s\n({results['machine']['cpus']} CPU cores, float32)")
    ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"input layer, {TITLES[case]}", fontsize="large")
    return figure


def main() -> None:
    """Writes the picture, whatever the user's style; equal results give equal files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "results", type=Path, metavar="RESULTS.json", help="written by input_layer.py --json"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="X.png", help="picture to write")
    parser.add_argument(
        "--case", choices=TITLES, default="grad", help="which case to draw (default: %(default)s)"
    )
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text(encoding="utf-8"))
    if arguments.case not in results["cases"]:
        parser.error(
            f"{arguments.results} has no case {arguments.case}; it has {', '.join(results['cases'])}"
        )
    with matplotlib.style.context("default"):
        draw(results, arguments.case).savefig(
            arguments.out, format="png", metadata={"Software": None}
        )


if __name__ == "__main__":
    main()
