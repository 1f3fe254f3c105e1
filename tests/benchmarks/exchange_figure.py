"""Draws what each device sends in a training step, against the number of devices, and who sends
what in an exchange of rows.

Usage: PYTHONPATH=. python tests/benchmarks/exchange_figure.py OUT.png
"""

import sys

import matplotlib.pyplot as plt
import sharding

VOCAB_SIZE, DEVICES = 10**8, [2**i for i in range(13)]
NAMES = {
    "sharded": "dense gradient, sharded",
    "by rows": "by replicated rows",
    "by exchange": "by exchanged rows",
}


def draw_bytes(axes):
    """Three ways, each on its best mesh, whether or not the table fits."""
    for (way, name), marker in zip(NAMES.items(), "so^", strict=True):
        sent = [
            min(
                sharding.WAYS[way](VOCAB_SIZE, count // shards, shards)
                for shards in _divisors(count)
            )
            for count in DEVICES
        ]
        axes.plot(
            DEVICES[1:], [each / 1e6 for each in sent[1:]], marker=marker, markersize=4, label=name
        )
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="MB sent by a device in a step")
    axes.set_title(
        f"{VOCAB_SIZE:.0e} rows of {sharding.WIDTH} float32, {sharding.IDS} ids a device",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _divisors(count):
    return [2**i for i in range(count.bit_length()) if count % 2**i == 0]


def draw_exchange(axes):
    """Two devices: ids to the owners, rows back, gradients to the owners."""
    lanes = [
        ("distinct ids", 2.6, 1, "C0"),
        ("rows", 1.6, -1, "C1"),
        ("gradients of rows", 0.6, 1, "C2"),
    ]
    for x, label in (
        (0, "device a\n\nits part of the batch:\nids 7, 2, 7\n\nreads rows 2 and 7"),
        (3, "device b\n\nowns rows 2 and 7,\nand their optimizer state\n\nsums repeats, updates"),
    ):
        axes.text(
            x,
            1.6,
            label,
            ha="center",
            va="center",
            bbox={"boxstyle": "round,pad=0.8", "fc": "white", "ec": "0.4"},
            fontsize=9,
        )
    for label, y, way, color in lanes:
        start, end = (0.75, 2.2) if way > 0 else (2.2, 0.75)
        axes.annotate(
            "", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 2}
        )
        axes.text(1.47, y + 0.12, label, ha="center", color=color, fontsize=9)
    axes.set(xlim=(-0.9, 3.9), ylim=(0, 3.3))
    axes.set_title("every device is both: three all-to-alls a step", fontsize=10)
    axes.axis("off")


def main():
    """Writes the picture."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    draw_exchange(left)
    draw_bytes(right)
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
