"""Times training steps of large tables by rows beside the dense step of optax and beside PyTorch's
SparseAdam, interleaved.

Usage: python tests/benchmarks/rows.py [--rounds N] [--json OUT.json] [--only CASE ...]
"""

import itertools

import jax
import numpy as np
import programs
from harness import Report, interleave, run, timing_report
from programs import BATCHES, ROWS, STEP_IDS, WIDTH, stepping

# One after another, as in training.
STEPS = 4
OURS, DENSE, TORCH = "rows", "dense optax", "PyTorch SparseAdam"


def torch_line():
    import torch  # noqa: PLC0415

    drawn = jax.tree.leaves(programs.drawn(programs.step_arguments(ROWS)[::3]))
    table, weights = (torch.tensor(np.asarray(each)) for each in drawn)
    embed = torch.nn.Embedding(ROWS, WIDTH, sparse=True, _weight=table)
    optimizer = torch.optim.SparseAdam(embed.parameters(), lr=1e-3)
    batches = itertools.cycle(torch.tensor(programs.below(ROWS, BATCHES, STEP_IDS)))

    def call():
        optimizer.zero_grad()
        (embed(next(batches)) * weights).sum().backward()
        optimizer.step()
        return embed.weight.detach().numpy()

    return call


def against_dense(rounds):
    """Each step's time and temporaries at one large vocabulary."""
    steps = {OURS: programs.row_step, DENSE: programs.dense_step}
    calls = {name: stepping(step, ROWS) for name, step in steps.items()}
    report = report_of("beside optax", calls, rounds)
    for name, step in steps.items():
        compiled = step.lower(*programs.step_arguments(ROWS)).compile()
        megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
        report.notes.append(f"temporaries of {name}: {megabytes:.1f} MB")
    return report


def against_torch(rounds):
    """The same steps in PyTorch, which also updates the rows of the batch alone."""
    try:
        calls = {OURS: stepping(programs.row_step, ROWS), TORCH: torch_line()}
    except ImportError as error:
        return Report("Adam by rows", ["line"], notes=[f"not timed: {TORCH} ({error})"])
    tables = [np.asarray(jax.tree.leaves(call())[0])[:1000] for call in calls.values()]
    # Both took the same step, of at most 1e-3 a coordinate, on values below 8.
    np.testing.assert_allclose(*tables, rtol=0, atol=1e-5)
    return report_of("beside PyTorch", calls, rounds)


def against_vocabulary(rounds):
    """The same batch in a small and in a large table: what is left is the latency of memory."""
    sizes = {f"table [{rows}, 32]": rows for rows in (10**5, 10**7)}
    calls = {name: stepping(programs.row_step, rows, 32) for name, rows in sizes.items()}
    return report_of("two vocabularies", calls, rounds)


def report_of(what, calls, rounds):
    title = f"Adam by rows, {STEP_IDS} ids, {what}"
    return timing_report(title, interleave(calls, rounds, what, STEPS), [*calls])


CASES = {"dense": against_dense, "torch": against_torch, "vocabulary": against_vocabulary}

if __name__ == "__main__":
    run(__doc__, CASES, ("jax", "optax", "torch", "numpy"), 30)
