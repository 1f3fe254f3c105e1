"""Writes the README's pictures, of an error, of a mask and of speeds, and the table of the page
Performance. Speeds are from one file, which `input_layer.py --only eval train grad --json
RESULTS.json` writes.

Usage: python tests/benchmarks/chart.py [RESULTS.json]
"""

import hashlib
import json
import re
import sys
from pathlib import Path

import matplotlib.style
import numpy as np
from harness import markdown_table, parser_of
from matplotlib.figure import Figure
from peers import float32_waves

import transformer_embed as te

sys.path.insert(0, str(Path(__file__).parents[1]))
import oracle

PAGES = Path(__file__).parents[2] / "notebooks"
RESULTS = Path(__file__).parent / "speed.json"
CHART, PAGE = PAGES / "pictures" / "speed.png", PAGES / "performance.md"
OURS, PACKAGE = "ours", "transformer_embed"
CASES = {
    "eval": "evaluation",
    "train": "forward pass in training (dropout 0.1)",
    "grad": "forward and backward pass in training",
}
OUR_COLOR, OTHER_COLOR = "#0072B2", "#B0B0B0"
# For places 270 pixels wide in the README: text of 10 points in 4 or 5 inches.
INCHES, PIXELS_WIDE = (4.0, 3.0), 960


def samples(results, case):
    """Milliseconds of each line that was timed, one a round, and the median over the rounds of its
    time divided by ours."""
    timed = results["cases"][case]["samples"].items()
    times = {name.removesuffix(", ms"): np.asarray(each) for name, each in timed}
    return {name: (each, float(np.median(each / times[OURS]))) for name, each in times.items()}


def table(results):
    """Median milliseconds of each line in each case, with the ratio to ours in parentheses."""
    rows = {}
    for case in CASES:
        for name, (times, ratio) in samples(results, case).items():
            cell = f"{np.median(times):.1f}"
            cell = cell if name == OURS else f"{cell} ({ratio:.2f})"
            rows.setdefault("**this package**" if name == OURS else name, []).append(cell)
    return markdown_table(["", *CASES.values()], [[name, *cells] for name, cells in rows.items()])


def digest(results):
    """What the chart's file says about where its numbers are from."""
    return hashlib.sha256(json.dumps(results["cases"], sort_keys=True).encode()).hexdigest()


def new_figure(title, width=INCHES[0]):
    """A figure of as many pixels at any width."""
    figure = Figure((width, 0.75 * width), layout="constrained", dpi=PIXELS_WIDE / width)
    figure.suptitle(title, fontsize="large", wrap=True)
    return figure


def draw_error():
    """The error of sinusoidal positions, and that of the usual float32 product."""
    figure = new_figure("error of sinusoidal positions (d_model 64, base 10,000)", 5.0)
    positions = np.geomspace(1, 2**31 - 1, 100, dtype=np.int64)
    exact = np.array([oracle.encoding(int(position), 64) for position in positions], float)
    waves = np.stack(float32_waves(positions.astype(np.float32), 32, 10_000.0), -1)
    encodings = {PACKAGE: te.sinusoidal_encoding(positions, 64), "float32 product": waves}
    ax = figure.subplots()
    for (name, encoding), color in zip(encodings.items(), (OUR_COLOR, "#D55E00"), strict=True):
        error = np.abs(np.asarray(encoding).reshape(exact.shape) - exact).max(1)
        ax.plot(positions, error, marker="o", markersize=3, linewidth=1, color=color, label=name)
    # Half of the distance of float32 numbers just below 1.
    ax.axhline(2.0**-25, color="black", linestyle=":", linewidth=1, label="rounding to float32")
    ax.set(xlabel="position (tokens)", ylabel="largest error of any channel")
    ax.set(xscale="log", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return figure


def draw_mask():
    """A causal mask with a window and a prefix."""
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "slept"]
    tokens = te.TokenPositions.from_offset(0, 8).with_block_ids([0] * 4 + [-1] * 4)
    figure = new_figure("causal mask, window: 2 back, prefix of 4")
    mask = te.AttentionMask(tokens, causal=True, window=(2, 0)).dense()
    te.plots.plot_mask(mask, ax=figure.subplots(), query_tokens=words, key_tokens=words)
    return figure


def draw(results):
    """A bar for each line's forward and backward pass."""
    times = {name: ratio for name, (_, ratio) in samples(results, "grad").items()}
    times = dict(sorted(times.items(), key=lambda item: item[1]))
    figure = new_figure("input layer, forward and backward")
    ax = figure.subplots()
    colors = [OUR_COLOR if name == OURS else OTHER_COLOR for name in times]
    names = [PACKAGE if name == OURS else name for name in times]
    bars = ax.barh(names, list(times.values()), color=colors)
    ax.bar_label(bars, [f"{time:.1f}" for time in times.values()], padding=3)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    ax.set(xlabel=f"time / {PACKAGE}'s\n({results['machine']['cpus']} CPU cores, float32)")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def main():
    """Writes the chart, whatever the user's style, and the table; equal results give equal files."""
    parser = parser_of(__doc__)
    help = "written by input_layer.py --json (default: the results in this folder)"
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS, help=help)
    results = json.loads(parser.parse_args().results.read_text(encoding="utf-8"))
    with matplotlib.style.context("default"):
        metadata = {"Software": None, "Source": digest(results)}
        draw(results).savefig(CHART, format="png", metadata=metadata)
        for name, drawn in {"error": draw_error(), "mask": draw_mask()}.items():
            drawn.savefig(CHART.with_stem(name), format="png")
    page, new = PAGE.read_text(encoding="utf-8"), table(results) + "\n"
    header = r"(?m)^\| +\| evaluation \| forward pass.*\n(\|.*\n)+"
    page, count = re.subn(header, lambda _: new, page)
    if count != 1:
        parser.error(f"wanted one table of the input layer in {PAGE}, found {count}")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
