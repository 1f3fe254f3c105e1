"""Times training steps of large tables by rows beside the dense step of optax and beside PyTorch's
SparseAdam, interleaved.

Usage: python tests/benchmarks/rows.py [--rounds N] [--json OUT.json] [--only CASE ...]
"""

import itertools
from collections.abc import Callable

import jax
import numpy as np
from harness import Report, interleave, run, timing_report
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
    compiled = [step.lower(*step_arguments(ROWS)).compile() for step in steps.values()]
    ours, dense = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    report.notes.append(f"compiled temporaries: {ours / 1e6:.1f} MB and {dense / 1e6:.1f} MB")
    return report


def against_torch(rounds: int) -> Report:
    """The same steps in PyTorch, which also updates the rows of the batch alone."""
    title = f"{TITLE}, beside PyTorch"
    try:
        calls = {OURS: stepping(row_step, ROWS), TORCH: torch_line()}
    except ImportError as error:
        return Report(title, ["line"], notes=[f"not timed: {TORCH} ({error})"])
    tables = [np.asarray(jax.tree.leaves(call())[0])[:1000] for call in calls.values()]
    # Both took the same step, of at most 1e-3 a coordinate, on values below 8.
    np.testing.assert_allclose(*tables, rtol=0, atol=1e-5)
    return timing_report(title, interleave(calls, rounds, "PyTorch", STEPS), (OURS,))


def against_vocabulary(rounds: int) -> Report:
    """The same batch in a small and in a large table: what is left is the latency of memory."""
    sizes = {f"{OURS}, table [{rows}, {NARROW}]": rows for rows in (10**5, 10**7)}
    calls = {name: stepping(row_step, rows, NARROW) for name, rows in sizes.items()}
    samples = interleave(calls, rounds, "vocabulary", STEPS)
    return timing_report("Adam by rows, two vocabularies", samples, [*sizes])


CASES = {"dense": against_dense, "torch": against_torch, "vocabulary": against_vocabulary}

if __name__ == "__main__":
    run(__doc__, CASES, ("jax", "optax", "torch", "numpy"), 30)
