"""Times training steps of large tables by rows beside the dense step of optax and beside PyTorch's
SparseAdam, interleaved.

Usage: python tests/benchmarks/rows.py [--rounds N] [--json OUT.json] [--only CASE ...]
"""

import itertools
from collections.abc import Callable

import jax
import numpy as np
from harness import Report, interleave, ratio, run, timing_report
from programs import (
    BATCHES,
    ROWS,
    STEP_IDS,
    WIDTH,
    below,
    dense_step,
    drawn,
    row_step,
    step_arguments,
    stepping,
)

# One after another, as in training.
STEPS = 4
NARROW = 32
OURS, DENSE, TORCH = "rows", "dense optax", "PyTorch SparseAdam"
TITLE = f"Adam by rows, table [{ROWS}, {WIDTH}], {STEP_IDS} ids"


def torch_line() -> Callable:
    import torch  # noqa: PLC0415

    table, weights = (
        torch.tensor(np.asarray(each)) for each in jax.tree.leaves(drawn(step_arguments(ROWS)[::3]))
    )
    embed = torch.nn.Embedding(ROWS, WIDTH, sparse=True, _weight=table)
    optimizer = torch.optim.SparseAdam(embed.parameters(), lr=1e-3)
    batches = itertools.cycle(torch.tensor(below(ROWS, BATCHES, STEP_IDS)))

    def call():
        optimizer.zero_grad()
        (embed(next(batches)) * weights).sum().backward()
        optimizer.step()
        return embed.weight.detach().numpy()

    return call


def against_dense(rounds: int) -> Report:
    """Each step's time and temporaries at one large vocabulary."""
    steps = {OURS: row_step, DENSE: dense_step}
    calls = {name: stepping(step, ROWS) for name, step in steps.items()}
    samples = interleave(calls, rounds, "dense", STEPS)
    report = timing_report(f"{TITLE}, beside optax", samples, (OURS, DENSE))
    report.hold("dense optax step / row step", ratio(samples, DENSE, OURS), least=12)
    compiled = [step.lower(*step_arguments(ROWS)).compile() for step in steps.values()]
    ours, dense = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    report.hold("compiled temporaries, row step / dense step", ours / dense, most=1 / 12)
    report.notes.append(f"compiled temporaries: {ours / 1e6:.1f} MB and {dense / 1e6:.1f} MB")
    return report


def against_torch(rounds: int) -> Report:
    """The same steps in PyTorch, which also updates the rows of the batch alone."""
    title, what = f"{TITLE}, beside PyTorch", "PyTorch's SparseAdam / row step"
    try:
        calls = {OURS: stepping(row_step, ROWS), TORCH: torch_line()}
    except ImportError as error:
        report = Report(title, ["line"], notes=[f"not timed: {TORCH} ({error})"])
        report.hold(what, np.nan, least=1.0)
        return report
    tables = [np.asarray(jax.tree.leaves(call())[0])[:1000] for call in calls.values()]
    # Both took the same step, of at most 1e-3 a coordinate, on values below 8.
    np.testing.assert_allclose(*tables, rtol=0, atol=1e-5)
    samples = interleave(calls, rounds, "PyTorch", STEPS)
    report = timing_report(title, samples, (OURS,))
    report.hold(what, ratio(samples, TORCH, OURS), least=1.0)
    return report


def against_vocabulary(rounds: int) -> Report:
    """The same batch in a small and in a large table: what is left is the latency of memory."""
    sizes = {f"{OURS}, table [{rows}, {NARROW}]": rows for rows in (10**5, 10**7)}
    calls = {name: stepping(row_step, rows, NARROW) for name, rows in sizes.items()}
    samples = interleave(calls, rounds, "vocabulary", STEPS)
    report = timing_report("Adam by rows, two vocabularies", samples, [*sizes])
    small, large = sizes
    report.hold("row step, large / small vocabulary", ratio(samples, large, small), most=1.6)
    return report


CASES = {"dense": against_dense, "torch": against_torch, "vocabulary": against_vocabulary}

if __name__ == "__main__":
    run(__doc__, CASES, ("jax", "optax", "torch", "numpy"), 30)
